package dataset

import (
	"context"

	"helios/internal/errs"
)

// madeFeatures are those of a graph that has none: a function of the node's number, or made up.
func (im *importer) madeFeatures(ctx context.Context) error {
	if im.o.FeatureFn != "" {
		return im.hashFeatures(im.o.FeatureFn)
	}
	return im.randomFeatures(ctx)
}

// around imports a graph that comes without features, labels and splits: those that the flags name are
// read beside it, the rest is as for an edge list. im.m.Nodes is known; file is where from.
func (im *importer) around(ctx context.Context, file string, edges edgeSource) error {
	o := &im.o
	if o.Nodes != 0 && o.Nodes != im.m.Nodes {
		return errs.New(errs.Usage, "--nodes %d: %s has %d; leave the flag out", o.Nodes, file, im.m.Nodes)
	}
	im.m.Source.From = o.source("", file, o.Features, o.Labels, o.SplitDir).From
	nodesFrom := file
	if o.Features != "" {
		rows, err := im.textFeatures(ctx, o.Features)
		if err == nil {
			err = im.sameRows(rows, o.Features, &nodesFrom)
		}
		if err != nil {
			return err
		}
	}
	var labels []int32
	if o.Labels != "" {
		var err error
		if labels, err = im.textLabels(o.Labels); err == nil {
			err = im.sameRows(int64(len(labels)), o.Labels, &nodesFrom)
		}
		if err != nil {
			return err
		}
	}
	var splits []splitSet
	if o.SplitDir != "" {
		var err error
		if splits, err = im.folderSplits(ctx, o.SplitDir); err != nil {
			return err
		}
	}
	if err := im.edgesFrom(ctx, edges); err != nil {
		return err
	}
	im.madeUp = o.Features == "" && o.FeatureFn == ""
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
