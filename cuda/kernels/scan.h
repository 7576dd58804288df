// Shares, ranks and sums that the data kernels have in common. Every function is for whole warps
// (warp_…) or whole blocks (block_…): all their threads must call it.
#pragma once

#include "device.h"

struct Share {
	i64 lo, hi;
};

// Part i of n of the items from..to, as cuda.Block.Range cuts them: sizes differ by one at most.
HX_DEVICE inline Share share_of(Share all, u32 i, u32 n) {
	i64 items = all.hi - all.lo, q, r;
	if ((u64)items >> 32 == 0) { // a 64-bit division is slow on a GPU
		q = (u32)items / n;
		r = (u32)items % n;
	} else {
		q = items / n;
		r = items % n;
	}
	i64 lo = all.lo + i * q + (i < r ? i : r);
	return {lo, lo + q + (i < r ? 1 : 0)};
}

HX_DEVICE inline Share block_share(i64 n) { return share_of({0, n}, dev::bid(), dev::blocks()); }

// Lanes below this one.
HX_DEVICE inline u32 lanes_below() { return (1u << dev::lane()) - 1; }

// The lanes of active (a ballot of the full warp) that have the same value of that many bits: one
// ballot per bit, where match.sync would take as long as there are different values.
HX_DEVICE inline u32 warp_peers(u32 active, u32 v, u32 bits) {
	u32 m = active;
	for (u32 b = 0; b < bits; b++) {
		bool set = v >> b & 1;
		u32 ones = dev::ballot(dev::full_mask, set);
		m &= set ? ones : ~ones;
	}
	return m;
}

// Inclusive sum over the lanes.
template <typename T> HX_DEVICE inline T warp_scan(T v) {
	for (u32 d = 1; d < dev::warp_size; d *= 2) {
		T o = dev::shfl(dev::full_mask, v, (dev::lane() - d) & 31);
		if (dev::lane() >= d) v += o;
	}
	return v;
}

template <typename T> HX_DEVICE inline T warp_sum(T v) {
	for (u32 d = 16; d > 0; d /= 2) v += dev::shfl(dev::full_mask, v, dev::lane() ^ d);
	return v;
}

// Exclusive sum over the block's threads, and their total. sums is shared memory for 32 values; it
// may be used again at once.
template <typename T> HX_DEVICE inline T block_scan(T *sums, T v, T *total) {
	T mine = warp_scan(v);
	u32 w = dev::tid() / 32, n = dev::threads() / 32;
	if (dev::lane() == 31) dev::st(&sums[w], mine);
	dev::syncthreads();
	T before = 0, all = 0;
	for (u32 i = 0; i < n; i++) {
		T s = dev::ld(&sums[i]);
		if (i < w) before += s;
		all += s;
	}
	dev::syncthreads();
	*total = all;
	return before + mine - v;
}

template <typename T> HX_DEVICE inline T block_sum(T *sums, T v) {
	T mine = warp_sum(v);
	if (dev::lane() == 0) dev::st(&sums[dev::tid() / 32], mine);
	dev::syncthreads();
	T all = 0;
	for (u32 i = 0; i < dev::threads() / 32; i++) all += dev::ld(&sums[i]);
	dev::syncthreads();
	return all;
}
