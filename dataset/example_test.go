package dataset_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"helios/dataset"
	"helios/dataset/build"
)

// A dataset is a folder: package build and the importers write it, Open reads it.
func ExampleOpen() {
	root, err := os.MkdirTemp("", "helios-example-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(root) //nolint:errcheck // a temporary folder
	dir := filepath.Join(root, "g")
	err = build.Generate(context.Background(), build.GenerateOptions{
		Kind: "sbm", Nodes: 100, AvgDegree: 6, Classes: 4, Dim: 8, Seed: 1, Out: dir,
	})
	if err != nil {
		log.Fatal(err)
	}

	d, err := dataset.Open(dir)
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close() //nolint:errcheck // only read
	labels, err := d.Labels()
	if err != nil {
		log.Fatal(err)
	}
	row := make([]float32, d.Meta.Dim)
	if err := d.Rows(7, row); err != nil {
		log.Fatal(err)
	}
	fmt.Println(d.Meta.Nodes, "nodes of", d.Meta.Classes, "classes")
	fmt.Println(len(labels), "labels; the row of node 7 has", len(row), "features")
	// Output:
	// 100 nodes of 4 classes
	// 100 labels; the row of node 7 has 8 features
}
