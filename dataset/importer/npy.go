package importer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/options"
)

func init() {
	register(Format{Name: "npy",
		Usage:       "NumPy arrays: features, labels and edges, in a folder or .npz archive",
		Description: npyHelp}, NPY)
}

// NPYOptions shape an import of arrays.
type NPYOptions struct {
	Map ArrayMap `option:"map" arg:"THEIRS=OURS[,…]" usage:"THEIRS=OURS[,…]: names of the input's arrays; ours are edge_index, indptr, indices, features, labels, train, val, test"`
	Options
}

const npyHelp = "Arrays are found by their names: edge_index (2 × edges), features (nodes × dim), labels (nodes),\n" +
	"and train, val and test where the splits are given: ids, or masks, also several of them (10 × nodes; option split-index).\n" +
	"option map gives other names, as in my_ids=train. Arrays that are not used are named."

// The names under which arrays are looked for, in a directory (with ".npy") and in an archive. The
// first of each is ours; the others are those of NumPy exports of PyTorch Geometric, DGL and OGB,
// and of the heterophilous graphs of Platonov et al. (ICLR 2023).
var (
	edgeNames    = []string{"edge_index", "edges", "edge", "edge_list"}
	featureNames = []string{"features", "node_feat", "feat", "feats", "x", "node_features",
		"node_feats"}
	labelNames = []string{"labels", "node_label", "label", "y", "node_labels"}
	splitNames = [3][]string{
		{"train", "train_idx", "train_mask", "idx_train", "train_masks", "train_ids", "train_index",
			"train_indices"},
		{"val", "valid", "val_idx", "valid_idx", "val_mask", "idx_val", "val_masks", "valid_mask",
			"valid_masks", "val_ids", "val_index", "val_indices"},
		{"test", "test_idx", "test_mask", "idx_test", "test_masks", "test_ids", "test_index",
			"test_indices"},
	}
)

// ArrayNames are the names that an ArrayMap gives the input's names for.
var ArrayNames = []string{"edge_index", "indptr", "indices", "features", "labels", "train",
	"val", "test"}

// ArrayMap gives the input's name for one of ArrayNames, such as "train": "my_train_ids".
type ArrayMap map[string]string

// UnmarshalText reads THEIRS=OURS[,…].
func (m *ArrayMap) UnmarshalText(text []byte) error {
	pairs, err := options.List(string(text))
	if err != nil {
		return err
	}
	*m = ArrayMap{}
	for _, p := range pairs {
		theirs, ours, _ := strings.Cut(p, "=")
		if theirs == "" || !slices.Contains(ArrayNames, ours) {
			return fmt.Errorf("%q: give THEIRS=OURS, where ours is one of %s", p,
				strings.Join(ArrayNames, ", "))
		}
		if had := (*m)[ours]; had != "" {
			return fmt.Errorf("%s and %s are both to be %s; keep one", had, theirs, ours)
		}
		(*m)[ours] = theirs
	}
	return nil
}

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
		return nil, errs.New(errs.Usage,
			"%s is one array; give the directory that holds %s.npy, %s.npy and %s.npy, or an .npz",
			in, edgeNames[0], featureNames[0], labelNames[0])
	default:
		return nil, errs.New(errs.Usage,
			"%s: neither a directory of .npy files nor an .npz archive", in)
	}
	return a, nil
}

func (a *arrays) close() error {
	if a.archive != nil {
		return a.archive.Close()
	}
	return nil
}

// find opens the array that Map names for the first of names, or else the first of names that is
// there, or returns nil.
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
		return nil, errs.New(errs.Usage, "option map: %s has no array %s (it has %s)", a.where(),
			brief(mapped), briefNames(have))
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

// NPY imports arrays: a directory of .npy files, or an .npz archive, with
//
//	edge_index (or edges, edge)            [2, E] or [E, 2], sources first; or
//	indptr and indices                     CSC: in-neighbours of v at indices[indptr[v]:indptr[v+1]]
//	features (node_feat, feat, feats, x)   [nodes, dim], floats of any width
//	labels (node_label, label, y)          [nodes] or [nodes, 1], integers or floats, NaN or -1 = none
//	train, val (valid), test               node ids, also as *_idx, idx_*; or masks, also as *_mask, *_masks
//
// The splits are optional: all three or none. Every array is streamed. Map gives other names.
// Arrays that nobody takes are named, and where they look like splits, and there are no others, the
// import is refused.
func NPY(ctx context.Context, o NPYOptions) (err error) {
	if err := o.fillOwn(); err != nil {
		return err
	}
	in, err := openArrays(o.In, o.Map)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.close()) }()
	return run(request{kind: "npy", options: &o, Options: o.Options}, func(im *importer) error {
		return (&npyImport{im}).run(ctx, in)
	})
}

// npyImport is an import of arrays.
type npyImport struct{ *importer }

func (im *npyImport) run(ctx context.Context, in *arrays) error {
	o := &im.o
	im.m.Source.From = []string{filepath.Base(filepath.Clean(o.In))}
	need := func(a *npy.Array, err error, what string, names []string) (*npy.Array, error) {
		if err == nil && a == nil {
			err = errs.New(errs.Usage,
				"%s has no %s (looked for %s; it has %s); option map THEIRS=%s names them", in.where(),
				what, strings.Join(names, ", "), briefNames(in.names()), names[0])
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
		return errs.New(errs.Usage,
			"%s has no labels (looked for %s; it has %s); option map THEIRS=labels names them, option unlabelled-ok imports it without",
			in.where(), strings.Join(labelNames, ", "), briefNames(in.names()))
	}
	if err != nil {
		return err
	}
	nodesFrom := ""
	if o.Nodes > 0 {
		im.m.Nodes, nodesFrom = o.Nodes, "option nodes"
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
		return errs.New(errs.Usage, "%s: nothing tells the number of nodes; give option nodes",
			in.where())
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
		if odd := slices.DeleteFunc(slices.Clone(unused),
			func(n string) bool { return !looksLikeSplit(n) }); len(odd) > 0 {
			return errs.New(errs.Usage,
				"%s holds %s, which may be its splits, and none that is known; name them with option map, as in option map %s=train, give option splits DIR, or option make-splits to deal new ones",
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

func findCSC(in *arrays) (ptr, idx *npy.Array, err error) {
	if ptr, err = in.find("indptr"); err != nil {
		return nil, nil, err
	}
	if idx, err = in.find("indices"); err != nil {
		return nil, nil, err
	}
	if ptr == nil || idx == nil {
		return nil, nil, errs.New(errs.Usage,
			"%s has no edges (looked for %s, or indptr and indices; it has %s); option map THEIRS=edge_index names them",
			in.where(), strings.Join(edgeNames, ", "), briefNames(in.names()))
	}
	return ptr, idx, nil
}

// splitArrays reads the three splits; none is fine, some is not.
func (im *npyImport) splitArrays(in *arrays) ([]splitSet, error) {
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
		return nil, errs.New(errs.Usage, "%s has no split %q; give all three splits or none",
			in.where(), missing[0])
	}
	return sets, nil
}
