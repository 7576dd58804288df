package main

import (
	"fmt"
	"strconv"
	"strings"

	figures "helios/internal/metrics"
	"helios/internal/ui"
)

// metricRows are lines for people on how good a model's outputs are; names of classes, labels or
// numbers may be empty.
func metricRows(r *figures.Report, names []string) [][]string {
	if r == nil {
		return nil
	}
	var all []string
	for _, m := range figures.All[1:] { // the first has a line of its own
		again := m.Name == "f1-micro" && r.Target() == figures.Classes // it is the accuracy
		if x := m.Of(&r.Summary); x != nil && !again {
			all = append(all, fmt.Sprintf("%s %.4f", m.Name, *x))
		}
	}
	rows := [][]string{{"metrics", strings.Join(all, ", ")}}
	for _, n := range r.Numbers {
		if len(r.Numbers) > 1 && len(r.Numbers) <= maxClassRows {
			rows = append(rows, []string{"number " + nameOf(names, n.Number),
				fmt.Sprintf("rmse %s, mae %s, r2 %s of %d nodes", figures.Text(n.RMSE), figures.Text(n.MAE),
					figures.Text(n.R2), n.Nodes)})
		}
	}
	if len(names) == 0 || len(r.Classes) > maxClassRows {
		return rows
	}
	for _, c := range r.Classes[:min(len(r.Classes), len(names))] {
		rows = append(rows, []string{r.Target().Singular() + " " + ui.Text(names[c.Class]),
			fmt.Sprintf("precision %s, recall %s, F1 %s of %d nodes", figures.Text(c.Precision),
				figures.Text(c.Recall), figures.Text(c.F1), c.Nodes)})
	}
	return rows
}

// nameOf is the name of a class, label or number for people.
func nameOf(names []string, i int) string {
	if i < len(names) {
		return ui.Text(names[i])
	}
	return strconv.Itoa(i)
}

// maxClassRows is the most classes that get a line each.
const maxClassRows = 20

// byMetric says by which metric an epoch is the best, where that is not accuracy.
func byMetric(name string) string {
	if name == figures.All[0].Name {
		return ""
	}
	return " by " + name
}
