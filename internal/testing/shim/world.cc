// World: everything in one OS thread, in an order that the seed decides.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "internal.h"

namespace shim {

constexpr i64 step_ns = 16;
constexpr u32 max_fibers = 4096; // CUDA threads at one time

struct Agent {
	std::string name;
	std::function<void()> body;
	bool daemon = false;
	bool stop = false;
	std::string error;
	u64 start_tag = 0, end_tag = 0;
	Fiber fiber;
};

struct Running {
	Grid grid;
	std::vector<unsigned char> params;
	std::function<void()> done;
	std::vector<Block *> active;
	u32 finished = 0;
};

struct World::Impl {
	Options options;
	Exec *e = nullptr;
	Rng choices; // of agents
	i64 clock = 1000000000;
	u64 steps = 0, epoch = 0;
	std::vector<Fiber *> ready, sleeping, polling;
	i64 next_wake = INT64_MAX; // no sleeper wakes before
	std::vector<Agent *> agents;
	std::vector<Running *> grids;
	std::vector<Block *> blocks, spare; // active; to be used again
	u32 fibers = 0;
	u32 waited_for = 0; // agents that are no daemons
	std::string error;

	void start_blocks();
	void end_of_thread(Fiber *f);
	bool drain();
	void settle(Fiber *f);
	void unwind();
	std::string report();
};

i64 world_now(World::Impl *w) { return ++w->clock; }

// The lists are grown here and nowhere else, always in the scheduler's name.
void world_ready(World::Impl *w, Fiber *f) {
	Inside inside;
	w->ready.push_back(f);
}

World::World(const Options &options) : impl_(new Impl) {
	impl_->options = options;
	impl_->choices.state = mix(options.seed, 2);
	impl_->e = take_exec();
	impl_->e->world = impl_;
	impl_->e->jitter = options.jitter;
	impl_->e->schedule = 0;
	impl_->e->rng.state = mix(options.seed, 1);
#if HX_RUNTIME_TSAN
	impl_->e->reuse.state = mix(options.seed, 3);
#endif
}

World::~World() {
	Impl *w = impl_;
	w->unwind();
	for (Agent *a : w->agents) delete a;
	for (Running *g : w->grids) delete g;
	Unwatched unwatched;
	Exec *outer = exec;
	exec = w->e;
	for (Block *b : w->blocks) {
		for (u32 t = 0; t < b->threads; t++) release_stack(&b->fibers[t]);
		delete b;
	}
	exec = outer;
	for (Block *b : w->spare) delete b;
	give_exec(w->e);
	delete w;
}

u64 World::random(u64 n) { return n == 0 ? 0 : impl_->choices.next() % n; }
u64 World::steps() const { return impl_->steps; }
i64 World::now() const { return impl_->clock; }

void World::grid(const Kernel *kernel, u32 blocks, u32 threads, const void *params, size_t size, hx_launch launch,
                 std::function<void()> done) {
	Impl *w = impl_;
	if (kernel == nullptr || blocks == 0 || threads == 0 || threads > max_threads || size != kernel->param_size) {
		Inside inside;
		if (w->error.empty()) {
			w->error = kernel == nullptr ? "World::grid: no such kernel"
			                             : std::string("kernel ") + kernel->name + ": " + std::to_string(blocks) + " blocks of " +
			                                   std::to_string(threads) + " threads with " + std::to_string(size) +
			                                   " bytes of parameters: it takes " + std::to_string(kernel->param_size) +
			                                   " bytes, and 1 to 1024 threads";
		}
		return;
	}
	// Made and tagged in the caller's name: the grid sees what the caller did so far.
	Running *g = new Running;
	tsan_release_anew(&g->grid.begin_tag);
	tsan_release_anew(&g->grid.end_tag);
	Inside inside;
	g->params.resize(size + 16);
	size_t skip = (16 - reinterpret_cast<u64>(g->params.data()) % 16) % 16;
	for (size_t i = 0; i < size; i++) g->params[skip + i] = static_cast<const unsigned char *>(params)[i];
	g->grid.kernel = kernel;
	g->grid.blocks = blocks;
	g->grid.threads = threads;
	g->grid.params = g->params.data() + skip;
	g->grid.launch = launch;
	g->grid.options = w->options;
	g->done = std::move(done);
	w->grids.push_back(g);
	w->start_blocks();
}

void World::agent(const char *name, std::function<void()> body, bool daemon) {
	Impl *w = impl_;
	Agent *a = new Agent;
	tsan_release_anew(&a->start_tag);
	tsan_release_anew(&a->end_tag);
	Inside inside;
	a->name = name;
	a->body = std::move(body);
	a->daemon = daemon;
	Fiber *f = &a->fiber;
	f->tid = (u32)w->agents.size();
	f->threads = f->blocks = 0;
	f->bid = ~0u;
	f->hooks = 0;
	f->budget = 1;
	f->agent = a;
	w->agents.push_back(a);
	w->ready.push_back(f);
	if (!daemon) w->waited_for++;
}

void World::Impl::start_blocks() {
	for (Running *g : grids) {
		while (g->grid.next.load() < g->grid.blocks && (fibers == 0 || fibers + g->grid.threads <= max_fibers)) {
			Block *b = nullptr;
			if (!spare.empty()) {
				b = spare.back();
				spare.pop_back();
			} else {
				b = new Block;
			}
			b->reset(&g->grid, g->grid.next.fetch_add(1));
			fibers += b->threads;
			blocks.push_back(b);
			g->active.push_back(b);
			for (u32 t = 0; t < b->threads; t++) ready.push_back(&b->fibers[t]);
		}
	}
}

template <typename T> static void take_out(std::vector<T *> &v, T *x) { v.erase(std::find(v.begin(), v.end(), x)); }

void World::Impl::end_of_thread(Fiber *f) {
	Block *b = f->block;
	release_stack(f);
	if (b->alive != 0) return;
	drain_block(b);
	Running *g = nullptr;
	for (Running *r : grids) {
		if (&r->grid == b->grid) g = r;
	}
	take_out(g->active, b);
	take_out(blocks, b);
	fibers -= b->threads;
	spare.push_back(b);
	if (++g->finished == g->grid.blocks) {
		take_out(grids, g);
		Agent *a = new Agent;
		a->name = std::string(g->grid.kernel->name) + " done";
		std::shared_ptr<Running> own(g);
		a->body = [own] {
			tsan_acquire(&own->grid.end_tag);
			if (own->done) own->done();
		};
		Fiber *d = &a->fiber;
		d->tid = (u32)agents.size();
		d->threads = d->blocks = 0;
		d->bid = ~0u;
		d->hooks = 0;
		d->budget = 1;
		d->agent = a;
		agents.push_back(a);
		ready.push_back(d);
		waited_for++;
	}
	start_blocks();
}

// One held store of anybody moves on.
bool World::Impl::drain() {
	u32 n = 0;
	for (Block *b : blocks) n += b->pending();
	if (n == 0) return false;
	u32 k = e->rng.below(n);
	for (Block *b : blocks) {
		if (b->pending() && k-- == 0) {
			drain_some(b, e->rng);
			break;
		}
	}
	return true;
}

std::string World::Impl::report() {
	std::string s;
	for (Block *b : blocks) {
		if (s.size() > 3000) return s + "\n…";
		s += "\nkernel " + std::string(b->grid->kernel->name) + ", block " + std::to_string(b->id) + ": " + describe_waits(b);
	}
	for (Agent *a : agents) {
		if (a->fiber.state != State::done && !a->daemon) s += "\nagent " + a->name + (a->fiber.state == State::polling ? ": waiting" : ": not done");
	}
	return s;
}

// Puts a fiber that came back where its state says.
void World::Impl::settle(Fiber *f) {
	switch (f->state) {
	case State::ready: ready.push_back(f); break;
	case State::sleeping:
		sleeping.push_back(f);
		next_wake = std::min(next_wake, f->wake);
		break;
	case State::polling: polling.push_back(f); break;
	case State::done:
		if (f->agent == nullptr) {
			end_of_thread(f);
			break;
		}
		release_stack(f);
		if (!f->agent->daemon) waited_for--;
		if (!f->agent->error.empty() && error.empty()) error = f->agent->error;
		break;
	default: break; // collective or barrier: those who come last wake it
	}
}

// Agents have objects on their stacks.
void World::Impl::unwind() {
	Exec *outer = exec;
	Thread *outer_self = self;
	exec = e;
	self = nullptr;
	for (size_t i = 0; i < agents.size(); i++) {
		Agent *a = agents[i];
		if (a->fiber.state == State::done) continue;
		if (a->fiber.state == State::fresh) {
			a->fiber.state = State::done;
			continue;
		}
		a->stop = true;
		for (int tries = 0; a->fiber.state != State::done && tries < 1000; tries++) switch_to(&a->fiber);
		release_stack(&a->fiber);
	}
	ready.clear();
	sleeping.clear();
	polling.clear();
	exec = outer;
	self = outer_self;
}

Result World::run(u64 max_steps) {
	Impl *w = impl_;
	Exec *e = w->e;
	catch_faults();
	Exec *outer = exec;
	Thread *outer_self = self;
	Result r;
	if (outer_self != nullptr) {
		r.ok = false;
		r.error = "World::run called by a kernel or an agent";
		return r;
	}
	exec = e;
	self = nullptr;
#if HX_RUNTIME_TSAN
	e->tsan = __tsan_get_current_fiber();
#endif
	u64 limit = w->steps + max_steps;
	while (w->error.empty() && (w->waited_for != 0 || !w->grids.empty())) {
		if (w->steps >= limit) {
			w->error = "not at its end after " + std::to_string(max_steps) + " steps:" + w->report();
			break;
		}
		w->clock += step_ns;
		if (w->clock >= w->next_wake) {
			w->next_wake = INT64_MAX;
			for (size_t i = 0; i < w->sleeping.size();) {
				Fiber *f = w->sleeping[i];
				if (f->wake > w->clock) {
					w->next_wake = std::min(w->next_wake, f->wake);
					i++;
					continue;
				}
				w->sleeping[i] = w->sleeping.back();
				w->sleeping.pop_back();
				w->ready.push_back(f);
			}
		}
		if (w->options.store_buffer != 0 && e->rng.below(4) == 0 && w->drain()) w->epoch++;

		// Those who wait for a condition are asked again when anything has happened.
		Fiber *f = nullptr;
		size_t n = w->ready.size() + w->polling.size();
		size_t k = n != 0 ? e->rng.below((u32)n) : 0;
		if (k < w->ready.size()) {
			f = w->ready[k];
			w->ready[k] = w->ready.back();
			w->ready.pop_back();
		} else {
			for (size_t i = 0; i < w->polling.size() && f == nullptr; i++) {
				size_t at = (k - w->ready.size() + i) % w->polling.size();
				Fiber *p = w->polling[at];
				if (p->epoch == w->epoch && p->wake > w->clock) continue;
				f = p;
				w->polling[at] = w->polling.back();
				w->polling.pop_back();
			}
			if (f == nullptr && !w->ready.empty()) {
				k %= w->ready.size();
				f = w->ready[k];
				w->ready[k] = w->ready.back();
				w->ready.pop_back();
			}
		}
		if (f == nullptr) { // everybody waits
			if (w->drain()) {
				w->epoch++;
				continue;
			}
			i64 next = w->next_wake;
			for (Fiber *s : w->polling) next = std::min(next, s->wake);
			if (next == INT64_MAX) {
				w->error = "deadlock: all wait, and nobody has a deadline:" + w->report();
				break;
			}
			w->clock = std::max(w->clock, next);
			w->epoch++;
			continue;
		}
		w->steps++;
		bool polled = f->state == State::polling;
		if (polled) f->epoch = w->epoch;
		switch_to(f);
		if (e->faulted) {
			e->faulted = false;
			w->error = fault_text(e);
			break;
		}
		if (f->block != nullptr && f->block->grid->stop.load()) {
			w->error = f->block->grid->error;
			break;
		}
		if (!polled || f->state != State::polling) w->epoch++;
		if (f->state == State::polling && !polled) f->epoch = w->epoch - 1;
		w->settle(f);
	}
	for (Block *b : w->blocks) disown(b);
	exec = outer;
	self = outer_self;
	w->unwind();
	for (Agent *a : w->agents) tsan_acquire(&a->end_tag);
	for (Running *g : w->grids) tsan_acquire(&g->grid.end_tag);
	r.ok = w->error.empty();
	r.error = w->error;
	r.schedule = mix(e->schedule, (u64)w->clock);
	return r;
}

// Agents

void run_agent(Fiber *f) {
	Agent *a = f->agent;
	tsan_acquire(&a->start_tag);
	try {
		a->body();
	} catch (const Stopped &) {
	} catch (const std::exception &x) {
		Inside inside;
		a->error = "agent " + a->name + ": " + x.what();
	}
	a->body = nullptr;
	tsan_release(&a->end_tag);
}

const char *agent_name(const Fiber *f) { return f->agent->name.c_str(); }

static void park_agent(Fiber *f) {
	park();
	if (f->agent->stop) throw Stopped{};
}

static Fiber *agent_here() {
	Fiber *f = current();
	return f != nullptr && f->agent != nullptr ? f : nullptr;
}

void yield() {
	Fiber *f = agent_here();
	if (f == nullptr) {
		sched_yield();
		return;
	}
	f->state = State::ready;
	park_agent(f);
}

void host_point() {
	Fiber *f = agent_here();
	if (f == nullptr || !exec->jitter || --f->budget > 0) return;
	f->budget = 1 + (i32)exec->rng.below(8);
	yield();
}

void sleep_for(i64 ns) {
	if (ns < 0) ns = 0;
	Fiber *f = agent_here();
	if (f == nullptr) {
		timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
		clock_nanosleep(CLOCK_MONOTONIC, 0, &t, nullptr);
		return;
	}
	f->wake = world_now(exec->world) + ns;
	f->state = State::sleeping;
	park_agent(f);
}

bool wait_until(const std::function<bool()> &ready, i64 deadline_ns) {
	Fiber *f = agent_here();
	for (u32 tries = 0;; tries++) {
		if (ready()) return true;
		if (now() >= deadline_ns) return false;
		if (f != nullptr) {
			f->wake = deadline_ns;
			f->state = State::polling;
			park_agent(f);
		} else if (tries < 64) {
			sched_yield();
		} else {
			timespec t = {0, 20000};
			clock_nanosleep(CLOCK_MONOTONIC, 0, &t, nullptr);
		}
	}
}

} // namespace shim
