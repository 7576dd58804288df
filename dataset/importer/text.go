package importer

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	tables "helios/dataset/table"
	"helios/internal/container"
	"helios/internal/errs"
)

// lines reads a text file, plain or compressed, in bounded memory.
type lines struct {
	path   string
	n      int64  // number of the line in text, from 1
	offset int64  // offset of the line after text
	text   []byte // without white space around it
	in     *container.Text
	blocks *blockReader
	block  []byte
	rest   []byte // of the block
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
	return &lines{path: path, in: in, blocks: newBlocks(in, path, 0, 1, 1)}, nil
}

func (l *lines) close() error { return l.in.Close() }

// raw reads the next line; false at the end.
func (l *lines) raw() (bool, error) {
	for len(l.rest) == 0 {
		l.blocks.reuse(l.block)
		b, more, err := l.blocks.next()
		if err != nil || !more {
			return false, err
		}
		l.block, l.rest = b.text, b.text
	}
	text := l.rest[:nextLine(l.rest, 0)]
	l.rest = l.rest[len(text):]
	l.offset += int64(len(text))
	if l.n++; l.n == 1 {
		text = bytes.TrimPrefix(text, byteOrderMark)
	}
	l.text = bytes.TrimSpace(text)
	return true, nil
}

// next reads the next line that is neither empty nor a comment; false at the end.
func (l *lines) next() (bool, error) {
	for {
		if more, err := l.raw(); !more || err != nil {
			return false, err
		}
		if len(l.text) > 0 && !isComment(l.text) {
			return true, nil
		}
	}
}

// isComment reports whether a line begins as comments do: # of Python and SNAP, % of METIS, KONECT
// and MATLAB.
func isComment(text []byte) bool { return text[0] == '#' || text[0] == '%' }

func (l *lines) bad(format string, a ...any) error {
	return errs.New(errs.Usage, "%s:%d: "+format, append([]any{l.path, l.n}, a...)...)
}

// splitter cuts the lines of a file at its separator.
type splitter struct {
	sep   byte
	cells [][]byte
	text  bytes.Reader
	csv   *csv.Reader
}

// split cuts a line strictly: a separator is a border, wherever it is. The cells are valid until
// the next call. Lines with quotes are for encoding/csv.
func (s *splitter) split(line []byte) ([][]byte, error) {
	s.cells = s.cells[:0]
	if bytes.IndexByte(line, '"') >= 0 {
		return s.quoted(line)
	}
	for rest := line; ; {
		var i int
		if s.sep == tables.Blank {
			rest = bytes.TrimLeft(rest, " \t")
			i = bytes.IndexAny(rest, " \t")
		} else {
			i = bytes.IndexByte(rest, s.sep)
		}
		cell := rest
		if i >= 0 {
			cell = rest[:i]
		}
		if n := len(cell); n > 0 && (cell[0] <= ' ' || cell[n-1] <= ' ') {
			cell = bytes.TrimSpace(cell)
		}
		if s.cells = append(s.cells, cell); i < 0 {
			return s.cells, nil
		}
		rest = rest[i+1:]
	}
}

func (s *splitter) quoted(line []byte) ([][]byte, error) {
	if s.csv == nil {
		s.csv = csv.NewReader(&s.text)
		s.csv.Comma, s.csv.FieldsPerRecord, s.csv.ReuseRecord = rune(s.sep), -1, true
		s.csv.TrimLeadingSpace = s.sep != '\t'
	}
	s.text.Reset(line)
	record, err := s.csv.Read()
	var pe *csv.ParseError
	if errors.As(err, &pe) {
		err = pe.Err // its line and column are of the piece
	}
	for _, r := range record {
		s.cells = append(s.cells, []byte(strings.TrimSpace(r)))
	}
	return s.cells, err
}

// why returns the fault of a cell that should be a number.
func (s *splitter) why(cell []byte, column int) string {
	switch {
	case len(cell) == 0:
		return fmt.Sprintf("column %d is empty", column)
	case decimalComma(cell):
		return fmt.Sprintf("%q in column %d has a decimal comma; write a point", clip(cell), column)
	case bytes.ContainsAny(cell, " \t,;|"):
		return fmt.Sprintf(
			"%q in column %d is not a number; by its first line, the file's columns are separated by %s",
			clip(cell), column, tables.SeparatorNames[s.sep])
	}
	return fmt.Sprintf("%q in column %d is not a number", clip(cell), column)
}

// decimalComma reports whether a cell is a number such as 1,5.
func decimalComma(cell []byte) bool {
	return bytes.Count(cell, []byte{','}) == 1 &&
		isNumber(bytes.Replace(cell, []byte{','}, []byte{'.'}, 1))
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

// isNumber tells a bad edge (1,-2 or 1,x) from a heading, which has no number.
func isNumber(b []byte) bool {
	_, err := strconv.ParseFloat(string(b), 64)
	return err == nil || errors.Is(err, strconv.ErrRange)
}

func clip(b []byte) string {
	if len(b) > 40 {
		return string(b[:40]) + "…"
	}
	return string(b)
}

// A heading is a line of names. Its columns are known by these, in small letters and without
// spaces, "_", "-", "#" and ":".
var (
	idNames = []string{"id", "ids", "node", "nodes", "nodeid", "nodeids", "nodeidx", "nodeindex",
		"nid", "vid", "vertex", "vertexid"}
	// indexNames are pandas' names for the index of a table.
	indexNames = []string{"", "index", "idx", "unnamed0", "level0"}
	classNames = []string{"label", "labels", "class", "classes", "y", "target", "category",
		"nodelabel"}
	// endpointNames name the two ends of an edge, source first, without "node" and "id" behind.
	endpointNames = [][2]string{{"src", "dst"}, {"source", "target"}, {"source", "destination"},
		{"source", "dest"}, {"src", "dest"}, {"from", "to"}, {"head", "tail"}, {"u", "v"},
		{"node1", "node2"}, {"node0", "node1"}, {"id1", "id2"}, {"row", "col"}, {"i", "j"},
		{"start", "end"}, {"citing", "cited"}, {"follower", "followee"}, {"parent", "child"}}
	// missingNames stand for a value that is not there, and not for a column.
	missingNames = []string{"none", "null", "na", "n/a", "nil", "unknown", "missing", "?", "-", "."}
)

// plainName is a name of a column as the lists above have it.
func plainName(name string) string {
	return strings.NewReplacer(" ", "", "_", "", "-", "", "#", "", ":", "").Replace(
		strings.ToLower(strings.TrimSpace(name)))
}

func named(name string, in []string) bool { return slices.Contains(in, plainName(name)) }

// endsInID reports whether a name is like paper_id or paperId.
func endsInID(name string) bool {
	return strings.HasSuffix(name, "Id") || strings.HasSuffix(name, "ID") ||
		strings.HasSuffix(strings.ToLower(name), "_id") || strings.HasSuffix(name, " id")
}

// counting reports whether cells are 0, 1, 2 and so on: pandas gives columns without names these.
func counting(cells [][]byte) bool {
	for i, c := range cells {
		if string(c) != strconv.Itoa(i) {
			return false
		}
	}
	return true
}

// endpoints finds the columns of the two ends of an edge by their names.
func endpoints(names []string) (src, dst int, ok bool) {
	plain := make([]string, len(names))
	for i, n := range names {
		plain[i] = plainName(n)
		for _, end := range []string{"idx", "id", "node", "vertex"} {
			plain[i] = strings.TrimSuffix(plain[i], end)
		}
	}
	for _, p := range endpointNames {
		src, dst = slices.Index(plain, p[0]), slices.Index(plain, p[1])
		// Of tail and head in this order, either may be the source.
		if src >= 0 && dst >= 0 && (src < dst || p[0] != "head") {
			return src, dst, true
		}
	}
	return 0, 0, false
}

// namesOf returns the names of a heading's columns, or nil where a line is none.
func namesOf(cells [][]byte) (names []string) {
	numbers, words := 0, 0
	for _, c := range cells {
		if isNumber(c) {
			numbers++
		} else if decimalComma(c) {
			return nil
		} else if len(c) > 0 && !slices.Contains(missingNames, strings.ToLower(string(c))) {
			words++
		}
		names = append(names, string(c))
	}
	if first := names[0]; numbers == len(cells)-1 && numbers > 0 && counting(cells[1:]) &&
		(named(first, indexNames) || named(first, idNames)) {
		return names
	}
	if words == 0 || numbers > 0 || words < len(cells)-1 || words < len(cells) && names[0] != "" {
		return nil
	}
	return names
}
