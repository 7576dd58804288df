package planner

import (
	"slices"
	"strings"

	"helios/internal/errs"
)

// Graph holds what a plan has to know of a graph.
type Graph struct {
	Name    string  `json:"name"`
	Nodes   int64   `json:"nodes"`
	Edges   int64   `json:"edges"`
	Dim     int     `json:"dim"`
	Classes int     `json:"classes"`
	Train   float64 `json:"train_fraction"`
	// Skew is the distribution of accesses in ParsePopularity's form, SkewSource its source.
	Skew       string `json:"skew"`
	SkewSource string `json:"skew_source"`
	Source     string `json:"source"`
}

// assumedSkew is the source for graphs of which nobody has published a skew.
const assumedSkew = "assumed to be CL's, of which the Helios paper says it"

// graphs are those of the Helios paper, with its settings: 1 % of the nodes train.
var graphs = []Graph{
	{Name: "pa", Nodes: 111_059_956, Edges: 1_615_685_872, Dim: 128, Classes: 172, Train: 0.0109,
		Skew: "10%:70%", SkewSource: assumedSkew,
		Source: "OGB papers100M: 1.2 M training nodes"},
	{Name: "ig", Nodes: 269_346_174, Edges: 3_995_777_033, Dim: 1024, Classes: 19, Train: 0.01,
		Skew: "10%:70%", SkewSource: assumedSkew, Source: "IGB-full, as in the Helios paper"},
	{Name: "uk", Nodes: 790_000_000, Edges: 47_200_000_000, Dim: 1024, Classes: 64, Train: 0.01,
		Skew: "10%:70%", SkewSource: assumedSkew, Source: "UK-2014, as in the Helios paper"},
	{Name: "cl", Nodes: 1_000_000_000, Edges: 42_500_000_000, Dim: 1024, Classes: 64, Train: 0.01,
		Skew:       "10%:70%",
		SkewSource: "Helios paper: 10 % of the rows serve some 70 % of the bytes",
		Source:     "ClueWeb, as in the Helios paper"},
	{Name: "ld", Nodes: 5_600_000_000, Edges: 10_000_000_000, Dim: 1024, Classes: 64, Train: 0.01,
		Skew: "10%:70%", SkewSource: assumedSkew, Source: "LD, as in the Helios paper"},
}

// GraphNames are the graphs that are known by name.
func GraphNames() (names []string) {
	for _, g := range graphs {
		names = append(names, g.Name)
	}
	return names
}

// FindGraph returns a known graph.
func FindGraph(name string) (Graph, bool) {
	i := slices.IndexFunc(graphs, func(g Graph) bool { return g.Name == strings.ToLower(name) })
	if i < 0 {
		return Graph{}, false
	}
	return graphs[i], true
}

// maxNodes keeps node numbers, and lines of them, in what a directory takes.
const maxNodes = 1 << 40

func (g *Graph) check() error {
	switch {
	case g.Nodes < 1 || g.Nodes > maxNodes:
		return errs.New(errs.Usage, "a graph of %d nodes: 1 to %d can be planned for", g.Nodes,
			int64(maxNodes))
	case g.Edges < 0 || g.Edges > maxNodes*64:
		return errs.New(errs.Usage, "a graph of %d edges: 0 to %d can be planned for", g.Edges,
			int64(maxNodes)*64)
	case g.Dim < 1 || g.Dim > 1<<20:
		return errs.New(errs.Usage, "rows of %d features: 1 to %d can be planned for", g.Dim, 1<<20)
	case g.Classes < 1 || g.Classes > 1<<20:
		return errs.New(errs.Usage, "%d classes: 1 to %d can be planned for", g.Classes, 1<<20)
	case !(g.Train > 0 && g.Train <= 1):
		return errs.New(errs.Usage, "a share of %v training nodes: give more than 0 and at most 1",
			g.Train)
	}
	return nil
}
