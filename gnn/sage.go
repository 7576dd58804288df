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
		names = append(names, "sage_transpose")
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
	p.dstWeights = p.take(rows) // for all blocks, so that nobody needs to know which they are
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
	if err := launch(s, kernel, s.rowBlocks(b.NumDst, 16, a.Dim), a); err != nil {
		return err
	}
	g := s.layerProduct(l, w[2])
	g.A, g.B = in, s.ptr(w[0]) // destinations are the first sources
	g.A2, g.B2, g.K2, g.LDA2, g.LDB2 = a.Out, s.ptr(w[1]), g.K, g.LDA, g.LDB
	return s.gemm(opNN, &g)
}

func (sage) backward(s *step, l int, h, dz cuda.DevicePtr) error {
	b, w := s.block(l), s.layers[l]
	in, out := s.dims[l], s.dims[l+1]
	tn := gemmParams{M: in, N: out, K: b.NumDst, LDA: in, LDB: out, LDC: out, B: dz}
	for _, f := range []struct {
		a cuda.DevicePtr
		c int64
	}{{s.plan.ptr(s.plan.layers[l].agg), w[1]}, {h, w[0]}} {
		tn.A, tn.C = f.a, s.grad(f.c)
		if err := s.gemm(opTN, &tn); err != nil {
			return err
		}
	}
	sum := sumParams{X: dz, Out: s.grad(w[2]), Rows: b.NumDst, Cols: out}
	if err := s.colSum(&sum); err != nil {
		return err
	}
	if l == 0 {
		return nil // nobody wants the gradient of the features
	}
	a := s.aggParams(l)
	a.Out, a.Grad, a.Self = h, s.plan.ptr(s.plan.dAgg), s.plan.ptr(s.plan.dSelf)
	s.gate(&a)
	a.TEnd, a.TDst, a.Weights = s.plan.ptr(s.plan.tEnd), s.plan.ptr(s.plan.tDst),
		s.plan.ptr(s.plan.weights)
	nt := gemmParams{M: b.NumDst, N: in, K: out, LDA: out, LDB: out, LDC: in, A: dz}
	for _, f := range []struct {
		b int64
		c cuda.DevicePtr
	}{{w[0], a.Self}, {w[1], a.Grad}} {
		nt.B, nt.C = s.ptr(f.b), f.c
		if err := s.gemm(opNT, &nt); err != nil {
			return err
		}
	}
	if err := s.weigh(b, &a); err != nil {
		return err
	}
	if err := s.transpose("sage_transpose", &a); err != nil {
		return err
	}
	return launch(s, "sage_mean_bwd", s.rowBlocks(b.NumSrc, 64, a.Dim), a)
}
