// Package philox is the counter-based random generator Philox4x32-10 of Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A value depends only on its key
// and counter, so samples, dropout masks and generated data do not depend on threads,
// devices or order.
package philox

import "math/bits"

const (
	m0 = 0xD2511F53
	m1 = 0xCD9E8D57
	w0 = 0x9E3779B9
	w1 = 0xBB67AE85
)

// Block returns the four words of one counter under one key: 10 rounds.
func Block(key [2]uint32, ctr [4]uint32) [4]uint32 {
	k0, k1 := key[0], key[1]
	c0, c1, c2, c3 := ctr[0], ctr[1], ctr[2], ctr[3]
	for i := 0; i < 10; i++ {
		h0, l0 := bits.Mul32(m0, c0)
		h1, l1 := bits.Mul32(m1, c2)
		c0, c1, c2, c3 = h1^c1^k0, l1, h0^c3^k1, l0
		k0 += w0
		k1 += w1
	}
	return [4]uint32{c0, c1, c2, c3}
}

// Stream names what a random number is for, so that two uses of one seed never meet.
type Stream uint32

const (
	StreamSample   Stream = 1 // neighbour sampling
	StreamShuffle  Stream = 2 // order of the seed nodes in an epoch
	StreamDropout  Stream = 3
	StreamInit     Stream = 4 // model parameters
	StreamGenerate Stream = 5 // generated graphs and features
	StreamSplit    Stream = 6
	StreamBench    Stream = 7
	StreamLayer    Stream = 8  // layer-wise sampling
	StreamBatch    Stream = 9  // keys of the mini-batches' neighbour sampling
	StreamPhase    Stream = 10 // when a node's draw changes between dependent mini-batches
	StreamMega     Stream = 11 // which parts train together, and their passes
	StreamCache    Stream = 12 // which line of a set leaves
)

// Mix is the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection that spreads
// every bit over all others, for hashes that need no key.
func Mix(x uint64) uint64 {
	x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
	x = (x ^ (x >> 27)) * 0x94D049BB133111EB
	return x ^ (x >> 31)
}

// Key derives the Philox key of a seed for one use; Mix keeps neighbouring seeds apart.
func Key(seed uint64, s Stream) [2]uint32 {
	x := Mix(seed + 0x9E3779B97F4A7C15*(uint64(s)+1))
	return [2]uint32{uint32(x), uint32(x >> 32)}
}

// Float32 maps a word to [0, 1) with 24 bits.
func Float32(w uint32) float32 { return float32(w>>8) * (1.0 / (1 << 24)) }

// Bounded maps 64 random bits to [0, n) by the high half of the product; the bias is below n/2^64.
func Bounded(r, n uint64) uint64 { h, _ := bits.Mul64(r, n); return h }
