package cache

import (
	"context"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/internal/hostmem"
)

// RowsPerLine is the number of rows that one 64-byte line of the index covers.
const RowsPerLine = 224

// line is 64 bytes that answer any question about 224 rows with one memory access: how many
// rows before this line are in the GPU tier and in the CPU tier, and two bits for each row of
// the line. A row's slot in its tier is its rank among the tier's rows, so it is not stored.
// BaM keeps a word or more of metadata for each page of the SSDs; this is 0.29 bytes a row.
type line struct {
	rank [2]uint32 // rows of the GPU tier and of the CPU tier before this line
	code [7]uint64 // row n of the line: bits 2(n mod 32) and up of word n/32, a Tier
}

const (
	lineBytes   = 64
	rowsPerWord = 32
	lowBits     = 0x5555555555555555 // the GPU bit of each code; the CPU bit is one above
)

// The kernel on the GPU reads the same bytes.
const (
	_ = -(unsafe.Sizeof(line{}) ^ lineBytes)
	_ = -(unsafe.Offsetof(line{}.code) ^ 8)
	_ = uint(7*rowsPerWord-RowsPerLine) + uint(RowsPerLine-7*rowsPerWord)
)

// IndexBytes is the memory of an index over that many rows: 1.6 GB for 5.6 billion.
func IndexBytes(rows int64) int64 { return (rows + RowsPerLine - 1) / RowsPerLine * lineBytes }

// find returns a row's tier and its rank in it. The row must be one of the line's.
func (l *line) find(n uint64) (Tier, uint64) {
	word, shift := n/rowsPerWord, n%rowsPerWord*2
	w := l.code[word]
	t := w >> shift & 3
	if t == 0 {
		return SSD, 0
	}
	side := t - 1 // 0 GPU, 1 CPU
	slot := uint64(l.rank[side])
	for _, before := range l.code[:word] {
		slot += uint64(bits.OnesCount64(before >> side & lowBits))
	}
	slot += uint64(bits.OnesCount64(w >> side & lowBits & (1<<shift - 1)))
	return Tier(t), slot
}

// Index maps a row to its tier and slot.
type Index struct {
	dev   cuda.Device
	rows  int64
	place Placement
	buf   cuda.Buffer
	lines []line // the CPU's view of buf, nil where it has none
}

// BuildIndex puts the index of a placement into device memory. The placement's lists must be
// ascending, without duplicates, disjoint, and within the rows.
func BuildIndex(dev cuda.Device, rows int64, p Placement) (*Index, error) {
	if rows < 0 {
		return nil, fmt.Errorf("cache index: %d rows", rows)
	}
	if int64(len(p.GPU)) > math.MaxUint32 || int64(len(p.CPU)) > math.MaxUint32 {
		return nil, fmt.Errorf("cache index: a tier of %d rows: at most %d fit a 32-bit rank", max(len(p.GPU), len(p.CPU)), uint32(math.MaxUint32))
	}
	buf, err := dev.Alloc(cuda.MemDevice, IndexBytes(rows), "cache index")
	if err != nil {
		return nil, fmt.Errorf("cache index of %d rows: %w", rows, err)
	}
	i := &Index{dev: dev, rows: rows, place: p, buf: buf}
	err = writeBuffer(dev, buf, func(mem []byte) error {
		return fillLines(hostmem.View[line](mem), rows, p)
	})
	if err != nil {
		_ = buf.Free() // the first error says more
		return nil, fmt.Errorf("cache index: %w", err)
	}
	if buf.Bytes() != nil {
		i.lines = hostmem.View[line](buf.Bytes())
	}
	return i, nil
}

func fillLines(lines []line, rows int64, p Placement) error {
	for _, tier := range []Tier{GPU, CPU} {
		list := p.GPU
		if tier == CPU {
			list = p.CPU
		}
		last := int64(-1)
		for _, r := range list {
			if r <= last || r >= rows {
				return fmt.Errorf("%v tier: row %d after row %d: want ascending rows below %d", tier, r, last, rows)
			}
			last = r
			l, n := &lines[r/RowsPerLine], uint64(r%RowsPerLine)
			w, shift := &l.code[n/rowsPerWord], n%rowsPerWord*2
			if *w>>shift&3 != 0 {
				return fmt.Errorf("row %d is in both tiers", r)
			}
			*w |= uint64(tier) << shift
			l.rank[tier-1]++ // for now: rows in this line
		}
	}
	var before [2]uint32
	for i := range lines {
		own := lines[i].rank
		lines[i].rank = before
		before[0] += own[0]
		before[1] += own[1]
	}
	return nil
}

// Lookup finds one row from the CPU, for tools and tests; kernels read the lines themselves. A
// row outside the index is on no tier that a cache has: it answers SSD.
func (i *Index) Lookup(row int64) (Tier, int64) {
	if row < 0 || row >= i.rows {
		return SSD, 0
	}
	if i.lines != nil {
		t, slot := i.lines[row/RowsPerLine].find(uint64(row % RowsPerLine))
		return t, int64(slot)
	}
	// The lines are where the CPU cannot see them. The lists say the same.
	if slot, ok := slices.BinarySearch(i.place.GPU, row); ok {
		return GPU, int64(slot)
	}
	if slot, ok := slices.BinarySearch(i.place.CPU, row); ok {
		return CPU, int64(slot)
	}
	return SSD, 0
}

// Rows is how many rows the index covers.
func (i *Index) Rows() int64 { return i.rows }

// Bytes is the device memory of the index.
func (i *Index) Bytes() int64 { return i.buf.Size() }

// Close frees the index.
func (i *Index) Close() error {
	i.lines = nil
	return i.buf.Free()
}

// moveTimeout bounds the waits for copies between CPU and device memory at set-up.
const moveTimeout = time.Minute

// writeBuffer lets fill write a buffer's content: in place where the CPU sees it, else through
// pinned memory.
func writeBuffer(dev cuda.Device, buf cuda.Buffer, fill func(mem []byte) error) error {
	if buf.Size() == 0 {
		return fill(nil)
	}
	if mem := buf.Bytes(); mem != nil {
		return fill(mem)
	}
	stage, err := dev.Alloc(cuda.MemPinned, buf.Size(), "cache staging")
	if err != nil {
		return err
	}
	err = fill(stage.Bytes())
	if err == nil {
		err = move(dev, buf.Ptr(), stage.Ptr(), buf.Size())
	}
	if e := stage.Free(); err == nil {
		err = e
	}
	return err
}

func move(dev cuda.Device, dst, src cuda.DevicePtr, bytes int64) (err error) {
	st, err := dev.NewStream(cuda.StreamOptions{Name: "cache set-up"})
	if err != nil {
		return err
	}
	defer func() {
		if e := st.Close(); err == nil {
			err = e
		}
	}()
	if err := st.Copy(dst, src, bytes); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), moveTimeout)
	defer cancel()
	return st.Synchronize(ctx)
}
