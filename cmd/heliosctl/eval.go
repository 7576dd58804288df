package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched"
	"helios/sched/plan"
	"helios/sched/report"
)

// inferArgs holds the options of verbs that use a checkpoint: the model is the checkpoint's, the
// data path is chosen as for train.
type inferArgs struct {
	runArgs
	checkpoint string
	parameters string
	split      string
}

// settle leaves the settings as they are: the defaults are the checkpoint's.
func (a *inferArgs) settle() {}

func inferOptions() hcli.Options[inferArgs] {
	run := func(a *inferArgs) *runArgs { return &a.runArgs }
	return slices.Concat(
		hcli.In(run, withDataset(datasetOptions(datasetUsage))),
		hcli.Options[inferArgs]{
			hcli.Text(&cli.StringFlag{Name: "checkpoint",
				Usage: "checkpoint `DIR` or file that \"heliosctl train --checkpoint\" wrote"},
				func(a *inferArgs) *string { return &a.checkpoint }).Input(),
			hcli.Text(oneOf("parameters",
				"which of the checkpoint's: those of the best epoch in validation, or the last",
				"best", []string{"best", "last"}, nil),
				func(a *inferArgs) *string { return &a.parameters }).Setting(),
		},
		hcli.In(run, slices.Concat(hcli.Options[runArgs]{edgesOption()},
			withConfig(inferConfig()), dataPath())))
}

// inferConfig are the settings of the model that a verb with a checkpoint may choose anew.
func inferConfig() hcli.Options[plan.Config] {
	return namedOptions("fanout", "batch-size", "other-dataset", "sampler").Shown(
		"the checkpoint's", "fanout", "batch-size", "sampler")
}

// splitOption chooses the nodes to classify.
func splitOption(def string, values []string) hcli.Option[inferArgs] {
	return hcli.Text(oneOf("split", "nodes to classify", def, values, nil),
		func(a *inferArgs) *string { return &a.split }).Setting()
}

func evalCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "eval",
		Usage:     "measure a checkpoint's accuracy on a split",
		ArgsUsage: "[DATASET]",
	}, 1, slices.Concat(inferOptions(),
		hcli.Options[inferArgs]{splitOption("test", dataset.Splits)},
		hcli.In(func(a *inferArgs) *runArgs { return &a.runArgs }, withOutputs(outputOptions())),
	), runEval)
}

// check completes the configuration and refuses what cannot be, before anything is opened.
func (a *inferArgs) check() error {
	if a.checkpoint == "" {
		return errs.New(errs.Usage,
			"no --checkpoint DIR; \"heliosctl train --checkpoint DIR\" writes one")
	}
	a.cfg.LastParameters = a.parameters == "last"
	return a.cfg.Check()
}

// orOtherDataset adds the way out to the refusal of another dataset's checkpoint.
func orOtherDataset(err error) error {
	if other := (*sched.OtherDataset)(nil); errors.As(err, &other) {
		return fmt.Errorf(
			"%w; give the dataset it was trained on, or --other-dataset where that is meant", err)
	}
	return err
}

func runEval(ctx context.Context, e *env, a *inferArgs) (err error) {
	if err := e.oneProcess(); err != nil {
		return err
	}
	if err := a.check(); err != nil {
		return err
	}
	out, err := a.openResults(e)
	if err != nil {
		return err
	}
	defer out.end(&err)
	s, err := openSession(ctx, e, &a.runArgs)
	if err != nil {
		return err
	}
	defer closing(&err, s.close)
	r, err := sched.Evaluate(ctx, a.cfg, s.Inputs, a.checkpoint, a.split, e.observer())
	err = orOtherDataset(err)
	var io *report.IOResult
	if r != nil {
		io = &r.IO
	}
	s.ended(out, io, err)
	if err != nil {
		return err
	}
	rows := r.RowsGPU + r.RowsCPU + r.RowsSSD
	table := [][]string{
		{"checkpoint", fmt.Sprintf("%s, parameters of epoch %d", r.Checkpoint, r.Epoch)},
		{"accuracy", fmt.Sprintf("%.2f%% of %d %s nodes; loss %.4f", 100*r.Accuracy, r.Nodes,
			r.Split, r.Loss)},
		{"rows", fmt.Sprintf("GPU tier %s, CPU tier %s, SSD %s of %s", share(r.RowsGPU, rows),
			share(r.RowsCPU, rows), share(r.RowsSSD, rows), units.FormatCount(float64(rows))) +
			fmt.Sprintf(", of %s as %s", units.FormatBytes(r.RowBytes), r.RowDType)},
		{"time", fmt.Sprintf("%.2f s", r.Seconds)},
		{"device", fmt.Sprintf("%s; I/O stack %s, memory rung %s", r.Device, r.IOStack,
			r.MemoryRung)},
	}
	table = append(append(table, runInfoRows(r.RunInfo)...),
		[]string{"parameters", "sha256 " + r.ParamsSHA256})
	e.ui.Facts(append(table, ioRows(r.IO)...))
	showSSDs(e, r.IO)
	out.event("result", r)
	return nil
}
