package gpuio

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/nvme"
)

// AsyncOptions shape the async stack. Zero values choose defaults.
type AsyncOptions struct {
	Blocks     int           // blocks of each I/O kernel at most (32)
	Threads    int           // threads of a block (32); the host device takes a block as one warp
	QueuePairs int           // per SSD; 0: as many as the blocks can drive at once
	Depth      int           // reads outstanding per SSD, over all its queue pairs (256)
	Timeout    time.Duration // deadline of one attempt (10 s)
	Retries    int           // attempts after the first; negative: none (3)
	SMs        int           // budget of each I/O stream; 0 = all
	Priority   int           // of the I/O streams
	// Resets is how often the controller of an SSD is reset before the SSD is given up; negative:
	// never (3).
	Resets int
	// CoalesceBytes is how much one command may read for rows on equal and adjacent LBAs. 0: up to
	// 128 KiB, where it is expected to save commands; negative: a command for each row.
	CoalesceBytes int
	// Memory is where queues and data go, by ChooseRung for this device and these SSDs. nil: RungPinned, without a proof.
	Memory *Memory
}

const (
	defaultBlocks  = 32
	defaultDepth   = 256
	defaultTimeout = 10 * time.Second
	defaultRetries = 3
	defaultResets  = 3
	maxDepth       = 1 << 16
	maxThreads     = 1024
)

func (o *AsyncOptions) fill() error {
	if o.Blocks == 0 {
		o.Blocks = defaultBlocks
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
		return errs.New(errs.Usage, "%d blocks for the I/O kernels: choose 1 to %d", o.Blocks, 1<<16)
	case o.Threads < warp || o.Threads > maxThreads || o.Threads%warp != 0:
		return errs.New(errs.Usage, "%d threads in a block of the I/O kernels: choose a multiple of %d up to %d", o.Threads, warp, maxThreads)
	case o.QueuePairs < 0:
		return errs.New(errs.Usage, "%d queue pairs per SSD: choose 1 or more, or 0 to follow the blocks", o.QueuePairs)
	case o.Depth < 1 || o.Depth > maxDepth:
		return errs.New(errs.Usage, "depth %d: choose 1 to %d reads outstanding per SSD", o.Depth, maxDepth)
	case o.Timeout < time.Millisecond:
		return errs.New(errs.Usage, "read timeout %v: choose at least 1ms", o.Timeout)
	}
	return nil
}

// async is the engine of the stacks in which kernels on the device drive the NVMe queues: async
// itself, and sync, which differs in what is launched for a set.
type async struct {
	name string
	sync *syncOptions // of stack sync; nil: async
	side
	rung         Rung
	ssds         []*SSD
	layout       Layout
	opt          AsyncOptions
	perSSD       int // queue pairs of each SSD
	blocks       int // grid of complete
	submitBlocks int
	submitK      cuda.Kernel
	complK       cuda.Kernel
	submitS      cuda.Stream
	complS       cuda.Stream
	queueBuf     cuda.Buffer // queueState[queues]
	cmdBuf       cuda.Buffer // command[maxCommands used] per queue
	histBuf      cuda.Buffer // Histogram per queue
	setBuf       cuda.Buffer // setState[maxSets] and their arrays
	listBuf      []dmaArea   // by SSD
	stageBuf     []dmaArea   // by SSD; made when first needed
	pairs        []pairState // by queue
	host         *hostSide
	handle       uint64
	shape        setShape // of one set's arrays behind the setStates
	unitRule
	coalesceK cuda.Kernel
	sorting   coalesceScratch // guarded by mu, as the next two
	scratch   [maxSets]setScratch
	retired   []cuda.Buffer // outgrown, and perhaps in use
	copies    listCopies
	dma       dmaCache

	mu       sync.Mutex // order of submissions, sets, dma, broken
	live     []*asyncPending
	slots    [maxSets]*asyncPending
	free     chan uint32
	rotate   uint32
	closed   bool
	broken   error
	submitEv [maxSets]cuda.Event
	complEv  [maxSets]cuda.Event

	doorbells   []cuda.Buffer // by SSD, where the device needs them registered
	bells       *bells        // rung pinned-cpubell: in their place
	ringsAt     []int         // p2p: where in listBuf the rings begin, by SSD
	gate        chan struct{} // see enter; nil on the host device
	clockOffset int64         // of the device's clock, once known; guarded by gate
	clockKnown  bool

	rec     []ssdRecovery // by SSD
	life    context.Context
	endLife context.CancelFunc // ends recoveries
	strands int                // sets that keep their slots until Close; guarded by mu

	// Admin commands of recovery, which tests replace.
	abort       func(ctx context.Context, c *nvme.Controller, sqid, cid uint16) error
	deleteQueue func(ctx context.Context, c *nvme.Controller, qp *nvme.QueuePair) error

	sets, rows, failed, timeouts atomic.Int64
	submitNS, completeNS         atomic.Int64
	final                        Stats // after Close
}

// pairState is the host's side of one queue.
type pairState struct {
	qp     *nvme.QueuePair
	sq, cq cuda.Buffer
	block  int    // of complete
	idle   uint64 // its completions when it was replaced, plus 1; 0: it was not
}

// NewAsync makes the async stack over ssds, which hold a layout's rows: queue pairs, the kernels'
// state and streams.
func NewAsync(dev cuda.Device, ssds []*SSD, l Layout, o AsyncOptions) (Reader, error) {
	return newEngine("async", nil, dev, ssds, l, o)
}

func newEngine(name string, sync *syncOptions, dev cuda.Device, ssds []*SSD, l Layout, o AsyncOptions) (Reader, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	if err := checkSSDs(ssds, l, true); err != nil {
		return nil, err
	}
	e := &async{name: name, sync: sync, side: side{dev: dev}, rung: RungPinned, ssds: ssds, layout: l, opt: o, free: make(chan uint32, maxSets), rec: make([]ssdRecovery, len(ssds))}
	if err := e.useMemory(o.Memory); err != nil {
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

// checkSSDs tells whether the SSDs can hold the layout and, for stacks with queues, have controllers.
func checkSSDs(ssds []*SSD, l Layout, queues bool) error {
	if err := l.Check(); err != nil {
		return err
	}
	if len(ssds) != int(l.SSDs) {
		return errs.New(errs.Usage, "layout over %d SSDs with %d SSDs given: bind all stripes", l.SSDs, len(ssds))
	}
	for s, d := range ssds {
		if d == nil || (queues && d.Ctrl == nil) {
			return errs.New(errs.Usage, "SSD %d has no controller: bind it first", s)
		}
		if d.Ctrl == nil {
			continue
		}
		ns := d.Ctrl.Namespace()
		if ns.LBABytes != int(l.LBABytes) {
			return errs.New(errs.Usage, "SSD %s has LBAs of %d bytes, the layout %d: load the dataset again", d.name(), ns.LBABytes, l.LBABytes)
		}
		if end := uint64(d.DataStart) + uint64(l.LBAsOn(s)); end > ns.Blocks || end < uint64(d.DataStart) {
			return errs.New(errs.Usage, "SSD %s has %d LBAs, the rows need %d from %d on: bind a larger SSD", d.name(), ns.Blocks, l.LBAsOn(s), d.DataStart)
		}
	}
	return nil
}

// useMemory takes a rung; nil: what needs no proof.
func (e *async) useMemory(m *Memory) error {
	if m == nil {
		return nil
	}
	e.rung = m.rung
	if m.rung != RungP2P {
		return nil
	}
	p, ok := e.dev.(cuda.PeerMapper)
	if !ok {
		return errs.New(errs.Usage, "gpuio %s: memory rung %s was chosen for another device than %s", e.name, m.rung, e.dev.Info().Name)
	}
	e.peer, e.method = p, m.method
	return nil
}

func (e *async) queues() int { return len(e.ssds) * e.perSSD }

func (e *async) queue(g int) *queueState { return at[queueState](e.queueBuf.Ptr(), g) }

func (e *async) set(slot uint32) *setState { return at[setState](e.setBuf.Ptr(), int(slot)) }

// setArrays is the memory of a set's offsets, IOVAs, units and counts.
func (e *async) setArrays(slot uint32) cuda.DevicePtr {
	return e.setBuf.Ptr() + maxSets*setStateBytes + cuda.DevicePtr(int(slot)*e.shape.bytes)
}

func (e *async) remaining(slot uint32) []uint32 {
	return unsafe.Slice(at[uint32](e.setArrays(slot)+cuda.DevicePtr(e.shape.remaining), 0), e.queues())
}

// unfinished tells whether a set has units that are not done. When it has none, what whoever ended them has
// written is seen.
func (e *async) unfinished(slot uint32) bool {
	rem := e.remaining(slot)
	for g := range rem {
		if atomic.LoadUint32(&rem[g]) != 0 {
			return true
		}
	}
	return false
}

// taken is how many units of each queue's share read_sync has begun.
func (e *async) taken(slot uint32) []uint32 {
	return unsafe.Slice(at[uint32](e.setArrays(slot)+cuda.DevicePtr(e.shape.taken), 0), e.queues())
}

// listBytes is the PRP list of one command: enough for what it moves at any offset, and a power of
// two, so that no list crosses a page.
func listBytes(readBytes, page int) int {
	n := 8
	for n < (readBytes+page-1)/page*8 {
		n *= 2
	}
	return n
}

// stageBytes is the staging slot of one command. Large ones are an odd number of pages, so that the
// first bytes of all slots, which is what short reads use, are not in the same few sets of a cache.
func stageBytes(readBytes, page int) int {
	if readBytes > page {
		n := (readBytes + page - 1) / page
		if n >= 16 {
			n |= 1
		}
		return n * page
	}
	n := 512
	for n < readBytes {
		n *= 2
	}
	return n
}

// choosePairs settles the queue pairs per SSD and each one's commands.
func (e *async) choosePairs() error {
	sms := e.dev.Info().SMs
	if e.opt.SMs > 0 {
		sms = min(sms, e.opt.SMs)
	}
	// On the host device so many blocks run at once, and a block is one warp.
	active, perBlock := max(min(e.opt.Blocks, sms), 1), 1
	if !e.onHost() {
		perBlock = e.opt.Threads / warp
		active = e.opt.Blocks * perBlock
	}
	e.perSSD = e.opt.QueuePairs
	if e.perSSD == 0 {
		// A queue below a warp's worth of reads rings and wakes more often than it needs to.
		e.perSSD = min((active+len(e.ssds)-1)/len(e.ssds), max(e.opt.Depth/warp, 1))
	}
	e.perSSD = min(e.perSSD, e.opt.Depth)
	for _, s := range e.ssds {
		limit := s.Ctrl.MaxQueuePairs()
		if e.opt.QueuePairs == 0 && limit > 1 {
			limit-- // leaves one for Bulk
		}
		if e.perSSD > limit && e.opt.QueuePairs != 0 {
			return errs.New(errs.Usage, "%d queue pairs per SSD: %s has %d; ask for at most that", e.opt.QueuePairs, s.name(), limit)
		}
		e.perSSD = min(e.perSSD, limit)
		if per := (e.opt.Depth + e.perSSD - 1) / e.perSSD; per > min(maxCommands, s.Ctrl.MaxQueueEntries()-1) {
			if e.opt.QueuePairs != 0 {
				return errs.New(errs.Usage, "depth %d over %d queue pairs: %s takes at most %d commands per queue; use more queue pairs or less depth",
					e.opt.Depth, e.perSSD, s.name(), min(maxCommands, s.Ctrl.MaxQueueEntries()-1))
			}
			most := min(maxCommands, s.Ctrl.MaxQueueEntries()-1)
			e.perSSD = (e.opt.Depth + most - 1) / most
			if e.perSSD > limit {
				return errs.New(errs.Usage, "depth %d: %s takes at most %d commands on %d queue pairs", e.opt.Depth, s.name(), most*limit, limit)
			}
		}
	}
	e.blocks = (max(min(active, e.queues()), 1) + perBlock - 1) / perBlock
	e.submitBlocks = min(e.opt.Blocks, (e.queues()+perBlock-1)/perBlock)
	if e.sync != nil {
		// Any block of read_sync may wait for any queue, so they all wait as one.
		e.blocks = 1
	}
	return nil
}

func (e *async) open(ctx context.Context) error {
	if err := e.choosePairs(); err != nil {
		return err
	}
	var err error
	limit := commandLimit(e.ssds, int(e.layout.LBABytes))
	if e.unitRule, err = chooseUnits(e.layout, limit, e.sync == nil, e.opt.CoalesceBytes, e.opt.Depth); err != nil {
		return err
	}
	submit := "submit"
	if e.sync != nil {
		submit = "read_sync"
	}
	if e.submitK, err = e.dev.Kernel(submit); err != nil {
		return err
	}
	if e.complK, err = e.dev.Kernel("complete"); err != nil {
		return err
	}
	if e.window != 0 {
		if e.coalesceK, err = e.dev.Kernel("coalesce"); err != nil {
			return err
		}
	}
	if e.submitS, err = e.dev.NewStream(cuda.StreamOptions{Name: submit, SMs: e.opt.SMs, Priority: e.opt.Priority}); err != nil {
		return err
	}
	if e.complS, err = e.dev.NewStream(cuda.StreamOptions{Name: "complete", SMs: e.opt.SMs, Priority: e.opt.Priority}); err != nil {
		return err
	}
	for i := range maxSets {
		if e.submitEv[i], err = e.dev.NewEvent(); err != nil {
			return err
		}
		if e.complEv[i], err = e.dev.NewEvent(); err != nil {
			return err
		}
	}
	if !e.onHost() {
		e.gate = make(chan struct{}, 1)
	}
	switch {
	case e.rung == RungPinnedCPUBell:
		e.bells, err = newBells(&e.side, e.queues())
	case !e.onHost():
		err = e.registerDoorbells()
	}
	if err != nil {
		return err
	}
	nq := e.queues()
	per := e.commandsOf(0)
	if e.queueBuf, err = e.alloc(int64(nq*queueStateBytes), "gpuio queues"); err != nil {
		return err
	}
	if e.cmdBuf, err = e.alloc(int64(nq*per)*int64(unsafe.Sizeof(command{})), "gpuio commands"); err != nil {
		return err
	}
	if e.histBuf, err = e.alloc(int64(nq)*int64(unsafe.Sizeof(Histogram{})), "gpuio latency"); err != nil {
		return err
	}
	e.shape = shapeOf(len(e.ssds), nq)
	if e.setBuf, err = e.alloc(int64(maxSets*(setStateBytes+e.shape.bytes)), "gpuio sets"); err != nil {
		return err
	}
	e.listBuf = make([]dmaArea, len(e.ssds))
	e.stageBuf = make([]dmaArea, len(e.ssds))
	e.ringsAt = make([]int, len(e.ssds))
	e.pairs = make([]pairState, nq)
	blocks := e.commandBlocks()
	read := blocks * int(e.layout.LBABytes)
	for s, d := range e.ssds {
		page := d.Ctrl.PageBytes()
		lb := listBytes(read, page)
		lists, purpose := (e.perSSD*per*lb+page-1)/page*page, "gpuio prp lists"
		e.ringsAt[s] = lists
		if e.peer != nil {
			sq, cq := d.Ctrl.QueueBytes(per + 1)
			lists, purpose = lists+e.perSSD*(sq+cq), "gpuio queues and prp lists"
		}
		if e.listBuf[s], err = e.area(d, lists, purpose); err != nil {
			return err
		}
		for i := range e.perSSD {
			g := s*e.perSSD + i
			q := e.queue(g)
			*q = queueState{
				Commands:  e.cmdBuf.Ptr() + cuda.DevicePtr(g*per*int(unsafe.Sizeof(command{}))),
				Lists:     e.listBuf[s].buf.Ptr() + cuda.DevicePtr(i*per*lb),
				ListsIOVA: uint64(e.listBuf[s].iova) + uint64(i*per*lb),
				Hist:      e.histBuf.Ptr() + cuda.DevicePtr(g*int(unsafe.Sizeof(Histogram{}))),
				TimeoutNS: int64(e.opt.Timeout),
				DataStart: uint64(d.DataStart),
				NSID:      d.Ctrl.Namespace().ID,
				SSD:       uint32(s), NumCommands: uint32(e.commandsOf(i)),
				ListBytes: uint32(lb), PageBytes: uint32(page), Retries: uint32(e.opt.Retries),
				ReadBytes: uint32(read), Blocks: uint32(blocks),
			}
			for cid := range q.NumCommands {
				q.Free[cid/32] |= 1 << (cid & 31)
			}
			if err := e.createPair(ctx, g); err != nil {
				return err
			}
		}
	}
	if !e.layout.whole() {
		if err := e.ensureStaging(); err != nil {
			return err
		}
	}
	if err := e.openHostSide(); err != nil {
		return err
	}
	e.dma.init(e.ssds, &e.side)
	return nil
}

// commandsOf is the number of CIDs of an SSD's i-th queue; the first has the most.
func (e *async) commandsOf(i int) int {
	n := e.opt.Depth / e.perSSD
	if i < e.opt.Depth%e.perSSD {
		n++
	}
	return n
}

// registerDoorbells makes the SSDs' doorbells writable for the device's kernels.
func (e *async) registerDoorbells() error {
	e.doorbells = make([]cuda.Buffer, len(e.ssds))
	for s, d := range e.ssds {
		m, ok := d.Ctrl.Bus().(nvme.DoorbellMapper)
		if !ok {
			return errs.New(errs.Capability, "nvme %s: its bus has no doorbells that device %s could ring; use --device host", d.name(), e.dev.Info().Name)
		}
		mem, io, err := m.DoorbellMemory()
		if err != nil {
			return fmt.Errorf("nvme %s: %w", d.name(), err)
		}
		register := e.dev.Register
		if io {
			r, ok := e.dev.(cuda.IORegistrar)
			if !ok {
				return errs.New(errs.Capability, "nvme %s: device %s cannot reach I/O memory; use --device host", d.name(), e.dev.Info().Name)
			}
			register = r.RegisterIO
		}
		if e.doorbells[s], err = register(mem, "gpuio doorbells"); err != nil {
			return fmt.Errorf("nvme %s: doorbells: %w", d.name(), err)
		}
	}
	return nil
}

// ring points queue g's state at the doorbells of its pair, as kernels reach them.
func (e *async) ring(g int, q *queueState, qp *nvme.QueuePair) {
	bus := e.ssds[q.SSD].Ctrl.Bus()
	if e.bells != nil {
		k, _ := bus.(nvme.Kicker)
		e.bells.attach(g, qp, k)
		q.SQDoorbell, q.CQDoorbell = e.bells.at(g), e.bells.at(g)+4
		return
	}
	for _, x := range []struct {
		to   *cuda.DevicePtr
		bell *uint32
	}{{&q.SQDoorbell, qp.SQDoorbell}, {&q.CQDoorbell, qp.CQDoorbell}} {
		*x.to = cuda.DevicePtr(uintptr(unsafe.Pointer(x.bell)))
		if e.doorbells != nil {
			*x.to += e.doorbells[q.SSD].Ptr() - addr(e.doorbells[q.SSD].Bytes())
		}
	}
}

// silence keeps doorbells of an SSD's queues from being rung by the CPU's thread. No kernel is inside one of them.
func (e *async) silence(ssd int) {
	for g := ssd * e.perSSD; e.bells != nil && g < (ssd+1)*e.perSSD; g++ {
		e.bells.detach(g)
	}
}

// rings is the memory of queue g's rings, on p2p. Its queue pair does not exist, or not any more.
func (e *async) rings(g int) (m *nvme.QueueMemory, sq, cq cuda.DevicePtr) {
	s := g / e.perSSD
	a := &e.listBuf[s]
	sqBytes, cqBytes := e.ssds[s].Ctrl.QueueBytes(e.commandsOf(0) + 1)
	at := e.ringsAt[s] + g%e.perSSD*(sqBytes+cqBytes)
	m = &nvme.QueueMemory{
		SQ: a.mem[at : at+sqBytes], SQAddr: a.iova + nvme.IOVA(at),
		CQ: a.mem[at+sqBytes : at+sqBytes+cqBytes], CQAddr: a.iova + nvme.IOVA(at+sqBytes),
	}
	return m, a.buf.Ptr() + cuda.DevicePtr(at), a.buf.Ptr() + cuda.DevicePtr(at+sqBytes)
}

// ensureStaging gives each CID a slot for reads that cannot go to their final place. No kernel
// uses a queue's Stage before a set without Direct, or with runs, is launched: after this.
func (e *async) ensureStaging() error {
	per := e.commandsOf(0)
	for s, d := range e.ssds {
		if e.stageBuf[s].buf != nil {
			continue
		}
		sb := stageBytes(e.commandBlocks()*int(e.layout.LBABytes), d.Ctrl.PageBytes())
		a, err := e.area(d, e.perSSD*per*sb, "gpuio staging")
		if err != nil {
			return err
		}
		e.stageBuf[s] = a
		for i := range e.perSSD {
			q := e.queue(s*e.perSSD + i)
			q.Stage = a.buf.Ptr() + cuda.DevicePtr(i*per*sb)
			q.StageIOVA = uint64(a.iova) + uint64(i*per*sb)
			q.StageBytes = uint32(sb)
		}
	}
	return nil
}

// createPair makes queue g's rings and points its state at them.
func (e *async) createPair(ctx context.Context, g int) error {
	q := e.queue(g)
	p := &e.pairs[g]
	d := e.ssds[q.SSD]
	var given *nvme.QueueMemory
	var sqPtr, cqPtr cuda.DevicePtr
	if e.peer != nil {
		given, sqPtr, cqPtr = e.rings(g)
		ioFill(given.CQ, 0) // phase tags of an earlier pair's completions
	}
	qp, err := d.Ctrl.CreateQueuePairIn(ctx, int(q.NumCommands)+1, given)
	if err != nil {
		return err
	}
	p.qp = qp
	register := e.dev.Register
	if qp.InCMB && !e.onHost() {
		r, ok := e.dev.(cuda.IORegistrar)
		if !ok {
			return errs.New(errs.Capability, "nvme %s: device %s cannot reach submission queues in controller memory; use --sq host", d.name(), e.dev.Info().Name)
		}
		register = r.RegisterIO
		if e.bells != nil {
			// The device's stores and the CPU's doorbell take different ways to the SSD, and nothing orders them.
			return errs.New(errs.Capability, "nvme %s: doorbells that the CPU rings could overtake commands on their way to the controller's memory; use --sq host", d.name())
		}
	}
	if given == nil || qp.InCMB {
		if p.sq, err = register(qp.SQ, "gpuio sq"); err != nil {
			return err
		}
		sqPtr = p.sq.Ptr()
	}
	if given == nil {
		if p.cq, err = e.dev.Register(qp.CQ, "gpuio cq"); err != nil {
			return err
		}
		cqPtr = p.cq.Ptr()
	}
	q.SQ, q.CQ = sqPtr, cqPtr
	e.ring(g, q, qp)
	atomic.StoreUint32(&q.QID, uint32(qp.ID))
	q.Entries = uint32(qp.Entries)
	q.Tail, q.Head, q.Phase, q.ScanAt = 0, 0, 1, 0
	return nil
}

// deletePair ends queue g. When it returns nil no DMA of its commands can happen any more.
func (e *async) deletePair(ctx context.Context, g int) error {
	p := &e.pairs[g]
	if p.qp == nil {
		return nil
	}
	qp := p.qp
	if e.bells != nil {
		e.bells.detach(g)
	}
	p.qp = nil // on an error the controller keeps its memory until Reset or Close
	return errors.Join(e.unregister(g), e.deleteQueue(ctx, e.ssds[g/e.perSSD].Ctrl, qp))
}

func (e *async) unregister(g int) error {
	p := &e.pairs[g]
	var err error
	for _, b := range []*cuda.Buffer{&p.sq, &p.cq} {
		if *b != nil {
			err = errors.Join(err, (*b).Free())
			*b = nil
		}
	}
	return err
}

// blockOf is the block of complete that owns queue g, by the rule of cuda.Block.Range.
func blockOf(g, blocks, queues int) int {
	q, r := queues/blocks, queues%blocks
	if g < r*(q+1) {
		return g / (q + 1)
	}
	return r + (g-r*(q+1))/q
}

func (e *async) openHostSide() error {
	if !e.onHost() { // kernels ring and poll by themselves
		e.host = &hostSide{parks: make([]blockPark, 1)}
		return nil
	}
	h := &hostSide{kickers: make([]nvme.Kicker, len(e.ssds)), parks: make([]blockPark, e.blocks)}
	for s, d := range e.ssds {
		h.kickers[s], _ = d.Ctrl.Bus().(nvme.Kicker)
	}
	refs := make([][]nvme.CQRef, e.blocks)
	for g := range e.pairs {
		b := blockOf(g, e.blocks, e.queues())
		e.pairs[g].block = b
		bus := e.ssds[g/e.perSSD].Ctrl.Bus()
		refs[b] = append(refs[b], nvme.CQRef{Bus: bus, QID: e.pairs[g].qp.ID})
		w, _ := bus.(nvme.Waiter)
		h.parks[b].waiters = append(h.parks[b].waiters, queueWaiter{w, e.queue(g), &e.queue(g).QID})
	}
	e.host = h
	for b := range refs {
		gw, ok := refs[b][0].Bus.(nvme.GroupWaiter)
		for _, r := range refs[b] {
			if _, has := r.Bus.(nvme.GroupWaiter); !has {
				ok = false
			}
		}
		if ok {
			group, err := gw.GroupCQs(refs[b])
			if err != nil {
				return fmt.Errorf("gpuio: wait for the queues of block %d: %w", b, err)
			}
			h.parks[b].group = group
		}
		h.parks[b].init()
	}
	if e.sync != nil {
		h.initSync(e.sync.blocks, e.queues())
	}
	e.handle = registerHostSide(h)
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
	sick     bool         // sync: its rows are read by complete now; see resumeSync. Guarded by e.mu
	// turn is held by who waits for or finishes the set.
	turn     chan struct{}
	finished bool
	stats    ReadStats
	err      error
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
		return 0, errs.New(errs.Usage, "read set with %d bucket bounds for %d SSDs", len(rs.SSDOffset), l.SSDs)
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
		return 0, errs.New(errs.Usage, "read set of %d rows without rows, positions or destination", n)
	}
	// 32-bit positions times the stride must not wrap: the kernels check only the product.
	size := backedBytes(rs.Dst)
	if rs.DstStride < int64(l.RowBytes) || rs.DstStride > math.MaxInt32 || rs.DstOffset < 0 || rs.DstOffset > size-int64(l.RowBytes) {
		return 0, errs.New(errs.Usage, "read set: rows of %d bytes do not fit stride %d at offset %d of a buffer of %d bytes",
			l.RowBytes, rs.DstStride, rs.DstOffset, size)
	}
	if rs.DstBytes < 0 || rs.DstBytes > rs.Dst.Size()-rs.DstOffset || rs.DstBytes > 0 && rs.DstBytes < int64(l.RowBytes) {
		return 0, errs.New(errs.Usage, "read set: rows of %d bytes in %d bytes from offset %d of a buffer of %d bytes", l.RowBytes, rs.DstBytes, rs.DstOffset, rs.Dst.Size())
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
			err = errs.New(errs.Device, "gpuio %s: SSDs that were given up may still write to the buffers of %d sets; close the reader", e.name, maxSets)
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

// refusal is why no set may be submitted. Needs e.mu.
func (e *async) refusal() error {
	if e.closed {
		return errs.New(errs.Failed, "gpuio %s: the reader is closed", e.name)
	}
	return e.broken
}

// launch maps the destination, fills the set's slot and enqueues its kernels. Needs e.mu.
func (e *async) launch(p *asyncPending, rs *ReadSet) error {
	if err := e.refusal(); err != nil {
		return err
	}
	nssd := len(e.ssds)
	for s := range e.ssds {
		if rs.SSDOffset[s] < rs.SSDOffset[s+1] {
			if err := e.givenUp(s); err != nil {
				return err
			}
		}
	}
	var err error
	direct := uint32(0)
	if e.layout.whole() && rs.DstOffset%4 == 0 && rs.DstStride%4 == 0 {
		if p.mapping, err = e.dma.acquire(rs.Dst, rs.DstOffset+rs.extent()); err != nil {
			return err
		}
		if p.mapping != nil {
			direct = 1
		}
	}
	arrays := e.setArrays(p.slot)
	iovas := arrays + cuda.DevicePtr(e.shape.iovas)
	copy(unsafe.Slice(at[int64](arrays, 0), nssd+1), rs.SSDOffset)
	if direct != 0 {
		for s := range nssd {
			*at[uint64](iovas, s) = uint64(p.mapping.iovas[s]) + uint64(rs.DstOffset)
		}
	}
	set := setState{
		Rows: rs.Rows, Pos: rs.Pos, Offsets: arrays, Dst: rs.Dst.Ptr() + cuda.DevicePtr(rs.DstOffset),
		DstLimit: rs.extent(), DstStride: rs.DstStride, DstIOVA: iovas,
		Units: arrays + cuda.DevicePtr(e.shape.units), Remaining: arrays + cuda.DevicePtr(e.shape.remaining),
		Taken: arrays + cuda.DevicePtr(e.shape.taken), Layout: e.layout, Direct: direct, Rotate: e.rotate,
	}
	e.rotate++
	coalesced, err := e.shapeSet(p.slot, rs, &set)
	if err != nil {
		return err
	}
	if direct == 0 || coalesced { // a run may need a copy where its rows alone would not
		if err := e.ensureStaging(); err != nil {
			return err
		}
	}
	*e.set(p.slot) = set
	err = func() error {
		if rs.Ready != nil {
			if err := e.submitS.Wait(rs.Ready); err != nil {
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
		grid := cuda.LaunchConfig{Blocks: e.submitBlocks, Threads: e.opt.Threads}
		if err := cuda.Launch(e.submitS, e.submitK, grid, submitParams{
			Queues: e.queueBuf.Ptr(), Sets: e.setBuf.Ptr(), Engine: e.handle,
			NumQueues: uint32(e.queues()), QueuesPerSSD: uint32(e.perSSD), Set: p.slot,
		}); err != nil {
			return err
		}
		if err := e.submitS.Record(e.submitEv[p.slot]); err != nil {
			return err
		}
		// complete starts after its set was handed over; submit only fills queues, so this is
		// soon, and completions of earlier sets are reaped meanwhile.
		if err := e.complS.Wait(e.submitEv[p.slot]); err != nil {
			return err
		}
		return e.launchComplete(p.slot)
	}()
	if err != nil {
		e.broken = fmt.Errorf("gpuio %s: launch: %w", e.name, err)
		p.mapping = nil // commands may be in flight: the mapping stays until Close
		return e.broken
	}
	return nil
}

// launchLimit is after how long a complete kernel returns to the host, which launches it again: no
// kernel runs for ever, whatever the SSDs do.
const launchLimit = 2 * time.Second

// launchComplete enqueues the complete kernel for a set. Needs e.mu.
func (e *async) launchComplete(slot uint32) error {
	if err := cuda.Launch(e.complS, e.complK, cuda.LaunchConfig{Blocks: e.blocks, Threads: e.opt.Threads}, completeParams{
		Queues: e.queueBuf.Ptr(), Sets: e.setBuf.Ptr(), Engine: e.handle, NumQueues: uint32(e.queues()), Set: slot,
		LimitNS: int64(launchLimit),
	}); err != nil {
		return err
	}
	return e.complS.Record(e.complEv[slot])
}

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
		return fmt.Errorf("gpuio %s: wait for %d rows: %w", p.e.name, p.rows, ctx.Err())
	}
	defer func() { <-p.turn }()
	if p.finished {
		return nil
	}
	e := p.e
	for {
		if err := e.complEv[p.slot].Synchronize(ctx); err != nil {
			if ctx.Err() != nil {
				return fmt.Errorf("gpuio %s: wait for %d rows: %w", p.e.name, p.rows, ctx.Err())
			}
			p.abandon(err)
			return nil
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
	p.err = fmt.Errorf("gpuio %s: %d rows not read: %w; close the reader before the buffers are used again", e.name, p.rows, err)
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
	fails := int64(set.NumFails)
	p.stats = ReadStats{
		Rows: p.rows - fails, Commands: int64(set.Issued) + int64(set.Retries), Retries: int64(set.Retries), Timeouts: p.timeouts.Load(),
		Submit: time.Duration(max(set.SubmitNS-set.StartNS, 0)), Complete: time.Duration(max(set.DoneNS-max(set.SubmitNS, set.StartNS), 0)), // read_sync has no SubmitNS
	}
	p.stats.Bytes = int64(set.Blocks) * int64(e.layout.LBABytes)
	if fails > 0 {
		p.err = e.setError(p, set)
	}
	e.rows.Add(p.stats.Rows)
	e.failed.Add(fails)
	e.timeouts.Add(p.stats.Timeouts)
	e.submitNS.Add(int64(p.stats.Submit))
	e.completeNS.Add(int64(p.stats.Complete))
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
			err = &nvme.StatusError{Bus: ssd.name(), QID: f.QID, CID: f.CID, Op: "read", LBA: nvme.LBA(f.LBA), Blocks: f.Blocks, Status: nvme.Status(f.Status)}
		case failTimeout:
			err = &TimeoutError{SSD: ssd.name(), QID: f.QID, CID: f.CID, Op: "read", LBA: nvme.LBA(f.LBA), Blocks: f.Blocks, After: e.opt.Timeout, Attempts: int(f.Tries), Tried: e.rec[f.SSD].tried()}
		case failRow:
			class = errs.Failed
			err = fmt.Errorf("not a row of SSD %s: the layout has %d rows on %d SSDs; the bucket is wrong", ssd.name(), e.layout.Rows, e.layout.SSDs)
		case failPos:
			class = errs.Failed
			err = fmt.Errorf("position %d is outside the destination of %d bytes", f.LBA, set.DstLimit)
		default:
			err = e.lostError(f)
		}
		out.First = append(out.First, &RowError{Row: f.Row, Err: err})
	}
	return errs.With(class, out)
}

// Stats implements Reader.
func (e *async) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.queueBuf == nil {
		return e.final
	}
	return e.statsLocked()
}

func (e *async) statsLocked() Stats {
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
			q := e.queue(s*e.perSSD + i)
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
			h := at[Histogram](q.Hist, 0)
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
	var err error
	// Kernels leave frozen queues alone, so they end, and with them the sets in flight.
	e.mu.Lock()
	live := append([]*asyncPending(nil), e.live...)
	if e.broken == nil {
		e.broken = errs.New(errs.Failed, "gpuio %s: the reader was closed before the set was read", e.name)
	}
	e.mu.Unlock()
	e.endRecoveries()
	quiet := true
	for _, s := range []cuda.Stream{e.submitS, e.complS} {
		if s != nil {
			// A failed stream has dropped its work too; its error was told by Wait.
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
		// Kernels still run: their memory must stay.
		return errors.Join(err, errs.New(errs.Device, "gpuio %s: kernels did not end within %v; the engine's memory is not freed", e.name, closeTimeout))
	}
	for _, p := range live {
		err = errors.Join(err, p.complete(ctx))
	}
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
	err = errors.Join(err, e.endDMA(ctx))
	err = errors.Join(err, e.dma.close())
	for _, b := range e.doorbells {
		if b != nil {
			err = errors.Join(err, b.Free())
		}
	}
	if e.bells != nil {
		err = errors.Join(err, e.bells.buf.Free())
	}
	for s := range e.ssds {
		if e.listBuf != nil {
			err = errors.Join(err, e.giveBack(e.ssds[s], &e.listBuf[s]), e.giveBack(e.ssds[s], &e.stageBuf[s]))
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.queueBuf != nil {
		e.final = e.statsLocked()
	}
	err = errors.Join(err, e.freeScratch())
	for _, b := range []*cuda.Buffer{&e.queueBuf, &e.cmdBuf, &e.histBuf, &e.setBuf} {
		if *b != nil {
			err = errors.Join(err, (*b).Free())
			*b = nil
		}
	}
	return err
}
