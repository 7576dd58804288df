package dataset

import (
	"context"
	"math"
	"path/filepath"
	"strings"

	"helios/dataset/pickle"
	"helios/internal/errs"
)

// planetoidVal is the number of validation nodes of the public split (Yang et al., ICML 2016; Kipf and
// Welling, ICLR 2017): those after the labelled ones.
const planetoidVal = 500

// ImportPlanetoid imports CiteSeer, Cora or PubMed as the Planetoid authors published them: In is the folder of
// ind.NAME.{x,tx,allx,y,ty,ally,graph,test.index}, or the path up to NAME. Rows of tx and ty
// belong to the nodes that test.index lists; a node that no file has a row for (CiteSeer has 15) gets
// zeros and no label. The splits are the public ones: as many training nodes as y has rows, the 500 nodes after
// them, and test.index. The graph is undirected: each edge gets its opposite, repeated ones go.
func ImportPlanetoid(ctx context.Context, o ImportOptions) error {
	name := o.Name
	if err := o.fillFor(o.In + ".graph"); err != nil {
		return err
	}
	for _, f := range [][2]string{{"--features", o.Features}, {"--labels", o.Labels}, {"--splits", o.SplitDir}, {"--feature-fn", o.FeatureFn}} {
		if f[1] != "" {
			return errs.New(errs.Usage, "%s: planetoid files hold features, labels and splits; leave the flag out", f[0])
		}
	}
	if o.Nodes != 0 {
		return errs.New(errs.Usage, "--nodes: test.index tells the number of nodes; leave the flag out")
	}
	if n := o.Format.NormalizeFeatures; n != "" && n != "row" {
		return errs.New(errs.Usage, "--normalize-features %q is not known; give row, or leave it out", n)
	}
	prefix, err := planetoidPrefix(o.In, name)
	if err != nil {
		return err
	}
	o.In = filepath.Dir(prefix)
	o.Undirected = true
	return runImport(o, "planetoid", func(im *importer) error { return im.fromPlanetoid(ctx, prefix) })
}

// planetoidPrefix finds dir/ind.NAME; of several, the one that is called name.
func planetoidPrefix(in, name string) (string, error) {
	if isFile(in + ".graph") {
		return in, nil
	}
	if isFile(in) { // one of the files
		name := strings.TrimSuffix(in, ".index")
		if p := strings.TrimSuffix(name, filepath.Ext(name)); isFile(p + ".graph") {
			return p, nil
		}
		return "", errs.New(errs.Usage, "%s: there is no ind.NAME.graph beside it; give the folder of a Planetoid dataset", in)
	}
	names, err := filepath.Glob(filepath.Join(in, "ind.*.graph"))
	if err != nil || len(names) == 0 {
		return "", errs.New(errs.Usage, "%s has no ind.NAME.graph; give the folder of a Planetoid dataset", in)
	}
	if len(names) > 1 {
		var have []string
		for _, n := range names {
			one := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(n), "ind."), ".graph")
			if strings.EqualFold(one, name) {
				return strings.TrimSuffix(n, ".graph"), nil
			}
			have = append(have, one)
		}
		return "", errs.New(errs.Usage, "%s has %d datasets; choose one of %s with --name, or give the path of one, such as %s", in, len(names), briefNames(have), names[0])
	}
	return strings.TrimSuffix(names[0], ".graph"), nil
}

// planetoid is the content of the files.
type planetoid struct {
	prefix      string
	x, tx, allx *pickle.CSR
	y, ty, ally [][]float64 // one-hot rows
	graph       *pickle.Dict
	test        []int64
	nodes       int64
}

func (im *importer) fromPlanetoid(ctx context.Context, prefix string) error {
	p := &planetoid{prefix: prefix}
	if err := p.load(max(memoryBudget(im.o.Memory), leastMemory) / 8); err != nil {
		return err
	}
	o := &im.o
	im.m.Nodes = p.nodes
	im.m.Source = o.source("planetoid", prefix)
	if o.Format.NormalizeFeatures != "" {
		im.m.Source.Options["normalize-features"] = o.Format.NormalizeFeatures
	}
	if err := im.edgesFrom(ctx, p.edges()); err != nil {
		return err
	}
	if err := im.topology(ctx); err != nil {
		return err
	}
	if err := im.planetoidFeatures(p); err != nil {
		return err
	}
	labels, err := p.labels()
	if err != nil {
		return err
	}
	n := int64(len(p.y))
	val := min(planetoidVal, p.allx.Rows-n)
	return im.labelsAndSplits(labels, p.file("ally"), []splitSet{
		{p.file("y"), rangeOf(0, n)}, {p.file("ally"), rangeOf(n, n+val)}, {p.file("test.index"), p.test},
	})
}

func rangeOf(lo, hi int64) []int64 {
	v := make([]int64, 0, hi-lo)
	for ; lo < hi; lo++ {
		v = append(v, lo)
	}
	return v
}

func (p *planetoid) file(part string) string { return p.prefix + "." + part }

func (p *planetoid) bad(part, format string, a ...any) error {
	return errs.New(errs.Usage, "%s: "+format, append([]any{p.file(part)}, a...)...)
}

// load reads all files, each in at most memory bytes, and checks them against each other.
func (p *planetoid) load(memory int64) error {
	for _, f := range []struct {
		part string
		to   **pickle.CSR
	}{{"x", &p.x}, {"tx", &p.tx}, {"allx", &p.allx}} {
		v, err := pickle.Load(p.file(f.part), memory)
		if err != nil {
			return err
		}
		m, ok := v.(*pickle.CSR)
		if !ok {
			return p.bad(f.part, "holds %s, not a csr_matrix of features", pickle.Describe(v))
		}
		if m.Cols < 1 || m.Cols > maxDim {
			return p.bad(f.part, "%d features per node; 1 to %d are read", m.Cols, maxDim)
		}
		*f.to = m
	}
	for _, f := range []struct {
		part string
		to   *[][]float64
		rows *pickle.CSR
		x    string
	}{{"y", &p.y, p.x, "x"}, {"ty", &p.ty, p.tx, "tx"}, {"ally", &p.ally, p.allx, "allx"}} {
		v, err := pickle.Load(p.file(f.part), memory)
		if err != nil {
			return err
		}
		a, ok := v.(*pickle.Array)
		if !ok || len(a.Shape) != 2 || a.Fortran {
			return p.bad(f.part, "holds no array (nodes, classes) of one-hot labels in C order")
		}
		if a.Shape[0] != f.rows.Rows {
			return p.bad(f.part, "has %d rows, %s has %d", a.Shape[0], p.file(f.x), f.rows.Rows)
		}
		if len(p.y) > 0 && a.Shape[1] != int64(len(p.y[0])) {
			return p.bad(f.part, "has %d classes, %s has %d", a.Shape[1], p.file("y"), len(p.y[0]))
		}
		all, err := a.Floats()
		if err != nil {
			return p.bad(f.part, "%w", err)
		}
		for r := range a.Shape[0] {
			*f.to = append(*f.to, all[r*a.Shape[1]:(r+1)*a.Shape[1]])
		}
	}
	if p.tx.Cols != p.allx.Cols || p.x.Cols != p.allx.Cols {
		return p.bad("allx", "has %d features, x has %d and tx %d", p.allx.Cols, p.x.Cols, p.tx.Cols)
	}
	if p.x.Rows < 1 || p.x.Rows > p.allx.Rows {
		return p.bad("x", "has %d rows, which must be the first of the %d of allx", p.x.Rows, p.allx.Rows)
	}
	v, err := pickle.Load(p.file("graph"), memory)
	if err != nil {
		return err
	}
	var ok bool
	if p.graph, ok = v.(*pickle.Dict); !ok {
		return p.bad("graph", "holds %s, not a dictionary of neighbours", pickle.Describe(v))
	}
	return p.testIndex()
}

// testIndex reads the ids of the test nodes, in the order of tx and ty.
func (p *planetoid) testIndex() error {
	l, err := openLines(p.file("test.index"))
	if err != nil {
		return err
	}
	defer l.close()
	seen := map[int64]bool{}
	p.nodes = p.allx.Rows
	for {
		more, err := l.next()
		if err != nil {
			return err
		}
		if !more {
			break
		}
		id, ok := parseID(l.fields[0])
		// What a gap holds is made up, so ids far beyond the rows are damage and not gaps.
		if limit := p.allx.Rows + 2*p.tx.Rows; !ok || id < p.allx.Rows || id >= limit {
			return l.bad("%q is not a test node: they come after the %d rows of allx and below %d", clip(l.fields[0]), p.allx.Rows, limit)
		}
		if seen[id] {
			return l.bad("node %d is listed twice", id)
		}
		seen[id] = true
		p.test = append(p.test, id)
		p.nodes = max(p.nodes, id+1)
	}
	if int64(len(p.test)) != p.tx.Rows {
		return p.bad("test.index", "lists %d nodes, %s has %d rows", len(p.test), p.file("tx"), p.tx.Rows)
	}
	return nil
}

// edges is the graph: {node: [neighbour, …]}.
func (p *planetoid) edges() edgeSource {
	total := int64(0)
	for _, v := range p.graph.Values {
		if l, ok := v.(*pickle.List); ok {
			total += int64(len(l.Items))
		}
	}
	return edgeSource{
		Name: p.file("graph"), Unit: "edges", Total: total, Parts: 1,
		Read: func(ctx context.Context, _ int, emit func(src, dst []int64) error, done func(int64)) error {
			for i, k := range p.graph.Keys {
				v, ok := k.(int64)
				l, ok2 := p.graph.Values[i].(*pickle.List)
				if !ok || !ok2 || v < 0 || v >= p.nodes {
					return p.bad("graph", "entry %d is %s: not a node id below %d with a list", i, pickle.Describe(k), p.nodes)
				}
				src, dst := make([]int64, len(l.Items)), make([]int64, len(l.Items))
				for j, x := range l.Items {
					u, ok := x.(int64)
					if !ok || u < 0 || u >= p.nodes {
						return p.bad("graph", "neighbour %d of node %d is %s: not a node id below %d", j, v, pickle.Describe(x), p.nodes)
					}
					src[j], dst[j] = u, v
				}
				if err := emit(src, dst); err != nil {
					return err
				}
				done(int64(len(src)))
			}
			return ctx.Err()
		},
	}
}

// rowOf says which matrix and row a node's features and label are in; nil in a gap.
func (p *planetoid) rows() func(v int64) (x *pickle.CSR, y [][]float64, row int64) {
	test := make(map[int64]int64, len(p.test))
	for i, v := range p.test {
		test[v] = int64(i)
	}
	return func(v int64) (*pickle.CSR, [][]float64, int64) {
		if v < p.allx.Rows {
			return p.allx, p.ally, v
		}
		if r, ok := test[v]; ok {
			return p.tx, p.ty, r
		}
		return nil, nil, 0
	}
}

func (im *importer) planetoidFeatures(p *planetoid) error {
	im.m.Dim = int(p.allx.Cols)
	w, err := im.featureWriter(p.prefix, p.allx.Cols)
	if err != nil {
		return err
	}
	rows := p.rows()
	row := make([]float32, p.allx.Cols)
	gaps := int64(0)
	for v := range p.nodes {
		clear(row)
		if m, _, r := rows(v); m != nil {
			sum := 0.0
			lo, hi := m.Indptr[r], m.Indptr[r+1]
			for i := lo; i < hi; i++ {
				sum += m.Values[i]
			}
			if im.o.Format.NormalizeFeatures == "" || sum == 0 {
				sum = 1
			}
			for i := lo; i < hi; i++ {
				x := m.Values[i] / sum
				if f := float32(x); f-f != 0 && x-x == 0 {
					_ = w.out.discard()
					return errs.New(errs.Usage, "%s: feature %d of node %d is %g, which float32 cannot hold; scale the features", p.prefix, m.Indices[i], v, x)
				}
				row[m.Indices[i]] += float32(x)
			}
		} else {
			gaps++
		}
		if err := w.put(row); err != nil {
			_ = w.out.discard()
			return err
		}
	}
	if gaps > 0 {
		im.m.Source.Counts["nodes-without-features"] = gaps
	}
	return w.out.close()
}

func (p *planetoid) labels() ([]int32, error) {
	labels := make([]int32, p.nodes)
	rows := p.rows()
	for v := range labels {
		labels[v] = noLabel
		_, y, r := rows(int64(v))
		if y == nil {
			continue
		}
		for c, x := range y[r] {
			if x == 0 {
				continue
			}
			if x != 1 || math.IsNaN(x) || labels[v] != noLabel {
				part := "ally"
				if int64(v) >= p.allx.Rows {
					part = "ty"
				}
				return nil, p.bad(part, "row %d is not one-hot: class %d has %v", r, c, x)
			}
			labels[v] = int32(c)
		}
	}
	// y repeats the first rows of ally.
	for r := range p.y {
		for c, x := range p.y[r] {
			if x != p.ally[r][c] {
				return nil, p.bad("y", "row %d differs from that of %s", r, p.file("ally"))
			}
		}
	}
	return labels, nil
}
