package sched

import (
	"context"
	"sync/atomic"
	"time"

	"helios/graph"
)

// kept holds mini-batches of a pass that were sampled before its walk.
type kept interface {
	// restore makes a slot's mini-batch i of the pass, to the bit as sampling would, and s.rows its
	// frontier. The slot's seeds and labels are set.
	restore(op context.Context, s *slot, i int) error
}

// keptSamples gives mini-batches by their place: samples.Files and samples.Store.
type keptSamples interface {
	Read(index int, buf []int64) ([]int64, error)
	Adj(index int, buf []byte) ([]byte, error)
}

// keptPass are mini-batches of a pass in samples, where the pass's mini-batch 0 has the place base.
// A superbatch that begins with a later one has a base below 0. The stage is of one pass at a time.
type keptPass struct {
	e     *engine
	p     *pass
	from  keptSamples
	base  int
	stage *graph.Stage
	took  *atomic.Int64 // ns, in which mini-batches were read; nil: nobody wants to know
}

func (k *keptPass) restore(op context.Context, s *slot, i int) (err error) {
	begin := time.Now()
	if s.rows, err = k.from.Read(i+k.base, s.rows); err != nil {
		return err
	}
	if s.adj, err = k.from.Adj(i+k.base, s.adj); err != nil {
		return err
	}
	if k.took != nil {
		k.took.Add(int64(time.Since(begin)))
	}
	return k.p.sampler.Restore(op, k.e.Stream, s.mb, k.p.epoch, i, s.rows, s.adj, k.stage)
}
