package cache

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/simd"
)

// Every level and number of workers widens rows to the bits that Decode gives.
func TestConvert(t *testing.T) {
	const rows, nodes, dim = 3000, 3500, 37
	r := rand.New(rand.NewPCG(7, 7))
	for _, rt := range rowtype.Types()[1:] {
		size := rt.RowBytes(dim)
		stored, want := make([]byte, rows*size), make([]float32, rows*dim)
		for i := range want {
			want[i] = float32(r.NormFloat64())
		}
		// Row v is of node order[v]: scales lie by node.
		order, table := r.Perm(nodes), make([]float32, nodes)
		for v := range rows {
			scale, err := rt.Encode(stored[v*size:(v+1)*size], want[v*dim:(v+1)*dim])
			require.NoError(t, err)
			rt.Decode(simd.Generic, want[v*dim:(v+1)*dim], stored[v*size:(v+1)*size], scale)
			table[order[v]] = scale
		}
		for _, l := range simd.Levels() {
			for _, workers := range []int{1, 3} {
				dev, err := cuda.NewHost(cuda.HostOptions{SMs: workers, Kernels: l})
				require.NoError(t, err)
				st, err := dev.NewStream(cuda.StreamOptions{Name: "rows"})
				require.NoError(t, err)
				src, err := dev.Alloc(cuda.MemDevice, int64(len(stored)), "stored rows")
				require.NoError(t, err)
				dst, err := dev.Alloc(cuda.MemDevice, rows*dim*4, "float32 rows")
				require.NoError(t, err)
				copy(src.Bytes(), stored)
				beside, err := dev.Alloc(cuda.MemDevice, 12*nodes, "nodes and scales")
				require.NoError(t, err)
				for v, node := range order {
					hostmem.View[int64](beside.Bytes())[v] = int64(node)
				}
				copy(hostmem.View[float32](beside.Bytes())[2*nodes:], table)
				s := Scales{Nodes: beside.Ptr(), Table: beside.Ptr() + 8*nodes, Rows: nodes}
				c, err := NewConverter(dev, rt, dim)
				require.NoError(t, err)
				require.NoError(t, c.Convert(st, dst.Ptr(), src.Ptr(), 0, s))
				require.NoError(t, c.Convert(st, dst.Ptr(), src.Ptr(), rows, s))
				require.NoError(t, st.Synchronize(context.Background()))
				require.Equal(t, want, hostmem.View[float32](dst.Bytes())[:rows*dim],
					"%s at %s", rt, l)
				require.Error(t, c.Convert(st, dst.Ptr()+1, src.Ptr(), 1, s))
				if rt.Scaled() {
					require.Error(t, c.Convert(st, dst.Ptr(), src.Ptr(), 1, Scales{}))
					s.Rows = 1 // fewer than the nodes: an error, not what lies behind
					require.NoError(t, c.Convert(st, dst.Ptr(), src.Ptr(), rows, s))
					require.ErrorContains(t, st.Synchronize(context.Background()),
						"there are scales of 1")
				}
				for _, f := range []func() error{src.Free, dst.Free, beside.Free, st.Close,
					dev.Close} {
					require.NoError(t, f())
				}
			}
		}
	}
	_, err := NewConverter(nil, rowtype.Float32, dim)
	require.Error(t, err)
}
