package importer

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"helios/dataset/edges"
	"helios/internal/container"
	"helios/internal/errs"
)

var mtxFormat = newFormat(Format{Name: "mtx",
	Usage:       "sparse square matrices in MatrixMarket's coordinate format, plain or compressed",
	Description: mtxHelp}, MTX)

const mtxHelp = "Entry (i, j) becomes the edge from node i-1 to node j-1, whatever its value; one triangle of a symmetric,\n" +
	"skew-symmetric or Hermitian matrix stands for both. Features, labels and splits come from\n" +
	"{features}, {labels} and {splits}."

// MTX imports the pattern of a sparse matrix in MatrixMarket's format, plain or compressed: entry
// (i, j) becomes the edge i-1 → j-1, whatever its value, and in a symmetric, skew-symmetric
// or Hermitian matrix, of which a file holds one triangle, also j-1 → i-1. The matrix must be
// square.
func MTX(ctx context.Context, o Options) error {
	if err := o.fillMadeUp(); err != nil {
		return err
	}
	m, err := openMTX(o.In)
	if err != nil {
		return err
	}
	if err := o.needFeaturesSoon(m.path); err != nil {
		return err
	}
	return run(request{kind: "mtx", options: &o, Options: o}, func(im *importer) error {
		im.m.Nodes = m.n
		im.m.Source.Options["matrix"] = m.field + " " + m.symmetry
		if m.values > 0 {
			o.note("not used of %s: the values of its entries; models take no edge weights", m.path)
		}
		return im.around(ctx, m.path, m.edges())
	})
}

// mtx is a matrix whose two heading lines were read.
type mtx struct {
	path            string
	packed          bool
	field, symmetry string
	values          int   // numbers after i and j
	n, entries      int64 // rows and columns; lines
	// bytes: where the entries begin (of the text that was read), and of the file
	begin, size int64
}

// mtxPartBytes is the least that a part of a plain file has.
var mtxPartBytes int64 = 8 << 20

func openMTX(path string) (*mtx, error) {
	in, err := container.OpenText(path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	m := &mtx{path: path, packed: in.Packed, size: in.Size}
	t := m.text(in, 0)
	if err := m.heading(t); err != nil {
		return nil, err
	}
	m.begin = t.pos
	if m.parts() == 1 {
		return m, nil // counted as it is read
	}
	return m, m.count(in.File)
}

// mtxText is the lines of a file, or of a part of one.
type mtxText struct {
	path string
	br   *bufio.Reader
	pos  int64 // bytes read
	line int64 // where the last line began
	text []byte
}

// text reads lines from r, whose first byte is at begin.
func (m *mtx) text(r io.Reader, begin int64) *mtxText {
	return &mtxText{path: m.path, pos: begin, br: bufio.NewReaderSize(r, 1<<20)}
}

// from reads the lines of a plain file from begin on.
func (m *mtx) from(f *os.File, begin int64) *mtxText {
	return m.text(io.NewSectionReader(f, begin, m.size-begin), begin)
}

func (t *mtxText) bad(format string, a ...any) error {
	return errs.New(errs.Usage, "%s: byte %d: "+format, append([]any{t.path, t.line}, a...)...)
}

// next reads a line; false at the end.
func (t *mtxText) next() (bool, error) {
	t.line = t.pos
	text, err := t.br.ReadSlice('\n')
	t.pos += int64(len(text))
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return false, t.bad("line of more than %d bytes; is it a MatrixMarket file?", len(text))
	case err != nil && !errors.Is(err, io.EOF):
		return false, t.bad("truncated or damaged: %w", err)
	case err != nil && len(text) == 0:
		return false, nil
	}
	t.text = bytes.TrimSpace(text)
	return true, nil
}

// heading reads the banner, the comments and the line of sizes (Boisvert, Pozo and Remington, "The
// Matrix Market exchange formats", NISTIR 5935).
func (m *mtx) heading(t *mtxText) error {
	if more, err := t.next(); err != nil {
		return err
	} else if !more {
		return t.bad("the file is empty")
	}
	b := strings.Fields(strings.ToLower(string(clipTo(t.text, 200))))
	if len(b) != 5 || b[0] != "%%matrixmarket" {
		return t.bad("%q is not \"%%%%MatrixMarket matrix coordinate FIELD SYMMETRY\"",
			clip(t.text))
	}
	if b[1] != "matrix" || b[2] != "coordinate" {
		return t.bad("a %s in %s format; only matrices in coordinate format are graphs",
			brief(b[1]), brief(b[2]))
	}
	m.field, m.symmetry = b[3], b[4]
	var ok bool
	if m.values, ok = map[string]int{"pattern": 0, "real": 1, "double": 1, "integer": 1,
		"complex": 2}[m.field]; !ok {
		return t.bad("numbers of kind %q are not known (pattern, real, integer, complex)", m.field)
	}
	switch m.symmetry {
	case "general", "symmetric":
	case "skew-symmetric":
		ok = m.field != "pattern"
	case "hermitian":
		ok = m.field == "complex"
	default:
		return t.bad("symmetry %q is not known (general, symmetric, skew-symmetric, hermitian)",
			m.symmetry)
	}
	if !ok {
		return t.bad("a matrix cannot be %s and %s", m.field, m.symmetry)
	}
	return m.sizes(t)
}

// sizes reads the line of sizes behind the comments.
func (m *mtx) sizes(t *mtxText) error {
	for {
		more, err := t.next()
		if err != nil {
			return err
		}
		if !more {
			return t.bad("the file ends before the line of sizes")
		}
		if len(t.text) > 0 && t.text[0] != '%' {
			break
		}
	}
	f := bytes.Fields(t.text)
	var n [3]int64
	for i := range n {
		ok := false
		if len(f) == 3 {
			n[i], ok = parseID(f[i])
		}
		if len(f) != 3 || !ok {
			return t.bad("%q is not \"ROWS COLUMNS ENTRIES\"", clip(t.text))
		}
	}
	if n[0] != n[1] {
		return t.bad(
			"a matrix of %d × %d is a bipartite graph, whose rows and columns are different nodes; only square matrices are imported",
			n[0], n[1])
	}
	if n[0] < 1 || n[0] > maxTextNodes {
		return t.bad("a matrix of %d rows; 1 to %d are read", n[0], int64(maxTextNodes))
	}
	m.n, m.entries = n[0], n[2]
	return nil
}

func clipTo(b []byte, n int) []byte { return b[:min(n, len(b))] }

func (m *mtx) parts() int {
	if m.packed {
		return 1
	}
	return int(min(max((m.size-m.begin)/mtxPartBytes, 1), 1024))
}

// count compares the lines of entries with the heading, so that a file cut off at a line's end is
// not sorted for hours. Line ends are counted first, which is fast, and lines only where that does
// not agree.
func (m *mtx) count(f *os.File) error {
	n, last := int64(0), byte('\n')
	buf := make([]byte, 1<<20)
	for pos := m.begin; pos < m.size; {
		k, err := f.ReadAt(buf[:min(int64(len(buf)), m.size-pos)], pos)
		if k == 0 {
			return fmt.Errorf("%s: byte %d: %w", m.path, pos, err)
		}
		n += int64(bytes.Count(buf[:k], []byte{'\n'}))
		last = buf[k-1]
		pos += int64(k)
	}
	if last != '\n' {
		n++
	}
	if n == m.entries {
		return nil
	}
	t := m.from(f, m.begin)
	for n = 0; ; {
		more, err := t.next()
		if err != nil {
			return err
		}
		if !more {
			break
		}
		if len(t.text) > 0 && t.text[0] != '%' {
			n++
		}
	}
	if n != m.entries {
		return t.bad(
			"the file ends after %d of %d entries: truncated, or its line of sizes is wrong", n,
			m.entries)
	}
	return nil
}

// edges gives the entries as edges. A plain file is cut at line ends.
func (m *mtx) edges() edges.Source {
	parts := m.parts()
	cut := func(i int) int64 { return m.begin + (m.size-m.begin)/int64(parts)*int64(i) }
	return edges.Source{
		Name: m.path, Unit: "edges", Total: m.entries, Parts: parts,
		Read: func(ctx context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			in, err := container.OpenText(m.path)
			if err != nil {
				return err
			}
			defer in.Close()
			begin, end := cut(part), m.size
			if part+1 < parts {
				end = cut(part + 1)
			}
			var t *mtxText
			switch {
			case m.packed:
				t = m.text(in, 0)
				end = 1 << 62
				for err == nil && t.pos < m.begin { // the heading again
					_, err = t.next()
				}
			case part == 0:
				t = m.from(in.File, begin)
			default: // the line across the cut belongs to the part before
				t = m.from(in.File, begin-1)
				_, err = t.next()
			}
			if err != nil {
				return err
			}
			return m.read(ctx, t, end, parts == 1, emit, done)
		},
	}
}

// read emits the entries whose lines begin before end.
func (m *mtx) read(ctx context.Context, t *mtxText, end int64, whole bool,
	emit func(src, dst []int64) error, done func(int64)) error {
	const batch = 8 << 10
	src, dst := make([]int64, 0, 2*batch), make([]int64, 0, 2*batch)
	n, total := int64(0), int64(0)
	flush := func() error {
		if err := emit(src, dst); err != nil {
			return err
		}
		src, dst = src[:0], dst[:0]
		done(n)
		total += n
		n = 0
		return ctx.Err()
	}
	for t.pos < end {
		more, err := t.next()
		if err != nil {
			return err
		}
		if !more {
			break
		}
		if len(t.text) == 0 || t.text[0] == '%' {
			continue
		}
		i, j, err := m.entry(t)
		if err != nil {
			return err
		}
		src, dst = append(src, i), append(dst, j)
		if m.symmetry != "general" && i != j {
			src, dst = append(src, j), append(dst, i)
		}
		if n++; n == batch {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if err := flush(); err != nil {
		return err
	}
	if whole && total != m.entries {
		t.line = t.pos
		return t.bad(
			"the file ends after %d of %d entries: truncated, or its line of sizes is wrong", total,
			m.entries)
	}
	return nil
}

// entry reads a line "I J [VALUE …]"; i and j count from 0.
func (m *mtx) entry(t *mtxText) (i, j int64, err error) {
	var f [5][]byte
	k := 0
	for rest := t.text; len(rest) > 0 && k < len(f); k++ {
		e := bytes.IndexAny(rest, " \t")
		if e < 0 {
			e = len(rest)
		}
		f[k] = rest[:e]
		rest = bytes.TrimLeft(rest[e:], " \t")
	}
	if k != 2+m.values {
		return 0, 0, t.bad("%q has %d numbers; an entry of a %s matrix has %d", clip(t.text), k,
			m.field, 2+m.values)
	}
	for c, to := range []*int64{&i, &j} {
		v, ok := parseID(f[c])
		if !ok || v < 1 || v > m.n {
			return 0, 0, t.bad("%q is not a row or column from 1 to %d", clip(f[c]), m.n)
		}
		*to = v - 1
	}
	for _, v := range f[2:k] {
		if _, err := strconv.ParseFloat(string(v), 64); err != nil {
			return 0, 0, t.bad("%q is not a number", clip(v))
		}
	}
	switch {
	case m.symmetry == "general":
	case j > i:
		return 0, 0,
			t.bad(
				"entry (%d, %d) is above the diagonal, a %s matrix holds the lower triangle only; call it general and give option undirected",
				i+1, j+1, m.symmetry)
	case i == j && m.symmetry == "skew-symmetric":
		return 0, 0,
			t.bad("entry (%d, %d) is on the diagonal of a skew-symmetric matrix, which is 0",
				i+1, j+1)
	}
	return i, j, nil
}
