package gnn

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func init() {
	registerReference("gin", kindReference{sums: referenceGIN,
		options: func(c *ModelConfig, own ownOptions) { c.LearnEps = own.learn }})
}

// referenceGIN is an MLP of (1+ε)·h_i + Σ h_j (Xu et al., ICLR 2019).
func referenceGIN(r *layer64, i int) []float64 {
	eps := 0.0
	if p := r.of("eps"); p.v != nil {
		eps = p.v[0]
	}
	sum := make([]float64, len(r.h[i]))
	for k, f := range r.h[i] {
		sum[k] = (1 + eps) * f
	}
	list, _ := r.neighbours(i)
	for _, j := range list {
		for k, f := range r.h[j] {
			sum[k] += r.weight(j) * f
		}
	}
	mid := times(sum, r.of("mlp0.weight"), r.of("mlp0.bias"))
	for k := range mid {
		mid[k] = referenceActivation(r.cfg, mid[k])
	}
	return times(mid, r.of("mlp1.weight"), r.of("mlp1.bias"))
}

// A closed form: the sum of a node, times 1 + ε, and its neighbour, through ReLU and the identity.
func TestSumByHand(t *testing.T) {
	g := newRig(t, rigConfig{nodes: 2, src: []int64{1}, dst: []int64{0}, dim: 2, classes: 2,
		seeds: 1, fanouts: []int{-1}})
	m := g.model(t, ModelConfig{
		ModelSettings: ModelSettings{Model: "gin", Hidden: 2, LearnEps: true},
		InDim:         2,
		Classes:       2,
		Layers:        1,
	})
	for _, p := range m.Params() {
		switch p.Name {
		case "layer0.mlp0.weight", "layer0.mlp1.weight":
			copy(f32(p.Value), []float32{1, 0, 0, 1})
		case "layer0.eps":
			f32(p.Value)[0] = 0.5
		}
	}
	copy(f32(g.x), []float32{1, -3, 2, 4})
	require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), 0))
	got := make([]float32, 2)
	require.NoError(t, m.Embeddings(g.ctx, g.stream, got))
	require.Equal(t, []float32{1.5 + 2, 0}, got) // -4.5 + 4 is below 0
}
