package sched

import (
	"context"
	"errors"

	"helios/internal/errs"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Prepare samples and lays out on disk the mini-batches that Train begins with under cfg, whose
// mode lays them out, and trains nothing. What is there already stays; what was cut off is gone on
// with. When ctx ends the error has class errs.Interrupted, and the next call goes on.
func Prepare(ctx context.Context, cfg plan.Config, in prepare.Inputs,
	obs report.Observer) (res *report.PrepareResult, err error) {
	if cfg, err = cfg.Filled(); err != nil {
		return nil, err
	}
	if !cfg.LaidOut() {
		return nil, errs.New(errs.Usage,
			"%v %s samples while it trains, so there is nothing to prepare; use one of %v",
			errs.Key("mode"), cfg.Mode, plan.PackedModes())
	}
	if cfg, err = cfg.OnDevice(in.Dev.Info()); err != nil {
		return nil, err
	}
	e, err := newEngine(ctx, cfg, in, obs, modelConfig(fingerprintOf(cfg, in)))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	info := e.info()
	return &report.PrepareResult{Event: "result", Mode: cfg.Mode,
		Dataset: in.Dataset.Meta.Name, Seed: cfg.Seed, Device: e.Device.Info().Name,
		PackedInfo: *info.Packed}, nil
}
