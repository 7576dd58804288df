// Package iouring is a small binding of Linux's io_uring on raw system calls: one ring,
// the operations that block storage needs, submission and waiting with a timeout in one call.
//
// It keeps no lock: a Ring's submission side (SQE, Flush) and its completion side (Reap) each
// belong to one goroutine at a time, and the caller chooses it. Enter may be called from
// several goroutines at once, since the kernel serialises submission and waiting touches no
// state of the ring.
package iouring

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostcpu"
)

// Options shape a ring.
type Options struct {
	Entries   int // submission queue entries, rounded up to a power of two; 0 = 256
	CQEntries int // completion queue entries; 0 = 4 × Entries
}

// Ring is an io_uring instance.
type Ring struct {
	fd       int
	features uint32

	ringMem, sqeMem []byte

	sqHead, sqTail *uint32
	sqMask         uint32
	sqEntries      uint32
	sqes           []SQE
	tail           uint32 // next SQE to hand out; published by Flush

	cqHead, cqTail *uint32
	cqMask         uint32
	cqEntries      uint32
	cqes           []CQE
}

// ErrNotEntered is Enter's error when the kernel took nothing for lack of memory or of completion
// queue space: reap, then try again.
var ErrNotEntered = errors.New("io_uring: kernel is out of request memory or completion space")

// New makes a ring. Its error has class Capability when the kernel has no io_uring, forbids
// it, or has one that is too old.
func New(opt Options) (*Ring, error) {
	if opt.Entries == 0 {
		opt.Entries = 256
	}
	if opt.CQEntries == 0 {
		opt.CQEntries = 4 * opt.Entries
	}
	if opt.Entries < 1 || opt.CQEntries < opt.Entries {
		return nil,
			fmt.Errorf(
				"io_uring: %d submission and %d completion entries: need 1 or more, and as many completions",
				opt.Entries, opt.CQEntries)
	}
	p := params{flags: setupCQSize | setupClamp, cqEntries: uint32(opt.CQEntries)}
	fd, err := setup(uint32(opt.Entries), &p)
	switch err {
	case nil:
	case unix.ENOSYS, unix.EPERM, unix.EACCES:
		return nil, errs.New(errs.Capability,
			"io_uring is not available (%w): check sysctl kernel.io_uring_disabled and the container's seccomp profile",
			err)
	case unix.ENOMEM:
		return nil, errs.New(errs.Capability,
			"io_uring: no memory for %d entries (%w): raise RLIMIT_MEMLOCK (ulimit -l)",
			opt.Entries, err)
	default:
		return nil, fmt.Errorf("io_uring_setup: %w", err)
	}
	r := &Ring{fd: fd, features: p.features}
	if need := uint32(featSingleMmap | featNoDrop | featExtArg); p.features&need != need {
		_ = r.Close()
		return nil, errs.New(errs.Capability,
			"io_uring of this kernel is too old (features %#x): Linux 5.11 or newer is needed",
			p.features)
	}
	if err := r.mmap(&p); err != nil {
		_ = r.Close()
		return nil, err
	}
	return r, nil
}

func setup(entries uint32, p *params) (int, error) {
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries),
		uintptr(unsafe.Pointer(p)), 0)
	if e != 0 {
		return -1, e
	}
	unix.CloseOnExec(int(fd))
	return int(fd), nil
}

func (r *Ring) mmap(p *params) error {
	size := max(int(p.sqOff.array)+4*int(p.sqEntries),
		int(p.cqOff.cqes)+int(unsafe.Sizeof(CQE{}))*int(p.cqEntries))
	mem, err := unix.Mmap(r.fd, offSQRing, size, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("io_uring: map the rings: %w", err)
	}
	r.ringMem = mem
	sqe, err := unix.Mmap(r.fd, offSQEs, int(unsafe.Sizeof(SQE{}))*int(p.sqEntries),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("io_uring: map the submission entries: %w", err)
	}
	r.sqeMem = sqe
	u32 := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&mem[off])) }
	r.sqHead, r.sqTail = u32(p.sqOff.head), u32(p.sqOff.tail)
	r.sqMask, r.sqEntries = *u32(p.sqOff.ringMask), p.sqEntries
	r.sqes = unsafe.Slice((*SQE)(unsafe.Pointer(&sqe[0])), p.sqEntries)
	// SQE i always stands in slot i, so the indirection array is written once.
	array := unsafe.Slice(u32(p.sqOff.array), p.sqEntries)
	for i := range array {
		array[i] = uint32(i)
	}
	r.cqHead, r.cqTail = u32(p.cqOff.head), u32(p.cqOff.tail)
	r.cqMask, r.cqEntries = *u32(p.cqOff.ringMask), p.cqEntries
	r.cqes = unsafe.Slice((*CQE)(unsafe.Pointer(&mem[p.cqOff.cqes])), p.cqEntries)
	r.tail = atomic.LoadUint32(r.sqTail)
	return nil
}

// Close releases the ring. Operations in flight are cancelled by the kernel in its own time:
// wait for them first when they write to memory that will be reused.
func (r *Ring) Close() error {
	var err error
	if r.sqeMem != nil {
		err = errors.Join(err, unix.Munmap(r.sqeMem))
		r.sqeMem, r.sqes = nil, nil
	}
	if r.ringMem != nil {
		err = errors.Join(err, unix.Munmap(r.ringMem))
		r.ringMem, r.cqes = nil, nil
	}
	if r.fd >= 0 {
		err = errors.Join(err, unix.Close(r.fd))
		r.fd = -1
	}
	return err
}

// CQEntries is the size of the completion queue: as many operations should be in flight at most.
func (r *Ring) CQEntries() int { return int(r.cqEntries) }

// SQE hands out the next free submission entry, zeroed, or nil when the queue is full. The
// kernel sees it after Flush.
func (r *Ring) SQE() *SQE {
	if r.tail-atomic.LoadUint32(r.sqHead) >= r.sqEntries {
		return nil
	}
	s := &r.sqes[r.tail&r.sqMask]
	r.tail++
	*s = SQE{}
	return s
}

// Flush publishes the entries handed out so far.
func (r *Ring) Flush() { atomic.StoreUint32(r.sqTail, r.tail) }

// Unsubmitted is the number of published entries that the kernel has not taken yet.
func (r *Ring) Unsubmitted() uint32 {
	// Head first: it never passes the tail, so the difference is not negative.
	h := atomic.LoadUint32(r.sqHead)
	return atomic.LoadUint32(r.sqTail) - h
}

// Ready is the number of completions that can be reaped.
func (r *Ring) Ready() uint32 {
	h := atomic.LoadUint32(r.cqHead)
	return atomic.LoadUint32(r.cqTail) - h
}

// Reap moves up to len(dst) completions to dst and returns their number.
func (r *Ring) Reap(dst []CQE) int {
	h := atomic.LoadUint32(r.cqHead)
	n := min(int(atomic.LoadUint32(r.cqTail)-h), len(dst))
	if n == 0 {
		return 0
	}
	for i := range n {
		dst[i] = r.cqes[(h+uint32(i))&r.cqMask]
	}
	atomic.StoreUint32(r.cqHead, h+uint32(n))
	return n
}

// Submit hands all published entries to the kernel without waiting. It is a raw system call: the
// kernel computes for a few us an entry, and Go's scheduler need not look after that.
func (r *Ring) Submit() error {
	r.submitParts()
	n := r.Unsubmitted()
	if n == 0 {
		return nil
	}
	_, _, e := unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(n), 0, 0, 0, 0)
	return enterError(e)
}

// submitParts hands all published entries but the last few to the kernel, in several calls: see
// SubmitAndWait.
func (r *Ring) submitParts() {
	for n := r.Unsubmitted(); ; {
		step := max(n/submitParts, r.inKernel(), 1)
		if n <= step {
			return
		}
		if done, _, e := unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(step), 0,
			0, 0, 0); e != 0 || done == 0 {
			return // the caller's own call explains why
		}
		n = r.Unsubmitted()
	}
}

// submitParts is in how many calls a batch is submitted at most. While the kernel works on others
// the device has enough to do, and a call takes as many as those are.
const submitParts = 16

// inKernel is the number of operations that the kernel has taken and whose completions nobody has
// reaped.
func (r *Ring) inKernel() uint32 {
	h := atomic.LoadUint32(r.cqHead)
	return atomic.LoadUint32(r.sqHead) - h
}

// Wait is the argument block of SubmitAndWait; a waiter keeps one, so that waiting does not
// allocate. One goroutine uses it at a time.
type Wait struct {
	arg geteventsArg
	ts  timespec
}

// SubmitAndWait submits all published entries and returns when atLeast completions have come
// since the call, or the time is over, or a signal came. When batch is not 0 and the kernel
// is 6.12 or newer, it returns after that time already with fewer, but at least one.
// It returns nil in all these cases; the caller looks at the completion queue. In the place of
// hostcpu.AddWaiter it returns after placeTime at the latest.
//
// Many entries go to the kernel in several calls. The kernel hands those of one call to the
// device as one batch, and a device that answers a batch at once (virtual disks do) would have
// nothing to do while the answers are dealt with and the next batch is made: at depth 32 that
// costs a fifth of the throughput, and the further calls hardly any processor time.
func (r *Ring) SubmitAndWait(w *Wait, atLeast int, timeout, batch time.Duration) error {
	placed := hostcpu.TakePlace()
	if placed {
		defer hostcpu.FreePlace()
		timeout = min(timeout, placeTime)
	}
	timeout = max(timeout, 0)
	w.ts = timespec{int64(timeout / time.Second), int64(timeout % time.Second)}
	w.arg = geteventsArg{sigmaskSz: 8, ts: unsafe.Pointer(&w.ts)}
	if batch > 0 {
		if r.features&featMinTimeout != 0 {
			w.arg.minWaitUsec = uint32(batch / time.Microsecond)
		} else {
			atLeast = 1
		}
	}
	r.submitParts()
	const flags = enterGetevents | enterExtArg
	var e unix.Errno
	if placed {
		_, _, e = unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(r.Unsubmitted()),
			uintptr(atLeast), flags, uintptr(unsafe.Pointer(&w.arg)), unsafe.Sizeof(w.arg))
	} else {
		_, _, e = unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(r.Unsubmitted()),
			uintptr(atLeast), flags, uintptr(unsafe.Pointer(&w.arg)), unsafe.Sizeof(w.arg))
	}
	return enterError(e)
}

// placeTime bounds a wait that Go's scheduler does not see: timers of its place wait as long.
const placeTime = 2 * time.Millisecond

func enterError(e unix.Errno) error {
	switch e {
	case 0, unix.EINTR, unix.ETIME:
		return nil
	case unix.EAGAIN, unix.EBUSY, unix.ENOMEM:
		return ErrNotEntered
	}
	return fmt.Errorf("io_uring_enter: %w", e)
}
