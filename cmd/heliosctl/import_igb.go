package main

import (
	"github.com/urfave/cli/v2"

	"helios/dataset"
)

func init() {
	importFormats = append(importFormats, importFormat{
		name:  "igb",
		usage: "the papers and citations of the Illinois Graph Benchmark, of any size",
		description: "--in is the folder of one size (tiny, small, medium, large, full): processed/paper with node_feat.npy and\n" +
			"node_label_19.npy or node_label_2K.npy, and processed/paper__cites__paper/edge_index.npy. Arrays\n" +
			"without a header, as large and full have them, are known by their missing magic. The split is that of the benchmark's\n" +
			"loader, 60/20/20 by position; the loader also gives each node one edge to itself, which the import leaves to you.",
		flags: []cli.Flag{
			fnDim(),
			&cli.StringFlag{Name: "classes", Value: "19", Usage: "labels to take: of 19 or of 2K classes"},
		},
		run: dataset.ImportIGB,
		options: func(e *env, o *dataset.ImportOptions) error {
			o.Format.Classes = e.c.String("classes")
			return checkFnDim(e)
		},
	})
}
