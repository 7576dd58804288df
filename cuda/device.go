// Package cuda is the compute device that every kernel of Helios runs on: memory, streams,
// events, kernels by name with a block of plain parameters, and budgets of SMs.
//
// Two backends stand behind the interfaces: the host device (goroutines, host.go) and the CUDA
// driver. Both pass the suite in internal/testing/conformance. A kernel's parameters are one struct
// without Go pointers: the same bytes that a GPU kernel would get.
package cuda

import (
	"context"
	"time"
	"unsafe"
)

// DevicePtr is an address as kernels on the device see it. On the host device it is a virtual
// address of memory that does not belong to Go's heap. 0 is nil.
type DevicePtr uint64

// MemKind is the home of memory: the GPU or the CPU.
type MemKind uint8

const (
	MemDevice MemKind = iota // the device's own memory (HBM); on the host device, ordinary memory
	// CPU memory that the device reads in place (UVA) and that does not move
	MemPinned
)

// Info describes a device.
type Info struct {
	Name     string // for people
	Backend  string // "host" or "driver"
	SMs      int    // streaming multiprocessors; worker slots on the host device
	MemTotal int64  // bytes of MemDevice memory
	Kernels  string // which variant of the kernels runs: a name of simd.Level, or "ptx"
	// Code holds what a GPU's kernels were loaded from, for people: machine code in the binary
	// ("cubin sm_90") or "PTX", and why. The results are the same.
	Code string
}

// Loaded names the kernels as they were loaded: a GPU's by Code, the host's by Kernels.
func (i Info) Loaded() string {
	if i.Code != "" {
		return i.Code
	}
	return i.Kernels
}

// Buffer is an allocation or a registration. Free releases it once; later calls are no-ops.
type Buffer interface {
	Ptr() DevicePtr
	Size() int64
	Kind() MemKind
	Bytes() []byte // the CPU's view; nil where the CPU can't address it
	Purpose() string
	Free() error
}

// Device is a place that runs kernels. It is safe for concurrent use.
type Device interface {
	Info() Info
	// Alloc returns zeroed memory, aligned to at least 4096 bytes. purpose names its use in
	// MemUsage and in errors.
	Alloc(kind MemKind, size int64, purpose string) (Buffer, error)
	// Register makes CPU memory outside Go's heap usable by kernels. Freeing the buffer
	// ends the registration and leaves the memory.
	Register(mem []byte, purpose string) (Buffer, error)
	// Kernel finds a kernel by name; the error names what is missing.
	Kernel(name string) (Kernel, error)
	NewStream(StreamOptions) (Stream, error)
	NewEvent() (Event, error)
	// NewTimer makes an event with a time, for Since; one without is cheaper.
	NewTimer() (Event, error)
	// MemUsage is the live bytes by purpose.
	MemUsage() map[string]int64
	// Close fails when streams or buffers are still open, naming them, and releases them.
	Close() error
}

// IORegistrar is a device whose kernels can reach I/O memory, such as a page of an SSD's doorbells.
// Device values are asked for it by type assertion.
type IORegistrar interface {
	// RegisterIO is Register for memory that is not RAM. mem starts on a page and is touched
	// before, as some mappings only come to be at the first access and the device never faults
	// them in.
	RegisterIO(mem []byte, purpose string) (Buffer, error)
}

// ProcessSharer is a device whose memory other processes can use.
type ProcessSharer interface {
	// AllocShared returns zeroed memory of the device.
	AllocShared(size int64, purpose string) (SharedBuffer, error)
	// PCIBusID names the device, whatever number another process has for it.
	PCIBusID() string
}

// SharedBuffer is memory of the device that comes to another process as a file.
type SharedBuffer interface {
	Buffer
	// File is the file that another process imports, and its size in whole granules. It is the
	// buffer's to close; who has imported it keeps the memory.
	File() (fd int, bytes int64)
}

// StreamOptions shape a stream.
type StreamOptions struct {
	Name     string // operator name, for the timeline
	Priority int    // higher runs first
	SMs      int    // budget: at most so many blocks at once; 0 = all
	Untimed  bool   // nobody asks for Busy, which may stay 0
}

// LaunchConfig is a grid: Blocks thread blocks of Threads threads (32 to a warp).
type LaunchConfig struct {
	Blocks  int
	Threads int
}

// Kernel is a named function on the device with a fixed size of parameter block.
type Kernel interface {
	Name() string
	ParamSize() uintptr
}

// Stream runs its work in order. Errors are sticky: after one, work is dropped and every
// call returns it.
type Stream interface {
	// LaunchRaw copies size bytes of parameters and enqueues the kernel. Use Launch.
	LaunchRaw(k Kernel, cfg LaunchConfig, params unsafe.Pointer, size uintptr) error
	Copy(dst, src DevicePtr, bytes int64) error
	Fill(dst DevicePtr, value byte, bytes int64) error
	// Record makes e happen when all work enqueued before it is done.
	Record(e Event) error
	// Wait holds later work of this stream until e's latest record has happened.
	Wait(e Event) error
	// Synchronize waits for all work so far, no longer than ctx, and returns the stream's error.
	Synchronize(ctx context.Context) error
	// Busy is the time in which this stream had a kernel running. Waiting for an SM that other
	// streams hold is not running, where the backend can tell.
	Busy() time.Duration
	// Close lets the work so far finish, within a limit of the device. ErrStillRuns: it has not.
	Close() error
}

// Event marks a point in a stream.
type Event interface {
	Synchronize(ctx context.Context) error
	Done() bool // true also before the first record, as in CUDA
	// Since is the time between two recorded, finished events of NewTimer.
	Since(earlier Event) (time.Duration, error)
	Close() error
}

// Launch enqueues kernel k with the parameter block p, which must hold no Go pointers.
func Launch[T any](s Stream, k Kernel, cfg LaunchConfig, p T) error {
	return s.LaunchRaw(k, cfg, unsafe.Pointer(&p), unsafe.Sizeof(p))
}
