package main

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// A run has statistics of each SSD, and leaves a timeline, also when it fails.
func TestTrainReportsItsReads(t *testing.T) {
	loaded(t, 2)
	out := ok(t, trainArgs("--epochs", "1", "--timeline", "t.json", "--on-ssd-failure", "stop",
		"--io-stack", "sync")...)
	io := last(t, out)["io"].(map[string]any)
	require.Len(t, io["ssds"], 2)
	for _, k := range []string{"name", "commands", "bytes", "errors", "timeouts", "retries",
		"resets", "given_up"} {
		require.Contains(t, io["ssds"].([]any)[0], k)
	}
	require.Contains(t, io["latency_us"], "p99")
	events := func(file string) int {
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		var tr struct {
			Events []any `json:"traceEvents"`
		}
		require.NoError(t, json.Unmarshal(b, &tr))
		return len(tr.Events)
	}
	require.Greater(t, events("t.json"), 50)
	fails(t, hc(t, trainArgs("--timeline", "./r.json", "--results", "r.json")...), 2, "train",
		"both name ./r.json")
	require.NoFileExists(t, "r.json")
	text := ok(t, "train", "g", "--epochs", "1", "--fanout", "5", "--quiet", "--coalesce", "16KiB")
	require.Contains(t, text, "read latency")
	require.Contains(t, text, "SSD balance")

	r := hc(t, trainArgs("--timeline", "f.json", "--gpu-cache", "0", "--cpu-cache", "0", "--fault",
		"error(op=read,sct=2,sc=0x81,dnr=1,after=50)")...)
	require.Equal(t, int(errs.Device), r.code)
	require.Greater(t, events("f.json"), 5)
}

// A controller that stops is reset, and nothing but the counters shows it; with "stop" it is given
// up at once, and the run ends with what each SSD did.
func TestOnSSDFailure(t *testing.T) {
	loaded(t, 2)
	args := trainArgs("--epochs", "1", "--read-timeout", "500ms", "--gpu-cache", "0",
		"--cpu-cache", "0")
	sha := last(t, ok(t, args...))["params_sha256"]
	fault := []string{"--fault", "cfs(op=read,after=20,times=1)"}
	healed := last(t, ok(t, append(append(args, fault...), "--on-ssd-failure", "retry=2")...))
	require.Equal(t, sha, healed["params_sha256"])
	resets := 0.0
	for _, s := range healed["io"].(map[string]any)["ssds"].([]any) {
		resets += s.(map[string]any)["resets"].(float64)
	}
	require.Equal(t, 1.0, resets)

	r := hc(t, append(append(args, fault...), "--on-ssd-failure", "stop")...)
	require.Equal(t, int(errs.Device), r.code)
	require.Contains(t, r.errOut, "was given up")
	given := 0
	for _, l := range lines(t, r.out) {
		if l["event"] != "io" {
			continue
		}
		for _, s := range l["ssds"].([]any) {
			if s.(map[string]any)["given_up"] != "" {
				given++
			}
		}
	}
	require.Equal(t, 1, given)
	text := hc(t,
		append(append([]string{"train", "g", "--epochs", "1", "--quiet", "--batch-size", "256",
			"--gpu-cache", "0", "--cpu-cache", "0"}, fault...), "--on-ssd-failure", "stop")...)
	require.Contains(t, text.out, "given up")
}

// Stripes of one SSD are healed by one reset, or given up together.
func TestOnSSDFailureOfStripes(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "20000", "--avg-degree", "8", "--classes", "5",
		"--dim", "48", "--seed", "3", "--out", "g")
	for name, mib := range map[string]int64{"a.img": 14, "b.img": 4} {
		require.NoError(t, os.WriteFile(name, nil, 0o600))
		require.NoError(t, os.Truncate(name, mib<<20))
	}
	ok(t, "bind-ssds", "--proxy", "a.img,b.img")
	require.Contains(t, ok(t, "load", "g"), "stripes on 2 SSDs")
	args := trainArgs("--epochs", "1", "--read-timeout", "500ms", "--gpu-cache", "0",
		"--cpu-cache", "0")
	sha := last(t, ok(t, args...))["params_sha256"]
	args = append(args, "--fault", "cfs(op=read,after=300,times=1)", "--on-ssd-failure")
	healed := last(t, ok(t, append(args, "retry=2")...))
	require.Equal(t, sha, healed["params_sha256"])
	resets := 0.0
	for _, s := range healed["io"].(map[string]any)["ssds"].([]any) {
		resets += s.(map[string]any)["resets"].(float64)
	}
	require.Equal(t, 1.0, resets)
	r := hc(t, append(args, "stop")...)
	require.Equal(t, int(errs.Device), r.code)
	require.Contains(t, r.errOut, "was given up")
}

// A bit that flips on its way from the SSD is caught and mended with --check-reads; the parameters
// are those of a run without faults.
func TestCheckReadsMends(t *testing.T) {
	isolate(t)
	// rows of one LBA
	ok(t, "generate", "--kind", "sbm", "--nodes", "2000", "--avg-degree", "8", "--classes", "5",
		"--dim", "128", "--seed", "3", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img,b.img", "--size", "8MiB")
	ok(t, "load", "g")
	args := trainArgs("--epochs", "1", "--coalesce", "off", "--gpu-cache", "0", "--cpu-cache", "0")
	sha := last(t, ok(t, args...))["params_sha256"]
	r := last(t,
		ok(t, append(args, "--check-reads", "--fault",
			"flip(op=read,byte=99,bit=6,after=150,times=1)")...))
	require.Equal(t, sha, r["params_sha256"])
	require.Equal(t, 1.0, r["io"].(map[string]any)["rows_mismatched"])
}
