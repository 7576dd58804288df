package main

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// The runs of several seeds are those of each by itself, with mean and deviation; resumed, those
// that have ended stay as they are, and the others follow.
func TestSeeds(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "400", "--avg-degree", "5", "--classes", "3", "--dim",
		"8", "--seed", "3", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB")
	ok(t, "load", "g")
	train := func(args ...string) []map[string]any {
		return lines(t, ok(t, append([]string{"train", "g", "--mode", "cpu", "--epochs", "3", "--hidden",
			"8", "--metric", "f1-macro", "--json"}, args...)...))
	}
	of := func(all []map[string]any, event string) (found []map[string]any) {
		for _, l := range all {
			if l["event"] == event {
				found = append(found, l)
			}
		}
		return found
	}
	train("--seeds", "1", "--checkpoint", "run")
	all := train("--seeds", "1..2,5", "--checkpoint", "run", "--resume", "--results", "r.jsonl")
	runs, sum := of(all, "seed"), of(all, "result")[0]
	require.Len(t, runs, 3)
	require.Equal(t, []any{1.0, 2.0, 5.0}, sum["seeds"])
	require.FileExists(t, "run/seed-5/best.safetensors")
	accuracy := []float64{}
	for i, seed := range []int{1, 2, 5} {
		alone := of(train("--seed", fmt.Sprint(seed)), "result")[0]
		require.Equal(t, alone["params_sha256"], runs[i]["params_sha256"], "seed %d", seed)
		require.Equal(t, alone["test_metrics"], runs[i]["test_metrics"], "seed %d", seed)
		accuracy = append(accuracy, alone["test_acc"].(float64))
	}
	mean := (accuracy[0] + accuracy[1] + accuracy[2]) / 3
	squares := 0.0
	for _, x := range accuracy {
		squares += (x - mean) * (x - mean)
	}
	found := false
	for _, f := range sum["figures"].([]any) {
		if x := f.(map[string]any); x["name"] == "test accuracy" {
			found = true
			require.InDelta(t, mean, x["mean"], 1e-12)
			require.InDelta(t, math.Sqrt(squares/2), x["deviation"], 1e-12)
		}
	}
	require.True(t, found)
	ok(t, "report", "r.jsonl", "--out", "r.html")
	require.Contains(t, readFile(t, "r.html"), "bands go from the least to the most")
	for want, args := range map[string][]string{
		"--seeds and --seed together":        {"--seeds", "1,2", "--seed", "3"},
		"is neither a seed nor a range":      {"--seeds", "3..1"},
		"2 is named twice":                   {"--seeds", "1..3,2"},
		"seeds and --clock together":         {"--seeds", "1", "--clock", "wall"},
		"run/seed-2 holds sage of dataset g": {"--seeds", "2,7", "--checkpoint", "run"},
	} {
		r := hc(t, append([]string{"train", "g"}, args...)...)
		require.Contains(t, r.errOut, want)
		require.Contains(t, []int{int(errs.Usage), int(errs.Refused)}, r.code)
	}
}
