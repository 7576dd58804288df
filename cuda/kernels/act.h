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
