package main

import (
	"github.com/urfave/cli/v2"

	"helios/dataset"
)

func init() {
	importFormats = append(importFormats, importFormat{
		name:  "mtx",
		usage: "sparse square matrices in MatrixMarket's coordinate format, plain or .gz",
		description: "Entry (i, j) becomes the edge from node i-1 to node j-1, whatever its value; one triangle of a symmetric,\n" +
			"skew-symmetric or Hermitian matrix stands for both. Features, labels and splits come from --features, --labels and --splits.",
		flags: []cli.Flag{madeUpDim()},
		run:   dataset.ImportMTX,
	})
}
