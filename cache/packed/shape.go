package packed

import "helios/internal/errs"

// Pages have the smallest size that wastes at most one part in pageWaste, up to pageMost where a
// row is not larger.
const (
	pageUnit  = 4096
	pageMost  = 64 << 10
	pageWaste = 50
	rowMost   = 1 << 24 // as gpuio.NewLayout has it
)

// NewShape chooses the pages for rows of rowBytes on SSDs with LBAs of lbaBytes: the least multiple
// of 4 KiB and of an LBA in which whole rows leave at most 2 % unused, or of those up to 64 KiB the
// one that leaves the least. A row that is larger has a page of its own.
func NewShape(rowBytes, lbaBytes int64) (Shape, error) {
	switch {
	case rowBytes < 1 || rowBytes > rowMost:
		return Shape{}, errs.New(errs.Usage, "packed rows of %d bytes: a row has 1 to %d bytes",
			rowBytes, rowMost)
	case lbaBytes < 512 || lbaBytes > pageMost || lbaBytes&(lbaBytes-1) != 0:
		return Shape{}, errs.New(errs.Usage,
			"packed rows on LBAs of %d bytes: format the SSD with 512 or 4096 byte LBAs", lbaBytes)
	}
	unit := max(pageUnit, lbaBytes)
	least := (rowBytes + unit - 1) / unit * unit
	best := Shape{rowBytes, least, least / rowBytes}
	for size := least; size <= pageMost; size += unit {
		s := Shape{rowBytes, size, size / rowBytes}
		// Unused shares compare as unused bytes times the other's size.
		if s.unused()*best.PageBytes < best.unused()*s.PageBytes {
			best = s
		}
		if best.unused()*pageWaste <= best.PageBytes {
			break
		}
	}
	return best, nil
}

// unused is the part of a page beside rows, in bytes.
func (s Shape) unused() int64 { return s.PageBytes - s.RowsPerPage*s.RowBytes }

// PagesOf is the number of pages that so many rows take.
func (s Shape) PagesOf(rows int64) int64 { return (rows + s.RowsPerPage - 1) / s.RowsPerPage }

// check reports whether a shape that was read from a file is consistent.
func (s Shape) check() bool {
	return s.RowBytes >= 1 && s.RowBytes <= rowMost && s.PageBytes >= s.RowBytes &&
		s.PageBytes%pageUnit == 0 && s.PageBytes <= rowMost+pageMost &&
		s.RowsPerPage == s.PageBytes/s.RowBytes
}
