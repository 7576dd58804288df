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
	slots  int64
	size   int // mini-batches of a superbatch
	cold   bool
	queue  []*batch
	before *superbatch.State
	filled []bool // slots that hold a line
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
		superbatch.Config{Slots: s.slots, Before: s.before, Keep: !s.cold})
	if err != nil {
		s.err = err
		return
	}
	if s.filled == nil || s.cold {
		s.filled = make([]bool, s.slots)
	}
	for i, b := range s.queue {
		s.tally.batch(b.index, b.again, s.count(&b.seen[s.view], x.Slots(i), x.Moves(i)))
	}
	if s.queue = s.queue[:0]; !s.cold {
		s.before = &x.After
	}
}

// count counts what a mini-batch finds and what it changes.
func (s *superbatches) count(seen *seen, slots []int32, moves []superbatch.Move) (c Counts) {
	for i := range seen.parts {
		p := &seen.parts[i]
		hits := int64(0)
		for j, n := range p.counts {
			if slots[p.at[j]] != superbatch.Miss {
				hits += int64(n)
			}
		}
		c.RowsGPU += hits
		c.RowsCPU += p.cpu
		c.RowsSSD += p.rows - p.cpu - hits
		c.Rows += p.rows
	}
	c.Accesses = int64(len(slots))
	for _, slot := range slots {
		if slot == superbatch.Miss {
			c.Reads++
		}
	}
	c.BytesSSD = c.Reads * s.v.bytes
	c.Inserted = int64(len(moves))
	c.Bypassed = c.Reads - c.Inserted
	for _, m := range moves {
		if s.filled[m.Slot] {
			c.Evicted++
		}
		s.filled[m.Slot] = true
	}
	return c
}

func (s *superbatches) passEnds() {
	s.play()
	s.tally.passEnds()
}
