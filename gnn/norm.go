package gnn

import (
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
	// state declares what a site keeps from step to step beside gamma and beta and no gradient
	// changes; forward finds it in x.at behind them.
	state(x *normSite, t *tensors)
	// work lists the kernels over so many rows and columns, for models of time.
	work(rows, cols int64, backward bool) []Work
	// floats returns how much a site with so many rows and columns keeps from its forward to its
	// backward pass.
	floats(rows, cols int64) int64
	// forward enqueues Out from X; both are the same place outside training.
	forward(s *step, x *normSite, p normParams) error
	// backward enqueues the gradient by X, in its place, from Grad, and those of gamma and beta.
	// Out is free for its use.
	backward(s *step, x *normSite, p normParams) error
	// finish enqueues what changes the state. It comes last in a step, which may be done again when
	// it failed.
	finish(s *step, x *normSite) error
	// leave and take are finish in two parts, for a step of several shards: leave enqueues a
	// shard's part of the state, into the places of the state's gradients, and take the change of
	// the state by the shards' weighted mean, which is there in s.sum.
	leave(s *step, x *normSite) error
	take(s *step, x *normSite) error
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

// normSite is a normalisation in its place: of a layer's nodes of a kind, or of the head.
type normSite struct {
	norm    Norm
	l, kind int // l is headSite in the head
	name    string
	cols    int64
	number  int     // its place in network.norms
	at      []int64 // places of its parameters
}

// headSite is the place of the head, behind all layers.
const headSite = 1 << 20

// Places of a normalisation's parameters in normSite.at.
const (
	normGamma = iota
	normBeta
	normState // the first of its state
)

// addNorm adds gamma and beta of a place, 1 and 0 at first.
func (n *network) addNorm(norm Norm, l, kind int, name string, cols int64, t *tensors) {
	n.norms = append(n.norms, normSite{norm: norm, l: l, kind: kind, name: name, cols: cols,
		number: len(n.norms), at: []int64{
			normGamma: t.addFilled(name+"gamma", 1, cols, 1),
			normBeta:  t.add(name+"beta", 1, cols, 0),
		}})
}

// siteRows is the number of nodes that are normalised together.
func (s *step) siteRows(x *normSite) (rows int64) {
	if x.l == headSite {
		return int64(s.mb.NumSeeds)
	}
	for _, run := range s.kindRuns(x.l, x.kind) {
		rows += run.n
	}
	return rows
}

// normOf describes the normalisation of a place in a step, but for its rows.
func (s *step) normOf(x *normSite) normParams {
	return normParams{
		Sum:   s.plan.ptr(s.plan.norms[x.number]),
		Gamma: s.ptr(x.at[normGamma]), Beta: s.ptr(x.at[normBeta]),
		DGamma: s.grad(x.at[normGamma]), DBeta: s.grad(x.at[normBeta]), Rows: s.siteRows(x),
		Cols: x.cols, Eps: normEps,
	}
}

// normalize enqueues the normalisation of layer l's sums.
func (s *step) normalize(l int) error {
	h, sums := s.plan.ptr(s.plan.layers[l].h), s.plan.ptr(s.plan.layers[l].sums)
	return s.eachSite(l, func(x *normSite, from, to func(place int, at cuda.DevicePtr) error,
		p normParams) error {
		if p.Rows == 0 {
			return nil
		}
		if to == nil {
			p.X, p.Out = h, sums
			return x.norm.forward(s, x, p)
		}
		p.X, p.Out = s.plan.ptr(s.plan.sorted[0]), s.plan.ptr(s.plan.sorted[1])
		if err := from(0, h); err != nil {
			return err
		}
		if err := x.norm.forward(s, x, p); err != nil {
			return err
		}
		return to(1, sums)
	})
}

// normalizeBwd enqueues the gradient by layer l's sums, in their place, from that by what their
// normalisation made of them, in its place. free is as large as they are.
func (s *step) normalizeBwd(l int, free cuda.DevicePtr) error {
	h, sums := s.plan.ptr(s.plan.layers[l].h), s.plan.ptr(s.plan.layers[l].sums)
	return s.eachSite(l, func(x *normSite, from, to func(place int, at cuda.DevicePtr) error,
		p normParams) error {
		if to == nil {
			p.X, p.Grad, p.Out = h, sums, free
			return x.norm.backward(s, x, p)
		}
		if p.Rows == 0 { // nobody used it: zeros
			p.Out, p.Grad = h, h
			return s.scaleGradients(&p)
		}
		p.X, p.Grad, p.Out = s.plan.ptr(s.plan.sorted[0]), s.plan.ptr(s.plan.sorted[1]),
			s.plan.ptr(s.plan.sorted[2])
		if err := from(0, h); err != nil {
			return err
		}
		if err := from(1, sums); err != nil {
			return err
		}
		if err := x.norm.backward(s, x, p); err != nil {
			return err
		}
		return to(0, h)
	})
}

// eachSite calls do for each normalisation of layer l. Where a type's nodes are normalised by
// themselves, from brings their rows of a matrix together in sorted[place], and to brings them
// back; else both are nil.
func (s *step) eachSite(l int, do func(x *normSite, from, to func(place int,
	at cuda.DevicePtr) error, p normParams) error) error {
	for i := range s.norms {
		x := &s.norms[i]
		if x.l != l {
			continue
		}
		move := func(kernel string) func(place int, at cuda.DevicePtr) error {
			if x.kind == noKind {
				return nil
			}
			return func(place int, at cuda.DevicePtr) error {
				for _, run := range s.runs(l, x.kind) {
					if err := s.moveRows(kernel, tableParams{Table: row(at, run.row, x.cols),
						Rows: row(s.plan.ptr(s.plan.sorted[place]), run.list, x.cols), N: run.n,
						Cols: x.cols, TableStride: x.cols, RowStride: x.cols}); err != nil {
						return err
					}
				}
				return nil
			}
		}
		if err := do(x, move("table_get"), move("table_put"), s.normOf(x)); err != nil {
			return err
		}
	}
	return nil
}

// finishNorms enqueues what normalisations keep for other steps, one of the methods of Norm that do
// so for a place.
func (s *step) finishNorms(site func(Norm, *step, *normSite) error) error {
	for i := range s.norms {
		if err := site(s.norms[i].norm, s, &s.norms[i]); err != nil {
			return err
		}
	}
	return nil
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
