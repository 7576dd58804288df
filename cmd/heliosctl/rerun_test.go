package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The run of a file of results runs again, from any folder, and its results are compared.
func TestRerun(t *testing.T) {
	isolate(t)
	dir, err := os.Getwd()
	require.NoError(t, err)
	ok(t, "generate", "--nodes", "600", "--dim", "16", "--classes", "3", "--out", "g")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "4MiB")
	ok(t, "load", "g")
	small := []string{"--hidden", "8", "--batch-size", "128", "--fanout", "3,3", "--gpu-cache", "10%",
		"--quiet"}
	require.NoError(t, os.WriteFile("c.yaml", []byte("epochs: 2\nlr: 0.01\n"), 0o600))
	ok(t, append([]string{"train", "g", "--config", "c.yaml", "--checkpoint", "run", "--results",
		"t.jsonl"}, small...)...)
	require.NoError(t, os.Remove("c.yaml")) // what it said is in the results
	ok(t, append([]string{"compare", "g", "--modes", "helios,inmem", "--epochs", "1", "--repeats", "1",
		"--results", "c.jsonl"}, small...)...)
	ok(t, "bench", "io", "--seconds", "0.02", "--results", "io.jsonl", "--quiet")
	sha := lines(t, readFile(t, "t.jsonl"))[3]["params_sha256"].(string)

	begin := lines(t, readFile(t, "t.jsonl"))[0]
	require.EqualValues(t, resultsSchema, begin["schema"])
	require.Equal(t, dir, begin["folder"])
	require.NotEmpty(t, begin["version"])
	require.NotEmpty(t, begin["machine"].(map[string]any)["kernel"])

	require.Equal(t, "heliosctl train --hidden=8 --batch-size=128 --fanout=3,3 --gpu-cache=10% --epochs=2 --lr=0.01 -- g",
		strings.TrimSpace(ok(t, "rerun", "t.jsonl", "--dry-run")))
	elsewhere := t.TempDir()
	t.Chdir(elsewhere)
	for _, name := range []string{"t", "c", "io"} {
		got := lines(t, ok(t, "rerun", dir+"/"+name+".jsonl", "--results", name+".jsonl", "--json"))
		require.Greater(t, got[0]["equal"], 0.0, name)
	}
	again := lines(t, readFile(t, "t.jsonl"))
	require.Equal(t, sha, again[3]["params_sha256"])
	entries, err := os.ReadDir(elsewhere)
	require.NoError(t, err)
	require.Len(t, entries, 3, "no checkpoint")
	t.Chdir(dir)

	// A run that went on with more epochs is one run of all of them.
	ok(t, append([]string{"train", "g", "--epochs", "1", "--checkpoint", "on", "--results", "on.jsonl"},
		small...)...)
	ok(t, append([]string{"train", "g", "--epochs", "2", "--checkpoint", "on", "--results", "on.jsonl",
		"--resume"}, small...)...)
	require.Contains(t, ok(t, "rerun", "on.jsonl", "--dry-run"), "--epochs=2")
	require.Contains(t, ok(t, "rerun", "on.jsonl"), "was made again")
	begun, _, _ := strings.Cut(readFile(t, "on.jsonl"), `{"event":"epoch","epoch":2`)
	require.NoError(t, os.WriteFile("dead.jsonl", []byte(begun), 0o600))

	text := readFile(t, "t.jsonl")
	require.NoError(t, os.WriteFile("other.jsonl", []byte(strings.Replace(text, sha, "00"+sha[2:], 1)),
		0o600))
	r := hc(t, "rerun", "other.jsonl")
	require.Equal(t, 1, r.code)
	require.Regexp(t, `heliosctl rerun: other.jsonl: result.params_sha256 was "00`+sha[2:]+
		`" and is "`+sha, r.errOut)
	put := func(name, from, to string) {
		changed := strings.Replace(text, from, to, 1)
		require.NotEqual(t, text, changed)
		require.NoError(t, os.WriteFile(name, []byte(changed), 0o600))
	}
	put("gone.jsonl", `"folder":"`+dir, `"folder":"`+dir+"/gone")
	put("old.jsonl", `"arguments"`, `"unknown"`)
	put("later.jsonl", `"schema":2`, `"schema":3`)
	put("verb.jsonl", `"verb":"train"`, `"verb":"rerun"`)
	put("itself.jsonl", `"verb":"train"`, `"verb":"rerun"`)
	itself := strings.Replace(readFile(t, "itself.jsonl"), `"arguments":["train"`,
		`"arguments":["rerun"`, 1)
	require.NoError(t, os.WriteFile("itself.jsonl", []byte(itself), 0o600))
	put("cut.jsonl", `"--","g"]`, `"g"]`)
	put("nccl.jsonl", `"--hidden=8"`, `"--reduce=nccl"`)
	put("killed.jsonl", `"whole":true`, `"whole":false`)
	put("nothing.jsonl", `"event":"begin"`, `"event":"epoch"`)
	for _, c := range []struct{ args, says string }{
		{"rerun", "no RESULTS"}, {"rerun missing", "missing"}, {"rerun gone.jsonl", "--folder"},
		{"rerun old.jsonl", "run it by hand: heliosctl train g"},
		{"rerun later.jsonl", "by a later heliosctl"},
		{"rerun verb.jsonl", "not those of its verb"},
		{"rerun itself.jsonl", "has no results to compare"},
		{"rerun cut.jsonl", "not those of its verb"}, {"rerun nccl.jsonl", "not exact to the bit"},
		{"rerun killed.jsonl", "did not come to its end"},
		{"rerun dead.jsonl", "did not come to its end"},
		{"rerun nothing.jsonl", "does not begin as results do"}, {"rerun a.img", "no JSON object"},
	} {
		fails(t, hc(t, strings.Fields(c.args)...), 2, "rerun", c.says)
	}
	// Processes that trained together took as many shards as they were; metrics are of the first
	// run.
	put("ranks.jsonl", `"shards":1,"replicas"`, `"shards":2,"replicas"`)
	metrics := strings.Replace(readFile(t, "ranks.jsonl"), `"--hidden=8"`,
		`"--hidden=8","--metrics=:9100","--rank-timeout=1s","--mpi=x"`, 1)
	require.NoError(t, os.WriteFile("ranks.jsonl", []byte(metrics), 0o600))
	require.Equal(t, "heliosctl train --hidden=8 --batch-size=128 --fanout=3,3 --gpu-cache=10% --epochs=2 --lr=0.01 --shards=2 -- g",
		strings.TrimSpace(ok(t, "rerun", "ranks.jsonl", "--dry-run")))

	// A run that fails says so itself, and its exit code is rerun's.
	require.NoError(t, os.RemoveAll("g"))
	r = hc(t, "rerun", "t.jsonl")
	require.Equal(t, 2, r.code)
	require.Contains(t, r.errOut, "heliosctl train: ")
	require.NotContains(t, r.errOut, "see above")
}

// A command that a person is to copy is words of a shell.
func TestShellWords(t *testing.T) {
	require.Equal(t, `heliosctl train 'my graph' --lr=0.1 'it'\''s' '' '$(x)' '*;&'`,
		shellWords([]string{"heliosctl", "train", "my graph", "--lr=0.1", "it's", "", "$(x)", "*;&"}))
}
