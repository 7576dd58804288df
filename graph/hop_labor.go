package graph

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/units"
)

// laborHopper samples by variates of the sources (labor.go), with the kernels of a GPU on all
// devices, to the same bits: those of neighbour sampling, but for the two that draw.
type laborHopper struct {
	deviceHopper
	kCount, kFill cuda.Kernel
	phase         uint64
	limits        cuda.Buffer
	lists         *farLists // of a topology on storage
	// whose first frontier nodes have their lists there, and how many
	listed   *MiniBatch
	listedTo int64
}

const laborPurpose = "sampler limits"

func newLaborHopper(c sampling) (*laborHopper, error) {
	d, err := newDeviceHopper(c)
	if err != nil {
		return nil, err
	}
	s := &laborHopper{deviceHopper: *d,
		phase: pair(philox.Key(c.cfg.Seed, philox.StreamPhase))}
	err = s.findKernels(kernelName{&s.kCount, "labor_count"}, kernelName{&s.kFill, "labor_fill"})
	if err == nil && c.topo.Host.OnStorage() {
		if s.lists, err = newFarLists(c.topo.Host); err == nil {
			s.indices = s.lists.ptr()
		}
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func pair(k [2]uint32) uint64 { return uint64(k[1])<<32 | uint64(k[0]) }

func (s *laborHopper) close() error {
	err := errors.Join(s.deviceHopper.close(), free(&s.limits))
	if s.lists != nil {
		err = errors.Join(err, s.lists.close())
	}
	return err
}

func (s *laborHopper) forget() {
	s.deviceHopper.forget()
	s.listed = nil
}

func (s *laborHopper) begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	seeds []int64) error {
	s.listed = nil
	return s.deviceHopper.begin(ctx, stream, mb, seeds)
}

// stage brings the lists of the first n frontier nodes in from storage. Those of the hop before are
// there unless another mini-batch came in between.
func (s *laborHopper) stage(ctx context.Context, mb *MiniBatch, n int64) error {
	if s.lists == nil {
		return nil
	}
	from := s.listedTo
	if s.listed != mb {
		if err := s.lists.drop(); err != nil {
			return err
		}
		from = 0
	}
	s.listed = nil
	nodes := view[int64](mb.Nodes, n)[from:]
	var bytes int64 // in whole pages, of which neighbours' lists may share some
	page := int64(os.Getpagesize())
	for _, v := range nodes {
		bytes += (4*s.topo.Host.InDegree(v) + page - 1) &^ (page - 1)
	}
	bytes = min(bytes, 4*s.topo.Host.NumEdges+page)
	if bytes >= layerCheck {
		if left, err := availableBytes(); err == nil && bytes > left {
			return errs.New(errs.Usage,
				"sampler %s reads the whole lists of a hop's nodes: those of %d nodes take %s, and %s of memory are free; lower %v or %v, or give %v %s",
				Labor, len(nodes), units.FormatBytes(bytes), units.FormatBytes(left),
				errs.Key("batch-size"), errs.Key("fanout"), errs.Key("sampler"), Neighbor)
		}
	}
	if err := s.lists.stage(ctx, nodes); err != nil {
		return err
	}
	s.listed, s.listedTo = mb, n
	return nil
}

// keyOf is the key of the variates of a hop.
func (s *laborHopper) keyOf(key [2]uint32, mb *MiniBatch, hop int) uint64 {
	w := philox.Block(key, [4]uint32{uint32(hop), uint32(mb.Epoch), 0, 0})
	return pair([2]uint32{w[0], w[1]})
}

func (s *laborHopper) launchLabor(stream cuda.Stream, k cuda.Kernel, p *laborParams,
	n int64) error {
	return cuda.Launch(stream, k, cuda.LaunchConfig{Blocks: int(s.grid(n)), Threads: threads}, *p)
}

func (s *laborHopper) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	n := mb.HopEnd[hop]
	mb.Blocks = mb.Blocks[:hop+1] // keeps the buffers of the last batch
	b := &mb.Blocks[hop]
	if err := mb.grow(stream, &b.Indptr, cuda.MemDevice, (n+1)*8, 0, "block offsets"); err != nil {
		return err
	}
	if s.limits == nil || s.limits.Size() < n*8 { // hops wait for their kernels: nobody uses it
		if err := free(&s.limits); err != nil {
			return err
		}
		var err error
		if s.limits, err = s.dev.Alloc(cuda.MemDevice, (n*10+4095)&^4095,
			laborPurpose); err != nil {
			return fmt.Errorf("sampling of %d nodes: %w", n, err)
		}
	}
	if err := s.stage(ctx, mb, n); err != nil {
		return err
	}
	q := laborParams{Sample: s.params(mb, n), Limits: s.limits.Ptr(),
		Keys:  [2]uint64{s.keyOf(mb.key, mb, hop), s.keyOf(mb.nextKey, mb, hop)},
		Phase: s.phase, Span: uint32(max(s.cfg.Dependency, 1)), Turn: mb.turn}
	p := &q.Sample
	p.EdgeStart, p.Fanout = b.Indptr.Ptr(), int64(s.cfg.Fanouts[hop])
	p.Epoch, p.Hop = uint32(mb.Epoch), uint32(hop)
	if err := s.launchLabor(stream, s.kCount, &q, n); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	edges := s.sum(mb, n)
	if n+edges > math.MaxUint32 {
		return errs.New(errs.Usage,
			"%d nodes with %d sampled edges pass the limit of 2^32: lower the batch size or the fanouts",
			n, edges)
	}
	if err := mb.grow(stream, &b.Src, cuda.MemDevice, max(edges, 1)*4, 0,
		"block sources"); err != nil {
		return err
	}
	if !s.direct && 3*s.slots/4 < n+edges {
		if err := s.growHash(n + edges); err != nil {
			return err
		}
		s.owner = nil
	}
	if s.owner != mb {
		if err := s.own(stream, mb, n); err != nil {
			return err
		}
	}
	p.enterTable(s.params(mb, n))
	p.Src, p.SrcLen = b.Src.Ptr(), b.Src.Size()/4
	if err := s.launchLabor(stream, s.kFill, &q, n); err != nil {
		return err
	}
	return s.number(ctx, stream, mb, p, edges)
}
