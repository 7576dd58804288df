package table

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"
	"unicode/utf8"
)

// textRows parses the rows of a block of separated values. Cells stay where they are in the block.
type textRows struct {
	f     *textFile
	b     *Batch
	text  []byte
	room  *textRoom
	pos   int // of the next row
	line  int64
	lines int64 // of the row
	// marks are the top bits of the separators, line feeds and quotes in the 8 bytes before at.
	marks uint64
	at    int
}

// parse fills a batch with the rows of a text.
func (f *textFile) parse(b *Batch, text []byte, take []int, end bool, room *textRoom) error {
	r := &textRows{f: f, b: b, text: text, room: room, line: b.Line}
	r.begin(take)
	valid := utf8.Valid(text)
	for r.pos < len(text) {
		start := r.pos
		if len(f.names) > 1 && r.atEmptyLine() {
			if !end || len(bytes.TrimSpace(text[start:])) > 0 {
				return f.bad(r.line, "the line is empty")
			}
			break
		}
		r.lines = 1
		n, err := r.row()
		if err != nil {
			return f.bad(r.line, "%w", err)
		}
		if n != len(f.names) {
			return f.bad(r.line, "%s", f.ragged(text[start:r.pos], n))
		}
		b.Rows++
		if !valid {
			for i, k := range take {
				if t := b.Columns[i].Text(b.Rows - 1); !utf8.Valid(t) {
					return f.bad(r.line, "column %s: %s is no UTF-8; write the file again in UTF-8",
						Brief(f.names[k].Name), Brief(t))
				}
			}
		}
		if r.lines > 1 && b.lines == nil {
			b.lines = []int64{}
			for i := range b.Rows - 1 {
				b.lines = append(b.lines, b.Line+int64(i))
			}
		}
		if b.lines != nil {
			b.lines = append(b.lines, r.line)
		}
		r.line += r.lines
	}
	for i := range b.Columns {
		if c := &b.Columns[i]; c.Missing != nil {
			c.Missing = c.Missing[:b.Rows]
		}
	}
	return nil
}

// begin readies the columns. A column that is taken twice is there once.
func (r *textRows) begin(take []int) {
	per, room := bytes.Count(r.text, []byte{'\n'})+1, r.room
	per |= 1 // or else the cells of a row have one place in a processor's cache
	room.spans = slices.Grow(room.spans[:0], per*len(take))[:per*len(take)]
	room.columns = slices.Grow(room.columns[:0], len(take))[:len(take)]
	r.b.Columns = room.columns
	room.bases = room.bases[:0]
	for range r.f.names {
		room.bases = append(room.bases, -1)
	}
	for i, k := range take {
		base := i * per
		if room.bases[k] < 0 {
			room.bases[k] = base
		}
		base = room.bases[k]
		r.b.Columns[i] = Column{Name: r.f.names[k].Name, Data: r.text,
			spans: room.spans[base : base+per]}
	}
}

// atEmptyLine reports whether the next row is an empty line.
func (r *textRows) atEmptyLine() bool {
	rest := r.text[r.pos:]
	return rest[0] == '\n' || rest[0] == '\r' && (len(rest) == 1 || rest[1] == '\n')
}

// put sets a cell of the row.
func (r *textRows) put(n, from, to int) {
	if n >= len(r.room.bases) || r.room.bases[n] < 0 {
		return
	}
	r.room.spans[r.room.bases[n]+r.b.Rows] = uint64(from) | uint64(to)<<32
	if from == to {
		r.missing(n)
	}
}

// missing says that a cell of the row has no value.
func (r *textRows) missing(n int) {
	per := len(r.b.Columns[0].spans)
	for i := range r.b.Columns {
		c := &r.b.Columns[i]
		if &c.spans[0] != &r.room.spans[r.room.bases[n]] {
			continue
		}
		if c.Missing == nil {
			c.Missing = make([]bool, per)
		}
		c.Missing[r.b.Rows] = true
	}
}

// row cuts the next row into cells, and returns how many there are.
func (r *textRows) row() (n int, err error) {
	if r.f.sep == Blank {
		return r.blankRow()
	}
	text, bases, spans, row := r.text, r.room.bases, r.room.spans, r.b.Rows
	sep, marks, next, pos := r.f.sep, r.marks, r.at, r.pos
	seps := uint64(sep) * ones
	for {
		from, to := pos, 0
		if pos < len(text) && text[pos] == '"' {
			if from, to, pos, err = r.quoted(pos); err != nil {
				return 0, err
			}
			if after := pos + 1; after >= next {
				next, marks = after, 0
			} else {
				marks &= ^uint64(0) << (8 * (after - next + 8))
			}
		} else {
			for marks == 0 && next < len(text) {
				marks = marksOf(eight(text, next), seps)
				next += 8
			}
			if to = len(text); marks != 0 {
				to = next - 8 + bits.TrailingZeros64(marks)/8
				marks &= marks - 1
			}
			if pos = to; to < len(text) && text[to] == '"' {
				return 0, errBareQuote
			}
			if (to == len(text) || text[to] == '\n') && to > from && text[to-1] == '\r' {
				to--
			}
		}
		if n < len(bases) && bases[n] >= 0 {
			if spans[bases[n]+row] = uint64(from) | uint64(to)<<32; from == to {
				r.missing(n)
			}
		}
		n++
		if pos++; pos > len(text) || text[pos-1] == '\n' {
			r.marks, r.at, r.pos = marks, next, min(pos, len(text))
			return n, nil
		}
	}
}

// quoted reads the quoted cell at a place; end is that of what ends it.
func (r *textRows) quoted(at int) (from, to, end int, err error) {
	c, rest, err := unquote(r.text[at:])
	if err != nil {
		return 0, 0, 0, err
	}
	r.lines += int64(bytes.Count(c, []byte{'\n'}))
	end = len(r.text) - len(rest)
	if len(rest) > 0 && rest[0] == '\r' && (len(rest) == 1 || rest[1] == '\n') {
		end++
	}
	if end < len(r.text) && r.text[end] != r.f.sep && r.text[end] != '\n' {
		return 0, 0, 0, errAfter
	}
	return at + 1, at + 1 + len(c), end, nil
}

const (
	ones   = 0x0101010101010101
	sevens = 0x7f7f7f7f7f7f7f7f
)

// marksOf returns the top bits of bytes that are separators, line feeds or quotes.
func marksOf(x, seps uint64) uint64 {
	a, b, c := x^seps, x^('\n'*ones), x^('"'*ones)
	a = (a&sevens + sevens) | a
	b = (b&sevens + sevens) | b
	c = (c&sevens + sevens) | c
	return ^(a&b&c | sevens)
}

// eight returns the 8 bytes from a place on, zeros behind the end.
func eight(text []byte, at int) uint64 {
	if at+8 <= len(text) {
		return binary.LittleEndian.Uint64(text[at:])
	}
	var tail [8]byte
	copy(tail[:], text[at:])
	return binary.LittleEndian.Uint64(tail[:])
}

// blankRow is row where white space of any length is between cells.
func (r *textRows) blankRow() (n int, err error) {
	record := r.text[r.pos:]
	if end := endOfRecord(record); end >= 0 {
		record = record[:end]
	}
	r.lines += int64(bytes.Count(record, []byte{'\n'}))
	r.pos = min(r.pos+len(record)+1, len(r.text))
	r.room.cells, err = r.f.split(bytes.TrimSuffix(record, []byte{'\r'}), r.room.cells)
	for n, c := range r.room.cells {
		from := 0
		if len(c.text) > 0 {
			from = cap(r.text) - cap(c.text)
		}
		r.put(n, from, from+len(c.text))
	}
	return len(r.room.cells), err
}
