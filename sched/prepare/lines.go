package prepare

import (
	"fmt"

	"helios/cache"
	"helios/gpuio"
	"helios/sched/tiers/dynamic/spec"
)

// LayLines lays the rows of a layout (rows of them) in lines of about lineBytes for a dynamic tier,
// and returns the layout by which lines are read. LineRow, or lines that hold one row only:
// the rows' own layout, so that one reader serves both.
//
// A line is a run of adjacent slots of one SSD. The distance from a row to the next is the same
// throughout a line: where LBAs of several rows have padding at their end, a line is one LBA.
func LayLines(l gpuio.Layout, rows, lineBytes int64) (cache.Lines, gpuio.Layout, error) {
	lba, row, per := int64(l.LBABytes), int64(l.RowBytes), int64(l.RowsPerLBA)
	x := cache.Lines{SSDs: int64(l.SSDs)}
	switch {
	case lineBytes == spec.LineRow:
		x.RowsPerLine = 1
	case per == 1:
		x.RowStride = int64(l.LBAsPerRow) * lba
		x.RowsPerLine = max(lineBytes/x.RowStride, 1)
		x.LineBytes = x.RowsPerLine * x.RowStride
	case per*row == lba:
		k := max(lineBytes/lba, 1)
		x.RowStride, x.RowsPerLine, x.LineBytes = row, k*per, k*lba
	default:
		x.RowStride, x.RowsPerLine, x.LineBytes = row, per, lba
	}
	if x.RowsPerLine == 1 {
		x.RowStride, x.LineBytes = row, row
		return x, l, nil
	}
	lines, err := gpuio.NewLayout(x.Count(rows), int(x.LineBytes), int(l.SSDs), int(lba))
	if err != nil {
		return x, lines, fmt.Errorf("lines of a dynamic tier: %w", err)
	}
	return x, lines, nil
}
