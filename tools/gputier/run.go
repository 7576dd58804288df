package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Status of a step.
const (
	passed   = "passed"
	failed   = "FAILED"
	notThere = "not there" // what the step needs; no failure
	noTime   = "no time"   // the tier's own limit came first; a failure
)

// step is one row of the table.
type step struct {
	Name    string   `json:"name"`
	Status  string   `json:"status"`
	Seconds float64  `json:"seconds"`
	Detail  string   `json:"detail"`
	Command []string `json:"command,omitempty"`
}

// results is results.json.
type results struct {
	Manifest json.RawMessage `json:"pack"`
	Host     string          `json:"host"`
	CPUs     int             `json:"cpus"`
	// HELIOS_LIBCUDA, when it is set: not the machine's
	Library   string            `json:"libcuda"`
	Probe     json.RawMessage   `json:"driver,omitempty"`
	Began     time.Time         `json:"began"`
	Seconds   float64           `json:"seconds"`
	Steps     []step            `json:"steps"`
	Bench     []json.RawMessage `json:"bench"`
	Summaries []json.RawMessage `json:"summaries"`
	// Figures are the rows of the lab's bench by step, Torch those of PyTorch's step.
	Figures  map[string][]json.RawMessage `json:"figures"`
	Torch    []json.RawMessage            `json:"torch,omitempty"`
	Device   []json.RawMessage            `json:"device"`
	Training []trained                    `json:"training"`
}

// benchRow holds what the table shows of a row of "bench io --json".
type benchRow struct {
	Kind      string  `json:"kind"`
	Event     string  `json:"event"`
	SSDs      int     `json:"ssds"`
	Blocks    int     `json:"blocks"`
	Threads   int     `json:"threads"`
	Stack     string  `json:"stack"`
	Device    string  `json:"device"`
	IOPS      float64 `json:"iops"`
	Audited   bool    `json:"audited"`
	Why       string  `json:"audit_error"`
	Serving   int     `json:"serve_threads"`
	ServeIOPS float64 `json:"serve_iops"`
	Latency   float64 `json:"ssd_latency_us"`
}

type runner struct {
	ctx   context.Context
	pack  string // folder
	dir   string // for state and SSDs; removed at the end
	small bool
	log   *os.File
	res   results
	rows  []benchRow
	// Words of figures as the lab's bench printed them, and the states (HELIOS_STATE=…) with SSDs
	// of our own.
	tables []string
	bound  []string
}

func runVerb(ctx context.Context, args []string) (err error) {
	f := flag.NewFlagSet("run.sh", flag.ContinueOnError)
	pack := f.String("pack", "", "`DIR` of the pack (run.sh gives it)")
	out := f.String("out", "gputier-results", "`DIR` for results.json, table.txt and log.txt")
	small := f.Bool("small", false, "small sizes, as for the fake libcuda")
	limit := f.Duration("limit", 12*time.Minute, "of all steps together")
	only := f.String("only", "", "`STEP[,STEP…]`: those whose names begin so")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *pack == "" || f.NArg() > 0 {
		f.Usage()
		return flag.ErrHelp
	}
	if err := os.MkdirAll(*out, 0o777); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *limit)
	defer cancel()
	r := &runner{ctx: ctx, pack: *pack, small: *small}
	if r.log, err = os.Create(filepath.Join(*out, "log.txt")); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.log.Close()) }()
	if r.dir, err = os.MkdirTemp("", "gputier-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.dir)) }()
	r.res.Began = time.Now().UTC()
	r.res.CPUs = runtime.NumCPU()
	r.res.Host, _ = os.Hostname()
	r.res.Library = os.Getenv("HELIOS_LIBCUDA")
	if r.res.Manifest, err = os.ReadFile(filepath.Join(*pack, "manifest.json")); err != nil {
		return err
	}
	r.all(*only)
	r.res.Seconds = time.Since(r.res.Began).Seconds()
	b, err := json.MarshalIndent(r.res, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(*out, "results.json"), append(b, '\n'),
		0o666); err != nil {
		return err
	}
	table := r.table()
	fmt.Print(table)
	if err := os.WriteFile(filepath.Join(*out, "table.txt"), []byte(table), 0o666); err != nil {
		return err
	}
	bad := 0
	for _, s := range r.res.Steps {
		if s.Status == failed || s.Status == noTime {
			bad++
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d steps failed; see %s", bad, len(r.res.Steps),
			filepath.Join(*out, "log.txt"))
	}
	return nil
}

// job is a step to be: a command, and what to make of its end.
type job struct {
	name  string
	limit time.Duration
	env   []string
	args  []string
	codes []int // exit codes that are right (0)
	// prepare may complete the arguments by what earlier steps found; its error means that the step
	// cannot be done.
	prepare func(*job) error
	// exit code that says that what it needs is not there
	absent int
	then   func(stdout, both []byte) (string, error) // detail; an error fails the step
}

func (r *runner) bin(name string) string { return filepath.Join(r.pack, "bin", name) }

// all runs the steps.
func (r *runner) all(only string) {
	for _, j := range r.jobs() {
		if only == "" || slices.ContainsFunc(strings.Split(only, ","),
			func(p string) bool { return strings.HasPrefix(j.name, p) }) {
			r.do(j)
		}
	}
	r.cleanUp()
}

// first are the steps that come before all others, in this order: the limit may end the rest. They
// show that the GPU computes right and reads right, then the product's own figures.
var first = []string{"nvidia-smi", "nvidia-smi: BAR1", "nvidia-smi: confidential computing",
	"driver", "heliosctl", "doctor", "conformance", "refill", "pcie", "RAM SSDs", "I/O at 80 us",
	"I/O kernels", "memcheck: I/O", "racecheck: I/O", "synccheck: I/O", "bench step",
	"graph: modes", "SSDs: modes", "load: modes", "train: helios", "train: gids"}

// jobs are the steps.
func (r *runner) jobs() []job {
	batches, bench, seconds, io := "1000", "1,4,16,32,128", "0.25", "^TestGPU"
	counts := []int{1, 2, 4, 8, 12}
	size := int64(64 << 20)
	if r.small {
		batches, bench, seconds, io, counts, size = "40", "1,4", "0.05",
			"^TestGPU(Reads|Refusals|AsHost)$/^(packed|deep|PRP_lists|sync_in_turn|errors)$",
			[]int{1, 2}, 2<<20
	}
	// a CPU plays each SSD
	counts = slices.DeleteFunc(counts, func(n int) bool { return n > 2 && n > r.res.CPUs-2 })
	each := strconv.FormatInt(room(size, counts[len(counts)-1]), 10)
	var list []string
	for _, n := range counts {
		list = append(list, strconv.Itoa(n))
	}
	ssds := strings.Join(list, ",")
	again := ssds
	if r.small {
		again = list[0]
	}
	test := func(name, binary, run string, limit time.Duration, env ...string) job {
		args := []string{r.bin(binary), "-test.run", run, "-test.count=1", "-test.v",
			"-test.timeout", limit.String()}
		if r.small {
			args = append(args, "-test.short")
		}
		return job{name: name, limit: limit, env: env, then: lastLine("ok"), args: args}
	}
	hc := r.bin("heliosctl")
	r.bound = append(r.bound, "HELIOS_STATE="+filepath.Join(r.dir, "state"))
	jobs := []job{
		{name: "nvidia-smi", limit: 20 * time.Second,
			args: []string{"nvidia-smi", "--query-gpu=name,driver_version,memory.total," +
				"compute_cap,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current," +
				"pcie.link.width.max,mig.mode.current,clocks.sm,clocks.max.sm,clocks.mem",
				"--format=csv,noheader"}, then: lastLine("")},
		{name: "nvidia-smi: BAR1", limit: 20 * time.Second,
			args: []string{"nvidia-smi", "-q", "-d", "MEMORY"}, then: bar1},
		{name: "nvidia-smi: confidential computing", limit: 20 * time.Second,
			codes: []int{0, 3, 255}, // what has no such mode says so
			args:  []string{"nvidia-smi", "conf-compute", "-f"}, then: lastLine("")},
		{name: "driver", limit: 30 * time.Second, args: []string{r.bin("bench"), "probe"},
			then: r.probed},
		{name: "heliosctl", limit: 20 * time.Second, args: []string{hc, "version"},
			then: lastLine("")},
		{name: "doctor", limit: 30 * time.Second, args: []string{hc, "doctor"}, then: lastLine("")},
		test("conformance", "driver.test", "^TestConformance$", 60*time.Second),
	}
	jobs = append(jobs, r.deviceJobs()...)
	jobs = append(jobs, r.computeJobs()...)
	jobs = append(jobs, r.trainings()...)
	// The whole suites of these run on the fake library in CI; what the small tier proves of them
	// is that they travel.
	gnn, sched := "^Test.*(GPU|Driver)", "^(TestTrainOnGPU|TestResumeOnAnotherDevice)$"
	if r.small {
		gnn, sched = "^TestGemmGPUSplit$", "^TestTrainOnGPU$/^helios_sage$"
	}
	jobs = append(jobs,
		test("model kernels", "gnn.test", gnn, 60*time.Second),
		test("training", "sched.test", sched, 40*time.Second),
		test("I/O kernels", "gpuio.test", io, 60*time.Second),
		test("differential", "difftest.test", "^TestTrace$", 60*time.Second, "DIFF_BATCHES="+
			batches),
		test("sampling", "graph.test", "^TestDriver$", 40*time.Second),
		test("cache", "cache.test", "^TestDriver$", 40*time.Second),
		job{name: "launches", limit: 20 * time.Second, then: benchmarks,
			args: []string{r.bin("driver.test"), "-test.run", "^$", "-test.bench",
				"^BenchmarkLaunch", "-test.benchtime", "200ms"}},
		job{name: "bad: no such GPU", limit: 20 * time.Second, codes: []int{3},
			args: []string{hc, "bench", "io", "--device", "cuda:99"}},
		job{name: "bad: 0 blocks", limit: 20 * time.Second, codes: []int{2},
			args: []string{hc, "bench", "io", "--device", "cuda", "--io-blocks", "0"}},
		job{name: "RAM SSDs", limit: 60 * time.Second, args: []string{hc, "bind-ssds",
			"--proxy-ram", list[len(list)-1], "--size", each}, then: r.fill},
		job{name: "bad: no memory", limit: 60 * time.Second, codes: []int{3},
			args: r.benchArgs("--device", "cuda", "--ssd-count", "1", "--row-bytes", "64KiB", "--depth",
				"1024", "--seconds", "0.01")},
		job{name: "I/O at 80 us", limit: 90 * time.Second, then: r.benched,
			args: r.benchArgs("--device", "cuda", "--json", "--io-stack", "async,sync", "--ssd-count", ssds,
				"--io-blocks", bench, "--threads", "128", "--seconds", seconds, "--ssd-latency",
				"80us")},
		job{name: "I/O from RAM", limit: 90 * time.Second, then: r.benched,
			args: r.benchArgs("--device", "cuda", "--json", "--io-stack", "async,sync", "--ssd-count",
				again, "--io-blocks", bench, "--threads", "128", "--seconds", seconds)},
		job{name: "I/O on the CPU", limit: 60 * time.Second, then: r.benched,
			args: r.benchArgs("--device", "host", "--json", "--io-stack", "async,sync", "--ssd-count",
				list[0], "--io-blocks", "1,32", "--threads", "128", "--seconds", seconds,
				"--ssd-latency", "80us")},
	)
	// Real GPUs have room for that; only the fake one is small.
	if !r.small {
		jobs = slices.DeleteFunc(jobs, func(j job) bool { return j.name == "bad: no memory" })
	}
	for _, tool := range []string{"memcheck", "racecheck", "synccheck"} {
		for _, what := range []struct{ name, binary, run string }{
			{"data", "difftest.test", "^TestTrace$"},
			{"I/O", "gpuio.test", "^TestGPUReads$/^(packed|one_command)$"},
			{"products", "gnn.test", "^TestGemmGPUSplit$"},
			{"training", "sched.test", "^TestTrainOnGPU$/^helios_sage$"},
		} {
			j := test(tool+": "+what.name, what.binary, what.run, 40*time.Second, "DIFF_BATCHES=20")
			j.args = append([]string{"compute-sanitizer", "--tool", tool, "--error-exitcode", "99",
				"--target-processes", "all"}, j.args...)
			j.then = lastLine("ERROR SUMMARY")
			jobs = append(jobs, j)
		}
	}
	rank := func(j job) int {
		if i := slices.Index(first, j.name); i >= 0 {
			return i
		}
		return len(first)
	}
	slices.SortStableFunc(jobs, func(a, b job) int { return rank(a) - rank(b) })
	return jobs
}

// computeJobs are the figures of single kernels and of a step.
func (r *runner) computeJobs() []job {
	const cuda = " -device cuda"
	memory := "memory -row-bytes 4096,512 -seconds 1"
	sample := "sample -nodes 4000000 -fanout 25,10 -batch-size 8000 -batches 10 -turns 5"
	products := "gemm -seconds 0.4"
	rows := "rows -seconds 0.3"
	dim, hidden, classes, seconds := 1024, 256, 47, 3.0
	step := "step -seconds 1.5 -nodes 1000000 -batch-size 8000 -fanout 25,10"
	if r.small {
		memory = "memory -row-bytes 4096 -seconds 0.01 -tier 1MiB -set 256KiB"
		sample = "sample -nodes 3000 -fanout 5,3 -batch-size 32 -batches 1 -turns 1 -workers 1"
		products = "gemm -seconds 0.01 -shapes nn:130x33x40,tn:40x33x600 -rows 100"
		rows = "rows -seconds 0.01 -rows 100"
		dim, hidden, classes, seconds = 24, 16, 5, 0.1
		step = "step -seconds 0.01 -nodes 1000 -batch-size 40 -fanout 3,2 -precision fp32 -rows 100"
	}
	step += fmt.Sprintf(" -dim %d -hidden %d -classes %d", dim, hidden, classes)
	figures := func(name string, limit time.Duration, args string) job {
		return r.figures(name, limit, strings.Fields(args)...)
	}
	return []job{
		figures("bench memory", 60*time.Second, memory+cuda),
		figures("bench sample", 60*time.Second, sample+" -device host,cuda"),
		figures("bench step", 90*time.Second, step+cuda),
		r.torchJob(dim, hidden, classes, seconds),
		figures("bench products", 90*time.Second, products+cuda),
		figures("bench rows", 60*time.Second, rows+cuda),
	}
}

// room is the size of each of n RAM SSDs: want, or what half of the shared memory gives.
func room(want int64, n int) int64 {
	var st unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &st); err != nil {
		return want
	}
	return max(min(want, int64(st.Bavail)*st.Bsize/2/int64(n)&^(1<<20-1)), 1<<20)
}

// benchArgs is a call of bench io.
func (r *runner) benchArgs(args ...string) []string {
	return append([]string{r.bin("heliosctl"), "bench", "io", "--quiet"}, args...)
}

// cleanUp takes the RAM SSDs away, also when their step failed halfway.
func (r *runner) cleanUp() {
	for _, state := range r.bound {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), 20*time.Second)
		c := exec.CommandContext(ctx, r.bin("heliosctl"), "unbind-ssds", "--delete")
		c.Env = r.environ([]string{state})
		if out, err := c.CombinedOutput(); err != nil {
			r.res.Steps = append(r.res.Steps, step{Name: "cleaning up", Status: failed,
				Detail: fmt.Sprintf("%v: %s", err, oneLine(string(out)))})
		}
		cancel()
	}
}

func (r *runner) environ(extra []string) []string {
	// The driver compiles our PTX once for all steps: the machine may have no home for its cache
	// (CUDA programming guide, environment variables).
	return append(append(os.Environ(), "HELIOS_GPU=1", "HELIOS_STATE="+filepath.Join(r.dir,
		"state"), "TMPDIR="+r.dir,
		"CUDA_CACHE_PATH="+filepath.Join(r.dir, "cuda-cache"), "CUDA_CACHE_MAXSIZE=1073741824"),
		extra...)
}

// find looks for a program: in PATH, where CUDA is installed, in the pack.
func (r *runner) find(name string) string {
	if strings.Contains(name, "/") {
		return name
	}
	if p, err := exec.LookPath(name); err == nil {
		return p
	}
	for _, g := range []string{"/usr/local/cuda*/bin/", "/usr/local/cuda*/compute-sanitizer/",
		"/opt/nvidia/*/", "/usr/local/nvidia/bin/"} {
		if m, _ := filepath.Glob(g + name); len(m) > 0 {
			return m[len(m)-1]
		}
	}
	found := ""
	_ = filepath.WalkDir(filepath.Join(r.pack, "sanitizer"), func(p string, d fs.DirEntry,
		err error) error {
		if err == nil && !d.IsDir() && d.Name() == name {
			found = p
			return fs.SkipAll
		}
		return nil // what cannot be looked at is not there
	})
	return found
}

// do runs one step and keeps its row.
func (r *runner) do(j job) {
	s := step{Name: j.name, Command: j.args}
	defer func() {
		r.res.Steps = append(r.res.Steps, s)
		fmt.Fprintf(os.Stderr, "%-18s %-9s %6.1f s  %s\n", s.Name, s.Status, s.Seconds, s.Detail)
	}()
	if r.ctx.Err() != nil {
		s.Status, s.Detail = noTime, "the limit of all steps together has passed"
		return
	}
	prog := r.find(j.args[0])
	if prog == "" {
		s.Status, s.Detail = notThere, j.args[0]+" is not on this machine"
		return
	}
	if j.prepare != nil {
		if err := j.prepare(&j); err != nil {
			s.Status, s.Detail = failed, oneLine(err.Error())
			return
		}
		s.Command = j.args
	}
	ctx, cancel := context.WithTimeout(r.ctx, j.limit)
	defer cancel()
	c := exec.CommandContext(ctx, prog, j.args[1:]...)
	c.Env = r.environ(j.env)
	c.Dir = r.dir
	// A process group, so that what a step leaves running ends with it.
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
	c.WaitDelay = 5 * time.Second
	var stdout, both bytes.Buffer
	var mu sync.Mutex // exec writes both streams at once
	c.Stdout = writer(func(p []byte) {
		mu.Lock()
		defer mu.Unlock()
		stdout.Write(p)
		both.Write(p)
	})
	c.Stderr = writer(func(p []byte) {
		mu.Lock()
		defer mu.Unlock()
		both.Write(p)
	})
	began := time.Now()
	err := c.Run()
	s.Seconds = time.Since(began).Seconds()
	fmt.Fprintf(r.log, "=== %s: %s\n%s\n", j.name, strings.Join(j.args, " "), both.Bytes())
	code := c.ProcessState.ExitCode()
	want := j.codes
	if want == nil {
		want = []int{0}
	}
	switch {
	case r.ctx.Err() != nil:
		s.Status, s.Detail = noTime, "cut off by the limit of all steps together"
	case ctx.Err() != nil:
		s.Status, s.Detail = failed, fmt.Sprintf("over its limit of %v", j.limit)
	case c.ProcessState == nil:
		s.Status, s.Detail = failed, oneLine(err.Error())
	case j.absent != 0 && code == j.absent:
		s.Status, s.Detail = notThere, oneLine(last(both.String()))
	case !slices.Contains(want, code):
		s.Status, s.Detail = failed, fmt.Sprintf("exit code %d, not %d: %s", code, want[0],
			oneLine(why(both.String())))
	default:
		s.Status, s.Detail = passed, oneLine(last(both.String()))
	}
	if j.then != nil {
		d, err := j.then(stdout.Bytes(), both.Bytes())
		switch {
		case err != nil && s.Status == passed:
			s.Status, s.Detail = failed, oneLine(err.Error())
		case s.Status == passed && d != "":
			s.Detail = oneLine(d)
		}
	}
}

type writer func(p []byte)

func (w writer) Write(p []byte) (int, error) {
	w(p)
	return len(p), nil
}

func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > 200 {
		s = s[:200] + "…"
	}
	return s
}

// last is the last line that says something.
func last(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

// why is the line of a failed step's output that tells most: the first error of a test, or the end.
func why(s string) string {
	for _, mark := range []string{"Error:", "panic:", "ERROR SUMMARY", "_test.go:", "heliosctl "} {
		if i := strings.Index(s, mark); i >= 0 {
			return s[i:min(i+300, len(s))]
		}
	}
	return last(s)
}

// lastLine finds the last line with a mark; a test that ran nothing has failed.
func lastLine(mark string) func(_, out []byte) (string, error) {
	return func(_, out []byte) (string, error) {
		if bytes.Contains(out, []byte("no tests to run")) {
			return "", errors.New("the binary has no such test")
		}
		if bytes.Contains(out, []byte("--- SKIP")) && !bytes.Contains(out, []byte("--- PASS")) {
			return "", errors.New("the test was skipped")
		}
		if n := bytes.Count(out, []byte("--- PASS")); n > 0 && mark == "ok" {
			return fmt.Sprintf("%d tests passed, %d skipped", n,
				bytes.Count(out, []byte("--- SKIP"))), nil
		}
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		for _, l := range slices.Backward(lines) {
			if strings.Contains(l, mark) {
				return l, nil
			}
		}
		return "", nil
	}
}

// bar1 finds the size of the window that other devices reach the GPU's memory through.
func bar1(out, _ []byte) (string, error) {
	if _, s, ok := strings.Cut(string(out), "BAR1 Memory Usage"); ok {
		if line, _, ok := strings.Cut(strings.TrimSpace(s), "\n"); ok {
			return "BAR1 " + line, nil
		}
	}
	return "", errors.New("nvidia-smi names no BAR1")
}

func benchmarks(out, _ []byte) (string, error) {
	var found []string
	for _, l := range strings.Split(string(out), "\n") {
		if f := strings.Fields(l); len(f) >= 4 && strings.HasPrefix(f[0], "Benchmark") {
			found = append(found, strings.TrimPrefix(f[0], "BenchmarkLaunch/")+" "+f[2]+" "+f[3])
		}
	}
	if len(found) == 0 {
		return "", errors.New("no benchmark ran")
	}
	return strings.Join(found, "; "), nil
}

// probed keeps the driver's report.
func (r *runner) probed(out, _ []byte) (string, error) {
	var rep struct { // of driver.Report
		CUDA string
		GPUs []struct {
			Name                             string
			SMs, MemTotal, ComputeCapability int64
			Capabilities                     struct{ GreenContexts bool }
		}
	}
	if err := json.Unmarshal(out, &rep); err != nil {
		return "", err
	}
	r.res.Probe = bytes.TrimSpace(out)
	if len(rep.GPUs) == 0 {
		return "", errors.New("no GPU")
	}
	g := rep.GPUs[0]
	return fmt.Sprintf("%s, %d SMs, %d MiB, compute capability %d.%d, CUDA %s, green contexts %v",
		g.Name, g.SMs, g.MemTotal>>20, g.ComputeCapability/10, g.ComputeCapability%10, rep.CUDA,
		g.Capabilities.GreenContexts), nil
}

// fill writes random bytes to the RAM SSDs: zeros would hide what was never written.
func (r *runner) fill(_, _ []byte) (string, error) {
	ctx, cancel := context.WithTimeout(r.ctx, 30*time.Second)
	defer cancel()
	c := exec.CommandContext(ctx, r.bin("heliosctl"), "ssds", "--json")
	c.Env = r.environ(nil)
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("heliosctl ssds: %w", err)
	}
	n := 0
	for d := json.NewDecoder(bytes.NewReader(out)); d.More(); n++ {
		var ssd struct {
			Path  string `json:"path"`
			Bytes int64  `json:"bytes"`
		}
		if err := d.Decode(&ssd); err != nil {
			return "", err
		}
		buf := make([]byte, ssd.Bytes)
		if _, err := rand.NewChaCha8([32]byte{byte(n)}).Read(buf); err != nil {
			return "", err
		}
		f, err := os.OpenFile(ssd.Path, os.O_WRONLY, 0)
		if err != nil {
			return "", err
		}
		_, err = f.Write(buf)
		if err := errors.Join(err, f.Close()); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%d SSDs, filled with random bytes", n), nil
}

// benched keeps the rows of bench io. Those without an audit have failed the step by its exit code.
func (r *runner) benched(out, _ []byte) (string, error) {
	rows, bad := 0, ""
	for d := json.NewDecoder(bytes.NewReader(out)); d.More(); {
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return "", err
		}
		var b benchRow
		if err := json.Unmarshal(raw, &b); err != nil {
			return "", err
		}
		if b.Kind == "summary" {
			r.res.Summaries = append(r.res.Summaries, raw)
			continue
		}
		if b.Event != "row" && b.Event != "" { // an error, which the step's exit code tells
			continue
		}
		rows++
		if !b.Audited {
			bad = b.Why
		}
		r.res.Bench = append(r.res.Bench, raw)
		r.rows = append(r.rows, b)
	}
	switch {
	case bad != "":
		return "", errors.New(bad)
	case rows == 0:
		return "", errors.New("no rows")
	}
	return fmt.Sprintf("%d rows, all audited", rows), nil
}
