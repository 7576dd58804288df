// dense_count, dense_sum: targets of losses over labels and numbers, and the mean loss over them. Reference: gnn/loss.go, for any
// block of whole warps; one block. Shared memory between barriers.
//
//	dense_count   rows with targets, and targets, by which the gradient is divided
//	dense_sum     the mean loss, in the order of xent_sum, and rows that are right
//
// Bytes: 4 a target over PCIe, and 12 a row. Not measured: no GPU was at hand.
#include "loss.h"

HX_THREADS(dense_count, DenseParams, 1024)
HX_KERNEL(dense_count, DenseParams) {
	HX_SHARED(i64, sums, 32);
	if (dev::dropped(hx) || dev::bid() != 0) return;
	i64 rows = 0, all = 0;
	for (i64 i = dev::tid() / 32; p.Targets != 0 && i < p.Rows; i += dev::threads() / 32) {
		i64 n = 0;
		for (i64 c = dev::lane(); c < p.Cols; c += 32) {
			float t = dev::ld(dev::at<float>(p.Targets, i * p.Cols + c));
			n += t == t;
		}
		all += n;
		rows += dev::ballot(dev::full_mask, n > 0) != 0 && dev::lane() == 0;
	}
	rows = block_sum(sums, rows);
	dev::syncthreads();
	all = block_sum(sums, all);
	if (dev::tid() != 0) return;
	Outcome *o = dev::at<Outcome>(p.Outcome);
	dev::st(&o->Loss, 0.0);
	dev::st(&o->Correct, (i64)0);
	dev::st(&o->Counted, rows);
	dev::st(&o->Mass, (double)all);
}

HX_THREADS(dense_sum, DenseParams, 1024)
HX_KERNEL(dense_sum, DenseParams) {
	HX_SHARED(double, parts, 1024);
	HX_SHARED(i64, sums, 32);
	if (dev::dropped(hx) || dev::bid() != 0 || p.Targets == 0) return;
	i64 correct = 0;
	double sum = sum_rows(parts, p.Rows, [&] HX_DEVICE(i64 from, i64 to) {
		double leaf = 0;
		for (i64 i = from; i < to; i++) {
			leaf = fp::add(leaf, dev::ld(dev::at<double>(p.Loss, i)));
			correct += dev::ld(dev::at<i32>(p.Right, i));
		}
		return leaf;
	});
	correct = block_sum(sums, correct);
	if (dev::tid() != 0) return;
	Outcome *o = dev::at<Outcome>(p.Outcome);
	double n = dev::ld(&o->Mass);
	if (n > 0) dev::st(&o->Loss, fp::div(sum, n));
	dev::st(&o->Correct, correct);
}
