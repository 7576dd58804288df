package main

import (
	"context"
	"errors"
	"math"
	"os"
	"strings"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios/gpuio"
	"helios/gpuio/iobench"
	"helios/internal/hardware"
	"helios/internal/ssdmodel"
)

var benchStacks = []string{"async", "sync", "cpu", "mmap"}

func benchCommand() *cli.Command {
	return &cli.Command{
		Name:  "bench",
		Usage: "measure parts of the product",
		Subcommands: []*cli.Command{{
			Name:      "io",
			Usage:     "random reads of rows by the number of SSDs and I/O blocks, audited",
			ArgsUsage: "[DATASET]",
			Description: "Reads all over the SSDs, whatever they hold, or the rows of a loaded dataset, and writes nothing.\n" +
				"Lists and ranges (1,2,4 or 1..12 or 1..4,8) give a row of results for each combination. A row whose\n" +
				"audit fails (launches, data read, or each SSD's own counters of commands and data) is shown as failed.\n" +
				"Reads that a retry healed are counted under \"retries\" and do not fail it. What was never written to\n" +
				"a file reads as zeros without the disk: \"written\" is the share of the SSDs that was.\n" +
				"With several --blocks it says how many reach 98 % of the best, with the stacks async and sync how\n" +
				"they compare at equal blocks, with several --set-rows how large a set has to be for 95 %, and for\n" +
				"SSDs in RAM what the CPU threads that play them can do alone.\n" +
				"By default some sets of rows are always in flight (closed loop). With --rate, rows arrive at random\n" +
				"moments whatever comes back (open loop): latency then counts from the arrival, so that waiting shows.\n" +
				"Where the stack cannot keep up nothing is dropped, rows wait for their turn, and the row says so.\n" +
				"--clock virtual needs no SSDs: it plays the machine of --hardware, and every figure is modelled.",
			Flags: []cli.Flag{
				&cli.StringFlag{Name: "dataset", Usage: "read the rows of this dataset `DIR`, loaded before; may also be given as an argument"},
				&cli.StringFlag{Name: "ssds", DefaultText: "all bound; virtual: the profile's", Usage: "numbers of SSDs `N[,N…]`"},
				&cli.StringFlag{Name: "only", Usage: "use only `SSD[,SSD…]`, by name, path or serial (default: all bound)"},
				&cli.StringFlag{Name: "blocks", Value: "32", Usage: "thread blocks of the I/O kernels `N[,N…]`"},
				&cli.IntFlag{Name: "threads", DefaultText: "async 32, sync and both 128", Usage: "threads of a block of the I/O kernels, 32 to a warp (sync: one read to a warp)"},
				&cli.StringFlag{Name: "row-bytes", Value: "4096", Usage: "sizes of a row `SIZE[,SIZE…]` (a dataset has its own)"},
				&cli.StringFlag{Name: "stack", Value: "async", Usage: "`STACK[,STACK…]`: " + strings.Join(benchStacks, ", ")},
				&cli.StringFlag{Name: "depth", Value: "256", Usage: "reads in flight per SSD `N[,N…]`"},
				&cli.IntFlag{Name: "queue-pairs", DefaultText: "by blocks", Usage: "queue pairs per SSD"},
				&cli.StringFlag{Name: "coalesce", Value: "auto", Usage: "one command for rows on equal and adjacent LBAs (stacks async and cpu): auto, off, or up to `SIZE` a command; a list compares them"},
				&cli.StringFlag{Name: "set-rows", DefaultText: "several times the depth", Usage: "rows of a set, over all SSDs `N[,N…]`"},
				&cli.IntFlag{Name: "sets-in-flight", DefaultText: "3; with --rate 16", Usage: "sets that are read at once; 1: each waits for the one before"},
				&cli.StringFlag{Name: "rate", DefaultText: "closed loop", Usage: "rows a second that arrive, over all SSDs `N[,N…]` (open loop)"},
				oneOf("clock", "wall measures; virtual takes all times from --hardware, and every figure is modelled", iobench.ClockWall, []string{iobench.ClockWall, iobench.ClockVirtual}, nil),
				&cli.StringFlag{Name: "hardware", Usage: "machine of --clock virtual: a `PROFILE` (" + strings.Join(hardware.Names(), ", ") + ") or a YAML file"},
				&cli.StringFlag{Name: "ssd-model", Usage: "have software SSDs, or those of --hardware, play `MODEL` (" + strings.Join(ssdmodel.Names(), ", ") + ") or that of a YAML file"},
				&cli.DurationFlag{Name: "ssd-latency", Usage: "have them take at least `TIME` for each read, such as 80us, and nothing else bound them"},
				&cli.IntFlag{Name: "lba", DefaultText: "512 where the model has it", Usage: "block size of the SSDs of --clock virtual"},
				&cli.Float64Flag{Name: "seconds", Value: 2, DefaultText: "2; virtual: what 200,000 reads take", Usage: "length of a measurement, after a quarter of it to warm up"},
				&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of the random rows, arrivals and modelled times"},
				&cli.IntFlag{Name: "workers", DefaultText: "one per CPU", Usage: "worker slots of the host device, and threads of the cpu stack"},
				oneOf("cpu-engine", "how the cpu stack reads (default: the best there is)", "", []string{"io_uring", "pread"}, nil),
				&cli.DurationFlag{Name: "read-timeout", DefaultText: "the stack's", Usage: "`TIME` after which a read is aborted and tried again"},
				&cli.BoolFlag{Name: "check-reads", Usage: "check every row of a dataset against its checksum, not only a sample"},
				&cli.BoolFlag{Name: "histogram", Usage: "print the latencies of each row of results"},
				&cli.StringFlag{Name: "timeline", Usage: "write when each set was read to `FILE`, a Chrome trace (open it in ui.perfetto.dev)"},
				oneOf("memory-rung", "where queues and data of the stacks async and sync are on a GPU; auto takes the best that a pattern read both ways proves", gpuio.RungAuto, append([]string{gpuio.RungAuto}, gpuio.Rungs()...), nil),
				deviceFlag(), kernelsFlag(), sqFlag(), faultFlag(), resultsFlag(), overwriteFlag(),
			},
			Action: action(1, runBenchIO),
		}, benchSampleCommand(), benchComputeCommand(), benchMemoryCommand(), benchCacheCommand()},
	}
}

func runBenchIO(ctx context.Context, e *env) error {
	p, err := e.benchPlan()
	if err != nil {
		return err
	}
	if p.hardware != nil {
		return e.benchVirtual(ctx, p)
	}
	return e.benchWall(ctx, p)
}

// written is the share of the SSDs' backing files that was ever written. File systems serve the
// rest (holes, space that is only reserved) from nothing, which is no measurement of a disk. NaN where
// an SSD has no file: only a controller knows what of it was written.
func written(ssds []*gpuio.SSD) float64 {
	var data, all int64
	for _, s := range ssds {
		ns := s.Ctrl.Namespace()
		size := int64(ns.Blocks) * int64(ns.LBABytes)
		all += size
		if s.BackingPath == "" {
			return math.NaN()
		}
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
