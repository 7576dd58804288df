package sched

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/metrics"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// scheduled is a run whose steps differ in length in all ways at once.
func scheduled(schedule string) plan.Config {
	c := small()
	c.Epochs, c.LRSchedule, c.Warmup, c.ClipNorm, c.LR = 4, schedule, 5, 0.8, 0.05
	return c
}

var schedules = []string{"step:2,0.3", "cosine", "linear", "plateau:1,0.5"}

// Stopped within its warm-up, within an epoch behind it and between epochs, a run goes on to the
// parameters and the figures of one that was never stopped.
func TestResumeInsideSchedule(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	for _, schedule := range schedules {
		cfg := scheduled(schedule)
		want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, want.err, schedule)
		require.Greater(t, want.res.Epochs[0].Batches, 2, "the warm-up ends in a later epoch")
		c := cfg
		c.CheckpointDir, c.Resume = t.TempDir(), true
		for _, stop := range []string{"epoch 1 2", "epoch 2 2", "validate 1", "epoch 4 1"} {
			ctx, cancel := context.WithCancel(context.Background())
			r := train(t, ctx, c, d, feat, s, 1, report.Observer{
				Step: func(stage string, done, _ int) {
					if fmt.Sprint(stage, " ", done) == stop {
						cancel()
					}
				}})
			cancel()
			require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%s: %v", stop, r.err)
		}
		r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, schedule)
		for i, e := range want.res.Epochs {
			got := r.res.Epochs[i]
			require.Equal(t, e.LR, got.LR, "%s, epoch %d", schedule, i+1)
			require.Equal(t, e.GradNorm, got.GradNorm, "%s, epoch %d", schedule, i+1)
			require.Equal(t, e.Clipped, got.Clipped, "%s, epoch %d", schedule, i+1)
			require.Positive(t, *e.GradNorm)
			require.GreaterOrEqual(t, e.GradNormMax, *e.GradNorm)
		}
		require.Positive(t, r.res.Epochs[0].Clipped, "the limit is met")
	}
}

// A schedule that ends with the run is another one with other epochs; other settings are named.
func TestScheduleIsOfTheRun(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	for _, schedule := range []string{"cosine", "step:1,0.5"} {
		cfg := scheduled(schedule)
		cfg.Epochs, cfg.CheckpointDir = 1, t.TempDir()
		require.NoError(t, train(t, context.Background(), cfg, d, feat, s, 2,
			report.Observer{}).err)
		cfg.Resume = true
		for want, set := range map[string]func(*plan.Config){
			"lr-schedule " + schedule: func(c *plan.Config) { c.LRSchedule = "linear" },
			"warmup 5":                func(c *plan.Config) { c.Warmup = 6 },
			"clip-norm 0.8":           func(c *plan.Config) { c.ClipNorm = 0 },
		} {
			c := cfg
			set(&c)
			r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
			require.Equal(t, errs.Usage, errs.ClassOf(r.err))
			require.ErrorContains(t, r.err, want)
		}
		cfg.Epochs = 2
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		if schedule == "cosine" {
			require.ErrorContains(t, r.err, "was made with epochs 1, this run has 2")
		} else {
			require.NoError(t, r.err)
		}
	}
}

// The rate falls behind as many epochs without a better figure as the schedule says, and again
// behind as many more: what PyTorch 2.2.1's ReduceLROnPlateau does with these figures, a patience
// of one less and no threshold.
func TestPlateaus(t *testing.T) {
	c := small()
	c.LRSchedule = "plateau:2,0.5"
	tr := &trainer{cfg: c, metric: metrics.Find("")}
	scores := []float64{.5, .6, .6, .55, .7, .69, .7, .65, .6, .71}
	rates := []float64{1, 1, 1, 1, .5, .5, .5, .25, .25, .125, .125}
	for i := range rates {
		want, factor := rates[i], 1.0
		for range tr.plateaus() {
			factor /= 2
		}
		require.Equal(t, want, factor, "epoch %d", i+1)
		if i < len(scores) {
			tr.state.Epochs = append(tr.state.Epochs, report.EpochResult{ValAcc: &scores[i]})
		}
	}
}

// One result over workers, shards' replicas and ranks, with the same norms.
func TestScheduleEveryWay(t *testing.T) {
	d, feat := tiny.open(t)
	cfg := scheduled("cosine")
	cfg.Mode, cfg.Shards, cfg.Epochs, cfg.Batch, cfg.Warmup = static.ModeInmem, 3, 2, 50, 3
	s := bind(t, d, 1, "")
	one := train(t, context.Background(), cfg, d, feat, s, 1, report.Observer{})
	require.NoError(t, one.err)
	same := func(name string, r *report.Result) {
		require.Equal(t, one.res.ParamsSHA256, r.ParamsSHA256, name)
		for i, e := range one.res.Epochs {
			require.Equal(t, e.GradNorm, r.Epochs[i].GradNorm, name)
			require.Equal(t, e.Clipped, r.Epochs[i].Clipped, name)
			require.Equal(t, e.LR, r.Epochs[i].LR, name)
		}
	}
	replicas := cfg
	replicas.Replicas = 2
	r := trainSeveral(t, context.Background(), replicas, d, s, report.Observer{})
	require.NoError(t, r.err)
	same("replicas", r.res)
	res, failed := trainRanks(t, context.Background(), d, cfg, cfg)
	for rank, err := range failed {
		require.NoError(t, err, "rank %d", rank)
		same(fmt.Sprint("rank ", rank), res[rank])
	}
	plain := cfg
	plain.ClipNorm = 0
	p := train(t, context.Background(), plain, d, feat, s, 1, report.Observer{})
	require.NoError(t, p.err)
	require.NotEqual(t, one.res.ParamsSHA256, p.res.ParamsSHA256, "clipping is at work")
	plain.ClipNorm = 1e6
	far := train(t, context.Background(), plain, d, feat, s, 2, report.Observer{})
	require.Equal(t, p.res.ParamsSHA256, far.res.ParamsSHA256, "a limit that is not met does nothing")
}

func TestScheduleRefuses(t *testing.T) {
	for want, set := range map[string]func(*plan.Config){
		"looks at validation": func(c *plan.Config) { c.LRSchedule, c.NoEval = "plateau:1,0.5", true },
		"measures them":       func(c *plan.Config) { c.LRSchedule, c.Mode, c.Passes = "linear", "hier", -1 },
		"lr-schedule":         func(c *plan.Config) { c.LRSchedule = "cosin" },
		"warmup":              func(c *plan.Config) { c.Warmup = -1 },
		"clip-norm":           func(c *plan.Config) { c.ClipNorm = -1 },
	} {
		c := small()
		set(&c)
		err := c.Check()
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
		require.True(t, strings.Contains(err.Error(), want), "%v", err)
	}
}
