#include "context.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "types.h"

// The callee-saved registers of the System V and AAPCS64 calling conventions. The floating-point
// control words are not switched; kernels and agents leave them alone.
#if HX_UCONTEXT
#elif defined(__x86_64__)
asm(R"(
	.text
	.globl	hx_shim_switch
	.hidden	hx_shim_switch
	.type	hx_shim_switch, @function
hx_shim_switch:
	pushq	%rbp
	pushq	%rbx
	pushq	%r12
	pushq	%r13
	pushq	%r14
	pushq	%r15
	movq	%rsp, (%rdi)
	movq	%rsi, %rsp
	.globl	hx_shim_resume
	.hidden	hx_shim_resume
hx_shim_resume:
	popq	%r15
	popq	%r14
	popq	%r13
	popq	%r12
	popq	%rbx
	popq	%rbp
	ret
	.size	hx_shim_switch, .-hx_shim_switch
)");
#elif defined(__aarch64__)
asm(R"(
	.text
	.globl	hx_shim_switch
	.hidden	hx_shim_switch
	.type	hx_shim_switch, %function
hx_shim_switch:
	sub	sp, sp, #160
	stp	x19, x20, [sp, #0]
	stp	x21, x22, [sp, #16]
	stp	x23, x24, [sp, #32]
	stp	x25, x26, [sp, #48]
	stp	x27, x28, [sp, #64]
	stp	x29, x30, [sp, #80]
	stp	d8, d9, [sp, #96]
	stp	d10, d11, [sp, #112]
	stp	d12, d13, [sp, #128]
	stp	d14, d15, [sp, #144]
	mov	x9, sp
	str	x9, [x0]
	mov	sp, x1
	.globl	hx_shim_resume
	.hidden	hx_shim_resume
hx_shim_resume:
	ldp	x19, x20, [sp, #0]
	ldp	x21, x22, [sp, #16]
	ldp	x23, x24, [sp, #32]
	ldp	x25, x26, [sp, #48]
	ldp	x27, x28, [sp, #64]
	ldp	x29, x30, [sp, #80]
	ldp	d8, d9, [sp, #96]
	ldp	d10, d11, [sp, #112]
	ldp	d12, d13, [sp, #128]
	ldp	d14, d15, [sp, #144]
	add	sp, sp, #160
	ret
	.size	hx_shim_switch, .-hx_shim_switch
)");
#endif
#if !HX_UCONTEXT
extern "C" void hx_shim_resume();
#endif

namespace shim {

// A guarded stack takes two of the process's mappings (vm.max_map_count, 65,530). Several copies of the
// library may be in one process (fakecuda.Private), each with a count of its own.
static std::atomic<u32> guards;
constexpr u32 max_guards = 3000;
constexpr unsigned long long canary = 0x5ca1ab1e0ddba11u;

// Stacks without guard pages are cut from slabs, which stay; freed ones are used again.
static std::mutex slab_lock;
static Stack *slab_freed;

static Stack *slab_stack(size_t size) {
	static char *rest, *end;
	std::lock_guard<std::mutex> hold(slab_lock);
	for (Stack **at = &slab_freed; *at != nullptr; at = &(*at)->next) {
		if ((*at)->size != size) continue;
		Stack *s = *at;
		*at = s->next;
		s->next = nullptr;
		*reinterpret_cast<unsigned long long *>(s->base) = canary;
		return s;
	}
	if (rest == nullptr || (size_t)(end - rest) < size) {
		size_t slab = 64 * size;
		void *m = mmap(nullptr, slab, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (m == MAP_FAILED) return nullptr;
		rest = static_cast<char *>(m);
		end = rest + slab;
	}
	Stack *s = new Stack{rest, size, false, nullptr, nullptr, nullptr};
	rest += size;
	*reinterpret_cast<unsigned long long *>(s->base) = canary;
	return s;
}

Stack *new_stack(size_t size) {
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	size = (size + page - 1) / page * page;
	if (guards.fetch_add(1, std::memory_order_relaxed) >= max_guards) {
		guards.fetch_sub(1, std::memory_order_relaxed);
		return slab_stack(size);
	}
	void *m = mmap(nullptr, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (m != MAP_FAILED && mprotect(m, page, PROT_NONE) != 0) {
		munmap(m, size + page);
		m = MAP_FAILED;
	}
	if (m == MAP_FAILED) { // no mappings are left; a slab takes one for many stacks
		guards.fetch_sub(1, std::memory_order_relaxed);
		return slab_stack(size);
	}
	return new Stack{static_cast<char *>(m) + page, size, true, nullptr, nullptr, nullptr};
}

void free_stack(Stack *s) {
	if (s->guarded) {
		size_t page = (size_t)sysconf(_SC_PAGESIZE);
		munmap(s->base - page, s->size + page);
		guards.fetch_sub(1, std::memory_order_relaxed);
		delete s;
		return;
	}
	s->tsan = s->fenced = nullptr; // destroyed by the caller, where there were any
	std::lock_guard<std::mutex> hold(slab_lock);
	s->next = slab_freed;
	slab_freed = s;
}

bool overflowed(const Stack *s) { return !s->guarded && *reinterpret_cast<const unsigned long long *>(s->base) != canary; }

void make_context(Context *c, Stack *s, void (*entry)()) {
#if HX_UCONTEXT
	getcontext(&c->uc);
	c->uc.uc_stack.ss_sp = s->base;
	c->uc.uc_stack.ss_size = s->size;
	c->uc.uc_link = nullptr;
	makecontext(&c->uc, entry, 0);
#else
	uintptr_t *sp = reinterpret_cast<uintptr_t *>(s->base + s->size);
#if defined(__x86_64__)
	*--sp = 0; // ends the walk of debuggers, and makes the stack what it is after a call
	*--sp = 0;
	*--sp = 0;
	*--sp = reinterpret_cast<uintptr_t>(entry);
	for (int i = 0; i < 6; i++) *--sp = 0;
#else
	sp -= 20;
	for (int i = 0; i < 20; i++) sp[i] = 0;
	sp[11] = reinterpret_cast<uintptr_t>(entry); // x30
#endif
	c->sp = sp;
#endif
}

bool resume_from_signal([[maybe_unused]] void *ucontext, [[maybe_unused]] Context *to) {
#if HX_UCONTEXT
	return false;
#else
	ucontext_t *u = static_cast<ucontext_t *>(ucontext);
#if defined(__x86_64__)
	u->uc_mcontext.gregs[REG_RSP] = (greg_t) reinterpret_cast<uintptr_t>(to->sp);
	u->uc_mcontext.gregs[REG_RIP] = (greg_t) reinterpret_cast<uintptr_t>(&hx_shim_resume);
	return true;
#elif defined(__linux__)
	u->uc_mcontext.sp = reinterpret_cast<uintptr_t>(to->sp);
	u->uc_mcontext.pc = reinterpret_cast<uintptr_t>(&hx_shim_resume);
	return true;
#else
	return false;
#endif
#endif
}

} // namespace shim
