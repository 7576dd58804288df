package dataset

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"helios/dataset/npy"
	"helios/internal/rowtype"
)

// Format 2 is a graph of several types of nodes and relations, or with other targets than one class
// a node. Its files lie in folders that have numbers, so that no name becomes a path:
//
//	nodes/NNN/   features.npy [n, dim] of a type with rows; names.txt, names.parquet, ids.npy and columns.json as in format 1
//	edges/NNN/   indptr.npy int64 [n_dst+1], indices.npy [edges]: the in-neighbours of each node of
//	             the relation's Dst, as numbers within Src, ascending
//	tasks/NNN/   labels.npy, and train.npy, val.npy, test.npy: int64 numbers within the type
//
// Nodes are numbered within their type. The rows of all types are one row space: those of the first
// type come first, then those of the next. Types without rows are the last ones.

// FormatTyped is the version of a directory whose description has a Schema.
const FormatTyped = 2

// Limits of a description.
const (
	MaxNodeTypes = 255
	MaxRelations = 65_535
	MaxTasks     = 64
	MaxNameBytes = 128
	maxCount     = 1 << 46 // nodes of a type, edges of a relation: their sums stay numbers
)

// Schema are the types, relations and tasks of format 2. Their order is part of the dataset: it
// decides the samples.
type Schema struct {
	NodeTypes []NodeType `yaml:"node_types"`
	Relations []Relation `yaml:"relations"`
	Tasks     []Task     `yaml:"tasks"`
}

// NodeType is a type of nodes.
type NodeType struct {
	Name  string `yaml:"name"`
	Nodes int64  `yaml:"nodes"`
	Dim   int    `yaml:"dim,omitempty"` // features of a node; 0: the type has no rows
	DType string `yaml:"dtype,omitempty"`
	Dir   string `yaml:"dir"`
}

// Relation is a type of edges: messages go from a node of Src to a node of Dst. Two relations may
// share their name where their types differ.
type Relation struct {
	Src     string `yaml:"src"`
	Name    string `yaml:"name"`
	Dst     string `yaml:"dst"`
	Edges   int64  `yaml:"edges"`
	Reverse *int   `yaml:"reverse,omitempty"` // the relation with the opposite edges
	Dir     string `yaml:"dir"`
}

// Task is a target of some nodes of a type, and who is to learn, choose and test it.
type Task struct {
	Name   string `yaml:"name"`
	Kind   string `yaml:"kind"` // TaskNode
	Type   string `yaml:"type"` // the nodes' type
	Target string `yaml:"target"`
	// Classes counts those of TargetClass, Columns the labels or values of the other targets.
	Classes    int      `yaml:"classes,omitempty"`
	Columns    int      `yaml:"columns,omitempty"`
	Train      int64    `yaml:"train"` // nodes per split
	Val        int64    `yaml:"val"`
	Test       int64    `yaml:"test"`
	Unlabelled int64    `yaml:"unlabelled,omitempty"`
	ClassNames []string `yaml:"class_names,omitempty"` // of classes or columns
	// LabelDims is the number of dimensions that the labels were given with, 1 ([n]) or 2 ([n, 1]);
	// 0: as many as labels.npy has.
	LabelDims int    `yaml:"label_dims,omitempty"`
	Dir       string `yaml:"dir"`
}

// TaskNode is the kind of a task whose targets are those of nodes.
const TaskNode = "node"

// Targets of tasks, and their labels.npy.
const (
	TargetClass      = "class"       // int32 [n], -1: unlabelled
	TargetMultiLabel = "multi-label" // uint8 [n, columns] of 0 and 1, 255: unknown
	TargetRegression = "regression"  // float32 [n, columns], NaN: unknown
)

// Outputs is the number of figures that a model gives for a node.
func (t *Task) Outputs() int { return max(t.Classes, t.Columns) }

// Dims is the number of dimensions of the labels as clients get them: as they came.
func (t *Task) Dims() int {
	switch {
	case t.LabelDims != 0:
		return t.LabelDims
	case t.Target == TargetClass:
		return 1
	}
	return 2
}

// Split returns the number of nodes in a split.
func (t *Task) Split(name string) (n int64, ok bool) {
	n, ok = map[string]int64{"train": t.Train, "val": t.Val, "test": t.Test}[name]
	return n, ok
}

func (r *Relation) String() string { return r.Src + " " + r.Name + " " + r.Dst }

// typedMeta is dataset.yaml of format 2.
type typedMeta struct {
	Format    int    `yaml:"format"`
	UUID      string `yaml:"uuid"`
	Name      string `yaml:"name"`
	FeatureFn string `yaml:"feature_fn,omitempty"`
	Schema    `yaml:",inline"`
	Source    Source `yaml:"source"`
	CreatedBy string `yaml:"created_by"`
	Sealed    bool   `yaml:"sealed,omitempty"`
}

// Typed reports whether the dataset is of format 2.
func (m *Meta) Typed() bool { return len(m.NodeTypes) > 0 }

// Homogeneous reports whether there are one type of nodes, which has rows, and one relation, as in
// format 1. Models of typed graphs learn rows where there are none.
func (m *Meta) Homogeneous() bool {
	return !m.Typed() || len(m.NodeTypes) == 1 && len(m.Relations) == 1 && m.NodeTypes[0].Dim > 0
}

// Graph returns the types, relations and tasks; those of format 1 are one of each.
func (m *Meta) Graph() Schema {
	if m.Typed() {
		return m.Schema
	}
	return Schema{
		NodeTypes: []NodeType{{Name: "node", Nodes: m.Nodes, Dim: m.Dim, DType: m.DType}},
		Relations: []Relation{{Src: "node", Name: "to", Dst: "node", Edges: m.Edges}},
		Tasks: []Task{{Name: "class", Kind: TaskNode, Type: "node", Target: TargetClass,
			Classes: m.Classes, Train: m.Train, Val: m.Val, Test: m.Test,
			Unlabelled: m.Unlabelled, ClassNames: m.ClassNames, LabelDims: m.LabelDims}},
	}
}

// Encode sets the format and returns dataset.yaml.
func (m *Meta) Encode() ([]byte, error) {
	if m.Format = FormatVersion; !m.Typed() {
		return yaml.Marshal(m)
	}
	m.Format = FormatTyped
	m.number()
	if err := m.checkSchema(); err != nil {
		return nil, err
	}
	return yaml.Marshal(typedMeta{m.Format, m.UUID, m.Name, m.FeatureFn, m.Schema, m.Source,
		m.CreatedBy, m.Sealed})
}

func (m *Meta) decodeTyped(text []byte) error {
	var t typedMeta
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true) // what a later heliosctl adds may not be left out in silence
	if err := d.Decode(&t); err != nil {
		return fmt.Errorf("not readable: %w", err)
	}
	m.Format, m.UUID, m.Name, m.FeatureFn = t.Format, t.UUID, t.Name, t.FeatureFn
	m.Schema, m.Source, m.CreatedBy, m.Sealed = t.Schema, t.Source, t.CreatedBy, t.Sealed
	if err := m.checkSchema(); err != nil {
		return err
	}
	m.Sum()
	return nil
}

// Files of format 2, by the kind of their folder.
const (
	nodesPart = "nodes"
	edgesPart = "edges"
	tasksPart = "tasks"
)

var partFiles = map[string][]string{
	nodesPart: {FeaturesName, NamesName, NameMapName, IDsName, ColumnsName},
	edgesPart: {IndptrName, IndicesName},
	tasksPart: {LabelsName, "train.npy", "val.npy", "test.npy"},
}

func partDir(part string, i int) string { return fmt.Sprintf("%s/%03d", part, i) }

// NodesDir is the folder of a type of nodes.
func NodesDir(i int) string { return partDir(nodesPart, i) }

// EdgesDir is the folder of a relation.
func EdgesDir(i int) string { return partDir(edgesPart, i) }

// TasksDir is the folder of a task.
func TasksDir(i int) string { return partDir(tasksPart, i) }

// isFeatures reports whether a file holds rows.
func isFeatures(name string) bool { return path.Base(name) == FeaturesName }

// files are the names that files of the dataset may have.
func (m *Meta) files() []string {
	if !m.Typed() {
		return Files
	}
	all := []string{MetaName}
	add := func(part string, n int) {
		for i := range n {
			for _, name := range partFiles[part] {
				all = append(all, partDir(part, i)+"/"+name)
			}
		}
	}
	add(nodesPart, len(m.NodeTypes))
	add(edgesPart, len(m.Relations))
	add(tasksPart, len(m.Tasks))
	return all
}

// arrays are the arrays that the dataset must have.
func (m *Meta) arrays() (all []array) {
	g := m.Graph()
	for i := range g.Relations {
		r := &g.Relations[i]
		all = append(all,
			array{path.Join(r.Dir, IndptrName), []npy.DType{npy.Int64},
				[]int64{g.NodeTypes[g.TypeOf(r.Dst)].Nodes + 1}},
			array{path.Join(r.Dir, IndicesName), []npy.DType{npy.Uint32, npy.Int64},
				[]int64{r.Edges}})
	}
	for i := range g.NodeTypes {
		if t := &g.NodeTypes[i]; t.Dim > 0 && m.FeatureFn == "" {
			all = append(all, array{path.Join(t.Dir, FeaturesName), []npy.DType{m.FileDType()},
				[]int64{t.Nodes, int64(t.Dim)}})
		}
	}
	for i := range g.Tasks {
		t := &g.Tasks[i]
		labels := array{path.Join(t.Dir, LabelsName), []npy.DType{npy.Int32},
			[]int64{g.NodeTypes[g.TypeOf(t.Type)].Nodes}}
		switch t.Target {
		case TargetMultiLabel:
			labels.types = []npy.DType{npy.Uint8}
		case TargetRegression:
			labels.types = []npy.DType{npy.Float32}
		}
		if t.Target != TargetClass {
			labels.shape = append(labels.shape, int64(t.Columns))
		}
		all = append(all, labels)
		for _, name := range Splits {
			n, _ := t.Split(name)
			all = append(all, array{path.Join(t.Dir, name+".npy"), []npy.DType{npy.Int64},
				[]int64{n}})
		}
	}
	return all
}

// CountIn adds to the hashes of a dataset's arrays, and their rows, what of the description counts
// in its identity: the schema, and a feature function, which makes what features.npy would hold.
func (m *Meta) CountIn(sums map[string][]byte, rows map[string]int64) {
	if m.Typed() {
		sums["schema"] = m.digest()
	}
	if m.FeatureFn != "" {
		sums["features"], rows["features"] = FeatureFnSum(m.FeatureFn, m.Dim), m.Rows()
	}
}

// number gives each part its folder.
func (s *Schema) number() {
	for i := range s.NodeTypes {
		s.NodeTypes[i].Dir = NodesDir(i)
	}
	for i := range s.Relations {
		s.Relations[i].Dir = EdgesDir(i)
	}
	for i := range s.Tasks {
		s.Tasks[i].Dir = TasksDir(i)
	}
}

// Sum fills the fields of format 1 with the sums over the schema, the widest row, and the first
// task.
func (m *Meta) Sum() {
	m.Nodes, m.Edges, m.Dim, m.DType = 0, 0, 0, rowtype.Float32.String()
	for i := range m.NodeTypes {
		t := &m.NodeTypes[i]
		m.Nodes += t.Nodes
		m.Dim = max(m.Dim, t.Dim)
		if t.DType != "" {
			m.DType = t.DType
		}
	}
	for i := range m.Relations {
		m.Edges += m.Relations[i].Edges
	}
	t := &m.Tasks[0]
	m.Classes, m.Train, m.Val, m.Test = t.Outputs(), t.Train, t.Val, t.Test
	m.Unlabelled, m.ClassNames = t.Unlabelled, t.ClassNames
}

// Rows is the number of feature rows: of all nodes whose type has some.
func (m *Meta) Rows() int64 {
	if !m.Typed() {
		return m.Nodes
	}
	rows := int64(0)
	for i := range m.NodeTypes {
		if m.NodeTypes[i].Dim > 0 {
			rows += m.NodeTypes[i].Nodes
		}
	}
	return rows
}

// FirstRow is the number of a type's first node among the nodes of all types: its first row, where
// the type has rows.
func (s *Schema) FirstRow(t int) int64 {
	first := int64(0)
	for i := range s.NodeTypes[:t] {
		first += s.NodeTypes[i].Nodes
	}
	return first
}

// TypeOf returns the place of a type of nodes; -1 where there is none of that name.
func (s *Schema) TypeOf(name string) int {
	return slices.IndexFunc(s.NodeTypes, func(t NodeType) bool { return t.Name == name })
}

// TaskOf returns the place of a task; "" is the first one.
func (s *Schema) TaskOf(name string) (int, error) {
	var names []string
	for i := range s.Tasks {
		if s.Tasks[i].Name == name || name == "" {
			return i, nil
		}
		names = append(names, s.Tasks[i].Name)
	}
	return 0, fmt.Errorf("there is no task %q; there are %s", name, strings.Join(names, ", "))
}

// digest hashes the schema for the dataset's identity. It leaves out the folders, the sizes of the
// splits (their files have them), the names of classes, and the dimensions of the labels.
func (s *Schema) digest() []byte {
	h := sha256.New()
	for i := range s.NodeTypes {
		t := &s.NodeTypes[i]
		fmt.Fprintf(h, "type %q %d %d %s\n", t.Name, t.Nodes, t.Dim, t.DType)
	}
	for i := range s.Relations {
		r := &s.Relations[i]
		fmt.Fprintf(h, "relation %q %q %q %d", r.Src, r.Name, r.Dst, r.Edges)
		if r.Reverse != nil {
			fmt.Fprintf(h, " %d", *r.Reverse)
		}
		fmt.Fprintln(h)
	}
	for i := range s.Tasks {
		t := &s.Tasks[i]
		fmt.Fprintf(h, "task %q %s %q %s %d\n", t.Name, t.Kind, t.Type, t.Target, t.Outputs())
	}
	return h.Sum(nil)
}

// checkSchema checks the types, relations and tasks. Its errors name the one that is wrong.
func (m *Meta) checkSchema() error {
	s := &m.Schema
	if err := s.checkGraph(); err != nil {
		return err
	}
	if err := within("tasks", len(s.Tasks), MaxTasks); err != nil {
		return err
	}
	for i := range s.Tasks {
		if err := s.checkTask(i); err != nil {
			return fmt.Errorf("task %d, %q: %w", i, brief(s.Tasks[i].Name), err)
		}
	}
	return m.checkTypedFn()
}

// CheckGraph numbers the folders of a schema that is being made, and checks its types and
// relations.
func (s *Schema) CheckGraph() error {
	s.number()
	return s.checkGraph()
}

func (s *Schema) checkGraph() error {
	return cmp.Or(within("node_types", len(s.NodeTypes), MaxNodeTypes),
		within("relations", len(s.Relations), MaxRelations), s.checkTypes(), s.checkRelations())
}

// within checks the number of parts.
func within(what string, n, limit int) error {
	if n < 1 || n > limit {
		return fmt.Errorf("%s: there are %d, must be 1 to %d", what, n, limit)
	}
	return nil
}

func (s *Schema) checkTypes() error {
	seen := map[string]bool{}
	dtype := ""
	for i := range s.NodeTypes {
		t := &s.NodeTypes[i]
		err := checkName(t.Name)
		switch {
		case err != nil:
		case seen[t.Name]:
			err = errors.New("the name is there twice")
		case t.Nodes < 1 || t.Nodes > maxCount:
			err = fmt.Errorf("%d nodes, must be 1 to 2^46", t.Nodes)
		case t.Dim < 0 || t.Dim > MaxDim:
			err = fmt.Errorf("dim %d is outside 0..%d", t.Dim, MaxDim)
		case t.Dim == 0 && t.DType != "":
			err = fmt.Errorf("dtype %q, but no dim: the type has no rows", t.DType)
		case t.Dim > 0 && t.DType != rowtype.Float32.String() &&
			t.DType != rowtype.Float16.String():
			err = fmt.Errorf("dtype %q is unknown; features are float32 or float16", t.DType)
		case t.Dim > 0 && dtype != "" && t.DType != dtype:
			err = fmt.Errorf("dtype %s, but the types before have %s; one is needed", t.DType, dtype)
		case t.Dim > 0 && i > 0 && s.NodeTypes[i-1].Dim == 0:
			err = errors.New("it has rows, the type before has none; types without rows come last")
		default:
			err = checkDir(t.Dir, NodesDir(i))
		}
		if err != nil {
			return fmt.Errorf("node type %d, %q: %w", i, brief(t.Name), err)
		}
		seen[t.Name], dtype = true, t.DType
	}
	return nil
}

func (s *Schema) checkRelations() error {
	seen := map[[3]string]bool{}
	for i := range s.Relations {
		r := &s.Relations[i]
		key := [3]string{r.Src, r.Name, r.Dst}
		err := checkName(r.Name)
		switch {
		case err != nil:
		case s.TypeOf(r.Src) < 0:
			err = fmt.Errorf("src %q is no type of nodes", brief(r.Src))
		case s.TypeOf(r.Dst) < 0:
			err = fmt.Errorf("dst %q is no type of nodes", brief(r.Dst))
		case seen[key]:
			err = errors.New("the relation is there twice")
		case r.Edges < 0 || r.Edges > maxCount:
			err = fmt.Errorf("%d edges, must be 0 to 2^46", r.Edges)
		case r.Reverse != nil:
			err = s.checkReverse(i)
		}
		if err == nil {
			err = checkDir(r.Dir, EdgesDir(i))
		}
		if err != nil {
			return fmt.Errorf("relation %d, %q: %w", i, brief(r.String()), err)
		}
		seen[key] = true
	}
	return nil
}

// checkReverse checks that a relation and its reverse name each other, and have each other's ends.
func (s *Schema) checkReverse(i int) error {
	r := &s.Relations[i]
	if *r.Reverse < 0 || *r.Reverse >= len(s.Relations) {
		return fmt.Errorf("reverse %d is no relation; there are 0 to %d", *r.Reverse,
			len(s.Relations)-1)
	}
	o := &s.Relations[*r.Reverse]
	switch {
	case o.Src != r.Dst || o.Dst != r.Src:
		return fmt.Errorf("its reverse, %q, must go from %s to %s", brief(o.String()), r.Dst, r.Src)
	case o.Reverse == nil || *o.Reverse != i:
		return fmt.Errorf("its reverse, %q, does not name it as its own reverse", brief(o.String()))
	}
	return nil
}

func (s *Schema) checkTask(i int) error {
	t := &s.Tasks[i]
	if err := checkName(t.Name); err != nil {
		return err
	}
	if slices.ContainsFunc(s.Tasks[:i], func(o Task) bool { return o.Name == t.Name }) {
		return errors.New("the name is there twice")
	}
	if t.Kind != TaskNode {
		return fmt.Errorf("kind %q is unknown; the one there is is %s", brief(t.Kind), TaskNode)
	}
	ti := s.TypeOf(t.Type)
	if ti < 0 {
		return fmt.Errorf("type %q is no type of nodes", brief(t.Type))
	}
	if err := t.checkTarget(); err != nil {
		return err
	}
	n := s.NodeTypes[ti].Nodes
	for _, c := range []struct {
		what string
		n    int64
	}{{"train", t.Train}, {"val", t.Val}, {"test", t.Test}, {"unlabelled", t.Unlabelled}} {
		if c.n < 0 || c.n > n {
			return fmt.Errorf("%s %d is outside 0..%d, the nodes of %s", c.what, c.n, n, t.Type)
		}
	}
	if t.Train+t.Val+t.Test > n {
		return fmt.Errorf("train, val and test are %d nodes together, %s has %d",
			t.Train+t.Val+t.Test, t.Type, n)
	}
	return checkDir(t.Dir, TasksDir(i))
}

func (t *Task) checkTarget() error {
	switch t.Target {
	case TargetClass:
		if t.Classes < 1 || t.Classes > math.MaxInt32 || t.Columns != 0 {
			return fmt.Errorf("classes %d and columns %d: a class needs one class or more, and no columns",
				t.Classes, t.Columns)
		}
	case TargetMultiLabel, TargetRegression:
		if t.Columns < 1 || t.Columns > MaxDim || t.Classes != 0 {
			return fmt.Errorf("columns %d and classes %d: %s needs 1 to %d columns, and no classes",
				t.Columns, t.Classes, t.Target, MaxDim)
		}
	default:
		return fmt.Errorf("target %q is unknown; use %s, %s or %s", brief(t.Target), TargetClass,
			TargetMultiLabel, TargetRegression)
	}
	if t.LabelDims < 0 || t.LabelDims > 2 || t.LabelDims == 1 && t.Columns > 1 {
		return fmt.Errorf("label_dims %d of %d columns: 2, or 1 of one column", t.LabelDims, t.Columns)
	}
	if len(t.ClassNames) > t.Outputs() {
		return fmt.Errorf("%d class_names for %d classes or columns", len(t.ClassNames), t.Outputs())
	}
	return nil
}

// checkTypedFn checks a feature function of format 2: it makes the rows of all types that have
// some, by their numbers, so these are equally wide.
func (m *Meta) checkTypedFn() error {
	if m.FeatureFn == "" {
		return nil
	}
	for i := range m.NodeTypes {
		t := &m.NodeTypes[i]
		if t.Dim > 0 && (t.Dim != m.NodeTypes[0].Dim || t.DType != rowtype.Float32.String()) {
			return fmt.Errorf("feature_fn %s: node type %q has dim %d of %s, must have %d of float32",
				m.FeatureFn, brief(t.Name), t.Dim, t.DType, m.NodeTypes[0].Dim)
		}
	}
	return nil
}

// checkName checks the name of a type, relation or task: it is shown, and asked for on command
// lines.
func checkName(name string) error {
	if name == "" || len(name) > MaxNameBytes || !utf8.ValidString(name) ||
		strings.TrimSpace(name) != name ||
		strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("a name has 1 to %d bytes of printable characters", MaxNameBytes)
	}
	return nil
}

func checkDir(dir, want string) error {
	if dir != want {
		return fmt.Errorf("dir %q must be %s", brief(dir), want)
	}
	return nil
}

// brief cuts a name of a foreign file for a message.
func brief(s string) string {
	if len(s) > MaxNameBytes {
		return s[:MaxNameBytes] + "…"
	}
	return s
}
