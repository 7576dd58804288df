// Package superbatch finds what a cache of rows should hold while a superbatch trains: mini-batches
// whose rows are known because all of them were sampled beforehand (Ginex: Park et al., VLDB 2022,
// section 4). Inspect gives each mini-batch its changeset, so that nothing is decided while the
// superbatch trains.
//
// The choice is MIN with bypass at the grain of a mini-batch: of the rows that are cached and those
// that the mini-batch has gathered, the ones stay whose next accesses are the nearest. No choice
// that loads rows when they are needed reads fewer of them.
//
// The slots may be of two tiers, in GPU and in CPU memory (Config.GPU). Then no choice has fewer
// reads, and none has more hits in the GPU tier. So whatever a row from each costs, no placement of
// rows for the whole superbatch is better, where the tiers begin empty or are filled (Config.Fill).
//
// The paper makes three passes over the accesses: count each node's, lay the counts out, and list
// the iterations of each node. Here one pass from the last access to the first gives every access
// its next one, and a pass forwards plays the cache. Neither looks a cached row up: a row that
// stays writes its slot to where it is accessed next. So the memory is twelve bytes an access and
// some forty a distinct row, whatever the size of the graph.
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
	// Batches is how many mini-batches there are.
	Batches() int
	// Rows is how many rows a mini-batch has, at least 0 and below 2^31.
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

// Config is of a cache.
type Config struct {
	Slots int64 // rows that it holds, below 2^31
	// GPU is how many of the slots, the first ones, are in GPU memory; the others are in CPU
	// memory. Which rows the two hold together does not depend on it. Of the rows that stay, those
	// that the mini-batch has and those that the GPU tier had compete for the GPU tier, and the
	// ones that are accessed next have it; see Changes.Demotions.
	GPU int64
	// Before is what an earlier superbatch has left in a cache of as many slots; nil: nothing.
	Before *State
	// Fill loads rows before the first mini-batch, as the paper does: those that are accessed
	// first, as many as there is room for. As many rows are read with it as without, but in one go.
	Fill bool
	// Keep lets rows in whose next access nobody knows, instead of rows that this superbatch has
	// not accessed: a later one may access them. It costs a move for each, and no read of this
	// superbatch. Of two tiers it also keeps those that have to leave the GPU tier. Then the tiers
	// hold what a single one would; without Keep they hold the same of the rows that this
	// superbatch accesses, and may lose others.
	Keep    bool
	Workers int // goroutines; below 1: one
}

// State is a cache between superbatches.
type State struct {
	Rows []int64 // by slot: the row that it holds, or Empty
	// Reuse are the slots in the order in which rows that nobody knows a use of leave: first the
	// empty ones, then the row whose last access is the longest ago.
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

// Changes are a superbatch's changesets.
type Changes struct {
	// First are rows to load before the first mini-batch, each into the slot of its Move.
	First []int64
	Fill  []Move

	starts []int64 // by mini-batch: its first access; one more at the end
	slots  []int32 // by access
	moves  []Move
	ends   []int64 // by mini-batch: the end of its moves
	// of two tiers
	demotions    []Demotion
	demotionEnds []int64
	// After is the cache after the last mini-batch.
	After State
	Stats Stats
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
	Bytes    int64 // most memory that Inspect took at once
}

// Batches is how many mini-batches there are.
func (c *Changes) Batches() int { return len(c.ends) }

// Slots gives the slot of each row of a mini-batch, Miss where it has to be read. All of a
// mini-batch's rows are gathered before its Moves are made.
func (c *Changes) Slots(batch int) []int32 {
	return c.slots[c.starts[batch]:c.starts[batch+1]]
}

// Moves are the rows of a mini-batch that enter the cache, or change their tier, once it is
// gathered and after its Demotions. What the slots hold leaves. A slot stands in one Move of a
// mini-batch at most, and never is it the slot of a row of the mini-batch that stays there.
func (c *Changes) Moves(batch int) []Move {
	from := int64(0)
	if batch > 0 {
		from = c.ends[batch-1]
	}
	return c.moves[from:c.ends[batch]]
}

// none is the mini-batch of an access that does not come.
const none = math.MaxUint32

// place is an access: a row's place in a mini-batch.
type place struct{ batch, at uint32 }

// Inspect finds the changesets of a superbatch. Equal accesses give equal changesets, whatever the
// number of workers.
func Inspect(ctx context.Context, a Accesses, c Config) (*Changes, error) {
	n := a.Batches()
	switch {
	case c.Slots < 0 || c.Slots >= math.MaxInt32:
		return nil, errs.New(errs.Usage,
			"a cache of %d rows for a superbatch: at least 0 and below 2^31 are possible", c.Slots)
	case c.GPU < 0 || c.GPU > c.Slots:
		return nil, errs.New(errs.Failed,
			"superbatch: %d of a cache's %d rows are to be in GPU memory", c.GPU, c.Slots)
	case c.Before != nil && (int64(len(c.Before.Rows)) != c.Slots ||
		int64(len(c.Before.Reuse)) != c.Slots):
		return nil, errs.New(errs.Failed,
			"superbatch: the cache has %d slots and was left with %d, %d of them in order", c.Slots,
			len(c.Before.Rows), len(c.Before.Reuse))
	case n >= none:
		return nil, errs.New(errs.Usage, "a superbatch of %d mini-batches: below 2^32 are possible",
			n)
	}
	x := &Changes{starts: make([]int64, n+1), ends: make([]int64, n)}
	for b := range n {
		x.starts[b+1] = x.starts[b] + int64(a.Rows(b))
	}
	x.Stats.Accesses = x.starts[n]
	next, shards, err := lookAhead(ctx, a, x.starts, max(c.Workers, 1))
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
	p := &player{x: x, slots: c.Slots, keep: c.Keep, next: next, wanted: make([]int64, n),
		rows: make([]int64, c.Slots)}
	if c.GPU > 0 {
		p.tiers = &tiers{gpu: int32(c.GPU), in: newLadder(x.Stats.Accesses)}
		x.demotionEnds = make([]int64, n)
	}
	p.begin(c.Before, shards)
	if c.Fill {
		if err := p.fill(a, shards); err != nil {
			return nil, err
		}
	}
	if err := p.play(ctx, a); err != nil {
		return nil, err
	}
	x.Stats.Bytes += p.bytes()
	return x, nil
}

// lookAhead gives each access the next one of its row, and for each row its first: from the last
// mini-batch to the first, the rows divided among the workers by their hash.
func lookAhead(ctx context.Context, a Accesses, starts []int64, workers int) ([]place, []*shard,
	error) {
	next := make([]place, starts[len(starts)-1])
	shards, failed := make([]*shard, workers), make([]error, workers)
	var wg sync.WaitGroup
	for w := range shards {
		s := &shard{}
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
				s.meet(rows, uint32(b), next[starts[b]:starts[b+1]], w, workers)
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
	h := hash(row)
	return shards[shardOf(h, len(shards))].get(row, h)
}

// player plays the cache. What it holds and what the current mini-batch brings are candidates. A
// candidate is known by its next access: Changes.slots has the candidate's slot there, or fresh.
// So nothing is looked for: a mini-batch's hits are its accesses that have a slot, and what has to
// leave are such accesses of the last mini-batch that has any.
type player struct {
	x      *Changes
	slots  int64
	keep   bool
	next   []place // by access
	wanted []int64 // by mini-batch: candidates that it accesses next
	last   int     // no mini-batch behind it has a candidate
	n      int64   // candidates
	rows   []int64 // by slot
	// free are slots of rows whose next access nobody knows, in the order in which they are used
	// again; those before taken have been.
	free  []int32
	taken int
	stale int // of free, how many hold nothing that the superbatch has accessed; they come first
	fresh []arrival
	tiers *tiers // nil: one tier
}

// fresh is the slot of a candidate that the current mini-batch brings: it gets one if it stays.
const fresh = -2

// arrival is a row that the current mini-batch brings and a later one accesses.
type arrival struct {
	row  int64
	next place
	at   int32 // in the mini-batch
}

// begin takes over what the cache holds. Rows that the superbatch does not access keep their slots
// until somebody needs them.
func (p *player) begin(before *State, shards []*shard) {
	if before == nil {
		for i := range p.rows {
			p.rows[i] = Empty
			p.free = append(p.free, int32(i))
		}
		p.stale = len(p.free)
		return
	}
	copy(p.rows, before.Rows)
	for _, slot := range before.Reuse {
		at := place{batch: none}
		if row := p.rows[slot]; row != Empty {
			at = find(shards, row)
		}
		if at.batch == none {
			p.free = append(p.free, slot)
			continue
		}
		p.hold(at, slot)
	}
	p.stale = len(p.free)
}

// access is the slot of an access.
func (p *player) access(at place) *int32 {
	return &p.x.slots[p.x.starts[at.batch]+int64(at.at)]
}

// hold adds a candidate that is cached already, or is loaded beforehand, in the tier of its slot.
func (p *player) hold(next place, slot int32) {
	p.add(next, slot)
	if t := p.tiers; t != nil && slot < t.gpu {
		t.in.set(p.x.starts[next.batch] + int64(next.at))
		t.n++
	}
}

// add adds a candidate by its next access.
func (p *player) add(next place, slot int32) {
	*p.access(next) = slot
	p.wanted[next.batch]++
	p.last = max(p.last, int(next.batch))
	p.n++
}

// evict drops the candidates with the furthest next accesses until the rest fits; of equals those
// that stand last in their mini-batch.
func (p *player) evict() {
	for p.n > p.slots {
		for p.wanted[p.last] == 0 {
			p.last--
		}
		drop := min(p.n-p.slots, p.wanted[p.last])
		p.n -= drop
		p.wanted[p.last] -= drop
		of := p.x.slots[p.x.starts[p.last]:p.x.starts[p.last+1]]
		for i := len(of) - 1; drop > 0; i-- {
			if of[i] == Miss {
				continue
			}
			if of[i] != fresh {
				p.free = append(p.free, of[i])
				if t := p.tiers; t != nil && t.in.has(p.x.starts[p.last]+int64(i)) {
					t.in.clear(p.x.starts[p.last] + int64(i))
					t.n--
				}
			}
			of[i] = Miss
			drop--
		}
	}
}

// reuse takes the next free slot for a row.
func (p *player) reuse(row int64) int32 {
	slot := p.pop()
	p.put(slot, row)
	return slot
}

// pop takes the next free slot.
func (p *player) pop() int32 {
	slot := p.free[p.taken]
	if p.taken++; p.taken > len(p.free)/2 && p.taken > 1<<12 {
		if t := p.tiers; t != nil {
			t.at, t.base = t.at-p.taken, t.base-p.taken
		}
		p.free = p.free[:copy(p.free, p.free[p.taken:])]
		p.taken = 0
	}
	p.stale = max(p.stale-1, 0)
	return slot
}

// put writes a row to a slot.
func (p *player) put(slot int32, row int64) {
	if p.rows[slot] != Empty {
		p.x.Stats.Evicted++
	}
	p.rows[slot] = row
}

// fill loads the rows that are accessed first into the slots that hold nothing the superbatch
// accesses. None of them leaves before it is accessed: until then the superbatch accesses fewer
// rows than there are slots. And nothing else has to leave for them, for the same reason.
func (p *player) fill(a Accesses, shards []*shard) error {
	for _, s := range shards {
		for i := range s.all {
			if e := &s.all[i]; e.key != 0 && *p.access(e.first) == Miss {
				*p.access(e.first) = fresh // first accesses, until the loop below
			}
		}
	}
	if t := p.tiers; t != nil {
		// The slots that are filled, those of the GPU tier first.
		t.gpuFirst(p.free[:min(p.slots, p.x.Stats.Distinct)-p.n])
	}
	var buf []int64
	for b := range p.wanted {
		rows, err := a.Read(b, buf)
		if err != nil {
			return err
		}
		buf = rows[:0]
		for at, row := range rows {
			first := place{uint32(b), uint32(at)}
			if *p.access(first) != fresh {
				continue
			}
			if p.n == p.slots {
				*p.access(first) = Miss
				continue
			}
			slot := p.reuse(row)
			p.hold(first, slot)
			p.x.Fill = append(p.x.Fill, Move{int32(len(p.x.First)), slot})
			p.x.First = append(p.x.First, row)
		}
	}
	p.x.Stats.Loaded = int64(len(p.x.First))
	return nil
}

// play makes the changesets.
func (p *player) play(ctx context.Context, a Accesses) error {
	x := p.x
	var buf []int64
	for b := range x.ends {
		if err := ctx.Err(); err != nil {
			return err
		}
		rows, err := a.Read(b, buf)
		if err != nil {
			return err
		}
		buf = rows[:0]
		p.n -= p.wanted[b]
		p.wanted[b] = 0
		slots, next := x.Slots(b), p.next[x.starts[b]:x.starts[b+1]]
		p.fresh = p.fresh[:0]
		if p.tiers != nil {
			p.tiers.begin(slots, len(p.free))
		}
		for at, slot := range slots {
			switch known := next[at].batch != none; {
			case slot == Miss && known && p.slots > 0:
				p.add(next[at], fresh)
				p.fresh = append(p.fresh, arrival{rows[at], next[at], int32(at)})
			case slot == Miss:
			case known:
				x.Stats.Hits++
				p.add(next[at], slot)
			default:
				x.Stats.Hits++
				p.free = append(p.free, slot)
				if p.tiers != nil {
					p.tiers.dead = append(p.tiers.dead, int32(at))
				}
			}
		}
		p.evict()
		if p.tiers != nil {
			p.settle(rows, slots, next)
			x.ends[b], x.demotionEnds[b] = int64(len(x.moves)), int64(len(x.demotions))
			continue
		}
		for i := range p.fresh {
			f := &p.fresh[i]
			if to := p.access(f.next); *to == fresh {
				*to = p.reuse(f.row)
				x.moves = append(x.moves, Move{f.at, *to})
			}
		}
		for at := 0; p.keep && p.stale > 0 && at < len(rows); at++ {
			if slots[at] == Miss && next[at].batch == none {
				slot := p.reuse(rows[at])
				p.free = append(p.free, slot)
				x.moves = append(x.moves, Move{int32(at), slot})
			}
		}
		x.ends[b] = int64(len(x.moves))
	}
	if t := p.tiers; t == nil {
		x.Stats.Inserted = int64(len(x.moves))
	} else {
		x.Stats.HitsGPU = t.hits
		p.emptyFirst()
	}
	x.Stats.HitsCPU = x.Stats.Hits - x.Stats.HitsGPU
	x.After = State{p.rows, slices.Clone(p.free[p.taken:])}
	return nil
}

func (p *player) bytes() int64 {
	return int64(cap(p.wanted)+cap(p.rows))*8 + int64(cap(p.free))*4 + int64(cap(p.fresh))*24 +
		int64(cap(p.x.moves))*8 + p.tiers.bytes() + int64(cap(p.x.demotions))*8
}
