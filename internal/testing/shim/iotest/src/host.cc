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
	u32 read = c.most() * c.lba;
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
	resets.resize(c.ssds);
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
			k.Blocks = c.most();
			for (u32 cid = 0; cid < per; cid++) k.Free[cid / 32] |= 1u << (cid & 31);
			ssd.queues[i].stage_bytes = stage_bytes;
			ssd.queues[i].stage_iova = k.StageIOVA;
			ssd.queues[i].list_bytes = list_bytes;
			ssd.queues[i].list_iova = k.ListsIOVA;
		}
	}
	// One destination more than sets in flight, so that the next set's is not always the last one's.
	for (u32 b = 0; b <= c.inflight; b++) {
		Buffer buf;
		u64 stride = c.rowbytes + c.gap;
		buf.bytes = 2 * guard + 4096 + (u64)(c.rows + c.rows / 4 + 4) * stride;
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

Launch *Host::launch(Stream &s, const char *name, u32 blocks, u32 warps, const void *params, size_t bytes, Launch *after) {
	auto l = std::make_unique<Launch>();
	l->kernel = shim::find(name);
	if (l->kernel == nullptr) run.fail("there is no kernel %s", name);
	if (l->kernel->param_size != bytes) run.fail("kernel %s takes %zu bytes, its ABI struct has %zu", name, l->kernel->param_size, bytes);
	l->blocks = blocks;
	l->threads = 32 * warps;
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
	if (c.window && rng.chance(700)) first = c.page; // where rows may begin on pages
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
	st.Parts = 1;
	if (c.split) {
		st.PartBlocks = c.split;
		st.Parts = (c.lbas_row() + c.split - 1) / c.split;
		set->marks.resize(set->n);
		st.Marks = address(set->marks.data());
		parts_read += (u64)set->n * st.Parts;
	}
	for (u32 s = 0; s < c.ssds; s++) {
		set->units.push_back(off[s] * st.Parts);
		set->units.push_back(off[s + 1] * st.Parts);
	}
	set->runs_shared = c.window && rng.chance(850);
	if (set->runs_shared) {
		cut(*set);
	} else {
		expected_issues += (u64)(set->n - set->nbad) * st.Parts;
	}
	st.Units = address(set->units.data());
	for (u32 g = 0; g < nq(); g++) {
		u32 s = g / c.queues;
		i64 lo, hi;
		share(set->units[2 * s + 1] - set->units[2 * s], g, st.Rotate, &lo, &hi);
		left[g] = (u32)(hi - lo);
		cursor[g] = 0;
	}
	run.note("host: set %d in slot %d, %d rows, direct %d", (i64)started, set->slot, set->n, set->direct);
	if (set->runs_shared) launch_coalesce(*set);
	if (c.sync) {
		launch_sync(*set);
	} else {
		SubmitParams p = {};
		p.Queues = address(queues.data());
		p.Sets = address(states.data());
		p.NumQueues = nq();
		p.QueuesPerSSD = c.queues;
		p.Set = set->slot;
		set->last = launch(run.submit, "submit", c.sblocks, c.warps, &p, sizeof p, nullptr);
		launch_complete(*set);
	}
	live.push_back(std::move(set));
}

// The first LBA of a row, from data_start.
u64 Host::lba_of(i64 row) const {
	u64 slot = (u64)row / run.cfg.ssds;
	return layout.RowsPerLBA > 1 ? slot / (u64)layout.RowsPerLBA : slot * (u64)layout.LBAsPerRow;
}

// cut finds the runs of a set as coalesce must.
void Host::cut(Set &set) {
	const Config &c = run.cfg;
	set.want_order.resize(set.n);
	set.run_of.resize(set.n);
	for (u32 i = 0; i < set.n; i++) set.want_order[i] = i;
	for (u32 s = 0; s < c.ssds; s++) {
		u32 from = (u32)set.offsets[s], to = (u32)set.offsets[s + 1], first = from + s;
		auto slot = [&](u32 i) { return set.bad[i] ? ~0ull : (u64)set.rows[i] / c.ssds; };
		std::stable_sort(set.want_order.begin() + from, set.want_order.begin() + to, [&](u32 a, u32 b) { return slot(a) < slot(b); });
		set.want_units.push_back(first);
		for (u32 k = from; k < to; k++) {
			u32 i = set.want_order[k], before = k > from ? set.want_order[k - 1] : i;
			bool begins = k == from || set.bad[i] || set.bad[before];
			if (!begins) {
				u64 a = lba_of(set.rows[before]), b = lba_of(set.rows[i]);
				begins = a / c.window != b / c.window || b > a + c.reach;
			}
			if (begins) {
				set.want_runs.push_back(k);
				expected_issues += !set.bad[i];
				runs_read++;
			}
			set.run_of[i] = (u32)set.want_runs.size() - 1;
		}
		set.want_units.push_back((i64)set.want_runs.size());
		set.want_runs.push_back(to);
		for (size_t u = first; u + 1 < set.want_runs.size(); u++)
			if (u32 rows = set.want_runs[u + 1] - set.want_runs[u]; rows > 1) expected_shared += rows;
		// Where a bucket has fewer runs than rows, the next one's begin behind room that is not used.
		while (set.want_runs.size() < (size_t)to + s + 1) set.want_runs.push_back(0xcdcdcdcd);
	}
	set.runs.assign((size_t)set.n + c.ssds, 0xcdcdcdcd);
	set.units.assign(2 * c.ssds, -1); // coalesce finds them
	// Zeros and room behind: a kernel that sorts wrongly is to be reported, not to crash the explorer.
	for (auto &x : set.idx) x.assign(8 * (size_t)set.n + 1024, 0);
}

void Host::launch_coalesce(Set &set) {
	const Config &c = run.cfg;
	SetState &st = states[set.slot];
	for (u32 g = 0; g < nq(); g++) remaining(set.slot)[g] = 0xcdcdcdcd;
	for (auto &k : keys)
		if (k.empty()) k.resize(8 * (size_t)c.rows + 1024); // before the first launch; room as above
	CoalesceParams p = {};
	p.Sets = address(states.data());
	p.KeysA = address(keys[0].data());
	p.KeysB = address(keys[1].data());
	p.IdxA = address(set.idx[0].data());
	p.IdxB = address(set.idx[1].data());
	p.Set = set.slot;
	p.QueuesPerSSD = c.queues;
	p.Window = c.window;
	p.Reach = c.reach;
	p.Passes = (u32)rng.between((c.universe + c.ssds - 1) / c.ssds > 256 ? 2 : 1, 4);
	st.Order = p.Passes % 2 ? p.IdxB : p.IdxA;
	st.Runs = address(set.runs.data());
	if (rng.chance(200)) {
		set.order.assign(set.n, 0);
		st.Order = address(set.order.data());
	}
	launch(run.submit, "coalesce", (u32)rng.between(1, c.ssds), (u32)rng.between(1, 4), &p, sizeof p, nullptr);
}

// check_runs compares what coalesce found.
void Host::check_runs(Set &set) {
	const u32 *order = at<u32>(states[set.slot].Order);
	for (u32 i = 0; i < set.n; i++)
		if (order[i] != set.want_order[i]) run.fail("slot %u: place %u of the order has index %u, should have %u", set.slot, i, order[i], set.want_order[i]);
	for (size_t i = 0; i < set.runs.size(); i++)
		if (set.runs[i] != set.want_runs[i]) run.fail("slot %u: run %zu begins at %u, should at %u", set.slot, i, set.runs[i], set.want_runs[i]);
	for (size_t i = 0; i < set.units.size(); i++)
		if (set.units[i] != set.want_units[i]) run.fail("slot %u: units of SSD %zu: %lld, should be %lld", set.slot, i / 2, set.units[i], set.want_units[i]);
}

void Host::launch_sync(Set &set) {
	SyncParams p = {};
	p.Queues = address(queues.data());
	p.Sets = address(states.data());
	p.NumQueues = nq();
	p.QueuesPerSSD = run.cfg.queues;
	p.Set = set.slot;
	p.LimitNS = (i64)run.cfg.limit_us * 1000;
	set.last = launch(run.submit, "read_sync", run.cfg.sblocks, run.cfg.warps, &p, sizeof p, nullptr);
}

void Host::launch_complete(Set &set) {
	CompleteParams p = {};
	p.Queues = address(queues.data());
	p.Sets = address(states.data());
	p.NumQueues = nq();
	p.Set = set.slot;
	// Some launches end early, down to a single pass.
	p.LimitNS = rng.chance(100) ? 0 : (i64)rng.below((u64)run.cfg.limit_us * 1000 + 1);
	set.last = launch(run.complete, "complete", run.cfg.cblocks, run.cfg.warps, &p, sizeof p, set.last);
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
	if (set.runs_shared) check_runs(set);
	check(set);
	Buffer &buf = buffers[set.buffer];
	for (u32 s = 0; s < run.cfg.ssds; s++) store(&run.ssds[s]->region(buf.region[s]).live, 0u);
	// The slot and the row list are used for other things at once.
	memset(set.rows.data(), 0xcd, set.rows.size() * 8);
	memset(set.pos.data(), 0xcd, set.pos.size() * 4);
	for (auto *x : {&set.idx[0], &set.idx[1], &set.order, &set.runs, &set.marks}) memset(x->data(), 0xcd, x->size() * 4);
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
	blocks_sets += st.Blocks;
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
			if (!right) break;
			u64 lba = lba_of(row), cmd = f.LBA - run.ssds[s]->data_start; // the command's
			u32 blocks = c.lbas_row();
			if (c.split) {
				u64 in = cmd - lba;
				right = in < blocks && in % c.split == 0;
				lba = cmd;
				blocks = std::min(c.split, blocks - (u32)in);
			} else if (set.runs_shared) {
				u32 u = set.run_of[f.Index];
				lba = lba_of(set.rows[set.want_order[set.want_runs[u]]]);
				blocks += (u32)(lba_of(set.rows[set.want_order[set.want_runs[u + 1] - 1]]) - lba);
			}
			right = right && cmd == lba && f.Blocks == blocks;
			bool dnr = f.Status & status_dnr;
			right = right && (f.Kind == failStatus && dnr ? f.Tries >= 1 && f.Tries <= c.retries + 1 : f.Tries == c.retries + 1);
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
	// How many commands failed for good: one for each row or run, some for a split row.
	u32 failed = fails - std::min(set.nbad, fails), commands = failed, all = failed * st.Parts;
	if (set.runs_shared && failed > 0) {
		commands = 1;
		if (fails <= maxFails) {
			std::vector<u32> units;
			for (u32 i = 0; i < set.n; i++)
				if (may[i] && !set.bad[i]) units.push_back(set.run_of[i]);
			std::sort(units.begin(), units.end());
			units.erase(std::unique(units.begin(), units.end()), units.end());
			for (u32 u : units)
				for (u32 k = set.want_runs[u]; k < set.want_runs[u + 1]; k++)
					if (!may[set.want_order[k]]) run.fail("slot %u: the run at place %u failed, and row %lld of it is not reported", set.slot, set.want_runs[u], set.rows[set.want_order[k]]);
			commands = all = (u32)units.size();
		}
	}
	failed_least += commands;
	failed_most += all;
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

// ---- recovery, as gpuio/recover.go and reset.go ----

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
	read_again(g);
	switch (load(&k.Frozen)) {
	case frozenDead:
		fail_queue(g);
		break;
	case frozenTimeout:
		if (!abort_late(g)) recreate(g, false);
		break;
	case frozenForeign:
		recreate(g, true);
		break;
	}
	store(&k.Own, ownFree);
}

// read_again: a warp of read_sync that left may have missed that its command was done.
void Host::read_again(u32 g) {
	commands(g, [&](u32 cid, Command &cmd) {
		u32 state = load(&cmd.State);
		if ((state & cmdState) != cmdDone) return;
		tell(g, cid, Ssd::orphan);
		orphans++;
		again(g, cid, state - cmdAttempt);
	});
}

// wire is the identifier of a command's last attempt.
u32 Host::wire(u32 g, u32 cid) { return cid | (load(&at<Command>(q(g).Commands)[cid].State) & cmdGen); }

void Host::again(u32 g, u32 cid, u32 state) {
	store(&at<Command>(q(g).Commands)[cid].State, (state & ~(cmdState | cmdAborted)) | cmdRetry);
	__atomic_fetch_or(&q(g).Retry[cid / 32], 1u << (cid & 31), __ATOMIC_ACQ_REL);
}

void Host::tell(u32 g, u32 cid, Ssd::Op op) {
	Ssd::Answer a;
	if (!ssd_of(g).admin(op, g, cid, &a)) run.fail("the SSD does not listen");
}

bool Host::abort_late(u32 g) {
	QueueState &k = q(g);
	i64 now = k.ScanAt; // late is what was late when the kernel looked
	bool vain = false;
	std::vector<u32> late;
	commands(g, [&](u32 cid, Command &cmd) {
		u32 state = load(&cmd.State);
		if ((state & cmdState) != cmdInFlight || load(&cmd.Deadline) > now) return;
		vain |= (state & cmdAborted) != 0;
		if (state & cmdAborted) return;
		store(&cmd.State, state | cmdAborted); // it is charged for what follows
		late.push_back(cid);
	});
	if (vain) return false;
	for (u32 cid : late) {
		aborts++;
		Ssd::Answer a;
		if (!ssd_of(g).admin(Ssd::abort, g, wire(g, cid), &a)) run.fail("no answer to Abort");
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

// recreate replaces a queue pair. all: each of its commands is charged an attempt, not only the late ones.
void Host::recreate(u32 g, bool all) {
	Ssd::Answer a;
	if (!ssd_of(g).admin(Ssd::destroy, g, 0, &a)) run.fail("no answer to Delete I/O Queue");
	if (!a.ok || !try_create(g)) return heal(g / run.cfg.queues);
	recreated++;
	reissue(g, all);
	store(&q(g).Frozen, frozenNo); // the next complete launch issues what waits
}

// reissue has what was outstanding on a queue whose pair is gone issued again.
void Host::reissue(u32 g, bool all) {
	QueueState &k = q(g);
	count(&k.Dropped, k.Issued - k.Completed - k.Dropped);
	read_again(g);
	commands(g, [&](u32 cid, Command &cmd) {
		u32 state = load(&cmd.State);
		if ((state & cmdState) != cmdInFlight) return;
		bool charged = all || (state & cmdAborted) != 0;
		if (charged && state / cmdAttempt > k.Retries) {
			tell(g, cid, Ssd::forget);
			fail_command(g, cid, failTimeout);
			return;
		}
		if (!charged) tell(g, cid, Ssd::uncharge);
		again(g, cid, charged ? state : state - cmdAttempt);
	});
}

// heal resets a controller, as often as it may, and then gives its SSD up.
void Host::heal(u32 s) {
	u32 first = s * run.cfg.queues, end = first + run.cfg.queues;
	for (u32 g = first; g < end; g++) store(&q(g).Frozen, frozenUnsafe);
	for (;;) {
		Ssd::Answer a;
		if (!run.ssds[s]->admin(Ssd::reset, first, 0, &a)) run.fail("no answer to a reset");
		if (resets[s] == run.cfg.resets) break;
		resets[s]++;
		run.note("host: resets SSD %d", s);
		bool up = true;
		for (u32 g = first; g < end && up; g++) up = try_create(g);
		if (!up) continue;
		healed++;
		for (u32 g = first; g < end; g++) {
			reissue(g, false);
			store(&q(g).Frozen, frozenNo);
		}
		return;
	}
	dead[s] = 1;
	for (u32 g = first; g < end; g++) {
		QueueState &k = q(g);
		store(&k.Frozen, frozenDead);
		count(&k.Dropped, k.Issued - k.Completed - k.Dropped);
		fail_queue(g);
	}
}

void Host::record(SetState &st, const FailRecord &f) {
	u32 n = __atomic_add_fetch(&st.NumFails, 1, __ATOMIC_ACQ_REL);
	if (n <= maxFails) st.Fails[n - 1] = f;
}

// fail_unit records the rows of a unit, those of a split row once, and returns how many.
u32 Host::fail_unit(u32 slot, i64 unit, FailRecord f) {
	SetState &st = states[slot];
	u32 failed = 0;
	auto row = [&](u32 i) {
		if (st.PartBlocks != 0 && __atomic_exchange_n(at<u32>(st.Marks) + i, 1u, __ATOMIC_ACQ_REL) != 0) return;
		f.Index = i;
		f.Row = at<i64>(st.Rows)[i];
		record(st, f);
		failed++;
	};
	if (st.Order != 0)
		for (u32 k = at<u32>(st.Runs)[unit]; k < at<u32>(st.Runs)[unit + 1]; k++) row(at<u32>(st.Order)[k]);
	else
		row((u32)(unit / st.Parts));
	return failed;
}

void Host::fail_command(u32 g, u32 cid, u16 kind) {
	QueueState &k = q(g);
	Command &cmd = at<Command>(k.Commands)[cid];
	FailRecord f = {};
	f.Kind = kind;
	f.QID = (u16)k.QID;
	f.CID = (u16)wire(g, cid);
	f.Tries = load(&cmd.State) / cmdAttempt;
	f.LBA = cmd.Place & (((u64)1 << placeBits) - 1);
	f.Blocks = cmd.NLB + 1u;
	f.SSD = k.SSD;
	u32 slot = cmd.Set, rows = fail_unit(slot, cmd.Index, f);
	queue_fails += kind == failQueue ? rows : 0;
	store(&cmd.State, (load(&cmd.State) & cmdGen) | cmdFree);
	__atomic_fetch_and(&k.Retry[cid / 32], ~(1u << (cid & 31)), __ATOMIC_ACQ_REL);
	__atomic_fetch_or(&k.Free[cid / 32], 1u << (cid & 31), __ATOMIC_ACQ_REL);
	__atomic_fetch_sub(&remaining(slot)[g], 1, __ATOMIC_ACQ_REL);
}

void Host::fail_queue(u32 g) {
	QueueState &k = q(g);
	commands(g, [&](u32 cid, Command &) { fail_command(g, cid, failQueue); });
	while (k.PendHead != load(&k.PendTail)) {
		u32 slot = k.PendRing[k.PendHead % maxSets];
		Segment seg = k.Pend[k.PendHead % maxSets];
		k.PendHead++;
		for (i64 u = seg.Next; u < seg.End; u++) {
			FailRecord f = {};
			f.Kind = failQueue;
			f.QID = (u16)k.QID;
			f.SSD = k.SSD;
			queue_fails += fail_unit(slot, u, f);
		}
		__atomic_fetch_sub(&remaining(slot)[g], (u32)(seg.End - seg.Next), __ATOMIC_ACQ_REL);
	}
}

// leftovers takes over what a read_sync launch left behind: units that no warp took become a pending
// segment, after which the set goes on as an asynchronous one.
void Host::leftovers(Set &set, u32 g) {
	SetState &st = states[set.slot];
	QueueState &k = q(g);
	i64 lo, hi;
	share(set.units[2 * k.SSD + 1] - set.units[2 * k.SSD], g, st.Rotate, &lo, &hi);
	i64 next = std::min(lo + (i64)load(&taken(set.slot)[g]), hi);
	store(&taken(set.slot)[g], (u32)(hi - lo));
	if (next == hi) return;
	k.Pend[k.PendTail % maxSets] = {set.units[2 * k.SSD] + next, set.units[2 * k.SSD] + hi};
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
		if (k.BlocksRead != m.blocks && !dead[k.SSD]) run.fail("queue %u: %llu LBAs counted, the SSD was asked for %llu", g, k.BlocksRead, m.blocks);
		u64 lat = 0;
		for (u64 n : hist[g].Counts) lat += n;
		if (!dead[k.SSD] && lat != m.acked_ok) run.fail("queue %u: %llu latencies, %llu good completions", g, lat, m.acked_ok);
	}
	// Failures are those that the SSDs made final, of wrong requests, and of commands lost with their
	// queue.
	u64 want = terminal;
	if (!any_dead && (seen_fails < bad_rows + queue_fails || want < failed_least || want > failed_most))
		run.fail("%llu rows failed, %llu bad ones and %llu with their queues among them: that is %llu to %llu commands, the SSDs failed %llu", seen_fails, bad_rows, queue_fails, failed_least,
		         failed_most, want);
	// read_sync leaves commands that it could not issue any more to the host, as retries.
	if (!any_dead && (c.sync ? issued_sets > expected_issues : issued_sets != expected_issues)) run.fail("the sets count %llu commands, %llu units were good", issued_sets, expected_issues);
	u64 retried = 0, blocks = 0, shared = 0;
	for (u32 g = 0; g < nq(); g++) {
		retried += q(g).Retried;
		blocks += q(g).BlocksRead;
		shared += q(g).Coalesced;
	}
	if (blocks != blocks_sets) run.fail("the sets count %llu LBAs, the queues %llu", blocks_sets, blocks);
	if (!any_dead && shared != expected_shared) run.fail("the queues count %llu rows that share commands, there were %llu", shared, expected_shared);
	rows_shared = shared;
	if (retried != retried_sets) run.fail("the sets count %llu retries, the queues %llu", retried_sets, retried);
	for (const FailRecord &f : records) {
		bool found = false;
		for (const Injected &i : run.ssds[f.SSD]->injected)
			found |= i.qid == f.QID && i.wire == f.CID && i.lba == f.LBA && i.status == f.Status;
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
