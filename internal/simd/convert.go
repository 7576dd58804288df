package simd

import (
	"encoding/binary"
	"math"
)

//go:generate go -C ../../tools run ./simdgen/convert -out ../internal/simd/convert_amd64.s -stubs ../internal/simd/convert_amd64.go -pkg simd

// Widening of stored numbers to float32, and of uint32 to int64: little-endian source, as many
// elements as dst has. All are exact but FromInt8, which rounds one product; so every level gives
// the same bits. A vector's tail is done again with the vector that ends where the data ends, so
// sources and destinations must not overlap.

// FromFloat16 widens IEEE half precision. Signalling NaNs become quiet, as F16C makes them.
func (l Level) FromFloat16(dst []float32, src []byte) {
	n := len(dst)
	if n == 0 {
		return
	}
	src = src[:2*n]
	switch {
	case l.Resolve() == AVX512 && n >= 16:
		fromFloat16AVX512(&dst[0], &src[0], uint64(n))
	case l.Resolve() >= AVX2 && n >= 8:
		fromFloat16AVX2(&dst[0], &src[0], uint64(n))
	default:
		for i := range dst {
			dst[i] = Float16(binary.LittleEndian.Uint16(src[2*i:]))
		}
	}
}

// FromBFloat16 widens bfloat16: the upper half of a float32.
func (l Level) FromBFloat16(dst []float32, src []byte) {
	n := len(dst)
	if n == 0 {
		return
	}
	src = src[:2*n]
	switch {
	case l.Resolve() == AVX512 && n >= 16:
		fromBFloat16AVX512(&dst[0], &src[0], uint64(n))
	case l.Resolve() >= AVX2 && n >= 8:
		fromBFloat16AVX2(&dst[0], &src[0], uint64(n))
	default:
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
		}
	}
}

// FromInt8 widens signed bytes and multiplies them by scale.
func (l Level) FromInt8(dst []float32, src []byte, scale float32) {
	n := len(dst)
	if n == 0 {
		return
	}
	src = src[:n]
	switch {
	case l.Resolve() == AVX512 && n >= 16:
		fromInt8AVX512(&dst[0], &src[0], uint64(n), scale)
	case l.Resolve() >= AVX2 && n >= 8:
		fromInt8AVX2(&dst[0], &src[0], uint64(n), scale)
	default:
		for i := range dst {
			dst[i] = float32(int8(src[i])) * scale
		}
	}
}

// FromUint32 widens whole numbers.
func (l Level) FromUint32(dst []int64, src []uint32) {
	n := len(dst)
	if n == 0 {
		return
	}
	src = src[:n]
	switch {
	case l.Resolve() == AVX512 && n >= 8:
		fromUint32AVX512(&dst[0], &src[0], uint64(n))
	case l.Resolve() >= AVX2 && n >= 4:
		fromUint32AVX2(&dst[0], &src[0], uint64(n))
	default:
		for i, v := range src {
			dst[i] = int64(v)
		}
	}
}

// Repeat fills dst with the numbers of adjacent lists, first, first+1, …, each as often as its list
// is long: list i has indptr[i+1]-indptr[i] elements, and all lists together have len(dst).
func (l Level) Repeat(dst []int64, indptr []int64, first int64) {
	lists := int64(len(indptr) - 1)
	if lists < 1 {
		return
	}
	i := int64(0)
	if len(dst) > 0 {
		switch l.Resolve() {
		case AVX512:
			i = repeatAVX512(&dst[0], int64(len(dst)), &indptr[0], lists, first)
		case AVX2:
			i = repeatAVX2(&dst[0], int64(len(dst)), &indptr[0], lists, first)
		}
	}
	dst = dst[indptr[i]-indptr[0]:]
	for ; i < lists; i++ {
		n := indptr[i+1] - indptr[i]
		for k := range dst[:n] {
			dst[k] = first + i
		}
		dst = dst[n:]
	}
}

// Float16 widens one half.
func Float16(h uint16) float32 {
	const (
		exponent = 0x1f << 23 // the half's exponent field, moved to the float's place
		rebias   = (127 - 15) << 23
		quiet    = 1 << 22
	)
	sign := uint32(h&0x8000) << 16
	x := uint32(h&0x7fff) << 13
	switch x & exponent {
	case exponent: // infinity or NaN
		x |= 0xff << 23
		if x&(1<<23-1) != 0 {
			x |= quiet
		}
	case 0: // zero or subnormal: 2^-14 · 0.m is 2^-14 · 1.m less 2^-14, exactly
		x = math.Float32bits(math.Float32frombits(x+rebias+1<<23) -
			math.Float32frombits(rebias+1<<23))
	default:
		x += rebias
	}
	return math.Float32frombits(sign | x)
}
