package dataset

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"helios/dataset/npy"
	"helios/internal/errs"
)

// The names under which arrays are looked for, in a directory (with ".npy") and in an archive.
var (
	edgeNames    = []string{"edge_index", "edges", "edge"}
	featureNames = []string{"features", "node_feat", "feat", "feats", "x"}
	labelNames   = []string{"labels", "node_label", "label", "y"}
	splitNames   = [3][]string{
		{"train", "train_idx", "train_mask", "idx_train"},
		{"val", "valid", "val_idx", "valid_idx", "val_mask", "idx_val"},
		{"test", "test_idx", "test_mask", "idx_test"},
	}
)

// arrays finds arrays by name in a directory or an archive.
type arrays struct {
	dir     string
	archive *npy.Archive
}

func openArrays(in string) (*arrays, error) {
	st, err := os.Stat(in)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	if st.IsDir() {
		return &arrays{dir: in}, nil
	}
	if strings.HasSuffix(in, ".npz") {
		a, err := npy.OpenArchive(in)
		return &arrays{archive: a}, err
	}
	if strings.HasSuffix(in, ".npy") {
		return nil, errs.New(errs.Usage, "%s is one array; give the directory that holds %s.npy, %s.npy and %s.npy, or an .npz", in, edgeNames[0], featureNames[0], labelNames[0])
	}
	return nil, errs.New(errs.Usage, "%s: neither a directory of .npy files nor an .npz archive", in)
}

func (a *arrays) close() error {
	if a.archive != nil {
		return a.archive.Close()
	}
	return nil
}

// find opens the first of names that is there, or returns nil.
func (a *arrays) find(names ...string) (*npy.Array, error) {
	if a.archive != nil {
		for _, n := range names {
			for _, have := range a.archive.Names() {
				if have == n {
					return a.archive.Array(n)
				}
			}
		}
		return nil, nil
	}
	for _, n := range names {
		path := filepath.Join(a.dir, n+".npy")
		if _, err := os.Stat(path); err == nil {
			return npy.Open(path)
		} else if !errors.Is(err, os.ErrNotExist) {
			return nil, errs.With(errs.Usage, err)
		}
	}
	return nil, nil
}

func (a *arrays) where() string {
	if a.archive != nil {
		return a.archive.Path
	}
	return a.dir
}

// ImportNPY imports arrays: a directory of .npy files, or an .npz archive, with
//
//	edge_index (or edges, edge)            [2, E] or [E, 2], sources first; or
//	indptr and indices                     CSC: in-neighbours of v at indices[indptr[v]:indptr[v+1]]
//	features (node_feat, feat, feats, x)   [nodes, dim], floats of any width
//	labels (node_label, label, y)          [nodes] or [nodes, 1], integers or floats, NaN or -1 = none
//	train, val (valid), test               node ids, also as *_idx, idx_*; or bool masks, also as *_mask
//
// The splits are optional: all three or none. Every array is streamed.
func ImportNPY(ctx context.Context, o ImportOptions) (err error) {
	if err := o.fill(); err != nil {
		return err
	}
	in, err := openArrays(o.In)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.close()) }()
	return runImport(o, "npy", func(im *importer) error { return im.fromArrays(ctx, in) })
}

func (im *importer) fromArrays(ctx context.Context, in *arrays) error {
	o := &im.o
	im.m.Source.From = []string{filepath.Base(filepath.Clean(o.In))}
	need := func(a *npy.Array, err error, what string, names []string) (*npy.Array, error) {
		if err == nil && a == nil {
			err = errs.New(errs.Usage, "%s has no %s (looked for %s)", in.where(), what, strings.Join(names, ", "))
		}
		return a, err
	}
	get := func(override string, names []string) (*npy.Array, error) {
		if override != "" {
			return npy.Open(override)
		}
		return in.find(names...)
	}
	feat, err := get(o.Features, featureNames)
	if feat, err = need(feat, err, "features", featureNames); err != nil {
		return err
	}
	lab, err := get(o.Labels, labelNames)
	if err == nil && lab == nil && !o.UnlabelledOK {
		return errs.New(errs.Usage, "%s has no labels (looked for %s); --unlabelled-ok imports it without", in.where(), strings.Join(labelNames, ", "))
	}
	if err != nil {
		return err
	}
	nodesFrom := ""
	if len(feat.Header.Shape) > 0 {
		if err := im.sameRows(feat.Header.Shape[0], feat.Name, &nodesFrom); err != nil {
			return err
		}
	}
	var labels []int32
	labelsFile := ""
	if lab != nil {
		if labels, err = labelArray(lab); err != nil {
			return err
		}
		labelsFile = lab.Name
		if err := im.sameRows(int64(len(labels)), lab.Name, &nodesFrom); err != nil {
			return err
		}
	}
	splitsIn := in
	if o.SplitDir != "" {
		splitsIn = &arrays{dir: o.SplitDir}
	}
	splits, err := im.splitArrays(splitsIn)
	if err != nil {
		return err
	}
	// The small and likely wrong things are checked by now; next the long ones.
	edges, err := in.find(edgeNames...)
	if err != nil {
		return err
	}
	if edges != nil {
		err = im.edgeIndex(ctx, edges)
	} else {
		err = im.cscArrays(ctx, in)
	}
	if err != nil {
		return err
	}
	if err := im.topology(ctx); err != nil {
		return err
	}
	if err := im.matrix(ctx, feat); err != nil {
		return err
	}
	return im.labelsAndSplits(labels, labelsFile, splits)
}

// edgeIndex streams an edge list array.
func (im *importer) edgeIndex(ctx context.Context, a *npy.Array) error {
	sh := a.Header.Shape
	if len(sh) != 2 || sh[0] != 2 && sh[1] != 2 {
		return errs.New(errs.Usage, "%s: edges have shape %s, must be (2, edges) or (edges, 2)", a.Name, a.Header.ShapeString())
	}
	// [2, 2] is read as [2, E], which is how PyTorch Geometric and OGB write. An array in
	// Fortran order is its transpose in C order.
	rows := sh[0] == 2
	n := sh[1]
	if !rows {
		n = sh[0]
	}
	if a.Header.Fortran {
		rows = !rows
	}
	if !rows {
		r, err := a.Reader(0)
		if err != nil {
			return err
		}
		defer r.Close()
		buf := make([]int64, 64<<10) // even: pairs are not cut
		for at := int64(0); at < n; {
			k, err := r.Ints(buf)
			if err != nil {
				return err
			}
			for i := 0; i < k; i += 2 {
				if err := im.checkedEdge(a.Name, buf[i], buf[i+1], 2*at, 2*at+1); err != nil {
					return err
				}
				at++
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			im.o.Progress.report("edges", at, n)
		}
		return nil
	}
	rs, err := a.Reader(0)
	if err != nil {
		return err
	}
	defer rs.Close()
	rd, err := a.Reader(n)
	if err != nil {
		return err
	}
	defer rd.Close()
	src, dst := make([]int64, 64<<10), make([]int64, 64<<10)
	for at := int64(0); at < n; {
		k := min(int64(len(src)), n-at)
		for _, x := range []struct {
			r *npy.Reader
			b []int64
		}{{rs, src[:k]}, {rd, dst[:k]}} {
			if got, err := x.r.Ints(x.b); err != nil {
				return err
			} else if int64(got) != k {
				return errs.New(errs.Usage, "%s: short read at edge %d", a.Name, at)
			}
		}
		for i := range k {
			if err := im.checkedEdge(a.Name, src[i], dst[i], at, n+at); err != nil {
				return err
			}
			at++
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		im.o.Progress.report("edges", at, n)
	}
	return nil
}

// checkedEdge takes an edge whose ids stood at the given positions of file.
func (im *importer) checkedEdge(file string, src, dst, srcPos, dstPos int64) error {
	if uint64(src) >= uint64(im.m.Nodes) {
		return badID(file, srcPos, src, im.m.Nodes)
	}
	if uint64(dst) >= uint64(im.m.Nodes) {
		return badID(file, dstPos, dst, im.m.Nodes)
	}
	return im.edge(src, dst)
}

// cscArrays streams indptr and indices.
func (im *importer) cscArrays(ctx context.Context, in *arrays) error {
	ptr, err := in.find("indptr")
	if err != nil {
		return err
	}
	idx, err := in.find("indices")
	if err != nil {
		return err
	}
	if ptr == nil || idx == nil {
		return errs.New(errs.Usage, "%s has no edges (looked for %s, or indptr and indices)", in.where(), strings.Join(edgeNames, ", "))
	}
	if len(ptr.Header.Shape) != 1 || ptr.Header.Shape[0] != im.m.Nodes+1 {
		return errs.New(errs.Usage, "%s has shape %s, the %d nodes need (%d,)", ptr.Name, ptr.Header.ShapeString(), im.m.Nodes, im.m.Nodes+1)
	}
	if len(idx.Header.Shape) != 1 {
		return errs.New(errs.Usage, "%s has shape %s, must be one-dimensional", idx.Name, idx.Header.ShapeString())
	}
	total := idx.Header.Shape[0]
	rp, err := ptr.Reader(0)
	if err != nil {
		return err
	}
	defer rp.Close()
	ri, err := idx.Reader(0)
	if err != nil {
		return err
	}
	defer ri.Close()
	offs, ids := make([]int64, 16<<10), make([]int64, 64<<10)
	var left []int64 // of ids
	pos, v := int64(0), int64(-1)
	for v < im.m.Nodes {
		k, err := rp.Ints(offs)
		if err != nil {
			return err
		}
		for _, end := range offs[:k] {
			if v < 0 && end != 0 || end < pos || end > total {
				return errs.New(errs.Usage, "%s: offset %d at position %d does not rise from 0 to the %d entries of %s", ptr.Name, end, v+1, total, idx.Name)
			}
			for ; pos < end; pos++ {
				if len(left) == 0 {
					n, err := ri.Ints(ids)
					if err != nil {
						return err
					}
					left = ids[:n]
				}
				if err := im.checkedEdge(idx.Name, left[0], v, pos, pos); err != nil {
					return err
				}
				left = left[1:]
			}
			v++
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		im.o.Progress.report("edges", pos, total)
	}
	if pos != total {
		return errs.New(errs.Usage, "%s ends with %d, but %s has %d entries", ptr.Name, pos, idx.Name, total)
	}
	return nil
}

// splitArrays reads the three splits; none is fine, some is not.
func (im *importer) splitArrays(in *arrays) ([]splitSet, error) {
	var sets []splitSet
	var missing []string
	for _, names := range splitNames {
		a, err := in.find(names...)
		if err != nil {
			return nil, err
		}
		if a == nil {
			missing = append(missing, names[0])
			continue
		}
		ids, err := im.splitIDs(a)
		if err != nil {
			return nil, err
		}
		sets = append(sets, splitSet{a.Name, ids})
	}
	if len(missing) > 0 && (len(sets) > 0 || im.o.SplitDir != "") {
		return nil, errs.New(errs.Usage, "%s has no split %q; give all three splits or none", in.where(), missing[0])
	}
	return sets, nil
}

// splitIDs reads a list of ids, or a mask.
func (im *importer) splitIDs(a *npy.Array) ([]int64, error) {
	if len(a.Header.Shape) != 1 {
		return nil, errs.New(errs.Usage, "%s: a split has shape %s, must be one-dimensional", a.Name, a.Header.ShapeString())
	}
	r, err := a.Reader(0)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	mask := a.Header.DType.Kind == 'b'
	if mask && a.Header.Shape[0] != im.m.Nodes {
		return nil, errs.New(errs.Usage, "%s is a mask of %d nodes, there are %d", a.Name, a.Header.Shape[0], im.m.Nodes)
	}
	var ids []int64
	buf := make([]int64, 32<<10)
	for pos := int64(0); ; {
		n, err := r.Ints(buf)
		if errors.Is(err, io.EOF) {
			return ids, nil
		}
		if err != nil {
			return nil, err
		}
		for _, x := range buf[:n] {
			switch {
			case mask && x != 0:
				ids = append(ids, pos)
			case mask:
			case x < 0 || x >= im.m.Nodes:
				return nil, badID(a.Name, pos, x, im.m.Nodes)
			default:
				ids = append(ids, x)
			}
			pos++
		}
	}
}
