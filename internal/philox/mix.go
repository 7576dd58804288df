package philox

// Mix is the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection that spreads
// every bit over all others, for hashes that need no key.
func Mix(x uint64) uint64 {
	x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
	x = (x ^ (x >> 27)) * 0x94D049BB133111EB
	return x ^ (x >> 31)
}
