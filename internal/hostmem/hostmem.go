// Package hostmem hands out memory that does not belong to Go's heap and measures how much
// memory the process holds.
//
// Memory that kernels, SSDs or the io_uring of the kernel touch must not move, must not be
// scanned by the garbage collector and must be page aligned; Go's heap promises none of it.
// Everything here is accounted by purpose, so that a leak has a name.
package hostmem

import (
	"fmt"
	"maps"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

const (
	PageBytes     = 4096 // the alignment of every allocation
	HugePageBytes = 2 << 20
)

// From this size on an allocation is compared with the memory that is left. Linux overcommits:
// without the question, a budget larger than memory would end in the OOM killer.
const checkBytes = 64 << 20

type block struct {
	base    unsafe.Pointer
	size    int64 // as asked for
	mapped  uintptr
	purpose string
	huge    bool // on reserved huge pages; mapped is a multiple of theirs
}

var (
	mu     sync.Mutex
	blocks = map[uintptr]block{}
	usage  = map[string]int64{}
	onHuge int64 // bytes mapped on reserved huge pages
)

// OutOfMemoryError names the use, the bytes that it asked for, and the bytes that there were.
type OutOfMemoryError struct {
	Purpose    string
	Want, Free int64 // bytes
}

func (e *OutOfMemoryError) Error() string {
	return fmt.Sprintf(
		"out of memory for %s: %d bytes wanted, %d bytes free; lower the budgets or free memory",
		e.Purpose, e.Want, e.Free)
}

// Alloc returns size zeroed bytes, aligned to PageBytes, outside Go's heap. From 2 MiB on they lie
// on reserved huge pages where enough are free, and else the kernel is asked for transparent ones:
// random access by row needs them for its TLB, and an IOMMU for its own. Size 0 gives an empty
// slice. Memory that cannot be had is an *OutOfMemoryError.
func Alloc(size int64, purpose string) ([]byte, error) {
	if size < 0 {
		return nil, fmt.Errorf("allocate %s: negative size %d", purpose, size)
	}
	if size == 0 {
		return []byte{}, nil
	}
	p, mapped, huge := mapHuge(size)
	if !huge {
		var err error
		if p, mapped, err = mapOrdinary(size, purpose); err != nil {
			return nil, err
		}
	}
	mu.Lock()
	blocks[uintptr(p)] = block{p, size, mapped, purpose, huge}
	usage[purpose] += size
	if huge {
		onHuge += int64(mapped)
	}
	mu.Unlock()
	return unsafe.Slice((*byte)(p), size), nil
}

func mapOrdinary(size int64, purpose string) (unsafe.Pointer, uintptr, error) {
	if size >= checkBytes {
		if free, err := AvailableBytes(); err == nil && size > free {
			return nil, 0, errs.With(errs.Capability, &OutOfMemoryError{purpose, size, free})
		}
	}
	mapped := (uintptr(size) + PageBytes - 1) &^ uintptr(PageBytes-1)
	p, err := unix.MmapPtr(-1, 0, nil, mapped, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err == unix.ENOMEM {
		free, _ := AvailableBytes() // 0 when it cannot be told
		return nil, 0, errs.With(errs.Capability, &OutOfMemoryError{purpose, size, free})
	}
	if err != nil {
		return nil, 0, fmt.Errorf("allocate %d bytes for %s: mmap: %w", size, purpose, err)
	}
	if size >= HugePageBytes {
		// Advice only: a kernel without huge pages gives small ones.
		_ = unix.Madvise(unsafe.Slice((*byte)(p), size), unix.MADV_HUGEPAGE)
	}
	return p, mapped, nil
}

// Free gives back memory from Alloc. b may be shorter than what Alloc returned but must start
// where it started. Freeing anything else is an error and touches nothing.
func Free(b []byte) error {
	if cap(b) == 0 {
		return nil
	}
	base := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	mu.Lock()
	blk, ok := blocks[base]
	if ok {
		delete(blocks, base)
		if usage[blk.purpose] -= blk.size; usage[blk.purpose] == 0 {
			delete(usage, blk.purpose)
		}
		if blk.huge {
			onHuge -= int64(blk.mapped)
		}
	}
	mu.Unlock()
	if !ok {
		return fmt.Errorf(
			"free of %#x: no live allocation starts there (freed twice, or not from hostmem)", base)
	}
	if err := unix.MunmapPtr(blk.base, blk.mapped); err != nil {
		return fmt.Errorf("free %d bytes of %s: munmap: %w", blk.size, blk.purpose, err)
	}
	return nil
}

// Usage is the live bytes by purpose. Purposes with nothing live are left out.
func Usage() map[string]int64 {
	mu.Lock()
	defer mu.Unlock()
	return maps.Clone(usage)
}

// View reads b as a slice of T, which must hold no Go pointers. It panics when b is not aligned
// for T or not a whole number of Ts: both are errors of the program, not of its input.
func View[T any](b []byte) []T {
	var t T
	size, align := unsafe.Sizeof(t), unsafe.Alignof(t)
	if len(b) == 0 {
		return nil
	}
	p := unsafe.Pointer(unsafe.SliceData(b))
	if size == 0 || uintptr(len(b))%size != 0 {
		panic(fmt.Sprintf("hostmem: %d bytes are not a whole number of %T (%d bytes)", len(b),
			t, size))
	}
	if uintptr(p)%align != 0 {
		panic(fmt.Sprintf("hostmem: %p is not aligned to %d bytes for %T", p, align, t))
	}
	return unsafe.Slice((*T)(p), uintptr(len(b))/size)
}

// Bytes is the memory of v.
func Bytes[T any](v []T) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), uintptr(len(v))*unsafe.Sizeof(v[0]))
}
