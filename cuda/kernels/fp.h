// Arithmetic of which every step is rounded as written, on the GPU and in the shim: what must be equal to the
// bit with Go's kernels uses these. clang's CUDA mode fuses a*b+c as it likes (-ffp-contract=fast), and ptxas fuses
// mul.f32 with add.f32; it never does that to mul.rn.f32 and add.rn.f32 (PTX ISA, Floating Point Instructions: mul).
// Subnormals are kept: no .ftz. NaNs come out of a GPU as 0x7fffffff, of a CPU with their payload, which is the one
// difference that is left.
#pragma once

#include "device.h"

namespace fp {

HX_DEVICE inline u32 bits(float f) { return __builtin_bit_cast(u32, f); }
HX_DEVICE inline u64 bits(double f) { return __builtin_bit_cast(u64, f); }
HX_DEVICE inline float of_bits(u32 u) { return __builtin_bit_cast(float, u); }
HX_DEVICE inline double of_bits(u64 u) { return __builtin_bit_cast(double, u); }

#ifdef __CUDA__
HX_DEVICE inline float mul(float a, float b) { return __nvvm_mul_rn_f(a, b); }
HX_DEVICE inline float add(float a, float b) { return __nvvm_add_rn_f(a, b); }
HX_DEVICE inline float div(float a, float b) { return __nvvm_div_rn_f(a, b); }
HX_DEVICE inline float root(float a) { return __nvvm_sqrt_rn_f(a); }
HX_DEVICE inline double mul(double a, double b) { return __nvvm_mul_rn_d(a, b); }
HX_DEVICE inline double add(double a, double b) { return __nvvm_add_rn_d(a, b); }
HX_DEVICE inline double div(double a, double b) { return __nvvm_div_rn_d(a, b); }
HX_DEVICE inline double fma(double a, double b, double c) { return __nvvm_fma_rn_d(a, b, c); }
#else
// Contraction is off by a flag where a processor could do it (x86-64 of the first level cannot).
inline float mul(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline float div(float a, float b) { return a / b; }
inline float root(float a) { return __builtin_sqrtf(a); }
inline double mul(double a, double b) { return a * b; }
inline double add(double a, double b) { return a + b; }
inline double div(double a, double b) { return a / b; }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#endif

HX_DEVICE inline float sub(float a, float b) { return add(a, -b); }
HX_DEVICE inline double sub(double a, double b) { return add(a, -b); }

// e^x for x <= 0 or NaN is s·(1+p), s a power of two: internal/simd (down), step by step.
struct Exponential {
	float p, s;
};

HX_DEVICE inline Exponential exp_parts(float x) {
	if (x < -87.0f) x = -87.0f;
	float m = add(mul(x, 1.44269504088896341f), 12582912.0f), k = sub(m, 12582912.0f);
	float r = sub(x, mul(k, 0.693359375f));
	r = add(r, mul(k, 2.12194440e-4f));
	float y = add(mul(r, 1.9875691500e-4f), 1.3981999507e-3f);
	y = add(mul(y, r), 8.3334519073e-3f);
	y = add(mul(y, r), 4.1665795894e-2f);
	y = add(mul(y, r), 1.6666665459e-1f);
	y = add(mul(y, r), 5.0000001201e-1f);
	return {add(mul(y, mul(r, r)), r), of_bits((bits(m) << 23) + (127u << 23))};
}

// exp of x <= 0 or NaN, step by step what Go's math.Exp does on amd64 with FMA (after Shibata, "Efficient evaluation
// methods of elementary functions suitable for SIMD computation", ISC 2010): x = k ln 2 + r, the Taylor series of
// e^(r/16) - 1, squared four times. Other hosts of Go have another exp, within 1 or 2 units in the last place.
HX_DEVICE inline double exp_down(double x) {
	if (!(x > -2000)) return x == x ? 0 : x; // k is below -1075 there
	constexpr double to_integer = 6755399441055744.0; // 1.5 · 2^52: a sum with it is rounded to an integer
	double m = add(mul(x, 1.4426950408889634073599246810018920), to_integer);
	i32 k = (i32)(u32)bits(m);
	double n = sub(m, to_integer);
	double r = fma(-0.69314718055966295651160180568695068359375, n, x);
	r = fma(-0.28235290563031577122588448175013436025525412068e-12, n, r);
	r = mul(r, 0.0625);
	double t = 2.4801587301587301587e-5;
	t = fma(t, r, 1.9841269841269841270e-4);
	t = fma(t, r, 1.3888888888888888889e-3);
	t = fma(t, r, 8.3333333333333333333e-3);
	t = fma(t, r, 4.1666666666666666667e-2);
	t = fma(t, r, 1.6666666666666666667e-1);
	t = fma(t, r, 0.5);
	t = fma(t, r, 1.0);
	r = mul(r, t);
	r = mul(r, add(r, 2.0)); // (1+r)² - 1
	r = mul(r, add(r, 2.0));
	r = mul(r, add(r, 2.0));
	r = fma(r, add(r, 2.0), 1.0);
	k += 0x3ff;
	if (k > 0) return mul(r, of_bits((u64)k << 52));
	if (k < -52) return 0;
	return mul(mul(r, of_bits((u64)(k + 0x3fe) << 52)), of_bits((u64)1 << 52)); // subnormal
}

// log of a normal x > 0, of +Inf or NaN, step by step what Go's math.Log does on amd64 (after FreeBSD's e_log.c):
// log(2^k f) with f around 1, by s = (f-1)/(f+1) and a minimax polynomial in s².
HX_DEVICE inline double log_up(double x) {
	if (!(x < of_bits((u64)0x7ff << 52))) return x;
	u64 b = bits(x);
	double f = of_bits((b & 0xfffffffffffffull) | (u64)0x3fe << 52);
	double k = (double)((i32)(b >> 52) - 0x3fe);
	if (f <= 7.07106781186547524401e-01) {
		k = sub(k, 1.0);
		f = mul(f, 2.0);
	}
	f = sub(f, 1.0);
	double s = div(f, add(f, 2.0));
	double s2 = mul(s, s), s4 = mul(s2, s2);
	double t1 = mul(s2, add(mul(add(mul(add(mul(1.479819860511658591e-01, s4), 1.818357216161805012e-01), s4),
	                                2.857142874366239149e-01), s4), 6.666666666666735130e-01));
	double t2 = mul(s4, add(mul(add(mul(1.531383769920937332e-01, s4), 2.222219843214978396e-01), s4), 3.999999999940941908e-01));
	double r = add(t1, t2);
	double half = mul(mul(0.5, f), f);
	double low = add(mul(s, add(half, r)), mul(1.90821492927058770002e-10, k));
	return sub(mul(6.93147180369123816490e-01, k), sub(sub(half, low), f));
}

} // namespace fp
