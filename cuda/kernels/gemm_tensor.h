// Products of float32 matrices on tensor cores (sm_80 and later): gemm_tf32.cu and gemm_bf16.cu. Factors are rounded, to tf32 (10
// bits of mantissa, nearest, ties away) or bfloat16 (7 bits, nearest, ties to even); products are exact and sums are float32 in
// the tensor core's order, which PTX leaves open. The sums, the two terms, parts and epilogue are as in gemm.cu; any grid,
// any block of up to 256 threads in whole warps.
//
// A block has a tile of 128×128 or 128×64 and 16 steps of K at a time in shared memory, as float32, three times over: cp.async
// brings step i+2 while step i is used (one barrier a step; 48 KiB or 36 KiB, so that static shared memory is enough). Edges are
// filled with zeros by cp.async's source size; rows of 16, 8 or 4 byte alignment go by pieces of that size. A warp has 64×32 (or 32×32)
// elements: 4×4 (2×4) tiles of mma m16n8.
//
// Which k a slot of a fragment means is free as long as A and B agree, and so is which row or column of the warp's part a tile's is.
// We choose both so that all loads of fragments are of 16 bytes and without bank conflicts. With g = lane / 4, t = lane % 4:
//
//	k      lane t has k = 4t to 4t+3 of the 16 (tf32: slots t and t+4 of two m16n8k8 are 4t, 4t+1 and 4t+2, 4t+3; bf16: slots
//	       2t, 2t+1, 2t+8, 2t+9 of one m16n8k16 are 4t, 4t+1, 4t+2, 4t+3)
//	rows   A with k along memory: row g (+8) of tile i is 16i + g (+8): eight lanes that load at one time read 128 adjacent bytes.
//	       A turned: row g + 8h of tile i is 32(i/2) + 4g + 2(i%2) + h: a load has one k and four rows.
//	cols   column g of tile j is 4g + j. B turned (nt) lies in shared memory with n ^ ((n>>2)&1) as its row, so that lanes that load at one
//	       time hit both halves of the banks. So a lane's d0 of the four tiles are columns 8t to 8t+3, d1 8t+4 to 8t+7: whole quads
//	       for the epilogue.
//	rows of k in shared memory (A turned, B as it is) hold column c at c ^ (((k>>2)&3)<<3): four lanes t, all banks.
//
// Expected, not measured (no GPU was at hand). Per 16 steps of a 128×128 tile a warp loads 6 KiB of shared memory (48 cycles of the SM) and
// issues 32 mma m16n8k8 of tf32 (64 cycles on an A100, 1,024 multiply-adds in 2) or 16 of bf16 (32 cycles); conversions (48 cvt, or 24
// to pairs) and addresses fit beside them. So tf32 is bound by the tensor cores: 0.70 to 0.80 of an A100's 156 TFLOP/s; bf16 by
// shared memory at 2/3 of 312: expect 0.45 to 0.55. mma.sync reaches about 0.6 of an H100's peak of wgmma (495 and 989), and shared memory
// is as fast as an A100's per cycle: expect 0.40 to 0.50 of 495 for tf32, 0.25 to 0.30 of 989 for bf16. The layers that we have read
// float32 rows of 128 to 1,024 columns once for 256 outputs: 100 flop/byte, so HBM bounds them first at 200 (A100) and 330 (H100)
// TFLOP/s. 2 blocks (16 warps) are on an SM by registers (128), 25 % occupancy.
#pragma once

#include "gemm.h"

constexpr u32 gemm_stages = 3;

// tf32: two m16n8k8 for 16 steps.
struct TF32 {
	static constexpr u32 a_words = 8, b_words = 4;
	GEMM_STATIC void a(u32 (&to)[8], const float (&low)[4], const float (&high)[4]) { // of rows g and g+8
		to[0] = dev::to_tf32(low[0]), to[1] = dev::to_tf32(high[0]), to[2] = dev::to_tf32(low[1]), to[3] = dev::to_tf32(high[1]);
		to[4] = dev::to_tf32(low[2]), to[5] = dev::to_tf32(high[2]), to[6] = dev::to_tf32(low[3]), to[7] = dev::to_tf32(high[3]);
	}
	GEMM_STATIC void b(u32 (&to)[4], const float (&v)[4]) {
		to[0] = dev::to_tf32(v[0]), to[1] = dev::to_tf32(v[1]), to[2] = dev::to_tf32(v[2]), to[3] = dev::to_tf32(v[3]);
	}
	GEMM_STATIC void multiply(float (&d)[4], const u32 (&a)[8], const u32 (&b)[4]) {
		dev::mma_tf32(d, {a[0], a[1], a[2], a[3]}, {b[0], b[1]});
		dev::mma_tf32(d, {a[4], a[5], a[6], a[7]}, {b[2], b[3]});
	}
};

// bf16: one m16n8k16.
struct BF16 {
	static constexpr u32 a_words = 4, b_words = 2;
	GEMM_STATIC void a(u32 (&to)[4], const float (&low)[4], const float (&high)[4]) {
		to[0] = dev::to_bf16x2(low[0], low[1]);
		to[1] = dev::to_bf16x2(high[0], high[1]);
		to[2] = dev::to_bf16x2(low[2], low[3]);
		to[3] = dev::to_bf16x2(high[2], high[3]);
	}
	GEMM_STATIC void b(u32 (&to)[2], const float (&v)[4]) {
		to[0] = dev::to_bf16x2(v[0], v[1]);
		to[1] = dev::to_bf16x2(v[2], v[3]);
	}
	GEMM_STATIC void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { dev::mma_bf16(d, a, b); }
};

// An operand of W rows or columns in shared memory: [W][16] where memory runs along k, else [16][W].
template <u32 W, bool along, bool columns> struct Panel {
	static constexpr u32 floats = W * gemm_bk;
	static constexpr u32 quads = floats / 4;

	// Where element (i, k) is; four of them from a multiple of 4 on in memory's direction are adjacent.
	GEMM_STATIC u32 at(u32 i, u32 k) {
		if (along) return (columns ? i ^ (i >> 2 & 1) : i) * gemm_bk + k;
		return k * W + (i ^ (k >> 2 & 3) << 3);
	}

	// Starts the copies of what thread v of 256 brings: steps k to k+15, below end, of rows or columns i to i+W-1, below n. unit is
	// how many bytes a copy may have.
	template <u32 unit> GEMM_STATIC void bring(dev::Pipe &pipe, float *to, u64 from, u32 ld, u32 i, u32 n, u32 k, u32 end, u32 v) {
		static_assert(quads % gemm_threads == 0, "whole quads for each thread");
GEMM_UNROLL(2)
		for (u32 c = 0; c < quads / gemm_threads; c++) {
			const u32 q = v + c * gemm_threads;
			const u32 qi = along ? q / (gemm_bk / 4) : q % (W / 4) * 4, qk = along ? q % (gemm_bk / 4) * 4 : q / (W / 4);
			const u32 row = along ? i + qi : k + qk, rows = along ? n : end;
			const u32 col = along ? k + qk : i + qi, cols = along ? end : n;
			const u32 bytes = row < rows && col < cols ? (cols - col < 4 ? cols - col : 4) * 4 : 0;
			const char *src = reinterpret_cast<const char *>(bytes != 0 ? element(from, row, ld, col) : dev::at<float>(from));
			char *dst = reinterpret_cast<char *>(to + at(qi, qk));
GEMM_UNROLL(4)
			for (u32 o = 0; o < 16; o += unit) {
				const u32 left = bytes > o ? bytes - o : 0;
				pipe.copy<unit>(dst + o, left != 0 ? src + o : reinterpret_cast<const char *>(dev::at<float>(from)), left < unit ? left : unit);
			}
		}
	}

	GEMM_STATIC void bring(dev::Pipe &pipe, float *to, u64 from, u32 ld, u32 i, u32 n, u32 k, u32 end, u32 v) {
		const u32 odd = (dev::again((u32)from) | ld * 4) % 16;
		if (odd == 0) {
			bring<16>(pipe, to, from, ld, i, n, k, end, v);
		} else if (odd == 8) {
			bring<8>(pipe, to, from, ld, i, n, k, end, v);
		} else {
			bring<4>(pipe, to, from, ld, i, n, k, end, v);
		}
	}
};

// Four elements of K for each of four rows or columns of a fragment.
struct Fragment {
	float v[4][4]; // by row or column, then k

	GEMM_INLINE void row(u32 i, const float *p) { // adjacent k
		Quad q = quad_of(dev::ld16(p));
		v[i][0] = q.v[0], v[i][1] = q.v[1], v[i][2] = q.v[2], v[i][3] = q.v[3];
	}
	GEMM_INLINE void step(u32 k, const float *p) { // adjacent rows or columns
		Quad q = quad_of(dev::ld16(p));
		v[0][k] = q.v[0], v[1][k] = q.v[1], v[2][k] = q.v[2], v[3][k] = q.v[3];
	}
};

// Computes a tile and hands quads of it to store(row, col, Quad). All threads of the block come here.
template <typename Math, u32 BM, u32 BN, bool TA, bool TB, typename F>
GEMM_INLINE void compute(const GemmParams &p, const Tile &t, F store) {
	typedef Panel<BM, !TA, false> A;
	typedef Panel<BN, TB, true> B;
	constexpr u32 across = BN / 32, wm = BM / (gemm_warps / across), mt = wm / 16; // warps across, rows and tiles of a warp
	constexpr u32 stage = A::floats + B::floats;
	HX_SHARED(u32x4, shared, gemm_stages * stage / 4);
	float *base = reinterpret_cast<float *>(&shared[0]);
	const u32 warps = dev::threads() / 32;
	const u32 first_steps = over(t.to - t.from, gemm_bk), steps = first_steps + over(p.K2, gemm_bk);
	for (u32 round = 0; round < gemm_warps; round += warps) {
		const u32 warp = round + dev::tid() / 32;
		float d[mt][4][4];
GEMM_UNROLL(4)
		for (u32 i = 0; i < mt; i++) {
GEMM_UNROLL(4)
			for (u32 j = 0; j < 4; j++) {
GEMM_UNROLL(4)
				for (u32 e = 0; e < 4; e++) d[i][j][e] = 0;
			}
		}
		dev::Pipe pipe;
		auto bring = [&](u32 s, u32 slot) __attribute__((always_inline)) {
			if (s < steps) {
				const u32 term = dev::again(s >= first_steps); // or a register keeps it
				Term x = term_of(p, t, term);
				x.k += (s - (term ? first_steps : 0)) * gemm_bk;
				float *to = base + slot * stage;
GEMM_UNROLL(1)
				for (u32 v = dev::again(dev::tid()); v < gemm_threads; v += dev::threads()) {
					A::bring(pipe, to, x.a, x.lda, t.row, (u32)p.M, x.k, x.end, v);
					B::bring(pipe, to + A::floats, x.b, x.ldb, t.col, (u32)p.N, x.k, x.end, v);
				}
			}
			pipe.commit(); // also of nothing, so that wait counts right
		};
		bring(0, 0);
		bring(1, 1);
		u32 slot = 0;
GEMM_UNROLL(1)
		for (u32 s = 0; s < steps; s++) {
			pipe.wait<1>();
			dev::syncthreads(); // step s is here for all, and step s-1 is done with
			bring(s + 2, dev::again(slot) == 0 ? 2 : dev::again(slot) - 1);
			const float *a = base + slot * stage, *b = a + A::floats;
			slot = slot == 2 ? 0 : slot + 1;
			if (warp >= gemm_warps) continue; // the last round may have work for fewer than there are
			const u32 w = dev::again(warp), lane = dev::again(dev::lane());
			const u32 row = w / across * wm, col = w % across * 32, g = lane / 4, k4 = lane % 4 * 4;
			u32 fb[4][Math::b_words];
			Fragment y;
			if constexpr (TB) {
				y.row(0, b + B::at(col + 4 * g, k4)), y.row(1, b + B::at(col + 4 * g + 1, k4));
				y.row(2, b + B::at(col + 4 * g + 2, k4)), y.row(3, b + B::at(col + 4 * g + 3, k4));
			} else {
				y.step(0, b + B::at(col + 4 * g, k4)), y.step(1, b + B::at(col + 4 * g, k4 + 1));
				y.step(2, b + B::at(col + 4 * g, k4 + 2)), y.step(3, b + B::at(col + 4 * g, k4 + 3));
			}
			Math::b(fb[0], y.v[0]), Math::b(fb[1], y.v[1]), Math::b(fb[2], y.v[2]), Math::b(fb[3], y.v[3]);
GEMM_UNROLL(2)
			for (u32 i = 0; i < mt; i += 2) {
				Fragment x; // rows g and g+8 of tile i, then of tile i+1
				const u32 r = row + 16 * i;
				if constexpr (!TA) {
					x.row(0, a + A::at(r + g, k4)), x.row(1, a + A::at(r + 8 + g, k4));
					x.row(2, a + A::at(r + 16 + g, k4)), x.row(3, a + A::at(r + 24 + g, k4));
				} else {
					x.step(0, a + A::at(r + 4 * g, k4)), x.step(1, a + A::at(r + 4 * g, k4 + 1));
					x.step(2, a + A::at(r + 4 * g, k4 + 2)), x.step(3, a + A::at(r + 4 * g, k4 + 3));
				}
				u32 fa[Math::a_words];
				Math::a(fa, x.v[0], x.v[1]);
				Math::multiply(d[i][0], fa, fb[0]), Math::multiply(d[i][1], fa, fb[1]);
				Math::multiply(d[i][2], fa, fb[2]), Math::multiply(d[i][3], fa, fb[3]);
				Math::a(fa, x.v[2], x.v[3]);
				Math::multiply(d[i + 1][0], fa, fb[0]), Math::multiply(d[i + 1][1], fa, fb[1]);
				Math::multiply(d[i + 1][2], fa, fb[2]), Math::multiply(d[i + 1][3], fa, fb[3]);
			}
		}
		pipe.wait<0>();
		dev::syncthreads();
		// Through shared memory, which nobody else uses now: registers have no index that a loop could count, and the code that
		// finishes a quad is too long to be there for each of them.
		static_assert(gemm_stages * stage >= 16 * gemm_threads, "room for a tile of each thread");
		u32x4 *mine = &shared[dev::tid()];
		if (warp < gemm_warps) {
GEMM_UNROLL(4)
			for (u32 i = 0; i < mt; i++) {
GEMM_UNROLL(4)
				for (u32 e = 0; e < 4; e++) dev::st16(mine + e * gemm_threads, words_of({{d[i][0][e], d[i][1][e], d[i][2][e], d[i][3][e]}}));
GEMM_UNROLL(1)
				for (u32 e = 0; e < 4; e++) {
					const u32 w = dev::again(warp), lane = dev::again(dev::lane()), g = lane / 4, h = e / 2;
					const u32 r = TA ? 32 * (i / 2) + 4 * g + 2 * (i % 2) + h : 16 * i + 8 * h + g;
					store(t.row + w / across * wm + r, t.col + w % across * 32 + lane % 4 * 8 + e % 2 * 4, quad_of(dev::ld16(mine + e * gemm_threads)));
				}
			}
		}
		dev::syncthreads();
	}
}

template <typename Math, u32 BM, u32 BN, bool TA, bool TB> GEMM_INLINE void product(const GemmParams &p, const hx_launch &hx) {
	if (dev::dropped(hx)) return;
	for (u32 i = dev::bid(); i < tiles_of(p, BM, BN); i += dev::blocks()) {
		compute<Math, BM, BN, TA, TB>(p, tile_at(p, i, BM, BN, 0),
		                              [&](u32 row, u32 col, const Quad &q) __attribute__((always_inline)) { finish(finish_of(p), p.Drop, row, col, q); });
	}
}

template <typename Math, u32 BM, u32 BN> GEMM_INLINE void split(const GemmSplitParams &s, const hx_launch &hx) {
	if (dev::dropped(hx)) return;
	for (u32 i = dev::bid(); i < tiles_of(s.P, BM, BN) * over(s.P.K, (u32)s.Chunk); i += dev::blocks()) {
		compute<Math, BM, BN, true, false>(s.P, tile_at(s.P, i, BM, BN, (u32)s.Chunk), [&](u32 row, u32 col, const Quad &q) __attribute__((always_inline)) {
			store_part(s, dev::again(i) / tiles_of(s.P, BM, BN), row, col, q);
		});
	}
}
