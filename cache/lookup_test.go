package cache

import (
	"slices"
	"sync"

	"helios/cuda"
	"helios/internal/hostmem"
)

// unseenLines has the lines of indices in memory that the CPU does not see.
var unseenLines sync.Map // *Index to []line

// Lookup finds one row from the CPU. A row outside the index is on no tier that a cache has: it
// answers SSD. Slot -1: the device's memory could not be read.
func (i *Index) Lookup(row int64) (Tier, int64) {
	if row < 0 || row >= i.rows {
		return SSD, 0
	}
	lines := i.lines
	if lines == nil {
		known, ok := unseenLines.Load(i)
		if !ok {
			if lines = i.read(); lines == nil {
				return SSD, -1
			}
			known, _ = unseenLines.LoadOrStore(i, lines)
		}
		lines = known.([]line)
	}
	t, slot := lines[row/RowsPerLine].find(uint64(row % RowsPerLine))
	return t, int64(slot)
}

// read copies an index to the CPU; nil where that fails.
func (i *Index) read() []line {
	stage, err := i.dev.Alloc(cuda.MemPinned, i.buf.Size(), "cache staging")
	if err != nil {
		return nil
	}
	defer func() { _ = stage.Free() }()
	if err := move(i.dev, stage.Ptr(), i.buf.Ptr(), i.buf.Size()); err != nil {
		return nil
	}
	return slices.Clone(hostmem.View[line](stage.Bytes()))
}
