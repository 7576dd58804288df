package planner

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"helios/gnn"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
)

// A typed graph is planned for by the counts of its types and relations. A hop draws from each
// relation for the nodes of its destination's type that are in the mini-batch, as many neighbours
// as fanout and degree allow.
//
//   - Sources of a relation are drawn by how popular nodes of their type are; degrees of its
//     destinations spread exponentially around their mean.
//   - A relation that is the reverse of another has that one's edges, so its sources are any, and a
//     destination's degree follows from how popular it is: a Poisson number.
//
// All types have one exponent of popularity. Rows of all types are ranked together.

// NodeType is a type of a typed graph's nodes.
type NodeType struct {
	Name  string `json:"name"`
	Nodes int64  `json:"nodes"`
}

// Relation is a relation between types. Reverse: it has the edges of another, the other way.
type Relation struct {
	Src     string `json:"source"`
	Name    string `json:"name"`
	Dst     string `json:"destination"`
	Edges   int64  `json:"edges"`
	Reverse bool   `json:"reverse,omitempty"`
}

// bothWays adds the reverse of each relation behind it.
func bothWays(list ...Relation) (all []Relation) {
	for _, r := range list {
		all = append(all, r, Relation{Src: r.Dst, Name: "rev_" + r.Name, Dst: r.Src, Edges: r.Edges,
			Reverse: true})
	}
	return all
}

// schema are the types of a graph, all of which have rows, those of the first are seeds; nil: it
// has none.
func (g *Graph) schema() *graph.Schema {
	if len(g.Types) == 0 {
		return nil
	}
	s, index := &graph.Schema{}, map[string]int{}
	for i, t := range g.Types {
		index[t.Name] = i
		s.Types = append(s.Types, graph.NodeType{Name: t.Name, Nodes: t.Nodes, Dim: g.Dim})
	}
	for _, r := range g.Relations {
		s.Relations = append(s.Relations, graph.Relation{Name: r.Name, Src: index[r.Src],
			Dst: index[r.Dst]})
	}
	return s
}

// fanoutsOf are those of a typed graph's relations.
func fanoutsOf(c *plan.Config, s *graph.Schema) ([][]int, error) {
	all, err := prepare.RelationFanouts(c, s)
	if all == nil {
		all = slices.Repeat([][]int{c.Fanouts}, len(s.Relations))
	}
	return all, err
}

// edgesBytes are the bytes of a relation's offsets and ids.
func edgesBytes(s *graph.Schema, r int, edges int64) (offsets, ids int64) {
	offsets, width := 8*(s.Types[s.Relations[r].Dst].Nodes+1), int64(4)
	if s.Types[s.Relations[r].Src].Nodes > math.MaxUint32 {
		width = 8
	}
	return offsets, width * edges
}

// cell is a run of ranks of a type. weight is how often each of them is met.
type cell struct {
	kind     int
	from, to int64
	chance   float64
	weight   float64
	first    int64 // rank among all types
}

// typed draws mini-batches of a typed graph.
type typed struct {
	*cost.Typed
	g     *Graph
	pop   *Popularity
	cells [][]cell // by type
	order []cell   // the most popular first
}

// layCells divides the ranks of each type by their logarithm.
func (x *typed) layCells() {
	x.cells = make([][]cell, len(x.Schema.Types))
	for t, kind := range x.Schema.Types {
		n := kind.Nodes
		for i, from := 0, int64(0); from < n; i++ {
			to := min(int64(math.Pow(float64(n)+1, float64(i+1)/steps)), n)
			if i+1 >= steps {
				to = n
			}
			if to > from {
				x.cells[t] = append(x.cells[t], cell{kind: t, from: from, to: to,
					chance: (x.pop.Below(to, n) - x.pop.Below(from, n)) / float64(to-from)})
				from = to
			}
		}
	}
}

// cellOf is the cell of a rank.
func (x *typed) cellOf(t int, rank int64) *cell {
	i, found := slices.BinarySearchFunc(x.cells[t], rank,
		func(c cell, r int64) int { return cmp.Compare(c.from, r) })
	if !found {
		i--
	}
	return &x.cells[t][i]
}

// drawn is the number of neighbours by relation r that a node of a cell draws in hop h.
func (x *typed) drawn(r, h int, c *cell) float64 {
	edges, f := float64(x.g.Relations[r].Edges), x.Fanouts[r][h]
	if x.g.Relations[r].Reverse {
		return poissonBelow(edges*c.chance, f)
	}
	return x.pop.drawn(f, edges/float64(x.Schema.Types[c.kind].Nodes))
}

// poissonBelow is the mean of a Poisson number of a mean, but at most f; -1: any.
func poissonBelow(mean float64, f int) float64 {
	if f < 0 || mean == 0 {
		return mean
	}
	p, below := math.Exp(-mean), 0.0
	for j := range f {
		below += float64(f-j) * p
		p *= mean / float64(j+1)
	}
	return float64(f) - below
}

// met are the sums over cells so far.
type met struct {
	popular []float64 // draws of each type by popularity
	any     []float64 // and those of any node, seeds included
}

// chance is that of a node of a cell to be in the mini-batch.
func (m *met) chance(c *cell, nodes int64) float64 {
	return -math.Expm1(-m.popular[c.kind]*c.chance - m.any[c.kind]/float64(nodes))
}

// hops sums what a mini-batch accesses: by hop the edges of each relation and then the nodes of
// each type, those of the seeds first, and the share of the rows that the hottest part of all has.
func (x *typed) hops(seeds, hot float64) (edges, nodes [][]float64, share float64) {
	s := x.Schema
	m := met{popular: make([]float64, len(s.Types)), any: make([]float64, len(s.Types))}
	m.any[s.Seeds] = seeds
	now := slices.Clone(m.any)
	nodes = append(nodes, now)
	for h := range x.Fanouts[0] {
		was := met{popular: slices.Clone(m.popular), any: slices.Clone(m.any)}
		list := make([]float64, len(s.Relations))
		for r, relation := range s.Relations {
			to := s.Types[relation.Dst].Nodes
			for i := range x.cells[relation.Dst] {
				c := &x.cells[relation.Dst][i]
				list[r] += float64(c.to-c.from) * was.chance(c, to) * x.drawn(r, h, c)
			}
			if x.g.Relations[r].Reverse {
				m.any[relation.Src] += list[r]
			} else {
				m.popular[relation.Src] += list[r]
			}
		}
		now = make([]float64, len(s.Types))
		for t := range now {
			for i := range x.cells[t] {
				c := &x.cells[t][i]
				now[t] += float64(c.to-c.from) * m.chance(c, s.Types[t].Nodes)
			}
		}
		edges, nodes = append(edges, list), append(nodes, now)
	}
	x.rank(&m)
	left, of, all := hot*float64(s.Rows()), 0.0, 0.0
	for i := range x.order {
		c := &x.order[i]
		n, p := float64(c.to-c.from), m.chance(c, s.Types[c.kind].Nodes)
		all += n * p
		of += max(min(n, left), 0) * p
		left -= n
	}
	return edges, nodes, of / max(all, 1e-300)
}

// rank orders the cells of all types by how often their nodes are met.
func (x *typed) rank(m *met) {
	x.order = x.order[:0]
	for t := range x.cells {
		for i := range x.cells[t] {
			c := &x.cells[t][i]
			c.weight = m.popular[t]*c.chance + m.any[t]/float64(x.Schema.Types[t].Nodes)
			x.order = append(x.order, *c)
		}
	}
	slices.SortStableFunc(x.order, func(a, b cell) int { return cmp.Compare(b.weight, a.weight) })
	first := int64(0)
	for i := range x.order {
		c := &x.order[i]
		c.first = first
		x.cellOf(c.kind, c.from).first = first
		first += c.to - c.from
	}
}

// fromTypes draws mini-batches of a typed graph that need not exist.
func fromTypes(g *Graph, p *Popularity, c plan.Config) (*Accesses, error) {
	s := g.schema()
	if err := prepare.CheckSchema(&c, s); err != nil {
		return nil, err
	}
	if err := countsNoLists(&c); err != nil {
		return nil, err
	}
	if c.Featureless {
		return nil, errs.New(errs.Capability, "a plan reads rows; leave {featureless} out")
	}
	fanouts, err := fanoutsOf(&c, s)
	if err != nil {
		return nil, err
	}
	pop := *p
	x := &typed{Typed: &cost.Typed{Schema: s, Fanouts: fanouts}, g: g, pop: &pop}
	train := max(int64(float64(s.Types[s.Seeds].Nodes)*g.Train), 1)
	seeds := min(int64(c.Batch), train)
	if err := pop.settleBy(float64(seeds), s.Rows(), func() float64 {
		x.layCells()
		_, _, share := x.hops(float64(seeds), pop.rows)
		return share
	}); err != nil {
		return nil, err
	}
	x.layCells()
	edges, _, _ := x.hops(float64(seeds), 1)
	sum := 0.0
	for _, list := range edges {
		for _, n := range list {
			sum += n
		}
	}
	if sum > maxDraws {
		return nil, errs.New(errs.Usage,
			"a mini-batch of %d seeds at fanout %v of each relation draws %s edges: at most %s can be planned for; give smaller ones",
			seeds, c.Fanouts, units.FormatCount(sum), units.FormatCount(maxDraws))
	}
	a := &Accesses{By: pop.by, hot: "how often a node is drawn", Rows: s.Rows(),
		Batches: int((train + int64(c.Batch) - 1) / int64(c.Batch)), Most: math.MaxInt32,
		Edges: g.Edges, Popularity: &pop, typed: x.Typed}
	if pop.rows > 0 {
		a.By += fmt.Sprintf(" (1/rank^%.3g within each type)", pop.power)
	}
	for _, r := range g.Relations {
		a.relationEdges = append(a.relationEdges, r.Edges)
	}
	a.countTopology()
	place := make([]places, len(s.Types))
	for t, kind := range s.Types {
		place[t] = newPlaces(kind.Nodes, philox.Mix(c.Seed+uint64(t)<<32))
	}
	a.row = func(rank int64) int64 {
		k := x.byRank(rank)
		return s.First(k.kind) + place[k.kind].row(k.from+rank-k.first)
	}
	a.runOf = func(rank int64) (int, int64) {
		k := x.byRank(rank)
		return k.kind, k.first + k.to - k.from
	}
	a.Draw = func(_ context.Context, i int) (*Batch, error) {
		return x.draw(place, int(seeds), philox.Mix(c.Seed^philox.Mix(uint64(i)+1))), nil
	}
	return a, nil
}

// countsNoLists refuses draws from typed graphs that are not by the list of a relation alone.
func countsNoLists(c *plan.Config) error {
	if c.RelationFanouts == prepare.Together {
		return errs.New(errs.Capability,
			"{relation-fanout} %s: a plan counts fanouts by relation; leave it out", prepare.Together)
	}
	if m := c.Method(); m.WholeLists {
		return errs.New(errs.Capability,
			"{sampler} %s reads whole lists, which a plan does not count by relation; plan for {sampler} %s",
			m.Name, graph.Neighbor)
	}
	return nil
}

// byRank is the cell of a rank among all types.
func (x *typed) byRank(rank int64) *cell {
	i, found := slices.BinarySearchFunc(x.order, rank,
		func(c cell, r int64) int { return cmp.Compare(c.first, r) })
	if !found {
		i--
	}
	return &x.order[i]
}

// draw draws one mini-batch.
func (x *typed) draw(place []places, seeds int, key uint64) *Batch {
	s, count := x.Schema, uint64(0)
	uniform := func() float64 {
		count++
		return float64(philox.Mix(key+count)>>11) / (1 << 53)
	}
	b, seen, ranks := &Batch{}, make([]*set, len(s.Types)), make([][]int64, len(s.Types))
	for t := range seen {
		seen[t] = NewSet(1024)
	}
	add := func(t int, rank int64) {
		if !seen[t].Add(rank) {
			return
		}
		ranks[t] = append(ranks[t], rank)
		c := x.cellOf(t, rank)
		b.Ranks = append(b.Ranks, c.first+rank-c.from)
		b.Rows = append(b.Rows, s.First(t)+place[t].row(rank))
	}
	anyOf := func(t int) int64 { return int64(uniform() * float64(s.Types[t].Nodes)) }
	for len(ranks[s.Seeds]) < seeds {
		add(s.Seeds, anyOf(s.Seeds))
	}
	hopEnd, edges := []int64{int64(seeds)}, []int64(nil)
	var hops [][]gnn.BlockShape
	for h := range x.Fanouts[0] {
		list := make([]gnn.BlockShape, len(s.Relations))
		for r, relation := range s.Relations {
			list[r].Dst = int64(len(ranks[relation.Dst]))
		}
		total := int64(0)
		for r, relation := range s.Relations {
			sum := 0.0
			for _, rank := range ranks[relation.Dst][:list[r].Dst] {
				sum += x.drawn(r, h, x.cellOf(relation.Dst, rank))
				if !x.g.Relations[r].Reverse { // all alike
					sum *= float64(list[r].Dst)
					break
				}
			}
			n := int64(math.Round(sum))
			list[r].Edges, total = n, total+n
			for range n {
				if x.g.Relations[r].Reverse {
					add(relation.Src, anyOf(relation.Src))
				} else {
					add(relation.Src, x.pop.Rank(uniform(), s.Types[relation.Src].Nodes))
				}
			}
		}
		for r, relation := range s.Relations {
			list[r].Src = int64(len(ranks[relation.Src]))
		}
		hops, edges = append(hops, list), append(edges, total)
		hopEnd = append(hopEnd, int64(len(b.Rows)))
	}
	b.Shape = cost.MadeUp(hopEnd, edges)
	b.Shape.SplitRelations(hops)
	return b
}

// countTopology counts the bytes of a typed graph's offsets and ids.
func (a *Accesses) countTopology() {
	a.Topology = 0
	for r, n := range a.relationEdges {
		offsets, ids := edgesBytes(a.typed.Schema, r, n)
		a.Topology += offsets + ids
	}
}

// TypePlan describes a type in a plan. Offsets and ids are of the relations into it; the tiers'
// bytes are those that its rows have where the tiers hold the hottest rows.
type TypePlan struct {
	Name     string `json:"name"`
	Nodes    int64  `json:"nodes"`
	Rows     int64  `json:"row_bytes"` // of all its rows
	Offsets  int64  `json:"offset_bytes"`
	IDs      int64  `json:"id_bytes"`
	GPUCache int64  `json:"gpu_cache_bytes"`
	CPUCache int64  `json:"cpu_cache_bytes"`
	// NodesByHop are those of a mini-batch up to each hop, the seeds first: the mean.
	NodesByHop []float64 `json:"nodes_by_hop"`
}

// RelationPlan describes a relation in a plan. EdgesByHop are those of a mini-batch: the mean.
type RelationPlan struct {
	Name       string    `json:"name"`
	Edges      int64     `json:"edges"`
	Fanouts    []int     `json:"fanout"`
	EdgesByHop []float64 `json:"edges_by_hop"`
}

// types fills in what a plan says of types and relations.
func (j *Job) types(p *Plan) {
	a := j.Accesses
	if a.typed == nil {
		return
	}
	s, n, hops := a.typed.Schema, float64(len(a.drawn)), len(j.Config.Fanouts)
	for _, kind := range s.Types {
		p.Types = append(p.Types, TypePlan{Name: kind.Name, Nodes: kind.Nodes,
			Rows: kind.Nodes * j.RowBytes, NodesByHop: make([]float64, hops+1)})
	}
	for r, edges := range a.relationEdges {
		offsets, ids := edgesBytes(s, r, edges)
		p.Types[s.Relations[r].Dst].Offsets += offsets
		p.Types[s.Relations[r].Dst].IDs += ids
		p.Relations = append(p.Relations, RelationPlan{Name: s.RelationName(r), Edges: edges,
			Fanouts: a.typed.Fanouts[r], EdgesByHop: make([]float64, hops)})
	}
	for _, b := range a.drawn {
		for h := range hops {
			src := map[int]int64{}
			for r, x := range b.Shape.Relations(h) {
				p.Relations[r].EdgesByHop[h] += float64(x.Edges) / n
				src[s.Relations[r].Src] = x.Src
			}
			for t, nodes := range src {
				p.Types[t].NodesByHop[h+1] += float64(nodes) / n
			}
		}
		p.Types[s.Seeds].NodesByHop[0] += float64(b.Shape.Seeds) / n
	}
	for rank := int64(0); rank < j.Sizes.GPURows+j.Sizes.CPURows && rank < a.Rows; {
		end := min(j.Sizes.GPURows+j.Sizes.CPURows, a.Rows)
		if rank < j.Sizes.GPURows {
			end = min(j.Sizes.GPURows, a.Rows)
		}
		t, to := a.typeAt(rank)
		to = min(to, end)
		bytes := (to - rank) * j.RowBytes
		if rank < j.Sizes.GPURows {
			p.Types[t].GPUCache += bytes
		} else {
			p.Types[t].CPUCache += bytes
		}
		rank = to
	}
}

// typeAt is the type of a rank, and the rank up to which those behind it are of the same type.
func (a *Accesses) typeAt(rank int64) (t int, to int64) {
	if a.runOf != nil {
		return a.runOf(rank)
	}
	row := a.row(rank)
	s := a.typed.Schema
	for row >= s.First(t+1) {
		t++
	}
	return t, rank + 1
}
