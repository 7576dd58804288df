package gpuio

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/nvme"
)

// Recovery of queues that a kernel had to leave. Each step is bounded, and its failure leads to the
// next:
//
//  1. commands past their deadline are aborted and get a grace period for their completions;
//  2. the queue pair is deleted, after which the SSD cannot write to its commands' destinations any
//     more, and created again; what was outstanding is read again;
//  3. the controller is reset (CC.EN = 0) and brought up again, with all queue pairs (reset.go);
//  4. the SSD is given up.
//
// A command is issued again until its attempts are used up, and a controller is reset until the
// SSD's resets are. A controller is also reset when all its commands are late (allLate). A command
// is charged an attempt if it was late, or lay on a queue with a completion for no command. Others
// beside it are not.
//
// A retry waits for nothing: controllers name a delay (CRD) only to hosts that enabled Advanced
// Command Retry (ACRE), which package nvme does not. DNR is honoured where completions are reaped.
//
// A frozen queue belongs to the recovery of its SSD, of which there is one at a time, in a
// goroutine of the engine: a Wait whose context ends leaves it at its work. The other SSDs' queues
// go on meanwhile, and are recovered by themselves. On a device other than the host's no kernel may
// run while the host changes what both share (stopped); the long waits, for admin commands and for
// resets, lie between.

// goOn recovers the SSDs that hold rows of the set and launches a kernel for these. failed is why
// the set cannot be read; err is ctx's.
func (p *asyncPending) goOn(ctx context.Context) (failed, err error) {
	e := p.e
	e.mu.Lock()
	failed = e.broken
	e.mu.Unlock()
	if failed != nil {
		return failed, nil
	}
	if e.sync != nil {
		if err := e.awaitRecoveries(ctx, p); err != nil {
			return nil, err
		}
		if err := e.enter(ctx); err != nil {
			return nil, p.late(err)
		}
		again, err := e.resumeSync(ctx, p)
		e.leave()
		if err != nil || again {
			return nil, err
		}
	}
	if err := e.recover(ctx, p); err != nil {
		return nil, err
	}
	if err := e.enter(ctx); err != nil {
		return nil, p.late(err)
	}
	defer e.leave()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.broken != nil {
		return e.broken, nil
	}
	if e.stranded(p) {
		e.strand(p)
		return nil, nil
	}
	return e.launchComplete(p.slot), nil
}

// late is the error of a wait that ended before the set did.
func (p *asyncPending) late(err error) error {
	return lateError(p.e.name, p.rows, err)
}

func lateError(reader string, rows int64, err error) error {
	return fmt.Errorf("gpuio %s: wait for %d rows: %w", reader, rows, err)
}

// recover recovers the SSDs that hold rows of p, all at once. Its error is ctx's.
func (e *async) recover(ctx context.Context, p *asyncPending) error {
	var busy []<-chan struct{}
	for s := range e.ssds {
		if e.lead[s] != s || !e.hasRows(p, s) {
			continue
		}
		if c := e.startRecovery(s); c != nil {
			busy = append(busy, c)
		}
	}
	return p.await(ctx, busy)
}

// await waits for the ends of recoveries.
func (p *asyncPending) await(ctx context.Context, busy []<-chan struct{}) error {
	for _, c := range busy {
		select {
		case <-c:
		case <-ctx.Done():
			return p.late(ctx.Err())
		}
	}
	return nil
}

// awaitRecoveries waits for all recoveries that are under way.
func (e *async) awaitRecoveries(ctx context.Context, p *asyncPending) error {
	var busy []<-chan struct{}
	for s := range e.rec {
		r := &e.rec[s]
		r.mu.Lock()
		if r.busy != nil {
			busy = append(busy, r.busy)
		}
		r.mu.Unlock()
	}
	return p.await(ctx, busy)
}

// hasRows reports whether the set has rows left at queues of an SSD.
func (e *async) hasRows(p *asyncPending, ssd int) bool {
	rem := e.remaining(p.slot)
	for g := range e.queuesOf(ssd) {
		if atomic.LoadUint32(&rem[g]) != 0 {
			return true
		}
	}
	return false
}

// startRecovery has an SSD recovered, unless it is being recovered already, and returns what is
// closed afterwards. nil: the engine is being closed.
func (e *async) startRecovery(ssd int) <-chan struct{} {
	r := e.recoveryOf(ssd)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closing {
		return nil
	}
	if r.busy == nil {
		done := make(chan struct{})
		r.busy = done
		go func() {
			e.recoverSSD(e.life, ssd)
			r.mu.Lock()
			r.busy = nil
			r.mu.Unlock()
			close(done)
		}()
	}
	return r.busy
}

// endRecoveries ends the recoveries that are under way, wherever they are: what they have frozen
// stays so. No other begins. Then it freezes all queues, so that kernels end.
func (e *async) endRecoveries() {
	e.endLife()
	for s := range e.rec {
		r := &e.rec[s]
		r.mu.Lock()
		r.closing = true
		busy := r.busy
		r.mu.Unlock()
		if busy != nil {
			<-busy // each of its waits looks at e.life
		}
	}
	for g := range e.pairs {
		q := e.queue(g)
		atomic.StoreUint32(&q.Frozen, frozenClosing)
		if e.stateS != nil { // kernels end by themselves where this fails
			_ = e.queueBuf.push(e.stateS, int64(g*queueStateBytes)+int64(unsafe.Offsetof(q.Frozen)),
				4)
		}
	}
}

// recoverSSD takes as many steps as are needed. When it returns, each queue of the SSD works, or
// is dead; or ctx, the engine's life, has ended.
func (e *async) recoverSSD(ctx context.Context, ssd int) {
	err := e.stopped(ctx, func() error {
		e.leftovers(ssd)
		if e.deadError(ssd) != nil {
			e.bury(ssd)
		}
		return nil
	})
	if err != nil || e.deadError(ssd) != nil {
		return
	}
	// A controller that reports its end needs no Abort, and a queue that is not frozen yet would
	// be.
	cause := e.ssds[ssd].Ctrl.Health()
	for g := range e.queuesOf(ssd) {
		if cause == nil && atomic.LoadUint32(&e.queue(g).Frozen) != frozenNo {
			cause = e.recoverQueue(ctx, g)
		}
	}
	if ctx.Err() != nil {
		return
	}
	if cause != nil {
		e.heal(ctx, ssd, cause)
	}
	_ = e.stopped(ctx, func() error { e.leftovers(ssd); return nil })
}

// recoveryTimeout bounds the admin commands of one queue's recovery, and the wait for a kernel to
// leave a queue.
const recoveryTimeout = 15 * time.Second

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

// stopped calls fn while no kernel runs, on a device other than the host's, which has the state
// that fn leaves afterwards. Its error is fn's, or ctx's, or that of kernels that failed, which
// breaks the engine.
func (e *async) stopped(ctx context.Context, fn func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := e.enter(ctx); err != nil {
		return err
	}
	defer e.leave()
	err := e.quiesce(ctx)
	if err == nil {
		e.stops.Add(1)
		err = e.move((*twin).pull)
	}
	if err == nil {
		err = fn()
		if merr := e.move((*twin).push); merr != nil {
			e.breakWith(merr)
			return merr
		}
		return err
	}
	if ctx.Err() == nil {
		e.breakWith(err)
	}
	return err
}

// move copies all kernel state to the host or to the device, while no kernel runs. A copy that has
// begun ends before move does, also while the engine ends: a late one would undo what the host
// changes next (endRecoveries).
func (e *async) move(by func(*twin, cuda.Stream, int64, int64) error) error {
	if e.onHost() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), recoveryTimeout)
	defer cancel()
	var err error
	for _, t := range []*twin{&e.queueBuf, &e.cmdBuf, &e.setBuf} {
		err = errors.Join(err, by(t, e.stateS, 0, t.dev.Size()))
	}
	return errors.Join(err, e.stateS.Synchronize(ctx))
}

// states returns the queues' states as they are now, and has the host's histograms so. Kernels may
// run.
func (e *async) states() ([]queueState, error) {
	e.seen.Lock()
	defer e.seen.Unlock()
	return e.copyStates()
}

// copyStates is states with e.seen held.
func (e *async) copyStates() ([]queueState, error) {
	live := unsafe.Slice(e.queue(0), e.queues())
	if e.seenBuf == nil {
		return live, nil
	}
	n := int64(e.queues() * queueStateBytes)
	ctx, cancel := context.WithTimeout(context.Background(), copyTimeout)
	defer cancel()
	if err := errors.Join(e.stateS.Copy(e.seenBuf.Ptr(), e.queueBuf.dev.Ptr(), n),
		e.histBuf.pull(e.stateS, 0, e.histBuf.dev.Size()),
		e.stateS.Synchronize(ctx)); err != nil {
		return live, err
	}
	return slices.Clone(unsafe.Slice(at[queueState](e.seenBuf.Ptr(), 0), e.queues())), nil
}

// quiesce waits until no kernel runs on a GPU: a running kernel changes the state that the host
// copies. It also reads the device's clock. The caller has entered, so no kernel is launched.
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
	// A look is behind by as long as the kernel's end lies back, which is long when the caller
	// waits late; never ahead. So the largest is the best.
	if offset := last - nanotime(); !e.clockKnown || offset > e.clockOffset {
		e.clockOffset, e.clockKnown = offset, true
	}
	return nil
}

// now is the time on the clock of the commands' deadlines.
func (e *async) now() int64 { return nanotime() + e.clockOffset }

// still waits until no kernel is inside a queue that was frozen: each looks at Frozen once more
// when it has taken the submission side (Own) or the completion side (Reap).
func (e *async) still(ctx context.Context, q *queueState) error {
	ctx, cancel := context.WithTimeout(ctx, recoveryTimeout)
	defer cancel()
	for _, side := range []*uint32{&q.Own, &q.Reap} {
		for !atomic.CompareAndSwapUint32(side, ownFree, ownHeld) {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("nvme %s q%d: a kernel does not release the queue: %w",
					e.ssds[q.SSD].name(), q.QID, err)
			}
			runtime.Gosched()
		}
	}
	atomic.StoreUint32(&q.Reap, 0)
	q.unlock() // who came meanwhile found the queue frozen
	return nil
}

// thaw lets kernels work on a queue again, and starts what waits there.
func (e *async) thaw(q *queueState, g int) {
	atomic.StoreUint32(&q.Frozen, frozenNo)
	k := e.kernelView()
	k.serve(q, uint32(g))
}

// recoverQueue aborts what is late on a frozen queue, or replaces it. An error is why the
// controller must be reset.
func (e *async) recoverQueue(ctx context.Context, g int) error {
	q := e.queue(g)
	var late []uint32
	again := false // some were aborted before
	why := uint32(frozenNo)
	var stuck error
	err := e.stopped(ctx, func() error {
		why = atomic.LoadUint32(&q.Frozen)
		if why != frozenTimeout && why != frozenForeign {
			return nil
		}
		if err := e.still(ctx, q); err != nil {
			e.breakWith(err) // a kernel that never lets go has failed
			return err
		}
		q.readAgain()
		if why == frozenTimeout {
			late, again = e.late(q)
			stuck = e.allLate(int(q.SSD), len(late))
		}
		return nil
	})
	switch {
	case err != nil, why != frozenTimeout && why != frozenForeign:
		return nil
	case stuck != nil:
		return stuck
	case why == frozenTimeout && !again && e.abortLate(ctx, q, late):
		return e.stopped(ctx, func() error {
			grace := e.now() + int64(min(abortGrace, e.opt.Timeout))
			for _, cid := range late {
				atomic.StoreInt64(&q.command(cid).Deadline, grace)
			}
			// nothing may be in flight now, but soon
			q.ScanAt = min(q.oldest(), e.now()+q.TimeoutNS)
			e.thaw(q, g)
			return nil
		})
	case e.vain(q, g):
		return fmt.Errorf("nvme %s q%d: nothing completed within %v on its new queue pair either",
			e.ssds[q.SSD].name(), q.QID, e.opt.Timeout)
	}
	return e.recreate(ctx, q, g, why == frozenForeign)
}

// allLate counts the late commands of an SSD since it has read anything. It returns an error when
// these are so many that nothing will be read: as many as fill all its queues, for all their
// attempts. Else an SSD that answers admin commands alone would cost each row its timeouts.
func (e *async) allLate(ssd, late int) error {
	r := e.recoveryOf(ssd)
	read, queues := uint64(0), 0
	for g := range e.queuesOf(ssd) {
		queues++
		q := e.queue(g)
		read += atomic.LoadUint64(&q.Completed) - atomic.LoadUint64(&q.Errors)
	}
	if read != r.read {
		r.read, r.dry = read, 0
	}
	if r.dry += late; r.dry <= max(e.opt.Depth*queues/e.perSSD, warp)*(e.opt.Retries+1) {
		return nil
	}
	err := fmt.Errorf(
		"nvme %s: nothing was read any more, and %d commands did not complete within %v",
		e.ssds[ssd].name(), r.dry, e.opt.Timeout)
	r.dry = 0
	return err
}

// vain reports whether a queue was replaced, has completed nothing since, and holds commands that a
// reset could still help: it is no command of its that is at fault then.
func (e *async) vain(q *queueState, g int) bool {
	if e.pairs[g].idle != atomic.LoadUint64(&q.Completed)+1 ||
		e.recoveryOf(int(q.SSD)).resets.Load() >= int64(e.opt.Resets) {
		return false
	}
	hope := false
	q.commands(func(_ uint32, cmd *command) {
		state := atomic.LoadUint32(&cmd.State)
		hope = hope || state&cmdAborted != 0 && state/cmdAttempt <= q.Retries
	})
	return hope
}

// command is a CID's, as the host reaches it.
func (q *queueState) command(cid uint32) *command { return at[command](q.HostCommands, int(cid)) }

// commands calls fn for each command that is in use.
func (q *queueState) commands(fn func(cid uint32, cmd *command)) {
	for w := uint32(0); w*32 < q.NumCommands; w++ {
		for m := ^atomic.LoadUint32(&q.Free[w]); m != 0; m &= m - 1 {
			cid := w*32 + uint32(bits.TrailingZeros32(m))
			if cid >= q.NumCommands {
				break
			}
			cmd := q.command(cid)
			if atomic.LoadUint32(&cmd.State)&cmdState != cmdFree {
				fn(cid, cmd)
			}
		}
	}
}

// readAgain deals with completions that a warp of read_sync that left may have missed. None runs
// now: these commands are issued again.
func (q *queueState) readAgain() {
	q.commands(func(cid uint32, cmd *command) {
		if state := atomic.LoadUint32(&cmd.State); state&cmdState == cmdDone {
			q.again(cid, cmd, state, false)
		}
	})
}

// again has a command issued once more, charged as another attempt or in place of its last one.
func (q *queueState) again(cid uint32, cmd *command, state uint32, charged bool) {
	if !charged && state >= cmdAttempt {
		state -= cmdAttempt
	}
	atomic.StoreUint32(&cmd.State, state&^(cmdState|cmdAborted)|cmdRetry)
	atomic.OrUint32(&q.Retry[cid/32], 1<<(cid&31))
}

// late notes which commands of a queue were past their deadline when the kernel looked: completions
// that came since are not seen yet. again: one of them was aborted before, in vain.
func (e *async) late(q *queueState) (late []uint32, again bool) {
	q.commands(func(cid uint32, cmd *command) {
		state := atomic.LoadUint32(&cmd.State)
		if state&cmdState != cmdInFlight || atomic.LoadInt64(&cmd.Deadline) > q.ScanAt {
			return
		}
		if state&cmdAborted != 0 {
			again = true
			return
		}
		late = append(late, cid)
		// From here on it is one that is charged for what follows.
		atomic.StoreUint32(&cmd.State, state|cmdAborted)
		e.noteTimeout(int(q.SSD), e.slotOf(cmd))
	})
	return late, again
}

// abortLate aborts commands. False: Abort does not work.
func (e *async) abortLate(ctx context.Context, q *queueState, late []uint32) bool {
	r := e.recoveryOf(int(q.SSD))
	ctx, cancel := context.WithTimeout(ctx, abortGrace+time.Duration(len(late))*10*time.Millisecond)
	defer cancel()
	for _, cid := range late {
		r.aborts.Add(1)
		// the queue is frozen: it stays so
		state := atomic.LoadUint32(&q.command(cid).State)
		// That the command was not found is no reason to give up: its completion may be on
		// its way, and decides.
		if err := e.abort(ctx, e.ssds[q.SSD].Ctrl, uint16(q.QID), wireCID(cid, state)); err != nil {
			var refused *nvme.StatusError
			if !errors.As(err, &refused) {
				return false
			}
		}
	}
	return ctx.Err() == nil
}

func (e *async) noteTimeout(ssd int, slot uint32) {
	e.recoveryOf(ssd).timeouts.Add(1)
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.slots[slot]; p != nil {
		p.timeouts.Add(1)
	}
}

// recreate replaces a queue pair and issues what was outstanding again. all: each of its commands
// is charged an attempt, not only the late ones. An error is why the controller must be reset.
func (e *async) recreate(ctx context.Context, q *queueState, g int, all bool) error {
	actx, cancel := context.WithTimeout(ctx, recoveryTimeout)
	defer cancel()
	qid := q.QID
	err := e.deletePair(actx, g)
	if err != nil {
		e.recoveryOf(int(q.SSD)).unsafe.Store(true)
	} else {
		err = e.rejoin(actx, g)
	}
	if err != nil {
		return fmt.Errorf("nvme %s q%d: its queue pair could not be replaced: %w",
			e.ssds[q.SSD].name(), qid, err)
	}
	e.recoveryOf(int(q.SSD)).recreated.Add(1)
	return e.stopped(ctx, func() error {
		e.installPair(g)
		e.reissue(q, g, all)
		e.pairs[g].idle = atomic.LoadUint64(&q.Completed) + 1
		e.thaw(q, g)
		return nil
	})
}

// rejoin creates queue g's pair, of which nothing is left, and has its block wait for it again. Its
// state gets the pair by installPair, before the queue thaws.
func (e *async) rejoin(ctx context.Context, g int) error {
	if err := e.createPair(ctx, g); err != nil {
		return err
	}
	if group := e.host.parks[e.pairs[g].block].group; group != nil {
		return group.Rejoin(nvme.CQRef{Bus: e.ssds[g/e.perSSD].Ctrl.Bus(), QID: e.pairs[g].qp.ID})
	}
	return nil
}

// reissue has what was outstanding on a queue whose pair is gone issued again, but for commands
// that have used their attempts up.
func (e *async) reissue(q *queueState, g int, all bool) {
	count(&q.Dropped, q.inFlight())
	q.readAgain()
	q.commands(func(cid uint32, cmd *command) {
		state := atomic.LoadUint32(&cmd.State)
		if state&cmdState != cmdInFlight {
			return
		}
		charged := all || state&cmdAborted != 0
		if charged && state/cmdAttempt > q.Retries {
			e.failCommand(q, g, cid, cmd, failTimeout)
			return
		}
		q.again(cid, cmd, state, charged)
	})
}

// failCommand ends a command that the SSD cannot touch any more without its data.
func (e *async) failCommand(q *queueState, g int, cid uint32, cmd *command, kind uint16) {
	slot := e.slotOf(cmd)
	e.recordLost(q, cid, cmd, kind)
	atomic.StoreUint32(&cmd.State, atomic.LoadUint32(&cmd.State)&cmdGen|cmdFree)
	atomic.AndUint32(&q.Retry[cid/32], ^uint32(1<<(cid&31)))
	atomic.OrUint32(&q.Free[cid/32], 1<<(cid&31))
	atomic.AddUint32(&e.remaining(slot)[g], ^uint32(0))
}

// recordLost notes the rows of a command as failed.
func (e *async) recordLost(q *queueState, cid uint32, cmd *command, kind uint16) {
	state := atomic.LoadUint32(&cmd.State)
	e.failUnit(e.slotOf(cmd), cmd.Index, failRecord{
		Kind: kind, QID: uint16(q.QID), CID: wireCID(cid, state), Tries: state / cmdAttempt,
		LBA: cmd.lba(), Blocks: uint32(cmd.NLB) + 1, SSD: q.SSD,
	})
}

// failPending ends what no command was made of yet.
func (e *async) failPending(q *queueState, g int) {
	for q.PendHead != atomic.LoadUint32(&q.PendTail) {
		slot, seg := q.PendRing[q.PendHead%maxSets]/e.shape.stride, q.Pend[q.PendHead%maxSets]
		q.PendHead++
		for unit := seg.Next; unit < seg.End; unit++ {
			e.failUnit(slot, uint32(unit), failRecord{Kind: failQueue, QID: uint16(q.QID),
				SSD: q.SSD})
		}
		atomic.AddUint32(&e.remaining(slot)[g], -uint32(seg.End-seg.Next))
	}
}
