package gnn

import (
	"cmp"
	"fmt"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
)

// rgcn is the relational graph convolution (Schlichtkrull et al., "Modeling Relational Data with
// Graph Convolutional Networks", ESWC 2018; PyG's RGCNConv):
//
//	z_i = W h_i + b + Σ_r W_r mean_r(h_j)
//
// with one W and one b for all types, so that rows of all types are of one width. With bases each
// W_r is a combination Σ_b a_rb V_b of as many matrices as they say.
type rgcn struct{}

func (rgcn) Name() string { return "rgcn" }
func (rgcn) Summary() string {
	return "R-GCN, of typed graphs of one width: as rsage with one matrix for own features, or bases"
}
func (rgcn) Degrees() bool          { return false }
func (rgcn) Default(*ModelSettings) {}

func (rgcn) Check(c *ModelConfig) error {
	if !c.rooted() {
		return errs.New(errs.Usage, "model rgcn has a node's own features in its sum: leave {root} out")
	}
	return cmp.Or(c.equalWidths("model rgcn"), c.noLoops(), c.noEps(), c.noAttention())
}

func (rgcn) Floats(c *ModelConfig, l int) int64 {
	if c.Schema == nil {
		return 0
	}
	in, out, r := c.width(l), c.width(l+1), int64(len(c.Schema.Relations))
	if l == 0 && c.Featureless {
		in = c.Schema.First(len(c.Schema.Types))
	}
	if b := int64(c.Bases); b > 0 {
		return in*out*(b+1) + r*b + out
	}
	return in*out*(r+1) + out
}

func (rgcn) Forward(c *ModelConfig, l int, b BlockShape) []Work {
	return append(c.basesWork(l, b), c.relationsForward(l, b)...)
}
func (rgcn) Backward(c *ModelConfig, l int, b BlockShape) []Work {
	return append(c.relationsBackward(l, b), c.basesWork(l, b)...)
}

// basesWork is that of the relations' matrices as sums of the bases, or of the gradients of both.
func (c *ModelConfig) basesWork(l int, b BlockShape) []Work {
	if c.Bases == 0 || b.Relations == nil {
		return nil
	}
	return []Work{productWork(int64(len(b.Relations)), c.width(l)*c.width(l+1), int64(c.Bases), 1)}
}

func (rgcn) kernels(gpu bool) []string {
	return append(relationKernels(gpu), "relation_lists", "bias_act")
}

// The places of a layer's parameters; of the relations' matrices there is one for each, or, with
// bases, the matrices V one in a row, and then a.
const (
	rgcnRoot = iota
	rgcnBias
	rgcnWeights
)

func (rgcn) declare(n *network, l int, t *tensors) {
	if n.featureless(l) {
		n.declareFeatureless(t)
		return
	}
	in, out := n.dims[l], n.dims[l+1]
	places := []int64{
		t.add(fmt.Sprintf("layer%d.self.weight", l), in, out, glorot(in, out)),
		t.add(fmt.Sprintf("layer%d.bias", l), 1, out, 0),
	}
	relations, bases := len(n.cfg.Schema.Relations), int64(n.cfg.Bases)
	if bases > 0 {
		n.layers[l] = append(places,
			t.add(fmt.Sprintf("layer%d.bases", l), bases, in*out, glorot(in, out)),
			t.add(fmt.Sprintf("layer%d.coefficients", l), int64(relations), bases,
				glorot(int64(relations), bases)))
		return
	}
	for r := range relations {
		places = append(places, t.add(fmt.Sprintf("layer%d.%s.neigh.weight", l,
			n.cfg.Schema.RelationName(r)), in, out, glorot(in, out)))
	}
	n.layers[l] = places
}

func (rgcn) layout(n *network, blocks []graph.Block, train bool, p *plan) {
	layoutRelations(n, blocks, train, p)
	if n.cfg.Featureless {
		n.layoutFeatureless(&blocks[n.cfg.Layers-1], train, p)
	}
	if n.cfg.Bases == 0 {
		return
	}
	largest := int64(0)
	for l := range n.cfg.Layers {
		largest = max(largest, n.dims[l]*n.dims[l+1])
	}
	all := largest * int64(len(n.cfg.Schema.Relations))
	if p.relation = p.take(all); train {
		p.dRelation = p.take(all)
	}
}

// weight is the matrix of relation r in layer l, once combine has made it.
func (rgcn) weight(s *step, l, r int) cuda.DevicePtr {
	if s.cfg.Bases > 0 {
		return row(s.plan.ptr(s.plan.relation), int64(r), s.dims[l]*s.dims[l+1])
	}
	return s.ptr(s.layers[l][rgcnWeights+r])
}

// weightGrad is the place of the gradient by it.
func (rgcn) weightGrad(s *step, l, r int) cuda.DevicePtr {
	if s.cfg.Bases > 0 {
		return row(s.plan.ptr(s.plan.dRelation), int64(r), s.dims[l]*s.dims[l+1])
	}
	return s.grad(s.layers[l][rgcnWeights+r])
}

// combine makes the relations' matrices of the bases.
func (rgcn) combine(s *step, l int) error {
	if s.cfg.Bases == 0 {
		return nil
	}
	n, b := s.dims[l]*s.dims[l+1], int64(s.cfg.Bases)
	return s.gemm(opNN, &gemmParams{M: int64(len(s.cfg.Schema.Relations)), N: n, K: b, LDA: b,
		LDB: n, LDC: n, A: s.ptr(s.layers[l][rgcnWeights+1]), B: s.ptr(s.layers[l][rgcnWeights]),
		C: s.plan.ptr(s.plan.relation)})
}

// combineGrad turns the gradients by the relations' matrices into those by bases and coefficients.
func (m rgcn) combineGrad(s *step, l int) error {
	if s.cfg.Bases == 0 {
		return nil
	}
	n, b, r := s.dims[l]*s.dims[l+1], int64(s.cfg.Bases), int64(len(s.cfg.Schema.Relations))
	bases, coefficients := s.layers[l][rgcnWeights], s.layers[l][rgcnWeights+1]
	d := m.weightGrad(s, l, 0)
	if err := s.gemm(opTN, &gemmParams{M: b, N: n, K: r, LDA: b, LDB: n, LDC: n,
		A: s.ptr(coefficients), B: d, C: s.grad(bases)}); err != nil {
		return err
	}
	return s.gemm(opNT, &gemmParams{M: r, N: b, K: n, LDA: n, LDB: n, LDC: b, A: d,
		B: s.ptr(bases), C: s.grad(coefficients)})
}

func (m rgcn) forward(s *step, l int, in cuda.DevicePtr) error {
	if s.featureless(l) {
		return s.featurelessForward()
	}
	if err := s.relationMeans(l, in); err != nil {
		return err
	}
	if err := m.combine(s, l); err != nil {
		return err
	}
	places, stride, out := s.layers[l], s.dims[l], s.dims[l+1]
	if err := s.gemm(opNN, &gemmParams{M: s.block(l).NumDst, N: out, K: stride, LDA: stride,
		LDB: out, LDC: out, A: in, B: s.ptr(places[rgcnRoot]), Bias: s.ptr(places[rgcnBias]),
		C: s.plan.ptr(s.plan.layers[l].h)}); err != nil {
		return err
	}
	for t := range s.cfg.Schema.Types {
		for _, run := range s.runs(l, t) {
			for _, r := range s.cfg.into(t) {
				if err := s.addRelation(l, r, run, m.weight(s, l, r), 0); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (m rgcn) backward(s *step, l int, h, dz cuda.DevicePtr) error {
	if s.featureless(l) {
		return s.featurelessBackward(dz)
	}
	places, rows, stride, out := s.layers[l], s.block(l).NumDst, s.dims[l], s.dims[l+1]
	if err := s.weightGrad(rows, stride, out, h, dz, places[rgcnRoot]); err != nil {
		return err
	}
	if err := s.columnGrad(rows, out, dz, places[rgcnBias]); err != nil {
		return err
	}
	if s.hidden(l) && s.cfg.Bases > 0 { // the layer above has used their place
		if err := m.combine(s, l); err != nil {
			return err
		}
	}
	for t := range s.cfg.Schema.Types {
		runs := s.runs(l, t)
		for _, r := range s.cfg.into(t) {
			means := func(run typeRun) cuda.DevicePtr { return s.means(l, r, run) }
			if err := s.runGrad(runs, stride, stride, out, means, dz,
				m.weightGrad(s, l, r)); err != nil {
				return err
			}
			if !s.hidden(l) {
				continue // the gradient of the features is not needed
			}
			if err := s.relationMeansGrad(l, r, runs, dz, m.weight(s, l, r)); err != nil {
				return err
			}
		}
	}
	if err := m.combineGrad(s, l); err != nil || !s.hidden(l) {
		return err
	}
	return s.relationInputGrad(l, h, func(to cuda.DevicePtr) error {
		return s.inputGrad(rows, stride, out, dz, places[rgcnRoot], to)
	})
}
