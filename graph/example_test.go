package graph_test

import (
	"context"
	"fmt"
	"log"

	"helios/cuda"
	"helios/graph"
)

// A mini-batch of one seed with all its neighbours, two hops deep.
func ExampleSampler() {
	ctx := context.Background()
	// 1 → 0, 2 → 0, 3 → 2, 4 → 2, 0 → 5
	topology, err := graph.FromEdges(6, []int64{1, 2, 3, 4, 0}, []int64{0, 0, 2, 2, 5}, false)
	if err != nil {
		log.Fatal(err)
	}
	defer topology.Close() //nolint:errcheck // an example
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close() //nolint:errcheck // an example
	stream, err := dev.NewStream(cuda.StreamOptions{Name: "sample"})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close() //nolint:errcheck // an example
	attached, err := graph.Attach(dev, topology)
	if err != nil {
		log.Fatal(err)
	}
	defer attached.Close() //nolint:errcheck // an example
	sampler, err := graph.NewSampler(dev, attached, graph.SamplerConfig{Fanouts: []int{-1, -1},
		Seed: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer sampler.Close() //nolint:errcheck // an example
	batch, err := sampler.NewMiniBatch()
	if err != nil {
		log.Fatal(err)
	}
	defer batch.Close() //nolint:errcheck // an example

	if err := sampler.Begin(ctx, stream, batch, 0, 0, []int64{0}); err != nil {
		log.Fatal(err)
	}
	for hop := range 2 {
		if err := sampler.Hop(ctx, stream, batch, hop); err != nil {
			log.Fatal(err)
		}
		b := batch.Blocks[hop]
		nodes := cuda.View[int64](batch.Nodes.Ptr(), batch.HopEnd[hop+1])
		fmt.Printf("hop %d: %d edges into %d nodes, frontier %v\n", hop+1, b.NumEdges,
			b.NumDst, nodes)
	}
	// Output:
	// hop 1: 2 edges into 1 nodes, frontier [0 1 2]
	// hop 2: 4 edges into 3 nodes, frontier [0 1 2 3 4]
}
