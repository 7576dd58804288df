package gpuio

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
	"helios/nvme"
)

// Kernel "submit": hands the units of one read set to the queue pairs.
//
// A block owns a contiguous range of queue pairs for the launch. For each it appends its share of
// the SSD's units to the queue's pending list, takes the submission side and refills the queue
// from the list. The rest stays in the list: the warp that completes the queue refills
// it, so nothing here waits for a completion. When the submission side is taken, by a complete
// kernel that refills at this moment, the holder is told to look again (queueState.take).
//
// Memory order, as on a GPU with system scope: SQEs, fence, doorbell. Stores of the pending list
// are released by PendTail.
//
// Traffic: 12 bytes read per row (20 of a coalesced set), 64 written per SQE and 64 per command
// entry, and 8 per page of a PRP list.
func init() {
	cuda.RegisterHost("submit", submitKernel)
	cuda.RegisterHost("complete", completeKernel)
}

func submitKernel(b *cuda.Block, p *submitParams) error {
	h, err := hostSideOf(p.Engine)
	if err != nil {
		return err
	}
	k := kernelView{h: h, caller: b, sets: p.Sets}
	set := at[setState](p.Sets, int(p.Set))
	atomic.CompareAndSwapInt64(&set.StartNS, 0, nanotime())
	lo, hi := b.Range(int64(p.NumQueues))
	for g := uint32(lo); g < uint32(hi); g++ {
		q := at[queueState](p.Queues, int(g))
		from, first, last := shareOf(set, q.SSD, g%p.QueuesPerSSD, p.QueuesPerSSD)
		if first == last {
			continue
		}
		tail := atomic.LoadUint32(&q.PendTail)
		q.Pend[tail%maxSets] = segment{Next: from + first, End: from + last}
		q.PendRing[tail%maxSets] = p.Set
		atomic.StoreUint32(&q.PendTail, tail+1)
		k.serve(q, g)
	}
	maxInt64(&set.SubmitNS, nanotime())
	return nil
}

// kernelView holds what both kernels need besides a queue.
type kernelView struct {
	h          *hostSide
	caller     *cuda.Block // nil: the host
	sets       cuda.DevicePtr
	completing bool
	// deferred: the host does this for kernels of another device, whose row lists it cannot read.
	// Its commands wait for the next complete kernel.
	deferred bool
}

// serve refills a queue, or leaves that to whoever holds its submission side.
func (k kernelView) serve(q *queueState, g uint32) {
	if !q.take() {
		return
	}
	for {
		k.refill(q, g)
		if q.release() {
			return
		}
	}
}

// refill issues commands until the CIDs or the work run out: first those to be tried again, then
// the pending list. The caller holds the submission side.
func (k kernelView) refill(q *queueState, g uint32) {
	if k.deferred || atomic.LoadUint32(&q.Frozen) != frozenNo {
		return
	}
	var c refillCounts
	head := q.PendHead
	words := (q.NumCommands + 31) / 32
	now := nanotime()
	for w := uint32(0); w < words; w++ {
		m := atomic.LoadUint32(&q.Retry[w])
		if m == 0 {
			continue
		}
		atomic.AndUint32(&q.Retry[w], ^m)
		for ; m != 0; m &= m - 1 {
			cid := w*32 + uint32(bits.TrailingZeros32(m))
			cmd := at[command](q.Commands, int(cid))
			atomic.StoreInt64(&cmd.Deadline, now+q.TimeoutNS)
			q.store(cid, cmd)
			set := at[setState](k.sets, int(cmd.Set))
			atomic.AddUint32(&set.Retries, 1)
			atomic.AddUint64(&set.Blocks, uint64(cmd.NLB)+1)
			c.retried++
			c.blocks += uint64(cmd.NLB) + 1
			c.unrung++
		}
	}
	for head != atomic.LoadUint32(&q.PendTail) {
		slot := q.PendRing[head%maxSets]
		seg := &q.Pend[head%maxSets]
		w, mask := q.acquire(words, uint32(min(seg.End-seg.Next, warp)))
		if mask == 0 {
			break
		}
		set := at[setState](k.sets, int(slot))
		unused, dropped, n, blocks := k.build(q, set, slot, w, mask, seg.Next, now, &c)
		seg.Next += int64(bits.OnesCount32(mask))
		if seg.Next == seg.End {
			// The list drops the set before its last commands become visible, since the
			// host may reuse the slot as soon as these complete.
			head++
			q.PendHead = head
		}
		if unused != 0 {
			atomic.OrUint32(&q.Free[w], unused)
		}
		atomic.AddUint64(&set.Issued, uint64(n))
		atomic.AddUint64(&set.Blocks, blocks)
		if dropped != 0 {
			atomic.AddUint32(at[uint32](set.Remaining, int(g)), -dropped)
		}
		if c.unrung >= ringEvery {
			k.ring(q, &c)
		}
	}
	if c.unrung > 0 {
		k.ring(q, &c)
	}
	count(&q.Issued, c.direct+c.staged+c.retried)
	if k.completing {
		count(&q.Pended, c.direct+c.staged)
	}
	count(&q.Direct, c.direct)
	count(&q.Staged, c.staged)
	count(&q.Retried, c.retried)
	count(&q.SQRings, c.rings)
	count(&q.BlocksRead, c.blocks)
	count(&q.Coalesced, c.coalesced)
}

type refillCounts struct {
	direct, staged, retried, rings uint64
	blocks, coalesced              uint64
	unrung                         uint32
}

// acquire takes up to n free CIDs of one bitmap word. Only the holder of the submission side
// takes bits; completers only give them back.
func (q *queueState) acquire(words, n uint32) (w, mask uint32) {
	for i := uint32(0); i < words; i++ {
		w = q.Scan
		if free := atomic.LoadUint32(&q.Free[w]); free != 0 {
			for ; n > 0 && free != 0; n-- {
				bit := free & -free
				mask |= bit
				free ^= bit
			}
			atomic.AndUint32(&q.Free[w], ^mask)
			return w, mask
		}
		if q.Scan++; q.Scan >= words {
			q.Scan = 0
		}
	}
	return 0, 0
}

// build is the warp's work: each lane makes the command of the unit at its position. Units that
// cannot be read are recorded; their CIDs come back as unused. blocks are the commands' LBAs.
func (k kernelView) build(q *queueState, set *setState, slot, w, mask uint32, from, now int64,
	c *refillCounts) (unused, dropped uint32, issued int, blocks uint64) {
	plain := set.Order == 0 && set.PartBlocks == 0
	for ; mask != 0; mask &= mask - 1 {
		cid := w*32 + uint32(bits.TrailingZeros32(mask))
		var cmd *command
		if plain {
			cmd = k.fill(q, set, slot, cid, uint32(from), from, now)
		} else if cmd = k.fillUnit(q, set, slot, cid, uint32(from), now); cmd != nil {
			blocks += uint64(cmd.NLB) + 1
			c.countUnit(set, cmd)
		}
		from++
		if cmd == nil {
			unused |= 1 << (cid & 31)
			dropped++
			continue
		}
		atomic.StoreInt64(&cmd.Deadline, now+q.TimeoutNS)
		q.store(cid, cmd)
		c.unrung++
		issued++
	}
	if plain {
		blocks = uint64(issued) * uint64(set.Layout.LBAsPerRow)
		if set.Direct != 0 {
			c.direct += uint64(issued)
		} else {
			c.staged += uint64(issued)
		}
	}
	c.blocks += blocks
	return unused, dropped, issued, blocks
}

// countUnit counts a unit's command by where its data goes, and the rows that share it.
func (c *refillCounts) countUnit(set *setState, cmd *command) {
	if cmd.Dst == 0 {
		c.direct++
	} else {
		c.staged++
	}
	if set.Order != 0 {
		if n := *at[uint32](set.Runs, int(cmd.Index)+1) - *at[uint32](set.Runs,
			int(cmd.Index)); n > 1 {
			c.coalesced += uint64(n)
		}
	}
}

// rowAt looks at the row at index i of Rows: its slot and its place in the destination. bad: why it
// cannot be read (failRow, failPos), or 0.
func (s *setState) rowAt(i int64, ssd uint32) (slot, off int64, bad uint16) {
	row, n := *(*int64)(pointer(s.Rows + cuda.DevicePtr(i*8))), int64(s.Layout.SSDs)
	off = int64(*(*uint32)(pointer(s.Pos + cuda.DevicePtr(i*4)))) * s.DstStride
	slot = row / n
	if uint64(row) >= uint64(s.Layout.Rows) || row-slot*n != int64(ssd) {
		bad = failRow
	} else if off > s.DstLimit-int64(s.Layout.RowBytes) {
		bad = failPos
	}
	return slot, off, bad
}

// place shows where a slot begins: its first LBA, counted from DataStart, and the byte in it.
func (l *Layout) place(slot int64) (lba uint64, offset uint32) {
	if l.RowsPerLBA > 1 {
		off := slot / int64(l.RowsPerLBA)
		return uint64(off), uint32(slot-off*int64(l.RowsPerLBA)) * uint32(l.RowBytes)
	}
	return uint64(slot * int64(l.LBAsPerRow)), 0
}

// refuse records that a unit's row cannot be read.
func (k kernelView) refuse(q *queueState, set *setState, unit uint32, off int64, bad uint16) {
	where := uint64(0)
	if bad == failPos {
		where = uint64(off / set.DstStride)
	}
	set.failUnit(unit, failRecord{Kind: bad, QID: uint16(q.QID), LBA: where, SSD: q.SSD})
}

// fill makes a unit's command, which reads the whole row at index i of the set, its only one. nil:
// the row cannot be read, which is recorded.
func (k kernelView) fill(q *queueState, set *setState, slot, cid, unit uint32, i,
	now int64) *command {
	rowSlot, off, bad := set.rowAt(i, q.SSD)
	if bad != 0 {
		k.refuse(q, set, unit, off, bad)
		return nil
	}
	l := &set.Layout
	lba, offset := l.place(rowSlot)
	cmd := at[command](q.Commands, int(cid))
	cmd.Set, cmd.NLB, cmd.Index = uint16(slot), uint16(l.LBAsPerRow-1), unit
	cmd.Place = placed(q.DataStart+lba, offset)
	a, dst := q.target(set, cid, off)
	cmd.Dst = dst
	q.prp(cmd, cid, a, uint64(l.LBAsPerRow)*uint64(l.LBABytes))
	cmd.Start = now
	return cmd
}

// target shows where the SSD writes the data that belongs to off in the destination, and Dst of its
// command: the place itself, or the CID's staging slot.
func (q *queueState) target(set *setState, cid uint32, off int64) (a uint64, dst cuda.DevicePtr) {
	if set.Direct != 0 {
		return *at[uint64](set.DstIOVA, int(q.SSD)) + uint64(off), 0
	}
	return q.slotIOVA(cid), set.Dst + cuda.DevicePtr(off)
}

// fillUnit makes the command of a unit of any set. nil: the unit cannot be read, which is recorded.
func (k kernelView) fillUnit(q *queueState, set *setState, slot, cid, unit uint32,
	now int64) *command {
	switch {
	case set.Order != 0:
		lo, hi := *at[uint32](set.Runs, int(unit)), *at[uint32](set.Runs, int(unit)+1)
		if hi-lo == 1 { // invalid rows are alone, too
			return k.fill(q, set, slot, cid, unit, int64(*at[uint32](set.Order, int(lo))), now)
		}
		return k.fillRun(q, set, slot, cid, unit, lo, hi, now)
	case set.PartBlocks != 0:
		return k.fillPart(q, set, slot, cid, unit, now)
	}
	return k.fill(q, set, slot, cid, unit, int64(unit), now)
}

// fillPart makes the command of one part of a row.
func (k kernelView) fillPart(q *queueState, set *setState, slot, cid, unit uint32,
	now int64) *command {
	rowSlot, off, bad := set.rowAt(int64(unit/set.Parts), q.SSD)
	if bad != 0 {
		k.refuse(q, set, unit, off, bad)
		return nil
	}
	l := &set.Layout
	skip := unit % set.Parts * set.PartBlocks
	blocks := min(set.PartBlocks, uint32(l.LBAsPerRow)-skip)
	lba, _ := l.place(rowSlot)
	cmd := at[command](q.Commands, int(cid))
	cmd.Set, cmd.NLB, cmd.Index = uint16(slot), uint16(blocks-1), unit
	cmd.Place = placed(q.DataStart+lba+uint64(skip), 0)
	a, dst := q.target(set, cid, off+int64(skip)*int64(l.LBABytes))
	cmd.Dst = dst
	q.prp(cmd, cid, a, uint64(blocks)*uint64(l.LBABytes))
	cmd.Start = now
	return cmd
}

// fillRun makes the command of a run of two or more rows, Order[lo:hi], all of which can be read.
// It covers the LBAs from the first row's first to the last row's last. When the set is Direct, no
// two of the rows are the same, rows are whole pages (so no smaller than maxReach, and without
// gaps) and each begins on a page of its destination, the PRP entries name the rows' own pages.
// Else the data goes to the CID's staging slot, and completion copies each row.
func (k kernelView) fillRun(q *queueState, set *setState, slot, cid, unit, lo, hi uint32,
	now int64) *command {
	l := &set.Layout
	firstSlot, off, _ := set.rowAt(int64(*at[uint32](set.Order, int(lo))), q.SSD)
	lastSlot, _, _ := set.rowAt(int64(*at[uint32](set.Order, int(hi-1))), q.SSD)
	first, offset := l.place(firstSlot)
	last, _ := l.place(lastSlot)
	blocks := last - first + uint64(l.LBAsPerRow)
	cmd := at[command](q.Commands, int(cid))
	cmd.Set, cmd.NLB, cmd.Index = uint16(slot), uint16(blocks-1), unit
	cmd.Place = placed(q.DataStart+first, offset)
	if set.Direct != 0 && uint64(hi-lo)*uint64(l.LBAsPerRow) == blocks &&
		k.scatter(q, set, cmd, cid, lo, hi) {
		cmd.Dst = 0
	} else {
		cmd.Dst = set.Dst + cuda.DevicePtr(off)
		q.prp(cmd, cid, q.slotIOVA(cid), blocks*uint64(l.LBABytes))
	}
	cmd.Start = now
	return cmd
}

// scatter has the PRP entries of a run name the pages of each row's own place. False, and nothing
// is changed: rows are not made of whole pages of the destination.
func (k kernelView) scatter(q *queueState, set *setState, cmd *command, cid, lo, hi uint32) bool {
	page, rowBytes := uint64(q.PageBytes), uint64(set.Layout.RowBytes)
	if rowBytes&(page-1) != 0 {
		return false
	}
	base := *at[uint64](set.DstIOVA, int(q.SSD))
	place := func(o uint32) uint64 {
		i := *at[uint32](set.Order, int(o))
		return base + uint64(int64(*at[uint32](set.Pos, int(i)))*set.DstStride)
	}
	for o := lo; o < hi; o++ {
		if place(o)&(page-1) != 0 {
			return false
		}
	}
	// The first page is PRP1. A second and last one is PRP2, more are in the CID's list.
	cmd.PRP1 = place(lo)
	if uint64(hi-lo)*rowBytes == 2*page { // there are two rows at least
		cmd.PRP2 = place(lo + 1)
		return true
	}
	list := at[uint64](q.Lists+cuda.DevicePtr(cid)*cuda.DevicePtr(q.ListBytes), 0)
	cmd.PRP2 = q.ListsIOVA + uint64(cid)*uint64(q.ListBytes)
	n, skip := 0, page
	for o := lo; o < hi; o++ {
		for a := place(o); skip < rowBytes; skip += page {
			*(*uint64)(unsafe.Add(unsafe.Pointer(list), n*8)) = a + skip
			n++
		}
		skip = 0
	}
	return true
}

// slotIOVA is a CID's staging slot as the SSD sees it.
func (q *queueState) slotIOVA(cid uint32) uint64 {
	return q.StageIOVA + uint64(cid)*uint64(q.StageBytes)
}

// prp points a command at total contiguous bytes from a (base specification 2.0, 4.1.1): only the
// first entry may have an offset, a second page goes to PRP2, more pages to the CID's list.
func (q *queueState) prp(cmd *command, cid uint32, a, total uint64) {
	page := uint64(q.PageBytes)
	first := page - a&(page-1)
	cmd.PRP1, cmd.PRP2 = a, 0
	switch {
	case total <= first:
	case total <= first+page:
		cmd.PRP2 = a + first
	default:
		list := at[uint64](q.Lists+cuda.DevicePtr(cid)*cuda.DevicePtr(q.ListBytes), 0)
		cmd.PRP2 = q.ListsIOVA + uint64(cid)*uint64(q.ListBytes)
		for i, done := 0, first; done < total; i, done = i+1, done+page {
			*(*uint64)(unsafe.Add(unsafe.Pointer(list), i*8)) = a + done
		}
	}
}

// store puts a command in flight and writes its SQE at the tail, in 16-byte pieces. There is always
// room: a CID is in use from here until its completion, and there are fewer CIDs than slots.
func (q *queueState) store(cid uint32, cmd *command) {
	state := issued(atomic.LoadUint32(&cmd.State))
	atomic.StoreUint32(&cmd.State, state)
	*at[nvme.Command](q.SQ, int(q.Tail)) = nvme.Command{
		Opcode: nvme.OpRead, CID: wireCID(cid, state), NSID: q.NSID, PRP1: cmd.PRP1, PRP2: cmd.PRP2,
		CDW10: uint32(cmd.lba()), CDW11: uint32(cmd.lba() >> 32), CDW12: uint32(cmd.NLB),
	}
	if q.Tail++; q.Tail == q.Entries {
		q.Tail = 0
	}
}

// ring makes the entries so far visible to the SSD.
func (k kernelView) ring(q *queueState, c *refillCounts) {
	nvme.StoreDoorbell((*uint32)(pointer(q.SQDoorbell)), q.Tail)
	k.caller.Pause() // the controller's work
	k.h.kick(q.SSD, uint16(q.QID))
	k.caller.Resume()
	c.rings++
	c.unrung = 0
}

// maxInt64 raises *p to v.
func maxInt64(p *int64, v int64) {
	for {
		old := atomic.LoadInt64(p)
		if v <= old || atomic.CompareAndSwapInt64(p, old, v) {
			return
		}
	}
}
