package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/ssdmodel"
)

const slowYAML = `name: mine
title: a slow SSD of mine
read: {latency: {quantiles: [{q: 1, us: 3000}], source: mine}}
write: {latency: {quantiles: [{q: 1, us: 3000}], source: mine}}
flush: {latency: {quantiles: [{q: 1, us: 3000}], source: mine}}
`

// TestSSDModels: an SSD keeps the model that it was bound with, over RAM and files, commands take
// the time of the model, and a model file that is gone is named together with the next step.
func TestSSDModels(t *testing.T) {
	isolate(t)
	require.NoError(t, os.WriteFile("mine.yaml", []byte(slowYAML), 0o600))
	abs, err := filepath.Abs("mine.yaml")
	require.NoError(t, err)
	require.Contains(t, ok(t, "bind-ssds", "--proxy-ram", "1", "--size", "4MiB", "--ssd-model",
		"optane"), "optane")
	t.Cleanup(func() { ok(t, "unbind-ssds", "--delete") })
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "4MiB", "--ssd-model", "mine.yaml")
	ok(t, "bind-ssds", "--proxy", "b.img", "--size", "4MiB")

	rows := lines(t, ok(t, "ssds", "--json"))
	require.Equal(t, []any{"optane", abs, nil}, []any{rows[0]["ssd_model"], rows[1]["ssd_model"],
		rows[2]["ssd_model"]})
	require.Equal(t, "Helios proxy SSD (memory)", rows[0]["model"],
		"the controller's own name stays")
	out := ok(t, "ssds")
	require.Contains(t, out, "modelled")
	require.Contains(t, out, "optane is modelled: Intel Optane SSD P5800X")
	require.Contains(t, out, "reads: 11µs, 1.5 M IOPS of 4 KiB, 7.2 GB/s")
	require.Contains(t, out, "mine.yaml is modelled: a slow SSD of mine; reads: 3ms")

	rows = lines(t, ok(t, "bench", "io", "--io-stack", "async", "--io-blocks", "1", "--ssd-count", "2",
		"--seconds", "0.1", "--json"))
	require.Equal(t, true, rows[0]["audited"], rows[0]["audit_error"])
	require.GreaterOrEqual(t, rows[0]["p99_us"], 3000.0, "half of the reads are the slow SSD's")

	require.NoError(t, os.Rename("mine.yaml", "gone.yaml"))
	r := hc(t, "ssds")
	require.Equal(t, 5, r.code)
	require.Contains(t, r.out, "optane")
	require.Contains(t, r.out, "unbind-ssds ssd1")
	fails(t, hc(t, "bench", "io", "--ssd-count", "2", "--io-stack", "async"), 2, "bench io", abs,
		"unbind-ssds ssd1")
}

func TestBadSSDModels(t *testing.T) {
	runBad(t, []badCase{
		{"unknown", nil, "bind-ssds --proxy a.img --size 1MiB --ssd-model p4800", 2,
			append(ssdmodel.Names(), "--ssd-model", "p4800"), "a.img"},
		{"empty", nil, "bind-ssds --proxy a.img --size 1MiB --ssd-model=", 2,
			[]string{"--ssd-model", "p5510"}, "a.img"},
		{"blocks", nil, "bind-ssds --proxy a.img --size 1MiB --lba 4096 --ssd-model 980pro", 2,
			[]string{"980pro", "--lba", "4096"}, "a.img"},
		{"too large", func(t *testing.T) {
			require.NoError(t,
				os.WriteFile("m.yaml",
					[]byte(slowYAML+"capacity: {bytes: 2097152, source: mine}\n"), 0o600))
		}, "bind-ssds --proxy a.img --size 4MiB --ssd-model m.yaml", 2, []string{"a.img has 4 MiB",
			"mine 2 MiB"}, "a.img"},
		{"not a model", func(t *testing.T) {
			require.NoError(t,
				os.WriteFile("m.yaml",
					[]byte("name: x\nread: {latency: {quantiles: [{q: 1, us: 5}]}}\n"), 0o600))
		}, "bind-ssds --proxy a.img --size 1MiB --ssd-model m.yaml", 2, []string{"m.yaml", "read",
			"no source"}, "a.img"},
	})
}

// Results of a run over SSDs that play a model say so, except where the stack reads the files
// itself.
func TestRunsOverModelledSSDsSaySo(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "300", "--dim", "16", "--out", "g", "--quiet")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB", "--ssd-model", "optane")
	ok(t, "load", "g", "--quiet")
	model := func(args ...string) any {
		r := last(t, ok(t, append(args, "g", "--json", "--quiet", "--batch-size", "64", "--fanout",
			"3,3")...))
		return r["io"].(map[string]any)["ssds"].([]any)[0].(map[string]any)["ssd_model"]
	}
	require.Equal(t, "optane", model("train", "--checkpoint", "ck", "--hidden", "8"))
	require.Equal(t, "optane", model("train", "--io-stack", "sync", "--hidden", "8"))
	require.Equal(t, "optane", model("eval", "--checkpoint", "ck"))
	require.Equal(t, "optane", model("predict", "--checkpoint", "ck"))
	require.Nil(t, model("train", "--mode", "cpu", "--hidden", "8"))
	require.Nil(t, model("train", "--mode", "mmap", "--hidden", "8"))
	require.Regexp(t, `modelled SSDs +they play optane`, ok(t, "eval", "g", "--checkpoint", "ck",
		"--quiet"))
}
