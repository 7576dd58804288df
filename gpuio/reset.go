package gpuio

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"helios/internal/errs"
	"helios/nvme"
)

// The last steps of recovery: the controller's reset, and giving an SSD up.
//
// A reset ends all queues of the controller, so all are frozen before it, and nobody is inside one
// any more. When CC.EN = 0 has completed, no command moves data. Then the controller is brought up,
// each queue pair is created again, and what the queues held is issued again, whatever sets it
// belongs to. No command is charged an attempt for that, unless it was late itself.
//
// An SSD is given up when its resets are used up, or at once when its controller is gone. Its
// controller is disabled, then its rows fail. When not even that works, the SSD may still write:
// commands in flight, their destinations and the mappings of these stay taken until Close. A set
// with such commands ends with an error and keeps its slot (strand).

// ssdRecovery holds what the engine knows of one SSD's recovery, whatever stripes the SSD has.
type ssdRecovery struct {
	mu      sync.Mutex
	busy    chan struct{} // closed when the recovery under way has ended; nil: there is none
	closing bool          // none begins any more
	dead    *GivenUpError // the SSD was given up
	unsafe  atomic.Bool   // commands may move data although their queue pair should be gone
	down    atomic.Bool   // the last reset of the controller has not come to its end

	timeouts, aborts, recreated, resets atomic.Int64

	// Of the recovery under way: see allLate.
	read uint64 // completions without an error, when last looked at
	dry  int    // commands that were late since
}

// needsReset reports whether Close must see to the controller.
func (r *ssdRecovery) needsReset() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unsafe.Load() || r.down.Load() && r.dead == nil
}

// GivenUpError is an SSD that recovery could not bring back.
type GivenUpError struct {
	SSD    string
	Tried  string // "2 aborts, 1 new queue pair and 3 resets"; "": nothing
	Unsafe bool   // the controller could not be disabled: it may still write to memory
	Err    error  // the last that went wrong
}

func (e *GivenUpError) Error() string {
	after, next := "", ""
	if e.Tried != "" {
		after = " after " + e.Tried
	}
	if !errors.Is(e.Err, nvme.ErrGone) { // which describes what to do
		next = `; look at it with "heliosctl ssds", then bind it again or replace it`
	}
	return fmt.Sprintf("nvme %s was given up%s: %v%s", e.SSD, after, e.Err, next)
}

// Unwrap gives the cause, in class errs.Device.
func (e *GivenUpError) Unwrap() error { return errs.With(errs.Device, e.Err) }

// recoveryOf is the recovery of a stripe's SSD.
func (e *async) recoveryOf(ssd int) *ssdRecovery { return &e.rec[e.lead[ssd]] }

// deadError explains why an SSD was given up; nil: it was not.
func (e *async) deadError(ssd int) error {
	r := e.recoveryOf(ssd)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dead == nil {
		return nil
	}
	return r.dead
}

// givenUp explains why an SSD gets no further reads: recovery could not bring it back, or it must
// be given back although it still completes what it has.
func (e *async) givenUp(ssd int) error {
	if err := e.deadError(ssd); err != nil {
		return err
	}
	if err := e.ssds[ssd].Ctrl.Leaving(); err != nil {
		return &GivenUpError{SSD: e.ssds[ssd].name(), Tried: e.recoveryOf(ssd).tried(), Err: err}
	}
	return nil
}

// tried describes what recovery has done to an SSD so far.
func (r *ssdRecovery) tried() string {
	var parts []string
	for _, x := range []struct {
		n    int64
		what string
	}{{r.aborts.Load(), "abort"}, {r.recreated.Load(), "new queue pair"},
		{r.resets.Load(), "reset"}} {
		switch {
		case x.n == 1:
			parts = append(parts, "1 "+x.what)
		case x.n > 1:
			parts = append(parts, fmt.Sprintf("%d %ss", x.n, x.what))
		}
	}
	switch n := len(parts); n {
	case 0:
		return ""
	case 1:
		return parts[0]
	default:
		return strings.Join(parts[:n-1], ", ") + " and " + parts[n-1]
	}
}

// heal resets an SSD's controller as often as it may, and gives the SSD up when that did not help.
// cause is why.
func (e *async) heal(ctx context.Context, ssd int, cause error) {
	r := e.recoveryOf(ssd)
	// Nobody touches the SSD's queues from here on.
	err := e.stopped(ctx, func() error {
		for g := range e.queuesOf(ssd) {
			atomic.StoreUint32(&e.queue(g).Frozen, frozenUnsafe)
		}
		r.unsafe.Store(true)
		for g := range e.queuesOf(ssd) {
			if err := e.still(ctx, e.queue(g)); err != nil {
				e.breakWith(err)
				return err
			}
		}
		e.silence(ssd)
		return nil
	})
	if err != nil {
		return
	}
	for !errors.Is(e.ssds[ssd].Ctrl.Health(), nvme.ErrGone) &&
		r.resets.Load() < int64(e.opt.Resets) {
		r.resets.Add(1)
		err := e.resetSSD(ctx, ssd)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			cause = err
			continue
		}
		_ = e.stopped(ctx, func() error {
			for g := range e.queuesOf(ssd) {
				e.installPair(g)
				e.reissue(e.queue(g), g, false)
				e.pairs[g].idle = 0
				e.thaw(e.queue(g), g)
			}
			return nil
		})
		return
	}
	if err := e.ssds[ssd].Ctrl.Health(); errors.Is(err, nvme.ErrGone) {
		cause = err
	}
	e.giveUp(ctx, ssd, cause)
}

// resetSSD takes a controller through CC.EN = 0 and makes the SSD's queue pairs again. All of its
// queues are frozen, and nobody is inside one.
func (e *async) resetSSD(ctx context.Context, ssd int) error {
	ctrl := e.ssds[ssd].Ctrl
	rctx, cancel := context.WithTimeout(ctx, ctrl.ResetTimeout())
	defer cancel()
	generation := ctrl.Generation()
	e.recoveryOf(ssd).down.Store(true)
	err := ctrl.Reset(rctx)
	if ctrl.Generation() != generation {
		e.recoveryOf(ssd).unsafe.Store(false)
	}
	if err != nil {
		return err
	}
	e.recoveryOf(ssd).down.Store(false)
	for g := range e.queuesOf(ssd) {
		qctx, cancel := context.WithTimeout(ctx, recoveryTimeout)
		// The old one is gone; this frees its memory.
		err := e.deletePair(qctx, g)
		if err == nil {
			err = e.rejoin(qctx, g)
		}
		cancel()
		if err != nil {
			return fmt.Errorf("nvme %s: queue pair %d of %d after a reset: %w", e.ssds[ssd].name(),
				g%e.perSSD+1, e.perSSD, err)
		}
	}
	return nil
}

// giveUp ends an SSD, whose queues are frozen.
func (e *async) giveUp(ctx context.Context, ssd int, cause error) {
	r, ctrl := e.recoveryOf(ssd), e.ssds[ssd].Ctrl
	dead := &GivenUpError{SSD: e.ssds[ssd].name(), Tried: r.tried(), Err: cause}
	// Disabled also where the last reset got as far as that: it may have failed half way up.
	dctx, cancel := context.WithTimeout(ctx, ctrl.ResetTimeout())
	defer cancel()
	err := ctrl.Disable(dctx)
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		r.unsafe.Store(false)
	} else if r.unsafe.Load() {
		dead.Unsafe = true
		if !errors.Is(cause, nvme.ErrGone) {
			dead.Err = fmt.Errorf("%w; and it could not be disabled: %w", cause, err)
		}
	}
	if !dead.Unsafe {
		for g := range e.queuesOf(ssd) {
			if err := e.deletePair(dctx, g); err != nil { // frees memory
				dead.Err = fmt.Errorf("%w; also %w", dead.Err, err)
			}
		}
	}
	r.mu.Lock()
	r.dead = dead
	r.mu.Unlock()
	_ = e.stopped(ctx, func() error { e.bury(ssd); return nil })
}

// bury fails what the queues of an SSD that was given up hold: all of it, or, while the SSD may
// still write, what it has not seen. No kernel runs, or is inside one of the queues.
func (e *async) bury(ssd int) {
	unsafe := e.recoveryOf(ssd).unsafe.Load()
	for g := range e.queuesOf(ssd) {
		q := e.queue(g)
		why := uint32(frozenDead)
		if unsafe {
			why = frozenUnsafe
		}
		atomic.StoreUint32(&q.Frozen, why)
		if !unsafe {
			count(&q.Dropped, q.inFlight())
		}
		q.commands(func(cid uint32, cmd *command) {
			if !unsafe || atomic.LoadUint32(&cmd.State)&cmdState != cmdInFlight {
				e.failCommand(q, g, cid, cmd, failQueue)
			}
		})
		e.failPending(q, g)
	}
}

// stranded reports whether all that is left of a set are commands of SSDs that were given up and
// may still write. Needs e.mu.
func (e *async) stranded(p *asyncPending) bool {
	left := false
	rem := e.remaining(p.slot)
	for g := range rem {
		if atomic.LoadUint32(&rem[g]) == 0 {
			continue
		}
		left = true
		if atomic.LoadUint32(&e.queue(g).Frozen) != frozenUnsafe || e.deadError(g/e.perSSD) == nil {
			return false
		}
	}
	return left
}

// strand ends a set of which only such commands are left. Its slot and its destination's mapping
// stay taken until Close. Needs e.mu.
func (e *async) strand(p *asyncPending) {
	set := e.set(p.slot)
	rem := e.remaining(p.slot)
	for g := range rem {
		if q := e.queue(g); atomic.LoadUint32(&rem[g]) != 0 {
			q.commands(func(cid uint32, cmd *command) {
				if e.slotOf(cmd) == p.slot {
					e.recordLost(q, cid, cmd, failQueue)
				}
			})
		}
	}
	p.finished = true
	p.takeStats(set)
	p.err = errs.With(errs.Device,
		fmt.Errorf("%w; close the reader before the buffers are used again", e.setError(p, set)))
	e.strands++
	e.forgetLive(p)
}

// lostError is the error of a row whose SSD was given up.
func (e *async) lostError(f *failRecord) error {
	ssd, blocks := e.ssds[f.SSD], f.Blocks
	lba := nvme.LBA(f.LBA)
	if blocks == 0 && f.Row != rowUnknown { // no command was made of it
		_, off, n, _ := e.layout.Locate(f.Row)
		lba, blocks = off+ssd.DataStart, uint32(n)
	}
	if blocks == 0 {
		return fmt.Errorf("nvme %s q%d: %w", ssd.name(), f.QID, e.deadError(int(f.SSD)))
	}
	return fmt.Errorf("nvme %s q%d: read LBA %d+%d: %w", ssd.name(), f.QID, lba, blocks,
		e.deadError(int(f.SSD)))
}

// recoveryStats fills in what recovery counts of an SSD.
func (e *async) recoveryStats(ssd int, per *SSDStats) {
	r := e.recoveryOf(ssd)
	if e.lead[ssd] != ssd {
		return // it is counted there
	}
	per.Timeouts, per.Aborts, per.Recreated, per.Resets = r.timeouts.Load(), r.aborts.Load(),
		r.recreated.Load(), r.resets.Load()
	if err := e.givenUp(ssd); err != nil {
		per.GivenUp = err.Error()
	}
}

// endDMA ends what SSDs may still write to memory, before that is given back. It is part of Close;
// no kernel runs. Of one that is gone only the mappings can be taken back, which is done after
// this.
func (e *async) endDMA(ctx context.Context) error {
	var err error
	tried := make([]bool, len(e.ssds))
	end := func(s int) {
		if tried[s] {
			return
		}
		tried[s] = true
		if rerr := e.resetForGood(ctx, s); rerr != nil && !errors.Is(rerr, nvme.ErrGone) {
			err = errors.Join(err, rerr)
		}
	}
	for s := range e.rec {
		if e.rec[s].needsReset() {
			end(s)
		}
	}
	for g := range e.pairs {
		s := e.lead[g/e.perSSD]
		// Each for itself: an SSD that does not answer must not cost others their time, and a
		// reset.
		dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		derr := e.deletePair(dctx, g)
		cancel()
		if derr == nil {
			continue
		}
		if !tried[s] && !errors.Is(derr, nvme.ErrGone) {
			err = errors.Join(err, derr)
		}
		end(s) // only this ends its DMA now
	}
	return err
}

// resetForGood resets a controller at Close, for others that use it. One that is given up, or
// another process's by now, is disabled.
func (e *async) resetForGood(ctx context.Context, ssd int) error {
	ctrl := e.ssds[ssd].Ctrl
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ctrl.ResetTimeout())
	defer cancel()
	if e.givenUp(ssd) == nil {
		if err := ctrl.Reset(ctx); !errors.Is(err, nvme.ErrTaken) {
			return err
		}
	}
	return ctrl.Disable(ctx)
}

// leftovers gives the rows that kernels of read_sync have not begun to complete, at an SSD's
// queues, and starts what these hold. No read_sync runs while a set is sick.
func (e *async) leftovers(ssd int) {
	if e.sync == nil {
		return
	}
	e.mu.Lock()
	var sick []*asyncPending
	for _, x := range e.live {
		if x.sick {
			sick = append(sick, x)
		}
	}
	e.mu.Unlock()
	for _, x := range sick {
		rem := e.remaining(x.slot)
		for g := range e.queuesOf(ssd) {
			if atomic.LoadUint32(&rem[g]) != 0 {
				e.leftover(x, g)
			}
		}
	}
}

// look is sweep under Reap, by which a host that has frozen the queue learns that nobody is inside
// it. On a GPU the host waits for the kernels' ends instead.
func (k kernelView) look(q *queueState, g uint32) int {
	if !atomic.CompareAndSwapUint32(&q.Reap, 0, 1) {
		return 0
	}
	n := 0
	if atomic.LoadUint32(&q.Frozen) == frozenNo {
		n = k.sweep(q, g)
	}
	atomic.StoreUint32(&q.Reap, 0)
	return n
}

// leftover turns the rows of queue g's share that read_sync has not begun into a pending segment,
// once, and starts what the queue holds unless it is frozen. No read_sync runs; the SSD is being
// recovered, so there is one that appends to the list.
func (e *async) leftover(p *asyncPending, g int) {
	q := e.queue(g)
	taken, bucket := &e.taken(p.slot)[g], e.units(p.slot)[2*q.SSD:]
	from := bucket[0]
	first, last := share(bucket[1]-from, uint32(g%e.perSSD), uint32(e.perSSD),
		e.set(p.slot).Rotate)
	// Warps that found the share used up have added too.
	if begun := min(int64(atomic.LoadUint32(taken)), last-first); begun < last-first {
		tail := atomic.LoadUint32(&q.PendTail)
		q.Pend[tail%maxSets] = segment{Next: from + first + begun, End: from + last}
		q.PendRing[tail%maxSets] = p.slot * e.shape.stride
		atomic.StoreUint32(taken, uint32(last-first))
		atomic.StoreUint32(&q.PendTail, tail+1)
	}
	k := e.kernelView()
	k.serve(q, uint32(g))
}
