package plan_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/sched/plan"
)

func TestSampleEpoch(t *testing.T) {
	for _, c := range []struct {
		name                  string
		samples, fresh, every int
		want                  []int
	}{
		{"each its own", 0, 0, 0, []int{0, 1, 2, 3, 4}},
		{"one for ever", 1, 0, 0, []int{0, 0, 0, 0}},
		{"in turns", 3, 0, 0, []int{0, 1, 2, 0, 1, 2, 0}},
		{"more than epochs", 9, 0, 0, []int{0, 1, 2, 3, 4}},
		{"half of them after a round", 4, 2, 4, []int{0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 8}},
		{"the default: after a round", 2, 1, 0, []int{0, 1, 2, 1, 2, 3, 4, 3}},
		{"one within a round", 4, 1, 2, []int{0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8, 9, 10, 7}},
		{"all after each", 2, 2, 1, []int{0, 3, 4, 7, 8}},
		{"all after a round", 2, 2, 2, []int{0, 1, 2, 3, 4, 5}},
		{"seldom", 2, 1, 3, []int{0, 1, 0, 1, 2, 1, 2, 3, 2, 3, 4}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg, err := plan.Config{
				EpochSettings: plan.EpochSettings{SampleEpochs: c.samples, Refresh: c.fresh,
					RefreshEvery: c.every},
				Epochs: len(c.want),
			}.Filled()
			require.NoError(t, err)
			require.Equal(t, c.want, cfg.SampledAs(1000))
			same := true
			for e, s := range c.want {
				first, end := cfg.LiveEpochs(e)
				require.Equal(t, max(c.samples, 1), end-first)
				require.True(t, first <= s && s < end, "epoch %d trains on %d of %d to %d", e, s,
					first, end)
				if c.samples > 0 {
					require.Equal(t, e%c.samples, s%c.samples, "slot")
				}
				same = same && s == e
			}
			require.Equal(t, !same, cfg.Resamples(len(c.want)))
			require.False(t, cfg.Resamples(1))
		})
	}
}

func TestSampleEpochRefusals(t *testing.T) {
	for want, c := range map[string]plan.Config{
		"option sample-epochs -1 is not between":   {EpochSettings: plan.EpochSettings{SampleEpochs: -1}},
		"option refresh -1 is below 1":             {EpochSettings: plan.EpochSettings{SampleEpochs: 2, Refresh: -1}},
		"option refresh-every -1 is below 1":       {EpochSettings: plan.EpochSettings{SampleEpochs: 2, Refresh: 1, RefreshEvery: -1}},
		"say with option refresh how many":         {EpochSettings: plan.EpochSettings{SampleEpochs: 2, RefreshEvery: 1}},
		"without option sample-epochs every epoch": {EpochSettings: plan.EpochSettings{Refresh: 2}},
		"option refresh 3: there are 2":            {EpochSettings: plan.EpochSettings{SampleEpochs: 2, Refresh: 3}},
		"give a larger option refresh-every": {EpochSettings: plan.EpochSettings{SampleEpochs: 9, Refresh: 9, RefreshEvery: 8},
			Epochs: plan.MaxEpochs},
		"option sample-epochs 1048577 is not betwe": {EpochSettings: plan.EpochSettings{SampleEpochs: plan.MaxEpochs + 1}},
	} {
		err := c.Check()
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err), want)
	}
	require.NoError(t,
		plan.Config{EpochSettings: plan.EpochSettings{SampleEpochs: plan.MaxEpochs},
			Epochs: plan.MaxEpochs}.Check())
}
