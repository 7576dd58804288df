package engine

import (
	"context"
	"sync/atomic"
	"time"

	"helios/graph"
)

// Kept holds mini-batches of a pass that were sampled before its walk.
type Kept interface {
	// Restore makes a slot's mini-batch i of the pass, to the bit as sampling would, and s.rows its
	// frontier. The slot's seeds and labels are set.
	Restore(op context.Context, s *Slot, i int) error
}

// KeptSamples gives mini-batches by their place: samples.Files and samples.Store.
type KeptSamples interface {
	Read(index int, buf []int64) ([]int64, error)
	Adj(index int, buf []byte) ([]byte, error)
}

// KeptPass are mini-batches of a pass in samples, where the pass's mini-batch 0 has the place base.
// A superbatch that begins with a later one has a base below 0. The stage is of one pass at a time.
type KeptPass struct {
	Engine *Engine
	Pass   *Pass
	From   KeptSamples
	Base   int
	Stage  *graph.Stage
	Took   *atomic.Int64 // ns, in which mini-batches were read; nil: nobody wants to know
}

// Restore implements Kept.
func (k *KeptPass) Restore(op context.Context, s *Slot, i int) (err error) {
	begin := time.Now()
	if s.Frontier, err = k.From.Read(i+k.Base, s.Frontier); err != nil {
		return err
	}
	if s.adj, err = k.From.Adj(i+k.Base, s.adj); err != nil {
		return err
	}
	if k.Took != nil {
		k.Took.Add(int64(time.Since(begin)))
	}
	return k.Pass.Sampler.Restore(op, k.Engine.Stream, s.Batch, k.Pass.Epoch, i, s.Frontier,
		s.adj, k.Stage)
}
