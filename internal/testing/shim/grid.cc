// Threaded mode: a pool of OS threads that run the blocks of grids. And the faults of kernels.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>

#include "internal.h"

namespace shim {

// Registry

static const Registrar *registered;

Registrar::Registrar(const char *name, size_t param_size, void (*body)(const void *, const hx_launch &))
    : kernel{name, param_size, body}, next(registered) {
	registered = this;
}

const Kernel *find(const char *name) {
	for (const Registrar *r = registered; r != nullptr; r = r->next) {
		if (std::strcmp(r->kernel.name, name) == 0) return &r->kernel;
	}
	return nullptr;
}

void for_each(const std::function<void(const Kernel &)> &f) {
	for (const Registrar *r = registered; r != nullptr; r = r->next) f(r->kernel);
}

// Faults. Go has its own handlers in the same process: what is not a kernel's fault goes on to the
// handler that was there before.

static struct sigaction before[NSIG];
static const int fault_signals[] = {SIGSEGV, SIGBUS, SIGFPE};

static void on_fault(int sig, siginfo_t *info, void *context) {
	Exec *e = exec;
	Fiber *f = current();
	if (e != nullptr && f != nullptr && f->block != nullptr) {
		e->faulted = true;
		e->fault_addr = info->si_addr;
		e->fault_signal = sig;
		e->fault_fiber = f;
		if (resume_from_signal(context, &e->main)) return;
		e->faulted = false;
	}
	struct sigaction *old = &before[sig];
	if ((old->sa_flags & SA_SIGINFO) != 0 && old->sa_sigaction != nullptr) {
		old->sa_sigaction(sig, info, context);
	} else if (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN) {
		old->sa_handler(sig);
	} else {
		signal(sig, SIG_DFL); // and the instruction is tried again
	}
}

struct SignalStack {
	void *memory = nullptr;
	SignalStack() {
		stack_t s;
		if (sigaltstack(nullptr, &s) != 0 || (s.ss_flags & SS_DISABLE) == 0) return;
		constexpr size_t size = 64 << 10;
		memory = malloc(size);
		s = stack_t{};
		s.ss_sp = memory;
		s.ss_size = size;
		sigaltstack(&s, nullptr);
	}
	~SignalStack() {
		if (memory == nullptr) return;
		stack_t s{};
		s.ss_flags = SS_DISABLE;
		sigaltstack(&s, nullptr);
		free(memory);
	}
};

void catch_faults() {
	static std::once_flag once;
	std::call_once(once, [] {
		for (int sig : fault_signals) {
			struct sigaction a = {};
			a.sa_sigaction = on_fault;
			a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
			sigaction(sig, &a, &before[sig]);
		}
	});
	static thread_local SignalStack stack;
	(void)stack;
}

std::string fault_text(Exec *e) {
	const char *what = e->fault_signal == SIGFPE ? "arithmetic fault" : "memory fault";
	char text[64];
	snprintf(text, sizeof text, " at %p", e->fault_addr);
	const Fiber *f = e->fault_fiber;
	char *a = static_cast<char *>(e->fault_addr);
	bool overflow = e->fault_signal == SIGSEGV && f->stack != nullptr && a < f->stack->base && a >= f->stack->base - (64 << 10);
	return thread_name(f) + ": " + (overflow ? "stack overflow" : std::string(what) + (e->fault_signal == SIGFPE ? "" : text));
}

void block_signals() {
	sigset_t all;
	sigfillset(&all);
	for (int sig : fault_signals) sigdelset(&all, sig);
	for (int sig : {SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, sig);
	pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

// Executors are kept for ever; there are as many as blocks ever ran at one time.

static std::mutex exec_lock;
static Exec *exec_free;

Exec *take_exec() {
	Exec *e = nullptr;
	{
		std::lock_guard<std::mutex> hold(exec_lock);
		e = exec_free;
		if (e != nullptr) exec_free = e->next;
	}
	if (e == nullptr) e = new Exec;
	e->faulted = false;
	e->world = nullptr;
	e->idle = 0;
#if HX_RUNTIME_TSAN
	e->tsan = __tsan_get_current_fiber();
#endif
	return e;
}

void give_exec(Exec *e) {
	std::lock_guard<std::mutex> hold(exec_lock);
	e->next = exec_free;
	exec_free = e;
}

static void run_block(Exec *e, Grid *g, u32 id) {
	Block *b = &e->own;
	e->block = b;
	e->rng.state = mix(mix(g->options.seed, g->launch.Seq), id);
#if HX_RUNTIME_TSAN
	e->reuse.state = mix(e->rng.state, 3);
#endif
	e->jitter = g->options.jitter;
	e->schedule = 0;
	b->reset(g, id);
	switch_to(&b->fibers[b->fresh++]);
	if (e->faulted) {
		e->faulted = false;
		g->fail(fault_text(e));
		b->failed = true;
	}
	if (!b->failed && !g->stop.load(std::memory_order_relaxed) && b->pending()) drain_block(b);
	if (b->alive != 0) disown(b);
	for (u32 t = 0; t < b->fresh; t++) release_stack(&b->fibers[t]);
	g->schedule.fetch_xor(mix(e->schedule, id), std::memory_order_relaxed);
}

static void run_blocks(Grid *g) {
	catch_faults();
	Exec *e = take_exec();
	Exec *outer = exec;
	Thread *outer_self = self;
	exec = e;
	self = nullptr;
	for (;;) {
		u32 id = g->next.fetch_add(1, std::memory_order_relaxed);
		if (id >= g->blocks || g->stop.load(std::memory_order_relaxed)) break;
		if (g->options.enter && !g->options.enter(id)) continue;
		run_block(e, g, id);
		if (g->options.leave) g->options.leave(id);
	}
	exec = outer;
	self = outer_self;
	give_exec(e);
}

// Pool

struct Job {
	Grid *grid;
	u32 wanted;  // helpers that may still join
	u32 working;
	Job *next;
};

struct Pool {
	std::mutex lock;
	std::condition_variable work, done;
	Job *jobs = nullptr;
	u32 idle = 0;
	u32 coming = 0; // wake-ups and new threads on their way
};

static Pool *pool() {
	static Pool *p = new Pool; // for ever: its threads outlive main's statics
	return p;
}

static bool useful(const Job *j) { return j->wanted > 0 && j->grid->next.load(std::memory_order_relaxed) < j->grid->blocks; }

static void *pool_thread(void *);

// With the pool's lock: one more thread for the jobs that there are.
static void call_one(Pool *p) {
	if (p->idle > p->coming) {
		p->coming++;
		p->work.notify_one();
		return;
	}
	sigset_t all, old;
	sigfillset(&all);
	for (int sig : fault_signals) sigdelset(&all, sig);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	pthread_t t;
	if (pthread_create(&t, nullptr, pool_thread, p) == 0) pthread_detach(t);
	pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

static void *pool_thread(void *arg) {
	Pool *p = static_cast<Pool *>(arg);
	block_signals();
	std::unique_lock<std::mutex> hold(p->lock);
	for (;;) {
		Job *j = p->jobs;
		while (j != nullptr && !useful(j)) j = j->next;
		if (j == nullptr) {
			p->idle++;
			p->work.wait(hold);
			p->idle--;
			if (p->coming > 0) p->coming--;
			continue;
		}
		j->wanted--;
		j->working++;
		if (useful(j)) call_one(p); // each wakes the next: short grids are over before many are awake
		hold.unlock();
		run_blocks(j->grid);
		hold.lock();
		if (--j->working == 0) p->done.notify_all();
	}
}

Result run_grid(const Kernel *kernel, u32 blocks, u32 threads, const void *params, hx_launch launch, const Options &options,
                u32 resident) {
	Result r;
	if (kernel == nullptr || blocks == 0 || threads == 0 || threads > max_threads) {
		r.ok = false;
		r.error = kernel == nullptr ? "no such kernel"
		                            : std::string("kernel ") + kernel->name + ": " + std::to_string(blocks) + " blocks of " +
		                                  std::to_string(threads) + " threads: a grid has blocks, and a block 1 to " +
		                                  std::to_string(max_threads) + " threads";
		return r;
	}
	alignas(16) unsigned char room[4096];
	unsigned char *copy = room;
	if (kernel->param_size > sizeof room) {
		r.ok = false;
		r.error = std::string("kernel ") + kernel->name + ": parameters of " + std::to_string(kernel->param_size) +
		          " bytes do not fit into 4096";
		return r;
	}
	std::memcpy(copy, params, kernel->param_size);
	Grid g;
	g.kernel = kernel;
	g.blocks = blocks;
	g.threads = threads;
	g.params = copy;
	g.launch = launch;
	g.options = options;
	g.deadline = now() + options.limit_ns;
	tsan_release_anew(&g.begin_tag);
	tsan_release_anew(&g.end_tag);

	u32 helpers = std::min(blocks, resident != 0 ? resident : 32) - 1;
	if (helpers == 0) {
		run_blocks(&g);
	} else {
		Pool *p = pool();
		Job j{&g, helpers, 0, nullptr};
		{
			std::lock_guard<std::mutex> hold(p->lock);
			j.next = p->jobs;
			p->jobs = &j;
			call_one(p);
		}
		run_blocks(&g);
		std::unique_lock<std::mutex> hold(p->lock);
		j.wanted = 0;
		for (Job **at = &p->jobs; *at != nullptr; at = &(*at)->next) {
			if (*at == &j) {
				*at = j.next;
				break;
			}
		}
		while (j.working != 0) p->done.wait(hold);
	}
	tsan_acquire(&g.end_tag);
	r.ok = g.error.empty();
	r.error = g.error;
	r.schedule = g.schedule.load();
	return r;
}

} // namespace shim
