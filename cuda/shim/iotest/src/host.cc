#include "host.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace iotest {

namespace {
constexpr u64 guard = 256;

u8 *pages(u64 bytes, u64 page) {
	void *p = nullptr;
	bytes = (bytes + page - 1) / page * page + page;
	if (posix_memalign(&p, 4096, bytes) != 0) abort();
	return (u8 *)p;
}
u64 address(const void *p) { return (u64)(uintptr_t)p; }
void count(u64 *c, u64 n) { __atomic_store_n(c, *c + n, __ATOMIC_RELAXED); }
} // namespace

bool quiet_queue(Run &run, u32 g) { return run.host->quiet(g); }

bool Host::quiet(u32 g) {
	return load(&all_submitted) != 0 && load(&run.submit.head) == load(&run.submit.tail) && peek(&queues[g].PendHead) == peek(&queues[g].PendTail);
}

// As gpuio.NewLayout, listBytes, stageBytes and async.open.
Host::Host(Run &r) : run(r), rng(r.cfg.seed ^ 0x5bd1e995) {
	const Config &c = run.cfg;
	layout.Rows = c.universe;
	layout.RowBytes = (i32)c.rowbytes;
	layout.SSDs = (i32)c.ssds;
	layout.LBABytes = (i32)c.lba;
	layout.RowsPerLBA = layout.LBAsPerRow = 1;
	if (c.rowbytes <= c.lba)
		layout.RowsPerLBA = (i32)(c.lba / c.rowbytes);
	else
		layout.LBAsPerRow = (i32)((c.rowbytes + c.lba - 1) / c.lba);
	u32 read = (u32)layout.LBAsPerRow * c.lba;
	list_bytes = 8;
	while (list_bytes < (read + c.page - 1) / c.page * 8) list_bytes *= 2;
	if (list_bytes > c.page) run.fail("configuration: PRP lists of %u bytes", list_bytes);
	stage_bytes = 512;
	if (read > c.page)
		stage_bytes = (read + c.page - 1) / c.page * c.page;
	else
		while (stage_bytes < read) stage_bytes *= 2;

	u32 per = c.entries - 1 - c.spare, n = c.ssds * c.queues;
	queues.resize(n);
	states.resize(maxSets);
	rem.resize((size_t)maxSets * n);
	take.resize((size_t)maxSets * n);
	offsets.resize((size_t)maxSets * (c.ssds + 1));
	iovas.resize((size_t)maxSets * c.ssds);
	hist.resize(n);
	cmds.resize(n);
	dead.resize(c.ssds);
	for (u32 s = 0; s < maxSets; s++) free_slots.push_back(s);
	for (u32 s = 0; s < c.ssds; s++) {
		Ssd &ssd = *run.ssds[s];
		lists.push_back(pages((u64)c.queues * per * list_bytes, c.page));
		stage.push_back(pages((u64)c.queues * per * stage_bytes, c.page));
		ssd.add_region("the PRP lists", lists[s], (u64)c.queues * per * list_bytes, true);
		ssd.add_region("staging", stage[s], (u64)c.queues * per * stage_bytes, true);
		memset(stage[s], 0xee, (u64)c.queues * per * stage_bytes);
		for (u32 i = 0; i < c.queues; i++) {
			u32 g = s * c.queues + i;
			QueueState &k = queues[g];
			k = {};
			cmds[g].resize(per);
			k.Commands = address(cmds[g].data());
			k.Lists = address(lists[s] + (u64)i * per * list_bytes);
			k.ListsIOVA = ssd.iova(at<u8>(k.Lists));
			k.Stage = address(stage[s] + (u64)i * per * stage_bytes);
			k.StageIOVA = ssd.iova(at<u8>(k.Stage));
			k.StageBytes = stage_bytes;
			k.Hist = address(&hist[g]);
			k.TimeoutNS = (i64)c.timeout_us * 1000;
			k.DataStart = ssd.data_start;
			k.NSID = ssd.nsid;
			k.SSD = s;
			k.NumCommands = per;
			k.ListBytes = list_bytes;
			k.PageBytes = c.page;
			k.Retries = c.retries;
			k.ReadBytes = read;
			k.Blocks = (u32)layout.LBAsPerRow;
			for (u32 cid = 0; cid < per; cid++) k.Free[cid / 32] |= 1u << (cid & 31);
			ssd.queues[i].stage_bytes = stage_bytes;
			ssd.queues[i].stage_iova = k.StageIOVA;
		}
	}
	// One destination more than sets in flight, so that the next set's is not always the last one's.
	for (u32 b = 0; b <= c.inflight; b++) {
		Buffer buf;
		u64 stride = c.rowbytes + c.gap;
		buf.bytes = 2 * guard + (u64)(c.rows + c.rows / 4 + 4) * stride;
		buf.base = pages(buf.bytes, 4096);
		for (u32 s = 0; s < c.ssds; s++) {
			buf.region.push_back(2 + b);
			run.ssds[s]->add_region("a destination", buf.base, buf.bytes, false);
		}
		buffers.push_back(buf);
	}
}

Host::~Host() {
	for (u8 *p : lists) free(p);
	for (u8 *p : stage) free(p);
	for (Buffer &b : buffers) free(b.base);
}

void Host::share(i64 n, u32 g, u32 rotate, i64 *lo, i64 *hi) {
	u32 per_ssd = run.cfg.queues, i = g % per_ssd;
	i64 per = (n + per_ssd - 1) / per_ssd;
	per = (per + 31) / 32 * 32;
	i64 j = (i + per_ssd - rotate % per_ssd) % per_ssd;
	*lo = std::min(j * per, n);
	*hi = std::min((j + 1) * per, n);
}

Launch *Host::launch(Stream &s, const char *name, u32 blocks, const void *params, size_t bytes, Launch *after) {
	auto l = std::make_unique<Launch>();
	l->kernel = shim::find(name);
	if (l->kernel == nullptr) run.fail("there is no kernel %s", name);
	if (l->kernel->param_size != bytes) run.fail("kernel %s takes %zu bytes, its ABI struct has %zu", name, l->kernel->param_size, bytes);
	l->blocks = blocks;
	l->threads = 32 * run.cfg.warps;
	memcpy(l->params, params, bytes);
	l->bytes = bytes;
	l->after = after;
	l->hx = {address(&s.fault), ++s.seq};
	Launch *out = l.get();
	launches.push_back(std::move(l));
	run.launch(s, out);
	return out;
}

bool Host::try_create(u32 g) {
	Ssd &ssd = ssd_of(g);
	Ssd::Answer a;
	if (!ssd.admin(Ssd::create, g, 0, &a)) run.fail("no answer to Create I/O Queue");
	if (!a.ok) return false;
	QueueState &k = q(g);
	Pair *p = ssd.queues[g % run.cfg.queues].pair();
	k.SQ = address(p->sq);
	k.CQ = address(p->cq);
	k.SQDoorbell = address(p->sqdb);
	k.CQDoorbell = address(p->cqdb);
	k.QID = p->qid;
	k.Entries = p->entries;
	k.Tail = k.Head = 0;
	k.Phase = 1;
	k.ScanAt = 0;
	return true;
}

void Host::agent() {
	const Config &c = run.cfg;
	for (u32 g = 0; g < nq(); g++)
		if (!try_create(g)) run.fail("configuration: no queue pairs");
	while (started < c.sets || !live.empty()) {
		if (started < c.sets && live.size() < c.inflight && (live.empty() || rng.chance(700))) {
			for (size_t i = 0; i < live.size();) // as settle: no read_sync while a set is sick
				if (live[i]->sick)
					finish(i);
				else
					i++;
			start_set();
			continue;
		}
		if (rng.chance(c.close)) return close();
		// Mostly the oldest set is waited for.
		finish(rng.chance(800) ? 0 : rng.below(live.size()));
	}
	quiesce();
	done = true;
	run.stop();
}

// start_set chooses rows and launches the kernels, as async.launch.
void Host::start_set() {
	const Config &c = run.cfg;
	auto set = std::make_unique<Set>();
	size_t pick = rng.below(free_slots.size());
	set->slot = free_slots[pick];
	free_slots.erase(free_slots.begin() + (long)pick);
	do set->buffer = (u32)rng.below(buffers.size());
	while (buffers[set->buffer].used);
	Buffer &buf = buffers[set->buffer];
	buf.used = true;
	started++;

	u32 want = (u32)rng.between(1, c.rows);
	std::vector<std::vector<i64>> by(c.ssds);
	for (u32 i = 0; i < want; i++) {
		i64 row = (i64)rng.below(c.universe);
		u32 s = (u32)(row % c.ssds);
		if (!dead[s]) by[s].push_back(row);
	}
	set->offsets.push_back(0);
	for (auto &b : by) {
		set->rows.insert(set->rows.end(), b.begin(), b.end());
		set->offsets.push_back((i64)set->rows.size());
	}
	set->n = (u32)set->rows.size();
	u64 stride = c.rowbytes + c.gap;
	u32 slots = c.rows + c.rows / 4 + 4;
	std::vector<u32> places(slots);
	for (u32 i = 0; i < slots; i++) places[i] = i;
	set->bad.resize(set->n);
	for (u32 i = 0; i < set->n; i++) {
		std::swap(places[i], places[i + rng.below(slots - i)]);
		set->pos.push_back(places[i]);
		if (!rng.chance(c.badrow)) continue;
		set->nbad++;
		switch (rng.below(4)) {
		case 0: // of another SSD, or of none
			set->bad[i] = failRow;
			set->rows[i] = c.ssds > 1 ? set->rows[i] + 1 : -1 - set->rows[i];
			break;
		case 1:
			set->bad[i] = failRow;
			set->rows[i] = (i64)c.universe + (i64)rng.below(1ull << 50);
			break;
		case 2:
			set->bad[i] = failRow;
			set->rows[i] = -(i64)rng.between(1, 1ull << 50);
			break;
		default:
			set->bad[i] = failPos;
			set->pos[i] = slots + (u32)rng.below(0xffffffffu - slots);
		}
	}
	set->direct = c.direct != 0;
	set->stride = stride;
	u64 first = guard + (set->direct ? 4 * rng.below(8) : rng.below(32));
	set->base = address(buf.base) + first;
	buf.poison = next_poison++;
	memset(buf.base, buf.poison, buf.bytes);
	for (u32 s = 0; s < c.ssds; s++) {
		Region &r = run.ssds[s]->region(buf.region[s]);
		store(&r.first, first);
		store(&r.stride, stride);
		store(&r.slots, (u64)slots);
		store(&r.live, (u32)set->direct);
	}

	SetState &st = states[set->slot];
	u32 *left = remaining(set->slot), *cursor = taken(set->slot);
	i64 *off = &offsets[(size_t)set->slot * (c.ssds + 1)];
	u64 *iova = &iovas[(size_t)set->slot * c.ssds];
	memcpy(off, set->offsets.data(), (c.ssds + 1) * 8);
	for (u32 s = 0; s < c.ssds; s++) iova[s] = run.ssds[s]->iova(at<u8>(set->base));
	st = {};
	st.Rows = address(set->rows.data());
	st.Pos = address(set->pos.data());
	st.Offsets = address(off);
	st.Dst = set->base;
	st.DstLimit = (i64)((u64)slots * stride);
	st.DstStride = (i64)stride;
	st.DstIOVA = address(iova);
	st.Remaining = address(left);
	st.Taken = address(cursor);
	st.Layout = layout;
	st.Direct = set->direct;
	st.Rotate = (u32)rng.below(1000);
	for (u32 g = 0; g < nq(); g++) {
		u32 s = g / c.queues;
		i64 lo, hi;
		share(off[s + 1] - off[s], g, st.Rotate, &lo, &hi);
		left[g] = (u32)(hi - lo);
		cursor[g] = 0;
	}
	expected_issues += set->n - set->nbad;
	run.note("host: set %d in slot %d, %d rows, direct %d", (i64)started, set->slot, set->n, set->direct);
	if (c.sync) {
		launch_sync(*set);
	} else {
		SubmitParams p = {};
		p.Queues = address(queues.data());
		p.Sets = address(states.data());
		p.NumQueues = nq();
		p.QueuesPerSSD = c.queues;
		p.Set = set->slot;
		set->last = launch(run.submit, "submit", c.sblocks, &p, sizeof p, nullptr);
		launch_complete(*set);
	}
	if (started == c.sets) store(&all_submitted, 1u);
	live.push_back(std::move(set));
}

void Host::launch_sync(Set &set) {
	SyncParams p = {};
	p.Queues = address(queues.data());
	p.Sets = address(states.data());
	p.NumQueues = nq();
	p.QueuesPerSSD = run.cfg.queues;
	p.Set = set.slot;
	p.LimitNS = (i64)run.cfg.limit_us * 1000;
	set.last = launch(run.submit, "read_sync", run.cfg.sblocks, &p, sizeof p, nullptr);
}

void Host::launch_complete(Set &set) {
	CompleteParams p = {};
	p.Queues = address(queues.data());
	p.Sets = address(states.data());
	p.NumQueues = nq();
	p.Set = set.slot;
	// Some launches end early, down to a single pass.
	p.LimitNS = rng.chance(100) ? 0 : (i64)rng.below((u64)run.cfg.limit_us * 1000 + 1);
	set.last = launch(run.complete, "complete", run.cfg.cblocks, &p, sizeof p, set.last);
}

// quiesce waits until no kernel runs: memory of a GPU and of the host have no common atomics.
void Host::quiesce() {
	i64 limit = run.cfg.threads ? 60'000'000'000 : 2'000'000'000;
	if (!run.wait([&] { return load(&run.submit.head) == load(&run.submit.tail) && load(&run.complete.head) == load(&run.complete.tail); }, limit))
		run.fail("hang: kernels do not end");
}

// close ends the engine with sets in flight, as async.teardown: kernels must end by themselves, and
// leave no side of a queue taken.
void Host::close() {
	run.note("host: closes");
	for (u32 g = 0; g < nq(); g++) store(&q(g).Frozen, frozenClosing);
	quiesce();
	for (u32 g = 0; g < nq(); g++) {
		if (q(g).Own != ownFree || q(g).Reap != 0) run.fail("queue %u: own %u, reap %u after closing", g, q(g).Own, q(g).Reap);
		Ssd::Answer a;
		if (!dead[q(g).SSD] && !ssd_of(g).admin(Ssd::destroy, g, 0, &a)) run.fail("no answer to Delete I/O Queue");
	}
	closed = done = true;
	run.stop();
}

// finish brings a set to its end, as asyncPending.complete.
void Host::finish(size_t i) {
	Set &set = *live[i];
	i64 limit = run.cfg.threads ? 60'000'000'000 : 2'000'000'000;
	i64 deadline = run.now() + (run.cfg.threads ? 120'000'000'000 : 5'000'000'000);
	for (u32 tries = 0;; tries++) {
		if (!run.wait([&] { return load(&set.last->done) != 0; }, limit)) run.fail("hang: kernel %s of slot %u does not end", set.last->kernel->name, set.slot);
		u32 left = 0;
		for (u32 g = 0; g < nq(); g++) left += load(&remaining(set.slot)[g]);
		if (left == 0) break;
		if (run.now() > deadline) run.fail("hang: %u rows of slot %u are not read, after %u launches", left, set.slot, tries);
		if (run.cfg.sync && resume(set)) continue;
		recover(set);
		launch_complete(set);
	}
	check(set);
	Buffer &buf = buffers[set.buffer];
	for (u32 s = 0; s < run.cfg.ssds; s++) store(&run.ssds[s]->region(buf.region[s]).live, 0u);
	// The slot and the row list are used for other things at once.
	memset(set.rows.data(), 0xcd, set.rows.size() * 8);
	memset(set.pos.data(), 0xcd, set.pos.size() * 4);
	memset(buf.base, 0xd7, buf.bytes);
	buf.used = false;
	free_slots.push_back(set.slot);
	live.erase(live.begin() + (long)i);
}

// resume, as gpuio/sync.go: read_sync and complete take turns. A set with rows left is sick, and with
// it all others that have some, until complete has finished them; but a healthy launch that only ran
// out of its time is launched again (true).
bool Host::resume(Set &set) {
	quiesce();
	set.sick = true;
	bool others = false;
	for (auto &x : live) {
		for (u32 g = 0; g < nq(); g++) x->sick |= load(&remaining(x->slot)[g]) != 0;
		others |= x->sick && x.get() != &set;
	}
	if (others || !calm()) return false;
	set.sick = false;
	limited++;
	launch_sync(set);
	return true;
}

bool Host::calm() {
	for (QueueState &k : queues) {
		if (load(&k.Frozen) != frozenNo || k.Issued != k.Completed + k.Dropped || k.PendHead != k.PendTail) return false;
		for (u32 w = 0; w < bitmapWords; w++)
			if (load(&k.Retry[w]) != 0) return false;
	}
	return true;
}

// check compares each byte of the destination.
void Host::check(Set &set) {
	const Config &c = run.cfg;
	SetState &st = states[set.slot];
	u32 fails = load(&st.NumFails);
	run.note("host: slot %d is over, %d rows failed, %d retries", set.slot, fails, st.Retries);
	seen_fails += fails;
	bad_rows += set.nbad;
	issued_sets += st.Issued;
	retried_sets += st.Retries;
	rows_read += set.n - std::min(fails, set.n);
	rows_failed += fails;
	if (fails > set.n) run.fail("slot %u: %u of %u rows failed", set.slot, fails, set.n);
	std::vector<u8> may(set.n); // rows with a record
	for (u32 i = 0; i < std::min(fails, maxFails); i++) {
		const FailRecord &f = st.Fails[i];
		if (f.Index >= set.n || may[f.Index]) run.fail("slot %u: fail record %u is for row %u of %u, or a second one", set.slot, i, f.Index, set.n);
		may[f.Index] = 1;
		i64 row = set.rows[f.Index];
		u32 s = 0;
		while (f.Index >= (u64)set.offsets[s + 1]) s++;
		bool right = f.SSD == s && (f.Row == row || f.Kind == failPos);
		switch (f.Kind) {
		case failRow:
		case failPos:
			right = right && set.bad[f.Index] == f.Kind;
			if (f.Kind == failPos) right = right && f.LBA == set.pos[f.Index];
			break;
		case failStatus:
		case failTimeout: {
			right = right && !set.bad[f.Index];
			i64 k = row / c.ssds;
			u64 lba = run.ssds[s]->data_start + (u64)(layout.RowsPerLBA > 1 ? k / layout.RowsPerLBA : k * layout.LBAsPerRow);
			right = right && f.LBA == lba;
			bool dnr = f.Status & status_dnr;
			right = right && (f.Kind == failStatus && dnr ? f.Tries >= 1 && f.Tries <= c.retries + 1 : f.Tries == c.retries + 1 || (orphans != 0 && f.Tries > c.retries));
			if (f.Kind == failStatus) records.push_back(f);
			break;
		}
		case failQueue:
			right = right && dead[s];
			break;
		default:
			right = false;
		}
		if (!right)
			run.fail("slot %u: fail record of row %lld at index %u is wrong: kind %u status %#x row %lld lba %llu ssd %u tries %u", set.slot, row, f.Index, f.Kind, f.Status, f.Row, f.LBA, f.SSD, f.Tries);
	}
	const Buffer &buf = buffers[set.buffer];
	std::vector<u8> covered(buf.bytes);
	u32 wrong = 0;
	for (u32 i = 0; i < set.n; i++) {
		if (set.bad[i]) {
			wrong++;
			if (fails <= maxFails && !may[i]) run.fail("slot %u: row %lld at index %u is bad and not reported", set.slot, set.rows[i], i);
			continue;
		}
		u64 at = set.base - address(buf.base) + set.pos[i] * set.stride;
		memset(&covered[at], 1, c.rowbytes);
		u32 b = 0;
		while (b < c.rowbytes && buf.base[at + b] == row_byte(set.rows[i], b)) b++;
		if (b == c.rowbytes) continue;
		wrong++;
		if (fails > maxFails ? wrong > fails : !may[i]) {
			const u8 *g = buf.base + at + b;
			run.fail("slot %u: row %lld (index %u, position %u) is wrong from byte %u of %u on: %02x, should be %02x (%s); no failure is reported for it",
			         set.slot, set.rows[i], i, set.pos[i], b, c.rowbytes, *g, row_byte(set.rows[i], b), *g == buf.poison ? "nothing was written there" : "somebody else's data");
		}
	}
	if (wrong > fails) run.fail("slot %u: %u rows are wrong, %u failures are reported", set.slot, wrong, fails);
	for (u64 b = 0; b < buf.bytes; b++)
		if (!covered[b] && buf.base[b] != buf.poison) run.fail("slot %u: byte %llu of the destination belongs to no row and was overwritten with %02x", set.slot, b, buf.base[b]);
	if (st.StartNS <= 0 || (!c.sync && (st.SubmitNS < st.StartNS || st.DoneNS <= 0))) run.fail("slot %u: times %lld, %lld, %lld", set.slot, st.StartNS, st.SubmitNS, st.DoneNS);
	if (c.threads || c.sync || load(&run.submit.head) != load(&run.submit.tail)) return;
	for (u32 g = 0; g < nq(); g++)
		for (u32 k = q(g).PendHead; k != q(g).PendTail; k++)
			if (q(g).PendRing[k % maxSets] == set.slot) run.fail("slot %u: its rows are done and queue %u still lists it", set.slot, g);
}

// ---- recovery, as gpuio/recover.go ----

template <typename F> void Host::commands(u32 g, F fn) {
	QueueState &k = q(g);
	for (u32 cid = 0; cid < k.NumCommands; cid++) {
		if (load(&k.Free[cid / 32]) >> (cid & 31) & 1) continue;
		Command &cmd = at<Command>(k.Commands)[cid];
		if ((load(&cmd.State) & cmdState) != cmdFree) fn(cid, cmd);
	}
}

void Host::recover(Set &set) {
	u32 frozen = 0;
	quiesce();
	for (u32 g = 0; g < nq(); g++) {
		if (load(&remaining(set.slot)[g]) == 0) continue;
		if (run.cfg.sync) leftovers(set, g);
		if (load(&q(g).Frozen) == frozenNo) continue;
		frozen++;
		recover_queue(g);
		if (run.cfg.sync) leftovers(set, g);
	}
	limited += frozen == 0;
}

void Host::recover_queue(u32 g) {
	QueueState &k = q(g);
	recovered++;
	run.note("host: recovers queue %d, frozen %d", g, k.Frozen);
	if (load(&k.Own) != ownFree || load(&k.Reap) != 0) run.fail("queue %u: no kernel runs, and a side of it is taken: own %u, reap %u", g, k.Own, k.Reap);
	store(&k.Own, ownHeld);
	// A warp of read_sync that left may have missed that its command was done.
	commands(g, [&](u32 cid, Command &cmd) {
		u32 state = load(&cmd.State);
		if ((state & cmdState) != cmdDone) return;
		Ssd::Answer a;
		if (!ssd_of(g).admin(Ssd::orphan, g, cid, &a)) run.fail("no answer about an orphan");
		orphans++;
		store(&cmd.State, (state & ~(cmdState | cmdAborted)) | cmdRetry);
		__atomic_fetch_or(&k.Retry[cid / 32], 1u << (cid & 31), __ATOMIC_ACQ_REL);
	});
	switch (load(&k.Frozen)) {
	case frozenDead:
		fail_queue(g);
		break;
	case frozenTimeout:
		if (!abort_late(g)) recreate(g);
		break;
	case frozenForeign:
		recreate(g);
		break;
	}
	store(&k.Own, ownFree);
}

bool Host::abort_late(u32 g) {
	QueueState &k = q(g);
	i64 now = k.ScanAt; // late is what was late when the kernel looked
	bool ok = true;
	std::vector<u32> late;
	commands(g, [&](u32 cid, Command &cmd) {
		u32 state = load(&cmd.State);
		if ((state & cmdState) != cmdInFlight || load(&cmd.Deadline) > now) return;
		if (state & cmdAborted)
			ok = false;
		else
			late.push_back(cid);
	});
	if (!ok) return false;
	for (u32 cid : late) {
		Command &cmd = at<Command>(k.Commands)[cid];
		store(&cmd.State, load(&cmd.State) | cmdAborted);
		aborts++;
		Ssd::Answer a;
		if (!ssd_of(g).admin(Ssd::abort, g, cid, &a)) run.fail("no answer to Abort");
		if (!a.ok) return false;
	}
	i64 grace = run.now() + k.TimeoutNS;
	for (u32 cid : late) store(&at<Command>(k.Commands)[cid].Deadline, grace);
	k.ScanAt = run.now() + k.TimeoutNS; // nothing may be in flight now, but soon
	commands(g, [&](u32, Command &cmd) {
		if ((load(&cmd.State) & cmdState) == cmdInFlight) k.ScanAt = std::min(k.ScanAt, load(&cmd.Deadline));
	});
	store(&k.Frozen, frozenNo);
	return true;
}

void Host::recreate(u32 g) {
	QueueState &k = q(g);
	Ssd::Answer a;
	if (!ssd_of(g).admin(Ssd::destroy, g, 0, &a)) run.fail("no answer to Delete I/O Queue");
	if (!a.ok) return give_up(g, false, 0);
	if (!try_create(g)) return give_up(g, true, a.value);
	recreated++;
	count(&k.Dropped, k.Issued - k.Completed - k.Dropped);
	commands(g, [&](u32 cid, Command &cmd) {
		u32 state = load(&cmd.State);
		if (state / cmdAttempt > k.Retries) {
			fail_command(g, cid, failTimeout);
			return;
		}
		store(&cmd.State, (state & ~(cmdState | cmdAborted)) | cmdRetry);
		__atomic_fetch_or(&k.Retry[cid / 32], 1u << (cid & 31), __ATOMIC_ACQ_REL);
	});
	store(&k.Frozen, frozenNo); // the next complete launch issues what waits
}

void Host::give_up(u32 g, bool deleted, u32 terminal) {
	u32 s = g / run.cfg.queues;
	dead[s] = 1;
	if (deleted) {
		dead_terminal += terminal;
		store(&q(g).Frozen, frozenDead);
		fail_queue(g);
		return;
	}
	for (u32 i = 0; i < run.cfg.queues; i++) store(&q(s * run.cfg.queues + i).Frozen, frozenUnsafe);
	quiesce();
	Ssd::Answer a;
	if (!ssd_of(g).admin(Ssd::reset, g, 0, &a)) run.fail("no answer to a reset");
	for (u32 i = 0; i < run.cfg.queues; i++) store(&q(s * run.cfg.queues + i).Frozen, frozenDead);
	fail_queue(g);
}

void Host::record(SetState &st, const FailRecord &f) {
	u32 n = __atomic_add_fetch(&st.NumFails, 1, __ATOMIC_ACQ_REL);
	if (n <= maxFails) st.Fails[n - 1] = f;
}

void Host::fail_command(u32 g, u32 cid, u16 kind) {
	QueueState &k = q(g);
	Command &cmd = at<Command>(k.Commands)[cid];
	SetState &st = states[cmd.Set];
	FailRecord f = {};
	f.Index = cmd.Index;
	f.Kind = kind;
	f.QID = (u16)k.QID;
	f.CID = (u16)cid;
	f.Tries = load(&cmd.State) / cmdAttempt;
	f.LBA = cmd.LBA;
	f.SSD = k.SSD;
	f.Row = at<i64>(st.Rows)[cmd.Index];
	record(st, f);
	queue_fails += kind == failQueue;
	u32 slot = cmd.Set;
	store(&cmd.State, cmdFree);
	__atomic_fetch_and(&k.Retry[cid / 32], ~(1u << (cid & 31)), __ATOMIC_ACQ_REL);
	__atomic_fetch_or(&k.Free[cid / 32], 1u << (cid & 31), __ATOMIC_ACQ_REL);
	__atomic_fetch_sub(&remaining(slot)[g], 1, __ATOMIC_ACQ_REL);
}

void Host::fail_queue(u32 g) {
	QueueState &k = q(g);
	commands(g, [&](u32 cid, Command &) { fail_command(g, cid, failQueue); });
	while (k.PendHead != load(&k.PendTail)) {
		u32 slot = k.PendRing[k.PendHead % maxSets];
		Segment seg = k.Pend[slot];
		k.PendHead++;
		u32 n = (u32)(seg.End - seg.Next);
		for (i64 i = seg.Next; i < seg.End; i++) {
			FailRecord f = {};
			f.Index = (u32)i;
			f.Kind = failQueue;
			f.QID = (u16)k.QID;
			f.SSD = k.SSD;
			f.Row = at<i64>(states[slot].Rows)[i];
			record(states[slot], f);
		}
		__atomic_fetch_sub(&remaining(slot)[g], n, __ATOMIC_ACQ_REL);
		queue_fails += n;
	}
}

// leftovers takes over what a read_sync launch left behind: rows that no warp took become a pending
// segment, after which the set goes on as an asynchronous one.
void Host::leftovers(Set &set, u32 g) {
	SetState &st = states[set.slot];
	QueueState &k = q(g);
	i64 lo, hi;
	share(set.offsets[k.SSD + 1] - set.offsets[k.SSD], g, st.Rotate, &lo, &hi);
	i64 next = std::min(lo + (i64)load(&taken(set.slot)[g]), hi);
	store(&taken(set.slot)[g], (u32)(hi - lo));
	if (next == hi) return;
	k.Pend[set.slot] = {set.offsets[k.SSD] + next, set.offsets[k.SSD] + hi};
	k.PendRing[k.PendTail % maxSets] = set.slot;
	store(&k.PendTail, k.PendTail + 1);
	if (load(&k.Frozen) == frozenDead) fail_queue(g);
}

// verdict: nothing leaked and both sides counted the same.
void Host::verdict() {
	for (Stream *s : {&run.submit, &run.complete})
		if (s->fault.Seq != 0) run.fail("stream %s: launch %llu failed with code %u (%llu, %llu, %llu)", s->name, s->fault.Seq, s->fault.Code, s->fault.A, s->fault.B, s->fault.C);
	if (closed) return;
	const Config &c = run.cfg;
	u64 terminal = 0;
	bool any_dead = false;
	for (u8 d : dead) any_dead |= d != 0;
	for (u32 g = 0; g < nq(); g++) {
		QueueState &k = q(g);
		Ssd &ssd = ssd_of(g);
		Ssd::Queue &m = ssd.queues[g % c.queues];
		terminal += m.terminal;
		for (u32 cid = 0; cid < k.NumCommands; cid++) {
			if (!(k.Free[cid / 32] >> (cid & 31) & 1)) run.fail("queue %u: CID %u leaked, state %#x", g, cid, at<Command>(k.Commands)[cid].State);
			if (at<Command>(k.Commands)[cid].State & cmdState) run.fail("queue %u: CID %u is free with state %#x", g, cid, at<Command>(k.Commands)[cid].State);
			if (m.cids[cid].state != Cid::idle && !dead[k.SSD]) run.fail("queue %u: the SSD has CID %u in state %u", g, cid, m.cids[cid].state);
		}
		for (u32 w = 0; w < bitmapWords; w++) {
			u32 beyond = w * 32 >= k.NumCommands ? ~0u : k.NumCommands - w * 32 >= 32 ? 0 : ~0u << (k.NumCommands - w * 32);
			if (k.Free[w] & beyond) run.fail("queue %u: word %u of the free CIDs has CIDs that do not exist: %#x", g, w, k.Free[w]);
			if (k.Retry[w]) run.fail("queue %u: retries are left in word %u: %#x", g, w, k.Retry[w]);
		}
		if (k.Own != ownFree || k.Reap != 0 || k.PendHead != k.PendTail) run.fail("queue %u: own %u, reap %u, pending %u..%u at the end", g, k.Own, k.Reap, k.PendHead, k.PendTail);
		for (u32 i = 0; i < 32; i++)
			if (c.sync == 0 && i < maxSets && remaining(i)[g] != 0) run.fail("queue %u: slot %u has %u rows left", g, i, remaining(i)[g]);
		for (auto &p : m.pairs)
			if (p->dead && (*p->sqdb != p->last_sqdb || *p->cqdb != p->last_cqdb)) run.fail("queue %u: a doorbell of the deleted q%u was rung", g, p->qid);
		if (k.Issued != m.fetched && !dead[k.SSD]) run.fail("queue %u: %llu commands issued, the SSD saw %llu", g, k.Issued, m.fetched);
		if (!dead[k.SSD] && k.Issued != k.Completed + k.Dropped) run.fail("queue %u: %llu issued, %llu completed, %llu dropped", g, k.Issued, k.Completed, k.Dropped);
		if (k.Foreign > m.injected_foreign) run.fail("queue %u: %llu foreign completions, %llu injected", g, k.Foreign, m.injected_foreign);
		if (!dead[k.SSD] && k.Completed != m.acked_ok + m.acked_err) run.fail("queue %u: %llu completions counted, %llu acknowledged", g, k.Completed, m.acked_ok + m.acked_err);
		if (!dead[k.SSD] && k.Errors != m.acked_err) run.fail("queue %u: %llu errors counted, %llu acknowledged", g, k.Errors, m.acked_err);
		if (k.Direct + k.Staged + k.Retried != k.Issued) run.fail("queue %u: %llu direct, %llu staged, %llu retried of %llu", g, k.Direct, k.Staged, k.Retried, k.Issued);
		u64 lat = 0;
		for (u64 n : hist[g].Counts) lat += n;
		if (!dead[k.SSD] && lat != m.acked_ok) run.fail("queue %u: %llu latencies, %llu good completions", g, lat, m.acked_ok);
	}
	// What failed is what the SSDs made fail for good, what was asked for wrongly, and what was lost
	// with its queue.
	u64 want = terminal - dead_terminal + bad_rows + queue_fails;
	if (seen_fails != want && !any_dead)
		run.fail("%llu rows failed; %llu should have: %llu by the SSDs, %llu bad rows, %llu with their queues", seen_fails, want, terminal - dead_terminal, bad_rows, queue_fails);
	// read_sync leaves commands that it could not issue any more to the host, as retries.
	if (!any_dead && (c.sync ? issued_sets > expected_issues : issued_sets != expected_issues)) run.fail("the sets count %llu commands, %llu rows were good", issued_sets, expected_issues);
	u64 retried = 0;
	for (u32 g = 0; g < nq(); g++) retried += q(g).Retried;
	if (retried != retried_sets) run.fail("the sets count %llu retries, the queues %llu", retried_sets, retried);
	for (const FailRecord &f : records) {
		bool found = false;
		for (const Injected &i : run.ssds[f.SSD]->injected)
			found |= i.qid == f.QID && i.cid == f.CID && i.lba == f.LBA && i.status == f.Status;
		if (!found) run.fail("ssd %u q%u CID %u LBA %llu: status %#x is reported, which the SSD did not give", f.SSD, f.QID, f.CID, f.LBA, f.Status);
	}
}

void Host::dump(FILE *f) {
	for (u32 g = 0; g < nq(); g++) {
		QueueState &k = q(g);
		fprintf(f, "  queue %u: own %u frozen %u tail %u head %u phase %u pending %u..%u issued %llu completed %llu dropped %llu\n", g, peek(&k.Own), peek(&k.Frozen), k.Tail, k.Head, k.Phase,
		        k.PendHead, peek(&k.PendTail), k.Issued, k.Completed, k.Dropped);
		u32 shown = 0;
		for (u32 cid = 0; cid < k.NumCommands && shown < 8; cid++) {
			Command &cmd = at<Command>(k.Commands)[cid];
			if (!(peek(&k.Free[cid / 32]) >> (cid & 31) & 1)) {
				fprintf(f, "    CID %u: state %#x slot %u index %u deadline in %lld us\n", cid, peek(&cmd.State), cmd.Set, cmd.Index, (cmd.Deadline - run.now()) / 1000);
				shown++;
			}
		}
	}
	for (auto &s : live) {
		fprintf(f, "  slot %u: %u rows, remaining", s->slot, s->n);
		for (u32 g = 0; g < nq(); g++) fprintf(f, " %u", peek(&remaining(s->slot)[g]));
		fprintf(f, "\n");
	}
}

} // namespace iotest
