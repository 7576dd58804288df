package serve

import "fmt"

// claim is a slot that a batch has while it is made: its first tensor comes straight there. It
// holds the ring's mapping, whatever becomes of the client, until the batch is put or its pass has
// ended, and so nothing writes any more.
type claim struct {
	l     *loader
	ring  *ring
	slot  int
	place Place
}

// placer returns the loader where it makes batches in their slots; else nil.
func (j *job) placer() Placer {
	if p, ok := j.from.(Placer); ok && j.device() == nil && p.Ahead() > 0 {
		return p
	}
	return nil
}

// ahead is the number of slots of a ring beyond those that its client may have.
func (j *job) ahead() int {
	if p := j.placer(); p != nil {
		return p.Ahead()
	}
	return 0
}

// claim gives a batch of a pass a slot of its rank; nil: it has to be copied to one.
func (j *job) claim(p *pass, index int) Place {
	j.mu.Lock()
	defer j.mu.Unlock()
	c := j.claims[index]
	if c == nil {
		if l := j.ranks[index%j.world]; l != nil && l.want && l.epoch == p.epoch {
			c = l.claim()
		}
		if c == nil {
			return nil
		}
		j.claims[index] = c
	}
	return c.place
}

// unclaim takes back the slots of batches that did not come to be. Their pass has ended.
func (j *job) unclaim() {
	j.mu.Lock()
	defer j.mu.Unlock()
	for index, c := range j.claims {
		if err := c.giveBack(); err != nil {
			c.l.of.s.Note(fmt.Sprintf("a ring of a client: %v", err))
		}
		delete(j.claims, index)
	}
}

// claim takes a slot that nobody has.
func (l *loader) claim() *claim {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	r := l.ring
	if r == nil || r.old || r.placer == nil || len(l.spare) == 0 {
		return nil
	}
	// the last one that was given back: its memory is in the CPU's caches rather than another's
	slot := l.spare[len(l.spare)-1]
	place, err := r.place(slot)
	if err != nil {
		r.placer = nil
		l.of.s.Note(fmt.Sprintf("rows are copied to a client: %v", err))
		return nil
	}
	l.spare = l.spare[:len(l.spare)-1]
	r.claims++
	return &claim{l, r, slot, place}
}

// slotOf returns the claimed slot where it is of a loader, and else one of the loader's.
func (c *claim) slotOf(l *loader) int {
	if c != nil && c.l == l {
		return c.slot
	}
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	slot := l.spare[len(l.spare)-1] // there is one for each credit
	l.spare = l.spare[:len(l.spare)-1]
	return slot
}

// drop ends a claim whose slot has become a client's.
func (c *claim) drop() error {
	if c == nil {
		return nil
	}
	c.l.of.mu.Lock()
	defer c.l.of.mu.Unlock()
	return c.ring.drop()
}

// giveBack ends a claim whose slot nobody has then.
func (c *claim) giveBack() error {
	if c == nil {
		return nil
	}
	c.l.of.mu.Lock()
	defer c.l.of.mu.Unlock()
	c.l.spare = append(c.l.spare, c.slot)
	return c.ring.drop()
}
