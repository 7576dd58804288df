// The store buffer: a thread's held stores, its block's, and memory.
#include "internal.h"

namespace shim {

static bool overlap(const Held &h, u64 addr, u32 size) { return h.addr < addr + size && addr < h.addr + h.size; }

static void write_memory(u64 addr, u32 size, const unsigned char *bytes) {
	typedef u16 __attribute__((may_alias)) a16;
	typedef u32 __attribute__((may_alias)) a32;
	typedef u64 __attribute__((may_alias)) a64;
	switch (size) {
	case 1: __atomic_store_n(reinterpret_cast<unsigned char *>(addr), bytes[0], __ATOMIC_RELAXED); break;
	case 2: __atomic_store_n(reinterpret_cast<a16 *>(addr), *reinterpret_cast<const a16 *>(bytes), __ATOMIC_RELAXED); break;
	case 4: __atomic_store_n(reinterpret_cast<a32 *>(addr), *reinterpret_cast<const a32 *>(bytes), __ATOMIC_RELAXED); break;
	case 8: __atomic_store_n(reinterpret_cast<a64 *>(addr), *reinterpret_cast<const a64 *>(bytes), __ATOMIC_RELAXED); break;
	default:
		for (u32 i = 0; i < size; i += 8) write_memory(addr + i, 8, bytes + i);
	}
}

static void read_memory(u64 addr, u32 size, unsigned char *bytes) {
	typedef u16 __attribute__((may_alias)) a16;
	typedef u32 __attribute__((may_alias)) a32;
	typedef u64 __attribute__((may_alias)) a64;
	switch (size) {
	case 1: bytes[0] = __atomic_load_n(reinterpret_cast<unsigned char *>(addr), __ATOMIC_RELAXED); break;
	case 2: *reinterpret_cast<a16 *>(bytes) = __atomic_load_n(reinterpret_cast<a16 *>(addr), __ATOMIC_RELAXED); break;
	case 4: *reinterpret_cast<a32 *>(bytes) = __atomic_load_n(reinterpret_cast<a32 *>(addr), __ATOMIC_RELAXED); break;
	case 8: *reinterpret_cast<a64 *>(bytes) = __atomic_load_n(reinterpret_cast<a64 *>(addr), __ATOMIC_RELAXED); break;
	default:
		for (u32 i = 0; i < size; i += 8) read_memory(addr + i, 8, bytes + i);
	}
}

// Copies are written out: the library's memcpy is watched by ThreadSanitizer.
static void copy(Held *to, const Held *from) {
	to->addr = from->addr;
	to->size = from->size;
	to->leaving = from->leaving;
	for (u32 i = 0; i < sizeof to->bytes; i += 8) {
		*reinterpret_cast<u64 __attribute__((may_alias)) *>(to->bytes + i) =
		    *reinterpret_cast<const u64 __attribute__((may_alias)) *>(from->bytes + i);
	}
}

static void remove(Buffer *b, u32 at) {
	for (u32 i = at + 1; i < b->count; i++) copy(&b->held[i - 1], &b->held[i]);
	b->count--;
}

// A random held store that no older one to the same bytes must go before.
static u32 any_first(const Buffer *b, Rng &rng) {
	u32 at = rng.below(b->count);
	for (u32 i = at; i-- > 0;) {
		if (overlap(b->held[i], b->held[at].addr, b->held[at].size)) at = i;
	}
	return at;
}

static void to_memory(Buffer *b, u32 at) {
	write_memory(b->held[at].addr, b->held[at].size, b->held[at].bytes);
	remove(b, at);
}

static bool is_shared(const Block *b, u64 addr) {
	u64 base = reinterpret_cast<u64>(b->shared.data());
	return addr - base < b->shared.size();
}

// The block sees it from now on. Its shared memory is where that happens.
static void to_block(Block *b, const Held *h, Rng &rng) {
	if (is_shared(b, h->addr)) {
		write_memory(h->addr, h->size, h->bytes);
		return;
	}
	if (b->buffer.count == b->buffer.capacity) to_memory(&b->buffer, any_first(&b->buffer, rng));
	Held *to = &b->buffer.held[b->buffer.count++];
	copy(to, h);
	to->leaving = false;
}

static void clean(Block *b, Fiber *f) {
	if (f->buffer.count != 0 || b->dirty_at[f->tid] == ~0u) return;
	u32 at = b->dirty_at[f->tid];
	u32 last = b->dirty.back();
	b->dirty[at] = last;
	b->dirty_at[last] = at;
	b->dirty.pop_back();
	b->dirty_at[f->tid] = ~0u;
}

static void share(Block *b, Fiber *f) {
	if (f->buffer.count == 0) return;
	for (u32 i = 0; i < f->buffer.count; i++) to_block(b, &f->buffer.held[i], exec->rng);
	f->buffer.count = 0;
	clean(b, f);
}

void share_lanes(Block *b, Fiber *first, u32 mask) {
	for (u32 l = 0; l < warp_size; l++) {
		if (mask >> l & 1) share(b, first + l);
	}
}

void share_all(Block *b) {
	while (!b->dirty.empty()) share(b, &b->fibers[b->dirty.back()]);
}

void drain_some(Block *b, Rng &rng) {
	u32 sources = (u32)b->dirty.size() + (b->buffer.count != 0);
	if (sources == 0) return;
	u32 s = rng.below(sources);
	if (s == b->dirty.size()) {
		to_memory(&b->buffer, any_first(&b->buffer, rng));
		return;
	}
	Fiber *f = &b->fibers[b->dirty[s]];
	u32 at = any_first(&f->buffer, rng);
	to_block(b, &f->buffer.held[at], rng);
	remove(&f->buffer, at);
	clean(b, f);
}

void drain_block(Block *b) {
	while (b->pending()) drain_some(b, exec->rng);
}

static void overlay(const Buffer *b, u64 addr, u32 size, unsigned char *value) {
	for (u32 i = 0; i < b->count; i++) {
		const Held &h = b->held[i];
		if (!overlap(h, addr, size)) continue;
		for (u32 k = 0; k < h.size; k++) {
			u64 at = h.addr + k - addr;
			if (at < size) value[at] = h.bytes[k];
		}
	}
}

void merge(const void *p, u32 size, void *value) {
	Fiber *f = current();
	u64 addr = reinterpret_cast<u64>(p);
	if (f->block->buffer.count != 0) overlay(&f->block->buffer, addr, size, static_cast<unsigned char *>(value));
	if (f->buffer.count != 0) overlay(&f->buffer, addr, size, static_cast<unsigned char *>(value));
}

void load(const void *p, u32 size, void *value) {
	read_memory(reinterpret_cast<u64>(p), size, static_cast<unsigned char *>(value));
	if ((self->hooks & hook_buffer) != 0) merge(p, size, value);
}

void hold(void *p, u32 size, const void *value) {
	Fiber *f = current();
	u64 addr = reinterpret_cast<u64>(p);
	const unsigned char *bytes = static_cast<const unsigned char *>(value);
	if ((f->hooks & hook_buffer) == 0) {
		write_memory(addr, size, bytes);
		return;
	}
	// A bad address is this thread's fault now, not the one's who drains it later.
	(void)*static_cast<volatile char *>(p);
	Block *b = f->block;
	if (f->buffer.count == f->buffer.capacity) {
		u32 at = any_first(&f->buffer, exec->rng);
		to_block(b, &f->buffer.held[at], exec->rng);
		remove(&f->buffer, at);
	}
	Held *h = &f->buffer.held[f->buffer.count++];
	h->addr = addr;
	h->size = size;
	h->leaving = false;
	for (u32 i = 0; i < size; i++) h->bytes[i] = bytes[i];
	if (b->dirty_at[f->tid] == ~0u) {
		b->dirty_at[f->tid] = (u32)b->dirty.size();
		b->dirty.push_back(f->tid);
	}
}

// Marks what has to go so that nothing older than it stays behind: the stores to the bytes, and
// those that such a store must not overtake.
static bool mark(Buffer *b, u64 addr, u32 size) {
	bool any = false;
	for (u32 i = b->count; i-- > 0;) {
		Held &h = b->held[i];
		h.leaving = overlap(h, addr, size);
		for (u32 k = i + 1; k < b->count && !h.leaving; k++) {
			h.leaving = b->held[k].leaving && overlap(h, b->held[k].addr, b->held[k].size);
		}
		any |= h.leaving;
	}
	return any;
}

void flush(const void *p, u32 size) {
	Fiber *f = current();
	Block *b = f->block;
	u64 addr = reinterpret_cast<u64>(p);
	if (f->buffer.count != 0 && mark(&f->buffer, addr, size)) {
		for (u32 i = 0; i < f->buffer.count;) {
			if (!f->buffer.held[i].leaving) {
				i++;
				continue;
			}
			to_block(b, &f->buffer.held[i], exec->rng);
			remove(&f->buffer, i);
		}
		clean(b, f);
	}
	if (b->buffer.count != 0 && mark(&b->buffer, addr, size)) {
		for (u32 i = 0; i < b->buffer.count;) {
			if (b->buffer.held[i].leaving)
				to_memory(&b->buffer, i);
			else
				i++;
		}
	}
}

void flush_all() {
	Fiber *f = current();
	Block *b = f->block;
	share(b, f);
	while (b->buffer.count != 0) to_memory(&b->buffer, any_first(&b->buffer, exec->rng));
}

void fence() {
	Fiber *f = current();
	if (--f->budget <= 0) point();
	if ((f->hooks & hook_buffer) != 0) flush_all();
	std::atomic_thread_fence(std::memory_order_acq_rel);
#if HX_RUNTIME_TSAN
	for (u32 i = 0; i < f->seen_count; i++) __tsan_acquire(const_cast<void *>(f->seen[i]));
	f->seen_count = 0;
	if (f->stack->fenced == nullptr) {
		Inside inside;
		f->stack->fenced = __tsan_create_fiber(0);
	}
	f->fenced = true;
	tsan_release_anew(&f->fence_tag);
	tsan_enter(f->stack->fenced);
	tsan_acquire(&f->fence_tag);
	tsan_enter(f->tsan);
#endif
}

void tsan_relaxed_store([[maybe_unused]] void *p) {
#if HX_RUNTIME_TSAN
	// A release by a thread of which ThreadSanitizer knows no more than what the last fence
	// covered; the store itself is the kernel's, relaxed.
	Fiber *f = current();
	if (!f->fenced) return;
	tsan_enter(f->stack->fenced);
	__tsan_release(p);
	tsan_enter(f->tsan);
#endif
}

void tsan_relaxed_load([[maybe_unused]] const void *p) {
#if HX_RUNTIME_TSAN
	// Acquired by the next fence. Should the list run over, the oldest is acquired early.
	Fiber *f = current();
	for (u32 i = 0; i < f->seen_count; i++) {
		if (f->seen[i] == p) return;
	}
	constexpr u32 room = sizeof f->seen / sizeof f->seen[0];
	if (f->seen_count == room) {
		__tsan_acquire(const_cast<void *>(f->seen[0]));
		for (u32 i = 1; i < room; i++) f->seen[i - 1] = f->seen[i];
		f->seen_count--;
	}
	f->seen[f->seen_count++] = p;
#endif
}

} // namespace shim
