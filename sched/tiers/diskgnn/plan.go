package diskgnn

import (
	"strings"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/units"
	"helios/sched/plan"
)

// System samples all mini-batches before training and packs their rows on disk.
var System = plan.System{
	Settings: func(c *plan.Config) any { return &c.PackedSettings },
	Shared:   []string{"pages-on"},
	Fill: func(c *plan.Config) {
		if c.DiskBudget.IsZero() {
			c.DiskBudget.Times = defaultDiskTimes
		}
		plan.OrText(&c.PagesOn, plan.PagesFolder)
	},
	Check: check,
	Keeps: "what its own mini-batches need most",
	Traits: func(*plan.Config) plan.Traits {
		return plan.Traits{Staged: true, Writes: true,
			OneProcess: "its mini-batches are packed before training, for one process"}
	},
	Apart: func(c *plan.Config) *string {
		if c.PackedDir != "" || c.PagesOn == plan.PagesSSDs {
			return nil
		}
		return &c.PackedDir
	},
}

var _ = options.Define("packed-modes", func() []string { return []string{ModeDiskGNN} })

// ModeDiskGNN is the name of DiskGNN's data path.
const ModeDiskGNN = "diskgnn"

// The defaults of DiskGNN: the first disk budget that the paper's evaluation names, as a multiple
// of the features, and the GPU tier's share of them. The share is no measured size: the rows of
// both tiers are chosen when the mini-batches are laid out.
const (
	defaultDiskTimes = 3
	gpuPercent       = 5
)

// DiskGNN is the data path of DiskGNN (Liu et al., 2024).
var DiskGNN = plan.Mode{
	Name:    ModeDiskGNN,
	Summary: "mini-batches are sampled and their rows packed on disk beforehand; CPU threads read long runs of pages",
	Own:     &System,
	Fill: func(c *plan.Config) {
		if !c.GPUCacheAuto && c.GPUCache == (units.Budget{}) {
			c.GPUCache.Percent = gpuPercent
		}
		c.CPUTier(10)
		plan.OrText(&c.IOStack, gpuio.StackCPU)
		plan.OrText(&c.Pipeline, plan.PipelinePrefetch)
	},
}

func check(c plan.Config) error {
	switch {
	case !c.DiskBudget.IsSize():
		return errs.New(errs.Usage, "%v of %d bytes and %v times the features is no size",
			errs.Key("disk-budget"), c.DiskBudget.Bytes, c.DiskBudget.Times)
	case c.Policy != plan.PolicyStatic:
		return errs.New(errs.Usage,
			"%v %s: %v %s keeps the rows in memory for which its mini-batches were laid out; leave it out, or use %v %s",
			errs.Key("policy"), c.Policy, errs.Key("mode"), c.Mode, errs.Key("mode"),
			plan.DefaultMode)
	case c.GPUCacheAuto:
		return errs.New(errs.Usage,
			"%v auto: %v %s lays mini-batches out for a number of rows in memory, and what a GPU has free changes from run to run; give a size or a share",
			errs.Key("gpu-cache"), errs.Key("mode"), c.Mode)
	case c.PerHop():
		return errs.New(errs.Usage,
			"%v %s reads hop by hop, and %v %s reads a mini-batch's pages at once; use another one: %s",
			errs.Key("pipeline"), c.Pipeline, errs.Key("mode"), c.Mode,
			strings.Join(plan.PipelineNames((*plan.Pipeline).Whole), ", "))
	}
	return nil
}
