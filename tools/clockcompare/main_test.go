package main

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRun: a small comparison from end to end. How near the clocks are is for a quiet machine to
// say; but however busy this one is, SSDs in wall time are not faster than their model.
func TestRun(t *testing.T) {
	var out bytes.Buffer
	o := options{model: "slow", hardware: "host", stacks: []string{"async"}, ssds: []int{1},
		depths: []int{16}, rows: []int{512}, seconds: 0.1, runs: 1, mib: 4, allowed: 0.1}
	require.NoError(t, run(t.Context(), o, &out))
	require.Regexp(t, `async +1 +16 +512`, out.String())
	require.Contains(t, out.String(), "1 configurations")
	out.Reset()
	o.jsonOut = true
	require.NoError(t, run(t.Context(), o, &out))
	var r result
	require.NoError(t, json.NewDecoder(&out).Decode(&r))
	require.Positive(t, r.Wall)
	require.LessOrEqual(t, r.Ratio, 1.1)
	o.model = "no such"
	require.ErrorContains(t, run(t.Context(), o, &out), "no such")
}

func TestReport(t *testing.T) {
	var out bytes.Buffer
	rows := []result{{Stack: "async", SSDs: 1, Depth: 8, RowBytes: 512, Wall: 95, Virtual: 100,
		Ratio: 0.95}, {Stack: "sync", SSDs: 2, Depth: 8, RowBytes: 512, Wall: 80, Virtual: 100,
		Ratio: 0.8}}
	o := options{model: "slow", allowed: 0.1, check: true}
	require.ErrorContains(t, report(o, rows, &out), "1 of 2")
	require.Contains(t, out.String(), "the worst 20.0 %")
	require.NoError(t, report(o, rows[:1], &out))
}
