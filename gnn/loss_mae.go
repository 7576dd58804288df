package gnn

import (
	"math"

	"helios/internal/metrics"
)

// The absolute error, whose slope is 0 where there is none.
var maeLoss = &Loss{
	Name: "mae", Summary: "absolute error",
	Targets: []metrics.Target{metrics.Numbers},
	element: func(z, t, _ float64) (loss, slope float64) {
		switch d := z - t; {
		case d > 0:
			slope = 1
		case d < 0:
			slope = -1
		}
		return math.Abs(z - t), slope
	},
}
