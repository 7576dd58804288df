package nvme

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

// dmaBuf is memory that the controller can reach; no mem: there is none, or it is the caller's own.
type dmaBuf struct {
	mem  []byte
	iova IOVA
}

func (c *Controller) allocDMA(bytes int64, purpose string) (dmaBuf, error) {
	page := int64(c.pageBytes)
	bytes = (bytes + page - 1) &^ (page - 1)
	mem, err := hostmem.Alloc(bytes, purpose)
	if err != nil {
		return dmaBuf{}, fmt.Errorf("nvme %s: %s: %w", c.bus.Name(), purpose, err)
	}
	iova, err := c.bus.MapDMA(mem)
	if err == nil && uint64(iova)&uint64(page-1) != 0 {
		err = errs.Also(
			&ProtocolError{Bus: c.bus.Name(),
				What: fmt.Sprintf("the bus mapped page-aligned memory to %#x", uint64(iova))},
			c.bus.UnmapDMA(iova, bytes))
	}
	if err != nil {
		return dmaBuf{}, errs.Also(fmt.Errorf("nvme %s: map %d bytes for %s: %w", c.bus.Name(), bytes,
			purpose, err), hostmem.Free(mem))
	}
	return dmaBuf{mem: mem, iova: iova}, nil
}

func (c *Controller) freeDMA(b dmaBuf) error {
	if b.mem == nil {
		return nil
	}
	if err := c.bus.UnmapDMA(b.iova, int64(len(b.mem))); err != nil {
		// Still mapped: freeing it would let the controller write to somebody else's memory.
		return fmt.Errorf("nvme %s: unmap %d bytes at %#x: %w", c.bus.Name(), len(b.mem),
			uint64(b.iova), err)
	}
	return hostmem.Free(b.mem)
}

// slotState is the life of an admin command ID.
type slotState uint8

const (
	slotFree        slotState = iota
	slotBusy                  // sent; somebody waits for it
	slotDone                  // completed; the waiter has not seen it yet
	slotQuarantined           // given up by its waiter: its CQE, or a late DMA, may still come
)

// slot is one admin command ID with its own page of data memory.
type slot struct {
	state slotState
	gen   uint8 // upper byte of the CID, so that a second completion of it is recognised
	cqe   Completion
}

func (s *slot) cid(i int) uint16 { return uint16(i) | uint16(s.gen)<<8 }

// maxAdminSlots keeps slot numbers in the lower byte of the CID.
const maxAdminSlots = 255

// adminQueue is queue pair 0. Controller.mu guards it.
type adminQueue struct {
	entries        int
	sq, cq         []byte
	sqIOVA, cqIOVA IOVA
	data           []byte // a page per slot
	dataIOVA       IOVA
	mem            dmaBuf // all of the above

	sqTail, sqHead, cqHead int
	phase                  bool
	sqDoorbell, cqDoorbell *uint32
	slots                  []slot
	epoch                  uint64 // counts resets: an older waiter's slot is gone
}

func (c *Controller) allocAdmin(entries int) error {
	page := c.pageBytes
	round := func(n int) int { return (n + page - 1) &^ (page - 1) }
	sq, cq, slots := round(entries*CommandBytes), round(entries*CompletionBytes), entries-1
	mem, err := c.allocDMA(int64(sq+cq+slots*page), "nvme admin queue")
	if err != nil {
		return err
	}
	q := &c.adm
	*q = adminQueue{
		entries: entries, mem: mem,
		sq: mem.mem[:entries*CommandBytes], sqIOVA: mem.iova,
		cq: mem.mem[sq : sq+entries*CompletionBytes], cqIOVA: mem.iova + IOVA(sq),
		data: mem.mem[sq+cq : sq+cq+slots*page], dataIOVA: mem.iova + IOVA(sq+cq),
		slots: make([]slot, slots),
	}
	return nil
}

// clearAdmin returns the queue to the state that CC.EN 0→1 starts from. Only while the
// controller is disabled: nothing is in flight then, so quarantined memory is freed too.
func (c *Controller) clearAdmin() error {
	q := &c.adm
	clear(q.sq)
	clear(q.cq)
	q.sqTail, q.sqHead, q.cqHead, q.phase = 0, 0, 0, true
	q.epoch++
	var err error
	for i := range q.slots {
		q.slots[i].state = slotFree
	}
	for _, b := range c.orphans {
		err = errs.Also(err, c.freeDMA(b))
	}
	c.orphans = nil
	return err
}

// submitLocked sends cmd, whose CID and data pointer it fills in, and returns the slot, or
// -1 when every CID is taken. At most entries-1 commands are out, so neither ring overflows.
func (c *Controller) submitLocked(cmd Command, bytes int) (int, error) {
	q := &c.adm
	i := -1
	quarantined := 0
	for k := range q.slots {
		switch q.slots[k].state {
		case slotFree:
			if i < 0 {
				i = k
			}
		case slotQuarantined:
			quarantined++
		}
	}
	next := (q.sqTail + 1) % q.entries
	if i < 0 || next == q.sqHead {
		if quarantined*2 > len(q.slots) {
			return -1, &TimeoutError{Bus: c.bus.Name(),
				Op: "admin queue: most commands never completed", After: c.opt.Timeout,
				Next: "reset the controller"}
		}
		return -1, nil
	}
	s := &q.slots[i]
	s.gen++
	if s.gen == 0xff {
		s.gen = 0 // CID FFFFh is reserved for the error log (figure 86)
	}
	s.state = slotBusy
	cmd.CID = s.cid(i)
	if bytes > 0 {
		page := q.data[i*c.pageBytes : (i+1)*c.pageBytes]
		clear(page) // what a controller leaves out must not read as an earlier answer
		cmd.PRP1, cmd.PRP2 = uint64(q.dataIOVA)+uint64(i*c.pageBytes), 0
	}
	*(*Command)(unsafe.Pointer(&q.sq[q.sqTail*CommandBytes])) = cmd
	q.sqTail = next
	StoreDoorbell(q.sqDoorbell, uint32(next))
	c.count.AdminCommands++
	return i, nil
}

// reapLocked retires the new entries of the admin completion queue, at most one round.
func (c *Controller) reapLocked() {
	q := &c.adm
	if c.fatal != nil || q.cqDoorbell == nil {
		return
	}
	n := 0
	for ; n < q.entries; n++ {
		e, ok := LoadCompletion((*Completion)(unsafe.Pointer(&q.cq[q.cqHead*CompletionBytes])),
			q.phase)
		if !ok {
			break
		}
		q.cqHead++
		if q.cqHead == q.entries {
			q.cqHead, q.phase = 0, !q.phase
		}
		if err := c.retireLocked(e); err != nil {
			c.fatal = err
			break
		}
	}
	if n > 0 {
		StoreDoorbell(q.cqDoorbell, uint32(q.cqHead))
	}
}

// retireLocked takes one completion. An error is a breach of the protocol, after which
// nothing that the controller says can be trusted.
func (c *Controller) retireLocked(e Completion) error {
	q := &c.adm
	breach := func(format string, args ...any) error {
		c.count.ForeignCompletions++
		return &ProtocolError{Bus: c.bus.Name(), What: fmt.Sprintf(format, args...)}
	}
	if e.SQID != 0 {
		return breach("a completion on the admin queue names submission queue %d", e.SQID)
	}
	// The new head lies between the old one and the tail (section 3.3.1.2).
	head := int(e.SQHead)
	if head >= q.entries || (head-q.sqHead+q.entries)%q.entries > (q.sqTail-q.sqHead+
		q.entries)%q.entries {
		return breach("submission queue head %d in a completion, with head %d and tail %d of %d",
			head, q.sqHead, q.sqTail, q.entries)
	}
	i := int(e.CID & 0xff)
	if i >= len(q.slots) || q.slots[i].state == slotFree || q.slots[i].state == slotDone ||
		q.slots[i].cid(i) != e.CID {
		return breach("a completion of command %04Xh, which is not in flight", e.CID)
	}
	q.sqHead = head
	s := &q.slots[i]
	if st := e.Status(); !st.OK() {
		c.count.StatusErrors++
	}
	switch s.state {
	case slotBusy:
		s.state, s.cqe = slotDone, e
	case slotQuarantined:
		c.count.LateCompletions++
		s.state = slotFree
	}
	return nil
}

func (c *Controller) kick() {
	if c.kicker != nil {
		c.kicker.Kick(0)
	}
}

// Admin waits: no longer than waitSlice without a look at the context, and a look at CSTS
// every checkEvery.
const (
	waitSlice  = 5 * time.Millisecond
	checkEvery = 5 * time.Millisecond
	maxSleep   = time.Millisecond
)

// pauser waits between two looks at a completion queue or a register.
type pauser struct {
	looks     int
	sleep     time.Duration
	nextCheck time.Time
}

// pause returns early when there may be news. It sleeps on the bus when that can, else
// yields a few times and then sleeps for growing times up to 1 ms.
func (p *pauser) pause(ctx context.Context, w Waiter, deadline time.Time) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	now := time.Now()
	left := deadline.Sub(now)
	if left <= 0 {
		return ErrTimeout
	}
	p.looks++
	if w != nil {
		w.WaitCQ(0, min(left, waitSlice))
		// A bus that returns at once with nothing, again and again, must not make this spin.
		if p.looks < 8 || time.Since(now) > 20*time.Microsecond {
			return nil
		}
	} else if p.looks < 8 {
		runtime.Gosched()
		return nil
	}
	p.sleep = min(max(2*p.sleep, 4*time.Microsecond), maxSleep)
	t := time.NewTimer(min(p.sleep, left))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// checkAlive looks at CSTS now and then during a wait of an enabled controller.
func (c *Controller) checkAlive(p *pauser, op string, force bool) error {
	now := time.Now()
	if p.nextCheck.IsZero() {
		p.nextCheck = now.Add(checkEvery)
	}
	if !force && now.Before(p.nextCheck) {
		return nil
	}
	p.nextCheck = now.Add(checkEvery)
	s, err := c.readCSTS(op)
	if err != nil {
		return err
	}
	switch {
	case s.CFS():
		return &FatalError{c.bus.Name(), op, s, ErrFatal}
	case !s.RDY():
		return &FatalError{c.bus.Name(), op + ": the controller left the ready state", s, ErrGone}
	}
	return nil
}

func (c *Controller) readCSTS(op string) (CSTS, error) {
	v, err := c.bus.Read32(RegCSTS)
	if err != nil {
		return 0, fmt.Errorf("nvme %s: %s: read CSTS: %w", c.bus.Name(), op, deviceClass(err))
	}
	gone := v == 0xffffffff
	if v == 0 {
		// A removed device may read as 0 everywhere, as QEMU's does; one that is there has a
		// version.
		vs, err := c.bus.Read32(RegVS)
		gone = err != nil || Version(vs) != c.version
	}
	if gone {
		return CSTS(v), &FatalError{c.bus.Name(), op, CSTS(v), ErrGone}
	}
	return CSTS(v), nil
}

// exec sends an admin command, waits for its completion and copies the data it
// returned to out (a multiple of 4 bytes up to a page, or none). setup is for bring-up and
// shutdown, when others are turned away.
func (c *Controller) exec(ctx context.Context, setup bool, op string, cmd Command,
	out []byte) (uint32, error) {
	if err := ctx.Err(); err != nil {
		return 0, c.waitErr(op, 0, err)
	}
	if len(out) > c.pageBytes {
		return 0, errs.New(errs.Usage, "nvme %s q0: %s: %d bytes of data; an admin command has a page",
			c.bus.Name(), op, len(out))
	}
	x := adminExec{c: c, setup: setup, op: op, deadline: time.Now().Add(c.opt.Timeout), out: out}
	if err := x.submit(ctx, cmd); err != nil {
		return 0, err
	}
	c.kick()
	for {
		if done, dw0, err := x.poll(); done {
			return dw0, err
		}
		x.pause(ctx)
	}
}

// adminExec is one admin command under way.
type adminExec struct {
	c        *Controller
	setup    bool
	op       string
	deadline time.Time
	out      []byte
	p        pauser
	slot     int
	cid      uint16
	epoch    uint64 // of the slot
	wait     error  // why the wait ended
}

// submit waits for a slot and puts the command in it.
func (x *adminExec) submit(ctx context.Context, cmd Command) error {
	c := x.c
	x.slot = -1
	for {
		c.mu.Lock()
		c.reapLocked()
		err := c.refusalLocked(x.setup)
		if err == nil {
			x.slot, err = c.submitLocked(cmd, len(x.out))
		}
		x.epoch = c.adm.epoch
		c.mu.Unlock()
		if err == nil && x.slot < 0 {
			err = c.waitErr(x.op, 0, x.p.pause(ctx, c.waiter, x.deadline))
		}
		if err != nil || x.slot >= 0 {
			return err
		}
	}
}

// poll looks for the completion. A command whose wait has ended leaves its slot in quarantine.
func (x *adminExec) poll() (done bool, dw0 uint32, err error) {
	c := x.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.adm.epoch != x.epoch { // a reset or Close took the slot and its memory
		if c.closed {
			return true, 0, c.gate
		}
		return true, 0, fmt.Errorf("nvme %s q0: %s: %w; send it again", c.bus.Name(), x.op,
			deviceClass(ErrReset))
	}
	c.reapLocked()
	s := &c.adm.slots[x.slot]
	if s.state == slotDone {
		e := s.cqe
		copy(x.out, c.adm.data[x.slot*c.pageBytes:])
		s.state = slotFree
		if st := e.Status(); !st.OK() {
			return true, e.DW0, &StatusError{Bus: c.bus.Name(), CID: e.CID, Op: x.op, Status: st}
		}
		return true, e.DW0, nil
	}
	x.cid = s.cid(x.slot)
	if x.wait == nil {
		x.wait = c.fatal
	}
	if x.wait == nil {
		return false, 0, nil
	}
	s.state = slotQuarantined
	if errors.Is(x.wait, ErrTimeout) {
		c.count.Timeouts++
	}
	return true, 0, x.wait
}

// pause waits for a moment, and sets wait where there is no more to wait for.
func (x *adminExec) pause(ctx context.Context) {
	c := x.c
	if err := x.p.pause(ctx, c.waiter, x.deadline); err != nil {
		x.wait = c.waitErr(x.op, x.cid, err)
		if errors.Is(err, ErrTimeout) {
			// The reason may be better known than "no answer".
			if e := c.checkAlive(&x.p, x.op, true); e != nil {
				x.wait = e
			}
		}
	} else if err := c.checkAlive(&x.p, x.op, false); err != nil {
		// A controller that a reset or Close is just disabling is not ready either; the
		// epoch will tell.
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.adm.epoch == x.epoch && (c.gate == nil || x.setup) {
			x.wait = err
			if c.fatal == nil {
				c.fatal = err
			}
		}
	}
}

// waitErr types the error of pause.
func (c *Controller) waitErr(op string, cid uint16, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrTimeout):
		return &TimeoutError{Bus: c.bus.Name(), CID: cid, Op: op, After: c.opt.Timeout,
			Next: "reset the controller; if it does so again, replace the SSD"}
	}
	return fmt.Errorf("nvme %s q0: %s: %w", c.bus.Name(), op, err)
}

// refusalLocked explains why a command may not be sent now.
func (c *Controller) refusalLocked(setup bool) error {
	if c.gate != nil && !setup {
		return c.gate
	}
	return c.fatal
}
