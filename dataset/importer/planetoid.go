package importer

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"strings"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/pickle"
	"helios/internal/errs"
)

var planetoidFormat = newFormat(Format{Name: "planetoid",
	Usage:       "CiteSeer, Cora and PubMed as published with Planetoid, with the public splits",
	Description: planetoidHelp}, Planetoid)

// PlanetoidOptions shape an import of Planetoid's files, which hold features, labels and splits. Of
// a folder with several datasets, Name chooses one. The graph is always undirected.
type PlanetoidOptions struct {
	NormalizeFeatures string `option:"normalize-features" arg:"HOW" oneof:"row" usage:"HOW: row divides each node's features by their sum, as GCN's reference does"`
	Input
	SelfLoops string `option:"self-loops" oneof:"keep,drop,add" default:"keep" usage:"edges from a node to itself: keep those that are there, drop them, or add one to each node, in place of what is there"`
	Output
}

const planetoidHelp = "{in} is the folder of ind.NAME.{x,tx,allx,y,ty,ally,graph,test.index}. Pickles are read by a reader that\n" +
	"knows only NumPy arrays, csr_matrix and dictionaries of lists, and runs nothing. The graph is made undirected.\n" +
	"Where the folder has several datasets, {name} chooses one, as in \"cora\"."

// planetoidVal is the number of validation nodes of the public split (Yang et al., ICML 2016; Kipf
// and Welling, ICLR 2017): those after the labelled ones.
const planetoidVal = 500

// Planetoid imports CiteSeer, Cora or PubMed (planetoidHelp). Rows of tx and ty belong to the nodes
// that test.index lists; a node that no file has a row for (CiteSeer has 15) gets zeros and no
// label. The splits are the public ones: as many training nodes as y has rows, the 500 nodes after
// them, and test.index.
func Planetoid(ctx context.Context, o PlanetoidOptions) error {
	name := o.Name
	r := request{kind: "planetoid", options: &o,
		Options: Options{Input: o.Input, SelfLoops: o.SelfLoops,
			Output: o.Output, Undirected: true}}
	if err := r.fillFor(o.In + ".graph"); err != nil {
		return err
	}
	prefix, err := planetoidPrefix(o.In, name)
	if err != nil {
		return err
	}
	r.In = filepath.Dir(prefix)
	return run(r, func(im *importer) error {
		return (&planetoidImport{im, o}).run(ctx, prefix)
	})
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
		return "", errs.New(errs.Usage,
			"%s: there is no ind.NAME.graph beside it; give the folder of a Planetoid dataset", in)
	}
	names, err := filepath.Glob(filepath.Join(in, "ind.*.graph"))
	if err != nil || len(names) == 0 {
		return "", errs.New(errs.Usage,
			"%s has no ind.NAME.graph; give the folder of a Planetoid dataset", in)
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
		return "", errs.New(errs.Usage,
			"%s has %d datasets; choose one of %s with {name}, or give the path of one, such as %s",
			in, len(names), briefNames(have), names[0])
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

// planetoidImport is an import of Planetoid's files.
type planetoidImport struct {
	*importer
	opt PlanetoidOptions
}

func (im *planetoidImport) run(ctx context.Context, prefix string) error {
	p := &planetoid{prefix: prefix}
	if err := p.load(max(edges.Budget(im.o.Memory), leastMemory) / 8); err != nil {
		return err
	}
	o := &im.o
	if st, err := os.Stat(o.In); err == nil && st.IsDir() {
		var used []string
		for _, part := range []string{"x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"} {
			used = append(used, p.file(part))
		}
		im.noteUnused(o.In, append(unusedFiles(o.In, used...), subfolders(o.In)...))
	}
	im.m.Nodes = p.nodes
	im.m.Source = o.source("planetoid", prefix)
	if im.opt.NormalizeFeatures != "" {
		im.m.Source.Options["normalize-features"] = im.opt.NormalizeFeatures
	}
	labels, err := p.labels()
	if err != nil {
		return err
	}
	n := int64(len(p.y))
	im.o.NumClasses, im.classesFrom = int64(len(p.y[0])), p.file("y")
	val := min(planetoidVal, p.allx.Rows-n)
	return im.write(ctx, parts{edges: p.edges(), labels: labels, labelFile: p.file("ally"),
		write: func() error { return im.planetoidFeatures(p) },
		splits: []splitSet{{p.file("y"), rangeOf(0, n)}, {p.file("ally"), rangeOf(n, n+val)},
			{p.file("test.index"), p.test}}})
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
func (p *planetoid) load(memory int64) (err error) {
	xs, ys := []**pickle.CSR{&p.x, &p.tx, &p.allx}, []*[][]float64{&p.y, &p.ty, &p.ally}
	for i, part := range []string{"x", "tx", "allx"} {
		if *xs[i], err = p.matrix(part, memory); err != nil {
			return err
		}
	}
	for i, part := range []string{"y", "ty", "ally"} {
		if *ys[i], err = p.oneHot(part, *xs[i], strings.Replace(part, "y", "x", 1),
			memory); err != nil {
			return err
		}
	}
	if p.tx.Cols != p.allx.Cols || p.x.Cols != p.allx.Cols {
		return p.bad("allx", "has %d features, x has %d and tx %d", p.allx.Cols, p.x.Cols,
			p.tx.Cols)
	}
	if p.x.Rows < 1 || p.x.Rows > p.allx.Rows {
		return p.bad("x", "has %d rows, which must be the first of the %d of allx", p.x.Rows,
			p.allx.Rows)
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

// matrix reads features.
func (p *planetoid) matrix(part string, memory int64) (*pickle.CSR, error) {
	v, err := pickle.Load(p.file(part), memory)
	if err != nil {
		return nil, err
	}
	m, ok := v.(*pickle.CSR)
	if !ok {
		return nil, p.bad(part, "holds %s, not a csr_matrix of features", pickle.Describe(v))
	}
	if m.Cols < 1 || m.Cols > dataset.MaxDim {
		return nil, p.bad(part, "%d features per node; 1 to %d are read", m.Cols, dataset.MaxDim)
	}
	return m, nil
}

// oneHot reads the labels of the rows of x, whose file is called xPart.
func (p *planetoid) oneHot(part string, x *pickle.CSR, xPart string, memory int64) (
	labels [][]float64, err error) {
	v, err := pickle.Load(p.file(part), memory)
	if err != nil {
		return nil, err
	}
	a, ok := v.(*pickle.Array)
	if !ok || len(a.Shape) != 2 || a.Fortran {
		return nil, p.bad(part, "holds no array (nodes, classes) of one-hot labels in C order")
	}
	if a.Shape[0] != x.Rows {
		return nil, p.bad(part, "has %d rows, %s has %d", a.Shape[0], p.file(xPart), x.Rows)
	}
	if len(p.y) > 0 && a.Shape[1] != int64(len(p.y[0])) {
		return nil, p.bad(part, "has %d classes, %s has %d", a.Shape[1], p.file("y"), len(p.y[0]))
	}
	all, err := a.Floats()
	if err != nil {
		return nil, p.bad(part, "%w", err)
	}
	for r := range a.Shape[0] {
		labels = append(labels, all[r*a.Shape[1]:(r+1)*a.Shape[1]])
	}
	return labels, nil
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
		id, ok := parseID(l.text)
		// The content of a gap is made up, so ids far beyond the rows are damage and not gaps.
		if limit := p.allx.Rows + 2*p.tx.Rows; !ok || id < p.allx.Rows || id >= limit {
			return l.bad("%q is not a test node: they come after the %d rows of allx and below %d",
				clip(l.text), p.allx.Rows, limit)
		}
		if seen[id] {
			return l.bad("node %d is listed twice", id)
		}
		seen[id] = true
		p.test = append(p.test, id)
		p.nodes = max(p.nodes, id+1)
	}
	if int64(len(p.test)) != p.tx.Rows {
		return p.bad("test.index", "lists %d nodes, %s has %d rows", len(p.test), p.file("tx"),
			p.tx.Rows)
	}
	return nil
}

// edges is the graph: {node: [neighbour, …]}.
func (p *planetoid) edges() edges.Source {
	total := int64(0)
	for _, v := range p.graph.Values {
		if l, ok := v.(*pickle.List); ok {
			total += int64(len(l.Items))
		}
	}
	return edges.Source{
		Name: p.file("graph"), Unit: "edges", Total: total, Parts: 1,
		Read: func(ctx context.Context, _ int, emit func(src, dst []int64) error,
			done func(int64)) error {
			for i, k := range p.graph.Keys {
				v, ok := k.(int64)
				l, ok2 := p.graph.Values[i].(*pickle.List)
				if !ok || !ok2 || v < 0 || v >= p.nodes {
					return p.bad("graph", "entry %d is %s: not a node id below %d with a list", i,
						pickle.Describe(k), p.nodes)
				}
				src, dst := make([]int64, len(l.Items)), make([]int64, len(l.Items))
				for j, x := range l.Items {
					u, ok := x.(int64)
					if !ok || u < 0 || u >= p.nodes {
						return p.bad("graph",
							"neighbour %d of node %d is %s: not a node id below %d", j, v,
							pickle.Describe(x), p.nodes)
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

// rows returns a function from a node to the matrix and row of its features and label; nil in a
// gap.
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

func (im *planetoidImport) planetoidFeatures(p *planetoid) error {
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
			if im.opt.NormalizeFeatures == "" || sum == 0 {
				sum = 1
			}
			for i := lo; i < hi; i++ {
				x := m.Values[i] / sum
				if f := float32(x); f-f != 0 && x-x == 0 {
					_ = w.out.Discard()
					return errs.New(errs.Usage,
						"%s: feature %d of node %d is %g, which float32 cannot hold; scale the features",
						p.prefix, m.Indices[i], v, x)
				}
				row[m.Indices[i]] += float32(x)
			}
		} else {
			gaps++
		}
		if err := w.put(row); err != nil {
			_ = w.out.Discard()
			return err
		}
	}
	if gaps > 0 {
		im.m.Source.Counts["nodes-without-features"] = gaps
	}
	return w.out.Close()
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
