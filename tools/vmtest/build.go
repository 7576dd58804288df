package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"helios/tools/internal/repo"
)

// inputs hold what every machine needs, made once.
type inputs struct {
	root   string // of the repository
	work   string // folder of this run
	qemu   string
	aio    string
	kernel *kernel
	base   []byte                // the first part of the initramfs
	host   string                // heliosctl for the host, the same binary as the guest's
	tests  map[string]testBinary // by package; all built before the first machine starts
}

// testBinary is a package's test binary, or why there is none: that fails the scenarios which want
// it.
type testBinary struct {
	path string
	err  error
}

// prepare fetches and builds everything; heliosctl is a ready binary, or "".
func prepare(ctx context.Context, cache, series, heliosctl string,
	say func(string, ...any)) (*inputs, error) {
	in := &inputs{aio: "threads", tests: map[string]testBinary{}}
	if ioURing() {
		in.aio = "io_uring"
	}
	var err error
	if in.qemu, err = exec.LookPath("qemu-system-x86_64"); err != nil {
		return nil,
			errors.New("qemu-system-x86_64 is not installed; install the package qemu-system-x86")
	}
	if in.root, err = repo.Root(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, err
	}
	if in.kernel, err = fetchKernel(ctx, cache, series); err != nil {
		return nil, err
	}
	busybox, err := fetchBusybox(ctx, cache)
	if err != nil {
		return nil, err
	}
	say("kernel %s, %s", in.kernel.release, in.aio)
	if in.work, err = workDir(); err != nil {
		return nil, err
	}
	init := filepath.Join(in.work, "init")
	build := [][]string{{init, "./tools/vmtest/guest"}}
	if in.host, err = filepath.Abs(heliosctl); heliosctl == "" {
		in.host = filepath.Join(in.work, "heliosctl")
		build = append(build, []string{in.host, "./cmd/heliosctl"})
	}
	if err != nil {
		return in, err
	}
	for _, b := range build {
		if err := in.goTool(ctx, b[0], b[1], "build"); err != nil {
			return in, err
		}
	}
	in.base, err = in.baseFiles(busybox, init)
	return in, err
}

// goTool builds a package into a file for the guest: a static binary.
func (in *inputs) goTool(ctx context.Context, file, pkg string, verb ...string) error {
	dir := in.root
	if ours, ok := strings.CutPrefix(pkg, "./tools/"); ok {
		dir, pkg = filepath.Join(dir, "tools"), "./"+ours
	}
	args := append(verb, "-buildvcs=false", "-tags", "nocuda", "-trimpath", "-ldflags", "-s -w",
		"-o", file, pkg)
	c := exec.CommandContext(ctx, "go", args...)
	c.Dir = dir
	c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// accounts of the guest: root, and one ordinary user.
const (
	passwd = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/people/user:/bin/sh\n"
	groups = "root:x:0:\ndisk:x:6:\nuser:x:1000:\n"
)

// baseFiles is the initramfs of every guest. It is not compressed: unpacking costs more than QEMU's
// copy.
func (in *inputs) baseFiles(busybox, init string) ([]byte, error) {
	var buf bytes.Buffer
	c := newCPIO(&buf)
	for _, d := range []string{"proc", "sys", "dev", "etc", "run", "sbin", "usr/bin", "usr/sbin",
		"mnt", "lib", "var/log"} {
		c.dir(d, 0o755, 0)
	}
	c.dir("tmp", 0o1777, 0)
	c.dir("root", 0o700, 0)
	c.dir("people/user", 0o755, 1000)
	c.char("dev/console", 0o600, 5, 1) // the kernel opens it before devtmpfs is mounted
	c.char("dev/null", 0o666, 1, 3)
	for name, text := range map[string]string{"passwd": passwd, "group": groups,
		"shells": "/bin/sh\n", "hostname": "vmtest\n"} {
		c.file("etc/"+name, 0o644, 0, []byte(text))
	}
	c.file("etc/shadow", 0o600, 0, []byte("root:*:::::::\nuser:*:::::::\n"))
	list := func(name, from string, mode uint32) error {
		b, err := os.ReadFile(from)
		if err == nil {
			c.file(name, mode, 0, b)
		}
		return err
	}
	for name, from := range map[string]string{"init": init, "bin/heliosctl": in.host,
		"bin/busybox": busybox} {
		if err := list(name, from, 0o755); err != nil {
			return nil, err
		}
	}
	if err := list("bin/vfio-setup.sh", filepath.Join(in.root, "vfio-setup.sh"),
		0o755); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	applets, err := exec.Command(busybox, "--list-full").Output()
	if err != nil {
		return nil, fmt.Errorf("busybox --list-full: %w", err)
	}
	for _, a := range strings.Fields(string(applets)) {
		if a != "bin/busybox" && a != "init" && a != "linuxrc" {
			c.link(a, "/bin/busybox")
		}
	}
	mod := "lib/modules/" + in.kernel.release
	err = filepath.WalkDir(in.kernel.modules, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(in.kernel.modules, p)
		if err != nil {
			return err
		}
		return list(mod+"/"+filepath.ToSlash(rel), p, 0o644)
	})
	if err != nil {
		return nil, err
	}
	err = c.close()
	return buf.Bytes(), err
}

// initrd writes a machine's initramfs: the base, and what its Config adds.
func (in *inputs) initrd(cfg Config, to string) error {
	var buf bytes.Buffer
	buf.Write(in.base)
	extra := map[string]string{}
	for name, from := range cfg.Files {
		extra[strings.TrimPrefix(name, "/")] = from
	}
	for _, pkg := range cfg.Tests {
		b, ok := in.tests[pkg]
		if !ok {
			return fmt.Errorf("the tests of %s were not built", pkg)
		}
		if b.err != nil {
			return b.err
		}
		extra[testPath(pkg)[1:]] = b.path
	}
	if len(extra) > 0 {
		c := newCPIO(&buf)
		var names []string
		for n := range extra {
			names = append(names, n)
		}
		slices.Sort(names)
		for _, n := range names {
			st, err := os.Stat(extra[n])
			if err != nil {
				return err
			}
			b, err := os.ReadFile(extra[n])
			if err != nil {
				return err
			}
			c.file(n, uint32(st.Mode().Perm()), 0, b)
		}
		if err := c.close(); err != nil {
			return err
		}
	}
	return os.WriteFile(to, buf.Bytes(), 0o644)
}

// testPath is the guest's path of a package's test binary.
func testPath(pkg string) string {
	return "/tests/" + strings.ReplaceAll(strings.Trim(strings.TrimPrefix(pkg, "./"), "/"),
		"/", "_")
}

// buildTests builds the test binary of each package of chosen.
func (in *inputs) buildTests(ctx context.Context, chosen []Scenario) {
	for _, s := range chosen {
		for _, pkg := range s.Config.Tests {
			if _, ok := in.tests[pkg]; ok {
				continue
			}
			b := testBinary{path: filepath.Join(in.work, "t-"+filepath.Base(testPath(pkg)))}
			b.err = in.goTool(ctx, b.path, pkg, "test", "-c")
			if b.err == nil {
				if _, err := os.Stat(b.path); err != nil {
					b.err = fmt.Errorf("%s has no tests: %w", pkg, err)
				}
			}
			in.tests[pkg] = b
		}
	}
}

// ioURing reports whether the kernel gives this process a ring (io_uring_setup(2)).
func ioURing() bool {
	const setup = 425
	var params [120]byte
	fd, _, e := syscall.Syscall(setup, 1, uintptr(unsafe.Pointer(&params[0])), 0)
	if e != 0 {
		return false
	}
	syscall.Close(int(fd))
	return true
}
