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
	// Of a typed graph. Those of the first type train, Train is the share of them.
	Types     []NodeType `json:"node_types,omitempty"`
	Relations []Relation `json:"relations,omitempty"`
	RowType   string     `json:"row_dtype,omitempty"` // of its rows; "": float32
}

// assumedSkew is the source for graphs of which nobody has published a skew.
const assumedSkew = "assumed to be CL's, of which the Helios paper says it"

// typedSkew is the source for typed graphs, of which nobody has either.
const typedSkew = "assumed: 10 % of a type's nodes are the sources of some 70 % of a relation's edges"

// graphs are those of the Helios paper, with its settings: 1 % of the nodes train; and typed ones
// of the GIDS paper, whose relations' edges the IGB and OGB-LSC projects count.
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
	{Name: "igbh-full", Nodes: 547_306_935, Edges: 2 * 5_812_005_639, Dim: 1024, Classes: 2983,
		Train: 94_605_581. / 269_346_174, Skew: "zipf:0.845", SkewSource: typedSkew,
		Source: "IGBH-full, the four types of the GIDS paper, relations both ways; MLPerf's split",
		Types: []NodeType{{"paper", 269_346_174}, {"author", 277_220_883}, {"fos", 712_960},
			{"institute", 26_918}},
		Relations: bothWays(
			Relation{Src: "paper", Name: "cites", Dst: "paper", Edges: 3_996_442_004},
			Relation{Src: "paper", Name: "written_by", Dst: "author", Edges: 716_761_549},
			Relation{Src: "author", Name: "affiliated_to", Dst: "institute", Edges: 48_521_486},
			Relation{Src: "paper", Name: "topic", Dst: "fos", Edges: 1_050_280_600})},
	{Name: "mag240m", Nodes: 244_160_499, Edges: 2 * 1_728_364_232, Dim: 768, Classes: 153,
		Train: 1_112_392. / 121_751_666, Skew: "zipf:0.845", SkewSource: typedSkew,
		Source:  "MAG240M, relations both ways, authors and institutions with rows made at import",
		RowType: "float16",
		Types: []NodeType{{"paper", 121_751_666}, {"author", 122_383_112},
			{"institution", 25_721}},
		Relations: bothWays(
			Relation{Src: "paper", Name: "cites", Dst: "paper", Edges: 1_297_748_926},
			Relation{Src: "author", Name: "affiliated_with", Dst: "institution", Edges: 44_592_586},
			Relation{Src: "author", Name: "writes", Dst: "paper", Edges: 386_022_720})},
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
