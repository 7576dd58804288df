package importer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/options"
)

var npyFormat = newFormat(Format{Name: "npy",
	Usage:       "arrays of NumPy or tensors of PyTorch: features, labels and edges, in a folder, .npz archive or .pt file",
	Description: npyHelp}, NPY)

// NPYOptions shape an import of arrays.
type NPYOptions struct {
	Map   ArrayMap   `option:"map" common:"yes" arg:"THEIRS=OURS[,…]" usage:"THEIRS=OURS[,…]: names of the input's arrays; ours are edge_index, src, dst, indptr, indices, features, labels, train, val, test"`
	Types ArrayTypes `option:"types" arg:"OURS=TYPE[,…]" usage:"OURS=TYPE[,…]: element types of arrays without a header, such as features=float32,indptr=int64 (int8 to int64, uint8 to uint64, float16 to float64, bfloat16); {dim} is then the number of features in the file"`
	Lists string     `option:"lists" common:"yes" oneof:"in,out" shown:"as a SciPy archive says, else in" usage:"what a node's list in indptr and indices holds: in-neighbours (CSC) or out-neighbours (CSR)"`
	Options
}

const npyHelp = "Arrays are found by their names: edge_index (2 × edges, sources first; or edges × 2), or src and dst, or indptr and\n" +
	"indices; features (nodes × dim), labels (nodes), and train, val and test where the splits are given: ids, or masks,\n" +
	"also several of them (10 × nodes; {split-index}). {map} gives other names, as in my_ids=train.\n" +
	"{in} can also be a file of torch.save that holds a dict of tensors, as of PyG's data.to_dict(), and a folder may hold\n" +
	"tensors, as in x.pt; nothing in them is run. An archive of scipy.sparse.save_npz (csr, csc or coo) is an adjacency matrix, in which entry (i, j) is the edge from\n" +
	"i to j; it can also lie in the folder. Arrays that are not used are named.\n" +
	"A file without NumPy's header, as Ginex, DiskGNN, Legion and GNNLab keep arrays, is read with the type that {types}\n" +
	"gives it; {map} gives its whole name, as in feat.bin=features."

// The names under which arrays are looked for, in a directory (with ".npy") and in an archive. The
// first of each is ours; the others are those of NumPy exports of PyTorch Geometric, DGL and OGB,
// and of the heterophilous graphs of Platonov et al. (ICLR 2023).
var (
	edgeNames    = []string{"edge_index", "edges", "edge", "edge_list"}
	sourceNames  = []string{"src", "row"}
	targetNames  = []string{"dst", "col"}
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
var ArrayNames = append(slices.Clone(graphNames), "features", "labels", "train", "val", "test")

var graphNames = []string{"edge_index", "src", "dst", "indptr", "indices"}

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

// ArrayTypes gives the element types of arrays without a header, by ArrayNames.
type ArrayTypes map[string]npy.DType

// UnmarshalText reads OURS=TYPE[,…].
func (m *ArrayTypes) UnmarshalText(text []byte) error {
	pairs, err := options.List(string(text))
	if err != nil {
		return err
	}
	*m = ArrayTypes{}
	for _, p := range pairs {
		ours, name, _ := strings.Cut(p, "=")
		if !slices.Contains(ArrayNames, ours) {
			return fmt.Errorf("%s: give OURS=TYPE, where ours is one of %s", brief(p),
				strings.Join(ArrayNames, ", "))
		}
		kind := strings.TrimRight(name, "0123456789")
		bits, err := strconv.Atoi(name[len(kind):])
		if name == "bfloat16" {
			(*m)[ours] = npy.BFloat16
			continue
		}
		letter := map[string]string{"int": "i", "uint": "u", "float": "f"}[kind]
		if err != nil || bits%8 != 0 || letter == "" {
			return fmt.Errorf("%s: the type is int, uint or float and a number of bits, or bfloat16", brief(p))
		}
		if (*m)[ours], err = npy.ParseDType(fmt.Sprintf("<%s%d", letter, bits/8)); err != nil {
			return fmt.Errorf("%s: %w", brief(p), err)
		}
	}
	return nil
}

// arrays finds arrays by name in a directory or an archive.
type arrays struct {
	dir     string
	archive *npy.Archive
	matrix  *sparse // the archive is one, or it is in the folder
	theirs  ArrayMap
	types   ArrayTypes
	dim     int64 // features in a file without a header; 0: not known
	used    map[string]bool
}

func openArrays(o *NPYOptions, dim int64) (*arrays, error) {
	in := o.In
	a := &arrays{theirs: o.Map, types: o.Types, dim: dim, used: map[string]bool{}}
	st, err := os.Stat(in)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	switch {
	case st.IsDir():
		a.dir = in
	case isArray(in) && !container.Is(in, container.Torch):
		return nil, errs.New(errs.Usage,
			"%s is one array; give the directory that holds %s.npy, %s.npy and %s.npy, or an .npz",
			in, edgeNames[0], featureNames[0], labelNames[0])
	default:
		kind, err := container.FileOf(in)
		if err == nil && kind.Kind != container.Zip && kind.Kind != container.Torch {
			err = errs.New(errs.Usage, "%s: neither a directory of .npy or .pt files nor an .npz archive nor a file of PyTorch%s",
				in, kind.Hint())
		}
		if err != nil {
			return nil, err
		}
		open := npy.OpenArchive
		if kind.Kind == container.Torch {
			open = openTorch
		}
		if a.archive, err = open(in); err != nil {
			return nil, err
		}
		if a.matrix, err = openSparse(a.archive); err != nil {
			return nil, errors.Join(err, a.archive.Close())
		}
	}
	return a, nil
}

func (a *arrays) close() (err error) {
	if a.archive != nil {
		err = a.archive.Close()
	}
	if a.matrix != nil && a.matrix.archive != a.archive {
		err = errors.Join(err, a.matrix.archive.Close())
	}
	return err
}

// findMatrix looks for an adjacency matrix in a folder, as SciPy saves it. Other matrices, such as
// sparse features, are passed over where there is one.
func (a *arrays) findMatrix() error {
	if a.archive != nil {
		return nil
	}
	var other error // about the first that is none
	for _, n := range unusedFiles(a.dir) {
		if !strings.HasSuffix(n, ".npz") {
			continue
		}
		path := filepath.Join(a.dir, n)
		archive, err := npy.OpenArchive(path)
		if err != nil {
			other = cmp.Or(other, err)
			continue
		}
		m, err := openSparse(archive)
		if err == nil && m != nil && a.matrix == nil {
			a.matrix = m
			a.used[n] = true
			continue
		}
		other = cmp.Or(other, err)
		if err := archive.Close(); err != nil {
			return err
		}
		if m != nil {
			return errs.New(errs.Usage,
				"%s and %s are both a sparse matrix; give one with {in}, and the features and labels with options",
				a.matrix.archive.Path, path)
		}
	}
	if a.matrix != nil {
		return nil
	}
	return other
}

// open opens the file of one of ArrayNames. Without a header it is read by its type.
func (a *arrays) open(path, ours string) (*npy.Array, error) {
	dt, bare := a.types[ours]
	if !bare {
		return openArray(path)
	}
	if container.Is(path, container.NPY) {
		a, err := npy.OpenAs(path, dt)
		if errors.Is(err, npy.ErrTyped) {
			err = errs.New(errs.Usage, "%s has a header, which gives its type; take %s out of %v",
				path, ours, errs.Key("types"))
		}
		return a, err
	}
	kind, err := container.FileOf(path)
	if err == nil && kind.Foreign() {
		err = kind.Refuse(path)
	}
	if err != nil {
		return nil, err
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	n := st.Size() / int64(dt.Size)
	shape := []int64{n}
	switch {
	case ours == "edge_index":
		shape = []int64{2, n / 2}
	case ours == "features" && a.dim == 0:
		return nil, errs.New(errs.Usage,
			"%s has no header that tells the number of features; give %v, or take features out of %v",
			path, errs.Key("dim"), errs.Key("types"))
	case ours == "features":
		shape = []int64{n / a.dim, a.dim}
	}
	return npy.Section("", path, 0, npy.Header{DType: dt, Shape: shape}, true)
}

// bare opens the file without a header of one of ArrayNames.
func (a *arrays) bare(ours string) (*npy.Array, error) {
	name := cmp.Or(a.theirs[ours], ours)
	path := filepath.Join(a.dir, name)
	if a.archive != nil || filepath.Base(name) != name || !isFile(path) {
		return nil, errs.New(errs.Usage,
			"%v %s: %s has no file %s; name it with %v, as in name.bin=%s", errs.Key("types"), ours,
			a.where(), brief(name), errs.Key("map"), ours)
	}
	a.used[arrayName(name)] = true
	return a.open(path, ours)
}

// find opens the array that Map names for the first of names, or else the first of names that is
// there, or returns nil.
func (a *arrays) find(names ...string) (*npy.Array, error) {
	if _, bare := a.types[names[0]]; bare {
		return a.bare(names[0])
	}
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
		path := filepath.Join(a.dir, n)
		for _, e := range torchEndings {
			if isFile(path + e) {
				if isFile(path + ".npy") {
					return nil, errs.New(errs.Usage, "%s%s and %s.npy are both there; take one away", path, e, path)
				}
				return openArray(path + e)
			}
		}
		return npy.Open(path + ".npy")
	}
	if mapped != "" {
		return nil, errs.New(errs.Usage, "{map}: %s has no array %s (it has %s)", a.where(),
			brief(mapped), briefNames(have))
	}
	return nil, a.foreign(names)
}

// fileOr opens the file that an option names, or else finds an array.
func (a *arrays) fileOr(path string, names []string) (*npy.Array, error) {
	if path != "" {
		return a.open(path, names[0])
	}
	return a.find(names...)
}

// foreign refuses a file in the folder that has one of the names and is of a kind that is not read.
func (a *arrays) foreign(names []string) error {
	if a.archive != nil {
		return nil
	}
	graph := slices.Contains(graphNames, names[0]) // whose archive may be a matrix
	for _, f := range unusedFiles(a.dir) {
		base, ending, _ := strings.Cut(f, ".")
		if !slices.Contains(names, base) || ending == "npy" || ending == "npz" && graph {
			continue
		}
		path := filepath.Join(a.dir, f)
		switch kind, err := container.FileOf(path); {
		case err != nil:
			return err
		case ending == "npz":
			return errs.New(errs.Usage,
				"%s is an archive; in a folder, %s is an array of its own: save it with numpy.save (a sparse matrix A as A.toarray())",
				path, names[0]+".npy")
		case kind.Foreign():
			return kind.Refuse(path)
		}
	}
	return nil
}

// has lists the arrays, and in a folder also the other files.
func (a *arrays) has() (names []string) {
	if a.archive != nil {
		return append(a.archive.Names(), a.archive.Others()...)
	}
	for _, n := range unusedFiles(a.dir) {
		names = append(names, arrayName(n))
	}
	return names
}

// names lists the arrays.
func (a *arrays) names() (names []string) {
	if a.archive != nil {
		return a.archive.Names()
	}
	for _, n := range unusedFiles(a.dir) {
		if base := arrayName(n); base != n {
			names = append(names, base)
		}
	}
	return names
}

// torchEndings are those of files of PyTorch.
var torchEndings = []string{".pt", ".pth"}

// arrayName is a file's name without the ending of an array.
func arrayName(file string) string {
	for _, e := range append([]string{".npy"}, torchEndings...) {
		if n, ok := strings.CutSuffix(file, e); ok {
			return n
		}
	}
	return file
}

// unused lists the arrays that nobody took, and in a folder also the other files and folders.
func (a *arrays) unused() (names []string) {
	all := append(unusedFiles(a.dir), subfolders(a.dir)...)
	if a.archive != nil {
		all = append(a.archive.Names(), a.archive.Others()...)
	}
	for _, n := range all {
		if !a.used[arrayName(n)] {
			names = append(names, n)
		}
	}
	if m := a.matrix; m != nil {
		own := slices.DeleteFunc(append(m.archive.Names(), m.archive.Others()...),
			func(n string) bool { return slices.Contains(sparseArrays, n) })
		if m.archive != a.archive {
			return append(names, own...)
		}
		return slices.DeleteFunc(names, func(n string) bool { return !slices.Contains(own, n) })
	}
	return names
}

// take marks files of the folder, or below, that options name.
func (a *arrays) take(paths ...string) {
	dir, err := filepath.Abs(a.dir)
	if a.archive != nil || err != nil {
		return
	}
	for _, p := range paths {
		full, err := filepath.Abs(p)
		if p == "" || err != nil {
			continue
		}
		if rel, ok := strings.CutPrefix(full, dir+"/"); ok {
			name, _, below := strings.Cut(rel, "/")
			if below {
				name += "/" // as subfolders has it
			}
			a.used[arrayName(name)] = true
		}
	}
}

func (a *arrays) where() string {
	if a.archive != nil {
		return a.archive.Path
	}
	return a.dir
}

// NPY imports arrays (npyHelp). Every array is streamed. Arrays that nobody takes are named, and
// where they look like splits, and there are no others, the import is refused.
func NPY(ctx context.Context, o NPYOptions) (err error) {
	dim, fill := int64(o.Dim), o.fillOwn
	if _, bare := o.Types["features"]; bare {
		fill = o.fill
	}
	if err := fill(); err != nil {
		return err
	}
	in, err := openArrays(&o, dim)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.close()) }()
	return run(request{kind: "npy", options: &o, Options: o.Options}, func(im *importer) error {
		return (&npyImport{im, o}).run(ctx, in)
	})
}

// npyImport is an import of arrays.
type npyImport struct {
	*importer
	opt NPYOptions
}

func (im *npyImport) run(ctx context.Context, in *arrays) error {
	o := &im.o
	im.m.Source.From = []string{filepath.Base(filepath.Clean(o.In))}
	graph, err := im.findGraph(in)
	if err != nil {
		return err
	}
	p, err := im.columns(ctx, in, graph)
	if err != nil {
		return err
	}
	if p.splits, err = im.splitsOr(ctx, func(context.Context) ([]splitSet, error) {
		return im.splitArrays(in)
	}); err != nil {
		return err
	}
	in.take(o.Features, o.Labels)
	for _, s := range p.splits {
		in.take(s.file)
	}
	if p.edges, err = im.graphEdges(in, graph); err != nil {
		return err
	}
	// The small and likely wrong things are checked by now; next the long ones.
	unused := in.unused()
	if len(p.splits) == 0 && !o.MakeSplits {
		if odd := slices.DeleteFunc(slices.Clone(unused),
			func(n string) bool { return !looksLikeSplit(n) }); len(odd) > 0 {
			return errs.New(errs.Usage,
				"%s holds %s, which may be its splits, and none that is known; name arrays with {map}, as in {map} my_ids=train, give {splits} DIR with train, val and test, or {make-splits} to deal new ones",
				in.where(), briefNames(odd))
		}
	}
	im.noteUnused(in.where(), unused)
	return im.write(ctx, p)
}

// columns opens the features and reads the labels; their rows, or the graph, tell the number of
// nodes.
func (im *npyImport) columns(ctx context.Context, in *arrays, graph npyGraph) (p parts,
	err error) {
	o := &im.o
	feat, err := im.openFeatures(in)
	if err != nil {
		return p, err
	}
	if feat != nil {
		p.features = dataOf(feat)
	}
	lab, err := in.fileOr(o.Labels, labelNames)
	if err == nil && lab == nil && !o.UnlabelledOK {
		err = errs.New(errs.Usage,
			"%s has no labels (looked for %s; it has %s); {map} THEIRS=labels names them, {unlabelled-ok} imports it without",
			in.where(), strings.Join(labelNames, ", "), briefNames(in.has()))
	}
	if err != nil {
		return p, err
	}
	var nodesFrom errs.Text
	if o.Nodes > 0 {
		im.m.Nodes, nodesFrom = o.Nodes, errs.Textf("{nodes}")
	}
	if m := in.matrix; m != nil {
		err = im.sameRows(m.nodes, m.archive.Path, &nodesFrom)
	}
	if err == nil && feat != nil && len(feat.Header.Shape) > 0 {
		err = im.sameRows(feat.Header.Shape[0], feat.Name, &nodesFrom)
	}
	if err == nil && lab != nil {
		p.labelFile = lab.Name
		p.labels, err = im.labels(ctx, dataOf(lab), &nodesFrom)
	}
	if err != nil {
		return p, err
	}
	if p := graph.ptr; nodesFrom == "" && p != nil && len(p.Header.Shape) == 1 {
		im.m.Nodes, nodesFrom = p.Header.Shape[0]-1, errs.Text(p.Name)
	}
	if nodesFrom == "" {
		return p, errs.New(errs.Usage, "%s: nothing tells the number of nodes; give {nodes}",
			in.where())
	}
	return p, im.checkNodes(nodesFrom)
}

// openFeatures opens the features; nil where they are made.
func (im *npyImport) openFeatures(in *arrays) (*npy.Array, error) {
	if im.o.FeatureFn != "" {
		return nil, nil
	}
	feat, err := in.fileOr(im.o.Features, featureNames)
	if err == nil && feat == nil {
		err = errs.New(errs.Usage,
			"%s has no features (looked for %s; it has %s); {map} THEIRS=features names them, {features} FILE gives them, {feature-fn} hash computes some",
			in.where(), strings.Join(featureNames, ", "), briefNames(in.has()))
	}
	return feat, err
}

// npyGraph is the arrays of the edges, in one of the forms; none where they are a matrix.
type npyGraph struct{ index, src, dst, ptr, idx *npy.Array }

// findGraph opens the arrays of the edges.
func (im *npyImport) findGraph(in *arrays) (g npyGraph, err error) {
	if in.matrix != nil {
		return g, nil
	}
	for _, f := range []struct {
		to    **npy.Array
		names []string
	}{{&g.index, edgeNames}, {&g.src, sourceNames}, {&g.dst, targetNames},
		{&g.ptr, []string{"indptr"}}, {&g.idx, []string{"indices"}}} {
		if g.index != nil || g.src != nil && g.dst != nil {
			break // the others are not used
		}
		if *f.to, err = in.find(f.names...); err != nil {
			return g, err
		}
	}
	switch {
	case g.index != nil || g.src != nil && g.dst != nil || g.ptr != nil && g.idx != nil:
		return g, nil
	case g == npyGraph{}:
		if err := in.findMatrix(); err != nil || in.matrix != nil {
			return g, err
		}
	}
	return g, errs.New(errs.Usage,
		"%s has no edges (looked for %s, or src and dst, or indptr and indices, or a matrix of scipy.sparse.save_npz; it has %s); {map} THEIRS=OURS,… names their arrays; save a dense matrix A with save_npz(FILE, csr_matrix(A))",
		in.where(), strings.Join(edgeNames, ", "), briefNames(in.has()))
}

// graphEdges checks the arrays of the edges against the nodes.
func (im *npyImport) graphEdges(in *arrays, g npyGraph) (s edges.Source, err error) {
	lists := im.opt.Lists
	if lists != "" {
		im.m.Source.Options["lists"] = lists
	}
	switch {
	case in.matrix != nil:
		if s, err = in.matrix.edges(lists); err != nil {
			return s, err
		}
		return s, im.noteValues(in.matrix, s.Total)
	case g.ptr != nil && g.idx != nil:
		if lists == "" {
			im.m.Source.Options["lists"] = "in"
			im.noteLists(g.ptr, g.idx)
		}
		return offsetEdges(g.ptr, g.idx, ofOne(im.m.Nodes), lists != "out")
	case lists != "":
		return s, errs.New(errs.Usage, "{lists} %s: %s has pairs of nodes and no lists; leave it out",
			lists, in.where())
	case g.index != nil:
		return indexEdges(g.index, ofOne(im.m.Nodes), anyShape)
	}
	return pairEdges(g.src, g.dst, im.m.Nodes)
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
	if len(missing) > 0 && len(sets) > 0 {
		return nil, errs.New(errs.Usage, "%s has no split %q; give all three splits or none",
			in.where(), missing[0])
	}
	return sets, nil
}
