package gpuio

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/fileid"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
)

// The part that the cpu and mmap stacks share: sets in order of submission, worker goroutines that
// take a few rows at a time from the oldest, and rows gathered by the CPU.
//
// The cpu stack coalesces as async does: rows on equal and close LBAs of a window are one read.
// The set is then sorted by the worker that first needs it, and what workers take are places in
// that order. A run belongs to whoever takes the place of its first row.

// BackingError is a failed read of the file or block device behind an SSD.
type BackingError struct {
	SSD    string
	Path   string
	Offset int64
	Bytes  int
	Err    error
}

func (e *BackingError) Error() string {
	return fmt.Sprintf("SSD %s: read %s at %d+%d: %v; restore the file, or bind and load it again",
		e.SSD, e.Path, e.Offset, e.Bytes, e.Err)
}

func (e *BackingError) Unwrap() error { return e.Err }

// ErrShort is the cause of a BackingError when the backing ends before the row.
var ErrShort = errors.New("the backing is too short")

// hostReader is a stack whose reads the CPU makes.
type hostReader struct {
	name    string
	dev     cuda.Device
	ssds    []*SSD
	layout  Layout
	files   []*backing
	copyS   cuda.Stream // for destinations and row lists that the CPU cannot address
	grab    int64       // rows that a worker takes at once
	units   unitRule    // how rows share reads
	share   int         // CPUOptions.CoalesceBytes
	sorting sync.Pool   // of *hostSort
	sums    []uint32    // that rows are held against as they land; nil: they are not checked here
	workers sync.WaitGroup
	slots   chan struct{} // sets in flight

	mu     sync.Mutex
	more   sync.Cond
	queue  []*hostPending // sets with rows not yet taken
	closed bool

	sets, rows, failed, commands, bytes, retries, timeouts, coalesced atomic.Int64

	perSSD     []hostSSD
	histMu     sync.Mutex
	hist       Histogram
	completeNS atomic.Int64
}

// hostSSD counts the reads of one SSD's backing.
type hostSSD struct{ commands, bytes atomic.Int64 }

// hostSort is memory for sorting a set.
type hostSort struct {
	keys, other   []uint64
	otherIdx, run []uint32
}

// hostPending is a set in flight.
type hostPending struct {
	r       *hostReader
	ctx     context.Context // of the device copies; cancelled by nobody
	n       int64
	first   int64 // index of the first row in Rows
	offs    []int64
	rows    []int64
	pos     []uint32
	order   []uint32 // indices by place on the SSDs; nil: each row is a read, in the set's order
	ends    []uint32 // by place in order: end of the run that begins there, else 0
	dst     []byte   // from DstOffset; nil: the CPU cannot address it
	rs      ReadSet
	bounce  cuda.Buffer // pinned memory for dst == nil, rows in order of the set
	scratch []cuda.Buffer
	ready   sync.Once
	badErr  error // of prepare
	next    int64 // guarded by r.mu
	left    atomic.Int64
	done    chan struct{}
	started time.Time
	submit  time.Duration
	end     time.Time

	landing  landing
	mu       sync.Mutex
	failed   int64
	fails    []*RowError
	commands atomic.Int64
	bytes    atomic.Int64
	retries  atomic.Int64
	timeouts atomic.Int64
}

// backing is an open file behind an SSD.
type backing struct {
	ssd    string
	path   string
	f      *os.File
	fd     int32
	base   int64 // byte of the feature extent
	size   int64
	align  int64 // of offsets, lengths and memory: 1 without O_DIRECT
	mapped []byte
}

// openBacking opens an SSD's file for reading, with O_DIRECT where it can be had.
func openBacking(d *SSD, l Layout, index int, direct bool) (*backing, error) {
	if d.BackingPath == "" {
		return nil, errs.New(errs.Capability,
			"SSD %s has no file behind it that the CPU could read: use %v %s", d.name(),
			errs.Key("io-stack"), StackAsync)
	}
	b := &backing{ssd: d.name(), path: d.BackingPath, base: int64(d.DataStart) * int64(l.LBABytes),
		align: 1}
	if direct { // an SSD reads whole blocks, whatever its file would allow
		b.align = int64(l.LBABytes)
	}
	flags := unix.O_RDONLY | unix.O_CLOEXEC
	fd := -1
	var err error
	if direct {
		if fd, err = unix.Open(d.BackingPath, flags|unix.O_DIRECT, 0); err == nil {
			b.align = max(b.align, directAlign(fd))
		}
	}
	if fd < 0 {
		if fd, err = unix.Open(d.BackingPath, flags, 0); err != nil {
			return nil, errs.New(errs.Device, "SSD %s: open %s: %w; bind it again", d.name(),
				d.BackingPath, err)
		}
	}
	b.fd = int32(fd)
	b.f = os.NewFile(uintptr(fd), d.BackingPath)
	id, size, err := fileid.Of(b.f)
	if err != nil {
		return nil, errors.Join(errs.New(errs.Device, "SSD %s: %w", d.name(), err), b.f.Close())
	}
	if how := id.Differs(d.Backing); d.Backing.Known() && how != "" {
		return nil,
			errors.Join(errs.New(errs.Refused,
				"SSD %s: %s is not what was bound: %s; unbind it and bind it anew", d.name(),
				d.BackingPath, how), b.f.Close())
	}
	b.size = size
	if need := b.base + l.LBAsOn(index)*int64(l.LBABytes); need > b.size {
		err := &BackingError{SSD: b.ssd, Path: b.path, Offset: b.base, Bytes: int(need - b.base),
			Err: fmt.Errorf("%w: it has %d bytes", ErrShort, b.size)}
		return nil, errors.Join(errs.With(errs.Device, err), b.f.Close())
	}
	return b, nil
}

// Direct reads are multiples of a sector at best, of a page where nothing else works.
const (
	sector = 512
	widest = 4096
)

// directAlign asks for the alignment of O_DIRECT. Where the file system does not tell, a read of
// one sector shows whether that is enough.
func directAlign(fd int) int64 {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err == nil &&
		st.Mask&unix.STATX_DIOALIGN != 0 {
		if a := int64(max(st.Dio_offset_align, st.Dio_mem_align)); a > 0 {
			return max(a, sector)
		}
	}
	if page, err := hostmem.Alloc(widest, "gpuio cpu buffers"); err == nil {
		_, refused := unix.Pread(fd, page[sector:2*sector], sector)
		if hostmem.Free(page) == nil && refused == nil {
			return sector
		}
	}
	return widest
}

// span widens a read to the alignment: read n bytes at off, of which the row begins at skip.
func (b *backing) span(off int64, want int) (at int64, n, skip int) {
	at = off / b.align * b.align
	skip = int(off - at)
	n = int((int64(skip+want) + b.align - 1) / b.align * b.align)
	return at, n, skip
}

func newHostReader(name string, dev cuda.Device, ssds []*SSD, l Layout, direct bool) (*hostReader,
	error) {
	if err := checkSSDs(ssds, l, false); err != nil {
		return nil, err
	}
	r := &hostReader{name: name, dev: dev, ssds: ssds, layout: l, grab: 16,
		slots: make(chan struct{}, maxSets), perSSD: make([]hostSSD, len(ssds)),
		units: unitRule{parts: 1}}
	r.more.L = &r.mu
	var err error
	for i, d := range ssds {
		b, oerr := openBacking(d, l, i, direct)
		if oerr != nil {
			return nil, errors.Join(oerr, r.closeFiles())
		}
		r.files = append(r.files, b)
	}
	if r.copyS, err = dev.NewStream(cuda.StreamOptions{Name: name + " copy"}); err != nil {
		return nil, errors.Join(err, r.closeFiles())
	}
	return r, nil
}

func (r *hostReader) closeFiles() error {
	var err error
	for _, b := range r.files {
		if b.mapped != nil {
			err = errors.Join(err, unix.Munmap(b.mapped))
		}
		err = errors.Join(err, b.f.Close())
	}
	r.files = nil
	return err
}

func (r *hostReader) Name() string { return r.name }

// Submit implements Reader.
func (r *hostReader) Submit(ctx context.Context, rs *ReadSet) (Pending, error) {
	n, err := checkSet(rs, r.layout)
	if err != nil {
		return nil, err
	}
	p := &hostPending{r: r, ctx: context.WithoutCancel(ctx), n: n, rs: *rs,
		done: make(chan struct{}), started: time.Now()}
	if n == 0 {
		close(p.done)
		return p, nil
	}
	select {
	case r.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	p.offs = append(p.offs, rs.SSDOffset...)
	p.first = rs.SSDOffset[0]
	p.left.Store(n)
	p.submit = time.Since(p.started)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		<-r.slots
		return nil, errs.New(errs.Failed, "gpuio %s: the reader is closed", r.name)
	}
	r.sets.Add(1)
	r.queue = append(r.queue, p)
	r.more.Broadcast()
	return p, nil
}

// prepare waits until the row list is valid and makes it readable for the CPU.
func (p *hostPending) prepare() error {
	p.ready.Do(func() { p.badErr = p.prepareOnce() })
	return p.badErr
}

func (p *hostPending) prepareOnce() error {
	r := p.r
	if p.rs.Ready != nil {
		if err := p.rs.Ready.Synchronize(p.ctx); err != nil {
			return err
		}
	}
	end := p.first + p.n
	if r.dev.Info().Backend == "host" {
		p.rows = unsafe.Slice(at[int64](p.rs.Rows, 0), end)
		p.pos = unsafe.Slice(at[uint32](p.rs.Pos, 0), end)
	} else {
		rows, err := p.fetch(p.rs.Rows, end*8)
		if err != nil {
			return err
		}
		pos, err := p.fetch(p.rs.Pos, end*4)
		if err != nil {
			return err
		}
		p.rows, p.pos = hostmem.View[int64](rows), hostmem.View[uint32](pos)
	}
	if r.sums != nil {
		p.landing.begin(end)
	}
	if r.units.pays(r.layout, p.offs, r.share) {
		p.sort(end)
	}
	if mem := p.rs.Dst.Bytes(); mem != nil {
		p.dst = mem[p.rs.DstOffset:]
		return nil
	}
	b, err := r.dev.Alloc(cuda.MemPinned, p.n*int64(r.layout.RowBytes), "gpuio gather")
	if err != nil {
		return err
	}
	p.bounce = b
	p.scratch = append(p.scratch, b)
	return nil
}

// fetch copies device memory to where the CPU can read it.
func (p *hostPending) fetch(src cuda.DevicePtr, n int64) ([]byte, error) {
	b, err := p.r.dev.Alloc(cuda.MemPinned, n, "gpuio row list")
	if err != nil {
		return nil, err
	}
	p.scratch = append(p.scratch, b)
	if err := p.r.copyS.Copy(b.Ptr(), src, n); err != nil {
		return nil, err
	}
	return b.Bytes()[:n], p.r.copyS.Synchronize(p.ctx)
}

// take gives a worker the next rows. With block it waits for some; nil then means that the reader
// is closed.
func (r *hostReader) take(block bool) (p *hostPending, lo, hi int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.queue) == 0 {
		if !block || r.closed {
			return nil, 0, 0
		}
		r.more.Wait()
	}
	p = r.queue[0]
	lo = p.next
	hi = min(lo+r.grab, p.n)
	p.next = hi
	if hi == p.n {
		r.queue[0] = nil
		r.queue = r.queue[1:]
	}
	return p, lo + p.first, hi + p.first
}

// sort finds the runs of a set of rows up to index end, by the rule of kernel coalesce.
func (p *hostPending) sort(end int64) {
	r := p.r
	l := &r.layout
	p.order, p.ends = make([]uint32, end), make([]uint32, end)
	b, _ := r.sorting.Get().(*hostSort)
	if b == nil {
		b = &hostSort{}
	}
	defer r.sorting.Put(b)
	for s := range r.ssds {
		from, to := p.offs[s], p.offs[s+1]
		n := int(to - from)
		if len(b.keys) < n {
			c := grown(int64(n))
			b.keys, b.other, b.otherIdx, b.run = make([]uint64, c), make([]uint64, c),
				make([]uint32, c), make([]uint32, c)
		}
		keys, other, idx, otherIdx := b.keys[:n], b.other[:n], p.order[from:to], b.otherIdx[:n]
		for k := range keys {
			i := from + int64(k)
			idx[k], keys[k] = uint32(i), invalidKey
			if p.check(i, s) == nil {
				keys[k] = uint64(p.rows[i] / int64(l.SSDs))
			}
		}
		keys, idx = sortSlots(keys, other, idx, otherIdx, l.passes())
		copy(p.order[from:to], idx)
		runs := b.run[:n]
		for m := l.cut(keys, int64(r.units.window), int64(r.units.reach), uint32(from),
			runs); m > 0; m-- {
			p.ends[runs[m-1]] = uint32(to)
			to = int64(runs[m-1])
		}
	}
}

// check explains why row i of an SSD's bucket cannot be read.
func (p *hostPending) check(i int64, ssd int) error {
	l := &p.r.layout
	row := p.rows[i]
	switch {
	case row < 0 || row >= l.Rows:
		return fmt.Errorf("the layout has %d rows", l.Rows)
	case int(row%int64(l.SSDs)) != ssd:
		return fmt.Errorf("not a row of the SSD in whose bucket it is")
	case int64(p.pos[i])*p.rs.DstStride > p.rs.extent()-int64(l.RowBytes):
		return fmt.Errorf("position %d is outside the destination of %d bytes", p.pos[i],
			p.rs.extent())
	}
	return nil
}

// hostUnit holds what one read of the CPU gets: the rows at places lo to hi of the order.
type hostUnit struct {
	lo, hi int64
	file   *backing // nil: the row cannot be read, which is recorded
	ssd    int
	off    int64  // in the file, of the first row
	want   int    // bytes from there to the end of the last row
	dst    []byte // of the first row
}

// rows returns how many rows the unit has.
func (u *hostUnit) rows() int64 { return u.hi - u.lo }

// index is the index of the row at place k.
func (p *hostPending) index(k int64) int64 {
	if p.order == nil {
		return k
	}
	return int64(p.order[k])
}

// unit is the unit that begins at place k; it has no rows when none does.
func (p *hostPending) unit(k int64) hostUnit {
	u := hostUnit{lo: k, hi: k + 1}
	if p.order != nil {
		if u.hi = int64(p.ends[k]); u.hi == 0 {
			u.hi = k
			return u
		}
	}
	r := p.r
	l := &r.layout
	i := p.index(k)
	for p.offs[u.ssd+1] <= i {
		u.ssd++
	}
	if err := p.check(i, u.ssd); err != nil {
		p.fail(p.rows[i], err)
		return u
	}
	u.file, u.want = r.files[u.ssd], int(l.RowBytes)
	u.off, u.dst = p.offset(i, u.file), p.place(i)
	if n := u.rows(); n > 1 {
		u.want += int(p.offset(p.index(u.hi-1), u.file) - u.off)
		r.coalesced.Add(n)
	}
	return u
}

// offset shows where row i is in its file.
func (p *hostPending) offset(i int64, f *backing) int64 {
	l := &p.r.layout
	lba, skip := l.place(p.rows[i] / int64(l.SSDs))
	return f.base + int64(lba)*int64(l.LBABytes) + int64(skip)
}

// deliver copies a unit's rows out of what was read from u.off on.
func (p *hostPending) deliver(u *hostUnit, data []byte) {
	n := int(p.r.layout.RowBytes)
	copy(u.dst, data[:n])
	for k := u.lo + 1; k < u.hi; k++ {
		i := p.index(k)
		copy(p.place(i), data[p.offset(i, u.file)-u.off:][:n])
	}
	p.takeCRCs(u, data)
}

// failUnit records that none of a unit's rows was read.
func (p *hostPending) failUnit(u *hostUnit, err error) {
	for k := u.lo; k < u.hi; k++ {
		p.fail(p.rows[p.index(k)], err)
	}
}

// owned returns how many rows have their units begin at places lo to hi. The set is prepared.
func (p *hostPending) owned(lo, hi int64) int64 {
	if p.order == nil {
		return hi - lo
	}
	n := int64(0)
	for k := lo; k < hi; k++ {
		if p.ends[k] != 0 {
			n += int64(p.ends[k]) - k
		}
	}
	return n
}

// place shows where the CPU puts row i, which was checked.
func (p *hostPending) place(i int64) []byte {
	n := int64(p.r.layout.RowBytes)
	off := int64(p.pos[i]) * p.rs.DstStride
	if p.dst != nil {
		return p.dst[off : off+n]
	}
	offset := (i - p.first) * n
	return p.bounce.Bytes()[offset : offset+n]
}

func (p *hostPending) fail(row int64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed++
	if len(p.fails) < maxFails {
		p.fails = append(p.fails, &RowError{Row: row, Err: err})
	}
}

// account counts one read of the backing.
func (p *hostPending) account(ssd, n int) {
	p.commands.Add(1)
	p.bytes.Add(int64(n))
	p.r.perSSD[ssd].commands.Add(1)
	p.r.perSSD[ssd].bytes.Add(int64(n))
}

// finished counts rows that are done, well or not; the last one ends the set.
func (p *hostPending) finished(n int64) {
	if n == 0 || p.left.Add(-n) != 0 {
		return
	}
	r := p.r
	if p.bounce != nil && p.badErr == nil {
		if err := p.scatter(); err != nil {
			p.failed = p.n
			p.fails = []*RowError{{Row: p.rows[p.first], Err: err}}
		}
	}
	for _, b := range p.scratch {
		if err := b.Free(); err != nil {
			p.fail(-1, err)
		}
	}
	p.end = time.Now()
	r.rows.Add(p.n - p.failed)
	r.failed.Add(p.failed)
	r.commands.Add(p.commands.Load())
	r.bytes.Add(p.bytes.Load())
	r.retries.Add(p.retries.Load())
	r.timeouts.Add(p.timeouts.Load())
	r.completeNS.Add(int64(p.end.Sub(p.started)))
	<-r.slots
	close(p.done)
}

// scatter copies gathered rows to a destination that only the device can address.
func (p *hostPending) scatter() error {
	n := int64(p.r.layout.RowBytes)
	for i := range p.n {
		off := int64(p.pos[p.first+i]) * p.rs.DstStride
		if off > p.rs.extent()-n {
			continue // failed already
		}
		dst := p.rs.Dst.Ptr() + cuda.DevicePtr(p.rs.DstOffset+off)
		if err := p.r.copyS.Copy(dst, p.bounce.Ptr()+cuda.DevicePtr(i*n), n); err != nil {
			return err
		}
	}
	return p.r.copyS.Synchronize(p.ctx)
}

// Wait implements Pending.
func (p *hostPending) Wait(ctx context.Context) (ReadStats, error) {
	select {
	case <-p.done:
	case <-ctx.Done():
		return ReadStats{}, lateError(p.r.name, p.n, ctx.Err())
	}
	st := ReadStats{
		Rows: p.n - p.failed, Commands: p.commands.Load(), Bytes: p.bytes.Load(),
		Retries: p.retries.Load(), Timeouts: p.timeouts.Load(), Submit: p.submit,
	}
	if p.n > 0 {
		st.Complete = p.end.Sub(p.started) - p.submit
	}
	if p.failed > 0 {
		return st, errs.With(errs.Device, &SetError{Stack: p.r.name, Failed: p.failed, Rows: p.n,
			First: p.fails})
	}
	return st, nil
}

// Stats implements Reader.
func (r *hostReader) Stats() Stats {
	st := Stats{
		ReadStats: ReadStats{Rows: r.rows.Load(), Commands: r.commands.Load(),
			Bytes: r.bytes.Load(), Retries: r.retries.Load(), Timeouts: r.timeouts.Load(),
			Complete: time.Duration(r.completeNS.Load())},
		Sets: r.sets.Load(), Failed: r.failed.Load(), Coalesced: r.coalesced.Load(),
	}
	st.Staged = st.Commands
	r.histMu.Lock()
	st.Latency = r.hist
	r.histMu.Unlock()
	for s, d := range r.ssds {
		st.PerSSD = append(st.PerSSD,
			SSDStats{Name: d.name(), Commands: r.perSSD[s].commands.Load(),
				Bytes: r.perSSD[s].bytes.Load()})
	}
	st.PerSSD = MergeSSDs(st.PerSSD)
	return st
}

// mergeEvery is the interval at which a busy worker adds its latencies to the reader's.
const mergeEvery = 5 * time.Millisecond

func (r *hostReader) merge(h *Histogram) {
	r.histMu.Lock()
	defer r.histMu.Unlock()
	r.hist.Merge(h)
	*h = Histogram{}
}

// Close implements Reader. Sets in flight are read to their end.
func (r *hostReader) Close(ctx context.Context) error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	r.more.Broadcast()
	r.mu.Unlock()
	ended := make(chan error, 1)
	go func() {
		r.workers.Wait()
		ended <- errors.Join(r.copyS.Close(), r.closeFiles())
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return fmt.Errorf("gpuio %s: close: %w: %w", r.name, errInFlight, ctx.Err())
	}
}

// errInFlight is the cause where a reader is closed and its reads still write to their destination.
var errInFlight = errors.New("reads are still in flight")

// syncWorker reads units one at a time by read, which blocks.
func (r *hostReader) syncWorker(read func(p *hostPending, u *hostUnit) error) {
	debug.SetPanicOnFault(true)
	var h Histogram
	merged := time.Now()
	for {
		p, lo, hi := r.take(false)
		if p == nil {
			r.merge(&h)
			if p, lo, hi = r.take(true); p == nil {
				return
			}
		}
		if err := p.prepare(); err != nil {
			p.failAll(hi-lo, err)
			continue
		}
		done := int64(0)
		section := hostcpu.Begin()
		for k := lo; k < hi; k++ {
			u := p.unit(k)
			done += u.rows()
			if u.file == nil {
				continue
			}
			start := time.Now()
			if err := read(p, &u); err != nil {
				p.failUnit(&u, err)
				continue
			}
			now := time.Now()
			h.Add(now.Sub(start))
			if now.Sub(merged) > mergeEvery {
				r.merge(&h)
				merged = now
			}
		}
		section.End(r.spender())
		p.finished(done)
	}
}

// spender names the threads that read, in an account of CPU time.
func (r *hostReader) spender() hostcpu.Spender {
	return hostcpu.Spender{Stage: "read", Operator: r.name + " stack"}
}

func (p *hostPending) failAll(n int64, err error) {
	if n == 0 {
		return
	}
	p.mu.Lock()
	p.failed += n
	if len(p.fails) == 0 {
		p.fails = append(p.fails, &RowError{Row: -1, Err: err})
	}
	p.mu.Unlock()
	p.finished(n)
}
