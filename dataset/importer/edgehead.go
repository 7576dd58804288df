package importer

import (
	"bytes"
	"regexp"
	"slices"
	"strconv"

	tables "helios/dataset/table"
	"helios/internal/errs"
)

// edgeColumns say how the lines of an edge list are cut.
type edgeColumns struct {
	sep  byte
	cols int // cells of a line
	// before is the number of cells before the two ends of an edge, after of those behind; swap
	// says that the target comes first.
	before, after int
	swap          bool
	apart         bool   // the ends are not beside each other, so that they are
	ends          [2]int // these cells
	fixed         bool   // a format lays the columns down
	data          bool   // the data that NetworkX writes behind an edge, {…}, is left out
}

// edgeHead holds what the beginning of an edge list says.
type edgeHead struct {
	edgeColumns
	begin int64 // offset of the first line of edges
	line  int64 // its number
	empty bool
	// konect is the form of a list of the Koblenz Network Collection: sym, asym or bip (Kunegis,
	// "KONECT", WWW Companion 2013). Such a list and one of SNAP may say how many edges and nodes
	// they have.
	konect       string
	edges, nodes int64
}

var (
	konectForm = regexp.MustCompile(
		`^%\s*(sym|asym|bip)\s+(unweighted|positive|posweighted|signed|multisigned|weighted|multiweighted|dynamic|multiposweighted)\b`)
	konectSizes = regexp.MustCompile(`^%\s*(\d+)\s+(\d+)\s+(\d+)\s*$`)
	snapSizes   = regexp.MustCompile(`^#\s*Nodes:\s*\d+\s+Edges:\s*(\d+)\s*$`)
)

// comment takes a comment line before the edges.
func (h *edgeHead) comment(text []byte, line int64) {
	if m := konectForm.FindSubmatch(text); m != nil && line == 1 {
		h.konect = string(m[1])
	}
	if m := konectSizes.FindSubmatch(text); m != nil && h.konect != "" {
		var n [3]int64
		for i := range n {
			n[i], _ = parseID(m[i+1])
		}
		h.edges, h.nodes = n[0], max(n[1], n[2])
	}
	if m := snapSizes.FindSubmatch(text); m != nil {
		h.edges, _ = parseID(m[1])
	}
}

// edgeCells cuts a line. data is what NetworkX writes behind an edge, {'weight': 3}; nil for {}.
func edgeCells(s *splitter, text []byte) (cells [][]byte, data []byte, err error) {
	if text[len(text)-1] == '}' {
		if i := bytes.IndexByte(text, '{'); i > 0 {
			if data = text[i:]; len(bytes.Trim(data, "{} ")) == 0 {
				data = nil
			}
			text = bytes.TrimRight(text[:i], " \t,;")
		}
	}
	if s.sep == 0 {
		s.sep = tables.SeparatorOf(text)
	}
	cells, err = s.split(text)
	return cells, data, err
}

// readEdgeHead reads the beginning of an edge list.
func (im *edgesImport) readEdgeHead(path string) (*edgeHead, error) {
	l, err := openLines(path)
	if err != nil {
		return nil, err
	}
	defer l.close()
	h := &edgeHead{}
	var comment, first []byte
	for first == nil {
		h.begin, h.line = l.offset, l.n+1
		more, err := l.raw()
		switch {
		case err != nil:
			return nil, err
		case !more:
			h.empty = true
			return h, nil
		case len(l.text) == 0:
		case isComment(l.text):
			h.comment(l.text, l.n)
			comment = append(comment[:0], l.text[1:]...)
		default:
			first = bytes.Clone(l.text)
		}
	}
	s := splitter{}
	if h.konect != "" {
		s.sep = tables.Blank
	}
	cells, data, err := edgeCells(&s, first)
	if err != nil {
		return nil, l.bad("%w", err)
	}
	h.sep, h.cols = s.sep, len(cells)
	names, err := im.edgeHeading(l, cells)
	switch {
	case err != nil:
		return nil, err
	case names != nil:
		h.begin, h.line = l.offset, l.n+1
	default:
		names = h.commentNames(&s, comment)
	}
	sample, err := edgeSample(l, &s, names == nil, first)
	if err != nil {
		return nil, err
	}
	return h, im.edgeEnds(l, h, names, data, sample)
}

// commentNames returns the names of the ends of an edge that the comment before the first line has.
func (h *edgeHead) commentNames(s *splitter, comment []byte) []string {
	cells, err := s.split(bytes.TrimSpace(comment))
	if err != nil || len(cells) != h.cols || h.konect != "" {
		return nil
	}
	names := namesOf(cells)
	if _, _, ok := endpoints(names); !ok {
		return nil
	}
	return names
}

// edgeHeading returns the names of the columns where the first line has them. A line that is
// neither names nor an edge is an error.
func (im *edgesImport) edgeHeading(l *lines, cells [][]byte) ([]string, error) {
	names := namesOf(cells)
	given := im.o.Header.of("edges")
	switch _, _, ok := endpoints(names); {
	case given == "yes":
		names = nil
		for _, c := range cells {
			names = append(names, string(c))
		}
		return names, nil
	case given == "no":
		return nil, nil
	case ok || len(cells) == 3 && names != nil && isNumber(cells[1]): // ",0,1" of pandas
		return names, nil
	case names != nil && (im.opt.Src != "" || slices.ContainsFunc(names,
		func(n string) bool { return len(n) > 0 && (named(n, idNames) || endsInID(n)) })):
		return names, im.mustNameEnds(l, names)
	case bytes.IndexByte(cells[0], ',') >= 0:
		return nil, l.bad("%s", (&splitter{}).why(cells[0], 1))
	case !isNumber(cells[0]) && len(cells[0]) > 0:
		return nil, l.bad(
			"%q is not a node id; ids are whole numbers from 0; if the line names the columns, give {header} edges=yes",
			clip(cells[0]))
	}
	return nil, nil
}

// mustNameEnds asks for the columns of an edge that names do not tell.
func (im *edgesImport) mustNameEnds(l *lines, names []string) error {
	if im.opt.Src != "" {
		return nil
	}
	return l.bad("columns%s: which are the two ends of an edge? Give {src} and {dst}, a name or number each",
		columnNames(names))
}

// edgeSample cuts the first lines of edges.
func edgeSample(l *lines, s *splitter, edge bool, first []byte) (sample [][][]byte, err error) {
	add := func(text []byte) {
		cells, _, err := edgeCells(s, text)
		if err != nil {
			return // reading says so
		}
		row := make([][]byte, len(cells))
		for i, c := range cells {
			row[i] = bytes.Clone(c)
		}
		sample = append(sample, row)
	}
	if edge {
		add(first)
	}
	for len(sample) < sampleRows {
		more, err := l.next()
		if err != nil || !more {
			return sample, err
		}
		add(l.text)
	}
	return sample, nil
}

// edgeEnds decides which columns are the ends of an edge, and that the others may be left out.
func (im *edgesImport) edgeEnds(l *lines, h *edgeHead, names []string, data []byte,
	sample [][][]byte) error {
	l.n = h.line
	h.data = im.opt.IgnoreColumns || im.opt.Src != ""
	src, dst, err := im.chooseEnds(l, h, names, sample)
	if err != nil {
		return err
	}
	_, _, found := endpoints(names)
	var unused []int
	for i := range h.cols {
		if i == src || i == dst {
			continue
		}
		index := names != nil && (named(names[i], indexNames) || named(names[i], idNames) ||
			plainName(names[i]) == "edgeid")
		if found && !index && !h.data {
			return l.bad(
				"%d columns%s; an edge is two node ids, and models take no weights or times; give {ignore-columns} to leave the others out",
				h.cols, columnNames(names))
		}
		unused = append(unused, i)
	}
	if err := im.countsAsNames(l, h, names, sample); err != nil {
		return err
	}
	if data != nil && !h.data {
		return l.bad(
			"the edge has data, %q; models take no weights; give {ignore-columns} to leave it out",
			clip(data))
	}
	h.setEnds(src, dst)
	im.noteUnusedColumns(unused, names)
	return nil
}

// chooseEnds finds the columns of the two ends by options, by names, or by their number.
func (im *edgesImport) chooseEnds(l *lines, h *edgeHead, names []string, sample [][][]byte) (src,
	dst int, err error) {
	src, dst, found := endpoints(names)
	switch {
	case im.opt.Src != "":
		return im.givenEnds(l, h, names)
	case h.cols < 2:
		err = l.bad("%q is not an edge; two node ids are needed", clip(sampleText(sample)))
	case found:
		return src, dst, nil
	case len(names) == 3 && names[1] == "0" && names[2] == "1":
		return 1, 2, nil
	case h.cols == 2 || h.konect != "" && im.opt.IgnoreColumns:
	case !im.opt.IgnoreColumns || ragged(sample):
		err = l.bad("%s", tooManyColumns(h, sample))
	case countsUp(sample):
		err = l.bad(
			"column 1 counts the lines, so it may be an index and no node id; give {src} and {dst}, the numbers of two columns")
	}
	return 0, 1, err
}

// givenEnds finds the columns that options name.
func (im *edgesImport) givenEnds(l *lines, h *edgeHead, names []string) (src, dst int, err error) {
	src, dst = columnOf(im.opt.Src, names, h.cols), columnOf(im.opt.Dst, names, h.cols)
	option, given := "src", im.opt.Src
	if src >= 0 {
		option, given = "dst", im.opt.Dst
	}
	switch {
	case src < 0 || dst < 0:
		err = l.bad("%v %s: no such column; there are %d%s", errs.Key(option), brief(given),
			h.cols, columnNames(names))
	case src == dst:
		err = l.bad("{src} and {dst} both name column %d", src+1)
	}
	return src, dst, err
}

// countsAsNames looks at a first line 0,1, which may be an edge or, as pandas writes them, the
// names of columns that have none.
func (im *edgesImport) countsAsNames(l *lines, h *edgeHead, names []string,
	sample [][][]byte) error {
	if names != nil || h.sep == tables.Blank || len(sample) == 0 || len(sample[0]) != 2 ||
		!counting(sample[0]) || im.o.Header.of("edges") != "" {
		return nil
	}
	if slices.ContainsFunc(sample[1:], func(row [][]byte) bool { return counting(row) }) {
		return l.bad(
			"0 and 1 may be an edge, which is there again, or the names of the columns as pandas writes them; give {header} edges=no or edges=yes")
	}
	im.taken = l.n
	return nil
}

func sampleText(sample [][][]byte) []byte {
	if len(sample) == 0 {
		return nil
	}
	return bytes.Join(sample[0], []byte{' '})
}

// countsUp reports whether the first column is 0, 1, 2 and so on, or 1, 2, 3, before two of whole
// numbers: an index, or nodes with one edge each.
func countsUp(sample [][][]byte) bool {
	if len(sample) < 2 {
		return false
	}
	first, _ := parseID(sample[0][0])
	for i, row := range sample {
		if v, ok := parseID(row[0]); !ok || v != first+int64(i) || first > 1 || len(row) < 3 ||
			!isDigits(row[1]) || !isDigits(row[2]) {
			return false
		}
	}
	return true
}

// ragged reports whether lines have more or fewer cells than others.
func ragged(sample [][][]byte) bool {
	return slices.ContainsFunc(sample,
		func(row [][]byte) bool { return len(row) != len(sample[0]) })
}

// tooManyColumns explains the refusal of lines of more than two columns, with the ways out. A way
// that would take what are no edges for edges is not named.
func tooManyColumns(h *edgeHead, sample [][][]byte) errs.Text {
	whole := true
	for _, row := range sample {
		if i := emptyCell(row); i > 0 {
			return errs.Textf("%d columns, of which column %d is empty", len(row), i)
		}
		whole = whole && !slices.ContainsFunc(row, func(c []byte) bool { return !isDigits(c) })
	}
	const lists = "write an edge a line where a line is a node and its neighbours (\"import metis\" reads graphs of METIS)"
	ends := errs.Textf("give {src} and {dst}, the names or numbers of the two columns of node ids")
	switch {
	case ragged(sample):
		return errs.Textf(
			"%d columns, and other lines have more or fewer; an edge is two node ids; %s",
			h.cols, lists)
	case whole && countsUp(sample):
		return errs.Textf(
			"%d columns; an edge is two node ids, and column 1 may be an index; %s, or %s", h.cols,
			ends, lists)
	case whole:
		return errs.Textf(
			"%d columns; an edge is two node ids, and models take no weights or times; %s, or %s",
			h.cols, ends, lists)
	}
	return errs.Textf(
		"%d columns; an edge is two node ids, and models take no weights or times; %s, or {ignore-columns} to take the first two",
		h.cols, ends)
}

// emptyCell returns the number of the first empty cell, from 1; 0: there is none.
func emptyCell(cells [][]byte) int {
	return 1 + slices.IndexFunc(cells, func(c []byte) bool { return len(c) == 0 })
}

// setEnds sets the columns of the two ends of an edge.
func (h *edgeHead) setEnds(src, dst int) {
	h.ends = [2]int{src, dst}
	h.before, h.swap = min(src, dst), dst < src
	h.after = h.cols - h.before - 2
	if h.apart = src-dst != 1 && dst-src != 1; h.apart {
		h.swap = false
	}
}

func (im *edgesImport) noteUnusedColumns(unused []int, names []string) {
	var text []string
	for _, i := range unused {
		c := "column " + strconv.Itoa(i+1)
		if names != nil && names[i] != "" {
			c += " (" + brief(names[i]) + ")"
		}
		text = append(text, c)
	}
	im.noteUnused(im.edges, text)
}

// konectList takes what the first lines of a list of KONECT say.
func (im *edgesImport) konectList(h *edgeHead) error {
	switch h.konect {
	case "":
		return nil
	case "bip":
		return errs.New(errs.Usage,
			"%s is a bipartite graph of KONECT, whose two sides count their ids from 1 each; only graphs with one kind of nodes are imported",
			im.edges)
	}
	if im.opt.Base == "" && !im.opt.Renumber {
		im.ids.base = 1
		im.o.note("%s is a list of KONECT, so ids count from 1: node 0 is id 1", im.edges)
		if im.m.Nodes == 0 && h.nodes > 0 && h.nodes <= maxTextNodes {
			im.m.Nodes, im.from = h.nodes, errs.Text(im.edges)
		}
	}
	if h.konect == "sym" && !im.o.Undirected && !im.o.AddReverse {
		im.o.AddReverse = true
		im.m.Source.Options["add-reverse"] = "true"
		im.o.note("%s says sym, so the opposite of each edge is added", im.edges)
	}
	return nil
}
