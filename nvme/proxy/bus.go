package proxy

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/nvme"
)

// The controller's constant properties.
const (
	dstrd        = 4 // doorbells 64 bytes apart: one cache line each
	stride       = 4 << dstrd
	timeout500ms = 20 // CAP.TO: drains included, resets take no longer
	version      = nvme.Version(0x00010400)
	regEnd       = 0x1000
)

// Bus is a software controller. It implements nvme.Bus, Kicker, Waiter and GroupWaiter.
type Bus struct {
	cfg         Config
	name        string
	back        *backing
	blocks      uint64
	lbaShift    uint
	maxTransfer uint64
	sync        bool // no io_uring
	model       *played
	opened      time.Time

	doorbells []byte
	sqs       []atomic.Pointer[squeue]
	cqs       []atomic.Pointer[cqueue]
	react     *reactor

	mapMu    sync.Mutex
	maps     atomic.Pointer[dmaTable]
	nextIOVA uint64

	ready    uint32 // CSTS.RDY; atomic
	cfs      uint32 // CSTS.CFS; atomic
	cacheOff uint32 // volatile write cache disabled; atomic
	closed   atomic.Bool

	mu   sync.Mutex // guards registers, the admin queue and the set of queues
	page int64      // CC.MPS
	cap  nvme.CAP
	cc   nvme.CC
	shst nvme.CSTS
	mask uint32 // INTMS/INTMC
	aqa  uint32
	asq  uint64
	acq  uint64
	adm  adminState

	logMu       sync.Mutex
	errors      uint64 // error log entries ever
	errorLog    [errorLogEntries]nvme.ErrorLogEntry
	reliability atomic.Bool
	retired     counters // of deleted queues; under mu

	bounceMu sync.Mutex
	bounces  [][]byte
	patchMu  sync.Mutex
}

// Open makes a controller over an existing backing, which it locks: an error of class Refused
// names the process that has it. The controller comes up disabled, as a real one.
func Open(cfg Config) (_ *Bus, err error) {
	if err := cfg.defaults(); err != nil {
		return nil, err
	}
	b := &Bus{cfg: cfg, name: cfg.Name, opened: time.Now(), nextIOVA: iovaFirst, page: 4096,
		lbaShift: cfg.lbaShift(), maxTransfer: 4096 << cfg.MDTS,
		model: play(cfg.Model, cfg.Serial),
		cap:   nvme.MakeCAP(cfg.MaxQueueEntries, timeout500ms, dstrd, 0, 4)}
	if cfg.CommandSet != nvme.CommandSetNVM {
		b.cap |= 1 << (37 + 6) // CAP.CSS: I/O command sets
	}
	b.maps.Store(&dmaTable{})
	if b.back, err = openBacking(&b.cfg); err != nil {
		return nil, err
	}
	b.blocks = uint64(b.back.bytes) >> b.lbaShift
	b.sync = cfg.NoIOUring || cfg.RAM || cfg.Content != nil
	b.react, err = newReactor(!b.sync, cfg.PollDoorbells)
	// forbidden or too old: the slower way works everywhere
	if errs.ClassOf(err) == errs.Capability {
		b.sync = true
		b.react, err = newReactor(false, cfg.PollDoorbells)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", b.name, err), b.back.close())
	}
	b.sqs = make([]atomic.Pointer[squeue], cfg.MaxQueuePairs+1)
	b.cqs = make([]atomic.Pointer[cqueue], cfg.MaxQueuePairs+1)
	if b.doorbells, err = hostmem.Alloc(int64(2*len(b.sqs)*stride), "proxy doorbells"); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: doorbells: %w", b.name, err), b.react.close(),
			b.back.close())
	}
	return b, nil
}

// Name implements nvme.Bus.
func (b *Bus) Name() string { return b.name }

// Engine names how the medium is reached: "io_uring", "pread", "memory" or "computed".
func (b *Bus) Engine() string {
	switch {
	case b.back.mem != nil:
		return "memory"
	case b.back.calc != nil:
		return "computed"
	case b.sync:
		return "pread"
	}
	return "io_uring"
}

// Modelled reports whether the controller takes the time of an SSD that it plays.
func (b *Bus) Modelled() bool { return b.model != nil }

// usesRing reports whether the controller's queues need an io_uring.
func (b *Bus) usesRing() bool { return !b.sync }

// stopped reports that no command may be executed.
func (b *Bus) stopped() bool {
	return atomic.LoadUint32(&b.ready) == 0 || atomic.LoadUint32(&b.cfs) != 0
}

// Close resets the controller if it still runs, and gives everything back. It fails, having
// closed all the same, when memory is still mapped.
func (b *Bus) Close() error {
	if b.closed.Swap(true) {
		return nil
	}
	b.mu.Lock()
	err := b.disable()
	b.mu.Unlock()
	if err != nil {
		// Transfers are in progress and do not end: their memory and descriptors must stay.
		return fmt.Errorf("close %s: %w", b.name, err)
	}
	b.mapMu.Lock()
	if n := len(b.maps.Load().maps); n > 0 {
		err = fmt.Errorf("close %s: %d DMA mappings were never unmapped", b.name, n)
	}
	b.maps.Store(&dmaTable{})
	b.mapMu.Unlock()
	err = errors.Join(err, b.react.close(), b.back.close(), hostmem.Free(b.doorbells))
	b.bounceMu.Lock()
	defer b.bounceMu.Unlock()
	for _, p := range b.bounces {
		err = errors.Join(err, hostmem.Free(p))
	}
	b.bounces = nil
	return err
}

func (b *Bus) register(off uint32) error {
	if b.closed.Load() {
		return fmt.Errorf("%s: register %#x: %w", b.name, off, nvme.ErrClosed)
	}
	if off%4 != 0 || off+4 > regEnd+uint32(len(b.doorbells)) {
		return fmt.Errorf("%s: there is no 32-bit register at %#x", b.name, off)
	}
	return nil
}

// Read32 implements nvme.Bus. Reserved registers and doorbells read as 0.
func (b *Bus) Read32(off uint32) (uint32, error) {
	if err := b.register(off); err != nil {
		return 0, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	half := func(v uint64) uint32 { return uint32(v >> (off & 4 * 8)) }
	switch off {
	case nvme.RegCAP, nvme.RegCAP + 4:
		return half(uint64(b.cap)), nil
	case nvme.RegVS:
		return uint32(version), nil
	case nvme.RegINTMS, nvme.RegINTMC:
		return b.mask, nil
	case nvme.RegCC:
		return uint32(b.cc), nil
	case nvme.RegCSTS:
		v := b.shst
		if atomic.LoadUint32(&b.ready) != 0 {
			v |= nvme.CSTSReady
		}
		if atomic.LoadUint32(&b.cfs) != 0 {
			v |= nvme.CSTSFatal
		}
		return uint32(v), nil
	case nvme.RegAQA:
		return b.aqa, nil
	case nvme.RegASQ, nvme.RegASQ + 4:
		return half(b.asq), nil
	case nvme.RegACQ, nvme.RegACQ + 4:
		return half(b.acq), nil
	}
	return 0, nil
}

// Write32 implements nvme.Bus. Writes to read-only and reserved registers are ignored; so
// are those to the admin queue's registers while the controller is enabled.
func (b *Bus) Write32(off, v uint32) error {
	if err := b.register(off); err != nil {
		return err
	}
	if off >= regEnd {
		return b.writeDoorbell(off-regEnd, v)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	half := func(r *uint64) {
		shift := off & 4 * 8
		*r = *r&^(0xffffffff<<shift) | uint64(v)<<shift
	}
	switch {
	case off == nvme.RegINTMS:
		b.mask |= v
	case off == nvme.RegINTMC:
		b.mask &^= v
	case off == nvme.RegCC:
		return b.writeCC(nvme.CC(v))
	case b.cc.EN():
	case off == nvme.RegAQA:
		b.aqa = v & 0x0fff0fff
	case off == nvme.RegASQ, off == nvme.RegASQ+4:
		half(&b.asq)
	case off == nvme.RegACQ, off == nvme.RegACQ+4:
		half(&b.acq)
	}
	return nil
}

// Doorbell implements nvme.Bus. Doorbells of queues that do not exist can be stored to, like
// a real controller's.
func (b *Bus) Doorbell(i uint32) (*uint32, error) {
	if int(i) >= 2*len(b.sqs) {
		return nil, fmt.Errorf("%s: doorbell %d: the controller has %d", b.name, i, 2*len(b.sqs))
	}
	return b.doorbell(i), nil
}

// DoorbellMemory implements nvme.DoorbellMapper.
func (b *Bus) DoorbellMemory() (mem []byte, io bool, err error) {
	if !b.cfg.PollDoorbells {
		return nil, false, errs.New(errs.Usage,
			"%s: a GPU cannot wake the software controller: open it with PollDoorbells", b.name)
	}
	return b.doorbells, false, nil
}

func (b *Bus) doorbell(i uint32) *uint32 {
	return (*uint32)(unsafe.Pointer(&b.doorbells[i*stride]))
}

// writeDoorbell is a doorbell rung through the register interface.
func (b *Bus) writeDoorbell(at, v uint32) error {
	if at%stride != 0 {
		return fmt.Errorf("%s: no doorbell at %#x: they are %d bytes apart", b.name,
			regEnd+at, stride)
	}
	i := at / stride
	nvme.StoreDoorbell(b.doorbell(i), v)
	if i%2 == 0 {
		b.Kick(uint16(i / 2))
	}
	return nil
}

// Kick implements nvme.Kicker. A doorbell of no queue is not heard.
func (b *Bus) Kick(qid uint16) {
	if int(qid) < len(b.sqs) {
		if q := b.sqs[qid].Load(); q != nil {
			q.cq.kick()
		}
	}
}

// WaitCQ implements nvme.Waiter: it runs the controller for this queue in the caller, then
// sleeps until the queue has entries that came since the last wait, or until d has passed.
// With d = 0 it never sleeps. For a queue in a group it waits for the group.
func (b *Bus) WaitCQ(qid uint16, d time.Duration) {
	var c *cqueue
	if int(qid) < len(b.cqs) {
		c = b.cqs[qid].Load()
	}
	if c == nil {
		if d > 0 { // nothing will ever come; take the time that was given, as an idle queue does
			time.Sleep(d)
		}
		return
	}
	w := c.waiter.Load()
	if w == nil {
		w = newWaiter(c.r.Load(), c)
		w.single = true
		if !c.waiter.CompareAndSwap(nil, w) {
			if w = c.waiter.Load(); w == nil {
				return // its group was just dissolved
			}
		}
	}
	w.waitFor(d)
}

// writeCC is the heart of the controller's state machine (section 3.5). The caller holds mu.
func (b *Bus) writeCC(v nvme.CC) error {
	was := b.cc
	b.cc = v
	switch {
	case v.EN() && !was.EN():
		b.enable()
	case !v.EN() && was.EN():
		if v.SHN() == 0 {
			b.shst = 0
		}
		return b.disable()
	}
	if v.SHN() != 0 && b.shst&nvme.CSTSShutdownMask == 0 {
		b.shst = nvme.CSTSShutdownOccurring
		if err := b.flushBacking(); err != nil {
			b.fatal()
			return fmt.Errorf("%s: shut down: %w", b.name, err)
		}
		b.shst = nvme.CSTSShutdownComplete
	} else if v.SHN() == 0 && !v.EN() {
		b.shst = 0
	}
	return nil
}

func (b *Bus) flushBacking() error {
	if b.back.mem != nil || b.cfg.ReadOnly {
		return nil
	}
	return b.transfer(nvme.OpFlush, nil, 0, 0, false)
}

// enable starts the controller; settings that it cannot work with are fatal.
func (b *Bus) enable() {
	b.shst = 0
	b.adm = adminState{}
	b.page = int64(b.cc.PageBytes())
	sqn, cqn := b.aqa&0xfff+1, b.aqa>>16+1
	var l tlb
	sq, ok1 := l.translate(b, b.asq, uint64(sqn)*nvme.CommandBytes)
	cq, ok2 := l.translate(b, b.acq, uint64(cqn)*nvme.CompletionBytes)
	switch {
	case b.page > 4096<<b.cap.MPSMAX(), b.cc.CSS() != 0, b.cc.AMS() != 0, sqn < 2, cqn < 2,
		(b.asq|b.acq)&4095 != 0, !ok1, !ok2:
		b.fatal()
		return
	}
	clear(b.doorbells)
	c := b.newCQ(0, cq, cqn)
	q := &squeue{cq: c, base: sq, entries: sqn, tailDB: b.doorbell(0)}
	c.sqs = []*squeue{q}
	b.react.join(c)
	b.cqs[0].Store(c)
	b.sqs[0].Store(q)
	b.react.start()
	atomic.StoreUint32(&b.ready, 1)
}

// newCQ makes a completion queue; the caller joins it to a reactor.
func (b *Bus) newCQ(id uint16, base unsafe.Pointer, entries uint32) *cqueue {
	c := &cqueue{bus: b, id: id, base: base, entries: entries, phase: 1, free: int(entries) - 1,
		headDB: b.doorbell(2*uint32(id) + 1), rng: 0x9e3779b97f4a7c15 + uint64(id)}
	c.next.Store(never)
	c.mu = &c.ownMu
	if id == 0 {
		c.mu = &b.mu
	}
	return c
}

// disable resets the controller (CC.EN = 0): queues are gone, transfers have ended. The
// caller holds mu.
func (b *Bus) disable() error {
	atomic.StoreUint32(&b.ready, 0)
	b.cc &^= nvme.CCEnable
	var err error
	deadline := time.Now().Add(timeout500ms * 500 * time.Millisecond)
	for i := len(b.cqs) - 1; i >= 0; i-- {
		if c := b.cqs[i].Load(); c != nil {
			err = errors.Join(err, b.retire(c, deadline))
		}
	}
	if err != nil {
		b.fatal()
		return fmt.Errorf("%s: reset: %w", b.name, err)
	}
	for i := range b.sqs {
		b.sqs[i].Store(nil)
	}
	b.react.stop()
	atomic.StoreUint32(&b.cfs, 0)
	atomic.StoreUint32(&b.cacheOff, 0)
	return nil
}

// retire ends a completion queue with all that belongs to it. The caller holds mu.
func (b *Bus) retire(c *cqueue, deadline time.Time) error {
	lock, unlock := c.mu.Lock, c.mu.Unlock
	if c.id == 0 { // its lock is mu
		lock, unlock = func() {}, func() {}
	}
	lock()
	c.dead = true
	c.dropAll(nil)
	unlock()
	if c.id != 0 {
		if err := c.drain(deadline, func(*slot) bool { return true }); err != nil {
			return err
		}
	}
	w := c.waiter.Load()
	if w != nil {
		w.drop(c)
	}
	lock()
	b.retired.add(c.count)
	c.count = counters{}
	c.r.Load().leave(c)
	unlock()
	b.cqs[c.id].Store(nil)
	if w != nil {
		w.wake()
	}
	return nil
}

var _ interface {
	nvme.Bus
	nvme.Kicker
	nvme.Waiter
	nvme.GroupWaiter
	nvme.DoorbellMapper
} = (*Bus)(nil)
