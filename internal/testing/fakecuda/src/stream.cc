// Streams, events and launches. A stream is a thread that works its queue off; a kernel runs in its
// stream's thread and in the shim's, and each of its blocks first gets room on an SM.
#include "fake.h"

#include <cmath>
#include <csignal>
#include <cstring>
#include <time.h>

namespace fake {

namespace {

constexpr auto look = std::chrono::milliseconds(2); // how often a wait looks whether the context is lost
constexpr i64 patience_ns = 60'000'000'000;         // the longest that ending a context waits for its kernels

void run(CUstream s) {
	std::unique_lock<std::mutex> lk(s->mu);
	for (;;) {
		while (s->queue.empty() && !s->closing) s->work.wait(lk);
		if (s->queue.empty()) break;
		auto op = std::move(s->queue.front());
		s->queue.pop_front();
		lk.unlock();
		if (s->ctx->root->error == 0) op(); // what stands behind a lost context is dropped
		op = nullptr;
		lk.lock();
		s->out++;
		s->progress.notify_all();
	}
	lk.unlock();
	std::lock_guard<std::mutex> all(g().mu);
	s->ctx->dying.erase(s);
	lk.lock();
	s->ended = true;
	s->progress.notify_all();
}

void push(CUstream s, std::function<void()> op, bool bounded) {
	std::unique_lock<std::mutex> lk(s->mu);
	while (bounded && s->queue.size() >= g().knobs.queue && s->ctx->root->error == 0) s->progress.wait_for(lk, look);
	s->queue.push_back(std::move(op));
	s->in++;
	s->work.notify_one();
}

u64 tail(CUstream s) {
	std::lock_guard<std::mutex> lk(s->mu);
	return s->in;
}

// Waits until stream s has done its first n operations, its context is lost, or the deadline passes.
bool reach(CUstream s, u64 n, bool ignore_errors, i64 deadline) {
	std::unique_lock<std::mutex> lk(s->mu);
	while (s->out < n) {
		if (!ignore_errors && s->ctx->root->error) return true;
		if (now_ns() > deadline) return false;
		s->progress.wait_for(lk, look);
	}
	return true;
}

constexpr i64 never = 0x7fffffffffffffff;

bool blocking(CUstream s) { return (s->flags & CU_STREAM_NON_BLOCKING) == 0; }

// The legacy default stream: its work waits for all before it in blocking streams, and theirs for it.
void join_default(CUstream s) {
	CUcontext c = s->ctx;
	std::vector<std::pair<CUstream, u64>> before;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		if (!blocking(s)) return;
		if (s != c->null_stream) {
			if (u64 n = tail(c->null_stream)) before.emplace_back(c->null_stream, n);
		} else {
			for (CUstream o : c->streams)
				if (o != s && blocking(o))
					if (u64 n = tail(o)) before.emplace_back(o, n);
		}
	}
	for (auto &b : before) {
		{
			std::lock_guard<std::mutex> lk(b.first->mu);
			if (b.first->out >= b.second) continue;
		}
		push(s, [b] { reach(b.first, b.second, false, never); }, true);
	}
}

} // namespace

void Recording::happen() {
	std::lock_guard<std::mutex> lk(mu);
	at = now_ns();
	done = true;
	cv.notify_all();
}

CUstream new_stream(CUcontext ctx, unsigned flags, int priority) { // with mu held
	auto s = new CUstream_st;
	s->ctx = ctx;
	s->flags = flags;
	s->priority = std::max(-5, std::min(0, priority));
	s->id = ++g().ids;
	s->number = g().streams++;
	g().live.insert(s);
	ctx->streams.insert(s);
	// The thread must not be one that Go's signals find, so they are blocked before it starts.
	sigset_t before;
	pthread_sigmask(SIG_SETMASK, nullptr, &before);
	shim::block_signals();
	std::thread([s] { run(s); }).detach();
	pthread_sigmask(SIG_SETMASK, &before, nullptr);
	return s;
}

CUresult find_stream(CUstream h, CUstream *out) {
	if (h == nullptr || h == CU_STREAM_LEGACY || h == CU_STREAM_PER_THREAD) {
		CUcontext c;
		HX_TRY(current(&c));
		*out = c->null_stream;
		return CUDA_SUCCESS;
	}
	std::lock_guard<std::mutex> lk(g().mu);
	if (g().live.count(h) == 0) return CUDA_ERROR_INVALID_HANDLE;
	if (h->ctx->destroyed || h->ctx->root->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	if (int e = h->ctx->root->error) return (CUresult)e;
	*out = h;
	return CUDA_SUCCESS;
}

CUresult submit(CUstream s, std::function<void()> op) {
	join_default(s);
	push(s, std::move(op), true);
	return CUDA_SUCCESS;
}

CUresult wait_stream(CUstream s) {
	reach(s, tail(s), false, never);
	return (CUresult)s->ctx->root->error.load();
}

// Waits for all work of a primary context and its green ones.
CUresult wait_idle(CUcontext root, bool ignore_errors) {
	std::vector<std::pair<CUstream, u64>> all;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		for (CUcontext c : g().contexts)
			if (c->root == root)
				for (auto *set : {&c->streams, &c->dying})
					for (CUstream s : *set) all.emplace_back(s, tail(s));
	}
	i64 deadline = ignore_errors ? now_ns() + patience_ns : never;
	for (auto &x : all)
		if (!reach(x.first, x.second, ignore_errors, deadline)) return CUDA_ERROR_LAUNCH_TIMEOUT;
	return ignore_errors ? CUDA_SUCCESS : (CUresult)root->error.load();
}

static void close_stream(CUstream s) { // with mu held
	g().live.erase(s);
	s->ctx->streams.erase(s);
	s->ctx->dying.insert(s);
	std::lock_guard<std::mutex> lk(s->mu);
	s->closing = true;
	s->work.notify_all();
}

void end_streams(CUcontext ctx) {
	std::vector<CUstream> all;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		all.assign(ctx->streams.begin(), ctx->streams.end());
		for (CUstream s : all) close_stream(s);
		all.assign(ctx->dying.begin(), ctx->dying.end());
	}
	i64 deadline = now_ns() + patience_ns;
	for (CUstream s : all) {
		std::unique_lock<std::mutex> lk(s->mu);
		while (!s->ended && now_ns() < deadline) s->progress.wait_for(lk, look);
	}
}

// The block scheduler.

SMs::SMs(int n, int blocks, int threads) : sms((size_t)n, SM{(u32)blocks, (u32)threads}), blocks_per_sm((u32)blocks), threads_per_sm((u32)threads) {}

static u32 warps_of(u32 threads) { return (threads + 31) / 32 * 32; }

u32 SMs::per_sm(u32 threads) const { return std::min(blocks_per_sm, threads_per_sm / warps_of(threads)); }

u32 SMs::capacity(const Mask &mask, u32 threads) const {
	u32 n = 0;
	for (size_t i = 0; i < sms.size(); i++)
		if (mask[i]) n += per_sm(threads);
	return n;
}

// The emptiest SM with room.
int SMs::pick(const Mask &mask, u32 threads) const {
	int best = -1;
	for (size_t i = 0; i < sms.size(); i++) {
		if (!mask[i] || sms[i].blocks == 0 || sms[i].threads < threads) continue;
		if (best < 0 || sms[i].threads > sms[(size_t)best].threads) best = (int)i;
	}
	return best;
}

void SMs::grant() {
	for (auto it = waiting.begin(); it != waiting.end();) {
		Waiter *w = it->second;
		int i = pick(*w->mask, w->threads);
		if (i < 0) {
			++it;
			continue;
		}
		sms[(size_t)i].blocks--;
		sms[(size_t)i].threads -= w->threads;
		w->sm = i;
		w->cv.notify_one();
		it = waiting.erase(it);
	}
}

int SMs::enter(const Mask &mask, u32 threads, int priority, CUcontext ctx) {
	threads = warps_of(threads);
	std::unique_lock<std::mutex> lk(mu);
	Waiter w;
	w.mask = &mask;
	w.threads = threads;
	auto it = waiting.emplace(priority, &w);
	grant();
	while (w.sm < 0) {
		if (ctx->error) {
			waiting.erase(it);
			return -1;
		}
		w.cv.wait_for(lk, look);
	}
	return w.sm;
}

void SMs::leave(int sm, u32 threads) {
	std::lock_guard<std::mutex> lk(mu);
	sms[(size_t)sm].blocks++;
	sms[(size_t)sm].threads += warps_of(threads);
	grant();
}

// A grid on its way.
struct Launch {
	CUfunction func;
	const shim::Kernel *kernel;
	std::vector<u64> params;
	hx_launch hx;
	u32 blocks, threads;
	int priority;
	u64 stream; // its number
	CUcontext ctx;
	std::shared_ptr<SMs> sms;
	std::vector<i16> sm; // of each block, -1: none

	void run() {
		auto &d = g();
		shim::Options o;
		CUresult crash = CUDA_SUCCESS;
		u64 latency;
		// A kernel and the event behind it hold up what is behind them in the hardware's queue, of whatever stream.
		static std::mutex *queues = new std::mutex[max_queues];
		std::unique_lock<std::mutex> queue;
		if (u64 n = d.knobs.hw_queues) queue = std::unique_lock<std::mutex>(queues[stream % n]);
		{
			std::lock_guard<std::mutex> lk(d.mu);
			u64 n = ++d.launches;
			if (n == d.crash_at) crash = d.crash_with;
			latency = d.knobs.launch_ns;
			o.seed = d.knobs.seed + n;
			o.store_buffer = d.knobs.store_buffer;
			o.jitter = d.knobs.jitter != 0;
		}
		if (latency) {
			timespec t{(time_t)(latency / 1000000000), (long)(latency % 1000000000)};
			nanosleep(&t, nullptr);
		}
		if (crash != CUDA_SUCCESS) return poison(ctx, crash, std::string("kernel ") + func->name + " was told to crash");
		u32 resident = std::max<u32>(1, std::min(blocks, sms->capacity(ctx->sms, threads)));
		if (execute(func, {blocks, 1, 1, threads, 1, 1}, 0, params, hx, ctx, o.seed, resident)) return;
		if (kernel == nullptr) return poison(ctx, CUDA_ERROR_ILLEGAL_INSTRUCTION, "kernel " + func->name + " needs an executor, and there is none any more");
		sm.assign(blocks, -1);
		o.enter = [this](u32 block) { return (sm[block] = (i16)sms->enter(ctx->sms, threads, priority, ctx->root)) >= 0; };
		o.leave = [this](u32 block) {
			if (sm[block] >= 0) sms->leave(sm[block], threads);
			sm[block] = -1;
		};
		shim::Result r = shim::run_grid(kernel, blocks, threads, params.data(), hx, o, resident);
		for (i16 at : sm) // blocks that a fault left half done
			if (at >= 0) sms->leave(at, threads);
		if (r.ok) return;
		bool mis = r.error.find("misaligned") != std::string::npos;
		// An address just below a fiber's stack may be either: both are outside the device's memory.
		bool mem = r.error.find("memory fault") != std::string::npos || r.error.find("stack overflow") != std::string::npos;
		poison(ctx, mis ? CUDA_ERROR_MISALIGNED_ADDRESS : mem ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_ERROR_LAUNCH_FAILED, r.error);
	}
};

void run(Launch &l) { l.run(); }

CUresult check_grid(CUfunction f, Dim d, unsigned smem) { // with mu held
	if (f == nullptr || g().live.count(f) == 0) return CUDA_ERROR_INVALID_HANDLE;
	if (d.gx == 0 || d.gy == 0 || d.gz == 0 || d.bx == 0 || d.by == 0 || d.bz == 0) return CUDA_ERROR_INVALID_VALUE;
	if (d.gx > 0x7fffffff || d.gy > 65535 || d.gz > 65535 || d.bx > 1024 || d.by > 1024 || d.bz > 64) return CUDA_ERROR_INVALID_VALUE;
	if ((u64)d.bx * d.by * d.bz > 1024 || smem > (unsigned)f->max_dynamic_smem) return CUDA_ERROR_INVALID_VALUE;
	if (d.gy != 1 || d.gz != 1 || d.by != 1 || d.bz != 1 || smem != 0) return CUDA_ERROR_NOT_SUPPORTED; // the shim's grids are lines
	return CUDA_SUCCESS;
}

CUresult prepare(CUfunction f, Dim d, unsigned smem, CUstream s, void **params, void **extra, std::shared_ptr<Launch> *out) {
	auto l = std::make_shared<Launch>();
	{
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(check_grid(f, d, smem));
		// A module's function is its context's; a library's kernel is everybody's.
		if (f->module->ctx != nullptr && f->module->ctx != s->ctx) return CUDA_ERROR_INVALID_HANDLE;
		l->sms = g().devices[s->ctx->device]->sms;
	}
	l->params.resize((f->params[0].second + 7) / 8);
	if (params != nullptr) {
		if (extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
		if (params[0] == nullptr || params[1] == nullptr) return CUDA_ERROR_INVALID_VALUE;
		memcpy(l->params.data(), params[0], f->params[0].second);
		memcpy(&l->hx, params[1], sizeof(hx_launch));
	} else {
		const char *buf = nullptr;
		size_t size = 0;
		for (void **x = extra; x != nullptr && *x != CU_LAUNCH_PARAM_END; x += 2) {
			if (*x == CU_LAUNCH_PARAM_BUFFER_POINTER)
				buf = (const char *)x[1];
			else if (*x == CU_LAUNCH_PARAM_BUFFER_SIZE)
				size = *(size_t *)x[1];
			else
				return CUDA_ERROR_INVALID_VALUE;
		}
		if (buf == nullptr || size != f->params[1].first + f->params[1].second) return CUDA_ERROR_INVALID_VALUE;
		memcpy(l->params.data(), buf + f->params[0].first, f->params[0].second);
		memcpy(&l->hx, buf + f->params[1].first, sizeof(hx_launch));
	}
	l->func = f;
	l->kernel = f->kernel;
	l->blocks = d.gx;
	l->threads = d.bx;
	l->priority = s->priority;
	l->stream = s->number;
	l->ctx = s->ctx;
	*out = l;
	return CUDA_SUCCESS;
}

namespace {

CUresult launch(CUfunction f, Dim d, unsigned smem, CUstream h, void **params, void **extra, const int *priority) {
	CUcontext c;
	HX_TRY(current(&c));
	CUstream s;
	HX_TRY(find_stream(h, &s));
	if (s->ctx->root != c->root) return CUDA_ERROR_INVALID_HANDLE;
	Using use(s->ctx, "cuLaunchKernel");
	std::shared_ptr<Launch> l;
	HX_TRY(prepare(f, d, smem, s, params, extra, &l));
	if (priority) l->priority = *priority;
	return submit(s, [l] { l->run(); });
}

CUresult good(CUevent e) { // with mu held
	if (e == nullptr || g().live.count(e) == 0) return CUDA_ERROR_INVALID_HANDLE;
	if (e->ctx->destroyed || e->ctx->root->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	return (CUresult)e->ctx->root->error.load();
}

CUresult event_of(CUevent e, std::shared_ptr<Recording> *rec, const char *call) {
	{
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(good(e));
	}
	Using use(e->ctx, call);
	std::lock_guard<std::mutex> lk(g().mu);
	*rec = e->latest;
	return CUDA_SUCCESS;
}

CUresult record(CUevent e, CUstream s) {
	auto rec = std::make_shared<Recording>();
	{
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(good(e));
		if (e->ctx->root != s->ctx->root) return CUDA_ERROR_INVALID_HANDLE;
	}
	Using of_event(e->ctx, "cuEventRecord"), of_stream(s->ctx, "cuEventRecord");
	{
		std::lock_guard<std::mutex> lk(g().mu);
		rec->ctx = e->ctx->root;
		e->latest = rec;
	}
	return submit(s, [rec] { rec->happen(); });
}

CUresult wait_event(CUstream s, CUevent e) {
	std::shared_ptr<Recording> rec;
	HX_TRY(event_of(e, &rec, "cuStreamWaitEvent"));
	Using use(s->ctx, "cuStreamWaitEvent");
	if (rec == nullptr || rec->done) return CUDA_SUCCESS;
	CUcontext root = s->ctx->root;
	return submit(s, [rec, root] {
		std::unique_lock<std::mutex> lk(rec->mu);
		while (!rec->done && rec->ctx->error == 0 && !rec->ctx->destroyed && root->error == 0) rec->cv.wait_for(lk, look);
	});
}

CUresult create_stream(CUstream *out, unsigned flags, int priority) {
	CUcontext c;
	HX_TRY(current(&c));
	if (out == nullptr || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
	std::lock_guard<std::mutex> lk(g().mu);
	*out = new_stream(c, flags, priority);
	return CUDA_SUCCESS;
}

template <typename T> CUresult wait_value(CUstream h, CUdeviceptr at, T want, unsigned flags) {
	CUstream s;
	HX_TRY(find_stream(h, &s));
	if (at % sizeof(T) != 0 || (flags & ~0x40000003u)) return CUDA_ERROR_INVALID_VALUE;
	CUcontext root = s->ctx->root;
	return submit(s, [=] {
		using S = std::make_signed_t<T>;
		for (;;) {
			T v = __atomic_load_n((T *)at, __ATOMIC_ACQUIRE);
			bool ok = false;
			switch (flags & 3) {
			case CU_STREAM_WAIT_VALUE_GEQ: ok = (S)(v - want) >= 0; break;
			case CU_STREAM_WAIT_VALUE_EQ: ok = v == want; break;
			case CU_STREAM_WAIT_VALUE_AND: ok = (v & want) != 0; break;
			case CU_STREAM_WAIT_VALUE_NOR: ok = (T) ~(v | want) != 0; break;
			}
			if (ok || root->error) return;
			timespec t{0, 20000};
			nanosleep(&t, nullptr);
		}
	});
}

template <typename T> CUresult write_value(CUstream h, CUdeviceptr at, T v, unsigned flags) {
	CUstream s;
	HX_TRY(find_stream(h, &s));
	if (at % sizeof(T) != 0 || flags > 1) return CUDA_ERROR_INVALID_VALUE;
	return submit(s, [=] { __atomic_store_n((T *)at, v, __ATOMIC_RELEASE); });
}

CUresult elapsed(float *ms, CUevent a, CUevent b) {
	if (ms == nullptr) return CUDA_ERROR_INVALID_VALUE;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(good(a));
		HX_TRY(good(b));
	}
	Using of_a(a->ctx, "cuEventElapsedTime"), of_b(b->ctx, "cuEventElapsedTime");
	std::lock_guard<std::mutex> lk(g().mu);
	if (a->ctx->root != b->ctx->root || ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_HANDLE;
	if (!a->latest || !b->latest) return CUDA_ERROR_INVALID_HANDLE;
	if (!a->latest->done || !b->latest->done) return CUDA_ERROR_NOT_READY;
	// The resolution is "approximately one half microsecond", in a float.
	double half_us = std::round((double)(b->latest->at - a->latest->at) / 500.0);
	*ms = (float)(half_us * 0.0005);
	return CUDA_SUCCESS;
}

} // namespace
} // namespace fake

using namespace fake;

HX_API cuStreamCreate(CUstream *out, unsigned int flags) {
	HX_ENTER(cuStreamCreate);
	return create_stream(out, flags, 0);
}

HX_API cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) {
	HX_ENTER(cuStreamCreateWithPriority);
	return create_stream(out, flags, priority);
}

// Returns at once; the thread ends when the work is done.
HX_API cuStreamDestroy_v2(CUstream h) {
	HX_ENTER(cuStreamDestroy_v2);
	if (h == nullptr || h == CU_STREAM_LEGACY || h == CU_STREAM_PER_THREAD) return CUDA_ERROR_INVALID_HANDLE;
	CUstream s;
	HX_TRY(find_stream(h, &s));
	Using use(s->ctx, "cuStreamDestroy");
	std::lock_guard<std::mutex> lk(g().mu);
	if (g().live.count(s) == 0 || s == s->ctx->null_stream) return CUDA_ERROR_INVALID_HANDLE;
	close_stream(s);
	return CUDA_SUCCESS;
}

HX_API cuStreamQuery(CUstream h) {
	HX_ENTER(cuStreamQuery);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	Using use(s->ctx, "cuStreamQuery");
	std::lock_guard<std::mutex> lk(s->mu);
	return s->out < s->in ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

HX_API cuStreamSynchronize(CUstream h) {
	HX_ENTER(cuStreamSynchronize);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	return wait_stream(s);
}

HX_API cuStreamGetPriority(CUstream h, int *priority) {
	HX_ENTER(cuStreamGetPriority);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	if (priority == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*priority = s->priority;
	return CUDA_SUCCESS;
}

HX_API cuStreamGetFlags(CUstream h, unsigned int *flags) {
	HX_ENTER(cuStreamGetFlags);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*flags = s->flags;
	return CUDA_SUCCESS;
}

HX_API cuStreamGetCtx(CUstream h, CUcontext *c) {
	HX_ENTER(cuStreamGetCtx);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	if (c == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*c = s->ctx;
	return CUDA_SUCCESS;
}

HX_API cuStreamIsCapturing(CUstream h, CUstreamCaptureStatus *status) {
	HX_ENTER(cuStreamIsCapturing);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
	*status = (CUstreamCaptureStatus)0;
	return CUDA_SUCCESS;
}

HX_API cuStreamWaitEvent(CUstream h, CUevent e, unsigned int flags) {
	HX_ENTER(cuStreamWaitEvent);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	return flags > 1 ? CUDA_ERROR_INVALID_VALUE : wait_event(s, e);
}

HX_API cuStreamWaitValue32_v2(CUstream s, CUdeviceptr at, cuuint32_t v, unsigned int flags) {
	HX_ENTER(cuStreamWaitValue32_v2);
	return wait_value<cuuint32_t>(s, at, v, flags);
}

HX_API cuStreamWaitValue64_v2(CUstream s, CUdeviceptr at, cuuint64_t v, unsigned int flags) {
	HX_ENTER(cuStreamWaitValue64_v2);
	return wait_value<cuuint64_t>(s, at, v, flags);
}

HX_API cuStreamWriteValue32_v2(CUstream s, CUdeviceptr at, cuuint32_t v, unsigned int flags) {
	HX_ENTER(cuStreamWriteValue32_v2);
	return write_value<cuuint32_t>(s, at, v, flags);
}

HX_API cuStreamWriteValue64_v2(CUstream s, CUdeviceptr at, cuuint64_t v, unsigned int flags) {
	HX_ENTER(cuStreamWriteValue64_v2);
	return write_value<cuuint64_t>(s, at, v, flags);
}

HX_API cuLaunchHostFunc(CUstream h, CUhostFn fn, void *data) {
	HX_ENTER(cuLaunchHostFunc);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	if (fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
	return submit(s, [=] { fn(data); });
}

HX_API cuEventCreate(CUevent *out, unsigned int flags) {
	HX_ENTER(cuEventCreate);
	CUcontext c;
	HX_TRY(current(&c));
	if (out == nullptr || flags > 7 || ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING))) return CUDA_ERROR_INVALID_VALUE;
	Using use(c, "cuEventCreate");
	std::lock_guard<std::mutex> lk(g().mu);
	auto e = new CUevent_st{c, flags, nullptr};
	g().live.insert(e);
	c->events.insert(e);
	*out = e;
	return CUDA_SUCCESS;
}

HX_API cuEventDestroy_v2(CUevent e) {
	HX_ENTER(cuEventDestroy_v2);
	{
		std::lock_guard<std::mutex> lk(g().mu);
		HX_TRY(good(e));
	}
	Using use(e->ctx, "cuEventDestroy");
	std::lock_guard<std::mutex> lk(g().mu);
	g().live.erase(e);
	e->ctx->events.erase(e);
	e->latest = nullptr;
	return CUDA_SUCCESS;
}

HX_API cuEventRecord(CUevent e, CUstream h) {
	HX_ENTER(cuEventRecord);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	return record(e, s);
}

HX_API cuEventRecordWithFlags(CUevent e, CUstream h, unsigned int flags) {
	HX_ENTER(cuEventRecordWithFlags);
	CUstream s;
	HX_TRY(find_stream(h, &s));
	return flags != 0 ? CUDA_ERROR_INVALID_VALUE : record(e, s);
}

HX_API cuEventQuery(CUevent e) {
	HX_ENTER(cuEventQuery);
	std::shared_ptr<Recording> rec;
	HX_TRY(event_of(e, &rec, "cuEventQuery"));
	return rec == nullptr || rec->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

HX_API cuEventSynchronize(CUevent e) {
	HX_ENTER(cuEventSynchronize);
	std::shared_ptr<Recording> rec;
	HX_TRY(event_of(e, &rec, "cuEventSynchronize"));
	if (rec == nullptr) return CUDA_SUCCESS;
	std::unique_lock<std::mutex> lk(rec->mu);
	while (!rec->done) {
		if (int err = rec->ctx->error) return (CUresult)err;
		if (rec->ctx->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
		rec->cv.wait_for(lk, look);
	}
	return CUDA_SUCCESS;
}

HX_API cuEventElapsedTime(float *ms, CUevent a, CUevent b) {
	HX_ENTER(cuEventElapsedTime);
	return elapsed(ms, a, b);
}

HX_API cuEventElapsedTime_v2(float *ms, CUevent a, CUevent b) {
	HX_ENTER(cuEventElapsedTime_v2);
	return elapsed(ms, a, b);
}

HX_API cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
                      unsigned int smem, CUstream s, void **params, void **extra) {
	HX_ENTER(cuLaunchKernel);
	return launch(f, {gx, gy, gz, bx, by, bz}, smem, s, params, extra, nullptr);
}

HX_API cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
	HX_ENTER(cuLaunchKernelEx);
	if (c == nullptr || (c->numAttrs > 0 && c->attrs == nullptr)) return CUDA_ERROR_INVALID_VALUE;
	int priority;
	const int *with = nullptr;
	for (unsigned i = 0; i < c->numAttrs; i++) {
		switch ((int)c->attrs[i].id) {
		case CU_LAUNCH_ATTRIBUTE_IGNORE: break;
		case CU_LAUNCH_ATTRIBUTE_PRIORITY:
			priority = std::max(-5, std::min(0, c->attrs[i].value.priority));
			with = &priority;
			break;
		default: return CUDA_ERROR_NOT_SUPPORTED;
		}
	}
	return launch(f, {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes, c->hStream, params, extra, with);
}

// A green context as a whole: events after, and work behind, all of its streams.
HX_API cuGreenCtxRecordEvent(CUgreenCtx x, CUevent e) {
	HX_ENTER(cuGreenCtxRecordEvent);
	std::vector<std::pair<CUstream, u64>> before;
	CUstream s;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		if (x == nullptr || g().live.count(x) == 0) return CUDA_ERROR_INVALID_CONTEXT;
		s = x->ctx->null_stream;
		for (CUstream o : x->ctx->streams)
			if (o != s) before.emplace_back(o, tail(o));
	}
	for (auto &b : before) push(s, [b] { reach(b.first, b.second, false, never); }, true);
	return record(e, s);
}

HX_API cuGreenCtxWaitEvent(CUgreenCtx x, CUevent e) {
	HX_ENTER(cuGreenCtxWaitEvent);
	std::vector<CUstream> all;
	{
		std::lock_guard<std::mutex> lk(g().mu);
		if (x == nullptr || g().live.count(x) == 0) return CUDA_ERROR_INVALID_CONTEXT;
		all.assign(x->ctx->streams.begin(), x->ctx->streams.end());
	}
	for (CUstream s : all) HX_TRY(wait_event(s, e));
	return CUDA_SUCCESS;
}
