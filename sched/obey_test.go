package sched

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/hardware"
	"helios/internal/timeline"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/dynamic"
	"helios/sched/virtual"
)

// breaches holds each mini-batch of an epoch against the operator graph, with slack microseconds
// for clocks that are read on both sides of a call: an operator of the graph that a batch lacks,
// one that it has beyond, and one that began before what it waits for had ended. joins: the hops of
// all mini-batches but the first are read as one set.
func breaches(g *plan.OpGraph, spans []drawn, batches int, joins bool,
	slack float64) (out []string) {
	whole := &plan.OpGraph{Ops: joinedOps(g)}
	of := func(batch int) *plan.OpGraph {
		if joins && batch > 0 {
			return whole
		}
		return g
	}
	ops := make([]map[string]drawn, batches)
	for i := range ops {
		ops[i] = map[string]drawn{}
	}
	for _, s := range spans {
		for i := s.batch; s.pass == "epoch 1" && i < s.batch+s.batches; i++ {
			if _, twice := ops[i][s.name]; twice {
				out = append(out, fmt.Sprintf("batch %d has %s twice", i, s.name))
			}
			ops[i][s.name] = s
			if of(i).Op(s.name) == nil {
				out = append(out, fmt.Sprintf("batch %d has %s, which the graph has not", i,
					s.name))
			}
		}
	}
	for i, has := range ops {
		for _, o := range of(i).Ops {
			s, ok := has[o.Name]
			if !ok {
				out = append(out, fmt.Sprintf("batch %d has no %s", i, o.Name))
			}
			for _, a := range o.After {
				if before, both := has[a]; ok && both && before.to > s.from+slack {
					out = append(out, fmt.Sprintf("batch %d: %s began %.3f us before %s ended", i,
						o.Name, before.to-s.from, a))
				}
			}
		}
	}
	return out
}

// joinedOps returns the operators of a mini-batch whose hops are read as one set: the last hop's
// stand for all.
func joinedOps(g *plan.OpGraph) (ops []plan.Operator) {
	last := 0
	for _, o := range g.Ops {
		last = max(last, o.Hop)
	}
	for _, o := range g.Ops {
		switch o.Kind {
		case plan.OpLookup, plan.OpSubmit, plan.OpComplete, plan.OpGather:
			if o.Hop < last {
				continue
			}
		}
		ops = append(ops, o)
	}
	return ops
}

// TestBothClocksObeyTheGraph: a run and a modelled run of each schedule have the operators of the
// graph, no more and no fewer, and each begins after those that the graph has it wait for.
func TestBothClocksObeyTheGraph(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	hw, err := hardware.Load("a100-980pro")
	require.NoError(t, err)
	for _, v := range []variant{
		{name: "series", set: func(c *plan.Config) { c.Pipeline = plan.PipelineSeries }},
		{name: "none", set: func(c *plan.Config) { c.Pipeline = plan.PipelineNone }},
		{name: "intra", set: func(c *plan.Config) { c.Pipeline = plan.PipelineIntra }},
		{name: "prefetch", set: func(c *plan.Config) { c.Pipeline = plan.PipelinePrefetch }},
		{name: "deep", set: func(c *plan.Config) { c.Pipeline = plan.DefaultPipeline }},
		{name: "deep, row by row", set: func(c *plan.Config) {
			c.Pipeline, c.CoalesceBytes = plan.DefaultPipeline, -1
		}},
		{name: "dynamic series",
			set: func(c *plan.Config) { c.Policy, c.Pipeline = "lru", plan.PipelineSeries }},
		{name: "dynamic deep",
			set: func(c *plan.Config) { c.Policy, c.Pipeline = "lru", plan.DefaultPipeline }},
		{name: "window deep",
			set: func(
				c *plan.Config) {
				c.Policy, c.Pipeline, c.Window = "lru", plan.DefaultPipeline, 2
			}},
		{name: "run-ahead", set: func(c *plan.Config) { c.Mode, c.Window = dynamic.ModeGIDS, 2 }},
		{name: "accumulated", set: func(c *plan.Config) {
			c.Mode, c.Pipeline, c.Window, c.Accumulate = dynamic.ModeGIDS,
				plan.PipelinePrefetch, 2, 0.9
		}},
	} {
		t.Run(v.name, func(t *testing.T) {
			cfg := small()
			cfg.Epochs, cfg.NoEval, cfg.GPUCache, cfg.CPUCache = 1, true, percent(20), percent(10)
			v.set(&cfg)
			joins := v.name == "deep"
			var g *plan.OpGraph
			obs := report.Observer{Plan: func(o *plan.OpGraph) { g = o }}
			var wall, modelled bytes.Buffer

			cfg.Timeline = timeline.New(&wall, timeline.Wall)
			r := train(t, context.Background(), cfg, d, feat, s, 2, obs)
			require.NoError(t, r.err)
			require.NoError(t, cfg.Timeline.Close())
			n := r.res.Epochs[0].Batches
			spans, _, _ := readTimeline(t, wall.Bytes())
			require.Empty(t, breaches(g, spans, n, joins, 50), "wall")

			dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
			require.NoError(t, err)
			cfg.Timeline = timeline.New(&modelled, timeline.Virtual)
			_, err = virtual.Run(context.Background(), tiers.Simulation, cfg,
				prepare.Inputs{Dev: dev, Dataset: d},
				cost.Hardware{Profile: hw, SSDs: 2}, obs)
			require.NoError(t, err)
			require.NoError(t, cfg.Timeline.Close())
			require.NoError(t, dev.Close())
			spans, _, _ = readTimeline(t, modelled.Bytes())
			require.Empty(t, breaches(g, spans, n, joins, 0.002), "virtual")

			// An edge that no run has, an operator too many and one too few are found.
			first, last := g.Op("S1"), g.Ops[len(g.Ops)-1]
			first.After = append(first.After, last.Name)
			require.Len(t, breaches(g, spans, n, joins, 0.002), n)
			first.After = nil
			g.Ops = append(g.Ops, plan.Operator{Name: "X"})
			require.Len(t, breaches(g, spans, n, joins, 0.002), n)
			g.Ops = g.Ops[:len(g.Ops)-2]
			require.Len(t, breaches(g, spans, n, joins, 0.002), n)
		})
	}
}
