// Package bench has what the benchmarks of "heliosctl bench" and "heliosctl cache" share. Each
// package below it measures one thing: a Config in, rows out. The verbs print the rows.
package bench

import (
	"fmt"
	"slices"
)

// Spread is the median of several measurements with their range.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// SpreadOf returns the spread of at least one value.
func SpreadOf(v []float64) Spread {
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	return Spread{(v[(n-1)/2] + v[n/2]) / 2, v[0], v[n-1]}
}

func (s Spread) String() string { return fmt.Sprintf("%.2f (%.2f-%.2f)", s.Median, s.Min, s.Max) }
