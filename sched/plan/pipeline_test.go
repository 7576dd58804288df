package plan_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/sched/plan"
)

// Every pipeline's schedule is what its traits say, under the defaults of the first mode.
func TestPipelines(t *testing.T) {
	names := plan.PipelineNames(nil)
	require.Equal(t, plan.DefaultPipeline, names[0])
	for i, p := range plan.Pipelines() {
		require.Equal(t, names[i], p.Name)
		require.NotEmpty(t, p.Summary, p.Name)
		require.False(t, p.WholeDevice && !p.Serial(), "%s: who has the device, runs alone", p.Name)
		c := plan.Config{Pipeline: p.Name, Depth: 3,
			Tune: plan.TuneQuick}.WithDefaults()
		require.Same(t, p, c.Overlap())
		s := c.Schedule()
		require.Equal(t, []bool{p.PerHop, !p.PerHop && !p.Ahead}, []bool{s.PerHop, s.Serial},
			p.Name)
		if p.Ahead {
			require.Equal(t, 4, s.Credits, p.Name)
			require.NotEmpty(t, c.TuneDepths(), p.Name)
		} else {
			require.Equal(t, 1, s.Credits, p.Name)
			require.Empty(t, c.TuneDepths(), p.Name)
		}
		require.Equal(t, s.Credits, s.Samples, p.Name)
	}
	// a name that Check refuses does not crash what asks before
	c := plan.Config{Pipeline: "turbo"}.WithDefaults()
	require.Equal(t, plan.DefaultPipeline, c.Overlap().Name)
	require.ErrorContains(t, c.Check(), "turbo")
}
