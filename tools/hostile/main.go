// Command hostile runs heliosctl on inputs that are damaged, or made to do harm, each with 2 GiB of
// memory and 20 seconds, and fails where one ends in a Go trace, takes more than that, or is
// accepted in silence.
//
//	bin/lab/hostile -heliosctl bin/heliosctl [-only TEXT] [-v]
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
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
)

const (
	memoryLimit = 2 << 30
	timeLimit   = 20 * time.Second
)

func main() {
	bin := flag.String("heliosctl", "bin/heliosctl", "`PATH` of the program")
	only := flag.String("only", "", "run the cases whose name holds `TEXT`")
	verbose := flag.Bool("v", false, "print each case, and what it said")
	flag.Parse()
	if err := run(*bin, *only, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "hostile:", err)
		os.Exit(1)
	}
}

func run(bin, only string, verbose bool) error {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return err
	}
	if _, err := os.Stat(bin); err != nil {
		return fmt.Errorf("%w; build it with \"make build\"", err)
	}
	root, err := os.MkdirTemp("", "heliosctl-hostile-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(root)
	base := &maker{dir: root, bin: bin}
	if err := base.shared(); err != nil {
		return err
	}
	all := slices.DeleteFunc(catalogue(),
		func(c hostileCase) bool { return !strings.Contains(c.name, only) })
	results := make([]verdict, len(all))
	next := make(chan int)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range next {
				results[i] = judge(bin, filepath.Join(root, strconv.Itoa(i)), base, all[i])
			}
		}()
	}
	began := time.Now()
	for i := range all {
		next <- i
	}
	close(next)
	wg.Wait()
	bad := 0
	count := map[string]int{}
	var slowest, largest verdict
	for _, v := range results {
		count[v.kind]++
		if v.took > slowest.took {
			slowest = v
		}
		if v.peak > largest.peak {
			largest = v
		}
		if v.wrong {
			bad++
		}
		if v.wrong || verbose {
			fmt.Printf("%-11s %-52s exit %3d  %6.2f s  %5d MiB  %s\n", v.kind, v.name, v.code,
				v.took.Seconds(), v.peak>>20, v.said)
		}
	}
	fmt.Printf("%d hostile inputs in %.0f s:", len(all), time.Since(began).Seconds())
	for _, k := range []string{"refused", "noted", "trace", "hang", "memory", "silent",
		"nameless"} {
		fmt.Printf(" %d %s", count[k], k)
		if k != "nameless" {
			fmt.Print(",")
		}
	}
	fmt.Printf("\nslowest: %s, %.2f s; largest: %s, %d MiB\n", slowest.name, slowest.took.Seconds(),
		largest.name, largest.peak>>20)
	if bad > 0 {
		return fmt.Errorf("%d of %d inputs ended badly", bad, len(all))
	}
	return nil
}

// verdict is the end of a case. kind is refused, noted (accepted, with the text that the case
// asks for), or a fault: trace, hang, memory, silent, or nameless (an error that does not say which
// file).
type verdict struct {
	name, kind, said string
	code             int
	took             time.Duration
	peak             int64
	wrong            bool
}

func judge(bin, dir string, base *maker, c hostileCase) (v verdict) {
	v.name = c.name
	m := &maker{dir: dir, bin: bin, set: base.set}
	defer os.RemoveAll(dir)
	args, err := m.make(c)
	if err != nil {
		v.kind, v.said, v.wrong = "nameless", "cannot be made: "+err.Error(), true
		return v
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "HELIOS_STATE="+filepath.Join(dir, "state"), "TMPDIR="+dir,
		"GOTRACEBACK=single")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	began := time.Now()
	if err := cmd.Start(); err != nil {
		v.kind, v.said, v.wrong = "nameless", err.Error(), true
		return v
	}
	// Go reserves more addresses than it uses, so RLIMIT_AS says nothing: what is resident is
	// looked at instead.
	done := make(chan struct{})
	over := make(chan bool, 1)
	limit := int64(0)
	go func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-done:
				over <- false
				return
			case <-tick.C:
				now := resident(cmd.Process.Pid)
				if limit = max(limit, now); now > memoryLimit {
					_ = cmd.Cancel()
					<-done
					over <- true
					return
				}
			}
		}
	}()
	err = cmd.Wait()
	close(done)
	v.took = time.Since(began)
	tooLarge := <-over
	v.peak = limit
	// The kernel's count misses nothing, but begins with the memory that this process had when it
	// started the other.
	if ru, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok && ru.Maxrss<<10 > memoryLimit {
		v.peak, tooLarge = ru.Maxrss<<10, true
	}
	text := out.String()
	v.code = cmd.ProcessState.ExitCode()
	v.said = lastLine(text)
	v.wrong = true
	var exit *exec.ExitError
	switch {
	case tooLarge:
		v.kind = "memory"
	case ctx.Err() != nil:
		v.kind = "hang"
	case strings.Contains(text, "goroutine ") || strings.Contains(text, "panic:") ||
		strings.Contains(text, "fatal error:"):
		v.kind = "trace"
	case err != nil && !errors.As(err, &exit):
		v.kind, v.said = "nameless", err.Error()
	case c.secret != "" && strings.Contains(text, c.secret):
		v.kind, v.said = "silent", "shows the content of a file that the input has no business with"
	case c.note != "":
		v.kind, v.wrong = "noted", v.code != 0 || !strings.Contains(text, c.note)
		if v.wrong {
			v.kind = "silent"
		}
	case v.code == 0:
		v.kind = "silent"
	case v.code > 5 || !strings.Contains(text, c.names) || len(text) > 4096:
		v.kind = "nameless"
	default:
		v.kind, v.wrong = "refused", false
	}
	return v
}

func resident(pid int) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b))
	if len(f) < 2 {
		return 0
	}
	n, _ := strconv.ParseInt(f[1], 10, 64)
	return n * int64(os.Getpagesize())
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	l := lines[len(lines)-1]
	if len(l) > 200 {
		l = l[:200] + "…"
	}
	return fmt.Sprintf("%q", l)
}
