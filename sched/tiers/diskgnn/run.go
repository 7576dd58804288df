// Package diskgnn samples all mini-batches before training and packs their rows on disk, so that
// each mini-batch reads a few long runs of pages: mode diskgnn (Liu et al., 2024).
package diskgnn

import (
	"context"
	"errors"
	"math"
	"sync/atomic"
	"time"

	"helios/cache"
	"helios/cache/packed"
	"helios/cuda"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// Run is the system on an engine.
var Run = engine.System{New: New,
	Prepares: true}

// The tiers of DiskGNN (Liu et al., 2024). Mini-batches were laid out beforehand, so training knows
// where the rows of each are: the hottest of the sample epochs are in the GPU and the CPU tier, all
// others in pages of the segment's disk cache and of the mini-batch's own chunk. Nothing is looked
// up. A mini-batch's pages are read into a staging buffer of its slot, and two gathers bring its
// rows together.
//
// Evaluation samples afresh, and its mini-batches are not laid out: it finds the hot rows in the
// same tiers by their index, and reads the others from where the features are, as static tiers do.
// The I/O stack turns from pages to rows and back between passes.

// laidOut is a pack on its way through training: sample epochs whose mini-batches lie in pages.
type laidOut struct {
	shape packed.Shape
	hot   []int64 // the rows that stay in memory, the hottest first
	most  int64   // pages that a mini-batch reads at most
	pages *engine.PageStore
	// batch sets b to the places of a mini-batch's rows, and uses b's memory again.
	batch   func(i int, b *packed.Batch) error
	samples engine.KeptSamples
}

// Tiers are the tiers of a mode whose mini-batches are laid out beforehand.
type Tiers struct {
	static.Tiers // of evaluation; its hetero is ranked's
	ranked       *cache.Ranked
	packs        *packFolder
	now          *laidOut // whose hot rows the tiers hold
	first        int      // of its mini-batches, the present pass's first
	blocks       graph.Stage
	restored     atomic.Int64 // ns, in which mini-batches were read
}

// slot has what a slot needs for mini-batches that were laid out.
type slot struct {
	batch    packed.Batch
	assembly cache.Assembly
	staging  cuda.Buffer // of pages
}

// New makes the tiers of an engine.
func New(e *engine.Engine) (engine.Tiers, error) {
	t := &Tiers{Tiers: static.Tiers{Base: engine.Base{Engine: e}}}
	e.OnClose(t.closePacks) // first, so that it comes last
	return t, nil
}

// Fixed implements Tiers: mini-batches count on so many rows in memory.
func (t *Tiers) Fixed() bool { return true }

// Pages implements engine.Tiers.
func (t *Tiers) Pages() string { return "pages of packed mini-batches" }

// HasEpoch implements Tiers.
func (t *Tiers) HasEpoch(epoch int) error {
	if c := &t.Engine.Config; epoch >= c.Epochs {
		return errs.New(errs.Usage,
			"epoch %d: %v %s lays mini-batches out beforehand, of %d epochs; give a larger %v",
			epoch, errs.Key("mode"), c.Mode, c.Epochs, errs.Key("epochs"))
	}
	return nil
}

// Beside returns the time of reading kept mini-batches in place of sampling them.
func (t *Tiers) Beside() report.StageSeconds {
	return report.StageSeconds{Sample: time.Duration(t.restored.Load()).Seconds()}
}

// Layout implements engine.Tiers.
func (t *Tiers) Layout() gpuio.Layout { return t.Engine.Store.ReadLayout() }

// Place opens the packs, which are made where they are not there yet, and fills the tiers with the
// hot rows of the first.
func (t *Tiers) Place(ctx context.Context) (err error) {
	e := t.Engine
	if e.Sizes.GPURows+e.Sizes.CPURows >= math.MaxInt32 {
		return engine.Untiered(errs.New(errs.Usage,
			"%v %s keeps below 2^31 rows in memory, and the tiers have room for %d; lower %v or %v",
			errs.Key("mode"), e.Config.Mode, e.Sizes.GPURows+e.Sizes.CPURows,
			errs.Key("gpu-cache"), errs.Key("cpu-cache")))
	}
	if t.packs == nil {
		if t.packs, err = openPacks(e); err != nil {
			return engine.Untiered(err)
		}
	}
	pack := t.now
	if pack == nil {
		if pack, _, err = t.packs.find(ctx, 0); err != nil {
			return engine.Untiered(err)
		}
	}
	return t.hold(ctx, pack)
}

// hold fills the tiers with a pack's hot rows.
func (t *Tiers) hold(ctx context.Context, pack *laidOut) (err error) {
	e := t.Engine
	// The stack comes first: the tiers get what it leaves of the device's memory.
	if err := e.Store.TurnTo(ctx, nil); err != nil {
		return engine.Untiered(err)
	}
	hot := int64(len(pack.hot))
	gpu := min(e.Sizes.GPURows, hot)
	if e.Sizes.GPURows+e.Sizes.CPURows < hot {
		return engine.Untiered(errs.New(errs.Usage,
			"the mini-batches were laid out for %d rows (%s) in memory, and %v and %v have room for %d: give both more, or prepare anew with these in another folder (%v)",
			hot, units.FormatBytes(hot*e.RowBytes), errs.Key("gpu-cache"), errs.Key("cpu-cache"),
			e.Sizes.GPURows+e.Sizes.CPURows, errs.Key("packed")))
	}
	e.Sizes = plan.TierSizes{GPURows: gpu, CPURows: hot - gpu}
	t.now = pack
	t.ranked, err = cache.NewRanked(e.Device, e.Rows, e.RowBytes, len(e.Store.SSDs), pack.hot, gpu)
	if err != nil {
		return err
	}
	t.Hetero = t.ranked.Hetero
	e.Placement = t.Hetero.Placement()
	return t.Fill(ctx)
}

// Close frees the tiers and the buffers of mini-batches. The packs stay open for the next place.
func (t *Tiers) Close() error {
	e := t.Engine
	var all []error
	for _, s := range e.Slots {
		o, ok := s.Part.(*slot)
		if s.Part = nil; !ok {
			continue
		}
		if b := o.staging; b != nil {
			if e.Store.Reader != nil {
				all = append(all, gpuio.Forget(e.Store.Reader, b))
			}
			all = append(all, b.Free())
		}
		all = append(all, o.assembly.Close())
	}
	t.ranked = nil
	all = append(all, t.blocks.Close())
	return errors.Join(append(all, t.Tiers.Close())...)
}

// closePacks is close for the end of the run.
func (t *Tiers) closePacks() error {
	if t.packs == nil {
		return nil
	}
	p := t.packs
	t.packs, t.now = nil, nil
	return p.close()
}

// Prepare turns the I/O stack to what a pass reads: a training epoch its sample epoch's pages, an
// evaluation rows. Packs of later sample epochs have other hot rows.
func (t *Tiers) Prepare(ctx context.Context, p *engine.Pass, end int) (int, error) {
	e := t.Engine
	if p.First >= end { // a pass that an earlier run has finished
		return end, nil
	}
	if !p.Training {
		if e.Sizes.GPURows+e.Sizes.CPURows == e.Rows { // all is there
			return end, nil
		}
		return end, e.Store.TurnTo(ctx, nil)
	}
	pack, first, err := t.packs.find(ctx, p.Number)
	if err != nil {
		return end, err
	}
	if pack != t.now {
		t.now = nil // of which nothing is held once close has begun
		if err := t.Close(); err != nil {
			return end, err
		}
		if err := t.hold(ctx, pack); err != nil {
			return end, err
		}
	}
	t.first = first
	p.Sampled = &engine.KeptPass{Engine: e, Pass: p, From: pack.samples, Base: first,
		Stage: &t.blocks,
		Took:  &t.restored}
	if err := t.packs.ahead(ctx, p.Number); err != nil {
		return end, err
	}
	if pack.pages.Layout.Rows == 0 { // memory holds all
		return end, nil
	}
	return end, e.Store.TurnTo(ctx, pack.pages)
}

// Begin makes the stages of a walk.
func (t *Tiers) Begin(w *engine.Walk) engine.Stages {
	if !w.Pass.Training {
		return t.Tiers.Begin(w)
	}
	return &stages{t, engine.SlotStages{Walk: w}}
}

// BatchBytes implements engine.Tiers.
func (t *Tiers) BatchBytes(int64) (bytes, samples int64) {
	if t.now != nil {
		bytes = int64(t.Engine.Plan.Credits) * t.now.most * t.now.shape.PageBytes
	}
	return bytes, int64(t.Engine.Plan.Credits)
}

// Describe implements engine.Tiers.
func (t *Tiers) Describe(r *report.RunInfo) {
	if t.packs == nil {
		return
	}
	r.Packed = t.packs.describe()
}
