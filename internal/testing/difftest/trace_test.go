package difftest_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"helios/cache"
	"helios/cuda"
	"helios/cuda/driver"
	"helios/graph"
	"helios/internal/testing/difftest"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
)

// The trace is cut into groups: a graph, a cache, a sampler and a device of its own for each, and
// then perGroup batches. Everything about group g comes from the seed and g.
const perGroup = 25

// batches is the number of batches that the test replays: a few hundred, or DIFF_BATCHES.
func batches(t *testing.T) int {
	n := 300
	if wide.Lean() {
		n = 100
	}
	if s := os.Getenv("DIFF_BATCHES"); s != "" {
		v, err := strconv.Atoi(s)
		if err != nil || v < 1 {
			t.Fatalf("DIFF_BATCHES=%q: want a number of batches", s)
		}
		n = v
	}
	return n
}

// seed is DIFF_SEED, or a new one.
func seed(t testing.TB) uint64 {
	n := uint64(time.Now().UnixNano())
	if s := os.Getenv("DIFF_SEED"); s != "" {
		v, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatalf("DIFF_SEED=%q: want a number", s)
		}
		n = v
	}
	t.Logf("replay with DIFF_SEED=%d", n)
	return n
}

// group is one setting of everything that the kernels' paths depend on.
type group struct {
	seed, number uint64
	nodes        int64
	degree       float64
	wide         bool
	fanouts      []int
	sampler      string // of graph.Methods
	dependency   int
	degrees      bool
	gpu, cpu     float64 // shares of the tiers
	ssds         int
	rowBytes     int64
	stride       int64
	sms          int
	grain        int64
	batch        int
}

func (g group) String() string {
	return fmt.Sprintf(
		"nodes %d degree %.1f wide %v fanouts %v sampler %q of %d degrees %v gpu %.2f cpu %.2f ssds %d row %d stride %d sms %d grain %d batch %d",
		g.nodes, g.degree, g.wide, g.fanouts, g.sampler, g.dependency, g.degrees,
		g.gpu, g.cpu, g.ssds, g.rowBytes,
		g.stride, g.sms, g.grain, g.batch)
}

// hashNodes is above graph's limit for a table with an entry per node.
const hashNodes = 4<<20 + 1000

func newGroup(seed, number uint64) group {
	r := rand.New(rand.NewPCG(seed, number))
	logUniform := func(lo, hi float64) float64 { return lo * math.Exp(r.Float64()*math.Log(hi/lo)) }
	g := group{
		seed: seed, number: number,
		nodes:  int64(logUniform(1, 4000)),
		degree: logUniform(0.5, 30),
		wide:   r.IntN(2) == 0, degrees: r.IntN(3) == 0,
		ssds:     []int{0, 1, 1 + r.IntN(12), 1 + r.IntN(12), 1 + r.IntN(256), 256}[r.IntN(6)],
		rowBytes: int64(logUniform(1, 4097)),
		sms:      1 + r.IntN(16),
		grain:    int64(logUniform(1, 600)),
		batch:    int(logUniform(1, 60)),
	}
	switch r.IntN(3) {
	case 0:
		g.rowBytes = max(g.rowBytes&^15, 16)
	case 1:
		g.rowBytes = max(g.rowBytes&^3, 4)
	}
	g.stride = g.rowBytes + []int64{0, 0, int64(r.IntN(20)), 16}[r.IntN(4)]
	for range 1 + r.IntN(3) {
		g.fanouts = append(g.fanouts, []int{-1, 1 + r.IntN(5), 1 + r.IntN(15), 25 + r.IntN(20),
			1 << 20}[r.IntN(5)])
	}
	if len(g.fanouts) == 3 { // frontiers that stay small
		g.batch = min(g.batch, 4)
		g.degree = min(g.degree, 6)
	}
	switch number % 4 { // in turn, so that even few groups launch each kernel
	case 0: // all on SSD
	case 1: // rows in each tier
		g.nodes = max(g.nodes, 100)
		g.gpu, g.cpu = 0.25+r.Float64()/2, 0.25+r.Float64()/2
	case 2:
		g.gpu, g.cpu = r.Float64(), r.Float64()
	default:
		g.gpu = r.Float64() / 2
		g.cpu = r.Float64() / 2
	}
	if number%20 == 7 {
		g.nodes = hashNodes
		g.batch = max(g.batch, 20)
	}
	if number%4 == 2 {
		g.sampler, g.dependency = graph.Labor, r.IntN(4)
	}
	if number%4 == 3 {
		g.sampler = graph.Ladies
		for i, f := range g.fanouts {
			if f > 0 && f < 1<<20 {
				g.fanouts[i] = f * (1 + g.batch/4)
			}
		}
		if number%8 == 3 {
			g.fanouts[0] = 1 + r.IntN(5) // fewer than there are, mostly
		}
	}
	return g
}

// topology has skewed degrees, and nodes without in-neighbours. Of a graph that needs the hash
// table only every thousandth node has edges.
func (g group) topology() (*graph.Topology, error) {
	r := rand.New(rand.NewPCG(g.seed, g.number+1<<32))
	step := int64(1)
	if g.nodes == hashNodes {
		step = 1000
	}
	var src, dst []int64
	for v := int64(0); v < g.nodes; v += step {
		if r.IntN(10) == 0 {
			continue
		}
		d := int(2 * g.degree * r.Float64())
		if r.IntN(50) == 0 {
			d *= 8 // a hub
		}
		for range min(d, 400) {
			src, dst = append(src, r.Int64N((g.nodes+step-1)/step)*step), append(dst, v)
		}
	}
	return graph.FromEdges(g.nodes, src, dst, g.wide)
}

// samplerOf is the sampler that launches a kernel, and how many batches share its draws.
func samplerOf(kernel string) (name string, dependency int) {
	switch {
	case strings.HasPrefix(kernel, "layer_"):
		return graph.Ladies, 1
	case strings.HasPrefix(kernel, "labor_"):
		return graph.Labor, 3
	}
	return graph.Neighbor, 1
}

func (g group) options() difftest.Options {
	return difftest.Options{
		Seed: g.seed, SMs: g.sms, Grain: g.grain, RandomThreads: true,
		Lazy:      []string{"cache index", "gpu cache", "cpu cache"},
		Normalise: difftest.NormaliseTables(),
	}
}

// run replays the group's batches on dev: sample, unique, look up, gather, count; at the end the
// placement by what was counted. It frees what it takes from dev also when a launch fails.
func (g group) run(ctx context.Context, dev *difftest.Device, count int) (err error) {
	r := rand.New(rand.NewPCG(g.seed, g.number+2<<32))
	var closers []func() error
	defer func() {
		for _, c := range slices.Backward(closers) {
			if e := c(); err == nil {
				err = e
			}
		}
	}()
	onClose := func(c func() error) { closers = append(closers, c) }

	topo, err := g.topology()
	if err != nil {
		return err
	}
	onClose(topo.Close)
	dt, err := graph.Attach(dev, topo)
	if err != nil {
		return err
	}
	onClose(dt.Close)
	st, err := dev.NewStream(cuda.StreamOptions{Name: "diff"})
	if err != nil {
		return err
	}
	onClose(st.Close)
	s, err := graph.NewSampler(dev, dt, graph.SamplerConfig{Fanouts: g.fanouts, Seed: g.seed,
		Degrees: g.degrees, Method: g.sampler, Dependency: g.dependency})
	if err != nil {
		return err
	}
	onClose(s.Close)
	mb, err := s.NewMiniBatch()
	if err != nil {
		return err
	}
	onClose(mb.Close)

	var place cache.Placement
	for v := range g.nodes {
		switch x := r.Float64(); {
		case x < g.gpu:
			place.GPU = append(place.GPU, v)
		case x < g.gpu+g.cpu:
			place.CPU = append(place.CPU, v)
		}
		if g.nodes == hashNodes && len(place.GPU)+len(place.CPU) > 3000 {
			break // tiers of few megabytes
		}
	}
	het, err := cache.NewHetero(dev, g.nodes, g.rowBytes, g.ssds, place)
	if err != nil {
		return err
	}
	onClose(het.Close)
	for _, tier := range []cache.Tier{cache.GPU, cache.CPU} {
		b := het.TierBuffer(tier)
		rows := make([]byte, b.Size())
		for i := range rows {
			rows[i] = byte(r.Uint32())
		}
		if err := difftest.Upload(ctx, dev, st, b.Ptr(), rows); err != nil {
			return err
		}
	}
	buckets, err := het.NewBuckets()
	if err != nil {
		return err
	}
	onClose(buckets.Close)
	hot, err := cache.NewHotness(dev, g.nodes)
	if err != nil {
		return err
	}
	onClose(hot.Close)
	var dst cuda.Buffer
	onClose(func() error {
		if dst == nil {
			return nil
		}
		return dst.Free()
	})

	for i := range count {
		seeds := make([]int64, 1+r.IntN(g.batch))
		for j := range seeds {
			seeds[j] = r.Int64N(g.nodes)
			if g.nodes == hashNodes {
				seeds[j] = seeds[j] / 1000 * 1000
			}
		}
		if err := s.Begin(ctx, st, mb, r.IntN(100), i, seeds); err != nil {
			return err
		}
		for h := range g.fanouts {
			if err := s.Hop(ctx, st, mb, h); err != nil {
				return err
			}
		}
		frontier := mb.HopEnd[len(g.fanouts)]
		first := int64(0)
		if r.IntN(2) == 0 {
			first = r.Int64N(frontier)
		}
		if err := het.Lookup(ctx, st, mb.Nodes.Ptr(), first, frontier-first, buckets); err != nil {
			return err
		}
		if need := frontier*g.stride + 64; dst == nil || dst.Size() < need {
			if dst != nil {
				if err := dst.Free(); err != nil {
					return err
				}
			}
			if dst, err = dev.Alloc(cuda.MemDevice, need+need/2, "rows"); err != nil {
				return err
			}
		}
		// Anywhere in the tensor, so that rows are not always aligned.
		shift := cuda.DevicePtr([]int64{0, 0, 16, int64(r.IntN(48))}[r.IntN(4)])
		if err := het.Gather(st, buckets, dst.Ptr()+shift, g.stride); err != nil {
			return err
		}
		if g.nodes != hashNodes || i == 0 { // its counts are large to compare
			if err := hot.Add(st, mb.Nodes.Ptr(), frontier); err != nil {
				return err
			}
		}
	}
	if g.nodes != hashNodes || g.number%3 == 0 {
		if _, err := hot.Place(ctx, st, r.Int64N(g.nodes+2), r.Int64N(g.nodes+2)); err != nil {
			return err
		}
	}
	return dev.CheckAll()
}

// replay runs a group on a device of its own.
func (g group) replay(ctx context.Context, library string, count int) (map[string]int, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	gpu, err := driver.Open(driver.Options{Library: library})
	if err != nil {
		return nil, err
	}
	dev, err := difftest.New(gpu, g.options())
	if err != nil {
		return nil, errors.Join(err, gpu.Close())
	}
	err = g.run(ctx, dev, count)
	return dev.Launches(), errors.Join(err, dev.Close())
}

// TestTraceWeakMemory replays a few groups where the shim holds plain stores back until a barrier
// or fence asks for them, and lets threads run in random order: what a missing barrier leaves to
// chance.
func TestTraceWeakMemory(t *testing.T) {
	if os.Getenv("HELIOS_GPU") == "1" {
		t.Skip("a GPU has its own memory order; the shim's is asked for here")
	}
	groups := uint64(3)
	if n := batches(t); n >= 1000 {
		groups = uint64(n / 100)
	}
	library, s := fakecuda.Build(t, fakecuda.Private()), seed(t)
	for number := range groups {
		fakecuda.Control(t, library, fmt.Sprintf("seed=%d,store_buffer=%d,jitter=%d", number+1,
			1+number%24, number%2))
		g := newGroup(s, number)
		if _, err := g.replay(t.Context(), library, 4); err != nil {
			t.Fatalf("DIFF_SEED=%d, group %d: %v: %v", s, number, g, err)
		}
	}
}

// TestTrace is the recorded trace of random batches through Go's kernels and the CUDA kernels:
// blocks, buckets, rows, counts and placements must be the same after every launch.
func TestTrace(t *testing.T) {
	library, n, s := difftest.Library(t), batches(t), seed(t)
	start := time.Now()
	var todo []group
	for pos := 0; pos < n; pos += perGroup {
		todo = append(todo, newGroup(s, uint64(pos/perGroup)))
	}
	only := os.Getenv("DIFF_GROUP")
	if only != "" {
		v, err := strconv.Atoi(only)
		if err != nil || v < 0 {
			t.Fatalf("DIFF_GROUP=%q: want the number of a group", only)
		}
		todo = []group{newGroup(s, uint64(v))}
	}
	// Several at a time, since a launch is mostly waiting for other threads.
	const workers = 4
	var mu sync.Mutex
	launches, replayed, next := map[string]int{}, 0, 0
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for {
				mu.Lock()
				if next == len(todo) || t.Failed() {
					mu.Unlock()
					return
				}
				g := todo[next]
				next++
				mu.Unlock()
				count := min(perGroup, n-int(g.number)*perGroup)
				if only != "" {
					count = perGroup
				}
				began := time.Now()
				made, err := g.replay(t.Context(), library, count)
				if err != nil {
					t.Errorf("DIFF_SEED=%d DIFF_GROUP=%d: %v: %v", s, g.number, g, err)
				}
				if os.Getenv("DIFF_VERBOSE") != "" {
					t.Logf("group %d, %v: %v", g.number, time.Since(began).Round(time.Millisecond),
						g)
				}
				mu.Lock()
				for k, c := range made {
					launches[k] += c
				}
				replayed += count
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for _, k := range []string{"sample_begin", "sample_count", "sample_fill", "unique_count",
		"unique_assign", "unique_relabel",
		"lookup", "gather", "hotness", "hotness_rank", "layer_weigh", "layer_rank", "layer_hist",
		"layer_pick", "layer_count", "layer_assign",
		"layer_relabel"} {
		// where a layer takes all that there are, neither is
		few := n < 1000 && (k == "layer_hist" || k == "layer_pick")
		if launches[k] == 0 && only == "" && n >= 100 && !few {
			t.Errorf("kernel %s was never launched", k)
		}
	}
	t.Logf("%d batches, launches %v in %v", replayed, launches,
		time.Since(start).Round(time.Millisecond))
}
