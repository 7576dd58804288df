package replay

import (
	"context"
	"slices"

	"helios/cache/superbatch"
	"helios/cache/trace"
)

// planned plays a run's own tiers that know a superbatch: those of the trace. A pass is played at
// its end, as a superbatch that the run did not finish knew mini-batches that stand behind the next
// one's beginning.
type planned struct {
	tally
	ctx    context.Context
	bytes  int64 // of a row's command
	fill   bool
	marks  []trace.Superbatch // of the pass
	rows   map[int][]int64    // by mini-batch of the pass
	before *superbatch.State
	err    error // nothing is played after it
}

// mark begins a superbatch.
func (p *planned) mark(s trace.Superbatch) {
	if len(p.marks) > 0 && (p.marks[0].Kind != s.Kind || p.marks[0].Epoch != s.Epoch) {
		p.forget() // of a pass without a mini-batch
	}
	p.marks = append(p.marks, s)
}

func (p *planned) forget() {
	p.marks, p.rows, p.before = p.marks[:0], nil, nil
}

func (p *planned) batch(b *batch) {
	if p.rows == nil {
		p.rows = map[int][]int64{}
	}
	p.rows[b.index] = slices.Concat(b.parts...)
}

func (p *planned) passEnds() {
	for i, s := range p.marks {
		end := s.First + s.Batches
		if i+1 < len(p.marks) {
			end = min(end, p.marks[i+1].First)
		}
		if p.err == nil && !p.play(s, end) {
			p.before = nil // the run stopped in it
		}
	}
	p.marks, p.rows = p.marks[:0], nil
	p.tally.passEnds()
}

// play plays a superbatch, of which the mini-batches before end trained. False: the trace does not
// hold all of it.
func (p *planned) play(s trace.Superbatch, end int) bool {
	known := make(superbatch.Memory, s.Batches)
	for i := range known {
		rows, ok := p.rows[s.First+i]
		if !ok {
			return false
		}
		known[i] = rows
	}
	slots := s.GPURows + s.CPURows
	before := p.before
	switch {
	case before == nil || s.Kept == 0 || int64(len(before.Rows)) != slots:
		before = nil
	case s.Kept < slots:
		before = before.Without(s.Kept)
	}
	x, err := superbatch.Inspect(p.ctx, known, superbatch.Config{Slots: slots, GPU: s.GPURows,
		Before: before, Fill: p.fill, Keep: !p.fill})
	if err != nil {
		p.err = err
		return false
	}
	p.before = &x.After
	p.sum.BytesSSD += x.Stats.Loaded * p.bytes
	for i := range end - s.First {
		var c Counts
		for _, slot := range x.Slots(i) {
			switch {
			case slot == superbatch.Miss:
				c.RowsSSD++
			case int64(slot) < s.GPURows:
				c.RowsGPU++
			default:
				c.RowsCPU++
			}
		}
		c.Rows = int64(len(known[i]))
		c.Accesses, c.Reads, c.BytesSSD = c.Rows, c.RowsSSD, c.RowsSSD*p.bytes
		c.Inserted = int64(len(x.Moves(i)))
		p.tally.batch(s.First+i, false, c)
	}
	return true
}
