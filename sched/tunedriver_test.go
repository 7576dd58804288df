//go:build linux && (amd64 || arm64) && !nocuda

package sched

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/dynamic"
	"helios/sched/tuner"
)

// On a device of the driver too, streams made anew with other budgets and a stack opened anew with
// other blocks leave the run as it was to the bit.
func TestTuneOnGPU(t *testing.T) {
	if wide.Lean() {
		t.Skip("many launches, each of them fibers on the fake")
	}
	least, batches := tuner.Least, tuner.Batches
	tuner.Least, tuner.Batches = 0, 1
	defer func() { tuner.Least, tuner.Batches = least, batches }()
	d, feat, s := fiberRig(t)
	for _, set := range []func(*plan.Config){
		func(*plan.Config) {},
		func(c *plan.Config) { c.Mode, c.Batch, c.GPUCache = dynamic.ModeGIDS, 2, percent(50) },
	} {
		cfg := onFibers()
		cfg.Batch, cfg.Epochs, cfg.NoEval, cfg.GPUCache, cfg.CPUCache, cfg.Presample = 1, 1, true,
			percent(10), percent(10), 1
		set(&cfg)
		dev, _ := gpu(t, "")
		plain := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
		require.NoError(t, plain.err)
		cfg.Tune = plan.TuneFull
		dev, _ = gpu(t, "")
		r := trainOn(t, context.Background(), dev, cfg, d, feat, s,
			report.Observer{Note: func(s errs.Text) { t.Log(s.String()) }})
		require.NoError(t, r.err)
		require.Equal(t, plain.res.ParamsSHA256, r.res.ParamsSHA256)
		require.Equal(t, plain.res.Epochs[0].Loss, r.res.Epochs[0].Loss)
		require.Equal(t, plain.blocks, r.blocks)
		require.Equal(t, plain.seen, r.seen)
		if a := r.res.Accumulator; a != nil && a.IOPS == 0 {
			// calibration of these few reads gave no rate, as it may on a busy machine: nothing to
			// aim at
			continue
		}
		require.Empty(t, r.res.Tuned.Skipped)
		require.NotEmpty(t, r.res.Tuned.Trials)
	}
}
