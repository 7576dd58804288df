package graph

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/philox"
)

// typedGraph has papers, authors and venues: authors have no in-edges but one relation's, venues
// none at all; "cites" has self loops, repeated edges and a hub, "empty" no edges.
func typedGraph(t testing.TB) *Topology {
	s := &Schema{
		Types: []NodeType{{"paper", 900, 8}, {"author", 500, 4}, {"venue", 7, 8}},
		Relations: []Relation{{"cites", 0, 0}, {"writes", 1, 0}, {"rev_writes", 0, 1},
			{"prints", 2, 0}, {"empty", 1, 1}},
		Seeds: 0,
	}
	r := rand.New(rand.NewPCG(3, 4))
	var lists []*Topology
	for i, rel := range s.Relations {
		src, dst := s.Types[rel.Src].Nodes, s.Types[rel.Dst].Nodes
		var from, to []int64
		for v := range dst {
			d := r.IntN(20)
			switch {
			case rel.Name == "empty" || v%11 == 3:
				d = 0
			case v == 5:
				d = 3000
			}
			if rel.Name == "cites" && v%7 == 0 {
				from, to = append(from, v, v), append(to, v, v)
			}
			for range d {
				from, to = append(from, r.Int64N(src)), append(to, v)
			}
		}
		// FromEdges bounds both ends by one number.
		x, err := FromEdges(max(src, dst), from, to, i%2 == 1)
		require.NoError(t, err)
		x.Indptr, x.NumNodes, x.Sources = x.Indptr[:dst+1], dst, src
		lists = append(lists, x)
	}
	topo, err := NewTyped(s, lists)
	require.NoError(t, err)
	require.NoError(t, topo.Validate())
	t.Cleanup(func() { require.NoError(t, topo.Close()) })
	return topo
}

// typedPlain is a mini-batch of a typed graph as Go values.
type typedPlain struct {
	plain
	lists   [][]ListRange
	typeEnd [][]int64
}

func (r *rig) typed(t testing.TB, mb *MiniBatch) (p typedPlain) {
	for _, b := range mb.Blocks {
		p.lists = append(p.lists, slices.Clone(b.Lists))
	}
	for _, ends := range mb.TypeEnd {
		p.typeEnd = append(p.typeEnd, slices.Clone(ends))
	}
	p.plain = r.plain(t, mb)
	return p
}

// referenceTyped draws relation by relation with maps: the lists of the graph's relations are drawn
// from by reference's own Floyd, or by LABOR's definition over numbers in the graph.
func referenceTyped(topo *Topology, cfg SamplerConfig, epoch int, seeds []int64) typedPlain {
	s := topo.Schema
	var p typedPlain
	place := map[int64]int{}
	var typeOf []int
	for _, v := range seeds {
		g := s.First(s.Seeds) + v
		if _, ok := place[g]; !ok {
			place[g] = len(p.nodes)
		}
		p.nodes, typeOf = append(p.nodes, g), append(typeOf, s.Seeds)
	}
	p.hopEnd = []int64{int64(len(seeds))}
	ends := make([]int64, len(s.Types))
	for i := s.Seeds; i < len(ends); i++ {
		ends[i] = int64(len(seeds))
	}
	p.typeEnd = append(p.typeEnd, ends)
	w := philox.Block(philox.Key(cfg.Seed, philox.StreamBatch), [4]uint32{})
	for hop := range cfg.Fanouts {
		frontier := slices.Clone(p.nodes)
		indptr, src := []int64{0}, []uint32{}
		lists, ends := make([]ListRange, len(s.Relations)), make([]int64, len(s.Types))
		for kind := range s.Types {
			for r, rel := range s.Relations {
				if rel.Src != kind {
					continue
				}
				key, fanout := [2]uint32{w[0], w[1]}, int64(cfg.fanout(r, hop))
				if r > 0 {
					k := philox.Block(key, [4]uint32{uint32(r), 0, 1<<32 - 1, 1<<32 - 1})
					key = [2]uint32{k[0], k[1]}
				}
				lists[r].First, lists[r].FirstEdge = int64(len(indptr)-1), int64(len(src))
				for i, g := range frontier {
					if typeOf[i] != rel.Dst {
						continue
					}
					lists[r].N++
					v := g - s.First(rel.Dst)
					var ids []int64
					for n := range topo.Relations[r].InDegree(v) {
						ids = append(ids, s.First(rel.Src)+topo.Relations[r].Neighbor(v, n))
					}
					var list []int64
					switch {
					case cfg.Method == Labor:
						list = laborPicks(ids, fanout, cfg, epoch, 0, hop)
					case cfg.Together && fanout > 0:
						list = togetherPicks(topo, r, v, fanout, [2]uint32{w[0], w[1]}, epoch, hop)
					default:
						list = picks(int64(len(ids)), fanout, key, v, epoch, hop)
					}
					for _, n := range list {
						u := ids[n]
						if _, ok := place[u]; !ok {
							place[u] = len(p.nodes)
							p.nodes, typeOf = append(p.nodes, u), append(typeOf, kind)
						}
						src = append(src, uint32(place[u]))
					}
					indptr = append(indptr, int64(len(src)))
				}
				lists[r].Edges = int64(len(src)) - lists[r].FirstEdge
			}
			ends[kind] = int64(len(p.nodes))
		}
		p.indptr, p.src = append(p.indptr, indptr), append(p.src, src)
		p.lists, p.typeEnd = append(p.lists, lists), append(p.typeEnd, ends)
		p.hopEnd = append(p.hopEnd, int64(len(p.nodes)))
	}
	return p
}

// togetherPicks are the places in the list of node v in relation r among those that a fanout draws
// from the lists of all relations into its type.
func togetherPicks(topo *Topology, r int, v, fanout int64, key [2]uint32, epoch,
	hop int) (list []int64) {
	first, all, own := -1, int64(0), int64(0)
	for i, rel := range topo.Schema.Relations {
		if rel.Dst != topo.Schema.Relations[r].Dst {
			continue
		}
		if first < 0 {
			first = i
		}
		if i == r {
			own = all
		}
		all += topo.Relations[i].InDegree(v)
	}
	if first > 0 {
		k := philox.Block(key, [4]uint32{uint32(first), 0, 1<<32 - 1, 1<<32 - 1})
		key = [2]uint32{k[0], k[1]}
	}
	for _, c := range picks(all, fanout, key, v, epoch, hop) {
		if c >= own && c < own+topo.Relations[r].InDegree(v) {
			list = append(list, c-own)
		}
	}
	return list
}

// picks are the places in a list of d neighbours of node v that a fanout draws.
func picks(d, fanout int64, key [2]uint32, v int64, epoch, hop int) (list []int64) {
	if fanout < 0 || d <= fanout {
		for i := range d {
			list = append(list, i)
		}
		return list
	}
	for i := range fanout {
		w := philox.Block(key, [4]uint32{uint32(v), uint32(v >> 32), uint32(epoch),
			uint32(hop)<<24 | uint32(i/2)})
		j := d - fanout + i
		c := int64(philox.Bounded(uint64(w[2*(i%2)+1])<<32|uint64(w[2*(i%2)]), uint64(j+1)))
		if slices.Contains(list, c) {
			c = j
		}
		list = append(list, c)
	}
	return list
}

var typedFanouts = []SamplerConfig{
	{Fanouts: []int{5, 3}, Seed: 7}, {Fanouts: []int{-1}, Seed: 8},
	{Fanouts: []int{4, 3, 2}, Seed: 9},
	{Fanouts: []int{5, 200}, RelationFanouts: [][]int{{5, 200}, {0, 70}, {3, -1}, {1, 1}, {2, 2}},
		Seed: 10},
	{Fanouts: []int{2, 3}, RelationFanouts: [][]int{{1, 3}, {0, 70}, {2, -1}, {1, 1}, {2, 2}},
		Seed: 11, Method: Labor, Dependency: 3},
}

// togetherFanouts are over all relations, which a GPU does not draw.
var togetherFanouts = SamplerConfig{Fanouts: []int{5, 128, -1}, Seed: 12, Together: true}

// Typed samples equal the reference's for every table and number of workers, several batches
// through the same buffers.
func TestTypedBlocksEqualReference(t *testing.T) {
	checkTypedBlocks(t, host, append(slices.Clone(typedFanouts), togetherFanouts))
	checkTypedBlocks(t, hostGeneral, typedFanouts)
}

func checkTypedBlocks(t *testing.T, open opener, configs []SamplerConfig) {
	for _, cfg := range configs {
		for _, sms := range []int{1, 3} {
			for _, limit := range []int64{directNodes, 0} {
				topo := typedGraph(t) // a driver registers memory once
				r := newRig(t, open, topo, sms, cfg, limit)
				for epoch, n := range []int{100, 1, 700, 50} {
					seeds := someSeeds(n, 900, uint64(n))
					seeds = append(seeds, 5, seeds[0])
					want := referenceTyped(topo, cfg, epoch, seeds)
					require.Equal(t, want, r.typed(t, r.sample(t, epoch, 0, seeds)),
						"%v sms=%d limit=%d", cfg, sms, limit)
				}
			}
		}
	}
}

// A graph of one type and one relation has the samples of the same graph without types, to the bit.
func TestOneTypeSamplesAsNone(t *testing.T) {
	topo := randomGraph(t, 3000, 20, false, 5)
	s := &Schema{Types: []NodeType{{"node", 3000, 8}}, Relations: []Relation{{"edge", 0, 0}}}
	typed, err := NewTyped(s, []*Topology{topo})
	require.NoError(t, err)
	for _, cfg := range []SamplerConfig{{Fanouts: []int{10, 5, 3}, Seed: 4},
		{Fanouts: []int{10, 5, 3}, Seed: 4, Method: Labor, Dependency: 4},
		{Fanouts: []int{10, 5, 3}, Seed: 4, Together: true}} {
		of := cfg
		of.Together = false
		a := newRig(t, host, topo, 2, of, 0)
		for _, open := range []opener{host, hostGeneral} {
			if cfg.Together {
				open = host
			}
			b := newRig(t, open, typed, 2, cfg, 0)
			for index, n := range []int{200, 1, 500} {
				seeds := someSeeds(n, 3000, uint64(n))
				require.Equal(t, a.plain(t, a.sample(t, 3, index, seeds)),
					b.plain(t, b.sample(t, 3, index, seeds)))
			}
		}
	}
}

// Mini-batches of a typed graph are kept and brought back whole, and bytes that were changed are
// found or change no size.
func TestTypedSaved(t *testing.T) {
	topo := typedGraph(t)
	cfg := typedFanouts[0]
	r := newRig(t, host, topo, 2, cfg, directNodes)
	seeds := someSeeds(100, 900, 1)
	mb := r.sample(t, 1, 0, seeds)
	want := r.typed(t, mb)
	saved, n, err := mb.Save(nil, func(b cuda.Buffer, bytes int64) ([]byte, error) {
		return b.Bytes()[:bytes], nil
	})
	require.NoError(t, err)
	require.Equal(t, mb.HopEnd[2], n)
	var stage Stage
	other, err := r.s.NewMiniBatch()
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()); require.NoError(t, stage.Close()) }()
	for range 2 {
		require.NoError(t, r.s.Restore(r.ctx, r.stream, other, 1, 0, want.nodes, saved, &stage))
		require.Equal(t, want, r.typed(t, other))
		r.sample(t, 2, 1, seeds[:7]) // other content, and other sizes, come between
	}
	header := savedHeader + 24*2 + (5*2*2+3*3)*8
	for i := range header / 8 {
		for _, v := range []byte{1, 255} {
			bad := slices.Clone(saved)
			bad[i*8] ^= v
			require.Error(t, r.s.Restore(r.ctx, r.stream, other, 1, 0, want.nodes, bad, &stage),
				"word %d", i)
		}
	}
	require.NoError(t, r.s.Restore(r.ctx, r.stream, other, 1, 0, want.nodes, saved, &stage))
	require.Equal(t, want, r.typed(t, other))
}

func TestTypedIsRefused(t *testing.T) {
	topo, plainTopo := typedGraph(t), randomGraph(t, 50, 3, false, 1)
	dev := host(t, 1)
	for _, c := range []struct {
		topo  *Topology
		cfg   SamplerConfig
		class errs.Class
		text  string
	}{
		{topo, SamplerConfig{Fanouts: []int{2}, Method: Ladies}, errs.Capability,
			"does not draw from graphs with types: a layer's nodes come from one matrix"},
		{topo, SamplerConfig{Fanouts: []int{2}, Degrees: true}, errs.Capability, "in-degrees"},
		{topo, SamplerConfig{Fanouts: []int{2}, RelationFanouts: [][]int{{1}}}, errs.Usage,
			"fanouts of 1 relations, the graph has 5"},
		{topo, SamplerConfig{Fanouts: []int{2}, RelationFanouts: [][]int{{1}, {1, 2}, {1}, {1},
			{1}}}, errs.Usage, "relation author:writes:paper: 2 fanouts; give 1"},
		{topo, SamplerConfig{Fanouts: []int{2}, RelationFanouts: [][]int{{1}, {-2}, {1}, {1},
			{1}}}, errs.Usage, "fanout -2 of hop 0"},
		{topo, SamplerConfig{Fanouts: []int{2}, Together: true, Method: Labor}, errs.Capability,
			"sampler labor draws by the in-degree in each relation"},
		{topo, SamplerConfig{Fanouts: []int{2, 129}, Together: true}, errs.Usage,
			"fanout 129 of hop 1 over all relations: must be 1 to 128"},
		{topo, SamplerConfig{Fanouts: []int{1}, Together: true, RelationFanouts: [][]int{{1}, {1},
			{1}, {1}, {1}}}, errs.Usage, "give one"},
		{plainTopo, SamplerConfig{Fanouts: []int{2}, Together: true}, errs.Usage,
			"for graphs with types"},
		{plainTopo, SamplerConfig{Fanouts: []int{2}, RelationFanouts: [][]int{{1}}}, errs.Usage,
			"for graphs with types"},
	} {
		dt, err := Attach(dev, c.topo)
		require.NoError(t, err)
		_, err = NewSampler(dev, dt, c.cfg)
		require.ErrorContains(t, err, c.text)
		require.Equal(t, c.class, errs.ClassOf(err))
		require.NoError(t, dt.Close())
	}
	general := hostGeneral(t, 1)
	dt, err := Attach(general, topo)
	require.NoError(t, err)
	_, err = NewSampler(general, dt, togetherFanouts)
	require.ErrorContains(t, err, "are drawn by the CPU")
	require.NoError(t, dt.Close())
	r := newRig(t, host, topo, 1, typedFanouts[0], 0)
	err = r.s.Begin(context.Background(), r.stream, r.mb, 0, 0, []int64{900})
	require.ErrorContains(t, err, "seed node 900")
	_, err = NewTyped(topo.Schema, topo.Relations[:2])
	require.ErrorContains(t, err, "5 relations, lists of 2")
	swapped := slices.Clone(topo.Relations)
	swapped[0], swapped[1] = swapped[1], swapped[0]
	_, err = NewTyped(topo.Schema, swapped)
	require.ErrorContains(t, err, "lists of 900 destinations with 500 sources")
}

// Scores and degrees of a typed graph are those of one graph with the edges of all relations.
func TestTypedHotness(t *testing.T) {
	topo := typedGraph(t)
	s := topo.Schema
	var from, to []int64
	for r, x := range topo.Relations {
		for v := range x.NumNodes {
			for i := range x.InDegree(v) {
				from = append(from, s.First(s.Relations[r].Src)+x.Neighbor(v, i))
				to = append(to, s.First(s.Relations[r].Dst)+v)
			}
		}
	}
	one, err := FromEdges(topo.NumNodes, from, to, false)
	require.NoError(t, err)
	defer func() { require.NoError(t, one.Close()) }()
	for v := range topo.NumNodes {
		require.Equal(t, one.InDegree(v), topo.InDegree(v))
	}
	for i, topo := range []*Topology{topo, topo, typedFar(t, topo, OutOfCoreOptions{})} {
		workers := 1 + i
		want, err := OutDegrees(t.Context(), one, workers)
		require.NoError(t, err)
		got, err := OutDegrees(t.Context(), topo, workers)
		require.NoError(t, err)
		require.Equal(t, want, got)
		o := PageRankOptions{Teleport: []int64{1, 5, 899}, Workers: workers}
		ranks, err := ReversePageRank(t.Context(), one, o)
		require.NoError(t, err)
		typed, err := ReversePageRank(t.Context(), topo, o)
		require.NoError(t, err)
		require.Equal(t, ranks, typed)
	}
}

// typedFar is a typed graph with the ids of each relation in a file.
func typedFar(t testing.TB, topo *Topology, o OutOfCoreOptions) *Topology {
	t.Helper()
	var lists []*Topology
	var files []IndexFile
	for _, x := range topo.Relations {
		far, err := Alloc(x.NumNodes, 0, false)
		require.NoError(t, err)
		copy(far.Indptr, x.Indptr)
		far.NumEdges, far.Sources = x.NumEdges, x.Sources
		lists, files = append(lists, far), append(files, idFile(t, x, 128))
	}
	far, err := OpenTypedOutOfCore(t.Context(), topo.Schema, lists, files, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, far.Close()) })
	return far
}

// Typed blocks over files are those over memory to the bit: caches from none to everything, which
// the relations share, chunks that end within a list, both tables, both ways to read, and a device
// that is none of the host's.
func TestTypedOutOfCoreBlocks(t *testing.T) {
	topo := typedGraph(t)
	whole := int64(0)
	for _, x := range topo.Relations {
		whole += MostNeighborCache(x.NumNodes, x.NumEdges)
	}
	for i, o := range []OutOfCoreOptions{
		{}, {CacheBytes: whole / 3, Chunk: 7}, {CacheBytes: whole, Chunk: 100, Threads: true},
		{CacheBytes: 2 * whole},
	} {
		far := typedFar(t, topo, o)
		require.True(t, far.OnStorage())
		info := far.StorageInfo()
		require.LessOrEqual(t, info.CacheBytes, o.CacheBytes)
		require.Equal(t, o.CacheBytes >= whole, info.CacheEdges == topo.NumEdges)
		require.Equal(t, o.CacheBytes > 0, info.CacheEdges > 0)
		require.EqualValues(t, readSlots*unitBytes, info.ReadBytes)
		for k, cfg := range append(slices.Clone(typedFanouts), togetherFanouts) {
			open, limit := host, int64(k%2)*directNodes
			if i == 1 {
				open = hostGeneral
			}
			mem, r := newRig(t, host, topo, 2, cfg, limit), newRig(t, open, far, 1+i%3, cfg, limit)
			for epoch, n := range []int{100, 1, 700} {
				seeds := someSeeds(n, 900, uint64(n))
				require.Equal(t, mem.typed(t, mem.sample(t, epoch, 0, seeds)),
					r.typed(t, r.sample(t, epoch, 0, seeds)), "%+v %v", o, cfg)
			}
		}
		stats := far.Storage()
		require.Equal(t, o.CacheBytes >= whole, stats.Pages == 0)
		require.Equal(t, o.CacheBytes >= whole, stats.CachedEdges == stats.Edges)
	}
	least := int64(0)
	for _, x := range topo.Relations {
		if x.NumEdges > 0 {
			least += LeastNeighborCache(x.NumNodes)
		}
	}
	_, err := cacheShares(topo.Relations, least-1, topo.NumNodes)
	require.ErrorContains(t, err, "of 1407 nodes takes")
}

// The lists of the relations' caches go and come back, which changes no block.
func TestTypedListsAreLent(t *testing.T) {
	topo := typedGraph(t)
	far := typedFar(t, topo, OutOfCoreOptions{CacheBytes: 2 * topo.NumEdges})
	r := newRig(t, host, far, 2, typedFanouts[0], 0)
	seeds := someSeeds(100, 900, 3)
	want := r.typed(t, r.sample(t, 1, 0, seeds))
	lists := r.s.topo
	mem, err := hostmem.Alloc(lists.ListBytes(), "lent")
	require.NoError(t, err)
	defer func() { require.NoError(t, hostmem.Free(mem)) }()
	for _, to := range [][]byte{nil, mem} {
		held, before := far.StorageInfo(), far.Storage()
		require.NoError(t, lists.ReleaseLists())
		require.Equal(t, want, r.typed(t, r.sample(t, 1, 0, seeds)))
		require.Zero(t, far.Storage().Sub(before).CachedEdges)
		n, err := lists.FillLists(r.ctx, to)
		require.NoError(t, err)
		require.Positive(t, n)
		require.Equal(t, held, far.StorageInfo())
		require.Equal(t, want, r.typed(t, r.sample(t, 1, 0, seeds)))
		require.Positive(t, far.Storage().Sub(before).CachedEdges)
	}
	require.NoError(t, lists.ReleaseLists())
}

// A file of a relation that is damaged is named, when it is opened and when it is sampled.
func TestTypedOutOfCoreDamaged(t *testing.T) {
	topo := typedGraph(t)
	far := typedFar(t, topo, OutOfCoreOptions{})
	r := newRig(t, host, far, 2, typedFanouts[0], 0)
	file := far.Relations[1].far.file
	data, err := os.ReadFile(file.Path)
	require.NoError(t, err)
	other := slices.Clone(data)
	for i := 128; i < len(other); i += 8 {
		other[i] ^= 1
	}
	require.NoError(t, os.WriteFile(file.Path, other, 0o600))
	seeds := someSeeds(100, 900, 3)
	require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, 1, 0, seeds))
	err = r.s.Hop(r.ctx, r.stream, r.mb, 0)
	require.ErrorIs(t, err, ErrTopologyChanged)
	require.ErrorContains(t, err, file.Path)
	require.NoError(t, os.WriteFile(file.Path, data, 0o600))
	require.Equal(t, referenceTyped(topo, typedFanouts[0], 1, seeds),
		r.typed(t, r.sample(t, 1, 0, seeds)))

	binary.LittleEndian.PutUint64(data[128+8*10:], 500) // a paper's number, no author's
	require.NoError(t, os.WriteFile(file.Path, data, 0o600))
	x := far.Relations[1]
	lists, err := Alloc(x.NumNodes, 0, false)
	require.NoError(t, err)
	defer func() { require.NoError(t, lists.Close()) }()
	copy(lists.Indptr, x.Indptr)
	lists.NumEdges, lists.Sources = x.NumEdges, x.Sources
	_, err = OpenOutOfCore(t.Context(), lists, file, OutOfCoreOptions{})
	require.ErrorContains(t, err, "node id 500 at position 10 is outside 0..499")
}

// Mini-batches by 10,10 of a million nodes: 1,024 seeds without types, and of the same graph beside
// a type of one node; four types with seven relations, about as many drawn edges without types, and
// these of a graph that has as many edges, too.
func BenchmarkTyped(b *testing.B) {
	lists := func(dst, src, degree int64) *Topology {
		t, err := Alloc(dst, dst*degree, false)
		require.NoError(b, err)
		r := rand.New(rand.NewPCG(uint64(dst), uint64(src)))
		for i := range t.Indices32 {
			t.Indices32[i] = uint32(r.Int64N(src))
		}
		for v := range t.Indptr {
			t.Indptr[v] = int64(v) * degree
		}
		t.Sources = src
		return t
	}
	const nodes = 1 << 20
	plain := lists(nodes, nodes, 15)
	beside, err := NewTyped(&Schema{Types: []NodeType{{"node", nodes, 8}, {"other", 1, 8}},
		Relations: []Relation{{"edge", 0, 0}}}, []*Topology{plain})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, beside.Close()) })
	s := &Schema{Types: []NodeType{{"paper", 6 << 16, 8}, {"author", 8 << 16, 8},
		{"field", 1 << 16, 8}, {"venue", 1 << 10, 8}}, Relations: []Relation{{"cites", 0, 0}, {"writes", 1, 0},
		{"rev_writes", 0, 1}, {"about", 2, 0}, {"rev_about", 0, 2}, {"prints", 3, 0},
		{"rev_prints", 0, 3}}}
	var of []*Topology
	for r, degree := range []int64{12, 15, 12, 12, 72, 12, 4608} {
		x := s.Relations[r]
		of = append(of, lists(s.Types[x.Dst].Nodes, s.Types[x.Src].Nodes, degree))
	}
	many, err := NewTyped(s, of)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, many.Close()) })
	for _, c := range []struct {
		name, method string
		topo         *Topology
		seeds        int
	}{{"none", Neighbor, plain, 1024}, {"beside", Neighbor, beside, 1024},
		{"none/labor", Labor, plain, 1024}, {"beside/labor", Labor, beside, 1024},
		{"many", Neighbor, many, 1024}, {"as many", Neighbor, plain, 5900},
		{"same size", Neighbor, lists(nodes, nodes, 34), 5900}} {
		b.Run(c.name, func(b *testing.B) {
			r := newRig(b, host, c.topo, 2, SamplerConfig{Fanouts: []int{10, 10}, Seed: 7,
				Method: c.method}, directNodes)
			seeds, edges := someSeeds(16*c.seeds, 6<<16, 1), int64(0)
			batch := func(i int) []int64 { return seeds[i%16*c.seeds:][:c.seeds] }
			for i := range 16 {
				r.sample(b, 0, i, batch(i))
			}
			for i := 0; b.Loop(); i++ {
				mb := r.sample(b, 0, i, batch(i))
				edges += mb.Blocks[0].NumEdges + mb.Blocks[1].NumEdges
			}
			b.ReportMetric(float64(edges)/b.Elapsed().Seconds()/1e6, "Medges/s")
			b.ReportMetric(float64(edges)/float64(b.N), "edges/op")
		})
	}
}
