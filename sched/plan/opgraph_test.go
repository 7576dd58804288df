package plan_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/graph"
	"helios/sched/plan"
	"helios/sched/tiers/dynamic"
	ginexspec "helios/sched/tiers/ginex/spec"
)

// The graph of every pipeline: acyclic, each operator once, training last; what the pipeline is for
// is in its edges.
func TestOpGraph(t *testing.T) {
	for _, pipeline := range plan.PipelineNames(nil) {
		for _, stack := range plan.Stacks {
			for hops := 1; hops <= 4; hops++ {
				c := plan.Config{Pipeline: pipeline, IOStack: stack,
					Fanouts: slices.Repeat([]int{3},
						hops), Batch: 10}.WithDefaults()
				if c.Check() != nil {
					continue
				}
				g := c.Operators(true)
				name := fmt.Sprintf("%s %s %d", pipeline, stack, hops)
				seen := map[string]bool{}
				for _, o := range g.Ops {
					require.False(t, seen[o.Name], name)
					for _, a := range o.After {
						require.True(t, seen[a], "%s: %s after %s", name, o.Name, a)
					}
					seen[o.Name] = true
					require.Contains(t, g.Streams, g.Stream(o.Stream), name)
				}
				require.Equal(t, "T", g.Ops[len(g.Ops)-1].Name)
				parts := 1
				if g.PerHop {
					parts = hops + 1
				}
				require.Len(t, g.Ops, hops+4*parts+1, name)
				require.Len(t, c.Operators(false).Ops, hops+2*parts+1, name)
				if g.Serial {
					for i, o := range g.Ops[1:] {
						require.Equal(t, []string{g.Ops[i].Name}, o.After, name)
					}
					continue
				}
				// Gathering does not wait for reads, nor sampling for lookups.
				last := fmt.Sprint(hops)
				require.Equal(t, []string{"L" + last}, g.Op("G"+last).After, name)
				if hops > 1 {
					require.Equal(t, []string{"S" + fmt.Sprint(hops-1)}, g.Op("S"+last).After, name)
				}
				require.Equal(t, c.Schedule().Credits, g.Credits)
				require.Equal(t, int64(40), g.Op("S1").Rows)
				require.Equal(t, hops, g.Op("S1").Layer)
				require.Equal(t, 1, g.Op("S"+last).Layer)
			}
		}
	}
	c := plan.Config{Policy: "lru", Batch: 10, Fanouts: []int{5, -1}}.WithDefaults()
	require.Equal(t, []string{"C2"}, c.Operators(true).Op("G2").After,
		"a dynamic tier moves data in the order of its decisions")
	require.Zero(t, c.Operators(true).Op("T").Rows)
	require.Empty(t, c.Operators(true).Op("L0").After)
	require.Contains(t, c.Operators(true).Bounds()[0], "from its gather")
	const together = "its hops are looked up and read together"
	require.NotContains(t, fmt.Sprint(c.Operators(true).Bounds()), together)
	rows := plan.Config{}.WithDefaults()
	require.Contains(t, fmt.Sprint(rows.Operators(true).Bounds()), together)
	require.NotContains(t, fmt.Sprint(rows.Operators(false).Bounds()), together)
	rows.CoalesceBytes = -1
	require.NotContains(t, fmt.Sprint(rows.Operators(true).Bounds()), together)
	c.Window = 2
	require.Equal(t, []string{"S2"}, c.Operators(true).Op("L0").After,
		"a window looks a batch up when all of it is sampled")
	require.Equal(t, []string{"S2"}, c.Operators(true).Op("L1").After)
	c = plan.Config{Mode: dynamic.ModeGIDS}.WithDefaults()
	require.Contains(t, c.Operators(true).Bounds()[1],
		"at most 41 are sampled ahead of training, 32 of them")
	require.Contains(t, plan.Config{}.WithDefaults().Operators(true).Bounds()[0], "from its first lookup")
	c = plan.Config{Sampler: graph.Ladies, Batch: 10, Fanouts: []int{7,
		8}}.WithDefaults()
	require.Equal(t, int64(25), c.Operators(true).Op("T").Rows)
	c.Sampler = graph.Labor
	require.Zero(t, c.Operators(true).Op("T").Rows, "no bound but the graph")

	c = plan.Config{Pipeline: plan.PipelineSeries, SMs: plan.SMBudget{Sample: 1,
		Train: 2}}.WithDefaults()
	for _, s := range c.Operators(true).Streams {
		require.Zero(t, s.SMs, "alone, an operator has every SM")
	}
	c.Pipeline = plan.DefaultPipeline
	require.Equal(t, 1, c.Operators(true).StreamOptions(plan.OpSample).SMs)
	require.Equal(t, 2, c.Operators(true).StreamOptions(plan.OpTrain).SMs)
}

// Over tiers that know a superbatch its mini-batches are sampled beside the walk, which brings them
// back; rows are found where the changes say.
func TestOpGraphOfSuperbatches(t *testing.T) {
	for _, pipeline := range plan.PipelineNames(nil) {
		c := plan.Config{
			SuperbatchSettings: ginexspec.SuperbatchSettings{SuperbatchOverlap: true},
			Pipeline:           pipeline,
			Fanouts:            []int{3, 2},
			Batch:              10,
			Policy:             plan.PolicyBelady,
		}.WithDefaults()
		if c.Check() != nil {
			continue
		}
		g := c.Operators(true)
		seen := map[string]bool{}
		var beside []string
		for _, o := range g.Ops {
			for _, a := range o.After {
				require.True(t, seen[a], "%s: %s after %s", pipeline, o.Name, a)
			}
			require.False(t, seen[o.Name], "%s: %s twice", pipeline, o.Name)
			seen[o.Name] = true
			require.Contains(t, g.Streams, g.Stream(o.Stream), pipeline)
			if o.Beside {
				beside = append(beside, o.Name)
			}
		}
		require.Equal(t, []string{"S1", "S2", "A", "X"}, beside, pipeline)
		require.Equal(t, []string{"S2"}, g.Op("R").After, pipeline)
		require.Contains(t, g.Op("L2").After, "X", pipeline)
		require.Contains(t, g.Op("G2").After, "C2", pipeline)
		require.True(t, g.Stream(g.Op("X").Stream).OnCPU)
		require.NotContains(t, g.Streams, g.Stream("S1"))
		all := fmt.Sprint(g.Bounds())
		require.Contains(t, all, "X finds its changes ahead of the mini-batches")
		require.Contains(t, all, "A of the next superbatch are done while one trains")
		require.Equal(t, g.PerHop, g.Op("L0") != nil, pipeline)
	}
}
