//go:build linux && (amd64 || arm64) && !nocuda

package gnn

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/testing/difftest"
)

// Shares and sums of gradients are the host's to the bit, at addresses that allow no wide access,
// of lengths around a word and a warp, in place and not.
func TestGPUShardSum(t *testing.T) {
	g := newKernRig(t, 37, difftest.Options{})
	sizes := []int64{1, 3, 4, 64, 127, 1000}
	for n, size := range sizes {
		odd := cuda.DevicePtr(n % 3 / 2 * 4)
		floats := func() cuda.DevicePtr { return given(g, g.floats(size+1)) + odd }
		p := shardParams{Out: floats(), X: floats(), N: size, Weight: 0.3}
		both(g, "shard_sum", p)
		p.Y, p.Weight = floats(), 1
		both(g, "shard_sum", p)
		p.Out = p.Y
		both(g, "shard_sum", p)
		p.Out, p.Weight = p.X, 0.7
		both(g, "shard_sum", p)
	}
	require.NoError(t, g.st.Synchronize(g.ctx))
	require.Equal(t, 4*len(sizes), g.dev.Launches()["shard_sum"])
}

// Steps of several shards on the fake libcuda are the host's to the bit.
func TestGPUShards(t *testing.T) {
	dev, _ := fakeGPU(t)
	for _, norm := range Norms() {
		rigs, weights := shardRigs(t, 3, rigConfig{nodes: 60, edges: 300, dim: 6, classes: 4,
			fanouts: []int{4, 3}, sms: 2})
		cfg := ModelConfig{
			ModelSettings: ModelSettings{Model: "sage", Hidden: 8, Dropout: 0.3, Norm: norm},
			InDim:         6,
			Classes:       4,
			Layers:        2,
			Seed:          2,
		}
		host := rigs[0].sharded(t, cfg, 3)
		m, err := NewModel(dev, cfg)
		require.NoError(t, err)
		require.NoError(t, m.OpenShards(2, 0))
		var there []*driverRig
		for _, g := range rigs {
			there = append(there, g.onGPU(t, dev))
		}
		on := there[0]
		for step := range 2 {
			st := Step{Seed: 3, Epoch: step, LR: 0.01, WeightDecay: 0.1}
			gradients(t, host, rigs[0], rigs, weights, 0, 3, st)
			for s, d := range there {
				shard := st
				shard.Batch = s
				require.NoError(t, m.Gradient(on.stream, d.mb, d.x.Ptr(), d.labels.Ptr(), shard,
					Shard{s, 3, weights[s]}))
			}
			require.NoError(t, host.Apply(rigs[0].stream, st))
			require.NoError(t, m.Apply(on.stream, st))
			require.NoError(t, on.stream.Synchronize(on.ctx))
		}
		require.NoError(t, rigs[0].stream.Synchronize(rigs[0].ctx))
		require.Equal(t, shaOf(t, host), shaOf(t, m), norm)
		require.NoError(t, m.Close())
	}
}
