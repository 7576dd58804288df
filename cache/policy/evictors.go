package policy

import "math/bits"

// random evicts a slot drawn uniformly from those that are not pinned: they stand in an array, each
// knowing its place.
type random struct {
	slots []int32 // that may be evicted
	at    []int32 // by slot: its place there
	state uint64
}

func newRandom(slots int64, seed uint64) *random {
	return &random{slots: make([]int32, 0, slots), at: make([]int32, slots), state: seed}
}

func (r *random) insert(int32) {}
func (r *random) hit(int32)    {}

func (r *random) unpin(slot int32) {
	r.at[slot] = int32(len(r.slots))
	r.slots = append(r.slots, slot)
}

// pin moves the last one to the slot's place.
func (r *random) pin(slot int32) {
	at, last := r.at[slot], r.slots[len(r.slots)-1]
	r.slots[at], r.at[last] = last, at
	r.slots = r.slots[:len(r.slots)-1]
}

func (r *random) remove(slot int32) {
	if at := r.at[slot]; int(at) < len(r.slots) && r.slots[at] == slot {
		r.pin(slot)
	}
}

// victim draws by splitmix64.
func (r *random) victim() int32 {
	r.state += 0x9e3779b97f4a7c15
	at, _ := bits.Mul64(mix(r.state), uint64(len(r.slots)))
	slot := r.slots[at]
	r.pin(slot)
	return slot
}

func (r *random) bytes() int64 { return int64(cap(r.slots)+cap(r.at)) * 4 }

// links are the neighbours of slots in doubly linked queues; a slot is in one at a time.
type links struct{ older, newer []int32 }

func newLinks(slots int64) links {
	return links{make([]int32, slots), make([]int32, slots)}
}

func (l *links) bytes() int64 { return int64(cap(l.older)+cap(l.newer)) * 4 }

// queue runs from the oldest slot to the newest.
type queue struct {
	l              *links
	oldest, newest int32
	n              int64
}

func newQueue(l *links) queue { return queue{l: l, oldest: -1, newest: -1} }

// after puts a slot behind another on the newer side; -1: as the oldest.
func (q *queue) after(slot, other int32) {
	newer := q.oldest
	if other >= 0 {
		newer = q.l.newer[other]
		q.l.newer[other] = slot
	} else {
		q.oldest = slot
	}
	if newer >= 0 {
		q.l.older[newer] = slot
	} else {
		q.newest = slot
	}
	q.l.older[slot], q.l.newer[slot] = other, newer
	q.n++
}

func (q *queue) add(slot int32) { q.after(slot, q.newest) }

func (q *queue) take(slot int32) {
	older, newer := q.l.older[slot], q.l.newer[slot]
	if older >= 0 {
		q.l.newer[older] = newer
	} else {
		q.oldest = newer
	}
	if newer >= 0 {
		q.l.older[newer] = older
	} else {
		q.newest = older
	}
	q.n--
}

// lru evicts the slot whose last access is the longest ago. Pinned slots are not in the queue: a pin ends
// at the end of a batch that accessed the line, so the slot then belongs at the newest end.
type lru struct {
	links links
	queue queue
	in    []uint64 // bits: slots in the queue
}

func newLRU(slots int64) *lru {
	p := &lru{links: newLinks(slots), in: make([]uint64, (slots+63)/64)}
	p.queue = newQueue(&p.links)
	return p
}

func (p *lru) insert(int32) {}
func (p *lru) hit(int32)    {}

func (p *lru) unpin(slot int32) {
	p.queue.add(slot)
	p.in[slot/64] |= 1 << (slot % 64)
}

func (p *lru) pin(slot int32) {
	p.queue.take(slot)
	p.in[slot/64] &^= 1 << (slot % 64)
}

func (p *lru) remove(slot int32) {
	if p.in[slot/64]>>(slot%64)&1 != 0 {
		p.pin(slot)
	}
}

func (p *lru) victim() int32 {
	slot := p.queue.oldest
	p.pin(slot)
	return slot
}

func (p *lru) bytes() int64 { return p.links.bytes() + int64(cap(p.in))*8 }

// clock gives a slot that was accessed since the hand passed a second chance: the ring is a queue whose
// oldest end is the hand, and what the hand passes goes to the newest end. A pinned slot that the hand
// meets is parked until its pin ends and then stands where the hand passed last. A new line has its
// first chance only.
type clock struct {
	d     *Directory
	links links
	queue queue
}

func newClock(d *Directory, slots int64) *clock {
	p := &clock{d: d, links: newLinks(slots)}
	p.queue = newQueue(&p.links)
	return p
}

func (p *clock) insert(slot int32) { p.queue.add(slot) }
func (p *clock) hit(slot int32)    { p.d.flags[slot] |= visited }
func (p *clock) pin(int32)         {}

func (p *clock) unpin(slot int32) {
	if p.d.flags[slot]&parked != 0 {
		p.d.flags[slot] &^= parked
		p.queue.add(slot)
	}
}

func (p *clock) remove(slot int32) {
	if p.d.flags[slot]&parked == 0 {
		p.queue.take(slot)
	}
}

func (p *clock) victim() int32 {
	for {
		slot := p.queue.oldest
		p.queue.take(slot)
		flags := p.d.flags[slot]
		p.d.flags[slot] = flags &^ visited
		switch {
		case flags&pinned != 0:
			p.d.flags[slot] |= parked
		case flags&visited != 0:
			p.queue.add(slot)
		default:
			return slot
		}
	}
}

func (p *clock) bytes() int64 { return p.links.bytes() }

// sieve is SIEVE (Zhang et al., NSDI '24): a queue in order of insertion and a hand that goes from its
// oldest slot to its newest and around; it evicts the first that was not visited since it passed last, and
// what it passes stays in its place. A pinned slot that the hand meets is parked until its pin ends and then
// stands directly behind the hand.
type sieve struct {
	d     *Directory
	links links
	queue queue
	hand  int32 // the slot to look at next; -1: the oldest
}

func newSieve(d *Directory, slots int64) *sieve {
	p := &sieve{d: d, links: newLinks(slots), hand: -1}
	p.queue = newQueue(&p.links)
	return p
}

func (p *sieve) insert(slot int32) { p.queue.add(slot) }
func (p *sieve) hit(slot int32)    { p.d.flags[slot] |= visited }
func (p *sieve) pin(int32)         {}

func (p *sieve) unpin(slot int32) {
	if p.d.flags[slot]&parked == 0 {
		return
	}
	p.d.flags[slot] &^= parked
	if p.hand >= 0 {
		p.queue.after(slot, p.links.older[p.hand])
	} else {
		p.queue.add(slot) // the hand has just gone round
	}
}

// leave takes a slot out; a hand at it goes on.
func (p *sieve) leave(slot int32) {
	if p.hand == slot {
		p.hand = p.links.newer[slot]
	}
	p.queue.take(slot)
}

func (p *sieve) remove(slot int32) {
	if p.d.flags[slot]&parked == 0 {
		p.leave(slot)
	}
}

func (p *sieve) victim() int32 {
	for {
		if p.hand < 0 {
			p.hand = p.queue.oldest
		}
		slot := p.hand
		flags := p.d.flags[slot]
		p.d.flags[slot] = flags &^ visited
		switch {
		case flags&pinned != 0:
			p.leave(slot)
			p.d.flags[slot] |= parked
		case flags&visited != 0:
			p.hand = p.links.newer[slot]
		default:
			p.leave(slot)
			return slot
		}
	}
}

func (p *sieve) bytes() int64 { return p.links.bytes() }
