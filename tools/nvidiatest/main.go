// Command nvidiatest checks what can be known of NVIDIA's side without a GPU: the drivers' own
// libraries, their PTX compilers, the machine code and cuda.h.
//
//	bin/lab/nvidiatest [-all] [-only symbols,sass] [-write]
//
// The libraries come from Debian's component non-free, with an apt configuration of its own under
// the cache folder; they are unpacked there, never installed, and never part of this repository.
// Where the machine has no way to them it says so loudly and ends with code 3.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"helios/internal/cachedir"
	"helios/tools/internal/repo"
)

// chapter has the tables, between the marks.
const (
	chapter     = "docs/architecture/nvidia.md"
	beginMark   = "<!-- tables: make test-nvidia WRITE=-write -->"
	endMark     = "<!-- end of tables -->"
	compileVerb = "compile-one" // the child process of step jit
)

// run is one run of the checks.
type run struct {
	root, heliosctl string
	cuda12, cuda13  string // folders with cuda.h
	nvdisasm, work  string
	all             bool
	drivers         []driverLibs
	typedefs        map[string][]int
	since           map[string]int
	jobs            []*compiled
	tables          []*table
	passed, failed  map[string]int
	skipped         map[string]int
	failures, skips []string
}

type table struct {
	step string
	rows [][]string
}

func (r *run) table(step string, head ...string) *table {
	t := &table{step, [][]string{head}}
	r.tables = append(r.tables, t)
	return t
}

func (t *table) row(cells ...any) {
	var out []string
	for _, c := range cells {
		out = append(out, fmt.Sprint(c))
	}
	t.rows = append(t.rows, out)
}

// markdown is the table as it stands in the chapter.
func (t *table) markdown() string {
	var b strings.Builder
	for i, row := range t.rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			b.WriteString("|" + strings.Repeat("---|", len(row)) + "\n")
		}
	}
	return b.String()
}

func (r *run) check(step string, ok bool, format string, a ...any) {
	if ok {
		r.passed[step]++
	} else {
		r.fail(step, format, a...)
	}
}

// checks counts many at once; the words are about those that failed.
func (r *run) checks(step string, passed, failed int, format string, a ...any) {
	r.passed[step] += passed
	if failed > 0 {
		r.fail(step, format, a...)
		r.failed[step] += failed - 1
	}
}

func (r *run) fail(step, format string, a ...any) {
	r.failed[step]++
	r.failures = append(r.failures, step+": "+fmt.Sprintf(format, a...))
}

func (r *run) skip(step string, n int, format string, a ...any) {
	r.skipped[step] += n
	r.skips = append(r.skips, fmt.Sprintf("%s: %d: %s", step, n, fmt.Sprintf(format, a...)))
}

func (r *run) note(step, format string, a ...any) {
	fmt.Printf("%s: %s\n", step, fmt.Sprintf(format, a...))
}

var steps = []struct {
	name string
	run  func(*run, context.Context) error
}{
	{"symbols", (*run).symbols}, {"versions", (*run).versions}, {"layout", (*run).layout},
	{"no device", (*run).nodevice}, {"jit", (*run).jit}, {"sass", (*run).sass},
}

func main() {
	if len(os.Args) == 6 && os.Args[1] == compileVerb {
		if err := compileOne(os.Args[2], os.Args[3], os.Args[4], os.Args[5]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	r := &run{passed: map[string]int{}, failed: map[string]int{}, skipped: map[string]int{}}
	only := flag.String("only", "", "steps, with commas: symbols, versions, layout, no device, jit, sass")
	cache := flag.String("cache", "", "folder of what is fetched (default: in the user's cache)")
	tools := flag.String("cuda-tools", os.Getenv("HELIOS_CUDA_TOOLS"),
		"folder that tools/cudatools.sh filled (default: one in the cache, which it fills)")
	binary := flag.String("heliosctl", "", "heliosctl to run (default: bin/heliosctl)")
	write := flag.Bool("write", false, "write the tables to "+chapter)
	flag.BoolVar(&r.all, "all", false, "compile all modules for sm_70 and sm_80 too")
	flag.Parse()
	if flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	err := r.do(ctx, *only, *cache, *tools, *binary, *write)
	var lack *lackError
	if errors.As(err, &lack) {
		fmt.Printf("\n*** NVIDIA'S LIBRARIES NOT TESTED: %v\n"+
			"*** Symbols, compilers and machine code of NVIDIA's drivers were not checked on this machine.\n\n",
			lack)
		os.Exit(3)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "nvidiatest: %v\n", err)
		os.Exit(1)
	}
}

// prepare fetches what the steps need.
func (r *run) prepare(ctx context.Context, cache, tools, binary string) (err error) {
	if r.root, err = repo.Root(); err != nil {
		return err
	}
	if r.heliosctl, err = findHeliosctl(r.root, binary); err != nil {
		return err
	}
	if cache == "" {
		if cache, err = cachedir.Private("helios-nvidia"); err != nil {
			return err
		}
	}
	if cache, err = filepath.Abs(cache); err != nil {
		return err
	}
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return err
	}
	var missing []string
	if r.drivers, missing, err = fetchDrivers(ctx, cache); err != nil {
		return err
	}
	for _, m := range missing {
		fmt.Printf("\n*** DRIVER %s NOT TESTED: the archive has no libcuda1 of it.\n\n", m)
		r.skip("fetch", 1, "the archive has no driver %s", m)
	}
	if tools == "" {
		tools = filepath.Join(cache, "cuda-tools")
	}
	if _, err := command(ctx, r.root, nil, "./tools/cudatools.sh", tools); err != nil {
		return err
	}
	root, err := fetchWheels(ctx, cache)
	if err != nil {
		return err
	}
	r.cuda12, r.cuda13 = filepath.Join(tools, "include"), filepath.Join(root, "include")
	r.nvdisasm = filepath.Join(root, "bin", "nvdisasm")
	text, err := os.ReadFile(filepath.Join(r.cuda13, "cudaTypedefs.h"))
	if err != nil {
		return err
	}
	r.typedefs = readTypedefs(string(text))
	r.since = sinceOf(r.typedefs)
	return nil
}

func (r *run) do(ctx context.Context, only, cache, tools, binary string, write bool) error {
	if err := r.prepare(ctx, cache, tools, binary); err != nil {
		return err
	}
	var err error
	if r.work, err = os.MkdirTemp("", "nvidiatest-"); err != nil {
		return err
	}
	defer os.RemoveAll(r.work)
	var names []string
	for _, s := range steps {
		names = append(names, s.name)
	}
	chosen := names
	if only != "" {
		chosen = strings.Split(only, ",")
	}
	for _, c := range chosen {
		if !slices.Contains(names, c) {
			return fmt.Errorf("no step %q; there are %s", c, strings.Join(names, ", "))
		}
	}
	for _, s := range steps {
		if !slices.Contains(chosen, s.name) {
			continue
		}
		began := time.Now()
		if err := s.run(r, ctx); err != nil {
			return fmt.Errorf("step %s: %w", s.name, err)
		}
		fmt.Printf("%s: %d passed, %d failed, %d skipped, %.1f s\n", s.name, r.passed[s.name],
			r.failed[s.name], r.skipped[s.name], time.Since(began).Seconds())
	}
	text := r.report()
	fmt.Printf("\n%s\n", text)
	if len(r.failures) > 0 {
		return fmt.Errorf("%d checks failed:\n  %s", len(r.failures),
			strings.Join(r.failures, "\n  "))
	}
	if write {
		return r.writeTables(text)
	}
	return nil
}

var titles = map[string]string{
	"symbols":   "Calls of libcuda that the bindings use, by driver:",
	"layout":    "Constants, sizes and offsets of `cuda/driver/api.go` against cuda.h:",
	"no device": "heliosctl on a machine without a GPU, with each driver's libcuda:",
	"jit":       "The committed PTX by the drivers' own compilers:",
	"sass":      "Order in machine code: what the PTX asks for, and how many compilers keep all of it:",
}

// report is all tables, and the counts.
func (r *run) report() string {
	var b strings.Builder
	for _, t := range r.tables {
		fmt.Fprintf(&b, "%s\n\n%s\n", titles[t.step], t.markdown())
	}
	passed, failed, skipped := 0, 0, 0
	for _, n := range r.passed {
		passed += n
	}
	for _, n := range r.failed {
		failed += n
	}
	for _, n := range r.skipped {
		skipped += n
	}
	fmt.Fprintf(&b, "%d checks passed, %d failed, %d skipped", passed, failed, skipped)
	if len(r.skips) > 0 {
		fmt.Fprintf(&b, ":\n\n- %s", strings.Join(r.skips, "\n- "))
	}
	b.WriteString("\n")
	return b.String()
}

// writeTables puts the tables between the chapter's marks.
func (r *run) writeTables(text string) error {
	file := filepath.Join(r.root, chapter)
	old, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	head, rest, ok1 := strings.Cut(string(old), beginMark)
	_, tail, ok2 := strings.Cut(rest, endMark)
	if !ok1 || !ok2 {
		return fmt.Errorf("%s lacks the marks %s and %s", chapter, beginMark, endMark)
	}
	return os.WriteFile(file, []byte(head+beginMark+"\n\n"+text+"\n"+endMark+tail), 0o666)
}
