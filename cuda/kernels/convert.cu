// convert_rows: widens rows as they are stored (internal/rowtype) to float32. Reference: cache/convert.go
// (convertKernel) and internal/simd/convert.go, to the bit, for any grid and any block of whole warps.
//
// Row i of Src, RowBytes long, becomes row i of Dst, Dim float32, both without gaps:
//
//	1 float16    Dim halves, zero-padded to a word
//	2 bfloat16   the upper halves of Dim float32, zero-padded to a word
//	3 int8       Dim signed bytes, zero-padded to a word: value = byte × Scales[Nodes[i]]
//
// A block takes a contiguous share of the rows, its warps take turns. A group of 1 to 32 lanes (as many as
// a row has words, rounded up to a power of two) does one row, so a warp works on 32/group rows at once. A
// lane loads a word of 2 halves or 4 bytes and stores as many floats, in one access where Dst and Dim allow.
//
// float16 is widened by integer arithmetic and one exact subtraction, not by cvt: cvt.f32.f16 makes every
// NaN the same one, F16C and Go keep its payload. The product of int8 is rounded once, as in Go.
//
// No shared memory, no barrier; no two threads write the same byte. The caller's next launch on the
// stream sees all of it.
//
// The lanes of a group read the same node and the same scale, each one transaction. The table of scales may lie
// in pinned memory of the CPU: a sector of 32 bytes a row crosses the bus then.
//
// Bytes per row: RowBytes + 4×Dim, and 8 + 32 for a scale. Bound by HBM: expect 80 to 90 % of the copy bandwidth for rows of 128
// values and more. Not measured: no GPU was at hand.
#include "abi_data.h"
#include "device.h"
#include "scan.h"

namespace {

HX_DEVICE inline u32 bits_of(float f) { return __builtin_bit_cast(u32, f); }
HX_DEVICE inline float float_of(u32 u) { return __builtin_bit_cast(float, u); }

// The bits of a half as float32. Signalling NaNs become quiet.
HX_DEVICE inline u32 wide_half(u32 h) {
	constexpr u32 exponent = 0x1fu << 23, rebias = (127u - 15) << 23;
	u32 sign = (h & 0x8000) << 16, x = (h & 0x7fff) << 13;
	if ((x & exponent) == exponent) {
		x |= 0xffu << 23;
		if ((x & 0x7fffff) != 0) x |= 1u << 22;
	} else if ((x & exponent) == 0) { // 2^-14 · 0.m is 2^-14 · 1.m less 2^-14, exactly
		x = bits_of(float_of(x + rebias + (1u << 23)) - float_of(rebias + (1u << 23)));
	} else {
		x += rebias;
	}
	return sign | x;
}

template <u32 type> HX_DEVICE inline u32 element(u32 word, u32 i, float scale) {
	if (type == rowInt8) return bits_of((float)(i32)(signed char)(word >> 8 * i) * scale);
	u32 h = i == 0 ? word & 0xffff : word >> 16;
	return type == rowFloat16 ? wide_half(h) : h << 16;
}

template <u32 type> HX_DEVICE inline void convert(const hx_launch &hx, const ConvertParams &p, Share s) {
	constexpr u32 per = type == rowInt8 ? 4 : 2; // values in a word
	u64 words = (u64)p.RowBytes / 4;
	bool whole = ((p.Dst | (u64)p.Dim * 4) % (per * 4)) == 0; // of its words every one is full and aligned
	u32 group = 1;
	while (group < 32 && group < words) group *= 2;
	u32 rows = 32 / group, own = dev::lane() / group, sub = dev::lane() % group;
	u32 w = dev::tid() / 32, warps = dev::threads() / 32;
	for (i64 i = s.lo + w * rows + own; i < s.hi; i += warps * rows) {
		u64 src = p.Src + (u64)(i * p.RowBytes), dst = p.Dst + (u64)(i * p.Dim) * 4;
		float scale = 1;
		if (type == rowInt8) {
			u64 node = dev::ld(dev::at<u64>(p.Nodes, i));
			if (node >= (u64)p.Table) {
				dev::fail(hx, 2, (u64)i, node, (u64)p.Table);
				continue;
			}
			scale = float_of(dev::ld(dev::at<u32>(p.Scales, (i64)node)));
		}
		for (u64 at = sub; at < words; at += group) {
			u32 word = dev::ld(dev::at<u32>(src, (i64)at));
			u32 v[4] = {};
#pragma GCC unroll 4
			for (u32 k = 0; k < per; k++) v[k] = element<type>(word, k, scale);
			u64 to = dst + at * per * 4;
			if (whole && per == 4) {
				dev::st16(dev::at<u32x4>(to), u32x4{v[0], v[1], v[2], v[3]});
			} else if (whole) {
				dev::st(dev::at<u64>(to), v[0] | (u64)v[1] << 32);
			} else {
				for (u32 k = 0; k < per && (i64)(at * per + k) < p.Dim; k++) dev::st(dev::at<u32>(to, k), v[k]);
			}
		}
	}
}

} // namespace

HX_KERNEL(convert_rows, ConvertParams) {
	if (dev::dropped(hx)) return;
	u64 half = ((u64)p.Dim * 2 + 3) / 4 * 4, byte = ((u64)p.Dim + 3) / 4 * 4;
	if (p.Type < rowFloat16 || p.Type > rowInt8 || (u64)p.RowBytes != (p.Type == rowInt8 ? byte : half)) {
		if (dev::tid() == 0) dev::fail(hx, 1, p.Type, (u64)p.RowBytes, (u64)p.Dim);
		return;
	}
	Share s = block_share(p.Rows);
	if (p.Type == rowFloat16) {
		convert<rowFloat16>(hx, p, s);
	} else if (p.Type == rowBFloat16) {
		convert<rowBFloat16>(hx, p, s);
	} else {
		convert<rowInt8>(hx, p, s);
	}
}
