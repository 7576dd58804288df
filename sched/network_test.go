package sched

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/sched/checkpoint"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers"
)

// between puts all that there is between the layers of a model.
func between(c *plan.Config) {
	c.Activation, c.Norm, c.Residual, c.Optimizer, c.WeightDecay = "gelu", "batch", true,
		"adamw", 0.01
}

// A model with an activation, a norm and residual connections has the same parameters in every
// mode, trained straight through or stopped and resumed, running means and variances included; its
// checkpoints say so, and those of other models are as before.
func TestNetworkOptions(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	want := ""
	for _, m := range tiers.Modes {
		mode := m.Name
		cfg := small()
		cfg.Mode = mode
		wholeGraph(&cfg)
		between(&cfg)
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err, mode)
		if want == "" {
			want = r.res.ParamsSHA256
			plain := small()
			r := train(t, context.Background(), plain, d, feat, s, 1, report.Observer{})
			require.NotEqual(t, want, r.res.ParamsSHA256)
		}
		require.Equal(t, want, r.res.ParamsSHA256, mode)
	}
	for _, plain := range []bool{false, true} {
		cfg := small()
		format := "3"
		if !plain {
			between(&cfg)
			format = "4"
		}
		cfg.CheckpointDir = t.TempDir()
		ctx, cancel := context.WithCancel(context.Background())
		r := train(t, ctx, cfg, d, feat, s, 2,
			report.Observer{Step: func(stage string, done, _ int) {
				if stage == "epoch 2" && done == 3 {
					cancel()
				}
			}})
		cancel()
		require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
		f, err := checkpoint.Load(filepath.Join(cfg.CheckpointDir, checkpointName))
		require.NoError(t, err)
		require.Equal(t, format, f.Metadata["helios.format"])
		cfg.Resume = true
		other := cfg
		other.Activation = "elu"
		require.ErrorContains(t, train(t, context.Background(), other, d, feat, s, 2,
			report.Observer{}).err, "activation")
		r = train(t, context.Background(), cfg, d, feat, s, 1, report.Observer{})
		require.NoError(t, r.err)
		if !plain {
			require.Equal(t, want, r.res.ParamsSHA256)
		}
	}
	for field, set := range map[string]func(*plan.Config){
		"activation":           func(c *plan.Config) { c.Activation = "tanh" },
		"norm":                 func(c *plan.Config) { c.Norm = "graph" },
		"optimizer":            func(c *plan.Config) { c.Optimizer = "sgd" },
		"options of model gat": func(c *plan.Config) { c.OutHeads = 1 },
	} {
		cfg := small()
		set(&cfg)
		r := train(t, context.Background(), cfg, d, feat, s, 1, report.Observer{})
		require.Equal(t, errs.Usage, errs.ClassOf(r.err))
		require.ErrorContains(t, r.err, field)
	}
}
