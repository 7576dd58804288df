package gnn

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/units"
)

// Types without rows learn them: a table of a type has a row for each of its nodes, which is a
// parameter like others. A step gathers the rows of its frontier from the tables and from the rows
// that were read into one matrix, the input of layer 0, whose gradient goes back to the tables. A
// frontier has no node twice, so no two of its rows meet in a table. Adam is dense: nodes that are
// not in a mini-batch have a gradient of 0.

// table is that of a type.
type table struct {
	kind  int
	dim   int64
	place int64 // of its parameter
}

// tableParams is the parameter block of table_get and table_put: between rows of a matrix and those
// of a table, Cols floats each.
//
//	table_get  Rows[i] = Table[k(i)]     k(i) = Numbers[i] - First, or i without Numbers
//	table_put  Table[k(i)] = Rows[i]     no k comes twice
type tableParams struct {
	Table                  cuda.DevicePtr // float32, rows TableStride apart
	Rows                   cuda.DevicePtr // float32[N], rows RowStride apart
	Numbers                cuda.DevicePtr // int64[N]; 0: none
	N, Cols                int64
	TableStride, RowStride int64
	First                  int64
}

const (
	_ = uint(unsafe.Sizeof(tableParams{}) - 64)
	_ = uint(64 - unsafe.Sizeof(tableParams{}))
)

func init() {
	cuda.RegisterHost("table_get", func(b *cuda.Block, p *tableParams) error {
		p.each(b, func(table, row []float32) { copy(row, table) })
		return nil
	})
	cuda.RegisterHost("table_put", func(b *cuda.Block, p *tableParams) error {
		p.each(b, func(table, row []float32) { copy(table, row) })
		return nil
	})
}

// each calls move with the rows of a block's share.
func (p *tableParams) each(b *cuda.Block, move func(table, row []float32)) {
	lo, hi := b.Range(p.N)
	if hi == lo {
		return
	}
	rows := view(p.Rows, (p.N-1)*p.RowStride+p.Cols)
	for i := lo; i < hi; i++ {
		k := i
		if p.Numbers != 0 {
			k = cuda.View[int64](p.Numbers, p.N)[i] - p.First
		}
		move(view(p.Table+cuda.DevicePtr(4*k*p.TableStride), p.Cols),
			rows[i*p.RowStride:i*p.RowStride+p.Cols])
	}
}

// moveRows enqueues table_get or table_put.
func (s *step) moveRows(kernel string, p tableParams) error {
	if p.N == 0 {
		return nil
	}
	return launch(s, kernel, s.quadBlocks(p.N, p.Cols), p)
}

// copyRows enqueues a copy of rows between matrices of the same width.
func (s *step) copyRows(to, from cuda.DevicePtr, rows, cols int64) error {
	return s.moveRows("table_get", tableParams{Table: from, Rows: to, N: rows, Cols: cols,
		TableStride: cols, RowStride: cols})
}

// number is the address of a row's number in the graph.
func (s *step) number(row int64) cuda.DevicePtr {
	return pointer(s.mb.Nodes) + cuda.DevicePtr(8*row)
}

// resolveTables gives the types without rows the width of their tables, in a schema of the
// network's own, and widens InDim to the widest.
func (n *network) resolveTables() error {
	c := &n.cfg
	n.stride = int64(c.InDim)
	if c.Featureless {
		return n.resolveFeatureless()
	}
	if c.Schema == nil {
		if c.Embed != "" {
			return errs.New(errs.Usage,
				"{embed} is for types without rows, and this graph has no types")
		}
		return nil
	}
	dims, err := c.tableDims()
	if err != nil {
		return err
	}
	own := *c.Schema
	own.Types = slices.Clone(own.Types)
	c.Schema = &own
	floats := int64(0)
	for t := range own.Types {
		if own.Types[t].Dim == 0 {
			own.Types[t].Dim = dims[t]
			n.tables = append(n.tables, table{kind: t, dim: int64(dims[t])})
			floats += own.Types[t].Nodes * int64(dims[t])
		}
		c.InDim = max(c.InDim, own.Types[t].Dim)
	}
	return c.tablesFit(floats)
}

// CheckTables refuses a schema with types without rows that have no table, tables of others, and
// those above EmbedMemory.
func (c *ModelConfig) CheckTables() error { return (&network{cfg: *c}).resolveTables() }

// tablesFit refuses tables above EmbedMemory.
func (c *ModelConfig) tablesFit(floats int64) error {
	const each = 16 // value, gradient, Adam's two moments
	if limit := c.EmbedMemory; limit > 0 && floats > limit/each {
		return errs.New(errs.Capability,
			"learned tables take %s with gradients and Adam's moments, {embed-memory} allows %s; raise it, or give nodes narrower rows",
			units.FormatBytes(floats*each), units.FormatBytes(limit))
	}
	return nil
}

// tableDims are the widths of tables by type, 0 for types with rows: of Embed, "64" for all or
// "TYPE=64;…".
func (c *ModelConfig) tableDims() ([]int, error) {
	dims := make([]int, len(c.Schema.Types))
	var without []string
	for _, t := range c.Schema.Types {
		if t.Dim == 0 {
			without = append(without, t.Name)
		}
	}
	if c.Embed == "" {
		if len(without) > 0 {
			return nil, errs.New(errs.Capability,
				"nodes of type %s have no feature rows; learn a table with {embed} 64, or give them features",
				strings.Join(without, ", "))
		}
		return dims, nil
	}
	for part := range strings.SplitSeq(c.Embed, ";") {
		eq := strings.LastIndexByte(part, '=') // a name may have one
		name := strings.TrimSpace(part[:max(eq, 0)])
		n, err := strconv.Atoi(strings.TrimSpace(part[eq+1:]))
		if err != nil || n < 1 || n > 1<<16 || eq < 0 && part != c.Embed {
			return nil, errs.New(errs.Usage,
				"{embed} %q: give a width of 1 to 65536 for all types without rows, or TYPE=WIDTH with a semicolon between types",
				part)
		}
		kind := slices.IndexFunc(c.Schema.Types,
			func(t graph.NodeType) bool { return t.Name == name })
		switch {
		case eq < 0 && len(without) == 0, eq >= 0 && kind >= 0 && c.Schema.Types[kind].Dim > 0:
			return nil, errs.New(errs.Usage, "{embed} %q: the nodes have rows; leave it out", part)
		case eq < 0:
			for t := range dims {
				if c.Schema.Types[t].Dim == 0 {
					dims[t] = n
				}
			}
			return dims, nil
		case kind < 0 || dims[kind] > 0:
			return nil, errs.New(errs.Usage,
				"{embed} %q: there is no such type, or it is there twice; types without rows are %s",
				part, strings.Join(without, ", "))
		}
		dims[kind] = n
	}
	for t := range dims {
		if c.Schema.Types[t].Dim == 0 && dims[t] == 0 {
			return nil, errs.New(errs.Usage, "{embed} %q: type %s has no rows and needs a width, too",
				c.Embed, c.Schema.Types[t].Name)
		}
	}
	return dims, nil
}

// declareTables adds the tables.
func (n *network) declareTables(t *tensors) {
	for i := range n.tables {
		x := &n.tables[i]
		kind := &n.cfg.Schema.Types[x.kind]
		x.place = t.add(fmt.Sprintf("embed.%s.weight", kind.Name), kind.Nodes, x.dim,
			glorot(kind.Nodes, x.dim))
	}
}

// learnsInput reports whether there are parameters before layer 0, so that it has a gradient by its
// input, too.
func (n *network) learnsInput() bool { return len(n.tables) > 0 }

// hidden reports whether layer l has a gradient by its input.
func (n *network) hidden(l int) bool { return l > 0 || n.learnsInput() }

// layoutInput places the input of layer 0 where it is not x.
func (n *network) layoutInput(sources int64, p *plan) {
	if n.learnsInput() {
		p.input = p.take(sources * n.dims[0])
	}
}

// input enqueues the input of layer 0, of the rows x that were read, and returns where it is.
func (s *step) input(x cuda.DevicePtr) (cuda.DevicePtr, error) {
	if !s.learnsInput() {
		return x, nil
	}
	in, before := s.plan.ptr(s.plan.input), int64(0)
	for h := range s.mb.HopEnd {
		first, n := int64(0), s.mb.RowCount(h)-before
		if h > 0 {
			first = s.mb.HopEnd[h-1]
		}
		if err := s.moveRows("table_get", tableParams{Table: row(x, before, s.stride),
			Rows: row(in, first, s.dims[0]), N: n, Cols: s.stride, TableStride: s.stride,
			RowStride: s.dims[0]}); err != nil {
			return 0, err
		}
		before += n
	}
	return in, s.eachTable(in, func(_ *table, p tableParams) error {
		return s.moveRows("table_get", p)
	})
}

// tableGrad enqueues the gradients by the tables, from dIn, that by the input of layer 0.
func (s *step) tableGrad(dIn cuda.DevicePtr) error {
	for _, t := range s.tables {
		if err := s.zero(s.grad(t.place), s.cfg.Schema.Types[t.kind].Nodes, t.dim); err != nil {
			return err
		}
	}
	return s.eachTable(dIn, func(t *table, p tableParams) error {
		p.Table = s.grad(t.place)
		return s.moveRows("table_put", p)
	})
}

// eachTable calls move for each run of a matrix's rows that belong to a table.
func (s *step) eachTable(in cuda.DevicePtr, move func(*table, tableParams) error) error {
	for i := range s.tables {
		t := &s.tables[i]
		for _, run := range s.runs(-1, t.kind) {
			if err := move(t, tableParams{Table: s.ptr(t.place), Rows: row(in, run.row, s.dims[0]),
				Numbers: s.number(run.row), N: run.n, Cols: t.dim, TableStride: t.dim,
				RowStride: s.dims[0], First: s.cfg.Schema.First(t.kind)}); err != nil {
				return err
			}
		}
	}
	return nil
}
