package sched

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/internal/wide"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
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

// Whatever the tuner tries and chooses, the run is the same to the bit, and it tells what it did.
func TestTune(t *testing.T) {
	least, batches := tuneLeast, tuneBatches
	tuneLeast = 0
	if wide.Lean() {
		tuneBatches = 1
	}
	defer func() { tuneLeast, tuneBatches = least, batches }()
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
			c.Mode, c.GPUCache, c.CPUCache = plan.ModeGIDS, percent(10), percent(10)
		}), []string{"accumulate"}},
		{"full over a dynamic tier",
			tuned(plan.TuneFull, dyn(policy.LRU, plan.LineRow,
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
			Note: func(s string) { notes = append(notes, s) },
		})
		require.NoError(t, r.err, c.name)
		require.Equal(t, plain.res.ParamsSHA256, r.res.ParamsSHA256, c.name)
		require.Equal(t, plain.blocks, r.blocks, c.name)
		for e := range r.res.Epochs {
			require.Equal(t, plain.res.Epochs[e].Loss, r.res.Epochs[e].Loss, c.name)
			require.Equal(t, plain.res.Epochs[e].Batches, r.res.Epochs[e].Batches, c.name)
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
		require.Contains(t, strings.Join(notes, "\n"), "tune --"+c.knobs[0])
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

// What comes after a batch, such as a checkpoint, is no part of a segment's time: it would decide
// by where it falls.
func TestTuneWithoutCheckpoints(t *testing.T) {
	least, batches := tuneLeast, tuneBatches
	tuneLeast, tuneBatches = 0, 1
	defer func() { tuneLeast, tuneBatches = least, batches }()
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

// A value is taken when it is better by more than noise, and only then.
func TestTuneChoice(t *testing.T) {
	for _, c := range []struct {
		times []float64 // of the values; the second is the present one
		noise float64   // of its second time
		want  int
	}{
		{[]float64{2, 1, 0.9}, 0, 2},
		{[]float64{0.98, 1, 0.985}, 0, 1},
		{[]float64{0.5, 1, 0.6}, 0, 0},
		{[]float64{2, 1, 3}, 0, 1},
		{[]float64{2, 1, 0.9}, 0.2, 1}, // its own times differ by more
		{[]float64{2, 1, 0.5}, 0.2, 2},
	} {
		for rounds := 1; rounds <= 2; rounds++ {
			var at int
			var sets []int
			k := tuneKnob{name: "x", values: []string{"a", "b", "c"}, now: 1,
				set: func(_ context.Context, i int) error {
					at = i
					sets = append(sets, i)
					return nil
				}}
			tn := &tuner{e: &engine{Sampling: &prepare.Sampling{}}, res: &report.TuneResult{},
				level: rounds, each: 2}
			measured := map[int]int{}
			tn.train = func(_ context.Context, n int) (float64, error) {
				measured[at]++
				took := c.times[at]
				if at == 1 && measured[1]%2 == 0 {
					took += c.noise
				}
				return took * float64(n), nil
			}
			require.NoError(t, tn.choose(context.Background(), &k))
			require.Equal(t, c.want, k.now, fmt.Sprint(c))
			require.Equal(t, c.want, at, "the engine is left with it")
			require.Equal(t, map[int]int{0: rounds, 1: 2 * rounds, 2: rounds}, measured)
			require.Equal(t, 1, sets[0], "the present value comes first")
		}
	}
}
