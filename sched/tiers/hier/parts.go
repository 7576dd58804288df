package hier

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"helios/dataset/parted"
	"helios/graph/induced"
	"helios/sched/engine"
	"helios/sched/prepare"
)

// megaParts is a partitioned dataset that is open to be read.
type megaParts struct {
	*MegaParts
	pages *engine.PageStore
}

// lists are those of an edge section.
func lists(s parted.Section, err error) (induced.Lists, []uint32, error) {
	return induced.Lists{Degrees: s.Degrees, Neighbors: s.Neighbors}, s.Old, err
}

// openParts opens the parts of the run, which are made where they are not there yet.
func (t *Tiers) openParts(ctx context.Context) (err error) {
	// The stack may have all queue pairs, and making or opening parts needs some.
	if err := t.Engine.Store.Close(); err != nil {
		return err
	}
	began := time.Now()
	if t.split, err = prepare.TrainSplit(t.Engine.In); err != nil {
		return err
	}
	t.labels = t.Engine.Targets.Classes(t.split)
	if t.parts, err = t.makeParts(ctx); err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return stopped
		}
		return err
	}
	t.Engine.Trace.Run("prepare parts", began)
	return nil
}

// makeParts makes what is not there yet, and opens the pages.
func (t *Tiers) makeParts(ctx context.Context) (_ *megaParts, err error) {
	e := t.Engine
	c := &e.Config
	dir, err := filepath.Abs(partedFolder(c, e.In.Dataset.Dir()))
	if err != nil {
		return nil, err
	}
	place, alone := e.PagePlace()
	o := parted.Options{Dir: dir, StaticShare: c.StaticNodes.Fraction(), RowType: e.RowType,
		Place: place, Progress: func(stage string, done, total int64) {
			e.Observer.TellStep(stage, int(done), int(total))
		}}
	if !alone {
		o.Source = func() (parted.Source, func() error, error) { return e.RowSource(ctx) }
	}
	if o.Partition, o.PartitionOptions, err = partitionOf(ctx, e.Sampling, t.split); err != nil {
		return nil, err
	}
	closePartition := func() error {
		if o.Partition == nil {
			return nil
		}
		return o.Partition.Close()
	}
	_, missing := parted.Open(dir)
	p := &megaParts{}
	t.info.Dir, t.info.PagesOn, t.info.Reused = dir, c.PagesOn, missing == nil
	began := time.Now()
	l, err := parted.Make(ctx, e.In.Dataset, e.Topology, o)
	if err = errors.Join(err, closePartition()); err != nil {
		return nil, err
	}
	if missing != nil {
		t.info.LayoutSeconds = time.Since(began).Seconds()
	}
	// Of everything that decides the number of a node in a mega-batch; the number keys its draws.
	k := &l.Key
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %g %d %d", k.Sum, k.StaticShare, k.PageBytes,
		k.RowBytes))
	t.info.Key = hex.EncodeToString(sum[:8])
	if p.MegaParts, err = NewMegaParts(l, c.PartOrder); err != nil {
		return nil, err
	}
	opened, err := p.OpenPages(ctx, o.Place)
	if err != nil {
		return nil, err
	}
	p.pages = &engine.PageStore{Opened: opened}
	return p, nil
}
