// gat_score, gat_softmax, gat_sum, gat_mean, gat_spread, gat_edges, gat_dot, gat_softmax_bwd, gat_score_bwd, gat_sum_bwd,
// gat_scaled_sum:
// graph attention over the edges of a block, forward and backward (Veličković et al., ICLR 2018; gnn/gat.go has the formulas).
// Reference: gnn/gat_kernels.go, to the bit (NaNs aside, see fp.h), for any grid and any block of whole warps.
//
// N destinations, S sources, E edges in CSC form (Indptr, Src), K heads of D floats; destinations are the first sources. Z is
// float32[S, K, D], so a row of it is K rows of one head each, and a sum over edges and heads is one over rows of D floats whose list is
// Src[e]·K + k.
//
//	score        a group of lanes for each row of a head: two dot products, of which each lane sums each 32nd product
//	softmax      a thread for each destination and head: largest score, sum of exp in the order of the list, attention
//	sum          as the aggregations: a warp, or a part of one, for 32 words of a row of a head; the list in order
//	mean spread  a thread for each element: the mean over the heads of the last layer, and its gradient
//	edges        a thread for each destination: EdgePtr[e] = e and EdgeDst[e], by which the transpose sorts edges
//	dot          as score, a dot product for each edge and head: the gradient by attention
//	softmax_bwd  a thread for each destination and head: gradient by the scores; attention once more
//	score_bwd    a thread for each source and head: the sum of its edges' gradients
//	sum_bwd      as sum, over the edges of each source: the gradient by Z
//	scaled_sum   a thread for each 64 rows of a column: their sum in order, each times a number of its row and head. col_sum
//	             does the rest of its tree: the gradients of the parameters of attention
//
// Edge, head and step decide alone which attention is dropped (Philox), so no mask is stored and none depends
// on the grid. No atomics: each element is one lane's, and each sum has the order of its list. No shared memory, no barrier.
//
// softmax checks the block's lists, and a fault drops all launches behind it; so the others trust them. Neighbouring threads have
// neighbouring heads: K scores of a source are one access. A destination's list is one chain for each of its heads; sums and dot products,
// which move the rows, are spread over lanes.
//
// Bytes: a row of 4·K·D for each edge in sum, in sum_bwd and, twice, in dot (of Grad mostly from L1); 4·K for each edge in the rest. exp
// costs some 20 operations of float32, twice for each edge and head. Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "agg.h"
#include "device.h"
#include "dot.h"
#include "epilogue.h"

namespace {

constexpr float leakySlope = 0.2f;

HX_DEVICE inline float leaky(float v) { return v > 0 ? v : fp::mul(leakySlope, v); }

HX_DEVICE inline float get(u64 array, i64 at) { return dev::ld(dev::at<float>(array, at)); }
HX_DEVICE inline void put(u64 array, i64 at, float v) { dev::st(dev::at<float>(array, at), v); }

// A lane's share of the rows of dot products: lanes of a group take a row together.
struct Group {
	u32 size, lane, first, rows; // lanes; this lane in its group; the group in its warp; groups of a warp
};

HX_DEVICE inline Group group_of(i64 dim) {
	u32 size = 1;
	while (size < 32 && size < dim) size *= 2;
	return {size, dev::lane() % size, dev::lane() / size, 32 / size};
}

// a · b as internal/simd (Dot) has it: the lanes that a narrow row leaves out would add zeros, which changes nothing, as no sum
// is ever -0. All lanes of the warp call it.
HX_DEVICE inline float dot(const Group &g, u64 a, i64 at_a, u64 b, i64 at_b, i64 dim, bool in) {
	float d = in ? dot_lane(dev::at<float>(a, at_a), dev::at<float>(b, at_b), dim, g.lane, g.size) : 0;
	return sum_lanes(d, g.size);
}

// The weight of the self loop of destination i.
HX_DEVICE inline float weight_of_loop(const GatParams &p, i64 i) { return p.SelfWeights != 0 ? get(p.SelfWeights, i) : 1.0f; }

// exp of a score as a share of the largest one's, times the neighbour's weight.
HX_DEVICE inline float attention(float score, float most, float weight) {
	fp::Exponential e = fp::exp_parts(fp::sub(score, most));
	return fp::mul(fp::add(fp::mul(e.p, e.s), e.s), weight);
}

// v behind the dropout of attention.
HX_DEVICE inline float kept(const GatParams &p, u32 limit, u32 layer, i64 i, i64 k, float v) {
	if (limit == 0) return v;
	PhiloxBlock w = philox(p.Drop.Key, layer << 24 | (u32)(k / 4), (u32)i, p.Drop.Epoch, p.Drop.Batch);
	u32 word = 0;
#pragma GCC unroll 4
	for (u32 j = 0; j < 4; j++) {
		if (k % 4 == j) word = w.w[j];
	}
	return word >> 8 < limit ? 0.0f : fp::mul(v, p.Drop.Scale);
}

constexpr u32 selfLayers = 64; // from the counters of edges to those of self loops

// A destination and a head.
struct Place2 {
	i64 i, k, at;
};

HX_DEVICE inline Place2 place2(i64 r, i64 heads) {
	i64 i = r / heads;
	return {i, r - i * heads, r};
}

struct Edge {
	float score, weight;
};

HX_DEVICE inline Edge edge(const GatParams &p, i64 e, i64 k, float own) {
	u32 j = dev::ld(dev::at<u32>(p.Src, e));
	return {leaky(fp::add(own, get(p.ScoreSrc, j * p.Heads + k))), p.SrcWeights != 0 ? get(p.SrcWeights, j) : 1.0f};
}

// Adds w times a row at the columns of a lane's word.
template <u32 n> HX_DEVICE inline void add_row(Floats<n> &acc, u64 rows, i64 at, float w) {
	Floats<n> x = load_floats<n>(dev::at<float>(rows, at));
#pragma GCC unroll 4
	for (u32 c = 0; c < n; c++) acc.v[c] = fp::add(acc.v[c], fp::mul(w, x.v[c]));
}

template <u32 n> HX_DEVICE inline void sum_forward(const GatParams &p) {
	const Cut c = cut_rows(p.NumDst * p.Heads, p.Dim / n);
	Share s = block_share(c.units);
	for (i64 unit = s.lo + dev::tid() / 32; unit < s.hi; unit += dev::threads() / 32) {
		Place at = place_of(c, unit);
		if (at.word < 0) continue;
		Place2 d = place2(at.row, p.Heads);
		i64 column = at.word * n;
		i64 from = dev::ld(dev::at<i64>(p.Indptr, d.i)), to = dev::ld(dev::at<i64>(p.Indptr, d.i + 1));
		Floats<n> acc = {};
		add_row<n>(acc, p.Z, at.row * p.Dim + column, get(p.AlphaSelf, at.row));
		for (i64 e = from; e < to; e++) {
			i64 row = dev::ld(dev::at<u32>(p.Src, e)) * p.Heads + d.k;
			add_row<n>(acc, p.Z, row * p.Dim + column, get(p.Alpha, e * p.Heads + d.k));
		}
		store_floats<n>(dev::at<float>(p.Out, at.row * p.Dim + column), acc);
	}
}

template <u32 n> HX_DEVICE inline void sum_backward(const GatParams &p) {
	const Cut c = cut_rows(p.NumSrc * p.Heads, p.Dim / n);
	Share s = block_share(c.units);
	for (i64 unit = s.lo + dev::tid() / 32; unit < s.hi; unit += dev::threads() / 32) {
		Place at = place_of(c, unit);
		if (at.word < 0) continue;
		Place2 d = place2(at.row, p.Heads);
		i64 column = at.word * n;
		i64 from = d.i > 0 ? (i64)dev::ld(dev::at<u32>(p.TEnd, d.i - 1)) : 0, to = dev::ld(dev::at<u32>(p.TEnd, d.i));
		Floats<n> acc = {};
		if (d.i < p.NumDst) add_row<n>(acc, p.Grad, at.row * p.Dim + column, get(p.AlphaSelf, at.row));
		for (i64 x = from; x < to; x++) {
			i64 e = dev::ld(dev::at<u32>(p.TEdge, x));
			i64 row = dev::ld(dev::at<u32>(p.EdgeDst, e)) * p.Heads + d.k;
			add_row<n>(acc, p.Grad, row * p.Dim + column, get(p.Alpha, e * p.Heads + d.k));
		}
		add_row<n>(acc, p.AttSrc, d.k * p.Dim + column, get(p.DSrc, at.row));
		if (d.i < p.NumDst) add_row<n>(acc, p.AttDst, d.k * p.Dim + column, get(p.DDst, at.row));
		store_floats<n>(dev::at<float>(p.Out, at.row * p.Dim + column), acc);
	}
}

} // namespace

HX_KERNEL(gat_score, GatParams) {
	if (dev::dropped(hx)) return;
	const Group g = group_of(p.Dim);
	i64 rows = p.NumSrc * p.Heads;
	Share s = block_share((rows + g.rows - 1) / g.rows);
	for (i64 unit = s.lo + dev::tid() / 32; unit < s.hi; unit += dev::threads() / 32) {
		i64 r = unit * g.rows + g.first, k = r % p.Heads;
		bool in = r < rows, own = in && r < p.NumDst * p.Heads;
		float src = dot(g, p.AttSrc, k * p.Dim, p.Z, r * p.Dim, p.Dim, in);
		float dst = dot(g, p.AttDst, k * p.Dim, p.Z, r * p.Dim, p.Dim, own);
		if (in && g.lane == 0) put(p.ScoreSrc, r, src);
		if (own && g.lane == 0) put(p.ScoreDst, r, dst);
	}
}

HX_KERNEL(gat_softmax, GatParams) {
	if (dev::dropped(hx)) return;
	u32 limit = drop_limit(p.Drop);
	Share s = block_share(p.NumDst * p.Heads);
	for (i64 r = s.lo + dev::tid(); r < s.hi; r += dev::threads()) {
		Place2 d = place2(r, p.Heads);
		i64 from = dev::ld(dev::at<i64>(p.Indptr, d.i)), to = dev::ld(dev::at<i64>(p.Indptr, d.i + 1));
		if (from < 0 || from > to || to > p.Edges) {
			dev::fail(hx, 2, (u64)d.i, (u64)from, (u64)to);
			continue;
		}
		bool bad = false;
		for (i64 e = from; e < to; e++) {
			u32 j = dev::ld(dev::at<u32>(p.Src, e));
			if (j < p.NumSrc) continue;
			dev::fail(hx, 1, j, (u64)e, (u64)(p.NumSrc - 1));
			bad = true;
			break;
		}
		if (bad) continue;
		float own = get(p.ScoreDst, r), self = leaky(fp::add(own, get(p.ScoreSrc, r))), most = self;
		for (i64 e = from; e < to; e++) {
			float score = edge(p, e, d.k, own).score;
			if (score > most) most = score;
		}
		float first = attention(self, most, weight_of_loop(p, d.i)), sum = first;
		for (i64 e = from; e < to; e++) {
			Edge x = edge(p, e, d.k, own);
			float a = attention(x.score, most, x.weight);
			sum = fp::add(sum, a);
			put(p.Alpha, e * p.Heads + d.k, a);
		}
		float inverse = fp::div(1.0f, sum);
		put(p.Max, r, most);
		put(p.Inverse, r, inverse);
		put(p.AlphaSelf, r, kept(p, limit, p.Drop.Layer + selfLayers, d.i, d.k, fp::mul(first, inverse)));
		for (i64 e = from; e < to; e++) {
			float *a = dev::at<float>(p.Alpha, e * p.Heads + d.k);
			dev::st(a, kept(p, limit, p.Drop.Layer, e, d.k, fp::mul(dev::ld(a), inverse)));
		}
	}
}

HX_KERNEL(gat_sum, GatParams) {
	if (dev::dropped(hx)) return;
	u32 n = floats_at_once(p.Z | p.Out, p.Dim);
	if (n == 4) {
		sum_forward<4>(p);
	} else if (n == 2) {
		sum_forward<2>(p);
	} else {
		sum_forward<1>(p);
	}
}

HX_KERNEL(gat_mean, GatParams) {
	if (dev::dropped(hx)) return;
	float share = fp::div(1.0f, (float)p.Heads);
	Share s = block_share(p.NumDst * p.Dim);
	for (i64 r = s.lo + dev::tid(); r < s.hi; r += dev::threads()) {
		i64 i = r / p.Dim, at = i * p.Heads * p.Dim + r - i * p.Dim;
		float sum = 0;
		for (i64 k = 0; k < p.Heads; k++) sum = fp::add(sum, get(p.Z, at + k * p.Dim));
		put(p.Out, r, fp::mul(sum, share));
	}
}

HX_KERNEL(gat_spread, GatParams) {
	if (dev::dropped(hx)) return;
	float share = fp::div(1.0f, (float)p.Heads);
	i64 wide = p.Heads * p.Dim;
	Share s = block_share(p.NumDst * wide);
	for (i64 r = s.lo + dev::tid(); r < s.hi; r += dev::threads()) {
		put(p.Out, r, fp::mul(get(p.Z, r / wide * p.Dim + r % p.Dim), share));
	}
}

HX_KERNEL(gat_edges, GatParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.NumDst);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		i64 from = dev::ld(dev::at<i64>(p.Indptr, i)), to = dev::ld(dev::at<i64>(p.Indptr, i + 1));
		for (i64 e = from; e < to; e++) {
			dev::st(dev::at<i64>(p.EdgePtr, e), e);
			dev::st(dev::at<u32>(p.EdgeDst, e), (u32)i);
		}
	}
	if (dev::bid() == 0 && dev::tid() == 0) dev::st(dev::at<i64>(p.EdgePtr, p.Edges), p.Edges);
}

HX_KERNEL(gat_dot, GatParams) {
	if (dev::dropped(hx)) return;
	const Group g = group_of(p.Dim);
	i64 own = p.NumDst * p.Heads, rows = own + p.Edges * p.Heads;
	Share s = block_share((rows + g.rows - 1) / g.rows);
	for (i64 unit = s.lo + dev::tid() / 32; unit < s.hi; unit += dev::threads() / 32) {
		i64 r = unit * g.rows + g.first;
		bool in = r < rows, self = r < own;
		i64 i = r, j = r;
		if (in && !self) {
			Place2 x = place2(r - own, p.Heads);
			i = dev::ld(dev::at<u32>(p.EdgeDst, x.i)) * p.Heads + x.k;
			j = dev::ld(dev::at<u32>(p.Src, x.i)) * p.Heads + x.k;
		}
		float d = dot(g, p.Grad, i * p.Dim, p.Z, j * p.Dim, p.Dim, in);
		if (in && g.lane == 0) put(self ? p.DotSelf : p.Dot, self ? r : r - own, d);
	}
}

HX_KERNEL(gat_softmax_bwd, GatParams) {
	if (dev::dropped(hx)) return;
	u32 limit = drop_limit(p.Drop);
	Share s = block_share(p.NumDst * p.Heads);
	for (i64 r = s.lo + dev::tid(); r < s.hi; r += dev::threads()) {
		Place2 d = place2(r, p.Heads);
		i64 from = dev::ld(dev::at<i64>(p.Indptr, d.i)), to = dev::ld(dev::at<i64>(p.Indptr, d.i + 1));
		float own = get(p.ScoreDst, r), most = get(p.Max, r), inverse = get(p.Inverse, r);
		float self = leaky(fp::add(own, get(p.ScoreSrc, r)));
		float a_self = fp::mul(attention(self, most, weight_of_loop(p, d.i)), inverse);
		float d_self = kept(p, limit, p.Drop.Layer + selfLayers, d.i, d.k, get(p.DotSelf, r)), mean = fp::mul(a_self, d_self);
		for (i64 e = from; e < to; e++) {
			i64 at = e * p.Heads + d.k;
			Edge x = edge(p, e, d.k, own);
			float a = fp::mul(attention(x.score, most, x.weight), inverse), g = kept(p, limit, p.Drop.Layer, e, d.k, get(p.Dot, at));
			mean = fp::add(mean, fp::mul(a, g));
			put(p.Alpha, at, a);
			put(p.Dot, at, g);
		}
		float sum = fp::mul(fp::mul(a_self, fp::sub(d_self, mean)), self > 0 ? 1.0f : leakySlope);
		put(p.DotSelf, r, sum);
		put(p.AlphaSelf, r, kept(p, limit, p.Drop.Layer + selfLayers, d.i, d.k, a_self));
		for (i64 e = from; e < to; e++) {
			i64 at = e * p.Heads + d.k;
			float a = get(p.Alpha, at);
			float g = fp::mul(fp::mul(a, fp::sub(get(p.Dot, at), mean)), edge(p, e, d.k, own).score > 0 ? 1.0f : leakySlope);
			sum = fp::add(sum, g);
			put(p.Dot, at, g);
			put(p.Alpha, at, kept(p, limit, p.Drop.Layer, e, d.k, a));
		}
		put(p.DDst, r, sum);
	}
}

HX_KERNEL(gat_score_bwd, GatParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.NumSrc * p.Heads);
	for (i64 r = s.lo + dev::tid(); r < s.hi; r += dev::threads()) {
		Place2 d = place2(r, p.Heads);
		i64 from = d.i > 0 ? (i64)dev::ld(dev::at<u32>(p.TEnd, d.i - 1)) : 0, to = dev::ld(dev::at<u32>(p.TEnd, d.i));
		float sum = d.i < p.NumDst ? get(p.DotSelf, r) : 0;
		for (i64 x = from; x < to; x++) {
			i64 e = dev::ld(dev::at<u32>(p.TEdge, x));
			sum = fp::add(sum, get(p.Dot, e * p.Heads + d.k));
		}
		put(p.DSrc, r, sum);
	}
}

HX_KERNEL(gat_sum_bwd, GatParams) {
	if (dev::dropped(hx)) return;
	u32 n = floats_at_once(p.Grad | p.Out | p.AttSrc | p.AttDst, p.Dim);
	if (n == 4) {
		sum_backward<4>(p);
	} else if (n == 2) {
		sum_backward<2>(p);
	} else {
		sum_backward<1>(p);
	}
}

HX_KERNEL(gat_scaled_sum, GatParams) {
	if (dev::dropped(hx)) return;
	i64 wide = p.Heads * p.Dim;
	Share s = block_share((p.Rows + sumLeaf - 1) / sumLeaf * wide);
	for (i64 r = s.lo + dev::tid(); r < s.hi; r += dev::threads()) {
		i64 g = r / wide, c = r - g * wide, k = c / p.Dim;
		i64 from = g * sumLeaf, to = from + sumLeaf < p.Rows ? from + sumLeaf : p.Rows;
		float sum = 0;
		for (i64 i = from; i < to; i++) sum = fp::add(sum, fp::mul(get(p.Scale, i * p.Heads + k), get(p.Z, i * wide + c)));
		put(p.Out, r, sum);
	}
}
