package sched

import (
	"context"
	"math"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/sched/checkpoint"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/static"
)

// Steps of several mini-batches come to the same parameters in every mode, pipeline and number of
// workers, whose last step is shorter.
func TestShardsEveryWay(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	for _, norm := range []string{"none", "batch"} {
		var first record
		for i, m := range tiers.Modes {
			cfg := small()
			cfg.Mode, cfg.Norm, cfg.Shards = m.Name, norm, 3
			wholeGraph(&cfg)
			r := train(t, context.Background(), cfg, d, feat, s, 1+i%3, report.Observer{})
			require.NoError(t, r.err, m.Name)
			require.Equal(t, 3, r.res.Shards)
			if i == 0 {
				first = r
				require.NotZero(t, r.res.Epochs[0].Batches%3, "the last step is shorter")
				cfg.Shards = 1
				one := train(t, context.Background(), cfg, d, feat, s, 1, report.Observer{})
				require.NoError(t, one.err)
				require.Equal(t, one.blocks, r.blocks, "the same samples")
				require.NotEqual(t, one.res.ParamsSHA256, r.res.ParamsSHA256)
				continue
			}
			require.Equal(t, first.res.ParamsSHA256, r.res.ParamsSHA256, m.Name)
			for e := range first.res.Epochs {
				require.Equal(t, first.res.Epochs[e].Loss, r.res.Epochs[e].Loss, m.Name)
				require.Equal(t, first.res.Epochs[e].ValAcc, r.res.Epochs[e].ValAcc, m.Name)
			}
			if wide.Lean() && norm != "none" && i > 1 {
				break
			}
		}
	}
}

// With every neighbour and no dropout, V mini-batches of a step are one of V times their size, as
// closely as float32 sums are: also in the last step, which has a part of a mini-batch.
func TestShardsAreOneLargeBatch(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	run := func(batch, shards int) *report.Result {
		cfg := small()
		cfg.Mode, cfg.Fanouts, cfg.Dropout, cfg.Epochs = static.ModeInmem, []int{-1, -1}, 0, 4
		cfg.Batch, cfg.Shards = batch, shards
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		return r.res
	}
	whole := run(120, 1)
	for _, c := range [][2]int{{40, 3}, {24, 5}} {
		parts := run(c[0], c[1])
		for e := range whole.Epochs {
			require.Greater(t, parts.Epochs[e].Batches, whole.Epochs[e].Batches)
			require.InDelta(t, whole.Epochs[e].Loss, parts.Epochs[e].Loss, 1e-4)
		}
	}
	other := run(40, 1)
	require.Greater(t, math.Abs(other.Epochs[3].Loss-whole.Epochs[3].Loss), 1e-3,
		"more steps are other steps")
}

// Stopped at any mini-batch, resumed under another mode and with another interval of checkpoints,
// the run is the one that was never stopped. Every checkpoint is of the end of a step.
func TestShardsResume(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	cfg.Shards, cfg.Norm, cfg.Batch, cfg.CoalesceBytes = 4, "batch", 50, -1
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	batches := want.res.Epochs[0].Batches
	require.Greater(t, batches, 8)

	rng := rand.New(rand.NewPCG(11, 12))
	c := cfg
	c.CheckpointDir, c.Resume = t.TempDir(), true
	for stops := 0; ; stops++ {
		c.CheckpointEvery = rng.IntN(6)
		c.Pipeline = anyPipeline(rng, plan.PipelineRunAhead)
		ctx, cancel := context.WithCancel(context.Background())
		left := 1 + rng.IntN(11)
		obs := report.Observer{Step: func(stage string, _, _ int) {
			if left--; left == 0 && stops < 5 {
				cancel()
			}
		}}
		r := train(t, ctx, c, d, feat, s, 1+rng.IntN(2), obs)
		cancel()
		f, err := checkpoint.Load(filepath.Join(c.CheckpointDir, checkpointName))
		require.NoError(t, err)
		require.Equal(t, "5", f.Metadata["helios.format"])
		st, err := decodeState("checkpoint", f)
		require.NoError(t, err)
		require.Empty(t, st.misplaced(int(d.Meta.Train)))
		if r.err == nil {
			require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
			for i := range want.res.Epochs {
				require.Equal(t, counts(want.res.Epochs[i]), counts(r.res.Epochs[i]))
			}
			require.EqualValues(t, 2*((batches+3)/4), st.AdamStep)
			require.Greater(t, stops, 2)
			break
		}
		require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
	}
	c.Shards = 2
	r := train(t, context.Background(), c, d, feat, s, 1, report.Observer{})
	require.Equal(t, errs.Usage, errs.ClassOf(r.err))
	require.ErrorContains(t, r.err, "shards 4, this run has 2")
}

// A checkpoint after every N mini-batches is written at the end of the step that has the Nth.
func TestShardsCheckpointEvery(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	for every, want := range map[int][]int{1: {4, 8}, 3: {4, 8}, 5: {8}, 4: {4, 8}, 9: nil} {
		cfg := small()
		cfg.Shards, cfg.Epochs, cfg.NoEval, cfg.Batch = 4, 1, true, 80
		cfg.CheckpointDir, cfg.CheckpointEvery = t.TempDir(), every
		var at []int
		path := filepath.Join(cfg.CheckpointDir, checkpointName)
		was := ""
		obs := report.Observer{Step: func(stage string, done, total int) {
			require.LessOrEqual(t, total, 12)
			if f, err := checkpoint.Load(path); err == nil && stage == "epoch 1" {
				if now := f.Metadata["helios.position"]; now != was {
					st, err := decodeState(path, f)
					require.NoError(t, err)
					at, was = append(at, st.Batch), now
				}
			}
		}}
		require.NoError(t, train(t, context.Background(), cfg, d, feat, s, 1, obs).err)
		require.Equal(t, want, at, "every %d", every)
	}
}

func TestShardsDiverge(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	cfg := small()
	cfg.Shards, cfg.LR, cfg.Epochs = 2, 1e30, 3
	r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.ErrorContains(t, r.err, "smaller option lr")
	cfg.Shards = 1 << 20
	r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.Equal(t, errs.Usage, errs.ClassOf(r.err))
	require.ErrorContains(t, r.err, "option shards 1048576 is not between 1 and")
}

// The tuner's segments, which end anywhere in a step, change nothing.
func TestShardsAreTuned(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	cfg := small()
	cfg.Shards, cfg.Batch = 3, 10
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	cfg.Tune = plan.TuneQuick
	got := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, got.err)
	require.NotNil(t, got.res.Tuned)
	require.Positive(t, got.res.Tuned.Batches)
	require.Equal(t, want.res.ParamsSHA256, got.res.ParamsSHA256)
}

// A shard weighs what it has of the labelled seeds; where no seed is labelled, all weigh the same.
func TestShardWeights(t *testing.T) {
	require.Equal(t, []float32{0.5, 0.125, 0.375}, sharesOf([]float64{4, 1, 3}))
	require.Equal(t, []float32{1, 0}, sharesOf([]float64{7, 0}))
	require.Equal(t, []float32{0.25, 0.25, 0.25, 0.25}, sharesOf(make([]float64, 4)))
}
