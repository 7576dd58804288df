package plan

import "helios/gpuio"

// ModeGinex is the data path of Ginex (Park et al., VLDB 2022).
const ModeGinex = "ginex"

var ginexMode = &Mode{
	Name:    ModeGinex,
	Summary: "superbatches are sampled first, then CPU threads read what a provably optimal CPU tier misses",
	Fill: func(c *Config) {
		c.cpuTier(10)
		orText(&c.IOStack, gpuio.StackCPU)
		orText(&c.Pipeline, PipelinePrefetch)
		orText(&c.Policy, PolicyBelady)
		orText(&c.Topology, TopologySSD)
		c.SuperbatchFill, c.Superbatches = c.Planned(), c.Policy == PolicyStatic
		if c.Superbatched() {
			c.shareNeighborCache()
		}
	},
	Baselines: []Baseline{
		// Ginex, but for the cache of features, which is PaGraph's as in ali+pg: superbatches are
		// sampled with the whole budget for neighbour lists, then it is the static cache's, which
		// is read anew
		{Name: "ginex-pg", Options: [][2]string{{"policy", PolicyStatic},
			{"hotness", HotnessOutDegree}}},
	},
}
