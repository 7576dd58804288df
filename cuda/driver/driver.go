package driver

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/cuda/internal/region"
	"helios/cuda/kernels"
	"helios/internal/errs"
)

// EnvLibrary names the environment variable with the path of the libcuda to use.
const EnvLibrary = "HELIOS_LIBCUDA"

// Options shape a device.
type Options struct {
	Library      string        // path of libcuda; "" = $HELIOS_LIBCUDA, else libcuda.so.1
	Index        int           // of the device, as the driver counts (CUDA_VISIBLE_DEVICES applies)
	QueueTimeout time.Duration // how long an enqueue blocks on a full stream; 0 = a minute
	CloseTimeout time.Duration // how long Close and Free wait for running kernels; 0 = ten seconds
	// KernelTimeout is after how long a kernel that runs, or a graph of them, is taken for one that
	// does not end: its stream and all waits fail then. 0 = two minutes, < 0 = never.
	KernelTimeout time.Duration
	// PTX has the driver compile the kernels although the binary has machine code for the GPU, as
	// CUDA_FORCE_PTX_JIT=1 in the environment does.
	PTX bool
}

// Device is a GPU. It is safe for concurrent use.
//
// It works in the device's primary context, since green contexts, which budgets are made of, are
// parts of that one (cuGreenCtxCreate: "This API will retain the primary context"). Two Devices
// of one GPU in a process therefore share a context: what kills one kills both.
//
// The driver keeps a current context for each OS thread (CUDA driver API, Context Management),
// and Go moves goroutines between threads. So every use of the library is between enter, which
// locks the goroutine to its thread and makes the context current there, and leave.
//
// Large: cuda.Device asks for a method for each kind of memory, stream and kernel, all of one
// context.
type Device struct {
	api      api
	opt      Options
	info     cuda.Info
	caps     Capabilities
	ord      ordinal
	ctx      cuContext
	cc       int // compute capability times 10
	vmmRDMA  bool
	pci      string // bus ID
	priority struct{ least, greatest int }

	life     sync.RWMutex // held for reading within a call of the library
	closing  atomic.Bool  // nothing new is made; set under memMu and streamMu
	closed   atomic.Bool
	lost     atomic.Pointer[LostError]
	hung     atomic.Pointer[TimeoutError]
	gaveBack atomic.Bool  // Close is through with the driver
	watched  atomic.Int64 // when watch last looked at all streams, Unix nanoseconds

	regions region.Table
	// of the next three; never taken under streamMu, which an error takes within it
	memMu   sync.Mutex
	pins    []*pin // by address
	buffers map[*buffer]struct{}
	usage   map[string]int64
	split   atomic.Bool // some buffer lies in more than one pin

	streamMu sync.Mutex
	streams  map[*gpuStream]struct{}
	serial   atomic.Uint64 // of event records, for the sign of Since

	modules moduleTable
	faults  faultPool
	events  eventPool // of the primary context, without times
	timed   eventPool
	soon    time.Duration // together; tests set it
	green   greenPool
	house   housekeeper
	peers   peerTable
}

var (
	_ cuda.Device      = (*Device)(nil)
	_ cuda.IORegistrar = (*Device)(nil)
	_ cuda.Sharer      = (*Device)(nil)
)

// Open opens a GPU and checks that it can run the kernels of this binary. A missing part of the
// machine is an error of class Capability with its next step.
func Open(opt Options) (*Device, error) {
	list, err := kernels.Modules()
	if err != nil {
		return nil, err
	}
	a, err := openLibrary(libraryPath(opt.Library))
	if err != nil {
		return nil, err
	}
	return open(a, opt, list)
}

func libraryPath(p string) string {
	if p == "" {
		p = os.Getenv(EnvLibrary)
	}
	return p
}

// open is Open with the parts that tests replace.
func open(a api, opt Options, list []kernels.Module) (*Device, error) {
	if opt.QueueTimeout == 0 {
		opt.QueueTimeout = time.Minute
	}
	if opt.CloseTimeout == 0 {
		opt.CloseTimeout = 10 * time.Second
	}
	if opt.KernelTimeout == 0 {
		opt.KernelTimeout = 2 * time.Minute
	}
	version, count, err := start(a)
	if err != nil {
		return nil, err
	}
	if opt.Index < 0 || opt.Index >= count {
		return nil, errs.New(errs.Capability, "no CUDA device %d: %s", opt.Index, howMany(count))
	}
	d := &Device{
		api: a, opt: opt,
		buffers: map[*buffer]struct{}{}, usage: map[string]int64{},
		streams: map[*gpuStream]struct{}{},
	}
	r := success
	if d.ord, r = a.DeviceGet(opt.Index); r != success {
		return nil, errs.With(errs.Capability, fmt.Errorf("CUDA device %d: %w", opt.Index,
			callError(a, "cuDeviceGet", r)))
	}
	rep, err := describe(a, opt.Index, d.ord, version)
	if err != nil {
		return nil, err
	}
	d.caps, d.cc, d.pci = rep.Capabilities, rep.ComputeCapability, rep.PCI
	if v, r := a.DeviceGetAttribute(attrVMMDirectRDMA, d.ord); r == success && v == 1 {
		d.vmmRDMA = true
	}
	d.info = cuda.Info{Name: fmt.Sprintf("cuda:%d (%s)", opt.Index, rep.Name), Backend: "driver",
		SMs: rep.SMs, MemTotal: rep.MemTotal, Kernels: "ptx"}
	if err := usable(a, rep, version, list); err != nil {
		return nil, err
	}
	if d.ctx, r = a.DevicePrimaryCtxRetain(d.ord); r != success {
		next := "is another process using it exclusively (\"nvidia-smi\" shows who uses it)?"
		if r == errOutOfMemory {
			next = "other processes hold its memory: end them (\"nvidia-smi\" shows who), or choose another GPU with CUDA_VISIBLE_DEVICES"
		}
		return nil, errs.With(errs.Capability, fmt.Errorf("device %s: no context: %w; %s",
			d.info.Name, callError(a, "cuDevicePrimaryCtxRetain", r), next))
	}
	if err := d.prepare(list); err != nil {
		d.closed.Store(true)
		a.DevicePrimaryCtxRelease(d.ord)
		return nil, err
	}
	return d, nil
}

// prepare sets up the parts of a device that has its context.
func (d *Device) prepare(list []kernels.Module) error {
	arch, why := chooseCode(d.cc, d.opt.PTX)
	d.modules.init(list, arch, why)
	d.events.d = d
	d.timed = eventPool{d: d, timed: true}
	d.soon = together
	d.green.d = d
	if err := d.enter(); err != nil {
		return err
	}
	var r result
	var err error
	d.priority.least, d.priority.greatest, r = d.api.CtxGetStreamPriorityRange()
	if r != success {
		err = d.failed("cuCtxGetStreamPriorityRange", r)
	}
	d.leave()
	if err == nil {
		err = d.house.init(d)
	}
	if err != nil {
		return fmt.Errorf("device %s: %w", d.info.Name, err)
	}
	if d.caps.GreenContexts {
		d.caps.SMGranularity = d.green.granularity()
		d.caps.GreenContexts = d.caps.SMGranularity > 0
	}
	d.caps.Priorities = max(d.priority.least-d.priority.greatest+1, 1)
	return nil
}

// enter makes the device's context current to the calling thread until leave. It does not nest.
func (d *Device) enter() error {
	d.life.RLock()
	if err := d.usableNow(); err != nil {
		d.life.RUnlock()
		return err
	}
	runtime.LockOSThread()
	if r := d.api.CtxSetCurrent(d.ctx); r != success {
		err := d.failed("cuCtxSetCurrent", r)
		d.leave()
		return err
	}
	return nil
}

// enterToFree is enter for giving things back, which is also tried on a lost device: the driver
// holds on to what is not freed, and calls cost nothing there. It is false when the device is
// closed.
func (d *Device) enterToFree() bool {
	d.life.RLock()
	if d.closed.Load() {
		d.life.RUnlock()
		return false
	}
	runtime.LockOSThread()
	if r := d.api.CtxSetCurrent(d.ctx); r != success {
		_ = d.failed("cuCtxSetCurrent", r) // noted
	}
	return true
}

// freed is check for calls that free things: on a lost device all of them fail, which other calls
// report.
func (d *Device) freed(call string, r result) error {
	if r == success || d.lost.Load() != nil {
		return nil
	}
	return d.failed(call, r)
}

func (d *Device) leave() {
	runtime.UnlockOSThread()
	d.life.RUnlock()
}

// usableNow is nil, or why nothing can be done with the device any more.
func (d *Device) usableNow() error {
	if d.closed.Load() {
		return d.errClosed()
	}
	if l := d.lost.Load(); l != nil {
		return errs.With(errs.Device, l)
	}
	return nil
}

// accepting is usableNow for what makes something new.
func (d *Device) accepting() error {
	if d.closing.Load() {
		return d.errClosed()
	}
	return d.usableNow()
}

func (d *Device) errClosed() error {
	return fmt.Errorf("device %s: %w", d.info.Name, cuda.ErrClosed)
}

// Info implements cuda.Device.
func (d *Device) Info() cuda.Info {
	info := d.info
	if code := d.modules.code.Load(); code != nil {
		info.Code = *code
	}
	return info
}

// Capabilities returns what this GPU and its driver can do beyond the interface.
func (d *Device) Capabilities() Capabilities { return d.caps }

// Close implements cuda.Device. Streams still open are drained for as long as CloseTimeout and
// closed, buffers still open are freed, and both are named in the error. A kernel that does not
// end keeps its memory and the context: pulling them away would block in the driver for as long
// as the kernel runs. So does a peer mapping that is still open.
func (d *Device) Close() error {
	d.memMu.Lock()
	d.streamMu.Lock()
	begun := d.closing.Swap(true)
	d.memMu.Unlock()
	if begun {
		d.streamMu.Unlock()
		return nil
	}
	open := slices.Collect(maps.Keys(d.streams))
	d.streamMu.Unlock()

	var leaks, failed []string
	stuck := false
	// of all streams together: they may wait for one another
	end := time.Now().Add(d.opt.CloseTimeout)
	for _, s := range open {
		leaks = append(leaks, fmt.Sprintf("stream %q", s.opt.Name))
		if !s.shutdown(max(time.Until(end), time.Millisecond)) {
			stuck = true
			failed = append(failed, fmt.Sprintf("stream %q still runs %s", s.opt.Name,
				s.runningText()))
		}
	}
	if p := d.peers.open(); len(p) > 0 { // SSDs may be writing there: the memory stays
		leaks, stuck = append(leaks, p...), true
	}
	d.memMu.Lock()
	bufs := slices.Collect(maps.Keys(d.buffers))
	d.memMu.Unlock()
	for _, b := range bufs {
		leaks = append(leaks, fmt.Sprintf("buffer %q (%d bytes)", b.purpose, b.size))
	}
	// The driver's calls have no limits. One that does not come back, on a GPU that is gone, must
	// not hold the program up.
	done := make(chan []string, 1)
	go func() {
		done <- d.giveBack(bufs, stuck)
		d.gaveBack.Store(true)
	}()
	limit := time.NewTimer(max(time.Until(end), 0) + d.opt.CloseTimeout)
	defer limit.Stop()
	select {
	case f := <-done:
		failed = append(failed, f...)
	case <-limit.C:
		d.closed.Store(true)
		failed = append(failed,
			fmt.Sprintf(
				"the driver has not answered for %v and keeps the context until the process ends; see \"dmesg | grep -i nvrm\"",
				d.opt.CloseTimeout))
	}
	if l := d.lost.Load(); l != nil {
		return errs.With(errs.Device, l)
	}
	return region.CloseError(d.info.Name, leaks, failed)
}

// giveBack is the part of Close that calls the driver. It returns the failed calls.
func (d *Device) giveBack(bufs []*buffer, stuck bool) (failed []string) {
	if !stuck {
		for _, b := range bufs {
			if err := b.Free(); err != nil && d.lost.Load() == nil {
				failed = append(failed, err.Error())
			}
		}
		d.release()
	}
	// Nobody is inside the library any more after this, and nobody gets in.
	d.life.Lock()
	d.closed.Store(true)
	d.life.Unlock()
	if !stuck {
		if r := d.api.DevicePrimaryCtxRelease(d.ord); r != success && d.lost.Load() == nil {
			failed = append(failed, callError(d.api, "cuDevicePrimaryCtxRelease_v2", r).Error())
		}
	}
	return failed
}

// release gives back what the device itself holds in the context.
func (d *Device) release() {
	_ = d.peers.close()
	d.green.close()
	d.house.close(d)
	d.faults.close(d)
	d.events.close()
	d.timed.close()
	d.modules.close(d)
}
