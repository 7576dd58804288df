package plan

import "helios/gpuio"

// ModeGinex is the data path of Ginex (Park et al., VLDB 2022).
const ModeGinex = "ginex"

var _ = registerMode(Mode{
	Name:    ModeGinex,
	Summary: "superbatches are sampled first, then CPU threads read what a provably optimal CPU tier misses",
	Rank:    35,
	Fill: func(c *Config) {
		c.cpuTier(10)
		orText(&c.IOStack, gpuio.StackCPU)
		orText(&c.Pipeline, PipelinePrefetch)
		orText(&c.Policy, PolicyBelady)
		orText(&c.Topology, TopologySSD)
		if c.SuperbatchFill = c.Planned(); c.Planned() {
			c.shareNeighborCache()
		}
	},
})
