package gpuio

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/iouring"
	"helios/nvme"
)

// CPUOptions shape the cpu stack. Zero values choose defaults.
type CPUOptions struct {
	Threads int           // io_uring: one per CPU; pread: one per outstanding read, 64 at most
	Depth   int           // reads outstanding per SSD, over all threads (256)
	Engine  string        // "io_uring" (default where there is one) or "pread"
	Timeout time.Duration // deadline of one attempt, io_uring only (10 s)
	Retries int           // attempts after the first; negative: none (3)
	// CoalesceBytes bounds one read for rows on equal and close LBAs. 0: up to 128
	// KiB, where it is expected to save reads; negative: a read for each row.
	CoalesceBytes int
	Speed         Speed // of the SSDs, as measured: how close is close
}

// StackCPU reads with the CPU, past the page cache.
const StackCPU = "cpu"

var cpuStack = &Stack{
	Name: StackCPU, Summary: "the CPU reads and gathers", Coalesces: true,
	Open: func(dev cuda.Device, ssds []*SSD, l Layout, o StackOptions) (Reader, error) {
		return NewCPU(dev, ssds, l, CPUOptions{
			Threads: o.Workers, Depth: o.Depth, Engine: o.Engine, Timeout: o.Timeout,
			Retries: o.Retries, CoalesceBytes: o.CoalesceBytes, Speed: o.Speed,
		})
	},
}

// NewCPU makes the CPU-managed stack: threads read the backing files with O_DIRECT into their own
// buffers, and copy each row to its place.
func NewCPU(dev cuda.Device, ssds []*SSD, l Layout, o CPUOptions) (Reader, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	r, err := newHostReader(StackCPU, dev, ssds, l, true)
	if err != nil {
		return nil, err
	}
	r.share = o.CoalesceBytes
	r.units, err = chooseUnits(l, max(l.ReadBytes(), maxHostRead), true, o.CoalesceBytes, o.Depth,
		o.Speed)
	if err == nil {
		err = r.startWorkers(o, o.Depth*len(ssds))
	}
	if err != nil {
		r.mu.Lock()
		r.closed = true
		r.more.Broadcast()
		r.mu.Unlock()
		r.workers.Wait()
		return nil, errors.Join(err, r.copyS.Close(), r.closeFiles())
	}
	return r, nil
}

// fill puts the defaults in place of zero values, and refuses what cannot be.
func (o *CPUOptions) fill() error {
	o.Depth = cmp.Or(o.Depth, defaultDepth)
	o.Timeout = cmp.Or(o.Timeout, defaultTimeout)
	o.Retries = max(cmp.Or(o.Retries, defaultRetries), 0)
	switch {
	case o.Depth < 1 || o.Depth > maxDepth:
		return errs.New(errs.Usage, "depth %d: choose 1 to %d reads outstanding per SSD",
			o.Depth, maxDepth)
	case o.Threads < 0 || o.Threads > 1024:
		return errs.New(errs.Usage, "%d threads: choose 1 to 1024", o.Threads)
	case o.Engine != "" && o.Engine != "io_uring" && o.Engine != "pread":
		return errs.New(errs.Usage, "I/O engine %q: choose io_uring or pread", o.Engine)
	}
	return nil
}

// startWorkers starts the threads, which together have total reads outstanding.
func (r *hostReader) startWorkers(o CPUOptions, total int) error {
	if o.Engine != "pread" {
		err := r.startRings(o, total)
		if o.Engine != "" || errs.ClassOf(err) != errs.Capability {
			return err
		}
		// There is no io_uring here: the same reads, one per thread.
	}
	r.grab = 1 // a thread has one read outstanding
	for range cmp.Or(o.Threads, min(total, 64)) {
		w, err := newPreadWorker(r, o.Retries)
		if err != nil {
			return err
		}
		r.workers.Add(1)
		go w.loop()
	}
	return nil
}

// startRings starts the threads with io_uring: all, or none.
func (r *hostReader) startRings(o CPUOptions, total int) error {
	workers := make([]*ringWorker, min(cmp.Or(o.Threads, runtime.NumCPU()), total))
	for t := range workers {
		depth := total / len(workers)
		if t < total%len(workers) {
			depth++
		}
		w, err := newRingWorker(r, depth, o)
		if err != nil {
			for _, made := range workers[:t] {
				made.close()
			}
			return err
		}
		workers[t] = w
	}
	r.workers.Add(len(workers))
	for _, w := range workers {
		go w.loop()
	}
	return nil
}

// maxHostRead bounds what rows share one read.
const maxHostRead = 2 << 20

// maxSpan is the longest read on any of the files.
func (r *hostReader) maxSpan() int {
	n := 0
	for _, f := range r.files {
		n = max(n, max(int(r.layout.LBAsPerRow), int(r.units.window))*int(r.layout.LBABytes)+
			2*int(f.align))
	}
	return (n + 4095) / 4096 * 4096
}

type preadWorker struct {
	r       *hostReader
	buf     []byte
	retries int
}

func newPreadWorker(r *hostReader, retries int) (*preadWorker, error) {
	buf, err := hostmem.Alloc(int64(r.maxSpan()), "gpuio cpu buffers")
	if err != nil {
		return nil, err
	}
	return &preadWorker{r, buf, retries}, nil
}

func (w *preadWorker) loop() {
	defer w.r.workers.Done()
	w.r.syncWorker(w.read)
	// Only a failing munmap of our own memory could matter here, and it leaks at worst.
	_ = hostmem.Free(w.buf)
}

func (w *preadWorker) read(p *hostPending, u *hostUnit) error {
	f := u.file
	pos, n, skip := f.span(u.off, u.want)
	for try := 0; ; try++ {
		p.account(u.ssd, n)
		got, err := f.f.ReadAt(w.buf[:n], pos)
		if got >= skip+u.want {
			p.deliver(u, w.buf[skip:])
			return nil
		}
		if err == nil || err == io.EOF {
			return shortRead(f, pos, n, got)
		}
		if try == w.retries {
			return &BackingError{SSD: f.ssd, Path: f.path, Offset: pos, Bytes: n, Err: err}
		}
		p.retries.Add(1)
	}
}

func shortRead(f *backing, at int64, want, got int) error {
	return &BackingError{SSD: f.ssd, Path: f.path, Offset: at, Bytes: want,
		Err: fmt.Errorf("%w: it gave %d bytes", ErrShort, got)}
}

// ringWorker keeps up to depth reads in flight on a ring of its own.
type ringWorker struct {
	r        *hostReader
	ring     *iouring.Ring
	timeout  time.Duration
	retries  int
	buf      []byte // depth × span
	span     int
	slots    []ringSlot
	free     []int
	busy     int // slots in flight, orphans included
	hist     Histogram
	p        *hostPending // rows taken and not yet begun
	next     int64
	end      int64
	settled  int64 // rows of p that failed before a read
	prepared bool  // p's row list is there
	lastExp  time.Time
	merged   time.Time
}

type ringSlot struct {
	p      *hostPending // nil: free, or orphaned after a timeout
	u      hostUnit
	at     int64
	n      int
	skip   int
	tries  int
	first  time.Time
	began  time.Time
	flying bool
}

func newRingWorker(r *hostReader, depth int, o CPUOptions) (*ringWorker, error) {
	ring, err := iouring.New(iouring.Options{Entries: min(depth, 4096),
		CQEntries: min(max(2*depth, min(depth, 4096)), 1<<16)})
	if err != nil {
		return nil, err
	}
	w := &ringWorker{r: r, ring: ring, timeout: o.Timeout, retries: o.Retries, span: r.maxSpan(),
		slots: make([]ringSlot, depth)}
	if w.buf, err = hostmem.Alloc(int64(depth*w.span), "gpuio cpu buffers"); err != nil {
		return nil, errors.Join(err, ring.Close())
	}
	for i := depth - 1; i >= 0; i-- {
		w.free = append(w.free, i)
	}
	return w, nil
}

func (w *ringWorker) loop() {
	runtime.LockOSThread() // io_uring completes into the submitting thread
	defer runtime.UnlockOSThread()
	defer w.r.workers.Done()
	defer w.close()
	var wait iouring.Wait
	cqes := make([]iouring.CQE, 64)
	cpu := hostcpu.Thread{By: w.r.spender()}
	defer cpu.Lap()
	for {
		cpu.Lap()
		if !w.fill() && w.busy == 0 {
			return
		}
		if w.busy == 0 {
			continue
		}
		// Fewer wake-ups: with many reads in flight wait for a few of them, but not long.
		atLeast, batch := 1, time.Duration(0)
		if w.busy >= 16 {
			atLeast, batch = w.busy/8, 50*time.Microsecond
		}
		limit := min(w.timeout, time.Second)
		if w.p != nil && !w.prepared { // look at its event now and then
			limit = time.Millisecond
		}
		if err := w.ring.SubmitAndWait(&wait, atLeast, limit, batch); err != nil &&
			!errors.Is(err, iouring.ErrNotEntered) {
			w.giveUp(err)
			return
		}
		for {
			n := w.ring.Reap(cqes)
			for _, c := range cqes[:n] {
				w.complete(int(c.Data), c.Res)
			}
			if n < len(cqes) {
				break
			}
		}
		w.housekeep()
	}
}

// close frees the buffers. Orphaned reads may still write to them: they are waited for, since the
// kernel ends them at the latest when the device gives up.
func (w *ringWorker) close() {
	w.r.merge(&w.hist)
	if err := w.ring.Close(); err != nil || w.busy > 0 {
		return // the memory stays with the reads that nobody could stop
	}
	_ = hostmem.Free(w.buf)
}

// fill starts reads while there are slots and rows. False: the reader is closed and nothing is
// left to take.
func (w *ringWorker) fill() bool {
	for len(w.free) > 0 {
		if w.next == w.end {
			if w.p != nil {
				w.p.finished(w.settled)
				w.p, w.settled = nil, 0
			}
			p, lo, hi := w.r.take(false)
			if p == nil {
				if w.busy > 0 {
					break
				}
				w.r.merge(&w.hist)
				if p, lo, hi = w.r.take(true); p == nil {
					return false
				}
			}
			w.p, w.next, w.end, w.prepared = p, lo, hi, false
		}
		if !w.prepared {
			// Nobody may have to wait for reads that have begun because a later set's row list
			// is not there yet: it may depend on them.
			if w.busy > 0 && w.p.rs.Ready != nil && !w.p.rs.Ready.Done() {
				break
			}
			if err := w.p.prepare(); err != nil {
				w.p.failAll(w.end-w.next, err)
				w.p, w.next = nil, w.end
				continue
			}
			w.prepared = true
		}
		u := w.p.unit(w.next)
		w.next++
		if u.file == nil {
			w.settled += u.rows()
			continue
		}
		id := w.free[len(w.free)-1]
		w.free = w.free[:len(w.free)-1]
		s := &w.slots[id]
		*s = ringSlot{p: w.p, u: u, first: time.Now()}
		s.at, s.n, s.skip = u.file.span(u.off, u.want)
		w.start(id)
	}
	w.ring.Flush()
	if w.p != nil && w.next == w.end {
		w.p.finished(w.settled)
		w.p, w.settled = nil, 0
	}
	return true
}

func (w *ringWorker) start(id int) {
	s := &w.slots[id]
	sqe := w.ring.SQE()
	var begin time.Time
	for sqe == nil { // all entries handed out and not yet taken by the kernel
		w.ring.Flush()
		if begin.IsZero() {
			begin = time.Now()
		}
		err := w.ring.Submit()
		if err != nil && (!errors.Is(err, iouring.ErrNotEntered) || time.Since(begin) > w.timeout) {
			w.fail(id, err)
			return
		}
		sqe = w.ring.SQE()
	}
	f := s.u.file
	sqe.PrepRead(f.fd, unsafe.Pointer(&w.buf[id*w.span]), uint32(s.n),
		uint64(s.at))
	sqe.Data = uint64(id)
	s.tries++
	s.began = time.Now()
	s.flying = true
	s.p.account(s.u.ssd, s.n)
	w.busy++
}

func (w *ringWorker) complete(id int, res int32) {
	s := &w.slots[id]
	w.busy--
	s.flying = false
	f := s.u.file
	switch {
	case s.p == nil: // its row was given up
		w.free = append(w.free, id)
		return
	case res < 0:
		errno := unix.Errno(-res)
		if s.tries <= w.retries {
			s.p.retries.Add(1)
			w.start(id)
			w.ring.Flush()
			return
		}
		w.fail(id, &BackingError{SSD: f.ssd, Path: f.path, Offset: s.at, Bytes: s.n, Err: errno})
		return
	case int(res) < s.skip+s.u.want:
		w.fail(id, shortRead(f, s.at, s.n, int(res)))
		return
	}
	p := s.p
	p.deliver(&s.u, w.buf[id*w.span+s.skip:])
	w.hist.Add(time.Since(s.first))
	w.free = append(w.free, id)
	s.p = nil
	p.finished(s.u.rows())
}

// fail ends a slot's rows; a slot whose read may still come stays out of use.
func (w *ringWorker) fail(id int, err error) {
	s := &w.slots[id]
	p := s.p
	s.p = nil
	p.failUnit(&s.u, err)
	if !s.flying {
		w.free = append(w.free, id)
	}
	p.finished(s.u.rows())
}

// housekeep publishes latencies and gives up rows whose read takes too long. The kernel cannot be
// made to drop such a read, but it writes to the worker's own buffer.
func (w *ringWorker) housekeep() {
	now := time.Now()
	if now.Sub(w.merged) > mergeEvery {
		w.r.merge(&w.hist)
		w.merged = now
	}
	if now.Sub(w.lastExp) < w.timeout/4 {
		return
	}
	w.lastExp = now
	for id := range w.slots {
		s := &w.slots[id]
		if s.flying && s.p != nil && now.Sub(s.began) > w.timeout {
			s.p.timeouts.Add(1)
			w.fail(id, &TimeoutError{SSD: s.u.file.ssd, Op: "read of the backing for",
				LBA:    nvme.LBA(s.at / int64(w.r.layout.LBABytes)),
				Blocks: uint32((s.n + int(w.r.layout.LBABytes) - 1) / int(w.r.layout.LBABytes)),
				After:  w.timeout, Attempts: s.tries})
		}
	}
}

// giveUp ends all rows of a worker whose ring failed.
func (w *ringWorker) giveUp(err error) {
	for id := range w.slots {
		if w.slots[id].p != nil {
			w.fail(id, err)
		}
	}
	for {
		if w.p != nil {
			// Which rows are this worker's is known when the set is prepared.
			n := w.end - w.next
			if w.p.prepare() == nil {
				n = w.p.owned(w.next, w.end)
			}
			w.p.failAll(n+w.settled, err)
			w.p, w.settled = nil, 0
		}
		p, lo, hi := w.r.take(true)
		if p == nil {
			return
		}
		w.p, w.next, w.end = p, lo, hi
	}
}
