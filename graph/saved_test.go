package graph

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// A mini-batch that was kept comes back as it was, into buffers of another one, for every method.
func TestSaved(t *testing.T) {
	topo := randomGraph(t, 2000, 12, false, 9)
	for _, cfg := range []SamplerConfig{
		{Fanouts: []int{5, 3}, Seed: 3}, {Fanouts: []int{4, -1, 2}, Seed: 3, Degrees: true},
		{Fanouts: []int{300, 200}, Seed: 3, Method: Ladies},
	} {
		r := newRig(t, host, topo, 2, cfg, directNodes)
		view := func(b cuda.Buffer, n int64) ([]byte, error) { return b.Bytes()[:n], nil }
		other, err := r.s.NewMiniBatch()
		require.NoError(t, err)
		var stage Stage
		for index, seeds := range [][]int64{someSeeds(64, 2000, 1), someSeeds(9, 2000, 2),
			someSeeds(80, 2000, 3)} {
			mb := r.sample(t, 1, index, seeds)
			saved, n, err := mb.Save([]byte("before"), view)
			require.NoError(t, err)
			require.Equal(t, "before", string(saved[:6]))
			nodes := hostmem.View[int64](mb.Nodes.Bytes())[:n]
			require.NoError(t, r.s.Restore(r.ctx, r.stream, other, 1, index, nodes, saved[6:],
				&stage))
			require.Equal(t, r.plain(t, mb), r.plain(t, other))
			require.Equal(t, []int{1, index, len(seeds)},
				[]int{other.Epoch, other.Index, other.NumSeeds})
			for h := range mb.Blocks {
				a, b := &mb.Blocks[h], &other.Blocks[h]
				require.Equal(t, []int64{a.NumDst, a.NumSrc, a.NumEdges},
					[]int64{b.NumDst, b.NumSrc, b.NumEdges})
				require.Equal(t, a.Weights == nil, b.Weights == nil)
				if a.Weights != nil {
					require.Equal(t, a.Weights.Bytes()[:a.NumSrc*4], b.Weights.Bytes()[:a.NumSrc*4])
				}
			}
			// What is too short or of other sizes is refused, wherever it ends.
			for _, cut := range []int{0, 8, 30, len(saved) / 2, len(saved) - 7} {
				err := r.s.Restore(r.ctx, r.stream, other, 1, index, nodes, saved[6:6+cut], &stage)
				require.ErrorContains(t, err, "the kept samples")
				require.Equal(t, errs.Device, errs.ClassOf(err))
			}
			require.Error(t, r.s.Restore(r.ctx, r.stream, other, 1, index, nodes[1:], saved[6:],
				&stage))
		}
		require.NoError(t, stage.Close())
		require.NoError(t, other.Close())
	}
}
