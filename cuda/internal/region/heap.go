package region

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"unsafe"
)

// onGoHeap guesses by address: Go's heap is one range that grows (more are taken only when
// something is in the way), so its objects are not farther apart than it is large. A miss
// costs nothing: the check is there to find mistakes early.
func onGoHeap(p uint64) bool {
	probe := new([64]byte)
	heapSink.Store(probe) // keeps it from the stack
	addr := uint64(uintptr(unsafe.Pointer(probe)))
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return max(addr, p)-min(addr, p) < max(m.HeapSys, 64<<20)
}

// HostMemory is the address of memory that may be registered: there is some, outside Go's heap.
func HostMemory(device string, mem []byte, purpose string) (uint64, error) {
	lo := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	switch {
	case len(mem) == 0:
		return 0, fmt.Errorf("device %s: register %s: no memory", device, purpose)
	case onGoHeap(lo):
		return 0, fmt.Errorf(
			"device %s: register %s: the memory is on Go's heap, which kernels must not touch; take it from hostmem",
			device, purpose)
	}
	return lo, nil
}

var heapSink atomic.Pointer[[64]byte]
