package packed

import (
	"encoding/binary"
	"encoding/json"
	"hash/crc32"
)

// A plan's file, little-endian; "varint" is unsigned LEB128 and every checksum CRC32C:
//
//	magic, 8 bytes; version, 4 bytes
//	parts, in any order
//	index
//	offset of the index, 8 bytes; its length, 8; its checksum, 4; end magic, 8
//
// The index is the length of a JSON header (varint), the header, then four lists of entries, each
// behind their number (varint):
//
//	hot parts   offset, bytes, checksum: hotPart rows of the memory list each
//	batches     offset, bytes, checksum
//	streams     page*2 + 1 where it is of a disk cache, rows, offset, bytes and checksum of its
//	            list, and bytes of its places, then their checksum where it has any
//
// A mini-batch: varints frontier, hot rows, pages of the chunk, runs; for each run its distance
// from the end of the one before (the first: its page) and its pages; a bit for each position, 1
// where it is hot; the hot ones' ranks; the others' slots. A stream's list is its rows in ascending
// order, as varints of the differences; its places, where it is of a disk cache, say for each of
// them where it goes.
const (
	magic    = "HelPack\n"
	endMagic = "HelPackE"
	// Version of the plan's file. A reader refuses others.
	Version   = 1
	tailBytes = 8 + 8 + 4 + 8
	hotPart   = 1 << 16
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header describes a plan.
type Header struct {
	Shape  Shape  `json:"shape"`
	Rows   int64  `json:"rows"`   // of the graph
	Hashes int    `json:"hashes"` // as Config has it
	Budget int64  `json:"budget"` // bytes of pages; 0: no bound
	Seed   uint64 `json:"seed"`
	Stats  Stats  `json:"stats"`
}

// Stream is a list of rows that the packer appends to pages in the order of their numbers: a
// mini-batch's chunk, or a part of a disk cache, which is brought into its own order later.
type Stream struct {
	Page  int64 // the first one
	Rows  int64
	Cache bool
}

// extent is a part of the file.
type extent struct {
	offset, bytes int64
	sum           uint32
}

type streamEntry struct {
	Stream
	list, places extent
}

// writer writes a plan's file.
type writer struct {
	to      File
	shape   Shape
	offset  int64
	buf     []byte // not written yet; ends at at
	hots    []extent
	batches []extent
	streams []streamEntry
	head    []byte
}

func newWriter(to File, s Shape) *writer { return &writer{to: to, shape: s} }

const writeBytes = 1 << 20

func (w *writer) begin() error {
	if err := w.to.Truncate(0); err != nil {
		return err
	}
	_, err := w.add(binary.LittleEndian.AppendUint32([]byte(magic), Version))
	return err
}

// add appends a part.
func (w *writer) add(parts ...[]byte) (extent, error) {
	e := extent{offset: w.offset}
	for _, p := range parts {
		e.sum = crc32.Update(e.sum, castagnoli, p)
		e.bytes += int64(len(p))
		w.buf = append(w.buf, p...)
	}
	w.offset += e.bytes
	if len(w.buf) >= writeBytes {
		return e, w.flush()
	}
	return e, nil
}

func (w *writer) flush() error {
	_, err := w.to.WriteAt(w.buf, w.offset-int64(len(w.buf)))
	w.buf = w.buf[:0]
	return err
}

// writerMark is a place to go back to.
type writerMark struct {
	offset           int64
	batches, streams int
}

func (w *writer) mark() writerMark { return writerMark{w.offset, len(w.batches), len(w.streams)} }

// rewind forgets what was written since a mark.
func (w *writer) rewind(m writerMark) {
	if keep := m.offset - (w.offset - int64(len(w.buf))); keep >= 0 {
		w.buf = w.buf[:keep]
	} else {
		w.buf = w.buf[:0]
	}
	w.offset, w.batches, w.streams = m.offset, w.batches[:m.batches], w.streams[:m.streams]
}

// hot writes the rows that stay in memory, by rank.
func (w *writer) hot(all []int64, rows int64) error {
	width := widthOf(rows)
	var b []byte
	for from := 0; from < len(all); from += hotPart {
		part := all[from:min(from+hotPart, len(all))]
		// Rows have up to 40 bits: two numbers each.
		low, high := bitWriter{b: b[:0]}, bitWriter{}
		for _, r := range part {
			low.put(uint32(r), min(width, 32))
		}
		b = low.end(int64(len(part)), min(width, 32))
		high.b = b
		for _, r := range part {
			high.put(uint32(r>>32), max(width-32, 0))
		}
		b = high.end(int64(len(part)), max(width-32, 0))
		e, err := w.add(b)
		if err != nil {
			return err
		}
		w.hots = append(w.hots, e)
	}
	return nil
}

// batch writes where a mini-batch's rows are.
func (w *writer) batch(x *laid, chunk, chunkPages int64) error {
	b := w.head[:0]
	runs := len(x.runs)
	if chunkPages > 0 {
		runs++
	}
	for _, v := range []int64{x.rowsAll, x.rowsHot, chunkPages, int64(runs)} {
		b = binary.AppendUvarint(b, uint64(v))
	}
	end := int64(0)
	put := func(r Run) {
		b = binary.AppendUvarint(b, uint64(r.Page-end))
		b = binary.AppendUvarint(b, uint64(r.Pages))
		end = r.Page + r.Pages
	}
	for _, r := range x.runs {
		put(r)
	}
	if chunkPages > 0 {
		put(Run{chunk, chunkPages})
	}
	w.head = b
	e, err := w.add(b, x.body)
	w.batches = append(w.batches, e)
	return err
}

// stream writes what the packer appends.
func (w *writer) stream(s Stream, list, places []byte) error {
	x := streamEntry{Stream: s}
	var err error
	if x.list, err = w.add(list); err != nil {
		return err
	}
	if x.places, err = w.add(places); err != nil {
		return err
	}
	w.streams = append(w.streams, x)
	return nil
}

// end writes the index, and returns the file's length.
func (w *writer) end(h Header) (int64, error) {
	head, err := json.Marshal(h)
	if err != nil {
		return 0, err
	}
	b := binary.AppendUvarint(nil, uint64(len(head)))
	b = append(b, head...)
	extents := func(all []extent) {
		b = binary.AppendUvarint(b, uint64(len(all)))
		for _, e := range all {
			b = binary.AppendUvarint(b, uint64(e.offset))
			b = binary.AppendUvarint(b, uint64(e.bytes))
			b = binary.LittleEndian.AppendUint32(b, e.sum)
		}
	}
	extents(w.hots)
	extents(w.batches)
	b = binary.AppendUvarint(b, uint64(len(w.streams)))
	for _, s := range w.streams {
		page := uint64(s.Page) << 1
		if s.Cache {
			page |= 1
		}
		for _, v := range []uint64{page, uint64(s.Rows), uint64(s.list.offset),
			uint64(s.list.bytes)} {
			b = binary.AppendUvarint(b, v)
		}
		b = binary.LittleEndian.AppendUint32(b, s.list.sum)
		b = binary.AppendUvarint(b, uint64(s.places.bytes))
		if s.places.bytes > 0 {
			b = binary.LittleEndian.AppendUint32(b, s.places.sum)
		}
	}
	e, err := w.add(b)
	if err != nil {
		return 0, err
	}
	tail := binary.LittleEndian.AppendUint64(nil, uint64(e.offset))
	tail = binary.LittleEndian.AppendUint64(tail, uint64(e.bytes))
	tail = append(binary.LittleEndian.AppendUint32(tail, e.sum), endMagic...)
	if _, err := w.add(tail); err != nil {
		return 0, err
	}
	if err := w.flush(); err != nil {
		return 0, err
	}
	return w.offset, w.to.Truncate(w.offset)
}
