// loss_mse: the squared error; see loss_dense.h. Reference: gnn/loss_mse.go.
#include "loss_dense.h"

namespace {

struct MSE {
	HX_DEVICE static inline Element of(double z, double t, double weight) {
		(void)weight;
		double d = fp::sub(z, t);
		return {fp::mul(d, d), fp::mul(2.0, d)};
	}
};

} // namespace

HX_KERNEL(loss_mse, DenseParams) {
	HX_SHARED(double, factor, 1);
	if (!dev::dropped(hx)) dense_rows<MSE>(factor, p);
}
