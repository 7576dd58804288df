package plan

import (
	"strings"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/units"
)

// ModeDiskGNN is the data path of DiskGNN (Liu et al., 2024).
const ModeDiskGNN = "diskgnn"

// diskGNNGPUPercent is the GPU tier's share of the features. It is no measured size: the rows of
// both tiers are chosen when the mini-batches are laid out.
const diskGNNGPUPercent = 5

var diskgnnMode = &Mode{
	Name:    ModeDiskGNN,
	Summary: "mini-batches are sampled and their rows packed on disk beforehand; CPU threads read long runs of pages",
	Packed:  true,
	Fill: func(c *Config) {
		if !c.GPUCacheAuto && c.GPUCache == (units.Budget{}) {
			c.GPUCache.Percent = diskGNNGPUPercent
		}
		c.cpuTier(10)
		orText(&c.IOStack, gpuio.StackCPU)
		orText(&c.Pipeline, PipelinePrefetch)
		if !c.LaidOut() {
			return
		}
		if (c.DiskBudget == DiskBudget{}) {
			c.DiskBudget.Times = defaultDiskTimes
		}
		orText(&c.PagesOn, PagesFolder)
	},
	Check: func(c Config) error {
		if !c.LaidOut() {
			return nil
		}
		switch {
		case c.Dynamic() || c.Planned():
			return errs.New(errs.Usage,
				"%v %s: %v %s keeps the rows in memory for which its mini-batches were laid out; leave it out, or use %v %s",
				errs.Key("policy"), c.Policy, errs.Key("mode"), c.Mode, errs.Key("mode"),
				DefaultMode)
		case c.GPUCacheAuto:
			return errs.New(errs.Usage,
				"%v auto: %v %s lays mini-batches out for a number of rows in memory, and what a GPU has free changes from run to run; give a size or a share",
				errs.Key("gpu-cache"), errs.Key("mode"), c.Mode)
		case c.PerHop():
			return errs.New(errs.Usage,
				"%v %s reads hop by hop, and %v %s reads a mini-batch's pages at once; use another one: %s",
				errs.Key("pipeline"), c.Pipeline, errs.Key("mode"), c.Mode,
				strings.Join(PipelineNames((*Pipeline).whole), ", "))
		case c.Trace != "":
			return errs.New(errs.Usage,
				"%v %s reads packed pages, which a replay of %v cannot be held against; record the run in another mode: the accesses are the same",
				errs.Key("mode"), c.Mode, errs.Key("trace"))
		}
		return nil
	},
}
