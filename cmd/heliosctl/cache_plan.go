package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/gnn"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/units"
	"helios/sched"
)

// samplingFlags are of verbs that sample a dataset's batches and read no features.
func samplingFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "fanout", Value: "10,10", Usage: "neighbours sampled per hop `F1,F2,…`, the seeds' first; -1 takes all"},
		&cli.IntFlag{Name: "batch-size", Value: 1024, Usage: "seed nodes in a mini-batch"},
		&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of the run"},
		samplerFlag(sched.SamplerNeighbor),
		&cli.IntFlag{Name: "presample-epochs", DefaultText: "4", Usage: "epochs that \"presample\" counts"},
		&cli.StringFlag{Name: "hotness-dir", DefaultText: "the dataset's folder hotness", Usage: "`DIR` that keeps hotness for later runs of the same graph and batches; off for none"},
		&cli.IntFlag{Name: "workers", DefaultText: "one per CPU", Usage: "worker slots of the host device, which samples"},
		kernelsFlag(),
	}
}

func cachePlanCommand() *cli.Command {
	return &cli.Command{
		Name:      "plan",
		Usage:     "split a budget of memory between the GPU's and the CPU's tier: least modelled epoch time",
		ArgsUsage: "[DATASET]",
		Description: "Rows are placed by --hotness and looked up by an epoch that it has not seen, sampled for real; or by what placed a\n" +
			"recorded run's rows, and looked up by its trace. What an epoch takes of each resource comes from --hardware: the\n" +
			"SSDs, the link into the GPU, the GPU, the CPU's memory, the sampling stream, training. All work at once, so the\n" +
			"busiest decides. Every split is looked at, so none of them is better than the one that is named; all are in --json.\n" +
			"Every figure is modelled, but for rows and hits.",
		Flags: append([]cli.Flag{
			datasetFlag,
			&cli.StringFlag{Name: "trace", Usage: "plan for the accesses in `FILE` (train --trace); a dataset is then needed for the times of sampling and training alone"},
			&cli.StringFlag{Name: "budget", Usage: "memory for both tiers together, a `SIZE` or a share of the features"},
			&cli.StringFlag{Name: "gpu-max", DefaultText: "the GPU's memory", Usage: "at most `BYTES` of it in the GPU"},
			&cli.StringFlag{Name: "cpu-max", DefaultText: "no bound", Usage: "at most `BYTES` of it in the CPU's memory"},
			&cli.IntFlag{Name: "steps", Value: 100, Usage: "splits to look at, beside the first"},
			&cli.StringFlag{Name: "hardware", Usage: "the machine, a `PROFILE` (" + strings.Join(hardware.Names(), ", ") + ") or a YAML file"},
			&cli.IntFlag{Name: "ssd-count", DefaultText: "the profile's", Usage: "number of SSDs of that machine"},
			oneOf("model", "model", gnn.DefaultArch, gnn.Archs(), nil),
			&cli.IntFlag{Name: "hidden", Value: 128, Usage: "width of the hidden layers"},
			&cli.StringFlag{Name: "row-dtype", DefaultText: "the dataset's", Usage: "`TYPE` that rows are stored as"},
			&cli.StringFlag{Name: "hotness", DefaultText: "presample", Usage: "what rows are placed by: " + strings.Join(sched.Hotnesses, ", ") + ", or a `FILE` of node numbers, hottest first (.npy or text)"},
			resultsFlag(), overwriteFlag(),
		}, samplingFlags()...),
		Action: action(1, runCachePlan),
	}
}

// samplingConfig reads samplingFlags.
func (e *env) samplingConfig() (cfg sched.Config, err error) {
	c := e.c
	if err := e.notZero("batch-size", "presample-epochs", "workers"); err != nil {
		return cfg, err
	}
	cfg = sched.Config{Batch: c.Int("batch-size"), Seed: c.Uint64("seed"), Sampler: c.String("sampler"), Presample: c.Int("presample-epochs")}
	if cfg.Fanouts, err = units.ParseInts(c.String("fanout"), -1); err != nil {
		return cfg, errs.New(errs.Usage, "--fanout: %w", err)
	}
	return cfg, e.hotnessConfig(&cfg)
}

func runCachePlan(ctx context.Context, e *env) (err error) {
	c := e.c
	o := sched.PlanOptions{Steps: c.Int("steps"), Trace: c.String("trace")}
	if o.Steps < 1 || o.Steps > 100_000 {
		return errs.New(errs.Usage, "--steps %d is not between 1 and 100000", o.Steps)
	}
	if !c.IsSet("budget") {
		return errs.New(errs.Usage, "no --budget: give the memory that both tiers may take together, as 64GiB or as a share of the features")
	}
	if o.Budget, err = units.ParseBudget(c.String("budget")); err != nil {
		return errs.New(errs.Usage, "--budget: %w", err)
	}
	for flag, to := range map[string]*int64{"gpu-max": &o.GPUMax, "cpu-max": &o.CPUMax} {
		if !c.IsSet(flag) {
			continue
		}
		if *to, err = units.ParseBytes(c.String(flag)); err != nil {
			return errs.New(errs.Usage, "--%s: %w", flag, err)
		}
		if *to == 0 {
			*to = sched.Off
		}
	}
	if !c.IsSet("hardware") {
		return errs.New(errs.Usage, "no --hardware: choose one of %s, or give a YAML file", strings.Join(hardware.Names(), ", "))
	}
	if err := e.notZero("ssd-count", "hidden"); err != nil {
		return err
	}
	if o.Hardware.SSDs = c.Int("ssd-count"); o.Hardware.SSDs < 0 || o.Hardware.SSDs > 256 {
		return errs.New(errs.Usage, "--ssd-count %d is not between 1 and 256", o.Hardware.SSDs)
	}
	if o.Hardware.Profile, err = hardware.Load(c.String("hardware")); err != nil {
		return err
	}
	cfg, err := e.samplingConfig()
	if err != nil {
		return err
	}
	cfg.Model, cfg.Hidden, cfg.RowType = c.String("model"), c.Int("hidden"), c.String("row-dtype")
	if o.Trace != "" {
		for _, f := range []string{"fanout", "batch-size", "seed", "sampler", "presample-epochs", "hotness", "hotness-dir", "row-dtype"} {
			if c.IsSet(f) {
				return errs.New(errs.Usage, "--%s: a trace has its own; leave it out", f)
			}
		}
		for _, f := range []string{"model", "hidden", "workers", "kernels"} {
			if c.IsSet(f) && datasetDir(c) == "" {
				return errs.New(errs.Usage, "--%s: a trace holds accesses alone, so nothing is sampled or trained; leave it out, or give the dataset as well", f)
			}
		}
	}
	var in sched.Inputs
	if o.Trace == "" || datasetDir(c) != "" {
		var done func() error
		if in, done, err = e.graphInputs("a plan samples on the host device"); err != nil {
			return err
		}
		defer closing(&err, done)
	}
	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer out.end(&err)
	p, err := sched.PlanCache(ctx, cfg, in, o, e.observer())
	if err != nil {
		return err
	}
	e.showCachePlan(p)
	out.object(p)
	return nil
}

// shownSplits is how many splits the table has; --json has all.
const shownSplits = 10

func (e *env) showCachePlan(p *sched.CachePlan) {
	for _, n := range p.Notes {
		e.ui.Note("%s", n)
	}
	per := func(seconds float64) string { return fmt.Sprintf("%.4g", seconds) }
	e.ui.Table([]string{"", ""}, [][]string{
		{"modelled plan", fmt.Sprintf("%s on %s with %d %s; accesses from %s", p.Dataset, p.Hardware, p.SSDs, p.SSDModel, p.From)},
		{"accesses", fmt.Sprintf("%d rows of %s in %d batches (epochs: %d); placed by %s", p.Accesses, units.FormatBytes(p.RowBytes), p.Batches, p.Epochs, p.Hotness)},
		{"modelled cost of an access", fmt.Sprintf("GPU tier %.3g ns, CPU tier %.3g ns, SSDs together %.3g ns", p.Costs["gpu"], p.Costs["cpu"], p.Costs["ssd"])},
		{"budget", fmt.Sprintf("%s of %s of features; the GPU's tier takes at most %s", units.FormatBytes(p.BudgetBytes), units.FormatBytes(p.Rows*p.RowBytes), units.FormatBytes(max(p.GPUMaxBytes, 0)))},
	})
	header := append([]string{"", "GPU tier", "CPU tier", "hits GPU", "hits CPU", "modelled epoch s", "busiest"}, sched.PlanResources...)
	var rows [][]string
	row := func(mark string, c sched.PlanPoint) {
		r := []string{mark, units.FormatBytes(c.GPUBytes), units.FormatBytes(c.CPUBytes), fmt.Sprintf("%.2f%%", 100*c.HitGPU), fmt.Sprintf("%.2f%%", 100*c.HitCPU), per(c.Seconds), c.Bottleneck}
		for _, name := range sched.PlanResources {
			r = append(r, per(c.Resources[name]))
		}
		rows = append(rows, r)
	}
	best := slices.IndexFunc(p.Curve, func(c sched.PlanPoint) bool { return c.GPUBytes == p.Best.GPUBytes })
	every := max((len(p.Curve)-1)/shownSplits, 1)
	for i, c := range p.Curve {
		switch {
		case i == best:
			row("best", c)
		case i%every == 0 || i == len(p.Curve)-1:
			row("", c)
		}
	}
	e.ui.Table(header, rows)
	e.ui.Printf("modelled best of %d splits: --gpu-cache %d --cpu-cache %d, %.4g s an epoch, %s is the limit; %d splits take as long (to a thousandth), from %s in the GPU on",
		len(p.Curve), p.Best.GPUBytes, p.Best.CPUBytes, p.Best.Seconds, p.Best.Bottleneck, p.Flat, units.FormatBytes(p.LeastGPUBytes))
}

func cacheHotnessCommand() *cli.Command {
	return &cli.Command{
		Name:      "hotness",
		Usage:     "how well sources of hotness place rows for an epoch that they have not seen",
		ArgsUsage: "[DATASET]",
		Description: "For tiers of some sizes: the share of an epoch's accesses that the rows placed by each source serve, next to the most that\n" +
			"any static placement could (the epoch's own hottest rows). Needs no SSDs.\n" +
			"presample:K counts K epochs; foresight counts the very epochs that are trained, so here it is the optimum.",
		Flags: append([]cli.Flag{
			datasetFlag,
			&cli.StringFlag{Name: "by", Value: "presample:1,presample,degree,out-degree,pagerank", Usage: "sources `NAME[,NAME…]`: " + strings.Join(sched.Hotnesses, ", ") + ", presample:K, or files of node numbers"},
			&cli.StringFlag{Name: "sizes", Value: "1%,5%,10%,20%", Usage: "tiers `SIZE[,SIZE…]`, bytes or shares of the features"},
			resultsFlag(), overwriteFlag(),
		}, samplingFlags()...),
		Action: action(1, runCacheHotness),
	}
}

func runCacheHotness(ctx context.Context, e *env) (err error) {
	cfg, err := e.samplingConfig()
	if err != nil {
		return err
	}
	by, err := list("by", e.c.String("by"))
	if err != nil {
		return err
	}
	for _, name := range by {
		if strings.HasPrefix(name, sched.HotnessPresample+":") {
			continue
		}
		if err := hotnessSource("by", name); err != nil {
			return err
		}
	}
	texts, err := list("sizes", e.c.String("sizes"))
	if err != nil {
		return err
	}
	var sizes []units.Budget
	for _, s := range texts {
		b, err := units.ParseBudget(s)
		if err != nil {
			return errs.New(errs.Usage, "--sizes: %w", err)
		}
		sizes = append(sizes, b)
	}
	in, done, err := e.graphInputs("hotness is compared on the host device")
	if err != nil {
		return err
	}
	defer closing(&err, done)
	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer out.end(&err)
	r, err := sched.CompareHotness(ctx, cfg, in, by, sizes, e.observer())
	if err != nil {
		return err
	}
	e.ui.Printf("%s: an epoch of %d seeds (batch %d, fanout %v) looks up %d rows, %d different ones of %d",
		r.Dataset, r.Seeds, r.Batch, r.Fanouts, r.Accesses, r.Met, r.Rows)
	var rows [][]string
	for _, s := range r.Sources {
		for _, h := range s.Sizes {
			rows = append(rows, []string{s.By, h.Size, fmt.Sprintf("%.2f%%", 100*h.Hit), fmt.Sprintf("%.2f%%", 100*h.Best), fmt.Sprintf("%.2f", h.Gap), fmt.Sprintf("%.1f", 100*h.OfBest), fmt.Sprintf("%.3g", s.Seconds)})
		}
	}
	e.ui.Table([]string{"hotness", "tier", "hits", "optimum", "points below", "of 100", "seconds"}, rows)
	out.object(r)
	return nil
}
