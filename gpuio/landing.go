package gpuio

import (
	"hash/crc32"
	"unsafe"

	"helios/cuda"
)

// landingChecker is a Reader that takes the CRCs of rows as they land, while the CPU that has moved
// them still has them in its cache. A pass over the whole set would fetch them from memory once
// more, and wait for a worker slot of the device.
type landingChecker interface {
	// checkLanding gives the checksums, by row, before the first set.
	checkLanding(sums []uint32)
}

// landed is a Pending of such a Reader.
type landed interface {
	// wrongRows returns the rows of a set, all of which Wait has brought in, that were wrong when
	// they landed: how many, and the first checkAgain in the order of the set. checked is false
	// where the rows of this set were not checked.
	wrongRows() (rows []wrongRow, count int64, checked bool)
}

// landing holds the CRCs of one set's rows, by index. The checksums are compared at the end of the
// set: one that is not in a cache costs more than the CRC of a row, and loads that do not depend on
// each other overlap.
type landing struct{ got []uint32 }

// begin makes room for the rows of a set up to index end.
func (l *landing) begin(end int64) {
	if int64(cap(l.got)) < end {
		l.got = make([]uint32, grown(end))
	}
	l.got = l.got[:end]
	clear(l.got) // a row that is left out by mistake must not pass with an earlier set's CRC
}

// wrongOf compares the CRCs of a set's rows from index first on.
func wrongOf(got, sums []uint32, rows []int64, pos []uint32,
	first int64) (wrong []wrongRow, count int64) {
	for i := first; i < int64(len(got)); i++ {
		want := sums[rows[i]]
		if got[i] == want {
			continue
		}
		if count++; count <= checkAgain {
			wrong = append(wrong, wrongRow{rows[i], pos[i], want, got[i]})
		}
	}
	return wrong, count
}

// checkLanding implements landingChecker: the kernels complete and read_sync of the host device
// check the rows of a command that has succeeded. Rows that several commands read are whole only
// at the end of their set.
func (e *async) checkLanding(sums []uint32) {
	if e.onHost() && e.partBlocks == 0 {
		e.host.sums, e.host.crcs = sums, e.shape.crcs
	}
}

// beginCRCs makes room for the CRCs of a set in memory that kernels may use. Needs e.mu.
func (e *async) beginCRCs(slot uint32, set *setState, rows int64) error {
	if e.host.sums == nil {
		return nil
	}
	sc := &e.scratch[slot]
	if sc.landed < rows {
		c := grown(rows)
		if err := e.replace(&sc.crcs, c*4, "gpuio checksums", true); err != nil {
			return err
		}
		sc.landed = c
	}
	if rows > 0 {
		*at[cuda.DevicePtr](set.Offsets+cuda.DevicePtr(e.host.crcs), 0) = sc.crcs.Ptr()
		clear(e.host.crcsOf(set, rows)) // a row left out must not pass with an earlier set's CRC
	}
	return nil
}

// crcsOf returns the CRCs of a set of so many rows.
func (h *hostSide) crcsOf(set *setState, rows int64) []uint32 {
	return view[uint32](*at[cuda.DevicePtr](set.Offsets+cuda.DevicePtr(h.crcs), 0), 0, rows)
}

// takeCRCs takes those of the rows of a unit that was read, which are in place.
func (k kernelView) takeCRCs(set *setState, cmd *command) {
	got := *at[cuda.DevicePtr](set.Offsets+cuda.DevicePtr(k.h.crcs), 0)
	if set.Order == 0 {
		*at[uint32](got, int(cmd.Index)) = set.placedCRC(int64(cmd.Index))
		return
	}
	lo, hi := *at[uint32](set.Runs, int(cmd.Index)), *at[uint32](set.Runs, int(cmd.Index)+1)
	for _, i := range view[uint32](set.Order, int64(lo), int64(hi)) {
		*at[uint32](got, int(i)) = set.placedCRC(int64(i))
	}
}

// placedCRC returns that of the row at an index in its place.
func (s *setState) placedCRC(index int64) uint32 {
	off := int64(*at[uint32](s.Pos, int(index))) * s.DstStride
	row := at[byte](s.Dst+cuda.DevicePtr(off), 0)
	return crc32.Checksum(unsafe.Slice(row, int(s.Layout.RowBytes)), castagnoli)
}

// compareLanded compares the rows of a set that is read whole, while it has its slot.
func (p *asyncPending) compareLanded(set *setState) {
	h := p.e.host
	if h.sums == nil || set.NumFails != 0 {
		return
	}
	end := *at[int64](set.Offsets, len(p.e.ssds))
	if end == 0 {
		return
	}
	p.wrong, p.wrongCount = wrongOf(h.crcsOf(set, end), h.sums, view[int64](set.Rows, 0, end),
		view[uint32](set.Pos, 0, end), *at[int64](set.Offsets, 0))
}

func (p *asyncPending) wrongRows() ([]wrongRow, int64, bool) {
	return p.wrong, p.wrongCount, p.e.host.sums != nil
}

// checkLanding implements landingChecker: the thread that copies a row to its place checks it.
func (r *hostReader) checkLanding(sums []uint32) {
	if r.dev.Info().Backend == "host" { // else the rows go on to a memory of the device's own
		r.sums = sums
	}
}

// takeCRCs takes those of a unit's rows, from what was read from u.off on: the copies may still be
// on their way to the cache.
func (p *hostPending) takeCRCs(u *hostUnit, data []byte) {
	if p.r.sums == nil {
		return
	}
	n := int(p.r.layout.RowBytes)
	for k := u.lo; k < u.hi; k++ {
		i := p.index(k)
		p.landing.got[i] = crc32.Checksum(data[p.offset(i, u.file)-u.off:][:n], castagnoli)
	}
}

func (p *hostPending) wrongRows() (rows []wrongRow, count int64, checked bool) {
	if p.r.sums == nil {
		return nil, 0, false
	}
	rows, count = wrongOf(p.landing.got, p.r.sums, p.rows, p.pos, p.first)
	return rows, count, true
}
