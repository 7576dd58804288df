// Command rows generates the loops over feature rows (internal/simd/rows.go): weighted sums of rows
// named by a list, sums of columns, Adam, and copies of rows.
//
// The rows of a list are all over memory, so a sum asks for rows further on in the list while it
// adds some.
package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Offsets of rowsArgs, colsArgs, adamArgs and copyArgs in rows.go.
const (
	rowsOut, rowsX, rowsIdx, rowsN, rowsTable, rowsInit       = 0, 8, 16, 24, 32, 40
	rowsDim, rowsLeft, rowsFactor, rowsStart, rowsScale, mode = 48, 56, 64, 68, 72, 76
	rowsLast, rowsWeights                                     = 80, 88
	listsNext, listsLeft, listsInit, listsOut                 = 96, 104, 112, 120
	listsPartial, listsTodo, listsMode, listBytes             = 128, 136, 144, 12
	colsOut, colsX, colsRows, colsN, colsStride               = 0, 8, 16, 24, 32
	adamP, adamG, adamM, adamV, adamN, adamB1                 = 0, 8, 16, 24, 32, 40
	copyDst, copySrc, copyPos, copySlot, copyN                = 0, 8, 16, 24, 32
	copyLeft, copyBytes, copyStride                           = 40, 48, 56
)

// Values of mode.
const (
	modeGate   = 1 // out = out > 0 ? Scale · sum : 0
	modeStream = 2 // store around the caches
)

// ahead is how many places further on in a list rows are asked for, into L2: it has more misses in
// flight than L1.
const ahead = 16

const line = 64 // bytes that one prefetch fetches

// sideRows is how many rows are added side by side (rows.go has it too): each has a register for
// its address and one for its weight.
const sideRows = 8

// level is a vector width and the stripes that its registers hold.
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
		{"AVX2", 8, []int{8, 4, 1, 0}, func() reg.VecVirtual { return YMM() }},
		{"AVX512", 16, []int{16, 8, 4, 1, 0}, func() reg.VecVirtual { return ZMM() }},
	} {
		sumColumns(l)
		adam(l)
		copyRows(l)
	}
	sumListsSideBySide()
	sumListsInRegisters()
	prefetchParts()
	readRows()
	TEXT("storeFence", NOSPLIT, "func()")
	Doc("storeFence orders the stores around the caches before all later ones.")
	SFENCE()
	RET()
	Generate()
}

var masks Mem

// tailMasks is 8 times all ones and 8 times 0: a window of it masks the last elements at AVX2.
func tailMasks() {
	masks = GLOBL("tailMasks", RODATA|NOPTR)
	for i := range 16 {
		v := uint32(0)
		if i < 8 {
			v = 0xffffffff
		}
		DATA(4*i, U32(v))
	}
}

// rest is a vector's worth of memory access that stops after n elements, for the end of a row.
type rest struct {
	l level
	k reg.Register // AVX512
	m reg.VecVirtual
}

func (l level) rest(n reg.Register) rest {
	r := rest{l: l}
	at := GP64()
	if l.lanes == 16 {
		r.k = K()
		MOVQ(I32(-1), at)
		BZHIQ(n, at, at)
		KMOVW(at.As32(), r.k)
		return r
	}
	r.m = YMM()
	base := GP64()
	LEAQ(masks, base)
	MOVQ(U32(8), at)
	SUBQ(n, at)
	VMOVDQU(Mem{Base: base, Index: at, Scale: 4}, r.m)
	return r
}

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

// sumListsSideBySide makes each row out = start·init + Σ w_e·x[idx[e]], each product and each sum
// rounded, in the list's order; w_e = factor·table[idx[e]], or factor without a table. Lists and
// results are adjacent. Of a list longer than sideRows a part is added at a time, into another row
// until the last: out may hold gates. AVX2 has too few registers for sumListsInRegisters.
func sumListsSideBySide() {
	l := level{"AVX2", 8, nil, func() reg.VecVirtual { return YMM() }}
	TEXT("sumListsAVX2", NOSPLIT, "func(a *byte) bool")
	Pragma("noescape")
	Doc("sumListsAVX2 is SumLists. It returns false where a row is not there.")
	addresses, weights := AllocLocal(8*sideRows), AllocLocal(4*sideRows)
	args := Load(Param("a"), GP64())
	odd := load(args, rowsDim) // columns of the masked rest
	ANDQ(U8(7), odd)
	tail := l.rest(odd)
	Label("list")
	DECQ(field(args, listsLeft))
	JL(LabelRef("done"))
	pitch, p, q := GP64(), GP64(), GP64()
	bytesOf := func() {
		MOVQ(field(args, rowsDim), pitch)
		SHLQ(U8(2), pitch)
	}
	bytesOf()
	MOVQ(field(args, listsNext), p)
	for _, f := range [][2]int{{0, listsTodo}, {4, rowsFactor}, {8, rowsStart}} {
		MOVL(field(p, f[0]), q.As32())
		MOVL(q.As32(), field(args, f[1]))
	}
	ADDQ(U8(listBytes), p)
	MOVQ(p, field(args, listsNext))
	MOVQ(field(args, listsInit), p)
	MOVQ(p, field(args, rowsInit))
	TESTQ(p, p)
	JE(LabelRef("part"))
	ADDQ(pitch, p)
	MOVQ(p, field(args, listsInit))
	Label("part")
	bytesOf()
	n := GP64()
	MOVL(field(args, listsTodo), n.As32())
	CMPQ(n, U32(sideRows))
	JA(LabelRef("long"))
	MOVQ(field(args, listsOut), p)
	MOVQ(p, field(args, rowsOut))
	ADDQ(pitch, p)
	MOVQ(p, field(args, listsOut))
	MOVL(field(args, listsMode), q.As32())
	MOVL(q.As32(), field(args, mode))
	JMP(LabelRef("add"))
	Label("long")
	MOVQ(U32(sideRows), n)
	MOVQ(field(args, listsPartial), p)
	MOVQ(p, field(args, rowsOut))
	MOVL(U32(0), field(args, mode))
	Label("add")
	MOVQ(n, field(args, rowsN))
	idx, x, table, last := load(args, rowsIdx), load(args, rowsX), load(args, rowsTable),
		load(args, rowsLast)
	e, row, far, end := GP64(), GP64(), GP64(), GP64()
	f, w := XMM(), XMM()
	VMOVSS(field(args, rowsFactor), f)
	XORQ(e, e)
	JMP(LabelRef("named"))
	Label("name")
	MOVL(Mem{Base: idx, Index: e, Scale: 4}, row.As32())
	VMOVAPS(f, w)
	TESTQ(table, table)
	JE(LabelRef("weighed"))
	CMPQ(row, field(args, rowsWeights))
	JAE(LabelRef("bad"))
	VMULSS(Mem{Base: table, Index: row, Scale: 4}, f, w)
	Label("weighed")
	VMOVSS(w, weights.Idx(e, 4))
	IMULQ(pitch, row)
	ADDQ(x, row)
	CMPQ(row, last)
	JA(LabelRef("bad"))
	MOVQ(row, addresses.Idx(e, 8))
	LEAQ(Mem{Base: e, Disp: ahead}, far)
	CMPQ(far, field(args, rowsLeft))
	CMOVQGE(e, far) // past the end: this row again
	MOVL(Mem{Base: idx, Index: far, Scale: 4}, far.As32())
	IMULQ(pitch, far)
	ADDQ(x, far)
	LEAQ(Mem{Base: far, Index: pitch, Scale: 1}, end)
	Label("ask")
	PREFETCHT1(Mem{Base: far})
	ADDQ(U32(line), far)
	CMPQ(far, end)
	JB(LabelRef("ask"))
	INCQ(e)
	Label("named")
	CMPQ(e, n)
	JL(LabelRef("name"))
	for rows := range sideRows {
		CMPQ(n, U32(uint32(rows)))
		JE(LabelRef(fmt.Sprintf("rows%d", rows)))
	}
	for rows := sideRows; rows >= 0; rows-- {
		Label(fmt.Sprintf("rows%d", rows))
		sideBySide(l, tail, args, rows, addresses, weights)
		JMP(LabelRef("added"))
	}
	Label("added")
	MOVQ(field(args, rowsN), n)
	SUBQ(n, field(args, rowsLeft))
	SUBL(n.As32(), field(args, listsTodo))
	SHLQ(U8(2), n)
	ADDQ(n, field(args, rowsIdx))
	CMPL(field(args, listsTodo), U8(0))
	JE(LabelRef("list"))
	MOVQ(field(args, listsPartial), p)
	MOVQ(p, field(args, rowsInit))
	MOVL(U32(math.Float32bits(1)), field(args, rowsStart))
	JMP(LabelRef("part"))
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

// sideBySide adds so many rows.
func sideBySide(l level, tail rest, args reg.Register, rows int, addresses, weights Mem) {
	out, init, todo := load(args, rowsOut), load(args, rowsInit), load(args, rowsDim)
	address, weight := make([]reg.GPVirtual, rows), make([]reg.VecVirtual, rows)
	for e := range rows {
		address[e], weight[e] = GP64(), l.vec()
		MOVQ(addresses.Offset(8*e), address[e])
		VBROADCASTSS(weights.Offset(4*e), weight[e])
	}
	at := GP64() // bytes of the rows that are done
	XORQ(at, at)
	t, start := l.vec(), l.vec()
	sums := []reg.VecVirtual{l.vec(), l.vec()}
	for _, vectors := range []int{2, 1, 0} { // 0: the masked rest
		name := fmt.Sprintf("rows%dby%d", rows, vectors)
		count := max(vectors, 1)
		width := count * l.lanes
		Label(name)
		if vectors > 0 {
			CMPQ(todo, U32(uint32(width)))
			JL(LabelRef(fmt.Sprintf("rows%dby%d", rows, vectors-1)))
		} else {
			TESTQ(todo, todo)
			JE(LabelRef(name + "done"))
		}
		get := func(m Mem, v reg.VecVirtual) {
			if vectors > 0 {
				VMOVUPS(m, v)
			} else {
				tail.load(m, v)
			}
		}
		part := func(base reg.Register, v int) Mem {
			return Mem{Base: base, Index: at, Scale: 1, Disp: v * l.bytes()}
		}
		for v := range count {
			zero(l, sums[v])
		}
		TESTQ(init, init)
		JE(LabelRef(name + "add"))
		VBROADCASTSS(field(args, rowsStart), start)
		for v := range count {
			get(part(init, v), sums[v])
			VMULPS(sums[v], start, sums[v])
		}
		Label(name + "add")
		for e := range rows {
			for v := range count {
				if vectors > 0 {
					VMULPS(part(address[e], v), weight[e], t)
				} else {
					tail.load(part(address[e], v), t)
					VMULPS(t, weight[e], t)
				}
				VADDPS(t, sums[v], sums[v])
			}
		}
		TESTL(U32(modeGate), field(args, mode))
		JE(LabelRef(name + "store"))
		VBROADCASTSS(field(args, rowsScale), start)
		for v := range count {
			VMULPS(start, sums[v], sums[v])
		}
		zero(l, start)
		for v := range count {
			get(part(out, v), t)
			VCMPPS(U8(0x1e), start, t, t) // > 0, false for NaN
			VANDPS(t, sums[v], sums[v])
		}
		Label(name + "store")
		if vectors == 0 {
			tail.store(sums[0], part(out, 0))
			Label(name + "done")
			break
		}
		TESTL(U32(modeStream), field(args, mode))
		JE(LabelRef(name + "plain"))
		for v := range count {
			VMOVNTPS(sums[v], part(out, v))
		}
		JMP(LabelRef(name + "stored"))
		Label(name + "plain")
		for v := range count {
			VMOVUPS(sums[v], part(out, v))
		}
		Label(name + "stored")
		ADDQ(U32(uint32(width*4)), at)
		SUBQ(U32(uint32(width)), todo)
		JMP(LabelRef(name))
	}
}

// sumListsInRegisters makes the same rows with AVX-512. Its registers hold 256 columns of a result,
// so the rows of a list are read one after the other, each from its first line to its last: the
// order that the processor's own prefetchers follow. The row that comes ahead places later is asked
// for a line at a time, as this one is read.
func sumListsInRegisters() {
	l := level{"AVX512", 16, []int{16, 8, 4, 2, 1, 0}, func() reg.VecVirtual { return ZMM() }}
	TEXT("sumListsAVX512", NOSPLIT, "func(a *byte) bool")
	Pragma("noescape")
	Doc("sumListsAVX512 is SumLists. It returns false where a row is not there.")
	args := Load(Param("a"), GP64())
	x, pitch, odd := load(args, rowsX), load(args, rowsDim), GP64()
	MOVQ(pitch, odd)
	ANDQ(U8(15), odd) // columns of the masked rest
	tail := l.rest(odd)
	SHLQ(U8(2), pitch)
	// The list's last row: from there on it is asked for again.
	final := load(args, rowsLeft)
	SHLQ(U8(2), final)
	ADDQ(field(args, rowsIdx), final)
	SUBQ(U8(4), final)
	factor, start, scale := ZMM(), ZMM(), ZMM()
	VBROADCASTSS(field(args, rowsScale), scale)
	Label("list")
	DECQ(field(args, listsLeft))
	JL(LabelRef("done"))
	out, init, end, p := load(args, listsOut), load(args, listsInit), GP64(), GP64()
	MOVQ(field(args, listsNext), p)
	MOVL(field(p, 0), end.As32())
	SHLQ(U8(2), end)
	ADDQ(field(args, rowsIdx), end)
	VBROADCASTSS(field(p, 4), factor)
	VBROADCASTSS(field(p, 8), start)
	at, todo := GP64(), load(args, rowsDim)
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
		get := func(m Mem, v reg.VecVirtual) {
			if vectors > 0 {
				VMOVUPS(m, v)
			} else {
				tail.load(m, v)
			}
		}
		sums := all[:count]
		for v := range sums {
			zero(l, sums[v])
		}
		TESTQ(init, init)
		JE(LabelRef(name + "rows"))
		for v := range sums {
			get(part(init, v), sums[v])
			VMULPS(start, sums[v], sums[v])
		}
		Label(name + "rows")
		e, row, far, w, t := load(args, rowsIdx), GP64(), GP64(), l.vec(), l.vec()
		JMP(LabelRef(name + "more"))
		Label(name + "row")
		MOVL(Mem{Base: e}, row.As32())
		VMOVAPS(factor, w)
		MOVQ(field(args, rowsTable), far)
		TESTQ(far, far)
		JE(LabelRef(name + "weighed"))
		CMPQ(row, field(args, rowsWeights))
		JAE(LabelRef("bad"))
		VMULPS_BCST(Mem{Base: far, Index: row, Scale: 4}, factor, w)
		Label(name + "weighed")
		IMULQ(pitch, row)
		ADDQ(x, row)
		CMPQ(row, field(args, rowsLast))
		JA(LabelRef("bad"))
		LEAQ(Mem{Base: e, Disp: 4 * ahead}, far)
		CMPQ(far, final)
		CMOVQHI(final, far)
		MOVL(Mem{Base: far}, far.As32())
		IMULQ(pitch, far)
		ADDQ(x, far)
		for v := range sums {
			PREFETCHT0(part(far, v))
			if vectors > 0 {
				VMULPS(part(row, v), w, t)
			} else {
				tail.load(part(row, v), t)
				VMULPS(t, w, t)
			}
			VADDPS(t, sums[v], sums[v])
		}
		ADDQ(U8(4), e)
		Label(name + "more")
		CMPQ(e, end)
		JB(LabelRef(name + "row"))
		TESTQ(U32(modeGate), field(args, listsMode))
		JE(LabelRef(name + "store"))
		k := K()
		zero(l, w)
		for v := range sums {
			get(part(out, v), t)
			VCMPPS(U8(0x1e), w, t, k) // > 0, false for NaN
			VMULPS_Z(scale, sums[v], k, sums[v])
		}
		Label(name + "store")
		if vectors == 0 {
			tail.store(sums[0], part(out, 0))
			break
		}
		TESTQ(U32(modeStream), field(args, listsMode))
		JE(LabelRef(name + "plain"))
		for v := range sums {
			VMOVNTPS(sums[v], part(out, v))
		}
		JMP(LabelRef(name + "stored"))
		Label(name + "plain")
		for v := range sums {
			VMOVUPS(sums[v], part(out, v))
		}
		Label(name + "stored")
		ADDQ(U32(uint32(width*4)), at)
		SUBQ(U32(uint32(width)), todo)
		JMP(LabelRef(name))
	}
	Label("listed")
	MOVQ(end, field(args, rowsIdx))
	ADDQ(U8(listBytes), field(args, listsNext))
	ADDQ(pitch, field(args, listsOut))
	TESTQ(init, init)
	JE(LabelRef("list"))
	ADDQ(pitch, field(args, listsInit))
	JMP(LabelRef("list"))
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

// sumColumns makes out[c] = Σ_r x[r, c], rows in order.
func sumColumns(l level) {
	TEXT("sumColumns"+l.name, NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("sumColumns" + l.name + " is SumColumns.")
	args := Load(Param("a"), GP64())
	out, x, todo := load(args, colsOut), load(args, colsX), load(args, colsN)
	rows, pitch := load(args, colsRows), load(args, colsStride)
	SHLQ(U8(2), pitch)
	for s, vectors := range l.stripes {
		name := fmt.Sprintf("stripe%d", vectors)
		next := "done"
		if s+1 < len(l.stripes) {
			next = fmt.Sprintf("stripe%d", l.stripes[s+1])
		}
		Label(name)
		count := max(vectors, 1)
		width := count * l.lanes
		var tail rest
		if vectors > 0 {
			CMPQ(todo, U32(uint32(width)))
			JL(LabelRef(next))
		} else {
			TESTQ(todo, todo)
			JE(LabelRef("done"))
			tail = l.rest(todo)
		}
		at := func(base reg.Register, v int) Mem { return Mem{Base: base, Disp: v * l.bytes()} }
		sums := make([]reg.VecVirtual, count)
		for v := range sums {
			sums[v] = l.vec()
			zero(l, sums[v])
		}
		row, far, left := GP64(), GP64(), GP64()
		MOVQ(x, row)
		LEAQ(Mem{Base: x, Index: pitch, Scale: 8}, far)
		MOVQ(rows, left)
		Label(name + "row")
		asked := -line
		t := l.vec()
		for v := range sums {
			if v*l.bytes() >= asked+line {
				asked = v * l.bytes()
				PREFETCHT1(at(far, v))
			}
			if vectors > 0 {
				VADDPS(at(row, v), sums[v], sums[v])
			} else {
				tail.load(at(row, v), t)
				VADDPS(t, sums[v], sums[v])
			}
		}
		ADDQ(pitch, row)
		ADDQ(pitch, far)
		DECQ(left)
		JNE(LabelRef(name + "row"))
		if vectors > 0 {
			for v := range sums {
				VMOVUPS(sums[v], at(out, v))
			}
			ADDQ(U32(uint32(width*4)), out)
			ADDQ(U32(uint32(width*4)), x)
			SUBQ(U32(uint32(width)), todo)
			JMP(LabelRef(name))
		} else {
			tail.store(sums[0], at(out, 0))
		}
	}
	Label("done")
	VZEROUPPER()
	RET()
}

// adam makes one step of the optimiser.
func adam(l level) {
	TEXT("adam"+l.name, NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("adam" + l.name + " is Adam.")
	args := Load(Param("a"), GP64())
	p, g, m, v := load(args, adamP), load(args, adamG), load(args, adamM), load(args, adamV)
	n := load(args, adamN)
	var c [9]reg.VecVirtual // B1, C1, B2, C2, step, root, eps, L2, decay
	for i := range c {
		c[i] = l.vec()
		if l.lanes == 16 {
			VBROADCASTSS(field(args, adamB1+4*i), c[i])
		}
	}
	// AVX2 has too few registers for all of them.
	times := func(i int, x, dst reg.VecVirtual) {
		if l.lanes == 8 {
			t := l.vec()
			VBROADCASTSS(field(args, adamB1+4*i), t)
			VMULPS(t, x, dst)
			return
		}
		VMULPS(c[i], x, dst)
	}
	step := func(load func(reg.Register, reg.VecVirtual),
		store func(reg.VecVirtual, reg.Register)) {
		x, d, mi, vi, t := l.vec(), l.vec(), l.vec(), l.vec(), l.vec()
		load(p, x)
		load(g, d)
		load(m, mi)
		load(v, vi)
		times(7, x, t)
		VADDPS(t, d, d)
		times(8, x, t)
		VSUBPS(t, x, x)
		times(0, mi, mi)
		times(1, d, t)
		VADDPS(t, mi, mi)
		times(2, vi, vi)
		VMULPS(d, d, t)
		times(3, t, t)
		VADDPS(t, vi, vi)
		store(mi, m)
		store(vi, v)
		VSQRTPS(vi, t)
		times(5, t, t)
		if l.lanes == 8 {
			e := l.vec()
			VBROADCASTSS(field(args, adamB1+4*6), e)
			VADDPS(e, t, t)
		} else {
			VADDPS(c[6], t, t)
		}
		times(4, mi, mi)
		VDIVPS(t, mi, mi)
		VSUBPS(mi, x, x)
		store(x, p)
	}
	Label("loop")
	CMPQ(n, U32(uint32(l.lanes)))
	JL(LabelRef("rest"))
	step(func(b reg.Register, r reg.VecVirtual) { VMOVUPS(Mem{Base: b}, r) },
		func(r reg.VecVirtual, b reg.Register) { VMOVUPS(r, Mem{Base: b}) })
	for _, b := range []reg.Register{p, g, m, v} {
		ADDQ(U32(uint32(l.bytes())), b)
	}
	SUBQ(U32(uint32(l.lanes)), n)
	JMP(LabelRef("loop"))
	Label("rest")
	TESTQ(n, n)
	JE(LabelRef("done"))
	tail := l.rest(n)
	step(func(b reg.Register, r reg.VecVirtual) { tail.load(Mem{Base: b}, r) },
		func(r reg.VecVirtual, b reg.Register) { tail.store(r, Mem{Base: b}) })
	Label("done")
	VZEROUPPER()
	RET()
}

// copyRows copies row slot[i] of src to row pos[i] of dst around the caches, 64 bytes at a time.
func copyRows(l level) {
	TEXT("copyRows"+l.name, NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("copyRows" + l.name + " is CopyRows.")
	args := Load(Param("a"), GP64())
	pos, slot, n, left := load(args, copyPos), load(args, copySlot), load(args, copyN),
		load(args, copyLeft)
	src, dst := load(args, copySrc), load(args, copyDst)
	size, stride := load(args, copyBytes), load(args, copyStride)
	i := GP64()
	XORQ(i, i)
	Label("row")
	CMPQ(i, n)
	JGE(LabelRef("done"))
	from, to, far, at := GP64(), GP64(), GP64(), GP64()
	MOVL(Mem{Base: slot, Index: i, Scale: 4}, from.As32())
	LEAQ(Mem{Base: i, Disp: ahead}, far)
	CMPQ(far, left)
	CMOVQGE(i, far)
	MOVL(Mem{Base: slot, Index: far, Scale: 4}, far.As32())
	MOVL(Mem{Base: pos, Index: i, Scale: 4}, to.As32())
	IMULQ(size, from)
	IMULQ(size, far)
	IMULQ(stride, to)
	ADDQ(src, from)
	ADDQ(src, far)
	ADDQ(dst, to)
	XORQ(at, at)
	Label("line")
	PREFETCHT1(Mem{Base: far, Index: at, Scale: 1})
	for b := 0; b < line; b += l.bytes() {
		v := l.vec()
		VMOVUPS(Mem{Base: from, Index: at, Scale: 1, Disp: b}, v)
		VMOVNTPS(v, Mem{Base: to, Index: at, Scale: 1, Disp: b})
	}
	ADDQ(U32(line), at)
	CMPQ(at, size)
	JL(LabelRef("line"))
	INCQ(i)
	JMP(LabelRef("row"))
	Label("done")
	VZEROUPPER()
	RET()
}

// Offsets in prefetchArgs.
const prefetchBase, prefetchRows, prefetchN, prefetchShift, prefetchMagic = 0, 8, 16, 24, 32

// prefetchParts asks for one line of 64 bytes a row, of which it needs the number only: mulx and
// shrx are AVX2's companions.
func prefetchParts() {
	TEXT("prefetchParts", NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("prefetchParts is PrefetchParts.")
	args := Load(Param("a"), GP64())
	base, rows, n, shift := load(args, prefetchBase), load(args, prefetchRows),
		load(args, prefetchN), load(args, prefetchShift)
	MOVQ(field(args, prefetchMagic), reg.RDX)
	i := GP64()
	XORQ(i, i)
	Label("part")
	CMPQ(i, n)
	JGE(LabelRef("end"))
	at, low := GP64(), GP64()
	MOVQ(Mem{Base: rows, Index: i, Scale: 8}, at)
	SHRXQ(shift, at, at)
	MULXQ(at, low, at)
	SHLQ(U8(6), at)
	PREFETCHT0(Mem{Base: base, Index: at, Scale: 1})
	INCQ(i)
	JMP(LabelRef("part"))
	Label("end")
	RET()
}

// Offsets in readArgs.
const readX, readPitch, readList, readN, readFinal, readLast = 0, 8, 16, 24, 32, 40

// readRows reads a word of each line of the rows that a list names, and asks for the lines of later
// rows: the least that a kernel over these rows can do.
func readRows() {
	TEXT("readRows", NOSPLIT, "func(a *byte) bool")
	Pragma("noescape")
	Doc("readRows is ReadRows. It returns false where a row is not there.")
	args := Load(Param("a"), GP64())
	x, pitch, list, left := load(args, readX), load(args, readPitch), load(args, readList),
		load(args, readN)
	final, last := load(args, readFinal), load(args, readLast)
	row, far, stop, word, ok := GP64(), GP64(), GP64(), GP32(), GP8()
	JMP(LabelRef("more"))
	Label("row")
	MOVL(Mem{Base: list}, row.As32())
	LEAQ(Mem{Base: list, Disp: 4 * ahead}, far)
	CMPQ(far, final)
	CMOVQHI(final, far)
	MOVL(Mem{Base: far}, far.As32())
	IMULQ(pitch, row)
	IMULQ(pitch, far)
	ADDQ(x, row)
	ADDQ(x, far)
	CMPQ(row, last)
	JA(LabelRef("bad"))
	LEAQ(Mem{Base: row, Index: pitch, Scale: 1}, stop)
	Label("line")
	PREFETCHT0(Mem{Base: far})
	MOVL(Mem{Base: row}, word)
	ADDQ(U32(line), row)
	ADDQ(U32(line), far)
	CMPQ(row, stop)
	JB(LabelRef("line"))
	ADDQ(U8(4), list)
	Label("more")
	DECQ(left)
	JGE(LabelRef("row"))
	MOVB(U8(1), ok)
	Store(ok, ReturnIndex(0))
	RET()
	Label("bad")
	XORB(ok, ok)
	Store(ok, ReturnIndex(0))
	RET()
}
