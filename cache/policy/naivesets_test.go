package policy

import (
	"math/bits"
	"slices"

	"helios/internal/philox"
)

// naiveSets is a second, slow and obvious implementation of Sets: a list of lines for each set and
// queue, and pins that are looked up in the announced batches themselves.
type naiveSets struct {
	rule      string
	seed      uint64
	sets      []*naiveSet
	batch     uint32
	seen      map[int64]bool   // what the current batch accessed
	announced []map[int64]bool // of the current batch, then of later ones
	ahead     bool             // the first of announced is the current batch
	stats     Stats
	dropped   int64
}

type naiveSet struct {
	slots       []int64 // by way, -1: none
	queue       []int64 // lru, sieve: oldest first
	small, main []int64 // s3fifo: oldest first
	ghosts      []int64
	hand        int
	nextGhost   int
	visited     map[int64]bool
	count       map[int64]int
}

func newNaiveSets(rule string, slots int, seed uint64) *naiveSets {
	n := &naiveSets{rule: rule, seed: seed, batch: 1, seen: map[int64]bool{}}
	sets := (slots + Ways - 1) / Ways
	for i := range sets {
		ways := (i+1)*slots/sets - i*slots/sets
		s := &naiveSet{visited: map[int64]bool{}, count: map[int64]int{},
			slots: slices.Repeat([]int64{-1}, ways),
			ghosts: slices.Repeat([]int64{-1},
				ways-max(1, ways/10))}
		n.sets = append(n.sets, s)
	}
	return n
}

func (n *naiveSets) set(line int64) *naiveSet {
	hi, _ := bits.Mul64(mix(uint64(line)), uint64(len(n.sets)))
	return n.sets[hi]
}

func (n *naiveSets) cached(line int64) bool {
	return len(n.sets) > 0 && slices.Contains(n.set(line).slots, line)
}

func (n *naiveSets) announce(lines []int64) {
	b := map[int64]bool{}
	for _, l := range lines {
		b[l] = true
	}
	n.announced = append(n.announced, b)
}

func (n *naiveSets) nextBatch() {
	if n.ahead {
		n.announced = n.announced[1:]
	}
	n.ahead = len(n.announced) > 0
	n.batch++
	n.seen = map[int64]bool{}
}

func (n *naiveSets) stays(line int64) bool {
	if n.seen[line] && n.rule != Sieve && n.rule != S3FIFO {
		return true
	}
	for i, b := range n.announced {
		if b[line] && (i > 0 || !n.ahead || !n.seen[line]) {
			return true
		}
	}
	return false
}

// access answers for distinct lines: was it there, and is it there behind the part.
func (n *naiveSets) access(lines []int64) (hit, in []bool) {
	hit, in = make([]bool, len(lines)), make([]bool, len(lines))
	for i, l := range lines {
		hit[i] = n.cached(l)
	}
	n.stats.Accesses += int64(len(lines))
	for i, l := range lines {
		if hit[i] {
			in[i] = true
			n.stats.Hits++
			if !n.seen[l] {
				n.seen[l] = true
				n.set(l).hit(n.rule, l)
			}
		}
	}
	for i, l := range lines {
		if !hit[i] && len(n.sets) > 0 {
			s := n.set(l)
			way := slices.Index(s.slots, -1)
			if way < 0 {
				var may []int64
				for _, c := range s.slots {
					if !n.stays(c) {
						may = append(may, c)
					}
				}
				if len(may) == 0 {
					continue
				}
				old := n.victim(s, l, may)
				way = slices.Index(s.slots, old)
				delete(s.visited, old)
				delete(s.count, old)
			}
			s.slots[way] = l
			s.insert(n.rule, l)
			n.seen[l] = true
		}
	}
	for i, l := range lines {
		if hit[i] {
			continue
		}
		if in[i] = n.cached(l); in[i] {
			n.stats.Inserted++
		} else {
			n.stats.Bypassed++
		}
	}
	held := int64(0)
	for _, s := range n.sets {
		for _, l := range s.slots {
			if l >= 0 {
				held++
			}
		}
	}
	n.stats.Evicted = n.stats.Inserted - held - n.dropped
	return hit, in
}

func (s *naiveSet) hit(rule string, l int64) {
	switch rule {
	case LRU:
		s.queue = append(without(s.queue, l), l)
	case Clock, Sieve:
		s.visited[l] = true
	case S3FIFO:
		s.count[l] = min(3, s.count[l]+1)
	}
}

func (s *naiveSet) insert(rule string, l int64) {
	switch rule {
	case LRU, Sieve:
		s.queue = append(s.queue, l)
	case S3FIFO:
		if i := slices.Index(s.ghosts, l); i >= 0 {
			s.ghosts[i] = -1
			s.main = append(s.main, l)
		} else {
			s.small = append(s.small, l)
		}
	}
}

// victim takes a line of may out of the queues.
func (n *naiveSets) victim(s *naiveSet, line int64, may []int64) int64 {
	switch n.rule {
	case Random:
		w := philox.Block(philox.Key(n.seed, philox.StreamCache),
			[4]uint32{uint32(line), uint32(line >> 32), n.batch, 0})
		return may[philox.Bounded(uint64(w[1])<<32|uint64(w[0]), uint64(len(may)))]
	case LRU:
		for _, l := range s.queue {
			if slices.Contains(may, l) {
				s.queue = without(s.queue, l)
				return l
			}
		}
	case Clock:
		for {
			l := s.slots[s.hand]
			s.hand = (s.hand + 1) % len(s.slots)
			if slices.Contains(may, l) && !s.visited[l] {
				return l
			}
			delete(s.visited, l)
		}
	case Sieve:
		for {
			l := s.queue[s.hand]
			if slices.Contains(may, l) && !s.visited[l] {
				s.queue = without(s.queue, l)
				s.hand %= max(len(s.queue), 1)
				return l
			}
			delete(s.visited, l)
			s.hand = (s.hand + 1) % len(s.queue)
		}
	}
	for {
		first := func(q []int64) int64 {
			for _, l := range q {
				if slices.Contains(may, l) {
					return l
				}
			}
			return -1
		}
		small, main := first(s.small), first(s.main)
		if small >= 0 && (len(s.small) >= max(1, len(s.slots)/10) || main < 0) {
			s.small = without(s.small, small)
			if s.count[small] > 1 {
				s.count[small] = 0
				s.main = append(s.main, small)
				continue
			}
			if len(s.ghosts) > 0 {
				s.ghosts[s.nextGhost] = small
				s.nextGhost = (s.nextGhost + 1) % len(s.ghosts)
			}
			return small
		}
		s.main = without(s.main, main)
		if s.count[main] == 0 {
			return main
		}
		s.count[main]--
		s.main = append(s.main, main)
	}
}

func (n *naiveSets) drop(l int64) {
	s := n.set(l)
	s.slots[slices.Index(s.slots, l)] = -1
	if i := slices.Index(s.queue, l); i >= 0 && i < s.hand {
		s.hand--
	}
	s.queue, s.small, s.main = without(s.queue, l), without(s.small, l), without(s.main, l)
	delete(s.visited, l)
	delete(s.count, l)
	delete(n.seen, l)
	n.dropped++
}
