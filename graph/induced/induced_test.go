package induced

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/graph"
	"helios/internal/errs"
)

// whole is a partitioned graph of the tests: a numbering, and each node's in-neighbours.
type whole struct {
	n   *Numbering
	adj [][]int64
}

func random(t testing.TB, rng *rand.Rand, parts, nodes int, degree float64, statics int) *whole {
	base, static := []int64{0}, []int64{0}
	for p := range parts {
		size := int64(nodes / parts)
		switch {
		case p == 1:
			size = 0 // a part may be empty
		case p%3 == 2:
			size += rng.Int64N(20)
		}
		s := min(rng.Int64N(int64(statics)+1), size)
		if p == 0 && statics > 0 {
			s = size // all of it static
		}
		base, static = append(base, base[p]+size), append(static, static[p]+s)
	}
	n, err := NewNumbering(base, static)
	require.NoError(t, err)
	w := &whole{n: n, adj: make([][]int64, n.Nodes())}
	for v := range w.adj {
		for range rng.IntN(int(2*degree) + 1) {
			w.adj[v] = append(w.adj[v], rng.Int64N(n.Nodes()))
		}
	}
	return w
}

func (w *whole) lists(ids []int64, wide bool) (l Lists) {
	for _, v := range ids {
		l.Degrees = append(l.Degrees, uint32(len(w.adj[v])))
		for _, u := range w.adj[v] {
			if wide {
				l.Neighbors64 = append(l.Neighbors64, uint64(u))
			} else {
				l.Neighbors = append(l.Neighbors, uint32(u))
			}
		}
	}
	return l
}

func (w *whole) statics() (ids []int64) {
	for p := range w.n.Parts() {
		for i := range w.n.Static[p+1] - w.n.Static[p] {
			ids = append(ids, w.n.Base[p]+i)
		}
	}
	return ids
}

func (w *whole) load(rng *rand.Rand, parts []int, wide bool) (out []Part, rows int64) {
	rows = w.n.Statics()
	for _, p := range parts {
		var ids []int64
		for v := w.n.Base[p]; v < w.n.Base[p+1]; v++ {
			ids = append(ids, v)
		}
		rows += rng.Int64N(5) // rows of no node
		out = append(out, Part{p, rows, w.lists(ids, wide)})
		rows += int64(len(ids))
	}
	return out, rows + rng.Int64N(3)
}

// brute is the induced graph by its definition.
func (w *whole) brute(parts []Part, rows int64) [][]int64 {
	row := map[int64]int64{}
	for i, v := range w.statics() {
		row[v] = int64(i)
	}
	for _, p := range parts {
		for v := w.n.Base[p.Part]; v < w.n.Base[p.Part+1]; v++ {
			if _, static := row[v]; !static {
				row[v] = p.First + v - w.n.Base[p.Part]
			}
		}
	}
	out := make([][]int64, rows)
	for v, r := range row {
		for _, u := range w.adj[v] {
			if to, ok := row[u]; ok {
				out[r] = append(out[r], to)
			}
		}
	}
	return out
}

func requireEqual(t testing.TB, want [][]int64, got *graph.Topology) {
	t.Helper()
	require.NoError(t, got.Validate())
	require.EqualValues(t, len(want), got.NumNodes)
	for v := range want {
		var list []int64
		for i := range got.InDegree(int64(v)) {
			list = append(list, got.Neighbor(int64(v), i))
		}
		require.Equal(t, want[v], list, "row %d", v)
	}
}

func TestBuildIsTheDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 60 {
		count := 1 + rng.IntN(9)
		w := random(t, rng, count, 1+rng.IntN(400), 4, rng.IntN(4)*5)
		order := rng.Perm(count)[:1+rng.IntN(count)]
		wide := rng.IntN(2) == 0
		parts, rows := w.load(rng, order, wide)
		places, err := NewPlaces(w.n, rows, parts)
		require.NoError(t, err)
		want := w.brute(parts, rows)
		for _, workers := range []int{1, 3} {
			got, err := Build(context.Background(), places, w.lists(w.statics(), wide), parts,
				workers)
			require.NoError(t, err)
			requireEqual(t, want, got)
			require.NoError(t, got.Close())
		}
	}
}

// Many chunks: hubs longer than one, and the order of workers shows nowhere.
func TestBuildInChunks(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	w := random(t, rng, 4, 9000, 60, 30)
	for range chunkEdges * 2 {
		w.adj[w.n.Base[2]] = append(w.adj[w.n.Base[2]], rng.Int64N(w.n.Nodes()))
	}
	parts, rows := w.load(rng, []int{3, 0, 2}, false)
	places, err := NewPlaces(w.n, rows, parts)
	require.NoError(t, err)
	static := w.lists(w.statics(), false)
	chunks, err := cut(places, &static, parts)
	require.NoError(t, err)
	require.Greater(t, len(chunks), 5)
	want := w.brute(parts, rows)
	got, err := Build(context.Background(), places, static, parts, 4)
	require.NoError(t, err)
	requireEqual(t, want, got)
	require.NoError(t, got.Close())
}

// All parts and no static nodes: the graph itself.
func TestBuildOfAllIsTheGraph(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	w := random(t, rng, 1, 300, 5, 0)
	var ids []int64
	for v := range w.adj {
		ids = append(ids, int64(v))
	}
	parts := []Part{{0, 0, w.lists(ids, false)}}
	places, err := NewPlaces(w.n, 300, parts)
	require.NoError(t, err)
	got, err := Build(context.Background(), places, Lists{}, parts, 2)
	require.NoError(t, err)
	requireEqual(t, w.adj, got)
	require.NoError(t, got.Close())
}

func TestPlacesOf(t *testing.T) {
	n, err := NewNumbering([]int64{0, 4, 4, 10}, []int64{0, 1, 1, 3})
	require.NoError(t, err)
	require.Equal(t, []int{0, 0, 0, 0, 2, 2}, []int{n.PartOf(0), n.PartOf(1), n.PartOf(2),
		n.PartOf(3), n.PartOf(4), n.PartOf(9)})
	p, err := NewPlaces(n, 20, []Part{{Part: 2, First: 8}})
	require.NoError(t, err)
	var got []int64
	for v := range n.Nodes() {
		got = append(got, p.Of(v))
	}
	require.Equal(t, []int64{0, -1, -1, -1, 1, 2, 10, 11, 12, 13}, got)
}

func TestRefusesWhatContradicts(t *testing.T) {
	for name, bad := range map[string][2][]int64{
		"no part": {{0}, {0}}, "not from 0": {{1, 2}, {0, 0}}, "falls": {{0, 3, 2}, {0, 0, 0}},
		"statics fall":   {{0, 3, 4}, {0, 1, 0}},
		"too many":       {{0, 1}, {0, 2}},
		"another length": {{0, 1}, {0}},
	} {
		_, err := NewNumbering(bad[0], bad[1])
		require.Equal(t, errs.Device, errs.ClassOf(err), name)
	}
	n, err := NewNumbering([]int64{0, 2, 4}, []int64{0, 0, 1})
	require.NoError(t, err)
	for name, parts := range map[string][]Part{
		"among static nodes": {{Part: 0, First: 0}}, "twice": {{Part: 0, First: 1}, {First: 5}},
		"one in another": {{Part: 0, First: 1}, {Part: 1, First: 2}}, "none": {{Part: 2, First: 1}},
		"behind the end": {{Part: 0, First: 9}},
	} {
		_, err := NewPlaces(n, 10, parts)
		require.Error(t, err, name)
	}
	part := func(degrees, ids []uint32) []Part {
		return []Part{{0, 1, Lists{Degrees: degrees, Neighbors: ids}}}
	}
	good := part([]uint32{1, 2}, []uint32{0, 3, 2})
	p, err := NewPlaces(n, 10, good)
	require.NoError(t, err)
	static := Lists{Degrees: []uint32{0}}
	top, err := Build(context.Background(), p, static, good, 0)
	require.NoError(t, err)
	require.EqualValues(t, 2, top.NumEdges)
	require.NoError(t, top.Close())
	for name, parts := range map[string][]Part{
		"fewer degrees": part([]uint32{3}, []uint32{0, 3, 2}),
		"fewer edges":   part([]uint32{1, 2}, []uint32{0, 3}),
		"more edges":    part([]uint32{1, 2}, []uint32{0, 3, 2, 1}),
		"no node":       part([]uint32{1, 2}, []uint32{0, 4, 2}),
	} {
		_, err := Build(context.Background(), p, static, parts, 2)
		require.Equal(t, errs.Device, errs.ClassOf(err), "%s: %v", name, err)
	}
	_, err = Build(context.Background(), p, Lists{}, good, 2)
	require.ErrorContains(t, err, "static nodes")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = Build(ctx, p, static, good, 2)
	require.ErrorIs(t, err, context.Canceled)
}

// Damaged lists are an error, or a graph that refers to no node outside.
func FuzzBuild(f *testing.F) {
	f.Add([]byte{1, 2}, []byte{0, 3, 2}, []byte{0})
	f.Add([]byte{0, 255}, []byte{9}, []byte{})
	f.Fuzz(func(t *testing.T, degrees, ids, static []byte) {
		words := func(b []byte) (out []uint32) {
			for _, x := range b {
				v := uint32(x)
				if x == 255 {
					v = 1<<32 - 1
				}
				out = append(out, v)
			}
			return out
		}
		n, err := NewNumbering([]int64{0, 2, 4}, []int64{0, 1, 2})
		require.NoError(t, err)
		parts := []Part{{1, 2, Lists{Degrees: words(degrees), Neighbors: words(ids)}}}
		p, err := NewPlaces(n, 6, parts)
		require.NoError(t, err)
		s := words(static)
		got, err := Build(context.Background(), p,
			Lists{Degrees: []uint32{0, uint32(len(s))}, Neighbors: slices.Clone(s)}, parts, 2)
		if err != nil {
			require.Equal(t, errs.Device, errs.ClassOf(err))
			return
		}
		require.NoError(t, got.Validate())
		require.NoError(t, got.Close())
	})
}
