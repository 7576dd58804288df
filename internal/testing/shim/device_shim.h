// The CPU shim's side of device.h: calls of the shim's runtime in place of ptx.h's assembly. A plain
// access is checked for alignment, which the GPU would fault on, and counted as a place where
// other threads may run when the runtime asked for that.
#pragma once

#include "runtime.h"

#define HX_DEVICE
#define HX_KERNEL(NAME, PARAMS)                                                                          \
	static void NAME(const PARAMS &p, const hx_launch &hx);                                               \
	static void NAME##_shim(const void *p, const hx_launch &hx) { NAME(*static_cast<const PARAMS *>(p), hx); } \
	static const shim::Registrar NAME##_registrar(#NAME, sizeof(PARAMS), NAME##_shim);                    \
	static void NAME([[maybe_unused]] const PARAMS &p, [[maybe_unused]] const hx_launch &hx)
#define HX_THREADS(NAME, PARAMS, N)
#define HX_RESIDENT(NAME, PARAMS, N, PER_SM)
#define HX_SHARED(T, NAME, N)         \
	static const char NAME##_key = 0; \
	T(&NAME)[N] = *static_cast<T(*)[N]>(shim::shared(&NAME##_key, sizeof(T) * (N), alignof(T)))

#if HX_TSAN
extern "C" {
void __tsan_read1(void *);
void __tsan_read2(void *);
void __tsan_read4(void *);
void __tsan_read8(void *);
void __tsan_read16(void *);
void __tsan_write1(void *);
void __tsan_write2(void *);
void __tsan_write4(void *);
void __tsan_write8(void *);
void __tsan_write16(void *);
}
#endif

namespace dev {

// Machinery of this header; kernels leave it alone.
namespace shim_detail {

template <unsigned N> struct uint_of;
template <> struct uint_of<1> { typedef u8 __attribute__((may_alias)) type; };
template <> struct uint_of<2> { typedef u16 __attribute__((may_alias)) type; };
template <> struct uint_of<4> { typedef u32 __attribute__((may_alias)) type; };
template <> struct uint_of<8> { typedef u64 __attribute__((may_alias)) type; };

__extension__ typedef unsigned __int128 u128;

inline __attribute__((always_inline)) void aligned(const void *p, u32 size) {
	if (__builtin_expect((reinterpret_cast<u64>(p) & (size - 1)) != 0, 0)) shim::misaligned(p, size);
}

// Before each operation that orders or polls.
inline __attribute__((always_inline)) void step(const void *p, u32 size) {
	aligned(p, size);
#if HX_TSAN
	shim::step(); // not here: that would be a watched write, of what other CUDA threads have used before
#else
	shim::Thread *t = shim::self;
	if (__builtin_expect(--t->budget <= 0, 0)) shim::point();
#endif
}

inline __attribute__((always_inline)) bool buffered() { return (shim::self->hooks & shim::hook_buffer) != 0; }

template <typename T> inline __attribute__((always_inline)) void saw_read([[maybe_unused]] const T *p) {
#if HX_TSAN
	void *q = const_cast<void *>(static_cast<const void *>(p));
	if constexpr (sizeof(T) == 1) __tsan_read1(q);
	if constexpr (sizeof(T) == 2) __tsan_read2(q);
	if constexpr (sizeof(T) == 4) __tsan_read4(q);
	if constexpr (sizeof(T) == 8) __tsan_read8(q);
	if constexpr (sizeof(T) == 16) __tsan_read16(q);
#endif
}

template <typename T> inline __attribute__((always_inline)) void saw_write([[maybe_unused]] T *p) {
#if HX_TSAN
	void *q = static_cast<void *>(p);
	if constexpr (sizeof(T) == 1) __tsan_write1(q);
	if constexpr (sizeof(T) == 2) __tsan_write2(q);
	if constexpr (sizeof(T) == 4) __tsan_write4(q);
	if constexpr (sizeof(T) == 8) __tsan_write8(q);
	if constexpr (sizeof(T) == 16) __tsan_write16(q);
#endif
}

constexpr int order(Order o) {
	return o == relaxed   ? __ATOMIC_RELAXED
	       : o == acquire ? __ATOMIC_ACQUIRE
	       : o == release ? __ATOMIC_RELEASE
	                      : __ATOMIC_ACQ_REL;
}

template <Order O, typename T> inline T load(const T *p) {
	step(p, sizeof(T));
	T v = __atomic_load_n(p, order(O));
	if (__builtin_expect(buffered(), 0)) shim::merge(p, sizeof(T), &v);
#if HX_TSAN
	if (O == relaxed) shim::tsan_relaxed_load(p);
#endif
	return v;
}

template <Order O, typename T> inline __attribute__((always_inline)) void before_write(T *p) {
	step(p, sizeof(T));
	if (__builtin_expect(buffered(), 0)) {
		if (O == release || O == acq_rel)
			shim::flush_all();
		else
			shim::flush(p, sizeof(T));
	}
#if HX_TSAN
	if (O == relaxed || O == acquire) shim::tsan_relaxed_store(p);
#endif
}

template <Order O, typename T> inline void store(T *p, T v) {
	before_write<O>(p);
	__atomic_store_n(p, v, order(O));
}

template <Order O, typename T> inline __attribute__((always_inline)) T after_read([[maybe_unused]] T *p, T v) {
#if HX_TSAN
	if (O == relaxed || O == release) shim::tsan_relaxed_load(p);
#endif
	return v;
}

// An operation without a builtin: a loop of compare-and-swap.
template <Order O, typename T, typename F> inline T rmw(T *p, F f) {
	before_write<O>(p);
	T old = __atomic_load_n(p, __ATOMIC_RELAXED);
	while (!__atomic_compare_exchange_n(p, &old, f(old), false, order(O), __ATOMIC_RELAXED)) {
	}
	return after_read<O>(p, old);
}

} // namespace shim_detail

inline u32 tid() { return shim::self->tid; }
inline u32 threads() { return shim::self->threads; }
inline u32 bid() { return shim::self->bid; }
inline u32 blocks() { return shim::self->blocks; }
inline u32 lane() { return tid() & 31; }
inline u32 warp() { return bid() * (threads() / 32) + tid() / 32; }
inline u32 warps() { return blocks() * (threads() / 32); }

inline void syncthreads() { shim::barrier(); }
inline void syncwarp(u32 mask = full_mask) { shim::collective(shim::Op::syncwarp, mask, 0, 0); }
inline u32 ballot(u32 mask, bool pred) { return (u32)shim::collective(shim::Op::ballot, mask, pred, 0); }
inline bool any(u32 mask, bool pred) { return ballot(mask, pred) != 0; }
inline bool all(u32 mask, bool pred) { return ballot(mask, pred) == mask; }
inline u32 shfl(u32 mask, u32 v, u32 src) { return (u32)shim::collective(shim::Op::shfl32, mask, v, src); }
inline i32 shfl(u32 mask, i32 v, u32 src) { return (i32)shfl(mask, (u32)v, src); }
inline u64 shfl(u32 mask, u64 v, u32 src) { return shim::collective(shim::Op::shfl64, mask, v, src); }
inline i64 shfl(u32 mask, i64 v, u32 src) { return (i64)shfl(mask, (u64)v, src); }
inline u32 reduce_add(u32 mask, u32 v) { return (u32)shim::collective(shim::Op::reduce_add, mask, v, 0); }

template <typename T> inline T ld(const T *p) {
	static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0, "a size that the GPU moves at once");
	if (__builtin_expect(shim::self->hooks != 0, 0)) {
		shim_detail::step(p, sizeof(T));
		shim_detail::saw_read(p);
		T v;
		shim::load(p, (u32)sizeof(T), &v);
		return v;
	}
	shim_detail::aligned(p, sizeof(T));
#if !HX_TSAN
	if constexpr (sizeof(T) <= 8) {
		// Relaxed, so that a race between OS threads is no licence for the compiler.
		typedef typename shim_detail::uint_of<sizeof(T)>::type U;
		U bits = __atomic_load_n(reinterpret_cast<const U *>(p), __ATOMIC_RELAXED);
		T v;
		__builtin_memcpy(&v, &bits, sizeof v);
		return v;
	}
#endif
	return *p;
}

template <typename T> inline void st(T *p, T v) {
	static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0, "a size that the GPU moves at once");
	if (__builtin_expect(shim::self->hooks != 0, 0)) {
		shim_detail::step(p, sizeof(T));
		shim_detail::saw_write(p);
		shim::hold(p, (u32)sizeof(T), &v);
		return;
	}
	shim_detail::aligned(p, sizeof(T));
#if !HX_TSAN
	if constexpr (sizeof(T) <= 8) {
		typedef typename shim_detail::uint_of<sizeof(T)>::type U;
		U bits;
		__builtin_memcpy(&bits, &v, sizeof v);
		__atomic_store_n(reinterpret_cast<U *>(p), bits, __ATOMIC_RELAXED);
		return;
	}
#endif
	*p = v;
}

inline u32x4 ld16(const void *p) { return ld(static_cast<const u32x4 *>(p)); }
inline u32x4 ld16_global(const void *p) { return ld16(p); }
inline void st16(void *p, u32x4 v) { st(static_cast<u32x4 *>(p), v); }

template <typename T> inline T *global(u64 address) { return reinterpret_cast<T *>(address); }

#define HX_LOADS(SCOPE, T)                                                                          \
	inline T ld_relaxed_##SCOPE(const T *p) { return shim_detail::load<relaxed>(p); }                \
	inline T ld_acquire_##SCOPE(const T *p) { return shim_detail::load<acquire>(p); }                \
	inline void st_relaxed_##SCOPE(T *p, T v) { shim_detail::store<relaxed>(p, v); }                 \
	inline void st_release_##SCOPE(T *p, T v) { shim_detail::store<release>(p, v); }
HX_LOADS(gpu, u32)
HX_LOADS(gpu, u64)
HX_LOADS(gpu, i64)
HX_LOADS(sys, u32)
HX_LOADS(sys, u64)
HX_LOADS(sys, i64)
#undef HX_LOADS

#define HX_RMW(NAME, SCOPE, T, BUILTIN)                                                             \
	template <Order O> inline T NAME##SCOPE(T *p, T v) {                                              \
		shim_detail::before_write<O>(p);                                                              \
		return shim_detail::after_read<O>(p, BUILTIN(p, v, shim_detail::order(O)));                   \
	}
#define HX_PICK(NAME, SCOPE, T, TAKES)                                                              \
	template <Order O> inline T NAME##SCOPE(T *p, T v) {                                              \
		return shim_detail::rmw<O>(p, [v](T old) { return v TAKES old ? v : old; });                  \
	}
#define HX_CAS(SCOPE, T)                                                                            \
	template <Order O> inline T cas_##SCOPE(T *p, T want, T v) {                                      \
		shim_detail::before_write<O>(p);                                                              \
		__atomic_compare_exchange_n(p, &want, v, false, shim_detail::order(O),                        \
		                            O == acquire || O == acq_rel ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED); \
		return shim_detail::after_read<O>(p, want);                                                   \
	}
#define HX_ATOMS(SCOPE)                       \
	HX_RMW(add_, SCOPE, u32, __atomic_fetch_add) \
	HX_RMW(add_, SCOPE, u64, __atomic_fetch_add) \
	HX_RMW(or_, SCOPE, u32, __atomic_fetch_or)   \
	HX_RMW(or_, SCOPE, u64, __atomic_fetch_or)   \
	HX_RMW(and_, SCOPE, u32, __atomic_fetch_and) \
	HX_RMW(and_, SCOPE, u64, __atomic_fetch_and) \
	HX_RMW(exch_, SCOPE, u32, __atomic_exchange_n) \
	HX_RMW(exch_, SCOPE, u64, __atomic_exchange_n) \
	HX_PICK(min_, SCOPE, u32, <)               \
	HX_PICK(min_, SCOPE, u64, <)               \
	HX_PICK(max_, SCOPE, u32, >)               \
	HX_PICK(max_, SCOPE, u64, >)               \
	HX_PICK(max_, SCOPE, i64, >)               \
	HX_CAS(SCOPE, u32)                         \
	HX_CAS(SCOPE, u64)
HX_ATOMS(gpu)
HX_ATOMS(sys)
#undef HX_ATOMS
#undef HX_CAS
#undef HX_PICK
#undef HX_RMW

inline void add_shared(u32 *p, u32 v) { add_gpu<relaxed>(p, v); }

inline void fence_gpu() { shim::fence(); }
inline void fence_sys() { shim::fence(); }

inline void ring(u32 *doorbell, u32 v) { shim_detail::store<relaxed>(doorbell, v); }

inline i64 now_ns() { return shim::now(); }
inline void pause(u32 ns) { shim::pause(ns); }

inline u32 again(u32 v) { return v; }

inline u32 popc(u32 v) { return (u32)__builtin_popcount(v); }
inline u32 popc(u64 v) { return (u32)__builtin_popcountll(v); }
inline u32 ctz(u32 v) { return (u32)__builtin_ctz(v); } // v != 0
inline u32 ctz(u64 v) { return (u32)__builtin_ctzll(v); }
inline u32 clz(u64 v) { return (u32)__builtin_clzll(v); } // v != 0
inline u32 mulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline u64 mulhi(u64 a, u64 b) { return (u64)((shim_detail::u128)a * b >> 64); }

// The products of tensor cores, by the fragment layouts of the PTX ISA (9.7.14.5, "Matrix Fragments"). With g = lane / 4 and
// t = lane % 4, a lane holds of A[16, K], B[K, 8] and D[16, 8]
//
//	m16n8k8, tf32: a0 A[g][t], a1 A[g+8][t], a2 A[g][t+4], a3 A[g+8][t+4]; b0 B[t][g], b1 B[t+4][g]
//	m16n8k16, bf16, two to a register, the lower k in the lower half: a0 A[g][2t…], a1 A[g+8][2t…], a2 A[g][2t+8…],
//	         a3 A[g+8][2t+8…]; b0 B[2t…][g], b1 B[2t+8…][g]
//	both:    d0 D[g][2t], d1 D[g][2t+1], d2 D[g+8][2t], d3 D[g+8][2t+1]
//
// The GPU's sums over k have an order of their own; here they are exact but for their last rounding.
inline u32 to_tf32(float v) {
	u32 b = __builtin_bit_cast(u32, v);
	if ((b & 0x7f800000) == 0x7f800000) return (b & 0x7fffff) != 0 ? 0x7fffffffu : b;
	return (b + 0x1000) & ~0x1fffu;
}
inline u32 to_bf16x2(float low, float high) {
	u32 r = 0;
	float v[2] = {low, high};
	for (u32 i = 0; i < 2; i++) {
		u32 b = __builtin_bit_cast(u32, v[i]);
		u32 h = (b & 0x7fffffff) > 0x7f800000 ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
		r |= h << (16 * i);
	}
	return r;
}

namespace shim_detail {

// A warp's operands, as lanes bring them to Op::warp.
struct Mma {
	void (*run)(u64 *lanes); // first, see shim::Op
	float *d;
	const u32 *a, *b;
};

template <u32 K> __attribute__((no_sanitize("thread"))) inline void mma(u64 *lanes) {
	float a[16][K], b[8][K]; // b by columns
	for (u32 l = 0; l < 32; l++) {
		const Mma *m = reinterpret_cast<const Mma *>(lanes[l]);
		u32 g = l / 4, t = l % 4;
		for (u32 r = 0; r < 4; r++) {
			u32 row = g + r % 2 * 8, half = r / 2;
			if constexpr (K == 8) {
				a[row][t + 4 * half] = __builtin_bit_cast(float, m->a[r] & ~0x1fffu);
				if (r % 2 == 0) b[g][t + 4 * half] = __builtin_bit_cast(float, m->b[half] & ~0x1fffu);
			} else {
				for (u32 e = 0; e < 2; e++) {
					u32 k = 2 * t + 8 * half + e, cut = 16 * (1 - e);
					a[row][k] = __builtin_bit_cast(float, m->a[r] << cut & 0xffff0000u);
					if (r % 2 == 0) b[g][k] = __builtin_bit_cast(float, m->b[half] << cut & 0xffff0000u);
				}
			}
		}
	}
	for (u32 l = 0; l < 32; l++) {
		float *d = reinterpret_cast<const Mma *>(lanes[l])->d;
		for (u32 i = 0; i < 4; i++) {
			const float *x = a[l / 4 + i / 2 * 8], *y = b[l % 4 * 2 + i % 2];
			double s = d[i];
			for (u32 k = 0; k < K; k++) s += (double)x[k] * y[k];
			d[i] = (float)s;
		}
	}
}

} // namespace shim_detail

inline void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
	shim_detail::Mma m = {shim_detail::mma<8>, d, a, b};
	shim::collective(shim::Op::warp, full_mask, reinterpret_cast<u64>(&m), 0);
}
inline void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
	shim_detail::Mma m = {shim_detail::mma<16>, d, a, b};
	shim::collective(shim::Op::warp, full_mask, reinterpret_cast<u64>(&m), 0);
}

// Copies are made as late as they may be, so that a kernel that does not wait for them finds out.
class Pipe {
  public:
	Pipe() = default;
	Pipe(const Pipe &) = delete;
	Pipe &operator=(const Pipe &) = delete;
	~Pipe() { __builtin_free(list_); }
	template <u32 N> void copy(void *dst, const void *src, u32 bytes) {
		static_assert(N == 4 || N == 8 || N == 16, "what cp.async moves");
		shim_detail::aligned(dst, N);
		shim_detail::aligned(src, N);
		if (count_ == room_) {
			room_ = room_ == 0 ? 32 : 2 * room_;
			list_ = static_cast<Copy *>(__builtin_realloc(list_, room_ * sizeof(Copy)));
		}
		list_[count_++] = {dst, src, N, bytes < N ? bytes : N, group_};
	}
	void commit() { group_++; }
	template <u32 N> void wait() {
		u32 kept = 0;
		for (u32 i = 0; i < count_; i++) {
			const Copy c = list_[i];
			if (c.group + N >= group_) {
				list_[kept++] = c;
				continue;
			}
			for (u32 at = 0; at < c.size; at += 4) {
				const u32 *from = reinterpret_cast<const u32 *>(static_cast<const char *>(c.src) + at);
				st(reinterpret_cast<u32 *>(static_cast<char *>(c.dst) + at), at < c.bytes ? ld(from) : 0);
			}
		}
		count_ = kept;
	}

  private:
	struct Copy {
		void *dst;
		const void *src;
		u32 size, bytes, group;
	};
	Copy *list_ = nullptr;
	u32 count_ = 0, room_ = 0, group_ = 0;
};

} // namespace dev
