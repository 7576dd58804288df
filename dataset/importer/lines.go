package importer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	"helios/dataset/edges"
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

// cutComma returns the field before the first comma, and the rest; more is false in the last field.
func cutComma(s []byte) (field, rest []byte, more bool) {
	i := bytes.IndexByte(s, ',')
	if i < 0 {
		return bytes.TrimSpace(s), nil, false
	}
	return bytes.TrimSpace(s[:i]), s[i+1:], true
}

// csvEdges returns the edges of a file with two ids a line, source first. want is their number; -1
// = any number. With inverse, the opposite of each follows it, as OGB adds it.
func csvEdges(path string, nodes, want int64, inverse bool) edges.Source {
	s := edges.Source{Name: path, Unit: "bytes", Parts: 1}
	if st, err := os.Stat(path); err == nil {
		s.Total = st.Size()
	}
	s.Read = func(ctx context.Context, _ int, emit func(src, dst []int64) error,
		done func(int64)) error {
		var read, n int64
		err := eachBlock(ctx, path, func(b lineBlock) (edgeBlock, error) {
			return parseEdges(b, nodes, inverse)
		}, func(e edgeBlock, b lineBlock) error {
			n += int64(len(e.src))
			done(b.read - read)
			read = b.read
			return emit(e.src, e.dst)
		})
		if inverse {
			n /= 2
		}
		if err == nil && want >= 0 && n != want {
			err = errs.New(errs.Usage, "%s has %d edges, there should be %d", path, n, want)
		}
		return err
	}
	return s
}

type edgeBlock struct{ src, dst []int64 }

// parseEdges reads two ids a line, and nothing else.
func parseEdges(b lineBlock, nodes int64, inverse bool) (e edgeBlock, err error) {
	e.src = make([]int64, 0, len(b.text)/6)
	e.dst = make([]int64, 0, len(b.text)/6)
	err = b.each(func(text []byte, line int64) error {
		if len(text) == 0 {
			return b.bad(line, "the line is empty")
		}
		rest := text
		var id [2]int64
		for i := range id {
			var field []byte
			var more bool
			if field, rest, more = cutComma(rest); more != (i == 0) {
				return b.bad(line,
					"%q is not an edge; two node ids with a comma between them are needed",
					clip(text))
			}
			v, ok := parseID(field)
			if !ok {
				return b.bad(line, "%q is not a node id; ids are whole numbers from 0",
					clip(field))
			}
			if v >= nodes {
				return b.bad(line, "node id %d in column %d is outside 0..%d", v, i+1, nodes-1)
			}
			id[i] = v
		}
		e.src, e.dst = append(e.src, id[0]), append(e.dst, id[1])
		if inverse {
			e.src, e.dst = append(e.src, id[1]), append(e.dst, id[0])
		}
		return nil
	})
	return e, err
}
