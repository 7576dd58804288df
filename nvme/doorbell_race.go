//go:build race

package nvme

import "sync/atomic"

// StoreDoorbell writes v to a doorbell register, after all stores before it. Under the
// race detector the doorbell of a software controller must be a synchronising store for the
// detector to see the order that the plain store of doorbell_plain.go relies on.
//
//go:noinline
func StoreDoorbell(ptr *uint32, v uint32) { atomic.StoreUint32(ptr, v) }
