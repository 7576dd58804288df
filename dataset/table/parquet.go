package table

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"

	"golang.org/x/sync/errgroup"

	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/infile"
	"helios/internal/units"
	"helios/internal/work"
)

// Parquet (parquet-format's README and parquet.thrift). The library that writes it elsewhere takes
// memory as the numbers in a file ask, which no recover catches; here each size is held against the
// file and the budget before it is used.

// The physical types.
const (
	pqBool = iota
	pqInt32
	pqInt64
	pqInt96
	pqFloat
	pqDouble
	pqBytes
	pqFixed
)

// The meanings of a leaf's values beyond their type.
const (
	asIs = iota
	unsigned
	days
	millis
	micros
	nanos
	decimal
	half
	uuid
)

// leaf is a column of a Parquet file.
type leaf struct {
	Field
	kind, width, means int
	scale              int
	maxDef, maxRep     uint8
	listDef            uint8 // from this level on, a list has an element
}

// element is a node of the schema.
type element struct {
	kind, width, rep, children, converted, scale int
	name                                         string
	logical, unit, bits                          int
	signed                                       bool
}

// chunk is the pages of a column in a group of rows.
type chunk struct {
	kind, codec        int
	values             int64
	at, dictAt, length int64
	elsewhere          bool
}

type rowGroup struct {
	rows   int64
	chunks []chunk
}

// parquetFile is a Parquet file.
type parquetFile struct {
	path   string
	size   int64
	limit  int64 // bytes that a page may take
	leaves []leaf
	column []int // of each field, its leaf; -1: it is no column
	named  []Field
	groups []rowGroup
	total  int64
}

const (
	parquetMagic = "PAR1"
	maxFooter    = 256 << 20
	maxColumns   = 1 << 17
)

func openParquet(path string, o Options) (file, error) {
	in, err := infile.Open(path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return nil, err
	}
	f := &parquetFile{path: path, size: st.Size(), limit: o.Memory}
	if err := f.footer(in); err != nil {
		return nil, damaged(path, err)
	}
	return f, nil
}

// Groups are the groups of rows of a Parquet file, which are read one by one.
type Groups struct {
	f  *parquetFile
	in io.ReaderAt
	// Starts are the numbers of the groups' first rows, and that of all rows.
	Starts []int64
}

// OpenGroups opens a Parquet file that is read by groups. Errors name it by its path.
func OpenGroups(path string, in io.ReaderAt, size int64) (g *Groups, err error) {
	err = safely(path, func() error {
		g = &Groups{f: &parquetFile{path: path, size: size, limit: defaultMemory}, in: in}
		if err := g.f.footer(in); err != nil {
			return damaged(path, err)
		}
		rows := int64(0)
		for i := range g.f.groups {
			g.Starts = append(g.Starts, rows)
			rows += g.f.groups[i].rows
		}
		g.Starts = append(g.Starts, rows)
		return nil
	})
	return g, err
}

// Read reads a column of a group.
func (g *Groups) Read(group int, column string) (c *Column, err error) {
	f := g.f
	err = safely(f.path, func() error {
		k := slices.IndexFunc(f.named, func(f Field) bool { return f.Name == column })
		if k < 0 {
			return damaged(f.path, fmt.Errorf("it has no column %s", column))
		}
		i := f.column[k]
		stored := &f.groups[group].chunks[i]
		c = &Column{Name: column, Kind: f.named[k].Kind}
		p := newPages(io.NewSectionReader(g.in, stored.at, stored.length), stored, &f.leaves[i],
			f.limit, &share{limit: math.MaxInt64, buffer: headerRoom})
		if err := p.fill(c, int(f.groups[group].rows)); err != nil {
			return damaged(f.path, fmt.Errorf("column %s: %w", column, err))
		}
		return nil
	})
	return c, err
}

var errNoFooter = errors.New("it does not end as a Parquet file does")

// footer reads the description at the end of the file.
func (f *parquetFile) footer(in io.ReaderAt) error {
	var tail [8]byte
	if f.size < 12 {
		return errNoFooter
	}
	if _, err := in.ReadAt(tail[:], f.size-8); err != nil {
		return err
	}
	if string(tail[4:]) == "PARE" {
		return errors.New("it is encrypted")
	}
	n := int64(binary.LittleEndian.Uint32(tail[:]))
	switch {
	case string(tail[4:]) != parquetMagic:
		return errNoFooter
	case n > f.size-12:
		return fmt.Errorf("its description has %d bytes, and the file %d", n, f.size)
	case n > maxFooter || n > f.limit:
		return fmt.Errorf("its description has %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := in.ReadAt(b, f.size-8-n); err != nil {
		return err
	}
	t := &thrift{b: b}
	var schema []element
	t.each(func(id int, kind byte) bool {
		switch {
		case id == 2 && kind == thriftList:
			return t.structs(func() {
				if len(schema) > maxColumns {
					t.fail(fmt.Errorf("it has more than %d columns", maxColumns))
				}
				schema = append(schema, t.element())
			})
		case id == 3 && kind == 6:
			f.total = t.int()
		case id == 4 && kind == thriftList:
			return t.structs(func() { f.groups = append(f.groups, t.rowGroup()) })
		default:
			return false
		}
		return true
	})
	if t.err != nil {
		return t.err
	}
	if err := f.tree(schema); err != nil {
		return err
	}
	return f.check()
}

func (t *thrift) element() (e element) {
	e.kind = -1
	t.each(func(id int, kind byte) bool {
		switch {
		case id == 4 && kind == thriftBinary:
			e.name = string(t.bytes())
		case id == 10 && kind == thriftStruct:
			t.logical(&e)
		case kind < 4 || kind > 6:
			return false
		default:
			v := int(t.int())
			switch id {
			case 1:
				e.kind = v
			case 2:
				e.width = v
			case 3:
				e.rep = v
			case 5:
				e.children = v
			case 6:
				e.converted = v + 1
			case 7:
				e.scale = v
			}
		}
		return true
	})
	return e
}

// logical reads the logical type of a node, a union of structs.
func (t *thrift) logical(e *element) {
	t.each(func(id int, kind byte) bool {
		if kind != thriftStruct {
			return false
		}
		e.logical = id
		t.each(func(part int, kind byte) bool {
			switch {
			case id == 10 && part == 1 && kind == 3:
				e.bits = int(t.byte())
			case id == 10 && part == 2:
				e.signed = kind == thriftTrue
				return kind == thriftTrue || kind == thriftFalse
			case id == 5 && part == 1 && kind == 5:
				e.scale = int(t.int())
			case part == 2 && kind == thriftStruct:
				t.each(func(unit int, kind byte) bool { e.unit = unit; return false })
			default:
				return false
			}
			return true
		})
		return true
	})
}

func (t *thrift) rowGroup() (g rowGroup) {
	t.each(func(id int, kind byte) bool {
		switch {
		case id == 1 && kind == thriftList:
			return t.structs(func() { g.chunks = append(g.chunks, t.chunk()) })
		case id == 3 && kind == 6:
			g.rows = t.int()
			return true
		}
		return false
	})
	return g
}

func (t *thrift) chunk() (c chunk) {
	c.kind = -1
	t.each(func(id int, kind byte) bool {
		switch {
		case id == 1 && kind == thriftBinary, id == 8 && kind == thriftStruct:
			c.elsewhere = true
			return false
		case id != 3 || kind != thriftStruct:
			return false
		}
		t.each(func(id int, kind byte) bool {
			if kind < 4 || kind > 6 {
				return false
			}
			v := t.int()
			switch id {
			case 1:
				c.kind = int(v)
			case 4:
				c.codec = int(v)
			case 5:
				c.values = v
			case 7:
				c.length = v
			case 9:
				c.at = v
			case 11:
				c.dictAt = v
			}
			return true
		})
		return true
	})
	return c
}

// tree makes columns of the schema.
func (f *parquetFile) tree(all []element) error {
	if len(all) == 0 {
		return errors.New("it has no schema")
	}
	pos := 1
	for range all[0].children {
		if pos >= len(all) {
			return errThriftEnd
		}
		e := &all[pos]
		field, first, node := Field{Name: e.name}, len(f.leaves), pos
		var err error
		if pos, err = f.walk(all, pos, 0, 0, 0); err != nil {
			return err
		}
		l := &f.leaves[first]
		list := e.children == 0 && e.rep == 2 || isList(all, node)
		if len(f.leaves) == first+1 && (e.children == 0 || list) {
			field.Kind, field.List, field.why = l.Kind, l.maxRep > 0, l.why
		} else {
			field.why = "holds columns of its own"
		}
		f.column = append(f.column, first)
		f.named = append(f.named, field)
	}
	if len(f.named) == 0 {
		return errors.New("it has no columns")
	}
	return nil
}

// isList reports whether a node is a list of leaves: a group of a repeated group of a leaf, or of a
// repeated leaf (LogicalTypes.md, "Lists").
func isList(all []element, pos int) bool {
	if e := all[pos]; e.logical != 3 && e.converted != 3+1 || e.children != 1 || e.rep == 2 ||
		pos+1 >= len(all) {
		return false
	}
	inner := all[pos+1]
	return inner.rep == 2 && (inner.children == 0 ||
		inner.children == 1 && pos+2 < len(all) && all[pos+2].children == 0 && all[pos+2].rep != 2)
}

// walk adds the leaves under a node, and returns the place behind it.
func (f *parquetFile) walk(all []element, pos int, def, rep uint8, depth int) (int, error) {
	if pos >= len(all) || depth > 16 {
		return 0, errThriftEnd
	}
	e := &all[pos]
	switch e.rep {
	case 1:
		def++
	case 2:
		def++
		rep++
	}
	if e.children <= 0 {
		l := leaf{kind: e.kind, width: e.width, maxDef: def, maxRep: rep}
		l.mean(e)
		if l.listDef = def; rep > 0 && e.rep == 1 {
			l.listDef = def - 1
		}
		f.leaves = append(f.leaves, l)
		return pos + 1, nil
	}
	pos++
	for range e.children {
		var err error
		if pos, err = f.walk(all, pos, def, rep, depth+1); err != nil {
			return 0, err
		}
	}
	return pos, nil
}

// mean finds what the values of a leaf stand for (LogicalTypes.md).
func (l *leaf) mean(e *element) {
	c := e.converted - 1
	switch l.kind {
	case pqBool:
		l.Kind = Bool
	case pqInt32, pqInt64:
		l.meanInt(e, c)
	case pqInt96:
		l.Kind = Time
	case pqFloat, pqDouble:
		l.Kind = Float
	case pqFixed:
		switch {
		case e.logical == 15 && l.width == 2:
			l.Kind, l.means = Float, half
		case e.logical == 14 && l.width == 16:
			l.means = uuid
		case e.logical == 5 || c == 5:
			l.Kind, l.means, l.scale = Float, decimal, e.scale
		}
	case pqBytes:
		if e.logical == 5 || c == 5 {
			l.why = "holds decimals of any length"
		}
	default:
		l.why = fmt.Sprintf("is of the unknown type %d", l.kind)
	}
}

// meanInt is mean of integers.
func (l *leaf) meanInt(e *element, c int) {
	l.Kind = Int
	switch {
	case e.logical == 6 || c == 6:
		l.Kind, l.means = Time, days
	case e.logical == 8 && e.unit == 1 || c == 9:
		l.Kind, l.means = Time, millis
	case e.logical == 8 && e.unit == 2 || c == 10:
		l.Kind, l.means = Time, micros
	case e.logical == 8:
		l.Kind, l.means = Time, nanos
	case e.logical == 10 && !e.signed || c >= 11 && c <= 14:
		l.Kind, l.means = Uint, unsigned
	case e.logical == 5 || c == 5:
		l.Kind, l.means, l.scale = Float, decimal, e.scale
	}
}

// check holds the numbers of the description against each other and the file.
func (f *parquetFile) check() error {
	rows := int64(0)
	for i, g := range f.groups {
		if len(g.chunks) != len(f.leaves) {
			return fmt.Errorf("group %d of rows has %d columns, the schema %d", i, len(g.chunks),
				len(f.leaves))
		}
		if rows += g.rows; g.rows < 0 || rows < 0 {
			return fmt.Errorf("group %d has %d rows", i, g.rows)
		}
		for k := range g.chunks {
			if err := f.checkChunk(&g.chunks[k], &f.leaves[k], g.rows); err != nil {
				return fmt.Errorf("group %d of rows, column %d: %w", i, k+1, err)
			}
		}
	}
	if rows != f.total {
		return fmt.Errorf("its groups have %d rows together, its description says %d", rows, f.total)
	}
	return nil
}

func (f *parquetFile) checkChunk(c *chunk, l *leaf, rows int64) error {
	start := c.at
	if c.dictAt > 0 && c.dictAt < start {
		start = c.dictAt
	}
	c.at = start
	switch {
	case c.elsewhere:
		return errors.New("it is encrypted or in another file")
	case c.kind != l.kind:
		return fmt.Errorf("its values are of type %d, the schema says %d", c.kind, l.kind)
	case l.kind == pqFixed && (l.width < 1 || l.width > 1<<20):
		return fmt.Errorf("its values have %d bytes", l.width)
	case start < 4 && rows > 0, c.length < 0, start > f.size, c.length > f.size-start:
		return fmt.Errorf("it is at bytes %d to %d, the file has %d", start, start+c.length, f.size)
	case c.values < 0, l.maxRep == 0 && c.values != rows:
		return fmt.Errorf("it has %d values, its group %d rows", c.values, rows)
	}
	return nil
}

func (f *parquetFile) fields() []Field { return f.named }
func (f *parquetFile) rows() int64     { return f.total }

// parquetReader reads the groups of a Parquet file one after the other.
type parquetReader struct {
	f       *parquetFile
	in      *os.File
	take    []int
	group   int
	left    int64 // rows of the group
	row     int64
	columns []*pages
	all     share // of columns
	raws    work.Spare[[]byte]
	spare   work.Spare[[]Column] // of batches that nobody needs any more
}

func (f *parquetFile) read(take []int) (reader, error) {
	in, err := infile.Open(f.path)
	if err != nil {
		return nil, err
	}
	return &parquetReader{f: f, in: in, take: take, all: share{limit: f.limit / 8 * shareOfMemory,
		buffer: max(f.limit/64/int64(max(len(take), 1)), leastBuffer)},
		raws:  work.NewSpare[[]byte](hostcpu.Count()),
		spare: work.NewSpare[[]Column](freeBlocks)}, nil
}

func (r *parquetReader) close() error { return r.in.Close() }

func (r *parquetReader) done() int64 {
	if r.f.total == 0 {
		return r.f.size
	}
	return int64(float64(r.f.size) * float64(r.row) / float64(r.f.total))
}

// shareOfMemory are the eighths of Options.Memory that the columns of a file may hold: the rest is
// for the program, for batches and for what the caller makes of them.
const shareOfMemory = 3

// leastBuffer is the least buffer of a column; many columns have small ones.
const leastBuffer = 4 << 10

// tooWide names the memory that the columns take, by those of which a page was met.
func (r *parquetReader) tooWide() error {
	need, met := int64(0), int64(0)
	for _, p := range r.columns {
		if p.in != nil {
			need, met = need+p.held, met+1
		}
	}
	need = need / max(met, 1) * int64(len(r.columns))
	give := (need*5/4*8/shareOfMemory>>26 + 1) << 6 // MiB, a multiple of 64
	return errs.New(errs.Usage,
		"%s: a page and a dictionary of each of %d columns take about %s of memory together, and %s are for them; {memory} %dMiB gives enough, or take fewer columns, or write the file with smaller groups of rows or without dictionaries (pyarrow: row_group_size=10000, use_dictionary=False)",
		r.f.path, len(r.columns), units.FormatBytes(need), units.FormatBytes(r.all.limit), give)
}

// rowsAtOnce is the number of rows of a batch of so many columns.
func rowsAtOnce(columns int, memory int64) int {
	return int(min(max(memory/32/int64(16*max(columns, 1)), 1<<10), batchRows))
}

// next decodes the next rows: columns side by side, as pages of one depend on those before.
func (r *parquetReader) next() (func() (*Batch, error), error) {
	for r.left == 0 {
		if r.group == len(r.f.groups) {
			return nil, nil
		}
		g := &r.f.groups[r.group]
		r.group, r.left, r.columns = r.group+1, g.rows, nil
		r.all.held.Store(0)
		for _, k := range r.take {
			i := r.f.column[k]
			c := &g.chunks[i]
			p := newPages(io.NewSectionReader(r.in, c.at, c.length), c, &r.f.leaves[i], r.f.limit,
				&r.all)
			p.raws = r.raws
			r.columns = append(r.columns, p)
		}
	}
	n := int(min(r.left, int64(rowsAtOnce(len(r.take), r.f.limit))))
	b := &Batch{File: r.f.path, First: r.row, Rows: n, Columns: r.spare.Take()}
	if b.Columns == nil {
		b.Columns = make([]Column, len(r.take))
	}
	b.free = func() { r.spare.Give(b.Columns) }
	g, _ := errgroup.WithContext(context.Background())
	g.SetLimit(hostcpu.Count())
	for i, k := range r.take {
		g.Go(func() error {
			return safely(r.f.path, func() error {
				c := &b.Columns[i]
				c.Name = r.f.named[k].Name
				if err := r.columns[i].fill(c, n); err != nil {
					return damaged(r.f.path, fmt.Errorf("column %s, rows %d to %d: %w", Brief(c.Name),
						b.First+1, b.First+int64(n), err))
				}
				return nil
			})
		})
	}
	if err := g.Wait(); errors.Is(err, errShare) {
		return nil, r.tooWide()
	} else if err != nil {
		return nil, err
	}
	r.left -= int64(n)
	r.row += int64(n)
	if r.left == 0 {
		for _, p := range r.columns {
			p.free()
		}
	}
	return func() (*Batch, error) { return b, nil }, nil
}
