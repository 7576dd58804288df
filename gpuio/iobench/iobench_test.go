package iobench

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/ssdmodel"
	"helios/internal/testing/testrig"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// ssds makes n software SSDs with random content.
func ssds(t testing.TB, n int, bytes int64, ram bool, faults string) (*cuda.Host, []*gpuio.SSD) {
	dev, err := cuda.NewHost(cuda.HostOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	dir := t.TempDir()
	if ram {
		dir = testrig.MemoryDir(t)
	}
	var out []*gpuio.SSD
	for i := range n {
		path := filepath.Join(dir, fmt.Sprintf("%d.img", i))
		f, err := os.Create(path)
		require.NoError(t, err)
		rng := rand.NewChaCha8([32]byte{byte(i)})
		buf := make([]byte, 1<<20)
		for off := int64(0); off < bytes; off += int64(len(buf)) {
			_, err = rng.Read(buf)
			require.NoError(t, err)
			_, err = f.Write(buf[:min(int64(len(buf)), bytes-off)])
			require.NoError(t, err)
		}
		require.NoError(t, f.Sync())
		require.NoError(t, f.Close())
		set, err := faultinject.Parse(faults)
		require.NoError(t, err)
		var bus nvme.Bus
		bus, err = proxy.Open(proxy.Config{Path: path, RAM: ram})
		require.NoError(t, err)
		if !set.Empty() {
			bus = faultbus.New(bus, set, faultbus.Options{})
		}
		ctrl, err := nvme.Open(context.Background(), bus, nvme.Options{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, ctrl.Close(context.Background())) })
		out = append(out, &gpuio.SSD{Ctrl: ctrl, Name: fmt.Sprintf("ssd%d", i), BackingPath: path})
	}
	return dev, out
}

func TestRunAudits(t *testing.T) {
	dev, disks := ssds(t, 2, 4<<20, true, "")
	for _, stack := range []string{"async", "sync", "cpu", "mmap"} {
		for _, rowBytes := range []int{512, 400, 4096} {
			row, err := Run(context.Background(), Config{Dev: dev, SSDs: disks, Stack: stack,
				RowBytes: rowBytes, Depth: 16, Duration: 60 * time.Millisecond, Seed: 3})
			require.NoError(t, err)
			require.True(t, row.Audited, row.AuditError)
			require.Zero(t, row.Errors)
			require.Positive(t, row.IOPS)
			require.Positive(t, row.CPUPerIO)
			require.LessOrEqual(t, row.P50, row.P99)
			require.Positive(t, row.Sampled)
			if stack == "async" || stack == "sync" {
				require.Positive(t, row.Threads)
				require.Equal(t, row.Commands, row.SMARTReads)
				require.Positive(t, row.QueuePairs)
			}
		}
	}
	// Without a file to look at, the audit reads through a queue pair of its own.
	for _, d := range disks {
		d.BackingPath = ""
	}
	row, err := Run(context.Background(), Config{Dev: dev, SSDs: disks, Depth: 4,
		Duration: 30 * time.Millisecond})
	require.NoError(t, err)
	require.True(t, row.Audited, row.AuditError)
}

// TestAuditFails shows that each part of the audit can fail.
func TestAuditFails(t *testing.T) {
	ctx := context.Background()
	t.Run("errors", func(t *testing.T) {
		dev, disks := ssds(t, 1, 1<<20, true, "error(op=read,sct=2,sc=0x81,dnr=1,after=5,times=1)")
		row, err := Run(ctx, Config{Dev: dev, SSDs: disks, Duration: 50 * time.Millisecond})
		require.NoError(t, err)
		require.False(t, row.Audited)
		require.Contains(t, row.AuditError, "unrecovered read error")
		require.Positive(t, row.Errors)
	})
	t.Run("content", func(t *testing.T) {
		dev, disks := ssds(t, 1, 1<<20, true, "")
		other := filepath.Join(t.TempDir(), "other.img")
		require.NoError(t, os.WriteFile(other, make([]byte, 1<<20), 0o600))
		disks[0].BackingPath = other
		row, err := Run(ctx, Config{Dev: dev, SSDs: disks, Duration: 30 * time.Millisecond})
		require.NoError(t, err)
		require.False(t, row.Audited)
		require.Contains(t, row.AuditError, "is not what the SSD holds")
	})
}

// TestServeLimit: the threads that play the SSDs alone, with and without a modelled latency.
func TestServeLimit(t *testing.T) {
	_, disks := ssds(t, 2, 4<<20, true, "")
	ctx := context.Background()
	free, err := MeasureServe(ctx, disks, 4096, 64, 3, 50*time.Millisecond)
	require.NoError(t, err)
	require.Positive(t, free.IOPS)
	require.LessOrEqual(t, free.Threads, 3)
	slow := make([]*gpuio.SSD, 1)
	path := disks[0].BackingPath + ".slow"
	require.NoError(t, os.WriteFile(path, make([]byte, 1<<20), 0o600))
	model, err := ssdmodel.Fixed(time.Millisecond)
	require.NoError(t, err)
	bus, err := proxy.Open(proxy.Config{Path: path, RAM: true, Model: model})
	require.NoError(t, err)
	ctrl, err := nvme.Open(ctx, bus, nvme.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, ctrl.Close(ctx)) }()
	slow[0] = &gpuio.SSD{Ctrl: ctrl, BackingPath: path}
	limit, err := MeasureServe(ctx, slow, 12288, 8, 2, 50*time.Millisecond)
	require.NoError(t, err)
	require.Positive(t, limit.IOPS)
	require.LessOrEqual(t, limit.IOPS, 8*1000.0+1, "8 reads out, 1 ms each")
	_, files := ssds(t, 1, 1<<20, false, "")
	none, err := MeasureServe(ctx, files, 4096, 8, 1, time.Millisecond)
	require.NoError(t, err)
	require.Zero(t, none)
}

// small is a device that says it is a GPU with little memory.
type small struct{ cuda.Device }

func (s small) Info() cuda.Info {
	i := s.Device.Info()
	i.Backend, i.MemTotal = "driver", 20<<20
	return i
}

func TestDeviceMemoryTooSmall(t *testing.T) {
	dev, disks := ssds(t, 1, 1<<20, true, "")
	_, err := Run(context.Background(), Config{Dev: small{dev}, SSDs: disks, Depth: 1024})
	require.ErrorContains(t, err, "option depth 256 fits")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	_, err = Run(context.Background(), Config{Dev: small{dev}, SSDs: disks, RowBytes: 131072,
		Depth: 1})
	require.ErrorContains(t, err, "use fewer SSDs or smaller rows")
}

func TestBadConfig(t *testing.T) {
	dev, disks := ssds(t, 1, 1<<20, true, "")
	for name, cfg := range map[string]Config{
		"no SSD":       {Dev: dev},
		"stack":        {Dev: dev, SSDs: disks, Stack: "dma"},
		"row size":     {Dev: dev, SSDs: disks, RowBytes: 2 << 20},
		"negative row": {Dev: dev, SSDs: disks, RowBytes: -1},
		"depth":        {Dev: dev, SSDs: disks, Depth: -1},
		"threads":      {Dev: dev, SSDs: disks, PerBlock: 31},
		"engine":       {Dev: dev, SSDs: disks, Stack: "cpu", Engine: "aio"},
		"layout": {Dev: dev, SSDs: disks, RowBytes: 64, Layout: gpuio.Layout{Rows: 1,
			RowBytes: 128}},
	} {
		_, err := Run(context.Background(), cfg)
		require.Error(t, err, name)
	}
}

func TestRowJSON(t *testing.T) {
	b, err := json.Marshal(Row{})
	require.NoError(t, err)
	for _, k := range []string{"ssds", "blocks", "row_bytes", "stack", "queue_pairs", "depth",
		"iops", "bytes_per_second", "cpu_us_per_io", "p50_us", "p99_us", "errors", "audited",
		"smart_reads"} {
		require.Contains(t, string(b), `"`+k+`":`)
	}
}

// BenchmarkReads measures the whole path; compare stacks and depths with -bench Reads/ram.
func BenchmarkReads(b *testing.B) {
	for _, medium := range []string{"ram", "file"} {
		for _, stack := range []string{"async", "sync", "cpu", "mmap"} {
			for _, depth := range []int{1, 32, 256} {
				b.Run(fmt.Sprintf("%s/%s/depth=%d", medium, stack, depth), func(b *testing.B) {
					dev, disks := ssds(b, 1, 256<<20, medium == "ram", "")
					var row Row
					for range b.N {
						var err error
						row, err = Run(context.Background(), Config{Dev: dev, SSDs: disks,
							Stack: stack, Depth: depth, Duration: time.Second})
						require.NoError(b, err)
						require.True(b, row.Audited, row.AuditError)
					}
					b.ReportMetric(row.IOPS, "IOPS")
					b.ReportMetric(row.CPUPerIO, "cpu-us/io")
					b.ReportMetric(row.P50, "p50-us")
					b.ReportMetric(row.P99, "p99-us")
				})
			}
		}
	}
}
