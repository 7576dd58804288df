package table

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strconv"
	"unicode/utf8"

	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/work"
)

// Text files: separated values as RFC 4180 has them, and lines of JSON. A record is a line, and
// those after it that a quoted cell goes on in.

const (
	maxRecord = 16 << 20 // bytes of a record
	blockSize = 1 << 19  // bytes of records that are parsed together
)

// byteOrderMark begins text in UTF-8 from Windows programs.
var byteOrderMark = []byte("\xef\xbb\xbf")

// textFile is a table of separated values.
type textFile struct {
	path  string
	sep   byte
	names []Field
	skip  int64 // records before the first row: comments and the heading
	json  bool
}

// openText finds out how a text file is cut and what its columns are called.
func openText(path string, o Options) (file, error) {
	r, err := newRecords(path)
	if err != nil {
		return nil, err
	}
	defer r.close()
	f := &textFile{path: path}
	var comment []byte
	for {
		text, err := r.one()
		if err != nil {
			return nil, err
		}
		if text == nil {
			return nil, errs.New(errs.Usage, "%s is empty: a table has a line with the names of its columns",
				path)
		}
		if f.skip++; len(text) > 0 && text[0] == '{' {
			return openJSON(f, text, r)
		}
		// Lists of SNAP and KONECT begin with comments, of which the last may name the columns.
		if len(text) == 0 || text[0] == '#' || text[0] == '%' {
			comment = bytes.Clone(text)
			continue
		}
		if err := f.checkFirst(text, r.line); err != nil {
			return nil, err
		}
		return f, f.heading(text, comment, r.line, o.Header)
	}
}

// heading finds the names of the columns.
func (f *textFile) heading(text, comment []byte, line int64, header string) error {
	f.sep = SeparatorOf(text)
	cells, err := f.split(text, nil)
	if err != nil {
		return f.bad(line, "%w", err)
	}
	if len(comment) > 0 && header != "yes" {
		names, err := f.split(bytes.TrimSpace(comment[1:]), nil)
		if err == nil && len(names) == len(cells) && len(cells) > 1 && !anyNumber(names) &&
			(header == "no" || anyNumber(cells)) {
			f.skip--
			return f.name(names, line)
		}
	}
	switch {
	case header == "no":
		f.skip--
		for i := range cells {
			f.names = append(f.names, Field{Name: strconv.Itoa(i + 1)})
		}
		return nil
	case header == "" && anyNumber(cells):
		return f.bad(line, "the line should name the columns, and has numbers; give {header} no where it is a row (columns are called 1, 2, … then), or yes")
	}
	return f.name(cells, line)
}

// name takes names of columns. As in pandas, the second that is called a is a.1.
func (f *textFile) name(cells []cell, line int64) error {
	seen := map[string]int{}
	for i, c := range cells {
		if !utf8.Valid(c.text) {
			return f.bad(line, "the name of column %d is no UTF-8", i+1)
		}
		name := string(bytes.TrimSpace(c.text))
		for base := name; seen[name] > 0; seen[base]++ {
			name = fmt.Sprint(base, ".", seen[base])
		}
		seen[name]++
		f.names = append(f.names, Field{Name: name})
	}
	return nil
}

func anyNumber(cells []cell) bool {
	return slices.ContainsFunc(cells, func(c cell) bool {
		_, err := strconv.ParseFloat(string(bytes.TrimSpace(c.text)), 64)
		return err == nil || errors.Is(err, strconv.ErrRange)
	})
}

func (f *textFile) bad(line int64, format string, a ...any) error {
	return errs.New(errs.Usage, "%s:%d: "+format, append([]any{f.path, line}, a...)...)
}

func (f *textFile) fields() []Field { return slices.Clone(f.names) }
func (f *textFile) rows() int64     { return -1 }

// cell is a cell of a line.
type cell struct{ text []byte }

var (
	errBareQuote = errors.New(`a quote within a cell that does not begin with one; write "a ""b"" c" (RFC 4180)`)
	errAfter     = errors.New("text behind a quoted cell; quotes in a cell are doubled (RFC 4180)")
	errOpen      = errors.New("a quoted cell does not end")
)

// split cuts a record into cells, which are in its memory: doubled quotes are made one there.
func (f *textFile) split(text []byte, cells []cell) ([]cell, error) {
	cells = cells[:0]
	if f.sep == Blank {
		text = bytes.TrimRight(text, " \t")
	}
	for {
		if f.sep == Blank {
			text = bytes.TrimLeft(text, " \t")
		}
		if len(text) > 0 && text[0] == '"' {
			c, rest, err := unquote(text)
			if err != nil {
				return nil, err
			}
			cells = append(cells, cell{c})
			if len(rest) == 0 {
				return cells, nil
			}
			if rest[0] != f.sep && (f.sep != Blank || rest[0] != '\t') {
				return nil, errAfter
			}
			text = rest[1:]
			continue
		}
		end := f.next(text)
		c := text
		if end >= 0 {
			c = text[:end]
		}
		if bytes.IndexByte(c, '"') >= 0 {
			return nil, errBareQuote
		}
		if cells = append(cells, cell{c}); end < 0 {
			return cells, nil
		}
		text = text[end+1:]
	}
}

// next returns the index of the next separator, or -1.
func (f *textFile) next(text []byte) int {
	if f.sep == Blank {
		return bytes.IndexAny(text, " \t")
	}
	return bytes.IndexByte(text, f.sep)
}

// unquote reads the quoted cell that a text begins with, and makes doubled quotes in it one.
func unquote(text []byte) (cell, rest []byte, err error) {
	text = text[1:]
	for n, from := 0, 0; ; from++ {
		end := bytes.IndexByte(text[from:], '"')
		if end < 0 {
			return nil, nil, errOpen
		}
		if n < from {
			copy(text[n:], text[from:from+end])
		}
		n, from = n+end, from+end+1
		if from == len(text) || text[from] != '"' {
			return text[:n], text[from:], nil
		}
		text[n] = '"'
		n++
	}
}

// records cuts a text into blocks of whole records.
type records struct {
	in   *container.Text
	path string
	line int64  // of the next record
	rest []byte // text that was read and not returned
	end  bool
	buf  []byte             // that rest is in
	free work.Spare[[]byte] // blocks that no batch needs any more
}

func newRecords(path string) (*records, error) {
	in, err := container.OpenText(path)
	if err != nil {
		return nil, err
	}
	return &records{in: in, path: path, free: work.NewSpare[[]byte](freeBlocks)}, nil
}

func (r *records) close() error { return r.in.Close() }

// one returns the next record; nil at the end. line is its number.
func (r *records) one() ([]byte, error) {
	for {
		if i := endOfRecord(r.rest); i >= 0 || r.end {
			if i < 0 {
				i = len(r.rest)
			}
			if len(r.rest) == 0 {
				return nil, nil
			}
			text := r.rest[:i]
			if r.line++; r.line == 1 {
				text = bytes.TrimPrefix(text, byteOrderMark)
			}
			r.rest = r.rest[min(i+1, len(r.rest)):]
			return append([]byte{}, bytes.TrimSuffix(text, []byte{'\r'})...), nil
		}
		if err := r.more(); err != nil {
			return nil, err
		}
	}
}

// endOfRecord returns the index of the line feed that ends the first record, or -1.
func endOfRecord(text []byte) int {
	quoted := false
	for i, c := range text {
		switch {
		case c == '"':
			quoted = !quoted
		case c == '\n' && !quoted:
			return i
		}
	}
	return -1
}

// more reads more text behind rest.
func (r *records) more() error {
	if len(r.rest) > maxRecord {
		return errs.New(errs.Usage,
			"%s:%d: a record of more than %d MiB begins here; a quote that is not closed, or no text file",
			r.path, r.line+1, maxRecord>>20)
	}
	n := len(r.rest)
	var buf []byte
	if 2*n <= blockSize {
		buf = r.free.Take() // which may hold rest
	}
	if buf == nil {
		buf = make([]byte, max(blockSize, 2*n))
	}
	copy(buf, r.rest)
	r.buf = buf
	k, err := io.ReadFull(r.in, buf[n:])
	r.rest = buf[:n+k]
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		r.end = true
	case err != nil:
		class := errs.Usage
		var pe *fs.PathError
		if errors.As(err, &pe) {
			class = errs.Device
		}
		return errs.New(class, "%s: cut short or damaged behind line %d: %w; copy it again", r.path,
			r.line+int64(bytes.Count(r.rest, []byte{'\n'})), err)
	}
	return r.noZero(n)
}

// block returns whole records; nil at the end. line is the number of the first one's line.
func (r *records) block(quotes bool) (text []byte, line int64, err error) {
	for {
		whole := len(r.rest)
		if !r.end {
			whole = lastRecord(r.rest, quotes)
		}
		if whole > 0 {
			text, line = r.rest[:whole:whole], r.line+1
			r.rest = r.rest[whole:]
			r.line += int64(bytes.Count(text, []byte{'\n'}))
			return text, line, nil
		}
		if r.end {
			return nil, 0, nil
		}
		if err := r.more(); err != nil {
			return nil, 0, err
		}
	}
}

// lastRecord returns the length of the whole records in text.
func lastRecord(text []byte, quotes bool) int {
	if !quotes || bytes.IndexByte(text, '"') < 0 {
		return bytes.LastIndexByte(text, '\n') + 1
	}
	whole, quoted := 0, false
	for from := 0; ; {
		i := bytes.IndexByte(text[from:], '\n')
		if i < 0 {
			return whole
		}
		if bytes.Count(text[from:from+i], []byte{'"'})%2 == 1 {
			quoted = !quoted
		}
		if from += i + 1; !quoted {
			whole = from
		}
	}
}

// textReader reads a text file.
type textReader struct {
	f     *textFile
	r     *records
	take  []int
	first int64
	rooms work.Spare[*textRoom] // that no batch needs any more
}

// textRoom is the memory of a batch of separated values.
type textRoom struct {
	columns []Column
	spans   []uint64
	bases   []int
	cells   []cell
}

// freeBlocks bounds the memory that waits to be used again.
const freeBlocks = 8

func (f *textFile) read(take []int) (reader, error) {
	r, err := newRecords(f.path)
	if err != nil {
		return nil, err
	}
	t := &textReader{f: f, r: r, take: take, rooms: work.NewSpare[*textRoom](freeBlocks)}
	for range f.skip {
		if _, err := r.one(); err != nil {
			return nil, errors.Join(err, r.close())
		}
	}
	return t, nil
}

func (t *textReader) done() int64  { return t.r.in.At() }
func (t *textReader) close() error { return t.r.close() }

func (t *textReader) next() (func() (*Batch, error), error) {
	text, line, err := t.r.block(!t.f.json)
	if text == nil || err != nil {
		return nil, err
	}
	b := &Batch{File: t.f.path, Line: line, First: -1}
	end := t.r.end && len(t.r.rest) == 0
	if t.f.json {
		return func() (*Batch, error) { return b, t.f.parseJSON(b, text, t.take, end) }, nil
	}
	room, buf := t.rooms.Take(), t.r.buf
	if room == nil {
		room = &textRoom{}
	}
	b.free = func() {
		t.rooms.Give(room)
		if len(buf) == blockSize { // which holds no other batch's text
			t.r.free.Give(buf)
		}
	}
	return func() (*Batch, error) { return b, t.f.parse(b, text, t.take, end, room) }, nil
}

// text adds a cell, which is missing where it is empty.
func (c *Column) text(cell []byte, row int) {
	c.Data = append(c.Data, cell...)
	c.Offsets = append(c.Offsets, len(c.Data))
	if len(cell) == 0 {
		c.miss(row)
	} else if c.Missing != nil {
		c.Missing = append(c.Missing, false)
	}
}

// miss says that the cell of a row, to which others are added one by one, is missing.
func (c *Column) miss(row int) {
	if c.Missing == nil {
		c.Missing = make([]bool, row, 2*row+16)
	}
	c.Missing = append(c.Missing, true)
}

func (f *textFile) ragged(record []byte, n int) string {
	s := fmt.Sprintf("%d cells, and %d columns are named", n, len(f.names))
	if other := SeparatorOf(record); other != f.sep && n == 1 {
		s += "; by the first line, columns are separated by " + SeparatorNames[f.sep]
	}
	return s
}
