package main

import (
	"context"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/dataset/build"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/sched/prepare"
)

func generateCommand() *cli.Command {
	return verb(&cli.Command{
		Name:  "generate",
		Usage: "make a dataset: a graph with planted labels and features",
		Description: "sbm is a stochastic block model, whose labels can be learnt from features and neighbours;\n" +
			"rmat has the skewed degrees of the web and of social networks; communities has groups that are\n" +
			"easily told apart, and hubs that all of them know, whose features alone show the class; typed has four\n" +
			"types of nodes and seven relations.\n" +
			"Equal flags give equal bytes.",
	}, 0, hcli.Of[build.GenerateOptions](), runGenerate)
}

func runGenerate(ctx context.Context, e *env, o *build.GenerateOptions) error {
	o.Progress = e.ui.Progress
	val := 0.2
	if e.given(&o.TrainFraction) == "" {
		o.TrainFraction = 0.6
	} else {
		val = min(val, max(1-o.TrainFraction, 0)) // it shrinks before the given share does
	}
	if e.given(&o.ValFraction) == "" {
		o.ValFraction = val
	}
	if o.TrainFraction == 0 && o.ValFraction == 0 {
		return errs.New(errs.Usage,
			"{train-fraction} and {val-fraction} are both 0; give one of them nodes")
	}
	for _, signal := range []*float64{&o.Signal, &o.Communities.HubSignal} {
		if name := e.given(signal); name != "" && o.FeatureFn != "" {
			return errs.New(errs.Usage,
				"%v is the distance of classes in stored features; rows of {feature-fn} say nothing about the class; leave one of the two out",
				errs.Key(name))
		}
	}
	if e.given(&o.Homophily) != "" && !build.Homophilous(o.Kind) {
		return errs.New(errs.Usage,
			"{homophily} is for kinds whose edges know classes, and those of {kind} %s don't; leave it out",
			o.Kind)
	}
	c := &o.Communities
	for _, field := range []any{&c.Count, &c.Mixing, &c.Hubs, &c.HubEdges, &c.HubPeers,
		&c.HubSignal} {
		if name := e.given(field); name != "" && !build.Grouped(o.Kind) {
			return errs.New(errs.Usage,
				"%v is for graphs of communities, not for {kind} %s; leave it out", errs.Key(name), o.Kind)
		}
	}
	if o.Out == "" {
		return errs.New(errs.Usage, "no {out} DIR to create the dataset in")
	}
	if e.given(&o.Nodes) == "" {
		return errs.New(errs.Usage,
			"no {nodes} NUMBER; say how large the graph is to be, such as {nodes} 200000")
	}
	if err := build.Generate(ctx, *o); err != nil {
		return whenStopped(err, "nothing was kept; run it again")
	}
	return e.showDataset("generated", o.Out)
}

// showDataset reports a dataset that was just written.
func (e *env) showDataset(event, dir string) (err error) {
	d, err := dataset.Open(dir)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := d.Close(); err == nil {
			err = cerr
		}
	}()
	m := d.Meta
	e.ui.Printf("%s: %d nodes, %d edges, %d features, %d %s in %s", m.Name, m.Nodes, m.Edges,
		m.Dim, m.Classes, prepare.TargetOf(d).Plural(), dir)
	return e.ui.Event(event, datasetLine{Dataset: m.Name, Path: dir, UUID: d.UUID().String(),
		Nodes: m.Nodes, Edges: m.Edges, Dim: m.Dim, Classes: m.Classes, Train: m.Train, Val: m.Val,
		Test: m.Test})
}

// datasetLine is a dataset that was made.
type datasetLine struct {
	Dataset string `json:"dataset"`
	Path    string `json:"path"`
	UUID    string `json:"uuid"`
	Nodes   int64  `json:"nodes"`
	Edges   int64  `json:"edges"`
	Dim     int    `json:"dim"` // features per node
	Classes int    `json:"classes"`
	// Nodes of each split.
	Train int64 `json:"train"`
	Val   int64 `json:"val"`
	Test  int64 `json:"test"`
}
