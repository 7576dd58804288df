package graph

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/simd"
	"helios/internal/testing/difftest"
	"helios/internal/testing/wide"
)

// idFile writes the ids of topo behind offset bytes of something else.
func idFile(t testing.TB, topo *Topology, offset int64) IndexFile {
	t.Helper()
	path := filepath.Join(t.TempDir(), "indices")
	ids := bytesOf(topo.Indices32)
	if topo.Wide() {
		ids = bytesOf(topo.Indices64)
	}
	require.NoError(t, os.WriteFile(path, append(slices.Repeat([]byte{0xa5}, int(offset)),
		ids...), 0o600))
	return IndexFile{Path: path, Offset: offset, Wide: topo.Wide()}
}

// openFar is topo with its ids in a file.
func openFar(topo *Topology, f IndexFile, o OutOfCoreOptions) (*Topology, error) {
	far, err := Alloc(topo.NumNodes, 0, false)
	if err != nil {
		return nil, err
	}
	copy(far.Indptr, topo.Indptr)
	far.NumEdges = topo.NumEdges
	if _, err := OpenOutOfCore(context.Background(), far, f, o); err != nil {
		return nil, errors.Join(err, far.Close())
	}
	return far, nil
}

func farOf(t testing.TB, topo *Topology, o OutOfCoreOptions) *Topology {
	t.Helper()
	far, err := openFar(topo, idFile(t, topo, 128), o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, far.Close()) })
	return far
}

// Blocks over a file are those over memory to the bit: widths of ids, fanouts from one neighbour to
// all, caches from none to everything, chunks that end within a list, both tables, both ways to
// read, and a device that is none of the host's.
func TestOutOfCoreBlocks(t *testing.T) {
	const nodes = 3000
	r := someSeeds(nodes, nodes, 9)
	var src, dst []int64
	for v := range int64(nodes) {
		d := r[v] % 40
		switch {
		case v == 7:
			d = 30_000
		case v%50 == 0:
			d = 1500
		case v%9 == 0:
			d = 0
		}
		for i := range d {
			src, dst = append(src, (r[(v+i*i)%nodes]*r[i%nodes])%nodes), append(dst, v)
		}
	}
	seeds := append(someSeeds(100, nodes, 3), 7, 7, 9, 50, 7)
	wants := map[string]plain{}
	for _, wideIDs := range []bool{false, true} {
		topo, err := FromEdges(nodes, src, dst, wideIDs)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, topo.Close()) })
		all := LeastNeighborCache(nodes) + 4*(nodes+topo.NumEdges)
		for i, o := range []OutOfCoreOptions{
			{}, {CacheBytes: all / 10, Chunk: 1000}, {CacheBytes: all},
			{CacheBytes: all / 2, PageCache: true, Threads: true},
			{CacheBytes: LeastNeighborCache(nodes), Chunk: 64},
		} {
			if wideIDs && i != 1 || wide.Lean() && i > 1 {
				continue
			}
			far := farOf(t, topo, o)
			info := far.StorageInfo()
			require.True(t, far.OnStorage())
			require.LessOrEqual(t, info.CacheBytes, o.CacheBytes)
			if o.CacheBytes == all {
				require.Equal(t, topo.NumEdges, info.CacheEdges)
			}
			for _, v := range []struct {
				fanouts []int
				open    opener
				limit   int64
				sms     int
			}{
				{[]int{10, 5}, host, directNodes, 2}, {[]int{3, 15, 2}, host, 0, 1},
				{[]int{-1}, host, 0, 2}, {[]int{100}, host, directNodes, 2},
				{[]int{2000}, host, directNodes, 1}, {[]int{4, 4}, hostGeneral, directNodes, 2},
			} {
				if o.Chunk == 64 && v.sms == 2 && v.fanouts[0] < 0 {
					continue
				}
				before := far.Storage()
				cfg := SamplerConfig{Fanouts: v.fanouts, Seed: 7, Degrees: true}
				key := fmt.Sprint(v.fanouts)
				if _, ok := wants[key]; !ok {
					wants[key] = reference(topo, cfg, 2, seeds)
				}
				want := wants[key]
				rig := newRig(t, v.open, far, v.sms, cfg, v.limit)
				for range 2 {
					require.Equal(t, want, rig.plain(t, rig.sample(t, 2, 0, seeds)),
						"wide=%v %+v %+v", wideIDs, o, v.fanouts)
				}
				s := far.Storage().Sub(before)
				edges := int64(0)
				for _, x := range want.src {
					edges += 2 * int64(len(x))
				}
				require.Equal(t, edges, s.Edges)
				if o.CacheBytes == all {
					require.Equal(t, edges, s.CachedEdges)
					require.Zero(t, s.Reads)
				} else {
					require.Less(t, s.CachedEdges, edges)
					require.NotZero(t, s.Reads)
					require.LessOrEqual(t, s.Reads, s.Pages)
					require.LessOrEqual(t, s.Bytes, s.Pages*filePage)
				}
			}
		}
	}
}

// A hop reads each page once that holds something it has drawn, and nothing else.
func TestOutOfCorePages(t *testing.T) {
	topo := randomGraph(t, 20_000, 30, false, 11)
	far := farOf(t, topo, OutOfCoreOptions{})
	cfg := SamplerConfig{Fanouts: []int{5, 3}, Seed: 3}
	seeds := someSeeds(500, topo.NumNodes, 1)
	rig := newRig(t, host, far, 2, cfg, directNodes)
	rig.sample(t, 0, 0, seeds)
	want := int64(0)
	s := far.far
	for hop := range cfg.Fanouts {
		// The draws once more, by the reference.
		pages := map[int64]bool{}
		p := reference(topo, SamplerConfig{Fanouts: cfg.Fanouts[:hop+1], Seed: 3}, 0, seeds)
		for i := range p.indptr[hop][:len(p.indptr[hop])-1] {
			v := p.nodes[i]
			ids := topo.Indices32[topo.Indptr[v]:topo.Indptr[v+1]]
			for _, x := range p.src[hop][p.indptr[hop][i]:p.indptr[hop][i+1]] {
				// Where an id stands twice the draw may have been either: take rows whose ids
				// differ.
				pos := slices.Index(ids, uint32(p.nodes[x]))
				pages[s.page(topo.Indptr[v]+int64(pos))] = true
			}
		}
		want += int64(len(pages))
	}
	got := far.Storage()
	// Ids that stand twice in a list across the border of a page are the difference.
	require.InDelta(t, want, got.Pages, 3)
	require.InDelta(t, float64(got.Pages*filePage), float64(got.Bytes), filePage)
}

// The lists that are kept are those with the highest out-degree / in-degree that fit, by a plain
// reading of it, and each is found where it is.
func TestNeighborCache(t *testing.T) {
	topo := randomGraph(t, 2000, 12, false, 3)
	out := make([]uint32, topo.NumNodes)
	for _, u := range topo.Indices32 {
		out[u]++
	}
	type list struct {
		node  int64
		score float64
	}
	var lists []list
	for v := range topo.NumNodes {
		if d := topo.InDegree(v); d > 0 {
			lists = append(lists, list{v, float64(float32(float64(out[v]) / float64(d)))})
		}
	}
	slices.SortStableFunc(lists, func(a, b list) int {
		switch {
		case a.score > b.score:
			return -1
		case a.score < b.score:
			return 1
		}
		return 0
	})
	limit := LeastNeighborCache(topo.NumNodes) + 4*(topo.NumNodes+topo.NumEdges)
	for _, budget := range []int64{LeastNeighborCache(topo.NumNodes),
		LeastNeighborCache(topo.NumNodes) + 400, limit / 20, limit / 3, limit * 9 / 10, limit} {
		far := farOf(t, topo, OutOfCoreOptions{CacheBytes: budget})
		c := &far.far.cache
		require.LessOrEqual(t, c.bytes(), budget)
		room := budget - LeastNeighborCache(topo.NumNodes)
		full := false // the first score whose lists do not all fit has been met
		limit := -1.0
		for _, l := range lists {
			cost := 4 * (1 + topo.InDegree(l.node))
			if l.score < limit {
				full = true
			}
			first, ok := c.find(l.node)
			if !full && room >= cost {
				require.True(t, ok, "node %d of score %v with %d bytes left", l.node, l.score, room)
				room -= cost
			} else if !ok {
				limit = l.score
			}
			if full {
				require.False(t, ok)
			}
			if ok {
				require.Equal(t, topo.Indices32[topo.Indptr[l.node]:topo.Indptr[l.node+1]],
					c.lists[first:first+topo.InDegree(l.node)])
			}
		}
	}
	// The memory for finding lists is small: 1/6 byte a node and 4 a list.
	far := farOf(t, topo, OutOfCoreOptions{CacheBytes: limit / 3})
	info := far.StorageInfo()
	require.Equal(t, (topo.NumNodes+383)/384*64+4*info.CacheLists, info.CacheMetadata)
}

// Scan gives every id in order, from memory and from a file.
func TestScanEdges(t *testing.T) {
	for _, wide := range []bool{false, true} {
		topo := randomGraph(t, 9000, 60, wide, 2)
		far := farOf(t, topo, OutOfCoreOptions{})
		for _, x := range []*Topology{topo, far} {
			n := int64(0)
			require.NoError(t, x.Scan(t.Context(), func(first int64, ids []uint32) error {
				require.Equal(t, n, first)
				for i, id := range ids {
					if topo.Wide() && topo.Indices64[first+int64(i)] != int64(id) || !topo.Wide() &&
						topo.Indices32[first+int64(i)] != id {
						return fmt.Errorf("edge %d is %d", first+int64(i), id)
					}
				}
				n += int64(len(ids))
				return nil
			}))
			require.Equal(t, topo.NumEdges, n)
		}
	}
}

// Files that are not what they were, or can't be read, fail the batch with an error that names the
// place; the sampler is good again when the file is.
func TestOutOfCoreFaults(t *testing.T) {
	topo := randomGraph(t, 5000, 30, false, 4)
	seeds := someSeeds(200, topo.NumNodes, 1)
	cfg := SamplerConfig{Fanouts: []int{10, 10}, Seed: 1}
	want := reference(topo, cfg, 1, seeds)
	for _, threads := range []bool{false, true} {
		for name, c := range map[string]struct {
			spoil func(t *testing.T, f IndexFile, far *Topology) (restore func())
			cause error
		}{
			"short": {func(t *testing.T, f IndexFile, far *Topology) func() {
				data, err := os.ReadFile(f.Path)
				require.NoError(t, err)
				require.NoError(t, os.Truncate(f.Path, int64(len(data)/3)))
				return func() { require.NoError(t, os.WriteFile(f.Path, data, 0o600)) }
			}, ErrTopologyShort},
			"changed": {func(t *testing.T, f IndexFile, far *Topology) func() {
				data, err := os.ReadFile(f.Path)
				require.NoError(t, err)
				other := slices.Clone(data)
				for i := int(f.Offset); i < len(other); i += 4096 {
					other[i] ^= 1
				}
				require.NoError(t, os.WriteFile(f.Path, other, 0o600))
				return func() { require.NoError(t, os.WriteFile(f.Path, data, 0o600)) }
			}, ErrTopologyChanged},
			"unreadable": {func(t *testing.T, f IndexFile, far *Topology) func() {
				r := far.far.reader
				fd, err := unix.Open(f.Path, unix.O_WRONLY, 0)
				require.NoError(t, err)
				was := r.fd
				r.fd = int32(fd)
				return func() { r.fd = was; require.NoError(t, unix.Close(fd)) }
			}, unix.EBADF},
		} {
			t.Run(fmt.Sprintf("%s threads=%v", name, threads), func(t *testing.T) {
				f := idFile(t, topo, 64)
				far, err := openFar(topo, f, OutOfCoreOptions{CacheBytes: topo.NumEdges,
					Threads: threads})
				require.NoError(t, err)
				defer func() { require.NoError(t, far.Close()) }()
				rig := newRig(t, host, far, 2, cfg, directNodes)
				require.Equal(t, want.src, rig.plain(t, rig.sample(t, 1, 0, seeds)).src)
				restore := c.spoil(t, f, far)
				require.NoError(t, rig.s.Begin(rig.ctx, rig.stream, rig.mb, 1, 0, seeds))
				err = nil
				for h := 0; h < 2 && err == nil; h++ {
					err = rig.s.Hop(rig.ctx, rig.stream, rig.mb, h)
				}
				require.ErrorIs(t, err, c.cause)
				require.Equal(t, errs.Device, errs.ClassOf(err))
				var failed *StorageError
				require.ErrorAs(t, err, &failed)
				require.Equal(t, f.Path, failed.Path)
				require.Contains(t, err.Error(), "sample hop")
				restore()
				require.Equal(t, want.src, rig.plain(t, rig.sample(t, 1, 0, seeds)).src)
			})
		}
	}
	// At the start: ids that are no nodes, files that are missing or end too soon.
	f := idFile(t, topo, 64)
	data, err := os.ReadFile(f.Path)
	require.NoError(t, err)
	bad := slices.Clone(data)
	bad[64+4*1000+3] = 0xff
	require.NoError(t, os.WriteFile(f.Path, bad, 0o600))
	_, err = openFar(topo, f, OutOfCoreOptions{})
	require.ErrorContains(t, err, "at position 1000 is outside 0..4999")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.NoError(t, os.WriteFile(f.Path, data[:len(data)-4], 0o600))
	_, err = openFar(topo, f, OutOfCoreOptions{})
	require.ErrorIs(t, err, ErrTopologyShort)
	require.NoError(t, os.Remove(f.Path))
	_, err = openFar(topo, f, OutOfCoreOptions{})
	require.Equal(t, errs.Device, errs.ClassOf(err))
}

// A read that never ends: the hop gives up, the reader is not used again, and its memory stays.
func TestOutOfCoreLateRead(t *testing.T) {
	defer func(a, b time.Duration) { readLimit, drainLimit = a, b }(readLimit, drainLimit)
	readLimit, drainLimit = 200*time.Millisecond, 100*time.Millisecond
	topo := randomGraph(t, 5000, 30, false, 4)
	far, err := openFar(topo, idFile(t, topo, 0), OutOfCoreOptions{})
	require.NoError(t, err)
	r := far.far.reader
	if r.ring == nil {
		t.Skip("without io_uring reads are waited for by threads")
	}
	var pipe [2]int
	require.NoError(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	was := r.fd
	r.fd = int32(pipe[0])
	rig := newRig(t, host, far, 2, SamplerConfig{Fanouts: []int{10}, Seed: 1}, directNodes)
	require.NoError(t, rig.s.Begin(rig.ctx, rig.stream, rig.mb, 1, 0, []int64{4999, 4000}))
	begin := time.Now()
	err = rig.s.Hop(rig.ctx, rig.stream, rig.mb, 0)
	require.ErrorIs(t, err, ErrTopologyLate)
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.Less(t, time.Since(begin), 5*time.Second)
	require.NoError(t, rig.s.Begin(rig.ctx, rig.stream, rig.mb, 1, 0, []int64{4999}))
	require.ErrorIs(t, rig.s.Hop(rig.ctx, rig.stream, rig.mb, 0), ErrTopologyLate)
	// The pipe ends the reads, so that this process need not keep what they were to fill.
	require.NoError(t, errors.Join(unix.Close(pipe[1]), unix.Close(pipe[0])))
	r.fd, r.broken = was, nil
	time.Sleep(10 * time.Millisecond)
	require.NoError(t, far.Close())
}

// An interrupt ends a hop whose reads are in flight, and the reads too: the next hop goes on.
func TestOutOfCoreInterruptedHop(t *testing.T) {
	topo := randomGraph(t, 5000, 30, false, 4)
	far, err := openFar(topo, idFile(t, topo, 0), OutOfCoreOptions{})
	require.NoError(t, err)
	r := far.far.reader
	if r.ring == nil {
		t.Skip("without io_uring reads are waited for by threads")
	}
	var pipe [2]int
	require.NoError(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	was := r.fd
	r.fd = int32(pipe[0])
	rig := newRig(t, host, far, 2, SamplerConfig{Fanouts: []int{10}, Seed: 1}, directNodes)
	require.NoError(t, rig.s.Begin(rig.ctx, rig.stream, rig.mb, 1, 0, []int64{4999, 4000}))
	ctx, cancel := context.WithCancelCause(rig.ctx)
	enough := errors.New("enough")
	time.AfterFunc(20*time.Millisecond, func() {
		cancel(enough)
		_ = unix.Close(pipe[1]) // ends the reads
	})
	err = rig.s.Hop(ctx, rig.stream, rig.mb, 0)
	require.ErrorIs(t, err, enough)
	require.NoError(t, r.broken)
	r.fd = was
	require.NoError(t, unix.Close(pipe[0]))
	require.NoError(t, rig.s.Begin(rig.ctx, rig.stream, rig.mb, 1, 0, []int64{4999, 4000}))
	require.NoError(t, rig.s.Hop(rig.ctx, rig.stream, rig.mb, 0))
	late, cancel2 := context.WithTimeout(rig.ctx, time.Nanosecond)
	defer cancel2()
	err = ended(late)
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.ErrorContains(t, err, "option neighbor-cache")
	require.NoError(t, far.Close())
}

func TestOutOfCoreBudgets(t *testing.T) {
	topo := randomGraph(t, 5000, 30, false, 4)
	f := idFile(t, topo, 0)
	_, err := openFar(topo, f, OutOfCoreOptions{CacheBytes: 100})
	require.ErrorContains(t, err, "option neighbor-cache")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	_, err = openFar(topo, IndexFile{Path: f.Path, Offset: 2}, OutOfCoreOptions{})
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	before := hostmem.Usage()
	far, err := openFar(topo, f, OutOfCoreOptions{CacheBytes: topo.NumEdges})
	require.NoError(t, err)
	i := far.StorageInfo()
	require.Equal(t, i.OffsetBytes+i.ChecksumBytes+i.ReadBytes+i.CacheBytes, far.Bytes())
	require.NoError(t, far.Close())
	require.Equal(t, before, hostmem.Usage())
}

// Two samplers over one topology at once, as training and evaluation may have.
func TestOutOfCoreTogether(t *testing.T) {
	topo := randomGraph(t, 4000, 20, false, 6)
	far := farOf(t, topo, OutOfCoreOptions{CacheBytes: topo.NumEdges})
	dev := host(t, 2)
	var wg sync.WaitGroup
	for w := range 2 {
		cfg := SamplerConfig{Fanouts: []int{6, 6}, Seed: uint64(w)}
		rig := newRig(t, func(testing.TB, int) cuda.Device { return dev }, far, 2, cfg, directNodes)
		wg.Go(func() {
			for i := range 4 {
				seeds := someSeeds(100, topo.NumNodes, uint64(i))
				want := reference(topo, cfg, i, seeds)
				if got := rig.plain(t, rig.sample(t, i, 0, seeds)); !slices.Equal(want.nodes,
					got.nodes) {
					t.Errorf("sampler %d batch %d differs", w, i)
				}
			}
		})
	}
	wg.Wait()
}

// Layer-wise sampling over a file gives the blocks and weights that it gives in memory.
func TestOutOfCoreLayers(t *testing.T) {
	for _, wide := range []bool{false, true} {
		topo := randomGraph(t, 3000, 40, wide, 8)
		cfg := SamplerConfig{Fanouts: []int{50, 200}, Seed: 5, Degrees: true, Method: Ladies}
		seeds := append(someSeeds(60, topo.NumNodes, 1), 5, 5)
		all := func(r *rig) (p plain, weights [][]float32) {
			mb := r.sample(t, 3, 1, seeds)
			p = r.plain(t, mb)
			for _, b := range mb.Blocks {
				w, err := difftest.Download[float32](r.ctx, r.dev, r.stream, b.Weights.Ptr(),
					b.NumSrc)
				require.NoError(t, err)
				weights = append(weights, w)
			}
			return p, weights
		}
		want, weights := all(newRig(t, host, topo, 2, cfg, directNodes))
		for _, open := range []opener{host, hostGeneral} {
			far := farOf(t, topo, OutOfCoreOptions{CacheBytes: topo.NumEdges})
			r := newRig(t, open, far, 2, cfg, directNodes)
			for range 2 {
				got, w := all(r)
				require.Equal(t, want, got)
				require.Equal(t, weights, w)
			}
			s := far.Storage()
			require.Greater(t, s.CachedEdges, int64(0))
			require.Greater(t, s.Pages, int64(0))
			require.Less(t, s.CachedEdges, s.Edges)
		}
	}
}

// Random graphs, fanouts, caches, chunks and instruction sets: a file gives what memory gives.
func TestOutOfCoreRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("HELIOS_SEED"); v != "" {
		var err error
		seed, err = strconv.ParseUint(v, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("replay with HELIOS_SEED=%d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	runs := 25
	if wide.Lean() {
		runs = 6
	}
	for i := range runs {
		nodes := 1 + r.Int64N(3000)
		topo := randomGraph(t, nodes, r.Float64()*60, r.IntN(2) == 0, r.Uint64())
		cfg := SamplerConfig{Seed: r.Uint64(), Degrees: r.IntN(2) == 0}
		for range 1 + r.IntN(3) {
			cfg.Fanouts = append(cfg.Fanouts, []int{-1, 1, 2, 5, 15, 64, 65}[r.IntN(7)])
		}
		o := OutOfCoreOptions{Chunk: 1 + r.IntN(5000), Threads: r.IntN(4) == 0,
			PageCache: r.IntN(2) == 0}
		if r.IntN(3) > 0 {
			o.CacheBytes = LeastNeighborCache(nodes) + r.Int64N(4*(nodes+topo.NumEdges)+1)
		}
		f := idFile(t, topo, 8*r.Int64N(700))
		far, err := openFar(topo, f, o)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, far.Close()) })
		level := simd.Levels()[r.IntN(len(simd.Levels()))]
		open := func(t testing.TB, sms int) cuda.Device {
			dev, err := cuda.NewHost(cuda.HostOptions{SMs: sms, Kernels: level})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, dev.Close()) })
			return dev
		}
		limit := int64(r.IntN(2)) * directNodes
		a, b := newRig(t, open, topo, 2, cfg, limit), newRig(t, open, far, 1+r.IntN(3), cfg, limit)
		for batch := range 3 {
			seeds := someSeeds(1+r.IntN(int(nodes)), nodes, r.Uint64())
			require.Equal(t, a.plain(t, a.sample(t, batch, 0, seeds)),
				b.plain(t, b.sample(t, batch, 0, seeds)),
				"run %d: %d nodes, %d edges, %+v %+v %v", i, nodes, topo.NumEdges, cfg, o, level)
		}
	}
}

// A graph without edges, whose file has none.
func TestOutOfCoreNoEdges(t *testing.T) {
	topo, err := FromEdges(10, nil, nil, false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, topo.Close()) })
	far := farOf(t, topo, OutOfCoreOptions{CacheBytes: 1 << 20})
	r := newRig(t, host, far, 1, SamplerConfig{Fanouts: []int{3, -1}, Seed: 1}, directNodes)
	p := r.plain(t, r.sample(t, 0, 0, []int64{3, 4}))
	require.Equal(t, []int64{3, 4}, p.nodes)
	require.Zero(t, far.Storage().Reads)
	l := newRig(t, host, far, 1, SamplerConfig{Fanouts: []int{3}, Seed: 1, Method: Ladies},
		directNodes)
	require.Equal(t, []int64{3, 4}, l.plain(t, l.sample(t, 0, 0, []int64{3, 4})).nodes)
}

// Pages read in any number at once are the file's, to its last byte.
func TestPageReader(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 5000*filePage+1234)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	path := filepath.Join(t.TempDir(), "f")
	require.NoError(t, os.WriteFile(path, data, 0o600))
	for _, ring := range []bool{true, false} {
		for _, direct := range []bool{true, false} {
			room, err := newReadRoom(ring)
			require.NoError(t, err)
			p, err := openPages(path, int64(len(data)), direct, room)
			require.NoError(t, err)
			require.NoError(t, p.sum(t.Context(), func(int64, []byte) error { return nil }))
			require.EqualValues(t, 5001, p.pages)
			want, got := 0, 0
			page := int64(0)
			next := func(u *pageRun) bool {
				page += 1 + r.Int64N(4)
				n := min(1+r.Int64N(unitPages), p.pages-page)
				if n <= 0 {
					return false
				}
				*u = pageRun{page: page, pages: int(n), lo: want}
				want++
				page += n - 1
				return true
			}
			seen := map[int]bool{}
			require.NoError(t, p.read(t.Context(), next, func(u *pageRun, b []byte) error {
				off := u.page * filePage
				if !bytes.Equal(b, data[off:min(off+int64(u.pages)*filePage, int64(len(data)))]) ||
					seen[u.lo] {
					return fmt.Errorf("page %d differs, or comes twice", u.page)
				}
				seen[u.lo] = true
				got++
				return nil
			}))
			require.Equal(t, want, got)
			// An owner's error ends it, and what is in flight with it.
			mine := errors.New("mine")
			require.ErrorIs(t, p.read(t.Context(), p.all(0, p.pages),
				func(u *pageRun, _ []byte) error {
					if u.page > 1000 {
						return mine
					}
					return nil
				}), mine)
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			require.ErrorIs(t, p.read(ctx, p.all(0, p.pages),
				func(*pageRun, []byte) error { return nil }), context.Canceled)
			require.Len(t, p.free, readSlots)
			require.NoError(t, p.close())
		}
	}
}
