package gpuio

import (
	"sync/atomic"
	"unsafe"

	"helios/cuda"
)

// setShape shows where a set's arrays are in its part of setBuf: behind its setState, so that one
// copy moves both. To kernels setBuf is setStates alone, of which a slot takes the first of stride.
type setShape struct {
	stride                                      uint32
	ssds, queues                                int
	iovas, units, remaining, taken, crcs, bytes int
}

func shapeOf(ssds, queues int) setShape {
	s := setShape{ssds: ssds, queues: queues}
	s.iovas = (ssds + 1) * 8
	s.units = s.iovas + ssds*8
	s.remaining = s.units + 2*ssds*8
	s.taken = s.remaining + queues*4
	s.crcs = (s.taken + queues*4 + 7) &^ 7 // the address of the rows' CRCs, where they are taken
	s.bytes = s.crcs + 8
	s.stride = uint32((setStateBytes + s.bytes + setStateBytes - 1) / setStateBytes)
	return s
}

// block is where a slot's part of setBuf begins, and its bytes.
func (s *setShape) block(slot uint32) (off, n int64) {
	return int64(slot*s.stride) * setStateBytes, int64(setStateBytes + s.bytes)
}

// slotOf is the slot of a command's set.
func (e *async) slotOf(c *command) uint32 { return uint32(c.Set) / e.shape.stride }

// set is a slot's set, on a GPU in the host's copy: as it was after its last kernel.
func (e *async) set(slot uint32) *setState {
	return at[setState](e.setBuf.host.Ptr(), int(slot*e.shape.stride))
}

// setArrays is the memory of a set's offsets, IOVAs, units and counts, as the host reaches it, and
// as kernels do.
func (e *async) setArrays(slot uint32) (host, dev cuda.DevicePtr) {
	off, _ := e.shape.block(slot)
	off += setStateBytes
	return e.setBuf.host.Ptr() + cuda.DevicePtr(off), e.setBuf.dev.Ptr() + cuda.DevicePtr(off)
}

// array views n of a slot's arrays at an offset of its shape, as the host reaches them.
func array[T any](e *async, slot uint32, off, n int) []T {
	host, _ := e.setArrays(slot)
	return unsafe.Slice(at[T](host+cuda.DevicePtr(off), 0), n)
}

func (e *async) remaining(slot uint32) []uint32 {
	return array[uint32](e, slot, e.shape.remaining, e.shape.queues)
}

// unfinished reports whether a set has units that are not done. When it has none, what whoever
// ended them has written is seen.
func (e *async) unfinished(slot uint32) bool {
	rem := e.remaining(slot)
	for g := range rem {
		if atomic.LoadUint32(&rem[g]) != 0 {
			return true
		}
	}
	return false
}

// taken returns how many units of each queue's share read_sync has begun.
func (e *async) taken(slot uint32) []uint32 {
	return array[uint32](e, slot, e.shape.taken, e.shape.queues)
}

// units is each SSD's first unit and the one after its last, of a set that is not coalesced.
func (e *async) units(slot uint32) []int64 {
	return array[int64](e, slot, e.shape.units, 2*e.shape.ssds)
}
