package importer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/rowtype"
)

// matrix copies a features array, [nodes, dim] of any number type, as float32; float16 stays what
// it is.
func (im *importer) matrix(ctx context.Context, a *npy.Array) error {
	a, err := checkMatrix(a)
	if err != nil {
		return err
	}
	im.m.Dim = int(a.Header.Shape[1])
	if isHalf(a) {
		im.m.DType = rowtype.Float16.String()
	}
	return im.copyRows(ctx, a)
}

// isHalf reports whether an array is of float16.
func isHalf(a *npy.Array) bool {
	t := a.Header.DType
	return t.Kind == 'f' && t.Size == 2 && !t.Brain
}

// copyRows copies a features array as the type that Meta.DType says.
func (im *importer) copyRows(ctx context.Context, a *npy.Array) error {
	sh := a.Header.Shape
	w, whole, err := im.featureWriterFrom(a.Name, sh[1], sh[0])
	if err != nil || whole {
		return err
	}
	t := edges.NewMarkTimer()
	err = npy.Each(a, w.n, func(_ int64, x []float32) error {
		err := w.put(x)
		if err == nil && im.s.Journaled() && t.Due() {
			err = t.Mark(func() error { return im.s.MarkArray(w.out) })
		}
		im.o.Progress.Report("features", w.n/sh[1], sh[0])
		return cmp.Or(err, ctx.Err())
	})
	if err == nil {
		return w.out.Close()
	}
	if re := (*npy.RangeError)(nil); errors.As(err, &re) {
		err = errs.New(errs.Usage,
			"%s: feature %d of node %d is %g, which float32 cannot hold; scale the features",
			a.Name, re.Index%sh[1], re.Index/sh[1], re.Value)
	}
	return errors.Join(err, w.out.Discard())
}

// checkMatrix refuses an array that is no matrix of features, and returns it in C order.
func checkMatrix(a *npy.Array) (*npy.Array, error) {
	sh := a.Header.Shape
	if len(sh) != 2 || sh[0] < 1 || sh[1] < 1 {
		return nil, errs.New(errs.Usage, "%s: features have shape %s, must be (nodes, dim)", a.Name,
			a.Header.ShapeString())
	}
	if sh[1] > dataset.MaxDim {
		return nil, errs.New(errs.Usage, "%s: %d features per node, at most %d", a.Name, sh[1],
			dataset.MaxDim)
	}
	return a.Matrix()
}

// featureWriterFrom goes on where an interrupted import was: with n elements written, or with all
// rows (whole).
func (im *importer) featureWriterFrom(from string, dim, rows int64) (w *featureWriter,
	whole bool, err error) {
	if im.s.HasArray(im.nodesFile("features"), rows, dim) {
		return nil, true, nil
	}
	mark := im.s.ArrayBegun(im.nodesFile("features"))
	if mark == nil {
		w, err = im.featureWriter(from, dim)
		return w, false, err
	}
	dt := im.m.FileDType()
	out, err := im.s.ArrayFrom(im.nodesFile("features"), dt, dim, mark)
	if err != nil {
		return nil, false, err
	}
	return &featureWriter{out: out, from: from, dim: dim, t: im.m.RowType(),
		n: mark.Bytes / int64(dt.Size)}, false, nil
}

// featureWriter writes features.npy and rejects what a model cannot train on.
type featureWriter struct {
	out  *build.Array
	from string
	dim  int64
	n    int64
	t    rowtype.Type
	tmp  []byte
}

// featureWriter makes features.npy of the type that Meta.DType says.
func (im *importer) featureWriter(from string, dim int64) (*featureWriter, error) {
	dt := im.m.FileDType()
	if err := build.EnoughDisk(im.o.Out,
		float64(im.m.Nodes)*float64(dim)*float64(dt.Size)); err != nil {
		return nil, fmt.Errorf("%s: features of %d numbers for %d nodes: %w", from, dim,
			im.m.Nodes, err)
	}
	out, err := im.s.Array(im.nodesFile("features"), dt, dim)
	return &featureWriter{out: out, from: from, dim: dim, t: im.m.RowType()}, err
}

func (w *featureWriter) put(v []float32) error {
	size := w.t.RowBytes(2) / 2 // of an element
	if need := w.t.RowBytes(len(v)); cap(w.tmp) < need {
		w.tmp = make([]byte, need)
	}
	for i, x := range v {
		if x-x != 0 { // NaN or an infinity
			index := w.n + int64(i)
			return errs.New(errs.Usage, "%s: feature %d of node %d is %v; replace it with a number",
				w.from, index%w.dim, index/w.dim, x)
		}
	}
	if _, err := w.t.Encode(w.tmp[:w.t.RowBytes(len(v))], v); err != nil {
		return err // a source in float16 has no value that float16 cannot hold
	}
	w.n += int64(len(v))
	_, err := w.out.Write(w.tmp[:size*len(v)])
	return err
}

// randomFeatures makes up features for a graph that has none: noise that tells nodes apart, and the
// logarithm of the in-degree in column 0. Structure is then all there is to learn.
func (im *importer) randomFeatures(ctx context.Context) error {
	im.m.Dim = im.o.Dim
	im.m.Source.Options["features"] = "random"
	im.m.Source.Options["dim"] = strconv.Itoa(im.o.Dim)
	w, err := im.featureWriter("random features", int64(im.o.Dim))
	if err != nil {
		return err
	}
	noise := build.Noise(im.o.Seed)
	row, last := make([]float32, im.o.Dim), int64(0)
	degrees, err := npy.Open(im.s.Path(im.edgesFile(dataset.IndptrName)))
	if err == nil {
		err = npy.Each(degrees, 0, func(first int64, offsets []int64) error {
			for i, p := range offsets {
				if v := first + int64(i) - 1; v >= 0 {
					noise(row, uint64(v))
					row[0] = log2(p - last)
					if err := w.put(row); err != nil {
						return err
					}
				}
				last = p
			}
			im.o.Progress.Report("features", first+int64(len(offsets))-1, im.m.Nodes)
			return ctx.Err()
		})
	}
	if err != nil {
		return errors.Join(err, w.out.Discard())
	}
	return w.out.Close()
}

// log2 is the binary logarithm of n+1, linear between powers of two so that it is the same on
// every machine.
func log2(n int64) float32 {
	_, exp := math.Frexp(float64(n + 1))
	low := int64(1) << (exp - 1)
	return float32(exp-1) + float32(n+1-low)/float32(low)
}

// hashFeatures makes a feature function the features of an import, in place of a matrix: fn is
// FeatureFn, and Dim the number of features.
func (im *importer) hashFeatures(fn string) error {
	fn, err := dataset.ParseFeatureFn(fn, im.o.Seed)
	if err != nil {
		return err
	}
	im.m.Source.Options["feature-fn"] = fn
	im.m.FeatureFn, im.m.Dim = fn, im.o.Dim
	return nil
}

// features writes features.npy: a row for each node, or, where nodesFrom is given, as many as there
// are nodes by then (sameRows).
func (im *importer) features(ctx context.Context, d nodeFile, nodesFrom *errs.Text) error {
	a := d.array
	if a == nil {
		rows, err := im.featureRows(ctx, d)
		if err == nil && nodesFrom != nil {
			err = im.sameRows(rows, d.path, nodesFrom)
		} else if err == nil && rows != im.m.Nodes {
			err = errs.New(errs.Usage, "%s ends after %d rows, there are %d nodes", d.path, rows,
				im.m.Nodes)
		}
		return err
	}
	if nodesFrom != nil {
		if err := im.matrix(ctx, a); err != nil {
			return err
		}
		return im.sameRows(a.Header.Shape[0], d.path, nodesFrom)
	}
	if err := im.oneRowEach(a, "features"); err != nil {
		return err
	}
	if a.Seekable() && im.s.ArrayBegun(im.nodesFile("features")) != nil {
		// Gone on with, a member of an archive is not read from its start, so no checksum covers
		// what is.
		if err := a.Check(ctx); err != nil {
			return err
		}
	}
	return im.matrix(ctx, a)
}

// ownOrOther writes the features of the input, where it has some that are to be taken, or else
// those that options name or make.
func (im *importer) ownOrOther(ctx context.Context, own nodeFile) (err error) {
	switch {
	case own.path != "":
	case im.o.Features == "":
		return im.madeFeatures(ctx)
	default:
		if own, err = openData(im.o.Features, true); err != nil {
			return err
		}
	}
	return im.features(ctx, own, nil)
}

// madeFeatures makes the features that FeatureFn says.
func (im *importer) madeFeatures(ctx context.Context) error {
	if im.o.FeatureFn == RandomFeatures {
		return im.randomFeatures(ctx)
	}
	return im.hashFeatures(im.o.FeatureFn)
}

// featureRows writes features.npy from a table and returns the rows.
func (im *importer) featureRows(ctx context.Context, d nodeFile) (n int64, err error) {
	path := d.path
	t, err := im.tableOf(ctx, "features", path, d.users)
	if err != nil {
		return 0, err
	}
	dim := len(t.take)
	switch {
	case dim == 0:
		return 0, errs.New(errs.Usage, "%s holds no features", path)
	case dim > dataset.MaxDim:
		return 0, errs.New(errs.Usage, "%s:%d: %d features per node, at most %d", path, t.from, dim,
			dataset.MaxDim)
	}
	im.m.Dim = dim
	w, err := im.featureWriter(path, int64(dim))
	if err != nil {
		return 0, err
	}
	p := placer{im: im, t: t, w: w}
	looks := idLooks{t: t}
	err = eachRows(ctx, im, t, func(r rows[float32], b lineBlock) error {
		if n += int64(len(r.lines)); t.id < 0 && im.m.Nodes > 0 && n > im.m.Nodes && !d.users {
			return b.bad(r.lines[int64(len(r.lines))-(n-im.m.Nodes)],
				"a row for node %d, there are only %d nodes", im.m.Nodes, im.m.Nodes)
		}
		im.o.Progress.Report("features", n, im.m.Nodes)
		if t.id >= 0 {
			return p.put(ctx, r, b)
		}
		looks.see(r.firsts)
		return w.put(r.v)
	})
	if err == nil && t.id >= 0 {
		err = p.end(n)
	}
	if err == nil {
		err = looks.refuse()
	}
	err = errors.Join(err, p.close())
	if err == nil && n == 0 {
		err = errs.New(errs.Usage, "%s holds no features", path)
	}
	if err != nil {
		return n, errors.Join(err, w.out.Discard())
	}
	return n, w.out.Close()
}
