// Package induced builds the graph that a few parts of a partitioned graph induce, together with
// nodes that are always there: the edges both of whose ends are in memory.
//
// Nodes of the whole graph are numbered by part, the static nodes of each part first. In the
// induced graph the static nodes come first, in the same order; behind them lie rows for the parts
// that are loaded, at places that the caller chooses, so that a node's number is also the place of
// its features. Rows between parts, and those of a loaded part's static nodes, belong to no node:
// nothing refers to them.
package induced

import (
	"context"
	"fmt"
	"sync"

	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostcpu"
)

// Numbering maps nodes of the whole graph to parts.
type Numbering struct {
	Base []int64 // part p has the nodes Base[p] to Base[p+1]-1; one entry more than parts
	// Static[p+1]-Static[p] of them, the first, are static: those from Static[p] on of all static
	// nodes.
	Static []int64

	shift uint
	first []int32 // by id>>shift, the part of the first such id
}

// NewNumbering checks the bases.
func NewNumbering(base, static []int64) (*Numbering, error) {
	n := &Numbering{Base: base, Static: static}
	parts := len(base) - 1
	if parts < 1 || len(static) != len(base) || base[0] != 0 || static[0] != 0 {
		return nil, errs.New(errs.Device, "numbering of %d parts with %d static bases", parts,
			len(static))
	}
	for p := range parts {
		size, statics := base[p+1]-base[p], static[p+1]-static[p]
		if size < 0 || statics < 0 || statics > size {
			return nil, errs.New(errs.Device, "part %d has %d nodes, %d of them static", p, size,
				statics)
		}
	}
	const entries = 1 << 16 // of 4 bytes: a table that stays in a core's cache
	for base[parts]>>n.shift >= entries {
		n.shift++
	}
	n.first = make([]int32, base[parts]>>n.shift+1)
	p := int32(0)
	for i := range n.first {
		for int(p) < parts-1 && base[p+1] <= int64(i)<<n.shift {
			p++
		}
		n.first[i] = p
	}
	return n, nil
}

// Parts returns how many there are.
func (n *Numbering) Parts() int { return len(n.Base) - 1 }

// Nodes returns how many there are.
func (n *Numbering) Nodes() int64 { return n.Base[len(n.Base)-1] }

// Statics returns how many static nodes there are.
func (n *Numbering) Statics() int64 { return n.Static[len(n.Static)-1] }

// PartOf returns the part of a node, which is one of 0 to Nodes()-1.
func (n *Numbering) PartOf(id int64) int {
	p := n.first[id>>n.shift]
	for n.Base[p+1] <= id {
		p++
	}
	return int(p)
}

// Lists are in-neighbour lists one behind the other: Degrees has their lengths, and one of the two
// others the neighbours, by their numbers in the whole graph.
type Lists struct {
	Degrees     []uint32
	Neighbors   []uint32
	Neighbors64 []uint64
}

func (l *Lists) edges() int64 { return int64(len(l.Neighbors) + len(l.Neighbors64)) }

// Part is a part that is loaded. Its lists are of all its nodes, the static ones too.
type Part struct {
	Part  int
	First int64 // the row of its first node
	Lists
}

// Places say where nodes of the whole graph are in an induced one.
type Places struct {
	*Numbering
	Rows  int64   // of the induced graph, with those that are of no node
	first []int64 // by part, the row of its first node; -1: it is not loaded
}

// NewPlaces places parts, in ascending order of their rows, behind the static nodes.
func NewPlaces(n *Numbering, rows int64, parts []Part) (*Places, error) {
	p := &Places{Numbering: n, Rows: rows, first: make([]int64, n.Parts())}
	for i := range p.first {
		p.first[i] = -1
	}
	end := n.Statics()
	for _, part := range parts {
		if part.Part < 0 || part.Part >= n.Parts() || p.first[part.Part] >= 0 || part.First < end {
			return nil, fmt.Errorf("induced graph: part %d of %d at row %d, behind row %d",
				part.Part, n.Parts(), part.First, end)
		}
		p.first[part.Part] = part.First
		end = part.First + n.Base[part.Part+1] - n.Base[part.Part]
	}
	if end > rows {
		return nil, fmt.Errorf("induced graph: its parts end at row %d of %d", end, rows)
	}
	return p, nil
}

// Of returns the row of a node, one of 0 to Nodes()-1; -1 where it is not there. A static node has
// one row, whether its part is loaded or not.
func (p *Places) Of(id int64) int64 {
	part := p.PartOf(id)
	off := id - p.Base[part]
	if s := p.Static[part]; off < p.Static[part+1]-s {
		return s + off
	}
	if p.first[part] < 0 {
		return -1
	}
	return p.first[part] + off
}

// chunkEdges is about how many edges one worker takes at a time.
const chunkEdges = 1 << 16

// chunk is a run of lists that one worker takes.
type chunk struct {
	lists       *Lists
	from, to    int   // nodes of the lists
	edge, edges int64 // of their lists
	row         int64 // of the first
	kept        int64 // edges of the induced graph
	start       int64 // of them, where they begin
	bad         int64 // of the edges, the first whose end is no node; -1: none
}

// Build makes the induced graph: static has the lists of the static nodes in their order, parts
// those of the parts that places has, in its order. Lists keep their order, without the neighbours
// that are not there. The result depends on nothing but these. Lists that contradict each other or
// the numbering are an error of class Device. Close the topology.
func Build(ctx context.Context, places *Places, static Lists, parts []Part,
	workers int) (*graph.Topology, error) {
	if workers < 1 {
		workers = hostcpu.Count()
	}
	chunks, err := cut(places, &static, parts)
	if err != nil {
		return nil, err
	}
	each(ctx, workers, chunks, func(c *chunk) { c.count(places) })
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	edges := int64(0)
	for i := range chunks {
		c := &chunks[i]
		if c.bad >= 0 {
			return nil, errs.New(errs.Device,
				"the list of row %d names a node beyond the %d that there are",
				c.row, places.Nodes())
		}
		c.start = edges
		edges += c.kept
	}
	t, err := graph.Alloc(places.Rows, edges, places.Rows > 1<<32)
	if err != nil {
		return nil, err
	}
	each(ctx, workers, chunks, func(c *chunk) { c.fill(places, t) })
	if err := ctx.Err(); err != nil {
		_ = t.Close() // memory of its own: it can be freed
		return nil, err
	}
	// Rows of no node, between what the chunks have filled.
	row := int64(0)
	for i := range chunks {
		c := &chunks[i]
		for ; row < c.row; row++ {
			t.Indptr[row+1] = c.start
		}
		row = c.row + int64(c.to-c.from)
	}
	for ; row < places.Rows; row++ {
		t.Indptr[row+1] = edges
	}
	return t, nil
}

// each runs do for all chunks, until ctx ends.
func each(ctx context.Context, workers int, chunks []chunk, do func(*chunk)) {
	next := make(chan *chunk)
	var wg sync.WaitGroup
	for range min(workers, len(chunks)) {
		wg.Go(func() {
			for c := range next {
				do(c)
			}
		})
	}
	for i := range chunks {
		if ctx.Err() != nil {
			break
		}
		next <- &chunks[i]
	}
	close(next)
	wg.Wait()
}

// cut checks the lengths of the lists and divides them.
func cut(p *Places, static *Lists, parts []Part) (chunks []chunk, err error) {
	add := func(what string, l *Lists, nodes, skip int64, row int64) error {
		if int64(len(l.Degrees)) != nodes || l.Neighbors != nil && l.Neighbors64 != nil {
			return errs.New(errs.Device, "%s: %d in-degrees for %d nodes", what, len(l.Degrees),
				nodes)
		}
		c := chunk{lists: l, row: row}
		edge := int64(0)
		for i, d := range l.Degrees {
			if int64(i) == skip {
				c.from, c.edge = i, edge
			}
			edge += int64(d)
			if edge > l.edges() {
				break
			}
			if int64(i) >= skip && edge-c.edge >= chunkEdges {
				c.to, c.edges = i+1, edge-c.edge
				chunks = append(chunks, c)
				c = chunk{lists: l, row: row + int64(i+1) - skip, from: i + 1, edge: edge}
			}
		}
		if edge != l.edges() {
			return errs.New(errs.Device, "%s: its in-degrees are %d edges or more, it has %d", what,
				edge, l.edges())
		}
		if skip < nodes && c.from < int(nodes) {
			c.to, c.edges = int(nodes), edge-c.edge
			chunks = append(chunks, c)
		}
		return nil
	}
	if err := add("static nodes", static, p.Statics(), 0, 0); err != nil {
		return nil, err
	}
	for i := range parts {
		q := &parts[i]
		if q.Part < 0 || q.Part >= p.Parts() || p.first[q.Part] != q.First {
			return nil, fmt.Errorf("induced graph: part %d is not where it is to be", q.Part)
		}
		nodes := p.Base[q.Part+1] - p.Base[q.Part]
		statics := p.Static[q.Part+1] - p.Static[q.Part]
		if err := add(fmt.Sprintf("part %d", q.Part), &q.Lists, nodes, statics,
			q.First+statics); err != nil {
			return nil, err
		}
	}
	return chunks, nil
}

// count finds how many of the chunk's edges stay.
func (c *chunk) count(p *Places) {
	c.kept, c.bad = 0, -1
	nodes := uint64(p.Nodes())
	take := func(i int, id uint64) bool {
		if id >= nodes {
			c.bad = c.edge + int64(i)
			return false
		}
		if p.Of(int64(id)) >= 0 {
			c.kept++
		}
		return true
	}
	if l := c.lists; l.Neighbors64 != nil {
		for i, id := range l.Neighbors64[c.edge : c.edge+c.edges] {
			if !take(i, id) {
				return
			}
		}
		return
	}
	for i, id := range c.lists.Neighbors[c.edge : c.edge+c.edges] {
		if !take(i, uint64(id)) {
			return
		}
	}
}

// fill writes the chunk's offsets and edges.
func (c *chunk) fill(p *Places, t *graph.Topology) {
	edge, pos := c.edge, c.start
	for i, d := range c.lists.Degrees[c.from:c.to] {
		for range d {
			var id int64
			if n := c.lists.Neighbors64; n != nil {
				id = int64(n[edge])
			} else {
				id = int64(c.lists.Neighbors[edge])
			}
			edge++
			row := p.Of(id)
			if row < 0 {
				continue
			}
			if t.Wide() {
				t.Indices64[pos] = row
			} else {
				t.Indices32[pos] = uint32(row)
			}
			pos++
		}
		t.Indptr[c.row+int64(i)+1] = pos
	}
}
