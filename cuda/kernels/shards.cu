// shard_sum: Out = Weight · X, and + Y where Y is given, over N float32: a shard's share of a step's gradient, and the sum of two such.
// Reference: gnn/shards.go, to the bit, for any grid and any block of whole warps: product and sum are rounded each by itself. Out may
// be X or Y. A thread takes four floats at a time by 16-byte loads and stores, single ones at the end or where an address is odd. No
// shared memory, no barrier, no two threads on one element. Bytes: 8 per element, 12 with Y. Not measured: no GPU was at hand.
#include "abi_agg.h"
#include "agg.h"
#include "device.h"

namespace {

template <u32 n> HX_DEVICE inline void sum(const ShardParams &p, i64 i) {
	Floats<n> x = load_floats<n>(dev::at<float>(p.X, i)), y = {};
	if (p.Y) y = load_floats<n>(dev::at<float>(p.Y, i));
#pragma GCC unroll 4
	for (u32 k = 0; k < n; k++) {
		x.v[k] = fp::mul(x.v[k], p.Weight);
		if (p.Y) x.v[k] = fp::add(y.v[k], x.v[k]);
	}
	store_floats<n>(dev::at<float>(p.Out, i), x);
}

} // namespace

HX_KERNEL(shard_sum, ShardParams) {
	if (dev::dropped(hx)) return;
	i64 wide = floats_at_once(p.Out | p.X | p.Y, 4) == 4 ? p.N / 4 : 0;
	Share s = block_share(wide);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) sum<4>(p, i * 4);
	s = block_share(p.N - wide * 4);
	for (i64 i = s.lo + dev::tid(); i < s.hi; i += dev::threads()) sum<1>(p, wide * 4 + i);
}
