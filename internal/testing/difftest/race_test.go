package difftest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// stepBarriers are as barriers, of kernels of a training step.
var stepBarriers = []struct{ kernel, file, right, wrong string }{
	{"transpose_scatter", "transpose.cu",
		"\t\t\t\tto += n;\n\t\t\t}\n\t\t}\n\t\tdev::syncthreads();",
		"\t\t\t\tto += n;\n\t\t\t}\n\t\t}\n"},
	{"transpose_scatter", "transpose.cu",
		"\t\t\tdev::syncwarp(); // all have read the place before it moves on\n", ""},
	{"xent_sum", "loss.h",
		"\t\tdev::st(&parts[dev::tid()], leaf(from, to));\n\t\tdev::syncthreads();",
		"\t\tdev::st(&parts[dev::tid()], leaf(from, to));"},
}

// setBarriers are as barriers, of the directory in sets.
var setBarriers = []struct{ kernel, file, right, wrong string }{
	{"sets_sort", "sets.cu",
		"\tdev::syncwarp(); // all have read before the lowest writes\n", ""},
	{"sets_lists", "sets.cu",
		"\t\tif (w < active) count_lists(p, mine, own, ssds);\n\t\tdev::syncthreads();",
		"\t\tif (w < active) count_lists(p, mine, own, ssds);"},
}

// raceProgram builds src/race.cc with the kernels under root, under ThreadSanitizer. It skips where
// the compiler or its ThreadSanitizer is not there.
func raceProgram(t *testing.T, root string) string {
	t.Helper()
	cxx := strings.Fields(os.Getenv("CXX"))
	if len(cxx) == 0 {
		cxx = []string{"g++"}
	}
	if _, err := exec.LookPath(cxx[0]); err != nil {
		t.Skipf("no C++ compiler: %v; install g++ or set CXX", err)
	}
	dir := t.TempDir()
	run := func(args ...string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		text, err := exec.CommandContext(ctx, cxx[0], append(cxx[1:len(cxx):len(cxx)],
			args...)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s %s: %w\n%s", cxx[0], strings.Join(args, " "), err, text)
		}
		return nil
	}
	probe := filepath.Join(dir, "probe.cc")
	if err := os.WriteFile(probe,
		[]byte(
			"extern \"C\" void *__tsan_create_fiber(unsigned);\nint main() { return __tsan_create_fiber(0) == nullptr; }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run("-fsanitize=thread", "-o", filepath.Join(dir, "probe"), probe); err != nil {
		t.Skipf("no ThreadSanitizer with fibers: %v; install its runtime (libtsan)", err)
	}
	runtimeFiles, err := filepath.Glob(filepath.Join(root, "internal/testing/shim/*.cc"))
	if err != nil || len(runtimeFiles) == 0 {
		t.Fatalf("the shim's sources: %v", err)
	}
	common := []string{"-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror",
		"-I" + filepath.Join(root, "cuda/kernels"), "-I" + filepath.Join(root, "internal/testing/shim")}
	var jobs [][]string
	for _, f := range runtimeFiles { // never instrumented: internal.h of the shim has the reason
		jobs = append(jobs, append([]string{"-DHX_TSAN=1"}, common...), []string{f})
	}
	for _, k := range []string{"lookup", "gather", "sample", "unique", "ladies", "labor", "hotness",
		"sets", "aggregate", "transpose", "colsum", "loss", "loss_bce", "loss_dense",
		"adam", "dropout"} {
		jobs = append(jobs, append([]string{"-fsanitize=thread", "-DHX_SHIM", "-x", "c++"},
			common...), []string{filepath.Join(root, "cuda/kernels", k+".cu")})
	}
	jobs = append(jobs, append([]string{"-fsanitize=thread"}, common...), []string{"src/race.cc"})
	errs := make([]error, len(jobs)/2)
	var objects []string
	slots := make(chan struct{}, runtime.NumCPU())
	var wg sync.WaitGroup
	for i := 0; i < len(jobs); i += 2 {
		o := filepath.Join(dir, fmt.Sprintf("%d.o", i))
		objects = append(objects, o)
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			errs[i/2] = run(append(jobs[i], "-c", jobs[i+1][0], "-o", o)...)
		})
	}
	wg.Wait()
	program := filepath.Join(dir, "race")
	if err := errors.Join(append(errs,
		run(append([]string{"-fsanitize=thread", "-pthread", "-o", program},
			objects...)...))...); err != nil {
		t.Fatal(err)
	}
	return program
}

// race runs the program until its rounds are over or, where first is set, something is reported.
func race(t *testing.T, program string, seed uint64, rounds int, first bool) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, fmt.Sprint(seed), fmt.Sprint(rounds))
	options := "atexit_sleep_ms=0 exitcode=66"
	if first {
		options += " halt_on_error=1"
	}
	cmd.Env = append(os.Environ(), "TSAN_OPTIONS="+options)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// TestRace: ThreadSanitizer has nothing to say about the data kernels and those of a training step,
// and does about copies that lack a barrier. It is part of make test-shim, which sets DIFF_BATCHES.
func TestRace(t *testing.T) {
	if os.Getenv("DIFF_BATCHES") == "" {
		t.Skip("part of make test-shim, which sets DIFF_BATCHES")
	}
	repo, err := filepath.Abs("../../..")
	require.NoError(t, err)
	rounds := min(max(batches(t)/100, 5), 100)
	s := seed(t)
	text, err := race(t, raceProgram(t, repo), s, rounds, false)
	if err != nil || strings.Contains(text, "WARNING") {
		t.Fatalf("seed %d: %v\n%s", s, err, text)
	}
	t.Log(strings.TrimSpace(text))
	for _, p := range slices.Concat(barriers, stepBarriers, setBarriers) {
		t.Run("without a barrier in "+p.kernel, func(t *testing.T) {
			// A missing barrier shows in some rounds only: threads must meet where it was.
			text, err := race(t, raceProgram(t, plantedRoot(t, p.file, p.right, p.wrong)), 1,
				200, true)
			if err == nil || !strings.Contains(text, "data race") {
				t.Fatalf("no race was reported: %v\n%s", err, text)
			}
		})
	}
}
