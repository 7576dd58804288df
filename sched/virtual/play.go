package virtual

import (
	"context"

	"helios/internal/rowtype"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Work is an epoch that nobody samples here: its mini-batches are drawn, and the system looks their
// rows up in its own tiers. So a dataset of that size need not exist.
type Work struct {
	Config  plan.Config // filled
	Rows    int64
	Dim     int
	RowType rowtype.Type
	Classes int
	WideIDs bool // the topology has 8 bytes for a neighbour
	Typed   *cost.Typed
	Batches int // that are played; of mega-batches 0: all
	Tiers   plan.TierSizes
	// Own is more that the system's simulation needs.
	Own any
	// Warm is the number of mini-batches before those that are played, which fill a dynamic tier.
	Warm int
	// Draw gives the mini-batches in order, those of Warm first.
	Draw func(ctx context.Context, i int) (*Drawn, error)
	// DrawMega gives, in the place of Draw, a mini-batch of a mega-batch by the number of its
	// seeds.
	DrawMega func(seeds int) (*Drawn, error)
}

// Drawn is a mini-batch that nobody samples here: its shape, without parts, and its rows, those of
// hop 0 first, with their ranks by hotness.
type Drawn struct {
	Shape       cost.Shape
	Rows, Ranks []int64
}

// Played is the outcome of a Work.
type Played struct {
	Epoch report.EpochResult // of the batches that were played
	Ends  []float64          // when each batch had trained, in seconds from the begin
	// SSDSeconds is the time of the busiest SSD for its commands, LinkSeconds that of the link into
	// the GPU for the bytes that crossed it, at their peak rates.
	SSDSeconds, LinkSeconds float64
	// CopySeconds is the time of the first device's link for copies to others that train
	// (Config.Replicas) and have memory of their own.
	CopySeconds float64
	PerSSD      []report.SSDResult
	// Info has the figures of the run's system, and Batches the mini-batches of an epoch where the
	// system says.
	Info    report.RunInfo
	Batches int
}

// Play plays a work's mini-batches on a machine, the tiers filled. Equal arguments give equal
// results.
func Play(ctx context.Context, find Find, w Work, hw cost.Hardware) (p *Played, err error) {
	v := newRun(find, &prepare.Sampling{Config: w.Config, Rows: w.Rows, Dim: w.Dim,
		RowType: w.RowType, RowBytes: int64(w.RowType.RowBytes(w.Dim))}, hw)
	v.typed = w.Typed
	if err := v.openMachine(w.Classes, w.WideIDs); err != nil {
		return nil, err
	}
	if err := v.Tiers.OpenWork(ctx, &w); err != nil {
		return nil, err
	}
	return v.Tiers.PlayWork(ctx, &w)
}

// PlayWork implements Tiers: it plays an epoch of batches.
func (b *Base) PlayWork(ctx context.Context, w *Work) (*Played, error) {
	v := b.Player
	pass, sum := NewPass(v, "plan", w.Batches, true), report.Partial{}
	p := &Played{}
	v.Source = Part{N: w.Batches}
	pass.After = func(b *Batch) {
		Count(&sum, b)
		p.Ends = append(p.Ends, float64(v.Machine.Sim.Now()-pass.Began)/1e9)
	}
	pass.Shape = func(i int) (*cost.Shape, error) { return b.Self.Made(ctx, w, i) }
	err := b.Self.Pass(ctx, pass, &sum, true, pass.Walk)
	if err == nil {
		err = v.Conserved()
	}
	if err != nil {
		return nil, err
	}
	ingress := v.Machine.Model.Ingress
	p.Epoch = pass.Result(sum, 0, v.RowBytes)
	p.LinkSeconds = float64(ingress.Time(ingress.Bytes())) / 1e9
	p.CopySeconds = v.Machine.CopySeconds()
	p.PerSSD = v.Io().SSDs
	for i, s := range p.PerSSD {
		if s.Commands > 0 {
			p.SSDSeconds = max(p.SSDSeconds,
				float64(s.Commands)/v.Machine.Model.BoundOf(i, s.Bytes/s.Commands))
		}
	}
	p.Info = v.info()
	return p, nil
}

// Made implements Tiers.
func (b *Base) Made(ctx context.Context, w *Work, i int) (*cost.Shape, error) {
	d, err := w.Draw(ctx, i+w.Warm)
	if err != nil {
		return nil, err
	}
	return b.Player.LookUpDrawn(i, d)
}

// LookUpDrawn looks the rows of batch i up.
func (v *Player) LookUpDrawn(i int, d *Drawn) (*cost.Shape, error) {
	s := d.Shape
	s.Index, s.At, s.Announced = i, i, v.Config.Window > 0
	s.Saved = s.SavedBytes()
	if err := v.Parts(&s, func(from int64, part *cost.Part) error {
		to := from + part.Count
		v.Tiers.Find(d.Rows[from:to], d.Ranks[from:to], part)
		return nil
	}); err != nil {
		return nil, err
	}
	v.Tiers.Looked(&s, i)
	return &s, nil
}
