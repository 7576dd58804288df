// batch_square, batch_spread, batch_norm, batch_dot, batch_norm_bwd, batch_running: normalisation of columns over the rows of a
// mini-batch (Ioffe and Szegedy, ICML 2015). Reference: gnn/norm_batch.go, to the bit, for any grid and any block of whole warps.
//
// The mean of a column is Share · Sum, its variance Share · Squares; Share is 1 where they are running ones. x^ = (X - mean) · Spread.
//
//	batch_square     Out = (X - mean)², whose sums over columns are Squares
//	batch_spread     Spread[c] = 1/sqrt(Share · Squares[c] + Eps)
//	batch_norm       Out = Gamma · x^ + Beta; Out may be X
//	batch_dot        Out = Grad · x^, whose sums are the gradient of Gamma
//	batch_norm_bwd   X = Gamma · Spread · (Grad - Share · DBeta - x^ · Share · DGamma), the gradient by X
//	batch_running    Out[c] = Grad[c] = (1 - Momentum) · X[c] + Momentum · Share · Sum[c], of Cols elements
//
// A thread takes four columns of a row by 16-byte accesses where rows are aligned; what belongs to a column comes from L1. Sums over
// rows are col_sum's. No shared memory, no barrier, no two threads on one element. Bytes: 8 per element, batch_dot and
// batch_norm_bwd 12. Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "quads.h"

namespace {

// x^ of four columns.
HX_DEVICE inline Quad normal(const NormParams &p, const Spot &at) {
	Quad x = load_quad(at, p.X, at.at), sum = load_quad(at, p.Sum, at.col), spread = load_quad(at, p.Spread, at.col);
#pragma GCC unroll 4
	for (u32 k = 0; k < 4; k++) x.v[k] = fp::mul(fp::sub(x.v[k], fp::mul(sum.v[k], p.Share)), spread.v[k]);
	return x;
}

} // namespace

HX_KERNEL(batch_square, NormParams) {
	if (dev::dropped(hx)) return;
	const Quads q = quads_of(p.Rows, p.Cols, p.X | p.Out | p.Sum);
	Share s = block_share(q.all);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		Spot at = spot_of(q, i);
		Quad x = load_quad(at, p.X, at.at), sum = load_quad(at, p.Sum, at.col);
#pragma GCC unroll 4
		for (u32 k = 0; k < 4; k++) {
			float d = fp::sub(x.v[k], fp::mul(sum.v[k], p.Share));
			x.v[k] = fp::mul(d, d);
		}
		store_quad(at, p.Out, at.at, x);
	}
}

HX_KERNEL(batch_spread, NormParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.Cols);
	for (i64 c = s.lo + dev::tid(); c < s.hi; c += dev::threads()) {
		float squares = dev::ld(dev::at<float>(p.Squares, c));
		dev::st(dev::at<float>(p.Spread, c), fp::div(1.0f, fp::root(fp::add(fp::mul(squares, p.Share), p.Eps))));
	}
}

HX_KERNEL(batch_norm, NormParams) {
	if (dev::dropped(hx)) return;
	const Quads q = quads_of(p.Rows, p.Cols, p.X | p.Out | p.Sum | p.Spread | p.Gamma | p.Beta);
	Share s = block_share(q.all);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		Spot at = spot_of(q, i);
		Quad v = normal(p, at), gamma = load_quad(at, p.Gamma, at.col), beta = load_quad(at, p.Beta, at.col);
#pragma GCC unroll 4
		for (u32 k = 0; k < 4; k++) v.v[k] = fp::add(fp::mul(v.v[k], gamma.v[k]), beta.v[k]);
		store_quad(at, p.Out, at.at, v);
	}
}

HX_KERNEL(batch_dot, NormParams) {
	if (dev::dropped(hx)) return;
	const Quads q = quads_of(p.Rows, p.Cols, p.X | p.Out | p.Grad | p.Sum | p.Spread);
	Share s = block_share(q.all);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		Spot at = spot_of(q, i);
		Quad v = normal(p, at), g = load_quad(at, p.Grad, at.at);
#pragma GCC unroll 4
		for (u32 k = 0; k < 4; k++) v.v[k] = fp::mul(g.v[k], v.v[k]);
		store_quad(at, p.Out, at.at, v);
	}
}

HX_KERNEL(batch_norm_bwd, NormParams) {
	if (dev::dropped(hx)) return;
	const Quads q = quads_of(p.Rows, p.Cols, p.X | p.Grad | p.Sum | p.Spread | p.Gamma | p.DGamma | p.DBeta);
	Share s = block_share(q.all);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) {
		Spot at = spot_of(q, i);
		Quad v = normal(p, at), g = load_quad(at, p.Grad, at.at), spread = load_quad(at, p.Spread, at.col);
		Quad gamma = load_quad(at, p.Gamma, at.col), turn = load_quad(at, p.DGamma, at.col), shift = load_quad(at, p.DBeta, at.col);
#pragma GCC unroll 4
		for (u32 k = 0; k < 4; k++) {
			float d = fp::sub(fp::sub(g.v[k], fp::mul(shift.v[k], p.Share)), fp::mul(v.v[k], fp::mul(turn.v[k], p.Share)));
			v.v[k] = fp::mul(fp::mul(gamma.v[k], spread.v[k]), d);
		}
		store_quad(at, p.X, at.at, v);
	}
}

HX_KERNEL(batch_running, NormParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.Cols);
	for (i64 c = s.lo + dev::tid(); c < s.hi; c += dev::threads()) {
		float old = fp::mul(dev::ld(dev::at<float>(p.X, c)), fp::sub(1.0f, p.Momentum));
		float now = fp::add(old, fp::mul(fp::mul(dev::ld(dev::at<float>(p.Sum, c)), p.Share), p.Momentum));
		dev::st(dev::at<float>(p.Out, c), now);
		dev::st(dev::at<float>(p.Grad, c), now);
	}
}
