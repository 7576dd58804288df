package columns

import (
	"math"
	"sync/atomic"

	"helios/dataset/table"
	"helios/internal/errs"
)

// Encoder makes rows of features.
type Encoder struct {
	cols  []*encoding
	width int
}

// encoding is a column that is encoded.
type encoding struct {
	Learned
	first, width     int // of its features
	index            map[string]int
	fill             []float64 // that of a cell without a value
	fillText         []byte
	missing, unknown atomic.Int64
}

// room is the memory of one goroutine that encodes a column.
type room struct {
	cell      []float64
	key, word []byte
	unknown   int64
}

// NewEncoder returns an Encoder of columns that were learned.
func NewEncoder(all []Learned) (*Encoder, error) {
	e := &Encoder{}
	for _, l := range all {
		c := &encoding{Learned: l, first: e.width, width: l.Width()}
		e.width += c.width
		if l.categorical() {
			c.index = make(map[string]int, len(l.Categories))
			for i, name := range l.Categories {
				c.index[name] = i
			}
		}
		if err := c.setFill(); err != nil {
			return nil, err
		}
		e.cols = append(e.cols, c)
	}
	return e, nil
}

// setFill readies what a cell without a value becomes, where that is as if it had one.
func (c *encoding) setFill() error {
	switch c.Missing {
	case "", Zero, Indicator, Category:
		return nil
	case Mean:
		for _, s := range c.Stats {
			c.fill = append(c.fill, s.Mean)
		}
		return nil
	}
	if c.texts() {
		c.fillText = []byte(c.Missing)
		if _, ok := c.index[c.Missing]; c.categorical() && !ok && c.Unknown == "" {
			return errs.New(errs.Usage,
				"column %s: missing %s is no category; take %s, %s or %s, or one of the categories",
				table.Brief(c.Column), table.Brief(c.Missing), Category, Zero, Indicator)
		}
		return nil
	}
	x, err := c.parse([]byte(c.Missing))
	c.fill = x
	return err
}

// Width returns the number of features.
func (e *Encoder) Width() int { return e.width }

// Names returns a name for each feature.
func (e *Encoder) Names() (names []string) {
	for _, c := range e.cols {
		names = append(names, c.Names()...)
	}
	return names
}

// Count is the number of cells of a column that had no value, or a category that was not learned.
type Count struct {
	Column           string
	Missing, Unknown int64
}

// Counts returns the counts of columns that have some.
func (e *Encoder) Counts() (all []Count) {
	for _, c := range e.cols {
		if m, u := c.missing.Load(), c.unknown.Load(); m+u > 0 {
			all = append(all, Count{c.Column, m, u})
		}
	}
	return all
}

// tileRows is the number of rows that Encode makes of one column after the other, so that they stay
// in a processor's cache.
const tileRows = 128

// Encode writes the features of the rows from one to another of a batch: rows × Width. Several
// goroutines may call it.
func (e *Encoder) Encode(b *table.Batch, from, to int, dst []float32) error {
	clear(dst[:(to-from)*e.width])
	for ; from < to; from += tileRows {
		end := min(from+tileRows, to)
		err := first(b, len(e.cols), func(i int) *Spec { return &e.cols[i].Spec },
			func(i int) *fault { return e.cols[i].encode(b, from, end, dst, e.width, i) })
		if err != nil {
			return err
		}
		dst = dst[(end-from)*e.width:]
	}
	return nil
}

func (c *encoding) encode(b *table.Batch, from, to int, dst []float32, stride, likely int) *fault {
	col, err := columnOf(b, c.Column, likely)
	if err != nil {
		return &fault{-1, err}
	}
	if c.oneNumber(col) {
		return c.encodeNumbers(col, from, to, dst, stride)
	}
	r := room{cell: make([]float64, c.numbers())}
	missing := int64(0)
	for i := from; i < to; i++ {
		out := dst[(i-from)*stride+c.first:][:c.width]
		switch {
		case c.Spec.missing(col, i):
			missing++
			err = c.encodeMissing(out, &r)
		case c.texts():
			err = c.encodeTexts(out, &r, col, i)
		default:
			if err = c.Spec.cell(r.cell, col, i); err == nil {
				err = c.scale(out, r.cell)
			}
		}
		if err != nil {
			return &fault{i, err}
		}
	}
	c.missing.Add(missing)
	c.unknown.Add(r.unknown)
	return nil
}

// encodeNumbers is encode of a column of oneNumber.
func (c *encoding) encodeNumbers(col *table.Column, from, to int, dst []float32,
	stride int) *fault {
	var room [tileRows]float64
	cells := room[:to-from]
	f := c.numbersOf(cells, col, from)
	if f != nil { // a row before may have another fault
		cells = cells[:f.row-from]
	}
	missing := int64(0)
	standard := c.Transform == Standard
	var s Stat
	if standard {
		s = c.Stats[0]
	}
	for k, x := range cells {
		place := k*stride + c.first
		if x == x && standard {
			y := x - s.Mean
			if s.Std > 0 {
				y /= s.Std
			}
			if math.Abs(y) <= math.MaxFloat32 {
				dst[place] = float32(y)
				continue
			}
		}
		out, err := dst[place:place+c.width], error(nil)
		if x != x {
			missing++
			err = c.encodeMissing(out, nil)
		} else {
			err = c.scale(out, cells[k:k+1])
		}
		if err != nil {
			return &fault{from + k, err}
		}
	}
	c.missing.Add(missing)
	return f
}

func (c *encoding) encodeMissing(out []float32, r *room) error {
	switch c.Missing {
	case "":
		return errNoValue
	case Zero:
	case Indicator:
		out[len(out)-1] = 1
	case Category:
		if c.Transform == Ordinal {
			out[0] = float32(len(c.Categories) + one(c.Unknown == Category))
		} else {
			out[len(out)-1] = 1
		}
	default:
		if c.texts() {
			return c.encodeText(out, r, c.fillText)
		}
		return c.scale(out, c.fill)
	}
	return nil
}

// scale writes numbers as the transform has them.
func (c *encoding) scale(out []float32, cell []float64) error {
	for k, x := range cell {
		switch c.Transform {
		case Standard, Date:
			s := &c.Stats[k]
			if x -= s.Mean; s.Std > 0 {
				x /= s.Std
			}
		case MinMax:
			s := &c.Stats[k]
			if x -= s.Min; s.Max > s.Min {
				x /= s.Max - s.Min
			}
		case Log:
			if x <= -1 {
				return errs.Errorf("%v has no log(1+x); take another transform", x)
			}
			x = math.Log1p(x)
		}
		if !(math.Abs(x) <= math.MaxFloat32) {
			return errs.Errorf("becomes %v, which %w; take another transform", x, errFinite)
		}
		out[k] = float32(x)
	}
	return nil
}

func (c *encoding) encodeTexts(out []float32, r *room, col *table.Column, i int) error {
	if c.Transform == Bag {
		clear(r.cell)
		err := c.eachText(&r.key, col, i, func(t []byte) error {
			r.word = countWords(r.cell, t, r.word)
			return nil
		})
		unit(r.cell)
		for k, x := range r.cell {
			out[k] = float32(x)
		}
		return err
	}
	return c.eachText(&r.key, col, i, func(t []byte) error { return c.encodeText(out, r, t) })
}

// encodeText writes the features of one text.
func (c *encoding) encodeText(out []float32, r *room, t []byte) error {
	switch c.Transform {
	case Hash:
		out[bucket(t, c.Size)] = 1
		return nil
	case Bag:
		clear(r.cell)
		r.word = countWords(r.cell, t, r.word)
		unit(r.cell)
		for k, x := range r.cell {
			out[k] = float32(x)
		}
		return nil
	}
	place, ok := c.index[string(t)]
	switch {
	case !ok && c.Unknown == "":
		return errs.Errorf("%s is none of the %d categories that were learned; learn from all rows with {stats-of} all, or say in a description what becomes of it: unknown: zero or category",
			table.Brief(t), len(c.Categories))
	case !ok:
		r.unknown++
		if c.Unknown == Zero {
			return nil
		}
		place = len(c.Categories)
	}
	if c.Transform == Ordinal {
		out[0] = float32(place)
	} else {
		out[place] = 1
	}
	return nil
}
