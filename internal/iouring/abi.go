package iouring

import "unsafe"

// The kernel's interface: include/uapi/linux/io_uring.h of Linux 6.12.

// SQE is a submission queue entry. Use its Prep methods, then set Data.
type SQE struct {
	Opcode   uint8
	Flags    uint8
	IOPrio   uint16
	FD       int32
	Off      uint64
	Addr     uint64
	Len      uint32
	OpFlags  uint32 // rw_flags, fsync_flags, poll32_events
	Data     uint64 // comes back in the CQE
	BufIndex uint16
	Persona  uint16
	FileIdx  int32
	Addr3    uint64
	_        uint64
}

// CQE is a completion queue entry.
type CQE struct {
	Data  uint64 // the SQE's
	Res   int32  // bytes or count; -errno on failure
	Flags uint32
}

// Iovec is one piece of memory of a vectored operation.
type Iovec struct {
	Base unsafe.Pointer
	Len  uint64
}

type sqOffsets struct {
	head, tail, ringMask, ringEntries, flags, dropped, array, resv1 uint32
	userAddr                                                        uint64
}

type cqOffsets struct {
	head, tail, ringMask, ringEntries, overflow, cqes, flags, resv1 uint32
	userAddr                                                        uint64
}

type params struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32
	resv                                                                   [3]uint32
	sqOff                                                                  sqOffsets
	cqOff                                                                  cqOffsets
}

// geteventsArg is struct io_uring_getevents_arg; minWaitUsec is 6.12's use of its padding.
type geteventsArg struct {
	sigmask     uint64
	sigmaskSz   uint32
	minWaitUsec uint32
	ts          unsafe.Pointer
}

type timespec struct{ sec, nsec int64 }

// Layout assertions: a wrong size or offset does not compile.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(SQE{})-64]
	_ = [1]struct{}{}[unsafe.Offsetof(SQE{}.Data)-32]
	_ = [1]struct{}{}[unsafe.Offsetof(SQE{}.BufIndex)-40]
	_ = [1]struct{}{}[unsafe.Sizeof(CQE{})-16]
	_ = [1]struct{}{}[unsafe.Sizeof(Iovec{})-16]
	_ = [1]struct{}{}[unsafe.Sizeof(params{})-120]
	_ = [1]struct{}{}[unsafe.Sizeof(sqOffsets{})-40]
	_ = [1]struct{}{}[unsafe.Sizeof(cqOffsets{})-40]
	_ = [1]struct{}{}[unsafe.Sizeof(geteventsArg{})-24]
)

const (
	opNop    = 0
	opReadv  = 1
	opWritev = 2
	opFsync  = 3
	opRead   = 22
	opWrite  = 23

	setupCQSize = 1 << 3
	setupClamp  = 1 << 4

	featSingleMmap = 1 << 0
	featNoDrop     = 1 << 1
	featExtArg     = 1 << 8
	featMinTimeout = 1 << 15

	enterGetevents = 1 << 0
	enterExtArg    = 1 << 3

	offSQRing = 0
	offSQEs   = 0x10000000

	fsyncDatasync = 1 << 0
)
