package faultbus

import (
	"fmt"
	"slices"
	"sort"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/nvme"
)

// mapping is memory that the client mapped.
type mapping struct {
	lo, hi uint64 // IOVAs, hi exclusive
	mem    []byte
}

// MapDMA implements nvme.Bus.
func (b *Bus) MapDMA(mem []byte) (nvme.IOVA, error) { return b.note(mem, b.inner.MapDMA) }

// MapWindow implements nvme.WindowMapper where the bus behind does.
func (b *Bus) MapWindow(mem []byte) (nvme.IOVA, error) {
	w, ok := b.inner.(nvme.WindowMapper)
	if !ok {
		return 0, nvme.ErrNoWindows
	}
	return b.note(mem, w.MapWindow)
}

// ExtendWindow implements nvme.WindowMapper.
func (b *Bus) ExtendWindow(iova nvme.IOVA, bytes int64) error {
	w, ok := b.inner.(nvme.WindowMapper)
	if !ok {
		return nvme.ErrNoWindows
	}
	return w.ExtendWindow(iova, bytes)
}

// MapPeerDMA implements nvme.PeerDMA.
func (b *Bus) MapPeerDMA(mem []byte, dmabuf int, offset int64) (nvme.IOVA, error) {
	p, ok := b.inner.(nvme.PeerDMA)
	if !ok {
		return b.MapDMA(mem)
	}
	return b.note(mem, func(mem []byte) (nvme.IOVA, error) {
		return p.MapPeerDMA(mem, dmabuf, offset)
	})
}

// MapPeerWindow implements nvme.PeerDMA.
func (b *Bus) MapPeerWindow(mem []byte) (nvme.IOVA, error) {
	p, ok := b.inner.(nvme.PeerDMA)
	if !ok {
		return 0, nvme.ErrNoWindows
	}
	return b.note(mem, p.MapPeerWindow)
}

// note maps memory and keeps the mapping.
func (b *Bus) note(mem []byte, enter func([]byte) (nvme.IOVA, error)) (nvme.IOVA, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	iova, err := enter(mem)
	if err == nil {
		b.keep(mapping{uint64(iova), uint64(iova) + uint64(len(mem)), mem})
	}
	return iova, err
}

// keep adds a mapping to the list; the caller holds mu.
func (b *Bus) keep(m mapping) {
	i := sort.Search(len(b.maps), func(i int) bool { return b.maps[i].lo > m.lo })
	b.maps = slices.Insert(b.maps, i, m)
}

// UnmapDMA implements nvme.Bus. A live queue within the memory is fatal to the controller, as
// without the bus in between.
func (b *Bus) UnmapDMA(iova nvme.IOVA, bytes int64) error {
	b.mu.Lock()
	i := sort.Search(len(b.maps), func(i int) bool { return b.maps[i].lo >= uint64(iova) })
	var m mapping
	known := i < len(b.maps) && b.maps[i].lo == uint64(iova) &&
		b.maps[i].hi-b.maps[i].lo == uint64(bytes)
	if known {
		m = b.maps[i]
		b.maps = slices.Delete(b.maps, i, i+1)
		b.loseRings(m)
	}
	b.mu.Unlock()
	// Not under the lock: it waits for transfers.
	err := b.inner.UnmapDMA(iova, bytes)
	if err != nil && known {
		b.mu.Lock()
		b.keep(m)
		b.mu.Unlock()
	}
	return err
}

// loseRings stops the controller if one of the client's rings lies in m.
func (b *Bus) loseRings(m mapping) {
	lo := uintptr(unsafe.Pointer(&m.mem[0]))
	in := func(p unsafe.Pointer, n uintptr) bool {
		return uintptr(p) < lo+uintptr(len(m.mem)) && lo < uintptr(p)+n
	}
	for _, q := range b.sqs {
		b.cfs = b.cfs || in(q.base, uintptr(q.entries)*nvme.CommandBytes)
	}
	for _, c := range b.cqs {
		b.cfs = b.cfs || in(c.base, uintptr(c.entries)*nvme.CompletionBytes)
	}
}

// find returns the client's memory behind n bytes at iova, which lie in one mapping.
func (b *Bus) find(iova, n uint64) ([]byte, bool) {
	i := sort.Search(len(b.maps), func(i int) bool { return b.maps[i].hi > iova })
	if i == len(b.maps) || b.maps[i].lo > iova || n > b.maps[i].hi-iova {
		return nil, false
	}
	off := iova - b.maps[i].lo
	return b.maps[i].mem[off : off+n : off+n], true
}

// data is the memory of a transfer of n bytes, in order (section 4.1.1); false when its PRPs are
// none, of which the controller tells the client.
func (b *Bus) data(cmd *nvme.Command, n uint64) (segs [][]byte, ok bool) {
	page := b.pageBytes
	add := func(iova, n uint64) bool {
		m, ok := b.find(iova, n)
		segs = append(segs, m)
		return ok
	}
	first := min(n, page-cmd.PRP1&(page-1))
	if !add(cmd.PRP1, first) {
		return nil, false
	}
	rest := n - first
	if rest == 0 {
		return segs, true
	}
	if rest <= page {
		return segs, add(cmd.PRP2, rest)
	}
	for off := cmd.PRP2; rest > 0; {
		if off&7 != 0 {
			return nil, false
		}
		m, ok := b.find(off, 8)
		if !ok {
			return nil, false
		}
		e := *(*uint64)(unsafe.Pointer(&m[0]))
		if off&(page-1) == page-8 && rest > page { // the list goes on elsewhere
			off = e
			continue
		}
		here := min(rest, page)
		if !add(e, here) {
			return nil, false
		}
		rest -= here
		off += 8
	}
	return segs, true
}

// ring is memory of the bus's own that the controller reaches.
type ring struct {
	mem  []byte
	iova nvme.IOVA
}

func (b *Bus) alloc(bytes int) (ring, error) {
	bytes = (bytes + int(b.pageBytes) - 1) &^ (int(b.pageBytes) - 1)
	mem, err := hostmem.Alloc(int64(bytes), "fault bus rings")
	if err != nil {
		return ring{}, fmt.Errorf("%s: %w", b.Name(), err)
	}
	iova, err := b.inner.MapDMA(mem)
	if err != nil {
		return ring{}, errs.Also(err, hostmem.Free(mem))
	}
	return ring{mem, iova}, nil
}

func (b *Bus) free(r ring) error {
	if r.mem == nil {
		return nil
	}
	if err := b.inner.UnmapDMA(r.iova, int64(len(r.mem))); err != nil {
		return err // still mapped: it must stay
	}
	return hostmem.Free(r.mem)
}
