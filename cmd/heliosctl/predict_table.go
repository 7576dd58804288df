package main

import (
	"bufio"
	"encoding/binary"
	"encoding/csv"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/parquet-go/parquet-go"

	"helios/dataset/npy"
	"helios/internal/outfile"
)

// Ends of the names of tables.
const (
	csvEnd     = ".csv"
	parquetEnd = ".parquet"
)

// table is a file of rows, each of some cells and then of figures.
type table interface {
	row(cells []cell, figures []float32) error
	close() error
}

// cell is a value by the name of its column: int64, int32, float32 or string.
type cell struct {
	name  string
	value any
}

// newTable begins a table in the format of the end of a name: .csv, .parquet, or else .npy, which
// has the figures alone. cells are those of some row, columns the names of the figures.
func newTable(f *outfile.File, end string, cells []cell, columns []string,
	rows int64) (table, error) {
	names := make([]string, 0, len(cells)+len(columns))
	add := func(name string) {
		for n := 2; slices.Contains(names, name); n++ {
			name = fmt.Sprintf("%s_%d", name, n)
		}
		names = append(names, name)
	}
	for _, c := range cells {
		add(c.name)
	}
	for _, c := range columns {
		add(c)
	}
	w := bufio.NewWriterSize(f, 1<<20)
	switch end {
	case parquetEnd:
		return newParquet(w, cells, names), nil
	case csvEnd:
		c := &csvTable{csv.NewWriter(w), w, names}
		return c, c.to.Write(names)
	}
	head, err := npy.EncodeHeader(npy.Header{DType: npy.Float32,
		Shape: []int64{rows, int64(len(columns))}})
	if err == nil {
		_, err = w.Write(head)
	}
	return npyTable{w}, err
}

// csvTable is a CSV file with a head.
type csvTable struct {
	to   *csv.Writer
	w    *bufio.Writer
	text []string
}

func (t *csvTable) row(cells []cell, figures []float32) error {
	t.text = t.text[:0]
	for _, c := range cells {
		t.text = append(t.text, textOf(c.value))
	}
	for _, x := range figures {
		t.text = append(t.text, textOf(x))
	}
	return t.to.Write(t.text)
}

// textOf writes a float32 with the digits that give it back.
func textOf(v any) string {
	if x, ok := v.(float32); ok {
		return strconv.FormatFloat(float64(x), 'g', -1, 32)
	}
	return fmt.Sprint(v)
}

func (t *csvTable) close() error {
	if t.to.Flush(); t.to.Error() != nil {
		return t.to.Error()
	}
	return t.w.Flush()
}

// npyTable is an array of figures, its header written.
type npyTable struct{ w *bufio.Writer }

func (t npyTable) row(_ []cell, figures []float32) error {
	var b [4]byte
	for _, x := range figures {
		binary.LittleEndian.PutUint32(b[:], math.Float32bits(x))
		if _, err := t.w.Write(b[:]); err != nil {
			return err
		}
	}
	return nil
}

func (t npyTable) close() error { return t.w.Flush() }

// parquetTable is a Parquet file, in groups of rows that are held until they are whole.
type parquetTable struct {
	to     *parquet.GenericWriter[any]
	w      *bufio.Writer
	values parquet.Row
}

// parquetColumns are columns in an order of their own: a Group has them by name.
type parquetColumns struct {
	parquet.Group
	names []string
}

// Fields implements parquet.Node.
func (c parquetColumns) Fields() []parquet.Field {
	all := c.Group.Fields()
	byName := map[string]parquet.Field{}
	for _, f := range all {
		byName[f.Name()] = f
	}
	for i, name := range c.names {
		all[i] = byName[name]
	}
	return all
}

// parquetGroup is the most bytes of a group of rows.
const parquetGroup = 16 << 20

func newParquet(w *bufio.Writer, cells []cell, names []string) *parquetTable {
	c := parquetColumns{parquet.Group{}, names}
	for i, name := range names {
		node := parquet.Leaf(parquet.FloatType)
		if i < len(cells) {
			switch cells[i].value.(type) {
			case int64:
				node = parquet.Leaf(parquet.Int64Type)
			case int32:
				node = parquet.Leaf(parquet.Int32Type)
			case string:
				node = parquet.String()
			}
		}
		c.Group[name] = node
	}
	return &parquetTable{w: w, to: parquet.NewGenericWriter[any](w, parquet.NewSchema("nodes", c),
		parquet.Compression(&parquet.Snappy),
		parquet.MaxRowsPerRowGroup(int64(max(1, parquetGroup/(8*len(names))))))}
}

func (t *parquetTable) row(cells []cell, figures []float32) error {
	t.values = t.values[:0]
	for i, c := range cells {
		t.values = append(t.values, parquet.ValueOf(c.value).Level(0, 0, i))
	}
	for i, x := range figures {
		t.values = append(t.values, parquet.FloatValue(x).Level(0, 0, len(cells)+i))
	}
	_, err := t.to.WriteRows([]parquet.Row{t.values})
	return err
}

func (t *parquetTable) close() error {
	if err := t.to.Close(); err != nil {
		return err
	}
	return t.w.Flush()
}
