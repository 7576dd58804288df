// add_rows: Out[Rows, Cols] += X, the sum that a residual connection makes, forward and backward. Reference: gnn/between.go, to the
// bit, for any grid and any block of whole warps. A thread takes four columns of a row. No shared memory, no barrier, no two
// threads on one element. Bytes: 12 per element. Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "quads.h"

HX_KERNEL(add_rows, ActParams) {
	if (dev::dropped(hx)) return;
	const Quads q = quads_of(p.Rows, p.Cols, p.X | p.Out);
	Share s = block_share(q.all);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		Spot at = spot_of(q, i);
		Quad v = load_quad(at, p.Out, at.at), x = load_quad(at, p.X, at.at);
#pragma GCC unroll 4
		for (u32 k = 0; k < 4; k++) v.v[k] = fp::add(v.v[k], x.v[k]);
		store_quad(at, p.Out, at.at, v);
	}
}
