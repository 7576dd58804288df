//go:build !race && !arm64

package nvme

// StoreDoorbell writes v to a doorbell register. It is a plain 32-bit store, after all
// stores before it in program order: the doorbell must not become visible before the
// submission queue entries that it announces (section 3.3.1).
//
// Not atomic.StoreUint32, which is XCHG on amd64: a read-modify-write is not a legal access
// to a device register, and drains the store buffer besides. amd64 keeps the order of
// stores (Intel SDM volume 3, section 9.2.2); the call, which is never inlined, keeps the
// compiler from moving them.
//
//go:noinline
func StoreDoorbell(ptr *uint32, v uint32) { *ptr = v }
