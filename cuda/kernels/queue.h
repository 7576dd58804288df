// The steps of submit, complete and read_sync on a queue pair, by whole warps: every function here is
// called by all 32 lanes with the same arguments. The Go twin is gpuio/submit.go and complete.go.
//
// Owners: the plain fields of a queue that change (Tail, PendHead, Head, Scan, …) are
// loaded and stored by lane 0 alone and travel by shuffle, so that their order between warps is that
// of the ownership flag, an acquire and release by lane 0; counters are each in a lane (load_counts). Command entries are written by the lane
// that makes the command and read by the lane that finds its completion, with the SSD between them.
//
// HX_PLANT_… are mistakes that internal/testing/shim/iotest must notice. No build sets them.
#pragma once

#include "abi_io.h"
#include "device.h"
#include "scan.h"

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

// The host's freezing stays as it is. Earlier stores are released with it; nothing is acquired. Lane 0 only.
HX_DEVICE inline void freeze(QueueState *q, u32 why) { dev::cas_gpu<dev::release>(&q->Frozen, frozenNo, why); }

// Loads the constants of a queue or a read set: the host changes them only while no kernel runs (gpuio's enter),
// or before the set is handed over; staging slots are an exception (load_staging). All loads are under way at the same time, and beside another load that the
// warp waits for; each behind the branch that needs it would be a trip of its own. The rest of the struct that is
// returned has no values.
template <typename T, u32 bytes> HX_DEVICE inline T fixed(const T *from) {
	static_assert(bytes % 16 == 0, "whole loads");
	T here;
#pragma GCC unroll 16
	for (u32 i = 0; i < bytes; i += 16) {
		u32x4 v = dev::ld16_global((const u8 *)from + i);
		__builtin_memcpy((u8 *)&here + i, &v, 16);
	}
	return here;
}
HX_DEVICE inline QueueState fixed(const QueueState *q) { return fixed<QueueState, __builtin_offsetof(QueueState, Own)>(q); }
HX_DEVICE inline SetState fixed(const SetState *s) { return fixed<SetState, __builtin_offsetof(SetState, NumFails)>(s); }

// Loads a queue's staging slots again. The host makes them while kernels of earlier sets may run, before it hands
// over the first set that needs them. So this comes after the acquire that shows the set, or a completion of it,
// and a syncwarp. Beside the queue's constants it would find no slots at times, and the SSD would write to address 0.
HX_DEVICE inline void load_staging(QueueState *k, const QueueState *q) {
#ifdef HX_PLANT_STAGING_EARLY
	(void)k, (void)q;
#else
	k->Stage = dev::ld(&q->Stage);
	k->StageIOVA = dev::ld(&q->StageIOVA);
	k->StageBytes = dev::ld(&q->StageBytes);
#endif
}

// This warp's contiguous share of n items, by the rule of cuda.Block.Range.
HX_DEVICE inline void range(u32 n, u32 *lo, u32 *hi) {
	u32 w = dev::warp(), of = dev::warps();
	u32 each = n / of, more = n % of;
	*lo = w * each + least(w, more);
	*hi = *lo + each + (w < more ? 1 : 0);
}

// A side's counters: each has one writer, which is who holds the side, and readers on the host. A load, an
// addition and a store of each in turn would take a way to memory and back for each counter, while other warps
// wait for the side. So lane i has the i-th counter in a register: load_counts
// goes with the first loads of who has taken the side, and store_counts waits for nothing. Both lie between the
// side's acquire and its release, and both of these have a syncwarp, so the lanes' loads and stores are as
// ordered between warps as those of lane 0.
constexpr u32 ownerCounters = 8, completerCounters = 4;
static_assert(__builtin_offsetof(QueueState, Coalesced) == __builtin_offsetof(QueueState, Issued) + 8 * (ownerCounters - 1), "in a row");
static_assert(__builtin_offsetof(QueueState, CQRings) == __builtin_offsetof(QueueState, Completed) + 8 * (completerCounters - 1), "in a row");

HX_DEVICE inline u64 load_counts(const u64 *first, u32 counters) {
	return dev::lane() < counters ? dev::ld_relaxed_sys(first + dev::lane()) : 0;
}

// load_counts gave this lane had; its counter rises by n.
HX_DEVICE inline void store_counts(u64 *first, u32 counters, u64 had, u64 n) {
	if (dev::lane() < counters && n != 0) dev::st_relaxed_sys(first + dev::lane(), had + n);
}

// Counts of the submission side, for lane i that of the i-th counter from QueueState::Issued on. The same
// arguments in all lanes.
HX_DEVICE inline u64 owner_count(u64 direct, u64 staged, u64 retried, u64 rings, u64 pended, u64 blocks, u64 coalesced) {
	u64 n = direct + staged + retried; // Issued
	u32 lane = dev::lane();
	if (lane == 1) n = direct;
	if (lane == 2) n = staged;
	if (lane == 3) n = retried;
	if (lane == 4) n = rings;
	if (lane == 5) n = pended;
	if (lane == 6) n = blocks;
	if (lane == 7) n = coalesced;
	return n;
}

// Counts of a sweep, from QueueState::Completed on.
HX_DEVICE inline u64 completer_count(u64 completed, u64 errors, u64 foreign, u64 rings) {
	u64 n = completed;
	u32 lane = dev::lane();
	if (lane == 1) n = errors;
	if (lane == 2) n = foreign;
	if (lane == 3) n = rings;
	return n;
}

// The part of a bucket of n units that queue i of perSSD takes (gpuio.share).
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
// litmus: take
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

// Gives the submission side back. False: somebody left work meanwhile; look again. The answer is made of what
// the exchange found, which is ownDirty: drivers' compilers make a reduction, which acquires nothing, of a
// read-modify-write whose result nobody uses (tools/kernels refuses such PTX), and the next look at the pending
// list must come after what the exchange reads.
// litmus: release
HX_DEVICE inline bool release(QueueState *q) {
	dev::syncwarp();
	u32 seen = ownHeld;
	if (leader()) {
		seen = dev::cas_gpu<dev::acq_rel>(&q->Own, ownHeld, ownFree);
		if (seen != ownHeld) seen = dev::exch_gpu<dev::acq_rel>(&q->Own, ownHeld);
	}
	seen = lead(seen);
	dev::syncwarp();
	return seen == ownHeld;
}

// Makes the SQEs before tail visible to the SSD: all lanes' stores, fence, doorbell.
HX_DEVICE inline void ring_sq(const QueueState &k, u32 tail) {
	u32 *bell = dev::at<u32>(k.SQDoorbell);
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

// The state of a command that goes to the SSD, from the one that it has before: the next generation, which is
// never all ones.
HX_DEVICE inline u32 issued(u32 state) {
	u32 gen = (state + cmdNextGen) & cmdGen;
	return (((state & ~0xffffu) + cmdAttempt) | (gen == cmdGen ? 0 : gen)) | cmdInFlight;
}

// Is the completion with that last dword of the attempt that is in flight, if the command is the one that it
// names?
HX_DEVICE inline bool answers(u32 state, u32 last) {
#ifdef HX_PLANT_GENERATION_IGNORED
	(void)last;
	return (state & cmdState) == cmdInFlight;
#else
	return (state & (cmdState | cmdGen)) == ((last & cmdGen) | cmdInFlight);
#endif
}

// A read command, as the ring has it.
struct Entry {
	u32x4 part[4];
};
HX_DEVICE inline Entry read_command(const QueueState &k, u32 wire, u64 lba, u32 nlb, u64 prp1, u64 prp2) {
	return {{{nvmeRead | wire << 16, k.NSID, 0, 0}, {0, 0, (u32)prp1, (u32)(prp1 >> 32)}, {(u32)prp2, (u32)(prp2 >> 32), (u32)lba, (u32)(lba >> 32)}, {nlb, 0, 0, 0}}};
}

HX_DEVICE inline u32x4 other(u32x4 v, u32 lane) {
	return {dev::shfl(dev::full_mask, v.x, lane), dev::shfl(dev::full_mask, v.y, lane), dev::shfl(dev::full_mask, v.z, lane), dev::shfl(dev::full_mask, v.w, lane)};
}
// In registers, where a choice of structs would be one of addresses.
HX_DEVICE inline u32x4 choose(bool first, u32x4 a, u32x4 b) {
	return {first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}

// Stores each lane's line of 64 bytes, or its first parts of 16 bytes, to the lane's address; 0: no line. With
// a line a lane, each instruction would store a part of 32 lines. So four lanes exchange parts: lane i gets the
// i-th part of all four lines, and each instruction stores eight whole lines.
template <u32 parts> HX_DEVICE inline void store_lines(u64 to, Entry e) {
	u32 lane = dev::lane();
#pragma GCC unroll 2
	for (u32 far = 1; far < 4; far *= 2) { // a matrix of 4 × 4 is transposed in two steps
		bool upper = (lane & far) != 0;
#pragma GCC unroll 2
		for (u32 n = 0; n < 2; n++) {
			u32 low = far == 1 ? 2 * n : n, high = low + far;
			u32x4 got = other(choose(upper, e.part[low], e.part[high]), lane ^ far);
			e.part[low] = choose(upper, got, e.part[low]);
			e.part[high] = choose(upper, e.part[high], got);
		}
	}
#pragma GCC unroll 4
	for (u32 j = 0; j < 4; j++) {
		u64 line = dev::shfl(dev::full_mask, to, (lane & ~3u) + j);
		u8 *part = dev::at<u8>(line, 16 * (lane & 3));
		if (line != 0 && (lane & 3) < parts) dev::st16(part, e.part[j]);
	}
}

// The ring place that lies n behind another; n is below Entries.
HX_DEVICE inline u32 forward(const QueueState &k, u32 place, u32 n) {
	place += n;
	return place >= k.Entries ? place - k.Entries : place;
}

// The PRP entries for total contiguous bytes from a (base specification 2.0, 4.1.1): only the
// first may have an offset, a second page goes to PRP2, more pages to the CID's list. One lane.
HX_DEVICE inline u64 prp2(const QueueState &k, u32 cid, u64 a, u64 total) {
	u64 page = k.PageBytes;
	u64 first = page - (a & (page - 1));
	if (total <= first) return 0;
	if (total <= first + page) return a + first;
	u64 *list = dev::at<u64>(k.Lists + (u64)cid * k.ListBytes);
	for (u64 done = first; done < total; done += page) dev::st(list++, a + done);
	return k.ListsIOVA + (u64)cid * k.ListBytes;
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
	dev::st(&f->Blocks, r.Blocks);
	dev::st(&f->Row, r.Row);
}

// 64-bit divisions are slow on a GPU, and most numbers fit 32 bits.
HX_DEVICE inline u64 divide(u64 a, u64 b) { return (a | b) >> 32 == 0 ? (u32)a / (u32)b : a / b; }

// Where a slot is: its first LBA, from DataStart, and the byte in it.
HX_DEVICE inline u64 lba_of(const Layout &l, u64 slot) {
	return l.RowsPerLBA > 1 ? divide(slot, (u32)l.RowsPerLBA) : slot * (u32)l.LBAsPerRow;
}
HX_DEVICE inline u32 byte_of(const Layout &l, u64 slot) {
	if (l.RowsPerLBA <= 1) return 0;
	return (u32)(slot - divide(slot, (u32)l.RowsPerLBA) * (u32)l.RowsPerLBA) * (u32)l.RowBytes;
}

// A command's first LBA, and the byte of its first row there, as Command::Place has both.
HX_DEVICE inline u64 placed(u64 lba, u32 byte) { return lba | (u64)byte << placeBits; }
HX_DEVICE inline u64 lba_at(u64 place) { return place & (((u64)1 << placeBits) - 1); }
HX_DEVICE inline u32 byte_at(u64 place) { return (u32)(place >> placeBits); }

// One row of a set: where it is on the SSD and where it goes.
struct Row {
	i64 row;
	u64 slot;
	i64 off; // in the destination
	u32 pos;
	u16 bad; // 0 or a kind of FailRecord
};

// Looks at a row of a set, which goes to a position. One lane, one row.
HX_DEVICE inline Row row_of(const SetState &s, u32 ssd, i64 row, u32 pos) {
	Row r{};
	const Layout &l = s.Layout;
	r.row = row;
	r.pos = pos;
	r.off = (i64)pos * s.DstStride;
	if (row < 0 || row >= l.Rows) {
		r.bad = failRow;
		return r;
	}
	r.slot = divide((u64)row, (u32)l.SSDs);
	if ((u32)((u64)row - r.slot * (u32)l.SSDs) != ssd)
		r.bad = failRow;
	else if (r.off > s.DstLimit - l.RowBytes)
		r.bad = failPos;
	return r;
}

// The rows of a unit: count of them from the first place on, which is one in Order where the set has
// one, else an index of Rows.
struct Unit {
	i64 first;
	u32 count;
	u32 part; // of a split row
};

HX_DEVICE inline Unit unit_at(const SetState &s, u32 unit) {
	Unit u{unit, 1, 0};
	if (s.PartBlocks != 0) {
		u.first = unit / s.Parts;
		u.part = unit - (u32)u.first * s.Parts;
	} else if (s.Order != 0) {
		u32 first = dev::ld(dev::at<u32>(s.Runs, unit));
		u.first = first;
		u.count = dev::ld(dev::at<u32>(s.Runs, (i64)unit + 1)) - first;
	}
	return u;
}

// The index of Rows at a place.
HX_DEVICE inline i64 index_at(const SetState &s, i64 place) {
	return s.Order != 0 ? dev::ld(dev::at<u32>(s.Order, place)) : place;
}

// A unit as its command needs it. at and index are of its first row.
struct Place {
	Unit unit;
	Row at;
	i64 index;
	u64 lba;
	u64 iova; // of the destination, where the SSD writes to it
	u32 byte; // of the row in its LBAs
	u32 blocks;
};

// Finds what a unit reads and where it goes. Of a run only the first row can be bad, since coalesce has
// looked at each. One lane, one unit.
HX_DEVICE __forceinline__ Place locate(const QueueState &k, const SetState &s, u32 unit) {
	Place p{};
	const Layout &l = s.Layout;
	p.unit = unit_at(s, unit);
	i64 end = p.unit.first + p.unit.count - 1;
	p.index = p.unit.first;
	if (s.Order != 0) {
		u32 a = dev::ld(dev::at<u32>(s.Order, p.index)), b = dev::ld(dev::at<u32>(s.Order, end));
		p.index = a;
		end = b;
	}
	// These are under way at the same time, also the last row of a run.
	u32 pos = dev::ld(dev::at<u32>(s.Pos, p.index));
	i64 row = dev::ld(dev::at<i64>(s.Rows, p.index)), last = 0;
	if (p.unit.count > 1) last = dev::ld(dev::at<i64>(s.Rows, end));
	if (s.Direct != 0) p.iova = dev::ld(dev::at<u64>(s.DstIOVA, k.SSD));
	p.at = row_of(s, k.SSD, row, pos);
	if (p.at.bad != 0) return p;
	u64 lba = lba_of(l, p.at.slot);
	p.byte = byte_of(l, p.at.slot);
	p.blocks = (u32)l.LBAsPerRow;
	if (s.PartBlocks != 0) {
		u32 skip = p.unit.part * s.PartBlocks;
		lba += skip;
		p.blocks = least(p.blocks - skip, s.PartBlocks);
	} else if (p.unit.count > 1) {
		p.blocks += (u32)(lba_of(l, divide((u64)last, (u32)l.SSDs)) - lba);
	}
	p.lba = k.DataStart + lba;
	return p;
}

// How much of a row a command with that many LBAs brings.
HX_DEVICE inline u32 row_bytes(const SetState &s, u32 part, u32 blocks) {
	u32 bytes = (u32)s.Layout.RowBytes, lba = (u32)s.Layout.LBABytes;
	return s.PartBlocks == 0 ? bytes : least(bytes - part * s.PartBlocks * lba, blocks * lba);
}

// Does the row at an index count as a new failure? The parts of a row fail as one. One lane, one row.
HX_DEVICE inline bool first_failure(const SetState *s, i64 index) {
#ifdef HX_PLANT_MARKS_IGNORED
	(void)s, (void)index;
	return true;
#else
	return s->PartBlocks == 0 || dev::exch_gpu<dev::relaxed>(dev::at<u32>(s->Marks, index), 1u) == 0;
#endif
}

// Records the units of the lanes in mask, which no command can read: single rows or parts of one.
HX_DEVICE inline void fail_bad(const QueueState &k, SetState *s, u32 mask, const Place &p) {
	if (mask == 0) return;
	bool mine = (mask >> dev::lane() & 1) != 0;
	if (mine) mine = first_failure(s, p.index);
	FailRecord r{};
	r.Index = (u32)p.index;
	r.Kind = p.at.bad;
	r.QID = (u16)k.QID;
	r.LBA = p.at.bad == failPos ? p.at.pos : 0;
	r.SSD = k.SSD;
	r.Row = p.at.row;
	fail(s, dev::ballot(dev::full_mask, mine), r);
}

// Records all rows of a command's unit, in the order of the run. State and status are the command's last.
HX_DEVICE inline void fail_command(const QueueState &k, u64 sets, u32 cid, u32 state, u16 kind, u32 status) {
	const Command *c = dev::at<Command>(k.Commands, cid);
	SetState *s = set(sets, dev::ld(&c->Set));
	Unit u = unit_at(*s, dev::ld(&c->Index));
	FailRecord r{};
	r.Kind = kind;
	r.Status = (u16)status;
	r.QID = (u16)k.QID;
	r.CID = (u16)(cid | (state & cmdGen));
	r.Tries = state / cmdAttempt;
	r.LBA = lba_at(dev::ld(&c->Place));
	r.Blocks = (u32)dev::ld(&c->NLB) + 1;
	r.SSD = k.SSD;
	for (u32 base = 0; base < u.count; base += 32) {
		u32 n = base + dev::lane();
		bool mine = n < u.count;
		if (mine) {
			i64 i = index_at(*s, u.first + n);
			r.Index = (u32)i;
			r.Row = dev::ld(dev::at<i64>(s->Rows, i));
			mine = first_failure(s, i);
		}
		fail(s, dev::ballot(dev::full_mask, mine), r);
	}
}

// Can the rows of a run land in their own pages, each page an entry of its own? They must be
// different and without a gap, fill pages, and begin on them. One lane.
HX_DEVICE inline bool scatters(const QueueState &k, const SetState &s, const Place &p) {
	u64 in = k.PageBytes - 1;
	if (((u32)s.Layout.RowBytes & in) != 0 || (u64)p.unit.count * (u32)s.Layout.LBAsPerRow != p.blocks) return false;
	if (((p.iova | (u64)s.DstStride) & in) == 0) return true;
	for (u32 n = 0; n < p.unit.count; n++) {
		u32 pos = dev::ld(dev::at<u32>(s.Pos, index_at(s, p.unit.first + n)));
		if (((p.iova + (u64)pos * (u64)s.DstStride) & in) != 0) return false;
	}
	return true;
}

// PRP2 of such a run, whose first page is in PRP1. One lane.
HX_DEVICE inline u64 scatter(const QueueState &k, const SetState &s, const Place &p, u32 cid) {
	u64 page = k.PageBytes, per = (u32)s.Layout.RowBytes / k.PageBytes, pages = per * p.unit.count;
	u64 *list = dev::at<u64>(k.Lists + (u64)cid * k.ListBytes);
	for (u32 n = 0; n < p.unit.count; n++) {
		u64 a = p.iova + (u64)dev::ld(dev::at<u32>(s.Pos, index_at(s, p.unit.first + n))) * (u64)s.DstStride;
		for (u64 j = n == 0; j < per; j++) {
			if (pages == 2) return a + j * page;
			dev::st(list++, a + j * page);
		}
	}
	return k.ListsIOVA + (u64)cid * k.ListBytes;
}

// A command's entry, as Command has it, but for its deadline and its state.
struct Prepared {
	u16 set, nlb;
	u32 index;
	u64 place, prp1, prp2, dst;
	i64 start;
};

// Makes the entry of a CID for a unit. One lane.
HX_DEVICE inline Prepared prepare(const QueueState &k, const SetState &s, u32 slot, u32 cid, u32 unit, const Place &p, i64 now) {
	u64 skip = (u64)p.unit.part * s.PartBlocks * (u32)s.Layout.LBABytes, total = (u64)p.blocks * (u32)s.Layout.LBABytes;
	Prepared c{(u16)slot, (u16)(p.blocks - 1), unit, placed(p.lba, p.byte), p.iova + (u64)p.at.off + skip, 0, 0, now};
	if (s.Direct != 0 && p.unit.count == 1) {
		c.prp2 = prp2(k, cid, c.prp1, total);
	} else if (s.Direct != 0 && scatters(k, s, p)) {
		c.prp2 = scatter(k, s, p, cid);
	} else {
		c.prp1 = k.StageIOVA + (u64)cid * k.StageBytes;
		c.prp2 = prp2(k, cid, c.prp1, total);
		c.dst = s.Dst + (u64)p.at.off + skip;
	}
	return c;
}

// The parts of an entry before Deadline.
static_assert(__builtin_offsetof(Command, Deadline) == 48, "three parts");
HX_DEVICE inline Entry entry(const Prepared &c) {
	return {{{c.set | (u32)c.nlb << 16, c.index, (u32)c.place, (u32)(c.place >> 32)}, {(u32)c.prp1, (u32)(c.prp1 >> 32), (u32)c.prp2, (u32)(c.prp2 >> 32)}, {(u32)c.dst, (u32)(c.dst >> 32), (u32)(u64)c.start, (u32)((u64)c.start >> 32)}, {}}};
}

// Puts a command in flight, for one attempt more than its state says, and returns that it is: its
// entry in the ring goes to the SSD after this. One lane.
HX_DEVICE inline u32 launch(const QueueState &k, Command *c, u32 state, i64 now) {
	dev::st_relaxed_gpu(&c->Deadline, now + k.TimeoutNS);
	// A search for late commands reads the state first, then the deadline.
	state = issued(state);
	dev::st_release_gpu(&c->State, state);
	return state;
}

// Where the ring has the n-th entry behind its tail.
HX_DEVICE inline u64 ring_line(const QueueState &k, u32 tail, u32 n) { return k.SQ + (u64)forward(k, tail, n) * commandBytes; }

// The lane's word of the bitmap of free CIDs. Words beyond NumCommands are 0. Only the holder of the submission side
// takes CIDs, others only give them back, by a release: a bit that is set stays so until the holder clears it. So
// this load is what acquires.
// litmus: cid-take
HX_DEVICE inline u32 free_word(QueueState *q) {
#ifdef HX_PLANT_CID_NOT_ACQUIRED
	return dev::ld_relaxed_gpu(&q->Free[dev::lane()]);
#else
	return dev::ld_acquire_gpu(&q->Free[dev::lane()]);
#endif
}

// Takes up to n free CIDs of one word, which one lane has in free (free_word), and returns them as bits; 0: none are
// free. *word is the word of the last ones and becomes that of these. The syncwarp takes the other lanes along; the
// read-modify-write only keeps bits that are given back meanwhile, and nothing waits for it. It comes before these
// CIDs are given back again, by way of the fence, the doorbell and the SSD.
// litmus: cid-take
HX_DEVICE inline u32 acquire(QueueState *q, u32 *free, u32 n, u32 *word) {
	u32 lane = dev::lane();
	u32 some = dev::ballot(dev::full_mask, *free != 0);
	if (some == 0) return 0;
	u32 later = some & ~below(*word); // *word < 32
	u32 w = dev::ctz(later != 0 ? later : some);
	u32 bits = dev::shfl(dev::full_mask, *free, w);
	u32 mask = dev::ballot(dev::full_mask, (bits >> lane & 1) != 0 && dev::popc(bits & below(lane)) < n);
	dev::syncwarp(); // every lane comes after the acquire
	if (leader()) dev::and_gpu<dev::relaxed>(&q->Free[w], ~mask);
	if (lane == w) *free &= ~mask;
	*word = w;
	return mask;
}

// The work of a refill, for the counters.
struct Refilled {
	u32 tail;
	u32 unrung; // SQEs that the SSD has not been told of
	u32 direct, staged, retried, rings;
	u32 coalesced; // rows that share a command
	u64 blocks;
};

HX_DEVICE inline void ring(const QueueState &k, Refilled *r) {
	ring_sq(k, r->tail);
	r->rings++;
	r->unrung = 0;
}

// Issues again what waits in Retry, in the order of CIDs. mine is the lane's word of Retry, or an earlier value
// of it: bits are only added meanwhile, and the exchange takes them all.
// litmus: retry-take
HX_DEVICE __forceinline__ void retry(QueueState *q, const QueueState &k, u64 sets, i64 now, u32 mine, Refilled *r) {
	u32 lane = dev::lane();
	if (mine != 0) mine = dev::exch_gpu<dev::acquire>(&q->Retry[lane], 0u);
	u32 some = dev::ballot(dev::full_mask, mine != 0);
	dev::syncwarp();
	for (; some != 0; some &= some - 1) {
		u32 w = dev::ctz(some);
		u32 m = dev::shfl(dev::full_mask, mine, w);
		u32 blocks = 0;
		u64 line = 0;
		Entry sqe{};
		if (m >> lane & 1) {
			u32 cid = w * 32 + lane;
			Command *c = dev::at<Command>(k.Commands, cid);
			u32 nlb = dev::ld(&c->NLB);
			u64 lba = lba_at(dev::ld(&c->Place)), prp1 = dev::ld(&c->PRP1), prp2 = dev::ld(&c->PRP2);
			SetState *s = set(sets, dev::ld(&c->Set));
			u32 state = launch(k, c, dev::ld_relaxed_gpu(&c->State), now);
			sqe = read_command(k, cid | (state & cmdGen), lba, nlb, prp1, prp2);
			line = ring_line(k, r->tail, dev::popc(m & below(lane)));
			blocks = nlb + 1;
			dev::add_gpu<dev::relaxed>(&s->Retries, 1u);
			dev::add_gpu<dev::relaxed>(&s->Blocks, (u64)blocks);
		}
		store_lines<4>(line, sqe);
		r->blocks += dev::reduce_add(dev::full_mask, blocks);
		u32 n = dev::popc(m);
		r->tail = forward(k, r->tail, n);
		r->retried += n;
		r->unrung += n;
	}
}

// Issues commands until the CIDs or the work run out: first those to be tried again, then the
// pending list. The caller holds the submission side. likely is the slot of a set that the list may begin with.
//
// It makes these trips, one after the other: to the holder's fields and the list's end; to the list's first entry and
// the free CIDs; to the commands' states with the rows (of runs: to their bounds, order and rows), after the set's
// unless it is the likely one; and the fence. A warp that later appends to the list or gives a CID back
// finds the side taken, so its holder looks again (take).
HX_DEVICE __forceinline__ void refill(QueueState *q, u32 g, u64 sets, bool completing, u32 likely) {
	u32 lane = dev::lane();
	Refilled r{};
	u32 cold = frozenNo, head = 0, scan = 0, listed = 0;
	QueueState k = fixed(q);
	if (leader()) {
		cold = dev::ld_relaxed_sys(&q->Frozen);
		head = dev::ld(&q->PendHead);
		r.tail = dev::ld(&q->Tail); // litmus: refill-begin
		scan = dev::ld(&q->Scan);
	}
	u32 waiting = dev::ld_relaxed_gpu(&q->Retry[lane]); // litmus: refill-begin
	u64 had = load_counts(&q->Issued, ownerCounters); // litmus: refill-begin
	if (leader()) listed = dev::ld_acquire_gpu(&q->PendTail); // litmus: pend-look, staging-look
	if (lead(cold) != frozenNo) return;
	head = lead(head);
	listed = lead(listed);
	r.tail = lead(r.tail);
	scan = lead(scan);
	i64 t = now();
	retry(q, k, sets, t, waiting, &r); // all lanes come after the list's end; litmus: staging-look
	u32 free = 0;
	for (bool first = true; head != listed; first = false) {
		u32 slot = 0, of = head % maxSets;
		i64 next = 0, end = 0;
		if (leader()) {
			slot = dev::ld(&q->PendRing[of]);
			next = dev::ld(&q->Pend[of].Next); // litmus: pend-look
			end = dev::ld(&q->Pend[of].End);
		}
		SetState s = fixed(set(sets, likely));
		if (first) {
			free = free_word(q);
			load_staging(&k, q); // litmus: staging-look
		}
		slot = lead(slot);
		next = lead(next);
		end = lead(end);
		u32 w = scan;
		u32 mask = acquire(q, &free, (u32)least(end - next, (i64)32), &w);
		if (mask == 0) break;
		scan = w;
		bool has = (mask >> lane & 1) != 0;
		u32 unit = (u32)next + dev::popc(mask & below(lane));
		u32 cid = w * 32 + lane, state = 0;
		Command *c = dev::at<Command>(k.Commands, cid);
		if (has) state = dev::ld_relaxed_gpu(&c->State); // with what locate loads under way, too; litmus: refill-issue
		SetState *counts = set(sets, slot);
		if (slot != likely) s = fixed(counts);
		Place p{};
		if (has) p = locate(k, s, unit);
		u32 bad = dev::ballot(dev::full_mask, has && p.at.bad != 0);
		fail_bad(k, counts, bad, p); // litmus: refill-bad
		u32 good = mask & ~bad, blocks = 0, rows = 0;
		Prepared made{};
		Entry sqe{};
		u64 line = 0, kept = 0;
		if (good >> lane & 1) {
			made = prepare(k, s, slot, cid, unit, p, t);
			state = launch(k, c, state, t); // litmus: refill-issue
			sqe = read_command(k, cid | (state & cmdGen), lba_at(made.place), made.nlb, made.prp1, made.prp2);
			line = ring_line(k, r.tail, dev::popc(good & below(lane)));
			kept = (u64)c;
			blocks = made.nlb + 1u;
			rows = p.unit.count > 1 ? p.unit.count : 0;
		}
		store_lines<3>(kept, entry(made)); // litmus: refill-issue
		store_lines<4>(line, sqe); // litmus: refill-issue
		u32 n = dev::popc(good), staged = dev::popc(dev::ballot(dev::full_mask, made.dst != 0));
		blocks = dev::reduce_add(dev::full_mask, blocks);
		r.coalesced += dev::reduce_add(dev::full_mask, rows);
		r.blocks += blocks;
		r.tail = forward(k, r.tail, n);
		r.unrung += n;
		r.staged += staged;
		r.direct += n - staged;
		next += dev::popc(mask);
#ifndef HX_PLANT_MISSING_BARRIER
		dev::syncwarp(); // the failed rows come before they are counted off; litmus: refill-bad
#endif
		if (next == end) head++;
		if (leader()) {
			// The list releases the set before its last commands become visible, since the host
			// may reuse the slot as soon as these complete.
			dev::st(&q->Pend[of].Next, next);
			if (next == end) dev::st(&q->PendHead, head);
			if (bad != 0) dev::or_gpu<dev::release>(&q->Free[w], bad); // litmus: refill-bad
			dev::add_gpu<dev::relaxed>(&counts->Issued, (u64)n);
			dev::add_gpu<dev::relaxed>(&counts->Blocks, (u64)blocks);
			if (bad != 0) dev::add_gpu<dev::release>(dev::at<u32>(s.Remaining, g), 0u - dev::popc(bad)); // litmus: refill-bad
		}
		if (lane == w) free |= bad;
		if (r.unrung >= ringEvery) ring(k, &r);
	}
	if (r.unrung > 0) ring(k, &r); // litmus: refill-issue
	if (leader()) {
		dev::st(&q->Tail, r.tail); // litmus: refill-end
		dev::st(&q->Scan, scan);
	}
	store_counts(&q->Issued, ownerCounters, had, owner_count(r.direct, r.staged, r.retried, r.rings, completing ? r.direct + r.staged : 0, r.blocks, r.coalesced)); // litmus: refill-end
}

// Refills a queue, or leaves that to whoever holds its submission side.
HX_DEVICE __forceinline__ void serve(QueueState *q, u32 g, u64 sets, bool completing, u32 likely) {
	if (!take(q)) return;
	do refill(q, g, sets, completing, likely);
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

// Copies the rows of the lanes in mask, as copy_rows, whatever their sizes.
template <u32 Loads> HX_DEVICE inline void copy_all(u32 mask, u64 dst, u64 src, u32 bytes) {
	while (mask != 0) {
		u32 size = dev::shfl(dev::full_mask, bytes, dev::ctz(mask));
		u32 same = dev::ballot(dev::full_mask, bytes == size) & mask;
		copy_rows<Loads>(same, dst, src, size);
		mask &= ~same;
	}
}

// Copies the rows of staged runs: each lane has one with count rows from a place of its set's Order on,
// read from lba on by the command of a CID, or none (count 0). The rows of all lanes are taken 32 at a time.
template <u32 Loads> HX_DEVICE inline void copy_runs(const QueueState &k, u64 sets, u32 slot, u32 cid, u64 lba, i64 first, u32 count) {
	u32 lane = dev::lane(), upto = warp_scan(count), before = upto - count;
	u32 total = dev::shfl(dev::full_mask, upto, 31);
	for (u32 base = 0; base < total; base += 32) {
		// Whose row is it? That of the first lane up to which there are more.
		u32 n = base + lane, who = 0;
		for (u32 d = 16; d > 0; d /= 2)
			if (dev::shfl(dev::full_mask, upto, who + d - 1) <= n) who += d;
		const SetState *s = set(sets, dev::shfl(dev::full_mask, slot, who));
		u32 id = dev::shfl(dev::full_mask, cid, who);
		u64 from = dev::shfl(dev::full_mask, lba, who) - k.DataStart;
		i64 place = dev::shfl(dev::full_mask, first, who) + n - dev::shfl(dev::full_mask, before, who);
		u64 dst = 0, src = 0;
		u32 bytes = 0;
		if (n < total) {
			const Layout &l = s->Layout;
			i64 i = index_at(*s, place);
			u64 to = divide((u64)dev::ld(dev::at<i64>(s->Rows, i)), (u32)l.SSDs);
			dst = s->Dst + (u64)dev::ld(dev::at<u32>(s->Pos, i)) * (u64)s->DstStride;
#ifdef HX_PLANT_RUN_OFFSET
			from = lba_of(l, to);
#endif
			src = k.Stage + (u64)id * k.StageBytes + (lba_of(l, to) - from) * (u32)l.LBABytes + byte_of(l, to);
			bytes = (u32)l.RowBytes;
		}
		copy_all<Loads>(dev::ballot(dev::full_mask, n < total), dst, src, bytes);
	}
}

// Has a lower lane of the first n the same CID? One ballot per bit. Of two generations of one the first that
// is not in flight is foreign, and what follows it is left alone.
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

// Counts the latencies of the lanes in which good is set. Once per bucket, as read-modify-writes of one word
// wait for each other.
HX_DEVICE inline void tally(const QueueState &k, bool good, i64 ns) {
	u32 bucket = hist_bucket(ns);
	for (u32 m = dev::ballot(dev::full_mask, good); m != 0;) {
		u32 one = dev::shfl(dev::full_mask, bucket, dev::ctz(m));
		u32 same = dev::ballot(dev::full_mask, good && bucket == one);
		if (leader()) dev::add_gpu<dev::relaxed>(&dev::at<Histogram>(k.Hist)->Counts[one], (u64)dev::popc(same));
		m &= ~same;
	}
}

// Gives back the CIDs of the lanes in which done is set, which are different; once per word, as above.
// All lanes are done with what belongs to them; that comes before by the syncwarp. Generations stay.
HX_DEVICE inline void free_cids(QueueState *q, const QueueState &k, bool done, u32 cid, u32 state) {
	if (done) dev::st_relaxed_gpu(&dev::at<Command>(k.Commands, cid)->State, (state & cmdGen) | cmdFree);
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
