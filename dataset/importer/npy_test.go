package importer

import (
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/philox"
	"helios/internal/testing/datasettest"
)

func writeNPZ(t testing.TB, arrays map[string]datasettest.Arr) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "data.npz")
	f, err := os.Create(path)
	require.NoError(t, err)
	zw := zip.NewWriter(f)
	for n, a := range arrays {
		w, err := zw.Create(n + ".npy")
		require.NoError(t, err)
		_, err = w.Write(a.Bytes(t))
		require.NoError(t, err)
	}
	require.NoError(t, zw.Close())
	require.NoError(t, f.Close())
	return path
}

// view is everything in a dataset, for comparisons.
type view struct {
	indptr           []int64
	indices          []uint32
	features         []float32
	labels           []int32
	train, val, test []int64
}

func viewOf(t testing.TB, dir string) view {
	t.Helper()
	d := datasettest.Open(t, dir)
	tp, err := d.Topology()
	require.NoError(t, err)
	v := view{indptr: append([]int64{}, tp.Indptr...), indices: append([]uint32{}, tp.Indices32...),
		features: datasettest.WideRows(t, d)}
	v.labels, err = d.Labels()
	require.NoError(t, err)
	for i, p := range []*[]int64{&v.train, &v.val, &v.test} {
		*p, err = d.Split(dataset.Splits[i])
		require.NoError(t, err)
	}
	return v
}

var goodView = view{
	indptr:   []int64{0, 1, 2, 5, 5, 6},
	indices:  []uint32{1, 0, 0, 3, 3, 4},
	features: []float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
	labels:   []int32{0, 1, 2, 1, 0},
	train:    []int64{1, 4}, val: []int64{0}, test: []int64{2, 3},
}

func TestImportNPYForms(t *testing.T) {
	type m = map[string]datasettest.Arr
	nan := math.NaN()
	for name, change := range map[string]func(m){
		"as it is": func(m) {},
		"[E, 2]": func(a m) {
			a["edge_index"] = datasettest.Arr{DT: "<i4", Shape: []int64{6, 2},
				Data: []int32{0, 1, 0, 2, 3, 2, 3, 2, 4, 4, 1, 0}}
		},
		"[2, E] in Fortran order": func(a m) {
			a["edge_index"] = datasettest.Arr{DT: "<u4", Shape: []int64{2, 6},
				Data: []uint32{0, 1, 0, 2, 3, 2, 3, 2, 4, 4, 1, 0}, Fortran: true}
		},
		"[E, 2] in Fortran order": func(a m) {
			a["edge_index"] = datasettest.Arr{DT: "<i8", Shape: []int64{6, 2},
				Data: []int64{0, 0, 3, 3, 4, 1, 1, 2, 2, 2, 4, 0}, Fortran: true}
		},
		"CSC": func(a m) {
			delete(a, "edge_index")
			a["indptr"] = datasettest.Arr{DT: "<i8", Shape: []int64{6},
				Data: []int64{0, 1, 2, 5, 5, 6}}
			a["indices"] = datasettest.Arr{DT: "<u4", Shape: []int64{6},
				Data: []uint32{1, 0, 3, 0, 3, 4}}
		},
		"other names": func(a m) {
			for to, from := range map[string]string{"edges": "edge_index", "node_feat": "features",
				"node_label": "labels", "train_idx": "train", "valid_idx": "val",
				"test_idx": "test"} {
				a[to] = a[from]
				delete(a, from)
			}
		},
		"masks": func(a m) {
			a["train_mask"] = datasettest.Arr{DT: "|b1", Shape: []int64{5},
				Data: []bool{false, true, false, false, true}}
			a["val_mask"] = datasettest.Arr{DT: "|b1", Shape: []int64{5},
				Data: []bool{true, false, false, false, false}}
			a["test_mask"] = datasettest.Arr{DT: "|b1", Shape: []int64{5},
				Data: []bool{false, false, true, true, false}}
			delete(a, "train")
			delete(a, "val")
			delete(a, "test")
		},
		"float64 features": func(a m) {
			a["features"] = datasettest.Arr{DT: "<f8", Shape: []int64{5, 2},
				Data: []float64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}
		},
		"float16 features": func(a m) {
			a["features"] = datasettest.Arr{DT: "<f2", Shape: []int64{5, 2},
				Data: []uint16{0, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700, 0x4800,
					0x4880}}
		},
		"float labels [n, 1]": func(a m) {
			a["labels"] = datasettest.Arr{DT: "<f4", Shape: []int64{5, 1},
				Data: []float32{0, 1, 2, 1, 0}}
		},
		"arrays that mean nothing": func(
			a m) {
			a["node_year"] = datasettest.Arr{DT: "<i8", Shape: []int64{5}, Data: make([]int64, 5)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := datasettest.GoodArrays()
			change(a)
			for _, in := range []string{datasettest.WriteDir(t, a), writeNPZ(t, a)} {
				out := filepath.Join(t.TempDir(), "g")
				require.NoError(t, plain(NPY)(bg, Options{Input: Input{In: in},
					Output: Output{Out: out}}))
				require.Equal(t, goodView, viewOf(t, out))
			}
		})
	}

	imp := func(o Options, change func(m)) view {
		a := datasettest.GoodArrays()
		if change != nil {
			change(a)
		}
		o.In, o.Out = datasettest.WriteDir(t, a), filepath.Join(t.TempDir(), "g")
		require.NoError(t, plain(NPY)(bg, o))
		return viewOf(t, o.Out)
	}
	v := imp(Options{Dedup: true}, nil)
	require.Equal(t, []uint32{1, 0, 0, 3, 4}, v.indices)
	v = imp(Options{Undirected: true}, nil)
	require.Equal(t, []uint32{1, 2, 0, 0, 3, 2, 4}, v.indices)
	require.Equal(t, []int64{0, 2, 3, 5, 6, 7}, v.indptr)
	// No splits given: every node is dealt once.
	v = imp(Options{Output: Output{Seed: 5}}, func(a m) {
		delete(a, "train")
		delete(a, "val")
		delete(a,
			"test")
	})
	require.Len(t, append(append(v.train, v.val...), v.test...), 5)
	// Unlabelled nodes outside the splits need no flag; inside, and without splits, they do.
	v = imp(Options{}, func(a m) {
		a["labels"] = datasettest.Arr{DT: "<f8", Shape: []int64{5},
			Data: []float64{0, 1, 2, nan, 0}}
		a["test"] = datasettest.Arr{DT: "<i8", Shape: []int64{1}, Data: []int64{2}}
	})
	require.Equal(t, []int32{0, 1, 2, -1, 0}, v.labels)
	v = imp(Options{Input: Input{UnlabelledOK: true}}, func(a m) {
		a["labels"] = datasettest.Arr{DT: "<f8", Shape: []int64{5},
			Data: []float64{0, 1, 2, nan, -1}}
	})
	require.Equal(t, []int32{0, 1, 2, -1, -1}, v.labels)
	require.Equal(t, []int64{1}, v.train)
	require.Equal(t, []int64{2}, v.test)
	v = imp(Options{Input: Input{UnlabelledOK: true}},
		func(a m) { delete(a, "labels"); delete(a, "train"); delete(a, "val"); delete(a, "test") })
	require.Equal(t, []int32{-1, -1, -1, -1, -1}, v.labels)
	require.Empty(t, v.train)
}

func TestImportNPYBad(t *testing.T) {
	type m = map[string]datasettest.Arr
	ints := func(shape []int64, v ...int64) datasettest.Arr {
		return datasettest.Arr{DT: "<i8", Shape: shape, Data: v}
	}
	raw := func(name string, b []byte) func(string) error {
		return func(dir string) error { return os.WriteFile(filepath.Join(dir, name), b, 0o644) }
	}
	nan := float32(math.NaN())
	for name, c := range map[string]struct {
		change func(m)
		file   func(dir string) error
		want   []string
	}{
		"source out of range": {
			change: func(a m) { a["edge_index"] = ints([]int64{2, 2}, 0, 9, 1, 2) },
			want:   []string{"edge_index.npy: node id 9 at position 1 is outside 0..4"}},
		"destination out of range": {
			change: func(a m) { a["edge_index"] = ints([]int64{2, 2}, 0, 1, 1, 5) },
			want:   []string{"edge_index.npy: node id 5 at position 3"}},
		"negative id": {
			change: func(a m) { a["edge_index"] = ints([]int64{3, 2}, 0, 1, 1, -1, 0, 0) },
			want:   []string{"edge_index.npy: node id -1 at position 3"}},
		"edges of wrong shape": {
			change: func(a m) { a["edge_index"] = ints([]int64{3, 3}, make([]int64, 9)...) },
			want: []string{
				"edge_index.npy: edges have shape (3, 3), must be (2, edges) or (edges, 2)"}},
		"flat edges": {
			change: func(a m) { a["edge_index"] = ints([]int64{4}, 0, 1, 2, 3) },
			want:   []string{"shape (4,)"}},
		"float edges": {
			change: func(
				a m) {
				a["edge_index"] = datasettest.Arr{DT: "<f4", Shape: []int64{2, 1},
					Data: []float32{0, 1}}
			}, want: []string{"edge_index.npy: holds <f4, integers are needed"}},
		"no edges array": {change: func(a m) { delete(a, "edge_index") },
			want: []string{"has no edges (looked for edge_index"}},
		"no features": {change: func(a m) { delete(a, "features") },
			want: []string{"has no features (looked for features, node_feat"}},
		"no labels": {change: func(a m) { delete(a, "labels") },
			want: []string{"has no labels", "option unlabelled-ok"}},
		"flat features": {
			change: func(
				a m) {
				a["features"] = datasettest.Arr{DT: "<f4", Shape: []int64{5},
					Data: make([]float32, 5)}
			}, want: []string{"features.npy: features have shape (5,), must be (nodes, dim)"}},
		"features of no width": {
			change: func(
				a m) {
				a["features"] = datasettest.Arr{DT: "<f4", Shape: []int64{5, 0}, Data: []float32{}}
			}, want: []string{"shape (5, 0)"}},
		"NaN feature": {change: func(a m) {
			a["features"] = datasettest.Arr{DT: "<f4", Shape: []int64{5, 2},
				Data: []float32{0, 0, 0, 0, 0, nan, 0, 0, 0, 0}}
		}, want: []string{"features.npy: feature 1 of node 2 is NaN"}},
		"infinite after rounding": {change: func(a m) {
			a["features"] = datasettest.Arr{DT: "<f8", Shape: []int64{5, 1},
				Data: []float64{0, 0, 0, 1e300, 0}}
		}, want: []string{"feature 0 of node 3 is 1e+300, which float32 cannot hold"}},
		"row counts disagree": {change: func(a m) { a["labels"] = ints([]int64{4}, 0, 1, 0, 1) },
			want: []string{"labels.npy has 4 rows, ", "features.npy has 5"}},
		"labels of wrong shape": {
			change: func(a m) { a["labels"] = ints([]int64{5, 2}, make([]int64, 10)...) },
			want:   []string{"labels.npy: labels have shape (5, 2)"}},
		"NaN label in a split": {change: func(a m) {
			a["labels"] = datasettest.Arr{DT: "<f4", Shape: []int64{5},
				Data: []float32{0, 1, 2, nan, 0}}
		}, want: []string{"labels.npy: node 3, position 1 of ",
			"test.npy, has no label (NaN or -1)", "option unlabelled-ok"}},
		"NaN label without splits": {change: func(a m) {
			a["labels"] = datasettest.Arr{DT: "<f4", Shape: []int64{5},
				Data: []float32{0, 1, 2, nan, 0}}
			delete(a, "train")
			delete(a, "val")
			delete(a, "test")
		}, want: []string{"labels.npy: node 3 has no label", "option unlabelled-ok"}},
		"half a label": {change: func(a m) {
			a["labels"] = datasettest.Arr{DT: "<f4", Shape: []int64{5},
				Data: []float32{0, 1, 2.5, 0, 0}}
		}, want: []string{"labels.npy: label 2.5 of node 2 is not a class"}},
		"negative label": {
			change: func(a m) { a["labels"] = ints([]int64{5}, 0, -7, 0, 0, 0) },
			want:   []string{"label -7 of node 1"}},
		"two of three splits": {change: func(a m) { delete(a, "val") },
			want: []string{`has no split "val"`}},
		"split out of range": {change: func(a m) { a["test"] = ints([]int64{2}, 2, 5) },
			want: []string{"test.npy: node id 5 at position 1"}},
		"splits overlap": {change: func(a m) { a["test"] = ints([]int64{2}, 2, 4) },
			want: []string{"test.npy: node 4 at position 1 is also in", "train.npy"}},
		"split lists twice": {change: func(a m) { a["test"] = ints([]int64{2}, 2, 2) },
			want: []string{"test.npy: node 2 appears twice"}},
		"mask of wrong length": {
			change: func(
				a m) {
				a["test"] = datasettest.Arr{DT: "|b1", Shape: []int64{4}, Data: make([]bool, 4)}
			}, want: []string{"test.npy is a mask of 4 nodes, there are 5"}},
		"truncated features": {file: raw("features.npy",
			datasettest.GoodArrays()["features"].Bytes(t)[:150]),
			want: []string{"features.npy: truncated"}},
		"headerless features": {file: raw("features.npy", make([]byte, 40)),
			want: []string{"features.npy: not a .npy array"}},
		"truncated edges": {file: raw("edge_index.npy",
			datasettest.GoodArrays()["edge_index"].Bytes(t)[:200]),
			want: []string{"edge_index.npy: truncated"}},
		"offsets that fall": {
			change: func(
				a m) {
				csc(a, ints([]int64{6}, 0, 2, 1, 2, 2, 2), ints([]int64{2}, 0, 0))
			}, want: []string{"indptr.npy: offset 1 at position 2"}},
		"offsets beyond the end": {
			change: func(
				a m) {
				csc(a, ints([]int64{6}, 0, 1, 1, 2, 2, 3), ints([]int64{2}, 0, 0))
			}, want: []string{"indptr.npy: offset 3 at position 5", "2 entries of", "indices.npy"}},
		"offsets that end early": {
			change: func(
				a m) {
				csc(a, ints([]int64{6}, 0, 1, 1, 1, 1, 1), ints([]int64{2}, 0, 0))
			}, want: []string{"indptr.npy ends with 1, but", "indices.npy has 2 entries"}},
		"offsets of wrong shape": {
			change: func(a m) { csc(a, ints([]int64{5}, 0, 1, 1, 1, 2), ints([]int64{2}, 0, 0)) },
			want:   []string{"indptr.npy has shape (5,), the 5 nodes need (6,)"}},
		"CSC id out of range": {
			change: func(
				a m) {
				csc(a, ints([]int64{6}, 0, 1, 1, 1, 1, 2), ints([]int64{2}, 0, 5))
			}, want: []string{"indices.npy: node id 5 at position 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			a := datasettest.GoodArrays()
			if c.change != nil {
				c.change(a)
			}
			dir := datasettest.WriteDir(t, a)
			if c.file != nil {
				require.NoError(t, c.file(dir))
			}
			root := t.TempDir()
			err := plain(NPY)(bg, Options{Input: Input{In: dir},
				Output: Output{Out: filepath.Join(root, "g")}})
			require.Error(t, err)
			for _, w := range c.want {
				require.ErrorContains(t, err, w)
			}
			require.NotContains(t, err.Error(), "\n")
			datasettest.RequireUsage(t, err)
			datasettest.RequireEmpty(t, root)
			datasettest.RequireNoFDs(t, root)
			datasettest.RequireNoFDs(t, dir)
		})
	}
	for in, want := range map[string]string{
		"": "option in is missing", "/no/such/dir": "no such file",
		filepath.Join(datasettest.WriteDir(t, datasettest.GoodArrays()),
			"features.npy"): "give the directory",
		os.Args[0]: "neither a directory",
	} {
		err := plain(NPY)(bg, Options{Input: Input{In: in},
			Output: Output{Out: filepath.Join(t.TempDir(), "g")}})
		require.ErrorContains(t, err, want)
		datasettest.RequireUsage(t, err)
	}
}

func csc(a map[string]datasettest.Arr, indptr, indices datasettest.Arr) {
	delete(a, "edge_index")
	a["indptr"], a["indices"] = indptr, indices
}

// TestImportBoundedMemory: an edge sort with the least budget gives the same bytes.
func TestImportBoundedMemory(t *testing.T) {
	const nodes, edges = 2000, 200_000
	e := make([]int32, 2*edges)
	for i := range e {
		e[i] = int32(philox.Mix(uint64(i)) % nodes)
	}
	dir := datasettest.WriteDir(t, map[string]datasettest.Arr{
		"edge_index": {DT: "<i4", Shape: []int64{2, edges}, Data: e},
		"features":   {DT: "<f4", Shape: []int64{nodes, 1}, Data: make([]float32, nodes)},
		"labels":     {DT: "<i4", Shape: []int64{nodes}, Data: make([]int32, nodes)},
	})
	a, b := filepath.Join(t.TempDir(), "g"), filepath.Join(t.TempDir(), "g")
	require.NoError(t, plain(NPY)(bg, Options{Input: Input{In: dir}, Undirected: true,
		Output: Output{Out: a}}))
	require.NoError(t, plain(NPY)(bg, Options{Input: Input{In: dir}, Undirected: true,
		Output: Output{Out: b, Memory: 1}}))
	require.Equal(t, datasettest.Digest(t, a), datasettest.Digest(t, b))

	// A cancelled import leaves nothing.
	ctx, cancel := context.WithCancel(bg)
	cancel()
	root := t.TempDir()
	require.ErrorIs(t, plain(NPY)(ctx, Options{Input: Input{In: dir},
		Output: Output{Out: filepath.Join(root, "g")}}), context.Canceled)
	datasettest.RequireEmpty(t, root)
}

func gz(t testing.TB, s string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write([]byte(s))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.String()
}

func TestImportEdges(t *testing.T) {
	const csv = "# a comment\nsource,target\n0,1\n0,2\n3,2\n3,2\n4,4\n1,0\n"
	features := "0,1\n2,3\n4,5\n6,7\n8 , 9"
	for name, files := range map[string]map[string]string{
		"csv": {"edges.csv": csv, "features.csv": features,
			"labels.csv": "0\n1\n2\n1\n0\n"},
		"spaces, CRLF": {"edges.txt": strings.ReplaceAll(strings.ReplaceAll(csv, ",", "   "),
			"\n", "\r\n"), "features.txt": features, "labels.txt": "label\n0\n1\n2\n1\n0\n"},
		"tabs, gzip": {"edge.tsv.gz": gz(t, strings.ReplaceAll(csv, ",", "\t")),
			"node-feat.csv.gz": gz(t, features), "node-label.csv.gz": gz(t, "0.0\n1\n2\n1\n0")},
		"weights": {"edges.csv": "0,1,0.5\n0,2,1\n3,2,1\n3,2,1\n4,4,1\n1,0,x",
			"features.csv": "a,b\n" + features, "labels.csv": "3,1\n0,0\n1,1\n4,0\n2,2\n"},
		"mixed with arrays": {"edge.csv": csv,
			"features.npy": string(datasettest.GoodArrays()["features"].Bytes(t)),
			"labels.npy":   string(datasettest.GoodArrays()["labels"].Bytes(t))},
		"edges as an array": {"edge.npy": string(datasettest.GoodArrays()["edge_index"].Bytes(t)),
			"features.csv": features, "labels.csv": "0\n1\n2\n1\n0\n"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, splits, out := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "g")
			for n, text := range files {
				require.NoError(t, os.WriteFile(filepath.Join(dir, n), []byte(text), 0o644))
			}
			for n, text := range map[string]string{"train.csv": "4\n1\n",
				"valid.csv.gz": gz(t, "0\n"), "test.txt": "node\n2\n3\n"} {
				require.NoError(t, os.WriteFile(filepath.Join(splits, n), []byte(text), 0o644))
			}
			require.NoError(t, Edges(bg, EdgesOptions{IgnoreColumns: name == "weights",
				Options: Options{Input: Input{In: dir}, SplitDir: splits,
					Output: Output{Out: out, Memory: 1}}}))
			require.Equal(t, goodView, viewOf(t, out))
		})
	}

	// Edges alone: nodes from the ids, features only where they are asked for, nothing to train on.
	file := filepath.Join(t.TempDir(), "snap.txt")
	require.NoError(t, os.WriteFile(file, []byte("% snap\n0 1\n2 1\n"), 0o644))
	out := filepath.Join(t.TempDir(), "g")
	err := plain(Edges)(bg, Options{Input: Input{In: file}, Output: Output{Out: out}})
	require.ErrorContains(t, err, "snap.txt comes without features: give them with option features")
	require.ErrorContains(t, err, "option feature-fn hash")
	datasettest.RequireUsage(t, err)
	require.NoError(t, plain(Edges)(bg, Options{Input: Input{In: file},
		FeatureFn: RandomFeatures, Dim: 8,
		Output: Output{Out: out, Seed: 4}}))
	v := viewOf(t, out)
	require.Equal(t, []int64{0, 0, 2, 2}, v.indptr)
	require.Len(t, v.features, 24)
	require.Equal(t, []float32{0, log2(2), 0}, []float32{v.features[0], v.features[8],
		v.features[16]})
	require.NotEqual(t, v.features[1:8], v.features[9:16])
	require.Equal(t, []int32{-1, -1, -1}, v.labels)
	require.Empty(t, v.train)
	out2 := filepath.Join(t.TempDir(), "g")
	require.NoError(t, plain(Edges)(bg, Options{Input: Input{In: file},
		FeatureFn: RandomFeatures, Dim: 8,
		Output: Output{Out: out2, Seed: 4}}))
	require.Equal(t, datasettest.Digest(t, out), datasettest.Digest(t, out2))
	require.NoError(t, plain(Edges)(bg, Options{Input: Input{In: file},
		FeatureFn: RandomFeatures, Nodes: 10,
		Output: Output{Out: filepath.Join(t.TempDir(), "g")}}))
}

func TestImportEdgesBad(t *testing.T) {
	long := strings.Repeat("x", maxLine+10)
	for name, c := range map[string]struct {
		files map[string]string
		want  string
	}{
		"no edge list":  {map[string]string{"graph.dat": "0 1"}, "has no edge list"},
		"empty":         {map[string]string{"edges.csv": ""}, "edges.csv holds no edges"},
		"only comments": {map[string]string{"edges.csv": "# 1\n"}, "holds no edges"},
		"one column": {map[string]string{"edges.csv": "0,1\n5\n"},
			`edges.csv:2: "5" is not an edge`},
		"words": {map[string]string{"edges.csv": "0,1\na,b\n"},
			`edges.csv:2: "a" is not a node id`},
		"negative": {map[string]string{"edges.csv": "0,1\n0,-1\n"},
			`edges.csv:2: "-1" is not a node id`},
		"fraction": {map[string]string{"edges.csv": "0,1\n0,1.5\n"},
			`edges.csv:2: "1.5" is not a node id`},
		"huge id": {map[string]string{"edges.csv": "0,1\n0,99999999999999\n"},
			"edges.csv:2: node id 99999999999999 in column 2 is too large"},
		"id out of range": {map[string]string{"edges.csv": "0,1\n0,7\n",
			"features.csv": "1\n2\n"}, "edges.csv:2: node id 7 in column 2 is outside 0..1"},
		"ragged features": {map[string]string{"edges.csv": "0,1\n",
			"features.csv": "1,2\n3\n"}, "features.csv:2: 1 features, the rows before have 2"},
		"words in features": {map[string]string{"edges.csv": "0,1\n",
			"features.csv": "1,2\n3,x\n"}, `features.csv:2: "x" in column 2 is not a number`},
		"NaN feature": {map[string]string{"edges.csv": "0,1\n",
			"features.csv": "1,2\n3,nan\n"}, "feature 1 of node 1 is NaN"},
		"no features in file": {map[string]string{"edges.csv": "0,1\n",
			"features.csv": "# none\n"}, "features.csv holds no features"},
		"row counts disagree": {map[string]string{"edges.csv": "0,1\n", "features.csv": "1\n2\n",
			"labels.csv": "0\n1\n2\n"}, "labels.csv has 3 rows, "},
		"label not a number": {map[string]string{"edges.csv": "0,1\n", "labels.csv": "0\ncat\n"},
			`labels.csv:2: label "cat"`},
		"label columns": {map[string]string{"edges.csv": "0,1\n", "labels.csv": "0,1,2\n"},
			"labels.csv:1: 3 columns"},
		"label columns change": {map[string]string{"edges.csv": "0,1\n", "labels.csv": "0,1\n1\n"},
			"labels.csv:2: 1 columns"},
		"label twice": {map[string]string{"edges.csv": "0,1\n",
			"labels.csv": "0,1\n0,1\n"}, "labels.csv:2: node 0 has a label already"},
		"NaN label": {map[string]string{"edges.csv": "0,1\n", "labels.csv": "0\nnan\n"},
			"labels.csv: node 1 has no label"},
		"node left out": {map[string]string{"edges.csv": "0,1\n", "features.csv": "1\n2\n",
			"labels.csv": "1,0\n"}, "labels.csv: node 0 has no label"},
		"broken gzip": {map[string]string{"edges.csv.gz": "\x1f\x8b\b\x00\x00\x00\x00\x00\x00\x03no"},
			"edges.csv.gz: truncated or damaged near line 1"},
		"cut gzip": {map[string]string{"edges.csv.gz": gz(t,
			strings.Repeat("0,1\n", 1000))[:30]}, "truncated or damaged"},
		"endless line": {map[string]string{"edges.csv": "0,1\n" + long},
			"edges.csv:2: line of more than"},
		"array without nodes": {
			map[string]string{"edges.npy": string(datasettest.GoodArrays()["edge_index"].Bytes(t))},
			"option nodes"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, root := t.TempDir(), t.TempDir()
			for n, text := range c.files {
				require.NoError(t, os.WriteFile(filepath.Join(dir, n), []byte(text), 0o644))
			}
			o := Options{Input: Input{In: dir}, Output: Output{Out: filepath.Join(root, "g")}}
			if c.files["features.csv"] == "" {
				o.FeatureFn = RandomFeatures
			}
			err := plain(Edges)(bg, o)
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "\n")
			datasettest.RequireUsage(t, err)
			datasettest.RequireEmpty(t, root)
			datasettest.RequireNoFDs(t, root)
			datasettest.RequireNoFDs(t, dir)
		})
	}
	// A long line within the limit is fine: features are wide.
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "g")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "edges.csv"), []byte("0,1\n"), 0o644))
	row := strings.Repeat("1,", 200_000-1) + "1\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "x.csv"), []byte(row+row), 0o644))
	require.NoError(t, plain(Edges)(bg, Options{Input: Input{In: dir}, Output: Output{Out: out}}))
	require.Equal(t, 200_000, datasettest.Open(t, out).Meta.Dim)
	for _, o := range []Options{{Output: Output{TrainFraction: 0.9, ValFraction: 0.2}}, {Dim: -1},
		{Nodes: -1}} {
		o.In, o.Out = dir, filepath.Join(t.TempDir(), "g")
		datasettest.RequireUsage(t, plain(Edges)(bg, o))
	}
	require.ErrorContains(t, plain(Edges)(bg, Options{Input: Input{In: dir}, SplitDir: dir,
		Output: Output{Out: filepath.Join(t.TempDir(), "g")}}), fmt.Sprintf("%s has no split", dir))
}

var bg = context.Background()

func TestMain(m *testing.M) { os.Exit(datasettest.Main(m)) }

// bareFolders are the graph of goodView as other systems keep it, without headers, and the options
// that read it.
func bareFolders(t testing.TB) map[string]struct {
	files tree
	o     NPYOptions
} {
	bytesOf := func(v any) string {
		var b bytes.Buffer
		require.NoError(t, binary.Write(&b, binary.LittleEndian, v))
		return b.String()
	}
	features := bytesOf([]float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
	options := func(arrays, types, lists string) (o NPYOptions) {
		require.NoError(t, o.Map.UnmarshalText([]byte(arrays)))
		require.NoError(t, o.Types.UnmarshalText([]byte(types)))
		o.Lists, o.Dim = lists, 2
		return o
	}
	return map[string]struct {
		files tree
		o     NPYOptions
	}{
		"ginex": {tree{"indptr.dat": bytesOf([]int64{0, 1, 2, 5, 5, 6}),
			"indices.dat":  bytesOf([]int64{1, 0, 0, 3, 3, 4}),
			"features.dat": features, "labels.dat": bytesOf([]float32{0, 1, 2, 1, 0}),
			"split/train.txt": "1\n4\n", "split/val.txt": "0\n", "split/test.txt": "2\n3\n"},
			options("indptr.dat=indptr,indices.dat=indices,features.dat=features,labels.dat=labels",
				"indptr=int64,indices=int64,features=float32,labels=float32", "in")},
		"legion": {tree{"edge_src": bytesOf([]int64{0, 2, 3, 3, 5, 6}),
			"edge_dst": bytesOf([]int32{1, 2, 0, 2, 2, 4}), "features": features,
			"labels":      bytesOf([]int32{0, 1, 2, 1, 0}),
			"trainingset": bytesOf([]int32{4, 1}), "validationset": bytesOf([]int32{0}),
			"testingset": bytesOf([]int32{2, 3})},
			options("edge_src=indptr,edge_dst=indices,trainingset=train,validationset=val,testingset=test",
				"indptr=int64,indices=int32,features=float32,labels=int32,train=int32,val=int32,test=int32",
				"out")},
		"gnnlab": {tree{"indptr.bin": bytesOf([]uint32{0, 1, 2, 5, 5, 6}),
			"indices.bin": bytesOf([]uint32{1, 0, 0, 3, 3, 4}), "feat.bin": features,
			"label.bin": bytesOf([]int64{0, 1, 2, 1, 0}), "train_set.bin": bytesOf([]uint32{1, 4}),
			"valid_set.bin": bytesOf([]uint32{0}), "test_set.bin": bytesOf([]uint32{3, 2})},
			options("indptr.bin=indptr,indices.bin=indices,feat.bin=features,label.bin=labels,train_set.bin=train,valid_set.bin=val,test_set.bin=test",
				"indptr=uint32,indices=uint32,features=float32,labels=int64,train=uint32,val=uint32,test=uint32",
				"in")},
	}
}

// Arrays without a header are read by the types that options give, and refused where their lengths
// do not fit together.
func TestImportBareArrays(t *testing.T) {
	for name, c := range bareFolders(t) {
		in := c.files.write(t, t.TempDir())
		set := func(change func(o *NPYOptions)) importFunc {
			return with(NPY, func(o *NPYOptions) {
				o.Map, o.Types, o.Lists, o.Dim = c.o.Map, maps.Clone(c.o.Types), c.o.Lists, c.o.Dim
				if _, err := os.Stat(filepath.Join(in, "split")); err == nil {
					o.SplitDir = filepath.Join(in, "split")
				}
				change(o)
			})
		}
		out := filepath.Join(t.TempDir(), "g")
		o := Options{Input: Input{In: in}, Output: Output{Out: out}}
		require.NoError(t, set(func(*NPYOptions) {})(bg, o), name)
		require.Equal(t, goodView, viewOf(t, out), name)
		o.Out = filepath.Join(t.TempDir(), "g")
		for want, change := range map[string]func(o *NPYOptions){
			"give option dim": func(o *NPYOptions) { o.Dim = 0 },
			" needs 36 bytes from offset 0 on, the file has 40": func(o *NPYOptions) {
				o.Dim = 3
			},
			"has 5 rows, ": func(o *NPYOptions) { o.Dim = 5 },
			"has no file other": func(o *NPYOptions) {
				o.Map = ArrayMap{"indptr": "other"}
			},
			"has no file ../x": func(o *NPYOptions) { o.Map = ArrayMap{"indptr": "../x"} },
			"the 5 nodes need (6,)": func(o *NPYOptions) {
				if o.Types["indptr"].Size == 8 {
					o.Types["indptr"] = npy.Uint32
				} else {
					o.Types["indptr"] = npy.Int64
				}
			},
		} {
			err := set(change)(bg, o)
			datasettest.RequireUsage(t, err)
			require.ErrorContains(t, err, want, name)
			require.NoDirExists(t, o.Out)
		}
		for file, text := range c.files {
			if strings.HasPrefix(file, "split/") {
				continue
			}
			path := filepath.Join(in, file)
			require.NoError(t, os.WriteFile(path, []byte(text[:len(text)-1]), 0o644))
			err := set(func(*NPYOptions) {})(bg, o)
			datasettest.RequireUsage(t, err)
			require.ErrorContains(t, err, file, name)
			require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		}
	}
	var types ArrayTypes
	for text, want := range map[string]string{"features": "the type is int, uint or float",
		"x=int8": "ours is one of", "labels=int7": "the type is", "labels=float8": "element type",
		"labels=int999999999999999999999": "the type is"} {
		require.ErrorContains(t, types.UnmarshalText([]byte(text)), want)
	}
}

// A type for a file that has one by its header is refused, and a file in another format is not
// taken for numbers.
func TestBareArraysByContent(t *testing.T) {
	arrays := datasettest.GoodArrays()
	in := datasettest.WriteDir(t, arrays)
	require.NoError(t, os.Rename(filepath.Join(in, "features.npy"), filepath.Join(in, "x.bin")))
	imp := with(NPY, func(o *NPYOptions) {
		o.Map, o.Types = ArrayMap{"features": "x.bin"}, ArrayTypes{"features": npy.Int64}
	})
	o := Options{Input: Input{In: in}, Dim: 1, Output: Output{Out: filepath.Join(t.TempDir(), "g")}}
	err := imp(bg, o)
	datasettest.RequireUsage(t, err)
	require.ErrorContains(t, err, "x.bin has a header, which gives its type; take features out of")
	require.NoError(t, os.WriteFile(filepath.Join(in, "x.bin"),
		[]byte("\x80\x02ctorch._utils\n_rebuild_tensor_v2\n."), 0o644))
	err = imp(bg, o)
	datasettest.RequireUsage(t, err)
	require.ErrorContains(t, err, "x.bin is ")
}
