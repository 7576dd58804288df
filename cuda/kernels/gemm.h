// Shared by all products of matrices: tiles, parts of K and the two terms of a sum.
#pragma once

#include "abi_gemm.h"
#include "device.h"
#include "epilogue.h"

// A block of 256 threads computes a tile. Fewer warps do the work of all 256 in turns, so that any block of whole warps
// gives the same result.
constexpr u32 gemm_threads = 256, gemm_warps = gemm_threads / 32;

// Steps of K that a block has in shared memory at one time.
constexpr u32 gemm_bk = 16;

// The work of a block at one time: a tile of C, or of one part of a split product. Rows, columns, steps and tiles are below 2^31
// (gemmGPU sees to it), so 32 bits do: registers are what limits these kernels.
struct Tile {
	u32 row, col;
	u32 from, to; // of K
};

GEMM_INLINE u32 over(i64 n, u32 by) { return ((u32)n + by - 1) / by; }
GEMM_INLINE u32 tiles_of(const GemmParams &p, u32 bm, u32 bn) { return over(p.M, bm) * over(p.N, bn); }

// Item i of a grid's work: columns first, so that blocks that run at one time read the same rows of A.
GEMM_INLINE Tile tile_at(const GemmParams &p, u32 i, u32 bm, u32 bn, u32 chunk) {
	u32 cols = over(p.N, bn);
	Tile t = {0, 0, 0, (u32)p.K};
	if (chunk != 0) {
		u32 tiles = tiles_of(p, bm, bn);
		t.from = i / tiles * chunk;
		i %= tiles;
		if (t.from + chunk < t.to) t.to = t.from + chunk;
	}
	t.row = i / cols * bm;
	t.col = i % cols * bn;
	return t;
}

// The operands of a tile in one of the two terms: steps k to end.
struct Term {
	u64 a, b;
	u32 lda, ldb;
	u32 k, end;
};

// Chosen bit by bit: of a branch, the optimiser makes one load from either address, for which it copies the parameters to local
// memory.
template <typename T> GEMM_INLINE T choose(u32 second, T a, T b) { return a ^ ((a ^ b) & (0 - (T)second)); }

GEMM_INLINE Term term_of(const GemmParams &p, const Tile &t, u32 second) {
	return {choose(second, p.A, p.A2),   choose(second, p.B, p.B2),
	        choose(second, (u32)p.LDA, (u32)p.LDA2), choose(second, (u32)p.LDB, (u32)p.LDB2),
	        choose(second, t.from, 0u), choose(second, t.to, (u32)p.K2)};
}

// Element (row, col) of a matrix.
GEMM_INLINE float *element(u64 p, u32 row, u32 ld, u32 col) { return dev::at<float>(p, (i64)((u64)row * ld + col)); }

// A quad of a part's sum. Columns from N to LDP are there, and nobody reads them.
GEMM_INLINE void store_part(const GemmSplitParams &s, u32 part, u32 row, u32 col, const Quad &q) {
	if (row < (u32)s.P.M && col < (u32)s.P.N) dev::st16(dev::at<float>(s.Parts, ((i64)part * s.P.M + row) * s.LDP + col), words_of(q));
}
