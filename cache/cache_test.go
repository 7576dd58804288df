package cache

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/hostmem"
	"helios/internal/simd"
	"helios/internal/testing/difftest"
)

func device(t testing.TB, sms int) cuda.Device {
	t.Helper()
	h, err := cuda.NewHost(cuda.HostOptions{SMs: sms})
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := h.Close(); err != nil && !t.Failed() {
			t.Error(err) // a leak
		}
	})
	return h
}

// opener makes a device that the test closes.
type opener func(t testing.TB, sms int) cuda.Device

// blind is a device whose MemDevice memory the CPU cannot see, as a GPU's is.
type blind struct{ cuda.Device }

type blindBuffer struct{ cuda.Buffer }

func (blindBuffer) Bytes() []byte { return nil }

func (b blind) Alloc(kind cuda.MemKind, size int64, purpose string) (cuda.Buffer, error) {
	buf, err := b.Device.Alloc(kind, size, purpose)
	if err == nil && kind == cuda.MemDevice {
		return blindBuffer{buf}, nil
	}
	return buf, err
}

func must[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	require.NoError(t, err)
}

func stream(t testing.TB, dev cuda.Device) cuda.Stream {
	t.Helper()
	st := must(dev.NewStream(cuda.StreamOptions{Name: "cache test"}))(t)
	t.Cleanup(func() { _ = st.Close() })
	return st
}

func limit(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// upload puts values into device memory.
func upload[T any](t testing.TB, dev cuda.Device, v []T) cuda.Buffer {
	t.Helper()
	n, err := binary.Append(nil, binary.LittleEndian, v)
	ok(t, err)
	b := must(dev.Alloc(cuda.MemPinned, int64(len(n)), "test input"))(t)
	copy(b.Bytes(), n)
	t.Cleanup(func() { ok(t, b.Free()) })
	return b
}

// randomPlacement gives each row a tier with the probabilities pGPU and pCPU.
func randomPlacement(rng *rand.Rand, rows int64, pGPU, pCPU float64) Placement {
	var p Placement
	for r := range rows {
		switch x := rng.Float64(); {
		case x < pGPU:
			p.GPU = append(p.GPU, r)
		case x < pGPU+pCPU:
			p.CPU = append(p.CPU, r)
		}
	}
	return p
}

type where struct {
	tier Tier
	slot int64
}

// naive is the index as a map.
func naive(p Placement) map[int64]where {
	m := map[int64]where{}
	for i, r := range p.GPU {
		m[r] = where{GPU, int64(i)}
	}
	for i, r := range p.CPU {
		m[r] = where{CPU, int64(i)}
	}
	return m
}

func seeded(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// streamed is a placement row by row, as BuildIndexOf takes it.
func streamed(p Placement) iter.Seq2[int64, Tier] {
	m := naive(p)
	return func(yield func(int64, Tier) bool) {
		for _, r := range slices.Sorted(maps.Keys(m)) {
			if !yield(r, m[r].tier) {
				return
			}
		}
	}
}

func TestIndexAgainstMap(t *testing.T) {
	defer func(old int64) { windowBytes = old }(windowBytes)
	windowBytes = 3 * lineBytes
	host := device(t, 1)
	rng := seeded(t)
	for name, dev := range map[string]cuda.Device{"host": host, "blind": blind{host}} {
		t.Run(name, func(t *testing.T) {
			for _, rows := range []int64{0, 1, 31, 32, 33, 223, 224, 225, 447, 448, 449, 5000,
				224 * 50} {
				for k, share := range [][2]float64{{0, 0}, {1, 0}, {0, 1}, {0.5, 0.5}, {0.1, 0.3},
					{0.02, 0}, {0, 0.9}, {0.001, 0.001}} {
					// GPU and CPU rows in lines of three windows and more
					if name == "blind" && rows > 449 && (k != 3 || rows > 5000) {
						continue // each answer is a copy of its own
					}
					p := randomPlacement(rng, rows, share[0], share[1])
					i := must(BuildIndex(dev, rows, p))(t)
					if k%2 == 1 {
						ok(t, i.Close())
						i = must(BuildIndexOf(dev, rows, streamed(p)))(t)
					}
					if want := (rows + 223) / 224 * 64; i.Bytes() != want ||
						IndexBytes(rows) != want {
						t.Fatalf("%d rows: %d bytes, want %d", rows, i.Bytes(), want)
					}
					m := naive(p)
					for r := int64(-2); r < rows+300; r++ {
						tier, slot := i.Lookup(r)
						if tier != m[r].tier || slot != m[r].slot {
							t.Fatalf("row %d of %d: %v slot %d, want %v slot %d", r, rows, tier,
								slot, m[r].tier, m[r].slot)
						}
					}
					ok(t, i.Close())
				}
			}
		})
	}
}

// Rows at the edges of lines and words, with all others on the other tier.
func TestIndexEdges(t *testing.T) {
	dev := device(t, 1)
	const rows = 3*224 + 5
	for _, only := range []int64{0, 31, 32, 222, 223, 224, 225, 447, 448, 671, 672, rows - 1} {
		var p Placement
		for r := range int64(rows) {
			if r == only {
				p.GPU = append(p.GPU, r)
			} else {
				p.CPU = append(p.CPU, r)
			}
		}
		i := must(BuildIndex(dev, rows, p))(t)
		for r := range int64(rows) {
			want := where{CPU, r}
			if r == only {
				want = where{GPU, 0}
			} else if r > only {
				want.slot--
			}
			if tier, slot := i.Lookup(r); tier != want.tier || slot != want.slot {
				t.Fatalf("row %d with %d alone: %v %d, want %v", r, only, tier, slot, want)
			}
		}
		ok(t, i.Close())
	}
}

func TestIndexRefusesBadPlacements(t *testing.T) {
	dev := device(t, 1)
	for name, p := range map[string]Placement{
		"both tiers": {GPU: []int64{1, 5}, CPU: []int64{2, 5}},
		"ascending":  {GPU: []int64{3, 2}},
		"below 100":  {CPU: []int64{100}},
		"row -1":     {CPU: []int64{-1}},
		"row 7 afte": {CPU: []int64{7, 7}},
	} {
		if _, err := BuildIndex(dev, 100, p); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := NewHetero(dev, 100, 8, 1, p); err == nil {
			t.Errorf("%s: a cache was made", name)
		}
	}
	for name, rows := range map[string]map[int64]Tier{"row 3 in tier ssd": {3: SSD},
		"gpu tier: row 100 after row -1": {100: GPU}, "cpu tier: row -7 after": {-7: CPU}} {
		if _, err := BuildIndexOf(dev, 100, maps.All(rows)); err == nil ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := BuildIndex(dev, -1, Placement{}); err == nil {
		t.Error("a negative number of rows")
	}
	if u := dev.MemUsage(); len(u) != 0 {
		t.Errorf("memory left: %v", u)
	}
}

// 5.6 billion nodes (the size of the paper's largest graph): 1.6 GB, 0.29 bytes a node.
func TestIndexSize(t *testing.T) {
	const rows = 5_600_000_000
	got := IndexBytes(rows)
	if got != 1_600_000_000 {
		t.Errorf("%d bytes", got)
	}
	if per := float64(got) / rows; per < 0.285 || per > 0.286 {
		t.Errorf("%.4f bytes a node", per)
	}
}

// hits of a placement when each row is met hotness times.
func hits(p Placement, hot []uint32) (gpu, all uint64) {
	for _, r := range p.GPU {
		gpu += uint64(hot[r])
	}
	all = gpu
	for _, r := range p.CPU {
		all += uint64(hot[r])
	}
	return gpu, all
}

func TestPlaceIsBest(t *testing.T) {
	rng := seeded(t)
	for range 400 {
		n := rng.IntN(9)
		hot := make([]uint32, n)
		for i := range hot {
			hot[i] = rng.Uint32N(4) << (16 * rng.Uint32N(2)) // ties, and both halves of the radix
		}
		g, c := rng.Int64N(int64(n)+3), rng.Int64N(int64(n)+3)
		p := Place(hot, g, c)
		gotGPU, gotAll := hits(p, hot)
		var bestGPU, bestAll uint64
		for m := range 1 << n { // every set of rows, as GPU tier and as both tiers together
			var sum uint64
			size := int64(0)
			for i := range n {
				if m>>i&1 == 1 {
					sum += uint64(hot[i])
					size++
				}
			}
			if size <= g {
				bestGPU = max(bestGPU, sum)
			}
			if size <= g+c {
				bestAll = max(bestAll, sum)
			}
		}
		if gotGPU != bestGPU || gotAll != bestAll {
			t.Fatalf("hotness %v, %d+%d rows: %v hits %d and %d, best %d and %d", hot, g, c, p,
				gotGPU, gotAll, bestGPU, bestAll)
		}
		if want := min(g, int64(n)); int64(len(p.GPU)) != want ||
			int64(len(p.CPU)) != min(c, int64(n)-want) {
			t.Fatalf("hotness %v, %d+%d rows: %v", hot, g, c, p)
		}
		if !slices.IsSorted(p.GPU) || !slices.IsSorted(p.CPU) {
			t.Fatalf("%v is not ascending", p)
		}
	}
}

// The same as a sort by (hotness falling, row rising), on more rows.
func TestPlaceAgainstSort(t *testing.T) {
	rng := seeded(t)
	const n = 20000
	hot := make([]uint32, n)
	for i := range hot {
		hot[i] = uint32(float64(100000) / (1 + float64(rng.IntN(3000))))
		if rng.IntN(3) == 0 {
			hot[i] = 0
		}
	}
	order := make([]int64, n)
	for i := range order {
		order[i] = int64(i)
	}
	slices.SortStableFunc(order, func(a, b int64) int { return int(int64(hot[b]) - int64(hot[a])) })
	for _, c := range [][2]int64{{0, 0}, {0, 500}, {500, 0}, {700, 2000}, {12000, 7999}, {n, 5},
		{0, n}, {n / 2, n}, {-3, -1}} {
		g := min(max(c[0], 0), n)
		k := min(max(c[1], 0), n-g)
		want := Placement{slices.Sorted(slices.Values(order[:g])),
			slices.Sorted(slices.Values(order[g : g+k]))}
		got := Place(hot, c[0], c[1])
		if !slices.Equal(got.GPU, want.GPU) || !slices.Equal(got.CPU, want.CPU) {
			t.Fatalf("%v: differs from the sort", c)
		}
	}
}

// rowByte returns what the tests store at byte i of a row.
func rowByte(row, i int64) byte { return byte(uint64(row*131+i*7) * 0x9e3779b97f4a7c15 >> 56) }

// download reads n elements on any device.
func download[T any](t testing.TB, dev cuda.Device, st cuda.Stream, b cuda.Buffer, n int64) []T {
	t.Helper()
	return must(difftest.Download[T](limit(t), dev, st, b.Ptr(), n))(t)
}

// fill puts the rows into the tiers, as sched does through a stack.
func fill(t testing.TB, h *Hetero, st cuda.Stream) {
	t.Helper()
	for _, tier := range []Tier{GPU, CPU} {
		b, rows := h.TierBuffer(tier), h.TierRows(tier)
		if b.Size() != int64(len(rows))*h.rowBytes {
			t.Fatalf("%v tier: %d bytes for %d rows", tier, b.Size(), len(rows))
		}
		mem := make([]byte, b.Size())
		for slot, r := range rows {
			for i := range h.rowBytes {
				mem[int64(slot)*h.rowBytes+i] = rowByte(r, i)
			}
		}
		ok(t, difftest.Upload(limit(t), h.dev, st, b.Ptr(), mem))
	}
}

// result holds what a lookup says, off the device.
type result struct {
	gpuPos, gpuSlot, cpuPos, cpuSlot, missPos []uint32
	missRow                                   []int64
	ssdOffset                                 []int64
}

func snapshot(t testing.TB, st cuda.Stream, b *Buckets) result {
	t.Helper()
	u32 := func(buf cuda.Buffer, n int64) []uint32 { return download[uint32](t, b.dev, st, buf, n) }
	return result{
		u32(b.GPUPos, b.NGPU), u32(b.GPUSlot, b.NGPU), u32(b.CPUPos, b.NCPU),
		u32(b.CPUSlot, b.NCPU), u32(b.MissPos, b.NMiss),
		download[int64](t, b.dev, st, b.MissRow, b.NMiss), slices.Clone(b.SSDOffset),
	}
}

func naiveLookup(p Placement, nodes []int64, first, count int64, ssds int) result {
	m := naive(p)
	var r result
	misses := make([][]uint32, ssds)
	for i := first; i < first+count; i++ {
		switch w := m[nodes[i]]; w.tier {
		case GPU:
			r.gpuPos, r.gpuSlot = append(r.gpuPos, uint32(i)), append(r.gpuSlot, uint32(w.slot))
		case CPU:
			r.cpuPos, r.cpuSlot = append(r.cpuPos, uint32(i)), append(r.cpuSlot, uint32(w.slot))
		default:
			misses[nodes[i]%int64(ssds)] = append(misses[nodes[i]%int64(ssds)], uint32(i))
		}
	}
	r.ssdOffset = []int64{0}
	for _, list := range misses {
		for _, pos := range list {
			r.missPos, r.missRow = append(r.missPos, pos), append(r.missRow, nodes[pos])
		}
		r.ssdOffset = append(r.ssdOffset, int64(len(r.missPos)))
	}
	return r
}

func same(a, b result) error {
	for _, c := range []struct {
		name string
		a, b []uint32
	}{{"gpu pos", a.gpuPos, b.gpuPos}, {"gpu slot", a.gpuSlot, b.gpuSlot},
		{"cpu pos", a.cpuPos, b.cpuPos}, {"cpu slot", a.cpuSlot, b.cpuSlot},
		{"miss pos", a.missPos, b.missPos}} {
		if !slices.Equal(c.a, c.b) {
			return fmt.Errorf("%s differ (%d and %d of them)", c.name, len(c.a), len(c.b))
		}
	}
	if !slices.Equal(a.missRow, b.missRow) || !slices.Equal(a.ssdOffset, b.ssdOffset) {
		return fmt.Errorf("misses differ: offsets %v and %v", a.ssdOffset, b.ssdOffset)
	}
	return nil
}

// Lookup against the map and gather against the rows, on 1 to 4 workers, with every share of
// the tiers, odd ranges and odd row sizes.
func TestLookupAndGather(t *testing.T) { checkLookupAndGather(t, device, 1, 2, 3, 4) }

// Stores around the caches, which small gathers do without, at every level; rows of 100 bytes can't
// have them.
func TestGatherAroundCaches(t *testing.T) {
	defer func(old int64) { streamBytes = old }(streamBytes)
	streamBytes = 0
	rng := seeded(t)
	nodes := make([]int64, 700)
	for i := range nodes {
		nodes[i] = rng.Int64N(500)
	}
	for _, l := range simd.Levels() {
		dev := must(cuda.NewHost(cuda.HostOptions{SMs: 2, Kernels: l}))(t)
		st := stream(t, dev)
		for _, rowBytes := range []int64{64, 100, 512} {
			h := must(NewHetero(dev, 500, rowBytes, 1, randomPlacement(rng, 500, 0.3, 0.4)))(t)
			fill(t, h, st)
			b := must(h.NewBuckets())(t)
			buf := upload(t, dev, nodes)
			ok(t, h.Lookup(limit(t), st, buf.Ptr(), 0, int64(len(nodes)), b))
			for _, gap := range []int64{0, 4, 64} {
				checkGather(t, dev, st, h, b, nodes, [2]int64{0, int64(len(nodes))}, rowBytes+gap)
			}
			ok(t, buf.Free())
			ok(t, b.Close())
			ok(t, h.Close())
		}
		ok(t, st.Close())
		ok(t, dev.Close())
	}
}

// The last hop's few rows go around the caches when the mini-batch is large.
func TestAroundByDestination(t *testing.T) {
	for p, want := range map[gatherParams]bool{
		{NGPU: 10, DstRows: streamBytes / 64, RowBytes: 64, Stride: 64}:   true,
		{NGPU: 10, DstRows: streamBytes/64 - 1, RowBytes: 64, Stride: 64}: false,
		{NGPU: 10, DstRows: streamBytes, RowBytes: 100, Stride: 128}:      false,
	} {
		if p.around() != want {
			t.Errorf("%+v: %v", p, !want)
		}
	}
}

func checkLookupAndGather(t *testing.T, open opener, workers ...int) {
	rng := seeded(t)
	for _, c := range []struct {
		rows, rowBytes, count int64
		ssds                  int
		gpu, cpu              float64
	}{
		{1, 4, 1, 1, 0, 0},
		{1000, 100, 500, 1, 0.1, 0.2},
		{5000, 512, 30000, 4, 0.05, 0.1},
		{5000, 512, 30000, 3, 0, 0.3},
		{5000, 513, 20000, 7, 0.3, 0},
		{70000, 16, 60001, 256, 0.2, 0.3},
		{3000, 64, 9000, 2, 0.4, 0.6},
		{3000, 64, 9000, 0, 0, 0},
	} {
		p := randomPlacement(rng, c.rows, c.gpu, c.cpu)
		nodes := make([]int64, c.count+17)
		for i := range nodes {
			nodes[i] = rng.Int64N(c.rows)
		}
		for _, workers := range workers {
			dev := open(t, workers)
			st := stream(t, dev)
			h := must(NewHetero(dev, c.rows, c.rowBytes, c.ssds, p))(t)
			fill(t, h, st)
			b := must(h.NewBuckets())(t)
			buf := upload(t, dev, nodes)
			stride := c.rowBytes + rng.Int64N(3)*4
			for _, span := range [][2]int64{{0, c.count}, {17, c.count}, {5, c.count / 2}, {3, 0},
				{c.count, 1}} {
				ok(t, h.Lookup(limit(t), st, buf.Ptr(), span[0], span[1], b))
				if b.NGPU+b.NCPU+b.NMiss != span[1] {
					t.Fatalf("%+v %v: %d+%d+%d rows", c, span, b.NGPU, b.NCPU, b.NMiss)
				}
				if err := same(snapshot(t, st, b), naiveLookup(p, nodes, span[0], span[1],
					max(c.ssds, 1))); err != nil {
					t.Fatalf("%+v %v, %d workers: %v", c, span, workers, err)
				}
				checkGather(t, dev, st, h, b, nodes, span, stride)
			}
			ok(t, b.Close())
			ok(t, h.Close())
			ok(t, st.Close())
		}
	}
}

// checkGather gathers and compares every byte of the destination: rows, gaps, misses.
func checkGather(t testing.TB, dev cuda.Device, st cuda.Stream, h *Hetero, b *Buckets,
	nodes []int64, span [2]int64, stride int64) {
	t.Helper()
	const untouched = 0xee
	size := (span[0] + span[1]) * stride
	dst := must(dev.Alloc(cuda.MemDevice, size, "test rows"))(t)
	ok(t, st.Fill(dst.Ptr(), untouched, size))
	ok(t, h.Gather(st, b, dst.Ptr(), stride))
	ok(t, st.Synchronize(limit(t)))
	want := bytes.Repeat([]byte{untouched}, int(size))
	for i := span[0]; i < span[0]+span[1]; i++ {
		if tier, _ := h.index.Lookup(nodes[i]); tier != SSD {
			for j := range h.rowBytes {
				want[i*stride+j] = rowByte(nodes[i], j)
			}
		}
	}
	if !bytes.Equal(download[byte](t, dev, st, dst, size), want) {
		t.Fatalf("%v: gathered rows differ", span)
	}
	ok(t, dst.Free())
}

func TestHeteroOnBlindDevice(t *testing.T) {
	host := device(t, 2)
	st := stream(t, host)
	rng := seeded(t)
	p := randomPlacement(rng, 4000, 0.2, 0.2)
	h := must(NewHetero(blind{host}, 4000, 32, 2, p))(t)
	b := must(h.NewBuckets())(t)
	nodes := make([]int64, 9000)
	for i := range nodes {
		nodes[i] = rng.Int64N(4000)
	}
	buf := upload(t, host, nodes)
	ok(t, h.Lookup(limit(t), st, buf.Ptr(), 0, 9000, b))
	require.NoError(t, same(snapshot(t, st, b), naiveLookup(p, nodes, 0, 9000, 2)))
	ok(t, b.Close())
	ok(t, h.Close())
	ok(t, st.Close())
}

func TestErrors(t *testing.T) {
	dev := device(t, 2)
	p := Placement{GPU: []int64{1, 3}, CPU: []int64{2}}
	h := must(NewHetero(dev, 10, 8, 2, p))(t)
	other := must(NewHetero(dev, 10, 8, 1, p))(t)
	b, ob := must(h.NewBuckets())(t), must(other.NewBuckets())(t)
	for _, bad := range []int64{10, -1, 1 << 40} {
		st := stream(t, dev)
		nodes := upload(t, dev, []int64{1, 2, bad})
		err := h.Lookup(limit(t), st, nodes.Ptr(), 0, 3, b)
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("row %d at position 2", bad)) {
			t.Errorf("row %d: %v", bad, err)
		}
		if b.NGPU+b.NCPU+b.NMiss != 0 {
			t.Error("buckets hold something after an error")
		}
		_ = st.Close() // reports the same error again
	}
	st := stream(t, dev)
	nodes := upload(t, dev, []int64{1, 2, 3})
	if err := h.Lookup(limit(t), st, nodes.Ptr(), -1, 3, b); err == nil {
		t.Error("a negative position")
	}
	if err := h.Lookup(limit(t), st, nodes.Ptr(), 0, 1<<32, b); err == nil {
		t.Error("positions over 32 bits")
	}
	if err := h.Lookup(limit(t), st, nodes.Ptr(), 0, 3, ob); err == nil {
		t.Error("buckets of another cache")
	}
	ok(t, h.Lookup(limit(t), st, nodes.Ptr(), 0, 3, b))
	if err := h.Gather(st, b, nodes.Ptr(), 4); err == nil {
		t.Error("a stride below the row")
	}
	small := must(dev.Alloc(cuda.MemDevice, 16, "small tensor"))(t)
	ok(t, h.Gather(st, b, small.Ptr(), 8)) // 3 rows into room for 2
	if err := st.Synchronize(limit(t)); err == nil || !strings.Contains(err.Error(),
		"small tensor") {
		t.Errorf("gather past the end: %v", err)
	}
	for _, bad := range []struct {
		rowBytes int64
		ssds     int
	}{{0, 1}, {8, -1}, {8, 257}} {
		if _, err := NewHetero(dev, 10, bad.rowBytes, bad.ssds, p); err == nil {
			t.Errorf("accepted %+v", bad)
		}
	}
	_ = st.Close()
	for _, c := range []interface{ Close() error }{b, ob, h, other, small2{small}} {
		ok(t, c.Close())
	}
}

type small2 struct{ cuda.Buffer }

func (s small2) Close() error { return s.Free() }

func TestOutOfMemoryNamesTheTier(t *testing.T) {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1, MemLimit: 1 << 20})
	ok(t, err)
	p := Placement{}
	for r := range int64(5000) {
		p.GPU = append(p.GPU, r)
	}
	_, err = NewHetero(dev, 5000, 1024, 1, p)
	var oom *cuda.OutOfMemoryError
	if !errors.As(err, &oom) || oom.Purpose != "gpu cache" || oom.Want != 5000*1024 {
		t.Errorf("got %v", err)
	}
	ok(t, dev.Close()) // and nothing is left
}

func TestHotness(t *testing.T) { checkHotness(t, device) }

func checkHotness(t *testing.T, open opener) {
	rng := seeded(t)
	dev := open(t, 3)
	const rows = 1000
	h := must(NewHotness(dev, rows))(t)
	want := make([]uint32, rows)
	var sts []cuda.Stream
	for range 3 {
		st := stream(t, dev)
		sts = append(sts, st)
		for _, n := range []int{0, 1, 100, 20000} {
			nodes := make([]int64, n)
			for i := range nodes {
				nodes[i] = rng.Int64N(1 + rng.Int64N(rows))
				want[nodes[i]]++
			}
			ok(t, h.Add(st, upload(t, dev, append(nodes, 0)).Ptr(), int64(n)))
		}
	}
	for _, st := range sts {
		ok(t, st.Synchronize(limit(t)))
	}
	if !slices.Equal(must(h.Counts(limit(t), sts[0]))(t), want) {
		t.Fatal("counts differ")
	}
	ok(t, h.Add(sts[0], upload(t, dev, []int64{rows}).Ptr(), 1))
	if err := sts[0].Synchronize(limit(t)); err == nil || !strings.Contains(err.Error(),
		"row 1000") {
		t.Errorf("a row out of range: %v", err)
	}
	for _, st := range sts {
		_ = st.Close() // one has failed on purpose
	}
	ok(t, h.Close())
}

// Place on the device is Place on the CPU: ties, both ends of the radix, every share of rows.
func TestRank(t *testing.T) { checkRank(t, device) }

func checkRank(t *testing.T, open opener) {
	rng := seeded(t)
	for _, rows := range []int64{0, 1, 5, 300, 70000} {
		dev := open(t, 1+rng.IntN(4))
		st := stream(t, dev)
		h := must(NewHotness(dev, rows))(t)
		for range 8 {
			hot := make([]uint32, rows)
			for i := range hot {
				switch rng.IntN(6) {
				case 0:
					hot[i] = rng.Uint32()
				case 1:
					hot[i] = rng.Uint32N(4) << (8 * rng.Uint32N(4))
				case 2:
					hot[i] = 1<<32 - 1
				default:
					hot[i] = 0
				}
			}
			ok(t, difftest.Upload(limit(t), dev, st, h.counts.Ptr(), hot))
			g, c := rng.Int64N(rows+3)-1, rng.Int64N(rows+3)-1
			got := must(h.Place(limit(t), st, g, c))(t)
			want := Place(hot, g, c)
			if !slices.Equal(got.GPU, want.GPU) || !slices.Equal(got.CPU, want.CPU) {
				t.Fatalf("%d rows, %d+%d taken: the device places other rows than the CPU",
					rows, g, c)
			}
		}
		ok(t, h.Close())
		ok(t, st.Close())
	}
}

func TestEmptyBudgets(t *testing.T) { checkEmptyBudgets(t, device) }

func checkEmptyBudgets(t *testing.T, open opener) {
	dev := open(t, 2)
	st := stream(t, dev)
	h := must(NewHetero(dev, 100, 16, 2, Place(make([]uint32, 100), 0, 0)))(t)
	b := must(h.NewBuckets())(t)
	nodes := upload(t, dev, []int64{5, 4, 99})
	ok(t, h.Lookup(limit(t), st, nodes.Ptr(), 0, 3, b))
	if b.NGPU != 0 || b.NCPU != 0 || b.NMiss != 3 || !slices.Equal(b.SSDOffset, []int64{0, 1, 3}) ||
		!slices.Equal(snapshot(t, st, b).missRow, []int64{4, 5, 99}) {
		t.Errorf("%+v", b)
	}
	ok(t, h.Gather(st, b, 0, 16)) // nothing to copy
	ok(t, st.Synchronize(limit(t)))
	ok(t, b.Close())
	ok(t, h.Close())
	ok(t, st.Close())
}

func benchCache(b *testing.B, rows, rowBytes, count int64) (cuda.Device, cuda.Stream, *Hetero,
	*Buckets, cuda.Buffer) {
	dev := device(b, runtime.GOMAXPROCS(0))
	st := stream(b, dev)
	rng := rand.New(rand.NewPCG(1, 1))
	h := must(NewHetero(dev, rows, rowBytes, 4, randomPlacement(rng, rows, 0.1, 0.3)))(b)
	bk := must(h.NewBuckets())(b)
	nodes := must(dev.Alloc(cuda.MemDevice, count*8, "nodes"))(b)
	for i := range hostmem.View[int64](nodes.Bytes()) {
		hostmem.View[int64](nodes.Bytes())[i] = rng.Int64N(rows)
	}
	b.Cleanup(func() {
		_ = st.Close()
		ok(b, bk.Close())
		ok(b, h.Close())
		ok(b, nodes.Free())
	})
	return dev, st, h, bk, nodes
}

func BenchmarkLookup(b *testing.B) {
	for _, rows := range []int64{200_000, 100_000_000} {
		b.Run(fmt.Sprintf("rows=%d", rows), func(b *testing.B) {
			const count = 200_000
			_, st, h, bk, nodes := benchCache(b, rows, 1, count)
			for b.Loop() {
				ok(b, h.Lookup(context.Background(), st, nodes.Ptr(), 0, count, bk))
			}
			b.ReportMetric(float64(count)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mrows/s")
		})
	}
}

// Each lookup is of other rows: no line is in a cache from the one before.
func BenchmarkLookupFresh(b *testing.B) {
	const rows, count = 100_000_000, 1_000_000
	_, st, h, bk, nodes := benchCache(b, rows, 1, count)
	rng := rand.New(rand.NewPCG(2, 2))
	for b.Loop() {
		b.StopTimer()
		for i := range hostmem.View[int64](nodes.Bytes()) {
			hostmem.View[int64](nodes.Bytes())[i] = rng.Int64N(rows)
		}
		b.StartTimer()
		ok(b, h.Lookup(context.Background(), st, nodes.Ptr(), 0, count, bk))
	}
	b.ReportMetric(float64(count)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mrows/s")
}

func BenchmarkLookupSmall(b *testing.B) {
	_, st, h, bk, nodes := benchCache(b, 200_000, 1, 1000)
	for b.Loop() {
		ok(b, h.Lookup(context.Background(), st, nodes.Ptr(), 0, 1000, bk))
	}
	b.ReportMetric(1000*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mrows/s")
}

func BenchmarkGather(b *testing.B) {
	for _, rowBytes := range []int64{128, 512, 4096} {
		b.Run(fmt.Sprintf("row=%d", rowBytes), func(b *testing.B) {
			rows := int64(512<<20) / rowBytes
			count := int64(64<<20) / rowBytes
			dev, st, h, bk, nodes := benchCache(b, rows, rowBytes, count)
			ok(b, h.Lookup(context.Background(), st, nodes.Ptr(), 0, count, bk))
			dst := must(dev.Alloc(cuda.MemDevice, count*rowBytes, "tensor"))(b)
			moved := (bk.NGPU + bk.NCPU) * rowBytes
			for _, buf := range []cuda.Buffer{h.TierBuffer(GPU), h.TierBuffer(CPU), dst} { // touch
				ok(b, st.Fill(buf.Ptr(), 1, buf.Size()))
			}
			ok(b, st.Synchronize(context.Background()))
			for b.Loop() {
				ok(b, h.Gather(st, bk, dst.Ptr(), rowBytes))
				ok(b, st.Synchronize(context.Background()))
			}
			gather := float64(moved) * float64(b.N) / b.Elapsed().Seconds() / 1e9
			b.ReportMetric(gather, "GB/s")
			// One memmove of as many bytes, by one thread, for comparison.
			from := h.TierBuffer(CPU)
			n := min(moved, from.Size(), dst.Size())
			t0 := time.Now()
			const reps = 20
			for range reps {
				ok(b, st.Copy(dst.Ptr(), from.Ptr(), n))
			}
			ok(b, st.Synchronize(context.Background()))
			plain := float64(n) * reps / time.Since(t0).Seconds() / 1e9
			b.ReportMetric(plain, "copy-GB/s")
			b.StopTimer()
			ok(b, dst.Free())
		})
	}
}
