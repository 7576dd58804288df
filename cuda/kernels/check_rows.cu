// check_rows: the CRC32C of each row of a read set, compared with the row's own. Reference:
// gpuio/checked_kernel.go (checkRowsKernel), to the bit, for any grid and any block of whole warps.
//
// Row Rows[i] lies at Dst + Pos[i]*DstStride, RowBytes long; its checksum goes to Got[i], and Bad counts
// those that differ from Sums[Rows[i]]. A block takes a contiguous share of the rows, its warps take
// turns. Lanes (1 to 8, a power of two) lanes work on a row, so a warp has 32/Lanes rows at once.
//
// A CRC is linear: its register after a word is advance4(register ^ word), where advance_n is what n zero
// bytes do, so the CRC of many words is the sum (xor) of each word advanced by the bytes from it to the end.
// Lane l of L takes the words l, l+L, l+2L … of the row, which is why loads are whole sectors (8 lanes ×
// 4 bytes) and not 32 rows apart. Per word: register = advance_4L(register) ^ word, four lookups in shared
// memory. Then log2(L) steps join neighbours: the earlier half advances by the later half's length. Words
// are counted so that the last one is the last lane's; zeros in front of a register of zero change nothing,
// and the register's initial ones are xored into the first word. Bytes behind the last whole word go one
// by one through the usual table.
//
// Tables are made by the host for Lanes (checkTables), 6.5 KiB, and copied to shared memory by each block:
//	step  [4][256]    advance by 4*Lanes bytes, by byte of the register
//	join  [3][8][16]  advance by 4, 8 and 16 bytes, by nibble
//	byte  [256]       one byte
//
// Memory is only read, but for Got and one relaxed add per warp to Bad. Rows that SSDs or `complete` have
// written are seen because the set's kernels ended before this launch.
//
// Bytes per row: RowBytes + 20. One lookup of shared memory per byte; 32 lanes meet in the 32 banks about
// three deep, so ~10 bytes per clock and SM: 1.5 TB/s on 108 SMs at 1.4 GHz, about what HBM gives. Not
// measured: no GPU was at hand.
#include "device.h"
#include "scan.h"

// go: gpuio.checkParams
struct CheckParams {
	u64 Rows;
	u64 Pos;
	u64 Sums;
	u64 Dst;
	u64 Got;
	u64 Bad;
	u64 Tables;
	i64 Count;
	i64 LayoutRows;
	i64 DstLimit, DstStride;
	u32 RowBytes;
	u32 Lanes;
};
static_assert(sizeof(CheckParams) == 96, "gpuio.checkParams");
static_assert(__builtin_offsetof(CheckParams, Count) == 56, "gpuio.checkParams");
static_assert(__builtin_offsetof(CheckParams, RowBytes) == 88, "gpuio.checkParams");

namespace {

constexpr u32 stepWords = 4 * 256, joinWords = 3 * 8 * 16, byteWords = 256;
constexpr u32 tableWords = stepWords + joinWords + byteWords;
constexpr u32 loadsAhead = 4;

// Where row i of the set is; 0 for one that is not in the layout or not in the destination.
HX_DEVICE inline u64 place(const CheckParams &p, const hx_launch &hx, i64 i, i64 *row) {
	*row = dev::ld(dev::at<i64>(p.Rows, i));
	i64 pos = dev::ld(dev::at<u32>(p.Pos, i));
	if ((u64)*row >= (u64)p.LayoutRows) {
		dev::fail(hx, 1, (u64)*row, (u64)i, (u64)p.LayoutRows);
		return 0;
	}
	if (pos * p.DstStride > p.DstLimit - (i64)p.RowBytes) {
		dev::fail(hx, 2, (u64)pos, (u64)i, (u64)p.DstLimit);
		return 0;
	}
	return p.Dst + (u64)(pos * p.DstStride);
}

template <bool aligned> HX_DEVICE inline u32 word_at(u64 src, u32 i) {
	if (aligned) return dev::ld(dev::at<u32>(src, i));
	u32 w = 0;
	for (u32 b = 0; b < 4; b++) w |= (u32)dev::ld(dev::at<u8>(src, (i64)i * 4 + b)) << 8 * b;
	return w;
}

HX_DEVICE inline u32 step(const u32 *t, u32 r) {
	return dev::ld(&t[r & 255]) ^ dev::ld(&t[256 + (r >> 8 & 255)]) ^ dev::ld(&t[512 + (r >> 16 & 255)]) ^ dev::ld(&t[768 + (r >> 24)]);
}

// advance by 4 << k bytes.
HX_DEVICE inline u32 join(const u32 *t, u32 k, u32 r) {
	u32 sum = 0;
#pragma GCC unroll 8
	for (u32 n = 0; n < 8; n++) sum ^= dev::ld(&t[(k * 8 + n) * 16 + (r >> 4 * n & 15)]);
	return sum;
}

// The CRC32C of the row at src (0: none), the same in all lanes of the row. Whole warps.
template <bool aligned> HX_DEVICE inline u32 row_crc(const CheckParams &p, const u32 *t, u64 src) {
	const u32 *joins = t + stepWords, *bytes = joins + joinWords;
	u32 words = p.RowBytes / 4, sub = dev::lane() % p.Lanes;
	u32 steps = (words + p.Lanes - 1) / p.Lanes, front = steps * p.Lanes - words;
	u32 r = 0;
	for (u32 s = 0; s < steps; s += loadsAhead) {
		u32 v[loadsAhead];
#pragma GCC unroll 4
		for (u32 u = 0; u < loadsAhead; u++) {
			u32 at = (s + u) * p.Lanes + sub;
			v[u] = src != 0 && s + u < steps && at >= front ? word_at<aligned>(src, at - front) : 0;
			if (at == front) v[u] = ~v[u];
		}
#pragma GCC unroll 4
		for (u32 u = 0; u < loadsAhead; u++) {
			if (s + u < steps) r = step(t, r) ^ v[u];
		}
	}
	for (u32 k = 0; 1u << k < p.Lanes; k++) {
		u32 other = dev::shfl(dev::full_mask, r, dev::lane() ^ (1u << k));
		bool late = (dev::lane() >> k & 1) != 0;
		r = join(joins, k, late ? other : r) ^ (late ? r : other);
	}
	r = words == 0 ? ~0u : join(joins, 0, r);
	for (u32 i = words * 4; src != 0 && i < p.RowBytes; i++) {
		r = dev::ld(&bytes[(r ^ dev::ld(dev::at<u8>(src, i))) & 255]) ^ r >> 8;
	}
	return ~r;
}

template <bool aligned> HX_DEVICE inline void check(const CheckParams &p, const hx_launch &hx, const u32 *t) {
	Share s = block_share(p.Count);
	u32 rows = 32 / p.Lanes, own = dev::lane() / p.Lanes, sub = dev::lane() % p.Lanes;
	u32 bad = 0;
	for (i64 i = s.lo + dev::tid() / 32 * rows; i < s.hi; i += dev::threads() / 32 * rows) {
		i64 row = 0, at = i + own;
		u64 src = at < s.hi ? place(p, hx, at, &row) : 0;
		u32 got = row_crc<aligned>(p, t, src);
		if (src != 0 && sub == 0) {
			dev::st(dev::at<u32>(p.Got, at), got);
			bad += got != dev::ld(dev::at<u32>(p.Sums, row));
		}
	}
	bad = dev::reduce_add(dev::full_mask, bad);
	if (dev::lane() == 0 && bad != 0) dev::add_gpu<dev::relaxed>(dev::at<u32>(p.Bad), bad);
}

} // namespace

HX_KERNEL(check_rows, CheckParams) {
	HX_SHARED(u32, tables, tableWords);
	if (dev::dropped(hx)) return;
	for (u32 i = dev::tid(); i < tableWords; i += dev::threads()) dev::st(&tables[i], dev::ld(dev::at<u32>(p.Tables, i)));
	dev::syncthreads();
	if ((p.Dst | (u64)p.DstStride) % 4 == 0) {
		check<true>(p, hx, tables);
	} else {
		check<false>(p, hx, tables);
	}
}
