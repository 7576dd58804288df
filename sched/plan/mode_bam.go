package plan

import (
	"helios/cache/policy"
	"helios/gpuio"
)

// ModeBaM is the data path of BaM (Qureshi et al., ASPLOS 2023).
const ModeBaM = "bam"

// BaMLine is the bytes of a page of BaM's cache.
const BaMLine = 4096

var bamMode = &Mode{
	Name:    ModeBaM,
	Summary: "a warp submits a read and waits for it; lines come into the GPU tier and go",
	Fill: func(c *Config) {
		c.autoGPUTier()
		orText(&c.IOStack, gpuio.StackSync)
		orText(&c.Pipeline, PipelineNone)
		orText(&c.Policy, policy.Random)
		c.pageLines()
	},
}

// pageLines makes the lines of a dynamic tier BaM's pages, where no size is given.
func (c *Config) pageLines() {
	if c.Dynamic() {
		orNumber(&c.CacheLine, BaMLine)
	}
}
