// The runtime for device_shim.h, which is inlined into every kernel. Programs that
// start kernels include shim.h instead.
#pragma once

#include <cstddef>

#include "types.h"

#if defined(__SANITIZE_THREAD__)
#define HX_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HX_TSAN 1
#endif
#endif
#ifndef HX_TSAN
#define HX_TSAN 0
#endif

struct hx_launch;

namespace shim {

// One CUDA thread, as the inlined half of the vocabulary sees it.
struct Thread {
	u32 tid, threads, bid, blocks;
	u32 hooks;  // of the enum below; 0: plain accesses go straight to memory
	i32 budget; // operations until the scheduler is asked, so that a spinning thread lets others run
};

enum : u32 {
	hook_points = 1, // plain accesses count towards the budget too
	hook_buffer = 2, // plain stores are held back
};

// The thread that runs now; nullptr outside kernels. initial-exec: a signal handler reads it, and
// must not allocate.
extern __thread Thread *self __attribute__((tls_model("initial-exec")));

// warp: a lane's value is the address of a struct that begins with a function, and the last lane to come calls its own with
// all lanes' values. It orders no memory.
enum class Op : u32 { syncwarp, ballot, shfl32, shfl64, reduce_add, warp };

u64 collective(Op op, u32 mask, u64 value, u32 arg);
void barrier();
void fence();
void point(); // the scheduler is asked
void step();  // counts down to that
i64 now();
void pause(u32 ns);
void *shared(const void *key, size_t size, size_t align);
[[noreturn]] void misaligned(const void *p, u32 size);

// The store buffer. load is a plain load; merge replaces those bytes of *value that this thread has
// yet to write, or whose writes only its block sees so far.
void load(const void *p, u32 size, void *value);
void merge(const void *p, u32 size, void *value);
void hold(void *p, u32 size, const void *value);
void flush(const void *p, u32 size); // this thread's and its block's held stores to the bytes
void flush_all();

// ThreadSanitizer's view of fences: a relaxed store publishes what the last fence covered, and a
// fence takes in what earlier relaxed loads saw.
void tsan_relaxed_store(void *p);
void tsan_relaxed_load(const void *p);

struct Kernel {
	const char *name;
	size_t param_size;
	void (*body)(const void *params, const hx_launch &);
};

struct Registrar {
	Kernel kernel;
	const Registrar *next;
	Registrar(const char *name, size_t param_size, void (*body)(const void *, const hx_launch &));
};

} // namespace shim
