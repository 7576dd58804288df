package importer

import (
	"context"
	"errors"
	"slices"
	"strconv"

	"helios/dataset/columns"
	"helios/dataset/edges"
	tables "helios/dataset/table"
	"helios/internal/errs"
)

// typeNames are the names of a type's nodes; node i has the i-th row of its table.
type typeNames struct {
	nodes  int64
	number map[string]int64 // nil: nodes are called 0, 1, …
}

func (n *typeNames) count() int64 { return n.nodes }

// readNames numbers the nodes of a table.
func (im *importer) readNames(ctx context.Context, t *NodeTable, src *tables.Source) (*typeNames,
	error) {
	n := &typeNames{}
	col := t.NodeIDCol
	if col == "" {
		col = src.Fields[0].Name
	} else {
		n.number = map[string]int64{}
	}
	src, err := src.Select(col)
	if err != nil {
		return nil, t.bad("%w", err)
	}
	var key []byte
	err = tables.Each(ctx, src, func(b *tables.Batch) (*tables.Batch, error) { return b, nil },
		func(b *tables.Batch) error {
			if n.number == nil {
				n.nodes += int64(b.Rows)
				return nil
			}
			c := &b.Columns[0]
			for i := range b.Rows {
				if c.IsMissing(i) {
					return b.Bad(i, c.Name, "no name")
				}
				if key, err = columns.AppendText(key[:0], c, i); err != nil {
					return b.Bad(i, c.Name, "%w", err)
				}
				if _, twice := n.number[string(key)]; twice {
					return b.Bad(i, c.Name, "%s is there twice; a node has one row", tables.Brief(key))
				}
				if err := im.needMemory("the names of the nodes", 1, int64(nameBytes+len(key))); err != nil {
					return err
				}
				n.number[string(key)] = n.nodes
				n.nodes++
			}
			return nil
		})
	if err == nil && n.nodes == 0 {
		err = errs.New(errs.Usage, "%s has no rows", src.Files[0])
	}
	return n, err
}

// find returns the number of a node.
func (n *typeNames) find(key []byte) (int64, bool) {
	if n.number == nil {
		v, err := strconv.ParseInt(string(key), 10, 64)
		return v, err == nil && v >= 0 && v < n.nodes
	}
	v, ok := n.number[string(key)]
	return v, ok
}

// write writes the names.
func (n *typeNames) write(im *importer, file string) error {
	if n.number == nil {
		return nil
	}
	names := make([]string, n.nodes)
	for name, v := range n.number {
		names[v] = name
	}
	return im.writeNames(file, names)
}

// edgesOf are the edges of an entry of the description.
func (t *tableImport) edgesOf(_ context.Context, i int) (edges.Source, error) {
	e := &t.d.Edges[i]
	src, err := t.edges[i].Select(e.SourceIDCol, e.DestIDCol)
	if err != nil {
		return edges.Source{}, e.bad("%w", err)
	}
	end := func(name string) *typeNames {
		return t.names[slices.IndexFunc(t.d.Nodes, func(n NodeTable) bool { return n.NodeType == name })]
	}
	ends := [2]*typeNames{end(e.Relation[0]), end(e.Relation[2])}
	return edges.Source{Name: src.Files[0], Unit: "bytes", Total: src.Size, Parts: 1,
		Read: func(ctx context.Context, _ int, emit func(src, dst []int64) error,
			done func(int64)) error {
			err := tables.Each(ctx, src, func(b *tables.Batch) (out [2][]int64, err error) {
				var key []byte
				for k := range out {
					c := &b.Columns[k]
					for i := range b.Rows {
						if c.IsMissing(i) {
							return out, b.Bad(i, c.Name, "no name")
						}
						if key, err = columns.AppendText(key[:0], c, i); err != nil {
							return out, b.Bad(i, c.Name, "%w", err)
						}
						v, ok := ends[k].find(key)
						if !ok {
							return out, b.Bad(i, c.Name, "there is no node %s of type %s",
								tables.Brief(key), e.Relation[2*k])
						}
						out[k] = append(out[k], v)
					}
				}
				return out, nil
			}, func(out [2][]int64) error { return emit(out[0], out[1]) })
			done(src.Size)
			return errors.Join(err)
		}}, nil
}
