package engine

import (
	"context"
	"fmt"
	"time"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/sched/plan"
	"helios/sched/report"
)

// SlotStages is the part of stages that tiers have in common whose reads go straight into the slot
// of a batch, which has its feature tensor from its first sample on.
type SlotStages struct{ Walk *Walk }

// Room grows the feature tensor for the rows of the next part. The reads of earlier hops are in
// flight: what is behind the tensor grows, and it stays where it is.
func (a *SlotStages) Room(s *Slot, rows int64) error {
	e := a.Walk.Engine
	if err := e.Fits(s.Index, rows, s.Features.Size()); err != nil {
		return err
	}
	if err := s.Features.Grow(rows * e.RowBytes); err != nil {
		return fmt.Errorf("batch %d: features of %d rows: %w", s.Index, rows, err)
	}
	return nil
}

// Announce implements Stages.
func (a *SlotStages) Announce(context.Context, *Work) error { return nil }

// Closes implements Stages: each part is read by itself.
func (a *SlotStages) Closes(*Slot) bool { return true }

// Submit sends out the reads of a part that its lookup asks for.
func (a *SlotStages) Submit(ctx context.Context, set *Set) (err error) {
	e, w := a.Walk.Engine, WorkOf(set.Parts[0])
	g, s := w.Segment, w.Slot
	if g == nil || g.Asked == 0 {
		return nil
	}
	if e.Store.Reader == nil {
		return fmt.Errorf("batch %d: %d rows or pages are in no tier and no SSD is open", s.Index,
			g.Asked)
	}
	rd, end := e.ReadContext(ctx)
	defer end()
	g.submitted = time.Now()
	if g.pending, err = e.Store.Reader.Submit(rd, g.asks); err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, ReadError(err))
	}
	g.asks = nil
	e.Trace.Read(g.Asked)
	return nil
}

// Complete waits for the reads of a part.
func (a *SlotStages) Complete(ctx context.Context, set *Set) error {
	e, p, w := a.Walk.Engine, a.Walk.Pass, WorkOf(set.Parts[0])
	g, s := w.Segment, w.Slot
	if g == nil || g.pending == nil {
		return nil
	}
	rd, end := e.ReadContext(ctx)
	defer end()
	if !s.waited {
		s.waited = true
		a.waitOnce(rd, s)
	}
	st, err := g.pending.Wait(rd)
	if err != nil && rd.Err() != nil {
		return errs.New(errs.Device, "batch %d: %d reads did not end within %v: %w",
			s.Index, g.Asked, e.Config.OpTimeout, err)
	}
	g.pending = nil
	e.Trace.Read(-g.Asked)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, ReadError(err))
	}
	if st.Rows != g.Asked {
		return errs.New(errs.Device, "batch %d: %d rows or pages were asked for, %d were read",
			s.Index, g.Asked, st.Rows)
	}
	g.Stats = st
	p.Clock.Read(g.submitted, st)
	e.Trace.span(report.TrackSubmit, plan.OperatorName("I", g.Hop), g.submitted, st.Submit, p,
		s.Index, g.RowsSSD)
	e.Trace.span(report.TrackComplete, plan.OperatorName("C", g.Hop), g.submitted.Add(st.Submit),
		st.Complete, p, s.Index, g.RowsSSD)
	return nil
}

// waitOnce waits once for all reads of a batch, which are out, and for its gathers where those do
// not wait for reads.
func (a *SlotStages) waitOnce(rd context.Context, s *Slot) {
	var sets []gpuio.Pending
	for i := range s.Segments[:s.Used] {
		if p := s.Segments[i].pending; p != nil {
			sets = append(sets, p)
		}
	}
	if s.gathered {
		s.placed = gpuio.WaitOnce(rd, s.Ready, sets)
	} else {
		gpuio.WaitOnce(rd, nil, sets)
	}
}

// Change implements Stages.
func (a *SlotStages) Change(*Slot) error { return nil }

// Placed implements Stages.
func (a *SlotStages) Placed(*Slot) error { return nil }

// Release implements Stages.
func (a *SlotStages) Release(*Slot) {}
