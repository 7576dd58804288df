package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/htmlreport"
	"helios/internal/testing/wide"
)

// steps are the events "step" of a suite's results.
func suiteStepsOf(t *testing.T, dir string) (names []string) {
	t.Helper()
	return stepsIn(t, filepath.Join(dir, suiteResults))
}

func stepsIn(t *testing.T, path string) (names []string) {
	t.Helper()
	for _, l := range lines(t, readFile(t, path)) {
		if l["event"] == "step" {
			require.Empty(t, l["failed"])
			require.NotEmpty(t, l["lines"])
			names = append(names, l["step"].(string))
		}
	}
	return names
}

// stopAfter cancels a context when so many lines that hold a word were written.
type stopAfter struct {
	mu sync.Mutex
	bytes.Buffer
	word   string
	left   int
	cancel context.CancelCauseFunc
}

func (s *stopAfter) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left -= bytes.Count(b, []byte(s.word)); s.left <= 0 {
		s.cancel(errSignal)
	}
	return s.Buffer.Write(b)
}

// A suite goes forth and back, is stopped, runs the steps that it lacks, and leaves its two files.
func TestBenchSuite(t *testing.T) {
	isolate(t)
	args := []string{"bench", "suite", "--preset", "smoke", "--only", "memory,sample", "--clock", "wall",
		"--out", "s"}
	ctx, cancel := context.WithCancelCause(t.Context())
	out := &stopAfter{word: "round 1 of 2: ", left: 1, cancel: cancel}
	var errOut bytes.Buffer
	require.Equal(t, 130, run(ctx, args, out, &errOut))
	require.Contains(t, errOut.String(), "the same command goes on where the suite was")
	require.Equal(t, []string{"memory-wall"}, suiteStepsOf(t, "s"))
	// As kill -9 leaves it: the last line cut off, the work folder there.
	f, err := os.OpenFile("s/results.jsonl", os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(`{"event":"step","step":"rows-w`)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.DirExists(t, "s/work")

	fails(t, hc(t, append(args, "--seed")...), 2, "bench suite", "seed")
	fails(t, hc(t, "bench", "suite", "--preset", "smoke", "--out", "s"), 4, "bench suite",
		"other options", "--overwrite")
	require.Contains(t, ok(t, args...), "report: ")
	steps := suiteStepsOf(t, "s")
	require.Equal(t, []string{"memory-wall", "sample-wall", "sample-wall", "memory-wall"}, steps,
		"the second round goes back")
	all, err := os.ReadDir("s")
	require.NoError(t, err)
	require.Len(t, all, 2, "results and report")

	result := readFile(t, "s/results.jsonl")
	floors := 0
	for _, l := range lines(t, result) {
		if l["event"] != "figures" {
			continue
		}
		for _, x := range l["figures"].([]any) {
			f := x.(map[string]any)
			require.Equal(t, true, f["audited"], f)
			if f["floor"] != nil {
				floors++
				require.NotEmpty(t, f["floor_from"])
			}
			require.Equal(t, 2.0, f["rounds"], f)
		}
	}
	require.Equal(t, 6, floors)
	page := readFile(t, "s/report.html")
	require.Less(t, len(page), 2<<20)
	for _, want := range []string{"Shares of the floors", "Edges sampled a second",
		"Gathers of rows", "<td>whole</td>"} {
		require.Contains(t, page, want)
	}
	require.NoError(t, os.Remove("s/report.html"))
	require.Contains(t, ok(t, args...), "report: ", "nothing is left but to draw it")
	require.FileExists(t, "s/report.html")
	require.Equal(t, steps, suiteStepsOf(t, "s"))
	again := lines(t, ok(t, "rerun", "s/results.jsonl", "--results", "again.jsonl", "--json"))
	require.Equal(t, "bench suite", again[0]["verb"])
	require.Greater(t, again[0]["equal"], 7.0)
	require.ElementsMatch(t, steps, stepsIn(t, "again.jsonl"))
	require.NoError(t, os.WriteFile("other.jsonl", []byte(strings.ReplaceAll(
		readFile(t, "s/results.jsonl"), `"digest":"`, `"digest":"x`)), 0o600))
	fails(t, hc(t, "rerun", "other.jsonl"), 1, "rerun", `sample-wall 1[0].digest was "x`)
	entries, err := os.ReadDir(".")
	require.NoError(t, err)
	for _, e := range entries {
		require.NotContains(t, e.Name(), "heliosctl-rerun", "left behind")
	}
	ok(t, append(args, "--overwrite", "--only", "memory")...)
	require.Equal(t, []string{"memory-wall", "memory-wall"}, suiteStepsOf(t, "s"))
}

// A suite takes no folder of others, and refuses what cannot be before it makes anything.
func TestBenchSuiteBadInput(t *testing.T) {
	isolate(t)
	require.NoError(t, os.Mkdir("mine", 0o700))
	require.NoError(t, os.WriteFile("mine/thesis.tex", []byte("x"), 0o600))
	fails(t, hc(t, "bench", "suite", "--out", "mine", "--overwrite"), 4, "bench suite",
		"thesis.tex", "empty folder")
	require.NoError(t, os.Mkdir("other", 0o700))
	require.NoError(t, os.WriteFile("other/results.jsonl", []byte(
		`{"event":"begin","run":"a","verb":"train"}`+"\n"), 0o600))
	fails(t, hc(t, "bench", "suite", "--out", "other", "--overwrite"), 4, "bench suite",
		"no suite's")
	for args, want := range map[string]string{
		"":                                     "no --out",
		"--out x --quick --preset full":        "--quick and --preset",
		"--out x --only io,speed":              "--only",
		"--out x --clock sun":                  "--clock",
		"--out x --device gpu":                 "gpu",
		"--out x --only cache --clock virtual": "nothing is left",
		"--out x --hardware none":              "none",
		"--out x --budget-time 1ms":            "--budget-time",
		"--out x g":                            "no SSD is bound",
	} {
		fails(t, hc(t, append([]string{"bench", "suite"}, strings.Fields(args)...)...), 2,
			"bench suite", want)
		require.NoDirExists(t, "x")
	}
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "1MiB")
	fails(t, hc(t, "bench", "suite", "--out", "x"), 2, "bench suite", "no dataset is given")
}

// Lists turn round in every second round, and the length of the measurements follows the budget.
func TestSuitePlan(t *testing.T) {
	x := suiteStep{args: []string{"bench", "io", "--io-stack=async,sync", "--depth=1,2"},
		clock: "wall", points: 4, rounds: 2, turned: []string{"depth"}}
	require.Equal(t, []string{"bench", "io", "--results=r", "--quiet", "--seconds=0.5",
		"--io-stack=async,sync", "--depth=1,2"}, x.arguments(0, 0.5, "r"))
	require.Equal(t, "--depth=2,1", x.arguments(1, 0.5, "r")[6])
	require.Equal(t, []int{1, 2, 4, 6}, upTo(6))
	require.Equal(t, []int{1}, upTo(1))
	s := &suite{}
	// 8 measurements of 1.5 lengths in half of two minutes.
	require.InDelta(t, 5, s.fit([]suiteStep{x, {clock: "virtual", points: 9, rounds: 9}},
		2*time.Minute), 1e-9)
	require.Equal(t, 60.0, s.fit([]suiteStep{x}, time.Hour))
}

// All groups, on the user's own SSDs and dataset, too.
func TestBenchSuiteWhole(t *testing.T) {
	if wide.Lean() { // the race detector has the parts of a suite in the tests of their verbs
		t.Skip("part of make test-wide")
	}
	isolate(t)
	ok(t, "bench", "suite", "--preset", "smoke", "--out", "own")
	require.Len(t, suiteStepsOf(t, "own"), 2*9+2+4+2)
	got := lines(t, ok(t, "rerun", "own/results.jsonl", "--results", "again.jsonl", "--json"))
	require.Equal(t, "bench suite", got[0]["verb"])
	require.Greater(t, got[0]["equal"], 100.0)
	require.Len(t, stepsIn(t, "again.jsonl"), len(suiteStepsOf(t, "own")))
	var b strings.Builder
	f, err := os.Open("own/results.jsonl")
	require.NoError(t, err)
	source, err := htmlreport.Read(f, "own")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, htmlreport.Write(&b, []*htmlreport.Source{source}, "v"))
	for _, want := range []string{"Pipelines, wall clock", "Modes, virtual clock",
		"Kernels of models", "Throughput by SSDs", "limit of the SSDs", "limit of the link",
		"Reads by depth, virtual clock"} {
		require.Contains(t, b.String(), want)
	}
	loaded(t, 2)
	ok(t, "bench", "suite", "--preset", "smoke", "--only", "io,modes", "--clock", "wall", "--out",
		"bound", "g")
	require.Len(t, suiteStepsOf(t, "bound"), 2*4+1)
	ok(t, "verify", "g")
}
