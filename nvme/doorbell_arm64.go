//go:build !race && arm64

package nvme

// StoreDoorbell writes v to a doorbell register after all stores before it: DMB OSHST, then
// a plain store (a store-release orders normal memory only, a doorbell may be device memory).
//
//go:noescape
func StoreDoorbell(ptr *uint32, v uint32)
