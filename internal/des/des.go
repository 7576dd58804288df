// Package des is a discrete-event simulation: a virtual clock in nanoseconds, the events that move
// it, and the two kinds of resource that queue (a link, a pool).
//
// A run is a pure function of what was scheduled: events happen by time, and those of one time in
// the order in which they were asked for. One goroutine runs a simulation.
package des

import "math"

// Handler takes events without a closure for each: arg tells them apart.
type Handler interface{ Event(arg uint64) }

type callback func()

func (f callback) Event(uint64) { f() }

// Sim is a clock and its events. The zero value is ready at time 0.
type Sim struct {
	now    int64
	seq    uint64
	heap   []entry
	events []event
	free   []uint32
	ran    uint64
}

// entry is an event's place in the order. The event lies elsewhere, so that little is moved.
type entry struct {
	t   int64
	seq uint64
	at  uint32
}

type event struct {
	h   Handler
	arg uint64
}

func (a entry) before(b entry) bool { return a.t < b.t || a.t == b.t && a.seq < b.seq }

// New makes a simulation at time 0.
func New() *Sim { return &Sim{} }

// Now is the time, in ns since the start.
func (s *Sim) Now() int64 { return s.now }

// Events is the number of events that have happened.
func (s *Sim) Events() uint64 { return s.ran }

// At has fn called at time t, or now if t is past.
func (s *Sim) At(t int64, fn func()) { s.Call(t, callback(fn), 0) }

// After has fn called d ns from now.
func (s *Sim) After(d int64, fn func()) { s.Call(s.now+d, callback(fn), 0) }

// Call is At for a handler, without an allocation.
func (s *Sim) Call(t int64, h Handler, arg uint64) {
	var index uint32
	if n := len(s.free); n > 0 {
		index = s.free[n-1]
		s.free = s.free[:n-1]
		s.events[index] = event{h, arg}
	} else {
		index = uint32(len(s.events))
		s.events = append(s.events, event{h, arg})
	}
	s.seq++
	s.push(entry{max(t, s.now), s.seq, index})
}

// fanout of the heap. Four children share two cache lines and halve the levels of a binary heap.
const fanout = 4

func (s *Sim) push(e entry) {
	s.heap = append(s.heap, e)
	h, i := s.heap, len(s.heap)-1
	for i > 0 {
		p := (i - 1) / fanout
		if !e.before(h[p]) {
			break
		}
		h[i] = h[p]
		i = p
	}
	h[i] = e
}

func (s *Sim) pop() entry {
	h := s.heap
	top := h[0]
	n := len(h) - 1
	e := h[n]
	s.heap = h[:n]
	h = s.heap
	i := 0
	for {
		c := i*fanout + 1
		if c >= n {
			break
		}
		least := c
		for k := c + 1; k < min(c+fanout, n); k++ {
			if h[k].before(h[least]) {
				least = k
			}
		}
		if !h[least].before(e) {
			break
		}
		h[i] = h[least]
		i = least
	}
	if n > 0 {
		h[i] = e
	}
	return top
}

// Step lets the next event happen; false when there is none.
func (s *Sim) Step() bool {
	if len(s.heap) == 0 {
		return false
	}
	e := s.pop()
	ev := s.events[e.at]
	s.events[e.at] = event{}
	s.free = append(s.free, e.at)
	s.now = e.t
	s.ran++
	ev.h.Event(ev.arg)
	return true
}

// Run lets events happen until there are none.
func (s *Sim) Run() {
	for s.Step() {
	}
}

// RunUntil lets the events up to and at time t happen, and then it is t.
func (s *Sim) RunUntil(t int64) {
	for len(s.heap) > 0 && s.heap[0].t <= t {
		s.Step()
	}
	s.now = max(s.now, t)
}

// Next is the time of the next event; false when there is none.
func (s *Sim) Next() (int64, bool) {
	if len(s.heap) == 0 {
		return math.MaxInt64, false
	}
	return s.heap[0].t, true
}
