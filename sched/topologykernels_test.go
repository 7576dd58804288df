//go:build linux && (amd64 || arm64) && !nocuda

package sched

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/graph"
	"helios/internal/testing/wide"
	"helios/sched/plan"
	"helios/sched/report"
)

// TestTopologyOnSSDOnGPU: on a GPU the lists on storage are sampled by the host device beside it:
// the blocks that reach the device are those of a topology in memory, and training is the same to
// the bit.
func TestTopologyOnSSDOnGPU(t *testing.T) {
	d, feat, s := fiberRig(t)
	for i, v := range []struct {
		name string
		set  func(*plan.Config)
	}{
		{"gcn", func(c *plan.Config) { c.Model, c.GPUCache, c.Epochs = "gcn", percent(10), 1 }},
		{"labor", func(c *plan.Config) {
			c.Sampler, c.BatchDependency, c.Epochs = graph.Labor, 3, 1
		}},
		{"ladies",
			func(
				c *plan.Config) {
				c.Sampler, c.Fanouts, c.Epochs = graph.Ladies, []int{24, 24}, 1
			}},
	} {
		if wide.Lean() && i > 0 {
			break
		}
		t.Run(v.name, func(t *testing.T) {
			cfg := onFibers()
			v.set(&cfg)
			dev, _ := gpu(t, "")
			want := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
			require.NoError(t, want.err)
			cfg.Topology, cfg.NeighborCache = plan.TopologySSD, percent(30)
			dev, _ = gpu(t, "")
			got := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
			require.NoError(t, got.err)
			require.Equal(t, want.blocks, got.blocks)
			require.Equal(t, want.seen, got.seen)
			require.Equal(t, want.res.Epochs[0].Loss, got.res.Epochs[0].Loss)
			require.Equal(t, want.res.ParamsSHA256, got.res.ParamsSHA256)
			r := got.res.Epochs[0].TopologyReads
			require.NotNil(t, r)
			require.Positive(t, r.Bytes)
			require.Positive(t, r.CachedEdges)
			require.Positive(t, got.res.Epochs[0].StageSeconds.Sample)
			require.Equal(t, dev.Info().Code, got.res.Kernels)
		})
	}
}
