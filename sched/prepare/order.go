package prepare

import (
	"slices"
	"sort"

	"helios/graph"
	"helios/internal/shardtree"
)

// Order is which seeds each mini-batch of a pass has. Whoever walks it counts its own mini-batches
// from 0; Index tells a mini-batch's number in the whole pass, which keys its draws. The zero value
// has no mini-batches.
type Order struct {
	seeds []int64
	batch int
	ends  []int // of mini-batches, where they are not cut at equal lengths
	// Of a rank: it has mini-batches from to from+count-1 of each step of shards. 0 shards: all.
	shards, from, count int
	picked              []int // the mini-batches that the walker has, in its order; nil: as above
}

// Pick returns some mini-batches of a whole order, by their numbers, in the order given.
func (o Order) Pick(batches []int) Order {
	o.picked = batches
	return o
}

// Share returns the mini-batches that one of several ranks has: its shards of each step.
func (o Order) Share(shards, rank, ranks int) Order {
	if ranks > 1 {
		from, end := shardtree.Share(shards, shards, rank, ranks)
		o.shards, o.from, o.count = shards, from, end-from
	}
	return o
}

// Equal reports whether two walkers have the same mini-batches.
func (o Order) Equal(x Order) bool {
	return o.batch == x.batch && o.shards == x.shards && o.from == x.from && o.count == x.count &&
		slices.Equal(o.seeds, x.seeds) && slices.Equal(o.ends, x.ends) &&
		slices.Equal(o.picked, x.picked)
}

// Whole returns the order of all ranks.
func (o Order) Whole() Order {
	o.shards, o.from, o.count, o.picked = 0, 0, 0, nil
	return o
}

// NewOrder cuts seeds, in their order, into mini-batches of batch; the last one may be shorter. The
// slice is used, not copied.
func NewOrder(seeds []int64, batch int) Order { return Order{seeds: seeds, batch: batch} }

// NewSections cuts sections of seeds, one behind the other, into mini-batches that never cross from
// one section to the next: the last of each may be shorter. A section ends before the seed that
// ends says; one without seeds has no mini-batches. lasts has the mini-batches before each
// section's end.
func NewSections(seeds []int64, ends []int, batch int) (o Order, lasts []int) {
	o = Order{seeds: seeds, ends: []int{}}
	from := 0
	for _, end := range ends {
		for from < end {
			from = min(from+batch, end)
			o.ends = append(o.ends, from)
		}
		lasts = append(lasts, len(o.ends))
	}
	return o, lasts
}

// Shuffled is the order of an epoch of training under the number of its samples.
func (s *Sampling) Shuffled(train []int64, sampleEpoch int) Order {
	order := make([]int64, len(train))
	graph.Shuffle(order, train, s.Config.Seed, sampleEpoch)
	return NewOrder(order, s.Config.Batch).Share(s.Config.Shards, s.Config.Rank, s.Config.Ranks)
}

// Len returns how many mini-batches there are.
func (o Order) Len() int {
	if o.picked != nil {
		return len(o.picked)
	}
	n := o.all()
	if o.shards == 0 {
		return n
	}
	return n/o.shards*o.count + min(max(n%o.shards-o.from, 0), o.count)
}

// all returns the number of mini-batches of all ranks.
func (o Order) all() int {
	if o.ends != nil {
		return len(o.ends)
	}
	if len(o.seeds) == 0 {
		return 0
	}
	return Batches(len(o.seeds), o.batch)
}

// Bounds returns where the seeds of mini-batch i are.
func (o Order) Bounds(i int) (from, to int) {
	if o.ends == nil {
		return i * o.batch, min((i+1)*o.batch, len(o.seeds))
	}
	if i > 0 {
		from = o.ends[i-1]
	}
	return from, o.ends[i]
}

// Seeds returns those of mini-batch i.
func (o Order) Seeds(i int) []int64 {
	from, to := o.Bounds(o.Index(i))
	return o.seeds[from:to]
}

// Index returns the number in the whole pass of mini-batch i.
func (o Order) Index(i int) int {
	if o.picked != nil {
		return o.picked[i]
	}
	if o.shards == 0 {
		return i
	}
	return i/o.count*o.shards + o.from + i%o.count
}

// Before returns how many of the walker's mini-batches have a number below index in the whole pass.
// None may be picked.
func (o Order) Before(index int) int {
	return sort.Search(o.Len(), func(i int) bool { return o.Index(i) >= index })
}
