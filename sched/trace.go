package sched

import (
	"context"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/internal/timeline"
	"helios/sched/plan"
	"helios/sched/report"
)

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
	if !e.Config.Timeline.On() {
		return nil
	}
	e.Config.Timeline.Tracks(report.Tracks...)
	t := &tracer{rec: e.Config.Timeline}
	if t.ref, err = e.Device.NewEvent(); err != nil {
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
			if *ev, err = e.Device.NewEvent(); err != nil {
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

func (t *tracer) span(track, name string, begin time.Time, d time.Duration, p *pass, batch int,
	n int64) {
	if t != nil {
		t.rec.Span(track, name, t.rec.NS(begin), d.Nanoseconds(), map[string]any{"pass": p.name,
			"batch": batch, "rows": n})
	}
}

// set draws an operator of a set of reads for so many batches, the first of which is named.
func (t *tracer) set(track, name string, begin time.Time, d time.Duration, p *pass, batch,
	batches int, n int64) {
	if t != nil {
		t.rec.Span(track, name, t.rec.NS(begin), d.Nanoseconds(), report.SetArgs(p.name, batch,
			batches, n))
	}
}

// run draws a part of the run that is no operator, from begin until now.
func (t *tracer) run(name string, begin time.Time) { t.beside(report.TrackRun, name, begin) }

// beside draws something that is of no batch, from begin until now.
func (t *tracer) beside(track, name string, begin time.Time) {
	if t != nil {
		t.rec.Span(track, name, t.rec.NS(begin), time.Since(begin).Nanoseconds(), nil)
	}
}

// credit counts a mini-batch slot taken (1) or given back (-1).
func (t *tracer) credit(d int64) {
	if t != nil {
		t.rec.Counter(report.TrackCredits, "in use", t.rec.NS(time.Now()),
			float64(t.credits.Add(d)))
	}
}

// read counts rows whose reads went out, or (negative) that have been waited for.
func (t *tracer) read(rows int64) {
	if t != nil {
		t.rec.Counter(report.TrackReads, "rows", t.rec.NS(time.Now()), float64(t.reads.Add(rows)))
	}
}

// beginPass ties the gather stream's events to the wall clock. The stream is idle.
func (t *tracer) beginPass(ctx context.Context, e *engine) error {
	if t == nil {
		return nil
	}
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	if err := e.gatherS.Record(t.ref); err != nil {
		return err
	}
	err := t.ref.Synchronize(op)
	t.refAt = time.Now()
	return err
}

// mark records one of a segment's events.
func (t *tracer) mark(st cuda.Stream, ev cuda.Event) error {
	if t == nil {
		return nil
	}
	return st.Record(ev)
}

// gathers draws the gathers of a batch once they are done.
func (t *tracer) gathers(p *pass, s *slot) error {
	if t == nil {
		return nil
	}
	for i := range s.segs[:s.used] {
		g := &s.segs[i]
		if g.moved == 0 {
			continue
		}
		from, err := g.gatherFrom.Since(t.ref)
		if err != nil {
			return err
		}
		took, err := g.gatherTo.Since(g.gatherFrom)
		if err != nil {
			return err
		}
		t.span(report.TrackGather, plan.OperatorName("G", g.hop), t.refAt.Add(from), took, p,
			s.index, g.moved)
	}
	return nil
}
