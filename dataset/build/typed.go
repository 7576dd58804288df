package build

import (
	"context"
	"slices"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/internal/errs"
	"helios/internal/philox"
)

// A typed graph is a small bibliography: papers, their authors, the institutions of these and the
// venues of papers. Each node of any type has one of the classes. Edges prefer nodes of one class,
// rows are the centre of the class in the type's own space plus noise, and the classes of papers
// are to be learned: from their rows, those of papers that they cite, and those of authors, venues
// and, two steps away, institutions.

// typedType is a type of nodes: share is its part of all nodes.
type typedType struct {
	name  string
	share float64
}

var typedTypes = []typedType{{"paper", 0.55}, {"author", 0.4}, {"institution", 0.03},
	{"venue", 0.02}}

// typedRelation is a relation and, where rev is set, its reverse after it. degree is the mean
// number of sources of a node of dst; 0: the one that the user asks for.
type typedRelation struct {
	src, dst  int // in typedTypes
	name, rev string
	degree    float64
}

var typedRelations = []typedRelation{
	{src: 0, dst: 0, name: "cites"},
	{src: 1, dst: 0, name: "writes", rev: "rev_writes", degree: 3},
	{src: 2, dst: 1, name: "employs", rev: "rev_employs", degree: 1.5},
	{src: 3, dst: 0, name: "prints", rev: "rev_prints", degree: 1},
}

// typed writes the graph and returns its description.
func (g *generator) typed(ctx context.Context, s *Staging) (schema dataset.Schema, err error) {
	var types []*generator
	for i, t := range typedTypes {
		n := max(int64(float64(g.Nodes)*t.share), 1)
		if n < int64(g.Classes) {
			return schema, errs.New(errs.Usage,
				"{nodes} %d gives %d of type %s, fewer than {classes} %d; each class needs one; give more nodes or fewer classes",
				g.Nodes, n, t.name, g.Classes)
		}
		types = append(types, g.part(uint64(i), n, dataset.NodesDir(i)))
		kind := dataset.NodeType{Name: t.name, Nodes: n}
		if i < len(typedTypes)-g.WithoutRows {
			kind.Dim, kind.DType = g.Dim, "float32"
		}
		schema.NodeTypes = append(schema.NodeTypes, kind)
	}
	for i, r := range typedRelations {
		gen := &relationGenerator{src: types[r.src], dst: types[r.dst], same: r.src == r.dst}
		gen.generator = g.part(uint64(len(typedTypes)+i), gen.dst.Nodes, "")
		if r.degree > 0 {
			gen.AvgDegree = r.degree
		}
		if schema.Relations, err = gen.write(ctx, s, r, schema.Relations); err != nil {
			return schema, err
		}
	}
	for i := range types {
		if g.FeatureFn == "" && schema.NodeTypes[i].Dim > 0 {
			if err := types[i].features(ctx, s); err != nil {
				return schema, err
			}
		}
	}
	papers := types[0]
	papers.folder = dataset.TasksDir(0)
	task := dataset.Task{Name: "topic", Kind: dataset.TaskNode, Type: typedTypes[0].name,
		Target: dataset.TargetClass, Classes: g.Classes}
	task.Train, task.Val, task.Test, err = papers.labelsAndSplits(ctx, s)
	schema.Tasks = []dataset.Task{task}
	return schema, err
}

// part is a generator of a part of the graph, with choices of its own.
func (g *generator) part(i uint64, nodes int64, folder string) *generator {
	o := g.GenerateOptions
	o.Kind, o.Nodes, o.Seed = kindSBM, nodes, philox.Mix(g.Seed+philox.Mix(i+1))
	p := newGenerator(o)
	p.folder = folder
	return p
}

// relationGenerator draws the edges of a relation.
type relationGenerator struct {
	*generator // its words; Nodes are those of dst
	src, dst   *generator
	same       bool // both ends are of one type: a node is no source of its own
}

// write writes a relation and its reverse, and appends both.
func (g *relationGenerator) write(ctx context.Context, s *Staging, r typedRelation,
	all []dataset.Relation) ([]dataset.Relation, error) {
	src, dst := typedTypes[r.src].name, typedTypes[r.dst].name
	n, err := g.sort(ctx, s, len(all), false)
	if err != nil {
		return nil, err
	}
	all = append(all, dataset.Relation{Src: src, Name: r.name, Dst: dst, Edges: n})
	if r.rev == "" {
		return all, nil
	}
	if n, err = g.sort(ctx, s, len(all), true); err != nil {
		return nil, err
	}
	forth, back := len(all)-1, len(all)
	all[forth].Reverse = &back
	return append(all, dataset.Relation{Src: dst, Name: r.rev, Dst: src, Edges: n,
		Reverse: &forth}), nil
}

// sort writes the edges, or their opposites, as relation i.
func (g *relationGenerator) sort(ctx context.Context, s *Staging, i int, opposite bool) (int64,
	error) {
	o := edges.Options{Memory: g.Memory, Nodes: g.dst.Nodes, Sources: g.src.Nodes,
		Progress: g.Progress}
	if opposite {
		o.Nodes, o.Sources = o.Sources, o.Nodes
	}
	parts := (g.Nodes + nodesPerChunk - 1) / nodesPerChunk
	counts, err := edges.Sort(ctx, s.RelationStore(i), edges.Source{Name: "typed", Unit: "nodes",
		Total: g.Nodes, Parts: int(parts),
		Read: func(_ context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			var src, dst, list []int64
			lo := int64(part) * nodesPerChunk
			hi := min(lo+nodesPerChunk, g.Nodes)
			for v := lo; v < hi; v++ {
				list = g.sources(v, list)
				for _, u := range list {
					src, dst = append(src, u), append(dst, v)
				}
			}
			if opposite {
				src, dst = dst, src
			}
			done(hi - lo)
			return emit(src, dst)
		}}, o)
	return counts.Stored, err
}

// sources draws the sources of node v of dst: distinct, ascending, most of its own class, and
// popular ones more often than others.
func (g *relationGenerator) sources(v int64, list []int64) []int64 {
	own := g.dst.class(g.dst.rank(v))
	limit, classes := g.src.Nodes, int64(g.Classes)
	if g.same {
		limit--
	}
	degree := min(g.degree(v), limit)
	list = list[:0]
	for try := uint32(0); int64(len(list)) < degree && try < 4; try++ {
		for i := uint32(0); int64(len(list)) < degree && int64(i) < degree; i++ {
			w := g.words(uint64(v), try<<28|i, genNeighbor)
			c := g.classOf(own, w[0], w[1])
			members := (g.src.Nodes - c + classes - 1) / classes
			u := g.src.id(c + g.popular(unit(w[2], w[3]), members)*classes)
			if !g.same || u != v {
				list = append(list, u)
			}
		}
		slices.Sort(list)
		list = slices.Compact(list)
	}
	return list
}
