package gpuio

import (
	"math"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/nvme"
)

// Kernel "complete": reaps the queue pairs until all units of one read set are done.
//
// A block owns a contiguous range of queue pairs. It looks at 32 completion entries at once,
// retires the contiguous new ones whatever set they belong to (CID → command, whole status, copy
// of staged rows), rings the CQ doorbell once, gives the CIDs back and refills the queue from its
// pending list. A command whose status allows it is issued again under its own CID.
//
// A completion is not data until its CID and generation matched and its status was good. A command
// past its deadline, or a completion for none that is in flight, freezes its queue: no kernel
// touches it again before the host has recovered it (recover.go), the CIDs and destinations of its
// commands stay taken, and the block returns when only frozen queues are left.
//
// The first look at a queue also issues what waits there, such as what the host has left after a
// recovery.
//
// On the host device a block that finds nothing waits in the bus (hostSide.wait), outside its SM
// slot. On a GPU it polls until the launch's deadline.
//
// Traffic: 16 bytes read per CQE, 64 per command entry; staged rows twice their size.
func completeKernel(b *cuda.Block, p *completeParams) error {
	h, err := hostSideOf(p.Engine)
	if err != nil {
		return err
	}
	k := kernelView{h: h, caller: b, sets: p.Sets, completing: true}
	set := at[setState](p.Sets, int(p.Set))
	lo, hi := b.Range(int64(p.NumQueues))
	until := nanotime() + p.LimitNS
	// Before a block parks it may let the controllers work in its own slot. That pays where they
	// finish reads at once (memory) and costs a system call where they do not (files), so it is
	// done as long as it helps, and tried again now and then.
	tried, skip := false, 0
	for first := true; ; first = false {
		progress, busy, inFlight := k.reapQueues(p, set, uint32(lo), uint32(hi), first)
		// The next set's complete kernel starts only when all blocks of this one are done. A
		// block that is done early keeps its queues going meanwhile, if they have commands of
		// later sets; it looks often enough not to hold the others up.
		linger := !busy && inFlight && waits(p, set, uint32(lo), uint32(hi))
		now := nanotime()
		done := !busy && !linger
		if !done && !progress && now >= until {
			k.deadlines(p.Queues, uint32(lo), uint32(hi))
		}
		if done || now >= until {
			maxInt64(&set.DoneNS, now)
			return nil
		}
		switch {
		case progress:
			tried = false
		case !tried && skip == 0:
			tried = true
			h.wait(b, 0)
		default:
			if tried {
				skip = pollSkip
			} else {
				skip--
			}
			tried = false
			d := k.deadlines(p.Queues, uint32(lo), uint32(hi))
			if linger {
				d = min(d, maxLinger)
			}
			d = min(d, time.Duration(max(until-nanotime(), 1)))
			if d > 0 {
				h.wait(b, d)
			}
		}
	}
}

// reapQueues looks once at the block's queues. progress: there were completions; busy: units of the
// set are left; inFlight: commands are, of whatever set.
func (k kernelView) reapQueues(p *completeParams, set *setState, lo, hi uint32,
	first bool) (progress, busy, inFlight bool) {
	for g := lo; g < hi; g++ {
		q := at[queueState](p.Queues, int(g))
		if atomic.LoadUint32(&q.Frozen) != frozenNo {
			continue
		}
		for sweeps := 1; ; sweeps++ {
			n := k.look(q, g)
			progress = progress || n > 0
			if n > 0 || first {
				k.serve(q, g)
			}
			if n < warp || sweeps == maxSweeps || atomic.LoadUint32(&q.Frozen) != frozenNo {
				break
			}
		}
		if atomic.LoadUint32(&q.Frozen) != frozenNo {
			continue
		}
		if atomic.LoadUint32(at[uint32](set.Remaining, int(g))) != 0 {
			busy = true
		}
		inFlight = inFlight || q.inFlight() != 0
	}
	return progress, busy, inFlight
}

// pollSkip counts the waits that go straight to parking after one that found nothing to do.
const pollSkip = 31

// maxLinger bounds the waits of a block that is done with its share of the set.
const maxLinger = 200 * time.Microsecond

// waits reports whether the set has rows left at queues outside lo..hi that their block can finish.
func waits(p *completeParams, set *setState, lo, hi uint32) bool {
	for g := uint32(0); g < p.NumQueues; g++ {
		if g == lo {
			g = hi
			if g >= p.NumQueues {
				break
			}
		}
		if atomic.LoadUint32(at[uint32](set.Remaining, int(g))) != 0 &&
			atomic.LoadUint32(&at[queueState](p.Queues, int(g)).Frozen) == frozenNo {
			return true
		}
	}
	return false
}

// maxPark bounds one wait, so that a lost wake-up costs time and not the run.
const maxPark = 100 * time.Millisecond

// sweep retires up to 32 contiguous new completions and returns their number.
func (k kernelView) sweep(q *queueState, g uint32) int {
	var now int64
	var freed, again [warp]uint16
	var done uint32
	var doneSet *setState // completions mostly come in runs of one set
	errors := uint64(0)
	n, nfreed, nagain, foreign := 0, 0, 0, 0
	for n < warp {
		last := q.completion(q.Head)
		if last>>16&1 != q.Phase {
			break
		}
		if n == 0 {
			now = nanotime()
		}
		n++
		q.advance()
		cid := last & cidMask
		var cmd *command
		state := uint32(cmdFree)
		if cid < q.NumCommands {
			cmd = at[command](q.Commands, int(cid))
			state = atomic.LoadUint32(&cmd.State)
		}
		if !answers(state, last) {
			foreign = 1
			break
		}
		set := at[setState](k.sets, int(cmd.Set))
		if status := nvme.Status(last >> 17); !status.OK() {
			errors++
			if q.refused(set, cid, cmd, state, status) {
				again[nagain] = uint16(cid)
				nagain++
				continue
			}
		} else {
			if cmd.Dst != 0 {
				q.unstage(set, cid, cmd)
			}
			if k.h.sums != nil {
				k.takeCRCs(set, cmd)
			}
			at[Histogram](q.Hist, 0).Counts[histBucket(now-cmd.Start)]++
		}
		atomic.StoreUint32(&cmd.State, state&cmdGen|cmdFree)
		if set != doneSet {
			if done > 0 {
				atomic.AddUint32(at[uint32](doneSet.Remaining, int(g)), -done)
			}
			doneSet, done = set, 0
		}
		done++
		freed[nfreed] = uint16(cid)
		nfreed++
	}
	if n == 0 {
		return 0
	}
	nvme.StoreDoorbell((*uint32)(pointer(q.CQDoorbell)), q.Head)
	// CIDs and retries go back only now: a command issued before this doorbell could find the CQ
	// full.
	q.giveBack(freed[:nfreed], again[:nagain])
	if done > 0 {
		atomic.AddUint32(at[uint32](doneSet.Remaining, int(g)), -done)
	}
	q.tally(n, foreign, errors)
	return n
}

// completion returns the last dword of an entry of the completion queue. The dword has the phase
// tag and was written last, so the entry is whole when it is new.
func (q *queueState) completion(head uint32) uint32 {
	cqe := at[nvme.Completion](q.CQ, int(head))
	return atomic.LoadUint32((*uint32)(unsafe.Add(unsafe.Pointer(cqe), 12)))
}

// advance goes past that entry.
func (q *queueState) advance() {
	if q.Head++; q.Head == q.Entries {
		q.Head = 0
		q.Phase ^= 1
	}
}

// tally counts a sweep of n entries, and freezes a queue with an entry that answers no command.
func (q *queueState) tally(n, foreign int, errors uint64) {
	count(&q.Completed, uint64(n-foreign))
	count(&q.Foreign, uint64(foreign))
	count(&q.Errors, errors)
	count(&q.CQRings, 1)
	if foreign != 0 {
		// Last, since the host may recover the queue from here on. A queue that the host froze
		// stays frozen.
		atomic.CompareAndSwapUint32(&q.Frozen, frozenNo, frozenForeign)
	}
}

// refused deals with a command that completed with an error: true, and it is marked to be issued
// again, where it may be; else its rows are recorded as failed.
func (q *queueState) refused(set *setState, cid uint32, cmd *command, state uint32,
	status nvme.Status) bool {
	tries := state / cmdAttempt
	if !status.DNR() && tries <= q.Retries {
		atomic.StoreUint32(&cmd.State, state&^cmdState|cmdRetry)
		return true
	}
	kind := uint16(failStatus)
	if state&cmdAborted != 0 && status.Is(nvme.StatusAbortRequested) {
		kind = failTimeout
	}
	set.failUnit(cmd.Index, failRecord{Kind: kind, Status: uint16(status), QID: uint16(q.QID),
		CID: wireCID(cid, state), Tries: tries, LBA: cmd.lba(), SSD: q.SSD,
		Blocks: uint32(cmd.NLB) + 1})
	return false
}

// giveBack frees CIDs, and has others issued again.
func (q *queueState) giveBack(freed, again []uint16) {
	for _, cid := range again {
		atomic.OrUint32(&q.Retry[cid/32], 1<<(cid&31))
	}
	for i := 0; i < len(freed); {
		w := freed[i] / 32
		mask := uint32(0)
		for ; i < len(freed) && freed[i]/32 == w; i++ {
			mask |= 1 << (freed[i] & 31)
		}
		atomic.OrUint32(&q.Free[w], mask)
	}
}

// unstage copies what a command has read from its staging slot to where it belongs: the row, the
// part of a row, or each row of the run.
func (q *queueState) unstage(set *setState, cid uint32, cmd *command) {
	l := &set.Layout
	src := q.Stage + cuda.DevicePtr(cid)*cuda.DevicePtr(q.StageBytes)
	n := int(l.RowBytes)
	switch {
	case set.Order != 0:
		lo, hi := *at[uint32](set.Runs, int(cmd.Index)), *at[uint32](set.Runs, int(cmd.Index)+1)
		if hi-lo == 1 {
			break
		}
		first := cmd.lba() - q.DataStart
		for _, i := range view[uint32](set.Order, int64(lo), int64(hi)) {
			slot, off, _ := set.rowAt(int64(i), q.SSD)
			lba, offset := l.place(slot)
			from := src + cuda.DevicePtr(lba-first)*cuda.DevicePtr(l.LBABytes) +
				cuda.DevicePtr(offset)
			copy(unsafe.Slice(at[byte](set.Dst+cuda.DevicePtr(off), 0), n),
				unsafe.Slice(at[byte](from, 0), n))
		}
		return
	case set.PartBlocks != 0:
		part := int(set.PartBlocks) * int(l.LBABytes)
		n = min(part, n-int(cmd.Index%set.Parts)*part)
	}
	src += cuda.DevicePtr(cmd.Place >> placeBits)
	copy(unsafe.Slice(at[byte](cmd.Dst, 0), n), unsafe.Slice(at[byte](src, 0), n))
}

// deadlines freezes queues with a command past its deadline, and returns the time until one may be
// due; 0 when a queue was frozen. Commands are looked at only once per timeout.
func (k kernelView) deadlines(queues cuda.DevicePtr, lo, hi uint32) time.Duration {
	now := nanotime()
	wait := int64(maxPark)
	for g := lo; g < hi; g++ {
		q := at[queueState](queues, int(g))
		if !atomic.CompareAndSwapUint32(&q.Reap, 0, 1) {
			continue // the host has it
		}
		next, froze := q.due(now)
		atomic.StoreUint32(&q.Reap, 0)
		if froze {
			return 0
		}
		wait = min(wait, next-now)
	}
	return time.Duration(max(wait, 1))
}

// due freezes a queue with a command past its deadline, or tells when its commands must be looked
// at next. The caller holds Reap.
func (q *queueState) due(now int64) (next int64, froze bool) {
	if atomic.LoadUint32(&q.Frozen) != frozenNo {
		return math.MaxInt64, false
	}
	switch {
	case q.ScanAt == 0:
		q.ScanAt = now + q.TimeoutNS
	case q.ScanAt <= now:
		next := q.oldest()
		if next <= now {
			q.ScanAt = now
			atomic.CompareAndSwapUint32(&q.Frozen, frozenNo, frozenTimeout)
			return now, true
		}
		q.ScanAt = min(next, now+q.TimeoutNS)
	}
	return q.ScanAt, false
}

// oldest is the earliest deadline of the commands in flight.
func (q *queueState) oldest() int64 {
	first := int64(math.MaxInt64)
	q.commands(func(_ uint32, cmd *command) {
		if atomic.LoadUint32(&cmd.State)&cmdState == cmdInFlight {
			first = min(first, atomic.LoadInt64(&cmd.Deadline))
		}
	})
	return first
}
