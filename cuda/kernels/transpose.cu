// transpose_count, transpose_scan, transpose_scatter, transpose_ends: for each source of a block the destinations that
// sampled it, in order: what the backward pass gathers. Reference: gnn/kernels.go (transpose), to the bit, for any grid and any
// block of up to 8 warps.
//
// In: E edges in CSC form, Src[e] for destination i, e = Indptr[i] … Indptr[i+1]-1. Out: TDst[E], all sources' lists one after
// the other, TEnd[NumSrc], where each ends, and Weights[NumDst], the destinations' parts of the edges' weights.
//
// The edges are in order of destination, so any stable sort by source makes the lists, each in order. This is a radix sort
// from the lowest digit (after Satish, Harris and Garland, "Designing efficient sorting algorithms for manycore GPUs", IPDPS
// 2009): a hub's list is no longer work than as many short ones, and nothing depends on who comes first.
// (Counting with atomics and a cursor for each source would need the lists sorted after it.) A pass sorts by Bits bits at
// Shift, at most 9: two passes for up to 262144 sources. The edges are cut into Grid shares:
//
//	count     each share: a histogram of the digit in shared memory, to Hist[digit, share]
//	scan      a warp for each digit: how many of the digit are before each share, and in all (Totals)
//	scatter   each share: where each digit begins (a scan of Totals) plus Hist. The warps have contiguous parts,
//	          count them once more (from L1 and L2) and add up the warps before them; then 32 edges at a time find by ballots
//	          how many lanes below have the same digit, and the place of the digit moves on.
//	ends      each source: the first place of a later source in the sorted keys, by binary search
//
// In the first pass the keys are Src, and an edge's destination is found in Indptr by binary search, narrowed to the warp's
// part; later ones carry pairs. The last one writes the values to TDst.
//
// Memory order: shared memory between barriers. The cursors of warp w are its own but for the sums over warps, which stand
// between two barriers; a syncwarp is between its readers and its writer.
// Global memory is handed on by the end of a launch.
//
// Bytes per edge and pass: 4 (count) + 16 (scatter reads and writes a pair) + the sectors of scattered writes, mostly whole
// ones of L2: for 200 000 edges of a step some 8 MB, 10 µs; launches are the greater part. Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "agg.h"
#include "device.h"
#include "scan.h"

namespace {

constexpr u32 mostWarps = 8;

HX_DEVICE inline u32 digit_of(const TransposeParams &p, u32 key) { return key >> p.Shift & ((1u << p.Bits) - 1); }

// The number of elements of v[lo … hi-1], which rise, that are at most x, plus lo.
template <typename T> HX_DEVICE inline i64 upper(u64 v, i64 lo, i64 hi, T x) {
	while (lo < hi) {
		i64 mid = (i64)(((u64)lo + (u64)hi) / 2);
		if (dev::ld(dev::at<T>(v, mid)) <= x) {
			lo = mid + 1;
		} else {
			hi = mid;
		}
	}
	return lo;
}

HX_DEVICE inline Share share(const TransposeParams &p, u32 g) { return share_of({0, p.Agg.Edges}, g, p.Grid); }

} // namespace

HX_THREADS(transpose_count, TransposeParams, 256)
HX_KERNEL(transpose_count, TransposeParams) {
	HX_SHARED(u32, bins, radixBins);
	if (dev::dropped(hx)) return;
	u32 digits = 1u << p.Bits;
	for (u32 g = dev::bid(); g < p.Grid; g += dev::blocks()) {
		for (u32 d = dev::tid(); d < digits; d += dev::threads()) dev::st(&bins[d], 0u);
		dev::syncthreads();
		Share s = share(p, g);
		for (i64 e = s.lo + dev::tid(); e < s.hi; e += dev::threads()) {
			dev::add_shared(&bins[digit_of(p, dev::ld(dev::at<u32>(p.KeysIn, e)))], 1u);
		}
		dev::syncthreads();
		for (u32 d = dev::tid(); d < digits; d += dev::threads()) {
			dev::st(dev::at<u32>(p.Hist, (i64)d * p.Grid + g), dev::ld(&bins[d]));
		}
		dev::syncthreads(); // bins are read before the next share's
	}
}

HX_THREADS(transpose_scan, TransposeParams, 256)
HX_KERNEL(transpose_scan, TransposeParams) {
	if (dev::dropped(hx)) return;
	for (u32 d = dev::warp(); d < 1u << p.Bits; d += dev::warps()) {
		u32 before = 0;
		for (u32 base = 0; base < p.Grid; base += 32) {
			u32 g = base + dev::lane();
			u32 *count = dev::at<u32>(p.Hist, (i64)d * p.Grid + g);
			u32 own = g < p.Grid ? dev::ld(count) : 0, to = warp_scan(own);
			if (g < p.Grid) dev::st(count, before + to - own);
			before += dev::shfl(dev::full_mask, to, 31);
		}
		if (dev::lane() == 0) dev::st(dev::at<u32>(p.Totals, d), before);
	}
}

HX_THREADS(transpose_scatter, TransposeParams, 256)
HX_KERNEL(transpose_scatter, TransposeParams) {
	HX_SHARED(u32, first, radixBins);
	HX_SHARED(u32, cursors, radixBins * mostWarps);
	HX_SHARED(u32, sums, 32);
	if (dev::dropped(hx)) return;
	u32 digits = 1u << p.Bits, threads = dev::threads(), w = dev::tid() / 32, warps = threads / 32;
	u32 *cursor = &cursors[w * radixBins];
	u32 at = 0;
	for (u32 base = 0; base < digits; base += threads) {
		u32 d = base + dev::tid(), total;
		u32 before = block_scan(sums, d < digits ? dev::ld(dev::at<u32>(p.Totals, d)) : 0, &total);
		if (d < digits) dev::st(&first[d], at + before);
		at += total;
	}
	for (u32 g = dev::bid(); g < p.Grid; g += dev::blocks()) {
		for (u32 d = dev::lane(); d < digits; d += 32) dev::st(&cursor[d], 0u);
		dev::syncwarp();
		Share s = share_of(share(p, g), w, warps);
		for (i64 e = s.lo + dev::lane(); e < s.hi; e += 32) {
			dev::add_shared(&cursor[digit_of(p, dev::ld(dev::at<u32>(p.KeysIn, e)))], 1u);
		}
		dev::syncthreads();
		for (u32 d = dev::tid(); d < digits; d += threads) {
			u32 to = dev::ld(&first[d]) + dev::ld(dev::at<u32>(p.Hist, (i64)d * p.Grid + g));
			for (u32 i = 0; i < warps; i++) {
				u32 n = dev::ld(&cursors[i * radixBins + d]);
				dev::st(&cursors[i * radixBins + d], to);
				to += n;
			}
		}
		dev::syncthreads();
		bool edges = p.ValsIn == 0; // the first pass
		i64 lo = 0, hi = 0;         // destinations that the part's edges may have
		if (edges && s.lo < s.hi) {
			lo = upper<i64>(p.Agg.Indptr, 0, p.Agg.NumDst + 1, s.lo);
			hi = upper<i64>(p.Agg.Indptr, lo, p.Agg.NumDst + 1, s.hi - 1);
		}
		for (i64 e = s.lo + dev::lane(); e - dev::lane() < s.hi; e += 32) {
			bool in = e < s.hi;
			u32 key = 0, value = 0;
			if (in) {
				key = dev::ld(dev::at<u32>(p.KeysIn, e));
				value = edges ? (u32)(upper<i64>(p.Agg.Indptr, lo, hi, e) - 1) : dev::ld(dev::at<u32>(p.ValsIn, e));
			}
			if (in && key >= p.Agg.NumSrc) dev::fail(hx, 1, key, (u64)e, (u64)(p.Agg.NumSrc - 1));
			u32 digit = digit_of(p, key);
			u32 same = warp_peers(dev::ballot(dev::full_mask, in), digit, p.Bits);
			u32 rank = dev::popc(same & lanes_below());
			u32 to = in ? dev::ld(&cursor[digit]) + rank : 0;
			dev::syncwarp(); // all have read the place before it moves on
			if (in && rank + 1 == dev::popc(same)) dev::st(&cursor[digit], to + 1);
			dev::syncwarp();
			if (in) {
				dev::st(dev::at<u32>(p.KeysOut, to), key);
				dev::st(dev::at<u32>(p.ValsOut, to), value);
			}
		}
	}
}

HX_THREADS(transpose_ends, TransposeParams, 256)
HX_KERNEL(transpose_ends, TransposeParams) {
	if (dev::dropped(hx)) return;
	const AggParams &a = p.Agg;
	Share s = block_share(a.NumSrc);
	for (i64 j = s.lo + dev::tid(); j < s.hi; j += dev::threads()) {
		dev::st(dev::at<u32>(a.TEnd, j), (u32)upper<u32>(p.KeysIn, 0, a.Edges, (u32)j));
	}
	s = block_share(a.NumDst);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		i64 edges = dev::ld(dev::at<i64>(a.Indptr, i + 1)) - dev::ld(dev::at<i64>(a.Indptr, i));
		dev::st(dev::at<float>(a.Weights, i), edges > 0 ? weight_of_destination(a, p.GCN != 0, i, edges) : 0);
	}
}
