package superbatch

import (
	"math/bits"
	"slices"
)

// MaxSet is a set of numbers that finds its greatest at once: bits, and for each word of them a bit
// in the next level.
type MaxSet struct{ levels [][]uint64 }

// NewMaxSet makes a set with room for numbers below n. It grows for others.
func NewMaxSet(n int64) *MaxSet {
	s := &MaxSet{}
	for {
		n = (n + 63) >> 6
		s.levels = append(s.levels, make([]uint64, max(n, 1)))
		if n <= 1 {
			return s
		}
	}
}

// Has reports whether the set, which has room for n, has it.
func (s *MaxSet) Has(n int64) bool { return s.levels[0][n>>6]>>(n&63)&1 != 0 }

// Set adds a number.
func (s *MaxSet) Set(n int64) {
	if n>>6 >= int64(len(s.levels[0])) {
		s.grow(n + 1)
	}
	for _, r := range s.levels {
		was := r[n>>6]
		r[n>>6] = was | 1<<(n&63)
		if was != 0 {
			return
		}
		n >>= 6
	}
}

// grow makes room for twice as many numbers, or for those below n.
func (s *MaxSet) grow(n int64) {
	larger := NewMaxSet(max(n, 2*64*int64(len(s.levels[0]))))
	for i, r := range larger.levels {
		if i < len(s.levels) {
			copy(r, s.levels[i])
		} else { // the level above the one that was the last
			below := larger.levels[i-1]
			for w := range 64 {
				if w < len(below) && below[w] != 0 {
					r[0] |= 1 << w
				}
			}
		}
	}
	s.levels = larger.levels
}

// Clear removes a number that the set has.
func (s *MaxSet) Clear(n int64) {
	for _, r := range s.levels {
		r[n>>6] &^= 1 << (n & 63)
		if r[n>>6] != 0 {
			return
		}
		n >>= 6
	}
}

// Last returns the greatest number of a set that is not empty.
func (s *MaxSet) Last() int64 {
	n := int64(0)
	for _, r := range slices.Backward(s.levels) {
		n = n<<6 | int64(bits.Len64(r[n])-1)
	}
	return n
}

func (s *MaxSet) bytes() (n int64) {
	for _, r := range s.levels {
		n += int64(len(r)) * 8
	}
	return n
}
