package partition

import (
	"context"
	"math/bits"

	"helios/graph"
)

// Random deals the nodes out at random, as the baseline of a cut.
const Random = "random"

var randomMethod = method{name: Random, summary: "equal parts dealt at random", run: dealParts}

// dealParts shuffles parts that are as equal as can be (Fisher and Yates).
func dealParts(_ context.Context, _ *graph.Topology, o *Options, of []uint32, info *Info) error {
	info.Method = Random
	inRanges(of, o.Parts)
	for i := len(of) - 1; i > 0; i-- {
		j := below(uint64(i), uint64(i+1), o.Seed)
		of[i], of[j] = of[j], of[i]
	}
	return nil
}

// word is the i-th 64-bit word of a seed (splitmix64).
func word(i, seed uint64) uint64 {
	x := seed + (i+1)*0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

// below is the i-th number of a seed, less than n.
func below(i, n, seed uint64) uint64 {
	hi, _ := bits.Mul64(word(i, seed), n)
	return hi
}

// inRanges deals the nodes in their order to parts of nearly equal size.
func inRanges(of []uint32, parts int) {
	for v := range of {
		hi, lo := bits.Mul64(uint64(v), uint64(parts))
		part, _ := bits.Div64(hi, lo, uint64(len(of)))
		of[v] = uint32(part)
	}
}

// PackFirst exchanges nodes between parts so that some of them, each named once, are in the first
// parts: as few as have room for them. Every part keeps its number of nodes. Info's figures of the
// edges stay those of before.
func (p *Partition) PackFirst(nodes []int64) {
	size := make([]int64, p.Info.Parts)
	for _, part := range p.Of {
		size[part]++
	}
	parts, room := uint32(0), int64(0)
	for ; room < int64(len(nodes)); parts++ {
		room += size[parts]
	}
	// Which of the others give way is as random as where the parts have them.
	first := make([]uint64, (len(p.Of)+63)/64)
	var in []int64
	for _, v := range nodes {
		first[v/64] |= 1 << (v % 64)
		if p.Of[v] >= parts {
			in = append(in, v)
		}
	}
	for v := range p.Of {
		if len(in) == 0 {
			return
		}
		if p.Of[v] < parts && first[v/64]>>(v%64)&1 == 0 {
			p.Of[v], p.Of[in[0]] = p.Of[in[0]], p.Of[v]
			in = in[1:]
		}
	}
}
