package parted

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"helios/dataset/pages"
	"helios/graph"
	"helios/internal/hostmem"
	"helios/internal/testing/datasettest"
)

// BenchmarkMake lays out the dataset in the folder HELIOS_PARTED_DATASET, whose edges stay on
// storage, in as many MiB of memory as HELIOS_PARTED_MIB says, with 5 % static nodes; or a small
// one. It writes beside the dataset. Before each it reads the rows and the edges in their order,
// and writes as many pages in theirs: the floor, which "times-floor" is a multiple of.
func BenchmarkMake(b *testing.B) {
	dir := os.Getenv("HELIOS_PARTED_DATASET")
	if dir == "" {
		d, _ := generated(b, 100_000, 64)
		dir = d.Dir()
	}
	d := datasettest.Open(b, dir)
	topo, err := d.TopologyOnSSD(bg, graph.OutOfCoreOptions{})
	require.NoError(b, err)
	defer func() { require.NoError(b, topo.Close()) }()
	p := partsOf(b, d, topo, 64)
	out := filepath.Dir(dir)
	o := Options{Dir: filepath.Join(out, "layout"), Partition: p, StaticShare: 0.05,
		Place: pages.InFolder{}}
	if s := os.Getenv("HELIOS_PARTED_MIB"); s != "" {
		n, err := strconv.ParseInt(s, 10, 64)
		require.NoError(b, err)
		o.MemoryBytes = n << 20
	}
	for b.Loop() {
		require.NoError(b, os.RemoveAll(o.Dir))
		before, err := hostmem.ReadRSS()
		require.NoError(b, err)
		meter := hostmem.StartPeakMeter(time.Millisecond)
		start := time.Now()
		l, err := Make(bg, d, topo, o)
		took := time.Since(start)
		meter.Stop()
		require.NoError(b, err)
		m, err := readManifest(o.Dir)
		require.NoError(b, err)

		floor := writeFloor(b, filepath.Join(out, "floor"), l.Spec)
		start = time.Now()
		buf := make([]byte, mostBlock/l.RowBytes*l.RowBytes)
		for first := int64(0); first < l.Nodes; first += mostBlock / l.RowBytes {
			n := min(mostBlock/l.RowBytes, l.Nodes-first)
			require.NoError(b, d.ReadRows(first, buf[:n*l.RowBytes]))
		}
		require.NoError(b, topo.Scan(bg, func(int64, []uint32) error { return nil }))
		floor += time.Since(start)

		moved := float64(m.Stats.RowBytesRead+4*m.Stats.EdgesRead+m.Stats.BytesWritten) / (1 << 20)
		b.ReportMetric(moved/took.Seconds(), "MiB/s")
		b.ReportMetric(took.Seconds()/floor.Seconds(), "times-floor")
		b.ReportMetric(float64(meter.Peak()-before.Counted())/(1<<20), "peak-MiB")
		b.ReportMetric(float64(m.Stats.RowSweeps), "row-sweeps")
		b.ReportMetric(float64(m.Stats.EdgeSweeps), "edge-sweeps")
		b.ReportMetric(moved, "MiB")
	}
	require.NoError(b, os.RemoveAll(o.Dir))
}

// writeFloor measures pages that are written in their order, as many at a time as Make
// has workers.
func writeFloor(b *testing.B, dir string, s pages.Spec) time.Duration {
	require.NoError(b, os.Mkdir(dir, 0o755))
	defer func() { require.NoError(b, os.RemoveAll(dir)) }()
	s.ID = uuid.New()
	start := time.Now()
	f, err := pages.CreateFolder(dir, s)
	require.NoError(b, err)
	var g errgroup.Group
	g.SetLimit(defaultWorkers)
	data := make([]byte, max(1<<20/s.PageBytes, 1)*s.PageBytes)
	per := int64(len(data)) / s.PageBytes
	for page := int64(0); page < s.Pages; page += per {
		g.Go(func() error {
			return f.WriteAt(bg, page, data[:min(per, s.Pages-page)*s.PageBytes])
		})
	}
	require.NoError(b, g.Wait())
	require.NoError(b, f.Finish(bg))
	require.NoError(b, f.Close())
	return time.Since(start)
}
