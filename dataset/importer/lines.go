package importer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"

	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/infile"
	"helios/internal/work"
)

// lineBlock is some whole lines of a text file.
type lineBlock struct {
	path   string
	line   int64 // number of the first, from 1; 0: not known, in a plain file
	offset int64 // of the first in the text
	text   []byte
	read   int64 // bytes of the file that were read for it, of size
	size   int64
}

// blockBytes is the room of a block; a variable for tests.
var blockBytes = 1 << 20

// cut keeps the lines from..to of the text.
func (b *lineBlock) cut(from, to int) { b.text, b.offset = b.text[from:to], b.offset+int64(from) }

// lineOf returns the number of the line that begins at an index of the text.
func (b *lineBlock) lineOf(index int) (int64, error) {
	line := b.line
	if line == 0 {
		n, err := countLines(b.path, b.offset)
		if err != nil {
			return 0, err
		}
		line = n + 1
	}
	return line + int64(bytes.Count(b.text[:index], []byte{'\n'})), nil
}

// countLines counts the line feeds before an offset of a plain file.
func countLines(path string, end int64) (n int64, err error) {
	f, err := infile.Open(path)
	if err != nil {
		return 0, errs.With(errs.Usage, err)
	}
	defer f.Close()
	in, buf := io.LimitReader(f, end), make([]byte, 256<<10)
	for {
		k, err := in.Read(buf)
		n += int64(bytes.Count(buf[:k], []byte{'\n'}))
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// eachBlock reads a text file, plain or compressed, once: one goroutine unpacks, parse works on
// blocks of whole lines on all cores, and take gets the results in the order of the file, on the
// caller's goroutine. Memory is bounded by a few blocks. The result of parse must not point into
// the block's text.
func eachBlock[T any](ctx context.Context, path string, parse func(lineBlock) (T, error),
	take func(T, lineBlock) error) error {
	return eachBlockFrom(ctx, path, 0, 1, parse, take)
}

// eachBlockFrom is eachBlock from a line on, that begins at an offset.
func eachBlockFrom[T any](ctx context.Context, path string, offset, line int64,
	parse func(lineBlock) (T, error), take func(T, lineBlock) error) error {
	in, err := container.OpenText(path)
	if err != nil {
		return err
	}
	defer in.Close()
	if _, err := io.CopyN(io.Discard, in, offset); err != nil {
		return readFailed(path, line, in.At(), err)
	}
	r := newBlocks(in, path, offset, line, 2*hostcpu.Count()+2)
	type parsed struct {
		v T
		b lineBlock
	}
	return work.Pipe(ctx, r.next, func(b lineBlock) (parsed, error) {
		v, err := parse(b)
		return parsed{v, b}, err
	}, func(p parsed) error {
		if err := take(p.v, p.b); err != nil {
			return err
		}
		r.reuse(p.b.text)
		return nil
	})
}

// blockReader cuts a text into blocks of whole lines.
type blockReader struct {
	in     io.Reader
	path   string
	line   int64        // number of the next block's first line; 0: not known
	offset int64        // of the next block in the text
	read   func() int64 // bytes of a packed file that were read; nil: those of the text
	size   int64        // of the file
	rest   []byte       // the beginning of a line that the next block ends
	end    bool
	free   chan []byte // buffers of blocks that nobody needs any more
}

// newBlocks cuts a file's text from a line on, that begins at an offset. It keeps so many buffers.
func newBlocks(in *container.Text, path string, offset, line int64, buffers int) *blockReader {
	return &blockReader{in: in, path: path, line: line, offset: offset, read: in.At, size: in.Size,
		free: make(chan []byte, buffers)}
}

// next returns the next block; false at the end.
func (r *blockReader) next() (b lineBlock, more bool, err error) {
	if r.end {
		return b, false, nil
	}
	buf := r.buffer()
	n := copy(buf, r.rest)
	whole := 0 // bytes of whole lines
	for whole == 0 && !r.end {
		if n == len(buf) { // a line of more than a block
			buf = append(buf, make([]byte, min(len(buf), maxLine+blockBytes-len(buf)))...)
		}
		k, err := io.ReadFull(r.in, buf[n:])
		n += k
		whole = bytes.LastIndexByte(buf[:n], '\n') + 1
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			r.end, whole = true, n
		case err != nil:
			return b, false, readFailed(r.path, r.lineAfter(buf[:n]), r.offset+int64(n), err)
		case whole == 0 && n >= maxLine:
			line, err := (&lineBlock{path: r.path, line: r.line, offset: r.offset}).lineOf(0)
			if err != nil {
				return b, false, err
			}
			return b, false, errs.New(errs.Usage,
				"%s:%d: line of more than %d bytes; is it a text file?", r.path, line, maxLine)
		}
	}
	r.rest = append(r.rest[:0], buf[whole:n]...)
	b = lineBlock{path: r.path, line: r.line, offset: r.offset, text: buf[:whole], size: r.size}
	r.line, r.offset = r.lineAfter(b.text), r.offset+int64(whole)
	if b.read = r.offset; r.read != nil {
		b.read = r.read()
	}
	return b, true, nil
}

// lineAfter returns the number of the line behind text; 0 where lines are not counted.
func (r *blockReader) lineAfter(text []byte) int64 {
	if r.line == 0 {
		return 0
	}
	return r.line + int64(bytes.Count(text, []byte{'\n'}))
}

// buffer returns a buffer that holds the rest and more.
func (r *blockReader) buffer() []byte {
	if len(r.rest) >= blockBytes {
		return make([]byte, len(r.rest)+blockBytes)
	}
	select {
	case buf := <-r.free:
		return buf
	default:
		return make([]byte, blockBytes)
	}
}

// reuse gives the buffer of a block back.
func (r *blockReader) reuse(text []byte) {
	if cap(text) < blockBytes {
		return
	}
	select {
	case r.free <- text[:blockBytes]:
	default:
	}
}

// readFailed is a failure of the file system, or damage of a compressed stream.
func readFailed(path string, line, offset int64, err error) error {
	class := errs.Usage
	var pe *fs.PathError
	if errors.As(err, &pe) {
		class = errs.Device
	}
	return errs.New(class,
		"%s: truncated or damaged near line %d (byte %d): %w; copy it again", path,
		line, offset, err)
}

// each calls fn with each line of the block, without white space around it, and its number.
func (b *lineBlock) each(fn func(text []byte, line int64) error) error {
	line := b.line
	t := b.text
	if line == 1 {
		t = bytes.TrimPrefix(t, byteOrderMark)
	}
	for ; len(t) > 0; line++ {
		end := bytes.IndexByte(t, '\n')
		next := end + 1
		if end < 0 {
			end, next = len(t), len(t)
		}
		if err := fn(bytes.TrimSpace(t[:end]), line); err != nil {
			return err
		}
		t = t[next:]
	}
	return nil
}

func (b *lineBlock) bad(line int64, format string, a ...any) error {
	return errs.New(errs.Usage, "%s:%d: "+format, append([]any{b.path, line}, a...)...)
}
