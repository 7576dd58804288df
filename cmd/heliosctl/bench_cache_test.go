package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/fakecuda"
)

// Both devices answer alike, and say what was checked.
func TestBenchCache(t *testing.T) {
	lib := fakecuda.Build(t, fakecuda.Private())
	isolate(t)
	t.Setenv("HELIOS_LIBCUDA", lib)
	fakecuda.Control(t, lib, "reset,sms=4,mem=67108864")
	rows := lines(t, ok(t, "bench", "cache", "--device", "host,cuda", "--nodes", "20K", "--rows",
		"1K", "--policy", "static,random,sieve", "--line-rows", "3", "--window", "2",
		"--gpu-cache", "30%", "--seconds", "0.001", "--results", "out.json", "--json"))
	require.Equal(t, rows, lines(t, kept(t, "out.json")))
	require.Len(t, rows, 6)
	for i, r := range rows {
		require.Equal(t, true, r["audited"], r["audit_error"])
		require.Equal(t, []string{"static", "random", "sieve"}[i%3], r["policy"])
		require.Equal(t, i >= 3, r["device"] == "cuda:0 (Fake GPU (CPU shim))")
		require.Positive(t, r["lookups_per_second"].(map[string]any)["median"])
		if i%3 == 0 {
			require.EqualValues(t, 90*64, r["index_bytes"])
			require.Equal(t, i == 0, r["ratio"] != nil, "the limit is the host's")
			require.InDelta(t, .3, r["hit_ratio"], .05)
			require.InDelta(t, .2, r["cpu_ratio"], .05)
		} else {
			require.EqualValues(t, 2000, r["slots"])
			require.Positive(t, r["metadata_bytes"])
			require.GreaterOrEqual(t, r["checked_rows"], 5000.0)
		}
	}
	for i, what := range []string{"hit_ratio", "cpu_ratio"} {
		require.Equal(t, rows[0][what], rows[3][what], i) // of the same rows
	}
	require.Regexp(t, `static +\S+ [kM] .*passed`, ok(t, "bench", "cache", "--nodes", "20K",
		"--rows", "1K", "--policy", "static", "--seconds", "0.001"))
}

func TestBenchCacheBadInput(t *testing.T) {
	runBad(t, []badCase{
		{"more rows than nodes", nil, "bench cache --nodes 1K --rows 1001", 2,
			[]string{"--rows 1001", "--nodes 1000"}, ""},
		{"half a node", nil, "bench cache --nodes 0.5", 2, []string{"--nodes 0.5", "100M"}, ""},
		{"no such policy", nil, "bench cache --policy mru", 2, []string{"--policy", "mru",
			"static"}, ""},
		{"shares of more than all", nil, "bench cache --gpu-cache 60% --cpu-cache 50%", 2,
			[]string{"--gpu-cache 60%"}, ""},
		{"a share of bytes", nil, "bench cache --gpu-cache 1MiB", 2,
			[]string{"--gpu-cache 1MiB", "10%"}, ""},
		{"lines without rows", nil, "bench cache --line-rows 0", 2, []string{"--line-rows 0"}, ""},
		{"a window without end", nil, "bench cache --window 65", 2, []string{"--window 65"}, ""},
		{"no SSD", nil, "bench cache --ssd-count 0", 2, []string{"--ssd-count 0"}, ""},
		{"no time", nil, "bench cache --seconds 0", 2, []string{"--seconds 0"}, ""},
		{"more than memory", nil,
			"bench cache --nodes 100G --policy lru --gpu-cache 90% --cpu-cache 0", 3,
			[]string{"--gpu-cache"}, ""},
		{"workers of a GPU", nil, "bench cache --device cuda --workers 1", 2,
			[]string{"--workers", "host"}, ""},
	})
}
