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
	const rows, dim = 3000, 37
	r := rand.New(rand.NewPCG(7, 7))
	for _, rt := range rowtype.Types()[1:] {
		size := rt.RowBytes(dim)
		stored, want := make([]byte, rows*size), make([]float32, rows*dim)
		for i := range want {
			want[i] = float32(r.NormFloat64())
		}
		for v := range rows {
			require.NoError(t, rt.Encode(stored[v*size:(v+1)*size], want[v*dim:(v+1)*dim]))
			rt.Decode(simd.Generic, want[v*dim:(v+1)*dim], stored[v*size:(v+1)*size])
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
				c, err := NewConverter(dev, rt, dim)
				require.NoError(t, err)
				require.NoError(t, c.Convert(st, dst.Ptr(), src.Ptr(), 0))
				require.NoError(t, c.Convert(st, dst.Ptr(), src.Ptr(), rows))
				require.NoError(t, st.Synchronize(context.Background()))
				require.Equal(t, want, hostmem.View[float32](dst.Bytes())[:rows*dim],
					"%s at %s", rt, l)
				require.Error(t, c.Convert(st, dst.Ptr()+1, src.Ptr(), 1))
				for _, f := range []func() error{src.Free, dst.Free, st.Close, dev.Close} {
					require.NoError(t, f())
				}
			}
		}
	}
	_, err := NewConverter(nil, rowtype.Float32, dim)
	require.Error(t, err)
}
