package importer

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/wide"
)

// textCase is an import of text files: those of a folder "in", or "e" alone.
type textCase struct {
	name  string
	files map[string]string
	set   func(*EdgesOptions)
	// edges are those of the dataset as "source>target", in order of the target.
	edges string
	nodes int64
	// feat and labels are given in the order of the nodes.
	feat   []float32
	labels []int32
	// want is the error, notes what is said, in place of the above.
	want, notes string
}

// import runs an import of the case's files.
func (c textCase) run(t *testing.T) (out string, notes []string, err error) {
	dir := t.TempDir()
	for n, text := range c.files {
		path := filepath.Join(dir, n)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	out = filepath.Join(t.TempDir(), "g")
	o := EdgesOptions{Options: Options{Input: Input{In: filepath.Join(dir, "in")},
		Output: Output{Out: out, Note: func(s errs.Text) { notes = append(notes, s.String()) }}}}
	if c.files["in/x.csv"] == "" {
		o.FeatureFn = RandomFeatures
	}
	for n := range c.files {
		if !strings.Contains(n, "/") {
			o.In = filepath.Join(dir, n)
		}
		if strings.HasPrefix(n, "s/") {
			o.SplitDir = filepath.Join(dir, "s")
		}
	}
	if c.set != nil {
		c.set(&o)
	}
	return out, notes, Edges(bg, o)
}

// check imports the files plain and, in make test-wide, compressed under the same names.
func (c textCase) check(t *testing.T) {
	c.checkOnce(t)
	if wide.Lean() {
		return
	}
	c.files = maps.Clone(c.files)
	for n, text := range c.files {
		c.files[n] = gz(t, text)
	}
	c.checkOnce(t)
}

func (c textCase) checkOnce(t *testing.T) {
	out, notes, err := c.run(t)
	require.Len(t, slices.Compact(slices.Sorted(slices.Values(notes))), len(notes), "said once")
	if c.want != "" {
		datasettest.RequireUsage(t, err)
		require.ErrorContains(t, err, c.want)
		require.NotContains(t, err.Error(), "\n")
		datasettest.RequireEmpty(t, filepath.Dir(out))
		return
	}
	require.NoError(t, err)
	require.Contains(t, strings.Join(notes, "\n"), c.notes)
	v := viewOf(t, out)
	var all []string
	for d := range v.indptr[1:] {
		for _, s := range v.indices[v.indptr[d]:v.indptr[d+1]] {
			all = append(all, fmt.Sprintf("%d>%d", s, d))
		}
	}
	require.Equal(t, c.edges, strings.Join(all, " "))
	if c.nodes == 0 {
		c.nodes = 4
	}
	require.EqualValues(t, c.nodes, len(v.indptr)-1)
	if c.feat != nil {
		require.Equal(t, c.feat, v.features)
	}
	if c.labels != nil {
		require.Equal(t, c.labels, v.labels)
	}
}

func ignoreColumns(o *EdgesOptions) { o.IgnoreColumns = true }

// TestTextEdges imports lists of edges as pandas, NetworkX, SNAP and KONECT write them: they
// come in as they are meant, or are refused with what decides.
func TestTextEdges(t *testing.T) {
	const path = "0>1 1>2 2>3"
	one := func(text string) map[string]string { return map[string]string{"e.csv": text} }
	const adjlist = "#make.py\n# GMT Sat Nov 28 14:42:06 2026\n# \n0 1 2\n1 2\n2 3\n3\n"
	for _, c := range []textCase{
		{name: "pandas", files: one("src,dst\n0,1\n1,2\n2,3\n"), edges: path},
		{name: "pandas, index", files: one(",src,dst\n0,0,1\n1,1,2\n2,2,3\n"), edges: path,
			notes: "not used of"},
		{name: "pandas, index, columns ignored", set: ignoreColumns,
			files: one(",src,dst\n0,0,1\n1,1,2\n2,2,3\n"), edges: path},
		{name: "pandas, index, no heading", files: one("0,0,1\n1,1,2\n2,2,3\n"),
			want: "e.csv:1: 3 columns; an edge is two node ids, and column 1 may be an index; give option src and option dst"},
		{name: "pandas, index, no heading, columns ignored", set: ignoreColumns,
			files: one("0,0,1\n1,1,2\n2,2,3\n"), want: "column 1 counts the lines"},
		{name: "columns by number", files: one("0,0,1\n1,1,2\n2,2,3\n"), edges: path,
			set: func(o *EdgesOptions) { o.Src, o.Dst = "2", "3" }},
		{name: "columns by name", files: one("a,w,b\n1,.5,0\n2,x,1\n3,,2\n"), edges: path,
			set: func(o *EdgesOptions) { o.Src, o.Dst = "b", "a" }, notes: "column 2 (w)"},
		{name: "no such column", files: one("a,w,b\n1,.5,0\n"), want: `e.csv:2: option src c: no such column; there are 3 (a, w, b)`,
			set: func(o *EdgesOptions) { o.Src, o.Dst = "c", "a" }},
		{name: "pandas, index, no names", files: one(",0,1\n0,0,1\n1,1,2\n2,2,3\n"), edges: path},
		{name: "pandas, no names", files: one("0,1\n0,1\n1,2\n2,3\n"),
			want: "e.csv:1: 0 and 1 may be an edge, which is there again"},
		{name: "pandas, no names, said", files: one("0,1\n0,1\n1,2\n2,3\n"), edges: path,
			set: func(o *EdgesOptions) { o.Header = PerFile{"edges": "yes"} }},
		{name: "begins with 0,1", files: one("0,1\n1,2\n2,3\n"), edges: path,
			notes: "is taken for an edge"},
		{name: "target first", files: one("Target;Source\n1;0\n2;1\n3;2\n"), edges: path},
		{name: "head and tail", files: one("tail,head\n0,1\n"), want: `e.csv:1: "tail" is not a node id`},
		{name: "an id of its own", files: one("edge_id\tfrom_node\tto_node\n7\t0\t1\n9\t1\t2\n8\t2\t3\n"), edges: path},
		{name: "two kinds of nodes", files: one("user_id,item_id\n0,1\n"),
			want: "e.csv:1: columns (user_id, item_id): which are the two ends"},
		{name: "names", files: one("alice,bob\n0,1\n"),
			want: `e.csv:1: "alice" is not a node id; ids are whole numbers from 0; if the line names the columns, give option header edges=yes`},
		{name: "quotes", files: one("\"src\",\"dst\"\r\n\"0\",\"1\"\r\n\"1\",2\r\n2,3\r\n"), edges: path},
		{name: "an open quote", files: one("src,dst\n0,1\n\"1,2\n"), want: "e.csv:3: "},
		{name: "weights", files: one("source,target,weight\n0,1,.5\n1,2,1\n2,3,1\n"),
			want: "3 columns (source, target, weight); an edge is two node ids, and models take no weights or times; give option ignore-columns"},
		{name: "weights between", files: one("source,weight,target\n0,.5,1\n1,2,2\n2,1,3\n"),
			set: ignoreColumns, edges: path, notes: "column 2 (weight); models take no edge weights"},

		{name: "NetworkX", files: one("0 1 {}\n1 2 {}\n2 3 {}\n"), edges: path},
		{name: "NetworkX, commas", files: one("0,1,{}\n1,2,{}\n2,3,{}\n"), edges: path},
		{name: "NetworkX, data", files: one("0 1 {}\n1 2 {'weight': 0.5, 'b': 1}\n"),
			want: `e.csv:2: the edge has data, "{'weight': 0.5, 'b': 1}"`},
		{name: "NetworkX, data ignored", set: ignoreColumns,
			files: one("0 1 {'weight': 3}\n1 2 {'weight': 0.5, 'b': 1}\n2 3 {}\n"), edges: path},
		{name: "NetworkX, weighted", files: one("0 1 0.5\n1 2 1.5\n"),
			want: "or option ignore-columns to take the first two"},
		{name: "NetworkX, weighted, ignored", files: one("0 1 0.5\n1 2 1.5\n2 3 1\n"),
			set: ignoreColumns, edges: path, notes: "column 3"},
		{name: "NetworkX, lists", files: one(adjlist), want: "e.csv:4: 3 columns, and other lines have more or fewer"},
		{name: "NetworkX, lists, columns ignored", files: one(adjlist), set: ignoreColumns,
			want: "write an edge a line"},
		{name: "lists of the same length", files: one("0 1 2\n1 2 0\n2 0 1\n"),
			want: "or write an edge a line where a line is a node and its neighbours"},

		{name: "SNAP", files: one("# Directed graph\n# Nodes: 4 Edges: 3\n# FromNodeId\tToNodeId\r\n0\t1\r\n1\t2\r\n2\t3\r\n"), edges: path},
		{name: "SNAP, cut", files: one("# Nodes: 4 Edges: 4\n# FromNodeId\tToNodeId\n0\t1\n1\t2\n2\t3\n"),
			edges: path, notes: "says that it has 4 edges, there are 3"},
		{name: "SNAP, turned", files: one("# ToNodeId\tFromNodeId\n1\t0\n2\t1\n3\t2\n"), edges: path},
		{name: "comments amid", files: one("0 1\n# hm\n1 2\n% hm\n2 3\n"), edges: path,
			notes: "comment lines amid the edges are left out: 2"},

		{name: "KONECT", files: one("% asym unweighted\n% 3 4 4\n1 2\n2\t3\n3 4 \n"), edges: path,
			notes: "ids count from 1"},
		{name: "KONECT, folder", edges: "1>0 0>1 2>1 1>2 3>2 2>3", notes: "not used of",
			files: map[string]string{"in/out.x": "% sym positive\n1 2 1 99\n2 3 1 98\n3 4 2 97\n",
				"in/meta.x": "name: x\n", "in/README.x": "?"}, set: ignoreColumns},
		{name: "KONECT, two sides", files: one("% bip unweighted\n1 2\n"), want: "is a bipartite graph"},
		{name: "KONECT, id beyond", files: one("% asym unweighted\n% 3 4 4\n1 2\n2 5\n"),
			want: "e.csv:4: node id 5 in column 2 is outside 1..4"},

		{name: "METIS", files: one("% c\n4 4\n2 3\n1 3\n1 2 4\n3\n"), want: "write an edge a line"},

		{name: "ids from 1", files: one("1 2\n2 3\n3 4\n"), want: "e.csv: the ids begin with 1: give option base 1"},
		{name: "ids from 1, said", files: one("1 2\n2 3\n3 4\n"), edges: path,
			set: func(o *EdgesOptions) { o.Base = "1" }},
		{name: "ids from 1, with 0", files: one("1 2\n2 3\n3 0\n"), edges: "3>0 1>2 2>3"},
		{name: "no edges of node 0", files: one("1 2\n2 3\n"), edges: "1>2 2>3",
			set: func(o *EdgesOptions) { o.Base = "0" }, notes: "1 of 4 nodes have no edge"},
		{name: "id 0 where ids begin with 1", files: one("1 2\n0 3\n"),
			set: func(o *EdgesOptions) { o.Base = "1" }, want: "e.csv:2: node id 0 in column 1 is outside 1.."},
		{name: "numbered anew", files: one("5 70\n70 900\n900 999999999999999999\n"), edges: path,
			set: func(o *EdgesOptions) { o.Renumber = true }},
		{name: "gaps", files: one("0 1\n1 9\n"), edges: "0>1 1>9", nodes: 10,
			notes: "7 of 10 nodes have no edge"},
		{name: "sparse", files: one("0 1\n300000000 1\n"),
			set:  func(o *EdgesOptions) { o.FeatureFn = "hash" },
			want: "the largest id in the edges is 300000000, so 2 edges would make 300000001 nodes and a dataset of 3.4 GiB; give option renumber, or option nodes 300000001"},
		{name: "beyond 2^63", files: one("0 1\n1 9223372036854775809\n"),
			want: "e.csv:2: node id 9223372036854775809 in column 2 is too large"},

		{name: "an empty cell", files: one("0\t1\n1\t\t2\n"), want: "e.csv:2: column 2 is empty"},
		{name: "an empty cell first", files: one("1\t\t2\n"), want: "e.csv:1: 3 columns, of which column 2 is empty"},
		{name: "decimal commas", files: one("1,5;2,5\n"), want: `e.csv:1: "1,5" in column 1 has a decimal comma`},
		{name: "two separators", files: one("0 1\n1,2\n"), want: `e.csv:2: "1,2" is not an edge; two node ids are needed, and by the first line white space separate them`},
		{name: "more columns later", files: one("0,1\n1,2,3\n"), want: "e.csv:2: 3 columns, the lines before have 2"},
		{name: "UTF-16", files: one("\xff\xfe0\x00 \x001\x00"), want: "e.csv is text in UTF-16"},
	} {
		t.Run(c.name, c.check)
	}
}

// TestTextRows imports features, labels and splits as pandas and NumPy write them.
func TestTextRows(t *testing.T) {
	const edges = "0 1\n1 2\n2 3\n"
	given := func(kind string, set func(*Options) *PerFile, v string) func(*EdgesOptions) {
		return func(o *EdgesOptions) { *set(&o.Options) = PerFile{kind: v} }
	}
	header := func(o *Options) *PerFile { return &o.Header }
	idColumn := func(o *Options) *PerFile { return &o.IDColumn }
	nodes := func(o *EdgesOptions) { o.Nodes = 4 }
	good := []float32{1, 2, 3, 4, 5, 6, 7, 8}
	for _, c := range []struct {
		name, x string
		set     func(*EdgesOptions)
		want    string // the error; "": good comes in
		notes   string
	}{
		{name: "plain", x: "1,2\n3,4\n5,6\n7,8\n"},
		{name: "savetxt", x: "1.000e+00 2.0\n3 4\n5 6\n7 8\n\n"},
		{name: "by id", x: "id,a,b\n3,7,8\n1,3,4\n0,1,2\n2,5,6\n"},
		{name: "by id, the last in order", x: "id,a,b\n0,1,2\n1,3,4\n3,7,8\n2,5,6\n"},
		{name: "by id, last column", x: "a,b,node_id\n7,8,3\n3,4,1\n1,2,0\n5,6,2\n"},
		{name: "by id, blank lines", x: "nodeId a b\n\n3 7 8\n\n1 3 4\n0 1 2\n2 5 6\n"},
		{name: "a comment names the ids", x: "#id a b\n3 7 8\n1 3 4\n0 1 2\n2 5 6\n"},
		{name: "pandas, index", x: ",f0,f1\n0,1,2\n1,3,4\n2,5,6\n3,7,8\n"},
		{name: "pandas, index, sorted", x: "Unnamed: 0,f0,f1\n2,5,6\n0,1,2\n1,3,4\n3,7,8\n"},
		{name: "pandas, index, no names", x: ",0,1\n0,1.0,2.0\n1,3.0,4.0\n2,5.0,6.0\n3,7.0,8.0\n"},
		{name: "pandas, index and id", x: ",id,a,b\n0,3,7,8\n1,1,3,4\n2,0,1,2\n3,2,5,6\n", notes: "an index"},
		{name: "pandas, no names, floats", x: "0,1\n1.0,2.0\n3.0,4.0\n5.0,6.0\n7.0,8.0\n", notes: "is taken for a heading"},
		{name: "pandas, no names, integers", x: "0,1\n1,2\n3,4\n5,6\n7,8\n",
			want: "x.csv:1: 0 to 1 may be the first row or"},
		{name: "pandas, no names, nodes", x: "0,1\n1,2\n3,4\n5,6\n7,8\n", set: nodes, notes: "is taken for a heading"},
		{name: "pandas, no names, said", x: "0,1\n1,2\n3,4\n5,6\n7,8\n", set: given("features", header, "yes")},
		{name: "pandas, mixed", x: "id,0,1\n3,7,8\n1,3,4\n0,1,2\n2,5,6\n"},
		{name: "mixed", x: "f0,1\n1,2\n3,4\n5,6\n7,8\n",
			want: `x.csv:1: "f0" in column 1 is not a number; if the line names the columns, give option header features=yes`},
		{name: "mixed, said", x: "f0,1\n1,2\n3,4\n5,6\n7,8\n", set: given("features", header, "yes")},
		{name: "quotes", x: "\"a, or\nb\",\"c\"\n\"1\",2\n3,\"4\"\n5,6\n7,8\n"},
		{name: "tabs", x: "\xef\xbb\xbfa\tb\r\n1\t2\r\n3\t4\r\n5\t6\r\n7\t8\r\n"},
		{name: "paper_id", x: "paper_id,a,b\n0,1,2\n1,3,4\n2,5,6\n3,7,8\n",
			want: `x.csv:1: column 1 ("paper_id") may hold the node ids or values; give option id-column features=paper_id or features=none`},
		{name: "paper_id, said", x: "paper_id,a,b\n0,1,2\n2,5,6\n1,3,4\n3,7,8\n", set: given("", idColumn, "paper_id")},
		{name: "two ids", x: "id,node,a\n0,1,2\n", want: "may hold the node ids or values"},
		{name: "ids without a name", x: "0,1.5\n1,3\n2,5\n3,7\n",
			want: "x.csv:1: column 1 may hold the node ids or a feature: it is 4 different whole numbers"},
		{name: "ids from 1 without a name", x: "2,1\n1,1\n4,3\n3,1\n", want: "column 1 may hold the node ids"},
		{name: "ids far apart without a name", x: "31336,0\n1061127,1\n1106406,0\n13195,1\n", want: "column 1 may hold the node ids"},
		{name: "ids without a name, said", x: "1,3,4\n0,1,2\n2,5,6\n3,7,8\n", set: given("features", idColumn, "1")},
		{name: "no such column", x: "1,2\n", set: given("features", idColumn, "x"), want: "option id-column x: no such column"},
		{name: "a missing id", x: "id,a\n0,1\n1,1\n3,1\n", want: "x.csv:4: node id 3, but there are 3 rows"},
		{name: "a missing id of known nodes", x: "id,a\n0,1\n3,1\n1,1\n", set: nodes, want: "x.csv has no row for node 2, nor for 0 others"},
		{name: "an id twice", x: "id,a\n0,1\n1,1\n1,1\n2,1\n", want: "x.csv:4: node 1 has a row already"},
		{name: "an id that is none", x: "id,a\n0,1\nx,1\n", want: `x.csv:3: "x" is not a node id`},
		{name: "an empty line", x: "1,2\n\n3,4\n", want: "x.csv:2: the line is empty"},
		{name: "an empty cell", x: "1,2\n3,\n", want: "x.csv:2: column 2 is empty"},
		{name: "an empty cell of tabs", x: "1\t2\t3\n1\t\t3\n", want: "x.csv:2: column 2 is empty"},
		{name: "decimal commas", x: "a;b\n7,0;0,5\n", want: `x.csv:2: "7,0" in column 1 has a decimal comma; write a point`},
		{name: "decimal commas first", x: "7,0;0,5\n5,0;0,1\n", want: `x.csv:1: "7,0" in column 1 has a decimal comma`},
		{name: "decimal commas and spaces", x: "7,0 0,5\n", want: "separated by commas"},
		{name: "a row cut", x: "1,2\n3\n", want: "x.csv:2: 1 features, the rows before have 2"},
		{name: "missing values first", x: "NA,NA\n1,2\n", want: `x.csv:1: "NA" in column 1 is not a number`},
	} {
		t.Run("features, "+c.name, textCase{files: map[string]string{"in/edges.txt": edges,
			"in/x.csv": c.x}, set: c.set, edges: "0>1 1>2 2>3", feat: good, want: c.want, notes: c.notes}.check)
	}
	for _, c := range []struct {
		name, y string
		set     func(*EdgesOptions)
		want    string // the error; "": 0, 1, 2, 0 comes in
	}{
		{name: "plain", y: "0\n1\n2\n0\n"}, {name: "floats", y: "0.0\n1.0\n2.0\n0.0\n"},
		{name: "by id", y: "id,label\n3,0\n2,2\n1,1\n0,0\n"},
		{name: "by id, last", y: "label\tid\n0\t3\n2\t2\n1\t1\n0\t0\n"},
		{name: "by id, no heading", y: "3 0\n2 2\n1 1\n0 0\n"},
		{name: "of a named id", y: "paper,label\n3,0\n2,2\n1,1\n0,0\n"},
		{name: "pandas, index", y: ",0\n0,0\n1,1\n2,2\n3,0\n"},
		{name: "pandas, index and id", y: ",id,label\n0,3,0\n1,2,2\n2,1,1\n3,0,0\n"},
		{name: "pandas, no name", y: "0\n0\n1\n2\n0\n", want: "y.csv has 5 rows, there are 4 nodes; if line 1 is a heading, give option header labels=yes"},
		{name: "pandas, no name, said", y: "0\n0\n1\n2\n0\n", set: given("labels", header, "yes")},
		{name: "names", y: "a,b\n0,0\n1,1\n", want: `y.csv:1: column 1 ("a") may hold the node ids`},
		{name: "an empty line", y: "0\n\n2\n0\n", want: "y.csv:2: the line is empty"},
		{name: "words", y: "label\ncat\ndog\ncat\ncat\n", want: `y.csv:2: label "cat" is not a class; classes are whole numbers`},
		{name: "words first", y: "None\n1\n2\n0\n", want: `y.csv:1: label "None" is not a class`},
		{name: "a fraction", y: "0\n1\n2.5\n0\n", want: "y.csv:3: label 2.5 of node 2 is not a class"},
		{name: "a missing value", y: ",0\n0,0\n1,\n", want: "y.csv:3: column 2 is empty; write nan or -1"},
	} {
		t.Run("labels, "+c.name, textCase{files: map[string]string{"in/edges.txt": edges,
			"in/x.csv": "1,2\n3,4\n5,6\n7,8\n", "in/y.csv": c.y}, set: c.set,
			edges: "0>1 1>2 2>3", labels: []int32{0, 1, 2, 0}, want: c.want}.check)
	}
	// A missing value in a column of its own is written "" by pandas.
	textCase{files: map[string]string{"in/edges.txt": edges, "in/y.csv": "y\n0\n\"\"\n2\n-1\n"},
		edges: "0>1 1>2 2>3", labels: []int32{0, -1, 2, -1},
		set: func(o *EdgesOptions) { o.UnlabelledOK = true }}.check(t)
	// Files that options name are used, also where they are in the folder.
	out, notes, err := textCase{files: map[string]string{"in/edges.txt": edges,
		"in/y.csv": "0\n1\n2\n0\n", "in/train.csv": "0\n", "in/val.csv": "1\n", "in/test.csv": "2\n",
		"in/more.csv": "0\n", "in/labels.txt": "9\n"}, set: func(o *EdgesOptions) {
		o.SplitDir, o.Labels = o.In+"/.", o.In+"/./y.csv"
	}}.run(t)
	require.NoError(t, err)
	require.Equal(t, []int64{0}, viewOf(t, out).train)
	require.Contains(t, strings.Join(notes, "\n"), "in: labels.txt, more.csv\n")
	require.NotContains(t, strings.Join(notes, "\n"), "train.csv")
	for text, want := range map[string]string{"0\n1\n": "", "node\n0\n\n1\n": "", ",0\n0,0\n1,1\n": "",
		"a,b\n0,1\n": "train.csv:1: 2 columns; a split has one", "0.5\n": `train.csv:1: "0.5" is not a node id`,
		"0,1\n": "train.csv:1: 2 columns", "9\n": "train.csv:1: node id 9 is outside 0..3"} {
		t.Run("splits, "+text, textCase{files: map[string]string{"in/edges.txt": edges, "in/y.csv": "0\n1\n2\n0\n",
			"s/train.csv": text, "s/val.csv": "2\n", "s/test.csv": "3\n"}, edges: "0>1 1>2 2>3", want: want}.check)
	}
}

// TestTextIDs: ids that count from 1, or have gaps, mean the same in all files.
func TestTextIDs(t *testing.T) {
	for name, c := range map[string]struct {
		ids [4]string
		set func(*EdgesOptions)
	}{
		"from 1": {[4]string{"1", "2", "3", "4"}, func(o *EdgesOptions) { o.Base = "1" }},
		"gaps":   {[4]string{"7", "35", "1033", "50000000000"}, func(o *EdgesOptions) { o.Renumber = true }},
	} {
		t.Run(name, func(t *testing.T) {
			fill := strings.NewReplacer("a", c.ids[0], "b", c.ids[1], "c", c.ids[2], "d",
				c.ids[3]).Replace
			k := textCase{set: c.set, files: map[string]string{"in/edges.txt": fill("a b\nb c\n"),
				"in/x.csv": "id,f\n" + fill("d,4\na,1\nc,3\nb,2\n"), "in/y.csv": fill("a,0\nb,1\nc,2\nd,0\n"),
				"s/train.csv": fill("d\na\n"), "s/val.csv": fill("b\n"), "s/test.csv": fill("c\n")}}
			out, _, err := k.run(t)
			require.NoError(t, err)
			require.Equal(t, view{indptr: []int64{0, 0, 1, 2, 2}, indices: []uint32{0, 1},
				features: []float32{1, 2, 3, 4}, labels: []int32{0, 1, 2, 0}, train: []int64{0, 3},
				val: []int64{1}, test: []int64{2}}, viewOf(t, out))
			_, err = os.Stat(filepath.Join(out, "ids.npy"))
			if name == "from 1" {
				require.ErrorIs(t, err, os.ErrNotExist)
				return
			}
			a, err := npy.Open(filepath.Join(out, "ids.npy"))
			require.NoError(t, err)
			var ids []int64
			require.NoError(t, eachInt(a, func(_, x int64) error {
				ids = append(ids, x)
				return nil
			}))
			require.Equal(t, []int64{7, 35, 1033, 50000000000}, ids)
		})
	}
}

// Errors about classes and splits name nodes by their ids in the files.
func TestTextIDsInErrors(t *testing.T) {
	base := func(o *EdgesOptions) { o.Base = "1" }
	gaps := func(o *EdgesOptions) { o.Renumber = true }
	files := func(y, train string) map[string]string {
		return map[string]string{"in/edges.txt": "1 20\n20 300\n", "in/y.csv": y,
			"s/train.csv": train, "s/val.csv": "20\n", "s/test.csv": "300\n"}
	}
	dealt := func(y string) map[string]string {
		return map[string]string{"in/edges.txt": "1 2\n2 3\n", "in/y.csv": y}
	}
	for _, c := range []textCase{
		{set: base, files: dealt("1 0\n2 -1\n3 1\n"), want: "y.csv: node 2 has no label"},
		{set: base, files: dealt("1 0\n2 5000\n3 1\n"), want: "label 5000 of node 2 would make"},
		{set: gaps, files: files("1 0\n20 1\n300 -1\n", "1\n"), want: "y.csv: node 300, position 0 of"},
		{set: gaps, files: files("1 0\n20 1\n300 1\n", "20\n"), want: "val.csv: node 20 at position 0 is also in"},
		{set: gaps, files: files("1 0\n20 1\n300 1\n", "1\n1\n"), want: "train.csv: node 1 appears twice"},
	} {
		t.Run(c.want, c.check)
	}
}

// TestDuplicatesAreCounted: repeated edges that stay are counted, as those are that are dropped.
func TestDuplicatesAreCounted(t *testing.T) {
	text := strings.Repeat("0 1\n2 1\n0 1\n", 5000) // a heavy key, and ranges
	for _, dedup := range []bool{false, true} {
		for _, memory := range []int64{1, 1 << 30} {
			out := filepath.Join(t.TempDir(), "g")
			require.NoError(t, plain(Edges)(bg, Options{Input: Input{In: writeText(t, "e.txt", text)},
				Dedup: dedup, FeatureFn: RandomFeatures, Output: Output{Out: out, Memory: memory}}))
			counts := datasettest.Open(t, out).Meta.Source.Counts
			want := map[string]int64{"duplicate-edges-kept": 14998}
			if dedup {
				want = map[string]int64{"duplicate-edges": 14998}
			}
			require.Equal(t, want, counts)
		}
	}
}

// TestNodeIDs holds the search of ids against a list.
func TestNodeIDs(t *testing.T) {
	for _, ids := range [][]int64{{0}, {5}, {0, 1, 2, 3},
		{3, 9, 1 << 40, 1<<40 + 1, 999999999999999999}} {
		im := &importer{}
		var set idSet
		set.add(ids, ids)
		require.NoError(t, im.number(&set))
		for _, id := range append([]int64{0, 4, 10, 1 << 39, 1<<60 + 5}, ids...) {
			node, ok := im.ids.node(id)
			want := slices.Index(ids, id)
			require.Equal(t, want >= 0, ok, id)
			if ok {
				require.EqualValues(t, want, node)
				require.Equal(t, id, im.idOf(node))
			}
		}
	}
}
