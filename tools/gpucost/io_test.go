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

	"helios/cuda"
	"helios/cuda/driver"
	"helios/gpuio"
	"helios/internal/testing/fakecuda"
	"helios/nvme"
	"helios/nvme/proxy"
	"helios/sched/plan"
	"helios/tools/ptxrun"
)

// The I/O kernels keep to a budget of trips to the CPU's memory, which bound the rate of a warp, and
// of sectors. A queue of 32 commands is a refill and a sweep. A read that waits for the SSD looks
// more often, so the one with the fewest trips of eight counts.
func TestIOCost(t *testing.T) {
	library := fakecuda.Build(t, fakecuda.Private())
	fakecuda.Control(t, library, "reset,sms=108,mem=1073741824")
	seen := &recorder{modules: map[uint64]*ptxrun.Module{}}
	require.NoError(t, fakecuda.Execute(library, seen.run))
	t.Cleanup(func() { require.NoError(t, fakecuda.Execute(library, nil)) })
	dev, err := driver.Open(driver.Options{Library: library})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	type budget struct{ trips, sectors int64 }
	for _, c := range []struct {
		name             string
		queues, rows     int
		coalesce         int
		submit, complete budget
	}{
		{"one queue", 1, 32, 0, budget{10, 330}, budget{13, 270}},
		{"rows in runs", 1, 32, 16 << 10, budget{13, 345}, budget{13, 270}},
		{"four queues, rows in runs", 4, 128, 0, budget{46, 1370}, budget{46, 1060}},
		{"no warp's worth", 1, 3, 0, budget{10, 90}, budget{12, 100}},
	} {
		t.Run(c.name, func(t *testing.T) {
			rd := openRows(t, dev, gpuio.AsyncOptions{Blocks: 1, QueuePairs: c.queues,
				Depth: 64 * c.queues, Timeout: time.Minute, CoalesceBytes: c.coalesce})
			least := map[string]budget{}
			for range 8 {
				seen.take()
				read(t, dev, rd, c.rows)
				for _, l := range seen.take() {
					got := budget{l.stats.Traffic.Trips, l.stats.Traffic.Sectors}
					if old, there := least[l.kernel]; !there || got.trips < old.trips {
						least[l.kernel] = got
					}
				}
			}
			for kernel, most := range map[string]budget{"submit": c.submit, "complete": c.complete} {
				got, there := least[kernel]
				require.True(t, there, kernel)
				t.Logf("%s: %d trips, %d sectors", kernel, got.trips, got.sectors)
				assert.LessOrEqual(t, got.trips, most.trips, "trips of %s", kernel)
				assert.LessOrEqual(t, got.sectors, most.sectors, "sectors of %s", kernel)
			}
		})
	}
}

const rowBytes = 512

// openRows makes a reader of 2,000 rows on a software SSD.
func openRows(t *testing.T, dev cuda.Device, o gpuio.AsyncOptions) gpuio.Reader {
	path := filepath.Join(t.TempDir(), "ssd.img")
	require.NoError(t, os.WriteFile(path, make([]byte, 2000*rowBytes), 0o600))
	bus, err := proxy.Open(proxy.Config{Path: path, Buffered: true, PollDoorbells: true})
	require.NoError(t, err)
	ctrl, err := nvme.Open(t.Context(), bus, nvme.Options{})
	require.NoError(t, err)
	layout, err := gpuio.NewLayout(2000, rowBytes, 1, 512)
	require.NoError(t, err)
	rd, err := gpuio.NewAsync(dev, []*gpuio.SSD{{Ctrl: ctrl, Name: "ssd"}}, layout, o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, rd.Close(t.Context()))
		require.NoError(t, ctrl.Close(t.Context()))
	})
	return rd
}

// read reads every third row.
func read(t *testing.T, dev cuda.Device, rd gpuio.Reader, n int) {
	var all []cuda.Buffer
	alloc := func(bytes int) cuda.Buffer {
		b, err := dev.Alloc(cuda.MemPinned, int64(bytes), "rows")
		require.NoError(t, err)
		all = append(all, b)
		return b
	}
	rows, places, features := alloc(n*8), alloc(n*4), alloc(n*rowBytes)
	for i := range n {
		cuda.View[int64](rows.Ptr(), int64(n))[i] = int64(3 * i)
		cuda.View[uint32](places.Ptr(), int64(n))[i] = uint32(n - 1 - i)
	}
	p, err := rd.Submit(t.Context(), &gpuio.ReadSet{Rows: rows.Ptr(), Pos: places.Ptr(),
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
