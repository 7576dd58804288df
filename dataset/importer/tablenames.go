package importer

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"slices"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/names"
	tables "helios/dataset/table"
	"helios/internal/errs"
)

// The names of all nodes are numbered before anything else (package names). The step leaves a file
// of names for each type, and for each relation a scratch file of each end, with the numbers of its
// nodes in the order of the tables. They are the edges from then on.

// numbered is the step as the journal has it.
type numbered struct {
	Nodes []int64 `json:"nodes"` // by type
	Rows  []int64 `json:"rows"`  // by relation
	// Dangling are edges of a relation that name a node that is not there.
	Dangling []int64 `json:"dangling,omitempty"`
}

// namesStep is the journal's name of the step.
const namesStep = "names"

// endFile is the scratch file of an end of a relation: 0 the sources, 1 the destinations.
func endFile(relation, end int) string { return fmt.Sprintf("ends-%d-%d", relation, end) }

// number numbers the nodes of all types, unless an interrupted import has.
func (t *tableImport) number(ctx context.Context) error {
	if state, ok := t.s.Step(namesStep); ok {
		return json.Unmarshal(state, &t.numbered)
	}
	if err := t.s.ClearScratch(); err != nil {
		return err
	}
	t.numbered = numbered{Rows: make([]int64, len(t.d.Edges)),
		Dangling: make([]int64, len(t.d.Edges))}
	var files []string
	for i := range t.d.Nodes {
		if err := t.numberType(ctx, i); err != nil {
			return err
		}
		if t.named(i) {
			files = append(files, t.namesFile(i))
		}
	}
	for i := range t.d.Edges {
		if err := t.countDangling(ctx, i); err != nil {
			return err
		}
		for end := range 2 {
			files = append(files, t.s.ScratchName(endFile(i, end)))
		}
	}
	return t.s.FinishStep(namesStep, &t.numbered, files...)
}

// named reports whether the nodes have names: those of a table without a column of ids are called
// by the numbers of their rows.
func (t *tableImport) named(i int) bool {
	if t.base != nil {
		_, err := os.Lstat(t.base.Path(t.namesFile(i)))
		return err == nil
	}
	return t.d.Nodes[i].NodeIDCol != "" || t.nodes[i] == nil
}

// namesFile is the file of a type's names.
func (t *tableImport) namesFile(i int) string {
	if t.typed() || t.inFolders() {
		return path.Join(dataset.NodesDir(i), dataset.NameMapName)
	}
	return dataset.NameMapName
}

// numberType numbers the nodes of a type.
func (t *tableImport) numberType(ctx context.Context, i int) (err error) {
	n := &t.d.Nodes[i]
	bytes := int64(0)
	if t.nodes[i] != nil {
		bytes = t.nodes[i].Size
	}
	for _, s := range t.edges {
		if s != nil {
			bytes += s.Size
		}
	}
	if t.base != nil {
		if st, err := os.Stat(t.base.Path(t.namesFile(i))); err == nil {
			bytes += st.Size()
		}
	}
	j, err := names.New(names.Options{Memory: t.o.Memory, Table: t.base != nil || t.nodes[i] != nil,
		Open: t.openType(i), Type: n.NodeType, Bytes: bytes, Create: t.unlinked})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.Close()) }()
	if t.base != nil {
		if err := t.addBase(ctx, j, i); err != nil {
			return err
		}
	}
	if t.nodes[i] != nil {
		if err := t.addTable(ctx, j, n, t.nodes[i], t.baseNodes(i)); err != nil {
			return err
		}
	}
	if t.base != nil || t.nodes[i] != nil {
		j.EndTable()
	}
	for k := range t.d.Edges {
		if err := t.addEnds(ctx, j, k, n.NodeType); err != nil {
			return err
		}
	}
	if err := j.Number(ctx); err != nil {
		if twice := (*names.Twice)(nil); errors.As(err, &twice) {
			return t.twice(ctx, i, twice)
		}
		return err
	}
	if j.Nodes() == 0 {
		return errs.New(errs.Usage, "there are no nodes of type %s", brief(n.NodeType))
	}
	t.Nodes = append(t.Nodes, j.Nodes())
	if t.named(i) {
		out, err := t.s.Create(t.namesFile(i))
		if err != nil {
			return err
		}
		if err := j.Write(ctx, out); err != nil {
			return errors.Join(err, out.Discard())
		}
		if err := out.Finish(); err != nil {
			return err
		}
	}
	return t.writeEnds(ctx, j, n.NodeType)
}

// unlinked makes a scratch file without a name: its room is free when it is closed.
func (t *tableImport) unlinked(name string) (*os.File, error) {
	f, err := t.s.Scratch(name)
	if err == nil {
		err = os.Remove(f.Name())
	}
	return f, err
}

// addTable adds the names of a table of nodes, or the numbers of its rows, from first on.
func (t *tableImport) addTable(ctx context.Context, j *names.Join, n *NodeTable,
	src *tables.Source, first int64) error {
	col := n.NodeIDCol
	if col == "" {
		col = src.Fields[0].Name
		for _, f := range src.Fields { // that can be read
			if _, err := src.Select(f.Name); err == nil {
				col = f.Name
				break
			}
		}
	} else if err := names.CheckKind(src.Files[0], src.Fields[src.Find(col)]); err != nil {
		return n.bad("%w", err)
	}
	src, err := src.Select(col)
	if err != nil {
		return n.bad("%w", err)
	}
	rows := int64(0)
	number := func(b *tables.Batch) error {
		c := tables.Column{Kind: tables.Int}
		for range b.Rows {
			c.Ints = append(c.Ints, first+rows)
			rows++
		}
		d, err := j.Deal(b, &c)
		if err != nil {
			return err
		}
		return j.Add(d)
	}
	if n.NodeIDCol == "" {
		err = tables.Each(ctx, src,
			func(b *tables.Batch) (*tables.Batch, error) { return b, nil }, number)
	} else {
		err = tables.Each(ctx, src, func(b *tables.Batch) (*names.Dealt, error) {
			return j.Deal(b, &b.Columns[0])
		}, func(d *names.Dealt) error { rows += int64(d.Len()); return j.Add(d) })
	}
	if err == nil && rows == 0 {
		err = errs.New(errs.Usage, "%s has no rows", src.Files[0])
	}
	return err
}

// ends are the columns of a relation that have names of a type.
func (e *EdgeTable) ends(nodeType string) (all []int) {
	for end := range 2 {
		if e.Relation[2*end] == nodeType {
			all = append(all, end)
		}
	}
	return all
}

// addEnds adds the names of a type that a relation's edges have.
func (t *tableImport) addEnds(ctx context.Context, j *names.Join, k int, nodeType string) error {
	e, src := &t.d.Edges[k], t.edges[k]
	if src == nil {
		return nil
	}
	var cols []string
	for _, end := range e.ends(nodeType) {
		col := []string{e.SourceIDCol, e.DestIDCol}[end]
		if err := names.CheckKind(src.Files[0], src.Fields[src.Find(col)]); err != nil {
			return e.bad("%w", err)
		}
		cols = append(cols, col)
	}
	if cols == nil {
		return nil
	}
	src, err := src.Select(cols...)
	if err != nil {
		return e.bad("%w", err)
	}
	t.Rows[k] = 0
	return tables.Each(ctx, src, func(b *tables.Batch) (*names.Dealt, error) {
		if len(b.Columns) == 1 {
			return j.Deal(b, &b.Columns[0])
		}
		return j.Deal(b, &b.Columns[0], &b.Columns[1])
	}, func(d *names.Dealt) error {
		t.Rows[k] += int64(d.Len() / len(cols))
		return j.Add(d)
	})
}

// writeEnds writes the ends of a type of all relations.
func (t *tableImport) writeEnds(ctx context.Context, j *names.Join, nodeType string) (err error) {
	type out struct {
		*bufio.Writer
		f     *os.File
		width int
		left  int64
	}
	var outs [][]*out // of each relation with ends of this type
	defer func() {
		for _, o := range slices.Concat(outs...) {
			err = errors.Join(err, o.Flush(), o.f.Close())
		}
	}()
	for k := range t.d.Edges {
		var of []*out
		for _, end := range t.d.Edges[k].ends(nodeType) {
			f, err := t.s.Scratch(endFile(k, end))
			if err != nil {
				return err
			}
			o := &out{bufio.NewWriterSize(f, 1<<18), f, 4, t.Rows[k]}
			if j.Nodes() >= math.MaxUint32 {
				o.width = 8
			}
			of = append(of, o)
		}
		if of != nil {
			outs = append(outs, of)
		}
	}
	rel, end := 0, 0
	return j.Numbers(ctx, func(numbers []uint64) error {
		for _, v := range numbers {
			for outs[rel][end].left == 0 {
				rel++
			}
			o := outs[rel][end]
			b := o.AvailableBuffer()
			if o.width == 4 {
				b = binary.LittleEndian.AppendUint32(b, uint32(v)) // None is None in either width
			} else {
				b = binary.LittleEndian.AppendUint64(b, v)
			}
			if _, err := o.Write(b); err != nil {
				return fmt.Errorf("writing the ends of edges: %w", err)
			}
			o.left--
			end = (end + 1) % len(outs[rel])
		}
		return nil
	})
}

// rowAt calls fn with a row of a table.
func rowAt(ctx context.Context, src *tables.Source, column string, row int64,
	fn func(b *tables.Batch, i int) error) error {
	src, err := src.Select(column)
	if err != nil {
		return err
	}
	n := int64(0)
	return tables.Each(ctx, src, func(b *tables.Batch) (*tables.Batch, error) { return b, nil },
		func(b *tables.Batch) error {
			n += int64(b.Rows)
			if row < n {
				return fn(b, int(row-n)+b.Rows)
			}
			return nil
		})
}

// twice is the error of two rows of a table with one id.
func (t *tableImport) twice(ctx context.Context, i int, twice *names.Twice) error {
	src, col := t.nodes[i], t.d.Nodes[i].NodeIDCol
	first := ""
	found := errors.New("found")
	before := t.baseNodes(i)
	if int64(twice.First) < before {
		return rowAt(ctx, src, col, int64(twice.Second)-before, func(b *tables.Batch, i int) error {
			return b.Bad(i, col, "%s is node %d of %s already; a node has one row, and rows stay as they are",
				cellText(&b.Columns[0], i), twice.First, t.opt.Out)
		})
	}
	if err := rowAt(ctx, src, col, int64(twice.First)-before, func(b *tables.Batch, i int) error {
		first = b.Where(i)
		return found
	}); !errors.Is(err, found) {
		return err
	}
	return rowAt(ctx, src, col, int64(twice.Second)-before, func(b *tables.Batch, i int) error {
		return b.Bad(i, col, "%s is the id of %s, too; a node has one row", cellText(&b.Columns[0], i),
			first)
	})
}

func cellText(c *tables.Column, i int) string {
	if c.Kind == tables.Text {
		return tables.Brief(c.Text(i))
	}
	return string(tables.AppendInt(nil, c, i))
}

// countDangling counts edges that name a node that is not there, and refuses them unless they are
// to be dropped.
func (t *tableImport) countDangling(ctx context.Context, k int) error {
	e := &t.d.Edges[k]
	if t.edges[k] == nil {
		return nil
	}
	first := [2]int64{-1, -1}
	row := int64(0)
	s := t.endsOf(k)
	for part := range s.Parts {
		if err := t.readEnds(k, part, func(src, dst uint64) {
			for end, v := range [2]uint64{src, dst} {
				if v == names.None && first[end] < 0 {
					first[end] = row
				}
			}
			if src == names.None || dst == names.None {
				t.Dangling[k]++
			}
			row++
		}); err != nil {
			return err
		}
	}
	switch {
	case row == 0:
		t.o.note("%s has no rows: no edge comes from it", t.edges[k].Files[0])
		return nil
	case t.Dangling[k] == 0:
		return nil
	case t.opt.Dangling == "drop":
		return nil
	}
	end := 0
	if first[0] < 0 || first[1] >= 0 && first[1] < first[0] {
		end = 1
	}
	col := []string{e.SourceIDCol, e.DestIDCol}[end]
	return rowAt(ctx, t.edges[k], col, first[end], func(b *tables.Batch, i int) error {
		return b.Bad(i, col, "there is no node %s of type %s (edges without a node: %d); {dangling} drop leaves them out",
			cellText(&b.Columns[0], i), e.Relation[2*end], t.Dangling[k])
	})
}

// danglingDropped is the count of edges that countDangling finds and are left out.
const danglingDropped = "dangling-edges-dropped"

// edgesPerPart is the number of edges of a part of endsOf.
const edgesPerPart = 1 << 20

// edgesOf are the edges of an entry of the description, after those that are there.
func (t *tableImport) edgesOf(i int) ([]edges.Source, error) {
	all, err := t.baseEdges(i)
	if err != nil || t.edges[i] == nil {
		return all, err
	}
	if n := t.Dangling[i]; n > 0 {
		t.o.note("%s: %d edges that name nodes that are not there are left out", t.edges[i].Files[0], n)
		t.m.Source.Counts[danglingDropped] += n
	}
	s := t.endsOf(i)
	if t.both {
		s = withOpposites(s, func(src, dst int64) (bool, error) { return src != dst, nil })
	}
	return append(all, s), nil
}

// endsOf are the edges of the scratch files of a relation.
func (t *tableImport) endsOf(i int) edges.Source {
	rows := t.Rows[i]
	return edges.Source{Name: t.edges[i].Files[0], Unit: "edges", Total: rows,
		Parts: int((rows + edgesPerPart - 1) / edgesPerPart),
		Read: func(ctx context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			n := min(edgesPerPart, rows-int64(part)*edgesPerPart)
			src, dst := make([]int64, 0, n), make([]int64, 0, n)
			if err := t.readEnds(i, part, func(a, b uint64) {
				if a != names.None && b != names.None {
					src, dst = append(src, int64(a)), append(dst, int64(b))
				}
			}); err != nil {
				return err
			}
			done(n)
			if len(src) == 0 {
				return ctx.Err()
			}
			return emit(src, dst)
		}}
}

// readEnds reads a part of the scratch files of a relation.
func (t *tableImport) readEnds(k, part int, fn func(src, dst uint64)) error {
	n := min(edgesPerPart, t.Rows[k]-int64(part)*edgesPerPart)
	var raw [2][]byte
	var width [2]int
	for end := range raw {
		width[end] = 4
		if t.Nodes[t.typeIndex(t.d.Edges[k].Relation[2*end])] >= math.MaxUint32 {
			width[end] = 8
		}
		f, err := os.Open(t.s.Path(t.s.ScratchName(endFile(k, end))))
		if err != nil {
			return err
		}
		raw[end] = make([]byte, n*int64(width[end]))
		_, err = io.ReadFull(io.NewSectionReader(f, int64(part)*edgesPerPart*int64(width[end]),
			n*int64(width[end])), raw[end])
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("reading the ends of edges: %w", err)
		}
	}
	of := func(end int, i int64) uint64 {
		if width[end] == 8 {
			return binary.LittleEndian.Uint64(raw[end][8*i:])
		}
		v := binary.LittleEndian.Uint32(raw[end][4*i:])
		if v == math.MaxUint32 {
			return names.None
		}
		return uint64(v)
	}
	for i := range n {
		fn(of(0, i), of(1, i))
	}
	return nil
}

func (t *tableImport) typeIndex(name string) int {
	return slices.IndexFunc(t.d.Nodes, func(n NodeTable) bool { return n.NodeType == name })
}
