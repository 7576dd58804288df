package sched

import (
	"cmp"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/graph"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/ginex"
	ginexspec "helios/sched/tiers/ginex/spec"
	"helios/sched/tiers/static"
)

// memoryOf is the memory of the CPU tier and of a neighbour cache of its own now.
func memoryOf() (cpu, lists int64) {
	u := hostmem.Usage()
	return u["cpu cache"], u["neighbour cache"]
}

// One budget serves sampling and training: while a superbatch is sampled the lists lie in the tier,
// so both together never take more, and the run computes what it computes with a memory for each.
func TestMemoryMoves(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	ways := []variant{
		{"own memory", func(c *plan.Config) { c.NeighborCache = percent(40) }, 2, 2},
		{"one superbatch", func(c *plan.Config) { c.Superbatch = 0 }, 2, 2},
		{"three batches", func(*plan.Config) {}, 2, 2},
		{"beside a GPU tier", func(c *plan.Config) { c.GPUCache = percent(5) }, 2, 4},
		{"helios", func(c *plan.Config) {
			c.Mode, c.Policy, c.GPUCache, c.NeighborShared = static.ModeHelios, plan.PolicyBelady,
				percent(5), true
		}, 2, 2},
		{"overlapped", func(c *plan.Config) { c.SuperbatchOverlap = true }, 2, 2},
	}
	rows := d.Meta.Nodes * int64(d.Meta.RowBytes())
	for _, budget := range []int64{rows / 100, rows / 3} { // of lists, and more than all of them
		sha := ""
		for i, v := range ways {
			before := testrig.Held(t)
			cfg := small()
			cfg.Mode, cfg.CPUCache, cfg.Superbatch = ginex.ModeGinex, units.Budget{Bytes: budget}, 3
			cfg.Topology = plan.TopologySSD
			v.set(&cfg)
			moves := i > 0 && !cfg.SuperbatchOverlap
			look := func() {
				cpu, lists := memoryOf()
				require.Positive(t, cpu, v.name)
				require.Equal(t, !moves, lists > 0, v.name)
				if i > 0 {
					require.LessOrEqual(t, cpu+lists, budget, v.name)
				}
			}
			cfg.OnBatch = func(int, int, *graph.MiniBatch) { look() }
			cached := false
			r := train(t, context.Background(), cfg, d, feat, s, v.workers, report.Observer{
				Step: func(stage string, _, _ int) {
					if stage == "sample superbatch" {
						look()
					}
				}})
			require.NoError(t, r.err, v.name)
			sha = cmp.Or(sha, r.res.ParamsSHA256)
			require.Equal(t, sha, r.res.ParamsSHA256, v.name)
			before.Leaked(t, "topology")
			for _, e := range r.res.Epochs {
				require.NotNil(t, e.TopologyReads, v.name)
				cached = cached || e.TopologyReads.CachedEdges > 0
			}
			require.True(t, cached, v.name)
			info := r.res.Superbatch
			require.Equal(t, moves, info.SharedBytes > 0, v.name)
			require.Equal(t, moves, info.ListBytes > 0, v.name)
			require.LessOrEqual(t, info.SharedBytes, min(r.res.CPUCacheBytes,
				graph.MostNeighborCache(d.Meta.Nodes, d.Meta.Edges)), v.name)
			require.LessOrEqual(t, info.ListBytes,
				int64(info.Superbatches)*(d.Meta.Edges*4+2<<12), v.name)
		}
	}
}

// Lists have the memory of the budget that no row of the CPU tier takes: the rest of a row, or all
// where the GPU tier holds the rows.
func TestListsBesideFewRows(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	row := int64(d.Meta.RowBytes())
	least := graph.LeastNeighborCache(d.Meta.Nodes)
	for _, gpu := range []units.Budget{{}, percent(60), percent(100)} {
		for _, budget := range []units.Budget{{Bytes: least + row - 8}, {Bytes: least + 3*row/2},
			percent(60), percent(100)} {
			sha := ""
			for _, shared := range []bool{false, true} {
				cfg := small()
				cfg.Mode, cfg.GPUCache, cfg.CPUCache = ginex.ModeGinex, gpu, budget
				cfg.Topology, cfg.Superbatch = plan.TopologySSD, 3
				if !shared {
					cfg.NeighborCache = percent(40)
				}
				r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
				require.NoError(t, r.err, "%v %v", gpu, budget)
				sha = cmp.Or(sha, r.res.ParamsSHA256)
				require.Equal(t, sha, r.res.ParamsSHA256, "%v %v", gpu, budget)
			}
		}
	}
}

// The budget of sampling is divided as it is said, and never more than is of use.
func TestShare(t *testing.T) {
	const features, least, most = 1000_000, 100, 30_000
	for _, c := range []struct {
		budget        units.Budget
		overlap       bool
		neighbor, cpu int64
	}{
		{units.Budget{Percent: 1}, false, 10_000, 10_000},
		{units.Budget{Percent: 1}, true, 5000, 5000},
		{units.Budget{Percent: 50}, false, most, 500_000},
		{units.Budget{Percent: 50}, true, most, 470_000},
		{units.Budget{Bytes: 5000_000}, false, most, features},
		{units.Budget{Bytes: 99}, false, 0, 99},
		{units.Budget{Bytes: 150}, true, 0, 150},
		{units.Budget{}, false, 0, 0},
	} {
		n, cpu := ginex.Share(plan.Config{SuperbatchSettings: ginexspec.SuperbatchSettings{
			SuperbatchOverlap: c.overlap}, CPUCache: c.budget}, features,
			least, most)
		require.Equal(t, []int64{c.neighbor, c.cpu}, []int64{n, cpu}, "%+v", c)
	}
}
