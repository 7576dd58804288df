package gnn

import (
	"fmt"

	"helios/cuda"
	"helios/graph"
)

// DefaultArch is the kind of model where none is named.
const DefaultArch = "sage"

// sage is GraphSAGE with mean aggregation (Hamilton et al., NeurIPS 2017): W_self h_i + W_neigh
// mean(h_j) + b.
type sage struct{}

func (sage) Name() string { return DefaultArch }
func (sage) Summary() string {
	return "GraphSAGE: a node's own features and the mean of its neighbours', a matrix for each"
}
func (sage) Degrees() bool              { return false }
func (sage) Default(*ModelSettings)     {}
func (sage) Check(c *ModelConfig) error { return c.noOptions() }

func (sage) Floats(c *ModelConfig, l int) int64 {
	return c.width(l)*c.width(l+1)*2 + c.width(l+1)
}

func (sage) Forward(c *ModelConfig, l int, b BlockShape) []Work {
	in, out := c.width(l), c.width(l+1)
	return []Work{gatherWork(b.Edges, b.Dst, in), productWork(b.Dst, out, in, 2)}
}

func (sage) Backward(c *ModelConfig, l int, b BlockShape) []Work {
	in, out := c.width(l), c.width(l+1)
	w := []Work{productWork(in, out, b.Dst, 1), productWork(in, out, b.Dst, 1),
		bytesWork(4 * b.Dst * out)}
	if l > 0 {
		w = append(w, productWork(b.Dst, in, out, 1), productWork(b.Dst, in, out, 1))
		w = append(append(w, transposeWork(b)...), gatherWork(b.Edges, 2*b.Src, in))
	}
	return w
}

func (sage) kernels(gpu bool) []string {
	names := []string{"sage_mean", "sage_weighted", "agg_weights", "sage_mean_bwd"}
	if !gpu {
		names = append(names, "sage_transpose", "sage_mean"+inPlace, "sage_weighted"+inPlace)
	}
	return names
}

func (sage) declare(n *network, l int, t *tensors) {
	in, out := n.dims[l], n.dims[l+1]
	n.layers[l] = []int64{
		t.add(fmt.Sprintf("layer%d.self.weight", l), in, out, glorot(in, out)),
		t.add(fmt.Sprintf("layer%d.neigh.weight", l), in, out, glorot(in, out)),
		t.add(fmt.Sprintf("layer%d.bias", l), 1, out, 0),
	}
}

func (sage) layout(n *network, blocks []graph.Block, train bool, p *plan) {
	layoutAggregates(n, blocks, train, p)
	rows := blocks[n.cfg.Layers-1].NumDst
	p.dstWeights = p.take(rows) // for all blocks, whichever they are
	if !train {
		return
	}
	p.weights = p.take(rows)
	p.dAgg, p.dSelf = p.take(inputGradient(n, blocks)), p.take(inputGradient(n, blocks))
	layoutTranspose(n, blocks, 1, p)
}

func (sage) forward(s *step, l int, in cuda.DevicePtr) error {
	b, w := s.block(l), s.layers[l]
	a := s.aggParams(l)
	a.X, a.Out = in, s.plan.ptr(s.plan.layers[l].agg)
	if err := s.weigh(b, &a); err != nil {
		return err
	}
	kernel := "sage_mean"
	if b.Weights != nil {
		kernel = "sage_weighted"
	}
	if err := s.aggregate(l, kernel, a); err != nil {
		return err
	}
	g := s.layerProduct(l, w[2])
	g.A, g.B = in, s.ptr(w[0]) // destinations are the first sources
	g.A2, g.B2, g.K2, g.LDA2, g.LDB2 = a.Out, s.ptr(w[1]), g.K, g.LDA, g.LDB
	return s.gemm(opNN, &g)
}

func (sage) backward(s *step, l int, h, dz cuda.DevicePtr) error {
	rows, w, a := s.block(l).NumDst, s.layers[l], s.aggParams(l)
	in, out := s.dims[l], s.dims[l+1]
	if err := s.weightGrad(rows, in, out, s.plan.ptr(s.plan.layers[l].agg), dz, w[1]); err != nil {
		return err
	}
	if err := s.weightGrad(rows, in, out, h, dz, w[0]); err != nil {
		return err
	}
	if err := s.columnGrad(rows, out, dz, w[2]); err != nil || l == 0 {
		return err // the gradient of the features is not needed
	}
	a.Grad, a.Self = s.plan.ptr(s.plan.dAgg), s.plan.ptr(s.plan.dSelf)
	if err := s.inputGrad(rows, in, out, dz, w[0], a.Self); err != nil {
		return err
	}
	if err := s.inputGrad(rows, in, out, dz, w[1], a.Grad); err != nil {
		return err
	}
	return s.gather(l, h, a, "sage_transpose", "sage_mean_bwd")
}
