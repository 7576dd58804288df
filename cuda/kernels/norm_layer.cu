// layer_norm, layer_norm_bwd: normalisation of rows (Ba et al., 2016). Reference: gnn/norm_layer.go, to the bit, for any grid and any
// block of whole warps.
//
//	layer_norm       Out[i] = Gamma · (X[i] - mean) · Spread[i] + Beta, Spread = 1/sqrt(variance + Eps); Sum[i] = Σ X[i]. Out may be X
//	layer_norm_bwd   with x^ = (X[i] - mean) · Spread[i]: Out[i] = Grad[i] · x^, whose sums are the gradient of Gamma, and
//	                 X[i] = (Gamma · Grad[i] - Σ Gamma · Grad / Cols - x^ Σ Gamma · Out / Cols) · Spread[i], the gradient by X
//
// A warp for each row, each lane with every 32nd column, coalesced; sums as dot.h. A row is read twice or three times, again from
// L1. No shared memory, no barrier. Bytes: 8 per element forward, 16 backward. Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "agg.h"
#include "dot.h"

HX_KERNEL(layer_norm, NormParams) {
	if (dev::dropped(hx)) return;
	const float *gamma = dev::at<float>(p.Gamma), *beta = dev::at<float>(p.Beta);
	Share s = block_share(p.Rows);
	for (i64 i = s.lo + dev::tid() / 32; i < s.hi; i += dev::threads() / 32) {
		const float *x = dev::at<float>(p.X, i * p.Cols);
		float *out = dev::at<float>(p.Out, i * p.Cols);
		float sum = 0, squares = 0;
		for (i64 c = dev::lane(); c < p.Cols; c += 32) sum = fp::add(sum, dev::ld(x + c));
		sum = sum_lanes(sum, 32);
		float mean = fp::mul(sum, p.Share);
		for (i64 c = dev::lane(); c < p.Cols; c += 32) {
			float d = fp::sub(dev::ld(x + c), mean);
			squares = fp::add(squares, fp::mul(d, d));
		}
		squares = sum_lanes(squares, 32);
		float spread = fp::div(1.0f, fp::root(fp::add(fp::mul(squares, p.Share), p.Eps)));
		for (i64 c = dev::lane(); c < p.Cols; c += 32) {
			float d = fp::mul(fp::sub(dev::ld(x + c), mean), spread);
			dev::st(out + c, fp::add(fp::mul(d, dev::ld(gamma + c)), dev::ld(beta + c)));
		}
		if (dev::lane() == 0) {
			dev::st(dev::at<float>(p.Sum, i), sum);
			dev::st(dev::at<float>(p.Spread, i), spread);
		}
	}
}

HX_KERNEL(layer_norm_bwd, NormParams) {
	if (dev::dropped(hx)) return;
	const float *gamma = dev::at<float>(p.Gamma);
	Share s = block_share(p.Rows);
	for (i64 i = s.lo + dev::tid() / 32; i < s.hi; i += dev::threads() / 32) {
		float *x = dev::at<float>(p.X, i * p.Cols), *out = dev::at<float>(p.Out, i * p.Cols);
		const float *grad = dev::at<float>(p.Grad, i * p.Cols);
		float mean = fp::mul(dev::ld(dev::at<float>(p.Sum, i)), p.Share), spread = dev::ld(dev::at<float>(p.Spread, i));
		float shift = 0, turn = 0;
		for (i64 c = dev::lane(); c < p.Cols; c += 32) {
			float hat = fp::mul(fp::sub(dev::ld(x + c), mean), spread), g = dev::ld(grad + c), w = dev::ld(gamma + c), t = fp::mul(g, hat);
			dev::st(out + c, t);
			shift = fp::add(shift, fp::mul(g, w));
			turn = fp::add(turn, fp::mul(t, w));
		}
		shift = fp::mul(sum_lanes(shift, 32), p.Share);
		turn = fp::mul(sum_lanes(turn, 32), p.Share);
		for (i64 c = dev::lane(); c < p.Cols; c += 32) {
			float hat = fp::mul(fp::sub(dev::ld(x + c), mean), spread), g = fp::mul(dev::ld(grad + c), dev::ld(gamma + c));
			dev::st(x + c, fp::mul(fp::sub(fp::sub(g, shift), fp::mul(hat, turn)), spread));
		}
	}
}
