package table

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sync/atomic"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"helios/internal/infile"
)

// Arrow's files, also called Feather version 2, and streams.

// arrowFile is an Arrow file or stream.
type arrowFile struct {
	path   string
	stream bool
	limit  int64
	named  []Field
}

// budget is an allocator that refuses more than a limit at a time.
type budget struct {
	limit int64
	used  atomic.Int64
	over  atomic.Bool // it has refused
}

func (m *budget) take(n int) {
	if m.used.Add(int64(n)) > m.limit {
		m.over.Store(true)
		panic("it takes too much memory")
	}
}

// Allocate implements memory.Allocator.
func (m *budget) Allocate(n int) []byte {
	m.take(n)
	return memory.DefaultAllocator.Allocate(n)
}

// Reallocate implements memory.Allocator.
func (m *budget) Reallocate(n int, b []byte) []byte {
	m.take(n - len(b))
	return memory.DefaultAllocator.Reallocate(n, b)
}

// Free implements memory.Allocator.
func (m *budget) Free(b []byte) {
	m.used.Add(-int64(len(b)))
	memory.DefaultAllocator.Free(b)
}

func openArrow(path string, stream bool, o Options) (file, error) {
	f := &arrowFile{path: path, stream: stream, limit: o.Memory}
	r, err := f.open()
	if err != nil {
		return nil, err
	}
	for _, c := range r.schema.Fields() {
		field := Field{Name: c.Name}
		t := c.Type
		if of := listOf(t); of != nil {
			field.List, t = true, of
		}
		field.Kind, field.why = arrowKind(t)
		f.named = append(f.named, field)
	}
	if len(f.named) == 0 {
		err = damaged(path, errors.New("it has no columns"))
	}
	return f, errors.Join(err, r.close())
}

// listOf returns the type of a list's values, or nil.
func listOf(t arrow.DataType) arrow.DataType {
	switch t := t.(type) {
	case *arrow.ListType:
		return t.Elem()
	case *arrow.LargeListType:
		return t.Elem()
	case *arrow.FixedSizeListType:
		return t.Elem()
	}
	return nil
}

// arrowKind is the kind of the cells of a type, or why they are not read.
func arrowKind(t arrow.DataType) (k Kind, why string) {
	switch t := t.(type) {
	case *arrow.DictionaryType:
		return arrowKind(t.ValueType)
	case arrow.ExtensionType:
		if t.ExtensionName() != "arrow.uuid" {
			return arrowKind(t.StorageType())
		}
		return Text, ""
	}
	switch t.ID() {
	case arrow.NULL, arrow.STRING, arrow.LARGE_STRING, arrow.STRING_VIEW, arrow.BINARY,
		arrow.LARGE_BINARY, arrow.BINARY_VIEW, arrow.FIXED_SIZE_BINARY:
		return Text, ""
	case arrow.INT8, arrow.INT16, arrow.INT32, arrow.INT64:
		return Int, ""
	case arrow.UINT8, arrow.UINT16, arrow.UINT32, arrow.UINT64:
		return Uint, ""
	case arrow.FLOAT16, arrow.FLOAT32, arrow.FLOAT64, arrow.DECIMAL128:
		return Float, ""
	case arrow.BOOL:
		return Bool, ""
	case arrow.DATE32, arrow.DATE64, arrow.TIMESTAMP:
		return Time, ""
	}
	return Text, "is of type " + Brief(t.String())
}

func (f *arrowFile) fields() []Field { return f.named }
func (f *arrowFile) rows() int64     { return -1 }

// arrowReader reads batches of an Arrow file.
type arrowReader struct {
	f      *arrowFile
	in     *os.File
	mem    *budget
	schema *arrow.Schema
	record func() (arrow.RecordBatch, error) // the next; nil at the end
	end    func() error
	take   []int
	at     int64 // bytes that were read
	row    int64
	now    arrow.RecordBatch
	from   int64 // row of now
}

func (f *arrowFile) open() (r *arrowReader, err error) {
	in, err := infile.Open(f.path)
	if err != nil {
		return nil, err
	}
	r = &arrowReader{f: f, in: in, mem: &budget{limit: f.limit}}
	err = safely(f.path, func() error {
		if err := checkArrow(in, f.stream); err != nil {
			return damaged(f.path, err)
		}
		options := []ipc.Option{ipc.WithAllocator(r.mem), ipc.WithBodySizeLimit(f.limit),
			ipc.WithMetadataSizeLimit(min(f.limit, maxFooter)), ipc.WithDictionaryDeltas(true)}
		if f.stream {
			s, err := ipc.NewReader(&counted{in, r}, options...)
			if err != nil {
				return damaged(f.path, err)
			}
			r.schema, r.record = s.Schema(), func() (arrow.RecordBatch, error) {
				if s.Next() {
					return s.RecordBatch(), nil
				}
				return nil, s.Err()
			}
			r.end = func() error { s.Release(); return nil }
			return nil
		}
		s, err := ipc.NewFileReader(in, options...)
		if err != nil {
			return damaged(f.path, err)
		}
		i, size := 0, int64(0)
		if st, err := in.Stat(); err == nil {
			size = st.Size()
		}
		r.schema, r.end, r.record = s.Schema(), s.Close, func() (arrow.RecordBatch, error) {
			if i == s.NumRecords() {
				return nil, nil
			}
			i++
			r.at = size * int64(i) / int64(s.NumRecords())
			return s.RecordBatchAt(i - 1)
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return r, nil
}

// counted counts what is read.
type counted struct {
	io.Reader
	r *arrowReader
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.r.at += int64(n)
	return n, err
}

func (f *arrowFile) read(take []int) (reader, error) {
	r, err := f.open()
	if err == nil {
		r.take = take
	}
	return r, err
}

func (r *arrowReader) done() int64 { return r.at }

func (r *arrowReader) close() error {
	return errors.Join(safely(r.f.path, r.end), r.in.Close())
}

func (r *arrowReader) next() (func() (*Batch, error), error) {
	for r.now == nil || r.from == r.now.NumRows() {
		if r.now != nil && !r.f.stream { // the reader of a stream does it
			r.now.Release()
		}
		var err error
		if r.now, err = r.record(); err != nil {
			if r.mem.over.Load() {
				err = tooLarge("a batch of more than %d bytes", r.mem.limit)
			}
			return nil, damaged(r.f.path, fmt.Errorf("behind row %d: %w", r.row, err))
		}
		if r.from = 0; r.now == nil {
			return nil, nil
		}
	}
	n := min(r.now.NumRows()-r.from, int64(rowsAtOnce(len(r.take), r.f.limit)))
	part := r.now.NewSlice(r.from, r.from+n)
	b := &Batch{File: r.f.path, First: r.row, Rows: int(n), Columns: make([]Column, len(r.take))}
	r.from, r.row = r.from+n, r.row+n
	return func() (*Batch, error) {
		defer part.Release()
		for i, k := range r.take {
			f := &r.f.named[k]
			a := part.Column(k)
			if a.Len() != b.Rows {
				return nil, damaged(r.f.path, fmt.Errorf("column %s has %d rows of %d", Brief(f.Name),
					a.Len(), b.Rows))
			}
			c := &b.Columns[i]
			c.Name = f.Name
			if f.List {
				c.ready(List, b.Rows)
			} else {
				c.ready(f.Kind, b.Rows)
			}
			if err := c.arrow(a, f.Kind); err != nil {
				return nil, b.Bad(len(c.Offsets)-1, f.Name, "%w", err)
			}
		}
		return b, nil
	}, nil
}

// arrow adds the cells of an array.
func (c *Column) arrow(a arrow.Array, of Kind) error {
	if e, ok := a.(array.ExtensionArray); ok {
		return c.arrow(e.Storage(), of)
	}
	if l, ok := a.(array.ListLike); ok && c.Kind == List {
		return c.arrowLists(l, of)
	}
	value, err := c.adder(a)
	if err != nil {
		return err
	}
	return c.arrowCells(a, value, 0, a.Len(), 0)
}

// arrowCells adds some cells of an array; the first is in a row of the column.
func (c *Column) arrowCells(a arrow.Array, value func(int) error, from, to, row int) error {
	dict, _ := a.(*array.Dictionary)
	for i := from; i < to; i++ {
		if a.IsNull(i) || dict != nil && dict.Dictionary().IsNull(dict.GetValueIndex(i)) {
			c.absent(row + i - from)
			continue
		}
		if c.Missing != nil {
			c.Missing = append(c.Missing, false)
		}
		if err := value(i); err != nil {
			return err
		}
	}
	return nil
}

func (c *Column) arrowLists(l array.ListLike, of Kind) error {
	c.Values = &Column{}
	c.Values.ready(of, 0)
	n, values := 0, l.ListValues()
	value, err := c.Values.adder(values)
	if err != nil {
		return err
	}
	for i := range l.Len() {
		if l.IsNull(i) { // what its place holds is nothing
			c.absent(i)
			continue
		}
		from, to := l.ValueOffsets(i)
		if from < 0 || to < from || to > int64(values.Len()) {
			return errors.New("a list is outside its values")
		}
		if err := c.Values.arrowCells(values, value, int(from), int(to), n); err != nil {
			return err
		}
		n += int(to - from)
		c.Offsets = append(c.Offsets, n)
		if c.Missing != nil {
			c.Missing = append(c.Missing, false)
		}
	}
	return nil
}

// adder returns what adds a value of an array.
func (c *Column) adder(a arrow.Array) (func(i int) error, error) {
	num := func(v int64) error { c.Ints = append(c.Ints, v); return nil }
	float := func(v float64) error { c.Floats = append(c.Floats, v); return nil }
	switch a := a.(type) {
	case *array.Null:
		return func(i int) error { return nil }, nil
	case array.ExtensionArray:
		return c.adder(a.Storage())
	case *array.Dictionary:
		value, err := c.adder(a.Dictionary())
		return func(i int) error { return value(a.GetValueIndex(i)) }, err
	case *array.Int8:
		return func(i int) error { return num(int64(a.Value(i))) }, nil
	case *array.Int16:
		return func(i int) error { return num(int64(a.Value(i))) }, nil
	case *array.Int32:
		return func(i int) error { return num(int64(a.Value(i))) }, nil
	case *array.Int64:
		return func(i int) error { return num(a.Value(i)) }, nil
	case *array.Uint8:
		return func(i int) error { return num(int64(a.Value(i))) }, nil
	case *array.Uint16:
		return func(i int) error { return num(int64(a.Value(i))) }, nil
	case *array.Uint32:
		return func(i int) error { return num(int64(a.Value(i))) }, nil
	case *array.Uint64:
		return func(i int) error { return num(int64(a.Value(i))) }, nil
	case *array.Boolean:
		return func(i int) error {
			if a.Value(i) {
				return num(1)
			}
			return num(0)
		}, nil
	case *array.Date32:
		return func(i int) error { return num(int64(a.Value(i)) * 24 * 60 * 60 * 1e6) }, nil
	case *array.Date64:
		return func(i int) error { return num(int64(a.Value(i)) * 1000) }, nil
	case *array.Timestamp:
		unit := a.DataType().(*arrow.TimestampType).Unit
		return func(i int) error {
			v := int64(a.Value(i))
			switch unit {
			case arrow.Second:
				return num(v * 1e6)
			case arrow.Millisecond:
				return num(v * 1000)
			case arrow.Nanosecond:
				return num(floorDiv(v, 1000))
			}
			return num(v)
		}, nil
	case *array.Float16:
		return func(i int) error { return float(fromHalf(a.Value(i).Uint16())) }, nil
	case *array.Float32:
		return func(i int) error { return float(float64(a.Value(i))) }, nil
	case *array.Float64:
		return func(i int) error { return float(a.Value(i)) }, nil
	case *array.Decimal128:
		scale := a.DataType().(*arrow.Decimal128Type).Scale
		return func(i int) error {
			return float(a.Value(i).ToFloat64(0) / math.Pow10(int(scale)))
		}, nil
	}
	return c.textAdder(a)
}

// textAdder is adder of texts and bytes.
func (c *Column) textAdder(a arrow.Array) (func(i int) error, error) {
	text := func(b []byte) error {
		c.Data = append(c.Data, b...)
		c.Offsets = append(c.Offsets, len(c.Data))
		if !utf8.Valid(b) {
			return fmt.Errorf("%s is no UTF-8", Brief(b))
		}
		return nil
	}
	switch a := a.(type) {
	case *array.FixedSizeBinary:
		if a.DataType().(*arrow.FixedSizeBinaryType).ByteWidth == 16 {
			return func(i int) error { return text(appendUUID(nil, a.Value(i))) }, nil
		}
		return func(i int) error { return text(a.Value(i)) }, nil
	case array.StringLike:
		return func(i int) error { return text([]byte(a.Value(i))) }, nil
	case *array.Binary:
		return func(i int) error { return text(a.Value(i)) }, nil
	case *array.LargeBinary:
		return func(i int) error { return text(a.Value(i)) }, nil
	case *array.BinaryView:
		return func(i int) error { return text(a.Value(i)) }, nil
	}
	return nil, fmt.Errorf("values of type %s are not read", Brief(a.DataType().String()))
}
