package gnn

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func init() { registerReference("sage", kindReference{sums: referenceSAGE}) }

// referenceSAGE is h_i·W_self + mean(h_j)·W_neigh + b (Hamilton et al., NIPS 2017).
func referenceSAGE(r *layer64, i int) []float64 {
	mean := make([]float64, len(r.h[i]))
	list, _ := r.neighbours(i)
	for _, j := range list {
		share := r.share(j, list)
		for k, f := range r.h[j] {
			mean[k] += share * f
		}
	}
	own := times(r.h[i], r.of("self.weight"), r.of("bias"))
	return times(mean, r.of("neigh.weight"), tensor64{1, len(own), own})
}

func TestSageByHand(t *testing.T) {
	g := fiveNodes(t)
	m := g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: "sage"}, InDim: 2, Classes: 2,
		Layers: 1})
	setParam(t, m, "layer0.self.weight", 1, 0, 0, 10)
	setParam(t, m, "layer0.neigh.weight", 2, 0, 0, 100)
	setParam(t, m, "layer0.bias", 0.5, 0)
	require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), 0))
	out := make([]float32, 6)
	require.NoError(t, m.Embeddings(g.ctx, g.stream, out)) // one layer: the logits
	// Node 0: self (0,1), mean of nodes 1, 2, 3 = (2,1). Node 1: self (1,1), mean (4,1). Node 2:
	// self (2,1), no neighbours.
	require.Equal(t, []float32{0 + 2*2 + 0.5, 10 + 100, 1 + 2*4 + 0.5, 110, 2.5, 10}, out)
}
