package importer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"sync/atomic"

	"helios/dataset/edges"
	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/infile"
	"helios/internal/work"
)

// textPart is a part of a text file, textBlock what is read at once; variables for tests. A part
// must not depend on the machine, since an import may go on on another.
var (
	textPart  int64 = 16 << 20
	textBlock       = 1 << 20
)

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
	text := func(emit func(src, dst []int64) error) *edgeText {
		return &edgeText{path: path, edgeColumns: h.edgeColumns, idRange: ids, offset: h.begin,
			comments: comments, emit: emit}
	}
	if in.Packed {
		s.Read = func(ctx context.Context, _ int, emit func(src, dst []int64) error,
			done func(int64)) error {
			t := text(emit)
			t.line = h.line
			return readZipped(ctx, path, t, done)
		}
		return s, nil
	}
	s.Parts = int((s.Total + textPart - 1) / textPart)
	s.Read = func(ctx context.Context, part int, emit func(src, dst []int64) error,
		done func(int64)) error {
		f, err := infile.Open(path)
		if err != nil {
			return errs.With(errs.Usage, err)
		}
		defer f.Close()
		return readPart(ctx, f, s.Total, int64(part)*textPart, text(emit), done)
	}
	return s, nil
}

// edgeText parses edges, one a line.
type edgeText struct {
	path string
	edgeColumns
	idRange
	line     int64 // of the next line, from 1; 0: count only for an error, from at
	offset   int64 // offset of the next line
	f        *os.File
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
	if t.sep == blank && words(rest) != t.after ||
		t.sep != blank && bytes.Count(rest, []byte{t.sep}) != t.after {
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

// lines parses whole lines; each ends with a line feed.
func (t *edgeText) lines(b []byte) error {
	if t.src == nil {
		t.src, t.dst = make([]int64, 0, idsPerRead), make([]int64, 0, idsPerRead)
	}
	begin, sep, base, nodes := t.offset, t.sep, t.base, uint64(t.nodes)
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
		if err := t.odd(b[i:next], begin+int64(i), b[:i]); err != nil {
			return err
		}
		i = next
	}
	t.pass(b)
	return nil
}

// nextLine returns the index behind the line at b[i:].
func nextLine(b []byte, i int) int {
	if n := bytes.IndexByte(b[i:], '\n'); n >= 0 {
		return i + n + 1
	}
	return len(b)
}

// pass moves behind lines.
func (t *edgeText) pass(b []byte) {
	t.offset += int64(len(b))
	if t.line > 0 {
		t.line += int64(bytes.Count(b, []byte{'\n'}))
	}
}

// odd parses a line that is not as usual: a comment, with quotes, ends of an edge that are apart,
// or wrong.
func (t *edgeText) odd(line []byte, offset int64, before []byte) error {
	if offset == 0 {
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
		l.n = t.line + int64(bytes.Count(before, []byte{'\n'}))
		if t.line == 0 {
			n, err := countLines(t.f, offset)
			if err != nil {
				return err
			}
			l.n = n + 1
		}
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
			clip(text), separatorNames[t.sep])
	case len(cells) != t.cols && emptyCell(cells) > 0:
		return ids, errs.Textf("column %d is empty, and the lines before have %d columns",
			emptyCell(cells), t.cols)
	case len(cells) != t.cols && t.fixed:
		return ids, errs.Textf("%q has %d columns; %d are needed", clip(text), len(cells), t.cols)
	case len(cells) != t.cols:
		return ids, errs.Textf(
			"%d columns, the lines before have %d; where a line is a node and its neighbours, give {layout} adjacency, or {layout} metis for a graph of METIS",
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

// countLines counts the line feeds before an offset.
func countLines(f *os.File, end int64) (int64, error) {
	n, buf := int64(0), make([]byte, 256<<10)
	for offset := int64(0); offset < end; {
		k, err := f.ReadAt(buf[:min(int64(len(buf)), end-offset)], offset)
		n += int64(bytes.Count(buf[:k], []byte{'\n'}))
		offset += int64(k)
		if err != nil && offset < end {
			return n, err
		}
	}
	return n, nil
}

// readPart parses the lines that begin in the part of a file that begins at from, and not before
// t.offset.
func readPart(ctx context.Context, f *os.File, size, from int64, t *edgeText,
	done func(int64)) error {
	p := partReader{edgeText: t, size: size, end: min(from+textPart, size),
		buf: make([]byte, textBlock), skip: from > t.offset}
	t.f = f
	if p.skip { // the line that begins before is of the part before
		t.offset = from - 1
	}
	reported := from
	for t.offset < p.end {
		if err := p.fill(); err != nil {
			return err
		}
		use := p.wholeLines()
		if use == 0 {
			if err := p.grow(); err != nil {
				return err
			}
			continue
		}
		if err := p.parse(use); err != nil {
			return err
		}
		if to := min(t.offset, p.end); to > reported {
			done(to - reported)
			reported = to
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	if reported < p.end {
		done(p.end - reported)
	}
	return t.flush()
}

// partReader reads a part of a file. t.offset is the offset of buf.
type partReader struct {
	*edgeText
	size, end int64
	buf       []byte
	have      int  // bytes in buf
	eof       bool // and they are the file's last
	skip      bool // buf begins in a line of the part before
}

// fill reads as much as buf has room for.
func (p *partReader) fill() error {
	n, err := p.f.ReadAt(p.buf[p.have:], p.offset+int64(p.have))
	p.have += n
	p.eof = errors.Is(err, io.EOF)
	if err != nil && !p.eof {
		return errs.New(errs.Usage, "%s, byte %d: %w", p.path, p.offset+int64(p.have), err)
	}
	if p.eof && p.offset+int64(p.have) < p.size {
		return errs.New(errs.Usage,
			"%s ends at byte %d; it had %d when the import began, so it was changed meanwhile; run the import again",
			p.path, p.offset+int64(p.have), p.size)
	}
	return nil
}

// wholeLines returns the bytes of whole lines in buf, up to the first that is of the next part.
func (p *partReader) wholeLines() int {
	use := p.have
	if !p.eof {
		use = bytes.LastIndexByte(p.buf[:p.have], '\n') + 1
	}
	if p.offset+int64(use) > p.end {
		cut := max(int(p.end-1-p.offset), 0)
		if i := bytes.IndexByte(p.buf[cut:p.have], '\n'); i >= 0 {
			use = cut + i + 1
		}
	}
	return use
}

// grow makes room for a line of more than buf.
func (p *partReader) grow() error {
	if p.have > maxLine {
		n, err := countLines(p.f, p.offset)
		if err != nil {
			return err
		}
		return errs.New(errs.Usage, "%s:%d: line of more than %d bytes; is it a text file?", p.path,
			n+1, maxLine)
	}
	p.buf = append(p.buf, make([]byte, len(p.buf))...)
	return nil
}

// parse parses the first bytes of buf, and drops them.
func (p *partReader) parse(use int) error {
	b := p.buf[:use]
	if p.skip {
		i := nextLine(b, 0)
		p.offset += int64(i)
		b, p.skip = b[i:], false
	}
	if p.offset < p.end {
		if err := p.lines(b); err != nil {
			return err
		}
	} else {
		p.offset += int64(len(b))
	}
	p.have = copy(p.buf, p.buf[use:p.have])
	return nil
}

// readZipped parses a compressed file, which is unpacked ahead by a goroutine of its own.
func readZipped(ctx context.Context, path string, t *edgeText, done func(int64)) error {
	in, err := container.OpenText(path)
	if err != nil {
		return err
	}
	defer in.Close()
	if _, err := io.CopyN(io.Discard, in, t.offset); err != nil {
		return readFailed(path, t.line, in.At(), err)
	}
	z := unpacker{in: in, free: make(chan []byte, 2*hostcpu.Count()+2)}
	var rest []byte // of a line that is not whole
	reported := int64(0)
	err = work.Pipe(ctx, z.next, func(k unpacked) (unpacked, error) { return k, nil },
		func(k unpacked) (err error) {
			if rest, err = t.block(rest, k); err != nil {
				return err
			}
			done(k.read - reported)
			reported = k.read
			select {
			case z.free <- k.b[:cap(k.b)]:
			default:
			}
			if k.err != nil && !errors.Is(k.err, io.EOF) {
				return readFailed(path, t.line, k.read, k.err)
			}
			return nil
		})
	if err != nil {
		return err
	}
	return t.flush()
}

// unpacked is some of a compressed text.
type unpacked struct {
	b    []byte
	read int64 // bytes of the file so far
	err  error // behind b: io.EOF at the end
}

// unpacker reads a compressed text block by block.
type unpacker struct {
	in   *container.Text
	free chan []byte
	end  bool
}

func (z *unpacker) next() (k unpacked, more bool, err error) {
	if z.end {
		return k, false, nil
	}
	var b []byte
	select {
	case b = <-z.free:
	default:
		b = make([]byte, textBlock)
	}
	n, err := io.ReadFull(z.in, b)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	z.end = err != nil
	return unpacked{b[:n], z.in.At(), err}, true, nil
}

// block parses the lines of a block whose first continues rest, and returns the next rest.
func (t *edgeText) block(rest []byte, k unpacked) ([]byte, error) {
	b, last := k.b, errors.Is(k.err, io.EOF)
	if len(rest) > 0 {
		i := nextLine(b, 0)
		rest = append(rest, b[:i]...)
		b = b[i:]
		if len(rest) > maxLine {
			return nil, errs.New(errs.Usage, "%s:%d: line of more than %d bytes; is it a text file?",
				t.path, t.line, maxLine)
		}
		if rest[len(rest)-1] == '\n' || last {
			if err := t.lines(rest); err != nil {
				return nil, err
			}
			rest = rest[:0]
		}
	}
	whole := bytes.LastIndexByte(b, '\n') + 1
	if last {
		whole = len(b)
	}
	if err := t.lines(b[:whole]); err != nil {
		return nil, err
	}
	return append(rest, b[whole:]...), nil
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
