// Package vec has what the generators of loops over rows share: vector widths, memory accesses that
// stop before a vector's end, and arguments in a struct.
package vec

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Level is a vector width and the stripes of a row that its registers hold.
type Level struct {
	Name    string
	Lanes   int
	Stripes []int // in vectors, widest first; 0 is the masked rest
	Vec     func() reg.VecVirtual
}

// AVX2 is vectors of 8 elements.
func AVX2(stripes ...int) Level {
	return Level{"AVX2", 8, stripes, func() reg.VecVirtual { return YMM() }}
}

// AVX512 is vectors of 16 elements.
func AVX512(stripes ...int) Level {
	return Level{"AVX512", 16, stripes, func() reg.VecVirtual { return ZMM() }}
}

// Bytes is the length of a vector.
func (l Level) Bytes() int { return 4 * l.Lanes }

var masks Mem

// TailMasks makes 8 times all ones and 8 times 0 by this name: a window of it masks the last
// elements at AVX2. It comes before the first Rest.
func TailMasks(name string) {
	masks = GLOBL(name, RODATA|NOPTR)
	for i := range 16 {
		v := uint32(0)
		if i < 8 {
			v = 0xffffffff
		}
		DATA(4*i, U32(v))
	}
}

// Rest is a vector's worth of memory access that stops after some elements.
type Rest struct {
	l Level
	k reg.Register // AVX512
	m reg.VecVirtual
}

// Rest stops after n elements, up to Lanes.
func (l Level) Rest(n reg.Register) Rest {
	r := Rest{l: l}
	pos := GP64()
	if l.Lanes == 16 {
		r.k = K()
		MOVQ(I32(-1), pos)
		BZHIQ(n, pos, pos)
		KMOVW(pos.As32(), r.k)
		return r
	}
	r.m = YMM()
	base := GP64()
	LEAQ(masks, base)
	MOVQ(U32(8), pos)
	SUBQ(n, pos)
	VMOVDQU(Mem{Base: base, Index: pos, Scale: 4}, r.m)
	return r
}

// Clamped stops after n elements, of which there may be more than Lanes, or fewer than 0.
func (l Level) Clamped(n reg.Register) Rest {
	r := Rest{l: l}
	pos, limit := GP64(), GP64()
	MOVQ(n, pos)
	XORQ(limit, limit)
	TESTQ(pos, pos)
	CMOVQLT(limit, pos)
	MOVQ(U32(uint32(l.Lanes)), limit)
	CMPQ(pos, limit)
	CMOVQGT(limit, pos)
	if l.Lanes == 16 {
		r.k = K()
		MOVQ(I32(-1), limit)
		BZHIQ(pos, limit, limit)
		KMOVW(limit.As32(), r.k)
		return r
	}
	r.m = YMM()
	base := GP64()
	LEAQ(masks, base)
	SUBQ(pos, limit)
	VMOVDQU(Mem{Base: base, Index: limit, Scale: 4}, r.m)
	return r
}

// Load sets the other elements to 0.
func (r Rest) Load(m Mem, v reg.VecVirtual) {
	if r.l.Lanes == 16 {
		VMOVUPS_Z(m, r.k, v)
	} else {
		VMASKMOVPS(m, r.m, v)
	}
}

// Store leaves the other elements as they are.
func (r Rest) Store(v reg.VecVirtual, m Mem) {
	if r.l.Lanes == 16 {
		VMOVUPS(v, r.k, m)
	} else {
		VMASKMOVPS(v, r.m, m)
	}
}

// Field is a field of the struct of arguments.
func Field(args reg.Register, offset int) Mem { return Mem{Base: args, Disp: offset} }

// Arg is a field in a register.
func Arg(args reg.Register, offset int) reg.GPVirtual {
	r := GP64()
	MOVQ(Field(args, offset), r)
	return r
}

// Zero sets a vector to 0.
func (l Level) Zero(v reg.VecVirtual) {
	if l.Lanes == 16 {
		VPXORD(v, v, v)
	} else {
		VXORPS(v, v, v)
	}
}
