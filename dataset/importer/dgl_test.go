package importer

import (
	"bytes"
	"context"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/philox"
	"helios/internal/testing/datasettest"
)

// TestImportDGL imports what DGL itself wrote (testdata/dgl/make.py).
func TestImportDGL(t *testing.T) {
	for _, name := range []string{"int32", "csr", "all"} {
		out := filepath.Join(t.TempDir(), "g")
		require.NoError(t, plain(DGL)(bg, Options{Input: Input{In: filepath.Join("testdata", "dgl",
			name+".bin")}, Output: Output{Out: out}}), name)
		require.Equal(t, goodView, viewOf(t, out), name)
	}
	out := filepath.Join(t.TempDir(), "g")
	in := filepath.Join("testdata", "dgl", "three.bin")
	require.NoError(t, DGL(bg, DGLOptions{Graph: "1",
		Options: Options{Input: Input{In: in}, Output: Output{Out: out}}}))
	require.Equal(t, goodView, viewOf(t, out))
	require.Equal(t, "1", datasettest.Open(t, out).Meta.Source.Options["graph"])
	for _, c := range []struct{ file, graph, want string }{
		{"three", "", "three.bin has 3 graphs; choose one with option graph 0 to 2"},
		{"three", "3", "option graph 3 must be from 0 to 2"},
		{"three", "-1", "option graph -1: must be the number of a graph"},
		{"three", "x", "option graph x"},
		{"three", "2",
			"three.bin: the graph has no node data feat, features, feats, feature, x (it has none); give features with option features"},
		{"hetero", "",
			"hetero.bin: offset 4112: a graph of 2 types of nodes (a, b) and 2 of edges (to, from)"},
	} {
		root := t.TempDir()
		err := DGL(bg, DGLOptions{Graph: c.graph, Options: Options{
			Input:  Input{In: filepath.Join("testdata", "dgl", c.file+".bin")},
			Output: Output{Out: filepath.Join(root, "g")}}})
		require.ErrorContains(t, err, c.want)
		datasettest.RequireUsage(t, err)
		datasettest.RequireEmpty(t, root)
	}
}

// TestDGLCut: a file that ends anywhere earlier, or a few bytes later, is refused.
func TestDGLCut(t *testing.T) {
	whole, err := os.ReadFile(filepath.Join("testdata", "dgl", "all.bin"))
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "a.bin")
	for n := 0; n < len(whole)+8; n++ {
		if n == len(whole) || n > 40 && n < dglHeader-10 {
			continue
		}
		require.NoError(t, os.WriteFile(path, append(bytes.Clone(whole), 0, 0, 0, 0, 0, 0, 0,
			0)[:n], 0o644))
		r, err := openDGL(path)
		require.NoError(t, err)
		_, _, err = r.graphs(-1)
		require.ErrorContains(t, err, path, "cut at %d", n)
		datasettest.RequireUsage(t, err)
		require.NoError(t, r.close())
	}
	datasettest.RequireNoFDs(t, filepath.Dir(path))
}

// dglBuf writes the format, for damage that DGL does not write.
type dglBuf struct{ bytes.Buffer }

func (b *dglBuf) u64(v ...uint64) {
	for _, x := range v {
		b.Write(binary.LittleEndian.AppendUint64(nil, x))
	}
}

func (b *dglBuf) str(s string) {
	b.u64(uint64(len(s)))
	b.WriteString(s)
}

// dglArr is a tensor: the code of its kind, its bits, shape and values.
type dglArr struct {
	kind, bits byte
	shape      []uint64
	data       any
	lanes      uint16
	device     uint32
}

func dglInts(v ...int64) dglArr {
	return dglArr{kind: 0, bits: 64, shape: []uint64{uint64(len(v))}, data: v}
}

func (b *dglBuf) array(a dglArr) {
	b.u64(dglArrayMagic, 0)
	head := binary.LittleEndian.AppendUint32(nil, 1-a.device)
	head = binary.LittleEndian.AppendUint32(head, 0)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(a.shape)))
	head = append(head, a.kind, a.bits)
	b.Write(binary.LittleEndian.AppendUint16(head, a.lanes+1))
	b.u64(a.shape...)
	b.u64(uint64(binary.Size(a.data)))
	if err := binary.Write(b, binary.LittleEndian, a.data); err != nil {
		panic(err)
	}
}

// dglSpec is a file with one graph.
type dglSpec struct {
	fileMagic, version, kind, graphs uint64
	hetero, meta, unit, csr, coo     uint64
	forms                            uint64
	rows, cols                       uint64
	ptr, idx, src, dst               dglArr // of CSC, and of COO
	nodes                            []uint64
	names                            []string
	data                             map[string]dglArr
	indexShift                       uint64
}

func goodDGL() *dglSpec {
	bits := func(v ...uint8) dglArr { return dglArr{kind: 1, bits: 8, shape: []uint64{5}, data: v} }
	return &dglSpec{
		fileMagic: dglFileMagic, version: 2, kind: 2, graphs: 1,
		hetero: dglHetero, meta: dglMetagraph, unit: dglUnitGraph, csr: dglCSRMatrix,
		coo:   dglCOOMatrix,
		forms: dglCSC | dglCOO | 1<<32, rows: 5, cols: 5,
		ptr: dglInts(0, 1, 2, 5, 5, 6), idx: dglInts(1, 0, 0, 3, 3, 4),
		src: dglInts(0, 0, 3, 3, 4, 1), dst: dglInts(1, 2, 2, 2, 4, 0),
		nodes: []uint64{5}, names: []string{"_N"},
		data: map[string]dglArr{
			"feat": {kind: 2, bits: 32, shape: []uint64{5, 2}, data: []float32{0, 1, 2, 3, 4,
				5, 6, 7, 8, 9}},
			"label":      dglInts(0, 1, 2, 1, 0),
			"train_mask": bits(0, 1, 0, 0, 1), "val_mask": bits(1, 0, 0, 0, 0),
			"test_mask": bits(0, 0, 1, 1, 0),
			// complex: skipped
			"when": {kind: 5, bits: 64, shape: []uint64{5}, data: make([]int64, 5)},
		},
	}
}

func (s *dglSpec) bytes() string {
	b := &dglBuf{}
	b.u64(s.fileMagic, s.version, s.kind, s.graphs)
	b.Write(make([]byte, dglHeader-b.Len()))
	b.u64(dglHeader+16, 0) // the start of the graphs, no tensors of the file
	meta := func() {
		b.u64(s.meta, s.csr, 1, 1)
		b.array(dglInts(0, 1))
		b.array(dglInts(0))
		b.array(dglInts(0))
		b.WriteByte(0)
	}
	b.u64(s.hetero)
	meta()
	b.u64(1, s.unit, s.forms, 7|1<<32)
	if s.forms&dglCOO != 0 {
		meta()
		b.u64(s.coo, s.cols, s.rows)
		b.array(s.src)
		b.array(s.dst)
		b.array(dglInts())
		b.Write([]byte{0, 0})
	}
	if s.forms&dglCSC != 0 {
		meta()
		b.u64(s.csr, s.cols, s.rows)
		b.array(s.ptr)
		b.array(s.idx)
		b.array(dglInts())
		b.WriteByte(0)
	}
	b.u64(uint64(len(s.nodes)))
	b.u64(s.nodes...)
	b.u64(uint64(len(s.names)))
	for range s.names {
		var names []string
		for n := range s.data {
			names = append(names, n)
		}
		sort.Strings(names)
		b.u64(uint64(len(names)))
		for _, n := range names {
			b.str(n)
			b.array(s.data[n])
		}
	}
	b.u64(1, 0) // one type of edges, without data
	b.u64(uint64(len(s.names)))
	for _, n := range s.names {
		b.str(n)
	}
	b.u64(1)
	b.str("_E")
	b.u64(16, 1, dglHeader+16+s.indexShift, 16)
	return b.String()
}

func TestImportDGLBad(t *testing.T) {
	file := func(change func(*dglSpec)) func(tree) {
		return func(f tree) {
			s := goodDGL()
			change(s)
			f["g.bin"] = s.bytes()
		}
	}
	data := func(name string, a dglArr) func(tree) {
		return file(func(s *dglSpec) { s.data[name] = a })
	}
	// bytes from the nth magic on
	after := func(mark uint64, nth int, change func([]byte)) func(tree) {
		return func(f tree) {
			b := []byte(f["g.bin"])
			i := -1
			for range nth + 1 {
				i += 1 + bytes.Index(b[i+1:], binary.LittleEndian.AppendUint64(nil, mark))
			}
			change(b[i:])
			f["g.bin"] = string(b)
		}
	}
	good := goodDGL().bytes()
	v, _ := imported(t, plain(DGL), tree{"g.bin": good}, "x", Options{})
	require.Equal(t, goodView, v)
	big := strings.Clone(good)
	masks := func(f tree) {
		file(func(s *dglSpec) {
			for _, n := range []string{"train_mask", "val_mask", "test_mask", "label"} {
				delete(s.data, n)
			}
		})(f)
	}
	nan := float32(math.NaN())
	refuses(t, plain(DGL), "x", func() tree { return tree{"g.bin": good} }, map[string]damaged{
		"two files": {change: replaced("h.bin", ""),
			want: []string{"has 2 .bin files; name the file"}},
		"empty": {change: replaced("g.bin", ""),
			want: []string{"g.bin: offset 0: truncated in the magic: the file has 0 bytes"}},
		"not DGL": {change: replaced("g.bin", "\x93NUMPY and so on"),
			want: []string{"g.bin: offset 0: not a file of dgl.save_graphs (it begins with 93 4e"}},
		"big-endian": {
			change: func(
				f tree) {
				f["g.bin"] = string(binary.BigEndian.AppendUint64(nil, dglFileMagic)) + big[8:]
			}, want: []string{"offset 0: big-endian"}},
		"version 1": {change: file(func(s *dglSpec) { s.version = 1 }),
			want: []string{"offset 8: version 1, graph type 2", "save it again"}},
		"no graphs": {change: file(func(s *dglSpec) { s.graphs = 0 }),
			want: []string{"offset 24: 0 graphs"}},
		"more graphs": {change: file(func(s *dglSpec) { s.graphs = 2 }),
			imp:  with(DGL, func(o *DGLOptions) { o.Graph = "1" }),
			want: []string{"the index has 16 bytes, 2 graphs need 24"}},
		"endless graphs": {change: file(func(s *dglSpec) { s.graphs = 1 << 60 }),
			want: []string{"offset 24: the number of graphs: a length of"}},
		"index disagrees": {change: file(func(s *dglSpec) { s.indexShift = 8 }),
			want: []string{"offset 4096: the first graph begins at 4112, the index says [4120]"}},
		"index outside": {change: file(func(s *dglSpec) { s.indexShift = 1 << 40 }),
			want: []string{"graph 0 begins at", "outside the file"}},
		"graph's magic": {change: file(func(s *dglSpec) { s.hetero++ }),
			want: []string{"offset 4112: a graph begins with 0xdd589fbe35224ac0"}},
		"metagraph's magic": {change: file(func(s *dglSpec) { s.meta-- }),
			want: []string{"offset 4120: the metagraph begins with"}},
		"relation's magic": {change: file(func(s *dglSpec) { s.unit-- }),
			want: []string{"a relation graph begins with"}},
		"CSR's magic": {change: file(func(s *dglSpec) { s.csr-- }),
			want: []string{"begins with 0xdd6cd31205dff126"}},
		"COO's magic": {change: file(func(s *dglSpec) { s.coo-- }),
			want: []string{"the COO begins with"}},
		"array's magic": {change: after(dglArrayMagic, 5, func(b []byte) { b[0]++ }),
			want: []string{"begins with 0xdd5e40f096b4a140, not with 0xdd5e40f096b4a13f"}},
		"unknown forms": {change: file(func(s *dglSpec) { s.forms |= 8 }),
			want: []string{"the saved forms have the code 0xd"}},
		"array of a GPU": {change: data("feat", dglArr{kind: 2, bits: 32, shape: []uint64{0},
			data: []float32{}, device: 1 << 31}),
			want: []string{`tensor "feat": device type -2147483647`}},
		"dimensions": {change: data("feat",
			dglArr{kind: 2, bits: 32, shape: make([]uint64, 9), data: []float32{}}),
			want: []string{`tensor "feat": 9 dimensions`}},
		"size overflows": {change: data("feat",
			dglArr{kind: 2, bits: 32, shape: []uint64{1 << 40, 1 << 40}, data: []float32{}}),
			want: []string{"dimension 1 has the size 1099511627776"}},
		"size disagrees": {change: data("feat",
			dglArr{kind: 2, bits: 32, shape: []uint64{5, 2}, data: make([]float32, 9)}),
			want: []string{
				`tensor "feat": 36 bytes of data, shape (5, 2) of 4 bytes each needs another number`}},
		"data beyond the file": {change: after(dglArrayMagic, 20,
			func(b []byte) { b[40], b[44] = 0xff, 0xff }), want: []string{"does not fit into"}},
		"features of complex": {change: data("feat", dglArr{kind: 5, bits: 64, shape: []uint64{5},
			data: make([]int64, 5)}),
			want: []string{`node data "feat" holds elements of a type that cannot be read`}},
		"features of lanes": {change: data("feat", dglArr{kind: 2, bits: 32, lanes: 1,
			shape: []uint64{5}, data: make([]float32, 10)}),
			want: []string{`node data "feat" holds elements of a type`}},
		"features disagree": {change: data("feat",
			dglArr{kind: 2, bits: 32, shape: []uint64{4, 2}, data: make([]float32, 8)}),
			want: []string{`tensor "feat" at offset`,
				"features have shape (4, 2), there are 5 nodes"}},
		"NaN feature": {change: data("feat",
			dglArr{kind: 2, bits: 32, shape: []uint64{5, 1}, data: []float32{0, nan, 0, 0, 0}}),
			want: []string{`tensor "feat" at offset`, "feature 0 of node 1 is NaN"}},
		"labels disagree": {change: data("label", dglInts(1, 2)),
			want: []string{`tensor "label" at offset`,
				"labels have shape (2,), there are 5 nodes"}},
		"labels in columns": {change: data("label",
			dglArr{kind: 0, bits: 64, shape: []uint64{5, 2}, data: make([]int64, 10)}),
			want: []string{"labels have shape (5, 2)"}},
		"label is no class": {change: data("label", dglInts(0, 1, -4, 0, 0)),
			want: []string{`tensor "label" at offset`, "label -4 of node 2"}},
		"no labels": {change: masks,
			want: []string{
				"the graph has no node data label, labels, y (it has feat, when); option unlabelled-ok"}},
		"mask disagrees": {change: data("val_mask",
			dglArr{kind: 1, bits: 8, shape: []uint64{4}, data: make([]uint8, 4)}),
			want: []string{`tensor "val_mask" at offset`, "the mask has shape (4,)"}},
		"mask of twos": {change: data("val_mask",
			dglArr{kind: 1, bits: 8, shape: []uint64{5}, data: []uint8{2, 0, 0, 0, 0}}),
			want: []string{"2 for node 0; a mask holds 0 and 1"}},
		"mask of floats": {change: data("val_mask",
			dglArr{kind: 2, bits: 32, shape: []uint64{5}, data: make([]float32, 5)}),
			want: []string{`tensor "val_mask"`, "holds <f4, integers are needed"}},
		"masks overlap": {change: data("val_mask",
			dglArr{kind: 1, bits: 8, shape: []uint64{5}, data: []uint8{1, 1, 0, 0, 0}}),
			want: []string{"node 1 at position 1 is also in"}},
		"two of three masks": {change: file(func(s *dglSpec) { delete(s.data, "val_mask") }),
			want: []string{"has no node data val_mask beside its other masks"}},
		"two types of nodes": {
			change: file(
				func(s *dglSpec) { s.nodes, s.names = []uint64{5, 1}, []string{"a", "b"} }),
			want: []string{"2 types of nodes (a, b)"}},
		"no nodes": {change: file(func(s *dglSpec) { s.nodes = []uint64{0} }),
			want: []string{"0 nodes"}},
		"nodes disagree": {change: file(func(s *dglSpec) { s.nodes = []uint64{6} }),
			want: []string{"a matrix of 5 × 5 for 6 nodes"}},
		"option nodes disagrees": {o: Options{Nodes: 4}, want: []string{"option nodes 4, but "}},
		"id out of range": {
			change: file(func(s *dglSpec) { s.idx = dglInts(1, 0, 0, 3, 5, 4) }),
			want: []string{"the CSC neighbours at offset",
				"node id 5 at position 4 is outside 0..4"}},
		"negative id": {
			change: file(func(s *dglSpec) { s.idx = dglInts(-1, 0, 0, 3, 3, 4) }),
			want:   []string{"node id -1 at position 0"}},
		"offsets fall": {
			change: file(func(s *dglSpec) { s.ptr = dglInts(0, 2, 1, 5, 5, 6) }),
			want:   []string{"the CSC offsets at offset", "offset 1 at position 2 does not rise"}},
		"offsets too far": {
			change: file(func(s *dglSpec) { s.ptr = dglInts(0, 1, 2, 7, 7, 7) }),
			want:   []string{"offset 7 at position 3"}},
		"offsets end early": {
			change: file(func(s *dglSpec) { s.ptr = dglInts(0, 1, 2, 4, 4, 5) }),
			want:   []string{"ends with 5, but", "has 6 entries"}},
		"offsets begin late": {
			change: file(func(s *dglSpec) { s.ptr = dglInts(1, 1, 2, 5, 5, 6) }),
			want:   []string{"offset 1 at position 0"}},
		"offsets too few": {change: file(func(s *dglSpec) { s.ptr = dglInts(0, 6) }),
			want: []string{"the CSC offsets at offset", "has 2 entries, 6 are needed"}},
		"forms disagree": {
			change: file(func(s *dglSpec) { s.src, s.dst = dglInts(0), dglInts(1) }),
			want: []string{"the CSC neighbours",
				"has 6 entries, another form of the same edges has 1"}},
		"pairs disagree": {change: file(func(s *dglSpec) { s.src = dglInts(0) }),
			want: []string{"the COO sources", "has 1 entries, 6 are needed"}},
		"a pair out of range": {change: file(func(s *dglSpec) {
			s.forms = dglCOO | 1<<32
			s.dst = dglInts(1, 2, 2, 2, 4, 9)
		}), want: []string{"the COO destinations at offset", "node id 9 at position 5"}},
		"ids of floats": {change: file(func(s *dglSpec) {
			s.idx = dglArr{kind: 2, bits: 32, shape: []uint64{6}, data: make([]float32, 6)}
		}), want: []string{"shape (6,) of <f4; ids are integers"}},
	})
	// Without labels or masks, where that is said.
	f := tree{}
	masks(f)
	v, _ = imported(t, plain(DGL), f, "x", Options{Input: Input{UnlabelledOK: true}})
	require.Equal(t, []int32{-1, -1, -1, -1, -1}, v.labels)
}

// TestArrayEdges: edges in many parts, read at once, are those of the arrays.
func TestArrayEdges(t *testing.T) {
	old := partEdges
	partEdges = 97
	defer func() { partEdges = old }()
	const nodes = 300
	var ptr, idx, own []int64
	for v := range int64(nodes) {
		ptr = append(ptr, int64(len(idx)))
		for range philox.Mix(uint64(v)) % 9 {
			idx, own = append(idx, int64(philox.Mix(uint64(len(idx)))%nodes)), append(own, v)
		}
	}
	ptr = append(ptr, int64(len(idx)))
	dir := datasettest.WriteDir(t, map[string]datasettest.Arr{
		"ptr": {DT: "<i8", Shape: []int64{nodes + 1}, Data: ptr},
		"idx": {DT: "<i8", Shape: []int64{int64(len(idx))}, Data: idx},
		"own": {DT: "<i8", Shape: []int64{int64(len(idx))}, Data: own},
	})
	opened := func(name string) *npy.Array {
		a, err := npy.Open(filepath.Join(dir, name+".npy"))
		require.NoError(t, err)
		return a
	}
	for name, source := range map[string]func() (edges.Source, error){
		"in": func() (edges.Source, error) {
			return offsetEdges(opened("ptr"), opened("idx"), ofOne(nodes), true)
		},
		"out": func() (edges.Source, error) {
			return offsetEdges(opened("ptr"), opened("idx"), ofOne(nodes), false)
		},
		"pairs": func() (edges.Source, error) {
			return pairEdges(opened("idx"), opened("own"), nodes)
		},
	} {
		s, err := source()
		require.NoError(t, err)
		require.Greater(t, s.Parts, 5)
		src, dst := make([][]int64, s.Parts), make([][]int64, s.Parts)
		var wg sync.WaitGroup
		var mu sync.Mutex
		read := int64(0)
		for p := range s.Parts {
			wg.Add(1)
			go func() {
				defer wg.Done()
				err := s.Read(bg, p, func(a, b []int64) error {
					src[p], dst[p] = append(src[p], a...), append(dst[p], b...)
					return nil
				}, func(n int64) { mu.Lock(); read += n; mu.Unlock() })
				if err != nil {
					t.Error(err)
				}
			}()
		}
		wg.Wait()
		a, b := own, idx
		if name != "out" {
			a, b = idx, own
		}
		require.Equal(t, a, concat(src), name)
		require.Equal(t, b, concat(dst), name)
		require.Equal(t, s.Total, read)
		ctx, cancel := context.WithCancel(bg)
		cancel()
		require.ErrorIs(t, s.Read(ctx, 1, func(_, _ []int64) error { return nil }, func(int64) {}),
			context.Canceled)
	}
}

func concat(parts [][]int64) (out []int64) {
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

// FuzzDGL: whatever the file, an error or arrays that lie in it.
func FuzzDGL(f *testing.F) {
	f.Add([]byte(goodDGL().bytes()), int64(-1))
	for _, name := range []string{"all", "three", "hetero"} {
		b, err := os.ReadFile(filepath.Join("testdata", "dgl", name+".bin"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, int64(1))
		f.Add(b, int64(-1))
	}
	path := filepath.Join(f.TempDir(), "a.bin")
	f.Fuzz(func(t *testing.T, b []byte, want int64) {
		if len(b) > 1<<16 {
			return
		}
		require.NoError(t, os.WriteFile(path, b, 0o644))
		r, err := openDGL(path)
		require.NoError(t, err)
		defer r.close()
		_, g, err := r.graphs(want)
		if err != nil {
			return
		}
		im := &dglImport{importer: &importer{}}
		s, err := im.dglEdges(path, g)
		if err != nil {
			return
		}
		n := int64(0)
		for p := range s.Parts {
			err = s.Read(bg, p, func(src, dst []int64) error {
				for i := range src {
					if uint64(src[i]) >= uint64(im.m.Nodes) ||
						uint64(dst[i]) >= uint64(im.m.Nodes) {
						t.Fatalf("edge %d → %d of %d nodes", src[i], dst[i], im.m.Nodes)
					}
				}
				n += int64(len(src))
				return nil
			}, func(int64) {})
			if err != nil {
				return
			}
		}
		if n != s.Total {
			t.Fatalf("%d of %d edges without an error", n, s.Total)
		}
	})
}
