package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched"
	"helios/sched/report"
)

// inferArgs holds the options of verbs that use a checkpoint: the model is the checkpoint's, the
// data path is chosen as for train.
type inferArgs struct {
	runArgs
	checkpoint string `option:"checkpoint" there:"checkpoint" common:"yes" use:"input" arg:"DIR" usage:"checkpoint DIR or file that \"heliosctl train --checkpoint\" wrote"`
	parameters string `option:"parameters" common:"yes" use:"setting" oneof:"best,last" default:"best" usage:"which of the checkpoint's: those of the best epoch in validation, or the last"`
}

// evalArgs holds the options of eval.
type evalArgs struct {
	inferArgs
	split string `option:"split" common:"yes" use:"setting" oneof:"@splits" default:"test" usage:"nodes to classify"`
}

// settle leaves the settings as they are: the defaults are the checkpoint's.
func (a *inferArgs) settle() {}

// inferOptions are those of verbs with a checkpoint: of the model's settings, those that a verb may
// choose anew.
func inferOptions[T any]() hcli.Options[T] {
	return hcli.Of[T]().WithoutGroups("Replicas", "Run").WithoutFrom("Model", "fanout",
		"batch-size", "sampler", "other-dataset", "no-edges").
		Shown("the checkpoint's", "fanout", "batch-size", "sampler")
}

func evalCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "eval",
		Usage:     "judge a checkpoint on a split: accuracy, F1, ROC AUC and others",
		ArgsUsage: "[DATASET]",
	}, 1, inferOptions[evalArgs](), runEval)
}

// check completes the configuration and refuses what cannot be, before anything is opened.
func (a *inferArgs) check() error {
	if a.checkpoint == "" {
		return errs.New(errs.Usage,
			"no {checkpoint} DIR; \"heliosctl train --checkpoint DIR\" writes one")
	}
	a.cfg.LastParameters = a.parameters == "last"
	a.orAuto()
	return sched.Check(a.cfg)
}

// orOtherDataset adds the way out to the refusal of another dataset's checkpoint.
func orOtherDataset(err error) error {
	if other := (*sched.OtherDataset)(nil); errors.As(err, &other) {
		return errs.Errorf(
			"%w; give the dataset it was trained on, or {other-dataset} where that is meant", err)
	}
	return err
}

func runEval(ctx context.Context, e *env, a *evalArgs) (err error) {
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
		judged(r),
		{"rows", fmt.Sprintf("GPU tier %s, CPU tier %s, SSD %s of %s", share(r.RowsGPU, rows),
			share(r.RowsCPU, rows), share(r.RowsSSD, rows), units.FormatCount(float64(rows))) +
			fmt.Sprintf(", of %s as %s", units.FormatBytes(r.RowBytes), r.RowDType)},
		{"time", fmt.Sprintf("%.2f s", r.Seconds)},
		{"device", fmt.Sprintf("%s; I/O stack %s, memory rung %s", r.Device, r.IOStack,
			r.MemoryRung)},
	}
	table = append(table, metricRows(r.Metrics, s.Dataset.Meta.ClassNames)...)
	table = append(append(table, runInfoRows(r.RunInfo)...),
		[]string{"parameters", "sha256 " + r.ParamsSHA256})
	e.ui.Facts(append(table, ioRows(r.IO)...))
	showSSDs(e, r.IO)
	out.event("result", r)
	return nil
}

// judged is the line of the loss and, where nodes are right or wrong, of the accuracy.
func judged(r *report.EvalResult) []string {
	of := fmt.Sprintf("%d %s nodes; loss %.4f", r.Nodes, r.Split, r.Loss)
	if r.Accuracy == nil {
		return []string{"nodes", of}
	}
	return []string{"accuracy", fmt.Sprintf("%.2f%% of %s", 100**r.Accuracy, of)}
}
