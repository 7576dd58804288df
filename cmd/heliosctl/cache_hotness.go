package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/cacheplan"
	"helios/sched/plan"
)

// sampling are the options of verbs that sample a dataset's batches and read no features.
var sampling = []string{"dataset", "fanout", "batch-size", "seed", "sampler", "batch-dependency",
	"presample-epochs", "hotness-dir", "workers", "kernels", "results", "overwrite"}

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
	sources []string       `option:"hotness" use:"input" words:"@hotnesses" default:"presample:1,presample,degree,out-degree,pagerank" arg:"NAME[,NAME…]" usage:"sources NAME[,NAME…]: {@hotnesses}, presample:K, or files of node numbers"`
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
