package dataset

import (
	"context"
	"encoding/binary"
	"errors"
	"helios/dataset/npy"
	"helios/internal/errs"
	"io"
	"math"
	"path/filepath"
	"strconv"
)

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
