//go:build linux && (amd64 || arm64) && !nocuda

package fakecuda_test

import (
	"encoding/binary"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"

	"helios/cuda/kernels"
	"helios/internal/testing/fakecuda"
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
	noBinary        = 209
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

// lib is the fake, started anew and called without any binding in between. Its values live in
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
	path := fakecuda.Build(t, opts...)
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	require.NoError(t, err)
	mem, err := syscall.Mmap(-1, 0, 1<<20, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON)
	require.NoError(t, err)
	runtime.LockOSThread() // the current context belongs to the thread
	t.Cleanup(runtime.UnlockOSThread)
	fakecuda.Control(t, path, "reset,"+knobs)
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
	m, err := module("conf")
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
	l.want(code, "cuLaunchKernel", f, uintptr(blocks), 1, 1, uintptr(threads), 1, 1, 0, stream,
		list.at(), 0)
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
	if got := l.control("live"); !strings.HasPrefix(got,
		"contexts=0 streams=0 events=0 modules=0 device=0 ") {
		t.Fatal(got)
	}
	if got := l.control("violations"); got != "" {
		t.Fatal(got)
	}
}

// Mistakes of callers get the real driver's code, and harm nothing.
func TestMistakes(t *testing.T) {
	l := open(t, "")
	p, q := l.slot(), l.slot()
	l.want(notInitialized, "cuDeviceGetCount", p.at())
	l.want(notInitialized, "cuMemAlloc_v2", p.at(), 100)
	l.want(invalidValue, "cuInit", 1)
	l.want(ok, "cuInit", 0)
	l.want(ok, "cuInit", 0)
	for l.call("cuCtxPopCurrent_v2", p.at()) == ok { // an earlier test's, on this thread
		continue
	}
	l.want(invalidDevice, "cuDeviceGet", p.at(), 1)
	l.want(invalidContext, "cuMemAlloc_v2", p.at(), 100) // none is current
	ctx := l.slot()
	l.want(ok, "cuDevicePrimaryCtxRetain", ctx.at(), 0)
	l.want(ok, "cuCtxSetCurrent", ctx.get())
	l.want(invalidContext, "cuCtxDestroy_v2", ctx.get()) // primary ones are released
	l.want(invalidContext, "cuCtxSetCurrent", p.at())

	l.want(invalidValue, "cuMemAlloc_v2", p.at(), 0)
	l.want(outOfMemory, "cuMemAlloc_v2", p.at(), 1<<40)
	b := l.alloc(1000)
	if b%256 != 0 || b%4096 == 0 {
		t.Fatalf("address %#x: aligned to 256 bytes is promised, to a page is luck", b)
	}
	l.want(invalidValue, "cuMemFree_v2", b+16)
	l.want(invalidValue, "cuMemFreeHost", b)
	s := l.stream()
	host := l.space(4096)
	l.want(invalidValue, "cuMemcpyAsync", b, host.at(), 1001, s)
	l.want(invalidValue, "cuMemcpyAsync", b+1000, host.at(), 1, s)
	l.want(invalidValue, "cuMemcpyAsync", b, 8, 8, s) // no memory there
	l.want(invalidValue, "cuMemsetD32Async", b+2, 0, 1, s)
	l.want(invalidHandle, "cuMemcpyAsync", b, host.at(), 8, b)
	l.want(ok, "cuMemFree_v2", b)
	l.want(invalidValue, "cuMemFree_v2", b)
	l.want(invalidValue, "cuMemsetD8Async", b, 0, 1, s) // freed
	l.want(ok, "cuMemFree_v2", 0)

	page := uintptr(os.Getpagesize())
	pos := (l.space(4*os.Getpagesize()).at() + page) &^ (page - 1)
	l.want(notRegistered, "cuMemHostUnregister", pos)
	l.want(ok, "cuMemHostRegister_v2", pos, page, 3)
	l.want(registeredTwice, "cuMemHostRegister_v2", pos+page/2, page, 3)
	l.want(ok, "cuMemHostGetDevicePointer_v2", p.at(), pos+8, 0)
	if p.get() != pos+8 {
		t.Fatalf("device pointer %#x for %#x", p.get(), pos+8)
	}
	l.want(notRegistered, "cuMemHostUnregister", pos+8)
	l.want(ok, "cuMemHostUnregister", pos)
	l.want(invalidValue, "cuMemHostGetDevicePointer_v2", p.at(), pos, 0)
	l.want(invalidValue, "cuMemHostRegister_v2", 1<<44, page, 3)

	l.want(invalidValue, "cuStreamCreateWithPriority", p.at(), 2, 0)
	e := l.slot()
	l.want(ok, "cuEventCreate", e.at(), 0)
	l.want(ok, "cuEventQuery", e.get()) // never recorded: done
	l.want(invalidHandle, "cuEventElapsedTime", p.at(), e.get(), e.get())
	l.want(ok, "cuEventDestroy_v2", e.get())
	l.want(invalidHandle, "cuEventRecord", e.get(), s)
	l.want(ok, "cuStreamDestroy_v2", s)
	l.want(invalidHandle, "cuStreamDestroy_v2", s)
	l.want(invalidHandle, "cuStreamQuery", s)

	f := l.kernel("conf_affine")
	l.launch(invalidValue, f, 0, 32, 0, 0, 0, 0, 0)
	l.launch(invalidValue, f, 1, 1025, 0, 0, 0, 0, 0)
	l.launch(invalidHandle, b, 1, 32, 0, 0, 0, 0, 0)
	l.want(invalidValue, "cuLaunchKernel", f, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)
	l.want(ok, "cuFuncGetParamInfo", f, 0, p.at(), q.at())
	if p.get() != 0 || q.get() != 32 {
		t.Fatalf("parameter 0 at %d of %d bytes", p.get(), q.get())
	}
	l.want(ok, "cuFuncGetParamInfo", f, 1, p.at(), q.at())
	if p.get() != 32 || q.get() != 16 {
		t.Fatalf("parameter 1 at %d of %d bytes", p.get(), q.get())
	}
	l.want(invalidValue, "cuFuncGetParamInfo", f, 2, p.at(), q.at())

	// A second context's things are not the first's.
	other, e2 := l.slot(), l.slot()
	l.want(ok, "cuCtxCreate_v2", other.at(), 0, 0)
	l.launch(invalidHandle, f, 1, 32, 0, 0, 0, 0, 0)
	l.want(ok, "cuEventCreate", e2.at(), 0)
	l.want(ok, "cuCtxPopCurrent_v2", p.at())
	l.want(invalidHandle, "cuEventRecord", e2.get(), 0)
	l.want(ok, "cuCtxDestroy_v2", other.get())
	l.want(invalidHandle, "cuEventQuery", e2.get())
	l.want(invalidContext, "cuCtxSetCurrent", other.get())

	// Nor does a released one come back to who still has it.
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
	l.want(isDestroyed, "cuMemAlloc_v2", p.at(), 100)
	l.want(invalidContext, "cuDevicePrimaryCtxRelease_v2", 0)
	if got := l.control("live"); !strings.HasPrefix(got,
		"contexts=0 streams=0 events=0 modules=0 device=0 device_bytes=0 host=0 host_bytes=0 registered=0 ") {
		t.Fatal(got)
	}
}

// Images that do not load say why in the log buffer, whose size comes back as what was used.
func TestModules(t *testing.T) {
	m, err := module("conf")
	require.NoError(t, err)
	l := started(t, "cc=8.0,driver=12030")
	cubin := func(cc int) string {
		c, err := m.Cubin(cc)
		require.NoError(t, err)
		return string(c.Image)
	}
	for _, c := range []struct {
		name, image string
		code        int32
		log         string
	}{
		{"as committed", m.PTX, ok, ""},
		{"not PTX", "hello", invalidPTX, "Missing .version directive"},
		{"empty", "", invalidImage, ""},
		{"PTX of the future", strings.Replace(m.PTX, ".version 8.2", ".version 8.5", 1),
			unsupportedPTX, "Unsupported .version 8.5; current version is '8.3'"},
		{"a newer GPU's", strings.Replace(m.PTX, ".target sm_70", ".target sm_90", 1), invalidPTX,
			"SM version specified by .target is higher"},
		{"cut off", m.PTX[:len(m.PTX)-3], invalidPTX, "syntax error"},
		{"another kernel", strings.ReplaceAll(m.PTX, "conf_affine", "conf_bogus"), invalidPTX,
			"conf_bogus"},
		{"machine code", cubin(80), ok, ""},
		{"machine code of another GPU", cubin(90), noBinary, ""},
		{"machine code with another mark", strings.Replace(cubin(80), "\x02\x00\xbe\x00",
			"\x02\x00\xbf\x00", 1), invalidImage, ""},
		{"machine code with another kernel", strings.ReplaceAll(cubin(80), "conf_affine",
			"conf_bogus\x00"), invalidImage, "conf_bogus"},
		{"other parameters", strings.Replace(m.PTX, "conf_affine_param_0[32]",
			"conf_affine_param_0[40]", 1), invalidPTX, "conf_affine"},
	} {
		mod, log, opts, vals := l.slot(), l.space(512), l.space(16), l.space(16)
		binary.NativeEndian.PutUint32(opts.b, 5)
		binary.NativeEndian.PutUint32(opts.b[4:], 6)
		binary.NativeEndian.PutUint64(vals.b, uint64(log.at()))
		binary.NativeEndian.PutUint64(vals.b[8:], 512)
		clear(log.b)
		if got := l.call("cuModuleLoadDataEx", mod.at(), l.text(c.image).at(), 2, opts.at(),
			vals.at()); got != c.code {
			t.Errorf("%s: %d, want %d", c.name, got, c.code)
		}
		used := int(binary.NativeEndian.Uint64(vals.b[8:]))
		if said := string(log.b[:used]); !strings.Contains(said, c.log) ||
			(c.log == "") != (said == "") {
			t.Errorf("%s: log %q, want %q in it", c.name, said, c.log)
		}
		l.used = 4096 // the images are large
	}
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
}

// A kernel that leaves its memory takes the context along: all calls say so until it is gone.
func TestLostContext(t *testing.T) {
	l := started(t, "")
	f, s := l.kernel("conf_affine"), l.stream()
	b, p := l.alloc(4096), l.slot()
	e := l.slot()
	l.want(ok, "cuEventCreate", e.at(), 0)
	l.launch(ok, f, 1, 32, s, uint64(b), 100000, 1, 1) // far past the end
	l.want(illegalAddress, "cuStreamSynchronize", s)
	if said := l.control("error"); !strings.Contains(said, "conf_affine") {
		t.Fatalf("the shim says %q", said)
	}
	l.want(illegalAddress, "cuMemAlloc_v2", p.at(), 10)
	l.want(illegalAddress, "cuMemFree_v2", b)
	l.want(illegalAddress, "cuEventQuery", e.get())
	l.want(illegalAddress, "cuStreamDestroy_v2", s)
	l.want(illegalAddress, "cuCtxSynchronize")
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
	ctx := l.slot()
	l.want(ok, "cuDevicePrimaryCtxRetain", ctx.at(), 0)
	l.want(ok, "cuCtxSetCurrent", ctx.get())
	b = l.alloc(800)
	f = l.kernel("conf_affine")
	l.launch(ok, f, 2, 32, 0, uint64(b), 100, 0, 9)
	if v := l.read(b, 100)[99]; v != 9 {
		t.Fatalf("%d in a fresh context", v)
	}
	for _, c := range []struct {
		knobs string
		code  int32
	}{{"crash=1", launchFailed}, {"crash=1:700", illegalAddress}} {
		l.control(c.knobs)
		l.launch(ok, f, 1, 32, 0, uint64(b), 1, 0, 1)
		l.want(c.code, "cuCtxSynchronize")
		l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
		l.want(ok, "cuDevicePrimaryCtxRetain", ctx.at(), 0)
		l.want(ok, "cuCtxSetCurrent", ctx.get())
		f, b = l.kernel("conf_affine"), l.alloc(8)
	}
	l.launch(ok, f, 1, 32, 0, uint64(b)+4, 1, 0, 1)
	l.want(misaligned, "cuCtxSynchronize")
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
}

// A write into the slack behind a buffer, which a GPU would not notice either, is told of.
func TestSlack(t *testing.T) {
	l := started(t, "")
	f := l.kernel("conf_affine")
	b := l.alloc(1000)
	l.launch(ok, f, 1, 32, 0, uint64(b), 126, 0, 1) // one word too many
	l.want(ok, "cuCtxSynchronize")
	l.want(ok, "cuMemFree_v2", b)
	if got := l.control("violations"); !strings.Contains(got,
		"past the end of a buffer of 1000 bytes") {
		t.Fatalf("violations: %q", got)
	}
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
}

func TestInjectedFailures(t *testing.T) {
	l := started(t, "fail=cuMemAlloc_v2:2,fail=cuStreamQuery:1:719:2")
	p := l.slot()
	l.want(ok, "cuMemAlloc_v2", p.at(), 10)
	l.want(outOfMemory, "cuMemAlloc_v2", p.at(), 10)
	l.want(ok, "cuMemAlloc_v2", p.at(), 10)
	for _, code := range []int32{launchFailed, launchFailed, ok} {
		l.want(code, "cuStreamQuery", 0)
	}
	if got := l.control("calls=cuMemAlloc_v2,calls=cuStreamQuery"); got != "3\n3\n" {
		t.Fatalf("calls %q", got)
	}
	for _, bad := range []string{"fail=x", "fail=x:0", "sms=0", "sms=1000", "cc=9", "mem=much",
		"bogus=1", "crash=0"} {
		if _, err := fakecuda.Do(l.path, bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
}

func TestOldAndNoDriver(t *testing.T) {
	l := open(t, "devices=0")
	l.want(noDevice, "cuInit", 0)

	l = open(t, "driver=12020,missing=cuGreenCtxCreate")
	l.want(ok, "cuInit", 0)
	p, status := l.slot(), l.slot()
	for _, c := range []struct {
		name    string
		version uintptr
		status  int32
	}{
		{"cuMemAlloc", 12020, 0},
		{"cuMemAlloc", 3000, 1}, // that is another ABI
		{"cuEventElapsedTime", 12020, 0},
		{"cuLaunchKernelEx", 11000, 2}, // came with 11.6
		{"cuFuncGetParamInfo", 12020, 1},
		{"cuGreenCtxCreate", 12020, 1},
		{"cuBogus", 12020, 1},
	} {
		want := int32(notFound)
		if c.status == 0 {
			want = ok
		}
		l.want(ok, "cuGetProcAddress_v2", l.text(c.name).at(), p.at(), c.version, 0, status.at())
		if status.i32() != c.status || (p.get() == 0) != (c.status != 0) {
			t.Errorf("%s of %d: status %d, address %#x", c.name, c.version, status.i32(), p.get())
		}
		l.want(want, "cuGetProcAddress_v2", l.text(c.name).at(), p.at(), c.version, 0, 0)
	}

	// As in NVIDIA's libcuda of drivers 550 and 555: streams of green contexts came later than
	// these.
	l = open(t, "driver=12040")
	l.want(ok, "cuInit", 0)
	for name, there := range map[string]bool{"cuGreenCtxCreate": true, "cuStreamGetGreenCtx": true,
		"cuGreenCtxStreamCreate": false} {
		l.want(ok, "cuGetProcAddress_v2", l.text(name).at(), p.at(), 12040, 0, status.at())
		if (p.get() != 0) != there {
			t.Errorf("%s under CUDA 12.4: address %#x", name, p.get())
		}
	}

	l = open(t, "", fakecuda.Missing("cuGreenCtxCreate", "cuMemAlloc_v2"))
	for name, there := range map[string]bool{"cuGreenCtxCreate": false, "cuMemAlloc_v2": false,
		"cuMemFree_v2": true} {
		if _, err := purego.Dlsym(l.h, name); (err == nil) != there {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Green contexts come in the sizes of the compute capability, and their kernels stay inside.
func TestGreenContexts(t *testing.T) {
	for _, c := range []struct {
		knobs      string
		want       uintptr
		groups, in int
	}{
		{"sms=20,cc=9.0", 1, 2, 8},
		{"sms=20,cc=9.0", 9, 1, 16},
		{"sms=20,cc=8.6", 1, 5, 4},
		{"sms=20,cc=8.6", 5, 3, 6},
		{"sms=20,cc=7.5", 3, 5, 4},
		{"sms=20,cc=6.1", 3, 6, 3},
		{"sms=20,sm_min=1,sm_step=1", 0, 20, 1},
	} {
		l := started(t, c.knobs)
		all, rest, n, groups := l.space(144), l.space(144), l.slot(), l.space(144*20)
		l.want(ok, "cuDeviceGetDevResource", 0, all.at(), 1)
		n.set(0)
		l.want(ok, "cuDevSmResourceSplitByCount", 0, n.at(), all.at(), 0, 0, c.want)
		if int(n.i32()) != c.groups {
			t.Fatalf("%s: %d groups of %d, want %d", c.knobs, n.i32(), c.want, c.groups)
		}
		l.want(ok, "cuDevSmResourceSplitByCount", groups.at(), n.at(), all.at(), rest.at(),
			0, c.want)
		if got := binary.NativeEndian.Uint32(groups.b[96:]); int(got) != c.in {
			t.Fatalf("%s: a group has %d SMs, want %d", c.knobs, got, c.in)
		}
		left := 20 - c.groups*c.in
		if got := binary.NativeEndian.Uint32(rest.b[96:]); int(got) != left ||
			(binary.NativeEndian.Uint32(rest.b) == 1) != (left > 0) {
			t.Fatalf("%s: %d SMs remain, want %d", c.knobs, got, left)
		}
		l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
	}

	l := started(t, "sms=4,sm_min=2,sm_step=2,threads_per_sm=256")
	all, n, groups := l.space(144), l.slot(), l.space(288)
	l.want(badResourceType, "cuDeviceGetDevResource", 0, all.at(), 2)
	l.want(ok, "cuDeviceGetDevResource", 0, all.at(), 1)
	n.set(2)
	l.want(invalidValue, "cuDevSmResourceSplitByCount", groups.at(), n.at(), all.at(), 0, 0, 5)
	l.want(ok, "cuDevSmResourceSplitByCount", groups.at(), n.at(), all.at(), 0, 0, 2)
	l.want(badResource, "cuDevSmResourceSplitByCount", groups.at(), n.at(), groups.at(), 0, 0, 2)
	desc, green, s, ctx, other := l.slot(), l.slot(), l.slot(), l.slot(), l.slot()
	l.want(ok, "cuDevResourceGenerateDesc", desc.at(), groups.at(), 1)
	l.want(invalidValue, "cuGreenCtxCreate", green.at(), desc.get(), 0, 0)
	l.want(ok, "cuGreenCtxCreate", green.at(), desc.get(), 0, 1)
	l.want(invalidValue, "cuGreenCtxStreamCreate", s.at(), green.get(), 0, 0)
	l.want(ok, "cuGreenCtxStreamCreate", s.at(), green.get(), nonBlocking, 0)
	l.want(ok, "cuCtxFromGreenCtx", ctx.at(), green.get())
	l.want(ok, "cuStreamGetGreenCtx", s.get(), other.at())
	if other.get() != green.get() {
		t.Fatal("the stream's green context is another")
	}
	l.want(invalidContext, "cuCtxDestroy_v2", ctx.get())

	// 2 SMs of 256 threads hold 8 blocks of 64; 16 are on the whole device.
	b := l.alloc(16)
	l.want(ok, "cuMemsetD8_v2", b, 0, 16)
	f := l.kernel("conf_count")
	l.launch(invalidHandle, f, 1, 32, s.get(), uint64(b), uint64(b)+8, 0) // of the primary context
	lib, k := l.slot(), l.slot()
	m, err := module("conf")
	require.NoError(t, err)
	l.want(ok, "cuLibraryLoadData", lib.at(), l.text(m.PTX).at(), 0, 0, 0, 0, 0, 0)
	l.want(ok, "cuLibraryGetKernel", k.at(), lib.get(), l.text("conf_count").at())
	l.launch(ok, k.get(), 40, 64, s.get(), uint64(b), uint64(b)+8, uint64(time.Millisecond))
	l.want(ok, "cuStreamSynchronize", s.get())
	if v := l.read(b, 2); v[0] != 0 || v[1] < 1 || v[1] > 8 {
		t.Fatalf("%d blocks left, %d at one time in a green context of 2 SMs", v[0], v[1])
	}
	l.want(ok, "cuGreenCtxDestroy", green.get())
	l.want(invalidContext, "cuGreenCtxDestroy", green.get())
	l.want(invalidHandle, "cuStreamQuery", s.get())
	l.want(ok, "cuLibraryUnload", lib.get())
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
	if got := l.control("live"); !strings.HasPrefix(got, "contexts=0 ") {
		t.Fatal(got)
	}

	l = started(t, "green=0")
	l.want(notSupported, "cuDeviceGetDevResource", 0, l.space(144).at(), 1)
}

// The default stream waits for blocking streams and they for it; others go their way.
func TestDefaultStream(t *testing.T) {
	l := started(t, "")
	words := l.slot()
	page := uintptr(os.Getpagesize())
	pos := (l.space(3*os.Getpagesize()).at() + page) &^ (page - 1)
	l.want(ok, "cuMemHostRegister_v2", pos, page, 3)
	w := unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(l.mem)),
		pos-uintptr(unsafe.Pointer(unsafe.SliceData(l.mem))))), 64)
	gate, f := l.kernel("conf_gate"), l.kernel("conf_affine")
	blocking, free := l.slot(), l.stream()
	l.want(ok, "cuStreamCreate", blocking.at(), 0)
	b := l.alloc(16)
	l.want(ok, "cuMemsetD8_v2", b, 0, 16)
	p := uint64(pos)
	l.launch(ok, gate, 1, 32, blocking.get(), p, p+8, p+16, p+24, 1, uint64(10*time.Second), 0)
	l.launch(ok, f, 1, 32, 0, uint64(b), 1, 1, 1) // behind the gate
	l.launch(ok, f, 1, 32, blocking.get(), uint64(b), 1, 10, 0)
	l.launch(ok, f, 1, 32, free, uint64(b)+8, 1, 1, 7)
	l.want(ok, "cuStreamSynchronize", free)
	l.want(notReady, "cuStreamQuery", 0)
	l.want(notReady, "cuStreamQuery", blocking.get())
	binary.NativeEndian.PutUint64(w, 1) // opens it
	l.want(ok, "cuStreamSynchronize", blocking.get())
	if v := l.read(b, 2); v[0] != 10 || v[1] != 7 {
		t.Fatalf("%d, want 10 and 7", v)
	}
	l.want(ok, "cuMemHostUnregister", pos)
	_ = words
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
}

func TestEventTimes(t *testing.T) {
	l := started(t, "launch_ns=3000000")
	f, s, a, b, ms := l.kernel("conf_affine"), l.stream(), l.slot(), l.slot(), l.slot()
	buf := l.alloc(8)
	l.want(ok, "cuEventCreate", a.at(), 0)
	l.want(ok, "cuEventCreate", b.at(), 0)
	l.want(ok, "cuEventRecord", a.get(), s)
	l.launch(ok, f, 1, 32, s, uint64(buf), 1, 0, 0)
	l.want(ok, "cuEventRecord", b.get(), s)
	l.want(ok, "cuEventSynchronize", b.get())
	l.want(ok, "cuEventElapsedTime", ms.at(), a.get(), b.get())
	if v := math.Float32frombits(uint32(ms.i32())); v < 3 || v > 5000 {
		t.Fatalf("%v ms around a launch with a latency of 3", v)
	}
	quiet := l.slot()
	l.want(ok, "cuEventCreate", quiet.at(), 2)
	l.want(ok, "cuEventRecord", quiet.get(), s)
	l.want(ok, "cuEventSynchronize", quiet.get())
	// made without timing
	l.want(invalidHandle, "cuEventElapsedTime", ms.at(), a.get(), quiet.get())
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
}

// An exported range is one memory with the buffer's.
func TestDMABuf(t *testing.T) {
	l := started(t, "")
	page := uintptr(os.Getpagesize())
	base := l.alloc(5 * int(page))
	pos := (base + page - 1) &^ (page - 1)
	fd := l.slot()
	l.want(invalidValue, "cuMemGetHandleForAddressRange", fd.at(), pos+512, page, 1, 0)
	l.want(invalidValue, "cuMemGetHandleForAddressRange", fd.at(), pos, 100, 1, 0)
	l.want(ok, "cuMemsetD8_v2", pos, 3, 2*page)
	l.want(ok, "cuMemGetHandleForAddressRange", fd.at(), pos, 2*page, 1, 0)
	m, err := syscall.Mmap(int(fd.i32()), 0, int(2*page), syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_SHARED)
	require.NoError(t, err)
	defer func() {
		if err := syscall.Munmap(m); err != nil {
			t.Error(err)
		}
	}()
	if m[0] != 3 || m[2*page-1] != 3 {
		t.Fatal("the export lacks what was written before")
	}
	m[8] = 77
	if v := l.read(pos+8, 1)[0]; byte(v) != 77 {
		t.Fatalf("%#x after a write through the export", v)
	}
	l.want(ok, "cuMemsetD8_v2", pos, 9, page)
	if m[8] != 9 || m[page] != 3 {
		t.Fatal("the export does not see later writes")
	}
	require.NoError(t, syscall.Close(int(fd.i32())))
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
	l.control("dmabuf=0,iomem=0")
	ctx := l.slot()
	l.want(ok, "cuDevicePrimaryCtxRetain", ctx.at(), 0)
	l.want(ok, "cuCtxSetCurrent", ctx.get())
	pos = (l.alloc(2*int(page)) + page - 1) &^ (page - 1)
	l.want(notSupported, "cuMemGetHandleForAddressRange", fd.at(), pos, page, 1, 0)
	l.want(notPermitted, "cuMemHostRegister_v2", (l.space(2*int(page)).at()+page)&^(page-1),
		page, 5)
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
}

func put(b []byte, words ...uint32) {
	for i, w := range words {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
}

// Addresses, memory and mappings by themselves, with all the mistakes that there are.
func TestVirtualMemory(t *testing.T) {
	l := started(t, "mem=1048576,used=262144,granule=65536")
	const g = 65536
	prop, access, out := l.space(32), l.space(16), l.slot()
	put(prop.b, 1, 0, 1, 0) // pinned, no handle, device 0
	put(access.b, 1, 0, 3)
	l.want(ok, "cuMemGetAllocationGranularity", out.at(), prop.at(), 0)
	if out.get() != g {
		t.Fatalf("granularity %d", out.get())
	}
	l.want(invalidValue, "cuMemAddressReserve", out.at(), g+1, 0, 0, 0)
	l.want(invalidValue, "cuMemAddressReserve", out.at(), g, 3, 0, 0)
	l.want(ok, "cuMemAddressReserve", out.at(), 1<<40, 1<<20, 0, 0) // more than there is memory
	pos := out.get()
	if pos%(1<<20) != 0 {
		t.Fatalf("reserved at %#x", pos)
	}
	create := func(code int32, n uintptr) uintptr {
		t.Helper()
		l.want(code, "cuMemCreate", out.at(), n, prop.at(), 0)
		return out.get()
	}
	// Memory that is made for it comes as a file, which is imported as the same memory.
	put(prop.b, 1, 1, 1, 0)
	giver := create(ok, g)
	put(prop.b, 1, 0, 1, 0)
	plain := create(ok, g)
	file := l.slot()
	l.want(invalidValue, "cuMemExportToShareableHandle", file.at(), plain, 1, 0)
	l.want(invalidValue, "cuMemExportToShareableHandle", file.at(), giver, 2, 0)
	l.want(ok, "cuMemExportToShareableHandle", file.at(), giver, 1, 0)
	l.want(invalidValue, "cuMemImportFromShareableHandle", out.at(), uintptr(1<<20), 1)
	l.want(ok, "cuMemImportFromShareableHandle", out.at(), uintptr(file.i32()), 1)
	taken := out.get()
	l.want(ok, "cuMemMap", pos, g, 0, giver, 0)
	l.want(ok, "cuMemSetAccess", pos, g, access.at(), 1)
	l.want(ok, "cuMemsetD8_v2", pos, 6, g)
	l.want(ok, "cuMemMap", pos+g, g, 0, taken, 0)
	l.want(ok, "cuMemSetAccess", pos+g, g, access.at(), 1)
	if v := l.read(pos+g, 1)[0]; byte(v) != 6 {
		t.Fatalf("imported memory has %#x", v)
	}
	l.want(ok, "cuMemUnmap", pos, g)
	l.want(ok, "cuMemRelease", giver)
	if v := l.read(pos+g, 1)[0]; byte(v) != 6 {
		t.Fatalf("imported memory has %#x when the giver's is gone", v)
	}
	l.want(ok, "cuMemUnmap", pos+g, g)
	l.want(ok, "cuMemRelease", taken)
	l.want(ok, "cuMemRelease", plain)
	require.NoError(t, syscall.Close(int(file.i32())))
	create(invalidValue, g-4096)
	create(outOfMemory, 13*g)
	h := create(ok, 2*g)
	free, total := l.slot(), l.slot()
	l.want(ok, "cuMemGetInfo_v2", free.at(), total.at())
	if free.get() != 10*g || total.get() != 16*g {
		t.Fatalf("%d of %d bytes free", free.get(), total.get())
	}
	l.want(invalidValue, "cuMemMap", pos+4096, 2*g, 0, h, 0)
	l.want(invalidValue, "cuMemMap", pos, 3*g, 0, h, 0)
	l.want(invalidValue, "cuMemMap", pos, g, g, h, 0)
	l.want(invalidValue, "cuMemMap", pos-g, 2*g, 0, h, 0)
	l.want(ok, "cuMemMap", pos, 2*g, 0, h, 0)
	other := create(ok, g)
	l.want(invalidValue, "cuMemMap", pos+g, g, 0, other, 0) // there is memory already
	l.want(invalidValue, "cuMemsetD8_v2", pos, 1, g)        // and no access to it
	l.want(invalidValue, "cuMemSetAccess", pos, 3*g, access.at(), 1)
	l.want(invalidValue, "cuMemSetAccess", pos, g+1, access.at(), 1)
	l.want(ok, "cuMemSetAccess", pos, 2*g, access.at(), 1)
	if v := l.read(pos+g, 1)[0]; v == 0 {
		t.Fatal("new memory is zero")
	}
	l.want(ok, "cuMemMap", pos+2*g, g, 0, other, 0)
	l.want(ok, "cuMemSetAccess", pos+2*g, g, access.at(), 1)
	l.want(ok, "cuMemsetD8_v2", pos, 5, 3*g) // across both
	l.want(invalidValue, "cuMemsetD8_v2", pos, 5, 3*g+1)
	l.want(invalidValue, "cuMemHostRegister_v2", pos+8*g, g, 3)
	l.want(ok, "cuMemRelease", h)
	l.want(ok, "cuMemRelease", other)
	l.want(invalidValue, "cuMemRelease", other)
	// An export is the memory, over two mappings; what has none cannot be exported.
	fd := l.slot()
	l.want(invalidValue, "cuMemGetHandleForAddressRange", fd.at(), pos, 4*g, 1, 0)
	l.want(ok, "cuMemGetHandleForAddressRange", fd.at(), pos+g, 2*g, 1, 0)
	m, err := syscall.Mmap(int(fd.i32()), 0, 2*g, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_SHARED)
	require.NoError(t, err)
	m[g] = 99
	if v := l.read(pos+2*g, 1)[0]; byte(v) != 99 || m[g-1] != 5 {
		t.Fatalf("%#x after a write through the export", v)
	}
	require.NoError(t, syscall.Munmap(m))
	require.NoError(t, syscall.Close(int(fd.i32())))
	l.want(invalidValue, "cuMemUnmap", pos, g) // a part
	l.want(invalidValue, "cuMemUnmap", pos+g, 2*g)
	l.want(ok, "cuMemUnmap", pos, 2*g)
	l.want(invalidValue, "cuMemAddressFree", pos, 1<<40) // with memory
	if v := l.control("violations"); !strings.Contains(v, "freed with memory mapped") {
		t.Fatalf("violations: %q", v)
	}
	if live := l.control("live"); !strings.Contains(live, " reserved=1 physical=1 ") {
		t.Fatal(live)
	}
	// A kernel finds nothing where nothing is, and the memory that is left is good up to then.
	l.launch(ok, l.kernel("conf_affine"), 1, 32, 0, uint64(pos+2*g), g/8, 2, 1)
	l.want(ok, "cuCtxSynchronize")
	l.launch(ok, l.kernel("conf_affine"), 1, 32, 0, uint64(pos), 1, 2, 1)
	l.want(illegalAddress, "cuCtxSynchronize")
	l.want(ok, "cuMemUnmap", pos+2*g, g)
	l.want(invalidValue, "cuMemAddressFree", pos, g)
	l.want(ok, "cuMemAddressFree", pos, 1<<40)
	if live := l.control("live"); !strings.Contains(live, " reserved=0 physical=0 ") {
		t.Fatal(live)
	}
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
	l.control("reset,vmm=0")
	l.want(ok, "cuInit", 0)
	l.want(notSupported, "cuMemAddressReserve", out.at(), g, 0, 0, 0)
}

// Nodes run after those that they name and otherwise in any order; what they get is what was given
// last before the launch.
func TestGraphs(t *testing.T) {
	l := started(t, "")
	f, p := l.kernel("conf_affine"), l.alloc(8)
	l.want(ok, "cuMemsetD8_v2", p, 0, 8)
	node := func(mul, add uint64) slot { // CUDA_KERNEL_NODE_PARAMS_v2
		b, words, hx, list := l.space(72), l.space(32), l.space(16), l.space(16)
		for i, w := range []uint64{uint64(p), 1, mul, add} {
			binary.NativeEndian.PutUint64(words.b[8*i:], w)
		}
		binary.NativeEndian.PutUint64(list.b, uint64(words.at()))
		binary.NativeEndian.PutUint64(list.b[8:], uint64(hx.at()))
		binary.NativeEndian.PutUint64(b.b, uint64(f))
		put(b.b[8:], 1, 1, 1, 32, 1, 1, 0)
		binary.NativeEndian.PutUint64(b.b[40:], uint64(list.at()))
		return b
	}
	graph, a, b, c, x := l.slot(), l.slot(), l.slot(), l.slot(), l.slot()
	l.want(ok, "cuGraphCreate", graph.at(), 0)
	// no graph
	l.want(invalidValue, "cuGraphAddKernelNode_v2", a.at(), graph.at(), 0, 0, node(1, 1).at())
	bad := node(1, 1)
	put(bad.b[20:], 2000) // threads
	l.want(invalidValue, "cuGraphAddKernelNode_v2", a.at(), graph.get(), 0, 0, bad.at())
	l.want(ok, "cuGraphAddKernelNode_v2", a.at(), graph.get(), 0, 0, node(1, 1).at())
	l.want(ok, "cuGraphAddKernelNode_v2", b.at(), graph.get(), a.at(), 1, node(2, 0).at())
	// forgets that it comes last
	l.want(ok, "cuGraphAddKernelNode_v2", c.at(), graph.get(), 0, 0, node(10, 3).at())
	l.want(ok, "cuGraphInstantiateWithFlags", x.at(), graph.get(), 0)
	s := l.stream()
	l.want(ok, "cuGraphLaunch", x.get(), s)
	// of later launches
	l.want(ok, "cuGraphExecKernelNodeSetParams_v2", x.get(), a.get(), node(1, 7).at())
	l.want(ok, "cuStreamSynchronize", s)
	if v := l.read(p, 1)[0]; v != ((0*10+3)+1)*2 {
		t.Fatalf("%d", v)
	}
	l.want(ok, "cuGraphLaunch", x.get(), s)
	l.want(ok, "cuStreamSynchronize", s)
	if v := l.read(p, 1)[0]; v != ((8*10+3)+7)*2 {
		t.Fatalf("%d", v)
	}
	l.want(invalidValue, "cuGraphExecKernelNodeSetParams_v2", x.get(), x.get(), node(1, 7).at())
	l.want(invalidValue, "cuGraphLaunch", graph.get(), s)
	l.want(ok, "cuGraphExecDestroy", x.get())
	l.want(invalidValue, "cuGraphLaunch", x.get(), s)
	l.want(ok, "cuGraphDestroy", graph.get())
	l.want(invalidValue, "cuGraphDestroy", graph.get())
	if live := l.control("live"); !strings.HasSuffix(live, " graphs=0") {
		t.Fatal(live)
	}
	l.want(ok, "cuDevicePrimaryCtxRelease_v2", 0)
}

// Two builds at one time give one library, and another set of missing symbols another one.
func TestBuildIsShared(t *testing.T) {
	a := fakecuda.Build(t)
	var b, c string
	var wg sync.WaitGroup
	wg.Go(func() { b = fakecuda.Build(t) })
	wg.Go(func() { c = fakecuda.Build(t, fakecuda.Missing("cuGreenCtxCreate")) })
	wg.Wait()
	if a != b || a == c {
		t.Fatalf("%s, %s, %s", a, b, c)
	}
}

// The declarations in src/ are NVIDIA's, where their header is (tools/cudatools.sh).
func TestHeaders(t *testing.T) {
	tools := os.Getenv("HELIOS_CUDA_TOOLS")
	if tools == "" {
		t.Skip("HELIOS_CUDA_TOOLS does not name a folder with include/cuda.h")
	}
	cxx := os.Getenv("CXX")
	if cxx == "" {
		cxx = "g++"
	}
	for _, src := range []string{"check.cc", "core.cc", "graph.cc", "mem.cc", "module.cc",
		"stream.cc", "vmm.cc"} {
		cmd := exec.Command(cxx, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
			"-DHX_CUDA_H", "-DHX_SHIM",
			"-isystem", filepath.Join(tools, "include"), "-I", "../../../cuda/kernels", "-I", "../shim",
			filepath.Join("src", src))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", src, err, out)
		}
	}
}

// module finds a module of the binary.
func module(name string) (m kernels.Module, err error) {
	all, err := kernels.Modules()
	for _, x := range all {
		if x.Name == name {
			m = x
		}
	}
	return m, err
}
