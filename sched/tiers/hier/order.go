package hier

import (
	"slices"

	"helios/graph"
	"helios/graph/induced"
	"helios/internal/philox"
	"helios/sched/prepare"
)

// MegaBatches deal the training nodes of a partitioned graph to mega-batches: parts that are in
// memory together.
type MegaBatches struct {
	Numbering *induced.Numbering
	// Train are the training nodes by their numbers in the partitioned graph, in the split's order.
	Train []int64
	// Labels are those of Train, -1 where there is none: mega-batches mix them. nil: they don't.
	Labels []int32
	// Loaded bounds the parts of a mega-batch.
	Loaded int
	// Fixed parts, the first, have all training nodes: an epoch is one mega-batch of them and of
	// Loaded-Fixed others. 0: each epoch has all parts, in mega-batches that share none.
	Fixed int
	Batch int
	Seed  uint64

	// By part, whether it has training nodes.
	seeds []bool
	mix   *mixture // of Labels; nil: none
}

// NewMegaBatches takes m over.
func NewMegaBatches(m MegaBatches) *MegaBatches {
	m.seeds = make([]bool, m.Numbering.Parts())
	for _, id := range m.Train {
		m.seeds[m.Numbering.PartOf(id)] = true
	}
	if m.Labels != nil && m.Fixed == 0 {
		m.mix = newMixture(&m)
	}
	return &m
}

// draw returns the seed of one use in an epoch: its parts, or a pass over a mega-batch.
func (m *MegaBatches) draw(sampleEpoch, mega, pass int) uint64 {
	w := philox.Block(philox.Key(m.Seed, philox.StreamMega),
		[4]uint32{uint32(sampleEpoch), uint32(mega), uint32(pass)})
	return uint64(w[0])<<32 | uint64(w[1])
}

// Parts returns the parts of an epoch's mega-batches, each in ascending order. Those without a
// training node are left out: nothing would train on them.
func (m *MegaBatches) Parts(sampleEpoch int) (all [][]int) {
	count := m.Numbering.Parts()
	ids := make([]int64, count-m.Fixed)
	for i := range ids {
		ids[i] = int64(m.Fixed + i)
	}
	graph.Shuffle(ids, ids, m.draw(sampleEpoch, 0, 0), sampleEpoch)
	if m.mix != nil {
		m.mix.deal(ids, m.Loaded)
	}
	for len(all) == 0 || m.Fixed == 0 && len(ids) > 0 {
		parts := make([]int, m.Fixed, m.Loaded)
		for i := range parts {
			parts[i] = i
		}
		n := min(m.Loaded-m.Fixed, len(ids))
		for _, p := range ids[:n] {
			parts = append(parts, int(p))
		}
		ids = ids[n:]
		slices.Sort(parts)
		if slices.ContainsFunc(parts, func(p int) bool { return m.seeds[p] }) {
			all = append(all, parts)
		} else if len(ids) == 0 {
			break
		}
	}
	return all
}

// MegaOrder is an epoch's order over mega-batches.
type MegaOrder struct {
	prepare.Order
	Parts [][]int // of each mega-batch
	// Ends has the mini-batches before each mega-batch's end, and First those before the end of its
	// first pass.
	Ends, First []int
	ids         []int64 // of the seeds, in the partitioned graph
}

// Order deals an epoch's seeds to mega-batches. The first pass over a mega-batch has its seeds in
// the epoch's usual shuffle of train; each further pass has an order of its own. train has the
// nodes of Train by their numbers in the dataset.
func (m *MegaBatches) Order(train []int64, sampleEpoch, passes int) *MegaOrder {
	o := &MegaOrder{Parts: m.Parts(sampleEpoch)}
	of := make([]int, m.Numbering.Parts()) // by part, its mega-batch
	for k, parts := range o.Parts {
		for _, p := range parts {
			of[p] = k
		}
	}
	seeds, ids := make([]int64, len(train)), make([]int64, len(train))
	graph.Shuffle(seeds, train, m.Seed, sampleEpoch)
	graph.Shuffle(ids, m.Train, m.Seed, sampleEpoch)
	lists := make([][2][]int64, len(o.Parts))
	for i, id := range ids {
		l := &lists[of[m.Numbering.PartOf(id)]]
		l[0], l[1] = append(l[0], seeds[i]), append(l[1], id)
	}
	all, local := make([]int64, 0, len(train)*passes), make([]int64, 0, len(train)*passes)
	var ends []int
	for k, l := range lists {
		for pass := range passes {
			from := len(all)
			all, local = append(all, l[0]...), append(local, l[1]...)
			if pass > 0 {
				seed := m.draw(sampleEpoch, k, pass)
				graph.Shuffle(all[from:], l[0], seed, sampleEpoch)
				graph.Shuffle(local[from:], l[1], seed, sampleEpoch)
			}
			ends = append(ends, len(all))
		}
	}
	var lasts []int
	o.Order, lasts = prepare.NewSections(all, ends, m.Batch)
	o.ids = local
	for k := range lists {
		o.First, o.Ends = append(o.First, lasts[k*passes]), append(o.Ends, lasts[(k+1)*passes-1])
	}
	return o
}

// IDs returns the numbers in the partitioned graph of the seeds of mini-batch i of the whole pass.
func (o *MegaOrder) IDs(i int) []int64 {
	from, to := o.Bounds(i)
	return o.ids[from:to]
}

// Mega returns the mega-batch of mini-batch i of the whole pass.
func (o *MegaOrder) Mega(i int) int {
	k, _ := slices.BinarySearch(o.Ends, i+1)
	return k
}
