package sched

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/ginex"
	"helios/sched/tiers/static"
)

// A static cache that superbatches find has the hits of one that is looked up. The part of it that
// is lent to sampling is read anew for each superbatch.
func TestStaticCacheOfSuperbatches(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	run := func(set func(*plan.Config)) record {
		cfg := small()
		cfg.CPUCache, cfg.GPUCache, cfg.Hotness = percent(10), percent(5), plan.HotnessOutDegree
		cfg.NoEval = true
		set(&cfg)
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		return r
	}
	want := run(func(c *plan.Config) { c.Mode, c.Topology = static.ModeCPU, plan.TopologySSD })
	for _, own := range []bool{false, true} {
		r := run(func(c *plan.Config) {
			c.Mode, c.Policy, c.Superbatch = ginex.ModeGinex, plan.PolicyStatic, 2
			c.Topology = plan.TopologySSD
			if own {
				c.NeighborCache = percent(10)
			}
		})
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
		require.Equal(t, plan.HotnessOutDegree, r.res.Hotness.By)
		gpu, cpu := r.res.GPUCacheBytes/r.res.RowBytes, r.res.CPUCacheBytes/r.res.RowBytes
		require.Equal(t, want.res.CPUCacheBytes, r.res.CPUCacheBytes)
		require.Equal(t, want.res.GPUCacheBytes, r.res.GPUCacheBytes)
		loaded := r.res.Superbatch.RowsLoaded
		for i, e := range r.res.Epochs {
			w := want.res.Epochs[i]
			require.Equal(t, []int64{w.RowsGPU, w.RowsCPU, w.RowsSSD},
				[]int64{e.RowsGPU, e.RowsCPU, e.RowsSSD})
			require.Greater(t, e.BytesSSD, w.BytesSSD*9/10)
		}
		n := int64(r.res.Superbatch.Superbatches)
		require.Greater(t, n, int64(2))
		if own {
			require.Equal(t, gpu+cpu, loaded)
		} else {
			lent := cpu - (r.res.CPUCacheBytes-r.res.Superbatch.SharedBytes)/r.res.RowBytes
			require.Positive(t, lent)
			require.Equal(t, gpu+cpu+(n-1)*lent, loaded)
		}
	}
}
