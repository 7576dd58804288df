package gpuio

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync/atomic"
	"time"

	"helios/internal/errs"
	"helios/nvme"
)

// Recovery of queues that a complete kernel has frozen. A frozen queue's completion side belongs
// to the host (kernels skip it); its submission side is taken like any kernel takes it. So the
// other queues go on meanwhile.
//
// First the late commands are aborted and get a grace period for their completions. If these do
// not come, the queue pair is deleted, after which the SSD cannot write to their destinations any
// more, and created again; what was outstanding is read again until its attempts are used up. If
// the queue pair cannot be deleted, only a reset of the controller ends its DMA: the SSD is then
// given up.

// recover deals with the frozen queues that hold rows of p. Its error is ctx's.
func (e *async) recover(ctx context.Context, p *asyncPending) error {
	e.recMu.Lock()
	defer e.recMu.Unlock()
	if err := e.quiesce(ctx); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("gpuio %s: wait for %d rows: %w", e.name, p.rows, ctx.Err())
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.broken == nil {
			e.broken = fmt.Errorf("gpuio %s: %w", e.name, err)
		}
		return nil
	}
	rem := e.remaining(p.slot)
	for g := range rem {
		q := e.queue(g)
		if atomic.LoadUint32(&rem[g]) == 0 {
			continue
		}
		if e.sync != nil {
			e.leftover(p, g)
		}
		if atomic.LoadUint32(&q.Frozen) == frozenNo {
			continue
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("gpuio %s: wait for %d rows: %w", e.name, p.rows, err)
		}
		// What was begun is finished whatever happens to ctx: half a recovery helps nobody.
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recoveryTimeout)
		e.recoverQueue(rctx, g)
		cancel()
		if e.sync != nil {
			e.leftover(p, g)
		}
	}
	return nil
}

// recoveryTimeout bounds the admin commands of one queue's recovery.
const recoveryTimeout = 15 * time.Second

func (e *async) kernelView() kernelView {
	return kernelView{h: e.host, sets: e.setBuf.Ptr(), deferred: !e.onHost()}
}

// enter keeps recovery and launches apart, on a device whose kernels must not run while the host
// changes what it shares with them. Its error is ctx's.
func (e *async) enter(ctx context.Context) error {
	if e.gate == nil {
		return nil
	}
	select {
	case e.gate <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *async) leave() {
	if e.gate != nil {
		<-e.gate
	}
}

// quiesce waits until no kernel runs, on a device other than the host's: a read-modify-write of the
// CPU and one of a GPU on the same word are not atomic to each other across PCIe (CUDA C++
// Programming Guide, "Mapped Memory"). It also learns what time it is on the device. The caller has
// entered, so that none is launched.
func (e *async) quiesce(ctx context.Context) error {
	if e.onHost() {
		return nil
	}
	if err := errors.Join(e.submitS.Synchronize(ctx), e.complS.Synchronize(ctx)); err != nil {
		return err
	}
	last := int64(0)
	for s := range uint32(maxSets) {
		last = max(last, e.set(s).DoneNS)
	}
	// A look is behind by as long as the kernel's end lies back, which is long when the caller waits
	// late; never ahead. So the largest is the best.
	if offset := last - nanotime(); !e.clockKnown || offset > e.clockOffset {
		e.clockOffset, e.clockKnown = offset, true
	}
	return nil
}

// now is the time on the clock of the commands' deadlines.
func (e *async) now() int64 { return nanotime() + e.clockOffset }

// own takes a frozen queue's submission side. Kernels hold it for the length of a refill.
func (e *async) own(ctx context.Context, q *queueState) error {
	for !atomic.CompareAndSwapUint32(&q.Own, ownFree, ownHeld) {
		if err := ctx.Err(); err != nil {
			return err
		}
		runtime.Gosched()
	}
	return nil
}

func (e *async) recoverQueue(ctx context.Context, g int) {
	q := e.queue(g)
	if err := e.own(ctx, q); err != nil {
		// A kernel that never lets go has failed; its stream says so.
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.broken == nil {
			e.broken = errs.New(errs.Device, "nvme %s q%d: a kernel does not release the queue", e.ssds[q.SSD].name(), q.QID)
		}
		return
	}
	// A warp of read_sync that left may have missed that its command was done. None runs now: the row
	// is read again.
	q.commands(func(cid uint32, cmd *command) {
		if state := atomic.LoadUint32(&cmd.State); state&cmdState == cmdDone {
			atomic.StoreUint32(&cmd.State, state&^(cmdState|cmdAborted)|cmdRetry)
			atomic.OrUint32(&q.Retry[cid/32], 1<<(cid&31))
		}
	})
	switch atomic.LoadUint32(&q.Frozen) {
	case frozenNo, frozenClosing, frozenUnsafe:
	case frozenDead:
		e.failQueue(q, g)
	case frozenTimeout:
		if !e.abortLate(ctx, q) {
			e.recreate(ctx, q, g)
		}
	default:
		e.recreate(ctx, q, g)
	}
	k := e.kernelView()
	for !q.release() {
		k.refill(q, uint32(g))
	}
}

// commands calls fn for each command that is in use.
func (q *queueState) commands(fn func(cid uint32, cmd *command)) {
	for w := uint32(0); w*32 < q.NumCommands; w++ {
		for m := ^atomic.LoadUint32(&q.Free[w]); m != 0; m &= m - 1 {
			cid := w*32 + uint32(bits.TrailingZeros32(m))
			if cid >= q.NumCommands {
				break
			}
			cmd := at[command](q.Commands, int(cid))
			if atomic.LoadUint32(&cmd.State)&cmdState != cmdFree {
				fn(cid, cmd)
			}
		}
	}
}

// abortLate aborts the commands past their deadline and thaws the queue, so that the complete
// kernel can see their completions. False: some were aborted before, or Abort does not work.
func (e *async) abortLate(ctx context.Context, q *queueState) bool {
	// Late is what was late when the kernel looked: completions that came since are not seen yet.
	now := q.ScanAt
	ok := true
	var late []uint32
	q.commands(func(cid uint32, cmd *command) {
		state := atomic.LoadUint32(&cmd.State)
		if state&cmdState != cmdInFlight || atomic.LoadInt64(&cmd.Deadline) > now {
			return
		}
		if state&cmdAborted != 0 {
			ok = false
			return
		}
		late = append(late, cid)
		e.noteTimeout(uint32(cmd.Set))
	})
	if !ok {
		return false
	}
	ctrl := e.ssds[q.SSD].Ctrl
	actx, cancel := context.WithTimeout(ctx, abortGrace+time.Duration(len(late))*10*time.Millisecond)
	defer cancel()
	for _, cid := range late {
		cmd := at[command](q.Commands, int(cid))
		atomic.StoreUint32(&cmd.State, atomic.LoadUint32(&cmd.State)|cmdAborted)
		e.aborts.Add(1)
		// That the command was not found is no reason to give up: its completion may be on
		// its way. Whether it comes decides.
		if err := e.abort(actx, ctrl, uint16(q.QID), uint16(cid)); err != nil {
			var refused *nvme.StatusError
			if !errors.As(err, &refused) {
				return false
			}
		}
	}
	grace := e.now() + int64(min(abortGrace, e.opt.Timeout))
	for _, cid := range late {
		atomic.StoreInt64(&at[command](q.Commands, int(cid)).Deadline, grace)
	}
	q.ScanAt = min(q.oldest(), e.now()+q.TimeoutNS) // nothing may be in flight now, but soon
	atomic.StoreUint32(&q.Frozen, frozenNo)
	return true
}

func (e *async) noteTimeout(slot uint32) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.slots[slot]; p != nil {
		atomic.AddInt64(&p.timeouts, 1)
	}
}

// recreate replaces the queue pair and issues what was outstanding again.
func (e *async) recreate(ctx context.Context, q *queueState, g int) {
	err := e.deletePair(ctx, g)
	deleted := err == nil
	if deleted {
		err = e.createPair(ctx, g)
	}
	if err == nil {
		if group := e.host.parks[e.pairs[g].block].group; group != nil {
			err = group.Rejoin(nvme.CQRef{Bus: e.ssds[q.SSD].Ctrl.Bus(), QID: e.pairs[g].qp.ID})
		}
	}
	if err != nil {
		e.giveUp(ctx, q, g, deleted, err)
		return
	}
	e.recreated.Add(1)
	count(&q.Dropped, q.inFlight())
	q.commands(func(cid uint32, cmd *command) {
		state := atomic.LoadUint32(&cmd.State)
		tries := state / cmdAttempt
		if tries > q.Retries {
			e.failCommand(q, g, cid, cmd, failTimeout)
			return
		}
		atomic.StoreUint32(&cmd.State, state&^(cmdState|cmdAborted)|cmdRetry)
		atomic.OrUint32(&q.Retry[cid/32], 1<<(cid&31))
	})
	atomic.StoreUint32(&q.Frozen, frozenNo)
	e.kernelView().refill(q, uint32(g))
}

// failCommand ends a command that the SSD cannot touch any more without its data.
func (e *async) failCommand(q *queueState, g int, cid uint32, cmd *command, kind uint16) {
	set := e.set(uint32(cmd.Set))
	set.fail(failRecord{Index: cmd.Index, Kind: kind, QID: uint16(q.QID), CID: uint16(cid), Tries: atomic.LoadUint32(&cmd.State) / cmdAttempt, LBA: cmd.LBA, SSD: q.SSD, Row: q.row(cmd, &set.Layout)})
	slot := uint32(cmd.Set)
	atomic.StoreUint32(&cmd.State, cmdFree)
	atomic.AndUint32(&q.Retry[cid/32], ^uint32(1<<(cid&31)))
	atomic.OrUint32(&q.Free[cid/32], 1<<(cid&31))
	atomic.AddUint32(&e.remaining(slot)[g], ^uint32(0))
}

// failQueue ends all that a dead queue holds. The caller holds its submission side.
func (e *async) failQueue(q *queueState, g int) {
	q.commands(func(cid uint32, cmd *command) { e.failCommand(q, g, cid, cmd, failQueue) })
	for q.PendHead != atomic.LoadUint32(&q.PendTail) {
		slot := q.PendRing[q.PendHead%maxSets]
		seg := q.Pend[slot]
		q.PendHead++
		set := e.set(slot)
		for i := seg.Next; i < seg.End; i++ {
			set.fail(failRecord{Index: uint32(i), Kind: failQueue, QID: uint16(q.QID), SSD: q.SSD, Row: e.pendingRow(set, i)})
		}
		atomic.AddUint32(&e.remaining(slot)[g], -uint32(seg.End-seg.Next))
	}
}

// pendingRow reads a row number that no command was made of yet, where the host can.
func (e *async) pendingRow(set *setState, i int64) int64 {
	if !e.onHost() {
		return rowUnknown
	}
	return *at[int64](set.Rows, int(i))
}

func (e *async) deadError(ssd int) error {
	e.deadMu.Lock()
	defer e.deadMu.Unlock()
	return e.dead[ssd]
}

// giveUp ends an SSD whose queue pair could not be replaced. When the queue pair was not even
// deleted, the controller is reset, since nothing else ends its DMA; all its queues go with it.
func (e *async) giveUp(ctx context.Context, q *queueState, g int, deleted bool, cause error) {
	ssd := int(q.SSD)
	e.deadMu.Lock()
	e.dead[ssd] = cause
	e.deadMu.Unlock()
	if deleted {
		atomic.StoreUint32(&q.Frozen, frozenDead)
		e.failQueue(q, g)
		return
	}
	// Stop all of this SSD's queues, wait until no kernel is inside one, then reset.
	e.unsafe[ssd] = true
	for i := range e.perSSD {
		atomic.StoreUint32(&e.queue(ssd*e.perSSD+i).Frozen, frozenUnsafe)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	err := errors.Join(e.submitS.Synchronize(ctx), e.complS.Synchronize(ctx))
	if err == nil {
		err = e.ssds[ssd].Ctrl.Reset(ctx)
	}
	if err != nil {
		// DMA may still happen: commands, destinations and mappings stay taken.
		if e.broken == nil {
			e.broken = errs.New(errs.Device, "nvme %s: %w; after that the controller could not be reset: %w", e.ssds[ssd].name(), cause, err)
		}
		return
	}
	e.unsafe[ssd] = false
	for i := range e.perSSD {
		atomic.StoreUint32(&e.queue(ssd*e.perSSD+i).Frozen, frozenDead)
		err = errors.Join(err, e.deletePair(ctx, ssd*e.perSSD+i)) // after the reset: frees memory
	}
	if err != nil && e.broken == nil {
		e.broken = err
	}
	e.failQueue(q, g)
}
