// Command ways generates the loops over the sets of a set-associative directory
// (internal/simd/ways.go): where a set of 32 has a tag, and prefetches of sets.
package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Offsets of waysArgs and setsArgs in ways.go.
const (
	waysWords, waysSets, waysTags, waysOut, waysN, waysStride = 0, 8, 16, 24, 32, 40
	setsWords, setsSets, setsN, setsStride                    = 0, 8, 16, 24
)

func load(args reg.Register, offset int) reg.GPVirtual {
	r := GP64()
	MOVQ(Mem{Base: args, Disp: offset}, r)
	return r
}

func main() {
	ConstraintExpr("amd64")
	findWays()
	prefetchSets()
	Generate()
}

// findWays compares a tag with the 32 of its set, 8 in a register. The masks of the four registers
// make one of 32 bits; bit 32 stands for none.
func findWays() {
	TEXT("findWaysAVX2", NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("findWaysAVX2 is FindWays.")
	args := Load(Param("a"), GP64())
	words, sets, tags := load(args, waysWords), load(args, waysSets), load(args, waysTags)
	out, n, stride := load(args, waysOut), load(args, waysN), load(args, waysStride)
	i := GP64()
	XORQ(i, i)
	Label("way")
	CMPQ(i, n)
	JGE(LabelRef("end"))
	set, tag := GP64(), YMM()
	MOVL(Mem{Base: sets, Index: i, Scale: 4}, set.As32())
	IMULQ(stride, set)
	VPBROADCASTD(Mem{Base: tags, Index: i, Scale: 4}, tag)
	mask := GP64()
	MOVQ(U32(1), mask)
	SHLQ(U8(32), mask)
	for part := range 4 {
		equal, bits := YMM(), GP64()
		VPCMPEQD(Mem{Base: words, Index: set, Scale: 1, Disp: 32 * part}, tag, equal)
		VMOVMSKPS(equal, bits.As32())
		if part > 0 {
			SHLQ(U8(8*part), bits)
		}
		ORQ(bits, mask)
	}
	TZCNTQ(mask, mask)
	MOVB(mask.As8(), Mem{Base: out, Index: i, Scale: 1})
	INCQ(i)
	JMP(LabelRef("way"))
	Label("end")
	VZEROUPPER()
	RET()
}

// prefetchSets asks for the lines of each set.
func prefetchSets() {
	TEXT("prefetchSets", NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("prefetchSets is PrefetchSets.")
	args := Load(Param("a"), GP64())
	words, sets := load(args, setsWords), load(args, setsSets)
	n, stride := load(args, setsN), load(args, setsStride)
	i := GP64()
	XORQ(i, i)
	Label("set")
	CMPQ(i, n)
	JGE(LabelRef("end"))
	at, end := GP64(), GP64()
	MOVL(Mem{Base: sets, Index: i, Scale: 4}, at.As32())
	IMULQ(stride, at)
	ADDQ(words, at)
	LEAQ(Mem{Base: at, Index: stride, Scale: 1}, end)
	Label("line")
	PREFETCHT0(Mem{Base: at})
	ADDQ(U32(64), at)
	CMPQ(at, end)
	JB(LabelRef("line"))
	INCQ(i)
	JMP(LabelRef("set"))
	Label("end")
	RET()
}
