package graph

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/testing/difftest"
	"helios/internal/testing/wide"
)

// layerModel samples a hop by the definition: maps, a sort, and the library's logarithm.
func layerModel(t *Topology, seed uint64, epoch, batch, hop int, frontier []int64,
	take int) (nodes []int64, indptr []int64, src []uint32, weights []float64) {
	dst := map[int64]int{}
	for i, v := range frontier {
		if _, ok := dst[v]; !ok {
			dst[v] = i
		}
	}
	shift := uint(63)
	for n := len(frontier); n > 0; n /= 2 {
		shift--
	}
	mass := map[int64]uint64{}
	for _, v := range frontier {
		d := t.InDegree(v)
		for i := range d {
			mass[t.Neighbor(v,
				i)] += max(uint64(math.Floor(math.Ldexp(1, int(shift))/float64(d)/float64(d))), 1)
		}
	}
	type candidate struct {
		v   int64
		key float64
	}
	var all []candidate
	key := philox.Key(seed, philox.StreamLayer)
	for v, q := range mass {
		w := philox.Block(key, [4]uint32{uint32(v), uint32(uint64(v)>>32) | uint32(hop)<<16,
			uint32(epoch), uint32(batch)})
		u := (float64((uint64(w[1])<<32|uint64(w[0]))>>12) + 0.5) / (1 << 52)
		all = append(all, candidate{v, -math.Log(u) / float64(q)})
	}
	sort.Slice(all, func(i, j int) bool { return all[i].key < all[j].key })
	tau := math.Inf(1)
	if take >= 0 && take < len(all) {
		tau = all[take].key
		all = all[:take]
	}
	chosen := map[int64]bool{}
	for _, c := range all {
		chosen[c.v] = true
	}
	nodes, indptr = slices.Clone(frontier), []int64{0}
	for range frontier {
		weights = append(weights, 1)
	}
	for _, v := range frontier {
		for i := range t.InDegree(v) {
			j := t.Neighbor(v, i)
			index, there := dst[j]
			if !there && !chosen[j] {
				continue
			}
			if !there {
				index = len(nodes)
				dst[j] = index
				nodes = append(nodes, j)
				weights = append(weights, -1/math.Expm1(-float64(mass[j])*tau))
			}
			src = append(src, uint32(index))
		}
		indptr = append(indptr, int64(len(src)))
	}
	return nodes, indptr, src, weights
}

func weightsOf(t testing.TB, r *rig, mb *MiniBatch) (w [][]float32) {
	for _, b := range mb.Blocks {
		require.NotNil(t, b.Weights)
		x, err := difftest.Download[float32](r.ctx, r.dev, r.stream, b.Weights.Ptr(), b.NumSrc)
		require.NoError(t, err)
		w = append(w, x)
	}
	return w
}

// Blocks are those of the definition, with any number of workers, direct and hashed tables, ids of
// both widths, and repeated seeds, and to the bit the same in all of them.
func TestLayerwiseIsTheDefinition(t *testing.T) {
	for _, c := range []struct {
		nodes   int64
		avg     float64
		takes   []int
		seeds   int
		degrees bool
	}{
		{300, 6, []int{20, 30}, 10, true},
		{2000, 12, []int{64, 1, 200}, 40, false},
		{2000, 3, []int{-1, 100}, 30, true},
		{50, 10, []int{40, 1 << 30}, 20, false},
	} {
		var want plain
		var wantWeights [][]float32
		for k, sms := range []int{1, 4, 7, 2} {
			wide, limit, open := k%2 == 1, int64(directNodes), host
			if k >= 2 {
				limit = 1 // hashed
			}
			if k == 3 {
				open = hostGeneral
			}
			topo := randomGraph(t, c.nodes, c.avg, wide, 5)
			r := newRig(t, open, topo, sms, SamplerConfig{Fanouts: c.takes, Seed: 77,
				Degrees: c.degrees, Method: Ladies}, limit)
			r.s.hopper.(*layerHopper).grain = 50
			rnd := rand.New(rand.NewPCG(uint64(c.nodes), 9))
			for batch := range 3 {
				seeds := make([]int64, c.seeds)
				for i := range seeds {
					seeds[i] = rnd.Int64N(c.nodes)
				}
				seeds[1] = seeds[0]
				mb := r.sample(t, 3, batch, seeds)
				p, w := r.plain(t, mb), weightsOf(t, r, mb)
				frontier := seeds
				for h, take := range c.takes {
					nodes, indptr, src, weights := layerModel(topo, 77, 3, batch, h, frontier, take)
					require.Equal(t, nodes, p.nodes[:p.hopEnd[h+1]], "hop %d", h)
					require.Equal(t, indptr, p.indptr[h])
					require.Equal(t, len(src), len(p.src[h]))
					for e := range src {
						require.Equal(t, src[e], p.src[h][e])
					}
					require.Equal(t, len(weights), len(w[h]))
					for j := range weights {
						require.InEpsilon(t, weights[j], w[h][j], 2e-7, "weight %d", j)
					}
					if take >= 0 {
						require.LessOrEqual(t, p.hopEnd[h+1], p.hopEnd[h]+int64(take))
					}
					frontier = nodes
				}
				if c.degrees {
					for i, v := range p.nodes {
						require.Equal(t, uint32(topo.InDegree(v)), p.degrees[i])
					}
				}
				if batch == 2 {
					if k == 0 {
						want, wantWeights = p, w
					}
					require.Equal(t, want, p)
					require.Equal(t, wantWeights, w)
				}
			}
		}
	}
}

// checkLayerwise compares batches on a device, direct and hashed, with those of the host, to the
// bit.
func checkLayerwise(t *testing.T, open opener, nodes int64, takes []int) {
	for _, limit := range []int64{directNodes, 1} {
		t.Run(fmt.Sprintf("direct up to %d", limit), func(t *testing.T) {
			topo := randomGraph(t, nodes, 8, nodes%200 == 0, 3)
			cfg := SamplerConfig{Fanouts: takes, Seed: 12, Degrees: limit == 1, Method: Ladies}
			r, want := newRig(t, open, topo, 3, cfg, limit), newRig(t, host, topo, 1, cfg,
				directNodes)
			for batch := range 2 {
				seeds := []int64{nodes - 1, 3, nodes / 2, nodes - 1, 10}
				mb, ref := r.sample(t, 1, batch, seeds), want.sample(t, 1, batch, seeds)
				require.Equal(t, want.plain(t, ref), r.plain(t, mb))
				require.Equal(t, weightsOf(t, want, ref), weightsOf(t, r, mb))
			}
		})
	}
}

// With room for all candidates a layer is the whole neighbourhood, with equal weights.
func TestLayerwiseOfAllIsFullNeighbourhood(t *testing.T) {
	topo := randomGraph(t, 500, 5, false, 8)
	all := newRig(t, host, topo, 2, SamplerConfig{Fanouts: []int{-1, -1}, Seed: 1}, directNodes)
	layers := newRig(t, host, topo, 2, SamplerConfig{Fanouts: []int{400, -1}, Seed: 2,
		Method: Ladies}, directNodes)
	seeds := []int64{499, 3, 480, 77, 10}
	want := all.plain(t, all.sample(t, 0, 0, seeds))
	mb := layers.sample(t, 0, 0, seeds)
	require.Equal(t, want, layers.plain(t, mb))
	for _, w := range weightsOf(t, layers, mb) {
		for _, x := range w {
			require.EqualValues(t, 1, x)
		}
	}
}

// star is a graph in which seeds 0 … len(degrees)-1 have those in-degrees, with in-neighbours that
// overlap.
func star(t *testing.T, degrees ...int) *Topology {
	base, nodes := int64(len(degrees)), int64(len(degrees))
	var src, dst []int64
	for i, d := range degrees {
		for k := range d {
			src, dst = append(src, base+int64(k)), append(dst, int64(i))
			nodes = max(nodes, base+int64(k)+1)
		}
	}
	topo, err := FromEdges(nodes, src, dst, false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, topo.Close()) })
	return topo
}

// shortened is n, or a quarter of it in short tests.
func shortened(n int) int {
	if wide.Lean() {
		return n / 4
	}
	return n
}

// A single draw takes each candidate with probability q / Σ q.
func TestLayerwiseDrawsByMass(t *testing.T) {
	topo := star(t, 2, 4, 8)
	r := newRig(t, host, topo, 1, SamplerConfig{Fanouts: []int{1}, Seed: 3, Method: Ladies},
		directNodes)
	mass := make([]float64, 8)
	total := 0.0
	for _, d := range []int{2, 4, 8} {
		for k := range d {
			mass[k] += 1 / float64(d*d)
			total += 1 / float64(d*d)
		}
	}
	batches := shortened(4000)
	counts := make([]int, 8)
	for i := range batches {
		mb := r.sample(t, 0, i, []int64{0, 1, 2})
		counts[r.plain(t, mb).nodes[3]-3]++
	}
	chi := 0.0
	for k, n := range counts {
		want := float64(batches) * mass[k] / total
		chi += (float64(n) - want) * (float64(n) - want) / want
	}
	require.Less(t, chi, 24.3, "chi-square of 7 degrees of freedom, 1 in 1000: %v", counts)
}

// A destination's sum of Weights[j] x_j over its sampled in-neighbours has the sum over all of them
// as its mean.
func TestLayerwiseWeightsAreUnbiased(t *testing.T) {
	topo := star(t, 3, 9, 27)
	r := newRig(t, host, topo, 1, SamplerConfig{Fanouts: []int{6}, Seed: 4, Method: Ladies},
		directNodes)
	x := func(v int64) float64 { return math.Sin(float64(v)) + 2 }
	batches := shortened(4000)
	var sum, square [3]float64
	for i := range batches {
		mb := r.sample(t, 1, i, []int64{0, 1, 2})
		p, w := r.plain(t, mb), weightsOf(t, r, mb)[0]
		for d := range sum {
			s := 0.0
			for _, j := range p.src[0][p.indptr[0][d]:p.indptr[0][d+1]] {
				s += float64(w[j]) * x(p.nodes[j])
			}
			sum[d] += s
			square[d] += s * s
		}
	}
	for d, degree := range []int64{3, 9, 27} {
		want := 0.0
		for k := range degree {
			want += x(3 + k)
		}
		mean := sum[d] / float64(batches)
		sigma := math.Sqrt((square[d]/float64(batches) - mean*mean) / float64(batches))
		require.InDelta(t, want, mean, 4*sigma, "destination of %d in-neighbours", degree)
	}
}

// Batches differ, epochs differ, and a batch does not depend on those before it.
func TestLayerwiseDependsOnEpochAndBatch(t *testing.T) {
	topo := randomGraph(t, 3000, 20, false, 2)
	seeds := []int64{2999, 2500, 2001, 1777}
	sample := func(batches ...[2]int) plain {
		r := newRig(t, host, topo, 1, SamplerConfig{Fanouts: []int{30}, Seed: 5, Method: Ladies},
			directNodes)
		var p plain
		for _, b := range batches {
			p = r.plain(t, r.sample(t, b[0], b[1], seeds))
		}
		return p
	}
	one := sample([2]int{0, 1})
	require.Equal(t, one, sample([2]int{3, 4}, [2]int{0, 0}, [2]int{0, 1}))
	require.NotEqual(t, one.nodes, sample([2]int{0, 2}).nodes)
	require.NotEqual(t, one.nodes, sample([2]int{1, 1}).nodes)
}

func TestLayerwiseErrors(t *testing.T) {
	topo := randomGraph(t, 100, 4, false, 2)
	dev := host(t, 1)
	dt, err := Attach(dev, topo)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dt.Close()) })
	for _, f := range []int{0, -2, mostLayer + 1} {
		_, err := NewSampler(dev, dt, SamplerConfig{Fanouts: []int{5, f}, Method: Ladies})
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
		require.ErrorContains(t, err,
			fmt.Sprintf("fanout %d of hop 1: must be 1 to %d nodes of a layer", f, mostLayer))
	}
	require.Zero(t, dev.MemUsage()[layerPurpose])
	// Offsets that are none are found, and the next batch is sampled as ever.
	r := newRig(t, host, topo, 1, SamplerConfig{Fanouts: []int{5}, Method: Ladies}, directNodes)
	was := topo.Indptr[99]
	topo.Indptr[99] = -5
	require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, 0, 0, []int64{98}))
	require.ErrorContains(t, r.s.Hop(r.ctx, r.stream, r.mb, 0), "no offsets of the topology")
	topo.Indptr[99] = was
}

// Lists of hubs that memory has no room for are refused as a whole, with what to do; and the next
// batch is sampled as ever.
func TestLayerwiseMemory(t *testing.T) {
	defer func(was func() (int64, error),
		from int64) {
		availableBytes, layerCheck = was, from
	}(availableBytes, layerCheck)
	const edges = 1 << 12
	layerCheck = 1
	topo, err := Alloc(edges+1, edges, false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, topo.Close()) })
	for i := range topo.Indices32 {
		topo.Indptr[i+1], topo.Indices32[i] = edges, uint32(i+1)
	}
	topo.Indptr[edges+1] = edges
	for name, topo := range map[string]*Topology{"memory": topo,
		"storage": farOf(t, topo, OutOfCoreOptions{})} {
		r := newRig(t, host, topo, 2, SamplerConfig{Fanouts: []int{5}, Method: Ladies}, directNodes)
		// 24 bytes an in-edge and a quarter more, the table, and 4 for lists that are read from
		// storage.
		for _, free := range []int64{edges, 24 * edges, 30 * edges} {
			availableBytes = func() (int64, error) { return free, nil }
			require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, 0, 0, []int64{0}))
			err := r.s.Hop(r.ctx, r.stream, r.mb, 0)
			require.Equal(t, errs.Usage, errs.ClassOf(err), name)
			require.ErrorContains(t, err, "4096 in-edges of 1 nodes")
			require.ErrorContains(t, err, "option batch-size")
		}
		availableBytes = func() (int64, error) { return 100 * edges, nil }
		require.Equal(t, []int64{1, 6}, r.sample(t, 0, 0, []int64{0}).HopEnd)
	}
}

// Nodes without in-neighbours alone make an empty block.
func TestLayerwiseOfNothing(t *testing.T) {
	topo := star(t, 0, 0, 2)
	r := newRig(t, host, topo, 3, SamplerConfig{Fanouts: []int{5, 5}, Degrees: true,
		Method: Ladies}, directNodes)
	p := r.plain(t, r.sample(t, 0, 0, []int64{0, 1}))
	require.Equal(t, []int64{2, 2, 2}, p.hopEnd)
	require.Equal(t, [][]int64{{0, 0, 0}, {0, 0, 0}}, p.indptr)
}

func TestLayerArithmetic(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		u := (float64(r.Uint64()>>12) + 0.5) / (1 << 52)
		if r.IntN(3) == 0 {
			u = math.Ldexp(u, -r.IntN(52))
		}
		require.InEpsilon(t, math.Log(u), logOf(u), 4e-16)
		x := -r.ExpFloat64() * math.Ldexp(1, r.IntN(12)-3)
		if x > -700 {
			require.InEpsilon(t, math.Exp(x), expDown(x), 1e-15)
		}
	}
	require.Equal(t, 1.0, expDown(0))
	require.Zero(t, expDown(math.Inf(-1)))
	require.Less(t, 0.0, exponential(math.MaxUint64))
	require.Less(t, exponential(0), 40.0)
	// (A drawn node has x above its own variable, so above 1e-16.) From one formula of small x to
	// the other the weight has no step.
	for _, x := range []float64{2e-16, 1e-9, 1.0 / (1 << 20), 1.0000001 / (1 << 20), 1e-3, 1, 50} {
		w := layerWeight(1<<40, math.Float64bits(math.Ldexp(x, -40)))
		require.InEpsilon(t, float32(-1/math.Expm1(-x)), w, 2e-7, "%g", x)
	}
	require.EqualValues(t, 1, layerWeight(1, noRank))
}

func BenchmarkLayerwise(b *testing.B) {
	for _, name := range []string{"even", "skewed"} {
		topo, err := Synthetic(1<<20, 15, name == "skewed", 5)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, topo.Close()) })
		for _, limit := range []int64{directNodes, 0} {
			for _, sms := range []int{1, 2} {
				b.Run(fmt.Sprintf("%s/direct=%v/workers=%d", name, limit > 0, sms),
					func(b *testing.B) {
						r := newRig(b, host, topo, sms,
							SamplerConfig{Fanouts: []int{4096, 4096, 4096},
								Seed: 7, Method: Ladies}, limit)
						seeds := someSeeds(1<<16, topo.NumNodes, 1)
						edges := int64(0)
						b.ReportAllocs()
						cpu := cpuSeconds(b)
						for i := 0; b.Loop(); i++ {
							mb := r.sample(b, i, 0, seeds[i%64*1024:][:1024])
							// of all hops, the last one's destinations
							for _, v := range r.plain(b, mb).nodes[:mb.HopEnd[2]] {
								edges += topo.InDegree(v)
							}
						}
						b.ReportMetric(float64(edges)/b.Elapsed().Seconds()/1e6, "Mlists/s")
						b.ReportMetric(float64(edges)/(cpuSeconds(b)-cpu)/1e6, "Mlists/cpu-s")
					})
			}
		}
	}
}
