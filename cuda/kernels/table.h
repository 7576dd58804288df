// The sampler's position table, as graph/kernels.go has it: "where in the frontier is node v, or
// at which edge of this hop does it first appear?" Entries only fall (atomic minimum), so the
// answer does not depend on the order in which threads come. An entry is Stamp<<32 | position;
// stamps fall from batch to batch, so old entries are larger than new ones and need no clearing.
// With Keys it is a hash table (linear probing, Stamp<<48 | node), without, the slot is the node.
// Which slot a node of a hash table gets depends on who comes first; nothing that is kept does.
#pragma once

#include "abi_data.h"
#include "device.h"
#include "scan.h"

constexpr u64 noSlot = ~(u64)0;

// The slot of node v, made if need be; noSlot when every slot is taken, which the host's load
// bound of 3/4 excludes.
HX_DEVICE inline u64 table_slot(const SampleParams &p, u64 v) {
	if (p.Keys == 0) return v;
	u64 stamp = p.Stamp & 0xffff, want = stamp << 48 | v, mask = (u64)p.Slots - 1;
	u64 s = v * 0x9E3779B97F4A7C15ull >> p.HashShift;
	for (i64 probes = 0; probes < p.Slots; probes++, s = (s + 1) & mask) {
		u64 *key = dev::at<u64>(p.Keys, (i64)s);
		u64 k = dev::ld_relaxed_gpu(key); // litmus: table-claim
		// A key of another stamp counts as empty. Once it has this stamp it stays.
		// litmus: table-claim
		while (k >> 48 != stamp) {
			u64 old = dev::cas_gpu<dev::relaxed>(key, k, want);
			if (old == k) return s;
			k = old;
		}
		if (k == want) return s;
	}
	return noSlot;
}

// The node of a slot; keys do not change while this is used.
HX_DEVICE inline u64 table_node(const SampleParams &p, u64 s) {
	return p.Keys == 0 ? s : dev::ld(dev::at<u64>(p.Keys, (i64)s)) & (((u64)1 << 48) - 1);
}

HX_DEVICE inline void table_lower(const SampleParams &p, u64 s, u64 pos) {
	dev::min_gpu<dev::relaxed>(dev::at<u64>(p.Vals, (i64)s), (u64)p.Stamp << 32 | pos);
}

HX_DEVICE inline u32 table_pos(const SampleParams &p, u64 s) {
	return (u32)dev::ld_relaxed_gpu(dev::at<u64>(p.Vals, (i64)s));
}

// A node's row in the topology; none (degree 0, and the launch fails) for a bad node or offsets
// that are no offsets, so that a damaged topology cannot make a kernel write wildly.
struct Neighbours {
	i64 first, degree;
};

HX_DEVICE inline Neighbours neighbours(const SampleParams &p, const hx_launch &hx, i64 v) {
	if ((u64)v >= (u64)p.NumNodes) {
		dev::fail(hx, 1, (u64)v, (u64)(p.NumNodes - 1));
		return {0, 0};
	}
	i64 first = dev::ld(dev::at<i64>(p.Indptr, v)), end = dev::ld(dev::at<i64>(p.Indptr, v + 1));
	if (first < 0 || end < first || end > p.NumEdges) {
		dev::fail(hx, 2, (u64)v, (u64)first, (u64)end);
		return {0, 0};
	}
	return {first, end - first};
}

// The id at a place of the in-neighbour lists.
HX_DEVICE inline u64 neighbour_id(const SampleParams &p, i64 at) {
	return p.Wide ? dev::ld(dev::at<u64>(p.Indices, at)) : dev::ld(dev::at<u32>(p.Indices, at));
}

// Where the edges of the block's destinations begin and end: after those of the launches and blocks
// before, whose counts are in Before and in Sums. The last block notes the total. False, in all threads, where Src ends before;
// then the launch fails. sums is as for block_sum.
HX_DEVICE inline bool block_edges(const SampleParams &p, const hx_launch &hx, i64 *sums, i64 *base, i64 *end) {
	u32 tid = dev::tid();
	i64 own = 0;
	for (u32 b = tid; b < dev::bid(); b += dev::threads()) own += dev::ld(dev::at<i64>(p.Sums, b));
	*base = block_sum(sums, own);
	if (p.Before != 0) *base += dev::ld(dev::at<i64>(p.Before));
	*end = *base + dev::ld(dev::at<i64>(p.Sums, dev::bid()));
	if (dev::bid() == dev::blocks() - 1 && tid == 0) {
		dev::st(dev::at<i64>(p.EdgeStart, p.NumDst), *end);
		dev::st(dev::at<i64>(p.Totals), *end);
	}
	if (*end <= p.SrcLen) return true;
	if (tid == 0) dev::fail(hx, 4, (u64)*end, (u64)p.SrcLen);
	return false;
}

// The last of n lists that begins at edge e or before (start, in shared memory); of empty ones the last.
template <typename T> HX_DEVICE inline u32 list_of(const T *start, u32 n, u64 e) {
	u32 lo = 0, hi = n;
	while (hi - lo > 1) {
		u32 mid = (lo + hi) / 2;
		if (dev::ld(&start[mid]) <= e) {
			lo = mid;
		} else {
			hi = mid;
		}
	}
	return lo;
}
