package main

import (
	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/internal/errs"
)

func init() {
	importFormats = append(importFormats, importFormat{
		name:  "ogb",
		usage: "node datasets of the Open Graph Benchmark, such as ogbn-products and ogbn-papers100M",
		description: "--in is the folder that OGB unpacks: raw/ with edge.csv.gz and the files beside it, or with data.npz and\n" +
			"node-label.npz (papers100M, where NaN means unlabelled), and split/ with the official split.",
		flags: []cli.Flag{
			fnDim(),
			&cli.StringFlag{Name: "split", DefaultText: "the only one", Usage: "`NAME` of the folder in split/, where there are several"},
			&cli.StringFlag{Name: "add-inverse-edge", Value: "auto", Usage: "add the opposite of each edge, as OGB does to products: yes, no, or auto (by master.csv or the folder's name)"},
		},
		run: dataset.ImportOGB,
		options: func(e *env, o *dataset.ImportOptions) error {
			o.Format.Split, o.Format.AddInverse = e.c.String("split"), e.c.String("add-inverse-edge")
			return checkFnDim(e)
		},
	})
}

// fnDim is --dim of formats that have features: of those of --feature-fn only.
func fnDim() cli.Flag {
	return &cli.IntFlag{Name: "dim", DefaultText: "64", Usage: "features per node of --feature-fn"}
}

func checkFnDim(e *env) error {
	if e.c.IsSet("dim") && !e.c.IsSet("feature-fn") {
		return errs.New(errs.Usage, "--dim %d is for --feature-fn; the input has features", e.c.Int("dim"))
	}
	return nil
}
