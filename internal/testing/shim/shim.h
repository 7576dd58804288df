// Runs the real CUDA kernels on a CPU. A CUDA thread is a fiber. Either each block has an OS thread
// (run_grid), or everything, hosts and controllers included, is in one OS thread whose every
// choice comes from a seed (World).
//
// The memory that kernels see through dev:: may be made as weak as the PTX model allows for stores
// (Options::store_buffer): a thread's plain stores wait in its own buffer, go to its block's
// buffer by syncwarp, syncthreads or chance, and from there to memory by a fence or release of
// any thread of the block, or by chance. Stores to one address keep their order. Loads are not
// delayed; a missing acquire is for the ThreadSanitizer build to find.
#pragma once

#include <cstring>
#include <functional>
#include <string>

#include "device.h"
#include "runtime.h"

namespace shim {

const Kernel *find(const char *name);
void for_each(const std::function<void(const Kernel &)> &f);

struct Options {
	u64 seed = 0;               // of every choice
	u32 store_buffer = 0;       // plain stores a thread may hold back (0: none)
	bool jitter = false;        // other threads may run at any dev:: operation
	u32 stall = 512;            // with jitter, in a World: one point in so many is a long sleep; 0: none
	u32 smem_bytes = 48 << 10;  // of a block
	// run_grid only: a grid whose threads still wait for something after that long is given up.
	i64 limit_ns = 300000000000;
	// run_grid only: called by a block's OS thread before its first thread and after its last. enter
	// may wait; false leaves the block out.
	std::function<bool(u32 block)> enter;
	std::function<void(u32 block)> leave;
};

struct Result {
	bool ok = true;
	std::string error;   // names kernel, block, threads and what they did
	u64 schedule = 0;    // hash of the choices made; equal seeds give equal hashes in a World
};

// Runs a grid to its end in OS threads of a pool and the caller's; at most `resident` blocks at
// one time (0: as many as there are, up to 32). Blocks start in order. The caller's params are
// read before any block starts.
Result run_grid(const Kernel *kernel, u32 blocks, u32 threads, const void *params, hx_launch launch,
                const Options &options, u32 resident = 0);

// Grids, controllers and hosts in one OS thread and in virtual time. Time moves by 16 ns a step, and
// when everybody waits, to the next deadline.
class World {
  public:
	explicit World(const Options &options);
	~World();
	World(const World &) = delete;
	World &operator=(const World &) = delete;

	// Starts a grid; blocks start in order as fibers are to be had. done runs as an agent of
	// its own after the last thread, and sees all that the grid wrote.
	void grid(const Kernel *kernel, u32 blocks, u32 threads, const void *params, size_t size, hx_launch launch,
	          std::function<void()> done = {});
	// Starts a fiber for C++ code. A daemon does not keep run() from returning: when all
	// others are done, its yield, sleep_for or wait_until throws Stopped.
	void agent(const char *name, std::function<void()> body, bool daemon = false);
	// Until all grids and agents have ended, an error, or max_steps scheduler steps.
	Result run(u64 max_steps);
	u64 random(u64 n); // 0 … n−1
	u64 steps() const;
	i64 now() const;

	struct Impl;

  private:
	Impl *impl_;
};

// Thrown through an agent that run() has no more use for. Let it pass.
struct Stopped {};

// For agents; outside a World these act on the OS thread and the machine's clock.
void yield();
void sleep_for(i64 ns);
// True when ready() said so, false at the deadline. ready() must not wait or yield.
bool wait_until(const std::function<bool()> &ready, i64 deadline_ns);

// Threads that a library starts inside a Go process must leave signals to Go's threads; those of
// faults stay open.
void block_signals();

// Accesses of hosts and controllers to memory shared with kernels. In the ThreadSanitizer build they
// are seen as any C++ access; with jitter other agents may run before each of them.
void host_point();
template <typename T> T host_load(const T *p) { // acquire
	host_point();
	return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <typename T> T host_load_relaxed(const T *p) {
	host_point();
	return __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <typename T> void host_store(T *p, T v) { // release
	host_point();
	__atomic_store_n(p, v, __ATOMIC_RELEASE);
}
template <typename T> void host_store_relaxed(T *p, T v) {
	host_point();
	__atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline void host_copy(void *to, const void *from, size_t n) { // plain, as DMA
	host_point();
	std::memcpy(to, from, n);
}

} // namespace shim
