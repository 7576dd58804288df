package policy

import "math/bits"

// random evicts a slot drawn uniformly from those that are not pinned: they stand in an array, each
// knowing its place.
type random struct {
	d     *Directory
	slots []int32 // that may be evicted
	state uint64
}

func newRandom(d *Directory, slots int64, seed uint64) *random {
	return &random{d: d, slots: make([]int32, 0, slots), state: seed}
}

func (r *random) insert(int32) {}
func (r *random) hit(int32)    {}

func (r *random) unpin(slot int32) {
	r.d.slots[slot].older = int32(len(r.slots))
	r.slots = append(r.slots, slot)
}

// pin moves the last one to the slot's place.
func (r *random) pin(slot int32) {
	at, last := r.d.slots[slot].older, r.slots[len(r.slots)-1]
	r.slots[at], r.d.slots[last].older = last, at
	r.slots = r.slots[:len(r.slots)-1]
}

func (r *random) remove(slot int32) {
	if r.d.slots[slot].flags()&pinned == 0 {
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

func (r *random) likely(into []int32) int {
	n := min(len(into), len(r.slots))
	for i := range n {
		at, _ := bits.Mul64(mix(r.state+uint64(i+1)*0x9e3779b97f4a7c15), uint64(len(r.slots)-i))
		into[i] = r.slots[at]
	}
	return n
}

func (r *random) bytes() int64 { return int64(cap(r.slots)) * 4 }

// queue runs from the oldest slot to the newest. A slot is in one queue at a time.
type queue struct {
	slots          []slot
	oldest, newest int32
	n              int64
}

func newQueue(d *Directory) queue { return queue{slots: d.slots, oldest: -1, newest: -1} }

// after puts a slot behind another on the newer side; -1: as the oldest.
func (q *queue) after(slot, other int32) {
	newer := q.oldest
	if other >= 0 {
		newer = q.slots[other].newer
		q.slots[other].newer = slot
	} else {
		q.oldest = slot
	}
	if newer >= 0 {
		q.slots[newer].older = slot
	} else {
		q.newest = slot
	}
	q.slots[slot].older, q.slots[slot].newer = other, newer
	q.n++
}

func (q *queue) add(slot int32) { q.after(slot, q.newest) }

func (q *queue) take(slot int32) {
	older, newer := q.slots[slot].older, q.slots[slot].newer
	if older >= 0 {
		q.slots[older].newer = newer
	} else {
		q.oldest = newer
	}
	if newer >= 0 {
		q.slots[newer].older = older
	} else {
		q.newest = older
	}
	q.n--
}

// likely walks from a slot to newer ones.
func (q *queue) likely(from int32, into []int32) int {
	for i := range into {
		if from < 0 {
			return i
		}
		into[i] = from
		from = q.slots[from].newer
	}
	return len(into)
}

// lru evicts the slot whose last access is the longest ago. Pinned slots are not in the queue: a pin ends
// at the end of a batch that accessed the line, so the slot then belongs at the newest end.
type lru struct {
	d     *Directory
	queue queue
}

func newLRU(d *Directory) *lru { return &lru{d, newQueue(d)} }

func (p *lru) insert(int32) {}
func (p *lru) hit(int32)    {}

func (p *lru) unpin(slot int32) { p.queue.add(slot) }
func (p *lru) pin(slot int32)   { p.queue.take(slot) }

func (p *lru) remove(slot int32) {
	if p.d.slots[slot].flags()&pinned == 0 {
		p.queue.take(slot)
	}
}

func (p *lru) victim() int32 {
	slot := p.queue.oldest
	p.queue.take(slot)
	return slot
}

func (p *lru) likely(into []int32) int { return p.queue.likely(p.queue.oldest, into) }

func (p *lru) bytes() int64 { return 0 }

// clock gives a slot that was accessed since the hand passed a second chance: the ring is a queue whose
// oldest end is the hand, and what the hand passes goes to the newest end. A pinned slot that the hand
// meets is parked until its pin ends and then stands where the hand passed last. A new line has its
// first chance only.
type clock struct {
	d     *Directory
	queue queue
}

func newClock(d *Directory) *clock { return &clock{d, newQueue(d)} }

func (p *clock) insert(slot int32) { p.queue.add(slot) }
func (p *clock) hit(slot int32)    { p.d.slots[slot].set(visited) }
func (p *clock) pin(int32)         {}

func (p *clock) unpin(slot int32) {
	if p.d.slots[slot].flags()&parked != 0 {
		p.d.slots[slot].unset(parked)
		p.queue.add(slot)
	}
}

func (p *clock) remove(slot int32) {
	if p.d.slots[slot].flags()&parked == 0 {
		p.queue.take(slot)
	}
}

func (p *clock) victim() int32 {
	for {
		slot := p.queue.oldest
		p.queue.take(slot)
		flags := p.d.slots[slot].flags()
		p.d.slots[slot].unset(visited)
		switch {
		case flags&pinned != 0:
			p.d.slots[slot].set(parked)
		case flags&visited != 0:
			p.queue.add(slot)
		default:
			return slot
		}
	}
}

func (p *clock) likely(into []int32) int { return p.queue.likely(p.queue.oldest, into) }

func (p *clock) bytes() int64 { return 0 }

// sieve is SIEVE (Zhang et al., NSDI '24): a queue in order of insertion and a hand that goes from its
// oldest slot to its newest and around; it evicts the first that was not visited since it passed last, and
// what it passes stays in its place. A pinned slot that the hand meets is parked until its pin ends and then
// stands directly behind the hand.
type sieve struct {
	d     *Directory
	queue queue
	hand  int32 // the slot to look at next; -1: the oldest
}

func newSieve(d *Directory) *sieve { return &sieve{d: d, queue: newQueue(d), hand: -1} }

func (p *sieve) insert(slot int32) { p.queue.add(slot) }
func (p *sieve) hit(slot int32)    { p.d.slots[slot].set(visited) }
func (p *sieve) pin(int32)         {}

func (p *sieve) unpin(slot int32) {
	if p.d.slots[slot].flags()&parked == 0 {
		return
	}
	p.d.slots[slot].unset(parked)
	if p.hand >= 0 {
		p.queue.after(slot, p.d.slots[p.hand].older)
	} else {
		p.queue.add(slot) // the hand has just gone round
	}
}

// leave takes a slot out; a hand at it goes on.
func (p *sieve) leave(slot int32) {
	if p.hand == slot {
		p.hand = p.d.slots[slot].newer
	}
	p.queue.take(slot)
}

func (p *sieve) remove(slot int32) {
	if p.d.slots[slot].flags()&parked == 0 {
		p.leave(slot)
	}
}

func (p *sieve) victim() int32 {
	for {
		if p.hand < 0 {
			p.hand = p.queue.oldest
		}
		slot := p.hand
		flags := p.d.slots[slot].flags()
		p.d.slots[slot].unset(visited)
		switch {
		case flags&pinned != 0:
			p.leave(slot)
			p.d.slots[slot].set(parked)
		case flags&visited != 0:
			p.hand = p.d.slots[slot].newer
		default:
			p.leave(slot)
			return slot
		}
	}
}

func (p *sieve) likely(into []int32) int {
	if p.hand < 0 {
		return p.queue.likely(p.queue.oldest, into)
	}
	return p.queue.likely(p.hand, into)
}

func (p *sieve) bytes() int64 { return 0 }
