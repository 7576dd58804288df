// Package table reads tables of rows and columns from files: CSV, Parquet and their like. It knows
// nothing of graphs; dataset/importer makes nodes, edges and features of what it reads.
package table

import "strconv"

// Kind is the type of a column's cells.
type Kind int

// The kinds of cells. Text files have Text alone, whose cells an importer parses.
const (
	Text  Kind = iota // bytes of UTF-8: Data and Offsets
	Int               // int64: Ints
	Uint              // uint64: Ints, the same bits
	Float             // float64: Floats
	Bool              // Ints, 0 or 1
	Time              // Ints, microseconds since 1970 UTC
	List              // Values, cut by Offsets
)

// Column is one column of a batch of rows.
type Column struct {
	Name    string
	Kind    Kind
	Missing []bool // by row; nil where no cell is missing
	Ints    []int64
	Floats  []float64
	Data    []byte  // Text: cell i is Data[Offsets[i]:Offsets[i+1]]
	Offsets []int   // Text and List: one more than rows
	Values  *Column // List: cell i is Values' rows Offsets[i] to Offsets[i+1]
	// spans, of texts that are where they were read, replace Offsets: the place of a cell in Data,
	// and of its end in the upper half.
	spans []uint64
}

// Batch is some successive rows of one file.
type Batch struct {
	File    string
	First   int64 // number of the batch's first row in its file, from 0; -1 in text files
	Line    int64 // text files: line of the first row, from 1; else 0 (Where names rows)
	Rows    int
	Columns []Column
	lines   []int64 // text files: line of each row, where cells have line feeds
	free    func()  // gives the memory back; nil: nobody waits for it
}

// Text returns the bytes of cell i of a column of Text.
func (c *Column) Text(i int) []byte {
	if c.spans != nil {
		s := c.spans[i]
		return c.Data[uint32(s) : s>>32]
	}
	return c.Data[c.Offsets[i]:c.Offsets[i+1]]
}

// IsMissing reports whether cell i has no value.
func (c *Column) IsMissing(i int) bool { return c.Missing != nil && c.Missing[i] }

// AppendInt appends cell i of a column of Int or Uint in digits.
func AppendInt(dst []byte, c *Column, i int) []byte {
	if c.Kind == Uint {
		return strconv.AppendUint(dst, uint64(c.Ints[i]), 10)
	}
	return strconv.AppendInt(dst, c.Ints[i], 10)
}
