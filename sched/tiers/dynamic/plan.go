package dynamic

import (
	"helios/cache/policy"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/tiers/dynamic/spec"
)

// System has a GPU tier whose lines come and go with accesses.
var System = plan.System{
	Runs:     comesAndGoes,
	Settings: func(c *plan.Config) any { return &c.DynamicSettings },
	Fill: func(c *plan.Config) {
		plan.OrText(&c.Directory, policy.InSets) // the one that all cores work on
		plan.OrNumber(&c.CacheLine, spec.LineRow)
	},
	CheckAsked: func(asked, c plan.Config) error {
		if c.GPUCacheAuto || asked.GPUCache != (units.Budget{}) {
			return nil
		}
		return errs.New(errs.Usage,
			"{policy} %s: {mode} %s has no GPU tier by itself; add {gpu-cache}, or leave it out",
			c.Policy, c.Mode)
	},
	Elsewhere: elsewhere,
	Traits: func(*plan.Config) plan.Traits {
		return plan.Traits{ByHotness: true, Inclusive: true, Staged: true, LateTensor: true}
	},
}

// comesAndGoes reports whether rows come and go by what was accessed.
func comesAndGoes(c *plan.Config) bool {
	return c.Policy != "" && c.Policy != plan.PolicyStatic && c.Policy != plan.PolicyBelady
}

// elsewhere refuses settings of lines that come and go where none do.
func elsewhere(c plan.Config, key string) error {
	const resident = plan.PolicyStatic + " and " + plan.PolicyBelady
	if key == "window" {
		return errs.New(errs.Usage,
			"%v %d keeps the lines of coming batches from eviction, and static tiers evict none; choose %v other than %s, or leave it out",
			errs.Key(key), c.Window, errs.Key("policy"), resident)
	}
	return errs.New(errs.Usage,
		"%v needs a GPU tier whose lines come and go; choose %v other than %s, or leave it out",
		errs.Key(key), errs.Key("policy"), resident)
}

// The modes with a dynamic GPU tier.
const (
	ModeBaM  = "bam"
	ModeGIDS = "gids"
)

// BaMLine is the bytes of a page of BaM's cache.
const BaMLine = 4096

// BaM is the data path of BaM (Qureshi et al., ASPLOS 2023).
var BaM = plan.Mode{
	Name:    ModeBaM,
	Summary: "a warp submits a read and waits for it; lines come into the GPU tier and go",
	Fill: func(c *plan.Config) {
		c.AutoGPUTier()
		plan.OrText(&c.IOStack, gpuio.StackSync)
		plan.OrText(&c.Pipeline, plan.PipelineNone)
		plan.OrText(&c.Policy, policy.Random)
		pageLines(c)
	},
}

// pageLines gives lines the size of BaM's pages, unless a size is set.
func pageLines(c *plan.Config) {
	if comesAndGoes(c) {
		plan.OrNumber(&c.CacheLine, BaMLine)
	}
}

// The defaults of GIDS (its evaluation, section 4): the window's depth, the accumulator's target
// and the constant CPU buffer's share of the features.
const (
	GIDSWindow     = 8
	GIDSAccumulate = 0.95
	gidsCPUPercent = 10
)

// GIDS is the data path of GIDS (Park et al., VLDB 2024).
var GIDS = plan.Mode{
	Name:    ModeGIDS,
	Summary: "bam with window buffer, constant CPU buffer and accumulator",
	Fill: func(c *plan.Config) {
		c.AutoGPUTier()
		c.CPUTier(gidsCPUPercent)
		plan.OrText(&c.IOStack, gpuio.StackSync)
		plan.OrText(&c.Policy, policy.Random)
		plan.OrText(&c.Hotness, plan.HotnessPageRank)
		pageLines(c)
		if comesAndGoes(c) { // a static tier has neither
			plan.OrNumber(&c.Window, GIDSWindow)
			if !c.Stack().Overlaps && (c.Pipeline == "" || !c.PerHop()) {
				plan.OrNumber(&c.Accumulate, GIDSAccumulate)
			}
		}
		if c.Window <= 0 && c.Accumulate <= 0 { // nothing to run ahead for
			plan.OrText(&c.Pipeline, plan.PipelineNone)
		}
		plan.OrText(&c.Pipeline, plan.PipelineRunAhead)
	},
}
