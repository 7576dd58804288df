// Package datasettest is what tests of datasets share: arrays to import, damage, and what a dataset
// holds.
package datasettest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/dataset/seal"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
)

// Digest hashes every file of a directory.
func Digest(t testing.TB, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, name := range FilesIn(t, dir) {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		h := sha256.Sum256(b)
		out[name] = hex.EncodeToString(h[:8])
	}
	return out
}

// FilesIn are the names of all files in and under a directory.
func FilesIn(t testing.TB, dir string) (names []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			name, rerr := filepath.Rel(dir, path)
			names, err = append(names, name), rerr
		}
		return err
	}))
	return names
}

// Open opens a dataset until the test ends.
func Open(t testing.TB, dir string) *dataset.Dataset {
	t.Helper()
	d, err := dataset.Open(dir)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// RowsOf are the rows of a float32 dataset.
func RowsOf(t testing.TB, d *dataset.Dataset) []float32 {
	b := AllRows(t, d)
	return slices.Clone(unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), len(b)/4))
}

// CentroidAccuracy trains class means on the train split and tests the nearest on test.
func CentroidAccuracy(t testing.TB, d *dataset.Dataset, x []float32, dim int) float64 {
	t.Helper()
	labels, err := d.Labels()
	require.NoError(t, err)
	train, err := d.Split("train")
	require.NoError(t, err)
	test, err := d.Split("test")
	require.NoError(t, err)
	mean := make([]float64, d.Meta.Classes*dim)
	n := make([]float64, d.Meta.Classes)
	for _, v := range train {
		n[labels[v]]++
		for i, a := range x[int(v)*dim:][:dim] {
			mean[int(labels[v])*dim+i] += float64(a)
		}
	}
	right, tested := 0, 0
	for i := 0; i < len(test); i += 1 + len(test)/2500 { // a sample is enough
		v := test[i]
		tested++
		best, class := 0.0, -1
		for c := range n {
			dist := 0.0
			for i, a := range x[int(v)*dim:][:dim] {
				e := float64(a) - mean[c*dim+i]/max(n[c], 1)
				dist += e * e
			}
			if class < 0 || dist < best {
				best, class = dist, c
			}
		}
		if int32(class) == labels[v] {
			right++
		}
	}
	return float64(right) / float64(tested)
}

// Smooth is one step of mean aggregation, as a GraphSAGE layer without weights.
func Smooth(tp *graph.Topology, x []float32, dim int) []float32 {
	out := make([]float32, len(x))
	for v := range tp.NumNodes {
		row := out[int(v)*dim:][:dim]
		for i := range tp.InDegree(v) {
			u := int(tp.Neighbor(v, i))
			for j, a := range x[u*dim:][:dim] {
				row[j] += a
			}
		}
		if n := float32(tp.InDegree(v)); n > 0 {
			for j := range row {
				row[j] /= n
			}
		}
	}
	return out
}

// RequireEmpty fails where a folder has anything in it.
func RequireEmpty(t testing.TB, dir string) {
	t.Helper()
	e, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, e)
}

// RequireNoFDs fails when a descriptor of ours is still open on something in dir.
func RequireNoFDs(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			require.NotContains(t, to, dir)
		}
	}
}

// DiskDir is a temporary directory on a real disk, where O_DIRECT works.
var DiskDir = os.TempDir()

// AllRows are a dataset's rows, as they are stored.
func AllRows(t testing.TB, d *dataset.Dataset) []byte {
	t.Helper()
	b := make([]byte, d.Meta.Rows()*int64(d.Meta.RowBytes()))
	require.NoError(t, d.ReadRows(0, b))
	return b
}

// WideRows are a dataset's features as float32.
func WideRows(t testing.TB, d *dataset.Dataset) []float32 {
	t.Helper()
	b := make([]byte, d.Meta.Rows()*int64(d.Meta.Dim)*4)
	require.NoError(t, d.RowsAs(rowtype.Float32).Read(0, b))
	return hostmem.View[float32](b)
}

// Unseal makes a dataset one that an older version has written.
func Unseal(t testing.TB, dir string) {
	t.Helper()
	require.NoError(t, os.Remove(filepath.Join(dir, seal.Name)))
	path := filepath.Join(dir, dataset.MetaName)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(b), "sealed: true\n")
	require.NoError(t,
		os.WriteFile(path, []byte(strings.Replace(string(b), "sealed: true\n", "", 1)), 0o644))
}

// FlipBit changes one bit of a file.
func FlipBit(t testing.TB, path string, offset int64) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	b[offset] ^= 4
	require.NoError(t, os.WriteFile(path, b, 0o644))
}

// RequireUsage fails where an error is not of class usage.
func RequireUsage(t testing.TB, err error) {
	t.Helper()
	require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
}

// Arr is an array to write: its NumPy type, shape and content.
type Arr struct {
	DT      string
	Shape   []int64
	Data    any
	Fortran bool
}

// Bytes are the array as a .npy file.
func (a Arr) Bytes(t testing.TB) []byte {
	t.Helper()
	dt, err := npy.ParseDType(a.DT)
	require.NoError(t, err)
	b, err := npy.EncodeHeader(npy.Header{DType: dt, Shape: a.Shape, Fortran: a.Fortran})
	require.NoError(t, err)
	buf := bytes.NewBuffer(b)
	require.NoError(t, binary.Write(buf, binary.LittleEndian, a.Data))
	return buf.Bytes()
}

// GoodArrays returns the graph of most tests: 5 nodes, 6 edges, of which one is double and one a
// self loop.
//
//	0→1 0→2 3→2 3→2 4→4 1→0
func GoodArrays() map[string]Arr {
	return map[string]Arr{
		"edge_index": {DT: "<i8", Shape: []int64{2, 6}, Data: []int64{0, 0, 3, 3, 4, 1, 1, 2, 2,
			2, 4, 0}},
		"features": {DT: "<f4", Shape: []int64{5, 2}, Data: []float32{0, 1, 2, 3, 4, 5, 6,
			7, 8, 9}},
		"labels": {DT: "<i8", Shape: []int64{5}, Data: []int64{0, 1, 2, 1, 0}},
		"train":  {DT: "<i8", Shape: []int64{2}, Data: []int64{4, 1}},
		"val":    {DT: "<i4", Shape: []int64{1}, Data: []int32{0}},
		"test":   {DT: "<u8", Shape: []int64{2}, Data: []uint64{2, 3}},
	}
}

// WriteDir writes arrays to a folder, each as NAME.npy.
func WriteDir(t testing.TB, arrays map[string]Arr) string {
	t.Helper()
	dir := t.TempDir()
	for n, a := range arrays {
		require.NoError(t, os.WriteFile(filepath.Join(dir, n+".npy"), a.Bytes(t), 0o644))
	}
	return dir
}

// Main runs a package's tests with their temporary folders in memory, where there is one, which
// makes the many small fsyncs cheap, and returns the exit status. Tests of files as SSDs choose
// their own place (DiskDir).
func Main(m *testing.M) int {
	dir, err := os.MkdirTemp("/dev/shm", "helios-dataset-")
	if err != nil {
		return m.Run()
	}
	if err := os.Setenv("TMPDIR", dir); err != nil {
		panic(fmt.Sprintf("TMPDIR: %v", err))
	}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		panic(fmt.Sprintf("the tests' folder: %v", err))
	}
	return code
}

// WithUUID gives the dataset in dir another UUID, which it has no seal to hold against, and opens
// it.
func WithUUID(t testing.TB, dir string, id uuid.UUID) *dataset.Dataset {
	t.Helper()
	Unseal(t, dir)
	path := filepath.Join(dir, dataset.MetaName)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	text := regexp.MustCompile(`(?m)^uuid: .*$`).ReplaceAllString(string(b), "uuid: "+id.String())
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return Open(t, dir)
}
