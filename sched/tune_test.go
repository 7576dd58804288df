package sched

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/dynamic"
	dynamicspec "helios/sched/tiers/dynamic/spec"
	"helios/sched/tuner"
)

// tuned is a run with many small batches.
func tuned(level string, f func(*plan.Config)) plan.Config {
	c := small()
	c.Batch, c.Tune, c.Epochs, c.NoEval, c.Presample = 2, level, 2, true, 1
	if wide.Lean() {
		c.Batch, c.Epochs = 10, 1
	}
	if f != nil {
		f(&c)
	}
	return c
}

// Whatever the tuner tries and chooses, the run is the same to the bit, and it reports its trials.
func TestTune(t *testing.T) {
	least, batches := tuner.Least, tuner.Batches
	tuner.Least = 0
	if wide.Lean() {
		tuner.Batches = 1
	}
	defer func() { tuner.Least, tuner.Batches = least, batches }()
	d, feat := tiny.open(t)
	set := bind(t, d, 2, "")
	plain := train(t, context.Background(), tuned(plan.TuneOff, nil), d, feat, set, 2,
		report.Observer{})
	require.NoError(t, plain.err)
	require.Nil(t, plain.res.Tuned)
	for _, c := range []struct {
		name  string
		cfg   plan.Config
		knobs []string
	}{
		{"quick", tuned(plan.TuneQuick, nil), []string{"prefetch-depth", "sm-budget"}},
		{"full", tuned(plan.TuneFull, nil), []string{"prefetch-depth", "sm-budget", "io-blocks"}},
		{"full over windows and merged reads", tuned(plan.TuneFull, func(c *plan.Config) {
			c.Mode, c.GPUCache, c.CPUCache = dynamic.ModeGIDS, percent(10), percent(10)
		}), []string{"accumulate"}},
		{"full over a dynamic tier",
			tuned(plan.TuneFull, dyn(policy.LRU, dynamicspec.LineRow,
				func(c *plan.Config) { c.Window = 2 })), []string{"prefetch-depth", "sm-budget",
				"io-blocks"}},
		{"full over superbatches",
			tuned(plan.TuneFull, func(c *plan.Config) {
				c.Policy, c.GPUCache, c.CPUCache = plan.PolicyBelady, percent(5), percent(10)
				c.Hotness, c.HotnessDir, c.Presample = "", "", 0
				c.Superbatch, c.SuperbatchOverlap = 20, true
			}), []string{"prefetch-depth", "sm-budget", "io-blocks"}},
		{"nothing to choose",
			tuned(plan.TuneFull, func(c *plan.Config) { c.Pipeline = plan.PipelineSeries }), nil},
	} {
		if wide.Lean() && (c.name == "full" || c.name == "quick") {
			continue
		}
		var plans []*plan.OpGraph
		var notes []string
		r := train(t, context.Background(), c.cfg, d, feat, set, 4, report.Observer{
			Plan: func(g *plan.OpGraph) { plans = append(plans, g) },
			Note: func(s errs.Text) { notes = append(notes, s.String()) },
		})
		require.NoError(t, r.err, c.name)
		require.Equal(t, plain.res.ParamsSHA256, r.res.ParamsSHA256, c.name)
		require.Equal(t, plain.blocks, r.blocks, c.name)
		for e := range r.res.Epochs {
			require.Equal(t, plain.res.Epochs[e].Loss, r.res.Epochs[e].Loss, c.name)
			require.Equal(t, plain.res.Epochs[e].Batches, r.res.Epochs[e].Batches, c.name)
			if c.name == "quick" || c.name == "full" { // hops are read as one set as often
				require.Equal(t, plain.res.Epochs[e].SSDCommands, r.res.Epochs[e].SSDCommands,
					c.name)
			}
		}
		u := r.res.Tuned
		require.NotNil(t, u, c.name)
		if a := r.res.Accumulator; a != nil && a.IOPS == 0 {
			// a busy machine read the longer set no later than the shorter: there is no target to
			// choose
			continue
		}
		require.Equal(t, c.cfg.Tune, u.Level)
		require.Len(t, plans, 2, "before and after tuning")
		var knobs []string
		chosen := map[string]int{}
		for _, x := range u.Trials {
			if !slices.Contains(knobs, x.Setting) {
				knobs = append(knobs, x.Setting)
			}
			require.Positive(t, x.Seconds, "%s: %+v", c.name, x)
			op, _, _ := strings.Cut(x.Value, "=") // each operator's budget is a setting
			if x.Setting != "sm-budget" {
				op = ""
			}
			if x.Chosen {
				chosen[x.Setting+op]++
			}
		}
		require.Equal(t, c.knobs, knobs, c.name)
		for k, n := range chosen {
			require.Equal(t, 1, n, "%s: %s", c.name, k)
		}
		if c.knobs == nil {
			require.Contains(t, u.Skipped, "nothing to choose")
			continue
		}
		require.Empty(t, u.Skipped, c.name)
		require.Less(t, u.Batches, r.res.Epochs[0].Batches)
		require.Contains(t, strings.Join(notes, "\n"), "tune option "+c.knobs[0])
		t.Logf("%s: %d of %d batches in %.3f s: %q", c.name, u.Batches, r.res.Epochs[0].Batches,
			u.Seconds, u.Flags)
	}

	// Few batches: what cannot be measured is left out, and that is said.
	few := tuned(plan.TuneFull, func(c *plan.Config) { c.Batch = 128 })
	r := train(t, context.Background(), few, d, feat, set, 4, report.Observer{})
	require.NoError(t, r.err)
	require.Contains(t, r.res.Tuned.Skipped, "too few to measure")
	require.Empty(t, r.res.Tuned.Trials)
	require.Empty(t, r.res.Tuned.Flags)
}

// Work after a batch, such as a checkpoint, is no part of a segment's time: it would decide
// by where it falls.
func TestTuneWithoutCheckpoints(t *testing.T) {
	least, batches := tuner.Least, tuner.Batches
	tuner.Least, tuner.Batches = 0, 1
	defer func() { tuner.Least, tuner.Batches = least, batches }()
	d, feat := tiny.open(t)
	cfg := tuned(plan.TuneQuick, func(c *plan.Config) { c.Batch, c.Epochs = 60, 1 })
	const long = 1500 * time.Millisecond
	r := train(t, context.Background(), cfg, d, feat, bind(t, d, 2, ""), 2,
		report.Observer{Step: func(stage string, done, _ int) {
			// of the first value beside the present one, which is measured once
			if stage == "epoch 1" && done == 4 {
				time.Sleep(long)
			}
		}})
	require.NoError(t, r.err)
	require.NotEmpty(t, r.res.Tuned.Trials)
	for _, x := range r.res.Tuned.Trials {
		require.Less(t, x.Seconds, long.Seconds(), "%+v", x)
	}
}
