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
	"helios/internal/work"
)

// lineBlock is some whole lines of a text file.
type lineBlock struct {
	path string
	line int64 // number of the first, from 1
	text []byte
	read int64 // bytes of the file that were read for it, of size
	size int64
}

const blockBytes = 1 << 20

// eachBlock reads a text file, plain or compressed, once: one goroutine unpacks, parse works on
// blocks of whole lines on all cores, and take gets the results in the order of the file, on the
// caller's goroutine. Memory is bounded by a few blocks. The result of parse must not point into
// the block's text.
func eachBlock[T any](ctx context.Context, path string, parse func(lineBlock) (T, error),
	take func(T, lineBlock) error) error {
	in, err := container.OpenText(path)
	if err != nil {
		return err
	}
	defer in.Close()
	r := blockReader{in: in, path: path, line: 1,
		free: make(chan []byte, 2*hostcpu.Count()+2)}
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
	in   *container.Text
	path string
	line int64  // number of the next block's first line
	rest []byte // the beginning of a line that the next block ends
	end  bool
	free chan []byte // buffers of blocks that nobody needs any more
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
			return b, false, readFailed(r.path, r.lineAfter(buf[:n]), r.in.At(), err)
		case whole == 0 && n >= maxLine:
			return b, false, errs.New(errs.Usage,
				"%s:%d: line of more than %d bytes; is it a text file?", r.path,
				r.lineAfter(buf[:n]), maxLine)
		}
	}
	r.rest = append(r.rest[:0], buf[whole:n]...)
	b = lineBlock{path: r.path, line: r.line, text: buf[:whole], read: r.in.At(), size: r.in.Size}
	r.line = r.lineAfter(b.text)
	return b, true, nil
}

// lineAfter returns the number of the line behind text.
func (r *blockReader) lineAfter(text []byte) int64 {
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
