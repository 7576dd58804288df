package importer

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"helios/dataset/columns"
	"helios/internal/errs"
	"helios/internal/options"
)

// TablesDescription describes the tables of a graph, with the words of GraphStorm's gconstruct. The
// flags of an import fill in the same structs. docs/tables.schema.json is made of them: need names
// the keys that must be there, oneof the values.
type TablesDescription struct {
	place
	Nodes []NodeTable `yaml:"nodes" need:"yes"` // a type of nodes each
	Edges []EdgeTable `yaml:"edges" need:"yes"` // a relation each
}

// NodeTable is a table with a row for each node of a type.
type NodeTable struct {
	place
	NodeType  string         `yaml:"node_type" need:"yes"` // its name
	Files     texts          `yaml:"files"`                // files, folders of parts or patterns, beside the description; without them the nodes are those that edges name
	NodeIDCol string         `yaml:"node_id_col"`          // column of names; without it nodes are called 0, 1, …
	NA        texts          `yaml:"na"`                   // texts that stand for no value, beside an empty cell
	Features  []FeatureTable `yaml:"features"`             // none: the type has no features
	Labels    []LabelTable   `yaml:"labels"`               // at most one, of one type of nodes
}

// FeatureTable is a column, or several with the same transform.
type FeatureTable struct {
	place
	FeatureCol texts  `yaml:"feature_col" need:"yes"`                                                                      // column, or a list of columns
	Transform  string `yaml:"transform" need:"yes" oneof:"none,standard,minmax,log,boolean,date,one-hot,ordinal,hash,bag"` // way in which cells become numbers
	Missing    string `yaml:"missing"`                                                                                     // mean, zero, category, indicator, or the value of cells without one; else they are refused
	Unknown    string `yaml:"unknown" oneof:"zero,category"`                                                               // place of a category that no training row has; else it is refused
	Size       int    `yaml:"size"`                                                                                        // numbers of a vector, or features of hash and bag
	Parts      texts  `yaml:"parts"`                                                                                       // of a date: number, year, month, day, weekday, hour
	Categories texts  `yaml:"categories"`                                                                                  // all categories in their order; else those of the rows that are learned from
	StatsOf    string `yaml:"stats_of" oneof:"train,all"`                                                                  // rows that means and categories are learned from; train
}

// LabelTable is the target of a type's nodes, and their splits.
type LabelTable struct {
	place
	LabelCol  texts      `yaml:"label_col" need:"yes"`                                               // column, or a list of columns
	TaskType  string     `yaml:"task_type" need:"yes" oneof:"classification,multi_label,regression"` // a class, several labels (0 and 1, or a list of names), or numbers
	SplitCol  string     `yaml:"split_col"`                                                          // column of train, val and test; an empty cell: none
	SplitTime *TimeSplit `yaml:"split_time"`                                                         // splits by time
	SplitPct  []float64  `yaml:"split_pct"`                                                          // shares of train, val and test; 0.6, 0.2, 0.2
}

// TimeSplit puts earlier nodes into train, later ones into val and test.
type TimeSplit struct {
	place
	Col  string `yaml:"col" need:"yes"` // column of dates or numbers
	Cuts texts  `yaml:"cuts"`           // first time of val and of test; else split_pct cuts
}

// EdgeTable is a table with a row for each edge of a relation.
type EdgeTable struct {
	place
	Relation    texts  `yaml:"relation" need:"yes"`      // type of the sources, name, type of the destinations
	Files       texts  `yaml:"files" need:"yes"`         // files, folders of parts or patterns
	SourceIDCol string `yaml:"source_id_col" need:"yes"` // column of the sources' names
	DestIDCol   string `yaml:"dest_id_col" need:"yes"`   // column of the destinations' names
	Reverse     string `yaml:"reverse"`                  // name of the relation of opposite edges that is added
	Dedup       bool   `yaml:"dedup"`                    // repeated edges are stored once
	WeightCol   string `yaml:"weight_col"`               // refused: models take no weights of edges
	Features    any    `yaml:"features"`                 // refused: models take no features of edges
}

// place names the line and column of a part of a description; zero of what flags make.
type place struct {
	file         string
	line, column int
}

func (p *place) set(file string, n *yaml.Node) { p.file, p.line, p.column = file, n.Line, n.Column }

// bad is an error about this part of the description.
func (p *place) bad(format string, args ...any) error {
	if p.file == "" {
		return errs.New(errs.Usage, format, args...)
	}
	return errs.New(errs.Usage, "%s:%d:%d: "+format,
		append([]any{p.file, p.line, p.column}, args...)...)
}

type placed interface {
	set(file string, n *yaml.Node)
}

// texts is one text or a list of them.
type texts []string

// yamlLine finds the line that an error of the YAML reader names.
var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// parseTables reads a description.
func parseTables(file string, text []byte) (*TablesDescription, error) {
	var n yaml.Node
	if err := yaml.Unmarshal(text, &n); err != nil {
		m := yamlLine.FindStringSubmatch(err.Error())
		if m == nil || m[1] == "" {
			return nil, errs.New(errs.Usage, "%s: %s", file, strings.TrimPrefix(err.Error(), "yaml: "))
		}
		return nil, errs.New(errs.Usage, "%s:%s: %s", file, m[1], err.Error()[len(m[0]):])
	}
	if len(n.Content) != 1 {
		return nil, errs.New(errs.Usage, "%s is empty; {describe} FILES writes a first version", file)
	}
	d := &TablesDescription{}
	return d, decodeYAML(file, n.Content[0], reflect.ValueOf(d).Elem())
}

// decodeYAML fills in v, and refuses what it has no place for.
func decodeYAML(file string, n *yaml.Node, v reflect.Value) error {
	bad := func(n *yaml.Node, format string, args ...any) error {
		p := place{file, n.Line, n.Column}
		return p.bad(format, args...)
	}
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		return bad(n, "anchors and aliases are not read; write the value out")
	}
	if v.Kind() == reflect.Pointer {
		v.Set(reflect.New(v.Type().Elem()))
		v = v.Elem()
	}
	if v.Kind() == reflect.Struct {
		return decodeStruct(file, n, v, bad)
	}
	if _, is := v.Addr().Interface().(*texts); is && n.Kind == yaml.ScalarNode {
		v.Set(reflect.Append(v, reflect.ValueOf("")))
		return decodeYAML(file, n, v.Index(0))
	}
	if v.Kind() == reflect.Slice {
		if n.Kind != yaml.SequenceNode {
			return bad(n, "a list is expected here: - …")
		}
		v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
		for i, item := range n.Content {
			if err := decodeYAML(file, item, v.Index(i)); err != nil {
				return err
			}
		}
		return nil
	}
	if v.Kind() == reflect.Interface { // of a key that is refused
		v.Set(reflect.ValueOf(n.Tag))
		return nil
	}
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		return bad(n, "one value is expected here")
	}
	var err error
	switch v.Kind() {
	case reflect.Bool:
		var x bool
		x, err = strconv.ParseBool(n.Value)
		v.SetBool(x)
	case reflect.Int:
		var x int
		x, err = strconv.Atoi(n.Value)
		v.SetInt(int64(x))
	case reflect.Float64:
		var x float64
		x, err = strconv.ParseFloat(n.Value, 64)
		v.SetFloat(x)
	default:
		v.SetString(n.Value)
	}
	if err != nil {
		return bad(n, "%s is no %s", brief(n.Value), v.Kind())
	}
	return nil
}

func decodeStruct(file string, n *yaml.Node, v reflect.Value,
	bad func(*yaml.Node, string, ...any) error) error {
	if n.Kind != yaml.MappingNode {
		return bad(n, "keys with values are expected here: %s", strings.Join(yamlKeys(v.Type()), ", "))
	}
	v.Addr().Interface().(placed).set(file, n)
	keys, seen := yamlKeys(v.Type()), map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		k := slices.Index(keys, key.Value)
		switch {
		case k < 0:
			hint := ""
			if near := options.Nearest(key.Value, keys); near != "" {
				hint = "; did you mean " + near + "?"
			}
			return bad(key, "there is no key %s here, only %s%s", brief(key.Value),
				strings.Join(keys, ", "), hint)
		case seen[key.Value]:
			return bad(key, "key %s is there twice", key.Value)
		}
		seen[key.Value] = true
		f := v.Type().Field(k + 1) // behind place
		if err := decodeYAML(file, value, v.Field(k+1)); err != nil {
			return err
		}
		of := f.Tag.Get("oneof")
		if s := v.Field(k + 1); of != "" && !slices.Contains(strings.Split(of, ","), s.String()) {
			return bad(value, "%s %s is none of %s", key.Value, brief(s.String()),
				strings.ReplaceAll(of, ",", ", "))
		}
	}
	for i, key := range keys {
		if v.Type().Field(i+1).Tag.Get("need") != "" && !seen[key] {
			return bad(n, "key %s is missing", key)
		}
	}
	return nil
}

// yamlKeys lists the keys of a struct, whose first field is its place.
func yamlKeys(t reflect.Type) (keys []string) {
	for i := 1; i < t.NumField(); i++ {
		keys = append(keys, t.Field(i).Tag.Get("yaml"))
	}
	return keys
}

// check refuses a description that contradicts itself.
func (d *TablesDescription) check() error {
	types := map[string]bool{}
	labels := 0
	for i := range d.Nodes {
		t := &d.Nodes[i]
		if types[t.NodeType] {
			return t.bad("node_type %s is there twice; one entry may name several files", brief(t.NodeType))
		}
		types[t.NodeType] = true
		if err := t.check(); err != nil {
			return err
		}
		if labels += len(t.Labels); labels > 1 {
			return t.Labels[len(t.Labels)-1].bad("a dataset has the labels of one column or list; leave the others out")
		}
	}
	relations := map[string]bool{}
	for i := range d.Edges {
		if err := d.Edges[i].check(types, relations); err != nil {
			return err
		}
	}
	switch {
	case len(d.Nodes) == 0:
		return d.bad("nodes is empty")
	case len(d.Edges) == 0:
		return d.bad("edges is empty")
	}
	return nil
}

func (t *NodeTable) check() error {
	if slices.Contains(t.Files, "") || t.Files != nil && len(t.Files) == 0 {
		return t.bad("files names no file")
	}
	if t.Files == nil && (t.NodeIDCol != "" || t.Features != nil || t.Labels != nil) {
		return t.bad("node_type %s has no files, so it has no columns", brief(t.NodeType))
	}
	for i := range t.Features {
		f := &t.Features[i]
		for _, s := range f.specs(t.NA) {
			if err := s.Check(); err != nil {
				return f.bad("%w", err)
			}
		}
	}
	for i := range t.Labels {
		if err := t.Labels[i].check(); err != nil {
			return err
		}
	}
	return nil
}

// specs are the columns of an entry.
func (f *FeatureTable) specs(na []string) (all []columns.Spec) {
	for _, c := range f.FeatureCol {
		all = append(all, columns.Spec{Column: c, All: f.StatsOf == "all", Transform: f.Transform, Missing: f.Missing,
			Unknown: f.Unknown, Size: f.Size, Parts: f.Parts, Categories: f.Categories, NA: na})
	}
	return all
}

func (l *LabelTable) check() error {
	switch {
	case len(l.LabelCol) == 0 || slices.Contains(l.LabelCol, ""):
		return l.bad("label_col names no column")
	case len(l.LabelCol) > 1 && l.TaskType == classification:
		return l.bad("several columns of labels are for task_type multi_label and regression")
	case l.SplitCol != "" && (l.SplitTime != nil || l.SplitPct != nil):
		return l.bad("split_col stands alone; leave split_time and split_pct out")
	case l.SplitTime != nil && len(l.SplitTime.Cuts) > 0 && l.SplitPct != nil:
		return l.bad("split_pct and cuts contradict each other; give one of them")
	case l.SplitTime != nil && len(l.SplitTime.Cuts) != 0 && len(l.SplitTime.Cuts) != 2:
		return l.SplitTime.bad("cuts has %d times; give two: the first of val and the first of test",
			len(l.SplitTime.Cuts))
	case l.SplitPct == nil:
		return nil
	}
	sum := 0.0
	for _, x := range l.SplitPct {
		if !(x >= 0) {
			sum = 2
		}
		sum += x
	}
	if n := len(l.SplitPct); n < 2 || n > 3 || !(sum <= 1+1e-9) {
		return l.bad("split_pct has two or three shares from 0 that make at most 1 together")
	}
	return nil
}

func (e *EdgeTable) check(types, relations map[string]bool) error {
	if len(e.Relation) != 3 {
		return e.bad("relation has %d parts; give [SOURCE TYPE, NAME, DESTINATION TYPE]", len(e.Relation))
	}
	for _, end := range []string{e.Relation[0], e.Relation[2]} {
		if !types[end] {
			return e.bad("relation %s: there is no node_type %s", brief(e.Relation[1]), brief(end))
		}
	}
	names := []string{strings.Join(e.Relation, "\x00")}
	if e.Reverse != "" {
		names = append(names, e.Relation[2]+"\x00"+e.Reverse+"\x00"+e.Relation[0])
	}
	for _, n := range names {
		if relations[n] {
			return e.bad("relation %s is there twice", strings.ReplaceAll(n, "\x00", " "))
		}
		relations[n] = true
	}
	switch {
	case len(e.Files) == 0 && e.SourceIDCol != "", slices.Contains(e.Files, ""):
		return e.bad("files names no file")
	case e.WeightCol != "":
		return errs.With(errs.Capability, e.bad("weight_col: models take no weights of edges; leave it out"))
	case e.Features != nil:
		return errs.With(errs.Capability, e.bad("features: models take no features of edges; leave them out"))
	}
	return nil
}

const (
	classification = "classification"
	multiLabel     = "multi_label"
	regression     = "regression"
)

// String names a relation.
func (e *EdgeTable) String() string { return fmt.Sprint([]string(e.Relation)) }
