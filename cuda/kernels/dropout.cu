// drop_input, bias_act: dropout of a model's input, and what follows a product that a BLAS has made. Reference:
// gnn/inputdrop.go, and the end of gnn's products (gemmParams.epilogue), to the bit, for any grid and any block of whole warps.
//
//	drop_input   X[Rows, Cols] = dropout(X), in place
//	bias_act     C[Rows, Cols], LDC apart: + Bias, ReLU, dropout, each where asked for, in place
//
// Row, column and step decide alone about an element (Philox; see gnn's dropout), so neither the grid nor
// the device changes a mask, and no mask is stored. A thread takes four columns, which are the four words of one Philox block, by one
// 16-byte load and store where rows are aligned; the next thread has the next four.
//
// No shared memory, no barrier, no two threads on one element. Rows are less than 2^32, as everywhere in a mini-batch. Bytes: 8 per element. Ten rounds of Philox for four
// elements are some 80 integer operations for 32 bytes: an A100 does both at about the same time, so expect 60 to 80 % of the
// copy bandwidth. Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "agg.h"
#include "device.h"
#include "epilogue.h"

namespace {

// Finishes all elements where they stand.
HX_DEVICE inline void finish_all(const Finish &f, const Dropout &d) {
	u32 quads = (f.n + 3) / 4;
	i64 all = (i64)f.m * quads;
	Share s = block_share(all);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		u32 row = all >> 32 == 0 ? (u32)i / quads : (u32)(i / quads); // a 64-bit division is slow on a GPU
		u32 col = (u32)(i - (i64)row * quads) * 4;
		const float *c = dev::at<float>(f.c, (i64)row * f.ld + col);
		Quad q = {};
		if (f.wide && col + 4 <= f.n) {
			q = quad_of(dev::ld16_global(c));
		} else {
#pragma GCC unroll 4
			for (u32 k = 0; k < 4; k++) {
				if (col + k < f.n) q.v[k] = dev::ld(c + k);
			}
		}
		finish(f, d, row, col, q);
	}
}

} // namespace

HX_KERNEL(drop_input, DropInputParams) {
	if (dev::dropped(hx)) return;
	finish_all({p.X, 0, (u32)p.Rows, (u32)p.Cols, (u32)p.Cols, gemmDropout, drop_limit(p.Drop), floats_at_once(p.X, p.Cols) == 4}, p.Drop);
}

HX_KERNEL(bias_act, BiasActParams) {
	if (dev::dropped(hx)) return;
	finish_all({p.C, p.Bias, (u32)p.Rows, (u32)p.Cols, (u32)p.LDC, p.Flags, drop_limit(p.Drop), floats_at_once(p.C, p.LDC) == 4}, p.Drop);
}
