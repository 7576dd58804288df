package driver

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"helios/cuda"
	"helios/internal/dl"
	"helios/internal/errs"
)

// NVIDIA's NCCL, opened at run time as libcuda is. Its types and values are those of NCCL 2's
// nccl.h.

// ncclName is the library's name where none is given.
const ncclName = "libnccl.so.2"

const (
	ncclSuccess   = 0
	ncclFloat32   = 7 // ncclDataType_t
	ncclSum       = 0 // ncclRedOp_t
	leastNCCL     = 20000
	ncclOldScheme = 10000 // versions below it are major·1000 + minor·100 + patch
)

// ncclCalls are the functions that we call.
type ncclCalls struct {
	version    func(v *int32) int32
	text       func(result int32) string
	initAll    func(comms *uintptr, n int32, devices *int32) int32
	destroy    func(comm uintptr) int32
	abort      func(comm uintptr) int32
	groupStart func() int32
	groupEnd   func() int32
	allReduce  func(send, recv, count uint64, kind, op int32, comm, s uintptr) int32
}

func (c *ncclCalls) bind(lib uintptr, name string) error {
	err := dl.Bind(lib, map[string]any{
		"ncclGetVersion":     &c.version,
		"ncclGetErrorString": &c.text,
		"ncclCommInitAll":    &c.initAll,
		"ncclCommDestroy":    &c.destroy,
		"ncclCommAbort":      &c.abort,
		"ncclGroupStart":     &c.groupStart,
		"ncclGroupEnd":       &c.groupEnd,
		"ncclAllReduce":      &c.allReduce,
	})
	if err != nil {
		return fmt.Errorf("%s %w: it is no NCCL 2", name, err)
	}
	return nil
}

// nccl is cuda.Collective. Which GPUs talk in which order, and by which way, is the library's
// affair.
type nccl struct {
	name    string
	calls   ncclCalls
	devices []*Device
	comms   []uintptr

	mu     sync.Mutex
	closed bool
	broken bool         // a sum failed: some devices may wait for the others
	used   []*gpuStream // of the last sum
}

var _ cuda.CollectiveOpener = (*Device)(nil)

// OpenCollective implements cuda.CollectiveOpener.
func (d *Device) OpenCollective(more []cuda.Device, library string) (_ cuda.Collective, err error) {
	if !dl.Have {
		return nil, errs.New(errs.Capability,
			"NCCL: this build of heliosctl opens no libraries (-tags nocuda, or a platform without it); use {reduce} tree")
	}
	n := &nccl{name: library, devices: []*Device{d}}
	next := errs.Textf("name another library with {reduce} PATH, or use {reduce} tree")
	if library == "" {
		n.name = ncclName
		next = errs.Textf("install it (NVIDIA's package libnccl2, or Python's nvidia-nccl-cu12 with its directory in LD_LIBRARY_PATH), name the library with {reduce} PATH, or use {reduce} tree")
	}
	for _, o := range more {
		other, ok := o.(*Device)
		if !ok {
			return nil, errs.New(errs.Capability, "NCCL: device %s is no GPU; use {reduce} tree",
				o.Info().Name)
		}
		n.devices = append(n.devices, other)
	}
	if err := dl.First([]string{n.name}, dl.Open, n.calls.bind); err != nil {
		return nil, errs.New(errs.Capability, "NCCL: %w; %s", err, next)
	}
	var v int32
	if err := n.check("ncclGetVersion", n.calls.version(&v)); err != nil {
		return nil, errs.With(errs.Capability, fmt.Errorf("%w; %s", err, next))
	}
	if v < leastNCCL && v > ncclOldScheme || v < 2000 {
		return nil, errs.New(errs.Capability, "NCCL: %s is of version code %d, no NCCL 2; %s", n.name,
			v, next)
	}
	major, rest := v/10000, v%10000
	if v < ncclOldScheme {
		major, rest = v/1000, v%1000
	}
	n.name = fmt.Sprintf("NCCL %d.%d.%d", major, rest/100, rest%100)
	ordinals := make([]int32, len(n.devices))
	for i, dev := range n.devices {
		ordinals[i] = int32(dev.opt.Index)
	}
	n.comms = make([]uintptr, len(n.devices))
	// It makes the devices' contexts current in turns, on this thread.
	runtime.LockOSThread()
	r := n.calls.initAll(&n.comms[0], int32(len(ordinals)), &ordinals[0])
	runtime.UnlockOSThread()
	if err := n.check("ncclCommInitAll", r); err != nil {
		return nil, errs.With(errs.Capability,
			errs.Errorf("%w; set NCCL_DEBUG=INFO to see why, or use {reduce} tree", err))
	}
	return n, nil
}

// Name implements cuda.Collective.
func (n *nccl) Name() string { return n.name }

// check is nil for success.
func (n *nccl) check(call string, r int32) error {
	if r == ncclSuccess {
		return nil
	}
	return fmt.Errorf("%s: %s: %s (ncclResult_t %d)", n.name, call, n.calls.text(r), r)
}

// AllReduce implements cuda.Collective. The calls of a group are of one thread, and are enqueued at
// its end.
func (n *nccl) AllReduce(streams []cuda.Stream, sums []cuda.DevicePtr, floats int64) error {
	if len(streams) != len(n.devices) || len(sums) != len(n.devices) {
		return fmt.Errorf("%s: %d streams and %d places of %d devices", n.name, len(streams),
			len(sums), len(n.devices))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return fmt.Errorf("%s: %w", n.name, cuda.ErrClosed)
	}
	queues := make([]*gpuStream, len(streams))
	for i, s := range streams {
		gs, ok := s.(*gpuStream)
		if !ok || gs == nil || gs.d != n.devices[i] {
			return fmt.Errorf("%s: stream %d is not of device %s", n.name, i,
				n.devices[i].info.Name)
		}
		if err := gs.failed(); err != nil {
			return err
		}
		if err := gs.d.regions.Check("sum", "memory", uint64(sums[i]), 4*floats); err != nil {
			return fmt.Errorf("stream %q: %s: %w", gs.opt.Name, n.name, err)
		}
		queues[i] = gs
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	n.used = queues
	if err := n.check("ncclGroupStart", n.calls.groupStart()); err != nil {
		n.broken = true
		return errs.With(errs.Device, err)
	}
	var all []error
	for i, gs := range queues {
		all = append(all, gs.command(func() error {
			return n.check("ncclAllReduce", n.calls.allReduce(uint64(sums[i]), uint64(sums[i]),
				uint64(floats), ncclFloat32, ncclSum, n.comms[i], uintptr(gs.h)))
		}))
	}
	all = append(all, n.check("ncclGroupEnd", n.calls.groupEnd()))
	if err := errors.Join(all...); err != nil {
		n.broken = true
		return errs.With(errs.Device, err)
	}
	return nil
}

// Close implements cuda.Collective.
func (n *nccl) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Work that a failed sum left on its streams may never end, and destroying waits for it.
	name, end := "ncclCommDestroy", n.calls.destroy
	if n.broken || slices.ContainsFunc(n.used, func(s *gpuStream) bool {
		return s.err.Load() != nil || s.d.usableNow() != nil
	}) {
		name, end = "ncclCommAbort", n.calls.abort
	}
	var all []error
	for _, c := range n.comms {
		all = append(all, n.check(name, end(c)))
	}
	return errors.Join(all...)
}
