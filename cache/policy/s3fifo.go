package policy

// S3FIFO is S3-FIFO.
const S3FIFO = "s3fifo"

var s3fifoPolicy = &Policy{
	Name: S3FIFO, Summary: "S3-FIFO: a small queue, a main one and a memory of lines that left",
	set:  setS3FIFO,
	open: func(d *Queues, c Config) evictor { return newS3FIFO(d, c.Slots) },
}

// What S3-FIFO notes of a slot.
const (
	inMain = own << (1 + iota)
	once   // two bits of frequency, 0..3
	twice
	freqMask = once | twice
)

// s3fifo is S3-FIFO (Yang et al., SOSP '23): a small queue of a tenth of the cache takes new lines,
// the main queue those that were accessed more than once there or that come back while the ghost
// queue, as long as the main one, still remembers them. The main queue gives a line as many further
// rounds as it was accessed, up to three. A pinned slot that stands at the end of its queue is
// parked until its pin ends and then stands there again; it still counts as a member of its queue.
type s3fifo struct {
	d           *Queues
	small, main queue
	parkedSmall int64
	target      int64   // slots of the small queue
	ghost       []int64 // lines in the order of their eviction, from next on around; -1: taken back
	ghosts      table
	next        int // place in ghost of the next line
}

func newS3FIFO(d *Queues, slots int64) *s3fifo {
	p := &s3fifo{d: d, small: newQueue(d), main: newQueue(d), target: max(1, slots/10)}
	p.ghost = make([]int64, max(0, slots-p.target))
	for i := range p.ghost {
		p.ghost[i] = noLine
	}
	p.ghosts = newTable(int64(len(p.ghost)))
	return p
}

func (p *s3fifo) insert(slot int32) {
	line := p.d.slots[slot].line()
	if i := p.ghosts.among(line, p.ghost); i >= 0 {
		p.ghosts.del(tag(line), i)
		p.ghost[i] = noLine
		p.d.slots[slot].set(inMain)
		p.main.add(slot)
		return
	}
	p.small.add(slot)
}

func (p *s3fifo) hit(slot int32) {
	if p.d.slots[slot].flags()&freqMask != freqMask {
		p.d.slots[slot].word += once
	}
}

func (p *s3fifo) pin(int32) {}

func (p *s3fifo) unpin(slot int32) {
	flags := p.d.slots[slot].flags()
	if flags&parked == 0 {
		return
	}
	p.d.slots[slot].unset(parked)
	if flags&inMain != 0 {
		p.main.after(slot, -1)
	} else {
		p.small.after(slot, -1)
		p.parkedSmall--
	}
}

func (p *s3fifo) remove(slot int32) {
	flags := p.d.slots[slot].flags()
	switch {
	case flags&parked != 0 && flags&inMain == 0:
		p.parkedSmall--
	case flags&parked != 0:
	case flags&inMain != 0:
		p.main.take(slot)
	default:
		p.small.take(slot)
	}
}

func (p *s3fifo) victim() int32 {
	for {
		full := p.small.n+p.parkedSmall >= p.target
		if slot := p.small.oldest; slot >= 0 && (full || p.main.n == 0) {
			p.small.take(slot)
			flags := p.d.slots[slot].flags()
			switch {
			case flags&freqMask > once:
				p.d.slots[slot].unset(freqMask)
				p.d.slots[slot].set(inMain)
				p.main.add(slot)
			case flags&pinned != 0:
				p.d.slots[slot].set(parked)
				p.parkedSmall++
			default:
				p.remember(p.d.slots[slot].line())
				return slot
			}
			continue
		}
		slot := p.main.oldest
		p.main.take(slot)
		flags := p.d.slots[slot].flags()
		switch {
		case flags&freqMask != 0:
			p.d.slots[slot].word -= once
			p.main.add(slot)
		case flags&pinned != 0:
			p.d.slots[slot].set(parked)
		default:
			return slot
		}
	}
}

// remember puts a line that the small queue lost into the ghost queue, in the place of its oldest.
func (p *s3fifo) remember(line int64) {
	if len(p.ghost) == 0 {
		return
	}
	if old := p.ghost[p.next]; old >= 0 {
		p.ghosts.del(tag(old), int32(p.next))
	}
	p.ghost[p.next] = line
	p.ghosts.put(tag(line), int32(p.next))
	if p.next++; p.next == len(p.ghost) {
		p.next = 0
	}
}

func (p *s3fifo) likely(into []int32) int {
	if p.small.n+p.parkedSmall >= p.target {
		return p.small.likely(p.small.oldest, into)
	}
	return p.main.likely(p.main.oldest, into)
}

func (p *s3fifo) bytes() int64 {
	return int64(cap(p.ghost))*8 + p.ghosts.bytes()
}
