package diskgnn

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"helios/cache/packed"
	"helios/dataset/pages"
	"helios/sched/engine"
	"helios/sched/packs"
	"helios/sched/prepare"
	"helios/sched/tiers/diskgnn/spec"
)

// packFolder has the packs of a run, from a folder (package packs).
type packFolder struct {
	e    *engine.Engine
	run  *packs.Run
	open map[*packs.Pack]*laidOut
	info spec.PackedInfo
}

func openPacks(e *engine.Engine) (*packFolder, error) {
	c := e.Config
	dir, err := filepath.Abs(c.PackedFolder(e.In.Dataset.Dir()))
	if err != nil {
		return nil, err
	}
	p := &packFolder{e: e, open: map[*packs.Pack]*laidOut{}}
	budget := c.DiskBudget.Of(e.Rows * e.RowBytes)
	p.info = spec.PackedInfo{Dir: dir, PagesOn: c.PagesOn, Reused: true, Budget: budget}
	place, alone := e.PagePlace()
	o := packs.Options{Dir: dir, Budget: budget, Segment: c.Segment, Pages: place, InTurn: alone,
		Hot: e.Sizes.GPURows + e.Sizes.CPURows}
	if !alone {
		o.Source = func(ctx context.Context) (packed.Source, func() error, error) {
			return e.RowSource(ctx)
		}
	}
	if p.run, err = packs.Start(e.Sampling, o); err != nil {
		return nil, err
	}
	return p, nil
}

// find gives the pack that an epoch of training is in, and the place of the epoch's first
// mini-batch in it. It makes the pack where there is none. The pack stays until ahead is called
// after a find of another.
func (p *packFolder) find(ctx context.Context, epoch int) (*laidOut, int, error) {
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
		return o, first, nil
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
	return o, first, nil
}

// use opens the pages of a pack.
func (p *packFolder) use(ctx context.Context, pack *packs.Pack) (_ *laidOut, err error) {
	s := pack.Plan.Stats()
	o := &laidOut{shape: pack.Plan.Shape(), most: s.MostReadPages, batch: pack.Plan.Batch,
		samples: pack.Samples, pages: &engine.PageStore{Opened: &pages.Opened{}}}
	if o.hot, err = pack.Plan.Hot(); err != nil {
		return nil, err
	}
	if s.Pages > 0 {
		if o.pages.Opened, err = p.run.OpenPages(ctx, pack); err != nil {
			if stopped := prepare.Interrupted(ctx); stopped != nil {
				return nil, stopped
			}
			return nil, err
		}
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

// ahead says that an epoch is about to train, with nothing else of a pack in use.
func (p *packFolder) ahead(ctx context.Context, epoch int) error {
	var all []error
	for pack, o := range p.open {
		if !p.run.Holds(pack) {
			all = append(all, o.pages.Close())
			delete(p.open, pack)
		}
	}
	p.run.Ahead(ctx, epoch)
	return errors.Join(all...)
}

// describe says in results what packs there are.
func (p *packFolder) describe() *spec.PackedInfo {
	r := p.info
	r.DiskBytes = p.run.DiskBytes() // packs of refreshes come and go
	return &r
}

func (p *packFolder) close() error {
	var all []error
	for _, o := range p.open {
		all = append(all, o.pages.Close())
	}
	p.open = nil
	return errors.Join(append(all, p.run.Close())...)
}
