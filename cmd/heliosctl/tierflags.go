package main

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cache/policy"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched"
)

// offlinePolicies are told where they belong.
var offlinePolicies = map[string]error{
	policy.Belady: errs.New(errs.Usage, "--policy belady needs to know the future: record a run with --trace FILE and give \"cache replay --policies belady\", or choose one of %s", strings.Join(sched.Policies, ", ")),
}

// samplerFlag is of verbs that sample; text says what a run without it takes.
func samplerFlag(text string) cli.Flag {
	f := oneOf("sampler", "how mini-batches are drawn (ladies: layer-wise, --fanout is then nodes a layer; other results)", "", sched.Samplers, nil)
	f.DefaultText = text
	return f
}

// tierFlags decide what the caches keep and how reads are merged. They never change a result.
func tierFlags() []cli.Flag {
	policyFlag := oneOf("policy", "what the GPU tier keeps; static places rows once, by hotness", "", sched.Policies, offlinePolicies)
	policyFlag.DefaultText = "random in bam and gids, else static"
	topology := oneOf("topology", "where the neighbour lists are: in memory, or read as they are needed, through a cache of lists", sched.TopologyMemory, sched.Topologies, nil)
	return []cli.Flag{
		policyFlag,
		&cli.StringFlag{Name: "cache-line", DefaultText: "4096 in bam and gids, else row", Usage: "what a dynamic GPU tier reads and keeps at once: lines of `BYTES`, or \"row\""},
		&cli.IntFlag{Name: "window", DefaultText: "8 in gids, else 0", Usage: "coming mini-batches whose lines a dynamic GPU tier keeps (GIDS's window buffer), 0 for none"},
		&cli.Float64Flag{Name: "accumulate", DefaultText: "0.95 in gids, else 0", Usage: "merge the reads of coming mini-batches until they reach this `SHARE` of the SSDs' peak rate (GIDS's accumulator), 0 for never"},
		&cli.StringFlag{Name: "hotness", DefaultText: "pagerank in gids, else presample", Usage: "what rows are placed by: " + strings.Join(sched.Hotnesses, ", ") + ", or a `FILE` of node numbers, hottest first (.npy or text)"},
		&cli.StringFlag{Name: "hotness-dir", DefaultText: "the dataset's folder hotness", Usage: "`DIR` that keeps hotness for later runs of the same graph and batches; off for none"},
		topology,
		&cli.StringFlag{Name: "neighbor-cache", DefaultText: "10% with --topology ssd", Usage: "`BUDGET` of CPU memory for the lists of hot nodes, a size or a share of the topology"},
	}
}

// tierConfig reads tierFlags into cfg.
func (e *env) tierConfig(cfg *sched.Config) (err error) {
	c := e.c
	cfg.Policy, cfg.Topology, cfg.Sampler = c.String("policy"), c.String("topology"), c.String("sampler")
	if cfg.CacheLine, err = cacheLine(c.String("cache-line")); err != nil {
		return err
	}
	if cfg.Window = c.Int("window"); cfg.Window < 0 {
		return errs.New(errs.Usage, "--window %d is below 0 (none)", cfg.Window)
	}
	if c.IsSet("window") && cfg.Window == 0 {
		cfg.Window = sched.Off // the library takes 0 for the mode's default; so for the next
	}
	if cfg.Accumulate = c.Float64("accumulate"); !(cfg.Accumulate >= 0 && cfg.Accumulate < 1) {
		return errs.New(errs.Usage, "--accumulate %v is not in [0, 1): the whole of the peak would take infinitely many reads in flight; 0.95 is usual", cfg.Accumulate)
	}
	if c.IsSet("accumulate") && cfg.Accumulate == 0 {
		cfg.Accumulate = sched.Off
	}
	if err := e.hotnessConfig(cfg); err != nil {
		return err
	}
	if cfg.Policy != "" && cfg.Policy != sched.PolicyStatic && !cfg.GPUCacheAuto && !c.IsSet("gpu-cache") {
		return errs.New(errs.Usage, "--policy %s: --mode %s has no GPU tier by itself; add --gpu-cache, or leave it out", cfg.Policy, cfg.Mode)
	}
	def := ""
	if cfg.Topology == sched.TopologySSD {
		def = "10%"
	} else if c.IsSet("neighbor-cache") {
		return errs.New(errs.Usage, "--neighbor-cache: all of the topology is in memory; leave it out, or add --topology ssd")
	}
	cfg.NeighborCache, err = cacheBudget(c, "neighbor-cache", def)
	return err
}

// hotnessConfig reads --hotness and --hotness-dir.
func (e *env) hotnessConfig(cfg *sched.Config) error {
	c := e.c
	if cfg.Hotness = c.String("hotness"); cfg.Hotness != "" {
		if err := hotnessSource("hotness", cfg.Hotness); err != nil {
			return err
		}
	}
	if c.IsSet("presample-epochs") && cfg.Hotness != "" && cfg.Hotness != sched.HotnessPresample {
		return errs.New(errs.Usage, "--presample-epochs: --hotness %s counts no epochs beforehand; leave one of the two out", cfg.Hotness)
	}
	switch dir := c.String("hotness-dir"); {
	case dir == "off":
	case dir != "":
		cfg.HotnessDir = dir
	case c.IsSet("hotness-dir"):
		return errs.New(errs.Usage, "--hotness-dir: empty; name a folder, or off")
	case c.String("clock") != sched.ClockVirtual: // where modelled presampling must not depend on earlier runs
		if d := datasetDir(c); d != "" {
			cfg.HotnessDir = filepath.Join(d, "hotness")
		}
	}
	return nil
}

// hotnessSource is the error of a flag that names neither a source of hotness nor a file.
func hotnessSource(flag, name string) error {
	if slices.Contains(sched.Hotnesses, name) {
		return nil
	}
	if fi, err := os.Stat(name); err != nil || !fi.Mode().IsRegular() {
		return errs.New(errs.Usage, "--%s %q is neither one of %s nor a file that is there; %s", flag, name, strings.Join(sched.Hotnesses, ", "),
			meant(name, sched.Hotnesses, "name a .npy or text file of node numbers, hottest first"))
	}
	return nil
}

// datasetDir is the dataset's folder where one was given; env.dataset says what is wrong where not.
func datasetDir(c *cli.Context) string {
	if d := c.String("dataset"); d != "" {
		return d
	}
	return c.Args().First()
}

// cacheLine reads --cache-line.
func cacheLine(s string) (int64, error) {
	switch s {
	case "":
		return 0, nil
	case "row":
		return sched.LineRow, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		n, err = units.ParseBytes(s)
	}
	if err != nil || n < 1 {
		return 0, errs.New(errs.Usage, "--cache-line %q is neither \"row\" nor a number of bytes such as 4096", s)
	}
	return n, nil
}
