package graph

import (
	"context"
	"math"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/simd"
)

// typedHopper samples neighbours of a typed graph on the host device, from lists in memory or on
// storage. A hop is a launch for each relation: it draws for the nodes of the relation's
// destination type that the frontier had when the hop began, from lists whose ids count within the
// source type. New nodes join the one frontier of all types. Relations go in the order of their
// source types, so a hop's new nodes of a type stand together (MiniBatch.TypeEnd). A graph of one
// type and one relation has the samples of the same graph without types.
type typedHopper struct {
	storedHopper
	schema    *Schema
	relations []hostRelation // in the order of their launches
	seeds     []int64        // scratch
}

// hostRelation is a relation as the host's kernels see it.
type hostRelation struct {
	Relation
	number  int // in the schema
	topo    *DeviceTopology
	base    int64 // number of the first source in the graph
	sources int64
}

// members are the nodes of one type in the frontier.
type members struct {
	ids cuda.Buffer // int64[n], within the type
	n   int64
}

func newTypedHopper(c sampling) (*typedHopper, error) {
	if !c.hostTables() {
		return nil, errs.New(errs.Capability,
			"a typed graph of %d nodes: the limit is 2^32, and a host device", c.topo.Host.NumNodes)
	}
	h, err := newStoredHopper(c)
	if err != nil {
		return nil, err
	}
	s := &typedHopper{storedHopper: *h, schema: c.topo.Host.Schema}
	for _, r := range s.schema.bySource() {
		x := s.schema.Relations[r]
		s.relations = append(s.relations, hostRelation{Relation: x, number: r,
			topo: c.topo.relations[r], base: s.schema.First(x.Src),
			sources: s.schema.Types[x.Src].Nodes})
	}
	return s, nil
}

// enter has a launch draw from the relation's lists.
func (r *hostRelation) enter(p *hopParams) {
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

// relationKey is the key of relation r's draws: that of the batch for the first. Epochs have 24
// bits, so no draw meets this counter.
func relationKey(key [2]uint32, r int) [2]uint32 {
	if r == 0 {
		return key
	}
	w := philox.Block(key, [4]uint32{uint32(r), 0, math.MaxUint32, math.MaxUint32})
	return [2]uint32{w[0], w[1]}
}

func (s *typedHopper) begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	seeds []int64) error {
	first := s.schema.First(s.schema.Seeds)
	s.seeds = s.seeds[:0]
	for _, v := range seeds {
		s.seeds = append(s.seeds, first+v)
	}
	if err := s.hostHopper.begin(ctx, stream, mb, s.seeds); err != nil {
		return err
	}
	if mb.members == nil {
		mb.members = make([]members, len(s.schema.Types))
	}
	for t := range mb.members {
		mb.members[t].n = 0
	}
	mb.TypeEnd = mb.TypeEnd[:0]
	ends := mb.nextTypeEnd(len(s.schema.Types))
	for t := range ends {
		if t >= s.schema.Seeds {
			ends[t] = int64(len(seeds))
		}
	}
	return s.addMembers(stream, mb, 0)
}

// nextTypeEnd appends zeros of so many types to TypeEnd, in memory of earlier batches.
func (mb *MiniBatch) nextTypeEnd(types int) []int64 {
	n := len(mb.TypeEnd)
	if n < cap(mb.TypeEnd) {
		mb.TypeEnd = mb.TypeEnd[:n+1]
	} else {
		mb.TypeEnd = append(mb.TypeEnd, nil)
	}
	if len(mb.TypeEnd[n]) != types {
		mb.TypeEnd[n] = make([]int64, types)
	}
	clear(mb.TypeEnd[n])
	return mb.TypeEnd[n]
}

// TypeRange returns the part of the frontier that has the nodes of type t of TypeEnd[h].
func (mb *MiniBatch) TypeRange(h, t int) (lo, hi int64) {
	switch {
	case t > 0:
		lo = mb.TypeEnd[h][t-1]
	case h > 0:
		lo = mb.HopEnd[h-1]
	}
	return lo, mb.TypeEnd[h][t]
}

// addMembers notes which nodes of their types those of TypeEnd[h] are.
func (s *typedHopper) addMembers(stream cuda.Stream, mb *MiniBatch, h int) error {
	for t := range mb.members {
		m := &mb.members[t]
		lo, hi := mb.TypeRange(h, t)
		if err := mb.grow(stream, &m.ids, cuda.MemDevice, max(m.n+hi-lo, 1)*8, m.n*8,
			"nodes by type"); err != nil {
			return err
		}
		first, to := s.schema.First(t), view[int64](m.ids, m.n+hi-lo)[m.n:]
		for i, v := range view[int64](mb.Nodes, hi)[lo:] {
			to[i] = v - first
		}
		m.n += hi - lo
	}
	return nil
}

func (s *typedHopper) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	mb.Blocks = mb.Blocks[:hop+1] // keeps the buffers of the last batch
	b, lists, widest := &mb.Blocks[hop], int64(0), 0
	if len(b.Lists) != len(s.relations) {
		b.Lists = make([]ListRange, len(s.relations))
	}
	for i := range s.relations {
		r := &s.relations[i]
		b.Lists[r.number] = ListRange{First: lists, N: mb.members[r.Dst].n}
		lists += mb.members[r.Dst].n
		widest = max(widest, s.cfg.fanout(r.number, hop))
	}
	if err := s.blockRoom(stream, mb, b, lists, int64(widest)); err != nil {
		return err
	}
	edges, frontier := int64(0), mb.HopEnd[hop]
	ends := mb.nextTypeEnd(len(s.schema.Types))
	next := 0
	for t := range s.schema.Types {
		for ; next < len(s.relations) && s.relations[next].Src == t; next++ {
			l := &b.Lists[s.relations[next].number]
			l.FirstEdge = edges
			var err error
			if edges, frontier, err = s.drawRelation(ctx, stream, mb, hop, &s.relations[next],
				edges, frontier); err != nil {
				return err
			}
			l.Edges = edges - l.FirstEdge
		}
		ends[t] = frontier
	}
	if lists == 0 {
		view[int64](b.Indptr, 1)[0] = 0
	}
	if err := s.finish(ctx, stream, mb, hop, edges, frontier); err != nil {
		return err
	}
	if hop == len(s.cfg.Fanouts)-1 {
		return nil
	}
	return s.addMembers(stream, mb, hop+1)
}

// drawRelation draws for a relation in a hop, behind so many edges and with so many nodes in the
// frontier, and returns both as they are then.
func (s *typedHopper) drawRelation(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int,
	r *hostRelation, edges, frontier int64) (int64, int64, error) {
	l := mb.Blocks[hop].Lists[r.number]
	if l.N == 0 {
		return edges, frontier, nil
	}
	fanout := s.cfg.fanout(r.number, hop)
	draw := s.drawLists
	if r.topo.Host.OnStorage() {
		draw = s.drawStored
	}
	return draw(ctx, stream, mb, &mb.Blocks[hop], &hostLists{
		n: l.N, first: l.First, edges: edges, frontier: frontier, draws: tileDrawsOf(fanout),
		relation: r, dst: mb.members[r.Dst].ids.Ptr(),
		drawn: hopDraws{Fanout: int64(fanout), Key: relationKey(mb.key, r.number),
			Hop: uint32(hop), Labor: simd.LaborKeys{}},
	})
}
