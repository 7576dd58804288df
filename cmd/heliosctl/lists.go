package main

import (
	"helios/dataset"
	"helios/dataset/build"
	"helios/graph/partition"
	"helios/internal/hardware"
	"helios/internal/options"
	"helios/internal/simd"
	"helios/internal/ssdmodel"
	"helios/sched/planner"
)

// The lists that tags of the verbs' options name, beside those of package plan.
var _ = options.Define("hardware", hardware.Names) &&
	options.Define("ssd-models", ssdmodel.Names) &&
	options.Define("levels", simd.Names) &&
	options.Define("splits", func() []string { return dataset.Splits }) &&
	options.Define("graphs", planner.GraphNames) &&
	options.Define("sweep-keys", planner.SweepKeys) &&
	options.Define("sweep-starts", sweepStarts) &&
	options.Define("priced", func() []string { return planner.Priced }) &&
	options.Define("baselines", baselineNames) &&
	options.Define("graph-kinds", func() []string { return build.Kinds }) &&
	options.Define("partitioners", func() []string {
		return append([]string{partition.Auto}, partition.MethodNames()...)
	})
