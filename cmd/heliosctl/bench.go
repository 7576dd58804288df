package main

import (
	"context"
	"errors"
	"math"
	"os"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios/gpuio"
	hcli "helios/internal/cli"
	"helios/sched/plan"
)

func benchCommand() *cli.Command {
	return &cli.Command{
		Name:        "bench",
		Usage:       "measure reads",
		Subcommands: []*cli.Command{benchIOCommand()},
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
			"Reads that a retry healed are counted under \"retries\" and do not fail it. Blocks that were never\n" +
			"written to a file read as zeros without the disk: \"written\" is the share of the SSDs that was.\n" +
			"With several --io-blocks it names those that reach 98 % of the best, with the stacks async and sync how\n" +
			"they compare at equal blocks or, without --io-blocks, as training has them, and for\n" +
			"SSDs in RAM what the CPU threads that play them can do alone.\n" +
			"Some sets of rows are always in flight.\n" +
			"--clock virtual needs no SSDs: it plays the machine of --hardware, and every figure is modelled.",
	}, 1, hcli.Of[ioBenchArgs]().
		Says("dataset", "read the rows of this dataset `DIR`, loaded before; may also be given as an argument"),
		runBenchIO)
}

// ioBenchArgs holds the options of "bench io".
type ioBenchArgs struct {
	datasetArgs
	deviceArgs
	ssdArgs
	playedArgs
	outputs
	// of SSDs; none: all there are
	counts   []int    `option:"ssd-count" common:"yes" shown:"all bound; virtual: the profile's" arg:"N[,N…]" usage:"numbers of SSDs N[,N…]"`
	stacks   []string `option:"io-stack" common:"yes" oneof:"@stacks" use:"setting" default:"async" arg:"STACK[,STACK…]" usage:"STACK[,STACK…]"`
	blocks   []int    `option:"io-blocks" shown:"as in training: async 32, sync as many as the device keeps resident" arg:"N[,N…]" usage:"thread blocks of the I/O kernels N[,N…]"`
	rowBytes []int    `option:"row-bytes" common:"yes" default:"4096" arg:"SIZE[,SIZE…]" usage:"sizes of a row SIZE[,SIZE…] (a dataset has its own)"`
	depths   []int    `option:"depth" common:"yes" default:"256" arg:"N[,N…]" usage:"reads in flight per SSD N[,N…]"`
	// as AsyncOptions.CoalesceBytes
	coalesce []int `option:"coalesce" offers:"auto,off" default:"auto" arg:"SIZE" usage:"one command for rows that lie close (stacks async and cpu): auto, off, or up to SIZE a command; a list compares them"`
	threads  int   `option:"threads" positive:"yes" shown:"as in training: async 32, sync 128" usage:"threads of a block of the I/O kernels, 32 to a warp (sync: one read to a warp)"`
	workers  int   `option:"workers" positive:"yes" shown:"one per CPU" usage:"worker slots of the host device, and threads of the cpu stack"`
	// 0: virtual, by itself
	seconds    float64 `option:"seconds" default:"2" shown:"2; virtual: what 200,000 reads take" usage:"length of a measurement, after a quarter of it to warm up"`
	checkReads bool    `option:"check-reads" use:"setting" usage:"check every row of a dataset against its checksum, not only a sample"`
	timeline   string  `option:"timeline" common:"yes" use:"aside" arg:"FILE" usage:"write when each set was read to FILE, a Chrome trace (open it in ui.perfetto.dev)"`
	rung       string  `option:"memory-rung" use:"setting" oneof:"@rungs" default:"auto" usage:"where queues and data of the stacks async and sync are on a GPU; auto takes the best that a pattern read both ways proves"`
}

// playedArgs hold what "bench io" is asked to model.
type playedArgs struct {
	clock string `option:"clock" common:"yes" use:"setting" oneof:"wall,virtual" default:"wall" usage:"wall measures; virtual takes all times from {hardware}, and every figure is modelled"`
	// of --hardware
	profile string `option:"hardware" common:"yes" use:"input" words:"@hardware" arg:"PROFILE" usage:"machine of {clock} virtual: a PROFILE ({@hardware}) or a YAML file"`
	// of the SSDs
	model   string        `option:"ssd-model" common:"yes" use:"input" words:"@ssd-models" arg:"MODEL" usage:"have software SSDs, or those of {hardware}, play MODEL ({@ssd-models}) or that of a YAML file"`
	latency time.Duration `option:"ssd-latency" arg:"TIME" usage:"have them take at least TIME for each read, such as 80us, and nothing else bound them"`
}

// SetOption reads lists of numbers and sizes.
func (a *ioBenchArgs) SetOption(name, text string) (done bool, err error) {
	numbers := map[string]*[]int{"ssd-count": &a.counts, "io-blocks": &a.blocks,
		"depth": &a.depths}
	if list := numbers[name]; list != nil {
		*list, err = parseNumbers(name, text)
		return true, err
	}
	switch name {
	case "row-bytes":
		a.rowBytes, err = parseList(name, text, "a size such as 4096", parseRowBytes)
	case "coalesce":
		a.coalesce, err = parseList(name, text, "auto, off, a size, or several of these",
			plan.ParseCoalesce)
	default:
		return false, nil
	}
	return true, err
}

func runBenchIO(ctx context.Context, e *env, a *ioBenchArgs) error {
	b := &ioBench{env: e, ioBenchArgs: a, opener: &ssdOpener{env: e, ssdArgs: a.ssdArgs,
		stackFlag: "io-stack", stacks: a.stacks}}
	if err := b.check(); err != nil {
		return err
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
	var n, offset int64
	for {
		start, err := f.Seek(offset, unix.SEEK_DATA)
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
		offset = end
	}
}
