package main

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// killLoads begins a load so often and kills it, each a little later than the one before; then
// comes then.
func killLoads(t *testing.T, dataset string, times int, first time.Duration, then func()) {
	for i := range times {
		c := child(t, "load", dataset, "--mark-every", "1ms")
		require.NoError(t, c.Start())
		time.Sleep(first + time.Duration(i)*10*time.Millisecond)
		_ = c.Process.Kill()
		_ = c.Wait()
		then()
	}
}

// TestTwoDatasetsOnOnePair: two datasets on a pair of SSDs train side by side as they train alone;
// a load of the second that is killed leaves the first whole; what is unloaded is gone.
func TestTwoDatasetsOnOnePair(t *testing.T) {
	loaded(t, 2)
	ok(t, "generate", "--nodes", "20000", "--classes", "4", "--dim", "48", "--seed", "9", "--out", "h")
	args := func(g string) []string {
		return []string{"train", g, "--mode", "helios", "--fanout", "5,5", "--batch-size", "128",
			"--hidden", "16", "--epochs", "4", "--gpu-cache", "5%", "--cpu-cache", "0", "--json", "--quiet"}
	}
	alone := last(t, ok(t, args("g")...))["params_sha256"]
	killLoads(t, "h", 12, 20*time.Millisecond, func() {
		require.Contains(t, ok(t, "verify", "g", "--source"), "4000 rows equal to the source")
	})
	ok(t, "load", "h")
	require.Contains(t, ok(t, "verify", "h", "--source"), "20000 rows equal to the source")
	require.Equal(t, alone, last(t, ok(t, args("g")...))["params_sha256"])
	other := last(t, ok(t, args("h")...))["params_sha256"]
	g, h := child(t, args("g")...), child(t, args("h")...)
	done := make(chan outcome)
	go func() { done <- finishChild(t, g) }()
	second := finishChild(t, h)
	first := <-done
	require.Zero(t, first.code, first.errOut)
	require.Zero(t, second.code, second.errOut)
	require.Equal(t, alone, last(t, first.out)["params_sha256"])
	require.Equal(t, other, last(t, second.out)["params_sha256"])

	l := lines(t, ok(t, "ssds", "--json"))[0]
	require.Len(t, l["datasets"], 2)
	require.Equal(t, "g", l["dataset"])
	require.Positive(t, l["free_bytes"])
	require.NoError(t, os.RemoveAll("g")) // its folder is not needed
	require.Equal(t, []any{"ssd0", "ssd1"}, last(t, ok(t, "unload", "g", "--json"))["ssds"])
	fails(t, hc(t, "unload", "g"), 2, "unload", "they hold: h (")
	require.Equal(t, other, last(t, ok(t, args("h")...))["params_sha256"])
	ok(t, "unload", l["datasets"].([]any)[1].(map[string]any)["uuid"].(string))
	require.Contains(t, ok(t, "ssds"), "none")
	r := hc(t, args("h")...)
	require.Zero(t, r.code)
	require.Equal(t, other, last(t, r.out)["params_sha256"])
}

// TestUnevenSSDs: SSDs of two sizes hold a dataset that equal shares have no room for. Every mode
// reads it, with packed pages beside the rows, and trains what runs in memory train; kills of a
// load do no harm; it is found in any order and unloaded.
func TestUnevenSSDs(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "20000", "--classes", "4", "--dim", "48", "--seed", "9", "--out", "g")
	ok(t, "generate", "--nodes", "3000", "--dim", "16", "--seed", "3", "--out", "h")
	for name, mib := range map[string]int64{"a.img": 4, "b.img": 14} {
		f, err := os.Create(name)
		require.NoError(t, err)
		require.NoError(t, errors.Join(f.Truncate(mib<<20), f.Close()))
	}
	ok(t, "bind-ssds", "--proxy", "a.img,b.img")
	ok(t, "load", "h")
	killLoads(t, "g", 8, 60*time.Millisecond, func() {})
	r := hc(t, "load", "g")
	require.Zero(t, r.code, r.errOut)
	require.Contains(t, r.out, "stripes on 2 SSDs")
	require.Contains(t, r.errOut, "equal shares have no room")
	require.Contains(t, ok(t, "verify", "g", "--source"), "20000 rows equal to the source")
	train := func(mode string, more ...string) string {
		args := append([]string{"train", "g", "--mode", mode, "--fanout", "5,5", "--batch-size",
			"128", "--hidden", "16", "--epochs", "1", "--json", "--quiet"}, more...)
		return last(t, ok(t, args...))["params_sha256"].(string)
	}
	want := train("inmem")
	for _, mode := range []string{"helios", "cpu", "mmap", "gids", "ginex", "diskgnn"} {
		require.Equal(t, want, train(mode), mode)
	}
	require.Equal(t, want, train("helios", "--ssds", "ssd1,ssd0"))
	require.Contains(t, ok(t, "verify", "g", "--source"), "20000 rows equal to the source")
	fails(t, hc(t, "verify", "g", "--ssds", "ssd0"), 2, "verify", "is missing", "leaves out ssd1")
	l := lines(t, ok(t, "ssds", "--json"))
	require.Greater(t, len(l[1]["datasets"].([]any)), len(l[0]["datasets"].([]any)))
	require.Regexp(t, `g, stripe \d, \d.* of \d, rows of 192 B \(float32\); `, l[1]["content"])
	io := last(t, ok(t, "train", "g", "--mode", "helios", "--gpu-cache", "0", "--cpu-cache", "0",
		"--epochs", "1", "--fanout", "5", "--hidden", "8", "--json", "--quiet"))["io"].(map[string]any)
	ssds := io["ssds"].([]any)
	require.Len(t, ssds, 2)
	few, many := ssds[0].(map[string]any), ssds[1].(map[string]any)
	require.Greater(t, many["commands"], few["commands"])
	// Rows of half the bytes stay spread so, and leave room for pages.
	require.Contains(t, ok(t, "load", "g", "--row-dtype", "float16"), "stripes on 2 SSDs")
	large := []string{"--batch-size", "3000", "--fanout", "2"}
	require.Equal(t, train("cpu", large...), train("diskgnn", append(large, "--pages-on", "ssds",
		"--packed", "packs")...))
	require.Contains(t, ok(t, "verify", "g", "--source"), "20000 rows equal to the source")
	openAtOnce(t)
	require.Equal(t, []any{"ssd0", "ssd1"}, last(t, ok(t, "unload", "g", "--json"))["ssds"])
	require.Contains(t, ok(t, "verify", "h", "--source"), "3000 rows equal to the source")
}
