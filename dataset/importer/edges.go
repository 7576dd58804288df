package importer

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"helios/dataset/npy"
	"helios/internal/errs"
)

func init() {
	register(Format{Name: "edges",
		Usage:       "edge lists: CSV or TSV files of source and destination",
		Description: edgesHelp}, Edges)
}

// EdgesOptions shape an import of edge lists.
type EdgesOptions struct {
	// IgnoreColumns takes the first two columns of an edge list that has more.
	IgnoreColumns bool `option:"ignore-columns" usage:"take the first two columns of an edge list with more, such as weights"`
	Options
}

const edgesHelp = "One edge a line, source first, split by commas, semicolons, tabs or spaces, plain or compressed (further\n" +
	"columns are refused, or left out with option ignore-columns); or a\n" +
	"folder with edges and, where there are some, features, labels and splits (OGB's raw folder)."

// What a directory of text files is searched for: OGB's names and the obvious ones.
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

// Edges imports an edge list: a text file, plain or .gz, with one edge a line, source first, split
// by commas, semicolons, tabs or spaces. Lines beginning with # or % and one heading line are
// skipped, and with IgnoreColumns further columns, which are refused otherwise. In may also be a
// directory that holds edge(s) and, if present, node-feat or features, node-label or labels, as
// .csv, .tsv, .txt (or .gz of these), or .npy: so an OGB "raw" folder can be given as it is.
//
// Features are rows of numbers; labels are one number a line, or a node id and a number. Both
// may be .npy files. Features can be made (FeatureFn); without labels a graph can't be trained on,
// but sampled and measured.
func Edges(ctx context.Context, o EdgesOptions) error {
	dim := o.Dim
	if err := o.fillMadeUp(); err != nil {
		return err
	}
	edges := o.In
	st, err := os.Stat(o.In)
	if err != nil {
		return errs.With(errs.Usage, err)
	}
	if st.IsDir() {
		if edges = findText(o.In, edgeFiles); edges == "" {
			return errs.New(errs.Usage, "%s has no edge list (looked for %s with %s)", o.In,
				strings.Join(edgeFiles, ", "), strings.Join(textEndings, ", "))
		}
		if o.Features == "" && o.FeatureFn == "" {
			o.Features = findText(o.In, featureFiles)
			if err := o.dimUsed(dim); err != nil {
				return err
			}
		}
		if o.Labels == "" {
			o.Labels = findText(o.In, labelFiles)
		}
	}
	var unused []string
	if st.IsDir() {
		unused = unusedFiles(o.In, edges, o.Features, o.Labels)
		if o.SplitDir == "" && o.Labels != "" && !o.MakeSplits {
			if i := slices.IndexFunc(unused, looksLikeSplit); i >= 0 {
				return errs.New(errs.Usage,
					"%s holds %s, which may be a split; give option splits DIR, or option make-splits to deal new ones",
					o.In, brief(unused[i]))
			}
		}
	}
	if err := o.needFeaturesSoon(edges); err != nil {
		return err
	}
	return run(request{kind: "edges", options: &o, Options: o.Options}, func(im *importer) error {
		im.noteUnused(o.In, unused)
		return (&edgesImport{im, o}).run(ctx, edges)
	})
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

// edgesImport is an import of edge lists.
type edgesImport struct {
	*importer
	opt EdgesOptions
}

func (im *edgesImport) run(ctx context.Context, edges string) error {
	o := &im.o
	im.m.Source = o.source("edges", edges, o.Features, o.Labels, o.SplitDir)
	nodesFrom := ""
	if o.Nodes > 0 {
		im.m.Nodes, nodesFrom = o.Nodes, "option nodes"
	}
	// Features first: their row count is the number of nodes, which ids are checked against.
	if o.Features != "" {
		rows, err := im.textFeatures(ctx, o.Features)
		if err != nil {
			return err
		}
		if err := im.sameRows(rows, o.Features, &nodesFrom); err != nil {
			return err
		}
	}
	var labels []int32
	if o.Labels != "" {
		var err error
		if labels, err = im.textLabels(o.Labels); err != nil {
			return err
		}
		if err := im.sameRows(int64(len(labels)), o.Labels, &nodesFrom); err != nil {
			return err
		}
		if err := im.countClasses(labels, o.Labels); err != nil {
			return err
		}
	}
	if isArray(edges) {
		if nodesFrom == "" {
			return errs.New(errs.Usage,
				"%s: an edge array needs features, labels or option nodes beside it to tell the number of nodes",
				edges)
		}
		a, err := npy.Open(edges)
		if err == nil {
			err = im.edgeIndex(ctx, a, anyShape)
		}
		if err != nil {
			return err
		}
	} else if err := im.textEdges(ctx, edges, nodesFrom != "", im.opt.IgnoreColumns); err != nil {
		return err
	}
	if im.m.Nodes < 1 {
		return errs.New(errs.Usage, "%s holds no edges", edges)
	}
	if err := o.needFeatures(o.In); err != nil {
		return err
	}
	if err := im.topology(ctx); err != nil {
		return err
	}
	if im.m.Edges == 0 && !o.NoEdges && o.SelfLoops != "drop" {
		return errs.New(errs.Usage, "%s holds no edges; give option no-edges, if that is right", edges)
	}
	if o.FeatureFn != "" {
		if err := im.madeFeatures(ctx); err != nil {
			return err
		}
	}
	var splits []splitSet
	if o.SplitDir != "" {
		for i, names := range splitFiles {
			path := findText(o.SplitDir, names)
			if path == "" {
				path = findText(o.SplitDir, splitNames[i])
			}
			if path == "" {
				return errs.New(errs.Usage, "%s has no split %q; give all three splits or none",
					o.SplitDir, names[0])
			}
			ids, err := im.textSplit(path)
			if err != nil {
				return err
			}
			splits = append(splits, splitSet{path, ids})
		}
	}
	return im.labelsAndSplits(labels, o.Labels, splits)
}
