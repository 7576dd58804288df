package iouring

import "unsafe"

func (s *SQE) prep(op uint8, fd int32, addr unsafe.Pointer, n uint32, off uint64) {
	s.Opcode, s.FD, s.Addr, s.Len, s.Off = op, fd, uint64(uintptr(addr)), n, off
}

// PrepNop does nothing and completes with 0.
func (s *SQE) PrepNop() { s.prep(opNop, -1, nil, 0, 0) }

// PrepRead reads n bytes at off into addr, which stays allocated and in place until the
// operation completed.
func (s *SQE) PrepRead(fd int32, addr unsafe.Pointer, n uint32, off uint64) {
	s.prep(opRead, fd, addr, n, off)
}

// PrepWrite writes n bytes; rwFlags are those of pwritev2 (RWF_DSYNC).
func (s *SQE) PrepWrite(fd int32, addr unsafe.Pointer, n uint32, off uint64, rwFlags uint32) {
	s.prep(opWrite, fd, addr, n, off)
	s.OpFlags = rwFlags
}

// PrepReadv reads into several pieces of memory; iov itself is needed until Submit returned.
func (s *SQE) PrepReadv(fd int32, iov []Iovec, off uint64) {
	s.prep(opReadv, fd, unsafe.Pointer(unsafe.SliceData(iov)), uint32(len(iov)), off)
}

// PrepWritev writes several pieces of memory.
func (s *SQE) PrepWritev(fd int32, iov []Iovec, off uint64, rwFlags uint32) {
	s.prep(opWritev, fd, unsafe.Pointer(unsafe.SliceData(iov)), uint32(len(iov)), off)
	s.OpFlags = rwFlags
}

// PrepFsync makes the file's data durable, and its metadata too unless dataOnly.
func (s *SQE) PrepFsync(fd int32, dataOnly bool) {
	s.prep(opFsync, fd, nil, 0, 0)
	if dataOnly {
		s.OpFlags = fsyncDatasync
	}
}
