package main

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/rowtype"
)

// A machine that trains as fast as a run did is planned with, kept, and planned with again.
func TestPlanCalibrates(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "rmat", "--nodes", "4000", "--avg-degree", "8", "--classes", "5",
		"--dim", "128", "--feature-fn", "hash", "--seed", "3", "--train-fraction", "0.2", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "16MiB")
	ok(t, "load", "g")
	run := []string{"--fanout", "3,3", "--batch-size", "128", "--hidden", "128"}
	ok(t, append([]string{"train", "g", "--mode", "inmem", "--epochs", "3", "--no-eval", "--results",
		"run.jsonl"}, run...)...)
	with := func(more ...string) []string {
		return slices.Concat([]string{"plan", "g", "--mode", "inmem", "--json"}, run, more)
	}
	busy := func(more ...string) float64 {
		return lines(t, ok(t, with(more...)...))[0]["busy_seconds"].(map[string]any)["training"].(float64)
	}
	r, err := readTrained("run.jsonl")
	require.NoError(t, err)
	require.Positive(t, r.took.Training)
	// From here on as if this machine trained three times as fast as the profile, whatever it does.
	r.took.Training = busy("--hardware", "host") / 3
	text, err := os.ReadFile("run.jsonl")
	require.NoError(t, err)
	text = regexp.MustCompile(`"train":[0-9.e-]+`).ReplaceAll(text,
		fmt.Appendf(nil, `"train":%g`, r.took.Training))
	require.NoError(t, os.WriteFile("run.jsonl", text, 0o600))
	calibrated := busy("--hardware", "host", "--calibrate", "run.jsonl", "--save-profile", "my.yaml")
	require.InEpsilon(t, r.took.Training, calibrated, 0.011)
	require.Equal(t, calibrated, busy("--hardware", "my.yaml"))
	require.InEpsilon(t, r.took.Training, busy("--hardware", "my.yaml", "--calibrate", "run.jsonl",
		"--save-profile", "again.yaml"), 0.011)
	require.InEpsilon(t, r.took.Training, busy("--hardware", "./again.yaml"), 0.011)

	// A dynamic tier's directory likewise, from a run of the same mode.
	ok(t, append([]string{"train", "g", "--mode", "bam", "--gpu-cache", "10%", "--epochs", "2",
		"--no-eval", "--results", "bam.jsonl"}, run...)...)
	bam := slices.Concat([]string{"plan", "g", "--mode", "bam", "--gpu-cache", "10%", "--json"}, run)
	lookups := func(more ...string) float64 {
		return lines(t, ok(t, slices.Concat(bam, more)...))[0]["busy_seconds"].(map[string]any)["lookup"].(float64)
	}
	of, err := readTrained("bam.jsonl")
	require.NoError(t, err)
	require.Positive(t, of.took.Lookup)
	require.InEpsilon(t, of.took.Lookup, lookups("--hardware", "host", "--calibrate", "bam.jsonl",
		"--save-profile", "bam.yaml"), 0.011)
	require.InEpsilon(t, of.took.Lookup, lookups("--hardware", "./bam.yaml"), 0.011)
	// Lookups of another tier say nothing of this one.
	for flag, value := range map[string]string{"policy": "lru", "mode": "gids", "window": "3"} {
		r := hc(t, slices.Concat(bam, []string{"--hardware", "host", "--calibrate", "bam.jsonl",
			"--" + flag, value, "--save-profile", flag + ".yaml"})...)
		require.Zero(t, r.code, r.errOut)
		require.Contains(t, r.errOut, "bam.jsonl had another --"+flag)
		require.Contains(t, r.errOut, "their time stays as it is")
		require.NotContains(t, readFile(t, flag+".yaml"), "directory_ns")
	}

	fails(t, hc(t, with("--hardware", "host", "--calibrate", "run.jsonl", "--save-profile",
		"my.yaml")...), 4, "plan", "is there already")
	require.NoError(t, os.WriteFile("cut.jsonl", text[:900], 0o600))
	for want, bad := range map[string][]string{
		"ran with --hidden":     with("--hardware", "host", "--calibrate", "run.jsonl", "--hidden", "64"),
		"ran with --fanout":     with("--hardware", "host", "--calibrate", "run.jsonl", "--fanout", "3"),
		"JSON object":           with("--hardware", "host", "--calibrate", "cut.jsonl"),
		"no such file":          with("--hardware", "host", "--calibrate", "none.jsonl"),
		"known graphs are pa, ": {"plan", "--graph", "papers100m", "--hardware", "host"},
		"give the results of":   with("--hardware", "host", "--save-profile", "x.yaml"),
		"a run is of a dataset": {"plan", "--graph", "pa", "--hardware", "host", "--calibrate",
			"run.jsonl"},
	} {
		fails(t, hc(t, bad...), 2, "plan", want)
	}
}

func TestPlanVerb(t *testing.T) {
	isolate(t)
	args := []string{"plan", "--skew", "10%:60%", "--nodes", "50000", "--edges", "500000", "--dim",
		"128", "--train-fraction", "0.05", "--hardware", "a100-p5510x12", "--ssd-count", "2",
		"--fanout", "3,3", "--batch-size", "32", "--batches", "6"}
	with := func(more ...string) []string { return append(append([]string{}, args...), more...) }
	out := ok(t, with("--budget", "10%", "--price", "machine=10,ssd=0.1", "--json", "--results",
		"plan.jsonl")...)
	p := lines(t, out)[0]
	require.Equal(t, "plan", p["event"])
	require.Equal(t, true, p["modelled"])
	require.Equal(t, 79.0, p["batches"])
	require.InEpsilon(t, 10.2/3600*p["seconds"].(float64), p["cost"].(map[string]any)["epoch"], 1e-9)
	require.Equal(t, out, kept(t, "plan.jsonl"))
	require.Contains(t, ok(t, with("--halve", "--quiet")...), "times as fast")

	swept := lines(t, ok(t, with("--sweep", "ssds=1..3", "--json")...))
	require.Len(t, swept, 4)
	for i, l := range swept[:3] {
		require.Equal(t, "point", l["event"])
		require.Equal(t, float64(i+1), l["ssd_count"])
	}
	require.Equal(t, "sweep", swept[3]["event"])
	require.Len(t, swept[3]["seconds"], 3)
	require.Contains(t, ok(t, with("--sweep", "cpu-cache=0,5%", "--quiet")...), "cpu-cache")
	for _, tier := range []string{"gpu-cache", "cpu-cache"} {
		swept = lines(t, ok(t, with("--budget", "1MiB", "--sweep", tier+"=0,256KiB,1MiB", "--json")...))
		for i, size := range []float64{0, 256 << 10, 1 << 20} {
			key := strings.ReplaceAll(tier, "-", "_") + "_bytes"
			require.InDelta(t, size, swept[i][key], 4096, "%s: whole rows", tier)
			require.InDelta(t, 1<<20, swept[i]["gpu_cache_bytes"].(float64)+
				swept[i]["cpu_cache_bytes"].(float64), 2*4096, "%s: the other has the rest", tier)
		}
	}

	ok(t, "generate", "--kind", "rmat", "--nodes", "4000", "--avg-degree", "8", "--classes", "5",
		"--dim", "128", "--feature-fn", "hash", "--seed", "3", "--out", "g")
	require.Contains(t, ok(t, "plan", "g", "--hardware", "a100-p5510x12", "--fanout", "3,3",
		"--quiet"), "samples of dataset g")
	require.NoError(t, os.WriteFile("degrees", []byte("100 50\n2 5000\n"), 0o644))
	require.Contains(t, ok(t, "plan", "--degrees", "degrees", "--hardware", "a100-p5510x12",
		"--fanout", "3,3", "--mode", "cpu", "--quiet"), "5050 nodes, 15 k edges")

	out = ok(t, with("--mode", "marius", "--parts", "8", "--megabatch", "2", "--json")...)
	m := lines(t, out)[0]["megabatches"].(map[string]any)
	require.Equal(t, []any{0.875, "that of random parts", 1.0}, []any{m["cut"], m["cut_source"],
		m["megabatches"]})
	require.Contains(t, ok(t, with("--mode", "hier", "--parts", "8", "--cut", "30%")...), "30% of the edges")
	require.Contains(t, ok(t, "plan", "g", "--hardware", "a100-p5510x12", "--fanout", "3,3", "--mode",
		"hier", "--quiet"), "samples of mega-batches of dataset g")

	for want, bad := range map[string][]string{
		"is for parts":          with("--cut", "30%"),
		"of the edges":          with("--cut", "2", "--mode", "hier"),
		"is partitioned":        {"plan", "g", "--cut", "30%", "--mode", "hier", "--hardware", "host"},
		"give --cut instead":    with("--mode", "hier", "--partition", "x"),
		"whole epochs":          {"plan", "g", "--mode", "hier", "--batches", "3", "--hardware", "host"},
		"no --hardware":         {"plan", "--graph", "ig"},
		"no graph":              {"plan", "--hardware", "host"},
		"is a dataset":          {"plan", "g", "--hardware", "host", "--skew", "zipf:1"},
		"two graphs":            {"plan", "g", "--graph", "ig", "--hardware", "host"},
		"--nodes":               {"plan", "g", "--nodes", "5", "--hardware", "host"},
		"nosuch":                {"plan", "nosuch", "--hardware", "host"},
		"leave --sweep out":     with("--halve", "--sweep", "ssds=1..2"),
		"leave --cpu-cache out": with("--budget", "1%", "--cpu-cache", "1%"),
		"leave --gpu-cache out": with("--budget", "1%", "--gpu-cache", "1%"),
		"one of ssds":           with("--sweep", "hidden=1..2"),
		"price":                 with("--price", "gold=1"),
		"each say what":         {"plan", "--degrees", "x", "--skew", "zipf:1", "--hardware", "host"},
	} {
		fails(t, hc(t, bad...), 2, "plan", want)
	}
}

// A budget of nothing plans for no tiers, and rows of each type are swept by their bytes.
func TestPlanOfNoTierAndOfRowTypes(t *testing.T) {
	isolate(t)
	graph := []string{"plan", "--hardware", "a100-optane", "--skew", "10%:60%", "--nodes", "10000",
		"--edges", "100000", "--dim", "64", "--batch-size", "64", "--fanout", "3,3", "--json"}
	with := func(more ...string) []map[string]any {
		return lines(t, ok(t, slices.Concat(graph, more)...))
	}
	for _, mode := range []string{"helios", "bam", "ginex", "diskgnn"} {
		require.Positive(t, with("--mode", mode, "--budget", "50%")[0]["hit_ratio"], mode)
		require.Zero(t, with("--mode", mode, "--budget", "0")[0]["hit_ratio"], mode)
	}
	for _, dtype := range rowtype.Names() {
		points := with("--row-dtype", dtype, "--sweep", "row-bytes=64,512")
		require.EqualValues(t, 64, points[0]["row_bytes"], dtype)
		require.EqualValues(t, 512, points[1]["row_bytes"], dtype)
	}
}
