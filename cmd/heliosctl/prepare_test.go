package main

import (
	"os"
	"path/filepath"
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

// TestPrepareOnSSDs: pages go behind the features, where ssds and verify find them; the rest stays
// in the folder.
func TestPrepareOnSSDs(t *testing.T) {
	loaded(t, 2)
	args := func(verb string, extra ...string) []string {
		return append([]string{verb, "g", "--fanout", "5,5", "--batch-size", "256", "--epochs", "2",
			"--mode", "diskgnn", "--seed", "1", "--json", "--quiet"}, extra...)
	}
	there := last(t, ok(t, args("prepare", "--pages-on", "ssds")...))
	require.Equal(t, "ssds", there["pages_on"])
	require.Positive(t, there["pages_bytes"])
	require.Contains(t, ok(t, "ssds"), "pages of pack")
	require.NoFileExists(t, filepath.Join("g", "packed", "epochs-0-1", "pages"))
	text := ok(t, "verify", "g")
	require.Contains(t, text, "1 packs of")
	require.Contains(t, text, "pages of packed mini-batches have theirs")
	fails(t, hc(t, args("train")...), 2, "train", "--pages-on")
	fails(t, hc(t, args("train", "--pages-on", "tape")...), 2, "train", "--pages-on")
	fails(t, hc(t, "train", "g", "--mode", "cpu", "--pages-on", "ssds"), 2, "train", "diskgnn")
	there = last(t, ok(t, args("train", "--pages-on", "ssds")...))
	require.Equal(t, true, there["packed"].(map[string]any)["reused"])
	folder := last(t, ok(t, args("train", "--packed", "p")...))
	require.Equal(t, "folder", folder["packed"].(map[string]any)["pages_on"])
	require.Equal(t, folder["params_sha256"], there["params_sha256"])

	plan := filepath.Join("g", "packed", "epochs-0-1", "plan")
	b := []byte(readFile(t, plan))
	b[len(b)/2] ^= 1
	require.NoError(t, os.WriteFile(plan, b, 0o644))
	fails(t, hc(t, "verify", "g"), 5, "verify", "plan")
}
