// act_leaky, act_leaky_bwd: x above 0, 0.01 x elsewhere, NaN stays NaN (Maas et al., ICML 2013); see act.h. Reference:
// gnn/act_leaky.go.
#include "act.h"

namespace {

struct Leaky {
	static constexpr float below = 0.01f;
	HX_DEVICE static inline float value(float x) { return x > 0 ? x : fp::mul(x, below); }
	HX_DEVICE static inline float slope(float x, float grad) { return x > 0 ? grad : fp::mul(grad, below); }
};

} // namespace

HX_KERNEL(act_leaky, ActParams) {
	if (!dev::dropped(hx)) act_all<Leaky, false>(p);
}

HX_KERNEL(act_leaky_bwd, ActParams) {
	if (!dev::dropped(hx)) act_all<Leaky, true>(p);
}
