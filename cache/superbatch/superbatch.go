// Package superbatch finds what a cache of rows should hold while a superbatch trains: mini-batches
// whose rows are known because all of them were sampled beforehand (Ginex: Park et al., VLDB 2022,
// section 4). Inspect gives each mini-batch its changeset, so that nothing is decided while it
// trains. Begin and Play are its halves: mini-batches may train while Play is under way, each as
// soon as its own changeset is there.
//
// The choice is MIN with bypass at the grain of a mini-batch: of the rows that are cached and those
// that the mini-batch has gathered, the ones stay whose next accesses are the nearest. No choice
// that loads rows when they are needed reads fewer of them.
//
// The slots may be of two tiers, in GPU and in CPU memory (Config.GPU). Then no choice has fewer
// reads, and none has more hits in the GPU tier. So whatever a row from each costs, no placement of
// rows for the whole superbatch is better, where reading them first counts.
//
// The paper makes three passes over the accesses: count each node's, lay the counts out, and list
// the iterations of each node. Here one pass from the last access to the first gives every access
// its next one (Begin; the rows are divided among workers), and a pass forwards plays the cache
// (Play; one goroutine). Neither looks a cached row up: a row that stays writes its slot to where
// it is accessed next, the one write of Play that misses the CPU's caches. So the memory is twelve
// bytes an access and some forty a distinct row, or eight a row of a graph that has no more of them
// than there are accesses (Config.Nodes).
package superbatch

import (
	"context"
	"math"
	"slices"
	"sync"

	"helios/internal/errs"
)

// Accesses are the rows of a superbatch's mini-batches, each row once in a mini-batch.
type Accesses interface {
	// Batches is the number of mini-batches.
	Batches() int
	// Rows is the number of rows of a mini-batch, below 2^31.
	Rows(batch int) int
	// Read gives a mini-batch's rows, in an order that never changes. It may use buf. Several
	// goroutines call it at once.
	Read(batch int, buf []int64) ([]int64, error)
}

// Memory is a superbatch in memory.
type Memory [][]int64

// Batches implements Accesses.
func (m Memory) Batches() int { return len(m) }

// Rows implements Accesses.
func (m Memory) Rows(batch int) int { return len(m[batch]) }

// Read implements Accesses.
func (m Memory) Read(batch int, _ []int64) ([]int64, error) { return m[batch], nil }

// Config sets the size of a cache and its state.
type Config struct {
	Slots int64 // rows that it holds, below 2^31
	// GPU is the number of slots, the first ones, that are in GPU memory; the others are in CPU
	// memory. The rows of the two together do not depend on it. Of the rows that stay, those that
	// the mini-batch has and those that the GPU tier had compete for the GPU tier, and the ones
	// that are accessed next have it; see Changes.Demotions.
	GPU int64
	// Before has the rows that an earlier superbatch has left in a cache of as many slots; nil:
	// none.
	Before *State
	// Keep lets in rows whose next access is unknown, instead of rows that this superbatch has not
	// accessed: a later one may access them. It costs a move for each, and no read of this
	// superbatch. Of two tiers it also keeps those that have to leave the GPU tier. Then the tiers
	// hold what a single one would; without Keep they hold the same of the rows that this
	// superbatch accesses, and may lose others.
	Keep bool
	// Nodes is the number of rows that there are; 0: unknown. With no more of them than accesses
	// there is a table of all, which is the fastest.
	Nodes   int64
	Workers int // goroutines; below 1: one
}

// State is a cache between superbatches.
type State struct {
	Rows []int64 // by slot: the row that it holds, or Empty
	// Reuse are the slots in the order in which rows without a known use leave: first the empty
	// ones, then the row whose last access is the longest ago.
	Reuse []int32
}

// Without returns the state after the slots from a number on have lost their rows.
func (s *State) Without(from int64) *State {
	x := &State{Rows: slices.Clone(s.Rows), Reuse: make([]int32, 0, len(s.Reuse))}
	for i := range x.Rows[from:] {
		x.Rows[from+int64(i)] = Empty
	}
	for _, empty := range []bool{true, false} {
		for _, slot := range s.Reuse {
			if x.Rows[slot] == Empty == empty {
				x.Reuse = append(x.Reuse, slot)
			}
		}
	}
	return x
}

// Empty is the row of a slot that holds none.
const Empty = -1

// Miss is the slot of a row that is not cached.
const Miss = -1

// Move brings a row into the cache.
type Move struct {
	At   int32 // of a changeset: place of the row in its mini-batch; of Fill: in First
	Slot int32
}

// Changes are a superbatch's changesets. Those of a mini-batch are there once Wait has returned for
// it, and may be read beside Play.
type Changes struct {
	// First are rows to load before the first mini-batch, each into the slot of its Move: of a
	// Static.
	First []int64
	Fill  []Move

	starts []int64 // by mini-batch: its first access; one more at the end
	slots  []int32 // by access
	sets   []set   // by mini-batch
	player *player // nil once Play has ended

	mu     sync.Mutex
	played int           // mini-batches whose changesets are there
	failed error         // Play's
	more   chan struct{} // closed when one of the two changes

	// After is the cache after the last mini-batch. After and Stats are there once Play has ended.
	After State
	Stats Stats
}

// set is a changeset.
type set struct {
	moves     []Move
	demotions []Demotion
}

// Stats are totals of a superbatch.
type Stats struct {
	Accesses int64 // rows of all mini-batches
	Distinct int64 // rows, each once
	Hits     int64 // accesses of cached rows
	HitsGPU  int64 // of those, of rows in the GPU tier
	HitsCPU  int64 // and in the CPU tier
	Loaded   int64 // rows of First
	Inserted int64 // rows that changesets bring into the cache
	Promoted int64 // rows that moved from the CPU tier to the GPU tier, as they were accessed
	Demoted  int64 // rows that went the other way: Demotions, and moves as they were accessed
	Evicted  int64 // rows that left the cache for a move or a load
	Bytes    int64 // most memory that Begin and Play took at once
}

// Batches is the number of mini-batches.
func (c *Changes) Batches() int { return len(c.sets) }

// Wait returns once the changesets of a mini-batch, and of those before it, are there. It is for
// several goroutines.
func (c *Changes) Wait(ctx context.Context, batch int) error {
	for {
		c.mu.Lock()
		there, failed, more := c.played > batch, c.failed, c.more
		c.mu.Unlock()
		switch {
		case there:
			return nil
		case failed != nil:
			return failed
		}
		select {
		case <-more:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tell publishes the number of changesets, or their end.
func (c *Changes) tell(played int, failed error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.played, c.failed = played, failed
	close(c.more)
	c.more = make(chan struct{})
}

// Slots returns the slot of each row of a mini-batch, Miss where it has to be read. All of a
// mini-batch's rows are gathered before its Moves are made.
func (c *Changes) Slots(batch int) []int32 {
	return c.slots[c.starts[batch]:c.starts[batch+1]]
}

// Moves are the rows of a mini-batch that enter the cache, or change their tier, once it is
// gathered and after its Demotions. The rows in their slots leave. A slot stands in one Move of a
// mini-batch at most, and never is it the slot of a row of the mini-batch that stays there.
func (c *Changes) Moves(batch int) []Move { return c.sets[batch].moves }

// none is the mini-batch of an access that does not come.
const none = math.MaxUint32

// place is an access: a row's place in a mini-batch.
type place struct{ batch, pos uint32 }

// Inspect finds the changesets of a superbatch: Begin and Play. Equal accesses give equal
// changesets, whatever the number of workers.
func Inspect(ctx context.Context, a Accesses, c Config) (*Changes, error) {
	x, err := Begin(ctx, a, c)
	if err == nil {
		err = x.Play(ctx)
	}
	if err != nil {
		return nil, err
	}
	return x, nil
}

// Begin finds when each row is accessed next. a and c.Before are read until Play has ended.
func Begin(ctx context.Context, a Accesses, c Config) (*Changes, error) {
	n := a.Batches()
	if err := c.check(n); err != nil {
		return nil, err
	}
	x := &Changes{starts: make([]int64, n+1), sets: make([]set, n), more: make(chan struct{})}
	for b := range n {
		x.starts[b+1] = x.starts[b] + int64(a.Rows(b))
	}
	x.Stats.Accesses = x.starts[n]
	next, shards, err := lookAhead(ctx, a, x.starts, c.Nodes, max(c.Workers, 1))
	if err != nil {
		return nil, err
	}
	for _, s := range shards {
		x.Stats.Distinct += int64(s.n)
		x.Stats.Bytes += s.bytes()
	}
	x.slots = make([]int32, x.Stats.Accesses)
	for i := range x.slots {
		x.slots[i] = Miss
	}
	x.Stats.Bytes += x.Stats.Accesses * (8 + 4)
	p := &player{x: x, a: a, before: c.Before, shards: shards, slots: c.Slots, keep: c.Keep,
		next: next, wanted: make([]int64, n), upTo: make([]uint32, n),
		rows: make([]int64, c.Slots)}
	if c.GPU > 0 {
		p.tiers = &tiers{gpu: int32(c.GPU), in: NewMaxSet(x.Stats.Accesses)}
	}
	x.player = p
	return x, nil
}

// check refuses caches and superbatches that can't be.
func (c *Config) check(n int) error {
	switch {
	case c.Slots < 0 || c.Slots >= math.MaxInt32:
		return errs.New(errs.Usage,
			"a cache of %d rows for a superbatch: at least 0 and below 2^31 are possible", c.Slots)
	case c.GPU < 0 || c.GPU > c.Slots:
		return errs.New(errs.Failed,
			"superbatch: %d of a cache's %d rows are to be in GPU memory", c.GPU, c.Slots)
	case c.Before != nil && (int64(len(c.Before.Rows)) != c.Slots ||
		int64(len(c.Before.Reuse)) != c.Slots):
		return errs.New(errs.Failed,
			"superbatch: the cache has %d slots and was left with %d, %d of them in order", c.Slots,
			len(c.Before.Rows), len(c.Before.Reuse))
	case n >= none:
		return errs.New(errs.Usage, "a superbatch of %d mini-batches: below 2^32 are possible",
			n)
	}
	return nil
}

// Play finds the changesets, one after the other. It is called once. After an error Wait returns
// that for the changesets that are not there. Those of a Static are there already.
func (c *Changes) Play(ctx context.Context) error {
	p := c.player
	if p == nil {
		return nil
	}
	err := p.play(ctx)
	c.player = nil
	if err != nil {
		c.tell(c.played, err)
	}
	return err
}

// lookAhead gives each access the next one of its row, and for each row its first: from the last
// mini-batch to the first, the rows divided among the workers: by their number where there is a
// table of all nodes, else by their hash.
func lookAhead(ctx context.Context, a Accesses, starts []int64, nodes int64, workers int) ([]place,
	[]*shard, error) {
	next := make([]place, starts[len(starts)-1])
	shards, failed := make([]*shard, workers), make([]error, workers)
	each, ranged := (nodes+int64(workers)-1)/int64(workers), nodes > 0 && nodes <= int64(len(next))
	var wg sync.WaitGroup
	for w := range shards {
		var s *shard
		if ranged {
			s = newRange(min(int64(w)*each, nodes), min(int64(w+1)*each, nodes))
		} else {
			s = newShard(len(next) / workers)
		}
		shards[w] = s
		wg.Go(func() {
			var buf []int64
			for b := len(starts) - 2; b >= 0; b-- {
				if failed[w] = ctx.Err(); failed[w] != nil {
					return
				}
				rows, err := a.Read(b, buf)
				if err == nil && int64(len(rows)) != starts[b+1]-starts[b] {
					err = errs.New(errs.Failed,
						"superbatch: mini-batch %d has %d rows and was said to have %d", b,
						len(rows), starts[b+1]-starts[b])
				}
				if err != nil {
					failed[w] = err
					return
				}
				buf = rows[:0]
				if of := next[starts[b]:starts[b+1]]; ranged {
					s.meetRange(rows, uint32(b), of)
				} else {
					s.meet(rows, uint32(b), of, w, workers)
				}
			}
		})
	}
	wg.Wait()
	for _, err := range failed {
		if err != nil {
			return nil, nil, err
		}
	}
	return next, shards, nil
}

// find returns the first access of a row, a batch none where it has none.
func find(shards []*shard, row int64) place {
	if all := shards[0].rows; all != nil { // the first is as long as any
		s := shards[row/int64(len(all))]
		return s.rows[row-s.from]
	}
	h := hash(row)
	return shards[shardOf(h, len(shards))].get(row, h)
}
