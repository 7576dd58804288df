//go:build linux && (amd64 || arm64) && !nocuda && !gorgonia

package driver

import (
	"bytes"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"helios/internal/dl"
	"helios/internal/errs"
)

// Binding names this build's way to call libcuda: "purego", "gorgonia", or "" for none.
const Binding = "purego"

// defaultLibrary is the name under which every NVIDIA driver installs libcuda.
const defaultLibrary = "libcuda.so.1"

// pure is the api without cgo: symbols by dlsym, calls by purego.
//
// Large: a method for each call of the CUDA driver API that is used.
type pure struct {
	path string
	has_ map[string]bool
	fn   entryPoints
}

// entryPoints are the addresses of the calls; 0 is an optional one that is missing.
//
// Large: a field for each call of the CUDA driver API that is used.
type entryPoints struct {
	init, driverGetVersion, getErrorName,
	getErrorString uintptr
	deviceGetCount, deviceGet, deviceGetName, deviceGetPCIBusID, deviceTotalMem,
	deviceGetAttr uintptr
	ctxRetain, ctxRelease, ctxSetCurrent,
	ctxPriorities uintptr
	moduleLoad, moduleUnload, moduleFunction, funcAttr,
	funcParam uintptr
	libraryLoad, libraryUnload,
	libraryKernel uintptr
	memInfo, memAlloc, memFree, hostRegister, hostUnregister, hostPointer,
	memHandle uintptr
	memcpy,
	memset uintptr
	streamCreate, streamDestroy, streamQuery,
	streamWait uintptr
	eventCreate, eventDestroy, eventRecord, eventQuery,
	eventElapsed uintptr
	launch uintptr
	vmGranularity, vmReserve, vmFree, vmCreate, vmRelease, vmMap, vmUnmap,
	vmAccess, vmExport uintptr
	graphCreate, graphDestroy, graphNode, graphMake, graphSet, graphLaunch,
	graphDrop uintptr
	devResource, smSplit, resDesc, greenCreate, greenDestroy, greenStream,
	greenCtx uintptr
}

func (f *entryPoints) table() map[string]*uintptr {
	return map[string]*uintptr{
		"cuInit": &f.init, "cuDriverGetVersion": &f.driverGetVersion,
		"cuGetErrorName": &f.getErrorName, "cuGetErrorString": &f.getErrorString,
		"cuDeviceGetCount": &f.deviceGetCount, "cuDeviceGet": &f.deviceGet,
		"cuDeviceGetName":     &f.deviceGetName,
		"cuDeviceGetPCIBusId": &f.deviceGetPCIBusID, "cuDeviceTotalMem_v2": &f.deviceTotalMem,
		"cuDeviceGetAttribute":     &f.deviceGetAttr,
		"cuDevicePrimaryCtxRetain": &f.ctxRetain, "cuDevicePrimaryCtxRelease_v2": &f.ctxRelease,
		"cuCtxSetCurrent": &f.ctxSetCurrent, "cuCtxGetStreamPriorityRange": &f.ctxPriorities,
		"cuModuleLoadDataEx": &f.moduleLoad, "cuModuleUnload": &f.moduleUnload,
		"cuModuleGetFunction": &f.moduleFunction,
		"cuFuncGetAttribute":  &f.funcAttr, "cuFuncGetParamInfo": &f.funcParam,
		"cuLibraryLoadData": &f.libraryLoad, "cuLibraryUnload": &f.libraryUnload,
		"cuLibraryGetKernel": &f.libraryKernel,
		"cuMemGetInfo_v2":    &f.memInfo, "cuMemAlloc_v2": &f.memAlloc, "cuMemFree_v2": &f.memFree,
		"cuMemHostRegister_v2": &f.hostRegister, "cuMemHostUnregister": &f.hostUnregister,
		"cuMemHostGetDevicePointer_v2":  &f.hostPointer,
		"cuMemGetHandleForAddressRange": &f.memHandle,
		"cuMemcpyAsync":                 &f.memcpy, "cuMemsetD8Async": &f.memset,
		"cuStreamCreateWithPriority": &f.streamCreate, "cuStreamDestroy_v2": &f.streamDestroy,
		"cuStreamQuery": &f.streamQuery, "cuStreamWaitEvent": &f.streamWait,
		"cuEventCreate": &f.eventCreate, "cuEventDestroy_v2": &f.eventDestroy,
		"cuEventRecord": &f.eventRecord,
		"cuEventQuery":  &f.eventQuery, "cuEventElapsedTime": &f.eventElapsed,
		"cuMemGetAllocationGranularity": &f.vmGranularity, "cuMemAddressReserve": &f.vmReserve,
		"cuMemAddressFree": &f.vmFree,
		"cuMemCreate":      &f.vmCreate, "cuMemRelease": &f.vmRelease, "cuMemMap": &f.vmMap,
		"cuMemUnmap": &f.vmUnmap, "cuMemSetAccess": &f.vmAccess,
		"cuMemExportToShareableHandle": &f.vmExport,
		"cuGraphCreate":                &f.graphCreate, "cuGraphDestroy": &f.graphDestroy,
		"cuGraphAddKernelNode_v2":           &f.graphNode,
		"cuGraphInstantiateWithFlags":       &f.graphMake,
		"cuGraphExecKernelNodeSetParams_v2": &f.graphSet, "cuGraphLaunch": &f.graphLaunch,
		"cuGraphExecDestroy":     &f.graphDrop,
		"cuLaunchKernel":         &f.launch,
		"cuDeviceGetDevResource": &f.devResource, "cuDevSmResourceSplitByCount": &f.smSplit,
		"cuDevResourceGenerateDesc": &f.resDesc,
		"cuGreenCtxCreate":          &f.greenCreate, "cuGreenCtxDestroy": &f.greenDestroy,
		"cuGreenCtxStreamCreate": &f.greenStream, "cuCtxFromGreenCtx": &f.greenCtx,
	}
}

// openLibrary loads libcuda. It is never unloaded: the driver has threads of its own.
func openLibrary(path string) (api, error) {
	name := path
	if name == "" {
		name = defaultLibrary
	}
	h, err := dl.Open(name)
	if err != nil {
		return nil, errs.New(errs.Capability,
			"%w: %w; install NVIDIA's driver, or in a container pass the GPU in (it brings %s)",
			ErrNoDriver, err, defaultLibrary)
	}
	p := &pure{path: name, has_: map[string]bool{}}
	table := p.fn.table()
	var missing []string
	for _, s := range requiredSymbols {
		if *table[s], err = dl.Symbol(h, s); err != nil {
			missing = append(missing, s)
		}
		p.has_[s] = err == nil
	}
	if len(missing) > 0 {
		return nil, errs.New(errs.Capability,
			"CUDA driver %s lacks %s; it is too old or not NVIDIA's: install driver 535 (CUDA 12.2) or later",
			name, strings.Join(missing, ", "))
	}
	for _, s := range optionalSymbols {
		a, err := dl.Symbol(h, s)
		if err == nil {
			*table[s] = a
		}
		p.has_[s] = err == nil
	}
	return p, nil
}

// cu is the one way into the library. Pointers become numbers in its argument list and nowhere
// else, so that what they point to stays alive and in place for the call.
//
//go:uintptrescapes
func cu(fn uintptr, args ...uintptr) result {
	if fn == 0 {
		return errNotFound
	}
	r, _, _ := purego.SyscallN(fn, args...)
	return result(int32(r)) // CUresult is an int: the upper half of the register is anything
}

// words are the arguments of a call on the path of a launch: handles and numbers, no Go pointers
// but those that the caller keeps on the heap and alive. cu makes its argument list on the heap,
// and SyscallN would too; a list that exists already is passed on as it is.
type words [11]uintptr

var wordLists = sync.Pool{New: func() any { return new(words) }}

func plain(fn uintptr, n int, w words) result {
	if fn == 0 {
		return errNotFound
	}
	l := wordLists.Get().(*words)
	*l = w
	r, _, _ := purego.SyscallN(fn, l[:n]...)
	wordLists.Put(l)
	return result(int32(r))
}

func (p *pure) has(symbol string) bool { return p.has_[symbol] }
func (p *pure) describe() string       { return p.path }

func (p *pure) Init(flags uint32) result { return cu(p.fn.init, uintptr(flags)) }

func (p *pure) DriverGetVersion() (int, result) {
	var v int32
	r := cu(p.fn.driverGetVersion, uintptr(unsafe.Pointer(&v)))
	return int(v), r
}

func (p *pure) GetErrorName(r result) string   { return p.errorText(p.fn.getErrorName, r) }
func (p *pure) GetErrorString(r result) string { return p.errorText(p.fn.getErrorString, r) }

func (p *pure) errorText(fn uintptr, r result) string {
	var s *byte // of the driver's static memory
	if cu(fn, uintptr(r), uintptr(unsafe.Pointer(&s))) != success || s == nil {
		return ""
	}
	const limit = 1 << 10
	b := unsafe.Slice(s, limit)
	for i := range limit {
		if b[i] == 0 {
			return string(b[:i])
		}
	}
	return ""
}

func (p *pure) DeviceGetCount() (int, result) {
	var n int32
	r := cu(p.fn.deviceGetCount, uintptr(unsafe.Pointer(&n)))
	return int(n), r
}

func (p *pure) DeviceGet(index int) (ordinal, result) {
	var d ordinal
	r := cu(p.fn.deviceGet, uintptr(unsafe.Pointer(&d)), uintptr(index))
	return d, r
}

func (p *pure) DeviceGetName(d ordinal) (string,
	result) {
	return deviceText(p.fn.deviceGetName, d)
}
func (p *pure) DeviceGetPCIBusId(d ordinal) (string, result) {
	return deviceText(p.fn.deviceGetPCIBusID, d)
}

func deviceText(fn uintptr, d ordinal) (string, result) {
	buf := new([256]byte)
	r := cu(fn, uintptr(unsafe.Pointer(buf)), uintptr(len(buf)), uintptr(d))
	return cString(buf[:]), r
}

func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

func (p *pure) DeviceTotalMem(d ordinal) (int64, result) {
	var n uint64
	r := cu(p.fn.deviceTotalMem, uintptr(unsafe.Pointer(&n)), uintptr(d))
	return int64(n), r
}

func (p *pure) DeviceGetAttribute(a attribute, d ordinal) (int, result) {
	var v int32
	r := cu(p.fn.deviceGetAttr, uintptr(unsafe.Pointer(&v)), uintptr(a), uintptr(d))
	return int(v), r
}

func (p *pure) DevicePrimaryCtxRetain(d ordinal) (cuContext, result) {
	var c cuContext
	r := cu(p.fn.ctxRetain, uintptr(unsafe.Pointer(&c)), uintptr(d))
	return c, r
}

func (p *pure) DevicePrimaryCtxRelease(d ordinal) result { return cu(p.fn.ctxRelease, uintptr(d)) }
func (p *pure) CtxSetCurrent(c cuContext) result {
	return plain(p.fn.ctxSetCurrent, 1, words{uintptr(c)})
}

func (p *pure) CtxGetStreamPriorityRange() (least, greatest int, r result) {
	var a, b int32
	r = cu(p.fn.ctxPriorities, uintptr(unsafe.Pointer(&a)), uintptr(unsafe.Pointer(&b)))
	return int(a), int(b), r
}

// jitLogBytes is room for what the compiler says of one module.
const jitLogBytes = 16 << 10

func (p *pure) ModuleLoadDataEx(image []byte, log *jitLog) (module, result) {
	var m module
	info, text := new([jitLogBytes]byte), new([jitLogBytes]byte)
	options := &[4]int32{jitInfoLog, jitInfoLogBytes, jitErrorLog, jitErrorLogBytes}
	// Each value is a void*; sizes are numbers cast to it. The buffers' addresses stand here as
	// numbers, and pins keep them valid: the helper only covers what is in its own arguments.
	var pins runtime.Pinner
	defer pins.Unpin()
	pins.Pin(info)
	pins.Pin(text)
	values := &[4]uintptr{uintptr(unsafe.Pointer(info)), jitLogBytes - 1,
		uintptr(unsafe.Pointer(text)), jitLogBytes - 1}
	r := cu(p.fn.moduleLoad, uintptr(unsafe.Pointer(&m)),
		uintptr(unsafe.Pointer(unsafe.SliceData(image))),
		uintptr(len(options)), uintptr(unsafe.Pointer(options)), uintptr(unsafe.Pointer(values)))
	if log != nil {
		log.Info, log.Error = cString(info[:]), cString(text[:])
	}
	return m, r
}

func (p *pure) ModuleUnload(m module) result { return cu(p.fn.moduleUnload, uintptr(m)) }

func (p *pure) ModuleGetFunction(m module, name string) (function, result) {
	var f function
	c := append([]byte(name), 0)
	r := cu(p.fn.moduleFunction, uintptr(unsafe.Pointer(&f)), uintptr(m),
		uintptr(unsafe.Pointer(unsafe.SliceData(c))))
	return f, r
}

func (p *pure) LibraryLoadData(image []byte) (library, result) {
	var l library
	r := cu(p.fn.libraryLoad, uintptr(unsafe.Pointer(&l)),
		uintptr(unsafe.Pointer(unsafe.SliceData(image))), 0, 0, 0, 0, 0, 0)
	return l, r
}

func (p *pure) LibraryUnload(l library) result { return cu(p.fn.libraryUnload, uintptr(l)) }

func (p *pure) LibraryGetKernel(l library, name string) (function, result) {
	var f function
	c := append([]byte(name), 0)
	r := cu(p.fn.libraryKernel, uintptr(unsafe.Pointer(&f)), uintptr(l),
		uintptr(unsafe.Pointer(unsafe.SliceData(c))))
	return f, r
}

func (p *pure) FuncGetAttribute(a funcAttribute, f function) (int, result) {
	var v int32
	r := cu(p.fn.funcAttr, uintptr(unsafe.Pointer(&v)), uintptr(a), uintptr(f))
	return int(v), r
}

func (p *pure) FuncGetParamInfo(f function, index int) (offset, size int, r result) {
	var o, s uint64
	r = cu(p.fn.funcParam, uintptr(f), uintptr(index), uintptr(unsafe.Pointer(&o)),
		uintptr(unsafe.Pointer(&s)))
	return int(o), int(s), r
}

func (p *pure) MemGetInfo() (free, total int64, r result) {
	var f, t uint64
	r = cu(p.fn.memInfo, uintptr(unsafe.Pointer(&f)), uintptr(unsafe.Pointer(&t)))
	return int64(f), int64(t), r
}

func (p *pure) MemAlloc(n int64) (devicePtr, result) {
	var a devicePtr
	r := cu(p.fn.memAlloc, uintptr(unsafe.Pointer(&a)), uintptr(n))
	return a, r
}

func (p *pure) MemFree(a devicePtr) result { return cu(p.fn.memFree, uintptr(a)) }

func (p *pure) MemHostRegister(m unsafe.Pointer, n int64, flags uint32) result {
	return cu(p.fn.hostRegister, uintptr(m), uintptr(n), uintptr(flags))
}

func (p *pure) MemHostUnregister(m unsafe.Pointer) result {
	return cu(p.fn.hostUnregister, uintptr(m))
}

func (p *pure) MemHostGetDevicePointer(m unsafe.Pointer) (devicePtr, result) {
	var a devicePtr
	r := cu(p.fn.hostPointer, uintptr(unsafe.Pointer(&a)), uintptr(m), 0)
	return a, r
}

func (p *pure) MemGetHandleForAddressRange(a devicePtr, n int64, handleType uint32,
	flags uint64) (int32, result) {
	fd := int32(-1)
	r := cu(p.fn.memHandle, uintptr(unsafe.Pointer(&fd)), uintptr(a), uintptr(n),
		uintptr(handleType), uintptr(flags))
	return fd, r
}

func (p *pure) MemGetAllocationGranularity(prop *memProp, option int32) (int64, result) {
	var n uint64
	r := cu(p.fn.vmGranularity, uintptr(unsafe.Pointer(&n)), uintptr(unsafe.Pointer(prop)),
		uintptr(option))
	return int64(n), r
}

func (p *pure) MemAddressReserve(n, alignment int64) (devicePtr, result) {
	var a devicePtr
	r := cu(p.fn.vmReserve, uintptr(unsafe.Pointer(&a)), uintptr(n), uintptr(alignment), 0, 0)
	return a, r
}

func (p *pure) MemAddressFree(a devicePtr, n int64) result {
	return cu(p.fn.vmFree, uintptr(a), uintptr(n))
}

func (p *pure) MemCreate(n int64, prop *memProp) (memHandle, result) {
	var h memHandle
	r := cu(p.fn.vmCreate, uintptr(unsafe.Pointer(&h)), uintptr(n),
		uintptr(unsafe.Pointer(prop)), 0)
	return h, r
}

func (p *pure) MemRelease(h memHandle) result { return cu(p.fn.vmRelease, uintptr(h)) }

func (p *pure) MemMap(a devicePtr, n int64, h memHandle) result {
	return cu(p.fn.vmMap, uintptr(a), uintptr(n), 0, uintptr(h), 0)
}

func (p *pure) MemUnmap(a devicePtr, n int64) result {
	return cu(p.fn.vmUnmap, uintptr(a), uintptr(n))
}

func (p *pure) MemSetAccess(a devicePtr, n int64, access *memAccess) result {
	return cu(p.fn.vmAccess, uintptr(a), uintptr(n), uintptr(unsafe.Pointer(access)), 1)
}

func (p *pure) MemExportToShareableHandle(h memHandle, handleType int32) (int32, result) {
	fd := int32(-1)
	r := cu(p.fn.vmExport, uintptr(unsafe.Pointer(&fd)), uintptr(h), uintptr(handleType), 0)
	return fd, r
}

func (p *pure) GraphCreate() (graph, result) {
	var g graph
	r := cu(p.fn.graphCreate, uintptr(unsafe.Pointer(&g)), 0)
	return g, r
}

func (p *pure) GraphDestroy(g graph) result { return cu(p.fn.graphDestroy, uintptr(g)) }

func (p *pure) GraphAddKernelNode(g graph, after graphNode, params *nodeParams) (graphNode,
	result) {
	var n graphNode
	deps := uintptr(1)
	if after == 0 {
		deps = 0
	}
	r := cu(p.fn.graphNode, uintptr(unsafe.Pointer(&n)), uintptr(g),
		uintptr(unsafe.Pointer(&after)), deps, uintptr(unsafe.Pointer(params)))
	return n, r
}

func (p *pure) GraphInstantiate(g graph) (graphExec, result) {
	var x graphExec
	r := cu(p.fn.graphMake, uintptr(unsafe.Pointer(&x)), uintptr(g), 0)
	return x, r
}

func (p *pure) GraphExecKernelNodeSetParams(x graphExec, n graphNode, params *nodeParams) result {
	r := plain(p.fn.graphSet, 3, words{uintptr(x), uintptr(n), uintptr(unsafe.Pointer(params))})
	runtime.KeepAlive(params)
	return r
}

func (p *pure) GraphLaunch(x graphExec, s stream) result {
	return plain(p.fn.graphLaunch, 2, words{uintptr(x), uintptr(s)})
}

func (p *pure) GraphExecDestroy(x graphExec) result { return cu(p.fn.graphDrop, uintptr(x)) }

func (p *pure) MemcpyAsync(dst, src devicePtr, n int64, s stream) result {
	return plain(p.fn.memcpy, 4, words{uintptr(dst), uintptr(src), uintptr(n), uintptr(s)})
}

func (p *pure) MemsetD8Async(dst devicePtr, value byte, n int64, s stream) result {
	return plain(p.fn.memset, 4, words{uintptr(dst), uintptr(value), uintptr(n), uintptr(s)})
}

func (p *pure) StreamCreateWithPriority(flags uint32, priority int) (stream, result) {
	var s stream
	r := cu(p.fn.streamCreate, uintptr(unsafe.Pointer(&s)), uintptr(flags),
		uintptr(uint32(int32(priority))))
	return s, r
}

func (p *pure) StreamDestroy(s stream) result { return cu(p.fn.streamDestroy, uintptr(s)) }
func (p *pure) StreamQuery(
	s stream) result {
	return plain(p.fn.streamQuery, 1, words{uintptr(s)})
}

func (p *pure) StreamWaitEvent(s stream, e event, flags uint32) result {
	return plain(p.fn.streamWait, 3, words{uintptr(s), uintptr(e), uintptr(flags)})
}

func (p *pure) EventCreate(flags uint32) (event, result) {
	var e event
	r := cu(p.fn.eventCreate, uintptr(unsafe.Pointer(&e)), uintptr(flags))
	return e, r
}

func (p *pure) EventDestroy(e event) result { return cu(p.fn.eventDestroy, uintptr(e)) }

func (p *pure) EventRecord(e event, s stream) result {
	return plain(p.fn.eventRecord, 2, words{uintptr(e), uintptr(s)})
}

func (p *pure) EventQuery(e event) result { return plain(p.fn.eventQuery, 1, words{uintptr(e)}) }

// floats are places for a float that C writes. A variable would be a heap object of each call, and
// this one is made for every launch.
var floats = sync.Pool{New: func() any { return new(float32) }}

func (p *pure) EventElapsedTime(start, end event) (float32, result) {
	f := floats.Get().(*float32)
	// f is on the heap, and lives to the end
	r := plain(p.fn.eventElapsed, 3, words{uintptr(unsafe.Pointer(f)), uintptr(start),
		uintptr(end)})
	ms := *f
	floats.Put(f)
	return ms, r
}

func (p *pure) LaunchKernel(f function, blocks, threads, sharedBytes uint32, s stream,
	params *unsafe.Pointer) result {
	r := plain(p.fn.launch, 11, words{uintptr(f), uintptr(blocks), 1, 1, uintptr(threads), 1, 1,
		uintptr(sharedBytes), uintptr(s), uintptr(unsafe.Pointer(params)), 0})
	runtime.KeepAlive(params)
	return r
}

func (p *pure) DeviceGetDevResource(d ordinal, out *devResource, kind uint32) result {
	return cu(p.fn.devResource, uintptr(d), uintptr(unsafe.Pointer(out)), uintptr(kind))
}

func (p *pure) DevSmResourceSplitByCount(groups []devResource, input *devResource, flags,
	minSMs uint32) (int, result) {
	n := uint32(len(groups))
	r := cu(p.fn.smSplit, uintptr(unsafe.Pointer(unsafe.SliceData(groups))),
		uintptr(unsafe.Pointer(&n)),
		uintptr(unsafe.Pointer(input)), 0, uintptr(flags), uintptr(minSMs))
	return int(n), r
}

func (p *pure) DevResourceGenerateDesc(groups []devResource) (resDesc, result) {
	var d resDesc
	r := cu(p.fn.resDesc, uintptr(unsafe.Pointer(&d)),
		uintptr(unsafe.Pointer(unsafe.SliceData(groups))), uintptr(len(groups)))
	return d, r
}

func (p *pure) GreenCtxCreate(desc resDesc, d ordinal, flags uint32) (greenCtx, result) {
	var g greenCtx
	r := cu(p.fn.greenCreate, uintptr(unsafe.Pointer(&g)), uintptr(desc), uintptr(d),
		uintptr(flags))
	return g, r
}

func (p *pure) GreenCtxDestroy(g greenCtx) result { return cu(p.fn.greenDestroy, uintptr(g)) }

func (p *pure) GreenCtxStreamCreate(g greenCtx, flags uint32, priority int) (stream, result) {
	var s stream
	r := cu(p.fn.greenStream, uintptr(unsafe.Pointer(&s)), uintptr(g), uintptr(flags),
		uintptr(uint32(int32(priority))))
	return s, r
}

func (p *pure) CtxFromGreenCtx(g greenCtx) (cuContext, result) {
	var c cuContext
	r := cu(p.fn.greenCtx, uintptr(unsafe.Pointer(&c)), uintptr(g))
	return c, r
}
