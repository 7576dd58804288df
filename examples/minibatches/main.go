// Command minibatches samples the mini-batches of one epoch and reads the feature rows of each from
// SSDs. It trains nothing: it shows where a trainer of your own would begin.
//
//	heliosctl generate --nodes 20000 --dim 64 --out g
//	go run ./examples/minibatches g a.img b.img
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"helios"
)

func main() {
	if len(os.Args) < 3 {
		log.Fatal("usage: minibatches DATASET SSD-FILE...")
	}
	if err := run(context.Background(), os.Stdout, os.Args[1], os.Args[2:]); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, out io.Writer, dir string, files []string) (err error) {
	if err := helios.Load(ctx, dir, files...); err != nil { // the first time only
		return err
	}
	data, err := helios.Open(dir, files...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	o := helios.BatchOptions{Config: helios.Config{Fanouts: []int{10, 5}, Batch: 1024}}
	for batch, err := range data.Batches(ctx, o) {
		if err != nil {
			return err
		}
		// Row i of batch.Features belongs to node i of batch.Nodes; batch.Blocks has the edges.
		fmt.Fprintf(out, "batch %d: %d seeds, %d nodes, %d features each\n", batch.Index,
			batch.Seeds, len(batch.Nodes), data.Dim())
	}
	return nil
}
