package htmlreport

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/metrics"
)

// experimentOf has runs with reports.
func experimentOf(reports ...*metrics.Report) experiment {
	x := experiment{name: "x"}
	for _, r := range reports {
		x.runs = append(x.runs, trained{result: trainResult{Metrics: r}})
	}
	return x
}

// Scores are means with a deviation where there are several seeds, and alone where there is one.
// Reports that do not agree on their classes, as a file may say, do no harm.
func TestScoresOverSeeds(t *testing.T) {
	of := func(accuracy, recall float64, matrix [][]int64, classes int) *metrics.Report {
		r := &metrics.Report{Summary: metrics.Summary{Nodes: 3, Accuracy: &accuracy,
			BalancedAccuracy: &accuracy}, Confusion: matrix}
		r.Classes = make([]metrics.Class, classes)
		r.Classes[0] = metrics.Class{Name: "papers", Nodes: 2, Recall: &recall}
		return r
	}
	one := tests([]experiment{experimentOf(of(0.5, 0.25, [][]int64{{3, 1}, {0, 2}}, 2)), {name: "untested"}})
	require.Len(t, one.Figures, 1)
	require.Equal(t, table{Title: "Scores", Head: []string{"run", "seeds", "nodes", "accuracy",
		"balanced-accuracy"}, Rows: [][]string{{"x", "1", "3", "0.5000", "0.5000"}}}, one.Tables[0])
	require.Equal(t, []string{"papers", "2", "–", "0.2500", "–", "–", "–"}, one.Tables[1].Rows[0])
	two := tests([]experiment{experimentOf(of(0.5, 0.25, nil, 2),
		of(0.7, 0.75, [][]int64{{1}}, 1))})
	require.Empty(t, two.Figures)
	require.Equal(t, "0.6000 ± 0.1414", two.Tables[0].Rows[0][3])
	require.Equal(t, "0.5000 ± 0.3536", two.Tables[1].Rows[0][3])
	require.Equal(t, "–", two.Tables[1].Rows[1][3])
}

// A test of numbers has a row for each of them, and no columns of classes.
func TestTablesOfNumbers(t *testing.T) {
	one := 1.5
	tables := metricTables([]experiment{experimentOf(&metrics.Report{
		Summary: metrics.Summary{Nodes: 3, RMSE: &one},
		Numbers: []metrics.NumberFigures{{Nodes: 3, RMSE: &one}, {Number: 1, Nodes: 2}}})})
	require.Len(t, tables, 2)
	require.Equal(t, []string{"run", "seeds", "nodes", "rmse"}, tables[0].Head)
	require.Equal(t, [][]string{{"0", "3", "1.5000", "–", "–"}, {"1", "2", "–", "–", "–"}},
		tables[1].Rows)
}

// The curves of labels are named by them.
func TestCurvesOfLabels(t *testing.T) {
	c := metrics.Curve{FPR: []float64{0, 1}, Recall: []float64{0, 1}, Precision: []float64{1, 0.5}}
	d := c
	d.Class = 1
	figures := curves("x", &metrics.Report{Classes: []metrics.Class{{Name: "fast"}, {Class: 1}},
		Curves: []metrics.Curve{c, d}})
	require.Len(t, figures, 2)
	require.Equal(t, "fast", figures[0].Series[0].Name)
	require.Equal(t, "label 1", figures[0].Series[1].Name)
}
