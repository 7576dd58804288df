package sched

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/cuda"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/hardware"
	"helios/internal/testing/wide"
	"helios/internal/timeline"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/dynamic"
	dynamicspec "helios/sched/tiers/dynamic/spec"
	"helios/sched/virtual"
)

// Whichever stage is slow, the credits bound what is in flight: with SSDs that take their time, as
// many batches wait for rows as there are credits, and no more are sampled; with slow training as
// many are prepared.
func TestBackPressure(t *testing.T) {
	d, feat := tiny.open(t)
	for _, c := range []struct {
		name  string
		set   func(*plan.Config)
		short bool
	}{
		{"deep, depth 1", func(c *plan.Config) { c.Depth = 1 }, true},
		{"deep, depth 3", func(c *plan.Config) { c.Depth = 3 }, false},
		{"prefetch, depth 2, sync",
			func(c *plan.Config) { c.Pipeline, c.IOStack = plan.PipelinePrefetch, gpuio.StackSync },
			false},
		{"none", func(c *plan.Config) { c.Pipeline = plan.PipelineNone }, false},
		{"dynamic, window", dyn(policy.LRU, dynamicspec.LineRow,
			func(c *plan.Config) { c.Window, c.Depth = 2, 1 }), true},
		{"gids", func(c *plan.Config) { c.Mode, c.GPUCache = dynamic.ModeGIDS, percent(10) }, true},
	} {
		if wide.Lean() && !c.short {
			continue
		}
		for _, slow := range []string{"SSDs", "training"} {
			name := c.name + ", slow " + slow
			var b bytes.Buffer
			cfg := small()
			cfg.Epochs, cfg.NoEval, cfg.Batch, cfg.Fanouts = 1, true, 32, []int{3, 2}
			c.set(&cfg)
			cfg.Timeline = timeline.New(&b, timeline.Wall)
			faults := ""
			if slow == "SSDs" {
				faults = "slow(us=1000,op=read)"
			}
			obs := report.Observer{}
			var ops *plan.OpGraph
			obs.Plan = func(g *plan.OpGraph) { ops = g }
			s := bind(t, d, 2, faults)
			if slow == "training" {
				cfg.OnBatch = func(int, int, *graph.MiniBatch) { time.Sleep(2 * time.Millisecond) }
			}
			r := train(t, context.Background(), cfg, d, feat, s, 2, obs)
			require.NoError(t, r.err, name)
			require.NoError(t, cfg.Timeline.Close())
			spans, counters, _ := readTimeline(t, b.Bytes())
			e := r.res.Epochs[0]
			credits, reads := slices.Max(counters[report.TrackCredits]),
				slices.Max(counters[report.TrackReads])
			limit, rows := ops.Samples, int64(0)
			for _, s := range spans {
				rows = max(rows, s.rows)
			}
			sets := ops.Credits
			if a := r.res.Accumulator; a != nil {
				limit += plan.MaxGroup
				rows += a.Target
				sets = 2
			}
			t.Logf("%s: %v of %d batches in flight, at most %v rows; stall %.2f", name, credits,
				limit, reads, e.Stall)
			require.LessOrEqual(t, credits, float64(limit), name)
			require.LessOrEqual(t, reads, float64(int64(sets)*rows), name)
			if !ops.Serial || cfg.Window > 0 {
				require.GreaterOrEqual(t, credits, float64(ops.Credits),
					"%s: what may run ahead does", name)
			}
			if slow == "SSDs" {
				require.Positive(t, e.Stall, name)
			}
			require.Zero(t, counters[report.TrackCredits][len(counters[report.TrackCredits])-1],
				name)
			require.Zero(t, counters[report.TrackReads][len(counters[report.TrackReads])-1], name)
		}
	}
}

// The spans of a run keep the edges of its operator graph, on the wall clock as on the virtual one.
func TestTimelineKeepsTheGraph(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	pipes := plan.PipelineNames(nil)
	for i, pipe := range append(pipes, plan.DefaultPipeline) {
		coalesce := 0
		if i == len(pipes) {
			coalesce = -1
		}
		joins := pipe == plan.DefaultPipeline && coalesce == 0
		if wide.Lean() && pipe != plan.DefaultPipeline && pipe != plan.PipelineRunAhead {
			continue
		}
		cfg := small()
		cfg.Pipeline, cfg.Epochs, cfg.NoEval, cfg.Presample = pipe, 1, true, 1
		cfg.CoalesceBytes = coalesce
		if pipe == plan.PipelineRunAhead {
			cfg.Mode, cfg.GPUCache = dynamic.ModeGIDS, percent(10)
		}
		check := func(clock string, slack float64, run func(cfg plan.Config, obs report.Observer)) {
			var b bytes.Buffer
			cfg := cfg
			cfg.Timeline = timeline.New(&b, clock)
			var g *plan.OpGraph
			run(cfg, report.Observer{Plan: func(p *plan.OpGraph) { g = p }})
			require.NoError(t, cfg.Timeline.Close())
			require.NotNil(t, g, clock)
			spans, _, _ := readTimeline(t, b.Bytes())
			checkGraph(t, g, spans, joins, slack, fmt.Sprint(clock, " ", pipe, " ", coalesce))
		}
		check(timeline.Wall, 50, func(cfg plan.Config, obs report.Observer) {
			require.NoError(t, train(t, context.Background(), cfg, d, feat, s, 2, obs).err)
		})
		check(timeline.Virtual, 0.001, func(cfg plan.Config, obs report.Observer) {
			dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
			require.NoError(t, err)
			hw, err := hardware.Load("a100-p5510x12")
			require.NoError(t, err)
			_, err = virtual.Run(context.Background(), tiers.Simulation, cfg,
				prepare.Inputs{Dev: dev, Dataset: d},
				cost.Hardware{Profile: hw, SSDs: 2}, obs)
			require.NoError(t, err)
			require.NoError(t, dev.Close())
		})
	}
}

// checkGraph holds each batch's spans against the graph's edges: the k-th span of a kind is the
// k-th operator of it. slack is in microseconds. joins: the hops of all batches but the first are
// read as one set.
func checkGraph(t *testing.T, g *plan.OpGraph, spans []drawn, joins bool, slack float64,
	name string) {
	t.Helper()
	tracksOf := map[string]string{plan.OpSample: report.TrackSample,
		plan.OpLookup: report.TrackLookup, plan.OpSubmit: report.TrackSubmit,
		plan.OpComplete: report.TrackComplete, plan.OpGather: report.TrackGather,
		plan.OpTrain: report.TrackTrain}
	by := map[int]map[string][]drawn{}
	for _, s := range spans {
		if s.batch < 0 {
			continue
		}
		if by[s.batch] == nil {
			by[s.batch] = map[string][]drawn{}
		}
		by[s.batch][s.track] = append(by[s.batch][s.track], s)
	}
	require.NotEmpty(t, by, name)
	edges := 0
	for batch, tracks := range by {
		where := map[string]drawn{}
		graphOps := g.Ops
		if joins && batch > 0 {
			graphOps = joinedOps(g)
		}
		for _, kind := range []string{plan.OpSample, plan.OpLookup, plan.OpSubmit, plan.OpComplete,
			plan.OpGather, plan.OpTrain} {
			track := tracksOf[kind]
			var ops []plan.Operator
			for _, o := range graphOps {
				if o.Kind == kind {
					ops = append(ops, o)
				}
			}
			ss := tracks[track]
			slices.SortFunc(ss, func(a, b drawn) int {
				if a.from < b.from {
					return -1
				}
				return 1
			})
			if kind == plan.OpSample || kind == plan.OpLookup || kind == plan.OpTrain {
				require.Len(t, ss, len(ops), "%s: batch %d: %s", name, batch, kind)
			}
			if len(ss) != len(ops) { // parts that nothing had to be read or gathered for
				continue
			}
			for i, o := range ops {
				where[o.Name] = ss[i]
				if kind == plan.OpComplete && len(tracks[report.TrackSubmit]) == len(ss) {
					// Two parts' submissions may end in another order than they began: a part's
					// completion follows its own.
					own := tracks[report.TrackSubmit][i]
					where[o.Name] = slices.MinFunc(ss, func(a, b drawn) int {
						return cmp.Compare(math.Abs(a.from-own.to)+
							1e9*float64(max(a.rows-own.rows, own.rows-a.rows)),
							math.Abs(b.from-own.to)+
								1e9*float64(max(b.rows-own.rows, own.rows-b.rows)))
					})
				}
			}
		}
		for _, o := range graphOps {
			s, ok := where[o.Name]
			for _, after := range o.After {
				if a, there := where[after]; ok && there {
					edges++
					require.LessOrEqual(t, a.to, s.from+slack,
						fmt.Sprintf("%s: batch %d: %s begins before %s has ended", name, batch,
							o.Name, after))
				}
			}
		}
	}
	require.Greater(t, edges, 3*len(by), "%s: edges that were looked at", name)
}
