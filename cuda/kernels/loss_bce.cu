// loss_bce: binary cross-entropy of each label, after a sigmoid; see loss_dense.h. Reference: gnn/loss_bce.go.
#include "loss_dense.h"

namespace {

struct BCE {
	HX_DEVICE static inline Element of(double z, double t, double weight) {
		double e = fp::exp_down(z < 0 ? z : -z), one = fp::add(1.0, e), softplus = fp::log_up(one);
		double chance = fp::div(z < 0 ? e : 1.0, one);
		if (z < 0) softplus = fp::sub(softplus, z);
		double w = fp::add(1.0, fp::mul(fp::sub(weight, 1.0), t)), no = fp::sub(1.0, t);
		return {fp::add(fp::mul(no, z), fp::mul(w, softplus)), fp::add(no, fp::mul(w, fp::sub(chance, 1.0)))};
	}
};

} // namespace

HX_KERNEL(loss_bce, DenseParams) {
	HX_SHARED(double, factor, 1);
	if (!dev::dropped(hx)) dense_rows<BCE>(factor, p);
}
