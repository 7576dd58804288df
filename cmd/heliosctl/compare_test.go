package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gnn"
	"helios/sched/plan"
	"helios/sched/tiers/hier"
	hierspec "helios/sched/tiers/hier/spec"
)

// Ginex beside the baselines of its paper: flags of superbatches go to what has them.
func TestCompareSuperbatches(t *testing.T) {
	loaded(t, 2)
	out := ok(t, "compare", "g", "--modes", "ginex,pyg+,ali+pg,ginex-pg", "--variants",
		"known=--policy belady --gpu-cache 5%", "--superbatch", "100", "--repeats", "1", "--fanout",
		"5,5", "--batch-size", "256", "--hidden", "16", "--epochs", "1", "--json", "--quiet")
	got := lines(t, out)
	require.Len(t, got, 6)
	for i, want := range []any{"ginex", "mmap", "cpu", "ginex", "helios"} {
		require.Equal(t, want, got[i]["mode"])
		require.Equal(t, got[0]["params_sha256"], got[i]["params_sha256"])
	}
	// Rows that fill static tiers are not an epoch's; those of a superbatch are.
	filled := got[2]["cpu_cache_bytes"].(float64) / (4 * 16)
	require.Positive(t, filled)
	require.Less(t, got[0]["rows_ssd"], got[2]["rows_ssd"].(float64)+filled)
	// Its static cache has the same rows as that of ali+pg, and reads them in the epoch.
	require.Equal(t, got[2]["cpu_cache_bytes"], got[3]["cpu_cache_bytes"])
	require.Greater(t, got[3]["bytes_ssd"], got[2]["bytes_ssd"])
}

// Variants train in turns from the same seed: each run is told, losses agree, and the files are
// whole.
func TestCompare(t *testing.T) {
	loaded(t, 2)
	out := ok(t, "compare", "g", "--modes", "helios,cpu,inmem", "--variants",
		"small=--mode helios --gpu-cache 0 --cpu-cache 0 --pipeline none", "--repeats", "2",
		"--fanout", "5,5", "--batch-size", "256", "--hidden", "16", "--gpu-cache", "5%",
		"--results", "c.jsonl", "--json", "--quiet")
	got := lines(t, out)
	require.Len(t, got, 4*2+1)
	order := ""
	for _, r := range got[:8] {
		require.Equal(t, "run", r["event"])
		require.Equal(t, got[0]["params_sha256"], r["params_sha256"])
		require.Equal(t, got[0]["losses"], r["losses"])
		require.Len(t, r["losses"], 2, "two epochs by default")
		require.Equal(t, 1.0, r["epochs_measured"])
		require.Positive(t, r["epoch_seconds"])
		require.Positive(t, r["cpu_seconds"])
		require.NotEmpty(t, r["bottleneck"])
		order += r["variant"].(string) + " "
	}
	require.Equal(t, "helios cpu inmem small cpu inmem small helios ", order)
	proxied, kernel := got[0], got[1]
	require.Positive(t, proxied["proxy_cpu_seconds"], "software SSDs serve the async stack")
	require.Less(t, kernel["proxy_cpu_seconds"], proxied["proxy_cpu_seconds"].(float64)/2,
		"the cpu stack reads the files itself: only the lease goes through the controllers")
	sum := got[8]
	require.Equal(t, "compare", sum["event"])
	require.Equal(t, true, sum["same_losses"])
	require.Equal(t, "helios", sum["base"])
	vs := sum["variants"].([]any)
	require.Len(t, vs, 4)
	require.Equal(t, map[string]any{"median": 1.0, "min": 1.0, "max": 1.0},
		vs[0].(map[string]any)["ratio"])
	small := vs[3].(map[string]any)
	require.Equal(t, "none", small["pipeline"])
	require.Zero(t, small["rows_gpu"])
	require.Zero(t, small["rows_cpu"])
	require.Zero(t, vs[1].(map[string]any)["rows_gpu"], "--gpu-cache is of no use to mode cpu")
	require.Positive(t, vs[2].(map[string]any)["rows_gpu"])

	ok(t, "report", "c.jsonl", "--out", "c.html")
	html, err := os.ReadFile("c.html")
	require.NoError(t, err)
	require.Equal(t, 4, strings.Count(string(html), "<figure "))
	require.Contains(t, string(html), "</html>")
	require.NotRegexp(t, `(src|href)="[^#]`, string(html), "the page needs nothing from elsewhere")
	require.Equal(t, out, kept(t, "c.jsonl"))
}

// Where both tiers are the CPU's memory every mode has the same sum; what differs is said aloud.
func TestCompareGivesEqualMemory(t *testing.T) {
	loaded(t, 2)
	compare := func(args ...string) map[string]any {
		out := lines(t, ok(t, append([]string{"compare", "g", "--repeats", "1", "--epochs", "1",
			"--fanout", "5,5", "--batch-size", "256", "--hidden", "16", "--json", "--quiet"},
			args...)...))
		return out[len(out)-1]
	}
	caches := func(sum map[string]any) map[string][2]float64 {
		all := map[string][2]float64{}
		for _, v := range sum["variants"].([]any) {
			v := v.(map[string]any)
			gpu, cpu := v["gpu_cache_bytes"].(float64), v["cpu_cache_bytes"].(float64)
			require.Equal(t, gpu+cpu, v["cache_bytes"])
			all[v["name"].(string)] = [2]float64{gpu, cpu}
		}
		return all
	}
	notes := func(sum map[string]any) string { return fmt.Sprint(sum["notes"]) }
	part := func(percent float64) float64 { return percent * 5120 } // of 4000 rows of 128 bytes

	sum := compare("--modes", "helios,gids,bam,cpu,ginex,diskgnn", "--gpu-cache", "5%",
		"--cpu-cache", "15%")
	require.Equal(t, map[string][2]float64{"helios": {part(5), part(15)},
		"gids": {6 * 4096, part(15)}, "bam": {25 * 4096, 0},
		"cpu": {0, part(20)}, "ginex": {0, part(20)}, "diskgnn": {part(5), part(15)}}, caches(sum))
	require.Equal(t, "together", sum["memory_rule"])
	require.Equal(t, true, sum["equal_memory"])
	require.Contains(t, notes(sum), "20% together")
	require.NotContains(t, notes(sum), "UNEQUAL")

	// Mini-batches that were laid out for other tiers are not taken.
	sum = compare("--modes", "helios,diskgnn", "--gpu-cache", "10%", "--cpu-cache", "15%")
	require.Equal(t, map[string][2]float64{"helios": {part(10), part(15)},
		"diskgnn": {part(10), part(15)}}, caches(sum))
	left, err := filepath.Glob("g/*packed*")
	require.NoError(t, err)
	require.Empty(t, left)

	// Defaults are those of the first mode's tiers, and a tier that no mode has counts for none.
	require.Equal(t, map[string][2]float64{"helios": {part(5), part(10)}, "cpu": {0, part(15)}},
		caches(compare("--modes", "helios,cpu")))
	require.Equal(t, map[string][2]float64{"cpu": {0, part(10)}, "ginex": {0, part(10)}},
		caches(compare("--modes", "cpu,ginex", "--gpu-cache", "5%")))

	// All rows in memory, and the page cache, are bounds; parts have a least size.
	sum = compare("--modes", "cpu,inmem,mmap,hier", "--cpu-cache", "10%")
	require.Equal(t, false, sum["equal_memory"])
	require.Contains(t, notes(sum), "NOT AT EQUAL MEMORY: inmem, mmap")
	require.Contains(t, notes(sum), "UNEQUAL MEMORY, GPU + CPU tier: cpu 0 B + 50 KiB; hier 0 B + 16 MiB")

	// A variant that sizes a tier keeps it; one that does not has what the others have.
	sum = compare("--variants",
		"a=--mode helios --gpu-cache 10% --cpu-cache 10%; b=--mode cpu --cpu-cache 10%; c=--mode cpu",
		"--cpu-cache", "20%")
	require.Equal(t, map[string][2]float64{"a": {part(10), part(10)}, "b": {0, part(10)},
		"c": {0, part(20)}}, caches(sum))
	require.Equal(t, false, sum["equal_memory"])
	require.Contains(t, notes(sum), "UNEQUAL MEMORY, GPU + CPU tier: a 50 KiB + 50 KiB; b 0 B + 50 KiB; c 0 B + 100 KiB")

	// A GPU's memory is another kind.
	sum = compare("--modes", "helios,cpu", "--gpu-cache", "5%", "--cpu-cache", "5%", "--clock",
		"virtual", "--hardware", "a100-optane")
	require.Equal(t, map[string][2]float64{"helios": {part(5), part(5)}, "cpu": {0, part(5)}},
		caches(sum))
	require.Equal(t, "apart", sum["memory_rule"])
	require.Contains(t, notes(sum), "are apart")
	require.Contains(t, notes(sum), "UNEQUAL MEMORY")
	require.Equal(t, map[string][2]float64{"helios": {part(5), part(5)}, "cpu": {0, part(10)}},
		caches(compare("--modes", "helios,cpu", "--gpu-cache", "5%", "--cpu-cache", "5%", "--clock",
			"virtual", "--hardware", "host")))
}

// A variant that cannot run is refused before anything runs, whichever place it has.
func TestCompareChecksAllFirst(t *testing.T) {
	loaded(t, 1)
	for want, args := range map[string][]string{
		"variant ginex-pg: --clock virtual plays superbatches": {"--modes", "helios,cpu,ginex-pg",
			"--clock", "virtual", "--hardware", "a100-optane"},
		"variant hier: --clock virtual partitions": {"--modes", "helios,hier", "--clock", "virtual",
			"--hardware", "a100-optane", "--topology", "ssd"},
		"variant b: --gpu-cache 300000000000 asks for": {"--variants",
			"a=--mode cpu; b=--gpu-cache 300GB", "--clock", "virtual", "--hardware", "a100-optane"},
		"variant b: --cpu-cache 300000000000000 asks for": {"--variants",
			"a=--mode cpu; b=--cpu-cache 300TB"},
	} {
		r := hc(t, append([]string{"compare", "g", "--fanout", "5", "--hidden", "8"}, args...)...)
		require.Contains(t, []int{2, 3}, r.code, want)
		require.Contains(t, r.errOut, want)
		require.NotContains(t, r.out+r.errOut, " an epoch\n", "%s: something ran", want)
	}
}

// On the virtual clock each variant is played once and nothing is called measured.
func TestCompareVirtual(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "rmat", "--nodes", "2000", "--avg-degree", "8", "--classes", "5",
		"--dim", "128", "--feature-fn", "hash", "--seed", "3", "--out", "g")
	args := []string{"compare", "g", "--modes", "helios,bam,gids,mmap", "--clock", "virtual",
		"--hardware", "a100-p5510x12", "--ssd-count", "2",
		"--fanout", "5,5", "--batch-size", "256", "--gpu-cache", "5%", "--results", "c.jsonl", "--quiet", "--overwrite"}
	got := lines(t, ok(t, append(args, "--json")...))
	require.Len(t, got, 5)
	for _, r := range got {
		require.Equal(t, true, r["modelled"])
		require.NotContains(t, r, "losses")
	}
	require.Equal(t, "a100-p5510x12", got[4]["hardware"])
	require.Equal(t, false, got[4]["same_losses"])
	ok(t, "report", "c.jsonl", "--out", "c.html")
	html, err := os.ReadFile("c.html")
	require.NoError(t, err)
	require.Contains(t, string(html),
		"Modelled: all times are those of hardware profile a100-p5510x12.")
	for _, r := range got[:4] {
		require.GreaterOrEqual(t, r["overlap"], 0.0, r["variant"])
	}
	text := ok(t, args...)
	closing := strings.Split(strings.TrimSpace(text), "\n")
	closing = closing[len(closing)-4:]
	require.Regexp(t, "^mmap  ", closing[0], "behind the table there are three lines")
	require.Contains(t, closing[1], "is the fastest")
	require.Contains(t, closing[2], "all times are modelled, of hardware profile a100-p5510x12; ")
	require.Regexp(t, `^bottleneck of \w+: .*\(--explain: the others, and \d+ notes\)$`, closing[3])
	require.NotContains(t, text, "directory")
	require.Contains(t, ok(t, "compare", "g", "--modes", "bam,gids", "--clock", "virtual",
		"--hardware", "a100-p5510x12", "--fanout", "5", "--quiet", "--directory", "queues", "--explain"),
		"bam, gids: one core looks rows up in the directory of the GPU tier")
	require.Equal(t, 2, hc(t, append(args, "--repeats", "3")...).code)
}

func TestCompareArguments(t *testing.T) {
	runBad(t, []badCase{
		{"one mode", nil, "compare g --modes helios", 2, []string{"--modes", "at least two"}, ""},
		{"a mode twice", nil, "compare g --modes helios,cpu,helios", 2,
			[]string{"helios", "name of its own"}, ""},
		{"unknown mode", nil, "compare g --modes helios,helois", 2,
			[]string{"did you mean helios"}, ""},
		{"variant without a name", nil, "compare g --variants --mode=bam", 2,
			[]string{"--variants", "NAME=FLAGS"}, ""},
		{"no repeats", nil, "compare g --repeats 0", 2, []string{"--repeats"}, ""},
		{"a superbatch of another policy", nil, "train g --superbatch 5", 2,
			[]string{"--superbatch", "--policy belady"}, ""},
		{"a superbatch without room", nil, "train g --policy belady --superbatch-disk 0", 2,
			[]string{"--superbatch-disk 0", "more"}, ""},
		{"a superbatch of no size", nil, "train g --policy belady --superbatch 0", 2,
			[]string{"--superbatch 0", "auto"}, ""},
		{"bad line", nil, "train g --cache-line wide", 2, []string{"--cache-line", "row"}, ""},
		{"all of the peak", nil, "train g --accumulate 1", 2, []string{"--accumulate", "0.95"}, ""},
		{"policy of no tier", nil, "train g --mode cpu --policy lru", 2,
			[]string{"--policy lru", "--gpu-cache"}, ""},
		{"epochs that nobody counts", nil, "train g --hotness degree --presample-epochs 3", 2,
			[]string{"--presample-epochs", "degree"}, ""},
		{"window below none", nil, "train g --window -1", 2, []string{"--window"}, ""},
		{"no such hotness", nil, "train g --hotness pagerink", 2,
			[]string{"--hotness", "did you mean pagerank"}, ""},
		{"neighbour cache of what is in memory", nil, "train g --neighbor-cache 1GiB", 2,
			[]string{"--neighbor-cache", "--topology ssd"}, ""},
		{"unknown tuning", nil, "train g --tune fast", 2, []string{"--tune", "quick"}, ""},
	})
	for _, c := range []struct{ flags, want string }{
		{"a=--mod bam;b=", "did you mean --mode"},
		{"a=--window x;b=", "whole number"},
		{"a=stray;b=", "is no flag"},
		{"a=--timeline t.json;b=", "unknown flag --timeline"},
		{"a=;b=--no-edges", "--no-edges is the same for all runs"},
		{"a=--kernels generic;b=", "--kernels is the same for all runs"},
		{"a=;b=--mode inmem --policy lru", "variant b: --policy lru"}, // before any of them runs
	} {
		r := hc(t, "compare", "g", "--variants", c.flags)
		require.Equal(t, 2, r.code, c.flags)
		require.Contains(t, r.errOut, c.want)
	}
}

// The bottleneck names the stage that an epoch's time went into.
func TestBottleneck(t *testing.T) {
	r := comparedRun{Seconds: 10, Stall: 0.05}
	r.Stages.Train = 9.5
	require.Equal(t, "training: it waits 5% of the time", bottleneck(r, 2))
	r.Stall, r.Overlap, r.Stages.Complete, r.BytesSSD = 0.6, 0.4, 9.7, 10<<30
	require.Equal(t, "the SSDs: reads are in flight 97% of the time, 1 GiB/s", bottleneck(r, 2))
	r.CPUSeconds, r.ProxySeconds = 19, 5
	require.Contains(t, bottleneck(r, 2),
		"the CPUs, which play what is not there, are busy 95% of the time (software SSDs 25%)")
	r.CPUSeconds, r.Overlap, r.Stages.Complete = 5, 0.0, 5
	require.Equal(t, "nothing overlaps: training waits 60% of the time, longest for the SSDs (50%)",
		bottleneck(r, 2))
	r.Overlap, r.Stages.Sample = 0.5, 9.9
	require.Equal(t, "sampling: 99% of the time", bottleneck(r, 2))
	require.Equal(t, "nothing was measured", bottleneck(comparedRun{}, 2))
}

// TestResultKey: a default that was typed makes no other run, and seed 0 does.
func TestResultKey(t *testing.T) {
	none := resultKey(plan.Config{})
	require.Equal(t, none, resultKey(plan.Config{}.WithDefaults()))
	require.Equal(t, none,
		resultKey(plan.Config{ModelSettings: gnn.ModelSettings{Model: gnn.DefaultArch}, Seed: 1,
			Batch: 1024}))
	require.NotEqual(t, none, resultKey(plan.Config{SeedZero: true}))
	require.NotEqual(t, none, resultKey(plan.Config{Seed: 2}))
	require.NotEqual(t, none, resultKey(plan.Config{Shards: 2}))
	// Mega-batches sample from other graphs, each from its own.
	keys := []string{none, resultKey(plan.Config{Mode: hier.ModeHier}),
		resultKey(plan.Config{MegaSettings: hierspec.MegaSettings{Passes: 2}, Mode: hier.ModeHier}),
		resultKey(plan.Config{Mode: hier.ModeMarius})}
	require.Len(t, slices.Compact(slices.Sorted(slices.Values(keys))), len(keys))
}

// TestHelpNamesHelp: the help of a verb names the flags of every verb.
func TestHelpNamesHelp(t *testing.T) {
	for _, verb := range []string{"train", "compare", "verify"} {
		require.Contains(t, ok(t, verb, "--help"),
			"\nEvery verb has --state, --json, --quiet, --log-format, --config, --help: see heliosctl --help.\n")
	}
}
