package graph

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/philox"
	"helios/internal/units"
)

// layerHopper samples by layer (ladies.go), with the kernels of a GPU on all devices, to the same
// bits; on the host device one kernel takes the place of three (ladies_host.go).
type layerHopper struct {
	deviceHopper
	layers layerScratch
	lists  *farLists // of a topology on storage
}

// layerScratch is the kernels of layer-wise sampling and their memory for one hop at a time.
type layerScratch struct {
	kWeigh, kRank, kHist, kPick, kCount, kAssign, kRelabel cuda.Kernel
	// in the place of kWeigh, on the host
	kEnter cuda.Kernel

	start, slots, pos, mass, rank, hist, state, news, table cuda.Buffer
}

func (l *layerScratch) buffers() []*cuda.Buffer {
	return []*cuda.Buffer{&l.start, &l.slots, &l.pos, &l.mass, &l.rank, &l.hist, &l.state, &l.news,
		&l.table}
}

func newLayerHopper(c sampling) (*layerHopper, error) {
	d, err := newDeviceHopper(c)
	if err != nil {
		return nil, err
	}
	s := &layerHopper{deviceHopper: *d}
	l := &s.layers
	first := kernelName{&l.kWeigh, "layer_weigh"}
	if s.hostLayers() {
		first = kernelName{&l.kEnter, "host_layer_enter"}
	}
	err = s.findKernels(
		first, kernelName{&l.kRank, "layer_rank"}, kernelName{&l.kHist, "layer_hist"},
		kernelName{&l.kPick, "layer_pick"},
		kernelName{&l.kCount, "layer_count"}, kernelName{&l.kAssign, "layer_assign"},
		kernelName{&l.kRelabel, "layer_relabel"})
	for _, b := range []struct {
		dst  *cuda.Buffer
		size int64
	}{{&l.hist, 4 * layerBins}, {&l.state, int64(unsafe.Sizeof(layerState{}))},
		{&l.news, 8 * int64(s.blocks)}} {
		if err != nil {
			break
		}
		if *b.dst, err = s.dev.Alloc(cuda.MemDevice, b.size, layerPurpose); err != nil {
			err = fmt.Errorf("sampler: %w", err)
		}
	}
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

func (s *layerHopper) close() error {
	err := errors.Join(s.deviceHopper.close(), free(s.layers.buffers()...))
	if s.lists != nil {
		err = errors.Join(err, s.lists.close())
	}
	return err
}

// The source of free memory, and the size from which on it is asked; tests replace both.
var (
	availableBytes       = hostmem.AvailableBytes
	layerCheck     int64 = 64 << 20
)

// room makes the buffers of a hop hold n destinations with so many in-edges. Hops take turns and
// wait for their kernels, so nobody uses the old ones. On the host device they are held against
// free memory together, and with more that the hop takes: each alone would be granted, and all
// together would end in the kernel's OOM killer.
func (l *layerScratch) room(dev cuda.Device, n, edges, more int64) error {
	wants := []struct {
		dst  *cuda.Buffer
		size int64
	}{
		{&l.start, (n + 1) * 8}, {&l.slots, edges * 4}, {&l.pos, edges * 4},
		{&l.mass, (n + edges) * 8}, {&l.rank, (n + edges) * 8},
	}
	total := more
	for _, b := range wants {
		if *b.dst == nil || (*b.dst).Size() < b.size {
			if err := free(b.dst); err != nil {
				return err
			}
			total += b.size + b.size/4
		}
	}
	if dev.Info().Backend == "host" && total >= layerCheck {
		if left, err := availableBytes(); err == nil && total > left {
			return errs.New(errs.Usage,
				"layer-wise sampling reads the whole lists of a layer, %d in-edges of %d nodes: that takes %s, and %s of memory are free; lower %v or the nodes of a layer (%v), or give %v %s",
				edges, n, units.FormatBytes(total), units.FormatBytes(left), errs.Key("batch-size"),
				errs.Key("fanout"), errs.Key("sampler"), Neighbor)
		}
	}
	for _, b := range wants {
		if *b.dst != nil {
			continue
		}
		var err error
		if *b.dst, err = dev.Alloc(cuda.MemDevice, (max(b.size+b.size/4, 1)+4095)&^4095,
			layerPurpose); err != nil {
			return fmt.Errorf("layer-wise sampling of %d nodes with %d in-edges: %w", n, edges, err)
		}
	}
	return nil
}

func (s *layerHopper) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	l, n, take := &s.layers, mb.HopEnd[hop], int64(s.cfg.Fanouts[hop])
	if n >= 1<<31 {
		return errs.New(errs.Usage,
			"layer-wise sampling for %d nodes: the limit is 2^31: lower the batch size or the nodes of a layer",
			n)
	}
	mb.Blocks = mb.Blocks[:hop+1] // keeps the buffers of the last batch
	edges, err := s.countEdges(ctx, stream, mb, hop)
	if err != nil {
		return err
	}
	distinct := min(n+edges, max(s.topo.Host.NumNodes, n))
	if err := s.makeRoom(ctx, stream, mb, n, edges, distinct); err != nil {
		return err
	}
	p := s.hopParams(mb, hop)
	p.Src, p.SrcLen = l.slots.Ptr(), edges
	q := layerParams{
		Sample: p, Pos: l.pos.Ptr(), Mass: l.mass.Ptr(), Rank: l.rank.Ptr(), Hist: l.hist.Ptr(),
		State: l.state.Ptr(), News: l.news.Ptr(),
		Edges: edges, Take: take, Key: s.layerKey(), Batch: uint32(mb.Index),
		Bits: uint32(63 - bits.Len64(uint64(n))),
	}
	if err := s.selectNodes(stream, &q, n, distinct); err != nil {
		return err
	}
	b := &mb.Blocks[hop]
	if err := s.makeBlockRoom(ctx, stream, mb, b, &q, n); err != nil {
		return err
	}
	if err := s.launchLayer(stream, l.kAssign, &q, edges); err != nil {
		return err
	}
	if err := s.launchLayer(stream, l.kRelabel, &q, edges); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	totals := unsafe.Slice((*int64)(unsafe.Pointer(&mb.totals.Bytes()[0])), 2)
	b.NumDst, b.NumEdges, b.NumSrc = n, totals[0], n+totals[1]
	mb.HopEnd = append(mb.HopEnd, b.NumSrc)
	return nil
}

// hopParams returns the parameters of a launch over the whole lists of a hop's destinations.
func (s *layerHopper) hopParams(mb *MiniBatch, hop int) sampleParams {
	p := s.params(mb, mb.HopEnd[hop])
	p.EdgeStart, p.Fanout = s.layers.start.Ptr(), -1
	p.Epoch, p.Hop = uint32(mb.Epoch), uint32(hop)
	return p
}

// countEdges returns how many in-edges the destinations of a hop have.
func (s *layerHopper) countEdges(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	hop int) (int64, error) {
	n := mb.HopEnd[hop]
	if err := s.layers.room(s.dev, n, 0, 0); err != nil {
		return 0, err
	}
	p := s.hopParams(mb, hop)
	if err := s.launch(stream, s.kCount, &p, n); err != nil {
		return 0, err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return 0, err
	}
	edges := s.sum(mb, n)
	if n+edges > math.MaxUint32 {
		return 0, errs.New(errs.Usage,
			"%d nodes with %d in-neighbours pass the limit of 2^32: lower the batch size or the nodes of a layer",
			n, edges)
	}
	return edges, nil
}

// makeRoom makes the scratch hold a hop, enters its destinations in the position table where the
// kernels use that, and brings lists on storage in.
func (s *layerHopper) makeRoom(ctx context.Context, stream cuda.Stream, mb *MiniBatch, n, edges,
	distinct int64) error {
	l := &s.layers
	more := int64(0)
	if l.kEnter != nil {
		if size := enterTable(distinct) * 8; l.table == nil || l.table.Size() < size {
			more = size
		}
	}
	if s.lists != nil {
		if err := s.lists.drop(); err != nil {
			return err
		}
		more += 4 * edges
	}
	if err := l.room(s.dev, n, edges, more); err != nil {
		return err
	}
	if l.kEnter == nil {
		if !s.direct && 3*s.slots/4 < distinct {
			if err := s.growHash(distinct); err != nil {
				return err
			}
		}
		// Candidates that were not drawn are no part of the frontier: each hop has a stamp of its
		// own.
		if err := s.own(stream, mb, n); err != nil {
			return err
		}
		s.owner = nil
	}
	if s.lists != nil {
		return s.lists.stage(ctx, view[int64](mb.Nodes, n))
	}
	return nil
}

// selectNodes weighs the candidates, draws among them and counts what each launch block keeps.
func (s *layerHopper) selectNodes(stream cuda.Stream, q *layerParams, n, distinct int64) error {
	l, edges := &s.layers, q.Edges
	if err := stream.Fill(q.Mass, 0, (n+edges)*8); err != nil {
		return err
	}
	if l.kEnter != nil {
		if err := s.enterOnHost(stream, q, distinct); err != nil {
			return err
		}
	} else {
		if err := s.launch(stream, s.deviceHopper.kFill, &q.Sample, n); err != nil {
			return err
		}
		if err := s.launchLayer(stream, l.kWeigh, q, edges); err != nil {
			return err
		}
	}
	if err := s.launchLayer(stream, l.kRank, q, n+edges); err != nil {
		return err
	}
	if q.Take < 0 || q.Take >= n+edges {
		if err := stream.Fill(q.State, 0xff, l.state.Size()); err != nil { // all are taken
			return err
		}
	} else {
		if err := stream.Fill(q.Hist, 0, l.hist.Size()); err != nil {
			return err
		}
		for shift := 55; shift >= 0; shift -= layerBits {
			q.Shift = uint32(shift)
			if err := s.launchLayer(stream, l.kHist, q, n+edges); err != nil {
				return err
			}
			if err := s.launchLayer(stream, l.kPick, q, 1); err != nil {
				return err
			}
		}
	}
	return s.launchLayer(stream, l.kCount, q, edges)
}

// makeBlockRoom makes room for the result and points q to it: of new nodes the bound is near
// enough, of edges it is not.
func (s *layerHopper) makeBlockRoom(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	b *Block, q *layerParams, n int64) error {
	edges := q.Edges
	bound := n + min(edges, s.topo.Host.NumNodes)
	if q.Take >= 0 {
		bound = min(bound, n+q.Take)
	}
	if err := mb.grow(stream, &mb.Nodes, cuda.MemDevice, bound*8, n*8, "frontier"); err != nil {
		return err
	}
	if s.cfg.Degrees {
		if err := mb.grow(stream, &mb.Degrees, cuda.MemDevice, bound*4, n*4,
			"frontier degrees"); err != nil {
			return err
		}
	}
	if err := mb.grow(stream, &b.Indptr, cuda.MemDevice, (n+1)*8, 0, "block offsets"); err != nil {
		return err
	}
	if err := mb.grow(stream, &b.Weights, cuda.MemDevice, bound*4, 0, "block weights"); err != nil {
		return err
	}
	if b.Src == nil || b.Src.Size() < edges*4 {
		if err := stream.Synchronize(ctx); err != nil {
			return err
		}
		kept := s.sum(mb, edges)
		if err := mb.grow(stream, &b.Src, cuda.MemDevice, max(kept, 1)*4, 0,
			"block sources"); err != nil {
			return err
		}
	}
	q.Sample.Nodes, q.Sample.NodesLen = mb.Nodes.Ptr(), mb.Nodes.Size()/8
	if s.cfg.Degrees {
		q.Sample.Degrees = mb.Degrees.Ptr()
		q.Sample.NodesLen = min(q.Sample.NodesLen, mb.Degrees.Size()/4)
	}
	q.OutStart, q.OutSrc, q.OutLen = b.Indptr.Ptr(), b.Src.Ptr(), b.Src.Size()/4
	q.Weights, q.WeightLen = b.Weights.Ptr(), b.Weights.Size()/4
	return nil
}

func (s *layerHopper) layerKey() [2]uint32 { return philox.Key(s.cfg.Seed, philox.StreamLayer) }

func (s *layerHopper) launchLayer(stream cuda.Stream, k cuda.Kernel, p *layerParams,
	n int64) error {
	return cuda.Launch(stream, k, cuda.LaunchConfig{Blocks: int(s.grid(n)), Threads: threads}, *p)
}
