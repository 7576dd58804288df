package graph

import (
	"context"
	"errors"

	"helios/cuda"
	"helios/internal/errs"
)

// On a GPU a topology on storage is sampled by a host device of its own, as Ginex samples on the
// CPU: its draws decide what is read, and what is read comes to the CPU's memory. What a GPU needs
// of a mini-batch, frontier and blocks, is copied there hop by hop.

// relay is the hopper of a GPU whose topology is on storage.
type relay struct {
	key     [2]uint32 // of shared draws
	sampler *Sampler
	stream  cuda.Stream
	stage   cuda.Buffer // pinned: what is on its way to the GPU
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
	var err error
	mb.inner, err = r.sampler.NewMiniBatch()
	return err
}

// forget does nothing: the sampler that draws has heard of its own failures.
func (r *relay) forget() {}

func (r *relay) close() error {
	return errors.Join(r.stream.Close(), r.sampler.Close(), free(&r.stage))
}

func (r *relay) begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch, seeds []int64) error {
	index := mb.Index
	if mb.key == r.key {
		index = SharedDraws(index)
	}
	if err := r.sampler.Begin(ctx, r.stream, mb.inner, mb.Epoch, index, seeds); err != nil {
		return err
	}
	return r.upload(ctx, stream, mb, nil, 0, int64(len(seeds)))
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
	b.NumDst, b.NumSrc, b.NumEdges = from.NumDst, from.NumSrc, from.NumEdges
	mb.HopEnd = append(mb.HopEnd, b.NumSrc)
	return nil
}

// upload copies frontier nodes lo to hi-1 with what is asked for of them, and a block.
func (r *relay) upload(ctx context.Context, stream cuda.Stream, mb *MiniBatch, from *Block, lo,
	hi int64) error {
	type piece struct {
		to      *cuda.Buffer
		data    []byte
		at      int64 // in to
		purpose string
	}
	of := func(b cuda.Buffer, lo, hi int64) []byte {
		if hi == lo {
			return nil
		}
		return b.Bytes()[lo:hi]
	}
	list := []piece{{&mb.Nodes, of(mb.inner.Nodes, lo*8, hi*8), lo * 8, "frontier"}}
	if r.sampler.cfg.Degrees {
		list = append(list, piece{&mb.Degrees, of(mb.inner.Degrees, lo*4, hi*4), lo * 4,
			"frontier degrees"})
	}
	if from != nil {
		b := &mb.Blocks[len(mb.Blocks)-1]
		list = append(list,
			piece{&b.Indptr, of(from.Indptr, 0, (from.NumDst+1)*8), 0, "block offsets"},
			piece{&b.Src, of(from.Src, 0, from.NumEdges*4), 0, "block sources"})
		if from.Weights != nil {
			list = append(list, piece{&b.Weights, of(from.Weights, 0, from.NumSrc*4), 0,
				"block weights"})
		}
	}
	total := int64(0)
	for _, p := range list {
		total += (int64(len(p.data)) + 15) &^ 15
		// Also for nothing at all: kernels are given the address.
		if err := mb.grow(stream, p.to, cuda.MemDevice, max(p.at+int64(len(p.data)), 16), p.at,
			p.purpose); err != nil {
			return err
		}
	}
	if r.stage == nil || r.stage.Size() < total {
		if err := free(&r.stage); err != nil {
			return err
		}
		var err error
		if r.stage, err = r.dev.Alloc(cuda.MemPinned, total+total/4+4096,
			"blocks on their way to the device"); err != nil {
			return err
		}
	}
	mem := r.stage.Bytes()
	if mem == nil {
		return errs.New(errs.Capability,
			"topology on storage: pinned memory of %s can't be written by the CPU; keep the topology in memory (%v)",
			r.dev.Info().Name, errs.Key("topology"))
	}
	at := 0
	for _, p := range list {
		if len(p.data) == 0 {
			continue
		}
		copy(mem[at:], p.data)
		if err := stream.Copy((*p.to).Ptr()+cuda.DevicePtr(p.at), r.stage.Ptr()+cuda.DevicePtr(at),
			int64(len(p.data))); err != nil {
			return err
		}
		at += (len(p.data) + 15) &^ 15
	}
	return stream.Synchronize(ctx)
}
