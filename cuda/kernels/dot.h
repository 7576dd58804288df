// Dot products as internal/simd (Dot) has them: lane k mod 32 sums its products in order, and the lanes are added as a tree.
#pragma once

#include "device.h"
#include "fp.h"

// The sum of what the lanes of each group of so many have, in all of them: 16 apart, then 8, 4, 2 and 1. All lanes of the warp
// call it.
HX_DEVICE inline float sum_lanes(float d, u32 size) {
	for (u32 far = size / 2; far > 0; far /= 2) {
		d = fp::add(d, fp::of_bits(dev::shfl(dev::full_mask, fp::bits(d), dev::lane() ^ far)));
	}
	return d;
}

// The products of columns lane, lane + size, … of two rows; a group's lanes call it for one row, and sum_lanes ends it.
HX_DEVICE inline float dot_lane(const float *a, const float *b, i64 dim, u32 lane, u32 size) {
	float d = 0;
	for (i64 k = lane; k < dim; k += size) d = fp::add(d, fp::mul(dev::ld(a + k), dev::ld(b + k)));
	return d;
}
