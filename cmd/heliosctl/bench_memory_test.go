package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/fakecuda"
)

// Both devices gather and copy what they should, and say what was compared.
func TestBenchMemory(t *testing.T) {
	lib := fakecuda.Build(t, fakecuda.Private())
	isolate(t)
	t.Setenv("HELIOS_LIBCUDA", lib)
	fakecuda.Control(t, lib, "reset,sms=4,mem=67108864")
	rows := lines(t, ok(t, "bench", "memory", "--device", "host,cuda", "--tier", "640KiB", "--set",
		"256KiB", "--row-bytes", "4096,100", "--seconds", "0.01", "--results", "out.json",
		"--json"))
	require.Equal(t, rows, lines(t, kept(t, "out.json")))
	require.Len(t, rows, 8)
	for i, r := range rows {
		require.Equal(t, true, r["audited"], r["audit_error"])
		require.Equal(t, []string{"device", "cpu"}[i%2], r["from"])
		require.Equal(t, 2*r["rows"].(float64), r["checked_rows"]) // of the gather and of the copy
		require.Positive(t, r["ratio"].(map[string]any)["median"])
		require.Equal(t, i >= 4, r["device"] == "cuda:0 (Fake GPU (CPU shim))")
	}
	// A set that is compared by a sample.
	rows = lines(t, ok(t, "bench", "memory", "--tier", "20MiB", "--set", "18MiB", "--row-bytes",
		"260", "--seconds", "0.01", "--json"))
	require.Less(t, rows[0]["checked_rows"], 2*rows[0]["rows"].(float64))
	require.Regexp(t, `device +4 KiB .* passed`, ok(t, "bench", "memory", "--tier", "1MiB",
		"--set", "1MiB", "--seconds", "0.01"))
	// Sampling on the GPU gives what the host gets, to the bit.
	rows = lines(t, ok(t, "bench", "sample", "--device", "host,cuda", "--workers", "1", "--nodes",
		"3000", "--fanout", "5,-1", "--batch-size", "32", "--batches", "1", "--turns", "1",
		"--degrees", "--json"))
	require.Len(t, rows, 2)
	require.Equal(t, true, rows[1]["audited"], rows[1]["audit_error"])
	require.Equal(t, rows[0]["digest"], rows[1]["digest"])
	require.Positive(t, rows[1]["busy_share"])
	// A kernel that fails is told, and nothing hangs.
	fakecuda.Control(t, lib, "crash=1")
	r := hc(t, "bench", "memory", "--device", "cuda", "--tier", "1MiB", "--set", "1MiB",
		"--seconds", "0.01")
	require.Equal(t, 5, r.code, r.errOut)
}

func TestBenchMemoryBadInput(t *testing.T) {
	runBad(t, []badCase{
		{"odd rows", nil, "bench memory --row-bytes 4095", 2,
			[]string{"--row-bytes 4095", "multiple of 4"}, ""},
		{"no size", nil, "bench memory --tier x", 2, []string{"--tier"}, ""},
		{"a tier below a row", nil, "bench memory --tier 1KiB", 2, []string{"--tier 1 KiB"}, ""},
		{"a set beyond its tier", nil, "bench memory --tier 1MiB --set 2MiB", 2,
			[]string{"--set 2 MiB", "--tier 1 MiB"}, ""},
		{"no time", nil, "bench memory --seconds 0", 2, []string{"--seconds 0"}, ""},
		{"any device", nil, "bench memory --device auto", 2,
			[]string{"--device auto", "host, cuda"}, ""},
		{"no such device", nil, "bench sample --device gpu", 2, []string{"gpu"}, ""},
		{"workers of a GPU", nil, "bench sample --device cuda --workers 1", 2,
			[]string{"--workers", "host"}, ""},
	})
}
