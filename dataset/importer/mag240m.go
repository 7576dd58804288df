package importer

import (
	"cmp"
	"context"
	"path/filepath"
	"slices"
	"strings"

	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/dataset/pickle"
	"helios/internal/errs"
)

const mag240mFolder = "MAG240M as it is unpacked (mag240m_kddcup2021): processed/paper/node_feat.npy, node_label.npy and node_year.npy, and processed/paper___cites___paper/edge_index.npy"

// The split of MAG240M by the year of a paper: "we train models on arXiv papers published until
// 2018, validate the performance on the 2019 papers, and finally test … on the 2020 papers"
// (OGB-LSC).
const (
	mag240mTrainUntil = 2018
	mag240mVal        = 2019
	mag240mTest       = 2020
)

var mag240mFormat = newFormat(Format{Name: "mag240m",
	Usage:       "MAG240M (OGB-LSC): its papers and citations, or all of its types",
	Description: mag240mHelp}, MAG240M)

// MAG240MOptions shape an import of MAG240M.
type MAG240MOptions struct {
	Hetero bool `option:"hetero" common:"yes" usage:"take authors and institutions too: citations both ways, and each other relation with its reverse"`
	FillOptions
	Options
}

const mag240mHelp = "{in} is the folder that OGB unpacks (mag240m_kddcup2021): processed/paper with node_feat.npy, node_label.npy and\n" +
	"node_year.npy, and processed/paper___cites___paper/edge_index.npy. Labelled papers until 2018 are for\n" +
	"training, those of 2019 for validation and those of 2020 for the test, as the dataset defines it. With {hetero}\n" +
	"also meta.pt, which has the numbers of nodes, and the edges of author___affiliated_with___institution and\n" +
	"author___writes___paper. Authors and institutions have rows where {fill} makes some."

// MAG240M imports the papers of MAG240M and their citations (mag240mHelp). The splits are made by
// year, as split_dict.pt is a pickle of PyTorch; the test is empty where its labels are withheld.
func MAG240M(ctx context.Context, o MAG240MOptions) error {
	if err := o.fillOwn(); err != nil {
		return err
	}
	fills, err := parseFills(o.Fill)
	if err != nil {
		return err
	}
	if !o.Hetero && (o.Fill != "" || o.Pad) {
		return errs.New(errs.Usage, "{fill} and {pad} are for {hetero}; leave them out, or give that")
	}
	paper := filepath.Join("processed", "paper")
	files := []string{filepath.Join("processed", "paper___cites___paper", "edge_index.npy"),
		filepath.Join(paper, "node_year.npy")}
	if o.Labels == "" {
		files = append(files, filepath.Join(paper, "node_label.npy"))
	}
	if o.ownFeatures() {
		files = append(files, filepath.Join(paper, "node_feat.npy"))
	}
	if err := o.inFolder(mag240mFolder, files...); err != nil {
		return err
	}
	var used []string
	for _, f := range files {
		if o.SplitDir == "" || filepath.Base(f) != "node_year.npy" {
			used = append(used, filepath.Join(o.In, f))
		}
	}
	r := request{kind: "mag240m", options: &o, Options: o.Options}
	return runNamed(r, func(im *importer) error {
		x := &mag240mImport{im}
		if o.Hetero {
			return x.hetero(ctx, o, fills, used)
		}
		im.noteUnused(o.In, unusedBelow(o.In, used))
		return x.run(ctx)
	})
}

// mag240mImport is an import of MAG240M.
type mag240mImport struct{ *importer }

func (im *mag240mImport) run(ctx context.Context) error {
	o := &im.o
	paper := filepath.Join(o.In, "processed", "paper")
	p := parts{labelFile: cmp.Or(o.Labels, filepath.Join(paper, "node_label.npy"))}
	lab, err := npy.Open(p.labelFile)
	if err != nil {
		return err
	}
	if err := im.nodesFrom(lab); err != nil {
		return err
	}
	if o.ownFeatures() { // else it is looked at later
		feat, err := npy.Open(filepath.Join(paper, "node_feat.npy"))
		if err == nil {
			err = im.oneRowEach(feat, "features")
		}
		if err != nil {
			return err
		}
		p.features = dataOf(feat)
	}
	if p.labels, err = im.labels(ctx, dataOf(lab), nil); err != nil {
		return err
	}
	if p.splits, err = im.splitsOr(ctx, func(context.Context) ([]splitSet, error) {
		return im.mag240mSplits(filepath.Join(paper, "node_year.npy"), p.labels)
	}); err != nil {
		return err
	}
	if p.edges, err = openIndexEdges(filepath.Join(o.In, "processed", "paper___cites___paper",
		"edge_index.npy"), ofOne(im.m.Nodes), twoRows); err != nil {
		return err
	}
	return im.write(ctx, p)
}

func (im *mag240mImport) mag240mSplits(path string, labels []int32) ([]splitSet, error) {
	a, err := npy.Open(path)
	if err != nil {
		return nil, err
	}
	if err := im.oneRowEach(a, "years"); err != nil {
		return nil, err
	}
	if len(a.Header.Shape) != 1 {
		return nil, errs.New(errs.Usage, "%s: years have shape %s, must be (nodes,)", path,
			a.Header.ShapeString())
	}
	sets := make([]splitSet, 3)
	for i, name := range []string{"train", "val", "test"} {
		sets[i] = splitSet{file: path + " (" + name + ")"}
	}
	err = eachInt(a, func(v, year int64) error {
		if labels[v] == noLabel {
			return nil
		}
		i := 0
		switch {
		case year < 1500 || year > 2100:
			return errs.New(errs.Usage, "%s: year %d of node %d is no year", path, year, v)
		case year <= mag240mTrainUntil:
		case year == mag240mVal:
			i = 1
		case year == mag240mTest:
			i = 2
		default:
			return errs.New(errs.Usage,
				"%s: node %d is labelled and of %d; labelled papers are of %d at the latest", path,
				v, year, mag240mTest)
		}
		sets[i].ids = append(sets[i].ids, v)
		return nil
	})
	im.m.Source.Options["split"] = "year"
	return sets, err
}

// mag240mRelations are those beside the citations.
var mag240mRelations = [][3]string{{"author", "affiliated_with", "institution"},
	{"author", "writes", "paper"}}

// hetero imports all types.
func (im *mag240mImport) hetero(ctx context.Context, o MAG240MOptions, fills []fillRule,
	used []string) error {
	if !o.ownFeatures() || o.Labels != "" {
		return errs.New(errs.Usage,
			"{hetero} takes features and labels of the input; leave {features}, {feature-fn} and {labels} out")
	}
	paper := filepath.Join(o.In, "processed", "paper")
	feat, err := npy.Open(filepath.Join(paper, "node_feat.npy"))
	if err != nil {
		return err
	}
	meta := filepath.Join(o.In, "meta.pt")
	counts, err := torchCounts(meta)
	if err != nil {
		return err
	}
	t := &typedImport{importer: im.importer, pad: o.Pad, fills: fills}
	for _, name := range []string{"paper", "author", "institution"} {
		n := counts[name]
		if n < 1 || n > maxTextNodes {
			return errs.New(errs.Usage, "%s: it says %d nodes of type %s", meta, n, name)
		}
		t.types = append(t.types, typedNodes{name: name, nodes: n})
	}
	if err := t.rowsFrom(&t.types[0], feat); err != nil {
		return err
	}
	for _, r := range slices.Concat([][3]string{{"paper", "cites", "paper"}}, mag240mRelations) {
		path := filepath.Join(o.In, "processed", strings.Join(r[:], "___"), "edge_index.npy")
		if !isFile(path) {
			return errs.New(errs.Usage, "%s is missing; {in} must be a folder with %s", path, mag240mFolder)
		}
		used = append(used, path)
		rel := typedEdges{src: r[0], name: r[1], dst: r[2], open: func(of ends) ([]edges.Source,
			error) {
			s, err := openIndexEdges(path, of, twoRows)
			return []edges.Source{s}, err
		}}
		rel.addReverse()
		t.rels = append(t.rels, rel)
	}
	im.noteUnused(o.In, unusedBelow(o.In, append(used, meta)))
	if err := t.taskOn("subject", "paper"); err != nil {
		return err
	}
	t.task.labelFile = filepath.Join(paper, "node_label.npy")
	lab, err := npy.Open(t.task.labelFile)
	if err != nil {
		return err
	}
	if t.task.labels, err = im.labels(ctx, dataOf(lab), nil); err != nil {
		return err
	}
	if t.task.splits, err = im.splitsOr(ctx, func(context.Context) ([]splitSet, error) {
		return im.mag240mSplits(filepath.Join(paper, "node_year.npy"), t.task.labels)
	}); err != nil {
		return err
	}
	return t.write(ctx)
}

// torchCounts reads a dictionary of whole numbers that PyTorch has saved: a zip with a pickle,
// which is read as data (package pickle).
func torchCounts(path string) (counts map[string]int64, err error) {
	bad := func(why string) error {
		return errs.New(errs.Usage,
			"%s: %s; it must hold the numbers of nodes, as torch.save({\"paper\": 121751666, …}) writes them",
			path, why)
	}
	a, err := npy.OpenArchive(path)
	if err != nil {
		return nil, bad(err.Error())
	}
	defer func() { err = closing(err, a) }()
	v, _, err := torchValue(a)
	if err != nil {
		return nil, err
	}
	d, ok := v.(*pickle.Dict)
	if !ok {
		return nil, bad("it holds " + pickle.Describe(v))
	}
	counts = map[string]int64{}
	for i, k := range d.Keys {
		name, ok := k.(string)
		n, isInt := d.Values[i].(int64)
		if ok && isInt {
			counts[name] = n
		}
	}
	return counts, nil
}
