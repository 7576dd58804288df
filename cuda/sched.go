package cuda

import (
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"helios/internal/hostcpu"
	"helios/internal/simd"
)

// The host device's scheduler: which block runs on which worker slot.
//
// A block is a call of a kernel's function. It holds one of the device's slots while it runs and
// runs to its end unless it says that it waits (Park, Yield); then it gives the slot away and
// queues for one again. So a device with one slot still runs a `complete` kernel that polls and
// a `submit` kernel that it waits for at the same time, as a GPU does with two resident blocks
// on one SM.
//
// Two kinds of work want slots: *claims*, grids that have blocks not yet started, and
// *returns*, started blocks that gave their slot up and want one again. A free slot goes to the
// stream of the highest priority, to returns before claims, and then to who came first. A
// stream never holds more slots than its budget. Between two blocks a runner looks whether a
// stream of higher priority waits (or one of the same, when it has run for a quantum), and
// makes way: blocks are the unit of preemption.
//
// Yield is different: it gives the slot to those who have work to do (claims, and returns from
// Park) before those who yielded themselves, whatever their priorities, for a spinning block of
// high priority must not keep out the block it spins for. Among blocks that yielded it is first
// in, first out.
//
// Goroutines: a launch's first block runs on its stream's goroutine when a slot is free; all
// others run on pool goroutines that persist and stay parked on a channel when idle. The pool
// grows only while blocks are parked, to at most maxParked per stream.

// quantum is the time for which a grid keeps a slot while another stream of the same priority
// waits.
const quantum = 200 * time.Microsecond

// residentPerSM bounds the blocks of a stream that have started and wait, as a GPU bounds the
// resident blocks of an SM (32 on compute capability 9.0).
const residentPerSM = 32

// A goroutine of the device that has nothing to do polls for linger before it parks: for its next
// work, or for the end of a grid whose last blocks others run. One that has parked starts 0.1 to
// 5 ms after its launch on a virtual machine of two processors, one that polls within 0.1 us. Small
// grids are over by then.
const linger = 50 * time.Microsecond

var epoch = time.Now()

// now is monotonic time in nanoseconds.
func now() int64 { return int64(time.Since(epoch)) }

// grid is one launch.
type grid struct {
	stream *hostStream
	kernel *hostKernel
	blocks int32
	thread int32
	next   atomic.Int64 // next block to start
	done   atomic.Int64 // blocks finished or dropped
	fail   atomic.Pointer[KernelError]
	claim  atomic.Bool // in scheduler.claims
	seq    uint64
	small  [12]uint64 // parameters, when they fit
	big    []uint64
}

// returner is a block that waits for a slot after Park or Yield.
type returner struct {
	stream  *hostStream
	yielded bool
	seq     uint64
	slot    chan int32 // cap 1
}

// job is a slot together with a block to run on it.
type job struct {
	g     *grid
	index int32
	slot  int32
}

type worker struct {
	wake  chan job // cap 1
	ended chan struct{}
	block Block
}

type scheduler struct {
	waiting atomic.Int32 // len(claims) + len(returns)

	mu      sync.Mutex
	free    []int32 // slots, lowest last
	claims  []*grid
	returns []*returner
	idle    []*worker
	seq     uint64
	since   []int64         // per slot: when it was taken, -1 when free
	busy    []time.Duration // per slot
	closed  bool
	level   simd.Level // of the kernels; never changes
}

func (s *scheduler) init(slots int, level simd.Level) {
	s.level = level
	for i := slots - 1; i >= 0; i-- {
		s.free = append(s.free, int32(i))
	}
	s.since = make([]int64, slots)
	for i := range s.since {
		s.since[i] = -1
	}
	s.busy = make([]time.Duration, slots)
}

func (s *scheduler) busyTimes() []time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := slices.Clone(s.busy)
	t := now()
	for i, start := range s.since {
		if start >= 0 {
			out[i] += time.Duration(t - start)
		}
	}
	return out
}

// close ends the idle workers and waits for them. A worker that still runs a stuck kernel ends
// after it.
func (s *scheduler) close() {
	s.mu.Lock()
	s.closed = true
	idle := s.idle
	s.idle = nil
	s.mu.Unlock()
	for _, w := range idle {
		close(w.wake)
		<-w.ended
	}
}

// take and give move a slot between the free list and a holder. All below need s.mu.
func (s *scheduler) take() int32 {
	slot := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	s.since[slot] = now()
	return slot
}

func (s *scheduler) give(slot int32) {
	s.busy[slot] += time.Duration(now() - s.since[slot])
	s.since[slot] = -1
	// Sorted, so that a lone stream always runs on slot 0 and busy times mean something.
	i := len(s.free)
	for i > 0 && s.free[i-1] < slot {
		i--
	}
	s.free = slices.Insert(s.free, i, slot)
}

// hold and release count a stream's slots, and the time in which it has any.
func (s *scheduler) hold(st *hostStream) {
	if st.held == 0 {
		st.since = now()
	}
	st.held++
}

func (s *scheduler) release(st *hostStream) {
	st.held--
	if st.held == 0 {
		st.busy += time.Duration(now() - st.since)
	}
}

func (s *scheduler) addClaim(g *grid) {
	s.seq++
	g.seq = s.seq
	g.claim.Store(true)
	s.claims = append(s.claims, g)
	s.waiting.Add(1)
}

func (s *scheduler) dropClaim(g *grid) {
	if !g.claim.Load() {
		return
	}
	g.claim.Store(false)
	s.claims = slices.DeleteFunc(s.claims, func(x *grid) bool { return x == g })
	s.waiting.Add(-1)
}

func (s *scheduler) dropReturn(r *returner) {
	s.returns = slices.DeleteFunc(s.returns, func(x *returner) bool { return x == r })
	s.waiting.Add(-1)
}

// resume gives a block that waits its slot.
func (s *scheduler) resume(r *returner, slot int32) {
	s.dropReturn(r)
	r.stream.parked--
	s.hold(r.stream)
	r.slot <- slot
}

// best picks who gets the next slot: one of the two results is set, or neither. yielding asks for
// the order in which Yield gives its slot away; except is left out.
func (s *scheduler) best(yielding bool, except *grid) (*grid, *returner) {
	var bg *grid
	var br *returner
	var first rank
	for _, r := range s.returns {
		st := r.stream
		own := rank{prio: st.opt.Priority, yielded: r.yielded, returns: true, seq: r.seq}
		if st.held < st.budget && (br == nil || own.before(&first, yielding)) {
			br, first = r, own
		}
	}
	for _, g := range s.claims {
		st := g.stream
		own := rank{prio: st.opt.Priority, seq: g.seq}
		if g != except && st.held < st.budget && st.parked < st.maxParked &&
			(bg == nil && br == nil || own.before(&first, yielding)) {
			bg, br, first = g, nil, own
		}
	}
	return bg, br
}

// rank orders those that wait for a slot.
type rank struct {
	prio             int
	yielded, returns bool
	seq              uint64
}

// before reports whether r comes before q. yielding: those that have yielded come last, in order.
func (r *rank) before(q *rank, yielding bool) bool {
	switch {
	case yielding && r.yielded != q.yielded:
		return q.yielded
	case yielding && r.yielded:
		return r.seq < q.seq
	case r.prio != q.prio:
		return r.prio > q.prio
	case r.returns != q.returns:
		return r.returns
	}
	return r.seq < q.seq
}

// startBlock takes the next block of a claim and holds a slot for its stream. It fails when
// runners without the lock have taken the last one.
func (s *scheduler) startBlock(g *grid) (int32, bool) {
	i := g.next.Add(1) - 1
	if i+1 >= int64(g.blocks) {
		s.dropClaim(g)
	}
	if i >= int64(g.blocks) {
		return 0, false
	}
	s.hold(g.stream)
	return int32(i), true
}

// assign gives slot to the best taker and reports whether there was one.
func (s *scheduler) assign(slot int32, yielding bool) bool {
	for {
		g, r := s.best(yielding, nil)
		switch {
		case r != nil:
			s.resume(r, slot)
			return true
		case g != nil:
			if i, ok := s.startBlock(g); ok {
				s.worker().wake <- job{g, i, slot}
				return true
			}
		default:
			return false
		}
	}
}

// dispatch hands out the free slots.
func (s *scheduler) dispatch() {
	for len(s.free) > 0 && s.waiting.Load() > 0 {
		slot := s.take()
		if !s.assign(slot, false) {
			s.give(slot)
			return
		}
	}
}

func (s *scheduler) worker() *worker {
	if n := len(s.idle); n > 0 {
		w := s.idle[n-1]
		s.idle = s.idle[:n-1]
		return w
	}
	w := &worker{wake: make(chan job, 1), ended: make(chan struct{})}
	w.block.init(s)
	go w.loop()
	return w
}

func (w *worker) loop() {
	defer close(w.ended)
	debug.SetPanicOnFault(true)
	for {
		j, ok := await(w.wake)
		if !ok {
			return
		}
		w.block.sched.run(&w.block, j, w)
	}
}

// await receives from c: it polls for as long as linger before it parks. It lets other goroutines
// run after some looks only: two that do nothing but yield contend for Go's queue.
func await[T any](c <-chan T) (v T, ok bool) {
	if hostcpu.InBubble() {
		v, ok = <-c
		return v, ok
	}
	for end := now() + int64(linger); now() < end; runtime.Gosched() {
		for range 200 {
			if len(c) > 0 {
				break
			}
		}
		select {
		case v, ok = <-c:
			return v, ok
		default:
		}
	}
	v, ok = <-c
	return v, ok
}

// run runs blocks, starting with j, for as long as it keeps a slot. w is nil on a stream's own
// goroutine, which only runs its own grid; run then reports whether it finished the grid's last
// block.
func (s *scheduler) run(b *Block, j job, w *worker) bool {
	b.slot = j.slot
	began := now()
	for {
		g := j.g
		last := b.exec(g, j.index)
		if !last {
			// The usual case takes no lock: nobody else waits, so go on with this grid.
			waiting := s.waiting.Load()
			if waiting == 0 || waiting == 1 && g.claim.Load() {
				if i := g.next.Add(1) - 1; i < int64(g.blocks) {
					j.index = int32(i)
					continue
				}
			}
		}
		s.mu.Lock()
		if !last {
			if g.next.Load() < int64(g.blocks) && s.keeps(g, began) {
				if i, ok := s.startBlock(g); ok {
					s.release(g.stream) // counted already
					j.index = i
					s.mu.Unlock()
					continue
				}
			}
			if g.next.Load() >= int64(g.blocks) {
				s.dropClaim(g)
			}
		}
		s.release(g.stream)
		if w == nil {
			s.give(b.slot)
			s.dispatch()
			s.mu.Unlock()
			return last
		}
		next, more := s.next(b.slot)
		if more {
			j = next
			began = now()
		} else if !s.closed {
			s.idle = append(s.idle, w)
		}
		s.dispatch() // the budget that g's stream has given back may fit another slot
		ending := !more && s.closed
		s.mu.Unlock()
		if last {
			g.stream.gridDone <- struct{}{}
		}
		if ending {
			close(w.wake)
		}
		if !more {
			return false
		}
	}
}

// keeps reports whether a runner of g may start another block of it.
func (s *scheduler) keeps(g *grid, began int64) bool {
	og, or := s.best(false, g)
	var st *hostStream
	switch {
	case or != nil:
		st = or.stream
	case og != nil:
		st = og.stream
	default:
		return true
	}
	if st == g.stream {
		return false // a started block of this grid comes before the next one
	}
	if st.opt.Priority != g.stream.opt.Priority {
		return st.opt.Priority < g.stream.opt.Priority
	}
	if now()-began < int64(quantum) {
		return true
	}
	s.seq++
	g.seq = s.seq // behind those that waited
	return false
}

// next finds a pool worker that holds slot its next block. A return takes the slot away.
func (s *scheduler) next(slot int32) (job, bool) {
	for {
		g, r := s.best(false, nil)
		switch {
		case r != nil:
			s.resume(r, slot)
			return job{}, false
		case g != nil:
			if i, ok := s.startBlock(g); ok {
				return job{g, i, slot}, true
			}
		default:
			s.give(slot)
			return job{}, false
		}
	}
}

// launch runs g to its end, called on the stream's goroutine.
func (s *scheduler) launch(g *grid, b *Block) {
	s.mu.Lock()
	if len(s.free) == 0 {
		s.addClaim(g)
		s.mu.Unlock()
		<-g.stream.gridDone
		return
	}
	// A free slot means that nobody who may have it waits.
	s.hold(g.stream)
	slot := s.take()
	g.next.Store(1)
	if g.blocks > 1 {
		s.addClaim(g)
		s.dispatch()
	}
	s.mu.Unlock()
	if !s.run(b, job{g, 0, slot}, nil) {
		await(g.stream.gridDone)
	}
}

// leave gives up a block's slot.
func (s *scheduler) leave(b *Block) {
	s.mu.Lock()
	s.release(b.grid.stream)
	b.grid.stream.parked++
	s.give(b.slot)
	b.slot = -1
	s.dispatch()
	s.mu.Unlock()
}

// enter waits for a slot again.
func (s *scheduler) enter(b *Block) {
	st := b.grid.stream
	s.mu.Lock()
	if len(s.free) > 0 && st.held < st.budget {
		st.parked--
		s.hold(st)
		b.slot = s.take()
		s.mu.Unlock()
		return
	}
	s.enqueue(b, false)
	s.mu.Unlock()
	b.slot = <-b.ret.slot
}

func (s *scheduler) enqueue(b *Block, yielded bool) {
	s.seq++
	b.ret.stream, b.ret.yielded, b.ret.seq = b.grid.stream, yielded, s.seq
	s.returns = append(s.returns, &b.ret)
	s.waiting.Add(1)
}

// yield lets somebody else have the slot, if anybody can use it.
func (s *scheduler) yield(b *Block) {
	// Go's scheduler does not preempt for 10 ms: without this, spinning blocks would starve
	// the goroutines outside the device that they wait for.
	runtime.Gosched()
	if s.waiting.Load() == 0 {
		return
	}
	b.Pause()
	defer b.Resume()
	st := b.grid.stream
	s.mu.Lock()
	s.release(st) // so that a stream with its budget used up can yield to itself
	st.parked++
	t := now()
	slot := b.slot
	s.busy[slot] += time.Duration(t - s.since[slot])
	s.since[slot] = t
	if !s.assign(slot, true) {
		s.hold(st)
		st.parked--
		s.mu.Unlock()
		return
	}
	s.enqueue(b, true)
	s.dispatch()
	s.mu.Unlock()
	b.slot = <-b.ret.slot
}
