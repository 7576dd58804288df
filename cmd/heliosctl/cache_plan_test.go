package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCachePlanVerb(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "rmat", "--nodes", "4000", "--avg-degree", "8", "--classes", "5",
		"--dim", "128", "--feature-fn", "hash", "--seed", "3", "--out", "g")
	args := []string{"cache", "plan", "g", "--budget", "20%", "--gpu-max", "200KiB", "--hardware",
		"a100-p5510x12", "--ssd-count", "4", "--fanout", "5,5", "--batch-size", "100",
		"--steps", "20"}
	out := ok(t, append(args, "--json", "--results", "plan.jsonl")...)
	p := lines(t, out)[0]
	require.Equal(t, "cache plan", p["event"])
	require.Equal(t, true, p["modelled"])
	require.Len(t, p["curve"], 21)
	require.LessOrEqual(t, p["best"].(map[string]any)["gpu_bytes"], 200.0*1024)
	require.Equal(t, out, kept(t, "plan.jsonl"))
	text := ok(t, append(args, "--quiet")...)
	require.Contains(t, text, "modelled best of 21 splits: --gpu-cache ")
	require.Contains(t, text, "reused from g/hotness/presample-")

	for want, bad := range map[string][]string{
		"--budget":   {"cache", "plan", "g", "--hardware", "host"},
		"--hardware": {"cache", "plan", "g", "--budget", "1MiB"},
		"--steps 0": {"cache", "plan", "g", "--budget", "1MiB", "--hardware", "host",
			"--steps", "0"},
		"--gpu-max": {"cache", "plan", "g", "--budget", "1MiB", "--hardware", "host",
			"--gpu-max", "x"},
		"nosuch": {"cache", "plan", "g", "--budget", "1MiB", "--hardware", "host",
			"--hotness", "nosuch"},
	} {
		fails(t, hc(t, bad...), 2, "cache plan", want)
	}
}

func TestCacheHotnessVerb(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "rmat", "--nodes", "4000", "--avg-degree", "8", "--classes", "5",
		"--dim", "4", "--feature-fn", "hash", "--seed", "3", "--out", "g")
	require.NoError(t, os.WriteFile("hot.txt", []byte("1\n2\n3\n"), 0o644))
	r := lines(t, ok(t, "cache", "hotness", "g", "--fanout", "5,5", "--batch-size", "100", "--hotness",
		"presample:2,degree,foresight,hot.txt", "--sizes", "5%,64KiB", "--json"))[0]
	require.Equal(t, "hotness", r["event"])
	sources := r["sources"].([]any)
	require.Len(t, sources, 4)
	for _, s := range sources {
		require.Len(t, s.(map[string]any)["sizes"], 2)
	}
	require.Contains(t, ok(t, "cache", "hotness", "g", "--quiet", "--hotness", "degree"), "points below")
	fails(t, hc(t, "cache", "hotness", "g", "--hotness", "presample:0"), 2, "cache hotness",
		"1 to 1024 epochs")
	fails(t, hc(t, "cache", "hotness", "g", "--sizes", "x%"), 2, "cache hotness", "--sizes")
	fails(t, hc(t, "cache", "hotness", "g", "--hotness", "degre"), 2, "cache hotness",
		"did you mean degree")
}
