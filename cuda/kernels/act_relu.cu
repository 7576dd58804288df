// act_relu, act_relu_bwd: max(x, 0), NaN stays NaN; see act.h. The layers' own kernels do it where nothing else comes between
// their sums and it. Reference: gnn/act_relu.go.
#include "act.h"

namespace {

struct ReLU {
	HX_DEVICE static inline float value(float x) { return relu(x); }
	HX_DEVICE static inline float slope(float x, float grad) { return x > 0 ? grad : 0.0f; }
};

} // namespace

HX_KERNEL(act_relu, ActParams) {
	if (!dev::dropped(hx)) act_all<ReLU, false>(p);
}

HX_KERNEL(act_relu_bwd, ActParams) {
	if (!dev::dropped(hx)) act_all<ReLU, true>(p);
}
