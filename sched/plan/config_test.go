package plan_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/tiers/dynamic"
	"helios/sched/tiers/static"
)

func TestConfigRefusals(t *testing.T) {
	for want, set := range map[string]func(*plan.Config){
		"unknown option mode \"gpu\"":   func(c *plan.Config) { c.Mode = "gpu" },
		"unknown option pipeline \"x\"": func(c *plan.Config) { c.Pipeline = "x" },
		"unknown option io-stack \"x\"": func(c *plan.Config) { c.IOStack = "x" },
		"unknown option model \"mlp\"":  func(c *plan.Config) { c.Model = "mlp" },
		"no multiple of 3 heads":        func(c *plan.Config) { c.Model, c.Heads = "gat", 3 },
		"options of model gat":          func(c *plan.Config) { c.AttentionDropout = 0.5 },
		"option of model gin":           func(c *plan.Config) { c.LearnEps = true },
		"option fanout [10 0]":          func(c *plan.Config) { c.Fanouts = []int{10, 0} },
		"option fanout names 9 hops": func(
			c *plan.Config) {
			c.Fanouts = make([]int, 9)
			fill(c.Fanouts, 1)
		},
		"option batch-size -1":                  func(c *plan.Config) { c.Batch = -1 },
		"option hidden -1":                      func(c *plan.Config) { c.Hidden = -1 },
		"option epochs -1":                      func(c *plan.Config) { c.Epochs = -1 },
		"option prefetch-depth 65":              func(c *plan.Config) { c.Depth = 65 },
		"option lr NaN":                         func(c *plan.Config) { c.LR = math.NaN() },
		"option lr -1":                          func(c *plan.Config) { c.LR = -1 },
		"option dropout 1":                      func(c *plan.Config) { c.Dropout = 1 },
		"option weight-decay -1":                func(c *plan.Config) { c.WeightDecay = -1 },
		"option resume needs option checkpoint": func(c *plan.Config) { c.Resume = true },
		"option checkpoint-every -1":            func(c *plan.Config) { c.CheckpointEvery = -1 },
		"option gpu-cache -2":                   func(c *plan.Config) { c.GPUCache.Bytes = -2 },
		"option cpu-cache 101%":                 func(c *plan.Config) { c.CPUCache.Percent = 101 },
	} {
		c := plan.Config{}
		set(&c)
		err := c.Check()
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err), want)
	}
	require.NoError(t, plan.Config{}.Check())
}

func fill(s []int, v int) {
	for i := range s {
		s[i] = v
	}
}

func TestModesChooseTheirParts(t *testing.T) {
	for mode, want := range map[string][2]string{
		"": {gpuio.StackAsync, plan.DefaultPipeline}, static.ModeHelios: {gpuio.StackAsync, plan.DefaultPipeline},
		static.ModeInmem: {gpuio.StackAsync, plan.DefaultPipeline},
		static.ModeCPU:   {gpuio.StackCPU, plan.PipelinePrefetch},
		static.ModeMmap:  {gpuio.StackMmap, plan.PipelinePrefetch},
	} {
		c := plan.Config{Mode: mode}.WithDefaults()
		require.Equal(t, want, [2]string{c.IOStack, c.Pipeline}, mode)
		c = plan.Config{Mode: mode, IOStack: gpuio.StackMmap,
			Pipeline: plan.PipelineNone}.WithDefaults()
		require.Equal(t, [2]string{gpuio.StackMmap, plan.PipelineNone}, [2]string{c.IOStack,
			c.Pipeline},
			"each part can be set by itself")
	}
}

func TestTierRows(t *testing.T) {
	const rows, rowBytes = 1000, 512
	const gib = 1 << 30
	b := func(n int64) units.Budget { return units.Budget{Bytes: n} }
	for _, c := range []struct {
		name       string
		mode       string
		gpu, cpu   units.Budget
		avail, dev int64
		want       plan.TierSizes
		err        string
	}{
		{"none", "", b(0), b(0), gib, -1, plan.TierSizes{GPURows: 0, CPURows: 0}, ""},
		{"percent", "", units.Budget{Percent: 5}, units.Budget{Percent: 10}, gib, -1,
			plan.TierSizes{GPURows: 50, CPURows: 100}, ""},
		{"bytes round down to rows", "", b(1023), b(1536), gib, -1,
			plan.TierSizes{GPURows: 1, CPURows: 3}, ""},
		{"more than everything", "", b(600 * 512), b(gib / 2), gib, -1,
			plan.TierSizes{GPURows: 600, CPURows: 400}, ""},
		{"inmem", static.ModeInmem, b(0), b(0), gib, -1, plan.TierSizes{GPURows: 0, CPURows: 1000}, ""},
		{"inmem with a gpu tier", static.ModeInmem, units.Budget{Percent: 30}, b(0), gib, -1,
			plan.TierSizes{GPURows: 300, CPURows: 700}, ""},
		{"gpu too large", "", b(2 * gib), b(0), gib, -1, plan.TierSizes{},
			"option gpu-cache 2147483648 asks for 2 GiB, but memory"},
		{"cpu too large", "", b(0), b(2 * gib), gib, -1, plan.TierSizes{},
			"option cpu-cache 2147483648 asks for 2 GiB"},
		{"both too large", "", b(gib / 2), b(gib / 2), gib, -1, plan.TierSizes{},
			"beside the option gpu-cache of 512 MiB has room for 448 MiB"},
		{"own memory", "", b(gib / 2), b(gib / 2), gib, gib,
			plan.TierSizes{GPURows: 1000, CPURows: 0}, ""},
		{"own memory too small", "", b(gib / 2), b(0), gib, gib / 4, plan.TierSizes{},
			"device memory has room for 256 MiB"},
		{"inmem too large", static.ModeInmem, b(0), b(0), plan.HostSlack + 1000, -1, plan.TierSizes{},
			"option mode inmem needs"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := plan.Config{Mode: c.mode, GPUCache: c.gpu,
				CPUCache: c.cpu}.TierRows(rows,
				rowBytes, c.avail, c.dev)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				require.Equal(t, errs.Usage, errs.ClassOf(err))
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
}

func TestDynamicRefusals(t *testing.T) {
	for want, set := range map[string]func(*plan.Config){
		"option superbatch needs tiers that know": func(c *plan.Config) { c.Superbatch = 5 },
		"option superbatch-dir needs tiers":       func(c *plan.Config) { c.SuperbatchDir = "d" },
		"option superbatch -1 is below 1": func(c *plan.Config) {
			c.Policy, c.Superbatch = plan.PolicyBelady, -1
		},
		"option superbatch-disk -1 is below 0": func(c *plan.Config) {
			c.Policy, c.SuperbatchDisk = plan.PolicyBelady, -1
		},
		"option policy belady has no tier": func(c *plan.Config) {
			c.Mode, c.Policy = static.ModeMmap, plan.PolicyBelady
		},
		"option policy belady keeps what comes next": func(c *plan.Config) {
			c.Policy, c.Hotness = plan.PolicyBelady, plan.HotnessDegree
		},
		"neighbor-cache shared is memory that": func(c *plan.Config) {
			c.Topology, c.NeighborShared = plan.TopologySSD, true
		},
		"option neighbor-cache needs a topology that stays": func(c *plan.Config) {
			c.Policy, c.NeighborShared = plan.PolicyBelady, true
		},
		"every row in memory":           func(c *plan.Config) { c.Mode, c.Policy = static.ModeInmem, plan.PolicyBelady },
		"unknown option policy \"arc\"": func(c *plan.Config) { c.Policy = "arc" },
		"option cache-line needs":       func(c *plan.Config) { c.CacheLine = 4096 },
		"option cache-line 100 is not": func(
			c *plan.Config) {
			c.Policy, c.CacheLine = policy.LRU, 100
		},
		"option window 65 is not": func(
			c *plan.Config) {
			c.Policy, c.Window = policy.LRU, 65
		},
		"option window 4 keeps": func(c *plan.Config) { c.Window = 4 },
		"option mode inmem has every row": func(
			c *plan.Config) {
			c.Mode, c.Policy = static.ModeInmem, policy.LRU
		},
		"option accumulate 1 is not": func(
			c *plan.Config) {
			c.Policy, c.Accumulate = policy.LRU, 1
		},
		"choose option policy other": func(c *plan.Config) { c.Accumulate = 0.5 },
		"stack async has several sets": func(
			c *plan.Config) {
			c.Policy, c.Accumulate, c.Pipeline = policy.LRU, 0.5, plan.PipelineNone
		},
		"option pipeline deep reads hop by hop": func(
			c *plan.Config) {
			c.Policy, c.Accumulate, c.IOStack = policy.LRU, 0.5, gpuio.StackSync
		},
		"neither is given": func(c *plan.Config) { c.Pipeline = plan.PipelineRunAhead },
		"gives each operator all SMs": func(
			c *plan.Config) {
			c.Pipeline, c.SMs.Train = plan.PipelineSeries, 2
		},
		"option neighbor-cache needs": func(
			c *plan.Config) {
			c.NeighborCache = units.Budget{Percent: 5}
		},
		"-1 is not from 1 to": func(
			c *plan.Config) {
			c.Sampler, c.Fanouts = graph.Ladies, []int{-1}
		},
		"option batch-dependency 2: with sampler neighbor": func(
			c *plan.Config) {
			c.BatchDependency = 2
		},
		"option batch-dependency -1 is not from 1": func(
			c *plan.Config) {
			c.Sampler, c.BatchDependency = graph.Labor, -1
		},
		"unknown option sampler \"x\"":  func(c *plan.Config) { c.Sampler = "x" },
		"unknown option topology \"x\"": func(c *plan.Config) { c.Topology = "x" },
		"unknown option tune \"x\"":     func(c *plan.Config) { c.Tune = "x" },
	} {
		c := plan.Config{}
		set(&c)
		err := c.Check()
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err), want)
	}
	c := plan.Config{Mode: dynamic.ModeGIDS}.WithDefaults()
	require.NoError(t, c.Check())
	require.Equal(t, []any{gpuio.StackSync, plan.PipelineRunAhead, policy.Random, int64(
		dynamic.BaMLine),
		dynamic.GIDSWindow, dynamic.GIDSAccumulate, plan.HotnessPageRank},
		[]any{c.IOStack, c.Pipeline, c.Policy, c.CacheLine, c.Window, c.Accumulate, c.Hotness})
	c = plan.Config{Mode: dynamic.ModeBaM, CheckReads: plan.ChecksOn}.WithDefaults()
	require.NoError(t, c.Check())
	require.Equal(t, []any{gpuio.StackSync, plan.PipelineNone, policy.Random, int64(
		dynamic.BaMLine), 0, 0.0},
		[]any{c.IOStack, c.Pipeline, c.Policy, c.CacheLine, c.Window, c.Accumulate})
	for _, f := range []func(*plan.Config){
		func(c *plan.Config) { c.IOStack = gpuio.StackAsync },
		func(c *plan.Config) { c.Pipeline = plan.DefaultPipeline },
		func(c *plan.Config) { c.Policy = plan.PolicyStatic },
		func(c *plan.Config) { c.Window, c.Accumulate = plan.Off, plan.Off },
	} {
		c := plan.Config{Mode: dynamic.ModeGIDS}
		f(&c)
		require.NoError(t, c.Check(), "each part can be set by itself")
	}
}
