package gnn

import (
	"helios/cuda"
)

// A head turns the last layer's output of the seeds, as wide as the hidden ones, into the model's
// outputs. Without one the last layer's own sums are these. As in MLPerf's R-GAT, linear is
//
//	out = h W + b
//
// of the layer's plain sums h. As in OGB-LSC's, mlp has norm, activation and dropout follow the
// last layer as the others, and then is
//
//	out = dropout(ReLU(batchnorm(h W₀ + b₀))) W₁ + b₁

// Values of ModelSettings.Head.
const (
	headNone   = "none"
	headLinear = "linear"
	headMLP    = "mlp"
)

// Heads lists them, the default first.
func Heads() []string { return []string{headNone, headLinear, headMLP} }

// headed reports whether the model has a head.
func (c *ModelConfig) headed() bool { return c.Head != "" && c.Head != headNone }

// outputs reports whether the sums of layer l are the model's outputs.
func (c *ModelConfig) outputs(l int) bool { return l == c.Layers-1 && !c.headed() }

// headLayer is the layer number in the counters of the mask of a head; layers stay below it.
const headLayer = inputLayer - 1

// denseLayer has the places of a matrix and a bias.
type denseLayer struct{ weight, bias int64 }

// declareHead adds the parameters of the head.
func (n *network) declareHead(t *tensors) {
	in, out := n.dims[n.cfg.Layers], int64(n.cfg.Classes)
	dense := func(name string, out int64) {
		n.head = append(n.head, denseLayer{t.add(name+"weight", in, out, glorot(in, out)),
			t.add(name+"bias", 1, out, 0)})
	}
	switch n.cfg.Head {
	case headLinear:
		dense("head.", out)
	case headMLP:
		dense("head.0.", in)
		n.addNorm(batchNorm{}, headSite, noKind, "head.norm.", in, t)
		dense("head.1.", out)
	}
}

// headPlan is the part of a plan that only heads have: of an MLP its sums z, what the normalisation
// makes of them, and the hidden layer's output; the model's outputs.
type headPlan struct{ h, sums, out, outputs int64 }

func (n *network) layoutHead(seeds int64, p *plan) {
	if !n.cfg.headed() {
		return
	}
	width := n.dims[n.cfg.Layers]
	if n.cfg.Head == headMLP {
		p.head.h, p.head.sums, p.head.out = p.take(seeds*width), p.take(seeds*width),
			p.take(seeds*width)
		p.norms = append(p.norms, p.take(batchNorm{}.floats(seeds, width)))
	}
	p.head.outputs = p.take(seeds * int64(n.cfg.Classes))
}

// headForward enqueues the head, of the last layer's output, and returns where the model's outputs
// are.
func (s *step) headForward(in cuda.DevicePtr) (cuda.DevicePtr, error) {
	if !s.cfg.headed() {
		return in, nil
	}
	q, width := &s.plan.head, s.dims[s.cfg.Layers]
	if s.cfg.Head == headMLP {
		if err := s.dense(s.head[0], in, s.plan.ptr(q.h), width); err != nil {
			return 0, err
		}
		p := s.headNorm()
		if err := (batchNorm{}).forward(s, s.headSite(), p); err != nil {
			return 0, err
		}
		if err := s.activate(reluActivation, s.headAct(p), false); err != nil {
			return 0, err
		}
		in = s.plan.ptr(q.out)
	}
	outputs := s.plan.ptr(q.outputs)
	return outputs, s.dense(s.head[len(s.head)-1], in, outputs, int64(s.cfg.Classes))
}

// headBackward enqueues the gradients of the head's parameters and that by its input, in the
// input's place, from that by the outputs.
func (s *step) headBackward(in, d cuda.DevicePtr) error {
	q := &s.plan.head
	last := s.head[len(s.head)-1]
	if s.cfg.Head != headMLP {
		return s.denseBwd(last, in, d, int64(s.cfg.Classes))
	}
	if err := s.denseBwd(last, s.plan.ptr(q.out), d, int64(s.cfg.Classes)); err != nil {
		return err
	}
	p := s.headNorm()
	act := s.headAct(p)
	act.Grad = act.Out
	if err := s.activate(reluActivation, act, true); err != nil {
		return err
	}
	p.Grad, p.Out = s.plan.ptr(q.sums), s.plan.ptr(q.out)
	if err := (batchNorm{}).backward(s, s.headSite(), p); err != nil {
		return err
	}
	return s.denseBwd(s.head[0], in, p.X, s.dims[s.cfg.Layers])
}

// headSite is the place of the head's normalisation.
func (s *step) headSite() *normSite { return &s.norms[len(s.norms)-1] }

func (s *step) headNorm() normParams {
	p := s.normOf(s.headSite())
	p.X, p.Out = s.plan.ptr(s.plan.head.h), s.plan.ptr(s.plan.head.sums)
	return p
}

func (s *step) headAct(p normParams) actParams {
	a := actParams{X: s.plan.ptr(s.plan.head.sums), Out: s.plan.ptr(s.plan.head.out), Rows: p.Rows,
		Cols: p.Cols}
	if s.set != nil && s.cfg.Dropout > 0 {
		a.Drop = s.drop(s.cfg.Dropout, headLayer)
	}
	return a
}

// dense enqueues the seeds' rows times a matrix, with a bias.
func (s *step) dense(x denseLayer, in, to cuda.DevicePtr, out int64) error {
	width := s.dims[s.cfg.Layers]
	return s.gemm(opNN, &gemmParams{M: int64(s.mb.NumSeeds), N: out, K: width, LDA: width, LDB: out,
		LDC: out, A: in, B: s.ptr(x.weight), Bias: s.ptr(x.bias), C: to})
}

// denseBwd enqueues the gradients of such a product, that by its input in the input's place.
func (s *step) denseBwd(x denseLayer, in, d cuda.DevicePtr, out int64) error {
	seeds, width := int64(s.mb.NumSeeds), s.dims[s.cfg.Layers]
	if err := s.weightGrad(seeds, width, out, in, d, x.weight); err != nil {
		return err
	}
	if err := s.columnGrad(seeds, out, d, x.bias); err != nil {
		return err
	}
	return s.inputGrad(seeds, width, out, d, x.weight, in)
}
