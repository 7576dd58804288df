package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/wide"
)

// mostUnaccounted bounds the share of the processor time of a run for which no operator is named.
const mostUnaccounted = 0.4

// The processor time of a run is accounted for by stage and operator: the parts and what is left
// add up to what the kernel counts, and little is left.
func TestProcessorTime(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "rmat", "--nodes", "65536", "--avg-degree", "15", "--dim", "128",
		"--train-fraction", "0.1", "--seed", "3", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img,b.img", "--size", "24MiB")
	ok(t, "load", "g")
	for mode, stages := range map[string][]string{
		"helios": {"sample", "lookup", "submit", "complete", "gather", "train", "software SSDs"},
		"cpu":    {"sample", "lookup", "gather", "train", "read"},
		"inmem":  {"sample", "lookup", "gather", "train"},
		"gids":   {"sample", "lookup", "gather", "train", "software SSDs"},
	} {
		if wide.Lean() && mode != "helios" {
			continue
		}
		out := lines(t, ok(t, "train", "g", "--mode", mode, "--fanout", "10,10", "--batch-size",
			"1024", "--hidden", "64", "--gpu-cache", "25%", "--epochs", "2", "--no-eval",
			"--explain", "--json", "--quiet"))
		var cpu map[string]any
		for _, e := range out {
			if e["event"] == "epoch" {
				cpu = e["cpu"].(map[string]any)
				require.Equal(t, e["batches"], cpu["batches"])
			}
		}
		all, rest := cpu["seconds"].(float64), cpu["unaccounted_seconds"].(float64)
		by, sum, least := map[string]float64{}, rest, all
		for _, p := range cpu["parts"].([]any) {
			p := p.(map[string]any)
			s := p["seconds"].(float64)
			require.NotEmpty(t, p["operator"])
			require.LessOrEqual(t, s, least, "the largest come first")
			by[p["stage"].(string)] += s
			least = s
			sum += s
		}
		for _, s := range stages {
			require.Positive(t, by[s], "%s: %s", mode, s)
		}
		// Threads that run have their last tick not counted yet.
		require.InDelta(t, all, sum, 0.02+0.01*all, mode)
		if mode != "gids" { // which has some 40 %, most likely of waits that yield
			require.Less(t, rest/all, mostUnaccounted, "%s: %v", mode, cpu)
		}
		t.Logf("%s: %.3f s, unaccounted %.1f %%", mode, all, 100*rest/all)
	}
	require.Regexp(t, `software SSDs +io_uring_enter +\d+\.\d +\d+\.\d%`,
		ok(t, "train", "g", "--mode", "helios", "--epochs", "1", "--no-eval", "--explain"))
	for _, e := range lines(t, ok(t, "train", "g", "--epochs", "1", "--no-eval", "--json", "--quiet")) {
		require.NotContains(t, e, "cpu", "nobody asked")
	}
}
