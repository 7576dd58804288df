package hostmem

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapHuge2MB is MAP_HUGE_2MB: the page size's logarithm in the flags' top bits.
const mapHuge2MB = 21 << 26

// HugePool is the machine's pool of reserved 2 MiB pages in bytes: all of it, and what nobody uses
// or was promised. root "" is the real machine. A kernel without such pages is an fs.ErrNotExist.
func HugePool(root string) (total, free int64, err error) {
	dir := filepath.Join("/", root, "/sys/kernel/mm/hugepages/hugepages-2048kB")
	read := func(name string) int64 {
		var b []byte
		var n int64
		if err == nil {
			b, err = os.ReadFile(filepath.Join(dir, name))
		}
		if err == nil {
			n, err = strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		}
		return n
	}
	all, unused, promised := read("nr_hugepages"), read("free_hugepages"), read("resv_hugepages")
	if err != nil {
		return 0, 0, fmt.Errorf("huge pages: %w", err)
	}
	return all * HugePageBytes, max(unused-promised, 0) * HugePageBytes, nil
}

// HugeBytes returns how much of the live allocations lies on reserved huge pages, as mapped.
func HugeBytes() int64 {
	mu.Lock()
	defer mu.Unlock()
	return onHuge
}

// mapHuge maps size bytes on reserved huge pages. It answers false, and the caller takes ordinary
// memory, where there are not enough of them, where the last page would be mostly waste, and where
// the kernel, or a control group, does not give what the pool shows.
func mapHuge(size int64) (p unsafe.Pointer, mapped uintptr, ok bool) {
	rounded := (size + HugePageBytes - 1) &^ (HugePageBytes - 1)
	if size < HugePageBytes || rounded < size || rounded-size > size/4 {
		return nil, 0, false
	}
	if _, free, err := HugePool(""); err != nil || free < rounded {
		return nil, 0, false
	}
	mapped = uintptr(rounded)
	p, err := unix.MmapPtr(-1, 0, nil, mapped, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB|mapHuge2MB)
	if err != nil {
		return nil, 0, false
	}
	// A limit that the pool does not show (cgroup, cpuset) would be a SIGBUS at first touch.
	// Kernels before 5.14 cannot be asked and answer EINVAL.
	if err := unix.Madvise(unsafe.Slice((*byte)(p), rounded),
		unix.MADV_POPULATE_WRITE); err != nil && err != unix.EINVAL {
		_ = unix.MunmapPtr(p, mapped) // of a mapping that was just made
		return nil, 0, false
	}
	return p, mapped, true
}
