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
// Device, one of a newer version of class Capability.
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
		"trace %s is damaged: %w; record it again (\"heliosctl train\" with {trace})", r.path,
		fmt.Errorf(format, args...))
}

func (r *Reader) cut(what string) error {
	return errs.New(errs.Device,
		"trace %s is cut short: %s; the run that wrote it did not end, or the file was not copied whole: record it again (\"heliosctl train\" with {trace})",
		r.path, what)
}

// open reads the header and the index.
func (r *Reader) open() error {
	begin, err := r.readHeader()
	if err != nil {
		return err
	}
	if err := r.checkHeader(); err != nil {
		return err
	}
	return r.readIndex(begin)
}

// readHeader returns the offset of the first block.
func (r *Reader) readHeader() (begin int64, err error) {
	var fixed [len(magic) + 8]byte
	n, err := r.r.ReadAt(fixed[:], 0)
	if n < len(magic) || string(fixed[:len(magic)]) != magic {
		if err != nil && !errors.Is(err, io.EOF) {
			return 0, errs.New(errs.Device, "trace %s: %w", r.path, err)
		}
		return 0, errs.New(errs.Usage,
			"%s is not a trace of ours; make one with \"heliosctl train\" and {trace}", r.path)
	}
	if err != nil {
		return 0, r.cut("it ends within its header")
	}
	if v := binary.LittleEndian.Uint32(fixed[len(magic):]); v < oldest || v > Version {
		return 0, errs.New(errs.Capability,
			"trace %s has version %d; this heliosctl reads versions %d to %d: use the one that wrote it",
			r.path, v, oldest, Version)
	}
	length := int64(binary.LittleEndian.Uint32(fixed[len(magic)+4:]))
	if length > maxHeader {
		return 0, r.damaged("a header of %d bytes", length)
	}
	head := make([]byte, length+4)
	if _, err := r.r.ReadAt(head, int64(len(fixed))); err != nil {
		return 0, r.cut("it ends within its header")
	}
	sum := crc32.Update(crc32.Checksum(fixed[len(magic):], castagnoli), castagnoli, head[:length])
	if sum != binary.LittleEndian.Uint32(head[length:]) {
		return 0, r.damaged("the header's checksum is wrong")
	}
	if err := json.Unmarshal(head[:length], &r.header); err != nil {
		return 0, r.damaged("header: %w", err)
	}
	return int64(len(fixed)) + length + 4, nil
}

func (r *Reader) checkHeader() error {
	h := &r.header
	if h.Rows <= 0 || h.RowBytes <= 0 || h.SSDs <= 0 {
		return r.damaged("the header makes no sense: %d rows of %d bytes on %d SSDs", h.Rows,
			h.RowBytes, h.SSDs)
	}
	for _, v := range []int64{h.Rows, h.RowBytes, h.SSDs, h.SlotBytes, h.LBABytes, h.Batch,
		h.GPULines, h.LineBytes, h.RowsPerLine, h.CPURows, h.Window} {
		if v > maxNumber || v < 0 {
			return r.damaged("the header makes no sense: %d is outside the numbers of a run", v)
		}
	}
	if h.Rows > maxRows || h.RowBytes > maxRowBytes || h.LineBytes > maxLineBytes ||
		h.SSDs > maxSSDs || len(h.Fanouts) > maxHops {
		return r.damaged(
			"the header makes no sense: %d rows of %d bytes, lines of %d, %d SSDs, %d hops", h.Rows,
			h.RowBytes, h.LineBytes, h.SSDs, len(h.Fanouts))
	}
	return nil
}

// readIndex reads totals and the offsets of blocks, the first of which is at begin.
func (r *Reader) readIndex(begin int64) error {
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
		block := last + d.int()
		if d.bad || block < max(begin, last) || block > offset {
			return r.damaged("the index is not whole")
		}
		r.blocks = append(r.blocks, block)
		last = block
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

// Totals has the sums of the trace's content.
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

// records calls record for each record of block i; record takes the record's numbers off d.
func (r *Reader) records(i int, in *inflated, record func(tag uint64, d *decoder) error) error {
	if err := r.block(i, in); err != nil {
		return err
	}
	d := decoder{b: in.b}
	for len(d.b) > 0 && !d.bad {
		if err := record(d.uint(), &d); err != nil {
			return err
		}
	}
	if d.bad {
		return r.damaged("block %d of %d, at byte %d, is not what a writer writes", i,
			r.totals.Blocks, r.blocks[i])
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

// skip passes over a record of a trace of so many rows.
func (d *decoder) skip(tag uint64, rows int64) {
	numbers := int64(0)
	switch tag {
	case recBegin:
		numbers = 3
	case recReset:
		numbers = 1
	case recLive:
		numbers = 10
	case recSuperbatch:
		numbers = 7
	case recHotness:
		numbers = d.int()
	case recPlace:
		d.int()
		d.int()
		d.rows(nil, rows)
	default:
		d.bad = true
	}
	for ; numbers > 0 && !d.bad; numbers-- {
		d.int()
	}
}

// Visitor hears a trace in order. Nil functions are not called. Slices are the visitor's to keep.
type Visitor struct {
	Batch func(b *Batch) error
	Reset func(gpuLines int64) error
	// Place gets the rows of a static tier (Writer.Place); tier 0 is the GPU's, 1 the CPU's.
	Place func(tier int, rows []int64) error
	Live  func(l Live) error
	// Superbatch is called before the mini-batches of the superbatch.
	Superbatch func(s Superbatch) error
}

// player puts records together for a visitor.
type player struct {
	v         Visitor
	rows      int64 // of the dataset
	batch     *Batch
	held      int64 // rows of batch
	tier      int   // whose placement is being read; -1: none
	place     []int64
	maxPlaced int64
	seen      Totals
}

// Play reads the trace from its beginning to its end, a batch at a time.
func (r *Reader) Play(v Visitor) error {
	p := player{v: v, rows: r.header.Rows, tier: -1, maxPlaced: r.header.Rows}
	// Rows of a static tier take an eighth of the available memory at most.
	if free, err := hostmem.AvailableBytes(); err == nil {
		p.maxPlaced = min(p.maxPlaced, free/64)
	}
	var in inflated
	for i := range int(r.totals.Blocks) {
		if err := r.records(i, &in, p.record); err != nil {
			return err
		}
	}
	if err := p.end(); err != nil {
		return err
	}
	if p.seen.Batches != r.totals.Batches || p.seen.Parts != r.totals.Parts ||
		p.seen.Rows != r.totals.Rows || p.seen.Resets != r.totals.Resets {
		return r.damaged("the index tells of %d batches and %d rows, and %d and %d are there",
			r.totals.Batches, r.totals.Rows, p.seen.Batches, p.seen.Rows)
	}
	return nil
}

// end passes on the batch or the placement that the last record completed.
func (p *player) end() error {
	if p.tier >= 0 {
		tier, rows := p.tier, p.place
		p.tier, p.place = -1, nil
		if p.v.Place != nil {
			if err := p.v.Place(tier, rows); err != nil {
				return err
			}
		}
	}
	b := p.batch
	p.batch = nil
	if b == nil || p.v.Batch == nil {
		return nil
	}
	return p.v.Batch(b)
}

func (p *player) record(tag uint64, d *decoder) error {
	if tag != recPart && tag != recMore && (tag != recPlace || p.tier < 0) {
		if err := p.end(); err != nil {
			return err
		}
	}
	switch tag {
	case recBegin:
		p.batch = &Batch{Kind: int(d.int()), Epoch: int(d.int()), Index: int(d.int())}
		p.held = 0
		p.seen.Batches++
	case recPart, recMore:
		p.part(tag, d)
	case recReset:
		return p.reset(d)
	case recLive:
		return p.live(d)
	case recSuperbatch:
		return p.superbatch(d)
	case recPlace:
		return p.placement(d)
	default:
		d.skip(tag, p.rows)
	}
	return nil
}

func (p *player) part(tag uint64, d *decoder) {
	if d.bad = d.bad || p.batch == nil || tag == recMore && len(p.batch.Parts) == 0; d.bad {
		return
	}
	if tag == recPart {
		p.batch.Parts = append(p.batch.Parts, []int64{})
		p.seen.Parts++
	}
	last := &p.batch.Parts[len(p.batch.Parts)-1]
	before := len(*last)
	*last = d.rows(*last, p.rows)
	p.held += int64(len(*last) - before)
	p.seen.Rows += int64(len(*last) - before)
	d.bad = d.bad || len(p.batch.Parts) > maxParts || p.held > maxBatchRows
}

func (p *player) reset(d *decoder) error {
	lines := d.int()
	d.bad = d.bad || lines > maxNumber
	p.seen.Resets++
	if p.v.Reset == nil || d.bad {
		return nil
	}
	return p.v.Reset(lines)
}

func (p *player) live(d *decoder) error {
	l := Live{Kind: int(d.int()), Epoch: int(d.int())}
	for _, to := range []*int64{&l.Batches, &l.RowsGPU, &l.RowsCPU, &l.RowsSSD, &l.BytesSSD,
		&l.Inserted, &l.Evicted, &l.Bypassed} {
		*to = d.int()
	}
	if p.v.Live == nil || d.bad {
		return nil
	}
	return p.v.Live(l)
}

func (p *player) superbatch(d *decoder) error {
	s := Superbatch{Kind: int(d.int()), Epoch: int(d.int()), First: int(d.int()),
		Batches: int(d.int()), GPURows: d.int(), CPURows: d.int(), Kept: d.int()}
	slots := s.GPURows + s.CPURows
	d.bad = d.bad || s.Batches < 1 || slots < 0 || slots >= math.MaxInt32 || s.Kept > slots ||
		int64(s.First)+int64(s.Batches) > maxNumber
	if p.v.Superbatch == nil || d.bad {
		return nil
	}
	return p.v.Superbatch(s)
}

// placement reads a piece of a tier's rows.
func (p *player) placement(d *decoder) error {
	tier, begins := d.int(), d.int()
	if d.bad = d.bad || tier > 1; d.bad {
		return nil
	}
	if begins != 0 {
		if err := p.end(); err != nil {
			return err
		}
		p.tier = int(tier)
	}
	d.bad = d.bad || p.tier != int(tier)
	p.place = d.rows(p.place, p.rows)
	d.bad = d.bad || int64(len(p.place)) > p.maxPlaced
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
	var pieces []piece  // of a block
	var later [][]int64 // pieces of a part whose beginning is still to come, the last first
	var whole []int64
	held := int64(0) // rows of later
	for i := int(r.totals.Blocks) - 1; i >= 0; i-- {
		pieces = pieces[:0]
		err := r.records(i, &in, func(tag uint64, d *decoder) error {
			if tag == recPart || tag == recMore {
				pieces = append(pieces, piece{tag, d.rows(nil, r.header.Rows)})
			} else {
				d.skip(tag, r.header.Rows)
			}
			return nil
		})
		if err != nil {
			return err
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

// errBegun ends the search for scores at the first batch.
var errBegun = errors.New("batches have begun")

// Hotness has a score for each row, by which the run placed its static tiers; nil where the run
// recorded none.
func (r *Reader) Hotness() ([]uint32, error) {
	if !r.totals.Hotness {
		return nil, nil
	}
	var in inflated
	scores := make([]uint32, 0, min(r.header.Rows, 1<<20))
	record := func(tag uint64, d *decoder) error {
		switch tag {
		case recPlace:
			d.skip(tag, r.header.Rows)
			return nil
		case recHotness:
		default:
			return errBegun
		}
		n := d.int()
		d.bad = d.bad || n > partRows || int64(len(scores))+n > r.header.Rows
		for ; n > 0 && !d.bad; n-- {
			v := d.uint()
			d.bad = d.bad || v > math.MaxUint32
			scores = append(scores, uint32(v))
		}
		return nil
	}
	for i := range int(r.totals.Blocks) {
		if err := r.records(i, &in, record); errors.Is(err, errBegun) {
			break
		} else if err != nil {
			return nil, err
		}
	}
	if int64(len(scores)) != r.header.Rows {
		return nil, r.damaged("%d scores for %d rows", len(scores), r.header.Rows)
	}
	return scores, nil
}
