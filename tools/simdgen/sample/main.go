// Command sample generates the loops of neighbour sampling (internal/simd/sample.go explains
// each).
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

const (
	m0, m1 = 0xD2511F53, 0xCD9E8D57
	group  = 16 // nodes whose draws stand side by side: out[i][node]
)

func main() {
	ConstraintExpr("amd64")
	draw512()
	draw2()
	rows()
	prefetch()
	gather("sampleGather32", 4)
	gather("sampleGather64", 8)
	enterDirect()
	enterHash()
	warm()
	labor512("laborTake32AVX512", 4)
	labor512("laborTake64AVX512", 8)
	packs, first := laborPacks(), laborFirst()
	labor2("laborTake32AVX2", 4, packs, first)
	labor2("laborTake64AVX2", 8, packs, first)
	Generate()
}

func imm(v uint64) operand.Constant { return operand.Imm(v) }

func at(base reg.Register, disp int) operand.Mem { return operand.Mem{Base: base, Disp: disp} }

func indexed(base, index reg.Register, scale uint8, disp int) operand.Mem {
	return operand.Mem{Base: base, Index: index, Scale: scale, Disp: disp}
}

func param(name string) reg.GPVirtual { return Load(Param(name), GP64()).(reg.GPVirtual) }

// addr returns the place of a parameter.
func addr(name string) operand.Mem {
	a, err := Param(name).Resolve()
	if err != nil {
		panic("no parameter " + name)
	}
	return a.Addr
}

// broadcast copies g to all 64-bit lanes.
func broadcast(g reg.Register, dst reg.VecVirtual) {
	if dst.Size() == 64 {
		VPBROADCASTQ(g, dst)
		return
	}
	VMOVQ(g, dst.AsX())
	VPBROADCASTQ(dst.AsX(), dst)
}

func constant(v uint64, dst reg.VecVirtual) {
	t := GP64()
	MOVQ(operand.U64(v), t)
	broadcast(t, dst)
}

// philox does the ten rounds on sets of four state vectors, whose 64-bit lanes have a word in the
// lower half and anything in the upper one. The words change places from round to round: c holds
// them as they end up. xor3 is dst ^= v ^ key of a round.
func philox(c [][4]reg.VecVirtual, t [2]reg.VecVirtual, mul0, mul1 operand.Op,
	xor3 func(key int, v, dst reg.VecVirtual)) {
	for r := range 10 {
		for s := range c {
			a, b, x, y := c[s][0], c[s][1], c[s][2], c[s][3]
			VPMULUDQ(mul0, a, a)
			VPMULUDQ(mul1, x, x)
			VPSRLQ(imm(32), x, t[0])
			VPSRLQ(imm(32), a, t[1])
			xor3(2*r, t[0], b)
			xor3(2*r+1, t[1], y)
			c[s] = [4]reg.VecVirtual{b, x, y, a}
		}
	}
}

// bounded is the high half of (hi<<32 | lo) × n, n < 2^32, in the lower half of lo's lanes.
func bounded(lo, hi, n reg.VecVirtual) {
	VPMULUDQ(n, lo, lo)
	VPMULUDQ(n, hi, hi)
	VPSRLQ(imm(32), lo, lo)
	VPADDQ(hi, lo, lo)
	VPSRLQ(imm(32), lo, lo)
}

const drawDoc = "draws k of each node's deg neighbours by Floyd's algorithm where k < deg, else names all, into out[i][node], i from 0 to k, k rounded up to even."

func draw512() {
	TEXT("sampleDrawAVX512", NOSPLIT,
		"func(nodes *int64, deg *uint32, k uint64, keys *[20]uint64, epoch, hop uint64, out *uint32)")
	Doc("sampleDrawAVX512 " + drawDoc + " 16 nodes.")
	nodes, deg, k, keys, out := param("nodes"), param("deg"), param("k"), param("keys"),
		param("out")
	vec := func() reg.VecVirtual { return ZMM() }
	mul0, mul1, epoch, hop, one := vec(), vec(), vec(), vec(), vec()
	constant(m0, mul0)
	constant(m1, mul1)
	constant(1, one)
	broadcast(param("epoch"), epoch)
	broadcast(param("hop"), hop)
	v := [2]reg.VecVirtual{vec(), vec()}
	n := [2]reg.VecVirtual{vec(), vec()} // bound of the next draw, 64-bit lanes
	VMOVDQU64(at(nodes, 0), v[0])
	VMOVDQU64(at(nodes, 64), v[1])
	d, j, last, i, ones := vec(), vec(), vec(), vec(), vec()
	VMOVDQU32(at(deg, 0), d)
	kv := vec()
	VPBROADCASTD(k.As32(), kv)
	VPSUBD(kv, d, j) // d - k + i
	x := YMM()
	VEXTRACTI64X4(imm(1), j, x)
	VPMOVZXDQ(j.AsY(), n[0])
	VPMOVZXDQ(x, n[1])
	for s := range n {
		VPADDQ(one, n[s], n[s])
	}
	VPXORQ(i, i, i)
	g := GP64()
	MOVQ(operand.U32(1), g)
	VPBROADCASTD(g.As32(), ones)
	VPMAXUD(ones, d, last)
	VPSUBD(ones, last, last)
	whole := K()
	VPCMPUD(imm(2), kv, d, whole) // d <= k
	at0, row := GP64(), GP64()
	XORQ(at0, at0)
	MOVQ(out, row)
	Label("block")
	var c [][4]reg.VecVirtual
	for s := range 2 {
		st := [4]reg.VecVirtual{vec(), vec(), vec(), vec()}
		VMOVDQA64(v[s], st[0])
		VPSRLQ(imm(32), v[s], st[1])
		VMOVDQA64(epoch, st[2])
		VMOVDQA64(hop, st[3])
		c = append(c, st)
	}
	philox(c, [2]reg.VecVirtual{vec(), vec()}, mul0, mul1, func(key int, t, dst reg.VecVirtual) {
		VPTERNLOGQ_BCST(imm(0x96), at(keys, 8*key), t, dst)
	})
	VPADDQ(one, hop, hop)
	for h := range 2 {
		for s := range 2 {
			bounded(c[s][2*h], c[s][2*h+1], n[s])
			VPADDQ(one, n[s], n[s])
		}
		y := YMM()
		z := vec()
		VPMOVQD(c[0][2*h], z.AsY())
		VPMOVQD(c[1][2*h], y)
		VINSERTI64X4(imm(1), y, z, z)
		dup, same := K(), K()
		KXORW(dup, dup, dup)
		p := GP64()
		MOVQ(out, p)
		Label(fmt.Sprintf("dup%d", h))
		CMPQ(p, row)
		JEQ(operand.LabelRef(fmt.Sprintf("nodup%d", h)))
		VPCMPEQD(at(p, 0), z, same)
		KORW(same, dup, dup)
		ADDQ(imm(4*group), p)
		JMP(operand.LabelRef(fmt.Sprintf("dup%d", h)))
		Label(fmt.Sprintf("nodup%d", h))
		VMOVDQA32(j, dup, z)
		VPADDD(ones, j, j)
		VPMINUD(last, i, whole, z)
		VPADDD(ones, i, i)
		VMOVDQU32(z, at(row, 0))
		ADDQ(imm(4*group), row)
	}
	ADDQ(imm(2), at0)
	CMPQ(at0, k)
	JB(operand.LabelRef("block"))
	VZEROUPPER()
	RET()
}

func draw2() {
	TEXT("sampleDrawAVX2", NOSPLIT,
		"func(nodes *int64, deg *uint32, k uint64, keys *[20]uint64, epoch, hop uint64, out *uint32)")
	Doc("sampleDrawAVX2 " + drawDoc + " 8 nodes, with rows of 16 in out.")
	nodes, deg, k, keys, out := param("nodes"), param("deg"), param("k"), param("keys"),
		param("out")
	vec := func() reg.VecVirtual { return YMM() }
	// Vectors that stay live between blocks, but for the multipliers, are kept in memory.
	mem := AllocLocal(10 * 32)
	slot := func(i int) operand.Mem { return mem.Offset(32 * i) }
	const (
		sN0, sN1, sJ, sLast, sI, sWhole, sEpoch, sHop, sOne, sOnes = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
	)
	mul0, mul1 := vec(), vec()
	constant(m0, mul0)
	constant(m1, mul1)
	t, d, kv := vec(), vec(), vec()
	broadcast(param("epoch"), t)
	VMOVDQU(t, slot(sEpoch))
	broadcast(param("hop"), t)
	VMOVDQU(t, slot(sHop))
	constant(1, t)
	VMOVDQU(t, slot(sOne))
	x := XMM()
	VMOVQ(k, x)
	VPBROADCASTD(x, kv)
	VMOVDQU(at(deg, 0), d)
	j, n := vec(), vec()
	VPSUBD(kv, d, j)
	VMOVDQU(j, slot(sJ))
	VPMOVZXDQ(j.AsX(), n)
	VPADDQ(t, n, n)
	VMOVDQU(n, slot(sN0))
	VEXTRACTI128(imm(1), j, x)
	VPMOVZXDQ(x, n)
	VPADDQ(t, n, n)
	VMOVDQU(n, slot(sN1))
	VPCMPEQD(t, t, t) // all ones
	VPSRLD(imm(31), t, t)
	VMOVDQU(t, slot(sOnes))
	last := vec()
	VPMAXUD(t, d, last)
	VPSUBD(t, last, last)
	VMOVDQU(last, slot(sLast))
	whole := vec()
	VPMAXUD(kv, d, whole) // d <= k where the larger one is k
	VPCMPEQD(kv, whole, whole)
	VMOVDQU(whole, slot(sWhole))
	VPXOR(t, t, t)
	VMOVDQU(t, slot(sI))
	at0, row := GP64(), GP64()
	XORQ(at0, at0)
	MOVQ(out, row)
	Label("block")
	var c [][4]reg.VecVirtual
	for s := range 2 {
		st := [4]reg.VecVirtual{vec(), vec(), vec(), vec()}
		VMOVDQU(at(nodes, 32*s), st[0])
		VPSRLQ(imm(32), st[0], st[1])
		VMOVDQU(slot(sEpoch), st[2])
		VMOVDQU(slot(sHop), st[3])
		c = append(c, st)
	}
	key := vec()
	philox(c, [2]reg.VecVirtual{vec(), vec()}, mul0, mul1, func(i int, t, dst reg.VecVirtual) {
		VPBROADCASTQ(at(keys, 8*i), key)
		VPXOR(key, t, t)
		VPXOR(t, dst, dst)
	})
	u := vec()
	VMOVDQU(slot(sHop), u)
	VPADDQ(slot(sOne), u, u)
	VMOVDQU(u, slot(sHop))
	for h := range 2 {
		for s := range 2 {
			n := vec()
			VMOVDQU(slot(sN0+s), n)
			bounded(c[s][2*h], c[s][2*h+1], n)
			VPADDQ(slot(sOne), n, n)
			VMOVDQU(n, slot(sN0+s))
		}
		z := vec()
		VSHUFPS(imm(0x88), c[1][2*h], c[0][2*h], z)
		VPERMQ(imm(0xD8), z, z)
		dup, same := vec(), vec()
		VPXOR(dup, dup, dup)
		p := GP64()
		MOVQ(out, p)
		Label(fmt.Sprintf("dup%d", h))
		CMPQ(p, row)
		JEQ(operand.LabelRef(fmt.Sprintf("nodup%d", h)))
		VPCMPEQD(at(p, 0), z, same)
		VPOR(same, dup, dup)
		ADDQ(imm(4*group), p)
		JMP(operand.LabelRef(fmt.Sprintf("dup%d", h)))
		Label(fmt.Sprintf("nodup%d", h))
		a := vec()
		VMOVDQU(slot(sJ), a)
		VPBLENDVB(dup, a, z, z)
		VPADDD(slot(sOnes), a, a)
		VMOVDQU(a, slot(sJ))
		VMOVDQU(slot(sI), a)
		b := vec()
		VPMINUD(slot(sLast), a, b)
		VPADDD(slot(sOnes), a, a)
		VMOVDQU(a, slot(sI))
		VMOVDQU(slot(sWhole), a)
		VPBLENDVB(a, b, z, z)
		VMOVDQU(z, at(row, 0))
		ADDQ(imm(4*group), row)
	}
	ADDQ(imm(2), at0)
	CMPQ(at0, k)
	JB(operand.LabelRef("block"))
	VZEROUPPER()
	RET()
}

func rows() {
	TEXT("sampleRowsAsm", NOSPLIT,
		"func(nodes *int64, n, readable uint64, indptr *int64, numNodes, numEdges, k uint64, first *int64, deg, local *uint32) uint64")
	Doc(
		"sampleRowsAsm looks up where the nodes' rows are and how many draws each gets. It returns n, or the number of the first bad node.")
	nodes, indptr := param("nodes"), param("indptr")
	n, readable, numNodes, numEdges, k := addr("n"), addr("readable"), addr("numNodes"),
		addr("numEdges"), addr("k")
	first, deg, local := param("first"), param("deg"), param("local")
	const ahead = 64
	i, sum, v, w, f, e := GP64(), GP64(), GP64(), GP64(), GP64(), GP64()
	XORQ(i, i)
	XORQ(sum, sum)
	Label("row")
	CMPQ(i, n)
	JAE(operand.LabelRef("done"))
	LEAQ(at(i, ahead), w)
	CMPQ(w, readable)
	CMOVQCC(i, w)
	MOVQ(indexed(nodes, w, 8, 0), w)
	PREFETCHT1(indexed(indptr, w, 8, 0))
	MOVQ(indexed(nodes, i, 8, 0), v)
	CMPQ(v, numNodes)
	JAE(operand.LabelRef("done"))
	MOVQ(indexed(indptr, v, 8, 0), f)
	MOVQ(indexed(indptr, v, 8, 8), e)
	CMPQ(e, numEdges)
	JA(operand.LabelRef("done"))
	CMPQ(f, e)
	JA(operand.LabelRef("done"))
	SUBQ(f, e) // the degree
	CMOVQEQ(e, f)
	MOVQ(e, w)
	SHRQ(imm(32), w)
	JNE(operand.LabelRef("done"))
	MOVQ(f, indexed(first, i, 8, 0))
	MOVL(e.As32(), indexed(deg, i, 4, 0))
	MOVL(sum.As32(), indexed(local, i, 4, 0))
	CMPQ(e, k)
	CMOVQHI(k, e)
	ADDQ(e, sum)
	INCQ(i)
	JMP(operand.LabelRef("row"))
	Label("done")
	MOVL(sum.As32(), indexed(local, i, 4, 0))
	Store(i, ReturnIndex(0))
	RET()
}

func prefetch() {
	TEXT("samplePrefetchAsm", NOSPLIT,
		"func(first *int64, n, k uint64, draws *uint32, indices *byte, shift uint64)")
	Doc("samplePrefetchAsm prefetches what sampleGather will read.")
	first, n, k, draws, indices := param("first"), param("n"), param("k"), param("draws"),
		param("indices")
	MOVQ(addr("shift"), reg.RCX)
	i, p, c, lane, o := GP64(), GP64(), GP64(), GP64(), GP64()
	XORQ(lane, lane)
	Label("node")
	MOVQ(indexed(first, lane, 8, 0), p)
	SHLQ(reg.CL, p)
	ADDQ(indices, p)
	LEAQ(indexed(draws, lane, 4, 0), c)
	MOVQ(k, i)
	Label("edge")
	MOVL(at(c, 0), o.As32())
	SHLQ(reg.CL, o)
	PREFETCHT1(indexed(p, o, 1, 0))
	ADDQ(imm(4*group), c)
	DECQ(i)
	JNE(operand.LabelRef("edge"))
	INCQ(lane)
	CMPQ(lane, n)
	JB(operand.LabelRef("node"))
	RET()
}

func gather(name string, width int) {
	TEXT(name+"Asm", NOSPLIT,
		"func(first *int64, deg *uint32, n, k uint64, draws *uint32, indices *byte, numNodes uint64, ids *uint32) uint64")
	Doc(name +
		"Asm turns the draws of n nodes of a group into ids, one node after the other, and returns how many ids are no nodes. It writes k ids from each node's first one on, whatever its degree.")
	first, deg, n, k := param("first"), param("deg"), param("n"), param("k")
	draws, indices, ids, numNodes := param("draws"), param("indices"), param("ids"),
		addr("numNodes")
	bad, i, p, c, o, id, end, lane := GP64(), GP64(), GP64(), GP64(), GP64(), GP64(), GP64(), GP64()
	XORQ(bad, bad)
	XORQ(lane, lane)
	Label("node")
	MOVQ(indexed(first, lane, 8, 0), p)
	LEAQ(indexed(indices, p, uint8(width), 0), p)
	LEAQ(indexed(draws, lane, 4, 0), c)
	XORQ(i, i)
	Label("edge")
	MOVL(at(c, 0), o.As32())
	if width == 4 {
		MOVL(indexed(p, o, 4, 0), id.As32())
	} else {
		MOVQ(indexed(p, o, 8, 0), id)
	}
	MOVL(id.As32(), indexed(ids, i, 4, 0))
	CMPQ(id, numNodes)
	SBBQ(operand.I8(-1), bad) // counts what is not below
	ADDQ(imm(4*group), c)
	INCQ(i)
	CMPQ(i, k)
	JB(operand.LabelRef("edge"))
	MOVL(indexed(deg, lane, 4, 0), end.As32())
	CMPQ(end, k)
	CMOVQHI(k, end)
	LEAQ(indexed(ids, end, 4, 0), ids)
	INCQ(lane)
	CMPQ(lane, n)
	JB(operand.LabelRef("node"))
	Store(bad, ReturnIndex(0))
	RET()
}

// aheadIDs ids lie between a prefetch and its use; ids has as many more, of any value.
const aheadIDs = 128

func enterDirect() {
	TEXT("sampleEnterAsm", NOSPLIT,
		"func(ids *uint32, n uint64, table *uint32, stamp, mask uint32, nodes *int64, next uint64, src *uint32) uint64")
	Doc("sampleEnterAsm numbers ids by a table with an entry for each node.")
	ids, n, table := param("ids"), param("n"), param("table")
	stamp, mask := Load(Param("stamp"), GP32()), Load(Param("mask"), GP32())
	nodes, next, src := param("nodes"), param("next"), param("src")
	i, id, x, far := GP64(), GP64(), GP64(), GP64()
	XORQ(i, i)
	Label("warm")
	MOVL(indexed(ids, i, 4, 0), id.As32())
	PREFETCHT1(indexed(table, id, 4, 0))
	INCQ(i)
	CMPQ(i, operand.U32(aheadIDs))
	JB(operand.LabelRef("warm"))
	XORQ(i, i)
	TESTQ(n, n)
	JEQ(operand.LabelRef("done"))
	Label("edge")
	MOVL(indexed(ids, i, 4, 4*aheadIDs), far.As32())
	PREFETCHT1(indexed(table, far, 4, 0))
	MOVL(indexed(ids, i, 4, 0), id.As32())
	MOVL(indexed(table, id, 4, 0), x.As32())
	XORL(stamp, x.As32())
	MOVQ(id, indexed(nodes, next, 8, 0))
	CMPL(mask, x.As32()) // carry: another stamp, so the node is new
	CMOVQCS(next, x)
	ADCQ(imm(0), next)
	MOVL(x.As32(), indexed(src, i, 4, 0))
	ORL(stamp, x.As32())
	MOVL(x.As32(), indexed(table, id, 4, 0))
	INCQ(i)
	CMPQ(i, n)
	JB(operand.LabelRef("edge"))
	Label("done")
	Store(next, ReturnIndex(0))
	RET()
}

func enterHash() {
	TEXT("sampleEnterHashAsm", NOSPLIT,
		"func(ids *uint32, n uint64, table *uint64, slotMask, hashShift, posBits uint64, stamp, mask, low uint64, nodes *int64, next uint64, src *uint32) uint64")
	Doc("sampleEnterHashAsm numbers ids by a hash table.")
	ids, table, n, slotMask := param("ids"), param("table"), addr("n"), addr("slotMask")
	hashShift, posBits := param("hashShift"), param("posBits")
	stamp := param("stamp")
	src := param("src")
	next := param("next")
	i, id, x, y, h, want := GP64(), GP64(), GP64(), GP64(), GP64(), GP64()
	maskAddr, lowAddr, nodesAddr := addr("mask"), addr("low"), addr("nodes")
	mul := GP64()
	MOVQ(operand.U64(0x9E3779B97F4A7C15), mul)
	hash := func() {
		MOVQ(id, h)
		IMULQ(mul, h)
		SHRXQ(hashShift, h, h)
	}
	XORQ(i, i)
	Label("warm")
	MOVL(indexed(ids, i, 4, 0), id.As32())
	hash()
	PREFETCHT1(indexed(table, h, 8, 0))
	INCQ(i)
	CMPQ(i, operand.U32(aheadIDs))
	JB(operand.LabelRef("warm"))
	XORQ(i, i)
	CMPQ(n, imm(0))
	JEQ(operand.LabelRef("done"))
	Label("edge")
	MOVL(indexed(ids, i, 4, 4*aheadIDs), id.As32())
	hash()
	PREFETCHT1(indexed(table, h, 8, 0))
	MOVL(indexed(ids, i, 4, 0), id.As32())
	hash()
	SHLXQ(posBits, id, want)
	ORQ(stamp, want)
	Label("probe")
	MOVQ(indexed(table, h, 8, 0), x)
	MOVQ(x, y)
	XORQ(want, x)
	CMPQ(x, maskAddr)
	JBE(operand.LabelRef("found"))
	XORQ(stamp, y)
	CMPQ(y, lowAddr)
	JBE(operand.LabelRef("taken"))
	// New.
	MOVQ(nodesAddr, y)
	MOVQ(id, indexed(y, next, 8, 0))
	ORQ(next, want)
	MOVQ(want, indexed(table, h, 8, 0))
	MOVL(next.As32(), indexed(src, i, 4, 0))
	INCQ(next)
	INCQ(i)
	CMPQ(i, n)
	JB(operand.LabelRef("edge"))
	JMP(operand.LabelRef("done"))
	Label("found")
	MOVL(x.As32(), indexed(src, i, 4, 0))
	INCQ(i)
	CMPQ(i, n)
	JB(operand.LabelRef("edge"))
	JMP(operand.LabelRef("done"))
	Label("taken")
	INCQ(h)
	ANDQ(slotMask, h)
	JMP(operand.LabelRef("probe"))
	Label("done")
	Store(next, ReturnIndex(0))
	RET()
}

// warm prefetches what enterDirect will read and write.
func warm() {
	TEXT("sampleWarmAsm", NOSPLIT, "func(ids *uint32, n uint64, table *uint32)")
	Doc("sampleWarmAsm prefetches the entries of n ids, at least one, in a table with an entry for each node.")
	ids, n, table := param("ids"), param("n"), param("table")
	i, id := GP64(), GP64()
	XORQ(i, i)
	Label("id")
	MOVL(indexed(ids, i, 4, 0), id.As32())
	PREFETCHT0(indexed(table, id, 4, 0))
	INCQ(i)
	CMPQ(i, n)
	JB(operand.LabelRef("id"))
	RET()
}
