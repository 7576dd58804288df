//go:build linux && (amd64 || arm64) && !nocuda

package gnn

import (
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/simd"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
)

// fakeGPU is the fake libcuda as a device, or with HELIOS_GPU=1 the machine's GPU.
func fakeGPU(t *testing.T) (dev *driver.Device, lib string) {
	t.Helper()
	if os.Getenv("HELIOS_GPU") != "1" {
		lib = fakecuda.Build(t)
		fakecuda.Control(t, lib, "reset,sms=2,cc=9.0")
	}
	dev, err := driver.Open(driver.Options{Library: lib})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	return dev, lib
}

// driverRig is a rig's mini-batch, features and labels in a GPU's memory.
type driverRig struct {
	*rig
	dev       cuda.Device
	stream    cuda.Stream
	mb        *graph.MiniBatch
	x, labels cuda.Buffer
	stage     cuda.Buffer
}

func (g *rig) onGPU(t *testing.T, dev cuda.Device) *driverRig {
	d := &driverRig{rig: g, dev: dev, stream: newStream(t, dev)}
	var err error
	d.stage, err = dev.Alloc(cuda.MemPinned, 1<<20, "test staging")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.stage.Free()) })
	mb := *g.mb
	mb.Blocks = nil
	for _, b := range g.mb.Blocks {
		b.Indptr, b.Src = d.copyOf(t, b.Indptr.Ptr(), (b.NumLists()+1)*8),
			d.copyOf(t, b.Src.Ptr(), b.NumEdges*4)
		if b.Weights != nil {
			b.Weights = d.copyOf(t, b.Weights.Ptr(), b.NumSrc*4)
		}
		mb.Blocks = append(mb.Blocks, b)
	}
	nodes := g.mb.HopEnd[len(g.mb.Blocks)]
	if g.mb.Degrees != nil {
		mb.Degrees = d.copyOf(t, g.mb.Degrees.Ptr(), nodes*4)
	}
	if g.mb.Nodes != nil { // tables are looked up by numbers
		mb.Nodes = d.copyOf(t, g.mb.Nodes.Ptr(), nodes*8)
	}
	d.mb = &mb
	d.x, d.labels = d.copyOf(t, g.x.Ptr(), g.x.Size()), d.copyOf(t, g.labels.Ptr(), g.labels.Size())
	return d
}

func (d *driverRig) copyOf(t *testing.T, p cuda.DevicePtr, n int64) cuda.Buffer {
	b := alloc(t, d.dev, n)
	d.upload(t, b.Ptr(), cuda.View[byte](p, n))
	return b
}

func (d *driverRig) upload(t *testing.T, p cuda.DevicePtr, v []byte) {
	for len(v) > 0 {
		n := copy(d.stage.Bytes(), v)
		require.NoError(t, d.stream.Copy(p, d.stage.Ptr(), int64(n)))
		require.NoError(t, d.stream.Synchronize(d.ctx))
		v, p = v[n:], p+cuda.DevicePtr(n)
	}
}

// read is n floats of the device.
func (d *driverRig) read(t *testing.T, p cuda.DevicePtr, n int64) []float32 {
	require.LessOrEqual(t, n*4, d.stage.Size())
	require.NoError(t, d.stream.Copy(d.stage.Ptr(), p, n*4))
	require.NoError(t, d.stream.Synchronize(d.ctx))
	return append([]float32(nil),
		unsafe.Slice((*float32)(unsafe.Pointer(&d.stage.Bytes()[0])), n)...)
}

// near wants values whose differences are, by their norms, no more than a share of them.
func near(t *testing.T, want, got []float32, share float64, what string) {
	t.Helper()
	require.Len(t, got, len(want), what)
	off, all := 0.0, 0.0
	for i, v := range want {
		d := float64(v) - float64(got[i])
		off, all = off+d*d, all+float64(v)*float64(v)
	}
	if off, all = math.Sqrt(off), math.Sqrt(all); !(off <= share*all) {
		t.Fatalf("%s: differs by %.2g of its norm %.3g; the bound is %.2g", what, off/all,
			all, share)
	}
}

// gpuCase is a model that is trained on both devices. share 0 wants the same bits.
type gpuCase struct {
	name  string
	cfg   ModelConfig
	rig   rigConfig
	share float64
	blas  bool
	steps int
}

// open makes the case's mini-batch, of a model of typed graphs on the typed reference's.
func (c *gpuCase) open(t *testing.T) *rig {
	if c.cfg.Schema == nil {
		return newRig(t, c.rig)
	}
	ref := readTypedReference()
	topo := ref.topology(t)
	topo.Schema.Types = c.cfg.Schema.Types
	return typedRig(t, host(t, 2), topo, []int{4, 3, 2}, ref.Seeds, ref.Labels,
		func(kind int, node int64, column int) float32 {
			return float32(kind+1) * float32((node*7+int64(column)*3)%11-5) / 8
		})
}

// typedCase is a model of typed graphs, which takes gradients by runs of rows: some of them empty.
func typedCase(kind string) gpuCase {
	ref := readTypedReference()
	c := ModelConfig{ModelSettings: ModelSettings{Model: kind, Hidden: 12, Dropout: 0.3,
		FeatureDropout: 0.2}, InDim: 5, Classes: ref.Classes, Layers: 3, Seed: 4,
		Schema: ref.schema()}
	if kind == "rgat" {
		c.Heads, c.AttentionDropout = 3, 0.2
	}
	if kind == "rgcn" {
		c.Bases = 2
		for i := range c.Schema.Types {
			c.Schema.Types[i].Dim = c.InDim
		}
	}
	return gpuCase{kind, c, rigConfig{}, 0, false, 3}
}

func gpuCases() []gpuCase {
	small := rigConfig{nodes: 90, edges: 700, dim: 10, classes: 5, seeds: 21, sms: 2}
	of := func(kind string, layers int, drop, input float64, prec cuda.Precision) ModelConfig {
		return ModelConfig{
			ModelSettings: ModelSettings{Model: kind, Hidden: 12, Dropout: drop,
				FeatureDropout: input},
			InDim:     10,
			Classes:   5,
			Layers:    layers,
			Seed:      7,
			Precision: prec,
		}
	}
	heads := func(c ModelConfig, n int, drop float64) ModelConfig {
		c.Heads, c.AttentionDropout = n, drop
		return c
	}
	outHeads := func(c ModelConfig, n int) ModelConfig { c.OutHeads = n; return c }
	between := func(c ModelConfig, activation, norm string, residual bool) ModelConfig {
		c.Activation, c.Norm, c.Residual = activation, norm, residual
		return c
	}
	learned := func(c ModelConfig) ModelConfig { c.LearnEps = true; return c }
	with := func(r rigConfig, fanouts ...int) rigConfig { r.fanouts = fanouts; return r }
	layers := func(r rigConfig,
		nodes ...int) rigConfig {
		r.layerwise = true
		return with(r, nodes...)
	}
	// tf32 keeps 10 bits of mantissa and bf16 7: a factor has a relative error of 2^-11 or 2^-8 at
	// most, there are some in a row, and where an activation is near 0, ReLU may be open in one run
	// and not in the other.
	const tf32, bf16 = 5e-3, 1e-1
	list := []gpuCase{
		{"sage 2 layers, dropout of both kinds", of("sage", 2, 0.4, 0.3, cuda.FP32),
			with(small, 4, 3), 0, false, 3},
		{"gcn 2 layers, dropout of both kinds", of("gcn", 2, 0.4, 0.3, cuda.FP32),
			with(small, 4, 3), 0, false, 3},
		{"sage 1 layer", of("sage", 1, 0, 0, cuda.FP32), with(small, 5), 0, false, 2},
		{"gcn 1 layer, all neighbours", of("gcn", 1, 0, 0.5, cuda.FP32), with(small, -1), 0,
			false, 2},
		{"sage 3 layers", of("sage", 3, 0.2, 0, cuda.FP32), with(small, 2, 2, 2), 0, false, 2},
		{"gcn 3 layers", of("gcn", 3, 0, 0, cuda.FP32), with(small, 2, 2, 2), 0, false, 2},
		{"sage by layers", of("sage", 3, 0.2, 0, cuda.FP32), layers(small, 20, 15, 30), 0,
			false, 2},
		{"gcn by layers", of("gcn", 2, 0.4, 0.3, cuda.FP32), layers(small, 20, 15), 0, false, 2},
		{"gin 2 layers, dropout of both kinds", of("gin", 2, 0.4, 0.3, cuda.FP32),
			with(small, 4, 3), 0, false, 3},
		{"gin 3 layers, learned eps", learned(of("gin", 3, 0, 0, cuda.FP32)), with(small, 2, 2, 2),
			0, false, 3},
		{"gin 1 layer, learned eps", learned(of("gin", 1, 0, 0.5, cuda.FP32)), with(small, -1), 0,
			false, 2},
		{"gin by layers", learned(of("gin", 2, 0.4, 0, cuda.FP32)), layers(small, 20, 15), 0,
			false, 2},
		{"gin blas", learned(of("gin", 2, 0.4, 0, cuda.FP32)), with(small, 4, 3), 1e-5, true, 1},
		{"gat 2 layers, dropout of all kinds", heads(of("gat", 2, 0.4, 0.3, cuda.FP32), 3, 0.3),
			with(small, 4, 3), 0, false, 3},
		{"gat 3 layers", heads(of("gat", 3, 0, 0, cuda.FP32), 6, 0), with(small, 2, 2, 2), 0,
			false, 2},
		{"gat 1 layer, one head", heads(of("gat", 1, 0, 0.5, cuda.FP32), 1, 0.5), with(small, -1),
			0, false, 2},
		{"gat by layers", heads(of("gat", 2, 0.4, 0, cuda.FP32), 2, 0), layers(small, 20, 15), 0,
			false, 2},
		{"gat as in the paper", outHeads(between(heads(of("gat", 2, 0.4, 0.3, cuda.FP32), 3, 0.3),
			"elu", "", false), 1), with(small, 4, 3), 0, false, 3},
		{"gat, elu, residual", between(heads(of("gat", 3, 0.4, 0, cuda.FP32), 3, 0), "elu", "",
			true), with(small, 2, 2, 2), 0, false, 2},
		{"gat, relu, batch", between(heads(of("gat", 2, 0, 0, cuda.FP32), 3, 0), "relu", "batch",
			false), with(small, 4, 3), 0, false, 2},
		{"sage, gelu, layer, residual", between(of("sage", 3, 0.4, 0.3, cuda.FP32), "gelu", "layer",
			true), with(small, 2, 2, 2), 0, false, 3},
		{"sage, batch", between(of("sage", 2, 0.4, 0, cuda.FP32), "", "batch", false),
			with(small, 4, 3), 0, false, 3},
		{"gcn, elu, batch, residual", between(of("gcn", 3, 0.4, 0, cuda.FP32), "elu", "batch",
			true), with(small, 2, 2, 2), 0, false, 3},
		{"gcn, relu, residual", between(of("gcn", 2, 0.4, 0, cuda.FP32), "relu", "", true),
			with(small, 4, 3), 0, false, 2},
		{"gin, gelu, batch", between(learned(of("gin", 2, 0.4, 0, cuda.FP32)), "gelu", "batch",
			false), with(small, 4, 3), 0, false, 3},
		{"gin, elu, layer, residual", between(of("gin", 3, 0, 0, cuda.FP32), "elu", "layer", true),
			with(small, 2, 2, 2), 0, false, 2},
		{"sage blas, elu, layer, residual", between(of("sage", 2, 0.4, 0, cuda.FP32), "elu",
			"layer", true), with(small, 4, 3), 1e-5, true, 1},
		{"gat blas", heads(of("gat", 2, 0.4, 0, cuda.FP32), 2, 0.2), with(small, 4, 3), 1e-5,
			true, 1},
		{"sage tf32", of("sage", 2, 0.4, 0, cuda.TF32), with(small, 4, 3), tf32, false, 1},
		{"gcn bf16", of("gcn", 2, 0.4, 0, cuda.BF16), with(small, 4, 3), bf16, false, 1},
		{"sage blas", of("sage", 2, 0.4, 0.3, cuda.FP32), with(small, 4, 3), 1e-5, true, 1},
		{"gcn blas tf32", of("gcn", 2, 0, 0, cuda.TF32), with(small, 4, 3), tf32, true, 1},
		{"sage blas bf16", of("sage", 2, 0, 0, cuda.BF16), with(small, 4, 3), bf16, true, 1},
	}
	// More destinations than one chain of a weight's gradient has on a GPU (gemmSplitLeast).
	long := rigConfig{nodes: 900, edges: 2700, dim: 10, classes: 5, seeds: 700, sms: 2}
	// Seeds without neighbours, a hop without edges, rows of no whole vector.
	sparse := rigConfig{nodes: 40, src: []int64{1, 2, 3, 3}, dst: []int64{0, 0, 1, 0}, dim: 7,
		classes: 3, seeds: 9, fanouts: []int{4, 1, 1}, sms: 1}
	for _, kind := range Archs() {
		list = append(list, gpuCase{kind + " almost without edges",
			ModelConfig{ModelSettings: ModelSettings{Model: kind, Hidden: 9}, InDim: 7,
				Classes: 3, Layers: 3, Seed: 2}, sparse, 0,
			false, 1})
	}
	lonely := sparse
	lonely.src, lonely.dst, lonely.fanouts = []int64{30}, []int64{31}, []int{2, 2}
	list = append(list, gpuCase{"sage without edges", ModelConfig{
		ModelSettings: ModelSettings{Model: "sage", Hidden: 9},
		InDim:         7,
		Classes:       3,
		Layers:        2,
		Seed:          2,
	}, lonely, 0, false, 2})
	for _, kind := range TypedArchs() {
		plain, more := typedCase(kind), typedCase(kind)
		for i, t := range more.cfg.Schema.Types {
			if i > 0 || kind == "rgcn" {
				t.Dim = 0
			}
			more.cfg.Schema.Types[i] = t
		}
		more.name += ", tables, linear residual, batch, leaky, mlp"
		more.cfg.Embed, more.cfg.ResidualLinear, more.cfg.Norm = "5", true, "batch"
		more.cfg.Activation, more.cfg.Head = "leaky", "mlp"
		list = append(list, plain, more)
	}
	featureless := typedCase("rgcn")
	featureless.name += ", featureless, layer, linear"
	featureless.cfg.Featureless, featureless.cfg.FeatureDropout = true, 0
	featureless.cfg.Norm, featureless.cfg.Head = "layer", "linear"
	for i := range featureless.cfg.Schema.Types {
		featureless.cfg.Schema.Types[i].Dim = 0
	}
	list = append(list, featureless)
	return append(list, gpuCase{"sage with split gradients", of("sage", 1, 0, 0, cuda.FP32),
		with(long, 2), 1e-5, false, 1})
}

// Whole training steps and inference on the fake libcuda, whose kernels are the real ones on the
// CPU shim, against the host device: losses, gradients, parameters and moments, predictions and
// embeddings. In fp32 by our own kernels all of them are the same bits wherever no gradient is
// split.
func TestDriverSteps(t *testing.T) {
	gpu, lib := fakeGPU(t)
	for _, c := range gpuCases() {
		t.Run(c.name, func(t *testing.T) {
			if wide.Lean() && c.name != "sage 2 layers, dropout of both kinds" &&
				c.name != "gcn blas tf32" && c.name != "gcn by layers" && c.cfg.Schema == nil {
				t.Skip("long")
			}
			share := c.share
			if share == 0 && (simd.Best() == simd.Generic || runtime.GOARCH != "amd64") {
				// the scalar products round before each addition, and Go's exponential differs by
				// processor
				share = 1e-5
			}
			g := c.open(t)
			d := g.onGPU(t, gpu)
			hostCfg := c.cfg
			hostCfg.Precision = cuda.FP32
			if c.blas {
				b, err := gpu.OpenBLAS(blasPath(t, lib))
				if lib == "" && errs.ClassOf(err) == errs.Capability {
					t.Skip(err)
				}
				require.NoError(t, err)
				defer func() { require.NoError(t, b.Close()) }()
				c.cfg.BLAS = b
			}
			want := g.model(t, hostCfg)
			m, err := NewModel(gpu, c.cfg)
			require.NoError(t, err)
			defer func() { require.NoError(t, m.Close()) }()
			compare := func(what string, w, got []float32) {
				t.Helper()
				if share == 0 {
					require.Equal(t, w, got, what)
				} else {
					near(t, w, got, share, what)
				}
			}
			for step := range c.steps {
				st := Step{Seed: 3, Epoch: 1, Batch: step, LR: 0.01, WeightDecay: 0.01,
					Decoupled: step%2 == 1}
				if step > 0 && c.cfg.FeatureDropout > 0 { // x is another one after a step
					near(t, f32(g.x), d.read(t, d.x.Ptr(), d.x.Size()/4), 0, "input")
				}
				require.NoError(t, want.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), st))
				require.NoError(t, m.Train(d.stream, d.mb, d.x.Ptr(), d.labels.Ptr(), st))
				wl, wc, wn, err := want.Outcome(g.ctx, g.stream)
				require.NoError(t, err)
				l, correct, n, err := m.Outcome(d.ctx, d.stream)
				require.NoError(t, err)
				require.Equal(t, wn, n)
				if share == 0 {
					require.Equal(t, wl, l, "loss of step %d", step)
					require.Equal(t, wc, correct)
				} else {
					require.InDelta(t, wl, l, share*wl, "loss of step %d", step)
				}
				offset := int64(0)
				for i, p := range want.Params() {
					n := int64(p.Rows) * int64(p.Cols)
					compare("gradient of "+p.Name, cuda.View[float32](want.params.grad(offset), n),
						d.read(t, m.params.grad(offset), n))
					offset += align(n)
					q := m.Params()[i]
					require.Equal(t, p.Name, q.Name)
					if share == 0 { // Adam makes steps of the same size of gradients of all sizes
						compare(p.Name, f32(p.Value), d.read(t, q.Value.Ptr(), n))
						compare("m of "+p.Name, f32(p.M), d.read(t, q.M.Ptr(), n))
						compare("v of "+p.Name, f32(p.V), d.read(t, q.V.Ptr(), n))
					}
				}
				require.Equal(t, want.AdamStep(), m.AdamStep())
			}
			if share == 0 {
				a, err := want.ParamsSHA256()
				require.NoError(t, err)
				b, err := m.ParamsSHA256()
				require.NoError(t, err)
				require.Equal(t, a, b)
			} else { // go on from the same parameters
				d.upload(t, m.params.ptr(0), cuda.View[byte](want.params.ptr(0), want.params.n*4))
			}
			require.NoError(t, want.Infer(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr()))
			require.NoError(t, m.Infer(d.stream, d.mb, d.x.Ptr(), d.labels.Ptr()))
			seeds := g.mb.NumSeeds
			wantEmb, emb := make([]float32, seeds*want.EmbeddingDim()),
				make([]float32, seeds*m.EmbeddingDim())
			require.NoError(t, want.Embeddings(g.ctx, g.stream, wantEmb))
			require.NoError(t, m.Embeddings(d.ctx, d.stream, emb))
			compare("embeddings", wantEmb, emb)
			wantPred, pred := make([]int32, seeds), make([]int32, seeds)
			require.NoError(t, want.Predictions(g.ctx, g.stream, wantPred))
			require.NoError(t, m.Predictions(d.ctx, d.stream, pred))
			if share == 0 {
				require.Equal(t, wantPred, pred)
			}
		})
	}
	if lib != "" {
		require.Empty(t, fakecuda.Control(t, lib, "violations"))
	}
}

func blasPath(t *testing.T, lib string) string {
	if lib == "" {
		return ""
	}
	p := fakecuda.BuildBLAS(t)
	fakecuda.Control(t, p, "reset,libcuda="+lib)
	t.Cleanup(func() { require.Empty(t, fakecuda.Control(t, p, "violations")) })
	return p
}

// A step that found no memory for its activations has changed nothing, and is the same step when it
// is done again, whichever allocation it was.
func TestDriverOutOfMemory(t *testing.T) {
	gpu, lib := fakeGPU(t)
	if lib == "" {
		t.Skip("the fake's failures")
	}
	g := newRig(t, rigConfig{nodes: 90, edges: 700, dim: 10, classes: 5, seeds: 21,
		fanouts: []int{3, 3}, sms: 2})
	cfg := ModelConfig{
		ModelSettings: ModelSettings{Model: "sage", Hidden: 12, Dropout: 0.4, FeatureDropout: 0.3},
		InDim:         10,
		Classes:       5,
		Layers:        2,
		Seed:          7,
	}
	run := func(fail bool) (string, float64) {
		d := g.onGPU(t, gpu)
		m, err := NewModel(gpu, cfg)
		require.NoError(t, err)
		defer func() { require.NoError(t, m.Close()) }()
		var loss float64
		for step := range 2 {
			st := Step{Seed: 3, Batch: step, LR: 0.01}
			if fail {
				require.NoError(t, m.ReleaseWorkspace())
				fakecuda.Control(t, lib, "fail=cuMemAlloc_v2:1:2:2") // CUDA_ERROR_OUT_OF_MEMORY
				before, err := m.ParamsSHA256()
				require.NoError(t, err)
				err = m.Train(d.stream, d.mb, d.x.Ptr(), d.labels.Ptr(), st)
				var oom *cuda.OutOfMemoryError
				require.ErrorAs(t, err, &oom)
				require.Equal(t, "activations", oom.Purpose)
				require.Equal(t, m.WorkspaceBytes(d.mb.HopEnd, edgesOf(d.mb)), oom.Want)
				require.Equal(t, int64(step), m.AdamStep())
				fakecuda.Control(t, lib, "fail=cuMemAlloc_v2:1000000000")
				after, err := m.ParamsSHA256()
				require.NoError(t, err)
				require.Equal(t, before, after)
			}
			require.NoError(t, m.Train(d.stream, d.mb, d.x.Ptr(), d.labels.Ptr(), st))
			loss, _, _, err = m.Outcome(d.ctx, d.stream)
			require.NoError(t, err)
		}
		sum, err := m.ParamsSHA256()
		require.NoError(t, err)
		return sum, loss
	}
	wantSum, wantLoss := run(false)
	sum, loss := run(true)
	require.Equal(t, wantSum, sum)
	require.Equal(t, wantLoss, loss)
}

// A step's results are the same when the step behind it is enqueued before they are read.
func TestDriverMarks(t *testing.T) {
	gpu, _ := fakeGPU(t)
	g := newRig(t, rigConfig{nodes: 90, edges: 700, dim: 10, classes: 5, seeds: 21,
		fanouts: []int{3, 3}, sms: 2})
	d := g.onGPU(t, gpu)
	cfg := ModelConfig{ModelSettings: ModelSettings{Model: "sage", Hidden: 12, Dropout: 0.4},
		InDim: 10, Classes: 5, Layers: 2, Seed: 7}
	run := func(behind int) (losses, norms []float64) {
		m, err := NewModel(gpu, cfg)
		require.NoError(t, err)
		defer func() { require.NoError(t, m.Close()) }()
		var marks []Mark
		read := func() {
			loss, _, counted, err := marks[0].Outcome(d.ctx)
			require.NoError(t, err)
			require.Positive(t, counted)
			losses, norms = append(losses, loss), append(norms, marks[0].GradientNorm())
			marks = marks[1:]
		}
		for step := range 5 {
			require.NoError(t, m.Train(d.stream, d.mb, d.x.Ptr(), d.labels.Ptr(),
				Step{Seed: 3, Batch: step, LR: 0.1}))
			k, err := m.Mark(d.stream)
			require.NoError(t, err)
			if marks = append(marks, k); len(marks) > behind {
				read()
			}
		}
		for len(marks) > 0 {
			read()
		}
		require.NoError(t, d.stream.Synchronize(d.ctx))
		return losses, norms
	}
	losses, norms := run(0)
	require.Len(t, slices.Compact(slices.Clone(losses)), 5)
	l, n := run(1)
	require.Equal(t, losses, l)
	require.Equal(t, norms, n)
}

// Memory that a BLAS finds missing in the middle of a step: the step can be done again, with its
// input filled once more.
func TestDriverOutOfMemoryInBLAS(t *testing.T) {
	gpu, lib := fakeGPU(t)
	if lib == "" {
		t.Skip("the fake's failures")
	}
	path := blasPath(t, lib)
	blas, err := gpu.OpenBLAS(path)
	require.NoError(t, err)
	defer func() { require.NoError(t, blas.Close()) }()
	g := newRig(t, rigConfig{nodes: 90, edges: 700, dim: 10, classes: 5, seeds: 21,
		fanouts: []int{3, 3}, sms: 2})
	for _, input := range []float64{0, 0.3} {
		cfg := ModelConfig{
			ModelSettings: ModelSettings{Model: "gcn", Hidden: 12, Dropout: 0.4,
				FeatureDropout: input},
			InDim:   10,
			Classes: 5,
			Layers:  2,
			Seed:    7,
			BLAS:    blas,
		}
		var sums []string
		for _, fail := range []int{0, 1, 2, 5} {
			d := g.onGPU(t, gpu)
			m, err := NewModel(gpu, cfg)
			require.NoError(t, err)
			train := func() error {
				return m.Train(d.stream, d.mb, d.x.Ptr(), d.labels.Ptr(), Step{Seed: 3, LR: 0.01})
			}
			if fail > 0 {
				// CUBLAS_STATUS_ALLOC_FAILED
				fakecuda.Control(t, path, fmt.Sprintf("fail=cublasGemmEx:%d:3", fail))
				err := train()
				var oom *cuda.OutOfMemoryError
				require.ErrorContains(t, err, "out of memory for cuBLAS")
				require.Equal(t, int64(0), m.AdamStep())
				require.ErrorAs(t, err, &oom)
				require.NoError(t, d.stream.Synchronize(d.ctx))
				d = g.onGPU(t, gpu) // x as it was
			}
			require.NoError(t, train())
			_, _, _, err = m.Outcome(d.ctx, d.stream)
			require.NoError(t, err)
			sum, err := m.ParamsSHA256()
			require.NoError(t, err)
			sums = append(sums, sum)
			require.Equal(t, sums[0], sum)
			require.NoError(t, m.Close())
		}
	}
}

// Memory that a launch finds missing, for a kernel that is loaded when it is first launched or for
// its stack: the same.
func TestDriverOutOfMemoryInLaunch(t *testing.T) {
	gpu, lib := fakeGPU(t)
	if lib == "" {
		t.Skip("the fake's failures")
	}
	g := newRig(t, rigConfig{nodes: 30, edges: 100, dim: 4, classes: 3, seeds: 5, fanouts: []int{2},
		sms: 1})
	var want string
	for _, fail := range []int{0, 1, 2, 6} {
		d := g.onGPU(t, gpu)
		m, err := NewModel(gpu, ModelConfig{
			ModelSettings: ModelSettings{Model: "sage", FeatureDropout: 0.3},
			InDim:         4,
			Classes:       3,
			Layers:        1,
			Seed:          7,
		})
		require.NoError(t, err)
		train := func() error {
			return m.Train(d.stream, d.mb, d.x.Ptr(), d.labels.Ptr(), Step{Seed: 3, LR: 0.01})
		}
		if fail > 0 {
			// CUDA_ERROR_OUT_OF_MEMORY
			fakecuda.Control(t, lib, fmt.Sprintf("fail=cuLaunchKernel:%d:2", fail))
			var oom *cuda.OutOfMemoryError
			require.ErrorAs(t, train(), &oom)
			require.Equal(t, int64(0), m.AdamStep())
			require.NoError(t, d.stream.Synchronize(d.ctx))
			d = g.onGPU(t, gpu) // x as it was
		}
		require.NoError(t, train())
		_, _, _, err = m.Outcome(d.ctx, d.stream)
		require.NoError(t, err)
		sum, err := m.ParamsSHA256()
		require.NoError(t, err)
		if fail == 0 {
			want = sum
		}
		require.Equal(t, want, sum)
		require.NoError(t, m.Close())
	}
}

func edgesOf(mb *graph.MiniBatch) []int64 {
	var n []int64
	for i := range mb.Blocks {
		n = append(n, mb.Blocks[i].NumEdges)
	}
	return n
}

// Options that a host device lacks are refused, and errors name the kernel that failed.
func TestDriverMistakes(t *testing.T) {
	dev := host(t, 1)
	_, err := NewModel(dev, ModelConfig{
		ModelSettings: ModelSettings{Model: "sage"},
		InDim:         3,
		Classes:       2,
		Layers:        1,
		Precision:     cuda.TF32,
	})
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.ErrorContains(t, err, "option device cuda")
	_, err = NewModel(dev, ModelConfig{ModelSettings: ModelSettings{Model: "sage"}, InDim: 3,
		Classes: 2, Layers: 1, Precision: 9})
	require.ErrorContains(t, err, "fp32, tf32, bf16")
	// A label out of range on the GPU: the same words as on the host, at the next synchronisation.
	gpu, _ := fakeGPU(t)
	g := newRig(t, rigConfig{nodes: 30, edges: 100, dim: 4, classes: 3, seeds: 5, fanouts: []int{2},
		sms: 1})
	g.y[2] = 17
	d := g.onGPU(t, gpu)
	s, err := gpu.NewStream(cuda.StreamOptions{Name: "bad"})
	require.NoError(t, err)
	m, err := NewModel(gpu, ModelConfig{ModelSettings: ModelSettings{Model: "sage"}, InDim: 4,
		Classes: 3, Layers: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Close()) }()
	err = m.Train(s, d.mb, d.x.Ptr(), d.labels.Ptr(), Step{LR: 0.1})
	if err == nil { // which may be told already by who enqueues what comes after it
		_, _, _, err = m.Outcome(d.ctx, s)
	}
	_ = s.Close()
	var ke *cuda.KernelError
	require.ErrorAs(t, err, &ke)
	require.Equal(t, "xent_count", ke.Kernel)
	require.ErrorContains(t, err, "label 17 of seed 2 is out of range")
}
