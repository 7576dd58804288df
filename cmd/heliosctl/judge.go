package main

import (
	"fmt"
	"strings"

	figures "helios/internal/metrics"
	"helios/internal/ui"
)

// metricRows are lines for people on how well a model classifies; class names may be empty.
func metricRows(r *figures.Report, names []string) [][]string {
	if r == nil {
		return nil
	}
	var all []string
	for _, m := range figures.All[1:] { // the first has a line of its own
		if x := m.Of(&r.Summary); x != nil && m.Name != "f1-micro" { // the accuracy again
			all = append(all, fmt.Sprintf("%s %.4f", m.Name, *x))
		}
	}
	rows := [][]string{{"metrics", strings.Join(all, ", ")}}
	if len(names) == 0 || len(r.Classes) > maxClassRows {
		return rows
	}
	for _, c := range r.Classes[:min(len(r.Classes), len(names))] {
		rows = append(rows, []string{"class " + ui.Text(names[c.Class]),
			fmt.Sprintf("precision %s, recall %s, F1 %s of %d nodes", figures.Text(c.Precision),
				figures.Text(c.Recall), figures.Text(c.F1), c.Nodes)})
	}
	return rows
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
