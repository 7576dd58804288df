package cache

import (
	"helios/cuda"
	"helios/internal/hostmem"
)

// Lookup finds one row from the CPU. A row outside the index is on no tier that a cache has: it
// answers SSD. Slot -1: the device's memory could not be read.
func (i *Index) Lookup(row int64) (Tier, int64) {
	if row < 0 || row >= i.rows {
		return SSD, 0
	}
	n := uint64(row % RowsPerLine)
	if i.lines != nil {
		t, slot := i.lines[row/RowsPerLine].find(n)
		return t, int64(slot)
	}
	stage, err := i.dev.Alloc(cuda.MemPinned, lineBytes, "cache staging")
	if err != nil {
		return SSD, -1
	}
	defer func() { _ = stage.Free() }()
	if err := move(i.dev, stage.Ptr(), i.buf.Ptr()+cuda.DevicePtr(row/RowsPerLine*lineBytes),
		lineBytes); err != nil {
		return SSD, -1
	}
	t, slot := hostmem.View[line](stage.Bytes())[0].find(n)
	return t, int64(slot)
}
