// Shared by the model, the mini host and the programs of this folder: the configuration that a
// seed chooses, the two ways to run agents, and how a run reports that something is wrong.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "shim.h"

#include "abi_io.h"

namespace iotest {

// splitmix64: small, seedable, and each agent has its own, so that a schedule replays.
struct Rng {
	u64 s;
	explicit Rng(u64 seed) : s(seed) {}
	u64 next() {
		u64 z = (s += 0x9e3779b97f4a7c15ull);
		z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
		z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
		return z ^ (z >> 31);
	}
	u64 below(u64 n) { return n < 2 ? 0 : next() % n; }
	u64 between(u64 lo, u64 hi) { return lo + below(hi - lo + 1); }
	bool chance(u32 permille) { return below(1000) < permille; }
	template <size_t N> u32 pick(const u32 (&t)[N]) { return t[below(N)]; }
};

// Config is one run. Fields are settable by name (--set), so that a failing seed can be narrowed
// down and a negative test can aim at the place of its bug.
constexpr u32 fullReach = 4096; // bytes: gpuio's maxReach

struct Config {
	u64 seed = 0;
	bool threads = false; // OS threads and real time, for ThreadSanitizer
	u32 sync = 0;         // read_sync instead of submit
	u32 ssds = 1, queues = 1, entries = 8, spare = 0; // spare: commands below entries - 1
	u32 sets = 4, inflight = 2, rows = 64;            // rows: most of a set
	u32 sblocks = 1, cblocks = 1, warps = 1;          // grids of submit and complete, warps per block
	u32 page = 4096, lba = 512, rowbytes = 512, direct = 0, gap = 0, universe = 128;
	// LBAs that one command moves at most. split: rows larger than that take several commands; window:
	// rows on equal and adjacent LBAs share one, which crosses no multiple of it. 0: a command for each row.
	u32 split = 0, window = 0;
	u32 reach = 0; // LBAs from one row of a command to the next
	u32 retries = 2, timeout_us = 400, limit_us = 2000;
	u32 store_buffer = 0, jitter = 0, sleepy = 512; // sleepy: one step in so many is a long sleep
	// Of the SSDs, per mille of commands.
	u32 err = 0, dnr = 0, lost = 0, late = 0, foreign = 0, duplicate = 0, badlba = 0;
	u32 latency_us = 20, burst = 0, stall = 0;
	u32 faults = 1u << 30; // lost, late, foreign and duplicate ones at most
	u32 resets = 1; // of a controller, before its SSD is given up
	u32 abort_refused = 300, delete_fails = 0, create_fails = 0;
	u32 lbas_row() const { return rowbytes <= lba ? 1 : (rowbytes + lba - 1) / lba; }
	u32 per_lba() const { return rowbytes <= lba ? lba / rowbytes : 1; }
	u32 most() const { return split ? split : window ? window : lbas_row(); } // LBAs of a command
	u32 badrow = 0; // per mille of rows that the caller gets wrong
	u32 close = 0;  // per mille of waits before which the host closes the engine instead
};

Config random_config(u64 seed, bool threads);
bool set_field(Config &, const std::string &key, u64 value);
std::string describe(const Config &);

// A shared word, as the host and an SSD use it.
template <typename T> T load(const T *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
template <typename T> void store(T *p, T v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
template <typename T> T peek(const T *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

// An address of the ABI.
template <typename T> T *at(u64 a) { return reinterpret_cast<T *>(a); }

class Run;

// One kernel launch of a stream.
struct Launch {
	const shim::Kernel *kernel = nullptr;
	u32 blocks = 1, threads = 32;
	alignas(16) unsigned char params[128] = {};
	size_t bytes = 0;
	Launch *after = nullptr; // of another stream
	hx_launch hx = {};
	u32 done = 0;
};

// A CUDA stream: launches run in order, one at a time.
struct Stream {
	static constexpr u32 room = 1 << 14;
	const char *name;
	std::vector<Launch *> ring = std::vector<Launch *>(room);
	u32 head = 0, tail = 0; // consumer, producer
	hx_fault fault = {};
	u64 seq = 0;
	explicit Stream(const char *n) : name(n) {}
};

struct Event {
	i64 t;
	const char *what;
	i64 a, b, c, d;
};

class Ssd;
class Host;

// Run is one world with its agents.
class Run {
public:
	explicit Run(const Config &c);
	~Run();
	// go returns when all is checked; anything wrong ends the process (fail).
	void go();

	i64 now() const { return shim::now(); }
	void yield();
	// wait returns false when the time was up before pred.
	bool wait(const std::function<bool()> &pred, i64 ns);
	void launch(Stream &, Launch *);
	bool stopped() const { return load(&stop_) != 0; }
	void stop() { store(&stop_, 1u); }

	void note(const char *what, i64 a = 0, i64 b = 0, i64 c = 0, i64 d = 0);
	[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 2, 3)));

	Config cfg;
	std::vector<std::unique_ptr<Ssd>> ssds;
	std::unique_ptr<Host> host;
	Stream submit{"submit"}, complete{"complete"};
	u64 schedule = 0; // hash of the schedule, after go

private:
	void serve(Stream &); // a stream's agent
	u32 stop_ = 0;
	std::vector<Event> events;
	u64 nevents = 0;
	shim::World *world = nullptr;
	shim::Options options;
};

extern bool trace_on;

// The 32-bit words of row r, from which everything that is checked follows.
inline u32 row_word(i64 row, u32 i) {
	u64 z = (u64)row * 0x9e3779b97f4a7c15ull + i * 0xd1342543de82ef95ull + 0x632be59bd9b4e019ull;
	z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93ull;
	return (u32)(z >> 29);
}
inline u8 row_byte(i64 row, u32 i) { return (u8)(row_word(row, i / 4) >> (i % 4 * 8)); }

} // namespace iotest
