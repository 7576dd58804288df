package static

import (
	"helios/gpuio"
	"helios/internal/errs"
	"helios/sched/plan"
)

// System keeps the rows that are hottest before training. It runs every policy that no other
// system does.
var System = plan.System{
	Runs:   func(*plan.Config) bool { return true },
	Traits: func(*plan.Config) plan.Traits { return plan.Traits{ByHotness: true} },
}

// The modes with static tiers.
const (
	ModeHelios = plan.DefaultMode
	ModeCPU    = "cpu"   // systems whose CPU manages the reads
	ModeMmap   = "mmap"  // PyG+, and DGL on a mapped file
	ModeInmem  = "inmem" // the upper bound: no batch reads an SSD
)

// Helios is the data path of Helios.
var Helios = plan.Mode{
	Name:    ModeHelios,
	Summary: "the GPU submits reads and goes on; static GPU and CPU tiers hold the hottest rows",
	Fill: func(c *plan.Config) {
		c.AutoGPUTier()
		c.CPUTier(10)
	},
}

// CPU is the data path of systems whose CPU manages the reads.
var CPU = plan.Mode{
	Name:    ModeCPU,
	Summary: "CPU threads read the SSDs and hand batches to the GPU; static CPU tier",
	Fill: func(c *plan.Config) {
		c.CPUTier(10)
		plan.OrText(&c.IOStack, gpuio.StackCPU)
		plan.OrText(&c.Pipeline, plan.PipelinePrefetch)
	},
	Baselines: []plan.Baseline{
		// AliGraph's cache of neighbour lists, and PaGraph's of features, which are those of the
		// nodes of the highest out-degree (Park et al., VLDB 2022, section 5.1)
		{Name: "ali+pg", Options: [][2]string{{"topology", plan.TopologySSD},
			{"hotness", plan.HotnessOutDegree}}},
	},
}

// Mmap is the data path of PyG+ and of DGL on a mapped file.
var Mmap = plan.Mode{
	Name:    ModeMmap,
	Summary: "rows are read through a mapping of the file, by the kernel's page cache",
	Fill: func(c *plan.Config) {
		plan.OrText(&c.IOStack, gpuio.StackMmap)
		plan.OrText(&c.Pipeline, plan.PipelinePrefetch)
	},
	Baselines: []plan.Baseline{
		// maps the topology, too (Park et al., VLDB 2022, section 5.1)
		{Name: "pyg+", Options: [][2]string{{"topology", plan.TopologySSD}}},
	},
}

// Inmem has every row in memory.
var Inmem = plan.Mode{
	Name:     ModeInmem,
	Summary:  "every row is in memory before the first batch: the bound that the others aim at",
	InMemory: true,
	Fill:     func(c *plan.Config) { c.AutoGPUTier() },
	Check: func(c plan.Config) error {
		if c.Policy == plan.PolicyStatic {
			return nil
		}
		return errs.New(errs.Usage,
			"%v %s: %v %s has every row in memory, so that nothing comes or goes; leave it out, or use %v %s",
			errs.Key("policy"), c.Policy, errs.Key("mode"), c.Mode, errs.Key("mode"),
			plan.DefaultMode)
	},
}
