package sched

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"helios/cache/packed"
	"helios/dataset/pages"
	"helios/sched/packs"
	"helios/sched/prepare"
	"helios/sched/report"
)

// packFolder has the packs of a run, from a folder (package packs).
type packFolder struct {
	e    *engine
	run  *packs.Run
	open map[*packs.Pack]*openPack
	info report.PackedInfo
}

type openPack struct {
	laidOut
	opened *pages.Opened
}

func openPacks(e *engine) (packSource, error) {
	c := e.Config
	dir, err := filepath.Abs(c.PackedFolder(e.In.Dataset.Dir()))
	if err != nil {
		return nil, err
	}
	p := &packFolder{e: e, open: map[*packs.Pack]*openPack{}}
	budget := c.DiskBudget.Of(e.Rows * e.RowBytes)
	p.info = report.PackedInfo{Dir: dir, Reused: true, Budget: budget}
	p.run, err = packs.Start(e.Sampling, packs.Options{Dir: dir, Budget: budget,
		Segment: c.Segment, Hot: e.tiers.GPURows + e.tiers.CPURows, Source: p.source})
	if err != nil {
		return nil, err
	}
	return p, nil
}

// source has the rows read from the SSDs.
func (p *packFolder) source(ctx context.Context) (packed.Source, func() error, error) {
	if err := p.e.store.turnTo(ctx, nil); err != nil {
		return nil, nil, err
	}
	r := &storedRows{s: &p.e.store}
	return r, r.close, nil
}

// find implements packSource.
func (p *packFolder) find(ctx context.Context, epoch int) (*laidOut, int, error) {
	began := time.Now()
	pack, first, err := p.run.Find(ctx, epoch)
	if err != nil {
		return nil, 0, err
	}
	if o := p.open[pack]; o != nil {
		return &o.laidOut, first, nil
	}
	p.e.trace.run("prepare packs", began)
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
	o.pages = &pageStore{}
	if o.hot, err = pack.Plan.Hot(); err != nil {
		return nil, err
	}
	if s.Pages > 0 {
		if o.opened, err = pages.OpenFolder(ctx, pack.Dir, pack.Pages, pages.OpenOptions{
			PollDoorbells: p.e.OnGPU()}); err != nil {
			if stopped := prepare.Interrupted(ctx); stopped != nil {
				return nil, stopped
			}
			return nil, err
		}
		o.pages = &pageStore{ssds: o.opened.SSDs, layout: o.opened.Layout, sums: o.opened.Sums,
			options: o.opened.Options}
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

// ahead implements packSource.
func (p *packFolder) ahead(ctx context.Context, epoch int) error {
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

// describe implements packSource.
func (p *packFolder) describe(r *report.PackedInfo) { *r = p.info }

func (o *openPack) close() error {
	if o.opened == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return o.opened.Close(ctx)
}

// close implements packSource.
func (p *packFolder) close() error {
	var all []error
	for _, o := range p.open {
		all = append(all, o.close())
	}
	p.open = nil
	return errors.Join(append(all, p.run.Close())...)
}
