package gnn

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/simd"
	"helios/internal/testing/difftest"
	"helios/internal/testing/wide"
)

// betweens returns what can come between the layers of a model, each kind at least once.
func betweens(cfg ModelConfig) []ModelConfig {
	var all []ModelConfig
	add := func(activation, norm string, residual bool) {
		c := cfg
		c.Activation, c.Norm, c.Residual = activation, norm, residual
		all = append(all, c)
	}
	for i, a := range Activations() {
		for j, n := range Norms() {
			if residual := (i+j)%2 == 0; a != DefaultActivation || n != NoNorm || residual {
				add(a, n, residual)
			}
		}
	}
	return all
}

// Gradients of every Arch with every Activation, Norm and the residual connection, with matrices
// and without, against central differences, with dropout; and the results of inference.
func TestGradientsBetween(t *testing.T) {
	for k, kind := range Archs() {
		residual := false
		base := ModelConfig{
			ModelSettings: ModelSettings{Model: kind, Hidden: 6, Dropout: 0.3},
			InDim:         5,
			Classes:       3,
			Layers:        3,
			Seed:          11,
		}
		for i, cfg := range betweens(withOptions(base, ownOptions{true, 2, 0.2})) {
			first := cfg.Residual && !residual // of each kind one at least, in a lean run too
			if wide.Lean() && i%len(Archs()) != k && !first {
				continue
			}
			residual = residual || cfg.Residual
			// three for the residual connection of two equal widths
			if cfg.Layers = 2; (i+k)%4 == 0 || first {
				cfg.Layers = 3
			}
			t.Run(fmt.Sprintf("%s/%s/%s/%v", kind, cfg.Activation, cfg.Norm, cfg.Residual),
				func(t *testing.T) {
					g := newRig(t, rigConfig{nodes: 40, edges: 150, dim: 5, classes: 3, seeds: 6,
						fanouts: []int{3, 3, 2}[:cfg.Layers], sms: 2})
					checkGradients(t, g, cfg, 10)
					m := g.model(t, cfg)
					// running means and variances that are not those of the first step
					for i := range 3 {
						require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(),
							Step{Seed: 2, Batch: i, LR: 0.01}))
					}
					require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr()))
					loss, _, _, err := m.Outcome(g.ctx, g.stream)
					require.NoError(t, err)
					_, hidden, want, _, _ := reference(g, cfg, paramValues(m), nil)
					require.InDelta(t, want, loss, 1e-5)
					emb := make([]float32, g.mb.NumSeeds*m.EmbeddingDim())
					require.NoError(t, m.Embeddings(g.ctx, g.stream, emb))
					for i := range g.mb.NumSeeds {
						for k, v := range hidden[i] {
							require.InDelta(t, v, emb[i*m.EmbeddingDim()+k], 1e-5)
						}
					}
				})
		}
		require.True(t, residual, "no case of %s has a residual connection", kind)
	}
}

// firstSums are those of the first layer of SAGE in float64.
func firstSums(g *rig, m *Model) [][]float64 {
	params := paramValues(m)
	nodes := cuda.View[int64](g.mb.Nodes.Ptr(), g.mb.HopEnd[2])
	b := g.mb.Blocks[1]
	indptr, src := cuda.View[int64](b.Indptr.Ptr(), b.NumDst+1), cuda.View[uint32](b.Src.Ptr(),
		b.NumEdges)
	var sums [][]float64
	for i := range b.NumDst {
		mean := make([]float64, 5)
		list := src[indptr[i]:indptr[i+1]]
		for _, j := range list {
			for k, f := range g.features[nodes[j]] {
				mean[k] += f / float64(len(list))
			}
		}
		row := times(g.features[nodes[i]], params["layer0.self.weight"], params["layer0.bias"])
		for o, v := range times(mean, params["layer0.neigh.weight"],
			tensor64{1, 4, make([]float64, 4)}) {
			row[o] += v
		}
		sums = append(sums, row)
	}
	return sums
}

// Running means and variances are those of the steps so far, a step that is done again counts once,
// and neither Adam nor weight decay touches them.
func TestRunningStatistics(t *testing.T) {
	g := newRig(t, rigConfig{nodes: 40, edges: 150, dim: 5, classes: 3, seeds: 6,
		fanouts: []int{3, 3}})
	cfg := ModelConfig{
		ModelSettings: ModelSettings{Model: "sage", Hidden: 4, Norm: "batch"},
		InDim:         5,
		Classes:       3,
		Layers:        2,
		Seed:          3,
	}
	m := g.model(t, cfg)
	running := func() (mean, variance []float32) {
		for _, p := range m.Params() {
			switch p.Name {
			case "layer0.norm.running_mean":
				mean = append(mean, f32(p.Value)...)
			case "layer0.norm.running_var":
				variance = append(variance, f32(p.Value)...)
			}
		}
		return mean, variance
	}
	mean, variance := running()
	require.Equal(t, [][]float32{make([]float32, 4), {1, 1, 1, 1}}, [][]float32{mean, variance})
	for step := range 3 {
		sums := firstSums(g, m)
		for again := range 2 {
			m.SetAdamStep(int64(step)) // the second time as after a failure behind the last launch
			require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(),
				Step{LR: 0, WeightDecay: 0.5, Decoupled: again == 0}))
			require.NoError(t, g.stream.Synchronize(g.ctx))
		}
		now, wide := running()
		rows := float64(len(sums))
		for c := range now {
			average, squares := 0.0, 0.0
			for _, row := range sums {
				average += row[c] / rows
			}
			for _, row := range sums {
				squares += (row[c] - average) * (row[c] - average) / (rows - 1)
			}
			require.InDelta(t, 0.9*float64(mean[c])+0.1*average, now[c], 1e-6)
			require.InDelta(t, 0.9*float64(variance[c])+0.1*squares, wide[c], 1e-6)
		}
		mean, variance = now, wide
	}
}

// The GPU's operators between layers agree with the host's to the bit, for widths around a word and
// a warp, at addresses that allow no wide access, with and without dropout, in place and not.
func TestGPUBetween(t *testing.T) {
	g := newKernRig(t, 31, difftest.Options{})
	widths := []int64{1, 3, 4, 31, 64, 66, 130}
	if testing.Short() {
		widths = widths[1:4]
	}
	for n, cols := range widths {
		rows, odd := 2+g.rng.Int64N(90), cuda.DevicePtr(n%3/2*4)
		matrix := func() cuda.DevicePtr { return given(g, g.floats(rows*cols+1)) + odd }
		column := func() cuda.DevicePtr { return given(g, g.floats(cols+1)) + odd }
		a := actParams{X: matrix(), Grad: matrix(), Out: matrix(), Rows: rows, Cols: cols}
		both(g, "add_rows", a)
		for _, name := range Activations() {
			both(g, "act_"+name, a)
			dropped := a
			dropped.Drop = dropout{Key: philox.Key(4, philox.StreamDropout), Epoch: 2, Batch: 9,
				Layer: 1, P: 0.3, Scale: 1 / (1 - 0.3)}
			dropped.Out = dropped.X
			both(g, "act_"+name, dropped)
			dropped.X, a.X = matrix(), matrix()
			far := a
			far.X, far.Rows, far.Cols = given(g, []float32{17, 1e13, 1e20, -17, -1e13, -1e20}), 2, 3
			both(g, "act_"+name+"_bwd", far)
			both(g, "act_"+name+"_bwd", dropped)
			both(g, "act_"+name+"_bwd", a)
		}
		numbers := make([]int64, rows)
		for i, v := range g.rng.Perm(int(rows)) {
			numbers[i] = int64(2*v + 5)
		}
		moved := tableParams{Table: given(g, g.floats(2*rows*(cols+int64(n))+1)) + odd, Rows: a.Out,
			N: rows, Cols: cols, TableStride: cols + int64(n), RowStride: cols}
		both(g, "table_get", moved)
		moved.Numbers, moved.First = given(g, numbers), 5
		both(g, "table_get", moved)
		both(g, "table_put", moved)
		p := normParams{
			X: matrix(), Out: matrix(), Grad: matrix(), Gamma: column(), Beta: column(),
			Sum:    blank[float32](g, rows),
			Spread: blank[float32](g, rows), Rows: rows, Cols: cols,
			Share: float32(1 / float64(cols)), Eps: normEps,
		}
		both(g, "layer_norm", p)
		both(g, "layer_norm_bwd", p)
		p.Out = p.X
		both(g, "layer_norm", p)
		squares := g.floats(cols)
		for i := range squares {
			squares[i] *= squares[i] * 9
		}
		p = normParams{
			X: matrix(), Out: matrix(), Grad: matrix(), Gamma: column(), Beta: column(),
			Sum: column(), Squares: given(g, squares),
			Spread: blank[float32](g, cols), DGamma: column(), DBeta: column(), Rows: rows,
			Cols:  cols,
			Share: float32(1 / float64(rows)), Eps: normEps, Momentum: batchMomentum,
		}
		for _, k := range []string{"batch_square", "batch_spread", "batch_norm", "batch_dot",
			"batch_norm_bwd"} {
			both(g, k, p)
		}
		p.X, p.Out, p.Grad = column(), column(), column()
		both(g, "batch_running", p)
	}
	require.Equal(t, len(widths), g.dev.Launches()["batch_running"])
	require.NoError(t, g.st.Synchronize(g.ctx))
}

// Steps of models with something between their layers give the same bits on any number of workers
// and at all levels that fuse multiply and add.
func TestWorkersChangeNothingBetween(t *testing.T) {
	levels := simd.Levels()
	if len(levels) > 1 {
		levels = levels[1:]
	}
	for _, cfg := range betweens(ModelConfig{
		ModelSettings: ModelSettings{Model: "gin", Hidden: 33, Dropout: 0.3},
		InDim:         20,
		Classes:       7,
		Layers:        2,
		Seed:          1,
	}) {
		want := ""
		for _, l := range levels {
			for _, sms := range []int{1, 3} {
				g := newRig(t, rigConfig{nodes: 400, edges: 3000, dim: 20, classes: 7, seeds: 60,
					fanouts: []int{5, 3}, sms: sms, level: l})
				m := g.model(t, cfg)
				for i := range 2 {
					require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(),
						Step{Seed: 2, Batch: i, LR: 0.01}))
				}
				require.NoError(t, g.stream.Synchronize(g.ctx))
				sum, err := m.ParamsSHA256()
				require.NoError(t, err)
				if want == "" {
					want = sum
				}
				require.Equal(t, want, sum, "%+v with %d workers at level %v", cfg, sms, l)
			}
		}
	}
}

// The names are those of the registries, an empty one is the default, and a wrong one is told with
// all that there are.
func TestBetweenNames(t *testing.T) {
	require.Equal(t, "relu", Activations()[0])
	require.Subset(t, Activations(), []string{"elu", "gelu"})
	require.Equal(t, "none", Norms()[0])
	require.Subset(t, Norms(), []string{"batch", "layer"})
	dev := host(t, 1)
	for _, cfg := range []ModelConfig{{ModelSettings: ModelSettings{Activation: "tanh"}},
		{ModelSettings: ModelSettings{Norm: "graph"}}} {
		cfg.Model, cfg.InDim, cfg.Classes, cfg.Layers = DefaultArch, 1, 1, 1
		_, err := NewModel(dev, cfg)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
		require.ErrorContains(t, err, "choose one of")
	}
	g := newRig(t, rigConfig{nodes: 40, edges: 150, dim: 5, classes: 3, seeds: 6,
		fanouts: []int{3, 3}})
	cfg := ModelConfig{ModelSettings: ModelSettings{Model: DefaultArch, Hidden: 4}, InDim: 5,
		Classes: 3, Layers: 2, Seed: 3}
	plain := g.model(t, cfg)
	cfg.Activation, cfg.Norm = DefaultActivation, NoNorm
	named := g.model(t, cfg)
	require.True(t, plain.net.fused && named.net.fused)
	a, err := plain.ParamsSHA256()
	require.NoError(t, err)
	b, err := named.ParamsSHA256()
	require.NoError(t, err)
	require.Equal(t, a, b)
}

// A batch of one destination in the hidden layer tells nothing of a spread: what runs stays as it
// is.
func TestRunningStatisticsOfOneRow(t *testing.T) {
	g := newRig(t, rigConfig{nodes: 5, edges: 0, dim: 5, classes: 3, seeds: 1,
		fanouts: []int{3, 3}})
	m := g.model(t, ModelConfig{
		ModelSettings: ModelSettings{Model: "sage", Hidden: 4, Norm: "batch"},
		InDim:         5,
		Classes:       3,
		Layers:        2,
		Seed:          3,
	})
	require.Len(t, firstSums(g, m), 1)
	require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), Step{LR: 0.1}))
	require.NoError(t, g.stream.Synchronize(g.ctx))
	seen := 0
	for _, p := range m.Params() {
		switch p.Name {
		case "layer0.norm.running_mean":
			require.Equal(t, make([]float32, 4), f32(p.Value))
			seen++
		case "layer0.norm.running_var":
			require.Equal(t, []float32{1, 1, 1, 1}, f32(p.Value))
			seen++
		}
	}
	require.Equal(t, 2, seen)
}
