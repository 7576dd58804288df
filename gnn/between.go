package gnn

import (
	"fmt"

	"helios/cuda"
	"helios/graph"
)

// The operators between the sums z of a layer and the next layer's input compute
//
//	h = dropout(activation(norm(z + P x)))
//
// P x is the residual connection (He et al., CVPR 2016, and the skip connections of GAT): the
// layer's own input x for its destinations, times a matrix P where the widths differ, or always,
// with a bias (ResidualLinear). Types of nodes have a P and a norm each (typed.go). The last layer
// has neither norm nor activation, unless the head is an MLP (head.go). A model with ReLU and
// nothing else is "fused": products finish their own rows, and gradients close where h is 0,
// without memory of their own.

func init() { cuda.RegisterHost("add_rows", addRows) }

// addRows computes Out += X.
func addRows(b *cuda.Block, p *actParams) error {
	lo, hi := b.Range(p.Rows)
	out, x := view(p.Out, p.Rows*p.Cols)[lo*p.Cols:hi*p.Cols],
		view(p.X, p.Rows*p.Cols)[lo*p.Cols:hi*p.Cols]
	b.SIMD().BiasReLU(out, x, false)
	return nil
}

// residual reports whether layers have a residual connection.
func (c *ModelConfig) residual() bool { return c.Residual || c.ResidualLinear }

// bare reports whether nothing but a residual connection follows the sums of layer l.
func (c *ModelConfig) bare(l int) bool { return l == c.Layers-1 && c.Head != headMLP }

// byType reports whether types have residual matrices and normalisations of their own.
func (c *ModelConfig) byType() bool { return c.Schema != nil && !c.ShareTypes }

// kinds are the parts of a layer's nodes with parameters of their own between layers: types, or
// noKind, which has all nodes.
func (c *ModelConfig) kinds() (list []int) {
	if !c.byType() {
		return []int{noKind}
	}
	for t := range c.Schema.Types {
		list = append(list, t)
	}
	return list
}

const noKind = -1

// kindName begins the names of a kind's parameters in layer l.
func (c *ModelConfig) kindName(l, kind int) string {
	if kind == noKind {
		return fmt.Sprintf("layer%d.", l)
	}
	return fmt.Sprintf("layer%d.%s.", l, c.Schema.Types[kind].Name)
}

// kindWidth is the width of what nodes of a kind are to layer l.
func (c *ModelConfig) kindWidth(l, kind int) int64 {
	if kind == noKind {
		return c.width(l)
	}
	return c.typeWidth(l, kind)
}

// projects reports whether the residual connection of layer l has a matrix for a kind.
func (c *ModelConfig) projects(l, kind int) bool {
	return c.ResidualLinear || c.kindWidth(l, kind) != c.width(l+1)
}

// skip is the residual connection of a kind's nodes in a layer.
type skip struct {
	kind         int
	projects     bool
	weight, bias int64 // places; bias: of ResidualLinear
}

// declareBetween adds the parameters of what follows layer l.
func (n *network) declareBetween(l int, t *tensors) {
	c, out := &n.cfg, n.dims[l+1]
	for _, kind := range c.kinds() {
		name := c.kindName(l, kind)
		if c.residual() {
			x := skip{kind: kind, projects: c.projects(l, kind)}
			if in := c.kindWidth(l, kind); x.projects {
				x.weight = t.add(name+"residual.weight", in, out, glorot(in, out))
			}
			if c.ResidualLinear {
				x.bias = t.add(name+"residual.bias", 1, out, 0)
			}
			n.skips[l] = append(n.skips[l], x)
		}
		if n.norm != nil && !c.bare(l) {
			n.addNorm(n.norm, l, kind, name+"norm.", out, t)
		}
	}
}

// layoutBetween places what a layer keeps beside z, and its output.
func (n *network) layoutBetween(l int, rows int64, mb *graph.MiniBatch, train bool, p *plan) {
	places, cols := &p.layers[l], n.dims[l+1]
	places.sums, places.out = places.h, places.h
	if n.fused || n.cfg.bare(l) {
		return
	}
	for i := range n.norms {
		if x := &n.norms[i]; x.l == l {
			s := step{network: n, mb: mb}
			p.norms = append(p.norms, p.take(x.norm.floats(s.siteRows(x), cols)))
		}
	}
	if train {
		if n.norm != nil {
			places.sums = p.take(rows * cols)
		}
		places.out = p.take(rows * cols)
	}
}

// layoutSkips places the residual connections, one layer's after the other's, and the rows of types
// that are normalised.
func (n *network) layoutSkips(rows func(l int) int64, train bool, p *plan) {
	skips, sorted := int64(0), int64(0)
	for l := range n.cfg.Layers {
		for _, x := range n.skips[l] {
			if x.projects || n.cfg.byType() {
				skips = max(skips, rows(l)*max(n.dims[l+1], n.hiddenInput(l)))
			}
		}
		if n.norm != nil && n.cfg.byType() && !n.cfg.bare(l) {
			sorted = max(sorted, rows(l)*n.dims[l+1])
		}
	}
	p.skip = p.take(skips)
	p.sorted[0], p.sorted[1] = p.take(sorted), p.take(sorted)
	if train {
		p.sorted[2] = p.take(sorted)
	}
}

// hiddenInput is the width of what layer l has a gradient by.
func (n *network) hiddenInput(l int) int64 {
	if !n.hidden(l) {
		return 0
	}
	return n.dims[l]
}

// between enqueues what follows the sums of layer l, of input in.
func (s *step) between(l int, in cuda.DevicePtr) error {
	places, b, cols := &s.plan.layers[l], s.block(l), s.dims[l+1]
	if s.cfg.residual() {
		x := in // destinations are the first sources
		if s.cfg.byType() || s.skips[l][0].projects {
			x = s.plan.ptr(s.plan.skip)
			if err := s.skipRows(l, in, x); err != nil {
				return err
			}
		}
		if err := s.addRows(s.plan.ptr(places.h), x, b.NumDst, cols); err != nil {
			return err
		}
	}
	if s.cfg.bare(l) {
		return nil
	}
	if err := s.normalize(l); err != nil {
		return err
	}
	a := actParams{X: s.plan.ptr(places.sums), Out: s.plan.ptr(places.out), Rows: b.NumDst,
		Cols: cols}
	if s.set != nil && s.cfg.Dropout > 0 {
		a.Drop = s.drop(s.cfg.Dropout, uint32(l))
	}
	return s.activate(s.act, a, false)
}

func (s *step) addRows(out, x cuda.DevicePtr, rows, cols int64) error {
	return launch(s, "add_rows", s.quadBlocks(rows, cols),
		actParams{X: x, Out: out, Rows: rows, Cols: cols})
}

// kindRuns are the destinations of layer l that are of a kind.
func (s *step) kindRuns(l, kind int) []typeRun {
	if kind == noKind {
		return []typeRun{{n: s.block(l).NumDst}}
	}
	return s.runs(l, kind)
}

// skipRows enqueues the residual connection of layer l, of input in, to rows of their own.
func (s *step) skipRows(l int, in, to cuda.DevicePtr) error {
	stride, out := s.dims[l], s.dims[l+1]
	for i := range s.skips[l] {
		x := &s.skips[l][i]
		width := s.cfg.kindWidth(l, x.kind)
		for _, run := range s.kindRuns(l, x.kind) {
			from, to := row(in, run.row, stride), row(to, run.row, out)
			if !x.projects {
				if err := s.moveRows("table_get", tableParams{Table: from, Rows: to, N: run.n,
					Cols: width, TableStride: stride, RowStride: out}); err != nil {
					return err
				}
				continue
			}
			g := gemmParams{M: run.n, N: out, K: width, LDA: stride, LDB: out, LDC: out, A: from,
				B: s.ptr(x.weight), C: to}
			if s.cfg.ResidualLinear {
				g.Bias = s.ptr(x.bias)
			}
			if err := s.gemm(opNN, &g); err != nil {
				return err
			}
		}
	}
	return nil
}

// betweenBwd enqueues the gradients of what follows layer l's sums, from dh, the gradient by its
// output in the output's place. It returns where the gradient by the sums is.
func (s *step) betweenBwd(l int, in, dh cuda.DevicePtr) (dz cuda.DevicePtr, err error) {
	places, b, cols, dz := &s.plan.layers[l], s.block(l), s.dims[l+1], dh
	if !s.cfg.bare(l) {
		dz = s.plan.ptr(places.h)
		a := actParams{X: s.plan.ptr(places.sums), Grad: dh, Rows: b.NumDst, Cols: cols}
		if s.cfg.Dropout > 0 {
			a.Drop = s.drop(s.cfg.Dropout, uint32(l))
		}
		if err := s.activate(s.act, a, true); err != nil {
			return 0, err
		}
		if err := s.normalizeBwd(l, dh); err != nil {
			return 0, err
		}
	}
	stride := s.dims[l]
	for i := range s.skips[l] {
		x := &s.skips[l][i]
		runs := s.kindRuns(l, x.kind)
		if x.projects {
			if err := s.runGrad(runs, s.cfg.kindWidth(l, x.kind), stride, cols,
				func(run typeRun) cuda.DevicePtr { return row(in, run.row, stride) }, dz,
				s.grad(x.weight)); err != nil {
				return 0, err
			}
		}
		if s.cfg.ResidualLinear {
			if err := s.runBiasGrad(runs, cols, dz, s.grad(x.bias)); err != nil {
				return 0, err
			}
		}
	}
	return dz, nil
}

// skipBwd adds the residual connection's part to dIn, the gradient by the input of layer l.
func (s *step) skipBwd(l int, dIn, dz cuda.DevicePtr) error {
	rows, stride, out := s.block(l).NumDst, s.dims[l], s.dims[l+1]
	if !s.cfg.byType() && !s.skips[l][0].projects {
		return s.addRows(dIn, dz, rows, stride)
	}
	to := s.plan.ptr(s.plan.skip)
	for i := range s.skips[l] {
		x := &s.skips[l][i]
		width := s.cfg.kindWidth(l, x.kind)
		for _, run := range s.kindRuns(l, x.kind) {
			from, to := row(dz, run.row, out), row(to, run.row, stride)
			if !x.projects {
				if err := s.moveRows("table_get", tableParams{Table: from, Rows: to, N: run.n,
					Cols: width, TableStride: out, RowStride: stride}); err != nil {
					return err
				}
				continue
			}
			if err := s.gemm(opNT, &gemmParams{M: run.n, N: width, K: out, LDA: out, LDB: out,
				LDC: stride, A: from, B: s.ptr(x.weight), C: to}); err != nil {
				return err
			}
		}
	}
	return s.addRows(dIn, to, rows, stride)
}
