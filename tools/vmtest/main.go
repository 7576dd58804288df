// Command vmtest runs heliosctl on NVMe controllers that we did not write: QEMU's, behind an
// emulated Intel IOMMU, in virtual machines with a stock kernel of the distribution. It needs
// neither root nor KVM nor hardware: qemu-system-x86_64, apt (for the kernel's package, which is
// unpacked, not installed), dpkg-deb and go.
//
//	bin/lab/vmtest                     every scenario, a line each and a summary
//	bin/lab/vmtest -list
//	bin/lab/vmtest -v main             one of them, with what it does
//	bin/lab/vmtest -exec 'CMD'         a machine with four SSDs, and one shell line in it
//
// A scenario fails when it says so, when a command or the machine is over its time limit, when the
// machine does not power off in good order, or when the guest's kernel logged a DMA fault, a bug or
// a hung task. The exit code is 1 when any failed.
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
	"sync"
	"syscall"
	"time"
)

type options struct {
	list, keep, verbose, short bool
	kernel, exec, user, cache  string
	heliosctl                  string
	parallel                   int
	timeout                    time.Duration
	names                      []string
}

func main() {
	var o options
	flag.BoolVar(&o.list, "list", false, "name the scenarios and end")
	flag.BoolVar(&o.keep, "keep", false,
		"keep images, consoles and initramfs; their folder is printed")
	flag.BoolVar(&o.verbose, "v", false, "print what scenarios do")
	flag.BoolVar(&o.short, "short", false, "without the scenarios marked long")
	flag.StringVar(&o.kernel, "kernel", "",
		"series of the guest's kernel, such as 6.1 or 6.12; default: the distribution's own")
	flag.StringVar(&o.exec, "exec", "",
		"boot a machine with four SSDs and run this shell line in it")
	flag.StringVar(&o.user, "user", "root", "who runs the line of -exec: root or user")
	flag.StringVar(&o.cache, "cache", filepath.Join(os.TempDir(), fmt.Sprintf("heliosctl-vm-%d",
		os.Getuid())), "folder for packages")
	flag.StringVar(&o.heliosctl, "heliosctl", "",
		"static heliosctl to use; default: built from the working tree")
	flag.IntVar(&o.parallel, "parallel", 2,
		"machines at once; scenarios that measure run alone, first")
	flag.DurationVar(&o.timeout, "timeout", 40*time.Minute,
		"limit for everything, building included")
	flag.Parse()
	o.names = flag.Args()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM,
		syscall.SIGHUP)
	code, err := run(ctx, o)
	if ctx.Err() != nil {
		code = 130
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "vmtest:", err)
	}
	os.Exit(code)
}

// choose gives the scenarios of these names, in the order of the list; all without names.
func choose(all []Scenario, names []string, short bool) ([]Scenario, error) {
	var out []Scenario
	known := map[string]bool{}
	for _, s := range all {
		if known[s.Name] {
			return nil, fmt.Errorf("two scenarios are called %s", s.Name)
		}
		known[s.Name] = true
		if slices.Contains(names, s.Name) || len(names) == 0 && !(short && s.Long) {
			out = append(out, s)
		}
	}
	for _, n := range names {
		if !known[n] {
			return nil, fmt.Errorf("no scenario is called %q; -list names them", n)
		}
	}
	return out, nil
}

func run(ctx context.Context, o options) (int, error) {
	slices.SortStableFunc(scenarios, func(a, b Scenario) int {
		if a.Alone != b.Alone {
			return map[bool]int{true: -1, false: 1}[a.Alone]
		}
		return strings.Compare(a.Name, b.Name)
	})
	chosen, err := choose(scenarios, o.names, o.short)
	if err != nil {
		return 2, err
	}
	if o.list {
		for _, s := range chosen {
			fmt.Printf("%-20s %d SSDs%s\n", s.Name, len(s.Config.Disks),
				map[bool]string{true: ", long"}[s.Long])
		}
		return 0, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.timeout,
		fmt.Errorf("over the limit of %v (-timeout)", o.timeout))
	defer cancel()
	began := time.Now()
	say := func(format string, a ...any) {
		if o.exec == "" || o.verbose {
			fmt.Printf(format+"\n", a...)
		}
	}
	in, err := prepare(ctx, o.cache, o.kernel, o.heliosctl, say)
	if in != nil && in.work != "" && !o.keep {
		defer os.RemoveAll(in.work)
	}
	if err != nil {
		return 1, err
	}
	if o.exec != "" {
		return execOne(ctx, in, o)
	}
	if len(chosen) == 0 {
		return 1, errors.New("no scenarios")
	}
	in.buildTests(ctx, chosen)
	say("prepared in %.1f s; %d scenarios", time.Since(began).Seconds(), len(chosen))
	outcomes := make([]outcome, len(chosen))
	slots := make(chan struct{}, max(1, o.parallel))
	var wg sync.WaitGroup
	var out sync.Mutex
	for i, s := range chosen { // those that run alone come first
		if i > 0 && chosen[i-1].Alone {
			wg.Wait()
		}
		slots <- struct{}{}
		if ctx.Err() != nil {
			outcomes[i] = outcome{name: s.Name, failure: fmt.Sprintf("not run: %v",
				context.Cause(ctx))}
			<-slots
			continue
		}
		wg.Go(func() {
			defer func() { <-slots }()
			outcomes[i] = runScenario(ctx, in, s, o.verbose, o.keep)
			out.Lock()
			defer out.Unlock()
			printOutcome(outcomes[i])
		})
	}
	wg.Wait()
	return summary(outcomes, time.Since(began)), nil
}

func printOutcome(o outcome) {
	word := "passed"
	if o.failure != "" {
		word = "FAILED"
	}
	fmt.Printf("%s %-20s %6.1f s (boot %.1f s)\n", word, o.name, o.took.Seconds(), o.boot.Seconds())
	for _, n := range o.notes {
		fmt.Printf("    %s\n", strings.ReplaceAll(n, "\n", "\n    "))
	}
	if o.failure != "" {
		fmt.Printf("    %s\n", strings.ReplaceAll(o.failure, "\n", "\n    "))
	}
}

// summary prints the table and gives the exit code.
func summary(all []outcome, took time.Duration) int {
	failed := 0
	fmt.Println("\n=== vm tier")
	for _, o := range all {
		word := "passed"
		if o.failure != "" {
			failed++
			line, _, _ := strings.Cut(o.failure, "\n")
			word = "FAILED: " + line
		}
		fmt.Printf("%-20s %6.1f s  %s\n", o.name, o.took.Seconds(), word)
	}
	fmt.Printf("%d of %d scenarios passed in %.0f s\n", len(all)-failed, len(all), took.Seconds())
	if failed > 0 {
		return 1
	}
	return 0
}

// execDisks is the machine of -exec: a plain SSD, one with 4096-byte blocks, one with a controller
// memory buffer, one that takes small transfers on few queues.
var execDisks = []Disk{{}, {LBA: 4096, MDTS: 5}, {CMBMB: 16}, {MDTS: 1, IOQPairs: 2}}

func execOne(ctx context.Context, in *inputs, o options) (int, error) {
	code := 0
	s := Scenario{Name: "exec", Limit: o.timeout, Config: Config{Disks: execDisks},
		Run: func(t *T) {
			r := t.Run(Cmd{Argv: []string{"/bin/sh", "-c", o.exec}, User: o.user,
				Timeout: o.timeout})
			os.Stdout.WriteString(r.Out)
			os.Stderr.WriteString(r.Err)
			code = r.Code
		}}
	if end := runScenario(ctx, in, s, o.verbose, o.keep); end.failure != "" {
		return 1, errors.New(end.failure)
	}
	return code, nil
}
