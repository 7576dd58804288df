#include "model.h"

#include "host.h"

#include <algorithm>
#include <cstring>

namespace iotest {

namespace {
constexpr u32 poison_word = 0xdead5a5au; // of a submission queue entry that was fetched
constexpr u32 error_statuses[] = {status_of(0, 0x04), status_of(0, 0x06), status_of(2, 0x81), status_of(2, 0x82), status_of(0, 0x21)};

u8 *aligned(u64 bytes, u64 align) {
	void *p = nullptr;
	bytes = (bytes + align - 1) / align * align;
	if (posix_memalign(&p, align, bytes ? bytes : align) != 0) abort();
	return (u8 *)p;
}
} // namespace

Ssd::Ssd(Run &r, u32 i) : run(r), index(i), rng(r.cfg.seed * 1000003 + i + 77) {
	const Config &c = run.cfg;
	// Each SSD has its own view of memory, so that an address of another one is noticed.
	bias = ((u64)(i + 1) << 44) + rng.below(1 << 20) * 4096;
	bias = 0 - bias; // iova = address + (i+1) × 2^44 + …
	data_start = rng.below(3) == 0 ? 0 : rng.below(1ull << (rng.chance(500) ? 40 : 12));
	nsid = 1 + (u32)rng.below(3);
	queues.resize(c.queues);
	// Layout as gpuio.NewLayout.
	u64 on = 0;
	for (i64 row = i; row < (i64)c.universe; row += c.ssds) on++;
	u64 per_lba = c.per_lba(), lbas_row = c.lbas_row();
	u64 n = (on + per_lba - 1) / per_lba * lbas_row;
	medium.resize(std::max<u64>(n, 1) * c.lba);
	for (u64 b = 0; b < medium.size(); b += 8) {
		u64 junk = rng.next();
		memcpy(&medium[b], &junk, 8);
	}
	for (u64 k = 0; k < on; k++) {
		i64 row = (i64)(k * c.ssds + i);
		u64 at = per_lba > 1 ? k / per_lba * c.lba + k % per_lba * c.rowbytes : k * lbas_row * c.lba;
		for (u32 b = 0; b < c.rowbytes; b += 4) {
			u32 w = row_word(row, b / 4);
			memcpy(&medium[at + b], &w, std::min(4u, c.rowbytes - b));
		}
	}
}

void Ssd::add_region(const char *what, u8 *mem, u64 bytes, bool live) {
	regions.push_back(std::make_unique<Region>(Region{what, iova(mem), mem, bytes, live, 0, 0, 0}));
}

// admin hands a command to the agent. False: the run was stopped, or nothing came back in time.
bool Ssd::admin(Op o, u32 g, u32 cid, Answer *a) {
	op = o;
	op_g = g;
	op_cid = cid;
	u32 mine = peek(&asked) + 1;
	store(&asked, mine);
	if (!run.wait([&] { return load(&answered) == mine; }, 10'000'000'000)) return false;
	*a = result;
	return true;
}

void Ssd::agent() {
	while (!run.stopped()) {
		if (load(&asked) != peek(&answered)) answer();
		bool busy = false;
		i64 now = run.now();
		if (now >= stalled) {
			if (rng.below(100000) < run.cfg.stall) stalled = now + (i64)rng.below(run.cfg.timeout_us) * 1000;
			// Queues in any order, and not all each time.
			u32 start = (u32)rng.below(queues.size());
			for (u32 k = 0; k < queues.size(); k++) {
				u32 q = (start + k) % (u32)queues.size();
				if (queues[q].pair() == nullptr) continue;
				busy |= doorbells(q);
				if (!rng.chance(run.cfg.burst)) busy |= fetch(q);
			}
			busy |= finish();
			busy |= echo();
		}
		if (busy) {
			run.yield();
			continue;
		}
		i64 next = now + 2000;
		for (const Fetched &f : flight)
			if (!f.never) next = std::min(next, std::max(f.due, now + 100));
		for (const Echo &e : echoes) next = std::min(next, std::max(e.due, now + 100));
		run.wait([&] {
			if (run.stopped() || load(&asked) != peek(&answered)) return true;
			for (Queue &q : queues)
				if (Pair *p = q.pair()) {
					if (load(p->sqdb) != p->tail || load(p->cqdb) != p->chead) return true;
				}
			return false;
		}, next - now);
	}
	for (u32 q = 0; q < queues.size(); q++) // what the host did last counts too
		if (queues[q].pair() != nullptr) doorbells(q);
}

// doorbells looks at both doorbells of a queue.
bool Ssd::doorbells(u32 qi) {
	Queue &q = queues[qi];
	Pair *p = q.pair();
	u32 tail = load(p->sqdb);
	bool news = tail != p->tail;
	if (news) {
		if (tail >= p->entries) run.fail("ssd %u q%u: SQ doorbell %u of %u entries", index, p->qid, tail, p->entries);
		u32 had = (p->tail + p->entries - p->head) % p->entries, moved = (tail + p->entries - p->tail) % p->entries;
		// The doorbell cannot pass entries that were not fetched: there would be more commands
		// than entries.
		if (had + moved >= p->entries) run.fail("ssd %u q%u: SQ doorbell %u passes the head %u (tail was %u)", index, p->qid, tail, p->head, p->tail);
		run.note("ssd %d q%d sq doorbell %d", index, p->qid, tail);
		p->tail = tail;
	}
	// After the SQ doorbell: what the host did before it rang is seen.
	u32 head = load(p->cqdb);
	if (head != p->chead) {
		u32 used = (p->ctail + p->entries - p->chead) % p->entries, moved = (head + p->entries - p->chead) % p->entries;
		if (head >= p->entries || moved > used)
			run.fail("ssd %u q%u: CQ doorbell %u passes the tail %u (head was %u)", index, p->qid, head, p->ctail, p->chead);
		for (u32 i = 0; i < moved; i++) {
			Pair::Entry e = p->posted.front();
			p->posted.pop_front();
			if (e.use == 0) continue;
			(e.status == 0 ? q.acked_ok : q.acked_err)++;
			Cid &c = q.cids[e.cid];
			if (c.use != e.use || c.state != Cid::posted) continue; // it was tried again already
			if (e.status == 0) {
				c.state = Cid::idle;
			} else if ((e.status & status_dnr) == 0 && c.attempts <= run.cfg.retries) {
				c.state = Cid::again;
			} else {
				c.state = Cid::idle;
				q.terminal++;
			}
		}
		p->chead = head;
		news = true;
	}
	return news;
}

bool Ssd::fetch(u32 qi) {
	Pair *p = queues[qi].pair();
	u32 n = (u32)rng.between(1, 64);
	bool any = false;
	for (; n > 0 && p->head != p->tail; n--, any = true) take(qi, true);
	return any;
}

bool Ssd::fault(u32 permille) {
	if (permille == 0 || faults >= run.cfg.faults || !rng.chance(permille)) return false;
	faults++;
	return true;
}

// take fetches the entry at the head. Without execute it only looks what the host believes to have
// issued, of a queue that is being deleted.
void Ssd::take(u32 qi, bool execute) {
	Queue &q = queues[qi];
	Pair *p = q.pair();
	const Config &c = run.cfg;
	u32 slot = p->head;
	u32 *entry = (u32 *)(p->sq + (u64)slot * commandBytes);
	u32 sqe[16];
	memcpy(sqe, entry, sizeof sqe);
	check(qi, sqe, slot);
	// An entry belongs to the host again when it was fetched. It is marked, so that fetching it
	// again before the host's stores are visible is noticed.
	for (u32 i = 0; i < 16; i++) entry[i] = poison_word;
	p->head = (slot + 1) % p->entries;
	q.fetched++;
	u32 wire = sqe[0] >> 16, cid = wire & cidMask, blocks = (sqe[12] & 0xffff) + 1;
	q.blocks += blocks;
	Cid &k = q.cids[cid];
	if (k.use != 0 && k.wire != older(wire, 1)) run.fail("ssd %u q%u: CID %u has the identifier %04x after %04x", index, p->qid, cid, wire, k.wire);
	k.wire = wire;
	u64 prp1 = sqe[6] | (u64)sqe[7] << 32, prp2 = sqe[8] | (u64)sqe[9] << 32, lba = sqe[10] | (u64)sqe[11] << 32;
	run.note("ssd %d q%d fetch identifier %d lba+%d", index, p->qid, wire, (i64)(lba - data_start));
	if (k.state == Cid::posted) {
		// Its completion was not acknowledged. Only a command that is tried again may be here.
		if (k.status == 0 || (k.status & status_dnr) || k.attempts > c.retries)
			run.fail("ssd %u q%u: CID %u was used again before the CQ doorbell passed its completion", index, p->qid, cid);
		q.reused_early++;
		k.state = Cid::again;
	}
	switch (k.state) {
	case Cid::flight:
		run.fail("ssd %u q%u: CID %u is in use twice (LBA %llu in flight, LBA %llu new)", index, p->qid, cid, k.lba - data_start, lba - data_start);
	case Cid::again:
		if (k.lba != lba || k.blocks != blocks || k.prp1 != prp1 || k.prp2 != prp2)
			run.fail("ssd %u q%u: CID %u should try LBA %llu+%u again, and reads LBA %llu+%u", index, p->qid, cid, k.lba - data_start, k.blocks, lba - data_start, blocks);
		k.attempts++;
		break;
	default:
		k.attempts = 1;
	}
	k.state = Cid::flight;
	k.use++;
	k.lba = lba;
	k.blocks = blocks;
	k.prp1 = prp1;
	k.prp2 = prp2;
	if (!execute) return;
	translate(qi, k); // addresses must be right when the SSD may begin

	Fetched f{qi, cid, k.use, 0};
	i64 timeout = (i64)c.timeout_us * 1000;
	f.due = run.now() + (i64)rng.below((u64)c.latency_us * 1000 + 1);
	u64 z = (lba ^ index) * 0x9e3779b97f4a7c15ull;
	if (c.badlba && (z >> 40) % 1000 < c.badlba) f.status = status_of(2, 0x81);
	if (fault(c.dnr)) f.status = rng.pick(error_statuses) | status_dnr;
	if (fault(c.err)) f.status = rng.pick(error_statuses);
	if (f.status != 0) {
		f.dma = rng.chance(300);
		f.garbage = true;
	}
	if (fault(c.lost)) {
		f.lost = true;
		f.dma = rng.chance(500);
		faults_lost++;
	} else if (fault(c.late)) {
		// Up to far beyond abort and grace. Data is written at that time, wherever it then goes.
		f.due = run.now() + timeout / 2 + (i64)rng.below((u64)timeout * (rng.chance(300) ? 12 : 3));
		faults_late++;
	}
	f.duplicate = fault(c.duplicate);
	flight.push_back(f);
}

// check looks at an entry by itself, as a controller can.
void Ssd::check(u32 qi, const u32 *sqe, u32 slot) {
	Queue &q = queues[qi];
	Pair *p = q.pair();
	u32 stale = 0;
	for (u32 i = 0; i < 16; i++) stale += sqe[i] == poison_word;
	if (stale > 0) run.fail("ssd %u q%u: SQ entry %u is not visible at its doorbell (%u of 16 words)", index, p->qid, slot, 16 - stale);
	u64 lba = sqe[10] | (u64)sqe[11] << 32;
	u32 wire = sqe[0] >> 16, cid = wire & cidMask, blocks = (sqe[12] & 0xffff) + 1;
	if ((sqe[0] & 0xffff) != nvmeRead) run.fail("ssd %u q%u: SQ entry %u has opcode and flags %#x", index, p->qid, slot, sqe[0] & 0xffff);
	if (generation(wire) >= generations) run.fail("ssd %u q%u: identifier %04x", index, p->qid, wire);
	if (cid >= q.cids.size()) run.fail("ssd %u q%u: CID %u of %zu", index, p->qid, cid, q.cids.size());
	if (sqe[1] != nsid) run.fail("ssd %u q%u: namespace %u", index, p->qid, sqe[1]);
	if (sqe[2] | sqe[3] | sqe[4] | sqe[5] | sqe[13] | sqe[14] | sqe[15]) run.fail("ssd %u q%u: SQ entry %u: reserved words are not 0", index, p->qid, slot);
	if (sqe[12] >> 16) run.fail("ssd %u q%u: CID %u: dword 12 is %#x", index, p->qid, cid, sqe[12]);
	if (lba < data_start || blocks > lbas() || lba - data_start > lbas() - blocks)
		run.fail("ssd %u q%u: CID %u: LBA %llu+%u, the rows are at %llu+%llu", index, p->qid, cid, lba, blocks, data_start, lbas());
	check_blocks(qi, cid, lba - data_start, blocks);
}

// check_blocks: a command reads a row, a part of one, or rows in one window.
void Ssd::check_blocks(u32 qi, u32 cid, u64 lba, u32 blocks) {
	const Config &c = run.cfg;
	u32 row = c.lbas_row(), in = (u32)(lba % row);
	bool right = in == 0 && blocks == row;
	if (c.split) right = in % c.split == 0 && blocks == std::min(c.split, row - in);
	if (c.window) right = in == 0 && blocks % row == 0 && lba / c.window == (lba + blocks - 1) / c.window;
	if (!right)
		run.fail("ssd %u q%u: CID %u: LBA %llu+%u is no unit: rows have %u LBAs, split at %u, windows of %u", index, queues[qi].pair()->qid, cid, lba, blocks, row, c.split, c.window);
}

Ssd::Seg Ssd::resolve(u32 qi, u64 a, u64 bytes, const char *what) {
	Queue &q = queues[qi];
	for (auto &r : regions) {
		if (a < r->iova || a - r->iova >= r->bytes) continue;
		if (bytes > r->bytes - (a - r->iova)) run.fail("ssd %u q%u: %s leaves %s", index, q.pair()->qid, what, r->what);
		if (peek(&r->live) == 0)
			run.fail("ssd %u q%u: %s at %s+%llu, which is not mapped: its set is over", index, q.pair()->qid, what, r->what, a - r->iova);
		u64 stride = peek(&r->stride);
		if (stride != 0) { // all of it must be one row's
			u64 off = a - r->iova - peek(&r->first);
			if (off % stride + bytes > run.cfg.rowbytes || off / stride >= peek(&r->slots))
				run.fail("ssd %u q%u: %s, %llu bytes at %s+%llu, is no row's place", index, q.pair()->qid, what, bytes, r->what, a - r->iova);
		}
		return {r->mem + (a - r->iova), bytes};
	}
	run.fail("ssd %u q%u: %s at I/O address %#llx, which is not mapped", index, q.pair()->qid, what, a);
}

// translate follows a command's data pointer (base specification 2.0, section 4.1.1).
std::vector<Ssd::Seg> Ssd::translate(u32 qi, const Cid &k) {
	Queue &q = queues[qi];
	const Config &c = run.cfg;
	std::vector<Seg> out;
	u64 page = c.page, total = (u64)k.blocks * c.lba;
	if (k.prp1 % 4 != 0) run.fail("ssd %u q%u: PRP1 %#llx is not aligned to 4 bytes", index, q.pair()->qid, k.prp1);
	u32 cid = (u32)(&k - q.cids.data());
	if (q.stage_bytes != 0 && k.prp1 - q.stage_iova < (u64)q.stage_bytes * q.cids.size() && (k.prp1 != q.stage_iova + (u64)cid * q.stage_bytes || total > q.stage_bytes))
		run.fail("ssd %u q%u: CID %u reads into another CID's staging slot", index, q.pair()->qid, cid);
	u64 first = std::min(total, page - k.prp1 % page);
	out.push_back(resolve(qi, k.prp1, first, "data (PRP1)"));
	u64 rest = total - first;
	if (rest == 0) {
		if (k.prp2 != 0) run.fail("ssd %u q%u: CID %u: PRP2 %#llx is not needed", index, q.pair()->qid, cid, k.prp2);
		return out;
	}
	if (rest <= page) {
		if (k.prp2 % page != 0) run.fail("ssd %u q%u: CID %u: PRP2 %#llx has an offset", index, q.pair()->qid, cid, k.prp2);
		out.push_back(resolve(qi, k.prp2, rest, "data (PRP2)"));
		return out;
	}
	u64 n = (rest + page - 1) / page;
	if (k.prp2 % 8 != 0 || k.prp2 % page + n * 8 > page) run.fail("ssd %u q%u: CID %u: PRP list %#llx of %llu entries crosses a page", index, q.pair()->qid, cid, k.prp2, n);
	if (k.prp2 != q.list_iova + (u64)cid * q.list_bytes || n * 8 > q.list_bytes)
		run.fail("ssd %u q%u: CID %u: PRP list %#llx of %llu entries is not its own, %#llx of %u bytes", index, q.pair()->qid, cid, k.prp2, n, q.list_iova + (u64)cid * q.list_bytes, q.list_bytes);
	Seg list = resolve(qi, k.prp2, n * 8, "PRP list");
	for (u64 i = 0; i < n; i++) {
		u64 a;
		memcpy(&a, list.mem + i * 8, 8);
		if (a % page != 0) run.fail("ssd %u q%u: CID %u: PRP list entry %llu, %#llx, has an offset", index, q.pair()->qid, cid, i, a);
		u64 m = std::min(rest, page);
		out.push_back(resolve(qi, a, m, "data (PRP list)"));
		rest -= m;
	}
	return out;
}

// transfer writes the data of a command to the host's memory, in pieces between which others run.
void Ssd::transfer(const Fetched &f, bool prefix) {
	const Cid &k = queues[f.q].cids[f.cid];
	std::vector<Seg> to = translate(f.q, k);
	u64 from = (k.lba - data_start) * run.cfg.lba;
	u64 left = prefix ? rng.below(run.cfg.rowbytes) + 1 : ~0ull;
	for (const Seg &s : to) {
		for (u64 done = 0; done < s.bytes && left > 0;) {
			u64 n = std::min(s.bytes - done, std::min<u64>(left, rng.chance(700) ? s.bytes : rng.between(1, s.bytes)));
			if (f.garbage) {
				memset(s.mem + done, (int)rng.below(256), n);
			} else {
				memcpy(s.mem + done, &medium[from + done], n);
			}
			done += n;
			left -= left == ~0ull ? 0 : n;
			if (done < s.bytes) run.yield();
		}
		from += s.bytes;
	}
}

// finish completes commands that are due, in any order. Of a burst many complete at once.
bool Ssd::finish() {
	i64 now = run.now();
	std::vector<std::pair<u32, u64>> due; // cid and use are enough to find it again
	for (Fetched &f : flight)
		if (!f.never && f.due <= now) due.push_back({f.q << 16 | f.cid, f.use});
	if (due.empty()) return false;
	u64 n = rng.between(1, due.size());
	bool any = false;
	for (u64 i = 0; i < n; i++) {
		std::swap(due[i], due[i + rng.below(due.size() - i)]);
		for (size_t j = 0; j < flight.size(); j++) {
			Fetched &f = flight[j];
			if ((f.q << 16 | f.cid) != due[i].first || f.use != due[i].second) continue;
			if (!f.lost && !room(f.q)) {
				// CIDs bound the completions that are not acknowledged, unless there were more
				// than commands.
				const Queue &q = queues[f.q];
				if (q.injected_foreign == 0 && q.reused_early == 0) run.fail("ssd %u q%u: the CQ is full", index, q.pairs.back()->qid);
				full_waits++;
				break;
			}
			complete(j);
			any = true;
			break;
		}
	}
	return any;
}

// complete ends flight[i]: data, then the completion. The agent is alone with flight, and transfer
// yields only to other agents.
void Ssd::complete(size_t i) {
	Fetched f = flight[i];
	if (f.dma && !f.moved) transfer(f, f.garbage);
	if (f.lost) {
		flight[i].never = flight[i].moved = true; // until abort or deletion
		return;
	}
	flight.erase(flight.begin() + (long)i);
	Queue &q = queues[f.q];
	u32 wire = q.cids[f.cid].wire;
	if (f.status != 0) injected.push_back({q.pair()->qid, wire, f.status, q.cids[f.cid].lba});
	post(f.q, wire, f.status, f.use);
	// Mostly when the CID is in use again: until the generation is as old as that, it cannot be taken for
	// the new command's.
	if (f.duplicate) echoes.push_back({f.q, wire, f.status, rng.chance(300) ? 0 : run.now() + (i64)run.cfg.timeout_us * 2000});
	if (fault(run.cfg.foreign) && room(f.q)) {
		q.injected_foreign++;
		// Of no command, or of one that is long over.
		u32 stray = (u32)rng.between(q.cids.size(), cidMask) | (u32)rng.below(generations + 1) * cmdNextGen;
		if (rng.chance(300)) stray = older(q.cids[rng.below(q.cids.size())].wire, (u32)rng.between(1, 20));
		post(f.q, stray, rng.chance(500) ? 0 : status_of(0, 6), 0);
	}
}

// reused reports whether an echo's CID is out again under another generation.
bool Ssd::reused(const Echo &e) const {
	const Cid &k = queues[e.q].cids[e.wire & cidMask];
	return k.wire != e.wire && k.state == Cid::flight;
}

// echo posts completions once more.
bool Ssd::echo() {
	bool any = false;
	for (size_t i = 0; i < echoes.size();) {
		Echo e = echoes[i];
		if ((run.now() < e.due && !reused(e)) || !room(e.q)) {
			i++;
			continue;
		}
		echoes.erase(echoes.begin() + (long)i);
		u32 age = generation(queues[e.q].cids[e.wire & cidMask].wire) + generations - generation(e.wire);
		if (age % generations > generations / 2) continue; // the queue was full for so long
		echoes_late += reused(e);
		queues[e.q].injected_foreign++;
		post(e.q, e.wire, e.status, 0);
		any = true;
	}
	return any;
}

// room reports whether the completion queue has a free entry (section 3.3.3.2.1: one stays empty).
bool Ssd::room(u32 qi) {
	doorbells(qi);
	Pair *p = queues[qi].pair();
	return (p->ctail + 1) % p->entries != p->chead;
}

// post writes a completion queue entry: the dword with the phase tag last.
void Ssd::post(u32 qi, u32 wire, u32 status, u64 use) {
	Queue &q = queues[qi];
	u32 cid = wire & cidMask;
	Pair *p = q.pair();
	u32 *e = (u32 *)(p->cq + (u64)p->ctail * completionBytes);
	e[0] = (u32)rng.next();
	e[1] = (u32)rng.next();
	e[2] = p->head | p->qid << 16;
	if (rng.chance(100)) run.yield();
	run.note("ssd %d q%d completes identifier %d, status %d", index, p->qid, wire, status);
	p->posted.push_back({cid, status, use});
	if (use != 0) {
		q.cids[cid].state = Cid::posted;
		q.cids[cid].status = status;
	}
	__atomic_store_n(&e[3], wire | p->phase << 16 | status << 17, __ATOMIC_RELEASE);
	p->ctail = (p->ctail + 1) % p->entries;
	if (p->ctail == 0) p->phase ^= 1;
}

// drop ends a queue pair's commands, which the host may issue again. The SSD makes use of its last
// chance to write.
void Ssd::drop(u32 qi) {
	Queue &q = queues[qi];
	Pair *p = q.pair();
	doorbells(qi);
	for (Fetched &f : flight)
		if (f.q == qi && !f.moved && rng.chance(500)) {
			f.garbage |= rng.chance(200);
			transfer(f, f.garbage);
		}
	flight.erase(std::remove_if(flight.begin(), flight.end(), [&](const Fetched &f) { return f.q == qi; }), flight.end());
	echoes.erase(std::remove_if(echoes.begin(), echoes.end(), [&](const Echo &e) { return e.q == qi; }), echoes.end());
	while (p->head != p->tail) take(qi, false);
	for (Cid &c : q.cids)
		if (c.state == Cid::flight || c.state == Cid::posted) c.state = Cid::again;
	p->dead = true;
	p->last_sqdb = load(p->sqdb);
	p->last_cqdb = load(p->cqdb);
}

// answer executes the admin command in the mailbox.
void Ssd::answer() {
	u32 qi = op_g % run.cfg.queues;
	Queue &q = queues[qi];
	result = {true, 0};
	run.note("ssd %d admin %d queue %d cid %d", index, op, qi, op_cid);
	switch (op) {
	case create: {
		if (rng.chance(run.cfg.create_fails) && !q.pairs.empty()) {
			result.ok = false;
			break;
		}
		auto p = std::make_unique<Pair>();
		p->qid = next_qid++;
		p->g = op_g;
		p->entries = run.cfg.entries;
		p->sq = aligned((u64)p->entries * commandBytes, 4096);
		p->cq = aligned((u64)p->entries * completionBytes, 4096);
		u32 *db = (u32 *)aligned(64, 64);
		p->sqdb = db;
		p->cqdb = db + 8;
		memset(db, 0, 64);
		for (u64 i = 0; i < (u64)p->entries * commandBytes / 4; i++) ((u32 *)p->sq)[i] = poison_word;
		// Only the phase tag says that an entry is not new.
		for (u64 i = 0; i < (u64)p->entries * completionBytes / 4; i++) ((u32 *)p->cq)[i] = (u32)rng.next() & ~(1u << 16);
		q.cids.resize(run.cfg.entries - 1 - run.cfg.spare);
		q.pairs.push_back(std::move(p));
		break;
	}
	case destroy:
		if (rng.chance(run.cfg.delete_fails)) {
			result.ok = false; // and the SSD resumes its commands
			break;
		}
		drop(qi);
		break;
	case abort: {
		result.value = 1; // not aborted
		if (q.pair() == nullptr) break;
		for (size_t i = 0; i < flight.size(); i++) {
			Fetched &f = flight[i];
			if (f.q != qi || f.cid != (op_cid & cidMask)) continue;
			if (op_cid != q.cids[f.cid].wire) run.fail("ssd %u queue %u: Abort of the identifier %04x, the command's is %04x", index, qi, op_cid, q.cids[f.cid].wire);
			if (rng.chance(run.cfg.abort_refused) || !room(qi)) break;
			if (f.dma && !f.moved && rng.chance(300)) transfer(f, true);
			injected.push_back({q.pair()->qid, op_cid, status_aborted, q.cids[f.cid].lba});
			u64 use = f.use;
			flight.erase(flight.begin() + (long)i);
			post(qi, op_cid, status_aborted, use);
			result.value = 0;
			break;
		}
		break;
	}
	case reset:
		for (u32 i = 0; i < queues.size(); i++)
			if (queues[i].pair() != nullptr) drop(i);
		break;
	case orphan: {
		Cid &c = q.cids[op_cid];
		if (q.pair() != nullptr) doorbells(qi);
		if (c.state == Cid::flight) run.fail("ssd %u queue %u: CID %u is given up as done and was not completed", index, qi, op_cid);
		if (c.state == Cid::idle && c.status != 0) q.terminal--;
		c.state = Cid::again;
		c.attempts--;
		break;
	}
	case uncharge:
	case forget: {
		Cid &c = q.cids[op_cid];
		if (c.state != Cid::again) run.fail("ssd %u queue %u: CID %u was outstanding for the host, and is in state %u", index, qi, op_cid, c.state);
		if (op == forget) {
			c.state = Cid::idle;
			q.terminal++;
		} else {
			c.attempts--;
		}
		break;
	}
	case none:
		break;
	}
	store(&answered, peek(&asked));
}

} // namespace iotest
