package hostmem

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MapFile returns size bytes, the first of which are those of a file in memory from offset on,
// shared with all who map it. The rest is memory of this process, which costs nothing until it is
// touched. offset and bytes are multiples of PageBytes. The part of the file between multiples of
// HugePageBytes lies on transparent huge pages where the kernel gives them. Free gives it back.
func MapFile(fd int, offset, bytes, size int64, purpose string) ([]byte, error) {
	if offset < 0 || bytes < 1 || bytes > size || offset%PageBytes+bytes%PageBytes != 0 {
		return nil, fmt.Errorf("map %s: bytes %d to %d of a file, in %d bytes", purpose, offset,
			offset+bytes, size)
	}
	mapped := (uintptr(size) + PageBytes - 1) &^ uintptr(PageBytes-1)
	p, err := reserve(mapped, uintptr(offset)%HugePageBytes)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes for %s: mmap: %w", size, purpose, err)
	}
	if _, err := unix.MmapPtr(fd, offset, p, uintptr(bytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		_ = unix.MunmapPtr(p, mapped) // there is an error already
		return nil, fmt.Errorf("map %d bytes of a file for %s: mmap: %w", bytes, purpose, err)
	}
	b := unsafe.Slice((*byte)(p), size)
	collapse(b[:bytes])
	mu.Lock()
	defer mu.Unlock()
	blocks[uintptr(p)] = block{p, size, mapped, purpose, false}
	usage[purpose] += size
	return b, nil
}

// reserve maps so many bytes without memory, which begin so far behind a multiple of HugePageBytes.
func reserve(mapped, behind uintptr) (unsafe.Pointer, error) {
	p, err := unix.MmapPtr(-1, 0, nil, mapped+HugePageBytes, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	before := (behind - uintptr(p)) % HugePageBytes
	if before > 0 {
		err = unix.MunmapPtr(p, before)
	}
	p = unsafe.Add(p, before)
	return p, errors.Join(err, unix.MunmapPtr(unsafe.Add(p, mapped), HugePageBytes-before))
}

// collapse has the kernel put b on huge pages, but for its ends. Kernels before 6.1 leave it on
// small pages, as others do without a free huge one: faults and TLB misses cost more there.
func collapse(b []byte) {
	first := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) % HugePageBytes)
	if len(b) < first+HugePageBytes {
		return
	}
	b = b[first:][:(len(b)-first)&^(HugePageBytes-1)]
	for i := 0; i < len(b); i += HugePageBytes {
		// the kernel refuses a range without any page
		atomic.LoadUint32((*uint32)(unsafe.Pointer(&b[i])))
	}
	_ = unix.Madvise(b, unix.MADV_COLLAPSE)
}
