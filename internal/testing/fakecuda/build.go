// Package fakecuda builds a libcuda for machines without a GPU: the CUDA driver API in C++ on the
// CPU shim, with the kernels of cuda/kernels compiled in. Tests open it in place of NVIDIA's
// library. Execute hands the launches to an executor in the process instead, which gets the PTX;
// "make test-ptx" puts an interpreter there (tools/ptxexec).
//
// It is strict where the real driver is, and where the real one only may be: handles, contexts,
// alignment, PTX versions, lost contexts; memory is full of junk between guard pages. Knobs change
// the device and make calls, launches or the context fail (Control, or HELIOS_FAKECUDA for programs
// that load the library themselves):
//
//	devices=1 sms=4 cc=9.0 driver=12090 mem=268435456 used=0 name=…   the device
//	blocks_per_sm=16 threads_per_sm=2048 sm_min=0 sm_step=0           its SMs; granularity of green contexts, 0: as cc has it
//	green=1 iomem=1 dmabuf=1 hostreg=1 vmm=1 graphs=1                 what it can do
//	confidential=0                                                    no registered memory: the attribute says so (1), or only the call (2)
//	green_us=0                                                        what a call on a green context takes
//	hw_queues=0                                                       queues that streams share, where kernels run one by one; 0: each its own
//	granule=65536                                                     of virtual memory management (GPUs: 2 MiB)
//	fail=cuMemAlloc_v2:3[:code[:times]]                               the third call from now fails
//	hang=cuMemFree_v2                                                 calls do not come back until "hang=", or a minute later
//	crash=2[:719]                                                     the second launch from now fails, and takes its context along
//	lose=719                                                          all contexts are lost now
//	missing=cuGreenCtxCreate+…                                        for cuGetProcAddress; dlsym: option Missing
//	launch_ns=0 queue=1024 free_waits=1                               latency, stream depth, cuMemFree's wait
//	init=0 compute_mode=0 jit=…                                       result of cuInit; 2: prohibited; PTX is refused with this in the log
//	seed=1 store_buffer=0 jitter=0                                    of kernels, see internal/testing/shim
//	reset                                                             start anew: no context, cuInit to come, knobs as here
//	calls=symbol failed=symbol sites live error violations loading connections   questions
package fakecuda

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"helios/internal/cachedir"
)

// ErrNoCompiler is returned where there is no C++ compiler.
var ErrNoCompiler = errors.New("no C++ compiler; install g++ or set CXX")

const (
	lockPatience    = 10 * time.Minute // for another process that builds the same
	compilePatience = 5 * time.Minute
	keep            = 7 * 24 * time.Hour // how long unused results stay in the cache
)

// Option shapes a build.
type Option func(*options)

type options struct {
	missing []string
	private bool
	root    string
}

// Missing leaves symbols out of the library, as older drivers do.
func Missing(symbols ...string) Option {
	return func(o *options) { o.missing = append(o.missing, symbols...) }
}

// Private gives the caller a copy of the library, which has a state of its own. A process can load
// about six, which is the loader's room for thread-local variables; "reset" is enough for tests
// that run one after the other.
func Private() Option { return func(o *options) { o.private = true } }

// Root names the repository instead of looking for it above the working directory.
func Root(dir string) Option { return func(o *options) { o.root = dir } }

// Build returns the path of the library. The first build takes some seconds; later ones of the same
// sources come from a cache. Without a C++ compiler it skips the test.
func Build(t testing.TB, opts ...Option) string {
	t.Helper()
	dir, err := cachedir.Private("helios-fakecuda")
	if err != nil {
		t.Fatal(err)
	}
	path, err := BuildIn(dir, opts...)
	if errors.Is(err, ErrNoCompiler) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if o := collect(opts); o.private {
		b, err := os.ReadFile(path)
		if err == nil {
			path = filepath.Join(t.TempDir(), "libcuda-fake.so")
			err = os.WriteFile(path, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if afterBuild != nil {
		if collect(opts).root != "" {
			t.Skip("about changed C++ of the kernels, and kernels run from their PTX here")
		}
		afterBuild(t, path)
	}
	return path
}

var afterBuild func(t testing.TB, library string)

// AfterBuild has fn see each library that Build returns, before the test does.
func AfterBuild(fn func(t testing.TB, library string)) { afterBuild = fn }

func collect(opts []Option) options {
	var o options
	for _, f := range opts {
		f(&o)
	}
	slices.Sort(o.missing)
	o.missing = slices.Compact(o.missing)
	return o
}

// BuildIn builds in a directory of the caller's, which also keeps objects for the next time.
func BuildIn(dir string, opts ...Option) (string, error) {
	return lockedBuild(dir, opts, func(b *builder, o options) (string, error) {
		path, err := b.library(o.missing)
		prune(dir)
		return path, err
	})
}

// lockedBuild builds while no other process builds in dir.
func lockedBuild(dir string, opts []Option,
	build func(*builder, options) (string, error)) (string, error) {
	o := collect(opts)
	root, err := findRoot(o.root)
	if err != nil {
		return "", err
	}
	b, err := newBuilder(root, dir)
	if err != nil {
		return "", err
	}
	unlock, err := lock(filepath.Join(dir, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	return build(b, o)
}

// findRoot is the directory of go.mod of module helios.
func findRoot(dir string) (string, error) {
	if dir == "" {
		var err error
		if dir, err = os.Getwd(); err != nil {
			return "", err
		}
	}
	for d := dir; ; d = filepath.Dir(d) {
		mod, err := os.ReadFile(filepath.Join(d, "go.mod"))
		if err == nil && bytes.HasPrefix(mod, []byte("module helios\n")) {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "",
				fmt.Errorf(
					"the sources of Helios are not above %s: the fake libcuda is built from them",
					dir)
		}
	}
}

// lock takes a file lock, so that one process builds and others find the result.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("cache of the fake libcuda: %w", err)
	}
	for end := time.Now().Add(lockPatience); ; {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil // which also unlocks
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) ||
			time.Now().After(end) {
			return nil, errors.Join(fmt.Errorf("lock %s, which another build holds: %w", path, err),
				f.Close())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

type builder struct {
	root, dir string
	cxx       []string
	compiler  string // its own name and version
	// Headers of the three folders by path, and what each includes, as paths.
	headers map[string]header
}

// header is a file that sources include.
type header struct {
	sum      [sha256.Size]byte
	includes []string
}

// includeLine matches the lines by which our sources include our headers.
var includeLine = regexp.MustCompile(`(?m)^[ \t]*#[ \t]*include[ \t]*"([^"]+)"`)

// included are the headers of ours that a text of a folder names: beside it, or where compileFlags
// say.
func (b *builder) included(folder, text string) []string {
	var out []string
	for _, m := range includeLine.FindAllStringSubmatch(text, -1) {
		for _, dir := range append([]string{folder}, includeFolders...) {
			if p := path.Join(dir, m[1]); b.headers[p].sum != [sha256.Size]byte{} {
				out = append(out, p)
				break
			}
		}
	}
	return out
}

// reach is a hash of all headers that a text may include, itself or by others.
func (b *builder) reach(folder, text string) string {
	seen := map[string]bool{}
	todo := b.included(folder, text)
	for len(todo) > 0 {
		p := todo[0]
		todo = todo[1:]
		if !seen[p] {
			seen[p] = true
			todo = append(todo, b.headers[p].includes...)
		}
	}
	h := sha256.New()
	for _, p := range slices.Sorted(maps.Keys(seen)) {
		sum := b.headers[p].sum
		fmt.Fprintf(h, "%s %x\n", p, sum)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// includeFolders are searched for quoted headers, relative to the root; headerFolders have some.
var (
	includeFolders = []string{"cuda/kernels", "internal/testing/shim"}
	headerFolders  = append(slices.Clone(includeFolders), "internal/testing/fakecuda/src")
)

func newBuilder(root, dir string) (*builder, error) {
	b := &builder{root: root, dir: dir, cxx: strings.Fields(os.Getenv("CXX"))}
	if len(b.cxx) == 0 {
		b.cxx = []string{"g++"}
	}
	if _, err := exec.LookPath(b.cxx[0]); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoCompiler, err)
	}
	v, err := exec.Command(b.cxx[0], append(b.cxx[1:], "--version")...).Output()
	if err != nil {
		return nil, fmt.Errorf("%s --version: %w", b.cxx[0], err)
	}
	b.compiler = string(v)
	b.headers = map[string]header{}
	texts := map[string]string{}
	for _, sub := range headerFolders {
		files, err := filepath.Glob(filepath.Join(root, sub, "*.h"))
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				return nil, err
			}
			p := path.Join(sub, filepath.Base(f))
			texts[p] = string(text)
			b.headers[p] = header{sum: sha256.Sum256(text)}
		}
	}
	for p, text := range texts {
		h := b.headers[p]
		h.includes = b.included(path.Dir(p), text)
		b.headers[p] = h
	}
	return b, nil
}

var compileFlags = []string{
	"-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread",
	"-DHX_SHIM", "-Icuda/kernels", "-Iinternal/testing/shim",
}

// Warnings are not asked for: a test of the sources has them as errors, a user's newer compiler may
// know more.

// sources are the kernels, the shim's runtime and the fake itself, relative to the root.
func (b *builder) sources() ([]string, error) {
	var all []string
	for _, pattern := range []string{"cuda/kernels/*.cu", "internal/testing/shim/*.cc",
		"internal/testing/fakecuda/src/*.cc"} {
		files, err := filepath.Glob(filepath.Join(b.root, pattern))
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			if name := filepath.Base(f); strings.HasSuffix(name, "_test.cc") || name == "check.cc" {
				continue
			}
			rel, err := filepath.Rel(b.root, f)
			if err != nil {
				return nil, err
			}
			all = append(all, rel)
		}
	}
	return all, nil
}

func (b *builder) library(missing []string) (string, error) {
	sources, err := b.sources()
	if err != nil {
		return "", err
	}
	objects, errs := make([]string, len(sources)), make([]error, len(sources))
	slots := make(chan struct{}, runtime.NumCPU())
	var wg sync.WaitGroup
	for i, s := range sources {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			objects[i], errs[i] = b.object(s)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(strings.Join(objects, "\n") + "\n" + strings.Join(missing, "\n")))
	out := filepath.Join(b.dir, "libcuda-"+hex.EncodeToString(sum[:12])+".so")
	if fresh(out) {
		return out, nil
	}
	args := append([]string{"-shared", "-pthread", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic",
		"-Wl,-z,defs", "-Wl,--gc-sections", "-o", out + ".new"}, objects...)
	if len(missing) > 0 {
		script := out + ".map"
		if err := os.WriteFile(script, []byte("{ local: "+strings.Join(missing, "; ")+"; };\n"),
			0o600); err != nil {
			return "", err
		}
		args = append(args, "-Wl,--version-script="+script)
	}
	if err := b.run(append(args, "-ldl")); err != nil {
		return "", fmt.Errorf("link the fake libcuda: %w", err)
	}
	return out, os.Rename(out+".new", out)
}

// object compiles one source, or finds what it compiled to before.
func (b *builder) object(source string) (string, error) {
	text, err := os.ReadFile(filepath.Join(b.root, source))
	if err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %s %s %s %d\n%s", b.cxx, compileFlags, b.compiler,
		b.reach(path.Dir(filepath.ToSlash(source)), string(text)), source, len(text), text)
	name := strings.NewReplacer("/", "-", ".", "-").Replace(source)
	out := filepath.Join(b.dir, name+"-"+hex.EncodeToString(h.Sum(nil)[:12])+".o")
	if fresh(out) {
		return out, nil
	}
	// Only what is after the header block of a kernel matters to a debugger: paths stay relative.
	args := append(slices.Clone(compileFlags), "-x", "c++", "-c", source, "-o", out+".new")
	if err := b.run(args); err != nil {
		return "", fmt.Errorf("compile %s for the fake libcuda: %w", source, err)
	}
	return out, os.Rename(out+".new", out)
}

func (b *builder) run(args []string) error {
	cmd := exec.Command(b.cxx[0], append(b.cxx[1:], args...)...)
	cmd.Dir = b.root
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		return err
	}
	limit := time.AfterFunc(compilePatience, func() { _ = cmd.Process.Kill() })
	defer limit.Stop()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, said.Bytes())
	}
	return nil
}

// fresh reports whether a result is there, and marks it as used.
func fresh(path string) bool {
	now := time.Now()
	return os.Chtimes(path, now, now) == nil
}

// prune removes results that nobody used for long. Results that cannot be removed stay.
func prune(dir string) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, f := range files {
		if info, err := f.Info(); err == nil && f.Name() != "lock" && info.Mode().IsRegular() &&
			time.Since(info.ModTime()) > keep {
			_ = os.Remove(filepath.Join(dir, f.Name()))
		}
	}
}
