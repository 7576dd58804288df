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
	var feat *npy.Array
	var err error
	if o.FeatureFn == "" {
		feat, err = get(o.Features, featureNames)
		if feat, err = need(feat, err, "features", featureNames); err != nil {
			return err
		}
	}
	lab, err := get(o.Labels, labelNames)
	if err == nil && lab == nil && !o.UnlabelledOK {
		return errs.New(errs.Usage, "%s has no labels (looked for %s); --unlabelled-ok imports it without", in.where(), strings.Join(labelNames, ", "))
	}
	if err != nil {
		return err
	}
	nodesFrom := ""
	if o.Nodes > 0 {
		im.m.Nodes, nodesFrom = o.Nodes, "--nodes"
	}
	if feat != nil && len(feat.Header.Shape) > 0 {
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
	if nodesFrom == "" {
		return errs.New(errs.Usage, "%s: nothing tells the number of nodes; give --nodes", in.where())
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
	if feat == nil {
		err = im.hashFeatures(o.FeatureFn)
	} else {
		err = im.matrix(ctx, feat)
	}
	if err != nil {
		return err
	}
	return im.labelsAndSplits(labels, labelsFile, splits)
}

const (
	edgesPerPart = 1 << 22 // of arrays
	idsPerRead   = 32 << 10
)

// edgeIndex takes the edges of an edge list array.
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
	per := n // a compressed array is read from its start only
	if a.Seekable() {
		per = edgesPerPart
	}
	nodes := im.m.Nodes
	s := edgeSource{Name: a.Name, Unit: "edges", Total: n, Parts: int((n + per - 1) / max(per, 1))}
	if rows {
		s.Read = func(_ context.Context, part int, emit func(src, dst []int64) error, done func(int64)) error {
			return readRows(a, nodes, n, int64(part)*per, min(int64(part+1)*per, n), emit, done)
		}
	} else {
		s.Read = func(_ context.Context, part int, emit func(src, dst []int64) error, done func(int64)) error {
			return readPairs(a, nodes, int64(part)*per, min(int64(part+1)*per, n), emit, done)
		}
	}
	return im.edgesFrom(ctx, s)
}

// readRows reads edges from..to of an array whose first n ids are the sources.
func readRows(a *npy.Array, nodes, n, from, to int64, emit func(src, dst []int64) error, done func(int64)) error {
	rs, err := a.Reader(from)
	if err != nil {
		return err
	}
	defer rs.Close()
	rd, err := a.Reader(n + from)
	if err != nil {
		return err
	}
	defer rd.Close()
	src, dst := make([]int64, idsPerRead), make([]int64, idsPerRead)
	for at := from; at < to; {
		k := min(int64(len(src)), to-at)
		if err := fill(rs, src[:k]); err != nil {
			return err
		}
		if err := fill(rd, dst[:k]); err != nil {
			return err
		}
		for i := range k {
			if uint64(src[i]) >= uint64(nodes) {
				return badID(a.Name, at+i, src[i], nodes)
			}
			if uint64(dst[i]) >= uint64(nodes) {
				return badID(a.Name, n+at+i, dst[i], nodes)
			}
		}
		if err := emit(src[:k], dst[:k]); err != nil {
			return err
		}
		at += k
		done(k)
	}
	return nil
}

// readPairs reads edges from..to of an array of pairs.
func readPairs(a *npy.Array, nodes, from, to int64, emit func(src, dst []int64) error, done func(int64)) error {
	r, err := a.Reader(2 * from)
	if err != nil {
		return err
	}
	defer r.Close()
	both := make([]int64, 2*idsPerRead)
	src, dst := make([]int64, idsPerRead), make([]int64, idsPerRead)
	for at := from; at < to; {
		k := min(int64(len(src)), to-at)
		if err := fill(r, both[:2*k]); err != nil {
			return err
		}
		for i := range 2 * k {
			if uint64(both[i]) >= uint64(nodes) {
				return badID(a.Name, 2*at+i, both[i], nodes)
			}
		}
		for i := range k {
			src[i], dst[i] = both[2*i], both[2*i+1]
		}
		if err := emit(src[:k], dst[:k]); err != nil {
			return err
		}
		at += k
		done(k)
	}
	return nil
}

// fill reads as many integers as dst has.
func fill(r *npy.Reader, dst []int64) error {
	for len(dst) > 0 {
		n, err := r.Ints(dst)
		if err != nil {
			return err
		}
		dst = dst[n:]
	}
	return nil
}

// cscArrays takes the edges of indptr and indices.
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
	nodes := im.m.Nodes
	if len(ptr.Header.Shape) != 1 || ptr.Header.Shape[0] != nodes+1 {
		return errs.New(errs.Usage, "%s has shape %s, the %d nodes need (%d,)", ptr.Name, ptr.Header.ShapeString(), nodes, nodes+1)
	}
	if len(idx.Header.Shape) != 1 {
		return errs.New(errs.Usage, "%s has shape %s, must be one-dimensional", idx.Name, idx.Header.ShapeString())
	}
	per := int64(1) << 20 // nodes
	if !ptr.Seekable() || !idx.Seekable() {
		per = nodes
	}
	return im.edgesFrom(ctx, edgeSource{Name: idx.Name, Unit: "edges", Total: idx.Header.Shape[0], Parts: int((nodes + per - 1) / max(per, 1)),
		Read: func(_ context.Context, part int, emit func(src, dst []int64) error, done func(int64)) error {
			return readCSC(ptr, idx, nodes, int64(part)*per, min(int64(part+1)*per, nodes), emit, done)
		}})
}

// readCSC reads the edges to the nodes from..to.
func readCSC(ptr, idx *npy.Array, nodes, from, to int64, emit func(src, dst []int64) error, done func(int64)) error {
	total := idx.Header.Shape[0]
	rp, err := ptr.Reader(from)
	if err != nil {
		return err
	}
	defer rp.Close()
	bad := func(end, at int64) error {
		return errs.New(errs.Usage, "%s: offset %d at position %d does not rise from 0 to the %d entries of %s", ptr.Name, end, at, total, idx.Name)
	}
	offs := make([]int64, min(to-from+1, idsPerRead))
	if err := fill(rp, offs[:1]); err != nil {
		return err
	}
	pos := offs[0]
	if from == 0 && pos != 0 || pos < 0 || pos > total {
		return bad(pos, from)
	}
	ri, err := idx.Reader(pos)
	if err != nil {
		return err
	}
	defer ri.Close()
	src, dst := make([]int64, 0, idsPerRead), make([]int64, 0, idsPerRead)
	flush := func() error {
		if err := fill(ri, src); err != nil {
			return err
		}
		first := pos - int64(len(src))
		for i, v := range src {
			if uint64(v) >= uint64(nodes) {
				return badID(idx.Name, first+int64(i), v, nodes)
			}
		}
		if err := emit(src, dst); err != nil {
			return err
		}
		done(int64(len(src)))
		src, dst = src[:0], dst[:0]
		return nil
	}
	for v := from; v < to; {
		k := min(to-v, int64(len(offs)))
		if err := fill(rp, offs[:k]); err != nil {
			return err
		}
		for _, end := range offs[:k] {
			if end < pos || end > total {
				return bad(end, v+1)
			}
			for pos < end {
				n := min(end-pos, int64(cap(dst)-len(dst)))
				for range n {
					dst = append(dst, v)
				}
				src = src[:len(dst)]
				if pos += n; len(dst) == cap(dst) {
					if err := flush(); err != nil {
						return err
					}
				}
			}
			v++
		}
	}
	if to == nodes && pos != total {
		return errs.New(errs.Usage, "%s ends with %d, but %s has %d entries", ptr.Name, pos, idx.Name, total)
	}
	return flush()
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
