package gnn

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
)

// typedReference is testdata/typed/typed.json, which make.py beside it writes with PyTorch
// Geometric.
type typedReference struct {
	Types     []graph.NodeType
	Relations []struct {
		Name     string
		Src, Dst int
		From, To []int64
	}
	Features        map[string]flatTensor
	Seeds           []int64
	Labels          []int32
	Hidden, Classes int
	Cases           []struct {
		Model, Root    string
		Bases, Heads   int
		Hidden, Layers int // 0: the reference's, 2
		Dim            int // the only features of a row, of all types
		// Settings of what is between layers; Train: of a training step alone.
		Embed, Residual, Norm, Activation, Head string
		Featureless, Share, Train               bool
		Logits                                  flatTensor
		Loss                                    float64
		Params, Grads                           map[string]flatTensor
	}
}

type flatTensor struct {
	Rows, Cols int
	Values     []float32
}

func readTypedReference() (r typedReference) {
	text, err := os.ReadFile("testdata/typed/typed.json")
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		panic(err)
	}
	return r
}

// schema is that of the reference's graph.
func (r *typedReference) schema() *graph.Schema {
	s := &graph.Schema{Types: slices.Clone(r.Types)}
	for _, x := range r.Relations {
		s.Relations = append(s.Relations, graph.Relation{Name: x.Name, Src: x.Src, Dst: x.Dst})
	}
	return s
}

// topology is the reference's graph.
func (r *typedReference) topology(t testing.TB) *graph.Topology {
	s := r.schema()
	var lists []*graph.Topology
	for _, x := range r.Relations {
		src, dst := r.Types[x.Src].Nodes, r.Types[x.Dst].Nodes
		l, err := graph.FromEdges(max(src, dst), x.From, x.To, false)
		require.NoError(t, err)
		l.Indptr, l.NumNodes, l.Sources = l.Indptr[:dst+1], dst, src
		lists = append(lists, l)
	}
	topo, err := graph.NewTyped(s, lists)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, topo.Close()) })
	return topo
}

// typedRig is a mini-batch of a typed graph with rows as wide as the widest type's.
func typedRig(t testing.TB, dev cuda.Device, topo *graph.Topology, fanouts []int, seeds []int64,
	labels []int32, feature func(kind int, node int64, column int) float32) *rig {
	g := &rig{ctx: t.Context(), dev: dev, topo: topo, stream: newStream(t, dev)}
	dt, err := graph.Attach(dev, topo)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dt.Close()) })
	s, err := graph.NewSampler(dev, dt, graph.SamplerConfig{Fanouts: fanouts, Seed: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	g.mb, err = s.NewMiniBatch()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.mb.Close()) })
	require.NoError(t, s.Begin(g.ctx, g.stream, g.mb, 0, 0, seeds))
	for h := range fanouts {
		require.NoError(t, s.Hop(g.ctx, g.stream, g.mb, h))
	}
	stride := 0
	for _, kind := range topo.Schema.Types {
		stride = max(stride, kind.Dim)
	}
	nodes := cuda.View[int64](g.mb.Nodes.Ptr(), g.mb.HopEnd[len(fanouts)])
	rows := cuda.View[int64](g.mb.RowNumbers().Ptr(), g.mb.RowCount(len(fanouts)))
	x, row := make([]float32, max(len(rows)*stride, 1)), 0
	for h := range g.mb.TypeEnd {
		for kind := range topo.Schema.Types {
			lo, hi := g.mb.TypeRange(h, kind)
			for i := lo; i < hi && topo.Schema.Types[kind].Dim > 0; i++ {
				require.Equal(t, nodes[i], rows[row])
				for c := range topo.Schema.Types[kind].Dim {
					x[row*stride+c] = feature(kind, nodes[i]-topo.Schema.First(kind), c)
				}
				row++
			}
		}
		require.EqualValues(t, row, g.mb.RowCount(h))
	}
	g.x, g.labels = floats(t, dev, x), alloc(t, dev, int64(len(labels))*4)
	copy(cuda.View[int32](g.labels.Ptr(), int64(len(labels))), labels)
	return g
}

// Outputs, loss and gradients on a typed graph with an empty relation, a type without in-edges,
// self-loops, repeated edges and a hub are PyTorch Geometric's.
func TestTypedModelsEqualPyG(t *testing.T) {
	ref := readTypedReference()
	for _, c := range ref.Cases {
		topo, dim := ref.topology(t), 0
		for i := range topo.Schema.Types {
			kind := &topo.Schema.Types[i]
			if kind.Dim = cmp.Or(c.Dim, kind.Dim); strings.Contains(c.Embed, kind.Name) ||
				c.Featureless {
				kind.Dim = 0
			}
			dim = max(dim, kind.Dim)
		}
		for _, sms := range []int{1, 3} {
			name := fmt.Sprint(c.Model, c.Root, c.Bases, c.Dim, c.Embed, c.Residual, c.Norm, c.Head,
				c.Featureless, c.Layers, sms)
			t.Run(name, func(t *testing.T) {
				g := typedRig(t, host(t, sms), topo,
					slices.Repeat([]int{-1}, cmp.Or(c.Layers, 2)), ref.Seeds, ref.Labels,
					func(kind int, node int64, column int) float32 {
						f := ref.Features[ref.Types[kind].Name]
						return f.Values[int(node)*f.Cols+column]
					})
				m := g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: c.Model,
					Root: c.Root, Bases: c.Bases, Heads: c.Heads, Embed: c.Embed,
					Featureless: c.Featureless, Residual: c.Residual != "",
					ResidualLinear: c.Residual == "linear", Norm: c.Norm, ShareTypes: c.Share,
					Activation: c.Activation, Head: c.Head,
					Hidden: cmp.Or(c.Hidden, ref.Hidden)}, InDim: dim,
					Classes: ref.Classes, Layers: cmp.Or(c.Layers, 2),
					Schema: topo.Schema})
				learnt := m.Params()
				for len(learnt) > 0 && strings.Contains(learnt[len(learnt)-1].Name, "running") {
					learnt = learnt[:len(learnt)-1]
				}
				require.Len(t, learnt, len(c.Params))
				for _, p := range learnt {
					want, ok := c.Params[p.Name]
					require.True(t, ok, "parameter %s", p.Name)
					require.Equal(t, []int{want.Rows, want.Cols}, []int{p.Rows, p.Cols}, p.Name)
					copy(f32(p.Value), want.Values)
				}
				for _, train := range []bool{false, true} {
					if !train && c.Train {
						continue
					}
					err := m.Infer(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr())
					if train {
						err = m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), Step{LR: 0})
					}
					require.NoError(t, err)
					loss, _, counted, err := m.Outcome(g.ctx, g.stream)
					require.NoError(t, err)
					require.Equal(t, int64(len(ref.Labels)), counted)
					require.InEpsilon(t, c.Loss, loss, 1e-5)
					logits := make([]float32, len(c.Logits.Values))
					require.NoError(t, m.Logits(g.ctx, g.stream, logits))
					requireNear(t, "logits", c.Logits.Values, logits)
				}
				for i, p := range learnt {
					offset := int64(m.Params()[i].Value.Ptr()-m.params.ptr(0)) / 4
					requireNear(t, p.Name, c.Grads[p.Name].Values,
						cuda.View[float32](m.params.grad(offset), int64(p.Rows*p.Cols)))
				}
			})
		}
	}
}

func requireNear(t testing.TB, what string, want, got []float32) {
	require.Len(t, got, len(want), what)
	largest := 0.0
	for _, v := range want {
		largest = max(largest, math.Abs(float64(v)))
	}
	for i, v := range want {
		require.InDelta(t, v, got[i], 1e-5*max(largest, 5e-3), "%s[%d]", what, i)
	}
}

// A graph of one type and one relation trains rsage to sage's values, to the bit.
func TestRSageOfOneTypeIsSage(t *testing.T) {
	g := newRig(t, rigConfig{nodes: 500, edges: 4000, dim: 13, classes: 5, seeds: 60,
		fanouts: []int{5, 4, 3}, sms: 2})
	s := &graph.Schema{Types: []graph.NodeType{{Name: "node", Nodes: 500, Dim: 13}},
		Relations: []graph.Relation{{Name: "edge"}}}
	typed, err := graph.NewTyped(s, []*graph.Topology{g.topo})
	require.NoError(t, err)
	seeds := make([]int64, 60)
	for i := range seeds {
		seeds[i] = int64(i)
	}
	h := typedRig(t, g.dev, typed, []int{5, 4, 3}, seeds, g.y,
		func(_ int, node int64, column int) float32 { return float32(g.features[node][column]) })
	for _, set := range []ModelSettings{{},
		{Norm: "layer", ResidualLinear: true, Head: headLinear, Activation: "leaky"},
		{Norm: "batch", Residual: true, Head: headMLP}, {Head: headLinear}} {
		set.Model, set.Hidden, set.Dropout, set.FeatureDropout = "sage", 24, 0.3, 0.1
		cfg := ModelConfig{ModelSettings: set, InDim: 13, Classes: 5, Layers: 3, Seed: 9}
		a := g.model(t, cfg)
		cfg.Model, cfg.Schema = "rsage", s
		b := h.model(t, cfg)
		for i := range 3 {
			st := Step{Seed: 3, Epoch: 1, Batch: i, LR: 0.01, WeightDecay: 0.001}
			require.NoError(t, a.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), st))
			require.NoError(t, b.Train(h.stream, h.mb, h.x.Ptr(), h.labels.Ptr(), st))
			lossA, _, _, err := a.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			lossB, _, _, err := b.Outcome(h.ctx, h.stream)
			require.NoError(t, err)
			require.Equal(t, lossA, lossB)
		}
		for i, p := range a.Params() {
			require.Equal(t, f32(p.Value), f32(b.Params()[i].Value), "%s and %s", p.Name,
				b.Params()[i].Name)
		}
	}
}

// Models of typed graphs and of others refuse each other's, and options that they have not.
func TestTypedModelsAreRefused(t *testing.T) {
	s := &graph.Schema{Types: []graph.NodeType{{Name: "node", Nodes: 5, Dim: 3}},
		Relations: []graph.Relation{{Name: "edge"}}}
	shape := ModelConfig{InDim: 3, Classes: 2, Layers: 1}
	for _, c := range []struct {
		set    ModelSettings
		schema *graph.Schema
		class  errs.Class
		text   string
	}{
		{ModelSettings{Model: "rsage"}, nil, errs.Capability, "this graph has no types"},
		{ModelSettings{Model: "gat"}, s, errs.Capability, "this graph has types"},
		{ModelSettings{Model: "rsage", Embed: "64"}, s, errs.Usage, "the nodes have rows"},
		{ModelSettings{Model: "rsage", Embed: "paper=64"}, s, errs.Usage, "no such type"},
		{ModelSettings{Model: "rsage", Embed: "x"}, s, errs.Usage, "give a width"},
		{ModelSettings{Model: "rsage", Featureless: true}, s, errs.Usage, "model rgcn"},
		{ModelSettings{Model: "rgcn", Featureless: true, Residual: true}, s, errs.Usage, "residual"},
		{ModelSettings{Model: "rgcn", Featureless: true, EmbedMemory: 16}, s, errs.Capability,
			"embed-memory"},
		{ModelSettings{Model: "sage", ShareTypes: true}, nil, errs.Usage, "share-types"},
		{ModelSettings{Model: "sage", Embed: "64"}, nil, errs.Usage, "no types"},
		{ModelSettings{Model: "rsage", Head: "tail"}, s, errs.Usage, "head"},
		{ModelSettings{Model: "rsage", Root: "both"}, s, errs.Usage, "root"},
		{ModelSettings{Model: "rsage", LearnEps: true}, s, errs.Usage, "gin"},
		{ModelSettings{Model: "sage", Root: "none"}, nil, errs.Usage, "rsage"},
	} {
		cfg := shape
		cfg.ModelSettings, cfg.Schema = c.set, c.schema
		_, err := NewModel(host(t, 1), cfg)
		require.ErrorContains(t, err, c.text)
		require.Equal(t, c.class, errs.ClassOf(err), "%v", err)
	}
}
