package difftest_test

import (
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cuda"
	"helios/internal/rowtype"
	"helios/internal/testing/difftest"
	"helios/internal/testing/wide"
)

// Rows of every type, of every length around a word and a warp, and of every bit pattern (int8's
// scales are numbers) become the same float32 in both kernels; also at destinations that allow no
// wide store.
func TestConvertEveryType(t *testing.T) {
	dev := difftest.Open(t, difftest.Options{Seed: 9, SMs: 2, Grain: 400, RandomThreads: true})
	ctx := within(t)
	st, err := dev.NewStream(cuda.StreamOptions{Name: "rows"})
	require.NoError(t, err)
	r := rand.New(rand.NewPCG(1, 9))
	dims := []int{1, 2, 3, 4, 5, 8, 31, 33, 64, 100, 129}
	if wide.Lean() {
		dims = []int{1, 4, 33, 129}
	}
	for _, rt := range rowtype.Types()[1:] {
		for _, dim := range dims {
			const rows, nodes = 75, 60
			size := rt.RowBytes(dim)
			mem := make([]byte, rows*size)
			for i := range mem {
				mem[i] = byte(r.Uint32())
			}
			// Behind the rows, the nodes that they are of, and those nodes' scales.
			from := (len(mem) + 7) &^ 7
			mem = append(mem, make([]byte, from-len(mem))...)
			for range rows {
				mem = binary.LittleEndian.AppendUint64(mem, r.Uint64N(nodes))
			}
			for range nodes {
				mem = binary.LittleEndian.AppendUint32(mem,
					math.Float32bits(float32(r.NormFloat64())))
			}
			src, err := dev.Alloc(cuda.MemDevice, int64(len(mem)), "stored rows")
			require.NoError(t, err)
			require.NoError(t, difftest.Upload(ctx, dev, st, src.Ptr(), mem))
			s := cache.Scales{Nodes: src.Ptr() + cuda.DevicePtr(from), Rows: nodes}
			s.Table = s.Nodes + 8*rows
			c, err := cache.NewConverter(dev, rt, dim)
			require.NoError(t, err)
			for _, at := range []cuda.DevicePtr{0, 4, 8} {
				dst, err := dev.Alloc(cuda.MemDevice, rows*int64(dim)*4+8, "float32 rows")
				require.NoError(t, err)
				if err := errors.Join(c.Convert(st, dst.Ptr()+at, src.Ptr(), rows, s),
					st.Synchronize(ctx)); err != nil {
					t.Fatalf("%d values of %s at %d: %v", dim, rt, at, err)
				}
				require.NoError(t, dst.Free())
			}
			require.NoError(t, src.Free())
		}
	}
	if n := dev.Launches()["convert_rows"]; n != 3*3*len(dims) {
		t.Errorf("%d launches of convert_rows were compared", n)
	}
	require.NoError(t, st.Close())
}
