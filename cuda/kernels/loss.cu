// xent_count, softmax_xent, xent_sum: softmax cross-entropy, its gradient, predictions and their count. Reference:
// gnn/kernels.go, for any grid and any block of whole warps: to the bit where the host is an amd64 with FMA (its math.Exp
// and math.Log are followed step by step, see fp.h); elsewhere Go's functions are others, the losses are within 4 units of the
// last place of a float64, and a gradient may be rounded to the next float32.
//
//	xent_count     one block: labelled rows and their weights, by which the gradient is divided, and a label out of range (the
//	               first one)
//	softmax_xent   a warp for each row: prediction (the first of the largest logits), loss log Σ exp(z - top) - (z_y - top), and
//	               gradient (softmax - onehot) / counted, in float64. Each lane has the exp of its classes; the sum goes through all of
//	               them in order by shuffles, in every lane the same, so that it is the host's. With weights or smoothing each
//	               class has its part of the loss: two sums more of the same kind
//	xent_sum       one block: a thread sums 64 rows in order, thread 0 their sums in order, for any number of threads
//
// Outcome is in pinned memory: each block reads it once, over PCIe. Shared memory between barriers.
//
// Bytes per row: 8×Classes, the logits a second time from L1; 16 of label, loss and prediction. exp of a float64 costs some 40
// operations, twice for each logit: 8000 rows of 172 classes take 0.1 GFLOP, which only GPUs with few float64 units feel.
// Not measured: no GPU was at hand.
#include "loss.h"

namespace {

struct Best {
	float v;
	i64 at; // -1: none yet
};

// The first of the largest, as the host's "v > z[best]" from 0 up finds it: a NaN is never larger, and nothing is larger than
// a NaN at 0.
HX_DEVICE inline Best largest(const float *z, i64 classes) {
	Best b = {0, -1};
	for (i64 c = dev::lane(); c < classes; c += 32) {
		float v = dev::ld(&z[c]);
		if (b.at < 0 ? v == v : v > b.v) b = {v, c};
	}
	for (u32 d = 16; d > 0; d /= 2) {
		u32 from = dev::lane() ^ d;
		float v = shuffle(b.v, from);
		i64 at = dev::shfl(dev::full_mask, b.at, from);
		if (at >= 0 && (b.at < 0 || v > b.v || (v == b.v && at < b.at))) b = {v, at};
	}
	float first = dev::ld(&z[0]);
	if (b.at < 0 || first != first) b = {first, 0};
	return {dev::ld(&z[b.at]), b.at}; // of equals, 0 and -0, the one that was found
}

// The part that class c has in the loss of a row with label y.
HX_DEVICE inline double part_of(const XentParams &p, i64 c, i64 y, double label, double each) {
	double w = p.Weights == 0 ? 1.0 : (double)dev::ld(dev::at<float>(p.Weights, c));
	return fp::mul(w, c == y ? fp::add(each, label) : each);
}

} // namespace

// The largest block, which gnn launches: whichever compiler the driver has, it must find registers for that.
HX_THREADS(xent_count, XentParams, 1024)
HX_KERNEL(xent_count, XentParams) {
	HX_SHARED(i64, sums, 32);
	HX_SHARED(double, parts, 1024);
	if (dev::dropped(hx) || dev::bid() != 0) return;
	i64 n = 0, bad = p.Rows; // the first row with no such label
	for (i64 i = dev::tid(); p.Labels != 0 && i < p.Rows; i += dev::threads()) {
		i64 y = dev::ld(dev::at<i32>(p.Labels, i));
		n += y >= 0;
		if ((y < -1 || y >= p.Classes) && i < bad) bad = i;
	}
	n = block_sum(sums, n);
	for (u32 d = 16; d > 0; d /= 2) {
		i64 o = dev::shfl(dev::full_mask, bad, dev::lane() ^ d);
		if (o < bad) bad = o;
	}
	if (dev::lane() == 0) dev::st(&sums[dev::tid() / 32], bad);
	dev::syncthreads();
	for (u32 w = 0; w < dev::threads() / 32; w++) {
		i64 o = dev::ld(&sums[w]);
		if (o < bad) bad = o;
	}
	double mass = 0;
	if (bad >= p.Rows && n > 0 && p.Weights != 0) {
		mass = sum_rows(parts, p.Rows, [&] HX_DEVICE(i64 from, i64 to) {
			double leaf = 0;
			for (i64 i = from; i < to; i++) {
				i64 y = dev::ld(dev::at<i32>(p.Labels, i));
				if (y >= 0) leaf = fp::add(leaf, (double)dev::ld(dev::at<float>(p.Weights, y)));
			}
			return leaf;
		});
	}
	if (dev::tid() != 0) return;
	if (bad < p.Rows) {
		dev::fail(hx, 1, (u64)(i64)dev::ld(dev::at<i32>(p.Labels, bad)), (u64)bad, (u64)(p.Classes - 1));
		return;
	}
	Outcome *o = dev::at<Outcome>(p.Outcome);
	dev::st(&o->Loss, 0.0);
	dev::st(&o->Correct, (i64)0);
	dev::st(&o->Counted, n);
	dev::st(&o->Mass, mass);
}

HX_KERNEL(softmax_xent, XentParams) {
	HX_SHARED(double, factor, 1);
	if (dev::dropped(hx)) return;
	double scale = mean_factor(factor, p.Grad, p.Outcome);
	bool plain = p.Weights == 0 && p.Smoothing == 0;
	double label = fp::sub(1.0, p.Smoothing), each = fp::div(p.Smoothing, (double)p.Classes);
	u32 lane = dev::lane();
	Share s = block_share(p.Rows);
	for (i64 i = s.lo + dev::tid() / 32; i < s.hi; i += dev::threads() / 32) {
		const float *z = dev::at<float>(p.Logits, i * p.Classes);
		Best best = largest(z, p.Classes);
		i64 y = p.Labels == 0 ? -1 : dev::ld(dev::at<i32>(p.Labels, i));
		if (lane == 0) dev::st(dev::at<i32>(p.Pred, i), (i32)best.at);
		if (y < 0) {
			if (lane == 0) dev::st(dev::at<double>(p.Loss, i), 0.0);
			for (i64 c = lane; p.Grad != 0 && c < p.Classes; c += 32) dev::st(dev::at<float>(p.Grad, i * p.Classes + c), 0.0f);
			continue;
		}
		double top = best.v, sum = 0;
		for (i64 base = 0; base < p.Classes; base += 32) {
			i64 c = base + lane;
			double e = c < p.Classes ? fp::exp_down(fp::sub((double)dev::ld(&z[c]), top)) : 0;
			sum = add_lanes(sum, e, lanes_of(p.Classes - base));
		}
		double log = fp::log_up(sum), loss = fp::sub(log, fp::sub((double)dev::ld(&z[y]), top)), all = 1;
		if (!plain) {
			loss = all = 0;
			for (i64 base = 0; base < p.Classes; base += 32) {
				i64 c = base + lane;
				double part = 0, l = 0;
				if (c < p.Classes) {
					part = part_of(p, c, y, label, each);
					l = fp::mul(part, fp::sub(log, fp::sub((double)dev::ld(&z[c]), top)));
				}
				loss = add_lanes(loss, l, lanes_of(p.Classes - base));
				all = add_lanes(all, part, lanes_of(p.Classes - base));
			}
		}
		if (lane == 0) dev::st(dev::at<double>(p.Loss, i), loss);
		if (p.Grad == 0) continue;
		for (i64 c = lane; c < p.Classes; c += 32) {
			double q = fp::div(fp::exp_down(fp::sub((double)dev::ld(&z[c]), top)), sum);
			if (!plain)
				q = fp::sub(fp::mul(q, all), part_of(p, c, y, label, each));
			else if (c == y)
				q = fp::sub(q, 1.0);
			dev::st(dev::at<float>(p.Grad, i * p.Classes + c), (float)fp::mul(q, scale));
		}
	}
}

HX_THREADS(xent_sum, XentParams, 1024)
HX_KERNEL(xent_sum, XentParams) {
	HX_SHARED(double, parts, 1024);
	HX_SHARED(i64, sums, 32);
	constexpr u32 ahead = 8;
	static_assert(lossLeaf % ahead == 0, "a leaf is whole steps");
	if (dev::dropped(hx) || dev::bid() != 0 || p.Labels == 0) return;
	i64 correct = 0;
	double sum = sum_rows(parts, p.Rows, [&] HX_DEVICE(i64 from, i64 to) {
		double leaf = 0;
		for (i64 i = from; i < to; i += ahead) {
			i32 y[ahead], pred[ahead];
			double loss[ahead];
#pragma GCC unroll 8
			for (u32 u = 0; u < ahead; u++) {
				y[u] = -1;
				if (i + u >= to) continue;
				y[u] = dev::ld(dev::at<i32>(p.Labels, i + u));
				pred[u] = dev::ld(dev::at<i32>(p.Pred, i + u));
				loss[u] = dev::ld(dev::at<double>(p.Loss, i + u));
			}
#pragma GCC unroll 8
			for (u32 u = 0; u < ahead; u++) {
				if (y[u] < 0) continue;
				leaf = fp::add(leaf, loss[u]);
				correct += pred[u] == y[u];
			}
		}
		return leaf;
	});
	correct = block_sum(sums, correct);
	if (dev::tid() != 0) return;
	Outcome *o = dev::at<Outcome>(p.Outcome);
	double n = dev::ld(&o->Mass);
	if (n == 0) n = (double)dev::ld(&o->Counted);
	if (n > 0) dev::st(&o->Loss, fp::div(sum, n));
	dev::st(&o->Correct, correct);
}
