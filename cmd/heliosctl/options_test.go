package main

import (
	"flag"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"helios/internal/options"
	"helios/sched/plan"
	"helios/sched/tiers"
)

// A run of the command line that names its mode alone is the library's run of that mode, field by
// field: every default is the library's.
func TestDefaultsAreTheLibrarys(t *testing.T) {
	for _, mode := range tiers.Catalog.Names() {
		set := flag.NewFlagSet("train", flag.ContinueOnError)
		for _, f := range trainCommand().Flags {
			require.NoError(t, f.Apply(set))
		}
		require.NoError(t, set.Parse([]string{"--mode", mode}))
		var a trainerArgs
		require.NoError(t, trainOptions().Read(cli.NewContext(cli.NewApp(), set, nil), &a))
		require.NoError(t, a.check())
		got, want := reflect.ValueOf(a.cfg.WithDefaults()),
			reflect.ValueOf(plan.Config{Mode: mode}.WithDefaults())
		for i := range want.NumField() {
			f := want.Type().Field(i)
			if f.IsExported() && f.Type.Kind() != reflect.Func { // functions are the caller's
				require.Equal(t, want.Field(i).Interface(), got.Field(i).Interface(), "%s: %s",
					mode, f.Name)
			}
		}
	}
}

// All options of a run stand under a heading of help.
func TestOptionsHaveHeadings(t *testing.T) {
	for _, o := range options.Of(&plan.Config{}) {
		require.NotEmpty(t, o.Group, o.Name)
	}
}

// Every share is written as a percentage or as a part of 1, whichever verb and flag has it: no flag
// whose help says "share of" reads a number of its own.
func TestSharesAreReadAlike(t *testing.T) {
	isolate(t)
	var walk func(path string, c *cli.Command)
	walk = func(path string, c *cli.Command) {
		for _, f := range c.Flags {
			d, ok := f.(cli.DocGenerationFlag)
			number, is := f.(*cli.Float64Flag)
			if ok && is && strings.HasPrefix(strings.ToLower(d.GetUsage()), "share of") {
				t.Errorf("%s --%s is a number, and no share", path, number.Name)
			}
		}
		for _, sub := range c.Subcommands {
			walk(path+" "+sub.Name, sub)
		}
	}
	for _, c := range newApp(io.Discard, io.Discard).Commands {
		walk(c.Name, c)
	}
	generate := func(out string, args ...string) string {
		ok(t, append([]string{"generate", "--nodes", "1000", "--dim", "8", "--out", out,
			"--quiet"}, args...)...)
		b, err := os.ReadFile(out + "/train.npy")
		require.NoError(t, err)
		return string(b)
	}
	require.Equal(t, generate("a", "--train-fraction", "1.1%", "--val-fraction", "20%"),
		generate("b", "--train-fraction", "0.011", "--val-fraction", "0.2"))
	require.NoError(t, os.WriteFile("c.yaml", []byte("train-fraction: 1.1%\nval-fraction: 0.2\n"), 0o644))
	require.Equal(t, generate("c", "--config", "c.yaml"), generate("d", "--train-fraction", "1.1 %"))
	for _, bad := range []string{"10", "101%", "-1%", "nan", "half", "1,5%"} {
		fails(t, hc(t, "generate", "--nodes", "10", "--out", "x", "--train-fraction", bad), 2, "generate",
			"--train-fraction", bad, "share")
		fails(t, hc(t, "train", "g", "--dropout", bad), 2, "train", "--dropout", bad, "share")
		fails(t, hc(t, "plan", "--graph", "ig", "--hardware", "host", "--mode", "hier", "--cut",
			bad), 2, "plan", "--cut", bad, "share")
	}
}

// A message names flags, and says the user's own words as they were typed.
func TestOwnWordsStay(t *testing.T) {
	isolate(t)
	fails(t, hc(t, "train", "my option mode", "--epochs", "1"), 2, "train", "my option mode")
	fails(t, hc(t, "train", "--dataset=my option mode", "--policy", "belady",
		"--superbatch-disk", "0"), 2, "train", "--superbatch-disk")
	fails(t, hc(t, "plan", "an option policy", "--hardware", "host"), 2, "plan", "an option policy")
}

// An error names an option as the user gave it: as a flag, by its place in a configuration file, or
// as a keyword of Python; another verb's option is named as that verb's.
func TestErrorsNameOptionsAsGiven(t *testing.T) {
	isolate(t)
	require.NoError(t, os.WriteFile("c.yaml", []byte("nodes: 10\n\nhomophily: 2\n"), 0o644))
	generate := []string{"generate", "--out", "g", "--nodes", "10"}
	fails(t, hc(t, append(generate, "--homophily", "2")...), 2, "generate", "--homophily 2")
	fails(t, hc(t, append(generate, "--config", "c.yaml")...), 2, "generate", "homophily (c.yaml:3) 2")
	t.Setenv(keywordsVar, "1")
	fails(t, hc(t, append(generate, "--hub-edges", "2")...), 2, "generate", "hub_edges 2")
	fails(t, hc(t, "generate", "--hub-edge", "2"), 2, "generate", "did you mean hub_edges?")
}
