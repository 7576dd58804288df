package packed

import (
	"encoding/binary"
	"math/bits"
)

// Numbers of up to 32 bits lie without gaps, the lowest bit first. Eight bytes behind them can be
// loaded as well.

const bitsSlack = 8

// widthOf is the bits that numbers below n need.
func widthOf(n int64) int { return bits.Len64(uint64(max(n-1, 0))) }

// packedBytes returns the bytes of n numbers of width bits each; n is at most 2^31.
func packedBytes(n int64, width int) int64 {
	if n == 0 || width == 0 {
		return 0
	}
	return (n*int64(width)+7)/8 + bitsSlack
}

// bitWriter appends numbers.
type bitWriter struct {
	b    []byte
	word uint64
	n    uint
}

func (w *bitWriter) put(v uint32, width int) {
	w.word |= uint64(v) << w.n
	w.n += uint(width)
	for w.n >= 8 {
		w.b = append(w.b, byte(w.word))
		w.word >>= 8
		w.n -= 8
	}
}

// end adds the bits that are left; n is the count of all numbers.
func (w *bitWriter) end(n int64, width int) []byte {
	if n > 0 && width > 0 {
		if w.n > 0 {
			w.b = append(w.b, byte(w.word))
		}
		w.b = append(w.b, make([]byte, bitsSlack)...)
	}
	b := w.b
	*w = bitWriter{}
	return b
}

// getBits loads number i.
func getBits(b []byte, i int64, width int) uint32 {
	if width == 0 {
		return 0
	}
	bit := uint64(i) * uint64(width)
	return uint32(binary.LittleEndian.Uint64(b[bit>>3:]) >> (bit & 7) & (1<<width - 1))
}
