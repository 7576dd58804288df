package importer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	tables "helios/dataset/table"
	"helios/internal/errs"
)

// table is a text file with one row a line: of features, labels or a split.
type table struct {
	path string
	kind string // "features", "labels" or "splits", as options name it
	sep  byte
	from int64 // number of the line of the first row
	cols int   // cells of a line; 0: the file has no row
	id   int   // column of node ids; -1: the rows are in the order of the nodes
	take []int // columns of values
	// asked says that the columns are known to hold no ids, or to hold them.
	asked   bool
	names   []string // of the columns, where there is a heading
	heading int64    // lines of it that are no comment
	named   bool     // comments amid the rows are named
}

// tableKinds are the files that the options header and id-column tell apart.
var tableKinds = []string{"edges", "features", "labels", "splits"}

// PerFile is an option of text files: a value for all of them, or for some, as in
// "features=yes,labels=no".
type PerFile map[string]string

// UnmarshalText reads VALUE or KIND=VALUE[,…].
func (p *PerFile) UnmarshalText(text []byte) error {
	*p = PerFile{}
	for part := range strings.SplitSeq(string(text), ",") {
		kind, value, some := strings.Cut(part, "=")
		if !some {
			kind, value = "", part
		}
		if some && !slices.Contains(tableKinds, kind) {
			return fmt.Errorf("%q: %q is none of %s", part, kind, strings.Join(tableKinds, ", "))
		}
		if _, again := (*p)[kind]; again {
			return fmt.Errorf("%q is given twice", part)
		}
		(*p)[kind] = value
	}
	return nil
}

// of returns what was given for a kind of file.
func (p PerFile) of(kind string) string {
	if v, ok := p[kind]; ok {
		return v
	}
	return p[""]
}

// columnTable is a file of one column whose form a format lays down: no heading, no ids.
func columnTable(path, kind string) *table {
	return &table{path: path, kind: kind, sep: ',', cols: 1, id: -1, take: []int{0}}
}

// tableOf finds out how a file is cut that the user named, or else takes it as a format's own: a
// row for each node, without a heading.
func (im *importer) tableOf(ctx context.Context, kind, path string, users bool) (*table, error) {
	if users {
		key := kind + " " + path
		if t := im.tables[key]; t != nil {
			return t, nil
		}
		t, err := im.openTable(ctx, kind, path)
		if err == nil {
			if im.tables == nil {
				im.tables = map[string]*table{}
			}
			im.tables[key] = t
		}
		return t, err
	}
	if kind != "features" {
		return columnTable(path, kind), nil
	}
	h, err := readTableHead(path)
	if err != nil {
		return nil, err
	}
	h.kind, h.from, h.cols, h.asked = kind, 1, len(h.first), true
	for i := range h.first {
		h.take = append(h.take, i)
	}
	return h.table, nil
}

// tableHead is the beginning of a file that openTable goes by.
type tableHead struct {
	*table
	l       *lines
	comment string // the last before the first line
	first   [][]byte
	next    [][][]byte // some rows after it
}

// openTable finds out how a file is cut, whether it has a heading, and which column holds ids.
func (im *importer) openTable(ctx context.Context, kind, path string) (*table, error) {
	h, err := readTableHead(path)
	if err != nil || h.first == nil {
		return h.table, err
	}
	h.kind = kind
	names, err := im.headingOf(ctx, h)
	if err != nil {
		return nil, err
	}
	h.cols, h.names = len(h.first), names
	if names == nil {
		h.from = h.l.n
	} else if h.from > h.l.n {
		h.heading = 1
	}
	if err := im.columnsOf(h); err != nil {
		return nil, err
	}
	return h.table, nil
}

// sampleRows is the number of rows after the first line that are looked at.
const sampleRows = 32

func readTableHead(path string) (*tableHead, error) {
	l, err := openLines(path)
	if err != nil {
		return nil, err
	}
	defer l.close()
	h := &tableHead{table: &table{path: path, id: -1}, l: &lines{path: path}}
	s := splitter{}
	for len(h.next) < sampleRows {
		more, err := l.raw()
		if err != nil || !more {
			return h, err
		}
		if len(l.text) == 0 {
			continue
		}
		if isComment(l.text) {
			if h.first == nil {
				h.comment = string(l.text[1:])
			}
			continue
		}
		text := bytes.Clone(l.text)
		if h.first == nil {
			h.l.n = l.n
			text = closeQuotes(l, text)
			h.sep = tables.SeparatorOf(text)
			s.sep, h.from = h.sep, l.n+1
		}
		cells, err := s.split(text)
		if err != nil && h.first == nil {
			return nil, h.l.bad("%w", err)
		}
		own := make([][]byte, len(cells))
		for i := range cells {
			own[i] = bytes.Clone(cells[i])
		}
		if h.first == nil {
			h.first = own
		} else {
			h.next = append(h.next, own)
		}
	}
	return h, nil
}

// closeQuotes adds the lines to text that a quoted cell goes on in.
func closeQuotes(l *lines, text []byte) []byte {
	for n := 0; bytes.Count(text, []byte{'"'})%2 == 1 && n < sampleRows; n++ {
		if more, err := l.raw(); err != nil || !more {
			break // the quotes are not closed, as split says
		}
		text = append(append(text, '\n'), l.text...)
	}
	return text
}

// headingOf returns the names of the columns, or nil where the first line is a row. Where it may be
// either, the number of nodes decides, or the user.
func (im *importer) headingOf(ctx context.Context, h *tableHead) ([]string, error) {
	names := namesOf(h.first)
	if names == nil {
		if n := h.commentNames(); n != nil {
			h.from = h.l.n
			return n, nil
		}
	}
	switch given := im.o.Header.of(h.kind); {
	case given == "no":
		return nil, nil
	case given == "yes":
		return h.cellsAsNames(), nil
	case names != nil:
		return names, nil
	}
	for i, c := range h.first {
		if !isNumber(c) && h.kind == "features" {
			return nil, h.l.bad("%s; if the line names the columns, give {header} features=yes",
				(&splitter{sep: h.sep}).why(c, i+1))
		}
	}
	// A split that begins with node 0 is common; two that do are refused as having it twice.
	if counting(h.first) && h.kind != "splits" && (h.kind == "features" || len(h.first) == 1) {
		heading, err := im.countsAreHeading(ctx, h)
		if err != nil || !heading {
			return nil, err
		}
		im.o.note("%s: line %d, 0 to %d, is taken for a heading", h.path, h.l.n, len(h.first)-1)
		return h.cellsAsNames(), nil
	}
	return nil, nil
}

// cellsAsNames takes the cells of the first line for names.
func (h *tableHead) cellsAsNames() []string {
	for _, c := range h.first {
		h.names = append(h.names, string(c))
	}
	return h.names
}

// commentNames returns the names of columns that the comment before the first line has, one of
// which is a name of ids.
func (h *tableHead) commentNames() []string {
	if h.comment == "" {
		return nil
	}
	s := splitter{sep: h.sep}
	cells, err := s.split([]byte(strings.TrimSpace(h.comment)))
	if err != nil || len(cells) != len(h.first) || len(cells) < 2 {
		return nil
	}
	names := namesOf(cells)
	if !slices.ContainsFunc(names, func(n string) bool { return named(n, idNames) }) {
		return nil
	}
	return names
}

// countsAreHeading decides whether the first line, 0, 1, 2 and so on, names columns, as pandas has
// it write those without names.
func (im *importer) countsAreHeading(ctx context.Context, h *tableHead) (bool, error) {
	rows, err := countRows(ctx, h.path)
	if err != nil || rows == im.m.Nodes || rows == 1 {
		return false, err
	}
	several := len(h.first) > 1
	if im.m.Nodes > 0 {
		if rows-1 == im.m.Nodes && !several {
			return false, errs.New(errs.Usage,
				"%s has %d rows, there are %d nodes; if line %d is a heading, give {header} %s=yes",
				h.path, rows, im.m.Nodes, h.l.n, h.kind)
		}
		return rows-1 == im.m.Nodes, nil
	}
	// Numbers with a point in all cells but the first line's: that has another type.
	floats := several && len(h.next) > 1
	for _, row := range h.next {
		for _, c := range row {
			floats = floats && bytes.ContainsAny(c, ".eE")
		}
	}
	if floats {
		return true, nil
	}
	least := int64(0)
	if im.leastNodes != nil {
		if least, err = im.leastNodes(ctx); err != nil {
			return false, err
		}
	}
	if rows == least {
		return false, nil
	}
	return false, h.l.bad(
		"0 to %d may be the first row or, as pandas writes them, the names of the columns: give {header} %s=no or %s=yes, or {nodes}",
		len(h.first)-1, h.kind, h.kind)
}

// countRows counts the lines that are neither empty nor comments.
func countRows(ctx context.Context, path string) (rows int64, err error) {
	err = eachBlock(ctx, path, func(b lineBlock) (n int64, err error) {
		err = b.each(func(s []byte, _ int64) error {
			if len(s) > 0 && !isComment(s) {
				n++
			}
			return nil
		})
		return n, err
	}, func(n int64, _ lineBlock) error { rows += n; return nil })
	return rows, err
}

// columnsOf decides which column holds ids and which values.
func (im *importer) columnsOf(h *tableHead) error {
	unused, err := im.idColumn(h)
	if err != nil {
		return err
	}
	for i := range h.cols {
		if i != h.id && !slices.Contains(unused, i) {
			h.take = append(h.take, i)
		}
	}
	for _, i := range unused {
		im.o.note("not used of %s: column %d (%q), an index", h.path, i+1, h.names[i])
	}
	switch {
	case len(h.take) == 0:
		return h.l.bad("no column but ids; give {id-column} %s=none, if they are none", h.kind)
	case h.kind == "features":
		im.noteClassNames(h)
	case len(h.take) == 1:
	case h.kind == "labels":
		return h.l.bad(
			"%d columns%s; labels have one (the class) or two (node id and class), and {id-column} names that of the ids",
			h.cols, columnNames(h.names))
	default:
		return h.l.bad("%d columns; a split has one, the node id", h.cols)
	}
	return nil
}

// idColumn finds the column of ids, by the options or by its name. unused are columns that hold
// neither ids nor values.
func (im *importer) idColumn(h *tableHead) (unused []int, err error) {
	switch given := im.o.IDColumn.of(h.kind); {
	case h.kind == "splits":
		// The ids are the values; an index beside them is pandas'.
		if len(h.names) == 2 && named(h.names[0], indexNames) {
			unused = []int{0}
		}
	case given == "none":
		h.asked = true
	case given != "":
		h.asked = true
		if h.id = columnOf(given, h.names, h.cols); h.id < 0 {
			err = h.l.bad("{id-column} %s: no such column; there are %d%s", brief(given),
				h.cols, columnNames(h.names))
		}
	case h.names != nil:
		return h.idByName()
	case h.kind == "labels" && h.cols == 2:
		h.id = 0
	}
	return unused, err
}

// columnOf finds a column by its name or its number, from 1; -1: there is none.
func columnOf(given string, names []string, cols int) int {
	i := slices.Index(names, given)
	if n, err := strconv.Atoi(given); i < 0 && err == nil && n >= 1 && n <= cols {
		i = n - 1
	}
	return i
}

// noteClassNames names features that are called as labels are.
func (im *importer) noteClassNames(h *tableHead) {
	for _, i := range h.take {
		if h.names != nil && named(h.names[i], classNames) {
			im.o.note("%s: column %d (%q) is one of the features, as its name is no id's", h.path,
				i+1, h.names[i])
		}
	}
}

func columnNames(names []string) string {
	if names == nil {
		return ""
	}
	return " (" + briefNames(names) + ")"
}

// idByName finds the column of ids by its name. An index of pandas beside one is not used.
func (h *tableHead) idByName() (unused []int, err error) {
	var ids, indexes, like []int
	for i, n := range h.names {
		switch {
		case named(n, idNames):
			ids = append(ids, i)
		case named(n, indexNames):
			indexes = append(indexes, i)
		case endsInID(n):
			like = append(like, i)
		}
	}
	ask := func(i []int) error {
		return h.l.bad("column %d (%q) may hold the node ids or values; give {id-column} %s=%s or %s=none",
			i[0]+1, h.names[i[0]], h.kind, h.names[i[0]], h.kind)
	}
	switch {
	case len(ids) == 1 && len(h.names) > 1:
		h.id = ids[0]
		return indexes, nil
	case len(ids) > 1 || len(indexes) > 1:
		return nil, ask(append(ids, indexes...))
	case len(indexes) == 1 && len(h.names) > 1:
		h.id = indexes[0]
	case h.kind == "features" && len(like) > 0:
		return nil, ask(like)
	case h.kind == "labels" && len(h.names) == 2:
		// A node id and a class, in this order, unless the names say that it is not.
		if len(like) == 1 && like[0] == 0 || named(h.names[1], classNames) &&
			!named(h.names[0], classNames) {
			h.id = 0
			return nil, nil
		}
		return nil, ask([]int{0})
	}
	return nil, nil
}

// rows are some rows of a table.
type rows[F float32 | float64] struct {
	v   []F
	ids []int64 // as they are in the file; nil: the rows are in the order of the nodes
	// firsts are the first two cells of rows that may have ids unnamed, -1 for no whole numbers.
	firsts [][2]int64
	lines  []int64
	// comments are lines that were left out, the first of which is comment.
	comments, comment int64
	// blank is the number of an empty line at the end, after which nothing may follow; 0: none.
	blank int64
}

// parseRows reads the rows of a block.
func parseRows[F float32 | float64](t *table, b lineBlock) (out rows[F], err error) {
	s := splitter{sep: t.sep}
	err = b.each(func(text []byte, line int64) error {
		switch {
		case line < t.from:
			return nil
		case len(text) == 0:
			if out.blank == 0 {
				out.blank = line
			}
			return nil
		case isComment(text):
			if out.comments++; out.comment == 0 {
				out.comment = line
			}
			return nil
		case out.blank != 0 && t.id < 0:
			return b.bad(out.blank, "the line is empty")
		}
		cells, err := s.split(text)
		if err != nil {
			return b.bad(line, "%w", err)
		}
		if len(cells) != t.cols {
			return b.bad(line, "%s", t.ragged(text, len(cells)))
		}
		if out.lines == nil {
			n := len(b.text)/(len(text)+1) + 1
			out.lines, out.v = make([]int64, 0, n), make([]F, 0, n*len(t.take))
		}
		out.lines = append(out.lines, line)
		if why := out.put(t, &s, cells, text); why != "" {
			return b.bad(line, "%s", why)
		}
		return nil
	})
	return out, err
}

// put takes the cells of a row, or returns the fault of one.
func (r *rows[F]) put(t *table, s *splitter, cells [][]byte, text []byte) (why string) {
	if t.id >= 0 {
		id, ok := parseID(cells[t.id])
		if !ok {
			return fmt.Sprintf("%q is not a node id; ids are whole numbers from 0",
				clip(cells[t.id]))
		}
		r.ids = append(r.ids, id)
	} else if t.mayHaveIDs() {
		first := [2]int64{-1, -1}
		for i := range first {
			if id, ok := parseID(cells[i]); ok {
				first[i] = id
			}
		}
		r.firsts = append(r.firsts, first)
	}
	bits := int(unsafe.Sizeof(F(0))) * 8
	for _, i := range t.take {
		x, ok := number(cells[i], bits)
		if !ok && t.kind == "labels" && string(text) == `""` {
			x, ok = math.NaN(), true // as pandas writes a missing value in a column of its own
		}
		if !ok {
			return t.notNumber(s, cells[i], i+1, bits)
		}
		r.v = append(r.v, F(x))
	}
	return ""
}

// mayHaveIDs reports whether the first column may hold ids though nothing says so.
func (t *table) mayHaveIDs() bool {
	return t.kind == "features" && !t.asked && t.names == nil && t.cols > 1
}

func (t *table) ragged(text []byte, n int) string {
	if t.cols == 1 && t.names == nil && t.kind != "features" {
		return fmt.Sprintf("%d columns; one is needed", n)
	}
	hint := ""
	if t.kind == "labels" && n == 1 && t.cols == 2 {
		hint = "; labels are one (the class) or two (node id and class) a line"
	}
	if other := tables.SeparatorOf(text); other != t.sep && n == 1 {
		hint = "; by the first line, columns are separated by " + tables.SeparatorNames[t.sep]
	}
	if t.kind == "features" && len(t.take) == t.cols {
		return fmt.Sprintf("%d features, the rows before have %d%s", n, t.cols, hint)
	}
	return fmt.Sprintf("%d columns, the lines before have %d%s", n, t.cols, hint)
}

// notNumber describes what is wrong with a value.
func (t *table) notNumber(s *splitter, cell []byte, column, bits int) string {
	switch {
	case t.kind == "":
		return fmt.Sprintf("%q is not a number", clip(cell))
	case len(cell) > 0 && t.kind == "labels":
		return fmt.Sprintf(
			"label %q is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled; number them, if they are names",
			clip(cell))
	case t.kind == "labels":
		return fmt.Sprintf("column %d is empty; write nan or -1 for a node without a label", column)
	case bits == 32 && isNumber(cell):
		return fmt.Sprintf("%q in column %d is more than float32 can hold; scale the features",
			clip(cell), column)
	}
	return s.why(cell, column)
}

// number parses a float as strconv does, without a copy of the text.
func number(b []byte, bits int) (float64, bool) {
	if len(b) == 0 {
		return 0, false
	}
	x, err := strconv.ParseFloat(unsafe.String(unsafe.SliceData(b), len(b)), bits)
	return x, err == nil || errors.Is(err, strconv.ErrRange) && !math.IsInf(x, 0)
}

// eachRows reads a table in the order of the file. fn hears of rows, never of none.
func eachRows[F float32 | float64](ctx context.Context, im *importer, t *table,
	fn func(rows[F], lineBlock) error) error {
	if t.cols == 0 {
		return nil
	}
	var blank, comments, comment int64
	err := eachBlock(ctx, t.path,
		func(b lineBlock) (rows[F], error) { return parseRows[F](t, b) },
		func(r rows[F], b lineBlock) error {
			if len(r.lines) > 0 && blank != 0 && t.id < 0 {
				return b.bad(blank, "the line is empty")
			}
			blank = max(blank, r.blank)
			if comments += r.comments; comment == 0 {
				comment = r.comment
			}
			if len(r.lines) == 0 {
				return nil
			}
			return fn(r, b)
		})
	if err == nil && comments > 0 && !t.named {
		t.named = true
		im.o.note("%s: comment lines amid the rows are left out: %d, the first is line %d", t.path,
			comments, comment)
	}
	return err
}

// eachValue reads a table of one value a row, such as labels, and the row's id, or else its number
// from 0.
func (im *importer) eachValue(ctx context.Context, t *table,
	fn func(id, line int64, x float64) error) error {
	pos := int64(0)
	return eachRows(ctx, im, t, func(r rows[float64], _ lineBlock) error {
		for i, x := range r.v {
			id := pos
			if t.id >= 0 {
				id = r.ids[i]
			}
			if err := fn(id, r.lines[i], x); err != nil {
				return err
			}
			pos++
		}
		return nil
	})
}
