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
	seen := make([]uint64, (t.NumNodes+63)/64)
	for i, v := range nodes {
		if uint64(v) >= uint64(t.NumNodes) {
			return 0, 0, fmt.Errorf("audit: frontier index %d is node %d of %d", i, v, t.NumNodes)
		}
		if i < len(seeds) && v != seeds[i] {
			return 0, 0, fmt.Errorf("audit: frontier index %d is node %d, seed %d", i, v, seeds[i])
		}
		if i >= len(seeds) && seen[v/64]>>(v%64)&1 != 0 {
			return 0, 0, fmt.Errorf("audit: node %d is in the frontier twice", v)
		}
		seen[v/64] |= 1 << (v % 64)
		digest = fold(digest, uint64(v))
	}
	var cost int64
	for _, b := range mb.Blocks {
		for _, v := range nodes[:b.NumDst] {
			cost += t.InDegree(v)
		}
	}
	step := max(1, (cost+budget-1)/max(budget, 1))
	var drawn []int64
	for hop, b := range mb.Blocks {
		if b.NumDst != mb.HopEnd[hop] || b.NumSrc != mb.HopEnd[hop+1] || b.NumSrc < b.NumDst {
			return 0, 0,
				fmt.Errorf("audit: hop %d has %d destinations and %d sources, hop ends are %v", hop,
					b.NumDst, b.NumSrc, mb.HopEnd)
		}
		indptr, src := view[int64](b.Indptr, b.NumDst+1), view[uint32](b.Src, b.NumEdges)
		if indptr[0] != 0 || indptr[b.NumDst] != b.NumEdges {
			return 0, 0, fmt.Errorf("audit: hop %d: offsets go from %d to %d, there are %d edges",
				hop, indptr[0], indptr[b.NumDst], b.NumEdges)
		}
		newest := b.NumDst
		for _, s := range src {
			if int64(s) > newest || int64(s) >= b.NumSrc {
				return 0, 0, fmt.Errorf("audit: hop %d: source %d where %d nodes have appeared",
					hop, s, newest)
			}
			if int64(s) == newest {
				newest++
			}
			digest = fold(digest, uint64(s))
		}
		if newest != b.NumSrc {
			return 0, 0, fmt.Errorf("audit: hop %d: %d sources, %d of them named", hop,
				b.NumSrc, newest)
		}
		for i, v := range nodes[:b.NumDst] {
			want := t.InDegree(v)
			if f := int64(cfg.Fanouts[hop]); f >= 0 && want > f {
				want = f
			}
			if got := indptr[i+1] - indptr[i]; got != want {
				return 0, 0, fmt.Errorf("audit: hop %d: node %d of degree %d got %d edges, not %d",
					hop, v, t.InDegree(v), got, want)
			}
			if int64(i)%step != 0 {
				continue
			}
			drawn = drawn[:0]
			for _, s := range src[indptr[i]:indptr[i+1]] {
				drawn = append(drawn, nodes[s])
			}
			slices.Sort(drawn)
			left := len(drawn)
			taken := make([]bool, len(drawn))
			for n := range t.InDegree(v) {
				u := t.Neighbor(v, n)
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
				return 0, 0,
					fmt.Errorf(
						"audit: hop %d: %d of the %d edges of node %d are not in the topology, or drawn more often than they stand there",
						hop, left, len(drawn), v)
			}
			checked += int64(len(drawn))
		}
	}
	return checked, digest, nil
}

func fold(h, v uint64) uint64 { return (h ^ v + h>>29) * 0x9E3779B97F4A7C15 }

func view[T any](b cuda.Buffer, n int64) []T {
	var t T
	return hostmem.View[T](b.Bytes()[:n*int64(unsafe.Sizeof(t))])
}
