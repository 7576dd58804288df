// Package walk takes mini-batches through the operators of a run's graph: the order of stages, the
// credits, the reads that go out together and who waits for whom, on the wall clock as on the
// virtual one. An Executor runs the stages side by side, Operators do their work.
//
//	sample ──▶ announce, look up, submit ──▶ complete, gather ──▶ train ──▶ release
//
// The edges between the operators of a mini-batch are those of plan.OpGraph. A stage takes the
// mini-batches in their order.
package walk

import (
	"errors"
	"slices"

	"helios/sched/plan"
)

// Executor runs the stages of a walk side by side.
type Executor interface {
	// Go begins a stage.
	Go(stage func())
	// Await suspends a stage until a condition holds, which it does not ask again then: the
	// condition may take what it found. False: the walk is stopped.
	Await(cond func() bool) bool
	// Do changes something that conditions depend on.
	Do(change func())
	// Stop ends all waits.
	Stop()
	// Now is the time in nanoseconds.
	Now() int64
}

// Operators work on mini-batches. Each call returns when its operator has ended; Submit does when
// the reads are out, and Gather may when the work is on its stream. A hop stands for the rows that
// it has added to the frontier, hop 0 for the seeds; without PerHop the last hop has all rows.
type Operators[B any] interface {
	// Begin takes a mini-batch up, by its place in the pass. One that was sampled before the walk
	// comes back whole.
	Begin(index int) (B, error)
	Sample(b B, hop int) error
	// Reach comes before a hop's rows can be looked up.
	Reach(b B, hop int) error
	// Announce tells the tiers of a mini-batch of the window.
	Announce(b B) error
	Lookup(b B, hop int) error
	// Closes reports whether the open set of reads ends with its last part.
	Closes(s *Set[B]) bool
	Submit(s *Set[B]) error
	Complete(s *Set[B]) error
	Gather(b B, hop int) error
	// Place waits for the gathers of a mini-batch.
	Place(b B) error
	// Train runs T. Where the device is yet to end it, end waits for that, which Walk does before
	// it trains on the second mini-batch behind it; nil: T has ended.
	Train(b B) (end func() error, err error)
	// Release takes back what a mini-batch that has trained held.
	Release(b B)
	// Waited counts time in which training had nothing to do.
	Waited(ns int64)
}

// Newest returns the part that was added last.
func (s *Set[B]) Newest() Part[B] { return s.Parts[len(s.Parts)-1] }

// Whole reports whether a set of so many mini-batches that are read as one (0: each hop is one)
// ends with its last part; end: that is of the walk's last mini-batch.
func (s *Set[B]) Whole(joined int, end bool) bool {
	return joined == 0 || s.Newest().Last && (s.Batches >= joined || end)
}

// Set is the parts of mini-batches whose reads go out together.
type Set[B any] struct {
	Parts   []Part[B]
	Batches int // that end in it
	// Arrived is for the operators' own use.
	Arrived   bool
	completed bool
}

// Part is the rows that a hop added to a mini-batch.
type Part[B any] struct {
	Batch B
	Hop   int
	Last  bool  // of its mini-batch
	out   *bool // its reads are
}

// ErrStopped ends a stage whose operator was cut short because the walk is stopped.
var ErrStopped = errors.New("the walk is stopped")

// Walk takes mini-batches First to End-1 of a pass to their training.
type Walk[B any] struct {
	Executor  Executor
	Operators Operators[B]
	Graph     *plan.OpGraph
	// From and To bound the mini-batches that are sampled: a window wants some beyond End. Waiting
	// has those that an earlier walk has sampled, First to From-1.
	From, To, First, End int
	Waiting              []B
	// Restored: the mini-batches were sampled before the walk.
	Restored bool
	// Samples bounds the mini-batches that are sampled and not trained. Merged reads raise it.
	Samples int
	// Failed hears the first error.
	Failed func(err error)

	program
	line    []*flight[B] // mini-batches in flight, in order
	passed  int          // mini-batches before the first of line
	inUse   int          // credits of Samples
	rows    int          // credits for rows, where they are others
	heard   int          // the first mini-batch that is not announced
	looked  int          // the first that is not looked up
	out     int          // mini-batches whose reads are out, and that are not trained
	busy    bool         // sampling or lookup has the device, where one operator runs at a time
	open    *Set[B]
	failure error
}

// flight is a mini-batch under way.
type flight[B any] struct {
	batch   B
	index   int
	done    []bool // by operator
	sets    []*Set[B]
	sampled bool
	hasRows bool // it has a credit for rows
	whole   bool // its rows are in place
}

// ready reports whether the operators before one have ended.
func (f *flight[B]) ready(s *step) bool {
	return f != nil && !slices.ContainsFunc(s.after, func(i int) bool { return !f.done[i] })
}

// read reports whether the reads of a mini-batch have ended.
func (f *flight[B]) read(p *program) bool {
	return !slices.ContainsFunc(p.delivering, func(s *step) bool {
		return s.op.Kind == plan.OpComplete && !f.done[s.index]
	})
}

// admitted reports whether all parts of a mini-batch are looked up and their reads out.
func (f *flight[B]) admitted(p *program) bool {
	return f != nil &&
		!slices.ContainsFunc(p.admitting, func(s *step) bool { return !f.done[s.index] })
}

// Start begins all stages but training.
func (w *Walk[B]) Start() {
	w.program = programOf(w.Graph)
	w.passed, w.heard, w.looked, w.rows = w.First, w.From, w.First, w.Graph.Credits
	w.inUse = len(w.Waiting)
	for i, b := range w.Waiting {
		w.enter(b, w.First+i).sample(&w.program)
	}
	for _, stage := range []func() error{w.sample, w.admit, w.deliver} {
		w.Executor.Go(func() {
			if err := stage(); err != nil {
				w.Fail(err)
			}
		})
	}
}

// Fail stops the walk.
func (w *Walk[B]) Fail(err error) {
	first := false
	w.Executor.Do(func() {
		if first = w.failure == nil && !errors.Is(err, ErrStopped); first {
			w.failure = err
		}
	})
	if !first {
		return
	}
	if w.Failed != nil {
		w.Failed(err)
	}
	w.Executor.Stop()
}

// Failure returns the first error.
func (w *Walk[B]) Failure() (err error) {
	w.Executor.Do(func() { err = w.failure })
	return err
}

// Left returns the mini-batches in flight, in order.
func (w *Walk[B]) Left() (all []B) {
	for _, f := range w.line {
		all = append(all, f.batch)
	}
	return all
}

// at returns a mini-batch in flight; nil: it is not there yet.
func (w *Walk[B]) at(index int) *flight[B] {
	if i := index - w.passed; i < len(w.line) {
		return w.line[i]
	}
	return nil
}

// enter adds a mini-batch to those in flight.
func (w *Walk[B]) enter(b B, index int) *flight[B] {
	f := &flight[B]{batch: b, index: index, done: make([]bool, len(w.steps)),
		sets: make([]*Set[B], w.hops+1)}
	w.line = append(w.line, f)
	return f
}

// sample marks a mini-batch whose operators of sampling have all ended.
func (f *flight[B]) sample(p *program) {
	for _, s := range p.sampling {
		f.done[s.index] = true
	}
	f.sampled = true
}

// alone reports whether sampling and lookups share the device with nothing: one operator runs at a
// time, while more than one mini-batch may be under way.
func (w *Walk[B]) alone() bool { return w.Graph.Serial && w.Graph.Dynamic }

// sample runs the operators of sampling.
func (w *Walk[B]) sample() error {
	for i := w.From; i < w.To; i++ {
		if !w.Executor.Await(func() bool { return w.takeCredit(i) }) {
			return nil
		}
		b, err := w.Operators.Begin(i)
		if err != nil {
			return err
		}
		hops := w.reached
		if !w.Restored && hops[0] == 0 {
			if err := w.Operators.Reach(b, 0); err != nil {
				return err
			}
			hops = hops[1:]
		}
		var f *flight[B]
		w.Executor.Do(func() { f = w.enter(b, i) })
		if w.Restored {
			for _, h := range hops {
				if err := w.Operators.Reach(b, h); err != nil {
					return err
				}
			}
		} else if err := w.sampleHops(f, hops); err != nil {
			return err
		}
		w.Executor.Do(func() {
			f.sample(&w.program)
			w.busy = false
		})
	}
	return nil
}

// sampleHops samples a mini-batch hop by hop.
func (w *Walk[B]) sampleHops(f *flight[B], reached []int) error {
	for _, s := range w.sampling {
		if err := w.Operators.Sample(f.batch, s.op.Hop); err != nil {
			return err
		}
		if slices.Contains(reached, s.op.Hop) {
			if err := w.Operators.Reach(f.batch, s.op.Hop); err != nil {
				return err
			}
		}
		if s.op.Hop < w.hops { // the last one ends all of sampling
			w.Executor.Do(func() { f.done[s.index] = true })
		}
	}
	return nil
}

// takeCredit lets a mini-batch be sampled. One operator at a time: it is sampled when the next
// lookup needs it, and only between sets of reads.
func (w *Walk[B]) takeCredit(index int) bool {
	if w.inUse >= w.Samples {
		return false
	}
	if w.alone() {
		if w.busy || w.out > 0 || index > w.looked+w.Graph.Window {
			return false
		}
		w.busy = true
	}
	w.inUse++
	return true
}

// takeTurn lets a part of a mini-batch be looked up, or one be announced. One operator at a time:
// the reads before it have ended.
func (w *Walk[B]) takeTurn(index int) bool {
	if !w.Graph.Serial {
		return true
	}
	if !w.Graph.Dynamic {
		return index == w.passed || w.at(index-1).read(&w.program)
	}
	if w.busy || w.out > 0 {
		return false
	}
	w.busy = true
	return true
}

// admit looks rows up and has the reads of their misses go out.
func (w *Walk[B]) admit() error {
	for i := w.First; i < w.End; i++ {
		if err := w.announce(i); err != nil {
			return err
		}
		for _, s := range w.admitting {
			var f *flight[B]
			if !w.Executor.Await(func() bool {
				f = w.at(i)
				return f.ready(s) && (s.op.Kind != plan.OpLookup || w.takeTurn(i))
			}) {
				return nil
			}
			var err error
			switch s.op.Kind {
			case plan.OpLookup:
				err = w.Operators.Lookup(f.batch, s.op.Hop)
			case plan.OpSubmit:
				err = w.submit(f, s)
			case plan.OpGather:
				err = w.Operators.Gather(f.batch, s.op.Hop)
			}
			if err != nil {
				return err
			}
			if s.op.Kind != plan.OpSubmit { // which is done when its set is out
				w.Executor.Do(func() { f.done[s.index] = true })
			}
		}
	}
	return nil
}

// announce tells the tiers of the mini-batches up to the window behind one that is looked up.
func (w *Walk[B]) announce(index int) error {
	if w.Graph.Window == 0 {
		return nil
	}
	for w.heard <= min(index+w.Graph.Window, w.To-1) {
		var f *flight[B]
		if !w.Executor.Await(func() bool {
			f = w.at(w.heard)
			return f != nil && f.sampled && w.takeTurn(index)
		}) {
			return ErrStopped
		}
		if err := w.Operators.Announce(f.batch); err != nil {
			return err
		}
		w.Executor.Do(func() { w.heard, w.busy = w.heard+1, false })
	}
	return nil
}

// submit adds a part to the open set of reads, and sends the set out when it is whole.
func (w *Walk[B]) submit(f *flight[B], s *step) error {
	if w.open == nil {
		w.open = &Set[B]{}
	}
	set, last := w.open, s.op.Hop == w.hops
	set.Parts = append(set.Parts, Part[B]{f.batch, s.op.Hop, last, &f.done[s.index]})
	f.sets[s.op.Hop] = set
	if last {
		set.Batches++
	}
	closes := w.Graph.Accumulate == 0 && !w.Graph.Joins || w.Operators.Closes(set)
	if closes {
		if err := w.Operators.Submit(set); err != nil {
			return err
		}
		w.open = nil
	}
	w.Executor.Do(func() {
		w.busy = false
		if last {
			w.looked = f.index + 1
		}
		if !closes {
			if w.Graph.Dynamic { // the sampler needs credits for the rest of it
				w.Samples = max(w.Samples, set.Batches+1+w.Graph.Window+w.Graph.Credits)
			}
			return
		}
		w.out += set.Batches
		for _, p := range set.Parts {
			*p.out = true
		}
	})
	return nil
}

// deliver waits for reads and brings the rows to their places. Where those of a batch need no
// credit it begins when all of its reads are out.
func (w *Walk[B]) deliver() error {
	for i := w.First; i < w.End; i++ {
		var f *flight[B]
		if !w.Graph.Dynamic && !w.Executor.Await(func() bool {
			f = w.at(i)
			return f.admitted(&w.program)
		}) {
			return nil
		}
		for _, s := range w.delivering {
			if !w.Executor.Await(func() bool {
				f = w.at(i)
				return f.ready(s) && (s.op.Kind != plan.OpGather || w.takeRows(f))
			}) {
				return nil
			}
			var err error
			if set := f.sets[s.op.Hop]; s.op.Kind == plan.OpGather {
				err = w.Operators.Gather(f.batch, s.op.Hop)
			} else if !set.completed {
				err = w.Operators.Complete(set)
				set.completed = true
			}
			if err != nil {
				return err
			}
			w.Executor.Do(func() { f.done[s.index] = true })
		}
		if err := w.Operators.Place(f.batch); err != nil {
			return err
		}
		w.Executor.Do(func() { f.whole = true })
	}
	return nil
}

// takeRows lets a mini-batch have memory for its rows, where it has none from its first sample on.
func (w *Walk[B]) takeRows(f *flight[B]) bool {
	if !w.Graph.Dynamic || f.hasRows {
		return true
	}
	if w.rows == 0 {
		return false
	}
	w.rows--
	f.hasRows = true
	return true
}

// Train trains on the mini-batches. One that is whole is handed to the device before the end of the
// one before it is waited for, so that the device does not wait for the host in between. One that
// is not whole may want what the one before it holds.
func (w *Walk[B]) Train() {
	var last func() error // ends the mini-batch before; nil: it has ended
	end := func() bool {
		if last == nil {
			return true
		}
		err := last()
		if last = nil; err != nil {
			w.Fail(err)
		}
		return err == nil
	}
	for i := w.First; i < w.End; i++ {
		if last != nil && !w.isWhole(i) && !end() {
			return
		}
		from := w.Executor.Now()
		b, ok := w.Whole(i)
		w.Operators.Waited(w.Executor.Now() - from)
		if !ok {
			break
		}
		wait, err := w.Operators.Train(b)
		if !end() { // its failure comes first
			return
		}
		if err != nil {
			w.Fail(err)
			return
		}
		if wait == nil {
			w.Release(b)
			continue
		}
		last = func() error {
			err := wait()
			if err == nil {
				w.Release(b)
			}
			return err
		}
	}
	end()
}

// isWhole reports whether the rows of a mini-batch are in place.
func (w *Walk[B]) isWhole(index int) (whole bool) {
	w.Executor.Do(func() {
		f := w.at(index)
		whole = f != nil && f.whole
	})
	return whole
}

// Whole waits until the rows of a mini-batch are in place.
func (w *Walk[B]) Whole(index int) (b B, ok bool) {
	return w.Await(index, func(_ B, whole bool) bool { return whole })
}

// Await waits until a mini-batch is under way and a condition holds, which hears whether its rows
// are in place.
func (w *Walk[B]) Await(index int, cond func(b B, whole bool) bool) (b B, ok bool) {
	ok = w.Executor.Await(func() bool {
		f := w.at(index)
		if f == nil || !cond(f.batch, f.whole) {
			return false
		}
		b = f.batch
		return true
	})
	return b, ok
}

// Passed returns the first mini-batch that is not released.
func (w *Walk[B]) Passed() int { return w.passed }

// Release ends the way of the oldest mini-batch in flight.
func (w *Walk[B]) Release(b B) {
	w.Operators.Release(b)
	w.Executor.Do(func() {
		if w.line[0].hasRows {
			w.rows++
		}
		w.line, w.passed = w.line[1:], w.passed+1
		w.inUse--
		w.out--
	})
}
