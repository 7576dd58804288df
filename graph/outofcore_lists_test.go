package graph

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// Lists that are let go and brought back leave the blocks as they are. While they are gone, their
// memory is the system's, and sampling reads all from the file.
func TestListsComeAndGo(t *testing.T) {
	topo := randomGraph(t, 3000, 40, false, 5)
	least := LeastNeighborCache(topo.NumNodes)
	far := farOf(t, topo, OutOfCoreOptions{CacheBytes: least + 2*topo.NumEdges})
	c := &far.far.cache
	full := c.held()
	require.Equal(t, c.bytes(), full)
	require.Greater(t, full, least)
	for _, cfg := range []SamplerConfig{
		{Fanouts: []int{10, 5}, Seed: 7, Degrees: true},
		{Fanouts: []int{10, 5}, Seed: 7, Method: Labor},
		{Fanouts: []int{50, 200}, Seed: 7, Method: Ladies},
	} {
		// Each attaches the topology by itself: no two may have the lists registered.
		t.Run(cfg.Method, func(t *testing.T) {
			want := newRig(t, host, topo, 2, cfg, directNodes)
			r := newRig(t, host, far, 2, cfg, directNodes)
			lists, index := r.s.topo, 0
			sample := func(cached bool) {
				t.Helper()
				seeds := someSeeds(100, topo.NumNodes, uint64(index+1))
				was := far.Storage()
				require.Equal(t, want.plain(t, want.sample(t, 1, index, seeds)),
					r.plain(t, r.sample(t, 1, index, seeds)))
				require.Equal(t, cached, far.Storage().Sub(was).CachedEdges > 0)
				index++
			}
			sample(true)
			n, err := lists.FillLists(r.ctx, nil) // they are there
			require.NoError(t, err)
			require.Zero(t, n)
			for range 2 {
				require.NoError(t, lists.ReleaseLists())
				require.NoError(t, lists.ReleaseLists())
				require.Equal(t, least, c.held())
				require.Zero(t, hostmem.Usage()[cachePurpose])
				sample(false)
				was := far.Storage()
				n, err := lists.FillLists(r.ctx, nil)
				require.NoError(t, err)
				require.GreaterOrEqual(t, n, c.ids*4)
				require.LessOrEqual(t, n, topo.NumEdges*4+2*filePage)
				got := far.Storage().Sub(was)
				require.Equal(t, n, got.Bytes)
				require.Positive(t, got.Wait)
				require.Equal(t, full, c.held())
				sample(true)
			}
			// In memory that is lent, they are as they are in their own.
			require.NoError(t, lists.ReleaseLists())
			b, err := r.dev.Alloc(cuda.MemPinned, lists.ListBytes()+128, "lent")
			require.NoError(t, err)
			_, err = lists.FillLists(r.ctx, b.Bytes()[64:])
			require.NoError(t, err)
			require.Equal(t, least, c.held())
			sample(true)
			require.NoError(t, lists.ReleaseLists())
			sample(false)
			require.NoError(t, b.Free())
			_, err = lists.FillLists(r.ctx, nil)
			require.NoError(t, err)
		})
	}
}

// Lists that cannot be read leave none behind, and the error has the cause.
func TestListsThatDoNotComeBack(t *testing.T) {
	topo := randomGraph(t, 3000, 40, false, 6)
	all := MostNeighborCache(topo.NumNodes, topo.NumEdges)
	far := farOf(t, topo, OutOfCoreOptions{CacheBytes: all})
	r := newRig(t, host, far, 2, SamplerConfig{Fanouts: []int{10}, Seed: 7}, directNodes)
	lists, c := r.s.topo, &far.far.cache
	require.NoError(t, lists.ReleaseLists())
	stopped, cancel := context.WithCancel(r.ctx)
	cancel()
	_, err := lists.FillLists(stopped, nil)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, LeastNeighborCache(topo.NumNodes), c.held())
	f, err := os.OpenFile(far.far.file.Path, os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte("other ids"), far.far.file.Offset+9*filePage)
	require.NoError(t, errors.Join(err, f.Close()))
	_, err = lists.FillLists(r.ctx, nil)
	require.ErrorIs(t, err, ErrTopologyChanged)
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.Equal(t, LeastNeighborCache(topo.NumNodes), c.held())
	require.Zero(t, hostmem.Usage()[cachePurpose])
}
