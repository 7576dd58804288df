//go:build gorgonia && !nocuda

package driver

// The api on gorgonia.org/cu (v0.9.6, cgo), for those who build with -tags gorgonia. It needs the
// headers of CUDA 12 (13 changed signatures that the module uses), -lcuda when linking and libcuda
// when starting:
//
//	make build GPU_BINDING=gorgonia
//
// Traps, which are why it is not the default: without libcuda.so.1 the program does not start at
// all; and the module's init calls cuInit and ends the process when that fails, before main, so
// there is no fall-back to the host device and no exit code of ours.
//
// The module's calls are used where it has them. The others are called here, through cgo:
//
//   - cuMemHostRegister, cuMemHostUnregister, cuMemHostGetDevicePointer (pinned and I/O memory)
//   - cuMemGetHandleForAddressRange (dma-buf)
//   - cuLibraryLoadData, cuLibraryUnload, cuLibraryGetKernel, cuFuncGetParamInfo
//   - green contexts: cuDeviceGetDevResource, cuDevSmResourceSplitByCount,
//     cuDevResourceGenerateDesc, cuGreenCtx…, cuCtxFromGreenCtx
//   - virtual memory management: cuMemAddressReserve, cuMemCreate, cuMemMap and the like
//   - graphs: the module has cuGraphCreate, but no kernel nodes that can be changed (and hides its handles)
//   - cuDeviceGetPCIBusId, and the driver's own words for an error
//   - cuLaunchKernel: Function.Launch copies exactly eight bytes for each argument, and ours are
//     structs by value; it also allocates twice for each launch
//
// Calls that a driver older than the headers may lack are looked up when they are made, as in
// purego.go.

/*
#cgo LDFLAGS: -lcuda -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <cuda.h>

static int helios_has(const char *name) { return dlsym(RTLD_DEFAULT, name) != NULL; }

static const char *helios_library(void) {
	Dl_info info;
	void *f = dlsym(RTLD_DEFAULT, "cuInit");
	return f != NULL && dladdr(f, &info) != 0 ? info.dli_fname : NULL;
}

// The pointers come as numbers: cgo would look through what they point to, and refuse pointers in
// it.
static CUresult helios_launch(uintptr_t f, unsigned blocks, unsigned threads, unsigned shared, uintptr_t stream, uintptr_t params) {
	return cuLaunchKernel((CUfunction)f, blocks, 1, 1, threads, 1, 1, shared, (CUstream)stream, (void **)params, NULL);
}
static CUresult helios_register(void *p, size_t n, unsigned flags) { return cuMemHostRegister(p, n, flags); }
static CUresult helios_host_pointer(CUdeviceptr *out, void *p) { return cuMemHostGetDevicePointer(out, p, 0); }

// Calls that may be missing. Signatures are written out: older CUDA 12 headers lack some types.
#define HX_OPTIONAL(call, params, args) \
	static CUresult helios_##call params { \
		CUresult (*call_) params = (CUresult (*) params)dlsym(RTLD_DEFAULT, #call); \
		return call_ == NULL ? CUDA_ERROR_NOT_FOUND : call_ args; \
	}
HX_OPTIONAL(cuLibraryLoadData, (void *out, const void *code, void *jo, void *jv, unsigned jn, void *lo, void *lv, unsigned ln), (out, code, jo, jv, jn, lo, lv, ln))
HX_OPTIONAL(cuLibraryUnload, (uintptr_t lib), (lib))
HX_OPTIONAL(cuLibraryGetKernel, (void *out, uintptr_t lib, const char *name), (out, lib, name))
HX_OPTIONAL(cuFuncGetParamInfo, (uintptr_t f, size_t index, size_t *offset, size_t *size), (f, index, offset, size))
HX_OPTIONAL(cuMemGetHandleForAddressRange, (void *out, CUdeviceptr p, size_t n, int type, unsigned long long flags), (out, p, n, type, flags))
HX_OPTIONAL(cuDeviceGetDevResource, (CUdevice d, void *out, int type), (d, out, type))
HX_OPTIONAL(cuDevSmResourceSplitByCount, (void *groups, unsigned *n, const void *in, void *rest, unsigned flags, unsigned min), (groups, n, in, rest, flags, min))
HX_OPTIONAL(cuDevResourceGenerateDesc, (void *out, void *groups, unsigned n), (out, groups, n))
HX_OPTIONAL(cuGreenCtxCreate, (void *out, uintptr_t desc, CUdevice d, unsigned flags), (out, desc, d, flags))
HX_OPTIONAL(cuGreenCtxDestroy, (uintptr_t g), (g))
HX_OPTIONAL(cuGreenCtxStreamCreate, (void *out, uintptr_t g, unsigned flags, int priority), (out, g, flags, priority))
HX_OPTIONAL(cuCtxFromGreenCtx, (void *out, uintptr_t g), (out, g))
HX_OPTIONAL(cuMemGetAllocationGranularity, (size_t *out, const void *prop, int option), (out, prop, option))
HX_OPTIONAL(cuMemAddressReserve, (void *out, size_t n, size_t alignment, CUdeviceptr at, unsigned long long flags), (out, n, alignment, at, flags))
HX_OPTIONAL(cuMemAddressFree, (CUdeviceptr p, size_t n), (p, n))
HX_OPTIONAL(cuMemCreate, (void *out, size_t n, const void *prop, unsigned long long flags), (out, n, prop, flags))
HX_OPTIONAL(cuMemRelease, (unsigned long long h), (h))
HX_OPTIONAL(cuMemMap, (CUdeviceptr p, size_t n, size_t offset, unsigned long long h, unsigned long long flags), (p, n, offset, h, flags))
HX_OPTIONAL(cuMemUnmap, (CUdeviceptr p, size_t n), (p, n))
HX_OPTIONAL(cuMemSetAccess, (CUdeviceptr p, size_t n, const void *access, size_t count), (p, n, access, count))
HX_OPTIONAL(cuMemExportToShareableHandle, (void *out, unsigned long long h, int type, unsigned long long flags), (out, h, type, flags))
HX_OPTIONAL(cuGraphCreate, (void *out, unsigned flags), (out, flags))
HX_OPTIONAL(cuGraphDestroy, (uintptr_t g), (g))
HX_OPTIONAL(cuGraphAddKernelNode_v2, (void *out, uintptr_t g, const void *deps, size_t n, uintptr_t params), (out, g, deps, n, params))
HX_OPTIONAL(cuGraphInstantiateWithFlags, (void *out, uintptr_t g, unsigned long long flags), (out, g, flags))
HX_OPTIONAL(cuGraphExecKernelNodeSetParams_v2, (uintptr_t x, uintptr_t node, uintptr_t params), (x, node, params))
HX_OPTIONAL(cuGraphLaunch, (uintptr_t x, uintptr_t stream), (x, stream))
HX_OPTIONAL(cuGraphExecDestroy, (uintptr_t x), (x))
*/
import "C"

import (
	"bytes"
	"os"
	"reflect"
	"runtime"
	"unsafe"

	"gorgonia.org/cu"

	"helios/internal/errs"
)

// linked is the api on the library that the program was linked against.
//
// Large: a method for each call of the CUDA driver API that is used.
type linked struct{ path string }

// openLibrary returns the library that is already in the process; another one can't be had.
func openLibrary(path string) (api, error) {
	l := &linked{C.GoString(C.helios_library())}
	if path != "" {
		asked, err := os.Stat(path)
		if err != nil {
			return nil, errs.New(errs.Capability, "%w: %w", ErrNoDriver, err)
		}
		if have, err := os.Stat(l.path); err != nil || !os.SameFile(asked, have) {
			return nil, errs.New(errs.Capability,
				"this build (-tags gorgonia) is linked to %s and cannot open %s; start it with LD_LIBRARY_PATH, or use a build without the tag",
				l.path, path)
		}
	}
	var missing string
	for _, s := range requiredSymbols {
		if !l.has(s) {
			missing += " " + s
		}
	}
	if missing != "" {
		return nil, errs.New(errs.Capability,
			"CUDA driver %s lacks%s; it is too old or not NVIDIA's: install driver 535 (CUDA 12.2) or later",
			l.path, missing)
	}
	return l, nil
}

// code is the number in an error of the module, whose type is its own.
func code(err error) result {
	if err == nil {
		return success
	}
	if v := reflect.ValueOf(err); v.CanInt() {
		return result(v.Int())
	}
	return errUnknown
}

// view reads one of our handles as the module's struct around the same handle, or back.
func view[To, From any](v From) To {
	return *(*To)(unsafe.Pointer(&v))
}

// The module's handles are one machine word each, or view would be wrong.
var (
	_ = [1]byte{}[unsafe.Sizeof(cu.CUContext{})-8]
	_ = [1]byte{}[unsafe.Sizeof(cu.Module{})-8]
	_ = [1]byte{}[unsafe.Sizeof(cu.Function{})-8]
	_ = [1]byte{}[unsafe.Sizeof(cu.Stream{})-8]
	_ = [1]byte{}[unsafe.Sizeof(cu.Event{})-8]
)

func cString(s string) (*C.char, func()) {
	c := C.CString(s)
	return c, func() { C.free(unsafe.Pointer(c)) }
}

func (l *linked) has(symbol string) bool {
	c, free := cString(symbol)
	defer free()
	return C.helios_has(c) != 0
}

func (l *linked) describe() string { return l.path + " (linked, gorgonia.org/cu)" }

// Init repeats what the module's init did, for the result.
func (l *linked) Init(flags uint32) result { return result(C.cuInit(C.uint(flags))) }

func (l *linked) DriverGetVersion() (int, result) {
	v := cu.Version()
	if v < 0 { // the module keeps the reason for itself
		return 0, errUnknown
	}
	return v, success
}

func (l *linked) GetErrorName(r result) string {
	var s *C.char
	if C.cuGetErrorName(C.CUresult(r), &s) != 0 {
		return ""
	}
	return C.GoString(s)
}

func (l *linked) GetErrorString(r result) string {
	var s *C.char
	if C.cuGetErrorString(C.CUresult(r), &s) != 0 {
		return ""
	}
	return C.GoString(s)
}

func (l *linked) DeviceGetCount() (int, result) {
	n, err := cu.NumDevices()
	return n, code(err)
}

func (l *linked) DeviceGet(index int) (ordinal, result) {
	d, err := cu.GetDevice(index)
	return ordinal(d), code(err)
}

func (l *linked) DeviceGetName(d ordinal) (string, result) {
	s, err := cu.Device(d).Name()
	return s, code(err)
}

func (l *linked) DeviceGetPCIBusId(d ordinal) (string, result) {
	var b [64]C.char
	r := C.cuDeviceGetPCIBusId(&b[0], C.int(len(b)), C.CUdevice(d))
	return C.GoString(&b[0]), result(r)
}

func (l *linked) DeviceTotalMem(d ordinal) (int64, result) {
	n, err := cu.Device(d).TotalMem()
	return n, code(err)
}

func (l *linked) DeviceGetAttribute(a attribute, d ordinal) (int, result) {
	v, err := cu.Device(d).Attribute(cu.DeviceAttribute(a))
	return v, code(err)
}

func (l *linked) DevicePrimaryCtxRetain(d ordinal) (cuContext, result) {
	c, err := cu.Device(d).RetainPrimaryCtx()
	return view[cuContext](c), code(err)
}

func (l *linked) DevicePrimaryCtxRelease(d ordinal) result {
	return code(cu.Device(d).ReleasePrimaryCtx())
}

func (l *linked) CtxSetCurrent(c cuContext) result {
	return code(cu.SetCurrentContext(view[cu.CUContext](c)))
}

func (l *linked) CtxGetStreamPriorityRange() (least, greatest int, r result) {
	least, greatest, err := cu.StreamPriorityRange()
	return least, greatest, code(err)
}

// jitLogBytes is room for what the compiler says of one module.
const jitLogBytes = 16 << 10

func (l *linked) ModuleLoadDataEx(image []byte, log *jitLog) (module, result) {
	// The module hides the buffers' addresses in numbers, so they are C memory.
	text := C.calloc(2, jitLogBytes)
	if text == nil {
		return 0, errOutOfMemory
	}
	defer C.free(text)
	both := unsafe.Slice((*byte)(text), 2*jitLogBytes)
	m, err := cu.LoadDataEx(string(bytes.TrimSuffix(image, []byte{0})), // it adds a NUL of its own
		&cu.JITInfoLogBuffer{Buffer: both[: jitLogBytes-1 : jitLogBytes-1]},
		&cu.JITErrorLogBuffer{Buffer: both[jitLogBytes : 2*jitLogBytes-1]})
	if log != nil {
		log.Info, log.Error = C.GoString((*C.char)(text)),
			C.GoString((*C.char)(unsafe.Add(text, jitLogBytes)))
	}
	return view[module](m), code(err)
}

func (l *linked) ModuleUnload(m module) result { return code(view[cu.Module](m).Unload()) }

func (l *linked) ModuleGetFunction(m module, name string) (function, result) {
	f, err := view[cu.Module](m).Function(name)
	return view[function](f), code(err)
}

func (l *linked) LibraryLoadData(image []byte) (library, result) {
	var lib library
	r := C.helios_cuLibraryLoadData(unsafe.Pointer(&lib), unsafe.Pointer(unsafe.SliceData(image)),
		nil, nil, 0, nil, nil, 0)
	return lib, result(r)
}

func (l *linked) LibraryUnload(lib library) result {
	return result(C.helios_cuLibraryUnload(C.uintptr_t(lib)))
}

func (l *linked) LibraryGetKernel(lib library, name string) (function, result) {
	c, free := cString(name)
	defer free()
	var f function
	r := C.helios_cuLibraryGetKernel(unsafe.Pointer(&f), C.uintptr_t(lib), c)
	return f, result(r)
}

func (l *linked) FuncGetAttribute(a funcAttribute, f function) (int, result) {
	v, err := view[cu.Function](f).Attribute(cu.FunctionAttribute(a))
	return v, code(err)
}

func (l *linked) FuncGetParamInfo(f function, index int) (offset, size int, r result) {
	var o, n C.size_t
	r = result(C.helios_cuFuncGetParamInfo(C.uintptr_t(f), C.size_t(index), &o, &n))
	return int(o), int(n), r
}

func (l *linked) MemGetInfo() (free, total int64, r result) {
	free, total, err := cu.MemInfo()
	return free, total, code(err)
}

func (l *linked) MemAlloc(n int64) (devicePtr, result) {
	p, err := cu.MemAlloc(n)
	return devicePtr(p), code(err)
}

func (l *linked) MemFree(p devicePtr) result { return code(cu.MemFree(cu.DevicePtr(p))) }

func (l *linked) MemHostRegister(p unsafe.Pointer, n int64, flags uint32) result {
	return result(C.helios_register(p, C.size_t(n), C.uint(flags)))
}

func (l *linked) MemHostUnregister(p unsafe.Pointer) result {
	return result(C.cuMemHostUnregister(p))
}

func (l *linked) MemHostGetDevicePointer(p unsafe.Pointer) (devicePtr, result) {
	var d C.CUdeviceptr
	r := C.helios_host_pointer(&d, p)
	return devicePtr(d), result(r)
}

func (l *linked) MemGetHandleForAddressRange(p devicePtr, n int64, handleType uint32,
	flags uint64) (int32, result) {
	fd := int32(-1)
	r := C.helios_cuMemGetHandleForAddressRange(unsafe.Pointer(&fd), C.CUdeviceptr(p), C.size_t(n),
		C.int(handleType), C.ulonglong(flags))
	return fd, result(r)
}

func (l *linked) MemGetAllocationGranularity(prop *memProp, option int32) (int64, result) {
	var n C.size_t
	r := C.helios_cuMemGetAllocationGranularity(&n, unsafe.Pointer(prop), C.int(option))
	return int64(n), result(r)
}

func (l *linked) MemAddressReserve(n, alignment int64) (devicePtr, result) {
	var p devicePtr
	r := C.helios_cuMemAddressReserve(unsafe.Pointer(&p), C.size_t(n), C.size_t(alignment), 0, 0)
	return p, result(r)
}

func (l *linked) MemAddressFree(p devicePtr, n int64) result {
	return result(C.helios_cuMemAddressFree(C.CUdeviceptr(p), C.size_t(n)))
}

func (l *linked) MemCreate(n int64, prop *memProp) (memHandle, result) {
	var h memHandle
	r := C.helios_cuMemCreate(unsafe.Pointer(&h), C.size_t(n), unsafe.Pointer(prop), 0)
	return h, result(r)
}

func (l *linked) MemRelease(h memHandle) result {
	return result(C.helios_cuMemRelease(C.ulonglong(h)))
}

func (l *linked) MemMap(p devicePtr, n int64, h memHandle) result {
	return result(C.helios_cuMemMap(C.CUdeviceptr(p), C.size_t(n), 0, C.ulonglong(h), 0))
}

func (l *linked) MemUnmap(p devicePtr, n int64) result {
	return result(C.helios_cuMemUnmap(C.CUdeviceptr(p), C.size_t(n)))
}

func (l *linked) MemSetAccess(p devicePtr, n int64, access *memAccess) result {
	return result(C.helios_cuMemSetAccess(C.CUdeviceptr(p), C.size_t(n), unsafe.Pointer(access), 1))
}

func (l *linked) MemExportToShareableHandle(h memHandle, handleType int32) (int32, result) {
	fd := int32(-1)
	r := C.helios_cuMemExportToShareableHandle(unsafe.Pointer(&fd), C.ulonglong(h),
		C.int(handleType), 0)
	return fd, result(r)
}

func (l *linked) GraphCreate() (graph, result) {
	var g graph
	r := C.helios_cuGraphCreate(unsafe.Pointer(&g), 0)
	return g, result(r)
}

func (l *linked) GraphDestroy(g graph) result {
	return result(C.helios_cuGraphDestroy(C.uintptr_t(g)))
}

// The parameters go as a number, as those of a launch do: what they point to are pointers again.
func (l *linked) GraphAddKernelNode(g graph, after graphNode, params *nodeParams) (graphNode,
	result) {
	var n graphNode
	deps := C.size_t(1)
	if after == 0 {
		deps = 0
	}
	r := C.helios_cuGraphAddKernelNode_v2(unsafe.Pointer(&n), C.uintptr_t(g),
		unsafe.Pointer(&after), deps, C.uintptr_t(uintptr(unsafe.Pointer(params))))
	runtime.KeepAlive(params)
	return n, result(r)
}

func (l *linked) GraphInstantiate(g graph) (graphExec, result) {
	var x graphExec
	r := C.helios_cuGraphInstantiateWithFlags(unsafe.Pointer(&x), C.uintptr_t(g), 0)
	return x, result(r)
}

func (l *linked) GraphExecKernelNodeSetParams(x graphExec, n graphNode, params *nodeParams) result {
	r := C.helios_cuGraphExecKernelNodeSetParams_v2(C.uintptr_t(x), C.uintptr_t(n),
		C.uintptr_t(uintptr(unsafe.Pointer(params))))
	runtime.KeepAlive(params)
	return result(r)
}

func (l *linked) GraphLaunch(x graphExec, s stream) result {
	return result(C.helios_cuGraphLaunch(C.uintptr_t(x), C.uintptr_t(s)))
}

func (l *linked) GraphExecDestroy(x graphExec) result {
	return result(C.helios_cuGraphExecDestroy(C.uintptr_t(x)))
}

func (l *linked) MemcpyAsync(dst, src devicePtr, n int64, s stream) result {
	return code(cu.MemcpyAsync(cu.DevicePtr(dst), cu.DevicePtr(src), n, view[cu.Stream](s)))
}

func (l *linked) MemsetD8Async(dst devicePtr, value byte, n int64, s stream) result {
	return code(cu.MemsetD8Async(cu.DevicePtr(dst), value, n, view[cu.Stream](s)))
}

func (l *linked) StreamCreateWithPriority(flags uint32, priority int) (stream, result) {
	s, err := cu.MakeStreamWithPriority(priority, cu.StreamFlags(flags))
	return view[stream](s), code(err)
}

func (l *linked) StreamDestroy(s stream) result {
	v := view[cu.Stream](s)
	return code(v.Destroy())
}

func (l *linked) StreamQuery(s stream) result { return code(view[cu.Stream](s).Query()) }

func (l *linked) StreamWaitEvent(s stream, e event, flags uint32) result {
	return code(view[cu.Stream](s).Wait(view[cu.Event](e), uint(flags)))
}

func (l *linked) EventCreate(flags uint32) (event, result) {
	e, err := cu.MakeEvent(cu.EventFlags(flags))
	return view[event](e), code(err)
}

func (l *linked) EventDestroy(e event) result {
	v := view[cu.Event](e)
	return code(cu.DestroyEvent(&v))
}

func (l *linked) EventRecord(e event, s stream) result {
	return code(view[cu.Event](e).Record(view[cu.Stream](s)))
}

func (l *linked) EventQuery(e event) result { return code(view[cu.Event](e).Query()) }

func (l *linked) EventElapsedTime(start, end event) (float32, result) {
	ms, err := view[cu.Event](start).Elapsed(view[cu.Event](end))
	return float32(ms), code(err)
}

func (l *linked) LaunchKernel(f function, blocks, threads, sharedBytes uint32, s stream,
	params *unsafe.Pointer) result {
	r := C.helios_launch(C.uintptr_t(f), C.uint(blocks), C.uint(threads), C.uint(sharedBytes),
		C.uintptr_t(s), C.uintptr_t(uintptr(unsafe.Pointer(params))))
	runtime.KeepAlive(params)
	return result(r)
}

func (l *linked) DeviceGetDevResource(d ordinal, out *devResource, kind uint32) result {
	return result(C.helios_cuDeviceGetDevResource(C.CUdevice(d), unsafe.Pointer(out), C.int(kind)))
}

func (l *linked) DevSmResourceSplitByCount(groups []devResource, input *devResource, flags,
	minSMs uint32) (int, result) {
	n := C.uint(len(groups))
	r := C.helios_cuDevSmResourceSplitByCount(unsafe.Pointer(unsafe.SliceData(groups)), &n,
		unsafe.Pointer(input), nil, C.uint(flags), C.uint(minSMs))
	return int(n), result(r)
}

func (l *linked) DevResourceGenerateDesc(groups []devResource) (resDesc, result) {
	var d resDesc
	r := C.helios_cuDevResourceGenerateDesc(unsafe.Pointer(&d),
		unsafe.Pointer(unsafe.SliceData(groups)), C.uint(len(groups)))
	return d, result(r)
}

func (l *linked) GreenCtxCreate(desc resDesc, d ordinal, flags uint32) (greenCtx, result) {
	var g greenCtx
	r := C.helios_cuGreenCtxCreate(unsafe.Pointer(&g), C.uintptr_t(desc), C.CUdevice(d),
		C.uint(flags))
	return g, result(r)
}

func (l *linked) GreenCtxDestroy(g greenCtx) result {
	return result(C.helios_cuGreenCtxDestroy(C.uintptr_t(g)))
}

func (l *linked) GreenCtxStreamCreate(g greenCtx, flags uint32, priority int) (stream, result) {
	var s stream
	r := C.helios_cuGreenCtxStreamCreate(unsafe.Pointer(&s), C.uintptr_t(g), C.uint(flags),
		C.int(priority))
	return s, result(r)
}

func (l *linked) CtxFromGreenCtx(g greenCtx) (cuContext, result) {
	var c cuContext
	r := C.helios_cuCtxFromGreenCtx(unsafe.Pointer(&c), C.uintptr_t(g))
	return c, result(r)
}
