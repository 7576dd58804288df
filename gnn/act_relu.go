package gnn

import "helios/internal/simd"

// ReLU: max(x, 0), NaN stays NaN. Where nothing comes between a layer's sums and it, the layer's
// own kernels do it.
var reluActivation = &Activation{
	Name: DefaultActivation, Summary: "max(x, 0)",
	value: func(l simd.Level, out, x []float32) {
		copy(out, x)
		l.BiasReLU(out, nil, true)
	},
	slope: func(l simd.Level, x, grad []float32) {
		l.SumLists(&simd.RowSum{Dim: len(x), Gate: true, Scale: 1}, x, 0,
			[]simd.RowList{{Start: 1}}, grad)
	},
}
