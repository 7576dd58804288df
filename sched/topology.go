package sched

import (
	"context"
	"fmt"
	"math"

	"helios/graph"
)

// openTopology opens what sampling reads.
func (e *engine) openTopology(in Inputs) (err error) {
	switch {
	case e.cfg.Topology == TopologySSD:
		if err := e.openStorage(in); err != nil {
			return err
		}
	case e.onGPU():
		e.topo, err = in.Dataset.TopologyInMemory()
	default:
		e.topo, err = in.Dataset.Topology()
	}
	if err != nil {
		return err
	}
	if e.dtopo, err = graph.Attach(e.dev, e.topo); err != nil {
		return err
	}
	e.onClose(e.dtopo.Close)
	return nil
}

// openStorage opens a topology whose lists stay on storage. It is the engine's own: what a neighbour cache holds is the run's.
func (e *engine) openStorage(in Inputs) error {
	bytes, err := in.Dataset.TopologyBytes()
	if err != nil {
		return err
	}
	// The file is checked and the cache filled: the longest single wait of a run's beginning.
	e.obs.step("open topology", 0, 1)
	ctx := e.opening
	if ctx == nil {
		ctx = context.Background()
	}
	cache := e.cfg.NeighborCache.Of(bytes)
	if e.cfg.NeighborCache.Percent != 0 && cache < graph.LeastNeighborCache(in.Dataset.Meta.Nodes) {
		cache = 0 // so few edges that a share of them holds nothing: nobody has asked for a cache that can't be
	}
	t, err := in.Dataset.TopologyOnSSD(ctx, graph.OutOfCoreOptions{CacheBytes: cache})
	if err != nil {
		if stopped := interrupted(ctx); stopped != nil {
			return stopped
		}
		return err
	}
	e.onClose(t.Close)
	e.obs.step("open topology", 1, 1)
	e.topo = t
	if i := t.StorageInfo(); !i.Direct || !i.IOUring {
		how := "the page cache"
		if i.Direct {
			how = "threads, as there is no io_uring"
		}
		e.obs.note(fmt.Sprintf("--topology ssd: the lists of %s are read through %s", in.Dataset.Dir(), how))
	}
	return nil
}

// topologyNeeds is the CPU memory that opening the topology will take; 0 where that is counted already or can be given
// back at any time.
func (e *engine) topologyNeeds() int64 {
	m := e.in.Dataset.Meta
	width := int64(4)
	if m.Nodes > math.MaxUint32 {
		width = 8
	}
	switch {
	case e.topo != nil:
		return 0
	case e.cfg.Topology == TopologySSD:
		// Offsets, checksums, and the neighbour cache. What reads go to is little.
		return (m.Nodes+1)*8 + m.Edges*width/1024 + e.neighborCacheNeeds()
	case e.onGPU():
		return (m.Nodes+1)*8 + m.Edges*width
	}
	return 0
}

// neighborCacheNeeds is what a neighbour cache will take, which is no more than all lists do.
func (e *engine) neighborCacheNeeds() int64 {
	m := e.in.Dataset.Meta
	width := int64(4)
	if m.Nodes > math.MaxUint32 {
		width = 8
	}
	if e.topo != nil || e.cfg.Topology != TopologySSD {
		return 0
	}
	return min(e.cfg.NeighborCache.Of(m.Edges*width), graph.MostNeighborCache(m.Nodes, m.Edges))
}

// sampleCtx is opCtx for sampling, which over a topology on storage reads: a hop may take long then, so after an interrupt
// it goes on for e.grace only.
func (e *engine) sampleCtx(ctx context.Context) (context.Context, context.CancelFunc) {
	if e.topo != nil && e.topo.OnStorage() {
		return e.readCtx(ctx)
	}
	return e.opCtx(ctx)
}

// newSampler makes a sampler of the run's kind.
func (e *engine) newSampler(fanouts []int) (*graph.Sampler, error) {
	return graph.NewSampler(e.dev, e.dtopo, graph.SamplerConfig{
		Fanouts: fanouts, Seed: e.cfg.Seed, Degrees: e.cfg.arch().Degrees(), Layerwise: e.cfg.Sampler == SamplerLadies,
	})
}

// topologyReads is what sampling has read of a topology on storage since an earlier time, as before says; nil for one in memory.
func (e *engine) topologyReads(before *graph.StorageStats) *graph.StorageStats {
	if e.topo == nil || !e.topo.OnStorage() {
		return nil
	}
	s := e.topo.Storage()
	if before != nil {
		s = s.Sub(*before)
	}
	return &s
}

// topologyInfo says how a topology on storage is held; nil for one in memory.
func (e *engine) topologyInfo() *graph.StorageInfo {
	if e.topo == nil || !e.topo.OnStorage() {
		return nil
	}
	i := e.topo.StorageInfo()
	return &i
}
