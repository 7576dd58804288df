package gnn

import (
	"cmp"
	"fmt"

	"helios/cuda"
	"helios/graph"
)

// gcn is a graph convolution with symmetric normalisation and self loops (Kipf and Welling, ICLR
// 2017): W Σ w_ij h_j + b, with the weights of edgeWeights. See ModelSettings.SelfLoops.
type gcn struct{}

func (gcn) Name() string { return "gcn" }
func (gcn) Summary() string {
	return "graph convolution: neighbours and the node itself weighted by the roots of their degrees"
}
func (gcn) Degrees() bool { return true }

func (gcn) Default(c *ModelSettings) { c.SelfLoops = cmp.Or(c.SelfLoops, LoopsRemaining) }

func (gcn) Check(c *ModelConfig) error {
	if err := c.noEps(); err != nil {
		return err
	}
	return c.noAttention()
}

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
	names := []string{"agg_weights", "self_weights", "gcn_weights", "gcn_agg", "gcn_agg_bwd"}
	if !gpu {
		names = append(names, "gcn_transpose", "gcn_agg"+inPlace)
	}
	return names
}

func (gcn) declare(n *network, l int, t *tensors) {
	in, out := n.dims[l], n.dims[l+1]
	n.layers[l] = []int64{
		t.add(fmt.Sprintf("layer%d.weight", l), in, out, glorot(in, out)),
		t.add(fmt.Sprintf("layer%d.bias", l), 1, out, 0),
	}
}

func (gcn) layout(n *network, blocks []graph.Block, train bool, p *plan) {
	layoutAggregates(n, blocks, train, p)
	b := &blocks[n.cfg.Layers-1]
	p.weights = p.take(b.NumSrc)
	p.dstWeights = p.take(b.NumDst) // for all blocks, whichever they are
	if n.cfg.remaining() {
		p.selfWeights = p.take(b.NumDst)
	}
	if train {
		p.dAgg = p.take(inputGradient(n, blocks))
		layoutTranspose(n, blocks, 1, p)
	}
}

func (gcn) forward(s *step, l int, in cuda.DevicePtr) error {
	b, w := s.block(l), s.layers[l]
	a := s.aggParams(l)
	a.X, a.Out, a.Weights = in, s.plan.ptr(s.plan.layers[l].agg), s.plan.ptr(s.plan.weights)
	if err := s.weigh(b, &a); err != nil {
		return err
	}
	if err := launch(s, "gcn_weights", s.blocks(b.NumSrc, 4096, b.NumSrc/gpuItems),
		a); err != nil {
		return err
	}
	if err := s.aggregate(l, "gcn_agg", a); err != nil {
		return err
	}
	g := s.layerProduct(l, w[1])
	g.A, g.B = a.Out, s.ptr(w[0])
	return s.gemm(opNN, &g)
}

func (gcn) backward(s *step, l int, h, dz cuda.DevicePtr) error {
	rows, w, a := s.block(l).NumDst, s.layers[l], s.aggParams(l)
	in, out := s.dims[l], s.dims[l+1]
	if err := s.weightGrad(rows, in, out, s.plan.ptr(s.plan.layers[l].agg), dz, w[0]); err != nil {
		return err
	}
	if err := s.columnGrad(rows, out, dz, w[1]); err != nil || l == 0 {
		return err // the gradient of the features is not needed
	}
	a.Grad = s.plan.ptr(s.plan.dAgg)
	if err := s.inputGrad(rows, in, out, dz, w[0], a.Grad); err != nil {
		return err
	}
	return s.gather(l, h, a, "gcn_transpose", "gcn_agg_bwd")
}
