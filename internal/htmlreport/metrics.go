package htmlreport

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"

	"helios/internal/metrics"
)

// maxClassRows is the most classes whose figures a page lists.
const maxClassRows = 50

// tests digests what judged the models: of each experiment the matrix, curves and classes.
func tests(all []experiment) section {
	all = slices.DeleteFunc(slices.Clone(all), func(x experiment) bool {
		return !slices.ContainsFunc(x.runs, func(r trained) bool { return r.result.Metrics != nil })
	})
	out := section{Title: "Test"}
	for i := range all {
		x := &all[i]
		if m := x.confusion(); m != nil {
			out.Figures = append(out.Figures, confusion(x.name, x.judged(), m))
		}
		out.Figures = append(out.Figures, curves(x.name, x.judged())...)
	}
	if len(all) > 0 {
		out.Tables = metricTables(all)
	}
	return out
}

// evaluation digests what "eval" found, as the test of one run.
func evaluation(s *Source) (out section, err error) {
	err = each(s, "result", func(r struct {
		Model   string          `json:"model"`
		Mode    string          `json:"mode"`
		Split   string          `json:"split"`
		Metrics *metrics.Report `json:"metrics"`
	}) {
		out = tests([]experiment{{name: r.Model + " " + r.Mode,
			runs: []trained{{s: s, result: trainResult{Metrics: r.Metrics}}}}})
		out.Title = "Evaluation on " + r.Split + ": " + s.Name
	})
	return out, err
}

// judged is the report of an experiment's first run that has one.
func (x *experiment) judged() *metrics.Report {
	for _, r := range x.runs {
		if r.result.Metrics != nil {
			return r.result.Metrics
		}
	}
	return nil
}

// over writes the mean of a figure over an experiment's runs, and behind ± the deviation of a
// sample where several have it.
func (x *experiment) over(of func(*metrics.Report) *float64) string {
	var v []float64
	mean, square := 0.0, 0.0
	for _, r := range x.runs {
		if r.result.Metrics == nil {
			continue
		}
		if f := of(r.result.Metrics); f != nil {
			v = append(v, *f)
			mean += *f
		}
	}
	if len(v) == 0 {
		return "–"
	}
	mean /= float64(len(v))
	text := metrics.Text(&mean)
	if n := float64(len(v)); n > 1 {
		for _, f := range v {
			square += (f - mean) * (f - mean)
		}
		deviation := math.Sqrt(square / (n - 1))
		text += " ± " + metrics.Text(&deviation)
	}
	return text
}

// metricTables have the figures of the tests: a row for each experiment, of the metrics that any
// has, and for each a table of its classes, labels or numbers.
func metricTables(all []experiment) (out []table) {
	t := table{Title: "Scores", Head: []string{"run", "seeds", "nodes"}}
	for _, m := range metrics.All {
		of := func(r *metrics.Report) *float64 { return m.Of(&r.Summary) }
		if slices.ContainsFunc(all, func(x experiment) bool { return x.over(of) != "–" }) {
			t.Head = append(t.Head, m.Name)
		}
	}
	for _, x := range all {
		r := x.judged()
		row := []string{x.name, number(float64(len(x.runs))), number(float64(r.Nodes))}
		for _, name := range t.Head[3:] {
			m := metrics.Find(name)
			row = append(row, x.over(func(r *metrics.Report) *float64 { return m.Of(&r.Summary) }))
		}
		t.Rows = append(t.Rows, row)
		if len(x.runs) > 1 {
			t.Title = "Scores: mean ± deviation over the seeds"
		}
		if n := max(len(r.Classes), len(r.Numbers)); n > 0 && n <= maxClassRows {
			out = append(out, x.parts(r))
		}
	}
	return append([]table{t}, out...)
}

// judgedPart is a class, label or number of a report.
type judgedPart struct {
	name    string
	nodes   int64
	figures []*float64
}

func partsOf(r *metrics.Report) (all []judgedPart) {
	for _, c := range r.Classes {
		all = append(all, judgedPart{className(c), c.Nodes,
			[]*float64{c.Precision, c.Recall, c.F1, c.ROCAUC, c.AveragePrecision}})
	}
	for _, n := range r.Numbers {
		all = append(all, judgedPart{strconv.Itoa(n.Number), n.Nodes,
			[]*float64{n.RMSE, n.MAE, n.R2}})
	}
	return all
}

// parts has the figures of each class, label or number of an experiment, whose first report is r.
func (x *experiment) parts(r *metrics.Report) table {
	kind := r.Target().Singular()
	t := table{Title: "Scores by " + kind + ": " + x.name, Head: []string{kind, "nodes", "precision",
		"recall", "F1", "ROC AUC", "average precision"}}
	if len(r.Numbers) > 0 {
		t.Head = []string{kind, "nodes", "rmse", "mae", "r2"}
	}
	for i, p := range partsOf(r) {
		row := []string{p.name, number(float64(p.nodes))}
		for k := range p.figures {
			row = append(row, x.over(func(r *metrics.Report) *float64 {
				if all := partsOf(r); i < len(all) && k < len(all[i].figures) {
					return all[i].figures[k]
				}
				return nil
			}))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// className is that of a class or label for people.
func className(c metrics.Class) string { return cmp.Or(c.Name, strconv.Itoa(c.Class)) }

// square reports whether a matrix has n rows of n: a file may say anything.
func square(matrix [][]int64, n int) bool {
	return len(matrix) == n && !slices.ContainsFunc(matrix, func(row []int64) bool {
		return len(row) != n
	})
}

// maxMatrix is the most classes of a matrix that is drawn.
const maxMatrix = 20

// curves draws ROC and precision by recall of each class.
func curves(name string, m *metrics.Report) (out []figure) {
	roc := figure{Kind: kindLines, Title: "ROC curves: " + name,
		X: axis{Label: "share of other nodes that are predicted", Share: true},
		Y: axis{Label: "recall", Share: true}}
	pr := figure{Kind: kindLines, Title: "Precision by recall: " + name,
		X: axis{Label: "recall", Share: true}, Y: axis{Label: "precision", Share: true}}
	for _, c := range m.Curves[:min(len(m.Curves), metrics.MaxCurves)] {
		of := m.Target().Singular() + " " + strconv.Itoa(c.Class)
		for _, x := range m.Classes {
			if x.Class == c.Class && x.Name != "" {
				of = x.Name
			}
		}
		roc.Series = append(roc.Series, curve(of, c.FPR, c.Recall))
		pr.Series = append(pr.Series, curve(of, c.Recall, c.Precision))
	}
	if len(roc.Series) == 0 {
		return nil
	}
	return []figure{roc, pr}
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

// confusion draws a matrix of nodes by class and prediction.
func confusion(name string, r *metrics.Report, matrix [][]int64) figure {
	f := figure{Kind: kindMatrix, Title: "Confusion: " + name,
		Note: "Nodes of all seeds by class (rows) and prediction (columns). A cell shows its share of the row by its colour.",
		X:    axis{Label: "nodes", Whole: true}}
	for c, row := range matrix {
		b := bar{Name: fmt.Sprintf("class %d", c)}
		if c < len(r.Classes) && r.Classes[c].Name != "" {
			b.Name = fmt.Sprintf("%d %s", c, r.Classes[c].Name)
		}
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
