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

	"helios/tools/simdgen/vec"
)

// Offsets of rowsArgs, colsArgs, adamArgs and copyArgs in rows.go.
const (
	rowsX, rowsIdx, rowsN, rowsTable                          = 0, 8, 16, 24
	rowsDim, rowsLeft, rowsFactor, rowsStart, rowsScale, mode = 32, 40, 48, 52, 56, 60
	rowsLast, rowsWeights                                     = 64, 72
	listsNext, listsLeft, listsInit, listsOut                 = 80, 88, 96, 104
	listsPartial, listsTodo, listsMode, listBytes             = 112, 120, 128, 12
	listsMap, listsMapped, listsRows                          = 136, 144, 152
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

// Places ahead in a list for which rows are asked: into L2, which has more misses in flight than
// L1, and soon into L1, where the lines come in the order of the reads.
const (
	ahead = 32
	soon  = 6
)

const line = 64 // bytes that one prefetch fetches

// sideRows is the number of rows added side by side (as in rows.go): each has a register for
// its address and one for its weight.
const sideRows = 8

func main() {
	ConstraintExpr("amd64")
	vec.TailMasks("tailMasks")
	for _, l := range []vec.Level{
		vec.AVX2(8, 4, 1, 0),
		vec.AVX512(16, 8, 4, 1, 0),
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

// sumListsSideBySide makes each row out = start·init + Σ w_e·x[idx[e]], each product and each sum
// rounded, in the list's order; w_e = factor·table[idx[e]], or factor without a table. Lists and
// results are adjacent. Of a list longer than sideRows a part is added at a time, into another row
// until the last: out may hold gates. AVX2 has too few registers for sumListsInRegisters.
func sumListsSideBySide() {
	l := vec.AVX2()
	TEXT("sumListsAVX2", NOSPLIT, "func(a *byte) bool")
	Pragma("noescape")
	Doc("sumListsAVX2 is SumLists. It returns false where a row is not there.")
	addresses, weights := AllocLocal(8*sideRows), AllocLocal(4*sideRows)
	args := Load(Param("a"), GP64())
	list, lists := vec.Own(args, rowsIdx), vec.Own(args, listsNext)
	inits, outs := vec.Own(args, listsInit), vec.Own(args, listsOut)
	init, out := AllocLocal(8), AllocLocal(8) // of the rows that are added side by side
	odd := vec.Arg(args, rowsDim)             // columns of the masked rest
	ANDQ(U8(7), odd)
	tail := l.Rest(odd)
	Label("list")
	DECQ(vec.Field(args, listsLeft))
	JL(LabelRef("done"))
	pitch, p, q := GP64(), GP64(), GP64()
	bytesOf := func() {
		MOVQ(vec.Field(args, rowsDim), pitch)
		SHLQ(U8(2), pitch)
	}
	bytesOf()
	MOVQ(lists, p)
	for _, f := range [][2]int{{0, listsTodo}, {4, rowsFactor}, {8, rowsStart}} {
		MOVL(vec.Field(p, f[0]), q.As32())
		MOVL(q.As32(), vec.Field(args, f[1]))
	}
	ADDQ(U8(listBytes), p)
	MOVQ(p, lists)
	MOVQ(inits, p)
	MOVQ(p, init)
	TESTQ(p, p)
	JE(LabelRef("part"))
	ADDQ(pitch, p)
	MOVQ(p, inits)
	Label("part")
	bytesOf()
	n := GP64()
	MOVL(vec.Field(args, listsTodo), n.As32())
	CMPQ(n, U32(sideRows))
	JA(LabelRef("long"))
	MOVQ(outs, p)
	MOVQ(p, out)
	ADDQ(pitch, p)
	MOVQ(p, outs)
	MOVL(vec.Field(args, listsMode), q.As32())
	MOVL(q.As32(), vec.Field(args, mode))
	JMP(LabelRef("add"))
	Label("long")
	MOVQ(U32(sideRows), n)
	MOVQ(vec.Field(args, listsPartial), p)
	MOVQ(p, out)
	MOVL(U32(0), vec.Field(args, mode))
	Label("add")
	MOVQ(n, vec.Field(args, rowsN))
	idx, x, table, last := GP64(), vec.Arg(args, rowsX), vec.Arg(args, rowsTable),
		vec.Arg(args, rowsLast)
	MOVQ(list, idx)
	e, row, far, end := GP64(), GP64(), GP64(), GP64()
	f, w := XMM(), XMM()
	VMOVSS(vec.Field(args, rowsFactor), f)
	XORQ(e, e)
	JMP(LabelRef("named"))
	Label("name")
	MOVL(Mem{Base: idx, Index: e, Scale: 4}, row.As32())
	VMOVAPS(f, w)
	TESTQ(table, table)
	JE(LabelRef("weighed"))
	CMPQ(row, vec.Field(args, rowsWeights))
	JAE(LabelRef("bad"))
	VMULSS(Mem{Base: table, Index: row, Scale: 4}, f, w)
	Label("weighed")
	VMOVSS(w, weights.Idx(e, 4))
	mapped(args, row, far, "row", "bad")
	IMULQ(pitch, row)
	ADDQ(x, row)
	CMPQ(row, last)
	JA(LabelRef("bad"))
	MOVQ(row, addresses.Idx(e, 8))
	LEAQ(Mem{Base: e, Disp: ahead}, far)
	CMPQ(far, vec.Field(args, rowsLeft))
	CMOVQGE(e, far) // past the end: this row again
	MOVL(Mem{Base: idx, Index: far, Scale: 4}, far.As32())
	mapped(args, far, end, "ahead", "aheadMapped")
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
		sideBySide(l, tail, args, rows, addresses, weights, out, init)
		JMP(LabelRef("added"))
	}
	Label("added")
	MOVQ(vec.Field(args, rowsN), n)
	SUBQ(n, vec.Field(args, rowsLeft))
	SUBL(n.As32(), vec.Field(args, listsTodo))
	SHLQ(U8(2), n)
	ADDQ(n, list)
	CMPL(vec.Field(args, listsTodo), U8(0))
	JE(LabelRef("list"))
	MOVQ(vec.Field(args, listsPartial), p)
	MOVQ(p, init)
	MOVL(U32(math.Float32bits(1)), vec.Field(args, rowsStart))
	JMP(LabelRef("part"))
	vec.End()
}

// sideBySide adds so many rows.
func sideBySide(l vec.Level, tail vec.Rest, args reg.Register, rows int,
	addresses, weights, to, from Mem) {
	out, init, todo := GP64(), GP64(), vec.Arg(args, rowsDim)
	MOVQ(to, out)
	MOVQ(from, init)
	address, weight := make([]reg.GPVirtual, rows), make([]reg.VecVirtual, rows)
	for e := range rows {
		address[e], weight[e] = GP64(), l.Vec()
		MOVQ(addresses.Offset(8*e), address[e])
		VBROADCASTSS(weights.Offset(4*e), weight[e])
	}
	pos := GP64() // bytes of the rows that are done
	XORQ(pos, pos)
	t, start := l.Vec(), l.Vec()
	sums := []reg.VecVirtual{l.Vec(), l.Vec()}
	l.Stripes = []int{2, 1, 0}
	byRows := func(vectors int) string { return fmt.Sprintf("rows%dby%d", rows, vectors) }
	l.Each(todo, byRows, byRows(0)+"done", func(s vec.Stripe) {
		name, count := s.Name, s.Count
		part := func(base reg.Register, v int) Mem {
			return Mem{Base: base, Index: pos, Scale: 1, Disp: v * l.Bytes()}
		}
		for v := range count {
			l.Zero(sums[v])
		}
		TESTQ(init, init)
		JE(LabelRef(name + "add"))
		VBROADCASTSS(vec.Field(args, rowsStart), start)
		for v := range count {
			s.Get(tail, part(init, v), sums[v])
			VMULPS(sums[v], start, sums[v])
		}
		Label(name + "add")
		for e := range rows {
			for v := range count {
				s.Times(tail, part(address[e], v), weight[e], t)
				VADDPS(t, sums[v], sums[v])
			}
		}
		TESTL(U32(modeGate), vec.Field(args, mode))
		JE(LabelRef(name + "store"))
		VBROADCASTSS(vec.Field(args, rowsScale), start)
		for v := range count {
			VMULPS(start, sums[v], sums[v])
		}
		l.Zero(start)
		for v := range count {
			s.Get(tail, part(out, v), t)
			VCMPPS(U8(0x1e), start, t, t) // > 0, false for NaN
			VANDPS(t, sums[v], sums[v])
		}
		Label(name + "store")
		if s.Vectors == 0 {
			tail.Store(sums[0], part(out, 0))
			Label(name + "done")
			return
		}
		s.Store(sums, func(v int) Mem { return part(out, v) },
			func() { TESTL(U32(modeStream), vec.Field(args, mode)) })
		s.Next(todo, pos)
	})
}

// sumListsInRegisters makes the same rows with AVX-512. Its registers hold 256 columns of a result,
// so the rows of a list are read one after the other, each from its first line to its last: the
// order that the processor's own prefetchers follow. Rows that come later are asked for a line at
// a time, as this one is read: two cores of a Zen 4 read 22 to 28 GB/s so, 15 with L1 alone.
func sumListsInRegisters() {
	l := vec.AVX512(16, 8, 4, 2, 1, 0)
	TEXT("sumListsAVX512", NOSPLIT, "func(a *byte) bool")
	Pragma("noescape")
	Doc("sumListsAVX512 is SumLists. It returns false where a row is not there.")
	args := Load(Param("a"), GP64())
	list, lists := vec.Own(args, rowsIdx), vec.Own(args, listsNext)
	inits, outs := vec.Own(args, listsInit), vec.Own(args, listsOut)
	x, pitch, odd := vec.Arg(args, rowsX), vec.Arg(args, rowsDim), GP64()
	MOVQ(pitch, odd)
	ANDQ(U8(15), odd) // columns of the masked rest
	tail := l.Rest(odd)
	SHLQ(U8(2), pitch)
	// The list's last row: from there on it is asked for again.
	final := vec.Arg(args, rowsLeft)
	SHLQ(U8(2), final)
	ADDQ(list, final)
	SUBQ(U8(4), final)
	factor, start, scale := ZMM(), ZMM(), ZMM()
	VBROADCASTSS(vec.Field(args, rowsScale), scale)
	Label("list")
	DECQ(vec.Field(args, listsLeft))
	JL(LabelRef("done"))
	out, init, end, p := GP64(), GP64(), GP64(), GP64()
	MOVQ(outs, out)
	MOVQ(inits, init)
	MOVQ(lists, p)
	MOVL(vec.Field(p, 0), end.As32())
	SHLQ(U8(2), end)
	ADDQ(list, end)
	VBROADCASTSS(vec.Field(p, 4), factor)
	VBROADCASTSS(vec.Field(p, 8), start)
	pos, todo := GP64(), vec.Arg(args, rowsDim)
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
		TESTQ(init, init)
		JE(LabelRef(name + "rows"))
		for v := range sums {
			s.Get(tail, part(init, v), sums[v])
			VMULPS(start, sums[v], sums[v])
		}
		Label(name + "rows")
		e, row, far, near, tmp := GP64(), GP64(), GP64(), GP64(), GP64()
		w, t := l.Vec(), l.Vec()
		MOVQ(list, e)
		JMP(LabelRef(name + "more"))
		Label(name + "row")
		MOVL(Mem{Base: e}, row.As32())
		VMOVAPS(factor, w)
		MOVQ(vec.Field(args, rowsTable), far)
		TESTQ(far, far)
		JE(LabelRef(name + "weighed"))
		CMPQ(row, vec.Field(args, rowsWeights))
		JAE(LabelRef("bad"))
		VMULPS_BCST(Mem{Base: far, Index: row, Scale: 4}, factor, w)
		Label(name + "weighed")
		mapped(args, row, far, name+"row", "bad")
		IMULQ(pitch, row)
		ADDQ(x, row)
		CMPQ(row, vec.Field(args, rowsLast))
		JA(LabelRef("bad"))
		rowAhead(e, ahead, final, pitch, x, far, func() { // only asked for: it may be anywhere
			mapped(args, far, near, name+"far", name+"farMapped")
		})
		rowAhead(e, soon, final, pitch, x, near, func() {
			mapped(args, near, tmp, name+"near", name+"nearMapped")
		})
		for v := range sums {
			PREFETCHT1(part(far, v))
			PREFETCHT0(part(near, v))
			s.Times(tail, part(row, v), w, t)
			VADDPS(t, sums[v], sums[v])
		}
		ADDQ(U8(4), e)
		Label(name + "more")
		CMPQ(e, end)
		JB(LabelRef(name + "row"))
		TESTQ(U32(modeGate), vec.Field(args, listsMode))
		JE(LabelRef(name + "store"))
		k := K()
		l.Zero(w)
		for v := range sums {
			s.Get(tail, part(out, v), t)
			VCMPPS(U8(0x1e), w, t, k) // > 0, false for NaN
			VMULPS_Z(scale, sums[v], k, sums[v])
		}
		Label(name + "store")
		if s.Vectors == 0 {
			tail.Store(sums[0], part(out, 0))
			return
		}
		s.Store(sums, func(v int) Mem { return part(out, v) },
			func() { TESTQ(U32(modeStream), vec.Field(args, listsMode)) })
		s.Next(todo, pos)
	})
	Label("listed")
	MOVQ(end, list)
	ADDQ(U8(listBytes), lists)
	ADDQ(pitch, outs)
	TESTQ(init, init)
	JE(LabelRef("list"))
	ADDQ(pitch, inits)
	JMP(LabelRef("list"))
	vec.End()
}

// mapped puts the row that a map gives row in its place, where there is a map. A row that is not in
// it, or in X, leads to label bad.
func mapped(args reg.Register, row, tmp reg.GPVirtual, name, bad string) {
	MOVQ(vec.Field(args, listsMap), tmp)
	TESTQ(tmp, tmp)
	JE(LabelRef(name + "Mapped"))
	CMPQ(row, vec.Field(args, listsMapped))
	JAE(LabelRef(bad))
	MOVQ(Mem{Base: tmp, Index: row, Scale: 8}, row)
	CMPQ(row, vec.Field(args, listsRows))
	JAE(LabelRef(bad))
	Label(name + "Mapped")
}

// rowAhead leaves in row the address of the row that is so many places behind e in a list, at most
// its final one. Between, numbered may change its number.
func rowAhead(e reg.Register, places int, final, pitch, x reg.Register, row reg.GPVirtual,
	numbered ...func()) {
	LEAQ(Mem{Base: e, Disp: 4 * places}, row)
	CMPQ(row, final)
	CMOVQHI(final, row)
	MOVL(Mem{Base: row}, row.As32())
	for _, f := range numbered {
		f()
	}
	IMULQ(pitch, row)
	ADDQ(x, row)
}

// sumColumns makes out[c] = Σ_r x[r, c], rows in order.
func sumColumns(l vec.Level) {
	TEXT("sumColumns"+l.Name, NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("sumColumns" + l.Name + " is SumColumns.")
	args := Load(Param("a"), GP64())
	out, x, todo := vec.Arg(args, colsOut), vec.Arg(args, colsX), vec.Arg(args, colsN)
	rows, pitch := vec.Arg(args, colsRows), vec.Arg(args, colsStride)
	SHLQ(U8(2), pitch)
	l.Each(todo, vec.ByWidth, "done", func(s vec.Stripe) {
		var tail vec.Rest
		if s.Vectors == 0 {
			tail = l.Rest(todo)
		}
		pos := func(base reg.Register, v int) Mem { return Mem{Base: base, Disp: v * l.Bytes()} }
		sums := make([]reg.VecVirtual, s.Count)
		for v := range sums {
			sums[v] = l.Vec()
			l.Zero(sums[v])
		}
		row, far, near, left := GP64(), GP64(), GP64(), GP64()
		MOVQ(x, row)
		IMUL3Q(U32(ahead), pitch, far)
		ADDQ(x, far)
		IMUL3Q(U32(soon), pitch, near)
		ADDQ(x, near)
		MOVQ(rows, left)
		Label(s.Name + "row")
		asked := -line
		t := l.Vec()
		for v := range sums {
			if v*l.Bytes() >= asked+line {
				asked = v * l.Bytes()
				PREFETCHT1(pos(far, v))
				PREFETCHT0(pos(near, v))
			}
			if s.Vectors > 0 {
				VADDPS(pos(row, v), sums[v], sums[v])
			} else {
				tail.Load(pos(row, v), t)
				VADDPS(t, sums[v], sums[v])
			}
		}
		for _, p := range []reg.GPVirtual{row, far, near} {
			ADDQ(pitch, p)
		}
		DECQ(left)
		JNE(LabelRef(s.Name + "row"))
		if s.Vectors == 0 {
			tail.Store(sums[0], pos(out, 0))
			return
		}
		for v := range sums {
			VMOVUPS(sums[v], pos(out, v))
		}
		s.Next(todo, out, x)
	})
	Label("done")
	VZEROUPPER()
	RET()
}

// adam makes one step of the optimiser.
func adam(l vec.Level) {
	TEXT("adam"+l.Name, NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("adam" + l.Name + " is Adam.")
	args := Load(Param("a"), GP64())
	p, g := vec.Arg(args, adamP), vec.Arg(args, adamG)
	m, v := vec.Arg(args, adamM), vec.Arg(args, adamV)
	n := vec.Arg(args, adamN)
	var c [9]reg.VecVirtual // B1, C1, B2, C2, step, root, eps, L2, decay
	for i := range c {
		c[i] = l.Vec()
		if l.Lanes == 16 {
			VBROADCASTSS(vec.Field(args, adamB1+4*i), c[i])
		}
	}
	// AVX2 has too few registers for all of them.
	times := func(i int, x, dst reg.VecVirtual) {
		if l.Lanes == 8 {
			t := l.Vec()
			VBROADCASTSS(vec.Field(args, adamB1+4*i), t)
			VMULPS(t, x, dst)
			return
		}
		VMULPS(c[i], x, dst)
	}
	step := func(load func(reg.Register, reg.VecVirtual),
		store func(reg.VecVirtual, reg.Register)) {
		x, d, mi, vi, t := l.Vec(), l.Vec(), l.Vec(), l.Vec(), l.Vec()
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
		if l.Lanes == 8 {
			e := l.Vec()
			VBROADCASTSS(vec.Field(args, adamB1+4*6), e)
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
	CMPQ(n, U32(uint32(l.Lanes)))
	JL(LabelRef("rest"))
	step(func(b reg.Register, r reg.VecVirtual) { VMOVUPS(Mem{Base: b}, r) },
		func(r reg.VecVirtual, b reg.Register) { VMOVUPS(r, Mem{Base: b}) })
	for _, b := range []reg.Register{p, g, m, v} {
		ADDQ(U32(uint32(l.Bytes())), b)
	}
	SUBQ(U32(uint32(l.Lanes)), n)
	JMP(LabelRef("loop"))
	Label("rest")
	TESTQ(n, n)
	JE(LabelRef("done"))
	tail := l.Rest(n)
	step(func(b reg.Register, r reg.VecVirtual) { tail.Load(Mem{Base: b}, r) },
		func(r reg.VecVirtual, b reg.Register) { tail.Store(r, Mem{Base: b}) })
	Label("done")
	VZEROUPPER()
	RET()
}

// copyRows copies row slot[i] of src to row pos[i] of dst around the caches, 64 bytes at a time.
func copyRows(l vec.Level) {
	TEXT("copyRows"+l.Name, NOSPLIT, "func(a *byte)")
	Pragma("noescape")
	Doc("copyRows" + l.Name + " is CopyRows.")
	args := Load(Param("a"), GP64())
	pos, slot, n, final := vec.Arg(args, copyPos), vec.Arg(args, copySlot), vec.Arg(args, copyN),
		vec.Arg(args, copyLeft)
	LEAQ(Mem{Base: slot, Index: final, Scale: 4, Disp: -4}, final)
	src, dst := vec.Arg(args, copySrc), vec.Arg(args, copyDst)
	size, stride := vec.Arg(args, copyBytes), vec.Arg(args, copyStride)
	i := GP64()
	XORQ(i, i)
	Label("row")
	CMPQ(i, n)
	JGE(LabelRef("done"))
	from, to, far, near, offset := GP64(), GP64(), GP64(), GP64(), GP64()
	MOVL(Mem{Base: slot, Index: i, Scale: 4}, from.As32())
	MOVL(Mem{Base: pos, Index: i, Scale: 4}, to.As32())
	LEAQ(Mem{Base: slot, Index: i, Scale: 4}, offset)
	rowAhead(offset, ahead, final, size, src, far)
	rowAhead(offset, soon, final, size, src, near)
	IMULQ(size, from)
	IMULQ(stride, to)
	ADDQ(src, from)
	ADDQ(dst, to)
	XORQ(offset, offset)
	Label("line")
	PREFETCHT1(Mem{Base: far, Index: offset, Scale: 1})
	PREFETCHT0(Mem{Base: near, Index: offset, Scale: 1})
	for b := 0; b < line; b += l.Bytes() {
		v := l.Vec()
		VMOVUPS(Mem{Base: from, Index: offset, Scale: 1, Disp: b}, v)
		VMOVNTPS(v, Mem{Base: to, Index: offset, Scale: 1, Disp: b})
	}
	ADDQ(U32(line), offset)
	CMPQ(offset, size)
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
	base, rows, n, shift := vec.Arg(args, prefetchBase), vec.Arg(args, prefetchRows),
		vec.Arg(args, prefetchN), vec.Arg(args, prefetchShift)
	MOVQ(vec.Field(args, prefetchMagic), reg.RDX)
	i := GP64()
	XORQ(i, i)
	Label("part")
	CMPQ(i, n)
	JGE(LabelRef("end"))
	pos, low := GP64(), GP64()
	MOVQ(Mem{Base: rows, Index: i, Scale: 8}, pos)
	SHRXQ(shift, pos, pos)
	MULXQ(pos, low, pos)
	SHLQ(U8(6), pos)
	PREFETCHT0(Mem{Base: base, Index: pos, Scale: 1})
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
	x, pitch, list, left := vec.Arg(args, readX), vec.Arg(args, readPitch), vec.Arg(args, readList),
		vec.Arg(args, readN)
	final, last := vec.Arg(args, readFinal), vec.Arg(args, readLast)
	row, far, near, stop, word, ok := GP64(), GP64(), GP64(), GP64(), GP32(), GP8()
	JMP(LabelRef("more"))
	Label("row")
	MOVL(Mem{Base: list}, row.As32())
	rowAhead(list, ahead, final, pitch, x, far)
	rowAhead(list, soon, final, pitch, x, near)
	IMULQ(pitch, row)
	ADDQ(x, row)
	CMPQ(row, last)
	JA(LabelRef("bad"))
	LEAQ(Mem{Base: row, Index: pitch, Scale: 1}, stop)
	Label("line")
	PREFETCHT1(Mem{Base: far})
	PREFETCHT0(Mem{Base: near})
	MOVL(Mem{Base: row}, word)
	for _, p := range []reg.GPVirtual{row, far, near} {
		ADDQ(U32(line), p)
	}
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
