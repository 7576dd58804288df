package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

func sample() *File {
	return &File{
		Metadata: map[string]string{"a": "1", "z": "quote \" and 日本"},
		Tensors: []Tensor{
			{Name: "w", DType: "F32", Shape: []int64{2, 3},
				Data: bytes.Repeat([]byte{1, 2, 3, 4}, 6)},
			{Name: "empty", DType: "F32", Shape: []int64{0, 7}, Data: []byte{}},
			{Name: "step", DType: "I64", Shape: nil, Data: []byte{9, 0, 0, 0, 0, 0, 0, 0}},
		},
	}
}

func encode(t testing.TB, f *File) []byte {
	var b bytes.Buffer
	require.NoError(t, Write(&b, f))
	return b.Bytes()
}

func TestRoundTrip(t *testing.T) {
	f := sample()
	b := encode(t, f)
	require.Equal(t, b, encode(t, f), "equal contents give equal bytes")
	require.Zero(t, (8+binary.LittleEndian.Uint64(b))%8, "tensors are aligned")
	g, err := Decode(b)
	require.NoError(t, err)
	require.Equal(t, f.Metadata, g.Metadata)
	require.Len(t, g.Tensors, 3)
	for i, want := range f.Tensors {
		got := g.Tensors[i]
		require.Equal(t, want.Name, got.Name)
		require.Equal(t, want.DType, got.DType)
		require.Equal(t, len(want.Shape), len(got.Shape))
		require.Equal(t, want.Data, got.Data)
	}
	w, ok := g.Tensor("w")
	require.True(t, ok)
	require.Equal(t, []int64{2, 3}, w.Shape)
	_, ok = g.Tensor("nope")
	require.False(t, ok)
}

// The layout that the format's own documentation shows, not one that our writer made.
func TestForeignFile(t *testing.T) {
	hdr := `{"b":{"dtype":"F16","shape":[1,2],"data_offsets":[4,8]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}  `
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(hdr)))
	b = append(append(b, hdr...), 1, 2, 3, 4, 5, 6, 7, 8)
	f, err := Decode(b)
	require.NoError(t, err)
	require.Equal(t, "a", f.Tensors[0].Name)
	require.Equal(t, []byte{5, 6, 7, 8}, f.Tensors[1].Data)
}

func raw(hdr string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(hdr)))
	return append(append(b, hdr...), make([]byte, data)...)
}

func TestDecodeRefuses(t *testing.T) {
	good := encode(t, sample())
	flipped := bytes.Clone(good)
	flipped[len(flipped)-9] ^= 1
	huge := bytes.Clone(good)
	binary.LittleEndian.PutUint64(huge, math.MaxUint64)
	for name, c := range map[string]struct {
		b    []byte
		want string
	}{
		"short":           {[]byte{1, 2}, "too short"},
		"header too long": {huge, "does not fit"},
		"truncated data":  {good[:len(good)-1], "outside"},
		"trailing data":   {append(bytes.Clone(good), 0), "follow the last"},
		"flipped bit":     {flipped, "damaged"},
		"no object":       {raw(`[1]`, 0), "does not start"},
		"bad json":        {raw(`{"a":`, 0), "header"},
		"after brace":     {raw(`{}x`, 0), "follows"},
		"twice": {
			raw(
				`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`,
				2), "occurs twice"},
		"hole": {raw(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2),
			"starts at byte 1"},
		"overlap": {
			raw(
				`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`,
				2), "starts at byte 1"},
		"backwards": {raw(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}`, 2),
			"outside"},
		"dtype": {raw(`{"a":{"dtype":"Q9","shape":[1],"data_offsets":[0,1]}}`, 1),
			"do not make"},
		"negative": {raw(`{"a":{"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]}}`, 1),
			"do not make"},
		"overflow": {
			raw(`{"a":{"dtype":"F64","shape":[4611686018427387904,8],"data_offsets":[0,0]}}`, 0),
			"do not make"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Decode(c.b)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestWriteRefuses(t *testing.T) {
	for _, f := range []*File{
		{Tensors: []Tensor{{Name: "a", DType: "F32", Shape: []int64{2}, Data: make([]byte, 4)}}},
		{Tensors: []Tensor{{Name: "__metadata__", DType: "U8", Shape: []int64{0}}}},
		{Tensors: []Tensor{{Name: "a", DType: "U8", Shape: []int64{0}},
			{Name: "a", DType: "U8", Shape: []int64{0}}}},
	} {
		require.Error(t, Write(&bytes.Buffer{}, f))
	}
}

func TestSaveReplacesAtomically(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.safetensors")
	require.NoError(t, Save(path, sample()))
	// Leftovers of a killed Save harm neither a load nor the next Save.
	require.NoError(t, os.WriteFile(filepath.Join(dir, ".last.safetensors.partial"),
		[]byte("torn"), 0o644))
	_, err := Load(path)
	require.NoError(t, err)
	f := sample()
	f.Metadata["a"] = "2"
	require.NoError(t, Save(path, f))
	g, err := Load(path)
	require.NoError(t, err)
	require.Equal(t, "2", g.Metadata["a"])
	names, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, names, 1, "no temporary file stays")
	// A Save that fails leaves the old file.
	f.Tensors[0].DType = "Q1"
	require.ErrorContains(t, Save(path, f), "untouched")
	g, err = Load(path)
	require.NoError(t, err)
	require.Equal(t, "2", g.Metadata["a"])
}

func TestLoadErrors(t *testing.T) {
	_, err := Load(filepath.Join(t.TempDir(), "none"))
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	p := filepath.Join(t.TempDir(), "x")
	require.NoError(t, os.WriteFile(p, []byte(strings.Repeat("x", 100)), 0o644))
	_, err = Load(p)
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.ErrorContains(t, err, p)
}

// A file may claim any size: nothing is allocated for what is no checkpoint.
func TestSparseFileIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.NoError(t, os.Truncate(path, 1<<40))
	_, err := Load(path)
	require.ErrorContains(t, err, "its header would have 0 bytes")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	head := []byte{2, 0, 0, 0, 0, 0, 0, 0, '{', '}'}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteAt(head, 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	_, err = Load(path)
	require.ErrorContains(t, err, "free in memory")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
}

func TestLockDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	l, err := LockDir(dir)
	require.NoError(t, err)
	_, err = LockDir(dir)
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	require.NoError(t, l.Unlock())
	l, err = LockDir(dir)
	require.NoError(t, err)
	require.NoError(t, l.Unlock())
}

func FuzzDecode(f *testing.F) {
	f.Add(encode(f, sample()))
	f.Add(raw(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1))
	f.Add(raw(`{"a":{"dtype":"F64","shape":[4611686018427387904,8],"data_offsets":[0,0]}}`, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := Decode(b)
		if err != nil {
			return
		}
		// Whatever was accepted covers the data exactly, and survives a round trip.
		n := 0
		for _, x := range g.Tensors {
			n += len(x.Data)
		}
		if want := len(b) - 8 - int(binary.LittleEndian.Uint64(b)); n != want {
			t.Fatalf("%d bytes in tensors, %d in the file", n, want)
		}
		h, err := Decode(encode(t, g))
		if err != nil {
			t.Fatal(err)
		}
		if len(h.Tensors) != len(g.Tensors) {
			t.Fatal("tensors lost")
		}
	})
}

// Each bit of a file counts: the length, the header with the checksum itself, and the tensors.
func TestEveryFlippedBitIsFound(t *testing.T) {
	good := encode(t, sample())
	f, err := Decode(good)
	require.NoError(t, err)
	require.True(t, f.Sealed)
	for i := range good {
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			// A flip in the checksum's key makes a file without one, which is for the caller to
			// refuse.
			if f, err := Decode(bad); err == nil && f.Sealed {
				t.Fatalf("bit %d of byte %d of %d: not found", bit, i, len(good))
			}
		}
	}
	for n := range good {
		_, err := Decode(good[:n])
		require.Error(t, err, "%d of %d bytes", n, len(good))
	}
	for _, more := range [][]byte{{0}, make([]byte, 400), []byte("  "), good} {
		_, err := Decode(append(bytes.Clone(good), more...))
		require.Error(t, err, "%d bytes behind it", len(more))
	}
	// The checksum's digits may stand elsewhere too; a second key may not.
	twice := sample()
	twice.Metadata["x"] = `"` + sumKey + `":"00000000"`
	_, err = Decode(encode(t, twice))
	require.NoError(t, err, "escaped in a value it is another text")
}

// Another program's reader sees the length, JSON, names with ranges that cover the rest, and
// metadata of strings.
func TestOtherReadersTakeOurFiles(t *testing.T) {
	b := encode(t, sample())
	n := binary.LittleEndian.Uint64(b)
	var header map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(b[8:8+n], &header))
	var meta map[string]string
	require.NoError(t, json.Unmarshal(header["__metadata__"], &meta))
	require.Equal(t, "quote \" and 日本", meta["z"])
	require.Regexp(t, "^[0-9a-f]{8}$", meta[sumKey])
	delete(header, "__metadata__")
	require.Len(t, header, 3)
	var all int
	for name, raw := range header {
		var e struct {
			DType   string `json:"dtype"`
			Shape   []int  `json:"shape"`
			Offsets []int  `json:"data_offsets"`
		}
		require.NoError(t, json.Unmarshal(raw, &e), name)
		size := map[string]int{"F32": 4, "I64": 8}[e.DType]
		for _, d := range e.Shape {
			size *= d
		}
		require.Equal(t, size, e.Offsets[1]-e.Offsets[0], name)
		all += size
	}
	require.Equal(t, len(b), 8+int(n)+all)
}

// A file of an earlier version has a checksum over its tensors alone.
func TestEarlierVersionsAreRead(t *testing.T) {
	old := raw(
		`{"__metadata__":{"a":"1","helios.data_crc32c":"527d5351"},"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`,
		0)
	old = append(old, 1, 2, 3, 4)
	sum := fmt.Sprintf("%08x", crc32.Checksum([]byte{1, 2, 3, 4}, castagnoli))
	old = bytes.Replace(old, []byte("527d5351"), []byte(sum), 1)
	f, err := Decode(old)
	require.NoError(t, err)
	require.False(t, f.Sealed)
	require.Equal(t, map[string]string{"a": "1"}, f.Metadata)
	old[len(old)-1] ^= 1
	_, err = Decode(old)
	require.ErrorContains(t, err, "damaged")
}

func TestLockDirRemovesLeftovers(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{".checkpoint.safetensors.partial", ".best.safetensors.partial",
		"mine.partial"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("torn"), 0o644))
	}
	l, err := LockDir(dir)
	require.NoError(t, err)
	require.NoError(t, l.Unlock())
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 2)
	require.FileExists(t, filepath.Join(dir, "mine.partial"))
}
