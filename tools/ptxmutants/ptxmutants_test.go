package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every job names tests that there are.
func TestJobsNameTests(t *testing.T) {
	for _, j := range jobs {
		files, err := filepath.Glob(filepath.Join("../..", j.pkg, "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v, %v", j.pkg, files, err)
		}
		first, _, _ := strings.Cut(j.run, "/")
		run := regexp.MustCompile(first)
		found := false
		for _, f := range files {
			text, err := os.ReadFile(f)
			require.NoError(t, err)
			for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(text, -1) {
				found = found || run.Match(m[1])
			}
		}
		if !found {
			t.Errorf("%s: the package has no such test", j)
		}
	}
}

// The score counts the executed mutants; below the bar the tool fails.
func TestScore(t *testing.T) {
	order := Mutant{Kernel: "b", Class: Order, OrderOnly: true}
	ends := []verdict{
		{Mutant: Mutant{Kernel: "a"}, End: noticed},
		{Mutant: Mutant{Kernel: "a"}, End: noticed},
		{Mutant: Mutant{Kernel: "a"}, End: survived, Why: "changed"},
		{Mutant: order, End: survived, Why: "order only"},
		{Mutant: order, End: notExecuted},
	}
	if got := count(ends); got != (tally{5, 4, 2, 1, 0}) || got.score() != 0.5 {
		t.Errorf("%+v, score %v", got, got.score())
	}
	if none := unnoticed(ends[:4]); none != nil {
		t.Errorf("none was noticed of %v, whose mutants are too few to say so", none)
	}
	ends = append(ends, verdict{Mutant: order, End: notExecuted})
	if none := unnoticed(ends); !slices.Equal(none, []string{"b"}) {
		t.Errorf("none was noticed of %v", none)
	}
	if err := report(ends, 0.5, true); err != nil {
		t.Error(err)
	}
	if err := report(ends, 0.51, false); err == nil {
		t.Error("a score of 0.5 passed a bar of 0.51")
	}
	if err := report(nil, 0.1, false); err == nil {
		t.Error("no mutants passed a bar")
	}
}

// A guard that never holds is reached all the same, where what is beside it was.
func TestReached(t *testing.T) {
	counts := []int64{3, 0, 0, 0}
	for i, want := range []bool{true, true, false, false} {
		m := Mutant{Index: i, Class: Predicate}
		if reached(m, counts) != want {
			t.Errorf("guard of instruction %d: %v", i, !want)
		}
		if m.Class = Operand; reached(m, counts) != (i == 0) {
			t.Errorf("instruction %d: %v", i, i != 0)
		}
	}
}

func TestSurvivors(t *testing.T) {
	for _, c := range []struct {
		order              bool
		compared, differed int64
		want               string
	}{{true, 0, 0, orderOnly}, {false, 5, 1, lostValues}, {false, 5, 0, sameValues},
		{false, 0, 0, sameEffect}} {
		if got := survivorOf(Mutant{OrderOnly: c.order}, c.compared,
			c.differed); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

func TestNoticedBy(t *testing.T) {
	for want, r := range map[string]result{
		"did not end":   {late: true, said: "x"},
		"wild address":  {said: "… CUDA_ERROR_ILLEGAL_ADDRESS (700) …"},
		"launch failed": {said: "CUDA_ERROR_LAUNCH_FAILED (719)"},
		"other results": {said: "buffer \"rows\" differs"},
	} {
		if got := noticedBy(r, nil); got != want {
			t.Errorf("%+v: %q, want %q", r, got, want)
		}
	}
	if got := noticedBy(result{said: "more than MaxInstructions, 5: LAUNCH_FAILED"}, nil); got !=
		"did not end" {
		t.Error(got)
	}
}
