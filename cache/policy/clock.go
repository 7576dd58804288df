package policy

// Clock is CLOCK, or second chance.
const Clock = "clock"

var clockPolicy = &Policy{
	Name: Clock, Summary: "CLOCK: what was accessed since the hand passed stays", set: setClock,
	open: func(d *Queues, c Config) evictor { return newClock(d) },
}

// visited marks a slot that was accessed since the hand passed; SIEVE uses it too.
const visited = own

// clock gives a slot that was accessed since the hand passed a second chance: the ring is a queue
// whose oldest end is the hand, and what the hand passes goes to the newest end. A pinned slot that
// the hand meets is parked until its pin ends and then stands where the hand passed last. A new
// line has its first chance only.
type clock struct {
	d     *Queues
	queue queue
}

func newClock(d *Queues) *clock { return &clock{d, newQueue(d)} }

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
