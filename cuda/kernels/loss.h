// Parts that losses share: values of a warp in order, and the sum over rows in a fixed tree. Reference: gnn/loss.go.
#pragma once

#include "abi_agg.h"
#include "device.h"
#include "fp.h"
#include "scan.h"

HX_DEVICE inline double shuffle(double v, u32 src) { return fp::of_bits(dev::shfl(dev::full_mask, fp::bits(v), src)); }
HX_DEVICE inline float shuffle(float v, u32 src) { return fp::of_bits(dev::shfl(dev::full_mask, fp::bits(v), src)); }

// sum + v of the first n lanes, in their order: in every lane the same, and the host's.
HX_DEVICE inline double add_lanes(double sum, double v, u32 n) {
	for (u32 k = 0; k < n; k++) sum = fp::add(sum, shuffle(v, k));
	return sum;
}

HX_DEVICE inline u32 lanes_of(i64 left) { return left < 32 ? (u32)left : 32; }

// The factor of gradients: 1 by what the mean divides by, in every thread. shared is of one value.
HX_DEVICE inline double mean_factor(double *shared, u64 grad, u64 outcome) {
	if (dev::tid() == 0) {
		double n = 0;
		if (grad != 0) {
			const Outcome *o = dev::at<Outcome>(outcome);
			n = dev::ld(&o->Mass);
			if (n == 0) n = (double)dev::ld(&o->Counted);
		}
		dev::st(&shared[0], n > 0 ? fp::div(1.0, n) : 0.0);
	}
	dev::syncthreads();
	return dev::ld(&shared[0]);
}

// The sum over rows, for one block of up to 1024 threads: a thread sums lossLeaf rows in order, thread 0 their sums in order.
// leaf(from, to) is the sum of some rows. parts is shared memory for 1024 values; thread 0 has the result.
template <typename Leaf> HX_DEVICE inline double sum_rows(double *parts, i64 rows, Leaf leaf) {
	i64 leaves = (rows + lossLeaf - 1) / lossLeaf;
	double sum = 0;
	for (i64 base = 0; base < leaves; base += dev::threads()) {
		i64 from = (base + dev::tid()) * lossLeaf, to = from + lossLeaf < rows ? from + lossLeaf : rows;
		dev::st(&parts[dev::tid()], leaf(from, to));
		dev::syncthreads();
		for (i64 k = 0; dev::tid() == 0 && k < dev::threads() && base + k < leaves; k++) sum = fp::add(sum, dev::ld(&parts[k]));
		dev::syncthreads();
	}
	return sum;
}
