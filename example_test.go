package helios_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"helios"
	"helios/dataset/build"
)

// Mini-batches of a dataset whose features do not fit in memory: each has its nodes, their features
// read from the SSDs, and the edges of each hop.
func ExampleDataset_Batches() {
	data, done := loaded()
	defer done()
	o := helios.BatchOptions{Config: helios.Config{Fanouts: []int{10, 5}, Batch: 1024}}
	for batch, err := range data.Batches(context.Background(), o) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("batch", batch.Index, "has", batch.Seeds, "seeds,", len(batch.Nodes), "nodes,",
			len(batch.Features)/data.Dim(), "rows and", len(batch.Blocks), "blocks")
	}
	// Output:
	// batch 0 has 1024 seeds, 2922 nodes, 2922 rows and 2 blocks
	// batch 1 has 740 seeds, 2869 nodes, 2869 rows and 2 blocks
}

// A model from the same dataset, and what it says of three nodes.
func ExampleTrain() {
	data, done := loaded()
	defer done()
	ctx := context.Background()
	model, result, err := helios.Train(ctx, data, helios.TrainOptions{
		Config: helios.Config{Fanouts: []int{10, 5}, Epochs: 6, LR: 0.01,
			ModelSettings: helios.ModelSettings{Hidden: 32}}})
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	classes, err := model.Predict(ctx, []int64{0, 1, 2})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("epochs:", len(result.Epochs), "predictions:", len(classes))
	fmt.Println("more than 80 % right:", *result.TestAcc > 0.8)
	// Output:
	// epochs: 6 predictions: 3
	// more than 80 % right: true
}

// loaded makes a small graph, lays its features out on two files that play SSDs and opens it.
func loaded() (data *helios.Dataset, done func()) {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "helios-example-")
	if err != nil {
		log.Fatal(err)
	}
	graph, a, b := filepath.Join(dir, "g"), filepath.Join(dir, "a.img"), filepath.Join(dir, "b.img")
	if err := build.Generate(ctx, build.GenerateOptions{Kind: "sbm", Nodes: 3000, AvgDegree: 8,
		Classes: 4, Dim: 16, Seed: 1, Out: graph}); err != nil {
		log.Fatal(err)
	}
	if err := helios.Load(ctx, graph, a, b); err != nil {
		log.Fatal(err)
	}
	if data, err = helios.Open(graph, a, b); err != nil {
		log.Fatal(err)
	}
	return data, func() { fmt.Print(errorsOf(data.Close(), os.RemoveAll(dir))) }
}

// errorsOf is the text of the errors; Output then shows them.
func errorsOf(all ...error) (text string) {
	for _, err := range all {
		if err != nil {
			text += err.Error() + "\n"
		}
	}
	return text
}
