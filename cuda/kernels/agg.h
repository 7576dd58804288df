// Shared by the aggregations and the transpose: the weights of edges (gnn/kernels.go, edgeWeights) and rows
// cut among the lanes of warps.
#pragma once

#include "abi_agg.h"
#include "device.h"
#include "fp.h"
#include "scan.h"

// 1 / sqrt(degree + 1), rounded at each step. The host takes the root in float64 and rounds that to float32, which is the
// same: 53 bits are more than twice 24 and two (Figueroa, "When is double rounding innocuous?", SIGNUM 30(3), 1995).
HX_DEVICE inline float inverse_root(u32 degree) { return fp::div(1.0f, fp::root(fp::add((float)degree, 1.0f))); }

// The part of an edge's weight that all edges of a destination have in common, s sampled neighbours or the sum of their
// weights.
HX_DEVICE inline float weight_over(const AggParams &p, bool gcn, i64 i, float s) {
	if (!gcn) return fp::div(1.0f, s);
	u32 degree = dev::ld(dev::at<u32>(p.Degrees, i));
	return fp::mul(fp::div((float)degree, s), inverse_root(degree));
}

// The same for a destination with that many edges; agg_weights has made it where the block has weights.
HX_DEVICE inline float weight_of_destination(const AggParams &p, bool gcn, i64 i, i64 edges) {
	if (p.DstWeights != 0) return dev::ld(dev::at<float>(p.DstWeights, i));
	return weight_over(p, gcn, i, (float)edges);
}

// The part that all edges of a source have in common.
HX_DEVICE inline float weight_of_source(const AggParams &p, bool gcn, i64 j) {
	float w = gcn ? inverse_root(dev::ld(dev::at<u32>(p.Degrees, j))) : 1.0f;
	if (p.SrcWeights == 0) return w;
	float own = dev::ld(dev::at<float>(p.SrcWeights, j));
	return gcn ? fp::mul(own, w) : own;
}

// The weight of the self loop; self_weights has made it where only the remaining ones are added.
HX_DEVICE inline float weight_of_self(const AggParams &p, i64 i) {
	if (p.SelfWeights != 0) return dev::ld(dev::at<float>(p.SelfWeights, i));
	return fp::div(1.0f, fp::add((float)dev::ld(dev::at<u32>(p.Degrees, i)), 1.0f));
}

// N floats that move as one access.
template <u32 n> struct Floats {
	float v[n];
};

template <u32 n> HX_DEVICE inline Floats<n> load_floats(const float *p) {
	Floats<n> f;
	if constexpr (n == 4) {
		u32x4 w = dev::ld16(p);
		f = {{fp::of_bits(w.x), fp::of_bits(w.y), fp::of_bits(w.z), fp::of_bits(w.w)}};
	} else if constexpr (n == 2) {
		u64 w = dev::ld(reinterpret_cast<const u64 *>(p));
		f = {{fp::of_bits((u32)w), fp::of_bits((u32)(w >> 32))}};
	} else {
		f.v[0] = dev::ld(p);
	}
	return f;
}

template <u32 n> HX_DEVICE inline void store_floats(float *p, const Floats<n> &f) {
	if constexpr (n == 4) {
		dev::st16(p, u32x4{fp::bits(f.v[0]), fp::bits(f.v[1]), fp::bits(f.v[2]), fp::bits(f.v[3])});
	} else if constexpr (n == 2) {
		dev::st(reinterpret_cast<u64 *>(p), fp::bits(f.v[0]) | (u64)fp::bits(f.v[1]) << 32);
	} else {
		dev::st(p, f.v[0]);
	}
}

// A lane's place in a unit of a warp's work: n columns of a row. Rows of 32 words of n floats and more are cut into stripes of
// 32 words, one of them to a unit; of narrower ones a warp takes several rows at once, a power of two of lanes to each.
struct Place {
	i64 row, word; // word < 0: nothing for this lane
};

struct Cut {
	i64 rows, words, units;
	u32 stripes; // of a row
	u32 group;   // lanes of a row
};

HX_DEVICE inline Cut cut_rows(i64 rows, i64 words) {
	Cut c = {rows, words, 0, 1, 1};
	if (words >= 32) {
		c.stripes = (u32)((words + 31) / 32);
		c.group = 32;
		c.units = rows * c.stripes;
		return c;
	}
	while (c.group < words) c.group *= 2;
	u32 per = 32 / c.group;
	c.units = (rows + per - 1) / per;
	return c;
}

HX_DEVICE inline Place place_of(const Cut &c, i64 unit) {
	if (c.group == 32) {
		i64 row;
		if ((u64)c.units >> 32 == 0) { // a 64-bit division is slow on a GPU
			row = (u32)unit / c.stripes;
		} else {
			row = unit / c.stripes;
		}
		i64 word = (unit - row * c.stripes) * 32 + dev::lane();
		return {row, word < c.words ? word : -1};
	}
	i64 row = unit * (32 / c.group) + dev::lane() / c.group, word = dev::lane() % c.group;
	return {row, row < c.rows && word < c.words ? word : -1};
}

// The widest access that rows of dim floats at these addresses (or-ed) allow, in floats.
HX_DEVICE inline u32 floats_at_once(u64 addresses, i64 dim) {
	u64 odd = (addresses | (u64)dim * 4) % 16;
	return odd == 0 ? 4 : odd % 8 == 0 ? 2 : 1;
}
