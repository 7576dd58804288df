package gnn

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func init() {
	registerReference("gat", kindReference{sums: referenceGAT,
		options: func(c *ModelConfig, own ownOptions) {
			c.Heads, c.AttentionDropout = own.heads, own.dropout
		}})
}

// referenceGAT is attention over a node and its neighbours: a softmax of LeakyReLU(a_dst·z_i +
// a_src·z_j) for each head (Veličković et al., ICLR 2018). Heads stand side by side; those of the
// last layer are averaged. Where remaining self loops are added, the weights of a node's edges to
// itself and of its loop make 1 together; each has a mask of its own.
func referenceGAT(r *layer64, i int) []float64 {
	w, attSrc, attDst := r.of("weight"), r.of("att_src"), r.of("att_dst")
	heads, f := attSrc.rows, attSrc.cols
	z := func(j uint32) []float64 { return rowTimes(r.h[j], w) }
	list, first := r.neighbours(i)
	_, left := r.others(i)
	all := append([]uint32{uint32(i)}, list...)
	out := make([]float64, heads*f)
	for k := range heads {
		dot := func(a tensor64, z []float64) (s float64) {
			for c := range f {
				s += a.elem(k, c) * z[k*f+c]
			}
			return s
		}
		own, sum := dot(attDst, z(uint32(i))), 0.0
		parts := make([]float64, len(all))
		for n, j := range all {
			s := own + dot(attSrc, z(j))
			if s < 0 {
				s *= 0.2
			}
			parts[n] = math.Exp(s)
			if n > 0 {
				parts[n] *= r.weight(j)
			} else {
				parts[n] *= 1 - left
			}
			sum += parts[n]
		}
		for n, j := range all {
			a := parts[n] / sum
			if n == 0 {
				a *= r.dropout(r.cfg.AttentionDropout, 128+r.l, i, k)
			} else {
				a *= r.dropout(r.cfg.AttentionDropout, 64+r.l, first+n-1, k)
			}
			for c := range f {
				out[k*f+c] += a * z(j)[k*f+c]
			}
		}
	}
	row := slices.Clone(r.of("bias").v)
	for k := range heads {
		for c := range f {
			if r.l == r.cfg.Layers-1 {
				row[c] += out[k*f+c] / float64(heads)
			} else {
				row[k*f+c] += out[k*f+c]
			}
		}
	}
	return row
}

// A closed form: two nodes, one edge, one head and the identity as weights.
func TestAttentionByHand(t *testing.T) {
	g := newRig(t, rigConfig{nodes: 2, src: []int64{1}, dst: []int64{0}, dim: 2, classes: 2,
		seeds: 1, fanouts: []int{-1}})
	m := g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: "gat", Heads: 1}, InDim: 2,
		Classes: 2, Layers: 1})
	set := func(name string, v ...float32) {
		for _, p := range m.Params() {
			if p.Name == name {
				copy(f32(p.Value), v)
			}
		}
	}
	set("layer0.weight", 1, 0, 0, 1)
	set("layer0.att_src", 1, 0)
	set("layer0.att_dst", 0, 1)
	set("layer0.bias", 0.5, -0.5)
	copy(f32(g.x), []float32{1, -3, 2, 4})
	require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), 0))
	got := make([]float32, 2)
	require.NoError(t, m.Embeddings(g.ctx, g.stream, got))
	// Scores: self -3+1 = -2, leaky -0.4; the neighbour -3+2 = -1, leaky -0.2.
	self, other := math.Exp(-0.4), math.Exp(-0.2)
	a, b := self/(self+other), other/(self+other)
	require.InDelta(t, a*1+b*2+0.5, got[0], 1e-6)
	require.InDelta(t, a*-3+b*4-0.5, got[1], 1e-6)
	_, err := NewModel(g.dev, ModelConfig{
		ModelSettings: ModelSettings{Model: "gat", Hidden: 10, Heads: 3},
		InDim:         2,
		Classes:       2,
		Layers:        2,
	})
	require.ErrorContains(t, err, "no multiple of 3 heads")
	_, err = NewModel(g.dev, ModelConfig{
		ModelSettings: ModelSettings{Model: "sage", Hidden: 10, Heads: 3},
		InDim:         2,
		Classes:       2,
		Layers:        2,
	})
	require.ErrorContains(t, err, "options of model gat")
}

// A node attends to itself once, whatever edges to itself it has: the numbers are those of GATConv
// of PyG 2.5.3 over the same edges and weights.
func TestGATOverSelfLoopsAsPyG(t *testing.T) {
	g := loopedNodes(t)
	m := g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: "gat", Heads: 2,
		SelfLoops: LoopsRemaining}, InDim: 2, Classes: 2, Layers: 1})
	setParam(t, m, "layer0.weight", 1, -1, 0.5, 0.75, 0.5, 2, -0.25, 1)
	setParam(t, m, "layer0.att_src", 0.5, -0.5, 1, 0.25)
	setParam(t, m, "layer0.att_dst", -1, 0.5, 0.25, -0.75)
	setParam(t, m, "layer0.bias", 0.25, -0.5)
	g.checkInfer(t, m, 2.1413583755493164, 0.5556817054748535, 3.1255595684051514,
		0.4377369284629822, 1.875, 0.75)
}
