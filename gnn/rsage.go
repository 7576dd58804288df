package gnn

import (
	"cmp"
	"fmt"
	"slices"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
)

// rsage is GraphSAGE on a typed graph, with matrices of its own for each relation r into a node's
// type t (PyG's HeteroConv of SAGEConv, summed):
//
//	z_i = W_t h_i + Σ_r (W_r mean_r(h_j) + b_r)
//
// A relation without edges at a node adds its bias: nothing depends on who else is in the batch.
// With root none the first term is left out. A graph of one type and one relation has sage's
// values.
type rsage struct{}

func (rsage) Name() string { return "rsage" }
func (rsage) Summary() string {
	return "R-SAGE, of typed graphs: the mean of the neighbours by relation, a matrix for each"
}
func (rsage) Degrees() bool          { return false }
func (rsage) Default(*ModelSettings) {}

func (rsage) Check(c *ModelConfig) error {
	if c.Bases != 0 {
		return errs.New(errs.Usage, "bases are an option of model rgcn")
	}
	return cmp.Or(c.noLoops(), c.noEps(), c.noAttention())
}

// equalWidths refuses rows of several widths where something has one matrix for all types.
func (c *ModelConfig) equalWidths(what any) error {
	if c.Schema == nil {
		return nil
	}
	for _, t := range c.Schema.Types {
		if t.Dim != c.InDim {
			return errs.New(errs.Capability,
				"%v has one matrix for all types, and rows of type %s have %d features of %d; use a model with one for each type, or {embed} as wide as rows",
				what, t.Name, t.Dim, c.InDim)
		}
	}
	return nil
}

// Roots are the values of ModelSettings.Root, the default first.
func Roots() []string { return []string{"type", "none"} }

// rooted reports whether a node's own features are in its sum.
func (c *ModelConfig) rooted() bool { return c.Root != "none" }

func (rsage) Floats(c *ModelConfig, l int) (n int64) {
	if c.Schema == nil {
		return 0
	}
	out := c.width(l + 1)
	for t := range c.Schema.Types {
		if c.rooted() && (t == 0 || !c.ShareTypes) {
			n += c.typeWidth(l, t) * out
		}
	}
	for _, r := range c.Schema.Relations {
		n += c.typeWidth(l, r.Src)*out + out
	}
	return n
}

func (rsage) Forward(c *ModelConfig, l int, b BlockShape) []Work {
	return c.relationsForward(l, b)
}
func (rsage) Backward(c *ModelConfig, l int, b BlockShape) []Work {
	return c.relationsBackward(l, b)
}

func (rsage) kernels(gpu bool) []string { return relationKernels(gpu) }

func (rsage) layout(n *network, blocks []graph.Block, train bool, p *plan) {
	layoutRelations(n, blocks, train, p)
}

// rsageParams are the places of a layer's parameters: of the types' matrices (none without roots),
// and of the relations' matrices and biases.
type rsageParams struct{ root, weight, bias []int64 }

func (rsage) params(s *step, l int) (p rsageParams) {
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
		in, name := c.typeWidth(l, k), fmt.Sprintf("layer%d.%s.self.weight", l, kind.Name)
		switch {
		case !c.rooted():
		case !c.ShareTypes:
			roots = append(roots, t.add(name, in, out, glorot(in, out)))
		case k == 0:
			shared := t.add(fmt.Sprintf("layer%d.self.weight", l), in, out, glorot(in, out))
			roots = slices.Repeat([]int64{shared}, len(c.Schema.Types))
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

// fusesTypes reports whether a model of typed graphs can be fused, tables aside: each node has a
// list, with which its gradient closes, and no dropout has a mask over the rows of all types.
func (c *ModelConfig) fusesTypes() bool {
	if c.Model != (rsage{}).Name() || c.Dropout > 0 {
		return false
	}
	for t := range c.Schema.Types {
		if len(c.into(t)) == 0 {
			return false
		}
	}
	return true
}

func (m rsage) forward(s *step, l int, in cuda.DevicePtr) error {
	if err := s.relationMeans(l, in); err != nil {
		return err
	}
	for t := range s.cfg.Schema.Types {
		for _, run := range s.runs(l, t) {
			if err := m.sums(s, l, t, in, run); err != nil {
				return err
			}
		}
	}
	return nil
}

// sums makes the sums of a run of type t in layer l: the first relation's product with the nodes'
// own, then the other relations', each added to it. A fused model's ReLU follows the last.
func (m rsage) sums(s *step, l, t int, in cuda.DevicePtr, run typeRun) error {
	p, stride, out := m.params(s, l), s.dims[l], s.dims[l+1]
	g := gemmParams{M: run.n, N: out, C: row(s.plan.ptr(s.plan.layers[l].h), run.row, out),
		LDC: out, LDA: stride, LDB: out}
	relations := s.cfg.into(t)
	if len(relations) > 0 {
		r := relations[0]
		g.A, g.B, g.K = s.means(l, r, run), s.ptr(p.weight[r]),
			s.cfg.typeWidth(l, s.cfg.Schema.Relations[r].Src)
		g.Bias = s.ptr(p.bias[r])
		relations = relations[1:]
	}
	if p.root != nil {
		g.A2, g.B2, g.K2, g.LDA2, g.LDB2 = g.A, g.B, g.K, g.LDA, g.LDB
		g.A, g.B, g.K = row(in, run.row, stride), s.ptr(p.root[t]), s.cfg.typeWidth(l, t)
	}
	flags, _ := s.activation(l)
	if len(relations) == 0 {
		g.Flags = flags
	}
	if err := s.gemm(opNN, &g); err != nil {
		return err
	}
	for _, r := range relations {
		if err := s.addRelation(l, r, run, s.ptr(p.weight[r]), s.ptr(p.bias[r])); err != nil {
			return err
		}
	}
	if flags == 0 || len(relations) == 0 {
		return nil
	}
	return s.activate(s.act, actParams{X: g.C, Out: g.C, Rows: run.n, Cols: out}, false)
}

func (m rsage) backward(s *step, l int, h, dz cuda.DevicePtr) error {
	p, stride, out := m.params(s, l), s.dims[l], s.dims[l+1]
	if p.root != nil && s.cfg.ShareTypes {
		if err := s.weightGrad(s.block(l).NumDst, stride, out, h, dz, p.root[0]); err != nil {
			return err
		}
	}
	for t := range s.cfg.Schema.Types {
		runs := s.runs(l, t)
		own := func(run typeRun) cuda.DevicePtr { return row(h, run.row, stride) }
		if p.root != nil && !s.cfg.ShareTypes {
			if err := s.runGrad(runs, s.cfg.typeWidth(l, t), stride, out, own, dz,
				s.grad(p.root[t])); err != nil {
				return err
			}
		}
		for _, r := range s.cfg.into(t) {
			in := s.cfg.typeWidth(l, s.cfg.Schema.Relations[r].Src)
			means := func(run typeRun) cuda.DevicePtr { return s.means(l, r, run) }
			if err := s.runGrad(runs, in, stride, out, means, dz, s.grad(p.weight[r])); err != nil {
				return err
			}
			if err := s.runBiasGrad(runs, out, dz, s.grad(p.bias[r])); err != nil {
				return err
			}
			if !s.hidden(l) {
				continue // the gradient of the features is not needed
			}
			if err := s.relationMeansGrad(l, r, runs, dz, s.ptr(p.weight[r])); err != nil {
				return err
			}
		}
	}
	switch {
	case !s.hidden(l):
		return nil
	case p.root == nil:
		return s.relationInputGrad(l, h, nil)
	}
	return s.relationInputGrad(l, h, func(to cuda.DevicePtr) error {
		for t := range s.cfg.Schema.Types {
			for _, run := range s.runs(l, t) {
				if err := s.gemm(opNT, &gemmParams{M: run.n, N: s.cfg.typeWidth(l, t), K: out,
					LDA: out, LDB: out, LDC: stride, A: row(dz, run.row, out), B: s.ptr(p.root[t]),
					C: row(to, run.row, stride)}); err != nil {
					return err
				}
			}
		}
		return nil
	})
}
