// Fixed-width names for both compilers of the kernels: clang's CUDA mode, which has no standard
// headers here, and the C++ compiler of the shim.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i16 = short;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void *) == 8, "LP64");

// Four words that move as one 16-byte access.
struct alignas(16) u32x4 {
	u32 x, y, z, w;
};
