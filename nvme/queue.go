package nvme

import (
	"context"
	"errors"
	"fmt"
	"time"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

// QueuePair is an I/O submission queue and the completion queue that is its alone. It holds
// memory and doorbells only; whoever created it drives it: CIDs, tail, head and phase, which
// starts as true. At most Entries-1 commands may be in flight, since tail == head means
// empty.
type QueuePair struct {
	ID         uint16
	Entries    int    // of either ring
	SQ         []byte // Entries × CommandBytes, shared with the controller
	CQ         []byte // Entries × CompletionBytes, shared with the controller
	SQDoorbell *uint32
	CQDoorbell *uint32

	generation uint64 // Controller.generation at creation
	visit      bool   // it is deleted within moments
}

// QueueMemory is memory for a queue pair that its creator gives, such as another device's. Both
// rings begin on a page of the controller, and the completion ring is zero. The giver keeps it
// mapped and gives it to no other queue until DeleteQueuePair, Reset, Disable or Close has returned
// nil.
type QueueMemory struct {
	SQ, CQ         []byte // as the CPU reaches them: perhaps I/O memory
	SQAddr, CQAddr IOVA
}

// QueueBytes returns how much memory the rings of a queue pair take, each in whole pages.
func (c *Controller) QueueBytes(entries int) (sq, cq int) {
	page := c.pageBytes
	return (entries*CommandBytes + page - 1) &^ (page - 1), (entries*CompletionBytes + page -
		1) &^ (page - 1)
}

// CreateQueuePair creates an I/O queue pair of entries ring entries (2 to MaxQueueEntries).
// There can be MaxQueuePairs at a time.
func (c *Controller) CreateQueuePair(ctx context.Context, entries int) (*QueuePair, error) {
	return c.CreateQueuePairIn(ctx, entries, nil)
}

// visitWait bounds the wait for a visitor's queue pair.
const visitWait = 5 * time.Second

// VisitQueuePair is CreateQueuePair for a few commands. Others who find all queue pairs taken wait
// until it is deleted.
func (c *Controller) VisitQueuePair(ctx context.Context, entries int) (*QueuePair, error) {
	return c.create(ctx, entries, nil, true)
}

// CreateQueuePairIn is CreateQueuePair in memory of the caller's; nil: of the Controller's own.
func (c *Controller) CreateQueuePairIn(ctx context.Context, entries int,
	given *QueueMemory) (*QueuePair, error) {
	for end := time.Now().Add(visitWait); ; {
		qp, err := c.create(ctx, entries, given, false)
		if !errors.Is(err, errVisited) || time.Now().After(end) {
			return qp, err
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), err)
		case <-time.After(time.Millisecond):
		}
	}
}

// errVisited is in the error of a creation that a visitor stood in the way of.
var errVisited = errors.New("one of them for a moment")

func (c *Controller) create(ctx context.Context, entries int, given *QueueMemory, visit bool) (
	*QueuePair, error) {
	if given != nil {
		if err := c.checkQueueMemory(entries, given); err != nil {
			return nil, err
		}
	}
	if entries < 2 || entries > c.MaxQueueEntries() {
		return nil, errs.New(errs.Usage, "nvme %s: queues of %d entries; use 2 to %d", c.bus.Name(),
			entries, c.MaxQueueEntries())
	}
	if err := c.Leaving(); err != nil {
		return nil, err
	}
	c.life.RLock()
	defer c.life.RUnlock()
	qp := &QueuePair{Entries: entries, visit: visit}
	c.mu.Lock()
	err := c.refusalLocked(false)
	if err == nil {
		qp.generation = c.generation
		// After a reset somebody may not know yet that his queue is gone, and ring its doorbells:
		// its ID is not given to others before he has deleted it.
		old := make(map[uint16]bool)
		for p := range c.pairs {
			old[p.ID] = old[p.ID] || p.generation != c.generation
		}
		for id := 1; id <= c.granted && qp.ID == 0; id++ {
			if c.queues[uint16(id)] == nil && !old[uint16(id)] {
				qp.ID = uint16(id)
			}
		}
		if qp.ID == 0 {
			err = errs.New(errs.Capability,
				"nvme %s: all %d queue pairs that the controller granted are in use; use fewer blocks or queues",
				c.bus.Name(), c.granted)
			for _, other := range c.queues {
				if other.visit {
					err = fmt.Errorf("%w, %w", err, errVisited)
					break
				}
			}
		} else {
			c.queues[qp.ID] = qp
		}
	}
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := c.createQueues(ctx, qp, given); err != nil {
		return nil, err
	}
	return qp, nil
}

func (c *Controller) checkQueueMemory(entries int, m *QueueMemory) error {
	page := IOVA(c.pageBytes)
	switch {
	case len(m.SQ) < entries*CommandBytes || len(m.CQ) < entries*CompletionBytes:
		return errs.New(errs.Usage,
			"nvme %s: %d and %d bytes of memory for queues of %d entries: want %d and %d",
			c.bus.Name(),
			len(m.SQ), len(m.CQ), entries, entries*CommandBytes, entries*CompletionBytes)
	case m.SQAddr%page != 0 || m.CQAddr%page != 0:
		return errs.New(errs.Usage,
			"nvme %s: memory for queues at %#x and %#x: want multiples of %d", c.bus.Name(),
			uint64(m.SQAddr), uint64(m.CQAddr), page)
	}
	return nil
}

// createQueues makes qp, whose ID is reserved. On error the ID is free again unless the
// controller may still hold the queue.
func (c *Controller) createQueues(ctx context.Context, qp *QueuePair, given *QueueMemory) error {
	giveUp := func(err error) error {
		c.mu.Lock()
		delete(c.queues, qp.ID)
		c.mu.Unlock()
		return err
	}
	var err error
	if qp.SQDoorbell, err = c.bus.Doorbell(uint32(qp.ID) * 2); err == nil {
		qp.CQDoorbell, err = c.bus.Doorbell(uint32(qp.ID)*2 + 1)
	}
	if err != nil {
		return giveUp(fmt.Errorf("nvme %s q%d: doorbell: %w", c.bus.Name(), qp.ID,
			deviceClass(err)))
	}
	var mem dmaBuf
	if given == nil {
		// Both rings start a page (section 5.3: PRP Entry 1 of a contiguous queue has offset 0).
		sq, cq := c.QueueBytes(qp.Entries)
		if mem, err = c.allocDMA(int64(sq+cq), "nvme queue pairs"); err != nil {
			return giveUp(err)
		}
		given = &QueueMemory{SQ: mem.mem[:sq], SQAddr: mem.iova,
			CQ: mem.mem[sq:], CQAddr: mem.iova + IOVA(sq)}
	}
	qp.SQ, qp.CQ = given.SQ, given.CQ
	qp.SQ = qp.SQ[: qp.Entries*CommandBytes : qp.Entries*CommandBytes]
	qp.CQ = qp.CQ[: qp.Entries*CompletionBytes : qp.Entries*CompletionBytes]

	_, err = c.exec(ctx, false, fmt.Sprintf("create completion queue %d", qp.ID),
		CreateCQCommand(0, qp.ID, qp.Entries, given.CQAddr), nil)
	if err != nil {
		var se *StatusError
		if errors.As(err, &se) { // refused: the controller does not know the memory
			return giveUp(errs.Also(err, c.freeDMA(mem)))
		}
		c.orphan(mem)
		return err
	}
	_, err = c.exec(ctx, false, fmt.Sprintf("create submission queue %d", qp.ID),
		CreateSQCommand(0, qp.ID, qp.Entries, given.SQAddr, qp.ID), nil)
	if err != nil {
		var se *StatusError
		if !errors.As(err, &se) {
			c.orphan(mem)
			return err
		}
		if _, derr := c.exec(ctx, false, fmt.Sprintf("delete completion queue %d", qp.ID),
			DeleteCQCommand(0, qp.ID), nil); derr != nil {
			c.orphan(mem)
			return errs.Also(err, derr)
		}
		return giveUp(errs.Also(err, c.freeDMA(mem)))
	}
	c.mu.Lock()
	c.pairs[qp] = mem
	c.mu.Unlock()
	return nil
}

// orphan keeps memory that the controller may still write to until it is disabled.
func (c *Controller) orphan(b dmaBuf) {
	c.mu.Lock()
	c.orphans = append(c.orphans, b)
	c.mu.Unlock()
}

// DeleteQueuePair deletes the submission queue, then the completion queue, and frees their
// memory. Commands in flight end with it: when it returned nil none of them moves data any
// more. After an error that may still happen, so the memory stays until Reset or Close. Of a
// queue pair from before a Reset only the memory is freed.
func (c *Controller) DeleteQueuePair(ctx context.Context, qp *QueuePair) error {
	c.life.RLock()
	defer c.life.RUnlock()
	c.mu.Lock()
	mem, ok := c.pairs[qp]
	stale := qp.generation != c.generation
	var err error
	if !ok {
		err = fmt.Errorf("nvme %s q%d: no such queue pair; it was deleted already",
			c.bus.Name(), qp.ID)
	} else if !stale {
		err = c.refusalLocked(false)
	}
	if err != nil {
		c.mu.Unlock()
		return err
	}
	delete(c.pairs, qp) // claimed: a second call finds nothing
	c.mu.Unlock()
	if !stale {
		if err := c.deleteQueues(ctx, false, qp); err != nil {
			c.orphan(mem)
			return err
		}
		c.mu.Lock()
		delete(c.queues, qp.ID)
		c.mu.Unlock()
	}
	return c.freeDMA(mem)
}

func (c *Controller) deleteQueues(ctx context.Context, setup bool, qp *QueuePair) error {
	for _, q := range []struct {
		op  string
		cmd Command
	}{
		{fmt.Sprintf("delete submission queue %d", qp.ID), DeleteSQCommand(0, qp.ID)},
		{fmt.Sprintf("delete completion queue %d", qp.ID), DeleteCQCommand(0, qp.ID)},
	} {
		_, err := c.exec(ctx, setup, q.op, q.cmd, nil)
		var se *StatusError
		if errors.As(err, &se) && (se.Status.Is(StatusInvalidQueueID) ||
			se.Status.Is(StatusInvalidCQ) && q.cmd.Opcode == AdminDeleteCQ) {
			// the controller does not have it: that is what was wanted (QEMU says so with the other
			// code)
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// shutdown tells the controller that power may go (section 3.6.1).
func (c *Controller) shutdown(ctx context.Context) error {
	cc, err := c.bus.Read32(RegCC)
	if err == nil {
		err = c.bus.Write32(RegCC, cc&^uint32(CCShutdownMask)|uint32(CCShutdownNormal))
	}
	if err != nil {
		return fmt.Errorf("nvme %s: shutdown: %w", c.bus.Name(), deviceClass(err))
	}
	// RTD3E is the controller's own estimate, 0 when it has none.
	id := c.Identity()
	d := max(min(time.Duration(id.RTD3E)*time.Microsecond, time.Minute), c.opt.ShutdownTimeout)
	return c.waitCSTS(ctx, "shutdown: CSTS.SHST is not complete", CSTSShutdownMask,
		CSTSShutdownComplete, true, d)
}

// release disables the controller and frees all memory; closeBus closes the bus too. Memory
// goes back only when the controller cannot reach it any more: it is disabled, or its bus is
// closed.
func (c *Controller) release(ctx context.Context, closeBus bool) error {
	var err error
	if c.enabled {
		// Bounded by CAP.TO; not by the caller's context, since leaving it on is worse. If
		// RDY did not follow EN, start has waited for it already.
		if err = c.disable(context.WithoutCancel(ctx), false); err == nil {
			c.enabled = false
		}
	}
	// Whoever still waits must look at neither queue nor registers any more.
	c.mu.Lock()
	c.adm.epoch++
	c.adm.sqDoorbell, c.adm.cqDoorbell = nil, nil
	c.mu.Unlock()
	free := func(give func(dmaBuf) error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		all := append(c.orphans, c.adm.mem)
		for _, b := range c.pairs {
			all = append(all, b)
		}
		for _, b := range all {
			err = errs.Also(err, give(b))
		}
		c.orphans = nil
		c.adm.mem, c.adm.sq, c.adm.cq, c.adm.data = dmaBuf{}, nil, nil, nil
		clear(c.pairs)
		clear(c.queues)
	}
	if !c.enabled {
		free(c.freeDMA)
	}
	if !closeBus {
		return err
	}
	if cerr := c.bus.Close(); cerr != nil {
		return errs.Also(err, fmt.Errorf("nvme %s: close: %w", c.bus.Name(), cerr))
	}
	if c.enabled {
		free(func(b dmaBuf) error { // the mappings ended with the bus
			if b.mem == nil {
				return nil
			}
			return hostmem.Free(b.mem)
		})
	}
	return err
}
