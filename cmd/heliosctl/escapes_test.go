package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// evil has the characters that a name, path or text of others may hold: ESC with CSI and OSC, C1
// CSI, newline, carriage return, a right-to-left override, DEL.
const evil = "\x1b[2J\x1b]0;owned\x07\u009b31m\nheliosctl: all is well\r\u202ename\x7f"

// printable fails where a text would do more than stand on a terminal.
func printable(t *testing.T, what, s string) {
	t.Helper()
	require.True(t, utf8.ValidString(s), "%s: %q", what, s)
	for _, r := range s {
		if r != '\n' && r != '\t' && !unicode.IsPrint(r) {
			t.Fatalf("%s prints %q in %q", what, r, s)
		}
	}
	require.False(t, strings.HasPrefix(s, "heliosctl: all is well") ||
		strings.Contains(s, "\nheliosctl: all is well"), "%s: a line was forged: %q", what, s)
}

// No verb lets what comes from disks, files or other processes steer the terminal, as text, as JSON
// or in reports.
func TestNothingSteersTheTerminal(t *testing.T) {
	isolate(t)
	ok(t, "generate", "--nodes", "600", "--classes", "3", "--dim", "16", "--name", evil,
		"--out", "g")
	ok(t, "generate", "--nodes", "600", "--classes", "3", "--dim", "16", "--seed", "2",
		"--out", "h")
	image := "a" + evil[:20] + ".img"
	ok(t, "bind-ssds", "--proxy", image, "--size", "8MiB")
	ok(t, "load", "g")
	// A list of SSDs of somebody else, with a serial number and kind of his own.
	file := filepath.Join(os.Getenv("HELIOS_STATE"), "state.json")
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	odd := filepath.Join(t.TempDir(), "state")
	require.NoError(t, os.Mkdir(odd, 0o755))
	var st map[string]any
	require.NoError(t, json.Unmarshal(b, &st))
	st["ssds"].([]any)[0].(map[string]any)["serial"] = evil
	st["ssds"].([]any)[0].(map[string]any)["ssd_model"] = evil
	b, err = json.Marshal(st)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(odd, "state.json"), b, 0o600))
	require.NoError(t, os.WriteFile("bad.yaml", []byte("\"e\\e[2J\\n\\u202e\": 1\n"), 0o600))
	require.NoError(t, os.WriteFile("raw.yaml", []byte("fan\x1b[2Jout: 1\n"), 0o600))
	require.NoError(t, os.WriteFile("e.csv", []byte("0,1\n1,\x1b[2J\r\u202e\n"), 0o600))
	require.NoError(t, os.MkdirAll("gb/preprocessed", 0o755))
	require.NoError(t, os.WriteFile("gb/metadata.yaml",
		[]byte(
			"dataset_name: \"\\e[2J\\u202e\"\ngraph_topology:\n  type: \"\\e[2J\"\n  path: \"\\e[2J\\r\"\n"), 0o600))

	verbs := [][]string{
		{"ssds"}, {"ssds", "--state", odd}, {"verify", "g"}, {"verify"}, {"load", "h"},
		{"load", "g"},
		{"train", "g", "--epochs", "1", "--batch-size", "64", "--checkpoint", "ck", "--results",
			"plot.jsonl"}, {"train", "g", "--epochs", "1", "--explain"},
		{"eval", "g", "--checkpoint", "ck"}, {"predict", "g", "--checkpoint", "ck", "--nodes",
			"1,2"}, {"train", "h", "--epochs", "1"}, {"eval", "h", "--checkpoint", "ck"},
		{"compare", "g", "--modes", "helios,cpu", "--epochs", "1", "--repeats", "1", "--results",
			"cmp.jsonl", "--overwrite"},
		{"doctor"}, {"version"}, {"train", "g", "--config", "bad.yaml"},
		{"train", "g", "--config", "raw.yaml"}, {"train", evil}, {evil}, {"train", "--" + evil},
		{"load", "g", "--ssds", evil},
		{"import", "edges", "--in", "e.csv", "--out", "x", "--feature-fn", "random"}, {"import", "graphbolt", "--in", "gb",
			"--out", "x"}, {"import", "npy", "--in", "no" + evil, "--out", "x"},
		{"unbind-ssds", "--state", odd},
	}
	seen := 0
	for _, args := range verbs {
		for _, how := range [][]string{nil, {"--json"}} {
			r := hc(t, append(args[:len(args):len(args)], how...)...)
			what := strings.Join(append(args, how...), " ")
			if args[0] == "compare" {
				require.Zero(t, r.code, r.errOut)
			}
			printable(t, what+": stdout", r.out)
			printable(t, what+": stderr", r.errOut)
			if strings.Contains(r.out+r.errOut, `\u202e`) {
				seen++
			}
			for l := range strings.Lines(r.out) {
				require.True(t, how == nil || json.Valid([]byte(l)), "%s: %q", what, l)
			}
		}
	}
	require.Greater(t, seen, 20, "the texts came out, escaped")
	for _, name := range []string{"plot", "cmp"} {
		page := name + ".html"
		ok(t, "report", name+".jsonl", "--out", page)
		b, err := os.ReadFile(page)
		require.NoError(t, err, page)
		// a line in a page forges nothing
		printable(t, page, strings.ReplaceAll(string(b), "\n", " "))
	}
}
