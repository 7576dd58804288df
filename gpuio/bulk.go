package gpuio

import (
	"context"
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

// Bulk moves long extents through a queue pair of its own, several commands in flight, each up to
// the controller's transfer limit. Data is copied through Bulk's DMA buffers, so callers may pass
// any memory. It serves loading and verification; calls are serialised.
//
// What does not complete is recovered in the same steps (recover.go), as far as one queue pair
// needs it: Abort, a new queue pair, a reset of the controller, which all its queues suffer, and
// then the error. Whatever is issued again may be: a read, a flush, or a write of the same data to
// the same place, of which no earlier attempt can land any more.
type Bulk struct {
	mu      sync.Mutex
	c       *nvme.Controller
	waiter  nvme.Waiter
	kicker  nvme.Kicker
	depth   int
	chunk   int // bytes per command
	timeout time.Duration
	retries int
	mem     []byte // depth × (chunk + list page)
	iova    nvme.IOVA
	stride  int
	slots   []bulkSlot
	q       *nvme.QueuePair
	tail    uint32
	head    uint32
	phase   uint32
	closed  bool
	resets  int // of the controller, at most
	visit   bool
	tried   ssdRecovery
	lost    *GivenUpError // why the queue cannot be used any more
	// the controller's generation when the queue pair was created; 0: it was deleted
	made uint64
	done uint64 // completions
	idle uint64 // done when the queue pair was replaced, plus 1; 0: it was not
}

type bulkSlot struct {
	busy     bool
	done     bool
	aborted  bool
	gen      uint32 // of its last identifier, as cmdGen of a command's state; outlives the command
	attempts int
	deadline time.Time
	lba      nvme.LBA
	blocks   uint32
	at       int // offset in the caller's data
	n        int
	status   nvme.Status
}

const (
	bulkChunk   = 256 << 10
	bulkRetries = 3
	bulkTimeout = 10 * time.Second
	// abortGrace bounds the time that an aborted command may take to post its completion before the
	// queue pair is given up.
	abortGrace = 500 * time.Millisecond
)

// BulkOption changes a default of NewBulk.
type BulkOption func(*Bulk)

// BulkTimeout sets the deadline of each command (10 s).
func BulkTimeout(d time.Duration) BulkOption { return func(b *Bulk) { b.timeout = d } }

// BulkRetries sets how often a command is tried again (3).
func BulkRetries(n int) BulkOption { return func(b *Bulk) { b.retries = n } }

// BulkResets sets how often the controller is reset (3); negative: never.
func BulkResets(n int) BulkOption { return func(b *Bulk) { b.resets = max(n, 0) } }

// BulkVisit says that the Bulk is closed within moments: others wait for its queue pair.
func BulkVisit() BulkOption { return func(b *Bulk) { b.visit = true } }

// NewBulk creates a queue pair with up to depth commands in flight (1 to 256).
func NewBulk(ctx context.Context, c *nvme.Controller, depth int, opts ...BulkOption) (*Bulk,
	error) {
	page := c.PageBytes()
	depth = min(max(depth, 1), 256, c.MaxQueueEntries()-1)
	lba := c.Namespace().LBABytes
	b := &Bulk{c: c, depth: depth, timeout: bulkTimeout, retries: bulkRetries,
		resets: defaultResets}
	for _, o := range opts {
		o(b)
	}
	b.waiter, _ = c.Bus().(nvme.Waiter)
	b.kicker, _ = c.Bus().(nvme.Kicker)
	b.chunk = bulkChunk
	if m := c.MaxTransferBytes(); m > 0 && m < b.chunk {
		b.chunk = m
	}
	b.chunk -= b.chunk % max(lba, page)
	if b.chunk == 0 {
		return nil, errs.New(errs.Capability,
			"nvme %s: transfers are limited to %d bytes, less than a page or an LBA of %d bytes",
			c.Name(), c.MaxTransferBytes(), lba)
	}
	if b.chunk/page > page/8 {
		b.chunk = page * (page / 8) // one list page per command
	}
	// A slot is its data and one page for the PRP list.
	b.stride = b.chunk + page
	mem, err := hostmem.Alloc(int64(depth*b.stride), "gpuio bulk")
	if err != nil {
		return nil, err
	}
	if b.iova, err = c.MapDMA(mem); err != nil {
		return nil, errors.Join(fmt.Errorf("nvme %s: map bulk buffers: %w", c.Name(), err),
			hostmem.Free(mem))
	}
	b.mem = mem
	b.slots = make([]bulkSlot, depth)
	if err := b.createQueue(ctx); err != nil {
		return nil, errors.Join(err, b.freeMemory())
	}
	return b, nil
}

func (b *Bulk) createQueue(ctx context.Context) error {
	create := b.c.CreateQueuePair
	if b.visit {
		create = b.c.VisitQueuePair
	}
	q, err := create(ctx, b.depth+1)
	if err != nil {
		return err
	}
	b.q, b.tail, b.head, b.phase = q, 0, 0, 1
	b.made = b.c.Generation()
	return nil
}

func (b *Bulk) freeMemory() error {
	if b.mem == nil {
		return nil
	}
	if err := b.c.UnmapDMA(b.iova, int64(len(b.mem))); err != nil {
		return err // the SSD may still write there: better a leak than somebody else's memory
	}
	err := hostmem.Free(b.mem)
	b.mem = nil
	return err
}

// WriteAt writes data, a whole number of LBAs, beginning at lba. Data is durable after Flush.
func (b *Bulk) WriteAt(ctx context.Context, lba nvme.LBA, data []byte) error {
	return b.transfer(ctx, true, lba, data)
}

// ReadAt reads len(dst) bytes, a whole number of LBAs, beginning at lba. On an error the content
// of dst is undefined.
func (b *Bulk) ReadAt(ctx context.Context, lba nvme.LBA, dst []byte) error {
	return b.transfer(ctx, false, lba, dst)
}

// Flush makes all data written before it durable.
func (b *Bulk) Flush(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.run(ctx, opFlush, 0, nil)
}

// Close deletes the queue pair and frees the buffers.
func (b *Bulk) Close(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	var err error
	if b.q != nil {
		err = b.c.DeleteQueuePair(ctx, b.q)
		if b.lost != nil { // that was told
			err = nil
		}
		b.q = nil
	}
	return errors.Join(err, b.freeMemory())
}

type bulkOp uint8

const (
	opRead bulkOp = iota
	opWrite
	opFlush
)

func (o bulkOp) String() string { return [...]string{"read", "write", "flush"}[o] }

func (b *Bulk) transfer(ctx context.Context, write bool, lba nvme.LBA, data []byte) error {
	ns := b.c.Namespace()
	op := opRead
	if write {
		op = opWrite
	}
	if len(data)%ns.LBABytes != 0 {
		return errs.New(errs.Usage,
			"nvme %s: %s of %d bytes at LBA %d is not a whole number of %d byte LBAs", b.c.Name(),
			op, len(data), lba, ns.LBABytes)
	}
	blocks := uint64(len(data) / ns.LBABytes)
	if uint64(lba) > ns.Blocks || blocks > ns.Blocks-uint64(lba) {
		return errs.New(errs.Usage,
			"nvme %s: %s LBA %d+%d: the namespace ends at %d; bind a larger SSD", b.c.Name(), op,
			lba, blocks, ns.Blocks)
	}
	if len(data) == 0 {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.run(ctx, op, lba, data)
}

// run keeps the slots busy until all of data has moved, or the first permanent error; then it
// waits for what is in flight, because the slots' memory belongs to those commands.
func (b *Bulk) run(ctx context.Context, op bulkOp, lba nvme.LBA, data []byte) error {
	if b.lost != nil {
		return fmt.Errorf("nvme %s: %s LBA %d: %w", b.c.Name(), op, lba, b.lost)
	}
	if b.closed || b.q == nil {
		return errs.New(errs.Device, "nvme %s: bulk queue is closed; open the SSD again",
			b.c.Name())
	}
	if err := b.c.Leaving(); err != nil {
		return fmt.Errorf("%s LBA %d: %w", op, lba, err)
	}
	ns := b.c.Namespace()
	var first error
	next, inflight := 0, 0
	flushed := op != opFlush
	for {
		if first == nil && ctx.Err() != nil {
			first = fmt.Errorf("nvme %s: %s LBA %d: %w", b.c.Name(), op, lba, ctx.Err())
		}
		rang := false
		for i := range b.slots {
			if first != nil || (next >= len(data) && flushed) {
				break
			}
			s := &b.slots[i]
			if s.busy {
				continue
			}
			n := min(b.chunk, len(data)-next)
			*s = bulkSlot{gen: s.gen, busy: true, at: next, n: n,
				lba: lba + nvme.LBA(next/ns.LBABytes), blocks: uint32(n / ns.LBABytes)}
			flushed = true
			if op == opWrite {
				copy(b.mem[i*b.stride:], data[next:next+n])
			}
			if err := b.issue(i, op); err != nil {
				s.busy = false
				first = err
				break
			}
			next += n
			inflight++
			rang = true
		}
		if rang {
			b.ring()
		}
		if inflight == 0 {
			return first
		}
		if err := b.reap(ctx, op, data, &inflight, &first); err != nil {
			return err
		}
	}
}

// issue writes slot i's command to the submission queue; ring makes it visible.
func (b *Bulk) issue(i int, op bulkOp) error {
	s := &b.slots[i]
	s.gen = issued(s.gen) & cmdGen
	cid := wireCID(uint32(i), s.gen)
	ns := b.c.Namespace()
	var cmd nvme.Command
	if op == opFlush {
		cmd = nvme.FlushCommand(cid, ns.ID)
	} else {
		off := i * b.stride
		page := b.c.PageBytes()
		prp1, prp2, err := nvme.BuildPRP(b.iova+nvme.IOVA(off), s.n, page,
			func() ([]uint64, nvme.IOVA, error) {
				list := off + b.chunk
				return unsafe.Slice((*uint64)(unsafe.Pointer(&b.mem[list])), page/8), b.iova +
					nvme.IOVA(list), nil
			})
		if err != nil {
			return err
		}
		if op == opWrite {
			cmd = nvme.WriteCommand(cid, ns.ID, s.lba, s.blocks, prp1, prp2)
		} else {
			cmd = nvme.ReadCommand(cid, ns.ID, s.lba, s.blocks, prp1, prp2)
		}
	}
	*(*nvme.Command)(unsafe.Pointer(&b.q.SQ[b.tail*64])) = cmd
	b.tail++
	if b.tail == uint32(b.q.Entries) {
		b.tail = 0
	}
	s.attempts++
	s.aborted = false
	s.done = false
	s.deadline = time.Now().Add(b.timeout)
	return nil
}

func (b *Bulk) ring() {
	nvme.StoreDoorbell(b.q.SQDoorbell, b.tail)
	if b.kicker != nil {
		b.kicker.Kick(b.q.ID)
	}
}

// reap waits for completions and deals with them. It returns an error only when the queue pair is
// lost; errors of commands go to first.
func (b *Bulk) reap(ctx context.Context, op bulkOp, data []byte, inflight *int,
	first *error) error {
	var pace napper
	for {
		n, foreign := b.sweep()
		b.retire(op, data, inflight, first)
		if foreign != nil {
			// All are charged an attempt for it. Those without one left end with the error.
			for i := range b.slots {
				if s := &b.slots[i]; s.busy && s.attempts > b.retries && *first == nil {
					*first = foreign
				}
			}
			return b.recreate(op, inflight, first, true)
		}
		if n > 0 {
			return nil
		}
		now := time.Now()
		wait := b.timeout
		expired := false
		for i := range b.slots {
			s := &b.slots[i]
			if !s.busy {
				continue
			}
			d := s.deadline.Sub(now)
			if d <= 0 {
				recovered, err := b.late(ctx, i, op, inflight, first)
				if recovered || err != nil {
					return err
				}
				expired = true
				d = min(abortGrace, b.timeout)
				s.deadline = now.Add(d)
			}
			wait = min(wait, d)
		}
		if !expired {
			waitCQ(b.waiter, b.q.ID, min(wait, 100*time.Millisecond), &pace)
		}
		if *first == nil && ctx.Err() != nil {
			return nil // run records it
		}
	}
}

// retire ends commands that have completed, or issues them again where they may be.
func (b *Bulk) retire(op bulkOp, data []byte, inflight *int, first *error) {
	resubmitted := false
	for i := range b.slots {
		s := &b.slots[i]
		if !s.busy || !s.done {
			continue
		}
		if s.status.OK() {
			if op == opRead {
				copy(data[s.at:s.at+s.n], b.mem[i*b.stride:])
			}
			s.busy = false
			*inflight--
			continue
		}
		if !s.status.DNR() && s.attempts <= b.retries && *first == nil {
			if err := b.issue(i, op); err == nil {
				resubmitted = true
				continue
			}
		}
		b.fail(s, op, wireCID(uint32(i), s.gen), first)
		*inflight--
	}
	if resubmitted {
		b.ring()
	}
}

// late deals with a command past its deadline. The first time it is aborted; after that its queue
// pair is replaced, or the controller reset, and recovered is true.
func (b *Bulk) late(ctx context.Context, i int, op bulkOp, inflight *int,
	first *error) (recovered bool, err error) {
	s := &b.slots[i]
	if err := b.c.Health(); err != nil {
		return true, b.heal(op, inflight, first, err)
	}
	if s.aborted && b.idle == b.done+1 && s.attempts <= b.retries &&
		b.tried.resets.Load() < int64(b.resets) {
		return true, b.heal(op, inflight, first, fmt.Errorf(
			"nvme %s q%d: nothing completed within %v on its new queue pair either",
			b.c.Name(), b.q.ID, b.timeout))
	}
	if s.aborted {
		return true, b.recreate(op, inflight, first, false)
	}
	s.aborted = true
	b.tried.timeouts.Add(1)
	b.tried.aborts.Add(1)
	// A refused or failing Abort changes nothing: the grace period decides.
	actx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortGrace)
	defer cancel()
	_, _ = b.c.Abort(actx, b.q.ID, wireCID(uint32(i), s.gen))
	return false, nil
}

func (b *Bulk) fail(s *bulkSlot, op bulkOp, cid uint16, first *error) {
	s.busy = false
	switch {
	case *first != nil:
	case s.aborted && s.status.Is(nvme.StatusAbortRequested):
		*first = b.timeoutError(s, op, cid, b.q.ID)
	default:
		*first = errs.With(errs.Device, &nvme.StatusError{Bus: b.c.Name(), QID: b.q.ID, CID: cid,
			Op: op.String(), LBA: s.lba, Blocks: s.blocks, Status: s.status})
	}
}

func (b *Bulk) timeoutError(s *bulkSlot, op bulkOp, cid, qid uint16) error {
	return errs.With(errs.Device, &TimeoutError{SSD: b.c.Name(), QID: qid, CID: cid,
		Op: op.String(), LBA: s.lba, Blocks: s.blocks, After: b.timeout, Attempts: s.attempts,
		Tried: b.tried.tried()})
}

// sweep takes what is in the completion queue and rings its doorbell once.
func (b *Bulk) sweep() (n int, foreign error) {
	for ; n < b.q.Entries; n++ {
		e := unsafe.Pointer(&b.q.CQ[b.head*16])
		dw3 := atomic.LoadUint32((*uint32)(unsafe.Add(e, 12)))
		if dw3>>16&1 != b.phase {
			break
		}
		cid := dw3 & cidMask
		b.head++
		if b.head == uint32(b.q.Entries) {
			b.head = 0
			b.phase ^= 1
		}
		if int(cid) >= len(b.slots) || !b.slots[cid].busy || b.slots[cid].done ||
			b.slots[cid].gen != dw3&cmdGen {
			foreign = errs.New(errs.Device,
				"nvme %s q%d: completion for command %d, which is not in flight", b.c.Name(),
				b.q.ID, dw3&0xffff)
			continue
		}
		b.slots[cid].done = true
		b.slots[cid].status = nvme.Status(dw3 >> 17)
	}
	b.done += uint64(n)
	if n > 0 {
		nvme.StoreDoorbell(b.q.CQDoorbell, b.head)
	}
	return n, foreign
}

// recreate deletes the queue pair, after which no DMA of its commands can happen, and creates it
// again. all: each command is charged an attempt, not only the late ones.
func (b *Bulk) recreate(op bulkOp, inflight *int, first *error, all bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), recoveryTimeout)
	defer cancel()
	id := b.q.ID
	err := b.c.DeleteQueuePair(ctx, b.q)
	b.q = nil
	if err == nil {
		b.made = 0
		err = b.createQueue(ctx)
	}
	if err != nil {
		return b.heal(op, inflight, first,
			fmt.Errorf("nvme %s q%d: its queue pair could not be replaced: %w", b.c.Name(),
				id, err))
	}
	b.tried.recreated.Add(1)
	b.idle = b.done + 1
	b.reissue(op, inflight, first, id, all)
	return nil
}

// reissue has what was in flight on a queue pair that is gone issued again, but for commands that
// have used their attempts up, or that nobody waits for any more.
func (b *Bulk) reissue(op bulkOp, inflight *int, first *error, id uint16, all bool) {
	again := false
	for i := range b.slots {
		s := &b.slots[i]
		if !s.busy {
			continue
		}
		charged := all || s.aborted
		if (!charged || s.attempts <= b.retries) && *first == nil {
			if !charged {
				s.attempts--
			}
			err := b.issue(i, op)
			if err == nil {
				again = true
				continue
			}
			*first = err
		}
		if *first == nil {
			*first = b.timeoutError(s, op, wireCID(uint32(i), s.gen), id)
		}
		s.busy = false
		*inflight--
	}
	if again {
		b.ring()
	}
}

// heal resets the controller, and gives up when that may not be, or did not help: then the slots'
// memory stays taken until Close. cause is why.
func (b *Bulk) heal(op bulkOp, inflight *int, first *error, cause error) error {
	id, lba, blocks := uint16(0), nvme.LBA(0), uint32(0)
	if b.q != nil {
		id = b.q.ID
	}
	for i := range b.slots {
		if s := &b.slots[i]; s.busy {
			lba, blocks = s.lba, s.blocks
			break
		}
	}
	// For a caller who has given up, a controller that others may use is not reset.
	for *first == nil && b.tried.resets.Load() < int64(b.resets) &&
		!errors.Is(b.c.Health(), nvme.ErrGone) {
		b.tried.resets.Add(1)
		err := b.reset()
		if err == nil {
			b.idle = 0
			b.reissue(op, inflight, first, id, false)
			return nil
		}
		cause = err
	}
	if err := b.c.Health(); errors.Is(err, nvme.ErrGone) {
		cause = err
	}
	b.lost = &GivenUpError{SSD: b.c.Name(), Tried: b.tried.tried(),
		Unsafe: b.made == b.c.Generation(), Err: cause}
	if *first != nil {
		return *first
	}
	return errs.With(errs.Device, fmt.Errorf("nvme %s q%d: %s LBA %d+%d: %w", b.c.Name(), id, op,
		lba, blocks, b.lost))
}

func (b *Bulk) reset() error {
	ctx, cancel := context.WithTimeout(context.Background(), b.c.ResetTimeout())
	defer cancel()
	if err := b.c.Reset(ctx); err != nil {
		return err
	}
	if b.q != nil { // gone; this frees its memory
		err := b.c.DeleteQueuePair(ctx, b.q)
		b.q = nil
		if err != nil {
			return err
		}
	}
	return b.createQueue(ctx)
}
