package gnn

import (
	"cmp"
	"slices"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
)

// A featureless R-GCN (section 2.2 of its paper; PyG's RGCNConv without x) has nodes that are known
// by their number alone. So the matrices of layer 0 have a row for each node, and a product with
// one takes a row of it:
//
//	z_i = W[i] + b + Σ_r mean_r(W_r[j])      W_r = Σ_b a_rb V_b
//
// A step gathers the rows of its frontier from all V_b, combines these rows to those of all W_r,
// and takes the means of each relation over its own. Without bases the gathered rows are
// those of W_r.
// Nothing is read; rows that the nodes' types have are left alone.
//
// Memory: 2 · (bases + relations) rows of a layer's output for each node of the frontier. Launches:
// some ten for each relation.

// featurelessPlan is the part of a plan that only it has: the rows of the V_b and of the W_r, and
// their gradients; and of one relation after the other, its means or their gradients, and its
// lists.
type featurelessPlan struct {
	own, combined, dOwn, dCombined int64
	agg, zeros, indptr, src        int64
	weights, tEnd, tDst            int64
}

// slots is the number of matrices that a featureless layer has parameters of.
func (c *ModelConfig) slots() int64 {
	return cmp.Or(int64(c.Bases), int64(len(c.Schema.Relations)))
}

// resolveFeatureless has no type take rows: a schema of the network's own, without features, and
// the width that the rest of the model takes layer 0's input for.
func (n *network) resolveFeatureless() error {
	c := &n.cfg
	switch {
	case c.Model != (rgcn{}).Name():
		return errs.New(errs.Usage, "{featureless} is an option of model rgcn")
	case c.Schema == nil:
		return c.CheckSchema(false)
	case c.Embed != "":
		return errs.New(errs.Usage, "{featureless} has no tables beside its matrices; leave {embed} out")
	case c.FeatureDropout != 0 || c.residual():
		return errs.New(errs.Usage,
			"{featureless} has no features to drop or to add; leave {feature-dropout} and {residual} out")
	}
	own := *c.Schema
	own.Types = slices.Clone(own.Types)
	for t := range own.Types {
		own.Types[t].Dim = 1
	}
	c.Schema, c.InDim = &own, 1
	return c.tablesFit(own.First(len(own.Types)) * (c.slots() + 1) * c.width(1))
}

// featureless reports whether layer l has rows of matrices for its input.
func (n *network) featureless(l int) bool { return l == 0 && n.cfg.Featureless }

// The places of a featureless layer's parameters are those of rgcn: the matrix of own rows, the
// bias, and the V_b, one in a row, with coefficients, or the W_r.
func (n *network) declareFeatureless(t *tensors) {
	nodes, out, slots := n.cfg.Schema.First(len(n.cfg.Schema.Types)), n.dims[1], n.cfg.slots()
	name := "layer0.neigh.weight"
	if n.cfg.Bases > 0 {
		name = "layer0.bases"
	}
	n.layers[0] = []int64{
		t.add("layer0.self.weight", nodes, out, glorot(nodes, out)),
		t.add("layer0.bias", 1, out, 0),
		t.add(name, slots, nodes*out, glorot(nodes, out)),
	}
	if n.cfg.Bases > 0 {
		relations := int64(len(n.cfg.Schema.Relations))
		n.layers[0] = append(n.layers[0], t.add("layer0.coefficients", relations, slots,
			glorot(relations, slots)))
	}
}

func (n *network) layoutFeatureless(b *graph.Block, train bool, p *plan) {
	q, out := &p.featureless, n.dims[1]
	all, each := b.NumSrc*out, int64(len(n.cfg.Schema.Relations))
	q.own = p.take(n.cfg.slots() * all)
	if q.combined = q.own; n.cfg.Bases > 0 {
		q.combined = p.take(each * all)
	}
	lists, edges := int64(0), int64(0)
	for _, l := range b.Lists {
		lists, edges = max(lists, l.N), max(edges, l.Edges)
	}
	if q.agg = p.take(lists * out); !train {
		return
	}
	q.dCombined = p.take(each * all)
	if q.dOwn = q.dCombined; n.cfg.Bases > 0 {
		q.dOwn = p.take(n.cfg.slots() * all)
	}
	q.indptr, q.src, q.zeros = p.take(2*(lists+1)), p.take(edges), p.take(min(lists, b.NumSrc)*out)
	q.weights, q.tEnd, q.tDst = p.take(lists), p.take(b.NumSrc), p.take(edges)
}

// matrixRows are the rows of a frontier in a matrix that has one for each node.
func (s *step) matrixRows(matrix, rows cuda.DevicePtr, n int64) tableParams {
	out := s.dims[1]
	return tableParams{Table: matrix, Rows: rows, Numbers: s.number(0), N: n, Cols: out,
		TableStride: out, RowStride: out}
}

// featurelessForward enqueues layer 0.
func (s *step) featurelessForward() error {
	q, b, out, places := &s.plan.featureless, s.block(0), s.dims[1], s.layers[0]
	own, combined := s.plan.ptr(q.own), s.plan.ptr(q.combined)
	all, nodes := b.NumSrc*out, s.cfg.Schema.First(len(s.cfg.Schema.Types))
	for k := range s.cfg.slots() {
		matrix := row(s.ptr(places[rgcnWeights]), k, nodes*out)
		if err := s.moveRows("table_get", s.matrixRows(matrix, row(own, k, all),
			b.NumSrc)); err != nil {
			return err
		}
	}
	relations, bases := s.cfg.Schema.Relations, int64(s.cfg.Bases)
	if bases > 0 {
		if err := s.gemm(opNN, &gemmParams{M: int64(len(relations)), N: all, K: bases, LDA: bases,
			LDB: all, LDC: all, A: s.ptr(places[rgcnWeights+1]), B: own, C: combined}); err != nil {
			return err
		}
	}
	h := s.plan.ptr(s.plan.layers[0].h)
	if err := s.moveRows("table_get", s.matrixRows(s.ptr(places[rgcnRoot]), h, b.NumDst)); err != nil {
		return err
	}
	if err := launch(s, "bias_act", s.blocks(b.NumDst, 64, b.NumDst*((out+3)/4)*4/gpuItems),
		biasActParams{C: h, Bias: s.ptr(places[rgcnBias]), Rows: b.NumDst, Cols: out,
			LDC: out}); err != nil {
		return err
	}
	for r, x := range relations {
		l := b.Lists[r]
		if l.Edges == 0 {
			continue
		}
		means := s.plan.ptr(q.agg)
		a := aggParams{Indptr: pointer(b.Indptr) + cuda.DevicePtr(8*l.First), Src: pointer(b.Src),
			X: row(combined, int64(r), all), Out: means, NumDst: l.N, NumSrc: b.NumSrc,
			Edges: b.NumEdges, Dim: out, Scale: 1}
		if err := launch(s, "sage_mean", s.rowBlocks(l.N, 16, out), a); err != nil {
			return err
		}
		for _, run := range s.runs(0, x.Dst) {
			if err := s.addRows(row(h, run.row, out), row(means, run.list, out), run.n,
				out); err != nil {
				return err
			}
		}
	}
	return nil
}

// featurelessBackward enqueues the gradients of layer 0's parameters, from dz, that by its sums.
func (s *step) featurelessBackward(dz cuda.DevicePtr) error {
	q, b, out, places := &s.plan.featureless, s.block(0), s.dims[1], s.layers[0]
	all, nodes := b.NumSrc*out, s.cfg.Schema.First(len(s.cfg.Schema.Types))
	if err := s.columnGrad(b.NumDst, out, dz, places[rgcnBias]); err != nil {
		return err
	}
	if err := s.matrixGrad(s.grad(places[rgcnRoot]), dz, b.NumDst); err != nil {
		return err
	}
	d, relations := s.plan.ptr(q.dCombined), int64(len(s.cfg.Schema.Relations))
	for r := range s.cfg.Schema.Relations {
		if err := s.featurelessRelation(r, dz, row(d, int64(r), all)); err != nil {
			return err
		}
	}
	if bases := int64(s.cfg.Bases); bases > 0 {
		coefficients := places[rgcnWeights+1]
		if err := s.gemm(opNT, &gemmParams{M: relations, N: bases, K: all, LDA: all, LDB: all,
			LDC: bases, A: d, B: s.plan.ptr(q.own), C: s.grad(coefficients)}); err != nil {
			return err
		}
		to := s.plan.ptr(q.dOwn)
		if err := s.gemm(opTN, &gemmParams{M: bases, N: all, K: relations, LDA: bases, LDB: all,
			LDC: all, A: s.ptr(coefficients), B: d, C: to}); err != nil {
			return err
		}
		d = to
	}
	for k := range s.cfg.slots() {
		if err := s.matrixGrad(row(s.grad(places[rgcnWeights]), k, nodes*out), row(d, k, all),
			b.NumSrc); err != nil {
			return err
		}
	}
	return nil
}

// matrixGrad enqueues the gradient by a matrix with a row for each node.
func (s *step) matrixGrad(to, rows cuda.DevicePtr, n int64) error {
	if err := s.zero(to, s.cfg.Schema.First(len(s.cfg.Schema.Types)), s.dims[1]); err != nil {
		return err
	}
	return s.moveRows("table_put", s.matrixRows(to, rows, n))
}

// featurelessRelation enqueues the gradient by the rows of relation r's matrix.
func (s *step) featurelessRelation(r int, dz, to cuda.DevicePtr) error {
	q, b, out := &s.plan.featureless, s.block(0), s.dims[1]
	l := b.Lists[r]
	if l.Edges == 0 {
		return s.zero(to, b.NumSrc, out)
	}
	lists := relationParams{Indptr: pointer(b.Indptr) + cuda.DevicePtr(8*l.First),
		Src: pointer(b.Src), OutIndptr: s.plan.ptr(q.indptr), OutSrc: s.plan.ptr(q.src),
		NumDst: l.N, FirstEdge: l.FirstEdge, Edges: l.Edges, Runs: 1} // places are rows
	items := max(l.N+1, l.Edges)
	if err := launch(s, "relation_lists", s.blocks(items, 1024, items/32), lists); err != nil {
		return err
	}
	for _, run := range s.runs(0, s.cfg.Schema.Relations[r].Dst) {
		if err := s.copyRows(row(s.plan.ptr(q.agg), run.list, out), row(dz, run.row, out), run.n,
			out); err != nil {
			return err
		}
	}
	// The kernel takes a part of its own for as many rows as there are lists.
	if err := s.zero(s.plan.ptr(q.zeros), min(l.N, b.NumSrc), out); err != nil {
		return err
	}
	a := aggParams{Indptr: lists.OutIndptr, Src: lists.OutSrc, Grad: s.plan.ptr(q.agg),
		Self: s.plan.ptr(q.zeros), Out: to, Weights: s.plan.ptr(q.weights),
		TEnd: s.plan.ptr(q.tEnd), TDst: s.plan.ptr(q.tDst), NumDst: l.N,
		NumSrc: b.NumSrc, Edges: l.Edges, Dim: out, Scale: 1, Open: 1}
	if err := s.transpose("sage_transpose", &a); err != nil {
		return err
	}
	return launch(s, "sage_mean_bwd", s.rowBlocks(b.NumSrc, 64, out), a)
}
