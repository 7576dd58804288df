package plan

import "helios/gpuio"

// ModeCPU is the data path of systems whose CPU manages the reads.
const ModeCPU = "cpu"

var _ = registerMode(Mode{
	Name:    ModeCPU,
	Summary: "CPU threads read the SSDs and hand batches to the GPU; static CPU tier",
	Rank:    40,
	Fill: func(c *Config) {
		c.cpuTier(10)
		orText(&c.IOStack, gpuio.StackCPU)
		orText(&c.Pipeline, PipelinePrefetch)
	},
})
