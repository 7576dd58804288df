package planner

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"helios/cache/superbatch"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/philox"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/virtual"
)

// Batch is a mini-batch that is drawn.
type Batch = virtual.Drawn

// Accesses are the mini-batches of an epoch, made as they are asked for.
type Accesses struct {
	By      string // what they are from
	hot     string // what ranks rows
	Rows    int64
	Batches int // batches that an epoch has
	Most    int // batches that can be had
	drawn   []*Batch
	Draw    func(ctx context.Context, i int) (*Batch, error)
	close   func() error
	Wide    bool
	// Topology is its bytes, 0 where nobody knows; edges likewise.
	Topology, Edges int64
	// row is the row of a rank.
	row func(rank int64) int64
	// Popularity is the settled distribution of draws; nil: nothing is drawn.
	Popularity *Popularity
	// Of a typed graph: its schema and fanouts, the edges of its relations, and the type of a rank
	// with the end of the ranks behind it that are of the same (nil: row says).
	typed         *cost.Typed
	relationEdges []int64
	runOf         func(rank int64) (t int, to int64)
}

// Get is batch i; those after the last that can be had begin anew.
func (a *Accesses) Get(ctx context.Context, i int) (*Batch, error) {
	for i %= a.Most; i >= len(a.drawn); {
		if err := prepare.Interrupted(ctx); err != nil {
			return nil, err
		}
		b, err := a.Draw(ctx, len(a.drawn))
		if err != nil {
			return nil, err
		}
		a.drawn = append(a.drawn, b)
	}
	return a.drawn[i], nil
}

// TopologyBytes is the size of the in-neighbour lists of a graph.
func TopologyBytes(nodes, edges int64) (bytes int64, wide bool) {
	wide = nodes > math.MaxUint32
	id := int64(4)
	if wide {
		id = 8
	}
	return 8*(nodes+1) + id*edges, wide
}

// fromPopularity draws mini-batches of a graph that need not exist: the seeds are any nodes, and an
// edge's other end is drawn by how popular nodes are, whatever the edge's own node. So there are no
// neighbourhoods: a real graph's mini-batches have somewhat fewer different rows.
func fromPopularity(g Graph, p *Popularity, c plan.Config) (*Accesses, error) {
	if m := c.Method(); m.WholeLists || m.Dependent {
		return nil, errs.New(errs.Usage,
			"%v %s: no skew and no degrees describe its draws; plan for a dataset",
			errs.Key("sampler"), m.Name)
	}
	mean := float64(g.Edges) / float64(g.Nodes)
	per := make([]float64, len(c.Fanouts))
	for h, f := range c.Fanouts {
		per[h] = p.drawn(f, mean)
	}
	train := max(int64(float64(g.Nodes)*g.Train), 1)
	seeds := min(int64(c.Batch), train)
	pop := *p
	if err := pop.settle(float64(seeds), per, g.Nodes); err != nil {
		return nil, err
	}
	edges, _, _ := pop.hops(float64(seeds), per, g.Nodes, 1)
	sum := 0.0
	for _, e := range edges {
		sum += e
	}
	if sum > maxDraws {
		return nil, errs.New(errs.Usage,
			"a mini-batch of %d seeds at fanout %v draws %s edges: at most %s can be planned for; give smaller ones",
			seeds, c.Fanouts, units.FormatCount(sum), units.FormatCount(maxDraws))
	}
	a := &Accesses{By: pop.by, hot: "how often a node is drawn", Rows: g.Nodes,
		Batches: int((train + int64(c.Batch) - 1) / int64(c.Batch)), Most: math.MaxInt32,
		Edges: g.Edges, Popularity: &pop}
	a.Topology, a.Wide = TopologyBytes(g.Nodes, g.Edges)
	if pop.rows > 0 {
		a.By += fmt.Sprintf(" (1/rank^%.3g)", pop.power)
	}
	places := newPlaces(g.Nodes, philox.Mix(c.Seed))
	a.row = places.row
	a.Draw = func(_ context.Context, i int) (*Batch, error) {
		return drawBatch(&pop, places, g.Nodes, int(seeds), per, philox.Mix(c.Seed^philox.Mix(
			uint64(i)+1))), nil
	}
	return a, nil
}

// maxDraws bounds a mini-batch that is drawn here.
const maxDraws = 1 << 27

// drawBatch draws one mini-batch.
func drawBatch(p *Popularity, at places, nodes int64, seeds int, per []float64,
	key uint64) *Batch {
	count := uint64(0)
	uniform := func() float64 {
		count++
		return float64(philox.Mix(key+count)>>11) / (1 << 53)
	}
	met, ranks := NewSet(4*seeds), make([]int64, 0, 4*seeds)
	for len(ranks) < seeds {
		if r := int64(uniform() * float64(nodes)); met.Add(r) {
			ranks = append(ranks, r)
		}
	}
	hopEnd, edges := []int64{int64(seeds)}, []int64(nil)
	for _, k := range per {
		n := int64(math.Round(float64(len(ranks)) * k))
		for range n {
			if r := p.Rank(uniform(), nodes); met.Add(r) {
				ranks = append(ranks, r)
			}
		}
		edges, hopEnd = append(edges, n), append(hopEnd, int64(len(ranks)))
	}
	b := &Batch{Shape: cost.MadeUp(hopEnd, edges), Ranks: ranks, Rows: make([]int64, len(ranks))}
	for i, r := range ranks {
		b.Rows[i] = at.row(r)
	}
	return b
}

// Hottest is the state of a cache that earlier epochs have filled: it holds the hottest rows, and
// the least hot one of them goes first. Where met is given, the slots of rows that none of those
// batches accesses are empty, which looks up fewer rows: in one tier they leave in the same order
// and are never read, so nothing that a plan counts is another.
func (a *Accesses) Hottest(slots int64, met []*Batch) *superbatch.State {
	n := min(slots, a.Rows)
	s := &superbatch.State{Rows: make([]int64, slots), Reuse: make([]int32, 0, slots)}
	for i := range s.Rows {
		s.Rows[i] = superbatch.Empty
		if int64(i) < n && met == nil {
			s.Rows[i] = a.row(int64(i))
		}
	}
	for _, b := range met {
		for k, rank := range b.Ranks {
			if rank < n {
				s.Rows[rank] = b.Rows[k]
			}
		}
	}
	for i := range slots - n {
		s.Reuse = append(s.Reuse, int32(n+i))
	}
	for i := range n {
		s.Reuse = append(s.Reuse, int32(n-1-i))
	}
	return s
}

func setRanks(b *Batch, ranks []uint32) {
	b.Ranks = make([]int64, len(b.Rows))
	for i, v := range b.Rows {
		b.Ranks[i] = int64(ranks[v])
	}
}

// ranksOf gives each row its rank by score, the highest first, of equals the one with the lower
// number, and each rank its row.
func ranksOf(scores []uint32) (ranks, order []uint32) {
	order = make([]uint32, len(scores))
	for i := range order {
		order[i] = uint32(i)
	}
	slices.SortFunc(order, func(x, y uint32) int {
		switch {
		case scores[x] != scores[y]:
			if scores[x] > scores[y] {
				return -1
			}
			return 1
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return 0
	})
	ranks = make([]uint32, len(scores))
	for rank, row := range order {
		ranks[row] = uint32(rank)
	}
	return ranks, order
}

// fromDataset samples the mini-batches of a dataset's first epoch.
func fromDataset(ctx context.Context, c plan.Config, hotness string, in prepare.Inputs,
	obs report.Observer) (_ *Accesses, err error) {
	asked := c
	if hotness != "" { // tiers place by something of their own; here rows only need an order
		asked.Hotness = hotness
	}
	s, err := prepare.Open(ctx, asked, in, obs)
	if err != nil {
		return nil, err
	}
	a := &Accesses{By: "samples of dataset " + in.Dataset.Meta.Name, Rows: s.Rows, close: s.Close,
		Topology: s.Topology.Bytes(), Wide: s.Topology.Wide(), Edges: in.Dataset.Meta.Edges}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.Rows > math.MaxUint32 {
		return nil, errs.New(errs.Capability,
			"dataset %s has %d rows, and at most 2^32 can be sampled for a plan; plan by a skew",
			in.Dataset.Meta.Name, s.Rows)
	}
	if schema := prepare.SchemaOf(&in.Dataset.Meta); schema != nil {
		if schema.Rows() < schema.First(len(schema.Types)) {
			return nil, errs.New(errs.Capability,
				"dataset %s has types without rows, whose learned tables no plan knows; plan for rows (import's {fill})",
				in.Dataset.Meta.Name)
		}
		if err := countsNoLists(&c); err != nil {
			return nil, err
		}
		a.typed = &cost.Typed{Schema: schema}
		if a.typed.Fanouts, err = fanoutsOf(&c, schema); err != nil {
			return nil, err
		}
		for _, r := range in.Dataset.Meta.Relations {
			a.relationEdges = append(a.relationEdges, r.Edges)
		}
	}
	train, err := prepare.TrainSplit(in)
	if err != nil {
		return nil, err
	}
	scores, err := s.Scores(ctx)
	if err != nil {
		return nil, err
	}
	ranks, order := ranksOf(scores)
	a.row = func(rank int64) int64 { return int64(order[rank]) }
	a.hot = s.Hotness.String()
	epoch := c.SampleEpoch(0)
	seeds := s.Shuffled(train, epoch)
	a.Batches = seeds.Len()
	a.Most = a.Batches
	mb, err := s.NewBatch()
	if err != nil {
		return nil, err
	}
	a.Draw = func(ctx context.Context, i int) (*Batch, error) {
		if err := s.SampleWhole(ctx, mb, epoch, i, seeds.Seeds(i)); err != nil {
			return nil, fmt.Errorf("batch %d: %w", i, err)
		}
		b := &Batch{Shape: cost.ShapeOf(mb)}
		if a.typed != nil {
			b.Shape.SplitRelations(cost.RelationsOf(mb, a.typed.Schema))
		}
		nodes := hostmem.View[int64](mb.Nodes.Bytes())
		if s.Config.Method().WholeLists {
			b.Shape.CountLists(s.Topology.Indptr, nodes)
		}
		b.Rows = slices.Clone(nodes[:mb.HopEnd[len(mb.HopEnd)-1]])
		setRanks(b, ranks)
		return b, nil
	}
	return a, nil
}
