// Package iotest proves the coalesce, submit, complete and read_sync kernels on the CPU shim: the
// same source that becomes PTX runs as fibers against model SSDs in C++ (src/model.cc) and a mini
// host (src/host.cc), which check each other and every byte read.
//
//	go test ./internal/testing/shim/iotest                            50 seeded schedules, no ThreadSanitizer
//	SEEDS=1000 TSAN_SEEDS=60 go test ./internal/testing/shim/iotest   as make test-shim
//	SEED=17 go test -run Schedules ./internal/testing/shim/iotest -v  one schedule, its last events
//
// The knobs: SEEDS and TSAN_SEEDS (how many), SEED_FROM (the first; 1), CXX (g++).
package iotest_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/cachedir"
	"helios/internal/testing/wide"
)

// The sources, relative to this folder. A change of any makes a new build.
var (
	modelSources  = []string{"src/main.cc", "src/rig.cc", "src/host.cc", "src/model.cc"}
	kernelSources = []string{"coalesce.cu", "submit.cu", "complete.cu", "read_sync.cu"}
	headerGlobs   = []string{"src/*.h", "../*.h", "../../../../cuda/kernels/*.h"}
)

func compiler(t *testing.T) string {
	t.Helper()
	cxx := os.Getenv("CXX")
	if cxx == "" {
		cxx = "g++"
	}
	if _, err := exec.LookPath(strings.Fields(cxx)[0]); err != nil {
		t.Skipf("no C++ compiler: %v; install g++ or set CXX", err)
	}
	return cxx
}

// builder compiles each object and program once per content.
type builder struct {
	t    *testing.T
	cxx  string
	dir  string
	base string // hash of the compiler and the headers
}

func newBuilder(t *testing.T) *builder {
	t.Helper()
	b := &builder{t: t, cxx: compiler(t)}
	var err error
	if b.dir, err = cachedir.Private("helios-iotest"); err != nil {
		t.Fatal(err)
	}
	b.prune()
	h := sha256.New()
	version, err := exec.Command("sh", "-c", b.cxx+" --version").Output()
	if err != nil {
		t.Fatalf("%s --version: %v", b.cxx, err)
	}
	h.Write(version)
	for _, g := range headerGlobs {
		files, err := filepath.Glob(g)
		if err != nil || len(files) == 0 {
			t.Fatalf("no headers match %s (%v)", g, err)
		}
		for _, f := range files {
			body, err := os.ReadFile(f)
			require.NoError(t, err)
			fmt.Fprintf(h, "%s %d\n", f, len(body))
			h.Write(body)
		}
	}
	b.base = fmt.Sprintf("%x", h.Sum(nil))
	return b
}

// prune keeps the cache from growing with each edit.
func (b *builder) prune() {
	files, err := os.ReadDir(b.dir)
	if err != nil {
		return
	}
	for _, f := range files {
		if info, err := f.Info(); err == nil && time.Since(info.ModTime()) > 7*24*time.Hour {
			_ = os.Remove(filepath.Join(b.dir, f.Name()))
		}
	}
}

var compiling = make(chan struct{}, max(runtime.NumCPU(), 1))

// run executes the compiler, as many at once as there are CPUs.
func (b *builder) run(out string, args ...string) error {
	now := time.Now()
	if os.Chtimes(out, now, now) == nil { // it is there; and used
		return nil
	}
	compiling <- struct{}{}
	defer func() { <-compiling }()
	tmp := fmt.Sprintf("%s.%d", out, os.Getpid())
	fields := append(strings.Fields(b.cxx), args...)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	msg, err := exec.CommandContext(ctx, fields[0],
		append(fields[1:], "-o", tmp)...).CombinedOutput()
	if err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("%s: %w\n%s", strings.Join(fields, " "), err, msg)
	}
	return os.Rename(tmp, out)
}

// program builds the explorer: flags for all of it, macro for the kernels.
func (b *builder) program(flags []string, macro string) string {
	b.t.Helper()
	common := append([]string{"-std=c++17", "-g", "-pthread", "-DHX_SHIM", "-Wall", "-Wextra",
		"-Werror", "-I", "src", "-I", "..", "-I", "../../../../cuda/kernels"}, flags...)
	type unit struct {
		src  string
		args []string
	}
	var units []unit
	runtimeSources, err := filepath.Glob("../*.cc")
	if err != nil || len(runtimeSources) == 0 {
		b.t.Fatalf("no shim sources: %v", err)
	}
	for _, s := range modelSources {
		units = append(units, unit{s, common})
	}
	// The shim itself is not instrumented: it tells ThreadSanitizer of fibers and fences
	// (internal.h).
	runtimeFlags := make([]string, len(common))
	for i, f := range common {
		runtimeFlags[i] = strings.Replace(f, "-fsanitize=thread", "-DHX_TSAN=1", 1)
	}
	for _, s := range runtimeSources {
		units = append(units, unit{s, runtimeFlags})
	}
	for _, k := range kernelSources {
		args := append([]string{}, common...)
		if macro != "" {
			args = append(args, "-D"+macro, "-Wno-unused-function", "-Wno-unused-variable")
		}
		units = append(units, unit{"../../../../cuda/kernels/" + k, append(args, "-x", "c++")})
	}
	objects := make([]string, len(units))
	errs := make([]error, len(units))
	var wg sync.WaitGroup
	all := sha256.New()
	for i, u := range units {
		body, err := os.ReadFile(u.src)
		if err != nil {
			b.t.Fatal(err)
		}
		key := sha256.Sum256([]byte(b.base + strings.Join(u.args, " ") + u.src + string(body)))
		fmt.Fprintf(all, "%x", key)
		objects[i] = filepath.Join(b.dir, fmt.Sprintf("%x.o", key[:12]))
		wg.Add(1)
		go func() {
			defer wg.Done()
			errs[i] = b.run(objects[i], append(append([]string{}, u.args...), "-c", u.src)...)
		}()
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		b.t.Fatal(err)
	}
	exe := filepath.Join(b.dir, fmt.Sprintf("iotest-%x", all.Sum(nil)[:12]))
	if err := b.run(exe, append(append([]string{"-pthread"}, flags...),
		objects...)...); err != nil {
		b.t.Fatal(err)
	}
	return exe
}

var (
	plainFlags = []string{"-O2"}
	tsanFlags  = []string{"-O1", "-fsanitize=thread"}
)

// result is the end of one process of the explorer.
type result struct {
	code int // 0 right, 1 wrong, 66 ThreadSanitizer, -1 not ended by itself
	out  string
}

func (r result) first() string {
	for _, l := range strings.Split(r.out, "\n") {
		if strings.HasPrefix(l, "FAIL") || strings.HasPrefix(l, "SUMMARY: ThreadSanitizer") {
			return l
		}
	}
	return strings.SplitN(r.out, "\n", 2)[0]
}

func explore(t *testing.T, exe string, limit time.Duration, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.Env = append(os.Environ(),
		"TSAN_OPTIONS=exitcode=66 halt_on_error=1 history_size=4 atexit_sleep_ms=0")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	r := result{out: out.String()}
	var exit *exec.ExitError
	switch {
	case err == nil:
	case ctx.Err() != nil:
		r.code = -1
		r.out = fmt.Sprintf("FAIL: not done after %v\n%s", limit, r.out)
	case errors.As(err, &exit):
		r.code = exit.ExitCode()
	default:
		t.Fatal(err)
	}
	return r
}

func number(t *testing.T, name string, def int) int {
	t.Helper()
	s := os.Getenv(name)
	if s == "" {
		return def
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		t.Fatalf("%s=%q is not a number", name, s)
	}
	return n
}

// sweepSeeds runs seeds from..from+n-1 in slices over the CPUs and reports each slice that fails.
func sweepSeeds(t *testing.T, exe string, from, n int, slice int, args ...string) (passed int) {
	t.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	next := from
	var lines []string
	for range min(runtime.NumCPU(), (n+slice-1)/slice) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				mu.Lock()
				lo := next
				hi := min(lo+slice, from+n)
				next = hi
				mu.Unlock()
				if lo >= hi {
					return
				}
				r := explore(t, exe, 10*time.Minute,
					append([]string{"--seeds", fmt.Sprintf("%d-%d", lo, hi-1)}, args...)...)
				mu.Lock()
				if r.code != 0 {
					t.Errorf("exit %d of seeds %d to %d:\n%s", r.code, lo, hi-1, r.out)
				} else {
					passed += hi - lo
					lines = append(lines, strings.TrimSpace(r.out))
				}
				mu.Unlock()
			}
		}()
	}
	wg.Wait()
	sort.Strings(lines)
	for _, l := range lines {
		t.Log(l)
	}
	return passed
}

// TestSchedules runs the kernels under random configurations and schedules in virtual time.
func TestSchedules(t *testing.T) {
	b := newBuilder(t)
	exe := b.program(plainFlags, "")
	if s := os.Getenv("SEED"); s != "" {
		r := explore(t, exe, 10*time.Minute, "--seed", s, "--trace")
		if r.code != 0 {
			t.Fatal(r.out)
		}
		t.Log(r.out)
		return
	}
	n := 50
	if wide.Lean() {
		n = 10
	}
	n = number(t, "SEEDS", n)
	from := number(t, "SEED_FROM", 1)
	begin := time.Now()
	if got := sweepSeeds(t, exe, from, n, 25); got != n {
		t.Errorf("%d of %d seeds are right", got, n)
	}
	t.Logf("%d seeds from %d in %v", n, from, time.Since(begin).Round(time.Millisecond))
}

// TestReplay: a seed gives the same schedule each time and whatever ran before it, or replaying a
// failure would be luck.
func TestReplay(t *testing.T) {
	exe := newBuilder(t).program(plainFlags, "")
	hash := regexp.MustCompile(`schedules ([0-9a-f]{16})`)
	of := func(seeds string) (sum uint64) {
		r := explore(t, exe, 2*time.Minute, "--seeds", seeds)
		m := hash.FindStringSubmatch(r.out)
		if r.code != 0 || m == nil {
			t.Fatalf("exit %d of seeds %s: %s", r.code, seeds, r.out)
		}
		sum, err := strconv.ParseUint(m[1], 16, 64)
		require.NoError(t, err)
		return sum
	}
	const first, last = 3, 8
	var alone uint64
	for s := first; s <= last; s++ {
		alone += of(fmt.Sprintf("%d-%d", s, s))
	}
	if together := of(fmt.Sprintf("%d-%d", first, last)); together != alone || alone == 0 {
		t.Errorf("seeds %d to %d, each in a process of its own: schedules %x; in one process: %x",
			first, last, alone, together)
	}
}

// sanitizer builds the ThreadSanitizer variant; it skips only where the compiler has none.
func sanitizer(t *testing.T, b *builder, macro string) string {
	t.Helper()
	dir := t.TempDir()
	src := filepath.Join(dir, "probe.cc")
	if err := os.WriteFile(src,
		[]byte(
			"extern \"C\" void *__tsan_create_fiber(unsigned);\nint main() { return __tsan_create_fiber(0) == nullptr; }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	fields := append(strings.Fields(b.cxx), "-fsanitize=thread", "-o",
		filepath.Join(dir, "probe"), src)
	if out, err := exec.Command(fields[0], fields[1:]...).CombinedOutput(); err != nil {
		t.Skipf("%s has no ThreadSanitizer with fibers: %v\n%s; install its runtime (libtsan)",
			b.cxx, err, out)
	}
	if out, err := exec.Command(filepath.Join(dir, "probe")).CombinedOutput(); err != nil {
		t.Skipf("ThreadSanitizer does not run here: %v\n%s", err, out)
	}
	return b.program(tsanFlags, macro)
}

// shimTier is the number of ThreadSanitizer seeds; without any the test is left to make test-shim.
func shimTier(t *testing.T) int {
	t.Helper()
	n := number(t, "TSAN_SEEDS", 0)
	if n == 0 {
		t.Skip("part of make test-shim, which sets TSAN_SEEDS")
	}
	return n
}

// TestThreadSanitizer runs the kernels with blocks, SSDs and host as OS threads.
func TestThreadSanitizer(t *testing.T) {
	n := shimTier(t)
	exe := sanitizer(t, newBuilder(t), "")
	begin := time.Now()
	from := number(t, "SEED_FROM", 1)
	if got := sweepSeeds(t, exe, from, n, 10, "--threads"); got != n {
		t.Errorf("%d of %d seeds without a report", got, n)
	}
	t.Logf("%d seeds from %d in %v", n, from, time.Since(begin).Round(time.Millisecond))
}

// plants are mistakes built into the kernels (queue.h and the .cu files) and what must notice
// each: the explorer, whose store buffer and schedules show a mistake by its consequences, and
// ThreadSanitizer, which shows the missing order itself. set aims the seeds at the place.
var plants = []struct {
	macro, mistake string
	explorer       string // pattern of the explorer's report; "": it cannot notice
	tsan           bool
	set, tsanSet   string
}{
	{"HX_PLANT_DOORBELL_BEFORE_SQE", "the doorbell rings before the entries are visible",
		"not visible at its doorbell", true,
		"sync=0,store_buffer=64,jitter=1,sleepy=64,latency_us=0,warps=1,limit_us=10000,ssds=1,queues=1,sblocks=1,cblocks=1,entries=65,spare=0,rows=100,sets=6,rowbytes=512,burst=0,timeout_us=2000",
		"sync=0"},
	{"HX_PLANT_MISSING_BARRIER", "no barrier between the lanes' entries and the leader's fence",
		"not visible at its doorbell", true,
		"sync=0,store_buffer=64,err=300,faults=1000,retries=3,rows=20",
		"sync=0,err=300,faults=1000,retries=3,rows=20"},
	// The shim delays stores and no loads, so only the race detector sees that the data may be read
	// before its completion.
	{"HX_PLANT_COMPLETION_BEFORE_DATA", "a completion is read without acquire",
		"", true, "", "sync=0"},
	{"HX_PLANT_CID_BEFORE_COPY", "a CID is free before its staged row was copied",
		"used again before the CQ doorbell|somebody else's data|in use twice", true,
		"sync=0,direct=0,rowbytes=401,sets=12,inflight=8,entries=4,spare=0,rows=40,jitter=1,sleepy=32",
		"sync=0,direct=0,rowbytes=401,sets=8,inflight=6,entries=4,spare=0"},
	// As with a completion: loads are not delayed.
	{"HX_PLANT_CID_NOT_ACQUIRED", "a free CID is taken without acquire",
		"", true, "", "sync=0,direct=0,sets=8,inflight=6,entries=4,spare=0"},
	{"HX_PLANT_REFILL_BEFORE_HANDOVER", "a set is pending before its entry is written",
		".", true,
		"sync=0,sets=60,inflight=16,store_buffer=64,jitter=1,latency_us=0,ssds=1,queues=1,sblocks=1,cblocks=1,warps=1,entries=33,spare=0,rows=200,rowbytes=512,direct=1,gap=0,limit_us=10000,sleepy=32",
		"sync=0,sets=8,inflight=6"},
	{"HX_PLANT_COALESCE_BARRIER", "warps place keys before the block has scanned its counts",
		"of the order has index|begins at|is no unit|the rows are at|" + killed, true,
		"sync=0,split=0,window=8,rowbytes=512,rows=100",
		"sync=0,split=0,window=8,rowbytes=512,rows=100"},
	// Wrong by themselves, whatever the order: no claim for the race detector.
	{"HX_PLANT_RUN_OFFSET", "a run's rows are copied from where its command begins",
		"somebody else's data", false, "sync=0,split=0,window=8,rowbytes=512,direct=0", ""},
	{"HX_PLANT_MARKS_IGNORED", "each part of a row that fails counts as a row",
		"or a second one|rows failed", false,
		"sync=0,window=0,split=1,rowbytes=1536,dnr=300,faults=1000", ""},
	{"HX_PLANT_GENERATION_IGNORED", "a completion counts for whatever is in flight under its CID",
		"in use twice|used again|nothing was written there|somebody else's data|which is not mapped|belongs to no row",
		false, "sync=0,duplicate=300,faults=40,err=0", ""},
	{"HX_PLANT_GENERATION_IGNORED", "the same, by read_sync",
		"in use twice|used again|nothing was written there|somebody else's data|which is not mapped|belongs to no row",
		false, "sync=1,window=0,duplicate=300,faults=40,err=0,limit_us=5000", ""},
	// A consequence of time, not of memory order: no claim for the race detector.
	{"HX_PLANT_SKIP_QUARANTINE", "CIDs of late commands are used again while the SSD has them",
		"in use twice|used again|somebody else's data|which is not mapped|belongs to no row", false,
		"sync=0,late=100,lost=50,faults=40", ""},
}

// TestPlantedMistakes: a proof that cannot fail proves nothing.
func TestPlantedMistakes(t *testing.T) {
	shimTier(t)
	b := newBuilder(t)
	for _, p := range plants {
		t.Run(p.macro, func(t *testing.T) {
			b := *b
			b.t = t
			if p.explorer != "" {
				r := search(t, b.program(plainFlags, p.macro), 1, p.explorer, p.set)
				t.Logf("explorer: %s\n  %s", p.mistake, r)
			}
			if p.tsan {
				r := search(t, sanitizer(t, &b, p.macro), 66, "data race", p.tsanSet, "--threads")
				t.Logf("ThreadSanitizer: %s\n  %s", p.mistake, r)
			}
		})
	}
}

// killed is the report of a program that a signal ended: it went to a wild address.
const killed = "killed by a signal"

// search looks for the first seed that ends with the code and a report that matches.
func search(t *testing.T, exe string, code int, want, set string, args ...string) string {
	t.Helper()
	const seeds = 1000
	failed := regexp.MustCompile(`(?m)^FAIL seed (\d+)`)
	like := regexp.MustCompile(want)
	if set != "" {
		args = append(args, "--set", set)
	}
	// Reports of another kind come first at times.
	deadline := time.Now().Add(4 * time.Minute)
	other := "none"
	for next := 1; next <= seeds && time.Now().Before(deadline); {
		last := min(next+19, seeds)
		r := explore(t, exe, 4*time.Minute,
			append([]string{"--seeds", fmt.Sprintf("%d-%d", next, last)}, args...)...)
		if r.code == code && like.MatchString(r.first()) {
			return r.first()
		}
		if r.code < 0 && like.MatchString(killed) {
			return killed
		}
		next = last + 1
		if r.code == 0 {
			continue
		}
		other = r.first()
		m := failed.FindStringSubmatch(r.out)
		if m == nil {
			break
		}
		n, err := strconv.Atoi(m[1])
		require.NoError(t, err)
		next = n + 1
	}
	t.Fatalf("not noticed; the last report of another kind: %s", other)
	return ""
}
