package main

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/testing/wide"
	"helios/sched/report"
)

// mostUnaccounted bounds the share of the processor time of a run for which no operator is named.
const mostUnaccounted = 0.4

// The processor time of a run is accounted for by stage and operator: the parts and what is left
// add up to what the kernel counts, and little is left.
func TestProcessorTime(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "rmat", "--nodes", "65536", "--avg-degree", "15", "--dim", "128",
		"--train-fraction", "0.1", "--seed", "3", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img,b.img", "--size", "24MiB")
	ok(t, "load", "g")
	for mode, stages := range map[string][]string{
		"helios": {"sample", "lookup", "submit", "complete", "gather", "train", "software SSDs"},
		"cpu":    {"sample", "lookup", "gather", "train", "read"},
		"inmem":  {"sample", "lookup", "gather", "train"},
		"gids":   {"sample", "lookup", "gather", "train", "software SSDs"},
	} {
		if wide.Lean() && mode != "helios" {
			continue
		}
		out := lines(t, ok(t, "train", "g", "--mode", mode, "--fanout", "10,10", "--batch-size",
			"1024", "--hidden", "64", "--gpu-cache", "25%", "--epochs", "2", "--no-eval",
			"--explain", "--json", "--quiet"))
		var cpu map[string]any
		for _, e := range out {
			if e["event"] == "epoch" {
				cpu = e["cpu"].(map[string]any)
				require.Equal(t, e["batches"], cpu["batches"])
			}
		}
		all, rest := cpu["seconds"].(float64), cpu["unaccounted_seconds"].(float64)
		by, sum, least := map[string]float64{}, rest, all
		for _, p := range cpu["parts"].([]any) {
			p := p.(map[string]any)
			s := p["seconds"].(float64)
			require.NotEmpty(t, p["operator"])
			require.LessOrEqual(t, s, least, "the largest come first")
			by[p["stage"].(string)] += s
			least = s
			sum += s
		}
		for _, s := range stages {
			require.Positive(t, by[s], "%s: %s", mode, s)
		}
		// Threads that run have their last tick not counted yet.
		require.InDelta(t, all, sum, 0.02+0.01*all, mode)
		if mode != "gids" { // which has some 40 %, most likely of waits that yield
			require.Less(t, rest/all, mostUnaccounted, "%s: %v", mode, cpu)
		}
		t.Logf("%s: %.3f s, unaccounted %.1f %%", mode, all, 100*rest/all)
	}
	text := ok(t, "train", "g", "--mode", "helios", "--epochs", "1", "--no-eval", "--explain")
	require.Regexp(t, `software SSDs +io_uring_enter +\d+\.\d +\d+\.\d%`, text)
	require.Regexp(t, `floor: \d+\.\d us a mini-batch by \d+ processors.* took \d+\.\d\d times`,
		text)
	for _, e := range lines(t, ok(t, "train", "g", "--epochs", "1", "--no-eval", "--json", "--quiet")) {
		require.NotContains(t, e, "cpu", "nobody asked")
	}
}

func TestFloor(t *testing.T) {
	r := &report.EpochResult{Batches: 10, Seconds: 0.06, CPU: &report.CPUUse{Batches: 10,
		Seconds: 0.1}}
	require.Equal(t, "floor: 5000.0 us a mini-batch by 2 processors; "+
		"the epoch took 1.20 times the longest", floor(r, 2, 0))
	r.SSDCommands = 4000
	require.Equal(t, "floor: 5000.0 us a mini-batch by 2 processors; no pass took 250ms, to "+
		"measure the SSDs; the epoch took 1.20 times the longest", floor(r, 2, 0))
	require.Equal(t, "floor: 5000.0 us a mini-batch by 2 processors, 4000.0 by SSDs, which gave "+
		"100 k commands a second in some 250ms; the epoch took 1.20 times the longest",
		floor(r, 2, 1e5))
	require.Contains(t, floor(r, 2, 7e4), "the epoch took 1.05 times", "SSDs bound it")
	r.Batches, r.Seconds, r.SSDCommands = 20, 0.12, 8000
	require.Contains(t, floor(r, 2, 7e4), "the epoch took 1.05 times", "of an epoch half of which "+
		"an earlier run has trained")
}

// The SSDs' rate is the fastest of times that are long enough, each within a pass.
func TestFastest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &watch{trainer: &trainer{trainerArgs: &trainerArgs{}}}
		hear := func(pass string, after time.Duration, commands int64) {
			time.Sleep(after)
			w.hear(pass, report.Partial{Commands: commands})
		}
		hear("epoch 1", time.Hour, 100)
		hear("epoch 1", rateTime/2, 1000)
		hear("validate", rateTime, 5000)
		require.Zero(t, w.fastest, "no pass was long enough")
		hear("validate", 2*rateTime, 6000)
		hear("validate", rateTime, 6100)
		require.Equal(t, 1000/(2*rateTime).Seconds(), w.fastest)
		hear("validate", rateTime, 7100)
		require.Equal(t, 1000/rateTime.Seconds(), w.fastest)
	})
}
