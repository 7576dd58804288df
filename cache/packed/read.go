package packed

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"

	"helios/internal/errs"
	"helios/internal/infile"
)

// Plan is a plan that was written by Build. Its methods may be called by several goroutines.
type Plan struct {
	name    string
	r       io.ReaderAt
	close   func() error
	header  Header
	sum     uint32 // of the index
	size    int64
	hots    []extent
	batches []extent
	streams []streamEntry
}

// Open opens a plan's file. Of its content only the index is read. One that was cut or damaged is
// an error of class Device, one of another version of class Capability.
func Open(path string) (*Plan, error) {
	f, err := infile.Open(path)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, errors.Join(errs.With(errs.Device, err), f.Close())
	}
	p, err := New(path, f, st.Size())
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	p.close = f.Close
	return p, nil
}

// New is Open for what is no file; name stands for it in errors.
func New(name string, r io.ReaderAt, size int64) (*Plan, error) {
	p := &Plan{name: name, r: r, size: size, close: func() error { return nil }}
	return p, p.open()
}

// Close closes the file.
func (p *Plan) Close() error { return p.close() }

func (p *Plan) damaged(format string, args ...any) error {
	return errs.New(errs.Device, "plan %s is damaged: %w; prepare the packed mini-batches again",
		p.name, fmt.Errorf(format, args...))
}

const mostIndex = 4 << 30

func (p *Plan) open() error {
	var first [len(magic) + 4]byte
	n, err := p.r.ReadAt(first[:], 0)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return errs.New(errs.Device, "plan %s: %w", p.name, err)
	case n < len(magic) || string(first[:len(magic)]) != magic:
		return errs.New(errs.Usage,
			"%s is not a plan of packed mini-batches; prepare them, or name the right folder", p.name)
	case n < len(first):
		return p.damaged("it ends in its first line")
	}
	if v := binary.LittleEndian.Uint32(first[len(magic):]); v != Version {
		return errs.New(errs.Capability,
			"plan %s has version %d, and this heliosctl reads version %d: use the one that wrote it, or prepare again",
			p.name, v, Version)
	}
	end := p.size - tailBytes
	if end < int64(len(first)) {
		return p.damaged("it has no index")
	}
	var tail [tailBytes]byte
	if _, err := p.r.ReadAt(tail[:], end); err != nil {
		return p.damaged("its end cannot be read: %w", err)
	}
	if string(tail[20:]) != endMagic {
		return p.damaged("it has no index: it was cut")
	}
	offset, length := binary.LittleEndian.Uint64(tail[:]), binary.LittleEndian.Uint64(tail[8:])
	if length > mostIndex || length > uint64(end) || offset != uint64(end)-length {
		return p.damaged("its index is not where it should be")
	}
	index := make([]byte, length)
	if _, err := p.r.ReadAt(index, int64(offset)); err != nil {
		return p.damaged("its index cannot be read: %w", err)
	}
	p.sum = binary.LittleEndian.Uint32(tail[16:])
	if crc32.Checksum(index, castagnoli) != p.sum {
		return p.damaged("the index's checksum is wrong")
	}
	return p.index(index, int64(len(first)), int64(offset))
}

// decoder takes numbers off bytes. bad stays set once something was not there.
type decoder struct {
	b   []byte
	bad bool
}

// below takes a number up to limit.
func (d *decoder) below(limit int64) int64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 || v > uint64(limit) {
		d.bad, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return int64(v)
}

func (d *decoder) take(n int64) []byte {
	if n > int64(len(d.b)) {
		d.bad, d.b = true, nil
		return nil
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) sum() uint32 {
	if b := d.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

// extent takes an extent of the bytes from first to end.
func (d *decoder) extent(first, end int64) extent {
	e := extent{offset: d.below(end), bytes: d.below(end)}
	e.sum = d.sum()
	d.bad = d.bad || e.offset < first || e.offset+e.bytes > end
	return e
}

// stream takes a stream's entry. Parts of the file lie between first and end.
func (d *decoder) stream(h *Header, first, end int64) streamEntry {
	page := d.below(h.Stats.Pages*2 + 1)
	s := streamEntry{Stream: Stream{page >> 1, d.below(h.Stats.Pages * h.Shape.RowsPerPage),
		page&1 == 1}}
	s.list = d.extent(first, end)
	s.places = extent{offset: s.list.offset + s.list.bytes, bytes: d.below(end)}
	if s.places.bytes > 0 {
		s.places.sum = d.sum()
	}
	places := int64(0)
	if s.Cache {
		places = packedBytes(s.Rows, widthOf(s.Rows))
	}
	d.bad = d.bad || s.places.offset+s.places.bytes > end || s.places.bytes != places ||
		s.Rows < 1 || s.Rows > s.list.bytes || s.Page+h.Shape.PagesOf(s.Rows) > h.Stats.Pages
	return s
}

// check reports whether a header that was read from a file is consistent.
func (h *Header) check() bool {
	return h.Shape.check() && h.Shape.RowsPerPage <= math.MaxUint16 && h.Rows >= 1 &&
		h.Rows <= mostRows && h.Stats.HotRows >= 0 && h.Stats.HotRows <= min(h.Rows, mostHot) &&
		h.Stats.Pages >= 0 && h.Stats.Pages <= 1<<48 && h.Stats.MostReadPages >= 0 &&
		h.Stats.MostReadPages <= h.Stats.Pages
}

// index takes the index apart. Parts of the file lie between first and end.
func (p *Plan) index(b []byte, first, end int64) error {
	d := decoder{b: b}
	head := d.take(d.below(int64(len(b))))
	if d.bad {
		return p.damaged("its index is not whole")
	}
	if err := json.Unmarshal(head, &p.header); err != nil {
		return p.damaged("its header: %w", err)
	}
	h := &p.header
	if !h.check() {
		return p.damaged("its header makes no sense: %s", head)
	}
	extents := func() (all []extent) {
		n := d.below(int64(len(d.b)))
		for range n {
			if d.bad {
				break
			}
			all = append(all, d.extent(first, end))
		}
		return all
	}
	p.hots, p.batches = extents(), extents()
	for range d.below(int64(len(d.b))) {
		if d.bad {
			break
		}
		p.streams = append(p.streams, d.stream(h, first, end))
	}
	if d.bad || len(d.b) != 0 || int64(len(p.batches)) != h.Stats.Batches ||
		int64(len(p.hots)) != (h.Stats.HotRows+hotPart-1)/hotPart {
		return p.damaged("its index is not what a writer writes")
	}
	return p.checkStreams()
}

// checkStreams checks that the streams have all pages, each once.
func (p *Plan) checkStreams() error {
	next := int64(0)
	for i := range p.streams {
		s := &p.streams[i]
		if s.Page != next {
			return p.damaged("page %d has no rows, or twice", next)
		}
		next += p.header.Shape.PagesOf(s.Rows)
	}
	if next != p.header.Stats.Pages {
		return p.damaged("it has %d pages and tells of %d", next, p.header.Stats.Pages)
	}
	return nil
}

// Header describes the plan.
func (p *Plan) Header() Header { return p.header }

// Shape is the layout of rows in pages.
func (p *Plan) Shape() Shape { return p.header.Shape }

// Stats are the plan's totals.
func (p *Plan) Stats() Stats { return p.header.Stats }

// Pages is the number of pages of the disk caches and chunks.
func (p *Plan) Pages() int64 { return p.header.Stats.Pages }

// Batches is the number of mini-batches.
func (p *Plan) Batches() int { return len(p.batches) }

// Bytes is the length of the plan's file.
func (p *Plan) Bytes() int64 { return p.size }

// Sum is the index's checksum. As the index has those of all parts, it stands for the plan.
func (p *Plan) Sum() uint32 { return p.sum }

// part reads a part of the file, in buf where that has room, and holds it against its checksum.
func (p *Plan) part(e extent, buf []byte, what string, i int) ([]byte, error) {
	buf = slices.Grow(buf[:0], int(e.bytes))[:e.bytes]
	if _, err := p.r.ReadAt(buf, e.offset); err != nil {
		return nil, errs.New(errs.Device, "plan %s: %s %d at byte %d: %w", p.name, what, i, e.offset,
			err)
	}
	if crc32.Checksum(buf, castagnoli) != e.sum {
		return nil, p.damaged("the checksum of %s %d, at byte %d, is wrong", what, i, e.offset)
	}
	return buf, nil
}

// CheckStreams holds what the packer reads against its checksums. Nothing else reads that.
func (p *Plan) CheckStreams() (err error) {
	var buf []byte
	for i, s := range p.streams {
		if buf, err = p.part(s.list, buf, "rows of stream", i); err != nil {
			return err
		}
		if buf, err = p.part(s.places, buf, "places of stream", i); err != nil {
			return err
		}
	}
	return nil
}

// Hot gives the rows that stay in memory, by rank: the row of the most accesses is the first.
func (p *Plan) Hot() ([]int64, error) {
	all := make([]int64, 0, p.header.Stats.HotRows)
	width := widthOf(p.header.Rows)
	low, high := min(width, 32), max(width-32, 0)
	var buf []byte
	for i, e := range p.hots {
		n := min(p.header.Stats.HotRows-int64(len(all)), hotPart)
		if e.bytes != packedBytes(n, low)+packedBytes(n, high) {
			return nil, p.damaged("part %d of the rows in memory has %d bytes", i, e.bytes)
		}
		var err error
		if buf, err = p.part(e, buf, "the rows in memory, part", i); err != nil {
			return nil, err
		}
		top := buf[packedBytes(n, low):]
		for k := range n {
			r := int64(getBits(buf, k, low)) | int64(getBits(top, k, high))<<32
			if r >= p.header.Rows {
				return nil, p.damaged("row %d stays in memory, and the graph has %d", r,
					p.header.Rows)
			}
			all = append(all, r)
		}
	}
	return all, nil
}

// Batch reads the places of mini-batch i's rows into b's memory. One goroutine at a time may use b.
func (p *Plan) Batch(i int, b *Batch) (err error) {
	if i < 0 || i >= len(p.batches) {
		return errs.New(errs.Failed, "plan %s: mini-batch %d of %d", p.name, i, len(p.batches))
	}
	if b.buf, err = p.part(p.batches[i], b.buf, "mini-batch", i); err != nil {
		return err
	}
	if !b.decode(b.buf, &p.header) {
		return p.damaged("mini-batch %d is not what a writer writes", i)
	}
	return nil
}

// decode takes a mini-batch apart; false: it does not hold together.
func (b *Batch) decode(from []byte, h *Header) bool {
	d := decoder{b: from}
	n := d.below(8 * int64(len(from))) // a bit each
	hot := d.below(n)
	pages := h.Stats.Pages
	b.ChunkPages = d.below(pages)
	runs := d.below(int64(len(d.b)))
	if !b.decodeRuns(&d, runs, pages) {
		return false
	}
	slots := b.ReadPages * h.Shape.RowsPerPage
	if d.bad || slots > math.MaxUint32 || (b.ChunkPages > 0 && (len(b.Runs) == 0 ||
		b.Runs[len(b.Runs)-1].Pages != b.ChunkPages)) {
		return false
	}
	wide := [2]int{widthOf(h.Stats.HotRows), widthOf(slots)}
	bits := d.take(packedBytes(n, 1))
	ranks, places := d.take(packedBytes(hot, wide[0])), d.take(packedBytes(n-hot, wide[1]))
	if d.bad || len(d.b) != 0 {
		return false
	}
	b.HotPos, b.HotRank = sized(b.HotPos, hot), sized(b.HotRank, hot)
	b.Pos, b.Slot = sized(b.Pos, n-hot), sized(b.Slot, n-hot)
	i, k := 0, 0
	for pos := range n {
		if bits[pos>>3]>>(pos&7)&1 == 1 {
			if i == len(b.HotPos) {
				return false
			}
			b.HotPos[i] = uint32(pos)
			i++
		} else {
			if k == len(b.Pos) {
				return false
			}
			b.Pos[k] = uint32(pos)
			k++
		}
	}
	bad := false
	for i := range b.HotRank {
		b.HotRank[i] = getBits(ranks, int64(i), wide[0])
		bad = bad || int64(b.HotRank[i]) >= h.Stats.HotRows
	}
	for i := range b.Slot {
		b.Slot[i] = getBits(places, int64(i), wide[1])
		bad = bad || int64(b.Slot[i]) >= slots
	}
	return !bad
}

func (b *Batch) decodeRuns(d *decoder, runs, pages int64) bool {
	b.Runs, b.ReadPages = b.Runs[:0], 0
	next := int64(0)
	for range runs {
		r := Run{Page: next + d.below(pages-next)}
		r.Pages = d.below(pages - r.Page)
		next = r.Page + r.Pages
		if d.bad || r.Pages == 0 {
			return false
		}
		b.Runs, b.ReadPages = append(b.Runs, r), b.ReadPages+r.Pages
	}
	return true
}

func sized(s []uint32, n int64) []uint32 {
	return slices.Grow(s[:0], int(n))[:n]
}

// Streams is the number of lists of rows that the pages are made of; they have all pages, in
// ascending order.
func (p *Plan) Streams() int { return len(p.streams) }

// Stream gives list i.
func (p *Plan) Stream(i int) Stream { return p.streams[i].Stream }
