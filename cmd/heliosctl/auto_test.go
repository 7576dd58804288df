package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// An option of one mode chooses it where no mode is given.
func TestOptionsChooseTheMode(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "300", "--avg-degree", "5", "--dim", "8", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB")
	ok(t, "load", "g")
	for _, x := range [][]string{{"inmem"}, {"diskgnn", "--packed", "p"},
		{"diskgnn", "--mode", "auto", "--disk-budget", "1MiB"}} {
		out := ok(t, append([]string{"train", "g", "--epochs", "1", "--fanout", "2", "--no-eval"},
			x[1:]...)...)
		require.Regexp(t, `\nmode +`+x[0]+",", out)
	}
}

// Without a bound SSD a dataset's own files play one: in all modes that read by queues, with the
// parameters of a run on SSDs.
func TestTrainWithoutSSDs(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "900", "--avg-degree", "5", "--dim", "37", "--out", "g")
	run := []string{"train", "g", "--epochs", "1", "--fanout", "3", "--json"}
	sums := map[any]bool{}
	for _, mode := range []string{"auto", "inmem", "helios", "gids", "bam"} {
		r := hc(t, append(run, "--mode", mode)...)
		require.Zero(t, r.code, r.errOut)
		require.Contains(t, r.errOut, "no SSD is bound, so rows are read from g/features.npy")
		sums[last(t, r.out)["params_sha256"]] = true
	}
	for _, mode := range []string{"cpu", "mmap"} {
		fails(t, hc(t, append(run, "--mode", mode)...), 3, "train", "no SSD is bound",
			"bind-ssds --proxy FILE")
	}
	r := hc(t, append(run, "--check-reads")...)
	require.Equal(t, 2, r.code)
	require.Contains(t, r.errOut, "--check-reads: no SSD holds g, and blocks of features.npy are held against the seal")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB")
	ok(t, "load", "g")
	sums[last(t, ok(t, append(run, "--mode", "helios")...))["params_sha256"]] = true
	require.Len(t, sums, 1)
	ok(t, "unbind-ssds")

	raw, err := os.ReadFile("g/features.npy")
	require.NoError(t, err)
	raw[len(raw)/2] ^= 1
	require.NoError(t, os.WriteFile("g/features.npy", raw, 0o644))
	for _, mode := range []string{"inmem", "helios"} {
		r := hc(t, append(run, "--mode", mode)...)
		require.Equal(t, 5, r.code)
		require.Contains(t, r.errOut, "g/features.npy: bytes 65536 to 131071 are not those that were sealed")
	}
}
