// What submit, complete and read_sync do with a queue pair, by whole warps: every function here is
// called by all 32 lanes with the same arguments. The Go twin is gpuio/submit.go and complete.go.
//
// Who touches what: the plain fields of a queue that change (Tail, PendHead, Head, Scan, …) are
// loaded and stored by lane 0 alone and travel by shuffle, so that their order between warps is that
// of the ownership flag, an acquire and release by lane 0. Command entries are written by the lane
// that makes the command and read by the lane that finds its completion, with the SSD between them.
//
// HX_PLANT_… are the mistakes that the tests in cuda/shim/iotest must notice. No build sets them.
#pragma once

#include "abi_io.h"
#include "device.h"

namespace io {

HX_DEVICE inline QueueState *queue(u64 queues, u32 g) { return dev::at<QueueState>(queues, g); }
HX_DEVICE inline SetState *set(u64 sets, u32 slot) { return dev::at<SetState>(sets, slot); }
HX_DEVICE inline u32 below(u32 lane) { return (1u << lane) - 1; }
HX_DEVICE inline bool leader() { return dev::lane() == 0; }
template <typename T> HX_DEVICE inline T lead(T v) { return dev::shfl(dev::full_mask, v, 0); }
template <typename T> HX_DEVICE inline T least(T a, T b) { return a < b ? a : b; }

// One clock value for the warp.
HX_DEVICE inline i64 now() {
	i64 t = 0;
	if (leader()) t = dev::now_ns();
	return lead(t);
}

HX_DEVICE inline u32 frozen(const QueueState *q) {
	u32 v = 0;
	if (leader()) v = dev::ld_relaxed_sys(&q->Frozen);
	return lead(v);
}

// The host's freezing stays as it is. Lane 0 only.
HX_DEVICE inline void freeze(QueueState *q, u32 why) { dev::cas_gpu<dev::acq_rel>(&q->Frozen, frozenNo, why); }

// This warp's contiguous share of n items, by the rule of cuda.Block.Range.
HX_DEVICE inline void range(u32 n, u32 *lo, u32 *hi) {
	u32 w = dev::warp(), of = dev::warps();
	u32 each = n / of, more = n % of;
	*lo = w * each + least(w, more);
	*hi = *lo + each + (w < more ? 1 : 0);
}

// Adds to a counter that has one writer, for readers on the host. Lane 0 only.
HX_DEVICE inline void count(u64 *c, u64 n) {
	if (n != 0) dev::st_relaxed_sys(c, dev::ld_relaxed_sys(c) + n);
}

// The part of a bucket of n rows that queue i of perSSD takes (gpuio.share).
HX_DEVICE inline void share(i64 n, u32 i, u32 perSSD, u32 rotate, i64 *lo, i64 *hi) {
	i64 per = (n + perSSD - 1) / perSSD;
	per = (per + 31) / 32 * 32;
	i64 j = (i + perSSD - rotate % perSSD) % perSSD;
	*lo = least(j * per, n);
	*hi = least((j + 1) * per, n);
}

// Takes the submission side. False: the holder will see what the caller left. The flag is changed
// by read-modify-writes only, also where it keeps its value: in their total order the holder's next
// one reads ours, so what we released before is seen by its next look. A plain load that finds
// ownDirty would not say that. The loop goes round only when another warp has moved on.
HX_DEVICE inline bool take(QueueState *q) {
	u32 got = 0;
	if (leader()) {
		for (;;) {
			u32 seen = dev::cas_gpu<dev::acq_rel>(&q->Own, ownFree, ownHeld);
			if (seen == ownFree) {
				got = 1;
				break;
			}
			if (dev::cas_gpu<dev::acq_rel>(&q->Own, seen, ownDirty) == seen) break;
		}
	}
	got = lead(got);
	dev::syncwarp(); // the other lanes come after the acquire, too
	return got != 0;
}

// Gives the submission side back. False: somebody left work meanwhile; look again.
HX_DEVICE inline bool release(QueueState *q) {
	dev::syncwarp();
	u32 gone = 0;
	if (leader()) {
		gone = dev::cas_gpu<dev::acq_rel>(&q->Own, ownHeld, ownFree) == ownHeld;
		if (!gone) dev::exch_gpu<dev::acq_rel>(&q->Own, ownHeld);
	}
	gone = lead(gone);
	dev::syncwarp();
	return gone != 0;
}

// Makes the SQEs before tail visible to the SSD: all lanes' stores, fence, doorbell.
HX_DEVICE inline void ring_sq(QueueState *q, u32 tail) {
	u32 *bell = dev::at<u32>(q->SQDoorbell); // loaded while stores are under way; after the fence it would take its own time
#ifndef HX_PLANT_MISSING_BARRIER
	dev::syncwarp();
#endif
	if (leader()) {
#ifdef HX_PLANT_DOORBELL_BEFORE_SQE
		dev::ring(bell, tail);
		dev::fence_sys();
#else
		dev::fence_sys();
		dev::ring(bell, tail);
#endif
	}
}

// Writes a read command at a place of the ring, in 16-byte pieces. One lane, one command.
HX_DEVICE inline void sqe(const QueueState *q, u32 place, u32 cid, u64 lba, u64 prp1, u64 prp2) {
	u8 *to = dev::at<u8>(q->SQ, (i64)place * commandBytes);
	dev::st16(to, u32x4{nvmeRead | cid << 16, q->NSID, 0, 0});
	dev::st16(to + 16, u32x4{0, 0, (u32)prp1, (u32)(prp1 >> 32)});
	dev::st16(to + 32, u32x4{(u32)prp2, (u32)(prp2 >> 32), (u32)lba, (u32)(lba >> 32)});
	dev::st16(to + 48, u32x4{q->Blocks - 1, 0, 0, 0});
}

// The ring place that lies n behind another; n is below Entries.
HX_DEVICE inline u32 forward(const QueueState *q, u32 place, u32 n) {
	place += n;
	return place >= q->Entries ? place - q->Entries : place;
}

// The PRP entries for ReadBytes contiguous bytes from a (base specification 2.0, 4.1.1): only the
// first may have an offset, a second page goes to PRP2, more pages to the CID's list. One lane.
HX_DEVICE inline u64 prp2(const QueueState *q, u32 cid, u64 a) {
	u64 page = q->PageBytes, total = q->ReadBytes;
	u64 first = page - (a & (page - 1));
	if (total <= first) return 0;
	if (total <= first + page) return a + first;
	u64 *list = dev::at<u64>(q->Lists + (u64)cid * q->ListBytes);
	for (u64 done = first; done < total; done += page) dev::st(list++, a + done);
	return q->ListsIOVA + (u64)cid * q->ListBytes;
}

// Records failed rows of one set, those of the lanes in mask, in the order of lanes. The caller
// takes them out of Remaining afterwards.
HX_DEVICE inline void fail(SetState *s, u32 mask, const FailRecord &r) {
	if (mask == 0) return;
	u32 first = 0;
	if (leader()) first = dev::add_gpu<dev::relaxed>(&s->NumFails, dev::popc(mask));
	first = lead(first);
	u32 n = first + dev::popc(mask & below(dev::lane()));
	if ((mask >> dev::lane() & 1) == 0 || n >= maxFails) return;
	FailRecord *f = &s->Fails[n];
	dev::st(&f->Index, r.Index);
	dev::st(&f->Kind, r.Kind);
	dev::st(&f->Status, r.Status);
	dev::st(&f->QID, r.QID);
	dev::st(&f->CID, r.CID);
	dev::st(&f->Tries, r.Tries);
	dev::st(&f->LBA, r.LBA);
	dev::st(&f->SSD, r.SSD);
	dev::st(&f->_, 0u);
	dev::st(&f->Row, r.Row);
}

// One row of a set as a command needs it.
struct Place {
	i64 row;
	i64 off; // in the destination
	u64 lba;
	u32 byte; // of the row in its LBAs
	u32 pos;
	u16 bad; // 0 or a kind of FailRecord
};

// Finds where row i of the set is on the queue's SSD and where it goes. One lane, one row.
HX_DEVICE inline Place locate(const QueueState *q, const SetState *s, i64 i) {
	Place p{};
	const Layout &l = s->Layout;
	p.row = dev::ld(dev::at<i64>(s->Rows, i));
	p.pos = dev::ld(dev::at<u32>(s->Pos, i));
	p.off = (i64)p.pos * s->DstStride;
	i64 slot = p.row / l.SSDs;
	if (p.row < 0 || p.row >= l.Rows || (u32)(p.row - slot * l.SSDs) != q->SSD) {
		p.bad = failRow;
	} else if (p.off > s->DstLimit - l.RowBytes) {
		p.bad = failPos;
	} else if (l.RowsPerLBA > 1) {
		i64 lba = slot / l.RowsPerLBA;
		p.lba = q->DataStart + (u64)lba;
		p.byte = (u32)(slot - lba * l.RowsPerLBA) * (u32)l.RowBytes;
	} else {
		p.lba = q->DataStart + (u64)(slot * l.LBAsPerRow);
	}
	return p;
}

HX_DEVICE inline FailRecord bad_row(const QueueState *q, i64 i, const Place &p) {
	FailRecord r{};
	r.Index = (u32)i;
	r.Kind = p.bad;
	r.QID = (u16)q->QID;
	r.LBA = p.bad == failPos ? p.pos : 0;
	r.SSD = q->SSD;
	r.Row = p.row;
	return r;
}

// Fills the command entry of a CID for a row, but for its state. One lane, one row.
HX_DEVICE inline void prepare(QueueState *q, Command *c, const SetState *s, u32 slot, u32 cid, i64 i, const Place &p, i64 now) {
	u64 a, dst;
	if (s->Direct != 0) {
		a = dev::ld(dev::at<u64>(s->DstIOVA, q->SSD)) + (u64)p.off;
		dst = 0;
	} else {
		a = q->StageIOVA + (u64)cid * q->StageBytes;
		dst = s->Dst + (u64)p.off;
	}
	u64 b = prp2(q, cid, a); // stores; what follows does not, so that launch finds it in registers
	dev::st(&c->Set, slot);
	dev::st(&c->Index, (u32)i);
	dev::st(&c->LBA, p.lba);
	dev::st(&c->PRP1, a);
	dev::st(&c->PRP2, b);
	dev::st(&c->Dst, dst);
	dev::st(&c->Start, now);
	dev::st(&c->ByteOffset, p.byte);
}

// Puts a command that was prepared in flight, as its n-th attempt. One lane.
HX_DEVICE inline void launch(QueueState *q, Command *c, u32 place, u32 cid, u32 attempts, i64 now) {
	u64 lba = dev::ld(&c->LBA), prp1 = dev::ld(&c->PRP1), prp2 = dev::ld(&c->PRP2);
	dev::st_relaxed_gpu(&c->Deadline, now + q->TimeoutNS);
	// Who looks for late commands reads the state first, then the deadline.
	dev::st_release_gpu(&c->State, attempts | cmdInFlight);
	sqe(q, place, cid, lba, prp1, prp2);
}

// Takes up to n free CIDs of one word of the bitmap and returns them as bits; 0: none are free. Only
// the holder of the submission side takes CIDs, others only give them back.
HX_DEVICE inline u32 acquire(QueueState *q, u32 n, u32 *word) {
	u32 lane = dev::lane(), words = (q->NumCommands + 31) / 32;
	u32 free = lane < words ? dev::ld_relaxed_gpu(&q->Free[lane]) : 0;
	u32 some = dev::ballot(dev::full_mask, free != 0);
	if (some == 0) return 0;
	u32 scan = 0;
	if (leader()) scan = dev::ld(&q->Scan);
	scan = lead(scan);
	u32 later = some & ~below(scan); // scan < words <= 32
	u32 w = dev::ctz(later != 0 ? later : some);
	free = dev::shfl(dev::full_mask, free, w);
	u32 mask = dev::ballot(dev::full_mask, (free >> lane & 1) != 0 && dev::popc(free & below(lane)) < n);
	if (leader()) {
		if (w != scan) dev::st(&q->Scan, w);
		dev::and_gpu<dev::acquire>(&q->Free[w], ~mask);
	}
	dev::syncwarp();
	*word = w;
	return mask;
}

// What a refill did, for the counters.
struct Refilled {
	u32 tail;
	u32 unrung; // SQEs that the SSD has not been told of
	u32 direct, staged, retried, rings;
};

HX_DEVICE inline void ring(QueueState *q, Refilled *r) {
	ring_sq(q, r->tail);
	r->rings++;
	r->unrung = 0;
}

// Issues again what waits in Retry, in the order of CIDs.
HX_DEVICE inline void retry(QueueState *q, u64 sets, i64 now, Refilled *r) {
	u32 lane = dev::lane(), words = (q->NumCommands + 31) / 32;
	u32 mine = lane < words ? dev::ld_relaxed_gpu(&q->Retry[lane]) : 0;
	if (mine != 0) mine = dev::exch_gpu<dev::acquire>(&q->Retry[lane], 0u);
	u32 some = dev::ballot(dev::full_mask, mine != 0);
	dev::syncwarp();
	for (; some != 0; some &= some - 1) {
		u32 w = dev::ctz(some);
		u32 m = dev::shfl(dev::full_mask, mine, w);
		if (m >> lane & 1) {
			u32 cid = w * 32 + lane;
			Command *c = dev::at<Command>(q->Commands, cid);
			u32 state = (dev::ld_relaxed_gpu(&c->State) & ~(cmdState | cmdAborted)) + cmdAttempt;
			launch(q, c, forward(q, r->tail, dev::popc(m & below(lane))), cid, state, now);
			dev::add_gpu<dev::relaxed>(&set(sets, dev::ld(&c->Set))->Retries, 1u);
		}
		u32 n = dev::popc(m);
		r->tail = forward(q, r->tail, n);
		r->retried += n;
		r->unrung += n;
	}
}

// Issues commands until the CIDs or the work run out: first those to be tried again, then the
// pending list. The caller holds the submission side.
HX_DEVICE inline void refill(QueueState *q, u32 g, u64 sets, bool completing) {
	if (frozen(q) != frozenNo) return;
	u32 lane = dev::lane();
	Refilled r{};
	u32 head = 0;
	if (leader()) {
		head = dev::ld(&q->PendHead);
		r.tail = dev::ld(&q->Tail);
	}
	head = lead(head);
	r.tail = lead(r.tail);
	i64 t = now();
	retry(q, sets, t, &r);
	for (;;) {
		u32 slot = 0, more = 0;
		i64 next = 0, end = 0;
		if (leader() && dev::ld_acquire_gpu(&q->PendTail) != head) {
			more = 1;
			slot = dev::ld(&q->PendRing[head % maxSets]);
			next = dev::ld(&q->Pend[slot].Next);
			end = dev::ld(&q->Pend[slot].End);
		}
		if (lead(more) == 0) break;
		slot = lead(slot);
		next = lead(next);
		end = lead(end);
		u32 w = 0;
		u32 mask = acquire(q, (u32)least(end - next, (i64)32), &w);
		if (mask == 0) break;
		SetState *s = set(sets, slot);
		bool has = (mask >> lane & 1) != 0;
		i64 i = next + dev::popc(mask & below(lane));
		Place p{};
		if (has) p = locate(q, s, i);
		u32 bad = dev::ballot(dev::full_mask, has && p.bad != 0);
		u32 good = mask & ~bad;
		if (good >> lane & 1) {
			u32 cid = w * 32 + lane;
			Command *c = dev::at<Command>(q->Commands, cid);
			prepare(q, c, s, slot, cid, i, p, t);
			launch(q, c, forward(q, r.tail, dev::popc(good & below(lane))), cid, cmdAttempt, t);
		}
		fail(s, bad, bad_row(q, i, p));
		u32 n = dev::popc(good);
		r.tail = forward(q, r.tail, n);
		r.unrung += n;
		if (s->Direct != 0)
			r.direct += n;
		else
			r.staged += n;
		next += dev::popc(mask);
#ifndef HX_PLANT_MISSING_BARRIER
		dev::syncwarp(); // the failed rows come before they are counted off
#endif
		if (next == end) head++;
		if (leader()) {
			// The list lets go of the set before its last commands become visible, since the host
			// may reuse the slot as soon as these complete.
			dev::st(&q->Pend[slot].Next, next);
			if (next == end) dev::st(&q->PendHead, head);
			if (bad != 0) dev::or_gpu<dev::release>(&q->Free[w], bad);
			dev::add_gpu<dev::relaxed>(&s->Issued, (u64)n);
			if (bad != 0) dev::add_gpu<dev::release>(dev::at<u32>(s->Remaining, g), 0u - dev::popc(bad));
		}
		if (r.unrung >= ringEvery) ring(q, &r);
	}
	if (r.unrung > 0) ring(q, &r);
	if (leader()) {
		dev::st(&q->Tail, r.tail);
		count(&q->Issued, r.direct + r.staged + r.retried);
		if (completing) count(&q->Pended, r.direct + r.staged);
		count(&q->Direct, r.direct);
		count(&q->Staged, r.staged);
		count(&q->Retried, r.retried);
		count(&q->SQRings, r.rings);
	}
}

// Refills a queue, or leaves that to whoever holds its submission side.
HX_DEVICE inline void serve(QueueState *q, u32 g, u64 sets, bool completing) {
	if (!take(q)) return;
	do refill(q, g, sets, completing);
	while (!release(q));
}

// Copies a row by the whole warp. All lanes have come after the acquire of its completion.
HX_DEVICE inline void copy_row(u64 dst, u64 src, u32 bytes) {
	u32 lane = dev::lane(), align = (u32)(dst | src | bytes);
	if (align % 16 == 0) {
		for (u32 i = lane * 16; i < bytes; i += 32 * 16) dev::st16(dev::at<u8>(dst, i), dev::ld16(dev::at<u8>(src, i)));
	} else if (align % 4 == 0) {
		for (u32 i = lane; i < bytes / 4; i += 32) dev::st(dev::at<u32>(dst, i), dev::ld(dev::at<u32>(src, i)));
	} else {
		for (u32 i = lane; i < bytes; i += 32) dev::st(dev::at<u8>(dst, i), dev::ld(dev::at<u8>(src, i)));
	}
}

// Copies the rows of the first Rows lanes in *mask and takes these out of it. Rows times pieces loads of 16 bytes
// are under way per lane before the first store, which could be to what is loaded, for all the compiler
// knows: one at a time, a row would take as many ways to the CPU's memory as it has 512 bytes.
template <u32 Rows, u32 pieces> HX_DEVICE inline void copy_some(u32 *mask, u64 dst, u64 src, u32 bytes) {
	u64 to[Rows], from[Rows];
#pragma GCC unroll 8
	for (u32 r = 0; r < Rows; r++) {
		u32 of = *mask != 0 ? dev::ctz(*mask) : 0;
		to[r] = dev::shfl(dev::full_mask, dst, of);
		from[r] = dev::shfl(dev::full_mask, src, of);
		if (*mask == 0) from[r] = 0;
		*mask &= *mask - 1;
	}
	for (u32 i = dev::lane() * 16; i < bytes; i += pieces * 32 * 16) {
		u32x4 v[Rows][pieces];
#pragma GCC unroll 8
		for (u32 r = 0; r < Rows; r++) {
#pragma GCC unroll 8
			for (u32 k = 0; k < pieces; k++) {
				v[r][k] = {0, 0, 0, 0};
				if (from[r] != 0 && i + k * 32 * 16 < bytes) v[r][k] = dev::ld16(dev::at<u8>(from[r], i + k * 32 * 16));
			}
		}
#pragma GCC unroll 8
		for (u32 r = 0; r < Rows; r++) {
#pragma GCC unroll 8
			for (u32 k = 0; k < pieces; k++) {
				if (from[r] != 0 && i + k * 32 * 16 < bytes) dev::st16(dev::at<u8>(to[r], i + k * 32 * 16), v[r][k]);
			}
		}
	}
}

// Copies the rows of the lanes in mask, all of that many bytes, by the whole warp, Loads loads at a
// time. All lanes have come after the acquires of their completions.
template <u32 Loads> HX_DEVICE inline void copy_rows(u32 mask, u64 dst, u64 src, u32 bytes) {
	bool odd = (mask >> dev::lane() & 1) != 0 && (u32)(dst | src | bytes) % 16 != 0;
	if (dev::any(dev::full_mask, odd)) {
		for (; mask != 0; mask &= mask - 1) {
			u32 of = dev::ctz(mask);
			copy_row(dev::shfl(dev::full_mask, dst, of), dev::shfl(dev::full_mask, src, of), bytes);
		}
		return;
	}
	while (mask != 0) {
		u32 rows = dev::popc(mask);
		if (bytes <= 512 && rows > 2)
			copy_some<Loads, 1>(&mask, dst, src, bytes);
		else if (bytes <= 2048 && rows > 1)
			copy_some<2, Loads / 2>(&mask, dst, src, bytes);
		else
			copy_some<1, Loads>(&mask, dst, src, bytes);
	}
}

// The row that a command reads, which its place on the SSD tells (gpuio's queueState.row).
HX_DEVICE inline i64 row_of(const QueueState *q, u64 lba, u32 byte, const Layout &l) {
	i64 slot = (i64)(lba - q->DataStart);
	if (l.RowsPerLBA > 1)
		slot = slot * l.RowsPerLBA + (i64)byte / l.RowBytes;
	else
		slot /= l.LBAsPerRow;
	return slot * l.SSDs + q->SSD;
}

// Has a lower lane of the first n the same CID? One ballot per bit. CIDs that no command can have
// count by their low bits: they are foreign themselves, and what follows one is left alone.
HX_DEVICE inline bool repeated(u32 cid, u32 n) {
	u32 same = below(dev::lane());
	if (n < 32) same &= below(n);
	if (n < 2) return false;
	for (u32 bit = 1; bit < maxCommands; bit *= 2) {
		u32 ones = dev::ballot(dev::full_mask, (cid & bit) != 0);
		same &= (cid & bit) != 0 ? ones : ~ones;
	}
	return same != 0;
}

HX_DEVICE inline bool status_ok(u32 status) { return (status & 0x7ff) == 0; }
HX_DEVICE inline bool status_dnr(u32 status) { return (status >> 14 & 1) != 0; }
constexpr u32 statusAborted = 0x007; // Command Abort Requested

// The bucket of a latency (gpuio's histBucket).
HX_DEVICE inline u32 hist_bucket(i64 ns) {
	if (ns < (1 << histMinBits)) return 0;
	if (ns >= (i64)1 << histMaxBits) return histBuckets - 1;
	u32 exp = 63 - dev::clz((u64)ns);
	return (exp - histMinBits) << histSubBits | ((u32)((u64)ns >> (exp - histSubBits)) & ((1 << histSubBits) - 1));
}

// Counts the latencies of the lanes in which good is set. Once per bucket: the histogram is in the
// CPU's memory, where every read-modify-write is a way there and back.
HX_DEVICE inline void tally(QueueState *q, bool good, i64 ns) {
	u32 bucket = hist_bucket(ns);
	for (u32 m = dev::ballot(dev::full_mask, good); m != 0;) {
		u32 one = dev::shfl(dev::full_mask, bucket, dev::ctz(m));
		u32 same = dev::ballot(dev::full_mask, good && bucket == one);
		if (leader()) dev::add_gpu<dev::relaxed>(&dev::at<Histogram>(q->Hist)->Counts[one], (u64)dev::popc(same));
		m &= ~same;
	}
}

// Gives back the CIDs of the lanes in which done is set, which are different; once per word, as above.
// All lanes are done with what belongs to them; that comes before by the syncwarp.
HX_DEVICE inline void free_cids(QueueState *q, bool done, u32 cid) {
	if (done) dev::st_relaxed_gpu(&dev::at<Command>(q->Commands, cid)->State, cmdFree);
	dev::syncwarp();
	for (u32 m = dev::ballot(dev::full_mask, done); m != 0;) {
		u32 w = dev::shfl(dev::full_mask, cid / 32, dev::ctz(m));
		bool in = done && cid / 32 == w;
		u32 bits = dev::reduce_add(dev::full_mask, in ? 1u << (cid % 32) : 0);
		if (leader()) dev::or_gpu<dev::release>(&q->Free[w], bits);
		m &= ~dev::ballot(dev::full_mask, in);
	}
}

} // namespace io
