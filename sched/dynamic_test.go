package sched

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
)

// dyn is a configuration with a dynamic GPU tier.
func dyn(pol string, line int64, f func(*Config)) func(*Config) {
	return func(c *Config) {
		c.Policy, c.CacheLine, c.GPUCache = pol, line, percent(10)
		if f != nil {
			f(c)
		}
	}
}

// dynamicWays is every policy, both kinds of lines, every pipeline, window and accumulator, on several stacks.
var dynamicWays = []variant{
	{"bam", func(c *Config) { c.Mode, c.GPUCache = ModeBaM, percent(10) }, 2, 2},
	{"gids", func(c *Config) { c.Mode, c.GPUCache, c.CPUCache = ModeGIDS, percent(10), percent(10) }, 2, 2},
	{"lru deep by rows", dyn(policy.LRU, LineRow, nil), 2, 4},
	{"sieve deep lines window", dyn(policy.Sieve, 4096, func(c *Config) { c.Window = 2 }), 2, 4},
	{"clock prefetch accumulated", dyn(policy.Clock, LineRow, func(c *Config) {
		c.Pipeline, c.IOStack, c.Accumulate, c.CPUCache = PipelinePrefetch, StackSync, 0.5, percent(5)
	}), 2, 1},
	{"s3fifo series window accumulated cpu", dyn(policy.S3FIFO, 2048, func(c *Config) {
		c.Pipeline, c.IOStack, c.Accumulate, c.Window = PipelineSeries, StackCPU, 0.9, 3
	}), 1, 4},
	// The rest only in long tests.
	{"random run-ahead window alone", dyn(policy.Random, LineRow, func(c *Config) { c.Pipeline, c.Window = PipelineRunAhead, 16 }), 2, 4},
	{"lru intra mmap", dyn(policy.LRU, 4096, func(c *Config) { c.Pipeline, c.IOStack = PipelineIntra, StackMmap }), 2, 1},
	{"no slot", dyn(policy.LRU, 4096, func(c *Config) { c.GPUCache = percent(0); c.Window = 1 }), 2, 2},
	{"all of it", dyn(policy.Sieve, LineRow, func(c *Config) { c.GPUCache = percent(100) }), 2, 2},
	{"series static", func(c *Config) { c.Pipeline = PipelineSeries; caches(5, 10)(c) }, 2, 2},
	{"bam accumulated", func(c *Config) {
		c.Mode, c.GPUCache, c.Accumulate, c.Pipeline = ModeBaM, percent(10), 0.95, PipelineRunAhead
	}, 2, 2},
	{"gids without its parts", func(c *Config) {
		c.Mode, c.GPUCache, c.Window, c.Accumulate = ModeGIDS, percent(5), Off, Off
	}, 2, 2},
}

// Same seed, same losses, whatever the tier's policy, lines, window and pipeline.
func TestSameParametersByDynamicTiers(t *testing.T) {
	for _, g := range []graphSpec{tiny, packed, padded} {
		d, feat := g.open(t)
		sets := map[int]*ssdSet{1: bind(t, d, 1, ""), 2: bind(t, d, 2, ""), 4: bind(t, d, 4, "")}
		first := train(t, context.Background(), small(), d, feat, sets[2], 2, Observer{})
		require.NoError(t, first.err)
		for i, v := range dynamicWays {
			if testing.Short() && (g != tiny || i > 5) {
				continue
			}
			cfg := small()
			v.set(&cfg)
			r := train(t, context.Background(), cfg, d, feat, sets[v.ssds], v.workers, Observer{})
			require.NoError(t, r.err, v.name)
			require.Equal(t, first.blocks, r.blocks, v.name)
			require.Equal(t, first.res.ParamsSHA256, r.res.ParamsSHA256, v.name)
			for e := range first.res.Epochs {
				require.Equal(t, first.res.Epochs[e].Loss, r.res.Epochs[e].Loss, v.name)
				require.Equal(t, first.res.Epochs[e].ValAcc, r.res.Epochs[e].ValAcc, v.name)
			}
			t.Logf("%s: hits %.3f lines of %d, groups %d of %.1f, %+v", v.name, r.res.Epochs[1].HitRatio, r.res.CacheLineBytes,
				r.res.Epochs[1].ReadGroups, r.res.Epochs[1].GroupBatches, r.res.Accumulator)
		}
	}
}
