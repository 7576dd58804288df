package importer

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/datasettest"
)

// member is an array as NumPy writes it: its type, its shape, and its data.
type member struct {
	descr, shape string
	data         any
}

func (m member) bytes(t testing.TB) []byte {
	dict := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': %s, }", m.descr, m.shape)
	var b bytes.Buffer
	b.WriteString("\x93NUMPY\x01\x00")
	dict += strings.Repeat(" ", 117-len(dict)) + "\n"
	require.NoError(t, binary.Write(&b, binary.LittleEndian, uint16(len(dict))))
	b.WriteString(dict)
	order := binary.ByteOrder(binary.LittleEndian)
	if m.descr[0] == '>' {
		order = binary.BigEndian
	}
	if s, ok := m.data.(string); ok {
		m.data = []byte(s)
	}
	require.NoError(t, binary.Write(&b, order, m.data))
	return b.Bytes()
}

type members map[string]member

// with is the members with some others in their place; an empty one takes one away.
func (m members) with(other members) members {
	all := members{}
	for _, from := range []members{m, other} {
		for n, x := range from {
			if all[n] = x; x == (member{}) {
				delete(all, n)
			}
		}
	}
	return all
}

// npz is an archive as numpy.savez, or savez_compressed, writes it.
func (m members) npz(t testing.TB, method uint16) string {
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for n, x := range m {
		f, err := w.CreateHeader(&zip.FileHeader{Name: n + ".npy", Method: method})
		require.NoError(t, err)
		_, err = f.Write(x.bytes(t))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return b.String()
}

func (m members) folder(t testing.TB) tree {
	f := tree{}
	for n, x := range m {
		f[n+".npy"] = string(x.bytes(t))
	}
	return f
}

func i4(v ...int32) member   { return member{"<i4", fmt.Sprintf("(%d,)", len(v)), v} }
func i8(v ...int64) member   { return member{"<i8", fmt.Sprintf("(%d,)", len(v)), v} }
func f8(v ...float64) member { return member{"<f8", fmt.Sprintf("(%d,)", len(v)), v} }
func b1(v ...bool) member    { return member{"|b1", fmt.Sprintf("(%d,)", len(v)), v} }

// The matrix of these tests has the entries (0,1) (0,2) (1,0) (3,2) (4,4); its arrays are those
// that SciPy 1.17 writes.
var (
	matrixRest = members{"shape": i8(5, 5), "data": f8(1, 1, 1, 1, 1)}
	csr        = matrixRest.with(members{"format": {"|S3", "()", "csr"},
		"indptr": i4(0, 2, 3, 3, 4, 5), "indices": i4(1, 2, 0, 2, 4)})
	csc1 = matrixRest.with(members{"format": {"|S3", "()", "csc"},
		"indptr": i4(0, 1, 2, 4, 4, 5), "indices": i4(1, 0, 0, 3, 4)})
	coo = matrixRest.with(members{"format": {"|S3", "()", "coo"},
		"row": i4(0, 0, 1, 3, 4), "col": i4(1, 2, 0, 2, 4)})
	nodeData = members{"x": {"<f4", "(5, 2)", []float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}},
		"y": i8(0, 1, 2, 1, 0), "train_mask": b1(false, true, false, false, true),
		"val_mask": b1(true, false, false, false, false), "test_mask": b1(false, false, true, true, false)}
	matrixView = view{indptr: []int64{0, 1, 2, 4, 4, 5}, indices: []uint32{1, 0, 0, 3, 4},
		features: goodView.features, labels: goodView.labels, train: goodView.train,
		val: goodView.val, test: goodView.test}
	matrixTurned = view{indptr: []int64{0, 2, 3, 3, 4, 5}, indices: []uint32{1, 2, 0, 2, 4},
		features: goodView.features, labels: goodView.labels, train: goodView.train,
		val: goodView.val, test: goodView.test}
)

// archiveCase is an archive, or a folder of arrays, as a library writes it.
type archiveCase struct {
	matrix members // an archive beside the node data
	folder members
	all    bool // the archive holds the node data too
	lists  string
	want   *view  // or
	err    string // of the refusal
	note   string
}

// TestArchives reads what SciPy, NumPy, NetworkX and PyTorch Geometric's users save, equal to what
// SciPy's and NumPy's own readers give, or refuses it by name.
func TestArchives(t *testing.T) {
	ei := []int64{0, 0, 1, 3, 4, 1, 2, 0, 2, 4}
	same, turned := &matrixView, &matrixTurned
	for name, c := range map[string]archiveCase{
		"csr":                  {matrix: csr, want: same},
		"csc":                  {matrix: csc1, want: same},
		"coo":                  {matrix: coo, want: same},
		"csr_array":            {matrix: csr.with(members{"_is_array": {"|b1", "()", true}}), want: same},
		"format in characters": {matrix: csr.with(members{"format": {"<U3", "()", []int32{'c', 's', 'r'}}}), want: same},
		"coords of a later SciPy": {matrix: coo.with(members{"row": {}, "col": {},
			"coords": {"<i4", "(2, 5)", []int32{0, 0, 1, 3, 4, 1, 2, 0, 2, 4}}}), want: same},
		"NetworkX, weights of int64": {matrix: csr.with(members{"data": i8(1, 1, 1, 1, 1)}), want: same},
		"ids of 64 bits": {matrix: csr.with(members{"indptr": i8(0, 2, 3, 3, 4, 5),
			"indices": i8(1, 2, 0, 2, 4)}), want: same},
		"unsorted": {matrix: csr.with(members{"indices": i4(2, 1, 0, 2, 4)}), want: same},
		"weights": {matrix: csr.with(members{"data": f8(1, 0.5, 1, 1, 1)}), want: same,
			note: "data, the values of its entries; models take no edge weights"},
		"stored zeros": {matrix: csc1.with(members{"data": f8(0, 1, 0, 1, 1)}), want: same,
			note: "2 of the 5 entries of "},
		"bool":     {matrix: csr.with(members{"data": b1(true, true, true, true, true)}), want: same},
		"complex":  {matrix: csr.with(members{"data": {"<c8", "(5,)", make([]float32, 10)}}), want: same, note: "data, the values"},
		"csr, in":  {matrix: csr, lists: "in", want: turned},
		"csc, out": {matrix: csc1, lists: "out", want: turned},
		"csr, out": {matrix: csr, lists: "out", want: same},
		"one file": {matrix: csr.with(members{"edge_time": i8(1, 2)}), all: true, want: same, note: "not used of "},
		"format of something else": {matrix: members{"edge_index": {"<i8", "(2, 5)", ei},
			"format": i8(1)}, all: true, want: same, note: ": format\n"},
		"edge_index": {folder: members{"edge_index": {"<i8", "(2, 5)", ei}}, want: same},
		"big-endian pairs": {folder: members{"edges": {">u2", "(5, 2)",
			[]uint16{0, 1, 0, 2, 1, 0, 3, 2, 4, 4}}}, want: same},
		"columns": {folder: members{"src": {"<i8", "(5, 1)", ei[:5]}, "dst": {"<i8", "(5, 1)", ei[5:]},
			"train_mask": {}, "train_idx": {"<i8", "(2, 1)", []int64{1, 4}}}, want: same},
		"src and dst": {folder: members{"src": i8(0, 0, 1, 3, 4), "dst": i4(1, 2, 0, 2, 4)}, want: same},
		"row and col, weighted": {folder: members{"row": i8(0, 0, 1, 3, 4), "col": i8(1, 2, 0, 2, 4),
			"edge_weight": f8(1, 2, 3, 4, 5)}, want: same, note: "edge_weight.npy; models take no edge weights"},
		"indptr, not said": {folder: members{"indptr": i8(0, 2, 3, 3, 4, 5), "indices": i8(1, 2, 0, 2, 4)},
			want: turned, note: "are read as lists of in-neighbours (CSC); option lists out reads"},
		"indptr, out": {folder: members{"indptr": i8(0, 2, 3, 3, 4, 5), "indices": i8(1, 2, 0, 2, 4)},
			lists: "out", want: same},
		"bsr":               {matrix: csr.with(members{"format": {"|S3", "()", "bsr"}}), err: "a sparse matrix in format bsr; csr, csc and coo are read: save A.tocsr()"},
		"dia":               {matrix: csr.with(members{"format": {"|S3", "()", "dia"}}), err: "in format dia"},
		"not square":        {matrix: coo.with(members{"shape": i8(5, 6)}), err: "a matrix of 5 × 6, a bipartite graph"},
		"one dimension":     {matrix: coo.with(members{"shape": i8(5)}), err: "a graph is a matrix of two dimensions"},
		"other nodes":       {matrix: coo.with(members{"shape": i8(6, 6)}), err: "one row per node is needed in both"},
		"no shape":          {matrix: csr.with(members{"shape": {}}), err: "has no edges"},
		"format of numbers": {matrix: csr.with(members{"format": i8(1)}), err: "is not text"},
		"coo, in":           {matrix: coo, lists: "in", err: "option lists in: "},
		"values short":      {matrix: csr.with(members{"data": f8(1, 1)}), err: "data has 2 entries, the matrix has 5"},
		"offsets short":     {matrix: csr.with(members{"indptr": i4(0, 2, 3, 3, 4)}), err: "the 5 nodes need (6,)"},
		"row and col apart": {matrix: coo.with(members{"col": i4(1, 2)}), err: "an edge is one of each"},
		"float ids":         {matrix: coo.with(members{"col": f8(1, 2, 0, 2, 4)}), err: "col: holds <f8, integers are needed"},
		"entry outside":     {matrix: coo.with(members{"col": i4(1, 2, 0, 2, 5)}), err: "node id 5 at position 4"},
		"two edges":         {folder: members{"edge_index": {"<i8", "(2, 2)", []int64{0, 1, 2, 3}}}, err: "shape (2, 2) can be two sources and two destinations, or two pairs"},
		"bool ids":          {folder: members{"edge_index": {"|b1", "(2, 2)", []bool{true, false, true, true}}}, err: "holds |b1, integers are needed"},
		"2^63": {folder: members{"edge_index": {"<u8", "(2, 3)", []uint64{0, 1, 2, 0, 1<<63 + 7, 1}}},
			err: "element 4 is 9223372036854775815, which is above 2^63"},
		"edges and lists": {folder: members{"edge_index": {"<i8", "(2, 5)", ei}}, lists: "in",
			err: "has pairs of nodes and no lists"},
		"records": {folder: members{"edge_index": {"<V9", "(5,)", make([]byte, 45)}}, err: "raw bytes"},
		"mask too short": {folder: members{"edge_index": {"<i8", "(2, 5)", ei},
			"train_mask": b1(true, true)}, err: "train_mask.npy is a mask of 2 nodes, there are 5"},
		"mask of integers too short": {folder: members{"edge_index": {"<i8", "(2, 5)", ei},
			"train_mask": i8(0, 1, 1, 0)}, err: "train_mask.npy is a mask of 4 nodes, there are 5"},
		"ids from 1": {folder: members{"edge_index": {"<i8", "(2, 3)", []int64{1, 2, 3, 4, 5, 1}}},
			err: "node id 5 at position 4 is outside 0..4; ids count from 0: take 1 off"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.folder != nil {
				c.check(t, nodeData.with(c.folder).folder(t), "")
				return
			}
			if c.all {
				c.check(t, tree{"m.npz": nodeData.with(c.matrix).npz(t, zip.Store)}, "m.npz")
				return
			}
			beside := nodeData.folder(t)
			beside["adj.npz"] = c.matrix.npz(t, zip.Deflate)
			c.check(t, beside, "")
			if len(name) == 3 { // stored, too
				beside["adj.npz"] = c.matrix.npz(t, zip.Store)
				c.check(t, beside, "")
			}
		})
	}
}

func (c archiveCase) check(t *testing.T, f tree, file string) {
	root := t.TempDir()
	said := ""
	o := NPYOptions{Lists: c.lists, Options: Options{
		Input:  Input{In: filepath.Join(f.write(t, t.TempDir()), file)},
		Output: Output{Out: filepath.Join(root, "g"), Note: func(s errs.Text) { said += s.String() + "\n" }}}}
	err := NPY(bg, o)
	if c.err != "" {
		require.ErrorContains(t, err, c.err)
		datasettest.RequireUsage(t, err)
		datasettest.RequireEmpty(t, root)
		return
	}
	require.NoError(t, err)
	require.Equal(t, *c.want, viewOf(t, o.Out))
	said = strings.ReplaceAll(said, "one class has no node in train: 2\n", "")
	require.Contains(t, said, c.note)
	if c.note == "" {
		require.Empty(t, said)
	}
}

// Two matrices in a folder leave open which is the graph.
func TestTwoMatrices(t *testing.T) {
	f := nodeData.folder(t)
	f["a.npz"], f["b.npz"] = csr.npz(t, zip.Deflate), coo.npz(t, zip.Store)
	err := plain(NPY)(bg, Options{Input: Input{In: f.write(t, t.TempDir())},
		Output: Output{Out: filepath.Join(t.TempDir(), "g")}})
	require.ErrorContains(t, err, "are both a sparse matrix")
	datasettest.RequireUsage(t, err)
}

// Of what else lies in a folder, the files that are taken are not named, the others are, and what
// may be features or splits is not passed over.
func TestBesideTheMatrix(t *testing.T) {
	rest := nodeData.with(members{"train_mask": {}, "val_mask": {}, "test_mask": {}})
	lines := tree{"train.txt": "1\n4\n", "val.csv": "0\n", "test.txt": "2\n3\n"}
	oblong := coo.with(members{"shape": i8(5, 6)}).npz(t, zip.Deflate)
	for name, c := range map[string]struct {
		add  tree
		opt  func(dir string, o *Options)
		err  string
		note string
	}{
		"another matrix": {add: tree{"X.npz": oblong, "train.npy": string(i8(1, 4).bytes(t)),
			"val.npy": string(i8(0).bytes(t)), "test.npy": string(i8(2, 3).bytes(t))}, note: ": X.npz\n"},
		"features in an archive": {add: tree{"x.npy": "", "x.npz": oblong}, err: "x.npz is an archive"},
		"splits in an archive":   {add: tree{"train.npz": oblong}, err: "train.npz is an archive"},
		"splits as text":         {add: lines, err: "test.txt, train.txt, val.csv, which may be its splits"},
		"splits as text, named": {add: lines, opt: func(dir string, o *Options) {
			o.SplitDir = dir
		}},
		"splits below": {add: tree{"split/train.txt": "1\n4\n"}, err: "split/, which may be its splits"},
		"splits below, named": {add: tree{"split/train.txt": "1\n4\n", "split/valid.txt": "0\n",
			"split/test.txt": "2\n3\n", "old/train.txt": "1\n"}, opt: func(dir string, o *Options) {
			o.SplitDir = filepath.Join(dir, "split")
		}, note: ": old/\n"},
		"all are named": {add: tree{"x.npy": "", "y.npy": "", "a.npy": string(nodeData["x"].bytes(t)),
			"b.npy": string(nodeData["y"].bytes(t)), "p/train.txt": "1\n4\n", "p/val.txt": "0\n",
			"p/test.txt": "2\n3\n"}, opt: func(dir string, o *Options) {
			o.Features, o.Labels = filepath.Join(dir, "a.npy"), filepath.Join(dir, "b.npy")
			o.SplitDir = filepath.Join(dir, "p")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			f := rest.folder(t)
			f["adj.npz"] = csr.npz(t, zip.Deflate)
			for n, s := range c.add {
				if f[n] = s; s == "" {
					delete(f, n)
				}
			}
			root, said := t.TempDir(), ""
			o := Options{Input: Input{In: f.write(t, t.TempDir())}, Output: Output{
				Out: filepath.Join(root, "g"), Note: func(s errs.Text) { said += s.String() + "\n" }}}
			if c.opt != nil {
				c.opt(o.In, &o)
			}
			err := plain(NPY)(bg, o)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				datasettest.RequireUsage(t, err)
				datasettest.RequireEmpty(t, root)
				return
			}
			require.NoError(t, err)
			require.Equal(t, matrixView, viewOf(t, o.Out))
			require.Equal(t, c.note != "", strings.Contains(said, "not used of "), said)
			require.Contains(t, said, c.note)
		})
	}
}
