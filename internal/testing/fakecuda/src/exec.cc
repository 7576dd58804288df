// Launches handed to an executor in the process that opened the library, in place of the shim: it gets a
// module's PTX and runs what stands there. Streams, events, graphs and memory stay the fake's.
//
// The structs are those of internal/testing/fakecuda/executor.go.
#include "fake.h"

#include <algorithm>
#include <cstring>

namespace fake {

namespace {

struct Range {
	u64 addr, size;
	u64 host; // 1: the CPU's memory
};
static_assert(sizeof(Range) == 24, "executor.go: execRange");

// A grid for the executor. Pointers are good until it returns.
struct Execution {
	u64 user; // of hx_fake_executor
	u64 module;
	const char *ptx;
	u64 ptx_size;
	const char *kernel;
	u64 kernel_size;
	const void *params; // as .param space has them
	u64 params_size;
	const Range *ranges; // memory that the grid may touch, by address
	u64 range_count;
	u64 seed;
	char *error; // words about a failure
	u64 error_size;
	const int *lost; // becomes nonzero when the context is lost
	u32 grid[3], block[3];
	u32 shared_bytes, resident; // blocks at a time, by the SMs
};
static_assert(sizeof(Execution) == 14 * 8 + 8 * 4, "executor.go: execution");
static_assert(sizeof(std::atomic<int>) == sizeof(int), "lost");

typedef u64 (*Execute)(Execution *); // a CUresult

struct Executor {
	Execute run = nullptr;
	u64 user = 0;
};
Executor &executor() { // guarded by g().mu
	static Executor *e = new Executor;
	return *e;
}

std::vector<Range> ranges() { // with mu held
	std::vector<Range> out;
	for (auto &x : g().mem) out.push_back({x.second.addr, x.second.size, x.second.type == MemType::device ? 0u : 1u});
	for (auto &x : g().reserved)
		for (auto &p : x.second.parts)
			if (p.second.access) out.push_back({p.first, p.second.size, 0});
	std::sort(out.begin(), out.end(), [](const Range &a, const Range &b) { return a.addr < b.addr; });
	return out;
}

} // namespace

bool has_executor() { // with mu held
	return executor().run != nullptr;
}

bool execute(const CUfunc_st *f, Dim d, unsigned smem, const std::vector<u64> &params, const hx_launch &hx, CUcontext ctx, u64 seed, u32 resident) {
	Executor e;
	Execution x = {};
	std::vector<Range> live;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		e = executor();
		if (e.run == nullptr) return false;
		live = ranges();
	}
	std::vector<char> block(f->params[1].first + f->params[1].second), error(4096);
	memcpy(block.data() + f->params[0].first, params.data(), f->params[0].second);
	memcpy(block.data() + f->params[1].first, &hx, sizeof hx);
	x.user = e.user;
	x.module = f->module->text_id;
	x.ptx = f->module->text->data();
	x.ptx_size = f->module->text->size();
	x.kernel = f->name.data();
	x.kernel_size = f->name.size();
	x.params = block.data();
	x.params_size = block.size();
	x.ranges = live.data();
	x.range_count = live.size();
	x.seed = seed;
	x.error = error.data();
	x.error_size = error.size();
	x.lost = reinterpret_cast<const int *>(&ctx->root->error);
	u32 grid[3] = {d.gx, d.gy, d.gz}, threads[3] = {d.bx, d.by, d.bz};
	memcpy(x.grid, grid, sizeof grid);
	memcpy(x.block, threads, sizeof threads);
	x.shared_bytes = smem;
	x.resident = resident;
	u64 r = e.run(&x);
	if (r != CUDA_SUCCESS) poison(ctx, (CUresult)r, error.data());
	return true;
}

} // namespace fake

using namespace fake;

// From now on launches go to run, which gets user back in each; a null one gives them to the shim again.
// Launches that run already end where they are.
extern "C" __attribute__((visibility("default"))) int hx_fake_executor(Execute run, u64 user) {
	std::lock_guard<std::mutex> lk(g().mu);
	executor() = {run, user};
	return 0;
}

// The live memory that holds addr: 1, or 0 where there is none. For memory that came after a launch.
extern "C" __attribute__((visibility("default"))) int hx_fake_range(u64 addr, Range *out) {
	std::lock_guard<std::mutex> lk(g().mu);
	for (const Range &r : ranges())
		if (addr >= r.addr && addr - r.addr < r.size) {
			*out = r;
			return 1;
		}
	return 0;
}
