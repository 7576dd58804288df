package policy

import "slices"

// naive is a second, slow and obvious implementation of a directory and its policies: lists of lines that
// are searched from end to end, and pins that are looked up in the announced batches themselves.
type naive struct {
	policy    string
	slots     int
	cached    map[int64]*entry
	clock     int
	batch     map[int64]bool   // lines of the current batch
	own       map[int64]bool   // what the current batch announced and has not accessed
	announced []map[int64]bool // later batches
	state     uint64
	// Orders of lines, oldest first: random's array, the queues, the lines taken out of a queue while pinned.
	list, small, main, ghost []int64
	parkedSmall, parkedMain  []int64
	hand                     int // into list (sieve); len(list): at the start again
	stats                    Stats
	drained                  bool
}

type entry struct {
	last    int // time of its last access
	freq    int
	visited bool
}

func newNaive(policy string, slots int, seed uint64) *naive {
	return &naive{policy: policy, slots: slots, cached: map[int64]*entry{}, batch: map[int64]bool{}, state: seed, drained: true}
}

func (n *naive) pinned(line int64) bool {
	if n.batch[line] || n.own[line] {
		return true
	}
	for _, b := range n.announced {
		if b[line] {
			return true
		}
	}
	return false
}

func without(list []int64, line int64) []int64 {
	at := slices.Index(list, line)
	if at < 0 {
		return list
	}
	return slices.Delete(slices.Clone(list), at, at+1)
}

// Random's array: the last line takes the place of one that leaves.
func (n *naive) leaveArray(line int64) {
	at := slices.Index(n.list, line)
	if at < 0 {
		return
	}
	n.list[at] = n.list[len(n.list)-1]
	n.list = n.list[:len(n.list)-1]
}

func (n *naive) pinChanged(line int64, was bool) {
	now := n.pinned(line)
	if was == now || n.cached[line] == nil {
		return
	}
	if now {
		if n.policy == Random {
			n.leaveArray(line)
		}
		return
	}
	if n.policy == Random {
		n.list = append(n.list, line)
		return
	}
	if at := slices.Index(n.parkedSmall, line); at >= 0 {
		n.parkedSmall = without(n.parkedSmall, line)
		switch n.policy {
		case Clock:
			n.list = append(n.list, line)
		case Sieve:
			n.list = slices.Insert(slices.Clone(n.list), n.hand, line)
			n.hand++
			if n.drained { // the hand stays at the start when it is there
				n.hand = len(n.list)
			}
		case S3FIFO:
			n.small = append([]int64{line}, n.small...)
		}
	}
	if slices.Contains(n.parkedMain, line) {
		n.parkedMain = without(n.parkedMain, line)
		n.main = append([]int64{line}, n.main...)
	}
}

func (n *naive) announce(lines []int64) {
	b := map[int64]bool{}
	for _, l := range lines {
		b[l] = true
	}
	// One by one, so that random's array changes in this order.
	part := map[int64]bool{}
	n.announced = append(n.announced, part)
	for _, l := range lines {
		was := n.pinned(l)
		part[l] = true
		n.pinChanged(l, was)
	}
}

func (n *naive) nextBatch(order []int64) {
	for _, l := range order {
		if !n.batch[l] {
			continue
		}
		was := n.pinned(l)
		delete(n.batch, l)
		n.pinChanged(l, was)
	}
	n.batch = map[int64]bool{}
	n.own = nil
	if len(n.announced) > 0 {
		n.own, n.announced = n.announced[0], n.announced[1:]
	}
}

// access answers per line: hit, or whether it is cached now.
func (n *naive) access(lines []int64) (hit, in []bool) {
	hit, in = make([]bool, len(lines)), make([]bool, len(lines))
	for i, l := range lines {
		hit[i] = n.cached[l] != nil
	}
	n.stats.Accesses += int64(len(lines))
	for i, l := range lines {
		if !hit[i] {
			delete(n.own, l)
			continue
		}
		n.stats.Hits++
		in[i] = true
		was := n.pinned(l)
		first := !n.batch[l]
		n.batch[l] = true
		n.pinChanged(l, was)
		delete(n.own, l)
		if first {
			n.clock++
			e := n.cached[l]
			e.last, e.visited, e.freq = n.clock, true, min(3, e.freq+1)
		}
	}
	for i, l := range lines {
		if hit[i] {
			continue
		}
		if len(n.cached) == n.slots {
			free := false
			for c := range n.cached {
				free = free || !n.pinned(c)
			}
			if !free {
				n.stats.Bypassed++
				continue
			}
			delete(n.cached, n.evict())
			n.stats.Evicted++
		}
		n.stats.Inserted++
		n.clock++
		n.cached[l] = &entry{last: n.clock}
		n.batch[l] = true
		in[i] = true
		switch n.policy {
		case Clock:
			n.list = append(n.list, l)
		case Sieve:
			n.list = append(n.list, l)
			if n.drained {
				n.hand = len(n.list)
			}
		case S3FIFO:
			if slices.Contains(n.ghost, l) {
				n.ghost[slices.Index(n.ghost, l)] = -1
				n.main = append(n.main, l)
			} else {
				n.small = append(n.small, l)
			}
		}
	}
	return hit, in
}

func (n *naive) evict() int64 {
	switch n.policy {
	case Random:
		n.state += 0x9e3779b97f4a7c15
		x := n.state
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		x ^= x >> 31
		// The upper word of x · len without a wide product: len is small here.
		at := (x>>32*uint64(len(n.list)) + (x&0xffffffff*uint64(len(n.list)))>>32) >> 32
		line := n.list[at]
		n.leaveArray(line)
		return line
	case LRU:
		line, best := int64(-1), 0
		for l, e := range n.cached {
			if !n.pinned(l) && (line < 0 || e.last < best) {
				line, best = l, e.last
			}
		}
		return line
	case Clock:
		for {
			l := n.list[0]
			n.list = n.list[1:]
			e := n.cached[l]
			was := e.visited
			e.visited = false
			if n.pinned(l) {
				n.parkedSmall = append(n.parkedSmall, l)
			} else if was {
				n.list = append(n.list, l)
			} else {
				return l
			}
		}
	case Sieve:
		for {
			if n.hand >= len(n.list) {
				n.hand = 0
			}
			n.drained = false
			l := n.list[n.hand]
			e := n.cached[l]
			was := e.visited
			e.visited = false
			switch {
			case n.pinned(l):
				n.list = without(n.list, l)
				n.parkedSmall = append(n.parkedSmall, l)
			case was:
				n.hand++
			default:
				n.list = without(n.list, l)
				n.drained = n.hand >= len(n.list)
				return l
			}
			n.drained = n.hand >= len(n.list)
		}
	default:
		for {
			tenth := max(1, n.slots/10)
			if len(n.small) > 0 && (len(n.small)+len(n.parkedSmall) >= tenth || len(n.main) == 0) {
				l := n.small[0]
				n.small = n.small[1:]
				e := n.cached[l]
				if e.freq > 1 {
					e.freq = 0
					n.main = append(n.main, l)
				} else if n.pinned(l) {
					n.parkedSmall = append(n.parkedSmall, l)
				} else {
					n.ghost = append(n.ghost, l)
					if over := len(n.ghost) - (n.slots - tenth); over > 0 {
						n.ghost = n.ghost[over:]
					}
					return l
				}
				continue
			}
			l := n.main[0]
			n.main = n.main[1:]
			e := n.cached[l]
			if e.freq > 0 {
				e.freq--
				n.main = append(n.main, l)
			} else if n.pinned(l) {
				n.parkedMain = append(n.parkedMain, l)
			} else {
				return l
			}
		}
	}
}

func (n *naive) drop(line int64) {
	if n.cached[line] == nil {
		return
	}
	delete(n.cached, line)
	delete(n.batch, line)
	switch n.policy {
	case Random:
		n.leaveArray(line)
	case Sieve:
		if at := slices.Index(n.list, line); at >= 0 && at < n.hand {
			n.hand--
		}
		n.list = without(n.list, line)
		n.drained = n.drained || n.hand >= len(n.list)
	case Clock:
		n.list = without(n.list, line)
	}
	n.small, n.main = without(n.small, line), without(n.main, line)
	n.parkedSmall, n.parkedMain = without(n.parkedSmall, line), without(n.parkedMain, line)
}
