package importer

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"
	"slices"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/units"
)

// TypedOptions are those of formats whose graphs have types of nodes and edges.
type TypedOptions struct {
	Input
	Output
}

// options are those that the parts of an import know.
func (o *TypedOptions) options() Options { return Options{Input: o.Input, Output: o.Output} }

// typedImport is an import of a graph of several types. A format fills in types, relations and the
// task, and calls write.
type typedImport struct {
	*importer
	pad   bool
	types []typedNodes
	rels  []typedEdges
	fills []fillRule // in the order in which they are done
	task  typedTask
}

// typedNodes is a type of nodes.
type typedNodes struct {
	name  string
	nodes int64
	dim   int  // features of a node; 0: the type has no rows
	half  bool // the rows are of float16
	// write writes the rows; nil where there are none, or a feature function makes them.
	write func(ctx context.Context) error
	names []string // of the nodes; nil: they have none
}

// rowsFrom takes the rows of a type from an array, which also gives the number of nodes where that
// is not known.
func (im *typedImport) rowsFrom(t *typedNodes, a *npy.Array) error {
	a, err := checkMatrix(a)
	if err != nil {
		return err
	}
	sh := a.Header.Shape
	if t.nodes == 0 {
		t.nodes = sh[0]
	}
	if sh[0] != t.nodes {
		return errs.New(errs.Usage, "%s has %d rows, there are %d nodes of type %s", a.Name, sh[0],
			t.nodes, t.name)
	}
	t.dim, t.half = int(sh[1]), isHalf(a)
	t.write = func(ctx context.Context) error {
		if a.Seekable() && im.s.ArrayBegun(im.nodesFile("features")) != nil {
			if err := a.Check(ctx); err != nil { // as features does
				return err
			}
		}
		return im.copyRows(ctx, a)
	}
	return nil
}

// typedEdges is a relation. Its edges are those of all sources.
type typedEdges struct {
	src, name, dst string
	open           func(of ends) ([]edges.Source, error)
	reverse        string // the name of the relation of opposite edges that is added; "": none
	symmetric      bool   // the relation is its own reverse
	dedup          bool   // repeated edges are stored once
}

// typedTask is the task of a graph. Its labels and splits are read, and their classes counted,
// before the edges are.
type typedTask struct {
	name, nodeType string
	labels         []int32
	labelFile      string
	splits         []splitSet
	done           *dataset.Task // that is written already; nil: it is not
}

// typeOf returns a type by its name; nil where there is none.
func (im *typedImport) typeOf(name string) *typedNodes {
	i := slices.IndexFunc(im.types, func(t typedNodes) bool { return t.name == name })
	if i < 0 {
		return nil
	}
	return &im.types[i]
}

// write writes all parts: the edges of each relation, the rows of each type, and the task.
func (im *typedImport) write(ctx context.Context) error {
	var schema dataset.Schema
	if err := im.describeRelations(&schema); err != nil {
		return err
	}
	if err := im.planFills(&schema); err != nil {
		return err
	}
	slices.SortStableFunc(im.types, func(a, b typedNodes) int { // types without rows come last
		return cmp.Compare(boolInt(a.dim == 0), boolInt(b.dim == 0))
	})
	if err := im.describeTypes(&schema); err != nil {
		return err
	}
	if err := schema.CheckGraph(); err != nil {
		return errs.New(errs.Usage, "%s: %w", im.o.In, err)
	}
	sources, err := im.openRelations()
	if err != nil {
		return err
	}
	for i := range schema.Relations {
		if err := im.relation(ctx, &schema, i, sources[i]); err != nil {
			return err
		}
	}
	if err := im.writeTypes(ctx, &schema); err != nil {
		return err
	}
	task, err := im.writeTask()
	if err != nil {
		return err
	}
	schema.Tasks = []dataset.Task{task}
	im.m.Schema = schema
	return nil
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// describeTypes describes the types, and refuses padding that nobody asked for.
func (im *typedImport) describeTypes(s *dataset.Schema) error {
	dtype := rowtype.Float16
	widest, need, rows := int64(0), int64(0), int64(0)
	for _, t := range im.types {
		if t.dim > 0 && !t.half {
			dtype = rowtype.Float32
		}
		if t.dim > 0 {
			rows += t.nodes
			widest = max(widest, int64(t.dim))
			need += t.nodes * int64(t.dim)
		}
	}
	im.m.DType = dtype.String()
	for _, t := range im.types {
		n := dataset.NodeType{Name: t.name, Nodes: t.nodes}
		if t.dim > 0 {
			n.Dim, n.DType = t.dim, im.m.DType
		}
		s.NodeTypes = append(s.NodeTypes, n)
	}
	size := int64(dtype.RowBytes(2) / 2)
	if more := rows*widest - need; more > 0 {
		share := 100 * float64(more) / float64(need)
		if share > 25 && !im.pad {
			return errs.New(errs.Usage,
				"rows of different widths are stored as wide as the widest, %d numbers: %s more than their %s on SSDs (%.0f %%); give {pad} if that is right, or make the features equally wide",
				widest, units.FormatBytes(more*size), units.FormatBytes(need*size), share)
		}
		im.o.note("rows are stored as wide as the widest type's, %d numbers: %s more than their %s on SSDs (%.1f %%)",
			widest, units.FormatBytes(more*size), units.FormatBytes(need*size), share)
	}
	if im.m.FeatureFn != "" {
		return nil
	}
	return build.EnoughDisk(im.o.Out, float64(need*size))
}

// describeRelations describes the relations: each is followed by its reverse, where one is added.
func (im *typedImport) describeRelations(s *dataset.Schema) error {
	for _, r := range im.rels {
		for _, end := range []string{r.src, r.dst} {
			if im.typeOf(end) == nil {
				return errs.New(errs.Usage, "relation %s of %s and %s: there are no nodes of type %s",
					brief(r.name), brief(r.src), brief(r.dst), brief(end))
			}
		}
		forth, back := len(s.Relations), len(s.Relations)+1
		rel := dataset.Relation{Src: r.src, Name: r.name, Dst: r.dst}
		switch {
		case r.symmetric:
			rel.Reverse = &forth
		case r.reverse != "":
			rel.Reverse = &back
			s.Relations = append(s.Relations, rel)
			rel = dataset.Relation{Src: r.dst, Name: r.reverse, Dst: r.src, Reverse: &forth}
		}
		s.Relations = append(s.Relations, rel)
	}
	return nil
}

// typedSources are the edges of a relation.
type typedSources struct {
	all   []edges.Source
	dedup bool
}

// openRelations opens the edges of all relations before the first are read: what is wrong with a
// file is said soon.
func (im *typedImport) openRelations() (all []typedSources, err error) {
	for _, r := range im.rels {
		of := ends{im.typeOf(r.src).nodes, im.typeOf(r.dst).nodes}
		s, err := r.open(of)
		if err != nil {
			return nil, err
		}
		all = append(all, typedSources{s, r.dedup})
		if r.reverse != "" {
			var back []edges.Source
			for _, x := range s {
				back = append(back, opposites(x))
			}
			all = append(all, typedSources{back, r.dedup})
		}
	}
	return all, nil
}

// relation writes one relation, unless an interrupted import has.
func (im *typedImport) relation(ctx context.Context, s *dataset.Schema, i int,
	sources typedSources) (err error) {
	r := &s.Relations[i]
	if c, ok := im.s.RelationTopology(i); ok {
		r.Edges = c.Stored
		return nil
	}
	defer func() { err = errors.Join(err, im.freeSorter()) }()
	if im.sorter, err = edges.New(im.s.RelationStore(i), im.o.Memory,
		edges.Rules{Dedup: sources.dedup}); err != nil {
		return err
	}
	for _, x := range sources.all {
		if err := im.sorter.Read(ctx, x, im.o.Progress); err != nil {
			return err
		}
	}
	src, dst := im.typeOf(r.Src).nodes, im.typeOf(r.Dst).nodes
	c, err := im.sorter.WriteRelation(ctx, dst, src, im.o.Progress)
	r.Edges = c.Stored
	return err
}

// writeTypes writes the rows and names of all types: rows that are made of others come after these.
func (im *typedImport) writeTypes(ctx context.Context, s *dataset.Schema) error {
	for i := range im.types {
		t := &im.types[i]
		im.folder, im.m.Nodes = dataset.NodesDir(i), t.nodes
		if t.names != nil {
			if err := im.writeNames(filepath.Join(im.folder, dataset.NamesName),
				t.names); err != nil {
				return err
			}
		}
		if t.write != nil {
			if err := t.write(ctx); err != nil {
				return err
			}
		}
	}
	for _, f := range im.fills {
		i := s.TypeOf(f.nodeType)
		im.folder, im.m.Nodes = dataset.NodesDir(i), im.types[i].nodes
		if err := im.fillRows(ctx, s, f); err != nil {
			return err
		}
	}
	return nil
}

func (im *importer) writeNames(file string, names []string) error {
	f, err := im.s.Create(file)
	if err != nil {
		return err
	}
	for _, n := range names {
		if _, err := f.Write(append([]byte(n), '\n')); err != nil {
			return errors.Join(err, f.Discard())
		}
	}
	return f.Finish()
}

// taskOn readies what reads labels and splits for the nodes of a type.
func (im *typedImport) taskOn(name, nodeType string) error {
	t := im.typeOf(nodeType)
	if t == nil {
		return errs.New(errs.Usage, "%s has no nodes of type %s, which have the labels", im.o.In,
			nodeType)
	}
	im.task.name, im.task.nodeType = name, nodeType
	im.folder, im.m.Nodes = dataset.TasksDir(0), t.nodes
	return nil
}

// writeTask writes labels and splits.
func (im *typedImport) writeTask() (dataset.Task, error) {
	t := &im.task
	if t.done != nil {
		return *t.done, nil
	}
	if err := im.taskOn(t.name, t.nodeType); err != nil {
		return dataset.Task{}, err
	}
	if err := im.labelsAndSplits(t.labels, t.labelFile, t.splits); err != nil {
		return dataset.Task{}, err
	}
	m := &im.m
	task := dataset.Task{Name: t.name, Kind: dataset.TaskNode, Type: t.nodeType,
		Target: dataset.TargetClass, Classes: max(m.Classes, 1), Train: m.Train, Val: m.Val,
		Test: m.Test, Unlabelled: m.Unlabelled, ClassNames: m.ClassNames, LabelDims: m.LabelDims}
	if !im.plain() {
		task.Target, task.Classes, task.Columns = im.o.Target, 0, int(im.targets.columns)
	}
	return task, nil
}

// opposites are the opposites of a source's edges.
func opposites(s edges.Source) edges.Source {
	read := s.Read
	s.Read = func(ctx context.Context, part int, emit func(src, dst []int64) error,
		done func(int64)) error {
		return read(ctx, part, func(src, dst []int64) error { return emit(dst, src) }, done)
	}
	return s
}

// bothWays are a source's edges and their opposites, without self loops.
func bothWays(s edges.Source) edges.Source {
	read := s.Read
	s.Read = func(ctx context.Context, part int, emit func(src, dst []int64) error,
		done func(int64)) error {
		var from, to []int64
		return read(ctx, part, func(src, dst []int64) error {
			from, to = from[:0], to[:0]
			for i, v := range src {
				if v != dst[i] {
					from, to = append(from, v, dst[i]), append(to, dst[i], v)
				}
			}
			return emit(from, to)
		}, done)
	}
	return s
}

// selfLoops are so many edges from each node to itself.
func selfLoops(nodes, times int64) edges.Source {
	const per = 1 << 20
	return edges.Source{Name: "self loops", Unit: "nodes", Total: nodes,
		Parts: int((nodes + per - 1) / per),
		Read: func(_ context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			var v []int64
			for n, end := int64(part)*per, min(int64(part+1)*per, nodes); n < end; n++ {
				for range times {
					v = append(v, n)
				}
				if len(v) >= idsPerRead || n == end-1 {
					if err := emit(v, v); err != nil {
						return err
					}
					v = v[:0]
				}
			}
			done(min(per, nodes-int64(part)*per))
			return nil
		}}
}
