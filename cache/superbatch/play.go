package superbatch

import (
	"context"
	"slices"
)

// player plays the cache. The rows that it holds and those that the current mini-batch brings are
// candidates. A candidate is known by its next access: Changes.slots has the candidate's slot
// there. So nothing is searched: a mini-batch's hits are its accesses that have a slot, and the
// candidates that have to leave are such accesses of the last mini-batch that has any.
//
// The counts of candidates that each mini-batch accesses next show that mini-batch before a
// candidate of the current one is written anywhere. So candidates that are needed too late are
// never written, nor searched.
type player struct {
	x      *Changes
	a      Accesses
	before *State
	shards []*shard
	slots  int64
	keep   bool
	next   []place  // by access
	wanted []int64  // by mini-batch: candidates that it accesses next
	upTo   []uint32 // by mini-batch: no place from here on has a candidate
	last   int      // no mini-batch behind it has a candidate
	n      int64    // candidates
	rows   []int64  // by slot
	// free are slots of rows whose next access is unknown, in the order in which they are used
	// again; those before taken have been.
	free  []int32
	taken int
	stale int // of free, how many hold nothing that the superbatch has accessed; they come first
	stay  []staying
	tiers *tiers // nil: one tier

	moves     []Move // of the mini-batches so far, as many as one allocation had room for
	demotions []Demotion
	bytes     int64 // of all that moves and demotions have been
}

// staying is a row of the current mini-batch that the cache keeps.
type staying struct {
	access int64  // its next one
	batch  uint32 // of that
	pos    int32  // in the current mini-batch
	slot   int32  // Miss: the mini-batch has read it
}

// fresh is the slot of a candidate that the current mini-batch brings: it gets one if it stays.
const fresh = -2

// begin takes over what the cache holds. Rows that the superbatch does not access keep their slots
// until a row needs one.
func (p *player) begin() {
	if p.before == nil {
		p.free = make([]int32, p.slots)
		for i := range p.rows {
			p.rows[i], p.free[i] = Empty, int32(i)
		}
		p.stale = len(p.free)
		return
	}
	copy(p.rows, p.before.Rows)
	for _, slot := range p.before.Reuse {
		first := place{batch: none}
		if row := p.rows[slot]; row != Empty {
			first = find(p.shards, row)
		}
		if first.batch == none {
			p.free = append(p.free, slot)
			continue
		}
		p.hold(first, slot)
	}
	p.stale = len(p.free)
}

// access is the number of an access.
func (p *player) access(next place) int64 { return p.x.starts[next.batch] + int64(next.pos) }

// hold adds a candidate that is cached already, in the tier of its slot.
func (p *player) hold(next place, slot int32) {
	access := p.access(next)
	p.x.slots[access] = slot
	p.wanted[next.batch]++
	p.upTo[next.batch] = max(p.upTo[next.batch], next.pos+1)
	p.last = max(p.last, int(next.batch))
	p.n++
	if t := p.tiers; t != nil && slot < t.gpu {
		t.in.Set(access)
		t.n++
	}
}

// cut drops the mini-batches behind which there are more candidates than slots. Of the last one
// that remains it returns how many candidates are too many.
func (p *player) cut() (drop int64) {
	for {
		for p.last > 0 && p.wanted[p.last] == 0 {
			p.last--
		}
		over, w := p.n-p.slots, p.wanted[p.last]
		switch {
		case over <= 0:
			return 0
		case w > over:
			p.wanted[p.last] -= over
			p.n = p.slots
			return over
		}
		p.n -= w
		p.wanted[p.last] = 0
		p.drop(p.last, w)
	}
}

// drop releases up to n candidates that a mini-batch accesses next, those that stand last in it.
// Candidates of the current mini-batch are there only where they are marked as fresh.
func (p *player) drop(batch int, n int64) {
	from := p.x.starts[batch]
	of := p.x.slots[from : from+int64(p.upTo[batch])]
	i := len(of) - 1
	for ; n > 0 && i >= 0; i-- {
		slot := of[i]
		if slot == Miss {
			continue
		}
		if slot != fresh {
			p.free = append(p.free, slot)
			if t := p.tiers; t != nil && slot < t.gpu {
				t.in.Clear(from + int64(i))
				t.n--
			}
		}
		of[i] = Miss
		n--
	}
	p.upTo[batch] = uint32(i + 1)
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
			t.next, t.base = t.next-p.taken, t.base-p.taken
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

// play makes the changesets.
func (p *player) play(ctx context.Context) error {
	p.begin()
	p.before, p.shards = nil, nil
	x := p.x
	var buf []int64
	for b := range x.sets {
		if err := ctx.Err(); err != nil {
			return err
		}
		rows, err := p.a.Read(b, buf)
		if err != nil {
			return err
		}
		buf = rows[:0]
		p.step(b, rows)
		if b < len(x.sets)-1 {
			x.tell(b+1, nil)
		}
	}
	if t := p.tiers; t != nil {
		x.Stats.HitsGPU = t.hits
		p.emptyFirst()
	}
	x.Stats.HitsCPU = x.Stats.Hits - x.Stats.HitsGPU
	x.Stats.Bytes += p.memory()
	x.After = State{p.rows, slices.Clone(p.free[p.taken:])}
	x.tell(len(x.sets), nil)
	return nil
}

// step makes the changeset of a mini-batch.
func (p *player) step(b int, rows []int64) {
	x := p.x
	p.n -= p.wanted[b]
	p.wanted[b] = 0
	slots, next := x.Slots(b), p.next[x.starts[b]:x.starts[b+1]]
	for _, n := range next {
		if n.batch != none {
			p.wanted[n.batch]++
			p.last = max(p.last, int(n.batch))
			p.n++
		}
	}
	drop := p.cut()
	if p.tiers != nil {
		p.tiers.begin(slots, len(p.free))
	}
	last, hits, lasting := uint32(p.last), int64(0), 0
	p.stay = p.stay[:0]
	for i, n := range next {
		slot := slots[i]
		if slot != Miss {
			hits++
		}
		if n.batch <= last && p.slots > 0 {
			access := p.access(n)
			if drop > 0 && n.batch == last {
				x.slots[access] = fresh
			}
			p.upTo[n.batch] = max(p.upTo[n.batch], n.pos+1)
			p.stay = append(p.stay, staying{access, n.batch, int32(i), slot})
			continue
		}
		if slot != Miss {
			p.free = append(p.free, slot)
			if p.tiers != nil {
				p.tiers.dead = append(p.tiers.dead, int32(i))
			}
		} else if n.batch == none {
			lasting++
		}
	}
	x.Stats.Hits += hits
	if drop > 0 {
		p.drop(p.last, drop)
		p.compact(last)
	}
	p.room(len(rows))
	moves, demotions := len(p.moves), len(p.demotions)
	if p.tiers != nil {
		p.settle(rows, slots, next, lasting)
	} else {
		p.enter(rows, slots, next)
		x.Stats.Inserted += int64(len(p.moves) - moves)
	}
	x.sets[b] = set{p.moves[moves:len(p.moves):len(p.moves)],
		p.demotions[demotions:len(p.demotions):len(p.demotions)]}
}

// compact takes those of stay out that were dropped, as the last mini-batch accesses them next.
func (p *player) compact(last uint32) {
	n := 0
	for _, s := range p.stay {
		if s.batch != last || p.x.slots[s.access] != Miss {
			p.stay[n] = s
			n++
		} else if s.slot != Miss {
			p.free = append(p.free, s.slot)
		}
	}
	p.stay = p.stay[:n]
}

// room has moves and demotions hold those of a mini-batch without growing: others read them.
func (p *player) room(rows int) {
	if cap(p.moves)-len(p.moves) < rows {
		p.moves = make([]Move, 0, 8*rows)
		p.bytes += int64(cap(p.moves)) * 8
	}
	// A row leaves the GPU tier for one that enters it.
	if p.tiers != nil && cap(p.demotions)-len(p.demotions) < 2*rows {
		p.demotions = make([]Demotion, 0, 8*rows)
		p.bytes += int64(cap(p.demotions)) * 8
	}
}

// enter gives the rows that stay after a mini-batch their slots.
func (p *player) enter(rows []int64, slots []int32, next []place) {
	for _, s := range p.stay {
		if s.slot == Miss {
			s.slot = p.reuse(rows[s.pos])
			p.moves = append(p.moves, Move{s.pos, s.slot})
		}
		p.x.slots[s.access] = s.slot
	}
	for i := 0; p.keep && p.stale > 0 && i < len(rows); i++ {
		if slots[i] == Miss && next[i].batch == none {
			slot := p.reuse(rows[i])
			p.free = append(p.free, slot)
			p.moves = append(p.moves, Move{int32(i), slot})
		}
	}
}

// memory is the player's size in bytes.
func (p *player) memory() int64 {
	return int64(cap(p.wanted)+cap(p.rows))*8 + int64(cap(p.free)+cap(p.upTo))*4 +
		int64(cap(p.stay))*24 + p.bytes + p.tiers.bytes()
}
