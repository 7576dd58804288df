package partition

import (
	"context"
	"errors"
	"math"
	"slices"

	"helios/internal/hostmem"
)

// fromClusters gives nodes the parts of their clusters. It returns false where the graph of the
// clusters has more edges than the graph has nodes: the clusters say little then, and their graph
// would not fit.
func (s *streamer) fromClusters(ctx context.Context) (done bool, err error) {
	t, w := s.w.t, s.w
	// A part of the mean size has room for one cluster more: so there always is one with room.
	limit := s.room - (t.NumNodes+int64(s.o.Parts)-1)/int64(s.o.Parts)
	if limit < 2 {
		return false, nil
	}
	mem, err := hostmem.Alloc(4*t.NumNodes, "sizes of clusters")
	if err != nil {
		return false, err
	}
	free := func() {
		err = errors.Join(err, hostmem.Free(mem))
		mem = nil
	}
	defer free()
	size := hostmem.View[uint32](mem)
	for v := range w.label {
		w.label[v], size[v] = uint32(v), 1
	}
	for range clusterPasses {
		if err := w.walk(ctx, "cluster", func(v int64) uint32 {
			old := w.label[v]
			best, score := old, w.count[old]
			for _, l := range w.met {
				if n := w.count[l]; l != old && int64(size[l]) < limit &&
					(n > score || n == score && best != old && s.before(l, best)) {
					best, score = l, n
				}
			}
			size[old]--
			size[best]++
			return best
		}); err != nil {
			return false, err
		}
	}
	w.forget()
	n := renumber(w.label, size)
	g, err := s.contract(ctx, n)
	free()
	if g == nil || err != nil {
		return false, err
	}
	part := g.partition(coarseOptions{parts: s.o.Parts, room: s.room, limit: limit, seed: s.o.Seed})
	for v, l := range w.label {
		w.label[v] = part[l]
	}
	return true, nil
}

// before is an order of labels for equals, by the seed.
func (s *streamer) before(a, b uint32) bool {
	return word(uint64(a), s.o.Seed) < word(uint64(b), s.o.Seed)
}

// renumber gives labels the numbers from 0 in the order of their first nodes, and returns how many
// there are. scratch has a place for each label.
func renumber(label, scratch []uint32) int {
	for i := range scratch {
		scratch[i] = none
	}
	n := uint32(0)
	for v, l := range label {
		if scratch[l] == none {
			scratch[l] = n
			n++
		}
		label[v] = scratch[l]
	}
	return int(n)
}

// leastPairs is for small graphs, whose memory is no matter.
const leastPairs = 1 << 18

// contract makes the graph of n clusters in one pass; nil where it has more edges than the graph
// has nodes, and more than leastPairs.
func (s *streamer) contract(ctx context.Context, n int) (g *coarse, err error) {
	w, t := s.w, s.w.t
	pairs, err := newPairTable(max(t.NumNodes, leastPairs))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, pairs.close()) }()
	fits := true
	v := int64(0)
	w.passes++
	err = t.Scan(ctx, func(first int64, ids []uint32) error {
		for i, id := range ids {
			for t.Indptr[v+1] <= first+int64(i) {
				v++
			}
			if a, b := w.label[v], w.label[id]; a != b && fits {
				fits = pairs.add(pairKey(a, b))
			}
		}
		w.report.Report("contract", first+int64(len(ids)), t.NumEdges)
		return nil
	})
	if err != nil || !fits {
		return nil, err
	}
	size := make([]uint32, n)
	for _, l := range w.label {
		size[l]++
	}
	return newCoarse(size, pairs.sorted()), nil
}

// pair is two clusters, the lower number in the upper half, and the edges between them.
type pair struct {
	key    uint64
	weight uint32
}

func pairKey(a, b uint32) uint64 { return uint64(min(a, b))<<32 | uint64(max(a, b)) }

// pairTable counts pairs: open addressing, as many as there is room for.
type pairTable struct {
	key    []uint64 // 0 is no pair: the two differ
	weight []uint32
	used   int64
	limit  int64
	mem    [2][]byte
}

func newPairTable(limit int64) (*pairTable, error) {
	slots := int64(16)
	for slots*3/4 < limit {
		slots *= 2
	}
	p := &pairTable{limit: limit}
	for i, bytes := range []int64{8 * slots, 4 * slots} {
		var err error
		if p.mem[i], err = hostmem.Alloc(bytes, "edges between clusters"); err != nil {
			return nil, errors.Join(err, p.close())
		}
	}
	p.key, p.weight = hostmem.View[uint64](p.mem[0]), hostmem.View[uint32](p.mem[1])
	return p, nil
}

func (p *pairTable) close() error {
	return errors.Join(hostmem.Free(p.mem[0]), hostmem.Free(p.mem[1]))
}

// add counts a pair; false where there is no room for it.
func (p *pairTable) add(key uint64) bool {
	mask := uint64(len(p.key) - 1)
	slot := word(key, 0) & mask
	for p.key[slot] != key {
		if p.key[slot] == 0 {
			if p.used == p.limit {
				return false
			}
			p.used++
			p.key[slot] = key
			break
		}
		slot = (slot + 1) & mask
	}
	if p.weight[slot] != math.MaxUint32 {
		p.weight[slot]++
	}
	return true
}

// sorted returns the pairs by their keys.
func (p *pairTable) sorted() []pair {
	out := make([]pair, 0, p.used)
	for i, k := range p.key {
		if k != 0 {
			out = append(out, pair{k, p.weight[i]})
		}
	}
	sortPairs(out)
	return out
}

func sortPairs(p []pair) {
	slices.SortFunc(p, func(a, b pair) int {
		switch {
		case a.key < b.key:
			return -1
		case a.key > b.key:
			return 1
		}
		return 0
	})
}
