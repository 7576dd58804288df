// Command act generates the activation functions (internal/simd/act.go): their values and their
// slopes, eight floats at a time. Every step is rounded by itself, in the order of the Go functions
// of the same names.
package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Offsets of actArgs.
const argOut, argX, argGrad, argN = 0, 8, 16, 24

const lanes = 8

// words are the constants that are in the file already, by their bits.
var words = map[uint32]Mem{}

// bits is a vector of one word in memory.
func bits(v uint32) Mem {
	if m, ok := words[v]; ok {
		return m
	}
	m := GLOBL(fmt.Sprintf("act%08x", v), RODATA|NOPTR)
	for i := range lanes {
		DATA(4*i, U32(v))
	}
	words[v] = m
	return m
}

func num(v float64) Mem { return bits(math.Float32bits(float32(v))) }

// The operations of a vector; the left operand is a register.
func op2(do func(b, a, to Op)) func(a, b Op) reg.VecVirtual {
	return func(a, b Op) reg.VecVirtual {
		to := YMM()
		do(b, a, to)
		return to
	}
}

var (
	mul = op2(func(b, a, to Op) { VMULPS(b, a, to) })
	add = op2(func(b, a, to Op) { VADDPS(b, a, to) })
	sub = op2(func(b, a, to Op) { VSUBPS(b, a, to) })
	div = op2(func(b, a, to Op) { VDIVPS(b, a, to) })
	or  = op2(func(b, a, to Op) { VORPS(b, a, to) })
)

func load(m Op) reg.VecVirtual {
	to := YMM()
	VMOVUPS(m, to)
	return to
}

// above is all ones where v > 0.
func above(v reg.VecVirtual) reg.VecVirtual {
	zero, to := YMM(), YMM()
	VXORPS(zero, zero, zero)
	VCMPPS(U8(0x1e), zero, v, to)
	return to
}

// choose is a where mask is set, else b.
func choose(mask, a, b reg.VecVirtual) reg.VecVirtual {
	to := YMM()
	VBLENDVPS(mask, a, b, to)
	return to
}

// down splits e^x into s·(1+p).
func down(x reg.VecVirtual) (p, s reg.VecVirtual) {
	low := YMM()
	VMAXPS(x, load(num(-87)), low) // the second operand, x, where one is NaN
	m := add(mul(low, num(1.44269504088896341)), num(12582912))
	k := sub(m, num(12582912))
	r := sub(low, mul(k, num(0.693359375)))
	r = add(r, mul(k, num(2.12194440e-4)))
	y := add(mul(r, num(1.9875691500e-4)), num(1.3981999507e-3))
	for _, c := range []float64{8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
		5.0000001201e-1} {
		y = add(mul(y, r), num(c))
	}
	p = add(mul(y, mul(r, r)), r)
	s = YMM()
	VPSLLD(U8(23), m, s)
	VPADDD(bits(127<<23), s, s)
	return p, s
}

func elu(x, _ reg.VecVirtual) reg.VecVirtual {
	p, s := down(x)
	return choose(above(x), x, add(mul(p, s), sub(s, num(1))))
}

func eluSlope(x, grad reg.VecVirtual) reg.VecVirtual {
	p, s := down(x)
	return choose(above(x), grad, mul(grad, add(mul(p, s), s)))
}

const (
	geluA = 1.5957691216057308
	geluB = 0.07135481627260025

	// geluFar bounds x in GELU's slope, as in ../../act.go.
	geluFar = 16
)

func geluGate(x, square reg.VecVirtual) (sigma, rest reg.VecVirtual) {
	v := mul(x, add(mul(square, num(geluB)), num(geluA)))
	p, s := down(or(v, bits(1<<31)))
	e := add(mul(p, s), s)
	over := add(e, num(1))
	high, low := div(load(num(1)), over), div(e, over)
	positive := above(v)
	return choose(positive, high, low), choose(positive, low, high)
}

func gelu(x, _ reg.VecVirtual) reg.VecVirtual {
	sigma, _ := geluGate(x, mul(x, x))
	return mul(x, sigma)
}

func geluSlope(x, grad reg.VecVirtual) reg.VecVirtual {
	sigma, rest := geluGate(x, mul(x, x))
	near := YMM()
	VMINPS(x, load(num(geluFar)), near) // x where it is NaN
	VMAXPS(near, load(num(-geluFar)), near)
	steep := add(mul(mul(near, near), num(3*geluB)), num(geluA))
	return mul(grad, add(sigma, mul(mul(sigma, rest), mul(near, steep))))
}

// loop writes a function over n floats, a multiple of lanes.
func loop(name, doc string, slope bool, of func(x, grad reg.VecVirtual) reg.VecVirtual) {
	TEXT(name+"AVX2", NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc(name + "AVX2 is " + doc + ".")
	args := Load(Param("a"), GP64())
	field := func(at int) reg.GPVirtual {
		r := GP64()
		MOVQ(Mem{Base: args, Disp: at}, r)
		return r
	}
	out, x, n := field(argOut), field(argX), field(argN)
	var grad reg.GPVirtual
	if slope {
		grad = field(argGrad)
	}
	pos := GP64()
	XORQ(pos, pos)
	Label("vector")
	CMPQ(pos, n)
	JGE(LabelRef("done"))
	var g reg.VecVirtual
	if slope {
		g = load(Mem{Base: grad, Index: pos, Scale: 4})
	}
	VMOVUPS(of(load(Mem{Base: x, Index: pos, Scale: 4}), g), Mem{Base: out, Index: pos, Scale: 4})
	ADDQ(U32(lanes), pos)
	JMP(LabelRef("vector"))
	Label("done")
	VZEROUPPER()
	RET()
}

func main() {
	ConstraintExpr("amd64")
	loop("elu", "ELU", false, elu)
	loop("eluSlope", "ELUSlope", true, eluSlope)
	loop("gelu", "GELU", false, gelu)
	loop("geluSlope", "GELUSlope", true, geluSlope)
	Generate()
}
