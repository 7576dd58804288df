package sched

import (
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

// memoryOf is the memory of the CPU tier and of the neighbour cache's lists now.
func memoryOf() (cpu, lists, table int64) {
	u := hostmem.Usage()
	return u["cpu cache"], u["neighbour cache"], u["neighbour cache table"]
}

// One budget serves sampling and training by turns: each has all of it in its time, both together
// never more than it, and the run computes what it computes with a memory for each.
func TestMemoryMoves(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	ways := []variant{
		{"own memory", func(c *plan.Config) { c.NeighborCache = percent(40) }, 2, 2},
		{"one superbatch", func(c *plan.Config) { c.Superbatch = 0 }, 2, 2},
		{"three batches", func(*plan.Config) {}, 2, 2},
		{"beside a GPU tier", func(c *plan.Config) { c.GPUCache = percent(5) }, 2, 4},
		{"rows as they come", func(c *plan.Config) {
			c.Mode, c.Policy, c.Topology = static.ModeHelios, plan.PolicyBelady, plan.TopologySSD
			c.GPUCache, c.NeighborShared = percent(5), true
		}, 2, 2},
		{"overlapped", func(c *plan.Config) { c.SuperbatchOverlap = true }, 2, 2},
	}
	rows := d.Meta.Nodes * int64(d.Meta.RowBytes())
	budget := rows / 100 // 10 % are more than all lists
	sha := ""
	for i, v := range ways {
		before := testrig.Held(t)
		cfg := small()
		cfg.Mode, cfg.CPUCache, cfg.Superbatch = ginex.ModeGinex, units.Budget{Bytes: budget}, 3
		v.set(&cfg)
		moves := i > 0 && !cfg.SuperbatchOverlap
		sampling, training := int64(0), int64(0)
		cfg.OnBatch = func(int, int, *graph.MiniBatch) {
			cpu, lists, table := memoryOf()
			training = max(training, cpu)
			require.Positive(t, cpu, v.name)
			if i == 0 {
				return
			}
			require.Equal(t, !moves, lists > 0, v.name)
			if !moves {
				require.LessOrEqual(t, cpu+lists+table, budget, v.name)
			}
		}
		r := train(t, context.Background(), cfg, d, feat, s, v.workers, report.Observer{
			Step: func(stage string, _, _ int) {
				if stage != "sample superbatch" {
					return
				}
				cpu, lists, table := memoryOf()
				sampling = max(sampling, lists+table)
				require.Positive(t, lists, v.name)
				if moves {
					require.Zero(t, cpu, v.name)
					require.LessOrEqual(t, lists+table, budget, v.name)
				}
			}})
		require.NoError(t, r.err, v.name)
		if sha == "" {
			sha = r.res.ParamsSHA256
		}
		require.Equal(t, sha, r.res.ParamsSHA256, v.name)
		before.Leaked(t, "topology")
		info, read := r.res.Superbatch, int64(0)
		for _, e := range r.res.Epochs {
			read += e.BytesSSD
			require.NotNil(t, e.TopologyReads, v.name)
		}
		t.Logf("%s: %d superbatches, %d bytes of lists and %d of rows again, %d of SSDs", v.name,
			info.Superbatches, info.ListBytes, info.FillBytes, read)
		require.LessOrEqual(t, info.FillBytes, read+budget*int64(info.Superbatches))
		switch {
		case moves:
			require.Equal(t, info.SharedBytes, training, v.name)
			require.Less(t, budget-training, int64(d.Meta.RowBytes()), v.name)
			require.Greater(t, sampling, budget*9/10, v.name)
			require.Positive(t, info.ListBytes, v.name)
			require.Positive(t, info.ListSeconds, v.name)
			if cfg.Mode == ginex.ModeGinex {
				require.Positive(t, info.FillBytes, v.name)
			}
			// the first superbatch finds the lists that opening has read
			require.LessOrEqual(t, info.ListBytes,
				int64(info.Superbatches-1)*(d.Meta.Edges*4+2<<12), v.name)
		default:
			require.Zero(t, info.SharedBytes, v.name)
			require.Zero(t, info.ListBytes, v.name)
		}
		if cfg.SuperbatchOverlap {
			require.InDelta(t, budget/2, training, float64(d.Meta.RowBytes()), v.name)
			require.Greater(t, sampling, budget*4/10, v.name)
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
