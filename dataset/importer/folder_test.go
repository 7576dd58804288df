package importer

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/wide"
)

// tree is the files of a fixture by their paths.
type tree map[string]string

func (f tree) write(t testing.TB, dir string) string {
	t.Helper()
	for name, text := range f {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	return dir
}

type importFunc func(context.Context, Options) error

// damaged is a fixture with a change, and what the refusal must say.
type damaged struct {
	change func(tree)
	imp    importFunc // with options of the format's own
	o      Options
	want   []string
}

// refuses imports each damaged fixture: the error must name what is wrong, be of class usage, and
// nothing may be left.
func refuses(t *testing.T, imp importFunc, folder string, good func() tree,
	cases map[string]damaged) {
	t.Helper()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			f := good()
			if c.change != nil {
				c.change(f)
			}
			in, root := f.write(t, filepath.Join(t.TempDir(), folder)), t.TempDir()
			c.o.In, c.o.Out = in, filepath.Join(root, "g")
			if c.imp == nil {
				c.imp = imp
			}
			err := c.imp(bg, c.o)
			require.Error(t, err)
			for _, w := range c.want {
				require.ErrorContains(t, err, w)
			}
			require.NotContains(t, err.Error(), "\n")
			datasettest.RequireUsage(t, err)
			datasettest.RequireEmpty(t, root)
			datasettest.RequireNoFDs(t, root)
			datasettest.RequireNoFDs(t, in)
		})
	}
	// Nothing there, a file instead of the folder, and an interruption.
	root := t.TempDir()
	for in, want := range map[string]string{"": "option in is missing",
		filepath.Join(root, "none"): "no such file", t.TempDir(): "", os.Args[0]: ""} {
		err := imp(bg, Options{Input: Input{In: in}, Output: Output{Out: filepath.Join(root, "g")}})
		require.ErrorContains(t, err, want)
		datasettest.RequireUsage(t, err)
	}
	ctx, cancel := context.WithCancel(bg)
	cancel()
	in := good().write(t, filepath.Join(t.TempDir(), folder))
	require.ErrorIs(t, imp(ctx, Options{Input: Input{In: in},
		Output: Output{Out: filepath.Join(root, "g")}}), context.Canceled)
	datasettest.RequireNoFDs(t, in)
}

func imported(t *testing.T, imp importFunc, f tree, folder string, o Options) (view, string) {
	t.Helper()
	o.In, o.Out = f.write(t, filepath.Join(t.TempDir(), folder)), filepath.Join(t.TempDir(), "g")
	require.NoError(t, imp(bg, o))
	return viewOf(t, o.Out), o.Out
}

func replaced(name, text string) func(tree) { return func(f tree) { f[name] = text } }

func without(names ...string) func(tree) {
	return func(f tree) {
		for _, n := range names {
			delete(f, n)
		}
	}
}

// cut keeps the first n bytes of a file; of negative n, all but the last -n.
func cut(name string, n int) func(tree) {
	return func(f tree) {
		if n < 0 {
			n += len(f[name])
		}
		f[name] = f[name][:n]
	}
}

func flip(name string, offset int) func(tree) {
	return func(f tree) {
		b := []byte(f[name])
		if offset < 0 {
			offset += len(b)
		}
		b[offset] ^= 0x04
		f[name] = string(b)
	}
}

const ogbEdges = "0,1\n0,2\n3,2\n3,2\n4,4\n1,0\n"

func ogbTree(t testing.TB) tree {
	return tree{
		"raw/edge.csv.gz":                       gz(t, ogbEdges),
		"raw/num-node-list.csv.gz":              gz(t, "5\n"),
		"raw/num-edge-list.csv.gz":              gz(t, "6\n"),
		"raw/node-feat.csv.gz":                  gz(t, "0.0,1\n2,3e0\r\n4,5.0\n6, 7\n8,9"),
		"raw/node-label.csv.gz":                 gz(t, "0\n1\n2\n1\n0\n"),
		"raw/node_year.csv.gz":                  gz(t, "a file that means nothing"),
		"split/time/train.csv.gz":               gz(t, "4\n1\n"),
		"split/time/valid.csv.gz":               gz(t, "0\n"),
		"split/time/test.csv.gz":                gz(t, "2\n3\n"),
		"mapping/nodeidx2paperid.csv.gz":        "not even gzip",
		"processed/geometric_data_processed.pt": "",
	}
}

func TestImportOGB(t *testing.T) {
	v, out := imported(t, plain(OGB), ogbTree(t), "ogbn_arxiv", Options{})
	require.Equal(t, goodView, v)
	m := datasettest.Open(t, out).Meta
	require.Equal(t, "ogb", m.Source.Kind)
	require.Equal(t, 2, m.LabelDims, "OGB's library gives a column")
	require.Equal(t, []string{"ogbn_arxiv"}, m.Source.From)
	require.Equal(t, "time", m.Source.Options["split"])
	require.Empty(t, m.Source.Options["add-inverse-edge"])

	// products stands for both directions, as OGB's reader has it: each edge twice, loops and
	// repeated ones too.
	both := goodView
	both.indptr = []int64{0, 3, 5, 8, 10, 12}
	both.indices = []uint32{1, 1, 2, 0, 0, 0, 3, 3, 2, 2, 4, 4}
	master := ",ogbn-arxiv,ogbn-products\nadd_inverse_edge,False,True\n"
	for name, c := range map[string]struct {
		folder, master, flag string
		want                 view
	}{
		"by name":          {"ogbn_products", "", "auto", both},
		"by flag":          {"x", "", "yes", both},
		"name, but a flag": {"ogbn_products", "", "no", goodView},
		"by master.csv":    {"ogbn_products", master, "", both},
		"by master, no":    {"ogbn_arxiv", master, "", goodView},
		"one in master":    {"mine", "\"\",mine-v2\nadd_inverse_edge,True\n", "", both},
	} {
		f := ogbTree(t)
		if c.master != "" {
			f["master.csv"] = c.master
		}
		v, _ := imported(t, with(OGB, func(o *OGBOptions) { o.AddInverse = c.flag }), f,
			c.folder, Options{})
		require.Equal(t, c.want, v, name)
	}

	// Several splits need a choice; no split at all is made; other files may stand in.
	f := ogbTree(t)
	for _, n := range []string{"train", "valid", "test"} {
		f["split/random/"+n+".csv.gz"] = f["split/time/"+n+".csv.gz"]
	}
	f["split/random/train.csv.gz"] = gz(t, "1\n")
	v, _ = imported(t, with(OGB, func(o *OGBOptions) { o.Split = "random" }), f, "x", Options{})
	require.Equal(t, []int64{1}, v.train)
	f = ogbTree(t)
	without("split/time/train.csv.gz", "split/time/valid.csv.gz", "split/time/test.csv.gz",
		"raw/node-feat.csv.gz")(f)
	f["raw/node-label.csv.gz"] = gz(t, "0\nnan\n\"\"\n1\n-1\n")
	features := filepath.Join(datasettest.WriteDir(t, datasettest.GoodArrays()), "features.npy")
	v, _ = imported(t, plain(OGB), f, "x", Options{Input: Input{UnlabelledOK: true},
		Features: features})
	require.Equal(t, []int32{0, -1, -1, 1, -1}, v.labels)
	require.Len(t, append(append(v.train, v.val...), v.test...), 2)
	require.Equal(t, goodView.features, v.features)
	v, _ = imported(t, plain(OGB), ogbTree(t), "x",
		Options{Labels: filepath.Join(filepath.Dir(features), "labels.npy"),
			SplitDir: filepath.Dir(features)})
	require.Equal(t, goodView, v)
}

func TestImportOGBBad(t *testing.T) {
	long := ogbTree(t)
	long["raw/edge.csv.gz"] = gz(t, strings.Repeat("0,1\n", 5000))
	badCRC := func(name string) func(tree) { return flip(name, -6) }
	refuses(t, plain(OGB), "ogbn_arxiv", func() tree { return ogbTree(t) }, map[string]damaged{
		"no raw": {change: func(f tree) { clear(f); f["x"] = "" },
			want: []string{"has no raw/edge.csv.gz and no raw/data.npz",
				"option in must be a folder with"}},
		"no counts": {change: without("raw/num-edge-list.csv.gz"),
			want: []string{"num-edge-list.csv.gz is missing"}},
		"no labels": {change: without("raw/node-label.csv.gz"),
			want: []string{"node-label.csv.gz: no such file"}},
		"no features": {change: without("raw/node-feat.csv.gz"),
			want: []string{"has no node-feat.csv.gz", "option features"}},
		"several graphs": {change: replaced("raw/num-node-list.csv.gz", gz(t, "2\n3\n")),
			want: []string{"num-node-list.csv.gz has 2 lines"}},
		"no count": {change: replaced("raw/num-node-list.csv.gz", gz(t, "")),
			want: []string{"num-node-list.csv.gz has 0 lines"}},
		"count is no number": {change: replaced("raw/num-node-list.csv.gz", gz(t, "five\n")),
			want: []string{`num-node-list.csv.gz:1: "five" is not a number`}},
		"count is half": {change: replaced("raw/num-node-list.csv.gz", gz(t, "5.5\n")),
			want: []string{"5.5 is not a number of nodes"}},
		"no nodes": {change: replaced("raw/num-node-list.csv.gz", gz(t, "0\n")),
			want: []string{"num-node-list.csv.gz: 0 nodes"}},
		"option nodes disagrees": {o: Options{Nodes: 6}, want: []string{"option nodes 6, but ",
			"says 5"}},
		"id out of range": {change: replaced("raw/edge.csv.gz",
			gz(t, "0,1\n0,2\n3,5\n3,2\n4,4\n1,0\n")),
			want: []string{"edge.csv.gz:3: node id 5 in column 2 is outside 0..4"}},
		"negative id": {change: replaced("raw/edge.csv.gz", gz(t, "0,1\n-1,2\n")),
			want: []string{`edge.csv.gz:2: "-1" is not a node id`}},
		"three columns": {change: replaced("raw/edge.csv.gz", gz(t, "0,1\n0,2,3\n")),
			want: []string{`edge.csv.gz:2: "0,2,3" has 3 columns; 2 are needed`}},
		"one column": {change: replaced("raw/edge.csv.gz", gz(t, "0,1\n7\n")),
			want: []string{`edge.csv.gz:2: "7" is not an edge`}},
		"an empty line": {change: replaced("raw/edge.csv.gz", gz(t, "0,1\n\n0,2\n")),
			want: []string{"edge.csv.gz has 2 edges, there should be 6"}},
		"fewer edges than told": {change: replaced("raw/edge.csv.gz", gz(t, "0,1\n0,2\n")),
			want: []string{"edge.csv.gz has 2 edges, there should be 6"}},
		"more edges than told": {change: replaced("raw/edge.csv.gz", long["raw/edge.csv.gz"]),
			want: []string{"edge.csv.gz has 5000 edges, there should be 6"}},
		"edges are Parquet": {change: replaced("raw/edge.csv.gz", "PAR1\x15\x04"),
			want: []string{"edge.csv.gz is a Parquet file; \"import tables\" reads it"}},
		"edges cut": {change: cut("raw/edge.csv.gz", -9),
			want: []string{"edge.csv.gz: truncated or damaged near line", "byte", "copy it again"}},
		"edges' checksum": {change: badCRC("raw/edge.csv.gz"),
			want: []string{"edge.csv.gz: truncated or damaged", "checksum"}},
		"features' checksum": {change: badCRC("raw/node-feat.csv.gz"),
			want: []string{"node-feat.csv.gz: truncated or damaged", "checksum"}},
		"labels' checksum": {change: badCRC("raw/node-label.csv.gz"),
			want: []string{"node-label.csv.gz: truncated or damaged", "checksum"}},
		"split's checksum": {change: badCRC("split/time/test.csv.gz"),
			want: []string{"test.csv.gz: truncated or damaged", "checksum"}},
		"features cut": {change: cut("raw/node-feat.csv.gz", -12),
			want: []string{"node-feat.csv.gz: truncated or damaged"}},
		"ragged features": {change: replaced("raw/node-feat.csv.gz", gz(t, "1,2\n3\n")),
			want: []string{"node-feat.csv.gz:2: 1 features, the rows before have 2"}},
		"word in features": {change: replaced("raw/node-feat.csv.gz", gz(t, "1,2\n3,x\n")),
			want: []string{`node-feat.csv.gz:2: "x" in column 2 is not a number`}},
		"empty feature": {change: replaced("raw/node-feat.csv.gz", gz(t, "1,2\n3,\n")),
			want: []string{`node-feat.csv.gz:2: column 2 is empty`}},
		"NaN feature": {change: replaced("raw/node-feat.csv.gz",
			gz(t, "1,2\n3,nan\n1,1\n1,1\n1,1\n")),
			want: []string{"node-feat.csv.gz: feature 1 of node 1 is NaN"}},
		"a row too few": {change: replaced("raw/node-feat.csv.gz", gz(t, "1\n2\n3\n4\n")),
			want: []string{"node-feat.csv.gz ends after 4 rows, there are 5 nodes"}},
		"a row too many": {change: replaced("raw/node-feat.csv.gz",
			gz(t, "1\n2\n3\n4\n5\n6\n7\n")),
			want: []string{"node-feat.csv.gz:6: a row for node 5, there are only 5 nodes"}},
		"no feature rows": {change: replaced("raw/node-feat.csv.gz", gz(t, "")),
			want: []string{"node-feat.csv.gz holds no features"}},
		"several labels": {change: replaced("raw/node-label.csv.gz", gz(t, "0,1\n1,1\n")),
			want: []string{"node-label.csv.gz:1: 2 columns; one is needed"}},
		"half a label": {change: replaced("raw/node-label.csv.gz", gz(t, "0\n0.5\n")),
			want: []string{"node-label.csv.gz:2: label 0.5 of node 1 is not a class"}},
		"a label too few": {change: replaced("raw/node-label.csv.gz", gz(t, "0\n1\n")),
			want: []string{"node-label.csv.gz ends after 2 labels, there are 5 nodes"}},
		"a label too many": {change: replaced("raw/node-label.csv.gz",
			gz(t, "0\n1\n0\n0\n0\n0\n")),
			want: []string{"node-label.csv.gz:6: a label for node 5, there are only 5 nodes"}},
		"NaN label in split": {change: replaced("raw/node-label.csv.gz",
			gz(t, "0\nnan\n0\n0\n0\n")), want: []string{"node 1, position 1 of ",
			"train.csv.gz, has no label"}},
		"split out of range": {change: replaced("split/time/test.csv.gz", gz(t, "2\n5\n")),
			want: []string{"test.csv.gz:2: node id 5 is outside 0..4"}},
		"split in halves": {change: replaced("split/time/test.csv.gz", gz(t, "2.5\n")),
			want: []string{"test.csv.gz:1: \"2.5\" is not a node id"}},
		"split twice": {change: replaced("split/time/test.csv.gz", gz(t, "2\n4\n")),
			want: []string{"test.csv.gz: node 4 at position 1 is also in"}},
		"split incomplete": {change: without("split/time/valid.csv.gz"),
			want: []string{`has no split "val"`}},
		"no such split": {imp: with(OGB, func(o *OGBOptions) { o.Split = "sales" }),
			want: []string{"option split sales", "has time"}},
		"several splits": {change: replaced("split/random/train.csv.gz", gz(t, "1\n")),
			want: []string{"has several splits; choose one of random, time with option split"}},
		"several types": {change: replaced("raw/triplet-type-list.csv.gz",
			gz(t, "author,writes,paper\npaper,cites,paper\n")),
			want: []string{"num-node-dict.csv.gz"}},
		"master without it": {change: replaced("master.csv",
			",ogbn-mag,ogbn-products\nx,1,2\n"),
			want: []string{"master.csv does not say add_inverse_edge of ogbn_arxiv",
				"option add-inverse-edge"}},
		"master says maybe": {change: replaced("master.csv", ",a\nadd_inverse_edge,maybe\n"),
			want: []string{`add_inverse_edge of a is "maybe"`}},
		"master is no table": {change: replaced("master.csv", "a,b\n\"c"),
			want: []string{"master.csv: "}},
		"inverse maybe": {imp: with(OGB, func(o *OGBOptions) { o.AddInverse = "maybe" }),
			want: []string{"add-inverse-edge", `"maybe"`}},
	})
}

// TestTextBlocks: rows over many blocks, in which lines are cut everywhere, are the same as in one;
// and the line of an error far inside is right.
func TestTextBlocks(t *testing.T) {
	const nodes, dim = 40_000, 9 // more than three blocks
	var text strings.Builder
	want := make([]float32, 0, nodes*dim)
	for v := range nodes {
		for i := range dim {
			x := float32(philox.Mix(uint64(v*dim+i))%2_000_000)/1e6 - 1
			want = append(want, x)
			fmt.Fprintf(&text, "%s%v", strings.Repeat(",", min(i, 1)), x)
		}
		text.WriteByte('\n')
	}
	f := ogbTree(t)
	f["raw/num-node-list.csv.gz"] = gz(t, fmt.Sprint(nodes))
	f["raw/node-feat.csv.gz"] = gz(t, text.String())
	f["raw/node-label.csv.gz"] = gz(t, strings.Repeat("3\n", nodes))
	require.Greater(t, text.Len(), 3*blockBytes)
	v, _ := imported(t, plain(OGB), f, "x", Options{})
	require.True(t, slices.Equal(want, v.features))

	path := filepath.Join(t.TempDir(), "a.csv")
	lines := strings.SplitAfter(text.String(), "\n")
	lines[31_234] = "1,2,x,4,5,6,7,8,9\n"
	require.NoError(t, os.WriteFile(path, []byte(strings.Join(lines, "")), 0o644))
	table, err := (&importer{}).tableOf(bg, "features", path, false)
	require.NoError(t, err)
	err = eachRows(bg, &importer{}, table, func(rows[float32], lineBlock) error { return nil })
	require.ErrorContains(t, err, `a.csv:31235: "x" in column 3 is not a number`)
	// A line of more than a block, one of more than is accepted, and none.
	for n, want := range map[int]string{0: "", blockBytes: "", 3 * blockBytes: "",
		maxLine + 2*blockBytes: "a.csv:2: line of more than"} {
		if wide.Lean() && n > 3*blockBytes {
			continue
		}
		text := "1\n" + strings.Repeat("5", n) + "\n2\n"
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		var got []byte
		err := eachBlock(bg, path,
			func(b lineBlock) ([]byte, error) { return bytes.Clone(b.text), nil },
			func(v []byte, _ lineBlock) error {
				got = append(got, v...)
				return nil
			})
		if want != "" {
			require.ErrorContains(t, err, want)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, len(text), len(got))
		require.Equal(t, text, string(got))
	}
	_, err = (&importer{}).tableOf(bg, "features", t.TempDir(), false)
	datasettest.RequireUsage(t, err) // a folder holds no lines
}

func npz(t testing.TB, method uint16, arrays map[string]datasettest.Arr) string {
	t.Helper()
	var b bytes.Buffer
	zw := zip.NewWriter(&b)
	for n, a := range arrays {
		w, err := zw.CreateHeader(&zip.FileHeader{Name: n + ".npy", Method: method})
		require.NoError(t, err)
		_, err = w.Write(a.Bytes(t))
		require.NoError(t, err)
	}
	require.NoError(t, zw.Close())
	return b.String()
}

// papersTree has arrays as papers100M has them: float32 labels of which most are NaN.
func papersTree(t testing.TB, method uint16, change func(map[string]datasettest.Arr)) tree {
	nan := float32(math.NaN())
	one := func(
		n int64) datasettest.Arr {
		return datasettest.Arr{DT: "<i8", Shape: []int64{1}, Data: []int64{n}}
	}
	a := datasettest.GoodArrays()
	data := map[string]datasettest.Arr{
		"edge_index": a["edge_index"], "node_feat": a["features"], "num_nodes_list": one(5),
		"num_edges_list": one(6),
		"node_year":      {DT: "<i8", Shape: []int64{5, 1}, Data: make([]int64, 5)},
		"node_label":     {DT: "<f4", Shape: []int64{5, 1}, Data: []float32{0, 1, nan, nan, 0}},
	}
	if change != nil {
		change(data)
	}
	label := map[string]datasettest.Arr{"node_label": data["node_label"]}
	delete(data, "node_label")
	f := ogbTree(t)
	maps.DeleteFunc(f, func(name, _ string) bool { return strings.HasPrefix(name, "raw/") })
	f["raw/data.npz"], f["raw/node-label.npz"] = npz(t, method, data), npz(t, method, label)
	f["split/time/test.csv.gz"] = gz(t, "")
	return f
}

func TestImportPapers100M(t *testing.T) {
	want := goodView
	want.labels, want.test = []int32{0, 1, -1, -1, 0}, []int64{}
	for _, method := range []uint16{zip.Store, zip.Deflate} {
		v, _ := imported(t, plain(OGB), papersTree(t, method, nil), "ogbn_papers100M", Options{})
		v.test = append([]int64{}, v.test...)
		require.Equal(t, want, v)
	}
	// NaN is the format's own way to say unlabelled: no flag is needed where the splits are made
	// either.
	f := papersTree(t, zip.Store, nil)
	maps.DeleteFunc(f, func(name, _ string) bool { return strings.HasPrefix(name, "split/") })
	v, _ := imported(t, plain(OGB), f, "x", Options{})
	require.Equal(t, want.labels, v.labels)
	require.Len(t, append(append(v.train, v.val...), v.test...), 3)
}

func TestImportPapers100MBad(t *testing.T) {
	ints := func(shape []int64, v ...int64) datasettest.Arr {
		return datasettest.Arr{DT: "<i8", Shape: shape, Data: v}
	}
	set := func(name string, a datasettest.Arr) func(tree) {
		return func(f tree) {
			maps.Copy(f,
				papersTree(t, zip.Store, func(m map[string]datasettest.Arr) { m[name] = a }))
		}
	}
	drop := func(name string) func(tree) {
		return func(f tree) {
			maps.Copy(f,
				papersTree(t, zip.Store, func(m map[string]datasettest.Arr) { delete(m, name) }))
		}
	}
	// A bit in the data of the member that holds the marks.
	inside := func(file, mark string, method uint16) func(tree) {
		return func(f tree) {
			maps.Copy(f, papersTree(t, method, nil))
			offset := strings.Index(f[file], mark)
			require.Positive(t, offset)
			flip(file, offset+len(mark)+1)(f)
		}
	}
	// sources 3, 3
	edgeBytes := string(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, 3),
		3))
	refuses(t, plain(OGB), "ogbn_papers100M", func() tree { return papersTree(t, zip.Store, nil) },
		map[string]damaged{
			"no edges": {change: drop("edge_index"),
				want: []string{"data.npz:edge_index: no array of that name"}},
			"no features": {change: drop("node_feat"),
				want: []string{"data.npz:node_feat: no array of that name"}},
			"no count": {change: drop("num_nodes_list"),
				want: []string{"data.npz:num_nodes_list: no array"}},
			"no labels": {change: without("raw/node-label.npz"),
				want: []string{"node-label.npz: no such file"}},
			"several graphs": {change: set("num_nodes_list", ints([]int64{2}, 2, 3)),
				want: []string{"num_nodes_list has shape (2,): 2 graphs"}},
			"edges disagree": {change: set("num_edges_list", ints([]int64{1}, 7)),
				want: []string{"data.npz:edge_index has shape (2, 6), num_edges_list says (2, 7)"}},
			"edges of wrong shape": {change: set("edge_index",
				ints([]int64{6, 2}, make([]int64, 12)...)),
				want: []string{"edge_index has shape (6, 2)"}},
			"id out of range": {change: set("edge_index", ints([]int64{2, 6}, 0, 0, 3, 3, 9, 1,
				1, 2, 2, 2, 4, 0)),
				want: []string{"data.npz:edge_index: node id 9 at position 4 is outside 0..4"}},
			"features disagree": {change: set("node_feat",
				datasettest.Arr{DT: "<f4", Shape: []int64{4, 2}, Data: make([]float32, 8)}),
				want: []string{
					"data.npz:node_feat: features have shape (4, 2), there are 5 nodes"}},
			"labels disagree": {change: set("node_label", ints([]int64{4, 1}, 0, 0, 0, 0)),
				want: []string{
					"node-label.npz:node_label: labels have shape (4, 1), there are 5 nodes"}},
			"a NaN in a split": {change: set("node_label",
				datasettest.Arr{DT: "<f4", Shape: []int64{5},
					Data: []float32{0, float32(math.NaN()), 0, 0, 0}}),
				want: []string{"node 1, position 1 of ", "has no label"}},
			"negative label": {change: set("node_label", ints([]int64{5}, 0, -2, 0, 0, 0)),
				want: []string{"node_label: label -2 of node 1 is not a class"}},
			"archive cut": {change: cut("raw/data.npz", -30),
				want: []string{"data.npz: not a .npz archive, or truncated"}},
			"archive is none": {change: replaced("raw/data.npz", "PK?"),
				want: []string{"data.npz: not a .npz archive"}},
			"edges' checksum": {change: inside("raw/data.npz", edgeBytes, zip.Store),
				want: []string{"data.npz:edge_index: near byte", "checksum error"}},
			"features' checksum": {change: inside("raw/data.npz", "\x00\x00\x00@\x00\x00@@",
				zip.Store),
				want: []string{
					"data.npz:node_feat: at its end: truncated or damaged: zip: checksum error"}},
			"option add-inverse-edge yes": {imp: with(OGB, func(o *OGBOptions) { o.AddInverse = "yes" }),
				want: []string{"OGB adds no edges"}},
		})
	// Deflated: a bit in each member's compressed data; zip or the values find it.
	whole := papersTree(t, zip.Deflate, nil)
	for _, mark := range []string{"edge_index.npy", "node_feat.npy", "num_nodes_list.npy"} {
		f := maps.Clone(whole)
		offset := strings.Index(f["raw/data.npz"], mark) + len(mark)
		flip("raw/data.npz", offset+40)(f)
		root := t.TempDir()
		err := plain(OGB)(bg, Options{Input: Input{In: f.write(t, t.TempDir())},
			Output: Output{Out: filepath.Join(root, "g")}})
		require.ErrorContains(t, err, "data.npz:"+strings.TrimSuffix(mark, ".npy"))
		datasettest.RequireUsage(t, err)
		datasettest.RequireEmpty(t, root)
	}
}

func half(v ...float32) []uint16 {
	out := make([]uint16, len(v))
	for i, x := range v {
		for h := range 1 << 16 {
			if y := npy.Half(uint16(h)); y == x || x != x && y != y {
				out[i] = uint16(h)
				break
			}
		}
	}
	return out
}

func magTree(t testing.TB, change func(map[string]datasettest.Arr)) tree {
	nan := float32(math.NaN())
	a := datasettest.GoodArrays()
	m := map[string]datasettest.Arr{
		"paper/node_feat": {DT: "<f2", Shape: []int64{5, 2},
			Data: half(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)},
		"paper/node_label": {DT: "<f2", Shape: []int64{5},
			Data: half(0, 1, 152, nan, 0)},
		"paper/node_year": {DT: "<i2", Shape: []int64{5},
			Data: []int16{2019, 2018, 2020, 1897, 2001}},
		"paper___cites___paper/edge_index": a["edge_index"],
	}
	if change != nil {
		change(m)
	}
	f := tree{"meta.pt": "a pickle", "split_dict.pt": "a pickle"}
	for n, a := range m {
		f["processed/"+n+".npy"] = string(a.Bytes(t))
	}
	return f
}

func TestImportMAG240M(t *testing.T) {
	v, out := imported(t, plain(MAG240M), magTree(t, nil), "mag240m_kddcup2021", Options{})
	want := goodView
	want.labels, want.test = []int32{0, 1, 152, -1, 0}, []int64{2}
	require.Equal(t, want, v)
	m := datasettest.Open(t, out).Meta
	require.Equal(t, 153, m.Classes)
	require.EqualValues(t, 1, m.Unlabelled)
	// Test labels are withheld in the release: the test is empty then.
	v, _ = imported(t, plain(MAG240M), magTree(t, func(m map[string]datasettest.Arr) {
		m["paper/node_label"] = datasettest.Arr{DT: "<f4", Shape: []int64{5},
			Data: []float32{0, 1, float32(math.NaN()), -1, 0}}
	}), "x", Options{})
	require.Empty(t, v.test)
	v, _ = imported(t, plain(MAG240M), magTree(t, nil), "x",
		Options{SplitDir: tree{"train.csv": "0\n", "valid.csv": "1\n", "test.csv": "2\n"}.write(t, t.TempDir())})
	require.Equal(t, []int64{0}, v.train)
}

func TestImportMAG240MBad(t *testing.T) {
	set := func(name string, a datasettest.Arr) func(tree) {
		return func(f tree) { f["processed/"+name+".npy"] = string(a.Bytes(t)) }
	}
	year := func(v ...int16) func(tree) {
		return set("paper/node_year", datasettest.Arr{DT: "<i2", Shape: []int64{int64(len(v))},
			Data: v})
	}
	const edges = "paper___cites___paper/edge_index"
	refuses(t, plain(MAG240M), "mag", func() tree { return magTree(t, nil) }, map[string]damaged{
		"no years": {change: without("processed/paper/node_year.npy"),
			want: []string{
				"has no processed/paper/node_year.npy; option in must be a folder with MAG240M"}},
		"no edges": {change: without("processed/" + edges + ".npy"),
			want: []string{"has no processed/paper___cites___paper/edge_index.npy"}},
		"no features": {change: without("processed/paper/node_feat.npy"),
			want: []string{"has no processed/paper/node_feat.npy"}},
		"no labels": {change: without("processed/paper/node_label.npy"),
			want: []string{"has no processed/paper/node_label.npy"}},
		"edges turned": {change: set(edges, datasettest.Arr{DT: "<i8", Shape: []int64{6, 2},
			Data: make([]int64, 12)}),
			want: []string{"edges have shape (6, 2), must be (2, edges)"}},
		"id out of range": {change: set(edges, datasettest.Arr{DT: "<i8", Shape: []int64{2, 1},
			Data: []int64{0, 5}}),
			want: []string{"edge_index.npy: node id 5 at position 1 is outside 0..4"}},
		"edges cut": {change: cut("processed/"+edges+".npy", -1),
			want: []string{
				"edge_index.npy: truncated: shape (2, 6) of <i8 needs 224 bytes, the file has 223"}},
		"features cut": {change: cut("processed/paper/node_feat.npy", -2),
			want: []string{"node_feat.npy: truncated"}},
		"features no npy": {change: replaced("processed/paper/node_feat.npy",
			strings.Repeat("x", 200)), want: []string{"node_feat.npy: not a .npy array"}},
		"features disagree": {change: set("paper/node_feat",
			datasettest.Arr{DT: "<f2", Shape: []int64{4, 2}, Data: make([]uint16, 8)}),
			want: []string{"node_feat.npy: features have shape (4, 2), there are 5 nodes"}},
		"NaN feature": {change: set("paper/node_feat",
			datasettest.Arr{DT: "<f2", Shape: []int64{5, 1}, Data: half(0, 1, float32(math.NaN()),
				0, 0)}), want: []string{"node_feat.npy: feature 0 of node 2 is NaN"}},
		"half a label": {change: set("paper/node_label",
			datasettest.Arr{DT: "<f2", Shape: []int64{5}, Data: half(0, 0.5, 0, 0, 0)}),
			want: []string{"node_label.npy: label 0.5 of node 1 is not a class"}},
		"no nodes": {change: set("paper/node_label",
			datasettest.Arr{DT: "<f2", Shape: []int64{0}, Data: []uint16{}}),
			want: []string{"node_label.npy has shape (0,): no nodes"}},
		"years disagree": {change: year(2018),
			want: []string{"node_year.npy: years have shape (1,), there are 5 nodes"}},
		"years in columns": {change: set("paper/node_year",
			datasettest.Arr{DT: "<i2", Shape: []int64{5, 1}, Data: make([]int16, 5)}),
			want: []string{"must be (nodes,)"}},
		"a year is none": {change: year(2018, 0, 2018, 2018, 2018),
			want: []string{"node_year.npy: year 0 of node 1 is no year"}},
		"a year too late": {change: year(2018, 2018, 2021, 2018, 2018),
			want: []string{"node 2 is labelled and of 2021"}},
		"years as floats": {change: set("paper/node_year",
			datasettest.Arr{DT: "<f4", Shape: []int64{5}, Data: make([]float32, 5)}),
			want: []string{"node_year.npy: holds <f4, integers are needed"}},
		"big-endian, cut": {change: set("paper/node_year",
			datasettest.Arr{DT: ">i8", Shape: []int64{5}, Data: make([]int16, 5)}),
			want: []string{"node_year.npy: truncated"}},
		"option nodes disagrees": {o: Options{Nodes: 4}, want: []string{"option nodes 4, but ",
			"node_label.npy has 5 rows"}},
	})
}

// smallIGB makes the known sizes of IGB small.
func smallIGB(t *testing.T) {
	old := igb
	t.Cleanup(func() { igb = old })
	igb.sizes, igb.dim, igb.full = map[string]int64{"tiny": 3, "large": 5, "full": 10}, 2, 10
	igb.labelled = map[string]int64{"19": 8, "2K": 5}
}

func plainFloats(v ...float32) string {
	var b []byte
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
	}
	return string(b)
}

// igbTree is a folder with headers, or without as large and full have it.
func igbTree(t testing.TB, raw bool) tree {
	a := datasettest.GoodArrays()
	f := tree{
		"processed/paper/node_feat.npy":     string(a["features"].Bytes(t)),
		"processed/paper/node_label_19.npy": string(a["labels"].Bytes(t)),
		"processed/paper/node_label_2K.npy": string(datasettest.Arr{DT: "<f4",
			Shape: []int64{5, 1}, Data: []float32{9, 8, 7, 6, 5}}.Bytes(t)),
		"processed/paper__cites__paper/edge_index.npy": string(datasettest.Arr{DT: "<i8",
			Shape: []int64{6, 2}, Data: []int64{0, 1, 0, 2, 3, 2, 3, 2, 4, 4, 1, 0}}.Bytes(t)),
		"processed/author__to__institute/edge_index.npy": "ignored",
	}
	if raw {
		f["processed/paper/node_feat.npy"] = plainFloats(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
		f["processed/paper/node_label_19.npy"] = plainFloats(0, 1, 2, 1, 0)
	}
	return f
}

func TestImportIGB(t *testing.T) {
	smallIGB(t)
	want := goodView
	want.train, want.val, want.test = []int64{0, 1, 2}, []int64{3}, []int64{4}
	for name, raw := range map[string]bool{"medium": false, "large": true, "my-copy": true} {
		v, _ := imported(t, plain(IGB), igbTree(t, raw), name, Options{})
		require.Equal(t, want, v, name)
	}
	v, _ := imported(t, with(IGB, func(o *IGBOptions) { o.Classes = "2K" }),
		igbTree(t, true), "large", Options{})
	require.Equal(t, []int32{9, 8, 7, 6, 5}, v.labels)
	v, _ = imported(t, plain(IGB), igbTree(t, true), "tiny", Options{Nodes: 5})
	require.Equal(t, want, v)

	// The full graph: behind the labelled papers no label means anything, and no split has them.
	f := igbTree(t, true)
	f["processed/paper/node_feat.npy"] = plainFloats(make([]float32, 20)...)
	f["processed/paper/node_label_19.npy"] = plainFloats(0, 1, 2, 3, 4, 5, 6, 7, 0.5, -9)
	v, _ = imported(t, plain(IGB), f, "full", Options{})
	require.Equal(t, []int32{0, 1, 2, 3, 4, 5, 6, 7, -1, -1}, v.labels)
	require.Equal(t, []int64{0, 1, 2, 3}, v.train) // int(8 × 0.6)
	require.Equal(t, []int64{4}, v.val)            // int(8 × 0.2)
	require.Equal(t, []int64{5, 6, 7}, v.test)

	// The padding of the 2K labels is no class, and leaves train and val as they are; labels in its
	// place are taken. The file may end behind it.
	igb.labelled["2K"], igb.padding = 8, map[string]int64{"2K": 2}
	two := with(IGB, func(o *IGBOptions) { o.Classes = "2K" })
	for name, labels := range map[string][]float32{"whole": {3, 1, 2, 3, 1, 2, 0, 0, 0, 0},
		"short": {3, 1, 2, 3, 1, 2, 0, 0}, "mended": {3, 1, 2, 3, 1, 2, 0, 1, 0, 0}} {
		f["processed/paper/node_label_2K.npy"] = plainFloats(labels...)
		said := ""
		v, _ = imported(t, two, f, "full", Options{Output: Output{
			Note: func(s errs.Text) { said += s.String() + "\n" }}})
		want, test := []int32{3, 1, 2, 3, 1, 2, -1, -1, -1, -1}, []int64{5}
		if name == "mended" {
			want, test = []int32{3, 1, 2, 3, 1, 2, 0, 1, -1, -1}, []int64{5, 6, 7}
		} else {
			require.Contains(t, said, "the last 2 of its 8 labels are zeros")
		}
		require.Equal(t, want, v.labels, name)
		require.Equal(t, []int64{0, 1, 2, 3}, v.train, name)
		require.Equal(t, []int64{4}, v.val, name)
		require.Equal(t, test, v.test, name)
	}
}

// A run of zeros at the end of IGB's labels that chance does not explain is named.
func TestIGBZerosAtTheEnd(t *testing.T) {
	for _, c := range []struct {
		labels []int32
		says   bool
	}{
		{append(slices.Repeat([]int32{1, 2, 0, 3}, 50), make([]int32, 30)...), true},
		{append(slices.Repeat([]int32{1, 2, 0, 3}, 50), make([]int32, 3)...), false},
		{append(append(slices.Repeat([]int32{1, 2, 3}, 50), make([]int32, 30)...), noLabel), true},
		{make([]int32, 100), false}, {nil, false},
	} {
		said := ""
		o := Options{Output: Output{Note: func(s errs.Text) { said = s.String() }}}
		(&igbImport{importer: &importer{o: o}}).noteZeros(c.labels)
		require.Equal(t, c.says, strings.Contains(said, "are all class 0"), "%v", c.labels)
	}
}

func TestImportIGBBad(t *testing.T) {
	smallIGB(t)
	const feat, label, edges = "processed/paper/node_feat.npy", "processed/paper/node_label_19.npy",
		"processed/paper__cites__paper/edge_index.npy"
	set := func(name string,
		a datasettest.Arr) func(tree) {
		return func(f tree) { f[name] = string(a.Bytes(t)) }
	}
	refuses(t, plain(IGB), "large", func() tree { return igbTree(t, true) }, map[string]damaged{
		"no features": {change: without(feat), want: []string{"has no " + feat}},
		"no labels":   {change: without(label), want: []string{"has no " + label}},
		"no edges":    {change: without(edges), want: []string{"has no " + edges}},
		"a row short": {change: cut(feat, -8),
			want: []string{
				"node_feat.npy has no .npy header and 32 bytes; raw float32 rows of 2 features would be 5 × 8 bytes"}},
		"a byte short": {change: cut(feat, -1),
			want: []string{"no .npy header and 39 bytes"}},
		"a row more": {change: replaced(feat, plainFloats(make([]float32, 12)...)),
			want: []string{"48 bytes"}},
		"another size": {change: replaced(feat, plainFloats(make([]float32, 6)...)),
			want: []string{"no .npy header and 24 bytes", "5 × 8"}},
		"empty": {change: replaced(feat, ""),
			want: []string{"no .npy header and 0 bytes"}},
		"magic damaged": {
			change: func(
				f tree) {
				f[feat] = string(datasettest.GoodArrays()["features"].Bytes(t))
				flip(feat, 2)(f)
			}, want: []string{"no .npy header and 168 bytes"}},
		"header damaged": {
			change: func(
				f tree) {
				f[feat] = string(datasettest.GoodArrays()["features"].Bytes(t))
				flip(feat, 12)(f)
			}, want: []string{"node_feat.npy: the .npy header"}},
		"header, but short": {
			change: func(
				f tree) {
				f[feat] = string(datasettest.GoodArrays()["features"].Bytes(t))
				cut(feat, -4)(f)
			}, want: []string{"node_feat.npy: truncated: shape (5, 2)"}},
		"labels short": {change: cut(label, -4),
			want: []string{
				"node_label_19.npy: shape (5,) of <f4 needs 20 bytes from offset 0 on, the file has 16"}},
		"labels long": {change: replaced(label, plainFloats(make([]float32, 6)...)),
			want: []string{"needs 20 bytes from offset 0 on, the file has 24"}},
		"labels disagree": {change: set(label, datasettest.Arr{DT: "<i8", Shape: []int64{4},
			Data: make([]int64, 4)}), want: []string{"labels have shape (4,), there are 5 nodes"}},
		"NaN label": {change: replaced(label, plainFloats(0, float32(math.NaN()), 0, 0,
			0)), want: []string{"node_label_19.npy: node 1 has no label", "option unlabelled-ok"}},
		"half a label": {change: replaced(label, plainFloats(0, 1.5, 0, 0, 0)),
			want: []string{"node_label_19.npy: label 1.5 of node 1"}},
		"infinite feature": {change: replaced(feat, plainFloats(0, 0, 0, float32(math.Inf(1)), 0,
			0, 0, 0, 0, 0)), want: []string{"node_feat.npy: feature 1 of node 1 is +Inf"}},
		"edges of two rows": {change: set(edges, datasettest.Arr{DT: "<i8", Shape: []int64{2, 6},
			Data: make([]int64, 12)}),
			want: []string{"edges have shape (2, 6), must be (edges, 2)"}},
		"edges without head": {change: func(f tree) { f[edges] = f[edges][128:] },
			want: []string{"edge_index.npy: not a .npy array"}},
		"id out of range": {change: set(edges, datasettest.Arr{DT: "<i8", Shape: []int64{1, 2},
			Data: []int64{0, 5}}), want: []string{"edge_index.npy: node id 5 at position 1"}},
		"classes": {imp: with(IGB, func(o *IGBOptions) { o.Classes = "2983" }),
			want: []string{"node_label_2983.npy"}},
		"option nodes disagrees": {o: Options{Nodes: 4}, want: []string{"4 × 8 bytes"}},
	})
	// A folder of another name: the sizes that there are.
	f := igbTree(t, true)
	cut(feat, -8)(f)
	err := plain(IGB)(bg, Options{Input: Input{In: f.write(t, filepath.Join(t.TempDir(), "copy"))},
		Output: Output{Out: filepath.Join(t.TempDir(), "g")}})
	require.ErrorContains(t, err, "24 (tiny), 40 (large), 80 (full) bytes")
}

const boltMeta = `
dataset_name: test
graph:
  nodes:
    - num: 5
  edges:
    - format: numpy
      path: edges.npy
  feature_data: []
feature_data:
  - domain: node
    type: null
    name: feat
    format: numpy
    in_memory: false
    path: data/feat.npy
  - {domain: node, name: other, format: numpy, path: data/other.npy}
  - {domain: edge, name: feat, format: torch, path: none.pt}
tasks:
  - name: node_classification
    num_classes: 3
    train_set:
      - type: null
        data:
          - {name: seeds, format: numpy, in_memory: true, path: set/train-seeds.npy}
          - {name: labels, format: numpy, path: set/train-labels.npy}
    validation_set:
      - data:
          - {name: seed_nodes, format: numpy, path: set/val-seeds.npy}
          - {name: labels, format: numpy, path: set/val-labels.npy}
    test_set:
      - data:
          - {format: numpy, path: set/test-seeds.npy}
          - {format: numpy, path: set/test-labels.npy}
`

func boltTree(t testing.TB) tree {
	a := datasettest.GoodArrays()
	ints := func(v ...int64) string {
		return string(datasettest.Arr{DT: "<i8", Shape: []int64{int64(len(v))}, Data: v}.Bytes(t))
	}
	return tree{
		"metadata.yaml": boltMeta,
		"edges.npy":     string(a["edge_index"].Bytes(t)),
		"data/feat.npy": string(a["features"].Bytes(t)),
		"data/other.npy": string(datasettest.Arr{DT: "<f4", Shape: []int64{5, 1},
			Data: []float32{1, 2, 3, 4, 5}}.Bytes(t)),
		"set/train-seeds.npy": ints(4, 1), "set/train-labels.npy": ints(0, 1),
		"set/val-seeds.npy": ints(0), "set/val-labels.npy": ints(0),
		"set/test-seeds.npy": ints(2, 3), "set/test-labels.npy": ints(2, 1),
		"preprocessed/metadata.yaml": "graph_topology: {}",
	}
}

func inMeta(old, new string) func(tree) {
	return func(f tree) {
		if !strings.Contains(f["metadata.yaml"], old) {
			panic("the fixture has no " + old)
		}
		f["metadata.yaml"] = strings.Replace(f["metadata.yaml"], old, new, 1)
	}
}

func TestImportGraphBolt(t *testing.T) {
	v, _ := imported(t, plain(GraphBolt), boltTree(t), "x", Options{})
	require.Equal(t, goodView, v)

	f := boltTree(t)
	inMeta("format: numpy\n      path: edges.npy", "format: csv\n      path: edges.csv")(f)
	inMeta("- num: 5", "- {type: paper, num: 5}")(f)
	f["edges.csv"] = ogbEdges
	v, _ = imported(t, plain(GraphBolt), f, "x", Options{})
	require.Equal(t, goodView, v)

	v, _ = imported(t, with(GraphBolt, func(o *GraphBoltOptions) {
		o.Feature, o.Task = "other", "node_classification"
	}), boltTree(t), "x", Options{})
	require.Equal(t, []float32{1, 2, 3, 4, 5}, v.features)

	// Unused files are named, once, and num_classes counts.
	f = boltTree(t)
	inMeta("feature_data: []",
		"feature_data: [{domain: edge, name: weight, format: numpy, path: w.npy}]")(f)
	inMeta("num_classes: 3", "num_classes: 4")(f)
	f["w.npy"], f["notes.txt"] = "x", "x"
	said := ""
	o := Options{Output: Output{Note: func(s errs.Text) { said += s.String() + "\n" }}}
	v, out := imported(t, plain(GraphBolt), f, "x", o)
	require.Equal(t, goodView, v)
	require.Equal(t, 4, datasettest.Open(t, out).Meta.Classes)
	require.Contains(t, said, "edge graph feature weight")
	require.Contains(t, said, "notes.txt")
	require.Contains(t, said, "one of the 4 classes has no node: 3")
	require.Equal(t, 1, strings.Count(said, "not used of"))
	inMeta("num_classes: 4", "num_classes: 2")(f)
	o.NumClasses = 3
	imported(t, plain(GraphBolt), f, "x", o)
	require.Contains(t, said, "option num-classes 3 is taken; ")

	// Sets without labels: other labels, or none.
	f = boltTree(t)
	for _, n := range []string{"train", "val", "test"} {
		inMeta("/"+n+"-labels.npy", "/none.npy")(f)
		f["metadata.yaml"] = strings.NewReplacer(
			"          - {name: labels, format: numpy, path: set/none.npy}\n", "",
			"          - {format: numpy, path: set/none.npy}\n", "").Replace(f["metadata.yaml"])
	}
	labels := filepath.Join(datasettest.WriteDir(t, datasettest.GoodArrays()), "labels.npy")
	v, _ = imported(t, plain(GraphBolt), f, "x", Options{Labels: labels})
	require.Equal(t, goodView, v)
	v, _ = imported(t, plain(GraphBolt), f, "x", Options{Input: Input{UnlabelledOK: true}})
	require.Equal(t, []int32{-1, -1, -1, -1, -1}, v.labels)
}

func TestImportGraphBoltBad(t *testing.T) {
	ints := func(v ...int64) string {
		return string(datasettest.Arr{DT: "<i8", Shape: []int64{int64(len(v))}, Data: v}.Bytes(t))
	}
	refuses(t, plain(GraphBolt), "x", func() tree { return boltTree(t) }, map[string]damaged{
		"no description": {change: without("metadata.yaml"),
			want: []string{"has no metadata.yaml; option in must be a folder with a GraphBolt"}},
		"no YAML": {change: replaced("metadata.yaml", "graph: [\n"),
			want: []string{"metadata.yaml: yaml: "}},
		"wrong kinds": {change: replaced("metadata.yaml", "graph: 5\ntasks: x\n"),
			want: []string{"metadata.yaml: yaml: unmarshal errors"}},
		"huge": {change: replaced("metadata.yaml",
			strings.Repeat("#", dataset.MaxDescription+1)),
			want: []string{"more than 1048576 bytes"}},
		"empty": {change: replaced("metadata.yaml", "x: 1\n"),
			want: []string{`has no "graph"`}},
		"preprocessed": {change: replaced("metadata.yaml",
			"graph_topology: {type: FusedCSCSamplingGraph, path: preprocessed/fused_csc_sampling_graph.pt}\n"), want: []string{"preprocessed graph (preprocessed/fused_csc_sampling_graph.pt)",
			"folder above"}},
		"types": {change: inMeta("- num: 5",
			"- {type: paper, num: 5}\n    - {type: author, num: 2}"),
			want: []string{"the type of edges is , must be SRC:REL:DST"}},
		"no edges": {change: inMeta("edges:\n    - format: numpy\n      path: edges.npy",
			"edges: []"), want: []string{"must list nodes and edges"}},
		"null edges": {change: inMeta("edges:\n    - format: numpy\n      path: edges.npy",
			"edges: [null]"), want: []string{"must list nodes and edges"}},
		"no nodes": {change: inMeta("num: 5", "num: 0"),
			want: []string{"num of graph.nodes: 0 nodes"}},
		"nodes disagree": {change: inMeta("num: 5", "num: 6"),
			want: []string{"feat.npy: features have shape (5, 2), there are 6 nodes"}},
		"option nodes disagrees": {o: Options{Nodes: 7}, want: []string{"option nodes 7, but ", "says 5"}},
		"edges missing": {change: without("edges.npy"), want: []string{"graph.edges is in ",
			"edges.npy, which is not there"}},
		"no path": {change: inMeta("path: edges.npy", "x: y"),
			want: []string{"graph.edges has no path"}},
		"edges turned": {change: replaced("edges.npy",
			string(datasettest.Arr{DT: "<i8", Shape: []int64{6, 2},
				Data: make([]int64, 12)}.Bytes(t))),
			want: []string{"edges have shape (6, 2), must be (2, edges)"}},
		"edges cut": {change: cut("edges.npy", -8), want: []string{"edges.npy: truncated"}},
		"id out of range": {change: replaced("edges.npy",
			string(datasettest.Arr{DT: "<i8", Shape: []int64{2, 1}, Data: []int64{5, 0}}.Bytes(t))),
			want: []string{"edges.npy: node id 5 at position 0"}},
		"csv out of range": {change: func(f tree) {
			inMeta("format: numpy\n      path: edges.npy", "format: csv\n      path: e.csv")(f)
			f["e.csv"] = "0,1\n1,5\n"
		}, want: []string{"e.csv:2: node id 5 in column 2 is outside 0..4"}},
		"feature missing": {change: without("data/feat.npy"),
			want: []string{"feature_data feat is in "}},
		"feature of torch": {
			change: func(f tree) {
				f["data/feat.npy"] = string(torchZip(t, []byte("\x80\x02cos\nsystem\n."), 0, nil))
			},
			want: []string{`feat.npy: offset 2: the file holds an object of "os system"`}},
		"feature of csv": {change: inMeta("format: numpy\n    in_memory: false",
			"format: csv\n    in_memory: false"),
			want: []string{`is of format "csv", numpy or torch is needed`}},
		"which feature": {change: inMeta("name: feat", "name: a"),
			want: []string{"choose one of a, other with option feature"}},
		"fewer classes": {change: inMeta("num_classes: 3", "num_classes: 2"),
			want: []string{"label 2 of node 2, but ", "metadata.yaml (num_classes), which option num-classes overrides, says 2 classes"}},
		"no such feature": {imp: with(GraphBolt, func(o *GraphBoltOptions) { o.Feature = "y" }),
			want: []string{"option feature y", "has feat, other"}},
		"no features": {change: replaced("metadata.yaml",
			"graph: {nodes: [{num: 5}], edges: [{format: numpy, path: edges.npy}]}\n"),
			want: []string{"has no feature_data of nodes"}},
		"no such task": {imp: with(GraphBolt, func(o *GraphBoltOptions) { o.Task = "y" }),
			want: []string{"option task y", "has node_classification"}},
		"which task": {change: func(f tree) { f["metadata.yaml"] += "  - {name: links}\n" },
			want: []string{"choose one of node_classification, links with option task"}},
		"no tasks": {
			change: func(
				f tree) {
				f["metadata.yaml"], _, _ = strings.Cut(f["metadata.yaml"], "tasks:")
			}, want: []string{"has no tasks, so no labels", "option unlabelled-ok"}},
		"seeds are pairs": {change: replaced("set/train-seeds.npy",
			string(datasettest.Arr{DT: "<i8", Shape: []int64{1, 2}, Data: []int64{4, 1}}.Bytes(t))),
			want: []string{"train-seeds.npy has shape (1, 2); masks of several splits"}},
		"seed out of range": {change: replaced("set/train-seeds.npy", ints(4, 5)),
			want: []string{"train-seeds.npy: node id 5 at position 1"}},
		"seeds overlap": {change: func(f tree) { f["set/test-seeds.npy"] = ints(2, 1) },
			want: []string{"test-seeds.npy: node 1 at position 1 is also in ", "train-seeds.npy"}},
		"labels contradict": {
			change: func(
				f tree) {
				f["set/test-seeds.npy"], f["set/test-labels.npy"] = ints(2, 1), ints(2, 2)
			},
			want: []string{"test-labels.npy: label 2 of node 1 at position 1, another set has 1"}},
		"labels of others": {change: replaced("set/train-labels.npy", ints(0, 1, 2)),
			want: []string{"train-labels.npy has shape (3,), ", "train-seeds.npy has 2 nodes"}},
		"label is no class": {change: replaced("set/train-labels.npy", ints(0, -3)),
			want: []string{"train-labels.npy: label -3"}},
		"seeds of two types": {change: inMeta("    validation_set:\n      - data:",
			"    validation_set:\n      - data: []\n      - data:"),
			want: []string{"validation_set has 2 types of nodes"}},
		"no seeds": {change: inMeta("name: seeds", "name: node_pairs"),
			want: []string{"train_set has no seeds"}},
		"an empty entry": {
			change: inMeta(
				"- {name: seeds, format: numpy, in_memory: true, path: set/train-seeds.npy}", "-"),
			want: []string{"entry 0 of train_set is empty"}},
	})
}

// TestImportFormatsFeatureFn: features that are computed need none in the input.
func TestImportFormatsFeatureFn(t *testing.T) {
	smallIGB(t)
	dgl := goodDGL()
	delete(dgl.data, "feat")
	raw := igbTree(t, true)
	for name, c := range map[string]struct {
		imp    importFunc
		f      tree
		drop   string
		folder string
	}{
		"ogb": {plain(OGB), ogbTree(t), "raw/node-feat.csv.gz", "x"},
		"papers": {plain(OGB),
			papersTree(t, zip.Store, func(m map[string]datasettest.Arr) { delete(m, "node_feat") }),
			"", "x"},
		"mag240m":    {plain(MAG240M), magTree(t, nil), "processed/paper/node_feat.npy", "x"},
		"igb":        {plain(IGB), igbTree(t, false), "processed/paper/node_feat.npy", "x"},
		"igb, large": {plain(IGB), raw, "processed/paper/node_feat.npy", "large"},
		"graphbolt":  {plain(GraphBolt), boltTree(t), "data/feat.npy", "x"},
		"dgl":        {plain(DGL), tree{"g.bin": dgl.bytes()}, "", "x"},
	} {
		delete(c.f, c.drop)
		_, out := imported(t, c.imp, c.f, c.folder, Options{FeatureFn: "hash:3", Dim: 4})
		d := datasettest.Open(t, out)
		require.Equal(t, "hash:3", d.FeatureFn(), name)
		require.Equal(t, 4, d.Meta.Dim, name)
		require.Equal(t, int64(6), d.Meta.Edges, name)
	}
	err := plain(IGB)(bg, Options{Input: Input{In: raw.write(t, filepath.Join(t.TempDir(), "copy"))},
		FeatureFn: "hash:3", Output: Output{Out: filepath.Join(t.TempDir(), "g")}})
	require.ErrorContains(t, err, "nothing tells the number of papers; give option nodes")
}

// TestImportFormatsStopped: an import that is stopped while it reads the features gives the same
// when it is run again.
func TestImportFormatsStopped(t *testing.T) {
	for name, c := range map[string]struct {
		imp importFunc
		f   tree
	}{
		"ogb":     {plain(OGB), ogbTree(t)},
		"papers":  {plain(OGB), papersTree(t, zip.Deflate, nil)},
		"mag240m": {plain(MAG240M), magTree(t, nil)},
		"dgl":     {plain(DGL), tree{"g.bin": goodDGL().bytes()}},
	} {
		in := c.f.write(t, t.TempDir())
		ctx, cancel := context.WithCancel(bg)
		o := Options{Input: Input{In: in}, Output: Output{Out: filepath.Join(t.TempDir(), "g"),
			Progress: func(stage string, _, _ int64) {
				if stage == "features" {
					cancel()
				}
			}}}
		err := c.imp(ctx, o)
		cancel()
		if err == nil { // it was at the end already
			require.NoError(t, os.RemoveAll(o.Out))
		}
		o.Progress = nil
		require.NoError(t, c.imp(bg, o), name)
		again := Options{Input: Input{In: in}, Output: Output{Out: filepath.Join(t.TempDir(), "g")}}
		require.NoError(t, c.imp(bg, again))
		require.Equal(t, datasettest.Digest(t, again.Out), datasettest.Digest(t, o.Out), name)
	}
}
