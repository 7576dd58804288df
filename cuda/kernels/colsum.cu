// col_sum, col_sum_part: sums of the columns of a matrix, the gradient of a bias. Reference: gnn/kernels.go (colSum), to the
// bit, for any grid and any block of whole warps.
//
// Out[c] = Σ_r X[r, c] as a tree: 64 rows in order are one row of partial sums, 64 of those one of the next level. The tree
// depends on the number of rows alone, so host and GPU have the same bits, and an error grows with the logarithm of the rows.
//
//	col_sum        the whole tree: a warp for each 128 columns (32 where rows are not 16-byte aligned). For few rows.
//	col_sum_part   one level: row g of Out is the sum of rows 64g … of X; a warp for each row of Out and 128 columns. gnn's
//	               colSumGPU runs it until col_sum can do the rest.
//
// Eight rows are in flight for each lane. No shared memory, no barrier; an element of Out is written by one lane.
//
// Bytes: 4×Rows×Cols read once, 1/64 of that written and read again. Bound by HBM from some 10 000 rows of 256 on; below that
// by latency, 64/8 × 0.6 µs a level. Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "agg.h"
#include "device.h"

namespace {

constexpr u32 ahead = 8;

template <u32 n> HX_DEVICE inline void add(Floats<n> &a, const Floats<n> &b) {
#pragma GCC unroll 4
	for (u32 k = 0; k < n; k++) a.v[k] = fp::add(a.v[k], b.v[k]);
}

// The sum of n columns of rows from … to-1, in order.
template <u32 n> HX_DEVICE inline Floats<n> leaf(const float *x, i64 cols, i64 from, i64 to) {
	Floats<n> acc = {};
	for (i64 r = from; r < to; r += ahead) {
		Floats<n> v[ahead];
#pragma GCC unroll 8
		for (u32 u = 0; u < ahead; u++) {
			if (r + u < to) v[u] = load_floats<n>(x + (r + u) * cols);
		}
#pragma GCC unroll 8
		for (u32 u = 0; u < ahead; u++) {
			if (r + u < to) add(acc, v[u]);
		}
	}
	return acc;
}

constexpr u32 levels = 5; // above the leaves: 2^36 rows

// The whole tree over some rows: level l is added to l+1 when it has 64 sums, and at the end.
template <u32 n> HX_DEVICE inline Floats<n> tree(const float *x, i64 cols, i64 rows) {
	Floats<n> acc[levels] = {};
	i64 leaves = 0;
	for (i64 r = 0; r < rows; r += sumLeaf) {
		add(acc[0], leaf<n>(x, cols, r, r + sumLeaf < rows ? r + sumLeaf : rows));
		leaves++;
#pragma GCC unroll 5
		for (u32 l = 0; l + 1 < levels; l++) {
			if ((leaves & (((i64)1 << 6 * (l + 1)) - 1)) != 0) break;
			add(acc[l + 1], acc[l]);
			acc[l] = {};
		}
	}
#pragma GCC unroll 5
	for (u32 l = 0; l + 1 < levels; l++) add(acc[l + 1], acc[l]);
	return acc[levels - 1];
}

static_assert(sumLeaf == 64, "6 bits a level");

template <u32 n> HX_DEVICE inline void whole(const SumParams &p) {
	i64 words = p.Cols / n;
	Share s = block_share((words + 31) / 32);
	for (i64 unit = s.lo + dev::tid() / 32; unit < s.hi; unit += dev::threads() / 32) {
		i64 word = unit * 32 + dev::lane();
		if (word >= words) continue;
		store_floats<n>(dev::at<float>(p.Out, word * n), tree<n>(dev::at<float>(p.X, word * n), p.Cols, p.Rows));
	}
}

template <u32 n> HX_DEVICE inline void level(const SumParams &p) {
	i64 words = p.Cols / n, stripes = (words + 31) / 32, groups = (p.Rows + sumLeaf - 1) / sumLeaf;
	Share s = block_share(groups * stripes);
	for (i64 unit = s.lo + dev::tid() / 32; unit < s.hi; unit += dev::threads() / 32) {
		i64 g = unit / stripes, word = unit % stripes * 32 + dev::lane();
		if (word >= words) continue;
		i64 from = g * sumLeaf, to = from + sumLeaf < p.Rows ? from + sumLeaf : p.Rows;
		Floats<n> acc = leaf<n>(dev::at<float>(p.X, word * n), p.Cols, from, to);
		store_floats<n>(dev::at<float>(p.Out, g * p.Cols + word * n), acc);
	}
}

} // namespace

HX_KERNEL(col_sum, SumParams) {
	if (dev::dropped(hx)) return;
	if (floats_at_once(p.X | p.Out, p.Cols) == 4) {
		whole<4>(p);
	} else {
		whole<1>(p);
	}
}

HX_KERNEL(col_sum_part, SumParams) {
	if (dev::dropped(hx)) return;
	if (floats_at_once(p.X | p.Out, p.Cols) == 4) {
		level<4>(p);
	} else {
		level<1>(p);
	}
}
