package partition

import (
	"container/heap"
	"math"
	"slices"
)

// coarse is an undirected graph in memory whose nodes are clusters of nodes: sizes count those,
// weights the edges between two.
type coarse struct {
	start  []int64
	adj    []uint32
	weight []uint32
	size   []uint32
}

// coarseOptions are those of the whole: parts, the nodes that a part and a cluster may have.
type coarseOptions struct {
	parts       int
	room, limit int64
	seed        uint64
}

// How the graph of clusters is partitioned: it is made smaller, again by clusters, until it has
// about coarsest nodes for each part or hardly shrinks; then parts are grown tries times, and on
// the way back each graph's nodes are looked at up to rounds times.
const (
	coarsest      = 8
	leastShrink   = 0.95
	tries         = 10
	rounds        = 10
	clusterRounds = 8
)

// newCoarse makes a graph from pairs sorted by their keys.
func newCoarse(size []uint32, pairs []pair) *coarse {
	g := &coarse{size: size, start: make([]int64, len(size)+1)}
	for _, p := range pairs {
		g.start[p.key>>32+1]++
		g.start[p.key&math.MaxUint32+1]++
	}
	for i := range size {
		g.start[i+1] += g.start[i]
	}
	g.adj = make([]uint32, 2*len(pairs))
	g.weight = make([]uint32, 2*len(pairs))
	next := slices.Clone(g.start)
	for _, p := range pairs {
		a, b := uint32(p.key>>32), uint32(p.key)
		g.adj[next[a]], g.weight[next[a]] = b, p.weight
		g.adj[next[b]], g.weight[next[b]] = a, p.weight
		next[a]++
		next[b]++
	}
	return g
}

// shuffled returns the numbers below n in an order of the seed.
func shuffled(n int, seed uint64) []uint32 {
	o := make([]uint32, n)
	for i := range o {
		o[i] = uint32(i)
	}
	for i := n - 1; i > 0; i-- {
		j := below(uint64(i), uint64(i+1), seed)
		o[i], o[j] = o[j], o[i]
	}
	return o
}

// tally adds up the weights of a node's edges by a label of their other ends.
type tally struct {
	count []uint64
	met   []uint32
}

func (c *tally) add(g *coarse, v uint32, label []uint32) {
	for e := g.start[v]; e < g.start[v+1]; e++ {
		l := label[g.adj[e]]
		if l == none {
			continue
		}
		if c.count[l] == 0 {
			c.met = append(c.met, l)
		}
		c.count[l] += uint64(g.weight[e])
	}
}

func (c *tally) clear() {
	for _, l := range c.met {
		c.count[l] = 0
	}
	c.met = c.met[:0]
}

// cluster finds clusters of up to most nodes by label propagation, and returns them and their
// number.
func (g *coarse) cluster(limit int64, seed uint64) ([]uint32, int) {
	n := len(g.size)
	label, size := make([]uint32, n), make([]int64, n)
	for i := range label {
		label[i], size[i] = uint32(i), int64(g.size[i])
	}
	c := tally{count: make([]uint64, n)}
	for k := range uint64(clusterRounds) {
		moved := 0
		for _, v := range shuffled(n, seed+k) {
			c.add(g, v, label)
			old, s := label[v], int64(g.size[v])
			best, score := old, c.count[old]
			for _, l := range c.met {
				if x := c.count[l]; l != old && size[l]+s <= limit && (x > score || x == score &&
					best != old && word(uint64(l), seed) < word(uint64(best), seed)) {
					best, score = l, x
				}
			}
			c.clear()
			if best != old {
				size[old] -= s
				size[best] += s
				label[v] = best
				moved++
			}
		}
		if moved*200 < n {
			break
		}
	}
	g.joinSingles(limit, label, size, &c)
	return label, renumber(label, make([]uint32, n))
}

// joinSingles puts nodes that are alone, as their neighbours' clusters are full, into clusters with
// others whose heaviest neighbour is in the same cluster; and those without neighbours into
// clusters with each other.
func (g *coarse) joinSingles(limit int64, label []uint32, size []int64, c *tally) {
	open := map[uint32]uint32{} // by the neighbours' cluster: the one to join
	for v := range uint32(len(label)) {
		l := label[v]
		if size[l] != int64(g.size[v]) || g.size[v] == 0 {
			continue
		}
		c.add(g, v, label)
		near, score := uint32(none), uint64(0)
		for _, m := range c.met {
			if x := c.count[m]; x > score || x == score && m < near {
				near, score = m, x
			}
		}
		c.clear()
		to, there := open[near]
		if !there || size[to]+size[l] > limit {
			open[near] = l
			continue
		}
		size[to] += size[l]
		size[l] = 0
		label[v] = to
	}
}

// contract makes the graph of n clusters.
func (g *coarse) contract(label []uint32, n int) *coarse {
	size := make([]uint32, n)
	var pairs []pair
	for v := range g.size {
		size[label[v]] += g.size[v]
		for e := g.start[v]; e < g.start[v+1]; e++ {
			if a, b := label[v], label[g.adj[e]]; a < b {
				pairs = append(pairs, pair{pairKey(a, b), g.weight[e]})
			}
		}
	}
	sortPairs(pairs)
	to := 0
	for _, p := range pairs {
		if to > 0 && pairs[to-1].key == p.key {
			q := &pairs[to-1]
			q.weight = uint32(min(uint64(q.weight)+uint64(p.weight), math.MaxUint32))
			continue
		}
		pairs[to] = p
		to++
	}
	return newCoarse(size, pairs[:to])
}

// partition returns the part of each node.
func (g *coarse) partition(o coarseOptions) []uint32 {
	if len(g.size) > coarsest*o.parts {
		label, n := g.cluster(o.limit, o.seed)
		if float64(n) < leastShrink*float64(len(g.size)) {
			up := g.contract(label, n).partition(
				coarseOptions{o.parts, o.room, o.limit, o.seed + 1})
			of := make([]uint32, len(g.size))
			for v := range of {
				of[v] = up[label[v]]
			}
			g.refine(of, o, 0)
			return of
		}
	}
	var best []uint32
	least := uint64(0)
	for try := range uint64(tries) {
		attempt := o
		attempt.seed = word(try, o.seed)
		of := make([]uint32, len(g.size))
		for v := range of {
			of[v] = none
		}
		if try%2 == 0 {
			g.grow(of, attempt)
		}
		g.refine(of, attempt, 1)
		g.refine(of, attempt, 0)
		if cut := g.cut(of); best == nil || cut < least {
			best, least = of, cut
		}
	}
	return best
}

// refine moves nodes as streamer.place does, and gives one to those that have no part.
func (g *coarse) refine(of []uint32, o coarseOptions, cost float64) {
	size, nodes, weight := make([]int64, o.parts), int64(0), uint64(0)
	for v, p := range of {
		nodes += int64(g.size[v])
		if p != none {
			size[p] += int64(g.size[v])
		}
	}
	for _, w := range g.weight {
		weight += uint64(w)
	}
	least := newTournament(size)
	resize := func(p uint32, n int64) {
		size[p] += n
		least.update(int(p))
	}
	scale := cost * float64(weight) / float64(nodes) / math.Sqrt(float64(nodes)/float64(o.parts))
	c := tally{count: make([]uint64, o.parts)}
	for k := range uint64(rounds) {
		moved := false
		for _, v := range shuffled(len(g.size), o.seed+k) {
			old, s := of[v], int64(g.size[v])
			if old != none {
				resize(old, -s)
			}
			c.add(g, v, of)
			value := func(p uint32) float64 {
				return float64(c.count[p]) -
					float64(float64(scale*float64(s))*math.Sqrt(float64(size[p])))
			}
			best := least.least()
			if old != none && size[old]+s <= o.room && value(old) >= value(best) {
				best = old
			}
			score := value(best)
			for _, p := range c.met {
				if x := value(p); x > score && size[p]+s <= o.room {
					best, score = p, x
				}
			}
			c.clear()
			resize(best, s)
			moved = moved || best != old
			of[v] = best
		}
		if !moved {
			return
		}
	}
}

func (g *coarse) cut(of []uint32) (cut uint64) {
	for v := range g.size {
		for e := g.start[v]; e < g.start[v+1]; e++ {
			if of[v] != of[g.adj[e]] {
				cut += uint64(g.weight[e])
			}
		}
	}
	return cut / 2
}

// grow fills one part after the other, from a node at random, always with the node that has most
// edges into it.
func (g *coarse) grow(of []uint32, o coarseOptions) {
	left := int64(0)
	for _, s := range g.size {
		left += int64(s)
	}
	gain := make([]uint64, len(g.size))
	order := shuffled(len(g.size), o.seed)
	for p := range o.parts {
		want, has := left/int64(o.parts-p), int64(0)
		var front frontier
		for has < want {
			v, ok := front.next(func(c candidate) bool {
				return of[c.node] == none && gain[c.node] == c.gain &&
					has+int64(g.size[c.node])/2 <= want
			})
			for !ok && len(order) > 0 {
				v, order = order[0], order[1:]
				ok = of[v] == none
			}
			if !ok {
				return
			}
			of[v] = uint32(p)
			has += int64(g.size[v])
			for e := g.start[v]; e < g.start[v+1]; e++ {
				if u := g.adj[e]; of[u] == none {
					gain[u] += uint64(g.weight[e])
					heap.Push(&front, candidate{gain[u], u})
				}
			}
		}
		for _, c := range front {
			gain[c.node] = 0
		}
		left -= has
	}
}

// candidate is a node at the border of a part that grows, with the weight of its edges into it at
// that time.
type candidate struct {
	gain uint64
	node uint32
}

// frontier is a heap of candidates, the greatest gain first.
type frontier []candidate

func (f frontier) Len() int { return len(f) }

func (f frontier) Less(i, j int) bool {
	return f[i].gain > f[j].gain || f[i].gain == f[j].gain && f[i].node < f[j].node
}

func (f frontier) Swap(i, j int) { f[i], f[j] = f[j], f[i] }

// Push is heap.Interface's.
func (f *frontier) Push(x any) { *f = append(*f, x.(candidate)) }

// Pop is heap.Interface's.
func (f *frontier) Pop() any {
	last := len(*f) - 1
	x := (*f)[last]
	*f = (*f)[:last]
	return x
}

// next takes the first candidate that is wanted.
func (f *frontier) next(want func(candidate) bool) (uint32, bool) {
	for len(*f) > 0 {
		if c := heap.Pop(f).(candidate); want(c) {
			return c.node, true
		}
	}
	return none, false
}
