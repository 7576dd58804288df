// The GPU's side of device.h, and the only file with inline assembly. clang does not look into
// asm, so every opcode here is in the table of tools/kernels (ptx_opcodes.txt), and ptxas checks
// the result. PTX ISA 8.2 for st.mmio, sm_70 for scopes.
#pragma once

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))

#define HX_DEVICE __device__
#define HX_KERNEL(NAME, PARAMS) extern "C" __global__ void NAME(const PARAMS p, const hx_launch hx)
#define HX_THREADS(NAME, PARAMS, N) extern "C" __global__ __attribute__((launch_bounds(N))) void NAME(const PARAMS p, const hx_launch hx);
#define HX_RESIDENT(NAME, PARAMS, N, PER_SM) extern "C" __global__ __attribute__((launch_bounds(N, PER_SM))) void NAME(const PARAMS p, const hx_launch hx);
#define HX_SHARED(T, NAME, N) static __shared__ T NAME[N]

namespace dev {

HX_DEVICE __forceinline__ u32 tid() { return __nvvm_read_ptx_sreg_tid_x(); }
HX_DEVICE __forceinline__ u32 threads() { return __nvvm_read_ptx_sreg_ntid_x(); }
HX_DEVICE __forceinline__ u32 bid() { return __nvvm_read_ptx_sreg_ctaid_x(); }
HX_DEVICE __forceinline__ u32 blocks() { return __nvvm_read_ptx_sreg_nctaid_x(); }
HX_DEVICE __forceinline__ u32 lane() { return tid() & 31; }
HX_DEVICE __forceinline__ u32 warp() { return bid() * (threads() / 32) + tid() / 32; }
HX_DEVICE __forceinline__ u32 warps() { return blocks() * (threads() / 32); }

HX_DEVICE __forceinline__ void syncthreads() { asm volatile("bar.sync 0;" ::: "memory"); }
HX_DEVICE __forceinline__ void syncwarp(u32 mask = full_mask) {
	asm volatile("bar.warp.sync %0;" ::"r"(mask) : "memory");
}
HX_DEVICE __forceinline__ u32 ballot(u32 mask, bool pred) {
	u32 r;
	asm volatile("{\n\t.reg .pred q;\n\tsetp.ne.u32 q, %1, 0;\n\tvote.sync.ballot.b32 %0, q, %2;\n\t}"
	             : "=r"(r)
	             : "r"((u32)pred), "r"(mask)
	             : "memory");
	return r;
}
HX_DEVICE __forceinline__ bool any(u32 mask, bool pred) { return ballot(mask, pred) != 0; }
HX_DEVICE __forceinline__ bool all(u32 mask, bool pred) { return ballot(mask, pred) == mask; }
HX_DEVICE __forceinline__ u32 shfl(u32 mask, u32 v, u32 src) {
	u32 r;
	asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, %3;" : "=r"(r) : "r"(v), "r"(src), "r"(mask) : "memory");
	return r;
}
HX_DEVICE __forceinline__ i32 shfl(u32 mask, i32 v, u32 src) { return (i32)shfl(mask, (u32)v, src); }
HX_DEVICE __forceinline__ u64 shfl(u32 mask, u64 v, u32 src) {
	return (u64)shfl(mask, (u32)v, src) | (u64)shfl(mask, (u32)(v >> 32), src) << 32;
}
HX_DEVICE __forceinline__ i64 shfl(u32 mask, i64 v, u32 src) { return (i64)shfl(mask, (u64)v, src); }

// A tree of shuffles: redux.sync needs sm_80. All lanes of a contiguous full mask only.
HX_DEVICE __forceinline__ u32 reduce_add(u32 mask, u32 v) {
	for (u32 d = 16; d > 0; d /= 2) v += shfl(mask, v, lane() ^ d);
	return v;
}

template <typename T> HX_DEVICE __forceinline__ T ld(const T *p) { return *p; }
template <typename T> HX_DEVICE __forceinline__ void st(T *p, T v) { *p = v; }
// As vectors: a struct's words would be stored as the optimiser sees fit.
typedef u32 vector16 __attribute__((ext_vector_type(4)));
HX_DEVICE __forceinline__ u32x4 ld16(const void *p) {
	vector16 v = *static_cast<const vector16 *>(p);
	return {v.x, v.y, v.z, v.w};
}
// The same of global memory, as one instruction whatever other loads are near: the optimiser has split it to share words
// with them.
HX_DEVICE __forceinline__ u32x4 ld16_global(const void *p) {
	u32x4 v;
	asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
	return v;
}
HX_DEVICE __forceinline__ void st16(void *p, u32x4 v) { *static_cast<vector16 *>(p) = vector16{v.x, v.y, v.z, v.w}; }

// Addresses of the ABI are of global memory, the CPU's included. Said here, plain accesses become
// ld.global and st.global, not generic ones that look for shared memory first. The functions below take only such
// addresses, which are the same numbers in the generic space.
template <typename T> HX_DEVICE __forceinline__ T *global(u64 address) {
	return (T *)(__attribute__((address_space(1))) T *)address;
}

#define HX_LOADS(SCOPE)                                                                             \
	HX_DEVICE __forceinline__ u32 ld_relaxed_##SCOPE(const u32 *p) {                                 \
		u32 v;                                                                                        \
		asm volatile("ld.relaxed." #SCOPE ".global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");            \
		return v;                                                                                     \
	}                                                                                               \
	HX_DEVICE __forceinline__ u64 ld_relaxed_##SCOPE(const u64 *p) {                                 \
		u64 v;                                                                                        \
		asm volatile("ld.relaxed." #SCOPE ".global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");            \
		return v;                                                                                     \
	}                                                                                               \
	HX_DEVICE __forceinline__ u32 ld_acquire_##SCOPE(const u32 *p) {                                 \
		u32 v;                                                                                        \
		asm volatile("ld.acquire." #SCOPE ".global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");            \
		return v;                                                                                     \
	}                                                                                               \
	HX_DEVICE __forceinline__ u64 ld_acquire_##SCOPE(const u64 *p) {                                 \
		u64 v;                                                                                        \
		asm volatile("ld.acquire." #SCOPE ".global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");            \
		return v;                                                                                     \
	}                                                                                               \
	HX_DEVICE __forceinline__ void st_relaxed_##SCOPE(u32 *p, u32 v) {                               \
		asm volatile("st.relaxed." #SCOPE ".global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");              \
	}                                                                                               \
	HX_DEVICE __forceinline__ void st_relaxed_##SCOPE(u64 *p, u64 v) {                               \
		asm volatile("st.relaxed." #SCOPE ".global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");              \
	}                                                                                               \
	HX_DEVICE __forceinline__ void st_release_##SCOPE(u32 *p, u32 v) {                               \
		asm volatile("st.release." #SCOPE ".global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");              \
	}                                                                                               \
	HX_DEVICE __forceinline__ void st_release_##SCOPE(u64 *p, u64 v) {                               \
		asm volatile("st.release." #SCOPE ".global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");              \
	}                                                                                               \
	HX_DEVICE __forceinline__ i64 ld_relaxed_##SCOPE(const i64 *p) {                                 \
		return (i64)ld_relaxed_##SCOPE((const u64 *)p);                                               \
	}                                                                                               \
	HX_DEVICE __forceinline__ i64 ld_acquire_##SCOPE(const i64 *p) {                                 \
		return (i64)ld_acquire_##SCOPE((const u64 *)p);                                               \
	}                                                                                               \
	HX_DEVICE __forceinline__ void st_relaxed_##SCOPE(i64 *p, i64 v) { st_relaxed_##SCOPE((u64 *)p, (u64)v); } \
	HX_DEVICE __forceinline__ void st_release_##SCOPE(i64 *p, i64 v) { st_release_##SCOPE((u64 *)p, (u64)v); }
HX_LOADS(gpu)
HX_LOADS(sys)
#undef HX_LOADS

// One read-modify-write, for the four orders.
#define HX_ATOM(NAME, OP, SCOPE, TYPE, PTX, REG)                                                    \
	template <Order O> HX_DEVICE __forceinline__ TYPE NAME##_##SCOPE(TYPE *p, TYPE v) {               \
		TYPE r;                                                                                       \
		if constexpr (O == relaxed)                                                                   \
			asm volatile("atom.relaxed." #SCOPE ".global." OP "." PTX " %0, [%1], %2;" : "=" REG(r) : "l"(p), REG(v) : "memory"); \
		else if constexpr (O == acquire)                                                              \
			asm volatile("atom.acquire." #SCOPE ".global." OP "." PTX " %0, [%1], %2;" : "=" REG(r) : "l"(p), REG(v) : "memory"); \
		else if constexpr (O == release)                                                              \
			asm volatile("atom.release." #SCOPE ".global." OP "." PTX " %0, [%1], %2;" : "=" REG(r) : "l"(p), REG(v) : "memory"); \
		else                                                                                          \
			asm volatile("atom.acq_rel." #SCOPE ".global." OP "." PTX " %0, [%1], %2;" : "=" REG(r) : "l"(p), REG(v) : "memory"); \
		return r;                                                                                     \
	}
#define HX_ATOMS(SCOPE)                                  \
	HX_ATOM(add, "add", SCOPE, u32, "u32", "r")           \
	HX_ATOM(add, "add", SCOPE, u64, "u64", "l")           \
	HX_ATOM(or, "or", SCOPE, u32, "b32", "r")             \
	HX_ATOM(or, "or", SCOPE, u64, "b64", "l")             \
	HX_ATOM(and, "and", SCOPE, u32, "b32", "r")           \
	HX_ATOM(and, "and", SCOPE, u64, "b64", "l")           \
	HX_ATOM(min, "min", SCOPE, u32, "u32", "r")           \
	HX_ATOM(min, "min", SCOPE, u64, "u64", "l")           \
	HX_ATOM(max, "max", SCOPE, u32, "u32", "r")           \
	HX_ATOM(max, "max", SCOPE, u64, "u64", "l")           \
	HX_ATOM(max, "max", SCOPE, i64, "s64", "l")           \
	HX_ATOM(exch, "exch", SCOPE, u32, "b32", "r")         \
	HX_ATOM(exch, "exch", SCOPE, u64, "b64", "l")         \
	HX_CAS(SCOPE, u32, "b32", "r")                        \
	HX_CAS(SCOPE, u64, "b64", "l")
#define HX_CAS(SCOPE, TYPE, PTX, REG)                                                                \
	template <Order O> HX_DEVICE __forceinline__ TYPE cas_##SCOPE(TYPE *p, TYPE want, TYPE v) {        \
		TYPE r;                                                                                       \
		if constexpr (O == relaxed)                                                                   \
			asm volatile("atom.relaxed." #SCOPE ".global.cas." PTX " %0, [%1], %2, %3;" : "=" REG(r) : "l"(p), REG(want), REG(v) : "memory"); \
		else if constexpr (O == acquire)                                                              \
			asm volatile("atom.acquire." #SCOPE ".global.cas." PTX " %0, [%1], %2, %3;" : "=" REG(r) : "l"(p), REG(want), REG(v) : "memory"); \
		else if constexpr (O == release)                                                              \
			asm volatile("atom.release." #SCOPE ".global.cas." PTX " %0, [%1], %2, %3;" : "=" REG(r) : "l"(p), REG(want), REG(v) : "memory"); \
		else                                                                                          \
			asm volatile("atom.acq_rel." #SCOPE ".global.cas." PTX " %0, [%1], %2, %3;" : "=" REG(r) : "l"(p), REG(want), REG(v) : "memory"); \
		return r;                                                                                     \
	}
HX_ATOMS(gpu)
HX_ATOMS(sys)
#undef HX_ATOMS
#undef HX_ATOM
#undef HX_CAS

// A counter in shared memory, for the threads of the block.
HX_DEVICE __forceinline__ void add_shared(u32 *p, u32 v) {
	u32 at = (u32)(u64)(__attribute__((address_space(3))) u32 *)p;
	asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

// Tensor cores, and copies to shared memory that a thread does not wait for: modules of sm_80 only (compile.go of
// tools/kernels).

// PTX ISA, "cvt": round to nearest, ties away from zero, the only mode that tf32 has.
HX_DEVICE __forceinline__ u32 to_tf32(float v) {
	u32 r;
	asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
	return r;
}
// Round to nearest even. The instruction's first operand becomes the upper half.
HX_DEVICE __forceinline__ u32 to_bf16x2(float low, float high) {
	u32 r;
	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
	return r;
}
HX_DEVICE __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
	asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
	             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
HX_DEVICE __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
	             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// PTX ISA, "cp.async": bytes from `bytes` on are filled with zeros and not read; .cg goes around L1.
struct Pipe {
	template <u32 N> HX_DEVICE __forceinline__ void copy(void *dst, const void *src, u32 bytes) {
		static_assert(N == 4 || N == 8 || N == 16, "what cp.async moves");
		u32 to = (u32)(u64)(__attribute__((address_space(3))) void *)dst;
		if constexpr (N == 16)
			asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(src), "r"(bytes) : "memory");
		else
			asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(src), "r"(bytes), "n"(N) : "memory");
	}
	HX_DEVICE __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
	template <u32 N> HX_DEVICE __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
};

// v, of which the compiler knows nothing: what is computed from it is computed again, and takes no registers meanwhile.
HX_DEVICE __forceinline__ u32 again(u32 v) {
	asm volatile("" : "+r"(v));
	return v;
}

HX_DEVICE __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
HX_DEVICE __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

HX_DEVICE __forceinline__ void ring(u32 *doorbell, u32 v) {
	asm volatile("st.mmio.relaxed.sys.global.u32 [%0], %1;" ::"l"(__builtin_bit_cast(u64, doorbell)), "r"(v) : "memory");
}

HX_DEVICE __forceinline__ i64 now_ns() {
	i64 t;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
	return t;
}
HX_DEVICE __forceinline__ void pause(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory"); }

HX_DEVICE __forceinline__ u32 popc(u32 v) { return (u32)__builtin_popcount(v); }
HX_DEVICE __forceinline__ u32 popc(u64 v) { return (u32)__builtin_popcountll(v); }
HX_DEVICE __forceinline__ u32 ctz(u32 v) { return (u32)__builtin_ctz(v); } // v != 0
HX_DEVICE __forceinline__ u32 ctz(u64 v) { return (u32)__builtin_ctzll(v); }
HX_DEVICE __forceinline__ u32 clz(u64 v) { return (u32)__builtin_clzll(v); } // v != 0
HX_DEVICE __forceinline__ u32 mulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
HX_DEVICE __forceinline__ u64 mulhi(u64 a, u64 b) {
	u64 r;
	asm("mul.hi.u64 %0, %1, %2;" : "=l"(r) : "l"(a), "l"(b));
	return r;
}

} // namespace dev
