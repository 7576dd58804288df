package gnn

import "helios/internal/simd"

// leakyBelow is the slope of leaky ReLU below 0, as PyTorch's and MLPerf's.
const leakyBelow = 0.01

// Leaky ReLU (Maas et al., ICML 2013): x above 0, x/100 elsewhere.
var leakyActivation = &Activation{
	Name: "leaky", Summary: "x above 0, 0.01 x below",
	value: func(_ simd.Level, out, x []float32) {
		for i, v := range x {
			out[i] = max(v, v*leakyBelow)
		}
	},
	slope: func(_ simd.Level, x, grad []float32) {
		for i, v := range x {
			if x[i] = grad[i]; !(v > 0) {
				x[i] *= leakyBelow
			}
		}
	},
}
