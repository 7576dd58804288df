//go:build linux && (amd64 || arm64) && !nocuda && !gorgonia

package driver

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/kernels"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/probe"
	"helios/internal/testing/fakecuda"
)

// The tests of one process share a fake library, so they run one after another.
func fake(t *testing.T, knobs string) string {
	t.Helper()
	lib := fakecuda.Build(t)
	fakecuda.Control(t, lib, "reset,sms=4,mem=67108864,"+knobs)
	return lib
}

// device opens the fake and wants nothing left in it in the end.
func device(t *testing.T, knobs string, opt Options) (*Device, string) {
	t.Helper()
	lib := fake(t, knobs)
	opt.Library = lib
	d, err := Open(opt)
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = d.Close() // what it says is the tests' matter
		if t.Failed() {
			return
		}
		if live := fakecuda.Control(t, lib, "live"); !strings.HasPrefix(live, "contexts=0 ") ||
			!strings.Contains(live, "registered=0 ") {
			t.Errorf("left in the driver: %s", live)
		}
		if v := fakecuda.Control(t, lib, "violations"); v != "" {
			t.Errorf("rules broken: %s", v)
		}
		if u := hostmem.Usage(); len(u) != 0 {
			t.Errorf("CPU memory left: %v", u)
		}
	})
	return d, lib
}

func refused(t *testing.T, err error, words ...string) {
	t.Helper()
	require.Error(t, err)
	require.Equal(t, errs.Capability, errs.ClassOf(err), err.Error())
	for _, w := range words {
		require.ErrorContains(t, err, w)
	}
}

func soon(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

const patience = 20 * time.Second

// The suite's kernels, whose parameters are private there.
type affine struct {
	Dst cuda.DevicePtr
	N   int64
	Mul uint64
	Add uint64
}

type gate struct {
	Gate, Arrived, Left, Late cuda.DevicePtr
	Step                      uint64
	LimitNS                   int64
	Yield                     uint32
	_                         uint32
}

type failing struct {
	Ran cuda.DevicePtr
	At  int64
}

func kernelOf(t *testing.T, d *Device, name string) cuda.Kernel {
	t.Helper()
	k, err := d.Kernel(name)
	require.NoError(t, err)
	return k
}

func streamOf(t *testing.T, d *Device, opt cuda.StreamOptions) *gpuStream {
	t.Helper()
	s, err := d.NewStream(opt)
	require.NoError(t, err)
	return s.(*gpuStream)
}

// held starts a kernel that runs until the returned function is called.
func held(t *testing.T, d *Device, s cuda.Stream) (open func(), words cuda.Buffer) {
	t.Helper()
	b, err := d.Alloc(cuda.MemPinned, 32, "gate")
	require.NoError(t, err)
	w := hostmem.View[uint64](b.Bytes())
	p := gate{Gate: b.Ptr(), Arrived: b.Ptr() + 8, Left: b.Ptr() + 16, Late: b.Ptr() + 24,
		LimitNS: int64(patience), Yield: 1}
	require.NoError(t, cuda.Launch(s, kernelOf(t, d, "conf_gate"), cuda.LaunchConfig{Blocks: 1,
		Threads: 32}, p))
	for end := time.Now().Add(patience); atomic.LoadUint64(&w[1]) == 0; {
		require.True(t, time.Now().Before(end), "the kernel does not start")
		time.Sleep(50 * time.Microsecond)
	}
	return func() { atomic.StoreUint64(&w[0], 1) }, b
}

func TestNoLibrary(t *testing.T) {
	_, err := Open(Options{Library: "libcuda-that-is-not-there.so"})
	refused(t, err, "no CUDA driver", "libcuda-that-is-not-there.so", "install")
	_, err = Probe(Options{Library: "libcuda-that-is-not-there.so"})
	refused(t, err, "no CUDA driver")
	t.Setenv(EnvLibrary, "libm.so.6") // a library, and not this one
	_, err = Open(Options{})
	refused(t, err, "libm.so.6 lacks cuInit", "install driver")
}

func TestMissingSymbols(t *testing.T) {
	_, err := Open(Options{Library: fakecuda.Build(t, fakecuda.Missing("cuMemAlloc_v2"))})
	refused(t, err, "lacks cuMemAlloc_v2;", "too old")

	// Without the optional ones the device works, and can less.
	gone := []string{"cuGreenCtxCreate", "cuFuncGetParamInfo", "cuMemGetHandleForAddressRange"}
	lib := fakecuda.Build(t, fakecuda.Missing(gone...))
	fakecuda.Control(t, lib, "reset,sms=16,cc=9.0")
	rep, err := Probe(Options{Library: lib})
	require.NoError(t, err)
	require.ElementsMatch(t, gone, rep.Symbols)
	for _, f := range rep.GPUs[0].Findings {
		if f.Name == "SM budgets" || f.Name == "dma-buf export" {
			require.Equal(t, probe.NotThere, f.Answer)
			require.NotEmpty(t, f.Next)
		}
	}
	d, err := Open(Options{Library: lib})
	require.NoError(t, err)
	require.False(t, d.Capabilities().GreenContexts)
	require.False(t, d.Capabilities().DMABuf)
	s := streamOf(t, d, cuda.StreamOptions{Name: "budget", SMs: 8})
	require.Equal(t, 16, s.SMs())
	b, err := d.Alloc(cuda.MemDevice, 80, "rows")
	require.NoError(t, err)
	require.NoError(t, cuda.Launch(s, kernelOf(t, d, "conf_affine"), cuda.LaunchConfig{Blocks: 1,
		Threads: 32}, affine{b.Ptr(), 10, 1, 1}))
	require.NoError(t, s.Synchronize(soon(t, patience)))
	_, err = d.MapPeer(b, peerDMABuf)
	refused(t, err, "exports no dma-buf")
	require.NoError(t, errors.Join(s.Close(), b.Free(), d.Close()))
}

func TestWhichDevice(t *testing.T) {
	lib := fake(t, "devices=3")
	for _, i := range []int{-1, 3, 99} {
		_, err := Open(Options{Library: lib, Index: i})
		refused(t, err, "no CUDA device", "this machine has 3, cuda:0 to cuda:2")
	}
	d, err := Open(Options{Library: lib, Index: 2})
	require.NoError(t, err)
	require.Contains(t, d.Info().Name, "cuda:2")
	require.NoError(t, d.Close())
	lib = fake(t, "devices=0")
	_, err = Open(Options{Library: lib})
	refused(t, err, "finds no GPU", "CUDA_VISIBLE_DEVICES")
	lib = fake(t, "init=803")
	_, err = Open(Options{Library: lib})
	refused(t, err, "does not start", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "reboot")
}

// other answers some attributes as another GPU would.
type other struct {
	api
	attr map[attribute]int
}

func (o *other) DeviceGetAttribute(a attribute, d ordinal) (int, result) {
	if v, ok := o.attr[a]; ok {
		return v, success
	}
	return o.api.DeviceGetAttribute(a, d)
}

func TestUnusableGPU(t *testing.T) {
	lib := fake(t, "cc=6.1")
	_, err := Open(Options{Library: lib})
	refused(t, err, "too old", "compute capability 6.1", "needs 7.0", "option device host")
	lib = fake(t, "driver=12010")
	_, err = Open(Options{Library: lib})
	refused(t, err, "driver is too old", "supports CUDA 12.1", "PTX 8.2", "535 (CUDA 12.2)")
	lib = fake(t, "")
	list, err := kernels.Modules()
	require.NoError(t, err)
	for attr, words := range map[attribute][]string{
		attrUnifiedAddressing: {"one address space"},
		attrHostPointer:       {"CPU addresses"}, attrCanMapHost: {"mapped"},
		attrComputeMode: {"prohibited", "nvidia-smi -c 0"},
	} {
		a, err := openLibrary(lib)
		require.NoError(t, err)
		v := 0
		if attr == attrComputeMode {
			v = 2
		}
		_, err = open(&other{a, map[attribute]int{attr: v}}, Options{}, list)
		refused(t, err, words...)
	}
}

// Under confidential computing a GPU has no memory of ours: the error names that and the next step,
// also where no attribute says so.
func TestConfidentialComputing(t *testing.T) {
	for _, how := range []string{"1", "2"} {
		d, err := Open(Options{Library: fake(t, "confidential="+how)})
		if err == nil {
			_, err = d.NewStream(cuda.StreamOptions{})
			refused(t, err, "confidential computing is on")
			_, err = d.Alloc(cuda.MemPinned, 4096, "rows")
			require.NoError(t, d.Close())
		}
		refused(t, err, "Fake GPU", "registered CPU memory", "confidential computing is on",
			"nvidia-smi conf-compute -f", "set-cc-mode", "device host")
		if how == "2" {
			require.ErrorContains(t, err, "CUDA_ERROR_NOT_SUPPORTED")
		}
	}
}

// Budgets of SMs need streams of green contexts, which came with CUDA 12.5.
func TestBudgetsByDriver(t *testing.T) {
	for driver, budgets := range map[string]bool{"12040": false, "12050": true} {
		rep, err := Probe(Options{Library: fake(t, "sms=16,driver="+driver)})
		require.NoError(t, err)
		require.Equal(t, budgets, rep.GPUs[0].Capabilities.GreenContexts, driver)
		for _, f := range rep.GPUs[0].Findings {
			if f.Name == "SM budgets" && !budgets {
				require.Equal(t, "NVIDIA's driver 555 (CUDA 12.5) or later", f.Next)
			}
		}
	}
}

// A module that the driver's compiler refuses is an error with what it said, and others still load.
func TestBadPTX(t *testing.T) {
	lib := fake(t, "")
	list, err := kernels.Modules()
	require.NoError(t, err)
	i := -1
	for j := range list {
		if list[j].Name == "conf" {
			i = j
		}
	}
	require.GreaterOrEqual(t, i, 0)
	openWith := func(change func(m *kernels.Module)) *Device {
		t.Helper()
		changed := append([]kernels.Module(nil), list...)
		changed[i].Kernels = append([]kernels.Kernel(nil), changed[i].Kernels...)
		change(&changed[i])
		a, err := openLibrary(lib)
		require.NoError(t, err)
		d, err := open(a, Options{}, changed)
		require.NoError(t, err)
		return d
	}
	d := openWith(
		func(m *kernels.Module) { m.PTX = strings.Replace(m.PTX, ".version", ".verzion", 1) })
	_, err = d.Kernel("conf_affine")
	refused(t, err, "PTX of module conf does not load", "CUDA_ERROR_INVALID_PTX (218)",
		"the driver's compiler says: ")
	_, said, _ := strings.Cut(err.Error(), "the driver's compiler says: ")
	require.Contains(t, said, ".version", "no log: %v", err)
	kernelOf(t, d, "gather")
	_, err = d.Kernel("conf_afine")
	refused(t, err, `no CUDA kernel "conf_afine"`, "gather")
	require.NoError(t, d.Close())

	// The table is wrong about what a kernel takes: no launch may read past a parameter block.
	d = openWith(func(m *kernels.Module) {
		for k := range m.Kernels {
			m.Kernels[k].ParamBytes += 8
		}
	})
	_, err = d.Kernel("conf_affine")
	require.ErrorContains(t, err,
		"the driver finds 32 bytes in parameter 0, and the table of kernels says 40")
	require.NoError(t, d.Close())

	// The version passes our look and is too new for the driver's compiler.
	d = openWith(
		func(
			m *kernels.Module) {
			m.PTX = strings.Replace(m.PTX, ".version 8.2", ".version 9.9", 1)
		})
	_, err = d.Kernel("conf_affine")
	refused(t, err, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)", "update NVIDIA's driver")
	require.NoError(t, d.Close())
}

// The GPU chooses the machine code, and everything that keeps it from loading leads to the PTX.
func TestCubinsByGPU(t *testing.T) {
	runs := func(t *testing.T, d *Device) {
		t.Helper()
		b, err := d.Alloc(cuda.MemPinned, 64*8, "words")
		require.NoError(t, err)
		s := streamOf(t, d, cuda.StreamOptions{Name: "s", SMs: 2}) // which takes a library
		require.NoError(t, cuda.Launch(s, kernelOf(t, d, "conf_affine"),
			cuda.LaunchConfig{Blocks: 1, Threads: 32}, affine{Dst: b.Ptr(), N: 64, Add: 7}))
		require.NoError(t, s.Synchronize(soon(t, patience)))
		require.Equal(t, uint64(7), hostmem.View[uint64](b.Bytes())[63])
		require.NoError(t, s.Close())
		require.NoError(t, b.Free())
		kernelOf(t, d, "gather")
	}
	const binaryVersion, ptxVersion funcAttribute = 6, 5
	for _, c := range []struct {
		name, knobs, force string
		opt                Options
		binary             int // architecture of conf_affine's code
		code               string
	}{
		{"A100", "cc=8.0", "", Options{}, 80, "cubin sm_80"},
		{"L40", "cc=8.9", "", Options{}, 80, "cubin sm_80"},
		{"H100", "cc=9.0", "", Options{}, 90, "cubin sm_90"},
		{"H100, not forced", "cc=9.0", "0", Options{}, 90, "cubin sm_90"},
		{"B200", "cc=10.0", "", Options{}, 100, "cubin sm_100"},
		{"V100", "cc=7.0", "", Options{}, 70, "PTX, no cubins for compute capability 7.0"},
		{"Orin", "cc=8.7", "", Options{}, 87, "PTX, no cubins for compute capability 8.7"},
		{"newer", "cc=12.0", "", Options{}, 120, "PTX, no cubins for compute capability 12.0"},
		{"by the environment", "cc=9.0", "1", Options{}, 90, "PTX, CUDA_FORCE_PTX_JIT=1"},
		{"by option", "cc=9.0", "", Options{PTX: true}, 90, "PTX, which the caller asked for"},
		{"refused", "cc=9.0,fail=cuModuleLoadDataEx:1:209", "", Options{}, 90,
			"cubin sm_90; PTX of conf: cuModuleLoadDataEx: CUDA_ERROR_NO_BINARY_FOR_GPU (209)"},
		{"corrupt", "cc=9.0,fail=cuModuleLoadDataEx:1:200", "", Options{}, 90,
			"cubin sm_90; PTX of conf: cuModuleLoadDataEx: CUDA_ERROR_INVALID_IMAGE (200)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv(envForcePTX, c.force)
			d, lib := device(t, c.knobs, c.opt)
			runs(t, d)
			code := d.Info().Code
			if strings.Contains(c.code, ";") {
				code = code[:min(len(code), len(c.code))] // the driver's words follow
			}
			require.Equal(t, c.code, code)
			require.Equal(t, "ptx", d.Info().Kernels)
			k := kernelOf(t, d, "conf_affine").(*kernel)
			require.NoError(t, d.enter())
			got, r := d.api.FuncGetAttribute(binaryVersion, k.fn)
			from, r2 := d.api.FuncGetAttribute(ptxVersion, k.fn)
			d.leave()
			require.Equal(t, success, max(r, r2))
			require.Equal(t, c.binary, got)
			if strings.Contains(c.code, "PTX") {
				require.Equal(t, 70, from) // of the text
			} else {
				require.Equal(t, c.binary, from)
			}
			rep, err := Probe(Options{Library: lib})
			require.NoError(t, err)
			var f probe.Finding
			for _, x := range rep.GPUs[0].Findings {
				if x.Name == "machine code" {
					f = x
				}
			}
			arch, ok := strings.CutPrefix(c.code, "cubin ")
			arch, _, _ = strings.Cut(arch, ";")
			switch {
			case ok:
				require.Equal(t, probe.There, f.Answer)
				require.Contains(t, f.Detail, arch)
			case c.opt.PTX: // a matter of the device that was opened
				require.Equal(t, probe.There, f.Answer)
			default:
				require.Equal(t, probe.NotThere, f.Answer)
				require.Contains(t, f.Detail, strings.TrimPrefix(c.code, "PTX, "))
			}
		})
	}

	// All modules that fall back are counted, and a lost context is no reason to go on.
	d, lib := device(t, "cc=8.0", Options{})
	for i, name := range []string{"conf_affine", "gather", "submit", "complete"} {
		fakecuda.Control(t, lib, "fail=cuModuleLoadDataEx:1:209")
		kernelOf(t, d, name)
		require.Len(t, d.modules.fell, i+1)
	}
	require.Contains(t, d.Info().Code, "cubin sm_80; PTX of 4 modules: ")
	fakecuda.Control(t, lib, "fail=cuModuleLoadDataEx:1:719")
	_, err := d.Kernel("lookup")
	var lost *LostError
	require.ErrorAs(t, err, &lost)
	require.NotContains(t, d.Info().Code, "5 modules")
}

func TestLaunchChecks(t *testing.T) {
	d, lib := device(t, "devices=2", Options{})
	s := streamOf(t, d, cuda.StreamOptions{Name: "checks"})
	k := kernelOf(t, d, "conf_affine")
	for _, c := range []cuda.LaunchConfig{{Blocks: 0, Threads: 32}, {Blocks: -1, Threads: 32},
		{Blocks: 1 << 31, Threads: 32}, {Blocks: 1, Threads: 0}, {Blocks: 1, Threads: 1025}} {
		err := cuda.Launch(s, k, c, affine{})
		require.ErrorContains(t, err, "want 1 or more blocks of 1 to 1024 threads")
		require.ErrorContains(t, err, `kernel "conf_affine"`)
	}
	require.ErrorContains(t, cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 1, Threads: 32},
		struct{ A, B uint64 }{}), "16 bytes, the kernel's has 32")
	require.ErrorContains(t, s.LaunchRaw(k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, nil, 32),
		"no parameters")
	two, err := Open(Options{Library: lib, Index: 1})
	require.NoError(t, err)
	require.ErrorContains(t, cuda.Launch(s, kernelOf(t, two, "conf_affine"),
		cuda.LaunchConfig{Blocks: 1, Threads: 32}, affine{}), "not of this device")
	e, err := two.NewEvent()
	require.NoError(t, err)
	require.ErrorContains(t, s.Record(e), "not of this device")
	require.ErrorContains(t, s.Wait(e), "not of this device")
	require.NoError(t, two.Close())
	require.NoError(t, s.Close())
}

// Calls that fail are errors of the caller, which leave nothing behind and harm nothing.
func TestFailingCalls(t *testing.T) {
	d, lib := device(t, "", Options{})
	before := fakecuda.Control(t, lib, "live")
	for _, c := range []struct {
		call string
		code string
		kind cuda.MemKind
	}{
		{"cuMemAlloc_v2", "304", cuda.MemDevice}, {"cuMemsetD8Async", "1", cuda.MemDevice},
		{"cuMemHostRegister_v2", "2", cuda.MemPinned}, {"cuMemHostRegister_v2", "304",
			cuda.MemPinned}, {"cuMemHostGetDevicePointer_v2", "1", cuda.MemPinned},
	} {
		fakecuda.Control(t, lib, "fail="+c.call+":1:"+c.code)
		_, err := d.Alloc(c.kind, 100_000, "rows")
		require.ErrorContains(t, err, "allocate rows")
		require.ErrorContains(t, err, c.call)
		require.Empty(t, d.MemUsage())
		require.Equal(t, before, fakecuda.Control(t, lib, "live"), c.call)
	}
	fakecuda.Control(t, lib, "fail=cuMemAlloc_v2:1:2")
	_, err := d.Alloc(cuda.MemDevice, 1<<20, "rows")
	var oom *cuda.OutOfMemoryError
	require.ErrorAs(t, err, &oom)
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.Less(t, oom.Free, oom.Want)

	for _, call := range []string{"cuStreamCreateWithPriority", "cuMemcpyAsync"} {
		fakecuda.Control(t, lib, "fail="+call+":1:304")
		_, err := d.NewStream(cuda.StreamOptions{Name: "unlucky"})
		require.ErrorContains(t, err, `stream "unlucky"`)
		require.ErrorContains(t, err, call)
	}
	s := streamOf(t, d, cuda.StreamOptions{Name: "lucky"})
	k := kernelOf(t, d, "conf_affine")
	one := cuda.LaunchConfig{Blocks: 1, Threads: 32}
	fakecuda.Control(t, lib, "fail=cuLaunchKernel:1:701")
	require.ErrorContains(t, cuda.Launch(s, k, one, affine{}),
		"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)")
	require.NoError(t, cuda.Launch(s, k, one, affine{}))
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.NoError(t, s.Close())
}

// A crash takes the context along; every later call says so, and names the kernel.
func TestLostContext(t *testing.T) {
	d, lib := device(t, "", Options{})
	s, idle := streamOf(t, d, cuda.StreamOptions{Name: "doomed"}),
		streamOf(t, d, cuda.StreamOptions{Name: "idle"})
	b, err := d.Alloc(cuda.MemDevice, 80, "rows")
	require.NoError(t, err)
	k := kernelOf(t, d, "conf_affine")
	fakecuda.Control(t, lib, "crash=1:719")
	err = cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, affine{b.Ptr(), 10, 1, 1})
	if err == nil {
		err = s.Synchronize(soon(t, patience))
	}
	var lost *LostError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.Equal(t, 719, lost.Cause.Code)
	require.Equal(t, []string{`kernel "conf_affine" on stream "doomed"`}, lost.Running)
	_, e1 := d.Alloc(cuda.MemDevice, 1, "more")
	_, e2 := d.NewStream(cuda.StreamOptions{})
	_, e3 := d.NewEvent()
	for i, err := range []error{e1, e2, e3, idle.Fill(b.Ptr(), 0, 8),
		idle.Synchronize(soon(t, patience))} {
		require.ErrorAs(t, err, &lost, "call %d", i)
	}
	require.NoError(t, b.Free()) // it is given back as far as it can be
	require.Empty(t, d.MemUsage())
	require.NoError(t, idle.Close())
	require.ErrorAs(t, d.Close(), &lost)
	require.NoError(t, d.Close())
}

// A stream takes a bounded amount of work, and its error names the kernel that holds it.
func TestFullStream(t *testing.T) {
	d, _ := device(t, "", Options{QueueTimeout: 50 * time.Millisecond})
	s := streamOf(t, d, cuda.StreamOptions{Name: "narrow"})
	open, words := held(t, d, s)
	k := kernelOf(t, d, "conf_affine")
	var err error
	n := 0
	for ; err == nil && n < 10*inFlight; n++ {
		err = cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, affine{Mul: 1})
	}
	require.ErrorContains(t, err, "has been full for 50ms while it runs kernel \"conf_gate\"")
	require.Equal(t, inFlight, n) // the gate is one of them
	require.Zero(t, s.Busy())
	open()
	require.NoError(t, s.Synchronize(soon(t, patience)))
	for range 10 * markEvery * inFlight { // copies, too, are bounded: no call blocks in the driver
		require.NoError(t, s.Copy(words.Ptr()+8, words.Ptr()+16, 8))
	}
	require.NoError(t, s.Close())
	require.NoError(t, words.Free())
}

// Nothing pulls memory from under a kernel that does not end.
func TestCloseWithRunningKernel(t *testing.T) {
	lib := fake(t, "")
	d, err := Open(Options{Library: lib, CloseTimeout: 30 * time.Millisecond})
	require.NoError(t, err)
	s := streamOf(t, d, cuda.StreamOptions{Name: "endless"})
	open, words := held(t, d, s)
	require.ErrorContains(t, s.Close(), `still runs kernel "conf_gate" after 30ms`)
	err = d.Close()
	require.ErrorContains(t, err, `stream "endless" still runs kernel "conf_gate"`)
	require.NotNil(t, words.Bytes(), "the kernel's memory is gone")
	open()
	// The context stays, for the kernel ran in it; only the process's end gives it back.
	require.Contains(t, fakecuda.Control(t, lib, "live"), "contexts=1 ")
	w := hostmem.View[uint64](words.Bytes())
	for end := time.Now().Add(patience); atomic.LoadUint64(&w[2]) == 0; {
		require.True(t, time.Now().Before(end), "the kernel does not end")
		time.Sleep(100 * time.Microsecond)
	}
	require.Zero(t, w[3], "the kernel ran into its limit")
	d.api.DevicePrimaryCtxRelease(d.ord)
	require.NoError(t, words.Free())
	require.NoError(t, hostmem.Free(d.faults.slabs[0].host))
}

// Budgets are disjoint as long as there are SMs, and shared evenly after that.
func TestBudgetsAreDisjoint(t *testing.T) {
	d, _ := device(t, "sms=34,cc=9.0", Options{})
	require.Equal(t, 8, d.Capabilities().SMGranularity)
	a := streamOf(t, d, cuda.StreamOptions{Name: "a", SMs: 23}) // two groups of eight fit
	b := streamOf(t, d, cuda.StreamOptions{Name: "b", SMs: 3})  // one is the least
	c := streamOf(t, d, cuda.StreamOptions{Name: "c", SMs: 8})
	require.Equal(t, []int{16, 8, 8}, []int{a.SMs(), b.SMs(), c.SMs()})
	used := map[int]int{}
	for _, s := range []*gpuStream{a, b, c} {
		for _, g := range s.green.groups {
			used[g]++
		}
	}
	require.Equal(t, map[int]int{0: 1, 1: 1, 2: 1, 3: 1}, used)
	require.NoError(t, b.Close())
	e := streamOf(t, d, cuda.StreamOptions{Name: "e", SMs: 8})
	require.Equal(t, 2, e.green.groups[0], "the group that b gave back")
	// An event outlives the stream of a budget that it was made on.
	ev, err := d.NewEvent()
	require.NoError(t, err)
	require.NoError(t, e.Record(ev))
	require.NoError(t, e.Close())
	require.NoError(t, ev.Synchronize(soon(t, patience)))
	require.True(t, ev.Done())
	require.NoError(t, ev.Close())
	whole := streamOf(t, d, cuda.StreamOptions{Name: "whole", SMs: 34})
	require.Equal(t, 34, whole.SMs())
	require.NoError(t, errors.Join(a.Close(), c.Close(), whole.Close()))
}

// Launches that follow each other cost an event each, and an event that nobody takes the time of
// has none. A copy or a pause between two launches is an event more.
func TestCallsOfLaunches(t *testing.T) {
	d, lib := device(t, "", Options{})
	k := kernelOf(t, d, "conf_affine")
	b, err := d.Alloc(cuda.MemPinned, 64, "words")
	require.NoError(t, err)
	calls := func(name string) int {
		n, err := strconv.Atoi(strings.TrimSpace(fakecuda.Control(t, lib, "calls="+name)))
		require.NoError(t, err)
		return n
	}
	const launches = 12
	run := func(s *gpuStream, together time.Duration, between func()) (records, elapsed int) {
		d.soon = together
		records, elapsed = calls("cuEventRecord"), calls("cuEventElapsedTime")
		for range launches {
			require.NoError(t, cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 1, Threads: 32},
				affine{}))
			between()
		}
		records = calls("cuEventRecord") - records
		require.NoError(t, s.Synchronize(soon(t, patience)))
		return records, calls("cuEventElapsedTime") - elapsed
	}
	for _, untimed := range []bool{false, true} {
		s := streamOf(t, d, cuda.StreamOptions{Untimed: untimed})
		times := launches
		if untimed {
			times = 0
		}
		records, elapsed := run(s, time.Hour, func() {})
		require.Equal(t, []int{launches + 1, times}, []int{records, elapsed})
		records, elapsed = run(s, time.Hour, func() { require.NoError(t, s.Fill(b.Ptr(), 0, 64)) })
		require.Equal(t, []int{2*launches - 1, times}, []int{records, elapsed}, "copies")
		records, elapsed = run(s, 0, func() {})
		require.Equal(t, []int{2 * launches, times}, []int{records, elapsed}, "pauses")
		require.Equal(t, untimed, s.Busy() == 0)
		require.NoError(t, s.Close())
	}
	e, err := d.NewEvent()
	require.NoError(t, err)
	require.NoError(t, errors.Join(e.Close(), b.Free()))
	require.Empty(t, fakecuda.Control(t, lib, "violations"))
}

// A launch behind a wait for another stream begins when that has happened, however soon it follows
// one before the wait: Busy holds none of the wait.
func TestLaunchBehindWait(t *testing.T) {
	d, _ := device(t, "", Options{})
	s, other := streamOf(t, d, cuda.StreamOptions{}), streamOf(t, d, cuda.StreamOptions{})
	run := func() {
		require.NoError(t, cuda.Launch(s, kernelOf(t, d, "conf_affine"),
			cuda.LaunchConfig{Blocks: 1, Threads: 32}, affine{}))
	}
	e, err := d.NewEvent()
	require.NoError(t, err)
	open, words := held(t, d, other)
	require.NoError(t, other.Record(e))
	d.soon = time.Hour
	run()
	require.NoError(t, s.Wait(e))
	run()
	const wait = 200 * time.Millisecond
	time.Sleep(wait)
	open()
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.Less(t, s.Busy(), wait)
	require.NoError(t, errors.Join(other.Synchronize(soon(t, patience)), e.Close(), words.Free(),
		s.Close(), other.Close()))
}

// A green context has no lock of its own: one thread at a time may use its streams and events. The
// fake complains of two (device looks at the end).
func TestGreenContextsOneThreadAtATime(t *testing.T) {
	d, lib := device(t, "sms=32,sm_min=8,sm_step=8,green_us=50", Options{})
	var ss [3]*gpuStream
	var es [3]cuda.Event
	for i, sms := range []int{8, 8, 0} {
		ss[i] = streamOf(t, d, cuda.StreamOptions{Name: string(rune('a' + i)), SMs: sms})
		var err error
		es[i], err = d.NewTimer()
		require.NoError(t, err)
		require.NoError(t, ss[i].Record(es[i]))
	}
	require.NotNil(t, ss[0].green)
	require.NotSame(t, ss[0].green, ss[1].green)
	k := kernelOf(t, d, "conf_affine")
	b, err := d.Alloc(cuda.MemPinned, 4096, "words")
	require.NoError(t, err)
	const rounds = 40
	var all sync.WaitGroup
	work := func(f func(i int) error) {
		all.Go(func() {
			for i := range rounds {
				if err := f(i); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i, s := range ss {
		other := es[(i+1)%len(es)]
		work(func(int) error {
			return cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, affine{})
		})
		work(func(int) error { return errors.Join(s.Record(es[i]), s.Wait(other)) })
		work(func(int) error { return s.Fill(b.Ptr(), 1, 64) })
		work(func(int) error { es[i].Done(); s.Busy(); return nil })
		work(func(n int) error {
			if n%8 != 0 {
				return nil
			}
			return s.Synchronize(soon(t, patience))
		})
		work(func(int) error {
			if e, err := es[i].Since(other); err == nil && e > patience {
				return errors.New("events are far apart")
			}
			return nil
		})
	}
	all.Wait()
	for i := range ss {
		require.NoError(t, errors.Join(ss[i].Close(), es[i].Close()))
	}
	require.NoError(t, b.Free())
	require.Empty(t, fakecuda.Control(t, lib, "violations"))
}

// Buffers may share pages, lie in each other and end in any order.
func TestRegisteredPages(t *testing.T) {
	d, lib := device(t, "", Options{})
	mem, err := hostmem.Alloc(4*pageBytes, "shared pages")
	require.NoError(t, err)
	defer func() { require.NoError(t, hostmem.Free(mem)) }()
	reg := func(lo, hi int) cuda.Buffer {
		t.Helper()
		b, err := d.Register(mem[lo:hi], "part")
		require.NoError(t, err)
		require.Equal(t, uint64(uintptr(unsafe.Pointer(&mem[lo]))), uint64(b.Ptr()))
		return b
	}
	a, b := reg(100, 5000), reg(5000, 3*pageBytes+8)
	inside := reg(200, 300)
	require.Equal(t, int64(4900+3*pageBytes+8-5000), d.MemUsage()["part"])
	_, err = d.Register(mem[4900:5100], "across")
	require.ErrorContains(t, err, "overlaps")
	// A copy to and from the seam.
	s := streamOf(t, d, cuda.StreamOptions{Name: "seam"})
	for i := range mem {
		mem[i] = byte(i * 7)
	}
	dst, err := d.Alloc(cuda.MemPinned, 3*pageBytes, "copy")
	require.NoError(t, err)
	require.NoError(t, s.Copy(dst.Ptr(), b.Ptr(), b.Size()))
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.Equal(t, mem[5000:5000+int(b.Size())], dst.Bytes()[:b.Size()])
	require.NoError(t, a.Free())
	require.NoError(t, s.Fill(b.Ptr(), 3, b.Size())) // a's pages that b needs are still there
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.EqualValues(t, 3, mem[5000])
	require.NoError(t, errors.Join(inside.Free(), b.Free(), dst.Free(), s.Close()))
	require.Empty(t, d.MemUsage())
	require.NotContains(t, fakecuda.Control(t, lib, "live"), "registered=3")

	heap := make([]byte, 1<<16)
	_, err = d.Register(heap, "heap")
	require.ErrorContains(t, err, "Go's heap")
}

func TestIOMemoryAndExport(t *testing.T) {
	d, lib := device(t, "", Options{})
	mem, err := hostmem.Alloc(2*pageBytes, "doorbells")
	require.NoError(t, err)
	defer func() { require.NoError(t, hostmem.Free(mem)) }()
	b, err := d.RegisterIO(mem, "doorbells")
	require.NoError(t, err)
	require.NotZero(t, b.Ptr())
	again, err := d.RegisterIO(mem, "another reader's doorbells")
	require.NoError(t, err)
	require.Equal(t, b.Ptr(), again.Ptr())
	require.NoError(t, b.Free())
	_, err = d.RegisterIO(mem[:pageBytes], "a part")
	require.ErrorContains(t, err, "registered already")
	require.NoError(t, again.Free())
	_, err = d.RegisterIO(mem[8:100], "a part")
	require.ErrorContains(t, err, "whole pages")
	fakecuda.Control(t, lib, "iomem=0")
	_, err = d.RegisterIO(mem, "doorbells")
	refused(t, err, "CUDA_ERROR_NOT_PERMITTED (800)", "CAP_SYS_ADMIN", "PeerMappingOverride=1")
	fakecuda.Control(t, lib, "iomem=1")

	// Results that mean a lost context elsewhere do not here: the rung below takes over.
	for _, call := range []string{"cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"} {
		for _, code := range []string{"999", "304", "719", "46", "2"} {
			fakecuda.Control(t, lib, "fail="+call+":1:"+code)
			_, err = d.RegisterIO(mem, "doorbells")
			refused(t, err, "register I/O memory doorbells", call, "("+code+")", "CAP_SYS_ADMIN")
			b, err := d.Alloc(cuda.MemPinned, 4096, "bells")
			require.NoError(t, err, "the device goes on after %s from %s", code, call)
			require.NoError(t, b.Free())
		}
	}
	b, err = d.RegisterIO(mem, "doorbells")
	require.NoError(t, err, "nothing of them stayed registered")
	require.NoError(t, b.Free())

	pinned, err := d.Alloc(cuda.MemPinned, 5000, "staging")
	require.NoError(t, err)
	_, err = d.MapPeer(pinned, peerDMABuf)
	require.ErrorContains(t, err, "staging")
	require.NoError(t, pinned.Free())
}

// A context that is lost while I/O memory is registered is found out by asking it.
func TestIOMemoryOfLostContext(t *testing.T) {
	d, lib := device(t, "", Options{})
	mem, err := hostmem.Alloc(pageBytes, "doorbells")
	require.NoError(t, err)
	defer func() { require.NoError(t, hostmem.Free(mem)) }()
	fakecuda.Control(t, lib, "fail=cuMemHostRegister_v2:1:999,fail=cuStreamQuery:1:700")
	_, err = d.RegisterIO(mem, "doorbells")
	var lost *LostError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, "cuStreamQuery", lost.Cause.Call)
	require.Equal(t, errs.Device, errs.ClassOf(err))
	_, err = d.Alloc(cuda.MemPinned, 4096, "bells")
	require.Equal(t, errs.Device, errs.ClassOf(err))
}

// A failure reaches who waited for who waited for it.
func TestFailureTravelsOn(t *testing.T) {
	d, _ := device(t, "", Options{})
	var ss [4]*gpuStream
	for i := range ss {
		ss[i] = streamOf(t, d, cuda.StreamOptions{Name: string(rune('a' + i))})
	}
	e, err := d.NewEvent()
	require.NoError(t, err)
	open, words := held(t, d, ss[0])
	require.NoError(t, cuda.Launch(ss[0], kernelOf(t, d, "conf_fail"), cuda.LaunchConfig{Blocks: 2,
		Threads: 32}, failing{words.Ptr() + 8, 1}))
	for i := range 3 { // the event goes from hand to hand
		require.NoError(t, ss[i].Record(e))
		require.NoError(t, ss[i+1].Wait(e))
	}
	open()
	var ke *cuda.KernelError
	require.ErrorAs(t, ss[3].Synchronize(soon(t, patience)), &ke)
	require.Equal(t, "conf_fail", ke.Kernel)
	require.Equal(t, "a", ke.Stream)
	require.Equal(t, 1, ke.Block)
	for _, s := range ss[:3] {
		require.ErrorAs(t, s.Synchronize(soon(t, patience)), &ke)
	}
	for _, s := range ss {
		require.NoError(t, s.Close()) // it has been told
	}
	// Many waits without a look stay few recordings.
	x, y := streamOf(t, d, cuda.StreamOptions{Name: "x"}),
		streamOf(t, d, cuda.StreamOptions{Name: "y"})
	for range 20 * maxWaits {
		require.NoError(t, x.Record(e))
		require.NoError(t, y.Wait(e))
		require.NoError(t, y.Record(e))
		require.NoError(t, x.Wait(e))
	}
	require.LessOrEqual(t, len(x.waits), maxWaits)
	require.NoError(t, errors.Join(x.Synchronize(soon(t, patience)),
		y.Synchronize(soon(t, patience))))
	require.Empty(t, x.waits)
	require.NoError(t, errors.Join(x.Close(), y.Close(), e.Close(), words.Free()))
}

// A stream whose end no event can tell of is not taken for idle: its fault record would go to the
// next stream while a kernel writes to it.
func TestCloseWithoutEvents(t *testing.T) {
	d, lib := device(t, "", Options{CloseTimeout: 30 * time.Millisecond})
	s := streamOf(t, d, cuda.StreamOptions{Name: "busy"})
	open, words := held(t, d, s)
	fakecuda.Control(t, lib, "fail=cuEventRecord:1:304")
	require.ErrorContains(t, s.Close(), `still runs kernel "conf_gate" after 30ms`)
	open()
	fakecuda.Control(t, lib, "fail=cuEventRecord:1:304")
	d.opt.CloseTimeout = patience
	require.NoError(t, s.Close())
	require.NoError(t, words.Free())
}

// An error that a thread meets in the driver while it holds the table of memory does not wait for
// a Close that wants it.
func TestErrorMeetsClose(t *testing.T) {
	d, lib := device(t, "", Options{})
	fakecuda.Control(t, lib, "fail=cuMemHostRegister_v2:1:719")
	unlock := sync.OnceFunc(d.life.Unlock)
	d.life.Lock() // holds the allocation up before its call, with the table
	defer unlock()
	failed, closed := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := d.Alloc(cuda.MemPinned, 4096, "rows")
		failed <- err
	}()
	for end := time.Now().Add(patience); d.memMu.TryLock(); time.Sleep(50 * time.Microsecond) {
		d.memMu.Unlock()
		require.True(t, time.Now().Before(end), "the allocation does not get to the table")
	}
	go func() { closed <- d.Close() }()
	for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end) &&
		d.streamMu.TryLock(); time.Sleep(50 * time.Microsecond) {
		d.streamMu.Unlock() // a Close that takes the locks the other way round is there soon
	}
	unlock()
	for _, c := range []chan error{failed, closed} {
		select {
		case err := <-c:
			require.ErrorContains(t, err, "719")
		case <-time.After(patience):
			t.Fatal("deadlock")
		}
	}
}

// Calls for kernels, launches and memory while the device closes get an error, and no more.
func TestUseDuringClose(t *testing.T) {
	for range 20 {
		d, _ := device(t, "sm_min=2,sm_step=2,threads_per_sm=512", Options{})
		s := streamOf(t, d, cuda.StreamOptions{Name: "s", SMs: 2})
		k := kernelOf(t, d, "conf_affine")
		start := make(chan struct{})
		var wg sync.WaitGroup
		for _, f := range []func() error{
			func() error { _, err := d.Kernel("conf_gate"); return err },
			func() error { _, err := d.Kernel("lookup"); return err },
			func() error {
				k.(*kernel).free.Store(0)
				_, err := k.(*kernel).contextless()
				return err
			},
			func() error {
				return cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, affine{})
			},
			func() error {
				b, err := d.Alloc(cuda.MemDevice, 4096, "late")
				if err == nil {
					err = b.Free()
				}
				return err
			},
		} {
			wg.Go(func() {
				<-start
				for f() == nil {
				}
			})
		}
		wg.Go(func() {
			<-start
			_ = d.Close() // names what was open
		})
		close(start)
		wg.Wait()
		require.NoError(t, d.Close())
	}
}

// Freeing waits for kernels that run, and nobody else waits for that.
func TestFreeWhileAKernelRuns(t *testing.T) {
	d, lib := device(t, "", Options{})
	s := streamOf(t, d, cuda.StreamOptions{Name: "busy"})
	b, err := d.Alloc(cuda.MemDevice, 4096, "old")
	require.NoError(t, err)
	g, err := d.Reserve(1<<20, "growing")
	require.NoError(t, err)
	require.NoError(t, g.Grow(4096))
	open, words := held(t, d, s)
	calls := func() string {
		return fakecuda.Control(t, lib, "calls=cuMemFree_v2,calls=cuMemUnmap")
	}
	before := calls()
	freed := make(chan error, 2)
	go func() { freed <- b.Free() }()
	go func() { freed <- g.Free() }()
	time.Sleep(5 * time.Millisecond)
	other, err := d.Alloc(cuda.MemPinned, 4096, "new")
	require.NoError(t, err)
	require.Empty(t, freed, "it is freed under a kernel")
	// Which would hold its thread for as long as the kernel runs, or pull memory away.
	require.Equal(t, before, calls())
	open()
	require.NoError(t, errors.Join(<-freed, <-freed))
	require.Equal(t, map[string]int64{"gate": 32, "new": 4096}, d.MemUsage())
	require.NoError(t, s.Close())
	require.NoError(t, other.Free())
	require.NoError(t, words.Free())
}

// A kernel that does not end is an error that names it, its stream and how long it ran; the waits
// of others end, too, and closing and freeing take no longer than they may.
func TestKernelThatDoesNotEnd(t *testing.T) {
	lib := fake(t, "")
	d, err := Open(Options{Library: lib, CloseTimeout: 50 * time.Millisecond,
		KernelTimeout: 100 * time.Millisecond})
	require.NoError(t, err)
	s, behind := streamOf(t, d, cuda.StreamOptions{Name: "endless"}),
		streamOf(t, d, cuda.StreamOptions{Name: "behind"})
	dev, err := d.Alloc(cuda.MemDevice, 4096, "rows")
	require.NoError(t, err)
	g, err := d.Reserve(8<<20, "slots")
	require.NoError(t, err)
	require.NoError(t, g.Grow(1))
	open, words := held(t, d, s)
	e, err := d.NewEvent()
	require.NoError(t, err)
	require.NoError(t, s.Record(e))
	require.NoError(t, behind.Wait(e))
	began := time.Now()
	for _, wait := range []func() error{
		func() error { return behind.Synchronize(soon(t, patience)) },
		func() error { return s.Synchronize(soon(t, patience)) },
		func() error { return e.Synchronize(soon(t, patience)) },
	} {
		err := wait()
		var late *TimeoutError
		require.ErrorAs(t, err, &late)
		require.Equal(t, errs.Device, errs.ClassOf(err))
		require.Equal(t, []string{"conf_gate", "endless"}, []string{late.Kernel, late.Stream})
		require.Greater(t, late.After, 100*time.Millisecond)
		require.ErrorContains(t, err, `kernel "conf_gate" on stream "endless" has not ended after`)
	}
	require.ErrorContains(t, s.Fill(dev.Ptr(), 0, 8), "has not ended after") // at once
	// Memory that cannot be cleared is not waited for either.
	for range 2 {
		fakecuda.Control(t, lib, "fail=cuMemsetD8Async:1:1")
		_, err = d.Alloc(cuda.MemDevice, 4096, "more rows")
		require.ErrorContains(t, err, "cuMemsetD8Async")
		fakecuda.Control(t, lib, "fail=cuMemsetD8Async:1:1")
		require.ErrorContains(t, g.Grow(8<<20), "cuMemsetD8Async")
	}
	require.ErrorContains(t, dev.Free(), `stream "endless" still runs kernel "conf_gate"`)
	require.ErrorContains(t, g.Free(), "it stays where it is")
	require.ErrorContains(t, s.Close(), "still runs")
	require.ErrorContains(t, d.Close(), `stream "endless" still runs kernel "conf_gate"`)
	require.Less(t, time.Since(began), patience/2)
	open()
	w := hostmem.View[uint64](words.Bytes())
	for end := time.Now().Add(patience); atomic.LoadUint64(&w[2]) == 0; {
		require.True(t, time.Now().Before(end), "the kernel does not end")
		time.Sleep(100 * time.Microsecond)
	}
	fakecuda.Control(t, lib, "reset")
	require.NoError(t, words.Free())
	require.NoError(t, hostmem.Free(d.faults.slabs[0].host))
}

// A driver that does not answer any more does not keep the program from ending.
func TestDriverThatHangs(t *testing.T) {
	lib := fake(t, "")
	d, err := Open(Options{Library: lib, CloseTimeout: 30 * time.Millisecond})
	require.NoError(t, err)
	_, err = d.Alloc(cuda.MemDevice, 4096, "forgotten")
	require.NoError(t, err)
	fakecuda.Control(t, lib, "hang=cuMemFree_v2")
	err = d.Close()
	require.ErrorContains(t, err, "the driver has not answered for 30ms")
	require.ErrorContains(t, err, `buffer "forgotten" (4096 bytes)`)
	_, err = d.Alloc(cuda.MemDevice, 4096, "more")
	require.ErrorIs(t, err, cuda.ErrClosed)
	fakecuda.Control(t, lib, "hang=")
	for end := time.Now().Add(patience); !d.gaveBack.Load(); time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), "it does not come back")
	}
	fakecuda.Control(t, lib, "reset")
	for _, s := range d.faults.slabs {
		require.NoError(t, hostmem.Free(s.host))
	}
}

// The driver takes memory by itself, and an error names its holder.
func TestMemoryThatOthersHold(t *testing.T) {
	d, lib := device(t, "used=50331648", Options{}) // 48 of 64 MiB
	free, total, err := d.FreeMemory()
	require.NoError(t, err)
	require.EqualValues(t, 64<<20, total)
	require.Greater(t, free, int64(15<<20))
	require.LessOrEqual(t, free, int64(16<<20))
	for name, call := range map[string]func() error{
		"alloc": func() error { _, err := d.Alloc(cuda.MemDevice, 32<<20, "rows"); return err },
		"grow": func() error {
			g, err := d.Reserve(1<<40, "rows")
			if err != nil {
				return err
			}
			return errors.Join(g.Grow(32<<20), g.Free())
		},
	} {
		err := call()
		refused(t, err, "rows", "33554432 bytes wanted", "held by other processes", "nvidia-smi")
		var oom *cuda.OutOfMemoryError
		require.ErrorAs(t, err, &oom, name)
		require.InDelta(t, 48<<20, oom.Others, 1<<16, name)
		require.InDelta(t, 16<<20, oom.Free, 1<<16, name)
	}
	fakecuda.Control(t, lib, "fail=cuDevicePrimaryCtxRetain:1:2")
	_, err = Open(Options{Library: lib})
	refused(t, err, "no context", "other processes hold its memory", "nvidia-smi")
	// A call that only needs a little says it in the same way: the caller can give memory back.
	fakecuda.Control(t, lib, "fail=cuStreamCreateWithPriority:1:2")
	_, err = d.NewStream(cuda.StreamOptions{Name: "unlucky"})
	var oom *cuda.OutOfMemoryError
	require.ErrorAs(t, err, &oom)
	require.ErrorContains(t, err, "cuStreamCreateWithPriority")
}

// Each call that growing takes fails at each of its times: the buffer is as it was, nothing is left
// behind, and the next try works.
func TestGrowFails(t *testing.T) {
	const granule = 64 << 10
	calls := []string{"cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess",
		"cuMemsetD8Async"}
	for _, call := range calls {
		for n := 1; n <= 2; n++ {
			d, lib := device(t, "mem=268435456", Options{})
			s := streamOf(t, d, cuda.StreamOptions{Name: "s"})
			g, err := d.Reserve(1<<30, "slots")
			require.NoError(t, err)
			require.NoError(t, g.Grow(1))
			require.NoError(t, s.Fill(g.Ptr(), 7, granule))
			require.NoError(t, s.Synchronize(soon(t, patience)))
			fakecuda.Control(t, lib, "fail="+call+":"+string(rune('0'+n))+":304")
			// Two pieces, so that the second fails after the first has come.
			if err := g.Grow(pieceBytes + 3*granule); err != nil {
				require.ErrorContains(t, err, "grow slots to")
				require.ErrorContains(t, err, call)
				require.EqualValues(t, granule, g.Backed())
				require.EqualValues(t, granule, d.MemUsage()["slots"])
				require.ErrorContains(t, s.Fill(g.Ptr(), 7, granule+1),
					"have memory; grow it first")
				require.Contains(t, fakecuda.Control(t, lib, "live"), " reserved=1 physical=1 ")
			} else {
				require.Equal(t, 2, n, call)
			}
			fakecuda.Control(t, lib, "fail="+call+":1:0:0")
			require.NoError(t, g.Grow(pieceBytes+3*granule))
			require.Equal(t, []byte{7, 0}, fetch(t, d, s, g.Ptr()+granule-1, 2))
			require.NoError(t, errors.Join(g.Free(), s.Close()))
			require.Contains(t, fakecuda.Control(t, lib, "live"), " reserved=0 physical=0 ")
			require.NoError(t, d.Close())
		}
	}
	// No addresses, or a driver that has none of it: the whole, or why not.
	d, lib := device(t, "fail=cuMemAddressReserve:1:2", Options{})
	_, err := d.Reserve(1<<20, "slots")
	require.ErrorContains(t, err, "cuMemAddressReserve")
	fakecuda.Control(t, lib, "fail=cuMemAddressReserve:1:0:0")
	_, err = d.Reserve(1<<50, "slots")
	require.ErrorContains(t, err, "more than GPUs can address")
	require.NoError(t, d.Close())
	d, _ = device(t, "vmm=0", Options{})
	g, err := d.Reserve(1<<20, "slots")
	require.NoError(t, err)
	require.EqualValues(t, 1<<20, g.Backed())
	require.NoError(t, errors.Join(g.Grow(1<<20), g.Free()))
	_, err = d.Reserve(1<<30, "slots")
	refused(t, err, "out of memory for slots", "so the worst case has to fit")
}

// fetch reads device memory.
func fetch(t *testing.T, d *Device, s cuda.Stream, p cuda.DevicePtr, n int64) []byte {
	t.Helper()
	b, err := d.Alloc(cuda.MemPinned, n, "fetched")
	require.NoError(t, err)
	require.NoError(t, s.Copy(b.Ptr(), p, n))
	require.NoError(t, s.Synchronize(soon(t, patience)))
	out := append([]byte(nil), b.Bytes()...)
	require.NoError(t, b.Free())
	return out
}

// The export of a buffer that grows is the memory itself, and a peer mapping holds it.
func TestGrowingExport(t *testing.T) {
	const granule = 64 << 10
	d, _ := device(t, "", Options{})
	s := streamOf(t, d, cuda.StreamOptions{Name: "s"})
	g, err := d.Reserve(1<<20, "slots")
	require.NoError(t, err)
	require.NoError(t, g.Grow(1))
	m, err := d.MapPeer(g, peerDMABuf)
	require.NoError(t, err)
	require.NoError(t, g.Grow(3*granule))
	require.NoError(t, m.(cuda.PeerGrower).Extend())
	require.NoError(t, s.Fill(g.Ptr()+granule-1, 9, 2))
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.Equal(t, []byte{0, 9, 9, 0}, m.Bytes()[granule-2:granule+2])
	m.Bytes()[3*granule-1] = 5
	require.Equal(t, []byte{5}, fetch(t, d, s, g.Ptr()+3*granule-1, 1))
	require.ErrorContains(t, g.Free(), "mapped for the DMA")
	require.NoError(t, errors.Join(m.Close(), g.Free(), s.Close()))
}

// Steps that come again are one launch; a fault in one names its kernel, and only that and later
// work are failed.
func TestStepsAreGraphs(t *testing.T) {
	d, lib := device(t, "", Options{})
	s := streamOf(t, d, cuda.StreamOptions{Name: "train"})
	b, err := d.Alloc(cuda.MemDevice, 80, "rows")
	require.NoError(t, err)
	ran, err := d.Alloc(cuda.MemPinned, 8, "ran")
	require.NoError(t, err)
	ka, kf := kernelOf(t, d, "conf_affine"), kernelOf(t, d, "conf_fail")
	one := cuda.LaunchConfig{Blocks: 1, Threads: 32}
	var q cuda.Steps
	send := func(failAt int64, adds ...uint64) error {
		q.Reset()
		for _, a := range adds {
			cuda.Add(&q, ka, cuda.LaunchConfig{Blocks: 1 + int(a%3), Threads: 64},
				affine{b.Ptr(), 10, 3, a})
		}
		if failAt >= 0 {
			cuda.Add(&q, kf, one, failing{ran.Ptr(), failAt})
			cuda.Add(&q, ka, one, affine{b.Ptr(), 10, 3, 1})
		}
		return cuda.LaunchSteps(s, &q)
	}
	count := func(
		call string) string {
		return strings.TrimSpace(fakecuda.Control(t, lib, "calls="+call))
	}
	want := uint64(0)
	for i := range uint64(20) {
		require.NoError(t, send(-1, i, i+1, i+2))
		for j := range uint64(3) {
			want = want*3 + i + j
		}
	}
	require.NoError(t, s.Synchronize(soon(t, patience)))
	got := fetch(t, d, s, b.Ptr(), 80)
	require.Equal(t, want, *(*uint64)(unsafe.Pointer(&got[72])))
	require.Equal(t, []string{"3", "19", "1"}, []string{count("cuLaunchKernel"),
		count("cuGraphLaunch"), count("cuGraphInstantiateWithFlags")})
	require.Positive(t, s.Busy())

	// Many sequences: a bound on graphs, and all are right.
	for round := range 3 {
		for n := 3; n < 3+2*mostGraphs; n++ {
			require.NoError(t, send(-1, make([]uint64, n)...), round)
		}
	}
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.LessOrEqual(t, len(s.graphs.list), mostGraphs)

	// No memory for a graph, an update or a launch of one: launches.
	for _, call := range []string{"cuGraphCreate:1:2", "cuGraphAddKernelNode_v2:2:2",
		"cuGraphInstantiateWithFlags:1:2", "cuGraphLaunch:1:2",
		"cuGraphExecKernelNodeSetParams_v2:2:1"} {
		s.mu.Lock()
		require.NoError(t, d.enter())
		s.graphs.close(d)
		d.leave()
		s.mu.Unlock()
		fakecuda.Control(t, lib, "fail="+call)
		require.NoError(t, s.Fill(b.Ptr(), 0, 80))
		for range 4 {
			require.NoError(t, send(-1, 1, 1, 1))
		}
		got := fetch(t, d, s, b.Ptr(), 8)
		require.EqualValues(t, (531441-1)/2, *(*uint64)(unsafe.Pointer(&got[0])), call)
		name, _, _ := strings.Cut(call, ":")
		require.Equal(t, "1", strings.TrimSpace(fakecuda.Control(t, lib, "failed="+name)), call)
	}

	// The third time the second kernel of the graph fails. The record before it is good.
	require.NoError(t, s.Fill(b.Ptr(), 0, 80))
	for range 3 {
		require.NoError(t, send(5, 1))
	}
	e, err := d.NewEvent()
	require.NoError(t, err)
	require.NoError(t, s.Record(e))
	require.NoError(t, send(0, 1))
	err = s.Synchronize(soon(t, patience))
	var ke *cuda.KernelError
	require.ErrorAs(t, err, &ke)
	require.Equal(t, []string{"conf_fail", "train"}, []string{ke.Kernel, ke.Stream})
	require.NoError(t, e.Synchronize(soon(t, patience)))
	fresh := streamOf(t, d, cuda.StreamOptions{Name: "fresh"})
	got = fetch(t, d, fresh, b.Ptr(), 8)
	require.EqualValues(t, (3*3*3*3*3*3*3-1)/2, *(*uint64)(unsafe.Pointer(&got[0])),
		"the kernels behind the one that failed ran")
	require.NoError(t, errors.Join(s.Close(), fresh.Close(), e.Close(), b.Free(), ran.Free()))
	require.Contains(t, fakecuda.Control(t, lib, "live"), " graphs=0")
}

// The driver's variables are set where the user has not, and doctor shows their values.
func TestDriverVariables(t *testing.T) {
	t.Setenv(envLoading, "")
	t.Setenv(envConnections, "")
	setDriverEnv()
	require.Equal(t, "EAGER", os.Getenv(envLoading))
	require.Equal(t, "32", os.Getenv(envConnections))
	f := connections()
	require.Equal(t, probe.There, f.Answer)
	require.Equal(t, "CUDA_DEVICE_MAX_CONNECTIONS=32", f.Detail)
	t.Setenv(envLoading, "LAZY")
	for _, v := range []string{"8", "many"} {
		t.Setenv(envConnections, v)
		setDriverEnv()
		require.Equal(t, v, os.Getenv(envConnections), "what the user set stays")
		f = connections()
		require.Equal(t, probe.NotThere, f.Answer)
		require.Contains(t, f.Detail, "CUDA_DEVICE_MAX_CONNECTIONS="+v)
		require.Contains(t, f.Next, "set it to 32")
	}
	require.Equal(t, "LAZY", os.Getenv(envLoading))
	rep, err := Probe(Options{Library: fake(t, "")})
	require.NoError(t, err)
	require.Contains(t, rep.GPUs[0].Findings, f)
}

// No launch loads anything: a load may wait for kernels, and ours wait for each other.
func TestNothingLoadsAtLaunch(t *testing.T) {
	d, lib := device(t, "sm_min=2,sm_step=2,threads_per_sm=512", Options{})
	mode := os.Getenv(envLoading)
	require.NotEmpty(t, mode)
	require.Equal(t, mode, fakecuda.Control(t, lib, "loading"),
		"what the driver saw at its first start")
	require.Equal(t, os.Getenv(envConnections), fakecuda.Control(t, lib, "connections"))
	k := kernelOf(t, d, "conf_affine")
	loads := func() (n []string) {
		for _, c := range []string{"cuModuleLoadDataEx", "cuModuleGetFunction", "cuLibraryLoadData",
			"cuLibraryGetKernel"} {
			n = append(n, fakecuda.Control(t, lib, "calls="+c))
		}
		return n
	}
	before := loads()
	for _, sms := range []int{0, 2} {
		s := streamOf(t, d, cuda.StreamOptions{Name: "s", SMs: sms})
		require.NoError(t, cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, affine{}))
		require.NoError(t, s.Close())
	}
	require.Equal(t, before, loads())

	// When it could not be loaded ahead, a launch with a budget says so, and the next tries anew.
	fakecuda.Control(t, lib, "fail=cuLibraryGetKernel:1:2")
	k = kernelOf(t, d, "conf_gate")
	s := streamOf(t, d, cuda.StreamOptions{Name: "s", SMs: 2})
	one := cuda.LaunchConfig{Blocks: 1, Threads: 32}
	require.ErrorContains(t, cuda.Launch(s, k, one, gate{LimitNS: 1}), "cuLibraryGetKernel")
	require.NoError(t, cuda.Launch(s, kernelOf(t, d, "conf_affine"), one, affine{}))
	_, err := k.(*kernel).contextless()
	require.NoError(t, err)
	require.NoError(t, s.Close())
}
