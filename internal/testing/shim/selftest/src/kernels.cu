// Kernels that show one property of the shim each. "litmus" ones have two roles, by block or
// lane: who publishes Data by Flag, and who reads Data after it saw Flag.
#include "device.h"
#include "params.h"

using dev::acquire;
using dev::at;
using dev::full_mask;
using dev::relaxed;
using dev::release;

namespace {

HX_DEVICE u64 *data(const TestParams &p, u32 i) { return at<u64>(p.Data, i); }
HX_DEVICE u32 *flag(const TestParams &p, u32 i = 0) { return at<u32>(p.Flag, i); }
HX_DEVICE u64 *out(const TestParams &p, u32 i) { return at<u64>(p.Out, i); }

// Until the flag is up, or a second has gone by.
HX_DEVICE bool up(const u32 *f) {
	i64 end = dev::now_ns() + 1000000000;
	while (dev::ld_acquire_gpu(f) == 0) {
		if (dev::now_ns() > end) return false;
	}
	return true;
}

HX_DEVICE u32 hash(u32 x) {
	x = (x ^ 61) ^ (x >> 16);
	x *= 9;
	x ^= x >> 4;
	x *= 0x27d4eb2d;
	return x ^ (x >> 15);
}

} // namespace

// Sums Data[0 … Count) as u64 of i: every collective, shared memory and an atomic.
HX_KERNEL(t_sum, TestParams) {
	HX_SHARED(u64, part, 32);
	HX_SHARED(u32, votes, 32);
	u32 v = 0;
	for (u32 i = dev::bid() * dev::threads() + dev::tid(); i < p.Count; i += dev::blocks() * dev::threads()) v += i;
	u32 warp_sum = dev::reduce_add(full_mask, v);
	u32 tree = v;
	for (u32 d = 16; d > 0; d /= 2) tree += dev::shfl(full_mask, tree, dev::lane() ^ d);
	bool same = dev::all(full_mask, tree == warp_sum);
	u64 wide = dev::shfl(full_mask, (u64)warp_sum << 32 | dev::lane(), 7);
	bool right = same && wide == ((u64)warp_sum << 32 | 7) && dev::ballot(full_mask, dev::lane() % 3 == 0) == 0x49249249u &&
	             dev::any(full_mask, dev::lane() == 31) && !dev::any(full_mask, false) && dev::shfl(full_mask, (i32)-5, 3) == -5;
	// Halves of a warp on their own ways.
	if (dev::lane() < 16)
		right = right && dev::shfl(0xffffu, dev::lane(), 3) == 3;
	else
		right = right && dev::ballot(0xffff0000u, true) == 0xffff0000u;
	dev::syncwarp();
	if (dev::lane() == 0) {
		part[dev::tid() / 32] = warp_sum;
		dev::st(&votes[dev::tid() / 32], right ? 1u : 0u);
	}
	dev::syncthreads();
	if (dev::tid() == 0) {
		u64 sum = 0;
		u32 rights = 0;
		for (u32 w = 0; w < dev::threads() / 32; w++) {
			sum += part[w];
			rights += votes[w];
		}
		dev::add_gpu<relaxed>(out(p, 0), sum);
		if (rights == dev::threads() / 32) dev::add_gpu<relaxed>(out(p, 1), (u64)1);
	}
}

HX_KERNEL(t_nop, TestParams) {}

HX_KERNEL(t_collectives, TestParams) {
	for (u32 i = 0; i < p.Count; i++) dev::syncwarp();
}

// Every operation on every type of ptx.h, against what it is defined to do.
template <typename T> HX_DEVICE u32 atoms(T *w) {
	u32 bad = 0;
	dev::st_relaxed_gpu(w, (T)40);
	bad += dev::ld_relaxed_sys(w) != 40;
	bad += dev::add_gpu<relaxed>(w, (T)2) != 40;
	bad += dev::add_sys<release>(w, (T)-2) != 42;
	bad += dev::or_gpu<dev::acq_rel>(w, (T)3) != 40;
	bad += dev::and_sys<acquire>(w, (T)0xf) != 43;
	bad += dev::min_gpu<relaxed>(w, (T)5) != 11;
	bad += dev::min_sys<relaxed>(w, (T)~(T)0) != 5;
	bad += dev::max_gpu<relaxed>(w, (T)9) != 5;
	bad += dev::max_sys<acquire>(w, (T)1) != 9;
	bad += dev::exch_gpu<dev::acq_rel>(w, (T)100) != 9;
	bad += dev::exch_sys<relaxed>(w, (T)200) != 100;
	bad += dev::cas_gpu<acquire>(w, (T)7, (T)1) != 200;
	bad += dev::cas_sys<dev::acq_rel>(w, (T)200, (T)77) != 200;
	bad += dev::ld_acquire_gpu(w) != 77;
	dev::st_release_sys(w, (T)78);
	bad += dev::ld_acquire_sys(w) != 78 || dev::ld(w) != 78;
	return bad;
}
HX_KERNEL(t_atoms, TestParams) {
	u32 bad = 0;
	u32 t = dev::tid();
	bad += atoms(reinterpret_cast<u32 *>(out(p, 100 + t)));
	bad += atoms(out(p, 200 + t));
	i64 *s = reinterpret_cast<i64 *>(out(p, 300 + t));
	dev::st_release_gpu(s, (i64)-9);
	bad += dev::max_gpu<relaxed>(s, (i64)-4) != -9 || dev::max_sys<relaxed>(s, (i64)-100) != -4;
	bad += dev::ld_acquire_sys(s) != -4 || dev::ld_relaxed_gpu(s) != -4;
	u32x4 *q = reinterpret_cast<u32x4 *>(out(p, 400 + 2 * t));
	dev::st16(q, u32x4{1, 2, 3, t});
	u32x4 r = dev::ld16(q);
	bad += r.x != 1 || r.y != 2 || r.z != 3 || r.w != t;
	bad += dev::popc(0xf0u) != 4 || dev::popc((u64)0xf0f0 << 32) != 8 || dev::ctz(8u) != 3 || dev::ctz((u64)1 << 40) != 40;
	bad += dev::mulhi(0x80000000u, 6u) != 3 || dev::mulhi((u64)1 << 63, (u64)10) != 5;
	if (bad != 0) dev::add_gpu<relaxed>(out(p, 0), (u64)bad);
}

// Message passing. The variants differ in the order between Data and Flag.
enum { mp_nothing, mp_fence, mp_release, mp_fence_too_early, mp_fence_rmw };
template <int How> HX_DEVICE void message(const TestParams &p) {
	if (dev::tid() != 0) return;
	if (dev::bid() == 0) {
		if (How == mp_fence_too_early) dev::fence_gpu();
		dev::st(data(p, 0), (u64)1);
		if (How == mp_fence || How == mp_fence_rmw) dev::fence_gpu();
		if (How == mp_release)
			dev::st_release_gpu(flag(p), 1u);
		else if (How == mp_fence_rmw)
			dev::add_gpu<relaxed>(flag(p), 1u);
		else
			dev::st_relaxed_gpu(flag(p), 1u);
	} else if (up(flag(p))) {
		dev::add_gpu<relaxed>(out(p, dev::ld(data(p, 0)) == 1 ? 0 : 1), (u64)1);
	}
}
HX_KERNEL(t_mp_nothing, TestParams) { message<mp_nothing>(p); }
HX_KERNEL(t_mp_fence, TestParams) { message<mp_fence>(p); }
HX_KERNEL(t_mp_fence_rmw, TestParams) { message<mp_fence_rmw>(p); }
HX_KERNEL(t_mp_release, TestParams) { message<mp_release>(p); }
HX_KERNEL(t_mp_fence_too_early, TestParams) { message<mp_fence_too_early>(p); }

// The reader's half: relaxed load, with or without a fence behind it.
template <bool Fence> HX_DEVICE void relaxed_reader(const TestParams &p) {
	if (dev::tid() != 0) return;
	if (dev::bid() == 0) {
		dev::st(data(p, 0), (u64)1);
		dev::st_release_gpu(flag(p), 1u);
		return;
	}
	i64 end = dev::now_ns() + 1000000000;
	while (dev::ld_relaxed_gpu(flag(p)) == 0 && dev::now_ns() < end) dev::pause(50);
	if (Fence) dev::fence_gpu();
	dev::st(out(p, 0), dev::ld(data(p, 0)));
}
HX_KERNEL(t_relaxed_reader, TestParams) { relaxed_reader<false>(p); }
HX_KERNEL(t_relaxed_reader_fence, TestParams) { relaxed_reader<true>(p); }

// One lane's fence covers the warp's (or block's) stores that a barrier put before it, and no others.
enum { join_nothing, join_warp, join_block, join_shfl };
template <int How> HX_DEVICE void cumulative(const TestParams &p) {
	if (dev::bid() == 0) {
		dev::st(data(p, dev::tid()), (u64)1);
		if (How == join_warp) dev::syncwarp();
		if (How == join_block) dev::syncthreads();
		if (How == join_shfl) dev::shfl(full_mask, 1u, 0);
		if (dev::tid() == 0) {
			dev::fence_gpu();
			dev::st_relaxed_gpu(flag(p), 1u);
		}
	} else if (dev::tid() == 0 && up(flag(p))) {
		u64 seen = 0;
		for (u32 i = 0; i < dev::threads(); i++) seen += dev::ld(data(p, i));
		dev::add_gpu<relaxed>(out(p, seen == dev::threads() ? 0 : 1), (u64)1);
	}
}
HX_KERNEL(t_join_nothing, TestParams) { cumulative<join_nothing>(p); }
HX_KERNEL(t_join_warp, TestParams) { cumulative<join_warp>(p); }
HX_KERNEL(t_join_block, TestParams) { cumulative<join_block>(p); }
HX_KERNEL(t_join_shfl, TestParams) { cumulative<join_shfl>(p); }

// Data through a barrier inside a block; without it the neighbour's value may be old.
enum { near_nothing, near_warp, near_block };
template <int How> HX_DEVICE void neighbour(const TestParams &p) {
	u32 t = dev::tid();
	for (u32 i = 0; i < p.Count; i++) {
		dev::st(data(p, t), (u64)(i + 1));
		if (How == near_warp) dev::syncwarp();
		if (How == near_block) dev::syncthreads();
		u64 v = dev::ld(data(p, How == near_block ? (t + 1) % dev::threads() : t ^ 1));
		if (v != i + 1) dev::add_gpu<relaxed>(out(p, 1), (u64)1);
		if (How == near_warp) dev::syncwarp();
		if (How == near_block) dev::syncthreads();
	}
}
HX_KERNEL(t_near_nothing, TestParams) { neighbour<near_nothing>(p); }
HX_KERNEL(t_near_warp, TestParams) { neighbour<near_warp>(p); }
HX_KERNEL(t_near_block, TestParams) { neighbour<near_block>(p); }

// Stores to one word are seen in their order, and in the order that barriers give them.
HX_KERNEL(t_one_word, TestParams) {
	if (dev::bid() == 0) {
		for (u32 i = 0; i < p.Count; i++) {
			if (dev::lane() == i % 32) {
				u64 v = dev::ld(data(p, 0));
				if (v != i) dev::add_gpu<relaxed>(out(p, 1), (u64)1);
				if (i % 3 == 2)
					dev::add_gpu<relaxed>(data(p, 0), (u64)1);
				else
					dev::st(data(p, 0), v + 1);
			}
			dev::syncwarp();
		}
	} else if (dev::tid() == 0) {
		u64 last = 0;
		for (u32 i = 0; i < p.Count; i++) {
			u64 v = dev::ld_relaxed_gpu(data(p, 0));
			if (v < last) dev::add_gpu<relaxed>(out(p, 1), (u64)1);
			last = v;
		}
	}
}

// A thread sees its own stores, whatever their sizes and overlaps. 32 bytes for each thread.
HX_KERNEL(t_overlap, TestParams) {
	alignas(16) u8 want[32] = {};
	u64 base = p.Out + 1024 + dev::tid() * 32;
	u32 r = hash(p.Seed * 977 + dev::tid() + 1);
	for (u32 i = 0; i < p.Count; i++) {
		r = hash(r + i);
		u32 log = r % 5, size = 1u << log, off = (r >> 8) % (32 / size) * size;
		u64 v = (u64)hash(r ^ 7) << 32 | hash(r ^ 9);
		u32 what = (r >> 16) % 8;
		auto put = [&](u64 bits, u32 n) {
			for (u32 k = 0; k < n; k++) want[off + k] = (u8)(bits >> 8 * (k % 8));
		};
		u64 have = 0, mine = 0;
		if (what == 0 && log == 2) {
			u32 old = dev::add_gpu<relaxed>(at<u32>(base + off), (u32)v);
			for (u32 k = 0; k < 4; k++) mine |= (u64)want[off + k] << 8 * k;
			have = old;
			put((u32)(old + (u32)v), 4);
		} else if (what == 1 && log == 3) {
			have = dev::exch_gpu<relaxed>(at<u64>(base + off), v);
			for (u32 k = 0; k < 8; k++) mine |= (u64)want[off + k] << 8 * k;
			put(v, 8);
		} else if (what < 4) {
			if (log == 0) have = dev::ld(at<u8>(base + off));
			if (log == 1) have = dev::ld(at<u16>(base + off));
			if (log == 2) have = dev::ld(at<u32>(base + off));
			if (log == 3) have = dev::ld(at<u64>(base + off));
			if (log == 4) {
				u32x4 q = dev::ld16(at<u32x4>(base + off));
				have = (u64)q.y << 32 | q.z;
				for (u32 k = 0; k < 4; k++) mine |= (u64)want[off + 8 + k] << 8 * k | (u64)want[off + 4 + k] << (32 + 8 * k);
			} else {
				for (u32 k = 0; k < size; k++) mine |= (u64)want[off + k] << 8 * k;
			}
		} else {
			if (log == 0) dev::st(at<u8>(base + off), (u8)v);
			if (log == 1) dev::st(at<u16>(base + off), (u16)v);
			if (log == 2) dev::st(at<u32>(base + off), (u32)v);
			if (log == 3) dev::st(at<u64>(base + off), v);
			if (log == 4) dev::st16(at<u32x4>(base + off), u32x4{(u32)v, (u32)(v >> 32), (u32)v, (u32)(v >> 32)});
			put(v, size);
		}
		if (have != mine) dev::add_gpu<relaxed>(out(p, 1), (u64)1);
		if (i % 16 == 15) dev::syncwarp();
	}
	// And memory has them all at the end: the host compares with this copy.
	for (u32 k = 0; k < 32; k++) dev::st(at<u8>(p.Out + 4096 + dev::tid() * 32 + k), want[k]);
}

// Two grids that wait for each other.
HX_KERNEL(t_ping, TestParams) {
	if (dev::tid() != 0) return;
	i64 end = dev::now_ns() + 20000000000;
	for (u32 i = 1; i <= p.Count; i++) {
		dev::st_release_sys(flag(p, p.Seed), i);
		while (dev::ld_acquire_sys(flag(p, 1 - p.Seed)) < i) {
			if (dev::now_ns() > end) return;
			dev::pause(100);
		}
	}
	dev::add_gpu<relaxed>(out(p, 0), (u64)1);
}

// Waits without pause for another thread of the block.
HX_KERNEL(t_spin, TestParams) {
	if (dev::tid() == dev::threads() - 1) dev::st_release_gpu(flag(p), 1u);
	if (dev::tid() == 0 && !up(flag(p))) dev::add_gpu<relaxed>(out(p, 1), (u64)1);
	dev::syncthreads();
}

HX_KERNEL(t_sleep, TestParams) {
	i64 begin = dev::now_ns();
	for (u32 i = 0; i < p.Count; i++) dev::pause(1000000);
	if (dev::tid() == 0) dev::st(out(p, 0), (u64)(dev::now_ns() - begin));
}

// The order in which lanes come by: what a schedule is.
HX_KERNEL(t_trace, TestParams) {
	for (u32 i = 0; i < 4; i++) {
		u32 n = dev::add_gpu<relaxed>(flag(p), 1u);
		dev::st(out(p, n), (u64)(dev::bid() * dev::threads() + dev::tid()));
	}
}

HX_KERNEL(t_doorbell, TestParams) {
	if (dev::tid() != 0) return;
	dev::st(data(p, 0), (u64)42);
	if (p.Count != 0) dev::fence_sys();
	dev::ring(flag(p), 1);
}

// Each lane's own locals, by address: stacks that are used again are no race.
HX_KERNEL(t_locals, TestParams) {
	volatile u64 local[16];
	for (u32 i = 0; i < 16; i++) local[i] = dev::tid() * i;
	dev::syncwarp();
	u64 sum = 0;
	for (u32 i = 0; i < 16; i++) sum += local[i];
	if (sum != dev::tid() * 120) dev::add_gpu<relaxed>(out(p, 1), (u64)1);
}

HX_KERNEL(t_same_word, TestParams) { dev::st(data(p, 0), (u64)dev::tid()); }

// A word that a thread writes both ways is no race with itself.
HX_KERNEL(t_own_word, TestParams) {
	dev::st(data(p, dev::tid()), (u64)1);
	dev::fence_gpu();
	dev::st_relaxed_gpu(data(p, dev::tid()), (u64)2);
	dev::st(data(p, dev::tid()), (u64)3);
	dev::st_relaxed_gpu(data(p, dev::tid()), (u64)4);
	dev::add_gpu<relaxed>(data(p, dev::tid()), (u64)1);
	if (dev::ld(data(p, dev::tid())) != 5) dev::add_gpu<relaxed>(out(p, 1), (u64)1);
}

// Mistakes

HX_KERNEL(e_not_in_mask, TestParams) { dev::ballot(0xff, true); }
HX_KERNEL(e_masks_differ, TestParams) { dev::syncwarp(dev::lane() < 7 ? 0x00ffu : 0xffffu); }
HX_KERNEL(e_ops_differ, TestParams) {
	if (dev::lane() == 9)
		dev::syncwarp();
	else
		dev::ballot(full_mask, true);
}
HX_KERNEL(e_lane_left, TestParams) {
	if (dev::lane() == 3) return;
	dev::syncwarp();
}
HX_KERNEL(e_lane_leaves, TestParams) {
	if (dev::lane() != 31) dev::syncwarp();
}
HX_KERNEL(e_barrier_left, TestParams) {
	if (dev::tid() == 40) return;
	dev::syncthreads();
}
HX_KERNEL(e_barrier_leaves, TestParams) {
	if (dev::tid() < 60) dev::syncthreads();
}
HX_KERNEL(e_divergent, TestParams) {
	if (dev::lane() < 16)
		dev::syncthreads();
	else
		dev::syncwarp();
}
HX_KERNEL(e_circle, TestParams) { // 0 waits for 1, 1 for 2, 2 for 0
	if (dev::lane() < 3) dev::syncwarp(1u << dev::lane() | 1u << (dev::lane() + 1) % 3);
}
HX_KERNEL(e_shfl_outside, TestParams) {
	if (dev::lane() < 16) dev::shfl(0xffff, 1u, 20);
}
HX_KERNEL(e_reduce_half, TestParams) {
	if (dev::lane() < 16) dev::reduce_add(0xffff, 1u);
}
HX_KERNEL(e_null, TestParams) {
	if (dev::tid() == 5) dev::st(at<u32>(16 + p.Count), 1u);
}
HX_KERNEL(e_misaligned, TestParams) {
	if (dev::tid() == 6) dev::ld(at<u64>(p.Data + 4));
}
namespace {
__attribute__((noinline)) u32 deep(u32 n) {
	volatile char frame[512];
	frame[n % 512] = (char)n;
	return n == 0 ? 0 : deep(n - 1) + (u32)frame[n % 512];
}
} // namespace
HX_KERNEL(e_deep, TestParams) { dev::st(out(p, 0), (u64)deep(p.Count)); }
HX_KERNEL(e_shared, TestParams) {
	HX_SHARED(u64, big, 8000);
	big[dev::tid()] = 1;
}
HX_KERNEL(e_hang, TestParams) {
	while (dev::ld_acquire_gpu(flag(p)) == 0) dev::pause(100);
}
