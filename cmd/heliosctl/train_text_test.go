package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/sched/report"
)

// Moves of superbatches are no dynamic tier's lines.
func TestMovesOfRows(t *testing.T) {
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
