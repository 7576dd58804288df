package driver

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"helios/cuda"
	"helios/cuda/kernels"
	"helios/internal/errs"
	"helios/internal/probe"
)

// kernel is cuda.Kernel: a function of a loaded module.
type kernel struct {
	d          *Device
	name       string
	module     string
	size       uintptr // of the caller's parameter block
	maxThreads int     // in a block, with the registers that the compiler gave it
	fn         function

	free atomic.Uint64 // a CUkernel, for streams of green contexts; 0: not yet
	// why there is none: told to the next launch that wants it, which tries again
	err error
}

func (k *kernel) Name() string       { return k.name }
func (k *kernel) ParamSize() uintptr { return k.size }

type loadedModule struct {
	h   module
	lib library // 0 without green contexts
	// what h was loaded from, until lib is
	image []byte
}

// moduleTable loads modules when a kernel of them is first asked for.
type moduleTable struct {
	mu      sync.Mutex
	list    []kernels.Module
	loaded  map[string]*loadedModule
	kernels map[string]*kernel

	arch string   // of the cubins that fit the GPU; "" to compile the PTX
	fell []string // modules whose cubin did not load, and why
	code atomic.Pointer[string]
}

func (t *moduleTable) init(list []kernels.Module, arch, why string) {
	t.list, t.arch = list, arch
	t.loaded, t.kernels = map[string]*loadedModule{}, map[string]*kernel{}
	code := "cubin " + arch
	if arch == "" {
		code = "PTX, " + why
	}
	t.code.Store(&code)
}

// fallBack notes that a module runs from its PTX although a cubin was to be loaded. t.mu is held.
func (t *moduleTable) fallBack(module string, why error) {
	t.fell = append(t.fell, module)
	code := fmt.Sprintf("cubin %s; PTX of %s: %v", t.arch, strings.Join(t.fell, ", "), why)
	if n := len(t.fell); n > 3 {
		code = fmt.Sprintf("cubin %s; PTX of %d modules: %v", t.arch, n, why)
	}
	t.code.Store(&code)
}

// envForcePTX is NVIDIA's variable to ignore machine code ("Setting it to 1 forces the device
// driver to ignore any embedded binary code", CUDA programming guide). A cubin alone would not load
// then.
const envForcePTX = "CUDA_FORCE_PTX_JIT"

// chooseCode returns the architecture of the cubins to load, or "" and the reason against cubins.
func chooseCode(cc int, ptx bool) (arch, why string) {
	if v := os.Getenv(envForcePTX); v != "" && v != "0" {
		return "", envForcePTX + "=" + v
	}
	if ptx {
		return "", "which the caller asked for"
	}
	if arch = kernels.CubinArch(cc); arch == "" {
		why = fmt.Sprintf("no cubins for compute capability %d.%d", cc/10, cc%10)
	}
	return arch, why
}

// codeFinding reports the source of a GPU's kernels: cubin or PTX.
func codeFinding(cc int) probe.Finding {
	f := probe.Finding{Name: "machine code", Answer: probe.There}
	arch, why := chooseCode(cc, false)
	if arch != "" {
		f.Detail = "cubins of " + arch + " are in this binary"
		return f
	}
	f.Answer = probe.NotThere
	f.Detail = why + ": the driver compiles the PTX, 10 s of a CPU or more at the first start"
	if v := os.Getenv(envForcePTX); v != "" && v != "0" {
		f.Next = "unset " + envForcePTX
	}
	return f
}

// Kernel implements cuda.Device. The first call for a module loads its cubin, or has the driver
// compile its PTX, which it keeps in a cache. A PTX that it refuses is an error with its log.
func (d *Device) Kernel(name string) (cuda.Kernel, error) {
	t := &d.modules
	t.mu.Lock()
	defer t.mu.Unlock()
	if k := t.kernels[name]; k != nil {
		return k, nil
	}
	if err := d.accepting(); err != nil {
		return nil, err // Close drops the tables under t.mu
	}
	mod, spec, err := d.findKernel(name)
	if err != nil {
		return nil, err
	}
	if err := d.enter(); err != nil {
		return nil, err
	}
	defer d.leave()
	m, err := d.load(mod)
	if err != nil {
		return nil, err
	}
	wrap := func(err error) error {
		return fmt.Errorf("device %s: kernel %q of module %s: %w", d.info.Name, name, mod.Name, err)
	}
	k := &kernel{d: d, name: name, module: mod.Name, size: uintptr(spec.ParamBytes)}
	var r result
	if k.fn, r = d.api.ModuleGetFunction(m.h, name); r != success {
		return nil, wrap(d.failed("cuModuleGetFunction", r))
	}
	if k.maxThreads, r = d.api.FuncGetAttribute(funcMaxThreads, k.fn); r != success {
		return nil, wrap(d.failed("cuFuncGetAttribute", r))
	}
	if err := d.checkParams(k); err != nil {
		return nil, wrap(err)
	}
	if d.caps.GreenContexts {
		k.err = d.loadFree(k, m)
	}
	t.kernels[name] = k
	return k, nil
}

// findKernel returns the module of a kernel that the GPU can run.
func (d *Device) findKernel(name string) (*kernels.Module, kernels.Kernel, error) {
	var mod *kernels.Module
	var spec kernels.Kernel
	var known []string
	for i := range d.modules.list {
		for _, k := range d.modules.list[i].Kernels {
			if k.Name == name {
				mod, spec = &d.modules.list[i], k
			}
			if !strings.HasPrefix(k.Name, "conf_") {
				known = append(known, k.Name)
			}
		}
	}
	switch {
	case mod == nil:
		slices.Sort(known)
		return nil, spec, errs.New(errs.Capability,
			"device %s: no CUDA kernel %q in this binary (there are: %s)", d.info.Name, name,
			strings.Join(known, ", "))
	case d.cc < mod.SM:
		return nil, spec, errs.New(errs.Capability,
			"device %s: kernel %q needs compute capability %d.%d, and the GPU has %d.%d; use {precision} fp32 on it",
			d.info.Name, name, mod.SM/10, mod.SM%10, d.cc/10, d.cc%10)
	case spec.ParamBytes > maxParams:
		return nil, spec,
			fmt.Errorf("device %s: kernel %q takes %d bytes of parameters; CUDA has room for %d",
				d.info.Name, name, spec.ParamBytes, maxParams)
	}
	return mod, spec, nil
}

// checkParams compares what the driver reads from the module with what we read from the PTX, where
// it can tell. A launch with other sizes would read past our blocks.
func (d *Device) checkParams(k *kernel) error {
	if !d.api.has("cuFuncGetParamInfo") {
		return nil
	}
	for i, want := range []int{int(k.size), kernels.LaunchBytes} {
		_, size, r := d.api.FuncGetParamInfo(k.fn, i)
		if r != success {
			return d.failed("cuFuncGetParamInfo", r)
		}
		if size != want {
			return fmt.Errorf(
				"the driver finds %d bytes in parameter %d, and the table of kernels says %d; run \"go generate\" of cuda/kernels anew",
				size, i, want)
		}
	}
	if _, _, r := d.api.FuncGetParamInfo(k.fn, 2); r == success {
		return fmt.Errorf("it takes more than a parameter block and hx_launch")
	}
	return nil
}

// load makes a module of its cubin or of its PTX. t.mu is held, and it runs within enter.
func (d *Device) load(mod *kernels.Module) (*loadedModule, error) {
	if m := d.modules.loaded[mod.Name]; m != nil {
		return m, nil
	}
	m, err := d.loadCubin(mod)
	if err == nil && m == nil {
		m, err = d.loadPTX(mod)
	}
	if err != nil {
		return nil, err
	}
	if !d.caps.GreenContexts {
		m.image = nil
	}
	d.modules.loaded[mod.Name] = m
	return m, nil
}

// loadCubin loads machine code where some fits. A nil module asks for the PTX: another driver may
// refuse what ours should take. Only a lost context is an error.
func (d *Device) loadCubin(mod *kernels.Module) (*loadedModule, error) {
	t := &d.modules
	if t.arch == "" {
		return nil, nil
	}
	c, err := mod.Cubin(d.cc)
	if err != nil {
		t.fallBack(mod.Name, err)
		return nil, nil
	}
	h, r := d.api.ModuleLoadDataEx(c.Image, nil)
	if r == success {
		return &loadedModule{h: h, image: c.Image}, nil
	}
	if fatal(r) {
		return nil, fmt.Errorf("device %s: module %s: %w", d.info.Name, mod.Name,
			d.failed("cuModuleLoadDataEx", r))
	}
	t.fallBack(mod.Name, callError(d.api, "cuModuleLoadDataEx", r))
	return nil, nil
}

// loadPTX has the driver compile a module.
func (d *Device) loadPTX(mod *kernels.Module) (*loadedModule, error) {
	var log jitLog
	image := append([]byte(mod.PTX), 0)
	h, r := d.api.ModuleLoadDataEx(image, &log)
	if r != success {
		err := d.failed("cuModuleLoadDataEx", r)
		next := ""
		switch r {
		case errUnsupportedPTX:
			next = "; update NVIDIA's driver to " + driverFor(mod.ISA)
		case errJITNotFound, errJITDisabled:
			next = "; install libnvidia-ptxjitcompiler of the same driver version, and unset CUDA_DISABLE_PTX_JIT"
		}
		text := strings.TrimSpace(log.Error + "\n" + log.Info)
		if text == "" {
			text = "(the compiler left no log)"
		}
		return nil, errs.With(errs.Capability,
			fmt.Errorf(
				"device %s: the PTX of module %s does not load: %w%s; the driver's compiler says: %s",
				d.info.Name, mod.Name, err, next, text))
	}
	return &loadedModule{h: h, image: image}, nil
}

// contextless is the kernel as a CUkernel: its launch runs in the context of the stream ("the
// context to launch the kernel on will … be taken from the specified stream", cuLaunchKernel),
// where a function of the primary context would not match the stream's green one.
func (k *kernel) contextless() (function, error) {
	if f := k.free.Load(); f != 0 {
		return function(f), nil
	}
	d := k.d
	t := &d.modules
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := d.accepting(); err != nil {
		return 0, err
	}
	if err := k.err; err != nil {
		k.err = nil
		return 0, err
	}
	if err := d.enter(); err != nil {
		return 0, err
	}
	defer d.leave()
	if err := d.loadFree(k, t.loaded[k.module]); err != nil {
		return 0, err
	}
	return function(k.free.Load()), nil
}

// loadFree makes the CUkernel. Kernel does it ahead of the first launch: to load takes a compiler
// run and may wait for all kernels of the context, of which one may be waiting for that launch
// (CUDA programming guide, Lazy Loading, Potential Hazards). t.mu is held, and it runs within
// enter.
func (d *Device) loadFree(k *kernel, m *loadedModule) error {
	if m.lib == 0 {
		lib, r := d.api.LibraryLoadData(m.image)
		if r != success {
			return d.failed("cuLibraryLoadData", r)
		}
		m.lib, m.image = lib, nil
	}
	f, r := d.api.LibraryGetKernel(m.lib, k.name)
	if r != success {
		return d.failed("cuLibraryGetKernel", r)
	}
	k.free.Store(uint64(f))
	return nil
}

func (t *moduleTable) close(d *Device) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !d.enterToFree() {
		return
	}
	defer d.leave()
	for _, m := range t.loaded {
		if m.lib != 0 {
			d.api.LibraryUnload(m.lib)
		}
		d.api.ModuleUnload(m.h)
	}
	t.loaded, t.kernels = nil, nil
}

// cudaFor are the CUDA versions (as the driver counts) that brought a PTX version, and the first
// driver with it, from the release notes of the PTX ISA and of CUDA.
var cudaFor = []struct{ isa, cuda, driver int }{
	{70, 11000, 450}, {71, 11010, 455}, {72, 11020, 460}, {73, 11030, 465}, {74, 11040, 470},
	{75, 11050, 495}, {76, 11060, 510}, {77, 11070, 515}, {78, 11080, 520},
	{80, 12000, 525}, {81, 12010, 530}, {82, 12020, 535}, {83, 12030, 545}, {84, 12040, 550},
	{85, 12050, 555}, {86, 12070, 565}, {87, 12080, 570}, {88, 12090, 575}, {90, 13000, 580},
}

// driverFor names the driver that a PTX version needs.
func driverFor(isa int) string {
	for _, v := range cudaFor {
		if v.isa == isa {
			return fmt.Sprintf("%d (CUDA %s) or later", v.driver, versionText(v.cuda))
		}
	}
	return fmt.Sprintf("one that takes PTX %d.%d", isa/10, isa%10)
}

func versionText(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }
