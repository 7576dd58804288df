// Command heads generates the loops of attention (internal/simd/dot.go, heads.go, softmax.go): dot
// products in 32 lanes, sums of rows with a weight for each head, and the softmax.
//
// The first two read rows from all over memory, one after the other, each from its first line to
// its last, and ask for the lines of the row that comes some places later in the list.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"helios/tools/simdgen/vec"
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

// Places ahead in a list for which rows are asked: into L2, which has more misses in flight than
// L1, and soon into L1.
const (
	ahead = 32
	soon  = 6
)

const line = 64 // bytes that one prefetch fetches

func main() {
	ConstraintExpr("amd64")
	vec.TailMasks("headMasks")
	for _, l := range []vec.Level{
		vec.AVX2(8, 4, 2, 1, 0),
		vec.AVX512(16, 8, 4, 2, 1, 0),
	} {
		dots(l)
		sumHeadRows(l)
	}
	softmaxes()
	Generate()
}

// dots makes the dot products of some rows, head by head: each in 32 lanes, 32 elements at a time
// and then a rest, whose missing elements are 0, and adds the lanes as a tree.
func dots(l vec.Level) {
	TEXT("dotHeads"+l.Name, NOSPLIT, "func(a *byte) bool")
	Pragma("noescape")
	Doc("dotHeads" + l.Name + " is DotHeads. It returns false where a row is not there.")
	args := Load(Param("a"), GP64())
	first, counts := vec.Own(args, dotA), vec.Own(args, dotCounts)
	odd := vec.Arg(args, dotDim)
	ANDQ(U8(dotLanes-1), odd)
	var tails []vec.Rest
	for range dotLanes / l.Lanes {
		tails = append(tails, l.Clamped(odd))
		SUBQ(U32(uint32(l.Lanes)), odd)
	}
	next, list, out := vec.Arg(args, dotB), vec.Arg(args, dotList), vec.Arg(args, dotOut)
	a, b, far, near := GP64(), GP64(), GP64(), GP64()
	TESTQ(list, list)
	JE(LabelRef("row"))
	Label("list")
	DECQ(vec.Field(args, dotLeft))
	JL(LabelRef("done"))
	MOVQ(counts, a)
	MOVL(Mem{Base: a}, a.As32())
	MOVQ(a, vec.Field(args, dotRows))
	ADDQ(U8(4), counts)
	Label("row")
	DECQ(vec.Field(args, dotRows))
	JL(LabelRef("listed"))
	MOVQ(first, a)
	MOVQ(next, b)
	TESTQ(list, list)
	JNE(LabelRef("named"))
	IMUL3Q(U32(ahead), vec.Field(args, dotPitchB), far)
	ADDQ(next, far)
	IMUL3Q(U32(soon), vec.Field(args, dotPitchB), near)
	ADDQ(next, near)
	JMP(LabelRef("found"))
	Label("named")
	MOVL(Mem{Base: list}, b.As32())
	IMULQ(vec.Field(args, dotPitchB), b)
	ADDQ(next, b)
	CMPQ(b, vec.Field(args, dotLast))
	JA(LabelRef("bad"))
	for _, f := range []struct {
		places int
		row    reg.GPVirtual
	}{{ahead, far}, {soon, near}} {
		listed(list, f.places, vec.Field(args, dotFinal), f.row)
		IMULQ(vec.Field(args, dotPitchB), f.row)
		ADDQ(next, f.row)
	}
	ADDQ(U8(4), list)
	Label("found")
	heads := vec.Arg(args, dotHeads)
	Label("head")
	sums := make([]reg.VecVirtual, len(tails))
	for v := range sums {
		sums[v] = l.Vec()
		l.Zero(sums[v])
	}
	n, t := vec.Arg(args, dotDim), l.Vec()
	part := func(get func(v int)) {
		for v := range sums {
			get(v)
			VADDPS(t, sums[v], sums[v])
		}
	}
	Label("chunk")
	CMPQ(n, U32(dotLanes))
	JL(LabelRef("rest"))
	ask(far, near, 0)
	ask(far, near, line)
	part(func(v int) {
		VMOVUPS(Mem{Base: a, Disp: v * l.Bytes()}, t)
		VMULPS(Mem{Base: b, Disp: v * l.Bytes()}, t, t)
	})
	for _, p := range []reg.GPVirtual{a, b, far, near} {
		ADDQ(U32(4*dotLanes), p)
	}
	SUBQ(U32(dotLanes), n)
	JMP(LabelRef("chunk"))
	Label("rest")
	TESTQ(n, n)
	JE(LabelRef("tree"))
	ask(far, near, 0)
	u := l.Vec()
	part(func(v int) {
		tails[v].Load(Mem{Base: a, Disp: v * l.Bytes()}, t)
		tails[v].Load(Mem{Base: b, Disp: v * l.Bytes()}, u)
		VMULPS(u, t, t)
	})
	for _, p := range []reg.GPVirtual{a, b, far, near} {
		LEAQ(Mem{Base: p, Index: n, Scale: 4}, p)
	}
	Label("tree")
	for apart := len(sums) / 2; apart > 0; apart /= 2 {
		for v := range apart {
			VADDPS(sums[v+apart], sums[v], sums[v])
		}
	}
	half := sums[0].AsY()
	if l.Lanes == 16 {
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
	ADDQ(vec.Field(args, dotPitchB), next)
	MOVQ(vec.Field(args, dotPitchA), a)
	ADDQ(a, first)
	JMP(LabelRef("row"))
	Label("listed")
	TESTQ(list, list)
	JE(LabelRef("done"))
	MOVQ(vec.Field(args, dotPitchA), a)
	ADDQ(a, first)
	JMP(LabelRef("list"))
	vec.End()
}

// listed loads the element so many places behind e in a list, at most its final one.
func listed(e reg.Register, places int, final Mem, to reg.GPVirtual) {
	LEAQ(Mem{Base: e, Disp: 4 * places}, to)
	CMPQ(to, final)
	CMOVQHI(final, to)
	MOVL(Mem{Base: to}, to.As32())
}

// ask asks for a line of two rows that come later.
func ask(far, near reg.Register, disp int) {
	PREFETCHT1(Mem{Base: far, Disp: disp})
	PREFETCHT0(Mem{Base: near, Disp: disp})
}

// sumHeadRows makes each row out = first term + Σ_e w_e·x[row(e)] + other terms, each product and
// each sum rounded, where the weight of a column is that of its head. The heads' weights are in the
// lanes of one register, and headOf permutes them to the columns'.
func sumHeadRows(l vec.Level) {
	TEXT("sumHeads"+l.Name, NOSPLIT, "func(a *byte) bool")
	Pragma("noescape")
	Doc("sumHeads" + l.Name + " is SumHeads. It returns false where a row is not there.")
	args := Load(Param("a"), GP64())
	out, counts := vec.Own(args, sumOut), vec.Own(args, sumCounts)
	var termRow, termWeight [terms]Mem
	for i := range terms {
		of := sumTerms + i*termBytes
		termRow[i], termWeight[i] = vec.Own(args, of+termX), vec.Own(args, of+termWeights)
	}
	odd := vec.Arg(args, sumCols)
	ANDQ(U32(uint32(l.Lanes-1)), odd)
	tail := l.Clamped(odd)
	heads := l.Clamped(vec.Arg(args, sumHeads))
	pitch, x, first := vec.Arg(args, sumPitch), vec.Arg(args, sumX), vec.Arg(args, sumList)
	Label("list")
	DECQ(vec.Field(args, sumLeft))
	JL(LabelRef("done"))
	last, pos, todo := GP64(), GP64(), vec.Arg(args, sumCols)
	MOVQ(counts, last)
	MOVL(Mem{Base: last}, last.As32())
	LEAQ(Mem{Base: first, Index: last, Scale: 4}, last)
	XORQ(pos, pos)
	// The same for all stripes: clearing a register counts as reading it.
	all := make([]reg.VecVirtual, l.Stripes[0])
	for v := range all {
		all[v] = l.Vec()
	}
	l.Each(todo, vec.ByWidth, "listed", func(s vec.Stripe) {
		name := s.Name
		part := func(base reg.Register, v int) Mem {
			return Mem{Base: base, Index: pos, Scale: 1, Disp: v * l.Bytes()}
		}
		sums := all[:s.Count]
		for v := range sums {
			l.Zero(sums[v])
		}
		e, row, far, near, p := GP64(), GP64(), GP64(), GP64(), GP64()
		w, t, u := l.Vec(), l.Vec(), l.Vec()
		// add adds the row times the weights at p.
		add := func(asks bool) {
			heads.Load(Mem{Base: p}, w)
			MOVQ(vec.Field(args, sumHeadOf), p)
			for v := range sums {
				if asks && v*l.Bytes()%line == 0 {
					PREFETCHT1(part(far, v))
					PREFETCHT0(part(near, v))
				}
				if s.Vectors > 0 {
					VMOVUPS(part(p, v), t)
					VPERMPS(w, t, t)
					VMULPS(part(row, v), t, t)
				} else {
					tail.Load(part(p, v), t)
					VPERMPS(w, t, t)
					tail.Load(part(row, v), u)
					VMULPS(u, t, t)
				}
				VADDPS(t, sums[v], sums[v])
			}
		}
		term := func(i int) {
			after := fmt.Sprintf("%sterm%d", name, i)
			MOVQ(termRow[i], row)
			TESTQ(row, row)
			JE(LabelRef(after))
			MOVQ(termWeight[i], p)
			add(false)
			Label(after)
		}
		term(0)
		MOVQ(first, e)
		JMP(LabelRef(name + "more"))
		Label(name + "row")
		MOVL(Mem{Base: e}, row.As32())
		listed(e, ahead, vec.Field(args, sumFinal), far)
		listed(e, soon, vec.Field(args, sumFinal), near)
		MOVQ(vec.Field(args, sumRows), p)
		TESTQ(p, p)
		JE(LabelRef(name + "rows"))
		CMPQ(row, vec.Field(args, sumEdges)) // the list is of edges
		JAE(LabelRef("bad"))
		edge := GP64()
		for _, later := range []reg.GPVirtual{far, near} {
			CMPQ(later, vec.Field(args, sumEdges))
			CMOVQCC(row, later)
			MOVQ(later, edge)
			MOVL(Mem{Base: p, Index: later, Scale: 4}, later.As32())
			IMULQ(vec.Field(args, sumStride), edge)
			ADDQ(vec.Field(args, sumWeights), edge)
			PREFETCHT0(Mem{Base: edge})
		}
		MOVQ(row, edge)
		MOVL(Mem{Base: p, Index: row, Scale: 4}, row.As32())
		MOVQ(edge, p)
		IMULQ(vec.Field(args, sumStride), p)
		JMP(LabelRef(name + "weighed"))
		Label(name + "rows") // of edges in order
		MOVQ(e, p)
		SUBQ(vec.Field(args, sumList), p)
		SHRQ(U8(2), p)
		IMULQ(vec.Field(args, sumStride), p)
		Label(name + "weighed")
		ADDQ(vec.Field(args, sumWeights), p)
		IMULQ(pitch, row)
		ADDQ(x, row)
		CMPQ(row, vec.Field(args, sumLast))
		JA(LabelRef("bad"))
		for _, later := range []reg.GPVirtual{far, near} {
			IMULQ(pitch, later)
			ADDQ(x, later)
		}
		add(true)
		ADDQ(U8(4), e)
		Label(name + "more")
		CMPQ(e, last)
		JB(LabelRef(name + "row"))
		for i := 1; i < terms; i++ {
			term(i)
		}
		MOVQ(out, p)
		if s.Vectors == 0 {
			tail.Store(sums[0], part(p, 0))
			return
		}
		s.Store(sums, func(v int) Mem { return part(p, v) },
			func() { CMPQ(vec.Field(args, sumStream), U8(0)) })
		s.Next(todo, pos)
	})
	Label("listed")
	MOVQ(last, first)
	ADDQ(U8(4), counts)
	ADDQ(pitch, out)
	for i := range terms {
		by := GP64()
		MOVQ(termRow[i], by)
		TESTQ(by, by)
		JE(LabelRef(fmt.Sprintf("term%d", i)))
		ADDQ(vec.Field(args, sumTerms+i*termBytes+termPitch), by)
		MOVQ(by, termRow[i])
		MOVQ(vec.Field(args, sumStride), by)
		ADDQ(by, termWeight[i])
		Label(fmt.Sprintf("term%d", i))
	}
	JMP(LabelRef("list"))
	vec.End()
}
