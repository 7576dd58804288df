package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The job over SSDs that store nothing: bound, listed, verified, trained on in several ways with
// every row checked; load has nothing to do, and the same dataset loaded onto others gives the same
// parameters.
func TestComputedSSDs(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "2000", "--dim", "40", "--classes", "4", "--avg-degree", "5",
		"--feature-fn", "hash:9", "--train-fraction", "0.3", "--out", "g", "--quiet")
	require.NoFileExists(t, filepath.Join("g", "features.npy"))
	bound := lines(t, ok(t, "bind-ssds", "--computed", "g", "--ssd-count", "3", "--lba", "4096",
		"--json"))
	require.Len(t, bound, 3)
	require.Equal(t, "computed", bound[0]["kind"])

	ssds := lines(t, ok(t, "ssds", "--json"))
	require.Len(t, ssds, 3)
	for i, s := range ssds {
		require.Equal(t, "good, read-only", s["health"])
		require.Equal(t, float64(i), s["stripe"])
		require.Equal(t, true, s["loaded"])
		require.EqualValues(t, 0, s["allocated_bytes"])
	}
	require.Contains(t, ok(t, "load", "g"), "nothing to load")
	r := last(t, ok(t, "load", "g", "--json"))
	require.Equal(t, true, r["computed"])
	require.Contains(t, ok(t, "verify", "g", "--source"), "rows equal to the source")
	require.Contains(t, ok(t, "verify"), "are good")
	ok(t, "bench", "io", "g", "--seconds", "0.05", "--depth", "16")
	r = last(t, ok(t, trainArgs("--verify-rows", "--check-reads", "--gpu-cache", "5%",
		"--cpu-cache", "10%")...))
	require.Greater(t, r["rows_verified"], float64(10000))
	sha := r["params_sha256"]
	for _, how := range [][]string{{"--pipeline", "none", "--workers", "1"}, {"--mode", "inmem"},
		{"--io-stack", "sync", "--gpu-cache", "0", "--cpu-cache", "0"}} {
		r = last(t, ok(t, trainArgs(append(how, "--verify-rows")...)...))
		require.Equal(t, sha, r["params_sha256"], how)
		require.Greater(t, r["rows_verified"], float64(10000))
	}

	fails(t, hc(t, "load", "g", "--row-dtype", "int8"), 4, "load", "--row-dtype int8", "float32",
		"--computed g --ssd-count 3")
	ok(t, "load", "g", "--row-dtype", "float32")
	fails(t, hc(t, trainArgs("--io-stack", "cpu")...), 3, "train", "ssd0 is computed",
		"no file behind it", "--io-stack async")
	for _, mode := range []string{"mmap", "cpu"} {
		fails(t, hc(t, trainArgs("--mode", mode)...), 3, "train", "--mode "+mode,
			"ssd0 is computed", "--mode helios")
	}
	fails(t, hc(t, "bench", "io", "g", "--io-stack", "async,mmap", "--seconds", "0.05"), 3, "bench io",
		"ssd0 is computed", "--io-stack async")
	fails(t, hc(t, "bind-ssds", "--computed", "g"), 2, "bind-ssds", "holds it already",
		"unbind-ssds")
	ok(t, "bind-ssds", "--proxy-ram", "1", "--size", "4MiB")
	fails(t, hc(t, "load", "g"), 2, "load", "computed", "--ssds")
	ok(t, "load", "g", "--ssds", "ssd3")
	r = last(t, ok(t, trainArgs("--ssds", "ssd3", "--verify-rows")...))
	require.Equal(t, sha, r["params_sha256"])
	require.Contains(t, ok(t, "unbind-ssds", "ssd2"), "stored nothing")
	fails(t, hc(t, "load", "g", "--ssds", "ssd0,ssd1"), 4, "load", "cannot be written",
		"--computed")

	// Another dataset in its place is not what was bound.
	require.NoError(t, os.Rename("g", "was"))
	fails(t, hc(t, "verify", "--ssds", "ssd0"), 5, "verify", "unbind-ssds")
	ok(t, "generate", "--nodes", "2000", "--dim", "40", "--classes", "4", "--avg-degree", "5",
		"--feature-fn", "hash:10", "--out", "g", "--quiet")
	fails(t, hc(t, "verify", "--ssds", "ssd0"), 5, "verify", "another dataset")
}

func TestComputedBadFlags(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "50", "--dim", "4", "--classes", "2", "--out", "stored", "--quiet")
	ok(t, "generate", "--nodes", "50", "--dim", "4", "--classes", "2", "--feature-fn", "hash",
		"--out", "g", "--quiet")
	for _, c := range [][]string{
		{"generate's --feature-fn hash", "--computed", "stored"},
		{"--ssd-count", "--computed", "g", "--ssd-count", "0"},
		{"--ssd-count", "--computed", "g", "--ssd-count", "60"},
		{"--size", "--computed", "g", "--size", "1MiB"},
		{"--lba", "--computed", "g", "--lba", "1024"},
		{"--buffered", "--computed", "g", "--buffered"},
		{"--proxy", "--computed", "g", "--proxy-ram", "1", "--size", "1MiB"},
		{"--computed", "--proxy-ram", "1", "--size", "1MiB", "--ssd-count", "2"},
		{"--row-dtype", "--computed", "g", "--row-dtype", "float8"},
		{"nowhere", "--computed", "nowhere"},
	} {
		fails(t, hc(t, append([]string{"bind-ssds"}, c[1:]...)...), 2, "bind-ssds", c[0])
	}
	for _, c := range [][]string{
		{"--feature-fn", "--feature-fn", "md5"},
		{"--train-fraction", "--train-fraction", "0.9", "--val-fraction", "0.2"},
		{"--train-fraction", "--train-fraction", "0", "--val-fraction", "0"},
		{"--memory", "--memory", "1KiB"},
		{"--signal", "--feature-fn", "hash", "--signal", "2"},
		{"--homophily", "--kind", "rmat", "--homophily", "0.9"},
		{"--hub-signal", "--kind", "communities", "--feature-fn", "hash", "--hub-signal", "2"},
		{"--communities", "--communities", "4"},
		{"--mixing", "--kind", "rmat", "--mixing", "0.1"},
		{"--hubs", "--hubs", "0.1"},
		{"--hub-edges", "--hub-edges", "0.1"},
		{"--hub-peers", "--hub-peers", "0.1"},
		{"--hubs", "--kind", "communities", "--hubs", "2"},
		{"--communities", "--kind", "communities", "--communities", "51"},
		{"--memory", "--memory", "much"},
	} {
		fails(t, hc(t, append([]string{"generate", "--nodes", "50", "--out", "x"}, c[1:]...)...), 2,
			"generate", c[0])
	}
	// Rows that are stored have no function to be verified against.
	ok(t, "bind-ssds", "--proxy-ram", "1", "--size", "4MiB")
	ok(t, "load", "stored")
	fails(t, hc(t, "train", "stored", "--verify-rows"), 2, "train",
		"generate's --feature-fn hash")
	fails(t, hc(t, "train", "g", "--verify-rows", "--clock", "virtual", "--hardware", "x"), 2,
		"train")
}
