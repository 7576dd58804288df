// Command ways generates the loops over the sets of a set-associative directory
// (internal/simd/ways.go): where a set of 32 has a tag, prefetches of sets, and random numbers by
// tag.
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
	drawTags, drawOut, drawKeys, drawN, drawBatch             = 0, 8, 16, 24, 32
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
	drawTagged()
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
	pos, end := GP64(), GP64()
	MOVL(Mem{Base: sets, Index: i, Scale: 4}, pos.As32())
	IMULQ(stride, pos)
	ADDQ(words, pos)
	LEAQ(Mem{Base: pos, Index: stride, Scale: 1}, end)
	Label("line")
	PREFETCHT0(Mem{Base: pos})
	ADDQ(U32(64), pos)
	CMPQ(pos, end)
	JB(LabelRef("line"))
	INCQ(i)
	JMP(LabelRef("set"))
	Label("end")
	RET()
}

// drawTagged does the ten rounds of Philox4x32-10 on two sets of four counters, each in a lane of
// 64 bits, of whose words the lower half counts. A round's products change places with its words.
func drawTagged() {
	TEXT("drawTaggedAVX2", NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("drawTaggedAVX2 is DrawTagged of a multiple of 8 tags.")
	args := Load(Param("a"), GP64())
	tags, out, keys := load(args, drawTags), load(args, drawOut), load(args, drawKeys)
	n := load(args, drawN)
	mul0, mul1, batch := YMM(), YMM(), YMM()
	for _, c := range []struct {
		value uint64
		to    reg.VecVirtual
	}{{0xD2511F53, mul0}, {0xCD9E8D57, mul1}} {
		g := GP64()
		MOVQ(U64(c.value), g)
		VMOVQ(g, c.to.AsX())
		VPBROADCASTQ(c.to.AsX(), c.to)
	}
	VPBROADCASTQ(Mem{Base: args, Disp: drawBatch}, batch)
	i := GP64()
	XORQ(i, i)
	Label("eight")
	CMPQ(i, n)
	JGE(LabelRef("end"))
	var c [2][4]reg.VecVirtual
	for s := range c {
		for w := range c[s] {
			c[s][w] = YMM()
		}
		VPMOVZXDQ(Mem{Base: tags, Index: i, Scale: 4, Disp: 16 * s}, c[s][0])
		VPXOR(c[s][1], c[s][1], c[s][1])
		VMOVDQA(batch, c[s][2])
		VPXOR(c[s][3], c[s][3], c[s][3])
	}
	key, t := YMM(), YMM()
	for round := range 10 {
		for s := range c {
			VPMULUDQ(mul0, c[s][0], c[s][0])
			VPMULUDQ(mul1, c[s][2], c[s][2])
		}
		for half, from := range []int{2, 0} { // words 1 and 3, by the other product's upper half
			VPBROADCASTQ(Mem{Base: keys, Disp: 8 * (2*round + half)}, key)
			for s := range c {
				VPSRLQ(U8(32), c[s][from], t)
				VPXOR(key, t, t)
				VPXOR(t, c[s][2*half+1], c[s][2*half+1])
			}
		}
		for s, w := range c {
			c[s] = [4]reg.VecVirtual{w[1], w[2], w[3], w[0]}
		}
	}
	for s, w := range c {
		VPSLLQ(U8(32), w[1], w[1])
		VPBLENDD(U8(0xaa), w[1], w[0], w[0])
		VMOVDQU(w[0], Mem{Base: out, Index: i, Scale: 8, Disp: 32 * s})
	}
	ADDQ(U8(8), i)
	JMP(LabelRef("eight"))
	Label("end")
	VZEROUPPER()
	RET()
}
