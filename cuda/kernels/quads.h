// Matrices of which a thread takes four columns of a row at a time: what comes between layers works element by element.
#pragma once

#include "agg.h"
#include "epilogue.h"

// Four columns of a row, or the last ones.
struct Spot {
	u32 row, col, n;
	i64 at; // of the first element
	bool wide;
};

struct Quads {
	u32 cols, quads; // quads of a row
	i64 all;
	bool wide; // rows at these addresses are 16-byte aligned
};

HX_DEVICE inline Quads quads_of(i64 rows, i64 cols, u64 addresses) {
	u32 quads = (u32)((cols + 3) / 4);
	return {(u32)cols, quads, rows * quads, floats_at_once(addresses, cols) == 4};
}

HX_DEVICE inline Spot spot_of(const Quads &q, i64 i) {
	u32 row = q.all >> 32 == 0 ? (u32)i / q.quads : (u32)(i / q.quads); // a 64-bit division is slow on a GPU
	u32 col = (u32)(i - (i64)row * q.quads) * 4;
	u32 n = col + 4 <= q.cols ? 4 : q.cols - col;
	return {row, col, n, (i64)row * q.cols + col, q.wide && n == 4};
}

HX_DEVICE inline Quad load_quad(const Spot &s, u64 array, i64 at) {
	const float *p = dev::at<float>(array, at);
	if (s.wide) return quad_of(dev::ld16(p));
	Quad q = {};
#pragma GCC unroll 4
	for (u32 k = 0; k < 4; k++) {
		if (k < s.n) q.v[k] = dev::ld(p + k);
	}
	return q;
}

HX_DEVICE inline void store_quad(const Spot &s, u64 array, i64 at, const Quad &q) {
	float *p = dev::at<float>(array, at);
	if (s.wide) {
		dev::st16(p, words_of(q));
		return;
	}
#pragma GCC unroll 4
	for (u32 k = 0; k < 4; k++) {
		if (k < s.n) dev::st(p + k, q.v[k]);
	}
}
