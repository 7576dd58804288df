package gnn

import (
	"strings"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/simd"
)

// Activation is a function between two layers. Each one has a file of its own, which registers it,
// and a module of kernels (cuda/kernels, act.h).
type Activation struct {
	Name    string
	Summary string // for help
	// value sets out to the function of x; out may be x. slope multiplies grad by its derivative at
	// x, in x's place.
	value func(l simd.Level, out, x []float32)
	slope func(l simd.Level, x, grad []float32)
}

// DefaultActivation is the function where none is named.
const DefaultActivation = "relu"

// activations are all functions in the order of lists, the default first.
var activations = []*Activation{reluActivation, eluActivation, geluActivation,
	leakyActivation}

func init() {
	for _, a := range activations {
		cuda.RegisterHost(a.kernel(), a.forward)
		cuda.RegisterHost(a.kernel()+"_bwd", a.backward)
	}
}

// Activations lists the names of all functions, the default first.
func Activations() (names []string) {
	for _, a := range activations {
		names = append(names, a.Name)
	}
	return names
}

// ActivationOf finds a function; an empty name is DefaultActivation.
func ActivationOf(name string) (*Activation, error) {
	if name == "" {
		name = DefaultActivation
	}
	for _, a := range activations {
		if a.Name == name {
			return a, nil
		}
	}
	return nil, errs.New(errs.Usage, "activation %q is unknown; choose one of %s", name,
		strings.Join(Activations(), ", "))
}

func (a *Activation) kernel() string { return "act_" + a.Name }

// kernels are those that a step launches by name.
func (a *Activation) kernels() []string { return []string{a.kernel(), a.kernel() + "_bwd"} }

// actParams is the parameter block of act_*, act_*_bwd and add_rows: matrices float32[Rows, Cols].
//
//	act_NAME       Out = dropout(value(X)); Out may be X
//	act_NAME_bwd   X = dropout(slope(X, Grad)), the gradient by X in its place
//	add_rows       Out += X
type actParams struct {
	X, Grad, Out cuda.DevicePtr
	Rows, Cols   int64
	Drop         dropout
}

const (
	_ = uint(unsafe.Sizeof(actParams{}) - 72)
	_ = uint(72 - unsafe.Sizeof(actParams{}))
)

func (a *Activation) forward(b *cuda.Block, p *actParams) error {
	x, out, level := view(p.X, p.Rows*p.Cols), view(p.Out, p.Rows*p.Cols), b.SIMD()
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		row := out[i*p.Cols : (i+1)*p.Cols]
		a.value(level, row, x[i*p.Cols:(i+1)*p.Cols])
		if p.Drop.P > 0 {
			p.Drop.apply(level, row, i, 0)
		}
	}
	return nil
}

func (a *Activation) backward(b *cuda.Block, p *actParams) error {
	x, grad, level := view(p.X, p.Rows*p.Cols), view(p.Grad, p.Rows*p.Cols), b.SIMD()
	lo, hi := b.Range(p.Rows)
	for i := lo; i < hi; i++ {
		row := x[i*p.Cols : (i+1)*p.Cols]
		a.slope(level, row, grad[i*p.Cols:(i+1)*p.Cols])
		if p.Drop.P > 0 {
			p.Drop.apply(level, row, i, 0)
		}
	}
	return nil
}

// activate enqueues Out = dropout(value(X)) or, backward, the gradient by X.
func (s *step) activate(a *Activation, p actParams, backward bool) error {
	name := a.kernel()
	if backward {
		name += "_bwd"
	}
	return launch(s, name, s.quadBlocks(p.Rows, p.Cols), p)
}

// gated reports whether the activation is ReLU, whose slope follows from its value.
func (n *network) gated() bool { return n.act.Name == DefaultActivation }
