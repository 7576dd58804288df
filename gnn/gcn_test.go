package gnn

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/graph"
)

func init() { registerReference("gcn", kindReference{sums: referenceGCN}) }

// referenceGCN is D^(-1/2)·(A+I)·D^(-1/2)·h·W + b (Kipf and Welling, ICLR 2017), in which the drawn
// neighbours stand for all: each counts as often as neighbours were left out. Where remaining self
// loops are added, A has no edge of a node to itself.
func referenceGCN(r *layer64, i int) []float64 {
	sum := make([]float64, len(r.h[i]))
	list, _ := r.others(i)
	for _, j := range list {
		w := r.share(j, list) * r.degree(i) / math.Sqrt((r.degree(i)+1)*(r.degree(int(j))+1))
		for k, f := range r.h[j] {
			sum[k] += w * f
		}
	}
	for k, f := range r.h[i] {
		sum[k] += f / (r.degree(i) + 1)
	}
	return times(sum, r.of("weight"), r.of("bias"))
}

func TestGCNByHand(t *testing.T) {
	g := fiveNodes(t)
	m := g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: "gcn"}, InDim: 2, Classes: 2,
		Layers: 1})
	setParam(t, m, "layer0.weight", 1, 0, 0, 1)
	setParam(t, m, "layer0.bias", 0, 7)
	require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), 0))
	out := make([]float32, 6)
	require.NoError(t, m.Embeddings(g.ctx, g.stream, out))
	// Node 0 (D=3): self 1/4, node 1 (D=1) 1/sqrt(4·2), nodes 2 and 3 (D=0) 1/sqrt(4·1).
	// Node 1 (D=1): self 1/2, node 4 (D=0) 1/sqrt(2). Node 2 (D=0): self 1.
	r2 := 1 / math.Sqrt2
	want := []float64{0 + 1*r2/2 + 2*0.5 + 3*0.5, 0.25 + r2/2 + 0.5 + 0.5 + 7, 0.5 + 4*r2,
		0.5 + r2 + 7, 2, 1 + 7}
	for i := range want {
		require.InDelta(t, want[i], out[i], 1e-6)
	}
}

// The correction for sampling: with 1 of 3 neighbours each weight counts three times, so that the
// mean over the three equally likely samples is the full sum.
func TestGCNSamplingIsUnbiased(t *testing.T) {
	sum, seen := 0.0, map[uint32]bool{}
	for seed := range 64 {
		g := newRig(t, rigConfig{nodes: 5, dim: 2, classes: 2, fanouts: []int{-1},
			batchSeeds: []int64{0},
			src:        []int64{1, 2, 3, 4}, dst: []int64{0, 0, 0, 1}})
		dt, err := graph.Attach(g.dev, g.topo)
		require.NoError(t, err)
		s, err := graph.NewSampler(g.dev, dt, graph.SamplerConfig{Fanouts: []int{1},
			Seed: uint64(seed), Degrees: true})
		require.NoError(t, err)
		mb, err := s.NewMiniBatch()
		require.NoError(t, err)
		require.NoError(t, s.Begin(g.ctx, g.stream, mb, 0, 0, []int64{0}))
		require.NoError(t, s.Hop(g.ctx, g.stream, mb, 0))
		other := uint32(cuda.View[int64](mb.Nodes.Ptr(), 2)[1])
		if !seen[other] {
			seen[other] = true
			copy(f32(g.x), []float32{0, 1, float32(other), 1})
			m := g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: "gcn"}, InDim: 2,
				Classes: 2, Layers: 1})
			setParam(t, m, "layer0.weight", 1, 0, 0, 1)
			require.NoError(t, m.Infer(g.stream, mb, g.x.Ptr(), 0))
			out := make([]float32, 2)
			require.NoError(t, m.Embeddings(g.ctx, g.stream, out))
			sum += float64(out[0]) / 3
		}
		require.NoError(t, mb.Close())
		require.NoError(t, s.Close())
		require.NoError(t, dt.Close())
		if len(seen) == 3 {
			break
		}
	}
	require.Len(t, seen, 3)
	require.InDelta(t, 1/math.Sqrt(8)+2*0.5+3*0.5, sum, 1e-6)
}

// A node with edges to itself, one or two, has one self loop, and its degree leaves them out: the
// numbers are those of GCNConv of PyG 2.5.3 over the same edges and weights.
func TestGCNOverSelfLoopsAsPyG(t *testing.T) {
	g := loopedNodes(t)
	m := g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: "gcn",
		SelfLoops: LoopsRemaining}, InDim: 2, Classes: 2, Layers: 1})
	setParam(t, m, "layer0.weight", 1, -1, 0.5, 2)
	setParam(t, m, "layer0.bias", 0.25, -0.5)
	g.checkInfer(t, m, 3.905330181121826, -0.1464466154575348, 4.181980133056641,
		-1.4142135381698608, 2.75, -0.5)
}
