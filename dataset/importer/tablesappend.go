package importer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/names"
	"helios/dataset/npy"
	tables "helios/dataset/table"
	"helios/internal/errs"
	"helios/internal/options"
)

// An import that appends makes a new folder of the dataset's files and, behind them, of the rows of
// tables. It takes the place of the old one in one step at the end. Old nodes keep numbers, rows
// and splits, so "load" writes the rows of new nodes only. The result is that of one import of the old
// tables and the new ones, with the old statistics and classes.

// openBase opens the dataset that is added to.
func (t *tableImport) openBase() (err error) {
	o := &t.opt
	for _, x := range []struct {
		key string
		set bool
	}{{"like", o.Like != ""}, {"undirected", o.Undirected}, {"add-reverse", o.AddReverse},
		{"dedup", o.Dedup}, {"self-loops", o.SelfLoops != "" && o.SelfLoops != "keep"},
		{"target", o.Target != "" && o.Target != dataset.TargetClass},
		{"make-splits", o.MakeSplits}, {"name", o.Name != ""}, {"pad", o.Pad}} {
		if x.set {
			return errs.New(errs.Usage, "%v beside {append}: the dataset has decided that; leave it out",
				errs.Key(x.key))
		}
	}
	if t.opt.Out, err = filepath.EvalSymlinks(o.Out); err != nil {
		return errs.New(errs.Usage, "{append}: %w; {out} names the dataset that is added to", err)
	}
	if t.base, err = dataset.Open(t.opt.Out); err != nil {
		return err
	}
	m := &t.base.Meta
	switch task := &m.Graph().Tasks[0]; {
	case m.Source.Kind != "tables":
		return errs.New(errs.Capability,
			"{append}: %s was made by import %s, and only datasets of tables are added to", o.Out,
			m.Source.Kind)
	case task.Target != dataset.TargetClass:
		return errs.New(errs.Capability,
			"{append}: %s has the target %s, and only datasets of classes are added to; import it again with all tables",
			o.Out, task.Target)
	}
	return nil
}

// complete fills a description in with the types and relations that are there already, in their
// order.
func (d *TablesDescription) complete(base *dataset.Dataset) error {
	g := base.Meta.Graph()
	if len(g.NodeTypes) == 1 && len(g.Relations) == 1 && len(d.Nodes) <= 1 && len(d.Edges) <= 1 {
		if len(d.Nodes) == 1 {
			g.NodeTypes[0].Name = d.Nodes[0].NodeType
		}
		r := &g.Relations[0]
		r.Src, r.Dst = g.NodeTypes[0].Name, g.NodeTypes[0].Name
		if len(d.Edges) == 1 && len(d.Edges[0].Relation) == 3 {
			r.Name = d.Edges[0].Relation[1]
		}
	}
	var nodes []NodeTable
	for _, x := range g.NodeTypes {
		n := NodeTable{NodeType: x.Name}
		its := func(n NodeTable) bool { return n.NodeType == x.Name }
		if i := slices.IndexFunc(d.Nodes, its); i >= 0 {
			n = d.Nodes[i]
			d.Nodes = slices.Delete(d.Nodes, i, i+1)
		}
		nodes = append(nodes, n)
	}
	var edges []EdgeTable
	for i := 0; i < len(g.Relations); i++ {
		r := &g.Relations[i]
		e := EdgeTable{Relation: texts{r.Src, r.Name, r.Dst}}
		back := ""
		if r.Reverse != nil && *r.Reverse == i+1 {
			i++
			back = g.Relations[i].Name
		}
		if k := slices.IndexFunc(d.Edges, func(x EdgeTable) bool {
			return slices.Equal(x.Relation, e.Relation)
		}); k >= 0 {
			e = d.Edges[k]
			d.Edges = slices.Delete(d.Edges, k, k+1)
		}
		if e.Reverse != "" && e.Reverse != back {
			return e.bad("reverse %s: the dataset has %q there", brief(e.Reverse), back)
		}
		e.Reverse = back
		once := list(base.Meta.Source.Options[dedupEdges])
		e.Dedup = e.Dedup || slices.Contains(once, strconv.Itoa(len(edges)))
		edges = append(edges, e)
	}
	if len(d.Nodes) > 0 {
		return d.Nodes[0].bad("node_type %s is not in the dataset; {append} adds to types that are there",
			brief(d.Nodes[0].NodeType))
	}
	if len(d.Edges) > 0 {
		return d.Edges[0].bad("relation %v is not in the dataset; {append} adds to relations that are there",
			&d.Edges[0])
	}
	d.Nodes, d.Edges = nodes, edges
	return nil
}

// baseNodes is the number of nodes of a type that are there already.
func (t *tableImport) baseNodes(i int) int64 {
	if t.base == nil {
		return 0
	}
	return t.base.Meta.Graph().NodeTypes[i].Nodes
}

// edgeNodes is the option of a dataset's source that lists the types whose nodes no table had.
const edgeNodes = "nodes-of-edges"

// openType reports whether nodes of a type are those that edges name.
func (t *tableImport) openType(i int) bool {
	if t.nodes[i] != nil || t.base == nil {
		return t.nodes[i] == nil
	}
	return slices.Contains(list(t.base.Meta.Source.Options[edgeNodes]), strconv.Itoa(i))
}

// noteOpen notes the types whose nodes are those that edges name.
func (t *tableImport) noteOpen() {
	var open []string
	for i, src := range t.nodes {
		if src == nil {
			open = append(open, strconv.Itoa(i))
		}
	}
	if open != nil {
		t.m.Source.Options[edgeNodes] = strings.Join(open, ",")
	}
}

// dedupEdges is the option of a dataset's source that lists the entries of a description whose
// repeated edges are stored once.
const dedupEdges = "dedup-of-edges"

// noteDedup notes the entries whose repeated edges are stored once, for tables that are added.
func (t *tableImport) noteDedup() {
	var once []string
	for i := range t.d.Edges {
		if t.d.Edges[i].Dedup {
			once = append(once, strconv.Itoa(i))
		}
	}
	if once != nil {
		t.m.Source.Options[dedupEdges] = strings.Join(once, ",")
	}
}

// namesOf opens the names of a type's nodes that are there; nil: they have none.
func (t *tableImport) namesOf(i int) (m *dataset.NameMap, err error) {
	if m, err = t.base.NameMap(i); err != nil {
		return nil, err
	}
	n := &t.d.Nodes[i]
	if t.nodes[i] == nil || (m != nil) == (n.NodeIDCol != "") {
		return m, nil
	}
	if m == nil {
		return nil, n.bad("the dataset's nodes have no names; leave the column of ids out")
	}
	return nil, errors.Join(n.bad("the dataset's nodes have names; name the column of ids"), m.Close())
}

// addBase adds the names of the nodes that are there.
func (t *tableImport) addBase(ctx context.Context, j *names.Join, i int) (err error) {
	m, err := t.namesOf(i)
	if err != nil {
		return err
	}
	b := tables.Batch{File: t.base.Path(dataset.NameMapName)}
	flush := func() error {
		d, err := j.Deal(&b, &b.Columns[0])
		if err != nil {
			return err
		}
		b.Rows = 0
		return errors.Join(j.Add(d), ctx.Err())
	}
	put := func(name []byte) error {
		if b.Rows == 0 {
			b.Columns = []tables.Column{{Name: "name", Kind: tables.Text, Offsets: []int{0}}}
		}
		c := &b.Columns[0]
		c.Data = append(c.Data, name...)
		c.Offsets = append(c.Offsets, len(c.Data))
		if b.Rows++; b.Rows < 1<<14 {
			return nil
		}
		return flush()
	}
	if m != nil {
		err = errors.Join(m.Each(put), m.Close())
	} else {
		var room []byte
		for v := int64(0); v < t.baseNodes(i) && err == nil; v++ {
			room = strconv.AppendInt(room[:0], v, 10)
			err = put(room)
		}
	}
	if err == nil && b.Rows > 0 {
		err = flush()
	}
	return err
}

// baseEdges are the edges of an entry of the description that are there; nil: the import adds to
// none.
func (t *tableImport) baseEdges(entry int) ([]edges.Source, error) {
	if t.base == nil {
		return nil, nil
	}
	g := t.base.Meta.Graph()
	rel := 0
	for k := range entry { // reverses come behind their relations
		if rel++; t.d.Edges[k].Reverse != "" {
			rel++
		}
	}
	r := &g.Relations[rel]
	of := ends{g.NodeTypes[g.TypeOf(r.Src)].Nodes, g.NodeTypes[g.TypeOf(r.Dst)].Nodes}
	ptr, err := npy.Open(t.base.Path(filepath.Join(r.Dir, dataset.IndptrName)))
	if err != nil {
		return nil, err
	}
	idx, err := npy.Open(t.base.Path(filepath.Join(r.Dir, dataset.IndicesName)))
	if err != nil {
		return nil, err
	}
	s, err := offsetEdges(ptr, idx, of, true)
	return []edges.Source{s}, err
}

// droppedCounts name the counts of edges left out, which add up over imports.
var droppedCounts = []string{"duplicate-edges", "self-loops-dropped", danglingDropped}

// likeBase takes from the dataset what a first import was told.
func (t *tableImport) likeBase(ctx context.Context) error {
	m := &t.base.Meta
	o := maps.Clone(m.Source.Options)
	t.both = o["undirected"] != "" || o["add-reverse"] != ""
	t.o.Dedup = o["dedup"] != "" || o["undirected"] != ""
	t.o.SelfLoops = o["self-loops"]
	t.o.Name, t.m.Name, t.pad = m.Name, m.Name, true
	from := t.m.Source.From
	t.m.Source.Options = o
	t.m.Source.From = slices.Concat(m.Source.From, from)
	t.m.Source.Appended = append(slices.Clone(m.Source.Appended),
		dataset.Addition{UUID: m.UUID, Input: t.input})
	for _, name := range droppedCounts {
		if n := m.Source.Counts[name]; n > 0 {
			t.m.Source.Counts[name] = n
		}
	}
	if err := t.likeDealt(o); err != nil {
		return err
	}
	// Its arrays are read without the seal, and rows of a sealed dataset with it.
	verify := dataset.VerifyFiles
	if t.base.Sealed() {
		verify = dataset.VerifyAllButRows
	}
	_, err := verify(ctx, t.base, t.o.Progress)
	return err
}

// likeDealt takes the seed and the shares of the splits that the dataset's nodes were dealt by;
// others that are given are refused.
func (t *tableImport) likeDealt(base map[string]string) error {
	if base["split"] != "random" { // its tables had splits: what is given deals the new nodes
		base["seed"] = strconv.FormatUint(t.o.Seed, 10)
		return nil
	}
	for _, key := range append([]string{"seed"}, shareKeys[:]...) {
		o, _ := options.Find(&t.o.Output, key)
		was := cmp.Or(base[key], o.Default) // of shares the usual ones are not noted
		if x := fmt.Sprint(o.Value()); x != was && t.o.given(o) {
			return errs.New(errs.Usage, "%v %s beside {append}: nodes of %s were dealt by %s; leave it out",
				errs.Key(key), x, t.opt.Out, was)
		}
		if err := o.Set(was); err != nil {
			return err
		}
	}
	t.o.note("new nodes without a split are dealt as the old ones were: %g to train, %g to val, by seed %d",
		t.o.TrainFraction, t.o.ValFraction, t.o.Seed)
	return nil
}

// baseTask puts labels and splits of the nodes that are there before those of the new ones, which
// have no labels where the table says none.
func (t *tableImport) baseTask(i int) error {
	g := t.base.Meta.Graph()
	n := g.NodeTypes[i].Nodes
	if err := t.needMemory("labels and splits of the nodes", t.m.Nodes, 5); err != nil {
		return err
	}
	old, err := t.base.TaskLabels(0)
	if err != nil {
		return err
	}
	if t.labels == nil && g.Tasks[0].Unlabelled == n {
		return nil
	}
	if more := t.m.Nodes - n; t.labels == nil && more > 0 {
		t.o.note("no label and no split, as {label} names no column: %d nodes that are added", more)
	}
	labels := make([]int32, t.m.Nodes)
	copy(labels, old)
	for v := n; v < t.m.Nodes; v++ {
		if labels[v] = noLabel; t.labels != nil {
			labels[v] = t.labels[v-n]
		}
	}
	splits := make([]int8, n)
	for v := range splits {
		splits[v] = -1
	}
	for s, name := range dataset.Splits {
		ids, err := t.base.Split(name)
		if err != nil {
			return err
		}
		for _, v := range ids {
			splits[v] = int8(s)
		}
	}
	t.labels, t.earlier, t.used, t.o.UnlabelledOK = labels, splits, nil, true
	t.o.NumClasses, t.classesFrom = int64(g.Tasks[0].Classes), t.opt.Out
	t.file = t.base.Path(filepath.Join(g.Tasks[0].Dir, dataset.LabelsName))
	if of := t.splitOf; of != nil {
		t.splitOf = func(v int64) int { return of(v - n) }
	}
	return nil
}

// baseRows returns what writes the rows of a type's nodes that are there.
func (t *tableImport) baseRows(i int) func(*featureWriter) error {
	return func(w *featureWriter) error {
		if t.base == nil {
			return nil
		}
		g, dim, first := t.base.Meta.Graph(), t.base.Meta.Dim, int64(0)
		for _, x := range g.NodeTypes[:i] {
			first += x.Nodes
		}
		its := &g.NodeTypes[i]
		each := max(int64(baseRowsBytes/4/dim), 1)
		xs := make([]float32, each*int64(dim))
		for v := int64(0); v < its.Nodes; v += each {
			xs = xs[:min(each, its.Nodes-v)*int64(dim)]
			if err := t.base.Rows(first+v, xs); err != nil {
				return err
			}
			for row := range slices.Chunk(xs, dim) { // of a narrow type it ends in zeros
				if err := w.put(row[:its.Dim]); err != nil {
					return err
				}
			}
		}
		return nil
	}
}

// baseRowsBytes are read at a time.
const baseRowsBytes = 1 << 20
