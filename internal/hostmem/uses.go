package hostmem

import (
	"cmp"
	"fmt"
	"runtime/metrics"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Use is the live memory of one purpose.
type Use struct {
	Purpose string `json:"purpose"`
	Bytes   int64  `json:"bytes"` // as asked for; pages that were never touched take no memory
	// Resident holds what of it lies in memory, in whole pages; -1 where it was not counted.
	Resident int64 `json:"resident_bytes"`
}

// Purposes of Uses that no allocation has.
const (
	GoHeap = "go heap" // live objects, and dead ones that are not swept yet
	// stacks, free spans and metadata of the collector that the kernel has given
	GoOther = "go runtime"
)

// Uses lists what Alloc gave out by purpose, the largest resident first, and Go's own memory. It
// asks the kernel for every page (mincore): some 20 ms for 10 GiB.
func Uses() ([]Use, error) {
	mu.Lock()
	defer mu.Unlock() // what is listed can't be unmapped meanwhile
	by := map[string]*Use{}
	vec := make([]byte, 1<<16)
	for _, b := range blocks {
		u := by[b.purpose]
		if u == nil {
			u = &Use{Purpose: b.purpose}
			by[b.purpose] = u
		}
		u.Bytes += b.size
		n, err := resident(b, vec)
		switch {
		case err == nil && u.Resident >= 0:
			u.Resident += n
		case err == unix.EPERM || err == unix.ENOSYS: // a sandbox that forbids the question
			u.Resident = -1
		case err != nil:
			return nil, fmt.Errorf("count pages of %s: %w", b.purpose, err)
		}
	}
	all := make([]Use, 0, len(by)+2)
	for _, u := range by {
		all = append(all, *u)
	}
	heap, other := goMemory()
	all = append(all, Use{GoHeap, heap, heap}, Use{GoOther, other, other})
	slices.SortFunc(all, func(a, b Use) int {
		return cmp.Or(cmp.Compare(b.Resident, a.Resident), cmp.Compare(a.Purpose, b.Purpose))
	})
	return all, nil
}

// mincore is a variable for tests.
var mincore = func(at, bytes uintptr, vec []byte) unix.Errno {
	_, _, e := unix.Syscall(unix.SYS_MINCORE, at, bytes, uintptr(unsafe.Pointer(&vec[0])))
	return e
}

// resident counts the bytes of a block's pages that are in memory.
func resident(b block, vec []byte) (n int64, err error) {
	if b.huge {
		return int64(b.mapped), nil // reserved pages are given whole
	}
	for off := uintptr(0); off < b.mapped; {
		part := min(b.mapped-off, uintptr(len(vec))*PageBytes)
		if e := mincore(uintptr(b.base)+off, part, vec); e != 0 {
			return 0, e
		}
		for _, v := range vec[:part/PageBytes] {
			n += int64(v&1) * PageBytes
		}
		off += part
	}
	return n, nil
}

func goMemory() (heap, other int64) {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(s)
	heap = int64(s[0].Value.Uint64())
	return heap, int64(s[1].Value.Uint64()-s[2].Value.Uint64()) - heap
}
