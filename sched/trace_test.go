package sched

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/internal/timeline"
	"helios/sched/plan"
	"helios/sched/report"
)

// drawn is a span of a timeline; times are in microseconds.
type drawn struct {
	track, name, pass string
	batch, batches    int // the first that it is for, and how many
	rows              int64
	from, to          float64
}

// readTimeline takes a trace apart: spans by their track (of all its lines), and counters.
func readTimeline(t testing.TB, b []byte) (spans []drawn, counters map[string][]float64,
	other map[string]any) {
	t.Helper()
	var tr struct {
		Other  map[string]any `json:"otherData"`
		Events []struct {
			Ph, Name string
			TS, Dur  float64
			TID      int
			Args     map[string]any
		} `json:"traceEvents"`
	}
	require.NoError(t, json.Unmarshal(b, &tr))
	track := map[int]string{}
	counters = map[string][]float64{}
	for _, e := range tr.Events {
		switch {
		case e.Ph == "M" && e.Name == "thread_name":
			name, _, _ := strings.Cut(e.Args["name"].(string), " (")
			track[e.TID] = name
		case e.Ph == "C":
			for _, v := range e.Args {
				counters[e.Name] = append(counters[e.Name], v.(float64))
			}
		case e.Ph == "X":
			d := drawn{track: track[e.TID], name: e.Name, from: e.TS, to: e.TS + e.Dur, batch: -1,
				batches: 1}
			if v, ok := e.Args["batch"]; ok {
				d.batch, d.rows, d.pass = int(v.(float64)), int64(e.Args["rows"].(float64)),
					e.Args["pass"].(string)
			}
			if v, ok := e.Args["batches"]; ok {
				d.batches = int(v.(float64))
			}
			spans = append(spans, d)
		}
	}
	return spans, counters, tr.Other
}

// checkOrder holds the spans of each batch against the operators' dependencies,
// with slack microseconds for clocks read on both sides of a call.
func checkOrder(t testing.TB, spans []drawn, pipeline string, slack float64) {
	t.Helper()
	type batch struct {
		pass string
		i    int
	}
	by := map[batch][]drawn{}
	for _, s := range spans {
		if s.batch >= 0 {
			by[batch{s.pass, s.batch}] = append(by[batch{s.pass, s.batch}], s)
		}
	}
	require.NotEmpty(t, by)
	for k, ops := range by {
		bound := func(track string, last bool) (where float64) {
			first := true
			for _, s := range ops {
				if s.track != track {
					continue
				}
				switch {
				case last:
					where = max(where, s.to)
				case first:
					where, first = s.from, false
				default:
					where = min(where, s.from)
				}
			}
			return where
		}
		has := func(track string) bool {
			for _, s := range ops {
				if s.track == track {
					return true
				}
			}
			return false
		}
		where := fmt.Sprintf("%v under %s", k, pipeline)
		require.True(t, has(report.TrackSample) && has(report.TrackLookup) &&
			has(report.TrackTrain), where)
		order := func(a, b string) {
			if has(a) && has(b) {
				require.LessOrEqual(t, bound(a, true), bound(b, false)+slack,
					"%s: %s ends before %s begins", where, a, b)
			}
		}
		order(report.TrackComplete, report.TrackTrain)
		order(report.TrackGather, report.TrackTrain)
		order(report.TrackSample, report.TrackTrain)
		switch pipeline {
		case plan.PipelineNone, plan.PipelinePrefetch:
			order(report.TrackSample, report.TrackLookup)
			order(report.TrackLookup, report.TrackSubmit)
		}
		if pipeline == plan.PipelineNone {
			order(report.TrackComplete, report.TrackGather)
		}
		if has(report.TrackSubmit) {
			require.LessOrEqual(t, bound(report.TrackSubmit, false),
				bound(report.TrackComplete, false)+slack, where)
			require.LessOrEqual(t, bound(report.TrackLookup, false),
				bound(report.TrackSubmit, false)+slack, where)
		}
	}
}

// Each operator of each batch of each pass is in the timeline, in the order of its dependencies.
func TestTimelineOfARun(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	for _, of := range []struct {
		pipe     string
		coalesce int
	}{{plan.PipelineNone, 0}, {plan.DefaultPipeline, 0}, {plan.DefaultPipeline, -1}} {
		var b bytes.Buffer
		cfg, pipe := small(), of.pipe
		cfg.Pipeline, cfg.Epochs, cfg.GPUCache = pipe, 1, percent(10)
		cfg.CoalesceBytes = of.coalesce
		cfg.CheckpointDir = t.TempDir()
		cfg.Timeline = timeline.New(&b, timeline.Wall)
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		require.NoError(t, cfg.Timeline.Close())
		spans, counters, other := readTimeline(t, b.Bytes())
		require.Equal(t, map[string]any{"clock": "wall"}, other)
		checkOrder(t, spans, pipe, 50)
		n := map[string]int{}
		rows := int64(0)
		for _, s := range spans {
			n[s.pass+"/"+s.track+"/"+s.name]++
			if s.track == report.TrackComplete && s.pass == "epoch 1" {
				rows += s.rows
			}
		}
		e := r.res.Epochs[0]
		if pipe == plan.DefaultPipeline {
			apart := e.Batches
			if of.coalesce == 0 { // hops are read as one set, but for the first batch's
				apart = 1
			}
			require.Equal(t, []int{apart, apart}, []int{n["epoch 1/lookup/L0"],
				n["epoch 1/lookup/L1"]})
		}
		for op, want := range map[string]int{
			"epoch 1/sample/S1": e.Batches, "epoch 1/sample/S2": e.Batches,
			"epoch 1/train/T": e.Batches, "epoch 1/lookup/L2": e.Batches,
			"/run/presample": 1, "/run/fill tiers": 1, "/run/epoch 1": 1, "/run/validate": 1,
			"/run/test": 1, "/run/checkpoint": 1,
		} {
			require.Equal(t, want, n[op], "%s under %s", op, pipe)
		}
		require.Positive(t, n["validate/train/T"])
		require.Positive(t, n["epoch 1/gather/G2"])
		require.Equal(t, e.RowsSSD, rows, "every read is in a span")
		last := func(name string) float64 { return counters[name][len(counters[name])-1] }
		require.Zero(t, last(report.TrackCredits), "all credits came back")
		require.Zero(t, last(report.TrackReads), "all reads were waited for")
	}
}

func TestIOFigures(t *testing.T) {
	require.Zero(t, report.Balance(nil))
	require.Equal(t, 1.0, report.Balance([]report.SSDResult{{Commands: 5}, {Commands: 5}}))
	require.Equal(t, 2.0, report.Balance([]report.SSDResult{{Commands: 10}, {}}))
	require.False(t, report.SSDResult{Commands: 5}.Troubled())
	require.True(t, report.SSDResult{GivenUp: "gone"}.Troubled())
	require.Nil(t, report.NewIOResult(gpuio.Stats{}).Latency)
	b, err := json.Marshal(report.NewIOResult(gpuio.Stats{}))
	require.NoError(t, err)
	require.Contains(t, string(b), `"ssds":[]`)
}

// The result describes each SSD, over both stacks that drive queues.
func TestResultPerSSD(t *testing.T) {
	d, feat := tiny.open(t)
	for _, stack := range []string{gpuio.StackAsync, gpuio.StackSync} {
		cfg := small()
		cfg.IOStack, cfg.Epochs, cfg.CPUCache = stack, 1, percent(10)
		r := train(t, context.Background(), cfg, d, feat, bind(t, d, 3, ""), 2, report.Observer{})
		require.NoError(t, r.err)
		io := r.res.IO
		require.Len(t, io.SSDs, 3)
		var sum int64
		for _, s := range io.SSDs {
			sum += s.Commands
			require.False(t, s.Troubled())
		}
		require.Greater(t, sum, r.res.Epochs[0].SSDCommands, "filling and validation count too")
		require.InDelta(t, 1, io.Balance, 0.2)
		l := io.Latency
		require.Positive(t, l.P50)
		require.LessOrEqual(t, l.P50, l.P99)
		require.LessOrEqual(t, l.P99, l.Max)
	}
}
