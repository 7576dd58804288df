package iosim

import "helios/internal/hardware"

// syncEngine plays read_sync (gpuio/readsync.go): a warp takes a CID and a row, writes the command
// under its queue's submission lock, and waits; whoever waits reaps for all, under the other lock.
//
// A lock is had in the order in which it was asked for. Between two sweeps that find something the
// waiting warps sweep in vain, so a completion is seen at the next of those.
type syncEngine struct {
	m      *Machine
	s      *Stack
	perSSD int
	queues []*syncQueue
	warps  []syncWarp
	sms    int
	cost   costs

	line   []*set
	active *set
	alive  int
	free   int64 // when the last kernel ended
}

type syncQueue struct {
	g       int
	ssd     int32
	cids    int
	todo    int64    // rows of the active set that nobody has taken
	noCID   []uint32 // warps that wait for a CID, from gone on
	gone    int
	lock    int64 // when the submission side is free
	cq      []uint32
	head    int
	reaping bool
	swept   int64 // when the last sweep ended
}

type syncWarp struct{ queue int }

// Events of a warp.
const (
	syncTaken  = iota << 32 // it has a CID and a row
	syncIssued              // its command is written
	syncSeen                // it has seen its completion and given the CID back
	sweepBegin              // of a queue
)

func (s *Stack) newSync(c *Config) error {
	if c.Threads == 0 {
		c.Threads = 128
	}
	if err := checkThreads(c); err != nil {
		return err
	}
	if c.State == "" {
		c.State = hardware.StateGPU
	}
	g := &s.m.Profile.GPU
	sms := s.m.SMs.Size()
	perSM := g.WarpsPerSM.Int() // blocks of the host device, whatever their size
	if s.m.slots == nil {
		perSM = min(32, max(perSM*warp/c.Threads, 1))
	}
	if c.Blocks == 0 {
		c.Blocks = sms * perSM
	}
	per, _, _, err := s.choosePairs(c)
	if err != nil {
		return err
	}
	c.QueuePairs = per
	resident := min(c.Blocks, sms*perSM)
	e := &syncEngine{m: s.m, s: s, perSSD: per, cost: s.costs(c),
		sms: (resident + perSM - 1) / perSM}
	for q := range s.m.SSDs() * per {
		e.queues = append(e.queues, &syncQueue{g: q, ssd: int32(q / per),
			cids: depthOf(c, per, q%per)})
	}
	e.warps = make([]syncWarp, resident*(c.Threads/warp))
	s.dev = s.newReads(c.Seed, false, e.arrive)
	s.impl = e
	return nil
}

func (e *syncEngine) start(x *set) {
	e.line = append(e.line, x)
	e.next()
}

// next runs the stream's next kernel once the one before has ended and there are SMs.
func (e *syncEngine) next() {
	if e.active != nil || len(e.line) == 0 {
		return
	}
	x := e.line[0]
	e.line = e.line[1:]
	e.active = x
	e.s.st.Launches++
	e.m.Sim.At(max(x.times.SubmitNS+e.cost.launch, e.free+e.cost.gap), func() {
		e.m.SMs.Acquire(e.sms, e.begin)
	})
}

func (e *syncEngine) begin() {
	x := e.active
	x.times.SubmitEndNS = e.m.Sim.Now()
	for g, q := range e.queues {
		q.todo = share(x.per[g/e.perSSD], uint32(g%e.perSSD), uint32(e.perSSD), x.rotate)
		q.swept = x.times.SubmitEndNS
	}
	e.alive = len(e.warps)
	for w := range e.warps {
		e.warps[w].queue = w % len(e.queues)
		e.take(uint32(w))
	}
}

// after has an event of a warp happen when it has been busy for that.
func (e *syncEngine) after(c cost, arg uint64) {
	if e.m.slots == nil {
		ns, wire := c.whole()
		if wire > 0 {
			e.m.Ingress.Send(wire)
		}
		e.m.Sim.Call(e.m.Sim.Now()+ns, e, arg)
		return
	}
	e.m.spend(c, func() { e.Event(arg) })
}

// take gives a warp a CID and a row.
func (e *syncEngine) take(w uint32) {
	x := &e.warps[w]
	for e.queues[x.queue].todo == 0 {
		if x.queue += len(e.warps); x.queue >= len(e.queues) {
			if e.alive--; e.alive == 0 {
				e.end()
			}
			return
		}
	}
	q := e.queues[x.queue]
	if q.cids == 0 {
		q.noCID = append(q.noCID, w)
		return
	}
	q.cids--
	q.todo--
	e.after(e.cost.syncTake, syncTaken|uint64(w))
}

// Event implements des.Handler.
func (e *syncEngine) Event(arg uint64) {
	id := uint32(arg & idMask)
	now := e.m.Sim.Now()
	switch arg &^ idMask {
	case syncTaken:
		q := e.queues[e.warps[id].queue]
		wait := max(q.lock-now, 0)
		if e.m.slots != nil {
			wait = 0 // who finds it taken yields its slot, and hardly anybody does: few run at once
		}
		q.lock = now + wait + int64(e.cost.syncLock.ns+e.cost.syncUnlock.ns+0.5)
		e.after(cost{float64(wait), 0}.plus(e.cost.syncLock), syncIssued|uint64(id))
	case syncIssued:
		q := e.queues[e.warps[id].queue]
		r := e.s.dev.make(e.active, q.ssd, int32(id), now-int64(e.cost.syncLock.ns))
		e.s.dev.ring(now, []uint32{r})
		e.s.st.SQDoorbells++
	case syncSeen:
		q := e.queues[e.warps[id].queue]
		q.cids++
		// A waiter for a CID goes first, and leaves when the rows are taken.
		for len(q.noCID) > q.gone && (q.cids > 0 || q.todo == 0) {
			w := q.noCID[q.gone]
			q.gone++
			e.take(w)
		}
		q.noCID, q.gone = popped(q.noCID, q.gone)
		e.take(id)
	case sweepBegin:
		e.sweep(e.queues[id])
	}
}

// arrive takes a completion entry of an SSD.
func (e *syncEngine) arrive(id uint32) {
	q := e.queues[e.warps[e.s.dev.items[id].owner].queue]
	q.cq = append(q.cq, id)
	if q.reaping {
		return
	}
	q.reaping = true
	now := e.m.Sim.Now()
	if e.cost.wake > 0 {
		e.m.Sim.Call(now+e.cost.wake, e, sweepBegin|uint64(q.g))
		return
	}
	empty := max(int64(e.cost.syncScan.ns), 1)
	e.m.Sim.Call(q.swept+(now-q.swept+empty-1)/empty*empty, e, sweepBegin|uint64(q.g))
}

// sweep takes up to 32 completions off a queue and marks them for their warps.
func (e *syncEngine) sweep(q *syncQueue) {
	n := min(len(q.cq)-q.head, warp)
	e.m.spend(e.cost.syncReap.and(e.cost.retireEach, n), func() {
		now := e.m.Sim.Now()
		d := e.s.dev
		for _, id := range q.cq[q.head : q.head+n] {
			r := &d.items[id]
			e.s.completed(r, now)
			w := uint64(r.owner)
			d.drop(id)
			e.after(e.cost.syncEnd.plus(e.cost.copyEach), syncSeen|w)
		}
		q.cq, q.head = popped(q.cq, q.head+n)
		q.swept = now
		e.s.st.CQDoorbells++
		if len(q.cq) > q.head {
			e.sweep(q)
			return
		}
		q.reaping = false
	})
}

// end is the end of a kernel.
func (e *syncEngine) end() {
	now := e.m.Sim.Now()
	x := e.active
	e.active, e.free = nil, now
	e.m.SMs.Release(e.sms)
	e.s.finish(x, now+e.cost.teardown)
	e.next()
}
