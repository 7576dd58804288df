package importer

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	if err := checkMatrix(a); err != nil {
		return err
	}
	sh := a.Header.Shape
	im.m.Dim = int(sh[1])
	if a.Header.DType.Kind == 'f' && a.Header.DType.Size == 2 {
		im.m.DType = rowtype.Float16.String()
	}
	w, whole, err := im.featureWriterFrom(a.Name, sh[1], sh[0])
	if err != nil || whole {
		return err
	}
	r, err := a.Reader(w.n)
	if err != nil {
		return errors.Join(err, w.out.Discard())
	}
	defer r.Close()
	buf := make([]float32, 64<<10)
	t := edges.NewMarkTimer()
	for err == nil {
		var n int
		n, err = r.Float32s(buf)
		if err == nil {
			err = w.put(buf[:n])
		}
		if err == nil && im.s.Journaled() && t.Due() {
			err = t.Mark(func() error { return im.s.MarkArray(w.out) })
		}
		if err == nil {
			err = ctx.Err()
		}
		im.o.Progress.Report("features", w.n/sh[1], sh[0])
	}
	if errors.Is(err, io.EOF) {
		return w.out.Close()
	}
	if re := (*npy.RangeError)(nil); errors.As(err, &re) {
		err = errs.New(errs.Usage,
			"%s: feature %d of node %d is %g, which float32 cannot hold; scale the features",
			a.Name, re.Index%sh[1], re.Index/sh[1], re.Value)
	}
	return errors.Join(err, w.out.Discard())
}

// checkMatrix refuses an array that is no matrix of features.
func checkMatrix(a *npy.Array) error {
	sh := a.Header.Shape
	if len(sh) != 2 || sh[0] < 1 || sh[1] < 1 {
		return errs.New(errs.Usage, "%s: features have shape %s, must be (nodes, dim)", a.Name,
			a.Header.ShapeString())
	}
	if a.Header.Fortran {
		return errs.New(errs.Usage,
			"%s: features are in Fortran order; save numpy.ascontiguousarray(x) instead", a.Name)
	}
	if sh[1] > dataset.MaxDim {
		return errs.New(errs.Usage, "%s: %d features per node, at most %d", a.Name, sh[1],
			dataset.MaxDim)
	}
	return nil
}

// featureWriterFrom goes on where an interrupted import was: with n elements written, or with all
// rows (whole).
func (im *importer) featureWriterFrom(from string, dim, rows int64) (w *featureWriter,
	whole bool, err error) {
	if im.s.HasArray("features", rows, dim) {
		return nil, true, nil
	}
	mark := im.s.ArrayBegun("features")
	if mark == nil {
		w, err = im.featureWriter(from, dim)
		return w, false, err
	}
	dt := im.m.FileDType()
	out, err := im.s.ArrayFrom("features", dt, dim, mark)
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
	out, err := im.s.Array("features", dt, dim)
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
		return err // float16 is of a source in float16, whose values it holds
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
	degrees, err := npy.Open(im.s.Path(dataset.IndptrName))
	if err != nil {
		return errors.Join(err, w.out.Discard())
	}
	r, err := degrees.Reader(0)
	if err != nil {
		return errors.Join(err, w.out.Discard())
	}
	defer r.Close()
	row := make([]float32, im.o.Dim)
	var last int64
	buf := make([]int64, 4096)
	for v := int64(-1); v < im.m.Nodes; {
		n, err := r.Ints(buf)
		for _, p := range buf[:n] {
			if v >= 0 && err == nil {
				noise(row, uint64(v))
				row[0] = log2(p - last)
				err = w.put(row)
			}
			last = p
			v++
		}
		if err = errors.Join(err, ctx.Err()); err != nil {
			return errors.Join(err, w.out.Discard())
		}
		im.o.Progress.Report("features", v, im.m.Nodes)
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
	im.s.FeatureFn(&im.m, fn, im.o.Dim)
	return nil
}

// features writes features.npy from an array that must have a row for each node.
func (im *importer) features(ctx context.Context, a *npy.Array) error {
	if err := im.oneRowEach(a, "features"); err != nil {
		return err
	}
	if a.Seekable() && im.s.ArrayBegun("features") != nil {
		// Gone on with, a member of an archive is not read from its start, so no checksum covers
		// what is.
		if err := a.Check(ctx); err != nil {
			return err
		}
	}
	return im.matrix(ctx, a)
}

// featuresOr makes the features that --feature-fn or --features says, or else those of own.
func (im *importer) featuresOr(ctx context.Context, own func() error) error {
	switch {
	case im.o.FeatureFn != "":
		return im.madeFeatures(ctx)
	case im.o.Features != "":
		return im.featureFile(ctx, im.o.Features)
	}
	return own()
}

// arrayOrMade writes an array of features, or where it is nil those that FeatureFn makes.
func (im *importer) arrayOrMade(ctx context.Context, a *npy.Array) error {
	if a == nil {
		return im.madeFeatures(ctx)
	}
	return im.features(ctx, a)
}

// featureFile writes features.npy from a file that Features names.
func (im *importer) featureFile(ctx context.Context, path string) error {
	if !isArray(path) {
		return im.csvMatrix(ctx, path, true)
	}
	a, err := npy.Open(path)
	if err != nil {
		return err
	}
	return im.features(ctx, a)
}

// madeFeatures makes the features that FeatureFn says.
func (im *importer) madeFeatures(ctx context.Context) error {
	if im.o.FeatureFn == RandomFeatures {
		return im.randomFeatures(ctx)
	}
	return im.hashFeatures(im.o.FeatureFn)
}

// csvMatrix writes features.npy from lines of numbers, one for each of the nodes.
func (im *importer) csvMatrix(ctx context.Context, path string, users bool) error {
	rows, err := im.featureRows(ctx, path, users)
	if err == nil && rows != im.m.Nodes {
		err = errs.New(errs.Usage, "%s ends after %d rows, there are %d nodes", path, rows,
			im.m.Nodes)
	}
	return err
}

// textFeatures writes features.npy from a text file or array and returns the rows.
func (im *importer) textFeatures(ctx context.Context, path string) (int64, error) {
	if !isArray(path) {
		return im.featureRows(ctx, path, true)
	}
	a, err := npy.Open(path)
	if err != nil {
		return 0, err
	}
	if err := im.matrix(ctx, a); err != nil {
		return 0, err
	}
	return a.Header.Shape[0], nil
}

// featureRows writes features.npy from a table and returns the rows.
func (im *importer) featureRows(ctx context.Context, path string, users bool) (n int64,
	err error) {
	t, err := im.tableOf(ctx, "features", path, users)
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
		if n += int64(len(r.lines)); t.id < 0 && im.m.Nodes > 0 && n > im.m.Nodes && !users {
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
