package npy

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

func header(version byte, dict string) []byte {
	b := append([]byte(magic), version, 0)
	if version == 1 {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(dict)))
	} else {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(dict)))
	}
	return append(b, dict...)
}

func TestReadHeader(t *testing.T) {
	const ok = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"
	for name, c := range map[string]struct {
		raw  []byte
		want string // of the error; "" = fine
	}{
		"version 1": {header(1, ok), ""},
		"version 2": {header(2, ok+"   \n"), ""},
		"version 3": {header(3, ok), ""},
		"other order": {header(1,
			`{"shape": (3,4), "descr": "<f4", "fortran_order": False}`), ""},
		"python 2 longs": {header(1,
			"{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 4L)}"), ""},
		"empty file":        {nil, "magic"},
		"raw numbers":       {make([]byte, 64), "magic"},
		"version 9":         {header(9, ok), "version 9"},
		"cut in length":     {header(1, ok)[:9], "truncated"},
		"cut in dictionary": {header(1, ok)[:30], "truncated"},
		"huge header": {binary.LittleEndian.AppendUint32(append([]byte(magic), 2, 0),
			1<<31), "at most"},
		"no shape": {header(1, "{'descr': '<f4', 'fortran_order': False}"),
			"dictionary"},
		"shape twice": {header(1,
			"{'shape': (1,), 'shape': (1,), 'descr': '<f4', 'fortran_order': False}"),
			"dictionary"},
		"unknown key": {header(1,
			"{'descr': '<f4', 'fortran_order': False, 'shape': (), 'x': 1}"), "dictionary"},
		"text after": {header(1, ok+" x"), "dictionary"},
		"negative size": {header(1,
			"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"), "shape"},
		"sizes that overflow": {header(1,
			"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}"),
			"too large"},
		"overflow times width": {header(1,
			"{'descr': '<f8', 'fortran_order': False, 'shape': (2305843009213693952,)}"),
			"too large"},
		"complex numbers": {header(1,
			"{'descr': '<c8', 'fortran_order': False, 'shape': (1,)}"), "complex"},
		"bfloat16": {header(1,
			"{'descr': '<V2', 'fortran_order': False, 'shape': (1,)}"), "bfloat16"},
		"text": {header(1,
			"{'descr': '<U7', 'fortran_order': False, 'shape': (1,)}"), "it is text"},
		"long double": {header(1,
			"{'descr': '<f16', 'fortran_order': False, 'shape': (1,)}"), "another width"},
		"dates": {header(1,
			"{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (1,)}"), "it is dates"},
		"objects": {header(1,
			"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"), "Python objects"},
		"records": {header(1,
			"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}"), "records"},
		"three byte integers": {header(1,
			"{'descr': '<i3', 'fortran_order': False, 'shape': (1,)}"), "i3"},
		"order not a bool": {header(1, "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}"),
			"dictionary"},
		"65 dimensions": {header(1, "{'descr': '<f4', 'fortran_order': False, 'shape': ("+
			strings.Repeat("1,", 65)+")}"), "shape"},
	} {
		t.Run(name, func(t *testing.T) {
			h, n, err := ReadHeader(bytes.NewReader(c.raw))
			if c.want != "" {
				require.ErrorContains(t, err, c.want)
				return
			}
			require.NoError(t, err)
			require.Equal(t, Header{Float32, false, []int64{3, 4}}, h)
			require.EqualValues(t, len(c.raw), n)
		})
	}
}

func TestHeaderRoundTrip(t *testing.T) {
	for _, h := range []Header{
		{Float32, false, []int64{0}},
		{Uint32, false, []int64{math.MaxInt64 / 4}},
		{Int64, true, []int64{1 << 40, 128}},
		{DType{Kind: 'u', Size: 1}, false, []int64{7}},
		{DType{Kind: 'f', Size: 8, Big: true}, false, []int64{7}},
	} {
		b, err := EncodeHeader(h)
		require.NoError(t, err)
		require.Len(t, b, headerBytes)
		got, n, err := ReadHeader(bytes.NewReader(b))
		require.NoError(t, err)
		require.Equal(t, h, got)
		require.EqualValues(t, headerBytes, n)
	}
	_, err := EncodeHeader(Header{Float32, false, make([]int64, 60)})
	require.Error(t, err)
}

// asNumPy is a file as numpy.save of NumPy 2 writes it, version 1.0.
func asNumPy(t *testing.T, descr, shape string, values any) []byte {
	dict := "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }"
	b := bytes.NewBufferString("\x93NUMPY\x01\x00v\x00" + dict + strings.Repeat(" ", 117-len(dict)) +
		"\n")
	require.NoError(t, binary.Write(b, binary.LittleEndian, values))
	return b.Bytes()
}

// We write what NumPy writes, and read it.
func TestAsNumPyWrites(t *testing.T) {
	head, err := EncodeHeader(Header{Float32, false, []int64{2, 3}})
	require.NoError(t, err)
	require.Equal(t, string(asNumPy(t, "<f4", "(2, 3)", []float32(nil))), string(head))

	path := filepath.Join(t.TempDir(), "a.npy")
	require.NoError(t, os.WriteFile(path, asNumPy(t, "<i8", "(3,)", []int64{5, -6, 7}), 0o644))
	a, err := Open(path)
	require.NoError(t, err)
	rr, err := a.Reader(1)
	require.NoError(t, err)
	ints := make([]int64, 10)
	n, err := rr.Ints(ints)
	require.NoError(t, err)
	require.Equal(t, []int64{-6, 7}, ints[:n])
	_, err = rr.Ints(ints)
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, rr.Close())
}

func write(t *testing.T, dir, name string, h Header, data any) string {
	t.Helper()
	path := filepath.Join(dir, name)
	head, err := EncodeHeader(h)
	require.NoError(t, err)
	buf := bytes.NewBuffer(head)
	if h.DType.Big {
		require.NoError(t, binary.Write(buf, binary.BigEndian, data))
	} else {
		require.NoError(t, binary.Write(buf, binary.LittleEndian, data))
	}
	require.NoError(t, os.WriteFile(path, buf.Bytes(), 0o644))
	return path
}

func TestEveryType(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		dt   string
		data any
		want []float64
	}{
		{"|i1", []int8{-1, 127}, []float64{-1, 127}},
		{"|u1", []uint8{255, 0}, []float64{255, 0}},
		{"|b1", []bool{true, false}, []float64{1, 0}},
		{"<i2", []int16{-2, 300}, []float64{-2, 300}},
		{">u2", []uint16{65535, 1}, []float64{65535, 1}},
		{"<i4", []int32{math.MinInt32, 9}, []float64{math.MinInt32, 9}},
		{">i4", []int32{-5, 1 << 20}, []float64{-5, 1 << 20}},
		{"<u4", []uint32{math.MaxUint32, 0}, []float64{math.MaxUint32, 0}},
		{">i8", []int64{-1 << 40, 3}, []float64{-1 << 40, 3}},
		{"<u8", []uint64{1 << 40, math.MaxUint64}, []float64{1 << 40, math.MaxUint64}},
		{"<f2", []uint16{0x3c00, 0xc100}, []float64{1, -2.5}},
		{">f4", []float32{1.5, -3}, []float64{1.5, -3}},
		{"<f8", []float64{0.1, math.Inf(1)}, []float64{0.1, math.Inf(1)}},
	} {
		t.Run(c.dt, func(t *testing.T) {
			dt, err := ParseDType(c.dt)
			require.NoError(t, err)
			require.Equal(t, c.dt, dt.String())
			a, err := Open(write(t, dir, "a.npy", Header{dt, false, []int64{2}}, c.data))
			require.NoError(t, err)
			r, err := a.Reader(0)
			require.NoError(t, err)
			defer r.Close()
			got := make([]float64, 2)
			n, err := r.Floats(got)
			require.NoError(t, err)
			require.Equal(t, 2, n)
			require.Equal(t, c.want, got)

			r32, err := a.Reader(1)
			require.NoError(t, err)
			defer r32.Close()
			f32 := make([]float32, 4)
			n, err = r32.Float32s(f32)
			require.NoError(t, err)
			require.Equal(t, []float32{float32(c.want[1])}, f32[:n])

			ri, err := a.Reader(0)
			require.NoError(t, err)
			defer ri.Close()
			ints := make([]int64, 2)
			switch _, err = ri.Ints(ints); {
			case dt.Kind == 'f':
				require.ErrorContains(t, err, "integers are needed; save x.astype(numpy.int64)")
			case c.want[1] == math.MaxUint64:
				require.ErrorContains(t, err, "element 1 is 18446744073709551615, which is above")
			default:
				require.NoError(t, err)
				require.EqualValues(t, c.want[0], ints[0])
			}
		})
	}
}

// Every half against its definition: (-1)^s 2^(e-15) (1+f/1024), and the subnormals.
func TestHalf(t *testing.T) {
	for i := range 1 << 16 {
		h := uint16(i)
		s, e, f := 1.0, int(h>>10&31), float64(h&1023)
		if h>>15 == 1 {
			s = -1
		}
		got := float64(Half(h))
		switch {
		case e == 31 && f != 0:
			require.True(t, math.IsNaN(got), "%04x", h)
		case e == 31:
			require.Equal(t, s*math.Inf(1), got, "%04x", h)
		case e == 0:
			require.Equal(t, s*f*math.Pow(2, -24), got, "%04x", h)
		default:
			require.Equal(t, s*math.Pow(2, float64(e-15))*(1+f/1024), got, "%04x", h)
		}
	}
}

func TestTruncated(t *testing.T) {
	dir := t.TempDir()
	path := write(t, dir, "a.npy", Header{Int32, false, []int64{100}}, make([]int32, 99))
	_, err := Open(path)
	require.ErrorContains(t, err,
		path+": truncated: shape (100,) of <i4 needs 528 bytes, the file has 524")
	require.Equal(t, errs.Usage, errs.ClassOf(err))

	// Cut after it was opened: the stream must say so, not end early.
	path = write(t, dir, "b.npy", Header{Int32, false, []int64{100}}, make([]int32, 100))
	a, err := Open(path)
	require.NoError(t, err)
	require.NoError(t, os.Truncate(path, 300))
	r, err := a.Reader(0)
	require.NoError(t, err)
	defer r.Close()
	_, err = r.Ints(make([]int64, 100))
	require.ErrorContains(t, err, "truncated near element")
	_, err = Open(filepath.Join(dir, "none.npy"))
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = a.Reader(101)
	require.ErrorContains(t, err, "outside")
}

func TestArchive(t *testing.T) {
	dir := t.TempDir()
	member := func(h Header, data any) []byte {
		b, err := os.ReadFile(write(t, dir, "m.npy", h, data))
		require.NoError(t, err)
		return b
	}
	long := make([]int64, 100_000)
	for i := range long {
		long[i] = int64(i)
	}
	path := filepath.Join(dir, "a.npz")
	f, err := os.Create(path)
	require.NoError(t, err)
	zw := zip.NewWriter(f)
	for name, m := range map[string]struct {
		method uint16
		data   []byte
	}{
		"edges.npy": {zip.Deflate, member(Header{Int64, false, []int64{2, 50_000}}, long)},
		"x.npy":     {zip.Store, member(Header{Float32, false, []int64{2}}, []float32{1, 2})},
		"short.npy": {zip.Store, member(Header{Float32, false, []int64{2}}, []float32{1})},
		"raw.npy":   {zip.Store, []byte("hello")},
		"note.txt":  {zip.Store, []byte("hello")},
		"bytes.npy": {zip.Store, append(header(1, "{'descr': '|S3', 'fortran_order': False, 'shape': (), }"),
			"csr"...)},
		"chars.npy": {zip.Store, append(header(1, "{'descr': '>U4', 'fortran_order': False, 'shape': (), }"),
			"\x00\x00\x00c\x00\x00\x00o\x00\x00\x00o\x00\x00\x00\x00"...)},
		"texts.npy": {zip.Store, append(header(1, "{'descr': '|S1', 'fortran_order': False, 'shape': (2,), }"),
			"ab"...)},
	} {
		w, err := zw.CreateHeader(&zip.FileHeader{Name: name, Method: m.method})
		require.NoError(t, err)
		_, err = w.Write(m.data)
		require.NoError(t, err)
	}
	require.NoError(t, zw.Close())
	require.NoError(t, f.Close())

	ar, err := OpenArchive(path)
	require.NoError(t, err)
	defer ar.Close()
	require.Equal(t, []string{"bytes", "chars", "edges", "raw", "short", "texts", "x"}, ar.Names())
	for name, want := range map[string]string{"bytes": "csr", "chars": "coo", "none": ""} {
		text, err := ar.Text(name)
		require.NoError(t, err)
		require.Equal(t, want, text)
	}
	_, err = ar.Text("texts")
	require.ErrorContains(t, err, "one text is needed, shape (2,) is there")
	_, err = ar.Text("x")
	require.ErrorContains(t, err, path+`:x: element type "<f4" is not text`)
	a, err := ar.Array("edges")
	require.NoError(t, err)
	require.Equal(t, []int64{2, 50_000}, a.Header.Shape)
	r, err := a.Reader(50_000) // the second row, beyond what was decompressed for the header
	require.NoError(t, err)
	defer r.Close()
	got := make([]int64, 50_000)
	n, err := r.Ints(got)
	require.NoError(t, err)
	require.Equal(t, long[50_000:], got[:n])

	_, err = ar.Array("short")
	require.ErrorContains(t, err, path+":short: truncated")
	_, err = ar.Array("raw")
	require.ErrorIs(t, err, ErrNotNPY)
	_, err = ar.Array("nothing")
	require.ErrorContains(t, err, "it holds bytes, chars, edges, raw, short, texts, x")
	require.NoError(t, os.WriteFile(path, []byte("PK no zip"), 0o644))
	_, err = OpenArchive(path)
	require.ErrorContains(t, err, "not a .npz archive")
}

func FuzzReadHeader(f *testing.F) {
	f.Add(header(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"))
	f.Add(header(2, "{'descr': '>i8', 'fortran_order': True, 'shape': (), }"))
	f.Add(header(3, "{'descr': '|b1', 'fortran_order': False, 'shape': (9223372036854775807,)}"))
	f.Add([]byte(magic + "\x01\x00\xff\xff{"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, n, err := ReadHeader(bytes.NewReader(b))
		if err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("bare %v: callers take it for the end of data", err)
			}
			return
		}
		if n > int64(len(b)) || h.Elements() < 0 || h.Bytes() < 0 {
			t.Fatalf("%+v from %q: %d of %d bytes", h, b, n, len(b))
		}
		if len(h.Shape) > 2 {
			return
		}
		again, err := EncodeHeader(h)
		require.NoError(t, err)
		h2, _, err := ReadHeader(bytes.NewReader(again))
		if err != nil || h2.ShapeString() != h.ShapeString() || h2.DType != h.DType ||
			h2.Fortran != h.Fortran {
			t.Fatalf("%+v came back as %+v, %v", h, h2, err)
		}
	})
}
