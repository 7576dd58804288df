package cache

import (
	"math"

	"helios/internal/errs"
)

// Lines maps rows to cache lines: row r is on SSD s = r mod SSDs at slot q = r div SSDs; the SSD's
// line q div RowsPerLine holds it, which as a row of a layout of lines is (q div RowsPerLine)·SSDs
// + s. RowsPerLine 1 with LineBytes = RowStride: a line is a row.
type Lines struct {
	// RowStride: bytes from a row of a line to the next
	SSDs, RowsPerLine, LineBytes, RowStride int64
}

// Of is a row's line and its place in it.
func (l Lines) Of(row int64) (line, index int64) {
	ssd, slot := row%l.SSDs, row/l.SSDs
	return slot/l.RowsPerLine*l.SSDs + ssd, slot % l.RowsPerLine
}

// Count is the number of lines that rows of that number need: line numbers are below it.
func (l Lines) Count(rows int64) int64 {
	if rows <= 0 {
		return 0
	}
	// lines on each SSD before those that may not be on all
	full := (rows - 1) / l.SSDs / l.RowsPerLine
	return full*l.SSDs + min(rows-full*l.RowsPerLine*l.SSDs, l.SSDs)
}

func (l Lines) check(rowBytes int64) error {
	switch {
	case l.SSDs < 1 || l.SSDs > 1<<16:
		return errs.New(errs.Usage, "lines over %d SSDs: want 1 to %d", l.SSDs, 1<<16)
	case rowBytes < 1 || l.RowStride < rowBytes:
		return errs.New(errs.Usage,
			"lines with a row of %d bytes every %d bytes: want a row of 1 byte or more, and no overlap",
			rowBytes, l.RowStride)
	case l.RowsPerLine < 1 || l.RowsPerLine > math.MaxUint16 || l.LineBytes > 1<<24 ||
		l.LineBytes < (l.RowsPerLine-1)*l.RowStride+rowBytes:
		return errs.New(errs.Usage,
			"lines of %d bytes with %d rows every %d bytes: want lines of up to %d bytes that hold their rows",
			l.LineBytes, l.RowsPerLine, l.RowStride, 1<<24)
	}
	return nil
}

// LineRow as the bytes of a line: a line is a row.
const LineRow = -1

// RowPlaces describes rows as they lie on SSDs: PerLBA of them in an LBA, or one in every
// SlotBytes.
type RowPlaces struct{ SSDs, RowBytes, SlotBytes, LBABytes, PerLBA int64 }

// LayLines lays rows in lines of about lineBytes, or LineRow. A line is a run of adjacent slots of
// one SSD. The distance from a row to the next is the same throughout a line: where LBAs of several
// rows have padding at their end, a line is one LBA.
func LayLines(rows RowPlaces, lineBytes int64) Lines {
	l := Lines{SSDs: rows.SSDs, RowsPerLine: 1}
	switch {
	case lineBytes == LineRow:
	case rows.PerLBA == 1:
		l.RowsPerLine = max(lineBytes/rows.SlotBytes, 1)
		l.RowStride, l.LineBytes = rows.SlotBytes, l.RowsPerLine*rows.SlotBytes
	case rows.PerLBA*rows.RowBytes == rows.LBABytes:
		k := max(lineBytes/rows.LBABytes, 1)
		l.RowStride, l.RowsPerLine, l.LineBytes = rows.RowBytes, k*rows.PerLBA, k*rows.LBABytes
	default:
		l.RowStride, l.RowsPerLine, l.LineBytes = rows.RowBytes, rows.PerLBA, rows.LBABytes
	}
	if l.RowsPerLine == 1 {
		l.RowStride, l.LineBytes = rows.RowBytes, rows.RowBytes
	}
	return l
}
