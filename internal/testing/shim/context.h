// Stacks and the switch between them.
#pragma once

#include <cstddef>

// Machines without a switch of ours use the C library's; -DHX_UCONTEXT=1 asks for it on any.
#ifndef HX_UCONTEXT
#if defined(__x86_64__) || defined(__aarch64__)
#define HX_UCONTEXT 0
#else
#define HX_UCONTEXT 1
#endif
#endif
#if HX_UCONTEXT
#include <ucontext.h>
#endif

namespace shim {

struct Context {
#if HX_UCONTEXT
	ucontext_t uc;
#else
	void *sp = nullptr;
#endif
};

struct Stack {
	char *base; // lowest usable byte
	size_t size;
	bool guarded; // by a page below that faults; else by a word at the base
	Stack *next;
	void *tsan = nullptr, *fenced = nullptr; // ThreadSanitizer's fibers of the stack's user
};

// nullptr when the system has no memory for it. Each guard page costs two of a process's mappings
// (vm.max_map_count, 65,530), so when there are very many stacks, further ones do without.
Stack *new_stack(size_t size);
bool overflowed(const Stack *);
void free_stack(Stack *);

// Makes a context that starts entry, which never returns, on the stack.
void make_context(Context *, Stack *, void (*entry)());

#if HX_UCONTEXT
inline void switch_context(Context *from, Context *to) { swapcontext(&from->uc, &to->uc); }
#else
extern "C" void hx_shim_switch(void **save, void *load);
inline void switch_context(Context *from, Context *to) { hx_shim_switch(&from->sp, to->sp); }
#endif

// Makes a signal handler's return continue `to` instead of what was interrupted. False where this
// machine's registers are not known here.
bool resume_from_signal(void *ucontext, Context *to);

} // namespace shim
