package importer

import (
	"cmp"
	"context"
	"path/filepath"

	"helios/dataset/npy"
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
	Usage:       "the papers and citations of MAG240M (OGB-LSC)",
	Description: mag240mHelp}, MAG240M)

const mag240mHelp = "{in} is the folder that OGB unpacks (mag240m_kddcup2021): processed/paper with node_feat.npy, node_label.npy and\n" +
	"node_year.npy, and processed/paper___cites___paper/edge_index.npy. Labelled papers until 2018 are for\n" +
	"training, those of 2019 for validation and those of 2020 for the test, as the dataset defines it."

// MAG240M imports the papers of MAG240M and their citations (mag240mHelp). The splits are made by
// year, as split_dict.pt is a pickle of PyTorch; the test is empty where its labels are withheld.
func MAG240M(ctx context.Context, o Options) error {
	if err := o.fillOwn(); err != nil {
		return err
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
	return runNamed(request{kind: "mag240m", options: &o, Options: o}, func(im *importer) error {
		im.noteUnused(o.In, unusedBelow(o.In, used))
		return (&mag240mImport{im}).run(ctx)
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
