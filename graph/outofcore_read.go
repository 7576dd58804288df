package graph

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
	"helios/internal/iouring"
)

// Reads of a file's pages, many at a time, into a fixed set of slots: io_uring with O_DIRECT, and
// where the machine has one or the other not, threads with pread, or the page cache.

const (
	filePage    = 4096 // what is read at least: also the alignment of O_DIRECT
	unitPages   = 8    // neighbouring pages that one read takes at most
	unitBytes   = unitPages * filePage
	readSlots   = 256
	readThreads = 32 // without io_uring
	readTries   = 3
	readPurpose = "neighbour list reads"
	sumPurpose  = "neighbour list checksums"
)

// Time limits of reads; tests shorten them.
var (
	readLimit  = 30 * time.Second // for each
	drainLimit = 10 * time.Second // for those in flight after an error
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// pageRun is a read: neighbouring pages, and what its owner knows of them.
type pageRun struct {
	page   int64 // of the file
	pages  int
	lo, hi int // the owner's
	tries  int
}

// StorageError is a read of the topology that failed, or returned something else than what was
// there when it was opened.
type StorageError struct {
	Path   string
	Offset int64 // of the bytes, in the file
	Bytes  int
	Err    error
}

func (e *StorageError) Error() string {
	return fmt.Sprintf("topology on storage: read %s at %d+%d: %v", e.Path, e.Offset,
		e.Bytes, e.Err)
}

func (e *StorageError) Unwrap() error { return e.Err }

// Causes of a StorageError beside the system's.
var (
	// ErrTopologyShort is the cause when the file has become shorter.
	ErrTopologyShort = errors.New(
		"the file has become shorter; restore it, or import the dataset again")
	// ErrTopologyChanged is the cause when a page has another checksum than it was sealed with, or
	// than at the start.
	ErrTopologyChanged = errors.New(
		"the file is not what it was when the dataset was made or the run began: it was written to, or its storage damages data; restore it, or import the dataset again, and run \"heliosctl verify\"")
	// ErrTopologyLate is the cause when a read does not end.
	ErrTopologyLate = errors.New(
		"no answer in time; look at the kernel's log for the storage behind it")
)

func (r *pageReader) failed(off int64, n int, cause error) error {
	return errs.With(errs.Device, &StorageError{r.path, off, n, cause})
}

// ended is the error of reads that go on no longer.
func ended(ctx context.Context) error {
	if cause := context.Cause(ctx); !errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("read the topology: %w", cause)
	}
	return errs.New(errs.Device,
		"read the topology: a hop's reads are too many for the storage to answer in time: %w; lower %v or %v, raise %v, or keep the topology in memory (%v)",
		context.DeadlineExceeded, errs.Key("batch-size"), errs.Key("fanout"),
		errs.Key("neighbor-cache"), errs.Key("topology"))
}

// readRoom has the slots and the ring of the reads of one file, or of some that take turns.
type readRoom struct {
	mu     sync.Mutex    // held by the one who reads
	users  int           // files
	ring   *iouring.Ring // nil: threads
	wait   iouring.Wait
	mem    []byte // readSlots × unitBytes
	runs   [readSlots]pageRun
	began  [readSlots]time.Time
	free   []int32
	broken error // reads that never ended: their slots can't be used again
}

func newReadRoom(ring bool) (*readRoom, error) {
	r := &readRoom{}
	var err error
	if r.mem, err = hostmem.Alloc(readSlots*unitBytes, readPurpose); err != nil {
		return nil, err
	}
	if ring {
		r.ring, err = iouring.New(iouring.Options{Entries: readSlots, CQEntries: 2 * readSlots})
		if err != nil && errs.ClassOf(err) != errs.Capability {
			return nil, errors.Join(err, hostmem.Free(r.mem))
		}
		if err != nil {
			r.ring = nil
		}
	}
	for i := range readSlots {
		r.free = append(r.free, int32(i))
	}
	return r, nil
}

// close ends the room where nobody uses it.
func (r *readRoom) close() error {
	if r.users > 0 || r.broken != nil {
		return nil // an SSD may still write to slots of broken reads: they stay
	}
	var err error
	if r.ring != nil {
		err = r.ring.Close()
	}
	err = errors.Join(err, hostmem.Free(r.mem))
	r.mem, r.broken = nil, os.ErrClosed
	return err
}

// pageReader reads pages of one file. One read call at a time.
type pageReader struct {
	*readRoom
	first  bool // user of the room, of whose memory its topology gives account
	path   string
	file   *os.File
	fd     int32
	end    int64 // of the payload
	pages  int64 // that hold it
	direct bool

	sums []uint32 // of each page's part of the payload; nil until known

	reads, bytes, retries, pagesRead int64
}

// openPages opens path, whose payload ends at byte end, to be read in a room.
func openPages(path string, end int64, direct bool, room *readRoom) (*pageReader, error) {
	r := &pageReader{readRoom: room, path: path, end: end, pages: (end + filePage - 1) / filePage}
	flags := unix.O_RDONLY | unix.O_CLOEXEC
	if direct {
		if fd, err := unix.Open(path, flags|unix.O_DIRECT, 0); err == nil {
			r.file, r.direct = os.NewFile(uintptr(fd), path), true
		}
	}
	if r.file == nil {
		f, err := infile.Open(path)
		if err != nil {
			return nil, errs.New(errs.Device,
				"topology on storage: %w; make it readable, or import the dataset again", err)
		}
		r.file = f
	}
	if r.direct && r.pages > 0 {
		// A file system may take the flag and refuse the read.
		if _, err := r.file.ReadAt(r.mem[:filePage], 0); errors.Is(err, unix.EINVAL) {
			_ = r.file.Close()
			if r.file, err = infile.Open(path); err != nil {
				return nil, errs.With(errs.Device, err)
			}
			r.direct = false
		}
	}
	r.fd = int32(r.file.Fd())
	if !r.direct {
		_ = unix.Fadvise(int(r.fd), 0, 0, unix.FADV_RANDOM)
	}
	r.first = room.users == 0
	room.users++
	return r, nil
}

func (r *pageReader) close() error {
	if r.broken != nil {
		return nil
	}
	err := errors.Join(r.file.Close(), hostmem.Free(bytesOf(r.sums)))
	r.sums = nil
	r.users--
	return errors.Join(err, r.readRoom.close())
}

// roomBytes is the memory of the room, for its first user.
func (r *pageReader) roomBytes() int64 {
	if !r.first {
		return 0
	}
	return int64(len(r.mem))
}

// span is the place of a run's bytes in the file, of the payload only.
func (r *pageReader) span(u *pageRun) (off int64, n int) {
	off = u.page * filePage
	return off, int(min(int64(u.pages)*filePage, r.end-off))
}

// checked holds a run's bytes against the checksums; -1: they agree.
func (r *pageReader) checked(u *pageRun, data []byte) int {
	if r.sums == nil {
		return -1
	}
	for i := 0; i < u.pages; i++ {
		p := data[i*filePage : min((i+1)*filePage, len(data))]
		if crc32.Checksum(p, castagnoli) != r.sums[u.page+int64(i)] {
			return i
		}
	}
	return -1
}

// read reads the runs that next gives until it returns false, and calls done with each one's bytes:
// in any order, one at a time. When it returns nothing is in flight, but for reads that have not
// ended long after an error: then the reader is broken.
func (r *pageReader) read(ctx context.Context, next func(*pageRun) bool,
	done func(u *pageRun, data []byte) error) error {
	if r.broken != nil {
		return r.broken
	}
	if r.ring == nil {
		return r.readThreads(ctx, next, done)
	}
	return (&ringRead{pageReader: r, next: next, done: done, more: true,
		cqes: make([]iouring.CQE, 64)}).run(ctx)
}

// ringRead is a read by io_uring under way.
type ringRead struct {
	*pageReader
	next     func(*pageRun) bool
	done     func(u *pageRun, data []byte) error
	more     bool    // next may have runs
	again    []int32 // slots to be read once more
	inFlight int
	cqes     []iouring.CQE
	failure  error
	stop     time.Time // of waiting for reads in flight after a failure
}

func (r *ringRead) run(ctx context.Context) error {
	for {
		r.submit()
		if r.inFlight == 0 && (r.failure != nil || !r.more && len(r.again) == 0) {
			break
		}
		r.ring.Flush()
		if err := r.ring.SubmitAndWait(&r.wait, min(r.inFlight, max(1, r.inFlight/8)),
			50*time.Millisecond, 200*time.Microsecond); err != nil && !errors.Is(err,
			iouring.ErrNotEntered) {
			r.fail(errs.New(errs.Device, "topology on storage: %s: %w", r.path, err))
		}
		got := r.reap()
		if ctx.Err() != nil {
			r.fail(ended(ctx))
		}
		if got > 0 {
			continue
		}
		now := time.Now()
		if r.failure == nil {
			r.failLate(now)
		} else if now.After(r.stop) && r.inFlight > 0 {
			r.broken = errs.New(errs.Device,
				"topology on storage: %d reads of %s have not ended: %w", r.inFlight, r.path,
				r.failure)
			return r.broken
		}
	}
	r.free = append(r.free, r.again...)
	return r.failure
}

func (r *ringRead) fail(err error) {
	if r.failure == nil {
		r.failure, r.stop = err, time.Now().Add(drainLimit)
	}
}

// submit fills the ring with reads.
func (r *ringRead) submit() {
	for r.failure == nil && (len(r.again) > 0 || r.more && len(r.free) > 0) {
		var slot int32
		if n := len(r.again); n > 0 {
			slot, r.again = r.again[n-1], r.again[:n-1]
		} else {
			slot = r.free[len(r.free)-1]
			if r.more = r.next(&r.runs[slot]); !r.more {
				break
			}
			r.free = r.free[:len(r.free)-1]
			r.runs[slot].tries = 0
		}
		sqe := r.ring.SQE()
		if sqe == nil {
			r.again = append(r.again, slot)
			break
		}
		u := &r.runs[slot]
		off, n := r.span(u)
		// O_DIRECT takes whole blocks; the end of the file cuts the answer.
		sqe.PrepRead(r.fd, unsafe.Pointer(&r.mem[int(slot)*unitBytes]),
			uint32((n+filePage-1)&^(filePage-1)), uint64(off))
		sqe.Data = uint64(slot)
		r.began[slot] = time.Now()
		r.reads++
		r.inFlight++
	}
}

// reap takes all answers and returns their number.
func (r *ringRead) reap() int {
	got := 0
	for n := r.ring.Reap(r.cqes); n > 0; n = r.ring.Reap(r.cqes) {
		got += n
		for _, c := range r.cqes[:n] {
			slot := int32(c.Data)
			r.inFlight--
			redo := false
			if r.failure == nil {
				var err error
				if redo, err = r.arrived(slot, int(c.Res), r.done); err != nil {
					r.fail(err)
				}
			}
			if redo {
				r.again = append(r.again, slot)
			} else {
				r.free = append(r.free, slot)
			}
		}
	}
	return got
}

// failLate fails where a read in flight is past its limit.
func (r *ringRead) failLate(now time.Time) {
	for slot := range r.runs {
		if !slices.Contains(r.free, int32(slot)) && !slices.Contains(r.again, int32(slot)) &&
			now.Sub(r.began[slot]) > readLimit {
			off, n := r.span(&r.runs[slot])
			r.fail(r.failed(off, n, fmt.Errorf("%w (%v)", ErrTopologyLate, readLimit)))
		}
	}
}

// arrived deals with the answer to a read: res bytes, or an error number below 0. redo asks for it
// once more.
func (r *pageReader) arrived(slot int32, res int, done func(*pageRun, []byte) error) (redo bool,
	err error) {
	u := &r.runs[slot]
	off, n := r.span(u)
	u.tries++
	var cause error
	switch {
	case res < 0:
		cause = fmt.Errorf("%w; look at the kernel's log for the storage behind it",
			unix.Errno(-res))
	case res < n:
		if st, serr := r.file.Stat(); serr == nil && st.Size() < off+int64(n) {
			return false, r.failed(off, n, fmt.Errorf("%w (it has %d bytes)", ErrTopologyShort,
				st.Size()))
		}
		cause = io.ErrUnexpectedEOF
	default:
		data := r.mem[int(slot)*unitBytes:][:n]
		bad := r.checked(u, data)
		if bad < 0 {
			r.bytes += int64(n)
			r.pagesRead += int64(u.pages)
			return false, done(u, data)
		}
		off, n, cause = off+int64(bad)*filePage, filePage, ErrTopologyChanged
	}
	if u.tries >= readTries {
		return false, r.failed(off, n, cause)
	}
	r.retries++
	return true, nil
}

// readThreads is read without io_uring.
func (r *pageReader) readThreads(ctx context.Context, next func(*pageRun) bool,
	done func(u *pageRun, data []byte) error) error {
	var mu sync.Mutex
	var failure error
	var wg sync.WaitGroup
	for slot := range int32(readThreads) {
		wg.Go(func() {
			u := &r.runs[slot]
			for redo := false; ; {
				mu.Lock()
				if failure == nil && ctx.Err() != nil {
					failure = ended(ctx)
				}
				if failure != nil || !redo && !next(u) {
					mu.Unlock()
					return
				}
				if !redo {
					u.tries = 0
				}
				r.reads++
				off, n := r.span(u)
				mu.Unlock()
				res, err := unix.Pread(int(r.fd),
					r.mem[int(slot)*unitBytes:][:(n+filePage-1)&^(filePage-1)], off)
				var no unix.Errno
				if errors.As(err, &no) {
					res = -int(no)
				}
				mu.Lock()
				if failure == nil {
					redo, failure = r.arrived(slot, res, done)
				}
				mu.Unlock()
			}
		})
	}
	// A thread in pread can't be stopped: the wait is, and what the threads hold stays.
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	for before := int64(-1); ; {
		select {
		case <-ended:
			return failure
		case <-time.After(readLimit):
			mu.Lock()
			idle := r.reads == before
			before = r.reads
			if idle {
				r.broken = errs.With(errs.Device, &StorageError{r.path, 0, int(min(r.end, 1<<30)),
					ErrTopologyLate})
				failure = r.broken
			}
			mu.Unlock()
			if idle {
				return r.broken
			}
		}
	}
}

// all iterates over every page from one on, in order.
func (r *pageReader) all(from, to int64) func(*pageRun) bool {
	return func(u *pageRun) bool {
		if from >= to {
			return false
		}
		*u = pageRun{page: from, pages: int(min(unitPages, to-from))}
		from += int64(u.pages)
		return true
	}
}

// know takes over the checksums of all pages.
func (r *pageReader) know(sums []uint32) error {
	if int64(len(sums)) != r.pages {
		return errs.New(errs.Device,
			"topology on storage: %s has %d pages and %d checksums; import the dataset again",
			r.path, r.pages, len(sums))
	}
	mem, err := hostmem.Alloc(r.pages*4, sumPurpose)
	if err != nil {
		return err
	}
	r.sums = hostmem.View[uint32](mem)
	copy(r.sums, sums)
	return nil
}

// sum shows each page's bytes to see, and computes the checksums of all pages where they are not
// known.
func (r *pageReader) sum(ctx context.Context, see func(off int64, data []byte) error) error {
	if r.sums != nil {
		return r.read(ctx, r.all(0, r.pages),
			func(u *pageRun, data []byte) error { return see(u.page*filePage, data) })
	}
	mem, err := hostmem.Alloc(r.pages*4, sumPurpose)
	if err != nil {
		return err
	}
	sums := hostmem.View[uint32](mem)
	err = r.read(ctx, r.all(0, r.pages), func(u *pageRun, data []byte) error {
		for i := 0; i < u.pages; i++ {
			sums[u.page+int64(i)] = crc32.Checksum(data[i*filePage:min((i+1)*filePage, len(data))],
				castagnoli)
		}
		return see(u.page*filePage, data)
	})
	if err != nil {
		return errors.Join(err, hostmem.Free(mem))
	}
	r.sums = sums
	return nil
}
