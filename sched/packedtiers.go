package sched

import (
	"context"
	"errors"
	"math"
	"sync/atomic"
	"time"

	"helios/cache"
	"helios/cache/packed"
	"helios/cache/trace"
	"helios/cuda"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/report"
)

// Tiers of mini-batches that were laid out beforehand, as those of DiskGNN (Liu et al., 2024).
// Training knows for each mini-batch where its rows are: the hottest of the sample epochs are in
// the GPU and the CPU tier, all others in pages of the segment's disk cache and of the mini-batch's
// own chunk. Nothing is looked up. A mini-batch's pages are read into a staging buffer of its slot,
// and two gathers bring its rows together.
//
// Evaluation samples afresh, and its mini-batches are not laid out: it finds the hot rows in the
// same tiers by their index, and reads the others from where the features are, as static tiers do.
// The I/O stack turns from pages to rows and back between passes.

// laidOut is a pack on its way through training: sample epochs whose mini-batches lie in pages.
type laidOut struct {
	shape packed.Shape
	hot   []int64 // the rows that stay in memory, the hottest first
	most  int64   // pages that a mini-batch reads at most
	pages *pageStore
	// batch gives where the rows of a mini-batch are; b's memory is used again.
	batch   func(i int, b *packed.Batch) error
	samples keptSamples
}

// packSource has the packs of a run.
type packSource interface {
	// find gives the pack that an epoch of training is in, and the place of the epoch's first
	// mini-batch in it. What is not there yet it makes. The pack stays until ahead is called
	// after a find of another.
	find(ctx context.Context, epoch int) (pack *laidOut, first int, err error)
	// ahead says that an epoch is about to train, with nothing else of a pack in use.
	ahead(ctx context.Context, epoch int) error
	describe(r *report.PackedInfo)
	close() error
}

// packedTiers are the tiers of a mode whose mini-batches are laid out beforehand.
type packedTiers struct {
	staticTiers // of evaluation; its hetero is ranked's
	ranked      *cache.Ranked
	packs       packSource
	now         *laidOut // whose hot rows the tiers hold
	first       int      // of its mini-batches, the present pass's first
	blocks      graph.Stage
	restored    atomic.Int64 // ns, in which mini-batches were read
}

// packedPart is of a segment over packed tiers: a whole mini-batch.
type packedPart struct {
	pages int64 // to be read; 0: rows are
	chunk int64 // rows that only this mini-batch's chunk has
}

// packedSlot is of a slot over packed tiers.
type packedSlot struct {
	at       packed.Batch
	assembly *cache.Assembly // nil until the first mini-batch
	staging  cuda.Buffer     // of pages
}

func newPackedTiers(e *engine) *packedTiers {
	t := &packedTiers{staticTiers: staticTiers{e: e}}
	e.onClose(t.closePacks) // first, so that it comes last
	return t
}

// beside is the time in which kept mini-batches were read in place of sampling.
func (t *packedTiers) beside() report.StageSeconds {
	return report.StageSeconds{Sample: time.Duration(t.restored.Load()).Seconds()}
}

func (t *packedTiers) layout() gpuio.Layout {
	if p := t.e.store.pages; p != nil {
		return p.layout
	}
	return t.e.store.layout
}

// place opens the packs, which are made where they are not there yet, and fills the tiers with the
// hot rows of the first.
func (t *packedTiers) place(ctx context.Context) (err error) {
	e := t.e
	if e.tiers.GPURows+e.tiers.CPURows >= math.MaxInt32 {
		return untiered{errs.New(errs.Usage,
			"%v %s keeps below 2^31 rows in memory, and the tiers have room for %d; lower %v or %v",
			errs.Key("mode"), e.Config.Mode, e.tiers.GPURows+e.tiers.CPURows,
			errs.Key("gpu-cache"), errs.Key("cpu-cache"))}
	}
	if t.packs == nil {
		if t.packs, err = openPacks(e); err != nil {
			return untiered{err}
		}
	}
	pack := t.now
	if pack == nil {
		if pack, _, err = t.packs.find(ctx, 0); err != nil {
			return untiered{err}
		}
	}
	return t.hold(ctx, pack)
}

// hold fills the tiers with a pack's hot rows.
func (t *packedTiers) hold(ctx context.Context, pack *laidOut) (err error) {
	e := t.e
	// The stack comes first: the tiers get what it leaves of the device's memory.
	if err := e.store.turnTo(ctx, nil); err != nil {
		return untiered{err}
	}
	hot := int64(len(pack.hot))
	gpu := min(e.tiers.GPURows, hot)
	if e.tiers.GPURows+e.tiers.CPURows < hot {
		return untiered{errs.New(errs.Usage,
			"the mini-batches were laid out for %d rows (%s) in memory, and %v and %v have room for %d: give both more, or prepare anew with these in another folder (%v)",
			hot, units.FormatBytes(hot*e.RowBytes), errs.Key("gpu-cache"), errs.Key("cpu-cache"),
			e.tiers.GPURows+e.tiers.CPURows, errs.Key("packed"))}
	}
	e.tiers = plan.TierSizes{GPURows: gpu, CPURows: hot - gpu}
	t.now = pack
	t.ranked, err = cache.NewRanked(e.Device, e.Rows, e.RowBytes, len(e.store.ssds), pack.hot, gpu)
	if err != nil {
		return err
	}
	t.hetero = t.ranked.Hetero
	e.placement = t.hetero.Placement()
	return t.fill(ctx)
}

// close frees the tiers and what mini-batches come together in. The packs stay open for the next
// place.
func (t *packedTiers) close() error {
	e := t.e
	var all []error
	for _, s := range e.slots {
		if b := s.staging; b != nil {
			if e.store.reader != nil {
				all = append(all, gpuio.Forget(e.store.reader, b))
			}
			all = append(all, b.Free())
			s.staging = nil
		}
		if s.assembly != nil {
			all = append(all, s.assembly.Close())
			s.assembly = nil
		}
	}
	t.ranked = nil
	all = append(all, t.blocks.Close())
	return errors.Join(append(all, t.staticTiers.close())...)
}

// closePacks is close for the end of the run.
func (t *packedTiers) closePacks() error {
	if t.packs == nil {
		return nil
	}
	p := t.packs
	t.packs, t.now = nil, nil
	return p.close()
}

// prepare turns the I/O stack to what a pass reads: a training epoch its sample epoch's pages, an
// evaluation rows. Packs of later sample epochs have other hot rows.
func (t *packedTiers) prepare(ctx context.Context, p *pass, end int) (int, error) {
	e := t.e
	if p.first >= end { // a pass that an earlier run has finished
		return end, nil
	}
	if p.kind != trace.Train {
		if e.tiers.GPURows+e.tiers.CPURows == e.Rows { // all is there
			return end, nil
		}
		return end, e.store.turnTo(ctx, nil)
	}
	pack, first, err := t.packs.find(ctx, p.number)
	if err != nil {
		return end, err
	}
	if pack != t.now {
		t.now = nil // of which nothing is held once close has begun
		if err := t.close(); err != nil {
			return end, err
		}
		if err := t.hold(ctx, pack); err != nil {
			return end, err
		}
	}
	t.first = first
	p.sampled = &keptPass{e: e, p: p, from: pack.samples, base: first, stage: &t.blocks,
		took: &t.restored}
	if err := t.packs.ahead(ctx, p.number); err != nil {
		return end, err
	}
	if pack.pages.layout.Rows == 0 { // memory holds all
		return end, nil
	}
	return end, e.store.turnTo(ctx, pack.pages)
}

// begin makes the stages of a walk.
func (t *packedTiers) begin(w *walk) stages {
	if w.p.kind != trace.Train {
		return t.staticTiers.begin(w)
	}
	a := &packedStages{t, newSlotStages(w)}
	a.findRows, a.gatherRows = a.lookup, a.gather
	return a
}

func (t *packedTiers) batchBytes(int64) (bytes, samples int64) {
	if t.now != nil {
		bytes = int64(t.e.plan.Credits) * t.now.most * t.now.shape.PageBytes
	}
	return bytes, int64(t.e.plan.Credits)
}

func (t *packedTiers) describe(r *report.RunInfo) {
	if t.packs == nil {
		return
	}
	r.Packed = &report.PackedInfo{}
	t.packs.describe(r.Packed)
}
