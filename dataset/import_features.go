package dataset

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strconv"

	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/rowtype"
)

// matrix copies a features array, [nodes, dim] of any number type, as float32; float16 stays what it is. The
// option FeatureDType decides otherwise.
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
	if a.Header.DType.Kind == 'f' && a.Header.DType.Size == 2 {
		im.m.DType = rowtype.Float16.String()
	}
	w, whole, err := im.featureWriterFrom(a.Name, sh[1], sh[0])
	if err != nil || whole {
		return err
	}
	r, err := a.Reader(w.n)
	if err != nil {
		return errors.Join(err, w.out.discard())
	}
	defer r.Close()
	buf := make([]float32, 64<<10)
	total := a.Header.Elements()
	t := newMarkTimer()
	for done := w.n; ; {
		n, err := r.Float32s(buf)
		var re *npy.RangeError
		if errors.As(err, &re) {
			err = errs.New(errs.Usage, "%s: feature %d of node %d is %g, which float32 cannot hold; scale the features", a.Name, re.Index%sh[1], re.Index/sh[1], re.Value)
		}
		if err == nil {
			err = w.put(buf[:n])
			done += int64(n)
		}
		if j := im.s.journal; err == nil && j != nil && t.due() {
			err = t.mark(func() error { return j.arrayTo(w.out) })
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

// featureWriterFrom goes on where an interrupted import was: with n elements written, or with all rows (whole).
func (im *importer) featureWriterFrom(from string, dim, rows int64) (w *featureWriter, whole bool, err error) {
	j := im.s.journal
	if j == nil {
		w, err = im.featureWriter(from, dim)
		return w, false, err
	}
	t, dt := im.featureType()
	if d, ok := j.done["features"]; ok && d.Rows == rows && d.Width == dim {
		return nil, true, nil
	}
	at, ok := j.partial["features"]
	if !ok {
		w, err = im.featureWriter(from, dim)
		return w, false, err
	}
	out, err := im.s.arrayFrom("features", dt, dim, &at)
	if err != nil {
		return nil, false, err
	}
	return &featureWriter{out: out, from: from, dim: dim, t: t, n: at.Bytes / int64(dt.Size)}, false, nil
}

// featureType is the type of features.npy.
func (im *importer) featureType() (rowtype.Type, npy.DType) {
	if im.o.FeatureDType != "" {
		im.m.DType, im.m.Source.Options["feature-dtype"] = im.o.FeatureDType, im.o.FeatureDType
	}
	return im.m.RowType(), im.m.fileDType()
}

// featureWriter writes features.npy and rejects what a model cannot train on, or the type cannot hold.
type featureWriter struct {
	out  *arrayOut
	from string
	dim  int64
	n    int64
	t    rowtype.Type
	tmp  []byte
}

// featureWriter makes features.npy of the type that FeatureDType or else Meta.DType says.
func (im *importer) featureWriter(from string, dim int64) (*featureWriter, error) {
	t, dt := im.featureType()
	if err := enoughDisk(im.o.Out, float64(im.m.Nodes)*float64(dim)*float64(dt.Size)); err != nil {
		return nil, fmt.Errorf("%s: features of %d numbers for %d nodes: %w", from, dim, im.m.Nodes, err)
	}
	out, err := im.s.array("features", dt, dim)
	return &featureWriter{out: out, from: from, dim: dim, t: t}, err
}

// checkFeatureDType checks the option.
func (o *ImportOptions) checkFeatureDType() error {
	switch o.FeatureDType {
	case "", rowtype.Float32.String(), rowtype.Float16.String():
		return nil
	}
	return errs.New(errs.Usage, "--feature-dtype %q: a dataset's own features are float32 or float16; rows of other types are made by \"heliosctl load --row-dtype\"", o.FeatureDType)
}

func (w *featureWriter) put(v []float32) error {
	size := w.t.RowBytes(2) / 2 // of an element
	if need := w.t.RowBytes(len(v)); cap(w.tmp) < need {
		w.tmp = make([]byte, need)
	}
	for i, x := range v {
		if x-x != 0 { // NaN or an infinity
			at := w.n + int64(i)
			return errs.New(errs.Usage, "%s: feature %d of node %d is %v; replace it with a number", w.from, at%w.dim, at/w.dim, x)
		}
	}
	if err := w.t.Encode(w.tmp[:w.t.RowBytes(len(v))], v); err != nil {
		var re *rowtype.RangeError
		if !errors.As(err, &re) {
			return err
		}
		at := w.n + int64(re.Index)
		return errs.New(errs.Usage, "%s: feature %d of node %d is %v, which %s cannot hold; use --feature-dtype float32",
			w.from, at%w.dim, at/w.dim, re.Value, w.t)
	}
	w.n += int64(len(v))
	_, err := w.out.Write(w.tmp[:size*len(v)])
	return err
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
