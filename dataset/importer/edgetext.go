package importer

import (
	"bytes"
	"context"
	"io"
	"sync/atomic"

	"helios/dataset/edges"
	tables "helios/dataset/table"
	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/infile"
)

// textPart is a part of a plain text file; a variable for tests. A part must not depend on the
// machine, since an import may be resumed on another.
var textPart int64 = 16 << 20

// idRange holds the node ids that a file may have.
type idRange struct {
	base  int64 // the least id
	nodes int64 // how many there may be
	known bool  // nodes is the number of nodes
}

// textSource is the edges of a text file whose beginning was read.
func textSource(path string, h *edgeHead, ids idRange, comments *atomic.Int64) (edges.Source,
	error) {
	s := edges.Source{Name: path, Unit: "bytes", Parts: 1}
	in, err := container.OpenText(path)
	if err == nil {
		err = in.Close()
	}
	if err != nil {
		return s, err
	}
	s.Total = in.Size
	if !in.Packed {
		s.Parts = int((s.Total + textPart - 1) / textPart)
	}
	s.Read = func(ctx context.Context, part int, emit func(src, dst []int64) error,
		done func(int64)) error {
		t := &edgeText{path: path, edgeColumns: h.edgeColumns, idRange: ids, comments: comments,
			emit: emit}
		if !in.Packed {
			return t.readPart(ctx, h.begin, int64(part)*textPart, s.Total, done)
		}
		read := int64(0)
		if err := eachBlockFrom(ctx, path, h.begin, h.line,
			func(b lineBlock) (lineBlock, error) { return b, nil },
			func(b, _ lineBlock) error {
				done(b.read - read)
				read = b.read
				return t.lines(b)
			}); err != nil {
			return err
		}
		return t.flush()
	}
	return s, nil
}

// edgeText parses edges, one a line.
type edgeText struct {
	path string
	edgeColumns
	idRange
	comments *atomic.Int64 // that were left out
	cut      splitter

	src, dst []int64
	emit     func(src, dst []int64) error
}

func (t *edgeText) flush() error {
	if t.swap {
		t.src, t.dst = t.dst, t.src
	}
	err := t.emit(t.src, t.dst)
	t.src, t.dst = t.src[:0], t.dst[:0]
	return err
}

// digits reads a number at b[i:]; the number has at most 18 of them where j-i <= 18.
func digits(b []byte, i int) (v int64, j int) {
	for j = i; j < len(b); j++ {
		d := b[j] - '0'
		if d > 9 {
			break
		}
		v = v*10 + int64(d)
	}
	return v, j
}

// skip returns where the cell after n others begins.
func (t *edgeText) skip(b []byte, i, n int) int {
	if b[i] == ' ' {
		return len(b) // an odd line
	}
	for ; n > 0; n-- {
		for i < len(b) && b[i] != t.sep {
			if b[i] == '\n' || b[i] == '"' || b[i] == '\t' {
				return len(b)
			}
			i++
		}
		for i++; i < len(b) && b[i] == ' '; i++ {
		}
	}
	return i
}

// end returns where the line ends whose second id ends at e; -1 where it is not as usual.
func (t *edgeText) end(b []byte, e int) int {
	if t.after == 0 {
		switch {
		case e == len(b) || b[e] == '\n': // the last line may lack it
			return e
		case b[e] == '\r' && e+1 < len(b) && b[e+1] == '\n':
			return e + 1
		}
		return -1
	}
	n := bytes.IndexByte(b[e:], '\n')
	if n < 0 {
		n = len(b) - e
	}
	rest := b[e : e+n]
	if n == 0 || rest[0] != t.sep || rest[n-1] == '}' || bytes.IndexByte(rest, '"') >= 0 {
		return -1
	}
	if t.sep == tables.Blank && words(rest) != t.after ||
		t.sep != tables.Blank && bytes.Count(rest, []byte{t.sep}) != t.after {
		return -1
	}
	return e + n
}

// words counts what white space separates.
func words(b []byte) (n int) {
	space := true
	for _, c := range b {
		is := c <= ' '
		if space && !is {
			n++
		}
		space = is
	}
	return n
}

// lines parses the lines of a block.
func (t *edgeText) lines(block lineBlock) error {
	if t.src == nil {
		t.src, t.dst = make([]int64, 0, idsPerRead), make([]int64, 0, idsPerRead)
	}
	b, sep, base, nodes := block.text, t.sep, t.base, uint64(t.nodes)
	before, after := t.before, t.after
	if t.apart {
		nodes = 0 // no line is usual
	}
	for i := 0; i < len(b); {
		// The usual line: digits, a separator, digits, the end or more columns.
		from := i
		if before > 0 {
			from = t.skip(b, i, before)
		}
		s, j := digits(b, from)
		k := j
		if k < len(b) && b[k] == sep {
			k++
			for k < len(b) && b[k] == ' ' {
				k++
			}
		}
		d, e := digits(b, k)
		if j > from && e > k && k > j && j-from <= 18 && e-k <= 18 && uint64(s-base) < nodes &&
			uint64(d-base) < nodes {
			if after > 0 || e == len(b) || b[e] != '\n' {
				e = t.end(b, e)
			}
			if e >= 0 && e-i <= maxLine {
				i = e + 1
				t.src, t.dst = append(t.src, s-base), append(t.dst, d-base)
				if len(t.src) == cap(t.src) {
					if err := t.flush(); err != nil {
						return err
					}
				}
				continue
			}
		}
		next := nextLine(b, i)
		if err := t.odd(block, i, next); err != nil {
			return err
		}
		i = next
	}
	return nil
}

// nextLine returns the index behind the line at b[i:].
func nextLine(b []byte, i int) int {
	if n := bytes.IndexByte(b[i:], '\n'); n >= 0 {
		return i + n + 1
	}
	return len(b)
}

// odd parses a line that is not as usual: a comment, with quotes, ends of an edge that are apart,
// or wrong.
func (t *edgeText) odd(block lineBlock, from, to int) error {
	line := block.text[from:to]
	if block.offset+int64(from) == 0 {
		line = bytes.TrimPrefix(line, byteOrderMark)
	}
	l := &lines{path: t.path, text: bytes.TrimSpace(line)}
	switch {
	case len(line) <= maxLine && len(l.text) == 0:
		return nil
	case len(line) <= maxLine && isComment(l.text):
		t.comments.Add(1)
		return nil
	}
	var why errs.Text
	var ids [2]int64
	if len(line) > maxLine {
		why = errs.Textf("line of more than %d bytes; is it a text file?", maxLine)
	} else {
		ids, why = t.edge(l.text)
	}
	if why != "" {
		before, err := block.lineOf(from)
		if err != nil {
			return err
		}
		l.n = before
		return l.bad("%s", why)
	}
	t.src, t.dst = append(t.src, ids[0]-t.base), append(t.dst, ids[1]-t.base)
	if len(t.src) == cap(t.src) {
		return t.flush()
	}
	return nil
}

// edge parses a line strictly, or returns its fault.
func (t *edgeText) edge(text []byte) (ids [2]int64, why errs.Text) {
	t.cut.sep = t.sep
	cells, data, err := edgeCells(&t.cut, text)
	switch {
	case err != nil:
		return ids, errs.Textf("%v", err)
	case len(cells) < 2:
		return ids, errs.Textf(
			"%q is not an edge; two node ids are needed, and by the first line %s separate them",
			clip(text), tables.SeparatorNames[t.sep])
	case len(cells) != t.cols && emptyCell(cells) > 0:
		return ids, errs.Textf("column %d is empty, and the lines before have %d columns",
			emptyCell(cells), t.cols)
	case len(cells) != t.cols && t.fixed:
		return ids, errs.Textf("%q has %d columns; %d are needed", clip(text), len(cells), t.cols)
	case len(cells) != t.cols:
		return ids, errs.Textf(
			"%d columns, the lines before have %d; where a line is a node and its neighbours, write an edge a line",
			len(cells), t.cols)
	case data != nil && !t.data:
		return ids, errs.Textf(
			"the edge has data, %q; models take no weights; give {ignore-columns} to leave it out",
			clip(data))
	}
	ends := [2]int{t.before, t.before + 1}
	if t.apart {
		ends = t.ends
	}
	for i, c := range ends {
		if ids[i], why = t.id(cells[c], c+1); why != "" {
			return ids, why
		}
	}
	return ids, ""
}

// id reads a node id, or returns its fault.
func (t *edgeText) id(cell []byte, column int) (id int64, why errs.Text) {
	id, ok := parseID(cell)
	switch {
	case !ok && len(cell) > 18 && isDigits(cell):
		return 0, errs.Textf("node id %s in column %d is too large; ids have at most 18 digits",
			clip(cell), column)
	case !ok && (len(cell) == 0 || bytes.IndexByte(cell, ',') >= 0):
		return 0, errs.Text(t.cut.why(cell, column))
	case !ok:
		return 0, errs.Textf("%q is not a node id; ids are whole numbers from 0", clip(cell))
	case uint64(id-t.base) >= uint64(t.nodes):
		return 0, t.outside(id, column, t.fixed)
	}
	return id, ""
}

func isDigits(b []byte) bool { return len(bytes.Trim(b, "0123456789")) == 0 }

// outside explains the refusal of an id.
func (r idRange) outside(id int64, column int, fixed bool) errs.Text {
	switch hint := errs.Text(""); {
	case r.known || id < r.base:
		if r.base == 0 && id == r.nodes && !fixed {
			hint = errs.Textf("; if ids count from 1, give {base} 1")
		}
		return errs.Textf("node id %d in column %d is outside %d..%d%s", id, column, r.base,
			r.base+r.nodes-1, hint)
	}
	return errs.Textf("node id %d in column %d is too large; give {renumber} for ids with gaps",
		id, column)
}

// readPart parses the lines that begin in the part of a plain file that begins at from, and not
// before begin.
func (t *edgeText) readPart(ctx context.Context, begin, from, size int64, done func(int64)) error {
	f, err := infile.Open(t.path)
	if err != nil {
		return errs.With(errs.Usage, err)
	}
	defer f.Close()
	end, start := min(from+textPart, size), begin
	skip := from > begin
	if skip { // the line that begins before is of the part before
		start = from - 1
	}
	r := blockReader{in: io.NewSectionReader(f, start, size-start), path: t.path, offset: start,
		size: size, free: make(chan []byte, 1)}
	for r.offset < end {
		b, more, err := r.next()
		if err != nil {
			return err
		}
		if r.end && r.offset < size {
			return errs.New(errs.Usage,
				"%s ends at byte %d; it had %d when the import began, so it was changed meanwhile; run the import again",
				t.path, r.offset, size)
		}
		if !more {
			break
		}
		buf := b.text
		if skip {
			b.cut(nextLine(b.text, 0), len(b.text))
			skip = false
		}
		if left := end - b.offset; left < int64(len(b.text)) {
			b.cut(0, nextLine(b.text, int(max(left, 1))-1))
		}
		if b.offset < end {
			if err := t.lines(b); err != nil {
				return err
			}
		}
		r.reuse(buf)
		to := max(from, min(r.offset, end))
		done(to - from)
		from = to
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	done(end - from)
	return t.flush()
}

// formatColumns is the form of an edge list that a format lays down.
func formatColumns(sep byte, cols int) *edgeHead {
	h := &edgeHead{edgeColumns: edgeColumns{sep: sep, cols: cols, fixed: true}, line: 1}
	h.setEnds(0, 1)
	return h
}

// formatEdges returns the edges of a file whose form a format lays down. Where the file is read in
// one piece, their number must be want, unless that is -1.
func formatEdges(path string, h *edgeHead, ids idRange, want int64) (edges.Source, error) {
	s, err := textSource(path, h, ids, new(atomic.Int64))
	if err != nil || s.Parts > 1 || want < 0 {
		return s, err
	}
	read := s.Read
	s.Read = func(ctx context.Context, part int, emit func(src, dst []int64) error,
		done func(int64)) error {
		n := int64(0)
		err := read(ctx, part, func(src, dst []int64) error {
			n += int64(len(src))
			return emit(src, dst)
		}, done)
		if err == nil && n != want {
			err = wrongCount(path, n, want)
		}
		return err
	}
	return s, nil
}

func wrongCount(path string, n, want int64) error {
	return errs.New(errs.Usage,
		"%s has %d edges, there should be %d: it is truncated, or the number is wrong", path, n, want)
}

// withOpposites adds the opposite of each edge for which both returns true.
func withOpposites(s edges.Source, both func(src, dst int64) (bool, error)) edges.Source {
	read := s.Read
	s.Read = func(ctx context.Context, part int, emit func(src, dst []int64) error,
		done func(int64)) error {
		var src, dst []int64
		return read(ctx, part, func(from, to []int64) error {
			src, dst = src[:0], dst[:0]
			for k, v := range from {
				add, err := both(v, to[k])
				if err != nil {
					return err
				}
				src, dst = append(src, v), append(dst, to[k])
				if add {
					src, dst = append(src, to[k]), append(dst, v)
				}
			}
			return emit(src, dst)
		}, done)
	}
	return s
}

// csvEdges returns the edges of a file with two ids a line, source first. want is their number, -1
// = any. With inverse, the opposite of each follows it, as OGB adds it.
func csvEdges(ctx context.Context, path string, nodes, want int64, inverse bool) (edges.Source,
	error) {
	s, err := formatEdges(path, formatColumns(',', 2), idRange{nodes: nodes, known: true}, want)
	if err == nil && want >= 0 && s.Parts > 1 {
		rows, cerr := countRows(ctx, path)
		if err = cerr; err == nil && rows != want {
			err = wrongCount(path, rows, want)
		}
	}
	if err != nil || !inverse {
		return s, err
	}
	return withOpposites(s, func(_, _ int64) (bool, error) { return true, nil }), nil
}
