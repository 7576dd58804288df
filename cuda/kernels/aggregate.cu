// sage_mean, sage_weighted, gcn_agg, gin_sum, gin_weighted, sage_mean_bwd, gcn_agg_bwd, gin_sum_bwd, gcn_weights, agg_weights, self_weights,
// relu_bwd, row_dot: weighted sums of rows over the edges of a block, forward and backward, and what is done to rows beside them.
// Reference: gnn/kernels.go (aggregate, aggregateBwd, gcnWeights, aggWeights) and gnn/gin.go (ginSum, ginSumBwd, reluBwd, rowDot) at
// every level of internal/simd, to the bit, for any grid and any block of whole warps.
//
// Forward, E edges in CSC form (Indptr, Src), X float32[NumSrc, Dim]:
//
//	Out[i] = self_i X[i] + Σ_e w_i table[Src[e]] X[Src[e]]         e = Indptr[i] … Indptr[i+1]-1, in order
//
// SAGE: no self part, w_i = 1/edges, no table. GCN: table is Weights, which gcn_weights made. Of a block with weights
// (SrcWeights) agg_weights makes w_i, DstWeights, by their sum; their table is sage_weighted's. GIN: self_i = 1 + Eps, w_i = 1, the
// table is SrcWeights where there are any. Backward is the same sum over the
// lists that the transpose made (TEnd, TDst; each in order of destination), of rows of Grad, with ReLU and dropout of the
// layer below in the same pass: Out holds that layer's activations h and becomes h > 0 ? Scale · sum : 0.
//
// Each product and each sum is rounded by itself, in the order of the list, as on the host: not fused, which costs nothing here,
// because memory is the limit. No atomics: a destination's sum is one warp's, for its columns.
//
// A warp takes 32 words (of 16 bytes; of 8 or 4 where rows or addresses are odd) of one row at a time: a row of 1024
// floats is 8 units, which may go to 8 warps and SMs, so a hub in the backward lists is spread too. Narrow rows are done several
// at once. Eight rows of the list are in flight for each lane: 4 KiB for each warp and 64 KiB and more for each SM (two
// blocks of 256 by their registers), four times what covers HBM's latency (Little: 3.3 TB/s × 600 ns / 132 SMs = 15 KiB of an H100). A hub's list is
// still one chain: L edges take about L/8 × 0.6 µs, 0.6 ms for 8000.
//
// Shared memory and barriers: none. Each element of Out is read and written by one lane; X, Grad, Self may not overlap it. The
// caller's next launch on the stream sees all of it.
//
// Bytes: per edge 4×Dim of a row (from HBM or L2), and its number again for each stripe (from L1 and L2); per destination
// 4×Dim written; backward 4×Dim of h and up to 4×Dim of the self part more. Bound by HBM where rows do not repeat: expect 80 to
// 90 % of the copy bandwidth for rows of 512 bytes and more. Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "agg.h"
#include "device.h"
#include "dot.h"

namespace {

constexpr u32 ahead = 8; // rows that a lane has in flight

// Terms of sums: rows of x by a list of row numbers.
struct Rows {
	u64 x, list, table; // table: 0 for a weight of 1
	i64 rows, dim;
};

// Says which number of the list is no row. Not in sum: the words would not fit the instruction cache.
HX_DEVICE inline void tell(const Rows &r, const hx_launch &hx, i64 from, i64 to) {
	for (i64 e = from; e < to; e++) {
		u32 j = dev::ld(dev::at<u32>(r.list, e));
		if (j >= r.rows) {
			dev::fail(hx, 1, j, (u64)e, (u64)(r.rows - 1));
			return;
		}
	}
}

template <u32 n, bool weighted> HX_DEVICE inline void sum(const Rows &r, const hx_launch &hx, Floats<n> &acc, i64 from, i64 to, i64 column, float factor) {
	bool bad = false;
	for (i64 e = from; e < to; e += ahead) {
		u32 j[ahead];
		float w[ahead];
		Floats<n> x[ahead];
#pragma GCC unroll 8
		for (u32 u = 0; u < ahead; u++) {
			j[u] = 0;
			if (e + u < to) j[u] = dev::ld(dev::at<u32>(r.list, e + u));
			bad |= j[u] >= r.rows;
			if (j[u] >= r.rows) j[u] = 0;
		}
#pragma GCC unroll 8
		for (u32 u = 0; u < ahead; u++) {
			w[u] = factor;
			if (weighted && e + u < to) w[u] = fp::mul(factor, dev::ld(dev::at<float>(r.table, j[u])));
			if (e + u < to) x[u] = load_floats<n>(dev::at<float>(r.x, j[u] * r.dim + column));
		}
#pragma GCC unroll 8
		for (u32 u = 0; u < ahead; u++) {
			if (e + u < to) {
#pragma GCC unroll 4
				for (u32 k = 0; k < n; k++) acc.v[k] = fp::add(acc.v[k], fp::mul(w[u], x[u].v[k]));
			}
		}
	}
	if (bad) tell(r, hx, from, to);
}

// start · init; init may be 0 for nothing.
template <u32 n> HX_DEVICE inline Floats<n> begin(u64 init, i64 at, float start) {
	Floats<n> acc = {};
	if (init != 0) {
		acc = load_floats<n>(dev::at<float>(init, at));
#pragma GCC unroll 4
		for (u32 k = 0; k < n; k++) acc.v[k] = fp::mul(start, acc.v[k]);
	}
	return acc;
}

// Whose weights a sum has.
enum class Sum { mean, gcn, gin };

// 1 + ε, the weight of GIN's self part.
HX_DEVICE inline float weight_of_gin(const AggParams &p) { return p.Eps == 0 ? 1.0f : fp::add(1.0f, dev::ld(dev::at<float>(p.Eps))); }

template <u32 n, Sum kind, bool weighted> HX_DEVICE inline void forward(const AggParams &p, const hx_launch &hx) {
	constexpr bool gcn = kind == Sum::gcn, gin = kind == Sum::gin;
	const Rows r = {p.X, p.Src, gcn ? p.Weights : p.SrcWeights, p.NumSrc, p.Dim};
	const float eps = gin ? weight_of_gin(p) : 0;
	const Cut c = cut_rows(p.NumDst, p.Dim / n);
	Share s = block_share(c.units);
	for (i64 unit = s.lo + dev::tid() / 32; unit < s.hi; unit += dev::threads() / 32) {
		Place at = place_of(c, unit);
		if (at.word < 0) continue;
		i64 i = at.row, column = at.word * n;
		i64 from = dev::ld(dev::at<i64>(p.Indptr, i)), to = dev::ld(dev::at<i64>(p.Indptr, i + 1));
		if (from < 0 || from > to || to > p.Edges) {
			dev::fail(hx, 2, (u64)i, (u64)from, (u64)to);
			continue;
		}
		float w = 1;
		if (!gin) w = to > from ? weight_of_destination(p, gcn, i, to - from) : 0;
		Floats<n> acc = begin<n>(gcn || gin ? p.X : 0, i * p.Dim + column, gcn ? weight_of_self(p, i) : eps);
		sum<n, gcn || weighted>(r, hx, acc, from, to, column, w);
		store_floats<n>(dev::at<float>(p.Out, i * p.Dim + column), acc);
	}
}

template <u32 n, Sum kind> HX_DEVICE inline void backward(const AggParams &p, const hx_launch &hx) {
	constexpr bool gcn = kind == Sum::gcn, gin = kind == Sum::gin;
	const Rows r = {p.Grad, p.TDst, p.Weights, p.NumDst, p.Dim};
	const float eps = gin ? weight_of_gin(p) : 1;
	const bool open = p.Open != 0;
	const Cut c = cut_rows(p.NumSrc, p.Dim / n);
	Share s = block_share(c.units);
	for (i64 unit = s.lo + dev::tid() / 32; unit < s.hi; unit += dev::threads() / 32) {
		Place at = place_of(c, unit);
		if (at.word < 0) continue;
		i64 j = at.row, column = at.word * n;
		i64 from = j > 0 ? (i64)dev::ld(dev::at<u32>(p.TEnd, j - 1)) : 0, to = dev::ld(dev::at<u32>(p.TEnd, j));
		if (from > to || to > p.Edges) {
			dev::fail(hx, 2, (u64)j, (u64)from, (u64)to);
			continue;
		}
		float *out = dev::at<float>(p.Out, j * p.Dim + column);
		Floats<n> h = load_floats<n>(out);
		u64 init = 0;
		float start = eps;
		if (j < p.NumDst) {
			init = gcn || gin ? p.Grad : p.Self;
			if (gcn) start = weight_of_self(p, j);
		}
		Floats<n> acc = begin<n>(init, j * p.Dim + column, start);
		sum<n, !gin>(r, hx, acc, from, to, column, weight_of_source(p, gcn, j));
#pragma GCC unroll 4
		for (u32 k = 0; k < n; k++) acc.v[k] = open || h.v[k] > 0 ? fp::mul(acc.v[k], p.Scale) : 0;
		store_floats<n>(out, acc);
	}
}

template <Sum kind, bool weighted = false> HX_DEVICE inline void forward(const AggParams &p, const hx_launch &hx) {
	u32 n = floats_at_once(p.X | p.Out, p.Dim);
	if (n == 4) {
		forward<4, kind, weighted>(p, hx);
	} else if (n == 2) {
		forward<2, kind, weighted>(p, hx);
	} else {
		forward<1, kind, weighted>(p, hx);
	}
}

template <Sum kind> HX_DEVICE inline void backward(const AggParams &p, const hx_launch &hx) {
	u32 n = floats_at_once(p.Grad | p.Out | (kind == Sum::mean ? p.Self : 0), p.Dim);
	if (n == 4) {
		backward<4, kind>(p, hx);
	} else if (n == 2) {
		backward<2, kind>(p, hx);
	} else {
		backward<1, kind>(p, hx);
	}
}

} // namespace

HX_KERNEL(sage_mean, AggParams) {
	if (!dev::dropped(hx)) forward<Sum::mean>(p, hx);
}

HX_KERNEL(sage_weighted, AggParams) {
	if (!dev::dropped(hx)) forward<Sum::mean, true>(p, hx);
}

HX_KERNEL(gcn_agg, AggParams) {
	if (!dev::dropped(hx)) forward<Sum::gcn>(p, hx);
}

HX_KERNEL(sage_mean_bwd, AggParams) {
	if (!dev::dropped(hx)) backward<Sum::mean>(p, hx);
}

HX_KERNEL(gcn_agg_bwd, AggParams) {
	if (!dev::dropped(hx)) backward<Sum::gcn>(p, hx);
}

HX_KERNEL(gin_sum, AggParams) {
	if (!dev::dropped(hx)) forward<Sum::gin>(p, hx);
}

HX_KERNEL(gin_weighted, AggParams) {
	if (!dev::dropped(hx)) forward<Sum::gin, true>(p, hx);
}

HX_KERNEL(gin_sum_bwd, AggParams) {
	if (!dev::dropped(hx)) backward<Sum::gin>(p, hx);
}

// Out[NumDst, Dim] = Out > 0 ? Scale · Grad : 0: the gradient through a ReLU, a thread an element, neighbours side by side. 12 bytes an
// element.
HX_KERNEL(relu_bwd, AggParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.NumDst * p.Dim);
	for (i64 e = s.lo + dev::tid(); e < s.hi; e += dev::threads()) {
		float *out = dev::at<float>(p.Out, e);
		float g = dev::ld(dev::at<float>(p.Grad, e));
		dev::st(out, dev::ld(out) > 0 ? fp::mul(g, p.Scale) : 0.0f);
	}
}

// Out[i] = Σ_k Grad[i, k] X[i, k], a warp for each of NumDst rows, as dot.h. 8 bytes an element.
HX_KERNEL(row_dot, AggParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.NumDst);
	for (i64 i = s.lo + dev::tid() / 32; i < s.hi; i += dev::threads() / 32) {
		float d = dot_lane(dev::at<float>(p.Grad, i * p.Dim), dev::at<float>(p.X, i * p.Dim), p.Dim, dev::lane(), 32);
		d = sum_lanes(d, 32);
		if (dev::lane() == 0) dev::st(dev::at<float>(p.Out, i), d);
	}
}

// Each source's part of its edges' weights, once a node. 8 bytes a node.
HX_KERNEL(gcn_weights, AggParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.NumSrc);
	for (i64 j = s.lo + dev::tid(); j < s.hi; j += dev::threads()) {
		dev::st(dev::at<float>(p.Weights, j), weight_of_source(p, true, j));
	}
}

// Each destination's part, a thread for each, the sum in the order of its edges: eight weights of 4 bytes (mostly from L2) are in
// flight for each thread. 8 bytes an edge.
HX_KERNEL(agg_weights, AggParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.NumDst);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		i64 from = dev::ld(dev::at<i64>(p.Indptr, i)), to = dev::ld(dev::at<i64>(p.Indptr, i + 1));
		if (from < 0 || from > to || to > p.Edges) {
			dev::fail(hx, 2, (u64)i, (u64)from, (u64)to);
			continue;
		}
		float sum = 0;
		for (i64 e = from; e < to; e += ahead) {
			float w[ahead];
#pragma GCC unroll 8
			for (u32 u = 0; u < ahead; u++) {
				w[u] = 0;
				if (e + u >= to) continue;
				u32 j = dev::ld(dev::at<u32>(p.Src, e + u));
				if (j >= p.NumSrc) {
					dev::fail(hx, 1, j, (u64)(e + u), (u64)(p.NumSrc - 1));
					continue;
				}
				w[u] = dev::ld(dev::at<float>(p.SrcWeights, j));
			}
#pragma GCC unroll 8
			for (u32 u = 0; u < ahead; u++) {
				if (e + u < to) sum = fp::add(sum, w[u]);
			}
		}
		dev::st(dev::at<float>(p.DstWeights, i), to > from ? weight_over(p, p.Degrees != 0, i, sum) : 0);
	}
}

// The weights of self loops that make a node its own neighbour exactly once, whatever edges to itself its list has (gnn/kernels.go,
// selfWeights): a thread for each destination, in the order of its edges. 4 bytes an edge, 8 in a block with weights.
HX_KERNEL(self_weights, AggParams) {
	if (dev::dropped(hx)) return;
	const bool gcn = p.Degrees != 0;
	Share s = block_share(p.NumDst);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		i64 from = dev::ld(dev::at<i64>(p.Indptr, i)), to = dev::ld(dev::at<i64>(p.Indptr, i + 1));
		if (from < 0 || from > to || to > p.Edges) {
			dev::fail(hx, 2, (u64)i, (u64)from, (u64)to);
			continue;
		}
		i64 own = 0;
		float sum = 0;
		for (i64 e = from; e < to; e++) {
			u32 j = dev::ld(dev::at<u32>(p.Src, e));
			if (j >= p.NumSrc) {
				dev::fail(hx, 1, j, (u64)e, (u64)(p.NumSrc - 1));
				break;
			}
			if (j == (u64)i) {
				own++;
			} else if (p.SrcWeights != 0) {
				sum = fp::add(sum, dev::ld(dev::at<float>(p.SrcWeights, j)));
			}
		}
		if (p.SrcWeights == 0) sum = (float)(to - from - own);
		float all = 1, each = 1;
		if (gcn) {
			float w = sum > 0 ? weight_over(p, true, i, sum) : 0;
			dev::st(dev::at<float>(p.DstWeights, i), w);
			u32 degree = dev::ld(dev::at<u32>(p.Degrees, i));
			all = fp::div(1.0f, fp::add((float)degree, 1.0f));
			each = fp::mul(w, weight_of_source(p, true, i));
		} else if (p.SrcWeights != 0) {
			each = dev::ld(dev::at<float>(p.SrcWeights, i));
		}
		dev::st(dev::at<float>(p.SelfWeights, i), fp::sub(all, fp::mul((float)own, each)));
	}
}
