// Command train trains GraphSAGE on a dataset whose features lie on SSDs, prints each epoch and
// classifies a node, as "heliosctl train" and "heliosctl predict" do, in a program of your own.
//
//	heliosctl generate --nodes 20000 --dim 64 --out g
//	go run ./examples/train g a.img b.img
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
		log.Fatal("usage: train DATASET SSD-FILE...")
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
	o := helios.TrainOptions{Config: helios.Config{Fanouts: []int{10, 5}, Epochs: 2}}
	o.Epoch = func(e helios.EpochResult) {
		fmt.Fprintf(out, "epoch %d: loss %.4f, %d rows from SSDs\n", e.Epoch, e.Loss, e.RowsSSD)
	}
	model, result, err := helios.Train(ctx, data, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, model.Close()) }()
	class, err := model.Predict(ctx, []int64{0})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "test accuracy %.1f %%; node 0 is of class %d\n", 100**result.TestAcc, class[0])
	return nil
}
