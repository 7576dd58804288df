package hostmem

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MapFile returns size bytes, the first of which are those of a file from offset on, shared with
// all who map it. The rest is memory of this process, which costs nothing until it is touched.
// offset and bytes are multiples of PageBytes. Free gives it back.
func MapFile(fd int, offset, bytes, size int64, purpose string) ([]byte, error) {
	if offset < 0 || bytes < 1 || bytes > size || offset%PageBytes+bytes%PageBytes != 0 {
		return nil, fmt.Errorf("map %s: bytes %d to %d of a file, in %d bytes", purpose, offset,
			offset+bytes, size)
	}
	mapped := (uintptr(size) + PageBytes - 1) &^ uintptr(PageBytes-1)
	p, err := unix.MmapPtr(-1, 0, nil, mapped, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes for %s: mmap: %w", size, purpose, err)
	}
	if _, err := unix.MmapPtr(fd, offset, p, uintptr(bytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		_ = unix.MunmapPtr(p, mapped) // there is an error already
		return nil, fmt.Errorf("map %d bytes of a file for %s: mmap: %w", bytes, purpose, err)
	}
	mu.Lock()
	defer mu.Unlock()
	blocks[uintptr(p)] = block{p, size, mapped, purpose, false}
	usage[purpose] += size
	return unsafe.Slice((*byte)(p), size), nil
}
