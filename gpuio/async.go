package gpuio

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/internal/errs"
	"helios/nvme"
)

// AsyncOptions shape the async stack. Zero values choose defaults.
type AsyncOptions struct {
	Blocks     int           // blocks of each I/O kernel at most (DefaultBlocks)
	Threads    int           // threads of a block (32); the host device takes a block as one warp
	QueuePairs int           // per SSD; 0: as many as the blocks can drive at once
	Depth      int           // reads outstanding per SSD, over its queue pairs (256, or less)
	Timeout    time.Duration // deadline of one attempt (10 s)
	Retries    int           // attempts after the first; negative: none (3)
	SMs        int           // budget of each I/O stream; 0 = all
	Priority   int           // of the I/O streams
	// Resets bounds the resets of an SSD's controller before the SSD is given up; negative:
	// never (3).
	Resets int
	// CoalesceBytes bounds one command for rows on equal and close LBAs. 0: up to
	// 128 KiB, where it is expected to save commands; negative: a command for each row.
	CoalesceBytes int
	// Speed of the SSDs bounds the gaps in such a command.
	Speed Speed
	// Memory shows where queues and data go, by ChooseRung for this device and these SSDs. nil:
	// RungPinned, without a proof.
	Memory *Memory
}

const (
	defaultDepth   = 256
	defaultTimeout = 10 * time.Second
	defaultRetries = 3
	defaultResets  = 3
	maxDepth       = 1 << 16
	maxThreads     = 256  // of a block that reads: as its registers allow
	sortThreads    = 1024 // of a block of coalesce
)

func (o *AsyncOptions) fill() error {
	if o.Blocks == 0 {
		o.Blocks = DefaultBlocks
	}
	if o.Threads == 0 {
		o.Threads = warp
	}
	if o.Depth == 0 {
		o.Depth = defaultDepth
	}
	if o.Timeout == 0 {
		o.Timeout = defaultTimeout
	}
	if o.Retries == 0 {
		o.Retries = defaultRetries
	}
	o.Retries = max(o.Retries, 0)
	if o.Resets == 0 {
		o.Resets = defaultResets
	}
	o.Resets = max(o.Resets, 0)
	switch {
	case o.Blocks < 1 || o.Blocks > 1<<16:
		return errs.New(errs.Usage, "%d blocks for the I/O kernels: choose 1 to %d",
			o.Blocks, 1<<16)
	case o.Threads < warp || o.Threads > maxThreads || o.Threads%warp != 0:
		return errs.New(errs.Usage,
			"%d threads in a block of the I/O kernels: choose a multiple of %d up to %d", o.Threads,
			warp, maxThreads)
	case o.QueuePairs < 0:
		return errs.New(errs.Usage,
			"%d queue pairs per SSD: choose 1 or more, or 0 to follow the blocks", o.QueuePairs)
	case o.Depth < 1 || o.Depth > maxDepth:
		return errs.New(errs.Usage, "depth %d: choose 1 to %d reads outstanding per SSD", o.Depth,
			maxDepth)
	case o.Timeout < time.Millisecond:
		return errs.New(errs.Usage, "read timeout %v: choose at least 1ms", o.Timeout)
	}
	return nil
}

// async is the engine of the stacks in which kernels on the device drive the NVMe queues: async
// itself, and sync, which differs in the kernels that it launches for a set.
type async struct {
	queueSet
	name string     // of the reader, for messages
	dma  dmaCache   // guarded by mu
	mu   sync.Mutex // order of submissions, and all that is guarded by it

	// The kernels, their streams, and what they call on the host device.
	sync         *syncOptions // of stack sync; nil: async
	blocks       int          // grid of complete
	submitBlocks int
	submitK      cuda.Kernel
	complK       cuda.Kernel
	coalesceK    cuda.Kernel // it runs on submitS, too
	submitS      cuda.Stream
	complS       cuda.Stream
	submitEv     [maxSets]cuda.Event
	complEv      [maxSets]cuda.Event
	host         *hostSide
	handle       uint64
	stateS       cuda.Stream // moves kernel state; nil on the host device
	seen         sync.Mutex  // before mu: guards seenBuf and the host's histograms
	seenBuf      cuda.Buffer // queueState[queues], for states

	// The sets in flight: their memory, which kernels and the host share, and what their forms
	// need.
	setBuf  twin     // setState[maxSets × shape.stride], with the sets' arrays between them
	shape   setShape // of one set's arrays behind the setStates
	sorting coalesceScratch
	scratch [maxSets]setScratch
	retired []cuda.Buffer // outgrown, and perhaps in use
	copies  listCopies
	live    []*asyncPending
	slots   [maxSets]*asyncPending
	free    chan uint32
	rotate  uint32
	closed  bool
	broken  error
	strands int // sets that keep their slots until Close

	// All sets together.
	sets, rows, failed, timeouts atomic.Int64
	submitNS, completeNS         atomic.Int64
	final                        Stats // after Close

	// Recovery of the SSDs (recover.go).
	rec         []ssdRecovery // by stripe: see recoveryOf
	stops       atomic.Int64  // of all kernels, for the host to change what it shares (stopped)
	life        context.Context
	endLife     context.CancelFunc // ends recoveries
	gate        chan struct{}      // see enter; nil on the host device
	clockOffset int64              // of the device's clock, once known; guarded by gate
	clockKnown  bool
	// abort is the admin command; tests replace it.
	abort func(ctx context.Context, c *nvme.Controller, sqid, cid uint16) error
}

// refusal explains why no set may be submitted. Needs e.mu.
func (e *async) refusal() error {
	if e.closed {
		return errs.New(errs.Failed, "gpuio %s: the reader is closed", e.name)
	}
	return e.broken
}

// breakWith ends the engine; the first reason counts.
func (e *async) breakWith(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.broken == nil {
		e.broken = fmt.Errorf("gpuio %s: %w", e.name, err)
	}
}

// StackAsync is the stack of Helios: kernels fill queues and others reap them.
const StackAsync = "async"

var asyncStack = &Stack{
	Name: StackAsync, Summary: "kernels submit, others complete", Queued: true,
	Coalesces: true, Overlaps: true, Threads: warp,
	Open: func(dev cuda.Device, ssds []*SSD, l Layout, o StackOptions) (Reader, error) {
		return NewAsync(dev, ssds, l, o.AsyncOptions)
	},
}

// NewAsync makes the async stack over ssds, which hold a layout's rows: queue pairs, the kernels'
// state and streams.
func NewAsync(dev cuda.Device, ssds []*SSD, l Layout, o AsyncOptions) (Reader, error) {
	return newEngine(StackAsync, nil, dev, ssds, l, o)
}

func newEngine(name string, sync *syncOptions, dev cuda.Device, ssds []*SSD, l Layout,
	o AsyncOptions) (Reader, error) {
	fits := o.Depth == 0
	if err := o.fill(); err != nil {
		return nil, err
	}
	if err := checkSSDs(ssds, l, true); err != nil {
		return nil, err
	}
	if fits {
		o.Depth = FitDepth(ssds, o.QueuePairs, o.Depth)
	}
	e := &async{
		queueSet: queueSet{side: side{dev: dev}, rung: RungPinned, ssds: ssds, layout: l, opt: o},
		name:     name, sync: sync, free: make(chan uint32, maxSets),
		rec: make([]ssdRecovery, len(ssds)),
	}
	for s := range ssds {
		e.lead = append(e.lead, firstOf(ssds, s))
	}
	if err := e.useMemory(name, o.Memory); err != nil {
		return nil, err
	}
	e.life, e.endLife = context.WithCancel(context.Background())
	e.abort = func(ctx context.Context, c *nvme.Controller, sqid, cid uint16) error {
		_, err := c.Abort(ctx, sqid, cid)
		return err
	}
	e.deleteQueue = func(ctx context.Context, c *nvme.Controller, qp *nvme.QueuePair) error {
		return c.DeleteQueuePair(ctx, qp)
	}
	for i := range uint32(maxSets) {
		e.free <- i
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := e.open(ctx); err != nil {
		return nil, errors.Join(err, e.teardown(ctx))
	}
	return e, nil
}

// checkSSDs reports whether the SSDs can hold the layout and, for stacks with queues, have
// controllers.
func checkSSDs(ssds []*SSD, l Layout, queues bool) error {
	if err := l.Check(); err != nil {
		return err
	}
	if len(ssds) != int(l.SSDs) {
		return errs.New(errs.Usage, "layout over %d SSDs with %d SSDs given: bind all stripes",
			l.SSDs, len(ssds))
	}
	for s, d := range ssds {
		if d == nil || (queues && d.Ctrl == nil) {
			return errs.New(errs.Usage, "SSD %d has no controller: bind it first", s)
		}
		if d.Ctrl == nil {
			continue
		}
		ns := d.Ctrl.Namespace()
		if queues && (ns.Blocks > 1<<placeBits || ns.LBABytes > 1<<16) {
			return errs.New(errs.Capability,
				"SSD %s has %d LBAs of %d bytes: at most 2^%d of 65536; use the cpu stack", d.name(),
				ns.Blocks, ns.LBABytes, placeBits)
		}
		if ns.LBABytes != int(l.LBABytes) {
			return errs.New(errs.Usage,
				"SSD %s has LBAs of %d bytes, the layout %d: load the dataset again", d.name(),
				ns.LBABytes, l.LBABytes)
		}
		if end := uint64(d.DataStart) + uint64(l.LBAsOn(s)); end > ns.Blocks ||
			end < uint64(d.DataStart) {
			return errs.New(errs.Usage,
				"SSD %s has %d LBAs, the rows need %d from %d on: bind a larger SSD", d.name(),
				ns.Blocks, l.LBAsOn(s), d.DataStart)
		}
	}
	return nil
}

func (e *async) open(ctx context.Context) error {
	active, perBlock, err := e.choosePairs()
	if err != nil {
		return err
	}
	e.chooseGrids(active, perBlock)
	limit := commandLimit(e.ssds, int(e.layout.LBABytes))
	if e.unitRule, err = chooseUnits(e.layout, limit, e.sync == nil, e.opt.CoalesceBytes,
		e.opt.Depth, e.opt.Speed); err != nil {
		return err
	}
	if err := e.openKernels(); err != nil {
		return err
	}
	if e.window != 0 {
		if e.coalesceK, err = e.dev.Kernel("coalesce"); err != nil {
			return err
		}
	}
	if !e.onHost() {
		e.gate = make(chan struct{}, 1)
	}
	e.shape = shapeOf(len(e.ssds), e.queues())
	if e.setBuf, err = e.twin(int64(maxSets*e.shape.stride)*setStateBytes,
		"gpuio sets"); err != nil {
		return err
	}
	if err := e.openQueues(ctx); err != nil {
		return err
	}
	if !e.onHost() {
		if e.seenBuf, err = e.alloc(e.queueBuf.dev.Size(), "gpuio queues"); err != nil {
			return err
		}
		if err := e.move((*twin).push); err != nil {
			return err
		}
	}
	if err := e.openHostSide(); err != nil {
		return err
	}
	e.dma.init(e.ssds, &e.side)
	return nil
}

func (e *async) Name() string { return e.name }

// QueuePairs is the number of queue pairs per SSD.
func (e *async) QueuePairs() int { return e.perSSD }

// asyncPending is one set in flight.
type asyncPending struct {
	e        *async
	slot     uint32
	rows     int64
	mapping  *dmaMapping
	timeouts atomic.Int64 // counted by recoveries, which are not of this set alone
	// sync: its rows are read by complete now; see resumeSync. Guarded by e.mu
	sick bool
	// turn is held by who waits for or finishes the set.
	turn     chan struct{}
	ended    bool // its kernel has ended, and chained saw it
	finished bool
	stats    ReadStats
	err      error

	wrong      []wrongRow // as they landed, see landing
	wrongCount int64
}

// Submit implements Reader.
func (e *async) Submit(ctx context.Context, rs *ReadSet) (Pending, error) {
	n, err := checkSet(rs, e.layout)
	if err != nil {
		return nil, err
	}
	p := &asyncPending{e: e, rows: n, turn: make(chan struct{}, 1)}
	if n == 0 {
		p.finished = true
		return p, nil
	}
	if p.slot, err = e.takeSlot(ctx); err != nil {
		return nil, err
	}
	if err = e.settleAndEnter(ctx); err != nil {
		e.free <- p.slot
		return nil, err
	}
	defer e.leave()
	defer e.mu.Unlock()
	if err = e.launch(p, rs); err != nil {
		if p.mapping != nil {
			e.dma.release(p.mapping)
		}
		e.free <- p.slot
		return nil, err
	}
	e.sets.Add(1)
	e.slots[p.slot] = p
	e.live = append(e.live, p)
	if e.bells != nil {
		e.bells.begin()
	}
	return p, nil
}

// settleAndEnter enters and takes e.mu while no set of the sync stack is sick. Its error is ctx's.
func (e *async) settleAndEnter(ctx context.Context) error {
	for {
		e.mu.Lock()
		err := e.settle(ctx)
		e.mu.Unlock()
		if err == nil {
			err = e.enter(ctx)
		}
		if err != nil {
			return err
		}
		e.mu.Lock()
		sick := false
		for _, x := range e.live {
			sick = sick || x.sick
		}
		if !sick {
			return nil
		}
		e.mu.Unlock()
		e.leave()
	}
}

// checkSet checks what the host can see of a set and returns its rows.
func checkSet(rs *ReadSet, l Layout) (int64, error) {
	if len(rs.SSDOffset) != int(l.SSDs)+1 {
		return 0, errs.New(errs.Usage, "read set with %d bucket bounds for %d SSDs",
			len(rs.SSDOffset), l.SSDs)
	}
	for i := range rs.SSDOffset {
		if rs.SSDOffset[i] < 0 || (i > 0 && rs.SSDOffset[i] < rs.SSDOffset[i-1]) {
			return 0, errs.New(errs.Usage, "read set: bucket bounds %v do not ascend", rs.SSDOffset)
		}
	}
	n := rs.SSDOffset[l.SSDs] - rs.SSDOffset[0]
	if rs.SSDOffset[l.SSDs] > math.MaxUint32 {
		return 0, errs.New(errs.Usage, "read set of %d rows: at most %d", n, uint32(math.MaxUint32))
	}
	if n == 0 {
		return 0, nil
	}
	if rs.Rows == 0 || rs.Pos == 0 || rs.Dst == nil {
		return 0, errs.New(errs.Usage, "read set of %d rows without rows, positions or destination",
			n)
	}
	// 32-bit positions times the stride must not wrap: the kernels check only the product.
	size := backedBytes(rs.Dst)
	if rs.DstStride < int64(l.RowBytes) || rs.DstStride > math.MaxInt32 || rs.DstOffset < 0 ||
		rs.DstOffset > size-int64(l.RowBytes) {
		return 0, errs.New(errs.Usage,
			"read set: rows of %d bytes do not fit stride %d at offset %d of a buffer of %d bytes",
			l.RowBytes, rs.DstStride, rs.DstOffset, size)
	}
	if rs.DstBytes < 0 || rs.DstBytes > rs.Dst.Size()-rs.DstOffset || rs.DstBytes > 0 &&
		rs.DstBytes < int64(l.RowBytes) {
		return 0, errs.New(errs.Usage,
			"read set: rows of %d bytes in %d bytes from offset %d of a buffer of %d bytes",
			l.RowBytes, rs.DstBytes, rs.DstOffset, rs.Dst.Size())
	}
	return n, nil
}

// takeSlot gets a set slot, by finishing the oldest set when all are taken.
func (e *async) takeSlot(ctx context.Context) (uint32, error) {
	for {
		select {
		case s := <-e.free:
			return s, nil
		default:
		}
		e.mu.Lock()
		var oldest *asyncPending
		if len(e.live) > 0 {
			oldest = e.live[0]
		}
		err := e.refusal()
		if err == nil && e.strands == maxSets {
			err = errs.New(errs.Device,
				"gpuio %s: SSDs that were given up may still write to the buffers of %d sets; close the reader",
				e.name, maxSets)
		}
		e.mu.Unlock()
		if err != nil { // sets that were abandoned never give their slots back
			return 0, err
		}
		if oldest == nil { // others are just submitting, or giving one back
			select {
			case s := <-e.free:
				return s, nil
			case <-time.After(time.Millisecond):
				continue
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}
		if err := oldest.complete(ctx); err != nil {
			return 0, err
		}
	}
}

// launch maps the destination, fills the set's slot and enqueues its kernels. Needs e.mu.
func (e *async) launch(p *asyncPending, rs *ReadSet) error {
	if err := e.refusal(); err != nil {
		return err
	}
	for s := range e.ssds {
		if rs.SSDOffset[s] < rs.SSDOffset[s+1] {
			if err := e.givenUp(s); err != nil {
				return err
			}
		}
	}
	coalesced, err := e.fillSet(p, rs)
	if err != nil {
		return err
	}
	if err := e.launchKernels(p, rs, coalesced); err != nil {
		e.broken = fmt.Errorf("gpuio %s: launch: %w", e.name, err)
		p.mapping = nil // commands may be in flight: the mapping stays until Close
		return e.broken
	}
	return nil
}

// fillSet maps the destination and fills the set's slot. Needs e.mu.
func (e *async) fillSet(p *asyncPending, rs *ReadSet) (coalesced bool, err error) {
	nssd := len(e.ssds)
	direct := uint32(0)
	if e.layout.whole() && rs.DstOffset%4 == 0 && rs.DstStride%4 == 0 {
		if p.mapping, err = e.dma.acquire(rs.Dst, rs.DstOffset+rs.extent()); err != nil {
			return false, err
		}
		if p.mapping != nil {
			direct = 1
		}
	}
	_, arrays := e.setArrays(p.slot)
	iovas := arrays + cuda.DevicePtr(e.shape.iovas)
	copy(array[int64](e, p.slot, 0, nssd+1), rs.SSDOffset)
	if direct != 0 {
		to := array[uint64](e, p.slot, e.shape.iovas, nssd)
		for s := range to {
			to[s] = uint64(p.mapping.iovas[s]) + uint64(rs.DstOffset)
		}
	}
	set := setState{
		Rows: rs.Rows, Pos: rs.Pos, Offsets: arrays, Dst: rs.Dst.Ptr() +
			cuda.DevicePtr(rs.DstOffset),
		DstLimit: rs.extent(), DstStride: rs.DstStride, DstIOVA: iovas,
		Units: arrays + cuda.DevicePtr(e.shape.units), Remaining: arrays +
			cuda.DevicePtr(e.shape.remaining),
		Taken: arrays + cuda.DevicePtr(e.shape.taken), Layout: e.layout, Direct: direct,
		Rotate: e.rotate,
	}
	e.rotate++
	if coalesced, err = e.shapeSet(p.slot, rs, &set); err != nil {
		return false, err
	}
	if direct == 0 || coalesced { // a run may need a copy where its rows alone would not
		if err := e.ensureStaging(e.submitS); err != nil {
			return false, err
		}
	}
	*e.set(p.slot) = set
	return coalesced, e.beginCRCs(p.slot, &set, rs.SSDOffset[nssd])
}

// launchKernels enqueues the kernels of a set. Needs e.mu.
func (e *async) launchKernels(p *asyncPending, rs *ReadSet, coalesced bool) error {
	if rs.Ready != nil {
		if err := e.submitS.Wait(rs.Ready); err != nil {
			return err
		}
	}
	if !e.onHost() {
		off, n := e.shape.block(p.slot)
		if err := e.setBuf.push(e.submitS, off, n); err != nil {
			return err
		}
	}
	if e.sync != nil {
		return e.launchSync(p.slot)
	}
	if coalesced {
		if err := e.launchCoalesce(p.slot); err != nil {
			return err
		}
	}
	if err := e.launchSubmit(p.slot); err != nil {
		return err
	}
	// complete starts after its set was handed over; submit only fills queues, so this is
	// soon, and completions of earlier sets are reaped meanwhile.
	if err := e.complS.Wait(e.submitEv[p.slot]); err != nil {
		return err
	}
	return e.launchComplete(p.slot)
}

// launchLimit is after how long a complete kernel returns to the host, which launches it again: no
// kernel runs for ever, whatever the SSDs do.
const launchLimit = time.Second / 2

// Wait implements Pending.
func (p *asyncPending) Wait(ctx context.Context) (ReadStats, error) {
	if err := p.complete(ctx); err != nil {
		return ReadStats{}, err
	}
	return p.stats, p.err
}

// complete brings the set to its end: it waits for the complete kernel and recovers the queues
// that the kernel had to leave, as often as it takes. Its own error is ctx's.
func (p *asyncPending) complete(ctx context.Context) error {
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		return p.late(ctx.Err())
	}
	defer func() { <-p.turn }()
	if p.finished {
		return nil
	}
	e := p.e
	for {
		if !p.ended {
			if err := e.complEv[p.slot].Synchronize(ctx); err != nil {
				if ctx.Err() != nil {
					return p.late(ctx.Err())
				}
				p.abandon(err)
				return nil
			}
		}
		if !e.unfinished(p.slot) {
			p.finish()
			return nil
		}
		failed, err := p.goOn(ctx)
		if err != nil {
			return err
		}
		if failed != nil {
			p.abandon(failed)
		}
		if p.finished {
			return nil
		}
	}
}

// chain makes a stream wait for the kernel that may end the set; stops is for chained. false: it
// does not, for the kernel has ended or somebody else waits for the set.
func (p *asyncPending) chain(st cuda.Stream) (stops int64, ok bool) {
	select {
	case p.turn <- struct{}{}:
	default:
		return 0, false
	}
	defer func() { <-p.turn }()
	e := p.e
	if p.finished || p.ended {
		return 0, false
	}
	stops = e.stops.Load()
	return stops, st.Wait(e.complEv[p.slot]) == nil
}

// chained reports whether the set's last kernel ended it before the stream of chain went on, which
// it has: then Wait has no kernel to wait for.
func (p *asyncPending) chained(stops int64) bool {
	select {
	case p.turn <- struct{}{}:
	default:
		return false
	}
	defer func() { <-p.turn }()
	// The host has the set as it was behind that kernel, but for a stop since.
	p.ended = !p.finished && !p.e.unfinished(p.slot) && p.e.stops.Load() == stops
	return p.ended
}

// abandon ends a set whose kernels failed. Its commands may still be in flight: its slot and its
// destination's mapping stay taken until Close has deleted the queues.
func (p *asyncPending) abandon(err error) {
	e := p.e
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.broken == nil {
		e.broken = fmt.Errorf("gpuio %s: %w", e.name, err)
	}
	p.finished = true
	p.err = fmt.Errorf(
		"gpuio %s: %d rows not read: %w; close the reader before the buffers are used again",
		e.name, p.rows, err)
	e.failed.Add(p.rows)
	e.forgetLive(p)
}

func (e *async) forgetLive(p *asyncPending) {
	for i, x := range e.live {
		if x == p {
			e.live = append(e.live[:i], e.live[i+1:]...)
			if e.bells != nil {
				e.bells.end()
			}
			return
		}
	}
}

// finish takes the results out of the slot and gives it back.
func (p *asyncPending) finish() {
	e := p.e
	set := e.set(p.slot)
	p.takeStats(set)
	if set.NumFails > 0 {
		p.err = e.setError(p, set)
	}
	p.compareLanded(set)
	e.mu.Lock()
	defer e.mu.Unlock()
	p.finished = true
	if p.mapping != nil {
		e.dma.release(p.mapping)
	}
	e.slots[p.slot] = nil
	e.forgetLive(p)
	e.forgetCopies(p.slot)
	e.free <- p.slot
}

// takeStats takes the counts of a set that has ended.
func (p *asyncPending) takeStats(set *setState) {
	e, fails := p.e, int64(set.NumFails)
	p.stats = ReadStats{
		Rows: p.rows - fails, Commands: int64(set.Issued) + int64(set.Retries),
		Bytes:   int64(set.Blocks) * int64(e.layout.LBABytes),
		Retries: int64(set.Retries), Timeouts: p.timeouts.Load(),
		// read_sync has no SubmitNS
		Submit:   time.Duration(max(set.SubmitNS-set.StartNS, 0)),
		Complete: time.Duration(max(set.DoneNS-max(set.SubmitNS, set.StartNS), 0)),
	}
	e.rows.Add(p.stats.Rows)
	e.failed.Add(fails)
	e.timeouts.Add(p.stats.Timeouts)
	e.submitNS.Add(int64(p.stats.Submit))
	e.completeNS.Add(int64(p.stats.Complete))
}

// setError turns the fail records of a set into errors that name SSD, queue, LBA and status.
func (e *async) setError(p *asyncPending, set *setState) error {
	out := &SetError{Stack: e.name, Failed: int64(set.NumFails), Rows: p.rows}
	class := errs.Device
	for i := range min(int(set.NumFails), maxFails) {
		f := &set.Fails[i]
		ssd := e.ssds[f.SSD]
		var err error
		switch f.Kind {
		case failStatus:
			err = &nvme.StatusError{Bus: ssd.name(), QID: f.QID, CID: f.CID, Op: "read",
				LBA: nvme.LBA(f.LBA), Blocks: f.Blocks, Status: nvme.Status(f.Status)}
		case failTimeout:
			err = &TimeoutError{SSD: ssd.name(), QID: f.QID, CID: f.CID, Op: "read",
				LBA: nvme.LBA(f.LBA), Blocks: f.Blocks, After: e.opt.Timeout,
				Attempts: int(f.Tries), Tried: e.recoveryOf(int(f.SSD)).tried()}
		case failRow:
			class = errs.Failed
			err = fmt.Errorf(
				"not a row of SSD %s: the layout has %d rows on %d SSDs; the bucket is wrong",
				ssd.name(), e.layout.Rows, e.layout.SSDs)
		case failPos:
			class = errs.Failed
			err = fmt.Errorf("position %d is outside the destination of %d bytes", f.LBA,
				set.DstLimit)
		default:
			err = e.lostError(f)
		}
		out.First = append(out.First, &RowError{Row: f.Row, Err: err})
	}
	return errs.With(class, out)
}

// Stats implements Reader. Sets come and go while it copies.
func (e *async) Stats() Stats {
	e.seen.Lock() // so that Close keeps the memory
	defer e.seen.Unlock()
	e.mu.Lock()
	open := e.queueBuf.host != nil
	e.mu.Unlock()
	if !open {
		return e.final
	}
	queues, _ := e.copyStates() // of a lost device, as the host last saw them
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.statsOf(queues)
}

// statsOf returns the totals. Needs e.seen and e.mu.
func (e *async) statsOf(queues []queueState) Stats {
	st := Stats{
		ReadStats: ReadStats{
			Rows: e.rows.Load(), Timeouts: e.timeouts.Load(),
			Submit: time.Duration(e.submitNS.Load()), Complete: time.Duration(e.completeNS.Load()),
		},
		Sets: e.sets.Load(), Failed: e.failed.Load(),
	}
	if e.dma.why != nil {
		st.NotInPlace = e.dma.why.Error()
	}
	for s, d := range e.ssds {
		per := SSDStats{Name: d.name()}
		for i := range e.perSSD {
			q := &queues[s*e.perSSD+i]
			if q.Hist == 0 { // open did not come so far
				continue
			}
			per.Commands += int64(atomic.LoadUint64(&q.Issued))
			st.Direct += int64(atomic.LoadUint64(&q.Direct))
			st.Staged += int64(atomic.LoadUint64(&q.Staged))
			st.Pended += int64(atomic.LoadUint64(&q.Pended))
			st.Coalesced += int64(atomic.LoadUint64(&q.Coalesced))
			per.Bytes += int64(atomic.LoadUint64(&q.BlocksRead)) * int64(e.layout.LBABytes)
			per.Retries += int64(atomic.LoadUint64(&q.Retried))
			per.Errors += int64(atomic.LoadUint64(&q.Errors))
			per.Foreign += int64(atomic.LoadUint64(&q.Foreign))
			st.Doorbells += int64(atomic.LoadUint64(&q.SQRings) + atomic.LoadUint64(&q.CQRings))
			h := at[Histogram](e.histBuf.host.Ptr(), s*e.perSSD+i)
			for b := range h.Counts {
				st.Latency.Counts[b] += atomic.LoadUint64(&h.Counts[b])
			}
		}
		e.recoveryStats(s, &per)
		st.Commands += per.Commands
		st.Bytes += per.Bytes
		st.Retries += per.Retries
		st.Errors += per.Errors
		st.Foreign += per.Foreign
		st.Aborts += per.Aborts
		st.Recreated += per.Recreated
		st.Resets += per.Resets
		st.PerSSD = append(st.PerSSD, per)
	}
	st.PerSSD = MergeSSDs(st.PerSSD)
	return st
}

// Close implements Reader. Sets in flight are finished first; when ctx ends before they are, their
// rows are given up: the queue pairs are deleted, after which the SSDs write nothing any more.
func (e *async) Close(ctx context.Context) error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	e.closed = true
	live := append([]*asyncPending(nil), e.live...)
	e.mu.Unlock()
	var err error
	for _, p := range live {
		if err = p.complete(ctx); err != nil {
			break
		}
	}
	return errors.Join(err, e.teardown(ctx))
}

// closeTimeout bounds each part of a teardown whose own context has ended.
const closeTimeout = 5 * time.Second

// teardown gives back what open took, as far as it came. No set is submitted any more.
func (e *async) teardown(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	// Kernels leave frozen queues alone, so they end, and with them the sets in flight.
	e.mu.Lock()
	live := append([]*asyncPending(nil), e.live...)
	if e.broken == nil {
		e.broken = errs.New(errs.Failed, "gpuio %s: the reader was closed before the set was read",
			e.name)
	}
	e.mu.Unlock()
	e.endRecoveries()
	err, quiet := e.endKernels(ctx)
	if !quiet {
		return err
	}
	for _, p := range live {
		err = errors.Join(err, p.complete(ctx))
	}
	return errors.Join(err, e.freeAll(ctx))
}

// endKernels closes the streams. Where kernels still run, not quiet, their memory must stay.
func (e *async) endKernels(ctx context.Context) (err error, quiet bool) {
	quiet = true
	for _, s := range []cuda.Stream{e.submitS, e.complS} {
		if s != nil {
			// A failed stream has dropped its work too; Wait has returned its error.
			if serr := s.Synchronize(ctx); serr != nil && ctx.Err() != nil {
				err, quiet = errors.Join(err, serr), false
			}
			err = errors.Join(err, s.Close())
		}
	}
	if e.bells != nil {
		e.bells.close()
	}
	if !quiet {
		err = errors.Join(err, errs.New(errs.Device,
			"gpuio %s: kernels did not end within %v; the engine's memory is not freed", e.name,
			closeTimeout))
	}
	return err, quiet
}

// freeAll ends the queues and gives all memory back. No kernel runs.
func (e *async) freeAll(ctx context.Context) (err error) {
	for i := range maxSets {
		for _, ev := range []cuda.Event{e.submitEv[i], e.complEv[i]} {
			if ev != nil {
				err = errors.Join(err, ev.Close())
			}
		}
	}
	if e.handle != 0 {
		dropHostSide(e.handle)
	}
	if e.host != nil {
		for i := range e.host.parks {
			if g := e.host.parks[i].group; g != nil {
				err = errors.Join(err, g.Close())
			}
		}
	}
	err = errors.Join(err, e.endDMA(ctx), e.dma.close())
	for i := range e.doorbells {
		err = errors.Join(err, freeBuffers(&e.doorbells[i]))
	}
	if e.bells != nil {
		err = errors.Join(err, e.bells.buf.Free())
	}
	for s := range e.ssds {
		if e.listBuf != nil {
			err = errors.Join(err, e.giveBack(e.ssds[s], &e.listBuf[s]),
				e.giveBack(e.ssds[s], &e.stageBuf[s]))
		}
	}
	e.seen.Lock()
	defer e.seen.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.queueBuf.host != nil {
		queues, _ := e.copyStates()
		e.final = e.statsOf(queues)
	}
	if e.stateS != nil {
		err = errors.Join(err, e.stateS.Close())
	}
	return errors.Join(err, e.freeScratch(), freeBuffers(&e.seenBuf), e.queueBuf.free(),
		e.cmdBuf.free(), e.histBuf.free(), e.setBuf.free())
}

// freeBuffers frees those that are there.
func freeBuffers(all ...*cuda.Buffer) (err error) {
	for _, b := range all {
		if *b != nil {
			err = errors.Join(err, (*b).Free())
			*b = nil
		}
	}
	return err
}
