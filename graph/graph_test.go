package graph

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/philox"
	"helios/internal/simd"
	"helios/internal/testing/difftest"
	"helios/internal/testing/wide"
)

// randomGraph has skewed degrees: node v gets about avg*2*v/nodes in-edges, every tenth node none.
func randomGraph(t testing.TB, nodes int64, avg float64, wide bool, seed uint64) *Topology {
	r := rand.New(rand.NewPCG(seed, 1))
	var src, dst []int64
	for v := range nodes {
		if v%10 == 0 {
			continue
		}
		for range int(2 * avg * float64(v) / float64(nodes) * (0.5 + r.Float64())) {
			src, dst = append(src, r.Int64N(nodes)), append(dst, v)
		}
	}
	topo, err := FromEdges(nodes, src, dst, wide)
	require.NoError(t, err)
	require.NoError(t, topo.Validate())
	t.Cleanup(func() { require.NoError(t, topo.Close()) })
	return topo
}

func host(t testing.TB, sms int) cuda.Device {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: sms})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	return dev
}

// general is a host device that samples with the kernels that a GPU has.
type general struct{ cuda.Device }

func (g general) Info() cuda.Info {
	i := g.Device.Info()
	i.Backend = "general"
	return i
}

func hostGeneral(t testing.TB, sms int) cuda.Device { return general{host(t, sms)} }

func ctxFor(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

type rig struct {
	ctx    context.Context
	dev    cuda.Device
	stream cuda.Stream
	s      *Sampler
	mb     *MiniBatch
}

// opener makes a device that the test closes.
type opener func(t testing.TB, sms int) cuda.Device

func newRig(t testing.TB, open opener, topo *Topology, sms int, cfg SamplerConfig,
	directLimit int64) *rig {
	r := &rig{ctx: ctxFor(t), dev: open(t, sms)}
	dt, err := Attach(r.dev, topo)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dt.Close()) })
	r.stream, err = r.dev.NewStream(cuda.StreamOptions{Name: "sample"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.stream.Close()) })
	r.s, err = newSampler(r.dev, dt, cfg, directLimit)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.s.Close()) })
	r.mb, err = r.s.NewMiniBatch()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.mb.Close()) })
	return r
}

func (r *rig) sample(t testing.TB, epoch, index int, seeds []int64) *MiniBatch {
	require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, epoch, index, seeds))
	for h := range r.s.cfg.Fanouts {
		require.NoError(t, r.s.Hop(r.ctx, r.stream, r.mb, h))
	}
	return r.mb
}

// positionsOf returns the position table of a sampler that has one.
func positionsOf(s *Sampler) *positions {
	switch h := s.hopper.(type) {
	case *hostHopper:
		return &h.positions
	case *deviceHopper:
		return &h.positions
	case *laborHopper:
		return &h.positions
	case *hostLaborHopper:
		return &h.positions
	}
	panic("a hopper without a position table of its own")
}

// plain is a mini-batch as Go values.
type plain struct {
	nodes   []int64
	degrees []uint32
	hopEnd  []int64
	indptr  [][]int64
	src     [][]uint32
}

// read copies a mini-batch off any device.
func read(ctx context.Context, dev cuda.Device, st cuda.Stream, mb *MiniBatch) (p plain,
	err error) {
	n := mb.HopEnd[len(mb.HopEnd)-1]
	p.hopEnd = slices.Clone(mb.HopEnd)
	if p.nodes, err = difftest.Download[int64](ctx, dev, st, mb.Nodes.Ptr(), n); err != nil {
		return p, err
	}
	if mb.Degrees != nil {
		if p.degrees, err = difftest.Download[uint32](ctx, dev, st, mb.Degrees.Ptr(),
			n); err != nil {
			return p, err
		}
	}
	for _, b := range mb.Blocks {
		indptr, err := difftest.Download[int64](ctx, dev, st, b.Indptr.Ptr(), b.NumLists()+1)
		if err != nil {
			return p, err
		}
		src, err := difftest.Download[uint32](ctx, dev, st, b.Src.Ptr(), b.NumEdges)
		if err != nil {
			return p, err
		}
		p.indptr, p.src = append(p.indptr, indptr), append(p.src, src)
	}
	return p, nil
}

func (r *rig) plain(t testing.TB, mb *MiniBatch) plain {
	p, err := read(r.ctx, r.dev, r.stream, mb)
	require.NoError(t, err)
	return p
}

// reference samples with maps, and draws by its own reading of Floyd's algorithm, for batch 0 or
// the one that is given (below 0: draws that batches share).
func reference(topo *Topology, cfg SamplerConfig, epoch int, seeds []int64, batch ...int) plain {
	p := plain{nodes: slices.Clone(seeds), hopEnd: []int64{int64(len(seeds))}}
	place := map[int64]int{}
	for i, v := range seeds {
		if _, ok := place[v]; !ok {
			place[v] = i
		}
	}
	var index uint32
	key := philox.Key(cfg.Seed, philox.StreamSample)
	if len(batch) > 0 {
		index = uint32(batch[0])
	}
	if len(batch) == 0 || batch[0] >= 0 {
		w := philox.Block(philox.Key(cfg.Seed, philox.StreamBatch), [4]uint32{index, 0, 0, 0})
		key = [2]uint32{w[0], w[1]}
	}
	for hop, fanout := range cfg.Fanouts {
		indptr, src := []int64{0}, []uint32{}
		for _, v := range slices.Clone(p.nodes) {
			d := topo.InDegree(v)
			var picks []int64
			if fanout < 0 || d <= int64(fanout) {
				for i := range d {
					picks = append(picks, i)
				}
			} else {
				taken := map[int64]bool{}
				for i := range int64(fanout) {
					w := philox.Block(key, [4]uint32{uint32(v), uint32(v >> 32), uint32(epoch),
						uint32(hop)<<24 | uint32(i/2)})
					r := uint64(w[2*(i%2)+1])<<32 | uint64(w[2*(i%2)])
					j := d - int64(fanout) + i
					c := int64(philox.Bounded(r, uint64(j+1)))
					if taken[c] {
						c = j
					}
					taken[c] = true
					picks = append(picks, c)
				}
			}
			for _, i := range picks {
				u := topo.Neighbor(v, i)
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
			p.degrees = append(p.degrees, uint32(topo.InDegree(v)))
		}
	}
	return p
}

func someSeeds(n int, nodes int64, seed uint64) []int64 {
	r := rand.New(rand.NewPCG(seed, 2))
	s := make([]int64, 0, n)
	for _, v := range r.Perm(int(nodes))[:n] {
		s = append(s, int64(v))
	}
	return s
}

// Every combination of id width, table, workers and fanouts against the reference, several
// batches through the same buffers, so that stale table entries and old sizes would show.
func TestBlocksEqualReference(t *testing.T) {
	checkBlocksEqualReference(t, host, 3000, []int{100, 1, 700, 256, 100}, 1, 2, 3, 4)
}

// The kernels that a GPU has, on the host; internal/testing/difftest compares them with CUDA's.
func TestGeneralKernels(t *testing.T) {
	checkBlocksEqualReference(t, hostGeneral, 600, []int{60, 1, 150, 60}, 3)
	checkManyRepeatedSeeds(t, hostGeneral)
	checkStampsWrap(t, hostGeneral)
}

// Every set of instructions gives the same mini-batches: rows longer than a chunk, than 2^16,
// isolated nodes, seeds that stand several times, and as many draws as are and are not compared
// with each other.
func TestLevels(t *testing.T) {
	const nodes = 3000
	var src, dst []int64
	r := rand.New(rand.NewPCG(8, 8))
	for v := range int64(nodes) {
		d := r.IntN(30)
		switch {
		case v == 5:
			d = 1<<16 + 77
		case v%100 == 7:
			d = 150 + r.IntN(3000)
		case v%9 == 0:
			d = 0
		}
		for range d {
			src, dst = append(src, r.Int64N(nodes)), append(dst, v)
		}
	}
	seeds := append(someSeeds(300, nodes, 3), 5, 5, 9, 107, 5)
	for _, wideIDs := range []bool{false, true} {
		topo, err := FromEdges(nodes, src, dst, wideIDs)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, topo.Close()) })
		for _, fanouts := range [][]int{{15, 10, 5}, {64, 7}, {65}, {-1}, {200}, {70000}} {
			if wide.Lean() && wideIDs {
				continue
			}
			cfg := SamplerConfig{Fanouts: fanouts, Seed: 7, Degrees: true}
			want := reference(topo, cfg, 2, seeds)
			for _, level := range simd.Levels() {
				for _, limit := range []int64{directNodes, 0} {
					open := func(t testing.TB, sms int) cuda.Device {
						dev, err := cuda.NewHost(cuda.HostOptions{SMs: sms, Kernels: level})
						require.NoError(t, err)
						t.Cleanup(func() { require.NoError(t, dev.Close()) })
						return dev
					}
					rig := newRig(t, open, topo, 2, cfg, limit)
					require.Equal(t, want, rig.plain(t, rig.sample(t, 2, 0, seeds)),
						"%v %v wide=%v direct=%v", level, fanouts, wideIDs, limit > 0)
				}
			}
		}
	}
}

// A damaged topology fails the batch and names what is wrong; the next batch is sampled.
func TestDamagedTopology(t *testing.T) {
	for _, level := range simd.Levels() {
		for _, fanout := range []int{5, -1} {
			topo := randomGraph(t, 500, 20, false, 5)
			dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2, Kernels: level})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, dev.Close()) })
			for spoil, want := range map[*func()]string{
				ptr(func() { topo.Indices32[topo.Indptr[99]] = 500 }): fmt.Sprintf(
					"sample: id 500 of edge %d: nodes are 0 to 499", topo.Indptr[99]),
				ptr(
					func() { topo.Indptr[99] = 1 << 40 }): "are no offsets of the topology",
			} {
				before := slices.Clone(topo.Indptr)
				ids := slices.Clone(topo.Indices32)
				(*spoil)()
				rig := newRig(t, func(testing.TB, int) cuda.Device { return dev }, topo, 2,
					SamplerConfig{Fanouts: []int{fanout, 3}, Seed: 1}, directNodes)
				seeds := []int64{98, 99, 100}
				failed := false
				for i := 0; i < 40 && !failed; i++ { // until the edge is drawn
					require.NoError(t, rig.s.Begin(rig.ctx, rig.stream, rig.mb, i, 0, seeds))
					if err := rig.s.Hop(rig.ctx, rig.stream, rig.mb, 0); err != nil {
						require.ErrorContains(t, err, want)
						failed = true
					}
				}
				require.True(t, failed, "%s was not found", want)
				copy(topo.Indptr, before)
				copy(topo.Indices32, ids)
			}
		}
	}
}

func ptr[T any](v T) *T { return &v }

func checkBlocksEqualReference(t *testing.T, open opener, nodes int64, batches []int,
	workers ...int) {
	for _, wideIDs := range []bool{false, true} {
		topo := randomGraph(t, nodes, 15, wideIDs, 5)
		for _, fanouts := range [][]int{{10, 10}, {3}, {-1, -1}, {5, -1, 2}, {40, 1}} {
			for _, limit := range []int64{directNodes, 0} {
				for _, sms := range workers {
					if len(workers) > 1 && (wide.Lean() || wideIDs) && sms%3 != 1 {
						continue // 1 and 4 remain
					}
					t.Run(fmt.Sprintf("wide=%v fanouts=%v direct=%v sms=%d", wideIDs, fanouts,
						limit > 0, sms), func(t *testing.T) {
						cfg := SamplerConfig{Fanouts: fanouts, Seed: 7, Degrees: true}
						r := newRig(t, open, topo, sms, cfg, limit)
						for batch, n := range batches {
							seeds := someSeeds(n, nodes, uint64(batch%4))
							got := r.plain(t, r.sample(t, 1+batch/4, batch, seeds))
							want := reference(topo, cfg, 1+batch/4, seeds, batch)
							require.Equal(t, want, got)
						}
					})
				}
			}
		}
	}
}

func TestRepeatedSeedsAndSelfLoops(t *testing.T) { checkRepeatedSeedsAndSelfLoops(t, host) }

func checkRepeatedSeedsAndSelfLoops(t *testing.T, open opener) {
	graph := func() *Topology {
		topo, err := FromEdges(5, []int64{0, 1, 1, 2, 3, 0}, []int64{0, 0, 0, 1, 1, 3}, false)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, topo.Close()) }) // after the device has released it
		return topo
	}
	topo := graph()
	cfg := SamplerConfig{Fanouts: []int{-1, -1}, Seed: 1}
	r := newRig(t, open, topo, 2, cfg, directNodes)
	seeds := []int64{1, 0, 1, 4}
	got := r.plain(t, r.sample(t, 0, 0, seeds))
	require.Equal(t, reference(topo, cfg, 0, seeds), got)
	require.Equal(t, []int64{1, 0, 1, 4, 2, 3}, got.nodes)
	require.Equal(t, []int64{0, 2, 5, 7, 7}, got.indptr[0]) // node 4 has no in-neighbours
	require.Equal(t, []uint32{4, 5, 1, 0, 0, 4, 5}, got.src[0])
	// Degrees without edges of a node to itself: 0 has one among its three, 3 and 1 have none.
	again := cfg
	again.Degrees, again.Loopless = true, true
	for name, topo := range map[string]*Topology{"memory": graph(),
		"storage": farOf(t, topo, OutOfCoreOptions{Loopless: true})} {
		t.Run(name, func(t *testing.T) {
			got := newRig(t, open, topo, 2, again, directNodes)
			p := got.plain(t, got.sample(t, 0, 0, seeds))
			require.Equal(t, []int64{1, 0, 1, 4, 2, 3}, p.nodes)
			require.Equal(t, []uint32{2, 2, 2, 0, 0, 1}, p.degrees)
		})
	}
}

// Degrees leave out edges to the node itself by every method, for ids of both widths and batches
// in turns; a graph without such edges has no table of degrees.
func TestLooplessDegrees(t *testing.T) {
	for _, wide := range []bool{false, true} {
		topo := randomGraph(t, 40, 800, wide, 3)
		for _, m := range Methods() {
			fanouts := []int{5, 7}
			r := newRig(t, host, topo, 3, SamplerConfig{Method: m.Name, Fanouts: fanouts, Seed: 2,
				Degrees: true, Loopless: true}, directNodes)
			other, err := r.s.NewMiniBatch()
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, other.Close()) })
			first := r.mb
			for batch, mb := range []*MiniBatch{first, other, first} {
				r.mb = mb
				p := r.plain(t, r.sample(t, 1, batch, []int64{3, 39, int64(batch)}))
				loops := 0
				for i, v := range p.nodes {
					own := topo.loops(v, v+1, nil)
					require.EqualValues(t, topo.InDegree(v)-own, p.degrees[i])
					loops += int(own)
				}
				require.Positive(t, loops)
			}
		}
	}
	plain, err := FromEdges(3, []int64{1, 2}, []int64{0, 1}, false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, plain.Close()) })
	r := newRig(t, host, plain, 1, SamplerConfig{Fanouts: []int{2}, Degrees: true, Loopless: true},
		directNodes)
	require.Nil(t, r.s.loopless)
	require.Equal(t, []uint32{1, 1}, r.plain(t, r.sample(t, 0, 0, []int64{0})).degrees)
}

// Seeds that stand many times bring more edges than the graph has, and a frontier larger than its
// nodes.
func TestManyRepeatedSeeds(t *testing.T) { checkManyRepeatedSeeds(t, host) }

func checkManyRepeatedSeeds(t *testing.T, open opener) {
	topo := randomGraph(t, 20, 30, false, 6)
	for _, fanout := range []int{-1, 1000, 3} {
		t.Run(fmt.Sprint(fanout), func(t *testing.T) {
			cfg := SamplerConfig{Fanouts: []int{fanout, fanout}, Seed: 1, Degrees: true}
			r := newRig(t, open, topo, 2, cfg, directNodes)
			for batch, seeds := range [][]int64{{3, 4}, slices.Repeat([]int64{3, 19, 4},
				300), {19}} {
				require.Equal(t, reference(topo, cfg, 0, seeds, batch),
					r.plain(t, r.sample(t, 0, batch, seeds)))
			}
		})
	}
}

func TestNoEdges(t *testing.T) { checkNoEdges(t, host) }

func checkNoEdges(t *testing.T, open opener) {
	for _, wide := range []bool{false, true} {
		t.Run(fmt.Sprintf("wide=%v", wide), func(t *testing.T) {
			topo, err := FromEdges(3, nil, nil, wide)
			require.NoError(t, err)
			require.NoError(t, topo.Validate())
			t.Cleanup(func() { require.NoError(t, topo.Close()) })
			r := newRig(t, open, topo, 2, SamplerConfig{Fanouts: []int{4, -1}, Degrees: true},
				directNodes)
			got := r.plain(t, r.sample(t, 0, 0, []int64{2, 0}))
			require.Equal(t, []int64{2, 0}, got.nodes)
			require.Equal(t, []int64{2, 2, 2}, got.hopEnd)
			require.Empty(t, got.src[1])
		})
	}
}

// Two mini-batches whose hops alternate through one sampler give what each gives alone.
func TestAlternatingBatches(t *testing.T) { checkAlternatingBatches(t, host) }

func checkAlternatingBatches(t *testing.T, open opener) {
	topo := randomGraph(t, 2000, 12, false, 9)
	cfg := SamplerConfig{Fanouts: []int{5, 5, 5}, Seed: 3}
	for _, limit := range []int64{directNodes, 0} {
		t.Run(fmt.Sprintf("direct=%v", limit > 0), func(t *testing.T) {
			r := newRig(t, open, topo, 2, cfg, limit)
			other, err := r.s.NewMiniBatch()
			require.NoError(t, err)
			a, b := someSeeds(64, 2000, 1), someSeeds(64, 2000, 2)
			require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, 0, 0, a))
			require.NoError(t, r.s.Begin(r.ctx, r.stream, other, 0, 1, b))
			for h := range cfg.Fanouts {
				require.NoError(t, r.s.Hop(r.ctx, r.stream, r.mb, h))
				require.NoError(t, r.s.Hop(r.ctx, r.stream, other, h))
			}
			require.Equal(t, reference(topo, cfg, 0, a), r.plain(t, r.mb))
			require.Equal(t, reference(topo, cfg, 0, b, 1), r.plain(t, other))
			require.NoError(t, other.Close())
		})
	}
}

// One sampler serves several goroutines, each with its stream and mini-batch.
func TestConcurrentBatches(t *testing.T) { checkConcurrentBatches(t, host) }

func checkConcurrentBatches(t *testing.T, open opener) {
	topo := randomGraph(t, 2000, 12, false, 9)
	cfg := SamplerConfig{Fanouts: []int{5, 5}, Seed: 3, Degrees: true}
	r := newRig(t, open, topo, 2, cfg, directNodes)
	var wg sync.WaitGroup
	got := make([][]plain, 3)
	failed := make([]error, len(got))
	for w := range got {
		wg.Go(func() {
			failed[w] = func() error {
				stream, err := r.dev.NewStream(cuda.StreamOptions{Name: fmt.Sprint("sample", w)})
				if err != nil {
					return err
				}
				mb, err := r.s.NewMiniBatch()
				if err != nil {
					return err
				}
				for i := range 10 {
					if err := r.s.Begin(r.ctx, stream, mb, i, w,
						someSeeds(64, 2000, uint64(w))); err != nil {
						return err
					}
					for h := range cfg.Fanouts {
						if err := r.s.Hop(r.ctx, stream, mb, h); err != nil {
							return err
						}
					}
					p, err := read(r.ctx, r.dev, stream, mb)
					if err != nil {
						return err
					}
					got[w] = append(got[w], p)
				}
				if err := mb.Close(); err != nil {
					return err
				}
				return stream.Close()
			}()
		})
	}
	wg.Wait()
	for w := range got {
		require.NoError(t, failed[w])
		for i, p := range got[w] {
			require.Equal(t, reference(topo, cfg, i, someSeeds(64, 2000, uint64(w)), w), p)
		}
	}
}

// A frontier that moves keeps its old place readable until the next Begin: sched reads the rows
// of hop h while hop h+1 is sampled.
func TestOldFrontierStaysReadable(t *testing.T) { checkOldFrontierStaysReadable(t, host) }

func checkOldFrontierStaysReadable(t *testing.T, open opener) {
	topo := randomGraph(t, 20000, 30, false, 4)
	r := newRig(t, open, topo, 2, SamplerConfig{Fanouts: []int{20, 20}, Seed: 1}, directNodes)
	seeds := someSeeds(500, 20000, 1)
	require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, 0, 0, seeds))
	old := r.mb.Nodes.Ptr()
	frontier := func(p cuda.DevicePtr) []int64 {
		v, err := difftest.Download[int64](r.ctx, r.dev, r.stream, p, 500)
		require.NoError(t, err)
		return v
	}
	require.NoError(t, r.s.Hop(r.ctx, r.stream, r.mb, 0))
	require.NoError(t, r.s.Hop(r.ctx, r.stream, r.mb, 1))
	require.NotEqual(t, old, r.mb.Nodes.Ptr(), "the frontier was to grow")
	require.Equal(t, seeds, frontier(old))
	require.Equal(t, seeds, frontier(r.mb.Nodes.Ptr()))
}

// The table's stamps run out after 2^16 (hash keys) or 2^32 batches; it is then cleared.
func TestStampsWrap(t *testing.T) { checkStampsWrap(t, host) }

func checkStampsWrap(t *testing.T, open opener) {
	topo := randomGraph(t, 1000, 10, false, 11)
	cfg := SamplerConfig{Fanouts: []int{4, 4}, Seed: 3}
	for _, limit := range []int64{directNodes, 0} {
		t.Run(fmt.Sprintf("direct=%v", limit > 0), func(t *testing.T) {
			r := newRig(t, open, topo, 2, cfg, limit)
			r.sample(t, 0, 0, someSeeds(50, 1000, 1))
			stamps, fresh := []uint32{0xabcd0003, 3}, byte(0xff)
			table := positionsOf(r.s)
			if h, ok := r.s.hopper.(*hostHopper); ok { // up to what the index leaves of an entry
				stamps, fresh = []uint32{1<<(32-h.posBits) - 3, 5}, 0
				if !table.direct {
					stamps[0] = 1<<31 - 3
				}
			}
			for _, stamp := range stamps {
				table.stamp, table.owner = stamp, nil
				require.NoError(t, r.stream.Fill(table.vals.Ptr(), fresh, table.vals.Size()))
				for batch := range 6 {
					seeds := someSeeds(50, 1000, uint64(batch))
					require.Equal(t, reference(topo, cfg, 0, seeds, batch),
						r.plain(t, r.sample(t, 0, batch, seeds)))
				}
			}
		})
	}
}

// Chi-square over all subsets: 8 neighbours, 3 drawn, 56 subsets equally likely, and the same for
// long samples that pass through the filter (40 choose 38 = 780 by the pair left out).
func TestUniformity(t *testing.T) {
	key := philox.Key(12345, philox.StreamSample)
	chi := func(d, k, draws int) (x float64, cells int) {
		count := map[uint64]int{}
		out := make([]uint32, k)
		for n := range draws {
			floyd(out, uint64(d), key, [4]uint32{uint32(n), 0, 0, 1 << 24})
			set := uint64(0)
			for _, o := range out {
				require.Less(t, int(o), d)
				require.Zero(t, set>>o&1, "drawn twice")
				set |= 1 << o
			}
			count[set]++
		}
		cells = 1
		for i := range k {
			cells = cells * (d - i) / (i + 1)
		}
		want := float64(draws) / float64(cells)
		for _, c := range count {
			x += (float64(c) - want) * (float64(c) - want) / want
		}
		return x + float64(cells-len(count))*want, cells
	}
	// Upper 0.001 points of chi-square with 55, 779 and 9 degrees of freedom.
	for _, c := range []struct {
		d, k  int
		limit float64
	}{{8, 3, 93.17}, {40, 38, 906.1}, {10, 1, 27.88}} {
		x, cells := chi(c.d, c.k, 60000)
		require.Less(t, x, c.limit, "chi-square of %d cells for %d of %d", cells, c.k, c.d)
	}
}

// The filter only saves time: long samples equal those of the plain search.
func TestFilterChangesNothing(t *testing.T) {
	key := philox.Key(1, philox.StreamSample)
	for _, d := range []uint64{30, 100, 5000, 1 << 31} {
		k := 29
		if d > 100 {
			k = 1000
		}
		out := make([]uint32, k)
		floyd(out, d, key, [4]uint32{77, 0, 3, 0})
		seen := map[uint64]bool{}
		for i, got := range out {
			w := philox.Block(key, [4]uint32{77, 0, 3, uint32(i / 2)})
			j := d - uint64(k) + uint64(i)
			c := philox.Bounded(uint64(w[2*(i%2)+1])<<32|uint64(w[2*(i%2)]), j+1)
			if seen[c] {
				c = j
			}
			seen[c] = true
			require.Equal(t, c, uint64(got))
		}
	}
}

// Samples differ between hops, epochs, seeds and nodes.
func TestKeysMatter(t *testing.T) {
	topo := randomGraph(t, 1000, 60, false, 8)
	draw := func(seed uint64, epoch int) plain {
		r := newRig(t, host, topo, 2, SamplerConfig{Fanouts: []int{5, 5}, Seed: seed}, directNodes)
		return r.plain(t, r.sample(t, epoch, 0, []int64{999, 998}))
	}
	a := draw(1, 0)
	require.Equal(t, a, draw(1, 0))
	for _, b := range []plain{draw(2, 0), draw(1, 1), draw(1, 1<<30)} {
		require.NotEqual(t, a.nodes, b.nodes)
	}
	require.NotEqual(t, a.nodes, draw(1, 1<<24).nodes)
	require.NotEqual(t, a.src[0][:5], a.src[1][:5], "hop 1 draws the seeds' neighbours anew")
}

func TestShuffle(t *testing.T) {
	ids := make([]int64, 1000)
	for i := range ids {
		ids[i] = int64(i) * 3
	}
	a, b := make([]int64, 1000), make([]int64, 1000)
	Shuffle(a, ids, 1, 0)
	Shuffle(b, ids, 1, 0)
	require.Equal(t, a, b)
	Shuffle(b, ids, 1, 1)
	require.NotEqual(t, a, b)
	Shuffle(b, ids, 2, 0)
	require.NotEqual(t, a, b)
	slices.Sort(b)
	require.Equal(t, ids, b)
	require.Equal(t, int64(0), ids[0], "ids must stay")
	// Chi-square of where the first of 10 goes, 9 degrees of freedom.
	count := make([]float64, 10)
	for e := range 10000 {
		Shuffle(b[:10], ids[:10], 5, e)
		count[slices.Index(b[:10], 0)]++
	}
	x := 0.0
	for _, c := range count {
		x += (c - 1000) * (c - 1000) / 1000
	}
	require.Less(t, x, 27.88)
}

func TestValidate(t *testing.T) {
	good := func() *Topology {
		return &Topology{NumNodes: 4, NumEdges: 5, Indptr: []int64{0, 2, 2, 4, 5},
			Indices32: []uint32{1, 2, 0, 3, 1}}
	}
	require.NoError(t, good().Validate())
	for _, c := range []struct {
		name, want string
		spoil      func(*Topology)
	}{
		{"short indptr", "indptr has 4 entries, 4 nodes need 5",
			func(t *Topology) { t.Indptr = t.Indptr[:4] }},
		{"edge count", "indices has 4 entries, expected 5 edges",
			func(t *Topology) { t.Indices32 = t.Indices32[:4] }},
		{"start", "indptr[0] is 1", func(t *Topology) { t.Indptr[0] = 1 }},
		{"end", "indptr[4] is 6", func(t *Topology) { t.Indptr[4] = 6 }},
		{"falls", "indptr[3] is 1 after indptr[2] = 2", func(t *Topology) { t.Indptr[3] = 1 }},
		{"id", "indices[3] (an in-neighbour of node 2) is 4, nodes are 0 to 3",
			func(t *Topology) { t.Indices32[3] = 4 }},
		{"wide id", "indices[2] (an in-neighbour of node 2) is -1", func(t *Topology) {
			t.Indices32, t.Indices64 = nil, []int64{1, 2, -1, 3, 1}
		}},
		{"both", "both 32-bit and 64-bit", func(t *Topology) { t.Indices64 = make([]int64, 5) }},
		{"negative", "counts must not be negative", func(t *Topology) { t.NumEdges = -1 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := good()
			c.spoil(g)
			err := g.Validate()
			require.ErrorContains(t, err, c.want)
			require.Equal(t, errs.Usage, errs.ClassOf(err))
		})
	}
	_, err := FromEdges(3, []int64{0, 3}, []int64{0, 1}, false)
	require.ErrorContains(t, err, "edge 1 is 3 → 1")
	_, err = FromEdges(3, []int64{0}, nil, false)
	require.ErrorContains(t, err, "1 sources, 0 destinations")
}

func TestMisuse(t *testing.T) { checkMisuse(t, host) }

func checkMisuse(t *testing.T, open opener) {
	topo := randomGraph(t, 100, 5, false, 1)
	r := newRig(t, open, topo, 1, SamplerConfig{Fanouts: []int{2, 2}}, directNodes)
	require.ErrorContains(t, r.s.Hop(r.ctx, r.stream, r.mb, 0), "call Begin")
	require.ErrorContains(t, r.s.Begin(r.ctx, r.stream, r.mb, 0, 0, nil), "no seed nodes")
	require.ErrorContains(t, r.s.Begin(r.ctx, r.stream, r.mb, 0, 3, []int64{5, 100}),
		"seed node 100 (number 1 of batch 3) is out of range")
	require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, 0, 0, []int64{5}))
	require.ErrorContains(t, r.s.Hop(r.ctx, r.stream, r.mb, 1), "has done 0 of 2 hops")
	for _, f := range [][]int{nil, {0}, {5, -2}, {1 << 21}} {
		_, err := NewSampler(r.dev, r.s.topo, SamplerConfig{Fanouts: f})
		require.ErrorContains(t, err, "fanout")
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	gone, cancel := context.WithCancel(r.ctx)
	cancel()
	// or it was done by then
	if err := r.s.Begin(gone, r.stream, r.mb, 0, 0, []int64{1}); err != nil {
		require.ErrorIs(t, err, context.Canceled)
	}
	require.NoError(t, r.stream.Synchronize(r.ctx))
	got := r.plain(t, r.sample(t, 0, 0, []int64{1}))
	require.Equal(t, reference(topo, r.s.cfg, 0, []int64{1}).nodes, got.nodes)
}

// A steady state makes no new buffers.
func TestSteadyStateAllocatesNoBuffers(t *testing.T) { checkSteadyStateAllocatesNoBuffers(t, host) }

func checkSteadyStateAllocatesNoBuffers(t *testing.T, open opener) {
	topo := randomGraph(t, 5000, 20, false, 2)
	for _, limit := range []int64{directNodes, 0} {
		t.Run(fmt.Sprintf("direct=%v", limit > 0), func(t *testing.T) {
			r := newRig(t, open, topo, 2, SamplerConfig{Fanouts: []int{8, 8}, Seed: 1,
				Degrees: true}, limit)
			for i := range 5 {
				r.sample(t, i, 0, someSeeds(300, 5000, 1))
			}
			before := r.dev.MemUsage()
			old := r.mb.Nodes.Ptr()
			for i := range 5 {
				r.sample(t, i, 0, someSeeds(300, 5000, 1))
				require.Empty(t, r.mb.retired)
			}
			require.Equal(t, before, r.dev.MemUsage())
			require.Equal(t, old, r.mb.Nodes.Ptr())
		})
	}
}

func TestSynthetic(t *testing.T) {
	for _, skewed := range []bool{false, true} {
		topo, err := Synthetic(1<<14, 15, skewed, 1)
		require.NoError(t, err)
		require.NoError(t, topo.Validate())
		require.InEpsilon(t, 15, float64(topo.NumEdges)/float64(topo.NumNodes), 0.05)
		in, out := int64(0), make([]int, topo.NumNodes)
		for v := range topo.NumNodes {
			in = max(in, topo.InDegree(v))
		}
		for _, u := range topo.Indices32 {
			out[u]++
		}
		require.Equal(t, skewed, in > 1000)
		require.Equal(t, skewed, slices.Max(out) > 1000)
		require.NoError(t, topo.Close())
	}
	_, err := Synthetic(1, 15, false, 1)
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// The audit passes what was sampled and finds what was spoilt.
func TestAudit(t *testing.T) {
	topo := randomGraph(t, 2000, 20, false, 9)
	cfg := SamplerConfig{Fanouts: []int{5, -1}, Seed: 3}
	seeds := append(someSeeds(50, 2000, 1), 1999, 1999)
	for name, spoil := range map[string]func(mb *MiniBatch){
		"":                         func(*MiniBatch) {},
		"frontier index 3 is node": func(mb *MiniBatch) { view[int64](mb.Nodes, 4)[3]++ },
		"in the frontier twice": func(
			mb *MiniBatch) {
			n := view[int64](mb.Nodes, 100)
			n[90] = n[91]
		},
		"offsets go from 1": func(
			mb *MiniBatch) {
			view[int64](mb.Blocks[1].Indptr, 1)[0] = 1
		},
		"got 6 edges, not 5": func(
			mb *MiniBatch) {
			view[int64](mb.Blocks[0].Indptr, 53)[51]++
		},
		"nodes have appeared": func(
			mb *MiniBatch) {
			view[uint32](mb.Blocks[0].Src, 1)[0] = 1 << 20
		},
		"edges of node 1999 are not": func(mb *MiniBatch) {
			view[uint32](mb.Blocks[0].Src, mb.Blocks[0].NumEdges)[mb.Blocks[0].NumEdges-1] = 0
		},
	} {
		r := newRig(t, host, topo, 2, cfg, directNodes)
		mb := r.sample(t, 0, 0, seeds)
		spoil(mb)
		checked, digest, err := Audit(topo, cfg, mb, seeds, 1<<30)
		if name != "" {
			require.ErrorContains(t, err, name)
			continue
		}
		require.NoError(t, err)
		require.NotZero(t, digest)
		require.Equal(t, mb.Blocks[0].NumEdges+mb.Blocks[1].NumEdges, checked)
		some, same, err := Audit(topo, cfg, mb, seeds, checked/10)
		require.NoError(t, err)
		require.Equal(t, digest, same)
		require.InDelta(t, checked/10, some, float64(checked)/20)
	}
}

func cpuSeconds(t testing.TB) float64 {
	var u unix.Rusage
	require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

func BenchmarkSample(b *testing.B) {
	for _, name := range []string{"even", "skewed"} {
		topo, err := Synthetic(1<<20, 15, name == "skewed", 5)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, topo.Close()) })
		for _, limit := range []int64{directNodes, 0} {
			for _, sms := range []int{1, 2} {
				b.Run(fmt.Sprintf("%s/direct=%v/workers=%d", name, limit > 0, sms),
					func(b *testing.B) {
						r := newRig(b, host, topo, sms, SamplerConfig{Fanouts: []int{15, 10, 5},
							Seed: 7}, limit)
						seeds := someSeeds(1<<16, topo.NumNodes, 1)
						edges := int64(0)
						best := 0.0
						b.ReportAllocs()
						cpu := cpuSeconds(b)
						for i := 0; b.Loop(); i++ {
							start, before := time.Now(), edges
							mb := r.sample(b, i, 0, seeds[i%64*1024:][:1024])
							for _, l := range mb.Blocks {
								edges += l.NumEdges
							}
							best = max(best, float64(edges-before)/time.Since(start).Seconds()/1e6)
						}
						b.ReportMetric(float64(edges)/b.Elapsed().Seconds()/1e6, "Medges/s")
						b.ReportMetric(float64(edges)/(cpuSeconds(b)-cpu)/1e6, "Medges/cpu-s")
						b.ReportMetric(best, "Medges/s-best")
					})
			}
		}
	}
}

// A table that does not fit is an error of that batch and of those after it, not a crash.
func TestTableOutOfMemory(t *testing.T) {
	for name, open := range map[string]func(cuda.Device) cuda.Device{
		"host":    func(d cuda.Device) cuda.Device { return d },
		"general": func(d cuda.Device) cuda.Device { return general{d} },
	} {
		topo := randomGraph(t, 20000, 5, false, 1)
		r := newRig(t, func(t testing.TB, sms int) cuda.Device {
			dev, err := cuda.NewHost(cuda.HostOptions{SMs: sms, MemLimit: 4 << 20})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, dev.Close()) })
			return open(dev)
		}, topo, 1, SamplerConfig{Fanouts: []int{5}, Seed: 1}, 0)
		filler, err := r.dev.Alloc(cuda.MemDevice, 4<<20-r.dev.MemUsage()[ringPurpose]-100<<10,
			"filler")
		require.NoError(t, err)
		seeds := someSeeds(9000, 20000, 1)
		for range 2 {
			var full *cuda.OutOfMemoryError
			err := r.s.Begin(r.ctx, r.stream, r.mb, 0, 0, seeds)
			require.ErrorAs(t, err, &full, name)
			require.Equal(t, tablePurpose, full.Purpose)
		}
		require.NoError(t, filler.Free())
		require.Equal(t, reference(topo, r.s.cfg, 0, seeds[:100]),
			r.plain(t, r.sample(t, 0, 0, seeds[:100])))
	}
}

// The room for edges, the frontier and a hashed table ends in the midst of hops, and two
// mini-batches take turns in it: the launches that go on give what one launch gives.
func TestRoomEndsWithinHop(t *testing.T) {
	topo := randomGraph(t, 40000, 12, false, 3)
	cfg := SamplerConfig{Fanouts: []int{9, -1}, Seed: 5, Degrees: true}
	a, b := append(someSeeds(900, 40000, 1), 39999, 39999), someSeeds(1500, 40000, 2)
	wantA, wantB := reference(topo, cfg, 0, a), reference(topo, cfg, 0, b, 1)
	for _, sms := range []int{1, 2, 7} {
		for _, limit := range []int64{directNodes, 0} {
			r := newRig(t, host, topo, sms, cfg, limit)
			other, err := r.s.NewMiniBatch()
			require.NoError(t, err)
			for round := range 2 { // with old buffers and entries too
				require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, 0, 0, a))
				require.NoError(t, r.s.Begin(r.ctx, r.stream, other, 0, 1, b))
				slots := positionsOf(r.s).slots
				for h := range cfg.Fanouts {
					require.NoError(t, r.s.Hop(r.ctx, r.stream, r.mb, h))
					require.NoError(t, r.s.Hop(r.ctx, r.stream, other, h))
				}
				require.Equal(t, wantA, r.plain(t, r.mb))
				require.Equal(t, wantB, r.plain(t, other))
				require.Equal(t, limit == 0 && round == 0, slots != positionsOf(r.s).slots,
					"a hashed table is to grow in the first round")
			}
			require.NoError(t, other.Close())
		}
	}
}

// Tiles grow with the hop as long as all blocks have some, and their draws fit in a slot.
func TestTiles(t *testing.T) {
	s := hostHopper{workers: 2}
	for _, c := range [][3]int64{{1, 5, 128}, {4096, 5, 256}, {1 << 20, 5, 512}, {1 << 20, 64, 256},
		{1 << 20, tileDraws, 128}} {
		require.Equal(t, c[2], s.tile(c[0], c[1]), "%d nodes of %d draws", c[0], c[1])
	}
	for draws := int64(1); draws <= tileDraws; draws++ {
		n := s.tile(1<<20, draws)
		require.LessOrEqual(t, n*draws, int64(tileNodes*tileDraws))
		require.Zero(t, n%simd.SampleGroup)
	}
}

// A block that faults, as on a mapped file that has become shorter, ends the launch: no other one
// waits for its tile.
func TestFaultEndsLaunch(t *testing.T) {
	const nodes, degree = 20000, 16 // a page of ids is half a tile's
	mem, err := unix.Mmap(-1, 0, nodes*degree*4, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(mem)) })
	topo, err := Alloc(nodes, 0, false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, topo.Close()) })
	for v := range int64(nodes) {
		topo.Indptr[v+1] = (v + 1) * degree
	}
	topo.NumEdges, topo.Indices32 = nodes*degree, hostmem.View[uint32](mem)
	offset := int64(tileNodes*degree*4) * 3
	seeds := make([]int64, nodes)
	for i := range seeds {
		seeds[i] = int64(i)
	}
	for _, fanout := range []int{5, 70} {
		require.NoError(t, unix.Mprotect(mem[offset:offset+4096], unix.PROT_READ|unix.PROT_WRITE))
		r := newRig(t, host, topo, 3, SamplerConfig{Fanouts: []int{fanout}, Seed: 1}, directNodes)
		require.NoError(t, r.s.Begin(r.ctx, r.stream, r.mb, 0, 0, seeds))
		require.NoError(t, unix.Mprotect(mem[offset:offset+4096], unix.PROT_NONE))
		ctx, cancel := context.WithTimeout(r.ctx, 10*time.Second)
		defer cancel()
		var failed *cuda.KernelError
		require.ErrorAs(t, r.s.Hop(ctx, r.stream, r.mb, 0), &failed)
		require.ErrorContains(t, failed, "panic")
	}
}

// Batches draw for themselves, and alike where they share draws.
func TestDrawsByBatch(t *testing.T) {
	topo := randomGraph(t, 2000, 30, false, 4)
	cfg := SamplerConfig{Fanouts: []int{4, 3}, Seed: 7}
	r := newRig(t, host, topo, 2, cfg, directNodes)
	seeds := someSeeds(100, 2000, 1)
	first := r.plain(t, r.sample(t, 1, 0, seeds))
	second := r.plain(t, r.sample(t, 1, 1, seeds))
	require.NotEqual(t, first.src, second.src)
	require.Equal(t, reference(topo, cfg, 1, seeds, 1), second)
	for i := range 3 {
		got := r.plain(t, r.sample(t, 1, SharedDraws(i), seeds))
		require.Equal(t, i, r.mb.Index)
		require.Equal(t, reference(topo, cfg, 1, seeds, -1), got)
	}
}
