package main

import (
	"context"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/units"
)

func generateCommand() *cli.Command {
	return &cli.Command{
		Name:  "generate",
		Usage: "make a dataset: a graph with planted labels and features",
		Description: "sbm is a stochastic block model, whose labels can be learnt from features and neighbours;\n" +
			"rmat has the skewed degrees of the web and of social networks. Equal flags give equal bytes.",
		Flags: []cli.Flag{
			oneOf("kind", "graph model", "sbm", []string{"sbm", "rmat"}, nil),
			&cli.Int64Flag{Name: "nodes", DefaultText: "none", Usage: "`NUMBER` of nodes (required)"},
			&cli.Float64Flag{Name: "avg-degree", Value: 12, Usage: "mean number of in-neighbours"},
			&cli.IntFlag{Name: "classes", Value: 16, Usage: "number of labels"},
			&cli.IntFlag{Name: "dim", Value: 128, Usage: "features of a node (float32)"},
			&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of all random choices"},
			&cli.Float64Flag{Name: "homophily", DefaultText: "0.8", Usage: "sbm: share of neighbours of a node's own class"},
			&cli.Float64Flag{Name: "signal", DefaultText: "1", Usage: "distance of class centres, in standard deviations of a feature"},
			&cli.StringFlag{Name: "feature-fn", Usage: "rows computed from their numbers, none stored: `hash[:SEED]` (default seed: --seed); they say nothing about the class"},
			&cli.Float64Flag{Name: "train-fraction", DefaultText: "0.6", Usage: "share of the nodes to train on"},
			&cli.Float64Flag{Name: "val-fraction", DefaultText: "0.2", Usage: "share of the nodes to validate on"},
			&cli.Float64Flag{Name: "test-fraction", DefaultText: "the rest", Usage: "share of the nodes to test on; with less than the rest some nodes are in no split"},
			&cli.StringFlag{Name: "memory", DefaultText: "half of what is available, at most 8GiB", Usage: "`SIZE` that sorting edges may take"},
			&cli.StringFlag{Name: "name", Usage: "name of the dataset (default: last part of --out)"},
			&cli.StringFlag{Name: "out", Usage: "`DIR` to create"},
		},
		Action: action(0, runGenerate),
	}
}

func runGenerate(ctx context.Context, e *env) error {
	o := dataset.GenerateOptions{
		Kind: e.c.String("kind"), Nodes: e.c.Int64("nodes"), AvgDegree: e.c.Float64("avg-degree"),
		Classes: e.c.Int("classes"), Dim: e.c.Int("dim"), Seed: e.c.Uint64("seed"),
		Homophily: e.c.Float64("homophily"), Signal: e.c.Float64("signal"),
		Out: e.c.String("out"), Name: e.c.String("name"), Progress: e.ui.Progress, FeatureFn: e.c.String("feature-fn"),
		TrainFraction: 0.6, ValFraction: 0.2,
	}
	if e.c.IsSet("train-fraction") {
		o.TrainFraction = e.c.Float64("train-fraction")
		o.ValFraction = min(o.ValFraction, max(1-o.TrainFraction, 0))
	}
	if e.c.IsSet("val-fraction") {
		o.ValFraction = e.c.Float64("val-fraction")
	}
	if o.TrainFraction == 0 && o.ValFraction == 0 {
		return errs.New(errs.Usage, "--train-fraction and --val-fraction are both 0; give one of them nodes")
	}
	if e.c.IsSet("test-fraction") {
		if o.TestFraction = e.c.Float64("test-fraction"); o.TestFraction == 0 {
			o.TestFraction = -1 // the library takes 0 for the rest
		}
	}
	if e.c.IsSet("memory") {
		m, err := units.ParseBytes(e.c.String("memory"))
		if err != nil {
			return errs.New(errs.Usage, "--memory: %w", err)
		}
		if m < 16<<20 {
			return errs.New(errs.Usage, "--memory %s is too little to sort in; give at least 16MiB", e.c.String("memory"))
		}
		o.Memory = m
	}
	if e.c.IsSet("signal") && o.FeatureFn != "" {
		return errs.New(errs.Usage, "--signal is the distance of classes in stored features; rows of --feature-fn say nothing about the class; leave one of the two out")
	}
	if e.c.IsSet("homophily") && o.Kind != "sbm" {
		return errs.New(errs.Usage, "--homophily is for --kind sbm; the edges of %s know no classes; leave it out", o.Kind)
	}
	if o.Out == "" {
		return errs.New(errs.Usage, "no --out DIR to create the dataset in")
	}
	if !e.c.IsSet("nodes") {
		return errs.New(errs.Usage, "no --nodes NUMBER; say how large the graph is to be, such as --nodes 200000")
	}
	if err := e.notZero("avg-degree", "classes", "dim", "homophily", "signal"); err != nil {
		return err
	}
	if err := dataset.Generate(ctx, o); err != nil {
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
	e.ui.Printf("%s: %d nodes, %d edges, %d features, %d classes in %s", m.Name, m.Nodes, m.Edges, m.Dim, m.Classes, dir)
	return e.ui.Event(event, map[string]any{
		"dataset": m.Name, "path": dir, "uuid": d.UUID().String(), "nodes": m.Nodes, "edges": m.Edges,
		"dim": m.Dim, "classes": m.Classes, "train": m.Train, "val": m.Val, "test": m.Test,
	})
}
