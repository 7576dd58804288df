package gnn

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/philox"
	"helios/internal/testing/difftest"
)

// Attention and its gradients are the host's to the bit, for heads of every width around a word, a
// warp and a stripe, at addresses that allow no wide access, with hubs, empty lists, parallel
// edges, blocks with weights, and dropout.
func TestGPUAttention(t *testing.T) {
	g := newKernRig(t, 21, difftest.Options{})
	shapes := [][2]int64{{1, 1}, {3, 2}, {8, 8}, {5, 3}, {2, 31}, {1, 64}, {4, 66}, {2, 129}}
	if testing.Short() {
		shapes = shapes[1:4]
	}
	for n, shape := range shapes {
		heads, dim := shape[0], shape[1]
		wide := heads * dim
		numDst := 1 + g.rng.Int64N(60)
		b := g.block(numDst, numDst+g.rng.Int64N(90), 9, uint32(g.rng.Int64N(numDst)))
		edges, odd := int64(len(b.src)), cuda.DevicePtr(n%3/2*4)
		floats := func(n int64) cuda.DevicePtr { return given(g, g.floats(n+1)) + odd }
		empty := func(n int64) cuda.DevicePtr { return blank[float32](g, n+1) + odd }
		p := gatParams{
			Indptr: given(g, b.indptr), Src: given(g, b.src), Z: floats(b.numSrc * wide),
			AttSrc: floats(wide), AttDst: floats(wide),
			ScoreSrc: blank[float32](g, b.numSrc*heads), ScoreDst: blank[float32](g, numDst*heads),
			Max: blank[float32](g, numDst*heads), Inverse: blank[float32](g, numDst*heads),
			Alpha: blank[float32](g, edges*heads), AlphaSelf: blank[float32](g, numDst*heads),
			Out:  empty(b.numSrc * wide),
			Grad: floats(numDst * wide), Dot: blank[float32](g, edges*heads),
			DotSelf: blank[float32](g, numDst*heads),
			DSrc:    blank[float32](g, b.numSrc*heads), DDst: blank[float32](g, numDst*heads),
			EdgePtr: blank[int64](g, edges+1), EdgeDst: blank[uint32](g, edges),
			TEnd: blank[uint32](g, b.numSrc), TEdge: blank[uint32](g, edges),
			NumDst: numDst, NumSrc: b.numSrc, Edges: edges, Dim: dim, Heads: heads,
		}
		if n%2 == 1 {
			p.Drop = dropout{Key: philox.Key(4, philox.StreamDropout), Epoch: 2, Batch: 9,
				Layer: attentionLayer, P: 0.3, Scale: 1 / (1 - 0.3)}
		}
		if n%3 == 1 {
			shares := make([]float32, b.numSrc)
			for j := range shares {
				shares[j] = float32(math.Exp(2 * g.rng.NormFloat64()))
			}
			p.SrcWeights = given(g, shares)
		}
		if n%2 == 0 {
			p.SelfWeights = blank[float32](g, numDst)
			both(g, "self_weights", aggParams{Indptr: p.Indptr, Src: p.Src, NumDst: numDst,
				NumSrc: b.numSrc, Edges: edges, SrcWeights: p.SrcWeights,
				SelfWeights: p.SelfWeights})
		}
		for _, k := range []string{"gat_score", "gat_softmax", "gat_sum", "gat_edges", "gat_dot",
			"gat_softmax_bwd"} {
			both(g, k, p)
		}
		lists := aggParams{
			Indptr: p.EdgePtr, Src: p.Src, NumDst: edges, NumSrc: b.numSrc, Edges: edges,
			TEnd: p.TEnd, TDst: p.TEdge,
			Weights: blank[float32](g, edges),
		}
		require.NoError(t, g.on.transposeGPU(g.q, &lists,
			blank[byte](g, transposeScratch(b.numSrc, edges))))
		var want [][]uint32 = make([][]uint32, b.numSrc)
		for e, j := range b.src {
			want[j] = append(want[j], uint32(e))
		}
		var order []uint32
		for _, l := range want {
			order = append(order, l...)
		}
		require.Equal(t, append([]uint32{}, order...),
			append([]uint32{}, got[uint32](g, p.TEdge, edges)...))
		both(g, "gat_score_bwd", p)
		both(g, "gat_sum_bwd", p)
		p.Scale, p.Rows = p.DSrc, b.numSrc
		both(g, "gat_scaled_sum", p)
		mean := p
		mean.Z, mean.Out = p.Grad, empty(numDst*dim)
		both(g, "gat_mean", mean)
		mean.Z, mean.Out = mean.Out, empty(numDst*wide)
		both(g, "gat_spread", mean)
	}
	require.Equal(t, len(shapes), g.dev.Launches()["gat_sum_bwd"])
	require.NoError(t, g.st.Synchronize(g.ctx))
}
