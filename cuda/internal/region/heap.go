package region

import (
	"runtime"
	"sync/atomic"
	"unsafe"
)

// OnGoHeap guesses by address: Go's heap is one range that grows (more are taken only when
// something is in the way), so its objects are not farther apart than it is large. A miss
// costs nothing: the check is there to find mistakes early.
func OnGoHeap(p uint64) bool {
	probe := new([64]byte)
	heapSink.Store(probe) // keeps it from the stack
	addr := uint64(uintptr(unsafe.Pointer(probe)))
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return max(addr, p)-min(addr, p) < max(m.HeapSys, 64<<20)
}

var heapSink atomic.Pointer[[64]byte]
