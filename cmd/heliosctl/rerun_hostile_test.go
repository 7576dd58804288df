package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	hcli "helios/internal/cli"
)

// A file of results comes from anybody: nothing in it opens a library, writes a file or reads one
// that the run did not have.
func TestRerunTakesSettingsAlone(t *testing.T) {
	isolate(t)
	dir, err := os.Getwd()
	require.NoError(t, err)
	ok(t, "generate", "--nodes", "600", "--dim", "16", "--classes", "3", "--out", "g")
	ok(t, "generate", "--nodes", "600", "--dim", "16", "--classes", "3", "--seed", "9", "--out", "other")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "4MiB")
	ok(t, "load", "g")
	small := strings.Fields("g --hidden 8 --batch-size 128 --fanout 3,3 --epochs 1 --quiet --results")
	ok(t, append(append([]string{"train", "--checkpoint", "run"}, small...), "t.jsonl")...)
	ok(t, append([]string{"compare", "--modes", "helios,cpu", "--repeats", "1"}, append(small, "c.jsonl")...)...)
	ok(t, "eval", "g", "--checkpoint", "run", "--results", "e.jsonl", "--quiet")
	require.NoError(t, os.WriteFile("victim", []byte("mine"), 0o600))
	require.NoError(t, os.WriteFile("ids.txt", []byte("1\n2\n"), 0o600))
	require.NoError(t, os.WriteFile("hot.txt", []byte("3\n4\n"), 0o600))
	ok(t, "cache", "hotness", "g", "--hotness", "hot.txt", "--results", "r.jsonl", "--quiet")
	require.NoError(t, syscall.Mkfifo("fifo", 0o600))
	// with is a file of results whose first line has other arguments.
	with := func(file string, change func(begin map[string]any, args []any) []any) {
		t.Helper()
		first, rest, _ := strings.Cut(readFile(t, file), "\n")
		var begin map[string]any
		require.NoError(t, json.Unmarshal([]byte(first), &begin))
		begin["arguments"] = change(begin, begin["arguments"].([]any))
		text, err := json.Marshal(begin)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile("evil.jsonl", []byte(string(text)+"\n"+rest), 0o600))
	}
	before := tree(t, dir)
	for _, c := range []struct{ file, flag string }{
		{"t", "--blas=./lib.so"}, {"t", "-blas=./lib.so"}, {"t", "--blas=/tmp/lib.so"},
		{"t", "--blas=off,./lib.so"}, {"t", "--hotness=ids.txt"},
		{"t", "--hotness=/etc/shadow"}, {"t", "--hotness=presample,ids.txt"}, {"t", "--partition=victim"},
		{"t", "--hardware=victim"}, {"t", "--hardware=fifo"}, {"t", "--dataset=other"},
		{"c", "--variants=a=--blas ./lib.so"}, {"c", "--variants=a=--packed victim;b=--mode cpu"},
		{"c", "--variants=a=--hotness ids.txt"}, {"c", "--variants=a=-timeline=victim"},
	} {
		with(c.file+".jsonl", func(_ map[string]any, args []any) []any {
			return append([]any{args[0], c.flag}, args[1:]...)
		})
		r := hc(t, "rerun", "evil.jsonl")
		require.Contains(t, []int{2, 4}, r.code, "%s: %s", c.flag, r.errOut)
		require.Contains(t, r.errOut, "evil.jsonl: ", c.flag)
		name, _, _ := strings.Cut(strings.TrimLeft(c.flag, "-"), "=")
		require.Contains(t, r.errOut, "--"+name, c.flag)
	}
	for _, flag := range []string{"--timeline=victim", "-timeline=victim",
		"--checkpoint=victim", "-checkpoint=new", "--results=victim", "-results=victim", "--metrics=:0",
		"--hotness-dir=new", "--packed=new", "-packed=new", "--parted=new", "--superbatch-dir=/", "--mpi=./lib.so",
		"--config=victim", "--state=new", "--overwrite", "--overwrite=true", "-overwrite", "--resume", "--live",
		"--explain"} {
		with("t.jsonl", func(_ map[string]any, args []any) []any {
			return append(append([]any{"train"}, flag), args[1:]...)
		})
		how := []string{"rerun", "evil.jsonl"}
		if flag != "-timeline=victim" && flag != "-checkpoint=new" && flag != "-overwrite" {
			how = append(how, "--dry-run") // what is run has no such flag
		}
		r := hc(t, how...)
		require.Zero(t, r.code, "%s: %s", flag, r.errOut)
		require.NotContains(t, r.out, strings.TrimLeft(flag, "-"))
		name, _, _ := strings.Cut(strings.TrimLeft(flag, "-"), "=")
		if name == "metrics" {
			name = "serve" // whose alias it is
		}
		require.Regexp(t, "evil.jsonl: left out .*--"+name, r.errOut)
	}
	type line = map[string]any
	last := func(a []any, to string) []any { return append(a[:len(a)-1], to) }
	first := func(a []any, flag string) []any { return append([]any{"train", flag}, a[1:]...) }
	for what, change := range map[string]func(begin line, a []any) []any{
		"another dataset":      func(_ line, a []any) []any { return last(a, "other") },
		"a dataset of nowhere": func(b line, a []any) []any { b["dataset"] = ""; return a },
		"two arguments":        func(_ line, a []any) []any { return append(a, "other") },
		"help":                 func(_ line, a []any) []any { return first(a, "--help") },
		"an unknown flag":      func(_ line, a []any) []any { return first(a, "--exec=x") },
		"flags of the whole":   func(_ line, a []any) []any { return append([]any{"--state=x"}, a...) },
		"no arguments":         func(line, []any) []any { return []any{"train"} },
		"another verb":         func(_ line, a []any) []any { return append([]any{"load"}, a[1:]...) },
		"no folder of data":    func(_ line, a []any) []any { return last(a, "/proc/self/fd/0") },
	} {
		with("t.jsonl", change)
		r := hc(t, "rerun", "evil.jsonl")
		require.Contains(t, []int{2, 4}, r.code, "%s: %s", what, r.errOut)
	}
	// A verb that writes or starts something has no results to rerun.
	for _, verb := range []string{"load", "bind-ssds", "unbind-ssds", "vfio-setup", "serve", "import npy",
		"generate", "report", "rerun", "predict", "prepare"} {
		with("t.jsonl", func(b map[string]any, _ []any) []any {
			b["verb"] = verb
			args := []any{}
			for _, w := range strings.Fields(verb) {
				args = append(args, w)
			}
			return append(args, "--", "g")
		})
		fails(t, hc(t, "rerun", "evil.jsonl"), 2, "rerun", "no results to compare")
	}
	with("t.jsonl", func(_ map[string]any, a []any) []any { // nor into the dataset's folder
		return append([]any{"train", "--mode=diskgnn", "--seed=77", "--packed=new"}, a[1:]...)
	})
	require.Equal(t, 1, hc(t, "rerun", "evil.jsonl").code, "another seed gives other losses")
	require.Equal(t, before, tree(t, dir), "nothing was written")

	// Inputs are known by their checksums, or named.
	ok(t, "rerun", "r.jsonl")
	ok(t, "rerun", "e.jsonl")
	require.NoError(t, os.Rename("hot.txt", "moved"))
	require.NoError(t, os.WriteFile("hot.txt", []byte("5\n6\n"), 0o600))
	fails(t, hc(t, "rerun", "r.jsonl"), 4, "rerun", "--input hotness=PATH")
	require.Contains(t, ok(t, "rerun", "r.jsonl", "--input", "hotness=moved"), "was made again")
	fails(t, hc(t, "rerun", "r.jsonl", "--input", "csv=x"), 2, "rerun", "no input csv")
	require.NoError(t, os.Rename("g", "h"))
	require.NoError(t, os.Rename("other", "g"))
	fails(t, hc(t, "rerun", "t.jsonl"), 4, "rerun", "--dataset DIR")
	require.Contains(t, ok(t, "rerun", "t.jsonl", "--dataset", "h"), "was made again")
}

// tree lists the files of a folder, but for the file of the attack and the SSD.
func tree(t *testing.T, dir string) (all []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if name := d.Name(); err == nil && name != "evil.jsonl" && name != "a.img" && name != "ssd0.lock" && !d.IsDir() {
			all = append(all, fmt.Sprint(path, st.Size(), st.ModTime()))
		}
		return err
	}))
	return all
}

// Files that are no results end soon, in little memory.
func TestRerunOfNoResults(t *testing.T) {
	isolate(t)
	require.NoError(t, syscall.Mkfifo("fifo", 0o600))
	begin := `{"event":"begin","schema":2,"verb":"train","arguments":["train","--","g"]}` + "\n"
	for name, text := range map[string]string{
		"long": strings.Repeat("x", 17<<20), "deep": begin + `{"a":` + strings.Repeat("[", 1<<20),
		"values": begin + `{"event":"x","v":[` + strings.Repeat("1,", 1<<20+1) + "1]}",
		"zeros":  strings.Repeat("\x00", 1<<20), "nan": begin + `{"loss":NaN}`, "gz": "\x1f\x8b\x08\x00",
		"lines": begin + strings.Repeat(`{"event":"e","ok":true}`+"\n", 1<<17+8),
		"nulls": "null\n", "yaml": "a: &a [x,x]\nb: [*a,*a]\n",
	} {
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
		r := hc(t, "rerun", name)
		require.Equal(t, 2, r.code, "%s: %s", name, r.errOut)
		require.Contains(t, r.errOut, name)
		require.Less(t, len(r.errOut), 1000)
	}
	require.NoError(t, os.Symlink("/proc/self/mem", "link"))
	for _, name := range []string{"/dev/zero", "fifo", "/dev/stdin", "/proc/self/mem", "link", "."} {
		require.Contains(t, []int{2, 5}, hc(t, "rerun", name).code, name)
		require.Contains(t, []int{2, 5}, hc(t, "report", name, "--out", "page.html").code, name)
	}
}

// Each option of a verb with results declares its use: one that does not is never taken from a
// file.
func TestUsesAreDeclared(t *testing.T) {
	for path, c := range verbs(newApp(os.Stdout, os.Stderr).Commands, "") {
		if !hcli.HasFlag(c.Flags, "results") || path == "rerun" {
			continue
		}
		uses := usesOf(c)
		for _, f := range c.Flags {
			if f.Names()[0] == "help" {
				continue
			}
			name := f.Names()[0]
			switch uses.of(name, "/tmp/x.so") {
			case hcli.Unknown: // words of these alone
				require.Contains(t, []string{"blas", "reduce", "variants"}, name, path)
			case hcli.Setting:
				require.NotRegexp(t, `dir$|file|trace|checkpoint|csv|html|^out$|timeline|profile`, name, path)
			}
		}
	}
}
