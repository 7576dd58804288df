package importer

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/infile"
)

var rawFormat = newFormat(Format{Name: "raw",
	Usage:       "folders of headerless arrays, as Ginex, DiskGNN, Legion and GNNLab keep them",
	Description: rawHelp}, Raw)

// RawOptions say what headerless arrays cannot: which files they are and how they are laid out.
// Empty fields are taken from the folder's own configuration, its file names and the files'
// lengths. Dim is the number of features in the file, or of those that FeatureFn makes.
type RawOptions struct {
	// Layout is one of RawLayouts.
	Layout string `option:"layout" shown:"told by the files" oneof:"ginex,diskgnn,legion,gnnlab,plain" usage:"whose files these are"`
	// Indptr and Indices are files, where they are not found by name.
	Indptr  string `option:"indptr" arg:"FILE" usage:"FILE of offsets, where it is not found in {in}"`
	Indices string `option:"indices" arg:"FILE" usage:"FILE of neighbours, where it is not found in {in}"`
	Lists   string `option:"lists" shown:"out for legion, else in" usage:"what a node's list holds: in (in-neighbours, CSC) or out (out-neighbours, CSR)"`
	Edges   int64  `option:"edges" positive:"yes" shown:"found in the input" usage:"number of edges"`
	// IndexDType is the type of indptr and indices.
	IndexDType string `option:"index-dtype" shown:"told by the length" usage:"type of indptr and indices: int32, uint32 or int64"`
	RowDType   string `option:"raw-dtype" shown:"told by the length" usage:"type of the features in the file: float16, float32 or float64"`
	LabelDType string `option:"label-dtype" shown:"the layout's" usage:"type of the labels: int32, int64, float32, …"`
	Options
}

const rawHelp = "{in} is the folder with indptr, indices, features and labels and the project's own configuration (conf.json,\n" +
	"meta.txt, meta_config). All lengths are checked against the numbers of nodes, edges and features; what they leave open is asked for.\n" +
	"{dim} is the number of features in the file, or of those that {feature-fn} makes (64)."

// RawLayouts are the layouts that Raw knows.
var RawLayouts = []string{"ginex", "diskgnn", "legion", "gnnlab", "plain"}

// Raw imports folders of headerless arrays, as other out-of-core systems leave them:
//
//	ginex    conf.json (shapes and types), indptr.dat, indices.dat (CSC), features.dat, labels.dat
//	diskgnn  conf.json, features.npy (without a header), labels.npy; the graph is named by Indptr and Indices
//	legion   edge_src (int64 offsets), edge_dst (int32, CSR), features, labels, {training,validation,testing}set
//	gnnlab   meta.txt, indptr.bin, indices.bin (CSC), feat.bin, label.bin, {train,valid,test}_set.bin, or *64.bin
//	plain    indptr, indices, features, labels, each also .bin, .dat or .raw
//
// Every length is held against the numbers of nodes, edges and features; whether an integer has 4
// or 8 bytes is told by the length, and where more than one reading is possible, or none, the
// import is refused. A file that begins with NumPy's magic is read by its header.
func Raw(ctx context.Context, o RawOptions) error {
	dim := o.Dim // fill makes it the default of made-up features
	if err := o.fill(); err != nil {
		return err
	}
	if err := o.inFolder("headerless arrays"); err != nil {
		return err
	}
	r, err := openRaw(&o, int64(dim))
	if err != nil {
		return err
	}
	inputs := []string{o.Indptr, o.Indices}
	return run(request{kind: "raw", options: &o, Options: o.Options, inputs: inputs},
		func(im *importer) error { return (&rawImport{im}).run(ctx, r) })
}

// maxRawEdges bounds the edges that a configuration may claim.
const maxRawEdges = 1 << 48

// rawIn is a folder of arrays and what is known of them.
type rawIn struct {
	dir, layout  string
	nodes, edges int64 // 0 = not known
	dim          int64
	in           bool              // CSC
	guessed      bool              // the layout leaves in open
	file         map[string]string // by part: indptr, indices, features, labels
	dtype        map[string]npy.DType
	split        [3]string // files of ids
	splitLen     [3]int64  // -1 = not known
	madeUp       bool      // the features are computed
}

// The parts and the names of their files.
var rawNames = map[string]map[string][]string{
	"ginex": {"indptr": {"indptr.dat"}, "indices": {"indices.dat"}, "features": {"features.dat"},
		"labels": {"labels.dat"}},
	"diskgnn": {"features": {"features.npy"}, "labels": {"labels.npy"}},
	"legion": {"indptr": {"edge_src"}, "indices": {"edge_dst"}, "features": {"features"},
		"labels": {"labels", "labels_raw"},
		"train":  {"trainingset"}, "val": {"validationset"}, "test": {"testingset"}},
	"gnnlab": {"indptr": {"indptr.bin", "indptr64.bin"},
		"indices": {"indices.bin", "indices64.bin"}, "features": {"feat.bin"},
		"labels": {"label.bin"},
		"train":  {"train_set.bin", "train_set64.bin"}, "val": {"valid_set.bin", "valid_set64.bin"},
		"test": {"test_set.bin", "test_set64.bin"}},
	"plain": {"indptr": rawEndings("indptr"), "indices": rawEndings("indices"),
		"features": rawEndings("features", "feat"), "labels": rawEndings("labels", "label")},
}

func rawEndings(names ...string) (all []string) {
	for _, n := range names {
		all = append(all, n, n+".bin", n+".dat", n+".raw", n+".npy")
	}
	return all
}

// find returns the first of names in the folder, or "".
func (r *rawIn) find(names ...string) string {
	for _, n := range names {
		if p := filepath.Join(r.dir, n); isFile(p) {
			return p
		}
	}
	return ""
}

// openRaw finds the files; dim is the number of features, 0 where the input is to tell it.
func openRaw(o *RawOptions, dim int64) (*rawIn, error) {
	r := &rawIn{dir: o.In, file: map[string]string{}, dtype: map[string]npy.DType{},
		madeUp: o.FeatureFn != "", splitLen: [3]int64{-1, -1, -1}}
	if o.Edges < 0 || dim < 0 {
		return nil, errs.New(errs.Usage, "option edges %d, option dim %d: cannot be negative", o.Edges,
			dim)
	}
	if err := r.findLayout(o); err != nil {
		return nil, err
	}
	if err := r.findFiles(o); err != nil {
		return nil, err
	}
	if err := r.takeTypes(o); err != nil {
		return nil, err
	}
	if err := r.configure(); err != nil {
		return nil, err
	}
	if err := r.takeNumbers(o, dim); err != nil {
		return nil, err
	}
	if err := r.refuseTorch(o); err != nil {
		return nil, err
	}
	return r, r.measure()
}

// findLayout takes the layout that is asked for, or tells it by the files.
func (r *rawIn) findLayout(o *RawOptions) error {
	switch r.layout = o.Layout; {
	case r.layout != "":
		if !slices.Contains(RawLayouts, r.layout) {
			return errs.New(errs.Usage, "option layout %q is not known; choose one of %s", r.layout,
				strings.Join(RawLayouts, ", "))
		}
	case r.find("conf.json") != "" && r.find("indptr.dat") != "":
		r.layout = "ginex"
	case r.find("conf.json") != "":
		r.layout = "diskgnn"
	case r.find("meta.txt") != "":
		r.layout = "gnnlab"
	case r.find("edge_src") != "":
		r.layout = "legion"
	default:
		r.layout = "plain"
	}
	r.in, r.guessed = r.layout != "legion", r.layout == "plain" && o.Lists == ""
	switch o.Lists {
	case "":
	case "in", "out":
		r.in = o.Lists == "in"
	default:
		return errs.New(errs.Usage,
			"option lists %q: give in (a node's list holds its in-neighbours, CSC) or out (CSR)",
			o.Lists)
	}
	return nil
}

// findFiles finds the files by the layout's names, and takes those that options name.
func (r *rawIn) findFiles(o *RawOptions) error {
	names := rawNames[r.layout]
	for _, part := range []string{"indptr", "indices", "features", "labels"} {
		r.file[part] = r.find(names[part]...)
	}
	for i, s := range dataset.Splits {
		r.split[i] = r.find(names[s]...)
	}
	for part, f := range map[string]string{"indptr": o.Indptr, "indices": o.Indices,
		"features": o.Features, "labels": o.Labels} {
		if f == "" {
			continue
		}
		if err := readable(part, f); err != nil {
			return err
		}
		r.file[part] = f
	}
	return nil
}

// takeTypes takes the types of elements that options give.
func (r *rawIn) takeTypes(o *RawOptions) error {
	for _, f := range []struct {
		option, v string
		parts     []string
	}{
		{"index-dtype", o.IndexDType, []string{"indptr", "indices"}},
		{"raw-dtype", o.RowDType, []string{"features"}},
		{"label-dtype", o.LabelDType, []string{"labels"}},
	} {
		if f.v == "" {
			continue
		}
		dt, err := rawDType(f.v)
		if err != nil {
			return errs.New(errs.Usage, "%v: %w", errs.Key(f.option), err)
		}
		for _, p := range f.parts {
			r.dtype[p] = dt
		}
	}
	return nil
}

// takeNumbers takes the numbers that options give, which may not contradict the configuration.
func (r *rawIn) takeNumbers(o *RawOptions, dim int64) error {
	for _, f := range []struct {
		option string
		given  int64
		known  *int64
	}{{"nodes", o.Nodes, &r.nodes}, {"edges", o.Edges, &r.edges}, {"dim", dim, &r.dim}} {
		if f.given != 0 && *f.known != 0 && f.given != *f.known {
			return errs.New(errs.Usage, "%v %d: the configuration in %s says %d",
				errs.Key(f.option), f.given, r.dir, *f.known)
		}
		if f.given != 0 {
			*f.known = f.given
		}
	}
	if r.nodes > maxTextNodes || r.edges > maxRawEdges || r.dim > dataset.MaxDim {
		return errs.New(errs.Usage,
			"%s: the configuration, or a flag, says %d nodes, %d edges and %d features; at most %d, %d and %d are read",
			r.dir, r.nodes, r.edges, r.dim, int64(maxTextNodes), int64(maxRawEdges), dataset.MaxDim)
	}
	return nil
}

// refuseTorch refuses files that only PyTorch can read.
func (r *rawIn) refuseTorch(o *RawOptions) error {
	split := r.find("split_idx.pth", "split_idx.pt")
	if split != "" && o.SplitDir == "" && !o.MakeSplits {
		return torchFile(split, `for k, v in torch.load("`+filepath.Base(split)+
			`").items(): numpy.save(k + ".npy", v.numpy())`,
			"option splits DIR, or give option make-splits to deal new ones")
	}
	for part, f := range r.file {
		if strings.HasSuffix(f, ".pth") || strings.HasSuffix(f, ".pt") {
			return torchFile(f, fmt.Sprintf("numpy.save(%q, torch.load(%q).numpy())",
				part+".npy", filepath.Base(f)), errs.Key(part).String()+" "+part+".npy")
		}
	}
	return nil
}

func torchFile(path, code, then string) error {
	return errs.New(errs.Usage,
		"%s is in PyTorch's own format, which can hold any code and is not read; run in Python: %s; then %s",
		path, code, then)
}

// rawDType reads the name of a type as NumPy and PyTorch write it.
func rawDType(s string) (npy.DType, error) {
	name := strings.TrimPrefix(s, "torch.")
	if name == "long" {
		name = "int64"
	}
	for _, k := range []struct {
		prefix string
		kind   byte
	}{{"uint", 'u'}, {"int", 'i'}, {"float", 'f'}} {
		if bits, ok := strings.CutPrefix(name, k.prefix); ok {
			n, err := strconv.Atoi(bits)
			if err == nil && n%8 == 0 {
				if dt, err := npy.ParseDType(fmt.Sprintf("<%c%d", k.kind, n/8)); err == nil {
					return dt, nil
				}
			}
		}
	}
	return npy.ParseDType(s)
}

// configure reads what the layout itself says.
func (r *rawIn) configure() error {
	setType := func(part, name string) error {
		if _, ok := r.dtype[part]; ok || name == "" {
			return nil
		}
		dt, err := rawDType(name)
		r.dtype[part] = dt
		return err
	}
	switch r.layout {
	case "ginex", "diskgnn":
		return r.confJSON(setType)
	case "gnnlab":
		if err := r.metaTxt(); err != nil {
			return err
		}
		return errors.Join(setType("features", "float32"), setType("labels", "int64"))
	case "legion":
		if err := r.metaConfig(); err != nil {
			return err
		}
		if r.dtype["indptr"].Size == 0 {
			r.dtype["indptr"] = npy.Int64
		}
		return errors.Join(setType("indices", "int32"), setType("features", "float32"),
			setType("labels", "int32"))
	}
	return nil
}

// rawConf is the configuration of Ginex and DiskGNN.
type rawConf struct {
	Nodes    int64   `json:"num_nodes"`
	Indptr   []int64 `json:"indptr_shape"`
	Indices  []int64 `json:"indices_shape"`
	Features []int64 `json:"features_shape"`
	Labels   []int64 `json:"labels_shape"`
	TIndptr  string  `json:"indptr_dtype"`
	TIndices string  `json:"indices_dtype"`
	TFeat    string  `json:"features_dtype"`
	TLabels  string  `json:"labels_dtype"`
}

// confJSON reads the configuration of Ginex and DiskGNN.
func (r *rawIn) confJSON(setType func(part, name string) error) error {
	path := filepath.Join(r.dir, "conf.json")
	b, err := infile.Read(path, dataset.MaxDescription)
	if err != nil {
		return errs.With(errs.Usage, err)
	}
	var c rawConf
	if err := json.Unmarshal(b, &c); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return errs.New(errs.Usage, "%s: byte %d: %w", path, syntax.Offset, err)
		}
		return errs.New(errs.Usage, "%s: %w", path, err)
	}
	if err := r.takeShapes(c, path); err != nil {
		return err
	}
	for part, name := range map[string]string{"indptr": c.TIndptr, "indices": c.TIndices,
		"features": c.TFeat, "labels": c.TLabels} {
		if err := setType(part, name); err != nil {
			return errs.New(errs.Usage, "%s: %s_dtype: %w", path, part, err)
		}
	}
	return nil
}

// takeShapes takes the numbers that the shapes give, where they fit together.
func (r *rawIn) takeShapes(c rawConf, path string) error {
	bad := func(what string, shape []int64) error {
		return errs.New(errs.Usage, "%s: %s is %.60s, num_nodes is %d", path, what,
			fmt.Sprint(shape), c.Nodes)
	}
	if c.Nodes < 1 || c.Nodes > maxTextNodes {
		return errs.New(errs.Usage, "%s: num_nodes is %d", path, c.Nodes)
	}
	r.nodes = c.Nodes
	if c.Indptr != nil && (len(c.Indptr) != 1 || c.Indptr[0] != c.Nodes+1) {
		return bad("indptr_shape", c.Indptr)
	}
	if c.Indices != nil {
		if len(c.Indices) != 1 || c.Indices[0] < 0 {
			return bad("indices_shape", c.Indices)
		}
		r.edges = c.Indices[0]
	}
	if c.Features != nil {
		if len(c.Features) != 2 || c.Features[0] != c.Nodes || c.Features[1] < 1 {
			return bad("features_shape", c.Features)
		}
		r.dim = c.Features[1]
	}
	if c.Labels != nil && (len(c.Labels) < 1 || len(c.Labels) > 2 || c.Labels[0] != c.Nodes ||
		len(c.Labels) == 2 && c.Labels[1] != 1) {
		return bad("labels_shape", c.Labels)
	}
	return nil
}

// metaTxt reads GNNLab's lines "NUM_NODE 123".
func (r *rawIn) metaTxt() error {
	path := filepath.Join(r.dir, "meta.txt")
	f, err := infile.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	to := map[string]*int64{"NUM_NODE": &r.nodes, "NUM_EDGE": &r.edges, "FEAT_DIM": &r.dim,
		"NUM_TRAIN_SET": &r.splitLen[0], "NUM_VALID_SET": &r.splitLen[1],
		"NUM_TEST_SET": &r.splitLen[2]}
	sc := bufio.NewScanner(f)
	for line := 1; sc.Scan(); line++ {
		w := strings.Fields(sc.Text())
		if len(w) == 0 || to[w[0]] == nil {
			continue
		}
		v, ok := int64(0), false
		if len(w) == 2 {
			v, ok = parseID([]byte(w[1]))
		}
		if !ok {
			return errs.New(errs.Usage, "%s:%d: %q is not a name and a number", path, line,
				clip(sc.Bytes()))
		}
		*to[w[0]] = v
	}
	if err := sc.Err(); err != nil {
		return errs.New(errs.Usage, "%s: %w", path, err)
	}
	if r.nodes < 1 || r.nodes > maxTextNodes {
		return errs.New(errs.Usage, "%s: no NUM_NODE, or it is no number of nodes", path)
	}
	return nil
}

// metaConfig reads Legion's one line, where it is in the folder: path, batch, vertices, edges, dim,
// sizes of the splits, …
func (r *rawIn) metaConfig() error {
	path := filepath.Join(r.dir, "meta_config")
	b, err := infile.Read(path, dataset.MaxDescription)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errs.With(errs.Usage, err)
	}
	w := strings.Fields(string(b))
	for i, to := range []*int64{2: &r.nodes, 3: &r.edges, 4: &r.dim, 5: &r.splitLen[0],
		6: &r.splitLen[1], 7: &r.splitLen[2]} {
		if to == nil {
			continue
		}
		ok := false
		if len(w) > 7 {
			*to, ok = parseID([]byte(w[i]))
		}
		if !ok {
			return errs.New(errs.Usage,
				"%s: field %d of %d is no number; Legion writes path, batch size, vertices, edges, features, and three sizes of splits",
				path, i+1, len(w))
		}
	}
	return nil
}

// rawSize returns the length of a file.
func rawSize(path string) (int64, error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, errs.With(errs.Usage, err)
	}
	return st.Size(), nil
}

// measure finds the numbers that the configuration leaves open, from lengths where the type is
// known.
func (r *rawIn) measure() error {
	for _, part := range []string{"indptr", "indices"} {
		if r.file[part] != "" {
			continue
		}
		if r.layout == "diskgnn" {
			return errs.New(errs.Usage,
				"%s: DiskGNN leaves the graph in DGL's or OGB's own files; save g.adj_tensors(\"csc\") as indptr.npy and indices.npy and name them with option indptr and option indices, or import the graph itself with \"import dgl\" or \"import ogb\"",
				r.dir)
		}
		return errs.New(errs.Usage, "%s has no %s (looked for %s as layout %s); name it with %v",
			r.dir, part, strings.Join(rawNames[r.layout][part], ", "), r.layout, errs.Key(part))
	}
	if r.nodes == 0 {
		if err := r.measureNodes(); err != nil {
			return err
		}
	}
	if r.file["features"] != "" && r.dim == 0 && !r.madeUp {
		return r.measureRows()
	}
	return nil
}

// measureNodes finds the number of nodes by the length of the offsets.
func (r *rawIn) measureNodes() error {
	path := r.file["indptr"]
	a, err := r.withHeader("indptr")
	if err != nil {
		return err
	}
	dt, ok := r.dtype["indptr"]
	size, err := rawSize(path)
	switch {
	case err != nil:
		return err
	case a != nil && len(a.Header.Shape) == 1:
		r.nodes = a.Header.Shape[0] - 1
	case !ok:
		return errs.New(errs.Usage,
			"%s: %d bytes can be %d offsets of 8 bytes or %d of 4; give option nodes or option index-dtype int64|uint32",
			path, size, size/8, size/4)
	case size%int64(dt.Size) != 0:
		return errs.New(errs.Usage, "%s: %d bytes are no whole numbers of type %s", path, size, dt)
	default:
		r.nodes = size/int64(dt.Size) - 1
	}
	if r.nodes < 1 {
		return errs.New(errs.Usage, "%s: %d bytes hold no graph", path, size)
	}
	return nil
}

// measureRows finds the number of features by the length of the rows.
func (r *rawIn) measureRows() error {
	path := r.file["features"]
	a, err := r.withHeader("features")
	if err != nil {
		return err
	}
	dt, ok := r.dtype["features"]
	size, err := rawSize(path)
	switch {
	case err != nil:
		return err
	case a != nil:
		if len(a.Header.Shape) == 2 {
			r.dim = a.Header.Shape[1]
		}
	case !ok:
		return errs.New(errs.Usage,
			"%s: %d bytes for %d nodes can be rows of more than one type; give option dim or option raw-dtype float16|float32|float64",
			path, size, r.nodes)
	case size%(r.nodes*int64(dt.Size)) != 0:
		return errs.New(errs.Usage, "%s: %d bytes are no rows of %s for %d nodes", path, size, dt,
			r.nodes)
	default:
		r.dim = size / (r.nodes * int64(dt.Size))
	}
	return nil
}

// withHeader opens a part as .npy where its magic says so; nil means raw.
func (r *rawIn) withHeader(part string) (*npy.Array, error) {
	a, err := npy.Open(r.file[part])
	if errors.Is(err, npy.ErrNotNPY) {
		return nil, nil
	}
	if err == nil {
		return a, nil
	}
	// Too short for a magic is raw too.
	if size, serr := rawSize(r.file[part]); serr == nil && size < 10 {
		return nil, nil
	}
	return nil, err
}

// array opens a part with the given shape. Where its type is not known, sizes has the types that
// its length may stand for.
func (r *rawIn) array(part, path string, shape []int64, sizes map[int64]npy.DType) (*npy.Array,
	error) {
	r.file[part] = path
	a, err := r.withHeader(part)
	if err != nil {
		return nil, err
	}
	h := npy.Header{DType: r.dtype[part], Shape: shape}
	n := h.Elements()
	if a != nil {
		if a.Header.Elements() != n {
			return nil, errs.New(errs.Usage, "%s has shape %s, %s are needed", path,
				a.Header.ShapeString(), h.ShapeString())
		}
		return a, nil
	}
	size, err := rawSize(path)
	if err != nil {
		return nil, err
	}
	if h.DType.Size == 0 {
		if h.DType, err = typeOfLength(path, size, h, sizes); err != nil {
			return nil, err
		}
	}
	return npy.Section(path, path, 0, h, true)
}

// typeOfLength returns the type that elements of the shape of h have in a file of so many bytes.
func typeOfLength(path string, size int64, h npy.Header, sizes map[int64]npy.DType) (npy.DType,
	error) {
	n := h.Elements()
	if n == 0 && size == 0 {
		return npy.Int64, nil
	}
	if n > 0 && size%n == 0 {
		if dt, ok := sizes[size/n]; ok {
			return dt, nil
		}
	}
	var can []string
	for _, b := range []int64{2, 4, 8} {
		if dt, ok := sizes[b]; ok {
			can = append(can, fmt.Sprintf("%d of type %s", n*b, dt))
		}
	}
	return npy.DType{}, errs.New(errs.Usage,
		"%s: %d bytes; shape %s needs %s; the file is of another graph, has a header, or is truncated",
		path, size, h.ShapeString(), strings.Join(can, " or "))
}

var (
	rawInts   = map[int64]npy.DType{4: npy.Uint32, 8: npy.Int64}
	rawFloats = map[int64]npy.DType{2: {Kind: 'f', Size: 2}, 4: npy.Float32,
		8: {Kind: 'f', Size: 8}}
)

// rawImport is an import of headerless arrays.
type rawImport struct{ *importer }

func (im *rawImport) run(ctx context.Context, r *rawIn) error {
	o := &im.o
	im.m.Nodes = r.nodes
	im.m.Source = o.source("raw", r.dir, r.file["indptr"], r.file["indices"], r.file["features"],
		r.file["labels"], o.SplitDir)
	im.m.Source.Options["layout"] = r.layout
	im.m.Source.Options["lists"] = map[bool]string{true: "in", false: "out"}[r.in]
	// All lengths are looked at before anything long is done.
	ptr, idx, err := r.lists()
	if err != nil {
		return err
	}
	feat, err := im.rawFeatures(r)
	if err != nil {
		return err
	}
	labels, err := im.rawLabels(r)
	if err != nil {
		return err
	}
	splits, err := im.splitsOr(ctx, func(context.Context) ([]splitSet, error) {
		return im.rawSplits(r)
	})
	if err != nil {
		return err
	}
	unused := unusedFiles(r.dir, append(slices.Collect(maps.Values(r.file)), r.split[0], r.split[1],
		r.split[2], "conf.json", "meta.txt", "meta_config")...)
	if i := slices.IndexFunc(unused, looksLikeSplit); i >= 0 && len(splits) == 0 && labels != nil &&
		!o.MakeSplits {
		return errs.New(errs.Usage,
			"%s holds %s, which may be a split, and none that is known; give option splits DIR, or option make-splits to deal new ones",
			r.dir, brief(unused[i]))
	}
	im.noteUnused(r.dir, append(unused, subfolders(r.dir)...))
	if r.guessed {
		im.noteLists(ptr, idx)
	}
	edges, err := offsetEdges(ptr, idx, r.nodes, r.in)
	if err != nil {
		return err
	}
	return im.write(ctx, parts{edges: edges, labels: labels, labelFile: r.file["labels"],
		splits: splits, features: func() error { return im.arrayOrMade(ctx, feat) }})
}

// lists opens the offsets and the neighbours, of which the last offset tells the number where
// nothing else does.
func (r *rawIn) lists() (ptr, idx *npy.Array, err error) {
	ptr, err = r.array("indptr", r.file["indptr"], []int64{r.nodes + 1}, rawInts)
	if err != nil {
		return nil, nil, err
	}
	if r.edges == 0 {
		last, err := ptr.Reader(r.nodes)
		if err != nil {
			return nil, nil, err
		}
		v := make([]int64, 1)
		_, err = last.Ints(v)
		if err = errors.Join(err, last.Close()); err != nil {
			return nil, nil, err
		}
		if r.edges = v[0]; r.edges < 0 || r.edges > maxRawEdges {
			return nil, nil, errs.New(errs.Usage,
				"%s: the last offset is %d, which is no number of edges; are the offsets of type %s?",
				ptr.Name, v[0], ptr.Header.DType)
		}
	}
	idx, err = r.array("indices", r.file["indices"], []int64{r.edges}, rawInts)
	return ptr, idx, err
}

// rawFeatures opens the features; nil where they are made.
func (im *rawImport) rawFeatures(r *rawIn) (*npy.Array, error) {
	if f := r.file["features"]; f != "" && im.o.FeatureFn == "" {
		return r.array("features", f, []int64{r.nodes, r.dim}, rawFloats)
	}
	if r.dim > 0 && r.dim <= dataset.MaxDim {
		im.o.Dim = int(r.dim)
	}
	return nil, im.o.needFeatures(r.dir)
}

// rawLabels reads the labels, where there are any.
func (im *rawImport) rawLabels(r *rawIn) ([]int32, error) {
	f := r.file["labels"]
	if f == "" {
		return nil, nil
	}
	if _, ok := r.dtype["labels"]; !ok {
		if a, err := r.withHeader("labels"); err != nil {
			return nil, err
		} else if a == nil {
			return nil, errs.New(errs.Usage,
				"%s: a raw file does not tell integers from floats; give option label-dtype int32, int64, float32, …",
				f)
		}
	}
	a, err := r.array("labels", f, []int64{r.nodes}, rawInts)
	if err != nil {
		return nil, err
	}
	return im.nodeLabels(a)
}

// rawSplits reads the layout's own files of ids.
func (im *rawImport) rawSplits(r *rawIn) ([]splitSet, error) {
	if r.split == [3]string{} {
		return nil, nil
	}
	var sets []splitSet
	for i, path := range r.split {
		if path == "" {
			return nil, errs.New(errs.Usage,
				"%s has no %s split (looked for %s); name all three with option splits, or give option make-splits",
				r.dir, dataset.Splits[i], strings.Join(rawNames[r.layout][dataset.Splits[i]], ", "))
		}
		n := r.splitLen[i]
		if n < 0 { // Legion without meta_config: int32
			size, err := rawSize(path)
			if err != nil {
				return nil, err
			}
			n = size / 4
			r.dtype[dataset.Splits[i]] = npy.Int32
		}
		a, err := r.array(dataset.Splits[i], path, []int64{n}, rawInts)
		if err != nil {
			return nil, err
		}
		ids, err := im.splitIDs(a)
		if err != nil {
			return nil, err
		}
		sets = append(sets, splitSet{path, ids})
	}
	return sets, nil
}
