package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// someFile is a file of somebody's, as large as the SSD whose name it takes.
func someFile(t *testing.T, path string) []byte {
	t.Helper()
	b := bytes.Repeat([]byte("precious"), 4<<20/8)
	require.NoError(t, os.WriteFile(path, b, 0o600))
	return b
}

// Another file that took the name of a bound one is neither read nor written, by any verb or stack;
// the old one is used again when it is back.
func TestSwappedFile(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "600", "--classes", "3", "--dim", "16", "--out", "g")
	require.NoError(t, os.WriteFile("mine.img", make([]byte, 4<<20), 0o600))
	ok(t, "bind-ssds", "--proxy", "new.img,mine.img", "--size", "4MiB")
	ok(t, "load", "g")
	for i, name := range []string{"new.img", "mine.img"} {
		require.NoError(t, os.Rename(name, "away.img"))
		want := someFile(t, name)
		for _, args := range [][]string{{"load", "g"}, {"load", "g", "--force", "x"},
			{"verify", "g"}, {"train", "g", "--epochs", "1"}, {"bench", "io", "--io-stack", "cpu",
				"--seconds", "0.05"}} {
			verb := args[0]
			if verb == "bench" {
				verb = "bench io"
			}
			fails(t, hc(t, append(args, "--quiet")...), 4, verb, []string{"ssd0", "ssd1"}[i],
				name+" is not what was bound", "another file of that name", "unbind-ssds ssd")
		}
		got, err := os.ReadFile(name)
		require.NoError(t, err)
		require.Equal(t, want, got)
		if i == 0 { // shorter as well
			require.NoError(t, os.Truncate(name, 1<<20))
			fails(t, hc(t, "verify", "g"), 4, "verify", "is not what was bound")
		}
		require.NoError(t, os.Rename("away.img", name))
		ok(t, "verify", "g")
	}
	// It is bound again as it is, and loading asks first.
	want := someFile(t, "other.img")
	require.NoError(t, os.Rename("other.img", "mine.img"))
	ok(t, "unbind-ssds", "ssd1")
	ok(t, "bind-ssds", "--proxy", "mine.img")
	fails(t, hc(t, "load", "g", "--quiet"), 4, "load", "ssd1", `look like "preciouspreciou`,
		"--force HELIOS")
	got, err := os.ReadFile("mine.img")
	require.NoError(t, err)
	require.Equal(t, want, got)
}

// A list that an older heliosctl wrote has no identity of files that were there: they are used, and
// that is said; binding again records it.
func TestOldStateHasNoIdentity(t *testing.T) {
	isolate(t)
	require.NoError(t, os.WriteFile("mine.img", make([]byte, 4<<20), 0o600))
	ok(t, "bind-ssds", "--proxy", "mine.img")
	require.NotContains(t, hc(t, "ssds").errOut, "did not record")
	var st map[string]any
	file := filepath.Join(os.Getenv("HELIOS_STATE"), "state.json")
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &st))
	d := st["ssds"].([]any)[0].(map[string]any)
	require.NotZero(t, d["inode"])
	delete(d, "inode")
	delete(d, "device")
	b, err = json.Marshal(st)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, b, 0o600))
	r := hc(t, "ssds")
	require.Zero(t, r.code)
	require.Contains(t, r.errOut, "did not record which file that is")
	after, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, b, after, "nothing is adopted in silence")
	ok(t, "unbind-ssds")
	ok(t, "bind-ssds", "--proxy", "mine.img")
	require.NotContains(t, hc(t, "ssds").errOut, "did not record")
}
