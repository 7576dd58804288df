package gnn

import (
	"strings"

	"helios/cuda"
)

// Operators launches the kernels of a model one at a time, without a model around them, for
// benchmarks that measure each by itself.
type Operators struct{ on *launcher }

// NewOperators finds the kernels of a device, whose products multiply with precision prec. A host
// device has fp32 and bf16.
func NewOperators(dev cuda.Device, prec cuda.Precision) (*Operators, error) {
	on := newLauncher(dev)
	on.precision = prec
	if on.gpu {
		return &Operators{on}, nil
	}
	return &Operators{on}, on.findHost()
}

// product splits p into the kernel's parameters and which operand is transposed. Of TransA and
// TransB at most one may be set.
func product(p *cuda.BLASProduct) (gemmOp, *gemmParams) {
	op := opNN
	switch {
	case p.TransA:
		op = opTN
	case p.TransB:
		op = opNT
	}
	return op, &gemmParams{M: p.M, N: p.N, K: p.K, LDA: p.LDA, LDB: p.LDB, LDC: p.LDC, A: p.A,
		B: p.B, C: p.C}
}

// Multiply enqueues a product; scratch has ProductScratch bytes.
func (o *Operators) Multiply(s cuda.Stream, p *cuda.BLASProduct, scratch cuda.DevicePtr) error {
	op, g := product(p)
	return o.on.gemm(&stepSink{stream: s}, op, g, scratch)
}

// ProductScratch returns the bytes of scratch memory that Multiply needs.
func (o *Operators) ProductScratch(p *cuda.BLASProduct) int64 {
	if !o.on.gpu {
		return 0
	}
	op, g := product(p)
	return gemmScratch(op, g, o.on.precision)
}

// Chained reports whether Multiply computes each element as one chain of float32 multiply-adds in
// the order of k: float32 products that the GPU does not split.
func (o *Operators) Chained(p *cuda.BLASProduct) bool {
	if o.on.precision != cuda.FP32 {
		return false
	}
	if !o.on.gpu {
		return true
	}
	op, g := product(p)
	_, chunk := gemmPick(op, g, o.on.precision)
	return chunk == 0
}

// AggregateArgs are the arguments of the kernels that sum over neighbours. Which of them a kernel
// reads stands in aggParams, the kernels' own block, whose names they have.
type AggregateArgs struct {
	Indptr, Src, Degrees, Weights  cuda.DevicePtr
	X, Out, Grad, Self, TEnd, TDst cuda.DevicePtr
	NumDst, NumSrc, Edges, Dim     int64
}

func (a *AggregateArgs) params() aggParams {
	return aggParams{Indptr: a.Indptr, Src: a.Src, Degrees: a.Degrees, Weights: a.Weights, X: a.X,
		Out: a.Out, Grad: a.Grad,
		Self: a.Self, TEnd: a.TEnd, TDst: a.TDst, NumDst: a.NumDst, NumSrc: a.NumSrc,
		Edges: a.Edges, Dim: a.Dim, Scale: 1}
}

// Aggregate enqueues a kernel by name: sage_mean, gcn_agg, or their gradients with the ending _bwd.
func (o *Operators) Aggregate(s cuda.Stream, kernel string, a *AggregateArgs) error {
	k, err := o.on.dev.Kernel(kernel)
	if err != nil {
		return err
	}
	rows, per := a.NumDst, int64(16)
	if strings.HasSuffix(kernel, "_bwd") {
		rows, per = a.NumSrc, 64
	}
	return put(&stepSink{stream: s}, k, o.on.rowBlocks(rows, per, a.Dim), a.params())
}

// Transpose enqueues the lists of destinations by source (TEnd, TDst) that gradients of aggregates
// read: those of GCN where Degrees is set. scratch has TransposeScratch bytes.
func (o *Operators) Transpose(s cuda.Stream, a *AggregateArgs, scratch cuda.DevicePtr) error {
	name := "sage_transpose"
	if a.Degrees != 0 {
		name = "gcn_transpose"
	}
	p := a.params()
	return o.on.transpose(&stepSink{stream: s}, name, &p, scratch)
}

// TransposeScratch returns the bytes of scratch memory that Transpose needs.
func (o *Operators) TransposeScratch(numSrc, edges int64) int64 {
	if !o.on.gpu {
		return 0
	}
	return transposeScratch(numSrc, edges)
}

// ColumnSum enqueues out[c] = Σ x[r, c] over float32[rows, cols]; scratch has ColumnSumScratch
// bytes.
func (o *Operators) ColumnSum(s cuda.Stream, out, x cuda.DevicePtr, rows, cols int64,
	scratch cuda.DevicePtr) error {
	return o.on.colSum(&stepSink{stream: s}, &sumParams{X: x, Out: out, Rows: rows, Cols: cols},
		scratch)
}

// ColumnSumScratch returns the bytes of scratch memory that ColumnSum needs.
func (o *Operators) ColumnSumScratch(rows, cols int64) int64 {
	if !o.on.gpu {
		return 0
	}
	return colSumScratch(rows, cols)
}
