package gnn

import (
	"helios/cuda"
	"helios/graph"
)

// This file has the parts that models of typed graphs share. A layer's block has the lists of all
// relations behind each other, so one aggregation makes all means and one transpose serves the
// gradient by the input. Products are by relation, over the rows of the relation's destination
// type: runs of the frontier.

// typeRun is rows of a layer's frontier that belong to one type.
type typeRun struct {
	row, n int64
	list   int64 // nodes of the type before them
}

// runs are the destinations of layer l that are of type t.
func (s *step) runs(l, t int) (list []typeRun) {
	before := int64(0)
	for h := range s.cfg.Layers - l { // the seeds, and the hops before the layer's own
		lo, hi := s.mb.TypeRange(h, t)
		if last := len(list) - 1; last >= 0 && list[last].row+list[last].n == lo {
			list[last].n += hi - lo // no other type between them
		} else if hi > lo {
			list = append(list, typeRun{row: lo, n: hi - lo, list: before})
		}
		before += hi - lo
	}
	return list
}

// typeWidth is the width of what nodes of type t are to layer l.
func (c *ModelConfig) typeWidth(l, t int) int64 {
	if l == 0 {
		return int64(c.Schema.Types[t].Dim)
	}
	return c.width(l)
}

// into are the relations into type t.
func (c *ModelConfig) into(t int) (list []int) {
	for r, relation := range c.Schema.Relations {
		if relation.Dst == t {
			list = append(list, r)
		}
	}
	return list
}

// row is the address of row i of a matrix of a width.
func row(p cuda.DevicePtr, i, width int64) cuda.DevicePtr {
	return p + cuda.DevicePtr(4*i*width)
}

// means is the place of a run's neighbour means by relation r in layer l.
func (s *step) means(l, r int, run typeRun) cuda.DevicePtr {
	return row(s.plan.ptr(s.plan.layers[l].agg), s.block(l).Lists[r].First+run.list, s.dims[l])
}

// relationKernels are those of the means and their gradient.
func relationKernels(gpu bool) []string {
	names := []string{"sage_mean", "sage_mean_bwd", "add_rows"}
	if !gpu {
		names = append(names, "sage_transpose")
	}
	return names
}

// layoutRelations places the means of all layers, and what their gradients take.
func layoutRelations(n *network, blocks []graph.Block, train bool, p *plan) {
	L := n.cfg.Layers
	var means, part, back, self, weights int64
	for l := range L {
		b := &blocks[L-1-l]
		lists, in, out := b.NumLists(), n.dims[l], n.dims[l+1]
		if train {
			p.layers[l].agg = p.take(lists * in)
			part = max(part, in*out, b.NumDst*out)
			weights = max(weights, lists)
		} else {
			means, part = max(means, lists*in), max(part, b.NumDst*out)
		}
		if train && n.hidden(l) {
			back, self = max(back, lists*in), max(self, max(b.NumDst, min(lists, b.NumSrc))*in)
		}
	}
	if !train {
		all := p.take(means)
		for l := range L {
			p.layers[l].agg = all
		}
	}
	p.part = p.take(part)
	if train {
		p.weights, p.dAgg, p.dSelf = p.take(weights), p.take(back), p.take(self)
		first := 1
		if n.hidden(0) {
			first = 0
		}
		layoutTranspose(n, blocks, first, p)
	}
}

// relationMeans enqueues the means of the neighbours of all relations.
func (s *step) relationMeans(l int, in cuda.DevicePtr) error {
	a := s.aggParams(l)
	a.NumDst = s.block(l).NumLists()
	a.X, a.Out = in, s.plan.ptr(s.plan.layers[l].agg)
	if a.NumDst == 0 {
		return nil
	}
	return launch(s, "sage_mean", s.rowBlocks(a.NumDst, 16, a.Dim), a)
}

// addRelation adds the product of a run's means by relation r and a matrix, and a bias (0: none),
// to the run's sums.
func (s *step) addRelation(l, r int, run typeRun, weight, bias cuda.DevicePtr) error {
	stride, out := s.dims[l], s.dims[l+1]
	g := gemmParams{M: run.n, N: out, K: s.cfg.typeWidth(l, s.cfg.Schema.Relations[r].Src),
		A: s.means(l, r, run), B: weight, C: s.plan.ptr(s.plan.part), Bias: bias, LDA: stride,
		LDB: out, LDC: out}
	if err := s.gemm(opNN, &g); err != nil {
		return err
	}
	return s.addRows(row(s.plan.ptr(s.plan.layers[l].h), run.row, out), g.C, run.n, out)
}

// relationMeansGrad enqueues the gradient by the means of relation r, whose matrix is weight.
func (s *step) relationMeansGrad(l, r int, runs []typeRun, dz, weight cuda.DevicePtr) error {
	stride, out := s.dims[l], s.dims[l+1]
	width := s.cfg.typeWidth(l, s.cfg.Schema.Relations[r].Src)
	for _, run := range runs {
		if err := s.gemm(opNT, &gemmParams{M: run.n, N: width, K: out, LDA: out, LDB: out,
			LDC: stride, A: row(dz, run.row, out), B: weight,
			C: row(s.plan.ptr(s.plan.dAgg), s.block(l).Lists[r].First+run.list,
				stride)}); err != nil {
			return err
		}
	}
	return nil
}

// relationInputGrad enqueues the gradient by the input h of layer l, in its place, from those
// by the means and, where own is set, those by the rows' own part, which own enqueues to dSelf.
func (s *step) relationInputGrad(l int, h cuda.DevicePtr, own func(to cuda.DevicePtr) error) error {
	b, stride := s.block(l), s.dims[l]
	a := s.aggParams(l)
	a.NumDst = b.NumLists()
	a.Grad, a.Self = s.plan.ptr(s.plan.dAgg), s.plan.ptr(s.plan.dSelf)
	// The kernel takes a part of its own for as many rows as there are lists.
	selves := int64(0)
	if own != nil {
		selves = b.NumDst
		if err := own(a.Self); err != nil {
			return err
		}
	}
	if err := s.zero(row(a.Self, selves, stride), max(min(a.NumDst, a.NumSrc)-selves, 0),
		stride); err != nil {
		return err
	}
	if err := s.gather(l, h, a, "sage_transpose", "sage_mean_bwd"); err != nil {
		return err
	}
	if left := selves - a.NumDst; left > 0 {
		return s.addRows(row(h, a.NumDst, stride), row(a.Self, a.NumDst, stride), left, stride)
	}
	return nil
}

// runGrad enqueues to, the gradient by a matrix of the products of all runs.
func (s *step) runGrad(runs []typeRun, in, stride, out int64, x func(typeRun) cuda.DevicePtr,
	dz, to cuda.DevicePtr) error {
	var parts []gradPart
	for _, run := range runs {
		parts = append(parts, gradPart{x(run), row(dz, run.row, out), run.n})
	}
	return s.partGrad(parts, in, stride, out, to)
}

// gradPart is rows of a product's input and of the gradient by its output.
type gradPart struct {
	x, dz cuda.DevicePtr
	n     int64
}

// partGrad enqueues to, the gradient by a matrix of the products of all parts: one after the
// other's.
func (s *step) partGrad(parts []gradPart, in, stride, out int64, to cuda.DevicePtr) error {
	if len(parts) == 0 { // nobody used it: zeros
		return s.zero(to, in, out)
	}
	for i, part := range parts {
		g := gemmParams{M: in, N: out, K: part.n, LDA: stride, LDB: out, LDC: out, A: part.x,
			B: part.dz, C: to}
		if i > 0 {
			g.C = s.plan.ptr(s.plan.part)
		}
		if err := s.gemm(opTN, &g); err != nil {
			return err
		}
		if i > 0 {
			if err := s.addRows(to, g.C, in, out); err != nil {
				return err
			}
		}
	}
	return nil
}

// runBiasGrad enqueues the gradient by a bias that was added to each row of all runs.
func (s *step) runBiasGrad(runs []typeRun, out int64, dz, to cuda.DevicePtr) error {
	if len(runs) == 0 {
		return s.colSum(&sumParams{X: dz, Out: to, Cols: out})
	}
	for i, run := range runs {
		p := sumParams{X: row(dz, run.row, out), Out: to, Rows: run.n, Cols: out}
		if i > 0 {
			p.Out = s.plan.ptr(s.plan.part)
		}
		if err := s.colSum(&p); err != nil {
			return err
		}
		if i > 0 {
			if err := s.addRows(to, p.Out, 1, out); err != nil {
				return err
			}
		}
	}
	return nil
}

// guessTypes has all nodes of a mini-batch be of the type with the most relations into it: it has
// no more lists than that.
func (c *ModelConfig) guessTypes(mb *graph.MiniBatch, hopEnd []int64) {
	hub := 0
	for t := range c.Schema.Types {
		if len(c.into(t)) > len(c.into(hub)) {
			hub = t
		}
	}
	before := int64(0)
	for _, end := range hopEnd {
		ends := make([]int64, len(c.Schema.Types))
		for t := range ends {
			if ends[t] = end; t < hub {
				ends[t] = before
			}
		}
		mb.TypeEnd, before = append(mb.TypeEnd, ends), end
	}
	mb.HopEnd = hopEnd
	for h := range mb.Blocks {
		b, next := &mb.Blocks[h], int64(0)
		b.Lists = make([]graph.ListRange, len(c.Schema.Relations))
		for _, r := range c.into(hub) {
			b.Lists[r] = graph.ListRange{First: next, N: b.NumDst, Edges: b.NumEdges}
			next += b.NumDst
		}
	}
}

// relationsForward is the work of a layer of means by relation: one aggregation, a product with the
// nodes' own rows, and for each relation a product and its addition.
func (c *ModelConfig) relationsForward(l int, b BlockShape) []Work {
	if b.Relations == nil {
		return sage{}.Forward(c, l, b)
	}
	in, out, lists := c.width(l), c.width(l+1), int64(0)
	var products []Work
	if c.rooted() {
		products = append(products, productWork(b.Dst, out, in, 1))
	}
	for r, x := range b.Relations {
		if lists += x.Dst; x.Dst > 0 {
			products = append(products, productWork(x.Dst, out,
				c.typeWidth(l, c.Schema.Relations[r].Src), 1), bytesWork(3*4*x.Dst*out))
		}
	}
	return append([]Work{gatherWork(b.Edges, lists, in)}, products...)
}

// relationsBackward is relationsForward for the gradients.
func (c *ModelConfig) relationsBackward(l int, b BlockShape) (w []Work) {
	if b.Relations == nil {
		return sage{}.Backward(c, l, b)
	}
	in, out := c.width(l), c.width(l+1)
	product := func(rows, in int64) {
		w = append(w, productWork(in, out, rows, 1))
		if l > 0 {
			w = append(w, productWork(rows, in, out, 1))
		}
	}
	if c.rooted() {
		product(b.Dst, in)
	}
	for r, x := range b.Relations {
		if x.Dst > 0 {
			product(x.Dst, c.typeWidth(l, c.Schema.Relations[r].Src))
			w = append(w, bytesWork(4*x.Dst*out))
		}
	}
	if l > 0 {
		w = append(append(w, transposeWork(b)...), gatherWork(b.Edges, 2*b.Src, in))
	}
	return w
}
