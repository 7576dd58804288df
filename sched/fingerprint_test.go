package sched

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gnn"
	"helios/sched/plan"
)

func TestFingerprintNamesTheField(t *testing.T) {
	a := fingerprint{
		Config: plan.Config{ModelSettings: gnn.ModelSettings{Model: "sage", Hidden: 8},
			Fanouts: []int{2, 2}, Batch: 4, LR: 0.1, Seed: 9},
		printedFacts: printedFacts{Dataset: "u", Edges: 3, InDim: 1, Classes: 2}}
	_, _, _, differ := a.differs(a)
	require.False(t, differ)
	for want, set := range map[string]func(*fingerprint){
		"dataset":           func(f *fingerprint) { f.Dataset = "v" },
		"edges":             func(f *fingerprint) { f.Edges = 0 },
		"in_dim":            func(f *fingerprint) { f.InDim++ },
		"classes":           func(f *fingerprint) { f.Classes++ },
		"model":             func(f *fingerprint) { f.Model = "gcn" },
		"fanout":            func(f *fingerprint) { f.Fanouts = []int{2, 3} },
		"batch-size":        func(f *fingerprint) { f.Batch++ },
		"hidden":            func(f *fingerprint) { f.Hidden++ },
		"lr":                func(f *fingerprint) { f.LR++ },
		"dropout":           func(f *fingerprint) { f.Dropout = 0.5 },
		"feature-dropout":   func(f *fingerprint) { f.FeatureDropout = 0.5 },
		"heads":             func(f *fingerprint) { f.Heads = 4 },
		"attention-dropout": func(f *fingerprint) { f.AttentionDropout = 0.5 },
		"learn-eps":         func(f *fingerprint) { f.LearnEps = true },
		"heads-out":         func(f *fingerprint) { f.OutHeads = 1 },
		"activation":        func(f *fingerprint) { f.Activation = "elu" },
		"norm":              func(f *fingerprint) { f.Norm = "layer" },
		"residual":          func(f *fingerprint) { f.Residual = true },
		"lr-schedule":       func(f *fingerprint) { f.LRSchedule, f.Horizon = "cosine", 9 },
		"epochs":            func(f *fingerprint) { f.Horizon = 9 },
		"warmup":            func(f *fingerprint) { f.Warmup = 5 },
		"clip-norm":         func(f *fingerprint) { f.ClipNorm = 0.5 },
		"optimizer":         func(f *fingerprint) { f.Optimizer = "adamw" },
		"self-loops":        func(f *fingerprint) { f.SelfLoops = gnn.LoopsRemaining },
		"sampler":           func(f *fingerprint) { f.Sampler = "labor" },
		"batch-dependency":  func(f *fingerprint) { f.BatchDependency = 2 },
		"sample-epochs":     func(f *fingerprint) { f.SampleEpochs = 2 },
		"refresh":           func(f *fingerprint) { f.Refresh = 1 },
		"refresh-every":     func(f *fingerprint) { f.RefreshEvery = 1 },
		"shards":            func(f *fingerprint) { f.Shards = 2 },
		"draws":             func(f *fingerprint) { f.Draws = drawsByBatch },
		"weight-decay":      func(f *fingerprint) { f.WeightDecay = 0.5 },
		"seed":              func(f *fingerprint) { f.Seed++ },
	} {
		b := a
		set(&b)
		field, _, _, ok := b.differs(a)
		require.True(t, ok)
		require.Equal(t, want, field)
	}
}
