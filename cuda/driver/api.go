// Package driver is the compute device on NVIDIA's driver, libcuda, which it opens at run time: the
// same binary runs where there is none and says so.
//
// Three layers. An api is libcuda's calls, one method for each (purego.go, or gorgonia.go with
// -tags gorgonia). Device, stream and event make cuda.Device of them and never touch the library
// but through an api. The kernels come as PTX from cuda/kernels and are compiled by the driver.
package driver

import (
	"slices"
	"unsafe"
)

// Handles of libcuda. All are opaque but devicePtr, which is an address in the process's one
// (unified) address space.
type (
	result    int32  // CUresult
	ordinal   int32  // CUdevice
	cuContext uint64 // CUcontext
	module    uint64 // CUmodule
	library   uint64 // CUlibrary
	function  uint64 // CUfunction, or CUkernel where a launch takes either
	stream    uint64 // CUstream
	event     uint64 // CUevent
	greenCtx  uint64 // CUgreenCtx
	resDesc   uint64 // CUdevResourceDesc
	devicePtr uint64 // CUdeviceptr
	memHandle uint64 // CUmemGenericAllocationHandle
	graph     uint64 // CUgraph
	graphNode uint64 // CUgraphNode
	graphExec uint64 // CUgraphExec
)

// devResource is CUdevResource of RESOURCE_ABI_VERSION 1: a type, space of the driver's own and a
// union of which SMs, the count of an SM resource, is the first word.
type devResource struct {
	Type uint32
	_    [92]byte
	SMs  uint32
	_    [44]byte
}

const _ = -(unsafe.Sizeof(devResource{}) ^ 144)
const _ = -(unsafe.Offsetof(devResource{}.SMs) ^ 96)

// memLocation is CUmemLocation.
type memLocation struct {
	Type, ID int32
}

// memProp is CUmemAllocationProp.
type memProp struct {
	Type, HandleTypes int32
	Location          memLocation
	Win32             uint64
	Compression, RDMA uint8
	Usage             uint16
	_                 [4]byte
}

// memAccess is CUmemAccessDesc.
type memAccess struct {
	Location memLocation
	Flags    int32
}

// nodeParams is CUDA_KERNEL_NODE_PARAMS_v2. What Params points to is read by the call.
type nodeParams struct {
	Func                   function
	GridX, GridY, GridZ    uint32
	BlockX, BlockY, BlockZ uint32
	SharedBytes            uint32
	Params                 *unsafe.Pointer
	Extra                  uintptr
	Kern                   function // where Func is 0
	Ctx                    cuContext
}

const (
	_ = -(unsafe.Sizeof(memLocation{}) ^ 8)
	_ = -(unsafe.Sizeof(memProp{}) ^ 32)
	_ = -(unsafe.Offsetof(memProp{}.Location) ^ 8)
	_ = -(unsafe.Offsetof(memProp{}.Win32) ^ 16)
	_ = -(unsafe.Offsetof(memProp{}.RDMA) ^ 25)
	_ = -(unsafe.Offsetof(memProp{}.Usage) ^ 26)
	_ = -(unsafe.Sizeof(memAccess{}) ^ 12)
	_ = -(unsafe.Offsetof(memAccess{}.Flags) ^ 8)
	_ = -(unsafe.Sizeof(nodeParams{}) ^ 72)
	_ = -(unsafe.Offsetof(nodeParams{}.GridX) ^ 8)
	_ = -(unsafe.Offsetof(nodeParams{}.BlockX) ^ 20)
	_ = -(unsafe.Offsetof(nodeParams{}.SharedBytes) ^ 32)
	_ = -(unsafe.Offsetof(nodeParams{}.Params) ^ 40)
	_ = -(unsafe.Offsetof(nodeParams{}.Extra) ^ 48)
	_ = -(unsafe.Offsetof(nodeParams{}.Kern) ^ 56)
	_ = -(unsafe.Offsetof(nodeParams{}.Ctx) ^ 64)
)

// jitLog receives what the PTX compiler says. Both texts are cut at the buffers' size.
type jitLog struct {
	Info, Error string
}

// api lists the calls of libcuda that Helios makes. A method is the call of the same name with Cu
// in front; the comment is the exported symbol where a version or a stream mode makes it another
// one. Headers rename these by macro ("#define cuMemAlloc cuMemAlloc_v2"), a dlsym does not. Calls
// marked optional may be missing; has reports that, and calling a missing one returns
// CUDA_ERROR_NOT_FOUND.
//
// Calls act on the context that is current to the calling OS thread: see Device.enter.
type api interface {
	// has reports whether the library exports the symbol.
	has(symbol string) bool
	// describe names the library's file, for reports.
	describe() string

	Init(flags uint32) result
	DriverGetVersion() (version int, r result) // 12040 is CUDA 12.4
	GetErrorName(r result) string              // "" when the driver knows no such code
	GetErrorString(r result) string

	DeviceGetCount() (int, result)
	DeviceGet(index int) (ordinal, result)
	DeviceGetName(d ordinal) (string, result)
	DeviceGetPCIBusId(d ordinal) (string, result)
	DeviceGetUuid(d ordinal) ([16]byte, result) // optional
	DeviceTotalMem(d ordinal) (int64, result)   // cuDeviceTotalMem_v2
	DeviceGetAttribute(a attribute, d ordinal) (int, result)

	DevicePrimaryCtxRetain(d ordinal) (cuContext, result)
	DevicePrimaryCtxRelease(d ordinal) result // cuDevicePrimaryCtxRelease_v2
	CtxSetCurrent(c cuContext) result
	CtxGetStreamPriorityRange() (least, greatest int, r result) // greatest is the lower number

	// image is PTX that ends in a NUL, or a cubin.
	ModuleLoadDataEx(image []byte, log *jitLog) (module, result)
	ModuleUnload(m module) result
	ModuleGetFunction(m module, name string) (function, result)
	LibraryLoadData(image []byte) (library, result) // optional, 12.0
	LibraryUnload(l library) result                 // optional, 12.0
	// LibraryGetKernel gives a CUkernel, which launches in the context of the stream.
	LibraryGetKernel(l library, name string) (function, result) // optional, 12.0
	FuncGetAttribute(a funcAttribute, f function) (int, result)
	FuncGetParamInfo(f function, index int) (offset, size int, r result) // optional, 12.4

	MemGetInfo() (free, total int64, r result)                          // cuMemGetInfo_v2
	MemAlloc(bytes int64) (devicePtr, result)                           // cuMemAlloc_v2
	MemFree(p devicePtr) result                                         // cuMemFree_v2
	MemHostRegister(p unsafe.Pointer, bytes int64, flags uint32) result // cuMemHostRegister_v2
	MemHostUnregister(p unsafe.Pointer) result
	MemHostGetDevicePointer(p unsafe.Pointer) (devicePtr, result) // cuMemHostGetDevicePointer_v2
	// MemGetHandleForAddressRange exports a dma-buf; its handle is a file descriptor.
	// optional, 11.7
	MemGetHandleForAddressRange(p devicePtr, bytes int64, handleType uint32,
		flags uint64) (fd int32, r result)

	// Virtual memory management, all optional, 10.2.
	MemGetAllocationGranularity(prop *memProp, option int32) (int64, result)
	MemAddressReserve(bytes, alignment int64) (devicePtr, result)
	MemAddressFree(p devicePtr, bytes int64) result
	MemCreate(bytes int64, prop *memProp) (memHandle, result)
	MemRelease(h memHandle) result
	// from offset 0 of h, the only one there is
	MemMap(p devicePtr, bytes int64, h memHandle) result
	MemUnmap(p devicePtr, bytes int64) result
	MemSetAccess(p devicePtr, bytes int64, access *memAccess) result
	// MemExportToShareableHandle gives memory of MemCreate as a file descriptor.
	MemExportToShareableHandle(h memHandle, handleType int32) (fd int32, r result)

	MemcpyAsync(dst, src devicePtr, bytes int64, s stream) result
	MemsetD8Async(dst devicePtr, value byte, bytes int64, s stream) result

	StreamCreateWithPriority(flags uint32, priority int) (stream, result)
	StreamDestroy(s stream) result // cuStreamDestroy_v2
	StreamQuery(s stream) result
	StreamWaitEvent(s stream, e event, flags uint32) result
	EventCreate(flags uint32) (event, result)
	EventDestroy(e event) result // cuEventDestroy_v2
	EventRecord(e event, s stream) result
	EventQuery(e event) result
	EventElapsedTime(start, end event) (milliseconds float32, r result)

	// LaunchKernel starts a one-dimensional grid. params points to as many pointers as the kernel
	// has parameters; they and what they point to must not move, and are read before it returns.
	LaunchKernel(f function, blocks, threads, sharedBytes uint32, s stream,
		params *unsafe.Pointer) result

	// Graphs, all optional: the v2 of kernel nodes is of 12.0.
	GraphCreate() (graph, result)
	GraphDestroy(g graph) result
	// GraphAddKernelNode puts a node behind after, which is 0 for the first.
	// cuGraphAddKernelNode_v2
	GraphAddKernelNode(g graph, after graphNode, params *nodeParams) (graphNode, result)
	// cuGraphInstantiateWithFlags, 11.4
	GraphInstantiate(g graph) (graphExec, result)
	// cuGraphExecKernelNodeSetParams_v2
	GraphExecKernelNodeSetParams(x graphExec, n graphNode, params *nodeParams) result
	GraphLaunch(x graphExec, s stream) result
	GraphExecDestroy(x graphExec) result

	// Green contexts, all optional, 12.4; GreenCtxStreamCreate is of 12.5 (driver 555), and without
	// it they are of no use here.
	DeviceGetDevResource(d ordinal, out *devResource, kind uint32) result
	// DevSmResourceSplitByCount splits input into at most len(groups) groups of at least minSMs and
	// returns their number. With no groups it only counts.
	DevSmResourceSplitByCount(groups []devResource, input *devResource, flags,
		minSMs uint32) (n int, r result)
	DevResourceGenerateDesc(groups []devResource) (resDesc, result)
	GreenCtxCreate(desc resDesc, d ordinal, flags uint32) (greenCtx, result)
	GreenCtxDestroy(g greenCtx) result
	GreenCtxStreamCreate(g greenCtx, flags uint32, priority int) (stream, result)
	CtxFromGreenCtx(g greenCtx) (cuContext, result)
}

// A library must export requiredSymbols, as dlsym knows them.
var requiredSymbols = []string{
	"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString",
	"cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetPCIBusId",
	"cuDeviceTotalMem_v2", "cuDeviceGetAttribute",
	"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxSetCurrent",
	"cuCtxGetStreamPriorityRange",
	"cuModuleLoadDataEx", "cuModuleUnload", "cuModuleGetFunction", "cuFuncGetAttribute",
	"cuMemGetInfo_v2", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostRegister_v2",
	"cuMemHostUnregister", "cuMemHostGetDevicePointer_v2",
	"cuMemcpyAsync", "cuMemsetD8Async",
	"cuStreamCreateWithPriority", "cuStreamDestroy_v2", "cuStreamQuery", "cuStreamWaitEvent",
	"cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime",
	"cuLaunchKernel",
}

// Newer drivers have optionalSymbols. Without them a capability is missing.
var optionalSymbols = []string{
	"cuDeviceGetUuid",
	"cuLibraryLoadData", "cuLibraryUnload", "cuLibraryGetKernel", "cuFuncGetParamInfo",
	"cuMemGetHandleForAddressRange",
	"cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc",
	"cuGreenCtxCreate", "cuGreenCtxDestroy", "cuGreenCtxStreamCreate", "cuCtxFromGreenCtx",
	"cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate",
	"cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess",
	"cuMemExportToShareableHandle",
	"cuGraphCreate", "cuGraphDestroy", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags",
	"cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch", "cuGraphExecDestroy",
}

// Results that the device tells apart (CUresult of cuda.h).
const (
	success               result = 0
	errInvalidValue       result = 1
	errOutOfMemory        result = 2
	errNotInitialized     result = 3
	errDeinitialized      result = 4
	errDeviceUnavailable  result = 46
	errNoDevice           result = 100
	errInvalidDevice      result = 101
	errECC                result = 214
	errNVLink             result = 220
	errJITNotFound        result = 221
	errUnsupportedPTX     result = 222
	errJITDisabled        result = 223
	errContained          result = 226
	errNotFound           result = 500
	errNotReady           result = 600
	errNotSupported       result = 801
	errIllegalAddress     result = 700
	errLaunchTimeout      result = 702
	errContextDestroyed   result = 709
	errAssert             result = 710
	errHardwareStack      result = 714
	errIllegalInstruction result = 715
	errMisaligned         result = 716
	errAddressSpace       result = 717
	errInvalidPC          result = 718
	errLaunchFailed       result = 719
	errTensorMemory       result = 721
	errSystemNotReady     result = 802
	errDriverMismatch     result = 803
	errMPSTerminated      result = 810
	errUnknown            result = 999
)

type attribute int32

// CUdevice_attribute.
const (
	attrClockRate         attribute = 13 // kHz
	attrMultiprocessors   attribute = 16
	attrCanMapHost        attribute = 19
	attrComputeMode       attribute = 20
	attrUnifiedAddressing attribute = 41
	attrMajor             attribute = 75
	attrMinor             attribute = 76
	attrHostPointer       attribute = 91
	attrHostRegister      attribute = 99
	attrVMM               attribute = 102
	attrHandleFD          attribute = 103
	attrVMMDirectRDMA     attribute = 110
	attrDirectRDMA        attribute = 116
	attrRDMAOrdering      attribute = 118
	attrDMABuf            attribute = 124
)

type funcAttribute int32

// CUfunction_attribute.
const (
	funcMaxThreads funcAttribute = 0
)

// Flags and options.
const (
	registerPortable  = 0x1 // CU_MEMHOSTREGISTER_*
	registerDeviceMap = 0x2
	registerIOMemory  = 0x4
	streamNonBlocking = 0x1 // CU_STREAM_NON_BLOCKING
	handleDMABuf      = 0x1 // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
	greenDefault      = 0x1 // CU_GREEN_CTX_DEFAULT_STREAM
	resourceSM        = 1   // CU_DEV_RESOURCE_TYPE_SM
	memPinned         = 1   // CU_MEM_ALLOCATION_TYPE_PINNED
	handleFD          = 1   // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	locationDevice    = 1   // CU_MEM_LOCATION_TYPE_DEVICE
	accessReadWrite   = 3   // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
	granularityLeast  = 0   // CU_MEM_ALLOC_GRANULARITY_MINIMUM
	jitInfoLog        = 3   // CU_JIT_*
	jitInfoLogBytes   = 4
	jitErrorLog       = 5
	jitErrorLogBytes  = 6

	eventDisableTiming = 0x2 // CU_EVENT_DISABLE_TIMING
)

// Symbols are the calls of libcuda that this package opens: without a required one there is no
// device, without an optional one a capability is missing.
func Symbols() (required, optional []string) {
	return slices.Clone(requiredSymbols), slices.Clone(optionalSymbols)
}
