package importer

import (
	"context"
	"errors"
	"slices"
	"strings"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/errs"
)

// Types without rows can be given some: a node's row is the mean of the rows of its in-neighbours
// in a relation, as the baseline of MAG240M has it; zeros where it has none. Nodes are filled in
// blocks, whose sums and edges fit the budget. For a block, the distinct sources are read in
// ascending order, so the file is read forward once a block, and each sum adds its sources in the
// order of its list: the block's size changes no bit.

// FillOptions give rows to types that come without.
type FillOptions struct {
	Fill string `option:"fill" common:"yes" arg:"TYPE=mean:REL[,…]" usage:"TYPE=mean:REL[,…]: each node of TYPE gets the mean of the rows of its in-neighbours in the relation REL; later ones may use earlier ones"`
	PadOption
}

// PadOption serves formats whose types may have rows of different widths.
type PadOption struct {
	Pad bool `option:"pad" usage:"store rows of different widths as wide as the widest, though that takes over a quarter more room on SSDs"`
}

// fillRule gives nodeType the means over a relation.
type fillRule struct {
	nodeType, relation string
}

// parseFills reads {fill}.
func parseFills(text string) (rules []fillRule, err error) {
	if text == "" {
		return nil, nil
	}
	for _, part := range strings.Split(text, ",") {
		name, how, _ := strings.Cut(part, "=")
		rel, ok := strings.CutPrefix(how, "mean:")
		if !ok || name == "" || rel == "" {
			return nil, errs.New(errs.Usage,
				"{fill} %s: give TYPE=mean:RELATION, as in author=mean:rev_writes", brief(part))
		}
		if slices.ContainsFunc(rules, func(r fillRule) bool { return r.nodeType == name }) {
			return nil, errs.New(errs.Usage, "{fill}: type %s is there twice", brief(name))
		}
		rules = append(rules, fillRule{name, rel})
	}
	return rules, nil
}

// relationOf returns the relation of a rule.
func (f *fillRule) relationOf(s *dataset.Schema) (found int, err error) {
	found = -1
	var names []string
	for i := range s.Relations {
		if r := &s.Relations[i]; r.Dst == f.nodeType {
			names = append(names, r.Name)
			if r.Name == f.relation {
				if found >= 0 {
					return 0, errs.New(errs.Usage, "{fill} %s: several relations %s end at it; rename one",
						f.nodeType, f.relation)
				}
				found = i
			}
		}
	}
	if found < 0 {
		return 0, errs.New(errs.Usage,
			"{fill} %s: no relation %s ends at nodes of that type; those that do: %s",
			brief(f.nodeType), brief(f.relation), briefNames(names))
	}
	return found, nil
}

// planFills checks the rules and gives their types a width.
func (im *typedImport) planFills(s *dataset.Schema) error {
	for i := range im.fills {
		f := &im.fills[i]
		t := im.typeOf(f.nodeType)
		if t == nil {
			return errs.New(errs.Usage, "{fill} %s: there are no nodes of that type", brief(f.nodeType))
		}
		if t.dim > 0 {
			return errs.New(errs.Usage, "{fill} %s: the type has rows of its own", f.nodeType)
		}
		r, err := f.relationOf(s)
		if err != nil {
			return err
		}
		src := im.typeOf(s.Relations[r].Src)
		if src.dim == 0 {
			return errs.New(errs.Usage,
				"{fill} %s: nodes of type %s, from which %s comes, have no rows; fill these first",
				f.nodeType, src.name, f.relation)
		}
		t.dim, t.half = src.dim, src.half
		im.m.Source.Options["fill-"+f.nodeType] = "mean:" + f.relation
	}
	return nil
}

// fillBytes bounds the part of the budget that a block takes; a variable for tests.
var fillBytes int64 = 1 << 30

// filler makes the rows of one type.
type filler struct {
	*importer
	src, ptr, idx *npy.Array
	dim, budget   int64
	w             *featureWriter
}

// fillRows writes the rows of a rule's type, unless an interrupted import has.
func (im *typedImport) fillRows(ctx context.Context, s *dataset.Schema, f fillRule) error {
	r, err := f.relationOf(s)
	if err != nil {
		return err
	}
	src := s.TypeOf(s.Relations[r].Src)
	x := filler{importer: im.importer, dim: int64(im.types[src].dim)}
	w, whole, err := im.featureWriterFrom("{fill} "+f.nodeType, x.dim, im.m.Nodes)
	if err != nil || whole {
		return err
	}
	x.w = w
	if err := x.run(ctx, dataset.NodesDir(src), dataset.EdgesDir(r)); err != nil {
		return errors.Join(err, w.out.Discard())
	}
	return w.out.Close()
}

func (x *filler) run(ctx context.Context, nodes, edges string) (err error) {
	for name, a := range map[string]**npy.Array{nodes + "/features.npy": &x.src,
		edges + "/indptr.npy": &x.ptr, edges + "/indices.npy": &x.idx} {
		if *a, err = npy.Open(x.s.Path(name)); err != nil {
			return err
		}
	}
	x.budget = min(max(x.o.Memory, leastMemory)/2, fillBytes)
	// An interrupted import may have written a part of the rows, whole ones.
	for first := x.w.n / x.dim; first < x.m.Nodes; {
		offsets, err := x.block(first)
		if err != nil {
			return err
		}
		if err := x.fill(offsets); err != nil {
			return err
		}
		first += int64(len(offsets)) - 1
		x.o.Progress.Report("fill", first, x.m.Nodes)
		if x.s.Journaled() {
			if err := x.s.MarkArray(x.w.out); err != nil {
				return err
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// edgeBytes is the memory of an edge of a block, with what sorting takes.
const edgeBytes = 32

// block returns the offsets of the nodes from first on whose sums and edges fit the budget.
func (x *filler) block(first int64) (offsets []int64, err error) {
	r, err := x.ptr.Reader(first)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	one := make([]int64, 1)
	for int64(len(offsets)) <= x.m.Nodes-first {
		if err := fill(r, one); err != nil {
			return nil, err
		}
		n := int64(len(offsets))
		if n > 0 {
			need := n*(4*x.dim+8) + (one[0]-offsets[0])*edgeBytes
			if need > x.budget && n > 1 {
				break
			}
			if need > x.budget {
				if err := x.needMemory("the neighbours of one node", one[0]-offsets[0],
					edgeBytes); err != nil {
					return nil, err
				}
			}
		}
		offsets = append(offsets, one[0])
	}
	return offsets, nil
}

// edge is an edge of a block: its source, and its destination within the block.
type edge struct{ src, dst int64 }

// fill writes the rows of a block.
func (x *filler) fill(offsets []int64) error {
	n := int64(len(offsets)) - 1
	ids := make([]int64, offsets[n]-offsets[0])
	r, err := x.idx.Reader(offsets[0])
	if err == nil {
		err = fill(r, ids)
		r.Close()
	}
	if err != nil {
		return err
	}
	all := make([]edge, 0, len(ids))
	for v := range n {
		for _, u := range ids[offsets[v]-offsets[0] : offsets[v+1]-offsets[0]] {
			all = append(all, edge{u, v})
		}
	}
	// Stable, so a node's sources keep the order of its list.
	slices.SortStableFunc(all, func(a, b edge) int { return int(a.src - b.src) })
	sums := make([]float32, n*x.dim)
	if err := x.sum(all, sums); err != nil {
		return err
	}
	for v := range n {
		if d := offsets[v+1] - offsets[v]; d > 0 {
			for i := range sums[v*x.dim : (v+1)*x.dim] {
				sums[v*x.dim+int64(i)] /= float32(d)
			}
		}
	}
	return x.w.put(sums)
}

// sum adds the rows of all sources to the sums of their destinations.
func (x *filler) sum(all []edge, sums []float32) error {
	row := make([]float32, x.dim)
	var r *npy.Reader
	next := int64(-1) // the row that r is at
	defer func() {
		if r != nil {
			r.Close()
		}
	}()
	for i := 0; i < len(all); {
		u := all[i].src
		// A short gap is read through; a reader costs more.
		for r != nil && next < u && u-next <= 64 {
			if err := fillFloats(r, row); err != nil {
				return err
			}
			next++
		}
		if r == nil || next != u {
			if r != nil {
				r.Close()
			}
			var err error
			if r, err = x.src.Reader(u * x.dim); err != nil {
				return err
			}
		}
		if err := fillFloats(r, row); err != nil {
			return err
		}
		next = u + 1
		for ; i < len(all) && all[i].src == u; i++ {
			to := sums[all[i].dst*x.dim:][:x.dim]
			for k, v := range row {
				to[k] += v
			}
		}
	}
	return nil
}

// fillFloats reads as many numbers as dst has.
func fillFloats(r *npy.Reader, dst []float32) error {
	for len(dst) > 0 {
		n, err := r.Float32s(dst)
		if err != nil {
			return err
		}
		dst = dst[n:]
	}
	return nil
}
