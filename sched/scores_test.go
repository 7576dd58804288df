package sched

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/metrics"
	"helios/sched/plan"
	"helios/sched/prepare"
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
	for _, name := range metrics.NamesFor(metrics.Classes) {
		m := metrics.Find(name)
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
		require.Equal(t, *r.res.TestAcc, *r.res.TestMetrics.Accuracy, m.Name)
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

// Ranks of which some have no mini-batch of an evaluation have all its figures, too.
func TestScoresOfRanksWithoutABatch(t *testing.T) {
	d, feat := tiny.open(t)
	cfg := judged("roc-auc", 0)
	cfg.Mode, cfg.Shards, cfg.Epochs, cfg.Batch = static.ModeInmem, 4, 2, 200
	one := train(t, context.Background(), cfg, d, feat, bind(t, d, 1, ""), 1, report.Observer{})
	require.NoError(t, one.err)
	require.LessOrEqual(t, one.res.TestMetrics.Nodes, int64(2*cfg.Batch), "two of four ranks have any")
	res, failed := trainRanks(t, context.Background(), d, cfg, cfg, cfg, cfg)
	for r, err := range failed {
		require.NoError(t, err, "rank %d", r)
		require.Equal(t, one.res.TestMetrics, res[r].TestMetrics, "rank %d", r)
		for i := range res[r].Epochs {
			require.Equal(t, one.res.Epochs[i].ValMetrics, res[r].Epochs[i].ValMetrics)
		}
	}
}

// A metric that the validation nodes do not define is refused before any epoch.
func TestUndefinedMetric(t *testing.T) {
	undefined := func(name string, classes int, labels []int32) error {
		nodes := make([]int64, len(labels))
		for i := range nodes {
			nodes[i] = int64(i)
		}
		return undefined(metrics.Find(name), "d", prepare.ClassTargets(classes, labels), nodes)
	}
	for want, err := range map[string]error{
		"not defined on the 0 validation nodes of dataset d": undefined("f1-macro", 3, nil),
		"not defined on the 2 validation nodes of dataset d": undefined("f1-macro", 3,
			[]int32{-1, -1}),
		"they need labels of several classes": undefined("roc-auc", 3, []int32{1, 1, -1}),
		"needs the probabilities of 1000000 validation nodes for 1000 classes, 3.7 GiB of memory, and has 1 GiB": undefined(
			"roc-auc", 1000, append(make([]int32, 1e6-1), 1)),
	} {
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	require.NoError(t, undefined("f1-macro", 1000, make([]int32, 1e6)))
	require.NoError(t, undefined("roc-auc", 2, []int32{1, 0}))
}

// Epochs that skipped validation do not count for patience, and do not end it.
func TestPatienceBehindEpochsWithoutValidation(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	cfg := judged("accuracy", 0)
	cfg.CheckpointDir, cfg.Epochs, cfg.NoEval = t.TempDir(), 2, true
	require.NoError(t, train(t, context.Background(), cfg, d, feat, s, 1, report.Observer{}).err)
	cfg.Epochs, cfg.NoEval, cfg.Resume = 12, false, true
	cfg.Patience, cfg.MinDelta = 2, 2
	r := train(t, context.Background(), cfg, d, feat, s, 1, report.Observer{})
	require.NoError(t, r.err)
	require.Len(t, r.res.Epochs, 2+1+2)
}

// A run that was stopped in an epoch ends it, also where patience has become less since.
func TestPatienceEndsNoEpochInside(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	cfg := judged("accuracy", 0)
	cfg.CheckpointDir, cfg.Epochs = t.TempDir(), 5
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r := train(t, ctx, cfg, d, feat, s, 1, report.Observer{Step: func(stage string, done, n int) {
		if stage == "epoch 4" && done == 2 {
			cancel()
		}
	}})
	require.Equal(t, errs.Interrupted, errs.ClassOf(r.err))
	cfg.Resume, cfg.Patience, cfg.MinDelta = true, 1, 2
	r = train(t, context.Background(), cfg, d, feat, s, 1, report.Observer{})
	require.NoError(t, r.err)
	require.Len(t, r.res.Epochs, 4)
}

// The probabilities of a test take no more than half of the memory that is free; those of epochs
// that are compared, and of ranks, are kept alike.
func TestRoomForProbabilities(t *testing.T) {
	free := func() (int64, error) { return 100, nil }
	e := &runner{}
	require.Equal(t, int64(50), e.roomFor("test", free))
	require.Equal(t, int64(maxProbabilities), e.roomFor(validateStage, free))
	require.Equal(t, int64(maxProbabilities), (&runner{others: &others{}}).roomFor("test", free))
	require.Equal(t, int64(maxProbabilities), e.roomFor("test", func() (int64, error) {
		return 1 << 40, nil
	}))
}

// Another metric than accuracy is a format of its own, as an older program would resume by
// accuracy; patience alone is not.
func TestFormatOfMetric(t *testing.T) {
	for want, set := range map[int]func(*plan.Config){
		plainFormat:  func(c *plan.Config) { c.Patience, c.MinDelta = 3, 0.5 },
		stepsFormat:  func(c *plan.Config) { c.Shards = 2 },
		metricFormat: func(c *plan.Config) { c.Metric, c.Shards = "log-loss", 2 },
		lossFormat:   func(c *plan.Config) { c.Metric, c.Warmup, c.LabelSmoothing = "log-loss", 2, 0.1 },
	} {
		c, err := plan.Config{}.WithDefaults().ForTarget(metrics.Classes)
		require.NoError(t, err)
		f := fingerprint{Config: c}
		set(&f.Config)
		require.Equal(t, want, f.format())
		text, err := f.MarshalJSON()
		require.NoError(t, err)
		require.Equal(t, want >= metricFormat, strings.Contains(string(text), `"metric":"log-loss"`))
		require.NotContains(t, string(text), "patience")
		var back fingerprint
		require.NoError(t, back.UnmarshalJSON(text))
		require.Equal(t, f.Metric, back.Metric)
	}
}
