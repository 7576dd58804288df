package ginex

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/superbatch"
	"helios/internal/hardware"
	"helios/internal/options"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/planner"
	"helios/sched/report"
)

// filled are foreseen tiers whose slots all hold a row, whether or not anybody accesses it.
type filled struct {
	*prediction
	t testing.TB
}

func (f filled) Open(ctx context.Context, n int) error {
	err := f.prediction.Open(ctx, n)
	require.NoError(f.t, err)
	require.Zero(f.t, f.Job.Sizes.GPURows)
	whole := f.Job.Accesses.Hottest(f.Job.Sizes.CPURows, nil)
	held := f.Job.Work.Own.(*superbatch.State)
	require.Equal(f.t, whole.Reuse, held.Reuse)
	require.NotEqual(f.t, whole.Rows, held.Rows)
	f.Job.Work.Own = whole
	return nil
}

// Slots whose rows nobody accesses may as well be empty: a plan's figures are the same.
func TestEmptySlotsOfSuperbatches(t *testing.T) {
	profile, err := hardware.Load("a100-p5510x12")
	require.NoError(t, err)
	skew, err := planner.ParsePopularity("10%:60%")
	require.NoError(t, err)
	modes := plan.Catalog{Modes: []*plan.Mode{&Ginex}, Systems: []*plan.System{&System}}
	plan.Use(&modes)
	options.Define("modes", modes.Names)
	for _, share := range []float64{2, 10, 40, 100} {
		o := planner.Options{
			Config: plan.Config{Mode: ModeGinex, Fanouts: []int{5, 5}, Batch: 32,
				CPUCache: units.Budget{Percent: share}},
			Hardware: cost.Hardware{Profile: profile, SSDs: 2},
			Graph: planner.Graph{Name: "s", Nodes: 100_000, Edges: 1_500_000, Dim: 128,
				Classes: 8, Train: 0.05},
			Popularity: skew, Batches: 40,
		}
		var plans []*planner.Plan
		full := Predict
		full.New = func(j *planner.Job) planner.Tiers {
			return filled{Predict.New(j).(*prediction), t}
		}
		for _, s := range []*planner.System{&Predict, &full} {
			o.Find = func(*plan.Config) *planner.System { return s }
			p, err := planner.New(o, report.Observer{})
			require.NoError(t, err)
			x, err := p.Plan(context.Background(), nil)
			require.NoError(t, err)
			plans = append(plans, x)
			require.NoError(t, p.Close())
		}
		require.Equal(t, plans[1], plans[0], "%v%%", share)
	}
}
