// The runtime's own structures.
//
// The runtime is compiled without -fsanitize=thread, also for the ThreadSanitizer build (-DHX_TSAN=1 says
// so): no race is looked for in its own accesses. Nor may malloc and memcpy, which are watched
// all the same, run in the name of a CUDA thread; Inside
// puts such code under the name of the OS thread's scheduler.
#pragma once

#if defined(__SANITIZE_THREAD__)
#error "compile these files without -fsanitize=thread and with -DHX_TSAN=1 (package shim's Build does)"
#endif
#if defined(HX_TSAN) && HX_TSAN
#define HX_RUNTIME_TSAN 1
#else
#define HX_RUNTIME_TSAN 0
#endif
#undef HX_TSAN // runtime.h's is about the code that includes it

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "context.h"
#include "shim.h"

#if HX_RUNTIME_TSAN
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_set_fiber_name(void *fiber, const char *name);
void __tsan_acquire(void *addr);
void __tsan_release(void *addr);
void __tsan_atomic64_store(volatile unsigned long *a, unsigned long v, int mo);
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
}
#endif

namespace shim {

constexpr u32 warp_size = 32;
constexpr u32 max_threads = 1024;

// splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
struct Rng {
	u64 state = 0;
	u64 next() {
		u64 z = state += 0x9e3779b97f4a7c15u;
		z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
		z = (z ^ z >> 27) * 0x94d049bb133111ebu;
		return z ^ z >> 31;
	}
	u32 below(u32 n) { return (u32)((next() >> 32) * n >> 32); }
};

inline u64 mix(u64 a, u64 b) {
	Rng r{a ^ (b + 0x632be59bd9b4e019u) * 0xd6e8feb86659fd93u};
	return r.next();
}

struct Held {
	u64 addr;
	u32 size;
	bool leaving; // marked by flush
	unsigned char bytes[16];
};

// Held stores, oldest first.
struct Buffer {
	Held *held = nullptr;
	u32 count = 0, capacity = 0;
};

enum class State : u8 { fresh, ready, running, collective, barrier, sleeping, polling, done };

struct Block;
struct Agent;

struct Fiber : Thread {
	Context context;
	Stack *stack = nullptr;
	Block *block = nullptr; // nullptr: an agent
	Agent *agent = nullptr;
	State state = State::fresh;
	bool paused = false;
	u32 arg = 0;
	u64 value = 0; // in and out of a collective
	i64 wake = 0;  // when sleeping or polling: the end of it
	u64 epoch = 0; // when polling: what the last look saw
	Buffer buffer;
#if HX_RUNTIME_TSAN
	void *tsan = nullptr;
	bool fenced = false; // the stack's second TSan fiber knows what this thread's last fence covered
	u64 fence_tag = 0;
	const void *seen[16];
	u32 seen_count = 0;
#endif
};

struct Group { // lanes of one collective
	u32 mask, arrived;
	Op op;
	u64 tag;
};

struct Warp {
	u32 gone = 0; // lanes that left the kernel or never were
	u32 group_count = 0;
	Group groups[warp_size];
};

struct Grid {
	const Kernel *kernel;
	u32 blocks, threads;
	const void *params;
	hx_launch launch;
	Options options;
	std::atomic<u32> next{0};   // block to start
	std::atomic<bool> stop{false};
	std::atomic<u64> schedule{0};
	std::mutex error_lock;
	std::string error;
	i64 deadline = INT64_MAX;
	u64 begin_tag = 0, end_tag = 0;

	void fail(const std::string &why) {
		std::lock_guard<std::mutex> hold(error_lock);
		if (error.empty()) error = why;
		stop.store(true, std::memory_order_relaxed);
	}
};

struct SharedVar {
	const void *key;
	u32 offset;
};

struct Block {
	Grid *grid = nullptr;
	u32 id = 0, threads = 0;
	std::vector<Fiber> fibers;
	std::vector<Warp> warps;
	u32 fresh = 0; // next thread to start (threaded mode)
	u32 alive = 0, waiting = 0, at_barrier = 0;
	u64 barrier_tag = 0;
	bool failed = false;

	// Threaded mode: who can run.
	std::vector<u16> ring;
	u32 head = 0, ready = 0, paused = 0;

	std::vector<char> shared;
	SharedVar vars[32];
	u32 var_count = 0, shared_used = 0;

	Buffer buffer;
	std::vector<Held> held;  // what all buffers of the block point into
	std::vector<u32> dirty;  // threads whose buffer is not empty
	std::vector<u32> dirty_at; // by thread: index in dirty, or ~0

	void reset(Grid *g, u32 id);
	bool pending() const { return buffer.count != 0 || !dirty.empty(); }
};

// The state of an OS thread that runs fibers.
struct Exec {
	Context main;
	Rng rng;
	Stack *stacks = nullptr; // free ones
	u32 stack_count = 0;
	Block *block = nullptr;       // threaded mode
	World::Impl *world = nullptr; // World
	bool jitter = false;
	u64 schedule = 0;
	u32 idle = 0;  // waits in a row without a result
	u32 looks = 0; // since the deadline was looked at
	volatile bool faulted = false;
	void *volatile fault_addr = nullptr;
	volatile int fault_signal = 0;
	Fiber *volatile fault_fiber = nullptr;
	Exec *next = nullptr;
	Block own;
#if HX_RUNTIME_TSAN
	void *tsan = nullptr;
	Rng reuse; // of stacks; its own, so that a seed gives the same schedule in both builds
#endif
	u64 start_tag = 0;
};

extern __thread Exec *exec __attribute__((tls_model("initial-exec")));

inline Fiber *current() { return static_cast<Fiber *>(self); }

// ThreadSanitizer, or nothing.
#if HX_RUNTIME_TSAN
inline void tsan_acquire(u64 *tag) { __tsan_acquire(tag); }
inline void tsan_release(u64 *tag) { __tsan_release(tag); }
// Forgets what was released into the tag before.
inline void tsan_release_anew(u64 *tag) {
	__tsan_atomic64_store(reinterpret_cast<unsigned long *>(tag), 0, __ATOMIC_RELEASE);
}
inline void tsan_enter(void *fiber) { __tsan_switch_to_fiber(fiber, 1 /* no synchronisation */); }
// malloc, free and memset here are no accesses, and new memory has no past: the runtime's memory
// goes from block to block without a word to the threads.
struct Unwatched {
	Unwatched() {
		AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
		AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
	}
	~Unwatched() {
		AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
		AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
	}
};
struct Inside {
	Fiber *f = current();
	Inside() {
		if (f) tsan_enter(exec->tsan);
		AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
		AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
	}
	~Inside() {
		AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
		AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
		if (f) tsan_enter(f->tsan);
	}
};
#else
inline void tsan_acquire(u64 *) {}
inline void tsan_release(u64 *) {}
inline void tsan_release_anew(u64 *) {}
struct Inside {
	Inside() {}
	~Inside() {}
};
struct Unwatched {
	Unwatched() {}
	~Unwatched() {}
};
#endif

// block.cc
void block_started(Fiber *f);              // before the first instruction of a thread
void make_ready(Fiber *f);
void park();                               // the fiber's state says why
[[noreturn]] void leave();                 // from a fiber: back to the scheduler for good
[[noreturn]] void fail_block(Block *b, const std::string &why);
std::string describe_waits(Block *b);
std::string thread_name(const Fiber *f);
void fiber_main();
void finish_thread(Fiber *f);              // checks and marks; errors do not return
bool start_fiber(Fiber *f);                // gives it a stack and a context; false: no memory
void release_stack(Fiber *f);
void disown(Block *b);
void switch_to(Fiber *f);                  // from the scheduler; comes back with self == nullptr

// store.cc
void drain_some(Block *b, Rng &rng);       // one held store moves on
void drain_block(Block *b);                // all of them
void share_lanes(Block *b, Fiber *first, u32 mask);
void share_all(Block *b);

// grid.cc
Exec *take_exec();
void give_exec(Exec *);
void catch_faults();
std::string fault_text(Exec *e);

// world.cc
i64 world_now(World::Impl *);
void world_ready(World::Impl *, Fiber *);
void run_agent(Fiber *f);
const char *agent_name(const Fiber *f);

} // namespace shim
