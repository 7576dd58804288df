package importer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"helios/dataset"
	"helios/dataset/columns"
	"helios/dataset/edges"
	tables "helios/dataset/table"
	"helios/internal/errs"
	"helios/internal/infile"
)

var tablesFormat = reportingFormat[TablesOptions](Format{Name: "tables",
	Usage:       "tables of nodes and edges whose ids are names: CSV, Parquet, Arrow, JSON lines",
	Description: tablesHelp}, Tables)

// TablesOptions shape an import of tables.
type TablesOptions struct {
	Nodes    string `option:"nodes" common:"yes" arg:"FILES" usage:"FILES of the table of nodes, a row each: a file, a folder of parts, or a pattern"`
	ID       string `option:"id" common:"yes" arg:"COLUMN" shown:"nodes are called 0, 1, …" usage:"COLUMN of the nodes' names"`
	Edges    string `option:"edges" common:"yes" arg:"FILES" usage:"FILES of the table of edges, a row each"`
	Src      string `option:"src" common:"yes" arg:"COLUMN" usage:"COLUMN of the names of the edges' sources"`
	Dst      string `option:"dst" common:"yes" arg:"COLUMN" usage:"COLUMN of the names of the edges' destinations"`
	Target   string `option:"target" common:"yes" oneof:"class,multi-label,regression" default:"class" usage:"what {label} is: a class; several labels (columns of 0 and 1, or a list of names); or numbers to predict"`
	Describe string `option:"describe" common:"yes" arg:"FILES[,…]" usage:"FILES[,…] of tables of which only a first description is printed, to be checked and given to {in}"`
	ColumnOptions
	SelfLoops    string `option:"self-loops" oneof:"keep,drop,add" default:"keep" usage:"edges from a node to itself: keep those that are there, drop them, or add one to each node, in place of what is there"`
	Undirected   bool   `option:"undirected" common:"yes" also:"reverse" usage:"store each edge both ways, and drop repeated edges"`
	AddReverse   bool   `option:"add-reverse" usage:"add the opposite of each edge that is no self loop; repeated edges stay, unless {dedup}"`
	Dedup        bool   `option:"dedup" usage:"drop repeated edges"`
	Dangling     string `option:"dangling" oneof:"refuse,drop" default:"refuse" usage:"edges that name a node that is in no row: refuse them, or drop them"`
	NumClasses   int64  `option:"num-classes" positive:"yes" arg:"N" shown:"those that a label has" usage:"N classes, where labels look like something else"`
	FeatureFn    string `option:"feature-fn" also:"features-fn" arg:"FN" usage:"FN makes {dim} features of each node, where no column is one: \"hash\" or \"hash:SEED\" computes them from the node's number and stores none, \"random\" stores noise and the node's degree"`
	Dim          int    `option:"dim" positive:"yes" shown:"64" usage:"features per node, where {feature-fn} makes them"`
	Header       string `option:"header" oneof:"yes,no" shown:"found out" usage:"whether the first line of text files names columns; without names these are 1, 2, …"`
	Append       bool   `option:"append" common:"yes" usage:"add nodes and edges to the dataset {out}: its nodes keep numbers, rows and splits, new ones take its columns' statistics and its classes"`
	AllowOutside bool   `option:"allow-outside" usage:"read files that a description names outside its folder"`
	PadOption
	TypedOptions
}

const tablesHelp = "{nodes} has a row for each node and {edges} one for each edge, whose ends are names of nodes. For several types of nodes\n" +
	"and edges {in} is a description in YAML (docs/tables.schema.json), of which {describe} writes a first version. Features are\n" +
	"made of columns by the statistics of the training nodes, which stay in the dataset; {like} takes them for other tables."

// Tables imports tables (tablesHelp).
func Tables(ctx context.Context, o TablesOptions) (_ fmt.Stringer, err error) {
	if o.Describe != "" {
		return describeTables(ctx, &o)
	}
	t := &tableImport{opt: o}
	if set := o.Features != "" || o.Transform != nil || o.Missing != nil; set && (o.Append || o.Like != "") {
		return nil, errs.New(errs.Usage,
			"{feature-columns}, {transform} and {missing} are for new features, and {like} and {append} take those of a dataset; leave them out, and mend cells that do not fit in the table")
	}
	if o.Features == "none" && (o.Transform != nil || o.Missing != nil) {
		return nil, errs.New(errs.Usage,
			"{transform} and {missing} are for features, and {feature-columns} none takes none; leave them out")
	}
	if o.Append {
		if err := t.openBase(); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, t.base.Close()) }()
		o.Out = t.opt.Out
	}
	base := o.options()
	base.Target, base.SelfLoops = o.Target, o.SelfLoops
	base.Undirected, base.AddReverse, base.Dedup = o.Undirected, o.AddReverse, o.Dedup
	base.NumClasses = o.NumClasses
	if err := t.opt.madeFeatures(&base); err != nil {
		return nil, err
	}
	d, err := t.description()
	if err != nil {
		return nil, err
	}
	if len(d.Nodes[0].Labels) > 0 && o.In == "" && o.SplitTime != "" && o.MakeSplits {
		return nil, errs.New(errs.Usage, "{split-time} and {make-splits}: give one of them")
	}
	if err := base.Output.fill(); err != nil {
		return nil, err
	}
	t.d = d
	if err := t.open(); err != nil {
		return nil, err
	}
	r := request{kind: "tables", options: &o, Options: base, inputs: t.inputs, over: t.base}
	return nil, run(r, func(im *importer) error {
		for _, f := range t.inputs {
			im.m.Source.From = append(im.m.Source.From, filepath.Base(f))
		}
		t.typedImport = typedImport{importer: im, pad: o.Pad}
		err := t.run(ctx)
		if err != nil && t.base != nil { // the files of two datasets are at odds
			err = cmp.Or(t.base.Same(), err)
		}
		return err
	})
}

// madeFeatures takes the features that a function makes, in place of columns.
func (o *TablesOptions) madeFeatures(base *Options) error {
	base.FeatureFn, base.Dim = o.FeatureFn, cmp.Or(o.Dim, 64)
	switch {
	case o.FeatureFn == "" && o.Dim != 0:
		return errs.New(errs.Usage, "{dim} %d is for {feature-fn}; columns have their own number", o.Dim)
	case o.FeatureFn == "":
		return nil
	case o.In != "" || o.Like != "" || o.Append || o.Transform != nil ||
		o.ColumnOptions.Features != "" && o.ColumnOptions.Features != "none":
		return errs.New(errs.Usage,
			"{feature-fn} makes features in place of columns; leave out {feature-columns}, {transform}, {like}, {append} and {in}, or {feature-fn}")
	case base.Dim > dataset.MaxDim:
		return errs.New(errs.Usage, "{dim} %d is outside 1..%d", o.Dim, dataset.MaxDim)
	}
	if o.Nodes != "" {
		o.ColumnOptions.Features = "none"
	}
	if o.FeatureFn == RandomFeatures {
		return nil
	}
	_, err := dataset.ParseFeatureFn(o.FeatureFn, o.Seed)
	return err
}

// description is the description that {in} names, or that of the flags, with what is in the dataset
// that is added to.
func (t *tableImport) description() (d *TablesDescription, err error) {
	if t.opt.In != "" {
		d, err = t.opt.readDescription()
	} else {
		d, err = t.opt.describeFlags()
	}
	if err == nil && t.base != nil {
		err = d.complete(t.base)
	}
	if err == nil {
		err = d.check()
	}
	return d, err
}

func (o *TablesOptions) readDescription() (*TablesDescription, error) {
	for _, x := range []struct{ key, value string }{{"nodes", o.Nodes}, {"id", o.ID},
		{"edges", o.Edges}, {"src", o.Src}, {"dst", o.Dst}, {"label", o.Label},
		{"feature-columns", o.Features}, {"na", o.NA}, {"split-column", o.Split},
		{"split-time", o.SplitTime}} {
		if x.value != "" {
			return nil, errs.New(errs.Usage, "%v %s is for tables that flags describe, and %v %s describes these; write it there",
				errs.Key(x.key), brief(x.value), errs.Key("in"), o.In)
		}
	}
	if o.Transform != nil || o.Missing != nil {
		return nil, errs.New(errs.Usage, "{transform} and {missing} are for tables that flags describe; write them into %s", o.In)
	}
	if err := readable("in", o.In); err != nil {
		return nil, err
	}
	text, err := infile.Read(o.In, dataset.MaxDescription)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	return parseTables(o.In, text)
}

// describeFlags describes one type of nodes and one relation.
func (o *TablesOptions) describeFlags() (*TablesDescription, error) {
	for _, x := range []struct{ key, value, what string }{
		{"edges", o.Edges, "the table of edges"},
		{"src", o.Src, "the column of the edges' sources"},
		{"dst", o.Dst, "the column of the edges' destinations"}} {
		if x.value == "" && !(o.Append && o.Edges == "" && o.Nodes != "") {
			return nil, errs.New(errs.Usage, "%v is missing: name %s, or all tables in a description with %v",
				errs.Key(x.key), x.what, errs.Key("in"))
		}
	}
	for _, x := range []struct{ key, value, table, files string }{
		{"id", o.ID, "nodes", o.Nodes}, {"label", o.Label, "nodes", o.Nodes},
		{"feature-columns", o.Features, "nodes", o.Nodes}, {"src", o.Src, "edges", o.Edges},
		{"dst", o.Dst, "edges", o.Edges}} {
		if x.files == "" && x.value != "" {
			return nil, errs.New(errs.Usage, "%v %s is a column of the table of %s; name it with %v",
				errs.Key(x.key), brief(x.value), x.table, errs.Key(x.table))
		}
	}
	n := NodeTable{NodeType: "node", Files: list(o.Nodes), NodeIDCol: o.ID, NA: list(o.NA)}
	e := EdgeTable{Relation: texts{"node", "to", "node"}, Files: list(o.Edges), SourceIDCol: o.Src,
		DestIDCol: o.Dst}
	if o.Label == "" && (o.Split != "" || o.SplitTime != "") {
		return nil, errs.New(errs.Usage, "{split-column} and {split-time} are for nodes with labels; give {label}, too")
	}
	if o.Label != "" {
		l := LabelTable{LabelCol: list(o.Label), SplitCol: o.Split, TaskType: map[string]string{
			"multi-label": multiLabel, "regression": regression}[o.Target]}
		if l.TaskType == "" {
			l.TaskType = classification
		}
		if col, cuts, cut := strings.Cut(o.SplitTime, ":"); o.SplitTime != "" {
			l.SplitTime = &TimeSplit{Col: col}
			if cut {
				l.SplitTime.Cuts = list(cuts)
			}
		}
		n.Labels = []LabelTable{l}
	}
	return &TablesDescription{Nodes: []NodeTable{n}, Edges: []EdgeTable{e}}, nil
}

// tableImport is an import of tables.
type tableImport struct {
	typedImport
	opt    TablesOptions
	d      *TablesDescription
	inputs []string
	nodes  []*tables.Source // by entry of the description
	edges  []*tables.Source // nil where nothing is added
	numbered
	base   *dataset.Dataset // that is added to; nil: none
	both   bool             // edges are stored both ways there
	like   *dataset.Dataset // {like}, or base; nil: none
	made   [][]columns.Learned
	labels []int32
	file   string // of the labels
}

// open opens all tables and checks that the columns are there.
func (t *tableImport) open() error {
	dir := ""
	if t.opt.In != "" {
		dir = filepath.Dir(t.opt.In)
		t.inputs = append(t.inputs, t.opt.In)
	}
	open := func(p *place, files []string, need ...string) (*tables.Source, error) {
		s, err := t.openTable(dir, files)
		if err != nil {
			return nil, p.bad("%w", err)
		}
		t.inputs = append(t.inputs, s.Files...)
		for _, c := range need {
			if c == "" {
				continue
			}
			if _, err := s.Select(c); err != nil {
				return nil, p.bad("%w", err)
			}
		}
		return s, nil
	}
	for i := range t.d.Nodes {
		n := &t.d.Nodes[i]
		need := []string{n.NodeIDCol}
		for k := range n.Labels {
			need = append(need, n.Labels[k].taskColumns()...)
		}
		for k := range n.Features {
			need = append(need, n.Features[k].FeatureCol...)
		}
		if len(n.Files) == 0 {
			t.nodes = append(t.nodes, nil)
			continue
		}
		s, err := open(&n.place, n.Files, need...)
		if err != nil {
			return err
		}
		t.nodes = append(t.nodes, s)
	}
	for i := range t.d.Edges {
		e := &t.d.Edges[i]
		if len(e.Files) == 0 {
			t.edges = append(t.edges, nil)
			continue
		}
		s, err := open(&e.place, e.Files, e.SourceIDCol, e.DestIDCol)
		if err != nil {
			return err
		}
		t.edges = append(t.edges, s)
	}
	return nil
}

// openTable opens a table; dir is the folder of the description that names it, or "".
func (t *tableImport) openTable(dir string, files []string) (*tables.Source, error) {
	if dir != "" {
		files = slices.Clone(files)
		for i, f := range files {
			if filepath.IsAbs(f) {
				continue
			}
			files[i] = filepath.Join(dir, f)
		}
		if !t.opt.AllowOutside { // before they are opened: a pipe or a device has effects
			for _, f := range files {
				abs, err := filepath.Abs(f)
				if err == nil {
					_, err = insideFiles(dir, abs, t.opt.In)
				}
				if err != nil {
					return nil, err
				}
			}
		}
	}
	return tables.Open(files, tables.Options{Header: t.opt.Header,
		Memory: edges.Budget(t.opt.Memory), Progress: t.opt.Progress})
}

// insideFiles checks a path, or all that a pattern matches, as inside does.
func insideFiles(dir, pattern, from string) (ok bool, err error) {
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) == 0 {
		found = []string{pattern} // its opener explains it
	}
	for _, f := range found {
		if _, err := inside(dir, f, from); err != nil {
			return false, err
		}
	}
	return true, nil
}

// run numbers the nodes, reads labels and splits, learns the columns, and writes edges and rows.
func (t *tableImport) run(ctx context.Context) (err error) {
	if t.like = t.base; t.base != nil {
		if err := t.likeBase(ctx); err != nil {
			return err
		}
	} else if t.opt.Like != "" {
		if t.like, err = dataset.Open(t.opt.Like); err != nil {
			return errs.New(errs.Usage, "{like}: %w", err)
		}
		defer func() { err = errors.Join(err, t.like.Close()) }()
	}
	typed := t.typed()
	if typed && t.base == nil {
		if o := &t.opt; o.Undirected || o.AddReverse || o.Dedup || o.SelfLoops != "keep" {
			return errs.New(errs.Usage, "{undirected}, {add-reverse}, {dedup} and {self-loops} are for one relation; write reverse and dedup into %s",
				t.opt.In)
		}
	}
	if !typed && t.opt.Pad {
		return errs.New(errs.Usage, "{pad} is for several types of nodes; leave it out")
	}
	t.setTarget()
	if t.base == nil {
		t.rowsFirst()
		t.noteOpen()
	}
	t.noteDedup()
	if !typed {
		t.findRows()
	}
	t.noteEdgeColumns()
	if err := t.number(ctx); err != nil {
		return err
	}
	for i, n := range t.Nodes {
		t.types = append(t.types, typedNodes{name: t.d.Nodes[i].NodeType, nodes: n})
	}
	if typed {
		return t.writeTyped(ctx)
	}
	return t.writePlain(ctx)
}

// rowsFirst puts types without rows behind those that have some: their numbers name files.
func (t *tableImport) rowsFirst() {
	type entry struct {
		n   NodeTable
		src *tables.Source
	}
	var with, without []entry
	for i, n := range t.d.Nodes {
		rows := len(n.Features) > 0
		if t.like != nil {
			g := t.like.Meta.Graph()
			k := g.TypeOf(n.NodeType)
			rows = k >= 0 && g.NodeTypes[k].Dim > 0
		}
		if e := (entry{n, t.nodes[i]}); rows {
			with = append(with, e)
		} else {
			without = append(without, e)
		}
	}
	for i, e := range append(with, without...) {
		t.d.Nodes[i], t.nodes[i] = e.n, e.src
	}
}

// typed reports whether the graph has several types or relations.
func (t *tableImport) typed() bool {
	return len(t.d.Nodes) > 1 || len(t.d.Edges) > 1 || t.d.Edges[0].Reverse != ""
}

// setTarget takes the target of the labels.
func (t *tableImport) setTarget() {
	t.o.Target = dataset.TargetClass
	for i := range t.d.Nodes {
		for _, l := range t.d.Nodes[i].Labels {
			switch l.TaskType {
			case multiLabel:
				t.o.Target = dataset.TargetMultiLabel
			case regression:
				t.o.Target = dataset.TargetRegression
			}
		}
	}
}

// noteEdgeColumns names the columns of edges that are no ends.
func (t *tableImport) noteEdgeColumns() {
	for i, s := range t.edges {
		if s == nil {
			continue
		}
		var names []string
		for _, f := range s.Fields {
			if f.Name != t.d.Edges[i].SourceIDCol && f.Name != t.d.Edges[i].DestIDCol {
				names = append(names, "column "+f.Name)
			}
		}
		t.noteUnused(s.Files[0], names)
	}
}

// labelsOf reads labels and splits of the type that has some.
func (t *tableImport) labelsOf(ctx context.Context, i int, typed bool) (err error) {
	n := &t.d.Nodes[i]
	t.m.Nodes = t.types[i].nodes
	if typed {
		if err := t.taskOn("label", n.NodeType); err != nil {
			return err
		}
	}
	var classes []string
	if t.like != nil {
		g := t.like.Meta.Graph()
		if classes = g.Tasks[0].ClassNames; classes == nil {
			for c := range g.Tasks[0].Classes {
				classes = append(classes, fmt.Sprint(c))
			}
		}
	}
	if len(n.Labels) > 0 {
		if t.base != nil && t.base.Meta.Graph().Tasks[0].Unlabelled == t.baseNodes(i) {
			return n.Labels[0].bad("the nodes of %s have no labels, so there are no classes; leave the labels out, or import it again with all tables",
				t.opt.Out)
		}
		t.file = t.nodes[i].Files[0]
		rows := t.m.Nodes - t.baseNodes(i)
		if t.labels, err = t.readTask(ctx, n, t.nodes[i], rows, classes); err != nil {
			return err
		}
	}
	if t.base != nil {
		return t.baseTask(i)
	}
	return nil
}

// likeClasses gives a dataset the classes of {like}.
func (t *tableImport) likeClasses() error {
	task := &t.like.Meta.Graph().Tasks[0]
	switch {
	case t.labels == nil:
	case t.o.Target != task.Target:
		return errs.New(errs.Usage, "%s: the labels are of {target} %s, and those of {like} of %s", t.file,
			t.o.Target, task.Target)
	case !t.plain() && !slices.Equal(t.m.ClassNames, task.ClassNames):
		return errs.New(errs.Usage, "%s: the labels are %s, and those of {like} are %s", t.file,
			briefNames(t.m.ClassNames), briefNames(task.ClassNames))
	}
	if t.labels == nil && task.Target == dataset.TargetClass {
		t.m.Classes = task.Classes
	}
	t.m.ClassNames = task.ClassNames
	return nil
}

// features learns the columns of a type's features, or takes those of {like}; train are the nodes
// that are learned from.
func (t *tableImport) features(ctx context.Context, i int, train []bool) ([]columns.Learned,
	error) {
	n := &t.d.Nodes[i]
	switch {
	case t.base != nil:
		return t.likeColumns(i, t.opt.Out)
	case t.like != nil:
		return t.likeColumns(i, "{like} "+t.opt.Like)
	}
	var known *columns.Profiler
	if t.opt.In == "" && t.nodes[i] != nil && t.opt.Features != "none" {
		var err error
		if known, err = t.chooseFeatures(ctx, &t.opt.ColumnOptions, n, t.nodes[i], t.noFeatures(n),
			train); err != nil {
			return nil, err
		}
		if len(n.Features) == 0 && !t.noRows {
			return nil, errs.New(errs.Usage,
				"%s: no column is taken as a feature; {transform} COLUMN=hash:64 takes one, {feature-columns} none imports nodes without rows",
				t.nodes[i].Files[0])
		}
	}
	if len(n.Features) == 0 {
		return nil, nil
	}
	if train == nil && t.labels != nil {
		t.o.note("type %s: means and categories are those of all nodes, as none is in train", n.NodeType)
	}
	return t.learnColumns(ctx, n, t.nodes[i], train, known)
}

// likeColumns takes the columns of the dataset that messages call what, and names others of the
// table.
func (t *tableImport) likeColumns(i int, what string) ([]columns.Learned, error) {
	n := &t.d.Nodes[i]
	learned, err := likeColumns(t.like, what, n.NodeType)
	if err != nil || t.nodes[i] == nil {
		return learned, err
	}
	used := t.noFeatures(n)
	for k := range learned {
		used = append(used, learned[k].Column)
	}
	var others []string
	for _, f := range t.nodes[i].Fields {
		if !slices.Contains(used, f.Name) && !isIndex(f.Name) {
			others = append(others, "column "+f.Name)
		}
	}
	t.noteUnused(t.nodes[i].Files[0], others)
	return learned, nil
}

// noFeatures are the columns of a table of nodes that are no features.
func (t *tableImport) noFeatures(n *NodeTable) []string {
	used := []string{n.NodeIDCol}
	for k := range n.Labels {
		used = append(used, n.Labels[k].taskColumns()...)
	}
	return used
}

// findRows finds whether the nodes of a graph of one type have rows.
func (t *tableImport) findRows() {
	n := &t.d.Nodes[0]
	used := t.noFeatures(n)
	switch {
	case t.like != nil:
		t.noRows = t.like.Meta.Rows() == 0
		return
	case t.o.FeatureFn != "":
		return
	case t.nodes[0] == nil:
		t.noRows = true
	case t.opt.In != "":
		t.noRows = len(n.Features) == 0
	default:
		t.noRows = t.opt.Features == "none" || t.opt.Features == "" &&
			!slices.ContainsFunc(t.nodes[0].Fields, func(f tables.Field) bool {
				return !slices.Contains(used, f.Name) && !isIndex(f.Name)
			})
	}
	if t.noRows {
		t.o.note("the nodes have no features: rsage, rgcn and rgat learn a row for each with {embed}")
	}
}

// writePlain writes a graph of one type.
func (t *tableImport) writePlain(ctx context.Context) error {
	if err := t.labelsOf(ctx, 0, false); err != nil {
		return err
	}
	if t.like != nil {
		if err := t.likeClasses(); err != nil {
			return err
		}
	}
	if err := t.labelsAndSplits(t.labels, t.file, nil); err != nil {
		return err
	}
	train, err := t.trainRows()
	if err != nil {
		return err
	}
	learned, err := t.features(ctx, 0, train)
	if err != nil {
		return err
	}
	all, err := t.edgesOf(0)
	if err != nil {
		return err
	}
	for _, s := range all {
		if err := t.edgesFrom(ctx, s); err != nil {
			return err
		}
	}
	if err := t.topology(ctx); err != nil {
		return err
	}
	switch {
	case learned != nil:
		return t.writeColumns(ctx, t.nodes[0], learned, t.baseRows(0))
	case t.o.FeatureFn != "":
		return t.madeFeatures(ctx)
	}
	return nil
}

// writeTyped writes a graph of several types.
func (t *tableImport) writeTyped(ctx context.Context) error {
	task := max(0, slices.IndexFunc(t.d.Nodes, func(n NodeTable) bool { return len(n.Labels) > 0 }))
	if t.base != nil {
		g := t.base.Meta.Graph()
		if its := g.TypeOf(g.Tasks[0].Type); len(t.d.Nodes[task].Labels) > 0 && task != its {
			return t.d.Nodes[task].Labels[0].bad("the labels of %s are those of type %s", t.opt.Out,
				g.Tasks[0].Type)
		} else {
			task = its
		}
	}
	if err := t.labelsOf(ctx, task, true); err != nil {
		return err
	}
	if t.like != nil {
		if err := t.likeClasses(); err != nil {
			return err
		}
	}
	t.task.labels, t.task.labelFile = t.labels, t.file
	written, err := t.writeTask()
	if err != nil {
		return err
	}
	train, err := t.trainRows()
	if err != nil {
		return err
	}
	t.task.done = &written
	for i := range t.types {
		x := &t.types[i]
		use := train
		if i != task {
			use = nil
		}
		learned, err := t.features(ctx, i, use)
		if err != nil {
			return err
		}
		for k := range learned {
			x.dim += learned[k].Width()
		}
		src := t.nodes[i]
		x.write = func(ctx context.Context) error {
			if learned == nil {
				return nil
			}
			return t.writeColumns(ctx, src, learned, t.baseRows(i))
		}
	}
	for i := range t.d.Edges {
		e := &t.d.Edges[i]
		t.rels = append(t.rels, typedEdges{src: e.Relation[0], name: e.Relation[1],
			dst: e.Relation[2], reverse: e.Reverse, dedup: e.Dedup,
			open: func(ends) ([]edges.Source, error) { return t.edgesOf(i) }})
	}
	return t.write(ctx)
}
