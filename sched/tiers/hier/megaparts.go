package hier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"helios/dataset/parted"
	"helios/graph/induced"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/tiers/hier/spec"
)

// MegaParts are the parts of a graph, a few of which are in memory together.
type MegaParts struct {
	*parted.Layout
	Numbering *induced.Numbering
	Fixed     int // first parts, which have all training nodes; 0: any part may
}

// NewMegaParts returns the parts of a layout, which order, one of spec.PartOrders, deals to
// mega-batches.
func NewMegaParts(l *parted.Layout, order string) (*MegaParts, error) {
	n, err := induced.NewNumbering(l.Base, l.Statics)
	if err != nil {
		return nil, err
	}
	p := &MegaParts{Layout: l, Numbering: n}
	if order == spec.PartsSequential {
		for _, id := range l.Train {
			p.Fixed = max(p.Fixed, n.PartOf(id)+1)
		}
	}
	return p, nil
}

// partSeed is the seed of the partitions that runs make: a dataset's parts are the same whatever
// the seed of a run.
const partSeed = 1

// partitionOf returns the partition that the configuration has, of a file or of training nodes that
// come first; nil: one is to be made by the options. Close it.
func partitionOf(ctx context.Context, s *prepare.Sampling, split []int64) (p *partition.Partition,
	o partition.Options, err error) {
	c, m := &s.Config, s.In.Dataset.Meta
	if path := c.PartitionFile; path != "" {
		if p, err = partition.Open(path); err != nil {
			return nil, o, err
		}
		if err := p.BelongsTo(m.UUID, m.Nodes, m.Edges); err != nil {
			return nil, o, errors.Join(err, p.Close())
		}
		return p, o, nil
	}
	o = partition.Options{Parts: partsOf(c, s.Rows*s.RowBytes, s.Rows), Method: Partitioner(c),
		Seed: partSeed}
	if int64(o.Parts) > s.Rows {
		return nil, o, errs.New(errs.Usage, "%v %d: the graph has %d nodes; give at most so many",
			errs.Key("parts"), c.Parts, s.Rows)
	}
	if c.PartOrder != spec.PartsSequential {
		return nil, o, nil
	}
	if p, err = partition.Make(ctx, s.Topology, o); err != nil {
		return nil, o, err
	}
	p.Info.Dataset = m.UUID
	p.PackFirst(split)
	return p, o, nil
}

// EpochBytes returns the bytes that an epoch reads by the formula, with so many parts in memory.
func (p *MegaParts) EpochBytes(loaded int) (sum int64) {
	for part := p.Fixed; part < p.Parts; part++ {
		nodes := p.Base[part+1] - p.Base[part]
		sum += nodes*p.RowBytes + 4*(2*nodes+p.Edges[part])
	}
	if others := p.Parts - p.Fixed; p.Fixed > 0 && others > 0 {
		sum = int64(float64(sum) * float64(loaded-p.Fixed) / float64(others))
	}
	return sum
}

// largest adds up the largest n of some numbers.
func largest(of []int64, n int) (sum int64) {
	sorted := slices.Sorted(slices.Values(of))
	for _, v := range sorted[len(sorted)-min(n, len(sorted)):] {
		sum += v
	}
	return sum
}

// mostPages is the most pages that so many parts have in one of their sections.
func mostPages(runs []parted.Run, n int) int64 {
	all := make([]int64, len(runs))
	for i, r := range runs {
		all[i] = r.Pages
	}
	return largest(all, n)
}

// MegaNeeds is the CPU memory of mega-batches by its uses.
type MegaNeeds struct {
	StaticRows, StaticLists, Slab, Topology, Edges int64
	Slabs                                          int // mega-batches in memory at once
}

// Total adds up all of it.
func (n MegaNeeds) Total() int64 {
	return n.StaticRows + n.StaticLists + n.Edges + int64(n.Slabs)*(n.Slab+n.Topology)
}

func (n MegaNeeds) String() string {
	return fmt.Sprintf(
		"%s of static rows, %s of static lists, %s of edges as they are read, and for each of %d mega-batches in memory %s of rows and %s of topology",
		units.FormatBytes(n.StaticRows), units.FormatBytes(n.StaticLists),
		units.FormatBytes(n.Edges), n.Slabs, units.FormatBytes(n.Slab),
		units.FormatBytes(n.Topology))
}

// needs works out what mega-batches of so many parts take at most.
func (p *MegaParts) needs(loaded int, staticsOnGPU, ahead bool) (n MegaNeeds) {
	n.Slabs = 2
	if loaded >= p.Parts || !ahead {
		n.Slabs = 1
	}
	if !staticsOnGPU {
		n.StaticRows = p.StaticFeatures.Pages * p.Spec.PageBytes
	}
	n.StaticLists = p.StaticEdges.Pages * p.Spec.PageBytes
	n.Slab = mostPages(p.FeaturePages, loaded) * p.Spec.PageBytes
	n.Edges = mostPages(p.EdgePages, loaded) * p.Spec.PageBytes
	rows := p.StaticNodes() + n.Slab/p.RowBytes
	n.Topology = (rows+1)*8 + 4*(largest(p.Edges, loaded)+p.StaticEdgeCount)
	return n
}

// MegaRoom has the number of parts of a mega-batch, and the memory that they take.
type MegaRoom struct {
	MegaNeeds
	Loaded int
	Budget int64
	Rows   int64 // of the largest mega-batch: static nodes, and whole pages of parts
}

// Room chooses how many parts a mega-batch has, settled ones where that is above 0, and holds what
// they take against the budget.
func (p *MegaParts) Room(c *plan.Config, settled int, staticsOnGPU bool) (r MegaRoom, err error) {
	ahead := c.LoadAhead != spec.LoadAheadOff
	r.Budget = budget(c, p.Nodes*p.RowBytes)
	least := max(p.Fixed+1, 1)
	if p.Fixed > 0 && p.Fixed == p.Parts {
		least = p.Parts
	}
	want := c.MegaBatch.Of(p.Parts)
	if settled > 0 {
		want = settled
	}
	switch {
	case want > p.Parts:
		return r, errs.New(errs.Usage, "%v %d: there are %d parts; give at most so many",
			errs.Key("megabatch"), want, p.Parts)
	case want > 0 && want < least:
		return r, errs.New(errs.Usage,
			"%v %d: the first %d of %d parts have the training nodes and are in every mega-batch; give at least %d",
			errs.Key("megabatch"), want, p.Fixed, p.Parts, least)
	case want == 0:
		want = least
		for n := p.Parts; n > least; n-- {
			if p.needs(n, staticsOnGPU, ahead).Total() <= r.Budget {
				want = n
				break
			}
		}
	}
	r.MegaNeeds = p.needs(want, staticsOnGPU, ahead)
	if r.Total() > r.Budget {
		return r, errs.New(errs.Usage,
			"mega-batches of %d of %d parts take %s of CPU memory, and %v %v allows %s: %s; give more, lower %v or %v, or divide the graph into more parts (%v)",
			want, p.Parts, units.FormatBytes(r.Total()), errs.Key("cpu-cache"), c.CPUCache,
			units.FormatBytes(r.Budget), r.MegaNeeds, errs.Key("megabatch"),
			errs.Key("static-nodes"), errs.Key("parts"))
	}
	r.Loaded, r.Rows = want, p.StaticNodes()+r.Slab/p.RowBytes
	return r, nil
}

// Batches deal the training nodes to mega-batches of a room. labels are theirs, -1 where there is
// none, for orders that look at them.
func (p *MegaParts) Batches(c *plan.Config, r MegaRoom, labels []int32) *MegaBatches {
	if c.PartOrder != spec.PartsMixed {
		labels = nil
	}
	return NewMegaBatches(MegaBatches{Numbering: p.Numbering, Train: p.Train, Labels: labels,
		Loaded: r.Loaded, Fixed: p.Fixed, Batch: c.Batch, Seed: c.Seed})
}

// MegaPlaces say where the parts of a mega-batch go, and what of it has to be read.
type MegaPlaces struct {
	// Parts have the rows of their first nodes. Their lists are not there yet.
	Parts []induced.Part
	// At has, by part, the page of the slab where its rows begin.
	At              map[int]int64
	Features, Edges []prepare.PageRun
	// EdgesAt are the bytes in the buffer of edges where those of each part begin, and where the
	// last ones end.
	EdgesAt []int64
}

// Place places parts in a slab that holds the parts of was. A part of both that keeps its page is
// not read again.
func (p *MegaParts) Place(parts []int, was map[int]int64) (m MegaPlaces) {
	perPage := p.Spec.PageBytes / p.RowBytes
	m.At = map[int]int64{}
	page, place := int64(0), int64(0)
	for _, part := range parts {
		run := p.FeaturePages[part]
		m.Parts = append(m.Parts, induced.Part{Part: part, First: p.StaticNodes() + page*perPage})
		// Parts of a mega-batch do not overlap, so a part that keeps its page is intact.
		if before, ok := was[part]; !ok || before != page {
			m.Features = append(m.Features, prepare.PageRun{Run: run, At: page})
		}
		m.At[part] = page
		page += run.Pages
		m.EdgesAt = append(m.EdgesAt, place*p.Spec.PageBytes)
		m.Edges = append(m.Edges, prepare.PageRun{Run: p.EdgePages[part], At: place})
		place += p.EdgePages[part].Pages
	}
	m.EdgesAt = append(m.EdgesAt, place*p.Spec.PageBytes)
	return m
}

// Section returns the bytes of the i-th part's edges in the buffer of edges.
func (m *MegaPlaces) Section(i int, raw []byte) []byte { return raw[m.EdgesAt[i]:m.EdgesAt[i+1]] }

// ChoosePasses chooses the passes over a mega-batch by the times that it loads and trains.
func ChoosePasses(load, train time.Duration) int {
	if train <= 0 {
		return 1
	}
	return int(min(max(load/train, 1), spec.MostPassesAuto))
}
