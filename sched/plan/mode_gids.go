package plan

import (
	"helios/cache/policy"
	"helios/gpuio"
)

// ModeGIDS is the data path of GIDS (Park et al., VLDB 2024).
const ModeGIDS = "gids"

// The defaults of GIDS (its evaluation, section 4): the window's depth, the accumulator's target
// and the constant CPU buffer's share of the features.
const (
	GIDSWindow     = 8
	GIDSAccumulate = 0.95
	gidsCPUPercent = 10
)

var gidsMode = &Mode{
	Name:    ModeGIDS,
	Summary: "bam with window buffer, constant CPU buffer and accumulator",
	Fill: func(c *Config) {
		c.autoGPUTier()
		c.cpuTier(gidsCPUPercent)
		orText(&c.IOStack, gpuio.StackSync)
		orText(&c.Policy, policy.Random)
		orText(&c.Hotness, HotnessPageRank)
		c.pageLines()
		if c.Dynamic() { // a static tier has neither
			orNumber(&c.Window, GIDSWindow)
			if !c.Stack().Overlaps && (c.Pipeline == "" || !c.PerHop()) {
				orNumber(&c.Accumulate, GIDSAccumulate)
			}
		}
		if c.Window <= 0 && c.Accumulate <= 0 { // nothing to run ahead for
			orText(&c.Pipeline, PipelineNone)
		}
		orText(&c.Pipeline, PipelineRunAhead)
	},
}
