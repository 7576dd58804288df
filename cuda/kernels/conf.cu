// The kernels of the conformance suite: what every compute device must do with a grid, its
// parameters, streams, budgets and failures. They prove the machine, not Helios, and are as small as
// that allows.
//
//   conf_affine  x = x*Mul + Add for N words, shared out over blocks, then threads. Launches do not commute, so
//                results show their order. 16 B moved per word.
//   conf_move    Dst[i] = Src[i] + Add; the same shares. 16 B per word.
//   conf_grid    block b writes its index, the grid and the block size to Dst[4b…] and counts its runs in Dst[4b+3]
//   conf_gate    arrives, waits for a word (or for a limit, and says so), leaves
//   conf_count   counts the blocks that run at one time, and the most of them
//   conf_fail    block At fails; all blocks count themselves first
//   conf_pack    every kind of parameter field, widened to 64 bits
//   conf_big     the largest parameter block that CUDA takes beside hx_launch
//   conf_clock   writes the values that the device's clock takes one after the other, which tell its step
//   conf_price   does one thing over and over, such as a trip to memory, and writes down when it began and ended
//
// Words that the host or another grid polls go through relaxed atomics of system scope; nothing
// else is handed over by them. Reference: internal/testing/conformance/kernels.go, to the bit.
#include "device.h"

namespace {

// go: conformance.affineParams
struct AffineParams {
	u64 Dst;
	i64 N;
	u64 Mul;
	u64 Add;
};
static_assert(sizeof(AffineParams) == 32, "conformance.affineParams");

// go: conformance.moveParams
struct MoveParams {
	u64 Dst, Src;
	i64 N;
	u64 Add;
};
static_assert(sizeof(MoveParams) == 32, "conformance.moveParams");

// go: conformance.gridParams
struct GridParams {
	u64 Dst;
};
static_assert(sizeof(GridParams) == 8, "conformance.gridParams");

// go: conformance.gateParams
struct GateParams {
	u64 Gate, Arrived, Left, Late;
	u64 Step;
	i64 LimitNS;
	u32 Yield; // the host device's blocks make way for others; a GPU's stay where they are
	u32 _;
};
static_assert(sizeof(GateParams) == 56, "conformance.gateParams");

// go: conformance.countParams
struct CountParams {
	u64 Now, Max;
	i64 HoldNS;
};
static_assert(sizeof(CountParams) == 24, "conformance.countParams");

// go: conformance.failParams
struct FailParams {
	u64 Ran;
	i64 At;
};
static_assert(sizeof(FailParams) == 16, "conformance.failParams");

// go: conformance.packInner
struct PackInner {
	u8 A;
	u32 B;
	i16 C[3];
};

// go: conformance.packParams
struct PackParams {
	u64 Dst;
	u8 U8;
	signed char I8;
	u16 U16;
	i16 I16;
	bool B;
	u32 U32;
	i32 I32;
	float F32;
	u64 U64;
	i64 I64;
	double F64;
	PackInner In;
	u64 Arr[5];
	u8 End;
};
static_assert(sizeof(PackParams) == 120 && __builtin_offsetof(PackParams, U32) == 16 && __builtin_offsetof(PackParams, U64) == 32 &&
                  __builtin_offsetof(PackParams, In) == 56 && __builtin_offsetof(PackParams, Arr) == 72,
              "conformance.packParams");

// go: conformance.bigParams
struct BigParams {
	u64 Dst;
	u64 V[509];
};
static_assert(sizeof(BigParams) + sizeof(hx_launch) == 4096, "conformance.bigParams");

// go: conformance.clockParams
struct ClockParams {
	u64 Dst;
	i64 N;
	i64 Looks;
};
static_assert(sizeof(ClockParams) == 24, "conformance.clockParams");

// go: conformance.priceParams
struct PriceParams {
	u64 Dst, Src;
	i64 N;
	u32 Kind, Width, Lines, _;
};
static_assert(sizeof(PriceParams) == 40, "conformance.priceParams");
constexpr u32 priceTrip = 0, priceAtomic = 1, priceFence = 2, priceRing = 3, priceRead = 4;

// N trips, atomics, fences or doorbells, one after the other, by one thread. Returns what the last one found.
HX_DEVICE inline u64 price_steps(const PriceParams &p) {
	u64 *src = dev::at<u64>(p.Src), v = 0;
	for (i64 i = 0; i < p.N; i++) {
		switch (p.Kind) {
		case priceTrip: v = dev::ld_relaxed_sys(src + v); break;
		case priceAtomic: v = dev::add_sys<dev::relaxed>(src + (v >> 63), (u64)1); break;
		case priceFence:
			dev::st_relaxed_sys(src, v = (u64)i + 1);
			dev::fence_sys();
			break;
		case priceRing: dev::ring(dev::at<u32>(p.Src), (u32)(v = (u64)i + 1)); break;
		}
	}
	return v;
}

// N reads of 16 bytes by each lane, which make lines of Width bytes, spread over Lines of them. Returns the sum
// of the first words.
HX_DEVICE inline u64 price_reads(const PriceParams &p) {
	constexpr u32 ahead = 8;
	u32 per = p.Width / 16, lines = 32 / per, first = dev::warp() * lines + dev::lane() / per;
	u64 sum = 0;
	for (i64 i = 0; i < p.N; i += ahead) {
		u32x4 v[ahead];
#pragma GCC unroll 8
		for (u32 k = 0; k < ahead; k++) {
			u32 line = (first + (u32)(i + k) * dev::warps() * lines) * 0x9e3779b1u & (p.Lines - 1);
			v[k] = dev::ld16_global(dev::at<u8>(p.Src, (i64)line * p.Width + dev::lane() % per * 16));
		}
#pragma GCC unroll 8
		for (u32 k = 0; k < ahead; k++) sum += v[k].x;
	}
	return sum;
}

// This thread's part of n items: the block's share as in Go's Block.Range, the threads' in turn.
HX_DEVICE inline void share(i64 n, i64 &first, i64 &end) {
	i64 q = n / dev::blocks(), r = n % dev::blocks(), b = dev::bid();
	i64 lo = b * q + (b < r ? b : r);
	first = lo + dev::tid();
	end = lo + q + (b < r ? 1 : 0);
}

} // namespace

HX_KERNEL(conf_affine, AffineParams) {
	if (dev::dropped(hx)) return;
	i64 i, end;
	for (share(p.N, i, end); i < end; i += dev::threads()) {
		u64 *x = dev::at<u64>(p.Dst, i);
		dev::st(x, dev::ld(x) * p.Mul + p.Add);
	}
}

HX_KERNEL(conf_move, MoveParams) {
	if (dev::dropped(hx)) return;
	i64 i, end;
	for (share(p.N, i, end); i < end; i += dev::threads())
		dev::st(dev::at<u64>(p.Dst, i), dev::ld(dev::at<u64>(p.Src, i)) + p.Add);
}

HX_KERNEL(conf_grid, GridParams) {
	if (dev::dropped(hx) || dev::tid() != 0) return;
	u64 *v = dev::at<u64>(p.Dst, 4 * (i64)dev::bid());
	dev::st(v, (u64)dev::bid());
	dev::st(v + 1, (u64)dev::blocks());
	dev::st(v + 2, (u64)dev::threads());
	dev::add_gpu<dev::relaxed>(v + 3, (u64)1);
}

HX_KERNEL(conf_gate, GateParams) {
	if (dev::dropped(hx) || dev::tid() != 0) return;
	dev::add_sys<dev::relaxed>(dev::at<u64>(p.Arrived), (u64)1);
	i64 end = dev::now_ns() + p.LimitNS;
	while (dev::ld_acquire_sys(dev::at<u64>(p.Gate)) <= dev::bid() * p.Step) {
		if (dev::now_ns() > end) {
			dev::st_relaxed_sys(dev::at<u64>(p.Late), (u64)1);
			break;
		}
		dev::pause(200);
	}
	dev::add_sys<dev::release>(dev::at<u64>(p.Left), (u64)1);
}

HX_KERNEL(conf_count, CountParams) {
	if (dev::dropped(hx) || dev::tid() != 0) return;
	u64 n = dev::add_sys<dev::relaxed>(dev::at<u64>(p.Now), (u64)1) + 1;
	dev::max_sys<dev::relaxed>(dev::at<u64>(p.Max), n);
	for (i64 end = dev::now_ns() + p.HoldNS; dev::now_ns() < end;) dev::pause(100);
	dev::add_sys<dev::relaxed>(dev::at<u64>(p.Now), ~(u64)0);
}

HX_KERNEL(conf_fail, FailParams) {
	if (dev::dropped(hx) || dev::tid() != 0) return;
	dev::add_sys<dev::relaxed>(dev::at<u64>(p.Ran), (u64)1);
	if ((i64)dev::bid() == p.At) dev::fail(hx, 1);
}

HX_KERNEL(conf_pack, PackParams) {
	if (dev::dropped(hx) || dev::bid() != 0 || dev::tid() != 0) return;
	u64 *d = dev::at<u64>(p.Dst);
	u64 v[] = {
	    p.Dst, p.U8, (u64)p.I8, p.U16, (u64)p.I16, p.B ? 1ull : 0ull,
	    p.U32, (u64)p.I32, __builtin_bit_cast(u32, p.F32), p.U64, (u64)p.I64, __builtin_bit_cast(u64, p.F64),
	    p.In.A, p.In.B, (u64)p.In.C[0], (u64)p.In.C[2],
	    p.Arr[0], p.Arr[1], p.Arr[2], p.Arr[3], p.Arr[4], p.End,
	};
	for (u32 i = 0; i < sizeof(v) / sizeof(v[0]); i++) dev::st(d + i, v[i]);
}

HX_KERNEL(conf_big, BigParams) {
	if (dev::dropped(hx) || dev::bid() != 0 || dev::tid() != 0) return;
	u64 sum = 0;
	for (u32 i = 0; i < 509; i++) sum += (u64)(i + 1) * p.V[i];
	dev::st(dev::at<u64>(p.Dst), sum);
}

HX_KERNEL(conf_clock, ClockParams) {
	if (dev::dropped(hx) || dev::bid() != 0 || dev::tid() != 0) return;
	u64 *d = dev::at<u64>(p.Dst);
	i64 n = 0, last = dev::now_ns();
	for (i64 look = 0; look < p.Looks && n < p.N; look++) {
		i64 t = dev::now_ns();
		if (t == last) continue;
		last = t;
		dev::st(d + 1 + n++, (u64)t);
	}
	dev::st(d, (u64)n);
}

HX_KERNEL(conf_price, PriceParams) {
	if (dev::dropped(hx)) return;
	if (p.Kind > priceRead || (p.Kind == priceRead && (p.Width != 32 && p.Width != 64 && p.Width != 128))) {
		if (dev::tid() == 0) dev::fail(hx, 1, p.Kind, p.Width);
		return;
	}
	u64 *d = dev::at<u64>(p.Dst), v = 0;
	u32 thread = dev::bid() * dev::threads() + dev::tid();
	u64 begin = (u64)dev::now_ns();
	if (p.Kind == priceRead)
		v = price_reads(p);
	else if (thread == 0)
		v = price_steps(p);
	dev::st(d + 2 * dev::blocks() + thread, v);
	dev::syncthreads();
	if (dev::tid() != 0) return;
	dev::st(d + 2 * dev::bid(), begin);
	dev::st(d + 2 * dev::bid() + 1, (u64)dev::now_ns());
}
