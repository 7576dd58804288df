// Package selftest checks the CPU shim that the kernels are proven on: that it runs what is right,
// names what is wrong, shows what weak memory may do, replays by seed, and that its ThreadSanitizer
// build reports races and nothing else. The programs are in src.
//
//	go test ./internal/testing/shim/selftest          100 seeds of each litmus test
//	SEEDS=2000 go test ./internal/testing/shim/selftest     more, and more under ThreadSanitizer
//	CXX=clang++-19 go test ./internal/testing/shim/selftest
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

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/cachedir"
	"helios/internal/testing/wide"
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

// kind selects the product of build.
type kind int

const (
	plain     kind = iota
	underTSan      // a program under ThreadSanitizer
	library        // a shared library
)

// build makes the self test; each object is compiled once per content of what it depends on. The
// runtime is never under -fsanitize=thread (see internal.h).
func build(t *testing.T, what kind, extra ...string) string {
	t.Helper()
	cxx := compiler(t)
	sources, err := filepath.Glob("../*.cc")
	require.NoError(t, err)
	runtimeSources := len(sources)
	last := "src/main.cc"
	if what == library {
		last = "src/library.cc"
	}
	sources = append(sources, "src/kernels.cu", last)

	h := sha256.New()
	version, err := exec.Command(cxx[0], append(slices.Clone(cxx[1:]), "--version")...).Output()
	require.NoError(t, err)
	fmt.Fprintf(h, "%s %q\n%s", runtime.GOARCH, cxx, version)
	for _, g := range []string{"src/*.h", "../*.h", "../../../../cuda/kernels/types.h",
		"../../../../cuda/kernels/device.h"} {
		files, err := filepath.Glob(g)
		require.NoError(t, err)
		require.NotEmpty(t, files, g)
		for _, f := range files {
			body, err := os.ReadFile(f)
			require.NoError(t, err)
			fmt.Fprintf(h, "%s %d\n%s", f, len(body), body)
		}
	}
	base := h.Sum(nil)

	dir, err := cachedir.Private("helios-shim-selftest")
	require.NoError(t, err)
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, f := range files { // else it grows with each edit
		if info, err := f.Info(); err == nil && time.Since(info.ModTime()) > 7*24*time.Hour {
			_ = os.Remove(filepath.Join(dir, f.Name()))
		}
	}

	errs := make([]error, len(sources))
	objects := make([]string, len(sources))
	slots := make(chan struct{}, runtime.NumCPU())
	var wg sync.WaitGroup
	for i, s := range sources {
		args := append([]string{"-std=c++17", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall",
			"-Wextra", "-Werror", "-I..", "-I../../../../cuda/kernels"}, extra...)
		switch {
		case what == underTSan && i < runtimeSources:
			args = append(args, "-DHX_TSAN=1")
		case what == underTSan:
			args = append(args, "-fsanitize=thread")
		}
		if strings.HasSuffix(s, ".cu") {
			args = append(args, "-DHX_SHIM", "-x", "c++")
		}
		body, err := os.ReadFile(s)
		require.NoError(t, err)
		sum := sha256.Sum256(fmt.Appendf(nil, "%x %q %s\n%s", base, args, s, body))
		objects[i] = filepath.Join(dir, fmt.Sprintf("%x.o", sum[:12]))
		now := time.Now()
		if os.Chtimes(objects[i], now, now) == nil { // it is there, and in use
			continue
		}
		tmp := fmt.Sprintf("%s.%d", objects[i], os.Getpid())
		args = slices.Concat(cxx[1:], args, []string{"-c", s, "-o", tmp})
		wg.Add(1)
		go func() {
			defer wg.Done()
			slots <- struct{}{}
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
			defer cancel()
			if text, err := exec.CommandContext(ctx, cxx[0], args...).CombinedOutput(); err != nil {
				errs[i] = fmt.Errorf("%s: %w\n%s", s, err, text)
				return
			}
			errs[i] = os.Rename(tmp, objects[i])
		}()
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))

	out := filepath.Join(t.TempDir(), "selftest")
	args := append(slices.Clone(cxx[1:]), objects...)
	switch what {
	case plain:
	case underTSan:
		args = append(args, "-fsanitize=thread")
	case library:
		args = append(args, "-shared")
	}
	text, err := exec.Command(cxx[0], append(args, "-lpthread", "-o", out)...).CombinedOutput()
	require.NoError(t, err, "%s", text)
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
	program := build(t, plain)
	litmus := strconv.Itoa(seeds(t, 100))
	for _, c := range [][]string{
		{"collectives", "6"}, {"errors"}, {"litmus", litmus}, {"clocks"}, {"concurrent"}, {"chain"},
		{"speed"},
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

// A kernel's fault in a Go process is the shim's, and Go's own faults stay Go's.
func TestShimInGo(t *testing.T) {
	lib, err := purego.Dlopen(build(t, library), purego.RTLD_NOW|purego.RTLD_LOCAL)
	require.NoError(t, err)
	fault, err := purego.Dlsym(lib, "selftest_fault")
	require.NoError(t, err)
	nilDeref := func() (recovered any) {
		defer func() { recovered = recover() }()
		var p *[1 << 10]int
		p[9]++
		return nil
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 50 {
				ok, _, _ := purego.SyscallN(fault)
				assert.EqualValues(t, 1, int32(ok), "a kernel with a bad pointer, then one without")
				err, _ := nilDeref().(error)
				assert.ErrorContains(t, err, "nil pointer dereference")
			}
		}()
	}
	wg.Wait()
}

// The machines without a context switch of ours.
func TestShimUcontext(t *testing.T) {
	if os.Getenv("SEEDS") == "" {
		t.Skip("one more build: make test-shim (SEEDS is set)")
	}
	program := build(t, plain, "-DHX_UCONTEXT=1")
	for _, c := range [][]string{{"collectives", "3"}, {"litmus", "40"}, {"clocks"},
		{"concurrent"}} {
		text, err := run(t, program, c...)
		require.NoError(t, err, "%v:\n%s", c, text)
	}
}

func TestThreadSanitizer(t *testing.T) {
	wide.Only(t)
	program := build(t, underTSan)
	fixed := []string{program} // what to run
	if text, err := run(t, program, "tsan", "1", "t_locals"); err != nil &&
		strings.Contains(text, "unexpected memory mapping") {
		// Addresses are random in more bits than this ThreadSanitizer knows of.
		fixed = []string{"setarch", "-R", program}
		if text, err = run(t, fixed[0], append(fixed[1:], "tsan", "1",
			"t_locals")...); err != nil && strings.Contains(text, "setarch") {
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
		// a fence publishes what came before it, not what came after
		{"t_mp_fence_too_early", "t_mp_fence_too_early"},
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
		{"after_error", ""},
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
