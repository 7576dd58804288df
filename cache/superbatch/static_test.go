package superbatch

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// A static cache finds what a map finds, loads what it lacks and changes nothing, whatever the
// number of workers.
func TestStatic(t *testing.T) {
	const nodes, gpu = 1000, 20
	rng := rand.New(rand.NewPCG(1, 2))
	rows := make([]int64, 0, 150)
	for _, v := range rng.Perm(nodes)[:150] {
		rows = append(rows, int64(v))
	}
	where := map[int64]int32{}
	for i, row := range rows {
		where[row] = int32(i)
	}
	s, err := NewStatic(rows, gpu, nodes)
	require.NoError(t, err)
	var all Memory
	for range 40 {
		var batch []int64
		for _, v := range rng.Perm(nodes)[:rng.IntN(300)] {
			batch = append(batch, int64(v))
		}
		all = append(all, batch)
	}
	for _, workers := range []int{0, 1, 4} {
		x, err := s.Inspect(context.Background(), all, nil, workers)
		require.NoError(t, err)
		var want Stats
		for b, batch := range all {
			for i, row := range batch {
				slot, ok := where[row]
				if !ok {
					slot = Miss
				} else {
					want.Hits++
					if slot < gpu {
						want.HitsGPU++
					}
				}
				require.Equal(t, slot, x.Slots(b)[i])
				want.Accesses++
			}
			require.Empty(t, x.Moves(b))
			require.Empty(t, x.Demotions(b))
		}
		want.HitsCPU, want.Loaded, want.Bytes = want.Hits-want.HitsGPU, 150, x.Stats.Bytes
		require.Equal(t, want, x.Stats)
		require.Equal(t, rows, x.First)
		for i, m := range x.Fill {
			require.Equal(t, Move{int32(i), int32(i)}, m)
		}
		y, err := s.Inspect(context.Background(), all, &x.After, workers)
		require.NoError(t, err)
		require.Empty(t, y.Fill)
		y, err = s.Inspect(context.Background(), all, x.After.Without(gpu), workers)
		require.NoError(t, err)
		require.Equal(t, rows[gpu:], y.First)
		require.Equal(t, Move{0, gpu}, y.Fill[0])
	}
	stopped, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = s.Inspect(stopped, all, nil, 2)
	require.ErrorIs(t, err, context.Canceled)
	_, err = NewStatic(append(slices.Clone(rows), rows[3]), gpu, nodes)
	require.ErrorContains(t, err, "stands twice")
	_, err = NewStatic([]int64{nodes}, 0, nodes)
	require.Error(t, err)
	none, err := NewStatic(nil, 0, nodes)
	require.NoError(t, err)
	x, err := none.Inspect(context.Background(), all, nil, 1)
	require.NoError(t, err)
	require.Zero(t, x.Stats.Hits)
}
