package difftest_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/testing/conformance"
	"helios/internal/testing/difftest"
)

// Memory that grows is compared as far as it is there, and what is new is the same on both sides.
func TestGrowingMemory(t *testing.T) {
	d := difftest.Open(t, difftest.Options{})
	s, err := d.NewStream(cuda.StreamOptions{Name: "growing"})
	require.NoError(t, err)
	k, err := d.Kernel("conf_affine")
	require.NoError(t, err)
	g, err := cuda.Reserve(d, 8<<20, "slot")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, n := range []int64{1000, 40_000, 20_000, 60_000} {
		require.NoError(t, g.Grow(8*n))
		require.NoError(t, cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 3, Threads: 64},
			conformance.Affine(g.Ptr()+8, n-1, 3, uint64(n))))
		require.NoError(t, s.Synchronize(ctx))
	}
	require.Equal(t, 4, d.Launches()["conf_affine"])
	v, err := difftest.Download[uint64](ctx, d, s, g.Ptr(), 60_000)
	require.NoError(t, err)
	require.Equal(t, []uint64{0, (((1000*3)+40_000)*3+20_000)*3 + 60_000, 60_000},
		[]uint64{v[0], v[1], v[59_999]})
	free, total, err := d.FreeMemory()
	require.NoError(t, err)
	require.Less(t, free, total)
	require.NoError(t, s.Close())
	require.NoError(t, g.Free())
}
