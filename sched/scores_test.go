package sched

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/metrics"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// judged is a run that chooses its best epoch by a metric and does not end before patience.
func judged(metric string, patience int) plan.Config {
	c := small()
	c.Epochs, c.Metric, c.Patience, c.LR = 12, metric, patience, 0.05
	return c
}

// The best epoch is that with the best figure, and patience ends training so many epochs behind it.
func TestMetricChoosesAndPatienceEnds(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	for _, m := range metrics.All {
		r := train(t, context.Background(), judged(m.Name, 2), d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err, m.Name)
		best, last := 0, len(r.res.Epochs)
		for i := range r.res.Epochs {
			x, y := r.res.Epochs[i].Score(m), r.res.Epochs[best].Score(m)
			require.NotNil(t, x, m.Name)
			if m.Better(*x, *y, 0) {
				best = i
			}
		}
		require.Equal(t, best+1, r.res.BestEpoch, m.Name)
		require.True(t, last == 12 || last == best+1+2, "%s: best epoch %d of %d", m.Name, best+1, last)
		require.Equal(t, m.Name, r.res.Metric)
		require.Equal(t, *r.res.TestAcc, r.res.TestMetrics.Accuracy, m.Name)
	}
}

// A margin that nothing exceeds has the first epoch count, and all others wait.
func TestMinDelta(t *testing.T) {
	d, feat := tiny.open(t)
	cfg := judged("f1-macro", 3)
	cfg.MinDelta = 2
	r := train(t, context.Background(), cfg, d, feat, bind(t, d, 1, ""), 2, report.Observer{})
	require.NoError(t, r.err)
	require.Len(t, r.res.Epochs, 4)
}

// Stopped while patience runs, and resumed, a run ends where an undisturbed one does, and with its
// parameters.
func TestResumeInsidePatience(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	cfg := judged("log-loss", 3)
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	epochs := len(want.res.Epochs)
	require.Less(t, epochs, 12, "patience ends the run")
	for stop := epochs - 3; stop <= epochs; stop++ {
		c := cfg
		c.CheckpointDir, c.Epochs = t.TempDir(), stop
		require.NoError(t, train(t, context.Background(), c, d, feat, s, 1, report.Observer{}).err)
		c.Epochs, c.Resume = cfg.Epochs, true
		r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, "stopped behind epoch %d", stop)
		require.Equal(t, want.res.TestMetrics, r.res.TestMetrics)
		require.Len(t, r.res.Epochs, epochs)
		c.Metric = "accuracy"
		err := train(t, context.Background(), c, d, feat, s, 2, report.Observer{}).err
		require.ErrorContains(t, err, "was made with metric log-loss, this run has accuracy")
	}
}

// Ranks share an evaluation, and all have all its figures.
func TestScoresOfRanks(t *testing.T) {
	d, feat := tiny.open(t)
	cfg := judged("roc-auc", 0)
	cfg.Mode, cfg.Shards, cfg.Epochs, cfg.Batch = static.ModeInmem, 3, 2, 50
	one := train(t, context.Background(), cfg, d, feat, bind(t, d, 1, ""), 1, report.Observer{})
	require.NoError(t, one.err)
	res, failed := trainRanks(t, context.Background(), d, cfg, cfg, cfg)
	for r, err := range failed {
		require.NoError(t, err, "rank %d", r)
		require.Equal(t, one.res.TestMetrics, res[r].TestMetrics, "rank %d", r)
		for i := range res[r].Epochs {
			require.Equal(t, one.res.Epochs[i].ValMetrics, res[r].Epochs[i].ValMetrics)
		}
	}
}

// A run without validation has no metric to choose by, and no patience.
func TestSelectionRefuses(t *testing.T) {
	for want, c := range map[string]plan.Config{
		"patience 2 looks at validation": {NoEval: true, SelectionSettings: plan.SelectionSettings{
			Patience: 2}},
		"metric roc-auc is of validation": {NoEval: true, SelectionSettings: plan.SelectionSettings{
			Metric: "roc-auc"}},
		"min-delta needs": {SelectionSettings: plan.SelectionSettings{MinDelta: 0.5}},
		"metric":          {SelectionSettings: plan.SelectionSettings{Metric: "auc"}},
	} {
		err := c.Check()
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
}
