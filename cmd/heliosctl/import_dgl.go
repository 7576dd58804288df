package main

import (
	"github.com/urfave/cli/v2"

	"helios/dataset"
)

func init() {
	importFormats = append(importFormats, importFormat{
		name:  "dgl",
		usage: "a graph that dgl.save_graphs wrote, with one type of nodes and edges",
		description: "--in is the .bin file, or a folder with one, whose graph has the node data feat and label and, where the splits are\n" +
			"given, train_mask, val_mask and test_mask.",
		flags: []cli.Flag{
			fnDim(),
			mapFlag(),
			&cli.StringFlag{Name: "graph", DefaultText: "the only one", Usage: "`NUMBER` of the graph, from 0, where the file holds several"},
		},
		run: dataset.ImportDGL,
		options: func(e *env, o *dataset.ImportOptions) error {
			o.Format.Graph = e.c.String("graph")
			return checkFnDim(e)
		},
	})
}
