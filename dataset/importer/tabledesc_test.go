package importer

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/internal/errs"
)

const goodTables = `nodes:
- node_type: user
  files: users.csv
  node_id_col: id
  na: [NA]
  features:
  - {feature_col: age, transform: standard, missing: mean}
  - {feature_col: city, transform: one-hot, unknown: zero}
  labels:
  - {label_col: group, task_type: classification, split_col: part}
- node_type: shop
  files: shops.jsonl
  node_id_col: shop
  features: [{feature_col: size, transform: none}]
edges:
- relation: [user, buys, shop]
  files: buys.csv
  source_id_col: u
  dest_id_col: s
  reverse: rev_buys
`

var goodFiles = map[string]string{
	"users.csv":   "id,age,city,group,part,joined,tags\na,1,Rome,x,train,2020-01-01,1\nb,3,Oslo,y,train,2021-01-01,0\nc,NA,Rome,x,val,2022-01-01,1\nd,5,Bern,y,test,2023-01-01,\n",
	"shops.jsonl": "{\"shop\": \"s\", \"size\": 2.5}\n{\"shop\": \"t\", \"size\": 4}\n",
	"buys.csv":    "u,s\na,s\nb,t\nd,s\n",
}

// importFolder imports the tables of a folder that is made.
func importFolder(t *testing.T, files map[string]string, o TablesOptions) (*dataset.Dataset,
	error) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	for _, p := range []*string{&o.In, &o.Nodes, &o.Edges} {
		if *p != "" {
			*p = filepath.Join(dir, *p)
		}
	}
	o.Out, o.SelfLoops, o.Seed = filepath.Join(dir, "g"), "keep", 1
	if o.StatsOf == "" {
		o.StatsOf = "train"
	}
	if _, err := Tables(bg, o); err != nil {
		left, err2 := filepath.Glob(filepath.Join(dir, "*g*"))
		require.NoError(t, err2)
		require.Empty(t, slices.DeleteFunc(left, func(f string) bool {
			_, ours := files[filepath.Base(f)]
			return ours
		}), "nothing half made stays")
		return nil, err
	}
	d, err := dataset.Open(o.Out)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d, nil
}

func TestTablesDescription(t *testing.T) {
	files := map[string]string{"d.yaml": goodTables}
	for name, text := range goodFiles {
		files[name] = text
	}
	d, err := importFolder(t, files, TablesOptions{TypedOptions: TypedOptions{Input: Input{In: "d.yaml"}}, PadOption: PadOption{Pad: true}})
	require.NoError(t, err)
	s := d.Meta.Schema
	require.Equal(t, []string{"x", "y"}, s.Tasks[0].ClassNames)
	require.Equal(t, [3]int64{2, 1, 1}, [3]int64{s.Tasks[0].Train, s.Tasks[0].Val, s.Tasks[0].Test})
	require.Equal(t, "buys", s.Relations[0].Name)
	require.Equal(t, "rev_buys", s.Relations[1].Name)
	require.Equal(t, 3, s.NodeTypes[0].Dim, "age and the two cities of train")
}

// TestHostileDescriptions: each change of a good description or table is refused with its place and
// one sentence, and leaves nothing behind.
func TestHostileDescriptions(t *testing.T) {
	for _, c := range []struct{ file, old, new, want string }{
		{"d.yaml", goodTables, "", "d.yaml is empty"},
		{"d.yaml", goodTables, "[]", "d.yaml:1:1: keys with values"},
		{"d.yaml", goodTables, "nodes: [", "d.yaml:"},
		{"d.yaml", goodTables, "\x00", "d.yaml:"},
		{"d.yaml", goodTables, "\xff\xfe", "d.yaml"},
		{"d.yaml", goodTables, strings.Repeat("[", 10000), "d.yaml"},
		{"d.yaml", goodTables, "nodes: []\nedges: []\n", "nodes is empty"},
		{"d.yaml", goodTables, "nodes: &a [*a]\nedges: []\n", "d.yaml"},
		{"d.yaml", "nodes:", "x: &a {b: c}\nnodes:", "d.yaml:1:1: there is no key x"},
		{"d.yaml", "[NA]", "&a [NA]", "d.yaml:5:7: anchors"},
		{"d.yaml", "edges:", "edgs:", "did you mean edges?"},
		{"d.yaml", "nodes:", "edges: []\nnodes:", "key edges is there twice"},
		{"d.yaml", "node_type: user", "node_typ: user", "d.yaml:2:3: there is no key node_typ"},
		{"d.yaml", "files: users.csv", "files: nobody.csv", "nobody.csv"},
		{"d.yaml", "files: users.csv", "files: /etc/passwd", "outside its folder"},
		{"d.yaml", "files: users.csv", "files: ../*", "outside its folder"},
		{"d.yaml", "files: users.csv", "files: []", "files names no file"},
		{"d.yaml", "files: users.csv", "files:", "d.yaml:3:"},
		{"d.yaml", "files: users.csv", "files: '[a'", "[a"},
		{"d.yaml", "node_id_col: id", "node_id_col: idd", "has no column"},
		{"d.yaml", "node_id_col: id", "node_id_col: city", "Rome"},
		{"d.yaml", "node_id_col: id", "node_id_col: {a: b}", "one value is expected"},
		{"d.yaml", "feature_col: age", "feature_col: agee", "d.yaml:"},
		{"d.yaml", "feature_col: age", "feature_col: city", "Rome is no number"},
		{"d.yaml", "standard", "standart", "transform standart is none of"},
		{"d.yaml", "missing: mean", "missing: maybe", "d.yaml:7:5"},
		{"d.yaml", ", missing: mean", "", "users.csv:4, column age: has no value; choose what stands in its place: give option missing mean"},
		{"d.yaml", "missing: mean", "missing: category", "missing category is for"},
		{"d.yaml", "missing: mean", "size: -3", "size -3 is outside"},
		{"d.yaml", "missing: mean", "size: 1e9", "1e9 is no int"},
		{"d.yaml", "missing: mean", "size: 99999999999999999999", "is no int"},
		{"d.yaml", "missing: mean", "parts: [year]", "parts are for date"},
		{"d.yaml", "unknown: zero", "unknown: one", "unknown one is none of"},
		{"d.yaml", ", unknown: zero", "", "Bern is none of the 2 categories"},
		{"d.yaml", "unknown: zero", "categories: [Rome, Rome]", "is there twice"},
		{"d.yaml", "one-hot, unknown: zero", "hash", "needs a size"},
		{"d.yaml", "one-hot, unknown: zero", "hash, size: 300000", "outside 1..262144"},
		{"d.yaml", "one-hot, unknown: zero", "date", "is no date"},
		{"d.yaml", "one-hot, unknown: zero", "boolean", "none of true"},
		{"d.yaml", "label_col: group", "label_col: []", "label_col names no column"},
		{"d.yaml", "label_col: group", "label_col: grp", "has no column"},
		{"d.yaml", "label_col: group", "label_col: [group, part]", "several columns"},
		{"d.yaml", "label_col: group", "label_col: tags", "no label; option unlabelled-ok"},
		{"d.yaml", "classification", "link_prediction", "task_type link_prediction is none of"},
		{"d.yaml", "classification", "regression", "users.csv:2, column group: x is no number"},
		{"d.yaml", "split_col: part", "split_col: city", "split Rome is none of train"},
		{"d.yaml", "split_col: part", "split_pct: [0.9, 0.9]", "make at most 1"},
		{"d.yaml", "split_col: part", "split_pct: [.nan, 0]", ".nan is no float64"},
		{"d.yaml", "split_col: part", "split_pct: [0.5]", "two or three shares"},
		{"d.yaml", "split_col: part", "split_col: part, split_pct: [1, 0]", "split_col stands alone"},
		{"d.yaml", "split_col: part", "split_time: {col: city}", "neither a number nor a date"},
		{"d.yaml", "split_col: part", "split_time: {}", "key col is missing"},
		{"d.yaml", "split_col: part", "split_time: {col: joined, cuts: [2020-01-01]}", "cuts has 1 times"},
		{"d.yaml", "split_col: part", "split_time: {col: joined, cuts: [soon, 2020-01-01]}", "cut soon is neither"},
		{"d.yaml", "split_col: part", "split_time: {col: joined, cuts: [2022-01-01, 2020-01-01]}", "comes after"},
		{"d.yaml", "node_type: shop", "node_type: user", "node_type user is there twice"},
		{"d.yaml", "[user, buys, shop]", "[user, buys]", "relation has 2 parts"},
		{"d.yaml", "[user, buys, shop]", "[user, buys, shops]", "there is no node_type shops"},
		{"d.yaml", "[user, buys, shop]", "[shop, buys, user]", "buys.csv:2"},
		{"d.yaml", "source_id_col: u", "source_id_col: x", "has no column"},
		{"d.yaml", "  source_id_col: u\n", "", "key source_id_col is missing"},
		{"d.yaml", "reverse: rev_buys", "weight_col: w", "models take no weights"},
		{"d.yaml", "reverse: rev_buys", "features: [{feature_col: w}]", "models take no features of edges"},
		{"d.yaml", "reverse: rev_buys", "dedup: maybe", "maybe is no bool"},
		{"d.yaml", "reverse: rev_buys", "reverse: " + strings.Repeat("x", 1000), "name"},
		{"users.csv", "a,1", "a,x", "users.csv:2, column age: x is no number"},
		{"users.csv", "a,1", "a,1e999", "float32"},
		{"users.csv", "a,1", "a,0x1", "is no number"},
		{"users.csv", "a,1", "a,1_0", "is no number"},
		{"users.csv", "a,1", "a,inf", "is no number"},
		{"users.csv", "Rome,x", "\xff,x", "UTF-8"},
		{"users.csv", "b,3", "a,3", "a"},
		{"users.csv", ",x,train", ",,train", "users.csv:2, column group: no label"},
		{"users.csv", ",x,train", ",x,Train set", "split Train set is none"},
		{"users.csv", "Rome,x", "Rome," + strings.Repeat("x", 200), "at most 128 bytes"},
		{"users.csv", goodFiles["users.csv"], "", "users.csv"},
		{"users.csv", goodFiles["users.csv"], "id,age,city,group,part,joined,tags\n", "users.csv"},
		{"users.csv", goodFiles["users.csv"], "\"", "users.csv"},
		{"users.csv", "a,1,Rome", "a,1", "users.csv:2"},
		{"shops.jsonl", "2.5", "\"big\"", "shops.jsonl"},
		{"shops.jsonl", "2.5", "[1]", "shops.jsonl"},
		{"shops.jsonl", "2.5", "null", "has no value"},
		{"shops.jsonl", "2.5", "1e39", "float32"},
		{"buys.csv", "d,s", "z,s", "z"},
		{"buys.csv", "d,s", "d,", "buys.csv:4"},
		{"buys.csv", "d,s", "d", "buys.csv:4"},
	} {
		name := fmt.Sprintf("%s %.20q → %.30q", c.file, c.old, c.new)
		files := map[string]string{"d.yaml": goodTables}
		for f, text := range goodFiles {
			files[f] = text
		}
		require.Contains(t, files[c.file], c.old, name)
		files[c.file] = strings.Replace(files[c.file], c.old, c.new, 1)
		_, err := importFolder(t, files, TablesOptions{PadOption: PadOption{Pad: true},
			TypedOptions: TypedOptions{Input: Input{In: "d.yaml"}}})
		if assert.Error(t, err, name) {
			assert.Contains(t, err.Error(), c.want, name)
			assert.Contains(t, []errs.Class{errs.Usage, errs.Capability}, errs.ClassOf(err), "%s: %v", name, err)
			assert.Less(t, len(err.Error()), 1000, name)
		}
	}
}

// TestTablesTargets reads labels of several columns, numbers, lists, and splits by time.
func TestTablesTargets(t *testing.T) {
	flags := func(set func(*TablesOptions)) TablesOptions {
		o := TablesOptions{Nodes: "n.jsonl", ID: "id", Edges: "e.csv", Src: "u", Dst: "v"}
		o.ColumnOptions.Features = "x"
		set(&o)
		return o
	}
	var nodes strings.Builder
	for i := range 10 {
		fmt.Fprintf(&nodes, `{"id": "n%d", "x": %d, "a": %d, "b": true, "y": %d.5, "t": %d, "tags": ["p", "q%d"], "c": %d}`+"\n",
			i, i, i%2, i, 2000+i/2, i%2, 10*(i%3))
	}
	files := map[string]string{"n.jsonl": nodes.String(), "e.csv": "u,v\nn1,n2\nn3,n4\n"}
	d, err := importFolder(t, files, flags(func(o *TablesOptions) { o.Label, o.Target = "a,b", "multi-label" }))
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b"}, d.Meta.Tasks[0].ClassNames)
	d, err = importFolder(t, files, flags(func(o *TablesOptions) { o.Label, o.Target = "tags", "multi-label" }))
	require.NoError(t, err)
	require.Equal(t, []string{"p", "q0", "q1"}, d.Meta.Tasks[0].ClassNames)
	d, err = importFolder(t, files, flags(func(o *TablesOptions) { o.Label, o.Target = "y", "regression" }))
	require.NoError(t, err)
	require.Equal(t, 1, d.Meta.Tasks[0].Columns)
	d, err = importFolder(t, files, flags(func(o *TablesOptions) { o.Label, o.SplitTime = "c", "t" }))
	require.NoError(t, err)
	require.Equal(t, []string{"0", "10", "20"}, d.Meta.ClassNames)
	train, err := d.Split("train")
	require.NoError(t, err)
	require.Equal(t, []int64{0, 1, 2, 3, 4, 5}, train, "nodes of one time are in one split")
	d, err = importFolder(t, files, flags(func(o *TablesOptions) { o.Label, o.SplitTime = "c", "t:2001,2002" }))
	require.NoError(t, err)
	test, err := d.Split("test")
	require.NoError(t, err)
	require.Equal(t, []int64{4, 5, 6, 7, 8, 9}, test)
}

// TestTablesTypedTargets: a type's nodes have numbers or several labels, and a cell has no value
// where the user says so alone, in any kind of file.
func TestTablesTypedTargets(t *testing.T) {
	files := map[string]string{"d.yaml": goodTables}
	for name, text := range goodFiles {
		files[name] = text
	}
	files["users.csv"] = "id,age,city,group,part,a,b\na,1,Rome,1.5,train,0,1\nb,3,Oslo,-1,train,1,1\nc,NA,Rome,2,val,-9,0\nd,5,Bern,NA,test,1,0\n"
	run := func(o TablesOptions, pairs ...string) (*dataset.Dataset, error) {
		files["d.yaml"] = strings.NewReplacer(pairs...).Replace(goodTables)
		o.In, o.Pad = "d.yaml", true
		return importFolder(t, files, o)
	}
	var o TablesOptions
	_, err := run(o, "classification", "regression")
	require.ErrorContains(t, err, "users.csv:5, column group: no label; option unlabelled-ok")
	o.UnlabelledOK = true
	d, err := run(o, "classification", "regression")
	require.NoError(t, err)
	task := d.Meta.Tasks[0]
	require.Equal(t, [4]any{"user", "regression", 1, int64(0)}, [4]any{task.Type, task.Target, task.Columns, task.Test})
	y, err := d.TaskValues(0)
	require.NoError(t, err)
	require.Equal(t, []float32{1.5, -1, 2}, y[:3])
	require.True(t, y[3] != y[3])
	labels := []string{"label_col: group", "label_col: [a, b]", "classification", "multi_label"}
	_, err = run(o, labels...)
	require.ErrorContains(t, err, "users.csv:4, column a: -9 is none of true, false, yes, no, 1 and 0; option na names")
	d, err = run(o, append(labels, "[NA]", "[NA, '-9']")...)
	require.NoError(t, err)
	several, err := d.TaskMultiLabels(0)
	require.NoError(t, err)
	require.Equal(t, []uint8{0, 1, 1, 1, 255, 0, 1, 0}, several)
	require.Equal(t, []string{"a", "b"}, d.Meta.Tasks[0].ClassNames)

	// -1 among classes from 0 may be no label, and is a class among others.
	for _, c := range []struct{ classes, na, say string }{
		{"-1 0 1", "", "-1 stands among classes from 0; option na -1"}, {"-1 0 1", "-1", ""}, {"-1 1 1", "", ""},
	} {
		f := strings.Fields(c.classes)
		files := map[string]string{"e.csv": "u,v\na,b\n", "n.csv": "id,x,c\na,1," + f[0] + "\nb,2," + f[1] + "\nc,3," + f[2] + "\n"}
		o := TablesOptions{Nodes: "n.csv", ID: "id", Edges: "e.csv", Src: "u", Dst: "v"}
		o.Label, o.NA, o.UnlabelledOK, o.TrainFraction = "c", c.na, true, 1
		d, err := importFolder(t, files, o)
		if c.say != "" {
			require.ErrorContains(t, err, c.say)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, 2, d.Meta.Classes)
		require.EqualValues(t, len(c.na)/2, d.Meta.Unlabelled)
	}
}
