//go:build linux && (amd64 || arm64) && !nocuda

package fakecuda_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"helios/cuda/fakecuda"
	"helios/cuda/kernels"
)

// CUresult values that the tests ask for, from cuda.h.
const (
	ok              = 0
	invalidValue    = 1
	outOfMemory     = 2
	notInitialized  = 3
	noDevice        = 100
	invalidDevice   = 101
	invalidImage    = 200
	invalidContext  = 201
	invalidPTX      = 218
	unsupportedPTX  = 222
	invalidHandle   = 400
	notFound        = 500
	notReady        = 600
	illegalAddress  = 700
	isDestroyed     = 709
	registeredTwice = 712
	notRegistered   = 713
	misaligned      = 716
	launchFailed    = 719
	notPermitted    = 800
	notSupported    = 801
	badResourceType = 914
	badResource     = 915
)

const nonBlocking = 1

// lib is a private copy of the fake, called without any binding in between. Its values live in
// memory outside Go's heap, which neither moves nor is collected.
type lib struct {
	*testing.T
	path string
	h    uintptr
	mem  []byte
	used int
}

func open(t *testing.T, knobs string, opts ...fakecuda.Option) *lib {
	t.Helper()
	path := fakecuda.Build(t, append(opts, fakecuda.Private())...)
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		t.Fatal(err)
	}
	mem, err := syscall.Mmap(-1, 0, 1<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread() // the current context belongs to the thread
	t.Cleanup(runtime.UnlockOSThread)
	fakecuda.Control(t, path, knobs)
	return &lib{T: t, path: path, h: h, mem: mem}
}

// started also initialises the driver and makes the primary context current.
func started(t *testing.T, knobs string) *lib {
	t.Helper()
	l := open(t, knobs)
	l.want(ok, "cuInit", 0)
	ctx := l.slot()
	l.want(ok, "cuDevicePrimaryCtxRetain", ctx.at(), 0)
	l.want(ok, "cuCtxSetCurrent", ctx.get())
	return l
}

type slot struct{ b []byte }

func (s slot) at() uintptr  { return uintptr(unsafe.Pointer(unsafe.SliceData(s.b))) }
func (s slot) get() uintptr { return uintptr(binary.NativeEndian.Uint64(s.b)) }
func (s slot) i32() int32   { return int32(binary.NativeEndian.Uint32(s.b)) }
func (s slot) set(v uint64) { binary.NativeEndian.PutUint64(s.b, v) }

func (l *lib) space(n int) slot {
	l.Helper()
	n = (n + 15) &^ 15
	if l.used+n > len(l.mem) {
		l.Fatal("the test needs more space")
	}
	l.used += n
	return slot{l.mem[l.used-n : l.used : l.used]}
}

func (l *lib) slot() slot { return l.space(8) }

func (l *lib) text(s string) slot {
	b := l.space(len(s) + 1)
	copy(b.b, s)
	b.b[len(s)] = 0
	return b
}

func (l *lib) call(name string, args ...uintptr) int32 {
	l.Helper()
	fn, err := purego.Dlsym(l.h, name)
	if err != nil {
		l.Fatal(err)
	}
	r, _, _ := purego.SyscallN(fn, args...)
	return int32(r)
}

func (l *lib) want(code int32, name string, args ...uintptr) {
	l.Helper()
	if got := l.call(name, args...); got != code {
		l.Fatalf("%s: %d, want %d; %s", name, got, code, fakecuda.Control(l.T, l.path, "error"))
	}
}

func (l *lib) control(cmd string) string {
	l.Helper()
	return fakecuda.Control(l.T, l.path, cmd)
}

func (l *lib) alloc(n int) uintptr {
	l.Helper()
	p := l.slot()
	l.want(ok, "cuMemAlloc_v2", p.at(), uintptr(n))
	return p.get()
}

func (l *lib) stream() uintptr {
	l.Helper()
	s := l.slot()
	l.want(ok, "cuStreamCreateWithPriority", s.at(), nonBlocking, 0)
	return s.get()
}

func (l *lib) kernel(name string) uintptr {
	l.Helper()
	m, err := kernels.PTX("conf")
	if err != nil {
		l.Fatal(err)
	}
	mod, f := l.slot(), l.slot()
	l.want(ok, "cuModuleLoadData", mod.at(), l.text(m.PTX).at())
	l.want(ok, "cuModuleGetFunction", f.at(), mod.get(), l.text(name).at())
	return f.get()
}

// launch passes words as the first parameter and an empty hx_launch as the second.
func (l *lib) launch(code int32, f uintptr, blocks, threads int, stream uintptr, words ...uint64) {
	l.Helper()
	p, hx, list := l.space(8*len(words)), l.space(16), l.space(16)
	for i, w := range words {
		binary.NativeEndian.PutUint64(p.b[8*i:], w)
	}
	binary.NativeEndian.PutUint64(list.b, uint64(p.at()))
	binary.NativeEndian.PutUint64(list.b[8:], uint64(hx.at()))
	l.want(code, "cuLaunchKernel", f, uintptr(blocks), 1, 1, uintptr(threads), 1, 1, 0, stream, list.at(), 0)
}

func (l *lib) read(p uintptr, words int) []uint64 {
	l.Helper()
	b := l.space(8 * words)
	l.want(ok, "cuMemcpyDtoH_v2", b.at(), p, uintptr(8*words))
	out := make([]uint64, words)
	for i := range out {
		out[i] = binary.NativeEndian.Uint64(b.b[8*i:])
	}
	return out
}

func TestOneKernel(t *testing.T) {
	l := started(t, "")
	f, s := l.kernel("conf_affine"), l.stream()
	const n = 1000
	b := l.alloc(8 * n)
	if v := l.read(b, 1)[0]; v == 0 {
		t.Fatal("fresh device memory is zero, as no driver promises")
	}
	l.want(ok, "cuMemsetD8Async", b, 1, 8*n, s)
	l.launch(ok, f, 7, 64, s, uint64(b), n, 3, 5)
	l.want(ok, "cuStreamSynchronize", s)
	for i, v := range l.read(b, n) {
		if want := uint64(0x0101010101010101*3 + 5); v != want {
			t.Fatalf("word %d: %#x, want %#x", i, v, want)
		}
	}
	if got := l.control("calls=cuLaunchKernel"); got != "1\n" {
		t.Fatalf("%q launches counted", got)
	}
	l.want(ok, "cuStreamDestroy_v2", s)
	l.want(ok, "cuMemFree_v2", b)
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
	if got := l.control("live"); !strings.HasPrefix(got, "contexts=0 streams=0 events=0 modules=0 device=0 ") {
		t.Fatal(got)
	}
	if got := l.control("violations"); got != "" {
		t.Fatal(got)
	}
}

var (
	_ = fmt.Sprint
	_ = math.Abs
	_ = os.Getenv
	_ sync.Mutex
	_ time.Duration
)
