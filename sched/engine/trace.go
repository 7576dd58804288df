package engine

import (
	"context"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/internal/timeline"
	"helios/sched/plan"
	"helios/sched/report"
)

// Tracer draws a run's operators. A nil tracer draws nothing and looks at no clock.
//
// A span of sampling, lookup or training is a call that waits for its kernels; one of submit or
// complete is what the stack measured; one of a gather is between two events on its stream, as no
// one waits for it.
type Tracer struct {
	rec     *timeline.Recorder
	ref     cuda.Event // on the gather stream, happened at refAt
	refAt   time.Time
	credits atomic.Int64
	reads   atomic.Int64
}

// newTracer makes the tracer, where the run has a timeline, and each segment's events.
func (e *Engine) newTracer() (err error) {
	if !e.Config.Timeline.On() {
		return nil
	}
	e.Config.Timeline.Tracks(report.Tracks...)
	t := &Tracer{rec: e.Config.Timeline}
	if t.ref, err = e.Device.NewTimer(); err != nil {
		return err
	}
	e.OnClose(t.ref.Close)
	for _, s := range e.Slots {
		if err := e.traceSlot(s); err != nil {
			return err
		}
	}
	e.Trace = t
	return nil
}

// traceSlot makes the events of a slot's segments.
func (e *Engine) traceSlot(s *Slot) (err error) {
	for i := range s.Segments {
		for _, ev := range []*cuda.Event{&s.Segments[i].GatherFrom, &s.Segments[i].GatherTo} {
			if *ev, err = e.Device.NewTimer(); err != nil {
				return err
			}
			e.OnClose((*ev).Close)
		}
	}
	return nil
}

// Now returns the time, or none where nothing is drawn.
func (t *Tracer) Now() time.Time {
	if t == nil {
		return time.Time{}
	}
	return time.Now()
}

// Op draws an operator of a batch over n rows, from begin until now.
func (t *Tracer) Op(track, name string, begin time.Time, p *Pass, batch int, n int64) {
	if t != nil {
		t.span(track, name, begin, time.Since(begin), p, batch, n)
	}
}

func (t *Tracer) span(track, name string, begin time.Time, d time.Duration, p *Pass, batch int,
	n int64) {
	if t != nil {
		t.rec.Span(track, name, t.rec.NS(begin), d.Nanoseconds(), map[string]any{"pass": p.Name,
			"batch": batch, "rows": n})
	}
}

// Set draws an operator of a set of reads for so many batches, the first of which is named.
func (t *Tracer) Set(track, name string, begin time.Time, d time.Duration, p *Pass, batch,
	batches int, n int64) {
	if t != nil {
		t.rec.Span(track, name, t.rec.NS(begin), d.Nanoseconds(), report.SetArgs(p.Name, batch,
			batches, n))
	}
}

// Run draws a part of the run that is no operator, from begin until now.
func (t *Tracer) Run(name string, begin time.Time) { t.Beside(report.TrackRun, name, begin) }

// Beside draws something that is of no batch, from begin until now.
func (t *Tracer) Beside(track, name string, begin time.Time) {
	if t != nil {
		t.rec.Span(track, name, t.rec.NS(begin), time.Since(begin).Nanoseconds(), nil)
	}
}

// credit counts a mini-batch slot taken (1) or given back (-1).
func (t *Tracer) credit(d int64) {
	if t != nil {
		t.rec.Counter(report.TrackCredits, "in use", t.rec.NS(time.Now()),
			float64(t.credits.Add(d)))
	}
}

// Read counts rows whose reads went out, or (negative) that have been waited for.
func (t *Tracer) Read(rows int64) {
	if t != nil {
		t.rec.Counter(report.TrackReads, "rows", t.rec.NS(time.Now()), float64(t.reads.Add(rows)))
	}
}

// beginPass ties the gather stream's events to the wall clock. The stream is idle.
func (t *Tracer) beginPass(ctx context.Context, e *Engine) error {
	if t == nil {
		return nil
	}
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	if err := e.GatherStream.Record(t.ref); err != nil {
		return err
	}
	err := t.ref.Synchronize(op)
	t.refAt = time.Now()
	return err
}

// Mark records one of a segment's events.
func (t *Tracer) Mark(st cuda.Stream, ev cuda.Event) error {
	if t == nil {
		return nil
	}
	return st.Record(ev)
}

// Gathers draws the gathers of a batch once they are done.
func (t *Tracer) Gathers(p *Pass, s *Slot) error {
	if t == nil {
		return nil
	}
	for i := range s.Segments[:s.Used] {
		g := &s.Segments[i]
		if g.Moved == 0 {
			continue
		}
		from, err := g.GatherFrom.Since(t.ref)
		if err != nil {
			return err
		}
		took, err := g.GatherTo.Since(g.GatherFrom)
		if err != nil {
			return err
		}
		t.span(report.TrackGather, plan.OperatorName("G", g.Hop), t.refAt.Add(from), took, p,
			s.Index, g.Moved)
	}
	return nil
}
