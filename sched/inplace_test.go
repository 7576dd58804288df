package sched

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/graph"
	"helios/internal/timeline"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// With all rows in one tier only those of the nodes before the last hop are copied, which changes
// no bit; an observer of rows, and shards of a step, have all of them copied.
func TestRowsStayInMemory(t *testing.T) {
	d, _ := tiny.open(t)
	s := bind(t, d, 2, "")
	want := ""
	for _, of := range []struct {
		name   string
		change func(c *plan.Config)
		stay   bool
	}{
		{"in memory", func(*plan.Config) {}, true},
		{"in memory, one stage after the other",
			func(c *plan.Config) { c.Pipeline = plan.PipelineNone }, true},
		{"two tiers", func(c *plan.Config) { c.GPUCache = percent(30) }, false},
		{"observed", func(c *plan.Config) { c.OnRows = func([]int64, []float32) {} }, false},
		{"a shard of a step", func(c *plan.Config) { c.Shards = 2 }, false},
		{"from SSDs", func(c *plan.Config) { c.Mode = static.ModeCPU }, false},
	} {
		cfg := small()
		cfg.Mode, cfg.Epochs, cfg.NoEval = static.ModeInmem, 2, true
		of.change(&cfg)
		var b bytes.Buffer
		cfg.Timeline = timeline.New(&b, timeline.Wall)
		before, all := int64(0), int64(0)
		cfg.OnBatch = func(_, _ int, mb *graph.MiniBatch) {
			last := len(mb.HopEnd) - 1
			before, all = before+mb.HopEnd[last-1], all+mb.HopEnd[last]
		}
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
		require.NoError(t, err)
		res, err := Train(context.Background(), cfg,
			prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}, report.Observer{})
		require.NoError(t, err, of.name)
		require.NoError(t, cfg.Timeline.Close())
		require.NoError(t, dev.Close())
		copied := int64(0)
		spans, _, _ := readTimeline(t, b.Bytes())
		for _, span := range spans {
			if span.track == report.TrackGather {
				copied += span.rows
			}
		}
		require.Equal(t, of.stay, copied == before, of.name)
		if of.name != "from SSDs" && !of.stay {
			require.Equal(t, all, copied, of.name)
		}
		rows := int64(0)
		for _, e := range res.Epochs {
			rows += e.RowsGPU + e.RowsCPU + e.RowsSSD
		}
		require.Equal(t, all, rows, of.name)
		if want == "" {
			want = res.ParamsSHA256
		}
		if cfg.Shards == 0 { // else a step has two mini-batches
			require.Equal(t, want, res.ParamsSHA256, of.name)
		}
	}
}
