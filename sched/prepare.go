package sched

import (
	"context"
	"errors"

	"helios/internal/errs"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
)

// Prepare lays out on disk the data that Train begins with under cfg: the mini-batches of a mode
// that samples them beforehand, or the parts of one that trains mega-batches. It trains nothing.
// Files that are there stay, and those that were cut off are resumed. When ctx ends the error has
// class errs.Interrupted, and the next call resumes.
func Prepare(ctx context.Context, cfg plan.Config, in prepare.Inputs,
	obs report.Observer) (res *report.PrepareResult, err error) {
	if cfg, err = cfg.Filled(); err != nil {
		return nil, err
	}
	if !tiers.Of(&cfg).Run.Prepares {
		return nil, errs.New(errs.Usage,
			"%v %s reads the features as they are, so there is nothing to prepare; use one of %v",
			errs.Key("mode"), cfg.Mode, tiers.Preparing())
	}
	if cfg, err = cfg.OnDevice(in.Dev.Info()); err != nil {
		return nil, err
	}
	if cfg, err = cfg.ForTarget(prepare.TargetOf(in.Dataset)); err != nil {
		return nil, err
	}
	print, err := fingerprintOf(cfg, in, obs)
	if err != nil {
		return nil, err
	}
	e, err := newRunner(ctx, cfg, in, obs, print.modelConfig())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	info := e.info()
	return &report.PrepareResult{Mode: cfg.Mode,
		Dataset: in.Dataset.Meta.Name, Seed: cfg.Seed, Device: e.Device.Info().Name,
		PackedInfo: info.Packed, Mega: info.Mega}, nil
}
