package htmlreport

import (
	"fmt"
	"slices"

	"helios/internal/metrics"
)

// maxClassRows is the most classes whose figures a page lists.
const maxClassRows = 50

// metricTables have the figures of the tests: a row for each run, and for each run one for each
// class.
func metricTables(all []experiment) (out []table) {
	t := table{Title: "Test", Head: []string{"run", "seed", "nodes"}}
	for _, m := range metrics.All {
		t.Head = append(t.Head, m.Name)
	}
	var classes []table
	for _, x := range all {
		for _, r := range x.runs {
			figures := r.result.Metrics
			if figures == nil {
				continue
			}
			row := []string{x.name, number(float64(r.result.Seed)), number(float64(figures.Nodes))}
			for _, m := range metrics.All {
				row = append(row, orDash(m.Of(&figures.Summary)))
			}
			t.Rows = append(t.Rows, row)
			if len(figures.Classes) <= maxClassRows {
				title := fmt.Sprintf("Classes of the test, %s, seed %d", x.name, r.result.Seed)
				classes = append(classes, classTable(title, figures))
			}
		}
	}
	if len(t.Rows) == 0 {
		return nil
	}
	return append([]table{t}, classes...)
}

// classTable has the figures of each class, and of its nodes the number that each prediction has.
func classTable(title string, figures *metrics.Report) table {
	t := table{Title: title, Head: []string{"class", "nodes", "precision", "recall", "F1",
		"ROC AUC", "average precision"}}
	matrix := figures.Confusion
	if len(matrix) > 10 || !square(matrix, len(figures.Classes)) {
		matrix = nil
	}
	for c := range matrix {
		t.Head = append(t.Head, fmt.Sprintf("predicted as %d", c))
	}
	for c, x := range figures.Classes {
		row := []string{number(float64(x.Class)), number(float64(x.Nodes)), orDash(x.Precision),
			orDash(x.Recall), orDash(x.F1), orDash(x.ROCAUC), orDash(x.AveragePrecision)}
		if matrix != nil {
			for _, n := range matrix[c] {
				row = append(row, number(float64(n)))
			}
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// square reports whether a matrix has n rows of n: a file may say anything.
func square(matrix [][]int64, n int) bool {
	return len(matrix) == n && !slices.ContainsFunc(matrix, func(row []int64) bool {
		return len(row) != n
	})
}

// orDash is a figure with four decimals.
func orDash(x *float64) string {
	if x == nil {
		return "–"
	}
	return fmt.Sprintf("%.4f", *x)
}
