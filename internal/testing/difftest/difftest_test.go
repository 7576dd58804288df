package difftest_test

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cuda"
	"helios/graph"
	"helios/internal/hostmem"
	"helios/internal/testing/difftest"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
)

// fixed is a group in which every kernel has work, on several blocks.
func fixed() group {
	return group{seed: 11, number: 3, nodes: 900, degree: 20, fanouts: []int{6, 4}, degrees: true,
		gpu: 0.3, cpu: 0.3,
		ssds: 3, rowBytes: 48, stride: 64, sms: 4, grain: 40, batch: 60}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// One flipped bit in what a CUDA kernel has left is found, wherever it is, and named.
func TestFlippedBitsAreFound(t *testing.T) {
	type where struct {
		kernel, buffer string
		param          int   // index in the parameter block of the buffer's address
		offset         int64 // of the byte
	}
	for _, w := range []where{
		{"sample_count", "block offsets", 4, 8}, {"sample_fill", "block sources", 5, 13},
		{"unique_assign", "frontier", 2, 641}, {"unique_relabel", "block sources", 5, 2},
		{"lookup", "cache lookup", 2, 77}, {"gather", "rows", 6, 3}, {"hotness", "hotness", 1, 5},
		{"hotness_rank", "hotness ranking", 4, 8},
		{"labor_count", "sampler limits", 26, 9}, {"labor_fill", "block sources", 5, 13},
		{"layer_rank", "layer sampling", 28, 9}, {"layer_assign", "block weights", 34, 241},
	} {
		t.Run(w.kernel, func(t *testing.T) {
			spoilt := 0
			opt := fixed().options()
			opt.RandomThreads = false
			opt.Spoil = func(l difftest.Launch, param func(int) cuda.DevicePtr,
				mem difftest.Memory) {
				if l.Kernel == w.kernel && spoilt == 0 {
					mem.Bytes(param(w.param)+cuda.DevicePtr(w.offset), 1)[0] ^= 4
					spoilt = l.Number
				}
			}
			g := fixed()
			g.sampler, g.dependency = samplerOf(w.kernel)
			err := g.run(within(t), difftest.Open(t, opt), 2)
			var m *difftest.Mismatch
			if !errors.As(err, &m) {
				t.Fatalf("spoilt launch %d, got %v", spoilt, err)
			}
			if spoilt == 0 || m.Number != spoilt || m.Kernel != w.kernel || m.Buffer != w.buffer ||
				m.Different != 1 {
				t.Errorf("spoilt launch %d: %v", spoilt, m)
			}
			// A buffer may hold several parameters' arrays; the offset is within the buffer.
			if m.Offset%8 != w.offset%8 && w.kernel != "lookup" {
				t.Errorf("offset %d, spoilt byte %d: %v", m.Offset, w.offset, m)
			}
		})
	}
}

// plants are small mistakes in kernels, each of a kind that a port makes.
var plants = []struct{ kernel, file, right, wrong string }{
	{"lookup", "lookup.cu", "for (u32 i = 0; i < active; i++) sum +=",
		"for (u32 i = 1; i < active; i++) sum +="},
	{"lookup", "lookup.cu", "return j == word ? ((u64)1 << shift) - 1 : 0;",
		"return j == word ? ((u64)4 << shift) - 1 : 0;"},
	{"gather", "gather.cu", "if (i + u * rows < s.hi) {", "if (i + u * rows + 1 < s.hi) {"},
	{"sample_fill", "sample.cu", "philox_bounded(r, j + 1)", "philox_bounded(r, j)"},
	{"unique_assign", "unique.cu", "if (i < w) index += n;", "if (i <= w) index += n;"},
	{"hotness_rank", "hotness.cu", "v == threshold[k] && rank < left[k]",
		"v == threshold[k] && rank <= left[k]"},
	{"labor_count", "labor.cu", "p.Turn + philox_bounded(mix(p.Phase + x), p.Span) >= p.Span",
		"p.Turn + philox_bounded(mix(p.Phase + x), p.Span) > p.Span"},
	{"labor_count", "labor.cu", "(high / d << 32 | low / d) - 1", "(high / d << 32 | low / d) + 1"},
	{"labor_count", "labor.cu", "if (o < least) least = o;", "if (o < least && d > 1) least = o;"},
	{"labor_fill", "labor.cu", "variate(p, id) <= l", "variate(p, id) < l"},
	{"layer_weigh", "ladies.cu", "((u64)1 << p.Bits) / degree / degree",
		"((u64)1 << p.Bits) / degree / (degree + 1)"},
	{"layer_pick", "ladies.cu", "if (below <= left && left < below + n) {",
		"if (below < left && left <= below + n) {"},
	{"layer_assign", "ladies.cu", "fp::sub(1.0, fp::exp_down(-x))",
		"1.0 - fp::exp_down(-x * 1.00001)"},
}

// barriers of the kernels, each with what is left when it is taken out.
var barriers = []struct{ kernel, file, right, wrong string }{
	{"sample_fill", "sample.cu",
		"\t\tdev::syncthreads(); // the last tile's edges are done with first and start\n", ""},
	{"labor_count", "labor.cu", "\t\tdev::syncthreads();\n\t\tfor (u32 i = tid / dev::warp_size",
		"\t\tfor (u32 i = tid / dev::warp_size"},
	{"sample_count", "scan.h",
		"	if (dev::lane() == 31) dev::st(&sums[w], mine);\n	dev::syncthreads();",
		"	if (dev::lane() == 31) dev::st(&sums[w], mine);"},
	{"lookup", "lookup.cu", "	dev::syncwarp();\n}\n\nHX_DEVICE inline void find_rows",
		"}\n\nHX_DEVICE inline void find_rows"},
}

// Barriers left out of copies of the kernels are found on the shim with stores held back.
func TestMissingBarriersAreFound(t *testing.T) {
	if os.Getenv("HELIOS_GPU") == "1" {
		t.Skip("the kernels of a GPU come from the binary")
	}
	fakecuda.Build(t) // or skip
	few := barriers
	if os.Getenv("DIFF_BATCHES") == "" || wide.Lean() {
		few = few[:1]
	}
	for _, p := range few {
		t.Run(p.kernel, func(t *testing.T) {
			lib := fakecuda.Build(t, fakecuda.Root(plantedRoot(t, p.file, p.right, p.wrong)),
				fakecuda.Private())
			fakecuda.Control(t, lib, "seed=3,store_buffer=16,jitter=0")
			opt := fixed().options()
			// differences are wanted
			opt.Spoil = func(difftest.Launch, func(int) cuda.DevicePtr, difftest.Memory) {}
			g := fixed()
			g.sampler, g.dependency = samplerOf(p.kernel)
			g.grain, opt.Grain = 1000, 1000 // warps that take several steps
			if err := g.run(within(t), difftest.OpenLibrary(t, lib, opt), 10); err == nil {
				t.Fatalf("%s without %q: nothing was found", p.kernel, p.right)
			} else {
				t.Log(err)
			}
		})
	}
}

// Off-by-one mistakes planted in copies of the kernels are found in the kernel that has them.
func TestPlantedMistakesAreFound(t *testing.T) {
	if os.Getenv("HELIOS_GPU") == "1" {
		t.Skip("the kernels of a GPU come from the binary")
	}
	fakecuda.Build(t) // or skip
	few := plants
	if os.Getenv("DIFF_BATCHES") == "" || wide.Lean() {
		few = slices.Concat(plants[:1], plants[4:5])
	}
	for _, p := range few {
		t.Run(p.kernel, func(t *testing.T) {
			lib := fakecuda.Build(t, fakecuda.Root(plantedRoot(t, p.file, p.right, p.wrong)))
			opt := fixed().options()
			// differences are wanted
			opt.Spoil = func(difftest.Launch, func(int) cuda.DevicePtr, difftest.Memory) {}
			g := fixed()
			g.sampler, g.dependency = samplerOf(p.kernel)
			err := g.run(within(t), difftest.OpenLibrary(t, lib, opt), 10)
			var m *difftest.Mismatch
			if !errors.As(err, &m) || m.Kernel != p.kernel {
				t.Fatalf("%s with %q: %v", p.kernel, p.wrong, err)
			}
			t.Log(m)
		})
	}
}

// plantedRoot is a copy of what the fake is built from, with one line of one kernel changed.
func plantedRoot(t *testing.T, file, right, wrong string) string {
	t.Helper()
	root := t.TempDir()
	repo, err := filepath.Abs("../../..")
	require.NoError(t, err)
	for _, pattern := range []string{"go.mod", "cuda/kernels/*.h", "cuda/kernels/*.cu",
		"internal/testing/shim/*.h", "internal/testing/shim/*.cc", "internal/testing/fakecuda/src/*"} {
		files, err := filepath.Glob(filepath.Join(repo, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v", pattern, err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			require.NoError(t, err)
			if filepath.Base(f) == file {
				if strings.Count(string(text), right) != 1 {
					t.Fatalf("%s has %q %d times, want once: the plant is out of date", file, right,
						strings.Count(string(text), right))
				}
				text = []byte(strings.Replace(string(text), right, wrong, 1))
			}
			rel, err := filepath.Rel(repo, f)
			require.NoError(t, err)
			to := filepath.Join(root, rel)
			require.NoError(t, os.MkdirAll(filepath.Dir(to), 0o700))
			require.NoError(t, os.WriteFile(to, text, 0o600))
		}
	}
	return root
}

// Bad input makes both kernels fail, with the same words.
func TestFailuresHaveTheSameWords(t *testing.T) {
	for _, c := range []struct {
		name string
		want string
		run  func(t *testing.T, ctx context.Context, dev *difftest.Device, st cuda.Stream) error
	}{
		{"lookup", "row 5000 at position 37: the dataset has rows 0 to 99",
			func(t *testing.T, ctx context.Context, dev *difftest.Device, st cuda.Stream) error {
				h, err := cache.NewHetero(dev, 100, 16, 2, cache.Placement{GPU: []int64{1, 2}})
				if err != nil {
					return err
				}
				b, err := h.NewBuckets()
				if err != nil {
					return err
				}
				ids := make([]int64, 90)
				ids[37] = 5000
				err = lookUp(t, ctx, dev, st, h, b, ids)
				return errors.Join(err, b.Close(), h.Close())
			}},
		{"gather", "gather: slot 7 of hit 1: the tier has 2 rows",
			func(t *testing.T, ctx context.Context, dev *difftest.Device, st cuda.Stream) error {
				return gatherDamaged(t, ctx, dev, st, 16, func(b *cache.Buckets) (cuda.DevicePtr,
					uint32) {
					return b.GPUSlot.Ptr() + 4, 7
				})
			}},
		{"gather", "gather: position 9 of hit 1: the tensor has 3 rows",
			func(t *testing.T, ctx context.Context, dev *difftest.Device, st cuda.Stream) error {
				return gatherDamaged(t, ctx, dev, st, 3, func(b *cache.Buckets) (cuda.DevicePtr,
					uint32) {
					return b.GPUPos.Ptr() + 4, 9
				})
			}},
		{"hotness", "row -1 at position 2: the dataset has rows 0 to 9",
			func(t *testing.T, ctx context.Context, dev *difftest.Device, st cuda.Stream) error {
				h, err := cache.NewHotness(dev, 10)
				if err != nil {
					return err
				}
				ids, err := dev.Alloc(cuda.MemDevice, 24, "ids")
				if err != nil {
					return err
				}
				if err := difftest.Upload(ctx, dev, st, ids.Ptr(), []int64{1, 2, -1}); err != nil {
					return err
				}
				err = errors.Join(h.Add(st, ids.Ptr(), 3), st.Synchronize(ctx))
				return errors.Join(err, h.Close(), ids.Free())
			}},
		{"sample_fill", "sample: id 77 of edge 1: nodes are 0 to 3",
			func(t *testing.T, ctx context.Context, dev *difftest.Device, st cuda.Stream) error {
				return sampleDamaged(t, ctx, dev, st,
					func(topo *graph.Topology) { topo.Indices32[1] = 77 })
			}},
		{"sample_count", "sample: node 1: 2 to -9 are no offsets of the topology",
			func(t *testing.T, ctx context.Context, dev *difftest.Device, st cuda.Stream) error {
				return sampleDamaged(t, ctx, dev, st,
					func(topo *graph.Topology) { topo.Indptr[2] = -9 })
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dev := difftest.Open(t, difftest.Options{Seed: 1, SMs: 3, Grain: 20})
			st, err := dev.NewStream(cuda.StreamOptions{Name: "bad input"})
			require.NoError(t, err)
			err = c.run(t, within(t), dev, st)
			var k *cuda.KernelError
			if !errors.As(err, &k) || k.Kernel != c.name || !strings.Contains(k.Err.Error(),
				c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			_ = st.Close() // says it again
			if err := dev.Err(); err != nil {
				t.Error(err)
			}
		})
	}
}

func lookUp(t *testing.T, ctx context.Context, dev *difftest.Device, st cuda.Stream,
	h *cache.Hetero, b *cache.Buckets, ids []int64) error {
	buf, err := dev.Alloc(cuda.MemDevice, int64(len(ids))*8, "ids")
	if err != nil {
		return err
	}
	if err := difftest.Upload(ctx, dev, st, buf.Ptr(), ids); err != nil {
		return err
	}
	return errors.Join(h.Lookup(ctx, st, buf.Ptr(), 0, int64(len(ids)), b), buf.Free())
}

// gatherDamaged gathers rows 1, 2 and 5, two of which are cached, after one entry of the buckets
// was overwritten.
func gatherDamaged(t *testing.T, ctx context.Context, dev *difftest.Device, st cuda.Stream,
	rowBytes int64, damage func(*cache.Buckets) (cuda.DevicePtr, uint32)) error {
	h, err := cache.NewHetero(dev, 100, rowBytes, 2, cache.Placement{GPU: []int64{1, 2}})
	if err != nil {
		return err
	}
	b, err := h.NewBuckets()
	if err != nil {
		return err
	}
	dst, err := dev.Alloc(cuda.MemDevice, 3*rowBytes, "rows")
	if err != nil {
		return err
	}
	if err := lookUp(t, ctx, dev, st, h, b, []int64{1, 2, 5}); err != nil {
		return err
	}
	pos, v := damage(b)
	if err := difftest.Upload(ctx, dev, st, pos, []uint32{v}); err != nil {
		return err
	}
	err = errors.Join(h.Gather(st, b, dst.Ptr(), rowBytes), st.Synchronize(ctx))
	return errors.Join(err, b.Close(), h.Close(), dst.Free())
}

// sampleDamaged samples node 1's neighbours after something was done to its topology.
func sampleDamaged(t *testing.T, ctx context.Context, dev *difftest.Device, st cuda.Stream,
	damage func(*graph.Topology)) error {
	topo, err := graph.FromEdges(4, []int64{0, 2, 3, 1}, []int64{0, 0, 1, 3}, false)
	if err != nil {
		return err
	}
	dt, err := graph.Attach(dev, topo)
	if err != nil {
		return err
	}
	s, err := graph.NewSampler(dev, dt, graph.SamplerConfig{Fanouts: []int{3}})
	if err != nil {
		return err
	}
	mb, err := s.NewMiniBatch()
	if err != nil {
		return err
	}
	damage(topo)
	err = s.Begin(ctx, st, mb, 0, 0, []int64{0, 1})
	if err == nil {
		err = s.Hop(ctx, st, mb, 0)
	}
	return errors.Join(err, mb.Close(), s.Close(), dt.Close(), topo.Close())
}

// Lines of rows of every alignment, with gaps and without, go through gather's paths: from staging,
// to slots, from slots.
func TestGatherFromLinesEveryAlignment(t *testing.T) {
	dev := difftest.Open(t, difftest.Options{Seed: 6, SMs: 2, Grain: 300, RandomThreads: true})
	ctx := within(t)
	st, err := dev.NewStream(cuda.StreamOptions{Name: "rows"})
	require.NoError(t, err)
	const rows = 60
	nodes, err := dev.Alloc(cuda.MemPinned, rows*8, "nodes")
	require.NoError(t, err)
	for i := range hostmem.View[int64](nodes.Bytes()) {
		hostmem.View[int64](nodes.Bytes())[i] = int64(i*37+5) % rows
	}
	sizes := []int64{1, 3, 4, 8, 12, 16, 17, 24, 31, 33, 48, 64, 100, 127, 256, 400, 513,
		1000, 1024}
	if wide.Lean() {
		sizes = []int64{3, 16, 100}
	}
	for _, size := range sizes {
		for k, l := range []cache.Lines{
			{SSDs: 2, RowsPerLine: 1, LineBytes: size + 4, RowStride: size},
			{SSDs: 1, RowsPerLine: 3, LineBytes: 3 * size, RowStride: size},
			{SSDs: 3, RowsPerLine: 4, LineBytes: 4*size + 12, RowStride: size},
			{SSDs: 1, RowsPerLine: 2, LineBytes: 2*size + 32, RowStride: size + 16},
		} {
			d, err := cache.NewDynamic(dev, cache.DynamicConfig{Rows: rows, RowBytes: size,
				Lines: l, Slots: l.Count(rows) * 2 / 3, Policy: "lru", CPU: []int64{7, 20}})
			require.NoError(t, err)
			ticket, err := d.NewTicket()
			require.NoError(t, err)
			plan, err := d.NewReadPlan()
			require.NoError(t, err)
			dst, err := dev.Alloc(cuda.MemDevice, rows*(size+5)+16, "rows")
			require.NoError(t, err)
			for batch := range int64(3) { // all misses, then hits among them
				d.NextBatch()
				err := d.Admit(ctx, st, nodes.Ptr(), 10*batch, 25, ticket)
				if err == nil {
					err = d.Plan(plan, ticket)
				}
				require.NoError(t, err)
				if want := batch > 0; ticket.NGPU > 0 != want || ticket.NLines == 0 {
					t.Fatalf("batch %d: %v", batch, ticket)
				}
				staging, err := dev.Alloc(cuda.MemDevice, plan.Lines*l.LineBytes, "staging")
				require.NoError(t, err)
				mem := make([]byte, staging.Size())
				for i := range mem {
					mem[i] = byte(math.Sqrt(float64(int64(i)*7919 + batch)))
				}
				require.NoError(t, difftest.Upload(ctx, dev, st, staging.Ptr(), mem))
				pos, stride := int64(k%2)*batch, size+int64(k)
				if err := d.Finish(st, ticket, staging, dst.Ptr()+cuda.DevicePtr(pos),
					stride); err != nil {
					t.Fatalf("rows of %d bytes in %+v, stride %d, at %d: %v", size, l, stride,
						pos, err)
				}
				require.NoError(t, errors.Join(st.Synchronize(ctx), d.Release(ticket),
					staging.Free()))
			}
			require.NoError(t, errors.Join(ticket.Close(), plan.Close(), d.Close(), dst.Free()))
		}
	}
	require.NoError(t, errors.Join(st.Close(), nodes.Free()))
}

// Row sizes and strides of every alignment go through gather's paths, with both tiers.
func TestGatherEveryAlignment(t *testing.T) {
	dev := difftest.Open(t, difftest.Options{Seed: 5, SMs: 2, Grain: 300, RandomThreads: true})
	ctx := within(t)
	st, err := dev.NewStream(cuda.StreamOptions{Name: "rows"})
	require.NoError(t, err)
	const rows = 60
	var place cache.Placement
	ids := make([]int64, rows)
	for r := range int64(rows) {
		ids[r] = (r*37 + 5) % rows
		if r%3 == 0 {
			place.GPU = append(place.GPU, r)
		} else {
			place.CPU = append(place.CPU, r)
		}
	}
	sizes := []int64{1, 2, 3, 4, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 100, 127, 128,
		255, 256, 257, 400, 512, 513, 1000, 1024, 4095, 4096}
	if wide.Lean() {
		sizes = []int64{1, 3, 16, 17, 100, 513}
	}
	for _, size := range sizes {
		h, err := cache.NewHetero(dev, rows, size, 1, place)
		require.NoError(t, err)
		for _, tier := range []cache.Tier{cache.GPU, cache.CPU} {
			b := h.TierBuffer(tier)
			mem := make([]byte, b.Size())
			for i := range mem {
				mem[i] = byte(math.Sqrt(float64(i * 7919)))
			}
			require.NoError(t, difftest.Upload(ctx, dev, st, b.Ptr(), mem))
		}
		b, err := h.NewBuckets()
		require.NoError(t, err)
		require.NoError(t, lookUp(t, ctx, dev, st, h, b, ids))
		for _, c := range [][2]int64{{size, 0}, {size + 1, 1}, {(size + 15) &^ 15, 0},
			{(size + 15) &^ 15, 8}, {(size+3)&^3 + 4, 4}} {
			dst, err := dev.Alloc(cuda.MemDevice, rows*c[0]+16, "rows")
			require.NoError(t, err)
			if err := h.Gather(st, b, dst.Ptr()+cuda.DevicePtr(c[1]), c[0]); err != nil {
				t.Fatalf("rows of %d bytes, stride %d, at %d: %v", size, c[0], c[1], err)
			}
			require.NoError(t, dst.Free())
		}
		require.NoError(t, errors.Join(b.Close(), h.Close()))
	}
	require.NoError(t, st.Close())
}
