package gnn

import (
	"fmt"
	"strings"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
)

// Norm is a normalisation of a hidden layer's sums, before its activation. Each one has a file of
// its own, which registers it, and a module of kernels. A Norm multiplies by a learned gamma and
// adds a learned beta, one of each a column.
type Norm interface {
	// Name is the value of --norm, Summary a line of help.
	Name() string
	Summary() string

	// kernels are those that a step launches by name.
	kernels() []string
	// state declares what a layer keeps from step to step beside gamma and beta and no gradient
	// changes; forward finds it in s.norms[l] behind them.
	state(n *network, l int, t *tensors)
	// work lists the kernels over so many rows and columns, for models of time.
	work(rows, cols int64, backward bool) []Work
	// floats returns how much a layer with so many rows and columns keeps from its forward to its
	// backward pass.
	floats(rows, cols int64) int64
	// forward enqueues Out from X; both are the same place outside training.
	forward(s *step, l int, p normParams) error
	// backward enqueues the gradient by X, in its place, from Grad, and those of gamma and beta.
	// Out is free for its use.
	backward(s *step, l int, p normParams) error
	// finish enqueues what changes the state. It comes last in a step, which may be done again when
	// it failed.
	finish(s *step, l int) error
	// leave and take are finish in two parts, for a step of several shards: leave enqueues a
	// shard's part of the state, into the places of the state's gradients, and take the change of
	// the state by the shards' weighted mean, which is there in s.sum.
	leave(s *step, l int) error
	take(s *step, l int) error
}

// NoNorm is the name of no normalisation.
const NoNorm = "none"

// norms are all normalisations in the order of lists.
var norms = []Norm{batchNorm{}, layerNorm{}}

// Norms lists the names of all normalisations, NoNorm first.
func Norms() []string {
	names := []string{NoNorm}
	for _, n := range norms {
		names = append(names, n.Name())
	}
	return names
}

// NormOf finds a normalisation; it is nil for NoNorm and for an empty name.
func NormOf(name string) (Norm, error) {
	if name == "" || name == NoNorm {
		return nil, nil
	}
	for _, n := range norms {
		if n.Name() == name {
			return n, nil
		}
	}
	return nil, errs.New(errs.Usage, "norm %q is unknown; choose one of %s", name,
		strings.Join(Norms(), ", "))
}

// normEps keeps a column or row of equal values from a division by 0.
const normEps = 1e-5

// normParams is the parameter block of the kernels of normalisations, which say what each of them
// reads and writes.
type normParams struct {
	X, Out, Grad         cuda.DevicePtr // float32[Rows, Cols]
	Gamma, Beta          cuda.DevicePtr // float32[Cols]
	Sum, Squares, Spread cuda.DevicePtr // float32 for each of what is normalised: rows or columns
	DGamma, DBeta        cuda.DevicePtr // float32[Cols], gradients
	Rows, Cols           int64
	Share, Eps, Momentum float32 // the mean is Share · Sum
	_                    uint32
}

const (
	_ = uint(unsafe.Sizeof(normParams{}) - 112)
	_ = uint(112 - unsafe.Sizeof(normParams{}))
)

// Places of a normalisation's parameters in network.norms.
const (
	normGamma = iota
	normBeta
	normState // the first of its state
)

// declareNorm adds gamma and beta of layer l, 1 and 0 at first.
func (n *network) declareNorm(l int, t *tensors) {
	width := n.dims[l+1]
	n.norms[l] = []int64{
		normGamma: t.addFilled(fmt.Sprintf("layer%d.norm.gamma", l), 1, width, 1),
		normBeta:  t.add(fmt.Sprintf("layer%d.norm.beta", l), 1, width, 0),
	}
}

// normOf describes the normalisation of layer l of a step.
func (s *step) normOf(l int) normParams {
	places, w := &s.plan.layers[l], s.norms[l]
	return normParams{
		X: s.plan.ptr(places.h), Out: s.plan.ptr(places.sums), Gamma: s.ptr(w[normGamma]),
		Beta:   s.ptr(w[normBeta]),
		DGamma: s.grad(w[normGamma]), DBeta: s.grad(w[normBeta]), Rows: s.block(l).NumDst,
		Cols: s.dims[l+1], Eps: normEps,
	}
}

// scaleGradients enqueues the gradients of gamma and beta: the sums over rows of Out, which is Grad
// times the normalised X, and of Grad.
func (s *step) scaleGradients(p *normParams) error {
	gamma := sumParams{X: p.Out, Out: p.DGamma, Rows: p.Rows, Cols: p.Cols}
	if err := s.colSum(&gamma); err != nil {
		return err
	}
	return s.colSum(&sumParams{X: p.Grad, Out: p.DBeta, Rows: p.Rows, Cols: p.Cols})
}
