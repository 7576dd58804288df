package gnn

import (
	"fmt"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
)

// rsage is GraphSAGE on a typed graph, with matrices of its own for each relation r into a node's
// type t (Schlichtkrull et al., ESWC 2018; PyG's HeteroConv of SAGEConv with sums):
//
//	z_i = W_t h_i + Σ_r (W_r mean_r(h_j) + b_r)
//
// A relation without edges at a node adds its bias: nothing depends on who else is in the batch.
// With root none the first term is left out. A graph of one type and one relation has sage's
// values.
type rsage struct{}

func (rsage) Name() string { return "rsage" }
func (rsage) Summary() string {
	return "R-SAGE, of typed graphs: for each relation the mean of the neighbours, a matrix for each"
}
func (rsage) Degrees() bool          { return false }
func (rsage) Default(*ModelSettings) {}

func (rsage) Check(c *ModelConfig) error {
	if c.Residual || c.Norm != "" && c.Norm != NoNorm {
		return errs.New(errs.Capability,
			"model rsage has neither a residual connection nor a normalisation; leave them out")
	}
	return c.noAttentionOrEps()
}

func (rsage) typed() {}

// Roots are the values of ModelSettings.Root, the default first.
func Roots() []string { return []string{"type", "none"} }

// rooted reports whether a node's own features are in its sum.
func (c *ModelConfig) rooted() bool { return c.Root != "none" }

// typeWidth is the width of what nodes of type t are to layer l.
func (c *ModelConfig) typeWidth(l, t int) int64 {
	if l == 0 {
		return int64(c.Schema.Types[t].Dim)
	}
	return c.width(l)
}

func (rsage) Floats(c *ModelConfig, l int) (n int64) {
	if c.Schema == nil {
		return 0
	}
	out := c.width(l + 1)
	for t := range c.Schema.Types {
		if c.rooted() {
			n += c.typeWidth(l, t) * out
		}
	}
	for _, r := range c.Schema.Relations {
		n += c.typeWidth(l, r.Src)*out + out
	}
	return n
}

func (rsage) Forward(c *ModelConfig, l int, b BlockShape) []Work {
	in, out := c.width(l), c.width(l+1)
	return []Work{gatherWork(b.Edges, b.Dst, in), productWork(b.Dst, out, in, 2)}
}

func (rsage) Backward(c *ModelConfig, l int, b BlockShape) []Work { return sage{}.Backward(c, l, b) }

func (rsage) kernels(gpu bool) []string {
	names := []string{"sage_mean", "sage_mean_bwd", "add_rows"}
	if !gpu {
		names = append(names, "sage_transpose")
	}
	return names
}

// relationParams are the places of a layer's parameters: of the types' matrices (none without
// roots), and of the relations' matrices and biases.
type relationParams struct{ root, weight, bias []int64 }

func (s *step) relationParams(l int) (p relationParams) {
	all := s.layers[l]
	if s.cfg.rooted() {
		p.root, all = all[:len(s.cfg.Schema.Types)], all[len(s.cfg.Schema.Types):]
	}
	n := len(s.cfg.Schema.Relations)
	p.weight, p.bias = all[:n], all[n:]
	return p
}

func (rsage) declare(n *network, l int, t *tensors) {
	c, out := &n.cfg, n.dims[l+1]
	var roots, weights, biases []int64
	for k, kind := range c.Schema.Types {
		if in := c.typeWidth(l, k); c.rooted() {
			roots = append(roots, t.add(fmt.Sprintf("layer%d.%s.self.weight", l, kind.Name), in, out,
				glorot(in, out)))
		}
	}
	for r, relation := range c.Schema.Relations {
		name, in := c.Schema.RelationName(r), c.typeWidth(l, relation.Src)
		weights = append(weights, t.add(fmt.Sprintf("layer%d.%s.neigh.weight", l, name), in, out,
			glorot(in, out)))
		biases = append(biases, t.add(fmt.Sprintf("layer%d.%s.bias", l, name), 1, out, 0))
	}
	n.layers[l] = append(append(roots, weights...), biases...)
}

func (rsage) layout(n *network, blocks []graph.Block, train bool, p *plan) {
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
		if train && l > 0 {
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
		layoutTranspose(n, blocks, 1, p)
	}
}

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

func (rsage) forward(s *step, l int, in cuda.DevicePtr) error {
	a := s.aggParams(l)
	a.NumDst = s.block(l).NumLists()
	a.X, a.Out = in, s.plan.ptr(s.plan.layers[l].agg)
	if a.NumDst > 0 {
		if err := launch(s, "sage_mean", s.rowBlocks(a.NumDst, 16, a.Dim), a); err != nil {
			return err
		}
	}
	for t := range s.cfg.Schema.Types {
		for _, run := range s.runs(l, t) {
			if err := s.relationSums(l, t, in, run); err != nil {
				return err
			}
		}
	}
	return nil
}

// relationSums makes the sums of a run of type t in layer l: the first relation's product with the
// nodes' own, then the other relations', each added to it.
func (s *step) relationSums(l, t int, in cuda.DevicePtr, run typeRun) error {
	p, stride, out := s.relationParams(l), s.dims[l], s.dims[l+1]
	sums := row(s.plan.ptr(s.plan.layers[l].h), run.row, out)
	g := gemmParams{M: run.n, N: out, C: sums, LDC: out, LDA: stride, LDB: out}
	of := func(r int) {
		g.A, g.B, g.K = s.means(l, r, run), s.ptr(p.weight[r]),
			s.cfg.typeWidth(l, s.cfg.Schema.Relations[r].Src)
		g.Bias = s.ptr(p.bias[r])
	}
	relations := s.cfg.into(t)
	if len(relations) > 0 {
		of(relations[0])
		relations = relations[1:]
	}
	if p.root != nil {
		g.A2, g.B2, g.K2, g.LDA2, g.LDB2 = g.A, g.B, g.K, g.LDA, g.LDB
		g.A, g.B, g.K = row(in, run.row, stride), s.ptr(p.root[t]), s.cfg.typeWidth(l, t)
	}
	if err := s.gemm(opNN, &g); err != nil {
		return err
	}
	for _, r := range relations {
		g = gemmParams{M: run.n, N: out, C: s.plan.ptr(s.plan.part), LDC: out, LDA: stride,
			LDB: out}
		of(r)
		if err := s.gemm(opNN, &g); err != nil {
			return err
		}
		if err := s.addRows(sums, g.C, run.n, out); err != nil {
			return err
		}
	}
	return nil
}

func (rsage) backward(s *step, l int, h, dz cuda.DevicePtr) error {
	p, b, stride, out := s.relationParams(l), s.block(l), s.dims[l], s.dims[l+1]
	for t := range s.cfg.Schema.Types {
		runs := s.runs(l, t)
		own := func(run typeRun) cuda.DevicePtr { return row(h, run.row, stride) }
		if p.root != nil {
			if err := s.runGrad(runs, s.cfg.typeWidth(l, t), stride, out, own, dz,
				p.root[t]); err != nil {
				return err
			}
		}
		for _, r := range s.cfg.into(t) {
			in := s.cfg.typeWidth(l, s.cfg.Schema.Relations[r].Src)
			means := func(run typeRun) cuda.DevicePtr { return s.means(l, r, run) }
			if err := s.runGrad(runs, in, stride, out, means, dz, p.weight[r]); err != nil {
				return err
			}
			if err := s.runBiasGrad(runs, out, dz, p.bias[r]); err != nil {
				return err
			}
			for _, run := range runs {
				if l == 0 {
					break // the gradient of the features is not needed
				}
				if err := s.inputGrad(run.n, stride, out, row(dz, run.row, out), p.weight[r],
					row(s.plan.ptr(s.plan.dAgg), b.Lists[r].First+run.list, stride)); err != nil {
					return err
				}
			}
		}
	}
	if l == 0 {
		return nil
	}
	return s.relationInputGrad(l, h, dz)
}

// relationInputGrad enqueues the gradient by the input h of layer l, in its place.
func (s *step) relationInputGrad(l int, h, dz cuda.DevicePtr) error {
	p, b, stride, out := s.relationParams(l), s.block(l), s.dims[l], s.dims[l+1]
	a := s.aggParams(l)
	a.NumDst = b.NumLists()
	a.Grad, a.Self = s.plan.ptr(s.plan.dAgg), s.plan.ptr(s.plan.dSelf)
	// The kernel takes a part of its own for as many rows as there are lists.
	selves := int64(0)
	if p.root != nil {
		selves = b.NumDst
	}
	zero := gemmParams{M: max(min(a.NumDst, a.NumSrc)-selves, 0), N: stride, LDC: stride,
		C: row(a.Self, selves, stride), LDA: stride, LDB: stride}
	if err := s.gemm(opNN, &zero); err != nil {
		return err
	}
	for t := range s.cfg.Schema.Types {
		for _, run := range s.runs(l, t) {
			if p.root == nil {
				break
			}
			if err := s.inputGrad(run.n, stride, out, row(dz, run.row, out), p.root[t],
				row(a.Self, run.row, stride)); err != nil {
				return err
			}
		}
	}
	if err := s.gather(l, h, a, "sage_transpose", "sage_mean_bwd"); err != nil {
		return err
	}
	if left := selves - a.NumDst; left > 0 {
		return s.addRows(row(h, a.NumDst, stride), row(a.Self, a.NumDst, stride), left, stride)
	}
	return nil
}

// runGrad enqueues the gradient by a matrix of the products of all runs: one after the other's.
func (s *step) runGrad(runs []typeRun, in, stride, out int64, x func(typeRun) cuda.DevicePtr,
	dz cuda.DevicePtr, weight int64) error {
	to := s.grad(weight)
	if len(runs) == 0 { // nobody used it: zeros
		return s.gemm(opTN, &gemmParams{M: in, N: out, LDA: stride, LDB: out, LDC: out, A: dz,
			B: dz, C: to})
	}
	for i, run := range runs {
		g := gemmParams{M: in, N: out, K: run.n, LDA: stride, LDB: out, LDC: out, A: x(run),
			B: row(dz, run.row, out), C: to}
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
func (s *step) runBiasGrad(runs []typeRun, out int64, dz cuda.DevicePtr, bias int64) error {
	to := s.grad(bias)
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

// guessTypes has all nodes of a mini-batch be of the type with the most relations into it: it has no
// more lists than that.
func (c *ModelConfig) guessTypes(mb *graph.MiniBatch, hopEnd []int64) {
	most := 0
	for t := range c.Schema.Types {
		if len(c.into(t)) > len(c.into(most)) {
			most = t
		}
	}
	before := int64(0)
	for _, end := range hopEnd {
		ends := make([]int64, len(c.Schema.Types))
		for t := range ends {
			if ends[t] = end; t < most {
				ends[t] = before
			}
		}
		mb.TypeEnd, before = append(mb.TypeEnd, ends), end
	}
	mb.HopEnd = hopEnd
	for h := range mb.Blocks {
		b, next := &mb.Blocks[h], int64(0)
		b.Lists = make([]graph.ListRange, len(c.Schema.Relations))
		for _, r := range c.into(most) {
			b.Lists[r] = graph.ListRange{First: next, N: b.NumDst}
			next += b.NumDst
		}
	}
}
