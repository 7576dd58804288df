package main

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

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
	for i := range 12 {
		c := child(t, "load", "h", "--mark-every", "1ms")
		require.NoError(t, c.Start())
		time.Sleep(time.Duration(20+10*i) * time.Millisecond)
		_ = c.Process.Kill()
		_ = c.Wait()
		require.Contains(t, ok(t, "verify", "g", "--source"), "4000 rows equal to the source")
	}
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
