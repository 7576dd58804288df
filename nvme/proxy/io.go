package proxy

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/hostmem"
	"helios/internal/iouring"
	"helios/nvme"
)

// seg is a piece of host memory.
type seg struct {
	ptr unsafe.Pointer
	n   int64
}

func (g seg) bytes() []byte { return unsafe.Slice((*byte)(g.ptr), g.n) }

const (
	flagFUSE = 3      // Command.Flags: part of a fused operation
	flagPSDT = 3 << 6 // Command.Flags: SGLs instead of PRPs
	fua      = 1 << 30
)

// fetch executes an I/O command from a submission queue entry. It is the hot path: a read
// of one page from RAM is checked, translated, copied and completed right here.
func (c *cqueue) fetch(q *squeue, entry *nvme.Command) {
	b := c.bus
	cmd := *entry // the host may overwrite the entry; check and use one copy
	if cmd.Flags&(flagFUSE|flagPSDT) != 0 {
		c.refuse(q, &cmd, nvme.StatusInvalidField)
		return
	}
	if q.held(cmd.CID) {
		c.refuse(q, &cmd, nvme.StatusCommandIDConflict)
		return
	}
	switch cmd.Opcode {
	case nvme.OpRead, nvme.OpWrite:
		if cmd.NSID != 1 {
			c.refuse(q, &cmd, nvme.StatusInvalidNamespace)
			return
		}
		lba, blocks := cmd.LBARange()
		n := uint64(blocks) << b.lbaShift
		if n > b.maxTransfer {
			c.refuse(q, &cmd, nvme.StatusInvalidField)
			return
		}
		if uint64(lba) >= b.blocks || uint64(blocks) > b.blocks-uint64(lba) {
			c.refuse(q, &cmd, nvme.StatusLBAOutOfRange)
			return
		}
		if cmd.Opcode == nvme.OpRead {
			page := uint64(b.page)
			if b.back.mem != nil && n <= page-cmd.PRP1&(page-1) && cmd.PRP1&3 == 0 {
				p, ok := c.tlb.translate(b, cmd.PRP1, n)
				if !ok {
					c.refuse(q, &cmd, nvme.StatusDataTransferError)
					return
				}
				due := c.arrive(&cmd, int64(n))
				c.copying, c.copyCmd, c.copyDue = q, cmd, due
				copy(unsafe.Slice((*byte)(p), n), b.back.mem[uint64(lba)<<b.lbaShift:])
				c.copying = nil
				c.count.reads++
				c.count.bytesRead += n
				c.completeAt(q, cmd.CID, nvme.StatusSuccess, due)
				return
			}
		} else if b.cfg.ReadOnly {
			c.refuse(q, &cmd, nvme.StatusNamespaceReadOnly)
			return
		}
	case nvme.OpFlush:
		if cmd.NSID != 1 && cmd.NSID != nvme.NSIDAll {
			c.refuse(q, &cmd, nvme.StatusInvalidNamespace)
			return
		}
	default:
		c.refuse(q, &cmd, nvme.StatusInvalidOpcode)
		return
	}
	c.execute(q, &cmd)
}

// refuse completes a command that is wrong in itself: trying it again cannot help.
func (c *cqueue) refuse(q *squeue, cmd *nvme.Command, st nvme.Status) {
	c.bus.logError(q.id, cmd, st.WithDNR())
	c.complete(q, cmd.CID, 0, st.WithDNR())
}

// execute carries out a checked command. Its completion queue entry is reserved.
func (c *cqueue) execute(q *squeue, cmd *nvme.Command) {
	b := c.bus
	var off, n int64
	c.segs = c.segs[:0]
	if cmd.Opcode != nvme.OpFlush {
		lba, blocks := cmd.LBARange()
		off, n = int64(lba)<<b.lbaShift, int64(blocks)<<b.lbaShift
		if st := c.prps(cmd.PRP1, cmd.PRP2, n); !st.OK() {
			c.refuse(q, cmd, st)
			return
		}
	}
	due := c.arrive(cmd, n)
	switch {
	case b.back.mem != nil:
		c.executeRAM(q, cmd, off, due)
	case b.back.calc != nil:
		if err := c.compute(q, cmd, off, due); err != nil {
			c.finish(q, cmd, 0, b.mediaStatus(cmd.Opcode, err), due)
			return
		}
	case b.sync || cmd.Opcode == nvme.OpWrite && b.back.offAlign > int64(b.cfg.LBABytes):
		if err := b.transfer(cmd.Opcode, c.segs, off, n, c.durable(cmd)); err != nil {
			c.finish(q, cmd, 0, b.mediaStatus(cmd.Opcode, err), due)
			return
		}
	default:
		if c.submit(q, cmd, off, n, due) {
			return
		}
		// The kernel has no memory for a request: a retry makes sense.
		c.finish(q, cmd, 0, nvme.StatusCommandInterrupted, due)
		return
	}
	c.finish(q, cmd, n, nvme.StatusSuccess, due)
}

// arrive tells the SSD's model of a command that is sound and returns when it may complete.
func (c *cqueue) arrive(cmd *nvme.Command, bytes int64) int64 {
	if c.bus.model == nil {
		return immediately
	}
	return c.bus.model.arrive(cmd.Opcode, bytes)
}

// finish counts a command that was carried out and posts its completion when it is due.
func (c *cqueue) finish(q *squeue, cmd *nvme.Command, moved int64, st nvme.Status, due int64) {
	switch cmd.Opcode {
	case nvme.OpRead:
		c.count.reads++
		c.count.bytesRead += uint64(moved)
	case nvme.OpWrite:
		c.count.writes++
		c.count.bytesWrite += uint64(moved)
	}
	if !st.OK() {
		if st.SCT() == nvme.SCTMedia {
			c.count.mediaErrors++
		}
		c.bus.logError(q.id, cmd, st)
	}
	c.completeAt(q, cmd.CID, st, due)
}

// durable reports whether a write must be on the medium before it completes: force unit
// access, or the volatile write cache was switched off.
func (c *cqueue) durable(cmd *nvme.Command) bool {
	return cmd.Opcode == nvme.OpWrite &&
		(cmd.CDW12&fua != 0 || atomic.LoadUint32(&c.bus.cacheOff) != 0)
}

func (c *cqueue) executeRAM(q *squeue, cmd *nvme.Command, off, due int64) {
	mem := c.bus.back.mem
	c.copying, c.copyCmd, c.copyDue = q, *cmd, due
	for _, g := range c.segs {
		if cmd.Opcode == nvme.OpRead {
			copy(g.bytes(), mem[off:])
		} else {
			copy(mem[off:], g.bytes())
		}
		off += g.n
	}
	c.copying = nil
}

// compute carries out a read of content that is computed. Writes were refused; a flush has nothing
// to do.
func (c *cqueue) compute(q *squeue, cmd *nvme.Command, off, due int64) error {
	if cmd.Opcode != nvme.OpRead {
		return nil
	}
	c.copying, c.copyCmd, c.copyDue = q, *cmd, due // a fault ends in turnOverRAM
	var err error
	for _, g := range c.segs {
		var n int
		if n, err = c.bus.back.calc.ReadAt(g.bytes(), off); int64(n) < g.n {
			err = errors.Join(io.ErrUnexpectedEOF, err)
			break
		}
		off, err = off+g.n, nil
	}
	c.copying = nil
	return err
}

// prps translates the data pointer of a transfer of n bytes to c.segs, neighbours merged
// (section 4.1.1).
func (c *cqueue) prps(prp1, prp2 uint64, n int64) nvme.Status {
	b := c.bus
	page := uint64(b.page)
	if prp1&3 != 0 {
		return nvme.StatusInvalidPRPOffset
	}
	first := min(uint64(n), page-prp1&(page-1))
	if !c.addSeg(prp1, first) {
		return nvme.StatusDataTransferError
	}
	rest := uint64(n) - first
	switch {
	case rest == 0:
		return nvme.StatusSuccess
	case rest <= page:
		if prp2&(page-1) != 0 {
			return nvme.StatusInvalidPRPOffset
		}
		if !c.addSeg(prp2, rest) {
			return nvme.StatusDataTransferError
		}
		return nvme.StatusSuccess
	case prp2&7 != 0:
		return nvme.StatusInvalidPRPOffset
	}
	for list := prp2; ; {
		// A list ends with its page; when it is too short, its last entry points to the next.
		here := (page - list&(page-1)) / 8
		left := (rest + page - 1) / page
		use, chained := left, left > here
		if chained {
			use = here - 1
		}
		read := use
		if chained {
			read++
		}
		p, ok := c.tlb.translate(b, list, 8*read)
		if !ok {
			return nvme.StatusDataTransferError
		}
		entries := unsafe.Slice((*uint64)(p), read)
		for i := range use {
			e := atomic.LoadUint64(&entries[i])
			if e&(page-1) != 0 {
				return nvme.StatusInvalidPRPOffset
			}
			m := min(rest, page)
			if !c.addSeg(e, m) {
				return nvme.StatusDataTransferError
			}
			rest -= m
		}
		if !chained {
			return nvme.StatusSuccess
		}
		if list = atomic.LoadUint64(&entries[use]); list&(page-1) != 0 {
			return nvme.StatusInvalidPRPOffset
		}
	}
}

func (c *cqueue) addSeg(iova, n uint64) bool {
	p, ok := c.tlb.translate(c.bus, iova, n)
	if !ok {
		return false
	}
	if k := len(c.segs); k > 0 && unsafe.Add(c.segs[k-1].ptr, c.segs[k-1].n) == p {
		c.segs[k-1].n += int64(n)
		return true
	}
	c.segs = append(c.segs, seg{p, int64(n)})
	return true
}

// aligned reports whether O_DIRECT takes a transfer as it is.
func (k *backing) aligned(segs []seg, off, n int64) bool {
	if (off|n)&(k.offAlign-1) != 0 {
		return false
	}
	for _, g := range segs {
		if int64(uintptr(g.ptr))&(k.memAlign-1) != 0 || g.n&(k.offAlign-1) != 0 {
			return false
		}
	}
	return true
}

// submit hands a command to the io_uring; false when there is no room for it at all.
func (c *cqueue) submit(q *squeue, cmd *nvme.Command, off, n, due int64) bool {
	b := c.bus
	var bounce []byte
	lo, hi := off, off+n
	if cmd.Opcode != nvme.OpFlush && !b.back.aligned(c.segs, off, n) {
		lo, hi = off&^(b.back.offAlign-1), (hi+b.back.offAlign-1)&^(b.back.offAlign-1)
		var err error
		if bounce, err = b.getBounce(); err != nil {
			return false
		}
	}
	e := c.sqe()
	if e == nil {
		if bounce != nil {
			b.putBounce(bounce)
		}
		return false
	}
	i := c.take(q, cmd)
	s := &c.slots[i]
	s.busy, s.due, s.off, s.bytes, s.dsync = true, due, off, n, c.durable(cmd)
	s.segs = append(s.segs[:0], c.segs...)
	s.bounce, s.skip = bounce, off-lo
	q.hold(cmd.CID)
	c.inKernel++

	f := int32(b.back.fd)
	var rwFlags uint32
	if s.dsync {
		rwFlags = unix.RWF_DSYNC
	}
	write := cmd.Opcode == nvme.OpWrite
	switch {
	case cmd.Opcode == nvme.OpFlush:
		e.PrepFsync(f, true)
	case bounce != nil && write: // writes here have whole units; their memory does not suit
		gather(bounce, s.segs)
		e.PrepWrite(f, unsafe.Pointer(&bounce[0]), uint32(n), uint64(off), rwFlags)
	case bounce != nil:
		e.PrepRead(f, unsafe.Pointer(&bounce[0]), uint32(hi-lo), uint64(lo))
	case len(s.segs) == 1 && write:
		e.PrepWrite(f, s.segs[0].ptr, uint32(n), uint64(off), rwFlags)
	case len(s.segs) == 1:
		e.PrepRead(f, s.segs[0].ptr, uint32(n), uint64(off))
	default:
		s.iov = s.iov[:0]
		for _, g := range s.segs {
			s.iov = append(s.iov, iouring.Iovec{Base: g.ptr, Len: uint64(g.n)})
		}
		if write {
			e.PrepWritev(f, s.iov, uint64(off), rwFlags)
		} else {
			e.PrepReadv(f, s.iov, uint64(off))
		}
	}
	e.Data = uint64(c.index)<<32 | uint64(uint32(i))
	return true
}

func gather(dst []byte, segs []seg) {
	for _, g := range segs {
		dst = dst[copy(dst, g.bytes()):]
	}
}

func scatter(segs []seg, src []byte) {
	for _, g := range segs {
		src = src[copy(g.bytes(), src):]
	}
}

// reaped finishes the command in slot i with the kernel's result. The caller holds the lock.
func (c *cqueue) reaped(i int32, res int32) {
	b := c.bus
	s := &c.slots[i]
	q, cmd, moved, due := s.sq, s.cmd, s.bytes, s.due
	st := nvme.StatusSuccess
	want := s.bytes
	if s.bounce != nil && cmd.Opcode == nvme.OpRead {
		want = (s.skip + s.bytes + b.back.offAlign - 1) &^ (b.back.offAlign - 1)
	}
	switch {
	case int64(res) == want:
		if s.bounce != nil && cmd.Opcode == nvme.OpRead {
			scatter(s.segs, s.bounce[s.skip:s.skip+s.bytes])
		}
	case res >= 0, res == -int32(unix.EAGAIN), res == -int32(unix.EINTR),
		res == -int32(unix.ECANCELED):
		// Cut short, which is rare and no error yet: do it again, synchronously.
		if err := b.transfer(cmd.Opcode, s.segs, s.off, s.bytes, s.dsync); err != nil {
			moved, st = 0, b.mediaStatus(cmd.Opcode, err)
		}
	default:
		moved, st = 0, b.mediaStatus(cmd.Opcode, unix.Errno(-res))
	}
	q.unhold(cmd.CID)
	c.release(i)
	c.inKernel--
	if c.drained != nil {
		close(c.drained)
		c.drained = nil
	}
	if c.dead { // nobody listens
		return
	}
	c.finish(q, &cmd, moved, st, due)
}

// mediaStatus is the status for an error of the backing.
func (b *Bus) mediaStatus(op uint8, err error) nvme.Status {
	if errors.Is(err, unix.EFAULT) {
		return nvme.StatusDataTransferError // the host took its memory away
	}
	b.reliability.Store(true)
	if op == nvme.OpRead {
		return nvme.StatusUnrecoveredRead
	}
	return nvme.StatusWriteFault
}

// transfer does a command with ordinary system calls in the calling thread.
func (b *Bus) transfer(op uint8, segs []seg, off, n int64, durable bool) error {
	k := b.back
	if op == nvme.OpWrite && k.offAlign > int64(b.cfg.LBABytes) {
		// A unit of O_DIRECT holds several blocks: read, patch, write back. One write at a
		// time, or two of them could undo each other.
		b.patchMu.Lock()
		defer b.patchMu.Unlock()
	}
	switch {
	case op == nvme.OpFlush:
		return ignoringEINTR(func() error { return unix.Fdatasync(k.fd) })
	case k.aligned(segs, off, n):
		for _, g := range segs {
			if err := k.full(op, g.bytes(), off); err != nil {
				return err
			}
			off += g.n
		}
	default:
		buf, err := b.getBounce()
		if err != nil {
			return err
		}
		defer b.putBounce(buf)
		lo, hi := off&^(k.offAlign-1), (off+n+k.offAlign-1)&^(k.offAlign-1)
		unit := buf[:hi-lo]
		if op == nvme.OpRead || hi-lo != n {
			if err := k.full(nvme.OpRead, unit, lo); err != nil {
				return err
			}
		}
		if op == nvme.OpRead {
			scatter(segs, unit[off-lo:off-lo+n])
			return nil
		}
		gather(unit[off-lo:], segs)
		if err := k.full(op, unit, lo); err != nil {
			return err
		}
	}
	if durable {
		return ignoringEINTR(func() error { return unix.Fdatasync(k.fd) })
	}
	return nil
}

// full reads or writes all of p.
func (k *backing) full(op uint8, p []byte, off int64) error {
	for len(p) > 0 {
		var n int
		var err error
		if op == nvme.OpRead {
			n, err = unix.Pread(k.fd, p, off)
		} else {
			n, err = unix.Pwrite(k.fd, p, off)
		}
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue
		case err != nil:
			return err
		case n <= 0:
			return io.ErrUnexpectedEOF // someone truncated the backing
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// getBounce returns a buffer for the largest transfer with its surrounding units.
func (b *Bus) getBounce() ([]byte, error) {
	b.bounceMu.Lock()
	defer b.bounceMu.Unlock()
	if n := len(b.bounces); n > 0 {
		p := b.bounces[n-1]
		b.bounces = b.bounces[:n-1]
		return p, nil
	}
	p, err := hostmem.Alloc(int64(b.maxTransfer)+2*b.back.offAlign, "proxy bounce buffers")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", b.name, err)
	}
	return p, nil
}

func (b *Bus) putBounce(p []byte) {
	b.bounceMu.Lock()
	b.bounces = append(b.bounces, p[:cap(p)])
	b.bounceMu.Unlock()
}
