// Package names numbers nodes by their names, in bounded memory, and keeps the names in a file that
// is looked up both ways. Names are dealt by their hash to parts, small enough for a table in
// memory each: a join by partitions (Shapiro, "Join Processing in Database Systems with Large Main
// Memories", TODS 1986). Nothing of the result depends on the parts, memory or threads.
package names

import (
	"encoding/binary"
	"fmt"
	"io"
	"math/bits"
	"os"
	"sync"

	"helios/internal/philox"
)

// hashOf is a name's hash: its top bits choose the part. It is kept in datasets and never changes.
func hashOf(name []byte) uint64 {
	h := uint64(len(name)) * 0x9E3779B97F4A7C15
	for len(name) >= 8 {
		hi, lo := bits.Mul64(h^binary.LittleEndian.Uint64(name), 0xD6E8FEB86659FD93)
		h = hi ^ lo + 0x9E3779B97F4A7C15
		name = name[8:]
	}
	tail := uint64(0)
	if cap(name) >= 8 {
		tail = binary.LittleEndian.Uint64(name[:8]) & (1<<(8*len(name)) - 1)
	} else {
		for i, c := range name {
			tail |= uint64(c) << (8 * i)
		}
	}
	hi, lo := bits.Mul64(h^tail, 0xA0761D6478BD642F)
	return philox.Mix(h ^ hi ^ lo)
}

// spool is a file of many streams that are written side by side and read one by one.
type spool struct {
	f    *os.File
	room int // of a stream's buffer

	mu     sync.Mutex
	end    int64
	blocks [][]block
	bufs   [][]byte
}

// block is a piece of a stream.
type block struct {
	at   int64
	size int
}

func newSpool(create func(name string) (*os.File, error), name string, streams, room int) (*spool,
	error) {
	f, err := create(name)
	return &spool{f: f, room: room, blocks: make([][]block, streams),
		bufs: make([][]byte, streams)}, err
}

// add appends to a stream. Different streams may be added to at the same time.
func (s *spool) add(stream int, b []byte) error {
	buf := s.bufs[stream]
	if len(buf)+len(b) > s.room {
		if err := s.flush(stream); err != nil {
			return err
		}
		buf = s.bufs[stream]
		if len(b) > s.room {
			return s.write(stream, b)
		}
	}
	if buf == nil {
		buf = make([]byte, 0, s.room)
	}
	s.bufs[stream] = append(buf, b...)
	return nil
}

func (s *spool) flush(stream int) error {
	buf := s.bufs[stream]
	if len(buf) == 0 {
		return nil
	}
	s.bufs[stream] = buf[:0]
	return s.write(stream, buf)
}

func (s *spool) write(stream int, b []byte) error {
	s.mu.Lock()
	offset := s.end
	s.end += int64(len(b))
	s.blocks[stream] = append(s.blocks[stream], block{offset, len(b)})
	s.mu.Unlock()
	if _, err := s.f.WriteAt(b, offset); err != nil {
		return fmt.Errorf("writing parts of the names: %w", err)
	}
	return nil
}

// finish writes what is buffered of a stream and frees its buffer.
func (s *spool) finish(stream int) error {
	err := s.flush(stream)
	s.bufs[stream] = nil
	return err
}

func (s *spool) finishAll() error {
	for i := range s.bufs {
		if err := s.finish(i); err != nil {
			return err
		}
	}
	return nil
}

// size is the number of bytes of a stream that were written.
func (s *spool) size(stream int) (n int64) {
	for _, b := range s.blocks[stream] {
		n += int64(b.size)
	}
	return n
}

// stream reads a stream of a spool.
type stream struct {
	s      *spool
	blocks []block
	buf    []byte // the rest of what was read
	room   []byte
}

func (s *spool) stream(i int) *stream { return &stream{s: s, blocks: s.blocks[i]} }

// fill has at least n bytes in buf, or fewer at the end.
func (r *stream) fill(n int) error {
	for len(r.buf) < n && len(r.blocks) > 0 {
		b := r.blocks[0]
		r.blocks = r.blocks[1:]
		need := len(r.buf) + b.size
		if cap(r.room) < need {
			r.room = make([]byte, 0, need)
		}
		room := r.room[:need]
		k := copy(room, r.buf)
		if _, err := r.s.f.ReadAt(room[k:], b.at); err != nil {
			return fmt.Errorf("reading parts of the names: %w", err)
		}
		r.buf, r.room = room, room
	}
	return nil
}

// name reads a name; io.EOF at the end. It is valid until the next call.
func (r *stream) name() ([]byte, error) {
	if len(r.buf) < binary.MaxVarintLen64 {
		if err := r.fill(binary.MaxVarintLen64); err != nil {
			return nil, err
		}
		if len(r.buf) == 0 {
			return nil, io.EOF
		}
	}
	n, k := binary.Uvarint(r.buf)
	if k <= 0 {
		return nil, io.ErrUnexpectedEOF
	}
	if len(r.buf) < k+int(n) {
		if err := r.fill(k + int(n)); err != nil {
			return nil, err
		}
		if len(r.buf) < k+int(n) {
			return nil, io.ErrUnexpectedEOF
		}
	}
	name := r.buf[k : k+int(n)]
	r.buf = r.buf[k+int(n):]
	return name, nil
}

// number reads a number of 8 bytes.
func (r *stream) number() (uint64, error) {
	if len(r.buf) < 8 {
		if err := r.fill(8); err != nil {
			return 0, err
		}
		if len(r.buf) < 8 {
			return 0, io.ErrUnexpectedEOF
		}
	}
	v := binary.LittleEndian.Uint64(r.buf)
	r.buf = r.buf[8:]
	return v, nil
}

// short reads a number of 4 bytes.
func (r *stream) short() (uint32, error) {
	if len(r.buf) < 4 {
		if err := r.fill(4); err != nil {
			return 0, err
		}
		if len(r.buf) < 4 {
			return 0, io.ErrUnexpectedEOF
		}
	}
	v := binary.LittleEndian.Uint32(r.buf)
	r.buf = r.buf[4:]
	return v, nil
}
