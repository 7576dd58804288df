package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/tools/vmtest/agent"
)

// TestMain lets the test binary play QEMU: the agent of a guest, QMP, a console and a way to end.
func TestMain(m *testing.M) {
	if how := os.Getenv("VMTEST_FAKE_QEMU"); how != "" {
		os.Exit(playQEMU(how))
	}
	os.Exit(m.Run())
}

func playQEMU(how string) int {
	path := map[string]string{}
	for _, a := range os.Args {
		for _, id := range []string{"ch", "qmp", "con"} {
			if strings.Contains(a, ",id="+id+",path=") {
				_, path[id], _ = strings.Cut(a, ",path=")
			}
		}
	}
	dial := func(id string) net.Conn {
		c, err := net.Dial("unix", path[id])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return c
	}
	switch how {
	case "refuses":
		fmt.Fprintln(os.Stderr, "no such device")
		return 1
	}
	console, err := os.Create(path["con"])
	if err != nil {
		return 1
	}
	channel := dial("ch")
	go fakeQEMU(dial("qmp"))
	if how == "boots never" {
		fmt.Fprintln(console, "VFS: cannot find init")
		select {}
	}
	if once, ok := strings.CutPrefix(how, "boots at the second try "); ok &&
		os.Mkdir(once, 0o700) == nil {
		fmt.Fprintln(console, "Kernel panic - not syncing: timer doesn't work")
		return 0
	}
	log := "a good line\n"
	if how == "DMA fault" {
		log += "DMAR: [DMA Read NO_PASID] Request device [00:04.0] fault addr 0x1000\n"
	}
	if how == "bug on the console" {
		fmt.Fprintln(console, "BUG: kernel NULL pointer dereference")
	}
	s := &agent.Server{
		Log: func() ([]byte, error) { return []byte(log), nil },
		PowerOff: func() {
			switch how {
			case "powers off never":
				select {}
			case "no end line":
			default:
				fmt.Fprintln(console, agent.EndLine)
			}
			if how == "ends badly" {
				os.Exit(3)
			}
			os.Exit(0)
		},
	}
	_ = s.Serve(channel)
	return 1
}

// play runs a scenario on a machine that behaves as how says.
func play(t *testing.T, ctx context.Context, how string, s Scenario) outcome {
	t.Helper()
	t.Setenv("VMTEST_FAKE_QEMU", how)
	dir, err := os.MkdirTemp("", "vt") // t.TempDir's path is long for a socket
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	self, err := os.Executable()
	require.NoError(t, err)
	in := &inputs{work: dir, qemu: self, aio: "threads", kernel: &kernel{image: "/k"}}
	s.Name = "x"
	o := runScenario(ctx, in, s, false, false)
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
		t.Errorf("%s: left %v", how, left)
	}
	return o
}

func shorter(t *testing.T, limits ...*time.Duration) {
	for _, l := range limits {
		old := *l
		*l = 300 * time.Millisecond
		t.Cleanup(func() { *l = old })
	}
}

func TestScenarioPasses(t *testing.T) {
	o := play(t, t.Context(), "well", Scenario{Config: Config{Disks: []Disk{{MB: 1}}},
		Run: func(x *T) {
			if out := x.OK("root", "echo out; echo err >&2"); out != "out\n" {
				x.Errorf("out is %q", out)
			}
			x.Exit(4, []string{"refused", "disk"}, "root", "echo refused >&2; echo disk; exit 4")
			p := x.Start(Cmd{Argv: []string{"sleep", "5"}})
			p.Kill(syscall.SIGTERM)
			if r := p.Wait(); r.Code != 143 {
				x.Errorf("%+v", r)
			}
			if st, err := os.Stat(x.DiskPath(0)); err != nil || st.Size() != 1<<20 {
				x.Errorf("%v %v", st, err)
			}
			if _, err := x.QMP("any", nil); err != nil {
				x.Errorf("%v", err)
			}
			x.Notef("a figure")
		}})
	if o.failure != "" || len(o.notes) != 1 || o.boot <= 0 || o.took < o.boot {
		t.Errorf("%+v", o)
	}
}

func TestScenarioFails(t *testing.T) {
	nothing := func(*T) {}
	for _, c := range []struct {
		how, want string
		run       func(*T)
	}{
		{"well", "said so", func(x *T) { x.Errorf("said so") }},
		{"well", "exit code 1", func(x *T) { x.OK("root", "exit 1"); x.Errorf("went on") }},
		{"well", "exit code 0, not 4", func(x *T) { x.Exit(4, nil, "root", "true") }},
		{"well", `does not say "in use"`,
			func(x *T) { x.Exit(4, []string{"in use"}, "root", "exit 4") }},
		{"well", "panic: oh", func(*T) { panic("oh") }},
		{"well", "killed after its time limit", func(x *T) {
			x.Run(Cmd{Argv: []string{"sleep", "5"}, Timeout: 100 * time.Millisecond})
		}},
		{"well", "over its limit of 500ms", func(x *T) { x.OK("root", "sleep 5") }},
		{"well", "over its limit of 500ms", func(x *T) { <-x.Done(); x.OK("root", "true") }},
		{"well", "no such thing", func(x *T) {
			if _, err := x.QMP("bad", nil); err != nil {
				x.Fatalf("%v", err)
			}
		}},
		{"well", "channel to the guest ended",
			func(x *T) { _ = x.VM.cmd.Process.Kill(); x.OK("root", "true") }},
		{"DMA fault", "DMA fault: DMAR: [DMA Read", nothing},
		{"bug on the console", "kernel bug: BUG: kernel NULL", nothing},
		{"no end line", "without its end line", nothing},
		{"ends badly", "exit status 3", nothing},
		{"powers off never", "did not power off", nothing},
		{"boots never", "cannot find init", nothing},
		{"refuses", "no such device", nothing},
	} {
		// Only the limit that the case is about is short: a busy machine must not trip over
		// another.
		t.Run(c.how+" "+c.want, func(t *testing.T) {
			s := Scenario{Run: c.run}
			switch {
			case strings.Contains(c.want, "500ms"):
				s.Limit = 500 * time.Millisecond
			case c.how == "boots never":
				shorter(t, &bootLimit)
			case c.how == "powers off never":
				shorter(t, &offLimit)
			}
			o := play(t, t.Context(), c.how, s)
			if !strings.Contains(o.failure, c.want) || strings.Contains(o.failure, "went on") {
				t.Errorf("want %q, got %s", c.want, o.failure)
			}
		})
	}
}

func TestBootIsTriedTwice(t *testing.T) {
	ran := 0
	o := play(t, t.Context(), "boots at the second try "+filepath.Join(t.TempDir(), "once"),
		Scenario{Run: func(*T) { ran++ }})
	if o.failure != "" || ran != 1 || len(o.notes) != 1 || !strings.Contains(o.notes[0],
		"booted a second time") || !strings.Contains(o.notes[0], "timer doesn't work") {
		t.Errorf("ran %d times: %+v", ran, o)
	}
}

func TestInterruptEndsAScenarioAtOnce(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	began := time.Now()
	time.AfterFunc(300*time.Millisecond, func() { cancel(errors.New("interrupted")) })
	o := play(t, ctx, "powers off never", Scenario{Run: func(x *T) { x.OK("root", "sleep 5") }})
	if !strings.Contains(o.failure, "interrupted") || time.Since(began) > 4*time.Second {
		t.Errorf("after %v: %s", time.Since(began), o.failure)
	}
}

func TestScenarioRefusesABadMachine(t *testing.T) {
	o := play(t, t.Context(), "well", Scenario{Config: Config{Disks: []Disk{{LBA: 3}}},
		Run: func(x *T) { x.Errorf("ran") }})
	if !strings.Contains(o.failure, "power of two") || strings.Contains(o.failure, "ran") {
		t.Errorf("%s", o.failure)
	}
}

func TestScenarioWithoutItsTestBinaryFails(t *testing.T) {
	in := &inputs{tests: map[string]testBinary{"./broken": {err: errors.New("does not compile")}}}
	to := filepath.Join(t.TempDir(), "initrd")
	if err := in.initrd(Config{Tests: []string{"./broken"}}, to); err == nil ||
		!strings.Contains(err.Error(), "does not compile") {
		t.Errorf("%v", err)
	}
	if err := in.initrd(Config{Tests: []string{"./other"}}, to); err == nil {
		t.Error("a test binary that was never built")
	}
}

func TestInitrdHoldsTheConfigsFiles(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("text"), 0o750))
	in := &inputs{base: make([]byte, 512),
		tests: map[string]testBinary{"./tools/nvmewalk": {path: file}}}
	to := filepath.Join(dir, "initrd")
	if err := in.initrd(Config{Files: map[string]string{"/data/x": file},
		Tests: []string{"./tools/nvmewalk"}}, to); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(to)
	require.NoError(t, err)
	got := readCPIO(t, b[512:])
	for _, name := range []string{"data/x", "tests/tools_nvmewalk"} {
		if e := got[name]; string(e.data) != "text" || e.mode != 0o100750 {
			t.Errorf("%s: %+v", name, e)
		}
	}
}

func TestLastTrained(t *testing.T) {
	a, err := lastTrained(`{"event":"epoch"}` + "\n" +
		`{"event":"result","epochs":[{"loss":2,"rows_ssd":5},{"loss":1,"rows_ssd":5}],"test_acc":0.5,"params_sha256":"aa"}` + "\n")
	require.NoError(t, err)
	b := a
	if d := a.same(b); d != "" {
		t.Errorf("equal runs differ: %s", d)
	}
	b.SHA = "bb"
	if a.same(b) == "" {
		t.Error("other parameters are equal")
	}
	b = a
	b.Epochs = append(b.Epochs[:1:1], b.Epochs[1])
	b.Epochs[1].Loss = 1.0000001
	if a.same(b) == "" {
		t.Error("other losses are equal")
	}
	for _, bad := range []string{"", "x", `{"event":"result"}`} {
		if _, err := lastTrained(bad); err == nil {
			t.Errorf("took %q", bad)
		}
	}
}

// Only a signal that QEMU raised itself is a crash of QEMU; being killed, or failing, is not.
func TestCrash(t *testing.T) {
	for script, want := range map[string]string{
		"kill -SEGV $$": "segmentation fault", "kill -ABRT $$": "aborted", "kill -KILL $$": "",
		"exit 1": "", "exit 0": "",
	} {
		v := &VM{exited: make(chan struct{}), err: exec.Command("/bin/sh", "-c", script).Run()}
		close(v.exited)
		if got := v.crash(); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	if got := (&VM{exited: make(chan struct{})}).crash(); got != "" {
		t.Errorf("alive: %q", got)
	}
}

// A guest that hangs is our failure, unless its kernel says that the emulator lost its timer.
func TestLostTimer(t *testing.T) {
	log := "--- end of the guest's kernel log\n[  134.1] rcu: rcu_preempt kthread timer wakeup didn't happen for 5252 jiffies! g741"
	if !lostTimer("killed after its time limit of 4m0s\n" + log) {
		t.Error("a lost timer was not seen")
	}
	for _, s := range []string{"", "killed after its time limit of 4m0s",
		"rcu: INFO: rcu_preempt detected stalls on CPUs/tasks"} {
		if lostTimer(s) {
			t.Errorf("%q is no lost timer", s)
		}
	}
}

// A time limit in a guest with a wrong clock is the emulator's failure; without the kernel's word
// for it, it is ours.
func TestFastClock(t *testing.T) {
	const limit, log = "killed after its time limit of 5m29s\n",
		"tsc: PIT calibration deviates from HPET: 226437 2299987"
	if !fastClock(limit + log) {
		t.Error("a wrong clock was not seen")
	}
	for _, s := range []string{"", limit, log} {
		if fastClock(s) {
			t.Errorf("%q shows no wrong clock", s)
		}
	}
}
