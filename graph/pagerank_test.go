package graph

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/wide"
)

// naivePageRank is the formula in float64, edge by edge.
func naivePageRank(t *Topology, teleport []NodeID, d float64, iterations int) []float64 {
	start := make([]float64, t.NumNodes)
	if len(teleport) == 0 {
		for v := range start {
			start[v] = 1 / float64(t.NumNodes)
		}
	}
	for _, v := range teleport {
		start[v] += 1 / float64(len(teleport))
	}
	cur := append([]float64(nil), start...)
	for range iterations {
		next := make([]float64, t.NumNodes)
		for v := range t.NumNodes {
			for i := range t.InDegree(v) {
				next[t.Neighbor(v, i)] += cur[v] / float64(t.InDegree(v))
			}
		}
		for v := range next {
			cur[v] = (1-d)*start[v] + d*next[v]
		}
	}
	return cur
}

func TestReversePageRank(t *testing.T) {
	ctx := context.Background()
	r := rand.New(rand.NewPCG(3, 3))
	for _, wideIDs := range []bool{false, true} {
		if wide.Lean() && wideIDs {
			continue
		}
		topo := randomGraph(t, 10_000, 4, wideIDs, 9)
		train := make([]NodeID, 300)
		for i := range train {
			train[i] = r.Int64N(topo.NumNodes)
		}
		train[1] = train[0] // starts twice
		far := farOf(t, topo, OutOfCoreOptions{})
		for _, c := range []struct {
			o PageRankOptions
			d float64
			n int
		}{
			{PageRankOptions{}, 0.85, 20},
			{PageRankOptions{Teleport: train}, 0.85, 20},
			{PageRankOptions{Teleport: train, Damping: 0.5, Iterations: 3}, 0.5, 3},
		} {
			want := naivePageRank(topo, c.o.Teleport, c.d, c.n)
			c.o.Workers = 1
			one, err := ReversePageRank(ctx, topo, c.o)
			require.NoError(t, err)
			for v, w := range want {
				if d := math.Abs(w - float64(one[v])); d > 1e-12+w*1e-6 {
					t.Fatalf("node %d has %v, want %v", v, one[v], w)
				}
			}
			c.o.Workers = 5
			five, err := ReversePageRank(ctx, topo, c.o)
			require.NoError(t, err)
			require.Equal(t, one, five)
			got, err := ReversePageRank(ctx, far, c.o)
			require.NoError(t, err)
			require.Equal(t, one, got, "from storage")
		}
		out, err := OutDegrees(ctx, topo, 3)
		require.NoError(t, err)
		count := make([]uint32, topo.NumNodes)
		for v := range topo.NumNodes {
			for i := range topo.InDegree(v) {
				count[topo.Neighbor(v, i)]++
			}
		}
		require.Equal(t, count, out)
		out, err = OutDegrees(ctx, far, 2)
		require.NoError(t, err)
		require.Equal(t, count, out, "from storage")
	}
}

// A chain 0 → 1 → 2: the walk from 2 goes to 1 and 0 and ends there.
func TestReversePageRankChain(t *testing.T) {
	topo, err := FromEdges(3, []NodeID{0, 1}, []NodeID{1, 2}, false)
	require.NoError(t, err)
	defer func() { require.NoError(t, topo.Close()) }()
	s, err := ReversePageRank(context.Background(), topo, PageRankOptions{Teleport: []NodeID{2},
		Damping: 0.5})
	require.NoError(t, err)
	require.Equal(t, []float32{0.125, 0.25, 0.5}, s)
}

func TestReversePageRankRefuses(t *testing.T) {
	topo, err := FromEdges(3, []NodeID{0, 1}, []NodeID{1, 2}, false)
	require.NoError(t, err)
	defer func() { require.NoError(t, topo.Close()) }()
	for _, o := range []PageRankOptions{{Damping: 1}, {Damping: -1}, {Iterations: -1},
		{Teleport: []NodeID{3}}, {Teleport: []NodeID{-1}}} {
		_, err := ReversePageRank(context.Background(), topo, o)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%+v: %v", o, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = ReversePageRank(ctx, topo, PageRankOptions{})
	require.Equal(t, errs.Interrupted, errs.ClassOf(err))
	_, err = OutDegrees(ctx, topo, 0)
	require.Equal(t, errs.Interrupted, errs.ClassOf(err))
	empty, err := FromEdges(0, nil, nil, false)
	require.NoError(t, err)
	s, err := ReversePageRank(context.Background(), empty, PageRankOptions{})
	require.NoError(t, err)
	require.Empty(t, s)
	require.NoError(t, empty.Close())
}
