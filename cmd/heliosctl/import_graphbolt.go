package main

import (
	"github.com/urfave/cli/v2"

	"helios/dataset"
)

func init() {
	importFormats = append(importFormats, importFormat{
		name:  "graphbolt",
		usage: "an OnDiskDataset of DGL's GraphBolt with one type of nodes and edges",
		description: "--in is the folder with metadata.yaml and the files that it names: edges as CSV or NumPy, features and the sets of\n" +
			"a task (seeds and labels) as NumPy; a preprocessed graph and torch files can be read by PyTorch only.",
		flags: []cli.Flag{
			fnDim(),
			&cli.BoolFlag{Name: "allow-outside", Usage: "read files that metadata.yaml names outside its folder"},
			&cli.StringFlag{Name: "task", DefaultText: "the only one", Usage: "`NAME` of the task whose sets are taken"},
			&cli.StringFlag{Name: "feature", DefaultText: "feat, or the only one", Usage: "`NAME` of the node feature_data to take"},
		},
		run: dataset.ImportGraphBolt,
		options: func(e *env, o *dataset.ImportOptions) error {
			o.Format.Task, o.Format.Feature = e.c.String("task"), e.c.String("feature")
			return checkFnDim(e)
		},
	})
}
