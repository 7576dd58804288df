package prepare

import (
	"fmt"

	"helios/cache"
	"helios/gpuio"
)

// LayLines lays the rows of a layout (rows of them) in lines of about lineBytes for a dynamic tier,
// and returns the layout by which lines are read. Lines that hold one row have the rows' own
// layout, so that one reader serves both.
func LayLines(l gpuio.Layout, rows, lineBytes int64) (cache.Lines, gpuio.Layout, error) {
	lba := int64(l.LBABytes)
	x := cache.LayLines(cache.RowPlaces{SSDs: int64(l.SSDs), RowBytes: int64(l.RowBytes),
		SlotBytes: int64(l.LBAsPerRow) * lba, LBABytes: lba, PerLBA: int64(l.RowsPerLBA)},
		lineBytes)
	if x.RowsPerLine == 1 {
		return x, l, nil
	}
	lines, err := gpuio.NewLayout(x.Count(rows), int(x.LineBytes), int(l.SSDs), int(lba))
	if err != nil {
		return x, lines, fmt.Errorf("lines of a dynamic tier: %w", err)
	}
	return x, lines, nil
}
