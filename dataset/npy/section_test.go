package npy

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/wide"
)

func TestSection(t *testing.T) {
	path := filepath.Join(t.TempDir(), "raw")
	data := binary.LittleEndian.AppendUint64(make([]byte, 5), 0x0102030405060708)
	require.NoError(t, os.WriteFile(path, append(data, 9), 0o644))
	a, err := Section("block", path, 5, Header{Int32, false, []int64{2}}, false)
	require.NoError(t, err)
	require.True(t, a.Seekable())
	r, err := a.Reader(1)
	require.NoError(t, err)
	defer r.Close()
	got := make([]int64, 3)
	n, err := r.Ints(got)
	require.NoError(t, err)
	require.Equal(t, []int64{0x01020304}, got[:n])
	require.NoError(t, a.Check(context.Background()))

	for name, c := range map[string]struct {
		off   int64
		h     Header
		whole bool
		want  string
	}{
		"too long": {5, Header{Int64, false, []int64{2}}, false,
			"raw: shape (2,) of <i8 needs 16 bytes from offset 5 on, the file has 14"},
		"a byte is left": {5, Header{Int64, false, []int64{1}}, true,
			"needs 8 bytes from offset 5 on, the file has 14"},
		"begins too late": {15, Header{Int64, false, []int64{0}}, false, "from offset 15"},
		"before the file": {-1, Header{Int64, false, []int64{0}}, false, "from offset -1"},
		"overflow":        {0, Header{Int64, false, []int64{math.MaxInt64, 4}}, false, "too large"},
		"negative":        {0, Header{Int64, false, []int64{-1}}, false, "too large"},
	} {
		_, err := Section("", path, c.off, c.h, c.whole)
		require.ErrorContains(t, err, c.want, name)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	// A header whose length makes the sum with its own overflow.
	require.NoError(t,
		os.WriteFile(path,
			header(1, "{'descr': '|i1', 'fortran_order': False, 'shape': (9223372036854775807,)}"),
			0o644))
	_, err = Open(path)
	require.ErrorContains(t, err, "truncated")
	// A refusal of the file system is no fault of the content.
	_, err = (&Array{Name: "d", file: t.TempDir(), Header: Header{Int64, false,
		[]int64{1}}}).Reader(0)
	require.ErrorContains(t, err, "is a folder")
	r, err = (&Array{Name: "d", file: path, Header: Header{Int64, false, []int64{1}}}).Reader(0)
	require.NoError(t, err)
	require.NoError(t, r.Close()) // any error that is not the end of the file
	_, err = r.Ints(got)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
}

// archiveOf writes one member x.npy of int64s.
func archiveOf(t testing.TB, method uint16, values []int64) []byte {
	t.Helper()
	head, err := EncodeHeader(Header{Int64, false, []int64{int64(len(values))}})
	require.NoError(t, err)
	var b bytes.Buffer
	zw := zip.NewWriter(&b)
	w, err := zw.CreateHeader(&zip.FileHeader{Name: "x.npy", Method: method})
	require.NoError(t, err)
	_, err = w.Write(head)
	require.NoError(t, err)
	require.NoError(t, binary.Write(w, binary.LittleEndian, values))
	require.NoError(t, zw.Close())
	return b.Bytes()
}

func readAll(a *Array, from int64) ([]int64, error) {
	r, err := a.Reader(from)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var all []int64
	buf := make([]int64, 7)
	for {
		n, err := r.Ints(buf)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, buf[:n]...)
	}
}

// TestArchiveDamage flips a bit of each byte of a member's data in turn: no other values may come
// out.
func TestArchiveDamage(t *testing.T) {
	values := []int64{1, 2, 3, 1 << 40, 5, 6, 7, 8, 9, 10}
	path := filepath.Join(t.TempDir(), "a.npz")
	for _, method := range []uint16{zip.Store, zip.Deflate} {
		whole := archiveOf(t, method, values)
		require.NoError(t, os.WriteFile(path, whole, 0o644))
		ar, err := OpenArchive(path)
		require.NoError(t, err)
		a, err := ar.Array("x")
		require.NoError(t, err)
		require.Equal(t, method == zip.Store, a.Seekable())
		for _, from := range []int64{0, 4, 10} {
			got, err := readAll(a, from)
			require.NoError(t, err)
			require.Equal(t, values[from:], append([]int64{}, got...))
		}
		require.NoError(t, a.Check(context.Background()))
		off, err := a.member.DataOffset()
		require.NoError(t, err)
		size := int64(a.member.CompressedSize64)
		require.NoError(t, ar.Close())
		for offset := off; offset < off+size; offset++ {
			b := bytes.Clone(whole)
			b[offset] ^= 0x10
			require.NoError(t, os.WriteFile(path, b, 0o644))
			ar, err := OpenArchive(path)
			require.NoError(t, err)
			if a, err := ar.Array("x"); err == nil {
				var got []int64
				if got, err = readAll(a, 0); err == nil {
					// a bit between blocks, which means nothing
					require.Equal(t, zip.Deflate, method)
					require.Equal(t, values, got)
					require.NoError(t, ar.Close())
					continue
				}
				require.Equal(t, errs.Usage, errs.ClassOf(err), "byte %d of method %d: %v", offset,
					method, err)
				require.Contains(t, err.Error(), path+":x: ")
				err = a.Check(context.Background())
				require.Equal(t, errs.Usage, errs.ClassOf(err), "byte %d of method %d: %v", offset,
					method, err)
			}
			require.NoError(t, ar.Close())
		}
		for _, n := range []int{len(whole) - 1, len(whole) / 2, 3} {
			require.NoError(t, os.WriteFile(path, whole[:n], 0o644))
			_, err := OpenArchive(path)
			require.ErrorContains(t, err, "not a .npz archive, or truncated")
		}
	}
}

// holes writes zeros as a hole.
type holes struct {
	f    *os.File
	zero []byte
}

func (h *holes) Write(b []byte) (int, error) {
	if bytes.Equal(b, h.zero[:min(len(b), len(h.zero))]) {
		_, err := h.f.Seek(int64(len(b)), io.SeekCurrent)
		return len(b), err
	}
	return h.f.Write(b)
}

// TestArchive64: members of more than 4 GiB, as papers100M's have, and one behind them (zip64).
func TestArchive64(t *testing.T) {
	if wide.Lean() {
		t.Skip("writes an archive of 5 GiB, as a hole")
	}
	const n = 5 << 30 / 8
	path := filepath.Join(t.TempDir(), "big.npz")
	f, err := os.Create(path)
	require.NoError(t, err)
	zw := zip.NewWriter(&holes{f, make([]byte, 1<<20)})
	for name, count := range map[string]int64{"a.npy": n, "b.npy": 2} {
		head, err := EncodeHeader(Header{Int64, false, []int64{count}})
		require.NoError(t, err)
		size := uint64(len(head)) + uint64(count)*8
		w, err := zw.CreateRaw(&zip.FileHeader{Name: name, Method: zip.Store,
			CompressedSize64: size, UncompressedSize64: size})
		require.NoError(t, err)
		_, err = w.Write(head)
		require.NoError(t, err)
		zero := make([]byte, 1<<20)
		for left := count*8 - 8; left > 0; left -= min(left, 1<<20) {
			_, err := w.Write(zero[:min(left, 1<<20)])
			require.NoError(t, err)
		}
		_, err = w.Write(binary.LittleEndian.AppendUint64(nil, uint64(count)))
		require.NoError(t, err)
		require.NoError(t, zw.Flush())
	}
	require.NoError(t, zw.Close())
	require.NoError(t, f.Close())
	ar, err := OpenArchive(path)
	require.NoError(t, err)
	defer ar.Close()
	for name, count := range map[string]int64{"a": n, "b": 2} {
		a, err := ar.Array(name)
		require.NoError(t, err)
		got, err := readAll(a, count-2+1)
		require.NoError(t, err)
		require.Equal(t, []int64{count}, got)
	}
}

// FuzzArchive: whatever the archive, an error or the elements that its header promises.
func FuzzArchive(f *testing.F) {
	f.Add(archiveOf(f, zip.Store, []int64{1, 2, 3}))
	f.Add(archiveOf(f, zip.Deflate, []int64{1, 2, 3}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<16 {
			return
		}
		path := filepath.Join(t.TempDir(), "a.npz")
		require.NoError(t, os.WriteFile(path, b, 0o644))
		ar, err := OpenArchive(path)
		if err != nil {
			return
		}
		defer ar.Close()
		for _, name := range ar.Names() {
			a, err := ar.Array(name)
			if err != nil || a.Header.DType.Kind == 'f' || a.Header.Bytes() > 1<<24 {
				continue
			}
			n := a.Header.Elements()
			all, err := readAll(a, 0)
			if err == nil && int64(len(all)) != n {
				t.Fatalf("%s: %d of %d elements without an error", name, len(all), n)
			}
			if tail, err := readAll(a, n/2); err == nil && int64(len(tail)) != n-n/2 {
				t.Fatalf("%s: %d of %d elements without an error", name, len(tail), n-n/2)
			}
		}
	})
}
