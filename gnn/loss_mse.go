package gnn

import "helios/internal/metrics"

// The squared error.
var mseLoss = &Loss{
	Name: "mse", Summary: "squared error",
	Targets: []metrics.Target{metrics.Numbers},
	element: func(z, t, _ float64) (loss, slope float64) {
		d := z - t
		return d * d, 2 * d
	},
}
