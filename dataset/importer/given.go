package importer

import (
	"context"

	"helios/dataset/edges"
	"helios/internal/errs"
)

// around imports a graph that comes without features, labels and splits: those that the flags name
// are read beside it, the rest is as for an edge list. im.m.Nodes is known; file is where from.
func (im *importer) around(ctx context.Context, file string, edges edges.Source) error {
	o := &im.o
	if o.Nodes != 0 && o.Nodes != im.m.Nodes {
		return errs.New(errs.Usage, "{nodes} %d: %s has %d; leave it out", o.Nodes, file,
			im.m.Nodes)
	}
	im.m.Source.From = o.source("", file, o.Features, o.Labels, o.SplitDir).From
	nodesFrom := errs.Text(file)
	labels, err := im.givenColumns(ctx, &nodesFrom)
	if err != nil {
		return err
	}
	var splits []splitSet
	if o.SplitDir != "" {
		if splits, err = im.folderSplits(ctx, o.SplitDir); err != nil {
			return err
		}
	}
	if err := im.edgesFrom(ctx, edges); err != nil {
		return err
	}
	if err := o.needFeatures(file); err != nil {
		return err
	}
	if err := im.topology(ctx); err != nil {
		return err
	}
	if o.Features == "" {
		if err := im.madeFeatures(ctx); err != nil {
			return err
		}
	}
	return im.labelsAndSplits(labels, o.Labels, splits)
}

// givenColumns writes the features and reads the labels of files that options name. Their rows are
// the number of nodes, or agree with it; nodesFrom names its source.
func (im *importer) givenColumns(ctx context.Context, nodesFrom *errs.Text) (labels []int32,
	err error) {
	o := &im.o
	if o.Features != "" {
		d, err := openData(o.Features, true)
		if err == nil {
			err = im.features(ctx, d, nodesFrom)
		}
		if err != nil {
			return nil, err
		}
	}
	if o.Labels == "" {
		return nil, nil
	}
	d, err := openData(o.Labels, true)
	if err != nil {
		return nil, err
	}
	return im.labels(ctx, d, nodesFrom)
}
