package main

import (
	"github.com/urfave/cli/v2"

	"helios/dataset"
)

func init() {
	importFormats = append(importFormats, importFormat{
		name:  "webgraph",
		usage: "graphs in WebGraph's BV format: NAME.graph, NAME.properties, NAME.offsets",
		description: "--in is NAME.graph (or NAME). An arc u → v becomes the edge u → v. Where NAME.offsets is there, parts of\n" +
			"the stream are read at the same time. Features, labels and splits come from --features, --labels and --splits.",
		flags: []cli.Flag{madeUpDim()},
		run:   dataset.ImportWebGraph,
	})
}

// madeUpDim is the flag of formats that have no features.
func madeUpDim() cli.Flag {
	return &cli.IntFlag{Name: "dim", DefaultText: "64", Usage: "features to make up where --features gives none"}
}
