package gnn

import (
	"math"

	"helios/cuda"
	"helios/graph"
	"helios/internal/philox"
	"helios/internal/simd"
)

// Step sets the options of one training step. Zero Beta1, Beta2 and Eps mean 0.9, 0.999 and 1e-8.
// The dropout masks depend on Seed, Epoch and Batch only.
type Step struct {
	Seed              uint64
	Epoch, Batch      int
	LR                float32
	Beta1, Beta2, Eps float32
	WeightDecay       float32
	Decoupled         bool // AdamW (Loshchilov and Hutter, ICLR 2019) in place of an L2 term
	// ClipNorm is the largest norm of the gradient of all parameters together: a longer one is
	// made as short (Pascanu et al., ICML 2013); 0: none is.
	ClipNorm float32
	// Rows, of a model that ReadsInPlace, has the features of the nodes that the last hop found: x
	// needs those of the nodes before alone.
	Rows NodeRows
}

// step is a step on its way to a stream: what it computes (network, parameters, mini-batch), where
// (plan), and how (grid, launcher, sink). Forward and backward of every layer are written with it.
type step struct {
	*network
	*parameters
	grid
	stepSink
	on   *launcher
	mb   *graph.MiniBatch
	set  *Step // nil outside training
	plan plan
	turn int // of the results, see Mark
	// sum is the gradient that a step of several shards applies; see Model.Apply.
	sum     cuda.DevicePtr
	weights cuda.DevicePtr // of the loss, or 0
}

// layoutScratch places the most that a kernel of the step takes beside its operands: the step is
// written once without a stream.
func (s *step) layoutScratch() {
	if !s.gpu {
		return
	}
	n := int64(0)
	dry := *s
	dry.stepSink, dry.plan.layers = stepSink{measure: &n}, s.plan.layers
	dry.passes()
	if n > 0 {
		s.plan.scratch = s.plan.take((n + 3) / 4)
	}
}

// passes writes the layers' passes, without loss and optimiser. It ends at the first error, which
// the step itself will meet again.
func (s *step) passes() {
	for l := range s.cfg.Layers {
		if err := s.layerForward(l, 0); err != nil {
			return
		}
	}
	for l := s.cfg.Layers - 1; l >= 0 && s.set != nil; l-- {
		if err := s.layerBackward(l, 0, 0); err != nil {
			return
		}
	}
}

// block is the sampled block of layer l.
func (s *step) block(l int) *graph.Block { return &s.mb.Blocks[s.cfg.Layers-1-l] }

// launch puts a kernel by its name into a step.
func launch[T any](s *step, name string, cfg cuda.LaunchConfig, p T) error {
	k, err := s.on.kernel(name)
	if err != nil {
		return err
	}
	return put(&s.stepSink, k, cfg, p)
}

// gemm, colSum and transpose enqueue what the launcher has, with the step's scratch memory.
func (s *step) gemm(op gemmOp, p *gemmParams) error {
	return s.on.gemm(&s.stepSink, op, p, s.plan.scratchAt())
}

func (s *step) colSum(p *sumParams) error {
	return s.on.colSum(&s.stepSink, p, s.plan.scratchAt())
}

func (s *step) transpose(name string, a *aggParams) error {
	return s.on.transpose(&s.stepSink, name, a, s.plan.scratchAt())
}

// forward enqueues the layers and the loss, whose mean goes to outcome.
func (s *step) forward(x, labels, outcome cuda.DevicePtr) (last lastRun, err error) {
	L, p := s.cfg.Layers, &s.plan
	var in cuda.DevicePtr
	if s.set != nil && s.cfg.FeatureDropout > 0 {
		if err := s.dropInput(x, s.mb.RowCount(L)); err != nil {
			return last, err
		}
	}
	if in, err = s.input(x); err != nil {
		return last, err
	}
	for l := range L {
		if err := s.layerForward(l, in); err != nil {
			return last, err
		}
		in = p.ptr(p.layers[l].out)
	}
	if in, err = s.headForward(in); err != nil {
		return last, err
	}
	return s.lossOf(in, labels, outcome)
}

// drop is the dropout of a step with probability p, for the given layer's counters.
func (s *step) drop(share float64, layer uint32) dropout {
	p := float32(share)
	return dropout{
		Key: philox.Key(s.set.Seed, philox.StreamDropout), Epoch: uint32(s.set.Epoch),
		Batch: uint32(s.set.Batch), Layer: layer,
		P: p, Scale: 1 / (1 - p),
	}
}

// layerForward enqueues layer l of input in.
func (s *step) layerForward(l int, in cuda.DevicePtr) error {
	if err := s.arch.forward(s, l, in); err != nil || s.fused {
		return err
	}
	return s.between(l, in)
}

// layerBackward enqueues the gradients of layer l of input h, which the gradient by it replaces
// where l is not 0. dh is the gradient by the layer's output or, in a fused model, by its sums; so
// is h afterwards.
func (s *step) layerBackward(l int, h, dh cuda.DevicePtr) error {
	if s.fused {
		return s.arch.backward(s, l, h, dh)
	}
	dz, err := s.betweenBwd(l, h, dh)
	if err != nil {
		return err
	}
	if err := s.arch.backward(s, l, h, dz); err != nil || !s.hidden(l) || !s.cfg.residual() {
		return err
	}
	return s.skipBwd(l, h, dz)
}

// backward enqueues the gradients of all parameters.
func (s *step) backward(x cuda.DevicePtr) error {
	d := s.plan.ptr(s.plan.logitGrad)
	if s.cfg.headed() {
		in := s.plan.ptr(s.plan.layers[s.cfg.Layers-1].out)
		if err := s.headBackward(in, d); err != nil {
			return err
		}
		d = in
	}
	for l := s.cfg.Layers - 1; l >= 0; l-- {
		h := x // the layer's input
		switch {
		case l > 0:
			h = s.plan.ptr(s.plan.layers[l-1].out)
		case s.learnsInput():
			h = s.plan.ptr(s.plan.input)
		}
		if err := s.layerBackward(l, h, d); err != nil {
			return err
		}
		d = h
	}
	return s.tableGrad(d)
}

// adam enqueues the optimiser's step number adamStep+1 with a gradient, whose norm it measures.
func (s *step) adam(gradient cuda.DevicePtr) error {
	units := squareUnits(s.learns)
	c := clipParams{G: gradient, Parts: s.clip(0), Factor: s.clip(units),
		Sum: s.squares.Ptr() + cuda.DevicePtr(8*s.turn), N: s.learns, Limit: s.set.ClipNorm}
	if err := launch(s, "square_sum", s.blocks(units, 16, units), c); err != nil {
		return err
	}
	if err := launch(s, "clip_factor",
		cuda.LaunchConfig{Blocks: 1, Threads: aggThreads}, c); err != nil {
		return err
	}
	b1, b2, eps := s.set.Beta1, s.set.Beta2, s.set.Eps
	if b1 == 0 {
		b1 = 0.9
	}
	if b2 == 0 {
		b2 = 0.999
	}
	if eps == 0 {
		eps = 1e-8
	}
	t := float64(s.adamStep + 1)
	a := adamParams{
		P: s.ptr(0), G: gradient, M: s.moment(0, 0), V: s.moment(1, 0), N: s.learns,
		AdamStep: simd.AdamStep{
			B1: b1, C1: float32(1 - float64(b1)), B2: b2, C2: float32(1 - float64(b2)),
			StepSize: float32(float64(s.set.LR) / (1 - math.Pow(float64(b1), t))),
			RootC2:   float32(1 / math.Sqrt(1-math.Pow(float64(b2), t))),
			Eps:      eps,
		},
	}
	if s.set.ClipNorm > 0 {
		a.Factor = c.Factor
	}
	if s.set.Decoupled {
		a.Decay = s.set.LR * s.set.WeightDecay
	} else {
		a.L2 = s.set.WeightDecay
	}
	return launch(s, "adam", s.blocks(s.learns, 4096, s.learns/gpuItems), a)
}

// layerProduct is the product that ends layer l: bias, and ReLU and dropout in hidden layers. The
// caller adds the factors.
func (s *step) layerProduct(l int, bias int64) gemmParams {
	b := s.block(l)
	in, out := s.dims[l], s.dims[l+1]
	g := gemmParams{
		M: b.NumDst, N: out, K: in, LDA: in, LDB: out, LDC: out,
		C: s.plan.ptr(s.plan.layers[l].h), Bias: s.ptr(bias),
	}
	g.Flags, g.Drop = s.activation(l)
	return g
}

// activation returns what follows a layer's sums, as flags of a product: nothing where it has
// launches of its own.
func (s *step) activation(l int) (flags uint32, drop dropout) {
	if l == s.cfg.Layers-1 || !s.fused {
		return 0, dropout{}
	}
	flags = gemmReLU
	if s.set != nil && s.cfg.Dropout > 0 {
		flags |= gemmDropout
		drop = s.drop(s.cfg.Dropout, uint32(l))
	}
	return flags, drop
}

// gate has the gradient by a layer's input pass ReLU and dropout of the layer below, whose output
// it replaces. Where these have launches of their own, it passes as it is.
func (s *step) gate(a *aggParams) {
	switch a.Scale = 1; {
	case !s.fused:
		a.Open = 1
	case s.cfg.Dropout > 0:
		a.Scale = 1 / (1 - float32(s.cfg.Dropout))
	}
}

// aggParams describes the block of layer l.
func (s *step) aggParams(l int) aggParams {
	b := s.block(l)
	a := aggParams{
		Indptr: pointer(b.Indptr), Src: pointer(b.Src), NumDst: b.NumDst, NumSrc: b.NumSrc,
		Edges: b.NumEdges, Dim: s.dims[l], Scale: 1,
	}
	if s.arch.Degrees() {
		a.Degrees = pointer(s.mb.Degrees)
	}
	return a
}

// weightGrad enqueues the gradient by a matrix W[in, out] of some rows' products y = x·W.
func (s *step) weightGrad(rows, in, out int64, x, dy cuda.DevicePtr, weight int64) error {
	return s.gemm(opTN, &gemmParams{M: in, N: out, K: rows, LDA: in, LDB: out, LDC: out, A: x,
		B: dy, C: s.grad(weight)})
}

// inputGrad enqueues dx, the gradient by x of such products.
func (s *step) inputGrad(rows, in, out int64, dy cuda.DevicePtr, weight int64,
	dx cuda.DevicePtr) error {
	return s.gemm(opNT, &gemmParams{M: rows, N: in, K: out, LDA: out, LDB: out, LDC: in, A: dy,
		B: s.ptr(weight), C: dx})
}

// columnGrad enqueues the gradient by a parameter that is added to each row.
func (s *step) columnGrad(rows, cols int64, dy cuda.DevicePtr, param int64) error {
	return s.colSum(&sumParams{X: dy, Out: s.grad(param), Rows: rows, Cols: cols})
}

// gather enqueues the gradient by the input h of layer l, in its place, from that by the layer's
// aggregates: with the lists of the block's transpose.
func (s *step) gather(l int, h cuda.DevicePtr, a aggParams, transpose, kernel string) error {
	a.Out = h
	s.gate(&a)
	a.TEnd, a.TDst, a.Weights = s.plan.ptr(s.plan.tEnd), s.plan.ptr(s.plan.tDst),
		s.plan.ptr(s.plan.weights)
	b, lists := s.block(l), &a
	if a.SrcWeights != 0 { // the kernel reads them, and the lists have no part of a weight
		plain := a
		plain.SrcWeights, lists = 0, &plain
	} else if err := s.weigh(b, &a); err != nil {
		return err
	}
	if err := s.transpose(transpose, lists); err != nil {
		return err
	}
	return launch(s, kernel, s.rowBlocks(b.NumSrc, 64, a.Dim), a)
}

// weigh enqueues what a block with weights, or one with remaining self loops, needs before its
// aggregation or transpose.
func (s *step) weigh(b *graph.Block, a *aggParams) error {
	if b.Weights == nil && !s.cfg.remaining() {
		return nil
	}
	kernel := "agg_weights"
	a.SrcWeights, a.DstWeights = pointer(b.Weights), s.plan.ptr(s.plan.dstWeights)
	if s.cfg.remaining() {
		kernel, a.SelfWeights = "self_weights", s.plan.ptr(s.plan.selfWeights)
	}
	return launch(s, kernel, s.blocks(b.NumDst, 256, b.NumDst/32), *a)
}
