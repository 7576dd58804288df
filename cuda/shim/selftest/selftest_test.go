// Package selftest checks the CPU shim that the kernels are proven on: that it runs what is right,
// names what is wrong, shows what weak memory may do, replays by seed, and that its ThreadSanitizer
// build reports races and nothing else. The programs are in src.
//
//	go test ./cuda/shim/selftest                100 seeds of each litmus test
//	SEEDS=2000 go test ./cuda/shim/selftest     more of them, and more under ThreadSanitizer
//	CXX=clang++-19 go test ./cuda/shim/selftest
package selftest_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func seeds(t *testing.T, usual int) int {
	t.Helper()
	s := os.Getenv("SEEDS")
	if s == "" {
		return usual
	}
	n, err := strconv.Atoi(s)
	require.NoError(t, err, "SEEDS")
	return max(n, usual)
}

func compiler(t *testing.T) []string {
	t.Helper()
	cxx := strings.Fields(os.Getenv("CXX"))
	if len(cxx) == 0 {
		cxx = []string{"g++"}
	}
	if _, err := exec.LookPath(cxx[0]); err != nil {
		t.Skipf("no C++ compiler: %v; install g++ or set CXX", err)
	}
	return cxx
}

// build compiles the self test once per content of its sources, with the runtime never under
// -fsanitize=thread (see internal.h).
func build(t *testing.T, tsan bool, extra ...string) string {
	t.Helper()
	cxx := compiler(t)
	runtimeSources, err := filepath.Glob("../*.cc")
	require.NoError(t, err)
	sources := append(slices.Clone(runtimeSources), "src/kernels.cu", "src/main.cc")
	inputs := slices.Clone(sources)
	for _, g := range []string{"src/*.h", "../*.h", "../../kernels/types.h", "../../kernels/device.h", "../../kernels/device_shim.h"} {
		files, err := filepath.Glob(g)
		require.NoError(t, err)
		require.NotEmpty(t, files, g)
		inputs = append(inputs, files...)
	}
	h := sha256.New()
	version, err := exec.Command(cxx[0], append(slices.Clone(cxx[1:]), "--version")...).Output()
	require.NoError(t, err)
	fmt.Fprintf(h, "%s %q %v\n%s", runtime.GOARCH, extra, tsan, version)
	for _, f := range inputs {
		body, err := os.ReadFile(f)
		require.NoError(t, err)
		fmt.Fprintf(h, "%s %d\n%s", f, len(body), body)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	dir := filepath.Join(cache, "helios-shim-selftest")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, f := range files {
		if info, err := f.Info(); err == nil && time.Since(info.ModTime()) > 7*24*time.Hour {
			_ = os.Remove(filepath.Join(dir, f.Name()))
		}
	}
	out := filepath.Join(dir, fmt.Sprintf("selftest-%x", h.Sum(nil)[:12]))
	now := time.Now()
	if os.Chtimes(out, now, now) == nil { // it is there, and in use
		return out
	}

	objects := t.TempDir()
	errs := make([]error, len(sources))
	names := make([]string, len(sources))
	slots := make(chan struct{}, runtime.NumCPU())
	var wg sync.WaitGroup
	for i, s := range sources {
		names[i] = filepath.Join(objects, strconv.Itoa(i)+".o")
		args := slices.Concat(cxx[1:], []string{"-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-I..", "-I../../kernels"}, extra)
		switch {
		case i < len(runtimeSources) && tsan:
			args = append(args, "-DHX_TSAN=1")
		case tsan:
			args = append(args, "-fsanitize=thread")
		}
		if strings.HasSuffix(s, ".cu") {
			args = append(args, "-DHX_SHIM", "-x", "c++")
		}
		args = append(args, "-c", s, "-o", names[i])
		wg.Add(1)
		go func() {
			defer wg.Done()
			slots <- struct{}{}
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
			defer cancel()
			if text, err := exec.CommandContext(ctx, cxx[0], args...).CombinedOutput(); err != nil {
				errs[i] = fmt.Errorf("%s: %w\n%s", s, err, text)
			}
		}()
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	tmp := fmt.Sprintf("%s.%d", out, os.Getpid())
	args := append(slices.Clone(cxx[1:]), names...)
	if tsan {
		args = append(args, "-fsanitize=thread")
	}
	text, err := exec.Command(cxx[0], append(args, "-lpthread", "-o", tmp)...).CombinedOutput()
	require.NoError(t, err, "%s", text)
	require.NoError(t, os.Rename(tmp, out))
	return out
}

// run executes the program; a run that does not end is a failure too.
func run(t *testing.T, program string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "TSAN_OPTIONS=atexit_sleep_ms=0 exitcode=66 report_bugs=1")
	text, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		err = fmt.Errorf("%v has not ended after 5 minutes", args)
	}
	return string(text), err
}

func TestShim(t *testing.T) {
	program := build(t, false)
	litmus := strconv.Itoa(seeds(t, 100))
	for _, c := range [][]string{
		{"collectives", "6"}, {"errors"}, {"litmus", litmus}, {"clocks"}, {"concurrent"}, {"chain"}, {"speed"},
	} {
		t.Run(c[0], func(t *testing.T) {
			text, err := run(t, program, c...)
			require.NoError(t, err, "%v:\n%s", c, text)
			t.Log(text)
		})
	}
	// The same in processes with different addresses.
	t.Run("determinism", func(t *testing.T) {
		first, err := run(t, program, "determinism", "8")
		require.NoError(t, err, "%s", first)
		require.Len(t, strings.Fields(first), 8)
		again, err := run(t, program, "determinism", "8")
		require.NoError(t, err, "%s", again)
		require.Equal(t, first, again, "schedules of equal seeds")
	})
}

// The machines without a context switch of ours.
func TestShimUcontext(t *testing.T) {
	if os.Getenv("SEEDS") == "" {
		t.Skip("one more build: make test-shim (SEEDS is set)")
	}
	program := build(t, false, "-DHX_UCONTEXT=1")
	for _, c := range [][]string{{"collectives", "3"}, {"litmus", "40"}, {"clocks"}, {"concurrent"}} {
		text, err := run(t, program, c...)
		require.NoError(t, err, "%v:\n%s", c, text)
	}
}

func TestThreadSanitizer(t *testing.T) {
	program := build(t, true)
	fixed := []string{program} // what to run
	if text, err := run(t, program, "tsan", "1", "t_locals"); err != nil && strings.Contains(text, "unexpected memory mapping") {
		// Addresses are random in more bits than this ThreadSanitizer knows of.
		fixed = []string{"setarch", "-R", program}
		if text, err = run(t, fixed[0], append(fixed[1:], "tsan", "1", "t_locals")...); err != nil && strings.Contains(text, "setarch") {
			t.Skipf("ThreadSanitizer cannot run here: %s", text)
		}
	}
	count := strconv.Itoa(max(6, seeds(t, 0)/50))
	for _, c := range []struct {
		name string
		race string // the function that the report has to name; "": no report
	}{
		{"t_same_word", "t_same_word"},
		{"t_mp_nothing", "t_mp_nothing"},
		{"t_mp_fence", ""},
		{"t_mp_fence_rmw", ""},
		{"t_mp_release", ""},
		{"t_mp_fence_too_early", "t_mp_fence_too_early"}, // a fence publishes what came before it, not what came after
		{"t_relaxed_reader", "t_relaxed_reader"},
		{"t_relaxed_reader_fence", ""},
		{"t_join_nothing", "t_join_nothing"},
		{"t_join_warp", ""},
		{"t_join_block", ""},
		{"t_join_shfl", "t_join_shfl"}, // shuffles order nothing
		{"t_near_nothing", "t_near_nothing"},
		{"t_near_warp", ""},
		{"t_near_block", ""},
		{"t_one_word", ""},
		{"t_own_word", ""},
		{"t_overlap", ""},
		{"t_locals", ""},
		{"t_sum", ""},
		{"t_atoms", ""},
		{"doorbell", "t_doorbell"},
		{"doorbell_fence", ""},
		{"order", ""},
		{"two_grids", "t_near_warp"},
		{"threads_t_mp_nothing", "t_mp_nothing"},
		{"threads_t_mp_fence", ""},
		{"threads_t_sum", ""},
		{"threads_t_join_warp", ""},
		{"threads_t_locals", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			text, err := run(t, fixed[0], append(slices.Clone(fixed[1:]), "tsan", count, c.name)...)
			if c.race == "" {
				require.NoError(t, err, "%s", text)
				require.NotContains(t, text, "ThreadSanitizer", "a report about correct code")
				return
			}
			require.Error(t, err, "the race was not reported")
			require.Contains(t, text, "WARNING: ThreadSanitizer: data race")
			require.Contains(t, text, c.race, "the report does not name the kernel")
		})
	}
}
