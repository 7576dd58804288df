package hier

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/tiers/hier/spec"
)

// A run whose parts chance dealt goes on so, unless a mixed deal is asked for.
func TestResumeKeepsTheOrderOfParts(t *testing.T) {
	was := &engine.PartPrint{Parts: 8, Loaded: 2, Order: spec.PartsDispersed}
	c := plan.Config{Mode: ModeHier}
	c.PartOrder = kindOf(&c).orders[0]
	require.Equal(t, spec.PartsMixed, c.PartOrder)
	require.NoError(t, Resume(&c, "x", was))
	require.Equal(t, spec.PartsDispersed, c.PartOrder)
	c.PartOrder, c.OrderGiven = spec.PartsMixed, true
	require.ErrorContains(t, Resume(&c, "x", was), "part-order")
	c = plan.Config{Mode: ModeMarius}
	c.PartOrder = kindOf(&c).orders[0]
	was.Order = spec.PartsSequential
	require.ErrorContains(t, Resume(&c, "x", was), "part-order")
}
