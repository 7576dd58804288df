package importer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
)

var dglFormat = newFormat(Format{Name: "dgl",
	Usage:       "a graph that dgl.save_graphs wrote, with one type of nodes and edges",
	Description: dglHelp}, DGL)

// DGLOptions shape an import of a file of DGL.
type DGLOptions struct {
	Map   ArrayMap `option:"map" common:"yes" arg:"THEIRS=OURS[,…]" usage:"THEIRS=OURS[,…]: names of the graph's node data; ours are features, labels, train, val, test"`
	Graph string   `option:"graph" common:"yes" shown:"the only one" arg:"NUMBER" usage:"NUMBER of the graph, from 0, where the file holds several"`
	Options
}

const dglHelp = "{in} is the .bin file, or a folder with one, whose graph has the node data feat and label and, where the splits are\n" +
	"given, train_mask, val_mask and test_mask."

// The names of node tensors that are looked for.
var (
	dglFeatureNames = []string{"feat", "features", "feats", "feature", "x"}
	dglLabelNames   = []string{"label", "labels", "y"}
	dglMaskNames    = [3][]string{{"train_mask", "train_masks"},
		{"val_mask", "valid_mask", "val_masks", "valid_masks"}, {"test_mask", "test_masks"}}
)

// DGL imports a graph of one type that dgl.save_graphs wrote (dglHelp). The arrays are read where
// they lie in the file; nothing of their size is in memory.
func DGL(ctx context.Context, o DGLOptions) (err error) {
	if err := o.fillOwn(); err != nil {
		return err
	}
	path, err := dglFile(o.In)
	if err != nil {
		return err
	}
	want := int64(-1)
	if o.Graph != "" {
		if want, err = strconv.ParseInt(o.Graph, 10, 64); err != nil || want < 0 {
			return errs.New(errs.Usage, "{graph} %s: must be the number of a graph, from 0",
				o.Graph)
		}
	}
	file, err := openDGL(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.close()) }()
	_, g, err := file.graphs(want)
	if err != nil {
		return err
	}
	r := request{kind: "dgl", options: &o, Options: o.Options}
	return runNamed(r, func(im *importer) error {
		if want >= 0 {
			im.m.Source.Options["graph"] = o.Graph
		}
		return (&dglImport{im, o}).run(ctx, path, g)
	})
}

func dglFile(in string) (string, error) {
	st, err := os.Stat(in)
	if err != nil {
		return "", errs.With(errs.Usage, err)
	}
	if !st.IsDir() {
		return in, nil
	}
	found, err := filepath.Glob(filepath.Join(in, "*.bin"))
	if err != nil {
		return "", errs.With(errs.Usage, err)
	}
	if len(found) != 1 {
		return "", errs.New(errs.Usage,
			"%s has %d .bin files; name the file of dgl.save_graphs with {in}", in, len(found))
	}
	return found[0], nil
}

// dglImport is an import of a file of DGL.
type dglImport struct {
	*importer
	opt DGLOptions
}

func (im *dglImport) run(ctx context.Context, path string, g dglGraph) error {
	o := &im.o
	edges, err := im.dglEdges(path, g)
	if err != nil {
		return err
	}
	d := &dglData{dglGraph: g, path: path, theirs: im.opt.Map, used: map[string]bool{}}
	if err := d.check(); err != nil {
		return err
	}
	p := parts{edges: edges}
	if o.ownFeatures() {
		feat := d.find("features", dglFeatureNames)
		if feat == nil {
			return errs.New(errs.Usage,
				"%s: the graph has no node data %s (it has %s); give features with {features} FILE, or {feature-fn}",
				path, strings.Join(dglFeatureNames, ", "), briefNames(d.names()))
		}
		p.features = dataOf(feat)
	}
	if p.labels, p.labelFile, err = im.dglLabels(ctx, d); err != nil {
		return err
	}
	if p.splits, err = im.splitsOr(ctx, func(context.Context) ([]splitSet, error) {
		return im.dglSplits(d)
	}); err != nil {
		return err
	}
	unused := slices.DeleteFunc(d.names(), func(n string) bool { return d.used[n] })
	if i := slices.IndexFunc(unused, looksLikeSplit); i >= 0 && len(p.splits) == 0 &&
		!o.MakeSplits {
		return errs.New(errs.Usage,
			"%s: node data %s may be a split, and there is none that is known; name it with {map}, as in {map} %s=train, give {splits} DIR, or {make-splits} to deal new ones",
			path, brief(unused[i]), brief(unused[i]))
	}
	for _, n := range g.edgeData {
		unused = append(unused, "edge data "+n)
	}
	im.noteUnused(path, unused)
	if path != o.In {
		im.noteUnused(o.In, append(unusedFiles(o.In, path), subfolders(o.In)...))
	}
	return im.write(ctx, p)
}

// dglData is the node data of a graph.
type dglData struct {
	dglGraph
	path   string
	theirs ArrayMap
	used   map[string]bool
}

func (d *dglData) names() []string {
	names := make([]string, len(d.tensors))
	for i, t := range d.tensors {
		names[i] = t.name
	}
	return names
}

// check refuses a map of data that is not there, and data that is needed and cannot be read.
func (d *dglData) check() error {
	have := d.names()
	for ours, theirs := range d.theirs {
		if !slices.Contains(have, theirs) || ours == "edge_index" || ours == "indptr" ||
			ours == "indices" {
			return errs.New(errs.Usage, "{map} %s=%s: the graph has no such node data (it has %s)",
				brief(theirs), ours, briefNames(have))
		}
	}
	needed := slices.Concat(dglFeatureNames, dglLabelNames,
		slices.Collect(maps.Values(d.theirs)))
	for _, t := range d.tensors {
		if t.a.Header.DType.Size == 0 && (slices.Contains(needed, t.name) ||
			looksLikeSplit(t.name)) {
			return errs.New(errs.Usage,
				"%s: node data %q holds elements of a type that cannot be read; save float, int or bool",
				d.path, t.name)
		}
	}
	return nil
}

// find returns the data that the map names for ours, or the first of names; nil where there is
// none.
func (d *dglData) find(ours string, names []string) *npy.Array {
	if theirs := d.theirs[ours]; theirs != "" {
		names = []string{theirs}
	}
	for _, n := range names {
		for _, t := range d.tensors {
			if t.name == n && !d.used[n] {
				d.used[n] = true
				return t.a
			}
		}
	}
	return nil
}

func (im *dglImport) dglLabels(ctx context.Context, d *dglData) (labels []int32, file string,
	err error) {
	if im.o.Labels != "" {
		labels, err = im.labelFile(ctx, im.o.Labels)
		return labels, im.o.Labels, err
	}
	if a := d.find("labels", dglLabelNames); a != nil {
		labels, err = im.labels(ctx, dataOf(a), nil)
		return labels, a.Name, err
	}
	if !im.o.UnlabelledOK {
		err = errs.New(errs.Usage,
			"%s: the graph has no node data %s (it has %s); {unlabelled-ok} imports it without labels",
			d.path, strings.Join(dglLabelNames, ", "), briefNames(d.names()))
	}
	return nil, d.path, err
}

func (im *dglImport) dglSplits(d *dglData) ([]splitSet, error) {
	var sets []splitSet
	missing := ""
	for i, names := range dglMaskNames {
		a := d.find(dataset.Splits[i], names)
		if a == nil {
			missing = names[0]
			continue
		}
		ids, err := im.dglMask(a)
		if err != nil {
			return nil, err
		}
		sets = append(sets, splitSet{a.Name, ids})
	}
	if missing != "" && len(sets) > 0 {
		return nil, errs.New(errs.Usage,
			"%s: the graph has no node data %s beside its other masks; all three or none are needed",
			d.path, missing)
	}
	return sets, nil
}

// dglMask reads a mask; DGL saves bool as uint8.
func (im *dglImport) dglMask(a *npy.Array) (ids []int64, err error) {
	sh := a.Header.Shape
	switch {
	case len(sh) == 2:
		return im.splitIDs(a)
	case len(sh) != 1 || sh[0] != im.m.Nodes:
		return nil, errs.New(errs.Usage, "%s: the mask has shape %s, there are %d nodes", a.Name,
			a.Header.ShapeString(), im.m.Nodes)
	}
	err = eachInt(a, func(v, x int64) (err error) {
		if x != 0 && x != 1 {
			return errs.New(errs.Usage, "%s: %d for node %d; a mask holds 0 and 1", a.Name, x, v)
		}
		if x == 1 {
			ids, err = im.addID(ids, v, a.Name)
		}
		return err
	})
	return ids, err
}

// dglEdges checks that the graph is homogeneous, sets the nodes, and chooses the form that is
// nearest to ours.
func (im *dglImport) dglEdges(path string, g dglGraph) (s edges.Source, err error) {
	if len(g.nodes) != 1 || g.relations != 1 || g.nodeGroups != 1 {
		return s, errs.New(errs.Usage,
			"%s: offset %d: a graph of %d types of nodes (%s) and %d of edges (%s); graphs with one of each can be imported: take dgl.to_homogeneous, or one relation",
			path, g.offset, len(g.nodes), briefNames(g.nodeTypes), g.relations,
			briefNames(g.edgeTypes))
	}
	nodes := g.nodes[0]
	if err := im.stateNodes(nodes, fmt.Sprintf("%s: offset %d", path, g.offset)); err != nil {
		return s, err
	}
	count := int64(-1)
	var best dglForm
	for _, f := range g.forms {
		if err := f.check(nodes, count); err != nil {
			return s, err
		}
		count = f.b.Header.Elements()
		if f.bit > best.bit { // CSC before CSR before COO
			best = f
		}
	}
	if best.bit == dglCOO {
		return pairEdges(best.a, best.b, nodes)
	}
	return offsetEdges(best.a, best.b, ofOne(nodes), best.bit == dglCSC)
}

// check refuses a form that is not of so many nodes, or not of count edges, which is -1 where it is
// not known yet.
func (f dglForm) check(nodes, count int64) error {
	for _, a := range []*npy.Array{f.a, f.b} {
		if k := a.Header.DType.Kind; len(a.Header.Shape) != 1 || k != 'i' && k != 'u' {
			return errs.New(errs.Usage, "%s: shape %s of %s; ids are integers of one dimension",
				a.Name, a.Header.ShapeString(), a.Header.DType)
		}
	}
	if f.rows != nodes || f.cols != nodes {
		return errs.New(errs.Usage, "%s: a matrix of %d × %d for %d nodes", f.b.Name, f.rows, f.cols,
			nodes)
	}
	want := nodes + 1
	if f.bit == dglCOO {
		want = f.b.Header.Elements()
	}
	if n := f.a.Header.Elements(); n != want {
		return errs.New(errs.Usage, "%s has %d entries, %d are needed", f.a.Name, n, want)
	}
	if n := f.b.Header.Elements(); count >= 0 && n != count {
		return errs.New(errs.Usage, "%s has %d entries, another form of the same edges has %d",
			f.b.Name, n, count)
	}
	return nil
}
