package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios/dataset"
	"helios/gpuio"
	"helios/gpuio/iobench"
	"helios/internal/errs"
	"helios/internal/units"
)

func benchCommand() *cli.Command {
	stacks := []string{"async", "sync", "cpu", "mmap"}
	return &cli.Command{
		Name:  "bench",
		Usage: "measure parts of the product",
		Subcommands: []*cli.Command{{
			Name:      "io",
			Usage:     "random reads of rows by the number of SSDs and I/O blocks, audited",
			ArgsUsage: "[DATASET]",
			Description: "Reads all over the SSDs, whatever they hold, or the rows of a loaded dataset, and writes nothing.\n" +
				"Lists give a row of results for each combination. A row whose audit fails (data read, or the SSDs'\n" +
				"own counters) is shown as failed. What was never written to a file reads as zeros without the\n" +
				"disk: \"written\" is the share of the SSDs that was.\n" +
				"With several --blocks it says how many reach 98 % of the best, with the stacks async and sync how\n" +
				"they compare at equal blocks, and for SSDs in RAM what the CPU threads that play them can do alone.",
			Flags: []cli.Flag{
				&cli.StringFlag{Name: "dataset", Usage: "read the rows of this dataset `DIR`, loaded before; may also be given as an argument"},
				&cli.StringFlag{Name: "ssds", DefaultText: "all bound", Usage: "numbers of SSDs `N[,N…]`"},
				&cli.StringFlag{Name: "only", Usage: "use only `SSD[,SSD…]`, by name, path or serial (default: all bound)"},
				&cli.StringFlag{Name: "blocks", Value: "32", Usage: "thread blocks of the I/O kernels `N[,N…]`"},
				&cli.IntFlag{Name: "threads", DefaultText: "async 32, sync and both 128", Usage: "threads of a block of the I/O kernels, 32 to a warp (sync: one read to a warp)"},
				&cli.StringFlag{Name: "row-bytes", Value: "4096", Usage: "sizes of a row `SIZE[,SIZE…]` (a dataset has its own)"},
				&cli.StringFlag{Name: "stack", Value: "async", Usage: "`STACK[,STACK…]`: " + strings.Join(stacks, ", ")},
				&cli.StringFlag{Name: "depth", Value: "256", Usage: "reads in flight per SSD `N[,N…]`"},
				&cli.IntFlag{Name: "queue-pairs", DefaultText: "by blocks", Usage: "queue pairs per SSD"},
				&cli.DurationFlag{Name: "ssd-latency", Usage: "let reads of SSDs in RAM take at least `TIME`, such as 80us"},
				&cli.Float64Flag{Name: "seconds", Value: 2, Usage: "length of a measurement, after a quarter of it to warm up"},
				&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of the random rows"},
				&cli.IntFlag{Name: "workers", DefaultText: "one per CPU", Usage: "worker slots of the host device, and threads of the cpu stack"},
				oneOf("cpu-engine", "how the cpu stack reads (default: the best there is)", "", []string{"io_uring", "pread"}, nil),
				&cli.DurationFlag{Name: "read-timeout", DefaultText: "the stack's", Usage: "`TIME` after which a read is aborted and tried again"},
				deviceFlag(), faultFlag(), resultsFlag(),
			},
			Action: action(1, func(ctx context.Context, e *env) error { return runBenchIO(ctx, e, stacks) }),
		}},
	}
}

// ints reads a list flag of numbers of at least 1.
func (e *env) ints(flag string) ([]int, error) {
	v, err := units.ParseInts(e.c.String(flag), 1)
	if err != nil {
		return nil, errs.New(errs.Usage, "--%s: %w", flag, err)
	}
	return v, nil
}

func runBenchIO(ctx context.Context, e *env, known []string) (err error) {
	blocks, err := e.ints("blocks")
	if err != nil {
		return err
	}
	depths, err := e.ints("depth")
	if err != nil {
		return err
	}
	stacks, err := list("stack", e.c.String("stack"))
	if err != nil {
		return err
	}
	for _, s := range stacks {
		if nearest(s, known) != s {
			return errs.New(errs.Usage, "unknown --stack %q; %s", s, meant(s, known, "choose one of "+strings.Join(known, ", ")))
		}
	}
	var rowBytes []int
	sizes, err := list("row-bytes", e.c.String("row-bytes"))
	if err != nil {
		return err
	}
	for _, s := range sizes {
		n, err := units.ParseBytes(s)
		if err != nil || n < 1 || n > 16<<20 {
			return errs.New(errs.Usage, "--row-bytes %q is not a size between 1 and 16MiB", s)
		}
		rowBytes = append(rowBytes, int(n))
	}
	seconds := e.c.Float64("seconds")
	if !(seconds >= 0.01 && seconds <= 86400) {
		return errs.New(errs.Usage, "--seconds %v is not between 0.01 and 86400", seconds)
	}
	if e.c.Int("queue-pairs") < 0 {
		return errs.New(errs.Usage, "--queue-pairs %d is negative", e.c.Int("queue-pairs"))
	}
	if err := e.notZero("queue-pairs", "workers", "threads"); err != nil {
		return err
	}
	if t := e.c.Int("threads"); t < 0 || t > 1024 || t%32 != 0 {
		return errs.New(errs.Usage, "--threads %d: choose a multiple of 32 up to 1024", t)
	}
	threads := e.c.Int("threads")
	if threads == 0 && slices.Contains(stacks, "async") && slices.Contains(stacks, "sync") {
		threads = 128 // for both, so that they compare
	}
	if e.ssdLatency = e.c.Duration("ssd-latency"); e.ssdLatency < 0 || e.ssdLatency > 100*time.Millisecond {
		return errs.New(errs.Usage, "--ssd-latency %v is not between 0 and 100ms", e.ssdLatency)
	}
	var counts []int
	if e.c.IsSet("ssds") {
		if counts, err = e.ints("ssds"); err != nil {
			return errs.New(errs.Usage, "%w (numbers of SSDs; --only chooses some by name)", err)
		}
	}

	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer closing(&err, out.close)
	dev, err := e.openDevice("")
	if err != nil {
		return err
	}
	defer closing(&err, dev.Close)
	set, err := e.openSSDs(ctx, "only")
	if err != nil {
		return err
	}
	defer closing(&err, set.close)
	ssds := set.ssds
	var layout gpuio.Layout
	if e.c.IsSet("dataset") || e.c.NArg() > 0 {
		d, err := e.openDataset()
		if err != nil {
			return err
		}
		layout, ssds, err = dataset.Attach(ctx, d, set.ssds)
		if err := errors.Join(err, d.Close()); err != nil {
			return err
		}
		if e.c.IsSet("row-bytes") || e.c.IsSet("ssds") {
			return errs.New(errs.Usage, "--row-bytes and --ssds are for SSDs read raw; dataset %s lies on %d SSDs with rows of %d bytes, leave them out", d.Meta.Name, len(ssds), layout.RowBytes)
		}
		rowBytes = []int{int(layout.RowBytes)}
	}
	if counts == nil {
		counts = []int{len(ssds)}
	}
	for _, n := range counts {
		if n > len(ssds) {
			return errs.New(errs.Usage, "--ssds %d: only %d are bound; bind more with \"heliosctl bind-ssds\"", n, len(ssds))
		}
	}

	total := len(stacks) * len(counts) * len(blocks) * len(rowBytes) * len(depths)
	var table [][]string
	var rows []iobench.Row
	limits := map[string]iobench.ServeLimit{}
	// Who waits on the host device plays the SSDs; for a GPU each SSD has one thread that does.
	serving := 1
	if dev.Info().Backend == "host" {
		serving = dev.Info().SMs
	}
	failed := 0
	for _, stack := range stacks {
		for _, bytes := range rowBytes {
			for _, n := range counts {
				for _, b := range blocks {
					for _, depth := range depths {
						at := fmt.Sprint(n, bytes, depth)
						if _, ok := limits[at]; !ok {
							limits[at], err = iobench.MeasureServe(ctx, ssds[:n], bytes, depth, serving, time.Duration(max(seconds/4, 0.02)*float64(time.Second)))
							if err != nil {
								return err
							}
						}
						e.ui.Progress("bench io", int64(len(table)), int64(total))
						row, err := iobench.Run(ctx, iobench.Config{
							Dev: dev, SSDs: ssds[:n], Layout: layout, RowBytes: bytes, Stack: stack, Blocks: b, PerBlock: threads, Pairs: e.c.Int("queue-pairs"), Depth: depth,
							Threads: e.c.Int("workers"), Engine: e.c.String("cpu-engine"), Duration: time.Duration(seconds * float64(time.Second)),
							Seed: e.c.Uint64("seed"), Timeout: e.c.Duration("read-timeout"),
						})
						if err != nil {
							return err
						}
						share := 1.0
						if layout.Rows == 0 {
							share = written(ssds[:n])
						}
						limit := limits[at]
						out.object(benchRow{row, share, limit.Threads, limit.IOPS, e.ssdLatency.Seconds() * 1e6})
						rows = append(rows, row)
						audit := "passed"
						if !row.Audited {
							failed++
							audit = "FAILED: " + row.AuditError
						}
						table = append(table, []string{
							strconv.Itoa(row.SSDs), strconv.Itoa(row.Blocks), strconv.Itoa(row.Threads), strconv.Itoa(row.RowBytes), row.Stack, strconv.Itoa(row.QueuePairs), strconv.Itoa(row.Depth),
							units.FormatCount(row.IOPS), units.FormatBytes(int64(row.BytesPerSecond)) + "/s", fmt.Sprintf("%.2f", row.CPUPerIO),
							fmt.Sprintf("%.0f", row.P50), fmt.Sprintf("%.0f", row.P99), strconv.FormatInt(row.Errors, 10), share100(share), count0(limit.Threads), count0(int(limit.IOPS)), audit,
						})
					}
				}
			}
		}
	}
	e.ui.Table([]string{"SSDs", "blocks", "threads", "row", "stack", "QPs", "depth", "IOPS", "rate", "CPU us/IO", "p50 us", "p99 us", "errors", "written", "serving CPUs", "their limit", "audit"}, table)
	for _, s := range iobench.Summarise(rows) {
		out.object(s)
		e.ui.Printf("%s", s)
	}
	e.showFaults(set, &results{ui: e.ui})
	if err := out.commit(); err != nil {
		return err
	}
	if failed > 0 {
		return errs.New(errs.Device, "%d of %d rows failed their audit; the list says why", failed, total)
	}
	return nil
}

// benchRow is a line of "bench io --json".
type benchRow struct {
	iobench.Row
	Written float64 `json:"written"` // share of the bytes read from that hold data
	// The CPU threads that play SSDs in RAM, and what they reach with nothing beside them; 0 where
	// none do.
	ServeThreads int     `json:"serve_threads"`
	ServeIOPS    float64 `json:"serve_iops"`
	LatencyUS    float64 `json:"ssd_latency_us"` // modelled
}

// count0 is a number that may not apply.
func count0(n int) string {
	if n == 0 {
		return "-"
	}
	return units.FormatCount(float64(n))
}

func share100(v float64) string { return strconv.FormatFloat(100*v, 'f', 0, 64) + "%" }

// written is the share of the SSDs' backing files that was ever written. File systems serve the
// rest (holes, space that is only reserved) from nothing, which is no measurement of a disk.
func written(ssds []*gpuio.SSD) float64 {
	var data, all int64
	for _, s := range ssds {
		ns := s.Ctrl.Namespace()
		size := int64(ns.Blocks) * int64(ns.LBABytes)
		all += size
		n, err := dataBytes(s.BackingPath)
		if err != nil {
			n = size // a block device, or a file system that can't tell
		}
		data += min(n, size)
	}
	if all == 0 {
		return 1
	}
	return float64(data) / float64(all)
}

// dataBytes counts the bytes of a file that are not in holes (lseek, SEEK_DATA and SEEK_HOLE).
func dataBytes(path string) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close() //nolint:errcheck // only read
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return 0, errors.Join(err, errors.ErrUnsupported)
	}
	var n, at int64
	for {
		start, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return n, nil // no data after at
		}
		if err != nil {
			return 0, err
		}
		end, err := f.Seek(start, unix.SEEK_HOLE)
		if err != nil {
			return 0, err
		}
		n += end - start
		at = end
	}
}
