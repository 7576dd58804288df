//go:build linux && (amd64 || arm64) && gorgonia && !nocuda

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
// The module's calls are used where it has them and they serve. All others are purego's on the same
// library: those of Function.Launch, which copies exactly eight bytes for each argument while ours
// are structs by value, of memory of the host, libraries, green contexts, virtual memory, graphs
// that change, and the driver's own words for an error.

/*
#cgo LDFLAGS: -lcuda -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

static const char *helios_library(void) {
	Dl_info info;
	void *f = dlsym(RTLD_DEFAULT, "cuInit");
	return f != 0 && dladdr(f, &info) != 0 ? info.dli_fname : 0;
}
*/
import "C"

import (
	"bytes"
	"os"
	"reflect"
	"unsafe"

	"gorgonia.org/cu"

	"helios/internal/errs"
)

// linked is the api on the library that the program was linked against.
type linked struct{ *pure }

// openLibrary returns the library that is already in the process; another one can't be had.
func openLibrary(path string) (api, error) {
	own := C.GoString(C.helios_library())
	if path != "" {
		asked, err := os.Stat(path)
		if err != nil {
			return nil, errs.New(errs.Capability, "%w: %w", ErrNoDriver, err)
		}
		if have, err := os.Stat(own); err != nil || !os.SameFile(asked, have) {
			return nil, errs.New(errs.Capability,
				"this build (-tags gorgonia) is linked to %s and cannot open %s; start it with LD_LIBRARY_PATH, or use a build without the tag",
				own, path)
		}
	}
	p, err := loadLibrary(own)
	return linked{p}, err
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

func (l linked) describe() string { return l.path + " (linked, gorgonia.org/cu)" }

func (l linked) DriverGetVersion() (int, result) {
	v := cu.Version()
	if v < 0 { // the module keeps the reason for itself
		return 0, errUnknown
	}
	return v, success
}

func (l linked) DeviceGetCount() (int, result) {
	n, err := cu.NumDevices()
	return n, code(err)
}

func (l linked) DeviceGet(index int) (ordinal, result) {
	d, err := cu.GetDevice(index)
	return ordinal(d), code(err)
}

func (l linked) DeviceGetName(d ordinal) (string, result) {
	s, err := cu.Device(d).Name()
	return s, code(err)
}

func (l linked) DeviceTotalMem(d ordinal) (int64, result) {
	n, err := cu.Device(d).TotalMem()
	return n, code(err)
}

func (l linked) DeviceGetAttribute(a attribute, d ordinal) (int, result) {
	v, err := cu.Device(d).Attribute(cu.DeviceAttribute(a))
	return v, code(err)
}

func (l linked) DevicePrimaryCtxRetain(d ordinal) (cuContext, result) {
	c, err := cu.Device(d).RetainPrimaryCtx()
	return view[cuContext](c), code(err)
}

func (l linked) DevicePrimaryCtxRelease(d ordinal) result {
	return code(cu.Device(d).ReleasePrimaryCtx())
}

func (l linked) CtxSetCurrent(c cuContext) result {
	return code(cu.SetCurrentContext(view[cu.CUContext](c)))
}

func (l linked) CtxGetStreamPriorityRange() (least, greatest int, r result) {
	least, greatest, err := cu.StreamPriorityRange()
	return least, greatest, code(err)
}

func (l linked) ModuleLoadDataEx(image []byte, log *jitLog) (module, result) {
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

func (l linked) ModuleUnload(m module) result { return code(view[cu.Module](m).Unload()) }

func (l linked) ModuleGetFunction(m module, name string) (function, result) {
	f, err := view[cu.Module](m).Function(name)
	return view[function](f), code(err)
}

func (l linked) FuncGetAttribute(a funcAttribute, f function) (int, result) {
	v, err := view[cu.Function](f).Attribute(cu.FunctionAttribute(a))
	return v, code(err)
}

func (l linked) MemGetInfo() (free, total int64, r result) {
	free, total, err := cu.MemInfo()
	return free, total, code(err)
}

func (l linked) MemAlloc(n int64) (devicePtr, result) {
	p, err := cu.MemAlloc(n)
	return devicePtr(p), code(err)
}

func (l linked) MemFree(p devicePtr) result { return code(cu.MemFree(cu.DevicePtr(p))) }

func (l linked) MemcpyAsync(dst, src devicePtr, n int64, s stream) result {
	return code(cu.MemcpyAsync(cu.DevicePtr(dst), cu.DevicePtr(src), n, view[cu.Stream](s)))
}

func (l linked) MemsetD8Async(dst devicePtr, value byte, n int64, s stream) result {
	return code(cu.MemsetD8Async(cu.DevicePtr(dst), value, n, view[cu.Stream](s)))
}

func (l linked) StreamCreateWithPriority(flags uint32, priority int) (stream, result) {
	s, err := cu.MakeStreamWithPriority(priority, cu.StreamFlags(flags))
	return view[stream](s), code(err)
}

func (l linked) StreamDestroy(s stream) result {
	v := view[cu.Stream](s)
	return code(v.Destroy())
}

func (l linked) StreamQuery(s stream) result { return code(view[cu.Stream](s).Query()) }

func (l linked) StreamWaitEvent(s stream, e event, flags uint32) result {
	return code(view[cu.Stream](s).Wait(view[cu.Event](e), uint(flags)))
}

func (l linked) EventCreate(flags uint32) (event, result) {
	e, err := cu.MakeEvent(cu.EventFlags(flags))
	return view[event](e), code(err)
}

func (l linked) EventDestroy(e event) result {
	v := view[cu.Event](e)
	return code(cu.DestroyEvent(&v))
}

func (l linked) EventRecord(e event, s stream) result {
	return code(view[cu.Event](e).Record(view[cu.Stream](s)))
}

func (l linked) EventQuery(e event) result { return code(view[cu.Event](e).Query()) }

func (l linked) EventElapsedTime(start, end event) (float32, result) {
	ms, err := view[cu.Event](start).Elapsed(view[cu.Event](end))
	return float32(ms), code(err)
}
