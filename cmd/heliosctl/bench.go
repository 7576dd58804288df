package main

import (
	"context"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios/gpuio"
	"helios/gpuio/iobench"
	hcli "helios/internal/cli"
	"helios/internal/hardware"
	"helios/internal/ssdmodel"
)

var benchStacks = gpuio.StackNames(nil)

func benchCommand() *cli.Command {
	return &cli.Command{
		Name:  "bench",
		Usage: "measure parts of the product",
		Subcommands: []*cli.Command{benchIOCommand(), benchSampleCommand(), benchComputeCommand(),
			benchMemoryCommand(), benchCacheCommand(), benchSuiteCommand()},
	}
}

func benchIOCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "io",
		Usage:     "random reads of rows by the number of SSDs and I/O blocks, audited",
		ArgsUsage: "[DATASET]",
		Description: "Reads all over the SSDs, whatever they hold, or the rows of a loaded dataset, and writes nothing.\n" +
			"Lists and ranges (1,2,4 or 1..12 or 1..4,8) give a row of results for each combination. A row whose\n" +
			"audit fails (launches, data read, or each SSD's own counters of commands and data) is shown as failed.\n" +
			"Reads that a retry healed are counted under \"retries\" and do not fail it. What was never written to\n" +
			"a file reads as zeros without the disk: \"written\" is the share of the SSDs that was.\n" +
			"With several --io-blocks it says how many reach 98 % of the best, with the stacks async and sync how\n" +
			"they compare at equal blocks or, without --io-blocks, as training has them, with several --set-rows how large a set has to be for 95 %, and for\n" +
			"SSDs in RAM what the CPU threads that play them can do alone.\n" +
			"By default some sets of rows are always in flight (closed loop). With --rate, rows arrive at random\n" +
			"moments whatever comes back (open loop): latency then counts from the arrival, so that waiting shows.\n" +
			"Where the stack cannot keep up nothing is dropped, rows wait for their turn, and the row says so.\n" +
			"--clock virtual needs no SSDs: it plays the machine of --hardware, and every figure is modelled.",
	}, 1, ioBenchOptions(), runBenchIO)
}

// ioBenchArgs holds the options of "bench io".
type ioBenchArgs struct {
	datasetArgs
	deviceArgs
	ssdArgs
	playedArgs
	outputs
	counts                             []int // of SSDs; none: all there are
	stacks                             []string
	rowBytes, blocks, depths, setRows  []int
	rates                              []float64
	coalesce                           []int // as AsyncOptions.CoalesceBytes
	threads, queuePairs, sets, workers int
	seconds                            float64 // 0: virtual, by itself
	seed                               uint64
	engine                             string
	timeout                            time.Duration
	checkReads, histogram              bool
	timeline, rung                     string
}

// playedArgs hold what "bench io" is asked to model.
type playedArgs struct {
	clock   string
	profile string // of --hardware
	model   string // of the SSDs
	latency time.Duration
	lba     int
}

func ioBenchOptions() hcli.Options[ioBenchArgs] {
	return slices.Concat(
		hcli.In(func(a *ioBenchArgs) *datasetArgs { return &a.datasetArgs }, datasetOptions(
			"read the rows of this dataset `DIR`, loaded before; may also be given as an argument")),
		hcli.In(func(a *ioBenchArgs) *ssdArgs { return &a.ssdArgs }, hcli.Options[ssdArgs]{
			queuesOption(), faultOption()}),
		hcli.Options[ioBenchArgs]{
			hcli.Parsed(&cli.StringFlag{Name: "ssd-count", DefaultText: "all bound; virtual: the profile's",
				Usage: "numbers of SSDs `N[,N…]`"},
				func(a *ioBenchArgs) *[]int { return &a.counts }, numbers("ssd-count")),
			hcli.List(&cli.StringFlag{Name: "ssds",
				Usage: "use only `SSD[,SSD…]`, by name, path or serial (default: all bound)"},
				func(a *ioBenchArgs) *[]string { return &a.names }).Setting().
				Was("only").Checked(countedSSDs),
			hcli.Parsed(&cli.StringFlag{Name: "io-blocks",
				DefaultText: "as in training: async 32, sync as many as the device keeps resident",
				Usage:       "thread blocks of the I/O kernels `N[,N…]`"},
				func(a *ioBenchArgs) *[]int { return &a.blocks }, numbers("io-blocks")).Was("blocks"),
			hcli.Int(&cli.IntFlag{Name: "threads", DefaultText: "as in training: async 32, sync 128",
				Usage: "threads of a block of the I/O kernels, 32 to a warp (sync: one read to a warp)"},
				func(a *ioBenchArgs) *int { return &a.threads }).Positive(),
			hcli.Parsed(&cli.StringFlag{Name: "row-bytes", Value: "4096",
				Usage: "sizes of a row `SIZE[,SIZE…]` (a dataset has its own)"},
				func(a *ioBenchArgs) *[]int { return &a.rowBytes }, parseRowBytes),
			hcli.Parsed(&cli.StringFlag{Name: "io-stack", Value: gpuio.StackAsync,
				Usage: "`STACK[,STACK…]`: " + strings.Join(benchStacks, ", ")},
				func(a *ioBenchArgs) *[]string { return &a.stacks }, parseStacks).
				Was("stack").Setting().OffersList(benchStacks...),
			hcli.Parsed(&cli.StringFlag{Name: "depth", Value: "256",
				Usage: "reads in flight per SSD `N[,N…]`"},
				func(a *ioBenchArgs) *[]int { return &a.depths }, numbers("depth")),
			hcli.Int(&cli.IntFlag{Name: "queue-pairs", DefaultText: "by blocks",
				Usage: "queue pairs per SSD"},
				func(a *ioBenchArgs) *int { return &a.queuePairs }).Positive(),
			hcli.Parsed(&cli.StringFlag{Name: "coalesce", Value: "auto",
				Usage: "one command for rows on equal and adjacent LBAs (stacks async and cpu): auto, off, or up to `SIZE` a command; a list compares them"},
				func(a *ioBenchArgs) *[]int { return &a.coalesce }, parseCoalesce).
				OffersList("auto", "off"),
			hcli.Parsed(&cli.StringFlag{Name: "set-rows", DefaultText: "several times the depth",
				Usage: "rows of a set, over all SSDs `N[,N…]`"},
				func(a *ioBenchArgs) *[]int { return &a.setRows }, numbers("set-rows")),
			hcli.Int(&cli.IntFlag{Name: "sets-in-flight", DefaultText: "3; with --rate 16",
				Usage: "sets that are read at once; 1: each waits for the one before"},
				func(a *ioBenchArgs) *int { return &a.sets }).Positive(),
			hcli.Parsed(&cli.StringFlag{Name: "rate", DefaultText: "closed loop",
				Usage: "rows a second that arrive, over all SSDs `N[,N…]` (open loop)"},
				func(a *ioBenchArgs) *[]float64 { return &a.rates }, parseRates),
		},
		hcli.In(func(a *ioBenchArgs) *playedArgs { return &a.playedArgs }, hcli.Options[playedArgs]{
			hcli.Text(oneOf("clock",
				"wall measures; virtual takes all times from --hardware, and every figure is modelled",
				iobench.ClockWall, []string{iobench.ClockWall, iobench.ClockVirtual}, nil),
				func(a *playedArgs) *string { return &a.clock }).Setting(),
			hcli.Text(&cli.StringFlag{Name: "hardware",
				Usage: "machine of --clock virtual: a `PROFILE` (" +
					strings.Join(hardware.Names(), ", ") + ") or a YAML file"},
				func(a *playedArgs) *string { return &a.profile }).Input(hardware.Names()...),
			hcli.Text(&cli.StringFlag{Name: "ssd-model",
				Usage: "have software SSDs, or those of --hardware, play `MODEL` (" +
					strings.Join(ssdmodel.Names(), ", ") + ") or that of a YAML file"},
				func(a *playedArgs) *string { return &a.model }).Input(ssdmodel.Names()...),
			hcli.Duration(&cli.DurationFlag{Name: "ssd-latency",
				Usage: "have them take at least `TIME` for each read, such as 80us, and nothing else bound them"},
				func(a *playedArgs) *time.Duration { return &a.latency }),
			hcli.Int(&cli.IntFlag{Name: "lba", DefaultText: "512 where the model has it",
				Usage: "block size of the SSDs of --clock virtual"},
				func(a *playedArgs) *int { return &a.lba }).Positive(),
		}),
		hcli.Options[ioBenchArgs]{
			hcli.Float(&cli.Float64Flag{Name: "seconds", Value: 2,
				DefaultText: "2; virtual: what 200,000 reads take",
				Usage:       "length of a measurement, after a quarter of it to warm up"},
				func(a *ioBenchArgs) *float64 { return &a.seconds }),
			hcli.Uint64(&cli.Uint64Flag{Name: "seed", Value: 1,
				Usage: "seed of the random rows, arrivals and modelled times"},
				func(a *ioBenchArgs) *uint64 { return &a.seed }),
			hcli.Int(&cli.IntFlag{Name: "workers", DefaultText: "one per CPU",
				Usage: "worker slots of the host device, and threads of the cpu stack"},
				func(a *ioBenchArgs) *int { return &a.workers }).Positive(),
			hcli.Text(oneOf("cpu-engine", "how the cpu stack reads (default: the best there is)", "",
				[]string{"io_uring", "pread"}, nil),
				func(a *ioBenchArgs) *string { return &a.engine }).Setting(),
			hcli.Duration(&cli.DurationFlag{Name: "read-timeout", DefaultText: "the stack's",
				Usage: "`TIME` after which a read is aborted and tried again"},
				func(a *ioBenchArgs) *time.Duration { return &a.timeout }),
			hcli.Bool(&cli.BoolFlag{Name: "check-reads",
				Usage: "check every row of a dataset against its checksum, not only a sample"},
				func(a *ioBenchArgs) *bool { return &a.checkReads }).Setting(),
			hcli.Bool(&cli.BoolFlag{Name: "histogram",
				Usage: "print the latencies of each row of results"},
				func(a *ioBenchArgs) *bool { return &a.histogram }).Setting(),
			hcli.Text(&cli.StringFlag{Name: "timeline",
				Usage: "write when each set was read to `FILE`, a Chrome trace (open it in ui.perfetto.dev)"},
				func(a *ioBenchArgs) *string { return &a.timeline }).Aside(),
			hcli.Text(oneOf("memory-rung",
				"where queues and data of the stacks async and sync are on a GPU; auto takes the best that a pattern read both ways proves",
				gpuio.RungAuto, append([]string{gpuio.RungAuto}, gpuio.Rungs()...), nil),
				func(a *ioBenchArgs) *string { return &a.rung }).Setting(),
		},
		hcli.In(func(a *ioBenchArgs) *deviceArgs { return &a.deviceArgs }, deviceOptions()),
		hcli.In(func(a *ioBenchArgs) *outputs { return &a.outputs }, outputOptions()))
}

func runBenchIO(ctx context.Context, e *env, a *ioBenchArgs) error {
	b := &ioBench{env: e, ioBenchArgs: a, opener: &ssdOpener{env: e, ssdArgs: a.ssdArgs,
		stackFlag: "io-stack", stacks: a.stacks}}
	if err := b.check(); err != nil {
		return err
	}
	if e.given(&a.ssdArgs.names) != "" && len(a.names) == 0 {
		e.ui.Note("--ssds takes names; the number of SSDs is called --ssd-count now")
	}
	if b.hardware != nil {
		return b.play(ctx)
	}
	return b.measure(ctx)
}

// written is the share of the SSDs' backing files that was ever written. File systems serve the
// rest (holes, space that is only reserved) from nothing, which is no measurement of a disk. NaN
// where an SSD has no file: only a controller knows what of it was written.
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
