package gnn

import (
	"fmt"
	"math"

	"helios/cuda"
	"helios/internal/errs"
)

// gemmOp names the transposed operands of a product, see gemmParams.
type gemmOp uint8

const (
	opNN gemmOp = iota // C = A · B (+ A2 · B2)
	opNT               // C = A · Bᵀ
	opTN               // C = Aᵀ · B, split where K is long
)

func (op gemmOp) String() string { return [...]string{"gemm_nn", "gemm_nt", "gemm_tn"}[op] }

// gemmSplitParams is the parameter block of the kernels that compute a product in parts of Chunk
// steps of K, and of gemm_sum, which adds the parts in their order and does what gemmParams says is
// done to C. Parts is float32[ceil(K/Chunk), M, LDP].
type gemmSplitParams struct {
	P     gemmParams
	Parts cuda.DevicePtr
	Chunk int64
	LDP   int64 // N, rounded up to 4
}

const (
	// gemmSplitBlocks is the number of blocks that a product is split for, 2 to 4 on each SM of an
	// A100 or H100. It does not depend on the GPU at hand: the parts are roundings of the result.
	gemmSplitBlocks = 528
	// gemmSplitLeast is the shortest part. Sums up to that long are one chain, equal to the bit
	// with the host's.
	gemmSplitLeast = 512
)

// gemmVariant is a variant of the kernels: the tile of C that a block computes, and the name's
// ending.
type gemmVariant struct {
	m, n   int64
	suffix string
}

var (
	tilesFP32   = []gemmVariant{{128, 128, ""}, {128, 64, "_128x64"}, {64, 64, "_64x64"}}
	tilesTensor = []gemmVariant{{128, 128, ""}, {128, 64, "_128x64"}}
)

func gemmVariantsOf(prec cuda.Precision) []gemmVariant {
	if prec == cuda.FP32 {
		return tilesFP32
	}
	return tilesTensor
}

// gemmName is the kernel of a variant. The fp32 kernels have no precision in their names, as the
// host's have none.
func gemmName(op gemmOp, split bool, prec cuda.Precision, t gemmVariant) string {
	name := op.String()
	if split {
		name += "_split"
	}
	if prec != cuda.FP32 {
		name += "_" + prec.String()
	}
	return name + t.suffix
}

// gemmGPUKernels lists all kernels that gemmGPU may launch.
func gemmGPUKernels(prec cuda.Precision) []string {
	names := []string{"gemm_sum"}
	for _, t := range gemmVariantsOf(prec) {
		for _, op := range []gemmOp{opNN, opNT, opTN} {
			names = append(names, gemmName(op, false, prec, t))
		}
		names = append(names, gemmName(opTN, true, prec, t))
	}
	return names
}

// gemmPick chooses the variant and, for a split product, the steps of K in a part (0: not split).
// It looks at the shape only.
func gemmPick(op gemmOp, p *gemmParams, prec cuda.Precision) (t gemmVariant, chunk int64) {
	variants := gemmVariantsOf(prec)
	t = variants[0]
	if p.N <= 64 {
		t = variants[1]
	}
	blocks := func(t gemmVariant) int64 { return (p.M + t.m - 1) / t.m * ((p.N + t.n - 1) / t.n) }
	if op != opTN || p.K2 != 0 || p.K <= gemmSplitLeast {
		// Smaller tiles read the operands more often, which is better than SMs without work.
		for _, v := range variants {
			if blocks(t) < gemmSplitBlocks/4 && v.m*v.n < t.m*t.n {
				t = v
			}
		}
		return t, 0
	}
	parts := max(1, min(gemmSplitBlocks/blocks(t), (p.K+gemmSplitLeast-1)/gemmSplitLeast))
	if chunk = ((p.K+parts-1)/parts + 31) &^ 31; chunk >= p.K {
		return t, 0
	}
	return t, chunk
}

// gemmScratch returns how many bytes gemmGPU needs for a product, for the parts of one that is
// split.
func gemmScratch(op gemmOp, p *gemmParams, prec cuda.Precision) int64 {
	_, chunk := gemmPick(op, p, prec)
	if chunk == 0 {
		return 0
	}
	return (p.K + chunk - 1) / chunk * p.M * ((p.N + 3) &^ 3) * 4
}

// gemmGPU enqueues a product on a GPU. In fp32 every element is the same chain of fused
// multiply-adds as in the host's vector kernels, bit by bit, but for an opTN of more than
// gemmSplitLeast steps: that one is summed in parts, whose number depends on the shape only, so it
// is the same on every GPU, and within (steps of a part + parts) · 2⁻²⁴ · Σ|a·b| of the exact sum,
// which is closer than the host's one chain (K · 2⁻²⁴ · Σ|a·b|). tf32 and bf16 round the factors
// first.
func (o *launcher) gemmGPU(s *stepSink, op gemmOp, p *gemmParams, prec cuda.Precision,
	scratch cuda.DevicePtr) error {
	if max(p.M, p.N, p.K, p.K2, p.LDA, p.LDB, p.LDA2, p.LDB2, p.LDC) > math.MaxInt32 {
		return errs.New(errs.Usage,
			"a product of %d×%d by %d×%d passes the limit of 2^31 rows or columns: lower the batch size or the fanouts",
			p.M, p.K+p.K2, p.K+p.K2, p.N)
	}
	t, chunk := gemmPick(op, p, prec)
	return o.gemmVariant(s, op, p, prec, scratch, t, chunk)
}

// gemmVariant enqueues a product by one variant of the kernels, split where chunk is not 0.
func (o *launcher) gemmVariant(s *stepSink, op gemmOp, p *gemmParams, prec cuda.Precision,
	scratch cuda.DevicePtr, t gemmVariant, chunk int64) error {
	k, err := o.kernel(gemmName(op, chunk != 0, prec, t))
	if err != nil {
		return err
	}
	q := *p
	q.MB, q.NB = t.m, t.n
	blocks := (p.M + t.m - 1) / t.m * ((p.N + t.n - 1) / t.n)
	// Kernels take any grid: tiles that no block is left for are a second round of the others.
	launch := func(n int64) cuda.LaunchConfig {
		return cuda.LaunchConfig{Blocks: int(min(n, 1<<30)), Threads: 256}
	}
	if chunk == 0 {
		return put(s, k, launch(blocks), q)
	}
	if scratch == 0 {
		return fmt.Errorf("%s of %d steps: no memory for its parts", op, p.K)
	}
	sum, err := o.kernel("gemm_sum")
	if err != nil {
		return err
	}
	split := gemmSplitParams{P: q, Parts: scratch, Chunk: chunk, LDP: (p.N + 3) &^ 3}
	if err := put(s, k, launch(blocks*((p.K+chunk-1)/chunk)), split); err != nil {
		return err
	}
	return put(s, sum, launch((p.M*split.LDP/4+255)/256), split)
}
