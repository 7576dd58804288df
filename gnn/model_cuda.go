package gnn

import (
	"math"

	"helios/cuda"
	"helios/internal/errs"
)

// gpuItems is how many elements a warp takes in one round of the kernels that work element by element: four for each lane.
const gpuItems = 128

// findGPUKernels finds what the steps use on a GPU. Kernels of other precisions are not loaded: compiling them for nothing
// takes seconds.
func (m *Model) findGPUKernels() error {
	for _, k := range []struct {
		dst  *cuda.Kernel
		name string
	}{
		{&m.k.xentCount, "xent_count"}, {&m.k.xent, "softmax_xent"}, {&m.k.xentSum, "xent_sum"},
		{&m.k.adamK, "adam"}, {&m.k.dropInput, "drop_input"},
	} {
		var err error
		if *k.dst, err = m.kernel(k.name); err != nil {
			return err
		}
	}
	names := append(gpuKernels(), m.arch.kernels(true)...)
	if m.cfg.BLAS == nil {
		names = append(names, gemmGPUKernels(m.cfg.Precision)...)
	}
	return m.findNamed(names)
}

// measureProduct notes the scratch memory of a product.
func (m *Model) measureProduct(q *stepSink, op gemmOp, p *gemmParams) error {
	if m.cfg.BLAS == nil {
		q.need(func() int64 { return gemmScratch(op, p, m.cfg.Precision, m.dev.Info().SMs) })
	}
	return nil
}

// productGPU enqueues a product on a GPU, by the BLAS where there is one.
func (m *Model) productGPU(q *stepSink, op gemmOp, p *gemmParams, scratch cuda.DevicePtr) error {
	if m.cfg.BLAS == nil {
		return m.gemmGPU(q, op, p, m.cfg.Precision, scratch)
	}
	if p.K == 0 {
		// The gradient of weights that nothing was computed with. What a BLAS does for K = 0 is its own affair.
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
		TransA: op == opTN, TransB: op == opNT, Precision: m.cfg.Precision,
	}
	if err := m.multiply(q, &b); err != nil {
		return err
	}
	if p.K2 > 0 {
		b.A, b.B, b.K, b.LDA, b.LDB, b.Add = p.A2, p.B2, p.K2, p.LDA2, p.LDB2, true
		if err := m.multiply(q, &b); err != nil {
			return err
		}
	}
	if p.Bias == 0 && p.Flags == 0 {
		return nil
	}
	k, err := m.kernel("bias_act")
	if err != nil {
		return err
	}
	return put(q, k, m.warpBlocks(p.M*((p.N+3)/4)*4/gpuItems), biasActParams{
		C: p.C, Bias: p.Bias, Rows: p.M, Cols: p.N, LDC: p.LDC, Drop: p.Drop, Flags: p.Flags,
	})
}

// multiply has the BLAS compute a product. Its stream is the sink's, of which all launches so far are enqueued.
func (m *Model) multiply(q *stepSink, b *cuda.BLASProduct) error {
	if big := max(b.M, b.N, b.K, b.LDA, b.LDB, b.LDC); big > math.MaxInt32 {
		return errs.New(errs.Usage, "a product of %d×%d×%d passes the limits of a BLAS: lower the batch size or the fanouts, or use --blas off",
			b.M, b.N, b.K)
	}
	return m.cfg.BLAS.Multiply(q.stream, b)
}
