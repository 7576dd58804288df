package graph

import (
	"context"
	"errors"
	"math"
	"slices"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/philox"
)

// typedHopper samples a typed graph on the host device, by neighbours or LABOR, from lists in
// memory or on storage. A hop is a launch for each relation: it draws for the nodes of the
// relation's destination type that the frontier had when the hop began, from lists whose ids
// count within the source type. New nodes join the one frontier of all types. Relations go in the
// order of their source types, so a hop's new nodes of a type stand together (MiniBatch.TypeEnd).
// A graph of one type and one relation has the samples of the same graph without types.
type typedHopper struct {
	storedHopper
	typedFrontier
	kLabor cuda.Kernel
	// Of SamplerConfig.Together: uint64[relations], the offsets of relations by destination type.
	into cuda.Buffer
}

// typedFrontier has what the hoppers of typed graphs share.
type typedFrontier struct {
	schema    *Schema
	relations []drawnRelation // in the order of their launches
	labor     []laborLists    // Labor's, by relations
	seeds     []int64         // scratch
}

// drawnRelation is a relation as kernels see it.
type drawnRelation struct {
	Relation
	number  int // in the schema
	topo    *DeviceTopology
	base    int64 // number of the first source in the graph
	sources int64
	into    together // the relations into its destinations' type
	key     int      // number of the first of them
}

// members are the nodes of one type in the frontier.
type members struct {
	ids cuda.Buffer // int64[n], within the type
	n   int64
}

// openTyped chooses the hopper of a typed graph: the CPU's own, else a GPU's.
func openTyped(c sampling) (hopper, error) {
	if c.hostTables() || c.topo.Host.OnStorage() {
		return newTypedHopper(c)
	}
	return newTypedDeviceHopper(c)
}

func newTypedHopper(c sampling) (*typedHopper, error) {
	if !c.hostTables() {
		return nil, errs.New(errs.Capability,
			"a typed graph of %d nodes on storage: the limit is 2^32; keep it in memory (%v)",
			c.topo.Host.NumNodes, errs.Key("topology"))
	}
	h, err := newStoredHopper(c)
	if err != nil {
		return nil, err
	}
	s := &typedHopper{storedHopper: *h}
	if s.typedFrontier, err = newTypedFrontier(c); err == nil && s.labor != nil {
		err = s.findKernels(kernelName{&s.kLabor, "host_labor_hop"})
	}
	if err == nil && c.cfg.Together {
		err = s.bringTogether()
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *typedHopper) close() error {
	return errors.Join(s.storedHopper.close(), free(&s.into), s.closeLists())
}

// bringTogether lists the offsets of the relations into each type, in the schema's order.
func (s *typedHopper) bringTogether() (err error) {
	n := int64(len(s.relations))
	if s.into, err = s.dev.Alloc(cuda.MemDevice, max(n, 1)*8, "sampler relations"); err != nil {
		return err
	}
	list, next := view[cuda.DevicePtr](s.into, n), 0
	for t := range s.schema.Types {
		var into []*drawnRelation
		for i := range s.relations {
			if r := &s.relations[i]; r.Dst == t {
				into = append(into, r)
			}
		}
		slices.SortFunc(into, func(a, b *drawnRelation) int { return a.number - b.number })
		for i, r := range into {
			list[next+i], r.key = r.topo.indptr.Ptr(), into[0].number
			r.into = together{Into: s.into.Ptr() + cuda.DevicePtr(8*next),
				IntoLen: int64(len(into)), Own: int64(i)}
		}
		next += len(into)
	}
	return nil
}

func (s *typedHopper) forget() {
	s.storedHopper.forget()
	s.forgetLists()
}

func newTypedFrontier(c sampling) (g typedFrontier, err error) {
	topo := c.topo
	g.schema = topo.Host.Schema
	for _, r := range g.schema.bySource() {
		x := g.schema.Relations[r]
		g.relations = append(g.relations, drawnRelation{Relation: x, number: r,
			topo: topo.relations[r], base: g.schema.First(x.Src),
			sources: g.schema.Types[x.Src].Nodes})
		if c.cfg.Method == Labor && err == nil {
			var l laborLists
			l, err = newLaborLists(c, topo.relations[r].Host, g.schema.First(x.Src))
			g.labor = append(g.labor, l)
		}
	}
	return g, err
}

func (g *typedFrontier) closeLists() (err error) {
	for i := range g.labor {
		err = errors.Join(err, g.labor[i].closeLists())
	}
	return err
}

func (g *typedFrontier) forgetLists() {
	for i := range g.labor {
		g.labor[i].listed = nil
	}
}

// enter has a launch draw from the relation's lists.
func (r *drawnRelation) enter(p *hopParams) {
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
	s.forgetLists()
	if err := s.hostHopper.begin(ctx, stream, mb, s.numberSeeds(seeds)); err != nil {
		return err
	}
	s.beginTypes(mb)
	return s.addMembers(stream, mb, 0)
}

// numberSeeds returns the seeds' numbers in the graph, until the next call.
func (g *typedFrontier) numberSeeds(seeds []int64) []int64 {
	first := g.schema.First(g.schema.Seeds)
	g.seeds = g.seeds[:0]
	for _, v := range seeds {
		g.seeds = append(g.seeds, first+v)
	}
	return g.seeds
}

// beginTypes notes the types of a frontier of seeds.
func (g *typedFrontier) beginTypes(mb *MiniBatch) {
	if mb.members == nil {
		mb.members = make([]members, len(g.schema.Types))
	}
	for t := range mb.members {
		mb.members[t].n = 0
	}
	mb.TypeEnd = mb.TypeEnd[:0]
	ends := mb.nextTypeEnd(len(g.schema.Types))
	for t := range ends {
		if t >= g.schema.Seeds {
			ends[t] = int64(mb.NumSeeds)
		}
	}
}

// layOut gives each relation its place among the lists of a hop's block, and returns their number.
func (g *typedFrontier) layOut(mb *MiniBatch, b *Block) (lists int64) {
	if len(b.Lists) != len(g.relations) {
		b.Lists = make([]ListRange, len(g.relations))
	}
	for i := range g.relations {
		r := &g.relations[i]
		b.Lists[r.number] = ListRange{First: lists, N: mb.members[r.Dst].n}
		lists += mb.members[r.Dst].n
	}
	return lists
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
	return TypeRange(mb.HopEnd, mb.TypeEnd, h, t)
}

// TypeRange is MiniBatch.TypeRange of a copy of its figures.
func TypeRange(hopEnd []int64, typeEnd [][]int64, h, t int) (lo, hi int64) {
	switch {
	case t > 0:
		lo = typeEnd[h][t-1]
	case h > 0:
		lo = hopEnd[h-1]
	}
	return lo, typeEnd[h][t]
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
	b, widest := &mb.Blocks[hop], 0
	lists := s.layOut(mb, b)
	for r := range s.relations {
		widest = max(widest, s.cfg.fanout(r, hop))
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
			if edges, frontier, err = s.drawRelation(ctx, stream, mb, hop, next, edges,
				frontier); err != nil {
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
func (s *typedHopper) drawRelation(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop,
	launch int, edges, frontier int64) (int64, int64, error) {
	r := &s.relations[launch]
	l := mb.Blocks[hop].Lists[r.number]
	if l.N == 0 {
		return edges, frontier, nil
	}
	fanout := s.cfg.fanout(r.number, hop)
	dst, draw := mb.members[r.Dst].ids, s.drawLists
	lists := hostLists{
		n: l.N, first: l.First, edges: edges, frontier: frontier, draws: tileDrawsOf(fanout),
		relation: r, dst: dst.Ptr(),
		drawn: hopDraws{Fanout: int64(fanout), Key: relationKey(mb.key, r.number),
			Hop: uint32(hop)},
	}
	if s.cfg.Together && fanout > 0 {
		lists.together, lists.drawn.Key = r.into, relationKey(mb.key, r.key)
	}
	switch {
	case s.labor != nil && fanout != 0: // no draws need no variates
		v := &s.labor[launch]
		if v.lists != nil {
			if err := v.stage(ctx, mb, view[int64](dst, l.N)); err != nil {
				return 0, 0, err
			}
			lists.indices = v.lists.ptr()
		}
		lists.kernel, lists.draws, lists.drawn.Labor = s.kLabor, tileDraws,
			v.variates(mb, hop).host()
	case r.topo.Host.OnStorage():
		draw = s.drawStored
	}
	return draw(ctx, stream, mb, &mb.Blocks[hop], &lists)
}
