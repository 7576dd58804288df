// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), to the bit
// internal/philox: a number depends on its key and counter only.
#pragma once

#include "device.h"

struct PhiloxBlock {
	u32 w[4];
};

HX_DEVICE inline PhiloxBlock philox(const u32 key[2], u32 c0, u32 c1, u32 c2, u32 c3) {
	constexpr u32 m0 = 0xD2511F53, m1 = 0xCD9E8D57, w0 = 0x9E3779B9, w1 = 0xBB67AE85;
	u32 k0 = key[0], k1 = key[1];
	for (int i = 0; i < 10; i++) {
		u32 h0 = dev::mulhi(m0, c0), l0 = m0 * c0;
		u32 h1 = dev::mulhi(m1, c2), l1 = m1 * c2;
		c0 = h1 ^ c1 ^ k0;
		c1 = l1;
		c2 = h0 ^ c3 ^ k1;
		c3 = l0;
		k0 += w0;
		k1 += w1;
	}
	return {{c0, c1, c2, c3}};
}

// Maps 64 random bits to [0, n).
HX_DEVICE inline u64 philox_bounded(u64 r, u64 n) { return dev::mulhi(r, n); }
