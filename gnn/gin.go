package gnn

import (
	"fmt"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/simd"
)

// gin is a graph isomorphism network (Xu et al., ICLR 2019): an MLP of two layers over (1+ε) h_i +
// Σ h_j. ε is 0, or learned for each layer (ModelConfig.LearnEps). The sum goes over the sampled
// neighbours. In a block with weights each one counts with its own, so that the sum has the sum
// over all neighbours as its mean.
type gin struct{}

func (gin) Name() string { return "gin" }
func (gin) Summary() string {
	return "graph isomorphism network: the sum of a node and its neighbours, through two matrices"
}
func (gin) Degrees() bool { return false }

func (gin) Default(*ModelSettings) {}

func (gin) Check(c *ModelConfig) error {
	if err := c.noLoops(); err != nil {
		return err
	}
	if err := c.noAttention(); err != nil {
		return err
	}
	if c.Hidden < 1 {
		return errs.New(errs.Usage, "model: %d hidden: a layer of gin needs at least 1", c.Hidden)
	}
	return nil
}

// Places of a layer's parameters in network.layers.
const (
	ginW1 = iota
	ginB1
	ginW2
	ginB2
	ginEps
)

func (gin) Floats(c *ModelConfig, l int) int64 {
	in, mid, out := c.width(l), int64(c.Hidden), c.width(l+1)
	n := in*mid + mid + mid*out + out
	if c.LearnEps {
		n++
	}
	return n
}

func (gin) Forward(c *ModelConfig, l int, b BlockShape) []Work {
	in, mid, out := c.width(l), int64(c.Hidden), c.width(l+1)
	return []Work{gatherWork(b.Edges, 2*b.Dst, in), productWork(b.Dst, mid, in, 1),
		productWork(b.Dst, out, mid, 1)}
}

func (gin) Backward(c *ModelConfig, l int, b BlockShape) []Work {
	in, mid, out := c.width(l), int64(c.Hidden), c.width(l+1)
	w := []Work{
		productWork(mid, out, b.Dst, 1), bytesWork(4 * b.Dst * out), productWork(b.Dst, mid, out,
			1), bytesWork(3 * 4 * b.Dst * mid),
		productWork(in, mid, b.Dst, 1), bytesWork(4 * b.Dst * mid),
	}
	if l > 0 || c.LearnEps {
		w = append(w, productWork(b.Dst, in, mid, 1))
	}
	if c.LearnEps {
		w = append(w, bytesWork(2*4*b.Dst*in), bytesWork(4*b.Dst))
	}
	if l > 0 {
		w = append(append(w, transposeWork(b)...), gatherWork(b.Edges, 2*b.Src, in))
	}
	return w
}

func (gin) kernels(gpu bool) []string {
	names := []string{"gin_sum", "gin_weighted", "gin_sum_bwd", "relu_bwd", "row_dot"}
	if !gpu {
		names = append(names, "sage_transpose", "gin_sum"+inPlace, "gin_weighted"+inPlace)
	}
	return names
}

func (gin) declare(n *network, l int, t *tensors) {
	in, mid, out := n.dims[l], int64(n.cfg.Hidden), n.dims[l+1]
	n.layers[l] = []int64{
		ginW1: t.add(fmt.Sprintf("layer%d.mlp0.weight", l), in, mid, glorot(in, mid)),
		ginB1: t.add(fmt.Sprintf("layer%d.mlp0.bias", l), 1, mid, 0),
		ginW2: t.add(fmt.Sprintf("layer%d.mlp1.weight", l), mid, out, glorot(mid, out)),
		ginB2: t.add(fmt.Sprintf("layer%d.mlp1.bias", l), 1, out, 0),
	}
	if n.cfg.LearnEps {
		n.layers[l] = append(n.layers[l], t.add(fmt.Sprintf("layer%d.eps", l), 1, 1, 0))
	}
}

// eps is the address of a layer's ε; 0 where it is none.
func (gin) eps(s *step, l int) cuda.DevicePtr {
	if !s.cfg.LearnEps {
		return 0
	}
	return s.ptr(s.layers[l][ginEps])
}

func (gin) layout(n *network, blocks []graph.Block, train bool, p *plan) {
	layoutAggregates(n, blocks, train, p)
	L, mid := n.cfg.Layers, int64(n.cfg.Hidden)
	rows := blocks[L-1].NumDst
	if !train {
		offset := p.take(rows * mid)
		for l := range L {
			p.layers[l].mid, p.layers[l].act = offset, offset
		}
		return
	}
	for l := range L {
		p.layers[l].mid = p.take(blocks[L-1-l].NumDst * mid)
		p.layers[l].act = p.layers[l].mid
		if !n.gated() {
			p.layers[l].act = p.take(blocks[L-1-l].NumDst * mid)
		}
	}
	p.dMid, p.weights = p.take(rows*mid), p.take(rows)
	dAgg := inputGradient(n, blocks)
	if n.cfg.LearnEps {
		dAgg = max(dAgg, rows*n.dims[0])
	}
	p.dAgg = p.take(dAgg)
	layoutTranspose(n, blocks, 1, p)
}

// sums describes the block of layer l for the kernels that sum.
func (g gin) sums(s *step, l int) aggParams {
	a := s.aggParams(l)
	a.Eps = g.eps(s, l)
	a.SrcWeights = pointer(s.block(l).Weights)
	return a
}

func (g gin) forward(s *step, l int, in cuda.DevicePtr) error {
	b, w, places := s.block(l), s.layers[l], &s.plan.layers[l]
	a := g.sums(s, l)
	a.X, a.Out = in, s.plan.ptr(places.agg)
	kernel := "gin_sum"
	if b.Weights != nil {
		kernel = "gin_weighted"
	}
	if err := s.aggregate(l, kernel, a); err != nil {
		return err
	}
	mid := int64(s.cfg.Hidden)
	first := gemmParams{
		M: b.NumDst, N: mid, K: a.Dim, LDA: a.Dim, LDB: mid, LDC: mid,
		A: a.Out, B: s.ptr(w[ginW1]), C: s.plan.ptr(places.mid), Bias: s.ptr(w[ginB1]),
	}
	if s.gated() {
		first.Flags = gemmReLU
	}
	if err := s.gemm(opNN, &first); err != nil {
		return err
	}
	if !s.gated() {
		act := actParams{X: first.C, Out: s.plan.ptr(places.act), Rows: b.NumDst, Cols: mid}
		if err := s.activate(s.act, act, false); err != nil {
			return err
		}
	}
	second := s.layerProduct(l, w[ginB2])
	second.K, second.LDA, second.A, second.B = mid, mid, s.plan.ptr(places.act), s.ptr(w[ginW2])
	return s.gemm(opNN, &second)
}

func (g gin) backward(s *step, l int, h, dz cuda.DevicePtr) error {
	rows, w, places := s.block(l).NumDst, s.layers[l], &s.plan.layers[l]
	in, mid, out := s.dims[l], int64(s.cfg.Hidden), s.dims[l+1]
	dMid, hidden := s.plan.ptr(s.plan.dMid), s.plan.ptr(places.mid)
	if err := s.weightGrad(rows, mid, out, s.plan.ptr(places.act), dz, w[ginW2]); err != nil {
		return err
	}
	if err := s.columnGrad(rows, out, dz, w[ginB2]); err != nil {
		return err
	}
	if err := s.inputGrad(rows, mid, out, dz, w[ginW2], dMid); err != nil {
		return err
	}
	if err := g.backHidden(s, hidden, rows, mid); err != nil {
		return err
	}
	if err := s.weightGrad(rows, in, mid, s.plan.ptr(places.agg), hidden, w[ginW1]); err != nil {
		return err
	}
	if err := s.columnGrad(rows, mid, hidden, w[ginB1]); err != nil {
		return err
	}
	if l == 0 && !s.cfg.LearnEps {
		return nil // the gradient of the features is not needed
	}
	a := g.sums(s, l)
	a.Grad = s.plan.ptr(s.plan.dAgg)
	if err := s.inputGrad(rows, in, mid, hidden, w[ginW1], a.Grad); err != nil {
		return err
	}
	if s.cfg.LearnEps {
		dots := a
		dots.X, dots.Out = h, s.plan.ptr(s.plan.weights)
		if err := launch(s, "row_dot", s.rowBlocks(rows, 64, 32), dots); err != nil {
			return err
		}
		if err := s.columnGrad(rows, 1, dots.Out, w[ginEps]); err != nil {
			return err
		}
	}
	if l == 0 {
		return nil
	}
	return s.gather(l, h, a, "sage_transpose", "gin_sum_bwd")
}

// backHidden enqueues the gradient by what the activation of the MLP was taken of, in the place of
// hidden: of the activation itself where that is ReLU, else of its argument.
func (gin) backHidden(s *step, hidden cuda.DevicePtr, rows, mid int64) error {
	grad := s.plan.ptr(s.plan.dMid)
	if !s.gated() {
		return s.activate(s.act, actParams{X: hidden, Grad: grad, Rows: rows,
			Cols: mid}, true)
	}
	gate := aggParams{Out: hidden, Grad: grad, NumDst: rows, Dim: mid, Scale: 1}
	return launch(s, "relu_bwd", s.rowBlocks(rows, 16, mid), gate)
}

func init() {
	registerSum("gin_sum", ginSum)
	registerSum("gin_weighted", ginSum)
	cuda.RegisterHost("gin_sum_bwd", ginSumBwd)
	cuda.RegisterHost("relu_bwd", reluBwd)
	cuda.RegisterHost("row_dot", rowDot)
}

// selfWeight is 1+ε.
func (p *aggParams) selfWeight() float32 {
	if p.Eps == 0 {
		return 1
	}
	return 1 + cuda.View[float32](p.Eps, 1)[0]
}

// ginSum computes Out[i] = (1+ε) X[i] + Σ_j b_j X[j] over the edges in order; b_j is 1 in blocks
// without weights.
func ginSum(b *cuda.Block, p *aggParams, t *placedParams) error {
	d, level := p.Dim, b.SIMD()
	indptr, out := cuda.View[int64](p.Indptr, p.NumDst+1), cuda.View[float32](p.Out, p.NumDst*d)
	sum := simd.RowSum{
		Dim: int(d), List: cuda.View[uint32](p.Src, p.Edges),
		Stream: p.NumDst*d*4 >= streamBytes,
	}
	t.rows(p, &sum)
	if p.SrcWeights != 0 {
		sum.Table = cuda.View[float32](p.SrcWeights, p.NumSrc)
	}
	self := p.selfWeight()
	lo, hi := b.Range(p.NumDst)
	sumLists(level, &sum, out, cuda.View[float32](p.X, p.NumDst*d), lo, hi, indptr[lo],
		func(i int64) simd.RowList {
			return simd.RowList{N: uint32(indptr[i+1] - indptr[i]), Factor: 1, Start: self}
		})
	if sum.Stream {
		level.StoreFence()
	}
	return nil
}

// ginSumBwd is aggregateBwd for ginSum: its self part is (1+ε) Grad[j] for destinations.
func ginSumBwd(b *cuda.Block, p *aggParams) error {
	d, level := p.Dim, b.SIMD()
	out, end := cuda.View[float32](p.Out, p.NumSrc*d), cuda.View[uint32](p.TEnd, p.NumSrc)
	sum := simd.RowSum{
		X: cuda.View[float32](p.Grad, p.NumDst*d), Dim: int(d), List: cuda.View[uint32](p.TDst,
			p.Edges), Gate: p.Open == 0, Scale: p.Scale,
	}
	var weights []float32
	if p.SrcWeights != 0 {
		weights = cuda.View[float32](p.SrcWeights, p.NumSrc)
	}
	self := p.selfWeight()
	lo, hi := b.Range(p.NumSrc)
	from := uint32(0)
	if lo > 0 {
		from = end[lo-1]
	}
	sumLists(level, &sum, out, sum.X, lo, hi, int64(from), func(j int64) simd.RowList {
		q := simd.RowList{N: end[j] - from, Factor: 1, Start: self}
		if from = end[j]; weights != nil {
			q.Factor = weights[j]
		}
		return q
	})
	return nil
}

// reluBwd computes Out = Out > 0 ? Scale · Grad : 0 for NumDst rows: the gradient by what ReLU made
// Out of, in its place.
func reluBwd(b *cuda.Block, p *aggParams) error {
	d, level := p.Dim, b.SIMD()
	out, grad := cuda.View[float32](p.Out, p.NumDst*d), cuda.View[float32](p.Grad, p.NumDst*d)
	sum := simd.RowSum{Dim: int(d), Gate: true, Scale: p.Scale}
	lo, hi := b.Range(p.NumDst)
	sumLists(level, &sum, out, grad, lo, hi, 0, func(int64) simd.RowList {
		return simd.RowList{Start: 1}
	})
	return nil
}

// rowDot computes Out[i] = Σ_k Grad[i,k] X[i,k] for NumDst rows.
func rowDot(b *cuda.Block, p *aggParams) error {
	d, level := p.Dim, b.SIMD()
	x, grad := cuda.View[float32](p.X, p.NumDst*d), cuda.View[float32](p.Grad, p.NumDst*d)
	out := cuda.View[float32](p.Out, p.NumDst)
	lo, hi := b.Range(p.NumDst)
	for i := lo; i < hi; i++ {
		out[i] = level.Dot(grad[i*d:(i+1)*d], x[i*d:(i+1)*d])
	}
	return nil
}
