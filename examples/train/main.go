// Command train trains GraphSAGE on a dataset whose features lie on SSDs, and prints each epoch:
// what "heliosctl train" does, in a program of your own.
//
//	heliosctl generate --nodes 20000 --dim 64 --out g
//	heliosctl bind-ssds --proxy a.img,b.img --size 64MiB
//	heliosctl load g
//	go run ./examples/train g a.img b.img
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"helios/cuda"
	"helios/dataset"
	"helios/gpuio"
	"helios/nvme"
	"helios/nvme/proxy"
	"helios/sched"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
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
	data, err := dataset.Open(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	dev, err := cuda.NewHost(cuda.HostOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	in := prepare.Inputs{Dev: dev, Dataset: data}
	for _, f := range files {
		bus, err := proxy.Open(proxy.Config{Path: f})
		if err != nil {
			return err
		}
		ctrl, err := nvme.Open(ctx, bus, nvme.Options{})
		if err != nil {
			return errors.Join(err, bus.Close())
		}
		defer func() { err = errors.Join(err, ctrl.Close(ctx)) }()
		in.SSDs = append(in.SSDs, &gpuio.SSD{Ctrl: ctrl, Name: f, BackingPath: f})
	}
	cfg := plan.Config{Mode: plan.ModeHelios, Fanouts: []int{10, 5}, Epochs: 2, Seed: 1}
	result, err := sched.Train(ctx, cfg, in, report.Observer{Epoch: func(e report.EpochResult) {
		fmt.Fprintf(out, "epoch %d: loss %.4f, %d rows from SSDs\n", e.Epoch, e.Loss, e.RowsSSD)
	}})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "test accuracy %.1f %%\n", 100**result.TestAcc)
	return nil
}
