package plan

import (
	"helios/gpuio"
	"helios/graph/partition"
	"helios/internal/units"
)

// ModeHier is the data path of HierBatching.
const ModeHier = "hier"

// The defaults of HierBatching: the share of the nodes whose rows and lists are always there, and
// the GPU tier that has room for their rows.
const (
	hierStatic     = 2
	hierGPUPercent = 5
)

var hierMode = &Mode{
	Name:        ModeHier,
	Summary:     "parts of the graph are loaded together in long reads, and mini-batches are sampled within them and the hottest nodes",
	PartOrders:  []string{PartsDispersed},
	Partitioner: partition.Stream,
	Fill: func(c *Config) {
		if !c.GPUCacheAuto && c.GPUCache == (units.Budget{}) {
			c.GPUCache.Percent = hierGPUPercent
		}
		c.fillMegaTiers()
		if c.MegaBatched() && c.StaticNodes == 0 {
			c.StaticNodes = hierStatic
		}
		c.fillMega()
	},
}

// fillMegaTiers sets the data path that modes of mega-batches share.
func (c *Config) fillMegaTiers() {
	if (c.CPUCache == units.Budget{}) {
		c.CPUCache = defaultMegaCPU
	}
	orText(&c.IOStack, gpuio.StackCPU)
	orText(&c.Pipeline, PipelinePrefetch)
	orText(&c.Topology, TopologySSD) // training has its own; only evaluation reads it
}
