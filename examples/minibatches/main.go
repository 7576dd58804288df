// Command minibatches samples the mini-batches of one epoch and reads the feature rows of each from
// SSDs, with the packages that "heliosctl train" is made of. It trains nothing: it shows where a
// trainer of your own would begin.
//
//	heliosctl generate --nodes 20000 --dim 64 --out g
//	heliosctl bind-ssds --proxy a.img,b.img --size 64MiB
//	heliosctl load g
//	go run ./examples/minibatches g a.img b.img
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"helios/cache"
	"helios/cuda"
	"helios/dataset"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/graph"
	"helios/nvme"
	"helios/nvme/proxy"
)

const (
	batchSize = 1024
	seed      = 1
)

var fanouts = []int{10, 5} // neighbours of each node, the seeds' first

func main() {
	if len(os.Args) < 3 {
		log.Fatal("usage: minibatches DATASET SSD-FILE...")
	}
	if err := run(context.Background(), os.Stdout, os.Args[1], os.Args[2:]); err != nil {
		log.Fatal(err)
	}
}

// openSSD puts a software controller over a file. A real SSD has a vfiobus.Bus in the proxy's
// place; everything above the bus is the same.
func openSSD(ctx context.Context, path string) (*gpuio.SSD, error) {
	bus, err := proxy.Open(proxy.Config{Path: path})
	if err != nil {
		return nil, err
	}
	ctrl, err := nvme.Open(ctx, bus, nvme.Options{})
	if err != nil {
		return nil, errors.Join(err, bus.Close())
	}
	return &gpuio.SSD{Ctrl: ctrl, Name: path, BackingPath: path}, nil
}

func run(ctx context.Context, out io.Writer, dir string, files []string) (err error) {
	// Nothing here belongs to Go's garbage collector, so all of it is closed, the last first.
	var opened []func() error
	later := func(c func() error) { opened = append(opened, c) }
	defer func() {
		for i := len(opened) - 1; i >= 0; i-- {
			err = errors.Join(err, opened[i]())
		}
	}()

	data, err := dataset.Open(dir)
	if err != nil {
		return err
	}
	later(data.Close)
	var ssds []*gpuio.SSD
	for _, f := range files {
		ssd, err := openSSD(ctx, f)
		if err != nil {
			return err
		}
		later(func() error { return ssd.Ctrl.Close(ctx) })
		ssds = append(ssds, ssd)
	}
	// The superblocks say which stripe each SSD holds, so the order of files does not matter.
	layout, ssds, err := stripe.Attach(ctx, data, ssds)
	if err != nil {
		return err
	}

	dev, err := cuda.NewHost(cuda.HostOptions{}) // or driver.Open, for a GPU
	if err != nil {
		return err
	}
	later(dev.Close)
	stream, err := dev.NewStream(cuda.StreamOptions{Name: "batches"})
	if err != nil {
		return err
	}
	later(stream.Close)
	topology, err := data.Topology()
	if err != nil {
		return err
	}
	later(topology.Close)
	attached, err := graph.Attach(dev, topology)
	if err != nil {
		return err
	}
	later(attached.Close)
	sampler, err := graph.NewSampler(dev, attached, graph.SamplerConfig{Fanouts: fanouts,
		Seed: seed})
	if err != nil {
		return err
	}
	later(sampler.Close)
	batch, err := sampler.NewMiniBatch()
	if err != nil {
		return err
	}
	later(batch.Close)
	// An empty placement caches no row: each lookup then sorts rows by the SSD that has them.
	rowBytes := int64(layout.RowBytes)
	tiers, err := cache.NewHetero(dev, layout.Rows, rowBytes, len(ssds), cache.Placement{})
	if err != nil {
		return err
	}
	later(tiers.Close)
	buckets, err := tiers.NewBuckets()
	if err != nil {
		return err
	}
	later(buckets.Close)
	reader, err := gpuio.NewAsync(dev, ssds, layout, gpuio.AsyncOptions{})
	if err != nil {
		return err
	}
	later(func() error { return reader.Close(ctx) })

	train, err := data.Split("train")
	if err != nil {
		return err
	}
	order := make([]int64, len(train))
	graph.Shuffle(order, train, seed, 0)
	for index := 0; len(order) > 0; index++ {
		seeds := order[:min(batchSize, len(order))]
		order = order[len(seeds):]
		if err := sampler.Begin(ctx, stream, batch, 0, index, seeds); err != nil {
			return err
		}
		for hop := range fanouts {
			if err := sampler.Hop(ctx, stream, batch, hop); err != nil {
				return err
			}
		}
		nodes := batch.HopEnd[len(fanouts)]
		if err := tiers.Lookup(ctx, stream, batch.Nodes.Ptr(), 0, nodes, buckets); err != nil {
			return err
		}
		rows, err := dev.Alloc(cuda.MemDevice, nodes*rowBytes, "features of a mini-batch")
		if err != nil {
			return err
		}
		pending, err := reader.Submit(ctx, &gpuio.ReadSet{
			Rows: buckets.MissRow.Ptr(), Pos: buckets.MissPos.Ptr(), SSDOffset: buckets.SSDOffset,
			Dst: rows, DstStride: rowBytes,
		})
		if err != nil {
			return errors.Join(err, rows.Free())
		}
		stats, err := pending.Wait(ctx)
		// Row i of rows now belongs to node i of batch.Nodes; batch.Blocks has the edges.
		if err = errors.Join(err, rows.Free()); err != nil {
			return err
		}
		fmt.Fprintf(out, "batch %d: %d seeds, %d nodes, %d read commands\n", index, len(seeds),
			nodes, stats.Commands)
	}
	return nil
}
