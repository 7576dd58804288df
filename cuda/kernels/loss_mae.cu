// loss_mae: the absolute error; see loss_dense.h. Reference: gnn/loss_mae.go.
#include "loss_dense.h"

namespace {

struct MAE {
	HX_DEVICE static inline Element of(double z, double t, double weight) {
		(void)weight;
		double d = fp::sub(z, t);
		return {d < 0 ? -d : d, d > 0 ? 1.0 : d < 0 ? -1.0 : 0.0};
	}
};

} // namespace

HX_KERNEL(loss_mae, DenseParams) {
	HX_SHARED(double, factor, 1);
	if (!dev::dropped(hx)) dense_rows<MAE>(factor, p);
}
