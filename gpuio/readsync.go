package gpuio

import (
	"math/bits"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/nvme"
)

// Kernel "read_sync": reads the rows of one set as BaM and GIDS do, one warp per row. (Rows that
// one command cannot move have a warp per part. Rows never share a command: that is what the
// baseline is.)
//
// Warp w serves queue w mod queues (and, when there are fewer warps than queues, each one that is a
// whole number of warps further on). Its leader takes a free CID, then the next row of the queue's
// share, writes the SQE and rings the doorbell under the queue's submission lock, and waits for its
// own command. Whoever waits tries the completion queue's lock (Reap); its holder takes up to 32
// completions off the queue, rings the CQ doorbell, and only then marks their commands: one that is
// marked earlier could be used again and find the queue full. The warp then copies a staged row,
// gives the CID back and takes the next row. A status that allows it is tried again.
//
// A row is taken with a CID in hand, so no row is lost when the queue freezes: what has a CID is a
// command in flight, or waits in Retry. A command past its deadline, or a completion for none in
// flight, freezes the queue, and its warps leave. A warp with a command out looks at it once more
// under Reap, and who reaps looks at Frozen once more under Reap: so no command is marked after its
// warp has gone. The rest is the host's (sync.go).
//
// Here a block runs its warps in turn, one step each, as states of a machine: the reads in flight
// are bounded by the warps, whatever the number of cores. A block that finds nothing to do waits
// outside its SM slot, one for all in the bus (hostSide.waitAt), the others for the one.
//
// Memory order, as on a GPU: SQE, fence, doorbell; status (Deadline), then State with release.
//
// Traffic: as submit and complete; one SQ doorbell for each command.
func init() {
	cuda.RegisterHost("read_sync", readSyncKernel)
}

// Phases of a warp.
const (
	syncIdle  = iota // wants a CID and a row
	syncIssue        // has a command that must be written to the SQ
	syncOut          // waits for its completion
	syncGone
)

// syncWarp is one warp's registers.
type syncWarp struct {
	phase uint8
	again bool // syncIssue: an attempt after the first
	g     uint32
	cid   uint32
	until int64 // syncIssue: when the submission lock must have been had
	due   int64 // syncOut: the command's deadline, whose place in memory its status takes
}

// syncView is a launch as one block sees it.
type syncView struct {
	kernelView
	p     *syncParams
	set   *setState
	side  *syncSide
	block int32
	warps uint32 // of the grid
	now   int64
	until int64
}

func readSyncKernel(b *cuda.Block, p *syncParams) error {
	h, err := hostSideOf(p.Engine)
	if err != nil {
		return err
	}
	per := uint32(max(b.Threads/warp, 1))
	k := syncView{
		kernelView: kernelView{h: h, caller: b, sets: p.Sets}, p: p,
		set: at[setState](p.Sets, int(p.Set)), side: h.sync,
		block: int32(b.Index), warps: uint32(b.Blocks) * per, now: nanotime(),
	}
	k.until = k.now + p.LimitNS
	atomic.CompareAndSwapInt64(&k.set.StartNS, 0, k.now)
	me := &k.side.blocks[b.Index]
	me.warps = me.warps[:0]
	for i := range per {
		me.warps = append(me.warps, syncWarp{g: (uint32(b.Index)*per + i) % p.NumQueues})
	}
	idle, skip := 0, 0
	for {
		k.now = nanotime()
		progress, alive := false, false
		for i := range me.warps {
			w := &me.warps[i]
			for n := 0; w.phase != syncGone && n < maxSteps && k.step(w); n++ {
				progress = true
			}
			alive = alive || w.phase != syncGone
		}
		if !alive {
			break
		}
		if progress || k.reap(me.warps) {
			idle = 0
			continue
		}
		// First the other blocks get their turn, or a few would read all rows. Then the
		// controllers, in this block's slot, as long as that helps (see complete). Then it sleeps.
		switch idle++; {
		case idle == 1:
			b.Yield()
		case idle == 2 && skip == 0:
			if k.side.lead.CompareAndSwap(false, true) {
				h.waitAt(b, 0, 0)
				k.reapAll()
				k.side.lead.Store(false)
			}
		default:
			if idle == 3 {
				skip = pollSkip
			} else {
				skip--
			}
			idle = 0
			k.wait(b, me)
		}
	}
	k.side.handOff()
	maxInt64(&k.set.DoneNS, nanotime())
	return nil
}

// maxSteps bounds a warp's turn: a row that is done makes place for the next.
const maxSteps = 4

// step lets a warp go on; false when it cannot.
func (k *syncView) step(w *syncWarp) bool {
	q := at[queueState](k.p.Queues, int(w.g))
	frozen := atomic.LoadUint32(&q.Frozen) != frozenNo
	switch w.phase {
	case syncIdle:
		if frozen || k.now >= k.until {
			return k.leave(w)
		}
		return k.begin(w, q)
	case syncIssue:
		return k.issue(w, q)
	}
	cmd := at[command](q.Commands, int(w.cid))
	if atomic.LoadUint32(&cmd.State)&cmdState == cmdDone {
		k.finish(w, q, cmd)
		return true
	}
	if !frozen {
		if w.due > k.now {
			return false
		}
		if atomic.CompareAndSwapUint32(&q.Frozen, frozenNo, frozenTimeout) {
			q.ScanAt = k.now // what was late is what recovery aborts
		}
	}
	if !atomic.CompareAndSwapUint32(&q.Reap, 0, 1) {
		return false
	}
	done := atomic.LoadUint32(&cmd.State)&cmdState == cmdDone
	atomic.StoreUint32(&q.Reap, 0)
	if done {
		k.finish(w, q, cmd)
		return true
	}
	return k.leave(w)
}

// leave ends a warp's work at its queue.
func (k *syncView) leave(w *syncWarp) bool {
	w.phase = syncGone
	if next := w.g + k.warps; next < k.p.NumQueues {
		w.g, w.phase = next, syncIdle
	}
	return true
}

// begin takes a CID and then a row.
func (k *syncView) begin(w *syncWarp, q *queueState) bool {
	from, lo, hi := shareOf(k.set, q.SSD, w.g%k.p.QueuesPerSSD, k.p.QueuesPerSSD)
	taken := at[uint32](k.set.Taken, int(w.g))
	if int64(atomic.LoadUint32(taken)) >= hi-lo {
		return k.leave(w)
	}
	cid, ok := q.claim()
	if !ok {
		return false
	}
	i := int64(atomic.AddUint32(taken, 1) - 1)
	if i >= hi-lo {
		atomic.OrUint32(&q.Free[cid/32], 1<<(cid&31))
		return k.leave(w)
	}
	cmd := k.fillUnit(q, k.set, k.p.Set, cid, uint32(from+lo+i), k.now)
	if cmd == nil {
		atomic.OrUint32(&q.Free[cid/32], 1<<(cid&31))
		atomic.AddUint32(at[uint32](k.set.Remaining, int(w.g)), ^uint32(0))
		return true
	}
	atomic.StoreUint32(&cmd.State, atomic.LoadUint32(&cmd.State)&cmdGen|cmdRetry)
	w.phase, w.again, w.cid, w.until = syncIssue, false, cid, k.now+q.TimeoutNS
	return k.issue(w, q)
}

// claim takes a free CID, among other warps that do.
func (q *queueState) claim() (cid uint32, ok bool) {
	for w := uint32(0); w*32 < q.NumCommands; w++ {
		for {
			free := atomic.LoadUint32(&q.Free[w])
			if free == 0 {
				break
			}
			if atomic.CompareAndSwapUint32(&q.Free[w], free, free&(free-1)) {
				return w*32 + uint32(bits.TrailingZeros32(free)), true
			}
		}
	}
	return 0, false
}

// issue writes the warp's command to the SQ. When it may not, the command waits for the host.
func (k *syncView) issue(w *syncWarp, q *queueState) bool {
	cmd := at[command](q.Commands, int(w.cid))
	if !atomic.CompareAndSwapUint32(&q.Own, ownFree, ownHeld) {
		if w.until > k.now {
			return false
		}
		if atomic.CompareAndSwapUint32(&q.Frozen, frozenNo, frozenTimeout) {
			q.ScanAt = k.now // what was late is what recovery aborts
		}
		atomic.OrUint32(&q.Retry[w.cid/32], 1<<(w.cid&31))
		return k.leave(w)
	}
	if atomic.LoadUint32(&q.Frozen) != frozenNo {
		q.unlock()
		atomic.OrUint32(&q.Retry[w.cid/32], 1<<(w.cid&31))
		return k.leave(w)
	}
	k.side.own(w.g, w.cid, k.block)
	w.due = k.now + q.TimeoutNS
	atomic.StoreInt64(&cmd.Deadline, w.due)
	q.store(w.cid, cmd)
	var c refillCounts
	k.ring(q, &c)
	count(&q.Issued, 1)
	count(&q.SQRings, c.rings)
	count(&q.BlocksRead, uint64(cmd.NLB)+1)
	switch {
	case w.again:
		count(&q.Retried, 1)
	case cmd.Dst == 0:
		count(&q.Direct, 1)
	default:
		count(&q.Staged, 1)
	}
	q.unlock()
	atomic.AddUint64(&k.set.Blocks, uint64(cmd.NLB)+1)
	if w.again {
		atomic.AddUint32(&k.set.Retries, 1)
	} else {
		atomic.AddUint64(&k.set.Issued, 1)
	}
	w.phase = syncOut
	return true
}

// unlock gives the submission side back. There is no complete kernel that could have left work.
func (q *queueState) unlock() {
	for !q.release() {
	}
}

// finish deals with the warp's own completion.
func (k *syncView) finish(w *syncWarp, q *queueState, cmd *command) {
	state := atomic.LoadUint32(&cmd.State)
	if status := nvme.Status(atomic.LoadInt64(&cmd.Deadline)); !status.OK() {
		// Recovery would issue it until it is issued.
		if q.refused(k.set, w.cid, cmd, state, status) {
			w.phase, w.again, w.until = syncIssue, true, k.now+q.TimeoutNS
			return
		}
	} else {
		if cmd.Dst != 0 {
			q.unstage(k.set, w.cid, cmd)
		}
		if k.h.sums != nil {
			k.takeCRCs(k.set, cmd)
		}
	}
	atomic.StoreUint32(&cmd.State, state&cmdGen|cmdFree)
	atomic.OrUint32(&q.Free[w.cid/32], 1<<(w.cid&31))
	atomic.AddUint32(at[uint32](k.set.Remaining, int(w.g)), ^uint32(0))
	w.phase = syncIdle
}

// reap takes completions off the queues that the block's warps wait for.
func (k *syncView) reap(warps []syncWarp) bool {
	any := false
	for i := range warps {
		if w := &warps[i]; w.phase == syncOut && (i == 0 || w.g != warps[i-1].g) {
			any = k.sweepMarks(at[queueState](k.p.Queues, int(w.g)), w.g) || any
		}
	}
	return any
}

// reapAll does so for all queues.
func (k *syncView) reapAll() {
	for g := range k.p.NumQueues {
		k.sweepMarks(at[queueState](k.p.Queues, int(g)), g)
	}
}

// sweepMarks takes up to 32 completions off a queue at a time and marks their commands.
func (k *syncView) sweepMarks(q *queueState, g uint32) bool {
	any := false
	for {
		// A look without the lock, which tells nothing for sure: the holder reaps, or somebody
		// else comes by later.
		if !q.news() || !atomic.CompareAndSwapUint32(&q.Reap, 0, 1) {
			return any
		}
		n := 0
		if atomic.LoadUint32(&q.Frozen) == frozenNo {
			n = k.sweepLocked(q, g)
		}
		atomic.StoreUint32(&q.Reap, 0)
		any = any || n > 0
		if n < warp {
			return any
		}
	}
}

// news reports whether the completion queue may have a new entry. Of a queue that is dead not even
// the memory is left; none dies while a warp is here.
func (q *queueState) news() bool {
	if atomic.LoadUint32(&q.Frozen) != frozenNo {
		return false
	}
	head, phase := atomic.LoadUint32(&q.Head), atomic.LoadUint32(&q.Phase)
	return q.completion(head)>>16&1 == phase
}

func (k *syncView) sweepLocked(q *queueState, g uint32) int {
	var done [warp]uint32 // CID and status
	n, foreign := 0, 0
	head, phase := q.Head, q.Phase
	for n < warp {
		last := q.completion(head)
		if last>>16&1 != phase {
			break
		}
		if head++; head == q.Entries {
			head = 0
			phase ^= 1
		}
		if cid := last & cidMask; cid >= q.NumCommands ||
			!answers(atomic.LoadUint32(&at[command](q.Commands, int(cid)).State), last) {
			foreign = 1
			atomic.CompareAndSwapUint32(&q.Frozen, frozenNo, frozenForeign)
			break
		}
		done[n] = last
		n++
	}
	if n+foreign == 0 {
		return 0
	}
	atomic.StoreUint32(&q.Head, head)
	atomic.StoreUint32(&q.Phase, phase)
	nvme.StoreDoorbell((*uint32)(pointer(q.CQDoorbell)), head)
	now := nanotime()
	errors := uint64(0)
	for _, last := range done[:n] {
		cid, status := last&cidMask, nvme.Status(last>>17)
		cmd := at[command](q.Commands, int(cid))
		state := atomic.LoadUint32(&cmd.State)
		if state&cmdState == cmdDone { // twice in one sweep
			n, foreign = n-1, foreign+1
			atomic.CompareAndSwapUint32(&q.Frozen, frozenNo, frozenForeign)
			continue
		}
		if status.OK() {
			at[Histogram](q.Hist, 0).Counts[histBucket(now-cmd.Start)]++
		} else {
			errors++
		}
		block := k.side.owner(g, cid)
		atomic.StoreInt64(&cmd.Deadline, int64(status))
		atomic.StoreUint32(&cmd.State, state&^cmdState|cmdDone)
		k.side.wake(block)
	}
	count(&q.Completed, uint64(n))
	count(&q.Foreign, uint64(foreign))
	count(&q.Errors, errors)
	count(&q.CQRings, 1)
	return n
}

// syncSide holds what blocks of read_sync on the host need to wait for one another.
type syncSide struct {
	blocks []syncPark
	owners []int32     // block that waits for a CID, maxCommands for each queue; atomic
	lead   atomic.Bool // held by the block that waits in the bus for all
}

// syncPark is one block's place to sleep, and its warps.
type syncPark struct {
	warps  []syncWarp
	parked atomic.Bool
	ch     chan struct{} // has room for the one send that follows parked → awake
	timer  *time.Timer
	d      time.Duration
	fn     func()
}

func (h *hostSide) initSync(blocks, queues int) {
	h.sync = &syncSide{blocks: make([]syncPark, blocks), owners: make([]int32, queues*maxCommands)}
}

func (s *syncSide) own(g, cid uint32, block int32) {
	atomic.StoreInt32(&s.owners[g*maxCommands+cid], block)
}

func (s *syncSide) owner(g, cid uint32) int32 {
	return atomic.LoadInt32(&s.owners[g*maxCommands+cid])
}

// wake ends a block's sleep.
func (s *syncSide) wake(block int32) bool {
	p := &s.blocks[block]
	if p.parked.Load() && p.parked.CompareAndSwap(true, false) {
		p.ch <- struct{}{}
		return true
	}
	return false
}

// handOff wakes a sleeper, which then waits for all. A block that ends calls it, so that there is
// always one awake, or in the bus, while others sleep.
func (s *syncSide) handOff() {
	for i := range s.blocks {
		if s.wake(int32(i)) {
			return
		}
	}
}

// wait leaves the SM slot until the block's warps may go on: in the bus, for all, when nobody else
// is there, else until one of its commands is marked.
func (k *syncView) wait(b *cuda.Block, me *syncPark) {
	d := time.Duration(maxPark)
	for i := range me.warps {
		w := &me.warps[i]
		switch w.phase {
		case syncOut:
			cmd := at[command](at[queueState](k.p.Queues, int(w.g)).Commands, int(w.cid))
			if atomic.LoadUint32(&cmd.State)&cmdState == cmdDone {
				return
			}
			d = min(d, time.Duration(w.due-nanotime()))
		case syncIssue: // for a lock that is held for a moment
			b.Yield()
			return
		}
	}
	if d <= 0 {
		return
	}
	if k.side.lead.CompareAndSwap(false, true) {
		k.h.waitAt(b, 0, d)
		k.reapAll()
		k.side.lead.Store(false)
		return
	}
	if me.fn == nil {
		me.init()
	}
	me.d = d
	me.parked.Store(true)
	// Once more: what was marked, or who stopped waiting for all, before it was seen.
	stay := !k.side.lead.Load()
	for i := range me.warps {
		if w := &me.warps[i]; w.phase == syncOut {
			q := at[queueState](k.p.Queues, int(w.g))
			stay = stay ||
				atomic.LoadUint32(&at[command](q.Commands, int(w.cid)).State)&cmdState == cmdDone ||
				atomic.LoadUint32(&q.Frozen) != frozenNo
		}
	}
	if stay {
		if !me.parked.CompareAndSwap(true, false) {
			<-me.ch
		}
		b.Yield()
		return
	}
	b.Park(me.fn)
}

func (p *syncPark) init() {
	p.ch = make(chan struct{}, 1)
	p.timer = time.NewTimer(time.Hour)
	p.timer.Stop()
	p.fn = func() {
		p.timer.Reset(p.d)
		select {
		case <-p.ch:
		case <-p.timer.C:
			if !p.parked.CompareAndSwap(true, false) {
				<-p.ch
			}
		}
		p.timer.Stop()
	}
}
