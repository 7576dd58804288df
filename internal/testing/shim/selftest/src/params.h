// Shared by the self tests' kernels and their host.
#pragma once

#include "types.h"

struct TestParams {
	u64 Data;  // u64[64]
	u64 Flag;  // u32[16]
	u64 Out;   // u64[1024]
	u32 Count; // of whatever the kernel repeats
	u32 Seed;
};
