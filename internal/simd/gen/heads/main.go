// Command heads generates the loops of attention (internal/simd/dot.go, heads.go): dot products in
// 32 lanes, and rows added with a weight for each head.
package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Offsets of dotArgs and headArgs.
const (
	dotA, dotB, dotN, dotTailA, dotTailB, dotAhead, dotOut     = 0, 8, 16, 24, 32, 40, 48
	headOut, headX, headWeights, headHeads, headDim, headAhead = 0, 8, 16, 24, 32, 40
)

func load(args reg.Register, offset int) reg.GPVirtual {
	r := GP64()
	MOVQ(Mem{Base: args, Disp: offset}, r)
	return r
}

func main() {
	ConstraintExpr("amd64")
	dot()
	addHeads("AVX2", 8, func() reg.VecVirtual { return YMM() })
	addHeads("AVX512", 16, func() reg.VecVirtual { return ZMM() })
	Generate()
}

// dot sums a·b in 32 lanes, 32 elements at a time and then one padded rest, and adds the lanes as a
// tree.
func dot() {
	TEXT("dotAVX2", NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("dotAVX2 is Dot.")
	args := Load(Param("a"), GP64())
	a, b, n, ahead := load(args, dotA), load(args, dotB), load(args, dotN), load(args, dotAhead)
	var sums [4]reg.VecVirtual
	for v := range sums {
		sums[v] = YMM()
		VXORPS(sums[v], sums[v], sums[v])
	}
	t := YMM()
	part := func(a, b reg.Register) {
		for v := range sums {
			VMOVUPS(Mem{Base: a, Disp: 32 * v}, t)
			VMULPS(Mem{Base: b, Disp: 32 * v}, t, t)
			VADDPS(t, sums[v], sums[v])
		}
	}
	Label("chunk")
	CMPQ(n, U32(32))
	JL(LabelRef("rest"))
	PREFETCHT1(Mem{Base: ahead})
	PREFETCHT1(Mem{Base: ahead, Disp: 64})
	part(a, b)
	ADDQ(U32(128), a)
	ADDQ(U32(128), b)
	ADDQ(U32(128), ahead)
	SUBQ(U32(32), n)
	JMP(LabelRef("chunk"))
	Label("rest")
	TESTQ(n, n)
	JE(LabelRef("tree"))
	part(load(args, dotTailA), load(args, dotTailB))
	Label("tree")
	VADDPS(sums[2], sums[0], sums[0])
	VADDPS(sums[3], sums[1], sums[1])
	VADDPS(sums[1], sums[0], sums[0])
	low, high := sums[0].AsX(), XMM()
	VEXTRACTF128(U8(1), sums[0], high)
	VADDPS(high, low, low)
	VMOVHLPS(low, low, high)
	VADDPS(high, low, low)
	VMOVSHDUP(low, high)
	VADDSS(high, low, low)
	VMOVSS(low, Mem{Base: args, Disp: dotOut})
	VZEROUPPER()
	RET()
}

// addHeads adds x times the weight of each head to out, and asks memory for a row further on.
func addHeads(name string, lanes int, vec func() reg.VecVirtual) {
	TEXT("addHeads"+name, NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("addHeads" + name + " is HeadSum.add.")
	args := Load(Param("a"), GP64())
	out, x, weights := load(args, headOut), load(args, headX), load(args, headWeights)
	heads, dim, ahead := load(args, headHeads), load(args, headDim), load(args, headAhead)
	n, w, t := GP64(), vec(), vec()
	Label("head")
	TESTQ(heads, heads)
	JE(LabelRef("done"))
	VBROADCASTSS(Mem{Base: weights}, w)
	MOVQ(dim, n)
	Label("vector")
	CMPQ(n, U32(uint32(lanes)))
	JL(LabelRef("scalar"))
	PREFETCHT1(Mem{Base: ahead})
	VMULPS(Mem{Base: x}, w, t)
	VADDPS(Mem{Base: out}, t, t)
	VMOVUPS(t, Mem{Base: out})
	ADDQ(U32(uint32(4*lanes)), ahead)
	ADDQ(U32(uint32(4*lanes)), x)
	ADDQ(U32(uint32(4*lanes)), out)
	SUBQ(U32(uint32(lanes)), n)
	JMP(LabelRef("vector"))
	Label("scalar")
	TESTQ(n, n)
	JE(LabelRef("next"))
	VMULSS(Mem{Base: x}, w.AsX(), t.AsX())
	VADDSS(Mem{Base: out}, t.AsX(), t.AsX())
	VMOVSS(t.AsX(), Mem{Base: out})
	ADDQ(U32(4), ahead)
	ADDQ(U32(4), x)
	ADDQ(U32(4), out)
	DECQ(n)
	JMP(LabelRef("scalar"))
	Label("next")
	ADDQ(U32(4), weights)
	DECQ(heads)
	JMP(LabelRef("head"))
	Label("done")
	VZEROUPPER()
	RET()
}
