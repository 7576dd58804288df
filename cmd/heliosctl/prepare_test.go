package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// What prepare leaves is what train uses: with it diskgnn trains as inmem does on the same samples.
func TestPrepare(t *testing.T) {
	loaded(t, 2)
	args := func(verb string, extra ...string) []string {
		return append([]string{verb, "g", "--fanout", "5,5", "--batch-size", "256", "--epochs",
			"3", "--sample-epochs", "2", "--seed", "1", "--json", "--quiet"}, extra...)
	}
	packed := []string{"--mode", "diskgnn", "--packed", "p", "--cpu-cache", "10%"}
	first := last(t, ok(t, args("prepare", packed...)...))
	require.Equal(t, false, first["reused"])
	require.Equal(t, 2.0, first["sample_epochs"])
	for _, key := range []string{"batches", "pages_bytes", "samples_bytes", "plan_bytes",
		"sample_seconds", "plan_seconds", "pack_seconds", "prepare_bytes_read"} {
		require.Positive(t, first[key], key)
	}
	again := last(t, ok(t, args("prepare", packed[2:]...)...))
	require.Equal(t, true, again["reused"])
	require.Equal(t, first["disk_bytes"], again["disk_bytes"])

	trained := last(t, ok(t, args("train", packed...)...))
	require.Equal(t, true, trained["packed"].(map[string]any)["reused"])
	inmem := last(t, ok(t, args("train", "--mode", "inmem")...))
	require.Equal(t, inmem["params_sha256"], trained["params_sha256"])

	fails(t, hc(t, args("prepare", append(packed, "--fanout", "4,4")...)...), 2, "prepare",
		"--fanout")
	fails(t, hc(t, args("prepare", "--mode", "inmem")...), 2, "prepare", "nothing to prepare")
	fails(t, hc(t, args("prepare", "--timeline", "x")...), 2, "prepare", "--timeline")
	require.NoError(t, os.Mkdir("mine", 0o755))
	require.NoError(t, os.WriteFile("mine/thesis.tex", nil, 0o644))
	fails(t, hc(t, args("prepare", "--packed", "mine")...), 4, "prepare", "thesis.tex")
}
