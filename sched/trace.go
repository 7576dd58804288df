package sched

import (
	"context"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/internal/timeline"
)

// The tracks of a run's timeline, from the top: one for each operator, and what bounds them.
const (
	trackRun      = "run" // presampling, filling, passes, checkpoints
	trackSample   = "sample"
	trackLookup   = "lookup"
	trackSubmit   = "submit"
	trackComplete = "complete" // the SSDs: from a read's submission to its end
	trackGather   = "gather"
	trackTrain    = "train"
	trackCredits  = "credits"
	trackReads    = "reads in flight"
)

var tracks = []string{trackRun, trackSample, trackLookup, trackSubmit, trackComplete, trackGather, trackTrain}

// hopNames are the names of sampling by hop, 1 to 8.
var hopNames = [...]string{"", "S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8"}

// tracer draws a run's operators. A nil tracer draws nothing and looks at no clock.
//
// A span of sampling, lookup or training is a call that waits for its kernels; one of submit or
// complete is what the stack measured; one of a gather is between two events on its stream, as no
// one waits for it.
type tracer struct {
	rec     *timeline.Recorder
	ref     cuda.Event // on the gather stream, happened at refAt
	refAt   time.Time
	credits atomic.Int64
	reads   atomic.Int64
}

// newTracer makes the tracer, where the run has a timeline, and each segment's events.
func (e *engine) newTracer() (err error) {
	if !e.cfg.Timeline.On() {
		return nil
	}
	e.cfg.Timeline.Tracks(tracks...)
	t := &tracer{rec: e.cfg.Timeline}
	if t.ref, err = e.dev.NewEvent(); err != nil {
		return err
	}
	e.onClose(t.ref.Close)
	for _, s := range e.slots {
		if err := e.traceSlot(s); err != nil {
			return err
		}
	}
	e.trace = t
	return nil
}

// traceSlot makes the events of a slot's segments.
func (e *engine) traceSlot(s *slot) (err error) {
	for i := range s.segs {
		for _, ev := range []*cuda.Event{&s.segs[i].gatherFrom, &s.segs[i].gatherTo} {
			if *ev, err = e.dev.NewEvent(); err != nil {
				return err
			}
			e.onClose((*ev).Close)
		}
	}
	return nil
}

func (t *tracer) now() time.Time {
	if t == nil {
		return time.Time{}
	}
	return time.Now()
}

// op draws an operator of a batch over n rows, from begin until now.
func (t *tracer) op(track, name string, begin time.Time, p *pass, batch int, n int64) {
	if t != nil {
		t.span(track, name, begin, time.Since(begin), p, batch, n)
	}
}

func (t *tracer) span(track, name string, begin time.Time, d time.Duration, p *pass, batch int, n int64) {
	if t != nil {
		t.rec.Span(track, name, t.rec.NS(begin), d.Nanoseconds(), map[string]any{"pass": p.name, "batch": batch, "rows": n})
	}
}

// run draws a part of the run that is no operator, from begin until now.
func (t *tracer) run(name string, begin time.Time) {
	if t != nil {
		t.rec.Span(trackRun, name, t.rec.NS(begin), time.Since(begin).Nanoseconds(), nil)
	}
}

// credit counts a mini-batch slot taken (1) or given back (-1).
func (t *tracer) credit(d int64) {
	if t != nil {
		t.rec.Counter(trackCredits, "in use", t.rec.NS(time.Now()), float64(t.credits.Add(d)))
	}
}

// read counts rows whose reads went out, or (negative) that have been waited for.
func (t *tracer) read(rows int64) {
	if t != nil {
		t.rec.Counter(trackReads, "rows", t.rec.NS(time.Now()), float64(t.reads.Add(rows)))
	}
}

// beginPass ties the gather stream's events to the wall clock. The stream is idle.
func (e *engine) beginPass(ctx context.Context) error {
	if e.trace == nil {
		return nil
	}
	op, cancel := e.opCtx(ctx)
	defer cancel()
	if err := e.gatherS.Record(e.trace.ref); err != nil {
		return err
	}
	err := e.trace.ref.Synchronize(op)
	e.trace.refAt = time.Now()
	return err
}

// mark records one of a segment's events.
func (e *engine) mark(ev cuda.Event) error {
	if e.trace == nil {
		return nil
	}
	return e.gatherS.Record(ev)
}

// drawGathers draws the gathers of a batch once they are done.
func (e *engine) drawGathers(p *pass, s *slot) error {
	if e.trace == nil {
		return nil
	}
	for i := range s.segs[:s.used] {
		g := &s.segs[i]
		moved := g.ngpu + g.ncpu
		if e.cfg.dynamic() { // what was read goes on from its staging
			moved = g.count
		}
		if moved == 0 {
			continue
		}
		from, err := g.gatherFrom.Since(e.trace.ref)
		if err != nil {
			return err
		}
		took, err := g.gatherTo.Since(g.gatherFrom)
		if err != nil {
			return err
		}
		e.trace.span(trackGather, "G", e.trace.refAt.Add(from), took, p, s.index, moved)
	}
	return nil
}
