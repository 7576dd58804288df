package dataset

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"helios/dataset/npy"
	"helios/internal/errs"
)

// ImportOptions are common to imports of arrays and of edge lists.
type ImportOptions struct {
	In   string // directory, archive or file; see ImportNPY and ImportEdges
	Out  string // directory to create
	Name string // defaults to the base name of Out

	// Features, Labels and SplitDir name files that are not in In, or not under the names
	// that are looked for. SplitDir holds train, val (or valid) and test.
	Features, Labels, SplitDir string

	// Nodes is the number of nodes where no features or labels tell it (0: the largest id in
	// the edges, plus 1).
	Nodes int64
	// UnlabelledOK takes nodes without a label (NaN, or -1) as unlabelled and leaves them out
	// of the splits. Without it they are an error where a label is needed: everywhere, or in
	// the given splits.
	UnlabelledOK bool
	// Reverse adds the opposite of each edge, and drops repeated edges.
	Reverse bool
	// Dedup drops repeated edges.
	Dedup bool
	// NoEdges keeps the nodes and drops all edges.
	NoEdges bool
	// Dim is the number of features to make up for an edge list that has none (64).
	Dim int

	Seed                       uint64  // of the splits, and of made-up features
	TrainFraction, ValFraction float64 // when no splits are given: 0.6 and 0.2, rest test
	Memory                     int64   // for sorting edges: DefaultMemory
	Progress                   Progress
}

func (o *ImportOptions) fill() error {
	if o.In == "" {
		return errs.New(errs.Usage, "--in is missing: name the file or directory to import")
	}
	if o.Name == "" {
		o.Name = filepath.Base(filepath.Clean(o.Out))
	}
	if o.TrainFraction == 0 && o.ValFraction == 0 {
		o.TrainFraction, o.ValFraction = 0.6, 0.2
	}
	if !(o.TrainFraction >= 0 && o.ValFraction >= 0 && o.TrainFraction+o.ValFraction <= 1) {
		return errs.New(errs.Usage, "--train-fraction %g and --val-fraction %g are not parts of a whole; give numbers from 0 that make at most 1 together", o.TrainFraction, o.ValFraction)
	}
	if o.Dim == 0 {
		o.Dim = 64
	}
	if o.Dim < 1 || o.Dim > maxDim {
		return errs.New(errs.Usage, "--dim %d is outside 1..%d", o.Dim, maxDim)
	}
	if o.Nodes < 0 || o.Memory < 0 {
		return errs.New(errs.Usage, "--nodes %d: a number of nodes (or a memory budget, here %d) cannot be negative", o.Nodes, o.Memory)
	}
	for _, p := range [][2]string{{"--in", o.In}, {"--features", o.Features}, {"--labels", o.Labels}, {"--splits", o.SplitDir}} {
		if err := readable(p[0], p[1]); err != nil {
			return err
		}
	}
	return nil
}

// readable says what is wrong with the path of a flag before any work is done for it.
func readable(flag, path string) error {
	if path == "" {
		return nil
	}
	if _, err := os.Stat(path); err != nil {
		return errs.New(errs.Usage, "%s: %w; name what is there and can be read", flag, err)
	}
	return nil
}

func (o *ImportOptions) source(kind string, files ...string) Source {
	s := Source{Kind: kind, Options: map[string]string{}, Counts: map[string]int64{}}
	for _, f := range files {
		if f != "" {
			s.From = append(s.From, filepath.Base(f))
		}
	}
	for name, set := range map[string]bool{"unlabelled-ok": o.UnlabelledOK, "reverse": o.Reverse, "dedup": o.Dedup, "no-edges": o.NoEdges} {
		if set {
			s.Options[name] = "true"
		}
	}
	s.Options["seed"] = strconv.FormatUint(o.Seed, 10)
	return s
}

// importer collects the parts of an import.
type importer struct {
	o      ImportOptions
	s      *staging
	m      Meta
	sorter *edgeSorter
	// splitKey is a stable key of a node for dealing it to a split; nil means its id.
	splitKey func(v int64) uint64
}

// runImport does what all imports share: the staging directory and its end.
func runImport(o ImportOptions, kind string, fn func(*importer) error) (err error) {
	s, err := newStaging(o.Out)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.abort())
		}
	}()
	im := &importer{o: o, s: s, sorter: newEdgeSorter(s, o.Memory), m: Meta{Name: o.Name, DType: "float32", Source: o.source(kind)}}
	defer func() { err = errors.Join(err, im.sorter.free()) }()
	if err := fn(im); err != nil {
		return err
	}
	return s.commit(im.m)
}

// edge takes one edge whose ids are checked.
func (im *importer) edge(src, dst int64) error {
	if im.o.NoEdges {
		return nil
	}
	if err := im.sorter.add(src, dst); err != nil {
		return err
	}
	if im.o.Reverse && src != dst {
		return im.sorter.add(dst, src)
	}
	return nil
}

func (im *importer) topology(ctx context.Context) error {
	c, err := im.s.writeCSC(ctx, im.sorter, im.m.Nodes, edgeRules{dedup: im.o.Dedup || im.o.Reverse}, im.o.Progress)
	im.m.Edges = c.stored
	if c.duplicates > 0 {
		im.m.Source.Counts["duplicate-edges"] = c.duplicates
	}
	return err
}

// matrix copies a features array, [nodes, dim] of any number type, as float32.
func (im *importer) matrix(ctx context.Context, a *npy.Array) error {
	sh := a.Header.Shape
	if len(sh) != 2 || sh[0] < 1 || sh[1] < 1 {
		return errs.New(errs.Usage, "%s: features have shape %s, must be (nodes, dim)", a.Name, a.Header.ShapeString())
	}
	if a.Header.Fortran {
		return errs.New(errs.Usage, "%s: features are in Fortran order; save numpy.ascontiguousarray(x) instead", a.Name)
	}
	if sh[1] > maxDim {
		return errs.New(errs.Usage, "%s: %d features per node, at most %d", a.Name, sh[1], maxDim)
	}
	im.m.Dim = int(sh[1])
	r, err := a.Reader(0)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := im.featureWriter(a.Name, sh[1])
	if err != nil {
		return err
	}
	buf := make([]float32, 64<<10)
	total := a.Header.Elements()
	for done := int64(0); ; {
		n, err := r.Float32s(buf)
		if err == nil {
			err = w.put(buf[:n])
			done += int64(n)
		}
		if err == nil {
			err = ctx.Err()
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return errors.Join(err, w.out.discard())
		}
		im.o.Progress.report("features", done/sh[1], total/sh[1])
	}
	return w.out.close()
}

// featureWriter writes features.npy and rejects what a model cannot train on.
type featureWriter struct {
	out  *arrayOut
	from string
	dim  int64
	n    int64
	tmp  []byte
}

func (im *importer) featureWriter(from string, dim int64) (*featureWriter, error) {
	out, err := im.s.array("features", npy.Float32, dim)
	return &featureWriter{out: out, from: from, dim: dim}, err
}

func (w *featureWriter) put(v []float32) error {
	w.tmp = w.tmp[:0]
	for i, x := range v {
		if x-x != 0 { // NaN or an infinity
			at := w.n + int64(i)
			return errs.New(errs.Usage, "%s: feature %d of node %d is %v; replace it with a number", w.from, at%w.dim, at/w.dim, x)
		}
		w.tmp = binary.LittleEndian.AppendUint32(w.tmp, math.Float32bits(x))
	}
	w.n += int64(len(v))
	_, err := w.out.Write(w.tmp)
	return err
}

// noLabel marks an unlabelled node.
const noLabel = -1

// labelOf turns a label as it was read into a class, or noLabel.
func labelOf(x float64) (int32, bool) {
	switch {
	case math.IsNaN(x) || x == -1:
		return noLabel, true
	case x < 0 || x != math.Trunc(x) || x >= math.MaxInt32:
		return 0, false
	}
	return int32(x), true
}

// labelArray reads labels: shape [nodes] or [nodes, 1]. Labels fit in memory at 4 bytes a node
// beside the splits' bitmap; everything larger is streamed.
func labelArray(a *npy.Array) ([]int32, error) {
	sh := a.Header.Shape
	if len(sh) == 0 || len(sh) > 2 || len(sh) == 2 && sh[1] != 1 {
		return nil, errs.New(errs.Usage, "%s: labels have shape %s, must be (nodes,) or (nodes, 1)", a.Name, a.Header.ShapeString())
	}
	r, err := a.Reader(0)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	labels := make([]int32, 0, sh[0])
	buf := make([]float64, 32<<10)
	for {
		n, err := r.Floats(buf)
		if errors.Is(err, io.EOF) {
			return labels, nil
		}
		if err != nil {
			return nil, err
		}
		for _, x := range buf[:n] {
			l, ok := labelOf(x)
			if !ok {
				return nil, badLabel(a.Name, int64(len(labels)), x)
			}
			labels = append(labels, l)
		}
	}
}

func badLabel(file string, node int64, x any) error {
	return errs.New(errs.Usage, "%s: label %v of node %d is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled", file, x, node)
}

// sameRows checks a row count against the nodes found so far and takes it as theirs.
func (im *importer) sameRows(n int64, file string, nodesFrom *string) error {
	if *nodesFrom != "" && n != im.m.Nodes {
		return errs.New(errs.Usage, "%s has %d rows, %s has %d; one row per node is needed in both", file, n, *nodesFrom, im.m.Nodes)
	}
	if *nodesFrom == "" {
		im.m.Nodes, *nodesFrom = n, file
	}
	return nil
}

// splitSet is a split as given: node ids and the file they are from.
type splitSet struct {
	file string
	ids  []int64
}

// labelsAndSplits writes labels and the three splits. given is empty, or has the three
// splits; labels is nil when there are none.
func (im *importer) labelsAndSplits(labels []int32, labelsFile string, given []splitSet) error {
	if labels == nil {
		labels = make([]int32, im.m.Nodes)
		for i := range labels {
			labels[i] = noLabel
		}
	} else if err := im.checkLabels(labels, labelsFile, given); err != nil {
		return err
	}
	for _, l := range labels {
		if l == noLabel {
			im.m.Unlabelled++
		}
		im.m.Classes = max(im.m.Classes, int(l)+1)
	}
	out, err := im.s.array("labels", npy.Int32, 0)
	if err != nil {
		return err
	}
	if err := out.int32s(labels); err != nil {
		return errors.Join(err, out.discard())
	}
	if err := out.close(); err != nil {
		return err
	}
	sp, err := newSplitter(im.s, im.o.Seed, im.o.TrainFraction, im.o.ValFraction)
	if err != nil {
		return err
	}
	if err := im.deal(sp, labels, given); err != nil {
		return errors.Join(err, sp.discard())
	}
	im.m.Train, im.m.Val, im.m.Test, err = sp.close()
	return err
}

// checkLabels finds nodes that need a label and have none.
func (im *importer) checkLabels(labels []int32, file string, given []splitSet) error {
	if im.o.UnlabelledOK {
		return nil
	}
	const fix = "--unlabelled-ok leaves such nodes out of the splits"
	if len(given) == 0 {
		for v, l := range labels {
			if l == noLabel {
				return errs.New(errs.Usage, "%s: node %d has no label (NaN or -1); %s", file, v, fix)
			}
		}
	}
	for _, g := range given {
		for pos, v := range g.ids {
			if labels[v] == noLabel {
				return errs.New(errs.Usage, "%s: node %d, position %d of %s, has no label (NaN or -1); %s", file, v, pos, g.file, fix)
			}
		}
	}
	return nil
}

func (im *importer) deal(sp *splitter, labels []int32, given []splitSet) error {
	if len(given) == 0 {
		for v, l := range labels {
			if l == noLabel {
				continue
			}
			k := uint64(v)
			if im.splitKey != nil {
				k = im.splitKey(int64(v))
			}
			if err := sp.put(int64(v), k); err != nil {
				return err
			}
		}
		return nil
	}
	owner := make([]byte, len(labels))
	for i, g := range given {
		for pos, v := range g.ids {
			if o := owner[v]; o != 0 {
				if int(o) == i+1 {
					return errs.New(errs.Usage, "%s: node %d appears twice, the second time at position %d", g.file, v, pos)
				}
				return errs.New(errs.Usage, "%s: node %d at position %d is also in %s; the splits must be apart", g.file, v, pos, given[o-1].file)
			}
			owner[v] = byte(i + 1)
		}
	}
	for v, o := range owner {
		if o != 0 && labels[v] != noLabel {
			if err := sp.place(int(o-1), int64(v)); err != nil {
				return err
			}
		}
	}
	return nil
}

// randomFeatures makes up features for a graph that has none: noise that tells nodes apart,
// and the logarithm of the in-degree in column 0. Structure is then all there is to learn.
func (im *importer) randomFeatures(ctx context.Context) error {
	im.m.Dim = im.o.Dim
	im.m.Source.Options["features"] = "random"
	im.m.Source.Options["dim"] = strconv.Itoa(im.o.Dim)
	w, err := im.featureWriter("random features", int64(im.o.Dim))
	if err != nil {
		return err
	}
	g := newGenerator(GenerateOptions{Kind: "sbm", Nodes: im.m.Nodes, Classes: 1, Dim: 1, Seed: im.o.Seed})
	degrees, err := npy.Open(filepath.Join(im.s.dir, indptrName))
	if err != nil {
		return errors.Join(err, w.out.discard())
	}
	r, err := degrees.Reader(0)
	if err != nil {
		return errors.Join(err, w.out.discard())
	}
	defer r.Close()
	row := make([]float32, im.o.Dim)
	var last int64
	buf := make([]int64, nodesPerChunk)
	for v := int64(-1); v < im.m.Nodes; {
		n, err := r.Ints(buf)
		for _, p := range buf[:n] {
			if v >= 0 && err == nil {
				g.noise(row, uint64(v), genNoise)
				row[0] = log2(p - last)
				err = w.put(row)
			}
			last = p
			v++
		}
		if err = errors.Join(err, ctx.Err()); err != nil {
			return errors.Join(err, w.out.discard())
		}
		im.o.Progress.report("features", v, im.m.Nodes)
	}
	return w.out.close()
}

// log2 is the binary logarithm of n+1, linear between powers of two so that it is the same on
// every machine.
func log2(n int64) float32 {
	_, exp := math.Frexp(float64(n + 1))
	low := int64(1) << (exp - 1)
	return float32(exp-1) + float32(n+1-low)/float32(low)
}
