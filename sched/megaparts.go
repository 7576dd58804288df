package sched

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"helios/dataset/pages"
	"helios/dataset/parted"
	"helios/dataset/stripe"
	"helios/graph/induced"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// megaParts is a partitioned dataset that is open to be read.
type megaParts struct {
	*parted.Layout
	numbering *induced.Numbering
	fixed     int // first parts, which have all training nodes; 0: any part may
	pages     *pageStore
	opened    *pages.Opened
	info      report.MegaInfo
}

// mostPages is the most pages that so many parts have in one of their sections.
func mostPages(runs []parted.Run, n int) int64 {
	all := make([]int64, len(runs))
	for i, r := range runs {
		all[i] = r.Pages
	}
	return largest(all, n)
}

// lists are those of an edge section.
func lists(s parted.Section, err error) (induced.Lists, []uint32, error) {
	return induced.Lists{Degrees: s.Degrees, Neighbors: s.Neighbors}, s.Old, err
}

// describe says what the parts are.
func (p *megaParts) describe(i *report.MegaInfo) {
	d := p.info
	i.Dir, i.PagesOn, i.Reused, i.Key, i.Parts = d.Dir, d.PagesOn, d.Reused, d.Key, p.Parts
	i.PageBytes, i.DiskBytes, i.LayoutSeconds = p.Spec.PageBytes, p.DiskBytes(), d.LayoutSeconds
	i.EpochBytes = p.epochBytes(i.Loaded)
}

// epochBytes is what an epoch reads by the formula, with so many parts in memory.
func (p *megaParts) epochBytes(loaded int) (sum int64) {
	for part := p.fixed; part < p.Parts; part++ {
		nodes := p.Base[part+1] - p.Base[part]
		sum += nodes*p.RowBytes + 4*(2*nodes+p.Edges[part])
	}
	if others := p.Parts - p.fixed; p.fixed > 0 && others > 0 {
		sum = int64(float64(sum) * float64(loaded-p.fixed) / float64(others))
	}
	return sum
}

// close ends what was opened for the parts. No reader of their pages is open.
func (p *megaParts) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return p.opened.Close(ctx)
}

// openParts opens the parts of the run, which are made where they are not there yet.
func (t *megaTiers) openParts(ctx context.Context) (err error) {
	// The stack may have all queue pairs, which making and opening parts take some of.
	if err := t.e.store.close(); err != nil {
		return err
	}
	began := time.Now()
	if t.split, err = prepare.TrainSplit(t.e.In); err != nil {
		return err
	}
	if t.parts, err = t.makeParts(ctx); err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return stopped
		}
		return err
	}
	t.e.trace.run("prepare parts", began)
	return nil
}

// partSeed is of the partitions that runs make: the parts are those of the dataset, whatever the
// seed of a run.
const partSeed = 1

// makeParts makes what is not there yet, and opens the pages.
func (t *megaTiers) makeParts(ctx context.Context) (_ *megaParts, err error) {
	e := t.e
	c := &e.Config
	dir, err := filepath.Abs(c.PartedFolder(e.In.Dataset.Dir()))
	if err != nil {
		return nil, err
	}
	o := parted.Options{Dir: dir, StaticShare: c.StaticNodes.Fraction(), RowType: e.RowType,
		Place: pages.InFolder{Options: pages.OpenOptions{PollDoorbells: e.OnGPU()}},
		Progress: func(stage string, done, total int64) {
			e.Observer.TellStep(stage, int(done), int(total))
		}}
	onSSDs := c.PagesOn == plan.PagesSSDs
	if onSSDs {
		o.Place = stripe.PagePlace{Dataset: e.In.Dataset, SSDs: e.store.ssds}
	}
	o.Source = func() (parted.Source, func() error, error) { return t.rowSource(ctx) }
	for _, s := range e.store.ssds {
		if onSSDs && s.Ctrl.MaxQueuePairs() < packPairs {
			o.Source = nil
		}
	}
	closePartition, err := t.partition(ctx, &o)
	if err != nil {
		return nil, err
	}
	_, missing := parted.Open(dir)
	p := &megaParts{info: report.MegaInfo{Dir: dir, PagesOn: c.PagesOn, Reused: missing == nil}}
	began := time.Now()
	p.Layout, err = parted.Make(ctx, e.In.Dataset, e.Topology, o)
	if err = errors.Join(err, closePartition()); err != nil {
		return nil, err
	}
	if missing != nil {
		p.info.LayoutSeconds = time.Since(began).Seconds()
	}
	// Of all that says which number a node has in a mega-batch: that keys its draws.
	k := &p.Layout.Key
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %g %d %d", k.Sum, k.StaticShare, k.PageBytes,
		k.RowBytes))
	p.info.Key = hex.EncodeToString(sum[:8])
	if p.numbering, err = induced.NewNumbering(p.Base, p.Statics); err != nil {
		return nil, err
	}
	if c.PartOrder == plan.PartsSequential {
		for _, id := range p.Train {
			p.fixed = max(p.fixed, p.numbering.PartOf(id)+1)
		}
	}
	if p.opened, err = p.OpenPages(ctx, o.Place); err != nil {
		return nil, err
	}
	p.pages = &pageStore{ssds: p.opened.SSDs, layout: p.opened.Layout, sums: p.opened.Sums,
		options: p.opened.Options}
	return p, nil
}

// rowSource has the rows read from the SSDs, in their order.
func (t *megaTiers) rowSource(ctx context.Context) (*stripe.RowSource, func() error, error) {
	e := t.e
	r, err := stripe.OpenRows(ctx, e.In.Dataset, e.store.ssds)
	if err != nil {
		return nil, nil, err
	}
	if why := r.Unchecked(); why != "" {
		e.Observer.TellNote("rows are copied without being held against their checksums: " + why)
	}
	return r, func() error { return r.Close(ctx) }, nil
}

// partition says in o which node is in which part.
func (t *megaTiers) partition(ctx context.Context, o *parted.Options) (closing func() error,
	err error) {
	e := t.e
	c := &e.Config
	nothing := func() error { return nil }
	if path := c.PartitionFile; path != "" {
		if o.Partition, err = partition.Open(path); err != nil {
			return nil, err
		}
		m := e.In.Dataset.Meta
		if err := o.Partition.BelongsTo(m.UUID, m.Nodes, m.Edges); err != nil {
			return nil, errors.Join(err, o.Partition.Close())
		}
		return o.Partition.Close, nil
	}
	o.PartitionOptions = partition.Options{Parts: c.PartsOf(e.Rows*e.RowBytes, e.Rows),
		Method: c.Partitioner(), Seed: partSeed}
	if int64(o.PartitionOptions.Parts) > e.Rows {
		return nil, errs.New(errs.Usage, "%v %d: the graph has %d nodes; give at most so many",
			errs.Key("parts"), c.Parts, e.Rows)
	}
	if c.PartOrder != plan.PartsSequential {
		return nothing, nil
	}
	if o.Partition, err = partition.Make(ctx, e.Topology, o.PartitionOptions); err != nil {
		return nil, err
	}
	o.Partition.Info.Dataset = e.In.Dataset.Meta.UUID
	o.Partition.PackFirst(t.split)
	return o.Partition.Close, nil
}
