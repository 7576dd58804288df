package sched

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/units"
)

func TestConfigRefusals(t *testing.T) {
	for want, set := range map[string]func(*Config){
		"--mode \"gpu\" is not known":   func(c *Config) { c.Mode = "gpu" },
		"--pipeline \"x\" is not known": func(c *Config) { c.Pipeline = "x" },
		"--io-stack \"x\" is not known": func(c *Config) { c.IOStack = "x" },
		"--model \"mlp\" is not known":  func(c *Config) { c.Model = "mlp" },
		"no multiple of 3 heads":        func(c *Config) { c.Model, c.Heads = "gat", 3 },
		"options of model gat":          func(c *Config) { c.AttentionDropout = 0.5 },
		"option of model gin":           func(c *Config) { c.LearnEps = true },
		"--fanout [10 0]":               func(c *Config) { c.Fanouts = []int{10, 0} },
		"--fanout names 9 hops":         func(c *Config) { c.Fanouts = make([]int, 9); fill(c.Fanouts, 1) },
		"--batch-size -1":               func(c *Config) { c.Batch = -1 },
		"--hidden -1":                   func(c *Config) { c.Hidden = -1 },
		"--epochs -1":                   func(c *Config) { c.Epochs = -1 },
		"--prefetch-depth 65":           func(c *Config) { c.Depth = 65 },
		"--lr NaN":                      func(c *Config) { c.LR = math.NaN() },
		"--lr -1":                       func(c *Config) { c.LR = -1 },
		"--dropout 1":                   func(c *Config) { c.Dropout = 1 },
		"--weight-decay -1":             func(c *Config) { c.WeightDecay = -1 },
		"--resume needs --checkpoint":   func(c *Config) { c.Resume = true },
		"--checkpoint-every -1":         func(c *Config) { c.CheckpointEvery = -1 },
		"--gpu-cache -1":                func(c *Config) { c.GPUCache.Bytes = -1 },
		"--cpu-cache 101%":              func(c *Config) { c.CPUCache.Percent = 101 },
	} {
		c := Config{}
		set(&c)
		err := c.withDefaults().check()
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err), want)
	}
	require.NoError(t, Config{}.withDefaults().check())
}

func fill(s []int, v int) {
	for i := range s {
		s[i] = v
	}
}

func TestModesChooseTheirParts(t *testing.T) {
	for mode, want := range map[string][2]string{
		"": {StackAsync, PipelineDeep}, ModeHelios: {StackAsync, PipelineDeep}, ModeInmem: {StackAsync, PipelineDeep},
		ModeCPU: {StackCPU, PipelinePrefetch}, ModeMmap: {StackMmap, PipelinePrefetch},
	} {
		c := Config{Mode: mode}.withDefaults()
		require.Equal(t, want, [2]string{c.IOStack, c.Pipeline}, mode)
		c = Config{Mode: mode, IOStack: StackMmap, Pipeline: PipelineNone}.withDefaults()
		require.Equal(t, [2]string{StackMmap, PipelineNone}, [2]string{c.IOStack, c.Pipeline}, "each part can be set by itself")
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
		want       budgets
		err        string
	}{
		{"none", "", b(0), b(0), gib, -1, budgets{gpuRows: 0, cpuRows: 0}, ""},
		{"percent", "", percent(5), percent(10), gib, -1, budgets{gpuRows: 50, cpuRows: 100}, ""},
		{"bytes round down to rows", "", b(1023), b(1536), gib, -1, budgets{gpuRows: 1, cpuRows: 3}, ""},
		{"more than everything", "", b(600 * 512), b(gib / 2), gib, -1, budgets{gpuRows: 600, cpuRows: 400}, ""},
		{"inmem", ModeInmem, b(0), b(0), gib, -1, budgets{gpuRows: 0, cpuRows: 1000}, ""},
		{"inmem with a gpu tier", ModeInmem, percent(30), b(0), gib, -1, budgets{gpuRows: 300, cpuRows: 700}, ""},
		{"gpu too large", "", b(2 * gib), b(0), gib, -1, budgets{}, "--gpu-cache 2147483648 asks for 2 GiB, but memory"},
		{"cpu too large", "", b(0), b(2 * gib), gib, -1, budgets{}, "--cpu-cache 2147483648 asks for 2 GiB"},
		{"both too large", "", b(gib / 2), b(gib / 2), gib, -1, budgets{}, "beside the --gpu-cache of 512 MiB has room for 448 MiB"},
		{"own memory", "", b(gib / 2), b(gib / 2), gib, gib, budgets{gpuRows: 1000, cpuRows: 0}, ""},
		{"own memory too small", "", b(gib / 2), b(0), gib, gib / 4, budgets{}, "device memory has room for 256 MiB"},
		{"inmem too large", ModeInmem, b(0), b(0), slack + 1000, -1, budgets{}, "--mode inmem needs"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Config{Mode: c.mode, GPUCache: c.gpu, CPUCache: c.cpu}.tierRows(rows, rowBytes, c.avail, c.dev)
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

func TestFingerprintNamesTheField(t *testing.T) {
	a := fingerprint{Dataset: "u", Edges: 3, InDim: 1, Classes: 2, Model: "sage", Fanouts: []int{2, 2}, Batch: 4, Hidden: 8, LR: 0.1, Seed: 9}
	_, _, _, differ := a.differs(a)
	require.False(t, differ)
	for want, set := range map[string]func(*fingerprint){
		"dataset": func(f *fingerprint) { f.Dataset = "v" }, "edges": func(f *fingerprint) { f.Edges = 0 },
		"in_dim": func(f *fingerprint) { f.InDim++ }, "classes": func(f *fingerprint) { f.Classes++ },
		"model": func(f *fingerprint) { f.Model = "gcn" }, "fanout": func(f *fingerprint) { f.Fanouts = []int{2, 3} },
		"batch-size": func(f *fingerprint) { f.Batch++ }, "hidden": func(f *fingerprint) { f.Hidden++ },
		"lr": func(f *fingerprint) { f.LR++ }, "dropout": func(f *fingerprint) { f.Dropout = 0.5 },
		"feature-dropout": func(f *fingerprint) { f.FeatureDropout = 0.5 },
		"heads":           func(f *fingerprint) { f.Heads = 4 }, "attention-dropout": func(f *fingerprint) { f.AttentionDropout = 0.5 },
		"learn-eps": func(f *fingerprint) { f.LearnEps = true },
		"draws":     func(f *fingerprint) { f.Draws = drawsByBatch }, "weight-decay": func(f *fingerprint) { f.WeightDecay = 0.5 }, "seed": func(f *fingerprint) { f.Seed++ },
	} {
		b := a
		set(&b)
		field, _, _, ok := b.differs(a)
		require.True(t, ok)
		require.Equal(t, want, field)
	}
}
