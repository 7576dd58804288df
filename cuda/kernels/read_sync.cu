// Kernel "read_sync": the synchronous stack that the asynchronous one is measured against, in the
// manner of BaM (Qureshi et al., ASPLOS 2023): the warp that issues a read waits for it.
//
// Shape: one unit (a row, or a part of a split one; never a run) per warp at a time; warp w serves queue w mod NumQueues (and w + warps, … where
// warps are fewer) and takes the next row of that queue's share until there are none. Bytes as in submit and complete together.
//
// Ownership: a warp takes a CID first and a unit then, so that none is begun that cannot be issued.
// Own is held for one SQE and its doorbell, Reap for one sweep of up to 32 completions. The sweeper
// marks the commands it finds cmdDone; the warp that issued a command finishes it. A command past its
// deadline or a completion that names no command in flight freezes the queue, and all its warps
// leave; what they had in flight stays taken, and what they had not begun is for the host.
//
// Memory order: as submit and complete; between sweeper and issuer the release of State. The CQ
// doorbell comes before the marks, since a CID that is used again before it could find the CQ full.
// A warp that leaves looks at its command once more under Reap, and a sweep that finds its queue
// frozen under Reap does nothing: so no command is marked after its warp has gone.
//
// Must match: gpuio/readsync.go.
//
// Bandwidth: warps × row bytes / latency of a read, until locks and doorbells bound it: one SQE per
// doorbell, one CID per atomic. That this needs many more warps than async is what is measured.
#include "queue.h"

namespace {

constexpr u32 pauseMin = 32, pauseMax = 512;

// Holds the submission side for this warp; other warps have it for the length of one SQE. False
// after the deadline.
// litmus: sync-hold
HX_DEVICE bool hold(QueueState *q, i64 until) {
	u32 got = 0;
	if (io::leader()) {
		for (;;) {
			got = dev::cas_gpu<dev::acquire>(&q->Own, ownFree, ownHeld) == ownFree;
			if (got || dev::now_ns() >= until) break;
			dev::pause(pauseMin);
		}
	}
	got = io::lead(got);
	dev::syncwarp();
	return got != 0;
}

// Lets go. No kernel that leaves work to the holder runs beside this one (gpuio/sync.go).
HX_DEVICE __forceinline__ void let_go(QueueState *q) {
	while (!io::release(q)) {
	}
}

// litmus: sync-give-back
HX_DEVICE void give_back(QueueState *q, u32 cid) {
	dev::syncwarp(); // all lanes are done with what belongs to it
	if (io::leader()) {
		u32 *state = &dev::at<Command>(q->Commands, cid)->State;
		dev::st_relaxed_gpu(state, (dev::ld_relaxed_gpu(state) & cmdGen) | cmdFree);
		dev::or_gpu<dev::release>(&q->Free[cid / 32], 1u << (cid % 32));
	}
}

// A free CID; NumCommands when there is none. Any warp may take one here, so it is taken by the
// read-modify-write that finds it still free.
// litmus: sync-take-cid
HX_DEVICE __forceinline__ u32 take_cid(QueueState *q) {
	u32 lane = dev::lane(), words = (q->NumCommands + 31) / 32;
	u32 free = lane < words ? dev::ld_relaxed_gpu(&q->Free[lane]) : 0;
	u32 some = dev::ballot(dev::full_mask, free != 0);
	u32 cid = q->NumCommands;
	// Warps begin at different places, or all would try for the same CID.
	u32 start = dev::warp() / 32 % words, bias = dev::warp() % 32;
	some = some & ~io::below(start) ? some & ~io::below(start) : some;
	for (; some != 0 && cid == q->NumCommands; some &= some - 1) {
		u32 w = dev::ctz(some);
		u32 m = dev::shfl(dev::full_mask, free, w);
		if (io::leader()) {
			while (m != 0) {
				u32 high = m & ~io::below(bias), pick = high != 0 ? high : m, bit = pick & (0u - pick);
				m &= ~bit;
				if (dev::and_gpu<dev::acquire>(&q->Free[w], ~bit) & bit) {
					cid = w * 32 + dev::ctz(bit);
					break;
				}
			}
		}
		cid = io::lead(cid);
	}
	dev::syncwarp();
	return cid;
}

// Rings for the one SQE that the leader has stored. The caller holds the submission side; had is what its
// counters were, more what they rise by.
HX_DEVICE __forceinline__ void issue(QueueState *q, const QueueState &k, u32 tail, u64 had, u64 more) {
	tail = io::forward(k, tail, 1);
	if (io::leader()) dev::st(&q->Tail, tail);
	io::ring_sq(k, tail);
	io::store_counts(&q->Issued, io::ownerCounters, had, more);
}

// Reaps up to 32 contiguous completions, if nobody else does. False: nothing was there for it.
// litmus: sync-reap
HX_DEVICE __forceinline__ bool sweep(QueueState *q) {
	u32 lane = dev::lane(), got = 0;
	if (io::leader()) got = dev::cas_gpu<dev::acquire>(&q->Reap, 0u, 1u) == 0;
	if (io::lead(got) == 0) return false;
	dev::syncwarp();
	u32 n = 0, last = 0, head = 0, phase = 0;
	u32 cold = frozenNo;
	QueueState k = io::fixed(q);
	if (io::leader()) {
		cold = dev::ld_relaxed_sys(&q->Frozen);
		head = dev::ld(&q->Head);
		phase = dev::ld(&q->Phase);
	}
	if (io::lead(cold) == frozenNo) {
		head = io::lead(head);
		phase = io::lead(phase);
		bool fresh = false;
		if (lane < k.Entries) {
			u32 at = head + lane, want = phase;
			if (at >= k.Entries) {
				at -= k.Entries;
				want ^= 1;
			}
			last = dev::ld_acquire_sys(dev::at<u32>(k.CQ, (i64)at * (completionBytes / 4) + 3));
			fresh = (last >> 16 & 1) == want;
		}
		u32 seen = dev::ballot(dev::full_mask, fresh);
		n = ~seen == 0 ? 32 : dev::ctz(~seen);
	}
	if (n > 0) {
		dev::syncwarp();
		i64 now = io::now();
		u32 cid = last & cidMask, state = 0;
		Command *c = dev::at<Command>(k.Commands, cid);
		if (lane < n && cid < k.NumCommands) state = dev::ld_relaxed_gpu(&c->State);
		u64 had = io::load_counts(&q->Completed, io::completerCounters); // under way with State
		bool twice = io::repeated(cid, n);
		u32 strays = dev::ballot(dev::full_mask, lane < n && (twice || !io::answers(state, last)));
		bool foreign = strays != 0;
		if (foreign) n = dev::ctz(strays) + 1;
		bool mine = lane < n - (foreign ? 1 : 0);
		u32 status = last >> 17;
		bool good = mine && io::status_ok(status);
		u32 errors = dev::popc(dev::ballot(dev::full_mask, mine && !good));
		i64 start = now;
		if (good) start = dev::ld(&c->Start);
		io::tally(k, good, now - start);
		u32 at = io::forward(k, head, n);
		if (io::leader()) {
			dev::st(&q->Head, at);
			if (head + n >= k.Entries) dev::st(&q->Phase, phase ^ 1);
			if (foreign) io::freeze(q, frozenForeign);
			dev::ring(dev::at<u32>(k.CQDoorbell), at);
		}
		io::store_counts(&q->Completed, io::completerCounters, had, io::completer_count(n - (foreign ? 1 : 0), errors, foreign ? 1 : 0, 1));
		dev::syncwarp();
		if (mine) {
			dev::st_relaxed_gpu(&c->Deadline, (i64)status);
			dev::st_release_gpu(&c->State, (state & ~cmdState) | cmdDone);
		}
	}
	dev::syncwarp();
	if (io::leader()) dev::st_release_gpu(&q->Reap, 0u);
	return n > 0;
}

// Is the command done? Its status then. All lanes come after the completion.
// litmus: sync-finished
HX_DEVICE bool finished(const Command *c, u32 *state, u32 *status) {
	u32 v = 0, st = 0;
	if (io::leader()) {
		v = dev::ld_acquire_gpu(&c->State);
		if ((v & cmdState) == cmdDone) st = (u32)dev::ld_relaxed_gpu(&c->Deadline);
	}
	*state = io::lead(v);
	*status = io::lead(st);
	dev::syncwarp();
	return (*state & cmdState) == cmdDone;
}

// Waits for a command. False: its queue is frozen and the command is not done.
HX_DEVICE __forceinline__ bool await(QueueState *q, const Command *c, i64 due, u32 *state, u32 *status) {
	u32 pause = pauseMin;
	while (!finished(c, state, status)) {
		if (sweep(q)) {
			pause = pauseMin;
			continue;
		}
		u32 over = 0;
		if (io::leader()) {
			i64 now = dev::now_ns();
			if (now >= due && dev::cas_gpu<dev::acq_rel>(&q->Frozen, frozenNo, frozenTimeout) == frozenNo) dev::st(&q->ScanAt, now);
			if (dev::ld_relaxed_sys(&q->Frozen) != frozenNo) over = 1; // litmus: sync-leave
		}
		if (io::lead(over) != 0) {
			// Once nobody sweeps, what is not marked will not be.
			u32 got = 0;
			if (io::leader()) {
				i64 until = dev::now_ns() + q->TimeoutNS; // others have it for the length of a sweep
				while ((got = dev::cas_gpu<dev::acquire>(&q->Reap, 0u, 1u) == 0) == 0 && dev::now_ns() < until) dev::pause(pauseMin); // litmus: sync-leave
			}
			got = io::lead(got);
			dev::syncwarp();
			bool done = finished(c, state, status); // litmus: sync-leave
			if (got != 0 && io::leader()) dev::st_release_gpu(&q->Reap, 0u); // litmus: sync-leave
			return done;
		}
		dev::pause(pause);
		pause = io::least(pause * 2, pauseMax);
	}
	return true;
}

// Leaves a command that could not be issued to the host, for its retry list.
HX_DEVICE void leave_to_host(QueueState *q, u32 cid, u32 attempts) {
	if (io::leader()) {
		u32 *state = &dev::at<Command>(q->Commands, cid)->State;
		dev::st_relaxed_gpu(state, (dev::ld_relaxed_gpu(state) & cmdGen) | attempts * cmdAttempt | cmdRetry);
		dev::or_gpu<dev::release>(&q->Retry[cid / 32], 1u << (cid % 32));
	}
}

// Reads units of queue g's share until there are none, the queue is frozen or the time is over.
HX_DEVICE __forceinline__ void work(const SyncParams &p, SetState *s, u32 g, i64 until) {
	QueueState *q = io::queue(p.Queues, g);
	i64 from = dev::ld(dev::at<i64>(s->Units, 2 * (i64)q->SSD));
	i64 to = dev::ld(dev::at<i64>(s->Units, 2 * (i64)q->SSD + 1));
	i64 first, end;
	io::share(to - from, g % p.QueuesPerSSD, p.QueuesPerSSD, s->Rotate, &first, &end);
	u32 units = (u32)(end - first);
	u32 *taken = dev::at<u32>(s->Taken, g), *remaining = dev::at<u32>(s->Remaining, g);
	u32 pause = pauseMin;
	for (;;) {
		u32 go = 0;
		if (io::leader()) go = dev::ld_relaxed_gpu(taken) < units && dev::ld_relaxed_sys(&q->Frozen) == frozenNo && dev::now_ns() < until;
		if (io::lead(go) == 0) break;
		u32 cid = take_cid(q);
		if (cid == q->NumCommands) {
			dev::pause(pause);
			pause = io::least(pause * 2, pauseMax);
			continue;
		}
		pause = pauseMin;
		u32 n = 0;
		if (io::leader()) n = dev::add_gpu<dev::relaxed>(taken, 1u); // litmus: sync-unit
		n = io::lead(n);
		if (n >= units) {
			give_back(q, cid);
			break;
		}
		u32 unit = (u32)(from + first) + n;
		SetState at = io::fixed(s);
		io::Place place = io::locate(*q, at, unit);
		if (place.at.bad != 0) {
			io::fail_bad(*q, s, 1, place);
			give_back(q, cid);
			if (io::leader()) dev::add_gpu<dev::release>(remaining, ~0u);
			continue;
		}
		Command *c = dev::at<Command>(q->Commands, cid);
		u32 bytes = io::row_bytes(at, place.unit.part, place.blocks), state = 0, tries = 0;
		io::Prepared made{};
		if (io::leader()) made = io::prepare(*q, at, p.Set, cid, unit, place, 0);
		bool left = false;
		for (;;) {
			QueueState k = io::fixed(q);
			bool held = hold(q, dev::now_ns() + k.TimeoutNS);
			u64 had = io::load_counts(&q->Issued, io::ownerCounters); // under way with Frozen
			u32 cold = io::frozen(q), tail = 0, status = 0;
			i64 now = io::now();
			if (tries == 0) {
				if (io::leader()) state = dev::ld_relaxed_gpu(&c->State);
				made.start = now;
				io::store_lines<3>(io::leader() ? (u64)c : 0, io::entry(made));
			}
			bool go = held && cold == frozenNo;
			u64 dst = io::lead(made.dst);
			if (go) {
				io::Entry sqe{};
				if (io::leader()) {
					tail = dev::ld(&q->Tail); // litmus: sync-tail
					state = io::launch(k, c, state, now);
					sqe = io::read_command(k, cid | (state & cmdGen), io::lba_at(made.place), made.nlb, made.prp1, made.prp2);
					if (tries == 0)
						dev::add_gpu<dev::relaxed>(&s->Issued, (u64)1);
					else
						dev::add_gpu<dev::relaxed>(&s->Retries, 1u);
					dev::add_gpu<dev::relaxed>(&s->Blocks, (u64)place.blocks);
				}
				io::store_lines<4>(io::leader() ? io::ring_line(k, tail, 0) : 0, sqe);
				bool fresh = tries == 0;
				issue(q, k, io::lead(tail), had, io::owner_count(fresh && dst == 0, fresh && dst != 0, !fresh, 1, 0, place.blocks, 0)); // litmus: sync-issue
			} else {
				leave_to_host(q, cid, tries);
			}
			if (held) let_go(q); // litmus: sync-issue
			if (!go) {
				left = true;
				break;
			}
			if (!await(q, c, now + k.TimeoutNS, &state, &status)) {
				left = true;
				break;
			}
			tries = state / cmdAttempt;
			if (io::status_ok(status)) {
				if (dst != 0) io::copy_rows<4>(1, dst, q->Stage + (u64)cid * q->StageBytes + place.byte, bytes); // litmus: sync-copy
			} else if (!io::status_dnr(status) && tries <= q->Retries) {
				continue;
			} else {
				u16 kind = (state & cmdAborted) != 0 && (status & 0x7ff) == io::statusAborted ? failTimeout : failStatus;
				io::fail_command(*q, p.Sets, cid, state, kind, status);
			}
			break;
		}
		if (left) break;
		give_back(q, cid);
		if (io::leader()) dev::add_gpu<dev::release>(remaining, ~0u);
	}
}

} // namespace

HX_KERNEL(read_sync, SyncParams) {
	if (dev::dropped(hx)) return;
	SetState *s = io::set(p.Sets, p.Set);
	i64 begun = io::now();
	if (io::leader()) {
		dev::cas_gpu<dev::relaxed>((u64 *)&s->StartNS, (u64)0, (u64)begun);
		dev::max_gpu<dev::relaxed>(&s->SubmitNS, begun);
	}
	// With fewer warps than queues a warp serves several, one after the other.
	for (u32 g = dev::warp() % p.NumQueues; g < p.NumQueues; g += dev::warps()) work(p, s, g, begun + p.LimitNS);
	if (io::leader()) dev::max_gpu<dev::relaxed>(&s->DoneNS, dev::now_ns());
}
