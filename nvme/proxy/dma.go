package proxy

import (
	"fmt"
	"sort"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/internal/errs"
	"helios/nvme"
)

// IOVAs are numbers of their own, never virtual addresses, so that an address that was not
// translated by MapDMA shows at once. They start at 4 GiB and end below 39 bits, the
// narrowest IOMMU that is common.
const (
	iovaFirst = 1 << 32
	iovaEnd   = 1 << 39
	iovaGuard = 1 << 21 // unmapped space behind each mapping: overruns fault
)

type mapping struct {
	lo, hi uint64 // IOVAs, hi exclusive
	base   unsafe.Pointer
}

// dmaTable is an immutable set of mappings, sorted by lo; the IOMMU's page table.
type dmaTable struct{ maps []mapping }

// find returns the mapping that holds iova.
func (t *dmaTable) find(iova uint64) (mapping, bool) {
	i := sort.Search(len(t.maps), func(i int) bool { return t.maps[i].hi > iova })
	if i == len(t.maps) || t.maps[i].lo > iova {
		return mapping{}, false
	}
	return t.maps[i], true
}

// tlb caches one reader's last translations. It belongs to the holder of its queue's lock.
type tlb struct {
	table *dmaTable
	last  mapping
}

// translate returns the memory behind the n bytes at iova, which must lie in one mapping.
func (l *tlb) translate(b *Bus, iova uint64, n uint64) (unsafe.Pointer, bool) {
	if t := b.maps.Load(); t != l.table {
		l.table, l.last = t, mapping{}
	}
	if iova < l.last.lo || iova >= l.last.hi {
		m, ok := l.table.find(iova)
		if !ok {
			return nil, false
		}
		l.last = m
	}
	if n > l.last.hi-iova {
		return nil, false
	}
	return unsafe.Add(l.last.base, iova-l.last.lo), true
}

// MapDMA makes memory reachable for the controller. Its address must be aligned to 4096
// bytes, as an IOMMU demands; bytes past its end stay out of reach.
func (b *Bus) MapDMA(mem []byte) (nvme.IOVA, error) {
	if len(mem) == 0 {
		return 0, errs.New(errs.Usage, "%s: map 0 bytes for DMA", b.name)
	}
	base := unsafe.Pointer(&mem[0])
	if uintptr(base)%4096 != 0 {
		return 0, fmt.Errorf("%s: map memory at %p for DMA: the address must be a multiple of 4096",
			b.name, base)
	}
	b.mapMu.Lock()
	defer b.mapMu.Unlock()
	if b.closed.Load() {
		return 0, fmt.Errorf("%s: map memory for DMA: %w", b.name, nvme.ErrClosed)
	}
	old := b.maps.Load().maps
	need := (uint64(len(mem))+4095)&^4095 + iovaGuard
	lo, ok := findGap(old, b.nextIOVA, need)
	if !ok {
		lo, ok = findGap(old, iovaFirst, need)
	}
	if !ok {
		return 0, errs.New(errs.Device, "%s: no IOVA space left for %d bytes", b.name, len(mem))
	}
	b.nextIOVA = lo + need
	m := mapping{lo, lo + uint64(len(mem)), base}
	i := sort.Search(len(old), func(i int) bool { return old[i].lo > lo })
	maps := make([]mapping, 0, len(old)+1)
	maps = append(append(append(maps, old[:i]...), m), old[i:]...)
	b.maps.Store(&dmaTable{maps})
	return nvme.IOVA(lo), nil
}

// iovaAlign is the largest memory page that the controller supports: memory that is mapped
// whole starts on a page, whichever size CC.MPS chooses.
const iovaAlign = 1 << 16

// findGap finds need bytes of IOVA space at from or above.
func findGap(maps []mapping, from, need uint64) (uint64, bool) {
	off := (from + iovaAlign - 1) &^ (iovaAlign - 1)
	for _, m := range maps {
		if m.hi+iovaGuard <= off {
			continue
		}
		if m.lo >= off+need {
			break
		}
		off = (m.hi + iovaGuard + iovaAlign - 1) &^ (iovaAlign - 1)
	}
	return off, off+need <= iovaEnd
}

// UnmapDMA takes a mapping back. When it returns, the controller neither reads nor writes
// that memory any more: it waits for transfers in progress. Live queues within it stop the
// controller with CSTS.CFS, as unmapped queues do to QEMU's.
func (b *Bus) UnmapDMA(iova nvme.IOVA, bytes int64) error {
	b.mapMu.Lock()
	old := b.maps.Load().maps
	i := sort.Search(len(old), func(i int) bool { return old[i].lo >= uint64(iova) })
	if i == len(old) || old[i].lo != uint64(iova) || old[i].hi-old[i].lo != uint64(bytes) {
		b.mapMu.Unlock()
		return fmt.Errorf("%s: unmap %d bytes at IOVA %#x: that was not mapped so", b.name, bytes,
			uint64(iova))
	}
	m := old[i]
	maps := append(append(make([]mapping, 0, len(old)-1), old[:i]...), old[i+1:]...)
	b.maps.Store(&dmaTable{maps})
	b.mapMu.Unlock()

	// From here on no new translation succeeds. Whoever holds a queue's lock may still
	// work with an old one; taking each lock once waits for that.
	lo := uintptr(m.base)
	hi := lo + uintptr(m.hi-m.lo)
	deadline := time.Now().Add(drainTime)
	for i := range b.cqs {
		c := b.cqs[i].Load()
		if c == nil {
			continue
		}
		c.mu.Lock()
		if !c.dead && c.memoryIn(lo, hi) {
			b.fatal()
		}
		c.mu.Unlock()
		err := c.drain(deadline, func(s *slot) bool { return s.touches(lo, hi) })
		if err != nil {
			return fmt.Errorf("%s: unmap %d bytes at IOVA %#x: %w", b.name, bytes,
				uint64(iova), err)
		}
	}
	return nil
}

// fatal sets CSTS.CFS: the controller executes nothing until it is reset.
func (b *Bus) fatal() { atomic.StoreUint32(&b.cfs, 1) }
