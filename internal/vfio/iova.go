package vfio

import (
	"slices"
	"sort"

	"helios/internal/errs"
)

const (
	pageBytes = 4096
	hugeBytes = 2 << 20
	// lowestIOVA keeps address 0 and what firmware likes below 1 MiB out of use, so that a
	// forgotten address in a command does not hit memory.
	lowestIOVA = IOVA(1 << 20)
)

// span is [start, end); an end never wraps because the last page of 64 bits is never given out.
type span struct{ start, end IOVA }

// iovaSpace hands out addresses: first fit, low ones first. free is sorted and has no neighbours
// that touch, except at a border of two ranges: the kernel takes no mapping across one.
type iovaSpace struct {
	free    []span
	borders map[IOVA]bool // where ranges start
}

// usable cuts ranges to whole pages above lowestIOVA, sorted.
func usable(ranges []Range) []span {
	var out []span
	for _, r := range ranges {
		if r.End < r.Start {
			continue
		}
		start := max(r.Start, lowestIOVA)
		if start > ^IOVA(0)-pageBytes {
			continue
		}
		start = (start + pageBytes - 1) &^ (pageBytes - 1)
		end := (min(r.End, ^IOVA(0)-pageBytes) + 1) &^ (pageBytes - 1)
		if start < end {
			out = append(out, span{start, end})
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].start < out[j].start })
	return out
}

// reset makes the space what ranges offer, less what is in use.
func (s *iovaSpace) reset(ranges []Range, used []span) {
	s.free, s.borders = usable(ranges), map[IOVA]bool{}
	for _, f := range s.free {
		s.borders[f.start] = true
	}
	for _, u := range used {
		s.remove(u)
	}
}

// remove takes a span out of free, which may hold only parts of it.
func (s *iovaSpace) remove(u span) {
	var out []span
	for _, f := range s.free {
		if u.end <= f.start || f.end <= u.start {
			out = append(out, f)
			continue
		}
		if f.start < u.start {
			out = append(out, span{f.start, u.start})
		}
		if u.end < f.end {
			out = append(out, span{u.end, f.end})
		}
	}
	s.free = out
}

// take finds size bytes at the lowest address that is phase modulo align (a power of two).
func (s *iovaSpace) take(size, align, phase uint64) (IOVA, error) {
	for i, f := range s.free {
		start := uint64(f.start) + (phase-uint64(f.start))&(align-1)
		if start < uint64(f.start) || start+size < start || start+size > uint64(f.end) {
			continue
		}
		got := span{IOVA(start), IOVA(start + size)}
		switch left, right := got.start > f.start, got.end < f.end; {
		case left && right:
			s.free[i].end = got.start
			s.free = slices.Insert(s.free, i+1, span{got.end, f.end})
		case left:
			s.free[i].end = got.start
		case right:
			s.free[i].start = got.end
		default:
			s.free = slices.Delete(s.free, i, i+1)
		}
		return got.start, nil
	}
	var most uint64
	for _, f := range s.free {
		most = max(most, uint64(f.end-f.start))
	}
	return 0, errs.New(errs.Capability,
		"vfio: no %d bytes of I/O addresses are free in one piece (largest: %d); lower the buffer budgets",
		size, most)
}

// give puts a span back that take had given.
func (s *iovaSpace) give(start IOVA, size uint64) {
	u := span{start, start + IOVA(size)}
	i := sort.Search(len(s.free), func(i int) bool { return s.free[i].start >= u.end })
	left := i > 0 && s.free[i-1].end == u.start && !s.borders[u.start]
	right := i < len(s.free) && s.free[i].start == u.end && !s.borders[u.end]
	switch {
	case left && right:
		s.free[i-1].end = s.free[i].end
		s.free = slices.Delete(s.free, i, i+1)
	case left:
		s.free[i-1].end = u.end
	case right:
		s.free[i].start = u.start
	default:
		s.free = slices.Insert(s.free, i, u)
	}
}
