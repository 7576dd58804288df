package gnn

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/graph"
	"helios/internal/simd"
)

// cpuTime is the processor time of the process: others on the machine disturb it less than wall
// time.
func cpuTime() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &ts) != nil {
		panic("no processor time")
	}
	return time.Duration(ts.Nano())
}

// timedStream waits after every kernel and adds up its time. It can leave the products out.
type timedStream struct {
	cuda.Stream
	b     *testing.B
	rows  bool // only kernels that go over rows
	spent map[string]time.Duration
}

func (s *timedStream) LaunchRaw(k cuda.Kernel, cfg cuda.LaunchConfig, params unsafe.Pointer,
	size uintptr) error {
	if s.rows && strings.HasPrefix(k.Name(), "gemm") {
		return nil
	}
	from := cpuTime()
	if err := s.Stream.LaunchRaw(k, cfg, params, size); err != nil {
		return err
	}
	err := s.Synchronize(s.b.Context())
	s.spent[k.Name()] += cpuTime() - from
	return err
}

// bigBatch is a mini-batch of the shape that comparisons are made with: 1 M nodes of 128 features,
// 15 M edges, batch 1024, fanout 15,10,5. It has about 500,000 rows of features.
func bigBatch(b *testing.B, dev cuda.Device, s cuda.Stream) (mb *graph.MiniBatch, x,
	labels cuda.Buffer) {
	const nodes, edges, dim, classes = 1_000_000, 15_000_000, 128, 32
	r := rand.New(rand.NewPCG(1, 2))
	src, dst := make([]int64, edges), make([]int64, edges)
	for i := range src {
		src[i], dst[i] = r.Int64N(nodes), r.Int64N(nodes)
	}
	topo, err := graph.FromEdges(nodes, src, dst, false)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, topo.Close()) })
	dt, err := graph.Attach(dev, topo)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, dt.Close()) })
	fanouts := []int{15, 10, 5}
	sampler, err := graph.NewSampler(dev, dt, graph.SamplerConfig{Fanouts: fanouts, Seed: 1})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, sampler.Close()) })
	mb, err = sampler.NewMiniBatch()
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, mb.Close()) })
	seeds := make([]int64, 1024)
	for i := range seeds {
		seeds[i] = int64(i) * 900
	}
	require.NoError(b, sampler.Begin(b.Context(), s, mb, 0, 0, seeds))
	for h := range fanouts {
		require.NoError(b, sampler.Hop(b.Context(), s, mb, h))
	}
	x = alloc(b, dev, mb.HopEnd[len(fanouts)]*dim*4)
	for i := range f32(x) {
		f32(x)[i] = r.Float32() - 0.5
	}
	labels = alloc(b, dev, int64(len(seeds))*4)
	for i := range cuda.View[int32](labels.Ptr(), int64(len(seeds))) {
		cuda.View[int32](labels.Ptr(), int64(len(seeds)))[i] = r.Int32N(classes)
	}
	return mb, x, labels
}

// touched is a floor: the least processor time, of five runs, in which some workers read and write
// rows as a kernel reads and writes them: each calls run for its share of n rows.
func touched(workers, n int, run func(lo, hi int)) time.Duration {
	best := time.Duration(math.MaxInt64)
	for range 5 {
		from := cpuTime()
		var all sync.WaitGroup
		for w := range workers {
			all.Go(func() { run(n*w/workers, n*(w+1)/workers) })
		}
		all.Wait()
		best = min(best, cpuTime()-from)
	}
	return best
}

// gatherFloors gives the floors of the kernels that gather rows: the lines of all rows that they
// read, in their order, and of those that they write. Reads beside rows are left out.
func gatherFloors(b *testing.B, dev cuda.Device, level simd.Level, mb *graph.MiniBatch,
	kind string) map[string]time.Duration {
	out := map[string]time.Duration{}
	workers := dev.Info().SMs
	size := mb.Blocks[len(mb.Blocks)-1].NumSrc * 256
	x, y := f32(alloc(b, dev, 4*size)), f32(alloc(b, dev, 4*size))
	for i := range x {
		x[i] = 1 // memory that nobody wrote to is one page
	}
	copy(y, x)
	order := make([]uint32, mb.Blocks[len(mb.Blocks)-1].NumSrc)
	for i := range order {
		order[i] = uint32(i)
	}
	zeros := make([]uint32, len(order))
	bytes := func(v []float32) []byte {
		return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), 4*len(v))
	}
	for h := range mb.Blocks {
		block := &mb.Blocks[h]
		first := h == len(mb.Blocks)-1
		wide := 256
		if first && kind == "sage" {
			wide = 128
		}
		n, m := int(block.NumSrc), int(block.NumDst)
		src, indptr := cuda.View[uint32](pointer(block.Src), block.NumEdges),
			cuda.View[int64](pointer(block.Indptr), block.NumDst+1)
		lists := make([][]uint32, n)
		for i := range m {
			for _, j := range src[indptr[i]:indptr[i+1]] {
				lists[j] = append(lists[j], uint32(i))
			}
		}
		back, ends := slices.Concat(lists...), make([]int, n+1)
		for j, list := range lists {
			ends[j+1] = ends[j] + len(list)
		}
		read := func(list []uint32, lo, hi int) { simd.ReadRows(level, x, wide, list, lo, hi) }
		write := func(lo, hi int) {
			if !level.CopyRows(bytes(y), bytes(x), order[lo:hi], zeros[:hi-lo], hi-lo, 4*wide,
				4*wide) {
				clear(y[lo*wide : hi*wide])
			}
			level.StoreFence()
		}
		floor := func(kernel string, rows int, run func(lo, hi int)) {
			out[kernel] += touched(workers, rows, run)
		}
		forward := func(lo, hi int) { read(src, int(indptr[lo]), int(indptr[hi])) }
		backward := func(lo, hi int) {
			read(back, ends[lo], ends[hi])
			read(order, min(lo, m), min(hi, m)) // destinations' own
			write(lo, hi)
		}
		if kind == "sage" {
			floor("sage_mean", m, func(lo, hi int) { forward(lo, hi); write(lo, hi) })
			if !first {
				floor("sage_mean_bwd", n, func(lo, hi int) {
					read(order, lo, hi) // the gates
					backward(lo, hi)
				})
			}
			continue
		}
		floor("gat_sum", m, func(lo, hi int) {
			forward(lo, hi)
			read(order, lo, hi)
			write(lo, hi)
		})
		floor("gat_dot", m, func(lo, hi int) {
			forward(lo, hi)
			read(order, lo, hi)
			simd.ReadRows(level, y, wide, order, lo, hi) // the gradients
		})
		floor("gat_sum_bwd", n, backward)
		floor("gat_score", n, func(lo, hi int) { read(order, lo, hi) })
		floor("gat_scaled_sum", n, func(lo, hi int) {
			read(order, lo, hi)
			read(order, min(lo, m), min(hi, m))
		})
	}
	return out
}

// BenchmarkStepKernels measures what a training step of bigBatch on one and on two workers does
// besides products, kernel by kernel, in processor time.
func BenchmarkStepKernels(b *testing.B) {
	if testing.Short() {
		b.Skip("a graph of 15 M edges")
	}
	for _, level := range simd.Levels() {
		for _, kind := range []string{"sage", "gat"} {
			for workers := 1; workers <= 2; workers++ {
				b.Run(fmt.Sprintf("%v/%s/%d", level, kind, workers),
					func(b *testing.B) { benchStep(b, level, kind, workers) })
			}
		}
	}
}

func benchStep(b *testing.B, level simd.Level, kind string, workers int) {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: workers, Kernels: level})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, dev.Close()) })
	s := &timedStream{newStream(b, dev), b, false, map[string]time.Duration{}}
	mb, x, labels := bigBatch(b, dev, s)
	m, err := NewModel(dev, ModelConfig{
		ModelSettings: ModelSettings{Model: kind, Hidden: 256},
		InDim:         128,
		Classes:       32,
		Layers:        3,
	})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, m.Close()) })
	step := func() {
		require.NoError(b, m.Train(s, mb, x.Ptr(), labels.Ptr(), Step{LR: 0.003}))
		_, _, _, err := m.Outcome(b.Context(), s)
		require.NoError(b, err)
	}
	step()
	s.rows = true
	best := map[string]time.Duration{}
	b.ReportAllocs()
	for b.Loop() {
		clear(s.spent)
		step()
		for k, d := range s.spent {
			if best[k] == 0 || d < best[k] {
				best[k] = d
			}
		}
	}
	var names []string
	all := 0.0
	for k, d := range best {
		names = append(names, k)
		all += d.Seconds()
	}
	slices.Sort(names)
	var line strings.Builder
	for _, k := range names {
		fmt.Fprintf(&line, " %s %.2f", k, best[k].Seconds()*1e3)
	}
	b.ReportMetric(all*1e3, "best-ms")
	b.Logf("least ms of each kernel:%s", line.String())
	line.Reset()
	floors := gatherFloors(b, dev, level, mb, kind)
	for _, k := range slices.Sorted(maps.Keys(floors)) {
		fmt.Fprintf(&line, " %s %.2f (%.2f times)", k, floors[k].Seconds()*1e3,
			best[k].Seconds()/floors[k].Seconds())
	}
	b.Logf("floors in ms, and the kernel's time by it:%s", line.String())
	for l := range mb.Blocks {
		b.Logf("block %d: %d destinations, %d sources, %d edges", l, mb.Blocks[l].NumDst,
			mb.Blocks[l].NumSrc, mb.Blocks[l].NumEdges)
	}
}
