package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/fakecuda"
)

// TestBenchSweep: both stacks over blocks, on SSDs in RAM with a latency, give audited rows, the
// limit of the CPU threads that play the SSDs, and a summary for each stack.
func TestBenchSweep(t *testing.T) {
	isolate(t)
	ok(t, "bind-ssds", "--proxy-ram", "2", "--size", "4MiB")
	t.Cleanup(func() { ok(t, "unbind-ssds", "--delete") })
	args := []string{"bench", "io", "--io-stack", "async,sync", "--io-blocks", "1,4", "--ssd-count", "2",
		"--ssd-latency", "500us", "--depth", "16", "--seconds", "0.1"}
	rows := lines(t, ok(t, append(args, "--json")...))
	require.Len(t, rows, 6)
	iops := map[string][]float64{}
	for _, r := range rows[:4] {
		require.Equal(t, true, r["audited"], r["audit_error"])
		require.Equal(t, map[string]float64{"async": 32, "sync": 128}[r["stack"].(string)], r["threads"])
		require.Equal(t, false, r["blocks_as_trained"])
		require.Equal(t, r["stack"] == "async" && r["blocks"] == 4.0, r["blocks_why"] != nil)
		require.Equal(t, 500.0, r["ssd_latency_us"])
		require.Positive(t, r["serve_threads"])
		require.Positive(t, r["serve_iops"])
		require.GreaterOrEqual(t, r["p50_us"], 500.0)
		stack := r["stack"].(string)
		iops[stack] = append(iops[stack], r["iops"].(float64))
	}
	// A read takes 500 us: so many are out on two SSDs, by CIDs or by warps, and no more.
	for _, v := range iops["async"] {
		require.LessOrEqual(t, v, 32/500e-6*1.05)
	}
	require.LessOrEqual(t, iops["sync"][0], 4/500e-6*1.05)
	require.LessOrEqual(t, iops["sync"][1], 16/500e-6*1.05)
	for i, stack := range []string{"async", "sync"} {
		s := rows[4+i]
		require.Equal(t, "summary", s["kind"])
		require.Equal(t, stack, s["stack"])
		require.Positive(t, s["plateau_blocks"])
	}
	require.Len(t, rows[4]["async_over_sync"], 2)
	require.Regexp(t, `98 % of it with \d blocks; async/sync \d`, ok(t, args...))
}

// Without --io-blocks and --threads each stack has what a run of train gives it, so that sync
// beside async is GIDS's reads beside Helios's.
func TestBenchAsTrained(t *testing.T) {
	isolate(t)
	ok(t, "bind-ssds", "--proxy-ram", "1", "--size", "4MiB")
	t.Cleanup(func() { ok(t, "unbind-ssds", "--delete") })
	args := []string{"bench", "io", "--io-stack", "async,sync", "--depth", "16", "--seconds", "0.05"}
	rows := lines(t, ok(t, append(args, "--workers", "3", "--json")...))
	require.Len(t, rows, 3)
	for i, want := range []struct{ blocks, threads float64 }{{32, 32}, {3 * 32, 128}} {
		require.Equal(t, want.blocks, rows[i]["blocks"])
		require.Equal(t, want.threads, rows[i]["threads"])
		require.Equal(t, true, rows[i]["blocks_as_trained"])
	}
	ratio := rows[2]["async_over_sync"].([]any)
	require.Len(t, ratio, 1)
	require.Equal(t, true, ratio[0].(map[string]any)["as_trained"])
	require.Contains(t, ok(t, args...), "as training has both")
	// The modelled GPU has its own: 108 SMs that hold 16 blocks of 128 threads each.
	rows = lines(t, ok(t, append(args, "--clock", "virtual", "--hardware", "a100-p5510x12",
		"--seconds", "0.002", "--json")...))
	require.Equal(t, 32.0, rows[0]["blocks"])
	require.Equal(t, 108*16.0, rows[1]["blocks"])
}

func TestBenchBadInput(t *testing.T) {
	ram := func(t *testing.T) {
		ok(t, "bind-ssds", "--proxy-ram", "1", "--size", "1MiB")
		t.Cleanup(func() { ok(t, "unbind-ssds", "--delete") })
	}
	runBad(t, []badCase{
		{"no blocks", ram, "bench io --io-blocks 0", 2, []string{"--io-blocks", "below 1"}, ""},
		{"too many blocks", ram, "bench io --io-blocks 100000", 2,
			[]string{"100000 blocks", "choose 1 to"}, ""},
		{"odd threads", ram, "bench io --threads 33", 2, []string{"--threads 33", "multiple of 32"},
			""},
		{"no threads", ram, "bench io --threads 0", 2, []string{"--threads"}, ""},
		{"odd latency", ram, "bench io --ssd-latency=-1us", 2, []string{"--ssd-latency"}, ""},
		{"more SSDs than there are", ram, "bench io --ssd-count 1,3", 2,
			[]string{"--ssd-count 3", "only 1"}, ""},
	})
}

// TestBenchOnGPU: the same command with kernels on a device of the driver, here the fake libcuda.
func TestBenchOnGPU(t *testing.T) {
	lib := fakecuda.Build(t, fakecuda.Private())
	isolate(t)
	t.Setenv("HELIOS_LIBCUDA", lib)
	fakecuda.Control(t, lib, "reset,sms=4,mem=67108864")
	ok(t, "bind-ssds", "--proxy-ram", "1", "--size", "1MiB")
	t.Cleanup(func() { ok(t, "unbind-ssds", "--delete") })
	rows := lines(t, ok(t, "bench", "io", "--device", "cuda", "--io-stack", "async,sync", "--io-blocks",
		"2", "--depth", "16", "--seconds", "0.05", "--json"))
	require.Len(t, rows, 3)
	for _, r := range rows[:2] {
		require.Equal(t, true, r["audited"], r["audit_error"])
		require.Contains(t, r["device"], "cuda:0")
		require.Equal(t, r["commands"], r["smart_reads"])
		require.Equal(t, "proxy", r["memory_rung"])
		require.Contains(t, r["memory_rung_tried"].([]any)[0].(map[string]any)["why"], "software")
	}
	for args, want := range map[string]string{
		"--device cuda --row-bytes 64KiB --depth 1024": "--depth 64 fits",
		"--device cuda --memory-rung p2p":              "p2p",
		"--io-stack cpu --memory-rung p2p":             "no queues",
		"--device cuda:3":                              "no CUDA device 3",
		"--device cuda --io-blocks 0":                  "below 1",
	} {
		r := hc(t, append([]string{"bench", "io"}, strings.Fields(args)...)...)
		require.NotZero(t, r.code)
		require.Contains(t, r.errOut, want)
	}
}
