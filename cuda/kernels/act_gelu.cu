// act_gelu, act_gelu_bwd: x times the logistic function of 2·sqrt(2/π)·(x + 0.044715 x³), which is the form with tanh (Hendrycks
// and Gimpel, 2016); see act.h. Reference: gnn/act_gelu.go.
#include "act.h"

namespace {

constexpr float geluA = 1.5957691216057308f, geluB = 0.07135481627260025f, geluC = 0.21406444881780075f, geluFar = 16;

struct GELU {
	// The logistic function, and 1 minus it.
	struct Gate {
		float sigma, rest;
	};
	HX_DEVICE static inline Gate gate(float x, float square) {
		float v = fp::mul(x, fp::add(geluA, fp::mul(geluB, square)));
		fp::Exponential e = fp::exp_parts(fp::of_bits(fp::bits(v) | 1u << 31));
		float low = fp::add(fp::mul(e.p, e.s), e.s), over = fp::add(1.0f, low);
		float most = fp::div(1.0f, over), least = fp::div(low, over);
		return v > 0 ? Gate{most, least} : Gate{least, most};
	}
	HX_DEVICE static inline float value(float x) { return fp::mul(x, gate(x, fp::mul(x, x)).sigma); }
	HX_DEVICE static inline float slope(float x, float grad) {
		Gate g = gate(x, fp::mul(x, x));
		// Beyond 16 the product of both is 0 but for what exp_parts' bound leaves of it, which a large x would blow up.
		float near = x > geluFar ? geluFar : x < -geluFar ? -geluFar : x;
		float steep = fp::add(geluA, fp::mul(geluC, fp::mul(near, near)));
		return fp::mul(grad, fp::add(g.sigma, fp::mul(fp::mul(g.sigma, g.rest), fp::mul(near, steep))));
	}
};

} // namespace

HX_KERNEL(act_gelu, ActParams) {
	if (!dev::dropped(hx)) act_all<GELU, false>(p);
}

HX_KERNEL(act_gelu_bwd, ActParams) {
	if (!dev::dropped(hx)) act_all<GELU, true>(p);
}
