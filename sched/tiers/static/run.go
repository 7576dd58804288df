// Package static keeps the rows that are hottest before training in memory for a whole run, as
// Helios does: the hottest on the GPU, the next in the CPU's pinned memory. Modes helios, cpu, mmap
// and inmem have such tiers, and so has every system's evaluation that has none of its own.
package static

import (
	"context"
	"errors"
	"fmt"
	"time"

	"helios/cache"
	"helios/gpuio"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/report"
)

// Run is the system on an engine. It runs every configuration.
var Run = engine.System{New: New}

// Tiers hold rows that were placed once, by their hotness: the hottest in the device's
// memory, the next in pinned memory of the CPU. Reads go straight into a batch's feature tensor,
// which it therefore has from its first sample on.
type Tiers struct {
	engine.Base
	Hetero *cache.Hetero // nil until the tiers are placed
	// FirstOnHost: what is called the GPU tier is in the CPU's memory too.
	FirstOnHost bool
	pass        *engine.Pass // of the walk
	missed      int64        // its rows of the batch before, and of this one so far, in no tier
}

// New makes the tiers of an engine.
func New(e *engine.Engine) (engine.Tiers, error) {
	return &Tiers{Base: engine.Base{Engine: e}}, nil
}

// Place gives the hottest rows to the GPU tier and the next to the CPU tier, by e.tiers, and reads
// them.
func (t *Tiers) Place(ctx context.Context) (err error) {
	e := t.Engine
	// The stack comes first: the tiers get what it leaves of the device's memory.
	if err := e.Store.Open(ctx, e.Store.Layout); err != nil {
		return engine.Untiered(err)
	}
	if e.Placement, err = e.Choose(ctx, e.Sizes, e.Hooks()); err != nil {
		return engine.Untiered(err)
	}
	e.Sizes = plan.TierSizes{GPURows: int64(len(e.Placement.GPU)),
		CPURows: int64(len(e.Placement.CPU))}
	if t.Hetero, err = cache.NewHetero(e.Device, e.Rows, e.RowBytes, len(e.Store.SSDs),
		e.Placement); err != nil {
		return err
	}
	if err := t.Fill(ctx); err != nil {
		return err
	}
	if e.Sizes.GPURows+e.Sizes.CPURows == e.Rows { // inmem, or budgets that hold everything
		return e.Store.Close()
	}
	return nil
}

// Fill reads the rows of the tiers.
func (t *Tiers) Fill(ctx context.Context) (err error) {
	e := t.Engine
	for _, s := range e.Slots {
		for i := range s.Segments {
			if s.Segments[i].Part, err = t.Hetero.NewBuckets(); err != nil {
				return err
			}
		}
	}
	start := time.Now()
	for _, f := range []struct {
		tier cache.Tier
		name string
	}{{cache.GPU, "fill gpu cache"}, {cache.CPU, "fill cpu cache"}} {
		if err := e.Store.Fill(ctx, t.Hetero.TierRows(f.tier), t.Hetero.TierBuffer(f.tier),
			f.name); err != nil {
			return err
		}
	}
	e.Filled(start)
	return nil
}

// Close frees the tiers and what looks rows up in them.
func (t *Tiers) Close() error {
	var all []error
	for _, s := range t.Engine.Slots {
		for i := range s.Segments {
			if b, ok := s.Segments[i].Part.(*cache.Buckets); ok && b != nil {
				all = append(all, b.Close())
			}
			s.Segments[i].Part = nil
		}
	}
	if t.Hetero != nil {
		all = append(all, t.Hetero.Close())
		t.Hetero = nil
	}
	return errors.Join(all...)
}

// stages are the stages of a walk over static tiers: the cached rows of a part are gathered while
// the others are read.
type stages struct {
	*Tiers
	engine.SlotStages
	joined int // mini-batches that are read as one set; 0: each hop is one
}

// Begin implements engine.Tiers.
func (t *Tiers) Begin(w *engine.Walk) engine.Stages {
	if t.pass != w.Pass { // whose walks go on where the one before ended
		t.pass, t.missed = w.Pass, 0
	}
	return &stages{Tiers: t, SlotStages: engine.SlotStages{Walk: w}}
}

// join has the last part of a batch take the place of all, where its hops are to be read together:
// false for the parts before. The misses of the batch before decide, so that the choice depends on
// no timing.
func (a *stages) join(w *engine.Work) bool {
	if !a.Engine.Plan.Joins {
		return true
	}
	if w.Hop == 0 {
		a.joined, a.missed = a.Walk.Joined(a.missed), 0
	}
	if a.joined > 0 && w.Last {
		w.First, w.Count = 0, w.First+w.Count
	}
	return a.joined == 0 || w.Last
}

// Closes implements engine.Stages.
func (a *stages) Closes(s *engine.Set) bool {
	return s.Whole(a.joined, s.Newest().Batch.Index+1 >= a.Walk.End)
}

// Lookup implements engine.Stages.
func (a *stages) Lookup(ctx context.Context, w *engine.Work) error {
	if !a.join(w) || w.Count == 0 {
		return nil
	}
	e, p, s := a.Engine, a.Walk.Pass, w.Slot
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	g := &s.Segments[s.Used]
	s.Used++
	b := g.Part.(*cache.Buckets)
	g.Begin(w)
	begin := e.Trace.Now()
	stay := a.stay(w)
	err := a.Hetero.Lookup(op, e.LookupStream, w.Nodes, w.First, w.Count-stay, b)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, err)
	}
	g.RowsGPU, g.RowsCPU, g.RowsSSD, g.Moved = b.NGPU, b.NCPU, b.NMiss, b.NGPU+b.NCPU
	a.missed += b.NMiss
	if len(a.Hetero.TierRows(cache.GPU)) > 0 {
		g.RowsGPU += stay
	} else {
		g.RowsCPU += stay
	}
	if a.FirstOnHost {
		g.RowsGPU, g.RowsCPU = 0, g.RowsGPU+g.RowsCPU
	}
	e.Trace.Op(report.TrackLookup, plan.OperatorName("L", w.Hop), begin, p, s.Index, w.Count)
	if g.RowsSSD > 0 {
		g.Ask(g.RowsSSD, &gpuio.ReadSet{
			Rows: b.MissRow.Ptr(), Pos: b.MissPos.Ptr(), SSDOffset: b.SSDOffset,
			Dst: s.Features, DstStride: e.RowBytes, DstBytes: (w.First + w.Count) * e.RowBytes,
		})
	}
	return nil
}

// stay is the number of a part's last rows that stay where they are: those of the last hop, where
// one tier has all rows, which is in the order of their numbers then.
func (a *stages) stay(w *engine.Work) int64 {
	if !w.Last || !a.Walk.Pass.InPlace {
		return 0
	}
	for _, t := range []cache.Tier{cache.GPU, cache.CPU} {
		if int64(len(a.Hetero.TierRows(t))) == a.Engine.Rows {
			w.Slot.Rows = a.Hetero.TierBuffer(t).Ptr()
			return w.First + w.Count - max(w.First, w.Slot.Batch.RowCount(w.Hop-1))
		}
	}
	return 0
}

// Gather implements engine.Stages.
func (a *stages) Gather(_ context.Context, w *engine.Work) error {
	if w.Segment == nil {
		return nil
	}
	return a.Hetero.Gather(a.Engine.GatherStream, w.Segment.Part.(*cache.Buckets),
		w.Slot.Features.Ptr(), a.Engine.RowBytes)
}
