package main

import (
	"github.com/urfave/cli/v2"

	"helios/dataset"
)

func init() {
	importFormats = append(importFormats, importFormat{
		name:  "planetoid",
		usage: "CiteSeer, Cora and PubMed as published with Planetoid, with the public splits",
		description: "--in is the folder of ind.NAME.{x,tx,allx,y,ty,ally,graph,test.index}. Pickles are read by a reader that\n" +
			"knows only NumPy arrays, csr_matrix and dictionaries of lists, and runs nothing. The graph is made undirected.\n" +
			"Where the folder has several datasets, --name chooses one, as in --name cora.",
		flags: []cli.Flag{
			&cli.StringFlag{Name: "normalize-features", Usage: "`HOW`: row divides each node's features by their sum, as GCN's reference does"},
		},
		options: func(e *env, o *dataset.ImportOptions) error {
			o.Format.NormalizeFeatures = e.c.String("normalize-features")
			return nil
		},
		run: dataset.ImportPlanetoid,
	})
}
