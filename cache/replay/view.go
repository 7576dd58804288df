package replay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"os"

	"helios/cache"
)

// bitset is a set of rows or lines.
type bitset []uint64

func newBits(members []int64) bitset {
	b := bitset{}
	for _, m := range members {
		b.set(m)
	}
	return b
}

func (b bitset) has(n int64) bool { return n>>6 < int64(len(b)) && b[n>>6]>>(n&63)&1 != 0 }

func (b *bitset) set(n int64) {
	if need := n>>6 + 1; need > int64(len(*b)) {
		*b = append(*b, make([]uint64, max(need, int64(2*len(*b)))-int64(len(*b)))...)
	}
	(*b)[n>>6] |= 1 << (n & 63)
}

func (b bitset) clear(n int64) { b[n>>6] &^= 1 << (n & 63) }

// paged is a number for each line or row, in pages that exist once they are written to.
type paged struct{ pages [][]uint32 }

const pageBits = 14

func (p *paged) entry(n int64) *uint32 {
	page := n >> pageBits
	if page >= int64(len(p.pages)) {
		p.pages = append(p.pages, make([][]uint32, max(page+1, int64(2*len(p.pages)))-
			int64(len(p.pages)))...)
	}
	if p.pages[page] == nil {
		p.pages[page] = make([]uint32, 1<<pageBits)
	}
	return &p.pages[page][n&(1<<pageBits-1)]
}

// view translates lookups into lines of one size, for dynamic caches.
type view struct {
	lines  cache.Lines
	cpu    bitset // constant buffer
	bytes  int64  // of a line's command
	union  bool   // somebody needs the lines of whole batches
	set    lineSet
	future *nextFile // of the optimum; nil without
	part   int64     // lookups seen
}

// seen is a batch to a view.
type seen struct {
	parts []seenPart
	union []int64 // of the parts' lines, each once
	first int64   // number of the first part in the trace
}

// seenPart is a lookup: its lines in order of first appearance, each once.
type seenPart struct {
	lines  []int64
	counts []int32  // rows on them
	next   []uint32 // lookup that accesses the line next; never: math.MaxUint32
	places []int32  // places of lines in the batch's union
	rows   int64    // of the lookup
	cpu    int64    // rows in the constant buffer
}

const never = math.MaxUint32

func (v *view) see(parts [][]int64, s *seen) error {
	s.first = v.part
	s.parts = make([]seenPart, len(parts))
	for i, rows := range parts {
		p := &s.parts[i]
		v.lay(rows, p)
		if v.future != nil {
			p.next = make([]uint32, len(p.lines))
			if err := v.future.read(p.next); err != nil {
				return err
			}
		}
		v.part++
	}
	if v.union {
		v.set.reset(len(s.parts))
		for i := range s.parts {
			p := &s.parts[i]
			p.places = make([]int32, len(p.lines))
			for j, l := range p.lines {
				place, is := v.set.add(l)
				if is {
					s.union = append(s.union, l)
				}
				p.places[j] = place
			}
		}
	}
	return nil
}

// lay finds the lines of a lookup.
func (v *view) lay(rows []int64, p *seenPart) {
	v.set.reset(len(rows))
	p.rows, p.cpu = int64(len(rows)), 0
	if p.lines == nil {
		p.lines, p.counts = make([]int64, 0, len(rows)), make([]int32, 0, len(rows))
	}
	p.lines, p.counts = p.lines[:0], p.counts[:0]
	for _, row := range rows {
		if v.cpu.has(row) {
			p.cpu++
			continue
		}
		line, _ := v.lines.Of(row)
		place, is := v.set.add(line)
		if is {
			p.lines = append(p.lines, line)
			p.counts = append(p.counts, 0)
		}
		p.counts[place]++
	}
}

// lineSet numbers the lines of a lookup as they come.
type lineSet struct {
	keys   []int64 // line + 1
	values []int32
	used   []int32
	n      int32
}

func (s *lineSet) reset(n int) {
	for _, slot := range s.used {
		s.keys[slot] = 0
	}
	s.used, s.n = s.used[:0], 0
	if want := 2*n + 16; want > len(s.keys) {
		s.keys, s.values = make([]int64, want), make([]int32, want)
	}
}

func (s *lineSet) add(line int64) (number int32, isNew bool) {
	if 2*len(s.used)+2 > len(s.keys) {
		s.grow()
	}
	slot := s.place(line)
	if s.keys[slot] != 0 {
		return s.values[slot], false
	}
	s.keys[slot], s.values[slot] = line+1, s.n
	s.used = append(s.used, int32(slot))
	s.n++
	return s.n - 1, true
}

func (s *lineSet) place(line int64) int {
	hash := uint64(line) * 0x9e3779b97f4a7c15
	hi, _ := bits.Mul64(hash^hash>>32, uint64(len(s.keys)))
	slot := int(hi)
	for s.keys[slot] != 0 && s.keys[slot] != line+1 {
		if slot++; slot == len(s.keys) {
			slot = 0
		}
	}
	return slot
}

func (s *lineSet) grow() {
	old := *s
	s.keys, s.values = make([]int64, 2*len(old.keys)+16), make([]int32, 2*len(old.keys)+16)
	s.used = make([]int32, 0, len(old.used)*2)
	for _, slot := range old.used {
		to := s.place(old.keys[slot] - 1)
		s.keys[to], s.values[to] = old.keys[slot], old.values[slot]
		s.used = append(s.used, int32(to))
	}
}

// nextFile keeps, for each line of each lookup, which lookup accesses it next. It is written from
// the last lookup to the first and read from the first to the last, so from its end to its
// beginning: four bytes an access, in a file without a name.
type nextFile struct {
	f    *os.File
	end  int64 // of what is not read yet
	buf  []byte
	from int64 // offset of buf
}

func (n *nextFile) close() {
	if n != nil && n.f != nil {
		_ = n.f.Close() // it has no name: nothing can be lost
		n.f = nil
	}
}

const nextChunk = 1 << 20

// read takes the next lookup's numbers.
func (n *nextFile) read(to []uint32) error {
	begin := n.end - 4*int64(len(to))
	if begin < 0 {
		return errors.New("replay: the trace changed while it was read")
	}
	if begin < n.from || n.end > n.from+int64(len(n.buf)) {
		n.from = max(0, min(begin, n.end-nextChunk))
		n.buf = append(n.buf[:0], make([]byte, n.end-n.from)...)
		if _, err := n.f.ReadAt(n.buf, n.from); err != nil {
			return fmt.Errorf("replay: next accesses: %w", err)
		}
	}
	b := n.buf[begin-n.from:]
	for i := range to {
		to[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	n.end = begin
	return nil
}

// nextWriter fills a nextFile.
type nextWriter struct {
	file   *nextFile
	v      *view
	number int64 // of the lookup to come, from behind
	last   paged // by line: its nearest later lookup + 1
	p      seenPart
	buf    []byte
}

func newNextWriter(dir string, v *view, parts int64) (*nextWriter, error) {
	if parts >= never-1 {
		return nil,
			fmt.Errorf(
				"replay: a trace of %d lookups; the optimum can be found for fewer than 2^32",
				parts)
	}
	f, err := os.CreateTemp(dir, "heliosctl-replay-*")
	if err != nil {
		return nil,
			fmt.Errorf("replay: a file for the next accesses: %w; set TMPDIR to a folder with room",
				err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &nextWriter{file: &nextFile{f: f}, v: v, number: parts}, nil
}

func (w *nextWriter) part(rows []int64) error {
	w.number--
	w.v.lay(rows, &w.p)
	for _, line := range w.p.lines {
		last := w.last.entry(line)
		w.buf = binary.LittleEndian.AppendUint32(w.buf, *last-1) // 0 - 1 is never
		*last = uint32(w.number) + 1
	}
	if len(w.buf) >= nextChunk {
		return w.end()
	}
	return nil
}

func (w *nextWriter) end() error {
	if _, err := w.file.f.WriteAt(w.buf, w.file.end); err != nil {
		return fmt.Errorf(
			"replay: a file for the next accesses: %w; set TMPDIR to a folder with room", err)
	}
	w.file.end += int64(len(w.buf))
	w.buf = w.buf[:0]
	return nil
}
