package cache

import (
	"fmt"
	"math"
	"slices"
	"sync"

	"helios/cache/policy"
	"helios/internal/hostcpu"
)

// A lookup whose directory is in sets is dealt out to workers by chunks of its positions: each
// finds its rows' lines, the directory answers, and each writes its part of the ticket's lists
// where the chunks before it end. So the lists are those of one worker.

// eachScratch is a lookup by position.
type eachScratch struct {
	lines  []int64 // -1: in the CPU tier
	of     []uint32
	answer []policy.Answer // Slot of the CPU tier; of a line to be read, at last, its number
	index  []uint16        // a row's place in its line
	chunks []eachChunk
}

// eachChunk counts the rows of each list in a chunk of positions; then it has where they begin.
type eachChunk struct {
	first, end                   int
	gpu, cpu, miss, lines, fills int64
	err                          error
	_                            [64]byte
}

// perEachChunk positions make another worker worth its start.
const perEachChunk = 8192

func (s *eachScratch) reserve(n, workers int) {
	if cap(s.lines) < n {
		size := n + n/4
		s.lines, s.of, s.answer, s.index = make([]int64, size), make([]uint32, size),
			make([]policy.Answer, size), make([]uint16, size)
	}
	s.lines, s.of, s.answer, s.index = s.lines[:n], s.of[:n], s.answer[:n], s.index[:n]
	workers = min(max(n/perEachChunk, 1), max(workers, 1))
	s.chunks = make([]eachChunk, workers)
	for i := range s.chunks {
		s.chunks[i].first, s.chunks[i].end = i*n/workers, (i+1)*n/workers
	}
}

// each runs do for every chunk at the same time.
func (s *eachScratch) each(do func(c *eachChunk)) {
	if len(s.chunks) == 1 {
		do(&s.chunks[0])
		return
	}
	var wg sync.WaitGroup
	for i := range s.chunks {
		wg.Go(func() {
			section := hostcpu.Begin()
			do(&s.chunks[i])
			section.End(hostcpu.Lookups)
		})
	}
	wg.Wait()
}

// sortSets asks a directory in sets and fills t's lists.
func (d *Dynamic) sortSets(dir *policy.Sets, rows []int64, first int64, t *Ticket) error {
	s := &d.byPos
	s.reserve(len(rows), d.workers())
	s.each(func(c *eachChunk) { d.linesOf(c, rows, first) })
	for i := range s.chunks {
		if err := s.chunks[i].err; err != nil {
			return err
		}
	}
	dir.AccessEach(s.lines, s.answer, s.of)
	s.each(s.count)
	for i := range s.chunks {
		c := &s.chunks[i]
		for _, n := range [][2]*int64{{&c.gpu, &t.NGPU}, {&c.cpu, &t.NCPU}, {&c.miss, &t.NMiss},
			{&c.lines, &t.NLines}, {&c.fills, &t.fills}} {
			*n[0], *n[1] = *n[1], *n[1]+*n[0]
		}
	}
	if int64(cap(t.lines)) < t.NLines {
		t.lines = make([]int64, t.NLines+t.NLines/4)
	}
	t.lines = t.lines[:t.NLines]
	s.each(func(c *eachChunk) { s.number(c, t) })
	s.each(func(c *eachChunk) { s.emit(c, uint32(first), uint32(d.c.Lines.RowsPerLine), t) })
	t.dstRows = first + int64(len(rows))
	return nil
}

// linesOf finds the lines of a chunk's rows.
func (d *Dynamic) linesOf(c *eachChunk, rows []int64, first int64) {
	s, total := &d.byPos, uint64(d.c.Rows)
	single := d.c.Lines.RowsPerLine == 1
	for i := c.first; i < c.end; i++ {
		row := rows[i]
		if uint64(row) >= total {
			c.err = fmt.Errorf("dynamic cache: row %d at position %d: the dataset has rows 0 to %d",
				row, first+int64(i), d.c.Rows-1)
			return
		}
		if d.cpuIndex != nil {
			if tier, slot := d.cpuIndex[row/RowsPerLine].find(
				uint64(row % RowsPerLine)); tier != SSD {
				s.lines[i], s.answer[i].Slot = -1, int32(uint32(slot))
				c.cpu++
				continue
			}
		}
		if single { // a line is a row
			s.lines[i], s.index[i] = row, 0
			continue
		}
		line, index := d.c.Lines.Of(row)
		s.lines[i], s.index[i] = line, uint16(index)
	}
}

// count counts each list's share of a chunk.
func (s *eachScratch) count(c *eachChunk) {
	for i := c.first; i < c.end; i++ {
		if s.lines[i] < 0 {
			continue
		}
		a := s.answer[s.of[i]]
		if a.Hit {
			c.gpu++
			continue
		}
		c.miss++
		if int(s.of[i]) == i {
			c.lines++
			if a.Slot >= 0 {
				c.fills++
			}
		}
	}
}

// number numbers the lines that a chunk is the first to miss.
func (s *eachScratch) number(c *eachChunk, t *Ticket) {
	for i := c.first; i < c.end; i++ {
		if s.lines[i] < 0 || int(s.of[i]) != i || s.answer[i].Hit {
			continue
		}
		a := &s.answer[i]
		if a.Slot >= 0 {
			t.fillLine[c.fills], t.fillSlot[c.fills] = uint32(c.lines), uint32(a.Slot)
			c.fills++
		}
		t.lines[c.lines], a.Slot = s.lines[i], int32(uint32(c.lines))
		c.lines++
	}
}

// emit writes a chunk's part of the lists of rows.
func (s *eachScratch) emit(c *eachChunk, first, per uint32, t *Ticket) {
	gpu, cpu, miss := c.gpu, c.cpu, c.miss
	for i := c.first; i < c.end; i++ {
		pos := first + uint32(i)
		if s.lines[i] < 0 {
			t.cpuPos[cpu], t.cpuRow[cpu] = pos, uint32(s.answer[i].Slot)
			cpu++
			continue
		}
		a := s.answer[s.of[i]]
		row := uint32(a.Slot)*per + uint32(s.index[i])
		if a.Hit {
			t.gpuPos[gpu], t.gpuRow[gpu] = pos, row
			gpu++
		} else {
			t.missPos[miss], t.missRow[miss] = pos, row
			miss++
		}
	}
}

// perPiece lines of a ticket make another piece worth a worker's start.
const perPiece = 8192

// cut makes pieces of tickets of so many lines in all, for so many workers.
func (p *ReadPlan) cut(tickets []*Ticket, total int64, workers int) {
	each := max(perPiece, total/int64(max(workers, 1))+1)
	base := int64(0)
	p.pieces = p.pieces[:0]
	for _, t := range tickets {
		t.base, t.planned = base, true
		for lines := t.lines; len(lines) > 0; {
			n := len(p.pieces)
			p.pieces = slices.Grow(p.pieces, 1)[:n+1] // keeps what was there before
			k, part := &p.pieces[n], min(each, int64(len(lines)))
			if k.next == nil {
				k.next = make([]int64, p.d.c.Lines.SSDs)
			}
			k.lines, k.base = lines[:part], base
			lines, base = lines[part:], base+part
		}
	}
}

// each runs do for every piece, at the same time where there is enough to do.
func (p *ReadPlan) each(do func(k *planPiece)) {
	lines := 0
	var wg sync.WaitGroup
	for i := range p.pieces {
		k := &p.pieces[i]
		if lines += len(k.lines); lines > perPiece && i < len(p.pieces)-1 {
			wg.Go(func() {
				section := hostcpu.Begin()
				do(k)
				section.End(hostcpu.Lookups)
			})
			lines = 0
		} else {
			do(k)
		}
	}
	wg.Wait()
}

// count counts a piece's lines by SSD.
func (p *ReadPlan) count(k *planPiece) {
	clear(k.next)
	for _, l := range k.lines {
		k.next[ssdOf(l, uint32(len(k.next)))]++
	}
}

// deal puts a piece's lines behind the reads of their SSDs.
func (p *ReadPlan) deal(k *planPiece) {
	for i, l := range k.lines {
		next := &k.next[ssdOf(l, uint32(len(k.next)))]
		p.rows[*next], p.pos[*next] = l, uint32(k.base+int64(i))
		*next++
	}
}

// ssdOf is line mod ssds: by a short division where the line is short.
func ssdOf(line int64, ssds uint32) uint32 {
	if line <= math.MaxUint32 {
		return uint32(line) % ssds
	}
	return uint32(uint64(line) % uint64(ssds))
}
