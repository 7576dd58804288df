package graph

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/simd"
	"helios/internal/testing/wide"
)

// laborModel samples by the definition: maps, big numbers, and every variate looked up once.
func laborModel(t *Topology, cfg SamplerConfig, epoch, batch int, seeds []int64) plain {
	p := plain{nodes: slices.Clone(seeds), hopEnd: []int64{int64(len(seeds))}}
	place := map[int64]int{}
	for i, v := range seeds {
		if _, ok := place[v]; !ok {
			place[v] = i
		}
	}
	for hop, fanout := range cfg.Fanouts {
		indptr, src := []int64{0}, []uint32{}
		for _, v := range slices.Clone(p.nodes) {
			var ids []int64
			for i := range t.InDegree(v) {
				ids = append(ids, t.Neighbor(v, i))
			}
			for _, i := range laborPicks(ids, int64(fanout), cfg, epoch, batch, hop) {
				u := ids[i]
				if _, ok := place[u]; !ok {
					place[u] = len(p.nodes)
					p.nodes = append(p.nodes, u)
				}
				src = append(src, uint32(place[u]))
			}
			indptr = append(indptr, int64(len(src)))
		}
		p.indptr, p.src = append(p.indptr, indptr), append(p.src, src)
		p.hopEnd = append(p.hopEnd, int64(len(p.nodes)))
	}
	if cfg.Degrees {
		for _, v := range p.nodes {
			p.degrees = append(p.degrees, uint32(t.InDegree(v)))
		}
	}
	return p
}

// laborPicks are the places in a list of nodes that a destination takes, by the definition.
func laborPicks(ids []int64, fanout int64, cfg SamplerConfig, epoch, batch,
	hop int) (list []int64) {
	word := func(key [2]uint32, ctr [4]uint32) [2]uint32 {
		w := philox.Block(key, ctr)
		return [2]uint32{w[0], w[1]}
	}
	whole := func(k [2]uint32) uint64 { return uint64(k[0]) + uint64(k[1])<<32 }
	kappa := uint64(max(cfg.Dependency, 1))
	variate := func(v int64) *big.Int {
		key := philox.Key(cfg.Seed, philox.StreamSample)
		if batch >= 0 {
			phase := philox.Mix(whole(philox.Key(cfg.Seed, philox.StreamPhase)) +
				uint64(v)*0x9E3779B97F4A7C15)
			turn := new(big.Int).Rsh(new(big.Int).Mul(new(big.Int).SetUint64(phase),
				new(big.Int).SetUint64(kappa)), 64).Uint64()
			group := (uint64(batch) + turn) / kappa
			key = word(philox.Key(cfg.Seed, philox.StreamBatch), [4]uint32{uint32(group)})
		}
		key = word(key, [4]uint32{uint32(hop), uint32(epoch)})
		return new(big.Int).SetUint64(philox.Mix(whole(key) + uint64(v)*0x9E3779B97F4A7C15))
	}
	if fanout == 0 {
		return nil
	}
	d := int64(len(ids))
	var least *big.Int
	some := false
	// r < fanout/d · 2^64, whole numbers
	below := new(big.Int).Lsh(big.NewInt(fanout), 64)
	below.Div(below, big.NewInt(max(d, 1)))
	takes := func(u int64) bool { return fanout < 0 || d <= fanout || variate(u).Cmp(below) < 0 }
	for _, u := range ids {
		some = some || takes(u)
		if r := variate(u); least == nil || r.Cmp(least) < 0 {
			least = r
		}
	}
	for i, u := range ids {
		if some && takes(u) || !some && variate(u).Cmp(least) == 0 {
			list = append(list, int64(i))
		}
	}
	return list
}

// checkLabor compares blocks with the definition's: ids of both widths, direct and hashed tables,
// fanouts that are often missed altogether, repeated seeds, shared and dependent draws.
func checkLabor(t *testing.T, open opener, nodes int64, seeds int, workers ...int) {
	for k, sms := range workers {
		for _, cfg := range []SamplerConfig{
			{Fanouts: []int{4, 3}, Degrees: true},
			{Fanouts: []int{1, 20}, Dependency: 3},
			{Fanouts: []int{2, -1}, Dependency: 1, Degrees: true},
		} {
			t.Run(fmt.Sprintf("%v, %d workers", cfg.Fanouts, sms), func(t *testing.T) {
				checkLaborOf(t, open, nodes, seeds, sms, k, cfg)
			})
		}
	}
}

func checkLaborOf(t *testing.T, open opener, nodes int64, seeds, sms, k int, cfg SamplerConfig) {
	limit := int64(directNodes)
	if k >= 2 {
		limit = 1 // hashed
	}
	topo := randomGraph(t, nodes, 15, k%2 == 1, 5)
	cfg.Method, cfg.Seed = Labor, 77
	r := newRig(t, open, topo, sms, cfg, limit)
	if h, ok := r.s.hopper.(*laborHopper); ok {
		h.grain = 50
	}
	rnd := rand.New(rand.NewPCG(uint64(nodes), 9))
	for batch := range 4 {
		ids := make([]int64, seeds)
		for i := range ids {
			ids[i] = rnd.Int64N(nodes)
		}
		index := batch
		if batch == 3 {
			index = SharedDraws(batch)
		}
		want := laborModel(topo, cfg, 2, index, ids)
		require.Equal(t, want, r.plain(t, r.sample(t, 2, index, ids)), "batch %d", batch)
	}
}

func TestLaborIsTheDefinition(t *testing.T) {
	checkLabor(t, host, 1500, 60, 1, 4, 7)
	checkLabor(t, hostGeneral, 300, 20, 2)
}

// Every set of instructions, and a GPU's kernels on the host, give the same mini-batches: lists of
// hubs, of which more is taken than a tile has room for, and which name one node again and again;
// fanouts that are missed altogether, or not reached; ids of both widths, direct and hashed.
func TestLaborLevels(t *testing.T) {
	const nodes = 3000
	r := rand.New(rand.NewPCG(18, 8))
	var src, dst []int64
	for v := range int64(nodes) {
		d, same := r.IntN(30), int64(-1)
		switch {
		case v == 5:
			d = 1<<15 + 77
		case v == 6: // all its neighbours are one, which is the least, too
			d, same = 700, 33
		case v%100 == 7:
			d = 150 + r.IntN(3000)
		case v%9 == 0:
			d = 0
		}
		for range d {
			u := same
			if u < 0 {
				u = r.Int64N(nodes)
			}
			src, dst = append(src, u), append(dst, v)
		}
	}
	seeds := append(someSeeds(300, nodes, 3), 5, 6, 5, 9, 107, 5)
	for _, wideIDs := range []bool{false, true} {
		topo, err := FromEdges(nodes, src, dst, wideIDs)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, topo.Close()) })
		for _, fanouts := range [][]int{{3, 2}, {1}, {65}, {-1}, {200}, {30000}} {
			if wide.Lean() && wideIDs && fanouts[0] > 3 {
				continue
			}
			cfg := SamplerConfig{Fanouts: fanouts, Seed: 7, Degrees: true, Method: Labor,
				Dependency: 1 + len(fanouts)*2}
			rig := newRig(t, hostGeneral, topo, 2, cfg, directNodes)
			want := rig.plain(t, rig.sample(t, 2, 3, seeds))
			for _, level := range simd.Levels() {
				for _, limit := range []int64{directNodes, 0} {
					open := func(t testing.TB, sms int) cuda.Device {
						dev, err := cuda.NewHost(cuda.HostOptions{SMs: sms, Kernels: level})
						require.NoError(t, err)
						t.Cleanup(func() { require.NoError(t, dev.Close()) })
						return dev
					}
					rig := newRig(t, open, topo, 2, cfg, limit)
					require.IsType(t, &hostLaborHopper{}, rig.s.hopper)
					require.Equal(t, want, rig.plain(t, rig.sample(t, 2, 3, seeds)),
						"%v %v wide=%v direct=%v", level, fanouts, wideIDs, limit > 0)
				}
			}
		}
	}
}

// An id that is no node fails the batch where it is taken, as it does with a GPU's kernels, from
// short lists and from those that a tile has no room for; the next batch is sampled.
func TestLaborDamagedTopology(t *testing.T) {
	for _, wideIDs := range []bool{false, true} {
		for _, fanout := range []int{1, 50, 200, -1} {
			var src, dst []int64
			for i := range int64(1000) {
				src, dst = append(src, i*7%500), append(dst, 98+i%2)
			}
			topo, err := FromEdges(500, src, dst, wideIDs)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, topo.Close()) })
			edge := topo.Indptr[99]
			bad := []int64{500}
			if wideIDs {
				bad = append(bad, -1, 1<<32, 3<<32+7)
			}
			for _, id := range bad {
				was := topo.Neighbor(99, 0)
				put := func(id int64) {
					if wideIDs {
						topo.Indices64[edge] = id
					} else {
						topo.Indices32[edge] = uint32(id)
					}
				}
				put(id)
				cfg := SamplerConfig{Fanouts: []int{fanout}, Seed: 1, Method: Labor}
				fails := func(open opener) (all []string) {
					r := newRig(t, open, topo, 2, cfg, directNodes)
					for i := range 60 {
						require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, i, 0, []int64{98, 99}))
						err := r.s.Hop(r.ctx, r.stream, r.mb, 0)
						_, text, _ := strings.Cut(fmt.Sprint(err), "sample: ") // behind the kernel
						all = append(all, text)
						if err != nil { // which the stream keeps
							r = newRig(t, open, topo, 2, cfg, directNodes)
						}
					}
					return all
				}
				want := fails(hostGeneral)
				if fanout != 1 {
					require.Contains(t, strings.Join(want, ""),
						fmt.Sprintf("id %d of edge %d: nodes are 0 to 499", id, edge))
				}
				if fanout > 0 {
					require.Contains(t, want, "", "not taken")
				}
				require.Equal(t, want, fails(host), "id %d, fanout %d", id, fanout)
				put(was)
			}
		}
	}
}

// The limit is fanout / d of all numbers of 64 bits, rounded down.
func TestLaborLimit(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 1))
	for range 10000 {
		d := 2 + r.Int64N(int64(1)<<(1+r.IntN(31)))
		k := 1 + r.Int64N(min(d-1, 1<<20))
		want := new(big.Int).Lsh(big.NewInt(k), 64)
		want.Sub(want.Div(want, big.NewInt(d)), big.NewInt(1))
		require.Equal(t, want.Uint64(), laborLimit(k, d), "%d of %d", k, d)
	}
	require.Equal(t, uint64(takeAll), laborLimit(5, 5))
	require.Equal(t, uint64(takeAll), laborLimit(-1, 1<<31))
}

// A destination's plain mean over its sampled neighbours has the mean over all of them as its
// expectation, with dependent batches and where a draw takes none too, and its sum fanout times
// that. The rule without a neighbour for certain fails here: at fanout 1 a third of the means would
// be of nothing.
func TestLaborMeansAreUnbiased(t *testing.T) {
	topo := star(t, 2, 9, 27, 200)
	x := func(v int64) float64 { return math.Sin(float64(v)*1.7) + 2 }
	batches := shortened(6000)
	for _, c := range []struct{ fanout, dependency int }{{1, 1}, {3, 1}, {3, 4}, {8, 1}} {
		r := newRig(t, host, topo, 1, SamplerConfig{Fanouts: []int{c.fanout}, Seed: 4,
			Method: Labor, Dependency: c.dependency}, directNodes)
		var mean, square, taken [4]float64
		for i := range batches {
			// Dependent batches of one epoch tell little more than one: take others.
			p := r.plain(t, r.sample(t, 1, i*c.dependency, []int64{0, 1, 2, 3}))
			for d := range mean {
				src := p.src[0][p.indptr[0][d]:p.indptr[0][d+1]]
				require.NotEmpty(t, src)
				s := 0.0
				for _, j := range src {
					s += x(p.nodes[j])
				}
				s /= float64(len(src))
				mean[d] += s
				square[d] += s * s
				taken[d] += float64(len(src))
			}
		}
		n, first := float64(batches), int64(4)
		for d, degree := range []int64{2, 9, 27, 200} {
			want := 0.0
			for k := range degree {
				want += x(first + k)
			}
			want /= float64(degree)
			m := mean[d] / n
			sigma := math.Sqrt(max(square[d]/n-m*m, 0) / n)
			require.InDelta(t, want, m, 4*sigma+1e-9, "%+v: %d in-neighbours", c, degree)
			if f := float64(c.fanout); degree > int64(c.fanout) {
				none := math.Pow(1-f/float64(degree), float64(degree))
				require.InDelta(t, f+none, taken[d]/n, 4*math.Sqrt(f/n), "%+v: edges of %d", c,
					degree)
			} else {
				require.Equal(t, float64(degree)*n, taken[d])
			}
		}
	}
}

// The frontier is much smaller than with neighbour sampling, where the mean degree is well above
// the fanouts, at about the same number of edges for each destination.
func TestLaborNeedsFewerNodes(t *testing.T) {
	topo := randomGraph(t, 20000, 60, false, 3)
	sizes := map[string]int64{}
	for _, m := range []string{Neighbor, Labor} {
		r := newRig(t, host, topo, 2, SamplerConfig{Fanouts: []int{10, 10}, Seed: 1, Method: m},
			directNodes)
		for i := range 3 {
			sizes[m] += r.sample(t, 0, i, someSeeds(500, topo.NumNodes, uint64(i))).HopEnd[2]
		}
	}
	require.Less(t, float64(sizes[Labor]), 0.8*float64(sizes[Neighbor]), "%v", sizes)
}

// Of the variates of a batch, the next one keeps all but one in κ, and the one after κ none; epochs
// share none; and a batch does not depend on those before it.
func TestLaborDependency(t *testing.T) {
	const κ, nodes = 8, 20000
	r := newRig(t, host, randomGraph(t, 100, 3, false, 1), 1, SamplerConfig{Fanouts: []int{1},
		Seed: 5, Method: Labor, Dependency: κ}, directNodes)
	h := r.s.hopper.(*hostLaborHopper)
	draw := func(epoch, batch, hop int) (v []uint64) {
		r.sample(t, epoch, batch, []int64{1})
		p := h.variates(r.mb, hop)
		vector := p.host()
		for n := range uint64(nodes) {
			v = append(v, p.variate(n))
			require.Equal(t, v[n], vector.Variate(n))
		}
		return v
	}
	kept := func(a, b []uint64) float64 {
		n := 0
		for i := range a {
			if a[i] == b[i] {
				n++
			}
		}
		return float64(n) / float64(len(a))
	}
	one := draw(0, 21, 0)
	for d := range 2 * κ {
		want := max(1-float64(d)/κ, 0)
		require.InDelta(t, want, kept(one, draw(0, 21+d, 0)), 0.02, "%d batches on", d)
		if d >= κ || d == 0 {
			require.Equal(t, want, kept(one, draw(0, 21+d, 0)))
		}
	}
	require.Zero(t, kept(one, draw(1, 21, 0)))
	require.Zero(t, kept(one, draw(0, 21, 1)))
	require.Equal(t, one, draw(0, 21, 0))
}

// With a topology on storage the blocks are those in memory; hops of two batches in turn, too. The
// lists of a hop's destinations are not read again for the next one.
func TestLaborOutOfCore(t *testing.T) {
	for _, wide := range []bool{false, true} {
		topo := randomGraph(t, 3000, 40, wide, 8)
		cfg := SamplerConfig{Fanouts: []int{5, 4, 3}, Seed: 5, Degrees: true, Method: Labor,
			Dependency: 2}
		seeds := append(someSeeds(20, topo.NumNodes, 1), 5, 5)
		want := laborModel(topo, cfg, 3, 1, seeds)
		for _, open := range []opener{host, hostGeneral} {
			far := farOf(t, topo, OutOfCoreOptions{CacheBytes: topo.NumEdges})
			r := newRig(t, open, far, 2, cfg, directNodes)
			for range 2 {
				require.Equal(t, want, r.plain(t, r.sample(t, 3, 1, seeds)))
			}
			s := far.Storage()
			require.Greater(t, s.CachedEdges, int64(0))
			require.Greater(t, s.Pages, int64(0))
			once := map[int64]bool{}
			var edges int64
			for _, v := range want.nodes[:want.hopEnd[2]] {
				if !once[v] {
					once[v] = true
					edges += topo.InDegree(v)
				}
			}
			require.Less(t, s.Edges, 2*edges+edges/10, "of two batches")

			other, err := r.s.NewMiniBatch()
			require.NoError(t, err)
			more := someSeeds(30, topo.NumNodes, 2)
			require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, 3, 1, seeds))
			require.NoError(t, r.s.Begin(r.ctx, r.stream, other, 3, 2, more))
			for h := range cfg.Fanouts {
				require.NoError(t, r.s.Hop(r.ctx, r.stream, r.mb, h))
				require.NoError(t, r.s.Hop(r.ctx, r.stream, other, h))
			}
			require.Equal(t, want, r.plain(t, r.mb))
			require.Equal(t, laborModel(topo, cfg, 3, 2, more), r.plain(t, other))
			require.NoError(t, other.Close())
		}
	}
}

func TestLaborErrors(t *testing.T) {
	topo := randomGraph(t, 100, 8, false, 2)
	dev := host(t, 1)
	dt, err := Attach(dev, topo)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dt.Close()) })
	for _, c := range []struct {
		method string
		κ      int
	}{{Labor, -1}, {Labor, MostDependency + 1}, {Neighbor, 2}, {Ladies, 2}} {
		_, err := NewSampler(dev, dt, SamplerConfig{Fanouts: []int{5}, Method: c.method,
			Dependency: c.κ})
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, fmt.Sprintf("batch dependency %d of sampler %s", c.κ,
			c.method))
	}
	require.Zero(t, dev.MemUsage()[laborPurpose])
	// Damage is found, and the next batch is sampled as ever.
	cfg := SamplerConfig{Fanouts: []int{2}, Method: Labor}
	r := newRig(t, host, topo, 1, cfg, directNodes)
	was := topo.Indptr[99]
	topo.Indptr[99] = -5
	require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, 0, 0, []int64{98}))
	require.ErrorContains(t, r.s.Hop(r.ctx, r.stream, r.mb, 0), "no offsets of the topology")
	topo.Indptr[99] = was
	r = newRig(t, host, topo, 1, cfg, directNodes)
	require.Equal(t, laborModel(topo, cfg, 0, 0, []int64{98}),
		r.plain(t, r.sample(t, 0, 0, []int64{98})))
}

// Batches of 512 seeds by 10,10: "host" is what the CPU runs, "general" the kernels of a GPU on it,
// "read" only adds the ids up of the lists that a batch reads once.
func BenchmarkLabor(b *testing.B) {
	topo, err := Synthetic(1<<18, 68, true, 5)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, topo.Close()) })
	seeds := someSeeds(1<<15, topo.NumNodes, 1)
	report := func(b *testing.B, cpu float64, in int64) {
		b.ReportMetric((cpuSeconds(b)-cpu)/float64(b.N)*1e3, "cpu-ms/op")
		b.ReportMetric(float64(in)/float64(b.N), "in-edges/op")
		b.ReportMetric((cpuSeconds(b)-cpu)*1e9/float64(in), "cpu-ns/in-edge")
	}
	lists := func(p plain) (in int64) {
		for hop := range len(p.hopEnd) - 1 {
			for _, v := range p.nodes[:p.hopEnd[hop]] {
				in += topo.InDegree(v)
			}
		}
		return in
	}
	for _, c := range []struct {
		name, method string
		open         opener
		κ            int
	}{{"neighbor/host", Neighbor, host, 1}, {"labor/general", Labor, hostGeneral, 1},
		{"labor/host", Labor, host, 1}, {"labor16/general", Labor, hostGeneral, 16},
		{"labor16/host", Labor, host, 16}} {
		b.Run(c.name, func(b *testing.B) {
			r := newRig(b, c.open, topo, 1, SamplerConfig{Fanouts: []int{10, 10}, Seed: 7,
				Method: c.method, Dependency: c.κ}, directNodes)
			in := int64(0)
			for i := range 64 {
				in += lists(r.plain(b, r.sample(b, 0, i, seeds[i%64*512:][:512])))
			}
			cpu := cpuSeconds(b)
			for i := 0; b.Loop(); i++ {
				r.sample(b, 0, i, seeds[i%64*512:][:512])
			}
			report(b, cpu, in*int64(b.N)/64)
		})
	}
	b.Run("read", func(b *testing.B) {
		r := newRig(b, host, topo, 1, SamplerConfig{Fanouts: []int{10, 10}, Seed: 7,
			Method: Labor}, directNodes)
		p := r.plain(b, r.sample(b, 0, 1, seeds[512:1024]))
		in, sum := lists(p), uint32(0)
		cpu := cpuSeconds(b)
		for b.Loop() {
			for hop := range len(p.hopEnd) - 1 {
				for _, v := range p.nodes[:p.hopEnd[hop]] {
					for _, id := range topo.Indices32[topo.Indptr[v]:topo.Indptr[v+1]] {
						sum += id
					}
				}
			}
		}
		require.NotZero(b, sum+1)
		report(b, cpu, in*int64(b.N))
	})
}
