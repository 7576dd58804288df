// sample_begin, sample_count, sample_fill: draws in-neighbours of the frontier. Reference:
// graph/kernels.go, to the bit (table slots aside), for any grid and any block of whole warps.
//
// In: a topology in compressed sparse column form (Indptr, Indices of 32 or 64 bits; CPU memory read
// over UVA), destinations Dst[0 … NumDst-1] (the frontier Nodes, or, of a typed graph's relation, those
// of one type by their numbers in it), Fanout (-1: all). Out: EdgeStart[0 … NumDst] and the
// edges' table slots in Src, which unique_relabel turns into frontier indices. The relations of a typed
// graph are counted and filled one launch after the other: Before has the edges of those before.
//
//   sample_begin  enters the frontier into the position table (table.h); degrees when asked for.
//   sample_count  edges per destination, as a running sum within the block's share, and the share's
//                 total in Sums[block].
//   sample_fill   adds the sums of the blocks before, draws, and notes each edge's node in the table at
//                 position Frontier + edge. Same grid as sample_count: the shares must be the same.
//
// sample_fill takes as many destinations at a time as the block has threads. First a thread per
// destination: Floyd's draws (Bentley and Floyd, "A sample of brilliance", CACM 30(9), 1987) into the
// destination's part of Src: for j = d-k … d-1 draw t in [0, j], take t, or j when t is taken. Draw i
// is half i&1 of Philox block i>>1 under counter (node, epoch, hop<<24 | block), so it depends on
// nothing else. Looking for duplicates is a search of at most 24 earlier draws, and beyond that of those that
// pass a 2048-bit filter (256 bytes of local memory). Then the whole block shares the edges of all
// these destinations, one per thread and step: it finds the destination by bisection in shared memory,
// reads the neighbour and enters it. So a hub does not hold a warp up, and the reads over PCIe, whose
// latency decides, are as many in flight as there are threads; neighbours of nodes that are taken
// whole are read in whole lines.
//
// Memory order: a destination's draws and shared offsets pass to the block's threads by
// syncthreads. Table entries are relaxed atomics; what they say is read by later launches.
//
// Bytes per edge: 32 over PCIe where drawn (a sector for 4 or 8 bytes), the table's sector read and
// written (2×32, random), 3×4 of Src; per destination 24 over PCIe. At 25 GB/s of PCIe about 0.7 G
// edges a second. Not measured: no GPU was at hand.
#include "abi_data.h"
#include "device.h"
#include "philox.h"
#include "scan.h"
#include "table.h"

namespace {

constexpr u64 drawn = (u64)1 << 63; // in first[]: the destination's Src holds draws

HX_DEVICE inline i64 edges_of(const SampleParams &p, i64 degree) {
	return p.Fanout >= 0 && degree > p.Fanout ? p.Fanout : degree;
}

HX_DEVICE inline bool contains(const u32 *out, u32 n, u32 c) {
	for (u32 i = 0; i < n; i++) {
		if (dev::ld(&out[i]) == c) return true;
	}
	return false;
}

// Fills out with k of 0 … d-1 in draw order, k < d < 2^32.
HX_DEVICE inline void floyd(const SampleParams &p, u32 *out, u32 k, u64 d, u64 v) {
	alignas(16) u32 filter[64];
	bool filtered = k > 24;
	if (filtered) {
		u32 zero = k >> 31; // a constant would make it a memset, for which clang stores bytes
#pragma GCC unroll 16
		for (u32 i = 0; i < 64; i++) filter[i] = zero;
	}
	PhiloxBlock w = {};
	for (u32 i = 0; i < k; i++) {
		if (i % 2 == 0) w = philox(p.Key, (u32)v, (u32)(v >> 32), p.Epoch, p.Hop << 24 | i >> 1);
		u64 r = i % 2 == 0 ? (u64)w.w[1] << 32 | w.w[0] : (u64)w.w[3] << 32 | w.w[2];
		u64 j = d - k + i;
		u32 c = (u32)philox_bounded(r, j + 1);
		if (filtered) {
			u32 f = c * 0x9E3779B1u >> 21;
			if (filter[f / 32] >> f % 32 & 1 && contains(out, i, c)) {
				c = (u32)j;
				f = c * 0x9E3779B1u >> 21;
			}
			filter[f / 32] |= 1u << f % 32;
		} else if (contains(out, i, c)) {
			c = (u32)j;
		}
		dev::st(&out[i], c);
	}
}

} // namespace

HX_KERNEL(sample_begin, SampleParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.NumDst);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		i64 v = dev::ld(dev::at<i64>(p.Nodes, i));
		if ((u64)v >= (u64)p.NumNodes) {
			dev::fail(hx, 1, (u64)v, (u64)(p.NumNodes - 1));
			continue;
		}
		u64 slot = table_slot(p, (u64)v);
		if (slot == noSlot) {
			dev::fail(hx, 3, (u64)p.Slots);
			continue;
		}
		table_lower(p, slot, (u64)i);
		if (p.Degrees != 0) dev::st(dev::at<u32>(p.Degrees, i), (u32)neighbours(p, hx, v).degree);
	}
}

HX_KERNEL(sample_count, SampleParams) {
	HX_SHARED(i64, sums, 32);
	if (dev::dropped(hx)) return;
	Share s = block_share(p.NumDst);
	i64 sum = 0;
	for (i64 base = s.lo; base < s.hi; base += dev::threads()) {
		i64 i = base + dev::tid(), own = 0, total;
		if (i < s.hi) own = edges_of(p, neighbours(p, hx, dev::ld(dev::at<i64>(p.Dst, i))).degree);
		i64 to = sum + block_scan(sums, own, &total);
		if (i < s.hi) dev::st(dev::at<i64>(p.EdgeStart, i), to);
		sum += total;
	}
	if (dev::tid() == 0) dev::st(dev::at<i64>(p.Sums, dev::bid()), sum);
}

HX_KERNEL(sample_fill, SampleParams) {
	HX_SHARED(i64, sums, 32);
	HX_SHARED(u64, first, 1024); // of the tile's destinations: their row in Indices, and drawn
	HX_SHARED(u32, start, 1025); // and the first edge; the last entry is the end
	if (dev::dropped(hx)) return;
	u32 threads = dev::threads(), tid = dev::tid();
	i64 base, end;
	if (!block_edges(p, hx, sums, &base, &end)) return;
	Share s = block_share(p.NumDst);
	for (i64 tile = s.lo; tile < s.hi; tile += threads) {
		u32 n = s.hi - tile < threads ? (u32)(s.hi - tile) : threads;
		dev::syncthreads(); // the last tile's edges are done with first and start
		if (tid < n) {
			i64 v = dev::ld(dev::at<i64>(p.Dst, tile + tid));
			Neighbours row = neighbours(p, hx, v);
			i64 k = edges_of(p, row.degree);
			// The share's first offset may be another launch's end by now.
			i64 e = base + (tile + tid == s.lo ? 0 : dev::ld(dev::at<i64>(p.EdgeStart, tile + tid)));
			dev::st(dev::at<i64>(p.EdgeStart, tile + tid), e);
			bool draws = k < row.degree;
			dev::st(&first[tid], (u64)row.first | (draws ? drawn : 0));
			dev::st(&start[tid], (u32)e);
			if (tid == n - 1) dev::st(&start[n], (u32)(e + k));
			if (draws) floyd(p, dev::at<u32>(p.Src, e), (u32)k, (u64)row.degree, (u64)v);
		}
		dev::syncthreads();
		for (u64 e = (u64)dev::ld(&start[0]) + tid; e < dev::ld(&start[n]); e += threads) {
			u32 lo = list_of(start, n, e);
			u64 row = dev::ld(&first[lo]);
			u32 *out = dev::at<u32>(p.Src, (i64)e);
			u64 which = row & drawn ? dev::ld(out) : e - dev::ld(&start[lo]);
			i64 at = (i64)((row & ~drawn) + which);
			u64 id = neighbour_id(p, at);
			if (id >= (u64)p.Sources) {
				dev::fail(hx, 5, id, (u64)at, (u64)(p.Sources - 1));
				continue;
			}
			u64 slot = table_slot(p, id + (u64)p.Base);
			if (slot == noSlot) {
				dev::fail(hx, 3, (u64)p.Slots);
				continue;
			}
			dev::st(out, (u32)slot);
			table_lower(p, slot, (u64)(p.Frontier + (i64)e));
		}
	}
}

// Degrees[i] = Table[Nodes[i]]: in-degrees without a node's edges to itself (graph/loopless.go). A thread for each node; 16 bytes of it.
HX_KERNEL(sample_loopless, LooplessParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.Count);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		i64 v = dev::ld(dev::at<i64>(p.Nodes, i));
		if ((u64)v >= (u64)p.NumNodes) {
			dev::fail(hx, 1, (u64)v, (u64)(p.NumNodes - 1));
			continue;
		}
		dev::st(dev::at<u32>(p.Degrees, i), dev::ld(dev::at<u32>(p.Table, v)));
	}
}
