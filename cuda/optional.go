package cuda

import (
	"fmt"
	"unsafe"
)

// Interfaces that only some devices or streams have, and functions that use any of them.

// MemoryMeter is a device that knows how much of its memory is free now, also of what other
// processes hold.
type MemoryMeter interface {
	FreeMemory() (free, total int64, err error)
}

// Reserver is a device whose memory is not lazy, which can reserve addresses without it.
type Reserver interface {
	Reserve(size int64, purpose string) (Growable, error)
}

// Growable is memory of kind MemDevice whose addresses are all there and whose memory comes as it
// is needed, from the beginning. It never moves.
type Growable interface {
	Buffer // of all addresses; kernels must only touch what is backed
	// Grow makes at least the first bytes usable; new memory is zeroed. An *OutOfMemoryError leaves
	// it as it was.
	Grow(bytes int64) error
	// Backed returns how many bytes from the beginning are usable.
	Backed() int64
}

// Reserve is Alloc of device memory that is sized for the worst case and mostly used in part. Where
// the device is no Reserver all of it is usable at once (the host device's memory is lazy by
// itself).
func Reserve(d Device, size int64, purpose string) (Growable, error) {
	if r, ok := d.(Reserver); ok {
		return r.Reserve(size, purpose)
	}
	b, err := d.Alloc(MemDevice, size, purpose)
	if err != nil {
		return nil, err
	}
	return Whole(b), nil
}

// Whole is a buffer all of which is usable as a Growable.
func Whole(b Buffer) Growable { return whole{b} }

type whole struct{ Buffer }

func (w whole) Grow(bytes int64) error {
	if bytes < 0 || bytes > w.Size() {
		return fmt.Errorf("%s: grow to %d bytes: %d are reserved", w.Purpose(), bytes, w.Size())
	}
	return nil
}
func (w whole) Backed() int64 { return w.Size() }

// PeerMapper is a device whose memory can be made addressable for the CPU and, through its mapping,
// for the DMA of other devices (rung p2p of the memory ladder, gpuio/rung.go).
type PeerMapper interface {
	// PeerMethods are the ways that can be tried on this machine, the best first, with why others
	// cannot.
	PeerMethods() []PeerMethod
	// MapPeer maps a buffer of kind MemDevice, whole. method is a name of PeerMethods. End the
	// mapping, and all DMA through it, before the buffer is freed.
	MapPeer(b Buffer, method string) (PeerMapping, error)
}

// PeerMethod is one way to map device memory.
type PeerMethod struct {
	Name string // "dma-buf" or "gdrdrv"
	Err  error  // why it cannot be tried here; nil: it can
}

// PeerMapping is device memory as the CPU sees it: I/O memory behind a BAR. Loads are slow, stores
// are write-combined; no atomics.
type PeerMapping interface {
	Bytes() []byte
	// DMABuf is the export behind it, for IOMMUs that take one, or -1.
	DMABuf() (fd int, offset int64)
	Close() error
}

// PeerGrower is a PeerMapping of a Growable: Bytes has all addresses from the beginning, and the
// memory behind them follows by Extend. Addresses without memory fault.
type PeerGrower interface {
	PeerMapping
	// Extend maps what Grow has made usable since.
	Extend() error
}

// Sharer is a device that has to know CPU memory that another device of this process has allocated,
// and does not register it once more.
type Sharer interface {
	// Share makes pinned memory of another device usable for copies and kernels of this one.
	// Freeing the buffer ends that and leaves the memory, which must outlive it.
	Share(b Buffer) (Buffer, error)
}

// Share makes pinned memory of another device usable for d; see Sharer.
func Share(d Device, b Buffer) (Buffer, error) {
	if s, ok := d.(Sharer); ok {
		return s.Share(b)
	}
	return d.Register(b.Bytes(), b.Purpose())
}

// Step is one launch of Steps.
type Step struct {
	Kernel Kernel
	Config LaunchConfig
	Params []byte // the parameter block, kept until the next Reset
}

// Steps is a sequence of launches that is enqueued as a whole. Its memory is reused.
type Steps struct {
	List  []Step
	arena []uint64
}

// Reset empties q. The steps of before must have been enqueued.
func (q *Steps) Reset() { q.List, q.arena = q.List[:0], q.arena[:0] }

// Add appends a launch of k with the parameter block p, which must hold no Go pointers.
func Add[T any](q *Steps, k Kernel, cfg LaunchConfig, p T) {
	n := int(unsafe.Sizeof(p))
	first := len(q.arena)
	// A grown arena leaves the old one to the steps that point into it.
	q.arena = append(q.arena, make([]uint64, (n+7)/8)...)
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(q.arena[first:]))), n)
	copy(b, unsafe.Slice((*byte)(unsafe.Pointer(&p)), n))
	q.List = append(q.List, Step{k, cfg, b})
}

// StepLauncher is a stream that enqueues steps for less than a launch each (CUDA graphs).
type StepLauncher interface {
	LaunchSteps(q *Steps) error
}

// LaunchSteps enqueues all of q in order. Failures are those of launches, also within a graph: the
// error names the kernel.
func LaunchSteps(s Stream, q *Steps) error {
	if l, ok := s.(StepLauncher); ok {
		return l.LaunchSteps(q)
	}
	return LaunchEach(s, q)
}

// LaunchEach enqueues q by a launch for each step.
func LaunchEach(s Stream, q *Steps) error {
	for i := range q.List {
		st := &q.List[i]
		if err := s.LaunchRaw(st.Kernel, st.Config, unsafe.Pointer(unsafe.SliceData(st.Params)),
			uintptr(len(st.Params))); err != nil {
			return err
		}
	}
	return nil
}

// CollectiveOpener is a device that can add up memory of several devices with a vendor's library,
// opened at run time.
type CollectiveOpener interface {
	// OpenCollective opens the library for this device, the first, and more of the same kind; "" =
	// its usual name. An error of class Capability names the missing part.
	OpenCollective(more []Device, library string) (Collective, error)
}

// Collective adds up memory of several devices. The order of its sums is the library's own: results
// may differ in their last bits from one machine to another, and from those of other ways.
type Collective interface {
	Name() string // with its version
	// AllReduce leaves in each device's memory the sum of all: at and streams are in the order of
	// devices, and of so many float32 each. It is enqueued on the streams.
	AllReduce(streams []Stream, sums []DevicePtr, floats int64) error
	Close() error
}

// Precision is the arithmetic of products of matrices. Inputs, outputs and sums are float32 in all
// of them.
type Precision uint8

const (
	FP32 Precision = iota // float32 multiply-add
	TF32                  // factors rounded to 10 bits of mantissa, tensor cores
	BF16                  // factors rounded to bfloat16; on a GPU tensor cores
)

var precisions = []string{"fp32", "tf32", "bf16"}

// Precisions lists the names.
func Precisions() []string { return precisions }

func (p Precision) String() string {
	if int(p) < len(precisions) {
		return precisions[p]
	}
	return fmt.Sprintf("precision %d", uint8(p))
}

// BLASOpener is a device that can use a vendor's BLAS, opened at run time.
type BLASOpener interface {
	// OpenBLAS opens the library; "" = its usual name. An error of class Capability names the
	// missing part.
	OpenBLAS(library string) (BLAS, error)
}

// BLAS multiplies matrices on streams of the device that opened it. Results need not be those of
// our kernels to the bit, but are the same for the same call on the same GPU and library.
type BLAS interface {
	Name() string // with its version
	Multiply(s Stream, p *BLASProduct) error
	Close() error
}

// BLASProduct is C[M,N] = op(A) · op(B), + C where Add. Matrices are row-major float32 with LD*
// elements between rows: A is [M,K], or [K,M] where TransA; B is [K,N], or [N,K] where TransB.
type BLASProduct struct {
	M, N, K        int64
	A, B, C        DevicePtr
	LDA, LDB, LDC  int64
	TransA, TransB bool
	Add            bool
	Precision      Precision
}
