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
	Of  func(*Summary) *float64
	For []Target // that have it
}

var (
	ofClasses = []Target{Classes}
	ofBoth    = []Target{Classes, Labels}
	ofNumbers = []Target{Numbers}
)

// All lists the metrics, the default of classes first.
var All = []Metric{
	{"accuracy", false, func(s *Summary) *float64 { return s.Accuracy }, ofBoth},
	{"balanced-accuracy", false, func(s *Summary) *float64 { return s.BalancedAccuracy },
		ofClasses},
	{"f1-micro", false, func(s *Summary) *float64 { return s.F1Micro }, ofBoth},
	{"f1-macro", false, func(s *Summary) *float64 { return s.F1Macro }, ofBoth},
	{"roc-auc", false, func(s *Summary) *float64 { return s.ROCAUC }, ofBoth},
	{"average-precision", false, func(s *Summary) *float64 { return s.AveragePrecision }, ofBoth},
	{"log-loss", true, func(s *Summary) *float64 { return s.LogLoss }, ofBoth},
	{"calibration-error", true, func(s *Summary) *float64 { return s.CalibrationError }, ofClasses},
	{"rmse", true, func(s *Summary) *float64 { return s.RMSE }, ofNumbers},
	{"mae", true, func(s *Summary) *float64 { return s.MAE }, ofNumbers},
	{"r2", false, func(s *Summary) *float64 { return s.R2 }, ofNumbers},
}

// Names returns the names of all metrics.
func Names() []string { return NamesFor("") }

// NamesFor returns the names of those that a target has; "" has all.
func NamesFor(t Target) (names []string) {
	for _, m := range All {
		if t == "" || slices.Contains(m.For, t) {
			names = append(names, m.Name)
		}
	}
	return names
}

// Find returns the metric of a name; the default of classes where there is none.
func Find(name string) Metric {
	for _, m := range All {
		if m.Name == name {
			return m
		}
	}
	return All[0]
}

// Default returns the name of the metric that chooses epochs where none is named.
func (t Target) Default() string {
	return map[Target]string{Classes: "accuracy", Labels: "f1-micro", Numbers: "rmse"}[t]
}

// IsDefault reports whether a metric is some target's default.
func IsDefault(name string) bool {
	return slices.ContainsFunc([]Target{Classes, Labels, Numbers},
		func(t Target) bool { return t.Default() == name })
}

// Defined reports whether the nodes of a judge define the metric, whatever the outputs are.
func (m Metric) Defined(j Judge) bool {
	r := j.Report()
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
