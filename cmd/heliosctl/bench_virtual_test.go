package main

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBenchVirtual: a sweep over ranges without any SSD, the same each time, with the word modelled
// in every line of results.
func TestBenchVirtual(t *testing.T) {
	isolate(t)
	args := []string{"bench", "io", "--clock", "virtual", "--hardware", "a100-p5510x12", "--ssd-count",
		"1..2,4", "--io-blocks", "8,32", "--io-stack", "async,sync", "--seconds", "0.002",
		"--depth", "64"}
	out := ok(t, append(args, "--json", "--timeline", "t.json", "--results", "r.jsonl")...)
	require.Equal(t, out, ok(t, append(args, "--json")...))
	rows := lines(t, out)
	require.Len(t, rows, 12+6)
	var ssds []float64
	for i, r := range rows {
		require.Equal(t, true, r["modelled"])
		if i >= 12 {
			require.Equal(t, "summary", r["kind"])
			continue
		}
		require.Equal(t, "virtual", r["clock"])
		require.Equal(t, "p5510", r["ssd_model"])
		require.Equal(t, true, r["audited"], r["audit_error"])
		require.Len(t, r["per_ssd"], int(r["ssds"].(float64)))
		ssds = append(ssds, r["ssds"].(float64))
	}
	require.Equal(t, []float64{1, 1, 2, 2, 4, 4}, ssds[:6])
	require.Equal(t, out, kept(t, "r.jsonl"))
	trace, err := os.ReadFile("t.json")
	require.NoError(t, err)
	require.True(t, json.Valid(trace))
	require.Contains(t, string(trace), "every time is modelled")
	require.Contains(t, string(trace), "async, 4 SSDs, 32 blocks, row 4096, depth 64")
	for _, l := range strings.Split(strings.TrimSpace(ok(t, args...)), "\n") {
		if !strings.HasPrefix(l, "SSDs ") {
			require.Contains(t, l, "modelled")
		}
	}
}

// TestBenchModel: software SSDs that play a model in wall time.
func TestBenchModel(t *testing.T) {
	isolate(t)
	ok(t, "bind-ssds", "--proxy-ram", "1", "--size", "4MiB")
	t.Cleanup(func() { ok(t, "unbind-ssds", "--delete") })
	args := []string{"bench", "io", "--ssd-model", "slow", "--depth", "16", "--row-bytes", "512",
		"--coalesce", "off", "--seconds", "0.4", "--json"}
	r := lines(t, ok(t, args...))[0]
	require.Equal(t, true, r["audited"], r["audit_error"])
	require.Equal(t, "slow", r["ssd_model"])
	require.Equal(t, true, r["ssds_modelled"])
	require.Equal(t, false, r["modelled"])
	require.Equal(t, 1.0, r["commands_per_row"])
	require.GreaterOrEqual(t, r["p50_us"], 170.)
	require.Contains(t, ok(t, "bench", "io", "--ssd-model", "slow", "--seconds", "0.1"),
		"slow (modelled)")
}

// TestBenchFails: a row that fails its audit is printed as failed, beside others, and the verb
// fails.
func TestBenchFails(t *testing.T) {
	isolate(t)
	data := make([]byte, 4<<20)
	_, err := rand.NewChaCha8([32]byte{1}).Read(data)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile("ssd.img", data, 0o600))
	ok(t, "bind-ssds", "--proxy", "ssd.img")
	t.Cleanup(func() { ok(t, "unbind-ssds") })
	r := hc(t, "bench", "io", "--ssd-count", "1", "--io-stack", "async,cpu", "--coalesce", "off",
		"--seconds", "0.05", "--depth", "16", "--fault", "misdirect(op=read,shift=8)")
	require.Equal(t, 5, r.code, r.errOut)
	require.Contains(t, r.out, "FAILED: row")
	require.Contains(t, r.out, "passed")
	require.Contains(t, r.errOut, "1 of 2 rows failed")
	healed := lines(t, ok(t, "bench", "io", "--ssd-count", "1", "--coalesce", "off", "--seconds", "0.05",
		"--depth", "16", "--fault", "error(op=read,sct=0,sc=0x06,after=50,times=2)", "--json"))[0]
	require.Equal(t, true, healed["audited"], healed["audit_error"])
	require.Equal(t, 2.0, healed["retries"])
}

// TestBenchCoalesce: rows of an eighth of a block, read each by itself and together.
func TestBenchCoalesce(t *testing.T) {
	isolate(t)
	ok(t, "bind-ssds", "--proxy-ram", "1", "--size", "4MiB", "--lba", "4096")
	t.Cleanup(func() { ok(t, "unbind-ssds", "--delete") })
	rows := lines(t, ok(t, "bench", "io", "--row-bytes", "512", "--coalesce", "off,auto",
		"--seconds", "0.05", "--json"))
	require.Len(t, rows, 2)
	off, auto := rows[0], rows[1]
	require.Equal(t, true, off["audited"], off["audit_error"])
	require.Equal(t, true, auto["audited"], auto["audit_error"])
	require.Equal(t, 1.0, off["commands_per_row"])
	require.Equal(t, 8.0, off["read_amplification"])
	require.Less(t, auto["commands_per_row"], 0.9)
	require.Less(t, auto["read_amplification"], 8.0)
}

// TestBenchChecked: every row of a dataset against its checksum, on each stack; wrong ones fail the
// row.
func TestBenchChecked(t *testing.T) {
	loaded(t, 2)
	args := []string{"bench", "io", "g", "--check-reads", "--depth", "16", "--seconds", "0.05",
		"--json"}
	for _, r := range lines(t, ok(t, append(args, "--io-stack", "async,sync,cpu,mmap", "--threads",
		"32")...))[:4] {
		require.Equal(t, true, r["audited"], r["audit_error"])
		require.Equal(t, true, r["all_rows_checked"])
		require.Equal(t, true, r["content_varies"])
		require.Positive(t, r["commands_per_row"])
	}
	r := hc(t, append(args, "--fault", "flip(op=read,byte=1,after=400)", "--coalesce", "off")...)
	require.Equal(t, 5, r.code)
	require.Contains(t, r.out, "wrong data: CRC32C")
}

func TestBenchVirtualBadInput(t *testing.T) {
	v := "bench io --clock virtual --hardware host "
	runBad(t, []badCase{
		{"no hardware", nil, "bench io --clock virtual", 2,
			[]string{"--hardware", "a100-p5510x12"}, ""},
		{"unknown hardware", nil, "bench io --clock virtual --hardware abacus", 2,
			[]string{"abacus"}, ""},
		{"unknown clock", nil, "bench io --clock sun", 2, []string{"--clock", "wall, virtual"}, ""},
		{"hardware in wall time", nil, "bench io --hardware host", 2,
			[]string{"--hardware", "--clock virtual"}, ""},
		{"fault", nil, v + "--fault lost(op=read)", 2, []string{"--fault", "--clock wall"}, ""},
		{"dataset", nil, v + "--dataset d", 2, []string{"--dataset", "--row-bytes"}, ""},
		{"dataset as argument", nil, v + "d", 2, []string{"--dataset", "nothing is loaded"}, ""},
		{"device", nil, v + "--device host", 2, []string{"--device", "profile"}, ""},
		{"backward range", nil, v + "--ssd-count 4..1", 2, []string{"--ssd-count", "1..12"}, ""},
		{"endless range", nil, v + "--ssd-count 1..99999", 2, []string{"--ssd-count", "at most"}, ""},
		{"half a range", nil, v + "--io-blocks 1..", 2, []string{"--io-blocks"}, ""},
		{"too many rows", nil, v + "--io-blocks 1..200 --depth 1..200", 2,
			[]string{"40000 combinations"}, ""},
		{"too many SSDs", nil, v + "--ssd-count 2000", 2, []string{"2000 SSDs"}, ""},
		{"model and latency", nil, v + "--ssd-model slow --ssd-latency 1ms", 2,
			[]string{"--ssd-model", "--ssd-latency"}, ""},
		{"unknown model", nil, v + "--ssd-model fast", 2, []string{"--ssd-model", "p5510"}, ""},
		{"model past the controller", nil, "bench io --ssd-model slow --io-stack async,cpu", 2,
			[]string{"--ssd-model", "--io-stack cpu"}, ""},
		{"bad --coalesce", nil, v + "--coalesce off,some", 2, []string{"--coalesce", "auto"}, ""},
		{"no --coalesce", nil, v + "--coalesce=", 2, []string{"--coalesce", "auto"}, ""},
		{"checks without a dataset", func(t *testing.T) {
			ok(t, "bind-ssds", "--proxy-ram", "1", "--size", "1MiB")
			t.Cleanup(func() { ok(t, "unbind-ssds", "--delete") })
		}, "bench io --check-reads", 2, []string{"--check-reads", "dataset"}, ""},
		{"timeline in no folder", nil, v + "--timeline no/where.json", 2,
			[]string{"--timeline", "folder"}, "no/where.json"},
	})
}
