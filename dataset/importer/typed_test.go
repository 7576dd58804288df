package importer

import (
	"archive/zip"
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/edges"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/testing/datasettest"
)

// igbh is IGBH with options that all formats have.
func igbh(set func(*IGBHOptions)) importFunc {
	return func(ctx context.Context, o Options) error {
		h := IGBHOptions{TypedOptions: TypedOptions{Input: o.Input, Output: o.Output}}
		if set != nil {
			set(&h)
		}
		return IGBH(ctx, h)
	}
}

func pairsOf(t testing.TB, ids ...int64) string {
	return string(datasettest.Arr{DT: "<i8", Shape: []int64{int64(len(ids)) / 2, 2},
		Data: ids}.Bytes(t))
}

func floats(t testing.TB, rows int64, v ...float32) string {
	return string(datasettest.Arr{DT: "<f4", Shape: []int64{rows, int64(len(v)) / rows},
		Data: v}.Bytes(t))
}

// igbhTree is a folder of five papers, three authors, two fields and an institute; raw is without
// headers where large and full have none.
func igbhTree(t testing.TB, raw bool) tree {
	f := igbTree(t, raw)
	delete(f, "processed/author__to__institute/edge_index.npy")
	f["processed/author/node_feat.npy"] = floats(t, 3, 20, 21, 22, 23, 24, 25)
	if raw {
		f["processed/author/node_feat.npy"] = plainFloats(20, 21, 22, 23, 24, 25)
	}
	f["processed/fos/node_feat.npy"] = floats(t, 2, 30, 31, 32, 33)
	f["processed/institute/node_feat.npy"] = floats(t, 1, 40, 41)
	f["processed/institute/institute_id_index_mapping.npy"] = "not read"
	f["processed/paper__cites__paper/edge_index.npy"] = pairsOf(t, 0, 1, 0, 2, 3, 3, 4, 2)
	f["processed/paper__written_by__author/edge_index.npy"] = pairsOf(t, 0, 0, 4, 2, 1, 2)
	f["processed/author__affiliated_to__institute/edge_index.npy"] = pairsOf(t, 2, 0, 0, 0)
	f["processed/paper__topic__fos/edge_index.npy"] = pairsOf(t, 3, 1)
	return f
}

// lists are the in-neighbours of each node, one after the other.
func lists(t testing.TB, d *dataset.Dataset) map[string]string {
	all := map[string]string{}
	for i := range d.Meta.Relations {
		tp, err := d.Relation(i)
		require.NoError(t, err)
		require.NoError(t, tp.ValidateOffsets())
		text := ""
		for v := range tp.NumNodes {
			for k := range tp.InDegree(v) {
				text += fmt.Sprintf("%d>%d ", tp.Neighbor(v, k), v)
			}
		}
		all[d.Meta.Relations[i].String()] = strings.TrimSpace(text)
	}
	return all
}

func TestImportIGBH(t *testing.T) {
	smallIGB(t)
	files := map[string]string{
		"paper cites paper":                  "0>1 0>2 4>2 3>3",
		"paper written_by author":            "0>0 1>2 4>2",
		"author affiliated_to institute":     "0>0 2>0",
		"paper topic fos":                    "3>1",
		"paper rev_cites paper":              "1>0 2>0 3>3 2>4",
		"author rev_written_by paper":        "0>0 2>1 2>4",
		"institute rev_affiliated_to author": "0>0 0>2",
		"fos rev_topic paper":                "1>3",
	}
	for _, raw := range []bool{false, true} {
		for _, c := range []struct {
			relations string
			order     []string
		}{
			{"files", []string{"paper cites paper", "paper written_by author",
				"author affiliated_to institute", "paper topic fos"}},
			{"gids", []string{"paper cites paper", "paper rev_cites paper",
				"paper written_by author", "author rev_written_by paper",
				"author affiliated_to institute", "institute rev_affiliated_to author",
				"paper topic fos", "fos rev_topic paper"}},
			{"mlperf", []string{"paper cites paper", "paper written_by author",
				"author rev_written_by paper", "author affiliated_to institute",
				"institute rev_affiliated_to author", "paper topic fos", "fos rev_topic paper"}},
		} {
			out := filepath.Join(t.TempDir(), "g")
			in := igbhTree(t, raw).write(t, filepath.Join(t.TempDir(), "large"))
			said := ""
			require.NoError(t, igbh(func(o *IGBHOptions) { o.Relations = c.relations })(bg,
				Options{Input: Input{In: in}, Output: Output{Out: out,
					Note: func(s errs.Text) { said += s.String() }}}))
			d := datasettest.Open(t, out)
			m := &d.Meta
			var names []string
			for i := range m.Relations {
				r := &m.Relations[i]
				names = append(names, r.String())
				if r.Reverse != nil {
					require.Equal(t, i, *m.Relations[*r.Reverse].Reverse)
				}
			}
			require.Equal(t, c.order, names)
			for name, text := range lists(t, d) {
				want := files[name]
				if c.relations == "mlperf" && name == "paper cites paper" {
					// no loop of the file, two a paper, both ways
					want = "0>0 0>0 1>0 2>0 0>1 1>1 1>1 0>2 2>2 2>2 4>2 3>3 3>3 2>4 4>4 4>4"
				}
				require.Equal(t, want, text, "%s of %s", name, c.relations)
			}
			require.Equal(t, []float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 25, 30, 31,
				32, 33, 40, 41}, datasettest.WideRows(t, d))
			require.Equal(t, []int64{0, 5, 8, 10}, []int64{m.FirstRow(0), m.FirstRow(1),
				m.FirstRow(2), m.FirstRow(3)})
			require.Equal(t, 19, m.Tasks[0].Classes)
			labels, err := d.TaskLabels(0)
			require.NoError(t, err)
			require.Equal(t, []int32{0, 1, 2, 1, 0}, labels)
			for i, want := range [][]int64{{0, 1, 2}, {3}, {4}} {
				got, err := d.TaskSplit(0, dataset.Splits[i])
				require.NoError(t, err)
				require.Equal(t, want, got)
			}
			require.Contains(t, said, "processed/institute/institute_id")
		}
	}
}

func TestImportIGBHBad(t *testing.T) {
	smallIGB(t)
	const cites = "processed/paper__cites__paper/edge_index.npy"
	const writes = "processed/paper__written_by__author/edge_index.npy"
	const author = "processed/author/node_feat.npy"
	set := func(name, text string) func(tree) { return func(f tree) { f[name] = text } }
	array := func(dt string, shape []int64, data any) string {
		return string(datasettest.Arr{DT: dt, Shape: shape, Data: data}.Bytes(t))
	}
	refuses(t, igbh(nil), "large", func() tree { return igbhTree(t, true) }, map[string]damaged{
		"no labels":     {change: without("processed/paper/node_label_19.npy"), want: []string{"has no processed/paper/node_label_19.npy"}},
		"no features":   {change: without("processed/paper/node_feat.npy"), want: []string{"has no processed/paper/node_feat.npy"}},
		"no 2K":         {change: without("processed/paper/node_label_2K.npy"), imp: igbh(func(o *IGBHOptions) { o.Classes = "2K" }), want: []string{"node_label_2K.npy"}},
		"other classes": {imp: igbh(func(o *IGBHOptions) { o.Classes = "20" }), want: []string{"classes", "20"}},
		"other relations": {imp: igbh(func(o *IGBHOptions) { o.Relations = "some" }),
			want: []string{"relations", "some"}},
		"no author": {change: without(author),
			want: []string{"there are no nodes of type author"}},
		"no relations": {change: without(cites, writes, "processed/paper__topic__fos/edge_index.npy",
			"processed/author__affiliated_to__institute/edge_index.npy"), want: []string{"has no relation"}},
		"a relation without edges": {change: func(f tree) {
			f["processed/paper__venue__conference/edges.npy"] = f[cites]
		}, want: []string{"paper__venue__conference has no edge_index.npy"}},
		"a name of two parts": {change: set("processed/paper__author/edge_index.npy", "x"),
			want: []string{"must be SRC__REL__DST"}},
		"a name of four parts": {change: set("processed/paper__a__b__author/edge_index.npy", "x"),
			want: []string{"must be SRC__REL__DST"}},
		"a name without a relation": {change: set("processed/paper____author/edge_index.npy", "x"),
			want: []string{"must be SRC__REL__DST"}},
		"a name with a control character": {change: set("processed/paper__a\x01__author/edge_index.npy",
			pairsOf(t, 0, 0)), want: []string{"a name has 1 to 128 bytes of printable"}},
		"a type of another name": {change: set("processed/paper__to__papers/edge_index.npy",
			pairsOf(t, 0, 0)), want: []string{"there are no nodes of type papers"}},
		"the reverse of a reverse": {change: set("processed/author__rev_written_by__paper/edge_index.npy",
			pairsOf(t, 0, 0)), want: []string{`author rev_written_by paper`, "there twice"}},
		"[2, E]": {change: set(writes, array("<i8", []int64{2, 3}, []int64{0, 1, 2, 0, 1, 2})),
			want: []string{"edges have shape (2, 3), must be (edges, 2)"}},
		"three columns": {change: set(writes, array("<i8", []int64{2, 3}, []int64{0, 1, 2, 0, 1, 2})),
			want: []string{"must be (edges, 2)"}},
		"one dimension": {change: set(writes, array("<i8", []int64{4}, []int64{0, 1, 2, 0})),
			want: []string{"must be (edges, 2)"}},
		"floats for ids": {change: set(writes, array("<f4", []int64{1, 2}, []float32{0, 1})),
			want: []string{"holds <f4, integers are needed"}},
		// 4 is a paper, and no author: the ids of another type's range.
		"an id of the other type": {change: set(writes, pairsOf(t, 0, 4)),
			want: []string{writes, "node id 4 at position 1 is outside 0..2"}},
		"an id beyond both": {change: set(writes, pairsOf(t, 9, 0)),
			want: []string{"node id 9 at position 0 is outside 0..4"}},
		"a negative id":       {change: set(writes, pairsOf(t, 0, 0, -1, 0)), want: []string{"node id -1 at position 2"}},
		"ids that begin at 1": {change: set(writes, pairsOf(t, 1, 3)), want: []string{"ids count from 0"}},
		"edges cut":           {change: cut(writes, -8), want: []string{writes, "truncated"}},
		"edges of no header":  {change: set(writes, "0 1"), want: []string{writes}},
		"authors cut":         {change: cut(author, -4), want: []string{author, "no raw float32 rows of 2"}},
		"no authors":          {change: set(author, ""), want: []string{author}},
		"wide authors": {change: set(author, floats(t, 3, make([]float32, 30)...)),
			want: []string{"stored as wide as the widest, 10 numbers", "more than their", "option pad"}},
		"authors of one number": {change: set(author, array("<f4", []int64{3}, []float32{1, 2, 3})),
			want: []string{"features have shape (3,), must be (nodes, dim)"}},
		"NaN of an author": {change: set(author, plainFloats(1, 2, 3, nan32(), 5, 6)),
			want: []string{author, "feature 1 of node 1 is NaN"}},
		"a class too many": {change: set("processed/paper/node_label_19.npy", plainFloats(0, 1, 19, 0, 0)),
			want: []string{"label 19 of node 2", "says 19 classes"}},
		"half a class": {change: set("processed/paper/node_label_19.npy", plainFloats(0, 1, 0.5, 0, 0)),
			want: []string{"label 0.5 of node 2"}},
		"labels cut":             {change: cut("processed/paper/node_label_19.npy", -4), want: []string{"node_label_19.npy"}},
		"a paper short":          {change: cut("processed/paper/node_feat.npy", -8), want: []string{"node_feat.npy"}},
		"a name that ends early": {change: set("processed/paper__/edge_index.npy", "x"), want: []string{"must be SRC__REL__DST"}},
	})
}

func nan32() float32 { z := float32(0); return z / z }

// TestImportIGBHPad stores narrow rows beside wide ones where that is asked for.
func TestImportIGBHPad(t *testing.T) {
	smallIGB(t)
	f := igbhTree(t, false)
	f["processed/fos/node_feat.npy"] = floats(t, 2, 1, 2, 3, 4, 5, 6)
	out := filepath.Join(t.TempDir(), "g")
	said := ""
	require.NoError(t, igbh(func(o *IGBHOptions) { o.Pad = true })(bg,
		Options{Input: Input{In: f.write(t, t.TempDir())}, Output: Output{Out: out,
			Note: func(s errs.Text) { said += s.String() }}}))
	require.Contains(t, said, "3 numbers: 36 B more than their 96 B on SSDs (37.5 %)")
	d := datasettest.Open(t, out)
	require.Equal(t, []float32{0, 1, 0}, datasettest.WideRows(t, d)[:3])
	require.Equal(t, []float32{1, 2, 3, 4, 5, 6, 40, 41, 0}, datasettest.WideRows(t, d)[24:])
}

// TestImportTypedResume ends an import of several relations and types before and after each line
// of its journal.
func TestImportTypedResume(t *testing.T) {
	smallIGB(t)
	defer func(d func([]byte, bool) error) {
		build.JournalStep, edges.SyncEvery = d, 10e9
	}(build.JournalStep)
	edges.SyncEvery = 0
	const nodes, many = 2000, 5000
	ids := func(seed uint64) string {
		v := make([]int64, 2*many)
		for i := range v {
			v[i] = int64(philox.Mix(uint64(i)+seed*many) % nodes)
		}
		return pairsOf(t, v...)
	}
	f := tree{}
	rows := make([]float32, nodes*40)
	for i := range rows {
		rows[i] = float32(i % 977)
	}
	for _, name := range []string{"paper", "author"} {
		f["processed/"+name+"/node_feat.npy"] = floats(t, nodes, rows...)
	}
	f["processed/paper/node_label_19.npy"] = string(datasettest.Arr{DT: "<f4", Shape: []int64{nodes},
		Data: make([]float32, nodes)}.Bytes(t))
	f["processed/paper__cites__paper/edge_index.npy"] = ids(1)
	f["processed/paper__written_by__author/edge_index.npy"] = ids(2)
	o := Options{Input: Input{In: f.write(t, t.TempDir())}, Output: Output{Memory: 1}}
	o.Out = filepath.Join(t.TempDir(), "g")
	require.NoError(t, igbh(nil)(bg, o))
	want := datasettest.Digest(t, o.Out)

	o.Out = filepath.Join(t.TempDir(), "g")
	var notes []string
	o.Note = func(s errs.Text) { notes = append(notes, s.String()) }
	steps := 0
	for done := false; !done; steps++ {
		require.Less(t, steps, 600)
		n := 0
		build.JournalStep = func(line []byte, _ bool) error {
			for _, k := range []string{"begin", "source", "folder"} {
				if bytes.Contains(line, []byte(`"`+k+`"`)) {
					return nil
				}
			}
			if n++; n > (steps+1)%2 {
				return context.Canceled
			}
			return nil
		}
		err := igbh(nil)(bg, o)
		if done = err == nil; !done {
			require.ErrorIs(t, err, context.Canceled)
		}
	}
	require.Greater(t, steps, 20)
	require.Equal(t, want, datasettest.Digest(t, o.Out))
	require.Contains(t, strings.Join(notes, "\n"), "the edges of 2 relations")
}

func triplesOf(set func(*TriplesOptions)) importFunc {
	return func(ctx context.Context, o Options) error {
		h := TriplesOptions{TypedOptions: TypedOptions{Input: o.Input, Output: o.Output}}
		if set != nil {
			set(&h)
		}
		return Triples(ctx, h)
	}
}

func triplesTree() tree {
	return tree{"triples.tsv": "src\trelation\tdst\nann\tknows\tbob\nbob\tlives in\tBonn\nann\tlives in\tBonn\n" +
		"bob\tknows\tbob\n",
		"labels.tsv": "node\tlabel\tsplit\nbob\twise\ttrain\nann\tkind\ttest\n"}
}

func TestImportTriples(t *testing.T) {
	out := filepath.Join(t.TempDir(), "g")
	in := triplesTree().write(t, t.TempDir())
	require.NoError(t, triplesOf(nil)(bg, Options{Input: Input{In: in}, Output: Output{Out: out}}))
	d := datasettest.Open(t, out)
	require.Equal(t, map[string]string{"entity knows entity": "0>1 1>1",
		"entity rev_knows entity": "1>0 1>1", "entity lives in entity": "0>2 1>2",
		"entity rev_lives in entity": "2>0 2>1"}, lists(t, d))
	require.Zero(t, d.Meta.Rows())
	names, err := d.Names()
	require.NoError(t, err)
	require.Equal(t, []string{"ann", "bob", "Bonn"}, names)
	labels, err := d.Labels()
	require.NoError(t, err)
	require.Equal(t, []int32{0, 1, -1}, labels)
	require.Equal(t, []string{"kind", "wise"}, d.Meta.ClassNames)
	for i, want := range [][]int64{{1}, {}, {0}} {
		got, err := d.Split(dataset.Splits[i])
		require.NoError(t, err)
		require.Equal(t, want, got)
	}

	out = filepath.Join(t.TempDir(), "g")
	require.NoError(t, triplesOf(func(o *TriplesOptions) {
		o.OneWay, o.FeatureFn, o.Dim = true, "hash:3", 5
	})(bg, Options{Input: Input{In: filepath.Join(in, "triples.tsv")}, Output: Output{Out: out}}))
	d = datasettest.Open(t, out)
	require.Len(t, d.Meta.Relations, 2)
	require.Equal(t, int64(3), d.Meta.Rows())
	require.Equal(t, "hash:3", d.FeatureFn())
	require.Len(t, datasettest.WideRows(t, d), 15)
	_, err = dataset.VerifyFiles(bg, d, nil)
	require.NoError(t, err)
}

func TestImportTriplesBad(t *testing.T) {
	set := func(name, text string) func(tree) { return func(f tree) { f[name] = text } }
	const triples, labels = "triples.tsv", "labels.tsv"
	relations := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "a\tr%d\tb\n", i)
		}
		return b.String()
	}
	refuses(t, triplesOf(nil), "kg", triplesTree, map[string]damaged{
		"no triples":     {change: without(triples), want: []string{"has no triples.tsv"}},
		"no labels":      {change: without(labels), want: []string{labels, "option labels"}},
		"empty":          {change: set(triples, ""), want: []string{"holds no triples"}},
		"a heading only": {change: set(triples, "src\trelation\tdst\n"), want: []string{"holds no triples"}},
		"two fields":     {change: set(triples, "a\tb\n"), want: []string{triples + ":1: ", "[src relation dst] by tabs"}},
		"four fields":    {change: set(triples, "a\tr\tb\nc\td\te\tf\n"), want: []string{triples + ":2: "}},
		"an empty name":  {change: set(triples, "a\t\tb\n"), want: []string{triples + ":1: "}},
		"spaces":         {change: set(triples, "a r b\n"), want: []string{triples + ":1: "}},
		"a relation's name with a control character": {change: set(triples, "a\tr\x01\tb\nbob\tx\tann\n"),
			want: []string{"a name has 1 to 128 bytes of printable"}},
		"a long name of a relation": {change: set(triples, "bob\t"+strings.Repeat("r", 200)+"\tann\n"),
			want: []string{"a name has 1 to 128 bytes"}},
		"a reverse that is there": {change: set(triples, "bob\tr\tann\nann\trev_r\tbob\n"),
			want: []string{`"rev_r" has the name that the reverse of "r" would get`}},
		"65,536 relations": {change: set(triples, relations(32_768)+"bob\tx\tann\n"),
			want: []string{"relations: there are 65538, must be 1 to 65535"}},
		"a label of no node":    {change: set(labels, "eve\tkind\n"), want: []string{labels + ":1: node eve is in no triple"}},
		"a label twice":         {change: set(labels, "ann\tkind\nann\twise\n"), want: []string{labels + ":2: node ann has a label already"}},
		"another split":         {change: set(labels, "ann\tkind\tdev\n"), want: []string{"split dev is none of"}},
		"some without a split":  {change: set(labels, "ann\tkind\ttest\nbob\twise\n"), want: []string{"1 of 2 nodes have a split"}},
		"no label in the file":  {change: set(labels, "node\tlabel\tsplit\n"), want: []string{"holds no labels"}},
		"a node without label":  {change: set(labels, "ann\n"), want: []string{labels + ":1: "}},
		"a dim without its use": {imp: triplesOf(func(o *TriplesOptions) { o.Dim = 3 }), want: []string{"option dim 3"}},
		"another function": {imp: triplesOf(func(o *TriplesOptions) { o.FeatureFn = "random" }),
			want: []string{"random"}},
	})
}

// ogbMagTree is a small copy of ogbn-mag's layout.
func ogbMagTree(t testing.TB) tree {
	return tree{
		"raw/triplet-type-list.csv.gz":                               gz(t, "author,writes,paper\npaper,cites,paper\n"),
		"raw/num-node-dict.csv.gz":                                   gz(t, "author,paper\n3,4\n"),
		"raw/nodetype-has-feat.csv.gz":                               gz(t, "author,paper\nFalse,True\n"),
		"raw/node-feat/paper/node-feat.csv.gz":                       gz(t, "1,2\n3,4\n5,6\n7,9\n"),
		"raw/node-feat/paper/node_year.csv.gz":                       gz(t, "1\n1\n1\n1\n"),
		"raw/node-label/paper/node-label.csv.gz":                     gz(t, "0\n1\n2\n1\n"),
		"raw/relations/author___writes___paper/edge.csv.gz":          gz(t, "0,0\n0,1\n2,3\n0,3\n"),
		"raw/relations/author___writes___paper/num-edge-list.csv.gz": gz(t, "4\n"),
		"raw/relations/paper___cites___paper/edge.csv.gz":            gz(t, "0,1\n1,0\n2,2\n3,0\n"),
		"raw/relations/paper___cites___paper/num-edge-list.csv.gz":   gz(t, "4\n"),
		"split/time/nodetype-has-split.csv.gz":                       gz(t, "author,paper\nFalse,True\n"),
		"split/time/paper/train.csv.gz":                              gz(t, "0\n1\n"),
		"split/time/paper/valid.csv.gz":                              gz(t, "3\n"),
		"split/time/paper/test.csv.gz":                               gz(t, "2\n"),
	}
}

func TestImportOGBTyped(t *testing.T) {
	open := func(set func(*OGBOptions)) *dataset.Dataset {
		out := filepath.Join(t.TempDir(), "g")
		o := OGBOptions{Options: Options{Input: Input{In: ogbMagTree(t).write(t, t.TempDir())},
			Output: Output{Out: out}}}
		set(&o)
		require.NoError(t, OGB(bg, o))
		return datasettest.Open(t, out)
	}
	d := open(func(*OGBOptions) {})
	require.Equal(t, map[string]string{"author writes paper": "0>0 0>1 0>3 2>3",
		"paper cites paper": "1>0 3>0 0>1 2>2"}, lists(t, d))
	require.Equal(t, "paper", d.Meta.NodeTypes[0].Name, "types with rows come first")
	require.Equal(t, int64(4), d.Meta.Rows())
	require.Equal(t, []int64{2, 1, 1}, []int64{d.Meta.Train, d.Meta.Val, d.Meta.Test})
	labels, err := d.Labels()
	require.NoError(t, err)
	require.Equal(t, []int32{0, 1, 2, 1}, labels)

	d = open(func(o *OGBOptions) { o.Undirected, o.Fill = true, "author=mean:rev_writes" })
	require.Equal(t, map[string]string{"author writes paper": "0>0 0>1 0>3 2>3",
		"paper rev_writes author": "0>0 1>0 3>0 3>2", "paper cites paper": "1>0 3>0 0>1 0>3"}, lists(t, d))
	require.Equal(t, []float32{11 / float32(3), 5, 0, 0, 7, 9}, // the second author has no paper
		datasettest.WideRows(t, d)[:6])
	require.Equal(t, "author", d.Meta.NodeTypes[0].Name)
}

func TestImportOGBTypedBad(t *testing.T) {
	const nodes, types = "raw/num-node-dict.csv.gz", "raw/triplet-type-list.csv.gz"
	const writes = "raw/relations/author___writes___paper/edge.csv.gz"
	set := func(name, text string) func(tree) { return func(f tree) { f[name] = gz(t, text) } }
	fill := func(rule string) importFunc {
		return with(OGB, func(o *OGBOptions) { o.Fill, o.Undirected = rule, true })
	}
	refuses(t, plain(OGB), "ogbn_mag", func() tree { return ogbMagTree(t) }, map[string]damaged{
		"no counts":                {change: without(nodes), want: []string{"num-node-dict.csv.gz"}},
		"counts of two graphs":     {change: set(nodes, "author,paper\n3,4\n5,6\n"), want: []string{"has 3 lines, must have two"}},
		"no number":                {change: set(nodes, "author,paper\n3,many\n"), want: []string{"many is not a number of nodes of type paper"}},
		"no nodes":                 {change: set(nodes, "author,paper\n3,0\n"), want: []string{"0 is not a number"}},
		"a count too few":          {change: set(nodes, "author,paper\n3\n"), want: []string{"num-node-dict.csv.gz"}},
		"a type as a path":         {change: set(nodes, "../author,paper\n3,4\n"), want: []string{"../author is no name of a type"}},
		"a type of dots":           {change: set(nodes, "..,paper\n3,4\n"), want: []string{".. is no name of a type"}},
		"a type twice":             {change: set(nodes, "paper,paper\n3,4\n"), want: []string{"paper"}},
		"a type that is not there": {change: set(nodes, "writer,paper\n3,4\n"), want: []string{"there are no nodes of type author"}},
		"a relation of two":        {change: set(types, "author,paper\n"), want: []string{"a relation is SRC,REL,DST"}},
		"a relation as a path":     {change: set(types, "author,../../x,paper\n"), want: []string{"a relation is SRC,REL,DST"}},
		"a relation twice": {change: set(types, "paper,cites,paper\npaper,cites,paper\n"),
			want: []string{"the relation is there twice"}},
		"no edges":                {change: without(writes), want: []string{"edge.csv.gz is missing"}},
		"an author beyond":        {change: set(writes, "0,0\n0,1\n2,3\n3,0\n"), want: []string{"the edge 3,0 is outside 0..2 and 0..3"}},
		"beyond both":             {change: set(writes, "0,0\n0,1\n2,3\n9,0\n"), want: []string{"edge.csv.gz"}},
		"another number of edges": {change: set(writes, "0,0\n"), want: []string{"edge.csv.gz"}},
		"a row too few":           {change: set("raw/node-feat/paper/node-feat.csv.gz", "1,2\n3,4\n"), want: []string{"node-feat.csv.gz"}},
		"a row too many": {change: set("raw/node-feat/paper/node-feat.csv.gz", "1,2\n3,4\n5,6\n7,8\n9,9\n"),
			want: []string{"node-feat.csv.gz"}},
		"no labels": {change: without("raw/node-label/paper/node-label.csv.gz"),
			want: []string{"has no node-label/TYPE/node-label.csv.gz"}},
		"labels of two types": {change: set("raw/node-label/author/node-label.csv.gz", "0\n0\n0\n"),
			want: []string{"labels of two types"}},
		"splits that overlap":           {change: set("split/time/paper/test.csv.gz", "1\n"), want: []string{"the splits must be apart"}},
		"a split of another type's ids": {change: set("split/time/paper/test.csv.gz", "4\n"), want: []string{"test.csv.gz"}},
		"a split beyond":                {change: set("split/time/paper/test.csv.gz", "-1\n"), want: []string{"test.csv.gz"}},
		"fill of no type":               {imp: fill("venue=mean:rev_writes"), want: []string{"option fill venue: there are no nodes of that type"}},
		"fill of rows":                  {imp: fill("paper=mean:cites"), want: []string{"the type has rows of its own"}},
		"fill of no relation":           {imp: fill("author=mean:writes"), want: []string{"no relation writes ends at", "rev_writes"}},
		"fill without how":              {imp: fill("author"), want: []string{"give TYPE=mean:RELATION"}},
		"fill by the sum":               {imp: fill("author=sum:rev_writes"), want: []string{"give TYPE=mean:RELATION"}},
		"fill twice":                    {imp: fill("author=mean:a,author=mean:b"), want: []string{"type author is there twice"}},
		"features beside": {imp: with(OGB, func(o *OGBOptions) { o.FeatureFn = "hash" }),
			want: []string{"has several types, whose features"}},
	})
	// A fill of a graph of one type.
	err := fill("a=mean:b")(bg, Options{Input: Input{In: ogbTree(t).write(t, t.TempDir())},
		Output: Output{Out: filepath.Join(t.TempDir(), "g")}})
	require.ErrorContains(t, err, "are for graphs of several types")
}

// torchFile is a file of PyTorch with a dictionary of numbers.
func torchFile(t testing.TB, counts ...any) string {
	var p []byte
	p = append(p, 0x80, 2, '}', '(')
	for _, c := range counts {
		switch x := c.(type) {
		case string:
			p = append(p, 'X', byte(len(x)), 0, 0, 0)
			p = append(p, x...)
		case int:
			p = append(p, 'J', byte(x), byte(x>>8), byte(x>>16), byte(x>>24))
		}
	}
	p = append(p, 'u', '.')
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	w, err := z.Create("meta/data.pkl")
	require.NoError(t, err)
	_, err = w.Write(p)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	return b.String()
}

func magTypedTree(t testing.TB) tree {
	f := magTree(t, nil)
	f["meta.pt"] = torchFile(t, "paper", 5, "author", 3, "institution", 2, "num_classes", 153)
	two := func(ids ...int64) string {
		return string(datasettest.Arr{DT: "<i8", Shape: []int64{2, int64(len(ids)) / 2},
			Data: ids}.Bytes(t))
	}
	f["processed/author___writes___paper/edge_index.npy"] = two(0, 0, 2, 2, 0, 1, 3, 4)
	f["processed/author___affiliated_with___institution/edge_index.npy"] = two(0, 2, 1, 1)
	return f
}

// TestImportMAG240MTyped imports all types, whose rows are filled in blocks of any size.
func TestImportMAG240MTyped(t *testing.T) {
	defer func(n int64) { fillBytes = n }(fillBytes)
	var want map[string]string
	for _, bytes := range []int64{1, 200, 1 << 30} {
		fillBytes = bytes
		out := filepath.Join(t.TempDir(), "g")
		o := MAG240MOptions{Hetero: true, Options: Options{
			Input:  Input{In: magTypedTree(t).write(t, filepath.Join(t.TempDir(), "mag"))},
			Output: Output{Out: out, Name: "mag"}}}
		o.Fill = "author=mean:rev_writes,institution=mean:affiliated_with"
		require.NoError(t, MAG240M(bg, o))
		d := datasettest.Open(t, out)
		require.Equal(t, "float16", d.Meta.DType)
		rows := datasettest.WideRows(t, d)
		require.Equal(t, []float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
			1, 2, 0, 0, 7, 8, // the papers of authors 0 and 2; author 1 has none
			0, 0, 4, 5}, rows) // the authors of institution 1
		require.Equal(t, "1>0 2>0 0>1 0>2 3>2 2>3", strings.Split(lists(t, d)["paper cites paper"], " 4")[0])
		got := datasettest.Digest(t, out)
		if want == nil {
			want = got
		}
		require.Equal(t, want, got)
	}
}

func TestImportMAG240MTypedBad(t *testing.T) {
	set := func(name, text string) func(tree) { return func(f tree) { f[name] = text } }
	hetero := func(fill string) importFunc {
		return with(MAG240M, func(o *MAG240MOptions) { o.Hetero, o.Fill = true, fill })
	}
	refuses(t, hetero(""), "mag", func() tree { return magTypedTree(t) }, map[string]damaged{
		"no counts":       {change: without("meta.pt"), want: []string{"meta.pt"}},
		"no zip":          {change: set("meta.pt", "a pickle"), want: []string{"meta.pt: ", "must hold the numbers of nodes"}},
		"no authors":      {change: set("meta.pt", torchFile(t, "paper", 5, "institution", 2)), want: []string{"says 0 nodes of type author"}},
		"negative":        {change: set("meta.pt", torchFile(t, "paper", 5, "author", -1, "institution", 2)), want: []string{"says -1 nodes"}},
		"other papers":    {change: set("meta.pt", torchFile(t, "paper", 6, "author", 3, "institution", 2)), want: []string{"has 5 rows, there are 6 nodes of type paper"}},
		"fewer authors":   {change: set("meta.pt", torchFile(t, "paper", 5, "author", 2, "institution", 2)), want: []string{"node id 2", "outside 0..1"}},
		"no affiliations": {change: without("processed/author___affiliated_with___institution/edge_index.npy"), want: []string{"is missing"}},
		"[E, 2]":          {change: set("processed/author___writes___paper/edge_index.npy", pairsOf(t, 0, 0, 1, 1, 2, 2)), want: []string{"must be (2, edges)"}},
		"fill before its source": {imp: hetero("institution=mean:affiliated_with,author=mean:rev_writes"),
			want: []string{"nodes of type author", "have no rows; fill these first"}},
		"fill without hetero": {imp: with(MAG240M, func(o *MAG240MOptions) { o.Fill = "author=mean:rev_writes" }),
			want: []string{"are for option hetero"}},
	})
}

const boltTypedMeta = `
graph:
  nodes:
  - {type: paper, num: 4}
  - {type: author, num: 3}
  edges:
  - {type: "author:writes:paper", format: numpy, path: writes.npy}
  - {type: "paper:cites:paper", format: csv, path: cites.csv}
feature_data:
- {domain: node, type: paper, name: feat, format: numpy, path: feat.npy}
tasks:
- name: topic
  num_classes: 3
  train_set:
  - {type: paper, data: [{name: seeds, format: numpy, path: s0.npy},
     {name: labels, format: numpy, path: l0.npy}]}
  test_set:
  - {type: paper, data: [{name: seeds, format: numpy, path: s1.npy},
     {name: labels, format: numpy, path: l1.npy}]}
`

func boltTypedTree(t testing.TB) tree {
	ints := func(shape []int64, v ...int64) string {
		return string(datasettest.Arr{DT: "<i8", Shape: shape, Data: v}.Bytes(t))
	}
	return tree{"metadata.yaml": boltTypedMeta,
		"writes.npy": ints([]int64{2, 3}, 0, 2, 0, 0, 1, 3), "cites.csv": "0,1\n3,2\n",
		"feat.npy": floats(t, 4, 1, 2, 3, 4, 5, 6, 7, 8),
		"s0.npy":   ints([]int64{2}, 0, 3), "l0.npy": ints([]int64{2}, 2, 1),
		"s1.npy": ints([]int64{1}, 1), "l1.npy": ints([]int64{1}, 0)}
}

func TestImportGraphBoltTyped(t *testing.T) {
	out := filepath.Join(t.TempDir(), "g")
	o := GraphBoltOptions{Options: Options{Input: Input{In: boltTypedTree(t).write(t, t.TempDir()),
		UnlabelledOK: true}, Undirected: true, Output: Output{Out: out}}}
	o.Fill = "author=mean:rev_writes"
	require.NoError(t, GraphBolt(bg, o))
	d := datasettest.Open(t, out)
	require.Equal(t, map[string]string{"author writes paper": "0>0 2>1 0>3",
		"paper rev_writes author": "0>0 3>0 1>2", "paper cites paper": "1>0 0>1 3>2 2>3"},
		lists(t, d))
	require.Equal(t, []float32{1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 0, 0, 3, 4},
		datasettest.WideRows(t, d))
	labels, err := d.Labels()
	require.NoError(t, err)
	require.Equal(t, []int32{2, 0, -1, 1}, labels)
	require.Equal(t, []int64{2, 0, 1, 3}, []int64{d.Meta.Train, d.Meta.Val, d.Meta.Test,
		int64(d.Meta.Classes)})
}

func TestImportGraphBoltTypedBad(t *testing.T) {
	set := func(name, text string) func(tree) { return func(f tree) { f[name] = text } }
	refuses(t, plain(GraphBolt), "x", func() tree { return boltTypedTree(t) }, map[string]damaged{
		"a type of two parts":      {change: inMeta("author:writes:paper", "author:paper"), want: []string{"must be SRC:REL:DST"}},
		"a type that is not there": {change: inMeta("author:writes:paper", "writer:writes:paper"), want: []string{"there are no nodes of type writer"}},
		"a type as a path":         {change: inMeta("type: author, num", `type: "../author", num`), want: []string{"there are no nodes of type author"}},
		"a type without a name":    {change: inMeta("{type: author, num: 3}", "{num: 3}"), want: []string{"there are no nodes of type author"}},
		"no nodes":                 {change: inMeta("num: 3", "num: 0"), want: []string{"0 nodes of type author"}},
		"fewer authors":            {change: inMeta("num: 3", "num: 2"), want: []string{"writes.npy: node id 2", "outside 0..1"}},
		"a paper beyond":           {change: set("cites.csv", "0,4\n"), want: []string{"cites.csv"}},
		"other rows":               {change: set("feat.npy", floats(t, 3, 1, 2, 3, 4, 5, 6)), want: []string{"has 3 rows, there are 4 nodes of type paper"}},
		"[E, 2]":                   {change: set("writes.npy", pairsOf(t, 0, 0, 2, 1, 0, 3)), want: []string{"must be (2, edges)"}},
		"sets of two types":        {change: inMeta("test_set:\n  - {type: paper", "test_set:\n  - {type: author"), want: []string{"are of types paper and author"}},
		"sets of edges": {change: func(f tree) {
			f["metadata.yaml"] = strings.ReplaceAll(f["metadata.yaml"], "{type: paper, data", `{type: "author:writes:paper", data`)
		}, want: []string{"has no nodes of type author:writes:paper"}},
		"sets that overlap": {change: set("s1.npy", string(datasettest.Arr{DT: "<i8", Shape: []int64{1}, Data: []int64{0}}.Bytes(t))), want: []string{"label 0 of node 0"}},
		"a file outside":    {change: inMeta("path: writes.npy", "path: ../writes.npy"), want: []string{"outside its folder"}},
		"labels beside":     {o: Options{Labels: "/dev/null"}, want: []string{"several types, whose labels are an .npy array"}},
	})
}
