package gnn

import (
	"fmt"

	"helios/cuda"
)

// The operators between the sums z of a layer and the next layer's input compute
//
//	h = dropout(activation(norm(z + P x)))
//
// P x is the residual connection (He et al., CVPR 2016, and the skip connections of GAT): the
// layer's own input x for its destinations, times a matrix P where the widths differ. The last
// layer has neither norm nor activation. A model with ReLU and nothing else is "fused": products
// finish their own rows, and gradients close where h is 0, without memory of their own.

func init() { cuda.RegisterHost("add_rows", addRows) }

// addRows computes Out += X.
func addRows(b *cuda.Block, p *actParams) error {
	lo, hi := b.Range(p.Rows)
	out, x := view(p.Out, p.Rows*p.Cols)[lo*p.Cols:hi*p.Cols],
		view(p.X, p.Rows*p.Cols)[lo*p.Cols:hi*p.Cols]
	b.SIMD().BiasReLU(out, x, false)
	return nil
}

// declareBetween adds the parameters of what follows layer l.
func (n *network) declareBetween(l int, t *tensors) {
	if n.cfg.Residual && n.dims[l] != n.dims[l+1] {
		in, out := n.dims[l], n.dims[l+1]
		n.skips[l] = t.add(fmt.Sprintf("layer%d.residual.weight", l), in, out, glorot(in, out))
	}
	if n.norm != nil && l < n.cfg.Layers-1 {
		n.declareNorm(l, t)
	}
}

// projects reports whether the residual connection of layer l has a matrix.
func (n *network) projects(l int) bool { return n.dims[l] != n.dims[l+1] }

// layoutBetween places what a layer keeps beside z, and its output.
func (n *network) layoutBetween(l int, rows int64, train bool, p *plan) {
	places, cols := &p.layers[l], n.dims[l+1]
	places.sums, places.out = places.h, places.h
	if n.fused || l == n.cfg.Layers-1 {
		return
	}
	if n.norm != nil {
		places.norm = p.take(n.norm.floats(rows, cols))
	}
	if train {
		if n.norm != nil {
			places.sums = p.take(rows * cols)
		}
		places.out = p.take(rows * cols)
	}
}

// layoutSkips places the residual connections, one layer's after the other's.
func (n *network) layoutSkips(rows func(l int) int64, p *plan) {
	largest := int64(0)
	for l := range n.cfg.Layers {
		if n.cfg.Residual && n.projects(l) {
			largest = max(largest, rows(l)*max(n.dims[l+1], n.hiddenInput(l)))
		}
	}
	p.skip = p.take(largest)
}

// hiddenInput is the width of what layer l has a gradient by.
func (n *network) hiddenInput(l int) int64 {
	if l == 0 {
		return 0
	}
	return n.dims[l]
}

// between enqueues what follows the sums of layer l, of input in.
func (s *step) between(l int, in cuda.DevicePtr) error {
	places, b, cols := &s.plan.layers[l], s.block(l), s.dims[l+1]
	if s.cfg.Residual {
		x := in // destinations are the first sources
		if s.projects(l) {
			x = s.plan.ptr(s.plan.skip)
			g := gemmParams{
				M: b.NumDst, N: cols, K: s.dims[l], LDA: s.dims[l], LDB: cols, LDC: cols, A: in,
				B: s.ptr(s.skips[l]), C: x,
			}
			if err := s.gemm(opNN, &g); err != nil {
				return err
			}
		}
		if err := s.addRows(s.plan.ptr(places.h), x, b.NumDst, cols); err != nil {
			return err
		}
	}
	if l == s.cfg.Layers-1 {
		return nil
	}
	if s.norm != nil {
		if err := s.norm.forward(s, l, s.normOf(l)); err != nil {
			return err
		}
	}
	a := actParams{X: s.plan.ptr(places.sums), Out: s.plan.ptr(places.out), Rows: b.NumDst,
		Cols: cols}
	if s.set != nil && s.cfg.Dropout > 0 {
		a.Drop = s.drop(s.cfg.Dropout, uint32(l))
	}
	return s.activate(a, false)
}

func (s *step) addRows(out, x cuda.DevicePtr, rows, cols int64) error {
	return launch(s, "add_rows", s.quadBlocks(rows, cols),
		actParams{X: x, Out: out, Rows: rows, Cols: cols})
}

// betweenBwd enqueues the gradients of what follows layer l's sums, from dh, the gradient by its
// output in the output's place. It returns where the gradient by the sums is.
func (s *step) betweenBwd(l int, in, dh cuda.DevicePtr) (dz cuda.DevicePtr, err error) {
	places, b, cols, dz := &s.plan.layers[l], s.block(l), s.dims[l+1], dh
	if l < s.cfg.Layers-1 {
		dz = s.plan.ptr(places.h)
		a := actParams{X: s.plan.ptr(places.sums), Grad: dh, Rows: b.NumDst, Cols: cols}
		if s.cfg.Dropout > 0 {
			a.Drop = s.drop(s.cfg.Dropout, uint32(l))
		}
		if err := s.activate(a, true); err != nil {
			return 0, err
		}
		if s.norm != nil {
			p := s.normOf(l)
			p.Grad, p.Out = s.plan.ptr(places.sums), dh
			if err := s.norm.backward(s, l, p); err != nil {
				return 0, err
			}
		}
	}
	if !s.cfg.Residual || !s.projects(l) {
		return dz, nil
	}
	return dz, s.weightGrad(b.NumDst, s.dims[l], s.dims[l+1], in, dz, s.skips[l])
}

// skipBwd adds the residual connection's part to dIn, the gradient by the input of layer l.
func (s *step) skipBwd(l int, dIn, dz cuda.DevicePtr) error {
	rows := s.block(l).NumDst
	if s.projects(l) {
		skip := s.plan.ptr(s.plan.skip)
		if err := s.inputGrad(rows, s.dims[l], s.dims[l+1], dz, s.skips[l], skip); err != nil {
			return err
		}
		dz = skip
	}
	return s.addRows(dIn, dz, rows, s.dims[l])
}

// finishNorms enqueues what normalisations keep for other steps, one of the methods of Norm that do
// so for a layer.
func (s *step) finishNorms(layer func(Norm, *step, int) error) error {
	for l := range s.cfg.Layers - 1 {
		if s.norm == nil {
			return nil
		}
		if err := layer(s.norm, s, l); err != nil {
			return err
		}
	}
	return nil
}
