package main

import (
	"strings"

	"github.com/urfave/cli/v2"

	"helios/dataset"
)

func init() {
	importFormats = append(importFormats, importFormat{
		name:  "raw",
		usage: "folders of headerless arrays, as Ginex, DiskGNN, Legion and GNNLab keep them",
		description: "--in is the folder with indptr, indices, features and labels and the project's own configuration (conf.json,\n" +
			"meta.txt, meta_config). All lengths are checked against the numbers of nodes, edges and features; what they leave open is asked for.",
		flags: []cli.Flag{
			&cli.StringFlag{Name: "layout", DefaultText: "told by the files", Usage: "whose files these are: " + strings.Join(dataset.RawLayouts, ", ")},
			&cli.StringFlag{Name: "indptr", Usage: "`FILE` of offsets, where it is not found in --in"},
			&cli.StringFlag{Name: "indices", Usage: "`FILE` of neighbours, where it is not found in --in"},
			&cli.StringFlag{Name: "lists", DefaultText: "out for legion, else in", Usage: "what a node's list holds: in (in-neighbours, CSC) or out (out-neighbours, CSR)"},
			&cli.Int64Flag{Name: "edges", DefaultText: "found in the input", Usage: "number of edges"},
			&cli.IntFlag{Name: "dim", DefaultText: "found in the input", Usage: "features per node; of made-up ones where there are none (64)"},
			&cli.StringFlag{Name: "index-dtype", DefaultText: "told by the length", Usage: "type of indptr and indices: int32, uint32 or int64"},
			&cli.StringFlag{Name: "raw-dtype", DefaultText: "told by the length", Usage: "type of the features in the file: float16, float32 or float64"},
			&cli.StringFlag{Name: "label-dtype", DefaultText: "the layout's", Usage: "type of the labels: int32, int64, float32, …"},
		},
		options: func(e *env, o *dataset.ImportOptions) error {
			c := e.c
			o.Format.Raw = dataset.RawOptions{
				Layout: c.String("layout"), Indptr: c.String("indptr"), Indices: c.String("indices"), Lists: c.String("lists"), Edges: c.Int64("edges"), Dim: c.Int("dim"),
				IndexDType: c.String("index-dtype"), FeatureDType: c.String("raw-dtype"), LabelDType: c.String("label-dtype"),
			}
			return e.notZero("edges")
		},
		run: dataset.ImportRaw,
	})
}
