package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"helios/tools/vmtest/agent"
)

// Scenario is one machine and what happens on it. Files register theirs in init:
//
//	func init() { scenarios = append(scenarios, Scenario{…}) }
type Scenario struct {
	Name  string
	Long  bool // left out of -short
	Alone bool // measures: nothing runs beside it
	// from the end of the boot, on an idle machine (see slowness); default 2 minutes
	Limit  time.Duration
	Config Config
	Run    func(t *T)
}

var scenarios []Scenario

const (
	defaultLimit = 2 * time.Minute
	// idleBoot is the time that a machine boots on two cores that have nothing else to do.
	idleBoot = 8 * time.Second
	mostSlow = 6
	hardCap  = 20 * time.Minute // of a scenario, however slow the machine
)

// slowness is the factor for time limits that a boot of this length shows: the emulator runs code
// of all kinds, so it measures what the host has to give, other machines beside it included.
func slowness(boot time.Duration) float64 {
	return min(max(float64(boot)/float64(idleBoot), 1), mostSlow)
}

// stretch makes a limit that is meant for an idle machine one for this machine.
func stretch(limit time.Duration, slow float64) time.Duration {
	return min(time.Duration(float64(limit)*max(slow, 1)), max(limit, hardCap))
}

// T holds what a scenario works with. Fatalf and the methods that fail end the calling goroutine.
type T struct {
	context.Context
	VM   *VM
	Name string

	in *inputs
	mu sync.Mutex
	// failures and notes in order; notes are printed with the scenario's line
	failures []string
	notes    []string
	verbose  bool
	// expectLog is the harness's test of the log check: a line that must be found was written by
	// the test
	expectLog bool
	began     time.Time
	slow      float64 // factor of all time limits
}

// Errorf records a failure and goes on.
func (t *T) Errorf(format string, a ...any) {
	t.mu.Lock()
	t.failures = append(t.failures, fmt.Sprintf(format, a...))
	t.mu.Unlock()
	t.Logf("FAILED: "+format, a...)
}

// Fatalf records a failure and ends the goroutine.
func (t *T) Fatalf(format string, a ...any) {
	t.Errorf(format, a...)
	runtime.Goexit()
}

// Logf prints with -v.
func (t *T) Logf(format string, a ...any) {
	if t.verbose {
		fmt.Printf("  [%s %5.1f s] %s\n", t.Name, time.Since(t.began).Seconds(),
			fmt.Sprintf(format, a...))
	}
}

// Notef is a line that is always printed: a figure that the tier has to show.
func (t *T) Notef(format string, a ...any) {
	t.mu.Lock()
	t.notes = append(t.notes, fmt.Sprintf(format, a...))
	t.mu.Unlock()
	t.Logf(format, a...)
}

// Cmd is a command in the guest.
type Cmd struct {
	Argv []string
	// "root" (default) or "user": uid 1000, with the groups and memlock of a fresh login
	User  string
	Env   []string
	Dir   string
	Stdin string
	TTY   bool // standard streams are a terminal, whose output is Result.Out
	// default 60 s; a command that is over it is killed and fails the scenario
	Timeout time.Duration
}

// Result is a command's end. Code is 128 + the signal of a command that was killed.
type Result struct {
	Code     int
	Out, Err string
}

// answerSlack is the time that the guest may take for an answer after a command's own time-out.
var answerSlack = 15 * time.Second

func (t *T) do(limit time.Duration, q agent.Request) (agent.Response, error) {
	ctx, cancel := context.WithTimeout(t.Context, stretch(limit, t.slow))
	defer cancel()
	a, err := t.VM.agent.Do(ctx.Done(), q)
	if err != nil && t.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(t.Context), err)
	}
	return a, err
}

// request gives the limit without the machine's slowness, which do adds; the guest's has it
// already.
func (c Cmd) request(op string, slow float64) (agent.Request, time.Duration) {
	limit := c.Timeout
	if limit <= 0 {
		limit = time.Minute
	}
	return agent.Request{Op: op, Argv: c.Argv, User: c.User, Env: c.Env, Dir: c.Dir,
			Stdin: []byte(c.Stdin), TTY: c.TTY, TimeoutMS: stretch(limit, slow).Milliseconds()},
		limit + answerSlack
}

func (t *T) result(what string, limit time.Duration, a agent.Response) Result {
	r := Result{a.Code, string(a.Out), string(a.Err)}
	if a.TimedOut {
		t.Fatalf("%s: killed after its time limit of %v; it printed:\n%s%s", what,
			stretch(limit-answerSlack, t.slow), r.Out, r.Err)
	}
	return r
}

// Run runs a command to its end, with whatever exit code.
func (t *T) Run(c Cmd) Result {
	q, limit := c.request(agent.OpExec, t.slow)
	what := strings.Join(c.Argv, " ")
	began := time.Now()
	a, err := t.do(limit, q)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	r := t.result(what, limit, a)
	t.Logf("%.200s: exit code %d after %.1f s", what, r.Code, time.Since(began).Seconds())
	return r
}

// OK runs a shell line, which must exit 0, and returns its standard output.
func (t *T) OK(user, shell string) string { return t.run(user, 0, shell) }

// run is OK with a time limit of its own.
func (t *T) run(user string, limit time.Duration, shell string) string {
	r := t.Run(Cmd{Argv: []string{"/bin/sh", "-c", shell}, User: user, Timeout: limit})
	if r.Code != 0 {
		t.Fatalf("%s (as %s): exit code %d:\n%s%s", shell, user, r.Code, r.Out, r.Err)
	}
	return r.Out
}

// Exit runs a shell line that must end with this exit code and say all words; it returns what it
// said.
func (t *T) Exit(code int, words []string, user, shell string) string {
	r := t.Run(Cmd{Argv: []string{"/bin/sh", "-c", shell}, User: user})
	said := r.Err + r.Out
	if r.Code != code {
		t.Fatalf("%s (as %s): exit code %d, not %d:\n%s", shell, user, r.Code, code, said)
	}
	for _, w := range words {
		if !strings.Contains(said, w) {
			t.Fatalf("%s (as %s): does not say %q:\n%s", shell, user, w, said)
		}
	}
	return said
}

// Proc is a command in the background.
type Proc struct {
	t     *T
	what  string
	limit time.Duration
	PID   int // in the guest, of the process itself; its group has the same number
}

// Start begins a command; its time limit runs from now.
func (t *T) Start(c Cmd) *Proc {
	q, limit := c.request(agent.OpStart, t.slow)
	what := strings.Join(c.Argv, " ")
	a, err := t.do(answerSlack, q)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	t.Logf("started %.200s", what)
	return &Proc{t, what, limit, a.Proc}
}

// Kill sends a signal to the command's process group.
func (p *Proc) Kill(sig syscall.Signal) {
	if _, err := p.t.do(answerSlack, agent.Request{Op: agent.OpKill, Proc: p.PID,
		Signal: int(sig)}); err != nil {
		p.t.Fatalf("%s: %v", p.what, err)
	}
}

// Wait waits for the command's end.
func (p *Proc) Wait() Result {
	a, err := p.t.do(p.limit, agent.Request{Op: agent.OpWait, Proc: p.PID})
	if err != nil {
		p.t.Fatalf("%s: %v", p.what, err)
	}
	r := p.t.result(p.what, p.limit, a)
	p.t.Logf("%.200s: ended with exit code %d", p.what, r.Code)
	return r
}

// ReadFile reads up to agent.FileLimit bytes of a file in the guest.
func (t *T) ReadFile(path string) []byte { return t.ReadFileAt(path, 0, agent.FileLimit) }

// ReadFileAt reads up to n bytes from an offset of a file or block device in the guest.
func (t *T) ReadFileAt(path string, off, n int64) []byte {
	a, err := t.do(answerSlack, agent.Request{Op: agent.OpRead, Path: path, Offset: off, Max: n})
	if err != nil {
		t.Fatalf("%v", err)
	}
	return a.Data
}

// WriteFile writes a file in the guest, small: the channel is a serial port.
func (t *T) WriteFile(path string, data []byte, mode uint32) {
	if _, err := t.do(time.Minute, agent.Request{Op: agent.OpWrite, Path: path, Data: data,
		Mode: mode}); err != nil {
		t.Fatalf("%v", err)
	}
}

// KernelLog is the guest's kernel log: warnings since boot and everything since the agent's start.
func (t *T) KernelLog() string {
	a, err := t.do(answerSlack, agent.Request{Op: agent.OpLog})
	if err != nil {
		t.Fatalf("%v", err)
	}
	return string(a.Data)
}

// QMP runs a command of QEMU. Devices are called nvmeN, their drives dN, hot-plug ports portN.
func (t *T) QMP(cmd string, args map[string]any) (json.RawMessage, error) {
	b, err := t.VM.qmp.do(cmd, args)
	t.Logf("qmp %s %v: %.200s %v", cmd, args, b, err)
	return b, err
}

// HMP runs a line of QEMU's monitor and returns what it prints.
func (t *T) HMP(line string) string {
	b, err := t.QMP("human-monitor-command", map[string]any{"command-line": line})
	var out string
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return out
}

// Event waits for an event of QEMU that no Event call has returned yet.
func (t *T) Event(name string, limit time.Duration) json.RawMessage {
	b, err := t.VM.qmp.event(name, limit)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return b
}

// Unplug asks the guest to release disk i, which is behind a hot-plug port.
func (t *T) Unplug(i int) {
	if _, err := t.QMP("device_del", map[string]any{"id": fmt.Sprintf("nvme%d", i)}); err != nil {
		t.Fatalf("%v", err)
	}
}

// Plug puts disk i into its hot-plug port.
func (t *T) Plug(i int) {
	if _, err := t.QMP("device_add", nvmeDevice(i, t.VM.cfg.Disks[i])); err != nil {
		t.Fatalf("%v", err)
	}
}

// Addr is the PCI address of disk i, which must be there. The kernel's own names (nvme0 …) follow
// the order in which its probes end, which differs from boot to boot.
func (t *T) Addr(i int) string {
	c := t.VM.cfg
	switch {
	case c.Disks[i].HotPlug:
		port := fmt.Sprintf("/sys/bus/pci/devices/0000:00:%02x.0", firstSlot+i)
		return strings.TrimSpace(t.OK("root", "cd "+port+" && ls -d 0000:*:00.0"))
	case c.SharedGroup && i < 2:
		return fmt.Sprintf("0000:00:10.%d", i)
	}
	return fmt.Sprintf("0000:00:%02x.0", firstSlot+i)
}

// Dev is the block device of disk i, which the kernel's driver must have: /dev/nvme2n1.
func (t *T) Dev(i int) string {
	n := strings.Fields(t.OK("root", "ls /sys/bus/pci/devices/"+t.Addr(i)+"/nvme"))
	if len(n) != 1 {
		t.Fatalf("disk %d: the kernel's driver has %q", i, n)
	}
	return "/dev/" + n[0] + "n1"
}

// DiskPath is the raw image of disk i on the host.
func (t *T) DiskPath(i int) string { return t.VM.at.disk(i) }

// HostDir is a folder on the host that goes away with the machine.
func (t *T) HostDir() string {
	d := filepath.Join(t.VM.at.dir, "host")
	if err := os.MkdirAll(d, 0o755); err != nil {
		t.Fatalf("%v", err)
	}
	return d
}

// HostBinary is heliosctl for the host: the very file that the guest has as /bin/heliosctl.
func (t *T) HostBinary() string { return t.in.host }

// GoTest runs tests of a package that Config.Tests names, as root in the guest; run is -test.run's
// pattern.
func (t *T) GoTest(pkg, run string, env ...string) string {
	const limit = 3 * time.Minute
	r := t.Run(Cmd{Argv: []string{testPath(pkg), "-test.run", run, "-test.v", "-test.timeout",
		stretch(limit, t.slow).String()}, Env: env, Timeout: limit + 5*time.Second, Dir: "/tmp"})
	if r.Code != 0 {
		t.Fatalf("%s -run %s: exit code %d:\n%s%s", pkg, run, r.Code, r.Out, r.Err)
	}
	t.ran(pkg, run, r)
	return r.Out
}

// ran fails where a test was skipped, or none ran: in the guest they find all that they ask for.
func (t *T) ran(pkg, run string, r Result) {
	if !strings.Contains(r.Out, "--- PASS") || strings.Contains(r.Out, "--- SKIP") {
		t.Fatalf("%s -run %s: no test ran and passed, or one was skipped:\n%s%s", pkg, run,
			r.Out, r.Err)
	}
}

// outcome is a scenario's end.
type outcome struct {
	name    string
	took    time.Duration
	boot    time.Duration
	failure string
	crash   string // how QEMU failed by itself, "" when it did not
	notes   []string
}

// runScenario boots, runs, checks the log and ends the machine; keep leaves its folder.
func runScenario(whole context.Context, in *inputs, s Scenario, verbose, keep bool) outcome {
	o := runOnce(whole, in, s, verbose, keep)
	if o.crash == "" || whole.Err() != nil {
		return o
	}
	// The emulator itself died or lost an interrupt, which no guest should be able to make it do.
	// Once, and it is told; what comes of what we do comes again.
	again := runOnce(whole, in, s, verbose, keep)
	again.notes = append([]string{"QEMU failed (" + o.crash +
		"), so it ran a second time; the first time: " + firstLine(o.failure)}, again.notes...)
	again.took += o.took
	return again
}

func runOnce(whole context.Context, in *inputs, s Scenario, verbose, keep bool) (o outcome) {
	o.name = s.Name
	began := time.Now()
	defer func() { o.took = time.Since(began) }()
	limit := s.Limit
	if limit == 0 {
		limit = defaultLimit
	}
	var vm *VM
	var up time.Time
	for try := 1; ; try++ {
		dir, err := os.MkdirTemp(in.work, "m")
		if err != nil {
			o.failure = err.Error()
			return o
		}
		defer func() {
			if keep {
				fmt.Printf("  kept %s\n", dir)
			} else {
				os.RemoveAll(dir)
			}
		}()
		initrd := filepath.Join(dir, "initrd")
		if err := in.initrd(s.Config, initrd); err != nil {
			o.failure = err.Error()
			return o
		}
		up = time.Now()
		if vm, err = startVM(whole, in, s.Config, dir, initrd); err == nil {
			break
		}
		// A host that is busy with other things can starve a guest's boot. Once, and it is told.
		if !errors.Is(err, errBoot) || try == 2 || whole.Err() != nil {
			o.failure = err.Error()
			return o
		}
		o.notes = append(o.notes, "booted a second time: "+err.Error())
	}
	defer vm.kill()
	o.boot = time.Since(up)
	slow := slowness(o.boot)
	limit = stretch(limit, slow)
	ctx, cancel := context.WithTimeoutCause(whole, limit,
		fmt.Errorf("the scenario is over its limit of %v", limit))
	defer cancel()
	t := &T{Context: ctx, VM: vm, Name: s.Name, in: in, verbose: verbose, began: began, slow: slow}
	t.Logf("booted")
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				t.Errorf("panic: %v\n%s", p, debug.Stack())
			}
		}()
		s.Run(t)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		// every wait of T ends with the context, and those of QMP have limits of their own
		t.Errorf("%v", context.Cause(ctx))
		select {
		case <-done:
		case <-time.After(stretch(answerSlack, slow)):
		}
	}
	if whole.Err() == nil { // else somebody waits for the end
		t.finish()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.failures) > 0 {
		o.crash = vm.crash()
	}
	o.failure, o.notes = strings.Join(t.failures, "\n"), append(o.notes, t.notes...)
	if o.crash == "" && lostTimer(o.failure) {
		o.crash = "the guest's kernel waited for a timer interrupt that never came"
	}
	if o.crash == "" && fastClock(o.failure) {
		o.crash = "the guest's kernel measured its clock while the host had no time for it, and its limits ran too fast"
	}
	return o
}

// lostTimer tells from the guest's words that an emulated CPU sleeps on and on although a timer was
// set: the kernel finds its own grace-period thread not woken. Everything in the guest that sleeps
// hangs then.
func lostTimer(failure string) bool {
	return strings.Contains(failure, "rcu_preempt kthread timer wakeup didn't happen")
}

// fastClock tells a time limit that a guest with a wrong clock ran into: on a starved host its
// kernel finds the timers disagreeing at boot, and may go on a second that is a tenth of one
// (seen: 329 s passed in 45).
func fastClock(failure string) bool {
	return strings.Contains(failure, "killed after its time limit") &&
		(strings.Contains(failure, "calibration deviates") ||
			strings.Contains(failure, "calibration not consistent"))
}

// finish reads the kernel's log and powers off. A machine that a scenario broke gives what it can.
func (t *T) finish() {
	limit, cancel := context.WithTimeout(context.Background(), stretch(answerSlack, t.slow))
	defer cancel()
	a, err := t.VM.agent.Do(limit.Done(), agent.Request{Op: agent.OpLog})
	if err != nil {
		t.Errorf("the kernel's log: %v", err)
	} else if err := t.VM.powerOff(); err != nil {
		t.Errorf("power off: %v", err)
	}
	console, err := os.ReadFile(t.VM.at.console())
	if err != nil {
		t.Errorf("the console: %v", err)
	}
	err = checkLog(string(a.Data) + "\n" + string(console))
	switch {
	case t.expectLog && err == nil:
		t.Errorf("the log check did not find what the scenario wrote for it")
	case err != nil && !t.expectLog:
		t.Errorf("%v", err)
	}
	if t.mu.Lock(); len(t.failures) > 0 {
		t.failures = append(t.failures, "--- end of the guest's kernel log\n"+
			lastLines(string(a.Data), 25)+t.VM.lastWords())
	}
	t.mu.Unlock()
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}
