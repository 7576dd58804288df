package gpuio

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
	"helios/nvme"
)

// Kernel "submit": hands the rows of one read set to the queue pairs.
//
// A block owns a contiguous range of queue pairs for the launch. For each it appends its share of
// the SSD's bucket to the queue's pending list, takes the submission side and refills the queue
// from the list. What does not fit stays in the list: the warp that completes the queue refills
// it, so nothing here waits for a completion. When the submission side is taken, by a complete
// kernel that refills at this moment, the holder is told to look again (queueState.take).
//
// Memory order, as on a GPU with system scope: SQEs, fence, doorbell. Stores of the pending list
// are released by PendTail.
//
// Traffic: 12 bytes read per row, 64 written per SQE and 64 per command entry.
func init() {
	cuda.RegisterHost("submit", submitKernel)
	cuda.RegisterHost("complete", completeKernel)
}

func submitKernel(b *cuda.Block, p *submitParams) error {
	h, err := hostSideOf(p.Engine)
	if err != nil {
		return err
	}
	k := kernelView{h: h, sets: p.Sets}
	set := at[setState](p.Sets, int(p.Set))
	atomic.CompareAndSwapInt64(&set.StartNS, 0, nanotime())
	lo, hi := b.Range(int64(p.NumQueues))
	for g := uint32(lo); g < uint32(hi); g++ {
		q := at[queueState](p.Queues, int(g))
		from := *at[int64](set.Offsets, int(q.SSD))
		to := *at[int64](set.Offsets, int(q.SSD)+1)
		first, last := share(to-from, g%p.QueuesPerSSD, p.QueuesPerSSD, set.Rotate)
		if first == last {
			continue
		}
		tail := atomic.LoadUint32(&q.PendTail)
		q.Pend[p.Set] = segment{Next: from + first, End: from + last}
		q.PendRing[tail%maxSets] = p.Set
		atomic.StoreUint32(&q.PendTail, tail+1)
		k.serve(q, g)
	}
	maxInt64(&set.SubmitNS, nanotime())
	return nil
}

// kernelView is what both kernels need besides a queue.
type kernelView struct {
	h          *hostSide
	sets       cuda.DevicePtr
	completing bool
	// deferred: the host does this for kernels of another device, whose row lists it cannot read.
	// What it would issue waits for the next complete kernel.
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
			state := atomic.LoadUint32(&cmd.State)&^(cmdState|cmdAborted) + cmdAttempt | cmdInFlight
			atomic.StoreInt64(&cmd.Deadline, now+q.TimeoutNS)
			atomic.StoreUint32(&cmd.State, state)
			q.store(cid, cmd)
			atomic.AddUint32(&at[setState](k.sets, int(cmd.Set)).Retries, 1)
			c.retried++
			c.unrung++
		}
	}
	for head != atomic.LoadUint32(&q.PendTail) {
		slot := q.PendRing[head%maxSets]
		seg := &q.Pend[slot]
		w, mask := q.acquire(words, uint32(min(seg.End-seg.Next, warp)))
		if mask == 0 {
			break
		}
		set := at[setState](k.sets, int(slot))
		unused, dropped, n := k.build(q, set, slot, w, mask, seg.Next, now, &c)
		seg.Next += int64(bits.OnesCount32(mask))
		if seg.Next == seg.End {
			// The list lets go of the set before its last commands become visible, since the
			// host may reuse the slot as soon as these complete.
			head++
			q.PendHead = head
		}
		if unused != 0 {
			atomic.OrUint32(&q.Free[w], unused)
		}
		atomic.AddUint64(&set.Issued, uint64(n))
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
}

type refillCounts struct {
	direct, staged, retried, rings uint64
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

// build is the warp's work: each lane makes one command of the row at its position. Rows that
// cannot be read are recorded; their CIDs come back as unused.
func (k kernelView) build(q *queueState, set *setState, slot, w, mask uint32, from, now int64, c *refillCounts) (unused, dropped uint32, issued int) {
	for ; mask != 0; mask &= mask - 1 {
		cid := w*32 + uint32(bits.TrailingZeros32(mask))
		cmd := k.fill(q, set, slot, cid, from, now)
		from++
		if cmd == nil {
			unused |= 1 << (cid & 31)
			dropped++
			continue
		}
		atomic.StoreInt64(&cmd.Deadline, now+q.TimeoutNS)
		atomic.StoreUint32(&cmd.State, cmdAttempt|cmdInFlight)
		q.store(cid, cmd)
		c.unrung++
		issued++
	}
	if set.Direct != 0 {
		c.direct += uint64(issued)
	} else {
		c.staged += uint64(issued)
	}
	return unused, dropped, issued
}

// fill makes a command of the set's row at index i. nil: the row cannot be read, which is recorded.
func (k kernelView) fill(q *queueState, set *setState, slot, cid uint32, i, now int64) *command {
	l := &set.Layout
	rowBytes := int64(l.RowBytes)
	n := int64(l.SSDs)
	row := *(*int64)(unsafe.Add(unsafe.Pointer(at[int64](set.Rows, 0)), i*8))
	off := int64(*(*uint32)(unsafe.Add(unsafe.Pointer(at[uint32](set.Pos, 0)), i*4))) * set.DstStride
	slotNo := row / n
	bad := uint16(0)
	where := uint64(0)
	if row < 0 || row >= l.Rows || uint32(row-slotNo*n) != q.SSD {
		bad = failRow
	} else if off > set.DstLimit-rowBytes {
		bad, where = failPos, uint64(off/set.DstStride)
	}
	if bad != 0 {
		set.fail(failRecord{Index: uint32(i), Kind: bad, QID: uint16(q.QID), LBA: where, SSD: q.SSD, Row: row})
		return nil
	}
	cmd := at[command](q.Commands, int(cid))
	cmd.Set, cmd.NLB, cmd.Index = uint16(slot), uint16(q.Blocks-1), uint32(i)
	if l.RowsPerLBA > 1 {
		lba := slotNo / int64(l.RowsPerLBA)
		cmd.LBA = q.DataStart + uint64(lba)
		cmd.ByteOffset = uint32(slotNo-lba*int64(l.RowsPerLBA)) * uint32(rowBytes)
	} else {
		cmd.LBA = q.DataStart + uint64(slotNo*int64(l.LBAsPerRow))
		cmd.ByteOffset = 0
	}
	if set.Direct != 0 {
		cmd.Dst = 0
		q.prp(cmd, cid, *at[uint64](set.DstIOVA, int(q.SSD))+uint64(off))
	} else {
		cmd.Dst = set.Dst + cuda.DevicePtr(off)
		q.prp(cmd, cid, q.StageIOVA+uint64(cid)*uint64(q.StageBytes))
	}
	cmd.Start = now
	return cmd
}

// prp points a command at ReadBytes contiguous bytes from a (base specification 2.0, 4.1.1): only
// the first entry may have an offset, a second page goes to PRP2, more pages to the CID's list.
func (q *queueState) prp(cmd *command, cid uint32, a uint64) {
	page := uint64(q.PageBytes)
	total := uint64(q.ReadBytes)
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

// store writes a command's SQE at the tail, in 16-byte pieces. There is always room: a CID is in
// use from here until its completion, and there are fewer CIDs than slots.
func (q *queueState) store(cid uint32, cmd *command) {
	*at[nvme.Command](q.SQ, int(q.Tail)) = nvme.Command{
		Opcode: nvme.OpRead, CID: uint16(cid), NSID: q.NSID, PRP1: cmd.PRP1, PRP2: cmd.PRP2,
		CDW10: uint32(cmd.LBA), CDW11: uint32(cmd.LBA >> 32), CDW12: uint32(cmd.NLB),
	}
	if q.Tail++; q.Tail == q.Entries {
		q.Tail = 0
	}
}

// ring makes the entries so far visible to the SSD.
func (k kernelView) ring(q *queueState, c *refillCounts) {
	nvme.StoreDoorbell((*uint32)(pointer(q.SQDoorbell)), q.Tail)
	k.h.kick(q.SSD, uint16(q.QID))
	c.rings++
	c.unrung = 0
}

// fail records a failed row of the set; the caller takes it out of Remaining afterwards.
func (s *setState) fail(r failRecord) {
	if n := atomic.AddUint32(&s.NumFails, 1); n <= maxFails {
		s.Fails[n-1] = r
	}
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
