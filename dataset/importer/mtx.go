package importer

import (
	"bytes"
	"context"
	"strings"

	"helios/dataset/edges"
	tables "helios/dataset/table"
	"helios/internal/errs"
)

var mtxFormat = newFormat(Format{Name: "mtx",
	Usage:       "sparse square matrices in MatrixMarket's coordinate format, plain or compressed",
	Description: mtxHelp}, MTX)

const mtxHelp = "Entry (i, j) becomes the edge from node i-1 to node j-1, whatever its value; one triangle of a symmetric,\n" +
	"skew-symmetric or Hermitian matrix stands for both. Features, labels and splits come from\n" +
	"{features}, {labels} and {splits}."

// MTX imports the pattern of a sparse matrix in MatrixMarket's format (mtxHelp).
func MTX(ctx context.Context, o Options) error {
	if err := o.fillMadeUp(); err != nil {
		return err
	}
	m, err := openMTX(ctx, o.In)
	if err != nil {
		return err
	}
	if err := o.needFeaturesSoon(m.path); err != nil {
		return err
	}
	entries, err := m.edges()
	if err != nil {
		return err
	}
	return run(request{kind: "mtx", options: &o, Options: o}, func(im *importer) error {
		im.m.Nodes = m.n
		im.m.Source.Options["matrix"] = m.field + " " + m.symmetry
		if m.values > 0 {
			o.note("not used of %s: the values of its entries; models take no edge weights", m.path)
		}
		return im.around(ctx, m.path, entries)
	})
}

// mtx is a matrix whose heading was read.
type mtx struct {
	path            string
	field, symmetry string
	values          int   // numbers after i and j
	n, entries      int64 // rows and columns; lines
	begin, line     int64 // offset and number of the first line of entries
}

func openMTX(ctx context.Context, path string) (*mtx, error) {
	l, err := openLines(path)
	if err != nil {
		return nil, err
	}
	defer l.close()
	m := &mtx{path: path}
	if err := m.heading(l); err != nil {
		return nil, err
	}
	m.begin, m.line = l.offset, l.n+1
	if l.in.Packed {
		return m, nil // counted as it is read
	}
	// A file that is cut off at a line's end is not sorted for hours.
	rows, err := countRows(ctx, path)
	if err == nil && rows-1 != m.entries { // without the line of sizes
		err = wrongCount(path, rows-1, m.entries)
	}
	return m, err
}

// heading reads the banner, the comments and the line of sizes (Boisvert, Pozo and Remington, "The
// Matrix Market exchange formats", NISTIR 5935).
func (m *mtx) heading(l *lines) error {
	if more, err := l.raw(); err != nil {
		return err
	} else if !more {
		return l.bad("the file is empty")
	}
	b := strings.Fields(strings.ToLower(string(clipTo(l.text, 200))))
	if len(b) != 5 || b[0] != "%%matrixmarket" {
		return l.bad("%q is not \"%%%%MatrixMarket matrix coordinate FIELD SYMMETRY\"",
			clip(l.text))
	}
	if b[1] != "matrix" || b[2] != "coordinate" {
		return l.bad("a %s in %s format; only matrices in coordinate format are graphs",
			brief(b[1]), brief(b[2]))
	}
	m.field, m.symmetry = b[3], b[4]
	var ok bool
	if m.values, ok = map[string]int{"pattern": 0, "real": 1, "double": 1, "integer": 1,
		"complex": 2}[m.field]; !ok {
		return l.bad("numbers of kind %q are not known (pattern, real, integer, complex)", m.field)
	}
	switch m.symmetry {
	case "general", "symmetric":
	case "skew-symmetric":
		ok = m.field != "pattern"
	case "hermitian":
		ok = m.field == "complex"
	default:
		return l.bad("symmetry %q is not known (general, symmetric, skew-symmetric, hermitian)",
			m.symmetry)
	}
	if !ok {
		return l.bad("a matrix cannot be %s and %s", m.field, m.symmetry)
	}
	return m.sizes(l)
}

// sizes reads the line of sizes behind the comments.
func (m *mtx) sizes(l *lines) error {
	for {
		more, err := l.raw()
		if err != nil {
			return err
		}
		if !more {
			return l.bad("the file ends before the line of sizes")
		}
		if len(l.text) > 0 && l.text[0] != '%' {
			break
		}
	}
	f := bytes.Fields(l.text)
	var n [3]int64
	for i := range n {
		ok := false
		if len(f) == 3 {
			n[i], ok = parseID(f[i])
		}
		if len(f) != 3 || !ok {
			return l.bad("%q is not \"ROWS COLUMNS ENTRIES\"", clip(l.text))
		}
	}
	if n[0] != n[1] {
		return l.bad(
			"a matrix of %d × %d is a bipartite graph, whose rows and columns are different nodes; only square matrices are imported",
			n[0], n[1])
	}
	if n[0] < 1 || n[0] > maxTextNodes {
		return l.bad("a matrix of %d rows; 1 to %d are read", n[0], int64(maxTextNodes))
	}
	m.n, m.entries = n[0], n[2]
	return nil
}

func clipTo(b []byte, n int) []byte { return b[:min(n, len(b))] }

// edges returns the entries as edges, each line "I J [VALUE …]".
func (m *mtx) edges() (edges.Source, error) {
	h := formatColumns(tables.Blank, 2+m.values)
	h.begin, h.line = m.begin, m.line
	s, err := formatEdges(m.path, h, idRange{base: 1, nodes: m.n, known: true}, m.entries)
	if err != nil || m.symmetry == "general" {
		return s, err
	}
	return withOpposites(s, func(i, j int64) (both bool, err error) {
		switch {
		case j > i:
			err = errs.New(errs.Usage,
				"%s: entry (%d, %d) is above the diagonal, a %s matrix holds the lower triangle only; call it general and give {undirected}",
				m.path, i+1, j+1, m.symmetry)
		case i == j && m.symmetry == "skew-symmetric":
			err = errs.New(errs.Usage,
				"%s: entry (%d, %d) is on the diagonal of a skew-symmetric matrix, which is 0",
				m.path, i+1, j+1)
		}
		return i != j, err
	}), nil
}
