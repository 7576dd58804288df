package planner_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/build"
	"helios/graph"
	"helios/sched/plan"
	"helios/sched/planner"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// By the counts of a generated graph's types and relations alone, a plan has the nodes of the first
// hop, and the edges of both that sampling it for a run counts. Not so those of the second hop that
// depend on the few most popular nodes: the generator's are more popular than 1/(rank + 1)^0.6.
func TestTypedCounts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(context.Background(), build.GenerateOptions{Kind: "typed",
		Nodes: 200_000, AvgDegree: 4, Classes: 2, Dim: 16, Seed: 3, TrainFraction: 0.2,
		Homophily: 0.5, TestFraction: -1, Memory: 64 << 20, Out: dir}))
	ds, err := dataset.Open(dir)
	require.NoError(t, err)
	defer func() { require.NoError(t, ds.Close()) }()
	dev, err := cuda.NewHost(cuda.HostOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	o := small(t, static.ModeHelios)
	o.Config.Model, o.Config.Fanouts, o.Config.Batch = "rsage", []int{-1, -1}, 64
	o.Batches = 60
	of := o
	of.Popularity, of.Inputs = nil, prepare.Inputs{Dataset: ds, Dev: dev}
	of.Graph = planner.Graph{Name: "g", Nodes: ds.Meta.Nodes, Edges: ds.Meta.Edges, Dim: 16,
		Classes: 2, Train: 0.2}
	counted := find(t, of, nil)

	o.Graph, o.Popularity = of.Graph, skew(t, "zipf:0.6")
	for _, x := range ds.Meta.NodeTypes {
		o.Graph.Types = append(o.Graph.Types, planner.NodeType{Name: x.Name, Nodes: x.Nodes})
	}
	for _, r := range ds.Meta.Relations {
		o.Graph.Relations = append(o.Graph.Relations, planner.Relation{Src: r.Src, Name: r.Name,
			Dst: r.Dst, Edges: r.Edges, Reverse: strings.HasPrefix(r.Name, "rev_")})
	}
	planned := find(t, o, nil)
	require.Len(t, planned.Types, 4)
	for i, x := range counted.Types {
		y := planned.Types[i]
		require.Equal(t, []any{x.Name, x.Nodes, x.Rows, x.Offsets, x.IDs},
			[]any{y.Name, y.Nodes, y.Rows, y.Offsets, y.IDs})
		within(t, x.Name, x.NodesByHop[:2], y.NodesByHop[:2])
	}
	for i, x := range counted.Relations {
		require.Equal(t, x.Name, planned.Relations[i].Name)
		if hops := x.EdgesByHop; strings.Contains(x.Name, "rev_") {
			within(t, x.Name, hops[:1], planned.Relations[i].EdgesByHop)
			continue
		}
		within(t, x.Name, x.EdgesByHop, planned.Relations[i].EdgesByHop)
	}
	require.Positive(t, planned.Seconds)
	for _, o := range []planner.Options{of, o} {
		for text, set := range map[string]func(*plan.Config){
			"sampler labor reads whole lists": func(c *plan.Config) { c.Sampler = graph.Labor },
			"relation-fanout together: a plan": func(c *plan.Config) {
				c.RelationFanouts = prepare.Together
			},
		} {
			set(&o.Config)
			p, err := planner.New(known(o), report.Observer{})
			require.NoError(t, err)
			_, err = p.Plan(context.Background(), nil)
			require.ErrorContains(t, err, text)
			require.NoError(t, p.Close())
			o.Config.Sampler, o.Config.RelationFanouts = "", ""
		}
	}
}

// within compares figures by hop.
func within(t *testing.T, what string, want, got []float64) {
	t.Helper()
	for h := range want {
		require.InDelta(t, want[h], got[h], 0.05*want[h]+1, "%s, hop %d", what, h)
	}
}
