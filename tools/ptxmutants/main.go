// Command ptxmutants runs the differential tests on the committed PTX of every kernel (ptxexec),
// and then on mutants of it, in each of which one instruction is changed. A mutant is noticed if a
// test fails or does not end; the share of those is the score of the tests.
//
//	bin/lab/ptxmutants [-per 1] [-seed 1] [-kernels REGEXP] [-bar 0.6] [-survivors]
//
// Exit code 1: a kernel was not executed, a test fails on PTX as it is, or the score is below -bar.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"helios/cuda/kernels"
	"helios/tools/internal/repo"
	"helios/tools/ptxexec"
	"helios/tools/ptxrun"
)

// Limits of a mutant, relative to its job without one.
const (
	slower       = 8
	atLeast      = 8 * time.Second
	moreSteps    = 20 // instructions of one launch
	stepsAtLeast = 1_000_000
	baseLimit    = 2 * time.Minute
	jobsAtMost   = 6 // that a mutant is run by, the quickest ones
)

// How a mutant ends.
const (
	noticed     = "noticed"
	survived    = "survived"
	notExecuted = "not executed"
)

// verdict is a mutant's end.
type verdict struct {
	Mutant
	End   string
	Why   string `json:",omitempty"` // the class of a survivor, or how one was noticed
	Job   string `json:",omitempty"` // that noticed it
	Jobs  int    // run
	TookS float64
}

// base is a job without a mutant.
type base struct {
	job
	took     time.Duration
	executed map[string]ptxexec.Executed
}

type tool struct {
	root, dir string
	workers   int
}

func main() {
	var t tool
	per := flag.Int("per", 1, "mutants of each kernel")
	seed := flag.Uint64("seed", 1, "chooses the mutants")
	only := flag.String("kernels", "", "only kernels whose name matches this regular expression")
	bar := flag.Float64("bar", 0, "fail below this share of noticed ones among the executed")
	out := flag.String("json", "", "write every mutant and its end to this file")
	list := flag.Bool("survivors", false, "list the survivors")
	flag.IntVar(&t.workers, "workers", runtime.NumCPU(), "processes at a time")
	flag.Parse()
	if err := t.run(*per, *seed, *only, *bar, *out, *list); err != nil {
		fmt.Fprintln(os.Stderr, "ptxmutants:", err)
		os.Exit(1)
	}
}

func (t *tool) run(per int, seed uint64, only string, bar float64, out string, list bool) error {
	which, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-kernels: %w", err)
	}
	if t.root, err = repo.Root(); err != nil {
		return err
	}
	if t.dir, err = os.MkdirTemp("", "ptxmutants-"); err != nil {
		return err
	}
	defer os.RemoveAll(t.dir)
	began := time.Now()
	if err := t.build(); err != nil {
		return err
	}
	built := time.Since(began)
	bases, err := t.baseline()
	if err != nil {
		return err
	}
	fmt.Printf("tests built in %.0f s, %d jobs run on the PTX in %.0f s\n", built.Seconds(),
		len(bases), (time.Since(began) - built).Seconds())
	if err := executed(bases); err != nil {
		return err
	}
	if per == 0 {
		return nil
	}
	mutants, err := choose(which, per, seed)
	if err != nil {
		return err
	}
	began = time.Now()
	ends := make([]verdict, len(mutants))
	each(t.workers, len(mutants), func(i int) {
		ends[i] = t.try(mutants[i], bases)
	})
	fmt.Printf("%d mutants run in %.0f s\n\n", len(mutants), time.Since(began).Seconds())
	if out != "" {
		text, err := json.MarshalIndent(ends, "", " ")
		if err == nil {
			err = os.WriteFile(out, append(text, '\n'), 0o644)
		}
		if err != nil {
			return err
		}
	}
	return report(ends, bar, list)
}

// each calls do for 0 to n-1, some at a time.
func each(workers, n int, do func(i int)) {
	next := make(chan int)
	var wg sync.WaitGroup
	for range max(workers, 1) {
		wg.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

// binary is the tests of a package.
func (t *tool) binary(pkg string) string {
	return filepath.Join(t.dir, strings.ReplaceAll(pkg, "/", "-")+".test")
}

// build makes the test binaries of the product's packages with the executor of PTX in them: an
// overlay adds a file to each that imports it, and a workspace has both modules.
func (t *tool) build() error {
	files := map[string]string{}
	var packages []string
	for _, j := range jobs {
		if slices.Contains(packages, j.pkg) {
			continue
		}
		packages = append(packages, j.pkg)
		added := filepath.Join(t.dir, filepath.Base(j.pkg)+".go")
		text := "package " + filepath.Base(j.pkg) + "_test\n\nimport _ \"helios/tools/ptxexec\"\n"
		if err := os.WriteFile(added, []byte(text), 0o600); err != nil {
			return err
		}
		files[filepath.Join(t.root, j.pkg, "ptxexec_test.go")] = added
	}
	overlay, err := json.Marshal(map[string]any{"Replace": files})
	if err != nil {
		return err
	}
	work := fmt.Sprintf("go 1.26.0\n\nuse %q\n\nuse %q\n", t.root, filepath.Join(t.root, "tools"))
	overlayFile, workFile := filepath.Join(t.dir, "overlay.json"), filepath.Join(t.dir, "go.work")
	if err := errors.Join(os.WriteFile(overlayFile, overlay, 0o600),
		os.WriteFile(workFile, []byte(work), 0o600)); err != nil {
		return err
	}
	for _, pkg := range packages {
		cmd := exec.Command("go", "test", "-c", "-overlay", overlayFile, "-o", t.binary(pkg),
			"./"+pkg)
		cmd.Dir, cmd.Env = t.root, append(os.Environ(), "GOWORK="+workFile)
		if text, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build the tests of %s: %w\n%s", pkg, err, text)
		}
	}
	return nil
}

// result is one run of a job.
type result struct {
	ok, late bool
	took     time.Duration
	said     string
	executed map[string]ptxexec.Executed
}

// start runs a job in a process of its own, with a folder of its own for what it leaves.
func (t *tool) start(j job, limit time.Duration, env ...string) (r result, err error) {
	dir, err := os.MkdirTemp(t.dir, "run-")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	counts := filepath.Join(dir, "executed")
	if err := errors.Join(os.Mkdir(counts, 0o700), os.Mkdir(dir+"/tmp", 0o700)); err != nil {
		return r, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, t.binary(j.pkg), "-test.run="+j.run, "-test.failfast",
		"-test.timeout=10m")
	cmd.Dir = filepath.Join(t.root, j.pkg)
	cmd.Env = append(os.Environ(), ptxexec.EnvExecuted+"="+counts,
		"TMPDIR="+dir+"/tmp", "GOMAXPROCS=2", "GOMEMLIMIT=512MiB")
	cmd.Env = append(append(cmd.Env, j.env...), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	began := time.Now()
	text, err := cmd.CombinedOutput()
	r = result{ok: err == nil, late: ctx.Err() != nil, took: time.Since(began), said: string(text)}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && !r.late {
		return r, fmt.Errorf("%s: %w", j, err)
	}
	if r.ok {
		r.executed, err = ptxexec.ReadExecuted(counts)
		return r, err
	}
	return r, nil
}

// baseline runs each job on the PTX as it is.
func (t *tool) baseline() ([]base, error) {
	bases, errs := make([]base, len(jobs)), make([]error, len(jobs))
	each(t.workers, len(jobs), func(i int) {
		r, err := t.start(jobs[i], baseLimit)
		if err == nil && !r.ok { // a busy machine may have been late
			fmt.Printf("%s fails on the committed PTX; once more\n", jobs[i])
			r, err = t.start(jobs[i], baseLimit)
		}
		switch {
		case err != nil:
			errs[i] = err
		case !r.ok:
			errs[i] = fmt.Errorf("%s fails on the committed PTX (late: %v):\n%s", jobs[i], r.late,
				r.said)
		case len(r.executed) == 0:
			errs[i] = fmt.Errorf("%s ran no kernel; is there a C++ compiler for the fake?\n%s",
				jobs[i], r.said)
		}
		bases[i] = base{jobs[i], r.took, r.executed}
	})
	return bases, errors.Join(errs...)
}

// executed prints what was run of each kernel of the registry and fails where one was not.
func executed(bases []base) error {
	list, err := kernels.List()
	if err != nil {
		return err
	}
	var missing []string
	var sum ptxexec.Executed
	instructions, ran := 0, 0
	for _, k := range list {
		all := map[int]bool{}
		total := 0
		for _, b := range bases {
			e, ok := b.executed[k.Name]
			if !ok {
				continue
			}
			sum.Launches += e.Launches
			sum.Instructions += e.Instructions
			sum.Lanes += e.Lanes
			sum.NS += e.NS
			total = len(e.Counts)
			for i, n := range e.Counts {
				if n > 0 {
					all[i] = true
				}
			}
		}
		if len(all) == 0 {
			missing = append(missing, k.Name)
		}
		instructions += total
		ran += len(all)
	}
	fmt.Printf("%d of %d kernels executed from their PTX: %d launches, %.1f M instructions of warps "+
		"(%.1f M of lanes), %.1f M/s (%.0f M/s); %d of %d instructions of the text (%.0f %%)\n",
		len(list)-len(missing), len(list), sum.Launches, float64(sum.Instructions)/1e6,
		float64(sum.Lanes)/1e6, float64(sum.Instructions)*1e3/float64(max(sum.NS, 1)),
		float64(sum.Lanes)*1e3/float64(max(sum.NS, 1)), ran, instructions,
		100*float64(ran)/float64(max(instructions, 1)))
	if missing != nil {
		return fmt.Errorf("kernels that no test executes from their PTX: %s; add a job to "+
			"tools/ptxmutants/jobs.go", strings.Join(missing, ", "))
	}
	return nil
}

// choose samples the mutants of all kernels.
func choose(which *regexp.Regexp, per int, seed uint64) ([]Mutant, error) {
	modules, err := kernels.Modules()
	if err != nil {
		return nil, err
	}
	var out []Mutant
	for _, c := range modules {
		var m *ptxrun.Module
		for _, k := range c.Kernels {
			if !which.MatchString(k.Name) {
				continue
			}
			if m == nil {
				if m, err = ptxrun.Parse([]byte(c.PTX)); err != nil {
					return nil, err
				}
			}
			list, err := Sample(m, k.Name, per, seed)
			if err != nil {
				return nil, err
			}
			out = append(out, list...)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("-kernels: no kernel matches %s", which)
	}
	return out, nil
}

// reached says that a test comes by a mutant's instruction. One whose guard holds for no lane is
// not counted there, but the opposite of its guard holds: what is beside it tells.
func reached(m Mutant, counts []int64) bool {
	i := m.Index
	if m.Class == Predicate && (i > 0 && counts[i-1] > 0 ||
		i+1 < len(counts) && counts[i+1] > 0) {
		return true
	}
	return counts[i] > 0
}

// try runs a mutant by the jobs that execute its instruction, until one notices.
func (t *tool) try(m Mutant, bases []base) verdict {
	v := verdict{Mutant: m, End: notExecuted}
	var of []base
	for _, b := range bases {
		if e, ok := b.executed[m.Kernel]; ok && reached(m, e.Counts) {
			of = append(of, b)
		}
	}
	slices.SortStableFunc(of, func(a, b base) int { return int(a.took - b.took) })
	plant, err := json.Marshal(ptxexec.Plant{Kernel: m.Kernel, Index: m.Index,
		Mutation: m.Mutation})
	if err != nil {
		panic(err) // of numbers and texts
	}
	began := time.Now()
	var compared, differed int64
	for _, b := range of[:min(len(of), jobsAtMost)] {
		v.End = survived
		v.Jobs++
		r, err := t.start(b.job, max(atLeast, slower*b.took),
			ptxexec.EnvPlant+"="+string(plant), fmt.Sprintf("%s=%d", ptxexec.EnvSteps,
				stepsAtLeast+moreSteps*b.executed[m.Kernel].Most))
		if err == nil && r.ok {
			compared += r.executed[m.Kernel].Compared
			differed += r.executed[m.Kernel].Differed
			continue
		}
		v.End, v.Job, v.Why = noticed, b.String(), noticedBy(r, err)
		break
	}
	v.TookS = time.Since(began).Seconds()
	if v.End == survived {
		v.Why = survivorOf(m, compared, differed)
	}
	return v
}

// Classes of survivors.
const (
	orderOnly  = "order only"                  // which tools/ptxrun cannot show
	sameValues = "same values wherever it ran" // equivalent, or the inputs lack a case
	lostValues = "other values, same results"  // which no result needs, or within the tolerance
	sameEffect = "another effect, same results"
)

// survivorOf names the likely reason why a mutant survived.
func survivorOf(m Mutant, compared, differed int64) string {
	switch {
	case m.OrderOnly:
		return orderOnly
	case differed > 0:
		return lostValues
	case compared > 0:
		return sameValues
	}
	return sameEffect // of stores, branches, atomics, barriers
}

// noticedBy describes the end of a failed run.
func noticedBy(r result, err error) string {
	switch {
	case err != nil:
		return "error: " + err.Error()
	case r.late, strings.Contains(r.said, "MaxInstructions"):
		return "did not end"
	case strings.Contains(r.said, "ILLEGAL_ADDRESS"), strings.Contains(r.said, "MISALIGNED"):
		return "wild address"
	case strings.Contains(r.said, "LAUNCH_FAILED"):
		return "launch failed"
	}
	return "other results"
}

// report prints the ends by kernel, class and reason, and compares the score with the bar.
func report(ends []verdict, bar float64, list bool) error {
	table("kernel", ends, func(v verdict) string { return v.Kernel })
	table("class", ends, func(v verdict) string { return v.Class })
	how := map[string]int{}
	for _, v := range ends {
		how[v.End+", "+v.Why]++
	}
	delete(how, notExecuted+", ")
	for _, k := range slices.Sorted(maps.Keys(how)) {
		fmt.Printf("%6d %s\n", how[k], k)
	}
	if list {
		fmt.Println()
		for _, v := range ends {
			if v.End == survived {
				fmt.Printf("survived (%s): %s: %s\n", v.Why, v.Class, v.Mutant)
			}
		}
	}
	if none := unnoticed(ends); none != nil {
		fmt.Printf("\nno mutant was noticed of: %s\n", strings.Join(none, ", "))
	}
	all := count(ends)
	score := all.score()
	fmt.Printf("\nmutation score: %d of %d executed mutants noticed, %.0f %%; %d more were not "+
		"executed; without those of order only %d of %d, %.0f %%\n", all.noticed, all.ran,
		100*score, all.mutants-all.ran, all.noticed-all.orderNoticed, all.ran-all.order,
		100*float64(all.noticed-all.orderNoticed)/float64(max(all.ran-all.order, 1)))
	if score < bar {
		return fmt.Errorf("the score %.2f is below the bar of %.2f: run with -survivors, and give "+
			"the kernels that let them live better tests", score, bar)
	}
	return nil
}
