// Command heads generates the loops of attention (internal/simd/dot.go, heads.go): dot products in
// 32 lanes, and sums of rows with a weight for each head.
//
// Both read rows from all over memory, one after the other, each from its first line to its last,
// and ask for the lines of the row that comes some places later in the list.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Offsets of dotArgs.
const (
	dotA, dotB, dotOut, dotHeads, dotDim = 0, 8, 16, 24, 32
	dotRows, dotPitchA, dotPitchB        = 40, 48, 56
	dotList, dotFinal, dotLast           = 64, 72, 80
	dotCounts, dotLeft                   = 88, 96
)

// Offsets of headArgs and of a termArgs in it.
const (
	sumOut, sumX, sumLast, sumHeadOf, sumCols = 0, 8, 16, 24, 32
	sumPitch, sumWeights, sumStride, sumHeads = 40, 48, 56, 64
	sumList, sumFinal, sumRows, sumEdges      = 72, 80, 88, 96
	sumCounts, sumLeft, sumStream, sumTerms   = 104, 112, 120, 128
	termX, termPitch, termWeights, termBytes  = 0, 8, 16, 24
)

const (
	dotLanes = 32 // partial sums of a dot product
	terms    = 3  // beside the list
)

// ahead is how many places further on in a list rows are asked for.
const ahead = 12

const line = 64 // bytes that one prefetch fetches

// level is a vector width and the stripes of a result that its registers hold.
type level struct {
	name    string
	lanes   int
	stripes []int // in vectors, widest first; 0 is the masked rest
	vec     func() reg.VecVirtual
}

func (l level) bytes() int { return 4 * l.lanes }

func main() {
	ConstraintExpr("amd64")
	tailMasks()
	for _, l := range []level{
		{"AVX2", 8, []int{8, 4, 2, 1, 0}, func() reg.VecVirtual { return YMM() }},
		{"AVX512", 16, []int{16, 8, 4, 2, 1, 0}, func() reg.VecVirtual { return ZMM() }},
	} {
		dots(l)
		sumHeadRows(l)
	}
	Generate()
}

var masks Mem

// tailMasks is 8 times all ones and 8 times 0: a window of it masks the last elements at AVX2.
func tailMasks() {
	masks = GLOBL("headMasks", RODATA|NOPTR)
	for i := range 16 {
		v := uint32(0)
		if i < 8 {
			v = 0xffffffff
		}
		DATA(4*i, U32(v))
	}
}

// rest is a vector's worth of memory access that stops after some elements.
type rest struct {
	l level
	k reg.Register // AVX512
	m reg.VecVirtual
}

// rest stops after n elements, of which there may be more than lanes, or fewer than 0.
func (l level) rest(n reg.Register) rest {
	r := rest{l: l}
	at, most := GP64(), GP64()
	MOVQ(n, at)
	XORQ(most, most)
	TESTQ(at, at)
	CMOVQLT(most, at)
	MOVQ(U32(uint32(l.lanes)), most)
	CMPQ(at, most)
	CMOVQGT(most, at)
	if l.lanes == 16 {
		r.k = K()
		MOVQ(I32(-1), most)
		BZHIQ(at, most, most)
		KMOVW(most.As32(), r.k)
		return r
	}
	r.m = YMM()
	base := GP64()
	LEAQ(masks, base)
	SUBQ(at, most)
	VMOVDQU(Mem{Base: base, Index: most, Scale: 4}, r.m)
	return r
}

// load sets the other elements to 0.
func (r rest) load(m Mem, v reg.VecVirtual) {
	if r.l.lanes == 16 {
		VMOVUPS_Z(m, r.k, v)
	} else {
		VMASKMOVPS(m, r.m, v)
	}
}

func (r rest) store(v reg.VecVirtual, m Mem) {
	if r.l.lanes == 16 {
		VMOVUPS(v, r.k, m)
	} else {
		VMASKMOVPS(v, r.m, m)
	}
}

func field(args reg.Register, offset int) Mem { return Mem{Base: args, Disp: offset} }

func load(args reg.Register, offset int) reg.GPVirtual {
	r := GP64()
	MOVQ(field(args, offset), r)
	return r
}

func zero(l level, v reg.VecVirtual) {
	if l.lanes == 16 {
		VPXORD(v, v, v)
	} else {
		VXORPS(v, v, v)
	}
}

// dots makes the dot products of some rows, head by head: each in 32 lanes, 32 elements at a time
// and then a rest, whose missing elements are 0, and adds the lanes as a tree.
func dots(l level) {
	TEXT("dotHeads"+l.name, NOSPLIT, "func(a *byte) bool")
	Pragma("noescape")
	Doc("dotHeads" + l.name + " is DotHeads. It returns false where a row is not there.")
	args := Load(Param("a"), GP64())
	odd := load(args, dotDim)
	ANDQ(U8(dotLanes-1), odd)
	var tails []rest
	for range dotLanes / l.lanes {
		tails = append(tails, l.rest(odd))
		SUBQ(U32(uint32(l.lanes)), odd)
	}
	next, list, out := load(args, dotB), load(args, dotList), load(args, dotOut)
	a, b, far := GP64(), GP64(), GP64()
	TESTQ(list, list)
	JE(LabelRef("row"))
	Label("list")
	DECQ(field(args, dotLeft))
	JL(LabelRef("done"))
	MOVQ(field(args, dotCounts), a)
	MOVL(Mem{Base: a}, a.As32())
	MOVQ(a, field(args, dotRows))
	ADDQ(U8(4), field(args, dotCounts))
	Label("row")
	DECQ(field(args, dotRows))
	JL(LabelRef("listed"))
	MOVQ(field(args, dotA), a)
	MOVQ(next, b)
	MOVQ(next, far) // rows in order come by themselves
	TESTQ(list, list)
	JE(LabelRef("found"))
	MOVL(Mem{Base: list}, b.As32())
	IMULQ(field(args, dotPitchB), b)
	ADDQ(next, b)
	CMPQ(b, field(args, dotLast))
	JA(LabelRef("bad"))
	LEAQ(Mem{Base: list, Disp: 4 * ahead}, far)
	CMPQ(far, field(args, dotFinal))
	CMOVQHI(field(args, dotFinal), far)
	MOVL(Mem{Base: far}, far.As32())
	IMULQ(field(args, dotPitchB), far)
	ADDQ(next, far)
	ADDQ(U8(4), list)
	Label("found")
	heads := load(args, dotHeads)
	Label("head")
	sums := make([]reg.VecVirtual, len(tails))
	for v := range sums {
		sums[v] = l.vec()
		zero(l, sums[v])
	}
	n, t := load(args, dotDim), l.vec()
	part := func(get func(v int)) {
		for v := range sums {
			get(v)
			VADDPS(t, sums[v], sums[v])
		}
	}
	Label("chunk")
	CMPQ(n, U32(dotLanes))
	JL(LabelRef("rest"))
	PREFETCHT0(Mem{Base: far})
	PREFETCHT0(Mem{Base: far, Disp: line})
	part(func(v int) {
		VMOVUPS(Mem{Base: a, Disp: v * l.bytes()}, t)
		VMULPS(Mem{Base: b, Disp: v * l.bytes()}, t, t)
	})
	for _, p := range []reg.GPVirtual{a, b, far} {
		ADDQ(U32(4*dotLanes), p)
	}
	SUBQ(U32(dotLanes), n)
	JMP(LabelRef("chunk"))
	Label("rest")
	TESTQ(n, n)
	JE(LabelRef("tree"))
	PREFETCHT0(Mem{Base: far})
	u := l.vec()
	part(func(v int) {
		tails[v].load(Mem{Base: a, Disp: v * l.bytes()}, t)
		tails[v].load(Mem{Base: b, Disp: v * l.bytes()}, u)
		VMULPS(u, t, t)
	})
	for _, p := range []reg.GPVirtual{a, b, far} {
		LEAQ(Mem{Base: p, Index: n, Scale: 4}, p)
	}
	Label("tree")
	for apart := len(sums) / 2; apart > 0; apart /= 2 {
		for v := range apart {
			VADDPS(sums[v+apart], sums[v], sums[v])
		}
	}
	half := sums[0].AsY()
	if l.lanes == 16 {
		high := YMM()
		VEXTRACTF64X4(U8(1), sums[0], high)
		VADDPS(high, half, half)
	}
	low, high := sums[0].AsX(), XMM()
	VEXTRACTF128(U8(1), half, high)
	VADDPS(high, low, low)
	VMOVHLPS(low, low, high)
	VADDPS(high, low, low)
	VMOVSHDUP(low, high)
	VADDSS(high, low, low)
	VMOVSS(low, Mem{Base: out})
	ADDQ(U8(4), out)
	DECQ(heads)
	JNE(LabelRef("head"))
	TESTQ(list, list)
	JNE(LabelRef("row"))
	ADDQ(field(args, dotPitchB), next)
	MOVQ(field(args, dotPitchA), a)
	ADDQ(a, field(args, dotA))
	JMP(LabelRef("row"))
	Label("listed")
	TESTQ(list, list)
	JE(LabelRef("done"))
	MOVQ(field(args, dotPitchA), a)
	ADDQ(a, field(args, dotA))
	JMP(LabelRef("list"))
	end()
}

// end is that of a loop over what may not be there.
func end() {
	ok := GP8()
	Label("bad")
	XORB(ok, ok)
	JMP(LabelRef("end"))
	Label("done")
	MOVB(U8(1), ok)
	Label("end")
	VZEROUPPER()
	Store(ok, ReturnIndex(0))
	RET()
}

// sumHeadRows makes each row out = first term + Σ_e w_e·x[row(e)] + other terms, each product and
// each sum rounded, where the weight of a column is that of its head. The heads' weights are in the
// lanes of one register, and headOf permutes them to the columns'.
func sumHeadRows(l level) {
	TEXT("sumHeads"+l.name, NOSPLIT, "func(a *byte) bool")
	Pragma("noescape")
	Doc("sumHeads" + l.name + " is SumHeads. It returns false where a row is not there.")
	args := Load(Param("a"), GP64())
	odd := load(args, sumCols)
	ANDQ(U32(uint32(l.lanes-1)), odd)
	tail := l.rest(odd)
	heads := l.rest(load(args, sumHeads))
	pitch, x, first := load(args, sumPitch), load(args, sumX), load(args, sumList)
	Label("list")
	DECQ(field(args, sumLeft))
	JL(LabelRef("done"))
	last, at, todo := GP64(), GP64(), load(args, sumCols)
	MOVQ(field(args, sumCounts), last)
	MOVL(Mem{Base: last}, last.As32())
	LEAQ(Mem{Base: first, Index: last, Scale: 4}, last)
	XORQ(at, at)
	// The same for all stripes: clearing a register counts as reading it.
	all := make([]reg.VecVirtual, l.stripes[0])
	for v := range all {
		all[v] = l.vec()
	}
	for s, vectors := range l.stripes {
		name := fmt.Sprintf("stripe%d", vectors)
		next := "listed"
		if s+1 < len(l.stripes) {
			next = fmt.Sprintf("stripe%d", l.stripes[s+1])
		}
		Label(name)
		count := max(vectors, 1)
		width := count * l.lanes
		if vectors > 0 {
			CMPQ(todo, U32(uint32(width)))
			JL(LabelRef(next))
		} else {
			TESTQ(todo, todo)
			JE(LabelRef(next))
		}
		part := func(base reg.Register, v int) Mem {
			return Mem{Base: base, Index: at, Scale: 1, Disp: v * l.bytes()}
		}
		sums := all[:count]
		for v := range sums {
			zero(l, sums[v])
		}
		e, row, far, p := GP64(), GP64(), GP64(), GP64()
		w, t, u := l.vec(), l.vec(), l.vec()
		// add adds the row times the weights at p.
		add := func(asks bool) {
			heads.load(Mem{Base: p}, w)
			MOVQ(field(args, sumHeadOf), p)
			for v := range sums {
				if asks && v*l.bytes()%line == 0 {
					PREFETCHT0(part(far, v))
				}
				if vectors > 0 {
					VMOVUPS(part(p, v), t)
					VPERMPS(w, t, t)
					VMULPS(part(row, v), t, t)
				} else {
					tail.load(part(p, v), t)
					VPERMPS(w, t, t)
					tail.load(part(row, v), u)
					VMULPS(u, t, t)
				}
				VADDPS(t, sums[v], sums[v])
			}
		}
		term := func(i int) {
			of := sumTerms + i*termBytes
			after := fmt.Sprintf("%sterm%d", name, i)
			MOVQ(field(args, of+termX), row)
			TESTQ(row, row)
			JE(LabelRef(after))
			MOVQ(field(args, of+termWeights), p)
			add(false)
			Label(after)
		}
		term(0)
		MOVQ(first, e)
		JMP(LabelRef(name + "more"))
		Label(name + "row")
		MOVL(Mem{Base: e}, row.As32())
		LEAQ(Mem{Base: e, Disp: 4 * ahead}, far)
		CMPQ(far, field(args, sumFinal))
		CMOVQHI(field(args, sumFinal), far)
		MOVL(Mem{Base: far}, far.As32())
		MOVQ(field(args, sumRows), p)
		TESTQ(p, p)
		JE(LabelRef(name + "rows"))
		CMPQ(row, field(args, sumEdges)) // the list is of edges
		JAE(LabelRef("bad"))
		CMPQ(far, field(args, sumEdges))
		CMOVQCC(row, far)
		edge := GP64()
		MOVQ(row, edge)
		MOVL(Mem{Base: p, Index: row, Scale: 4}, row.As32())
		MOVL(Mem{Base: p, Index: far, Scale: 4}, p.As32())
		IMULQ(field(args, sumStride), far)
		ADDQ(field(args, sumWeights), far)
		PREFETCHT0(Mem{Base: far})
		MOVQ(p, far)
		MOVQ(edge, p)
		IMULQ(field(args, sumStride), p)
		JMP(LabelRef(name + "weighed"))
		Label(name + "rows") // of edges in order
		MOVQ(e, p)
		SUBQ(field(args, sumList), p)
		SHRQ(U8(2), p)
		IMULQ(field(args, sumStride), p)
		Label(name + "weighed")
		ADDQ(field(args, sumWeights), p)
		IMULQ(pitch, row)
		ADDQ(x, row)
		CMPQ(row, field(args, sumLast))
		JA(LabelRef("bad"))
		IMULQ(pitch, far)
		ADDQ(x, far)
		add(true)
		ADDQ(U8(4), e)
		Label(name + "more")
		CMPQ(e, last)
		JB(LabelRef(name + "row"))
		for i := 1; i < terms; i++ {
			term(i)
		}
		MOVQ(field(args, sumOut), p)
		if vectors == 0 {
			tail.store(sums[0], part(p, 0))
			break
		}
		CMPQ(field(args, sumStream), U8(0))
		JE(LabelRef(name + "plain"))
		for v := range sums {
			VMOVNTPS(sums[v], part(p, v))
		}
		JMP(LabelRef(name + "stored"))
		Label(name + "plain")
		for v := range sums {
			VMOVUPS(sums[v], part(p, v))
		}
		Label(name + "stored")
		ADDQ(U32(uint32(width*4)), at)
		SUBQ(U32(uint32(width)), todo)
		JMP(LabelRef(name))
	}
	Label("listed")
	MOVQ(last, first)
	ADDQ(U8(4), field(args, sumCounts))
	ADDQ(pitch, field(args, sumOut))
	for i := range terms {
		of := sumTerms + i*termBytes
		by := GP64()
		MOVQ(field(args, of+termX), by)
		TESTQ(by, by)
		JE(LabelRef(fmt.Sprintf("term%d", i)))
		ADDQ(field(args, of+termPitch), by)
		MOVQ(by, field(args, of+termX))
		MOVQ(field(args, sumStride), by)
		ADDQ(by, field(args, of+termWeights))
		Label(fmt.Sprintf("term%d", i))
	}
	JMP(LabelRef("list"))
	end()
}
