// act_elu, act_elu_bwd: x above 0, e^x - 1 elsewhere (Clevert et al., ICLR 2016); see act.h. Reference: gnn/act_elu.go.
#include "act.h"

namespace {

struct ELU {
	HX_DEVICE static inline float value(float x) {
		fp::Exponential e = fp::exp_parts(x);
		float below = fp::add(fp::mul(e.p, e.s), fp::sub(e.s, 1.0f));
		return x > 0 ? x : below;
	}
	HX_DEVICE static inline float slope(float x, float grad) {
		fp::Exponential e = fp::exp_parts(x);
		float below = fp::mul(grad, fp::add(fp::mul(e.p, e.s), e.s));
		return x > 0 ? grad : below;
	}
};

} // namespace

HX_KERNEL(act_elu, ActParams) {
	if (!dev::dropped(hx)) act_all<ELU, false>(p);
}

HX_KERNEL(act_elu_bwd, ActParams) {
	if (!dev::dropped(hx)) act_all<ELU, true>(p);
}
