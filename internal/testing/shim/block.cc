// Threads of a block: who runs next, collectives, barriers, and what can go wrong with them.
#include <sched.h>
#include <time.h>

#include <cstdio>
#include <new>

#include "internal.h"

namespace shim {

__thread Thread *self;
__thread Exec *exec;

#if HX_RUNTIME_TSAN
constexpr size_t stack_size = 256 << 10; // reports are made on it
#else
constexpr size_t stack_size = 64 << 10;
#endif
constexpr size_t agent_stack_size = 512 << 10;

void Block::reset(Grid *g, u32 bid) {
	Unwatched unwatched;
	grid = g;
	id = bid;
	threads = g->threads;
	if (fibers.size() < threads) {
		fibers = std::vector<Fiber>(threads);
		warps.resize((threads + warp_size - 1) / warp_size);
		ring.resize(threads);
		dirty_at.resize(threads);
		dirty.reserve(threads);
	}
	fresh = 0;
	alive = threads;
	waiting = at_barrier = 0;
	failed = false;
	head = ready = paused = 0;
	if (HX_RUNTIME_TSAN && var_count != 0) std::vector<char>().swap(shared); // new memory, that nobody has used
	var_count = shared_used = 0;
	barrier_tag = 0;
	dirty.clear();
	buffer = Buffer{};
	u32 hold = g->options.store_buffer;
	if (hold != 0) {
		size_t need = (size_t)hold * threads + 4 * (size_t)hold;
		if (held.size() < need) held.resize(need);
		buffer.held = &held[(size_t)hold * threads];
		buffer.capacity = 4 * hold;
	}
	u32 hooks = 0;
	if (g->options.jitter) hooks |= hook_points;
	if (hold != 0) hooks |= hook_points | hook_buffer;
	for (u32 t = 0; t < threads; t++) {
		Fiber *f = &fibers[t];
		f->tid = t;
		f->threads = threads;
		f->bid = bid;
		f->blocks = g->blocks;
		f->hooks = hooks;
		f->budget = 1;
		f->block = this;
		f->agent = nullptr;
		f->state = State::fresh;
		f->paused = false;
		f->stack = nullptr;
		f->buffer = Buffer{hold != 0 ? &held[(size_t)hold * t] : nullptr, 0, hold};
		dirty_at[t] = ~0u;
#if HX_RUNTIME_TSAN
		f->tsan = nullptr;
		f->fenced = false;
		f->seen_count = 0;
#endif
	}
	u32 warps_used = (threads + warp_size - 1) / warp_size;
	for (u32 w = 0; w < warps_used; w++) {
		u32 lanes = threads - w * warp_size;
		warps[w].gone = lanes >= warp_size ? 0 : ~0u << lanes;
		warps[w].group_count = 0;
	}
}

// Names

static std::string lanes_text(u32 lanes) {
	std::string s;
	for (u32 l = 0; l < warp_size; l++) {
		if (!(lanes >> l & 1)) continue;
		u32 end = l;
		while (end + 1 < warp_size && (lanes >> (end + 1) & 1)) end++;
		if (!s.empty()) s += ",";
		s += std::to_string(l);
		if (end > l) s += "-" + std::to_string(end);
		l = end;
	}
	return ((lanes & (lanes - 1)) == 0 ? "lane " : "lanes ") + s;
}

static std::string op_text(Op op, u32 mask) {
	static const char *const names[] = {"syncwarp", "ballot", "shfl", "shfl", "reduce_add", "mma"};
	char text[64];
	snprintf(text, sizeof text, "%s(0x%08x)", names[(u32)op], mask);
	return text;
}

static std::string block_text(const Block *b) {
	return std::string("kernel ") + b->grid->kernel->name + ", block " + std::to_string(b->id);
}

std::string thread_name(const Fiber *f) {
	return block_text(f->block) + ", thread " + std::to_string(f->tid) + " (warp " + std::to_string(f->tid / warp_size) + " lane " +
	       std::to_string(f->tid % warp_size) + ")";
}

// Where the threads of a block are that do not run, warp by warp.
std::string describe_waits(Block *b) {
	std::string s;
	for (u32 w = 0; w * warp_size < b->threads; w++) {
		Warp &warp = b->warps[w];
		u32 state[8] = {};
		for (u32 l = 0; l < warp_size && w * warp_size + l < b->threads; l++) {
			state[(u32)b->fibers[w * warp_size + l].state] |= 1u << l;
		}
		std::string t;
		auto add = [&](u32 lanes, const std::string &what) {
			if (lanes != 0) t += (t.empty() ? "" : "; ") + lanes_text(lanes) + " " + what;
		};
		for (u32 g = 0; g < warp.group_count; g++) {
			Group &group = warp.groups[g];
			add(group.arrived, "in " + op_text(group.op, group.mask) + " without " + lanes_text(group.mask & ~group.arrived));
		}
		add(state[(u32)State::barrier], "in syncthreads");
		add(state[(u32)State::fresh], "not started");
		add(state[(u32)State::ready] | state[(u32)State::running], "running");
		add(state[(u32)State::sleeping], "in pause");
		add(state[(u32)State::done], "left the kernel");
		if (s.size() > 1500) return s + " …";
		s += (s.empty() ? "warp " : " | warp ") + std::to_string(w) + ": " + t;
	}
	return s;
}

void fail_block(Block *b, const std::string &why) {
	{
		Inside inside;
		b->grid->fail(why.compare(0, 7, "kernel ") == 0 ? why : block_text(b) + ": " + why);
		b->failed = true;
	}
	leave();
}

[[noreturn]] static void deadlock(Block *b) {
	std::string why;
	{
		Inside inside;
		why = block_text(b) + ": no thread can go on: " + describe_waits(b);
		b->grid->fail(why);
		b->failed = true;
	}
	leave();
}

// Stacks and switches

bool start_fiber(Fiber *f) {
	bool agent = f->agent != nullptr;
	Exec *e = exec;
	Inside inside;
	if (!agent && e->stacks != nullptr) {
		Stack **at = &e->stacks;
#if HX_RUNTIME_TSAN
		// Which thread of before this one continues, for ThreadSanitizer, is left to chance.
		for (u32 skip = e->reuse.below(e->stack_count); skip > 0; skip--) at = &(*at)->next;
#endif
		f->stack = *at;
		*at = f->stack->next;
		e->stack_count--;
	} else {
		f->stack = new_stack(agent ? agent_stack_size : stack_size);
		if (f->stack == nullptr) return false;
	}
#if HX_RUNTIME_TSAN
	// A TSan fiber costs some 200 page faults, so it stays with its stack, and what earlier threads
	// did there counts as done before. That hides races between a thread that has ended and the one
	// thread that follows it on the stack; stale stack contents are no race for the same reason.
	if (f->stack->tsan == nullptr) f->stack->tsan = __tsan_create_fiber(0);
	f->tsan = f->stack->tsan;
	__tsan_set_fiber_name(f->tsan, agent ? agent_name(f) : thread_name(f).c_str());
#endif
	tsan_release_anew(&e->start_tag);
	make_context(&f->context, f->stack, fiber_main);
	return true;
}

static const char no_stack[] = "no memory for another thread's stack; run fewer blocks at one time";

void release_stack(Fiber *f) {
	Stack *s = f->stack;
	if (s == nullptr) return;
	f->stack = nullptr;
#if HX_RUNTIME_TSAN
	f->tsan = nullptr;
	if (f->agent != nullptr || f->state != State::done) { // else its calls are still on TSan's stack
		if (s->fenced != nullptr) __tsan_destroy_fiber(s->fenced);
		__tsan_destroy_fiber(s->tsan);
		free_stack(s);
		return;
	}
#endif
	if (f->agent != nullptr) {
		free_stack(s);
		return;
	}
	s->next = exec->stacks;
	exec->stacks = s;
	exec->stack_count++;
}

// The work of the threads of a block that was given up is over, too.
void disown(Block *b) {
	if (!HX_RUNTIME_TSAN) return;
	for (u32 t = 0; t < b->threads; t++) {
		Fiber *f = &b->fibers[t];
		if (f->stack == nullptr || f->state == State::done) continue;
#if HX_RUNTIME_TSAN
		tsan_enter(f->tsan);
		tsan_release(&b->grid->end_tag);
		tsan_enter(exec->tsan);
#endif
	}
}

static inline void note(Exec *e, Fiber *f) {
	e->schedule = (e->schedule ^ (f->bid * 1031ull + f->tid)) * 0x100000001b3u;
}

void switch_to(Fiber *f) {
	if (f->state == State::fresh && !start_fiber(f)) {
		if (f->block == nullptr) throw std::bad_alloc();
		f->block->grid->fail(thread_name(f) + ": " + no_stack);
		return;
	}
	note(exec, f);
	f->state = State::running;
	self = f;
	switch_context(&exec->main, &f->context);
	self = nullptr;
#if HX_RUNTIME_TSAN
	tsan_enter(exec->tsan);
#endif
}

void leave() {
	Fiber *f = current();
	switch_context(&f->context, &exec->main);
	__builtin_unreachable();
}

// From one thread of the block to another.
static void hop(Fiber *from, Fiber *to) {
	if (to->state == State::fresh && !start_fiber(to)) fail_block(to->block, no_stack);
	note(exec, to);
	to->state = State::running;
	self = to;
	switch_context(&from->context, &to->context);
#if HX_RUNTIME_TSAN
	tsan_enter(from->tsan);
#endif
}

static void push(Block *b, Fiber *f) {
	u32 at = b->head + b->ready;
	if (at >= b->threads) at -= b->threads;
	b->ring[at] = (u16)f->tid;
	b->ready++;
}

// The thread to run next, or nullptr. Threads that have begun go first, which keeps few stacks in
// use, except for one that spins: what it waits for may be with a thread that has not begun.
static Fiber *pick(Block *b, bool want_fresh) {
	Exec *e = exec;
	if (b->fresh < b->threads) {
		if (e->jitter) want_fresh = (e->rng.next() & 1) != 0;
		if (want_fresh || b->ready == 0) return &b->fibers[b->fresh++];
	}
	if (b->ready == 0) return nullptr;
	if (e->jitter && b->ready > 1) {
		u32 other = b->head + e->rng.below(b->ready);
		if (other >= b->threads) other -= b->threads;
		std::swap(b->ring[b->head], b->ring[other]);
	}
	Fiber *f = &b->fibers[b->ring[b->head]];
	if (++b->head == b->threads) b->head = 0;
	b->ready--;
	if (f->paused) {
		f->paused = false;
		b->paused--;
	}
	return f;
}

void make_ready(Fiber *f) {
	f->state = State::ready;
	if (exec->world != nullptr)
		world_ready(exec->world, f);
	else
		push(f->block, f);
}

void park() {
	Fiber *f = current();
	if (exec->world != nullptr) {
		switch_context(&f->context, &exec->main);
#if HX_RUNTIME_TSAN
		tsan_enter(f->tsan);
#endif
		return;
	}
	Block *b = f->block;
	if (b->grid->stop.load(std::memory_order_relaxed)) leave();
	Fiber *n = pick(b, false);
	if (n == nullptr) deadlock(b);
	hop(f, n);
}

static inline void refill(Fiber *f) {
	Exec *e = exec;
	if (f->hooks != 0)
		f->budget = 1 + (i32)e->rng.below(e->jitter ? 8 : 64);
	else
		f->budget = e->world != nullptr ? 16 : 64;
}

static i64 clock_now() {
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (i64)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Threaded mode, each time a thread that waits lets others run.
static void look(Block *b) {
	if (b->grid->stop.load(std::memory_order_relaxed)) leave();
	if ((++exec->looks & 255) != 0 || clock_now() < b->grid->deadline) return;
	std::string why;
	{
		Inside inside;
		why = "not at its end after " + std::to_string(b->grid->options.limit_ns / 1000000) + " ms: " + describe_waits(b);
	}
	fail_block(b, why);
}

void point() {
	Fiber *f = current();
	Exec *e = exec;
	Block *b = f->block;
	refill(f);
	if (b == nullptr) return;
	if ((f->hooks & hook_buffer) != 0 && b->pending() && (e->rng.next() & 1) != 0) drain_some(b, e->rng);
	if (e->world != nullptr) {
		if (e->jitter && b->grid->options.stall != 0 && e->rng.below(b->grid->options.stall) == 0) { // long enough for others to get far
			f->state = State::sleeping;
			f->wake = world_now(e->world) + e->rng.below(1 << (4 + e->rng.below(12)));
		} else {
			f->state = State::ready;
		}
		park();
		return;
	}
	look(b);
	Fiber *n = pick(b, true);
	if (n == nullptr) {
		if ((++e->idle & 15) == 0) sched_yield();
		return;
	}
	f->state = State::ready;
	push(b, f);
	hop(f, n);
}

void step() {
	if (--self->budget <= 0) point();
}

// Threads of the block all wait for something outside it.
static void rest(u32 ns) {
	if (++exec->idle < 64) {
		sched_yield();
		return;
	}
	if (ns < 1000) ns = 1000;
	if (ns > 50000) ns = 50000;
	timespec t = {0, (long)ns};
	clock_nanosleep(CLOCK_MONOTONIC, 0, &t, nullptr);
}

void pause(u32 ns) {
	Fiber *f = current();
	Exec *e = exec;
	Block *b = f->block;
	if (e->world != nullptr) {
		f->state = State::sleeping;
		f->wake = world_now(e->world) + (ns > 0 ? ns : 1);
		park();
		return;
	}
	if ((f->hooks & hook_buffer) != 0 && b->pending()) drain_some(b, e->rng);
	look(b);
	Fiber *n = pick(b, true);
	if (n == nullptr) {
		rest(ns);
		return;
	}
	f->state = State::ready;
	f->paused = true;
	b->paused++;
	push(b, f);
	if (b->paused == b->ready && n->state == State::ready) rest(ns);
	hop(f, n);
}

i64 now() {
	if (exec == nullptr || exec->world == nullptr) return clock_now();
	Fiber *f = current();
	if (f != nullptr && f->block != nullptr && --f->budget <= 0) point();
	return world_now(exec->world);
}

// Collectives

static void complete(Block *b, Warp *w, Group *g, Fiber *last) {
	Fiber *lanes = &b->fibers[last->tid & ~(warp_size - 1)];
	u32 mask = g->mask;
	Op op = g->op;
	switch (op) {
	case Op::syncwarp:
		if ((last->hooks & hook_buffer) != 0) share_lanes(b, lanes, mask);
		break;
	case Op::ballot:
	case Op::reduce_add: {
		u64 r = 0;
		for (u32 l = 0; l < warp_size; l++) {
			if (!(mask >> l & 1)) continue;
			if (op == Op::ballot)
				r |= (u64)(lanes[l].value != 0) << l;
			else
				r = (u32)(r + lanes[l].value);
		}
		for (u32 l = 0; l < warp_size; l++) {
			if (mask >> l & 1) lanes[l].value = r;
		}
		break;
	}
	case Op::warp: {
		u64 in[warp_size] = {};
		for (u32 l = 0; l < warp_size; l++) {
			if (mask >> l & 1) in[l] = lanes[l].value;
		}
		(*reinterpret_cast<void (*const *)(u64 *)>(last->value))(in);
		break;
	}
	case Op::shfl32:
	case Op::shfl64: {
		u64 in[warp_size];
		for (u32 l = 0; l < warp_size; l++) {
			if (mask >> l & 1) in[l] = lanes[l].value;
		}
		for (u32 l = 0; l < warp_size; l++) {
			if (!(mask >> l & 1)) continue;
			u32 from = lanes[l].arg & 31;
			if (!(mask >> from & 1)) {
				std::string why;
				{
					Inside inside;
					why = thread_name(&lanes[l]) + " reads lane " + std::to_string(from) + " in " + op_text(op, mask) +
					      ", which does not name it";
				}
				fail_block(b, why);
			}
			lanes[l].value = in[from];
		}
		break;
	}
	}
#if HX_RUNTIME_TSAN
	if (op == Op::syncwarp) {
		for (u32 l = 0; l < warp_size; l++) {
			if (!(mask >> l & 1)) continue;
			tsan_enter(lanes[l].tsan);
			tsan_acquire(&g->tag);
		}
		tsan_enter(last->tsan);
	}
#endif
	*g = w->groups[--w->group_count];
	exec->idle = 0;
	for (u32 l = 0; l < warp_size; l++) {
		if (!(mask >> l & 1) || &lanes[l] == last) continue;
		b->waiting--;
		make_ready(&lanes[l]);
	}
}

u64 collective(Op op, u32 mask, u64 value, u32 arg) {
	Fiber *f = current();
	if (f->hooks != 0 && --f->budget <= 0) point();
	Block *b = f->block;
	Warp *w = &b->warps[f->tid / warp_size];
	u32 bit = 1u << (f->tid % warp_size);
	auto fail = [&](const std::string &what) {
		std::string why;
		{
			Inside inside;
			why = thread_name(f) + " in " + op_text(op, mask) + what;
		}
		fail_block(b, why);
	};
	if (__builtin_expect(!(mask & bit), 0)) fail(": the mask does not name the lane itself");
	if (__builtin_expect((mask & w->gone) != 0, 0)) fail(": " + lanes_text(mask & w->gone) + " left the kernel or never was");
	if (__builtin_expect(op == Op::reduce_add && mask != ~0u, 0)) fail(": the GPU's tree needs all lanes of the warp");
	Group *g = nullptr;
	for (u32 i = 0; i < w->group_count; i++) {
		Group *other = &w->groups[i];
		if (other->mask == mask) {
			g = other;
		} else if ((other->arrived & mask) != 0 && (other->mask & bit) != 0) {
			fail(": " + lanes_text(other->arrived & mask) + " named another mask, in " + op_text(other->op, other->mask));
		}
	}
	if (g == nullptr) {
		g = &w->groups[w->group_count++];
		g->mask = mask;
		g->arrived = 0;
		g->op = op;
		if (op == Op::syncwarp) tsan_release_anew(&g->tag);
	} else {
		if (__builtin_expect(g->op != op, 0)) fail(": " + lanes_text(g->arrived) + " came to " + op_text(g->op, g->mask));
		if (op == Op::syncwarp) tsan_release(&g->tag);
	}
	f->value = value;
	f->arg = arg;
	g->arrived |= bit;
	if (g->arrived == mask) {
		complete(b, w, g, f);
		return f->value;
	}
	f->state = State::collective;
	if (++b->waiting == b->alive) deadlock(b);
	park();
	return f->value;
}

void barrier() {
	Fiber *f = current();
	if (f->hooks != 0 && --f->budget <= 0) point();
	Block *b = f->block;
	if (b->alive < b->threads) {
		std::string why;
		{
			Inside inside;
			why = thread_name(f) + " in syncthreads, which others can no longer reach: " + describe_waits(b);
		}
		fail_block(b, why);
	}
	if (b->at_barrier == 0)
		tsan_release_anew(&b->barrier_tag);
	else
		tsan_release(&b->barrier_tag);
	if (++b->at_barrier < b->threads) {
		f->state = State::barrier;
		if (++b->waiting == b->alive) deadlock(b);
		park();
		return;
	}
	if ((f->hooks & hook_buffer) != 0) share_all(b);
#if HX_RUNTIME_TSAN
	for (u32 t = 0; t < b->threads; t++) {
		tsan_enter(b->fibers[t].tsan);
		tsan_acquire(&b->barrier_tag);
	}
	tsan_enter(f->tsan);
#endif
	b->at_barrier = 0;
	b->waiting -= b->threads - 1;
	exec->idle = 0;
	for (u32 t = 0; t < b->threads; t++) {
		if (&b->fibers[t] != f) make_ready(&b->fibers[t]);
	}
}

// Beginning and end of a thread

void block_started([[maybe_unused]] Fiber *f) {
	tsan_acquire(&f->block->grid->begin_tag);
}

void finish_thread(Fiber *f) {
	Block *b = f->block;
	Warp *w = &b->warps[f->tid / warp_size];
	u32 bit = 1u << (f->tid % warp_size);
	tsan_release(&b->grid->end_tag);
	if (overflowed(f->stack)) fail_block(b, "stack overflow");
	w->gone |= bit;
	b->alive--;
	f->state = State::done;
	for (u32 i = 0; i < w->group_count; i++) {
		Group *g = &w->groups[i];
		if ((g->mask & bit) == 0) continue;
		std::string why;
		{
			Inside inside;
			why = thread_name(f) + " left the kernel while " + lanes_text(g->arrived) + " waits for it in " + op_text(g->op, g->mask);
		}
		fail_block(b, why);
	}
	if (b->at_barrier != 0) {
		std::string why;
		{
			Inside inside;
			why = thread_name(f) + " left the kernel while others wait for it in syncthreads: " + describe_waits(b);
		}
		fail_block(b, why);
	}
	if (b->alive != 0 && b->waiting == b->alive) deadlock(b);
}

void fiber_main() {
	for (;;) {
		Fiber *f = current();
#if HX_RUNTIME_TSAN
		tsan_enter(f->tsan);
		tsan_acquire(&exec->start_tag);
#endif
		if (f->agent != nullptr) {
			run_agent(f);
			f->state = State::done;
			leave();
		}
		Block *b = f->block;
		block_started(f);
		b->grid->kernel->body(b->grid->params, b->grid->launch);
		finish_thread(f);
		if (exec->world != nullptr || b->alive == 0 || b->grid->stop.load(std::memory_order_relaxed)) leave();
		Fiber *n = pick(b, false);
		if (n == nullptr) deadlock(b);
		if (!HX_RUNTIME_TSAN && n->state == State::fresh) {
			// The stack is warm and nobody needs it any more.
			n->stack = f->stack;
			f->stack = nullptr;
			note(exec, n);
			n->state = State::running;
			self = n;
			continue;
		}
		hop(f, n);
	}
}

// Shared memory

void *shared(const void *key, size_t size, size_t align) {
	Fiber *f = current();
	Block *b = f->block;
	for (u32 i = 0; i < b->var_count; i++) {
		if (b->vars[i].key == key) return b->shared.data() + b->vars[i].offset;
	}
	std::string why;
	{
		Inside inside;
		Unwatched unwatched;
		u32 limit = b->grid->options.smem_bytes;
		if (b->shared.size() < limit) b->shared.resize(limit); // the first variable: nobody has an address yet
		u64 base = reinterpret_cast<u64>(b->shared.data());
		u64 at = (base + b->shared_used + align - 1) / align * align - base;
		if (b->var_count < sizeof b->vars / sizeof b->vars[0] && at + size <= limit) {
			// A GPU's shared memory holds what the block before left there.
			for (size_t i = 0; i < size; i++) b->shared[at + i] = (char)(0xa5 + 7 * i);
			b->vars[b->var_count++] = SharedVar{key, (u32)at};
			b->shared_used = (u32)(at + size);
			return b->shared.data() + at;
		}
		why = block_text(b) + ": needs " + std::to_string(at + size) + " bytes of shared memory, and a block has " +
		      std::to_string(limit);
	}
	fail_block(b, why);
}

void misaligned(const void *p, u32 size) {
	Fiber *f = current();
	std::string why;
	{
		Inside inside;
		char text[96];
		snprintf(text, sizeof text, ": access of %u bytes to misaligned address %p", size, p);
		why = (f->block != nullptr ? thread_name(f) : std::string("agent")) + text;
	}
	fail_block(f->block, why);
}

} // namespace shim
