package build

import (
	"math/bits"

	"helios/internal/philox"
)

// Thresholds of R-MAT's quadrants among 16 random bits: 0.57, +0.19, +0.19 of 65536.
const (
	rmatA = 37356
	rmatB = rmatA + 12452
	rmatC = rmatB + 12452
)

// rmatWords are the 16 random bits of each level of drawing number try of edge n, four levels a
// pair of words, the first one in the low half of the first word. It is philox.Block for counters i
// and i+1 side by side: two chains of multiplications keep the core busy where one waits for
// itself.
func rmatWords(key [2]uint32, lo, hi, i uint32) (a, b [4]uint32) {
	const m0, m1, w0, w1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
	k0, k1 := key[0], key[1]
	a0, a1, a2, a3 := lo, hi, i, genRMAT
	b0, b1, b2, b3 := lo, hi, i+1, genRMAT
	for range 10 {
		p, q := uint64(a0)*m0, uint64(a2)*m1
		r, s := uint64(b0)*m0, uint64(b2)*m1
		a0, a1, a2, a3 = uint32(q>>32)^a1^k0, uint32(q), uint32(p>>32)^a3^k1, uint32(p)
		b0, b1, b2, b3 = uint32(s>>32)^b1^k0, uint32(s), uint32(r>>32)^b3^k1, uint32(r)
		k0 += w0
		k1 += w1
	}
	return [4]uint32{a0, a1, a2, a3}, [4]uint32{b0, b1, b2, b3}
}

// rmatLevels goes down eight levels, one quadrant each, without a branch: thresholds that are
// passed count the quadrants, and it is the source's half from the second one on, the destination's
// in the second and the fourth.
func rmatLevels(src, dst uint64, w *[4]uint32) (uint64, uint64) {
	for _, x := range w {
		for _, r := range [2]uint32{x & 0xffff, x >> 16} {
			a, b, c := (rmatA-1-r)>>31, (rmatB-1-r)>>31, (rmatC-1-r)>>31
			src = src<<1 | uint64(b)
			dst = dst<<1 | uint64(a^b^c)
		}
	}
	return src, dst
}

// rmatRank draws edge number n: one quadrant of the adjacency matrix for each bit of the ids, 16
// random bits a level. Positions outside the matrix are drawn again.
func (g *generator) rmatRank(n uint64, levels int) (src, dst uint64) {
	lo, hi := uint32(n), uint32(n>>32)
	for try := uint32(0); ; try++ {
		src, dst = 0, 0
		level := 0
		for i := uint32(0); level < levels; i += 2 {
			a, b := rmatWords(g.key, lo, hi, try<<8|i)
			src, dst = rmatLevels(src, dst, &a)
			if level += 8; level < levels {
				src, dst = rmatLevels(src, dst, &b)
				level += 8
			}
		}
		// Levels beyond those that there are do not count.
		if src, dst = src>>(level-levels), dst>>(level-levels); src < uint64(g.Nodes) &&
			dst < uint64(g.Nodes) {
			return src, dst
		}
	}
}

// rmatBatch draws edges n, n+1, … as many as src and dst have places.
func (g *generator) rmatBatch(n int64, src, dst []int64, again *[]int32) {
	levels := bits.Len64(uint64(g.Nodes - 1))
	for i := range src {
		s, d := g.rmatRank(uint64(n)+uint64(i), levels)
		src[i], dst[i] = int64(s), int64(d)
	}
	g.ids(src, again)
	g.ids(dst, again)
}

// ids is id of each rank in v. The walk of a rank that lands outside goes on in a list: no branch
// depends on where ranks land, and the permutations of neighbours in the list overlap.
func (g *generator) ids(v []int64, again *[]int32) {
	mask, half, nodes := uint64(1)<<g.half-1, g.half, uint64(g.Nodes)
	k0, k1, k2, k3 := g.rounds[0], g.rounds[1], g.rounds[2], g.rounds[3]
	step := func(x uint64) uint64 {
		l, r := x>>half, x&mask
		l ^= philox.Mix(r^k0) & mask
		r ^= philox.Mix(l^k1) & mask
		l ^= philox.Mix(r^k2) & mask
		r ^= philox.Mix(l^k3) & mask
		return l<<half | r
	}
	if cap(*again) < len(v) {
		*again = make([]int32, len(v))
	}
	list := (*again)[:len(v)]
	left := 0
	for i, rank := range v {
		x := step(uint64(rank))
		v[i] = int64(x)
		list[left] = int32(i)
		left += int((nodes - 1 - x) >> 63) // 1 when x is outside
	}
	for left > 0 {
		walk := list[:left]
		left = 0
		for _, i := range walk {
			x := step(uint64(v[i]))
			v[i] = int64(x)
			list[left] = i
			left += int((nodes - 1 - x) >> 63)
		}
	}
}
