package importer

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
)

// torchOf is a tensor as torch.save describes it.
type torchOf struct {
	storage, key   string
	offset         int
	shape, strides []int
}

// pickled is a value as Python's pickle writes it in protocol 2. Dictionaries are lists of keys and
// values.
func pickled(b []byte, v any) []byte {
	switch x := v.(type) {
	case nil:
		b = append(b, 'N')
	case bool:
		b = append(b, map[bool]byte{false: 0x89, true: 0x88}[x])
	case int:
		if x > math.MaxInt32 {
			return binary.LittleEndian.AppendUint64(append(b, 0x8a, 8), uint64(x))
		}
		b = binary.LittleEndian.AppendUint32(append(b, 'J'), uint32(x))
	case string:
		b = append(binary.LittleEndian.AppendUint32(append(b, 'X'), uint32(len(x))), x...)
	case []int:
		b = append(b, '(')
		for _, n := range x {
			b = pickled(b, n)
		}
		b = append(b, 't')
	case []any:
		b = append(b, '}', '(')
		for _, y := range x {
			b = pickled(b, y)
		}
		b = append(b, 'u')
	case torchOf:
		b = append(b, "ctorch._utils\n_rebuild_tensor_v2\n(("...)
		b = append(pickled(b, "storage"), "ctorch\n"+x.storage+"\n"...)
		b = append(pickled(pickled(pickled(b, x.key), "cpu"), 1), 't', 'Q')
		b = pickled(pickled(pickled(b, x.offset), x.shape), x.strides)
		b = append(pickled(b, false), "ccollections\nOrderedDict\n)RtR"...)
	}
	return b
}

// torchZip is a file of torch.save.
func torchZip(t testing.TB, pkl []byte, method uint16, data map[string][]byte) []byte {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	put := func(name string, content []byte, method uint16) {
		w, err := z.CreateHeader(&zip.FileHeader{Name: "archive/" + name, Method: method})
		require.NoError(t, err)
		_, err = w.Write(content)
		require.NoError(t, err)
	}
	put("data.pkl", pkl, zip.Store)
	put("byteorder", []byte("little"), zip.Store)
	for name, content := range data {
		put("data/"+name, content, method)
	}
	require.NoError(t, z.Close())
	return b.Bytes()
}

// goodTorch is a graph: features of bfloat16, edges of which the array is a transposed view, labels
// that are a column, and masks.
func goodTorch() (v []any, data map[string][]byte) {
	data = map[string][]byte{}
	for i := range 30 { // a view of columns 1 and 2 of five rows of six
		data["0"] = binary.LittleEndian.AppendUint16(data["0"], uint16(math.Float32bits(float32(i))>>16))
	}
	for _, e := range [][2]uint64{{0, 1}, {1, 2}, {4, 0}} {
		data["1"] = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(data["1"], e[0]), e[1])
	}
	data["2"] = []byte{0, 9, 1, 9, 0, 9, 1, 9, 0}
	data["3"] = []byte{1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}
	mask := func(offset int) torchOf { return torchOf{"BoolStorage", "3", offset, []int{5}, []int{1}} }
	return []any{"x", torchOf{"BFloat16Storage", "0", 1, []int{5, 2}, []int{6, 1}},
		"edge_index", torchOf{"LongStorage", "1", 0, []int{2, 3}, []int{1, 2}},
		"y", torchOf{"ByteStorage", "2", 0, []int{5}, []int{2}},
		"train_mask", mask(0), "val_mask", mask(4), "test_mask", mask(8), "num_nodes", 5}, data
}

// importTorch imports a file of PyTorch.
func importTorch(t testing.TB, file []byte) (*dataset.Dataset, error) {
	in := filepath.Join(t.TempDir(), "g.pt")
	require.NoError(t, os.WriteFile(in, file, 0o644))
	out := filepath.Join(t.TempDir(), "g")
	if err := plain(NPY)(bg, Options{Input: Input{In: in}, Output: Output{Out: out}}); err != nil {
		left, err2 := os.ReadDir(filepath.Dir(out))
		require.NoError(t, err2)
		require.Empty(t, left)
		return nil, err
	}
	return dataset.Open(out)
}

func floatsOf(t *testing.T, a *npy.Array) (all []float32) {
	err := npy.Each(a, 0, func(_ int64, xs []float32) error {
		all = append(all, xs...)
		return nil
	})
	require.NoError(t, err)
	return all
}

// TestTorch: views, types and orders of PyTorch come in as the tensors that they stand for.
// PyTorch's own files are in python/tests/test_torch.py.
func TestTorch(t *testing.T) {
	v, data := goodTorch()
	d, err := importTorch(t, torchZip(t, append(pickled([]byte{0x80, 2}, v), '.'), zip.Store, data))
	require.NoError(t, err)
	rows, err := npy.Open(d.Path(dataset.FeaturesName))
	require.NoError(t, err)
	require.Equal(t, npy.Float32, rows.Header.DType)
	got := floatsOf(t, rows)
	require.Equal(t, []float32{1, 2, 7, 8, 13, 14, 19, 20, 25, 26}, got)
	require.EqualValues(t, 3, d.Meta.Edges)
	require.Equal(t, 2, d.Meta.Classes)
	train, err := d.Split("train")
	require.NoError(t, err)
	require.Equal(t, []int64{0, 1, 2}, train)
	require.NoError(t, d.Close())
	one := filepath.Join(t.TempDir(), "y.pt")
	require.NoError(t, os.WriteFile(one, torchZip(t, append(pickled([]byte{0x80, 2}, v[5]), '.'),
		zip.Deflate, map[string][]byte{"2": {7, 7, 8, 7, 9, 7, 7, 7, 7}}), 0o644))
	_, err = openArray(one)
	require.ErrorContains(t, err, "is compressed")
	require.NoError(t, os.WriteFile(one, torchZip(t, append(pickled([]byte{0x80, 2},
		torchOf{"IntStorage", "2", 1, []int{2}, []int{1}}), '.'), zip.Deflate,
		map[string][]byte{"2": {9, 9, 9, 9, 7, 0, 0, 0, 8, 0, 0, 0}}), 0o644))
	y, err := openArray(one)
	require.NoError(t, err)
	var ids []int64
	require.NoError(t, eachInt(y, func(_, x int64) error { ids = append(ids, x); return nil }))
	require.Equal(t, []int64{7, 8}, ids)
}

// TestTorchRefuses: nothing of a file is run, and what does not lie in its storage is refused.
func TestTorchRefuses(t *testing.T) {
	whole, data := goodTorch()
	change := func(key string, x any) []byte {
		v := append([]any{}, whole...)
		for i := range v {
			if v[i] == any(key) {
				v[i+1] = x
			}
		}
		return append(pickled([]byte{0x80, 2}, v), '.')
	}
	long := func(offset int, shape, strides []int) torchOf {
		return torchOf{"LongStorage", "1", offset, shape, strides}
	}
	for name, c := range map[string]struct {
		pkl []byte
		say string
	}{
		"code":       {[]byte("\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR."), `an object of "os system", and no code of a file is run`},
		"data":       {[]byte("\x80\x02ctorch_geometric.data.data\nData\n)\x81."), "helios.save(OUT, data)"},
		"past end":   {change("edge_index", long(0, []int{2, 4}, []int{1, 2})), "does not lie in its 6 elements"},
		"offset":     {change("edge_index", long(7, []int{2, 1}, []int{1, 1})), "does not lie in its 6 elements"},
		"before":     {change("edge_index", long(-1, []int{2, 1}, []int{1, 1})), "does not lie in its 6 elements"},
		"huge steps": {change("edge_index", long(0, []int{2, 2}, []int{math.MaxInt32, 1})), "does not lie in its 6 elements"},
		"negative":   {change("edge_index", long(0, []int{2, -2}, []int{1, 1})), "arguments that this reader does not expect"},
		"dimensions": {change("x", torchOf{"FloatStorage", "1", 0, []int{2, 2, 2}, []int{2, 1, 1}}), "save x.contiguous()"},
		"no storage": {change("y", torchOf{"LongStorage", "../1", 0, []int{5}, []int{1}}), "the archive lacks its data"},
		"complex":    {change("x", torchOf{"ComplexFloatStorage", "1", 0, []int{5, 1}, []int{1, 1}}), "ComplexFloatStorage"},
		"itself":     {[]byte("\x80\x02]q\x00h\x00a."), "more than"},
		"laughs": {append(append([]byte("\x80\x02]q\x000"),
			bytes.Repeat([]byte("](h\x00h\x00h\x00h\x00h\x00h\x00h\x00h\x00eq\x000"), 7)...), "h\x00."...), "more than"},
		"number": {[]byte("\x80\x02K\x05."), "holds no tensor but 5"},
		"cut":    {[]byte("\x80\x02}(X"), "truncated"},
	} {
		_, err := importTorch(t, torchZip(t, c.pkl, zip.Store, data))
		require.ErrorContains(t, err, c.say, name)
		require.Equal(t, errs.Usage, errs.ClassOf(err), name)
		require.Less(t, len(err.Error()), 1000, name)
	}
	// As torch.tensor([[0], [1]]).expand(2, 1 << 50) says it.
	_, err := importTorch(t, torchZip(t, change("edge_index",
		long(0, []int{2, 1 << 50}, []int{1, 0})), zip.Store, data))
	require.ErrorIs(t, err, unix.ENOSPC)
	good := append(pickled([]byte{0x80, 2}, whole), '.')
	_, err = importTorch(t, torchZip(t, good, zip.Deflate, data))
	require.ErrorContains(t, err, "is compressed, and its elements do not lie in their order")
	file := torchZip(t, good, zip.Store, data)
	_, err = importTorch(t, file[:len(file)-9])
	require.Error(t, err)
	flipped := bytes.Replace(file, data["3"], append([]byte{0}, data["3"][1:]...), 1)
	_, err = importTorch(t, flipped)
	require.ErrorContains(t, err, "checksum")
	several := filepath.Join(t.TempDir(), "x.pt")
	require.NoError(t, os.WriteFile(several, file, 0o644))
	_, err = openArray(several)
	require.ErrorContains(t, err, "holds 6 tensors")
}

// FuzzTorch: whatever the description says, its tensors lie in their storages, or it is refused.
func FuzzTorch(f *testing.F) {
	v, data := goodTorch()
	f.Add(append(pickled([]byte{0x80, 2}, v), '.'))
	f.Add([]byte("\x80\x02ctorch._utils\n_rebuild_parameter\n(NN)tR."))
	f.Add([]byte("\x80\x02ccollections\nOrderedDict\n)R}b."))
	f.Fuzz(func(t *testing.T, pkl []byte) {
		if len(pkl) > 1<<14 {
			return
		}
		path := filepath.Join(t.TempDir(), "g.pt")
		require.NoError(t, os.WriteFile(path, torchZip(t, pkl, zip.Store, data), 0o644))
		a, err := openTorch(path)
		if err != nil {
			require.Less(t, len(err.Error()), 1000)
			return
		}
		defer a.Close()
		for _, name := range a.Names() {
			x, err := a.Array(name)
			require.NoError(t, err)
			r, err := x.Reader(0)
			require.NoError(t, err, name)
			if n, err := r.Floats(make([]float64, 100)); x.Header.Elements() > 0 {
				require.NoError(t, err, name)
				require.Positive(t, n)
			}
			require.NoError(t, r.Close())
		}
	})
}

// Arrays in Fortran order, and of bfloat16 where the user says so, are read as what they stand for.
func TestOrdersAndTypes(t *testing.T) {
	dir := t.TempDir()
	arrays := datasettest.GoodArrays()
	x := arrays["features"]
	rows, cols := x.Shape[0], x.Shape[1]
	var want, turned []float32
	var brain []byte
	for i := range rows * cols {
		want = append(want, float32(i))
		turned = append(turned, float32(i%rows*cols+i/rows))
		brain = binary.LittleEndian.AppendUint16(brain, uint16(math.Float32bits(float32(i))>>16))
	}
	x.Data, x.DT, x.Fortran = turned, "<f4", true
	arrays["features"] = x
	for name, a := range arrays {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name+".npy"), a.Bytes(t), 0o644))
	}
	read := func(imp func(o *NPYOptions)) []float32 {
		out := filepath.Join(t.TempDir(), "g")
		err := with(NPY, imp)(bg, Options{Input: Input{In: dir}, Output: Output{Out: out}})
		require.NoError(t, err)
		a, err := npy.Open(filepath.Join(out, dataset.FeaturesName))
		require.NoError(t, err)
		return floatsOf(t, a)
	}
	require.Equal(t, want, read(func(*NPYOptions) {}))
	x.DT, x.Fortran = "|V2", false
	head := []byte("\x93NUMPY\x01\x00")
	dict := "{'descr': '<V2', 'fortran_order': False, 'shape': " + npy.Header{Shape: x.Shape}.ShapeString() + "}\n"
	head = append(binary.LittleEndian.AppendUint16(head, uint16(len(dict))), dict...)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "features.npy"), append(head, brain...), 0o644))
	var types ArrayTypes
	require.NoError(t, types.UnmarshalText([]byte("features=bfloat16")))
	require.Equal(t, want, read(func(o *NPYOptions) {
		o.Map, o.Types = ArrayMap{"features": "features.npy"}, types
	}))
	require.NoError(t, os.Remove(filepath.Join(dir, "features.npy")))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "x.bin"), brain, 0o644))
	require.Equal(t, want, read(func(o *NPYOptions) {
		o.Map, o.Types, o.Dim = ArrayMap{"features": "x.bin"}, types, int(cols)
	}))
}
