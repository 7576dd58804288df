// square_sum, clip_factor, adam: one step of the optimiser over all parameters. Reference: gnn/kernels.go, of adam at every
// level of internal/simd, to the bit, for any grid and any block of whole warps.
//
// square_sum adds the squares of each squareUnit gradients, clip_factor the sums: the norm of all of them, and the factor that
// brings it down to Limit. Sums are float64, in which the square of a float32 is exact. Each lane has four, of every fourth
// float of its words in order; they are added in pairs, then the lanes', by shuffles in the order of a tree. The tree depends
// on N alone. A warp takes a unit; one warp adds their sums. Bytes: 4 read per parameter.
//
// adam: N parameters P with gradients G and moments M and V, all float32 (Kingma and Ba, ICLR 2015, algorithm 1, with the
// corrections in StepSize and RootC2); where Factor is given, G counts times the float there. One pass over them instead of one for each line of the algorithm; each operation is
// rounded by itself, in the host's order, not fused.
//
// A thread takes four parameters at a time by 16-byte loads and stores, four of them in flight, coalesced; single ones at the end
// or where an address is odd. No shared memory, no barrier, no two threads on one element.
//
// Bytes per parameter: 16 read, 12 written. Bound by HBM, 28 bytes: 1 M parameters take 9 µs at 3 TB/s, mostly the launch.
// Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "agg.h"
#include "device.h"

namespace {

HX_DEVICE inline double shuffle(double v, u32 src) { return fp::of_bits(dev::shfl(dev::full_mask, fp::bits(v), src)); }

// The sum over a warp, in every lane.
HX_DEVICE inline double warp_sum(double v) {
	for (u32 d = 16; d > 0; d /= 2) v = fp::add(v, shuffle(v, dev::lane() ^ d));
	return v;
}

HX_DEVICE inline void add_square(double &sum, float g) { sum = fp::add(sum, fp::mul((double)g, (double)g)); }

// The sum of the squares of the unit that begins at float from, in every lane of a warp.
HX_DEVICE inline double unit_sum(const ClipParams &p, i64 from, bool wide) {
	double sum[4] = {};
	const float *g = dev::at<float>(p.G);
#pragma GCC unroll 4
	for (u32 k = 0; k < squareUnit / 128; k++) {
		i64 i = from + k * 128 + dev::lane() * 4;
		if (wide && i + 4 <= p.N) {
			Floats<4> x = load_floats<4>(g + i);
#pragma GCC unroll 4
			for (u32 c = 0; c < 4; c++) add_square(sum[c], x.v[c]);
		} else {
#pragma GCC unroll 4
			for (u32 c = 0; c < 4; c++) {
				if (i + c < p.N) add_square(sum[c], dev::ld(&g[i + c]));
			}
		}
	}
	return warp_sum(fp::add(fp::add(sum[0], sum[1]), fp::add(sum[2], sum[3])));
}

HX_DEVICE inline void update(const AdamConstants &q, float &x, float g, float &m, float &v) {
	g = fp::add(g, fp::mul(q.L2, x));
	x = fp::sub(x, fp::mul(q.Decay, x));
	m = fp::add(fp::mul(q.B1, m), fp::mul(q.C1, g));
	v = fp::add(fp::mul(q.B2, v), fp::mul(q.C2, fp::mul(g, g)));
	float root = fp::add(fp::mul(fp::root(v), q.RootC2), q.Eps);
	x = fp::sub(x, fp::div(fp::mul(q.StepSize, m), root));
}

template <u32 n> HX_DEVICE inline void step(const AdamParams &p, float factor, i64 i) {
	Floats<n> x = load_floats<n>(dev::at<float>(p.P, i)), g = load_floats<n>(dev::at<float>(p.G, i));
	Floats<n> m = load_floats<n>(dev::at<float>(p.M, i)), v = load_floats<n>(dev::at<float>(p.V, i));
#pragma GCC unroll 4
	for (u32 k = 0; k < n; k++) update(p.AdamStep, x.v[k], fp::mul(g.v[k], factor), m.v[k], v.v[k]);
	store_floats<n>(dev::at<float>(p.P, i), x);
	store_floats<n>(dev::at<float>(p.M, i), m);
	store_floats<n>(dev::at<float>(p.V, i), v);
}

} // namespace

HX_KERNEL(square_sum, ClipParams) {
	if (dev::dropped(hx)) return;
	bool wide = floats_at_once(p.G, 4) == 4;
	Share s = block_share((p.N + squareUnit - 1) / squareUnit);
	for (i64 u = s.lo + dev::tid() / 32; u < s.hi; u += dev::threads() / 32) {
		double sum = unit_sum(p, u * squareUnit, wide);
		if (dev::lane() == 0) dev::st(dev::at<double>(p.Parts, u), sum);
	}
}

HX_KERNEL(clip_factor, ClipParams) {
	if (dev::dropped(hx) || dev::bid() != 0 || dev::tid() >= 32) return;
	constexpr u32 ahead = 8;
	i64 parts = (p.N + squareUnit - 1) / squareUnit;
	double sum = 0;
	for (i64 from = dev::lane(); from < parts; from += 32 * ahead) {
		double v[ahead];
#pragma GCC unroll 8
		for (u32 k = 0; k < ahead; k++) v[k] = from + 32 * k < parts ? dev::ld(dev::at<double>(p.Parts, from + 32 * k)) : 0;
#pragma GCC unroll 8
		for (u32 k = 0; k < ahead; k++) sum = fp::add(sum, v[k]);
	}
	sum = warp_sum(sum);
	if (dev::lane() != 0) return;
	float factor = fp::div(p.Limit, fp::add(fp::root((float)sum), 1e-6f));
	dev::st(dev::at<float>(p.Factor), factor > 1.0f ? 1.0f : factor);
	dev::st(dev::at<double>(p.Sum), sum);
}

HX_KERNEL(adam, AdamParams) {
	if (dev::dropped(hx)) return;
	float factor = p.Factor == 0 ? 1.0f : dev::ld(dev::at<float>(p.Factor));
	i64 wide = floats_at_once(p.P | p.G | p.M | p.V, 4) == 4 ? p.N / 4 : 0;
	Share s = block_share(wide);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) step<4>(p, factor, i * 4);
	s = block_share(p.N - wide * 4);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) step<1>(p, factor, wide * 4 + i);
}
