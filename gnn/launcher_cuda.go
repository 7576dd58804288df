package gnn

import (
	"math"

	"helios/cuda"
	"helios/internal/errs"
)

// gpuKernels lists the kernels of a step of every model on a GPU. Products of other precisions are
// not loaded: compiling them for nothing takes seconds.
func (o *launcher) gpuKernels() []string {
	names := []string{"transpose_count", "transpose_scan", "transpose_scatter", "transpose_ends",
		"col_sum", "col_sum_part"}
	if o.blas == nil {
		names = append(names, gemmGPUKernels(o.precision)...)
	}
	return names
}

// measureProduct notes the scratch memory of a product.
func (o *launcher) measureProduct(q *stepSink, op gemmOp, p *gemmParams) error {
	if o.blas == nil {
		q.need(func() int64 { return gemmScratch(op, p, o.precision) })
	}
	return nil
}

// productGPU enqueues a product on a GPU, by the BLAS where there is one.
func (o *launcher) productGPU(q *stepSink, op gemmOp, p *gemmParams, scratch cuda.DevicePtr) error {
	if o.blas == nil {
		return o.gemmGPU(q, op, p, o.precision, scratch)
	}
	if p.K == 0 {
		// The gradient of weights that nothing was computed with. BLAS libraries differ for K = 0.
		if err := q.flush(); err != nil {
			return err
		}
		return q.stream.Fill(p.C, 0, p.M*p.LDC*4)
	}
	if err := q.flush(); err != nil {
		return err
	}
	b := cuda.BLASProduct{
		M: p.M, N: p.N, K: p.K, A: p.A, B: p.B, C: p.C, LDA: p.LDA, LDB: p.LDB, LDC: p.LDC,
		TransA: op == opTN, TransB: op == opNT, Precision: o.precision,
	}
	if err := o.multiply(q, &b); err != nil {
		return err
	}
	if p.K2 > 0 {
		b.A, b.B, b.K, b.LDA, b.LDB, b.Add = p.A2, p.B2, p.K2, p.LDA2, p.LDB2, true
		if err := o.multiply(q, &b); err != nil {
			return err
		}
	}
	if p.Bias == 0 && p.Flags == 0 {
		return nil
	}
	k, err := o.kernel("bias_act")
	if err != nil {
		return err
	}
	return put(q, k, o.warpBlocks(p.M*((p.N+3)/4)*4/gpuItems), biasActParams{
		C: p.C, Bias: p.Bias, Rows: p.M, Cols: p.N, LDC: p.LDC, Drop: p.Drop, Flags: p.Flags,
	})
}

// multiply has the BLAS compute a product. Its stream is the sink's, of which all launches so far
// are enqueued.
func (o *launcher) multiply(q *stepSink, b *cuda.BLASProduct) error {
	if big := max(b.M, b.N, b.K, b.LDA, b.LDB, b.LDC); big > math.MaxInt32 {
		return errs.New(errs.Usage,
			"a product of %d×%d×%d passes the limits of a BLAS: lower the batch size or the fanouts, or use {blas} off",
			b.M, b.N, b.K)
	}
	return o.blas.Multiply(q.stream, b)
}
