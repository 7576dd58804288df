package main

import (
	"context"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/dataset/build"
	hcli "helios/internal/cli"
	"helios/internal/errs"
)

func generateCommand() *cli.Command {
	return verb(&cli.Command{
		Name:  "generate",
		Usage: "make a dataset: a graph with planted labels and features",
		Description: "sbm is a stochastic block model, whose labels can be learnt from features and neighbours;\n" +
			"rmat has the skewed degrees of the web and of social networks; communities has groups that are\n" +
			"easily told apart, and hubs that all of them know, whose features alone show the class.\n" +
			"Equal flags give equal bytes.",
	}, 0, generateOptions(), runGenerate)
}

func generateOptions() hcli.Options[build.GenerateOptions] {
	return hcli.Options[build.GenerateOptions]{
		hcli.Text(oneOf("kind", "graph model", "sbm", build.Kinds, nil),
			func(o *build.GenerateOptions) *string { return &o.Kind }),
		hcli.Int64(&cli.Int64Flag{Name: "nodes", DefaultText: "none",
			Usage: "`NUMBER` of nodes (required)"},
			func(o *build.GenerateOptions) *int64 { return &o.Nodes }),
		hcli.Float(&cli.Float64Flag{Name: "avg-degree", Value: 12,
			Usage: "mean number of in-neighbours"},
			func(o *build.GenerateOptions) *float64 { return &o.AvgDegree }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "classes", Value: 16, Usage: "number of labels"},
			func(o *build.GenerateOptions) *int { return &o.Classes }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "dim", Value: 128, Usage: "features of a node (float32)"},
			func(o *build.GenerateOptions) *int { return &o.Dim }).Positive(),
		hcli.Uint64(&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of all random choices"},
			func(o *build.GenerateOptions) *uint64 { return &o.Seed }),
		hcli.Share(&cli.StringFlag{Name: "homophily", DefaultText: "0.8",
			Usage: "sbm, communities: share of neighbours of a node's own class"},
			func(o *build.GenerateOptions) *float64 { return &o.Homophily }).Positive(),
		hcli.Float(&cli.Float64Flag{Name: "signal", DefaultText: "1, and 0.1 for communities",
			Usage: "distance of class centres, in standard deviations of a feature"},
			func(o *build.GenerateOptions) *float64 { return &o.Signal }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "communities", DefaultText: "64",
			Usage: "communities: `NUMBER` of groups of nodes that know each other"},
			func(o *build.GenerateOptions) *int { return &o.Communities.Count }).Positive(),
		hcli.Share(&cli.StringFlag{Name: "mixing", DefaultText: "0.05",
			Usage: "communities: share of neighbours, hubs aside, from other groups"},
			func(o *build.GenerateOptions) *float64 { return &o.Communities.Mixing }).Positive(),
		hcli.Share(&cli.StringFlag{Name: "hubs", DefaultText: "0.005",
			Usage: "communities: share of the nodes that are hubs"},
			func(o *build.GenerateOptions) *float64 { return &o.Communities.Hubs }).Positive(),
		hcli.Share(&cli.StringFlag{Name: "hub-edges", DefaultText: "0.1",
			Usage: "communities: share of neighbours that are hubs, of any group"},
			func(o *build.GenerateOptions) *float64 { return &o.Communities.HubEdges }).Positive(),
		hcli.Share(&cli.StringFlag{Name: "hub-peers", DefaultText: "--hub-edges",
			Usage: "communities: share of a hub's neighbours that are hubs, of any group"},
			func(o *build.GenerateOptions) *float64 { return &o.Communities.HubPeers }).Positive(),
		hcli.Float(&cli.Float64Flag{Name: "hub-signal", DefaultText: "3",
			Usage: "communities: --signal for hubs"},
			func(o *build.GenerateOptions) *float64 { return &o.Communities.HubSignal }).Positive(),
		hcli.Text(&cli.StringFlag{Name: "feature-fn",
			Usage: "rows computed from their numbers, none stored: `hash[:SEED]` (default seed: --seed); they say nothing about the class"},
			func(o *build.GenerateOptions) *string { return &o.FeatureFn }),
		hcli.Share(&cli.StringFlag{Name: "train-fraction", DefaultText: "0.6",
			Usage: "share of the nodes to train on"},
			func(o *build.GenerateOptions) *float64 { return &o.TrainFraction }),
		hcli.Share(&cli.StringFlag{Name: "val-fraction", DefaultText: "0.2",
			Usage: "share of the nodes to validate on"},
			func(o *build.GenerateOptions) *float64 { return &o.ValFraction }),
		hcli.Share(&cli.StringFlag{Name: "test-fraction", DefaultText: "the rest",
			Usage: "share of the nodes to test on; with less than the rest some nodes are in no split"},
			func(o *build.GenerateOptions) *float64 { return &o.TestFraction }).Checked(func(
			o *build.GenerateOptions, _ string) error {
			if o.TestFraction == 0 {
				o.TestFraction = -1 // the library takes 0 for the rest
			}
			return nil
		}),
		hcli.Bytes(&cli.StringFlag{Name: "memory",
			DefaultText: "half of what is available, at most 8GiB",
			Usage:       "`SIZE` that sorting edges may take"},
			func(o *build.GenerateOptions) *int64 { return &o.Memory }).Checked(func(
			o *build.GenerateOptions, text string) error {
			if o.Memory < 16<<20 {
				return errs.New(errs.Usage,
					"--memory %s is too little to sort in; give at least 16MiB", text)
			}
			return nil
		}),
		hcli.Text(&cli.StringFlag{Name: "name",
			Usage: "name of the dataset (default: last part of --out)"},
			func(o *build.GenerateOptions) *string { return &o.Name }),
		hcli.Text(&cli.StringFlag{Name: "out", Usage: "`DIR` to create"},
			func(o *build.GenerateOptions) *string { return &o.Out }),
	}
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
			"--train-fraction and --val-fraction are both 0; give one of them nodes")
	}
	for _, signal := range []*float64{&o.Signal, &o.Communities.HubSignal} {
		if name := e.given(signal); name != "" && o.FeatureFn != "" {
			return errs.New(errs.Usage,
				"--%s is the distance of classes in stored features; rows of --feature-fn say nothing about the class; leave one of the two out",
				name)
		}
	}
	if e.given(&o.Homophily) != "" && !build.Homophilous(o.Kind) {
		return errs.New(errs.Usage,
			"--homophily is for kinds whose edges know classes, and those of --kind %s don't; leave it out",
			o.Kind)
	}
	c := &o.Communities
	for _, at := range []any{&c.Count, &c.Mixing, &c.Hubs, &c.HubEdges, &c.HubPeers,
		&c.HubSignal} {
		if name := e.given(at); name != "" && !build.Grouped(o.Kind) {
			return errs.New(errs.Usage,
				"--%s is for graphs of communities, not for --kind %s; leave it out", name, o.Kind)
		}
	}
	if o.Out == "" {
		return errs.New(errs.Usage, "no --out DIR to create the dataset in")
	}
	if e.given(&o.Nodes) == "" {
		return errs.New(errs.Usage,
			"no --nodes NUMBER; say how large the graph is to be, such as --nodes 200000")
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
	e.ui.Printf("%s: %d nodes, %d edges, %d features, %d classes in %s", m.Name, m.Nodes, m.Edges,
		m.Dim, m.Classes, dir)
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
