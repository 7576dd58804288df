package webgraph

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
)

// code is an instantaneous code of the natural numbers (Boldi and Vigna, "The WebGraph framework
// I", WWW 2004, and "Codes for the World-Wide Web", Internet Mathematics 2(4), 2005).
type code byte

const (
	gamma code = iota + 1
	delta
	zeta
	unary
	nibble
)

var codeNames = map[string]code{"GAMMA": gamma, "DELTA": delta, "ZETA": zeta, "UNARY": unary,
	"NIBBLE": nibble}

// errEnd says that a code runs past the end of the stream, errCode that none is as long as what
// stands there.
var (
	errEnd  = errors.New("the bit stream ends within a code: truncated")
	errCode = errors.New("a code of more than 62 bits: damaged")
)

// bitReader reads a stream of bits, the highest of each byte first.
type bitReader struct {
	r    io.ReaderAt
	size int64 // bytes
	buf  []byte
	base int64 // of buf in the stream
	next int   // next byte of buf
	acc  uint64
	have uint // bits of acc, at its top
	err  error
}

func newBitReader(r io.ReaderAt, size int64) *bitReader {
	return &bitReader{r: r, size: size, buf: make([]byte, 0, 64<<10)}
}

// pos is the number of the next bit.
func (b *bitReader) pos() int64 { return (b.base+int64(b.next))*8 - int64(b.have) }

// seek goes to a bit.
func (b *bitReader) seek(bit int64) {
	if d := bit - b.pos(); d >= 0 && d < int64(b.have) {
		b.acc <<= uint(d)
		b.have -= uint(d)
		return
	}
	b.acc, b.have = 0, 0
	if index := bit/8 - b.base; index >= 0 && index <= int64(len(b.buf)) {
		b.next = int(index)
	} else {
		b.base, b.next, b.buf = bit/8, 0, b.buf[:0]
	}
	if k := uint(bit % 8); k > 0 {
		b.read(k)
	}
}

// fill brings at least 32 bits into acc where the stream has them.
func (b *bitReader) fill() {
	for b.have < 32 {
		if len(b.buf)-b.next >= 4 {
			b.acc |= uint64(binary.BigEndian.Uint32(b.buf[b.next:])) << (32 - b.have)
			b.next += 4
			b.have += 32
			return
		}
		if b.next == len(b.buf) && !b.more() {
			return
		}
		b.acc |= uint64(b.buf[b.next]) << (56 - b.have)
		b.next++
		b.have += 8
	}
}

// more reads the next part of the stream into buf.
func (b *bitReader) more() bool {
	b.base += int64(len(b.buf))
	b.next = 0
	n := min(int64(cap(b.buf)), b.size-b.base)
	if n <= 0 || b.err != nil {
		b.buf = b.buf[:0]
		return false
	}
	b.buf = b.buf[:n]
	if _, err := b.r.ReadAt(b.buf, b.base); err != nil {
		b.buf, b.err = b.buf[:0], fmt.Errorf("read: %w", err)
		return false
	}
	return true
}

// read returns the next n bits, at most 32.
func (b *bitReader) read(n uint) uint64 {
	if b.have < n {
		if b.fill(); b.have < n {
			b.fail(errEnd)
			return 0
		}
	}
	v := b.acc >> 1 >> (63 - n)
	b.acc <<= n
	b.have -= n
	return v
}

func (b *bitReader) fail(err error) {
	if b.err == nil {
		b.err = err
	}
}

func (b *bitReader) wide(n uint) uint64 {
	if n <= 32 {
		return b.read(n)
	}
	hi := b.read(n - 32)
	return hi<<32 | b.read(32)
}

// unary is the number of zeros before a one.
func (b *bitReader) unary() uint64 {
	n := uint64(0)
	for {
		if b.have == 0 {
			if b.fill(); b.have == 0 {
				b.fail(errEnd)
				return 0
			}
		}
		if z := uint(bits.LeadingZeros64(b.acc)); z < b.have {
			b.acc = b.acc << z << 1
			b.have -= z + 1
			return n + uint64(z)
		}
		n += uint64(b.have)
		b.acc, b.have = 0, 0
	}
}

// number reads a number below 2^62 in code c; k is that of zeta.
func (b *bitReader) number(c code, k uint) uint64 {
	switch c {
	case unary:
		return b.unary()
	case gamma:
		return b.binary(b.unary())
	case delta:
		return b.binary(b.binary(b.unary()))
	case zeta:
		h := b.unary()
		if h >= 62 || (uint(h)+1)*k > 62 {
			b.fail(errCode)
			return 0
		}
		left := uint64(1) << (uint(h) * k)
		m := b.wide((uint(h)+1)*k - 1)
		if m < left {
			return m + left - 1
		}
		return m<<1 + b.read(1) - 1
	default: // nibble: groups of a stop bit and three bits
		v := uint64(0)
		for range 20 {
			stop := b.read(1)
			if v = v<<3 | b.read(3); stop == 1 || b.err != nil {
				return v
			}
		}
		b.fail(errCode)
		return 0
	}
}

// binary reads the bits below the highest of a number of msb+1 bits, and takes 1 off.
func (b *bitReader) binary(msb uint64) uint64 {
	if msb > 61 {
		b.fail(errCode)
		return 0
	}
	return (uint64(1)<<msb | b.wide(uint(msb))) - 1
}

// signed undoes the folding of whole numbers into natural ones.
func signed(n uint64) int64 { return int64(n>>1) ^ -int64(n&1) }
