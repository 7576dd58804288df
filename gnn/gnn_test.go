package gnn

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/simd"
	"helios/internal/testing/wide"
)

func host(t testing.TB, sms int) cuda.Device { return hostAt(t, sms, simd.Auto) }

func hostAt(t testing.TB, sms int, l simd.Level) cuda.Device {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: sms, Kernels: l})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	return dev
}

func newStream(t testing.TB, dev cuda.Device) cuda.Stream {
	s, err := dev.NewStream(cuda.StreamOptions{Name: "train"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func alloc(t testing.TB, dev cuda.Device, bytes int64) cuda.Buffer {
	b, err := dev.Alloc(cuda.MemDevice, max(bytes, 8), "test")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Free()) })
	return b
}

func floats(t testing.TB, dev cuda.Device, v []float32) cuda.Buffer {
	b := alloc(t, dev, int64(len(v))*4)
	copy(f32(b), v)
	return b
}

func f32(b cuda.Buffer) []float32 { return cuda.View[float32](b.Ptr(), b.Size()/4) }

// rig is a sampled mini-batch with features and labels on a host device.
type rig struct {
	ctx       context.Context
	dev       cuda.Device
	stream    cuda.Stream
	topo      *graph.Topology
	mb        *graph.MiniBatch
	x, labels cuda.Buffer
	features  [][]float64 // by node
	y         []int32     // by seed
}

type rigConfig struct {
	nodes, edges, dim, classes, seeds int
	fanouts                           []int
	layerwise                         bool
	loops                             string  // ModelSettings.SelfLoops
	src, dst                          []int64 // instead of random edges
	batchSeeds                        []int64 // instead of 0 … seeds-1
	sms                               int
	level                             simd.Level
}

func newRig(t testing.TB, c rigConfig) *rig {
	r := rand.New(rand.NewPCG(42, 0))
	if c.src == nil {
		for range c.edges {
			c.src, c.dst = append(c.src, r.Int64N(int64(c.nodes))),
				append(c.dst, r.Int64N(int64(c.nodes)))
		}
		for v := range int64(c.nodes) { // some have an edge to themselves, and some have two
			for k := v % 5; c.loops != "" && k > 2; k-- {
				c.src, c.dst = append(c.src, v), append(c.dst, v)
			}
		}
	}
	topo, err := graph.FromEdges(int64(c.nodes), c.src, c.dst, false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, topo.Close()) })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	g := &rig{ctx: ctx, dev: hostAt(t, max(c.sms, 1), c.level), topo: topo}
	g.stream = newStream(t, g.dev)
	dt, err := graph.Attach(g.dev, topo)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dt.Close()) })
	s, err := graph.NewSampler(g.dev, dt, graph.SamplerConfig{Fanouts: c.fanouts, Seed: 1,
		Degrees: true, Loopless: c.loops == LoopsRemaining,
		Method: map[bool]string{true: graph.Ladies}[c.layerwise]})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	g.mb, err = s.NewMiniBatch()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.mb.Close()) })
	seeds := c.batchSeeds
	for i := len(seeds); i < c.seeds; i++ {
		seeds = append(seeds, int64(i))
	}
	require.NoError(t, s.Begin(g.ctx, g.stream, g.mb, 0, 0, seeds))
	for h := range c.fanouts {
		require.NoError(t, s.Hop(g.ctx, g.stream, g.mb, h))
	}
	g.features = make([][]float64, c.nodes)
	for v := range g.features {
		for range c.dim {
			g.features[v] = append(g.features[v], float64(float32(r.NormFloat64())))
		}
	}
	n := g.mb.HopEnd[len(c.fanouts)]
	g.x = alloc(t, g.dev, n*int64(c.dim)*4)
	for i, v := range cuda.View[int64](g.mb.Nodes.Ptr(), n) {
		for k, f := range g.features[v] {
			f32(g.x)[i*c.dim+k] = float32(f)
		}
	}
	g.labels = alloc(t, g.dev, int64(len(seeds))*4)
	g.y = cuda.View[int32](g.labels.Ptr(), int64(len(seeds)))
	for i := range g.y {
		g.y[i] = int32(r.IntN(c.classes+1)) - 1 // some are -1
	}
	return g
}

// loopKinds are the kinds of models, and once more those that can add remaining self loops only.
func loopKinds() (kinds []ModelSettings) {
	for _, kind := range Archs() {
		kinds = append(kinds, ModelSettings{Model: kind})
		c := ModelConfig{ModelSettings: ModelSettings{Model: kind, SelfLoops: LoopsRemaining,
			Hidden: 6}}
		if c.CheckKind() == nil {
			kinds = append(kinds, ModelSettings{Model: kind, SelfLoops: LoopsRemaining})
		}
	}
	return kinds
}

func (g *rig) model(t testing.TB, cfg ModelConfig) *Model {
	m, err := NewModel(g.dev, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

func paramValues(m *Model) map[string]tensor64 {
	out := map[string]tensor64{}
	for _, p := range m.Params() {
		t := tensor64{p.Rows, p.Cols, nil}
		for _, v := range f32(p.Value) {
			t.v = append(t.v, float64(v))
		}
		out[p.Name] = t
	}
	return out
}

// Gradients against central differences of the float64 reference, every parameter of every
// model; a learning rate of 0 leaves the parameters as they are.
func TestGradients(t *testing.T) {
	for _, kind := range loopKinds() {
		for _, layers := range []int{1, 2, 3} {
			for i, drop := range []float64{0, 0.4, 0.2} {
				layerwise := i == 2
				if layerwise && layers == 2 {
					continue
				}
				t.Run(fmt.Sprintf("%s %s/%d layers/dropout %v/layer-wise %v", kind.Model,
					kind.SelfLoops, layers, drop, layerwise), func(t *testing.T) {
					c := rigConfig{nodes: 60, edges: 250, dim: 5, classes: 3, seeds: 9,
						fanouts: []int{3, 4, 2}[:layers], sms: 2, layerwise: layerwise,
						loops: kind.SelfLoops}
					if layerwise {
						c.fanouts = []int{7, 6, 8}[:layers]
					}
					g := newRig(t, c)
					cfg := withOptions(ModelConfig{
						ModelSettings: ModelSettings{Model: kind.Model, SelfLoops: kind.SelfLoops,
							Hidden: 6, Dropout: drop},
						InDim:   5,
						Classes: 3,
						Layers:  layers,
						Seed:    11,
					},
						ownOptions{drop == 0.4 || layers == 1, 1 + i, drop})
					checkGradients(t, g, cfg, 10*layers)
				})
			}
		}
	}
}

// checkGradients compares all gradients of a step with central differences, of which at least so
// many are not 0.
func checkGradients(t *testing.T, g *rig, cfg ModelConfig, least int) {
	m := g.model(t, cfg)
	for _, p := range m.Params() { // biases that are not 0
		if p.Rows == 1 {
			for i := range f32(p.Value) {
				f32(p.Value)[i] = 0.1 * float32(i+1)
			}
		}
	}
	st := Step{Seed: 5, Epoch: 2, Batch: 3}
	params := paramValues(m)
	require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), st))
	loss, correct, counted, err := m.Outcome(g.ctx, g.stream)
	require.NoError(t, err)
	_, _, want, wantCorrect, wantCounted := reference(g, cfg, params, &st)
	require.InDelta(t, want, loss, 1e-6*max(1, want))
	require.Equal(t, []int64{wantCorrect, wantCounted}, []int64{correct, counted})
	after := paramValues(m)
	for name, p := range params {
		if !strings.Contains(name, ".running_") { // which no gradient changes
			require.Equal(t, p, after[name], name)
		}
	}
	checked, offset := 0, int64(0)
	for _, p := range m.Params() {
		grad := cuda.View[float32](m.params.grad(offset), int64(p.Rows*p.Cols))
		offset += align(int64(p.Rows * p.Cols))
		v := params[p.Name].v
		for i := range v {
			const eps = 1e-7 // small, so that few steps cross the kink of a ReLU
			old := v[i]
			v[i] = old + eps
			_, _, up, _, _ := reference(g, cfg, params, &st)
			v[i] = old - eps
			_, _, down, _, _ := reference(g, cfg, params, &st)
			v[i] = old
			num := (up - down) / (2 * eps)
			require.InDelta(t, num, grad[i], 2e-6+1e-4*math.Abs(num), "%s[%d]", p.Name, i)
			if math.Abs(num) > 1e-4 {
				checked++
			}
		}
	}
	require.Greater(t, checked, least, "gradients that are not 0")
}

// Infer against the reference: no dropout, predictions, embeddings, full fanout.
func TestInfer(t *testing.T) {
	for _, kind := range loopKinds() {
		for _, fanouts := range [][]int{{-1, -1}, {3, 2}, {-1}, {60, 50}} {
			g := newRig(t, rigConfig{nodes: 300, edges: 2000, dim: 7, classes: 5, seeds: 40,
				fanouts: fanouts, sms: 2, layerwise: fanouts[0] == 60, loops: kind.SelfLoops})
			cfg := ModelConfig{
				ModelSettings: ModelSettings{Model: kind.Model, SelfLoops: kind.SelfLoops,
					Hidden: 9, Dropout: 0.5},
				InDim:   7,
				Classes: 5,
				Layers:  len(fanouts),
				Seed:    3,
			}
			m := g.model(t, cfg)
			require.ErrorContains(t, m.Predictions(g.ctx, g.stream, nil), "nothing was computed")
			require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr()))
			loss, correct, counted, err := m.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			logits, hidden, want, wantCorrect, wantCounted := reference(g, cfg, paramValues(m), nil)
			require.InDelta(t, want, loss, 1e-5)
			require.Equal(t, []int64{wantCorrect, wantCounted}, []int64{correct, counted})
			pred := make([]int32, 40)
			require.NoError(t, m.Predictions(g.ctx, g.stream, pred))
			for i, z := range logits {
				require.Equal(t, slices.Index(z, slices.Max(z)), int(pred[i]))
			}
			if len(fanouts) == 1 {
				hidden = logits
			}
			emb := make([]float32, 40*m.EmbeddingDim())
			require.NoError(t, m.Embeddings(g.ctx, g.stream, emb))
			for i := range 40 {
				for k, v := range hidden[i] {
					require.InDelta(t, v, emb[i*m.EmbeddingDim()+k], 1e-5)
				}
			}
			// Without labels: the same predictions, nothing counted.
			require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), 0))
			loss, correct, counted, err = m.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			require.Equal(t, []any{0.0, int64(0), int64(0)}, []any{loss, correct, counted})
			again := make([]int32, 40)
			require.NoError(t, m.Predictions(g.ctx, g.stream, again))
			require.Equal(t, pred, again)
		}
	}
}

// The five-node graph of the hand-computed cases, all edges taken:
//
//	1→0, 2→0, 3→0, 4→1 (so in-degrees 3, 1, 0, 0, 0), feature of node v: (v, 1)
func fiveNodes(t *testing.T) *rig {
	g := newRig(t, rigConfig{
		nodes: 5, dim: 2, classes: 2, fanouts: []int{-1}, batchSeeds: []int64{0, 1, 2},
		src: []int64{1, 2, 3, 4}, dst: []int64{0, 0, 0, 1},
	})
	nodes := cuda.View[int64](g.mb.Nodes.Ptr(), 5)
	require.Equal(t, []int64{0, 1, 2, 3, 4}, nodes)
	for v := range 5 {
		f32(g.x)[2*v], f32(g.x)[2*v+1] = float32(v), 1
	}
	return g
}

// loopedNodes are the five nodes with edges to themselves: two of node 0, one each of 1 and 4.
func loopedNodes(t *testing.T) *rig {
	g := newRig(t, rigConfig{
		nodes: 5, dim: 2, classes: 2, fanouts: []int{-1}, batchSeeds: []int64{0, 1, 2},
		src: []int64{1, 2, 3, 4, 0, 0, 1, 4}, dst: []int64{0, 0, 0, 1, 0, 0, 1, 4},
		loops: LoopsRemaining,
	})
	for i, v := range cuda.View[int64](g.mb.Nodes.Ptr(), 5) {
		f32(g.x)[2*i], f32(g.x)[2*i+1] = float32(v), 1
	}
	return g
}

// checkInfer holds the outputs of the three seeds against those of another program.
func (g *rig) checkInfer(t *testing.T, m *Model, want ...float64) {
	require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), 0))
	out := make([]float32, len(want))
	require.NoError(t, m.Embeddings(g.ctx, g.stream, out))
	for i := range want {
		require.InDelta(t, want[i], out[i], 1e-6)
	}
}

func setParam(t *testing.T, m *Model, name string, v ...float32) {
	for _, p := range m.Params() {
		if p.Name == name {
			require.Len(t, v, p.Rows*p.Cols)
			copy(f32(p.Value), v)
			return
		}
	}
	t.Fatalf("no parameter %s", name)
}

func randomFloats(n int, seed uint64) []float32 {
	r := rand.New(rand.NewPCG(seed, 3))
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64())
	}
	return v
}

// Every product against float64 sums, for odd shapes and strides, two products, bias and ReLU, with
// tiles of several sizes; and the same bits for every tiling and worker count, and for all levels
// above Generic.
func TestGEMM(t *testing.T) {
	sizes := []int64{1, 3, 47, 100, 602}
	if wide.Lean() {
		sizes = []int64{1, 3, 47, 130}
	}
	var devs []cuda.Device
	var streams []cuda.Stream
	for _, l := range simd.Levels() {
		for w := 1; w <= 4; w += 2 {
			devs = append(devs, hostAt(t, w, l))
			streams = append(streams, newStream(t, devs[len(devs)-1]))
		}
	}
	for _, name := range []string{"gemm_nn", "gemm_nt", "gemm_tn", "gemm_nn_bf16", "gemm_nt_bf16",
		"gemm_tn_bf16"} {
		checkGEMM(t, devs, streams, name, 5, 7, 602) // more steps than a panel has
		for _, M := range sizes {
			for _, N := range sizes {
				for _, K := range sizes {
					if M*N*K > 20e6 {
						continue
					}
					checkGEMM(t, devs, streams, name, M, N, K)
				}
			}
		}
	}
}

func checkGEMM(t *testing.T, devs []cuda.Device, streams []cuda.Stream, kernel string, M, N,
	K int64) {
	const pad = 3 // rows are longer than they are wide
	name, bf16 := strings.CutSuffix(kernel, "_bf16")
	prec := cuda.FP32
	if bf16 {
		prec = cuda.BF16
	}
	p := gemmParams{M: M, N: N, K: K, LDA: K + pad, LDB: N + pad, LDC: N + pad, Flags: gemmReLU}
	ra, rb := M, K
	switch name {
	case "gemm_nt":
		p.LDB, rb = K+pad, N
	case "gemm_tn":
		p.LDA, ra = M+pad, K
	default:
		p.K2, p.LDA2, p.LDB2 = 5, 6, N
	}
	a, b, a2, b2, bias := randomFloats(int(ra*p.LDA), 1), randomFloats(int(rb*p.LDB), 2),
		randomFloats(int(M*6), 3), randomFloats(int(5*N), 4), randomFloats(int(N), 5)
	var first []float32
	class := ""
	for w, dev := range devs {
		k, err := dev.Kernel(kernel)
		require.NoError(t, err)
		var bufs []cuda.Buffer
		buf := func(v []float32) cuda.DevicePtr {
			x, err := dev.Alloc(cuda.MemDevice, int64(len(v))*4, "gemm test")
			require.NoError(t, err)
			copy(f32(x), v)
			bufs = append(bufs, x)
			return x.Ptr()
		}
		p.A, p.B, p.Bias, p.C = buf(a), buf(b), buf(bias), buf(make([]float32, M*p.LDC))
		if p.K2 > 0 {
			p.A2, p.B2 = buf(a2), buf(b2)
		}
		p.MB, p.NB = []int64{512, 7, 32, 16, 1024, 13}[w], []int64{256, 4, 64, 32, 640, 20}[w]
		grid := int((M + p.MB - 1) / p.MB * ((N + p.NB - 1) / p.NB))
		require.NoError(t, cuda.Launch(streams[w], k, cuda.LaunchConfig{Blocks: grid, Threads: 256},
			p))
		require.NoError(t, streams[w].Synchronize(t.Context()))
		got := slices.Clone(cuda.View[float32](p.C, M*p.LDC))
		for _, x := range bufs {
			require.NoError(t, x.Free())
		}
		now := "generic"
		if bf16 || dev.Info().Kernels != now {
			now = "fused"
		}
		if now == class {
			require.Equal(t, first, got, "%s %dx%dx%d differs at level %s with tile %dx%d", kernel,
				M, N, K, dev.Info().Kernels, p.MB, p.NB)
			continue
		}
		first, class = got, now
		for i := range M {
			for j := range p.LDC {
				if j >= N {
					require.Zero(t, got[i*p.LDC+j], "written past the row")
					continue
				}
				sum, scale := 0.0, 1.0
				add := func(x, y float32) {
					z := roundFactor(x, prec) * roundFactor(y, prec)
					sum += z
					scale += math.Abs(z)
				}
				for q := range K {
					switch name {
					case "gemm_nn":
						add(a[i*p.LDA+q], b[q*p.LDB+j])
					case "gemm_nt":
						add(a[i*p.LDA+q], b[j*p.LDB+q])
					default:
						add(a[q*p.LDA+i], b[q*p.LDB+j])
					}
				}
				for q := range p.K2 {
					add(a2[i*6+q], b2[q*N+j])
				}
				sum += float64(bias[j])
				scale += math.Abs(float64(bias[j]))
				if d := math.Abs(max(sum, 0) - float64(got[i*p.LDC+j])); d > 3e-6*scale {
					t.Fatalf("%s %dx%dx%d [%d,%d]: %v, expected %v", kernel, M, N, K, i, j,
						got[i*p.LDC+j], sum)
				}
			}
		}
	}
}

// The transpose and the backward gather against a scatter in float64: a hub with hundreds of edges
// (whose list is sorted), rows wider than the scratch row, masked and scaled.
func TestAggregateBackward(t *testing.T) {
	const nodes, dim, seeds = 700, 1100, 300
	var src, dst []int64
	r := rand.New(rand.NewPCG(1, 1))
	for v := range int64(seeds) {
		src, dst = append(src, nodes-1), append(dst, v) // the hub
		for range r.IntN(4) {
			src, dst = append(src, r.Int64N(nodes)), append(dst, v)
		}
	}
	for _, kind := range []string{"sage_mean_bwd", "gcn_agg_bwd"} {
		var first []float32
		for _, sms := range []int{1, 3} {
			g := newRig(t, rigConfig{nodes: nodes, dim: 1, classes: 2, seeds: seeds,
				fanouts: []int{-1}, src: src, dst: dst, sms: sms})
			b := g.mb.Blocks[0]
			h, grad, self := randomFloats(int(b.NumSrc)*dim, 2), randomFloats(seeds*dim, 3),
				randomFloats(seeds*dim, 4)
			out := floats(t, g.dev, h)
			a := aggParams{
				Indptr: b.Indptr.Ptr(), Src: b.Src.Ptr(), Degrees: g.mb.Degrees.Ptr(),
				Out:  out.Ptr(),
				Grad: floats(t, g.dev, grad).Ptr(), Self: floats(t, g.dev, self).Ptr(),
				TEnd: alloc(t, g.dev, b.NumSrc*4).Ptr(), TDst: alloc(t, g.dev, b.NumEdges*4).Ptr(),
				NumDst: b.NumDst, NumSrc: b.NumSrc, Edges: b.NumEdges, Dim: dim, Scale: 2,
				Weights: alloc(t, g.dev, b.NumDst*4).Ptr(),
			}
			for _, name := range []string{kind[:strings.IndexByte(kind, '_')] +
				"_transpose", kind} {
				k, err := g.dev.Kernel(name)
				require.NoError(t, err)
				require.NoError(t,
					cuda.Launch(g.stream, k, cuda.LaunchConfig{Blocks: 7, Threads: 256}, a))
			}
			require.NoError(t, g.stream.Synchronize(g.ctx))
			if first != nil {
				require.Equal(t, first, f32(out))
				continue
			}
			first = slices.Clone(f32(out))
			want := make([]float64, len(h))
			indptr := cuda.View[int64](b.Indptr.Ptr(), seeds+1)
			deg := cuda.View[uint32](g.mb.Degrees.Ptr(), b.NumSrc)
			for i := range seeds {
				for k := range dim {
					if kind == "gcn_agg_bwd" {
						want[i*dim+k] += float64(grad[i*dim+k]) / float64(deg[i]+1)
					} else {
						want[i*dim+k] += float64(self[i*dim+k])
					}
				}
				list := cuda.View[uint32](b.Src.Ptr(), b.NumEdges)[indptr[i]:indptr[i+1]]
				for _, j := range list {
					w := 1 / float64(len(list))
					if kind == "gcn_agg_bwd" {
						w = 1 / math.Sqrt(float64(deg[i]+1)*float64(deg[j]+1))
					}
					for k := range dim {
						want[int(j)*dim+k] += w * float64(grad[i*dim+k])
					}
				}
			}
			for e, v := range want {
				if h[e] <= 0 {
					v = 0
				}
				if math.Abs(2*v-float64(first[e])) > 1e-4 {
					t.Fatalf("%s: element %d is %v, expected %v", kind, e, first[e], 2*v)
				}
			}
		}
	}
}

// Some steps of every model give the same bits on 1 to 7 workers and when repeated, of blocks with
// weights too; so do all levels that fuse multiply and add, with widths that end within vectors.
func TestWorkersChangeNothing(t *testing.T) {
	type run struct {
		level simd.Level
		sms   int
	}
	groups := [][]run{{{simd.Generic, 1}, {simd.Generic, 3}}}
	if levels := simd.Levels()[1:]; len(levels) > 0 {
		var fused []run
		for _, l := range levels {
			for _, sms := range []int{1, 2, 3, 7, 2} {
				fused = append(fused, run{l, sms})
			}
		}
		groups = append(groups, fused)
	}
	kinds := Archs()
	for i := range 2 * len(kinds) * len(groups) {
		kind, c := kinds[i%len(kinds)], rigConfig{nodes: 2000, edges: 20000, dim: 20,
			classes: 7, seeds: 200, fanouts: []int{5, 5, 3}}
		if i >= len(kinds)*len(groups) {
			c.fanouts, c.layerwise = []int{300, 200, 500}, true
		}
		var want string
		var wantLoss float64
		for run, group := range groups[i/len(kinds)%len(groups)] {
			sms := group.sms
			c.sms, c.level = sms, group.level
			g := newRig(t, c)
			m := g.model(t, ModelConfig{
				ModelSettings: ModelSettings{Model: kind, Hidden: 33, Dropout: 0.3,
					FeatureDropout: 0.1},
				InDim:   20,
				Classes: 7,
				Layers:  3,
				Seed:    1,
			})
			for i := range 3 {
				require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(),
					Step{Seed: 2, Batch: i, LR: 0.01, WeightDecay: 0.01}))
			}
			loss, _, _, err := m.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			sum, err := m.ParamsSHA256()
			require.NoError(t, err)
			if run == 0 {
				want, wantLoss = sum, loss
			}
			require.Equal(t, want, sum, "%s with %d workers at level %v", kind, sms, group.level)
			require.Equal(t, wantLoss, loss)
		}
	}
}

// With factors in bfloat16 all levels and numbers of workers give the same bits, Generic too; they
// are not float32's, and the loss is near.
func TestBF16IsTheSameEverywhere(t *testing.T) {
	for _, kind := range Archs() {
		train := func(level simd.Level, sms int, prec cuda.Precision) (string, float64) {
			g := newRig(t, rigConfig{nodes: 600, edges: 5000, dim: 21, classes: 7, seeds: 90,
				fanouts: []int{5, 3}, sms: sms, level: level})
			m := g.model(t, ModelConfig{
				ModelSettings: ModelSettings{Model: kind, Hidden: 33, Dropout: 0.3},
				InDim:         21,
				Classes:       7,
				Layers:        2,
				Seed:          1,
				Precision:     prec,
			})
			for i := range 3 {
				require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(),
					Step{Seed: 2, Batch: i, LR: 0.01, WeightDecay: 0.01}))
			}
			loss, _, _, err := m.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			sum, err := m.ParamsSHA256()
			require.NoError(t, err)
			return sum, loss
		}
		want, loss := train(simd.Generic, 1, cuda.BF16)
		for _, l := range simd.Levels() {
			for _, sms := range []int{1, 3} {
				got, lossHere := train(l, sms, cuda.BF16)
				require.Equal(t, want, got, "%s at %v with %d workers", kind, l, sms)
				require.Equal(t, loss, lossHere)
			}
		}
		sum32, loss32 := train(simd.Auto, 2, cuda.FP32)
		require.NotEqual(t, want, sum32)
		require.InEpsilon(t, loss32, loss, 1e-2, kind)
		require.NotEqual(t, loss32, loss)
	}
}

// A layer that takes all candidates is full-neighbour training, to the bit.
func TestLayerwiseOfAllIsFullNeighbours(t *testing.T) {
	for _, kind := range Archs() {
		var sums []string
		for _, layerwise := range []bool{false, true} {
			g := newRig(t, rigConfig{nodes: 400, edges: 2000, dim: 20, classes: 7, seeds: 50,
				fanouts: []int{-1, -1}, sms: 2, layerwise: layerwise})
			require.Equal(t, layerwise, g.mb.Blocks[1].Weights != nil)
			m := g.model(t, ModelConfig{
				ModelSettings: ModelSettings{Model: kind, Hidden: 33, Dropout: 0.3},
				InDim:         20,
				Classes:       7,
				Layers:        2,
				Seed:          1,
			})
			for i := range 3 {
				require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(),
					Step{Seed: 2, Batch: i, LR: 0.01}))
			}
			_, _, _, err := m.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			sum, err := m.ParamsSHA256()
			require.NoError(t, err)
			sums = append(sums, sum)
		}
		require.Equal(t, sums[0], sums[1])
	}
}

func TestOverfitsATinySet(t *testing.T) {
	for _, kind := range Archs() {
		g := newRig(t, rigConfig{nodes: 100, edges: 300, dim: 16, classes: 4, seeds: 30,
			fanouts: []int{3, 3}, sms: 2})
		m := g.model(t, ModelConfig{
			ModelSettings: ModelSettings{Model: kind, Hidden: 32},
			InDim:         16,
			Classes:       4,
			Layers:        2,
			Seed:          1,
		})
		var first, last float64
		var correct, counted int64
		for i := range 200 {
			require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(),
				Step{LR: 0.02, Batch: i}))
			loss, c, n, err := m.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			if i == 0 {
				first = loss
			}
			last, correct, counted = loss, c, n
		}
		require.Greater(t, first, 1.0)
		require.Less(t, last, 0.05, kind)
		require.Equal(t, counted, correct)
		require.Greater(t, counted, int64(15))
		require.Equal(t, int64(200), m.AdamStep())
	}
}

// Seeds without a label change neither loss nor gradient; a batch with none at all has loss 0.
func TestIgnoredLabels(t *testing.T) {
	g := newRig(t, rigConfig{nodes: 50, edges: 200, dim: 4, classes: 3, seeds: 10,
		fanouts: []int{3}})
	m := g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: "sage"}, InDim: 4, Classes: 3,
		Layers: 1, Seed: 1})
	for i := range g.y {
		g.y[i] = -1
	}
	before := paramValues(m)
	require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), Step{LR: 1}))
	loss, correct, counted, err := m.Outcome(g.ctx, g.stream)
	require.NoError(t, err)
	require.Equal(t, []any{0.0, int64(0), int64(0)}, []any{loss, correct, counted})
	require.Equal(t, before, paramValues(m))

	g.y[4] = 2
	require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr()))
	loss, _, counted, err = m.Outcome(g.ctx, g.stream)
	require.NoError(t, err)
	logits, _, _, _, _ := reference(g, m.net.cfg, paramValues(m), nil)
	sum := 0.0
	for _, z := range logits[4] {
		sum += math.Exp(z)
	}
	require.InDelta(t, math.Log(sum)-logits[4][2], loss, 1e-6)
	require.Equal(t, int64(1), counted)
}

// Adam and AdamW against a plain float64 loop of the algorithm, over several steps.
func TestAdam(t *testing.T) {
	dev := host(t, 2)
	s := newStream(t, dev)
	const n = 5000
	for _, decoupled := range []bool{false, true} {
		o := newLauncher(dev)
		require.NoError(t, o.find(nil))
		store := alloc(t, dev, 16*n+8*(squareUnits(n)+1))
		copy(f32(store), randomFloats(n, 1))
		p, mm, vv := make([]float64, n), make([]float64, n), make([]float64, n)
		for i := range p {
			p[i] = float64(f32(store)[i])
		}
		st := &step{parameters: &parameters{n: n, learns: n, store: store,
			squares: alloc(t, dev, 8)}, grid: o.grid, on: o,
			stepSink: stepSink{stream: s},
			set:      &Step{LR: 0.05, Beta1: 0.8, WeightDecay: 0.1, Decoupled: decoupled}}
		for step := 1; step <= 5; step++ {
			g := randomFloats(n, uint64(step)+10)
			copy(f32(store)[n:], g)
			require.NoError(t, st.adam(st.grad(0)))
			st.adamStep++ // as Train does when all of a step is enqueued
			require.NoError(t, s.Synchronize(t.Context()))
			for i := range p {
				d := float64(g[i])
				if decoupled {
					p[i] -= 0.05 * 0.1 * p[i]
				} else {
					d += 0.1 * p[i]
				}
				mm[i] = 0.8*mm[i] + 0.2*d
				vv[i] = 0.999*vv[i] + 0.001*d*d
				mHat := mm[i] / (1 - math.Pow(0.8, float64(step)))
				vHat := vv[i] / (1 - math.Pow(0.999, float64(step)))
				p[i] -= 0.05 * mHat / (math.Sqrt(vHat) + 1e-8)
				require.InDelta(t, p[i], f32(store)[i], 2e-5)
			}
		}
		require.Equal(t, int64(5), st.adamStep)
	}
}

// Masks keep the wanted share, differ between layers, batches, epochs and seeds, and do not
// depend on where a tile starts.
func TestDropoutMask(t *testing.T) {
	mask := func(d dropout, row, col, n int64) []float32 {
		v := slices.Repeat([]float32{1}, int(n))
		d.apply(simd.Best(), v, row, col)
		return v
	}
	base := dropout{Key: philox.Key(1, philox.StreamDropout), P: 0.3, Scale: 1 / 0.7, Layer: 1,
		Epoch: 2, Batch: 3}
	kept, all := 0, 0
	for row := range int64(500) {
		for _, v := range mask(base, row, 0, 101) {
			all++
			if v != 0 {
				require.Equal(t, base.Scale, v)
				kept++
			}
		}
	}
	require.InDelta(t, 0.7, float64(kept)/float64(all), 0.01)
	want := mask(base, 9, 0, 101)
	require.Equal(t, want[64:], mask(base, 9, 64, 37))
	for _, change := range []func(*dropout){
		func(d *dropout) { d.Layer++ }, func(d *dropout) { d.Epoch++ },
		func(d *dropout) { d.Batch++ },
		func(d *dropout) { d.Key = philox.Key(2, philox.StreamDropout) },
	} {
		d := base
		change(&d)
		require.NotEqual(t, want, mask(d, 9, 0, 101))
	}
	require.NotEqual(t, want, mask(base, 10, 0, 101))
}

func TestInit(t *testing.T) {
	g := newRig(t, rigConfig{nodes: 5, edges: 5, dim: 1, classes: 1, seeds: 1, fanouts: []int{1}})
	cfg := ModelConfig{ModelSettings: ModelSettings{Model: "sage", Hidden: 100}, InDim: 50, Classes: 7,
		Layers: 3, Seed: 9}
	a, b := g.model(t, cfg), g.model(t, cfg)
	sumA, err := a.ParamsSHA256()
	require.NoError(t, err)
	sumB, err := b.ParamsSHA256()
	require.NoError(t, err)
	require.Equal(t, sumA, sumB)
	cfg.Seed++
	sumC, err := g.model(t, cfg).ParamsSHA256()
	require.NoError(t, err)
	require.NotEqual(t, sumA, sumC)
	require.Len(t, a.Params(), 9)
	for _, p := range a.Params() {
		require.Equal(t, p.Rows*p.Cols, len(f32(p.Value)))
		require.Equal(t, int64(p.Rows*p.Cols*4), p.M.Size())
		limit, sum, largest := math.Sqrt(6/float64(p.Rows+p.Cols)), 0.0, 0.0
		for _, v := range f32(p.Value) {
			sum += float64(v)
			largest = max(largest, math.Abs(float64(v)))
		}
		if p.Rows == 1 {
			require.Zero(t, largest)
			continue
		}
		require.LessOrEqual(t, largest, limit)
		require.Greater(t, largest, 0.95*limit)
		require.InDelta(t, 0, sum/float64(p.Rows*p.Cols),
			5*limit/math.Sqrt(float64(3*p.Rows*p.Cols)))
	}
	f32(a.Params()[8].Value)[3] += 1
	sumD, err := a.ParamsSHA256()
	require.NoError(t, err)
	require.NotEqual(t, sumA, sumD)
	a.SetAdamStep(17)
	require.Equal(t, int64(17), a.AdamStep())
}

func TestMisuse(t *testing.T) {
	g := newRig(t, rigConfig{nodes: 50, edges: 200, dim: 4, classes: 3, seeds: 10,
		fanouts: []int{3}})
	for _, c := range []struct {
		cfg  ModelConfig
		want string
	}{
		{ModelConfig{ModelSettings: ModelSettings{Model: "mlp"}, InDim: 1, Classes: 1, Layers: 1}, `model "mlp" is unknown`},
		{ModelConfig{ModelSettings: ModelSettings{Model: "gcn"}, InDim: 1, Classes: 1, Layers: 0}, "0 layers"},
		{ModelConfig{ModelSettings: ModelSettings{Model: "gcn"}, InDim: 0, Classes: 1, Layers: 1}, "must be at least 1"},
		{ModelConfig{ModelSettings: ModelSettings{Model: "gcn"}, InDim: 4, Classes: 3, Layers: 2}, "must be at least 1"},
		{ModelConfig{ModelSettings: ModelSettings{Model: "gcn", Dropout: 1}, InDim: 4, Classes: 3,
			Layers: 1},
			"option dropout 1 is not in"},
		{ModelConfig{ModelSettings: ModelSettings{Model: "gcn", Dropout: math.NaN()}, InDim: 4,
			Classes: 3, Layers: 1},
			"dropout NaN"},
	} {
		_, err := NewModel(g.dev, c.cfg)
		require.ErrorContains(t, err, c.want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	m := g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: "gcn", Hidden: 2}, InDim: 4,
		Classes: 3, Layers: 2})
	require.ErrorContains(t, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), Step{}),
		"1 of 2 hops")
	m = g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: "gcn"}, InDim: 4, Classes: 3,
		Layers: 1})
	require.ErrorContains(t, m.Train(g.stream, g.mb, g.x.Ptr(), 0, Step{}), "no labels")
	require.ErrorContains(t, m.Embeddings(g.ctx, g.stream, nil), "call Infer first")
	require.NoError(t, m.Infer(g.stream, g.mb, g.x.Ptr(), 0))
	require.ErrorContains(t, m.Predictions(g.ctx, g.stream, make([]int32, 9)),
		"room for 9 seeds, the batch had 10")
	require.NoError(t, m.Predictions(g.ctx, g.stream, make([]int32, 10)))

	s, err := g.dev.NewStream(cuda.StreamOptions{Name: "bad label"})
	require.NoError(t, err)
	g.y[7] = 3
	// a later launch of the step may say it already
	err = m.Train(s, g.mb, g.x.Ptr(), g.labels.Ptr(), Step{})
	if err == nil {
		_, _, _, err = m.Outcome(g.ctx, s)
	}
	require.ErrorContains(t, err, "label 3 of seed 7 is out of range")
	_ = s.Close() // repeats the stream's error
}

// A steady state makes no new buffers; an outgrown workspace is freed after the next Outcome.
func TestWorkspace(t *testing.T) {
	small := newRig(t, rigConfig{nodes: 500, edges: 3000, dim: 8, classes: 3, seeds: 10,
		fanouts: []int{3, 3}})
	m := small.model(t, ModelConfig{ModelSettings: ModelSettings{Model: "sage", Hidden: 16}, InDim: 8,
		Classes: 3, Layers: 2})
	train := func() {
		require.NoError(t, m.Train(small.stream, small.mb, small.x.Ptr(), small.labels.Ptr(),
			Step{LR: 0.01}))
		_, _, _, err := m.Outcome(small.ctx, small.stream)
		require.NoError(t, err)
	}
	train()
	usage := small.dev.MemUsage()
	for range 3 {
		train()
	}
	require.Equal(t, usage, small.dev.MemUsage())
	want := m.mem.work.Size()
	require.NoError(t, m.mem.work.Free())
	tiny, err := small.dev.Alloc(cuda.MemDevice, 4096, "activations") // as after a small batch
	require.NoError(t, err)
	m.mem.work = tiny
	require.NoError(t, m.Train(small.stream, small.mb, small.x.Ptr(), small.labels.Ptr(),
		Step{LR: 0.01}))
	require.NotNil(t, tiny.Bytes(), "freed while a step may use it")
	_, _, _, err = m.Outcome(small.ctx, small.stream)
	require.NoError(t, err)
	require.Nil(t, tiny.Bytes())
	require.GreaterOrEqual(t, m.mem.work.Size(), want)
}

func BenchmarkGEMM(b *testing.B) {
	for _, op := range []gemmOp{opNN, opNT, opTN} {
		for _, workers := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/11000x128x128/workers=%d", op, workers), func(b *testing.B) {
				dev := host(b, workers)
				s := newStream(b, dev)
				o := newLauncher(dev)
				require.NoError(b, o.findHost())
				const big, small = 11000, 128
				x, w, y := floats(b, dev, randomFloats(big*small, 1)),
					floats(b, dev, randomFloats(small*small, 2)),
					floats(b, dev, randomFloats(big*small, 3))
				p := gemmParams{M: big, N: small, K: small, LDA: small, LDB: small, LDC: small,
					A: x.Ptr(), B: w.Ptr(), C: y.Ptr()}
				if op == opTN {
					p.M, p.K, p.B, p.C = small, big, y.Ptr(), w.Ptr()
				}
				b.ReportAllocs()
				for b.Loop() {
					require.NoError(b, o.gemm(&stepSink{stream: s}, op, &p, 0))
					require.NoError(b, s.Synchronize(b.Context()))
				}
				b.ReportMetric(float64(b.N)*2*big*small*small/b.Elapsed().Seconds()/1e9, "GFLOP/s")
			})
		}
	}
}

// One step of issue 2's demo shape: fanout 10,10, batch 1024, 128 features, hidden 128.
func BenchmarkTrainStep(b *testing.B) {
	for _, kind := range []string{"sage", "gcn"} {
		for _, workers := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/workers=%d", kind, workers), func(b *testing.B) {
				g := newRig(b, rigConfig{nodes: 200000, edges: 2400000, dim: 128, classes: 16,
					seeds: 1024, fanouts: []int{10, 10}, sms: workers})
				m := g.model(b, ModelConfig{
					ModelSettings: ModelSettings{Model: kind, Hidden: 128, Dropout: 0.5},
					InDim:         128,
					Classes:       16,
					Layers:        2,
				})
				dst := g.mb.Blocks[1].NumDst
				products := 2.0
				if kind == "sage" {
					products = 4
				}
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					require.NoError(b, m.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(),
						Step{LR: 0.003, Batch: i}))
					_, _, _, err := m.Outcome(g.ctx, g.stream)
					require.NoError(b, err)
				}
				b.ReportMetric(float64(b.N)*products*2*float64(
					dst)*128*128/b.Elapsed().Seconds()/1e9, "GFLOP/s-layer0")
			})
		}
	}
}
