package htmlreport

import (
	"fmt"
	"slices"

	"helios/internal/metrics"
)

// maxClassRows is the most classes whose figures a page lists.
const maxClassRows = 50

// metricTables have the figures of the tests: a row for each run, of the metrics that any has, and
// for each run one for each class, label or number.
func metricTables(all []experiment) (out []table) {
	t := table{Title: "Test", Head: []string{"run", "seed", "nodes"}}
	shown := slices.DeleteFunc(slices.Clone(metrics.All), func(m metrics.Metric) bool {
		return !slices.ContainsFunc(all, func(x experiment) bool {
			return slices.ContainsFunc(x.runs, func(r trained) bool {
				return r.result.Metrics != nil && m.Of(&r.result.Metrics.Summary) != nil
			})
		})
	})
	for _, m := range shown {
		t.Head = append(t.Head, m.Name)
	}
	var parts []table
	for _, x := range all {
		for _, r := range x.runs {
			figures := r.result.Metrics
			if figures == nil {
				continue
			}
			row := []string{x.name, number(float64(r.result.Seed)), number(float64(figures.Nodes))}
			for _, m := range shown {
				row = append(row, metrics.Text(m.Of(&figures.Summary)))
			}
			t.Rows = append(t.Rows, row)
			where := fmt.Sprintf("of the test, %s, seed %d", x.name, r.result.Seed)
			switch target := figures.Target(); {
			case max(len(figures.Classes), len(figures.Numbers)) > maxClassRows:
			case target == metrics.Numbers:
				parts = append(parts, numberTable("Numbers "+where, figures))
			case target == metrics.Labels:
				parts = append(parts, classTable("Labels "+where, figures))
			default:
				parts = append(parts, classTable("Classes "+where, figures))
			}
		}
	}
	if len(t.Rows) == 0 {
		return nil
	}
	return append([]table{t}, parts...)
}

// numberTable has the figures of each number.
func numberTable(title string, figures *metrics.Report) table {
	t := table{Title: title, Head: []string{"number", "nodes", "rmse", "mae", "r2"}}
	for _, x := range figures.Numbers {
		t.Rows = append(t.Rows, []string{number(float64(x.Number)), number(float64(x.Nodes)),
			metrics.Text(x.RMSE), metrics.Text(x.MAE), metrics.Text(x.R2)})
	}
	return t
}

// classTable has the figures of each class, and of its nodes the number that each prediction has.
func classTable(title string, figures *metrics.Report) table {
	t := table{Title: title, Head: []string{figures.Target().Singular(), "nodes", "precision", "recall", "F1",
		"ROC AUC", "average precision"}}
	matrix := figures.Confusion
	if len(matrix) > 10 || !square(matrix, len(figures.Classes)) {
		matrix = nil
	}
	for c := range matrix {
		t.Head = append(t.Head, fmt.Sprintf("predicted as %d", c))
	}
	for c, x := range figures.Classes {
		row := []string{number(float64(x.Class)), number(float64(x.Nodes))}
		for _, v := range []*float64{x.Precision, x.Recall, x.F1, x.ROCAUC, x.AveragePrecision} {
			row = append(row, metrics.Text(v))
		}
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

// maxMatrix is the most classes of a matrix that is drawn.
const maxMatrix = 20

// testFigures draw what the tests tell of the classes: a matrix of confusion over the seeds of each
// experiment, and the curves of its first run.
func testFigures(all []experiment) (out []figure) {
	roc := figure{Kind: kindLines, Title: "ROC curves of the test",
		X: axis{Label: "share of other nodes that are predicted", Share: true},
		Y: axis{Label: "recall", Share: true}}
	pr := figure{Kind: kindLines, Title: "Precision by recall of the test",
		X: axis{Label: "recall", Share: true}, Y: axis{Label: "precision", Share: true}}
	for _, x := range all {
		if m := x.confusion(); m != nil {
			out = append(out, confusion(x.name, m))
		}
		m := x.runs[0].result.Metrics
		if m == nil {
			continue
		}
		for _, c := range m.Curves[:min(len(m.Curves), metrics.MaxCurves)] {
			name := fmt.Sprintf("%s, seed %d", x.name, x.runs[0].result.Seed)
			if len(m.Curves) > 1 {
				name += fmt.Sprintf(", %s %d", m.Target().Singular(), c.Class)
			}
			roc.Series = append(roc.Series, curve(name, c.FPR, c.Recall))
			pr.Series = append(pr.Series, curve(name, c.Recall, c.Precision))
		}
	}
	for _, f := range []*figure{&roc, &pr} {
		if n := len(f.Series); n > 0 && n <= maxCurves {
			out = append(out, *f)
		}
	}
	return out
}

// confusion adds up the matrices of an experiment's runs; nil: there are none that can be drawn.
func (x *experiment) confusion() (sum [][]int64) {
	for _, r := range x.runs {
		if r.result.Metrics == nil {
			continue
		}
		m := r.result.Metrics.Confusion
		if n := len(m); n == 0 || n > maxMatrix || !square(m, n) || sum != nil && len(sum) != n {
			return nil
		}
		if sum == nil {
			sum = make([][]int64, len(m))
		}
		for i, row := range m {
			sum[i] = append(sum[i], make([]int64, len(row)-len(sum[i]))...)
			for k, v := range row {
				sum[i][k] += v
			}
		}
	}
	return sum
}

// maxCurves is the most lines of a figure of curves: more cannot be told apart.
const maxCurves = 24

// confusion draws a matrix of nodes by class and prediction.
func confusion(name string, matrix [][]int64) figure {
	f := figure{Kind: kindMatrix, Title: "Confusion of the test: " + name,
		Note: "Nodes of all seeds by class (rows) and prediction (columns). A cell shows its share of the row by its colour.",
		X:    axis{Label: "nodes", Whole: true}}
	for c, row := range matrix {
		b := bar{Name: fmt.Sprintf("class %d", c)}
		for p, n := range row {
			b.Parts = append(b.Parts, part{fmt.Sprint(p), float64(n)})
		}
		f.Bars = append(f.Bars, b)
	}
	return f
}

// curve has the points that two lists of a file agree on.
func curve(name string, x, y []float64) series {
	s := series{Name: name}
	for i := range min(len(x), len(y)) {
		s.Points = append(s.Points, single(x[i], y[i]))
	}
	return s
}
