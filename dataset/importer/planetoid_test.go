package importer

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/realdata"
)

// Python 2's pickles of protocol 2.

func pyInt(n int) string {
	return "J" + string(binary.LittleEndian.AppendUint32(nil, uint32(n)))
}

func pyArray(kind string, data []byte, shape ...int) string {
	s := "cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01("
	for _, n := range shape {
		s += pyInt(n)
	}
	return s + "tcnumpy\ndtype\nU\x02" + kind +
		"K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" +
		string(binary.LittleEndian.AppendUint32(nil, uint32(len(data)))) + string(data) + "tb"
}

// pyCSR is a matrix of float32 that has the rows given.
func pyCSR(rows [][]float32) string {
	var indptr, indices, data []byte
	put := func(b *[]byte, x uint32) { *b = binary.LittleEndian.AppendUint32(*b, x) }
	put(&indptr, 0)
	for _, r := range rows {
		for c, x := range r {
			if x != 0 {
				put(&indices, uint32(c))
				put(&data, math.Float32bits(x))
			}
		}
		put(&indptr, uint32(len(data)/4))
	}
	return "\x80\x02cscipy.sparse.csr\ncsr_matrix\n)\x81}(U\x06_shape" + pyInt(len(rows)) +
		pyInt(len(rows[0])) + "\x86U\x06indptr" + pyArray("i4", indptr, len(indptr)/4) +
		"U\x07indices" + pyArray("i4", indices, len(indices)/4) + "U\x04data" + pyArray("f4", data,
		len(data)/4) + "ub."
}

func pyOneHot(classes int, labels ...int) string {
	var b []byte
	for _, l := range labels {
		for c := range classes {
			b = binary.LittleEndian.AppendUint32(b, map[bool]uint32{true: 1}[c == l])
		}
	}
	return "\x80\x02" + pyArray("i4", b, len(labels), classes) + "."
}

func pyGraph(lists map[int][]int, order ...int) string {
	s := "\x80\x02ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R("
	for _, v := range order {
		s += pyInt(v) + "]("
		for _, u := range lists[v] {
			s += pyInt(u)
		}
		s += "e"
	}
	return s + "u."
}

// planetoidFiles: 4 nodes in allx, of which 2 are labelled for training, test nodes 6, 4 and a gap
// at 5.
func planetoidFiles() map[string]string {
	all := [][]float32{{1, 0, 3}, {0, 2, 0}, {0, 0, 0}, {1, 1, 0}}
	return map[string]string{
		"x": pyCSR(all[:2]), "allx": pyCSR(all), "tx": pyCSR([][]float32{{0, 0, 6}, {4, 0, 0}}),
		"y": pyOneHot(3, 2, 0), "ally": pyOneHot(3, 2, 0, 1, 1), "ty": pyOneHot(3, 1, 0),
		"graph":      pyGraph(map[int][]int{0: {1, 6, 1}, 1: {0}, 3: {3}, 4: {2}}, 0, 1, 3, 4),
		"test.index": "6\n4\n",
	}
}

func writePlanetoid(t *testing.T, files map[string]string) string {
	dir := t.TempDir()
	for n, s := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "ind.toy."+n), []byte(s), 0o644))
	}
	return dir
}

func TestImportPlanetoid(t *testing.T) {
	in := writePlanetoid(t, planetoidFiles())
	out := filepath.Join(t.TempDir(), "d")
	require.NoError(t, Planetoid(context.Background(), PlanetoidOptions{Input: Input{In: in},
		Output: Output{Out: out}}))
	want := view{
		// 0-1, 0-6, 3-3, 2-4, both ways and once
		indptr: []int64{0, 2, 3, 4, 5, 6, 6, 7}, indices: []uint32{1, 6, 0, 4, 3, 2, 0},
		features: []float32{1, 0, 3, 0, 2, 0, 0, 0, 0, 1, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 6},
		labels:   []int32{2, 0, 1, 1, 0, noLabel, 1},
		train:    []int64{0, 1}, val: []int64{2, 3}, test: []int64{4, 6},
	}
	require.Equal(t, want, viewOf(t, out))
	require.Equal(t, int64(1), datasettest.Open(t, out).Meta.Unlabelled)

	// One of the files, and the common part of their names, name the same.
	for i, in := range []string{filepath.Join(in, "ind.toy.allx"), filepath.Join(in, "ind.toy")} {
		o := PlanetoidOptions{Input: Input{In: in}, Output: Output{Out: fmt.Sprint(out, i)}}
		o.NormalizeFeatures = "row"
		require.NoError(t, Planetoid(context.Background(), o))
		want.features = []float32{0.25, 0, 0.75, 0, 1, 0, 0, 0, 0, 0.5, 0.5, 0, 1, 0, 0, 0, 0, 0,
			0, 0, 1}
		require.Equal(t, want, viewOf(t, o.Out))
	}
}

func TestImportPlanetoidRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		part, content, want string
	}{
		"a file is missing": {"tx", "-", "ind.toy.tx: no such file"},
		"truncated":         {"allx", planetoidFiles()["allx"][:200], "ind.toy.allx: offset "},
		"other class": {"graph", "\x80\x02cos\nsystem\nU\x02ls\x85R.",
			`ind.toy.graph: offset 2: "os system"`},
		"text": {"x", "1 2 3\n", "ind.toy.x: offset 0: opcode 0x31"},
		"no matrix": {"x", pyOneHot(3, 1),
			"ind.toy.x: holds an array, not a csr_matrix"},
		"no labels":      {"ty", pyGraph(nil), "ind.toy.ty: holds no array"},
		"rows differ":    {"ty", pyOneHot(3, 1), "ind.toy.ty: has 1 rows, "},
		"classes differ": {"ally", pyOneHot(4, 2, 0, 1, 1), "ind.toy.ally: has 4 classes"},
		"features differ": {"tx", pyCSR([][]float32{{1}, {2}}),
			"ind.toy.allx: has 3 features"},
		"more x than allx": {"allx", pyCSR([][]float32{{1, 0, 3}}),
			"ind.toy.ally: has 4 rows"},
		"labels differ": {"y", pyOneHot(3, 2, 1), "ind.toy.y: row 1 differs"},
		"two classes": {"ty", "\x80\x02" + pyArray("i4", []byte{1, 0, 0, 0, 1, 0, 0, 0, 0,
			0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0}, 2, 3) + ".",
			"ind.toy.ty: row 0 is not one-hot"},
		"a test id below": {"test.index", "6\n3\n",
			`ind.toy.test.index:2: "3" is not a test node`},
		"a test id twice":   {"test.index", "6\n6\n", "node 6 is listed twice"},
		"a test id far off": {"test.index", "6\n4000\n", `"4000" is not a test node`},
		"too few test ids":  {"test.index", "6\n", "lists 1 nodes, "},
		"a neighbour far off": {"graph", pyGraph(map[int][]int{0: {7}}, 0),
			"neighbour 0 of node 0 is 7"},
		"a node far off": {"graph", pyGraph(map[int][]int{9: {0}}, 9),
			"entry 0 is 9: not a node id below 7"},
		"a negative neighbour": {"graph", pyGraph(map[int][]int{0: {-1}}, 0),
			"neighbour 0 of node 0 is -1"},
		"a graph that is none":  {"graph", pyOneHot(3, 1), "ind.toy.graph: holds an array"},
		"a label that is empty": {"y", pyOneHot(3, 2, 9), "ind.toy.y: row 1 differs"},
	} {
		t.Run(name, func(t *testing.T) {
			files := planetoidFiles()
			if files[c.part] = c.content; c.content == "-" {
				delete(files, c.part)
			}
			out := filepath.Join(t.TempDir(), "d")
			err := Planetoid(context.Background(), PlanetoidOptions{
				Input: Input{In: writePlanetoid(t, files)}, Output: Output{Out: out}})
			datasettest.RequireUsage(t, err)
			require.ErrorContains(t, err, c.want)
			require.NoDirExists(t, out)
		})
	}
	in := writePlanetoid(t, planetoidFiles())
	for want, o := range map[string]PlanetoidOptions{
		"option normalize-features":     {NormalizeFeatures: "column"},
		"has no ind.NAME.graph":         {Input: Input{In: t.TempDir()}},
		"/ind.none.graph: no such file": {Input: Input{In: filepath.Join(in, "ind.none")}},
	} {
		if o.In == "" {
			o.In = in
		}
		o.Out = filepath.Join(t.TempDir(), "d")
		err := Planetoid(context.Background(), o)
		datasettest.RequireUsage(t, err)
		require.ErrorContains(t, err, want)
	}
}

// CiteSeer as published: the counts are those of the paper's reference code; the label histogram
// and degrees are our own reading of the files.
func TestImportCiteSeer(t *testing.T) {
	dir := realdata.Dir(t, "citeseer", "ind.citeseer.allx", "ind.citeseer.test.index")
	out := filepath.Join(t.TempDir(), "d")
	o := PlanetoidOptions{Input: Input{In: dir}, Output: Output{Out: out}}
	o.NormalizeFeatures = "row"
	require.NoError(t, Planetoid(context.Background(), o))
	m := datasettest.Open(t, out).Meta
	m.Source, m.UUID, m.CreatedBy = dataset.Source{}, "", ""
	require.Equal(t, dataset.Meta{Format: dataset.FormatVersion, Name: "d", Nodes: 3327,
		Edges: 2*4552 + 124, Dim: 3703, Classes: 6, DType: "float32",
		Train: 120, Val: 500, Test: 1000, Unlabelled: 15, Sealed: true}, m)
	v := viewOf(t, out)
	zero := 0
	for n := range 3327 {
		row, sum := v.features[n*3703:(n+1)*3703], 0.0
		for _, x := range row {
			sum += float64(x)
		}
		if sum == 0 {
			zero++
		} else {
			require.InDelta(t, 1, sum, 1e-5)
		}
	}
	require.Equal(t, 15, zero)
	per := make([]int, 6)
	for _, n := range v.train {
		per[v.labels[n]]++
	}
	require.Equal(t, []int{20, 20, 20, 20, 20, 20}, per, "20 nodes of each class")
}
