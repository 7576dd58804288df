package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/units"
	"helios/sched/cacheplan"
	"helios/sched/plan"
)

// sampling are the options of verbs that sample a dataset's batches and read no features.
var sampling = []string{"dataset", "fanout", "batch-size", "seed", "sampler", "batch-dependency",
	"presample-epochs", "hotness-dir", "workers", "kernels", "results", "overwrite"}

func cachePlanCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "plan",
		Usage:     "split a budget of memory between the GPU's and the CPU's tier: least modelled epoch time",
		ArgsUsage: "[DATASET]",
		Description: "Rows are placed by --hotness and looked up by an epoch that it has not seen, sampled for real. The share of an epoch\n" +
			"that each resource takes comes from --hardware: the SSDs, the link into the GPU, the GPU, the CPU's memory, the\n" +
			"sampling stream, training. All work at once, so the busiest decides. Every split is looked at, so none of them is\n" +
			"better than the one that is named; all are in --json.\n" +
			"Every figure is modelled, but for rows and hits.",
	}, 1, hcli.Of[cachePlanArgs]().Only(append(sampling, "budget", "gpu-max", "cpu-max",
		"steps", "hardware", "ssd-count", "model", "hidden", "row-dtype", "hotness")...).
		Shown("presample", "hotness").Shown("the dataset's", "row-dtype").
		Says("row-dtype", "`TYPE` that rows are stored as"), runCachePlan)
}

// cachePlanArgs holds the options of "cache plan".
type cachePlanArgs struct {
	runArgs
	find     cacheplan.Options `options:"in"`
	ssdCount int               `option:"ssd-count" positive:"yes" range:"1..256" shown:"the profile's" usage:"number of SSDs of that machine"`
	// of --hardware
	profile string `option:"hardware" use:"input" words:"@hardware" arg:"PROFILE" usage:"the machine, a PROFILE ({@hardware}) or a YAML file"`
}

// check refuses what cannot be, before anything is opened.
func (a *cachePlanArgs) check(e *env) (err error) {
	o := &a.find
	o.Hardware.SSDs = a.ssdCount
	if o.Steps < 1 || o.Steps > 100_000 {
		return errs.New(errs.Usage, "{steps} %d is not between 1 and 100000", o.Steps)
	}
	if e.given(&o.Budget) == "" {
		return errs.New(errs.Usage,
			"no {budget}: give the memory that both tiers may take together, as 64GiB or as a share of the features")
	}
	if e.given(&a.profile) == "" {
		return errs.New(errs.Usage, "no {hardware}: choose one of %s, or give a YAML file",
			strings.Join(hardware.Names(), ", "))
	}
	o.Hardware.Profile, err = hardware.Load(a.profile)
	return err
}

func runCachePlan(ctx context.Context, e *env, a *cachePlanArgs) (err error) {
	if err := a.check(e); err != nil {
		return err
	}
	s, err := openGraph(e, &a.runArgs, "a plan samples on the host device")
	if err != nil {
		return err
	}
	defer closing(&err, s.close)
	out, err := a.openResults(e)
	if err != nil {
		return err
	}
	defer out.end(&err)
	p, err := cacheplan.Find(ctx, a.cfg, s.Inputs, a.find, e.observer())
	if err != nil {
		return err
	}
	showCachePlan(e, p)
	out.event("cache plan", p)
	return nil
}

// shownSplits bounds the splits in the table; --json has all.
const shownSplits = 10

func showCachePlan(e *env, p *cacheplan.Plan) {
	for _, n := range p.Notes {
		e.plainNote(n)
	}
	e.ui.Facts([][]string{
		{"modelled plan", fmt.Sprintf("%s on %s with %d %s", p.Dataset,
			p.Hardware, p.SSDs, p.SSDModel)},
		{"accesses of an epoch", fmt.Sprintf("%d rows of %s in %d batches; placed by %s",
			p.Accesses, units.FormatBytes(p.RowBytes), p.Batches, p.Hotness)},
		{"modelled cost of an access",
			fmt.Sprintf("GPU tier %.3g ns, CPU tier %.3g ns, SSDs together %.3g ns", p.Costs["gpu"],
				p.Costs["cpu"], p.Costs["ssd"])},
		{"budget", fmt.Sprintf("%s of %s of features; the GPU's tier takes at most %s",
			units.FormatBytes(p.BudgetBytes), units.FormatBytes(p.Rows*p.RowBytes),
			units.FormatBytes(max(p.GPUMaxBytes, 0)))},
	})
	var rows [][]string
	row := func(mark string, c cacheplan.Point) {
		r := []string{mark, units.FormatBytes(c.GPUBytes), units.FormatBytes(c.CPUBytes),
			fmt.Sprintf("%.2f%%", 100*c.HitGPU), fmt.Sprintf("%.2f%%", 100*c.HitCPU),
			units.FormatSeconds(c.Seconds), c.Bottleneck}
		for _, name := range cacheplan.Resources {
			r = append(r, units.FormatSeconds(c.Resources[name]))
		}
		rows = append(rows, r)
	}
	best := slices.IndexFunc(p.Curve,
		func(c cacheplan.Point) bool { return c.GPUBytes == p.Best.GPUBytes })
	every := max((len(p.Curve)-1)/shownSplits, 1)
	for i, c := range p.Curve {
		switch {
		case i == best:
			row("best", c)
		case i%every == 0 || i == len(p.Curve)-1:
			row("", c)
		}
	}
	e.ui.Columns(splitColumns, rows)
	e.ui.Printf(
		"modelled best of %d splits: --gpu-cache %d --cpu-cache %d, %.4g s an epoch, %s is the limit; %d splits take as long (to a thousandth), from %s in the GPU on",
		len(p.Curve), p.Best.GPUBytes, p.Best.CPUBytes, p.Best.Seconds, p.Best.Bottleneck, p.Flat,
		units.FormatBytes(p.LeastGPUBytes))
}

func cacheHotnessCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "hotness",
		Usage:     "how well sources of hotness place rows for an epoch that they have not seen",
		ArgsUsage: "[DATASET]",
		Description: "For tiers of some sizes: the share of an epoch's accesses that the rows placed by each source serve, next to the most that\n" +
			"any static placement could (the epoch's own hottest rows). Needs no SSDs.\n" +
			"presample:K counts K epochs; foresight counts the very epochs that are trained, so here it is the optimum.",
	}, 1, hcli.Of[hotnessArgs]().Only(append(sampling, "hotness", "sizes")...), runCacheHotness)
}

// hotnessArgs holds the options of "cache hotness".
type hotnessArgs struct {
	runArgs
	sources []string       `option:"hotness" was:"by" use:"input" words:"@hotnesses" default:"presample:1,presample,degree,out-degree,pagerank" arg:"NAME[,NAME…]" usage:"sources NAME[,NAME…]: {@hotnesses}, presample:K, or files of node numbers"`
	sizes   []units.Budget `option:"sizes" default:"1%,5%,10%,20%" arg:"SIZE[,SIZE…]" usage:"tiers SIZE[,SIZE…], bytes or shares of the features"`
}

// SetOption reads lists of sources and sizes.
func (a *hotnessArgs) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "hotness":
		a.sources, err = parseList(name, text, "a source", func(source string) (string, error) {
			if strings.HasPrefix(source, plan.HotnessPresample+":") {
				return source, nil
			}
			return source, plan.CheckHotness(source)
		})
	case "sizes":
		a.sizes, err = parseList(name, text, "a size such as 5%", func(s string) (units.Budget, error) {
			b, err := units.ParseBudget(s)
			if err != nil {
				err = errs.New(errs.Usage, "{sizes}: %w", err)
			}
			return b, err
		})
	default:
		return false, nil
	}
	return true, err
}

func runCacheHotness(ctx context.Context, e *env, a *hotnessArgs) (err error) {
	s, err := openGraph(e, &a.runArgs, "hotness is compared on the host device")
	if err != nil {
		return err
	}
	defer closing(&err, s.close)
	out, err := a.openResults(e)
	if err != nil {
		return err
	}
	defer out.end(&err)
	r, err := cacheplan.CompareHotness(ctx, a.cfg, s.Inputs, a.sources, a.sizes,
		e.observer())
	if err != nil {
		return err
	}
	e.ui.Printf(
		"%s: an epoch of %d seeds (batch %d, fanout %v) looks up %d rows, %d different ones of %d",
		r.Dataset, r.Seeds, r.Batch, r.Fanouts, r.Accesses, r.Met, r.Rows)
	var rows [][]string
	for _, s := range r.Sources {
		for _, h := range s.Sizes {
			rows = append(rows, []string{s.By, h.Size, fmt.Sprintf("%.2f%%", 100*h.Hit),
				fmt.Sprintf("%.2f%%", 100*h.Best), fmt.Sprintf("%.2f", h.Gap),
				fmt.Sprintf("%.1f", 100*h.OfBest), units.FormatSeconds(s.Seconds)})
		}
	}
	e.ui.Columns(hotnessColumns, rows)
	out.event("hotness", r)
	return nil
}
