package partition

import (
	"context"
	"errors"
	"math"

	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// Stream is the streaming partitioner: passes over the edges as they lie, in memory or on storage,
// with some bytes for each node and none for an edge. It tries two starts and keeps the better one:
//
//   - clusters: label propagation with a bound on a cluster's nodes finds many small clusters
//     (Meyerhenke, Sanders and Schulz); the graph of them, where it is small enough, is partitioned
//     in memory (coarse.go), and its parts are the nodes' first ones.
//   - greedy: Fennel (Tsourakakis and others): a node goes where most of its neighbours are, less a
//     cost that grows with the part.
//
// After either, each node is looked at again and again (restreaming: Nishimura and Ugander).
// No part is ever larger than Options.Balance allows.
const Stream = "stream"

var streamMethod = method{name: Stream,
	summary: "ours, for graphs beyond memory: passes over the edges, some bytes a node",
	run:     runStream}

// Names of starts.
const (
	startClusters = "clusters"
	startGreedy   = "greedy"
)

// clusterPasses is the number of times that clusters are grown: after some passes hardly a node
// moves.
const clusterPasses = 5

func runStream(ctx context.Context, t *graph.Topology, o *Options, of []uint32,
	info *Info) (err error) {
	info.Method, info.Passes = Stream, o.Passes
	w, err := newWalker(t, o, of)
	if err != nil {
		return err
	}
	s := &streamer{w: w, o: o, room: o.room(t.NumNodes), size: make([]int64, o.Parts),
		cost: make([]float64, o.Parts)}
	defer func() {
		info.EdgePasses += w.passes
		err = errors.Join(err, w.close())
	}()
	grouped, err := s.fromClusters(ctx)
	if err != nil {
		return err
	}
	first := int64(math.MaxInt64)
	if grouped {
		if first, err = s.restream(ctx, 0); err != nil {
			return err
		}
	}
	mem, err := hostmem.Alloc(4*t.NumNodes, "parts of nodes from another start")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, hostmem.Free(mem)) }()
	w.label = hostmem.View[uint32](mem)
	s.begin()
	second, err := s.restream(ctx, 1)
	if err != nil {
		return err
	}
	info.Start = startClusters
	if second < first {
		info.Start = startGreedy
		copy(of, w.label)
	}
	return s.holds(of)
}

// streamer places nodes in parts.
type streamer struct {
	w    *walker
	o    *Options
	room int64 // nodes that a part may have

	size  []int64 // nodes of parts
	least tournament
	// scale times the root of a part's nodes is what it costs to be there: Fennel's cost with an
	// exponent of 1.5. cost has it for each part.
	scale float64
	cost  []float64
}

// begin takes all nodes out of their parts.
func (s *streamer) begin() {
	for v := range s.w.label {
		s.w.label[v] = none
	}
	s.w.forget()
}

// restream walks over the nodes, Options.Passes times after those that have no part yet have one,
// and returns how many edges are cut. cost is what a part of the mean size costs, as a multiple of
// a node's mean degree; 0: size only bounds.
func (s *streamer) restream(ctx context.Context, cost float64) (cut int64, err error) {
	t, parts := s.w.t, s.o.Parts
	mean := float64(t.NumNodes) / float64(parts)
	s.scale = cost * 2 * float64(t.NumEdges) / float64(t.NumNodes) / math.Sqrt(mean)
	clear(s.size)
	passes := s.o.Passes
	for _, p := range s.w.label {
		if p == none {
			passes = s.o.Passes + 1
			break
		}
		s.size[p]++
	}
	s.least = newTournament(s.size)
	for p := range s.size {
		s.resize(uint32(p), 0)
	}
	for range passes {
		moved := int64(0)
		if err := s.w.walk(ctx, "partition", func(v int64) uint32 {
			old := s.w.label[v]
			p := s.place(v, old)
			if p != old {
				moved++
			}
			return p
		}); err != nil {
			return 0, err
		}
		if moved == 0 {
			break
		}
	}
	p := Partition{Of: s.w.label, Info: Info{Parts: parts}}
	stats, err := p.Measure(ctx, t, s.o.Progress)
	s.w.passes++
	return stats.CutEdges, err
}

// resize changes the nodes of a part by n.
func (s *streamer) resize(p uint32, n int64) {
	s.size[p] += n
	s.cost[p] = s.scale * math.Sqrt(float64(s.size[p]))
	s.least.update(int(p))
}

// place moves node v from a part, which may be none, to the best one that has room: with most of
// its neighbours less the cost. There always is one: with a node out, the least part has less than
// the mean. Of equals it takes the old one, or else one by the seed.
func (s *streamer) place(v int64, old uint32) uint32 {
	if old != none {
		s.resize(old, -1)
	}
	value := func(p uint32) float64 { return float64(s.w.count[p]) - s.cost[p] }
	best := s.least.least()
	if old != none && s.size[old] < s.room && value(old) >= value(best) {
		best = old
	}
	score := value(best)
	chance := func(p uint32) uint64 { return word(uint64(v)<<32|uint64(p), s.o.Seed) }
	for _, p := range s.w.met {
		if x := value(p); s.size[p] < s.room && (x > score ||
			x == score && best != old && (p == old || chance(p) < chance(best))) {
			best, score = p, x
		}
	}
	s.resize(best, 1)
	return best
}

// holds is an error where a part has more nodes than it may have.
func (s *streamer) holds(of []uint32) error {
	clear(s.size)
	for _, p := range of {
		s.size[p]++
	}
	for p, n := range s.size {
		if n > s.room {
			return errs.New(errs.Failed,
				"partition: part %d has %d nodes of at most %d: this is an error of heliosctl's, report it",
				p, n, s.room)
		}
	}
	return nil
}

// tournament finds the least of some sizes: of equals, the first.
type tournament struct {
	size []int64
	leaf int      // the first one's place in win
	win  []uint32 // the least below each place
}

// newTournament watches size: update follows each change.
func newTournament(size []int64) tournament {
	t := tournament{size: size, leaf: 1}
	for t.leaf < len(size) {
		t.leaf *= 2
	}
	t.win = make([]uint32, 2*t.leaf)
	for i := range t.leaf {
		t.win[t.leaf+i] = uint32(min(i, len(size)-1))
	}
	for i := t.leaf - 1; i > 0; i-- {
		t.match(i)
	}
	return t
}

func (t *tournament) match(i int) {
	t.win[i] = t.win[2*i]
	if b := t.win[2*i+1]; t.size[b] < t.size[t.win[i]] {
		t.win[i] = b
	}
}

func (t *tournament) update(p int) {
	for i := (t.leaf + p) / 2; i > 0; i /= 2 {
		t.match(i)
	}
}

func (t *tournament) least() uint32 { return t.win[1] }
