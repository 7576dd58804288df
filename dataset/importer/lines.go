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
)

// lineBlock is some whole lines of a text file.
type lineBlock struct {
	path string
	line int64 // number of the first, from 1
	text []byte
	at   int64 // bytes of the file that were read for it, of size
	size int64
}

const blockBytes = 1 << 20

// eachBlock reads a text file, plain or compressed, once: one goroutine unpacks, parse works on
// blocks of whole lines on all cores, and take gets the results in the order of the file, on the
// caller's goroutine. Memory is bounded by a few blocks. What parse returns must not point into the
// block's text.
func eachBlock[T any](ctx context.Context, path string, parse func(lineBlock) (T, error),
	take func(T, lineBlock) error) error {
	in, err := container.OpenText(path)
	if err != nil {
		return err
	}
	defer in.Close()
	type result struct {
		v   T
		b   lineBlock
		err error
	}
	workers := hostcpu.Count()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	queue := make(chan chan result, workers)
	free := make(chan []byte, 2*workers+2)
	go func() {
		defer close(queue)
		send := func(res chan result) bool {
			select {
			case queue <- res:
				return true
			case <-ctx.Done():
				return false
			}
		}
		var rest []byte
		for line, more := int64(1), true; more; {
			var buf []byte
			select {
			case buf = <-free:
			default:
				buf = make([]byte, blockBytes)
			}
			if len(rest) >= len(buf) {
				buf = make([]byte, len(rest)+blockBytes)
			}
			n := copy(buf, rest)
			end := -1 // behind the last whole line
			for end < 0 && more {
				if n == len(buf) { // a line of more than a block
					buf = append(buf, make([]byte, min(len(buf), maxLine+blockBytes-len(buf)))...)
				}
				k, rerr := io.ReadFull(in, buf[n:])
				n += k
				if end = bytes.LastIndexByte(buf[:n], '\n') + 1; end == 0 {
					end = -1
				}
				switch {
				case errors.Is(rerr, io.EOF) || errors.Is(rerr, io.ErrUnexpectedEOF):
					more, end = false, n
				case rerr != nil || end < 0 && n >= maxLine:
					lines := line + int64(bytes.Count(buf[:n], []byte{'\n'}))
					err := errs.New(errs.Usage,
						"%s:%d: line of more than %d bytes; is it a text file?", path, lines,
						maxLine)
					if rerr != nil {
						err = readFailed(path, lines, in.At(), rerr)
					}
					res := make(chan result, 1)
					res <- result{err: err}
					send(res)
					return
				}
			}
			rest = append(rest[:0], buf[end:n]...)
			b := lineBlock{path: path, line: line, text: buf[:end], at: in.At(), size: in.Size}
			line += int64(bytes.Count(b.text, []byte{'\n'}))
			res := make(chan result, 1)
			if !send(res) {
				return
			}
			go func() {
				v, err := parse(b)
				res <- result{v, b, err}
			}()
		}
	}()
	for res := range queue {
		x := <-res
		err := x.err
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			err = take(x.v, x.b)
		}
		if err != nil {
			cancel()
			for res := range queue { // wait for what runs, so that nothing outlives the call
				<-res
			}
			return err
		}
		if cap(x.b.text) >= blockBytes {
			select {
			case free <- x.b.text[:blockBytes]:
			default:
			}
		}
	}
	return ctx.Err()
}

// readFailed is a failure of the file system, or damage of a compressed stream.
func readFailed(path string, line, at int64, err error) error {
	class := errs.Usage
	var pe *fs.PathError
	if errors.As(err, &pe) {
		class = errs.Device
	}
	return errs.New(class,
		"%s: truncated or damaged near line %d (byte %d): %w; copy it again", path,
		line, at, err)
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

// csvEdges are the edges of a file with two ids a line, source first. want is how many there must
// be; -1 = any number. With inverse, the opposite of each follows it, as OGB adds it.
func csvEdges(path string, nodes, want int64, inverse bool) edges.Source {
	s := edges.Source{Name: path, Unit: "bytes", Parts: 1}
	if st, err := os.Stat(path); err == nil {
		s.Total = st.Size()
	}
	type pairs struct{ src, dst []int64 }
	s.Read = func(ctx context.Context, _ int, emit func(src, dst []int64) error,
		done func(int64)) error {
		var at, n int64
		err := eachBlock(ctx, path, func(b lineBlock) (p pairs, err error) {
			p.src = make([]int64, 0, len(b.text)/6)
			p.dst = make([]int64, 0, len(b.text)/6)
			err = b.each(func(s []byte, line int64) error {
				if len(s) == 0 {
					return b.bad(line, "the line is empty")
				}
				t := s
				var id [2]int64
				for i := range id {
					f, rest, more := cutComma(t)
					if more != (i == 0) {
						return b.bad(line,
							"%q is not an edge; two node ids with a comma between them are needed",
							clip(s))
					}
					t = rest
					v, ok := parseID(f)
					if !ok {
						return b.bad(line, "%q is not a node id; ids are whole numbers from 0",
							clip(f))
					}
					if v >= nodes {
						return b.bad(line, "node id %d in column %d is outside 0..%d", v, i+1,
							nodes-1)
					}
					id[i] = v
				}
				p.src, p.dst = append(p.src, id[0]), append(p.dst, id[1])
				if inverse {
					p.src, p.dst = append(p.src, id[1]), append(p.dst, id[0])
				}
				return nil
			})
			return p, err
		}, func(p pairs, b lineBlock) error {
			n += int64(len(p.src))
			done(b.at - at)
			at = b.at
			return emit(p.src, p.dst)
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
