package dataset

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/regular"
)

// What a directory of text files is searched for: OGB's names and the obvious ones.
var (
	edgeFiles    = []string{"edge", "edges", "edgelist", "edge_list"}
	featureFiles = []string{"node-feat", "features", "feat", "x"}
	labelFiles   = []string{"node-label", "labels", "label", "y"}
	splitFiles   = [3][]string{{"train"}, {"val", "valid"}, {"test"}}
	textEndings  = []string{".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".npy"}
)

// ImportEdges imports an edge list: a text file, plain or .gz, with one edge a line, source
// first, split by commas, semicolons, tabs or spaces. Lines beginning with # or % and one
// heading line are skipped, and with IgnoreColumns further columns, which are refused otherwise. In may also be a directory that holds edge(s) and,
// if present, node-feat or features, node-label or labels, as .csv, .tsv, .txt (or .gz of
// these), or .npy: so an OGB "raw" folder can be given as it is.
//
// Features are rows of numbers; labels are one number a line, or a node id and a number. Both
// may be .npy files. A graph without features gets made-up ones; without labels it can't be
// trained on, but sampled and measured.
func ImportEdges(ctx context.Context, o ImportOptions) error {
	if err := o.fill(); err != nil {
		return err
	}
	edges := o.In
	st, err := os.Stat(o.In)
	if err != nil {
		return errs.With(errs.Usage, err)
	}
	if st.IsDir() {
		if edges = findText(o.In, edgeFiles); edges == "" {
			return errs.New(errs.Usage, "%s has no edge list (looked for %s with %s)", o.In, strings.Join(edgeFiles, ", "), strings.Join(textEndings, ", "))
		}
		if o.Features == "" && o.FeatureFn == "" {
			o.Features = findText(o.In, featureFiles)
		}
		if o.Labels == "" {
			o.Labels = findText(o.In, labelFiles)
		}
	}
	var unused []string
	if st.IsDir() {
		unused = unusedFiles(o.In, edges, o.Features, o.Labels)
		if o.SplitDir == "" && o.Labels != "" && !o.MakeSplits {
			if i := slices.IndexFunc(unused, looksLikeSplit); i >= 0 {
				return errs.New(errs.Usage, "%s holds %s, which may be a split; give --splits DIR, or --make-splits to deal new ones", o.In, brief(unused[i]))
			}
		}
	}
	return runImport(o, "edges", func(im *importer) error {
		im.noteUnused(o.In, unused)
		return im.fromText(ctx, edges)
	})
}

func findText(dir string, names []string) string {
	for _, n := range names {
		for _, e := range textEndings {
			if st, err := os.Stat(filepath.Join(dir, n+e)); err == nil && !st.IsDir() {
				return filepath.Join(dir, n+e)
			}
		}
	}
	return ""
}

func (im *importer) fromText(ctx context.Context, edges string) error {
	o := &im.o
	im.m.Source = o.source("edges", edges, o.Features, o.Labels, o.SplitDir)
	nodesFrom := ""
	if o.Nodes > 0 {
		im.m.Nodes, nodesFrom = o.Nodes, "--nodes"
	}
	// Features first: their row count is the number of nodes, which ids are checked against.
	if o.Features != "" {
		rows, err := im.textFeatures(ctx, o.Features)
		if err != nil {
			return err
		}
		if err := im.sameRows(rows, o.Features, &nodesFrom); err != nil {
			return err
		}
	}
	var labels []int32
	if o.Labels != "" {
		var err error
		if labels, err = im.textLabels(o.Labels); err != nil {
			return err
		}
		if err := im.sameRows(int64(len(labels)), o.Labels, &nodesFrom); err != nil {
			return err
		}
	}
	if strings.HasSuffix(edges, ".npy") {
		if nodesFrom == "" {
			return errs.New(errs.Usage, "%s: an edge array needs features, labels or --nodes beside it to tell the number of nodes", edges)
		}
		a, err := npy.Open(edges)
		if err == nil {
			err = im.edgeIndex(ctx, a)
		}
		if err != nil {
			return err
		}
	} else if err := im.textEdges(ctx, edges, nodesFrom != ""); err != nil {
		return err
	}
	if im.m.Nodes < 1 {
		return errs.New(errs.Usage, "%s holds no edges", edges)
	}
	im.madeUp = o.Features == "" && o.FeatureFn == ""
	if err := im.topology(ctx); err != nil {
		return err
	}
	if im.m.Edges == 0 && !o.NoEdges && o.SelfLoops != "drop" {
		return errs.New(errs.Usage, "%s holds no edges; give --no-edges, if that is right", edges)
	}
	if o.FeatureFn != "" {
		if err := im.hashFeatures(o.FeatureFn); err != nil {
			return err
		}
	} else if o.Features == "" {
		if err := im.randomFeatures(ctx); err != nil {
			return err
		}
	}
	var splits []splitSet
	if o.SplitDir != "" {
		for i, names := range splitFiles {
			path := findText(o.SplitDir, names)
			if path == "" {
				path = findText(o.SplitDir, splitNames[i])
			}
			if path == "" {
				return errs.New(errs.Usage, "%s has no split %q; give all three splits or none", o.SplitDir, names[0])
			}
			ids, err := im.textSplit(path)
			if err != nil {
				return err
			}
			splits = append(splits, splitSet{path, ids})
		}
	}
	return im.labelsAndSplits(labels, o.Labels, splits)
}

// lines reads a text file, plain or compressed, in bounded memory.
type lines struct {
	path   string
	n      int64 // of the line in text, from 1
	text   []byte
	fields [][]byte
	f      *os.File
	gz     *gzip.Reader
	br     *bufio.Reader
	long   []byte
}

// byteOrderMark is what Windows programs begin text in UTF-8 with.
var byteOrderMark = []byte("\xef\xbb\xbf")

// maxLine bounds a line: 16 MiB holds a row of maxDim features in text.
const maxLine = 16 << 20

func openLines(path string) (*lines, error) {
	f, err := regular.Open(path)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	l := &lines{path: path, f: f, br: bufio.NewReaderSize(f, 256<<10)}
	if strings.HasSuffix(path, ".gz") {
		if l.gz, err = gzip.NewReader(l.br); err != nil {
			return nil, errors.Join(errs.New(errs.Usage, "%s: not gzip, or truncated: %w", path, err), f.Close())
		}
		l.br = bufio.NewReaderSize(l.gz, 256<<10)
	}
	return l, nil
}

func (l *lines) close() error { return l.f.Close() }

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
				return false, errs.New(errs.Usage, "%s:%d: line of more than %d bytes; is it a text file?", l.path, l.n+1, maxLine)
			}
			text = l.long
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return false, errs.New(errs.Usage, "%s:%d: truncated or damaged: %w", l.path, l.n+1, err)
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
			return dst, l.bad("%q in column %d is more than float32 can hold; scale the features", clip(f), i+1)
		}
		if err != nil && !errors.Is(err, strconv.ErrRange) {
			return dst, l.bad("%q in column %d is not a number", clip(f), i+1)
		}
		dst = append(dst, float32(x))
	}
	return dst, nil
}

// textFeatures writes features.npy from a text file or array and returns the rows.
func (im *importer) textFeatures(ctx context.Context, path string) (int64, error) {
	if strings.HasSuffix(path, ".npy") {
		a, err := npy.Open(path)
		if err != nil {
			return 0, err
		}
		if err := im.matrix(ctx, a); err != nil {
			return 0, err
		}
		return a.Header.Shape[0], nil
	}
	l, err := openLines(path)
	if err != nil {
		return 0, err
	}
	defer l.close()
	var w *featureWriter
	var row []float32
	rows := int64(0)
	for {
		more, err := l.next()
		if err == nil && more {
			if row, err = l.numbers(row); err != nil && w == nil && l.heading() {
				continue // a heading
			}
		}
		if err == nil && more && w == nil {
			if len(row) > maxDim {
				return 0, l.bad("%d features per node, at most %d", len(row), maxDim)
			}
			im.m.Dim = len(row)
			w, err = im.featureWriter(path, int64(im.m.Dim))
		}
		if err == nil && more && len(row) != im.m.Dim {
			err = l.bad("%d features, the rows before have %d", len(row), im.m.Dim)
		}
		if err == nil && more {
			err = w.put(row)
		}
		if err == nil && rows&0xfff == 0 {
			err = ctx.Err()
		}
		if err != nil {
			if w != nil && w.out != nil {
				err = errors.Join(err, w.out.discard())
			}
			return 0, err
		}
		if !more {
			break
		}
		if rows++; rows&0xfff == 0 {
			im.o.Progress.report("features", rows, 0)
		}
	}
	if w == nil {
		return 0, errs.New(errs.Usage, "%s holds no features", path)
	}
	return rows, w.out.close()
}

// textLabels reads labels, one a line in node order, or with the node id before each.
func (im *importer) textLabels(path string) ([]int32, error) {
	if strings.HasSuffix(path, ".npy") {
		a, err := npy.Open(path)
		if err != nil {
			return nil, err
		}
		return im.labelArray(a)
	}
	l, err := openLines(path)
	if err != nil {
		return nil, err
	}
	defer l.close()
	var labels []int32
	const unset = math.MinInt32
	room := int64(0) // nodes that there is memory for
	columns := 0
	for {
		more, err := l.next()
		if err != nil {
			return nil, err
		}
		if !more {
			break
		}
		last := l.fields[len(l.fields)-1]
		x, err := strconv.ParseFloat(string(last), 64)
		if err != nil {
			if l.heading() {
				continue
			}
			return nil, l.bad("label %q is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled", clip(last))
		}
		if columns == 0 {
			if columns = len(l.fields); columns > 2 {
				return nil, l.bad("%d columns; labels have one (the class) or two (node id and class)", columns)
			}
		}
		if len(l.fields) != columns {
			return nil, l.bad("%d columns, the lines before have %d", len(l.fields), columns)
		}
		node := int64(len(labels))
		if columns == 2 {
			var ok bool
			if node, ok = parseID(l.fields[0]); !ok || node >= maxTextNodes || im.m.Nodes > 0 && node >= im.m.Nodes {
				return nil, l.bad("%q is not a node id in range", clip(l.fields[0]))
			}
		}
		c, ok := labelOf(x)
		if !ok {
			return nil, l.bad("label %v of node %d is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled", x, node)
		}
		if need := node + 1; need > room { // a stray number must not take all memory
			need = max(need, 2*room)
			if im.m.Nodes > 0 {
				need = im.m.Nodes
			}
			if err := im.needMemory(fmt.Sprintf("%s:%d: node id %d: a label for each node", l.path, l.n, node), need-room, 4); err != nil {
				return nil, err
			}
			room = need
			labels = slices.Grow(labels, int(room)-len(labels))
		}
		for int64(len(labels)) <= node {
			labels = append(labels, unset)
		}
		if labels[node] != unset {
			return nil, l.bad("node %d has a label already", node)
		}
		labels[node] = c
	}
	if columns == 2 && room < im.m.Nodes {
		if err := im.needMemory(path+": a label for each node", im.m.Nodes-room, 4); err != nil {
			return nil, err
		}
	}
	for columns == 2 && int64(len(labels)) < im.m.Nodes {
		labels = append(labels, unset)
	}
	for v := range labels {
		if labels[v] == unset { // nodes that a two-column file leaves out
			labels[v] = noLabel
		}
	}
	return labels, nil
}

// textSplit reads node ids, one a line, or an array.
func (im *importer) textSplit(path string) ([]int64, error) {
	if strings.HasSuffix(path, ".npy") {
		a, err := npy.Open(path)
		if err != nil {
			return nil, err
		}
		return im.splitIDs(a)
	}
	l, err := openLines(path)
	if err != nil {
		return nil, err
	}
	defer l.close()
	var ids []int64
	for {
		more, err := l.next()
		if err != nil {
			return nil, err
		}
		if !more {
			return ids, nil
		}
		id, ok := parseID(l.fields[0])
		if !ok && l.heading() {
			continue
		}
		if !ok {
			return nil, l.bad("%q is not a node id; ids are whole numbers from 0", clip(l.fields[0]))
		}
		if len(l.fields) > 1 {
			return nil, l.bad("%d columns; a split has one, the node id", len(l.fields))
		}
		if id >= im.m.Nodes {
			return nil, l.bad("node id %d is outside 0..%d", id, im.m.Nodes-1)
		}
		if ids, err = im.addID(ids, id, path); err != nil {
			return nil, err
		}
	}
}
