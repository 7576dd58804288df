// Command convert generates the loops that widen stored rows to float32 and nodes to int64, and
// write numbers by the lengths of lists (internal/simd/convert.go).
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
	bytes int
	vec   func() reg.VecVirtual
}

func main() {
	ConstraintExpr("amd64")
	for _, l := range []level{
		{"AVX2", 32, func() reg.VecVirtual { return YMM() }},
		{"AVX512", 64, func() reg.VecVirtual { return ZMM() }},
	} {
		loop{name: "fromFloat16", what: "float16", from: 2, to: 4, widen: func(m operand.Mem, v,
			_ reg.VecVirtual) {
			VCVTPH2PS(m, v)
		}}.generate(l)
		loop{name: "fromBFloat16", what: "bfloat16", from: 2, to: 4, widen: func(m operand.Mem, v,
			_ reg.VecVirtual) {
			VPMOVZXWD(m, v)
			VPSLLD(operand.Imm(16), v, v)
		}}.generate(l)
		loop{name: "fromInt8", what: "int8 times scale", from: 1, to: 4, widen: func(m operand.Mem, v,
			scale reg.VecVirtual) {
			VPMOVSXBD(m, v)
			VCVTDQ2PS(v, v)
			VMULPS(scale, v, v)
		}}.generate(l)
		loop{name: "fromUint32", what: "uint32", from: 4, to: 8, widen: func(m operand.Mem, v,
			_ reg.VecVirtual) {
			VPMOVZXDQ(m, v)
		}}.generate(l)
		repeat(l)
	}
	Generate()
}

// loop takes n elements, at least one vector of them, and does whole vectors; the last one ends
// where the data ends and may do elements twice. from and to are sizes of elements.
type loop struct {
	name, what string
	from, to   int
	widen      func(m operand.Mem, v, scale reg.VecVirtual)
}

func (o loop) generate(l level) {
	scaled, lanes := o.from == 1, l.bytes/o.to
	args := "dst *float32, src *byte, n uint64"
	if o.to == 8 {
		args = "dst *int64, src *uint32, n uint64"
	}
	if scaled {
		args += ", scale float32"
	}
	TEXT(o.name+l.name, NOSPLIT, fmt.Sprintf("func(%s)", args))
	Doc(fmt.Sprintf("%s%s widens n elements of %s; n is at least %d.", o.name, l.name, o.what, lanes))
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
	SUBQ(operand.Imm(uint64(lanes)), last) // where the last vector begins

	step := func(at int) {
		v := l.vec()
		o.widen(operand.Mem{Base: src, Index: i, Scale: uint8(o.from), Disp: at * o.from}, v, scale)
		VMOVUPS(v, operand.Mem{Base: dst, Index: i, Scale: uint8(o.to), Disp: at * o.to})
	}
	const unroll = 4
	Label("loop4")
	next := GP64()
	LEAQ(operand.Mem{Base: i, Disp: (unroll - 1) * lanes}, next)
	CMPQ(next, last)
	JG(operand.LabelRef("loop1"))
	for u := range unroll {
		step(u * lanes)
	}
	ADDQ(operand.Imm(uint64(unroll*lanes)), i)
	JMP(operand.LabelRef("loop4"))
	Label("loop1")
	CMPQ(i, last)
	JGE(operand.LabelRef("tail"))
	step(0)
	ADDQ(operand.Imm(uint64(lanes)), i)
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

// repeat writes the number of each list as often as the list is long, two vectors at a time: what
// is too much is the next list's place. It stops before a list that has too little room behind it.
func repeat(l level) {
	const unroll = 2
	lanes := l.bytes / 8
	TEXT("repeat"+l.name, NOSPLIT, "func(dst *int64, room int64, indptr *int64, n, v int64) int64")
	Doc("repeat" + l.name + " is Repeat of the first ones of n lists; it returns how many.")
	dst, room := Load(Param("dst"), GP64()), Load(Param("room"), GP64())
	indptr, n := Load(Param("indptr"), GP64()), Load(Param("n"), GP64())
	first, one, numbers := XMM(), l.vec(), l.vec()
	VMOVQ(Load(Param("v"), GP64()), first)
	VPBROADCASTQ(first, numbers)
	o, once := GP64(), XMM()
	MOVQ(operand.U32(1), o)
	VMOVQ(o, once)
	VPBROADCASTQ(once, one)
	i, list := GP64(), GP64()
	XORQ(i, i)
	SUBQ(operand.Imm(uint64(unroll*lanes)), room) // a list begins here at most, and ends here
	JL(operand.LabelRef("done"))
	Label("list")
	CMPQ(i, n)
	JGE(operand.LabelRef("done"))
	MOVQ(operand.Mem{Base: indptr, Index: i, Scale: 8, Disp: 8}, list)
	SUBQ(operand.Mem{Base: indptr, Index: i, Scale: 8}, list)
	CMPQ(list, room)
	JHI(operand.LabelRef("done")) // or its length is negative
	SUBQ(list, room)
	to := GP64()
	MOVQ(dst, to)
	LEAQ(operand.Mem{Base: dst, Index: list, Scale: 8}, dst)
	Label("more")
	for u := range unroll {
		VMOVUPS(numbers, operand.Mem{Base: to, Disp: u * l.bytes})
	}
	ADDQ(operand.Imm(uint64(unroll*l.bytes)), to)
	CMPQ(to, dst)
	JB(operand.LabelRef("more"))
	VPADDQ(one, numbers, numbers)
	INCQ(i)
	JMP(operand.LabelRef("list"))
	Label("done")
	Store(i, ReturnIndex(0))
	VZEROUPPER()
	RET()
}
