package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/simd"
)

// Every row passes its audit and gives the same mini-batches, on graphs made in memory and on a
// dataset.
func TestBenchSample(t *testing.T) {
	isolate(t)
	var levels []string
	for _, l := range simd.Levels() {
		levels = append(levels, l.String())
	}
	ok(t, "generate", "--kind", "sbm", "--nodes", "3000", "--avg-degree", "20", "--dim", "4",
		"--out", "g")
	for _, source := range [][]string{{"--nodes", "5000"}, {"--graph", "skewed", "--nodes", "4000",
		"--degrees"}, {"g"}} {
		args := append([]string{"bench", "sample", "--workers", "1..2", "--kernels",
			strings.Join(levels, ","), "--fanout", "5,-1,2", "--batch-size", "64",
			"--batches", "2", "--turns", "3", "--overwrite", "--results", "out.json", "--json"},
			source...)
		if source[0] == "g" {
			args = append(args[:len(args)-1], "--dataset", "g")
		}
		rows := lines(t, ok(t, args...))
		require.Equal(t, rows, lines(t, kept(t, "out.json")))
		require.Len(t, rows, 2*len(levels))
		for i, r := range rows {
			require.Equal(t, true, r["audited"])
			require.Equal(t, rows[0]["digest"], r["digest"])
			require.Equal(t, rows[0]["edges_per_batch"], r["edges_per_batch"])
			require.Equal(t, levels[i/2], r["kernels"])
			require.LessOrEqual(t, r["edges_per_second_min"], r["edges_per_second"])
			require.LessOrEqual(t, r["edges_per_second"], r["edges_per_second_max"])
			require.InDelta(t, 0.5, r["distinct_fraction"], 0.5)
			require.Positive(t, r["checked_edges"])
			require.Contains(t, r["memory"], "sampler position table")
		}
	}
	// Lists on storage give the same mini-batches.
	rows := lines(t, ok(t, "bench", "sample", "g", "--workers", "2", "--batches", "2", "--turns",
		"1", "--batch-size", "64", "--topology", "memory,ssd", "--neighbor-cache", "40%", "--json"))
	require.Len(t, rows, 2)
	require.Equal(t, rows[0]["digest"], rows[1]["digest"])
	require.Equal(t, true, rows[1]["audited"])
	require.Equal(t, "ssd", rows[1]["topology"])
	require.NotContains(t, rows[0], "topology_reads")
	reads := rows[1]["topology_reads"].(map[string]any)
	require.Positive(t, reads["bytes"])
	require.Positive(t, reads["cached_edges"])
	require.Regexp(t, `on storage: in memory offsets of .*\n(.*\n)*.* ssd +\d+% .* passed`,
		ok(t, "bench", "sample", "g", "--workers", "1", "--batches", "2", "--turns", "1",
			"--topology", "memory,ssd"))
	require.Regexp(t, `even: 2000 nodes, .* 1 turns of \d+ batches\n(.*\n)*.* passed`,
		ok(t, "bench", "sample", "--nodes", "2000", "--seconds", "0.01", "--turns", "1",
			"--workers", "1"))
}

func TestBenchSampleBadInput(t *testing.T) {
	runBad(t, []badCase{
		{"no fanout", nil, "bench sample --fanout 0", 2, []string{"fanout 0"}, ""},
		{"no number", nil, "bench sample --fanout x", 2, []string{"--fanout"}, ""},
		{"no graph", nil, "bench sample --nodes 1", 2, []string{"1 nodes"}, ""},
		{"both lengths", nil, "bench sample --batches 1 --seconds 1", 2,
			[]string{"--batches and --seconds"}, ""},
		{"no such kernels", nil, "bench sample --kernels sse9", 2,
			[]string{"sse9", "choose one of"}, ""},
		{"no batches", nil, "bench sample --batches 0", 2, []string{"--batches 0"}, ""},
		{"a dataset and a graph", nil, "bench sample --dataset d --nodes 10", 2,
			[]string{"--nodes", "leave it out"}, ""},
		{"nowhere", nil, "bench sample --topology disk", 2,
			[]string{"--topology", "memory, ssd"}, ""},
		{"lists of no file", nil, "bench sample --topology ssd", 2, []string{"give a dataset"}, ""},
		{"a cache of nothing", nil, "bench sample --neighbor-cache 5%", 2,
			[]string{"--neighbor-cache", "--topology ssd"}, ""},
		{"no dataset", nil, "bench sample d", 2, []string{"d"}, ""},
	})
}
