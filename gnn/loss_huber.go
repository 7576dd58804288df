package gnn

import (
	"math"

	"helios/internal/metrics"
)

// Half the squared error up to one deviation, the absolute error beyond (Huber, Annals of
// Mathematical Statistics, 1964).
var huberLoss = &Loss{
	Name: "huber", Summary: "squared error up to one deviation of the targets, absolute beyond",
	Targets: []metrics.Target{metrics.Numbers},
	element: func(z, t, _ float64) (loss, slope float64) {
		d := z - t
		switch {
		case d > 1:
			return math.Abs(d) - 0.5, 1
		case d < -1:
			return math.Abs(d) - 0.5, -1
		}
		return 0.5 * (d * d), d
	},
}
