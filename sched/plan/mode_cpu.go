package plan

import "helios/gpuio"

// ModeCPU is the data path of systems whose CPU manages the reads.
const ModeCPU = "cpu"

var cpuMode = &Mode{
	Name:    ModeCPU,
	Summary: "CPU threads read the SSDs and hand batches to the GPU; static CPU tier",
	Fill: func(c *Config) {
		c.cpuTier(10)
		orText(&c.IOStack, gpuio.StackCPU)
		orText(&c.Pipeline, PipelinePrefetch)
	},
	Baselines: []Baseline{
		// AliGraph's cache of neighbour lists, and PaGraph's of features, which are those of the
		// nodes of the highest out-degree (Park et al., VLDB 2022, section 5.1)
		{Name: "ali+pg", Options: [][2]string{{"topology", TopologySSD},
			{"hotness", HotnessOutDegree}}},
	},
}
