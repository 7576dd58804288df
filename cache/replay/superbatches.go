package replay

import (
	"context"

	"helios/cache/superbatch"
)

// superbatches plays a cache that knows the accesses of a superbatch at a time. A mini-batch is
// gathered whole, so its parts count as one lookup. A superbatch ends with its pass, and where the
// run went back to batches that it had looked up already.
type superbatches struct {
	tally
	ctx    context.Context // of the replay
	view   int
	v      *view
	gpu    int64 // slots of the GPU tier, the first ones
	slots  int64 // of both tiers
	size   int   // mini-batches of a superbatch
	queue  []*batch
	before *superbatch.State
	filled []bool // slots that hold a line
	holds  int64  // how many
	err    error  // nothing is played after it
}

func (s *superbatches) batch(b *batch) {
	if b.again {
		s.play()
	}
	s.queue = append(s.queue, b)
	if len(s.queue) == s.size {
		s.play()
	}
}

// play plays the superbatch that has come together.
func (s *superbatches) play() {
	if len(s.queue) == 0 || s.err != nil {
		return
	}
	known := make(superbatch.Memory, len(s.queue))
	for i, b := range s.queue {
		known[i] = b.seen[s.view].union
	}
	x, err := superbatch.Inspect(s.ctx, known,
		superbatch.Config{Slots: s.slots, GPU: s.gpu, Before: s.before, Keep: true})
	if err != nil {
		s.err = err
		return
	}
	if s.filled == nil {
		s.filled, s.holds = make([]bool, s.slots), 0
	}
	for i, b := range s.queue {
		s.tally.batch(b.index, b.again, s.count(&b.seen[s.view], x, i))
	}
	s.queue, s.before = s.queue[:0], &x.After
}

// count counts what a mini-batch finds and what it changes.
func (s *superbatches) count(seen *seen, x *superbatch.Changes, batch int) (c Counts) {
	slots, gpu := x.Slots(batch), int32(s.gpu)
	for i := range seen.parts {
		p := &seen.parts[i]
		c.RowsCPU += p.cpu
		c.Rows += p.rows
		for j, n := range p.counts {
			switch slot := slots[p.places[j]]; {
			case slot == superbatch.Miss:
				c.RowsSSD += int64(n)
			case slot < gpu:
				c.RowsGPU += int64(n)
			default:
				c.RowsCPU += int64(n)
			}
		}
	}
	c.Accesses = int64(len(slots))
	for _, slot := range slots {
		if slot == superbatch.Miss {
			c.Reads++
		}
	}
	c.BytesSSD = c.Reads * s.v.bytes
	held := s.holds
	for _, d := range x.Demotions(batch) {
		s.fills(d.From, false)
		c.Demoted++
	}
	for _, m := range x.Moves(batch) {
		switch from := slots[m.At]; {
		case from == superbatch.Miss:
			c.Inserted++
		case from < gpu:
			s.fills(from, false)
			c.Demoted++
		default:
			s.fills(from, false)
			c.Promoted++
		}
	}
	for _, d := range x.Demotions(batch) {
		s.fills(d.To, true)
	}
	for _, m := range x.Moves(batch) {
		s.fills(m.Slot, true)
	}
	c.Evicted = held + c.Inserted - s.holds
	c.Bypassed = c.Reads - c.Inserted
	return c
}

// fills notes that a slot holds a line, or holds none.
func (s *superbatches) fills(slot int32, line bool) {
	if s.filled[slot] == line {
		return
	}
	if s.filled[slot] = line; line {
		s.holds++
	} else {
		s.holds--
	}
}

func (s *superbatches) passEnds() {
	s.play()
	s.tally.passEnds()
}
