package cache

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"math/bits"
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
	buf   cuda.Buffer
	lines []line // the CPU's view of buf, nil where it has none
}

// BuildIndex puts the index of a placement into device memory. The placement's lists must be
// ascending, without duplicates, disjoint, and within the rows.
func BuildIndex(dev cuda.Device, rows int64, p Placement) (*Index, error) {
	if int64(len(p.GPU)) > math.MaxUint32 || int64(len(p.CPU)) > math.MaxUint32 {
		return nil, fmt.Errorf("cache index: a tier of %d rows: at most %d fit a 32-bit rank",
			max(len(p.GPU), len(p.CPU)), uint32(math.MaxUint32))
	}
	return buildIndex(dev, rows, func(w *lineWriter) error { return w.placement(p) })
}

// BuildIndexOf is BuildIndex of cached rows that come one by one, in ascending order: it needs no
// memory but the index itself, and where the CPU does not see that a window of it.
func BuildIndexOf(dev cuda.Device, rows int64, cached iter.Seq2[int64, Tier]) (*Index, error) {
	return buildIndex(dev, rows, func(w *lineWriter) error {
		last := int64(-1)
		for row, t := range cached {
			if t != GPU && t != CPU {
				return fmt.Errorf("row %d in tier %v: want it in GPU or CPU", row, t)
			}
			if row <= last || row >= w.rows {
				return fmt.Errorf("%v tier: row %d after row %d: want ascending rows below %d", t,
					row, last, w.rows)
			}
			last = row
			if err := w.add(row, t); err != nil {
				return err
			}
		}
		return nil
	})
}

func buildIndex(dev cuda.Device, rows int64, write func(*lineWriter) error) (i *Index, err error) {
	if rows < 0 {
		return nil, fmt.Errorf("cache index: %d rows", rows)
	}
	buf, err := dev.Alloc(cuda.MemDevice, IndexBytes(rows), "cache index")
	if err != nil {
		return nil, fmt.Errorf("cache index of %d rows: %w", rows, err)
	}
	defer func() {
		if err != nil {
			_ = buf.Free() // the first error says more
			i, err = nil, fmt.Errorf("cache index: %w", err)
		}
	}()
	w := &lineWriter{rows: rows}
	if mem := buf.Bytes(); mem != nil || rows == 0 {
		w.window = hostmem.View[line](mem)
		if err := errors.Join(write(w), w.finish()); err != nil {
			return nil, err
		}
		return &Index{dev: dev, rows: rows, buf: buf, lines: w.window}, nil
	}
	stage, err := dev.Alloc(cuda.MemPinned, min(windowBytes, buf.Size()), "cache staging")
	if err != nil {
		return nil, err
	}
	w.window = hostmem.View[line](stage.Bytes())
	w.flush = func(first int64, lines []line) error {
		return move(dev, buf.Ptr()+cuda.DevicePtr(first*lineBytes), stage.Ptr(),
			int64(len(lines))*lineBytes)
	}
	if err := errors.Join(write(w), w.finish(), stage.Free()); err != nil {
		return nil, err
	}
	return &Index{dev: dev, rows: rows, buf: buf}, nil
}

// windowBytes of an index are made at a time where the CPU does not see its memory. Tests lower it.
var windowBytes int64 = 8 << 20

// lineWriter makes the lines of an index from first to last.
type lineWriter struct {
	rows    int64
	window  []line // zeros from the current line on
	first   int64  // line of window[0]
	current int64  // the current line
	before  [2]uint64
	// of a window that is not the last; nil: there is one only
	flush func(first int64, lines []line) error
}

// add sets the tier of a row at or behind the current line, within the rows.
func (w *lineWriter) add(row int64, t Tier) error {
	if l := row / RowsPerLine; l != w.current {
		if err := w.forward(l); err != nil {
			return err
		}
	}
	n := uint64(row % RowsPerLine)
	w.window[w.current-w.first].code[n/rowsPerWord] |= uint64(t) << (n % rowsPerWord * 2)
	w.before[t-1]++
	return nil
}

// forward makes l the current line: it and all before it have their ranks.
func (w *lineWriter) forward(l int64) error {
	if max(w.before[0], w.before[1]) > math.MaxUint32 {
		return fmt.Errorf("a tier of more than %d rows: at most so many fit a 32-bit rank",
			uint32(math.MaxUint32))
	}
	ranks := [2]uint32{uint32(w.before[0]), uint32(w.before[1])}
	for w.current < l {
		w.current++
		if w.current-w.first == int64(len(w.window)) {
			if w.flush == nil {
				return fmt.Errorf("line %d of %d", w.current, len(w.window))
			}
			if err := w.flush(w.first, w.window); err != nil {
				return err
			}
			w.first = w.current
			clear(w.window)
		}
		w.window[w.current-w.first].rank = ranks
	}
	return nil
}

// finish completes the lines up to the last row's.
func (w *lineWriter) finish() error {
	if w.rows == 0 {
		return nil
	}
	if err := w.forward((w.rows - 1) / RowsPerLine); err != nil {
		return err
	}
	if w.flush == nil {
		return nil
	}
	return w.flush(w.first, w.window[:w.current-w.first+1])
}

// placement adds the rows of both tiers in one pass.
func (w *lineWriter) placement(p Placement) error {
	lists, tiers, last := [2][]int64{p.GPU, p.CPU}, [2]Tier{GPU, CPU}, [2]int64{-1, -1}
	for len(lists[0])+len(lists[1]) > 0 {
		k := 0
		if len(lists[0]) == 0 || len(lists[1]) > 0 && lists[1][0] < lists[0][0] {
			k = 1
		}
		row := lists[k][0]
		if row <= last[k] || row >= w.rows {
			return fmt.Errorf("%v tier: row %d after row %d: want ascending rows below %d",
				tiers[k], row, last[k], w.rows)
		}
		if row == last[1-k] {
			return fmt.Errorf("row %d is in both tiers", row)
		}
		last[k], lists[k] = row, lists[k][1:]
		if err := w.add(row, tiers[k]); err != nil {
			return err
		}
	}
	return nil
}

// Rows returns how many rows the index covers.
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
