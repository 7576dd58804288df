package packed

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"

	"helios/internal/errs"
)

// MarkFile keeps how far a Pack is: an *os.File, empty at first, is one. It has 128 bytes and is of
// no use once Pack has returned without an error.
type MarkFile interface {
	io.ReaderAt
	io.WriterAt
	Sync() error
}

// mark is the progress of packing. All of it was made durable before the mark was written.
type mark struct {
	seq   uint64
	plan  uint32 // Plan.Sum
	bytes int64  // Plan.Bytes
	row   int64  // rows below it have been appended
	// Of the parts of disk caches, in the order of the streams: those before ordered are in their
	// order; those from there to begun may be in between.
	ordered, begun int64
}

// Two slots are written in turn, so that one is whole whenever the process dies.
const (
	markMagic = 0x6b72614d6c6548 // "HelMark"
	markBytes = 64
	markSum   = markBytes - 4
)

// store writes a mark behind the one before it.
func (m *mark) store(f MarkFile) error {
	if f == nil {
		return nil
	}
	m.seq++
	var b [markBytes]byte
	le := binary.LittleEndian
	for i, v := range []uint64{markMagic, m.seq, uint64(m.plan), uint64(m.bytes), uint64(m.row),
		uint64(m.ordered), uint64(m.begun)} {
		le.PutUint64(b[8*i:], v)
	}
	le.PutUint32(b[markSum:], crc32.Checksum(b[:markSum], castagnoli))
	_, err := f.WriteAt(b[:], int64(m.seq%2)*markBytes)
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		return errs.New(errs.Failed, "the mark of how far packing is: %w", err)
	}
	return nil
}

// loadMark reads the later of the marks that are whole; without one packing begins anew. A mark of
// another plan is an error.
func loadMark(f MarkFile, p *Plan) (m mark, err error) {
	m = mark{plan: p.Sum(), bytes: p.Bytes()}
	if f == nil {
		return m, nil
	}
	le := binary.LittleEndian
	for slot := range int64(2) {
		var b [markBytes]byte
		if _, err := f.ReadAt(b[:], slot*markBytes); err != nil && !errors.Is(err, io.EOF) {
			return m, errs.New(errs.Device, "the mark of how far packing is: %w", err)
		}
		if le.Uint64(b[:]) != markMagic || le.Uint32(b[markSum:]) !=
			crc32.Checksum(b[:markSum], castagnoli) || le.Uint64(b[8:]) <= m.seq {
			continue
		}
		got := mark{le.Uint64(b[8:]), uint32(le.Uint64(b[16:])), int64(le.Uint64(b[24:])),
			int64(le.Uint64(b[32:])), int64(le.Uint64(b[40:])), int64(le.Uint64(b[48:]))}
		if got.plan != p.Sum() || got.bytes != p.Bytes() || got.row < 0 ||
			got.row > p.header.Rows || got.ordered < 0 || got.begun < got.ordered {
			return m, errs.New(errs.Refused,
				"packing was begun for another plan than %s; remove what it left and prepare again",
				p.name)
		}
		m = got
	}
	return m, nil
}
