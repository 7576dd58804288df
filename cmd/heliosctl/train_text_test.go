package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/sched/report"
)

// The table has the times of superbatches, and their moves are no dynamic tier's lines.
func TestSuperbatchText(t *testing.T) {
	s := report.SuperbatchInfo{Superbatches: 3, Batches: 40, SampleSeconds: 1.5,
		InspectSeconds: 0.25, ChangeSeconds: 0.5, FileBytes: 2 << 20, InspectBytes: 3 << 20}
	require.Equal(t, "3 of up to 40 mini-batches: sampled in 1.5 s, inspected in 0.25 s, 0.5 s "+
		"more beside training; files of 2 MiB, inspection in 3 MiB", superbatchText(&s))
	s.FillSeconds = 0.125
	require.Contains(t, superbatchText(&s), "first rows read in 0.125 s; files")

	text := func(inspect float64) (out map[string]string) {
		out = map[string]string{}
		for _, l := range pathRows(report.EpochResult{LinesInserted: 5000,
			StageSeconds: report.StageSeconds{Inspect: inspect}}, 1) {
			out[l[0]] = l[1]
		}
		return out
	}
	require.Contains(t, text(0)["GPU tier's lines"], "5000 taken in")
	require.NotContains(t, text(0), "rows moved")
	require.Contains(t, text(1)["rows moved"], "5000 into a tier")
	require.NotContains(t, text(1), "GPU tier's lines")
}
