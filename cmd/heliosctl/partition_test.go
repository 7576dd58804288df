package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/graph/partition"
)

// A partition is made, kept, read again, checked by verify where it lies in the folder, and never
// taken for another dataset's.
func TestPartition(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "4000", "--classes", "4", "--dim", "4", "--avg-degree", "10",
		"--out", "g")
	args := []string{"partition", "g", "--parts", "4", "--method", "stream", "--json"}
	r := last(t, ok(t, append(args, "--out", "g/four.partition")...))
	require.Equal(t, "stream", r["method"])
	require.Less(t, r["cut_share"], 0.25) // planted: a fifth of the neighbours are of any class
	require.LessOrEqual(t, r["node_balance"], 1.05)
	require.Positive(t, r["peak_bytes"])
	text := ok(t, "partition", "g", "--in", "g/four.partition")
	for _, want := range []string{"stream", "cut", "max / mean", "peak memory", "time"} {
		require.Contains(t, text, want)
	}
	again := last(t, ok(t, "partition", "g", "--in", "g/four.partition", "--json"))
	require.Equal(t, r["cut_edges"], again["cut_edges"])
	random := last(t, ok(t, "partition", "g", "--parts", "4", "--method", "random", "--json"))
	require.InDelta(t, 0.75, random["cut_share"], 0.02)

	// The same from the file of the edges, by other threads.
	ok(t, append(args, "--out", "b", "--topology", "ssd", "--workers", "3")...)
	require.Equal(t, readFile(t, "g/four.partition"), readFile(t, "b"))

	require.Contains(t, ok(t, "verify", "g"), "four.partition (4 parts) is good")
	fails(t, hc(t, append(args[:6], "--out", "b")...), 4, "partition", "--out b is there already",
		"--overwrite")
	ok(t, "generate", "--nodes", "4000", "--classes", "4", "--dim", "4", "--seed", "2", "--out", "h")
	fails(t, hc(t, "partition", "h", "--in", "b"), 2, "partition", "b: the partition is of dataset")
	require.NoError(t, os.Rename("b", "h/b.partition"))
	fails(t, hc(t, "verify", "h"), 2, "verify", "h/b.partition: the partition is of dataset")

	b := []byte(readFile(t, "g/four.partition"))
	b[len(b)-1] ^= 1
	require.NoError(t, os.WriteFile("g/four.partition", b, 0o644))
	fails(t, hc(t, "verify", "g"), 5, "verify", "g/four.partition is damaged: bytes 4096 to 20095")
	fails(t, hc(t, "partition", "g", "--in", "g/four.partition"), 5, "partition", "is damaged")
}

// A partition whose figures are not those of the edges is none of theirs.
func TestPartitionOfOtherEdges(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "1000", "--classes", "4", "--dim", "4", "--out", "g")
	ok(t, "partition", "g", "--parts", "3", "--method", "random", "--out", "p")
	p, err := partition.Open("p")
	require.NoError(t, err)
	p.Info.CutEdges++
	f, err := os.Create("q")
	require.NoError(t, err)
	require.NoError(t, p.Write(f))
	require.NoError(t, f.Close())
	require.NoError(t, p.Close())
	fails(t, hc(t, "partition", "g", "--in", "q"), 5, "partition", "q says that it cuts")
}

func TestPartitionRefuses(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "100", "--classes", "4", "--dim", "4", "--out", "g")
	for want, args := range map[string][]string{
		"no --parts":                          {"g"},
		"--parts 101: give 1 to 100":          {"g", "--parts", "101"},
		"--balance 0.5":                       {"g", "--parts", "2", "--balance", "0.5"},
		"unknown --method \"metiss\"; did":    {"g", "--parts", "2", "--method", "metiss"},
		"--in measures":                       {"g", "--in", "a", "--out", "b"},
		"--parts: the partition of --in has":  {"g", "--in", "a", "--parts", "2"},
		"no dataset":                          {"--parts", "2"},
		"is no partition; \"heliosctl partit": {"g", "--in", filepath.Join("g", "dataset.yaml")},
	} {
		fails(t, hc(t, append([]string{"partition"}, args...)...), 2, "partition", want)
	}
	fails(t, hc(t, "partition", "g", "--parts", "2", "--method", "metis", "--metis", "/no/lib.so"),
		3, "partition", "/no/lib.so")
	r := hc(t, "partition", "g", "--parts", "2", "--metis", "/no/lib.so", "--out", "p")
	require.Zero(t, r.code, r.errOut)
	require.Contains(t, r.errOut, "METIS: /no/lib.so")
	require.Contains(t, r.out, "stream")
}
