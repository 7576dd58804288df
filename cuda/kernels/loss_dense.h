// Losses over labels and numbers: a module for each has a struct with the loss and the slope of one output.
//
//	loss_NAME   a warp for each row: the row's loss, the sum over its targets that are there (no NaN), and the gradient of the
//	            mean by its outputs. Right is 1 where there are targets and the outputs' signs say all of them.
//
// Reference: gnn/loss.go, for any grid and any block of whole warps, to the bit where the host is an amd64 with FMA (see
// loss.cu). The sum goes through the lanes in order by shuffles. Outcome and Targets are in pinned memory: each block reads
// the one once, over PCIe, and each row's targets are read once here and once by dense_count.
//
// Bytes per target: 12 with a gradient, beside 12 a row. A row of one number leaves 31 lanes idle, which a mini-batch of some
// thousand rows does not feel. Not measured: no GPU was at hand.
#pragma once

#include "loss.h"

struct Element {
	double loss, slope;
};

template <typename L> HX_DEVICE inline void dense_rows(double *factor, const DenseParams &p) {
	double scale = mean_factor(factor, p.Grad, p.Outcome);
	u32 lane = dev::lane();
	double keep = fp::sub(1.0, p.Smoothing), half = fp::mul(p.Smoothing, 0.5);
	Share s = block_share(p.Rows);
	for (i64 i = s.lo + dev::tid() / 32; i < s.hi; i += dev::threads() / 32) {
		double sum = 0;
		u32 some = 0, wrong = 0;
		for (i64 base = 0; p.Targets != 0 && base < p.Cols; base += 32) {
			i64 c = base + lane;
			Element e = {};
			bool there = false, other = false;
			if (c < p.Cols) {
				float z = dev::ld(dev::at<float>(p.Outputs, i * p.Cols + c)), t = dev::ld(dev::at<float>(p.Targets, i * p.Cols + c));
				there = t == t;
				other = there && (z > 0) != (t > 0.5f);
				double to = t, w = p.Weights == 0 ? 1.0 : (double)dev::ld(dev::at<float>(p.Weights, c));
				if (p.Smoothing > 0) to = fp::add(fp::mul(to, keep), half);
				if (there) e = L::of(z, to, w);
				if (p.Grad != 0) dev::st(dev::at<float>(p.Grad, i * p.Cols + c), (float)fp::mul(e.slope, scale));
			}
			some |= dev::ballot(dev::full_mask, there);
			wrong |= dev::ballot(dev::full_mask, other);
			sum = add_lanes(sum, e.loss, lanes_of(p.Cols - base));
		}
		if (lane != 0) continue;
		dev::st(dev::at<double>(p.Loss, i), sum);
		dev::st(dev::at<i32>(p.Right, i), (i32)(some != 0 && wrong == 0));
	}
}
