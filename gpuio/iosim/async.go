package iosim

import (
	"helios/gpuio"
	"helios/internal/errs"
)

// async plays the submit and complete kernels (gpuio/submit.go, complete.go), each on its stream.
type async struct {
	m      *Machine
	s      *Stack
	perSSD int
	queues []*queue
	warps  []*warpState // of complete
	sub    int          // warps of submit
	cost   costs

	toSubmit     []*set // in the order of their submit kernels
	submitting   bool
	submitFree   int64  // when the stream's last submit kernel has ended
	toComplete   []*set // handed over, in the order of their complete kernels
	active       *set   // whose complete kernel runs, or is about to
	completeFree int64
	warpsLeft    int
}

// queue is one queue pair. Which CIDs are free does not matter, only how many.
type queue struct {
	g      int
	ssd    int32
	free   int
	pend   []segment
	cq     []uint32 // arrived and not reaped from head on
	head   int
	flying int // commands that are not reaped
	warp   *warpState
	own    bool // somebody refills the queue
	dirty  bool // and has to look again
	unrung []uint32
	row    int // sweeps of the queue one after the other
}

// maxSweeps bounds the sweeps of one queue in a row. A warp with a queue that fills faster than it
// sweeps would otherwise never come to the end of its round, and so not to the end of the set: the
// other warps have left by then, and their queues stand still until the next complete kernel.
const maxSweeps = 4

// segment is one set's commands that wait at a queue.
type segment struct {
	set  *set
	left int64
}

// warpState is a warp of the complete kernel.
type warpState struct {
	queues []*queue
	live   bool
	idle   bool
	since  int64 // idle: when its last look ended
	look   int64 // idle: how long a round takes
	due    bool  // idle: it is about to look
}

// choosePairs settles queue pairs per SSD, as gpuio's engine does, and the warps of a launch.
func (s *Stack) choosePairs(c *Config) (perSSD, warps, submitWarps int, err error) {
	n := s.m.SSDs()
	perBlock := c.Threads / warp
	active := c.Blocks * perBlock
	if s.m.slots != nil { // the host device: a block is one warp, and so many run at once
		active, perBlock = min(c.Blocks, s.m.SMs.Size()), 1
	}
	least := (c.Depth + maxCommands - 1) / maxCommands
	if perSSD = min(c.QueuePairs, c.Depth); perSSD == 0 {
		perSSD = gpuio.EvenPairs(n, active, least, min(max(c.Depth/warp, 1), maxPairs))
	}
	if perSSD < least {
		return 0, 0, 0, errs.New(errs.Usage,
			"depth %d over %d queue pairs: a queue pair has at most %d commands; use more queue pairs or less depth",
			c.Depth, perSSD, maxCommands)
	}
	queues := n * perSSD
	warps = (min(active, queues) + perBlock - 1) / perBlock * perBlock
	submitWarps = min(c.Blocks, (queues+perBlock-1)/perBlock) * perBlock
	return perSSD, warps, submitWarps, nil
}

func checkThreads(c *Config) error {
	if c.Threads < warp || c.Threads > 1024 || c.Threads%warp != 0 {
		return errs.New(errs.Usage, "%d threads in a block: choose a multiple of %d up to 1024",
			c.Threads, warp)
	}
	return nil
}

// depthOf is the number of CIDs of an SSD's i-th queue.
func depthOf(c *Config, perSSD, i int) int {
	n := c.Depth / perSSD
	if i < c.Depth%perSSD {
		n++
	}
	return n
}

func (s *Stack) newAsync(c *Config) error {
	if c.Blocks == 0 {
		c.Blocks = 32
	}
	if c.Threads == 0 {
		c.Threads = warp
	}
	if c.State == "" {
		c.State = s.m.Profile.GPU.IO.State
	}
	if err := checkThreads(c); err != nil {
		return err
	}
	per, warps, sub, err := s.choosePairs(c)
	if err != nil {
		return err
	}
	c.QueuePairs = per
	a := &async{s: s, m: s.m, perSSD: per, sub: sub, cost: s.costs(c)}
	for g := range s.m.SSDs() * per {
		a.queues = append(a.queues, &queue{g: g, ssd: int32(g / per), free: depthOf(c, per, g%per)})
	}
	for w := range warps {
		lo, hi := span(len(a.queues), w, warps)
		x := &warpState{queues: a.queues[lo:hi]}
		for _, q := range x.queues {
			q.warp = x
		}
		a.warps = append(a.warps, x)
	}
	s.dev = s.newReads(c.Seed, false, a.arrive)
	s.impl = a
	return nil
}

// span is the part of n that belongs to i of k, by the rule of cuda.Block.Range.
func span(n, i, k int) (lo, hi int) {
	each, more := n/k, n%k
	lo = i*each + min(i, more)
	hi = lo + each
	if i < more {
		hi++
	}
	return lo, hi
}

// start launches submit for a set.
func (a *async) start(x *set) {
	x.remaining = make([]int64, len(a.queues))
	for g := range x.remaining {
		x.remaining[g] = share(x.per[g/a.perSSD], uint32(g%a.perSSD), uint32(a.perSSD), x.rotate)
	}
	a.toSubmit = append(a.toSubmit, x)
	a.nextSubmit()
}

// nextSubmit runs the stream's next submit kernel, once the one before has ended.
func (a *async) nextSubmit() {
	if a.submitting || len(a.toSubmit) == 0 {
		return
	}
	x := a.toSubmit[0]
	a.toSubmit = a.toSubmit[1:]
	a.submitting = true
	a.s.st.Launches++
	a.m.Sim.At(max(x.times.SubmitNS+a.cost.launch, a.submitFree+a.cost.gap), func() {
		left := 0
		for w := range a.sub {
			if lo, hi := span(len(a.queues), w, a.sub); lo < hi {
				left++
				a.submitWarp(x, lo, hi, func() {
					if left--; left == 0 {
						a.submitted(x)
					}
				})
			}
		}
	})
}

// submitWarp pushes the set's shares to a warp's queues, one after the other, and refills them.
func (a *async) submitWarp(x *set, g, hi int, end func()) {
	for g < hi && x.remaining[g] == 0 {
		g++
	}
	if g == hi {
		a.m.Sim.After(0, end)
		return
	}
	q := a.queues[g]
	n := x.remaining[g]
	a.m.spend(a.cost.push, func() {
		q.pend = append(q.pend, segment{x, n})
		a.serve(q, false, func() { a.submitWarp(x, g+1, hi, end) })
	})
}

// submitted ends a submit kernel: its set's complete kernel may start, and so may the next submit.
func (a *async) submitted(x *set) {
	x.times.SubmitEndNS = a.m.Sim.Now()
	a.submitFree, a.submitting = a.m.Sim.Now(), false
	a.toComplete = append(a.toComplete, x)
	a.nextComplete()
	a.nextSubmit()
}

// nextComplete runs the stream's next complete kernel, once its set has been handed over and the
// kernel before has ended.
func (a *async) nextComplete() {
	if a.active != nil || len(a.toComplete) == 0 {
		return
	}
	a.active = a.toComplete[0]
	a.toComplete = a.toComplete[1:]
	a.s.st.Launches++
	a.m.Sim.At(max(a.active.times.SubmitEndNS, a.completeFree)+a.cost.gap, func() {
		a.warpsLeft = len(a.warps)
		for _, w := range a.warps {
			w.live = true
			a.pass(w, 0, false, true, cost{})
		}
	})
}

// pass is one round of a warp of complete over its queues, from queue i on. news reports whether it
// has found any; first, that it is the kernel's first round, which also refills; owed is what it
// has done since the last event.
func (a *async) pass(w *warpState, i int, news, first bool, owed cost) {
	if i < len(w.queues) {
		q := w.queues[i]
		a.m.spend(owed.plus(a.cost.look), func() {
			n := min(len(q.cq)-q.head, warp)
			if q.row++; n < warp || q.row == maxSweeps {
				q.row = 0
			}
			switch {
			case q.row > 0:
				// at once again: more may be there
				a.reap(q, n, func() { a.pass(w, i, true, first, cost{}) })
			case n > 0:
				a.reap(q, n, func() { a.pass(w, i+1, true, first, a.cost.check) })
			case first:
				a.serve(q, true, func() { a.pass(w, i+1, news, first, a.cost.check) })
			default:
				a.pass(w, i+1, news, first, a.cost.check)
			}
		})
		return
	}
	switch {
	case a.done(w):
		w.live = false
		if a.warpsLeft--; a.warpsLeft == 0 {
			a.ended()
		}
	case news:
		a.pass(w, 0, false, false, owed)
	default:
		n := len(w.queues)
		w.idle, w.due = true, false
		rest, _ := owed.and(a.cost.idle, n).whole()
		w.since = a.m.Sim.Now() + rest
		w.look, _ = a.cost.look.plus(a.cost.check).plus(a.cost.idle).times(float64(n)).whole()
		for _, q := range w.queues {
			if len(q.cq) > q.head { // came after the look
				a.nudge(w)
			}
		}
	}
}

// done reports whether a warp of complete may end: nothing of the set is left at its queues, and
// either nothing else is in flight there, or nobody works for the set any more.
func (a *async) done(w *warpState) bool {
	for _, q := range w.queues {
		if a.active.remaining[q.g] != 0 {
			return false
		}
	}
	if a.active.left == 0 {
		return true
	}
	for _, q := range w.queues {
		if q.flying > 0 {
			return false
		}
	}
	return true
}

// nudge has an idle warp see at its next look what has changed.
func (a *async) nudge(w *warpState) {
	if !w.idle || w.due {
		return
	}
	w.due = true
	wakes := a.m.Sim.Now() + a.cost.wake
	if a.cost.wake == 0 {
		wakes = w.nextLook(wakes, a.cost.pauseMin, a.cost.pauseMax)
	}
	a.m.Sim.At(wakes, func() {
		w.idle, w.due = false, false
		a.pass(w, 0, false, false, cost{})
	})
}

// nextLook tells when a warp that polls, with pauses that double, begins its first round after t.
func (w *warpState) nextLook(t, pauseMin, pauseMax int64) int64 {
	look := w.since + pauseMin
	for pause := pauseMin; look < t; look += w.look + max(pause, 1) {
		if pause >= pauseMax {
			cycle := max(w.look+pauseMax, 1)
			return look + (t-look+cycle-1)/cycle*cycle
		}
		pause = min(max(pause, 1)*2, pauseMax)
	}
	return look
}

// arrive takes a completion entry of an SSD.
func (a *async) arrive(id uint32) {
	q := a.queues[a.s.dev.items[id].owner]
	q.cq = append(q.cq, id)
	a.nudge(q.warp)
}

// reap retires n completions of a queue, rings the CQ doorbell and refills the queue.
func (a *async) reap(q *queue, n int, then func()) {
	a.m.spend(a.cost.retire.and(a.cost.retireEach, n).and(a.cost.copyEach, n), func() {
		now := a.m.Sim.Now()
		d := a.s.dev
		for _, id := range q.cq[q.head : q.head+n] {
			r := &d.items[id]
			a.s.completed(r, now)
			r.set.remaining[q.g]--
			if r.set.left--; r.set.left == 0 {
				a.last(r.set)
			}
			d.drop(id)
		}
		q.cq, q.head = popped(q.cq, q.head+n)
		q.free += n
		q.flying -= n
		a.s.st.CQDoorbells++
		a.serve(q, true, then)
	})
}

// popped drops what a list has before head, now and then.
func popped(list []uint32, head int) ([]uint32, int) {
	if head < len(list) && head < 4096 {
		return list, head
	}
	return append(list[:0], list[head:]...), 0
}

// last tells idle warps that nobody works for the set any more.
func (a *async) last(x *set) {
	if x != a.active {
		return
	}
	for _, w := range a.warps {
		if w.live {
			a.nudge(w)
		}
	}
}

// serve refills a queue, or leaves that to whoever does so now.
func (a *async) serve(q *queue, completing bool, then func()) {
	if q.own {
		q.dirty = true
		a.m.Sim.After(0, then)
		return
	}
	q.own = true
	a.refill(q, completing, func() {
		q.own = false
		if q.dirty {
			q.dirty = false
			a.serve(q, completing, then)
			return
		}
		then()
	})
}

// refill issues commands until CIDs or work run out. The steps are added up, and each doorbell
// rings at its time in that.
func (a *async) refill(q *queue, completing bool, then func()) {
	a.m.work(func() cost {
		now := a.m.Sim.Now()
		took := a.cost.refill
		d := a.s.dev
		ring := func() {
			took = took.plus(a.cost.ring)
			d.ring(now+int64(took.ns+0.5), q.unrung)
			q.unrung = q.unrung[:0]
			a.s.st.SQDoorbells++
		}
		for len(q.pend) > 0 && q.free > 0 {
			p := &q.pend[0]
			n := int(min(p.left, warp, int64(q.free)))
			took = took.plus(a.cost.batch).and(a.cost.each, n)
			for range n {
				q.unrung = append(q.unrung, d.make(p.set, q.ssd, int32(q.g), now))
			}
			q.free -= n
			q.flying += n
			if completing {
				a.s.st.Pended += int64(n)
			}
			if p.left -= int64(n); p.left == 0 {
				q.pend = append(q.pend[:0], q.pend[1:]...)
			}
			if len(q.unrung) >= ringEvery {
				ring()
			}
		}
		if len(q.unrung) > 0 {
			ring()
		}
		return took.plus(a.cost.refillEnd)
	}, then)
}

// ended is the end of a complete kernel.
func (a *async) ended() {
	now := a.m.Sim.Now()
	x := a.active
	a.completeFree, a.active = now, nil
	a.s.finish(x, now+a.cost.teardown)
	a.nextComplete()
}
