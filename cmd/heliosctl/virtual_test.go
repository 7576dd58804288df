package main

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A dataset alone is enough for the virtual clock: no SSD is bound, and none is touched.
func TestTrainOnTheVirtualClock(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "4000", "--avg-degree", "8", "--classes", "5",
		"--dim", "32", "--seed", "3", "--out", "g")
	args := trainArgs("--clock", "virtual", "--hardware", "a100-p5510x12", "--ssd-count", "6")
	out := ok(t, append(args, "--results", "r.jsonl", "--timeline", "t.json")...)
	ls := lines(t, out)
	require.Len(t, ls, 3, "two epochs and the result")
	for _, l := range ls {
		require.Equal(t, true, l["modelled"])
		require.NotContains(t, l, "loss")
		require.NotContains(t, l, "params_sha256")
	}
	r := ls[2]
	require.Equal(t, "result", r["event"])
	require.Equal(t, 6.0, r["ssd_count"])
	require.Len(t, r["io"].(map[string]any)["ssds"], 6)
	require.Equal(t, out, kept(t, "r.jsonl"))
	require.Equal(t, out, ok(t, args...), "equal arguments, equal output")

	b, err := os.ReadFile("t.json")
	require.NoError(t, err)
	var tr struct {
		Other map[string]any `json:"otherData"`
	}
	require.NoError(t, json.Unmarshal(b, &tr))
	require.Equal(t, map[string]any{"clock": "virtual", "modelled": true}, tr.Other)

	two := last(t, ok(t, append(args, "--replicas", "2")...))
	require.Equal(t, 2.0, two["replicas"])
	require.Equal(t, 2.0, two["shards"])
	require.Len(t, two["more_devices"], 1)
	ssds := func(r map[string]any) any { return r["io"].(map[string]any)["ssds"] }
	require.Equal(t, ssds(r), ssds(two), "one device reads for both")
	require.Regexp(t, "modelled replicas +2; beside the first on NVIDIA A100",
		ok(t, "train", "g", "--clock", "virtual", "--hardware", "a100-p5510x12", "--replicas", "2",
			"--epochs", "1", "--quiet"))

	far := last(t, ok(t, append(args, "--topology", "ssd", "--neighbor-cache", "5%")...))
	require.Positive(t, far["topology_storage"].(map[string]any)["offset_bytes"])
	require.Equal(t, ssds(r), ssds(far), "lists are no rows")

	require.Equal(t, "quick", last(t, ok(t, append(args, "--tune", "quick")...))["tuned"].(map[string]any)["level"])

	text := ok(t, "train", "g", "--clock", "virtual", "--hardware", "h100-pm1753x16", "--epochs",
		"1", "--fanout", "5", "--quiet")
	for _, l := range strings.Split(strings.TrimSpace(text), "\n") {
		require.Regexp(t, "^($|modelled)", strings.TrimSpace(l),
			"each line with figures says that they are modelled")
	}
	require.NotContains(t, text, "accuracy")

	// The keys of a configuration file are the flags.
	require.NoError(t,
		os.WriteFile("c.yaml",
			[]byte(
				"clock: virtual\nhardware: a100-p5510x12\nssd-count: 2\npipeline: none\non-ssd-failure: retry=3\n"), 0o644))
	require.Contains(t, hc(t, "train", "g", "--config", "c.yaml").errOut, "on-ssd-failure (c.yaml:5)",
		"what means nothing is refused there too")
	require.NoError(t,
		os.WriteFile("c.yaml",
			[]byte("clock: virtual\nhardware: a100-p5510x12\nssd-count: 2\npipeline: none\n"),
			0o644))
	require.Equal(t, 2.0, last(t, ok(t, "train", "g", "--config", "c.yaml", "--json",
		"--quiet"))["ssd_count"])
}
