package policy

// Sieve is SIEVE.
const Sieve = "sieve"

var sievePolicy = &Policy{
	Name: Sieve, Summary: "SIEVE: a hand over lines in order of insertion", set: setSieve,
	open: func(d *Queues, c Config) evictor { return newSieve(d) },
}

// sieve is SIEVE (Zhang et al., NSDI '24): a queue in order of insertion and a hand that goes from
// its oldest slot to its newest and around; it evicts the first that was not visited since it
// passed last, and what it passes stays in its place. A pinned slot that the hand meets is parked
// until its pin ends and then stands directly behind the hand.
type sieve struct {
	d     *Queues
	queue queue
	hand  int32 // the slot to look at next; -1: the oldest
}

func newSieve(d *Queues) *sieve { return &sieve{d: d, queue: newQueue(d), hand: -1} }

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

// leave takes a slot out; a hand at it moves on.
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
