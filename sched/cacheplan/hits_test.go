package cacheplan

import (
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cuda"
)

func TestHitsAtIsPlacement(t *testing.T) {
	scores := []uint32{5, math.MaxUint32, 0, 5, 7, 0, 1 << 22, 5}
	counts := []uint32{1, 10, 100, 1000, 10000, 100000, 1000000, 10000000}
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	h, err := cache.NewHotness(dev, int64(len(scores)))
	require.NoError(t, err)
	st, err := dev.NewStream(cuda.StreamOptions{Name: "test"})
	require.NoError(t, err)
	require.NoError(t, h.Set(t.Context(), st, scores))
	for n := range int64(9) {
		want := int64(0)
		p, err := h.Place(t.Context(), st, n, 0)
		require.NoError(t, err)
		for _, r := range p.GPU {
			want += int64(counts[r])
		}
		hits := hitsAt(scores, counts, []int64{n})
		require.Equal(t, want, hits[n])
		require.Equal(t, int64(11111111), hits[8])
	}
	require.NoError(t, errors.Join(h.Close(), st.Close(), dev.Close()))
	require.Empty(t, hitsAt(nil, nil, []int64{0})[0])
}
