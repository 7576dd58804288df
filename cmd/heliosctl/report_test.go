package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each verb's own results are figures of the page.
func TestReport(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "600", "--dim", "16", "--classes", "3", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "4MiB")
	ok(t, "load", "g")
	small := []string{"--hidden", "8", "--batch-size", "128", "--fanout", "3,3", "--gpu-cache", "10%",
		"--quiet"}
	for _, seed := range []string{"1", "2"} {
		ok(t, append([]string{"train", "g", "--epochs", "2", "--seed", seed, "--results",
			"t" + seed + ".jsonl"}, small...)...)
	}
	ok(t, append([]string{"compare", "g", "--modes", "helios,inmem", "--epochs", "1", "--repeats", "1",
		"--results", "c.jsonl"}, small...)...)
	ok(t, "bench", "io", "--clock", "virtual", "--hardware", "a100-p5510x12", "--ssd-count", "1,2",
		"--seconds", "0.002", "--results", "io.jsonl", "--quiet")
	files := []string{"t1.jsonl", "t2.jsonl", "c.jsonl", "io.jsonl"}
	require.Contains(t, ok(t, append([]string{"report", "--out", "all.html"}, files...)...),
		"all.html: 4 files of results")
	page := readFile(t, "all.html")
	for _, want := range []string{"Loss by epoch", "bands go from the least to the most",
		"Comparison: c.jsonl", "Time of an epoch", "Throughput by SSDs", "limit of the SSDs", "limit of the link",
		"Latencies", "heliosctl train g --epochs 2"} {
		require.Contains(t, page, want)
	}
	require.Equal(t, 4, strings.Count(page, "<td>whole</td>"))

	results := readFile(t, "t1.jsonl")
	fails(t, hc(t, "report", "--out", "t1.jsonl", "--overwrite", "t1.jsonl"), 2, "report",
		"one of the files of results")
	require.Equal(t, results, readFile(t, "t1.jsonl"))
	fails(t, hc(t, "report", "--out", "all.html", "t1.jsonl"), 4, "report", "all.html is there already")
	require.Equal(t, page, readFile(t, "all.html"))
	require.NoError(t, os.WriteFile("cut.jsonl", []byte(strings.SplitAfter(readFile(t, "t1.jsonl"),
		"\n")[0]+`{"event":"epo`), 0o600))
	r := hc(t, "report", "--out", "cut.html", "cut.jsonl")
	require.Zero(t, r.code, r.errOut)
	require.Contains(t, r.errOut, "did not come to its end")
	require.Contains(t, readFile(t, "cut.html"), "its last line is cut off")
	for _, c := range []struct{ args, says string }{
		{"report --out x.html", "no FILE"}, {"report t1.jsonl", "no --out"},
		{"report --out x.html missing", "missing"}, {"report --out x.html a.img", "line 1"},
	} {
		fails(t, hc(t, strings.Fields(c.args)...), 2, "report", c.says)
		require.NoFileExists(t, "x.html")
	}
	require.NoError(t, os.WriteFile("bad.jsonl", []byte(`{"event":"epoch","epoch":"x"}`), 0o600))
	r = hc(t, "report", "--quiet", "--out", "x.html", "bad.jsonl")
	fails(t, r, 2, "report", "bad.jsonl: an event")
	require.NotContains(t, r.errOut, "free some space", "it is not the disk")
	require.NoFileExists(t, "x.html")
}
