package htmlreport

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/metrics"
)

// The figures of a class stand with its row of the matrix; a matrix that is not of the classes, as
// in a file that was changed, is left out.
func TestClassTable(t *testing.T) {
	for _, c := range []struct {
		matrix  [][]int64
		columns int
	}{{[][]int64{{3, 1}, {0, 2}}, 7 + 2}, {nil, 7}, {[][]int64{{3, 1}}, 7},
		{[][]int64{{3}, {1, 2}}, 7}, {[][]int64{{1}, {1}, {1}}, 7}} {
		x := classTable("t", &metrics.Report{Classes: make([]metrics.Class, 2), Confusion: c.matrix})
		require.Len(t, x.Head, c.columns, "%v", c.matrix)
		for _, row := range x.Rows {
			require.Len(t, row, c.columns, "%v", c.matrix)
		}
	}
}

// A test of numbers has a row for each of them, and no columns of classes.
func TestTablesOfNumbers(t *testing.T) {
	one := 1.5
	figures := &metrics.Report{Summary: metrics.Summary{Nodes: 3, RMSE: &one},
		Numbers: []metrics.NumberFigures{{Nodes: 3, RMSE: &one}, {Number: 1, Nodes: 2}}}
	r := trained{}
	r.result.Metrics = figures
	tables := metricTables([]experiment{{name: "x", runs: []trained{r}}})
	require.Len(t, tables, 2)
	require.Equal(t, []string{"run", "seed", "nodes", "rmse"}, tables[0].Head)
	require.Equal(t, [][]string{{"0", "3", "1.5000", "–", "–"}, {"1", "2", "–", "–", "–"}},
		tables[1].Rows)
}

// The curves of labels are named by them.
func TestCurvesOfLabels(t *testing.T) {
	c := metrics.Curve{FPR: []float64{0, 1}, Recall: []float64{0, 1}, Precision: []float64{1, 0.5}}
	d := c
	d.Class = 1
	r := trained{}
	r.result.Metrics = &metrics.Report{Classes: make([]metrics.Class, 2),
		Curves: []metrics.Curve{c, d}}
	figures := testFigures([]experiment{{name: "x", runs: []trained{r}}})
	require.Len(t, figures, 2)
	require.Equal(t, "x, seed 0, label 1", figures[0].Series[1].Name)
}
