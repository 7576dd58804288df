package ginex

import (
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/plan"
)

// System knows a superbatch of mini-batches before the first of them trains.
var System = plan.System{
	Runs: func(c *plan.Config) bool {
		return planned(c) || c.Superbatches && c.Policy == plan.PolicyStatic
	},
	Settings:   func(c *plan.Config) any { return &c.SuperbatchSettings },
	CheckAsked: checkAsked,
	Elsewhere: func(_ plan.Config, key string) error {
		return errs.New(errs.Usage,
			"%v needs tiers that know the mini-batches to come; use %v %s, or leave it out",
			errs.Key(key), errs.Key("policy"), plan.PolicyBelady)
	},
	Traits: func(c *plan.Config) plan.Traits {
		return plan.Traits{ByHotness: !planned(c), Staged: true, Ahead: true, Changes: planned(c),
			Lends: lends(c), Writes: true}
	},
	Divide: divide,
}

// planned reports whether rows come and go by what will be accessed.
func planned(c *plan.Config) bool { return c.Policy == plan.PolicyBelady }

// checkAsked refuses tiers that can hold nothing, and hotness where nothing is placed by it.
func checkAsked(asked, c plan.Config) error {
	none := units.Budget{}
	switch {
	case !planned(&c):
		return nil
	case !c.GPUCacheAuto && c.GPUCache == none && c.CPUCache == none && asked.GPUCache == none &&
		asked.CPUCache == none:
		return errs.New(errs.Usage,
			"%v %s has no tier to keep anything in; give %v or %v, or use %v %s",
			errs.Key("policy"), c.Policy, errs.Key("gpu-cache"), errs.Key("cpu-cache"),
			errs.Key("policy"), plan.PolicyStatic)
	case asked.HotnessAsked():
		return errs.New(errs.Usage,
			"%v %s keeps what comes next, whatever is hot; leave %v, %v and %v out, or use %v %s",
			errs.Key("policy"), c.Policy, errs.Key("hotness"), errs.Key("hotness-dir"),
			errs.Key("presample-epochs"), errs.Key("policy"), plan.PolicyStatic)
	}
	return nil
}

// ModeGinex is the name of Ginex's data path.
const ModeGinex = "ginex"

// Ginex is the data path of Ginex (Park et al., VLDB 2022).
var Ginex = plan.Mode{
	Name:    ModeGinex,
	Summary: "superbatches are sampled first, then CPU threads read what a provably optimal CPU tier misses",
	Fill: func(c *plan.Config) {
		c.CPUTier(10)
		plan.OrText(&c.IOStack, gpuio.StackCPU)
		plan.OrText(&c.Pipeline, plan.PipelinePrefetch)
		plan.OrText(&c.Policy, plan.PolicyBelady)
		plan.OrNumber(&c.Depth, 3) // few rows of a mini-batch are read: more of them keep SSDs busy
		c.Superbatches = c.Policy == plan.PolicyStatic
		if System.Runs(c) && c.Topology == plan.TopologySSD && c.NeighborCache == (units.Budget{}) {
			c.NeighborShared = true
		}
	},
	Baselines: []plan.Baseline{
		// Ginex with PaGraph's cache of features, as in ali+pg.
		{Name: "ginex-pg", Options: [][2]string{{"policy", plan.PolicyStatic},
			{"hotness", plan.HotnessOutDegree}, {"topology", plan.TopologySSD}}},
	},
}

// longest returns the limit of a superbatch's mini-batches in a pass of n. One without a given
// length may have them all, or a quarter where the next one is sampled while one trains.
func longest(c *plan.Config, n int) int {
	switch {
	case c.Superbatch > 0:
		return c.Superbatch
	case c.SuperbatchOverlap:
		return max((n+3)/4, 1)
	}
	return max(n, 1)
}

// folder returns the folder on whose file system superbatches are kept; dataset is the dataset's
// own.
func folder(c *plan.Config, dataset string) string {
	if c.SuperbatchDir == "" {
		return dataset
	}
	return c.SuperbatchDir
}
