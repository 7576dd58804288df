// Command act generates the activation functions (internal/simd/act.go): their values and their
// slopes, eight floats at a time. Every step is rounded by itself, in the order of the Go functions
// of the same names.
package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"helios/tools/simdgen/vec"
)

// Offsets of actArgs.
const argOut, argX, argGrad, argN = 0, 8, 16, 24

const lanes = 8

func elu(x, _ reg.VecVirtual) reg.VecVirtual {
	p, s := vec.Down(x)
	return vec.Choose(vec.Above(x), x, vec.Add(vec.Mul(p, s), vec.Sub(s, vec.Num(1))))
}

func eluSlope(x, grad reg.VecVirtual) reg.VecVirtual {
	p, s := vec.Down(x)
	return vec.Choose(vec.Above(x), grad, vec.Mul(grad, vec.Add(vec.Mul(p, s), s)))
}

const (
	geluA = 1.5957691216057308
	geluB = 0.07135481627260025

	// geluFar bounds x in GELU's slope, as in ../../act.go.
	geluFar = 16
)

func geluGate(x, square reg.VecVirtual) (sigma, rest reg.VecVirtual) {
	v := vec.Mul(x, vec.Add(vec.Mul(square, vec.Num(geluB)), vec.Num(geluA)))
	p, s := vec.Down(vec.Or(v, vec.Bits(1<<31)))
	e := vec.Add(vec.Mul(p, s), s)
	over := vec.Add(e, vec.Num(1))
	high, low := vec.Div(vec.Read(vec.Num(1)), over), vec.Div(e, over)
	positive := vec.Above(v)
	return vec.Choose(positive, high, low), vec.Choose(positive, low, high)
}

func gelu(x, _ reg.VecVirtual) reg.VecVirtual {
	sigma, _ := geluGate(x, vec.Mul(x, x))
	return vec.Mul(x, sigma)
}

func geluSlope(x, grad reg.VecVirtual) reg.VecVirtual {
	sigma, rest := geluGate(x, vec.Mul(x, x))
	near := vec.Min(vec.Read(vec.Num(geluFar)), x) // x where it is NaN
	near = vec.Max(vec.Read(vec.Num(-geluFar)), near)
	steep := vec.Add(vec.Mul(vec.Mul(near, near), vec.Num(3*geluB)), vec.Num(geluA))
	return vec.Mul(grad, vec.Add(sigma, vec.Mul(vec.Mul(sigma, rest), vec.Mul(near, steep))))
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
		g = vec.Read(Mem{Base: grad, Index: pos, Scale: 4})
	}
	in, to := Mem{Base: x, Index: pos, Scale: 4}, Mem{Base: out, Index: pos, Scale: 4}
	VMOVUPS(of(vec.Read(in), g), to)
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
