package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"helios/cuda"
	hcli "helios/internal/cli"
	"helios/internal/testing/wide"
	"helios/sched/tiers"
)

// A shell that asks gets the verbs, or the flags of the verb, and never an error.
func TestCompletion(t *testing.T) {
	isolate(t)
	require.Subset(t, completed(t, ""), []string{"train", "bench", "doctor"})
	require.Contains(t, completed(t, "bench", ""), "io")
	require.Equal(t, []string{"--batch-size"}, completed(t, "train", "g", "--batch-s"))
	require.Empty(t, completed(t, "nosuchverb", "--x"))
	for _, shell := range hcli.Shells {
		script := ok(t, "completion", shell)
		require.Contains(t, script, "heliosctl")
		require.False(t, strings.Contains(script, "_NAME"), "a name that was not filled in")
		if path, err := exec.LookPath(shell); err == nil {
			cmd := exec.Command(path, "-n")
			cmd.Stdin = strings.NewReader(script)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s: %s", shell, out)
		}
	}
	fails(t, hc(t, "completion"), 2, "completion", "bash, zsh, fish")
	fails(t, hc(t, "completion", "csh"), 2, "completion", "csh", "bash, zsh, fish")
}

// completed asks as the scripts of the shells do: words, the last of which is being typed.
func completed(t *testing.T, words ...string) []string {
	t.Helper()
	r := hc(t, append([]string{"__complete"}, words...)...)
	require.Equal(t, 0, r.code, r.errOut)
	require.Empty(t, r.errOut)
	var out []string
	for line := range strings.Lines(r.out) {
		value, _, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		out = append(out, value)
	}
	return out
}

// Completion offers the words that may stand next, whatever stands before them.
func TestCompletedValues(t *testing.T) {
	isolate(t)
	modes := tiers.Catalog.Names()
	files := []string{":files"}
	for _, c := range []struct {
		words []string
		want  []string
	}{
		{[]string{"train", "--mode", ""}, append([]string{"auto"}, modes...)},
		{[]string{"train", "g", "--epochs", "2", "--mode", "h"}, []string{"helios", "hier"}},
		{[]string{"--quiet", "train", "--mode", "he"}, []string{"helios"}},
		{[]string{"train", "--mode=he"}, []string{"--mode=helios"}},
		{[]string{"train", "--mode", "=", "he"}, []string{"helios"}}, // as bash has it
		{[]string{"train", "--mode", "=", "a"}, []string{"auto"}},
		{[]string{"train", "--mode", "x"}, nil},
		{[]string{"train", "--mode", "helios", "--io-stack", "c"}, []string{"cpu"}},
		{[]string{"train", "--log-format", ""}, []string{"text", "json"}},
		{[]string{"train", "--precision", ""}, cuda.Precisions()},
		{[]string{"train", "--device", ""}, []string{"auto", "host", "cuda"}},
		{[]string{"train", "--epochs", ""}, nil},
		{[]string{"train", "--json=", ""}, files},
		{[]string{"train", "--json="}, []string{"--json=true", "--json=false"}},
		{[]string{"train", "--config", ""}, files},
		{[]string{"train", "--checkpoint", "r"}, files},
		{[]string{"train", ""}, files},
		{[]string{"train", "--", ""}, files},
		{[]string{"train", "--", "--m"}, files},
		{[]string{"train", "--dropo"}, []string{"--dropout"}},
		{[]string{"compare", "g", "--modes", "helios,c"}, []string{"helios,cpu"}},
		{[]string{"compare", "g", "--modes", "gin"}, []string{"ginex", "ginex-pg"}},
		{[]string{"bench", "io", "--io-stack", "async,s"}, []string{"async,sync"}},
		{[]string{"plan", "--hardware", "h"}, []string{"h100-pm1753x16", "host", ":files"}},
		{[]string{"bench", "i"}, []string{"io"}},
		{[]string{"import", "edges", "--self-loops", ""}, []string{"keep", "drop", "add"}},
		{[]string{"completion", ""}, hcli.Shells},
		{[]string{"tra"}, []string{"train"}},
		{[]string{"nosuchverb", ""}, nil},
		{[]string{"--st"}, []string{"--state"}},
		{[]string{"--state", ""}, files},
		{[]string{"vfio-setup", "st"}, []string{"status"}},
		{[]string{"load", "--row-dtype", "b"}, []string{"bfloat16"}},
	} {
		require.Equal(t, c.want, completed(t, c.words...), "%q", c.words)
	}
	flags := completed(t, "train", "--")
	require.Subset(t, flags, []string{"--mode", "--epochs", "--json", "--help"})
	require.NotContains(t, flags, "--mode helios")
	require.NotContains(t, completed(t, ""), "man", "hidden")
	require.Equal(t, 0, hc(t, "__complete").code)
}

func noneThere(string, string) []string { return nil }

// Datasets, checkpoints and SSDs are offered where the flag takes them; files where there is none.
func TestCompletedThings(t *testing.T) {
	isolate(t)
	require.NoError(t, os.MkdirAll("data/a b", 0o755))
	ok(t, "generate", "--nodes", "500", "--dim", "4", "--out", "data/graph", "--quiet")
	ok(t, "train", "data/graph", "--checkpoint", "data/run", "--quiet")
	ok(t, "bind-ssds", "--proxy-ram", "2", "--size", "8MiB", "--quiet")
	t.Cleanup(func() { ok(t, "unbind-ssds", "--delete", "--quiet") })
	require.NoError(t, os.WriteFile("data/a b/dataset.yaml", nil, 0o644))
	files := []string{":files"}
	for _, c := range []struct {
		words []string
		want  []string
	}{
		{[]string{"train", "data/"}, []string{"data/graph"}},
		{[]string{"train", "--dataset", "data/g"}, []string{"data/graph"}},
		{[]string{"train", "--dataset=data/g"}, []string{"--dataset=data/graph"}},
		{[]string{"train", "da"}, files},
		{[]string{"train", "nothing/"}, files},
		{[]string{"eval", "data/graph", "--checkpoint", "data/"}, []string{"data/run"}},
		{[]string{"eval", "data/graph", "--checkpoint", "data/g"}, files},
		{[]string{"train", "--ssds", ""}, []string{"ssd0", "ssd1"}},
		{[]string{"train", "--ssds", "ssd1,"}, []string{"ssd1,ssd0", "ssd1,ssd1"}},
		{[]string{"unbind-ssds", ""}, []string{"ssd0", "ssd1"}},
		{[]string{"import", "tables", "--like", "data/"}, []string{"data/graph"}},
	} {
		require.Equal(t, c.want, completed(t, c.words...), "%q", c.words)
	}
}

// Every flag whose help lists its values offers them.
func TestEnumerationsAreCompleted(t *testing.T) {
	isolate(t)
	var out bytes.Buffer
	app := newApp(&out, io.Discard)
	lists := regexp.MustCompile("(?:: |`\\]?: )([a-z0-9_+-]+(?:, [a-z0-9_+-]+)+)$")
	var walk func(path []string, c *cli.Command)
	walk = func(path []string, c *cli.Command) {
		path = append(slices.Clone(path), c.Name)
		for _, f := range c.Flags {
			s, is := f.(*hcli.TextFlag)
			if !is || c.SkipFlagParsing {
				continue
			}
			if m := lists.FindStringSubmatch(s.Usage); m != nil {
				out.Reset()
				require.NoError(t, hcli.Complete(app, hcli.Question{Words: append(slices.Clone(path), "--"+s.Name)}, noneThere))
				offered := strings.Fields(strings.TrimSuffix(out.String(), ":files\n"))
				require.Equal(t, m[1], strings.ReplaceAll(strings.Join(offered, ", "), "=", ""), // KEY=
					"%v --%s", path, s.Name)
			}
		}
		for _, sub := range c.Subcommands {
			walk(path, sub)
		}
	}
	for _, c := range app.Commands {
		walk(nil, c)
	}
}

// A question never runs a verb, whatever is typed.
func TestCompletionRunsNothing(t *testing.T) {
	isolate(t)
	for _, typed := range [][]string{
		{"generate", "--nodes", "10", "--out", "made", "--"}, {"generate", "--nodes", "10", "--out", "made"},
		{"generate", "--nodes", "10", "--out", "made", "--", ""}, {"generate", "--nodes=10", "--out=made", "-"},
		{"bind-ssds", "--proxy", "made", "--size", "8MiB", "--"}, {"bind-ssds", "--proxy", "made", "--size", "8MiB"},
		{"vfio-setup", "--print", "--"}, {"vfio-setup", "--print"}, {"version", "--"}, {"version"},
		{"--version"}, {"help"}, {"--help"}, {"generate", "--nodes", "10", "--out", "made", "--json=true"},
	} {
		args := append([]string{"__complete"}, typed...)
		r := hc(t, args...)
		require.Equal(t, 0, r.code, "%q", args)
		require.Empty(t, r.errOut, "%q", args)
		require.NotContains(t, r.out, "#!/bin/sh", "%q", args)
		require.NotContains(t, r.out, "Apache", "%q", args)
		require.NoFileExists(t, "made", "%q", args)
	}
}

// The shells themselves, with their own scripts: what a Tab offers, and that nothing runs.
func TestCompletionInShells(t *testing.T) {
	isolate(t)
	self, err := os.Executable()
	require.NoError(t, err)
	require.NoError(t, os.Mkdir("bin", 0o755))
	require.NoError(t, os.Symlink(self, "bin/heliosctl"))
	require.NoError(t, os.WriteFile("graph.yaml", nil, 0o644))
	require.NoError(t, os.MkdirAll("data/mine", 0o755))
	require.NoError(t, os.WriteFile("data/mine/dataset.yaml", nil, 0o644))
	bin, err := filepath.Abs("bin")
	require.NoError(t, err)
	ask := map[string]func(line string) string{
		"bash": func(line string) string {
			return `source <(heliosctl completion bash)
line=` + "'" + line + "'" + `
IFS=$' ' read -ra COMP_WORDS <<<"${line//=/ = }"; [[ $line == *' ' || $line == *= ]] && [[ $line != *= ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$line; COMP_POINT=${#line}
_heliosctl; printf '%s\n' "${COMPREPLY[@]}"`
		},
		"fish": func(line string) string {
			return "heliosctl completion fish | source; complete -C '" + line + "' | cut -f1"
		},
		"zsh": func(line string) string { // whose widgets need a terminal: what they are given
			return `compdef() { :; }; compset() { :; }; _describe() { print -rl -- "${(@P)3}"; }
_files() { print -rl -- *; }
source <(heliosctl completion zsh)
words=("${(@s: :)${:-` + line + `}}"); CURRENT=$#words; PREFIX=$words[CURRENT]
_heliosctl`
		},
	}
	for _, shell := range hcli.Shells {
		path, err := exec.LookPath(shell)
		if err != nil && shell != "bash" {
			continue // not on this machine
		}
		require.NoError(t, err)
		tab := func(line string) string {
			c := exec.Command(path, "-c", ask[shell](line))
			c.Env = append(os.Environ(), asChild+"=1", "PATH="+bin+":"+os.Getenv("PATH"), "HOME="+t.TempDir(),
				"TERM=dumb")
			out, err := c.CombinedOutput()
			require.NoError(t, err, "%s: %s", shell, out)
			return string(out)
		}
		for i, c := range []struct {
			line string
			want []string
		}{
			{"heliosctl train --mode ", []string{"helios", "gids", "inmem"}},
			{"heliosctl generate --nodes 10 --out made --", []string{"--homophily"}},
			{"heliosctl train data/", []string{"data/mine"}},
			{"heliosctl train --mode=he", []string{"helios"}},
			{"heliosctl train --config gr", []string{"graph.yaml"}},
			{"heliosctl train --", []string{"--mode", "--epochs"}},
			{"heliosctl tra", []string{"train"}},
			{"heliosctl compare g --modes cpu,b", []string{"cpu,bam"}},
			{"heliosctl generate --nodes 10 --out made -- ", []string{""}},
		} {
			if wide.Lean() && i > 4 && shell != "bash" {
				break
			}
			got := tab(c.line)
			for _, w := range c.want {
				require.Contains(t, got, w, "%s: %q", shell, c.line)
			}
			require.NoFileExists(t, "made", shell)
		}
	}
}

// The manual page names every verb and its flags.
func TestManualPage(t *testing.T) {
	isolate(t)
	require.NoError(t, os.Mkdir("man", 0o755))
	ok(t, "man", "man")
	read := func(name string) string {
		b, err := os.ReadFile("man/" + name)
		require.NoError(t, err)
		return string(b)
	}
	index := read("heliosctl.1")
	require.True(t, strings.HasPrefix(index, ".nh\n.TH heliosctl 1"))
	require.Contains(t, index, "heliosctl-train(1)")
	require.Contains(t, index, "Exit codes")
	require.NotContains(t, index, ".SH man")
	for verb, c := range verbs(newApp(io.Discard, io.Discard).Commands, "") {
		if c.Hidden {
			continue
		}
		top, _, _ := strings.Cut(verb, " ")
		page := read("heliosctl-" + top + ".1")
		require.Contains(t, page, ".TH heliosctl-"+top+" 1")
		for _, o := range optionsOf(c) {
			require.Contains(t, strings.ReplaceAll(page, `\-`, "-"), "--"+o.Names()[0], verb)
		}
	}
	fails(t, hc(t, "man"), 2, "man", "no folder")
}
