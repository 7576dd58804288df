package planner

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"helios/cache/superbatch"
	"helios/cache/trace"
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
	notes   []string
	Rows    int64
	bytes   int // of a row, as a trace has it
	Batches int // batches that an epoch has
	Most    int // batches that can be had
	drawn   []*Batch
	Draw    func(ctx context.Context, i int) (*Batch, error)
	close   func() error
	Wide    bool
	// Topology is its bytes, 0 where nobody knows; edges likewise.
	Topology, Edges int64
	graph           Graph
	// row is the row of a rank.
	row     func(rank int64) int64
	sampled plan.Config
	// Popularity is the settled distribution of draws; nil: nothing is drawn.
	Popularity *Popularity
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
			"%v %s: no skew and no degrees describe its draws; plan for a dataset or a trace",
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

// maxTraced is the number of rows of a trace that are kept.
const maxTraced = 16 << 20

// fromTrace takes the mini-batches of a trace's first epoch. g has what the trace does not say.
func fromTrace(ctx context.Context, path string, g *Graph, c *plan.Config) (_ *Accesses,
	err error) {
	r, err := trace.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	h := r.Header()
	if free, err := hostmem.AvailableBytes(); err == nil && h.Rows > free/32 {
		return nil, errs.New(errs.Capability,
			"trace %s: a plan for its %d rows needs %s of memory, and %s can be had; use a machine with more, if the trace is right",
			path, h.Rows, units.FormatBytes(32*h.Rows), units.FormatBytes(free))
	}
	g.Name, g.Nodes = h.Name, h.Rows
	c.Batch, c.Seed, c.SeedZero, c.Sampler = int(h.Batch), h.Seed, h.Seed == 0, h.Sampler
	c.Fanouts = nil
	for _, f := range h.Fanouts {
		c.Fanouts = append(c.Fanouts, int(f))
	}
	a := &Accesses{By: "trace " + path, Rows: h.Rows, bytes: int(h.RowBytes), Edges: g.Edges}
	a.Topology, a.Wide = TopologyBytes(g.Nodes, g.Edges)
	if g.Edges == 0 {
		a.Topology = 0
		a.notes = append(a.notes,
			"a trace does not say how many edges its graph has: the topology's memory is not counted")
	}
	counts, kept, epoch := make([]uint32, h.Rows), 0, -1
	err = r.Play(trace.Visitor{Batch: func(b *trace.Batch) error {
		if b.Kind != trace.Train || epoch >= 0 && b.Epoch != epoch {
			return prepare.Interrupted(ctx)
		}
		epoch = b.Epoch
		a.Batches++
		rows := slices.Concat(b.Parts...)
		for _, v := range rows {
			if counts[v] < math.MaxUint32 {
				counts[v]++
			}
		}
		if next := len(a.drawn)+1 == a.Batches; next && len(rows) > 0 &&
			(kept == 0 || kept+len(rows) <= maxTraced) {
			kept += len(rows)
			a.drawn = append(a.drawn, &Batch{Rows: rows,
				Shape: tracedShape(b.Parts, c.Batch, c.Fanouts, g)})
		}
		return prepare.Interrupted(ctx)
	}})
	if err != nil {
		return nil, err
	}
	if a.Most = len(a.drawn); a.Most == 0 {
		return nil, errs.New(errs.Usage,
			"trace %s holds no mini-batch of training: nothing to plan for", path)
	}
	scores, err := r.Hotness()
	if err != nil {
		return nil, err
	}
	a.hot = "what placed the traced run's rows: " + h.HotnessBy
	if scores == nil {
		scores, a.hot = counts, "the epoch's own accesses"
		a.notes = append(a.notes,
			"the trace has no hotness, so rows are placed by what the trace itself accesses: hits are the most that could be")
	}
	a.notes = append(a.notes,
		"a trace holds accesses alone: how many edges each hop has is estimated from the fanouts")
	a.rank(scores)
	return a, nil
}

// rank fills in the ranks of what was drawn.
func (a *Accesses) rank(scores []uint32) {
	ranks, order := ranksOf(scores)
	a.row = func(rank int64) int64 { return int64(order[rank]) }
	for _, b := range a.drawn {
		setRanks(b, ranks)
	}
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

// tracedShape estimates a shape from the rows of the lookups: of each hop where there were as many,
// else hops that grow by one factor.
func tracedShape(parts [][]int64, batchSize int, fanouts []int, g *Graph) cost.Shape {
	total := int64(0)
	for _, p := range parts {
		total += int64(len(p))
	}
	hopEnd := []int64{}
	if len(parts) == len(fanouts)+1 {
		end := int64(0)
		for _, p := range parts {
			end += int64(len(p))
			hopEnd = append(hopEnd, end)
		}
	} else {
		seeds := min(int64(batchSize), total)
		lo, hi := 0.0, 1.0
		grown := func(k float64) (ends []int64) {
			n := float64(seeds)
			ends = []int64{seeds}
			for _, f := range fanouts {
				n = min(n*(1+k*fanout(f, g)), float64(total))
				ends = append(ends, int64(n))
			}
			return ends
		}
		for range 50 {
			if ends := grown((lo + hi) / 2); ends[len(ends)-1] < total {
				lo = (lo + hi) / 2
			} else {
				hi = (lo + hi) / 2
			}
		}
		hopEnd = grown(hi)
		hopEnd[len(hopEnd)-1] = total
	}
	edges := make([]int64, len(fanouts))
	for h, f := range fanouts {
		edges[h] = max(int64(float64(hopEnd[h])*fanout(f, g)), hopEnd[h+1]-hopEnd[h])
	}
	return cost.MadeUp(hopEnd, edges)
}

// fanout is a fanout where the graph's edges bound it, if it is known how many there are.
func fanout(f int, g *Graph) float64 {
	mean := float64(g.Edges) / float64(max(g.Nodes, 1))
	if mean == 0 {
		return float64(max(f, 1))
	}
	return (&Popularity{}).drawn(f, mean)
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
	train, err := prepare.TrainSplit(in)
	if err != nil {
		return nil, err
	}
	if len(train) == 0 {
		return nil, errs.New(errs.Usage, "dataset %s has no training nodes",
			in.Dataset.Meta.Name)
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
