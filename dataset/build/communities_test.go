package build

import (
	"math"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/graph"
	"helios/graph/partition"
	"helios/internal/testing/datasettest"
)

// TestCommunitiesAreWhatTheySay: the shares of edges, who the hubs are, and what each part of the
// graph shows of the classes.
func TestCommunitiesAreWhatTheySay(t *testing.T) {
	out := filepath.Join(t.TempDir(), "g")
	const nodes, dim, classes, groups = 20_000, 64, 8, 10
	o := GenerateOptions{Kind: "communities", Nodes: nodes, Dim: dim, Classes: classes,
		AvgDegree: 16, Seed: 3, Out: out, Communities: CommunityOptions{Count: groups}}
	require.NoError(t, Generate(bg, o))
	d := datasettest.Open(t, out)
	tp, err := d.Topology()
	require.NoError(t, err)
	require.NoError(t, tp.Validate())
	labels, err := d.Labels()
	require.NoError(t, err)
	require.NoError(t, o.fill())
	g := newGenerator(o)
	require.EqualValues(t, nodes/200, g.hubs())

	var hubs, same, other, home int
	popularity := make([]int, nodes)
	for v := range tp.NumNodes {
		class, of := g.placeOf(g.rank(v))
		require.EqualValues(t, class, labels[v])
		for i := range tp.InDegree(v) {
			u := tp.Neighbor(v, i)
			popularity[u]++
			if labels[u] == labels[v] {
				same++
			}
			switch _, from := g.placeOf(g.rank(u)); {
			case g.rank(u) < g.hubs():
				hubs++
			case from == of:
				home++
			default:
				other++
			}
		}
	}
	edges := float64(tp.NumEdges)
	require.InDelta(t, 16, edges/nodes, 0.3)
	require.InDelta(t, 0.1, float64(hubs)/edges, 0.01)
	require.InDelta(t, 0.8, float64(same)/edges, 0.02)
	require.InDelta(t, 0.05, float64(other)/float64(home+other), 0.01)
	byOut := make([]int64, nodes)
	for i := range byOut {
		byOut[i] = int64(i)
	}
	slices.SortFunc(byOut, func(a, b int64) int { return popularity[b] - popularity[a] })
	for _, v := range byOut[:g.hubs()] {
		require.Less(t, g.rank(v), g.hubs(), "the nodes of the highest out-degree are the hubs")
	}

	// A partitioner finds the groups: it cuts what mixes, and hubs' edges.
	p, err := partition.Make(bg, tp, partition.Options{Parts: groups, Method: "stream", Seed: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close()) }()
	part := func(v int64) uint32 { return p.Of[v] }
	cut := 0
	for v := range tp.NumNodes {
		for i := range tp.InDegree(v) {
			if part(v) != part(tp.Neighbor(v, i)) {
				cut++
			}
		}
	}
	planted := 0.1*0.9 + 0.9*0.05
	require.InDelta(t, planted, float64(cut)/edges, 0.06, "of %d parts at random: 0.9", groups)

	x := datasettest.RowsOf(t, d)
	accuracy := func(keep func(v, u int64) bool) float64 {
		one := datasettest.Smooth(restrict(t, tp, keep), x, dim)
		return datasettest.CentroidAccuracy(t, d, one, dim)
	}
	alone := datasettest.CentroidAccuracy(t, d, x, dim)
	whole := accuracy(func(_, _ int64) bool { return true })
	within := accuracy(func(v, u int64) bool { return part(v) == part(u) })
	withHubs := accuracy(func(v, u int64) bool {
		return part(v) == part(u) || g.rank(u) < g.hubs()
	})
	t.Logf("nearest class mean: own features %.3f; one hop: whole %.3f, within parts %.3f, with hubs %.3f",
		alone, whole, within, withHubs)
	require.InDelta(t, 1.0/classes, alone, 0.08)
	require.Greater(t, whole, within+0.2)
	require.InDelta(t, whole, withHubs, 0.03)
}

// TestHubPeers: where hubs know hubs, parts that have the hubs beside them lack no edge of theirs,
// and of the others only what mixes; without the hubs they lack nearly all edges that say
// something.
func TestHubPeers(t *testing.T) {
	const nodes, groups, degree = 8_000, 8, 16
	count := func(peers float64) (hubs, others, lost [2]float64) {
		out := filepath.Join(t.TempDir(), "g")
		o := GenerateOptions{Kind: "communities", Nodes: nodes, Dim: 1, Classes: 4,
			AvgDegree: degree, Out: out, Communities: CommunityOptions{Count: groups, Hubs: 0.02,
				HubPeers: peers}}
		require.NoError(t, Generate(bg, o))
		require.NoError(t, o.fill())
		g := newGenerator(o)
		tp, err := datasettest.Open(t, out).Topology()
		require.NoError(t, err)
		isHub := func(v int64) bool { return g.rank(v) < g.hubs() }
		for v := range tp.NumNodes {
			_, of := g.placeOf(g.rank(v))
			to := &others
			if isHub(v) {
				to = &hubs
			}
			for i := range tp.InDegree(v) {
				u := tp.Neighbor(v, i)
				_, from := g.placeOf(g.rank(u))
				to[0]++
				switch {
				case isHub(u):
					to[1]++
					if from != of {
						lost[1]++ // without hubs in memory
					}
				case from != of:
					lost[0]++
				}
			}
		}
		return hubs, others, lost
	}
	hubs, others, lost := count(1)
	require.InDelta(t, degree, hubs[0]/(0.02*nodes), 1)
	require.Equal(t, hubs[0], hubs[1], "all neighbours of hubs are hubs")
	require.InDelta(t, 0.1, others[1]/others[0], 0.01)
	require.InDelta(t, 0.9*0.05, lost[0]/others[0], 0.01)
	require.Greater(t, lost[1], 0.8*(others[1]+hubs[1]))
	hubs, others, _ = count(0) // the default: as those of others
	require.InDelta(t, 0.1, hubs[1]/hubs[0], 0.03)
	require.InDelta(t, 0.1, others[1]/others[0], 0.01)
}

// restrict keeps some edges of a topology.
func restrict(t testing.TB, tp *graph.Topology, keep func(v, u int64) bool) *graph.Topology {
	var src, dst []int64
	for v := range tp.NumNodes {
		for i := range tp.InDegree(v) {
			if u := tp.Neighbor(v, i); keep(v, u) {
				src, dst = append(src, u), append(dst, v)
			}
		}
	}
	out, err := graph.FromEdges(tp.NumNodes, src, dst, false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, out.Close()) })
	return out
}

// TestCommunitiesOfFewNodes: where groups and classes have no nodes, nobody is drawn from them.
func TestCommunitiesOfFewNodes(t *testing.T) {
	for _, c := range []CommunityOptions{{Count: 7}, {Hubs: 1}, {Mixing: 1, Count: 2},
		{HubEdges: 1}, {HubPeers: 1}} {
		out := filepath.Join(t.TempDir(), "g")
		require.NoError(t, Generate(bg, GenerateOptions{Kind: "communities", Nodes: 7, Classes: 3,
			Dim: 2, AvgDegree: 3, Out: out, Communities: c}))
		tp, err := datasettest.Open(t, out).Topology()
		require.NoError(t, err)
		require.NoError(t, tp.Validate())
	}
	for _, bad := range []CommunityOptions{{Count: -1}, {Count: 8}, {Mixing: 1.5}, {Hubs: -1},
		{HubEdges: math.NaN()}, {HubPeers: 2}, {HubSignal: 1e9}} {
		err := Generate(bg, GenerateOptions{Kind: "communities", Nodes: 7, Classes: 3, Dim: 2,
			Out: filepath.Join(t.TempDir(), "g"), Communities: bad})
		datasettest.RequireUsage(t, err)
	}
}
