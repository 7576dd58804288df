package trace

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
)

// Reader reads a trace, a block at a time. Its methods may be called from several goroutines.
type Reader struct {
	path   string
	r      io.ReaderAt
	size   int64
	close  func() error
	header Header
	totals Totals
	blocks []int64 // offsets, and where the index begins
}

// Open looks at a trace's header and index. A file that was cut or damaged is an error of class
// Device that says so, one of a newer version of class Capability.
func Open(path string) (*Reader, error) {
	f, err := infile.Open(path)
	if err != nil {
		return nil, errs.New(errs.Usage, "trace %s: %w", path, err)
	}
	st, err := f.Stat()
	if err != nil {
		return nil, errors.Join(errs.With(errs.Device, err), f.Close())
	}
	r := &Reader{path: path, r: f, size: st.Size(), close: f.Close}
	if err := r.open(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return r, nil
}

func (r *Reader) damaged(format string, args ...any) error {
	return errs.New(errs.Device,
		"trace %s is damaged: %w; record it again (\"heliosctl train\" with option trace)", r.path,
		fmt.Errorf(format, args...))
}

func (r *Reader) cut(what string) error {
	return errs.New(errs.Device,
		"trace %s is cut short: %s; the run that wrote it did not end, or the file was not copied whole: record it again (\"heliosctl train\" with option trace)",
		r.path, what)
}

func (r *Reader) open() error {
	var fixed [len(magic) + 8]byte
	n, err := r.r.ReadAt(fixed[:], 0)
	if n < len(magic) || string(fixed[:len(magic)]) != magic {
		if err != nil && !errors.Is(err, io.EOF) {
			return errs.New(errs.Device, "trace %s: %w", r.path, err)
		}
		return errs.New(errs.Usage,
			"%s is not a trace of ours; make one with \"heliosctl train\" and option trace", r.path)
	}
	if err != nil {
		return r.cut("it ends within its header")
	}
	if v := binary.LittleEndian.Uint32(fixed[len(magic):]); v < oldest || v > Version {
		return errs.New(errs.Capability,
			"trace %s has version %d; this heliosctl reads versions %d to %d: use the one that wrote it",
			r.path, v, oldest, Version)
	}
	length := int64(binary.LittleEndian.Uint32(fixed[len(magic)+4:]))
	if length > maxHeader {
		return r.damaged("a header of %d bytes", length)
	}
	head := make([]byte, length+4)
	if _, err := r.r.ReadAt(head, int64(len(fixed))); err != nil {
		return r.cut("it ends within its header")
	}
	sum := crc32.Update(crc32.Checksum(fixed[len(magic):], castagnoli), castagnoli, head[:length])
	if sum != binary.LittleEndian.Uint32(head[length:]) {
		return r.damaged("the header's checksum is wrong")
	}
	if err := json.Unmarshal(head[:length], &r.header); err != nil {
		return r.damaged("header: %w", err)
	}
	h := &r.header
	if h.Rows <= 0 || h.RowBytes <= 0 || h.SSDs <= 0 || h.GPULines < 0 || h.CPURows < 0 ||
		h.LineBytes < 0 || h.RowsPerLine < 0 || h.Window < 0 {
		return r.damaged("the header makes no sense: %d rows of %d bytes on %d SSDs", h.Rows,
			h.RowBytes, h.SSDs)
	}
	for _, v := range []int64{h.Rows, h.RowBytes, h.SSDs, h.SlotBytes, h.LBABytes, h.Batch,
		h.GPULines, h.LineBytes, h.RowsPerLine, h.CPURows, h.Window} {
		if v > maxNumber || v < 0 {
			return r.damaged("the header makes no sense: %d is more than anything that a run has",
				v)
		}
	}
	if h.Rows > maxRows || h.RowBytes > maxRowBytes || h.LineBytes > maxLineBytes ||
		h.SSDs > maxSSDs || len(h.Fanouts) > maxHops {
		return r.damaged(
			"the header makes no sense: %d rows of %d bytes, lines of %d, %d SSDs, %d hops", h.Rows,
			h.RowBytes, h.LineBytes, h.SSDs, len(h.Fanouts))
	}
	begin := int64(len(fixed)) + length + 4

	tail := make([]byte, tailBytes)
	end := r.size - int64(tailBytes)
	if end < begin {
		return r.cut("there is no index")
	}
	if _, err := r.r.ReadAt(tail, end); err != nil {
		return errs.New(errs.Device, "trace %s: %w", r.path, err)
	}
	if string(tail[16:]) != endMagic {
		return r.cut("there is no index")
	}
	offset := int64(binary.LittleEndian.Uint64(tail))
	size := int64(binary.LittleEndian.Uint32(tail[8:]))
	if offset < begin || offset+size != end {
		return r.damaged("its index is not where it should be")
	}
	index := make([]byte, size)
	if _, err := r.r.ReadAt(index, offset); err != nil {
		return errs.New(errs.Device, "trace %s: %w", r.path, err)
	}
	if crc32.Checksum(index, castagnoli) != binary.LittleEndian.Uint32(tail[12:]) {
		return r.damaged("the index's checksum is wrong")
	}
	d := decoder{b: index}
	r.totals = Totals{Blocks: d.int(), Batches: d.int(), Parts: d.int(), Rows: d.int(),
		Resets: d.int(), Hotness: d.int() != 0}
	if d.bad || r.totals.Blocks > size {
		return r.damaged("the index is not whole")
	}
	last := int64(0)
	for range r.totals.Blocks {
		off := last + d.int()
		if d.bad || off < max(begin, last) || off > offset {
			return r.damaged("the index is not whole")
		}
		r.blocks = append(r.blocks, off)
		last = off
	}
	if len(d.b) != 0 {
		return r.damaged("the index is too long")
	}
	r.blocks = append(r.blocks, offset)
	return nil
}

// Close closes the file.
func (r *Reader) Close() error { return r.close() }

// Header describes the run.
func (r *Reader) Header() Header { return r.header }

// Totals say how much the trace holds.
func (r *Reader) Totals() Totals { return r.totals }

// Path is the file.
func (r *Reader) Path() string { return r.path }

// inflated is a block's content and what it was made with, to be used again.
type inflated struct {
	packed, b []byte
	zr        io.ReadCloser
}

// Limits of a trace's claims. A file of a megabyte unpacks to a gigabyte, and a number in it can
// have any value: readers make room for rows, lines and batches by these.
const (
	maxNumber    = 1 << 40
	maxRows      = 1 << 36 // as many nodes as an import takes
	maxRowBytes  = 1 << 24
	maxLineBytes = 1 << 30
	maxSSDs      = 1 << 16
	maxHops      = 64
	maxParts     = 1 << 16 // lookups of a batch
	maxBatchRows = 1 << 25
)

// block reads block i.
func (r *Reader) block(i int, in *inflated) (err error) {
	size := r.blocks[i+1] - r.blocks[i]
	if size < 12 || size > 2*maxBlock {
		return r.damaged("block %d of %d has %d bytes", i, r.totals.Blocks, size)
	}
	in.packed = slices.Grow(in.packed[:0], int(size))[:size]
	if _, err := r.r.ReadAt(in.packed, r.blocks[i]); err != nil {
		return errs.New(errs.Device, "trace %s: block %d at byte %d: %w", r.path, i,
			r.blocks[i], err)
	}
	raw, length := binary.LittleEndian.Uint32(in.packed), binary.LittleEndian.Uint32(in.packed[4:])
	sum := crc32.Update(crc32.Checksum(in.packed[:8], castagnoli), castagnoli, in.packed[12:])
	if int64(length)+12 != size || raw > maxBlock ||
		sum != binary.LittleEndian.Uint32(in.packed[8:]) {
		return r.damaged("the checksum of block %d of %d, at byte %d, is wrong", i, r.totals.Blocks,
			r.blocks[i])
	}
	if in.zr == nil {
		in.zr = flate.NewReader(nil)
	}
	if err := in.zr.(flate.Resetter).Reset(bytes.NewReader(in.packed[12:]), nil); err != nil {
		return err
	}
	in.b = slices.Grow(in.b[:0], int(raw))[:raw]
	if _, err := io.ReadFull(in.zr, in.b); err != nil {
		return r.damaged("block %d of %d, at byte %d, does not unpack: %w", i, r.totals.Blocks,
			r.blocks[i], err)
	}
	return nil
}

// decoder takes varints off a block. bad stays set once something was not there.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) uint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.bad, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) int() int64 {
	v := d.uint()
	if v > 1<<62 {
		d.bad = true
		return 0
	}
	return int64(v)
}

// rows appends a record's rows.
func (d *decoder) rows(to []int64, limit int64) []int64 {
	n := d.int()
	if n > partRows || n > int64(len(d.b)) {
		d.bad = true
		return to
	}
	last := int64(0)
	for range n {
		v, k := binary.Varint(d.b)
		last += v
		if k <= 0 || last < 0 || last >= limit {
			d.bad = true
			return to
		}
		d.b = d.b[k:]
		to = append(to, last)
	}
	return to
}

// Visitor hears a trace in order. Nil functions are not called. Slices are the visitor's to keep.
type Visitor struct {
	Batch func(b *Batch) error
	Reset func(gpuLines int64) error
	// Place gets what a static tier holds (Writer.Place); tier 0 is the GPU's, 1 the CPU's.
	Place func(tier int, rows []int64) error
	Live  func(l Live) error
	// Superbatch is called before the mini-batches that it tells of.
	Superbatch func(s Superbatch) error
}

// Play reads the trace from its beginning to its end, a batch at a time.
func (r *Reader) Play(v Visitor) error {
	var in inflated
	var batch *Batch
	var place []int64
	placing := -1
	var batches, parts, rows, resets int64
	held := int64(0)           // rows of the batch
	maxPlaced := r.header.Rows // of a static tier, in an eighth of the memory that can be had
	if free, err := hostmem.AvailableBytes(); err == nil {
		maxPlaced = min(maxPlaced, free/64)
	}
	ended := func() error {
		if placing >= 0 {
			tier, rows := placing, place
			placing, place = -1, nil
			if v.Place != nil {
				if err := v.Place(tier, rows); err != nil {
					return err
				}
			}
		}
		if b := batch; b != nil {
			batch = nil
			if v.Batch != nil {
				return v.Batch(b)
			}
		}
		return nil
	}
	for i := range int(r.totals.Blocks) {
		if err := r.block(i, &in); err != nil {
			return err
		}
		d := decoder{b: in.b}
		for len(d.b) > 0 && !d.bad {
			tag := d.uint()
			more := tag == recPart || tag == recMore
			if !more && !(tag == recPlace && placing >= 0) {
				if err := ended(); err != nil {
					return err
				}
			}
			switch tag {
			case recBegin:
				held = 0
				batch = &Batch{Kind: int(d.int()), Epoch: int(d.int()), Index: int(d.int())}
				batches++
			case recPart:
				if d.bad = d.bad || batch == nil; d.bad {
					break
				}
				batch.Parts = append(batch.Parts, d.rows([]int64{}, r.header.Rows))
				parts++
				d.bad = d.bad || len(batch.Parts) > maxParts
				held += int64(len(batch.Parts[len(batch.Parts)-1]))
				rows += int64(len(batch.Parts[len(batch.Parts)-1]))
			case recMore:
				if d.bad = d.bad || batch == nil || len(batch.Parts) == 0; d.bad {
					break
				}
				last := len(batch.Parts) - 1
				before := len(batch.Parts[last])
				batch.Parts[last] = d.rows(batch.Parts[last], r.header.Rows)
				rows += int64(len(batch.Parts[last]) - before)
				held += int64(len(batch.Parts[last]) - before)
			case recReset:
				lines := d.int()
				d.bad = d.bad || lines > maxNumber
				resets++
				if v.Reset != nil && !d.bad {
					if err := v.Reset(lines); err != nil {
						return err
					}
				}
			case recLive:
				l := Live{Kind: int(d.int()), Epoch: int(d.int())}
				for _, p := range []*int64{&l.Batches, &l.RowsGPU, &l.RowsCPU, &l.RowsSSD,
					&l.BytesSSD, &l.Inserted, &l.Evicted, &l.Bypassed} {
					*p = d.int()
				}
				if v.Live != nil && !d.bad {
					if err := v.Live(l); err != nil {
						return err
					}
				}
			case recSuperbatch:
				s := Superbatch{Kind: int(d.int()), Epoch: int(d.int()), First: int(d.int()),
					Batches: int(d.int()), GPURows: d.int(), CPURows: d.int(), Kept: d.int()}
				slots := s.GPURows + s.CPURows
				d.bad = d.bad || s.Batches < 1 || slots < 0 || slots >= math.MaxInt32 ||
					s.Kept > slots || int64(s.First)+int64(s.Batches) > maxNumber
				if v.Superbatch != nil && !d.bad {
					if err := v.Superbatch(s); err != nil {
						return err
					}
				}
			case recHotness:
				n := d.int()
				for range n {
					if d.bad {
						break
					}
					d.uint()
				}
			case recPlace:
				tier, begins := d.int(), d.int()
				if d.bad = d.bad || tier > 1; d.bad {
					break
				}
				if begins != 0 {
					if err := ended(); err != nil {
						return err
					}
					placing = int(tier)
				}
				d.bad = d.bad || placing != int(tier)
				place = d.rows(place, r.header.Rows)
				d.bad = d.bad || int64(len(place)) > maxPlaced
			default:
				d.bad = true
			}
			d.bad = d.bad || held > maxBatchRows
		}
		if d.bad {
			return r.damaged("block %d of %d, at byte %d, is not what a writer writes", i,
				r.totals.Blocks, r.blocks[i])
		}
	}
	if err := ended(); err != nil {
		return err
	}
	if batches != r.totals.Batches || parts != r.totals.Parts || rows != r.totals.Rows ||
		resets != r.totals.Resets {
		return r.damaged("the index tells of %d batches and %d rows, and %d and %d are there",
			r.totals.Batches, r.totals.Rows, batches, rows)
	}
	return nil
}

// Backwards reads the parts from the last to the first, each part's rows in their order. The slice
// is good during the call.
func (r *Reader) Backwards(part func(rows []int64) error) error {
	var in inflated
	type piece struct {
		tag  uint64
		rows []int64
	}
	var pieces []piece
	var later [][]int64 // pieces of a part whose beginning is still to come, the last first
	var whole []int64
	held := int64(0) // rows of later
	for i := int(r.totals.Blocks) - 1; i >= 0; i-- {
		if err := r.block(i, &in); err != nil {
			return err
		}
		d := decoder{b: in.b}
		pieces = pieces[:0]
		for len(d.b) > 0 && !d.bad {
			switch tag := d.uint(); tag {
			case recPart, recMore:
				pieces = append(pieces, piece{tag, d.rows(nil, r.header.Rows)})
			case recBegin:
				d.int()
				d.int()
				d.int()
			case recReset:
				d.int()
			case recLive:
				for range 10 {
					d.int()
				}
			case recSuperbatch:
				for range 7 {
					d.int()
				}
			case recHotness:
				for n := d.int(); n > 0 && !d.bad; n-- {
					d.uint()
				}
			case recPlace:
				d.int()
				d.int()
				d.rows(nil, r.header.Rows)
			default:
				d.bad = true
			}
		}
		if d.bad {
			return r.damaged("block %d of %d, at byte %d, is not what a writer writes", i,
				r.totals.Blocks, r.blocks[i])
		}
		for _, p := range slices.Backward(pieces) {
			later = append(later, p.rows)
			if held += int64(len(p.rows)); held > maxBatchRows {
				return r.damaged("a lookup of more than %d rows", int64(maxBatchRows))
			}
			if p.tag == recMore {
				continue
			}
			whole = whole[:0]
			for _, rows := range slices.Backward(later) {
				whole = append(whole, rows...)
			}
			later, held = later[:0], 0
			if err := part(whole); err != nil {
				return err
			}
		}
	}
	if len(later) != 0 {
		return r.damaged("a lookup without its beginning")
	}
	return nil
}

// Hotness is a score for each row, what the run's static tiers were placed by; nil where the run
// recorded none.
func (r *Reader) Hotness() ([]uint32, error) {
	if !r.totals.Hotness {
		return nil, nil
	}
	var in inflated
	scores := make([]uint32, 0, min(r.header.Rows, 1<<20))
	for i := range int(r.totals.Blocks) {
		if err := r.block(i, &in); err != nil {
			return nil, err
		}
		d := decoder{b: in.b}
		for len(d.b) > 0 && !d.bad {
			switch tag := d.uint(); tag {
			case recHotness:
				n := d.int()
				if n > partRows || int64(len(scores))+n > r.header.Rows {
					d.bad = true
				}
				for ; n > 0 && !d.bad; n-- {
					v := d.uint()
					d.bad = d.bad || v > 1<<32-1
					scores = append(scores, uint32(v))
				}
			case recPlace:
				d.int()
				d.int()
				d.rows(nil, r.header.Rows)
			default:
				if int64(len(scores)) != r.header.Rows {
					return nil, r.damaged("%d scores for %d rows", len(scores), r.header.Rows)
				}
				return scores, nil // batches have begun
			}
		}
		if d.bad {
			return nil, r.damaged("block %d of %d, at byte %d, is not what a writer writes", i,
				r.totals.Blocks, r.blocks[i])
		}
	}
	if int64(len(scores)) != r.header.Rows {
		return nil, r.damaged("%d scores for %d rows", len(scores), r.header.Rows)
	}
	return scores, nil
}
