package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

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
