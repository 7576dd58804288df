package dataset

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"helios/dataset/npy"
	"helios/internal/errs"
)

// The names under which arrays are looked for, in a directory (with ".npy") and in an archive. The first of each is ours;
// the others are those of NumPy exports of PyTorch Geometric, DGL and OGB, and of the heterophilous graphs of
// Platonov et al. (ICLR 2023).
var (
	edgeNames    = []string{"edge_index", "edges", "edge", "edge_list"}
	featureNames = []string{"features", "node_feat", "feat", "feats", "x", "node_features", "node_feats"}
	labelNames   = []string{"labels", "node_label", "label", "y", "node_labels"}
	splitNames   = [3][]string{
		{"train", "train_idx", "train_mask", "idx_train", "train_masks", "train_ids", "train_index", "train_indices"},
		{"val", "valid", "val_idx", "valid_idx", "val_mask", "idx_val", "val_masks", "valid_mask", "valid_masks", "val_ids", "val_index", "val_indices"},
		{"test", "test_idx", "test_mask", "idx_test", "test_masks", "test_ids", "test_index", "test_indices"},
	}
)

// ArrayNames are the names that ImportOptions.Map gives the input's names for.
var ArrayNames = []string{"edge_index", "indptr", "indices", "features", "labels", "train", "val", "test"}

// arrays finds arrays by name in a directory or an archive.
type arrays struct {
	dir     string
	archive *npy.Archive
	theirs  map[string]string // the input's name for one of ArrayNames
	used    map[string]bool
}

func openArrays(in string, theirs map[string]string) (*arrays, error) {
	a := &arrays{theirs: theirs, used: map[string]bool{}}
	st, err := os.Stat(in)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	switch {
	case st.IsDir():
		a.dir = in
	case strings.HasSuffix(in, ".npz"):
		if a.archive, err = npy.OpenArchive(in); err != nil {
			return nil, err
		}
	case strings.HasSuffix(in, ".npy"):
		return nil, errs.New(errs.Usage, "%s is one array; give the directory that holds %s.npy, %s.npy and %s.npy, or an .npz", in, edgeNames[0], featureNames[0], labelNames[0])
	default:
		return nil, errs.New(errs.Usage, "%s: neither a directory of .npy files nor an .npz archive", in)
	}
	return a, nil
}

func (a *arrays) close() error {
	if a.archive != nil {
		return a.archive.Close()
	}
	return nil
}

// find opens the array that Map names for the first of names, or else the first of names that is there, or returns nil.
func (a *arrays) find(names ...string) (*npy.Array, error) {
	mapped := a.theirs[names[0]]
	if mapped != "" {
		names = []string{mapped}
	}
	have := a.names()
	for _, n := range names {
		if !slices.Contains(have, n) {
			continue
		}
		a.used[n] = true
		if a.archive != nil {
			return a.archive.Array(n)
		}
		return npy.Open(filepath.Join(a.dir, n+".npy"))
	}
	if mapped != "" {
		return nil, errs.New(errs.Usage, "--map: %s has no array %s (it has %s)", a.where(), brief(mapped), briefNames(have))
	}
	return nil, nil
}

// names lists the arrays.
func (a *arrays) names() (names []string) {
	if a.archive != nil {
		return a.archive.Names()
	}
	for _, n := range unusedFiles(a.dir) {
		if n, ok := strings.CutSuffix(n, ".npy"); ok {
			names = append(names, n)
		}
	}
	return names
}

// unused lists the arrays that nobody took, and in a folder also the files that are no arrays.
func (a *arrays) unused() (names []string) {
	all := a.names()
	if a.archive != nil {
		all = append(all, a.archive.Others()...)
	} else {
		all = unusedFiles(a.dir)
	}
	for _, n := range all {
		if !a.used[strings.TrimSuffix(n, ".npy")] {
			names = append(names, n)
		}
	}
	return names
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
//	train, val (valid), test               node ids, also as *_idx, idx_*; or masks, also as *_mask, *_masks
//
// The splits are optional: all three or none. Every array is streamed. Map gives other names. Arrays that nobody takes are
// named, and where they look like splits, and there are no others, the import is refused.
func ImportNPY(ctx context.Context, o ImportOptions) (err error) {
	if err := o.fill(); err != nil {
		return err
	}
	in, err := openArrays(o.In, o.Map)
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
			err = errs.New(errs.Usage, "%s has no %s (looked for %s; it has %s); --map THEIRS=%s names them", in.where(), what, strings.Join(names, ", "), briefNames(in.names()), names[0])
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
		return errs.New(errs.Usage, "%s has no labels (looked for %s; it has %s); --map THEIRS=labels names them, --unlabelled-ok imports it without", in.where(), strings.Join(labelNames, ", "), briefNames(in.names()))
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
		if labels, err = im.labelArray(lab); err != nil {
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
	if err := im.checkNodes(nodesFrom); err != nil {
		return err
	}
	splitsIn := in
	if o.SplitDir != "" {
		splitsIn = &arrays{dir: o.SplitDir, used: map[string]bool{}}
	}
	var splits []splitSet
	if !o.MakeSplits {
		if splits, err = im.splitArrays(splitsIn); err != nil {
			return err
		}
	}
	// The small and likely wrong things are checked by now; next the long ones.
	edges, err := in.find(edgeNames...)
	if err != nil {
		return err
	}
	var ptr, idx *npy.Array
	if edges == nil {
		if ptr, idx, err = findCSC(in); err != nil {
			return err
		}
	}
	unused := in.unused()
	if len(splits) == 0 && !o.MakeSplits {
		if odd := slices.DeleteFunc(slices.Clone(unused), func(n string) bool { return !looksLikeSplit(n) }); len(odd) > 0 {
			return errs.New(errs.Usage, "%s holds %s, which may be its splits, and none that is known; name them with --map, as in --map %s=train, give --splits DIR, or --make-splits to deal new ones",
				in.where(), briefNames(odd), brief(odd[0]))
		}
	}
	im.noteUnused(in.where(), unused)
	if edges != nil {
		err = im.edgeIndex(ctx, edges)
	} else {
		err = im.cscArrays(ctx, ptr, idx)
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

func findCSC(in *arrays) (ptr, idx *npy.Array, err error) {
	if ptr, err = in.find("indptr"); err != nil {
		return nil, nil, err
	}
	if idx, err = in.find("indices"); err != nil {
		return nil, nil, err
	}
	if ptr == nil || idx == nil {
		return nil, nil, errs.New(errs.Usage, "%s has no edges (looked for %s, or indptr and indices; it has %s); --map THEIRS=edge_index names them",
			in.where(), strings.Join(edgeNames, ", "), briefNames(in.names()))
	}
	return ptr, idx, nil
}

// cscArrays takes the edges of indptr and indices.
func (im *importer) cscArrays(ctx context.Context, ptr, idx *npy.Array) error {
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
