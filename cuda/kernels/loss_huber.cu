// loss_huber: half the squared error up to 1, the absolute error beyond; see loss_dense.h. Reference: gnn/loss_huber.go.
#include "loss_dense.h"

namespace {

struct Huber {
	HX_DEVICE static inline Element of(double z, double t, double weight) {
		(void)weight;
		double d = fp::sub(z, t);
		if (d > 1) return {fp::sub(d, 0.5), 1.0};
		if (d < -1) return {fp::sub(-d, 0.5), -1.0};
		return {fp::mul(0.5, fp::mul(d, d)), d};
	}
};

} // namespace

HX_KERNEL(loss_huber, DenseParams) {
	HX_SHARED(double, factor, 1);
	if (!dev::dropped(hx)) dense_rows<Huber>(factor, p);
}
