// selftest MODE [SEEDS]: what package selftest runs. Prints what it found wrong and exits 1 then.
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "params.h"
#include "shim.h"

namespace {

int failures;

__attribute__((format(printf, 1, 2))) void wrong(const char *format, ...) {
	va_list args;
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n");
	failures++;
}

// The memory that kernels get.
struct Memory {
	std::vector<u64> data = std::vector<u64>(1024), out = std::vector<u64>(2048);
	std::vector<u32> flag = std::vector<u32>(16);
	TestParams params(u32 count = 0, u32 seed = 0) {
		return TestParams{(u64)data.data(), (u64)flag.data(), (u64)out.data(), count, seed};
	}
};

const shim::Kernel *kernel(const char *name) {
	const shim::Kernel *k = shim::find(name);
	if (k == nullptr) {
		printf("no kernel %s\n", name);
		exit(1);
	}
	return k;
}

shim::Result threaded(const char *name, u32 blocks, u32 threads, const TestParams &p, const shim::Options &o = {}) {
	return shim::run_grid(kernel(name), blocks, threads, &p, hx_launch{0, 1}, o);
}

shim::Result world(const char *name, u32 blocks, u32 threads, const TestParams &p, const shim::Options &o, u64 steps = 10000000) {
	shim::World w(o);
	w.grid(kernel(name), blocks, threads, &p, sizeof p, hx_launch{0, 1});
	return w.run(steps);
}

shim::Options adverse(u64 seed) {
	shim::Options o;
	o.seed = seed;
	o.store_buffer = (u32)(seed % 3 == 0 ? 1 : seed % 3 == 1 ? 4 : 16);
	o.jitter = seed % 4 != 3;
	return o;
}

void check(const char *name, const shim::Result &r, u64 seed = 0) {
	if (!r.ok) wrong("%s, seed %llu: %s", name, seed, r.error.c_str());
}

double seconds() {
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void collectives(u64 seeds) {
	constexpr u32 n = 5000;
	const u64 want = (u64)n * (n - 1) / 2;
	for (u32 shape = 0; shape < 5; shape++) {
		u32 blocks = shape == 3 ? 40 : shape == 4 ? 2 : 1 + shape * 3, threads = shape == 4 ? 1024 : 32u << shape;
		for (u64 seed = 0; seed < seeds; seed++) {
			for (int in_world = 0; in_world < 2; in_world++) {
				Memory m;
				shim::Options o = seed == 0 ? shim::Options{} : adverse(seed);
				TestParams p = m.params(n);
				shim::Result r = in_world ? world("t_sum", blocks, threads, p, o) : threaded("t_sum", blocks, threads, p, o);
				check("t_sum", r, seed);
				if (m.out[0] != want || m.out[1] != blocks)
					wrong("t_sum %u x %u, seed %llu, world %d: sum %llu, want %llu; %llu of %u blocks saw right votes", blocks,
					      threads, seed, in_world, m.out[0], want, m.out[1], blocks);
			}
		}
	}
	for (u64 seed = 0; seed < seeds; seed++) {
		Memory m;
		check("t_atoms", threaded("t_atoms", 1, 64, m.params(), seed == 0 ? shim::Options{} : adverse(seed)), seed);
		check("t_atoms", world("t_atoms", 1, 64, m.params(), adverse(seed)), seed);
		if (m.out[0] != 0) wrong("t_atoms, seed %llu: %llu wrong values", seed, m.out[0]);
	}
}

void errors() {
	struct Case {
		const char *name;
		u32 threads;
		std::vector<const char *> want;
	};
	const Case cases[] = {
	    {"e_not_in_mask", 32, {"e_not_in_mask", "ballot(0x000000ff)", "does not name the lane itself"}},
	    {"e_masks_differ", 32, {"syncwarp(0x000000ff)", "syncwarp(0x0000ffff)", "named another mask"}},
	    {"e_ops_differ", 32, {"syncwarp(0xffffffff)", "ballot(0xffffffff)"}},
	    {"e_lane_left", 32, {"lane 3", "left the kernel", "syncwarp"}},
	    {"e_lane_leaves", 32, {"lane 31", "left the kernel", "syncwarp(0xffffffff)"}},
	    {"e_barrier_left", 64, {"syncthreads", "left the kernel", "block 0"}},
	    {"e_barrier_leaves", 64, {"left the kernel", "syncthreads"}},
	    {"e_divergent", 32, {"no thread can go on", "lanes 16-31 in syncwarp(0xffffffff) without lanes 0-15", "lanes 0-15 in syncthreads"}},
	    {"e_circle", 32, {"no thread can go on", "lane 0 in syncwarp(0x00000003) without lane 1"}},
	    {"e_shfl_outside", 32, {"reads lane 20", "shfl(0x0000ffff)"}},
	    {"e_reduce_half", 32, {"reduce_add(0x0000ffff)", "all lanes"}},
	    {"e_null", 32, {"block 0, thread 5 (warp 0 lane 5): memory fault at 0x10"}},
	    {"e_misaligned", 32, {"thread 6", "8 bytes to misaligned"}},
	    {"e_deep", 32, {"stack overflow"}},
	    {"e_shared", 32, {"64000 bytes of shared memory", "49152"}},
	};
	for (const Case &c : cases) {
		for (u64 seed = 0; seed < 6; seed++) {
			for (int in_world = 0; in_world < 2; in_world++) {
				Memory m;
				shim::Options o;
				if (seed != 0) o = adverse(seed);
				TestParams p = m.params(std::strcmp(c.name, "e_deep") == 0 ? 10000 : 0);
				shim::Result r = in_world ? world(c.name, 1, c.threads, p, o) : threaded(c.name, 1, c.threads, p, o);
				if (r.ok) {
					wrong("%s, seed %llu, world %d: not caught", c.name, seed, in_world);
					continue;
				}
				if (r.error.find(c.name) == std::string::npos) wrong("%s: the error does not name the kernel: %s", c.name, r.error.c_str());
				// The last one decides which of two words a mistake gets; without chance it is known.
				for (const char *w : c.want) {
					if (seed == 0 && in_world == 0 && r.error.find(w) == std::string::npos)
						wrong("%s: the error lacks \"%s\": %s", c.name, w, r.error.c_str());
				}
			}
		}
	}
	// The other blocks of a grid stop too, and the pool is fit for the next grid.
	Memory m;
	shim::Result r = threaded("e_lane_left", 64, 32, m.params());
	if (r.ok) wrong("e_lane_left in 64 blocks: not caught");
	check("t_nop after an error", threaded("t_nop", 64, 32, m.params()));
	shim::Options o;
	r = world("e_hang", 1, 32, m.params(), o, 20000);
	if (r.ok || r.error.find("not at its end after 20000 steps") == std::string::npos || r.error.find("e_hang") == std::string::npos)
		wrong("e_hang: %s", r.error.c_str());
	o.limit_ns = 50000000;
	r = threaded("e_hang", 3, 64, m.params(), o);
	if (r.ok || r.error.find("e_hang") == std::string::npos || r.error.find("not at its end after 50 ms") == std::string::npos)
		wrong("e_hang: %s", r.error.c_str());
	for (u32 threads : {0u, 1025u}) {
		TestParams p = m.params();
		if (shim::run_grid(kernel("t_nop"), 1, threads, &p, hx_launch{0, 1}, {}).ok) wrong("%u threads are accepted", threads);
	}
	TestParams p = m.params();
	if (shim::run_grid(kernel("t_nop"), 0, 32, &p, hx_launch{0, 1}, {}).ok) wrong("0 blocks are accepted");
	if (shim::run_grid(shim::find("no_such"), 1, 32, &p, hx_launch{0, 1}, {}).ok) wrong("a kernel that is not there is accepted");
}

// The content of each kernel's Out: [0] fresh or right, [1] stale or wrong.
void litmus(u64 seeds) {
	struct Case {
		const char *name;
		u32 blocks, threads, count;
		bool stale; // must show
	};
	const Case cases[] = {
	    {"t_mp_nothing", 2, 32, 0, true},       {"t_mp_fence", 2, 32, 0, false},
	    {"t_mp_fence_rmw", 2, 32, 0, false},    {"t_mp_release", 2, 32, 0, false},
	    {"t_mp_fence_too_early", 2, 32, 0, true}, {"t_join_nothing", 2, 32, 0, true},
	    {"t_join_warp", 2, 32, 0, false},       {"t_join_block", 2, 64, 0, false},
	    {"t_join_shfl", 2, 32, 0, true},        {"t_near_nothing", 1, 32, 4, true},
	    {"t_near_warp", 1, 32, 4, false},       {"t_near_block", 1, 64, 4, false},
	    {"t_one_word", 2, 32, 40, false},       {"t_overlap", 1, 32, 200, false},
	    {"t_spin", 1, 96, 0, false},
	};
	for (const Case &c : cases) {
		u64 stale = 0, first = 0;
		for (u64 seed = 0; seed < seeds; seed++) {
			for (int in_world = 0; in_world < 2; in_world++) {
				if (c.stale && in_world == 0) continue;
				if (!in_world && seed % 8 != 0) continue;
				Memory m;
				TestParams p = m.params(c.count, (u32)seed);
				shim::Result r = in_world ? world(c.name, c.blocks, c.threads, p, adverse(seed)) : threaded(c.name, c.blocks, c.threads, p, adverse(seed));
				check(c.name, r, seed);
				if (m.out[1] != 0) {
					if (stale == 0) first = seed;
					stale++;
					if (!c.stale) wrong("%s, seed %llu, world %d: %llu old or wrong values", c.name, seed, in_world, m.out[1]);
				}
				if (std::strcmp(c.name, "t_overlap") == 0 &&
				    std::memcmp(reinterpret_cast<char *>(m.out.data()) + 1024, reinterpret_cast<char *>(m.out.data()) + 4096, 1024) != 0)
					wrong("t_overlap, seed %llu, world %d: memory is not what the threads wrote", seed, in_world);
			}
		}
		if (c.stale && stale == 0) wrong("%s: no old value in %llu seeds", c.name, seeds);
		if (c.stale) printf("%s: %llu of %llu seeds show it, the first is %llu\n", c.name, stale, seeds, first);
		// Without held stores x86 and this schedule hide what is missing; nothing may break.
		Memory m;
		check(c.name, threaded(c.name, c.blocks, c.threads, m.params(c.count)), 0);
	}
}

// Prints the schedules' hashes; the Go test compares two processes.
void determinism(u64 seeds) {
	std::vector<u64> hashes;
	for (u64 seed = 0; seed < seeds; seed++) {
		u64 hash[2];
		std::vector<u64> order[2];
		i64 end[2];
		for (int k = 0; k < 2; k++) {
			Memory m;
			shim::World w(adverse(seed));
			u32 done = 0;
			u64 waits = 0;
			w.agent("host", [&] {
				for (u32 i = 0; i < 2; i++) w.grid(kernel("t_trace"), 2, 64, &(const TestParams &)m.params(), sizeof(TestParams), hx_launch{0, 1 + i}, [&] { done++; });
				shim::wait_until([&] { return done == 2; }, shim::now() + 1000000000);
			});
			w.agent("ticker", [&] {
				for (;;) {
					shim::sleep_for((i64)w.random(200));
					waits++;
				}
			}, true);
			shim::Result r = w.run(10000000);
			check("t_trace", r, seed);
			if (done != 2) wrong("t_trace, seed %llu: %u grids were done", seed, done);
			hash[k] = r.schedule;
			order[k] = m.out;
			order[k].push_back(waits);
			end[k] = w.now();
		}
		if (hash[0] != hash[1] || order[0] != order[1] || end[0] != end[1]) wrong("seed %llu does not replay: %llx, %llx", seed, hash[0], hash[1]);
		for (u64 h : hashes) {
			if (h == hash[0]) wrong("seed %llu gives another seed's schedule", seed);
		}
		hashes.push_back(hash[0]);
		printf("%016llx\n", hash[0]);
	}
}

void clocks() {
	Memory m;
	shim::Options o;
	double begin = seconds();
	check("t_sleep", world("t_sleep", 1, 32, m.params(5000), o)); // 5 s of virtual time
	if (seconds() - begin > 2) wrong("5 virtual seconds took %.1f real ones", seconds() - begin);
	if (m.out[0] < 5000000000 || m.out[0] > 5100000000) wrong("5000 pauses of 1 ms took %llu virtual ns", m.out[0]);

	shim::World w(o);
	bool in_time = true, late = false;
	int unwound = 0;
	w.agent("waits", [&] {
		i64 begin = shim::now();
		in_time = shim::wait_until([] { return false; }, begin + 3000000000);
		late = shim::now() >= begin + 3000000000;
	});
	w.agent("daemon", [&] {
		struct Guard {
			int &n;
			~Guard() { n++; }
		} guard{unwound};
		shim::wait_until([] { return false; }, INT64_MAX);
	}, true);
	check("wait_until", w.run(1000));
	if (in_time || !late || unwound != 1) wrong("wait_until: in time %d, late %d, daemons unwound %d", in_time, late, unwound);

	shim::World dead(o);
	dead.agent("stuck", [] { shim::wait_until([] { return false; }, INT64_MAX); });
	shim::Result r = dead.run(1000);
	if (r.ok || r.error.find("deadlock") == std::string::npos || r.error.find("stuck") == std::string::npos) wrong("stuck agent: %s", r.error.c_str());

	shim::World thrown(o);
	thrown.agent("thrower", [] { throw std::runtime_error("a reason"); });
	r = thrown.run(1000);
	if (r.ok || r.error.find("thrower: a reason") == std::string::npos) wrong("agent that threw: %s", r.error.c_str());

	// More threads than fibers: later blocks wait for room.
	Memory big;
	check("t_sum", world("t_sum", 40, 512, big.params(1000), o));
	if (big.out[1] != 40) wrong("40 blocks of 512 threads: %llu were right", big.out[1]);
}

// Grids of several OS threads that wait for each other, and block hooks.
void concurrent() {
	Memory m;
	std::vector<std::thread> streams;
	for (u32 side = 0; side < 2; side++) {
		streams.emplace_back([&m, side] {
			shim::block_signals();
			TestParams p = m.params(300, side);
			check("t_ping", shim::run_grid(kernel("t_ping"), 1, 32, &p, hx_launch{0, 1}, {}));
		});
	}
	for (std::thread &t : streams) t.join();
	if (m.out[0] != 2) wrong("t_ping: %llu of 2 grids ended well", m.out[0]);

	std::atomic<u32> entered{0}, left{0};
	shim::Options o;
	o.enter = [&](u32 block) { entered++; return block % 2 == 0; };
	o.leave = [&](u32) { left++; };
	Memory h;
	TestParams p = h.params(100);
	check("t_sum", shim::run_grid(kernel("t_sum"), 10, 32, &p, hx_launch{0, 1}, o, 3));
	if (entered != 10 || left != 5 || h.out[1] != 5) wrong("hooks: %u entered, %u left, %llu ran", entered.load(), left.load(), h.out[1]);
}

sigjmp_buf back;
volatile sig_atomic_t chained;
void on_segv(int, siginfo_t *, void *) {
	chained = 1;
	siglongjmp(back, 1);
}

// Somebody's own handler still gets what is no kernel's.
void chain() {
	struct sigaction a = {};
	a.sa_sigaction = on_segv;
	a.sa_flags = SA_SIGINFO | SA_ONSTACK;
	sigaction(SIGSEGV, &a, nullptr);
	Memory m;
	if (threaded("e_null", 1, 32, m.params()).ok) wrong("e_null: not caught");
	if (chained != 0) wrong("a kernel's fault went to the program's handler");
	void *page = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (sigsetjmp(back, 1) == 0) *static_cast<volatile char *>(page) = 1;
	if (chained == 0) wrong("the program's own fault did not come to its handler");
	check("t_nop after faults", threaded("t_nop", 4, 64, m.params()));
}

void speed() {
	Memory m;
	auto time = [&](const char *what, const char *name, u32 blocks, u32 threads, u32 count, u32 times, double parts) {
		TestParams p = m.params(count);
		threaded(name, blocks, threads, p);
		double begin = seconds();
		for (u32 i = 0; i < times; i++) threaded(name, blocks, threads, p);
		printf("%s: %.3g us\n", what, (seconds() - begin) / times / parts * 1e6);
	};
	time("launch 1 x 32", "t_nop", 1, 32, 0, 50000, 1);
	time("launch 1 x 32 with two collectives", "t_collectives", 1, 32, 2, 50000, 1);
	time("launch 8 x 128", "t_nop", 8, 128, 0, 5000, 1);
	time("launch 64 x 256", "t_nop", 64, 256, 0, 500, 1);
	time("collective, a lane", "t_collectives", 1, 32, 50000, 1, 50000.0 * 32);
	shim::Options o;
	o.jitter = true;
	o.store_buffer = 8;
	double begin = seconds();
	u64 steps = 0;
	for (o.seed = 0; o.seed < 20; o.seed++) {
		shim::World w(o);
		TestParams p = m.params(20000);
		w.grid(kernel("t_sum"), 4, 128, &p, sizeof p, hx_launch{0, 1});
		w.run(100000000);
		steps += w.steps();
	}
	printf("World step: %.3g us (%llu steps)\n", (seconds() - begin) / (double)steps * 1e6, steps);
}

// Cases for the ThreadSanitizer build: each is run in a process of its own, which says by its reports
// whether there is a race. In all, what is checked besides is that the kernels ran.
int tsan_case(const char *name, u64 seeds) {
	for (u64 seed = 0; seed < seeds; seed++) {
		Memory m;
		shim::Options o;
		o.seed = seed;
		o.jitter = seed % 2 != 0;
		if (seed % 3 == 2) o.store_buffer = 8;
		bool host = std::strncmp(name, "doorbell", 8) == 0;
		if (host) {
			shim::World w(o);
			TestParams p = m.params(std::strcmp(name, "doorbell_fence") == 0);
			u64 got = 0;
			bool rang = false;
			w.agent("controller", [&] {
				rang = shim::wait_until([&] { return shim::host_load(&m.flag[0]) != 0; }, shim::now() + 1000000);
				shim::host_copy(&got, &m.data[0], sizeof got);
			});
			w.grid(kernel("t_doorbell"), 1, 32, &p, sizeof p, hx_launch{0, 1});
			check(name, w.run(1000000), seed);
			if (!rang) wrong("%s, seed %llu: the doorbell was not seen", name, seed);
			continue;
		}
		if (std::strcmp(name, "order") == 0) { // agent → grid → done → agent → grid, all plain
			shim::World w(o);
			TestParams p = m.params(2);
			int stage = 0;
			w.agent("host", [&] {
				for (u32 i = 0; i < 64; i++) m.data[i] = 7;
				w.grid(kernel("t_near_block"), 1, 64, &p, sizeof p, hx_launch{0, 1}, [&] {
					for (u32 i = 0; i < 64; i++) {
						if (m.data[i] != 2) wrong("order: %llu", m.data[i]);
						m.data[i] = 0;
					}
					w.grid(kernel("t_near_warp"), 1, 32, &p, sizeof p, hx_launch{0, 2}, [&] { stage++; });
				});
			});
			check(name, w.run(1000000), seed);
			if (stage != 1) wrong("order, seed %llu: stage %d", seed, stage);
			continue;
		}
		if (std::strcmp(name, "after_error") == 0) { // the host has its memory back
			o.limit_ns = 5000000;
			for (int i = 0; i < 2; i++) {
				if (threaded("e_hang", 2, 32, m.params(), o).ok || world("e_hang", 2, 32, m.params(), o, 2000).ok)
					wrong("e_hang: not caught");
				m.flag[0] = 0;
			}
			continue;
		}
		if (std::strcmp(name, "two_grids") == 0) { // at the same time, on the same words
			shim::World w(o);
			TestParams p = m.params(1);
			for (u32 i = 0; i < 2; i++) w.grid(kernel("t_near_warp"), 1, 32, &p, sizeof p, hx_launch{0, 1});
			check(name, w.run(1000000), seed);
			continue;
		}
		bool in_threads = std::strncmp(name, "threads_", 8) == 0;
		const char *k = in_threads ? name + 8 : name;
		u32 threads = std::strstr(k, "block") != nullptr || std::strcmp(k, "t_sum") == 0 ? 64 : 32;
		for (int again = 0; again < 3; again++) {
			Memory fresh;
			TestParams p = fresh.params(40);
			u32 blocks = 2;
			for (const char *alone : {"near", "_word", "atoms", "overlap"}) {
				if (std::strstr(k, alone) != nullptr) blocks = 1;
			}
			check(name, in_threads ? threaded(k, blocks, threads, p, o) : world(k, blocks, threads, p, o), seed);
		}
	}
	return failures != 0;
}

} // namespace

int main(int argc, char **argv) {
	const char *mode = argc > 1 ? argv[1] : "";
	u64 seeds = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
	std::string m = mode;
	if (m == "collectives") collectives(seeds);
	else if (m == "errors") errors();
	else if (m == "litmus") litmus(seeds);
	else if (m == "determinism") determinism(seeds);
	else if (m == "clocks") clocks();
	else if (m == "concurrent") concurrent();
	else if (m == "chain") chain();
	else if (m == "speed") speed();
	else if (m == "tsan" && argc > 3) return tsan_case(argv[3], seeds);
	else wrong("selftest collectives|errors|litmus|determinism|clocks|concurrent|chain|speed [SEEDS], or tsan SEEDS CASE");
	return failures != 0;
}
