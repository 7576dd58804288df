#include "rig.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sched.h>
#include <unistd.h>

#include "host.h"

namespace iotest {

bool trace_on = false;

namespace {
struct Field {
	const char *name;
	u32 Config::*at;
};
constexpr Field fields[] = {
	{"sync", &Config::sync}, {"ssds", &Config::ssds}, {"queues", &Config::queues}, {"entries", &Config::entries}, {"spare", &Config::spare},
	{"sets", &Config::sets}, {"inflight", &Config::inflight}, {"rows", &Config::rows}, {"sblocks", &Config::sblocks}, {"cblocks", &Config::cblocks},
	{"warps", &Config::warps}, {"page", &Config::page}, {"lba", &Config::lba}, {"rowbytes", &Config::rowbytes}, {"direct", &Config::direct},
	{"gap", &Config::gap}, {"split", &Config::split}, {"window", &Config::window}, {"reach", &Config::reach}, {"universe", &Config::universe}, {"retries", &Config::retries}, {"timeout_us", &Config::timeout_us}, {"limit_us", &Config::limit_us},
	{"store_buffer", &Config::store_buffer}, {"jitter", &Config::jitter}, {"err", &Config::err}, {"dnr", &Config::dnr}, {"lost", &Config::lost},
	{"late", &Config::late}, {"foreign", &Config::foreign}, {"duplicate", &Config::duplicate}, {"badlba", &Config::badlba}, {"latency_us", &Config::latency_us},
	{"burst", &Config::burst}, {"stall", &Config::stall}, {"faults", &Config::faults}, {"resets", &Config::resets}, {"abort_refused", &Config::abort_refused}, {"delete_fails", &Config::delete_fails},
	{"create_fails", &Config::create_fails}, {"badrow", &Config::badrow}, {"close", &Config::close}, {"sleepy", &Config::sleepy},
};
} // namespace

bool set_field(Config &c, const std::string &key, u64 value) {
	for (const Field &f : fields)
		if (key == f.name) {
			c.*f.at = (u32)value;
			return true;
		}
	return false;
}

std::string describe(const Config &c) {
	std::string out;
	for (const Field &f : fields) out += std::string(out.empty() ? "" : ",") + f.name + "=" + std::to_string(c.*f.at);
	return out;
}

// random_config: every seed is another mixture. Threaded runs are smaller and have few faults that
// cost real time.
Config random_config(u64 seed, bool threads) {
	Config c;
	c.seed = seed;
	c.threads = threads;
	Rng r(seed * 0x2545f4914f6cdd1dull + (threads ? 0x7777 : 0));
	c.ssds = (u32)r.between(1, r.chance(500) ? 2 : 4);
	c.queues = (u32)r.between(1, r.chance(500) ? 2 : 4);
	static const u32 small[] = {2, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 34}, large[] = {48, 64, 65, 100, 128, 256, 512, 1024};
	bool deep = r.chance(threads ? 100 : 250);
	c.entries = deep ? r.pick(large) : r.pick(small);
	if (c.entries > 2 && r.chance(200)) c.spare = (u32)r.between(1, c.entries / 2);
	c.sets = (u32)r.between(2, 8);
	c.inflight = (u32)r.between(1, std::min(c.sets, 6u));
	u64 capacity = (u64)c.ssds * c.queues * (c.entries - 1 - c.spare);
	u64 budget = threads ? 300 : 600; // rows of all sets, about
	c.rows = (u32)std::max<u64>(1, std::min<u64>(r.between(1, 4 * capacity + 8), 2 * budget / c.sets));
	if (!threads && c.entries >= 512 && r.chance(200)) { // full to the brim, with refill
		c.ssds = 1;
		c.queues = 1;
		c.sets = 2;
		c.rows = 1500;
	}
	u32 nq = c.ssds * c.queues;
	c.sblocks = (u32)r.between(1, std::min(nq, 6u) + r.below(2));
	c.cblocks = (u32)r.between(1, std::min(nq, 6u) + r.below(2));
	c.warps = r.chance(250) ? 2 : 1;
	c.universe = (u32)r.between(c.ssds, 300);

	c.page = r.chance(500) ? 512 : 4096;
	c.lba = c.page == 4096 && r.chance(100) ? 4096 : 512;
	switch (r.below(5)) {
	case 0: { // packed
		static const u32 t[] = {64, 100, 128, 61, 256, 16, 170};
		c.rowbytes = r.pick(t);
		break;
	}
	case 1: { // padded
		static const u32 t[] = {300, 600, 1100, 515, 2000, 401};
		c.rowbytes = r.pick(t);
		break;
	}
	default: // whole LBAs
		c.rowbytes = c.lba * (c.lba == 4096 ? (u32)r.between(1, 4) : r.pick({1u, 1u, 1u, 2u, 3u, 5u, 8u, 9u}));
		c.direct = r.chance(700);
	}
	static const u32 gaps[] = {4, 16, 36, 512};
	c.gap = r.chance(500) ? 0 : r.pick(gaps);
	if (!c.direct && r.chance(200)) c.gap = (u32)r.below(40);
	if (c.rowbytes > 2048) c.rows = std::min(c.rows, 60u);

	c.retries = (u32)r.below(4);
	c.timeout_us = threads ? (u32)r.between(30000, 60000) : (u32)r.between(100, 2000);
	c.limit_us = threads ? (u32)r.between(2000, 200000) : r.chance(300) ? (u32)r.between(1, 100) : (u32)r.between(100, 10000);
	static const u32 buffers[] = {0, 1, 4, 16, 64};
	c.store_buffer = r.pick(buffers);
	c.jitter = r.chance(500);
	static const u32 sleeps[] = {512, 512, 512, 128, 32, 8};
	c.sleepy = r.pick(sleeps);
	if (r.chance(40)) c.close = 150;
	c.latency_us = r.chance(200) ? 0 : (u32)r.between(1, 100);
	c.burst = r.chance(500) ? 0 : (u32)r.between(100, 950);
	c.badrow = r.chance(200) ? (u32)r.between(5, 200) : 0;
	// Half of the seeds have no faults: there the fast path is to be stressed.
	if (r.chance(500)) {
		if (r.chance(600)) c.err = (u32)r.between(1, 200);
		if (r.chance(400)) c.dnr = (u32)r.between(1, 50);
		if (r.chance(300)) c.badlba = (u32)r.between(1, 100);
		u32 rare = threads ? 10 : 30;
		if (r.chance(500)) c.lost = (u32)r.between(1, rare);
		if (r.chance(500)) c.late = (u32)r.between(1, rare);
		if (r.chance(300)) c.foreign = (u32)r.between(1, rare);
		if (r.chance(300)) c.duplicate = (u32)r.between(1, 300);
		c.abort_refused = (u32)r.below(1001);
		c.resets = (u32)r.below(4);
		if (r.chance(250)) c.create_fails = 300;
		if (r.chance(250)) c.delete_fails = 300;
		c.stall = r.chance(200) ? 50 : 0;
	}
	if (r.chance(250)) {
		// read_sync: a warp for each row in flight, so several for each queue.
		c.sync = 1;
		c.sblocks = (u32)r.between(1, 6);
		c.warps = (u32)r.between(1, 3);
		c.rows = std::min(c.rows, 80u);
		c.limit_us = std::max(c.limit_us, 500u); // enough to begin a row
	}
	// The form of commands: a row each, several for a row, or one for several.
	u32 form = (u32)r.below(20);
	if (form < 5) {
		if (c.lbas_row() == 1) c.rowbytes = c.direct ? c.lba * (u32)r.between(2, 6) : c.lba + (u32)r.between(1, 5 * c.lba);
		if (c.rowbytes > 2048) c.rows = std::min(c.rows, 60u);
		c.split = (u32)r.between(1, c.lbas_row() - 1);
	} else if (form < 13 && !c.sync) {
		if (c.direct && r.chance(700)) { // so that rows may land in pages of their own
			c.page = 512;
			c.gap = r.chance(300) ? 512 : 0;
			// No SSD has pages smaller than fullReach: rows of whole pages have no gaps between them.
			if (c.rowbytes < fullReach) c.rowbytes = fullReach + 512 * (u32)r.below(2);
			c.rows = std::min(c.rows, 60u);
		}
		if (c.rowbytes < fullReach) c.page = 4096;
		u32 most = std::min<u32>(64, c.page * c.page / 8 / c.lba / c.lbas_row()); // rows, for a page of PRP list
		c.window = c.lbas_row() * (u32)r.between(1, r.chance(500) ? std::min(most, 4u) : most);
		c.reach = std::max(c.lbas_row(), fullReach / c.lba / (r.chance(500) ? 1 : (u32)r.between(1, 8)));
		if (r.chance(300)) c.universe = (u32)r.between(c.ssds, 40); // dense, with many equal rows
		if (c.window * c.lba > 8192 && c.entries > 128) { // else staging is large
			c.entries = 128;
			c.spare = 0;
		}
	}
	c.faults = threads ? 3 : r.chance(500) ? (u32)r.between(1, 6) : 40;
	if (c.err > 50 || c.dnr > 20) c.faults = std::max(c.faults, 30u);
	return c;
}

Run::Run(const Config &c) : cfg(c) {
	options.seed = c.seed;
	options.store_buffer = c.store_buffer;
	options.jitter = c.jitter != 0;
	options.stall = c.sleepy;
	if (!c.threads) events.resize(4000); // always: asking for the time is part of the schedule
	for (u32 s = 0; s < c.ssds; s++) ssds.push_back(std::make_unique<Ssd>(*this, s));
	host = std::make_unique<Host>(*this);
}

Run::~Run() = default;

void Run::note(const char *what, i64 a, i64 b, i64 c, i64 d) {
	if (events.empty()) return;
	events[nevents++ % events.size()] = {now(), what, a, b, c, d};
}

void Run::fail(const char *format, ...) {
	static u32 first;
	if (__atomic_exchange_n(&first, 1u, __ATOMIC_ACQ_REL) != 0)
		for (;;) pause(); // another agent reports and ends the process
	va_list v;
	va_start(v, format);
	fprintf(stderr, "FAIL seed %llu: ", cfg.seed);
	vfprintf(stderr, format, v);
	va_end(v);
	fprintf(stderr, "\n  at %lld us of %s time\n  configuration: %s\n  replay: iotest %s--seed %llu --trace\n", now() / 1000, cfg.threads ? "real" : "virtual", describe(cfg).c_str(),
	        cfg.threads ? "--threads " : "", cfg.seed);
	if (host) host->dump(stderr);
	u64 n = std::min<u64>(nevents, trace_on ? 400 : 0);
	for (u64 i = nevents - n; i < nevents; i++) {
		const Event &e = events[i % events.size()];
		fprintf(stderr, "  %10lld.%03lld us  ", e.t / 1000, e.t % 1000);
		// The format takes up to four numbers.
		int k = 0;
		const i64 args[] = {e.a, e.b, e.c, e.d};
		for (const char *p = e.what; *p != 0; p++) {
			if (p[0] == '%' && p[1] == 'd' && k < 4) {
				fprintf(stderr, "%lld", args[k++]);
				p++;
			} else {
				fputc(*p, stderr);
			}
		}
		fputc('\n', stderr);
	}
	fflush(stderr);
	_exit(1);
}

void Run::yield() {
	if (cfg.threads)
		sched_yield();
	else
		shim::yield();
}

bool Run::wait(const std::function<bool()> &pred, i64 ns) {
	i64 until = now() + ns;
	if (!cfg.threads) {
		shim::wait_until(pred, until);
		return pred();
	}
	for (u32 i = 0; !pred(); i++) {
		if (now() >= until) return pred();
		if (i < 8)
			sched_yield();
		else
			usleep(20);
	}
	return true;
}

void Run::launch(Stream &s, Launch *l) {
	u32 tail = peek(&s.tail);
	if (tail - load(&s.head) >= Stream::room) fail("stream %s: more than %u launches", s.name, Stream::room);
	s.ring[tail % Stream::room] = l;
	store(&s.tail, tail + 1);
}

void Run::serve(Stream &s) {
	for (;;) {
		u32 head = peek(&s.head);
		while (!wait([&] { return stopped() || load(&s.tail) != head; }, 1'000'000'000)) {
		}
		if (load(&s.tail) == head) return; // stopped, and nothing is left
		Launch *l = s.ring[head % Stream::room];
		if (l->after != nullptr)
			while (!wait([&] { return load(&l->after->done) != 0; }, 1'000'000'000)) {
			}
		note("launch %d of a stream begins, %d blocks", (i64)l->hx.Seq, l->blocks);
		if (cfg.threads) {
			shim::Result r = shim::run_grid(l->kernel, l->blocks, l->threads, l->params, l->hx, options);
			if (!r.ok) fail("%s", r.error.c_str());
		} else {
			u32 over = 0;
			world->grid(l->kernel, l->blocks, l->threads, l->params, l->bytes, l->hx, [&over] { over = 1; });
			while (!wait([&] { return over != 0; }, 1'000'000'000)) {
			}
		}
		note("launch %d ends", (i64)l->hx.Seq);
		store(&l->done, 1u);
		store(&s.head, head + 1);
	}
}

void Run::go() {
	if (cfg.threads) {
		std::vector<std::thread> t;
		for (auto &s : ssds) t.emplace_back([&s] { s->agent(); });
		t.emplace_back([this] { serve(submit); });
		t.emplace_back([this] { serve(complete); });
		t.emplace_back([this] { host->agent(); });
		for (auto &x : t) x.join();
	} else {
		shim::World w(options);
		world = &w;
		for (auto &s : ssds) w.agent("ssd", [&s] { s->agent(); });
		w.agent("submit stream", [this] { serve(submit); });
		w.agent("complete stream", [this] { serve(complete); });
		w.agent("host", [this] { host->agent(); });
		shim::Result r = w.run(200'000'000);
		if (!r.ok) fail("%s", r.error.c_str());
		world = nullptr;
		schedule = r.schedule;
	}
	if (!host->done) fail("hang: the host is not done");
	host->verdict();
}

} // namespace iotest
