package virtual

import (
	"context"
	"errors"

	"helios/cache"
	"helios/gpuio"
	"helios/internal/des"
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
func Play(ctx context.Context, w Work, hw cost.Hardware) (p *Played, err error) {
	v := &run{Sampling: &prepare.Sampling{Config: w.Config, Rows: w.Rows, Dim: w.Dim,
		RowType: w.RowType, RowBytes: int64(w.RowType.RowBytes(w.Dim))},
		plan: w.Config.Schedule(), hw: hw}
	v.rec = recorder{v: v, Recording: prepare.Recording{Of: v.Sampling}}
	if err := v.openMachine(w.Classes, w.WideIDs); err != nil {
		return nil, err
	}
	of := &playing{v, &w}
	if w.Config.MegaBatched() {
		return of.megaBatches(ctx)
	}
	if err := of.open(); err != nil {
		return nil, err
	}
	pass, sum := newPass(v, "plan", w.Batches, true), report.Partial{}
	p = &Played{}
	v.src = source{n: w.Batches}
	pass.after = func(b *vbatch) {
		count(&sum, b)
		p.Ends = append(p.Ends, float64(v.m.sim.Now()-pass.start)/1e9)
	}
	pass.shape = func(i int) (*cost.Shape, error) { return of.batch(i) }
	if v.planned != nil {
		v.planned.made = of.super
		err = v.superbatches(ctx, pass, &sum)
	} else {
		pass.begin()
		err = pass.walk(ctx)
	}
	if err == nil {
		err = v.conserved()
	}
	if err != nil {
		return nil, err
	}
	ingress := v.m.m.Ingress
	p.Epoch = pass.result(sum, 0, v.RowBytes)
	p.LinkSeconds = float64(ingress.Time(ingress.Bytes())) / 1e9
	p.CopySeconds = v.m.copySeconds()
	p.PerSSD = v.io().SSDs
	for i, s := range p.PerSSD {
		if s.Commands > 0 {
			p.SSDSeconds = max(p.SSDSeconds,
				float64(s.Commands)/v.m.m.BoundOf(i, s.Bytes/s.Commands))
		}
	}
	info := v.info()
	p.Accumulator, p.Superbatch = info.Accumulator, info.Superbatch
	return p, nil
}

// playing is a work at play.
type playing struct {
	*run
	w *Work
}

// open makes the I/O stack, and what a kind of tiers needs besides.
func (p *playing) open() (err error) {
	v, w := p.run, p.w
	c := &v.Config
	switch {
	case c.Dynamic():
		if v.lines, v.layout, err = prepare.LayLines(v.layout, v.Rows, c.CacheLine); err != nil {
			return err
		}
		openDirectory(v, w.Slots(v.lines))
	case c.LaidOut():
		v.laid = &laid{rows: v.layout, now: &vpack{}}
		v.m.planned, v.paged = true, true
		v.m.gpu.egress = des.NewLink(v.m.sim, v.hw.Profile.PCIe.UVAGBs.Value*1e9, 0)
		if v.layout, err = gpuio.NewLayout(w.Pages, int(w.PageBytes), int(v.layout.SSDs),
			int(v.layout.LBABytes)); err != nil {
			return err
		}
	}
	if err := w.Source.Open(v.layout, v.lines); err != nil {
		return err
	}
	if c.Planned() {
		return v.openPlanned(plan.TierSizes{})
	}
	if err := v.openStack(); err != nil {
		return err
	}
	return v.calibrate()
}

// batch is a batch of the source, whose reads are planned here.
func (p *playing) batch(i int) (*cost.Shape, error) {
	b, err := p.w.Source.Batch(i)
	if err != nil {
		return nil, err
	}
	return p.settle(i, b)
}

// settle plans the reads of batch i.
func (p *playing) settle(i int, b *Looked) (*cost.Shape, error) {
	v, s := p.run, &b.Shape
	if len(s.Parts) == 0 || len(b.Read) != len(s.Parts) {
		return nil, errors.New("a batch that was made up has no parts, or others than its reads")
	}
	s.Index, s.At, s.Announced = i, i, v.Config.Window > 0
	off := make([]int64, v.layout.SSDs+1)
	for k, rows := range b.Read {
		if len(rows) == 0 {
			continue
		}
		striped := make([]int64, len(rows))
		stripe(rows, striped, off)
		s.Parts[k].Reads, _, _ = v.commands(striped, off)
		v.src.lines += int64(len(rows))
	}
	group(v, s, i)
	return s, nil
}

// super is makeSuper of batches of the source.
func (p *playing) super(x *vsuper) (err error) {
	v, w := p.run, p.w
	if x.fill, err = w.Source.Super(x.first, x.end); err != nil {
		return err
	}
	for i := x.first; i < x.end; i++ {
		s, err := p.batch(i)
		if err != nil {
			return err
		}
		x.shapes = append(x.shapes, s)
	}
	v.planned.info.Superbatches++
	v.planned.info.Batches = max(v.planned.info.Batches, x.end-x.first)
	return nil
}
