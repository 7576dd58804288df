package proxy

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"helios/internal/hostcpu"
	"helios/internal/iouring"
	"helios/nvme"
)

// tickTime bounds how long commands lie when the party that used to wait for their queue stopped
// waiting: the background goroutine takes over a tick after attendTicks.
const tickTime = time.Millisecond

// Sizes of a reactor's io_uring. Commands in flight are bounded by the completion side.
const (
	ringEntries   = 256
	ringCQEntries = 4096
)

// wakeData is the user data of the no-op that wakes a waiter in io_uring_enter.
const wakeData = ^uint64(0)

// reactor holds what a set of completion queues shares: an io_uring when one of them has a file
// behind it, the background goroutine, and the parties that wait. At most one party at a
// time, the leader, sleeps in io_uring_enter; the others sleep on channels.
//
// Locks are taken in the order reapMu, Bus.mu, cqueue.mu, sqMu; mu is never held while
// another is taken.
type reactor struct {
	ring     *iouring.Ring // nil: RAM only, or plain system calls
	sqMu     sync.Mutex    // the ring's submission side
	reapMu   sync.Mutex    // the ring's completion side
	reapBuf  [128]iouring.CQE
	inflight atomic.Int64 // operations handed out and not reaped
	leader   atomic.Bool
	wait     iouring.Wait // the leader's
	life     sync.RWMutex // held by those who submit without owning a wait, against close

	mu         sync.Mutex
	table      atomic.Pointer[[]*cqueue] // by cqueue.index; nil = free
	followers  []*waiter
	nfollowers atomic.Int32

	poll   bool // poll doorbells
	fake   bool // in a bubble of testing/synctest
	svc    chan struct{}
	quit   chan struct{} // of the background goroutine; nil = there is none
	ending sync.WaitGroup
	// resting is 1 while the background goroutine sleeps for a completion that is not due.
	resting atomic.Int32
	timer   *time.Timer
	armed   atomic.Bool
	closed  atomic.Bool
}

func newReactor(withRing, poll bool) (*reactor, error) {
	r := &reactor{poll: poll, fake: hostcpu.InBubble(), svc: make(chan struct{}, 1)}
	r.table.Store(&[]*cqueue{})
	if withRing {
		ring, err := iouring.New(iouring.Options{Entries: ringEntries, CQEntries: ringCQEntries})
		if err != nil {
			return nil, err
		}
		r.ring = ring
	}
	return r, nil
}

// start begins the background goroutine.
func (r *reactor) start() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.quit != nil {
		return
	}
	r.quit = make(chan struct{})
	if r.timer == nil {
		r.timer = time.AfterFunc(time.Hour, r.tick)
		r.timer.Stop()
	}
	quit := r.quit
	r.ending.Go(func() { r.background(quit) })
}

// stop tells the background goroutine to end. It does not wait, since the goroutine may need
// a lock of the caller's; close waits.
func (r *reactor) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.quit != nil {
		close(r.quit)
		r.quit = nil
		r.timer.Stop()
		r.disturb()
	}
}

// close releases the ring; nothing is in flight any more.
func (r *reactor) close() error {
	r.stop()
	r.ending.Wait()
	r.life.Lock()
	defer r.life.Unlock()
	r.reapMu.Lock()
	defer r.reapMu.Unlock()
	if r.closed.Swap(true) || r.ring == nil {
		return nil
	}
	return r.ring.Close()
}

// join makes c one of the reactor's queues. The caller holds c's lock, and nothing of c is in
// the kernel.
func (r *reactor) join(c *cqueue) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := slices.Clone(*r.table.Load())
	i := slices.Index(t, nil)
	if i < 0 {
		i = len(t)
		t = append(t, nil)
	}
	t[i] = c
	c.index = uint32(i)
	r.table.Store(&t)
	c.r.Store(r)
}

func (r *reactor) leave(c *cqueue) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := slices.Clone(*r.table.Load())
	if int(c.index) < len(t) && t[c.index] == c {
		t[c.index] = nil
	}
	r.table.Store(&t)
}

// submit hands published operations to the kernel. Errors leave them published; the next
// call tries again.
func (r *reactor) submit() {
	if r.ring == nil {
		return
	}
	r.life.RLock()
	if !r.closed.Load() && r.ring.Unsubmitted() != 0 {
		_ = r.ring.Submit()
	}
	r.life.RUnlock()
}

// hand is submit by a party that does nothing else just then: its CPU time is the controllers'.
func (r *reactor) hand() {
	section := hostcpu.Begin()
	r.submit()
	section.End(spentInKernel)
}

// reap finishes the commands whose operations the kernel has completed. While a leader sleeps
// in the kernel only it reaps: a completion that stays in the ring is what wakes it, and a
// no-op that somebody else took away before the leader was asleep would not.
func (r *reactor) reap() {
	if r.ring == nil || r.ring.Ready() == 0 || !r.reapMu.TryLock() {
		return // whoever holds the lock wakes those concerned
	}
	section := hostcpu.Begin()
	for !r.closed.Load() && !r.leader.Load() {
		n := r.ring.Reap(r.reapBuf[:])
		if n == 0 {
			break
		}
		table := *r.table.Load()
		var c *cqueue
		for i := range r.reapBuf[:n] {
			e := &r.reapBuf[i]
			if e.Data == wakeData {
				continue
			}
			if q := table[e.Data>>32]; q != c {
				if c != nil {
					c.unlock()
				}
				c = q
				c.mu.Lock()
			}
			c.reaped(int32(uint32(e.Data)), e.Res)
		}
		if c != nil {
			c.unlock()
		}
		r.inflight.Add(-int64(n))
	}
	section.End(spentCompleting)
	r.reapMu.Unlock()
}

// enter submits and sleeps in the kernel until an operation completes, as the leader; false
// when there already is one.
func (r *reactor) enter(w *waiter, d time.Duration, due int64) bool {
	if r.leader.Load() {
		return false
	}
	r.reapMu.Lock() // whoever began to reap before there was a leader has ended; see reap
	lead := r.leader.CompareAndSwap(false, true)
	r.reapMu.Unlock()
	if !lead {
		return false
	}
	if due != never {
		noSlack()
	}
	if w == nil || w.sleepIn(stateEntered, due) {
		atLeast, batch := r.turnSize(due)
		section := hostcpu.Begin()
		err := r.ring.SubmitAndWait(&r.wait, atLeast, d, batch)
		section.End(spentInKernel)
		if w != nil {
			w.state.Store(stateAwake)
		}
		if err != nil && r.ring.Ready() == 0 {
			// The kernel is short of memory: let the operations in flight end first.
			time.Sleep(min(d, 100*time.Microsecond))
		}
	}
	r.leader.Store(false)
	return true
}

// Sizes of a turn: a sleep waits for a batchShare of the completions to come, when there are as
// many as batchFrom, but not longer for them than batchTime.
const (
	batchFrom  = 16
	batchShare = 8
	batchTime  = 50 * time.Microsecond
)

// turnSize tells for how many completions a sleep waits, and after what time for one only. Each
// wake-up takes a switch of threads, and the completions of many reads come close together.
func (r *reactor) turnSize(due int64) (atLeast int, batch time.Duration) {
	n := r.inflight.Load()
	if due != never || n < batchFrom {
		return 1, 0
	}
	return int(n / batchShare), batchTime
}

// early reports whether so few of many operations have completed that a turn is better taken later:
// each costs a system call or two, a place among those that compute, and a switch of threads.
func (r *reactor) early(due int64) bool {
	if r.ring == nil {
		return false
	}
	atLeast, _ := r.turnSize(due)
	return int(r.ring.Ready()) < atLeast && atLeast > 1
}

// leaderless reports whether operations are in flight and nobody waits for them.
func (r *reactor) leaderless() bool {
	return r.ring != nil && r.inflight.Load() > 0 && !r.leader.Load()
}

// handOff lets a sleeping follower take the lead, if operations are in flight and nobody does.
func (r *reactor) handOff() {
	if r.nfollowers.Load() == 0 || !r.leaderless() {
		return
	}
	r.mu.Lock()
	var w *waiter
	if len(r.followers) > 0 {
		w = r.followers[0]
	}
	r.mu.Unlock()
	if w != nil {
		w.wake()
	}
}

func (r *reactor) follow(w *waiter) {
	r.mu.Lock()
	r.followers = append(r.followers, w)
	r.nfollowers.Store(int32(len(r.followers)))
	r.mu.Unlock()
}

func (r *reactor) unfollow(w *waiter) {
	r.mu.Lock()
	if i := slices.Index(r.followers, w); i >= 0 {
		r.followers = slices.Delete(r.followers, i, i+1)
	}
	r.nfollowers.Store(int32(len(r.followers)))
	r.mu.Unlock()
}

// help works on completions until done is closed, d has passed or something was reaped.
func (r *reactor) help(done <-chan struct{}, d time.Duration) {
	r.reap()
	select {
	case <-done:
		return
	default:
	}
	if r.ring != nil && r.inflight.Load() > 0 && r.enter(nil, d, never) {
		r.reap()
		r.handOff()
		return
	}
	t := time.NewTimer(min(d, 5*time.Millisecond))
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	}
}

// arm makes sure that somebody looks at the queues within a tick.
func (r *reactor) arm() {
	if r.armed.Load() || r.closed.Load() || !r.armed.CompareAndSwap(false, true) {
		return
	}
	r.mu.Lock()
	if r.quit != nil {
		r.timer.Reset(tickTime)
	} else {
		r.armed.Store(false)
	}
	r.mu.Unlock()
}

// tick looks for queues whose waiting party went away.
func (r *reactor) tick() {
	r.armed.Store(false)
	again, alone := false, false
	for _, c := range *r.table.Load() {
		if c == nil {
			continue
		}
		if !c.mu.TryLock() {
			again = true
			continue
		}
		work, kernel, due := c.pending()
		stuck := c.stuck()
		c.mu.Unlock()
		if !work && !kernel && !stuck {
			continue
		}
		again = true
		w := c.waiter.Load()
		if w == nil || !w.attends() {
			alone = alone || work || kernel || due != never
		} else if work || kernel && !r.leader.Load() {
			w.wakeParked()
		}
	}
	if again {
		r.arm()
	}
	if alone {
		r.wakeService()
	}
}

func (r *reactor) wakeService() {
	select {
	case r.svc <- struct{}{}:
	default:
	}
	r.disturb()
}

// background serves queues that nobody waits for.
func (r *reactor) background(quit <-chan struct{}) {
	due := int64(never)
	for idle := 0; ; {
		if !r.poll {
			select {
			case <-quit:
				return
			case <-r.svc:
			}
		} else {
			// Doorbells ring unheard: look at them all the time, less often when idle.
			select {
			case <-quit:
				return
			default:
			}
			if idle < 256 {
				runtime.Gosched()
			} else {
				r.pause(min(time.Duration(idle-255)*time.Microsecond, 100*time.Microsecond),
					due, quit)
			}
		}
		worked := false
		if worked, due = r.serveAll(quit); worked {
			idle = 0
		} else {
			idle++
		}
	}
}

// pause is the time between two looks at the doorbells; a completion that is due ends it.
func (r *reactor) pause(d time.Duration, due int64, quit <-chan struct{}) {
	if due == never {
		time.Sleep(d)
		return
	}
	r.rest(min(d, restUntil(due, r.fake)), quit)
}

// serveAll works until no unattended queue has anything left; it reports whether there was
// something. With doorbells to be polled it does not wait for completions that are not due, but
// tells when the next one is.
func (r *reactor) serveAll(quit <-chan struct{}) (worked bool, due int64) {
	for ; ; worked = true {
		select {
		case <-quit:
			return worked, never
		default:
		}
		select {
		case <-r.svc: // whatever it was for, it is seen to now
		default:
		}
		more, kernel := false, false
		due = never
		for _, c := range *r.table.Load() {
			if c == nil {
				continue
			}
			if w := c.waiter.Load(); w != nil && w.attendedNow() {
				continue
			}
			c.mu.Lock()
			before := c.nposted
			section := hostcpu.Begin()
			c.serve()
			section.End(spentServing)
			w, k, next := c.pending()
			more, kernel, due = more || w || c.nposted != before, kernel || k, min(due, next)
			c.unlock()
		}
		r.reap()
		switch {
		case kernel && r.inflight.Load() > 0:
			d := 2 * tickTime
			if r.poll || more {
				d = 20 * time.Microsecond
			}
			if due != never {
				d = min(d, max(restUntil(due, r.fake), time.Microsecond))
			}
			if !r.enter(nil, d, due) { // somebody leads, and reaps for all
				r.hand()
				r.arm()
				return true, due
			}
			r.reap()
			r.handOff()
		case more:
			runtime.Gosched()
		case due != never && !r.poll:
			r.hand()
			r.rest(restUntil(due, r.fake), quit)
		default:
			r.hand()
			if worked {
				r.arm()
			}
			return worked, due
		}
	}
}

// States of a waiter.
const (
	stateAwake   = iota
	stateParked  // on its channel
	stateEntered // in io_uring_enter
	stateWaking  // there, and a no-op is on its way
	stateNapping // on the futex that the state itself is, for a completion that is not due
)

// waiter is a party that waits for some of a reactor's queues.
type waiter struct {
	r        *reactor
	cqs      atomic.Pointer[[]*cqueue]
	state    atomic.Int32
	attended atomic.Int32 // ticks until it is no longer expected back
	single   bool         // it waits for one queue only, and no longer than that exists
	ch       chan struct{}
	timer    *time.Timer

	busy    atomic.Bool // a goroutine is in wait
	queued  atomic.Int32
	release chan struct{}
}

func newWaiter(r *reactor, cqs ...*cqueue) *waiter {
	w := &waiter{r: r, ch: make(chan struct{}, 1), release: make(chan struct{}, 1)}
	w.cqs.Store(&cqs)
	return w
}

// attends tells, once a tick, whether the party still waits or comes back regularly.
func (w *waiter) attends() bool {
	if n := w.attended.Load(); n > 0 {
		w.attended.CompareAndSwap(n, n-1)
		return true
	}
	return w.busy.Load()
}

// attendedNow reports whether the party waits or is expected back. One that waits may be awake: the
// kernel holds up whoever submits while the disk's queue is full, and then nobody else helps.
func (w *waiter) attendedNow() bool { return w.attended.Load() > 0 || w.busy.Load() }

// attendTicks is the number of ticks for which a party that has waited is expected back. It may
// wait for a processor meanwhile, some milliseconds where others compute on all of them. Were the
// background goroutine to lead then, the party would find it there and have to wait for it.
const attendTicks = 10

// wakeParked wakes the party if it sleeps on its channel or naps.
func (w *waiter) wakeParked() bool {
	switch w.state.Load() {
	case stateParked:
		if w.state.CompareAndSwap(stateParked, stateAwake) {
			w.ch <- struct{}{} // has room: one send for each time parked
			return true
		}
	case stateNapping:
		if w.state.CompareAndSwap(stateNapping, stateAwake) {
			futexWake(&w.state)
			return true
		}
	}
	return false
}

// wake wakes the party wherever it sleeps.
func (w *waiter) wake() {
	if w.wakeParked() {
		return
	}
	if w.state.Load() == stateEntered && w.state.CompareAndSwap(stateEntered, stateWaking) {
		r := w.r
		r.life.RLock()
		r.sqMu.Lock()
		if !r.closed.Load() {
			if e := r.ring.SQE(); e != nil {
				e.PrepNop()
				e.Data = wakeData
				r.inflight.Add(1)
				r.ring.Flush()
			}
		}
		r.sqMu.Unlock()
		r.life.RUnlock()
		r.submit() // a full submission queue wakes it as well: its operations complete
	}
}

// due tells when the next completion of the queues has to be posted, as of their last turns.
func (w *waiter) due() int64 {
	due := int64(never)
	for _, c := range *w.cqs.Load() {
		due = min(due, c.next.Load())
	}
	return due
}

// changed reports whether one of the queues has entries that came since the last time.
func (w *waiter) changed(note bool) bool {
	any := false
	for _, c := range *w.cqs.Load() {
		if p := c.posted.Load(); p != c.seen {
			any = true
			if !note {
				return true
			}
			c.seen = p
		}
	}
	return any
}

// work runs the controllers of the queues. When it must not block it leaves out queues that
// somebody else is serving.
func (w *waiter) work(block bool) {
	for _, c := range *w.cqs.Load() {
		if block {
			c.mu.Lock()
		} else if !c.mu.TryLock() {
			continue
		}
		section := hostcpu.Begin()
		c.serve()
		section.End(spentServing)
		c.unlock()
	}
}

// sleepIn announces that the party is about to sleep, and looks once more for reasons not to:
// a doorbell rung, an entry posted, or a completion due earlier than the party knew, before the
// announcement was seen.
func (w *waiter) sleepIn(state int32, due int64) bool {
	w.state.Store(state) // a full fence on every architecture (sequentially consistent)
	stay := w.changed(false)
	if state == stateEntered {
		stay = stay || w.r.ring.Ready() != 0
	} else {
		stay = stay || w.r.leaderless() // the leader left before it saw this party parked
	}
	for _, c := range *w.cqs.Load() {
		if stay {
			break
		}
		c.mu.Lock()
		work, _, next := c.pending()
		c.mu.Unlock()
		stay = work || next < due
	}
	if !stay {
		return true
	}
	if !w.state.CompareAndSwap(state, stateAwake) {
		if state == stateParked {
			<-w.ch // somebody woke it already
		}
		w.state.Store(stateAwake)
	}
	return false
}

// waitFor is the heart of the controller: see the package comment.
func (w *waiter) waitFor(d time.Duration) {
	r := w.r
	if d <= 0 && r.early(w.due()) || !w.acquire(d) {
		return
	}
	if w.attended.Load() != attendTicks {
		w.attended.Store(attendTicks)
	}
	var deadline time.Time
	for slept := false; ; {
		w.work(d > 0)
		if slept || !r.early(w.due()) {
			r.reap()
		}
		if w.changed(true) || d <= 0 || r.closed.Load() || w.single && len(*w.cqs.Load()) == 0 {
			break
		}
		now := time.Now()
		if deadline.IsZero() {
			deadline = now.Add(d)
		}
		left := deadline.Sub(now)
		if left <= 0 {
			break
		}
		due := w.due()
		if due != never {
			if left = min(left, restUntil(due, r.fake)); left <= 0 {
				runtime.Gosched()
				continue
			}
		}
		if r.ring != nil && r.inflight.Load() > 0 {
			if r.enter(w, left, due) {
				slept = true
				continue
			}
			r.hand()
			r.follow(w)
			w.sleep(left, due)
			r.unfollow(w)
			continue
		}
		w.sleep(left, due)
	}
	r.hand()
	if r.inflight.Load() > 0 {
		r.arm()
		r.handOff()
	}
	w.busy.Store(false)
	if w.queued.Load() > 0 {
		select {
		case w.release <- struct{}{}:
		default:
		}
	}
}

// sleep lasts until d has passed or somebody wakes the party. due is the next completion that it
// knows of, which d has in view.
func (w *waiter) sleep(d time.Duration, due int64) {
	if due != never && !w.r.fake {
		if w.sleepIn(stateNapping, due) {
			futexWait(&w.state, stateNapping, d)
			w.state.Store(stateAwake)
		}
		return
	}
	if w.timer == nil {
		w.timer = time.NewTimer(d)
	} else {
		w.timer.Reset(d)
	}
	if w.sleepIn(stateParked, due) {
		select {
		case <-w.ch:
		case <-w.timer.C:
			if !w.state.CompareAndSwap(stateParked, stateAwake) {
				<-w.ch
			}
		}
	}
	w.timer.Stop()
}

// acquire makes the caller the one that waits. A second goroutine that waits for the same
// queue sleeps until the first comes back, and then looks for itself.
func (w *waiter) acquire(d time.Duration) bool {
	if w.busy.CompareAndSwap(false, true) {
		return true
	}
	if d <= 0 {
		return false
	}
	w.queued.Add(1)
	defer w.queued.Add(-1)
	if w.busy.CompareAndSwap(false, true) {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-w.release:
	case <-t.C:
	}
	return false
}

// kick tells the controller of a doorbell of c.
func (c *cqueue) kick() {
	// A full fence between the doorbell store and the look at the waiter's state; sleepIn has
	// its counterpart.
	c.kicks.Add(1)
	r := c.r.Load()
	w := c.waiter.Load()
	if w == nil {
		r.wakeService()
		return
	}
	switch w.state.Load() {
	case stateAwake:
		if w.attendedNow() {
			r.arm() // it comes back; if not, a tick notices
		} else {
			r.wakeService()
		}
	case stateParked, stateNapping:
		w.wakeParked()
	default:
		// The party sleeps in the kernel: submit for it.
		c.mu.Lock()
		section := hostcpu.Begin()
		c.serve()
		section.End(spentServing)
		c.unlock()
		r.hand()
	}
}

// group implements nvme.CQGroup.
type group struct {
	r       *reactor
	w       *waiter
	mu      sync.Mutex
	closed  bool
	hasRing bool
}

// GroupCQs makes a group of completion queues of this and other proxy buses. It has an
// io_uring of its own.
func (b *Bus) GroupCQs(refs []nvme.CQRef) (nvme.CQGroup, error) {
	g := &group{}
	for _, ref := range refs {
		p, ok := ref.Bus.(*Bus)
		if !ok {
			return nil,
				fmt.Errorf("%s: group of completion queues: %s is not a software controller",
					b.name, ref.Bus.Name())
		}
		g.hasRing = g.hasRing || p.usesRing()
	}
	r, err := newReactor(g.hasRing, b.cfg.PollDoorbells)
	if err != nil {
		return nil, fmt.Errorf("%s: group of completion queues: %w", b.name, err)
	}
	g.r, g.w = r, newWaiter(r)
	r.start()
	for _, ref := range refs {
		if err := g.Rejoin(ref); err != nil {
			_ = g.Close()
			return nil, err
		}
	}
	return g, nil
}

// Rejoin adds an idle completion queue that is in no group.
func (g *group) Rejoin(ref nvme.CQRef) error {
	fail := func(format string, a ...any) error {
		return fmt.Errorf("%s: completion queue %d: %s", ref.Bus.Name(), ref.QID,
			fmt.Sprintf(format, a...))
	}
	b, ok := ref.Bus.(*Bus)
	if !ok {
		return fail("not of a software controller")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return fail("its group is closed")
	}
	if b.usesRing() && !g.hasRing {
		return fail("has a file behind it, and its group was made for RAM only")
	}
	var c *cqueue
	if int(ref.QID) < len(b.cqs) {
		c = b.cqs[ref.QID].Load()
	}
	if c == nil || ref.QID == 0 {
		return fail("there is no such I/O queue")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.dead:
		return fail("is deleted")
	case c.grouped():
		return fail("is in a group already")
	case c.inKernel > 0:
		return fail("has commands in progress")
	}
	c.r.Load().leave(c)
	g.r.join(c)
	c.seen = c.posted.Load() - 1 // whatever was posted before counts as new
	c.waiter.Store(g.w)
	g.w.add(c)
	return nil
}

// grouped reports whether the queue is in a group rather than with its bus.
func (c *cqueue) grouped() bool { return c.r.Load() != c.bus.react }

// Wait implements nvme.CQGroup.
func (g *group) Wait(d time.Duration) { g.w.waitFor(d) }

func (w *waiter) add(c *cqueue) {
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	cqs := append(slices.Clone(*w.cqs.Load()), c)
	w.cqs.Store(&cqs)
}

// drop takes a queue that is being deleted out of its waiter. The caller holds no lock of it.
func (w *waiter) drop(c *cqueue) {
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	cqs := slices.Clone(*w.cqs.Load())
	if i := slices.Index(cqs, c); i >= 0 {
		cqs = slices.Delete(cqs, i, i+1)
	}
	w.cqs.Store(&cqs)
}

// Close returns the queues to their buses. Nobody may be in Wait.
func (g *group) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	deadline := time.Now().Add(drainTime)
	for _, c := range *g.w.cqs.Load() {
		for {
			if err := c.drain(deadline, func(*slot) bool { return true }); err != nil {
				return fmt.Errorf("%s: dissolve a group of completion queues: %w", c.bus.name, err)
			}
			c.mu.Lock()
			if c.inKernel == 0 {
				break
			}
			c.mu.Unlock() // somebody submitted in between
		}
		if !c.dead {
			g.r.leave(c)
			c.bus.react.join(c)
			c.waiter.Store(nil)
		}
		c.mu.Unlock()
		c.bus.react.arm()
	}
	g.w.cqs.Store(&[]*cqueue{})
	return g.r.close()
}
