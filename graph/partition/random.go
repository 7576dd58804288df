package partition

import (
	"context"
	"math/bits"

	"helios/graph"
)

// Random deals the nodes out: what a cut is compared with.
const Random = "random"

func init() {
	registerMethod(method{name: Random, summary: "equal parts dealt at random", run: dealParts})
}

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

// inRanges gives the nodes in their order to parts that are as equal as can be.
func inRanges(of []uint32, parts int) {
	for v := range of {
		hi, lo := bits.Mul64(uint64(v), uint64(parts))
		part, _ := bits.Div64(hi, lo, uint64(len(of)))
		of[v] = uint32(part)
	}
}
