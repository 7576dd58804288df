// Package faultbus stands in front of any nvme.Bus and injects faults: into commands, completions,
// doorbells, data and registers.
//
// The client's queues, the admin queue too, never meet the controller. Their rings and doorbells
// are shadows; for each there is a ring of the bus's own, of the same length, which the controller
// has. Submission queue entries are copied over and completion queue entries copied back, and in
// between is where a fault strikes. Data does not come by: PRPs go through as they are, and faults
// of data touch the client's memory by the ranges that it mapped.
//
// # Who does the work
//
// Nobody polls. Kick, a wait of the client and timers carry on the queue that they are about, and
// a goroutine per completion queue sleeps in the controller's own WaitCQ while commands are out;
// where the controller has none it looks at the ring, at growing intervals. A client that cannot
// kick (a GPU) needs Options.PollDoorbells. One lock per bus guards everything: a bus that injects
// faults is not one to measure.
//
// Without faults it changes nothing that the specification lets a client see, except that a
// submission queue's head runs ahead of the controller's.
package faultbus

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/hostmem"
	"helios/nvme"
)

// Options of a Bus. The zero value is good.
type Options struct {
	// PollDoorbells serves clients that never call Kick.
	PollDoorbells bool
	// EchoWait bounds the time that the second completion of "dup(n=…)" waits for others to come first;
	// 0: 2 ms.
	EchoWait time.Duration
}

// Bus is a controller with faults in front of it. It implements nvme.Bus, Kicker, Waiter,
// GroupWaiter, DoorbellMapper and HardResetter. Submission queues are not in controller memory: the
// client's are read here.
type Bus struct {
	inner  nvme.Bus
	kicker nvme.Kicker // nil: the controller sees doorbells by itself
	waiter nvme.Waiter // nil: its completion queues must be looked at
	set    *faultinject.Set
	opt    Options
	work   sync.WaitGroup // goroutines

	gone   atomic.Bool
	closed atomic.Bool

	mu        sync.Mutex // guards all below
	stride    uint32     // of doorbells, in bytes
	doorbells []byte     // shadows; nil until first asked for
	ndoorbell uint32
	maps      []mapping // of the client, sorted

	cc         nvme.CC // as the client wrote it
	aqa        uint32
	asq, acq   uint64
	running    bool // the controller is enabled
	cfs        bool
	left       bool // gone, and the controller is still to be stopped
	pageBytes  uint64
	lbaBytes   uint64
	failed     failed
	sqs        map[uint16]*squeue
	cqs        map[uint16]*cqueue
	remains    []ring // of queues that ended, until the controller cannot reach them
	tick       *time.Timer
	ticking    bool
	pollerQuit chan struct{} // nil: there is none
}

// New puts faults in front of a controller. A set without faults is transparent.
func New(inner nvme.Bus, set *faultinject.Set, opt Options) *Bus {
	b := &Bus{inner: inner, set: set, opt: opt, stride: 4, pageBytes: 4096, lbaBytes: 512,
		sqs: map[uint16]*squeue{}, cqs: map[uint16]*cqueue{}}
	if b.opt.EchoWait == 0 {
		b.opt.EchoWait = echoWait
	}
	b.kicker, _ = inner.(nvme.Kicker)
	b.waiter, _ = inner.(nvme.Waiter)
	if v, err := nvme.Read64(inner, nvme.RegCAP); err == nil && v != 1<<64-1 {
		b.stride = 4 << nvme.CAP(v).DSTRD()
	}
	// Somebody may have left it enabled; the client disables it first then.
	if v, err := inner.Read32(nvme.RegCC); err == nil && v != allOnes {
		b.cc = nvme.CC(v)
		b.running = b.cc.EN()
	}
	if act, _ := set.MatchEvent(faultinject.Attach); act.Gone {
		b.gone.Store(true)
	}
	return b
}

// Name implements nvme.Bus.
func (b *Bus) Name() string { return b.inner.Name() }

// Unwrap implements nvme.Unwrapper.
func (b *Bus) Unwrap() nvme.Bus { return b.inner }

// stopped reports that the controller does nothing. The caller holds mu.
func (b *Bus) stopped() bool { return !b.running || b.cfs || b.gone.Load() }

// allOnes is read from a device that is gone.
const allOnes = 1<<32 - 1

func (b *Bus) check(off uint32) error {
	if b.closed.Load() {
		return fmt.Errorf("%s: register %#x: %w", b.Name(), off, nvme.ErrClosed)
	}
	return nil
}

// Read32 implements nvme.Bus.
func (b *Bus) Read32(off uint32) (uint32, error) {
	if err := b.check(off); err != nil {
		return 0, err
	}
	if b.gone.Load() {
		return allOnes, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	half := func(v uint64) (uint32, error) { return uint32(v >> (off & 4 * 8)), nil }
	switch off {
	case nvme.RegCC:
		return uint32(b.cc), nil
	case nvme.RegAQA:
		return b.aqa, nil
	case nvme.RegASQ, nvme.RegASQ + 4:
		return half(b.asq)
	case nvme.RegACQ, nvme.RegACQ + 4:
		return half(b.acq)
	}
	v, err := b.inner.Read32(off)
	if err != nil || off != nvme.RegCSTS {
		return v, err
	}
	if b.cfs {
		v |= uint32(nvme.CSTSFatal)
	}
	if !b.running && v != allOnes && !nvme.CSTS(v).RDY() {
		_ = b.clear() // now that nothing reaches them; what cannot be unmapped is tried again
	}
	return v, nil
}

// Write32 implements nvme.Bus.
func (b *Bus) Write32(off, v uint32) error {
	if err := b.check(off); err != nil {
		return err
	}
	if b.gone.Load() {
		return nil
	}
	if off >= nvme.RegDoorbells {
		return b.writeDoorbell(off, v)
	}
	b.mu.Lock()
	defer b.unlock()
	set := func(r *uint64) {
		shift := off & 4 * 8
		*r = *r&^(0xffffffff<<shift) | uint64(v)<<shift
	}
	switch off {
	case nvme.RegCC:
		return b.writeCC(nvme.CC(v))
	case nvme.RegAQA, nvme.RegASQ, nvme.RegASQ + 4, nvme.RegACQ, nvme.RegACQ + 4:
		if b.cc.EN() { // read-only while enabled
			return nil
		}
		switch off &^ 4 {
		case nvme.RegASQ:
			set(&b.asq)
		case nvme.RegACQ:
			set(&b.acq)
		default:
			b.aqa = v & 0x0fff0fff
		}
		return nil
	}
	return b.inner.Write32(off, v)
}

// writeCC is the controller's state machine as far as faults and queues are concerned.
func (b *Bus) writeCC(v nvme.CC) error {
	was := b.cc
	switch {
	case v.EN() && !was.EN():
		b.cc = v
		return b.enable(v)
	case !v.EN() && was.EN():
		if act, _ := b.set.MatchEvent(faultinject.Disable); act.Hang {
			return nil // the write does not get through: the controller stays ready
		}
		b.cc = v
		return b.disable(v)
	}
	b.cc = v
	if !b.running {
		v &^= nvme.CCEnable
	}
	return b.inner.Write32(nvme.RegCC, uint32(v))
}

// enable gives the controller an admin queue of the bus's own and starts it.
func (b *Bus) enable(v nvme.CC) error {
	act, _ := b.set.MatchEvent(faultinject.Enable)
	if act.CFS {
		b.cfs = true
	}
	if act.CFS || act.Hang {
		return nil
	}
	b.pageBytes = uint64(v.PageBytes())
	aqa, asq, acq := b.aqa, b.asq, b.acq
	cqn, sqn := aqa>>16+1, aqa&0xfff+1
	cqMem, cqOK := b.find(acq, uint64(cqn)*nvme.CompletionBytes)
	sqMem, sqOK := b.find(asq, uint64(sqn)*nvme.CommandBytes)
	// Rings that are none go to the controller as they are: it knows what to make of them.
	if cqOK && sqOK && (asq|acq)&(b.pageBytes-1) == 0 && cqn >= 2 && sqn >= 2 {
		c, err := b.newCQ(0, cqMem, cqn)
		if err != nil {
			return err
		}
		q, err := b.newSQ(0, sqMem, sqn, c)
		if err != nil {
			return errs.Also(err, b.free(c.ring))
		}
		asq, acq = uint64(q.ring.iova), uint64(c.ring.iova)
		b.addCQ(c)
		b.addSQ(q)
	}
	b.running = true
	for _, r := range []struct {
		off uint32
		v   uint64
	}{{nvme.RegASQ, asq}, {nvme.RegACQ, acq}} {
		if err := nvme.Write64(b.inner, r.off, r.v); err != nil {
			return err
		}
	}
	if err := b.inner.Write32(nvme.RegAQA, aqa); err != nil {
		return err
	}
	if err := b.inner.Write32(nvme.RegCC, uint32(v)); err != nil {
		return err
	}
	if b.opt.PollDoorbells && b.pollerQuit == nil {
		b.pollerQuit = make(chan struct{})
		quit := b.pollerQuit
		b.work.Go(func() { b.poll(quit) })
	}
	return nil
}

// disable resets the controller. Its queues end here; the memory of their rings goes back when it
// is seen to be disabled.
func (b *Bus) disable(v nvme.CC) error {
	b.running = false
	err := b.inner.Write32(nvme.RegCC, uint32(v))
	b.endQueues()
	b.cfs = false
	b.endPoller()
	return err
}

// endQueues ends all queues without a word to the controller.
func (b *Bus) endQueues() {
	for _, q := range b.sqs {
		b.endSQ(q)
	}
	for _, c := range b.cqs {
		b.endCQ(c)
	}
	b.lbaBytes = 512
}

// clear gives back the rings of queues that ended. Rings that cannot be unmapped stay for later.
func (b *Bus) clear() error {
	var err error
	var left []ring
	for _, r := range b.remains {
		if ferr := b.free(r); ferr != nil {
			left = append(left, r)
			err = errs.Also(err, ferr)
		}
	}
	b.remains = left
	return err
}

// stop takes the controller off the client's memory: it is gone, or the bus is closed.
func (b *Bus) stop() error {
	if !b.running {
		return nil
	}
	err := b.disable(b.cc &^ nvme.CCEnable &^ nvme.CCShutdownMask)
	if err == nil {
		err = b.waitStopped()
	}
	b.running = err != nil
	return err
}

// HardReset implements nvme.HardResetter, where the controller's bus does.
func (b *Bus) HardReset() error {
	h, ok := nvme.As[nvme.HardResetter](b.inner)
	switch {
	case !ok:
		return fmt.Errorf("%s: reset through its bus: %w", b.Name(), errors.ErrUnsupported)
	case b.closed.Load():
		return fmt.Errorf("%s: reset through its bus: %w", b.Name(), nvme.ErrClosed)
	case b.gone.Load():
		return fmt.Errorf("%s: reset through its bus: %w", b.Name(), nvme.ErrGone)
	}
	if err := h.HardReset(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.unlock()
	b.cc, b.running, b.cfs = 0, false, false
	b.endQueues()
	b.endPoller()
	return b.clear()
}

func (b *Bus) waitStopped() error {
	deadline := time.Now().Add(stopTime)
	for d := 10 * time.Microsecond; ; d = min(2*d, time.Millisecond) {
		v, err := b.inner.Read32(nvme.RegCSTS)
		switch {
		case err != nil:
			return err
		case v == allOnes || !nvme.CSTS(v).RDY():
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("%s: the controller does not leave the ready state in %v", b.Name(),
				stopTime)
		}
		time.Sleep(d)
	}
}

// stopTime bounds the wait for a controller that the bus itself disables.
const stopTime = 20 * time.Second

// Close disables the controller if the client did not, and closes its bus.
func (b *Bus) Close() error {
	if b.closed.Swap(true) {
		return nil
	}
	b.mu.Lock()
	err := b.stop()
	b.endQueues()
	b.endPoller()
	if err == nil {
		err = b.clear()
	}
	if b.tick != nil {
		b.tick.Stop()
	}
	if b.gone.Load() {
		// The mappings of a device that left its bus left with it.
		for _, m := range b.maps {
			err = errs.Also(err, b.inner.UnmapDMA(nvme.IOVA(m.lo), int64(m.hi-m.lo)))
		}
		b.maps = nil
	}
	b.mu.Unlock()
	b.work.Wait()
	cerr := b.inner.Close()
	b.mu.Lock()
	defer b.mu.Unlock()
	if cerr == nil { // the mappings ended with the bus
		for _, r := range b.remains {
			err = errs.Also(err, hostmem.Free(r.mem))
		}
		b.remains = nil
	}
	if b.doorbells != nil {
		err = errs.Also(err, hostmem.Free(b.doorbells))
		b.doorbells = nil
	}
	return errs.Also(err, cerr)
}

func (b *Bus) endPoller() {
	if b.pollerQuit != nil {
		close(b.pollerQuit)
		b.pollerQuit = nil
	}
}

// maxDoorbells bounds the search for the controller's last doorbell.
const maxDoorbells = 2 * 65536

// shadows makes the doorbells that the client gets: as many as the controller has.
func (b *Bus) shadows() error {
	if b.doorbells != nil {
		return nil
	}
	n := uint32(0)
	for n < maxDoorbells {
		if _, err := b.inner.Doorbell(n); err != nil {
			break
		}
		n++
	}
	mem, err := hostmem.Alloc(max(int64(n)*int64(b.stride), 1), "fault bus doorbells")
	if err != nil {
		return fmt.Errorf("%s: doorbells: %w", b.Name(), err)
	}
	b.doorbells, b.ndoorbell = mem, n
	return nil
}

func (b *Bus) doorbell(
	i uint32) *uint32 {
	return (*uint32)(unsafe.Pointer(&b.doorbells[i*b.stride]))
}

// Doorbell implements nvme.Bus.
func (b *Bus) Doorbell(i uint32) (*uint32, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return nil, fmt.Errorf("%s: doorbell %d: %w", b.Name(), i, nvme.ErrClosed)
	}
	if err := b.shadows(); err != nil {
		return nil, err
	}
	if i >= b.ndoorbell {
		return b.inner.Doorbell(i) // fails
	}
	return b.doorbell(i), nil
}

// DoorbellMemory implements nvme.DoorbellMapper.
func (b *Bus) DoorbellMemory() (mem []byte, io bool, err error) {
	if !b.opt.PollDoorbells {
		return nil, false, errs.New(errs.Usage,
			"%s: a GPU cannot wake a bus with faults: open it with PollDoorbells", b.Name())
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.shadows(); err != nil {
		return nil, false, err
	}
	return b.doorbells, false, nil
}

// writeDoorbell is a doorbell rung through the register interface.
func (b *Bus) writeDoorbell(off, v uint32) error {
	pos := off - nvme.RegDoorbells
	i := pos / b.stride
	b.mu.Lock()
	err := b.shadows()
	known := err == nil && pos%b.stride == 0 && i < b.ndoorbell
	if known {
		nvme.StoreDoorbell(b.doorbell(i), v)
		if i%2 == 1 {
			known = b.cqs[uint16(i/2)] != nil
		}
	}
	b.mu.Unlock()
	switch {
	case err != nil:
		return err
	case !known:
		return b.inner.Write32(off, v) // fails, or is an event
	case i%2 == 0:
		b.Kick(uint16(i / 2))
	}
	return nil
}

var _ interface {
	nvme.Bus
	nvme.Unwrapper
	nvme.Kicker
	nvme.Waiter
	nvme.GroupWaiter
	nvme.DoorbellMapper
	nvme.HardResetter
} = (*Bus)(nil)
