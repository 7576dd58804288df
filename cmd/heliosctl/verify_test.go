package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// verify checks the files without any SSD bound, lists what is bad in them, and seals an older
// dataset that its UUID proves to be whole.
func TestVerifyFiles(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "9000", "--classes", "4", "--dim", "8", "--out", "g")
	require.Contains(t, ok(t, "verify", "g"), "8 files")
	require.Contains(t, ok(t, "verify", "--seal", "g"), "sealed already")
	damage := func() {
		b, err := os.ReadFile("g/indices.npy")
		require.NoError(t, err)
		b[50_000] ^= 1
		require.NoError(t, os.WriteFile("g/indices.npy", b, 0o644))
	}
	damage()
	for _, args := range [][]string{{"verify", "g"}, {"verify", "--seal", "g"}} {
		r := hc(t, args...)
		require.Equal(t, 5, r.code, r.errOut)
		require.Contains(t, r.errOut, "g/indices.npy at bytes 49152 to 53247")
		require.Contains(t, r.errOut, "restore the file")
	}
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "4MiB")
	fails(t, hc(t, "load", "g", "--quiet"), 5, "load", "g/indices.npy")

	meta, err := os.ReadFile("g/dataset.yaml")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile("g/dataset.yaml", bytes.Replace(meta, []byte("sealed: true\n"),
		nil, 1), 0o644))
	require.NoError(t, os.Remove("g/dataset.seal"))
	for _, args := range [][]string{{"verify", "g"}, {"verify", "--seal", "g"}} {
		r := hc(t, args...)
		require.Equal(t, 5, r.code, r.errOut)
		require.Contains(t, r.errOut, "its arrays give UUID")
	}
	damage() // and mends
	r := hc(t, "load", "g")
	require.Zero(t, r.code, r.errOut)
	require.Contains(t, r.errOut, "not sealed: it was made by an older version")
	require.Contains(t, ok(t, "verify", "--seal", "g"), "is sealed now")
	r = hc(t, "verify", "g")
	require.Zero(t, r.code, r.errOut)
	require.NotContains(t, r.errOut, "not sealed")
	fails(t, hc(t, "verify", "--seal", "g", "--source"), 2, "verify", "--source is about SSDs")
	ok(t, "unbind-ssds", "--delete")
}
