package gpuio

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/nvme"
)

// queueSet is the queues of a reader on all its SSDs: their pairs, the memory that kernels and SSDs
// share, and the doorbells. Queue g = ssd × perSSD + i.
type queueSet struct {
	side
	unitRule
	rung     Rung
	ssds     []*SSD // by stripe
	lead     []int  // by stripe: the first of its SSD, for all that is the controller's
	layout   Layout
	opt      AsyncOptions
	perSSD   int         // queue pairs of each SSD
	queueBuf twin        // queueState[queues]
	cmdBuf   twin        // command[maxCommands used] per queue
	histBuf  twin        // Histogram per queue
	listBuf  []dmaArea   // by SSD
	stageBuf []dmaArea   // by SSD; made when first needed
	ringsAt  []int       // p2p: where in listBuf the rings begin, by SSD
	pairs    []pairState // by queue

	doorbells []cuda.Buffer // by SSD, where the device needs them registered
	bells     *bells        // rung pinned-cpubell: in their place

	// deleteQueue is the admin command; tests replace it.
	deleteQueue func(ctx context.Context, c *nvme.Controller, qp *nvme.QueuePair) error
}

// pairState is the host's side of one queue.
type pairState struct {
	qp           *nvme.QueuePair
	sq, cq       cuda.Buffer
	sqPtr, cqPtr cuda.DevicePtr // the rings, as kernels reach them
	block        int            // of complete
	idle         uint64         // its completions when it was replaced, plus 1; 0: it was not
}

// useMemory takes a rung; nil: what needs no proof.
func (e *queueSet) useMemory(reader string, m *Memory) error {
	if m == nil {
		return nil
	}
	e.rung = m.rung
	if !m.rung.rule().peer {
		return nil
	}
	p, ok := e.dev.(cuda.PeerMapper)
	if !ok {
		return errs.New(errs.Usage,
			"gpuio %s: memory rung %s was chosen for another device than %s", reader, m.rung,
			e.dev.Info().Name)
	}
	e.peer, e.method = p, m.method
	return nil
}

func (e *queueSet) queues() int { return len(e.ssds) * e.perSSD }

// queuesOf yields the queues of all stripes that are on the SSD of one.
func (e *queueSet) queuesOf(ssd int) iter.Seq[int] {
	return func(yield func(int) bool) {
		for g := range e.queues() {
			if e.lead[g/e.perSSD] == e.lead[ssd] && !yield(g) {
				return
			}
		}
	}
}

// queue is queue g's state, on a GPU in the host's copy.
func (e *queueSet) queue(g int) *queueState { return at[queueState](e.queueBuf.host.Ptr(), g) }

// ReadPairs is the number of an SSD's queue pairs that its stripes share: one is for Bulk.
func ReadPairs(s *SSD) int { return max(s.Ctrl.MaxQueuePairs()-1, 1) }

// pairLimit is the number of queue pairs of stripe i for a reader that asks for so many, or with 0
// for what it needs. The stripes of one SSD share its queue pairs.
func pairLimit(ssds []*SSD, i, asked int) int {
	limit := ReadPairs(ssds[i])
	if asked != 0 {
		limit = ssds[i].Ctrl.MaxQueuePairs()
	}
	return limit / StripesOn(ssds, ssds[i])
}

// commandsPerQueue is the number of commands in an SSD's queue: a ring keeps one entry free.
func commandsPerQueue(s *SSD) int { return min(maxCommands, s.Ctrl.MaxQueueEntries()-1) }

// FitDepth lowers a depth that nobody asked for to what each of the SSDs takes on its queue pairs:
// on so many, or with 0 on all but the one that loads use.
func FitDepth(ssds []*SSD, queuePairs, depth int) int {
	for i, s := range ssds {
		pairs := max(pairLimit(ssds, i, queuePairs), 1)
		if queuePairs > 0 {
			pairs = min(pairs, queuePairs)
		}
		depth = min(depth, pairs*commandsPerQueue(s))
	}
	return depth
}

// pairsFor is the least queue pairs that hold a depth.
func pairsFor(depth, perQueue int) int { return (depth + perQueue - 1) / perQueue }

// EvenPairs returns the queue pairs of each SSD, from least to most, for so many warps: as many as
// give no warp two queues, or the fewest above with which no warp has over 4/3 of the mean, else
// those with which the busiest warp has the smallest share. The warps then end together.
func EvenPairs(ssds, warps, least, most int) int {
	busiest := func(pairs int) int { return (ssds*pairs + warps - 1) / warps } // queues of a warp
	best := max(least, min(warps/ssds, most))
	for p := best + 1; p <= most && 3*busiest(best)*warps > 4*ssds*best; p++ {
		if busiest(p)*best < busiest(best)*p {
			best = p
		}
	}
	return best
}

// choosePairs settles the queue pairs per SSD and each one's commands. It returns how many warps of
// the I/O kernels run at once, and how many of them a block has.
func (e *queueSet) choosePairs() (active, perBlock int, err error) {
	sms := e.dev.Info().SMs
	if e.opt.SMs > 0 {
		sms = min(sms, e.opt.SMs)
	}
	// On the host device so many blocks run at once, and a block is one warp.
	active, perBlock = max(min(e.opt.Blocks, sms), 1), 1
	if inKernel(e.ssds) {
		active = max(min(active, sms/smsPerRing), 1)
	}
	if !e.onHost() {
		perBlock = e.opt.Threads / warp
		active = e.opt.Blocks * perBlock
	}
	asked := e.opt.QueuePairs
	if e.perSSD = min(asked, e.opt.Depth); asked == 0 {
		// A queue below a warp's worth of reads rings and wakes more often than it needs to.
		least, most := 1, max(e.opt.Depth/warp, 1)
		for i, s := range e.ssds {
			least = max(least, pairsFor(e.opt.Depth, commandsPerQueue(s)))
			most = min(most, pairLimit(e.ssds, i, 0))
		}
		e.perSSD = EvenPairs(len(e.ssds), active, least, most)
	}
	for i, s := range e.ssds {
		limit, bound := pairLimit(e.ssds, i, asked), commandsPerQueue(s)
		switch {
		case limit < 1:
			return 0, 0, errs.New(errs.Capability,
				"%s has fewer queue pairs than stripes of the dataset; load it onto SSDs of one size", s.name())
		case e.perSSD > limit && asked != 0:
			return 0, 0, errs.New(errs.Usage,
				"%d queue pairs per SSD: %s has %d; ask for at most that", asked, s.name(), limit)
		case e.perSSD > limit:
			return 0, 0, errs.New(errs.Usage,
				"depth %d: %s takes at most %d commands on %d queue pairs", e.opt.Depth,
				s.name(), bound*limit, limit)
		case pairsFor(e.opt.Depth, bound) > e.perSSD:
			return 0, 0, errs.New(errs.Usage,
				"depth %d over %d queue pairs: %s takes at most %d commands per queue; use more queue pairs or less depth",
				e.opt.Depth, e.perSSD, s.name(), bound)
		}
	}
	return active, perBlock, nil
}

// smsPerRing is the number of SMs of the host device for each block that has an io_uring. One keeps
// a disk busy with half a core. Two contend for the kernel's locks and for Go's place of a waiter:
// on two cores they took 1.6 times the processor time of one, a read at depth 256.
const smsPerRing = 4

// inKernel reports whether the SSDs are software over files, whose reads the kernel does.
func inKernel(ssds []*SSD) bool {
	for _, s := range ssds {
		if b, ok := s.Ctrl.Bus().(interface{ Engine() string }); !ok || b.Engine() != "io_uring" {
			return false
		}
	}
	return true
}

// commandsOf is the number of CIDs of an SSD's i-th queue; the first has the most.
func (e *queueSet) commandsOf(i int) int {
	n := e.opt.Depth / e.perSSD
	if i < e.opt.Depth%e.perSSD {
		n++
	}
	return n
}

// registerDoorbells makes the SSDs' doorbells writable for the device's kernels.
func (e *queueSet) registerDoorbells() error {
	e.doorbells = make([]cuda.Buffer, len(e.ssds))
	for s, d := range e.ssds {
		m, ok := d.Ctrl.Bus().(nvme.DoorbellMapper)
		if !ok {
			return errs.New(errs.Capability,
				"nvme %s: its bus has no doorbells that device %s could ring; use %v host",
				d.name(), e.dev.Info().Name, errs.Key("device"))
		}
		mem, io, err := m.DoorbellMemory()
		if err != nil {
			return fmt.Errorf("nvme %s: %w", d.name(), err)
		}
		register := e.dev.Register
		if io {
			r, ok := e.dev.(cuda.IORegistrar)
			if !ok {
				return errs.New(errs.Capability,
					"nvme %s: device %s cannot reach I/O memory; use %v host", d.name(),
					e.dev.Info().Name, errs.Key("device"))
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
func (e *queueSet) ring(g int, q *queueState, qp *nvme.QueuePair) {
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

// silence keeps doorbells of an SSD's queues from being rung by the CPU's thread. No kernel is
// inside one of them.
func (e *queueSet) silence(ssd int) {
	if e.bells == nil {
		return
	}
	for g := range e.queuesOf(ssd) {
		e.bells.detach(g)
	}
}

// rings is the memory of queue g's rings, on p2p. Its queue pair does not exist, or not any more.
func (e *queueSet) rings(g int) (m *nvme.QueueMemory, sq, cq cuda.DevicePtr) {
	s := g / e.perSSD
	a := &e.listBuf[s]
	sqBytes, cqBytes := e.ssds[s].Ctrl.QueueBytes(e.commandsOf(0) + 1)
	off := e.ringsAt[s] + g%e.perSSD*(sqBytes+cqBytes)
	m = &nvme.QueueMemory{
		SQ: a.mem[off : off+sqBytes], SQAddr: a.iova + nvme.IOVA(off),
		CQ: a.mem[off+sqBytes : off+sqBytes+cqBytes], CQAddr: a.iova + nvme.IOVA(off+sqBytes),
	}
	return m, a.buf.Ptr() + cuda.DevicePtr(off), a.buf.Ptr() + cuda.DevicePtr(off+sqBytes)
}

// ensureStaging gives each CID a slot for reads that cannot go to their final place. Kernels may
// run, and use a queue's Stage only for sets without Direct or with runs, which are launched after
// this, on stream st; they load it after they have acquired such a set (cuda/kernels/queue.h,
// load_staging). The queues' states are on the device; st is nil: they are not yet.
func (e *queueSet) ensureStaging(st cuda.Stream) error {
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
			g := s*e.perSSD + i
			q := e.queue(g)
			q.Stage = a.buf.Ptr() + cuda.DevicePtr(i*per*sb)
			q.StageIOVA = uint64(a.iova) + uint64(i*per*sb)
			q.StageBytes = uint32(sb)
			if st == nil || e.onHost() {
				continue
			}
			off := int64(g * queueStateBytes)
			err = errors.Join(err,
				e.queueBuf.push(st, off+int64(unsafe.Offsetof(q.Stage)), 16), // and StageIOVA
				e.queueBuf.push(st, off+int64(unsafe.Offsetof(q.StageBytes)), 4))
		}
		if err != nil { // no kernel has used them; the next set makes them anew
			return errors.Join(err, e.giveBack(d, &e.stageBuf[s]))
		}
	}
	return nil
}

// createPair makes queue g's rings; installPair points its state at them.
func (e *queueSet) createPair(ctx context.Context, g int) error {
	q := e.queue(g)
	p := &e.pairs[g]
	d := e.ssds[q.SSD]
	var given *nvme.QueueMemory
	if e.peer != nil {
		given, p.sqPtr, p.cqPtr = e.rings(g)
		ioFill(given.CQ, 0) // phase tags of an earlier pair's completions
	}
	qp, err := d.Ctrl.CreateQueuePairIn(ctx, int(q.NumCommands)+1, given)
	if err != nil {
		return err
	}
	p.qp = qp
	if given == nil {
		if p.sq, err = e.dev.Register(qp.SQ, "gpuio sq"); err != nil {
			return err
		}
		if p.cq, err = e.dev.Register(qp.CQ, "gpuio cq"); err != nil {
			return err
		}
		p.sqPtr, p.cqPtr = p.sq.Ptr(), p.cq.Ptr()
	}
	return nil
}

// installPair gives queue g's state its pair. Kernels leave the queue alone.
func (e *queueSet) installPair(g int) {
	q, p := e.queue(g), &e.pairs[g]
	q.SQ, q.CQ = p.sqPtr, p.cqPtr
	e.ring(g, q, p.qp)
	atomic.StoreUint32(&q.QID, uint32(p.qp.ID))
	q.Entries = uint32(p.qp.Entries)
	q.Tail, q.Head, q.Phase, q.ScanAt = 0, 0, 1, 0
}

// deletePair ends queue g. When it returns nil no DMA of its commands can happen any more.
func (e *queueSet) deletePair(ctx context.Context, g int) error {
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

func (e *queueSet) unregister(g int) error {
	return freeBuffers(&e.pairs[g].sq, &e.pairs[g].cq)
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

// commandBlocks is the most LBAs that one command of the engine moves.
func (e *queueSet) commandBlocks() int {
	if e.partBlocks != 0 {
		return int(e.partBlocks)
	}
	return max(int(e.layout.LBAsPerRow), int(e.window))
}

// calm reports whether all queues are idle and none is frozen. No kernel runs.
func (e *async) calm() bool {
	queues, err := e.states()
	if err != nil {
		return false // whoever recovers the queues learns why
	}
	for g := range queues {
		q := &queues[g]
		if atomic.LoadUint32(&q.Frozen) != frozenNo || q.inFlight() != 0 ||
			q.PendHead != atomic.LoadUint32(&q.PendTail) {
			return false
		}
		for w := range q.Retry {
			if atomic.LoadUint32(&q.Retry[w]) != 0 {
				return false
			}
		}
	}
	return true
}

// openQueues makes the memory of the queues, and on each SSD its queue pairs.
func (e *queueSet) openQueues(ctx context.Context) (err error) {
	switch {
	case e.rung.rule().cpuBell:
		e.bells, err = newBells(&e.side, e.queues())
	case !e.onHost():
		err = e.registerDoorbells()
	}
	if err != nil {
		return err
	}
	nq := e.queues()
	per := e.commandsOf(0)
	if e.queueBuf, err = e.twin(int64(nq*queueStateBytes), "gpuio queues"); err != nil {
		return err
	}
	if e.cmdBuf, err = e.twin(int64(nq*per)*int64(unsafe.Sizeof(command{})),
		"gpuio commands"); err != nil {
		return err
	}
	if e.histBuf, err = e.twin(int64(nq)*int64(unsafe.Sizeof(Histogram{})),
		"gpuio latency"); err != nil {
		return err
	}
	e.listBuf = make([]dmaArea, len(e.ssds))
	e.stageBuf = make([]dmaArea, len(e.ssds))
	e.ringsAt = make([]int, len(e.ssds))
	e.pairs = make([]pairState, nq)
	read := e.commandBlocks() * int(e.layout.LBABytes)
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
			e.initQueue(s, i, lb)
			if err := e.createPair(ctx, s*e.perSSD+i); err != nil {
				return err
			}
			e.installPair(s*e.perSSD + i)
		}
	}
	if e.layout.whole() {
		return nil
	}
	return e.ensureStaging(nil)
}

// initQueue fills the state of an SSD's i-th queue, whose commands have lists of lb bytes; its
// rings are still to come.
func (e *queueSet) initQueue(s, i, lb int) {
	per, d, blocks := e.commandsOf(0), e.ssds[s], e.commandBlocks()
	g := s*e.perSSD + i
	q := e.queue(g)
	commands := cuda.DevicePtr(g * per * int(unsafe.Sizeof(command{})))
	*q = queueState{
		Commands: e.cmdBuf.dev.Ptr() + commands, HostCommands: e.cmdBuf.host.Ptr() + commands,
		Lists:     e.listBuf[s].buf.Ptr() + cuda.DevicePtr(i*per*lb),
		ListsIOVA: uint64(e.listBuf[s].iova) + uint64(i*per*lb),
		Hist:      e.histBuf.dev.Ptr() + cuda.DevicePtr(g*int(unsafe.Sizeof(Histogram{}))),
		TimeoutNS: int64(e.opt.Timeout),
		DataStart: uint64(d.DataStart),
		NSID:      d.Ctrl.Namespace().ID,
		SSD:       uint32(s), NumCommands: uint32(e.commandsOf(i)),
		ListBytes: uint32(lb), PageBytes: uint32(d.Ctrl.PageBytes()),
		Retries:   uint32(e.opt.Retries),
		ReadBytes: uint32(blocks * int(e.layout.LBABytes)), Blocks: uint32(blocks),
	}
	for cid := range q.NumCommands {
		q.Free[cid/32] |= 1 << (cid & 31)
	}
}
