package graph

import (
	"context"
	"math"
	"math/bits"

	"helios/cuda"
	"helios/internal/errs"
)

// deviceHopper samples neighbours with the kernels of a GPU (kernels.go), five launches a hop.
// Those that layer-wise sampling shares serve it on every device.
type deviceHopper struct {
	sampling
	positions
	blocks  int            // grid of the largest launches
	grain   int64          // items that make another block worth its launch
	indices cuda.DevicePtr // ids of the in-neighbour lists

	kBegin, kCount, kFill, kUniqueCount, kAssign, kRelabel cuda.Kernel
}

func newDeviceHopper(c sampling) (*deviceHopper, error) {
	s := &deviceHopper{sampling: c, blocks: c.gridLimit(), grain: threads}
	// a device with a mind of its own
	if g, ok := c.dev.(interface{ Grain(usual int64) int64 }); ok {
		s.grain = max(g.Grain(s.grain), 1)
	}
	if c.topo.indices != nil {
		s.indices = c.topo.indices.Ptr()
	}
	err := s.findKernels(
		kernelName{&s.kBegin, "sample_begin"}, kernelName{&s.kCount, "sample_count"},
		kernelName{&s.kFill, "sample_fill"},
		kernelName{&s.kUniqueCount, "unique_count"}, kernelName{&s.kAssign, "unique_assign"},
		kernelName{&s.kRelabel, "unique_relabel"},
	)
	if err != nil {
		return nil, err
	}
	if err := s.open(&s.sampling); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *deviceHopper) begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	seeds []int64) error {
	mb.distinct = mb.allDifferent(seeds)
	if err := s.stageSeeds(stream, mb, seeds); err != nil {
		return err
	}
	if err := s.own(stream, mb, int64(len(seeds))); err != nil ||
		s.dev.Info().Backend != "host" { // where hops look at the frontier themselves
		return err
	}
	return stream.Synchronize(ctx)
}

// own makes the table hold the n frontier nodes of mb under a new stamp.
func (s *deviceHopper) own(stream cuda.Stream, mb *MiniBatch, n int64) error {
	s.owner = nil
	if !s.direct && 3*s.slots/4 < n {
		if err := s.growHash(n); err != nil {
			return err
		}
	}
	// Hash keys carry only 16 bits of the stamp. A fresh or worn-out table is all ones, above
	// every stamp in use.
	if s.stamp <= 1 || (!s.direct && s.stamp&0xffff <= 1) {
		for _, b := range []cuda.Buffer{s.vals, s.keys} {
			if b != nil {
				if err := stream.Fill(b.Ptr(), 0xff, b.Size()); err != nil {
					return err
				}
			}
		}
		s.stamp = math.MaxUint32
	}
	s.stamp--
	p := s.params(mb, n)
	if s.cfg.Degrees {
		p.Degrees = mb.Degrees.Ptr()
	}
	if err := s.launch(stream, s.kBegin, &p, n); err != nil {
		return err
	}
	s.owner = mb
	return nil
}

// sum adds the counts up that each launch block over n items left; the kernel is done.
func (s *deviceHopper) sum(mb *MiniBatch, n int64) int64 { return s.sumOf(mb, 0, n) }

// sumOf is sum of the counts of one of several launches.
func (s *deviceHopper) sumOf(mb *MiniBatch, launch, n int64) (total int64) {
	first := launch * int64(s.blocks)
	for _, c := range view[int64](mb.sums, first+s.grid(n))[first:] {
		total += c
	}
	return total
}

// growHash makes room for n distinct nodes at a load of at most 3/4.
func (s *deviceHopper) growHash(n int64) error {
	slots := int64(1) << max(12, bits.Len64(uint64(n+n/3)))
	if slots > 1<<32 {
		return errs.New(errs.Usage,
			"a mini-batch of %d nodes and edges is too large: lower the batch size or the fanouts",
			n)
	}
	s.slots = slots
	return s.alloc(s.dev)
}

func (s *deviceHopper) params(mb *MiniBatch, n int64) sampleParams {
	p := sampleParams{
		Nodes: mb.Nodes.Ptr(), Dst: mb.Nodes.Ptr(), NumDst: n, Frontier: n,
		Sources: s.topo.Host.NumNodes,
		Indices: s.indices, Vals: s.vals.Ptr(), Sums: mb.sums.Ptr(), Totals: mb.totals.Ptr(),
		Key: mb.key, Stamp: s.stamp,
		NumNodes: s.topo.Host.NumNodes, NumEdges: s.topo.Host.NumEdges, Slots: s.slots,
	}
	if s.topo.indptr != nil {
		p.Indptr = s.topo.indptr.Ptr()
	}
	if s.topo.Host.Wide() {
		p.Wide = 1
	}
	if !s.direct {
		p.Keys = s.keys.Ptr()
		p.HashShift = uint32(64 - bits.TrailingZeros64(uint64(s.slots)))
	}
	return p
}

const threads = 256 // of a block on a GPU

// grid returns how many blocks n items get: one item for each thread of a GPU, as far as the limit
// goes. Results do not depend on it, but passes over one Sums must agree on it.
func (s *deviceHopper) grid(n int64) int64 {
	return max(min(int64(s.blocks), (n+s.grain-1)/s.grain), 1)
}

func (s *deviceHopper) launch(stream cuda.Stream, k cuda.Kernel, p *sampleParams, n int64) error {
	return cuda.Launch(stream, k, cuda.LaunchConfig{Blocks: int(s.grid(n)), Threads: threads}, *p)
}

func (s *deviceHopper) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	return s.draw(ctx, stream, mb, hop, deviceDraws{
		draws: mostDraws,
		count: func(p *sampleParams) error { return s.launch(stream, s.kCount, p, p.NumDst) },
		fill:  func(p *sampleParams) error { return s.launch(stream, s.kFill, p, p.NumDst) },
	})
}

// mostDraws bounds the edges of n destinations.
func mostDraws(n, fanout int64) int64 {
	if fanout < 0 || fanout > 0 && n >= math.MaxInt64/2/fanout {
		return math.MaxInt64 / 2
	}
	return n * fanout
}

// deviceDraws has the steps in which samplers on a GPU differ: bounding a hop's edges, counting
// them (EdgeStart and Sums) and drawing them (Src).
type deviceDraws struct {
	draws       func(n, fanout int64) int64
	count, fill func(p *sampleParams) error
}

// draw does a hop.
func (s *deviceHopper) draw(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int,
	d deviceDraws) error {
	n := mb.HopEnd[hop]
	mb.Blocks = mb.Blocks[:hop+1] // keeps the buffers of the last batch
	b := &mb.Blocks[hop]
	if err := mb.grow(stream, &b.Indptr, cuda.MemDevice, (n+1)*8, 0, "block offsets"); err != nil {
		return err
	}
	if s.owner != mb {
		if err := s.own(stream, mb, n); err != nil {
			return err
		}
	}
	p := s.params(mb, n)
	p.EdgeStart, p.Fanout = b.Indptr.Ptr(), int64(s.cfg.Fanouts[hop])
	p.Epoch, p.Hop = uint32(mb.Epoch), uint32(hop)
	if err := d.count(&p); err != nil {
		return err
	}

	// The host needs the number of edges only where their bound does not fit in what is there; in a
	// steady state the kernels run on without it.
	// (NumEdges bounds it too, unless a seed's edges may come several times.)
	edges := d.draws(n, p.Fanout)
	if mb.distinct {
		edges = min(edges, s.topo.Host.NumEdges)
	}
	srcCap := int64(0)
	if b.Src != nil {
		srcCap = b.Src.Size() / 4
	}
	if b.Src == nil || edges > srcCap || n+edges > math.MaxUint32 ||
		(!s.direct && 3*s.slots/4 < n+edges) {
		if err := stream.Synchronize(ctx); err != nil {
			return err
		}
		edges = s.sum(mb, n)
		if n+edges > math.MaxUint32 {
			return tooManyEdges(n, edges)
		}
		if err := mb.grow(stream, &b.Src, cuda.MemDevice, max(edges, 1)*4, 0,
			"block sources"); err != nil {
			return err
		}
		if !s.direct && 3*s.slots/4 < n+edges {
			if err := s.growHash(n + edges); err != nil {
				return err
			}
			if err := s.own(stream, mb, n); err != nil {
				return err
			}
			p.enterTable(s.params(mb, n))
		}
	}
	p.Src, p.SrcLen = b.Src.Ptr(), b.Src.Size()/4
	if err := d.fill(&p); err != nil {
		return err
	}
	if err := s.number(ctx, stream, mb, &p, edges); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	totals := view[int64](mb.totals, 2)
	b.NumDst, b.NumEdges, b.NumSrc = n, totals[0], n+totals[1]
	mb.HopEnd = append(mb.HopEnd, b.NumSrc)
	return nil
}

func tooManyEdges(n, edges int64) error {
	return errs.New(errs.Usage,
		"%d nodes with %d sampled edges pass the limit of 2^32: lower the batch size or the fanouts",
		n, edges)
}

// number enqueues what appends the nodes that are new in the hop to the frontier, and numbers the
// edges' sources. p has the parameters of the kernel that filled Src in, with edges slots at most.
func (s *deviceHopper) number(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	p *sampleParams, edges int64) error {
	n := p.Frontier
	if err := s.launch(stream, s.kUniqueCount, p, edges); err != nil {
		return err
	}

	bound := min(n+edges, max(n, s.topo.Host.NumNodes))
	if !mb.distinct {
		bound = n + min(edges, s.topo.Host.NumNodes)
	}
	if mb.Nodes.Size()/8 < bound || (s.cfg.Degrees && mb.Degrees.Size()/4 < bound) {
		if err := stream.Synchronize(ctx); err != nil {
			return err
		}
		bound = n + s.sum(mb, edges)
		if err := mb.grow(stream, &mb.Nodes, cuda.MemDevice, bound*8, n*8, "frontier"); err != nil {
			return err
		}
		if s.cfg.Degrees {
			if err := mb.grow(stream, &mb.Degrees, cuda.MemDevice, bound*4, n*4,
				"frontier degrees"); err != nil {
				return err
			}
		}
		p.Nodes = mb.Nodes.Ptr()
	}
	p.NodesLen = mb.Nodes.Size() / 8
	if s.cfg.Degrees {
		p.Degrees = mb.Degrees.Ptr()
		p.NodesLen = min(p.NodesLen, mb.Degrees.Size()/4)
	}
	if err := s.launch(stream, s.kAssign, p, edges); err != nil {
		return err
	}
	return s.launch(stream, s.kRelabel, p, edges)
}
