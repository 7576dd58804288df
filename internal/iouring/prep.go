package iouring

import "unsafe"

// File holds what an operation works on: a descriptor, or a slot of the registered file table.
type File struct {
	FD    int32
	Fixed bool
}

func (s *SQE) prep(op uint8, f File, addr unsafe.Pointer, n uint32, off uint64) {
	s.Opcode, s.FD, s.Addr, s.Len, s.Off = op, f.FD, uint64(uintptr(addr)), n, off
	if f.Fixed {
		s.Flags |= sqeFixedFile
	}
}

// PrepNop does nothing and completes with 0.
func (s *SQE) PrepNop() { s.prep(opNop, File{FD: -1}, nil, 0, 0) }

// PrepRead reads n bytes at off into addr, which stays allocated and in place until the
// operation completed.
func (s *SQE) PrepRead(f File, addr unsafe.Pointer, n uint32, off uint64) {
	s.prep(opRead, f, addr, n, off)
}

// PrepWrite writes n bytes; rwFlags are those of pwritev2 (RWF_DSYNC).
func (s *SQE) PrepWrite(f File, addr unsafe.Pointer, n uint32, off uint64, rwFlags uint32) {
	s.prep(opWrite, f, addr, n, off)
	s.OpFlags = rwFlags
}

// PrepReadFixed is PrepRead into memory within registered buffer buf.
func (s *SQE) PrepReadFixed(f File, addr unsafe.Pointer, n uint32, off uint64, buf uint16) {
	s.prep(opReadFixed, f, addr, n, off)
	s.BufIndex = buf
}

// PrepWriteFixed is PrepWrite from memory within registered buffer buf.
func (s *SQE) PrepWriteFixed(f File, addr unsafe.Pointer, n uint32, off uint64, rwFlags uint32,
	buf uint16) {
	s.prep(opWriteFixed, f, addr, n, off)
	s.OpFlags, s.BufIndex = rwFlags, buf
}

// PrepReadv reads into several pieces of memory; iov itself is needed until Submit returned.
func (s *SQE) PrepReadv(f File, iov []Iovec, off uint64) {
	s.prep(opReadv, f, unsafe.Pointer(unsafe.SliceData(iov)), uint32(len(iov)), off)
}

// PrepWritev writes several pieces of memory.
func (s *SQE) PrepWritev(f File, iov []Iovec, off uint64, rwFlags uint32) {
	s.prep(opWritev, f, unsafe.Pointer(unsafe.SliceData(iov)), uint32(len(iov)), off)
	s.OpFlags = rwFlags
}

// PrepFsync makes the file's data durable, and its metadata too unless dataOnly.
func (s *SQE) PrepFsync(f File, dataOnly bool) {
	s.prep(opFsync, f, nil, 0, 0)
	if dataOnly {
		s.OpFlags = fsyncDatasync
	}
}

// PrepPoll completes when one of the poll(2) events is there; its result is the event mask.
func (s *SQE) PrepPoll(f File, events uint32) {
	s.prep(opPollAdd, f, nil, 0, 0)
	s.OpFlags = events
}
