package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/timeline"
	"helios/internal/units"
	"helios/sched"
)

// inferFlags are those of verbs that use a checkpoint: the model is the checkpoint's, the data
// path is chosen as for train.
func inferFlags() []cli.Flag {
	return append([]cli.Flag{
		datasetFlag,
		&cli.StringFlag{Name: "checkpoint", Usage: "checkpoint `DIR` or file that \"heliosctl train --checkpoint\" wrote"},
		&cli.StringFlag{Name: "fanout", DefaultText: "the checkpoint's", Usage: "neighbours sampled per hop `F1,F2,…`; -1 takes all"},
		&cli.IntFlag{Name: "batch-size", DefaultText: "the checkpoint's", Usage: "seed nodes in a mini-batch"},
		&cli.BoolFlag{Name: "no-edges", Usage: "drop the graph's edges"},
		oneOf("parameters", "which of the checkpoint's: those of the best epoch in validation, or the last", "best", []string{"best", "last"}, nil),
		&cli.BoolFlag{Name: "other-dataset", Usage: "use a checkpoint of another dataset, whose training nodes may be test nodes of this one"},
		samplerFlag("the checkpoint's"),
	}, pathFlags()...)
}

func evalCommand() *cli.Command {
	return &cli.Command{
		Name:      "eval",
		Usage:     "measure a checkpoint's accuracy on a split",
		ArgsUsage: "[DATASET]",
		Flags:     append(inferFlags(), oneOf("split", "nodes to classify", "test", dataset.Splits, nil), resultsFlag(), overwriteFlag()),
		Action:    action(1, runEval),
	}
}

// inferConfig reads the flags of eval and predict.
func (e *env) inferConfig() (cfg sched.Config, checkpoint string, err error) {
	if checkpoint = e.c.String("checkpoint"); checkpoint == "" {
		return cfg, "", errs.New(errs.Usage, "no --checkpoint DIR; \"heliosctl train --checkpoint DIR\" writes one")
	}
	if cfg, err = e.dataPath(); err != nil {
		return cfg, "", err
	}
	if e.c.IsSet("fanout") {
		if cfg.Fanouts, err = units.ParseInts(e.c.String("fanout"), -1); err != nil {
			return cfg, "", errs.New(errs.Usage, "--fanout: %w", err)
		}
	}
	if err := e.notZero("batch-size"); err != nil {
		return cfg, "", err
	}
	cfg.Batch = e.c.Int("batch-size")
	cfg.LastParameters, cfg.OtherDataset = e.c.String("parameters") == "last", e.c.Bool("other-dataset")
	return cfg, checkpoint, nil
}

// orOtherDataset adds the way out to the refusal of another dataset's checkpoint.
func orOtherDataset(err error) error {
	if other := (*sched.OtherDataset)(nil); errors.As(err, &other) {
		return fmt.Errorf("%w; give the dataset it was trained on, or --other-dataset where that is meant", err)
	}
	return err
}

func runEval(ctx context.Context, e *env) (err error) {
	cfg, checkpoint, err := e.inferConfig()
	if err != nil {
		return err
	}
	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer out.end(&err)
	tl, err := e.openTimeline(timeline.Wall)
	if err != nil {
		return err
	}
	defer closing(&err, tl.close)
	cfg.Timeline = tl.rec
	in, set, done, err := e.inputs(ctx)
	if err != nil {
		return err
	}
	defer closing(&err, done)
	r, err := sched.Evaluate(ctx, cfg, in, checkpoint, e.c.String("split"), e.observer())
	err = orOtherDataset(err)
	e.showFaults(set, out)
	if r != nil {
		set.markModelled(&r.IO, cfg)
	}
	if err != nil {
		if r != nil {
			e.showTrouble(r.IO, out)
		}
		return err
	}
	rows := r.RowsGPU + r.RowsCPU + r.RowsSSD
	table := [][]string{
		{"checkpoint", fmt.Sprintf("%s, parameters of epoch %d", r.Checkpoint, r.Epoch)},
		{"accuracy", fmt.Sprintf("%.2f%% of %d %s nodes; loss %.4f", 100*r.Accuracy, r.Nodes, r.Split, r.Loss)},
		{"rows", fmt.Sprintf("GPU tier %s, CPU tier %s, SSD %s of %s", share(r.RowsGPU, rows), share(r.RowsCPU, rows), share(r.RowsSSD, rows), units.FormatCount(float64(rows))) + fmt.Sprintf(", of %s as %s", units.FormatBytes(r.RowBytes), r.RowDType)},
		{"time", fmt.Sprintf("%.2f s", r.Seconds)},
		{"device", fmt.Sprintf("%s; I/O stack %s, memory rung %s", r.Device, r.IOStack, r.MemoryRung)},
	}
	table = append(append(table, runInfoRows(r.RunInfo)...), []string{"parameters", "sha256 " + r.ParamsSHA256})
	e.ui.Table([]string{"", ""}, append(table, ioRows(r.IO)...))
	e.showSSDs(r.IO)
	out.object(r)
	return nil
}
