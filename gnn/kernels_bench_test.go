package gnn

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
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

// BenchmarkStepKernels measures what a training step of bigBatch on two workers does besides
// products, kernel by kernel, in processor time.
func BenchmarkStepKernels(b *testing.B) {
	if testing.Short() {
		b.Skip("a graph of 15 M edges")
	}
	for _, level := range simd.Levels() {
		for _, kind := range []string{"sage", "gat"} {
			b.Run(level.String()+"/"+kind, func(b *testing.B) { benchStep(b, level, kind) })
		}
	}
}

func benchStep(b *testing.B, level simd.Level, kind string) {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2, Kernels: level})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, dev.Close()) })
	s := &timedStream{newStream(b, dev), b, false, map[string]time.Duration{}}
	mb, x, labels := bigBatch(b, dev, s)
	m, err := NewModel(dev, ModelConfig{Kind: kind, InDim: 128, Hidden: 256, Classes: 32,
		Layers: 3})
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
	for l := range mb.Blocks {
		b.Logf("block %d: %d destinations, %d sources, %d edges", l, mb.Blocks[l].NumDst,
			mb.Blocks[l].NumSrc, mb.Blocks[l].NumEdges)
	}
}
