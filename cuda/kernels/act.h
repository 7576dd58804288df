// Activation functions between layers: a module for each has a struct with value and slope, and two kernels.
//
//	act_NAME       Out[Rows, Cols] = dropout(value(X)); Out may be X
//	act_NAME_bwd   X[Rows, Cols] = dropout(slope(X, Grad)), the gradient by what value was taken of, in its place
//
// Reference: gnn/activation.go and internal/simd/act.go, to the bit (NaNs aside, see fp.h), for any grid and any block of whole
// warps. A thread takes four columns, the four words of one Philox block, by 16-byte accesses where rows are aligned. No shared
// memory, no barrier, no two threads on one element. Bytes: 8 per element forward, 12 backward; the exponential takes some 25
// operations of float32, for which any GPU of today has time beside its memory. Not measured: no GPU was at hand.
#pragma once

#include "abi_agg.h"
#include "quads.h"

// e^x for x <= 0 or NaN is s·(1+p), s a power of two: internal/simd (down), step by step.
struct Exponential {
	float p, s;
};

HX_DEVICE inline Exponential exp_parts(float x) {
	if (x < -87.0f) x = -87.0f;
	float m = fp::add(fp::mul(x, 1.44269504088896341f), 12582912.0f), k = fp::sub(m, 12582912.0f);
	float r = fp::sub(x, fp::mul(k, 0.693359375f));
	r = fp::add(r, fp::mul(k, 2.12194440e-4f));
	float y = fp::add(fp::mul(r, 1.9875691500e-4f), 1.3981999507e-3f);
	y = fp::add(fp::mul(y, r), 8.3334519073e-3f);
	y = fp::add(fp::mul(y, r), 4.1665795894e-2f);
	y = fp::add(fp::mul(y, r), 1.6666665459e-1f);
	y = fp::add(fp::mul(y, r), 5.0000001201e-1f);
	return {fp::add(fp::mul(y, fp::mul(r, r)), r), fp::of_bits((fp::bits(m) << 23) + (127u << 23))};
}

template <typename Act, bool backward> HX_DEVICE inline void act_all(const ActParams &p) {
	const Quads q = quads_of(p.Rows, p.Cols, p.X | p.Grad | p.Out);
	u32 limit = drop_limit(p.Drop);
	Share s = block_share(q.all);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		Spot at = spot_of(q, i);
		Quad v = load_quad(at, p.X, at.at), g = {};
		if (backward) g = load_quad(at, p.Grad, at.at);
#pragma GCC unroll 4
		for (u32 k = 0; k < 4; k++) v.v[k] = backward ? Act::slope(v.v[k], g.v[k]) : Act::value(v.v[k]);
		if (limit != 0) drop(p.Drop, limit, at.row, at.col, v);
		store_quad(at, backward ? p.X : p.Out, at.at, v);
	}
}
