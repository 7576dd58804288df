package gnn

import (
	"fmt"
	"math"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/philox"
)

// The reference works in float64, edge by edge, on its own reading of the formulas.

type tensor64 struct {
	rows, cols int
	v          []float64
}

func (m tensor64) elem(i, j int) float64 { return m.v[i*m.cols+j] }

// layer64 is one layer of a model over a block, for a kind's float64 reference.
type layer64 struct {
	cfg     *ModelConfig
	l       int         // its number, from 0
	h       [][]float64 // its input rows, the destinations' first
	params  map[string]tensor64
	indptr  []int64
	src     []uint32
	weights []float32           // of sources, where whole layers are sampled; else nil
	degree  func(i int) float64 // in-degree of the node of input row i
	step    *Step               // nil: inference, without dropout
}

// of finds a parameter of the layer.
func (r *layer64) of(name string) tensor64 { return r.params[fmt.Sprintf("layer%d.%s", r.l, name)] }

// neighbours are the sources of destination i; the first of its edges has the number first.
func (r *layer64) neighbours(i int) (list []uint32, first int) {
	return r.src[r.indptr[i]:r.indptr[i+1]], int(r.indptr[i])
}

// others are the neighbours of destination i without itself where remaining self loops are added,
// and the weight of its edges to itself that are left out.
func (r *layer64) others(i int) (list []uint32, own float64) {
	all, _ := r.neighbours(i)
	for _, j := range all {
		if r.cfg.remaining() && int(j) == i {
			own += r.weight(j)
		} else {
			list = append(list, j)
		}
	}
	return list, own
}

// weight is the factor of source j in a list.
func (r *layer64) weight(j uint32) float64 {
	if r.weights == nil {
		return 1
	}
	return float64(r.weights[j])
}

// share is the factor of source j in the mean of a list.
func (r *layer64) share(j uint32, list []uint32) float64 {
	all := 0.0
	for _, k := range list {
		all += r.weight(k)
	}
	return r.weight(j) / all
}

// dropout is the factor of element (row, column) in a stream of draws.
func (r *layer64) dropout(p float64, stream, row, column int) float64 {
	if r.step == nil || p == 0 {
		return 1
	}
	words := philox.Block(philox.Key(r.step.Seed, philox.StreamDropout),
		[4]uint32{uint32(stream)<<24 | uint32(column/4), uint32(row), uint32(r.step.Epoch),
			uint32(r.step.Batch)})
	if philox.Float32(words[column%4]) < float32(p) {
		return 0
	}
	return 1 / (1 - float64(float32(p)))
}

// kindReference is a kind of model in float64. It reads the paper's formula edge by edge and shares
// nothing with the kernels.
type kindReference struct {
	// sums are those of destination i: what the layer computes before anything between layers.
	sums func(r *layer64, i int) []float64
	// options sets the options that only this kind has; nil: it has none.
	options func(c *ModelConfig, own ownOptions)
	file    string
}

// ownOptions are options that only some kinds have; each takes its own.
type ownOptions struct {
	learn   bool
	heads   int
	dropout float64
}

// references are the kinds' references, by name. KIND_test.go registers each.
var references = map[string]kindReference{}

// registerReference makes a kind's reference known. It is for init functions.
func registerReference(kind string, r kindReference) {
	if _, ok := references[kind]; ok {
		panic("the reference of model " + kind + " is registered twice")
	}
	_, file, _, _ := runtime.Caller(1)
	r.file = filepath.Base(file)
	references[kind] = r
}

// Every kind of model has a reference, in the test file of its name, and no reference is of a kind
// that does not exist.
func TestEveryArchHasAReference(t *testing.T) {
	for _, kind := range Archs() {
		r, ok := references[kind]
		require.True(t, ok && r.sums != nil,
			"model %s has no float64 reference: register one in gnn/%s_test.go", kind, kind)
		require.Equal(t, kind+"_test.go", r.file, "home of the reference of model %s", kind)
	}
	require.Len(t, references, len(Archs()))
}

// withOptions sets the options that only the model's kind has.
func withOptions(cfg ModelConfig, own ownOptions) ModelConfig {
	if set := references[cfg.Model].options; set != nil {
		set(&cfg, own)
	}
	return cfg
}

// reference is the model over a mini-batch; without a step it is inference. hidden is the input of
// the last layer.
func reference(g *rig, cfg ModelConfig, params map[string]tensor64, st *Step) (logits [][]float64,
	hidden [][]float64, loss float64, correct, counted int64) {
	kind := references[cfg.Model]
	nodes := cuda.View[int64](g.mb.Nodes.Ptr(), g.mb.HopEnd[cfg.Layers])
	h := make([][]float64, len(nodes))
	for i, v := range nodes {
		h[i] = g.features[v]
	}
	for l := range cfg.Layers {
		b := g.mb.Blocks[cfg.Layers-1-l]
		r := &layer64{cfg: &cfg, l: l, h: h, params: params, step: st,
			indptr: cuda.View[int64](b.Indptr.Ptr(), b.NumDst+1),
			src:    cuda.View[uint32](b.Src.Ptr(), b.NumEdges),
			degree: func(i int) float64 {
				d := 0
				for e := range g.topo.InDegree(nodes[i]) {
					if !cfg.remaining() || g.topo.Neighbor(nodes[i], e) != nodes[i] {
						d++
					}
				}
				return float64(d)
			}}
		if b.Weights != nil {
			r.weights = cuda.View[float32](b.Weights.Ptr(), b.NumSrc)
		}
		next := make([][]float64, b.NumDst)
		for i := range next {
			next[i] = kind.sums(r, i)
		}
		referenceBetween(next, r)
		if l == cfg.Layers-1 {
			hidden = h[:len(next)]
		}
		h = next
	}
	for i, z := range h {
		if g.y[i] < 0 {
			continue
		}
		counted++
		sum := 0.0
		for _, v := range z {
			sum += math.Exp(v)
		}
		loss += math.Log(sum) - z[g.y[i]]
		if slices.Index(z, slices.Max(z)) == int(g.y[i]) {
			correct++
		}
	}
	if counted > 0 {
		loss /= float64(counted)
	}
	return h, hidden, loss, correct, counted
}

// referenceBetween does to the sums of a layer what follows them: residual connection,
// normalisation, activation, dropout.
func referenceBetween(rows [][]float64, r *layer64) {
	cfg, l, of := r.cfg, r.l, r.of
	for i, row := range rows {
		if !cfg.Residual {
			break
		}
		x := r.h[i]
		if w := of("residual.weight"); w.v != nil {
			x = rowTimes(x, w)
		}
		for o := range row {
			row[o] += x[o]
		}
	}
	if l == cfg.Layers-1 {
		return
	}
	normal := func(v []float64, mean, variance float64) {
		for o := range v {
			v[o] = (v[o] - mean) / math.Sqrt(variance+1e-5)
		}
	}
	moments := func(v []float64) (mean, variance float64) {
		for _, x := range v {
			mean += x / float64(len(v))
		}
		for _, x := range v {
			variance += (x - mean) * (x - mean) / float64(len(v))
		}
		return mean, variance
	}
	for o := range rows[0] {
		if cfg.Norm != "batch" {
			break
		}
		column := make([]float64, len(rows))
		for i, row := range rows {
			column[i] = row[o]
		}
		mean, variance := moments(column)
		if r.step == nil {
			mean, variance = of("norm.running_mean").v[o], of("norm.running_var").v[o]
		}
		normal(column, mean, variance)
		for i, row := range rows {
			row[o] = column[i]
		}
	}
	for i, row := range rows {
		if cfg.Norm == "layer" {
			mean, variance := moments(row)
			normal(row, mean, variance)
		}
		for o := range row {
			if gamma := of("norm.gamma"); gamma.v != nil {
				row[o] = row[o]*gamma.v[o] + of("norm.beta").v[o]
			}
			row[o] = referenceActivation(cfg, row[o])
			row[o] *= r.dropout(cfg.Dropout, l, i, o)
		}
	}
}

func referenceActivation(cfg *ModelConfig, x float64) float64 {
	switch cfg.Activation {
	case "elu":
		if x < 0 {
			return math.Expm1(x)
		}
		return x
	case "leaky":
		return max(x, x/100)
	case "gelu":
		return x / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
	}
	return max(x, 0)
}

// rowTimes is x·w.
func rowTimes(x []float64, w tensor64) []float64 {
	return times(x, w, tensor64{1, w.cols, make([]float64, w.cols)})
}

// times is x·w + b.
func times(x []float64, w, b tensor64) []float64 {
	y := slices.Clone(b.v)
	for k, f := range x {
		for o := range y {
			y[o] += f * w.elem(k, o)
		}
	}
	return y
}
