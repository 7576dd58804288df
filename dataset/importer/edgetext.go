package importer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"

	"helios/dataset/edges"
	"helios/internal/container"
	"helios/internal/errs"
)

// textPart is a part of a text file, textBlock what is read at once; variables for tests. A part
// must not depend on the machine, since an import may go on on another.
var (
	textPart  int64 = 16 << 20
	textBlock       = 1 << 20
)

// textEdges takes the edges of a text file. known says that the number of nodes is; more
// that columns after the second are skipped.
func (im *edgeSet) textEdges(ctx context.Context, path string, known, more bool) error {
	in, err := container.OpenText(path)
	if err != nil {
		return err
	}
	defer in.Close()
	f, size := in.File, in.Size
	limit := int64(maxTextNodes)
	if known {
		limit = im.m.Nodes
	}
	s := edges.Source{Name: path, Unit: "bytes", Total: size, Parts: 1}
	if in.Packed {
		s.Read = func(ctx context.Context, _ int, emit func(src, dst []int64) error,
			done func(int64)) error {
			return readZipped(ctx, path, &edgeText{path: path, limit: limit, known: known,
				more: more, heading: true, line: 1, emit: emit}, done)
		}
		return im.edgesFrom(ctx, s)
	}
	first, err := firstData(f)
	if err != nil {
		return err
	}
	s.Parts = int((size + textPart - 1) / textPart)
	s.Read = func(ctx context.Context, part int, emit func(src, dst []int64) error,
		done func(int64)) error {
		return readPart(ctx, f, size, int64(part)*textPart, &edgeText{path: path, limit: limit,
			known: known, more: more, emit: emit}, first, done)
	}
	return im.edgesFrom(ctx, s)
}

// firstData tells where the first line begins that is neither empty nor a comment: a heading may be
// there.
func firstData(f *os.File) (int64, error) {
	buf := make([]byte, 64<<10)
	at, start, lead := int64(0), int64(0), true // lead: only white space so far in the line
	for {
		n, err := f.ReadAt(buf, at)
		mark := 0
		if at == 0 && bytes.HasPrefix(buf[:n], byteOrderMark) {
			mark = len(byteOrderMark)
		}
		for i, c := range buf[:n] {
			switch {
			case i < mark:
			case c == '\n':
				start, lead = at+int64(i)+1, true
			case !lead || c == ' ' || c == '\t' || c == '\r' || c == '\v' || c == '\f':
			case c == '#' || c == '%':
				lead = false
			default:
				return start, nil
			}
		}
		at += int64(n)
		if errors.Is(err, io.EOF) {
			return at, nil
		}
		if err != nil {
			return 0, err
		}
	}
}

// edgeText parses edges, one a line: two ids, split by white space, or a comma or semicolon
// with or without white space; what follows is skipped with more, and else an error.
type edgeText struct {
	path    string
	limit   int64 // of ids
	known   bool  // limit is the number of nodes
	more    bool  // columns after the second are skipped
	heading bool  // the first line that holds data may be one
	line    int64 // of the next line, from 1; 0: count only for an error, from at
	at      int64 // offset of the next line
	f       *os.File

	src, dst []int64
	emit     func(src, dst []int64) error
}

func (t *edgeText) flush() error {
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

// lines parses whole lines; each ends with a line feed.
func (t *edgeText) lines(b []byte) error {
	if t.src == nil {
		t.src, t.dst = make([]int64, 0, idsPerRead), make([]int64, 0, idsPerRead)
	}
	at := t.at
	for i := 0; i < len(b); {
		// The usual line: digits, one separator or some blanks, digits, the end or more columns.
		s, j := digits(b, i)
		k := j
		if k < len(b) && (b[k] == ' ' || b[k] == '\t' || b[k] == ',' || b[k] == ';') {
			k++
			for k < len(b) && b[k] == ' ' {
				k++
			}
		}
		d, e := digits(b, k)
		if j > i && e > k && k > j && j-i <= 18 && e-k <= 18 && s < t.limit && d < t.limit {
			c := byte('\n') // the last line may lack it
			if e < len(b) {
				c = b[e]
			}
			switch {
			case c == '\r' && e+1 < len(b) && b[e+1] == '\n':
				e++
				c = '\n'
			case t.more && (c == ' ' || c == '\t' || c == ',' || c == ';'):
				n := bytes.IndexByte(b[e:], '\n')
				if n < 0 {
					n = len(b) - e
				}
				if e += n; e-i <= maxLine {
					c = '\n'
				}
			}
			if c == '\n' {
				t.heading = false
				i = e + 1
				t.src, t.dst = append(t.src, s), append(t.dst, d)
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

// odd parses a line that is not as usual: a comment, a heading, many separators, or wrong.
func (t *edgeText) odd(line []byte, at int64, before []byte) error {
	if at == 0 {
		line = bytes.TrimPrefix(line, byteOrderMark)
	}
	l := &lines{path: t.path, text: bytes.TrimSpace(line)}
	if len(line) <= maxLine && (len(l.text) == 0 || l.text[0] == '#' || l.text[0] == '%') {
		return nil
	}
	where := func() error {
		if t.line > 0 {
			l.n = t.line + int64(bytes.Count(before, []byte{'\n'}))
			return nil
		}
		n, err := countLines(t.f, at)
		l.n = n + 1
		return err
	}
	bad := func(format string, a ...any) error {
		if err := where(); err != nil {
			return err
		}
		return l.bad(format, a...)
	}
	if len(line) > maxLine {
		return bad("line of more than %d bytes; is it a text file?", maxLine)
	}
	l.split()
	if len(l.fields) > 2 && !t.more && !(t.heading && !isNumber(l.fields[0]) &&
		!isNumber(l.fields[1])) {
		return bad(
			"%d columns; an edge is two node ids, and models take no weights or times; give option ignore-columns to take the first two",
			len(l.fields))
	}
	if len(l.fields) < 2 {
		return bad("%q is not an edge; two node ids are needed", clip(l.text))
	}
	heading := t.heading
	t.heading = false
	var ids [2]int64
	for i := range ids {
		v, ok := parseID(l.fields[i])
		if !ok && heading && !isNumber(l.fields[0]) && !isNumber(l.fields[1]) {
			return nil
		}
		if !ok {
			return bad("%q is not a node id; ids are whole numbers from 0", clip(l.fields[i]))
		}
		if t.known && v >= t.limit {
			return bad("node id %d in column %d is outside 0..%d", v, i+1, t.limit-1)
		}
		if v >= maxTextNodes {
			return bad("node id %d in column %d is too large; renumber the nodes from 0", v, i+1)
		}
		ids[i] = v
	}
	t.src, t.dst = append(t.src, ids[0]), append(t.dst, ids[1])
	if len(t.src) == cap(t.src) {
		return t.flush()
	}
	return nil
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

// readPart parses the lines that begin in the part of a file that begins at from.
func readPart(ctx context.Context, f *os.File, size, from int64, t *edgeText, first int64,
	done func(int64)) error {
	end := min(from+textPart, size)
	t.f = f
	buf := make([]byte, textBlock)
	have := 0 // bytes in buf, from offset t.at
	t.at = from
	if from > 0 { // the line that begins before is of the part before
		t.at = from - 1
	}
	skip := from > 0
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
			t.heading = t.at <= first && first < t.at+int64(len(b))
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

// fileCounter tells how far a file is read.
// readZipped parses a compressed file, which is unpacked ahead by a goroutine of its own.
func readZipped(ctx context.Context, path string, t *edgeText, done func(int64)) error {
	in, err := container.OpenText(path)
	if err != nil {
		return err
	}
	defer in.Close()
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
			return errs.New(errs.Usage, "%s:%d: truncated or damaged: %w", path, t.line, k.err)
		}
	}
}
