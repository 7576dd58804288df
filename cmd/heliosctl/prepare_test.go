package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// train uses the files that prepare leaves: with them diskgnn trains as inmem does on the same
// samples.
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
	require.Contains(t, text, "prepared pages have theirs")
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

// Parts of the graph: prepared once, in a folder or on the SSDs, they serve every later run, whose
// rows are those of the dataset; verify reads them.
func TestPrepareParts(t *testing.T) {
	loaded(t, 2)
	args := func(verb string, extra ...string) []string {
		return append([]string{verb, "g", "--fanout", "5,5", "--batch-size", "256", "--epochs", "2",
			"--mode", "hier", "--parts", "5", "--seed", "1", "--json", "--quiet"}, extra...)
	}
	parts := func(r map[string]any) map[string]any { return r["megabatches"].(map[string]any) }
	there := last(t, ok(t, args("prepare", "--cpu-cache", "100%")...))
	require.NotContains(t, there, "batches", "no mini-batches were laid out")
	require.Equal(t, false, parts(there)["reused"])
	require.Positive(t, parts(there)["disk_bytes"])
	require.FileExists(t, filepath.Join("g", "parted-hier", "pages"))
	require.Contains(t, ok(t, "verify", "g"), "parted-hier")

	run := []string{"--megabatch", "40%", "--cpu-cache", "100%", "--check-reads"}
	r := last(t, ok(t, args("train", run...)...))
	require.Equal(t, true, parts(r)["reused"])
	require.Equal(t, 2.0, parts(r)["parts_in_memory"])
	require.Equal(t, 6.0, parts(r)["megabatches"])
	for _, key := range []string{"feature_bytes", "edge_bytes", "static_bytes", "static_rows",
		"requests", "mean_request_bytes", "load_seconds", "epoch_bytes"} {
		require.Positive(t, parts(r)[key], key)
	}
	ssds := last(t, ok(t, args("train", append(run, "--pages-on", "ssds", "--parted", "p")...)...))
	require.Equal(t, r["params_sha256"], ssds["params_sha256"])
	require.Equal(t, "ssds", parts(ssds)["pages_on"])
	text := ok(t, "train", "g", "--mode", "marius", "--passes", "auto", "--epochs", "1",
		"--part-order", "sequential", "--seed", "1")
	require.Contains(t, text, "mega-batches")
	require.Contains(t, text, "(chosen)")
	require.DirExists(t, filepath.Join("g", "parted-marius-sequential"))

	fails(t, hc(t, args("train", "--parts", "6")...), 2, "train", "number of parts 5")
	fails(t, hc(t, args("train", "--part-order", "sequential")...), 2, "train", "--part-order",
		"marius")
	fails(t, hc(t, args("train", "--passes", "0")...), 2, "train", "--passes 0")
	fails(t, hc(t, args("train", "--megabatch", "120%")...), 2, "train", "--megabatch 120%")
	fails(t, hc(t, args("train", "--megabatch", "6")...), 2, "train", "--megabatch 6")
	fails(t, hc(t, args("train", "--static-nodes", "5")...), 2, "train", "--static-nodes 5")
	fails(t, hc(t, args("train", "--partition", "f")...), 2, "train", "--partition")
	fails(t, hc(t, args("train", "--load-ahead", "maybe")...), 2, "train", "--load-ahead")
	fails(t, hc(t, args("train", "--tune", "quick")...), 2, "train", "--tune")
	fails(t, hc(t, "train", "g", "--mode", "cpu", "--parted", "x"), 2, "train", "hier or marius")
	fails(t, hc(t, "train", "g", "--mode", "marius", "--static-nodes", "5%"), 2, "train",
		"--static-nodes")

	ok(t, "partition", "g", "--parts", "3", "--out", "three.partition")
	given := last(t, ok(t, "train", "g", "--mode", "hier", "--partition", "three.partition",
		"--parted", "q", "--epochs", "1", "--json", "--quiet"))
	require.Equal(t, 3.0, parts(given)["parts"])
}
