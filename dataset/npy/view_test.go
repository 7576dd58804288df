package npy

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestView reads views from any element on: rows and columns apart, the same row again, and blocks
// that are cut in rows and in the middle of a long one.
func TestView(t *testing.T) {
	const n = 3 << 20
	path := filepath.Join(t.TempDir(), "a")
	b := make([]byte, 0, 8*n)
	for i := range n {
		b = binary.LittleEndian.AppendUint64(b, uint64(i))
	}
	require.NoError(t, os.WriteFile(path, b, 0o644))
	r := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct{ shape, strides []int64 }{
		{[]int64{1000, 7}, []int64{1, 1000}}, {[]int64{7, 1000}, []int64{1, 7}},
		{[]int64{1000, 7}, []int64{50, 3}}, {[]int64{1000, 7}, []int64{0, 1}},
		{[]int64{1000, 7}, []int64{1, 0}}, {[]int64{2, 3 << 19}, []int64{1, 2}},
		{[]int64{3 << 19, 2}, []int64{1, 3 << 19}}, {[]int64{5}, []int64{600000}},
		{[]int64{4, 4}, []int64{700000, 200000}},
	} {
		whole := Header{DType: Int64, Shape: c.shape}
		a, err := (&Array{Name: "a", Header: whole, file: path}).strided(c.strides)
		require.NoError(t, err)
		count := whole.Elements()
		for _, from := range []int64{0, r.Int64N(count), count - 1} {
			rd, err := a.Reader(from)
			require.NoError(t, err)
			buf := make([]int64, 1000)
			for pos := from; pos < count; {
				k, err := rd.Ints(buf)
				require.NoError(t, err, fmt.Sprint(c, from, pos))
				for i, x := range buf[:k] {
					k := pos + int64(i)
					want := k * c.strides[0]
					if len(c.shape) == 2 {
						want = k/c.shape[1]*c.strides[0] + k%c.shape[1]*c.strides[1]
					}
					if x != want {
						t.Fatalf("%v from %d: element %d is %d, want %d", c, from, pos+int64(i), x, want)
					}
				}
				pos += int64(k)
			}
			require.NoError(t, rd.Close())
		}
	}
}
