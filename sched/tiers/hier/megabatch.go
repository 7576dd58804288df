package hier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"helios/gpuio"
	"helios/graph"
	"helios/graph/induced"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/tiers/hier/spec"
)

// megaBatch is room for a mega-batch, and the one that is in it.
type megaBatch struct {
	// at has the parts whose rows are in place, and the page where they begin.
	at map[int]int64

	parts   []int // nil: none is there
	places  *induced.Places
	topo    *graph.Topology
	dtopo   *graph.DeviceTopology
	sampler *graph.Sampler
}

// holds reports whether the mega-batch of these parts is there.
func (m *megaBatch) holds(parts []int) bool {
	return m != nil && m.parts != nil && slices.Equal(m.parts, parts)
}

// close releases the mega-batch, its rows aside.
func (m *megaBatch) close() error {
	var all []error
	if m.sampler != nil {
		all = append(all, m.sampler.Close())
	}
	if m.dtopo != nil {
		all = append(all, m.dtopo.Close())
	}
	if m.topo != nil {
		all = append(all, m.topo.Close())
	}
	*m = megaBatch{at: m.at}
	return errors.Join(all...)
}

// induce makes the topology of parts, whose nodes have places in m, and a sampler over it.
func (m *megaBatch) induce(ctx context.Context, s *prepare.Sampling, statics induced.Lists,
	parts []induced.Part, workers int) (err error) {
	if m.topo, err = induced.Build(ctx, m.places, statics, parts, workers); err != nil {
		var numbers []int
		for _, p := range parts {
			numbers = append(numbers, p.Part)
		}
		return fmt.Errorf("mega-batch of parts %v: %w", numbers, err)
	}
	if m.dtopo, err = graph.Attach(s.Device, m.topo); err != nil {
		return err
	}
	m.sampler, err = s.SamplerOver(m.dtopo)
	return err
}

// taken has the reads and the times of loading a mega-batch.
type taken struct {
	took   gpuio.ReadStats
	bytes  [2]int64 // of features, of edges
	load   time.Duration
	induce time.Duration // of that, making its topology
	ahead  bool          // while another one trained
}

// rounds are a run's mega-batches: how many parts each has, in which order they train, and what
// loading them took.
type rounds struct {
	batches *MegaBatches
	split   []int64 // the training nodes, in the dataset
	labels  []int32 // theirs
	order   *MegaOrder
	ordered int      // the sample epoch of order; below 0: of none
	passes  int      // 0: not chosen yet
	room    MegaRoom // its Loaded is 0: not chosen yet
	info    spec.MegaInfo
}

// newRounds makes those of a configuration, before its parts are known.
func newRounds(c *plan.Config) rounds {
	r := rounds{ordered: -1}
	if c.Passes != spec.PassesAuto {
		r.passes = c.Passes
	}
	return r
}

// size chooses how many parts a mega-batch has, once for the run, and holds them against the
// budget.
func (r *rounds) size(c *plan.Config, p *MegaParts, staticsOnGPU bool) (err error) {
	if r.room, err = p.Room(c, r.room.Loaded, staticsOnGPU); err == nil {
		r.batches = p.Batches(c, r.room, r.labels)
	}
	return err
}

// orderOf is the order of an epoch by the number of its samples.
func (r *rounds) orderOf(sampleEpoch int) *MegaOrder {
	if r.ordered != sampleEpoch {
		r.order = r.batches.Order(r.split, sampleEpoch, max(r.passes, 1))
		r.ordered = sampleEpoch
	}
	return r.order
}

// choose sets how often a mega-batch trains, which the next order has.
func (r *rounds) choose(load, train time.Duration) {
	r.passes, r.ordered = ChoosePasses(load, train), -1
}

// countLoad counts a mega-batch that training has waited for.
func (r *rounds) countLoad(x *taken, waited time.Duration) {
	i := &r.info
	i.AddReads(x.took)
	i.FeatureBytes += x.bytes[0]
	i.EdgeBytes += x.bytes[1]
	i.MegaBatches++
	i.LoadSeconds += x.load.Seconds()
	i.InduceSeconds += x.induce.Seconds()
	i.WaitSeconds += waited.Seconds()
	if waited > time.Millisecond {
		i.Waits++
	}
	if x.ahead {
		i.Ahead++
	}
}

// describe has the parts and the cost of loading them.
func (r *rounds) describe(c *plan.Config, p *MegaParts, staticsOnGPU bool) *spec.MegaInfo {
	i := r.info
	i.Parts, i.Loaded, i.Order = p.Parts, r.room.Loaded, c.PartOrder
	i.Passes, i.PassesAuto = r.passes, c.Passes == spec.PassesAuto
	i.StaticRows, i.StaticOnGPU = p.StaticNodes(), staticsOnGPU && p.StaticNodes() > 0
	i.PageBytes, i.DiskBytes, i.EpochBytes = p.Spec.PageBytes, p.DiskBytes(),
		p.EpochBytes(r.room.Loaded)
	i.CPUBytes, i.Budget = r.room.Total(), r.room.Budget
	i.Settle()
	return &i
}
