package nvme

import (
	"sync/atomic"
	"unsafe"
)

func dwords(p *Completion) *[4]uint32 { return (*[4]uint32)(unsafe.Pointer(p)) }

// LoadCompletion reads the completion queue entry at p, and reports whether it is new: its
// phase tag equals phase, which starts as true and inverts with each pass through the queue
// (section 3.3.3.2.1). The last dword, which holds the tag, is read first with acquire, so
// that the others are the ones that belong to it. p is 16-byte aligned shared memory.
func LoadCompletion(p *Completion, phase bool) (Completion, bool) {
	d := dwords(p)
	last := atomic.LoadUint32(&d[3])
	if last>>16&1 != 0 != phase {
		return Completion{}, false
	}
	sq := atomic.LoadUint32(&d[2])
	return Completion{
		DW0:         atomic.LoadUint32(&d[0]),
		DW1:         atomic.LoadUint32(&d[1]),
		SQHead:      uint16(sq),
		SQID:        uint16(sq >> 16),
		CID:         uint16(last),
		StatusPhase: uint16(last >> 16),
	}, true
}

// StoreCompletion is a software controller's side of LoadCompletion: all of c, the dword
// with the phase tag last and with release.
func StoreCompletion(p *Completion, c Completion) {
	d := dwords(p)
	atomic.StoreUint32(&d[0], c.DW0)
	atomic.StoreUint32(&d[1], c.DW1)
	atomic.StoreUint32(&d[2], uint32(c.SQHead)|uint32(c.SQID)<<16)
	atomic.StoreUint32(&d[3], uint32(c.CID)|uint32(c.StatusPhase)<<16)
}

// StatusPhase packs a status field and a phase tag as in Completion.StatusPhase.
func StatusPhase(s Status, phase bool) uint16 {
	v := uint16(s) << 1
	if phase {
		v |= 1
	}
	return v
}
