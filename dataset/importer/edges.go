package importer

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"helios/dataset/edges"
	"helios/internal/errs"
)

var edgesFormat = newFormat(Format{Name: "edges",
	Usage:       "edge lists: CSV or TSV files of source and destination",
	Description: edgesHelp}, Edges)

// EdgesOptions shape an import of edge lists.
type EdgesOptions struct {
	Src           string `option:"src" common:"yes" shown:"found out" arg:"COLUMN" usage:"COLUMN of the edges' sources, by name or number from 1; the columns that neither this nor {dst} names are left out"`
	Dst           string `option:"dst" common:"yes" shown:"found out" arg:"COLUMN" usage:"COLUMN of the edges' targets"`
	IgnoreColumns bool   `option:"ignore-columns" usage:"take the first two columns of an edge list with more, such as weights, or those that are named as ends"`
	Base          string `option:"base" oneof:"0,1" shown:"found out" usage:"the id of the first node in text files"`
	Renumber      bool   `option:"renumber" common:"yes" usage:"number the ids that there are from 0, in ascending order; ids.npy keeps them"`
	Options
}

const edgesHelp = "One edge a line, source first, split by commas, semicolons, tabs or spaces, the same in all of a file, plain\n" +
	"or compressed. A first line of names such as src,dst names the\n" +
	"ends; columns that are not ends are refused, or left out with {src} and {dst} or {ignore-columns}.\n" +
	"Lists of SNAP, KONECT (out.NAME) and NetworkX are known by their content. Or a\n" +
	"folder with edges and, where there are some, features, labels and splits (OGB's raw folder)."

// The names that a directory of text files is searched for: OGB's and the obvious ones.
var (
	edgeFiles    = []string{"edge", "edges", "edgelist", "edge_list"}
	featureFiles = []string{"node-feat", "features", "feat", "x"}
	labelFiles   = []string{"node-label", "labels", "label", "y"}
	splitFiles   = [3][]string{{"train"}, {"val", "valid"}, {"test"}}
	textEndings  = []string{".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".npy"}
	// Other files of these names are read, or refused by the name of what they are.
	otherEndings = []string{".csv.bz2", ".csv.xz", ".csv.lz4", ".csv.zst", ".csv.zip", ".tsv.bz2",
		".tsv.xz", ".txt.bz2", ".txt.xz", ".zip", ".parquet", ".feather", ".arrow", ".h5", ".hdf5",
		".mat", ".xlsx", ".xls", ".pkl", ".pickle", ".pt", ".pth", ".npz", ".sqlite", ".db"}
)

// Edges imports an edge list with what lies beside it (edgesHelp). A graph without labels can be
// sampled and measured.
func Edges(ctx context.Context, o EdgesOptions) error {
	dim := o.Dim
	if err := o.fillMadeUp(); err != nil {
		return err
	}
	switch {
	case (o.Src == "") != (o.Dst == ""):
		return errs.New(errs.Usage, "give both %v and %v, or none", errs.Key("src"), errs.Key("dst"))
	case o.Renumber && (o.Nodes > 0 || o.Base != ""):
		return errs.New(errs.Usage, "%v counts the nodes itself; leave out %v and %v",
			errs.Key("renumber"), errs.Key("nodes"), errs.Key("base"))
	}
	list, unused, err := o.find(dim)
	if err != nil {
		return err
	}
	if err := o.needFeaturesSoon(list); err != nil {
		return err
	}
	return run(request{kind: "edges", options: &o, Options: o.Options}, func(im *importer) error {
		im.noteUnused(o.In, unused)
		return (&edgesImport{importer: im, opt: o, edges: list}).run(ctx)
	})
}

// find finds the files of a folder: the list of edges, and features and labels where no option
// names them. unused are the other files.
func (o *EdgesOptions) find(dim int) (list string, unused []string, err error) {
	st, err := os.Stat(o.In)
	if err != nil {
		return "", nil, errs.With(errs.Usage, err)
	}
	if !st.IsDir() {
		return o.In, nil, nil
	}
	if list = findText(o.In, edgeFiles); list == "" {
		list = findKONECT(o.In)
	}
	if list == "" {
		return "", nil, errs.New(errs.Usage, "%s has no edge list (looked for %s with %s)", o.In,
			strings.Join(edgeFiles, ", "), strings.Join(textEndings, ", "))
	}
	if o.ownFeatures() {
		o.Features = findText(o.In, featureFiles)
		if err := o.dimUsed(dim); err != nil {
			return "", nil, err
		}
	}
	if o.Labels == "" {
		o.Labels = findText(o.In, labelFiles)
	}
	unused = unusedFiles(o.In, list, o.Features, o.Labels)
	if o.SplitDir == "" && o.Labels != "" && !o.MakeSplits {
		if i := slices.IndexFunc(unused, looksLikeSplit); i >= 0 {
			return "", nil, errs.New(errs.Usage,
				"%s holds %s, which may be a split; give {splits} DIR, or {make-splits} to deal new ones",
				o.In, brief(unused[i]))
		}
	}
	return list, unused, nil
}

func findText(dir string, names []string) string {
	for _, endings := range [][]string{textEndings, otherEndings} {
		for _, n := range names {
			for _, e := range endings {
				if path := filepath.Join(dir, n+e); isFile(path) {
					return path
				}
			}
		}
	}
	return ""
}

// findKONECT finds the edges of a folder as KONECT packs it: out.NAME.
func findKONECT(dir string) string {
	found, err := filepath.Glob(filepath.Join(dir, "out.*"))
	if err != nil || len(found) != 1 {
		return ""
	}
	return found[0]
}

// edgesImport is an import of edge lists.
type edgesImport struct {
	*importer
	opt      EdgesOptions
	edges    string       // the file
	from     errs.Text    // where the number of nodes is from; "": it is not known
	comments atomic.Int64 // lines amid the edges
	says     int64        // edges that the file says it has; 0: it does not
	taken    int64        // number of a line 0,1 that is taken for an edge
	// source is the edges, with ids in a range.
	source func(ids idRange) (edges.Source, error)
}

func (im *edgesImport) run(ctx context.Context) error {
	o := &im.o
	im.m.Source = o.source("edges", im.edges, o.Features, o.Labels, o.SplitDir)
	if o.Nodes > 0 {
		im.m.Nodes, im.from = o.Nodes, errs.Textf("{nodes}")
	}
	if err := im.open(ctx); err != nil {
		return err
	}
	// Features first: their row count is the number of nodes, which ids are checked against.
	labels, err := im.givenColumns(ctx, &im.from)
	if err != nil {
		return err
	}
	if err := im.takeEdges(ctx); err != nil {
		return err
	}
	if im.m.Nodes < 1 {
		return errs.New(errs.Usage, "%s holds no edges; name the file that has them", im.edges)
	}
	if err := o.needFeatures(o.In); err != nil {
		return err
	}
	im.countLonely = o.Features == "" && o.Labels == ""
	if err := im.topology(ctx); err != nil {
		return err
	}
	if im.m.Edges == 0 && o.SelfLoops != "drop" {
		return errs.New(errs.Usage, "%s holds no edges; {self-loops} drop imports a graph of nodes alone", im.edges)
	}
	if o.FeatureFn != "" {
		if err := im.madeFeatures(ctx); err != nil {
			return err
		}
	}
	var splits []splitSet
	if o.SplitDir != "" {
		if splits, err = im.folderSplits(ctx, o.SplitDir); err != nil {
			return err
		}
	}
	return im.labelsAndSplits(labels, o.Labels, splits)
}

// open finds out how the edges stand in their file, and numbers the nodes where that is asked.
func (im *edgesImport) open(ctx context.Context) error {
	im.leastNodes = im.countNodes
	if im.opt.Base == "1" {
		im.ids.base = 1
	}
	var err error
	if isArray(im.edges) {
		err = im.openArray()
	} else {
		err = im.openText()
	}
	if err != nil {
		return err
	}
	im.setOptions()
	if im.opt.Renumber {
		return im.renumber(ctx)
	}
	return nil
}

// setOptions keeps in the dataset what shaped it.
func (im *edgesImport) setOptions() {
	for name, v := range map[string]string{"src": im.opt.Src, "dst": im.opt.Dst} {
		if v != "" {
			im.m.Source.Options[name] = v
		}
	}
	if im.ids.base != 0 {
		im.m.Source.Options["base"] = "1"
	}
	if im.opt.Renumber {
		im.m.Source.Options["renumber"] = "true"
	}
}

func (im *edgesImport) openArray() error {
	if im.from == "" && im.o.Features == "" && im.o.Labels == "" && !im.opt.Renumber {
		return errs.New(errs.Usage,
			"%s: an edge array needs features, labels or {nodes} beside it to tell the number of nodes",
			im.edges)
	}
	if im.ids.base != 0 {
		return errs.New(errs.Usage, "%v is for edges in text; %s is an array", errs.Key("base"),
			im.edges)
	}
	a, err := openArray(im.edges)
	im.source = func(ids idRange) (edges.Source, error) {
		return indexEdges(a, ofOne(ids.nodes), anyShape)
	}
	return err
}

func (im *edgesImport) openText() error {
	h, err := im.readEdgeHead(im.edges)
	if err != nil {
		return err
	}
	if err := im.konectList(h); err != nil {
		return err
	}
	im.says = h.edges
	im.source = func(ids idRange) (edges.Source, error) {
		if h.empty {
			return edges.Source{Name: im.edges}, nil
		}
		return textSource(im.edges, h, ids, &im.comments)
	}
	return nil
}

// idRange is that of the ids that the edges may have.
func (im *edgesImport) idRange() idRange {
	switch {
	case im.opt.Renumber:
		return idRange{nodes: maxTextID}
	case im.from == "":
		return idRange{base: im.ids.base, nodes: maxTextNodes}
	}
	return idRange{base: im.ids.base, nodes: im.m.Nodes, known: true}
}

// takeEdges sorts the edges.
func (im *edgesImport) takeEdges(ctx context.Context) error {
	s, err := im.source(im.idRange())
	if err != nil {
		return err
	}
	if im.opt.Renumber {
		s = im.ids.renumbered(s)
	}
	im.comments.Store(0)
	if err := im.edgesFrom(ctx, s); err != nil {
		return err
	}
	if im.taken > 0 {
		im.o.note("%s: line %d, 0 and 1, is taken for an edge; if it names columns, give {header} edges=yes",
			im.edges, im.taken)
	}
	if n := im.comments.Load(); n > 0 {
		im.o.note("%s: comment lines amid the edges are left out: %d", im.edges, n)
	}
	if im.sorter == nil {
		return nil // an interrupted import has looked at the ids
	}
	least, _, n := im.sorter.Seen()
	if im.says != 0 && n != im.says {
		im.o.note("%s says that it has %d edges, there are %d: is it whole?", im.edges, im.says, n)
	}
	return im.checkBase(least)
}

// checkBase refuses ids that begin with 1 where nothing says that there is a node 0.
func (im *edgesImport) checkBase(least int64) error {
	switch {
	case least != 1 || im.ids.base != 0 || im.opt.Base != "" || im.opt.Renumber:
		return nil
	case im.from == "":
		return errs.New(errs.Usage,
			"%s: the ids begin with 1: give {base} 1, if they count from 1, or {base} 0, if there is a node 0 without edges, or {renumber}",
			im.edges)
	}
	im.o.note("%s: no edge has node 0, the least id is 1; if ids count from 1, give {base} 1",
		im.edges)
	return nil
}

// countNodes returns how many nodes the edges need.
func (im *edgesImport) countNodes(ctx context.Context) (int64, error) {
	s, err := im.source(im.idRange())
	if err != nil {
		return 0, err
	}
	var mu sync.Mutex
	least, largest := int64(math.MaxInt64), int64(-1)
	if err := eachEdge(ctx, s, func(src, dst []int64) error {
		if len(src) == 0 {
			return nil
		}
		lo, hi := min(slices.Min(src), slices.Min(dst)), max(slices.Max(src), slices.Max(dst))
		mu.Lock()
		defer mu.Unlock()
		least, largest = min(least, lo), max(largest, hi)
		return nil
	}); err != nil {
		return 0, err
	}
	return largest + 1, im.checkBase(least)
}

// renumber collects all ids, of edges and of files with a column of ids, and numbers them.
func (im *edgesImport) renumber(ctx context.Context) error {
	s, err := im.source(im.idRange())
	if err != nil {
		return err
	}
	var set idSet
	if err := eachEdge(ctx, s, func(src, dst []int64) error {
		set.add(src, dst)
		return nil
	}); err != nil {
		return err
	}
	if err := im.number(&set); err != nil {
		return err
	}
	for _, f := range [][2]string{{"features", im.o.Features}, {"labels", im.o.Labels}} {
		kind, path := f[0], f[1]
		if path == "" || isArray(path) {
			continue
		}
		t, err := im.tableOf(ctx, kind, path, true)
		if err != nil {
			return err
		}
		if t.id < 0 {
			continue
		}
		if err := eachRows(ctx, im.importer, t, func(r rows[float64], _ lineBlock) error {
			set.add(r.ids)
			return nil
		}); err != nil {
			return err
		}
	}
	if err := im.number(&set); err != nil {
		return err
	}
	im.from = errs.Textf("{renumber}")
	return im.writeIDs()
}
