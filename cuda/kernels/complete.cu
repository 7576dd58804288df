// Kernel "complete": reaps the queue pairs until all units of one read set are done, or LimitNS is
// over; the host then launches it again.
//
// Shape: one warp for each contiguous range of queue pairs (blocks of one warp). Each lane looks at
// one of 32 completion entries; the contiguous new ones are retired whatever set they belong to.
// 16 bytes read per CQE, 64 per command entry; a staged row is read and written once. A command's unit
// (gpuio/abi.go, setState) is a row, a part of one, or a run of rows, which the warp copies 32 at a time
// from where each lies in the staging slot.
//
// Ownership: the warp is the only completer of its queues (one complete kernel runs at a time). It
// holds a queue's submission side only to refill it, or leaves that to a submit kernel which has it.
// A queue that its SSD fills as fast as the warp sweeps it does not keep the warp: others, and the end of
// the launch, are looked at after maxSweeps.
// A queue that is frozen belongs to the host: a command past its deadline, or a completion that names
// no command in flight, freezes it, and then its commands, CIDs and destinations stay taken.
//
// Memory order: ld.acquire.sys of the CQE's last dword, which holds phase, status and CID; syncwarp;
// only then command entries and staged data. CQ doorbell, then the CIDs and the retries by release, since a
// command issued before the doorbell could find the CQ full. The copies of all lanes, syncwarp, then release
// of CIDs and of Remaining.
//
// Must match: gpuio/complete.go, byte for byte but for times.
//
// Bandwidth: staged rows twice their size, and 16 bytes more per row of a run (its place in the order, row
// and position); others 80 bytes per command. Bound by the latency of polling and of refilling; one warp per queue
// hides none, so queues are what is added. A warp waits for memory most of the time, and tools/gpucost
// holds the number of these trips in the committed PTX to a budget. Only completions and staged data, on rungs that have them
// there, are in the CPU's memory. A look
// at an idle queue waits for its state, the CQEs, Remaining and ScanAt; a sweep for its state, the CQEs, the commands'
// states, their entries and the staged rows; a refill for what queue.h says. Counters cost nothing (queue.h,
// load_counts). Staged rows are read eight 16-byte words per lane at a time, 4 KiB per way.
#include "queue.h"

namespace {

// sweep returns this for a frozen queue.
constexpr u32 cooled = 33;

// Retires up to 32 contiguous new completions and returns their number, or cooled. likely is the
// slot of a set that they may be of.
HX_DEVICE __forceinline__ u32 sweep(QueueState *q, u32 g, u64 sets, u32 likely) {
	u32 lane = dev::lane();
	u32 cold = frozenNo, head = 0, phase = 0;
	QueueState k = io::fixed(q);
	if (io::leader()) {
		cold = dev::ld_relaxed_sys(&q->Frozen);
		head = dev::ld(&q->Head);
		phase = dev::ld(&q->Phase);
	}
	if (io::lead(cold) != frozenNo) return cooled;
	head = io::lead(head);
	phase = io::lead(phase);
	// A ring of less than 32 entries has no more than Entries places to look at.
	u32 last = 0;
	bool fresh = false;
	if (lane < k.Entries) {
		u32 place = head + lane;
		u32 want = phase;
		if (place >= k.Entries) {
			place -= k.Entries;
			want ^= 1;
		}
		const u32 *word = dev::at<u32>(k.CQ, (i64)place * (completionBytes / 4) + 3);
#ifdef HX_PLANT_COMPLETION_BEFORE_DATA
		last = dev::ld_relaxed_sys(word);
#else
		last = dev::ld_acquire_sys(word); // litmus: reap
#endif
		fresh = (last >> 16 & 1) == want;
	}
	u32 seen = dev::ballot(dev::full_mask, fresh);
	u32 n = ~seen == 0 ? 32 : dev::ctz(~seen);
	if (n == 0) return 0;
	dev::syncwarp(); // every lane comes after all the acquires; litmus: reap
	i64 now = io::now();

	// Which of them name a command in flight and its attempt, each command once? What follows the first that does
	// not is left alone.
	u32 cid = last & cidMask;
	Command *c = dev::at<Command>(k.Commands, cid);
	u32 state = 0;
	if (lane < n && cid < k.NumCommands) state = dev::ld_relaxed_gpu(&c->State); // litmus: reap
	u64 had = io::load_counts(&q->Completed, io::completerCounters); // under way with State, as this:
	SetState s = io::fixed(io::set(sets, likely));
	io::load_staging(&k, q);
	bool twice = io::repeated(cid, n);
	u32 strays = dev::ballot(dev::full_mask, lane < n && (twice || !io::answers(state, last)));
	bool foreign = strays != 0;
	if (foreign) n = dev::ctz(strays) + 1;
	bool mine = lane < n - (foreign ? 1 : 0);

	u32 slot = 0, status = last >> 17, unit = 0, blocks = 0, offset = 0;
	u64 dst = 0, src = 0, lba = 0;
	i64 start = 0;
	if (mine) { // all of it under way at the same time: Set to Place, Dst and Start
		u32x4 what = dev::ld16_global(&c->Set), where = dev::ld16_global(&c->Dst); // litmus: reap
		slot = what.x & 0xffff;
		blocks = (what.x >> 16) + 1;
		unit = what.y;
		u64 place = what.z | (u64)what.w << 32;
		lba = io::lba_at(place);
		offset = io::byte_at(place);
		dst = where.x | (u64)where.y << 32;
		start = (i64)(where.z | (u64)where.w << 32);
	}
	if (mine && slot != likely) s = io::fixed(io::set(sets, slot));
	u32 tries = state / cmdAttempt;
	bool good = mine && io::status_ok(status);
	bool again = mine && !good && !io::status_dnr(status) && tries <= k.Retries;
	bool done = mine && !again;
	u32 errors = dev::popc(dev::ballot(dev::full_mask, mine && !good));

#ifdef HX_PLANT_CID_BEFORE_COPY
	io::free_cids(q, k, done, cid, state);
#endif
	// Staged data, by the whole warp: what is of one row at once, runs row by row.
	u32 bytes = 0, run = 0;
	i64 place = 0;
	if (good && dst != 0) {
		io::Unit u = io::unit_at(s, unit);
		if (u.count > 1) {
			run = u.count;
			place = u.first;
		} else {
			src = k.Stage + (u64)cid * k.StageBytes + offset;
			bytes = io::row_bytes(s, u.part, blocks);
		}
	}
	io::copy_all<8>(dev::ballot(dev::full_mask, src != 0), dst, src, bytes); // litmus: reap
	if (dev::any(dev::full_mask, run != 0)) io::copy_runs<8>(*q, sets, slot, cid, lba, place, run);
	io::tally(k, good, now - start);

	// Final failures, in the order of the ring.
	u16 kind = (state & cmdAborted) != 0 && (status & 0x7ff) == io::statusAborted ? failTimeout : failStatus;
	for (u32 m = dev::ballot(dev::full_mask, done && !good); m != 0; m &= m - 1) {
		u32 from = dev::ctz(m);
		io::fail_command(*q, sets, dev::shfl(dev::full_mask, cid, from), dev::shfl(dev::full_mask, state, from), (u16)dev::shfl(dev::full_mask, (u32)kind, from), dev::shfl(dev::full_mask, status, from));
	}

	dev::syncwarp(); // all lanes have copied and read what belongs to the CIDs; litmus: reap
	u32 next = io::forward(k, head, n);
	if (io::leader()) {
		dev::st(&q->Head, next);
		if (head + n >= k.Entries) dev::st(&q->Phase, phase ^ 1);
		dev::ring(dev::at<u32>(k.CQDoorbell), next); // litmus: reap
	}
	dev::syncwarp(); // no CID before the doorbell, and no retry; litmus: reap
	// litmus: reap
	if (again) {
		dev::st_relaxed_gpu(&c->State, (state & ~cmdState) | cmdRetry);
		dev::or_gpu<dev::release>(&q->Retry[cid / 32], 1u << (cid % 32));
	}
#ifndef HX_PLANT_CID_BEFORE_COPY
	io::free_cids(q, k, done, cid, state); // litmus: reap
#endif
	// Completions mostly come in runs of one set.
	for (u32 m = dev::ballot(dev::full_mask, done); m != 0;) {
		u32 of = dev::shfl(dev::full_mask, slot, dev::ctz(m));
		u32 same = dev::ballot(dev::full_mask, done && slot == of);
		u64 left = dev::shfl(dev::full_mask, s.Remaining, dev::ctz(m));
		if (io::leader()) dev::add_gpu<dev::release>(dev::at<u32>(left, g), 0u - dev::popc(same)); // litmus: reap
		m &= ~same;
	}
	io::store_counts(&q->Completed, io::completerCounters, had, io::completer_count(n - (foreign ? 1 : 0), errors, foreign ? 1 : 0, 1));
	if (foreign) {
		dev::syncwarp();
		if (io::leader()) io::freeze(q, frozenForeign); // last: the queue is the host's from here on
	}
	return n;
}

// The earliest deadline of the commands in flight.
// litmus: deadline-look
HX_DEVICE i64 oldest(const QueueState *q) {
	u32 lane = dev::lane(), words = (q->NumCommands + 31) / 32;
	i64 first = 0x7fffffffffffffff;
	for (u32 w = 0; w < words; w++) {
		u32 cid = w * 32 + lane;
		if (cid >= q->NumCommands || (dev::ld_relaxed_gpu(&q->Free[w]) >> lane & 1) != 0) continue;
		const Command *c = dev::at<Command>(q->Commands, cid);
		if ((dev::ld_acquire_gpu(&c->State) & cmdState) == cmdInFlight) first = io::least(first, dev::ld_relaxed_gpu(&c->Deadline));
	}
	for (u32 d = 16; d > 0; d /= 2) first = io::least(first, dev::shfl(dev::full_mask, first, lane ^ d));
	return first;
}

#ifdef HX_PLANT_SKIP_QUARANTINE
// The mistake: late commands fail at once and their CIDs go back, while the SSD still has them.
HX_DEVICE void drop_late(QueueState *q, u32 g, u64 sets, i64 now) {
	u32 lane = dev::lane();
	for (u32 w = 0; w * 32 < q->NumCommands; w++) {
		u32 cid = w * 32 + lane, state = cmdFree;
		Command *c = dev::at<Command>(q->Commands, cid);
		if (cid < q->NumCommands && (dev::ld_relaxed_gpu(&q->Free[w]) >> lane & 1) == 0) state = dev::ld_acquire_gpu(&c->State);
		bool late = (state & cmdState) == cmdInFlight && dev::ld_relaxed_gpu(&c->Deadline) <= now;
		for (u32 m = dev::ballot(dev::full_mask, late); m != 0; m &= m - 1) {
			u32 from = dev::ctz(m);
			io::fail_command(*q, sets, w * 32 + from, dev::shfl(dev::full_mask, state, from), failTimeout, 0);
			SetState *s = io::set(sets, dev::ld(&dev::at<Command>(q->Commands, w * 32 + from)->Set));
			dev::syncwarp();
			if (lane == from) {
				dev::st_relaxed_gpu(&c->State, (state & cmdGen) | cmdFree);
				dev::or_gpu<dev::release>(&q->Free[w], 1u << lane);
				dev::add_gpu<dev::release>(dev::at<u32>(s->Remaining, g), ~0u);
			}
		}
	}
	dev::syncwarp();
}
#endif

// Freezes the first queue with a command past its deadline. Commands are looked at only once per
// timeout.
HX_DEVICE void deadlines(u64 queues, u32 lo, u32 hi, u64 sets) {
	i64 now = io::now();
	for (u32 g = lo; g < hi; g++) {
		QueueState *q = io::queue(queues, g);
		i64 at = 0;
		u32 cold = frozenNo;
		if (io::leader()) {
			at = dev::ld(&q->ScanAt);
			cold = dev::ld_relaxed_sys(&q->Frozen);
		}
		at = io::lead(at);
		if (at > now || io::lead(cold) != frozenNo) continue;
		if (at == 0) {
			at = now + q->TimeoutNS;
		} else {
			i64 next = oldest(q);
			if (next <= now) {
#ifdef HX_PLANT_SKIP_QUARANTINE
				drop_late(q, g, sets, now);
				next = oldest(q);
#else
				if (io::leader()) {
					dev::st(&q->ScanAt, now);
					io::freeze(q, frozenTimeout);
				}
				dev::syncwarp();
				return;
#endif
			}
			at = io::least(next, now + q->TimeoutNS);
		}
		if (io::leader()) dev::st(&q->ScanAt, at);
	}
	(void)sets;
}

// Has the set rows left at queues outside lo..hi that their warps can finish?
HX_DEVICE __forceinline__ bool waits(const CompleteParams &p, u64 remaining, u32 lo, u32 hi) {
	bool some = false;
	for (u32 g = dev::lane(); g < p.NumQueues; g += 32) {
		if (g >= lo && g < hi) continue;
		if (dev::ld_relaxed_gpu(dev::at<u32>(remaining, g)) != 0 && dev::ld_relaxed_sys(&io::queue(p.Queues, g)->Frozen) == frozenNo) some = true;
	}
	return dev::any(dev::full_mask, some);
}

constexpr u32 pauseMin = 64, pauseMax = 1024; // ns between looks at queues that have nothing

} // namespace

HX_KERNEL(complete, CompleteParams) {
	SetState *s = io::set(p.Sets, p.Set);
	u64 remaining = dev::ld(&s->Remaining); // under way with what dropped looks at
	if (dev::dropped(hx)) return;
	u32 lo, hi;
	io::range(p.NumQueues, &lo, &hi);
	i64 until = io::now() + p.LimitNS;
	u32 pause = pauseMin;
	// The first look at a queue also issues what waits there, such as what the host has left after a
	// recovery.
	for (bool first = true;; first = false) {
		bool progress = false, busy = false, inFlight = false;
		for (u32 g = lo; g < hi; g++) {
			QueueState *q = io::queue(p.Queues, g);
			u32 n, sweeps = 0;
			do {
				n = sweep(q, g, p.Sets, p.Set);
				if (n == cooled) break;
				if (n > 0) progress = true;
				if (n > 0 || (first && sweeps == 0)) io::serve(q, g, p.Sets, true, p.Set);
			} while (n == 32 && ++sweeps < maxSweeps);
			u32 left = 0, flying = 0, cold = n == cooled;
			if (io::leader() && cold == 0) {
				// Acquire: a submit kernel may have counted off the last rows, as bad ones.
				left = dev::ld_acquire_gpu(dev::at<u32>(remaining, g)); // litmus: complete-look
				cold = n > 0 || first ? dev::ld_relaxed_sys(&q->Frozen) : frozenNo; // in the same way
				if (left == 0) flying = dev::ld_relaxed_gpu(&q->Issued) != dev::ld_relaxed_gpu(&q->Completed) + dev::ld_relaxed_gpu(&q->Dropped);
			}
			if (io::lead(cold) != frozenNo) continue;
			if (io::lead(left) != 0) busy = true;
			if (io::lead(flying) != 0) inFlight = true;
		}
		// The next set's complete kernel starts only when all warps of this one are done. A warp
		// that is done early keeps its queues going meanwhile, if they have commands of later sets.
		bool done = !busy && !(inFlight && waits(p, remaining, lo, hi));
		i64 now = io::now();
		if (!done && !progress) {
			deadlines(p.Queues, lo, hi, p.Sets);
			dev::pause(pause);
			pause = io::least(pause * 2, pauseMax);
		}
		if (done || now >= until) {
			if (io::leader()) dev::max_gpu<dev::relaxed>(&s->DoneNS, now);
			return;
		}
		if (progress) pause = pauseMin;
	}
}
