package partition

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if left := hostmem.Usage(); code == 0 && len(left) > 0 {
		fmt.Fprintln(os.Stderr, "memory is left:", left)
		code = 1
	}
	os.Exit(code)
}

// edges is a graph as a list.
type edges struct {
	nodes    int64
	src, dst []int64
}

func (e *edges) add(src, dst int64) { e.src, e.dst = append(e.src, src), append(e.dst, dst) }

func (e *edges) topology(t testing.TB, wide bool) *graph.Topology {
	t.Helper()
	x, err := graph.FromEdges(e.nodes, e.src, e.dst, wide)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

// onStorage is the topology with its ids in a file.
func (e *edges) onStorage(t testing.TB) *graph.Topology {
	t.Helper()
	in := e.topology(t, false)
	path := filepath.Join(t.TempDir(), "ids")
	b := make([]byte, 64) // an array's header
	for _, id := range in.Indices32 {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	require.NoError(t, os.WriteFile(path, b, 0o600))
	x, err := graph.Alloc(e.nodes, 0, false)
	require.NoError(t, err)
	x.NumEdges = in.NumEdges
	copy(x.Indptr, in.Indptr)
	far, err := graph.OpenOutOfCore(t.Context(), x, graph.IndexFile{Path: path, Offset: 64},
		graph.OutOfCoreOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, far.Close()) })
	return far
}

// anyEdges is a graph with hubs, self-loops, repeated edges and nodes without any.
func anyEdges(r *rand.Rand, nodes, count int) *edges {
	e := &edges{nodes: int64(nodes)}
	end := func() int64 { // squared: small numbers are hubs; the last tenth has no edges
		return int64(r.Float64() * r.Float64() * float64(nodes) * 0.9)
	}
	for range count {
		a, b := end(), end()
		e.add(a, b)
		if r.IntN(10) == 0 {
			e.add(a, b)
		}
		if r.IntN(10) == 0 {
			e.add(b, b)
		}
	}
	return e
}

// planted is a graph of groups whose nodes have numbers at random, and the group of each. Of degree
// in-neighbours each node has outside of its group some.
func planted(r *rand.Rand, groups, each, degree, outside int) (*edges, []int) {
	n := groups * each
	e, of, members := &edges{nodes: int64(n)}, make([]int, n), make([][]int64, groups)
	for i, v := range r.Perm(n) {
		of[v] = i % groups
		members[i%groups] = append(members[i%groups], int64(v))
	}
	for v := range int64(n) {
		for range degree - outside {
			own := members[of[v]]
			e.add(own[r.IntN(len(own))], v)
		}
		for range outside {
			e.add(r.Int64N(int64(n)), v)
		}
	}
	return e, of
}

func generator(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 7)) }

func made(t testing.TB, x *graph.Topology, o Options) *Partition {
	t.Helper()
	p, err := Make(t.Context(), x, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

// The figures are those that a list of the edges gives, wherever and however wide the ids are.
func TestMeasure(t *testing.T) {
	for seed := range uint64(20) {
		r := generator(seed)
		e := anyEdges(r, 2+r.IntN(300), r.IntN(2000))
		parts := 1 + r.IntN(int(min(e.nodes, 9)))
		of := make([]uint32, e.nodes)
		for v := range of {
			of[v] = uint32(r.IntN(parts))
		}
		var want Stats
		nodes, in := make([]int64, parts), make([]int64, parts)
		for _, p := range of {
			nodes[p]++
		}
		for i := range e.src {
			in[of[e.dst[i]]]++
			if of[e.src[i]] != of[e.dst[i]] {
				want.CutEdges++
			}
		}
		want.MaxNodes, want.MaxEdges = slices.Max(nodes), slices.Max(in)
		want.NodeBalance = float64(want.MaxNodes*int64(parts)) / float64(e.nodes)
		if len(e.src) > 0 {
			want.CutShare = float64(want.CutEdges) / float64(len(e.src))
			want.EdgeBalance = float64(want.MaxEdges*int64(parts)) / float64(len(e.src))
		}
		for _, n := range nodes {
			if n == 0 {
				want.EmptyParts++
			}
		}
		p := &Partition{Of: of, Info: Info{Parts: parts}}
		for name, x := range map[string]*graph.Topology{"32": e.topology(t, false),
			"64": e.topology(t, true), "stored": e.onStorage(t)} {
			got, err := p.Measure(t.Context(), x, nil)
			require.NoError(t, err)
			require.InEpsilon(t, 1+want.EdgeBalance, 1+got.EdgeBalance, 1e-12)
			got.EdgeBalance = want.EdgeBalance
			require.Equal(t, want, got, "seed %d, %s", seed, name)
		}
	}
}

// agreement is the share of nodes whose part is that of most of their group, each part counting for
// one group.
func agreement(of []uint32, group []int, parts int) float64 {
	count := make([][]int, parts)
	for p := range count {
		count[p] = make([]int, parts)
	}
	for v, p := range of {
		count[p][group[v]]++
	}
	same := 0
	taken := make([]bool, parts)
	for _, c := range count {
		best := -1
		for g, n := range c {
			if !taken[g] && (best < 0 || n > c[best]) {
				best = g
			}
		}
		taken[best] = true
		same += c[best]
	}
	return float64(same) / float64(len(of))
}

// Planted groups are found, whatever the order of their nodes; a partition at random cuts what it
// has to.
func TestPlantedGroups(t *testing.T) {
	e, group := planted(generator(1), 8, 500, 12, 2)
	x := e.topology(t, false)
	p := made(t, x, Options{Parts: 8, Method: Stream, Seed: 1})
	require.Greater(t, agreement(p.Of, group, 8), 0.99)
	require.Less(t, p.Info.CutShare, 0.16) // 2/12 × 7/8 are between groups
	require.Equal(t, Stream, p.Info.Method)

	random := made(t, x, Options{Parts: 8, Method: Random, Seed: 1})
	require.InDelta(t, 7./8, random.Info.CutShare, 0.02)
	require.InDelta(t, 1, random.Info.NodeBalance, 1e-9)
	require.NotEqual(t, random.Of, made(t, x, Options{Parts: 8, Method: Random, Seed: 2}).Of)
}

// A ring of rings: the clusters' start is the better one by far, as no node is a better beginning
// than others.
func TestClustersAreTheBetterStart(t *testing.T) {
	r := generator(3)
	const rings, each = 200, 50
	number := r.Perm(rings * each)
	e := &edges{nodes: rings * each}
	for i := range rings {
		for k := range each {
			v := int64(number[i*each+k])
			for step := 1; step <= 4; step++ {
				e.add(v, int64(number[i*each+(k+step)%each]))
			}
		}
		e.add(int64(number[i*each]), int64(number[(i+1)%rings*each]))
	}
	p := made(t, e.topology(t, false), Options{Parts: 4, Method: Stream, Seed: 1})
	require.Equal(t, startClusters, p.Info.Start)
	require.Less(t, p.Info.CutShare, 0.02)
}

// Equal seeds give equal parts, whatever the threads, the width of ids and where they are; other
// seeds give others.
func TestDeterminism(t *testing.T) {
	e := anyEdges(generator(5), 3000, 20000)
	x := e.topology(t, false)
	o := Options{Parts: 7, Method: Stream, Seed: 3, Threads: 1}
	want := made(t, x, o)
	for _, threads := range []int{2, 3, 16} {
		o.Threads = threads
		got := made(t, x, o)
		require.Equal(t, want.Of, got.Of, "%d threads", threads)
		require.Equal(t, want.Info, got.Info)
	}
	require.Equal(t, want.Of, made(t, e.topology(t, true), o).Of)
	require.Equal(t, want.Of, made(t, e.onStorage(t), o).Of)
	o.Seed = 4
	require.NotEqual(t, want.Of, made(t, x, o).Of)
}

// walkPlainly is walker.walk by one thread that looks at each edge when it is needed.
func walkPlainly(x *graph.Topology, limit int64, label []uint32, votes []uint64,
	place func(v int64, count map[uint32]uint32, met []uint32) uint32) {
	from := int64(0)
	for lo := int64(0); lo < x.NumNodes; {
		hi := lo
		for hi < x.NumNodes && x.Indptr[hi+1] <= from+limit {
			hi++
		}
		if hi == lo {
			from += limit
			continue
		}
		for v := lo; v < hi; v++ {
			count, met := map[uint32]uint32{}, []uint32(nil)
			weigh := func(l, n uint32) {
				if l != none && n > 0 {
					if count[l] == 0 {
						met = append(met, l)
					}
					count[l] += n
				}
			}
			for i := range x.InDegree(v) {
				if u := x.Neighbor(v, i); u != v {
					weigh(label[u], 1)
				}
			}
			weigh(uint32(votes[v]), uint32(votes[v]>>32))
			votes[v] = 0
			label[v] = place(v, count, met)
		}
		for v := lo; v < hi; v++ {
			for i := range x.InDegree(v) {
				u := x.Neighbor(v, i)
				if u == v || x.InDegree(v) > limit {
					continue
				}
				by, l := votes[u]>>32, label[v]
				switch {
				case by == 0:
					votes[u] = uint64(l) | 1<<32
				case uint32(votes[u]) == l:
					votes[u] = uint64(l) | (by+1)<<32
				default:
					votes[u] = votes[u]&(1<<32-1) | (by-1)<<32
				}
			}
		}
		from, lo = x.Indptr[hi], hi
	}
}

// Walks by several threads, whose buffers hold a part of the lists, and not all of a long one, are
// those of plain code.
func TestWalkIsPlain(t *testing.T) {
	for seed := range uint64(30) {
		r := generator(seed)
		e := anyEdges(r, 2+r.IntN(200), r.IntN(1500))
		x := e.topology(t, false)
		n := int(e.nodes)
		label, plain, votes := make([]uint32, n), make([]uint32, n), make([]uint64, n)
		o := Options{Parts: 1, Method: Stream, Threads: 1 + r.IntN(5)}
		require.NoError(t, o.check(x))
		w, err := newWalker(x, &o, label)
		require.NoError(t, err)
		w.limit = 1 + r.IntN(100)
		for v := range label {
			label[v] = uint32(r.IntN(n))
			if r.IntN(3) == 0 {
				label[v] = none
			}
		}
		copy(plain, label)
		choose := func(v int64, count func(l uint32) uint32, met []uint32) uint32 {
			best := uint32(v) // of its own
			for _, l := range met {
				if count(l) > count(best) {
					best = l
				}
			}
			return best
		}
		for range 3 {
			require.NoError(t, w.walk(t.Context(), "test", func(v int64) uint32 {
				return choose(v, func(l uint32) uint32 { return w.count[l] }, w.met)
			}))
			walkPlainly(x, int64(w.limit), plain, votes,
				func(v int64, count map[uint32]uint32, met []uint32) uint32 {
					return choose(v, func(l uint32) uint32 { return count[l] }, met)
				})
			require.Equal(t, plain, label, "seed %d", seed)
			require.Equal(t, votes, w.votes, "seed %d", seed)
		}
		require.NoError(t, w.close())
	}
}

// No part has more nodes than it may have, whatever the graph.
func TestBalanceHolds(t *testing.T) {
	star := &edges{nodes: 500}
	for v := range int64(499) {
		star.add(v+1, 0)
		star.add(0, v+1)
	}
	groups, _ := planted(generator(2), 3, 200, 8, 1) // three groups do not fit into four parts
	for name, e := range map[string]*edges{"star": star, "groups": groups,
		"no edges": {nodes: 100}, "one node": {nodes: 1},
		"any": anyEdges(generator(9), 400, 3000), "dense": anyEdges(generator(10), 60, 5000)} {
		x := e.topology(t, false)
		for _, parts := range []int{1, 2, 4, 7, 33, int(e.nodes)} {
			if int64(parts) > e.nodes {
				continue
			}
			for _, balance := range []float64{1, 1.01, 1.05, 1.5, 4} {
				for _, method := range []string{Stream, Random} {
					p := made(t, x, Options{Parts: parts, Method: method, Balance: balance})
					limit := max(int64(balance*float64(e.nodes)/float64(parts)),
						(e.nodes+int64(parts)-1)/int64(parts))
					require.LessOrEqual(t, p.Info.MaxNodes, limit, "%s: %d parts by %s, %g", name,
						parts, method, balance)
					for _, of := range p.Of {
						require.Less(t, of, uint32(parts))
					}
				}
			}
		}
	}
}

func TestMakeRefuses(t *testing.T) {
	x := anyEdges(generator(1), 10, 20).topology(t, false)
	for want, o := range map[string]Options{
		"option parts 0":               {},
		"option parts 11":              {Parts: 11},
		"option balance 0.9":           {Parts: 2, Balance: 0.9},
		"option passes -1":             {Parts: 2, Passes: -1},
		"option workers 1025":          {Parts: 2, Threads: MostThreads + 1},
		`option method "best": choose`: {Parts: 2, Method: "best"},
	} {
		_, err := Make(t.Context(), x, o)
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	// A partition that is stopped keeps nothing; TestMain looks for the memory.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	e := anyEdges(generator(1), 10000, 200000)
	_, err := Make(ctx, e.topology(t, false), Options{Parts: 2, Method: Stream})
	require.Equal(t, errs.Interrupted, errs.ClassOf(err))
}

// Nodes that are packed are in the first parts, which keep their sizes.
func TestPackFirst(t *testing.T) {
	g := &graph.Topology{NumNodes: 1000, Indptr: make([]int64, 1001)}
	for _, count := range []int{0, 1, 100, 257, 1000} {
		p, err := Make(context.Background(), g, Options{Parts: 7, Method: Random, Seed: 3})
		require.NoError(t, err)
		before := make([]int, 7)
		for _, part := range p.Of {
			before[part]++
		}
		var nodes []int64
		for v := range count {
			nodes = append(nodes, int64(999-v))
		}
		p.PackFirst(nodes)
		parts, room := 0, 0
		for ; room < count; parts++ {
			room += before[parts]
		}
		for _, v := range nodes {
			require.Less(t, int(p.Of[v]), parts)
		}
		after := make([]int, 7)
		for _, part := range p.Of {
			after[part]++
		}
		require.Equal(t, before, after)
		require.NoError(t, p.Close())
	}
}
