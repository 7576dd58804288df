package planner

import (
	"math/bits"

	"helios/internal/philox"
)

// places puts ranks at row numbers: a permutation of [0, n), so that hot rows lie everywhere, as
// they do in a graph whose numbering says nothing of hotness. A Feistel network over the next power
// of four, walked until it is inside.
type places struct {
	n    uint64
	half uint
	key  uint64
}

func newPlaces(n int64, seed uint64) places {
	width := uint(bits.Len64(uint64(max(n-1, 1))))
	return places{n: uint64(n), half: (width + 1) / 2, key: seed}
}

func (p places) row(rank int64) int64 {
	mask := uint64(1)<<p.half - 1
	for x := uint64(rank); ; {
		l, r := x>>p.half, x&mask
		for round := range uint64(4) {
			l, r = r, l^philox.Mix(r+p.key+round*0x9E3779B97F4A7C15)&mask
		}
		if x = l<<p.half | r; x < p.n {
			return int64(x)
		}
	}
}

// set is a set of numbers that are not negative.
type set struct {
	slots []int64 // number + 1
	n     int
}

// NewSet makes a set with room for so many numbers.
func NewSet(room int) *set {
	size := 1 << bits.Len(uint(max(2*room, 1024)))
	return &set{slots: make([]int64, size)}
}

// Add reports whether x is new.
func (s *set) Add(x int64) bool {
	if 2*s.n >= len(s.slots) {
		old := s.slots
		s.slots, s.n = make([]int64, 2*len(old)), 0
		for _, v := range old {
			if v > 0 {
				s.Add(v - 1)
			}
		}
	}
	mask := uint64(len(s.slots) - 1)
	for i := philox.Mix(uint64(x)) & mask; ; i = (i + 1) & mask {
		switch s.slots[i] {
		case 0:
			s.slots[i] = x + 1
			s.n++
			return true
		case x + 1:
			return false
		}
	}
}
