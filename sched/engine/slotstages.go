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
func (a *SlotStages) Closes(*Set) bool { return true }

// spanOf returns the first mini-batch of a set and how many there are, and names them.
func spanOf(set *Set) (first, n int, name string) {
	first = set.Parts[0].Batch.Index
	last := set.Newest().Batch.Index
	if first == last {
		return first, 1, fmt.Sprintf("batch %d", first)
	}
	return first, last - first + 1, fmt.Sprintf("batches %d to %d", first, last)
}

// Submit sends out the reads that the lookups of a set's parts ask for.
func (a *SlotStages) Submit(ctx context.Context, set *Set) (err error) {
	e := a.Walk.Engine
	var asking []*Segment
	for _, p := range set.Parts {
		if g := WorkOf(p).Segment; g != nil && g.Asked != 0 {
			asking = append(asking, g)
		}
	}
	if len(asking) == 0 {
		return nil
	}
	g := asking[0]
	_, _, name := spanOf(set)
	if err := e.merge(asking); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if e.Store.Reader == nil {
		return fmt.Errorf("%s: %d rows or pages are in no tier and no SSD is open", name, g.Asked)
	}
	rd, end := e.ReadContext(ctx)
	defer end()
	g.submitted = time.Now()
	if g.pending, err = e.Store.Reader.Submit(rd, g.asks); err != nil {
		return fmt.Errorf("%s: %w", name, ReadError(err))
	}
	g.asks = nil
	e.Trace.Read(g.Asked)
	return nil
}

// Complete waits for the reads of a set.
func (a *SlotStages) Complete(ctx context.Context, set *Set) error {
	e, p := a.Walk.Engine, a.Walk.Pass
	rows := int64(0)
	var g *Segment // that asked for the reads of all
	var s *Slot
	for _, p := range set.Parts {
		x := WorkOf(p).Segment
		if x == nil {
			continue
		}
		if rows += x.RowsSSD; x.pending != nil {
			g, s = x, p.Batch
		}
	}
	if g == nil {
		return nil
	}
	first, n, name := spanOf(set)
	rd, end := e.ReadContext(ctx)
	defer end()
	if !s.waited {
		s.waited = true
		a.waitOnce(rd, s)
	}
	st, err := g.pending.Wait(rd)
	if err != nil && rd.Err() != nil {
		return errs.New(errs.Device, "%s: %d reads did not end within %v: %w", name, g.Asked,
			e.Config.OpTimeout, err)
	}
	g.pending = nil
	e.Trace.Read(-g.Asked)
	if err != nil {
		return fmt.Errorf("%s: %w", name, ReadError(err))
	}
	if st.Rows != g.Asked {
		return errs.New(errs.Device, "%s: %d rows or pages were asked for, %d were read", name,
			g.Asked, st.Rows)
	}
	g.Stats = st
	g.share(set, rows)
	p.Clock.Read(g.submitted, st)
	if n > 1 {
		p.Clock.Group(n)
	}
	e.Trace.Set(report.TrackSubmit, plan.OperatorName("I", g.Hop), g.submitted, st.Submit, p,
		first, n, rows)
	e.Trace.Set(report.TrackComplete, plan.OperatorName("C", g.Hop), g.submitted.Add(st.Submit),
		st.Complete, p, first, n, rows)
	return nil
}

// share gives the segments of a set their shares, by rows, of what g has read for all of them.
func (g *Segment) share(set *Set, rows int64) {
	all := g.Stats
	for _, p := range set.Parts {
		x := WorkOf(p).Segment
		if x == nil || x == g || x.RowsSSD == 0 {
			continue
		}
		for _, n := range []struct{ all, from, to *int64 }{
			{&all.Commands, &g.Stats.Commands, &x.Stats.Commands},
			{&all.Bytes, &g.Stats.Bytes, &x.Stats.Bytes},
			{&all.Retries, &g.Stats.Retries, &x.Stats.Retries},
			{&all.Timeouts, &g.Stats.Timeouts, &x.Stats.Timeouts}} {
			*n.to = *n.all * x.RowsSSD / rows
			*n.from -= *n.to
		}
	}
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
