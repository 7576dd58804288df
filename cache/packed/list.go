package packed

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"slices"

	"helios/internal/errs"
)

// list reads a stream's rows one after the other, a part of the file at a time. Rows that have been
// given may be wrong until the last one was: the checksum is of all.
type list struct {
	p      *Plan
	stream int
	done   int64 // rows
	row    int64 // the last one
	taken  int64 // bytes of the extent that were taken off
	sum    uint32
	ahead  []byte // read, not taken off
	buf    []byte // that ahead is in
	own    *[]byte
	want   int64 // bytes to read at one go
}

// A list reads between listLeast and listMost bytes at one go.
const (
	listLeast = 512
	listMost  = 64 << 10
)

// list begins stream i.
func (p *Plan) list(i int) (*list, error) {
	if i < 0 || i >= len(p.streams) {
		return nil, errs.New(errs.Failed, "plan %s: stream %d of %d", p.name, i, len(p.streams))
	}
	return &list{p: p, stream: i}, nil
}

// next returns the next row, or io.EOF once all rows were given and match their checksum.
func (l *list) next() (int64, error) {
	s := &l.p.streams[l.stream]
	if l.done == s.Rows {
		if l.taken != s.list.bytes || l.sum != s.list.sum {
			return 0, l.p.damaged("the checksum of rows %d, at byte %d, is wrong", l.stream,
				s.list.offset)
		}
		return 0, io.EOF
	}
	if len(l.ahead) < binary.MaxVarintLen64 && l.taken+int64(len(l.ahead)) < s.list.bytes {
		if err := l.fill(); err != nil {
			return 0, err
		}
	}
	v, n := binary.Uvarint(l.ahead)
	if n <= 0 || v >= uint64(l.p.header.Rows-l.row) {
		return 0, l.p.damaged("rows %d are not those of the graph", l.stream)
	}
	l.sum = crc32.Update(l.sum, castagnoli, l.ahead[:n])
	l.ahead, l.taken = l.ahead[n:], l.taken+int64(n)
	l.done++
	l.row += int64(v)
	return l.row, nil
}

// lend gives a list memory to read through, until giveBack, to find n rows from first on.
func (l *list) lend(buf *[]byte, first, n int64) {
	s := &l.p.streams[l.stream]
	// Rows are spread evenly, more or less: what is missing is read when it is asked for.
	share := float64(n) / float64(max(l.p.header.Rows, 1)) * float64(s.list.bytes)
	l.own, l.want = buf, min(max(int64(share*1.25)+listLeast/2, listLeast), listMost)
}

// giveBack ends lend. Bytes that were read and not taken are read again later.
func (l *list) giveBack() { l.own, l.ahead, l.buf = nil, nil, nil }

// fill reads on.
func (l *list) fill() error {
	s := &l.p.streams[l.stream]
	from := l.taken + int64(len(l.ahead))
	if l.buf == nil {
		if l.own == nil {
			l.own, l.want = new([]byte), listMost
		}
		if *l.own == nil {
			*l.own = make([]byte, listMost)
		}
		l.buf = *l.own
	}
	have := copy(l.buf, l.ahead)
	n := min(s.list.bytes-from, max(l.want-int64(have), listLeast-binary.MaxVarintLen64))
	to := l.buf[have : have+int(n)]
	if got, err := l.p.r.ReadAt(to, s.list.offset+from); got < len(to) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return errs.New(errs.Device, "plan %s: rows %d: %w", l.p.name, l.stream, err)
	}
	l.ahead = l.buf[:have+int(n)]
	return nil
}

// places returns the places of the rows of a disk cache's part, in buf where that has room.
func (p *Plan) places(i int, buf []uint32) ([]uint32, error) {
	s := &p.streams[i]
	b, err := p.part(s.places, nil, "places", i)
	if err != nil {
		return nil, err
	}
	if s.places.bytes == 0 { // one row
		b = make([]byte, bitsSlack)
	}
	buf = sized(buf, s.Rows)
	width := widthOf(s.Rows)
	seen := make([]bool, s.Rows)
	for k := range buf {
		v := getBits(b, int64(k), width)
		if int64(v) >= s.Rows || seen[v] {
			return nil, p.damaged("places %d are not in order", i)
		}
		buf[k], seen[v] = v, true
	}
	return slices.Clip(buf), nil
}

// Rows lists the rows of stream i.
func (p *Plan) Rows(i int) ([]int64, error) { return p.rows(i, new([]byte)) }

// rows lists a stream's rows, by memory that is lent.
func (p *Plan) rows(i int, lent *[]byte) ([]int64, error) {
	l, err := p.list(i)
	if err != nil {
		return nil, err
	}
	l.lend(lent, 0, p.header.Rows)
	rows := make([]int64, 0, p.streams[i].Rows)
	for {
		row, err := l.next()
		switch {
		case errors.Is(err, io.EOF):
			return rows, nil
		case err != nil:
			return nil, err
		}
		rows = append(rows, row)
	}
}
