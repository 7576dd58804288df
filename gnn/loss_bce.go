package gnn

import "helios/internal/metrics"

// Binary cross-entropy of each label by itself, after a sigmoid.
var bceLoss = &Loss{
	Name: "bce", Summary: "binary cross-entropy of each label",
	Targets: []metrics.Target{metrics.Labels},
	element: func(z, t, weight float64) (loss, slope float64) {
		p, softplus := sigmoid(z)
		w := 1 + float64((weight-1)*t)
		return float64((1-t)*z) + float64(w*softplus), (1 - t) + float64(w*(p-1))
	},
}
