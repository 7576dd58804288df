package gnn

import (
	"cmp"
	"fmt"
	"math"
	"unsafe"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
)

// gat is a graph attention network (Veličković et al., ICLR 2018). For each of K heads, with z =
// h·W:
//
//	s_ij = LeakyReLU(a_dst·z_i + a_src·z_j)       j: the node itself and its sampled neighbours
//	α_ij = exp(s_ij) / Σ_k exp(s_ik)              of a block with weights: each exp times its neighbour's
//	out  = Σ_j dropout(α_ij) z_j + b
//
// Hidden layers put the heads' outputs side by side, so Hidden is K times the width of one; the
// last layer takes their mean. By ModelSettings.SelfLoops an edge of a node to itself counts beside
// the self loop, or the loop has the weight that such edges lack.
//
// Attention works edge by edge and head by head, so its arrays have an element for each. The
// backward pass gathers: lists of edges by source come from the transpose of a block in which each
// edge is a destination.
type gat struct{}

func (gat) Name() string { return "gat" }
func (gat) Summary() string {
	return "graph attention: a node attends to itself and its neighbours, with several heads"
}
func (gat) Degrees() bool { return false }

// rounding: the softmax took the exp of float64 once.
func (gat) rounding() string { return "exp of float32" }

// leakySlope is LeakyReLU's below 0.
const leakySlope = 0.2

// Layer numbers in the counters of the masks of attention: of edges, and of the self loops. Hidden
// layers stay below them.
const (
	attentionLayer = 64
	attentionSelf  = 128
	mostGATLayers  = 32
)

const mostHeads = 1024

// Default is the 8 heads of the paper, and PyG's self loops.
func (gat) Default(c *ModelSettings) {
	c.Heads = cmp.Or(c.Heads, 8)
	c.SelfLoops = cmp.Or(c.SelfLoops, LoopsRemaining)
}

func (g gat) Check(c *ModelConfig) error {
	return cmp.Or(c.noTyped(), c.noEps(), g.checkHeads(c))
}

func (gat) checkHeads(c *ModelConfig) error {
	heads := c.heads()
	switch {
	case heads < 1 || heads > mostHeads:
		return errs.New(errs.Usage, "gat: %d heads; give 1 to %d", heads, mostHeads)
	case c.OutHeads < 0 || c.OutHeads > mostHeads:
		return errs.New(errs.Usage, "gat: %d heads in the last layer; give 1 to %d", c.OutHeads,
			mostHeads)
	case c.headed() && c.OutHeads != 0:
		return errs.New(errs.Usage,
			"{head} %s: the last layer's heads stand side by side as the others'; leave {heads-out} out",
			c.Head)
	case (c.Layers > 1 || c.headed()) && c.Hidden%heads != 0:
		return errs.New(errs.Usage,
			"gat: %d hidden are no multiple of %d heads, whose outputs stand side by side",
			c.Hidden, heads)
	case c.Layers > mostGATLayers:
		return errs.New(errs.Usage, "gat: %d layers; at most %d", c.Layers, mostGATLayers)
	}
	return nil
}

// heads is Heads, 1 where it is 0.
func (c *ModelConfig) heads() int {
	if c.Heads == 0 {
		return 1
	}
	return c.Heads
}

// headsOf is the number of heads of layer l.
func (c *ModelConfig) headsOf(l int) int64 {
	if c.outputs(l) && c.OutHeads > 0 {
		return int64(c.OutHeads)
	}
	return int64(c.heads())
}

// headWidth is the width of a head of layer l.
func (gat) headWidth(c *ModelConfig, l int) int64 {
	if c.outputs(l) {
		return int64(c.Classes)
	}
	return int64(c.Hidden / c.heads())
}

func (g gat) Floats(c *ModelConfig, l int) int64 {
	wide := g.headWidth(c, l) * c.headsOf(l)
	return c.width(l)*wide + 2*wide + c.width(l+1)
}

func (g gat) Forward(c *ModelConfig, l int, b BlockShape) []Work {
	heads := c.headsOf(l)
	wide := g.headWidth(c, l) * heads
	return []Work{
		productWork(b.Src, wide, c.width(l), 1),
		bytesWork(4 * (b.Src*(wide+heads) + b.Dst*(wide+heads))),
		bytesWork(4 * heads * (4*b.Edges + 4*b.Dst)), gatherWork(b.Edges, 2*b.Dst, wide),
		bytesWork(8 * b.Dst * c.width(l+1)),
	}
}

func (g gat) Backward(c *ModelConfig, l int, b BlockShape) []Work {
	heads := c.headsOf(l)
	wide := g.headWidth(c, l) * heads
	w := []Work{
		bytesWork(4 * b.Dst * c.width(l+1)), bytesWork(12 * b.Edges),
		gatherWork(2*b.Edges, 2*b.Dst, wide),
		bytesWork(4 * heads * (6*b.Edges + 6*b.Dst)),
	}
	w = append(append(w, transposeWork(BlockShape{Dst: b.Edges, Src: b.Src, Edges: b.Edges})...),
		bytesWork(4*heads*(b.Edges+b.Src)), gatherWork(b.Edges, 2*b.Src, wide),
		bytesWork(4*(b.Src+b.Dst)*wide),
		productWork(c.width(l), wide, b.Src, 1))
	if l > 0 {
		w = append(w, productWork(b.Src, c.width(l), wide, 1), bytesWork(3*4*b.Src*c.width(l)))
	}
	return w
}

// kernels that begin with gat_ take gatParams.
func (gat) kernels(gpu bool) []string {
	names := []string{"self_weights", "gat_score", "gat_softmax", "gat_sum", "gat_mean", "gat_spread", "gat_edges",
		"gat_dot", "gat_softmax_bwd",
		"gat_score_bwd", "gat_sum_bwd", "gat_scaled_sum", "relu_bwd", "bias_act"}
	if !gpu {
		names = append(names, "sage_transpose")
	}
	return names
}

// Places of a layer's parameters in network.layers.
const (
	gatW = iota
	gatSrc
	gatDst
	gatBias
)

func (g gat) declare(n *network, l int, t *tensors) {
	in, heads, f := n.dims[l], n.cfg.headsOf(l), g.headWidth(&n.cfg, l)
	n.layers[l] = []int64{
		gatW:    t.add(fmt.Sprintf("layer%d.weight", l), in, heads*f, glorot(in, heads*f)),
		gatSrc:  t.add(fmt.Sprintf("layer%d.att_src", l), heads, f, glorot(2*f, 1)),
		gatDst:  t.add(fmt.Sprintf("layer%d.att_dst", l), heads, f, glorot(2*f, 1)),
		gatBias: t.add(fmt.Sprintf("layer%d.bias", l), 1, n.dims[l+1], 0),
	}
}

// gatPlan is the part of a plan that only gat has: used by one layer after the other.
type gatPlan struct {
	out                    int64 // of all heads, where the layer takes their mean
	alpha, alphaSelf       int64
	grad                   int64 // of out
	dot, dotSelf           int64
	dSrc, dDst             int64
	edgePtr, edgeDst, part int64
	dZ, dIn                int64
}

// A layer keeps z in mid, and in agg: scores of sources, scores of destinations, maxima and inverse
// sums.
func (g gat) layout(n *network, blocks []graph.Block, train bool, p *plan) {
	L := n.cfg.Layers
	var z, scores, edges, dsts, srcs, part, dIn int64 // the most of all layers
	for l := range L {
		b, heads := &blocks[L-1-l], n.cfg.headsOf(l)
		w := g.headWidth(&n.cfg, l) * heads
		z, scores, part = max(z, b.NumSrc*w), max(scores, g.scores(b, heads)),
			max(part, leaves(b.NumSrc)*w)
		edges, dsts, srcs = max(edges, b.NumEdges*heads), max(dsts, b.NumDst*heads),
			max(srcs, b.NumSrc*heads)
		if l > 0 {
			dIn = max(dIn, b.NumSrc*n.dims[l])
		}
		if train {
			p.layers[l].mid, p.layers[l].agg = p.take(b.NumSrc*w), p.take(g.scores(b, heads))
		}
	}
	if !train {
		zAt, sAt := p.take(z), p.take(scores)
		for l := range L {
			p.layers[l].mid, p.layers[l].agg = zAt, sAt
		}
	}
	q := &p.gat
	out := blocks[0].NumDst * n.cfg.headsOf(L-1) * n.dims[L]
	q.out = p.take(out)
	q.alpha, q.alphaSelf = p.take(edges), p.take(dsts)
	if n.cfg.remaining() {
		p.selfWeights = p.take(blocks[L-1].NumDst) // for all blocks
	}
	if !train {
		return
	}
	q.grad = p.take(out)
	q.dot, q.dotSelf = p.take(edges), p.take(dsts)
	q.dSrc, q.dDst = p.take(srcs), p.take(dsts)
	list := int64(0)
	for l := range L {
		list = max(list, blocks[L-1-l].NumEdges)
	}
	q.edgePtr, q.edgeDst, q.part = p.take(2*(list+1)), p.take(list), p.take(part)
	q.dZ, q.dIn = p.take(z), p.take(dIn)
	p.weights = p.take(list)
	layoutTranspose(n, blocks, 0, p)
}

// scores returns how many floats of scores a layer over b keeps.
func (gat) scores(b *graph.Block, heads int64) int64 {
	return align(b.NumSrc*heads) + 3*align(b.NumDst*heads)
}

// gatParams is the parameter block of gat_*. N destinations, S sources, E edges, K heads of D
// floats.
type gatParams struct {
	Indptr, Src        cuda.DevicePtr // int64[N+1], uint32[E]: the block
	SrcWeights         cuda.DevicePtr // float32[S], or 0
	SelfWeights        cuda.DevicePtr // float32[N], by self_weights: of the self loops, or 0 for 1
	Z                  cuda.DevicePtr // float32[S, K, D]
	AttSrc, AttDst     cuda.DevicePtr // float32[K, D]
	ScoreSrc, ScoreDst cuda.DevicePtr // float32[S, K], float32[N, K]
	Max, Inverse       cuda.DevicePtr // float32[N, K]: largest score, 1 / sum of exp
	Alpha, AlphaSelf   cuda.DevicePtr // float32[E, K], float32[N, K]: attention behind its dropout
	Out                cuda.DevicePtr // see each kernel
	Grad               cuda.DevicePtr // float32[N, K, D], gradient by the sums
	// float32[E, K], float32[N, K]: Grad · z, then the gradients by the scores
	Dot, DotSelf cuda.DevicePtr
	// float32[S, K], float32[N, K]: gradients by ScoreSrc and ScoreDst
	DSrc, DDst        cuda.DevicePtr
	EdgePtr, EdgeDst  cuda.DevicePtr // int64[E+1]: e; uint32[E]: destination of e
	TEnd, TEdge       cuda.DevicePtr // uint32[S], uint32[E]: edges by source
	Scale             cuda.DevicePtr // float32[Rows, K] of gat_scaled_sum
	NumDst, NumSrc    int64
	Edges, Dim, Heads int64
	Rows              int64 // of gat_scaled_sum
	Drop              dropout
}

const (
	_ = uint(unsafe.Sizeof(gatParams{}) - 272)
	_ = uint(272 - unsafe.Sizeof(gatParams{}))
)

// params describes layer l of a step.
func (g gat) params(s *step, l int) gatParams {
	b, w, places, q := s.block(l), s.layers[l], &s.plan.layers[l], &s.plan.gat
	heads := s.cfg.headsOf(l)
	p := gatParams{
		Indptr: pointer(b.Indptr), Src: pointer(b.Src), SrcWeights: pointer(b.Weights),
		Z:      s.plan.ptr(places.mid),
		AttSrc: s.ptr(w[gatSrc]), AttDst: s.ptr(w[gatDst]),
		Alpha: s.plan.ptr(q.alpha), AlphaSelf: s.plan.ptr(q.alphaSelf),
		NumDst: b.NumDst, NumSrc: b.NumSrc, Edges: b.NumEdges, Dim: g.headWidth(&s.cfg, l),
		Heads: heads,
	}
	of := places.agg
	for _, f := range []struct {
		p    *cuda.DevicePtr
		rows int64
	}{{&p.ScoreSrc, b.NumSrc}, {&p.ScoreDst, b.NumDst}, {&p.Max, b.NumDst},
		{&p.Inverse, b.NumDst}} {
		*f.p = s.plan.ptr(of)
		of += align(f.rows * heads)
	}
	if s.set != nil && s.cfg.AttentionDropout > 0 {
		p.Drop = s.drop(s.cfg.AttentionDropout, uint32(attentionLayer+l))
	}
	return p
}

// weighLoops enqueues the weights of the remaining self loops of a layer.
func (gat) weighLoops(s *step, l int, p *gatParams) error {
	if !s.cfg.remaining() {
		return nil
	}
	p.SelfWeights = s.plan.ptr(s.plan.selfWeights)
	a := s.aggParams(l)
	a.SrcWeights, a.SelfWeights = p.SrcWeights, p.SelfWeights
	return launch(s, "self_weights", s.blocks(p.NumDst, 256, p.NumDst/32), a)
}

// averages reports whether layer l takes the mean of several heads.
func (gat) averages(n *network, l int) bool { return n.cfg.outputs(l) && n.cfg.headsOf(l) > 1 }

func (g gat) forward(s *step, l int, in cuda.DevicePtr) error {
	b, w, h := s.block(l), s.layers[l], s.plan.ptr(s.plan.layers[l].h)
	if s.set != nil && b.NumEdges >= math.MaxUint32 {
		return errs.New(errs.Usage,
			"a block of %d edges passes the limit of 2^32: lower the batch size or the fanouts",
			b.NumEdges)
	}
	p := g.params(s, l)
	wide, depth := p.Heads*p.Dim, s.dims[l]
	z := gemmParams{M: b.NumSrc, N: wide, K: depth, LDA: depth, LDB: wide, LDC: wide, A: in,
		B: s.ptr(w[gatW]), C: p.Z}
	if err := s.gemm(opNN, &z); err != nil {
		return err
	}
	if err := launch(s, "gat_score", s.dotBlocks(p.NumSrc*p.Heads, p.Dim),
		p); err != nil {
		return err
	}
	if err := g.weighLoops(s, l, &p); err != nil {
		return err
	}
	if err := launch(s, "gat_softmax", s.blocks(p.NumDst, 16, p.NumDst*p.Heads/32),
		p); err != nil {
		return err
	}
	if p.Out = h; g.averages(s.network, l) {
		p.Out = s.plan.ptr(s.plan.gat.out)
	}
	if err := launch(s, "gat_sum", s.headBlocks(p.NumDst, 16, p.Heads, p.Dim), p); err != nil {
		return err
	}
	if g.averages(s.network, l) {
		mean := p
		mean.Z, mean.Out = p.Out, h
		if err := launch(s, "gat_mean", s.blocks(p.NumDst, 64, p.NumDst*p.Dim/32),
			mean); err != nil {
			return err
		}
	}
	flags, drop := s.activation(l)
	out := s.dims[l+1]
	return launch(s, "bias_act",
		s.blocks(b.NumDst, 64, b.NumDst*((out+3)/4)*4/gpuItems), biasActParams{
			C: h, Bias: s.ptr(w[gatBias]), Rows: b.NumDst, Cols: out, LDC: out, Drop: drop,
			Flags: flags,
		})
}

func (g gat) backward(s *step, l int, h, dz cuda.DevicePtr) error {
	q, ptr, p := &s.plan.gat, s.plan.ptr, g.params(s, l)
	if err := s.columnGrad(p.NumDst, s.dims[l+1], dz, s.layers[l][gatBias]); err != nil {
		return err
	}
	p.Grad, p.Dot, p.DotSelf = dz, ptr(q.dot), ptr(q.dotSelf)
	p.DSrc, p.DDst = ptr(q.dSrc), ptr(q.dDst)
	p.EdgePtr, p.EdgeDst, p.TEnd, p.TEdge = ptr(q.edgePtr), ptr(q.edgeDst), ptr(s.plan.tEnd),
		ptr(s.plan.tDst)
	if g.averages(s.network, l) {
		p.Grad = ptr(q.grad)
		spread := p
		spread.Z, spread.Out = dz, p.Grad
		if err := launch(s, "gat_spread", s.blocks(p.NumDst, 64, p.NumDst*p.Heads*p.Dim/32),
			spread); err != nil {
			return err
		}
	}
	if err := g.weighLoops(s, l, &p); err != nil {
		return err
	}
	p.Out = ptr(q.dZ)
	if err := g.backwardEdges(s, p, func() error { return nil }); err != nil {
		return err
	}
	if err := s.attentionGrad(p, s.layers[l][gatDst], s.layers[l][gatSrc]); err != nil {
		return err
	}
	return g.backwardInput(s, l, h, p.Out)
}

// backwardEdges computes the gradients by scores and, in p.Out, by z. attended is called once
// attention is there again.
func (gat) backwardEdges(s *step, p gatParams, attended func() error) error {
	// Destinations: gradients by attention and by scores.
	if err := launch(s, "gat_edges", s.blocks(p.NumDst, 256, (p.NumDst+p.Edges)/32),
		p); err != nil {
		return err
	}
	if err := launch(s, "gat_dot", s.dotBlocks((p.NumDst+p.Edges)*p.Heads, p.Dim),
		p); err != nil {
		return err
	}
	if err := launch(s, "gat_softmax_bwd", s.blocks(p.NumDst, 16, p.NumDst*p.Heads/32),
		p); err != nil {
		return err
	}
	if err := attended(); err != nil {
		return err
	}
	// Sources: lists of edges, and sums over them.
	lists := aggParams{
		Indptr: p.EdgePtr, Src: p.Src, NumDst: p.Edges, NumSrc: p.NumSrc, Edges: p.Edges,
		TEnd: p.TEnd, TDst: p.TEdge, Weights: s.plan.ptr(s.plan.weights),
	}
	if err := s.transpose("sage_transpose", &lists); err != nil {
		return err
	}
	if err := launch(s, "gat_score_bwd", s.blocks(p.NumSrc, 64, p.NumSrc*p.Heads/32),
		p); err != nil {
		return err
	}
	return launch(s, "gat_sum_bwd", s.headBlocks(p.NumSrc, 64, p.Heads, p.Dim), p)
}

// attentionGrad computes the gradients of the parameters of attention: z times the gradients of its
// scores, summed.
func (s *step) attentionGrad(p gatParams, attDst, attSrc int64) error {
	wide := p.Heads * p.Dim
	p.Out = s.plan.ptr(s.plan.gat.part)
	for _, f := range []struct {
		scale    cuda.DevicePtr
		rows, to int64
	}{{p.DDst, p.NumDst, attDst}, {p.DSrc, p.NumSrc, attSrc}} {
		p.Scale, p.Rows = f.scale, f.rows
		groups := leaves(f.rows)
		if err := launch(s, "gat_scaled_sum", s.blocks(groups, 1, groups*wide/32), p); err != nil {
			return err
		}
		if err := s.columnGrad(groups, wide, p.Out, f.to); err != nil {
			return err
		}
	}
	return nil
}

// backwardInput computes the gradients of the layer's matrix and of its input h from that of z.
func (g gat) backwardInput(s *step, l int, h, dz cuda.DevicePtr) error {
	b, w, depth := s.block(l), s.layers[l], s.dims[l]
	wide := s.cfg.headsOf(l) * g.headWidth(&s.cfg, l)
	if err := s.weightGrad(b.NumSrc, depth, wide, h, dz, w[gatW]); err != nil || l == 0 {
		return err // the gradient of the features is not needed
	}
	gate := aggParams{Out: h, Grad: s.plan.ptr(s.plan.gat.dIn), NumDst: b.NumSrc, Dim: depth}
	if s.gate(&gate); gate.Open != 0 {
		return s.inputGrad(b.NumSrc, depth, wide, dz, w[gatW], h)
	}
	if err := s.inputGrad(b.NumSrc, depth, wide, dz, w[gatW], gate.Grad); err != nil {
		return err
	}
	return launch(s, "relu_bwd", s.rowBlocks(b.NumSrc, 16, depth), gate)
}
