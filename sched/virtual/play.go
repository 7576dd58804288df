package virtual

import (
	"context"
	"errors"

	"helios/cache"
	"helios/gpuio"
	"helios/internal/rowtype"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Work is an epoch that nobody samples here: its mini-batches, with the tiers that their rows are
// in, come from a source. So a dataset of that size need not exist.
type Work struct {
	Config  plan.Config // filled
	Rows    int64
	Dim     int
	RowType rowtype.Type
	Classes int
	WideIDs bool // the topology has 8 bytes for a neighbour
	Batches int  // that are played; of mega-batches 0: all
	// PageBytes is the size of a page of packed mini-batches (Config.LaidOut), which are read in
	// the place of rows, and Pages how many there are.
	PageBytes, Pages int64
	// Parts are those of mega-batches (Config.MegaBatched), and Tiers have room for the rows of
	// their static nodes, or not. As many epochs are played as Config has, and the last one counts.
	Parts *prepare.MegaParts
	Tiers plan.TierSizes
	// Slots of a dynamic tier of such lines.
	Slots  func(l cache.Lines) int64
	Source Source
}

// Source makes up mini-batches.
type Source struct {
	// Open hears how the rows are laid out, and the lines of a dynamic tier, before all else.
	Open func(l gpuio.Layout, lines cache.Lines) error
	// Super, of planned tiers, hears that batches first to end-1 are a superbatch, and says which
	// rows are read before it, for either tier.
	Super func(first, end int) (fill [2][]int64, err error)
	// Batch gives the batches in order.
	Batch func(i int) (*Looked, error)
	// Mega gives, in the place of Batch, a batch of a mega-batch by the number of its seeds.
	Mega func(seeds int) (*Looked, error)
}

// Looked is a mini-batch that was looked up.
type Looked struct {
	Shape cost.Shape // with its parts, but for their Reads
	// Read has by part what is read: rows, lines of a dynamic tier, or pages.
	Read [][]int64
}

// Played is what a Work came to.
type Played struct {
	Epoch report.EpochResult // of the batches that were played
	Ends  []float64          // when each batch had trained, in seconds from the begin
	// SSDSeconds is how long the busiest SSD needs for its commands, LinkSeconds how long the link
	// into the GPU does for what crossed it, at their peak rates.
	SSDSeconds, LinkSeconds float64
	// CopySeconds is how long the first device's link is busy with what leaves for others that
	// train (Config.Replicas) and have memory of their own.
	CopySeconds float64
	PerSSD      []report.SSDResult
	Accumulator *report.AccumulatorInfo
	Superbatch  *report.SuperbatchInfo
	Mega        *report.MegaInfo // its counts and times are those of the epoch
	Batches     int              // of mega-batches: that an epoch has
}

// Play plays a work's mini-batches on a machine, the tiers filled. Equal arguments give equal
// results.
func Play(ctx context.Context, find Find, w Work, hw cost.Hardware) (p *Played, err error) {
	v := newRun(find, &prepare.Sampling{Config: w.Config, Rows: w.Rows, Dim: w.Dim,
		RowType: w.RowType, RowBytes: int64(w.RowType.RowBytes(w.Dim))}, hw)
	if err := v.openMachine(w.Classes, w.WideIDs); err != nil {
		return nil, err
	}
	if err := v.Tiers.OpenWork(&w); err != nil {
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
	pass.Shape = func(i int) (*cost.Shape, error) { return v.WorkShape(w, i) }
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
	info := v.info()
	p.Accumulator, p.Superbatch = info.Accumulator, info.Superbatch
	return p, nil
}

// WorkShape is a batch of a source, whose reads are planned here.
func (v *Player) WorkShape(w *Work, i int) (*cost.Shape, error) {
	b, err := w.Source.Batch(i)
	if err != nil {
		return nil, err
	}
	return v.Settle(i, b)
}

// Settle plans the reads of batch i.
func (v *Player) Settle(i int, b *Looked) (*cost.Shape, error) {
	s := &b.Shape
	if len(s.Parts) == 0 || len(b.Read) != len(s.Parts) {
		return nil, errors.New("a batch that was made up has no parts, or others than its reads")
	}
	s.Index, s.At, s.Announced = i, i, v.Config.Window > 0
	for k, rows := range b.Read {
		if len(rows) > 0 {
			s.Parts[k].Reads = v.ReadsOf(rows)
		}
	}
	v.Tiers.Looked(s, i)
	return s, nil
}
