// gemm_nn, gemm_nt, gemm_tn: products of float32 matrices in float32, on the ordinary cores. Reference: gnn/gemm.go, to the
// bit (internal/simd's vector kernels), for any grid and any block of up to 256 threads in whole warps.
//
//	gemm_nn  C[M,N] = A[M,K] · B[K,N]  + A2[M,K2] · B2[K2,N]
//	gemm_nt  C[M,N] = A[M,K] · B[N,K]ᵀ + A2 · B2ᵀ
//	gemm_tn  C[M,N] = A[K,M]ᵀ · B[K,N] + A2ᵀ · B2
//
// then bias, ReLU and dropout as epilogue.h has them. An element is one chain of fused multiply-adds from 0 over k in order, first A·B,
// then A2·B2, so tiles, grid and block do not change a bit. The last step of a term does no more than its k: a sum plus
// 0·0 is not always the same sum (-0).
//
// A block computes a tile of 128×128, 128×64 or 64×64 (the names' endings) for 16 steps of K at a time; each thread has 8×8, 8×4
// or 4×4 elements in registers, in quads of 4×4 so that a warp's loads from shared memory are without conflicts (A: four
// different addresses, the rest is broadcast; B: 128 adjacent bytes). Both operands lie in shared memory with k as the slow index; rows
// of memory that run along k are turned when they are stored there. While a quarter of the 16 steps is computed, a quad of each
// thread for the next 16 is on its way to four registers, and goes to the other half of shared memory after it: one barrier for 16
// steps, and 1,024 cycles of multiply-adds of an SM's warps to hide each load behind. Blocks of fewer warps load without overlap.
// Rows that are not 16-byte aligned are read by single words (K = 47, 602, 1433).
//
// gemm_tn_split: the gradient of weights has few tiles and hundreds of thousands of steps. Parts of Chunk steps (a multiple of 32, by
// the shape alone: gnn/gemm_cuda.go) go to different blocks, which leave their sums in Parts; gemm_sum adds these in order and
// finishes. The result is the same on every GPU, and within (Chunk + parts) · 2^-24 · Σ|a·b| of the exact sum (the one chain of the
// host: K · 2^-24 · Σ|a·b|).
//
// Expected, not measured (no GPU was at hand). 128×128: per 16 steps a warp issues 1,024 FFMA and 64 LDS.128 plus ~60 others, so
// at best 0.89 of the cores' peak; 2 blocks (16 warps) on an SM by registers (128 by launch bounds, no spills on sm_80 and sm_90; 80 and 3
// blocks for 64×64) cover the latency of shared memory: occupancy 25 % (38 %). With the barrier we expect 0.70 to 0.80
// of peak: A100 (19.5 TFLOP/s) 14, H100 SXM (67) 45 or more; 16 KiB are read for 512 Ki flop, 32 flop/byte, mostly of L2: 1.4 TB/s at
// 45 TFLOP/s. 128×64 about 0.6 and 64×64 about 0.5 (more LDS for each FFMA).
#include "gemm.h"

namespace {

// An operand of a tile: W rows or columns; `along` says that adjacent elements of memory have adjacent k.
template <u32 W, bool along> struct Operand {
	static constexpr u32 stride = W + 4; // turned stores then conflict two ways in place of four
	static constexpr u32 floats = gemm_bk * stride;
	static constexpr u32 quads = W * gemm_bk / 4 / gemm_threads;
	static_assert(W * gemm_bk % (4 * gemm_threads) == 0, "whole quads for each thread");

	// Where quad i of a thread is: i0 along W, k0 along K.
	struct Place {
		u32 i, k;
	};
	GEMM_STATIC Place place(u32 thread, u32 i) {
		u32 q = thread + i * gemm_threads;
		if (along) return {q / (gemm_bk / 4), q % (gemm_bk / 4) * 4};
		return {q % (W / 4) * 4, q / (W / 4)};
	}

	GEMM_STATIC u32x4 load(u64 p, u32 ld, bool wide, u32 i, u32 n, u32 k, u32 end) {
		u32 row = along ? i : k, rows = along ? n : end, col = along ? k : i, cols = along ? end : n;
		u32x4 v = {0, 0, 0, 0};
		if (row >= rows || col >= cols) return v;
		const float *at = element(p, row, ld, col);
		if (wide && col + 4 <= cols) return dev::ld16_global(at);
		v.x = __builtin_bit_cast(u32, dev::ld(at));
		if (col + 1 < cols) v.y = __builtin_bit_cast(u32, dev::ld(at + 1));
		if (col + 2 < cols) v.z = __builtin_bit_cast(u32, dev::ld(at + 2));
		if (col + 3 < cols) v.w = __builtin_bit_cast(u32, dev::ld(at + 3));
		return v;
	}

	GEMM_STATIC void store(float *to, Place at, u32x4 v) {
		float *s = to + at.k * stride + at.i;
		if (along) {
			dev::st(s, __builtin_bit_cast(float, v.x));
			dev::st(s + stride, __builtin_bit_cast(float, v.y));
			dev::st(s + 2 * stride, __builtin_bit_cast(float, v.z));
			dev::st(s + 3 * stride, __builtin_bit_cast(float, v.w));
		} else {
			dev::st16(s, v);
		}
	}
};

GEMM_INLINE bool wide(u64 p, u32 ld) { return ((u32)p % 16 | ld % 4) == 0; }

// The sums of a thread. Warps lie 4×2 on the tile, lanes 4×8 on the warp's part, in quads.
template <u32 BM, u32 BN> struct Sums {
	static constexpr u32 rows = BM / 16, cols = BN / 16;
	float v[rows][cols];

	GEMM_STATIC u32 row(u32 thread, u32 i) { return thread / 64 * (BM / 4) + i / 4 * 16 + thread % 32 / 8 * 4 + i % 4; }
	GEMM_STATIC u32 col(u32 thread, u32 j) { return thread / 32 % 2 * (BN / 2) + j / 4 * 32 + thread % 8 * 4 + j % 4; }

	GEMM_INLINE void clear() {
GEMM_UNROLL(8)
		for (u32 i = 0; i < rows; i++) {
GEMM_UNROLL(8)
			for (u32 j = 0; j < cols; j++) v[i][j] = 0;
		}
	}

	// One step of K; a and b point to this thread's first row and column.
	GEMM_INLINE void step(const float *a, const float *b) {
		float x[rows], y[cols];
GEMM_UNROLL(2)
		for (u32 i = 0; i < rows; i += 4) {
			Quad q = quad_of(dev::ld16(a + i / 4 * 16));
GEMM_UNROLL(4)
			for (u32 e = 0; e < 4; e++) x[i + e] = q.v[e];
		}
GEMM_UNROLL(2)
		for (u32 j = 0; j < cols; j += 4) {
			Quad q = quad_of(dev::ld16(b + j / 4 * 32));
GEMM_UNROLL(4)
			for (u32 e = 0; e < 4; e++) y[j + e] = q.v[e];
		}
GEMM_UNROLL(8)
		for (u32 i = 0; i < rows; i++) {
GEMM_UNROLL(8)
			for (u32 j = 0; j < cols; j++) v[i][j] = __builtin_fmaf(x[i], y[j], v[i][j]);
		}
	}
};

// Computes a tile and hands quads of it to store(row, col, Quad). All threads of the block come here.
template <u32 BM, u32 BN, bool TA, bool TB, typename F> GEMM_INLINE void compute(const GemmParams &p, const Tile &t, F store) {
	typedef Operand<BM, !TA> A;
	typedef Operand<BN, TB> B;
	HX_SHARED(u32x4, shared, 2 * (A::floats + B::floats) / 4);
	float *base = reinterpret_cast<float *>(&shared[0]);
	constexpr u32 half = A::floats + B::floats;
	for (u32 first = 0; first < gemm_threads; first += dev::threads()) {
		const u32 thread = first + dev::tid(); // of 256; the last round may have more than there is work for
		Sums<BM, BN> sums;
		sums.clear();
GEMM_UNROLL(1)
		for (u32 term = 0; term < 2; term++) {
			const Term s = term_of(p, t, term);
			const bool wa = wide(s.a, s.lda), wb = wide(s.b, s.ldb);
			u32x4 held = {}; // a quad on its way
			auto fetch = [&](auto op, u32 q, u64 from, u32 ld, bool w, u32 at, i64 n, u32 thread, u32 k) __attribute__((always_inline)) {
				auto to = op.place(thread, q);
				if (q < op.quads) held = op.load(from, ld, w, at + to.i, (u32)n, k + to.k, s.end);
			};
			auto keep = [&](auto op, u32 q, u32 thread, float *to) __attribute__((always_inline)) {
				if (q < op.quads) op.store(to, op.place(thread, q), held);
			};
			auto fill = [&](u32 k, float *to) __attribute__((always_inline)) { // without overlap, by any number of warps
				const u32 all = k < s.end ? gemm_threads : 0;
GEMM_UNROLL(1)
				for (u32 v = dev::again(dev::tid()); v < all; v += dev::threads()) {
GEMM_UNROLL(2)
					for (u32 q = 0; q < 2; q++) {
						fetch(A(), q, s.a, s.lda, wa, t.row, p.M, v, k);
						keep(A(), q, v, to);
						fetch(B(), q, s.b, s.ldb, wb, t.col, p.N, v, k);
						keep(B(), q, v, to + A::floats);
					}
				}
			};
			fill(s.k, base);
			dev::syncthreads();
			u32 now = 0; // the half that is used
			for (u32 k = s.k; k < s.end; k += gemm_bk) {
				const u32 next = k + gemm_bk;
				const bool ahead = next < s.end && dev::threads() == gemm_threads;
				const float *a = base + now + Sums<BM, BN>::row(dev::again(thread), 0);
				const float *b = base + now + A::floats + Sums<BM, BN>::col(dev::again(thread), 0);
				now ^= half;
				if (next > s.end) {
					const u32 rest = thread < gemm_threads ? s.end - k : 0;
GEMM_UNROLL(1)
					for (u32 i = 0; i < rest; i++) sums.step(a + i * A::stride, b + i * B::stride);
				} else {
GEMM_UNROLL(4)
					for (u32 part = 0; part < 4; part++) { // while a quarter is used, a quad of the next step is on its way
						const u32 me = dev::again(dev::tid()), q = part % 2;
						if (ahead && part < 2) fetch(A(), q, s.a, s.lda, wa, t.row, p.M, me, next);
						if (ahead && part >= 2) fetch(B(), q, s.b, s.ldb, wb, t.col, p.N, me, next);
						if (thread < gemm_threads) {
GEMM_UNROLL(2) // more of them want more registers than there are
							for (u32 i = part * 4; i < part * 4 + 4; i++) sums.step(a + i * A::stride, b + i * B::stride);
						}
						if (ahead && part < 2) keep(A(), q, me, base + now);
						if (ahead && part >= 2) keep(B(), q, me, base + now + A::floats);
					}
				}
				if (!ahead) fill(next, base + now);
				dev::syncthreads();
			}
		}
		// Through shared memory, which nobody else uses now: registers have no index that a loop could count, and the code that
		// finishes a quad is too long to be there for each of them.
		static_assert(2 * half >= sums.cols * 4 * gemm_threads, "room for four rows of each thread");
		u32x4 *mine = &shared[dev::tid()];
		if (thread < gemm_threads) {
GEMM_UNROLL(2)
			for (u32 i = 0; i < sums.rows; i += 4) {
GEMM_UNROLL(4)
				for (u32 e = 0; e < 4; e++) {
GEMM_UNROLL(2)
					for (u32 j = 0; j < sums.cols; j += 4) {
						dev::st16(mine + (e * (sums.cols / 4) + j / 4) * gemm_threads,
						          words_of({{sums.v[i + e][j], sums.v[i + e][j + 1], sums.v[i + e][j + 2], sums.v[i + e][j + 3]}}));
					}
				}
GEMM_UNROLL(1)
				for (u32 q = 0; q < sums.cols; q++) {
					u32 r = i + q / (sums.cols / 4), c = q % (sums.cols / 4) * 4;
					store(t.row + sums.row(thread, r), t.col + sums.col(thread, c), quad_of(dev::ld16(mine + q * gemm_threads)));
				}
			}
		}
		dev::syncthreads();
	}
}

template <u32 BM, u32 BN, bool TA, bool TB> GEMM_INLINE void product(const GemmParams &p, const hx_launch &hx) {
	if (dev::dropped(hx)) return;
	for (u32 i = dev::bid(); i < tiles_of(p, BM, BN); i += dev::blocks()) {
		compute<BM, BN, TA, TB>(p, tile_at(p, i, BM, BN, 0),
		                        [&](u32 row, u32 col, const Quad &q) __attribute__((always_inline)) { finish(finish_of(p), p.Drop, row, col, q); });
	}
}

template <u32 BM, u32 BN> GEMM_INLINE void split(const GemmSplitParams &s, const hx_launch &hx) {
	if (dev::dropped(hx)) return;
	for (u32 i = dev::bid(); i < tiles_of(s.P, BM, BN) * over(s.P.K, (u32)s.Chunk); i += dev::blocks()) {
		compute<BM, BN, true, false>(s.P, tile_at(s.P, i, BM, BN, (u32)s.Chunk), [&](u32 row, u32 col, const Quad &q) __attribute__((always_inline)) {
			store_part(s, dev::again(i) / tiles_of(s.P, BM, BN), row, col, q);
		});
	}
}

} // namespace

HX_RESIDENT(gemm_nn, GemmParams, 256, 2)
HX_KERNEL(gemm_nn, GemmParams) { product<128, 128, false, false>(p, hx); }
HX_RESIDENT(gemm_nt, GemmParams, 256, 2)
HX_KERNEL(gemm_nt, GemmParams) { product<128, 128, false, true>(p, hx); }
HX_RESIDENT(gemm_tn, GemmParams, 256, 2)
HX_KERNEL(gemm_tn, GemmParams) { product<128, 128, true, false>(p, hx); }
HX_RESIDENT(gemm_tn_split, GemmSplitParams, 256, 2)
HX_KERNEL(gemm_tn_split, GemmSplitParams) { split<128, 128>(p, hx); }

HX_RESIDENT(gemm_nn_128x64, GemmParams, 256, 2)
HX_KERNEL(gemm_nn_128x64, GemmParams) { product<128, 64, false, false>(p, hx); }
HX_RESIDENT(gemm_nt_128x64, GemmParams, 256, 2)
HX_KERNEL(gemm_nt_128x64, GemmParams) { product<128, 64, false, true>(p, hx); }
HX_RESIDENT(gemm_tn_128x64, GemmParams, 256, 2)
HX_KERNEL(gemm_tn_128x64, GemmParams) { product<128, 64, true, false>(p, hx); }
HX_RESIDENT(gemm_tn_split_128x64, GemmSplitParams, 256, 2)
HX_KERNEL(gemm_tn_split_128x64, GemmSplitParams) { split<128, 64>(p, hx); }

HX_RESIDENT(gemm_nn_64x64, GemmParams, 256, 3)
HX_KERNEL(gemm_nn_64x64, GemmParams) { product<64, 64, false, false>(p, hx); }
HX_RESIDENT(gemm_nt_64x64, GemmParams, 256, 3)
HX_KERNEL(gemm_nt_64x64, GemmParams) { product<64, 64, false, true>(p, hx); }
HX_RESIDENT(gemm_tn_64x64, GemmParams, 256, 3)
HX_KERNEL(gemm_tn_64x64, GemmParams) { product<64, 64, true, false>(p, hx); }
HX_RESIDENT(gemm_tn_split_64x64, GemmSplitParams, 256, 3)
HX_KERNEL(gemm_tn_split_64x64, GemmSplitParams) { split<64, 64>(p, hx); }

// Adds the parts of a split product in order, from 0, and finishes C: a thread has four columns of a row.
HX_THREADS(gemm_sum, GemmSplitParams, 256)
HX_KERNEL(gemm_sum, GemmSplitParams) {
	if (dev::dropped(hx)) return;
	const Finish f = finish_of(p.P);
	const i64 across = p.LDP / 4, all = p.P.M * across, parts = (p.P.K + p.Chunk - 1) / p.Chunk;
	for (i64 i = (i64)dev::bid() * dev::threads() + dev::tid(); i < all; i += (i64)dev::blocks() * dev::threads()) {
		const i64 row = i / across, col = (i - row * across) * 4;
		Quad sum = {{0, 0, 0, 0}};
GEMM_UNROLL(4)
		for (i64 part = 0; part < parts; part++) {
			Quad q = quad_of(dev::ld16(dev::at<float>(p.Parts, (part * p.P.M + row) * p.LDP + col)));
			for (u32 j = 0; j < 4; j++) sum.v[j] += q.v[j];
		}
		finish(f, p.P.Drop, row, col, sum);
	}
}
