package importer

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
)

var igbhFormat = newFormat(Format{Name: "igbh",
	Usage:       "the heterogeneous Illinois Graph Benchmark (IGBH), of any size",
	Description: igbhHelp}, IGBH)

// IGBHOptions shape an import of IGBH.
type IGBHOptions struct {
	Classes   string `option:"classes" oneof:"19,2K" default:"19" usage:"labels to take, by their number of classes"`
	Relations string `option:"relations" common:"yes" oneof:"mlperf,gids,files" default:"mlperf" usage:"mlperf: citations both ways with self loops, and the reverse of each other relation; gids: the reverse of each; files: those that are there"`
	PadOption
	TypedOptions
}

const igbhHelp = "{in} is the folder of one size (tiny, small, medium, large, full): processed/TYPE with node_feat.npy,\n" +
	"processed/paper with node_label_19.npy or node_label_2K.npy, and processed/SRC__REL__DST/edge_index.npy, a row for each edge.\n" +
	"Arrays without a header, as large and full have them for papers and authors, are known by their missing magic.\n" +
	"The split is that of the benchmark's loader, 60/20/20 by position."

const igbhFolder = "one size of IGBH as it is unpacked: processed/TYPE/node_feat.npy, processed/paper/node_label_19.npy or node_label_2K.npy, and processed/SRC__REL__DST/edge_index.npy"

const (
	igbhPaper = "paper"
	igbhCites = "cites"
)

// igbhOrder is the order of types and relations, which decides samples: those of the benchmark
// first, as its loader has them, then others by their names.
var igbhOrder = []string{igbhPaper, "author", "fos", "institute", "journal", "conference",
	"paper__cites__paper", "paper__written_by__author", "author__affiliated_to__institute",
	"paper__topic__fos", "paper__published__journal", "paper__venue__conference"}

// igbhClasses is the number of classes of each set of labels.
var igbhClasses = map[string]int64{"19": 19, "2K": 2983}

// IGBH imports all types and relations of the Illinois Graph Benchmark (igbhHelp). Where a type's
// rows begin follows from the arrays' headers and sizes alone.
func IGBH(ctx context.Context, o IGBHOptions) error {
	base := o.options()
	if err := base.fillOwn(); err != nil {
		return err
	}
	o.Classes, o.Relations = cmp.Or(o.Classes, "19"), cmp.Or(o.Relations, "mlperf")
	label := filepath.Join("processed", igbhPaper, "node_label_"+o.Classes+".npy")
	if err := base.inFolder(igbhFolder, label,
		filepath.Join("processed", igbhPaper, "node_feat.npy")); err != nil {
		return err
	}
	base.Labels = filepath.Join(o.In, label)
	base.Features = filepath.Join(o.In, "processed", igbhPaper, "node_feat.npy")
	r := request{kind: "igbh", options: &o, Options: base}
	return runNamed(r, func(im *importer) error {
		im.m.Source.Options["relations"] = o.Relations
		return (&igbhImport{typedImport{importer: im, pad: o.Pad}, o}).run(ctx)
	})
}

// igbhImport is an import of IGBH.
type igbhImport struct {
	typedImport
	opt IGBHOptions
}

func (im *igbhImport) run(ctx context.Context) error {
	types, rels, err := im.folders()
	if err != nil {
		return err
	}
	papers := &igbImport{importer: im.importer,
		opt: IGBOptions{Classes: im.opt.Classes, Options: im.o}}
	im.m.Source.Options["classes"] = im.opt.Classes
	feat, lab, err := im.paperColumns(papers)
	if err != nil {
		return err
	}
	used := []string{filepath.Clean(im.o.Labels)}
	for _, name := range types {
		t, rows := typedNodes{name: name}, feat
		path := filepath.Join(im.o.In, "processed", name, "node_feat.npy")
		if name != igbhPaper {
			if rows, err = igbhRows(path); err != nil {
				return err
			}
		}
		if err := im.rowsFrom(&t, rows); err != nil {
			return err
		}
		used = append(used, path)
		im.types = append(im.types, t)
	}
	for _, name := range rels {
		path := filepath.Join(im.o.In, "processed", name, "edge_index.npy")
		used = append(used, path)
		im.rels = append(im.rels, im.igbhRelation(name, path))
	}
	im.noteUnused(im.o.In, unusedBelow(im.o.In, used))
	if err := im.taskOn("topic", igbhPaper); err != nil {
		return err
	}
	if im.task.labels, err = papers.igbLabels(lab); err != nil {
		return err
	}
	im.task.labelFile = im.o.Labels
	im.o.NumClasses, im.classesFrom = igbhClasses[im.opt.Classes], "{classes} "+im.opt.Classes
	papers.noteZeros(im.task.labels)
	if err := im.countClasses(im.task.labels, im.o.Labels); err != nil {
		return err
	}
	if im.task.splits, err = im.splitsOr(ctx, func(context.Context) ([]splitSet, error) {
		papers.splitByPosition(int64(len(im.task.labels)))
		return nil, nil
	}); err != nil {
		return err
	}
	return im.write(ctx)
}

// paperColumns opens the features and labels of papers. A folder that is called by a size must have
// so many.
func (im *igbhImport) paperColumns(papers *igbImport) (feat, lab *npy.Array, err error) {
	if feat, err = igbhRows(im.o.Features); err == nil {
		err = im.nodesFrom(feat)
	}
	if err != nil {
		return nil, nil, err
	}
	name := filepath.Base(im.absIn())
	if n, known := igb.sizes[strings.ToLower(name)]; known && n != im.m.Nodes {
		return nil, nil, errs.New(errs.Usage,
			"%s has %d rows, and %s of IGBH has %d papers; copy it again, or give the folder another name",
			im.o.Features, im.m.Nodes, name, n)
	}
	lab, err = npy.Open(im.o.Labels)
	if errors.Is(err, npy.ErrNotNPY) {
		lab, err = npy.Section("", im.o.Labels, 0, npy.Header{DType: npy.Float32,
			Shape: []int64{papers.igbLabelRows()}}, true)
	}
	return feat, lab, err
}

// folders are the types and relations that are there, in their order.
func (im *igbhImport) folders() (types, rels []string, err error) {
	entries, err := os.ReadDir(filepath.Join(im.o.In, "processed"))
	if err != nil {
		return nil, nil, errs.With(errs.Usage, err)
	}
	for _, e := range entries {
		name := e.Name()
		folder := filepath.Join(im.o.In, "processed", name)
		switch parts := strings.Split(name, "__"); {
		case isFile(filepath.Join(folder, "edge_index.npy")):
			if len(parts) != 3 || slices.Contains(parts, "") {
				return nil, nil, errs.New(errs.Usage,
					"%s: the name of a relation's folder must be SRC__REL__DST", folder)
			}
			rels = append(rels, name)
		case isFile(filepath.Join(folder, "node_feat.npy")):
			types = append(types, name)
		case len(parts) == 3:
			return nil, nil, errs.New(errs.Usage, "%s has no edge_index.npy; {in} must be a folder with %s",
				folder, igbhFolder)
		}
	}
	if len(rels) == 0 {
		return nil, nil, errs.New(errs.Usage, "%s has no relation; {in} must be a folder with %s",
			im.o.In, igbhFolder)
	}
	for _, names := range [][]string{types, rels} {
		slices.SortStableFunc(names, func(a, b string) int { // ReadDir sorts by name
			return cmp.Compare(igbhPlace(a), igbhPlace(b))
		})
	}
	return types, rels, nil
}

func igbhPlace(name string) int {
	if i := slices.Index(igbhOrder, name); i >= 0 {
		return i
	}
	return len(igbhOrder)
}

// igbhRelation is a relation with what the option adds.
func (im *igbhImport) igbhRelation(folder, path string) typedEdges {
	parts := strings.Split(folder, "__")
	r := typedEdges{src: parts[0], name: parts[1], dst: parts[2],
		open: func(of ends) ([]edges.Source, error) {
			s, err := openIndexEdges(path, of, twoColumn)
			return []edges.Source{s}, err
		}}
	switch {
	case im.opt.Relations == "files":
	case im.opt.Relations == "mlperf" && r.name == igbhCites && r.src == r.dst:
		// The benchmark drops self loops, adds one for each paper and takes edges both ways: each
		// paper has two.
		one := r.open
		r.symmetric = true
		r.open = func(of ends) ([]edges.Source, error) {
			s, err := one(of)
			if err != nil {
				return nil, err
			}
			return []edges.Source{bothWays(s[0]), selfLoops(of.src, 2)}, nil
		}
	default:
		r.reverse = "rev_" + r.name
	}
	return r
}

// igbhRows opens the features of a type. Without a header the file's size gives the number of rows.
func igbhRows(path string) (*npy.Array, error) {
	a, err := npy.Open(path)
	if !errors.Is(err, npy.ErrNotNPY) {
		return a, err
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	row := 4 * igb.dim
	if st.Size()%row != 0 || st.Size() == 0 {
		return nil, errs.New(errs.Usage,
			"%s has no .npy header and %d bytes, which are no raw float32 rows of %d features; copy it again",
			path, st.Size(), igb.dim)
	}
	return npy.Section("", path, 0, npy.Header{DType: npy.Float32,
		Shape: []int64{st.Size() / row, igb.dim}}, true)
}
