package importer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"helios/dataset/edges"
	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/infile"
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
		return &edgeText{path: path, edgeColumns: h.edgeColumns, idRange: ids, at: h.begin,
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
	at       int64 // offset of the next line
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
	at, sep, base, nodes, before, after := t.at, t.sep, t.base, uint64(t.nodes), t.before, t.after
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
		n := bytes.IndexByte(b[i:], '\n') + 1
		if n == 0 {
			n = len(b) - i
		}
		if err := t.odd(b[i:i+n], at+int64(i), b[:i]); err != nil {
			return err
		}
		i += n
	}
	t.at += int64(len(b))
	if t.line > 0 {
		t.line += int64(bytes.Count(b, []byte{'\n'}))
	}
	return nil
}

// odd parses a line that is not as usual: a comment, with quotes, ends of an edge that are apart,
// or wrong.
func (t *edgeText) odd(line []byte, at int64, before []byte) error {
	if at == 0 {
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
	why := ""
	var ids [2]int64
	if len(line) > maxLine {
		why = fmt.Sprintf("line of more than %d bytes; is it a text file?", maxLine)
	} else {
		ids, why = t.edge(l.text)
	}
	if why != "" {
		l.n = t.line + int64(bytes.Count(before, []byte{'\n'}))
		if t.line == 0 {
			n, err := countLines(t.f, at)
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

// edge parses a line strictly, and tells what is wrong with it.
func (t *edgeText) edge(text []byte) (ids [2]int64, why string) {
	t.cut.sep = t.sep
	cells, data, err := edgeCells(&t.cut, text)
	switch {
	case err != nil:
		return ids, err.Error()
	case len(cells) < 2:
		return ids, fmt.Sprintf(
			"%q is not an edge; two node ids are needed, and by the first line %s separate them",
			clip(text), separatorNames[t.sep])
	case len(cells) != t.cols && emptyCell(cells) > 0:
		return ids, fmt.Sprintf("column %d is empty, and the lines before have %d columns",
			emptyCell(cells), t.cols)
	case len(cells) != t.cols:
		return ids, fmt.Sprintf(
			"%d columns, the lines before have %d; where a line is a node and its neighbours, give option layout adjacency, or layout metis for a graph of METIS",
			len(cells), t.cols)
	case data != nil && !t.data:
		return ids, fmt.Sprintf(
			"the edge has data, %q; models take no weights; give option ignore-columns to leave it out",
			clip(data))
	}
	ends := [2]int{t.before, t.before + 1}
	if t.apart {
		ends = t.ends
	}
	for i, c := range ends {
		v, ok := parseID(cells[c])
		switch {
		case !ok && len(cells[c]) > 18 && isDigits(cells[c]):
			return ids, fmt.Sprintf("node id %s in column %d is too large; ids have at most 18 digits",
				clip(cells[c]), c+1)
		case !ok && (len(cells[c]) == 0 || bytes.IndexByte(cells[c], ',') >= 0):
			return ids, t.cut.why(cells[c], c+1)
		case !ok:
			return ids, fmt.Sprintf("%q is not a node id; ids are whole numbers from 0",
				clip(cells[c]))
		}
		if uint64(v-t.base) >= uint64(t.nodes) {
			return ids, t.outside(v, c+1)
		}
		ids[i] = v
	}
	return ids, ""
}

func isDigits(b []byte) bool { return len(bytes.Trim(b, "0123456789")) == 0 }

// outside tells why an id is refused.
func (r idRange) outside(id int64, column int) string {
	switch hint := ""; {
	case r.known || id < r.base:
		if r.base == 0 && id == r.nodes {
			hint = "; if ids count from 1, give option base 1"
		}
		return fmt.Sprintf("node id %d in column %d is outside %d..%d%s", id, column, r.base,
			r.base+r.nodes-1, hint)
	}
	return fmt.Sprintf("node id %d in column %d is too large; give option renumber for ids with gaps",
		id, column)
}

// countLines counts the line feeds before an offset.
func countLines(f *os.File, end int64) (int64, error) {
	n, buf := int64(0), make([]byte, 256<<10)
	for at := int64(0); at < end; {
		k, err := f.ReadAt(buf[:min(int64(len(buf)), end-at)], at)
		n += int64(bytes.Count(buf[:k], []byte{'\n'}))
		at += int64(k)
		if err != nil && at < end {
			return n, err
		}
	}
	return n, nil
}

// readPart parses the lines that begin in the part of a file that begins at from, and not before
// t.at.
func readPart(ctx context.Context, f *os.File, size, from int64, t *edgeText,
	done func(int64)) error {
	end := min(from+textPart, size)
	t.f = f
	buf := make([]byte, textBlock)
	have := 0           // bytes in buf, from offset t.at
	skip := from > t.at // the line that begins before is of the part before
	if skip {
		t.at = from - 1
	}
	if t.at >= end {
		done(end - from)
		return nil
	}
	for told := from; ; {
		n, err := f.ReadAt(buf[have:], t.at+int64(have))
		have += n
		eof := errors.Is(err, io.EOF)
		if err != nil && !eof {
			return errs.New(errs.Usage, "%s, byte %d: %w", t.path, t.at+int64(have), err)
		}
		if eof && t.at+int64(have) < size {
			return errs.New(errs.Usage,
				"%s ends at byte %d; it had %d when the import began, so it was changed meanwhile; run the import again",
				t.path, t.at+int64(have), size)
		}
		use := bytes.LastIndexByte(buf[:have], '\n') + 1
		if eof {
			use = have
		}
		if t.at+int64(use) > end { // up to the line that is the next part's
			cut := max(int(end-1-t.at), 0)
			if i := bytes.IndexByte(buf[cut:have], '\n'); i >= 0 {
				use = cut + i + 1
			}
		}
		if use == 0 {
			if have == len(buf) {
				if have > maxLine {
					n, err := countLines(f, t.at)
					if err != nil {
						return err
					}
					return errs.New(errs.Usage,
						"%s:%d: line of more than %d bytes; is it a text file?", t.path, n+1,
						maxLine)
				}
				buf = append(buf, make([]byte, len(buf))...)
				continue
			}
			return t.flush()
		}
		b := buf[:use]
		if skip {
			i := bytes.IndexByte(b, '\n') + 1
			if i == 0 { // the file ends in the line of a part before
				done(end - told)
				return t.flush()
			}
			b, skip = b[i:], false
			t.at += int64(i)
		}
		if t.at < end {
			if err := t.lines(b); err != nil {
				return err
			}
		} else {
			t.at += int64(len(b))
		}
		if to := min(t.at, end); to > told {
			done(to - told)
			told = to
		}
		have = copy(buf, buf[use:have])
		if t.at >= end || eof {
			if told < end {
				done(end - told)
			}
			return t.flush()
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// readZipped parses a compressed file, which is unpacked ahead by a goroutine of its own.
func readZipped(ctx context.Context, path string, t *edgeText, done func(int64)) error {
	in, err := container.OpenText(path)
	if err != nil {
		return err
	}
	defer in.Close()
	if _, err := io.CopyN(io.Discard, in, t.at); err != nil {
		return readFailed(path, t.line, in.At(), err)
	}
	type block struct {
		b    []byte
		read int64 // of the file
		err  error
	}
	blocks, free := make(chan block), make(chan []byte, 3)
	for range cap(free) {
		free <- make([]byte, textBlock)
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	defer func() { cancel(); <-ended }()
	go func() {
		defer close(ended)
		for err := error(nil); err == nil; {
			var b []byte
			select {
			case b = <-free:
			case <-ctx.Done():
				return
			}
			var n int
			n, err = io.ReadFull(in, b)
			if errors.Is(err, io.ErrUnexpectedEOF) {
				err = io.EOF
			}
			select {
			case blocks <- block{b[:n], in.At(), err}:
			case <-ctx.Done():
				return
			}
		}
	}()
	var rest []byte // of a line that is not whole
	told := int64(0)
	for {
		var k block
		select {
		case k = <-blocks:
		case <-ctx.Done():
			return ctx.Err()
		}
		b := k.b
		if len(rest) > 0 {
			i := bytes.IndexByte(b, '\n') + 1
			if i == 0 {
				i = len(b)
			}
			rest = append(rest, b[:i]...)
			b = b[i:]
			if len(rest) > maxLine {
				return errs.New(errs.Usage, "%s:%d: line of more than %d bytes; is it a text file?",
					path, t.line, maxLine)
			}
			if rest[len(rest)-1] == '\n' || errors.Is(k.err, io.EOF) {
				if err := t.lines(rest); err != nil {
					return err
				}
				rest = rest[:0]
			}
		}
		whole := bytes.LastIndexByte(b, '\n') + 1
		if errors.Is(k.err, io.EOF) {
			whole = len(b)
		}
		if err := t.lines(b[:whole]); err != nil {
			return err
		}
		rest = append(rest, b[whole:]...)
		done(k.read - told)
		told = k.read
		free <- k.b[:cap(k.b)]
		if errors.Is(k.err, io.EOF) {
			return t.flush()
		}
		if k.err != nil {
			return readFailed(path, t.line, k.read, k.err)
		}
	}
}
