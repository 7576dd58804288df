package gnn

import (
	"fmt"

	"helios/cuda"
	"helios/graph"
)

// gcn is a graph convolution with symmetric normalisation and self loops (Kipf and Welling, ICLR 2017): W Σ w_ij h_j + b,
// with the weights of edgeWeights.
type gcn struct{}

func init() { registerArch(gcn{}) }

func (gcn) Name() string { return "gcn" }
func (gcn) Summary() string {
	return "graph convolution: neighbours and the node itself weighted by the roots of their degrees"
}
func (gcn) Degrees() bool              { return true }
func (gcn) Default(*ModelConfig)       {}
func (gcn) Check(c *ModelConfig) error { return c.noOptions() }

func (gcn) Floats(c *ModelConfig, l int) int64 { return c.width(l)*c.width(l+1) + c.width(l+1) }

func (gcn) Forward(c *ModelConfig, l int, b BlockShape) []Work {
	in, out := c.width(l), c.width(l+1)
	return []Work{gatherWork(b.Edges, b.Dst, in), productWork(b.Dst, out, in, 1)}
}

func (gcn) Backward(c *ModelConfig, l int, b BlockShape) []Work {
	in, out := c.width(l), c.width(l+1)
	w := []Work{productWork(in, out, b.Dst, 1), bytesWork(4 * b.Dst * out)}
	if l > 0 {
		w = append(w, productWork(b.Dst, in, out, 1))
		w = append(append(w, transposeWork(b)...), gatherWork(b.Edges, 2*b.Src, in))
	}
	return w
}

func (gcn) kernels(gpu bool) []string {
	names := []string{"agg_weights", "gcn_weights", "gcn_agg", "gcn_agg_bwd"}
	if !gpu {
		names = append(names, "gcn_transpose")
	}
	return names
}

func (gcn) declare(m *Model, l int, t *tensors) {
	in, out := m.dims[l], m.dims[l+1]
	m.layers[l] = []int64{
		t.add(fmt.Sprintf("layer%d.weight", l), in, out, glorot(in, out)),
		t.add(fmt.Sprintf("layer%d.bias", l), 1, out, 0),
	}
}

func (gcn) layout(m *Model, blocks []graph.Block, train bool, p *plan) {
	layoutAggregates(m, blocks, train, p)
	b := &blocks[m.cfg.Layers-1]
	p.weights = p.take(b.NumSrc)
	p.dstWeights = p.take(b.NumDst) // for all blocks, so that nobody needs to know which they are
	if train {
		p.dAgg = p.take(inputGradient(m, blocks))
		layoutTranspose(m, blocks, 1, p)
	}
}

func (gcn) forward(m *Model, s *step, l int, in cuda.DevicePtr) error {
	b, w := m.block(s.mb, l), m.layers[l]
	a := m.aggParams(s, l)
	a.X, a.Out, a.Weights = in, s.plan.at(s.plan.layers[l].agg), s.plan.at(s.plan.weights)
	if err := m.weigh(s, b, &a); err != nil {
		return err
	}
	if err := launch(m, &s.stepSink, "gcn_weights", m.blocks(b.NumSrc, 4096, b.NumSrc/gpuItems), a); err != nil {
		return err
	}
	if err := launch(m, &s.stepSink, "gcn_agg", m.rowBlocks(b.NumDst, 16, a.Dim), a); err != nil {
		return err
	}
	g := m.layerProduct(s, l, w[1])
	g.A, g.B = a.Out, m.ptr(w[0])
	return m.gemm(&s.stepSink, opNN, &g, s.plan.scratchAt())
}

func (gcn) backward(m *Model, s *step, l int, h, dz cuda.DevicePtr) error {
	b, w, scratch := m.block(s.mb, l), m.layers[l], s.plan.scratchAt()
	in, out := m.dims[l], m.dims[l+1]
	tn := gemmParams{M: in, N: out, K: b.NumDst, LDA: in, LDB: out, LDC: out, A: s.plan.at(s.plan.layers[l].agg), B: dz, C: m.grad(w[0])}
	if err := m.gemm(&s.stepSink, opTN, &tn, scratch); err != nil {
		return err
	}
	if err := m.colSum(&s.stepSink, &sumParams{X: dz, Out: m.grad(w[1]), Rows: b.NumDst, Cols: out}, scratch); err != nil {
		return err
	}
	if l == 0 {
		return nil // nobody wants the gradient of the features
	}
	a := m.aggParams(s, l)
	a.Out, a.Grad, a.Scale = h, s.plan.at(s.plan.dAgg), m.keptScale()
	a.TEnd, a.TDst, a.Weights = s.plan.at(s.plan.tEnd), s.plan.at(s.plan.tDst), s.plan.at(s.plan.weights)
	nt := gemmParams{M: b.NumDst, N: in, K: out, LDA: out, LDB: out, LDC: in, A: dz, B: m.ptr(w[0]), C: a.Grad}
	if err := m.gemm(&s.stepSink, opNT, &nt, scratch); err != nil {
		return err
	}
	if err := m.weigh(s, b, &a); err != nil {
		return err
	}
	if err := m.transpose(&s.stepSink, "gcn_transpose", &a, scratch); err != nil {
		return err
	}
	return launch(m, &s.stepSink, "gcn_agg_bwd", m.rowBlocks(b.NumSrc, 64, a.Dim), a)
}
