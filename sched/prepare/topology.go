package prepare

import (
	"context"
	"math"

	"helios/graph"
	"helios/sched/plan"
)

// OpenTopology opens what sampling reads.
func (s *Sampling) OpenTopology(ctx context.Context) (err error) {
	in := s.In
	switch {
	case s.Config.Topology == plan.TopologySSD:
		if err := s.openStorage(ctx); err != nil {
			return err
		}
	case s.schema != nil:
		err = s.openRelations()
	case s.OnGPU():
		s.Topology, err = in.Dataset.TopologyInMemory()
	default:
		s.Topology, err = in.Dataset.Topology()
	}
	if err != nil {
		return err
	}
	if s.dtopo, err = graph.Attach(s.Device, s.Topology); err != nil {
		return err
	}
	s.OnClose(s.dtopo.Close)
	return nil
}

// openStorage opens a topology whose lists stay on storage. It is the run's own: what a neighbour
// cache holds is the run's.
func (s *Sampling) openStorage(ctx context.Context) error {
	in := s.In
	bytes, err := in.Dataset.TopologyBytes()
	if err != nil {
		return err
	}
	// The file is checked and the cache filled: the longest single wait of a run's beginning.
	s.Observer.TellStep("open topology", 0, 1)
	cache := s.Config.NeighborCache.Of(bytes)
	if s.Config.NeighborCache.Percent != 0 &&
		cache < s.leastLists() {
		// so few edges that a share of them holds nothing: nobody has asked for a cache that can't
		// be
		cache = 0
	}
	o := graph.OutOfCoreOptions{CacheBytes: cache, Loopless: s.Config.LooplessDegrees()}
	open := in.Dataset.TopologyOnSSD
	if s.schema != nil {
		open = func(ctx context.Context, o graph.OutOfCoreOptions) (*graph.Topology, error) {
			return in.Dataset.RelationsOnSSD(ctx, s.schema, o)
		}
	}
	t, err := open(ctx, o)
	if err != nil {
		if stopped := Interrupted(ctx); stopped != nil {
			return stopped
		}
		return err
	}
	s.OnClose(t.Close)
	s.Observer.TellStep("open topology", 1, 1)
	s.Topology = t
	if i := t.StorageInfo(); !i.Direct || !i.IOUring {
		how := "the page cache"
		if i.Direct {
			how = "threads, as there is no io_uring"
		}
		s.Observer.TellNote("{topology} ssd: the lists of %s are read through %s",
			in.Dataset.Dir(), how)
	}
	return nil
}

// TopologyNeeds is the CPU memory that opening the topology will take; 0 where that is counted
// already or can be given back at any time.
func (s *Sampling) TopologyNeeds() int64 {
	m := s.In.Dataset.Meta
	width := int64(4)
	if m.Nodes > math.MaxUint32 {
		width = 8
	}
	switch {
	case s.Topology != nil:
		return 0
	case s.Config.Topology == plan.TopologySSD:
		// Offsets, checksums, and the neighbour cache. Buffers of reads are small.
		return (s.listNodes()+1)*8 + m.Edges*width/1024 + s.NeighborCacheNeeds()
	case s.OnGPU():
		return (s.listNodes()+1)*8 + m.Edges*width
	}
	return 0
}

// listNodes is the number of in-neighbour lists: a node of a typed graph has one in each relation
// into its type.
func (s *Sampling) listNodes() (n int64) {
	if s.schema == nil {
		return s.In.Dataset.Meta.Nodes
	}
	for _, r := range s.schema.Relations {
		n += s.schema.Types[r.Dst].Nodes
	}
	return n
}

// leastLists is graph.LeastNeighborCache of the graph, and mostLists graph.MostNeighborCache.
func (s *Sampling) leastLists() (n int64) {
	if s.schema == nil {
		return graph.LeastNeighborCache(s.In.Dataset.Meta.Nodes)
	}
	for _, r := range s.schema.Relations {
		n += graph.LeastNeighborCache(s.schema.Types[r.Dst].Nodes)
	}
	return n
}

func (s *Sampling) mostLists() int64 {
	return s.leastLists() + 4*(s.listNodes()+s.In.Dataset.Meta.Edges)
}

// NeighborCacheNeeds returns the bytes of a neighbour cache, which are no more than those of all
// lists.
func (s *Sampling) NeighborCacheNeeds() int64 {
	m := s.In.Dataset.Meta
	width := int64(4)
	if m.Nodes > math.MaxUint32 {
		width = 8
	}
	if s.Topology != nil || s.Config.Topology != plan.TopologySSD || s.Config.Traits().Lends {
		return 0 // or the CPU tier's
	}
	return min(s.Config.NeighborCache.Of(m.Edges*width), s.mostLists())
}

// share turns a budget that the neighbour cache shares with the CPU tier into the bytes of both.
func (s *Sampling) share() {
	c := &s.Config
	if divide := c.System().Divide; c.NeighborShared && divide != nil {
		divide(c, s.Rows*s.RowBytes, s.leastLists(), s.mostLists())
	}
}

// ListBytes is the memory of the neighbour cache's lists.
func (s *Sampling) ListBytes() int64 { return s.dtopo.ListBytes() }

// LendToSampling has the neighbour cache's lists in mem, which is the CPU tier's, until TakeBack.
// Between the two superbatches are sampled.
func (s *Sampling) LendToSampling(ctx context.Context, mem []byte) (bytes int64, err error) {
	return s.dtopo.FillLists(ctx, mem)
}

// TakeBack ends LendToSampling.
func (s *Sampling) TakeBack() error { return s.dtopo.ReleaseLists() }

// SampleContext is opCtx for sampling, which over a topology on storage reads: a hop may take long
// then, so after an interrupt it goes on for s.grace only.
func (s *Sampling) SampleContext(ctx context.Context) (context.Context, context.CancelFunc) {
	if s.Topology != nil && s.Topology.OnStorage() {
		return s.ReadContext(ctx)
	}
	return s.OperatorContext(ctx)
}

// newSampler makes a sampler of the run's kind.
func (s *Sampling) newSampler(fanouts []int) (*graph.Sampler, error) {
	return s.samplerOver(s.dtopo, fanouts)
}

// SamplerOver makes a sampler of the run's kind over another topology. Close it.
func (s *Sampling) SamplerOver(t *graph.DeviceTopology) (*graph.Sampler, error) {
	return s.samplerOver(t, s.Config.Fanouts)
}

func (s *Sampling) samplerOver(t *graph.DeviceTopology, fanouts []int) (*graph.Sampler, error) {
	var relations [][]int
	if s.schema != nil {
		var err error
		if relations, err = RelationFanouts(&s.Config, s.schema); err != nil {
			return nil, err
		}
	}
	return graph.NewSampler(s.Device, t, graph.SamplerConfig{
		Method: s.Config.Sampler, Fanouts: fanouts, RelationFanouts: relations, Seed: s.Config.Seed,
		Degrees: s.Config.Arch().Degrees(), Loopless: s.Config.LooplessDegrees(),
		Dependency: s.Config.BatchDependency, Together: s.Config.RelationFanouts == Together,
	})
}

// TopologyReads returns what sampling has read of a topology on storage since an earlier time, as
// before says; nil for one in memory.
func (s *Sampling) TopologyReads(before *graph.StorageStats) *graph.StorageStats {
	if s.Topology == nil || !s.Topology.OnStorage() {
		return nil
	}
	now := s.Topology.Storage()
	if before != nil {
		now = now.Sub(*before)
	}
	return &now
}

// TopologyInfo describes a topology on storage; nil for one in memory.
func (s *Sampling) TopologyInfo() *graph.StorageInfo {
	if s.Topology == nil || !s.Topology.OnStorage() {
		return nil
	}
	i := s.Topology.StorageInfo()
	return &i
}
