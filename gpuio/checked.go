package gpuio

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/nvme"
)

// ChecksumError is a row whose bytes are not those that were loaded, also when it was read again.
type ChecksumError struct {
	Row       int64
	SSD       string
	LBA       nvme.LBA // of the namespace, as verify names it
	Blocks    uint32
	Want, Got uint32 // CRC32C
	Repair    string // SSD.Repair
}

func (e *ChecksumError) Error() string {
	repair := e.Repair
	if repair == "" {
		repair = fmt.Sprintf("run \"heliosctl verify --ssds %s\"", e.SSD)
	}
	return fmt.Sprintf(
		"nvme %s: LBA %d+%d: wrong data: CRC32C %08x, %08x was written; %s", e.SSD, e.LBA,
		e.Blocks, e.Got, e.Want, repair)
}

// NewCheckedBy makes a Reader that reads through inner, whose SSDs and layout are given again, and
// checks every row before Wait returns: its CRC32C must be that of sums (NewSums), which has one
// for each row of the layout and stays the caller's. It finds what a status of success does not
// say: data that changed on the SSD or on its way, torn or lost writes, another row's data. On the
// host device the stacks take the CRC of each row when it has landed, while it is in a cache
// (landingChecker). Elsewhere, and where several commands read a row, the kernel check_rows takes
// them on a stream of its own, one set at a time, over the destination where it is, device memory
// included: one more read of the set's rows from a memory that is far faster than the SSDs.
//
// Rows that differ are read once more, as one small set, which mends what went wrong on the way.
// Those that still differ fail the set: a *SetError with a *ChecksumError for each of the first.
// More than checkAgain rows are not read again: then something is wrong that a second look does not
// mend. A set of which inner could not read some rows has failed, and is not checked: its other
// rows may be wrong. Stats.Mismatch counts each wrong row, each time it was.
//
// Close closes inner too. A checked Reader is as safe for concurrent use as inner, and all that
// Reader and Pending promise holds; ReadStats and Stats include the second reads, as retries.
func NewCheckedBy(dev cuda.Device, inner Reader, ssds []*SSD, l Layout, sums cuda.Buffer) (Reader,
	error) {
	if err := l.Check(); err != nil {
		return nil, err
	}
	if len(ssds) != int(l.SSDs) {
		return nil, errs.New(errs.Usage,
			"checked reads: layout over %d SSDs with %d SSDs given: bind all stripes", l.SSDs,
			len(ssds))
	}
	if n := sums.Size() / 4; n != l.Rows {
		return nil, errs.New(errs.Usage,
			"checked reads: %d row checksums for %d rows; load the dataset again with %v", n, l.Rows,
			errs.Key("row-checksums"))
	}
	c := &checked{dev: dev, inner: inner, ssds: ssds, layout: l, sums: sums,
		turn: make(chan struct{}, 1),
		live: map[*checkedPending]struct{}{}, busy: map[cuda.Buffer]int{}}
	if e, ok := inner.(*async); ok {
		c.chains = !e.onHost()
	}
	if err := c.open(); err != nil {
		return nil, errors.Join(err, c.free())
	}
	if r, ok := inner.(landingChecker); ok {
		r.checkLanding(words(sums.Bytes())[:l.Rows])
	}
	return c, nil
}

// NewChecked is NewCheckedBy with checksums of its own.
func NewChecked(dev cuda.Device, inner Reader, ssds []*SSD, l Layout, sums []uint32) (Reader,
	error) {
	own, err := NewSums(dev, int64(len(sums)), func(to []uint32) error {
		copy(to, sums)
		return nil
	})
	if err != nil {
		return nil, err
	}
	r, err := NewCheckedBy(dev, inner, ssds, l, own)
	if err != nil {
		return nil, errors.Join(err, own.Free())
	}
	r.(*checked).own = own
	return r, nil
}

// NewSums makes room for n checksums of rows, which fill gives, in pinned CPU memory that kernels
// read in place: 4 bytes a row. Free it when no Reader has it.
func NewSums(dev cuda.Device, n int64, fill func(sums []uint32) error) (cuda.Buffer, error) {
	b, err := dev.Alloc(cuda.MemPinned, 4*n, "gpuio row checksums")
	if err != nil {
		return nil, err
	}
	if err := fill(words(b.Bytes())); err != nil {
		return nil, errors.Join(err, b.Free())
	}
	return b, nil
}

// checkAgain bounds the rows of a set that are read again.
const checkAgain = 4096

// checkLimit bounds a launch of check_rows: it only computes.
const checkLimit = time.Minute

type checked struct {
	dev    cuda.Device
	inner  Reader
	ssds   []*SSD
	layout Layout
	kernel cuda.Kernel
	stream cuda.Stream
	sums   cuda.Buffer // by row
	own    cuda.Buffer // sums, where they are freed with the rest
	tables cuda.Buffer
	result cuda.Buffer // one count, in the CPU's memory

	turn   chan struct{} // to check a set: stream, result, got, joints and broken
	got    cuda.Buffer   // checksums of a set, grown as needed
	joints []*jointCheck // all of them
	chains bool          // checks may follow the kernels that read (WaitOnce)
	broken error

	mu     sync.Mutex
	live   map[*checkedPending]struct{} // not finished
	busy   map[cuda.Buffer]int          // sets being checked or read again, by destination
	closed bool
	freed  bool // the joint checks that nobody used are
	stuck  bool // check_rows did not end: its memory and all destinations are kept

	mismatch, again, againSets, againCommands, wrong, checkNS atomic.Int64
}

func (c *checked) open() (err error) {
	if c.kernel, err = c.dev.Kernel("check_rows"); err != nil {
		return err
	}
	if err = c.openStream(); err != nil {
		return err
	}
	put := func(b *cuda.Buffer, v []uint32, purpose string) error {
		if *b, err = c.dev.Alloc(cuda.MemPinned, max(int64(len(v))*4, 4), purpose); err == nil {
			copy(words((*b).Bytes()), v)
		}
		return err
	}
	if err := put(&c.tables, checkTables(checkLanes(int(c.layout.RowBytes))),
		"gpuio check tables"); err != nil {
		return err
	}
	return put(&c.result, nil, "gpuio check result")
}

func (c *checked) openStream() (err error) {
	c.stream, err = c.dev.NewStream(cuda.StreamOptions{Name: c.inner.Name() + " check",
		Untimed: true})
	return err
}

// renew opens another stream in place of one that has failed, or on which nobody can tell when its
// work ends, once that is over. Needs c.turn.
func (c *checked) renew() {
	if c.broken != nil {
		return
	}
	_ = c.endStream()
	if !c.isStuck() {
		c.broken = c.openStream()
	}
}

// endStream closes the stream once nothing runs there, or else keeps the memory. Needs c.turn.
func (c *checked) endStream() error {
	if c.isStuck() {
		return c.broken
	}
	if c.stream == nil {
		return nil
	}
	err := c.stream.Close()
	if !errors.Is(err, cuda.ErrStillRuns) {
		c.stream = nil
		return err
	}
	c.broken = errs.With(errs.Device, fmt.Errorf("gpuio %s: %w", c.Name(), err))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stuck = true
	return c.broken
}

// words are a buffer's 4-byte words; device memory is aligned.
func words(b []byte) []uint32 {
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}

func (c *checked) free() error {
	err := c.endStream()
	if c.isStuck() {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.joints { // those in use go with the last that drops them
		if l.users == 0 {
			err = errors.Join(err, l.free())
		}
	}
	c.joints, c.freed = nil, true
	return errors.Join(err, freeBuffers(&c.own, &c.tables, &c.result, &c.got))
}

// Name implements Reader: it is the stack that reads.
func (c *checked) Name() string { return c.inner.Name() }

// Forget ends what inner keeps for a destination buffer.
func (c *checked) Forget(b cuda.Buffer) error {
	c.mu.Lock()
	n := c.busy[b]
	c.mu.Unlock()
	if n > 0 {
		return errs.New(errs.Failed,
			"gpuio: buffer %s is the destination of %d sets that are being checked; wait for them first",
			b.Purpose(), n)
	}
	return Forget(c.inner, b)
}

// hold counts the checks of a destination. Once a check is stuck, nobody can tell that others are
// over.
func (c *checked) hold(b cuda.Buffer, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stuck && n < 0 {
		return
	}
	if c.busy[b] += n; c.busy[b] == 0 {
		delete(c.busy, b)
	}
}

// Submit implements Reader.
func (c *checked) Submit(ctx context.Context, rs *ReadSet) (Pending, error) {
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	if closed {
		return nil, errs.New(errs.Failed, "gpuio %s: the reader is closed", c.Name())
	}
	in, err := c.inner.Submit(ctx, rs)
	if err != nil {
		return nil, err
	}
	p := &checkedPending{c: c, inner: in, rs: *rs, turn: make(chan struct{}, 1)}
	p.rs.SSDOffset = append([]int64(nil), rs.SSDOffset...)
	p.n = p.rs.SSDOffset[len(p.rs.SSDOffset)-1] - p.rs.SSDOffset[0]
	c.mu.Lock()
	c.live[p] = struct{}{}
	c.mu.Unlock()
	return p, nil
}

// checkedPending is a set in flight, being checked, or having some of its rows read again.
type checkedPending struct {
	c     *checked
	inner Pending
	rs    ReadSet
	n     int64

	turn     chan struct{} // to work on the set
	joint    *jointCheck   // that it takes part in
	right    bool          // it was over, and found no wrong row
	read     bool          // inner is done
	again    *againSet     // rows being read again
	finished bool
	stats    ReadStats
	err      error
}

// againSet is a small set of rows that were wrong.
type againSet struct {
	rows    []wrongRow
	mem     cuda.Buffer // row numbers, then positions
	rs      ReadSet
	pending Pending
}

// wrongRow is a row with another checksum than its own.
type wrongRow struct {
	row       int64
	pos       uint32
	want, got uint32
}

// Wait implements Pending.
func (p *checkedPending) Wait(ctx context.Context) (ReadStats, error) {
	WaitOnce(ctx, nil, []Pending{p})
	if err := p.complete(ctx); err != nil {
		return ReadStats{}, err
	}
	return p.stats, p.err
}

// complete brings the set to its end. Its own error is ctx's, and leaves the set where it is.
func (p *checkedPending) complete(ctx context.Context) error {
	c := p.c
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		return p.interrupted(ctx)
	}
	defer func() { <-p.turn }()
	if p.finished {
		return nil
	}
	if !p.read {
		st, err := p.inner.Wait(ctx)
		if err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return err
		}
		// The kernel of a joint check must end before the rows may go.
		if lerr := c.leave(ctx, p, false); lerr != nil {
			p.read = false
			return lerr
		}
		p.read, p.stats = true, st
		if err != nil || p.n == 0 {
			p.finish(err)
			return nil
		}
	}
	c.hold(p.rs.Dst, 1)
	defer c.hold(p.rs.Dst, -1)
	if p.right {
		p.finish(nil)
		return nil
	}
	if p.again == nil {
		rows, count, err := p.check(ctx, p.inner, &p.rs, p.n)
		if err != nil {
			if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
				return p.interrupted(ctx)
			}
			p.unchecked(p.n, err)
			return nil
		}
		if count == 0 {
			p.finish(nil)
			return nil
		}
		if count > checkAgain {
			p.fail(rows, count, fmt.Errorf("that is more than %d, which are not read again",
				checkAgain))
			return nil
		}
		if p.again, err = c.readAgain(ctx, &p.rs, rows); err != nil {
			if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
				p.again = nil
				return p.interrupted(ctx) // the next Wait checks anew
			}
			p.fail(rows, count, fmt.Errorf("they were not read again: %w", err))
			return nil
		}
	}
	return p.secondLook(ctx)
}

// secondLook waits for the rows that are read again and checks them.
func (p *checkedPending) secondLook(ctx context.Context) error {
	c, a := p.c, p.again
	st, rerr := a.pending.Wait(ctx)
	if rerr != nil && ctx.Err() != nil && errors.Is(rerr, ctx.Err()) {
		return rerr
	}
	var rows []wrongRow
	count := int64(0)
	var cerr error
	if rerr == nil {
		rows, count, cerr = p.check(ctx, a.pending, &a.rs, int64(len(a.rows)))
		if cerr != nil && ctx.Err() != nil && errors.Is(cerr, ctx.Err()) {
			return p.interrupted(ctx)
		}
	}
	c.againCommands.Add(st.Commands)
	p.stats.Commands += st.Commands
	p.stats.Bytes += st.Bytes
	p.stats.Retries += st.Commands
	p.stats.Timeouts += st.Timeouts
	p.stats.Submit += st.Submit
	p.stats.Complete += st.Complete
	p.again = nil
	if err := c.giveBack(a.mem); err != nil && rerr == nil {
		rerr = err
	}
	switch {
	case rerr != nil:
		// inner has counted what it did not read; what it read of them is not checked any more,
		// since the set has failed.
		p.stats.Rows -= int64(len(a.rows)) - st.Rows
		c.wrong.Add(st.Rows)
		p.stats.Rows -= st.Rows
		p.finish(fmt.Errorf("gpuio %s: %d rows were wrong and read again: %w", c.Name(),
			len(a.rows), rerr))
	case cerr != nil:
		p.unchecked(int64(len(a.rows)), cerr)
	case count > 0:
		p.fail(rows, count, nil)
	default:
		p.finish(nil)
	}
	return nil
}

func (p *checkedPending) interrupted(ctx context.Context) error {
	return lateError(p.c.Name(), p.n, ctx.Err())
}

// unchecked ends the set because n rows could not be checked.
func (p *checkedPending) unchecked(n int64, err error) {
	p.c.wrong.Add(n)
	p.stats.Rows -= n
	p.finish(fmt.Errorf("gpuio %s: %d rows were read and not checked: %w", p.c.Name(), n, err))
}

// fail ends the set with count wrong rows, of which some are known.
func (p *checkedPending) fail(rows []wrongRow, count int64, why error) {
	c := p.c
	c.wrong.Add(count)
	p.stats.Rows -= count
	out := &SetError{Stack: c.Name(), Failed: count, Rows: p.n}
	for _, r := range rows[:min(len(rows), maxFails)] {
		ssd, lba, blocks, _ := c.layout.Locate(r.row)
		out.First = append(out.First,
			&RowError{Row: r.row, Err: &ChecksumError{Row: r.row, SSD: c.ssds[ssd].name(),
				LBA:    c.ssds[ssd].DataStart + lba,
				Blocks: blocks, Want: r.want, Got: r.got, Repair: c.ssds[ssd].Repair}})
	}
	if why != nil {
		p.finish(errs.With(errs.Device, fmt.Errorf("%w (%w)", out, why)))
		return
	}
	p.finish(errs.With(errs.Device, out))
}

func (p *checkedPending) finish(err error) {
	p.finished, p.err = true, err
	c := p.c
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.live, p)
}

// check returns how many of the n rows of a set that is in place are wrong, and up to checkAgain
// of them. Where set has not checked them as they landed, it runs check_rows over them. An error
// of ctx says that the check has not begun.
func (p *checkedPending) check(ctx context.Context, set Pending, rs *ReadSet,
	n int64) (rows []wrongRow, count int64, err error) {
	c := p.c
	if l, ok := set.(landed); ok {
		if rows, count, checked := l.wrongRows(); checked {
			c.mismatch.Add(count)
			return rows, count, nil
		}
	}
	if err := c.takeTurn(ctx); err != nil {
		return nil, 0, err
	}
	defer func() { <-c.turn }()
	start := time.Now()
	rows, count, err = c.run(rs, n)
	took := time.Since(start)
	p.stats.Complete += took
	c.checkNS.Add(int64(took))
	c.mismatch.Add(count)
	return rows, count, err
}

// checkGrain is the bytes of rows that make another block worth its start.
const checkGrain = 64 << 10

// run is check's work. Needs c.turn.
func (c *checked) run(rs *ReadSet, n int64) (rows []wrongRow, count int64, err error) {
	if c.broken != nil {
		return nil, 0, c.broken
	}
	if err := c.room(&c.got, n); err != nil {
		return nil, 0, err
	}
	// The kernel adds to the CPU's memory where a row is wrong: that takes no fill and no copy.
	words(c.result.Bytes())[0] = 0
	if err := c.settle(c.launch(rs, n, c.got.Ptr(), c.result.Ptr())); err != nil {
		return nil, 0, err
	}
	if count = int64(words(c.result.Bytes())[0]); count == 0 {
		return nil, 0, nil
	}
	first := rs.SSDOffset[0]
	rows, err = c.which(rs.Rows+cuda.DevicePtr(first*8), rs.Pos+cuda.DevicePtr(first*4), n, count)
	return rows, count, err
}

// room makes a buffer hold n checksums. No kernel uses it.
func (c *checked) room(b *cuda.Buffer, n int64) (err error) {
	if *b != nil && (*b).Size() >= n*4 {
		return nil
	}
	if err = freeBuffers(b); err == nil {
		*b, err = c.dev.Alloc(cuda.MemDevice, n*4+n, "gpuio checksums of a set")
	}
	return err
}

// launch enqueues check_rows over the n rows of a set.
func (c *checked) launch(rs *ReadSet, n int64, got, bad cuda.DevicePtr) error {
	info := c.dev.Info()
	cfg := cuda.LaunchConfig{Blocks: info.SMs, Threads: cuda.WarpSize}
	if info.Backend != "host" {
		cfg = cuda.LaunchConfig{Blocks: info.SMs * 4, Threads: 256}
	}
	bytes := n * int64(c.layout.RowBytes)
	cfg.Blocks = int(max(min(int64(cfg.Blocks), (bytes+checkGrain-1)/checkGrain), 1))
	first := rs.SSDOffset[0]
	return cuda.Launch(c.stream, c.kernel, cfg, checkParams{
		Rows: rs.Rows + cuda.DevicePtr(first*8), Pos: rs.Pos + cuda.DevicePtr(first*4),
		Sums: c.sums.Ptr(), Dst: rs.Dst.Ptr() + cuda.DevicePtr(rs.DstOffset),
		Got: got, Bad: bad, Tables: c.tables.Ptr(), Count: n,
		LayoutRows: c.layout.Rows,
		DstLimit:   rs.extent(), DstStride: rs.DstStride,
		RowBytes: uint32(c.layout.RowBytes), Lanes: checkLanes(int(c.layout.RowBytes)),
	})
}

// settle waits for the stream, where err does not say that the work could not be enqueued. After
// an error, too, nothing runs there any more, or the memory is kept.
func (c *checked) settle(err error) error {
	ctx, cancel := context.WithTimeout(context.Background(), checkLimit)
	defer cancel()
	if err == nil {
		if err = c.stream.Synchronize(ctx); err == nil {
			return nil
		}
	}
	if c.renew(); c.isStuck() {
		return c.broken
	}
	return err
}

func (c *checked) isStuck() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stuck
}

// giveBack frees memory that a check was given, unless that is stuck.
func (c *checked) giveBack(b cuda.Buffer) error {
	if c.isStuck() {
		return nil
	}
	return b.Free()
}

// which looks for the wrong rows where check_rows has counted some: up to checkAgain, in order of
// the set. Needs c.turn.
func (c *checked) which(rowPtr, posPtr cuda.DevicePtr, n, count int64) (wrong []wrongRow,
	err error) {
	b, err := c.dev.Alloc(cuda.MemPinned, n*16, "gpuio wrong rows")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.giveBack(b)) }()
	for _, m := range []struct {
		at   int64
		src  cuda.DevicePtr
		size int64
	}{{0, rowPtr, n * 8}, {n * 8, posPtr, n * 4}, {n * 12, c.got.Ptr(), n * 4}} {
		if err == nil {
			err = c.stream.Copy(b.Ptr()+cuda.DevicePtr(m.at), m.src, m.size)
		}
	}
	if err = c.settle(err); err != nil {
		return nil, err
	}
	w := words(b.Bytes())
	pos, got, sums := w[2*n:3*n], w[3*n:4*n], words(c.sums.Bytes())
	for i := range n {
		row := int64(w[2*i]) | int64(w[2*i+1])<<32
		if got[i] == sums[row] {
			continue
		}
		if wrong = append(wrong, wrongRow{row, pos[i], sums[row],
			got[i]}); len(wrong) == int(min(count, checkAgain)) {
			break
		}
	}
	return wrong, nil
}

// readAgain submits a set of the wrong rows alone, which are in order of the buckets, to their
// places.
func (c *checked) readAgain(ctx context.Context, rs *ReadSet, rows []wrongRow) (*againSet, error) {
	n := int64(len(rows))
	mem, err := c.dev.Alloc(cuda.MemPinned, n*12, "gpuio rows read again")
	if err != nil {
		return nil, err
	}
	a := &againSet{rows: rows, mem: mem}
	a.rs = ReadSet{Rows: mem.Ptr(), Pos: mem.Ptr() + cuda.DevicePtr(n*8),
		SSDOffset: make([]int64, c.layout.SSDs+1), Dst: rs.Dst, DstOffset: rs.DstOffset,
		DstStride: rs.DstStride, DstBytes: rs.DstBytes}
	w := words(mem.Bytes())
	for i, r := range rows {
		w[2*i], w[2*i+1] = uint32(r.row), uint32(r.row>>32)
		w[2*n+int64(i)] = r.pos
		a.rs.SSDOffset[r.row%int64(c.layout.SSDs)+1]++
	}
	for s := range c.layout.SSDs {
		a.rs.SSDOffset[s+1] += a.rs.SSDOffset[s]
	}
	if a.pending, err = c.inner.Submit(ctx, &a.rs); err != nil {
		return nil, errors.Join(err, mem.Free())
	}
	c.again.Add(n)
	c.againSets.Add(1)
	return a, nil
}

// Stats implements Reader. Rows that were read again count once.
func (c *checked) Stats() Stats {
	st := c.inner.Stats()
	wrong := c.wrong.Load()
	st.Rows -= c.again.Load() + wrong
	st.Failed += wrong
	st.Sets -= c.againSets.Load()
	st.Retries += c.againCommands.Load()
	st.Mismatch += c.mismatch.Load()
	st.Complete += time.Duration(c.checkNS.Load())
	return st
}

// Close implements Reader: sets in flight are read and checked to their ends, then inner is closed.
func (c *checked) Close(ctx context.Context) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	var live []*checkedPending
	for p := range c.live {
		live = append(live, p)
	}
	c.mu.Unlock()
	var err error
	for _, p := range live {
		if err = p.complete(ctx); err != nil {
			break
		}
	}
	err = errors.Join(err, c.inner.Close(ctx))
	// Sets that ctx has left end as inner says now, and are not checked any more.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if c.takeTurn(ctx) != nil {
		return errors.Join(err,
			errs.New(errs.Device,
				"gpuio %s: a check did not end within %v; its memory is not freed", c.Name(),
				closeTimeout))
	}
	err = errors.Join(err, c.free())
	if c.isStuck() { // as are its sets
		<-c.turn
		return err
	}
	c.broken = errs.New(errs.Failed,
		"gpuio %s: the reader was closed before the set was checked", c.Name())
	<-c.turn
	for _, p := range live {
		err = errors.Join(err, p.complete(ctx))
	}
	return err
}
