//go:build linux && (amd64 || arm64) && !nocuda

package gpucost

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cuda"
	"helios/cuda/driver"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/testing/fakecuda"
	"helios/nvme"
	"helios/nvme/proxy"
	"helios/sched/plan"
	"helios/tools/ptxrun"
)

// The I/O kernels keep to a budget of trips to memory, which bound the rate of a warp, of those to
// the CPU's, and of sectors. A queue of 32 commands is a refill and a sweep. A read that waits for the SSD looks
// more often, so the one with the fewest trips of eight counts. Sectors differ by a few from run
// to run, by where memory begins.
func TestIOCost(t *testing.T) {
	dev, seen := counted(t)
	for _, c := range []struct {
		name             string
		queues, rows     int
		coalesce         int
		submit, complete budget
	}{
		{"one queue", 1, 32, -1, budget{8, 0, 300}, budget{13, 2, 240}},
		{"four queues", 4, 128, -1, budget{24, 0, 1180}, budget{46, 8, 950}},
		{"rows in runs", 1, 32, 16 << 10, budget{11, 0, 320}, budget{13, 2, 240}},
		{"four queues, rows in runs", 4, 128, 0, budget{36, 0, 1250}, budget{46, 8, 950}},
		{"no warp's worth", 1, 3, 0, budget{8, 0, 90}, budget{12, 2, 100}},
	} {
		t.Run(c.name, func(t *testing.T) {
			rd := openRows(t, dev, gpuio.NewAsync, gpuio.AsyncOptions{Blocks: 1,
				QueuePairs: c.queues, Depth: 64 * c.queues, Timeout: time.Minute,
				CoalesceBytes: c.coalesce})
			within(t, leastOf(t, dev, seen, rd, c.rows),
				map[string]budget{"submit": c.submit, "complete": c.complete})
		})
	}
	// One warp that reads a row and waits.
	t.Run("read_sync", func(t *testing.T) {
		rd := openRows(t, dev, gpuio.NewSync, gpuio.AsyncOptions{Blocks: 1, Threads: 32,
			QueuePairs: 1, Depth: 64, Timeout: time.Minute})
		within(t, leastOf(t, dev, seen, rd, 1), map[string]budget{"read_sync": {70, 7, 280}})
	})
}

// budget bounds what a kernel's launches take: trips, by the warp that makes most of them, and
// sectors.
type budget struct{ trips, far, sectors int64 }

// counted opens a fake GPU whose launches are counted.
func counted(t *testing.T) (cuda.Device, *recorder) {
	library := fakecuda.Build(t, fakecuda.Private())
	fakecuda.Control(t, library, "reset,sms=108,mem=1073741824")
	seen := &recorder{modules: map[uint64]*ptxrun.Module{}}
	require.NoError(t, fakecuda.Execute(library, seen.run))
	t.Cleanup(func() { require.NoError(t, fakecuda.Execute(library, nil)) })
	dev, err := driver.Open(driver.Options{Library: library})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	return dev, seen
}

// leastOf reads rows eight times and returns each kernel's launch of the fewest trips.
func leastOf(t *testing.T, dev cuda.Device, seen *recorder, rd gpuio.Reader,
	rows int) map[string]budget {
	least := map[string]budget{}
	for range 8 {
		seen.take()
		read(t, dev, rd, rows)
		for _, l := range seen.take() {
			got := budget{l.stats.Traffic.Trips, l.stats.Traffic.Far, l.stats.Traffic.Sectors}
			old, there := least[l.kernel]
			if !there || got.trips < old.trips ||
				got.trips == old.trips && got.sectors < old.sectors {
				least[l.kernel] = got
			}
		}
	}
	return least
}

// within fails where a kernel takes more than its budget, or was not launched.
func within(t *testing.T, got, most map[string]budget) {
	t.Helper()
	for kernel, most := range most {
		got, there := got[kernel]
		require.True(t, there, kernel)
		t.Logf("%s: %d trips, %d to the CPU's memory, %d sectors", kernel, got.trips, got.far,
			got.sectors)
		assert.LessOrEqual(t, got.trips, most.trips, "trips of %s", kernel)
		assert.LessOrEqual(t, got.far, most.far, "trips of %s to the CPU's memory", kernel)
		assert.LessOrEqual(t, got.sectors, most.sectors, "sectors of %s", kernel)
	}
}

// The kernels of a mini-batch before and beside its reads keep to a budget, too: a hop of 10 of 16
// neighbours of 512 seeds, and the lookup and gather of 512 rows of 512 bytes, half of which are cached.
func TestMiniBatchCost(t *testing.T) {
	dev, seen := counted(t)
	st, err := dev.NewStream(cuda.StreamOptions{Name: "cost"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, st.Close()) })
	const nodes, degree, seeds = 8000, 16, 512
	sums := func() map[string]budget {
		all := map[string]budget{}
		for _, l := range seen.take() {
			b := all[l.kernel]
			all[l.kernel] = budget{b.trips + l.stats.Traffic.Trips,
				b.far + l.stats.Traffic.Far, b.sectors + l.stats.Traffic.Sectors}
		}
		return all
	}
	t.Run("sample", func(t *testing.T) {
		topo, err := graph.Alloc(nodes, nodes*degree, false)
		require.NoError(t, err)
		for i := range topo.Indptr {
			topo.Indptr[i] = int64(i * degree)
		}
		for i := range topo.Indices32 {
			topo.Indices32[i] = uint32(i*7919) % nodes
		}
		attached, err := graph.Attach(dev, topo)
		require.NoError(t, err)
		s, err := graph.NewSampler(dev, attached, graph.SamplerConfig{Fanouts: []int{10}, Seed: 1})
		require.NoError(t, err)
		mb, err := s.NewMiniBatch()
		require.NoError(t, err)
		first := make([]int64, seeds)
		for i := range first {
			first[i] = int64(13 * i)
		}
		seen.take()
		require.NoError(t, s.Begin(t.Context(), st, mb, 0, 0, first))
		require.NoError(t, s.Hop(t.Context(), st, mb, 0))
		within(t, sums(), map[string]budget{"sample_count": {4, 1, 1310}, "sample_fill": {75, 13, 27900}})
		require.NoError(t, mb.Close())
		require.NoError(t, s.Close())
		require.NoError(t, attached.Close())
		require.NoError(t, topo.Close())
	})
	t.Run("lookup and gather", func(t *testing.T) {
		var p cache.Placement
		for i := range int64(nodes / 4) {
			p.GPU, p.CPU = append(p.GPU, 4*i), append(p.CPU, 4*i+1)
		}
		h, err := cache.NewHetero(dev, nodes, rowBytes, 2, p)
		require.NoError(t, err)
		b, err := h.NewBuckets()
		require.NoError(t, err)
		list, err := dev.Alloc(cuda.MemPinned, 8*seeds, "nodes")
		require.NoError(t, err)
		dst, err := dev.Alloc(cuda.MemDevice, seeds*rowBytes, "rows")
		require.NoError(t, err)
		for i := range int64(seeds) {
			cuda.View[int64](list.Ptr(), seeds)[i] = 13 * i
		}
		seen.take()
		require.NoError(t, h.Lookup(t.Context(), st, list.Ptr(), 0, seeds, b))
		require.NoError(t, h.Gather(st, b, dst.Ptr(), rowBytes))
		require.NoError(t, st.Synchronize(t.Context()))
		require.EqualValues(t, seeds/2, b.NGPU+b.NCPU)
		within(t, sums(), map[string]budget{"lookup": {21, 4, 1020}, "gather": {11, 1, 8850}})
		for _, x := range []interface{ Close() error }{b, h} {
			require.NoError(t, x.Close())
		}
		require.NoError(t, list.Free())
		require.NoError(t, dst.Free())
	})
}

const rowBytes = 512

// openRows makes a reader of 2,000 rows on a software SSD.
func openRows(t *testing.T, dev cuda.Device, open func(cuda.Device, []*gpuio.SSD, gpuio.Layout,
	gpuio.AsyncOptions) (gpuio.Reader, error), o gpuio.AsyncOptions) gpuio.Reader {
	path := filepath.Join(t.TempDir(), "ssd.img")
	require.NoError(t, os.WriteFile(path, make([]byte, 2000*rowBytes), 0o600))
	bus, err := proxy.Open(proxy.Config{Path: path, Buffered: true, PollDoorbells: true})
	require.NoError(t, err)
	ctrl, err := nvme.Open(t.Context(), bus, nvme.Options{})
	require.NoError(t, err)
	layout, err := gpuio.NewLayout(2000, rowBytes, 1, 512)
	require.NoError(t, err)
	rd, err := open(dev, []*gpuio.SSD{{Ctrl: ctrl, Name: "ssd"}}, layout, o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, rd.Close(t.Context()))
		require.NoError(t, ctrl.Close(t.Context()))
	})
	return rd
}

// read reads rows that lie too far apart for one command.
func read(t *testing.T, dev cuda.Device, rd gpuio.Reader, n int) {
	var all []cuda.Buffer
	alloc := func(bytes int) cuda.Buffer {
		b, err := dev.Alloc(cuda.MemPinned, int64(bytes), "rows")
		require.NoError(t, err)
		all = append(all, b)
		return b
	}
	filled, features := alloc(n*12), alloc(n*rowBytes)
	for i := range n {
		cuda.View[int64](filled.Ptr(), int64(n))[i] = int64(15 * i)
		cuda.View[uint32](filled.Ptr()+cuda.DevicePtr(n*8), int64(n))[i] = uint32(n - 1 - i)
	}
	list, err := dev.Alloc(cuda.MemDevice, filled.Size(), "rows") // as a lookup's
	require.NoError(t, err)
	all = append(all, list)
	st, err := dev.NewStream(cuda.StreamOptions{Name: "rows"})
	require.NoError(t, err)
	require.NoError(t, st.Copy(list.Ptr(), filled.Ptr(), filled.Size()))
	require.NoError(t, st.Synchronize(t.Context()))
	require.NoError(t, st.Close())
	p, err := rd.Submit(t.Context(), &gpuio.ReadSet{Rows: list.Ptr(),
		Pos:       list.Ptr() + cuda.DevicePtr(n*8),
		SSDOffset: []int64{0, int64(n)}, Dst: features, DstStride: rowBytes})
	require.NoError(t, err)
	_, err = p.Wait(t.Context())
	require.NoError(t, err)
	for _, b := range all {
		require.NoError(t, b.Free())
	}
}

// The SMs of the I/O kernels hold all their blocks.
func TestIOKernelsAreResident(t *testing.T) {
	table, err := os.ReadFile("../../cuda/kernels/RESOURCES.md")
	require.NoError(t, err)
	rows := regexp.MustCompile(`(?m)^\| (submit|complete) \| \w+ \| (sm_\w+) \| (\d+) \|`).
		FindAllStringSubmatch(string(table), -1)
	require.NotEmpty(t, rows)
	const parts, perPart, warp, granule = 4, 16384, 32, 8 // of an SM's registers
	for _, blocks := range []int{1, 32, 36, 64, 128} {
		sms := plan.IOSMs(blocks, 1000)
		for _, row := range rows {
			registers, err := strconv.Atoi(row[3])
			require.NoError(t, err)
			registers = (registers + granule - 1) / granule * granule
			assert.GreaterOrEqual(t, sms*parts*(perPart/(warp*registers)), blocks, "%s on %s", row[1], row[2])
		}
	}
}
