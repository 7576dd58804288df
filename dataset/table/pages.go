package table

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"sync/atomic"
	"unicode/utf8"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"

	"helios/internal/work"
)

// pages reads the values of a column in a group of rows (parquet-format's README, "Data Pages").
type pages struct {
	from  io.Reader
	in    *bufio.Reader // nil before the first page
	all   *share
	held  int64 // of all
	c     *chunk
	l     *leaf
	limit int64
	left  int64              // values and missing ones of the chunk that no page has held yet
	raws  work.Spare[[]byte] // room for a page as it is stored; nil: none is kept
	raw   []byte
	page  []byte
	dict  *values // nil: none was read

	n          int // values and missing ones that are left of the page
	defs, reps []uint32
	v          values // of the page
	at         int    // of v, the next
	coded      bool   // the page has codes, places in dict, and v nothing
	codes      runs
	room       []uint32 // for codes
}

// values are decoded values, those of one of the fields.
type values struct {
	n       int
	ints    []int64
	floats  []float64
	data    []byte
	offsets []int
	// stored, where it is not nil, are the numbers as the page has them.
	stored []byte
}

const (
	headerRoom    = 1 << 16
	maxHeaderRoom = 16 << 20
)

func newPages(in io.Reader, c *chunk, l *leaf, limit int64, all *share) *pages {
	return &pages{from: in, c: c, l: l, limit: limit, left: c.values, all: all}
}

// free gives the room of pages back.
func (p *pages) free() { *p = pages{c: p.c, l: p.l} }

// share bounds the memory of the columns that are read side by side, each of which holds a
// dictionary, a page and a buffer.
type share struct {
	held          atomic.Int64
	limit, buffer int64 // of all; of one
}

var errShare = errors.New("the columns of a group of rows take too much memory at once")

// hold counts what the column holds, and bytes that it is about to take.
func (p *pages) hold(more int) error {
	n := more + cap(p.page) + 4*(cap(p.defs)+cap(p.reps)+cap(p.room)) + p.own(&p.v)
	if p.in != nil {
		n += p.in.Size()
	}
	if p.dict != nil {
		n += p.own(p.dict)
	}
	sum := p.all.held.Add(int64(n) - p.held)
	p.held = int64(n)
	if sum > p.all.limit {
		return errShare
	}
	return nil
}

// own is the memory of values beside the page that they may point into.
func (p *pages) own(v *values) int {
	n := 8 * (cap(v.ints) + cap(v.floats) + cap(v.offsets))
	for _, b := range [][]byte{v.data, v.stored} {
		end, page := b[:cap(b)], p.page[:cap(p.page)]
		if len(end) > 0 && (len(page) == 0 || &end[len(end)-1] != &page[len(page)-1]) {
			n += len(end)
		}
	}
	return n
}

// pageHead is the head of a page.
type pageHead struct {
	kind, packed, size int
	crc                uint32
	hasCRC             bool
	values, encoding   int
	defLevels          int // encoding of definition levels
	defSize, repSize   int // of version 2
	plain              bool
}

// The kinds of pages.
const (
	dataPage, indexPage, dictPage, dataPage2 = 0, 1, 2, 3
)

// head reads the head of a page.
func (p *pages) head() (h pageHead, err error) {
	for room := p.in.Size(); ; room *= 16 {
		b, err := p.in.Peek(room)
		if len(b) == 0 {
			return h, errors.New("pages are missing")
		}
		t := &thrift{b: b}
		h = pageHead{}
		t.each(func(id int, kind byte) bool {
			switch {
			case id >= 5 && kind == thriftStruct:
				t.pageHead(&h, id)
			case kind != 5:
				return false
			default:
				v := t.int()
				switch id {
				case 1:
					h.kind = int(v)
				case 2:
					h.size = int(v)
				case 3:
					h.packed = int(v)
				case 4:
					h.crc, h.hasCRC = uint32(v), true
				}
			}
			return true
		})
		if errors.Is(t.err, errThriftEnd) && err == nil && room < maxHeaderRoom {
			p.in = bufio.NewReaderSize(p.in, room*16)
			continue
		}
		if t.err != nil {
			return h, fmt.Errorf("the head of a page: %w", t.err)
		}
		if _, err := p.in.Discard(t.p); err != nil {
			return h, err
		}
		if h.size < 0 || h.packed < 0 || int64(h.packed) > p.c.length || h.values < 0 {
			return h, fmt.Errorf("a page of %d bytes (%d compressed) and %d values", h.size, h.packed,
				h.values)
		}
		if int64(h.size) > p.limit || int64(h.values) > p.limit/8 {
			return h, tooLarge("a page of %d bytes and %d values", h.size, h.values)
		}
		return h, nil
	}
}

func (t *thrift) pageHead(h *pageHead, of int) {
	t.each(func(id int, kind byte) bool {
		if of == 8 && id == 7 {
			h.plain = kind == thriftFalse
			return kind == thriftTrue || kind == thriftFalse
		}
		if kind != 5 {
			return false
		}
		v := int(t.int())
		switch {
		case id == 1:
			h.values = v
		case of == 8 && id == 4, of != 8 && id == 2:
			h.encoding = v
		case of == 8 && id == 5:
			h.defSize = v
		case of == 8 && id == 6:
			h.repSize = v
		case of == 5 && id == 3:
			h.defLevels = v
		}
		return true
	})
}

// more reads the next page of values.
func (p *pages) more() error {
	for {
		if p.left == 0 {
			return errors.New("its pages have fewer rows than its groups")
		}
		if p.in == nil {
			room := int(min(headerRoom, p.c.length, p.all.buffer))
			if err := p.hold(room); err != nil {
				return err
			}
			p.in = bufio.NewReaderSize(p.from, room)
		}
		h, err := p.head()
		if err != nil {
			return err
		}
		take := h.size
		if h.kind != dictPage {
			take = max(h.size-cap(p.page), 0)
		}
		if err := p.hold(take); err != nil {
			return err
		}
		p.raw = slices.Grow(p.raws.Take()[:0], h.packed)[:h.packed]
		if _, err := io.ReadFull(p.in, p.raw); err != nil {
			return fmt.Errorf("a page of %d bytes ends early", h.packed)
		}
		if h.hasCRC && crc32.ChecksumIEEE(p.raw) != h.crc {
			return errors.New("the checksum of a page is wrong")
		}
		switch h.kind {
		case dictPage:
			if p.dict != nil {
				return errors.New("two dictionaries")
			}
			if err := p.unpack(h, 0); err != nil {
				return err
			}
			d := &values{}
			if err := p.decode(d, p.page, 0, h.values); err != nil {
				return fmt.Errorf("dictionary: %w", err)
			}
			p.page, p.dict = nil, d // which may point into it
		case dataPage, dataPage2:
			if int64(h.values) > p.left {
				return fmt.Errorf("a page of %d values where %d are left", h.values, p.left)
			}
			p.left -= int64(h.values)
			if p.n = h.values; p.n == 0 {
				continue
			}
			if err := p.data(h); err != nil {
				return err
			}
			return p.hold(0)
		}
	}
}

// unpack decompresses a page but for its first bytes.
func (p *pages) unpack(h pageHead, plain int) error {
	if plain > h.size || plain > len(p.raw) {
		return errors.New("levels are longer than their page")
	}
	p.page = slices.Grow(p.page[:0], h.size)[:h.size]
	copy(p.page, p.raw[:plain])
	defer func() { p.raws.Give(p.raw[:0]); p.raw = nil }()
	dst, src := p.page[plain:], p.raw[plain:]
	codec := p.c.codec
	if h.plain {
		codec = 0
	}
	n, err := decompress(codec, dst, src)
	if err != nil {
		return fmt.Errorf("a compressed page: %w", err)
	}
	if n != len(dst) {
		return fmt.Errorf("a page of %d bytes has %d", len(dst), n)
	}
	return nil
}

var zstdPages, _ = zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderLowmem(true),
	zstd.WithDecoderMaxWindow(128<<20), zstd.WithDecoderMaxMemory(maxZstd))

// maxZstd bounds what a page in Zstandard is unpacked to in one piece.
const maxZstd = 256 << 20

// decompress fills dst, and returns how many bytes there are: more than dst holds are an error.
func decompress(codec int, dst, src []byte) (int, error) {
	switch codec {
	case 0:
		if len(src) != len(dst) {
			return len(src), nil
		}
		return copy(dst, src), nil
	case 1:
		if n, err := snappy.DecodedLen(src); err != nil || n != len(dst) {
			return n, err
		}
		out, err := snappy.Decode(dst, src)
		return len(out), err
	case 5, 7:
		if codec == 5 && len(src) >= 8 && int(binary.BigEndian.Uint32(src)) == len(dst) &&
			int(binary.BigEndian.Uint32(src[4:])) == len(src)-8 {
			src = src[8:] // Hadoop's frame
		}
		return lz4.UncompressBlock(src, dst)
	}
	return unpackStream(codec, dst, src)
}

// unpackStream is decompress of what states no length.
func unpackStream(codec int, dst, src []byte) (int, error) {
	var r io.Reader
	switch codec {
	case 2:
		z, err := gzip.NewReader(bytes.NewReader(src))
		if err != nil {
			return 0, err
		}
		r = z
	case 4:
		r = brotli.NewReader(bytes.NewReader(src))
	case 6:
		var head zstd.Header
		if err := head.Decode(src); err == nil && head.HasFCS && len(dst) > 0 &&
			head.FrameContentSize == uint64(len(dst)) && len(dst) <= maxZstd {
			out, err := zstdPages.DecodeAll(src, dst[:0:len(dst)])
			if err == nil && len(out) == len(dst) && &out[0] != &dst[0] {
				copy(dst, out)
			}
			return len(out), err
		}
		z, err := zstd.NewReader(bytes.NewReader(src), zstd.WithDecoderConcurrency(1),
			zstd.WithDecoderMaxWindow(128<<20))
		if err != nil {
			return 0, err
		}
		defer z.Close()
		r = z
	default:
		return 0, fmt.Errorf("compression %d is not read; write it with snappy, gzip, lz4, brotli or zstd",
			codec)
	}
	n, err := io.ReadFull(r, dst)
	if err != nil {
		return n, nil //nolint:nilerr // fewer bytes than there should be
	}
	var one [1]byte
	if k, _ := r.Read(one[:]); k > 0 {
		return n + 1, nil
	}
	return n, nil
}

// data readies a page of values.
func (p *pages) data(h pageHead) error {
	levels := 0
	if h.kind == dataPage2 {
		if h.defSize < 0 || h.repSize < 0 {
			return errors.New("levels of negative length")
		}
		levels = h.defSize + h.repSize
	}
	if err := p.unpack(h, levels); err != nil {
		return err
	}
	b := p.page
	var reps, defs []byte
	var err error
	switch {
	case h.kind == dataPage2:
		reps, defs, b = b[:h.repSize], b[h.repSize:levels], b[levels:]
	default:
		if p.l.maxDef > 0 && h.defLevels == 4 {
			return errors.New("levels in the old bit-packed encoding are not read")
		}
		if p.l.maxRep > 0 {
			if reps, b, err = prefixed(b); err != nil {
				return err
			}
		}
		if p.l.maxDef > 0 {
			if defs, b, err = prefixed(b); err != nil {
				return err
			}
		}
	}
	present := h.values
	p.reps, p.defs = p.reps[:0], p.defs[:0]
	if p.l.maxRep > 0 {
		if p.reps, err = hybrid(p.reps, reps, 1, h.values); err != nil {
			return err
		}
	}
	if p.l.maxDef > 0 && !p.allThere(defs, present) {
		if p.defs, err = hybrid(p.defs, defs, bitsOf(int(p.l.maxDef)), h.values); err != nil {
			return err
		}
		present = 0
		for _, d := range p.defs {
			if d == uint32(p.l.maxDef) {
				present++
			} else if d > uint32(p.l.maxDef) {
				return errors.New("a level is beyond the schema's")
			}
		}
		if present == h.values && p.l.maxRep == 0 {
			p.defs = p.defs[:0]
		}
	}
	p.at = 0
	if h.encoding == 2 || h.encoding == 8 {
		return p.indexed(b, present)
	}
	p.coded = false
	return p.decode(&p.v, b, h.encoding, present)
}

// allThere reports whether the levels of n values are one run that says that none is missing.
func (p *pages) allThere(levels []byte, n int) bool {
	r := runs{b: levels, width: bitsOf(int(p.l.maxDef)), left: n}
	return p.l.maxRep == 0 && r.begin() == nil && !r.packed && r.run == n &&
		r.value == uint32(p.l.maxDef)
}

func bitsOf(n int) (bits uint) {
	for ; n > 0; n >>= 1 {
		bits++
	}
	return bits
}

// prefixed cuts off bytes that begin with their number.
func prefixed(b []byte) (part, rest []byte, err error) {
	if len(b) < 4 || uint64(binary.LittleEndian.Uint32(b)) > uint64(len(b)-4) {
		return nil, nil, errors.New("levels are longer than their page")
	}
	n := binary.LittleEndian.Uint32(b)
	return b[4 : 4+n], b[4+n:], nil
}

// indexed readies a page of places in the dictionary, which are read when they are needed.
func (p *pages) indexed(b []byte, n int) error {
	if p.dict == nil {
		return errors.New("a page needs a dictionary, and there is none")
	}
	if p.coded, p.codes = true, (runs{left: n}); n == 0 {
		return nil
	}
	if len(b) == 0 || b[0] > 32 {
		return errors.New("indexes of a dictionary have no width")
	}
	p.codes.b, p.codes.width = b[1:], uint(b[0])
	return nil
}

// places returns the next places in the dictionary.
func (p *pages) places(n int) (_ []uint32, err error) {
	if p.room, err = p.codes.next(p.room[:0], n); err != nil || n == 0 {
		return nil, err
	}
	if m := slices.Max(p.room); int64(m) >= int64(p.dict.n) {
		return nil, fmt.Errorf("index %d of a dictionary that has %d values", m, p.dict.n)
	}
	return p.room, nil
}

// runs reads numbers of some bits each, in runs of one and packed (Encodings.md, "RLE").
type runs struct {
	b      []byte
	width  uint
	left   int // numbers, in all
	run    int // those of the run that are left
	value  uint32
	packed bool // the run's numbers are in b
	at     int  // of the run, the next in b
}

func hybrid(dst []uint32, b []byte, width uint, n int) ([]uint32, error) {
	return (&runs{b: b, width: width, left: n}).next(dst, n)
}

// next appends n numbers.
func (r *runs) next(dst []uint32, n int) ([]uint32, error) {
	dst = slices.Grow(dst, n)
	for n > 0 {
		if r.run == 0 {
			if err := r.begin(); err != nil {
				return nil, err
			}
		}
		m := min(r.run, n)
		n, r.run, r.left = n-m, r.run-m, r.left-m
		if !r.packed {
			for range m {
				dst = append(dst, r.value)
			}
			continue
		}
		dst = unpackBits(dst, r.b, r.width, r.at, m)
		if r.at += m; r.run == 0 {
			r.b = r.b[min(len(r.b), (r.at+7)/8*int(r.width)):]
		}
	}
	return dst, nil
}

var errShort = errors.New("numbers are missing in a page")

// begin reads the head of a run.
func (r *runs) begin() error {
	head, k := binary.Uvarint(r.b)
	if k <= 0 || head>>1 == 0 || r.left == 0 {
		return errShort
	}
	r.b = r.b[k:]
	if r.packed, r.at, r.value = head&1 == 1, 0, 0; r.packed {
		m := int(min(head>>1, uint64(r.left+7)/8)) // groups of 8
		if m*int(r.width) > len(r.b) {
			// The last group may be cut where its numbers end.
			if m*8 < r.left || (r.left*int(r.width)+7)/8 > len(r.b) {
				return errShort
			}
		}
		r.run = min(8*m, r.left)
		return nil
	}
	size := int(r.width+7) / 8
	if len(r.b) < size {
		return errShort
	}
	for i := range size {
		r.value |= uint32(r.b[i]) << (8 * i)
	}
	r.b = r.b[size:]
	r.run = int(min(head>>1, uint64(r.left)))
	return nil
}

// unpackBits appends n numbers of some bits each, from one on.
func unpackBits(dst []uint32, b []byte, width uint, from, n int) []uint32 {
	mask := uint64(1)<<width - 1
	bit := uint(from) * width
	i := 0
	for ; i < n && int(bit/8)+8 <= len(b); i++ {
		dst = append(dst, uint32(binary.LittleEndian.Uint64(b[bit/8:])>>(bit%8)&mask))
		bit += width
	}
	for ; i < n; i++ {
		var tail [8]byte
		if int(bit/8) < len(b) {
			copy(tail[:], b[bit/8:])
		}
		dst = append(dst, uint32(binary.LittleEndian.Uint64(tail[:])>>(bit%8)&mask))
		bit += width
	}
	return dst
}

// fill adds rows to a column.
func (p *pages) fill(c *Column, rows int) error {
	if p.l.maxRep > 0 {
		return p.lists(c, rows)
	}
	c.ready(p.l.Kind, rows)
	for row := 0; row < rows; {
		if p.n == 0 {
			if err := p.more(); err != nil {
				return err
			}
		}
		n := min(p.n, rows-row)
		if err := p.run(c, n, row); err != nil {
			return err
		}
		p.n -= n
		row += n
	}
	return nil
}

// ready makes room for cells, in the memory of a column that nobody needs any more.
func (c *Column) ready(k Kind, rows int) {
	c.Kind, c.Missing, c.Data = k, nil, c.Data[:0]
	switch k {
	case Text, List:
		c.Offsets = append(slices.Grow(c.Offsets[:0], rows+1), 0)
	case Float:
		c.Floats = slices.Grow(c.Floats[:0], rows)
	default:
		c.Ints = slices.Grow(c.Ints[:0], rows)
	}
}

// run adds cells of a page, present and missing ones.
func (p *pages) run(c *Column, n, row int) error {
	if len(p.defs) == 0 {
		return p.present(c, n)
	}
	for n > 0 {
		here := p.defs[0] == uint32(p.l.maxDef)
		m := 1
		for m < n && (p.defs[m] == uint32(p.l.maxDef)) == here {
			m++
		}
		p.defs = p.defs[m:]
		if here {
			if err := p.present(c, m); err != nil {
				return err
			}
		} else {
			for i := range m {
				c.absent(row + i)
			}
		}
		n, row = n-m, row+m
	}
	return nil
}

// absent adds a missing cell.
func (c *Column) absent(row int) {
	switch c.Kind {
	case Text, List:
		c.Offsets = append(c.Offsets, c.Offsets[len(c.Offsets)-1])
	case Float:
		c.Floats = append(c.Floats, 0)
	default:
		c.Ints = append(c.Ints, 0)
	}
	c.miss(row)
}

// present adds cells of the page that are there.
func (p *pages) present(c *Column, n int) error {
	for range n {
		if c.Missing == nil {
			break
		}
		c.Missing = append(c.Missing, false)
	}
	if p.coded {
		v := p.dict
		index, err := p.places(n)
		if err != nil {
			return err
		}
		switch {
		case c.Kind == Text:
			for _, i := range index {
				c.Data = append(c.Data, v.data[v.offsets[i]:v.offsets[i+1]]...)
				c.Offsets = append(c.Offsets, len(c.Data))
				if int64(len(c.Data)) > p.limit {
					return tooLarge("texts of more than %d bytes in %d rows", p.limit, n)
				}
			}
		case v.stored != nil:
			if c.Kind == Float {
				for _, i := range index {
					c.Floats = append(c.Floats, p.l.float(v.stored, int(i)))
				}
				break
			}
			for _, i := range index {
				c.Ints = append(c.Ints, p.l.int(v.stored, int(i)))
			}
		case c.Kind == Float:
			for _, i := range index {
				c.Floats = append(c.Floats, v.floats[i])
			}
		default:
			for _, i := range index {
				c.Ints = append(c.Ints, v.ints[i])
			}
		}
		return nil
	}
	v, from, to := &p.v, p.at, p.at+n
	p.at = to
	switch {
	case c.Kind == Text:
		start := len(c.Data) - v.offsets[from]
		c.Data = append(c.Data, v.data[v.offsets[from]:v.offsets[to]]...)
		for _, o := range v.offsets[from+1 : to+1] {
			c.Offsets = append(c.Offsets, start+o)
		}
	case v.stored != nil:
		if c.Kind == Float {
			for i := from; i < to; i++ {
				c.Floats = append(c.Floats, p.l.float(v.stored, i))
			}
			break
		}
		for i := from; i < to; i++ {
			c.Ints = append(c.Ints, p.l.int(v.stored, i))
		}
	case c.Kind == Float:
		c.Floats = append(c.Floats, v.floats[from:to]...)
	default:
		c.Ints = append(c.Ints, v.ints[from:to]...)
	}
	return nil
}

// float is a number of a page of floats, as they are stored.
func (l *leaf) float(stored []byte, i int) float64 {
	if l.kind == pqDouble {
		return math.Float64frombits(binary.LittleEndian.Uint64(stored[8*i:]))
	}
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(stored[4*i:])))
}

// int is a number of a page of whole numbers, as they are stored.
func (l *leaf) int(stored []byte, i int) int64 {
	if l.kind == pqInt64 {
		return int64(binary.LittleEndian.Uint64(stored[8*i:]))
	}
	return int64(int32(binary.LittleEndian.Uint32(stored[4*i:])))
}

// lists adds rows to a column of lists. A row begins where the repetition level is 0.
func (p *pages) lists(c *Column, rows int) error {
	c.ready(List, rows)
	c.Values = &Column{}
	c.Values.ready(p.l.Kind, rows)
	l, row, n := p.l, 0, 0
	end := func() { // of the row before
		if row > 0 {
			c.Offsets = append(c.Offsets, n)
			if c.Missing != nil && len(c.Missing) < row {
				c.Missing = append(c.Missing, false)
			}
		}
	}
	for {
		if p.n == 0 {
			if p.left == 0 && row == rows {
				break
			}
			if err := p.more(); err != nil {
				return err
			}
		}
		if p.reps[0] == 0 {
			if row == rows {
				break
			}
			end()
			row++
		} else if row == 0 {
			return errors.New("a list begins in the middle")
		}
		def := p.defs[0]
		switch {
		case def == uint32(l.maxDef):
			if err := p.present(c.Values, 1); err != nil {
				return err
			}
			n++
		case def >= uint32(l.listDef):
			c.Values.absent(n)
			n++
		case def == 0 && l.listDef == 2:
			c.miss(row - 1)
		}
		if int64(n) > p.limit/8 {
			return tooLarge("lists of more than %d values in %d rows", n, rows)
		}
		p.reps, p.defs, p.n = p.reps[1:], p.defs[1:], p.n-1
	}
	end()
	return nil
}

var errValues = errors.New("values are missing in a page")

// decode reads n values of an encoding. Texts of v may point into b.
func (p *pages) decode(v *values, b []byte, encoding, n int) (err error) {
	v.n, v.stored = n, nil
	l := p.l
	size := map[int]int{pqInt32: 4, pqInt64: 8, pqInt96: 12, pqFloat: 4, pqDouble: 8}[l.kind]
	if l.kind == pqFixed {
		size = l.width
	}
	switch {
	case encoding == 0, encoding == 2:
	case encoding == 3 && l.kind == pqBool:
		if b, _, err = prefixed(b); err != nil {
			return err
		}
		bits, err := hybrid(nil, b, 1, n)
		v.ints = v.ints[:0]
		for _, x := range bits {
			v.ints = append(v.ints, int64(x))
		}
		return err
	case encoding == 5 && (l.kind == pqInt32 || l.kind == pqInt64):
		if v.ints, _, err = deltas(v.ints[:0], b, n); err == nil {
			l.wrap(v)
			l.convert(v)
		}
		return err
	case encoding == 6 && l.kind == pqBytes, encoding == 7 && l.kind == pqBytes,
		encoding == 7 && l.kind == pqFixed:
		return p.deltaTexts(v, b, encoding == 7, n)
	case encoding == 9 && size > 0:
		if b, err = unsplit(b, size, n); err != nil {
			return err
		}
	default:
		return fmt.Errorf("encoding %d of values is not read", encoding)
	}
	if l.kind == pqBool {
		return v.plainBits(b, n)
	}
	if l.kind == pqBytes {
		return v.plainTexts(b, n)
	}
	if int64(n)*int64(size) > int64(len(b)) {
		return errValues
	}
	return l.plain(v, b, size, n)
}

// unsplit puts the bytes of values together, of which the first of all stand first and so on.
func unsplit(b []byte, size, n int) ([]byte, error) {
	if int64(n)*int64(size) > int64(len(b)) {
		return nil, errValues
	}
	out := make([]byte, n*size)
	for k := range size {
		for i := range n {
			out[i*size+k] = b[k*n+i]
		}
	}
	return out, nil
}

// plainBits reads values of a bit.
func (v *values) plainBits(b []byte, n int) error {
	if len(b) < (n+7)/8 {
		return errValues
	}
	v.ints = v.ints[:0]
	for i := range n {
		v.ints = append(v.ints, int64(b[i/8]>>(i%8)&1))
	}
	return nil
}

// plain reads values of a fixed size.
func (l *leaf) plain(v *values, b []byte, size, n int) error {
	v.ints, v.floats, v.stored = v.ints[:0], v.floats[:0], nil
	if l.means == asIs && slices.Contains([]int{pqInt32, pqInt64, pqFloat, pqDouble}, l.kind) {
		v.stored = b[:n*size]
		return nil
	}
	switch l.kind {
	case pqInt32:
		for i := range n {
			v.ints = append(v.ints, int64(int32(binary.LittleEndian.Uint32(b[4*i:]))))
		}
	case pqInt64:
		for i := range n {
			v.ints = append(v.ints, int64(binary.LittleEndian.Uint64(b[8*i:])))
		}
	case pqInt96: // nanoseconds of the day, and its number in Julian days
		for i := range n {
			day := int64(binary.LittleEndian.Uint32(b[12*i+8:])) - 2440588
			v.ints = append(v.ints, day*86400e6+int64(binary.LittleEndian.Uint64(b[12*i:]))/1000)
		}
		return nil
	case pqFixed:
		return l.fixed(v, b, size, n)
	}
	l.convert(v)
	return nil
}

// fixed reads values of a fixed number of bytes.
func (l *leaf) fixed(v *values, b []byte, size, n int) error {
	switch l.means {
	case half:
		for i := range n {
			v.floats = append(v.floats, fromHalf(binary.LittleEndian.Uint16(b[2*i:])))
		}
	case decimal:
		for i := range n {
			x := float64(int8(b[i*size]))
			for _, c := range b[i*size+1 : (i+1)*size] {
				x = float64(x*256) + float64(c)
			}
			v.floats = append(v.floats, x/math.Pow10(l.scale))
		}
	case uuid:
		v.data, v.offsets = v.data[:0:0], append(v.offsets[:0], 0)
		for i := range n {
			v.data = appendUUID(v.data, b[16*i:16*i+16])
			v.offsets = append(v.offsets, len(v.data))
		}
	default:
		v.data, v.offsets = b[:n*size], append(v.offsets[:0], 0)
		for i := range n {
			v.offsets = append(v.offsets, (i+1)*size)
		}
		return v.utf8()
	}
	return nil
}

func appendUUID(dst, b []byte) []byte {
	const hex = "0123456789abcdef"
	for i, c := range b {
		if i == 4 || i == 6 || i == 8 || i == 10 {
			dst = append(dst, '-')
		}
		dst = append(dst, hex[c>>4], hex[c&15])
	}
	return dst
}

func fromHalf(h uint16) float64 {
	sign, exp, frac := 1.0, int(h>>10&31), float64(h&1023)
	if h>>15 == 1 {
		sign = -1
	}
	switch exp {
	case 0:
		return sign * math.Ldexp(frac, -24)
	case 31:
		if frac != 0 {
			return math.NaN()
		}
		return sign * math.Inf(1)
	}
	return sign * math.Ldexp(1024+frac, exp-25)
}

// wrap cuts sums to the size of their type, in which they wrap around.
func (l *leaf) wrap(v *values) {
	if l.kind == pqInt32 {
		for i, x := range v.ints {
			v.ints[i] = int64(int32(x))
		}
	}
}

// convert makes integers what they stand for.
func (l *leaf) convert(v *values) {
	const day = 24 * 60 * 60 * 1e6
	switch l.means {
	case unsigned:
		if l.kind == pqInt32 {
			for i := range v.ints {
				v.ints[i] = int64(uint32(v.ints[i]))
			}
		}
	case days:
		for i := range v.ints {
			v.ints[i] *= day
		}
	case millis:
		for i := range v.ints {
			v.ints[i] *= 1000
		}
	case nanos:
		for i := range v.ints {
			v.ints[i] = floorDiv(v.ints[i], 1000)
		}
	case decimal:
		v.floats = v.floats[:0]
		for _, x := range v.ints {
			v.floats = append(v.floats, float64(x)/math.Pow10(l.scale))
		}
	}
}

func floorDiv(a, b int64) int64 {
	if q := a / b; a%b >= 0 {
		return q
	}
	return a/b - 1
}

// plainTexts reads texts that begin with their length, and closes the gaps between them.
func (v *values) plainTexts(b []byte, n int) error {
	v.offsets = append(slices.Grow(v.offsets[:0], n+1), 0)
	to, from := 0, 0
	for range n {
		if len(b)-from < 4 {
			return errValues
		}
		size := binary.LittleEndian.Uint32(b[from:])
		if from += 4; uint64(size) > uint64(len(b)-from) {
			return errors.New("a text is longer than its page")
		}
		to += copy(b[to:], b[from:from+int(size)])
		from += int(size)
		v.offsets = append(v.offsets, to)
	}
	v.data = b[:to]
	return v.utf8()
}

// utf8 checks that all texts are UTF-8.
func (v *values) utf8() error {
	if !utf8.Valid(v.data) {
		for i := range v.offsets[1:] {
			if t := v.data[v.offsets[i]:v.offsets[i+1]]; !utf8.Valid(t) {
				return fmt.Errorf("%s is no UTF-8", Brief(t))
			}
		}
	}
	for _, o := range v.offsets[:len(v.offsets)-1] {
		if o < len(v.data) && !utf8.RuneStart(v.data[o]) {
			return errors.New("a text is no UTF-8")
		}
	}
	return nil
}

// deltas reads n numbers of DELTA_BINARY_PACKED (Encodings.md) and returns what is behind them.
func deltas(dst []int64, b []byte, n int) ([]int64, []byte, error) {
	bad := errors.New("numbers that are stored as differences make no sense")
	next := func() uint64 {
		v, k := binary.Uvarint(b)
		if k <= 0 {
			b = nil
			return math.MaxUint64
		}
		b = b[k:]
		return v
	}
	zigzag := func(v uint64) int64 { return int64(v>>1) ^ -int64(v&1) }
	block, minis, total := next(), next(), next()
	value := zigzag(next())
	if b == nil && total > 1 || block == 0 || block > 1<<20 || block%128 != 0 || minis == 0 ||
		block%minis != 0 || block/minis%32 != 0 || total != uint64(n) {
		return nil, nil, bad
	}
	per := int(block / minis)
	if n == 0 {
		return dst, b, nil
	}
	dst = append(slices.Grow(dst, n), value)
	n--
	for n > 0 {
		least := zigzag(next())
		if uint64(len(b)) < minis {
			return nil, nil, bad
		}
		widths := b[:minis]
		b = b[minis:]
		for _, w := range widths {
			if n == 0 {
				break
			}
			if w > 64 || len(b) < per*int(w)/8 {
				return nil, nil, bad
			}
			m := min(per, n)
			for i := range m {
				value += least + int64(bitsAt(b, uint(i)*uint(w), uint(w)))
				dst = append(dst, value)
			}
			b = b[per*int(w)/8:]
			n -= m
		}
	}
	return dst, b, nil
}

// bitsAt returns some bits from a place on.
func bitsAt(b []byte, bit, width uint) (v uint64) {
	for got := uint(0); got < width; {
		n := min(8-bit%8, width-got)
		v |= uint64(b[bit/8]>>(bit%8)&(1<<n-1)) << got
		got, bit = got+n, bit+n
	}
	return v
}

// deltaTexts reads DELTA_LENGTH_BYTE_ARRAY or, with prefixes, DELTA_BYTE_ARRAY.
func (p *pages) deltaTexts(v *values, b []byte, prefixes bool, n int) (err error) {
	var shared, lengths []int64
	if prefixes {
		if shared, b, err = deltas(nil, b, n); err != nil {
			return err
		}
	}
	if lengths, b, err = deltas(nil, b, n); err != nil {
		return err
	}
	v.offsets = append(v.offsets[:0], 0)
	var data []byte
	for i, k := range lengths {
		if k < 0 || k > int64(len(b)) {
			return errors.New("a text is longer than its page")
		}
		if prefixes {
			last := data[v.offsets[max(i-1, 0)]:]
			if shared[i] < 0 || shared[i] > int64(len(last)) {
				return errors.New("a text begins with more of the one before than that has")
			}
			data = append(data, last[:shared[i]]...)
		}
		data = append(data, b[:k]...)
		b = b[k:]
		v.offsets = append(v.offsets, len(data))
		if int64(len(data)) > p.limit {
			return tooLarge("texts of more than %d bytes in a page", p.limit)
		}
	}
	v.data = data
	if p.l.kind == pqFixed {
		if len(data) != n*p.l.width {
			return errValues
		}
		return p.l.plain(v, data, p.l.width, n)
	}
	return v.utf8()
}
