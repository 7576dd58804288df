package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"helios/tools/vmtest/agent"
)

// VM is a running machine.
type VM struct {
	cfg    Config
	at     places
	cmd    *exec.Cmd
	agent  *agent.Client
	qmp    *qmp
	conns  []net.Conn
	exited chan struct{} // closed when QEMU ended
	err    error         // of QEMU, after exited
	stderr *os.File
}

// bootLimit bounds the time from QEMU's start to the agent's hello, on a busy machine too.
var bootLimit = 3 * time.Minute

// errBoot marks a guest that died or stood still between QEMU's start and the agent's hello.
var errBoot = errors.New("the guest did not boot")

// startVM boots a machine in dir, an empty folder whose path is short.
func startVM(ctx context.Context, in *inputs, cfg Config, dir, initrd string) (vm *VM, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	v := &VM{cfg: cfg, at: places{dir: dir, kernel: in.kernel.image, initrd: initrd, aio: in.aio},
		exited: make(chan struct{})}
	// A Unix socket's address holds 107 bytes.
	if n := len(v.at.channel()); n > 107 {
		return nil,
			fmt.Errorf("the path %s is %d bytes long; a socket takes 107: choose a shorter TMPDIR",
				v.at.channel(), n)
	}
	for i, d := range cfg.Disks {
		if err := os.WriteFile(v.at.disk(i), nil, 0o644); err != nil {
			return nil, err
		}
		if err := os.Truncate(v.at.disk(i), d.MB<<20); err != nil { // sparse
			return nil, err
		}
		if d.BlkDebug != "" {
			if err := os.WriteFile(v.at.blkdebug(i), []byte(strings.TrimPrefix(d.BlkDebug, "-")),
				0o644); err != nil {
				return nil, err
			}
		}
	}
	// QEMU connects to us: nothing that the guest says first is lost.
	listen := func(path string) (net.Listener, error) { return net.Listen("unix", path) }
	lc, err := listen(v.at.channel())
	if err != nil {
		return nil, err
	}
	defer lc.Close()
	lq, err := listen(v.at.qmp())
	if err != nil {
		return nil, err
	}
	defer lq.Close()
	if v.stderr, err = os.Create(filepath.Join(dir, "qemu.err")); err != nil {
		return nil, err
	}
	v.cmd = exec.Command(in.qemu, qemuArgs(cfg, v.at)...)
	v.cmd.Stdout, v.cmd.Stderr = v.stderr, v.stderr
	// A group of its own, so that Ctrl-C reaches the harness alone; a harness that is killed takes
	// QEMU with it.
	v.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		// Pdeathsig is sent when the thread ends that started the process: keep it.
		runtime.LockOSThread()
		err := v.cmd.Start()
		started <- err
		if err == nil {
			v.err = v.cmd.Wait()
			close(v.exited)
		}
	}()
	if err := <-started; err != nil {
		v.stderr.Close()
		return nil, fmt.Errorf("%s: %w", in.qemu, err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w%s", err, v.lastWords())
			v.kill()
		}
	}()
	accept := func(l net.Listener) (net.Conn, error) {
		type got struct {
			c   net.Conn
			err error
		}
		ch := make(chan got, 1)
		go func() { c, err := l.Accept(); ch <- got{c, err} }()
		select {
		case g := <-ch:
			if g.err == nil {
				v.conns = append(v.conns, g.c)
			}
			return g.c, g.err
		case <-v.exited:
			// as after a panic of the guest's kernel, on a host too busy to see the connection
			// before
			if v.err == nil {
				return nil, fmt.Errorf("%w: QEMU ended before it was connected", errBoot)
			}
			return nil, fmt.Errorf("QEMU ended at once: %w", v.err)
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(qmpLimit):
			return nil, fmt.Errorf("QEMU did not start within %v", qmpLimit)
		}
	}
	cc, err := accept(lc)
	if err != nil {
		return nil, err
	}
	v.agent = agent.NewClient(cc)
	cq, err := accept(lq)
	if err != nil {
		return nil, err
	}
	if v.qmp, err = newQMP(cq); err != nil {
		return nil, fmt.Errorf("%w: %w", errBoot, err)
	}
	select {
	case <-v.agent.Hello():
		return v, nil
	case <-v.agent.Ended():
		return nil, fmt.Errorf("%w: its channel ended before its agent was up: %w", errBoot,
			v.agent.Err())
	case <-v.exited:
		return nil, fmt.Errorf("%w: QEMU ended before its agent was up: %v", errBoot, v.err)
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(bootLimit):
		return nil, fmt.Errorf("%w: its agent was not up after %v", errBoot, bootLimit)
	}
}

// lastWords returns what a broken machine left: QEMU's messages and the end of the console.
func (v *VM) lastWords() string {
	out := ""
	if b, err := os.ReadFile(filepath.Join(v.at.dir, "qemu.err")); err == nil && len(b) > 0 {
		out += "\n--- QEMU says\n" + lastLines(string(b), 10)
	}
	if b, err := os.ReadFile(v.at.console()); err == nil && len(b) > 0 {
		out += "\n--- end of the guest's console\n" + lastLines(string(b), 30)
	}
	return out
}

func lastLines(s string, n int) string {
	l := strings.Split(strings.TrimSpace(strings.ReplaceAll(s, "\r", "")), "\n")
	return strings.Join(l[max(0, len(l)-n):], "\n")
}

// kill ends QEMU whatever its state.
func (v *VM) kill() {
	select {
	case <-v.exited:
	default:
		_ = v.cmd.Process.Kill()
	}
	<-v.exited
	for _, c := range v.conns {
		c.Close()
	}
	v.stderr.Close()
}

// offLimit bounds the time from the request to power off to QEMU's end.
var offLimit = 15 * time.Second

// powerOff ends the guest in good order: the end line on its console, QEMU's exit code 0.
func (v *VM) powerOff() error {
	limit := make(chan struct{})
	t := time.AfterFunc(offLimit, func() { close(limit) })
	defer t.Stop()
	if _, err := v.agent.Do(limit, agent.Request{Op: agent.OpPowerOff}); err != nil {
		return err
	}
	select {
	case <-v.exited:
	case <-limit:
		return fmt.Errorf("the guest did not power off in %v", offLimit)
	}
	if v.err != nil {
		return fmt.Errorf("QEMU: %w", v.err)
	}
	b, err := os.ReadFile(v.at.console())
	if err != nil {
		return err
	}
	if !strings.Contains(string(b), agent.EndLine) {
		return errors.New("the guest ended without its end line: it did not power off, it died")
	}
	return nil
}

// workDir makes a folder for a machine, named after this process, and removes those of processes
// that are no more.
func workDir() (string, error) {
	const prefix = "hvm-"
	old, _ := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*-*"))
	for _, d := range old {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(d), prefix), "-")
		if n, err := strconv.Atoi(pid); err == nil && errors.Is(syscall.Kill(n, 0), syscall.ESRCH) {
			os.RemoveAll(d)
		}
	}
	return os.MkdirTemp("", fmt.Sprintf("%s%d-", prefix, os.Getpid()))
}

// crash says by which signal of its own making QEMU died, "" when it lives or ended otherwise. Its
// channel ends a moment before it does.
func (v *VM) crash() string {
	select {
	case <-v.exited:
	case <-time.After(time.Second):
		return ""
	}
	var e *exec.ExitError
	if !errors.As(v.err, &e) {
		return ""
	}
	if w, ok := e.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		switch w.Signal() {
		case syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGABRT, syscall.SIGILL, syscall.SIGFPE:
			return w.Signal().String()
		}
	}
	return ""
}
