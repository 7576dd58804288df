package importer

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math"
	"slices"
	"strconv"

	"helios/internal/container"
	"helios/internal/errs"
)

// lines reads a text file, plain or compressed, in bounded memory.
type lines struct {
	path   string
	n      int64 // of the line in text, from 1
	text   []byte
	fields [][]byte
	in     *container.Text
	br     *bufio.Reader
	long   []byte
}

// byteOrderMark begins text in UTF-8 from Windows programs.
var byteOrderMark = []byte("\xef\xbb\xbf")

// maxLine bounds a line: 16 MiB holds a row of maxDim features in text.
const maxLine = 16 << 20

func openLines(path string) (*lines, error) {
	in, err := container.OpenText(path)
	if err != nil {
		return nil, err
	}
	return &lines{path: path, in: in, br: bufio.NewReaderSize(in, 256<<10)}, nil
}

func (l *lines) close() error { return l.in.Close() }

// next reads the next line that holds fields; false at the end.
func (l *lines) next() (bool, error) {
	for {
		text, err := l.br.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			l.long = append(l.long[:0], text...)
			for errors.Is(err, bufio.ErrBufferFull) && len(l.long) < maxLine {
				text, err = l.br.ReadSlice('\n')
				l.long = append(l.long, text...)
			}
			if errors.Is(err, bufio.ErrBufferFull) {
				return false, errs.New(errs.Usage,
					"%s:%d: line of more than %d bytes; is it a text file?", l.path, l.n+1, maxLine)
			}
			text = l.long
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return false, errs.New(errs.Usage, "%s:%d: truncated or damaged: %w", l.path,
				l.n+1, err)
		}
		if len(text) == 0 && err != nil {
			return false, nil
		}
		if l.n++; l.n == 1 {
			text = bytes.TrimPrefix(text, byteOrderMark)
		}
		l.text = bytes.TrimSpace(text)
		if len(l.text) == 0 || l.text[0] == '#' || l.text[0] == '%' {
			continue
		}
		l.split()
		return true, nil
	}
}

// split cuts at commas, semicolons, tabs and spaces; white space around a comma does not make
// a field.
func (l *lines) split() {
	l.fields = l.fields[:0]
	t := l.text
	for i := 0; i < len(t); {
		j := i
		for j < len(t) && t[j] != ',' && t[j] != ';' && t[j] != '\t' && t[j] != ' ' {
			j++
		}
		l.fields = append(l.fields, t[i:j])
		for j < len(t) && (t[j] == ' ' || t[j] == '\t') {
			j++
		}
		if j < len(t) && (t[j] == ',' || t[j] == ';') {
			j++
			for j < len(t) && (t[j] == ' ' || t[j] == '\t') {
				j++
			}
		}
		i = j
	}
}

func (l *lines) bad(format string, a ...any) error {
	return errs.New(errs.Usage, "%s:%d: "+format, append([]any{l.path, l.n}, a...)...)
}

// parseID reads a node id without allocating. ok is false for anything but digits that fit.
func parseID(b []byte) (id int64, ok bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		id = id*10 + int64(c-'0')
	}
	return id, true
}

// maxTextNodes bounds the nodes that the largest id of an edge list can stand for: beyond it, a
// stray number would make features and offsets of terabytes.
const maxTextNodes = 1 << 36

// heading says whether the line may be one: the first, without a number.
func (l *lines) heading() bool { return l.n == 1 && !slices.ContainsFunc(l.fields, isNumber) }

// isNumber tells a bad edge (1,-2 or 1,x) from a heading, which has no number.
func isNumber(b []byte) bool {
	_, err := strconv.ParseFloat(string(b), 64)
	return err == nil
}

func clip(b []byte) string {
	if len(b) > 40 {
		return string(b[:40]) + "…"
	}
	return string(b)
}

// numbers parses all fields of a line as float32.
func (l *lines) numbers(dst []float32) ([]float32, error) {
	dst = dst[:0]
	for i, f := range l.fields {
		x, err := strconv.ParseFloat(string(f), 32)
		if errors.Is(err, strconv.ErrRange) && math.IsInf(x, 0) {
			return dst, l.bad("%q in column %d is more than float32 can hold; scale the features",
				clip(f), i+1)
		}
		if err != nil && !errors.Is(err, strconv.ErrRange) {
			return dst, l.bad("%q in column %d is not a number", clip(f), i+1)
		}
		dst = append(dst, float32(x))
	}
	return dst, nil
}
