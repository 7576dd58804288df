package parted

import (
	"context"
	"errors"
	"math"
	"math/bits"

	"github.com/google/uuid"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// Planned is a layout that is not made: its tables, and the edges of any part as its pages would
// have them. It has no folder and no rows. Close it before the topology that it was planned of.
type Planned struct {
	*Layout
	topo  *graph.Topology
	newOf []uint32 // new number by old number
	old   []uint32 // old number by new number
	mem   [][]byte
}

// Plan works out the layout that Make would make of a partition that is given, of a topology in
// memory. Of o it takes Partition, StaticShare, RowType and Progress. It takes 8 bytes a node.
func Plan(ctx context.Context, d *dataset.Dataset, topo *graph.Topology, o Options) (_ *Planned,
	err error) {
	if o.Partition == nil || topo.OnStorage() {
		return nil, errs.New(errs.Failed,
			"a layout is planned by a partition, of a topology in memory")
	}
	o.Place = pages.InFolder{} // of which nothing is made
	if err := o.check(d, topo); err != nil {
		return nil, err
	}
	k := &maker{d: d, topo: topo, o: &o, part: o.Partition}
	p := &Planned{topo: topo}
	defer func() {
		p.mem = k.mem
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if k.m.Key, err = o.key(d, topo); err != nil {
		return nil, err
	}
	k.m.ID = uuid.Max // of no pages
	if p.newOf, _, err = k.lay(ctx); err != nil {
		return nil, err
	}
	p.Layout = k.l
	mem, err := k.alloc(4 * p.Nodes)
	if err != nil {
		return nil, err
	}
	p.old = hostmem.View[uint32](mem)
	for v, id := range p.newOf {
		p.old[id] = uint32(v)
	}
	return p, nil
}

// Close gives the memory back.
func (p *Planned) Close() error {
	err := freeAll(p.mem)
	p.mem, p.newOf, p.old = nil, nil, nil
	return err
}

func freeAll(mem [][]byte) error {
	var all []error
	for _, b := range mem {
		all = append(all, hostmem.Free(b))
	}
	return errors.Join(all...)
}

// PartEdges writes what the edge pages of a part would hold to raw, which is long enough for
// Section, and reads it.
func (p *Planned) PartEdges(part int, raw []byte) (Section, error) {
	p.write(raw, p.Base[part+1]-p.Base[part], func(i int64) int64 { return p.Base[part] + i })
	return p.Section(part, raw)
}

// StaticNodeEdges is PartEdges of the static nodes.
func (p *Planned) StaticNodeEdges(raw []byte) (Section, error) {
	part := 0
	p.write(raw, p.StaticNodes(), func(rank int64) int64 {
		for rank >= p.Statics[part+1] {
			part++
		}
		return p.Base[part] + rank - p.Statics[part]
	})
	return p.StaticSection(raw)
}

// write writes an edge section of so many nodes; id gives the new number of each, in their order.
func (p *Planned) write(raw []byte, nodes int64, id func(i int64) int64) {
	all := hostmem.View[uint32](raw[:len(raw)/4*4])
	pos := 2 * nodes
	for i := range nodes {
		v := int64(p.old[id(i)])
		from, to := p.topo.Indptr[v], p.topo.Indptr[v+1]
		all[i], all[nodes+i] = uint32(to-from), uint32(v)
		for k := range to - from {
			all[pos] = p.newOf[p.topo.Neighbor(v, k)]
			pos++
		}
	}
}

// Even describes a graph that need not be there, for parts of equal size.
type Even struct {
	Nodes, Edges, RowBytes int64
	Parts                  int
	// Statics are the static nodes, and StaticEdges their in-edges; they lie in all parts alike.
	Statics, StaticEdges int64
	// Train counts the training nodes, which lie in all parts alike, or First in the first ones.
	Train int64
	First bool
}

// Layout lays the graph out as Make would lay one out whose parts are so. It has no folder.
func (e Even) Layout() (*Layout, error) {
	if e.Nodes < 1 || e.Nodes > math.MaxUint32 || e.Parts < 1 || int64(e.Parts) > e.Nodes ||
		e.Statics < 0 || e.Statics > e.Nodes || e.Train < 0 || e.Train > e.Nodes || e.Edges < 0 {
		return nil, errs.New(errs.Usage,
			"%d nodes in %d parts, %d of them static ones: a layout by part has 1 to %d nodes, and no more parts or static nodes than that",
			e.Nodes, e.Parts, e.Statics, int64(math.MaxUint32))
	}
	page, err := PageBytes(e.RowBytes, e.Nodes, e.Parts)
	if err != nil {
		return nil, err
	}
	l := &Layout{Key: Key{Nodes: e.Nodes, Edges: e.Edges, Parts: e.Parts, RowBytes: e.RowBytes,
		PageBytes: page}, Parts: e.Parts, Nodes: e.Nodes, RowBytes: e.RowBytes,
		StaticEdgeCount: e.StaticEdges, Train: make([]int64, e.Train)}
	upTo := func(all int64, part int) int64 { return share(all, int64(part), int64(e.Parts)) }
	for p := range e.Parts + 1 {
		l.Base, l.Statics = append(l.Base, upTo(e.Nodes, p)), append(l.Statics, upTo(e.Statics, p))
		if p > 0 {
			l.Edges = append(l.Edges, upTo(e.Edges, p)-upTo(e.Edges, p-1))
		}
	}
	for i := range l.Train {
		l.Train[i] = int64(i)
		if !e.First {
			l.Train[i] = share(e.Nodes, int64(i), e.Train)
		}
	}
	return l, l.place(uuid.Max, page)
}

// share is n·at/of without overflow; at is at most of.
func share(n, part, of int64) int64 {
	hi, lo := bits.Mul64(uint64(n), uint64(part))
	q, _ := bits.Div64(hi, lo, uint64(of))
	return int64(q)
}
