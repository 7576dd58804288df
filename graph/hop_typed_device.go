package graph

import (
	"context"
	"errors"
	"fmt"
	"math"

	"helios/cuda"
	"helios/internal/errs"
)

// typedDeviceHopper samples a typed graph as typedHopper does, with the kernels of a GPU: a launch
// for each relation that has destinations counts its edges, one draws them, and three number the
// new nodes of all. Which edges stand before a relation's the GPU knows itself
// (sampleParams.Before), so the CPU waits for all relations at once. New nodes come by type, so a
// search finds where the types end, and the next hop begins with a launch for each type that
// numbers its nodes.
type typedDeviceHopper struct {
	deviceHopper
	typedFrontier
	firsts          cuda.Buffer // pinned int64[types+1]: number of each type's first node
	launches        []typedLaunch
	kTypes, kLocals cuda.Kernel
	// Labor's:
	kLaborCount, kLaborFill cuda.Kernel
	limits                  cuda.Buffer
}

// typedLaunch draws for a relation, by LABOR where labor says so.
type typedLaunch struct {
	laborParams
	labor bool
}

func newTypedDeviceHopper(c sampling) (*typedDeviceHopper, error) {
	if c.cfg.Together {
		return nil, errs.New(errs.Capability,
			"fanouts over all relations are drawn by the CPU: sample there (%v ssd), or give fanouts by relation",
			errs.Key("topology"))
	}
	h, err := newDeviceHopper(c)
	if err != nil {
		return nil, err
	}
	s := &typedDeviceHopper{deviceHopper: *h}
	if s.typedFrontier, err = newTypedFrontier(c); err == nil {
		err = s.findKernels(kernelName{&s.kTypes, "unique_types"},
			kernelName{&s.kLocals, "unique_local"}, kernelName{&s.kLaborCount, "labor_count"},
			kernelName{&s.kLaborFill, "labor_fill"})
	}
	types := int64(len(s.schema.Types))
	if err == nil {
		s.firsts, err = c.dev.Alloc(cuda.MemPinned, (types+1)*8, "sampler types")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("sampler: %w", err), s.close())
	}
	for t := range types + 1 {
		view[int64](s.firsts, types+1)[t] = s.schema.First(int(t))
	}
	return s, nil
}

func (s *typedDeviceHopper) close() error {
	return errors.Join(s.deviceHopper.close(), free(&s.firsts, &s.limits), s.closeLists())
}

// prepare takes counts for each relation. mb.totals has the edges before each launch and behind the
// last, the new nodes, and the ends of the types.
func (s *typedDeviceHopper) prepare(mb *MiniBatch) error {
	relations, types := int64(len(s.relations)), int64(len(s.schema.Types))
	var err error
	if mb.sums, err = s.dev.Alloc(cuda.MemPinned, max(relations, 1)*int64(s.blocks)*8,
		"sampler counts"); err == nil {
		mb.totals, err = s.dev.Alloc(cuda.MemPinned, (relations+2+types)*8, "sampler counts")
	}
	return err
}

func (s *typedDeviceHopper) begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	seeds []int64) error {
	if err := s.deviceHopper.begin(ctx, stream, mb, s.numberSeeds(seeds)); err != nil {
		return err
	}
	s.beginTypes(mb)
	return nil
}

// addMembers enqueues the numbers within their types of the nodes of TypeEnd[h].
func (s *typedDeviceHopper) addMembers(stream cuda.Stream, mb *MiniBatch, h int) error {
	for t := range mb.members {
		m := &mb.members[t]
		lo, hi := mb.TypeRange(h, t)
		if hi == lo {
			continue
		}
		if err := mb.grow(stream, &m.ids, cuda.MemDevice, (m.n+hi-lo)*8, m.n*8,
			"nodes by type"); err != nil {
			return err
		}
		p := localParams{Nodes: mb.Nodes.Ptr() + cuda.DevicePtr(lo*8),
			Local: m.ids.Ptr() + cuda.DevicePtr(m.n*8), Count: hi - lo, First: s.schema.First(t)}
		if err := cuda.Launch(stream, s.kLocals, cuda.LaunchConfig{Blocks: int(s.grid(hi - lo)),
			Threads: threads}, p); err != nil {
			return err
		}
		m.n += hi - lo
	}
	return nil
}

func (s *typedDeviceHopper) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	hop int) error {
	mb.Blocks = mb.Blocks[:hop+1] // keeps the buffers of the last batch
	b, n := &mb.Blocks[hop], mb.HopEnd[hop]
	// Here, not behind the hop before: a hop leaves no kernel under way.
	if err := s.addMembers(stream, mb, hop); err != nil {
		return err
	}
	lists := s.layOut(mb, b)
	if err := mb.grow(stream, &b.Indptr, cuda.MemDevice, (lists+1)*8, 0,
		"block offsets"); err != nil {
		return err
	}
	if s.labor != nil {
		if err := limitRoom(s.dev, &s.limits, lists); err != nil {
			return err
		}
	}
	if s.owner != mb {
		if err := s.own(stream, mb, n); err != nil {
			return err
		}
	}
	edges, err := s.count(ctx, stream, mb, hop)
	if err != nil {
		return err
	}
	launches := int64(len(s.launches))
	totals := view[int64](mb.totals, launches+2)
	totals[0] = 0 // the hop before is done
	for i := range s.launches {
		p := &s.launches[i]
		p.Sample.Src, p.Sample.SrcLen = b.Src.Ptr(), b.Src.Size()/4
		if err := s.draws(stream, s.kFill, s.kLaborFill, p); err != nil {
			return err
		}
	}
	if launches > 0 {
		p := s.params(mb, n)
		p.NumDst, p.EdgeStart = lists, b.Indptr.Ptr()
		p.Src, p.SrcLen = b.Src.Ptr(), b.Src.Size()/4
		p.Totals += cuda.DevicePtr(launches * 8)
		if err := s.number(ctx, stream, mb, &p, edges); err != nil {
			return err
		}
	} else {
		totals[1] = 0
		if err := stream.Fill(b.Indptr.Ptr(), 0, 8); err != nil {
			return err
		}
	}
	return s.finish(ctx, stream, mb, hop)
}

// count enqueues the counts of the edges of all relations that have destinations, and returns a
// bound of their sum for which there is room.
func (s *typedDeviceHopper) count(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	hop int) (edges int64, err error) {
	b, n := &mb.Blocks[hop], mb.HopEnd[hop]
	s.launches = s.launches[:0]
	for i := range s.relations {
		r := &s.relations[i]
		l := b.Lists[r.number]
		if l.N == 0 {
			continue
		}
		k := cuda.DevicePtr(len(s.launches) * 8)
		p := s.params(mb, l.N)
		r.enterDevice(&p)
		p.Dst, p.Frontier = mb.members[r.Dst].ids.Ptr(), n
		p.EdgeStart = b.Indptr.Ptr() + cuda.DevicePtr(l.First*8)
		p.Sums += k * cuda.DevicePtr(s.blocks)
		p.Before, p.Totals = mb.totals.Ptr()+k, mb.totals.Ptr()+k+8
		p.Fanout, p.Key = int64(s.cfg.fanout(r.number, hop)), relationKey(mb.key, r.number)
		p.Epoch, p.Hop = uint32(mb.Epoch), uint32(hop)
		q, bound := typedLaunch{}, mostDraws(l.N, p.Fanout)
		if s.labor != nil && p.Fanout != 0 { // no draws need no variates
			q.laborParams = s.labor[i].variates(mb, hop).params(
				s.limits.Ptr() + cuda.DevicePtr(l.First*8))
			q.labor, bound = true, math.MaxInt64/2 // a destination may take all its neighbours
		}
		q.Sample = p
		if err := s.draws(stream, s.kCount, s.kLaborCount, &q); err != nil {
			return 0, err
		}
		s.launches = append(s.launches, q)
		if mb.distinct {
			bound = min(bound, p.NumEdges)
		}
		edges = min(edges+bound, math.MaxInt64/2)
	}
	if b.Src != nil && edges <= b.Src.Size()/4 && n+edges <= math.MaxUint32 &&
		(s.direct || 3*s.slots/4 >= n+edges) {
		return edges, nil
	}
	if err := stream.Synchronize(ctx); err != nil {
		return 0, err
	}
	edges = 0
	for i := range s.launches {
		edges += s.sumOf(mb, int64(i), s.launches[i].Sample.NumDst)
	}
	if n+edges > math.MaxUint32 {
		return 0, tooManyEdges(n, edges)
	}
	if err := mb.grow(stream, &b.Src, cuda.MemDevice, max(edges, 1)*4, 0,
		"block sources"); err != nil {
		return 0, err
	}
	if s.direct || 3*s.slots/4 >= n+edges {
		return edges, nil
	}
	if err := s.growHash(n + edges); err != nil {
		return 0, err
	}
	if err := s.own(stream, mb, n); err != nil {
		return 0, err
	}
	q := s.params(mb, n)
	for i := range s.launches {
		s.launches[i].Sample.enterTable(q)
	}
	return edges, nil
}

// draws enqueues a launch of one kernel, or of another for LABOR.
func (s *typedDeviceHopper) draws(stream cuda.Stream, neighbor, labor cuda.Kernel,
	p *typedLaunch) error {
	if !p.labor {
		return s.launch(stream, neighbor, &p.Sample, p.Sample.NumDst)
	}
	return cuda.Launch(stream, labor, cuda.LaunchConfig{Blocks: int(s.grid(p.Sample.NumDst)),
		Threads: threads}, p.laborParams)
}

// enterDevice is enter for the kernels of a GPU.
func (r *drawnRelation) enterDevice(p *sampleParams) {
	t := r.topo.Host
	p.Indptr, p.Indices, p.Wide = r.topo.indptr.Ptr(), 0, 0
	if r.topo.indices != nil {
		p.Indices = r.topo.indices.Ptr()
	}
	if t.Wide() {
		p.Wide = 1
	}
	p.NumNodes, p.NumEdges, p.Sources, p.Base = t.NumNodes, t.NumEdges, r.sources, r.base
}

// finish waits for a hop and notes its sizes.
func (s *typedDeviceHopper) finish(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	hop int) error {
	b, n := &mb.Blocks[hop], mb.HopEnd[hop]
	launches, types := int64(len(s.launches)), int64(len(s.schema.Types))
	news := mb.totals.Ptr() + cuda.DevicePtr((launches+1)*8)
	p := typeParams{Nodes: mb.Nodes.Ptr(), New: news, Firsts: s.firsts.Ptr(), Ends: news + 8,
		Frontier: n, NodesLen: mb.Nodes.Size() / 8, Types: types}
	if err := cuda.Launch(stream, s.kTypes, cuda.LaunchConfig{Blocks: 1, Threads: threads},
		p); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	totals := view[int64](mb.totals, launches+2+types)
	b.NumDst, b.NumEdges, b.NumSrc = n, totals[launches], n+totals[launches+1]
	mb.HopEnd = append(mb.HopEnd, b.NumSrc)
	copy(mb.nextTypeEnd(int(types)), totals[launches+2:])
	next, before := 0, int64(0)
	for i := range s.relations {
		l := &b.Lists[s.relations[i].number]
		l.FirstEdge = before
		if l.N > 0 {
			next++
			l.Edges = totals[next] - before
			before = totals[next]
		}
	}
	return nil
}
