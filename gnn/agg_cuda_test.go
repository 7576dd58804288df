package gnn

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/klauspost/cpuid/v2"
	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/philox"
	"helios/internal/simd"
	"helios/internal/testing/difftest"
	"helios/internal/testing/wide"
)

// kernRig launches the CUDA kernels of this package beside Go's on a comparing device: what differs
// by a bit fails.
type kernRig struct {
	*testing.T
	ctx context.Context
	dev *difftest.Device
	st  cuda.Stream
	on  *launcher
	q   *stepSink
	rng *rand.Rand
}

func newKernRig(t *testing.T, seed uint64, opt difftest.Options) *kernRig {
	opt.Seed, opt.SMs, opt.RandomThreads = seed, 3, true
	if opt.Tolerance == nil && !(runtime.GOARCH == "amd64" && cpuid.CPU.Supports(cpuid.AVX,
		cpuid.FMA3)) {
		// Go's math.Exp is another here than the one that fp.h follows.
		other := difftest.Tolerance{Abs: 1e-14, Rel: 2e-7, Wide: true}
		opt.Tolerance = map[string]difftest.Tolerance{"softmax_xent": other, "loss_bce": other}
	}
	g := &kernRig{T: t, dev: difftest.Open(t, opt), rng: rand.New(rand.NewPCG(seed, 7))}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	g.ctx = ctx
	var err error
	g.st, err = g.dev.NewStream(cuda.StreamOptions{Name: "kernels"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = g.st.Close() })
	g.on, g.q = newLauncher(g.dev), &stepSink{stream: g.st}
	return g
}

// blank is memory for n elements of T.
func blank[T any](g *kernRig, n int64) cuda.DevicePtr {
	var t T
	b, err := g.dev.Alloc(cuda.MemDevice, max(n, 1)*int64(unsafe.Sizeof(t)), "kernel test")
	require.NoError(g, err)
	g.Cleanup(func() { _ = b.Free() })
	return b.Ptr()
}

// given is room with these values.
func given[T any](g *kernRig, v []T) cuda.DevicePtr {
	p := blank[T](g, int64(len(v)))
	require.NoError(g, difftest.Upload(g.ctx, g.dev, g.st, p, v))
	return p
}

func got[T any](g *kernRig, p cuda.DevicePtr, n int64) []T {
	v, err := difftest.Download[T](g.ctx, g.dev, g.st, p, n)
	require.NoError(g, err)
	return v
}

func (g *kernRig) floats(n int64) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(g.rng.NormFloat64())
		if g.rng.IntN(16) == 0 {
			v[i] = 0
		}
	}
	return v
}

// both launches a kernel that both sides have, with any grid.
func both[T any](g *kernRig, name string, p T) {
	k, err := g.on.kernel(name)
	require.NoError(g, err)
	require.NoError(g, put(g.q, k, cuda.LaunchConfig{Blocks: 1 + g.rng.IntN(7), Threads: 256}, p))
}

// testBlock is a sampled block on the CPU.
type testBlock struct {
	indptr  []int64
	src     []uint32
	degrees []uint32
	numSrc  int64
}

// block makes lists of up to most sources, some empty, of which source hub is in nearly all.
func (g *kernRig) block(numDst, numSrc int64, limit int, hub uint32) testBlock {
	b := testBlock{indptr: []int64{0}, numSrc: numSrc}
	for range numDst {
		n := g.rng.IntN(limit + 1)
		for range n {
			b.src = append(b.src, uint32(g.rng.Int64N(numSrc)))
		}
		if n > 0 && g.rng.IntN(8) > 0 {
			b.src[len(b.src)-1] = hub
		}
		b.indptr = append(b.indptr, int64(len(b.src)))
	}
	for j := range numSrc {
		d := uint32(g.rng.IntN(50))
		if j < numDst {
			d += uint32(b.indptr[j+1] - b.indptr[j])
		}
		b.degrees = append(b.degrees, d)
	}
	return b
}

// The aggregations, of blocks with weights too, the transpose and the gradients are the host's to
// the bit, for rows of every width around a word, a warp and a stripe, at addresses that allow no
// wide access, with hubs and empty lists. The transpose has no twin: it is compared with lists made
// here.
func TestGPUAggregation(t *testing.T) {
	g := newKernRig(t, 3, difftest.Options{})
	dims := []int64{1, 2, 3, 4, 6, 31, 64, 66, 100, 129, 300}
	if wide.Lean() {
		dims = []int64{3, 6, 64, 129}
	}
	for n, dim := range dims {
		numDst := 1 + g.rng.Int64N(120)
		b := g.block(numDst, numDst+g.rng.Int64N(200), 12, uint32(g.rng.Int64N(numDst)))
		edges, odd := int64(len(b.src)), cuda.DevicePtr(n%3/2*4)
		a := aggParams{
			Indptr: given(g, b.indptr), Src: given(g, b.src), NumDst: numDst, NumSrc: b.numSrc,
			Edges: edges, Dim: dim,
			Degrees: given(g, b.degrees), Weights: blank[float32](g, b.numSrc),
			Out: blank[float32](g, b.numSrc*dim+1) + odd,
			X:   given(g, g.floats(b.numSrc*dim+1)) + odd,
		}
		both(g, "sage_mean", a)
		both(g, "gcn_weights", a)
		both(g, "gcn_agg", a)
		shares := make([]float32, b.numSrc)
		for j := range shares {
			shares[j] = float32(math.Exp(3 * g.rng.NormFloat64()))
		}
		weighted := a
		weighted.SrcWeights, weighted.DstWeights = given(g, shares), blank[float32](g, numDst)
		both(g, "agg_weights", weighted)
		both(g, "gcn_weights", weighted)
		both(g, "gcn_agg", weighted)
		for _, of := range []aggParams{a, weighted} { // remaining self loops
			of.DstWeights, of.SelfWeights = weighted.DstWeights, blank[float32](g, numDst)
			both(g, "self_weights", of)
			both(g, "gcn_agg", of)
		}
		gin := a
		gin.Eps, gin.Degrees = given(g, g.floats(1)), 0
		both(g, "gin_sum", gin)
		gin.SrcWeights = weighted.SrcWeights
		both(g, "gin_weighted", gin)
		rows := gin
		rows.Out, rows.Grad = given(g, g.floats(numDst*dim+1))+odd,
			given(g, g.floats(numDst*dim+1))+odd
		both(g, "relu_bwd", rows)
		both(g, "row_dot", rows)
		for i, model := range []string{"sage", "gcn", "sage", "gcn", "gcn"} {
			w := edgeWeights{gcn: model == "gcn", indptr: b.indptr, deg: b.degrees}
			back := a
			if i >= 2 {
				back = weighted
			}
			if model == "sage" {
				back.Degrees = 0
			}
			if i >= 2 {
				kernel := "agg_weights"
				if i == 4 {
					kernel, back.SelfWeights = "self_weights", blank[float32](g, numDst)
				}
				both(g, kernel, back)
				w.dst = got[float32](g, back.DstWeights, numDst)
				if model == "sage" {
					both(g, "sage_weighted", back)
				}
			}
			back.TEnd, back.TDst = blank[uint32](g, b.numSrc), blank[uint32](g, edges)
			scratch := blank[byte](g, transposeScratch(b.numSrc, edges))
			require.NoError(t, g.on.transposeGPU(g.q, &back, scratch))
			g.checkTranspose(&b, &back, w)
			back.Out = given(g, g.floats(b.numSrc*dim+1)) + odd
			back.Grad, back.Self = given(g, g.floats(numDst*dim+1))+odd,
				given(g, g.floats(numDst*dim+1))+odd
			back.Scale = 1 / (1 - 0.3)
			if model == "sage" {
				both(g, "sage_mean_bwd", back)
				back.Out, back.Eps = given(g, g.floats(b.numSrc*dim+1))+odd, gin.Eps
				both(g, "gin_sum_bwd", back)
			} else {
				both(g, "gcn_agg_bwd", back)
			}
		}
	}
	for kernel, times := range map[string]int{"sage_mean": 1, "sage_weighted": 1, "gin_sum": 1,
		"gin_weighted": 1, "gin_sum_bwd": 2, "relu_bwd": 1, "row_dot": 1, "gcn_agg": 4,
		"sage_mean_bwd": 2, "gcn_agg_bwd": 3, "agg_weights": 3, "self_weights": 3} {
		require.Equal(t, times*len(dims), g.dev.Launches()[kernel], kernel)
	}
}

func (g *kernRig) checkTranspose(b *testBlock, a *aggParams, w edgeWeights) {
	lists := make([][]uint32, b.numSrc)
	weights := make([]float32, a.NumDst)
	for i := range a.NumDst {
		if b.indptr[i+1] > b.indptr[i] {
			weights[i] = w.ofDst(i)
		}
		for _, j := range b.src[b.indptr[i]:b.indptr[i+1]] {
			lists[j] = append(lists[j], uint32(i))
		}
	}
	var end []uint32
	n := uint32(0)
	for _, l := range lists {
		n += uint32(len(l))
		end = append(end, n)
	}
	require.Equal(g, end, got[uint32](g, a.TEnd, b.numSrc))
	require.Equal(g, append([]uint32{}, slices.Concat(lists...)...),
		got[uint32](g, a.TDst, a.Edges))
	require.Equal(g, weights, got[float32](g, a.Weights, a.NumDst))
}

// The transpose in passes of every width, with more shares than one, and of no edges at all.
func TestGPUTranspose(t *testing.T) {
	g := newKernRig(t, 5, difftest.Options{})
	sizes := [][3]int64{{1, 1, 0}, {1, 1, 3}, {3, 512, 40}, {200, 513, 30}, {300, 5000, 25},
		{40, 262145, 200}}
	if wide.Lean() {
		sizes = sizes[2:5]
	}
	for _, s := range sizes {
		b := g.block(s[0], s[1], int(s[2]), uint32(s[1]-1))
		a := aggParams{
			Indptr: given(g, b.indptr), Src: given(g, b.src), NumDst: s[0], NumSrc: s[1],
			Edges:   int64(len(b.src)),
			Weights: blank[float32](g, s[0]), TEnd: blank[uint32](g, s[1]),
			TDst: blank[uint32](g, int64(len(b.src))),
		}
		require.NoError(t,
			g.on.transposeGPU(g.q, &a, blank[byte](g, transposeScratch(a.NumSrc, a.Edges))))
		g.checkTranspose(&b, &a, edgeWeights{indptr: b.indptr})
	}
	require.Empty(t, g.dev.Launches())
	require.Equal(t, len(sizes), g.dev.Mirrored()["transpose_ends"])
}

// Sums of columns are one tree on the host, in one launch and in a launch for each level.
func TestGPUColumnSums(t *testing.T) {
	g := newKernRig(t, 7, difftest.Options{})
	for _, s := range [][2]int64{{0, 5}, {1, 1}, {63, 47}, {64, 128}, {65, 130}, {257, 4},
		{4097, 2}, {16385, 3}} {
		rows, cols := s[0], s[1]
		if wide.Lean() && rows*cols > 10000 {
			continue
		}
		p := sumParams{X: given(g, g.floats(rows*cols)), Out: blank[float32](g, cols), Rows: rows,
			Cols: cols}
		both(g, "col_sum", p) // the same as the host's: the comparing device says so
		want := got[float32](g, p.Out, cols)
		p.Out = blank[float32](g, cols)
		require.NoError(t, g.on.colSumGPU(g.q, &p, blank[byte](g, colSumScratch(rows, cols))))
		require.Equal(t, want, got[float32](g, p.Out, cols))
	}
	require.NotZero(t, g.dev.Mirrored()["col_sum_part"])
}

// Losses, gradients, predictions and their sums, with ties, classes at infinity and seeds without
// labels.
func TestGPULoss(t *testing.T) {
	g := newKernRig(t, 9, difftest.Options{})
	sizes := [][2]int64{{1, 1}, {70, 2}, {300, 47}, {131, 600}, {4500, 3}}
	if wide.Lean() {
		sizes = sizes[1:3]
	}
	for _, s := range sizes {
		rows, classes := s[0], s[1]
		logits := g.floats(rows * classes)
		labels := make([]int32, rows)
		for i := range logits {
			switch g.rng.IntN(40) {
			case 0:
				logits[i] = float32(math.Inf(-1))
			case 1:
				logits[i] *= 400 // exp comes to subnormal numbers and 0
			case 2:
				logits[i] = float32(math.Copysign(0, -1))
			}
		}
		for i := range labels {
			labels[i] = int32(g.rng.Int64N(classes+1)) - 1
			for range 2 { // one class at least is possible, and two are equal at times
				logits[int64(i)*classes+g.rng.Int64N(classes)] = 3
			}
		}
		p := xentParams{
			Logits: given(g, logits), Labels: given(g, labels),
			Grad: blank[float32](g, rows*classes), Loss: blank[float64](g, rows),
			Pred: blank[int32](g, rows), Outcome: blank[float64](g, 4), Rows: rows,
			Classes: classes,
		}
		weights := g.floats(classes)
		for i := range weights {
			weights[i] *= weights[i]
		}
		weighed := p
		weighed.Weights, weighed.Smoothing = given(g, weights), 0.1*float64(rows%3)
		for _, name := range softmaxLoss.kernels() {
			both(g, name, weighed)
		}
		for _, p.Labels = range []cuda.DevicePtr{p.Labels, 0} {
			both(g, "xent_count", p)
			both(g, "softmax_xent", p)
			both(g, "xent_sum", p)
			p.Grad = 0
		}
	}
	require.NoError(t, g.st.Synchronize(g.ctx))
}

// Losses over labels and numbers, with targets that are not there, with weights and smoothing, and
// without targets.
func TestGPUDenseLoss(t *testing.T) {
	g := newKernRig(t, 12, difftest.Options{})
	for _, l := range losses {
		for _, s := range [][2]int64{{1, 1}, {9, 3}, {33, 32}, {70, 33}, {5000, 2}} {
			if !l.dense() || s[0] > 1000 && wide.Lean() {
				continue
			}
			rows, cols := s[0], s[1]
			outputs, targets := g.floats(rows*cols), g.floats(rows*cols)
			for i := range targets {
				if l == bceLoss {
					targets[i] = float32(g.rng.IntN(2))
					outputs[i] *= 20
				}
				if g.rng.IntN(4) == 0 {
					targets[i] = float32(math.NaN())
				}
			}
			p := denseParams{Outputs: given(g, outputs), Targets: given(g, targets),
				Grad: blank[float32](g, rows*cols), Loss: blank[float64](g, rows),
				Right: blank[int32](g, rows), Outcome: blank[float64](g, 4), Rows: rows, Cols: cols}
			weighed := p
			weighed.Weights, weighed.Smoothing = given(g, g.floats(cols)), 0.1
			none, inference := p, p
			none.Targets, inference.Grad = 0, 0
			for _, q := range []denseParams{p, weighed, none, inference} {
				for _, name := range l.kernels() {
					both(g, name, q)
				}
			}
		}
	}
	require.NoError(t, g.st.Synchronize(g.ctx))
}

// A row of NaNs has the prediction that Go finds: a NaN at class 0 stays, others are never the
// largest.
func TestGPUPredictionsOfNaN(t *testing.T) {
	g := newKernRig(t, 10, difftest.Options{})
	nan, rows := float32(math.NaN()), 4
	logits := []float32{1, nan, 3, nan, 2, 3, nan, nan, nan, -1, -2, nan}
	p := xentParams{Logits: given(g, logits), Loss: blank[float64](g, 4), Pred: blank[int32](g, 4),
		Rows: int64(rows), Classes: 3}
	both(g, "softmax_xent", p)
	require.Equal(t, []int32{2, 0, 0, 0}, got[int32](g, p.Pred, 4))
}

// Adam with and without decay, at lengths and addresses of all kinds, over some steps.
func TestGPUAdam(t *testing.T) {
	g := newKernRig(t, 11, difftest.Options{})
	for _, n := range []int64{1, 63, 64, 1000, 2051} {
		for odd := range cuda.DevicePtr(2) {
			offset := 4 * odd
			v := g.floats(n + 1)
			for i := range v {
				v[i] *= v[i]
			}
			p := adamParams{
				P: given(g, g.floats(n+1)) + offset, G: given(g, g.floats(n+1)) + offset,
				M: given(g, g.floats(n+1)) + offset, V: given(g, v) + offset, N: n,
				AdamStep: simd.AdamStep{B1: 0.9, C1: 0.1, B2: 0.999, C2: 0.001, StepSize: 0.02,
					RootC2: 1.3, Eps: 1e-8, L2: 0.01},
			}
			both(g, "adam", p)
			p.L2, p.Decay, p.Factor = 0, 0.003, given(g, []float32{0.7})
			both(g, "adam", p)
		}
	}
	require.NoError(t, g.st.Synchronize(g.ctx))
}

// The norm of a gradient and the factor that clips it, at lengths and addresses of all kinds, for
// norms within the limit and beyond it.
func TestGPUClip(t *testing.T) {
	g := newKernRig(t, 12, difftest.Options{})
	for _, n := range []int64{1, 63, 127, 128, 2048, 2051, 600_000} {
		for odd := range cuda.DevicePtr(2) {
			for _, limit := range []float32{0, 0.5, 1e6} {
				p := clipParams{G: given(g, g.floats(n+1)) + 4*odd,
					Parts: blank[float64](g, squareUnits(n)), Factor: blank[float32](g, 1),
					Sum: blank[float64](g, 1), N: n, Limit: limit}
				both(g, "square_sum", p)
				both(g, "clip_factor", p)
				require.NoError(t, g.st.Synchronize(g.ctx))
				if n > 1000 {
					require.Equal(t, limit > 1000, got[float32](g, p.Factor, 1)[0] == 1)
				}
			}
		}
	}
}

// Dropout of the input is the host's; bias, ReLU and dropout behind a product are those of the
// products' kernels.
func TestGPUDropout(t *testing.T) {
	g := newKernRig(t, 13, difftest.Options{})
	drop := dropout{Key: philox.Key(4, philox.StreamDropout), Epoch: 2, Batch: 9, Layer: inputLayer,
		P: 0.3, Scale: 1 / (1 - 0.3)}
	level := simd.Auto.Resolve()
	for _, s := range [][2]int64{{1, 1}, {7, 6}, {30, 128}, {9, 257}} {
		rows, cols := s[0], s[1]
		x := g.floats(rows * cols)
		both(g, "drop_input", dropInputParams{X: given(g, x), Rows: rows, Cols: cols, Drop: drop})
		for flags := range uint32(8) {
			ld := cols + int64(flags%3)*2
			p := biasActParams{C: given(g, g.floats(rows*ld)), Rows: rows, Cols: cols, LDC: ld,
				Drop: drop, Flags: flags & 3}
			p.Drop.Layer = 1
			var bias []float32
			if flags&4 != 0 {
				bias = g.floats(cols)
				p.Bias = given(g, bias)
			}
			want := got[float32](g, p.C, rows*ld)
			both(g, "bias_act", p)
			ref := gemmParams{Flags: p.Flags, Drop: p.Drop}
			for i := range rows {
				ref.epilogue(level, want[i*ld:i*ld+cols], bias, i, 0)
			}
			require.Equal(t, want, got[float32](g, p.C, rows*ld), "%d rows of %d, flags %d", rows,
				cols, flags)
		}
	}
}

// Numbers that are no rows, lists that are none and labels that do not exist are faults of the
// launch, in words.
func TestGPUFaults(t *testing.T) {
	// Go panics in other words
	ignore := func(difftest.Launch, func(int) cuda.DevicePtr, difftest.Memory) {}
	fails := func(t *testing.T, words string, launch func(g *kernRig) error) {
		t.Run(words, func(t *testing.T) {
			g := newKernRig(t, 15, difftest.Options{Spoil: ignore})
			err := launch(g)
			if err == nil {
				err = g.st.Synchronize(g.ctx)
			}
			require.ErrorContains(t, err, words)
		})
	}
	one := func(g *kernRig, name string, p any) error {
		k, err := g.on.kernel(name)
		require.NoError(g, err)
		cfg := cuda.LaunchConfig{Blocks: 2, Threads: 256}
		switch p := p.(type) {
		case aggParams:
			return put(g.q, k, cfg, p)
		case xentParams:
			return put(g.q, k, cfg, p)
		}
		return fmt.Errorf("%T", p)
	}
	block := func(g *kernRig, indptr []int64, src []uint32) aggParams {
		return aggParams{
			Indptr: given(g, indptr), Src: given(g, src), X: given(g, g.floats(12)),
			Out: blank[float32](g, 12), NumDst: 2, NumSrc: 3,
			Edges: 3, Dim: 4, TEnd: blank[uint32](g, 3), TDst: blank[uint32](g, 3),
			Weights: blank[float32](g, 3),
		}
	}
	fails(t, "aggregation: row 3 at edge 1: rows are 0 to 2", func(g *kernRig) error {
		return one(g, "sage_mean", block(g, []int64{0, 1, 3}, []uint32{0, 3, 2}))
	})
	fails(t, "aggregation: row 5 at edge 2: rows are 0 to 2", func(g *kernRig) error {
		a := block(g, []int64{0, 1, 3}, []uint32{0, 1, 5})
		a.SrcWeights, a.DstWeights = given(g, g.floats(3)), blank[float32](g, 2)
		return one(g, "agg_weights", a)
	})
	fails(t, "aggregation: row 1: 2 to 4 are no edges of the block", func(g *kernRig) error {
		return one(g, "sage_mean", block(g, []int64{0, 2, 4}, []uint32{0, 1, 2}))
	})
	fails(t, "transpose: source 7 of edge 2: the block has sources 0 to 2", func(g *kernRig) error {
		a := block(g, []int64{0, 1, 3}, []uint32{0, 1, 7})
		return g.on.transposeGPU(g.q, &a, blank[byte](g, transposeScratch(3, 3)))
	})
	fails(t, "label 5 of seed 1 is out of range: -1 (none) to 4", func(g *kernRig) error {
		return one(g, "xent_count", xentParams{Labels: given(g, []int32{0, 5, 7}),
			Outcome: blank[float64](g, 4), Rows: 3, Classes: 5})
	})
}

// A comparing device takes differences within a kernel's tolerance, and then continues with the
// GPU's numbers on both sides; it finds larger ones, and any in kernels that have no tolerance.
func TestGPUTolerance(t *testing.T) {
	for change, want := range map[float32]bool{1e-7: true, 1e-3: false} {
		for _, kernel := range []string{"col_sum", "adam"} {
			spoilt := false
			g := newKernRig(t, 17, difftest.Options{
				Tolerance: map[string]difftest.Tolerance{kernel: {Rel: 1e-6}},
				Spoil: func(_ difftest.Launch, param func(int) cuda.DevicePtr,
					mem difftest.Memory) {
					if b := mem.Bytes(param(1), 4); b != nil && !spoilt {
						spoilt = true
						v := math.Float32frombits(binary.LittleEndian.Uint32(b))
						binary.LittleEndian.PutUint32(b, math.Float32bits(v*(1+change)))
					}
				},
			})
			p := sumParams{X: given(g, []float32{1, 2, 3, 4, 5, 6}), Out: blank[float32](g, 2),
				Rows: 3, Cols: 2}
			k, err := g.on.kernel("col_sum")
			require.NoError(t, err)
			err = put(g.q, k, cuda.LaunchConfig{Blocks: 1, Threads: 256}, p)
			require.Equal(t, want && kernel == "col_sum", err == nil, "%v of %s: %v", change,
				kernel, err)
			require.True(t, spoilt)
		}
	}
}
