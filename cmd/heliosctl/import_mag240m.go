package main

import (
	"github.com/urfave/cli/v2"

	"helios/dataset"
)

func init() {
	importFormats = append(importFormats, importFormat{
		name:  "mag240m",
		usage: "the papers and citations of MAG240M (OGB-LSC)",
		description: "--in is the folder that OGB unpacks (mag240m_kddcup2021): processed/paper with node_feat.npy, node_label.npy and\n" +
			"node_year.npy, and processed/paper___cites___paper/edge_index.npy. Labelled papers until 2018 are for\n" +
			"training, those of 2019 for validation and those of 2020 for the test, as the dataset defines it.",
		flags:   []cli.Flag{fnDim()},
		options: func(e *env, _ *dataset.ImportOptions) error { return checkFnDim(e) },
		run:     dataset.ImportMAG240M,
	})
}
