// The end of a product: bias, ReLU and dropout, to the bit those of gnn (internal/simd, BiasReLU and Dropout).
#pragma once

#include "abi_gemm.h"
#include "device.h"
#include "philox.h"

// Everything is inlined: what is called keeps its arguments in local memory, the parameter block too.
#define GEMM_INLINE HX_DEVICE inline __attribute__((always_inline))
// For the GPU: on the shim it would only make compiling slow.
#ifdef __CUDA__
#define GEMM_PRAGMA(TEXT) _Pragma(#TEXT)
#define GEMM_UNROLL(N) GEMM_PRAGMA(GCC unroll N)
#else
#define GEMM_UNROLL(N)
#endif
#define GEMM_STATIC HX_DEVICE static inline __attribute__((always_inline))

// The numbers below which an element is dropped: philox.Float32(w) < P exactly when w>>8 < P·2^24.
GEMM_INLINE u32 drop_limit(const Dropout &d) {
	float x = d.P * 16777216.0f; // exact
	u32 limit = (u32)x;
	return (float)limit < x ? limit + 1 : limit;
}

// The words for columns col to col+3 of a row; col is a multiple of 4.
GEMM_INLINE PhiloxBlock drop_words(const Dropout &d, u32 row, u32 col) {
	return philox(d.Key, d.Layer << 24 | col / 4, row, d.Epoch, d.Batch);
}

struct Quad {
	float v[4];
};

// v below 0 becomes 0, NaN stays NaN.
GEMM_INLINE float relu(float v) { return v > 0 ? v : v != v ? v : 0.0f; }

GEMM_INLINE void drop(const Dropout &d, u32 limit, u32 row, u32 col, Quad &q) {
	PhiloxBlock w = drop_words(d, row, col);
	for (u32 j = 0; j < 4; j++) q.v[j] = w.w[j] >> 8 < limit ? 0.0f : q.v[j] * d.Scale;
}

// How C is finished and stored, four columns at a time.
struct Finish {
	u64 c, bias;
	u32 m, n, ld;
	u32 flags, limit;
	bool wide; // rows are 16-byte aligned
};

GEMM_INLINE Finish finish_of(const GemmParams &p) {
	Finish f = {p.C, p.Bias, (u32)p.M, (u32)p.N, (u32)p.LDC, p.Flags, 0, p.LDC % 4 == 0 && p.C % 16 == 0};
	if (f.flags & gemmDropout) f.limit = drop_limit(p.Drop);
	return f;
}

GEMM_INLINE u32x4 words_of(const Quad &q) {
	return {__builtin_bit_cast(u32, q.v[0]), __builtin_bit_cast(u32, q.v[1]), __builtin_bit_cast(u32, q.v[2]), __builtin_bit_cast(u32, q.v[3])};
}

GEMM_INLINE Quad quad_of(u32x4 w) {
	return {{__builtin_bit_cast(float, w.x), __builtin_bit_cast(float, w.y), __builtin_bit_cast(float, w.z), __builtin_bit_cast(float, w.w)}};
}

// Finishes and stores columns col to col+3 of a row, as far as C has them. col is a multiple of 4.
GEMM_INLINE void finish(const Finish &f, const Dropout &d, u32 row, u32 col, Quad q) {
	if (row >= f.m || col >= f.n) return;
	u32 n = col + 4 <= f.n ? 4 : f.n - col;
	if (f.bias != 0) {
#pragma GCC unroll 4
		for (u32 j = 0; j < 4; j++) {
			if (j < n) q.v[j] += dev::ld(dev::at<float>(f.bias, col + j));
		}
	}
	if (f.flags & gemmReLU) {
#pragma GCC unroll 4
		for (u32 j = 0; j < 4; j++) q.v[j] = relu(q.v[j]);
	}
	if (f.flags & gemmDropout) drop(d, f.limit, row, col, q);
	float *c = dev::at<float>(f.c, (i64)((u64)row * f.ld + col));
	if (n == 4 && f.wide) {
		dev::st16(c, words_of(q));
		return;
	}
#pragma GCC unroll 4
	for (u32 j = 0; j < 4; j++) {
		if (j < n) dev::st(c + j, q.v[j]);
	}
}
