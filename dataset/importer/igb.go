package importer

import (
	"cmp"
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"

	"helios/dataset/npy"
	"helios/internal/errs"
)

var igbFormat = newFormat(Format{Name: "igb",
	Usage:       "the papers and citations of the Illinois Graph Benchmark, of any size",
	Description: igbHelp}, IGB)

// IGBOptions shape an import of IGB.
type IGBOptions struct {
	Classes string `option:"classes" oneof:"19,2K" default:"19" usage:"labels to take, by their number of classes"`
	Options
}

const igbHelp = "{in} is the folder of one size (tiny, small, medium, large, full): processed/paper with node_feat.npy and\n" +
	"node_label_19.npy or node_label_2K.npy, and processed/paper__cites__paper/edge_index.npy. Arrays\n" +
	"without a header, as large and full have them, are known by their missing magic. The split is that of the benchmark's\n" +
	"loader, 60/20/20 by position; the loader also gives each node one edge to itself, which the import leaves to you."

const igbFolder = "one size of IGB as it is unpacked (such as large): processed/paper/node_feat.npy and node_label_19.npy or node_label_2K.npy, and processed/paper__cites__paper/edge_index.npy"

// igb holds what is known of the dataset: the papers of each size, the features of a paper, how
// many papers of the full graph the benchmark's loader takes for labelled in each set of labels
// (they come first), and how many of these are padding, zeros that were written by mistake
// (github.com/IllinoisGraphBenchmark/IGB-Datasets, issue 57). Tests make it smaller.
var igb = struct {
	sizes    map[string]int64
	dim      int64
	full     int64
	labelled map[string]int64
	padding  map[string]int64
}{
	sizes: map[string]int64{"tiny": 100_000, "experimental": 100_000, "small": 1_000_000,
		"medium": 10_000_000, "large": 100_000_000, "full": 269_346_174},
	dim:      1024,
	full:     269_346_174,
	labelled: map[string]int64{"19": 227_130_858, "2K": 157_675_969},
	padding:  map[string]int64{"2K": 4_292_595},
}

// IGB imports papers and citations of the Illinois Graph Benchmark (igbHelp).
func IGB(ctx context.Context, o IGBOptions) error {
	if err := o.fillOwn(); err != nil {
		return err
	}
	o.Classes = cmp.Or(o.Classes, "19")
	files := []string{filepath.Join("processed", "paper__cites__paper", "edge_index.npy")}
	if o.ownFeatures() {
		o.Features = filepath.Join(o.In, "processed", "paper", "node_feat.npy")
		files = append(files, filepath.Join("processed", "paper", "node_feat.npy"))
	}
	if o.Labels == "" {
		name := filepath.Join("processed", "paper", "node_label_"+o.Classes+".npy")
		o.Labels = filepath.Join(o.In, name)
		files = append(files, name)
	}
	if err := o.inFolder(igbFolder, files...); err != nil {
		return err
	}
	used := []string{filepath.Clean(o.Features), filepath.Clean(o.Labels),
		filepath.Join(o.In, files[0])}
	return runNamed(request{kind: "igb", options: &o, Options: o.Options},
		func(im *importer) error {
			im.noteUnused(o.In, unusedBelow(o.In, used))
			return (&igbImport{importer: im, opt: o}).run(ctx)
		})
}

// igbImport is an import of IGB.
type igbImport struct {
	*importer
	opt    IGBOptions
	padded int64 // labels that are padding
}

func (im *igbImport) run(ctx context.Context) error {
	o := &im.o
	im.m.Source.Options["classes"] = im.opt.Classes
	p := parts{labelFile: o.Labels}
	feat, lab, err := im.openColumns()
	if err != nil {
		return err
	}
	if p.labels, err = im.igbLabels(lab); err != nil {
		return err
	}
	im.noteZeros(p.labels)
	if err := im.countClasses(p.labels, o.Labels); err != nil {
		return err
	}
	if p.splits, err = im.splitsOr(ctx, func(context.Context) ([]splitSet, error) {
		im.splitByPosition(int64(len(p.labels)))
		return nil, nil
	}); err != nil {
		return err
	}
	if p.edges, err = openIndexEdges(filepath.Join(o.In, "processed", "paper__cites__paper",
		"edge_index.npy"), ofOne(im.m.Nodes), twoColumn); err != nil {
		return err
	}
	if feat != nil {
		p.features = dataOf(feat)
	}
	return im.write(ctx, p)
}

// openColumns opens the features, where they are not made, and the labels. The features, the labels
// or the name of the folder give the number of nodes.
func (im *igbImport) openColumns() (feat, lab *npy.Array, err error) {
	o := &im.o
	lab, err = npy.Open(o.Labels)
	switch {
	case o.FeatureFn == "":
		var ferr error
		if feat, ferr = im.igbFeatures(o.Features); ferr == nil {
			ferr = im.nodesFrom(feat)
		}
		if ferr != nil {
			return nil, nil, ferr
		}
	case err == nil:
		if err := im.nodesFrom(lab); err != nil {
			return nil, nil, err
		}
	default:
		var known bool
		if im.m.Nodes, known = im.igbNodes(); !known {
			return nil, nil, errs.New(errs.Usage,
				"%s has no .npy header and %s is no size of IGB, so nothing tells the number of papers; give {nodes}",
				o.Labels, o.In)
		}
	}
	if errors.Is(err, npy.ErrNotNPY) {
		lab, err = npy.Section("", o.Labels, 0, npy.Header{DType: npy.Float32,
			Shape: []int64{im.igbLabelRows()}}, true)
	}
	return feat, lab, err
}

// splitByPosition splits n labelled papers as the benchmark's loader does.
func (im *igbImport) splitByPosition(n int64) {
	if n == igb.full {
		n = igb.labelled[im.opt.Classes]
	}
	train, val := int64(float64(n)*0.6), int64(float64(n)*0.2)
	im.m.Source.Options["split"] = "position"
	im.splitOf = func(v int64) int {
		switch {
		case v < train:
			return 0
		case v < train+val:
			return 1
		case v < n-im.padded:
			return 2
		}
		return -1
	}
}

// igbLabelRows returns the number of labels in a file without a header: one for each paper, or, of
// the full graph, one for each labelled paper.
func (im *igbImport) igbLabelRows() int64 {
	labelled := igb.labelled[im.opt.Classes]
	if st, err := os.Stat(im.o.Labels); err == nil && im.m.Nodes == igb.full &&
		st.Size() == 4*labelled {
		return labelled
	}
	return im.m.Nodes
}

// igbLabels reads the labels. Behind the labelled papers of the full graph, no label means
// anything.
func (im *igbImport) igbLabels(a *npy.Array) ([]int32, error) {
	n, labelled := im.m.Nodes, igb.labelled[im.opt.Classes]
	if n != igb.full || labelled >= n {
		if err := im.oneRowEach(a, "labels"); err != nil {
			return nil, err
		}
		return im.labelArray(a)
	}
	if sh := a.Header.Shape; len(sh) == 0 || sh[0] != labelled {
		if err := im.oneRowEach(a, "labels"); err != nil {
			return nil, err
		}
	}
	first := *a
	first.Header.Shape = []int64{labelled}
	if err := im.needMemory(a.Name+": a label for each node", n-labelled, 4); err != nil {
		return nil, err
	}
	labels, err := im.labelArray(&first)
	if pad := igb.padding[im.opt.Classes]; err == nil && pad > 0 && pad < labelled {
		tail := labels[labelled-pad:]
		if !slices.ContainsFunc(tail, func(l int32) bool { return l != 0 }) {
			for i := range tail {
				tail[i] = noLabel
			}
			im.padded = pad
			im.m.Source.Counts["labels-that-are-padding"] = pad
			im.o.note("%s: the last %d of its %d labels are zeros that the benchmark wrote by mistake; these papers have no label and are in no split",
				a.Name, pad, labelled)
		}
	}
	labels = slices.Grow(labels, int(n)-len(labels))
	for err == nil && int64(len(labels)) < n {
		labels = append(labels, noLabel)
	}
	return labels, err
}

// noteZeros names a run of zeros at the end of the labels that chance does not explain: it may be
// padding.
func (im *igbImport) noteZeros(labels []int32) {
	end := len(labels)
	for end > 0 && labels[end-1] == noLabel {
		end--
	}
	first := end
	for first > 0 && labels[first-1] == 0 {
		first--
	}
	zeros := 0
	for _, l := range labels[:first] {
		if l == 0 {
			zeros++
		}
	}
	// The share of zeros before, to the power of the run's length, is below one in 10^12.
	if run := end - first; first > 0 && run > 1 &&
		float64(run)*math.Log((float64(zeros)+1)/(float64(first)+1)) < -27.6 {
		im.o.note("the last %d of the %d labels are all class 0: if they are padding, write -1 in their place",
			run, end)
	}
}

// igbNodes is the number of papers that Nodes or the folder's name says.
func (im *igbImport) igbNodes() (n int64, known bool) {
	if im.o.Nodes > 0 {
		return im.o.Nodes, true
	}
	n, known = igb.sizes[strings.ToLower(filepath.Base(im.absIn()))]
	return n, known
}

// igbFeatures opens the features. Without a header, their number of rows is that of the size that
// the folder's name, or --nodes, says, and the file must be exactly as long as that; with another
// name, it must be one of the known sizes.
func (im *igbImport) igbFeatures(path string) (*npy.Array, error) {
	a, err := npy.Open(path)
	if !errors.Is(err, npy.ErrNotNPY) {
		return a, err
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	row := 4 * igb.dim
	rows, known := im.igbNodes()
	var tried []string
	for name, n := range igb.sizes {
		tried = append(tried, strconv.FormatInt(n*row, 10)+" ("+name+")")
		if !known && n*row == st.Size() {
			rows = n
		}
	}
	if rows < 1 || rows > maxTextNodes || rows*row != st.Size() {
		sort.Strings(tried)
		if known {
			tried = []string{strconv.FormatInt(rows, 10) + " × " + strconv.FormatInt(row, 10)}
		}
		return nil, errs.New(errs.Usage,
			"%s has no .npy header and %d bytes; raw float32 rows of %d features would be %s bytes; copy it again, or say {nodes}",
			path, st.Size(), igb.dim, strings.Join(tried, ", "))
	}
	return npy.Section("", path, 0, npy.Header{DType: npy.Float32, Shape: []int64{rows, igb.dim}},
		true)
}
