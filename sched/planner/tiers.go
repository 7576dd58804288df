package planner

import (
	"context"
	"slices"

	"helios/cache"
	"helios/cache/policy"
	"helios/cache/superbatch"
	"helios/gpuio"
	"helios/internal/hostcpu"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/virtual"
)

// lookups put an epoch's batches through a configuration's tiers, as a run's would.
type lookups struct {
	ctx      context.Context
	c        plan.Config
	a        *accesses
	tiers    plan.TierSizes
	perHop   bool
	warm     int // batches that a dynamic tier has seen before the first one
	rowBytes int64

	lines cache.Lines
	dir   policy.Directory
	told  int // batches that the directory has heard of

	changes *superbatch.Changes
	first   int // of the superbatch
	after   *superbatch.State

	pages    int64 // of a page of packed rows: rows
	nextPage int64
}

// source is what virtual.Play asks.
func (l *lookups) source() virtual.Source {
	s := virtual.Source{Open: l.open, Super: l.super}
	switch {
	case l.c.Dynamic():
		s.Batch = l.dynamic
	case l.c.Planned():
		s.Batch = l.planned
	case l.c.LaidOut():
		s.Batch = l.packed
	default:
		s.Batch = l.static
	}
	return s
}

// open makes a dynamic tier and lets it fill.
func (l *lookups) open(_ gpuio.Layout, lines cache.Lines) (err error) {
	if !l.c.Dynamic() {
		return nil
	}
	l.lines = lines
	if l.dir, err = policy.New(policy.Config{Policy: l.c.Policy, Kind: l.c.Directory,
		Seed: l.c.Seed, Lines: lines.Count(l.a.rows), Slots: l.slots(lines)}); err != nil {
		return err
	}
	for i := range l.warm {
		if _, err := l.dynamic(i - l.warm); err != nil {
			return err
		}
	}
	return nil
}

// slots is how many lines a dynamic tier holds.
func (l *lookups) slots(lines cache.Lines) int64 {
	return min(l.tiers.GPURows*l.rowBytes/lines.LineBytes, lines.Count(l.a.rows))
}

// parts cuts a batch's rows into the parts that are looked up one after the other.
func (l *lookups) parts(b *batch, look func(rows, ranks []int64) (cost.Part, []int64),
) *virtual.Looked {
	x := &virtual.Looked{Shape: b.shape}
	from := int64(0)
	for h, to := range b.shape.HopEnd {
		if !l.perHop && h < len(b.shape.HopEnd)-1 {
			continue
		}
		part, read := look(b.rows[from:to], b.ranks[from:to])
		part.Count = to - from
		x.Shape.Parts = append(x.Shape.Parts, part)
		x.Read = append(x.Read, read)
		from = to
	}
	return x
}

// static has the hottest rows in the GPU tier and the next ones in the CPU tier.
func (l *lookups) static(i int) (*virtual.Looked, error) {
	b, err := l.a.get(l.ctx, i)
	if err != nil {
		return nil, err
	}
	gpu, both := l.tiers.GPURows, l.tiers.GPURows+l.tiers.CPURows
	return l.parts(b, func(rows, ranks []int64) (p cost.Part, read []int64) {
		for k, r := range ranks {
			switch {
			case r < gpu:
				p.NGPU++
			case r < both:
				p.NCPU++
			default:
				read = append(read, rows[k])
			}
		}
		p.NMiss = int64(len(read))
		return p, read
	}), nil
}

// index is where batch i is among those that a dynamic tier sees.
func (l *lookups) index(i int) int { return i + l.warm }

// linesOf returns the different lines of the rows that are not in the CPU buffer, and how many rows
// each has.
func (l *lookups) linesOf(rows, ranks []int64) (lines []int64, counts []int64, inBuffer int64) {
	at := map[int64]int{}
	for k, row := range rows {
		if ranks[k] < l.tiers.CPURows {
			inBuffer++
			continue
		}
		line, _ := l.lines.Of(row)
		j, ok := at[line]
		if !ok {
			j = len(lines)
			at[line] = j
			lines, counts = append(lines, line), append(counts, 0)
		}
		counts[j]++
	}
	return lines, counts, inBuffer
}

// dynamic looks rows up in the constant CPU buffer first, and then lines in the GPU tier.
func (l *lookups) dynamic(i int) (*virtual.Looked, error) {
	at := l.index(i)
	b, err := l.a.get(l.ctx, at)
	if err != nil {
		return nil, err
	}
	for ; l.c.Window > 0 && l.told <= at+l.c.Window; l.told++ {
		coming, err := l.a.get(l.ctx, l.told)
		if err != nil {
			return nil, err
		}
		lines, _, _ := l.linesOf(coming.rows, coming.ranks)
		l.dir.Announce(lines)
	}
	l.dir.NextBatch()
	return l.parts(b, func(rows, ranks []int64) (p cost.Part, read []int64) {
		lines, counts, inBuffer := l.linesOf(rows, ranks)
		out, before := make([]policy.Answer, len(lines)), l.dir.Stats()
		l.dir.Access(lines, out)
		for j, x := range out {
			if x.Hit {
				p.NGPU += counts[j]
				continue
			}
			p.NMiss += counts[j]
			read = append(read, lines[j])
		}
		st := l.dir.Stats()
		p.NCPU, p.Fills = inBuffer, st.Inserted-before.Inserted
		p.Evicted, p.Bypassed = st.Evicted-before.Evicted, st.Bypassed-before.Bypassed
		p.Lines, p.Missed = int64(len(lines)), int64(len(read))
		return p, read
	}), nil
}

// super finds what tiers that know a superbatch do in one.
func (l *lookups) super(first, end int) (fill [2][]int64, err error) {
	var rows superbatch.Memory
	for i := first; i < end; i++ {
		b, err := l.a.get(l.ctx, i)
		if err != nil {
			return fill, err
		}
		rows = append(rows, b.rows)
	}
	l.first = first
	l.changes, err = superbatch.Inspect(l.ctx, rows, superbatch.Config{
		Slots: l.tiers.GPURows + l.tiers.CPURows, GPU: l.tiers.GPURows, Before: l.after,
		Fill: l.c.SuperbatchFill, Keep: !l.c.SuperbatchFill, Workers: hostcpu.Count()})
	if err != nil {
		return fill, err
	}
	l.after = &l.changes.After
	for _, m := range l.changes.Fill {
		tier := 0
		if int64(m.Slot) >= l.tiers.GPURows {
			tier = 1
		}
		fill[tier] = append(fill[tier], l.changes.First[m.At])
	}
	return fill, nil
}

// planned says where the rows of a batch of the superbatch are.
func (l *lookups) planned(i int) (*virtual.Looked, error) {
	b, err := l.a.get(l.ctx, i)
	if err != nil {
		return nil, err
	}
	index := i - l.first
	slots := l.changes.Slots(index)
	x := l.parts(b, func(rows, _ []int64) (p cost.Part, read []int64) {
		for k, slot := range slots[:len(rows)] {
			switch {
			case slot == superbatch.Miss:
				read = append(read, rows[k])
			case int64(slot) < l.tiers.GPURows:
				p.NGPU++
			default:
				p.NCPU++
			}
		}
		slots = slots[len(rows):]
		p.NMiss = int64(len(read))
		return p, read
	})
	x.Shape.Saved = savedBytes(&b.shape)
	x.Shape.Change.Demoted = int64(len(l.changes.Demotions(index)))
	for _, m := range l.changes.Moves(index) {
		if int64(m.Slot) < l.tiers.GPURows {
			x.Shape.Change.ToGPU++
		} else {
			x.Shape.Change.ToCPU++
		}
	}
	return x, nil
}

// savedBytes is about what a sample takes in a superbatch's files: two bytes a row as differences,
// an offset for each destination, and a number of four bytes an edge.
func savedBytes(s *cost.Shape) int64 {
	last := len(s.HopEnd) - 1
	n := 2*s.HopEnd[last] + 4*s.Edges()
	for _, end := range s.HopEnd[:last] {
		n += 8 * end
	}
	return n
}

// packed reads a mini-batch's own pages, which follow each other.
func (l *lookups) packed(i int) (*virtual.Looked, error) {
	x, err := l.static(i)
	if err != nil {
		return nil, err
	}
	for k := range x.Read {
		rows := int64(len(x.Read[k]))
		n := (rows + l.pages - 1) / l.pages
		x.Read[k] = slices.Grow([]int64(nil), int(n))
		for range n {
			x.Read[k] = append(x.Read[k], l.nextPage)
			l.nextPage++
		}
		p := &x.Shape.Parts[k]
		p.Staged, p.Chunk = rows, rows
	}
	x.Shape.Saved = savedBytes(&x.Shape)
	return x, nil
}
