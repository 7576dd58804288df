package superbatch

// Demotion copies a row from a slot of the GPU tier to one of the CPU tier.
type Demotion struct{ From, To int32 }

// Demotions are the rows that leave the GPU tier for the CPU tier though the mini-batch does not
// have them. They are made once the mini-batch is gathered and before its Moves: a To holds nothing
// that is needed, and a From may be the slot of a Move.
func (c *Changes) Demotions(batch int) []Demotion { return c.sets[batch].demotions }

// tiers divides the slots of a player into a GPU tier, the first ones, and a CPU tier. Which rows
// are cached is decided before, as for one tier; tiers decides where they are.
//
// The pool of a mini-batch is what stays cached of its own rows and of the GPU tier's. Those of the
// pool that are accessed next are in the GPU tier, as many as fit; ties go by their place in the
// mini-batch. A row of the CPU tier that the mini-batch does not have stays where it is: nothing
// would bring it to the GPU but a read of its own.
//
// There is always room for the rest of the pool in the CPU tier. Either the pool fits into the GPU
// tier, and there is no rest. Or the GPU tier is full of rows that stay; no more rows stay than
// there are slots, so no more than the CPU tier has are outside the GPU tier.
//
// No choice has more hits in the GPU tier, as none has more in both: the GPU tier holds what a
// cache of its slots alone would, the nearest of its own rows and of the mini-batch's. Such a row
// is never dropped by both. The rows that are nearer are fewer than GPU in the pool and, outside of
// it, rows of the CPU tier: fewer than there are slots. This holds for tiers that begin empty;
// rows that an earlier superbatch has left are in the tier where they were.
//
// A mini-batch vacates slots: those of rows that leave the cache, and those that rows leave for the
// other tier. They are as many as the rows that need a slot. Of the CPU tier there are enough: it
// needs none where the pool fits, and where it does not every slot of the GPU tier is needed. Of
// the GPU tier d may lack; then d of its slots hold rows without a known use, and d vacated ones of
// the CPU tier are left over for these.
type tiers struct {
	gpu  int32
	n    int64 // candidates in the GPU tier
	hits int64
	in   *MaxSet  // accesses whose candidates are in the GPU tier; of past ones it says nothing
	next int      // player.free from taken to here has no slot of the GPU tier
	dead []int32  // places in the mini-batch of the rows of the last slots of player.free
	base int      // first of those slots
	out  []int64  // accesses whose candidates leave the GPU tier
	need []coming // rows of the mini-batch that need a slot
	// vacated slots, by tier
	ofGPU, ofCPU []int32
}

// coming is a row of the mini-batch that needs a slot.
type coming struct {
	access int64 // its next one
	pos    int32
	up     bool // it goes to the GPU tier
}

// begin begins a mini-batch: the candidates that it has leave the tiers, until settle.
func (t *tiers) begin(slots []int32, free int) {
	t.dead, t.base = t.dead[:0], free
	hits := int64(0)
	for _, slot := range slots {
		if slot >= 0 && slot < t.gpu {
			hits++
		}
	}
	t.n -= hits
	t.hits += hits
}

// settle gives the rows that stay after a mini-batch their tiers and slots. lasting are those of
// its rows that were read and have no known use.
func (p *player) settle(rows []int64, slots []int32, next []place, lasting int) {
	x, t := p.x, p.tiers
	t.out, t.need, t.ofGPU, t.ofCPU = t.out[:0], t.need[:0], t.ofGPU[:0], t.ofCPU[:0]
	entering := p.divide()
	// Rows without a known use leave in the order of player.free, as from one tier.
	if !p.keep {
		lasting = 0
	}
	lasting = min(lasting, max(p.stale-entering, 0))
	for range entering + lasting {
		t.vacate(p.pop())
	}
	t.next = max(t.next, p.taken)
	p.demoteRest()
	for _, c := range t.need {
		slot := t.takeIn(c.up)
		p.put(slot, rows[c.pos])
		x.slots[c.access] = slot
		p.moves = append(p.moves, Move{c.pos, slot})
	}
	for i := 0; lasting > 0; i++ {
		if slots[i] != Miss || next[i].batch != none {
			continue
		}
		slot := t.takeIn(len(t.ofGPU) > 0)
		p.put(slot, rows[i])
		p.free = append(p.free, slot)
		p.moves = append(p.moves, Move{int32(i), slot})
		x.Stats.Inserted++
		lasting--
	}
	x.Stats.Inserted += int64(entering)
}

// divide decides the tiers of the rows that stay. It lists those that need a slot (need), vacates
// the slots of those that change their tier, and returns the number of those that were read.
func (p *player) divide() (entering int) {
	x, t := p.x, p.tiers
	for i := range p.stay {
		t.in.Set(p.stay[i].access)
	}
	t.n += int64(len(p.stay))
	for t.n > int64(t.gpu) {
		access := t.in.Last()
		t.in.Clear(access)
		t.n--
		t.out = append(t.out, access)
	}
	for i := range p.stay {
		s := &p.stay[i]
		up := t.in.Has(s.access)
		switch {
		case s.slot == Miss:
			entering++
		case up == (s.slot < t.gpu):
			x.slots[s.access] = s.slot
			continue
		default:
			t.vacate(s.slot)
			p.rows[s.slot] = Empty
			if up {
				x.Stats.Promoted++
			} else {
				x.Stats.Demoted++
			}
		}
		t.need = append(t.need, coming{s.access, s.pos, up})
	}
	return entering
}

// demoteRest moves the rows that leave the GPU tier without the mini-batch, and makes room there
// for those of the mini-batch.
func (p *player) demoteRest() {
	x, t := p.x, p.tiers
	ups := 0
	for _, c := range t.need {
		if c.up {
			ups++
		}
	}
	// Slots that rows leave without the mini-batch, for those of it.
	leave := 0
	for _, access := range t.out {
		if slot := x.slots[access]; slot >= 0 && slot < t.gpu {
			t.out[leave] = access
			leave++
		}
	}
	t.out = t.out[:leave]
	for range ups - leave - len(t.ofGPU) {
		p.makeRoom()
	}
	for _, access := range t.out {
		from, to := x.slots[access], take(&t.ofCPU)
		p.demote(from, to)
		x.slots[access] = to
		t.ofGPU = append(t.ofGPU, from)
	}
}

// takeIn takes the slot of a tier that was vacated last.
func (t *tiers) takeIn(gpu bool) int32 {
	if gpu {
		return take(&t.ofGPU)
	}
	return take(&t.ofCPU)
}

// vacate notes a slot that a row may take.
func (t *tiers) vacate(slot int32) {
	if slot < t.gpu {
		t.ofGPU = append(t.ofGPU, slot)
	} else {
		t.ofCPU = append(t.ofCPU, slot)
	}
}

// take takes the slot that was vacated last.
func take(from *[]int32) int32 {
	last := len(*from) - 1
	slot := (*from)[last]
	*from = (*from)[:last]
	return slot
}

// makeRoom vacates a slot of the GPU tier whose row has no known use. With Keep the row goes to a
// vacated slot of the CPU tier and leaves the cache when it would have; else it leaves now, and the
// other slot keeps what it has.
func (p *player) makeRoom() {
	t := p.tiers
	for p.free[t.next] >= t.gpu {
		t.next++
	}
	from, to := p.free[t.next], take(&t.ofCPU)
	if p.keep && p.rows[from] != Empty {
		if t.next < t.base {
			p.demote(from, to)
		} else { // the mini-batch has it
			p.put(to, p.rows[from])
			p.rows[from] = Empty
			p.x.Stats.Demoted++
			p.moves = append(p.moves, Move{t.dead[t.next-t.base], to})
		}
	}
	p.free[t.next] = to
	t.next++
	t.ofGPU = append(t.ofGPU, from)
}

// emptyFirst puts the empty slots before the other free ones, as State.Reuse has them.
func (p *player) emptyFirst() {
	free := p.free[p.taken:]
	var filled []int32
	n := 0
	for _, slot := range free {
		if p.rows[slot] == Empty {
			free[n] = slot
			n++
		} else {
			filled = append(filled, slot)
		}
	}
	copy(free[n:], filled)
}

func (p *player) demote(from, to int32) {
	p.put(to, p.rows[from])
	p.rows[from] = Empty
	p.demotions = append(p.demotions, Demotion{from, to})
	p.x.Stats.Demoted++
}

func (t *tiers) bytes() int64 {
	if t == nil {
		return 0
	}
	return t.in.bytes() + int64(cap(t.dead)+cap(t.ofGPU)+cap(t.ofCPU))*4 + int64(cap(t.out))*8 +
		int64(cap(t.need))*16
}
