// Insides of the fake driver: one process-wide state, objects that handles point to, streams as
// threads, and a block scheduler with the SMs that the knobs ask for.
//
// Objects are never freed, only marked dead: a stale handle is then an error code, as from the real
// driver at its best, and never a crash. Everything lives on the heap and outlives main, since stream
// threads may run until the process ends.
#pragma once

#ifdef HX_CUDA_H
#include <cuda.h>

#include "results.h"
#else
#include "cuda_abi.h"
#endif

#include "device.h"
#include "shim.h"

#include <atomic>
#include <bitset>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#define HX_API extern "C" __attribute__((visibility("default"))) CUresult

namespace fake {

constexpr u32 max_sms = 256, max_queues = 128;
using Mask = std::bitset<max_sms>;

struct Knobs {
	std::string name = "Fake GPU (CPU shim)";
	int devices = 1, sms = 4, cc = 90, driver = 12090;
	int blocks_per_sm = 16, threads_per_sm = 2048;
	u64 mem = 256ull << 20, used = 0; // bytes of the device, and those that others hold
	int green = 1, sm_min = 0, sm_step = 0; // green contexts: there; SM granularity, 0: by compute capability
	u64 green_us = 0;                       // how long a call on a green context takes, so that a second thread's meets it
	int iomem = 1, dmabuf = 1, hostreg = 1; // what the device can register and export
	int confidential = 0;                   // no registered memory: an attribute says so (1), or the call alone (2)
	int vmm = 1, graphs = 1;                // virtual memory management; graphs
	u64 granule = 64 << 10;                 // of virtual memory management; 2 MiB on GPUs so far
	int free_waits = 1;                     // cuMemFree waits for the context's work, as the real one does
	u64 launch_ns = 0;                      // latency before a kernel starts
	u64 hw_queues = 0;                      // hardware queues that streams are spread over; 0: each has its own
	u32 queue = 1024;                       // launches that wait in one stream before the caller does
	int init = 0;                           // result of cuInit
	int compute_mode = 0;                   // 2: prohibited
	std::string jit;                        // not empty: PTX is refused with this in the log
	u64 seed = 1;
	u32 store_buffer = 0;
	int jitter = 0;
	std::set<std::string> missing; // for cuGetProcAddress; dlsym needs a library linked without them
};

// One API function: counts its calls and fails when told to.
struct Site {
	const char *name;
	std::atomic<u64> calls{0};
	u64 fail_from = 0, fail_to = 0; // calls that fail: [from, to)
	bool hang = false;              // calls do not come back until told otherwise
	u64 failed = 0;
	CUresult fail_with = CUDA_SUCCESS;
	explicit Site(const char *name);
	CUresult enter(bool needs_init);
};

#define HX_ENTER_ANY(NAME, INIT)                                   \
	static fake::Site &hx_site = *new fake::Site(#NAME);            \
	if (CUresult r_ = hx_site.enter(INIT); r_ != CUDA_SUCCESS) return r_
#define HX_ENTER(NAME) HX_ENTER_ANY(NAME, true)
#define HX_TRY(X) \
	if (CUresult r_ = (X); r_ != CUDA_SUCCESS) return r_

// A call on a context, for as long as it takes. "There is no internal synchronization to make API calls accessing
// the same green context from multiple threads work" (cuGreenCtxCreate): two threads in one are a complaint.
class Using {
public:
	Using(CUcontext ctx, const char *call); // without mu held
	~Using();
	Using(const Using &) = delete;

private:
	CUcontext ctx; // null: nothing to end
};

// One time that an event was recorded.
struct Recording {
	std::mutex mu;
	std::condition_variable cv;
	std::atomic<bool> done{false};
	i64 at = 0;
	CUcontext ctx = nullptr;
	void happen();
};

// The SMs of one device: which blocks run where. Waiting blocks get room by priority, then age.
class SMs {
public:
	SMs(int sms, int blocks, int threads);
	int enter(const Mask &mask, u32 threads, int priority, CUcontext ctx); // the SM, or -1: the context is lost
	void leave(int sm, u32 threads);
	u32 capacity(const Mask &mask, u32 threads) const;
	u32 per_sm(u32 threads) const;

private:
	struct SM {
		u32 blocks, threads;
	};
	struct Waiter {
		const Mask *mask;
		u32 threads;
		int sm = -1;
		std::condition_variable cv;
	};
	int pick(const Mask &mask, u32 threads) const;
	void grant();
	mutable std::mutex mu;
	std::vector<SM> sms;
	u32 blocks_per_sm, threads_per_sm;
	std::multimap<int, Waiter *> waiting; // by priority, lower first; equal ones in order of arrival
};

struct Device {
	int index = 0;
	std::shared_ptr<SMs> sms;
	CUcontext primary = nullptr;
	unsigned primary_flags = 0;
	u64 bytes = 0; // allocated
};

enum class MemType { device, host, registered };

struct Alloc {
	u64 addr = 0, size = 0;
	MemType type = MemType::device;
	unsigned flags = 0;
	CUcontext ctx = nullptr; // the root
	u64 id = 0;
	void *map = nullptr; // what was mapped, with its guard pages
	u64 map_size = 0, lo = 0, hi = 0; // usable pages
	std::map<u64, std::pair<u64, int>> exported; // dma-buf stand-ins: start → size, file
};

// Physical memory of cuMemCreate: bytes of the device's account, and real memory only where it is mapped.
struct Physical {
	u64 size = 0;
	int device = 0;
	bool released = false, mapped = false;
	int fd = -1;           // of memory that can be exported, or was imported: a memory file
	bool imported = false; // another process's, or another handle's: in nobody's account, and full of what is there
};

// A mapping in a reservation of addresses.
struct Mapped {
	u64 size = 0, handle = 0;
	bool access = false;
};

struct Reserved {
	u64 lo = 0, size = 0;
	void *map = nullptr;
	u64 map_size = 0;
	std::map<u64, Mapped> parts;                 // by address
	std::map<u64, std::pair<u64, int>> exported; // as Alloc's
};

struct Driver {
	std::mutex mu;
	bool ready = false;
	Knobs knobs;
	std::vector<std::unique_ptr<Device>> devices;
	std::map<std::string, Site *> sites;
	std::set<CUcontext> contexts;
	std::unordered_set<const void *> live; // every live handle
	std::map<u64, Alloc> mem;              // by address
	std::map<u64, Reserved> reserved;      // by address
	std::map<u64, Physical> physical;      // by handle
	u64 graphs = 0, execs = 0;             // live ones
	std::deque<std::pair<void *, u64>> graves; // freed ranges that stay reserved, so that no other memory takes their addresses
	u64 ids = 0, launches = 0, streams = 0;
	u64 crash_at = 0; // the launch that fails, and how
	CUresult crash_with = CUDA_SUCCESS;
	std::string error;      // of the last kernel that failed
	std::string loading;    // CUDA_MODULE_LOADING, as the first cuInit found it
	std::string connections; // and CUDA_DEVICE_MAX_CONNECTIONS
	std::string violations; // of rules that the real driver does not check
};
Driver &g();

// The caller.
CUresult current(CUcontext *ctx); // the thread's context, if it is good
void poison(CUcontext ctx, CUresult error, const std::string &why);
void complain(const std::string &what); // with g().mu held

CUresult find_stream(CUstream h, CUstream *out); // also the default streams
i64 now_ns();

// mem.cc
CUresult drop_memory(CUcontext root); // everything that the context owns; with g().mu held
std::string live_memory();

// vmm.cc
enum class Backed { no, elsewhere, all }; // not accessible; not of a reservation
Backed backed(u64 p, u64 n);              // with g().mu held
bool touches_reserved(u64 p, u64 n);      // with g().mu held
void drop_reserved();                     // everything; with g().mu held

// stream.cc
struct Dim {
	unsigned gx, gy, gz, bx, by, bz;
};
struct Launch;
// A launch that is checked and has its parameters; it runs in s's thread.
CUresult prepare(CUfunction f, Dim d, unsigned smem, CUstream s, void **params, void **extra, std::shared_ptr<Launch> *out);
CUresult check_grid(CUfunction f, Dim d, unsigned smem); // with g().mu held
void run(Launch &l);
CUstream new_stream(CUcontext ctx, unsigned flags, int priority); // with g().mu held
CUresult submit(CUstream s, std::function<void()> op);
CUresult wait_idle(CUcontext root, bool ignore_errors);
CUresult wait_stream(CUstream s);
void end_streams(CUcontext ctx);

// exec.cc
bool has_executor(); // with g().mu held
// Runs a grid in the executor; false: there is none.
bool execute(const CUfunc_st *f, Dim d, unsigned smem, const std::vector<u64> &params, const hx_launch &hx, CUcontext ctx, u64 seed, u32 resident);

} // namespace fake

struct CUctx_st {
	CUcontext root = nullptr; // the primary context of a green one; itself otherwise
	CUgreenCtx green = nullptr;
	int device = 0;
	bool primary = false;
	std::atomic<bool> destroyed{false};
	unsigned flags = 0;
	int refs = 0;
	u64 id = 0;
	fake::Mask sms;
	std::atomic<int> error{0}; // sticky; of the root
	std::atomic<unsigned long> user{0}; // of a green one: the thread that is in a call on it
	std::atomic<const char *> call{""};
	CUstream null_stream = nullptr;
	std::set<CUstream> streams, dying; // destroyed ones work their queue off
	std::set<CUevent> events;
	std::set<CUmodule> modules;
	std::map<int, size_t> limits;
};

struct CUgreenCtx_st {
	CUcontext ctx;
};

struct CUdevResourceDesc_st {
	int device;
	fake::Mask sms;
};

struct CUfunc_st {
	CUmodule module;
	std::string name;
	std::vector<std::pair<size_t, size_t>> params; // offset, size
	const shim::Kernel *kernel; // nullptr: of a module that came when there was an executor
	int max_dynamic_smem = 48 << 10;
};

struct CUmod_st {
	CUcontext ctx;
	int isa, target; // of the PTX, times 10
	std::vector<CUfunction> functions;
	const std::string *text; // never freed
	u64 text_id;             // equal texts have one
};

struct CUevent_st {
	CUcontext ctx;
	unsigned flags;
	std::shared_ptr<fake::Recording> latest;
};

struct CUstream_st {
	u64 number; // of all streams so far
	CUcontext ctx;
	unsigned flags;
	int priority;
	u64 id;
	std::mutex mu;
	std::condition_variable work, progress;
	std::deque<std::function<void()>> queue;
	u64 in = 0, out = 0; // operations so far: enqueued, done
	bool closing = false, ended = false;
};
