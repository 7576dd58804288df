package importer

import (
	"context"
	"encoding/csv"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/internal/container"
	"helios/internal/errs"
)

// Graphs of several types as OGB writes them, such as ogbn-mag: raw/triplet-type-list.csv.gz has a
// line for each relation, raw/num-node-dict.csv.gz the number of nodes of each type,
// raw/relations/SRC___REL___DST the edges, raw/node-feat/TYPE and raw/node-label/TYPE what some of
// the types have, and split/NAME/TYPE the split.
const (
	ogbTypes = "triplet-type-list.csv.gz"
	ogbNodes = "num-node-dict.csv.gz"
)

func (im *ogbImport) ogbTyped(ctx context.Context, raw, types string, fills []fillRule) error {
	o := &im.o
	if !o.ownFeatures() || o.Labels != "" || o.SplitDir != "" {
		return errs.New(errs.Usage,
			"%s has several types, whose features, labels and splits are those of the input; leave {features}, {feature-fn}, {labels} and {splits} out",
			o.In)
	}
	t := &typedImport{importer: im.importer, pad: im.opt.Pad, fills: fills}
	used := []string{types, filepath.Join(raw, ogbNodes)}
	if err := im.ogbNodeTypes(ctx, t, raw, &used); err != nil {
		return err
	}
	if err := im.ogbRelations(t, raw, types, &used); err != nil {
		return err
	}
	label, nodeType := "", ""
	for i := range t.types {
		name := filepath.Join(raw, "node-label", t.types[i].name, "node-label.csv.gz")
		if isFile(name) && label != "" {
			return errs.New(errs.Usage, "%s and %s: labels of two types; one task can be imported",
				label, name)
		} else if isFile(name) {
			label, nodeType = name, t.types[i].name
		}
	}
	if label == "" {
		return errs.New(errs.Usage, "%s has no node-label/TYPE/node-label.csv.gz", raw)
	}
	if err := t.taskOn("label", nodeType); err != nil {
		return err
	}
	var err error
	t.task.labelFile = label
	if t.task.labels, err = im.labelFile(ctx, label); err != nil {
		return err
	}
	if !o.MakeSplits {
		dir := filepath.Join(o.In, "split")
		name, err := im.ogbSplitName(dir)
		if err == nil && name != "" {
			im.m.Source.Options["split"] = name
			t.task.splits, err = im.folderSplits(ctx, filepath.Join(dir, name, nodeType))
		}
		if err != nil {
			return err
		}
	}
	for _, s := range t.task.splits {
		used = append(used, s.file)
	}
	im.noteUnused(o.In, unusedBelow(o.In, append(used, label, filepath.Join(o.In, "master.csv"))))
	return t.write(ctx)
}

// smallTable reads a small table by commas.
func smallTable(path string) ([][]string, error) {
	in, err := container.OpenText(path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	r := csv.NewReader(io.LimitReader(in, dataset.MaxDescription))
	rows, err := r.ReadAll()
	if err != nil {
		return nil, errs.New(errs.Usage, "%s: %w", path, err)
	}
	return rows, nil
}

// ogbNodeTypes reads the types, and finds their rows.
func (im *ogbImport) ogbNodeTypes(ctx context.Context, t *typedImport, raw string,
	used *[]string) error {
	path := filepath.Join(raw, ogbNodes)
	rows, err := smallTable(path)
	if err != nil {
		return err
	}
	if len(rows) != 2 {
		return errs.New(errs.Usage, "%s has %d lines, must have two: types, and numbers of nodes of one graph",
			path, len(rows))
	}
	for i, name := range rows[0] {
		n, err := strconv.ParseInt(strings.TrimSpace(rows[1][i]), 10, 64)
		if err != nil || n < 1 || n > maxTextNodes {
			return errs.New(errs.Usage, "%s: %s is not a number of nodes of type %s", path,
				brief(rows[1][i]), brief(name))
		}
		if !slices.Contains([]string{"", ".", ".."}, name) && !strings.ContainsAny(name, `/\`) {
			t.types = append(t.types, typedNodes{name: name, nodes: n})
			continue
		}
		return errs.New(errs.Usage, "%s: %s is no name of a type", path, brief(name))
	}
	for i := range t.types {
		x := &t.types[i]
		file := filepath.Join(raw, "node-feat", x.name, "node-feat.csv.gz")
		if !isFile(file) {
			continue
		}
		*used = append(*used, file)
		im.m.Nodes = x.nodes
		table, err := im.tableOf(ctx, "features", file, false)
		if err != nil {
			return err
		}
		if x.dim = len(table.take); x.dim < 1 || x.dim > dataset.MaxDim {
			return errs.New(errs.Usage, "%s: %d features per node, must be 1 to %d", file, x.dim,
				dataset.MaxDim)
		}
		nodes, dim := x.nodes, int64(x.dim) // the types are sorted later
		x.write = func(ctx context.Context) error {
			if im.s.HasArray(im.nodesFile("features"), nodes, dim) {
				return nil
			}
			return im.features(ctx, nodeFile{path: file}, nil)
		}
	}
	return nil
}

// ogbRelations reads the names of the relations.
func (im *ogbImport) ogbRelations(t *typedImport, raw, types string, used *[]string) error {
	rows, err := smallTable(types)
	if err != nil {
		return err
	}
	for i, row := range rows {
		if len(row) != 3 || strings.ContainsAny(strings.Join(row, ""), `/\`) {
			return errs.New(errs.Usage, "%s:%d: a relation is SRC,REL,DST", types, i+1)
		}
		folder := filepath.Join(raw, "relations", strings.Join(row, "___"))
		file, number := filepath.Join(folder, "edge.csv.gz"),
			filepath.Join(folder, "num-edge-list.csv.gz")
		if !isFile(file) {
			return errs.New(errs.Usage, "%s is missing; %s names the relation", file, types)
		}
		*used = append(*used, file, number, filepath.Join(folder, "edge_reltype.csv.gz"))
		r := typedEdges{src: row[0], name: row[1], dst: row[2],
			open: func(of ends) ([]edges.Source, error) {
				count := int64(-1)
				if isFile(number) {
					n, err := im.ogbCount(context.Background(), number)
					if err != nil {
						return nil, err
					}
					count = n
				}
				s, err := csvEdges(context.Background(), file, max(of.src, of.dst), count, false)
				return []edges.Source{bounded(s, of)}, err
			}}
		if im.o.Undirected {
			r.addReverse()
		}
		t.rels = append(t.rels, r)
	}
	return nil
}

// addReverse adds the reverse of a relation; one between nodes of one type is taken both ways,
// without repeated edges and self loops.
func (r *typedEdges) addReverse() {
	if r.src != r.dst {
		r.reverse = "rev_" + r.name
		return
	}
	one := r.open
	r.symmetric, r.dedup = true, true
	r.open = func(of ends) ([]edges.Source, error) {
		all, err := one(of)
		for i := range all {
			all[i] = bothWays(all[i])
		}
		return all, err
	}
}

// bounded holds the ids of a source, which are below the larger number of nodes, against those of
// their own type.
func bounded(s edges.Source, of ends) edges.Source {
	read := s.Read
	s.Read = func(ctx context.Context, part int, emit func(src, dst []int64) error,
		done func(int64)) error {
		return read(ctx, part, func(src, dst []int64) error {
			for i, v := range src {
				if v >= of.src || dst[i] >= of.dst {
					return errs.New(errs.Usage,
						"%s: the edge %d,%d is outside 0..%d and 0..%d, the nodes of its types", s.Name, v,
						dst[i], of.src-1, of.dst-1)
				}
			}
			return emit(src, dst)
		}, done)
	}
	return s
}
