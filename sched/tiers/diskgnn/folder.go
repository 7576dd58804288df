package diskgnn

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"helios/cache/packed"
	"helios/dataset/pages"
	"helios/dataset/stripe"
	"helios/sched/engine"
	"helios/sched/packs"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/tiers/diskgnn/spec"
)

// packFolder has the packs of a run, from a folder (package packs).
type packFolder struct {
	e    *engine.Engine
	run  *packs.Run
	open map[*packs.Pack]*openPack
	info spec.PackedInfo
}

type openPack struct {
	laidOut
	opened *pages.Opened
}

func openPacks(e *engine.Engine) (packSource, error) {
	c := e.Config
	dir, err := filepath.Abs(c.PackedFolder(e.In.Dataset.Dir()))
	if err != nil {
		return nil, err
	}
	p := &packFolder{e: e, open: map[*packs.Pack]*openPack{}}
	budget := c.DiskBudget.Of(e.Rows * e.RowBytes)
	p.info = spec.PackedInfo{Dir: dir, PagesOn: c.PagesOn, Reused: true, Budget: budget}
	o := packs.Options{Dir: dir, Budget: budget, Segment: c.Segment,
		Hot: e.Sizes.GPURows + e.Sizes.CPURows, Source: p.source,
		Pages: pages.InFolder{Options: pages.OpenOptions{PollDoorbells: e.OnGPU()}}}
	if c.PagesOn == plan.PagesSSDs {
		o.Pages = stripe.PagePlace{Dataset: e.In.Dataset, SSDs: e.Store.SSDs}
		for _, s := range e.Store.SSDs {
			if s.Ctrl.MaxQueuePairs() < engine.PagePairs {
				o.Source, o.InTurn = nil, true
			}
		}
	}
	if p.run, err = packs.Start(e.Sampling, o); err != nil {
		return nil, err
	}
	return p, nil
}

// source has the rows read from the SSDs, in their order.
func (p *packFolder) source(ctx context.Context) (packed.Source, func() error, error) {
	r, err := stripe.OpenRows(ctx, p.e.In.Dataset, p.e.Store.SSDs)
	if err != nil {
		return nil, nil, err
	}
	if why := r.Unchecked(); why != "" {
		p.e.Observer.TellNote("rows are packed without being held against their checksums: %s", why)
	}
	return r, func() error { return r.Close(ctx) }, nil
}

// Find implements packSource.
func (p *packFolder) Find(ctx context.Context, epoch int) (*laidOut, int, error) {
	began := time.Now()
	if !p.run.Held(epoch) {
		// The stack may have all queue pairs, and making or opening packs needs some.
		if err := p.e.Store.Close(); err != nil {
			return nil, 0, err
		}
	}
	pack, first, err := p.run.Find(ctx, epoch)
	if err != nil {
		return nil, 0, err
	}
	if o := p.open[pack]; o != nil {
		return &o.laidOut, first, nil
	}
	if err := p.e.Store.Close(); err != nil {
		return nil, 0, err
	}
	p.e.Trace.Run("prepare packs", began)
	o, err := p.use(ctx, pack)
	if err != nil {
		return nil, 0, err
	}
	p.open[pack] = o
	return &o.laidOut, first, nil
}

// use opens the pages of a pack.
func (p *packFolder) use(ctx context.Context, pack *packs.Pack) (_ *openPack, err error) {
	s := pack.Plan.Stats()
	o := &openPack{}
	o.shape, o.most, o.batch, o.samples = pack.Plan.Shape(), s.MostReadPages, pack.Plan.Batch,
		pack.Samples
	o.pages = &engine.PageStore{}
	if o.hot, err = pack.Plan.Hot(); err != nil {
		return nil, err
	}
	if s.Pages > 0 {
		if o.opened, err = p.run.OpenPages(ctx, pack); err != nil {
			if stopped := prepare.Interrupted(ctx); stopped != nil {
				return nil, stopped
			}
			return nil, err
		}
		o.pages = &engine.PageStore{SSDs: o.opened.SSDs, Layout: o.opened.Layout,
			Sums:    o.opened.Sums,
			Options: o.opened.Options}
	}
	i, e := &p.info, &pack.Entry
	i.Reused = i.Reused && pack.Reused
	i.SamplesBytes += e.SamplesBytes
	i.SampleSeconds += e.SampleSeconds
	i.PlanSeconds += e.PlanSeconds
	i.PackSeconds += e.PackSeconds
	i.Seconds = i.SampleSeconds + i.PlanSeconds + i.PackSeconds
	i.BytesRead += e.BytesRead
	i.BytesWritten += e.BytesWritten + e.SamplesBytes + e.PlanBytes
	i.Add(s, o.shape, e.End-e.First, e.PlanBytes)
	return o, nil
}

// Ahead implements packSource.
func (p *packFolder) Ahead(ctx context.Context, epoch int) error {
	var all []error
	for pack, o := range p.open {
		if !p.run.Holds(pack) {
			all = append(all, o.close())
			delete(p.open, pack)
		}
	}
	p.run.Ahead(ctx, epoch)
	return errors.Join(all...)
}

// Describe implements packSource.
func (p *packFolder) Describe(r *spec.PackedInfo) {
	*r = p.info
	r.DiskBytes = p.run.DiskBytes() // packs of refreshes come and go
}

func (o *openPack) close() error {
	if o.opened == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return errors.Join(o.pages.Close(), o.opened.Close(ctx))
}

// Close implements packSource.
func (p *packFolder) Close() error {
	var all []error
	for _, o := range p.open {
		all = append(all, o.close())
	}
	p.open = nil
	return errors.Join(append(all, p.run.Close())...)
}
