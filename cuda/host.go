package cuda

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/klauspost/cpuid/v2"

	"helios/cuda/internal/region"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/simd"
)

// ErrClosed is the answer of a closed device, stream or event.
var ErrClosed = errors.New("closed")

// ErrStillRuns is the answer of a stream's Close when its work has not ended in time.
var ErrStillRuns = errors.New("still runs")

// HostOptions shape a host device.
type HostOptions struct {
	SMs          int           // worker slots: blocks that run at one time; 0 = one per CPU
	Kernels      simd.Level    // instructions of its kernels; 0 = the best of this machine
	MemLimit     int64         // bytes of MemDevice memory; 0 = the machine's memory
	QueueDepth   int           // work waiting on one stream before an enqueue blocks; 0 = 4096
	QueueTimeout time.Duration // how long an enqueue blocks on a full stream; 0 = a minute
	CloseTimeout time.Duration // how long Close waits for running kernels; 0 = ten seconds
}

// Host is a device made of goroutines. A stream is an ordered queue with a goroutine of its own,
// an SM is a worker slot, and a thread block is a call of a Go function that holds a slot while
// it runs. See sched.go for who gets a slot.
type Host struct {
	info    Info
	opt     HostOptions
	sched   scheduler
	regions region.Table
	closed  atomic.Bool

	memMu    sync.Mutex
	buffers  map[*hostBuffer]struct{}
	usage    map[string]int64
	devBytes int64

	streamMu sync.Mutex
	streams  map[*hostStream]struct{}
}

var _ Device = (*Host)(nil)

// NewHost opens a host device. Several may be open at one time; each has its own slots.
func NewHost(opt HostOptions) (*Host, error) {
	if opt.SMs < 0 || opt.SMs > 4096 {
		return nil, fmt.Errorf("host device: %d SMs: want 1 to 4096, or 0 for one per CPU", opt.SMs)
	}
	if opt.MemLimit < 0 || opt.QueueDepth < 0 || opt.QueueTimeout < 0 || opt.CloseTimeout < 0 {
		return nil, errs.Errorf("host device: negative option in %+v", opt)
	}
	if opt.SMs == 0 {
		opt.SMs = runtime.NumCPU()
	}
	if opt.Kernels = opt.Kernels.Resolve(); opt.Kernels > simd.Best() {
		return nil, errs.New(errs.Capability, "host device: kernels %s: this machine has %s",
			opt.Kernels, simd.Best())
	}
	if opt.QueueDepth == 0 {
		opt.QueueDepth = 4096
	}
	if opt.QueueTimeout == 0 {
		opt.QueueTimeout = time.Minute
	}
	if opt.CloseTimeout == 0 {
		opt.CloseTimeout = 10 * time.Second
	}
	total := opt.MemLimit
	if total == 0 {
		var err error
		if total, err = hostmem.TotalBytes(); err != nil {
			return nil, fmt.Errorf("host device: %w", err)
		}
	}
	name := "host"
	if brand := strings.Join(strings.Fields(cpuid.CPU.BrandName), " "); brand != "" {
		name = "host (" + brand + ")"
	}
	h := &Host{
		info: Info{Name: name, Backend: "host", SMs: opt.SMs, MemTotal: total,
			Kernels: opt.Kernels.String()},
		opt:     opt,
		buffers: map[*hostBuffer]struct{}{},
		usage:   map[string]int64{},
		streams: map[*hostStream]struct{}{},
	}
	h.sched.init(opt.SMs, opt.Kernels)
	setOpen(h, true)
	return h, nil
}

// Info implements Device.
func (h *Host) Info() Info { return h.info }

// Kernel implements Device: a kernel that some package registered with RegisterHost.
func (h *Host) Kernel(name string) (Kernel, error) {
	k, err := lookupHost(name)
	if err != nil {
		return nil, err
	}
	return k, nil
}

// BusyWorkers is the time that each worker slot has spent running blocks. Time in which a block
// has parked is not counted.
func (h *Host) BusyWorkers() []time.Duration { return h.sched.busyTimes() }

func (h *Host) errClosed() error { return fmt.Errorf("device %s: %w", h.info.Name, ErrClosed) }

// Close implements Device. Streams still open are drained for as long as CloseTimeout and
// closed, buffers still open are freed, and both are named in the error.
func (h *Host) Close() error {
	if h.closed.Swap(true) {
		return nil
	}
	var leaks, failed []string
	h.streamMu.Lock()
	open := slices.Collect(maps.Keys(h.streams))
	h.streamMu.Unlock()
	stuck := false
	for _, s := range open {
		leaks = append(leaks, fmt.Sprintf("stream %q", s.opt.Name))
		if !s.shutdown(h.opt.CloseTimeout) {
			stuck = true
			failed = append(failed, fmt.Sprintf("stream %q still runs %s", s.opt.Name, s.running()))
			continue
		}
		h.streamMu.Lock()
		delete(h.streams, s)
		h.streamMu.Unlock()
	}
	h.memMu.Lock()
	bufs := slices.Collect(maps.Keys(h.buffers))
	h.memMu.Unlock()
	for _, b := range bufs {
		leaks = append(leaks, fmt.Sprintf("buffer %q (%d bytes)", b.purpose, b.Size()))
		if stuck {
			continue // a kernel may still use it: better to leak memory than to pull it away
		}
		if err := b.Free(); err != nil {
			failed = append(failed, err.Error())
		}
	}
	setOpen(h, false)
	h.sched.close()
	return region.CloseError(h.info.Name, leaks, failed)
}
