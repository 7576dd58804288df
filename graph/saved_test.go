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
			// Saved bytes that are cut anywhere are refused.
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

// FuzzRestore: whatever is kept, a mini-batch that comes back has blocks that kernels can read.
func FuzzRestore(f *testing.F) {
	topo := randomGraph(f, 500, 6, false, 9)
	r := newRig(f, host, topo, 1, SamplerConfig{Fanouts: []int{3, 2}, Seed: 3}, directNodes)
	view := func(b cuda.Buffer, n int64) ([]byte, error) { return b.Bytes()[:n], nil }
	for i := range 3 {
		mb := r.sample(f, 1, i, someSeeds(7, 500, uint64(i)+1))
		saved, n, err := mb.Save(nil, view)
		require.NoError(f, err)
		f.Add(hostmem.Bytes(hostmem.View[int64](mb.Nodes.Bytes())[:n]), saved)
	}
	f.Fuzz(func(t *testing.T, frontier, saved []byte) {
		nodes := make([]int64, len(frontier)/8)
		copy(hostmem.Bytes(nodes), frontier)
		var stage Stage
		defer func() { require.NoError(t, stage.Close()) }()
		err := r.s.Restore(r.ctx, r.stream, r.mb, 1, 0, nodes, saved, &stage)
		if err != nil {
			require.Equal(t, errs.Device, errs.ClassOf(err))
			return
		}
		for _, v := range nodes {
			require.True(t, v >= 0 && v < 500)
		}
		for _, b := range r.mb.Blocks {
			indptr := hostmem.View[int64](b.Indptr.Bytes())[:b.NumDst+1]
			require.Zero(t, indptr[0])
			for i := range b.NumDst {
				require.LessOrEqual(t, indptr[i], indptr[i+1])
			}
			require.Equal(t, b.NumEdges, indptr[b.NumDst])
			for _, v := range hostmem.View[uint32](b.Src.Bytes())[:b.NumEdges] {
				require.Less(t, int64(v), b.NumSrc)
			}
			require.LessOrEqual(t, b.NumSrc, int64(len(nodes)))
		}
	})
}
