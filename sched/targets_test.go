package sched

import (
	"context"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/importer"
	"helios/gnn"
	"helios/internal/errs"
	"helios/internal/metrics"
	"helios/internal/testing/datasettest"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// withTargets imports a graph of 600 nodes of 20 features whose labels or numbers follow them. Some
// targets are unknown, and node 0 has none at all.
func withTargets(t *testing.T, target metrics.Target) *dataset.Dataset {
	r := rand.New(rand.NewPCG(3, 5))
	const nodes, dim, columns = 600, 20, 3
	features, src, dst := []float32{}, []int64{}, []int64{}
	var labels []uint8
	var numbers []float32
	for v := range int64(nodes) {
		row := make([]float32, dim)
		for i := range row {
			row[i] = float32(r.NormFloat64())
		}
		features = append(features, row...)
		for c := range columns {
			x := row[c] + 0.1*float32(r.NormFloat64())
			label, number := uint8(0), 1000*float32(c+1)+50*x
			if x > 0 {
				label = 1
			}
			if v == 0 || r.IntN(10) == 0 {
				label, number = metrics.UnknownLabel, float32(math.NaN())
			}
			labels, numbers = append(labels, label), append(numbers, number)
		}
		for range 4 {
			src, dst = append(src, r.Int64N(nodes)), append(dst, v)
		}
	}
	y, dt := any(labels), "|u1"
	if target == metrics.Numbers {
		y, dt = numbers, "<f4"
	}
	dir := datasettest.WriteDir(t, map[string]datasettest.Arr{
		"features": {DT: "<f4", Shape: []int64{nodes, dim}, Data: features},
		"src":      {DT: "<i8", Shape: []int64{4 * nodes}, Data: src},
		"dst":      {DT: "<i8", Shape: []int64{4 * nodes}, Data: dst},
		"labels":   {DT: dt, Shape: []int64{nodes, columns}, Data: y},
	})
	o := importer.NPYOptions{}
	o.In, o.Out, o.Target, o.UnlabelledOK, o.Seed = dir, filepath.Join(t.TempDir(), "d"),
		string(target), true, 1
	require.NoError(t, importer.NPY(context.Background(), o))
	return datasettest.Open(t, o.Out)
}

// rowsOf are the dataset's rows as its source has them.
func rowsOf(t *testing.T, d *dataset.Dataset) []byte {
	b := make([]byte, d.Meta.Nodes*int64(d.Meta.RowBytes()))
	require.NoError(t, d.ReadRows(0, b))
	return b
}

// A loss has one hash in every mode, with any number of replicas and ranks, and when it is stopped
// and resumed; a checkpoint keeps its target, and the evaluation of it is the run's.
func TestLossEveryWay(t *testing.T) {
	for _, c := range []struct {
		target metrics.Target
		loss   gnn.LossSettings
		weight string
	}{
		{metrics.Labels, gnn.LossSettings{LabelSmoothing: 0.1}, plan.Balanced},
		{metrics.Numbers, gnn.LossSettings{}, ""},
		{metrics.Numbers, gnn.LossSettings{Loss: "mae"}, ""},
		{metrics.Numbers, gnn.LossSettings{Loss: "huber"}, ""},
	} {
		t.Run(string(c.target)+" "+c.loss.Loss, func(t *testing.T) {
			d := withTargets(t, c.target)
			feat, s := rowsOf(t, d), bind(t, d, 2, "")
			cfg := small()
			cfg.LossSettings, cfg.PosWeight, cfg.Shards, cfg.Batch = c.loss, c.weight, 2, 50
			cfg.Epochs, cfg.LR = 3, 0.02
			run := func(change func(*plan.Config)) record {
				x := cfg
				change(&x)
				r := train(t, context.Background(), x, d, feat, s, 2, report.Observer{})
				require.NoError(t, r.err)
				return r
			}
			dir := t.TempDir()
			want := run(func(x *plan.Config) { x.CheckpointDir = dir }).res
			require.Equal(t, c.target.Default(), want.Metric)
			require.Equal(t, c.target == metrics.Numbers, want.TestAcc == nil)
			first, last := want.Epochs[0], want.Epochs[2]
			require.Less(t, last.Loss, first.Loss)
			require.NotNil(t, last.ValMetrics)
			for _, mode := range []string{"inmem", "cpu", "gids"} {
				require.Equal(t, want.ParamsSHA256, run(func(x *plan.Config) {
					x.Mode = mode
				}).res.ParamsSHA256, mode)
			}
			two := cfg
			two.Replicas = 2
			r := trainSeveral(t, context.Background(), two, d, s, report.Observer{})
			require.NoError(t, r.err)
			sameResults(t, want, r.res)
			res, failed := trainRanks(t, context.Background(), d, cfg, cfg)
			for i, err := range failed {
				require.NoError(t, err)
				sameResults(t, want, res[i])
			}
			stopAndResume(t, cfg, want, func(ctx context.Context, x plan.Config,
				o report.Observer) record {
				return train(t, ctx, x, d, feat, s, 1, o)
			})
			ev, err := Evaluate(context.Background(), plan.Config{}, prepare.Inputs{
				Dev: hostDevice(t), Dataset: d, SSDs: s.ssds}, dir, "test", report.Observer{})
			require.NoError(t, err)
			require.Equal(t, want.TestMetrics, ev.Metrics)
			require.Equal(t, c.target == metrics.Numbers, ev.Accuracy == nil)
			other := cfg
			other.LossSettings, other.PosWeight = gnn.LossSettings{}, ""
			other.CheckpointDir, other.Resume, other.Epochs = dir, true, 4
			if c.loss != other.LossSettings {
				err := train(t, context.Background(), other, d, feat, s, 1, report.Observer{}).err
				require.ErrorContains(t, err, "was made with")
			}
		})
	}
}

// Epochs without validation are no better than those with it, also where a lower figure is better.
func TestValidationBeginsLater(t *testing.T) {
	d := withTargets(t, metrics.Numbers)
	feat, s, cfg := rowsOf(t, d), bind(t, d, 1, ""), small()
	cfg.LR, cfg.CheckpointDir = 0.02, t.TempDir()
	for _, epochs := range []int{1, 4} {
		cfg.Epochs, cfg.NoEval, cfg.Resume = epochs, epochs == 1, epochs > 1
		r := train(t, context.Background(), cfg, d, feat, s, 1, report.Observer{})
		require.NoError(t, r.err)
		require.Equal(t, epochs, r.res.BestEpoch)
	}
}

// hostDevice is a host device until the test ends.
func hostDevice(t *testing.T) cuda.Device {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	return dev
}

func sameResults(t *testing.T, want, got *report.Result) {
	t.Helper()
	require.Equal(t, want.ParamsSHA256, got.ParamsSHA256)
	require.Equal(t, want.TestMetrics, got.TestMetrics)
	for i := range want.Epochs {
		require.Equal(t, want.Epochs[i].Loss, got.Epochs[i].Loss)
		require.Equal(t, want.Epochs[i].TrainAcc, got.Epochs[i].TrainAcc)
		require.Equal(t, want.Epochs[i].ValMetrics, got.Epochs[i].ValMetrics)
	}
}

// stopAndResume stops a run inside its second epoch, and has it go on.
func stopAndResume(t *testing.T, cfg plan.Config, want *report.Result,
	train func(context.Context, plan.Config, report.Observer) record) {
	cfg.CheckpointDir = t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r := train(ctx, cfg, report.Observer{Step: func(stage string, done, _ int) {
		if stage == "epoch 2" && done == 3 {
			cancel()
		}
	}})
	require.Equal(t, errs.Interrupted, errs.ClassOf(r.err))
	cfg.Resume = true
	r = train(context.Background(), cfg, report.Observer{})
	require.NoError(t, r.err)
	sameResults(t, want, r.res)
}

// Predicted numbers are in the unit of the targets, which their standardisation does not change.
func TestNumbersAreInTheirUnit(t *testing.T) {
	d := withTargets(t, metrics.Numbers)
	s := bind(t, d, 1, "")
	cfg := small()
	cfg.Epochs, cfg.LR, cfg.CheckpointDir = 8, 0.02, t.TempDir()
	r := train(t, context.Background(), cfg, d, rowsOf(t, d), s, 1, report.Observer{})
	require.NoError(t, r.err)
	require.Less(t, *r.res.TestMetrics.RMSE, 50.0, "better than the mean")
	require.Positive(t, *r.res.TestMetrics.R2)
	targets, err := prepare.ReadTargets(d)
	require.NoError(t, err)
	test, err := d.Split("test")
	require.NoError(t, err)
	judge := targets.Judge(test, false)
	next := 0
	_, err = Predict(context.Background(), plan.Config{}, prepare.Inputs{Dev: hostDevice(t),
		Dataset: d, SSDs: s.ssds}, cfg.CheckpointDir, test, report.Outputs{},
		func(p report.Prediction) error {
			require.Nil(t, p.Classes)
			for i := range p.Nodes {
				judge.Set(next, p.Logits[i*3:(i+1)*3])
				next++
			}
			return nil
		}, report.Observer{})
	require.NoError(t, err)
	require.InDelta(t, *r.res.TestMetrics.RMSE, *judge.Report().RMSE, 0.2*50,
		"with draws of its own")
	require.InDelta(t, 1000, float64(judge.(*metrics.NumberScores).Outputs[0]), 300)
}

// Balanced weights are scikit-learn's: nodes by classes that are there, and by their nodes; a class
// without training nodes weighs 1 and is named.
func TestBalancedWeights(t *testing.T) {
	d, _ := tiny.open(t)
	cfg, err := plan.Config{ClassWeights: plan.Balanced}.WithDefaults().ForTarget(metrics.Classes)
	require.NoError(t, err)
	var notes []string
	tell := func(format string, args ...any) {
		notes = append(notes, errs.Textf(format, args...).String())
	}
	fit, err := prepare.FitOf(cfg, d, tell)
	require.NoError(t, err)
	labels, err := d.Labels()
	require.NoError(t, err)
	train, err := d.Split("train")
	require.NoError(t, err)
	counts := make([]float64, 5)
	for _, v := range train {
		counts[labels[v]]++
	}
	for c, n := range counts {
		require.InDelta(t, float64(len(train))/(5*n), fit.Weights[c], 1e-6)
	}
	require.Empty(t, notes)

	file := filepath.Join(t.TempDir(), "w.txt")
	for text, want := range map[string]string{"1, 2\n3 4 0.5\n": "", "1 2 3": "has 3 weights; give 5",
		"1 2 3 4 -5": "a weight is a number from 0 on", "1 2 x 4 5": `"x" is no weight`} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		cfg.ClassWeights = file
		fit, err := prepare.FitOf(cfg, d, tell)
		if want != "" {
			require.ErrorContains(t, err, want)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, []float32{1, 2, 3, 4, 0.5}, fit.Weights)
	}
}

// Settings that a target has no use for are refused before anything is read.
func TestForTarget(t *testing.T) {
	for want, c := range map[string]struct {
		target metrics.Target
		cfg    plan.Config
	}{
		"pos-weight 2 is not for classes": {metrics.Classes, plan.Config{PosWeight: "2"}},
		"class-weights balanced is not for labels": {metrics.Labels,
			plan.Config{ClassWeights: plan.Balanced}},
		"label-smoothing 0.1 is not for numbers": {metrics.Numbers,
			plan.Config{LossSettings: gnn.LossSettings{LabelSmoothing: 0.1}}},
		"metric rmse is not for classes": {metrics.Classes,
			plan.Config{SelectionSettings: plan.SelectionSettings{Metric: "rmse"}}},
		"loss mse does not learn classes": {metrics.Classes,
			plan.Config{LossSettings: gnn.LossSettings{Loss: "mse"}}},
	} {
		_, err := c.cfg.WithDefaults().ForTarget(c.target)
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	c, err := plan.Config{LossSettings: gnn.LossSettings{Loss: "softmax"}}.WithDefaults().ForTarget(
		metrics.Classes)
	require.NoError(t, err)
	require.Empty(t, c.Loss, "the target's own is no setting")
	require.Equal(t, "accuracy", c.Metric)
}

// A checkpoint whose targets are impossible is refused.
func TestImpossibleFit(t *testing.T) {
	nan := math.NaN()
	require.Empty(t, prepare.Fit{}.Contradiction(3))
	require.Empty(t, prepare.Fit{Target: metrics.Numbers,
		Scale: []prepare.Scale{{Mean: 1, Deviation: 2}}}.Contradiction(1))
	for _, f := range []prepare.Fit{
		{Target: "edges"}, {Target: metrics.Numbers}, {Weights: []float32{1}},
		{Weights: []float32{1, 1, -1}}, {Weights: []float32{1, 1, float32(nan)}},
		{Target: metrics.Labels, Scale: slices.Repeat([]prepare.Scale{{Deviation: 1}}, 3)},
		{Target: metrics.Numbers, Scale: []prepare.Scale{{Deviation: 1}, {Deviation: 1}, {}}},
		{Target: metrics.Numbers, Scale: []prepare.Scale{{Deviation: 1}, {Deviation: 1}, {Mean: nan,
			Deviation: 1}}},
	} {
		require.NotEmpty(t, f.Contradiction(3), "%+v", f)
	}
}
