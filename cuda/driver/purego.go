//go:build linux && (amd64 || arm64) && !nocuda

package driver

import (
	"math"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"

	"helios/internal/dl"
	"helios/internal/errs"
)

// defaultLibrary is the name under which every NVIDIA driver installs libcuda.
const defaultLibrary = "libcuda.so.1"

// pure is the api without cgo: symbols by dlsym, calls by purego.
type pure struct {
	path string
	fn   map[string]uintptr // addresses by symbol
	// the addresses of calls on the path of a launch; 0 is an optional one that is missing
	ctxSetCurrent, launch, memcpy, memset, streamQuery, streamWait uintptr
	eventRecord, eventQuery, eventElapsed, graphSet, graphLaunch   uintptr
}

// loadLibrary loads libcuda. It is never unloaded: the driver has threads of its own.
func loadLibrary(path string) (*pure, error) {
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
	p := &pure{path: name, fn: map[string]uintptr{}}
	var missing []string
	for _, s := range requiredSymbols {
		if p.fn[s], err = dl.Symbol(h, s); err != nil {
			missing = append(missing, s)
		}
	}
	if len(missing) > 0 {
		return nil, errs.New(errs.Capability,
			"CUDA driver %s lacks %s; it is too old or not NVIDIA's: install driver 535 (CUDA 12.2) or later",
			name, strings.Join(missing, ", "))
	}
	for _, s := range optionalSymbols {
		if a, err := dl.Symbol(h, s); err == nil {
			p.fn[s] = a
		}
	}
	for s, to := range map[string]*uintptr{
		"cuCtxSetCurrent": &p.ctxSetCurrent, "cuLaunchKernel": &p.launch,
		"cuMemcpyAsync": &p.memcpy, "cuMemsetD8Async": &p.memset,
		"cuStreamQuery": &p.streamQuery, "cuStreamWaitEvent": &p.streamWait,
		"cuEventRecord": &p.eventRecord, "cuEventQuery": &p.eventQuery,
		"cuEventElapsedTime":                &p.eventElapsed,
		"cuGraphExecKernelNodeSetParams_v2": &p.graphSet, "cuGraphLaunch": &p.graphLaunch,
	} {
		*to = p.fn[s]
	}
	return p, nil
}

// invoke is the one way into the library. Pointers become numbers in its argument list and nowhere
// else, so that what they point to stays alive and in place for the call.
//
//go:uintptrescapes
func invoke(fn uintptr, args ...uintptr) result {
	if fn == 0 {
		return errNotFound
	}
	r, _, _ := purego.SyscallN(fn, args...)
	return result(int32(r)) // CUresult is an int: the upper half of the register is anything
}

// places are words of memory that C writes: 64 bits, of which a call may write the lower half.
var places = sync.Pool{New: func() any { return new(uint64) }}

// out is invoke for a call whose first argument is the place of its result.
//
//go:uintptrescapes
func out(fn uintptr, args ...uintptr) (uint64, result) {
	if fn == 0 {
		return 0, errNotFound
	}
	place := places.Get().(*uint64) // on the heap, and used below
	*place = 0
	r, _, _ := purego.SyscallN(fn, append([]uintptr{uintptr(unsafe.Pointer(place))}, args...)...)
	v := *place
	places.Put(place)
	return v, result(int32(r))
}

// as is a result of out of its own type.
func as[T ~int32 | ~int64 | ~uint64](v uint64, r result) (T, result) { return T(v), r }

// number is a result of out that is a C int.
func number(v uint64, r result) (int, result) { return int(int32(v)), r }

// words are the arguments of a call on the path of a launch: handles and numbers, no Go pointers
// but those that the caller keeps on the heap and alive. invoke makes its argument list on the
// heap, and SyscallN would too; a list that exists already is passed on as it is.
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

func (p *pure) has(symbol string) bool { return p.fn[symbol] != 0 }
func (p *pure) describe() string       { return p.path }

func (p *pure) Init(flags uint32) result { return invoke(p.fn["cuInit"], uintptr(flags)) }

func (p *pure) DriverGetVersion() (int, result) { return number(out(p.fn["cuDriverGetVersion"])) }

func (p *pure) GetErrorName(r result) string   { return p.errorText(p.fn["cuGetErrorName"], r) }
func (p *pure) GetErrorString(r result) string { return p.errorText(p.fn["cuGetErrorString"], r) }

func (p *pure) errorText(fn uintptr, r result) string {
	var s *byte // of the driver's static memory
	if invoke(fn, uintptr(r), uintptr(unsafe.Pointer(&s))) != success || s == nil {
		return ""
	}
	return unix.BytePtrToString(s)
}

func (p *pure) DeviceGetCount() (int, result) { return number(out(p.fn["cuDeviceGetCount"])) }

func (p *pure) DeviceGet(index int) (ordinal, result) {
	return as[ordinal](out(p.fn["cuDeviceGet"], uintptr(index)))
}

func (p *pure) DeviceGetName(d ordinal) (string, result) {
	return deviceText(p.fn["cuDeviceGetName"], d)
}

func (p *pure) DeviceGetPCIBusId(d ordinal) (string, result) {
	return deviceText(p.fn["cuDeviceGetPCIBusId"], d)
}

func (p *pure) DeviceGetUuid(d ordinal) ([16]byte, result) {
	id := new([16]byte)
	r := invoke(p.fn["cuDeviceGetUuid"], uintptr(unsafe.Pointer(id)), uintptr(d))
	return *id, r
}

func deviceText(fn uintptr, d ordinal) (string, result) {
	buf := new([256]byte)
	r := invoke(fn, uintptr(unsafe.Pointer(buf)), uintptr(len(buf)), uintptr(d))
	return unix.ByteSliceToString(buf[:]), r
}

func (p *pure) DeviceTotalMem(d ordinal) (int64, result) {
	return as[int64](out(p.fn["cuDeviceTotalMem_v2"], uintptr(d)))
}

func (p *pure) DeviceGetAttribute(a attribute, d ordinal) (int, result) {
	return number(out(p.fn["cuDeviceGetAttribute"], uintptr(a), uintptr(d)))
}

func (p *pure) DevicePrimaryCtxRetain(d ordinal) (cuContext, result) {
	return as[cuContext](out(p.fn["cuDevicePrimaryCtxRetain"], uintptr(d)))
}

func (p *pure) DevicePrimaryCtxRelease(d ordinal) result {
	return invoke(p.fn["cuDevicePrimaryCtxRelease_v2"], uintptr(d))
}

func (p *pure) CtxSetCurrent(c cuContext) result {
	return plain(p.ctxSetCurrent, 1, words{uintptr(c)})
}

func (p *pure) CtxGetStreamPriorityRange() (least, greatest int, r result) {
	var a, b int32
	r = invoke(p.fn["cuCtxGetStreamPriorityRange"], uintptr(unsafe.Pointer(&a)),
		uintptr(unsafe.Pointer(&b)))
	return int(a), int(b), r
}

// jitLogBytes is room for what the compiler says of one module.
const jitLogBytes = 16 << 10

func (p *pure) ModuleLoadDataEx(image []byte, log *jitLog) (module, result) {
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
	m, r := out(p.fn["cuModuleLoadDataEx"], uintptr(unsafe.Pointer(unsafe.SliceData(image))),
		uintptr(len(options)), uintptr(unsafe.Pointer(options)), uintptr(unsafe.Pointer(values)))
	if log != nil {
		log.Info, log.Error = unix.ByteSliceToString(info[:]), unix.ByteSliceToString(text[:])
	}
	return module(m), r
}

func (p *pure) ModuleUnload(m module) result { return invoke(p.fn["cuModuleUnload"], uintptr(m)) }

func (p *pure) ModuleGetFunction(m module, name string) (function, result) {
	c := append([]byte(name), 0)
	return as[function](out(p.fn["cuModuleGetFunction"], uintptr(m),
		uintptr(unsafe.Pointer(unsafe.SliceData(c)))))
}

func (p *pure) LibraryLoadData(image []byte) (library, result) {
	return as[library](out(p.fn["cuLibraryLoadData"],
		uintptr(unsafe.Pointer(unsafe.SliceData(image))), 0, 0, 0, 0, 0, 0))
}

func (p *pure) LibraryUnload(l library) result {
	return invoke(p.fn["cuLibraryUnload"], uintptr(l))
}

func (p *pure) LibraryGetKernel(l library, name string) (function, result) {
	c := append([]byte(name), 0)
	return as[function](out(p.fn["cuLibraryGetKernel"], uintptr(l),
		uintptr(unsafe.Pointer(unsafe.SliceData(c)))))
}

func (p *pure) FuncGetAttribute(a funcAttribute, f function) (int, result) {
	return number(out(p.fn["cuFuncGetAttribute"], uintptr(a), uintptr(f)))
}

func (p *pure) FuncGetParamInfo(f function, index int) (offset, size int, r result) {
	var o, s uint64
	r = invoke(p.fn["cuFuncGetParamInfo"], uintptr(f), uintptr(index), uintptr(unsafe.Pointer(&o)),
		uintptr(unsafe.Pointer(&s)))
	return int(o), int(s), r
}

func (p *pure) MemGetInfo() (free, total int64, r result) {
	var f, t uint64
	r = invoke(p.fn["cuMemGetInfo_v2"], uintptr(unsafe.Pointer(&f)), uintptr(unsafe.Pointer(&t)))
	return int64(f), int64(t), r
}

func (p *pure) MemAlloc(n int64) (devicePtr, result) {
	return as[devicePtr](out(p.fn["cuMemAlloc_v2"], uintptr(n)))
}

func (p *pure) MemFree(a devicePtr) result { return invoke(p.fn["cuMemFree_v2"], uintptr(a)) }

func (p *pure) MemHostRegister(m unsafe.Pointer, n int64, flags uint32) result {
	return invoke(p.fn["cuMemHostRegister_v2"], uintptr(m), uintptr(n), uintptr(flags))
}

func (p *pure) MemHostUnregister(m unsafe.Pointer) result {
	return invoke(p.fn["cuMemHostUnregister"], uintptr(m))
}

func (p *pure) MemHostGetDevicePointer(m unsafe.Pointer) (devicePtr, result) {
	return as[devicePtr](out(p.fn["cuMemHostGetDevicePointer_v2"], uintptr(m), 0))
}

func (p *pure) MemGetHandleForAddressRange(a devicePtr, n int64, handleType uint32,
	flags uint64) (int32, result) {
	return as[int32](out(p.fn["cuMemGetHandleForAddressRange"], uintptr(a), uintptr(n),
		uintptr(handleType), uintptr(flags)))
}

func (p *pure) MemGetAllocationGranularity(prop *memProp, option int32) (int64, result) {
	return as[int64](out(p.fn["cuMemGetAllocationGranularity"], uintptr(unsafe.Pointer(prop)),
		uintptr(option)))
}

func (p *pure) MemAddressReserve(n, alignment int64) (devicePtr, result) {
	return as[devicePtr](out(p.fn["cuMemAddressReserve"], uintptr(n), uintptr(alignment), 0, 0))
}

func (p *pure) MemAddressFree(a devicePtr, n int64) result {
	return invoke(p.fn["cuMemAddressFree"], uintptr(a), uintptr(n))
}

func (p *pure) MemCreate(n int64, prop *memProp) (memHandle, result) {
	return as[memHandle](out(p.fn["cuMemCreate"], uintptr(n), uintptr(unsafe.Pointer(prop)), 0))
}

func (p *pure) MemRelease(h memHandle) result { return invoke(p.fn["cuMemRelease"], uintptr(h)) }

func (p *pure) MemMap(a devicePtr, n int64, h memHandle) result {
	return invoke(p.fn["cuMemMap"], uintptr(a), uintptr(n), 0, uintptr(h), 0)
}

func (p *pure) MemUnmap(a devicePtr, n int64) result {
	return invoke(p.fn["cuMemUnmap"], uintptr(a), uintptr(n))
}

func (p *pure) MemSetAccess(a devicePtr, n int64, access *memAccess) result {
	return invoke(p.fn["cuMemSetAccess"], uintptr(a), uintptr(n), uintptr(unsafe.Pointer(access)), 1)
}

func (p *pure) MemExportToShareableHandle(h memHandle, handleType int32) (int32, result) {
	return as[int32](out(p.fn["cuMemExportToShareableHandle"], uintptr(h), uintptr(handleType), 0))
}

func (p *pure) GraphCreate() (graph, result) { return as[graph](out(p.fn["cuGraphCreate"], 0)) }

func (p *pure) GraphDestroy(g graph) result { return invoke(p.fn["cuGraphDestroy"], uintptr(g)) }

func (p *pure) GraphAddKernelNode(g graph, after graphNode, params *nodeParams) (graphNode,
	result) {
	deps := uintptr(1)
	if after == 0 {
		deps = 0
	}
	return as[graphNode](out(p.fn["cuGraphAddKernelNode_v2"], uintptr(g),
		uintptr(unsafe.Pointer(&after)), deps, uintptr(unsafe.Pointer(params))))
}

func (p *pure) GraphInstantiate(g graph) (graphExec, result) {
	return as[graphExec](out(p.fn["cuGraphInstantiateWithFlags"], uintptr(g), 0))
}

func (p *pure) GraphExecKernelNodeSetParams(x graphExec, n graphNode, params *nodeParams) result {
	r := plain(p.graphSet, 3, words{uintptr(x), uintptr(n), uintptr(unsafe.Pointer(params))})
	runtime.KeepAlive(params)
	return r
}

func (p *pure) GraphLaunch(x graphExec, s stream) result {
	return plain(p.graphLaunch, 2, words{uintptr(x), uintptr(s)})
}

func (p *pure) GraphExecDestroy(x graphExec) result {
	return invoke(p.fn["cuGraphExecDestroy"], uintptr(x))
}

func (p *pure) MemcpyAsync(dst, src devicePtr, n int64, s stream) result {
	return plain(p.memcpy, 4, words{uintptr(dst), uintptr(src), uintptr(n), uintptr(s)})
}

func (p *pure) MemsetD8Async(dst devicePtr, value byte, n int64, s stream) result {
	return plain(p.memset, 4, words{uintptr(dst), uintptr(value), uintptr(n), uintptr(s)})
}

func (p *pure) StreamCreateWithPriority(flags uint32, priority int) (stream, result) {
	return as[stream](out(p.fn["cuStreamCreateWithPriority"], uintptr(flags),
		uintptr(uint32(int32(priority)))))
}

func (p *pure) StreamDestroy(s stream) result {
	return invoke(p.fn["cuStreamDestroy_v2"], uintptr(s))
}

func (p *pure) StreamQuery(s stream) result { return plain(p.streamQuery, 1, words{uintptr(s)}) }

func (p *pure) StreamWaitEvent(s stream, e event, flags uint32) result {
	return plain(p.streamWait, 3, words{uintptr(s), uintptr(e), uintptr(flags)})
}

func (p *pure) EventCreate(flags uint32) (event, result) {
	return as[event](out(p.fn["cuEventCreate"], uintptr(flags)))
}

func (p *pure) EventDestroy(e event) result { return invoke(p.fn["cuEventDestroy_v2"], uintptr(e)) }

func (p *pure) EventRecord(e event, s stream) result {
	return plain(p.eventRecord, 2, words{uintptr(e), uintptr(s)})
}

func (p *pure) EventQuery(e event) result { return plain(p.eventQuery, 1, words{uintptr(e)}) }

func (p *pure) EventElapsedTime(start, end event) (float32, result) {
	place := places.Get().(*uint64) // on the heap, and used below
	r := plain(p.eventElapsed, 3, words{uintptr(unsafe.Pointer(place)), uintptr(start),
		uintptr(end)})
	ms := math.Float32frombits(uint32(*place))
	places.Put(place)
	return ms, r
}

func (p *pure) LaunchKernel(f function, blocks, threads, sharedBytes uint32, s stream,
	params *unsafe.Pointer) result {
	r := plain(p.launch, 11, words{uintptr(f), uintptr(blocks), 1, 1, uintptr(threads), 1, 1,
		uintptr(sharedBytes), uintptr(s), uintptr(unsafe.Pointer(params)), 0})
	runtime.KeepAlive(params)
	return r
}

func (p *pure) DeviceGetDevResource(d ordinal, out *devResource, kind uint32) result {
	return invoke(p.fn["cuDeviceGetDevResource"], uintptr(d), uintptr(unsafe.Pointer(out)),
		uintptr(kind))
}

func (p *pure) DevSmResourceSplitByCount(groups []devResource, input *devResource, flags,
	minSMs uint32) (int, result) {
	n := uint32(len(groups))
	r := invoke(p.fn["cuDevSmResourceSplitByCount"], uintptr(unsafe.Pointer(unsafe.SliceData(groups))),
		uintptr(unsafe.Pointer(&n)), uintptr(unsafe.Pointer(input)), 0, uintptr(flags),
		uintptr(minSMs))
	return int(n), r
}

func (p *pure) DevResourceGenerateDesc(groups []devResource) (resDesc, result) {
	return as[resDesc](out(p.fn["cuDevResourceGenerateDesc"],
		uintptr(unsafe.Pointer(unsafe.SliceData(groups))), uintptr(len(groups))))
}

func (p *pure) GreenCtxCreate(desc resDesc, d ordinal, flags uint32) (greenCtx, result) {
	return as[greenCtx](out(p.fn["cuGreenCtxCreate"], uintptr(desc), uintptr(d), uintptr(flags)))
}

func (p *pure) GreenCtxDestroy(g greenCtx) result {
	return invoke(p.fn["cuGreenCtxDestroy"], uintptr(g))
}

func (p *pure) GreenCtxStreamCreate(g greenCtx, flags uint32, priority int) (stream, result) {
	return as[stream](out(p.fn["cuGreenCtxStreamCreate"], uintptr(g), uintptr(flags),
		uintptr(uint32(int32(priority)))))
}

func (p *pure) CtxFromGreenCtx(g greenCtx) (cuContext, result) {
	return as[cuContext](out(p.fn["cuCtxFromGreenCtx"], uintptr(g)))
}
