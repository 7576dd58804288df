// A kernel's view of the machine, in one vocabulary for two of them: the GPU (here, with ptx.h) and
// the CPU shim (internal/testing/shim/device_shim.h). Kernels include this header, abi.h and the
// shared algorithm headers, and nothing else.
//
// Rules for kernels
//  - Memory that another thread, kernel, SSD or the host also touches is reached through dev::
//    only: the shim delays dev::st until a fence or release, and reports what a plain access hides.
//  - Weak ld/st order nothing. A value handed to another agent goes: st…, then either st_release
//    of the flag, or fence and a relaxed store of the flag. The reader uses ld_acquire.
//  - __syncwarp and __syncthreads order memory among the threads they join, and fences are
//    cumulative over them (PTX memory consistency model, causality order), so one lane's fence after
//    a syncwarp covers the warp's stores.
//  - Warp collectives name their mask, and all lanes of the mask must arrive.
//  - Every loop that waits has a deadline from dev::now_ns() or a bound.
#pragma once

#include "types.h"

// How a failing kernel tells its stream. One record for each stream lives in device memory; the
// launch carries its address. Later launches on the stream see it and do nothing, as work behind an
// error is dropped; the record is copied to Mirror, which is pinned, where the host reads it for free.
struct hx_fault {
	u64 Seq;    // launch that failed first; 0: none
	u32 Code;   // of the kernel; cuda/kernels/faults.go has the words
	u32 Block;  // that failed
	u64 A, B, C; // what the words are filled with
	u64 Mirror; // device address of the host's copy, or 0
	u64 Lock;   // 1: somebody writes or has written the record
	u64 Reserved;
};
static_assert(sizeof(hx_fault) == 64, "one line");

// The second argument of every kernel.
struct hx_launch {
	u64 Fault; // hx_fault*, or 0
	u64 Seq;   // rises by launch of the stream, from 1
};
static_assert(sizeof(hx_launch) == 16, "second parameter");

namespace dev {
enum Order { relaxed, acquire, release, acq_rel };
constexpr u32 warp_size = 32;
constexpr u32 full_mask = 0xffffffffu;
} // namespace dev

#define __forceinline__ inline __attribute__((always_inline))

#ifdef __CUDA__
#include "ptx.h"
#else
#include "device_shim.h"
#endif

// Vocabulary (both machines):
//
//   HX_KERNEL(name, Params) { … p.Field … }     a kernel; hx is the hx_launch
//   HX_THREADS(name, Params, n)                 before a kernel: blocks have at most n threads, whose registers must fit
//   HX_RESIDENT(name, Params, n, m)             the same, for m blocks on an SM at one time
//   HX_DEVICE                                   before every function that kernels call
//   HX_SHARED(T, name, n)                       T name[n] in shared memory (declared in the kernel body)
//
//   dev::tid() threads() bid() blocks()         index in block, block size, block index, grid size
//   dev::lane() warp() warps()                  lane, warp index in grid, warps in grid
//   dev::syncthreads() syncwarp(mask)
//   dev::ballot(mask, pred) shfl(mask, v, src) any(mask, pred) all(mask, pred)
//   dev::reduce_add(mask, u32)
//   dev::ld(p) st(p, v) ld16(p) st16(p, u32x4)  weak; T of 1, 2, 4 or 8 bytes, or 16 aligned
//   dev::ld16_global(p)                         ld16 of global memory, never split
//   dev::ld_relaxed_{gpu,sys}(p) ld_acquire_{gpu,sys}(p)                  u32, u64, i64
//   dev::st_relaxed_{gpu,sys}(p, v) st_release_{gpu,sys}(p, v)
//   dev::add_{gpu,sys}<order>(p, v) or_ and_ min_ max_ exch_ cas_         value before; u32, u64, i64
//                                               global memory only, as ld_relaxed to st_release
//   dev::add_shared(p, v)                       u32 in shared memory, relaxed
//   dev::to_tf32(v) to_bf16x2(low, high)        rounded as tensor cores take them (sm_80, as the next three)
//   dev::mma_tf32(d, a, b) mma_bf16(d, a, b)    d += a · b by a whole warp: 16×8 += 16×8 · 8×8, 16×16 · 16×8
//   dev::Pipe pipe; pipe.copy<N>(dst, src, n)   to shared memory: N = 4, 8 or 16 bytes, 0 from byte n (a multiple of 4) on
//   pipe.commit() pipe.wait<N>()                ends a group; waits for all but the last N groups of this thread
//   dev::fence_gpu() fence_sys()                acquire and release
//   dev::ring(u32 *doorbell, v)                 relaxed MMIO store, after what a fence ordered
//   dev::now_ns()                               one clock for all SMs, ns
//   dev::pause(ns)                              in loops that poll
//   dev::again(v)                               v, as if it were new: to compute again rather than to keep in registers
//   dev::popc ctz (u32, u64) clz(u64) mulhi(u32,u32) mulhi(u64,u64)
//   dev::at<T>(u64 address, i64 index)          T* from an address of the ABI

namespace dev {

template <typename T> HX_DEVICE inline T *at(u64 address, i64 index = 0) {
	return global<T>(address) + index;
}

// Did an earlier launch of this stream fail? The same answer in every thread of the grid, since
// a failure of this launch has this launch's number.
HX_DEVICE inline bool dropped(const hx_launch &hx) {
	if (hx.Fault == 0) return false;
	u64 seq = ld_relaxed_gpu(&at<hx_fault>(hx.Fault)->Seq);
	return seq != 0 && seq < hx.Seq;
}

// Records the first failure of the launch. The caller then goes on without the bad item, or
// leaves where its whole block does.
// litmus: fault-record
HX_DEVICE inline void fail(const hx_launch &hx, u32 code, u64 a = 0, u64 b = 0, u64 c = 0) {
	if (hx.Fault == 0) return;
	hx_fault *f = at<hx_fault>(hx.Fault);
	if (exch_gpu<relaxed>(&f->Lock, (u64)1) != 0) return;
	hx_fault *sides[2] = {f, at<hx_fault>(ld(&f->Mirror))};
	for (int i = 0; i < 2; i++) {
		hx_fault *s = sides[i];
		if (s == nullptr) continue;
		st(&s->Code, code);
		st(&s->Block, bid());
		st(&s->A, a);
		st(&s->B, b);
		st(&s->C, c);
		fence_sys();
		st_release_sys(&s->Seq, hx.Seq);
	}
}

} // namespace dev
