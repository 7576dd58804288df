package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	hcli "helios/internal/cli"
	"helios/internal/errs"
)

func TestArrange(t *testing.T) {
	for _, c := range []struct {
		in   string
		want string // arguments, joined by spaces; "" for an error
		err  string
	}{
		{"load g", "load -- g", ""},
		{"load --dataset g", "load --dataset=g --", ""},
		{"load --ssds ssd0 g --json", "load --ssds=ssd0 --json=true -- g", ""},
		{"load g --ssds ssd0", "load --ssds=ssd0 -- g", ""},
		{"load g -ssds ssd0 --quiet=false", "load --ssds=ssd0 --quiet=false -- g", ""},
		{"--state s load g", "load --state=s -- g", ""},
		{"--json --state s load g --json=false", "load --json=true --state=s --json=false -- g",
			""},
		{"load -- --odd-name", "load -- --odd-name", ""},
		{"import npy --in x --out y", "import npy --in=x --out=y --", ""},
		{"import --out y npy --in x", "import npy --out=y --in=x --", ""},
		{"train --fanout -1,-1 g", "train --fanout=-1,-1 -- g", ""},
		{"help train", "train --help", ""},
		{"train --help", "train --help", ""},
		{"import --help", "import --help", ""},
		{"--version", "version --", ""},
		{"", "--help", ""},
		{"-h", "--help", ""},

		{"trian g", "", `unknown verb "trian"; did you mean train (Training)?`},
		{"frobnicate", "", `unknown verb "frobnicate"; see`},
		{"--json", "", "no verb; choose one of generate"},
		{"import", "", "no verb; choose one of debian, dgl, edges"},
		{"import numpy", "", `unknown verb "numpy"`},
		{"train --gpu-cach 5%", "", "unknown flag --gpu-cach; did you mean --gpu-cache (Tiers)?"},
		{"train --cache 5%", "", "unknown flag --cache; did you mean --gpu-cache (Tiers)?"},
		{"train --zzz", "", `unknown flag --zzz; see "heliosctl train --help"`},
		{"bench io --zzz", "", `unknown flag --zzz; see "heliosctl bench io --help"`},
		{"bench io --depth", "", `flag --depth needs a value; see "heliosctl bench io --help"`},
		{"--zzz train", "", "unknown flag --zzz"},
		{"train --epochs", "", "flag --epochs needs a value"},
		{"train --epochs three", "", `--epochs "three" is not a whole number`},
		{"train --epochs 1.5", "", `--epochs "1.5" is not a whole number`},
		{"train --lr fast", "", `--lr "fast" is not a number`},
		{"train --seed -1", "", `--seed "-1" is not a whole number of at least 0`},
		{"train --resume=maybe", "", `--resume "maybe" is not true or false`},
		{"train --read-timeout 5", "", `--read-timeout "5" is not a time such as`},
	} {
		app := newApp(&bytes.Buffer{}, &bytes.Buffer{})
		got, _, err := arrange(app, strings.Fields(c.in))
		if c.want == "" {
			require.Error(t, err, c.in)
			require.Contains(t, errs.Spell(err, errs.Key.Flag), c.err, c.in)
			continue
		}
		require.NoError(t, err, c.in)
		require.Equal(t, c.want, strings.Join(got, " "), c.in)
	}
}

func TestEveryVerbHasHelp(t *testing.T) {
	app := newApp(&bytes.Buffer{}, &bytes.Buffer{})
	for _, c := range hcli.Leaves(app.Commands) {
		require.NotEmpty(t, c.Usage, c.Name)
		require.NotNil(t, c.Action, c.Name)
		seen := map[string]bool{}
		for _, n := range flagNames(c.Flags) {
			require.False(t, seen[n], "%s --%s twice", c.Name, n)
			seen[n] = true
		}
		for _, n := range []string{"json", "state", "config", "quiet"} {
			require.True(t, seen[n], "%s --%s", c.Name, n)
		}
	}
	out := ok(t, "train", "--help")
	for _, f := range []string{"--mode", "--model", "--fanout", "--batch-size", "--hidden",
		"--epochs", "--lr", "--seed", "--gpu-cache", "--cpu-cache", "--json", "--ssds",
		"\nExample: heliosctl train g", "heliosctl train --help all"} {
		require.Contains(t, out, f)
	}
	require.NotContains(t, out, "--pipeline")
	require.Contains(t, ok(t, "train", "--help", "all"), "--pipeline")
	require.NotContains(t, out, "Columns:")
	require.Contains(t, ok(t, "--help"), "\nTraining verbs:\n  train ")
	require.Contains(t, ok(t, "bench", "--help"), "\nVerbs:\n  io ")
	// The short help of any verb has some 15 flags of its own. Lines are of 100 columns.
	for verb, c := range verbs(app.Commands, "") {
		args := append(strings.Fields(verb), "--help")
		require.LessOrEqual(t, len(regexp.MustCompile(`(?m)^  --`).FindAllString(ok(t, args...), -1)), 20, verb)
		all := ok(t, append(args, "all")...)
		if !c.Hidden && !c.SkipFlagParsing {
			require.Contains(t, all, " "+c.UsageText+"\n", "an example is one line, to be copied")
		}
		for line := range strings.Lines(all) {
			require.LessOrEqual(t, utf8.RuneCountInString(line), 101, "%s: %s", verb, line)
		}
	}
}

func TestExamplesCanBeTyped(t *testing.T) {
	for verb, c := range verbs(newApp(io.Discard, io.Discard).Commands, "") {
		if c.Hidden {
			continue
		}
		_, typed, found := strings.Cut(c.UsageText, "heliosctl ")
		require.True(t, found, verb)
		_, got, err := arrange(newApp(io.Discard, io.Discard), strings.Fields(strings.TrimSuffix(typed, ")")))
		require.NoError(t, err, verb)
		require.Equal(t, verb, got)
	}
}

func TestConfigFile(t *testing.T) {
	isolate(t)
	write := func(text string) {
		require.NoError(t, os.WriteFile("c.yaml", []byte(text), 0o644))
	}
	args := func(extra ...string) (string, error) {
		app := newApp(&bytes.Buffer{}, &bytes.Buffer{})
		got, _, err := arrange(app, append([]string{"train", "--config", "c.yaml"}, extra...))
		return strings.Join(got, " "), err
	}
	write("# a run\nmode: cpu\nfanout: [15, 10]\nlr: 0.01\nresume: true\nread-timeout: 2s\n")
	got, err := args("--lr", "0.5")
	require.NoError(t, err)
	require.Equal(t,
		"train --config=c.yaml --lr=0.5 --mode=cpu --fanout=15,10 --resume=true --read-timeout=2s --",
		got)

	write("dataset: g\n")
	got, err = args("other")
	require.NoError(t, err)
	require.Equal(t, "train --config=c.yaml -- other", got,
		"an argument wins over the file's dataset")
	got, err = args()
	require.NoError(t, err)
	require.Equal(t, "train --config=c.yaml --dataset=g --", got)

	write("")
	_, err = args()
	require.NoError(t, err)

	for text, want := range map[string]string{
		"epoch: 3\n":           `line 1: unknown key "epoch"; did you mean epochs?`,
		"mode: cpu\nfoo: 1\n":  `line 2: unknown key "foo"`,
		"config: x\n":          "unknown key",
		"epochs: many\n":       `line 1: --epochs "many" is not a whole number`,
		"mode: cpu\nmode: c\n": "mode",
		"mode:\n  a: b\n":      "neither a scalar nor a list",
		"- mode\n":             "not a mapping",
		"mode: [\n":            "c.yaml",
		"mode: cpu\n---\na: b": "more than one document",
	} {
		write(text)
		_, err := args()
		require.Error(t, err, text)
		require.Contains(t, errs.Spell(err, errs.Key.Flag), want, text)
	}
	require.NoError(t, os.Remove("c.yaml"))
	_, err = args()
	require.ErrorContains(t, err, "--config: stat c.yaml: no such file")
}

// A shell turns --config <(…) into the name of a pipe.
func TestConfigFromAPipe(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	_, err = w.WriteString("mode: cpu\n")
	require.NoError(t, err)
	require.NoError(t, w.Close())
	f, err := openConfig(fmt.Sprintf("/dev/fd/%d", r.Fd()))
	require.NoError(t, err)
	text, err := io.ReadAll(f)
	require.NoError(t, err)
	require.Equal(t, "mode: cpu\n", string(text))
	require.NoError(t, errors.Join(f.Close(), r.Close()))
	// Another pipe may have nobody who writes to it.
	fifo := filepath.Join(t.TempDir(), "p")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	_, err = openConfig(fifo)
	require.ErrorContains(t, err, "is a pipe")
}

// Counts are written in one way, for every verb and in files of --config.
func TestCounts(t *testing.T) {
	isolate(t)
	require.NoError(t, os.WriteFile("c.yaml", []byte("nodes: 0.5K\ndim: 8\n"), 0o600))
	require.EqualValues(t, 1000, lines(t, ok(t, "generate", "--nodes", "1K", "--dim", "8", "--out", "a",
		"--json"))[0]["nodes"])
	require.EqualValues(t, 500, lines(t, ok(t, "generate", "--config", "c.yaml", "--out", "b",
		"--json"))[0]["nodes"])
	fails(t, hc(t, "generate", "--nodes", "1.0001K", "--out", "c"), 2, "generate", "--nodes",
		"not a whole number")
	for path, c := range verbs(newApp(io.Discard, io.Discard).Commands, "") {
		for _, f := range c.Flags {
			switch f.(type) {
			case *cli.IntFlag, *cli.Int64Flag, *cli.Uint64Flag:
				value, err := plainValue(f, f.Names()[0], "2K")
				require.NoError(t, err, path)
				require.Equal(t, "2000", value)
			}
		}
	}
	big, err := plainValue(&cli.Uint64Flag{Name: "seed"}, "seed", "18446744073709551615")
	require.NoError(t, err)
	require.Equal(t, "18446744073709551615", big)
}
