package graph

import (
	"fmt"
	"slices"
	"unsafe"

	"helios/cuda"
	"helios/internal/hostmem"
)

// Audit checks a finished mini-batch of a host device against the topology: the frontier starts
// with the seeds and has no node twice beyond them; every destination has as many edges as its
// degree and the fanout allow; each leads from a neighbour in the topology, none drawn more often
// than it stands there. It reads at most budget neighbours for the last of these, evenly over the
// destinations. It returns how many edges it compared with the topology and a digest of the whole
// mini-batch.
func Audit(t *Topology, cfg SamplerConfig, mb *MiniBatch, seeds []int64,
	budget int64) (checked int64, digest uint64, err error) {
	hops := len(cfg.Fanouts)
	if len(mb.Blocks) != hops || len(mb.HopEnd) != hops+1 || mb.HopEnd[0] != int64(len(seeds)) {
		return 0, 0, fmt.Errorf("audit: %d blocks and hop ends %v for %d hops from %d seeds",
			len(mb.Blocks), mb.HopEnd, hops, len(seeds))
	}
	nodes := view[int64](mb.Nodes, mb.HopEnd[hops])
	a := auditor{t: t, nodes: nodes}
	if err := a.frontier(seeds); err != nil {
		return 0, 0, fmt.Errorf("audit: %w", err)
	}
	cost := int64(0)
	for _, b := range mb.Blocks {
		for _, v := range nodes[:b.NumDst] {
			cost += t.InDegree(v)
		}
	}
	a.step = max(1, (cost+budget-1)/max(budget, 1))
	for hop, b := range mb.Blocks {
		if b.NumDst != mb.HopEnd[hop] || b.NumSrc != mb.HopEnd[hop+1] || b.NumSrc < b.NumDst {
			return 0, 0,
				fmt.Errorf("audit: hop %d has %d destinations and %d sources, hop ends are %v", hop,
					b.NumDst, b.NumSrc, mb.HopEnd)
		}
		if err := a.block(&b, int64(cfg.Fanouts[hop])); err != nil {
			return 0, 0, fmt.Errorf("audit: hop %d: %w", hop, err)
		}
	}
	return a.checked, a.digest, nil
}

type auditor struct {
	t       *Topology
	nodes   []int64 // the frontier
	step    int64   // between the destinations whose neighbours are read
	checked int64   // edges that were compared with the topology
	digest  uint64
	drawn   []int64
}

// frontier checks that the seeds come first, and that no other node stands twice.
func (a *auditor) frontier(seeds []int64) error {
	seen := make([]uint64, (a.t.NumNodes+63)/64)
	for i, v := range a.nodes {
		if uint64(v) >= uint64(a.t.NumNodes) {
			return fmt.Errorf("frontier index %d is node %d of %d", i, v, a.t.NumNodes)
		}
		if i < len(seeds) && v != seeds[i] {
			return fmt.Errorf("frontier index %d is node %d, seed %d", i, v, seeds[i])
		}
		if i >= len(seeds) && seen[v/64]>>(v%64)&1 != 0 {
			return fmt.Errorf("node %d is in the frontier twice", v)
		}
		seen[v/64] |= 1 << (v % 64)
		a.digest = fold(a.digest, uint64(v))
	}
	return nil
}

// block checks a hop: sources in the order of their first edges, and each destination's edges.
func (a *auditor) block(b *Block, fanout int64) error {
	indptr, src := view[int64](b.Indptr, b.NumDst+1), view[uint32](b.Src, b.NumEdges)
	if indptr[0] != 0 || indptr[b.NumDst] != b.NumEdges {
		return fmt.Errorf("offsets go from %d to %d, there are %d edges", indptr[0],
			indptr[b.NumDst], b.NumEdges)
	}
	newest := b.NumDst
	for _, s := range src {
		if int64(s) > newest || int64(s) >= b.NumSrc {
			return fmt.Errorf("source %d where %d nodes have appeared", s, newest)
		}
		if int64(s) == newest {
			newest++
		}
		a.digest = fold(a.digest, uint64(s))
	}
	if newest != b.NumSrc {
		return fmt.Errorf("%d sources, %d of them named", b.NumSrc, newest)
	}
	for i, v := range a.nodes[:b.NumDst] {
		want := a.t.InDegree(v)
		if fanout >= 0 {
			want = min(want, fanout)
		}
		if got := indptr[i+1] - indptr[i]; got != want {
			return fmt.Errorf("node %d of degree %d got %d edges, not %d", v, a.t.InDegree(v), got,
				want)
		}
		if int64(i)%a.step == 0 {
			if err := a.neighbours(v, src[indptr[i]:indptr[i+1]]); err != nil {
				return err
			}
		}
	}
	return nil
}

// neighbours compares the edges of node v with the topology.
func (a *auditor) neighbours(v int64, src []uint32) error {
	drawn := a.drawn[:0]
	for _, s := range src {
		drawn = append(drawn, a.nodes[s])
	}
	slices.Sort(drawn)
	a.drawn = drawn
	left := len(drawn)
	taken := make([]bool, len(drawn))
	for n := range a.t.InDegree(v) {
		u := a.t.Neighbor(v, n)
		pos, ok := slices.BinarySearch(drawn, u)
		for ; ok && pos < len(drawn) && drawn[pos] == u; pos++ {
			if !taken[pos] {
				taken[pos] = true
				left--
				break
			}
		}
	}
	if left > 0 {
		return fmt.Errorf(
			"%d of the %d edges of node %d are not in the topology, or drawn more often than they stand there",
			left, len(drawn), v)
	}
	a.checked += int64(len(drawn))
	return nil
}

func fold(h, v uint64) uint64 { return (h ^ v + h>>29) * 0x9E3779B97F4A7C15 }

func view[T any](b cuda.Buffer, n int64) []T {
	var t T
	return hostmem.View[T](b.Bytes()[:n*int64(unsafe.Sizeof(t))])
}
