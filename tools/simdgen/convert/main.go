// Command convert generates the loops that widen stored rows to float32 (internal/simd/convert.go).
//
// Each takes n elements, at least one vector of them, and does whole vectors; the last one ends
// where the data ends and may do elements twice.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// level is a vector width.
type level struct {
	name  string
	lanes int
	vec   func() reg.VecVirtual
}

func main() {
	ConstraintExpr("amd64")
	for _, l := range []level{
		{"AVX2", 8, func() reg.VecVirtual { return YMM() }},
		{"AVX512", 16, func() reg.VecVirtual { return ZMM() }},
	} {
		generate(l, "fromFloat16", "float16", 2, func(m operand.Mem, v reg.VecVirtual,
			_ reg.VecVirtual) {
			VCVTPH2PS(m, v)
		})
		generate(l, "fromBFloat16", "bfloat16", 2, func(m operand.Mem, v reg.VecVirtual,
			_ reg.VecVirtual) {
			VPMOVZXWD(m, v)
			VPSLLD(operand.Imm(16), v, v)
		})
		generate(l, "fromInt8", "int8 times scale", 1, func(m operand.Mem, v reg.VecVirtual,
			scale reg.VecVirtual) {
			VPMOVSXBD(m, v)
			VCVTDQ2PS(v, v)
			VMULPS(scale, v, v)
		})
	}
	Generate()
}

// generate makes one loop; size is that of a source element.
func generate(l level, name, what string, size int,
	widen func(m operand.Mem, v, scale reg.VecVirtual)) {
	scaled := size == 1
	args := "dst *float32, src *byte, n uint64"
	if scaled {
		args += ", scale float32"
	}
	TEXT(name+l.name, NOSPLIT, fmt.Sprintf("func(%s)", args))
	Doc(fmt.Sprintf("%s%s widens n elements of %s; n is at least %d.", name, l.name, what, l.lanes))
	dst := Load(Param("dst"), GP64())
	src := Load(Param("src"), GP64())
	n := Load(Param("n"), GP64())
	scale := l.vec()
	if scaled {
		a, err := Param("scale").Resolve()
		if err != nil {
			panic("scale is a plain argument: " + err.Error())
		}
		VBROADCASTSS(a.Addr, scale)
	}
	i, last := GP64(), GP64()
	XORQ(i, i)
	MOVQ(n, last)
	SUBQ(operand.Imm(uint64(l.lanes)), last) // where the last vector begins

	step := func(at int) {
		v := l.vec()
		widen(operand.Mem{Base: src, Index: i, Scale: uint8(size), Disp: at * size}, v, scale)
		VMOVUPS(v, operand.Mem{Base: dst, Index: i, Scale: 4, Disp: 4 * at})
	}
	const unroll = 4
	Label("loop4")
	next := GP64()
	LEAQ(operand.Mem{Base: i, Disp: (unroll - 1) * l.lanes}, next)
	CMPQ(next, last)
	JG(operand.LabelRef("loop1"))
	for u := range unroll {
		step(u * l.lanes)
	}
	ADDQ(operand.Imm(uint64(unroll*l.lanes)), i)
	JMP(operand.LabelRef("loop4"))
	Label("loop1")
	CMPQ(i, last)
	JGE(operand.LabelRef("tail"))
	step(0)
	ADDQ(operand.Imm(uint64(l.lanes)), i)
	JMP(operand.LabelRef("loop1"))
	// At or past the last vector's place; past all data after whole vectors of loop4.
	Label("tail")
	CMPQ(i, n)
	JGE(operand.LabelRef("done"))
	MOVQ(last, i)
	step(0)
	Label("done")
	VZEROUPPER()
	RET()
}
