package gpuio

import (
	"sync/atomic"
	"unsafe"

	"helios/cuda"
)

// setShape shows where a set's arrays are in its part of setBuf.
type setShape struct {
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
	s.bytes = (s.crcs + 8 + 63) &^ 63
	return s
}

func (e *async) set(slot uint32) *setState { return at[setState](e.setBuf.Ptr(), int(slot)) }

// setArrays is the memory of a set's offsets, IOVAs, units and counts.
func (e *async) setArrays(slot uint32) cuda.DevicePtr {
	return e.setBuf.Ptr() + maxSets*setStateBytes + cuda.DevicePtr(int(slot)*e.shape.bytes)
}

func (e *async) remaining(slot uint32) []uint32 {
	return unsafe.Slice(at[uint32](e.setArrays(slot)+cuda.DevicePtr(e.shape.remaining), 0),
		e.shape.queues)
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
	return unsafe.Slice(at[uint32](e.setArrays(slot)+cuda.DevicePtr(e.shape.taken), 0),
		e.shape.queues)
}

// units is each SSD's first unit and the one after its last, of a set that is not coalesced.
func (e *async) units(slot uint32) []int64 {
	return unsafe.Slice(at[int64](e.setArrays(slot)+cuda.DevicePtr(e.shape.units), 0),
		2*e.shape.ssds)
}
