package main

import (
	"context"
	"strings"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/sched"
	"helios/sched/tiers"
)

func prepareCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "prepare",
		Usage:     "lay mini-batches or parts of the graph out on disk, for a later train",
		ArgsUsage: "[DATASET]",
		Description: "Give what train is going to be given: train with the same --packed uses what is there, and prepares the rest.\n" +
			"With --mode " + strings.Join(tiers.Catalog.With("parted"), " or ") + " it divides the graph into parts and lays them out in --parted.\n" +
			"However it is stopped, the same command goes on where it was.",
	}, 1, hcli.Of[runArgs]().Without("other-dataset", "no-edges").WithoutGroups("Replicas", "Run").
		Without("results", "overwrite"), runPrepare)
}

func runPrepare(ctx context.Context, e *env, a *runArgs) (err error) {
	if e.given(&a.cfg.Mode) == "" {
		a.cfg.Mode = tiers.Catalog.With("packed")[0]
	}
	if e.given(&a.timeline) != "" {
		return errs.New(errs.Usage, "{timeline}: nothing trains; leave it out")
	}
	if err := a.cfg.Check(); err != nil {
		return err
	}
	s, err := openSession(ctx, e, a)
	if err != nil {
		return err
	}
	defer closing(&err, s.close)
	res, err := sched.Prepare(ctx, a.cfg, s.Inputs, e.observer())
	if err != nil {
		return err
	}
	var rows [][]string
	if p := res.PackedInfo; p != nil {
		rows = p.Rows()
	}
	if m := res.Mega; m != nil {
		rows = append(rows, m.PartsRows()...)
	}
	e.ui.Facts(rows)
	return e.ui.Event("result", res)
}
