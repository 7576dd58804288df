package policy

import "slices"

// naive is a second, slow and obvious implementation of a directory and its policies: lists of
// lines that are searched from end to end, and pins that are looked up in the announced batches
// themselves.
type naive struct {
	twin      twin
	slots     int
	cached    map[int64]*entry
	clock     int
	batch     map[int64]bool   // lines of the current batch
	own       map[int64]bool   // what the current batch announced and has not accessed
	announced []map[int64]bool // later batches
	state     uint64
	// Orders of lines, oldest first: random's array, the queues, the lines taken out of a queue
	// while pinned.
	list, small, main, ghost []int64
	parkedSmall, parkedMain  []int64
	hand                     int // into list (sieve); len(list): at the start again
	stats                    Stats
	drained                  bool
}

// twin holds what is a policy's own in naive: each test file of a policy has its twin. nil: nothing
// is to do.
type twin struct {
	pin, unpin func(n *naive, line int64) // of a policy that keeps no pinned lines in its order
	back       func(n *naive, line int64) // a parked line's pin has ended
	insert     func(n *naive, line int64)
	evict      func(n *naive) int64
	drop       func(n *naive, line int64)
}

// twins are the naive policies by name.
var twins = map[string]twin{}

type entry struct {
	last    int // time of its last access
	freq    int
	visited bool
}

func newNaive(policy string, slots int, seed uint64) *naive {
	return &naive{twin: twins[policy], slots: slots, cached: map[int64]*entry{},
		batch: map[int64]bool{}, state: seed, drained: true}
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
	i := slices.Index(list, line)
	if i < 0 {
		return list
	}
	return slices.Delete(slices.Clone(list), i, i+1)
}

func (n *naive) pinChanged(line int64, was bool) {
	now := n.pinned(line)
	if was == now || n.cached[line] == nil {
		return
	}
	if now {
		if n.twin.pin != nil {
			n.twin.pin(n, line)
		}
		return
	}
	if n.twin.unpin != nil {
		n.twin.unpin(n, line)
		return
	}
	if i := slices.Index(n.parkedSmall, line); i >= 0 {
		n.parkedSmall = without(n.parkedSmall, line)
		n.twin.back(n, line)
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
			delete(n.cached, n.twin.evict(n))
			n.stats.Evicted++
		}
		n.stats.Inserted++
		n.clock++
		n.cached[l] = &entry{last: n.clock}
		n.batch[l] = true
		in[i] = true
		if n.twin.insert != nil {
			n.twin.insert(n, l)
		}
	}
	return hit, in
}

func (n *naive) drop(line int64) {
	if n.cached[line] == nil {
		return
	}
	delete(n.cached, line)
	delete(n.batch, line)
	if n.twin.drop != nil {
		n.twin.drop(n, line)
	}
	n.small, n.main = without(n.small, line), without(n.main, line)
	n.parkedSmall, n.parkedMain = without(n.parkedSmall, line), without(n.parkedMain, line)
}
