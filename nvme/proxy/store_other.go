//go:build !amd64

package proxy

import "sync/atomic"

// storeEntry writes a completion queue entry as two quadwords, the one with the phase tag
// last and with release.
func storeEntry(e *[2]uint64, lo, hi uint64) {
	atomic.StoreUint64(&e[0], lo)
	atomic.StoreUint64(&e[1], hi)
}
