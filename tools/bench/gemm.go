package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/philox"
	"helios/internal/simd"
)

// shape is a product to measure: Kind nn (C = A·B), nt (A·Bᵀ) or tn (Aᵀ·B).
type shape struct {
	Kind    string
	M, N, K int64
}

func (s shape) String() string { return fmt.Sprintf("%s:%dx%dx%d", s.Kind, s.M, s.N, s.K) }

// hostShapes are a usual product, the widths of features and classes of well-known datasets,
// vectors, and the layers of a step of GraphSAGE with 256 hidden units: forward, gradient of the
// inputs, gradient of the weights.
const hostShapes = "nn:4096x1024x256,nn:4096x256x1024,nn:4096x256x100,nn:4096x256x602,nn:4096x47x256,nn:4096x1x256,nn:1x1024x256,nn:1024x1024x1," +
	"nt:4096x256x47,tn:100x256x4096,tn:602x256x4096,nn:130000x256x256,nt:130000x256x256,tn:256x256x130000"

// gpuShapes are the products of a step of GraphSAGE with a batch of 8000, fanout 25,10, 1024
// features and 256 hidden units, and usual ones.
const gpuShapes = "nn:180000x256x1024,tn:1024x256x180000,nn:8000x47x256,nt:8000x256x47,tn:256x47x8000,nn:4096x4096x4096,nn:130000x256x256,nt:130000x256x256,tn:256x256x130000,nn:4096x256x100"

// maxShape bounds the bytes of the three matrices of a shape.
const maxShape = 8 << 30

// parseShapes reads [KIND:]MxNxK,…
func parseShapes(text string) ([]shape, error) {
	var out []shape
	for _, t := range strings.Split(text, ",") {
		s := shape{Kind: "nn"}
		size := t
		if kind, rest, ok := strings.Cut(t, ":"); ok {
			s.Kind, size = kind, rest
		}
		dims := strings.Split(size, "x")
		bad := len(dims) != 3 || !slices.Contains([]string{"nn", "nt", "tn"}, s.Kind)
		for i, d := range dims {
			v, err := strconv.ParseInt(d, 10, 32)
			if bad = bad || err != nil || v < 1; bad {
				break
			}
			*[]*int64{&s.M, &s.N, &s.K}[i] = v
		}
		if bad {
			return nil, fmt.Errorf(
				"-shapes: %q is no shape; give rows, columns and steps such as 4096x1024x256, with nt: or tn: before it for A·Bᵀ or Aᵀ·B",
				t)
		}
		if float64(s.M)*float64(s.K)+float64(s.K)*float64(s.N)+
			2*float64(s.M)*float64(s.N) > maxShape/4 {
			return nil, fmt.Errorf(
				"-shapes: the matrices of %q take more than %d GiB; make it smaller", t,
				maxShape>>30)
		}
		out = append(out, s)
	}
	return out, nil
}

func benchGemm(ctx context.Context, b *bench) error {
	c := &kernelConfig{}
	text := b.String("shapes", "",
		"products `[KIND:]MxNxK[,…]`, usual ones by default: nn: A·B, nt: A·Bᵀ, tn: Aᵀ·B")
	b.StringVar(&c.openBLASPath, "openblas", "",
		"compare the host device in fp32 with the OpenBLAS at `PATH`")
	c.productFlags(b)
	return b.measureKernels(ctx, c, func(c *kernelConfig, gpu bool) (_ []kernelCase, err error) {
		usual := hostShapes
		if gpu {
			usual = gpuShapes
		}
		if c.shapes, err = parseShapes(cmp.Or(*text, usual)); err != nil {
			return nil, err
		}
		return gemmCases(c), nil
	})
}

func gemmCases(c *kernelConfig) (out []kernelCase) {
	for _, s := range c.shapes {
		m, n, k := float64(s.M), float64(s.N), float64(s.K)
		for _, prec := range c.precisions {
			out = append(out, kernelCase{
				Name: s.String(), Kernel: "gemm_" + s.Kind, M: s.M, N: s.N, K: s.K, Precision: prec,
				Flops: 2 * m * n * k, Bytes: 4 * (m*k + k*n + m*n),
				Open: func(dev cuda.Device) (*kernelRun, error) { return s.open(dev, c, prec) },
			})
		}
	}
	return out
}

// rounded is a factor of a product as a precision takes it (PTX ISA, cvt: .rna for tf32, .rn for
// bf16).
func rounded(v float32, prec cuda.Precision) float64 {
	b := math.Float32bits(v)
	switch prec {
	case cuda.TF32:
		b = (b + 1<<12) &^ (1<<13 - 1)
	case cuda.BF16:
		b = (b + 1<<15 - 1 + b>>16&1) &^ (1<<16 - 1)
	}
	return float64(math.Float32frombits(b))
}

// unit is the largest relative error of a factor rounded to a precision.
func unit(prec cuda.Precision) float64 {
	return [...]float64{cuda.FP32: 0, cuda.TF32: 0x1p-11, cuda.BF16: 0x1p-8}[prec]
}

// product is a product of matrices on a device.
type product struct {
	shape
	cfg     *kernelConfig
	mem     buffers
	args    cuda.BLASProduct
	a, b, c array
	rival   array   // c where there is no rival
	fused   bool    // multiply-adds are rounded once
	chained bool    // fp32 elements promise one sum in order of k, unless the GPU splits K
	sums    float64 // bound of the error of sums
}

func (s shape) open(dev cuda.Device, cfg *kernelConfig, prec cuda.Precision) (_ *kernelRun,
	err error) {
	gpu := !onHost(dev)
	p := &product{shape: s, cfg: cfg, mem: buffers{dev: dev},
		fused: gpu || dev.Info().Kernels != simd.Generic.String()}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.mem.close())
		}
	}()
	p.alloc(prec)
	blas := !gpu && cfg.blas != nil && prec == cuda.FP32
	results := []array{p.c}
	if gpu && cfg.vendor != nil || blas {
		results = append(results, p.mem.floats(s.M*s.N))
	}
	p.rival = results[len(results)-1]
	if p.mem.err != nil {
		return nil, p.mem.err
	}
	fill(p.a.v, 1)
	fill(p.b.v, 2)
	if err := p.mem.upload(p.a, p.b); err != nil {
		return nil, err
	}
	ops, err := gnn.NewOperators(dev, prec)
	if err != nil {
		return nil, err
	}
	scratch := p.mem.scratch(ops.ProductScratch(&p.args))
	if p.mem.err != nil {
		return nil, p.mem.err
	}
	p.chained = ops.Chained(&p.args)
	run := &kernelRun{
		Launch: func(st cuda.Stream) error { return ops.Multiply(st, &p.args, scratch) },
		Close:  p.mem.close,
	}
	switch {
	case gpu && cfg.vendor != nil:
		run.RivalName, run.Rival = cfg.vendor.Name(), p.vendor
	case blas:
		run.RivalName, run.Rival, run.Threads = "OpenBLAS", p.openBLAS, cfg.blas.useThreads
	}
	run.Check = func(ctx context.Context, st cuda.Stream) (checked, error) {
		if err := p.mem.again(ctx, st, run, results...); err != nil {
			return checked{}, err
		}
		return p.check(run.Rival != nil), nil
	}
	return run, nil
}

// alloc makes the matrices.
func (p *product) alloc(prec cuda.Precision) {
	s := p.shape
	p.a, p.b, p.c = p.mem.floats(s.M*s.K), p.mem.floats(s.K*s.N), p.mem.floats(s.M*s.N)
	p.args = cuda.BLASProduct{M: s.M, N: s.N, K: s.K, LDA: s.K, LDB: s.N, LDC: s.N, A: p.a.p,
		B: p.b.p, C: p.c.p, TransA: s.Kind == "tn", TransB: s.Kind == "nt", Precision: prec}
	if p.args.TransA {
		p.args.LDA = s.M
	}
	if p.args.TransB {
		p.args.LDB = s.K
	}
}

func (p *product) vendor(st cuda.Stream) error {
	q := p.args
	q.C = p.rival.p
	return p.cfg.vendor.Multiply(st, &q)
}

func (p *product) openBLAS(cuda.Stream) error {
	p.cfg.blas.multiply(int(p.M), int(p.N), int(p.K),
		blasMatrix{data: p.a.v, ld: int(p.args.LDA), trans: p.args.TransA},
		blasMatrix{data: p.b.v, ld: int(p.args.LDB), trans: p.args.TransB},
		blasMatrix{data: p.rival.v, ld: int(p.args.LDC)})
	return nil
}

// check looks at all elements of a small C, and of a larger one at the corners and at elements all
// over it.
func (p *product) check(rival bool) checked {
	// |error| <= K·u·Σ|a·b|, u = 2^-24
	// (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), to first order. Tensor
	// cores may cut sums off instead of rounding them, and a library factors.
	p.sums = float64(p.K) * 0x1p-24 * 1.001
	out := checked{Bound: p.sums}
	if prec := p.args.Precision; prec != cuda.FP32 {
		p.sums = float64(p.K+8) * 0x1p-22
		out.Bound, out.RivalBound = 2.01*unit(prec)+p.sums, 4.02*unit(prec)+p.sums
	}
	key := philox.Key(benchSeed, philox.StreamBench)
	total := p.M * p.N
	samples := min(4000, max(64, 8_000_000/p.K))
	for e := range min(total, samples) {
		pos := e
		if total > samples {
			w := philox.Block(key, [4]uint32{uint32(e), 0, 3, 0xc0})
			pos = int64(philox.Bounded(uint64(w[0])<<32|uint64(w[1]), uint64(total)))
			if e < 4 {
				pos = e%2*(p.N-1) + e/2*(total-p.N)
			}
		}
		sum, size := p.element(&out, pos)
		if rival { // NaN stays
			out.RivalError = max(out.RivalError, math.Abs(float64(p.rival.v[pos])-sum)/size)
		}
	}
	return out
}

// element compares an element of C with its sums: in float64, in the order of k, and of factors
// that are rounded as the precision rounds them. It returns the first, and the terms' size.
func (p *product) element(out *checked, pos int64) (sum, size float64) {
	i, j, prec := pos/p.N, pos%p.N, p.args.Precision
	near, chain := 0.0, float32(0)
	for q := range p.K {
		ai, bi := i*p.args.LDA+q, q*p.args.LDB+j
		if p.args.TransA {
			ai = q*p.args.LDA + i
		}
		if p.args.TransB {
			bi = j*p.args.LDB + q
		}
		x := float64(p.a.v[ai]) * float64(p.b.v[bi])
		sum += x
		size += math.Abs(x)
		if p.fused {
			chain = addRounded(x, chain)
		} else {
			chain += float32(x)
		}
		if prec != cuda.FP32 {
			near += rounded(p.a.v[ai], prec) * rounded(p.b.v[bi], prec)
		}
	}
	got := p.c.v[pos]
	if size == 0 { // all terms are 0, and so must the sums be
		size = 1
	}
	switch {
	case p.chained && got != chain:
		out.wrong("C[%d,%d] is %v, the sum in order of k is %v", i, j, got, chain)
	case prec != cuda.FP32 && !(math.Abs(float64(got)-near)/size <= p.sums):
		out.wrong("C[%d,%d] is %v, the sum of the rounded factors is %v", i, j, got, near)
	}
	out.Elements++
	if d := math.Abs(float64(got)-sum) / size; d > out.Error || math.IsNaN(d) {
		if out.Error = d; out.Inexact == 0 {
			out.Where = fmt.Sprintf("C[%d,%d] is %v, expected %v", i, j, got, sum)
		}
	}
	return sum, size
}

// wrong notes an element that is not the promised one.
func (c *checked) wrong(format string, args ...any) {
	c.Inexact++
	c.Where = fmt.Sprintf(format, args...)
}

// addRounded is x + s, rounded to float32 once: a fused multiply-add for a product x of two float32
// values, which float64 holds. The float64 sum gets an odd last bit where it is not exact (the
// error of 2Sum, Møller 1965, says so), so that rounding it again does no harm (Boldo and
// Melquiond, 2008).
func addRounded(x float64, s float32) float32 {
	y := float64(s)
	sum := x + y
	z := sum - x
	if e := (x - (sum - z)) + (y - z); e != 0 && math.Float64bits(sum)&1 == 0 {
		step := int64(1)
		if (e > 0) != (sum > 0) {
			step = -1
		}
		sum = math.Float64frombits(math.Float64bits(sum) + uint64(step))
	}
	return float32(sum)
}
