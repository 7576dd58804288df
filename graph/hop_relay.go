package graph

import (
	"context"
	"errors"

	"helios/cuda"
)

// On a GPU a topology on storage is sampled by a host device of its own, as Ginex samples on the
// CPU: its draws decide the reads, which come to the CPU's memory. Frontier and blocks are copied
// to the GPU hop by hop.

// relay is the hopper of a GPU whose topology is on storage.
type relay struct {
	key     [2]uint32 // of shared draws
	sampler *Sampler
	stream  cuda.Stream
	stage   Stage
	dev     cuda.Device
}

func newRelay(c sampling, key [2]uint32) (*relay, error) {
	r := &relay{dev: c.dev, key: key}
	var err error
	if r.sampler, err = newSampler(c.topo.inner.dev, c.topo.inner.topo, c.cfg,
		c.directLimit); err != nil {
		return nil, err
	}
	if r.stream, err = c.topo.inner.dev.NewStream(cuda.StreamOptions{
		Name: "sample on the CPU"}); err != nil {
		return nil, errors.Join(err, r.sampler.Close())
	}
	return r, nil
}

func (r *relay) prepare(mb *MiniBatch) error {
	// A sampler over another topology, which the device samples itself, may draw into mb too.
	err := (&sampling{dev: r.dev}).prepare(mb)
	if err == nil {
		mb.inner, err = r.sampler.NewMiniBatch()
	}
	return err
}

// forget does nothing: the sampler that draws has heard of its own failures.
func (r *relay) forget() {}

func (r *relay) close() error {
	return errors.Join(r.stream.Close(), r.sampler.Close(), r.stage.Close())
}

func (r *relay) begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch, seeds []int64) error {
	index := mb.Index
	if mb.key == r.key {
		index = SharedDraws(index)
	}
	if err := r.sampler.Begin(ctx, r.stream, mb.inner, mb.Epoch, index, seeds); err != nil {
		return err
	}
	mb.TypeEnd = mb.inner.TypeEnd
	return r.upload(ctx, stream, mb, nil, 0, mb.inner.HopEnd[0])
}

func (r *relay) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	if err := r.sampler.Hop(ctx, r.stream, mb.inner, hop); err != nil {
		return err
	}
	mb.Blocks = mb.Blocks[:hop+1] // keeps the buffers of the last batch
	from := &mb.inner.Blocks[hop]
	if err := r.upload(ctx, stream, mb, from, mb.HopEnd[hop], mb.inner.HopEnd[hop+1]); err != nil {
		return err
	}
	b := &mb.Blocks[hop]
	b.NumDst, b.NumSrc, b.NumEdges, b.Lists = from.NumDst, from.NumSrc, from.NumEdges, from.Lists
	mb.TypeEnd = mb.inner.TypeEnd
	mb.HopEnd = append(mb.HopEnd, b.NumSrc)
	return nil
}

// upload copies frontier nodes lo to hi-1 with what is asked for of them, and a block.
func (r *relay) upload(ctx context.Context, stream cuda.Stream, mb *MiniBatch, from *Block, lo,
	hi int64) error {
	of := func(b cuda.Buffer, lo, hi int64) []byte {
		if hi == lo {
			return nil
		}
		return b.Bytes()[lo:hi]
	}
	list := []piece{{to: &mb.Nodes, data: of(mb.inner.Nodes, lo*8, hi*8), offset: lo * 8,
		purpose: "frontier"}}
	if r.sampler.cfg.Degrees {
		list = append(list, piece{to: &mb.Degrees, data: of(mb.inner.Degrees, lo*4, hi*4),
			offset: lo * 4, purpose: "frontier degrees"})
	}
	if from != nil {
		b := &mb.Blocks[len(mb.Blocks)-1]
		list = append(list,
			piece{to: &b.Indptr, data: of(from.Indptr, 0, (from.NumLists()+1)*8),
				purpose: "block offsets"},
			piece{to: &b.Src, data: of(from.Src, 0, from.NumEdges*4), purpose: "block sources"})
		if from.Weights != nil {
			list = append(list, piece{to: &b.Weights, data: of(from.Weights, 0, from.NumSrc*4),
				purpose: "block weights"})
		}
	}
	return mb.upload(ctx, stream, &r.stage, list)
}
