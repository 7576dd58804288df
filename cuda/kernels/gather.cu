// gather: copies cached rows into the mini-batch's tensor. Reference: cache/kernels.go
// (gatherKernel), to the bit, for any grid and any block of whole warps.
//
// Row GPUSlot[i] of GPURows goes to row GPUPos[i] of Dst (i < NGPU), then row CPUSlot[i] of CPURows
// to row CPUPos[i] (i < NCPU). Rows are RowBytes long and Stride apart in Dst, adjacent in CPURows. In
// GPURows, a tier of lines, row k is row k mod GPUPerLine of line k div GPUPerLine, GPULine bytes apart, a
// line's rows GPUStride. With a row to a line there is no division. A dynamic cache's fills are a gather, too:
// of lines from the staging buffer to their slots.
// GPURows is device memory; CPURows is pinned CPU memory that the loads reach over PCIe (UVA).
// The third source of a mini-batch, rows that come from SSD, is not here: the SSD writes them in place
// (direct placement), or `complete` copies them from their staging slot the moment they arrive,
// because the slot is wanted for the next read. A gather at the end would hold all slots till then.
//
// A block takes a contiguous share of the hits, its warps take turns. A group of 1 to 32 lanes
// (as many as a row has words, rounded up to a power of two) copies one row, so a warp works on
// 32/group rows at once, times 4 unrolled: four loads are in flight per lane, and 16-byte words make
// that 2 KiB per warp, 128 KiB per SM. The word is the widest of 16, 8 and 4 bytes that divides
// all addresses, the row and the stride; anything else (odd rows, test data) goes row by row with
// the widest word that source and destination agree on, and bytes at the edges.
//
// No shared memory, no barrier; rows of Dst must differ between hits (positions do), so no two
// threads write the same byte. The caller's next launch on the stream sees all of it.
//
// Bytes per hit: 2×RowBytes + 8. GPU tier: bound by HBM, expect 80 to 90 % of the copy bandwidth
// for rows of 512 bytes and more. CPU tier: bound by PCIe, ~25 GB/s on 4.0 x16, for which rows below
// 128 bytes waste the link's 128-byte reads. Not measured: no GPU was at hand.
#include "abi_data.h"
#include "device.h"
#include "scan.h"

namespace {

constexpr u32 ahead = 4; // rows that a lane has in flight

HX_DEVICE inline u32x4 load(const u32x4 *p) { return dev::ld16(p); }
HX_DEVICE inline void store(u32x4 *p, u32x4 v) { dev::st16(p, v); }
template <typename T> HX_DEVICE inline T load(const T *p) { return dev::ld(p); }
template <typename T> HX_DEVICE inline void store(T *p, T v) { dev::st(p, v); }

struct Copy {
	u64 src, dst; // 0: none
};

// Where hit i comes from and goes to; none for a bad one, of which told says so to the stream. Copying
// does without: the words for faults, in each of the unrolled steps, would not fit the instruction cache.
template <bool told> HX_DEVICE inline Copy hit(const GatherParams &p, const hx_launch &hx, i64 i) {
	bool gpu = i < p.NGPU;
	i64 at = gpu ? i : i - p.NGPU;
	i64 pos = dev::ld(dev::at<u32>(gpu ? p.GPUPos : p.CPUPos, at));
	i64 slot = dev::ld(dev::at<u32>(gpu ? p.GPUSlot : p.CPUSlot, at));
	i64 total = gpu ? p.GPUTotal : p.CPUTotal;
	if (slot >= total || pos >= p.DstRows) {
		if (told && slot >= total) {
			dev::fail(hx, 1, (u64)slot, (u64)i, (u64)total);
		} else if (told) {
			dev::fail(hx, 2, (u64)pos, (u64)i, (u64)p.DstRows);
		}
		return {0, 0};
	}
	u64 dst = p.Dst + (u64)(pos * p.Stride);
	if (!gpu) return {p.CPURows + (u64)(slot * p.RowBytes), dst};
	if (p.GPUPerLine == 1) return {p.GPURows + (u64)(slot * p.GPULine), dst};
	u32 line = (u32)slot / (u32)p.GPUPerLine, row = (u32)slot % (u32)p.GPUPerLine;
	return {p.GPURows + (u64)(line * p.GPULine + row * p.GPUStride), dst};
}

template <typename T> HX_DEVICE inline void copy_words(const GatherParams &p, const hx_launch &hx, Share s) {
	u64 words = (u64)p.RowBytes / sizeof(T);
	u32 group = 1;
	while (group < 32 && group < words) group *= 2;
	u32 rows = 32 / group, own = dev::lane() / group, sub = dev::lane() % group;
	u32 w = dev::tid() / 32, warps = dev::threads() / 32;
	for (i64 i = s.lo + w * rows * ahead + own; i < s.hi; i += warps * rows * ahead) {
		Copy c[ahead];
		bool bad = false;
#pragma GCC unroll 4
		for (u32 u = 0; u < ahead; u++) {
			c[u] = {0, 0};
			if (i + u * rows < s.hi) {
				c[u] = hit<false>(p, hx, i + u * rows);
				bad |= c[u].src == 0;
			}
		}
		for (u64 at = sub; at < words; at += group) {
			T v[ahead];
#pragma GCC unroll 4
			for (u32 u = 0; u < ahead; u++) {
				if (c[u].src != 0) v[u] = load(dev::at<T>(c[u].src, (i64)at)); // litmus: gather-row
			}
#pragma GCC unroll 4
			for (u32 u = 0; u < ahead; u++) {
				if (c[u].src != 0) store(dev::at<T>(c[u].dst, (i64)at), v[u]); // litmus: gather-row
			}
		}
		for (i64 at = i; bad && at < s.hi && at < i + ahead * rows; at += rows) hit<true>(p, hx, at);
	}
}

// One row by a warp: bytes up to the destination's first whole word, words, bytes.
template <typename T> HX_DEVICE inline void copy_row(Copy c, u64 bytes) {
	u64 head = (0 - c.dst) % sizeof(T);
	if (head > bytes) head = bytes;
	u64 words = (bytes - head) / sizeof(T), tail = head + words * sizeof(T);
	for (u64 i = dev::lane(); i < head; i += 32) dev::st(dev::at<u8>(c.dst, (i64)i), dev::ld(dev::at<u8>(c.src, (i64)i)));
	for (u64 i = dev::lane(); i < words; i += 32) {
		store(dev::at<T>(c.dst + head, (i64)i), load(dev::at<T>(c.src + head, (i64)i)));
	}
	for (u64 i = tail + dev::lane(); i < bytes; i += 32) dev::st(dev::at<u8>(c.dst, (i64)i), dev::ld(dev::at<u8>(c.src, (i64)i)));
}

HX_DEVICE inline void copy_odd(const GatherParams &p, const hx_launch &hx, Share s) {
	for (i64 i = s.lo + dev::tid() / 32; i < s.hi; i += dev::threads() / 32) {
		Copy c = hit<true>(p, hx, i);
		if (c.src == 0) continue;
		u32 apart = (u32)(c.src ^ c.dst);
		if (apart % 16 == 0) {
			copy_row<u32x4>(c, (u64)p.RowBytes);
		} else if (apart % 4 == 0) {
			copy_row<u32>(c, (u64)p.RowBytes);
		} else {
			copy_row<u8>(c, (u64)p.RowBytes);
		}
	}
}

} // namespace

HX_KERNEL(gather, GatherParams) {
	if (dev::dropped(hx)) return;
	Share s = block_share(p.NGPU + p.NCPU);
	u32 odd = (u32)(p.GPURows | p.CPURows | p.Dst | (u64)p.RowBytes | (u64)p.Stride | (u64)p.GPULine | (u64)p.GPUStride) % 16;
	if (odd == 0) {
		copy_words<u32x4>(p, hx, s);
	} else if (odd % 8 == 0) {
		copy_words<u64>(p, hx, s);
	} else if (odd % 4 == 0) {
		copy_words<u32>(p, hx, s);
	} else {
		copy_odd(p, hx, s);
	}
}
