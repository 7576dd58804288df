package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Layer-neighbour sampling (internal/simd/labor.go): a node's variate is two products of 64 bits of
// its number and a key, so every id of a list is hashed where it is read, and what is taken is
// packed to the front of the vector and stored whole. Nothing branches on a variate.

const (
	golden       = 0x9E3779B97F4A7C15
	mixA, mixB   = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
	laborPerStep = 16 // ids that a step may write behind those taken
)

const laborDoc = "copies ids whose variates are at most limit to out, until room for a step lacks. It returns how many ids it has looked at and how many it took, and raises max, by halves of ids of 64 bits, to the largest one taken."

func laborSignature(name string) {
	TEXT(name, NOSPLIT,
		"func(list *byte, n uint64, keys *[4]uint64, limit uint64, max *[16]uint32, out *uint32, room uint64) (done, taken uint64)")
	Doc(name + " " + laborDoc)
}

// laborWalk is the loop over a list, step ids at a time and the rest behind a mask: body(all) does
// one step at the place at, all or the first rest ids.
func laborWalk(width, step int, list, at, taken reg.GPVirtual, body func(rest reg.Register)) {
	n, last := GP64(), GP64()
	MOVQ(addr("n"), n)
	MOVQ(addr("room"), last)
	SUBQ(imm(laborPerStep), last)
	left := GP64()
	Label("step")
	CMPQ(taken, last)
	JG(operand.LabelRef("done"))
	MOVQ(n, left)
	SUBQ(at, left)
	CMPQ(left, imm(uint64(step)))
	JB(operand.LabelRef("rest"))
	body(nil)
	ADDQ(imm(uint64(step)), at)
	ADDQ(imm(uint64(step*width)), list)
	JMP(operand.LabelRef("step"))
	Label("rest")
	TESTQ(left, left)
	JEQ(operand.LabelRef("done"))
	body(left)
	ADDQ(left, at)
	Label("done")
}

// labor512 takes ids of so many bytes with AVX-512: 16 narrow or 8 wide ones a step.
func labor512(name string, width int) {
	laborSignature(name)
	vec := func() reg.VecVirtual { return ZMM() }
	keys, list, out := param("keys"), param("list"), param("out")
	gold, a, b, key, other, phase, from, limit, max := vec(), vec(), vec(), vec(), vec(), vec(),
		vec(), vec(), vec()
	constant(golden, gold)
	constant(mixA, a)
	constant(mixB, b)
	for i, v := range []reg.VecVirtual{key, other, phase, from} {
		VPBROADCASTQ(at(keys, 8*i), v)
	}
	VPSUBQ(key, other, other)
	VPBROADCASTQ(addr("limit"), limit)
	m := param("max")
	VMOVDQU32(at(m, 0), max)
	g := GP64()
	place, taken := GP64(), GP64()
	XORQ(place, place)
	XORQ(taken, taken)
	mix := func(x []reg.VecVirtual) {
		t := []reg.VecVirtual{vec(), vec()}
		for _, c := range []struct {
			shift uint64
			mul   reg.VecVirtual
		}{{30, a}, {27, b}, {31, nil}} {
			for i := range x {
				VPSRLQ(imm(c.shift), x[i], t[i])
			}
			for i := range x {
				VPXORQ(t[i], x[i], x[i])
			}
			if c.mul != nil {
				for i := range x {
					VPMULLQ(c.mul, x[i], x[i])
				}
			}
		}
	}
	n := 0
	laborWalk(width, map[int]int{4: 16, 8: 8}[width], list, place, taken, func(rest reg.Register) {
		n++
		ids, mask := vec(), K()
		if rest != nil {
			MOVQ(operand.I32(-1), g)
			BZHIQ(rest, g, g)
			KMOVW(g.As32(), mask)
			if width == 4 {
				VMOVDQU32_Z(at(list, 0), mask, ids)
			} else {
				VMOVDQU64_Z(at(list, 0), mask, ids)
			}
		} else if width == 4 {
			VMOVDQU32(at(list, 0), ids)
		} else {
			VMOVDQU64(at(list, 0), ids)
		}
		x := []reg.VecVirtual{ids}
		if width == 4 {
			x = []reg.VecVirtual{vec(), vec()}
			high := YMM()
			VEXTRACTI64X4(imm(1), ids, high)
			VPMOVZXDQ(ids.AsY(), x[0])
			VPMOVZXDQ(high, x[1])
		}
		r := make([]reg.VecVirtual, len(x))
		for i := range x {
			r[i] = vec()
			VPMULLQ(gold, x[i], r[i])
		}
		one, more := fmt.Sprintf("one%d", n), fmt.Sprintf("more%d", n)
		CMPQ(at(keys, 24), imm(0))
		JEQ(operand.LabelRef(one))
		h := make([]reg.VecVirtual, len(x))
		for i := range x {
			h[i] = vec()
			VPADDQ(phase, r[i], h[i])
			VPADDQ(key, r[i], r[i])
		}
		mix(h)
		for i := range x {
			second := K()
			VPCMPUQ(imm(5), from, h[i], second) // not less
			VPADDQ(other, r[i], second, r[i])
		}
		JMP(operand.LabelRef(more))
		Label(one)
		for i := range x {
			VPADDQ(key, r[i], r[i])
		}
		Label(more)
		mix(r)
		in := K()
		VPCMPUQ(imm(2), limit, r[0], in) // not more
		if width == 4 {
			high := K()
			VPCMPUQ(imm(2), limit, r[1], high)
			KUNPCKBW(in, high, in)
		}
		if rest != nil {
			KANDW(mask, in, in)
		}
		packed := vec()
		if width == 4 {
			VPCOMPRESSD_Z(ids, in, packed)
			VMOVDQU32(packed, indexed(out, taken, 4, 0))
		} else {
			VPCOMPRESSQ_Z(ids, in, packed)
			low := YMM()
			VPMOVQD(packed, low)
			VMOVDQU(low, indexed(out, taken, 4, 0))
		}
		VPMAXUD(packed, max, max)
		KMOVW(in, g.As32())
		POPCNTL(g.As32(), g.As32())
		ADDQ(g, taken)
	})
	Store(place, ReturnIndex(0))
	Store(taken, ReturnIndex(1))
	VMOVDQU32(max, at(m, 0))
	VZEROUPPER()
	RET()
}

// laborPacks is, for each set of four dwords, how a byte shuffle brings them to the front.
func laborPacks() operand.Mem {
	t := GLOBL("laborPacks", 8|16) // RODATA|NOPTR
	for set := range 16 {
		to := 0
		for d := range 4 {
			if set>>d&1 != 0 {
				for b := range 4 {
					DATA(16*set+to, operand.U8(4*d+b))
					to++
				}
			}
		}
		for ; to < 16; to++ {
			DATA(16*set+to, operand.U8(0x80))
		}
	}
	return t
}

// laborFirst is 8 times all ones and 8 times 0: a window of it masks the first elements.
func laborFirst() operand.Mem {
	t := GLOBL("laborFirst", 8|16)
	for i := range 16 {
		v := uint32(0)
		if i < 8 {
			v = 0xffffffff
		}
		DATA(4*i, operand.U32(v))
	}
	return t
}

// labor2 takes ids of so many bytes with AVX2: 8 narrow or 4 wide ones a step.
func labor2(name string, width int, packs, first operand.Mem) {
	laborSignature(name)
	vec := func() reg.VecVirtual { return YMM() }
	keys, list, out := param("keys"), param("list"), param("out")
	mem := AllocLocal(13 * 32)
	const (
		sKey = iota
		sOther
		sPhase
		sFrom // and sLimit: with the highest bit flipped, as numbers with a sign compare
		sLimit
		sSign
		sGold // low and high halves
		sGoldHigh
		sA
		sAHigh
		sB
		sBHigh
		sMax
	)
	slot := func(i int) operand.Mem { return mem.Offset(32 * i) }
	t := vec()
	g := GP64()
	for i := range 3 {
		VPBROADCASTQ(at(keys, 8*i), t)
		VMOVDQU(t, slot(sKey+i))
	}
	sign := vec()
	constant(1<<63, sign)
	VMOVDQU(sign, slot(sSign))
	VPBROADCASTQ(at(keys, 24), t)
	VPXOR(sign, t, t)
	VMOVDQU(t, slot(sFrom))
	VPBROADCASTQ(addr("limit"), t)
	VPXOR(sign, t, t)
	VMOVDQU(t, slot(sLimit))
	for i, v := range []uint64{golden, mixA, mixB} {
		constant(v, t)
		VMOVDQU(t, slot(sGold+2*i))
		VPSRLQ(imm(32), t, t)
		VMOVDQU(t, slot(sGold+2*i+1))
	}
	m, packAt, firstAt := param("max"), GP64(), GP64()
	LEAQ(packs, packAt)
	LEAQ(first, firstAt)
	VPXOR(t, t, t)
	VMOVDQU(t, slot(sMax))
	place, taken := GP64(), GP64()
	XORQ(place, place)
	XORQ(taken, taken)
	// product of x and a constant, mod 2^64, where x may have a high half
	mul := func(c int, x reg.VecVirtual, high bool) {
		u := vec()
		VPMULUDQ(slot(c+1), x, u)
		if high {
			w := vec()
			VPSRLQ(imm(32), x, w)
			VPMULUDQ(slot(c), w, w)
			VPADDQ(w, u, u)
		}
		VPSLLQ(imm(32), u, u)
		VPMULUDQ(slot(c), x, x)
		VPADDQ(u, x, x)
	}
	mix := func(x []reg.VecVirtual) {
		for _, c := range []struct {
			shift uint64
			mul   int
		}{{30, sA}, {27, sB}, {31, -1}} {
			for i := range x {
				u := vec()
				VPSRLQ(imm(c.shift), x[i], u)
				VPXOR(u, x[i], x[i])
				if c.mul >= 0 {
					mul(c.mul, x[i], true)
				}
			}
		}
	}
	n := 0
	laborWalk(width, map[int]int{4: 8, 8: 4}[width], list, place, taken, func(rest reg.Register) {
		n++
		ids := vec()
		if rest == nil {
			VMOVDQU(at(list, 0), ids)
		} else {
			w := GP64()
			mask := vec()
			MOVQ(rest, w)
			if width == 8 {
				SHLQ(imm(1), w)
			}
			NEGQ(w)
			VMOVDQU(indexed(firstAt, w, 4, 32), mask)
			VPMASKMOVD(at(list, 0), mask, ids)
		}
		x := []reg.VecVirtual{vec()}
		if width == 4 {
			x = append(x, vec())
			high := XMM()
			VEXTRACTI128(imm(1), ids, high)
			VPMOVZXDQ(ids.AsX(), x[0])
			VPMOVZXDQ(high, x[1])
		} else {
			VMOVDQA(ids, x[0])
		}
		for i := range x {
			mul(sGold, x[i], width == 8)
		}
		one, more := fmt.Sprintf("one%d", n), fmt.Sprintf("more%d", n)
		CMPQ(at(keys, 24), imm(0))
		JEQ(operand.LabelRef(one))
		for i := range x {
			h := []reg.VecVirtual{vec()}
			VPADDQ(slot(sPhase), x[i], h[0])
			mix(h)
			VPXOR(slot(sSign), h[0], h[0])
			bound := vec()
			VMOVDQU(slot(sFrom), bound)
			VPCMPGTQ(h[0], bound, bound) // less: the first key
			k, o := vec(), vec()
			VMOVDQU(slot(sOther), o)
			VMOVDQU(slot(sKey), k)
			VPBLENDVB(bound, k, o, k)
			VPADDQ(k, x[i], x[i])
		}
		JMP(operand.LabelRef(more))
		Label(one)
		for i := range x {
			VPADDQ(slot(sKey), x[i], x[i])
		}
		Label(more)
		mix(x)
		for i := range x {
			VPXOR(slot(sSign), x[i], x[i])
			VPCMPGTQ(slot(sLimit), x[i], x[i]) // more than the limit
		}
		max := XMM()
		VMOVDQU(slot(sMax), max)
		keep := GP64()
		for i := range x {
			VMOVMSKPD(x[i], keep.As32())
			XORL(imm(15), keep.As32())
			if rest != nil {
				// of the first rest ids, those of this part
				w := GP64()
				MOVQ(operand.I32(-1), w)
				BZHIQ(rest, w, w)
				if i > 0 {
					SHRQ(imm(4), w)
				}
				ANDL(w.As32(), keep.As32())
			}
			part := XMM()
			switch {
			case width == 8:
				// halves of the ids side by side
				low, high := XMM(), XMM()
				VEXTRACTI128(imm(1), ids, high)
				VSHUFPS(imm(0x88), high, ids.AsX(), low)
				VSHUFPS(imm(0xDD), high, ids.AsX(), high)
				MOVQ(keep, g)
				SHLQ(imm(4), g)
				VPSHUFB(indexed(packAt, g, 1, 0), low, part)
				VPSHUFB(indexed(packAt, g, 1, 0), high, high)
				highest := XMM()
				VMOVDQU(mem.Offset(32*sMax+16), highest)
				VPMAXUD(high, highest, highest)
				VMOVDQU(highest, mem.Offset(32*sMax+16))
			default:
				if i == 0 {
					VMOVDQA(ids.AsX(), part)
				} else {
					VEXTRACTI128(imm(1), ids, part)
				}
				MOVQ(keep, g)
				SHLQ(imm(4), g)
				VPSHUFB(indexed(packAt, g, 1, 0), part, part)
			}
			VMOVDQU(part, indexed(out, taken, 4, 0))
			VPMAXUD(part, max, max)
			POPCNTL(keep.As32(), keep.As32())
			ADDQ(keep, taken)
		}
		VMOVDQU(max, slot(sMax))
	})
	Store(place, ReturnIndex(0))
	Store(taken, ReturnIndex(1))
	low := XMM()
	VMOVDQU(slot(sMax), low)
	if width == 4 {
		VPMAXUD(at(m, 0), low, low)
		VMOVDQU(low, at(m, 0))
	} else { // as AVX-512 leaves them: low and high halves in turn
		high, pair := XMM(), XMM()
		VMOVDQU(mem.Offset(32*sMax+16), high)
		VPUNPCKLDQ(high, low, pair)
		VPMAXUD(at(m, 0), pair, pair)
		VMOVDQU(pair, at(m, 0))
		VPUNPCKHDQ(high, low, pair)
		VPMAXUD(at(m, 16), pair, pair)
		VMOVDQU(pair, at(m, 16))
	}
	VZEROUPPER()
	RET()
}
