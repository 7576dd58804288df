package vec

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// words are the constants that are in the file already, by their bits.
var words = map[uint32]Mem{}

// Bits is a vector of AVX2 of one word, in memory.
func Bits(v uint32) Mem {
	if m, ok := words[v]; ok {
		return m
	}
	m := GLOBL(fmt.Sprintf("word%08x", v), RODATA|NOPTR)
	for i := range 8 {
		DATA(4*i, U32(v))
	}
	words[v] = m
	return m
}

// Num is a vector of AVX2 of one number, in memory.
func Num(v float64) Mem { return Bits(math.Float32bits(float32(v))) }

// The operations of a vector of AVX2; the left operand is a register.
func op2(do func(b, a, to Op)) func(a, b Op) reg.VecVirtual {
	return func(a, b Op) reg.VecVirtual {
		to := YMM()
		do(b, a, to)
		return to
	}
}

// Arithmetic on vectors of AVX2. Max is the right operand where one is NaN.
var (
	Mul = op2(func(b, a, to Op) { VMULPS(b, a, to) })
	Add = op2(func(b, a, to Op) { VADDPS(b, a, to) })
	Sub = op2(func(b, a, to Op) { VSUBPS(b, a, to) })
	Div = op2(func(b, a, to Op) { VDIVPS(b, a, to) })
	Or  = op2(func(b, a, to Op) { VORPS(b, a, to) })
	Max = op2(func(b, a, to Op) { VMAXPS(b, a, to) })
	Min = op2(func(b, a, to Op) { VMINPS(b, a, to) })
)

// Read loads a vector.
func Read(m Op) reg.VecVirtual {
	to := YMM()
	VMOVUPS(m, to)
	return to
}

// Above gives all ones where v > 0.
func Above(v reg.VecVirtual) reg.VecVirtual {
	zero, to := YMM(), YMM()
	VXORPS(zero, zero, zero)
	VCMPPS(U8(0x1e), zero, v, to)
	return to
}

// Choose takes a where mask is set, else b.
func Choose(mask reg.VecVirtual, a Op, b reg.VecVirtual) reg.VecVirtual {
	to := YMM()
	VBLENDVPS(mask, a, b, to)
	return to
}

// Down splits e^x, for x <= 0 or NaN, into s·(1+p): internal/simd (down), step by step.
func Down(x reg.VecVirtual) (p, s reg.VecVirtual) {
	low := Max(Read(Num(-87)), x)
	m := Add(Mul(low, Num(1.44269504088896341)), Num(12582912))
	k := Sub(m, Num(12582912))
	r := Sub(low, Mul(k, Num(0.693359375)))
	r = Add(r, Mul(k, Num(2.12194440e-4)))
	y := Add(Mul(r, Num(1.9875691500e-4)), Num(1.3981999507e-3))
	for _, c := range []float64{8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
		5.0000001201e-1} {
		y = Add(Mul(y, r), Num(c))
	}
	p = Add(Mul(y, Mul(r, r)), r)
	s = YMM()
	VPSLLD(U8(23), m, s)
	VPADDD(Bits(127<<23), s, s)
	return p, s
}
