package sched

import (
	"context"
	"errors"
	"fmt"
	"time"

	"helios/cache"
	"helios/cache/trace"
	"helios/cuda"
	"helios/gpuio"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// staticTiers hold rows that were placed once, by their hotness: the hottest in the device's
// memory, the next in pinned memory of the CPU. Reads go straight into a batch's feature tensor,
// which it therefore has from its first sample on.
type staticTiers struct {
	e      *engine
	hetero *cache.Hetero // nil until the tiers are placed
	// firstOnHost: what is called the GPU tier is in the CPU's memory too.
	firstOnHost bool
}

func (t *staticTiers) layout() gpuio.Layout { return t.e.store.layout }

// place gives the hottest rows to the GPU tier and the next to the CPU tier, by e.tiers, and reads
// them.
func (t *staticTiers) place(ctx context.Context) (err error) {
	e := t.e
	// The stack comes first: the tiers get what it leaves of the device's memory.
	if err := e.store.open(ctx, e.store.layout); err != nil {
		return untiered{err}
	}
	if e.placement, err = e.Choose(ctx, e.tiers, e.hooks()); err != nil {
		return untiered{err}
	}
	e.tiers = plan.TierSizes{GPURows: int64(len(e.placement.GPU)),
		CPURows: int64(len(e.placement.CPU))}
	if t.hetero, err = cache.NewHetero(e.Device, e.Rows, e.RowBytes, len(e.store.ssds),
		e.placement); err != nil {
		return err
	}
	if err := t.fill(ctx); err != nil {
		return err
	}
	if e.tiers.GPURows+e.tiers.CPURows == e.Rows { // inmem, or budgets that hold everything
		return e.store.close()
	}
	return nil
}

// fill reads the rows of the tiers.
func (t *staticTiers) fill(ctx context.Context) (err error) {
	e := t.e
	for _, s := range e.slots {
		for i := range s.segs {
			if s.segs[i].buckets, err = t.hetero.NewBuckets(); err != nil {
				return err
			}
		}
	}
	start := time.Now()
	for _, f := range []struct {
		tier cache.Tier
		name string
	}{{cache.GPU, "fill gpu cache"}, {cache.CPU, "fill cpu cache"}} {
		if err := e.store.fill(ctx, t.hetero.TierRows(f.tier), t.hetero.TierBuffer(f.tier),
			f.name); err != nil {
			return err
		}
	}
	e.filled(start)
	return nil
}

// close frees the tiers and what looks rows up in them.
func (t *staticTiers) close() error {
	var all []error
	for _, s := range t.e.slots {
		for i := range s.segs {
			if b := s.segs[i].buckets; b != nil {
				all = append(all, b.Close())
				s.segs[i].buckets = nil
			}
		}
	}
	if t.hetero != nil {
		all = append(all, t.hetero.Close())
		t.hetero = nil
	}
	return errors.Join(all...)
}

// staticPart is of a segment over static tiers.
type staticPart struct {
	buckets   *cache.Buckets
	pending   gpuio.Pending // nil when nothing is in flight
	submitted time.Time
}

// staticStages are the stages of a walk over static tiers:
//
//	sample ──work──▶ look up, submit, gather ──slot──▶ complete ──slot──▶ train
type staticStages struct {
	*staticTiers
	slotStages
}

func (t *staticTiers) begin(w *walk) stages {
	a := &staticStages{t, newSlotStages(w)}
	a.findRows = a.lookup
	return a
}

// lookup runs L, I and G for a part: its rows are found in the tiers, the reads of the others go
// out, and the cached ones are gathered meanwhile.
func (a *staticStages) lookup(ctx context.Context, w work) error {
	e, p, s := a.e, a.w.p, w.s
	if !e.turn.take(ctx) {
		return nil
	}
	defer e.turn.end()
	op, cancel := e.OperatorContext(ctx)
	defer cancel()
	if w.count > 0 {
		if s.used == 0 {
			if err := e.rec.Begin(p.kind, p.number, s.index); err != nil {
				return err
			}
		}
		if err := e.rec.Part(op, e.lookupS, w.nodes, w.first, w.count); err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		g := &s.segs[s.used]
		s.used++
		b := g.buckets
		g.begin(w)
		begin := e.trace.now()
		err := a.hetero.Lookup(op, e.lookupS, w.nodes, w.first, w.count, b)
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		g.ngpu, g.ncpu, g.nmiss, g.moved = b.NGPU, b.NCPU, b.NMiss, b.NGPU+b.NCPU
		if a.firstOnHost {
			g.ngpu, g.ncpu = 0, g.moved
		}
		e.trace.op(report.TrackLookup, plan.OperatorName("L", w.hop), begin, p, s.index, w.count)
		if g.nmiss > 0 {
			if e.store.reader == nil {
				return fmt.Errorf("batch %d: %d rows are in no tier and no SSD is open", s.index,
					g.nmiss)
			}
			rd, end := e.ReadContext(ctx)
			defer end()
			g.submitted = time.Now()
			g.pending, err = e.store.reader.Submit(rd, &gpuio.ReadSet{
				Rows: b.MissRow.Ptr(), Pos: b.MissPos.Ptr(), SSDOffset: b.SSDOffset,
				Dst: s.x, DstStride: e.RowBytes, DstBytes: (w.first + w.count) * e.RowBytes,
			})
			if err != nil {
				return fmt.Errorf("batch %d: %w", s.index, readError(err))
			}
			e.trace.read(g.nmiss)
			if e.plan.Serial {
				if err := a.w.wait(rd, s, g); err != nil {
					return err
				}
			}
		}
		err = e.trace.mark(e.gatherS, g.gatherFrom)
		if err == nil {
			err = a.hetero.Gather(e.gatherS, b, s.x.Ptr(), e.RowBytes)
		}
		if err == nil {
			err = e.trace.mark(e.gatherS, g.gatherTo)
		}
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
	}
	if w.last {
		return e.gatherS.Record(s.ready)
	}
	return nil
}

// drain has nothing to do: the reads of a static tier are those of the slots.
func (t *staticTiers) drain(context.Context) error { return nil }

func (t *staticTiers) settle() error { return nil }

// Of static tiers, for results, traces and measurements:

func (t *staticTiers) lookahead() int { return 0 }

func (t *staticTiers) forget() {}

func (t *staticTiers) shuffled(train []int64, sampleEpoch int) prepare.Order {
	return t.e.Shuffled(train, sampleEpoch)
}

func (t *staticTiers) credit(x cuda.Growable) error {
	s, err := t.e.newSlot()
	if err == nil {
		s.own = x
	}
	return err
}

func (t *staticTiers) places() bool { return true }

func (t *staticTiers) gpuBytes() int64 { return int64(len(t.e.placement.GPU)) * t.e.RowBytes }

func (t *staticTiers) cpuBytes() int64 { return int64(len(t.e.placement.CPU)) * t.e.RowBytes }

func (t *staticTiers) prepare(_ context.Context, _ *pass, end int) (int, error) { return end, nil }

func (t *staticTiers) batchBytes(int64) (bytes, samples int64) { return 0, int64(t.e.plan.Credits) }

func (t *staticTiers) describe(*report.RunInfo) {}

func (t *staticTiers) record(h *trace.Header) cache.Placement {
	h.GPULines, h.RowsPerLine = t.e.tiers.GPURows, 1
	return t.e.placement
}

func (t *staticTiers) beside() report.StageSeconds { return report.StageSeconds{} }
