package policy

// LRU is least recently used.
const LRU = "lru"

var lruPolicy = &Policy{
	Name: LRU, Summary: "the line whose last access is the longest ago leaves", set: setLRU,
	open: func(d *Queues, c Config) evictor { return newLRU(d) },
}

// lru evicts the slot whose last access is the longest ago. Pinned slots are not in the queue: a
// pin ends at the end of a batch that accessed the line, so the slot then belongs at the newest
// end.
type lru struct {
	d     *Queues
	queue queue
}

func newLRU(d *Queues) *lru { return &lru{d, newQueue(d)} }

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
