package metrics

import (
	"fmt"
	"slices"
)

// Metric is a figure by which epochs can be compared.
type Metric struct {
	Name  string
	Lower bool // a lower figure is better
	// Of returns the figure of a report; nil where the nodes do not define it.
	Of func(*Summary) *float64
}

// All lists the metrics, the default first.
var All = []Metric{
	{"accuracy", false, func(s *Summary) *float64 { return &s.Accuracy }},
	{"balanced-accuracy", false, func(s *Summary) *float64 { return &s.BalancedAccuracy }},
	{"f1-micro", false, func(s *Summary) *float64 { return &s.F1Micro }},
	{"f1-macro", false, func(s *Summary) *float64 { return &s.F1Macro }},
	{"roc-auc", false, func(s *Summary) *float64 { return s.ROCAUC }},
	{"average-precision", false, func(s *Summary) *float64 { return s.AveragePrecision }},
	{"log-loss", true, func(s *Summary) *float64 { return &s.LogLoss }},
	{"calibration-error", true, func(s *Summary) *float64 { return &s.CalibrationError }},
}

// Names returns the names of all metrics.
func Names() (names []string) {
	for _, m := range All {
		names = append(names, m.Name)
	}
	return names
}

// Find returns the metric of a name; the default where there is none.
func Find(name string) Metric {
	for _, m := range All {
		if m.Name == name {
			return m
		}
	}
	return All[0]
}

// Defined reports whether nodes with these labels define the metric. keep is that of NewScores.
func (m Metric) Defined(classes int, labels []int32, keep bool) bool {
	var two []int32 // nodes of two classes define all that more nodes do
	for _, y := range labels {
		if y >= 0 && len(two) < 2 && !slices.Contains(two, y) {
			two = append(two, y)
		}
	}
	r := NewScores(classes, two, keep).Report()
	return r != nil && m.Of(&r.Summary) != nil
}

// Better reports whether x is better than y by more than margin.
func (m Metric) Better(x, y, margin float64) bool {
	if m.Lower {
		return y-x > margin
	}
	return x-y > margin
}

// Text writes a figure for people, or a dash where it is absent.
func Text(x *float64) string {
	if x == nil {
		return "–"
	}
	return fmt.Sprintf("%.4f", *x)
}
