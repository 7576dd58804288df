package gpuio

import (
	"unsafe"

	"helios/internal/errs"
	"helios/nvme"
)

// Layout places each feature row on a set of SSDs: row r is on SSD r mod n, at slot
// r div n. A slot is either LBAsPerRow whole LBAs (padded) or one of
// RowsPerLBA parts of an LBA (packed); at least one of the two is 1, so a row smaller than an
// LBA never straddles one. It is plain data: kernels get the same bytes.
type Layout struct {
	Rows       int64
	RowBytes   int32
	SSDs       int32
	LBABytes   int32
	RowsPerLBA int32
	LBAsPerRow int32
	_          int32
}

// The CUDA kernels read a Layout in place.
const (
	_ = uint(unsafe.Sizeof(Layout{}) - 32)
	_ = uint(32 - unsafe.Sizeof(Layout{}))
	_ = uint(unsafe.Offsetof(Layout{}.LBAsPerRow) - 24)
)

// NewLayout packs rows of which two or more fit into an LBA. All others have whole LBAs of their
// own. So a read moves no more LBAs than its row needs.
func NewLayout(rows int64, rowBytes, ssds, lbaBytes int) (Layout, error) {
	switch {
	case rows < 0:
		return Layout{}, errs.New(errs.Usage,
			"layout of %d rows: the number of rows cannot be negative", rows)
	case rowBytes < 1 || rowBytes > 1<<24:
		return Layout{}, errs.New(errs.Usage,
			"layout with rows of %d bytes: a row has 1 to %d bytes", rowBytes, 1<<24)
	case ssds < 1 || ssds > 1<<16:
		return Layout{}, errs.New(errs.Usage, "layout over %d SSDs: bind at least one", ssds)
	case lbaBytes < 512 || lbaBytes > 1<<16 || lbaBytes&(lbaBytes-1) != 0:
		return Layout{}, errs.New(errs.Usage,
			"layout with LBAs of %d bytes: format the SSD with 512 or 4096 byte LBAs", lbaBytes)
	}
	l := Layout{Rows: rows, RowBytes: int32(rowBytes), SSDs: int32(ssds), LBABytes: int32(lbaBytes),
		RowsPerLBA: 1, LBAsPerRow: 1}
	if rowBytes <= lbaBytes {
		l.RowsPerLBA = int32(lbaBytes / rowBytes)
	} else {
		l.LBAsPerRow = int32((rowBytes + lbaBytes - 1) / lbaBytes)
	}
	return l, nil
}

// Check reports whether a layout that came from elsewhere (a superblock) holds together.
func (l Layout) Check() error {
	want, err := NewLayout(l.Rows, int(l.RowBytes), int(l.SSDs), int(l.LBABytes))
	if err != nil {
		return err
	}
	if want != l {
		return errs.New(errs.Usage,
			"layout %+v is not the one for its row and LBA sizes (%+v); load the dataset again",
			l, want)
	}
	return nil
}

// Locate finds a row: its SSD, the first LBA counted from the SSD's DataStart, the LBAs to read
// and where in them the row begins.
func (l Layout) Locate(row int64) (ssd int, lba nvme.LBA, blocks uint32, byteOffset int) {
	n := int64(l.SSDs)
	slot := row / n
	ssd = int(row - slot*n)
	first, offset := l.place(slot)
	return ssd, nvme.LBA(first), uint32(l.LBAsPerRow), int(offset)
}

// RowsOn is the number of rows on an SSD.
func (l Layout) RowsOn(ssd int) int64 {
	n := l.Rows / int64(l.SSDs)
	if int64(ssd) < l.Rows%int64(l.SSDs) {
		n++
	}
	return n
}

// LBAsOn is the length of the feature extent on an SSD, in LBAs.
func (l Layout) LBAsOn(ssd int) int64 {
	per := int64(l.RowsPerLBA)
	return (l.RowsOn(ssd) + per - 1) / per * int64(l.LBAsPerRow)
}

// PaddingBytes returns what the extents of all SSDs hold beside rows.
func (l Layout) PaddingBytes() int64 {
	var lbas int64
	for s := 0; s < int(l.SSDs); s++ {
		lbas += l.LBAsOn(s)
	}
	return lbas*int64(l.LBABytes) - l.Rows*int64(l.RowBytes)
}

// ReadBytes returns what one row's read moves from the SSD.
func (l Layout) ReadBytes() int { return int(l.LBAsPerRow) * int(l.LBABytes) }

// whole reports whether a row fills its LBAs, so that a read may land in its final place.
func (l Layout) whole() bool { return int(l.RowBytes) == l.ReadBytes() }
