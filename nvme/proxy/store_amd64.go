package proxy

// storeEntry writes a completion queue entry as two quadwords, the one with the phase tag
// last. Plain stores: amd64 keeps their order (Intel SDM volume 3, section 9.2.2), and an
// XCHG, which Go's atomic store is, would wait until the 4 KiB that were just copied have
// left the store buffer. The call is never inlined, so the compiler keeps the order too.
//
//go:noinline
func storeEntry(e *[2]uint64, lo, hi uint64) {
	e[0] = lo
	storeTag(e, hi)
}

//go:noinline
func storeTag(e *[2]uint64, hi uint64) { e[1] = hi }
