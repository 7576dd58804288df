// adam: one step of the optimiser over all parameters. Reference: gnn/kernels.go (adam) at every level of internal/simd, to
// the bit, for any grid and any block of whole warps.
//
// N parameters P with gradients G and moments M and V, all float32 (Kingma and Ba, ICLR 2015, algorithm 1, with the
// corrections in StepSize and RootC2). One pass over them instead of one for each line of the algorithm; each operation is
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

HX_DEVICE inline void update(const AdamConstants &q, float &x, float g, float &m, float &v) {
	g = fp::add(g, fp::mul(q.L2, x));
	x = fp::sub(x, fp::mul(q.Decay, x));
	m = fp::add(fp::mul(q.B1, m), fp::mul(q.C1, g));
	v = fp::add(fp::mul(q.B2, v), fp::mul(q.C2, fp::mul(g, g)));
	float root = fp::add(fp::mul(fp::root(v), q.RootC2), q.Eps);
	x = fp::sub(x, fp::div(fp::mul(q.StepSize, m), root));
}

template <u32 n> HX_DEVICE inline void step(const AdamParams &p, i64 i) {
	Floats<n> x = load_floats<n>(dev::at<float>(p.P, i)), g = load_floats<n>(dev::at<float>(p.G, i));
	Floats<n> m = load_floats<n>(dev::at<float>(p.M, i)), v = load_floats<n>(dev::at<float>(p.V, i));
#pragma GCC unroll 4
	for (u32 k = 0; k < n; k++) update(p.AdamStep, x.v[k], g.v[k], m.v[k], v.v[k]);
	store_floats<n>(dev::at<float>(p.P, i), x);
	store_floats<n>(dev::at<float>(p.M, i), m);
	store_floats<n>(dev::at<float>(p.V, i), v);
}

} // namespace

HX_KERNEL(adam, AdamParams) {
	if (dev::dropped(hx)) return;
	i64 wide = floats_at_once(p.P | p.G | p.M | p.V, 4) == 4 ? p.N / 4 : 0;
	Share s = block_share(wide);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) step<4>(p, i * 4);
	s = block_share(p.N - wide * 4);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) step<1>(p, wide * 4 + i);
}
