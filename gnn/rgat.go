package gnn

import (
	"cmp"
	"fmt"
	"math"
	"unsafe"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/philox"
)

// rgat is graph attention by relation (PyG's HeteroConv of GATConv without self loops, summed;
// MLPerf's model of IGBH): for each relation r into a node's type, with z = h·W_r,
//
//	z_i = Σ_r (Σ_j α_ij z_j + b_r)      α as in gat, over the neighbours alone
//
// Both ends of a relation share W_r where their rows are of one width; else destinations, whose
// rows only decide attention, have a matrix of their own.
//
// Relations come one after the other, with gat's kernels in the same memory: a relation's rows are
// its destinations and, behind them, its sources. relation_lists makes lists of the places there,
// and gives destinations a score for themselves that no softmax keeps. The backward pass computes
// attention once more.
type rgat struct{}

func (rgat) Name() string { return "rgat" }
func (rgat) Summary() string {
	return "R-GAT, of typed graphs: attention over the neighbours of each relation, summed"
}
func (rgat) Degrees() bool            { return false }
func (rgat) Default(c *ModelSettings) { c.Heads = cmp.Or(c.Heads, 8) }

func (rgat) Check(c *ModelConfig) error {
	switch {
	case !c.rooted():
		return errs.New(errs.Usage, "roots are an option of model rsage")
	case c.Bases != 0:
		return errs.New(errs.Usage, "bases are an option of model rgcn")
	}
	return cmp.Or(c.noLoops(), c.noEps(), gat{}.checkHeads(c))
}

// widths of relation r's rows in layer l.
func (rgat) widths(c *ModelConfig, l, r int) (src, dst int64) {
	x := c.Schema.Relations[r]
	return c.typeWidth(l, x.Src), c.typeWidth(l, x.Dst)
}

func (m rgat) Floats(c *ModelConfig, l int) (n int64) {
	if c.Schema == nil {
		return 0
	}
	wide := gat{}.headWidth(c, l) * c.headsOf(l)
	for r := range c.Schema.Relations {
		src, dst := m.widths(c, l, r)
		if n += src*wide + 2*wide + c.width(l+1); src != dst {
			n += dst * wide
		}
	}
	return n
}

func (m rgat) Forward(c *ModelConfig, l int, b BlockShape) (w []Work) {
	for _, x := range m.shapes(b) {
		w = append(w, gat{}.Forward(c, l, x)...)
	}
	return w
}

// Backward has the forward pass of each relation before its own.
func (m rgat) Backward(c *ModelConfig, l int, b BlockShape) (w []Work) {
	for _, x := range m.shapes(b) {
		w = append(append(w, gat{}.Forward(c, l, x)...), gat{}.Backward(c, l, x)...)
	}
	return w
}

// shapes are the relations' blocks, in which destinations are rows of their own beside the sources.
func (rgat) shapes(b BlockShape) (list []BlockShape) {
	if b.Relations == nil {
		return []BlockShape{b}
	}
	for _, x := range b.Relations {
		if x.Dst > 0 {
			list = append(list, BlockShape{Dst: x.Dst, Src: x.Dst + x.Src, Edges: x.Edges})
		}
	}
	return list
}

func (rgat) kernels(gpu bool) []string {
	return append(gat{}.kernels(gpu), "relation_lists", "add_rows")
}

// rgatParams are the places of a relation's parameters.
type rgatParams struct{ weight, weightDst, attSrc, attDst, bias int64 }

const rgatPlaces = 5

func (rgat) params(s *step, l, r int) rgatParams {
	p := s.layers[l][rgatPlaces*r:]
	return rgatParams{p[0], p[1], p[2], p[3], p[4]}
}

func (m rgat) declare(n *network, l int, t *tensors) {
	heads, f := n.cfg.headsOf(l), gat{}.headWidth(&n.cfg, l)
	n.layers[l] = nil
	for r := range n.cfg.Schema.Relations {
		src, dst := m.widths(&n.cfg, l, r)
		name := fmt.Sprintf("layer%d.%s.", l, n.cfg.Schema.RelationName(r))
		weight := t.add(name+"weight", src, heads*f, glorot(src, heads*f))
		weightDst := weight
		if src != dst {
			weightDst = t.add(name+"weight_dst", dst, heads*f, glorot(dst, heads*f))
		}
		n.layers[l] = append(n.layers[l], weight, weightDst,
			t.add(name+"att_src", heads, f, glorot(2*f, 1)),
			t.add(name+"att_dst", heads, f, glorot(2*f, 1)),
			t.add(name+"bias", 1, n.dims[l+1], 0))
	}
}

// rgatPlan is the part of a plan that only rgat has: of one relation after the other.
type rgatPlan struct {
	z, scores, indptr, src int64
	out, mean              int64
	dz                     int64 // gradients of a type's sums, in the order of its nodes
	dIn                    int64
}

func (rgat) layout(*network, []graph.Block, bool, *plan) {} // layoutTyped does

// layoutTyped places the most that a relation of any layer takes.
func (m rgat) layoutTyped(n *network, mb *graph.MiniBatch, train bool, p *plan) {
	var rows, dsts, edges, wide, depth, heads, dIn int64
	L := n.cfg.Layers
	s := step{network: n, mb: mb}
	for l := range L {
		b := &mb.Blocks[L-1-l]
		for r, x := range n.cfg.Schema.Relations {
			sources := int64(0)
			for _, run := range s.runs(l-1, x.Src) {
				sources += run.n
			}
			rows, dsts = max(rows, b.Lists[r].N+sources), max(dsts, b.Lists[r].N)
			edges = max(edges, b.Lists[r].Edges)
		}
		heads = max(heads, n.cfg.headsOf(l))
		wide, depth = max(wide, n.cfg.headsOf(l)*gat{}.headWidth(&n.cfg, l)), max(depth, n.dims[l])
		if n.hidden(l) {
			dIn = max(dIn, b.NumSrc*n.dims[l])
		}
	}
	q, g := &p.rgat, &p.gat
	q.z = p.take(rows * wide)
	q.scores = p.take(align(rows*heads) + 3*align(dsts*heads))
	q.indptr, q.src = p.take(2*(dsts+1)), p.take(edges)
	q.out, q.mean = p.take(dsts*wide), p.take(dsts*wide)
	g.alpha, g.alphaSelf = p.take(edges*heads), p.take(dsts*heads)
	if !train {
		return
	}
	q.dz, q.dIn = p.take(dsts*wide), p.take(dIn)
	g.grad = p.take(dsts * wide)
	g.dot, g.dotSelf = p.take(edges*heads), p.take(dsts*heads)
	g.dSrc, g.dDst = p.take(rows*heads), p.take(dsts*heads)
	g.edgePtr, g.edgeDst = p.take(2*(edges+1)), p.take(edges)
	g.part, g.dZ = p.take(leaves(rows)*wide), p.take(rows*wide)
	p.weights, p.tEnd, p.tDst = p.take(edges), p.take(rows), p.take(edges)
	p.part = p.take(max(depth*wide, rows*depth))
}

// mostRuns bounds the runs of a type's rows: of the seeds and each hop.
const mostRuns = 16

// relationParams is the parameter block of relation_lists: it writes the lists of a relation with
// places among the relation's rows in the place of rows of the frontier, and the destinations'
// scores for themselves.
type relationParams struct {
	Indptr    cuda.DevicePtr // int64[NumDst+1]: the relation's lists in the block
	Src       cuda.DevicePtr // uint32[FirstEdge+Edges]: of the block
	OutIndptr cuda.DevicePtr // int64[NumDst+1], from 0
	OutSrc    cuda.DevicePtr // uint32[Edges]
	Scores    cuda.DevicePtr // float32[Selves], which get selfScore
	NumDst    int64
	FirstEdge int64
	Edges     int64
	Selves    int64
	Runs      int64
	// run k of the sources begins with row Row[k] of the frontier, which has the place Place[k]
	Row, Place [mostRuns]int64
}

const (
	_ = uint(unsafe.Sizeof(relationParams{}) - 336)
	_ = uint(336 - unsafe.Sizeof(relationParams{}))
)

// selfScore is a score far below all others, whose exp is 0 beside any: of a node for itself.
const selfScore = -1e30

func init() { cuda.RegisterHost("relation_lists", relationLists) }

func relationLists(b *cuda.Block, p *relationParams) error {
	indptr, out := cuda.View[int64](p.Indptr, p.NumDst+1), cuda.View[int64](p.OutIndptr, p.NumDst+1)
	lo, hi := b.Range(p.NumDst + 1)
	for i := lo; i < hi; i++ {
		out[i] = indptr[i] - p.FirstEdge
	}
	src := cuda.View[uint32](p.Src, p.FirstEdge+p.Edges)[p.FirstEdge:]
	to := cuda.View[uint32](p.OutSrc, p.Edges)
	lo, hi = b.Range(p.Edges)
	for e := lo; e < hi; e++ {
		k := int64(0)
		for k+1 < p.Runs && p.Row[k+1] <= int64(src[e]) {
			k++
		}
		to[e] = uint32(int64(src[e]) - p.Row[k] + p.Place[k])
	}
	scores := view(p.Scores, p.Selves)
	lo, hi = b.Range(p.Selves)
	for i := lo; i < hi; i++ {
		scores[i] = selfScore
	}
	return nil
}

// relation is one in a layer: its rows are the destinations and, from place dsts on, the sources.
type rgatRelation struct {
	l, r    int
	dsts    int64
	p       rgatParams
	dst     []typeRun
	src     []typeRun
	in, out int64 // widths of its input's rows and its sums
	wide    int64 // of all heads
}

func (rgat) relation(s *step, l, r int) rgatRelation {
	x := s.cfg.Schema.Relations[r]
	return rgatRelation{l: l, r: r, dsts: s.block(l).Lists[r].N, p: rgat{}.params(s, l, r),
		dst: s.runs(l, x.Dst), src: s.runs(l-1, x.Src), in: s.dims[l], out: s.dims[l+1],
		wide: s.cfg.headsOf(l) * gat{}.headWidth(&s.cfg, l)}
}

// gat describes the relation to gat's kernels.
func (x *rgatRelation) gat(s *step) gatParams {
	q, g, rows := &s.plan.rgat, &s.plan.gat, x.dsts
	for _, run := range x.src {
		rows += run.n
	}
	heads := s.cfg.headsOf(x.l)
	p := gatParams{
		Indptr: s.plan.ptr(q.indptr), Src: s.plan.ptr(q.src), Z: s.plan.ptr(q.z),
		AttSrc: s.ptr(x.p.attSrc), AttDst: s.ptr(x.p.attDst),
		Alpha: s.plan.ptr(g.alpha), AlphaSelf: s.plan.ptr(g.alphaSelf),
		NumDst: x.dsts, NumSrc: rows, Edges: s.block(x.l).Lists[x.r].Edges,
		Dim: gat{}.headWidth(&s.cfg, x.l), Heads: heads,
	}
	of := q.scores
	for _, f := range []struct {
		p    *cuda.DevicePtr
		rows int64
	}{{&p.ScoreSrc, rows}, {&p.ScoreDst, x.dsts}, {&p.Max, x.dsts}, {&p.Inverse, x.dsts}} {
		*f.p = s.plan.ptr(of)
		of += align(f.rows * heads)
	}
	if s.set != nil && s.cfg.AttentionDropout > 0 {
		p.Drop = s.drop(s.cfg.AttentionDropout, uint32(attentionLayer+x.l))
		if x.r > 0 { // a mask of its own
			w := philox.Block(p.Drop.Key, [4]uint32{uint32(x.r), 0, math.MaxUint32,
				math.MaxUint32})
			p.Drop.Key = [2]uint32{w[0], w[1]}
		}
	}
	return p
}

// zero enqueues zeros in rows of a width.
func (s *step) zero(to cuda.DevicePtr, rows, width int64) error {
	return s.gemm(opNN, &gemmParams{M: rows, N: width, LDA: width, LDB: width, LDC: width, C: to})
}

// project enqueues z of the relation's rows.
func (x *rgatRelation) project(s *step, in, z cuda.DevicePtr) error {
	src, dst := rgat{}.widths(&s.cfg, x.l, x.r)
	product := func(run typeRun, place, depth, weight int64) error {
		return s.gemm(opNN, &gemmParams{M: run.n, N: x.wide, K: depth, LDA: x.in, LDB: x.wide,
			LDC: x.wide, A: row(in, run.row, x.in), B: s.ptr(weight), C: row(z, place, x.wide)})
	}
	for _, run := range x.dst {
		if err := product(run, run.list, dst, x.p.weightDst); err != nil {
			return err
		}
	}
	for _, run := range x.src {
		if err := product(run, x.dsts+run.list, src, x.p.weight); err != nil {
			return err
		}
	}
	return nil
}

// attend enqueues z and attention of the relation.
func (x *rgatRelation) attend(s *step, in cuda.DevicePtr) (p gatParams, err error) {
	p = x.gat(s)
	if err := x.project(s, in, p.Z); err != nil {
		return p, err
	}
	if err := launch(s, "gat_score", s.dotBlocks(p.NumSrc*p.Heads, p.Dim), p); err != nil {
		return p, err
	}
	b := s.block(x.l)
	lists := relationParams{Indptr: pointer(b.Indptr) + cuda.DevicePtr(8*b.Lists[x.r].First),
		Src: pointer(b.Src), OutIndptr: p.Indptr, OutSrc: p.Src, Scores: p.ScoreSrc,
		NumDst: x.dsts, FirstEdge: b.Lists[x.r].FirstEdge, Edges: p.Edges,
		Selves: x.dsts * p.Heads, Runs: int64(len(x.src))}
	for k, run := range x.src {
		lists.Row[k], lists.Place[k] = run.row, x.dsts+run.list
	}
	items := max(x.dsts+1, p.Edges, lists.Selves)
	if err := launch(s, "relation_lists", s.blocks(items, 1024, items/32), lists); err != nil {
		return p, err
	}
	if err := launch(s, "gat_softmax", s.blocks(p.NumDst, 16, p.NumDst*p.Heads/32),
		p); err != nil {
		return p, err
	}
	// A node without neighbours has nobody but itself.
	return p, s.zero(p.AlphaSelf, p.NumDst, p.Heads)
}

func (m rgat) forward(s *step, l int, in cuda.DevicePtr) error {
	h, out := s.plan.ptr(s.plan.layers[l].h), s.dims[l+1]
	if err := s.zero(h, s.block(l).NumDst, out); err != nil {
		return err
	}
	for r := range s.cfg.Schema.Relations {
		x := m.relation(s, l, r)
		if x.dsts == 0 {
			continue
		}
		p, err := x.attend(s, in)
		if err != nil {
			return err
		}
		p.Out = s.plan.ptr(s.plan.rgat.out)
		if err := launch(s, "gat_sum", s.headBlocks(p.NumDst, 16, p.Heads, p.Dim),
			p); err != nil {
			return err
		}
		sums := p.Out
		if (gat{}).averages(s.network, l) {
			mean := p
			mean.Z, mean.Out = p.Out, s.plan.ptr(s.plan.rgat.mean)
			if err := launch(s, "gat_mean", s.blocks(p.NumDst, 64, p.NumDst*p.Dim/32),
				mean); err != nil {
				return err
			}
			sums = mean.Out
		}
		if err := launch(s, "bias_act", s.blocks(p.NumDst, 64, p.NumDst*((out+3)/4)*4/gpuItems),
			biasActParams{C: sums, Bias: s.ptr(x.p.bias), Rows: p.NumDst, Cols: out,
				LDC: out}); err != nil {
			return err
		}
		for _, run := range x.dst {
			if err := s.addRows(row(h, run.row, out), row(sums, run.list, out), run.n,
				out); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m rgat) backward(s *step, l int, h, dz cuda.DevicePtr) error {
	in, out, q := s.dims[l], s.dims[l+1], &s.plan.rgat
	if s.hidden(l) {
		if err := s.zero(s.plan.ptr(q.dIn), s.block(l).NumSrc, in); err != nil {
			return err
		}
	}
	for t := range s.cfg.Schema.Types {
		sums := s.plan.ptr(q.dz)
		for _, run := range s.runs(l, t) {
			to := row(sums, run.list, out)
			if err := s.zero(to, run.n, out); err != nil {
				return err
			}
			if err := s.addRows(to, row(dz, run.row, out), run.n, out); err != nil {
				return err
			}
		}
		for _, r := range s.cfg.into(t) {
			x := m.relation(s, l, r)
			if err := x.backward(s, h, sums); err != nil {
				return err
			}
		}
	}
	if !s.hidden(l) {
		return nil // the gradient of the features is not needed
	}
	rows := s.block(l).NumSrc
	if err := s.zero(h, rows, in); err != nil {
		return err
	}
	return s.addRows(h, s.plan.ptr(q.dIn), rows, in)
}

// backward enqueues the gradients of a relation's parameters and adds those by its rows to dIn. dz
// is that by the sums of its destinations.
func (x *rgatRelation) backward(s *step, h, dz cuda.DevicePtr) error {
	if err := s.columnGrad(x.dsts, x.out, dz, x.p.bias); err != nil {
		return err
	}
	if x.dsts == 0 { // nobody used it: zeros
		return x.unused(s)
	}
	p, err := x.attend(s, h)
	if err != nil {
		return err
	}
	g, ptr := &s.plan.gat, s.plan.ptr
	p.Grad, p.Dot, p.DotSelf = dz, ptr(g.dot), ptr(g.dotSelf)
	p.DSrc, p.DDst = ptr(g.dSrc), ptr(g.dDst)
	p.EdgePtr, p.EdgeDst, p.TEnd, p.TEdge = ptr(g.edgePtr), ptr(g.edgeDst), ptr(s.plan.tEnd),
		ptr(s.plan.tDst)
	if (gat{}).averages(s.network, x.l) {
		p.Grad = ptr(g.grad)
		spread := p
		spread.Z, spread.Out = dz, p.Grad
		if err := launch(s, "gat_spread", s.blocks(p.NumDst, 64, p.NumDst*p.Heads*p.Dim/32),
			spread); err != nil {
			return err
		}
	}
	p.Out = ptr(g.dZ)
	if err := (gat{}).backwardEdges(s, p, func() error {
		return s.zero(p.AlphaSelf, p.NumDst, p.Heads)
	}); err != nil {
		return err
	}
	if err := s.attentionGrad(p, x.p.attDst, x.p.attSrc); err != nil {
		return err
	}
	return x.inputGrad(s, h, p.Out)
}

// unused enqueues zeros as the gradients of matrices and attention.
func (x *rgatRelation) unused(s *step) error {
	src, dst := rgat{}.widths(&s.cfg, x.l, x.r)
	for _, f := range []struct{ place, rows int64 }{{x.p.weight, src}, {x.p.weightDst, dst},
		{x.p.attSrc, 1}, {x.p.attDst, 1}} {
		if err := s.zero(s.grad(f.place), f.rows, x.wide); err != nil {
			return err
		}
	}
	return nil
}

// inputGrad enqueues the gradients by the relation's matrices and adds those by its rows, from dZ
// those by z.
func (x *rgatRelation) inputGrad(s *step, h, dZ cuda.DevicePtr) error {
	src, dst := rgat{}.widths(&s.cfg, x.l, x.r)
	parts := func(runs []typeRun, first int64) (list []gradPart) {
		for _, run := range runs {
			list = append(list, gradPart{row(h, run.row, x.in), row(dZ, first+run.list, x.wide),
				run.n})
		}
		return list
	}
	ofDst, ofSrc := parts(x.dst, 0), parts(x.src, x.dsts)
	if x.p.weightDst != x.p.weight {
		if err := s.partGrad(ofDst, dst, x.in, x.wide, s.grad(x.p.weightDst)); err != nil {
			return err
		}
		ofDst = nil
	}
	if err := s.partGrad(append(ofDst, ofSrc...), src, x.in, x.wide,
		s.grad(x.p.weight)); err != nil || !s.hidden(x.l) {
		return err
	}
	for i, runs := range [][]typeRun{x.dst, x.src} {
		weight, width, first := x.p.weightDst, dst, int64(0)
		if i > 0 {
			weight, width, first = x.p.weight, src, x.dsts
		}
		for _, run := range runs {
			part := s.plan.ptr(s.plan.part)
			if err := s.gemm(opNT, &gemmParams{M: run.n, N: width, K: x.wide, LDA: x.wide,
				LDB: x.wide, LDC: x.in, A: row(dZ, first+run.list, x.wide), B: s.ptr(weight),
				C: part}); err != nil {
				return err
			}
			if err := s.addRows(row(s.plan.ptr(s.plan.rgat.dIn), run.row, x.in), part, run.n,
				x.in); err != nil {
				return err
			}
		}
	}
	return nil
}
