// Command gemm writes the assembly of simd's matrix products: micro-kernels, the packing of panels,
// and what follows a product (bias, ReLU, dropout), each for AVX2 and AVX-512; and those of factors
// in bfloat16.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build" //nolint:staticcheck // the generator's language
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// isa is one instruction set: its vectors and the largest tile that fits its registers.
type isa struct {
	tag   string
	lanes int // float32 of a vector
	rows  []int
	vec   []reg.VecPhysical
	wide  bool // AVX-512
	pairs bool // factors are pairs of bfloat16, see bf16.go
}

var (
	zmm = isa{"Z", 16, []int{1, 2, 3, 4, 6, 8, 12}, []reg.VecPhysical{
		reg.Z0, reg.Z1, reg.Z2, reg.Z3, reg.Z4, reg.Z5, reg.Z6, reg.Z7, reg.Z8, reg.Z9, reg.Z10,
		reg.Z11, reg.Z12, reg.Z13, reg.Z14, reg.Z15,
		reg.Z16, reg.Z17, reg.Z18, reg.Z19, reg.Z20, reg.Z21, reg.Z22, reg.Z23, reg.Z24, reg.Z25,
		reg.Z26, reg.Z27, reg.Z28, reg.Z29, reg.Z30, reg.Z31,
	}, true, false}
	ymm = isa{"Y", 8, []int{1, 2, 3, 4, 6}, []reg.VecPhysical{
		reg.Y0, reg.Y1, reg.Y2, reg.Y3, reg.Y4, reg.Y5, reg.Y6, reg.Y7, reg.Y8, reg.Y9, reg.Y10,
		reg.Y11, reg.Y12, reg.Y13, reg.Y14, reg.Y15,
	}, false, false}
)

// wide is the vectors of the tiles for a few rows.
const wide = 8

// masks holds a vector's worth of ones, then of zeros: a window on it is a mask of AVX2.
var masks Mem

func main() {
	ConstraintExpr("amd64")
	masks = GLOBL("gemmMasks", 8|16) // RODATA|NOPTR
	for i := range 16 {
		DATA(i*4, U32(map[bool]uint32{true: 0xffffffff}[i < 8]))
	}
	for _, s := range []isa{zmm, ymm} {
		for _, m := range s.rows {
			s.kernel(m, 1)
			s.kernel(m, 2)
		}
		for m := 1; m == 1 || (m+1)*wide < len(s.vec); m++ {
			s.kernel(m, wide) // a few rows on operands that aren't packed
		}
		s.transpose()
		s.copyPanels()
		s.copyColumns()
		s.finish()
		s.dropout()
		s.peak()
		s.bf16()
	}
	halves()
	Generate()
}

func (s *isa) size() int { return s.lanes * 4 }

func (s *isa) zero(v reg.VecPhysical) {
	if s.wide {
		VPXORD(v, v, v)
	} else {
		VPXOR(v, v, v)
	}
}

// setMask makes the mask of the first n (1 to lanes) elements: K1, or the vector v.
func (s *isa) setMask(n reg.GPVirtual, v reg.VecPhysical) {
	t := GP64()
	if s.wide {
		MOVQ(I32(-1), t)
		BZHIQ(n, t, t)
		KMOVW(t.As32(), reg.K1)
		return
	}
	p := GP64()
	LEAQ(masks.Offset(32), p)
	MOVQ(n, t)
	NEGQ(t)
	VMOVDQU(Mem{Base: p, Index: t, Scale: 4}, v)
}

// loadMasked and storeMasked go by setMask's mask.
func (s *isa) loadMasked(m Mem, v, mask reg.VecPhysical) {
	if s.wide {
		VMOVUPS_Z(m, reg.K1, v)
	} else {
		VMASKMOVPS(m, mask, v)
	}
}

func (s *isa) storeMasked(v reg.VecPhysical, m Mem, mask reg.VecPhysical) {
	if s.wide {
		VMOVUPS(v, reg.K1, m)
	} else {
		VMASKMOVPS(v, mask, m)
	}
}

// kernel adds to an m × n tile of C the product of k steps: in step i, m elements at x + i·xs times
// n at y + i·ys (strides in bytes). Without loadC in load the sums start from 0, not from C; with
// flushSums each sum below the least normal number becomes 0. n is in the last of nv vectors; y is
// read in whole vectors. Step i asks the L2 cache for the line at far + i·fs.
func (s *isa) kernel(m, nv int) {
	name := fmt.Sprintf("gemm%s%dx%d", s.tag, m, nv)
	TEXT(name, NOSPLIT,
		"func(k int, x *float32, xs int, y *float32, ys int, c *float32, ldc, n, load int,"+
			" far *float32, fs int)")
	Pragma("noescape")
	k, x, xs := Load(Param("k"), GP64()), Load(Param("x"), GP64()), Load(Param("xs"), GP64())
	y, ys := Load(Param("y"), GP64()), Load(Param("ys"), GP64())
	far, fs := Load(Param("far"), GP64()), Load(Param("fs"), GP64())
	ahead := GP64()
	LEAQ(Mem{Base: ys, Index: ys, Scale: 8}, ahead)
	acc := func(i, j int) reg.VecPhysical { return s.vec[i*nv+j] }
	b := s.vec[m*nv : m*nv+nv]
	if nv == wide && m == 1 {
		b = nil // each vector is used once
	}
	a := s.vec[m*nv+len(b):]
	if len(a) > 4 {
		a = a[:4]
	}
	mask := s.vec[len(s.vec)-1] // AVX2, where no step uses it

	// Touch C for the end, or read it.
	each := func(f func(i int, row Mem)) {
		c, ldc, c3 := Load(Param("c"), GP64()), Load(Param("ldc"), GP64()), GP64()
		LEAQ(Mem{Base: ldc, Index: ldc, Scale: 2}, c3)
		for i := range m {
			switch i % 3 {
			case 0:
				if i > 0 {
					ADDQ(c3, c)
				}
				f(i, Mem{Base: c})
			case 1:
				f(i, Mem{Base: c, Index: ldc, Scale: 1})
			case 2:
				f(i, Mem{Base: c, Index: ldc, Scale: 2})
			}
		}
	}
	edge := func() reg.GPVirtual { // what the last vector holds
		n := GP64()
		Load(Param("n"), n)
		if nv > 1 {
			SUBQ(U8(uint8(s.lanes*(nv-1))), n)
		}
		return n
	}
	ends := s.flush()
	load := GP64()
	Load(Param("load"), load)
	TESTQ(U32(loadC), load)
	JNE(LabelRef("load"))
	each(func(i int, row Mem) {
		for j := range nv {
			s.zero(acc(i, j))
		}
		PREFETCHT0(row)
		for o := 64; o < nv*s.size(); o += 64 {
			PREFETCHT0(row.Offset(o))
		}
	})
	JMP(LabelRef("start"))
	Label("load")
	n := edge()
	CMPQ(n, U8(uint8(s.lanes)))
	JNE(LabelRef("loadEdge"))
	each(func(i int, row Mem) {
		for j := range nv {
			VMOVUPS(row.Offset(j*s.size()), acc(i, j))
		}
	})
	JMP(LabelRef("start"))
	Label("loadEdge")
	s.setMask(n, mask)
	each(func(i int, row Mem) {
		for j := range nv - 1 {
			VMOVUPS(row.Offset(j*s.size()), acc(i, j))
		}
		s.loadMasked(row.Offset((nv-1)*s.size()), acc(i, nv-1), mask)
	})

	Label("start")
	step := func() {
		if len(b) == nv {
			for j := range nv {
				VMOVUPS(Mem{Base: y}.Offset(j*s.size()), b[j])
			}
		}
		for o := 0; o < nv*s.size(); o += 64 {
			PREFETCHT0(Mem{Base: y, Index: ahead, Scale: 1}.Offset(o))
		}
		for i := range m {
			t := a[i%len(a)]
			VBROADCASTSS(Mem{Base: x}.Offset(4*i), t)
			for j := range nv {
				switch {
				case s.pairs:
					vdpbf16ps(b[j], t, acc(i, j))
				case len(b) == 0:
					VFMADD231PS(Mem{Base: y}.Offset(j*s.size()), t, acc(i, j))
				default:
					VFMADD231PS(b[j], t, acc(i, j))
				}
			}
		}
		PREFETCHT1(Mem{Base: far})
		ADDQ(fs, far)
		ADDQ(xs, x)
		ADDQ(ys, y)
	}
	SUBQ(U8(4), k)
	JLT(LabelRef("rest"))
	Label("four")
	for range 4 {
		step()
	}
	SUBQ(U8(4), k)
	JGE(LabelRef("four"))
	Label("rest")
	ADDQ(U8(4), k)
	JEQ(LabelRef("store"))
	Label("one")
	step()
	DECQ(k)
	JNE(LabelRef("one"))

	Label("store")
	n = edge()
	CMPQ(n, U8(uint8(s.lanes)))
	JNE(LabelRef("storeEdge"))
	each(func(i int, row Mem) {
		for j := range nv {
			VMOVUPS(acc(i, j), row.Offset(j*s.size()))
		}
	})
	ends("")
	VZEROUPPER()
	RET()
	Label("storeEdge")
	s.setMask(n, mask)
	each(func(i int, row Mem) {
		for j := range nv - 1 {
			VMOVUPS(acc(i, j), row.Offset(j*s.size()))
		}
		s.storeMasked(acc(i, nv-1), row.Offset((nv-1)*s.size()), mask)
	})
	ends("Edge")
	VZEROUPPER()
	RET()
}

// transpose writes rows of at least k elements as columns: element i of row r goes to dst + i·ds +
// 4·r (ds in bytes). A vector's worth of rows, wherever they are; whole vectors are written in
// order of i, so that a narrower panel's later columns overwrite what its earlier ones spilled.
func (s *isa) transpose() {
	TEXT("gemmTranspose"+s.tag, NOSPLIT, "func(dst *float32, ds int, rows **float32, k int)")
	Pragma("noescape")
	dst, ds, rows, k := Load(Param("dst"), GP64()), Load(Param("ds"), GP64()),
		Load(Param("rows"), GP64()), Load(Param("k"), GP64())
	pos := GP64()
	XORQ(pos, pos)
	n := s.lanes
	v, w := s.vec[:n], s.vec[n:]
	row := func(i int) Mem {
		p := GP64()
		MOVQ(Mem{Base: rows}.Offset(8*i), p)
		return Mem{Base: p, Index: pos, Scale: 4}
	}
	mask := s.vec[n] // AVX2
	shuffleStore := func() {
		if s.wide {
			s.transpose16(v, w)
		} else {
			s.transpose8(v, w)
		}
	}
	Label("block")
	CMPQ(k, U8(uint8(n)))
	JLT(LabelRef("tail"))
	for i := range n {
		VMOVUPS(row(i), v[i])
	}
	shuffleStore()
	for i := range n {
		VMOVUPS(v[i], Mem{Base: dst})
		ADDQ(ds, dst)
	}
	ADDQ(U8(uint8(n)), pos)
	SUBQ(U8(uint8(n)), k)
	JNE(LabelRef("block"))
	Label("done")
	VZEROUPPER()
	RET()
	Label("tail")
	TESTQ(k, k)
	JEQ(LabelRef("done"))
	s.setMask(k.(reg.GPVirtual), mask)
	for i := range n {
		s.loadMasked(row(i), v[i], mask)
	}
	shuffleStore()
	for i := range n {
		VMOVUPS(v[i], Mem{Base: dst})
		ADDQ(ds, dst)
		DECQ(k)
		JEQ(LabelRef("done"))
	}
	JMP(LabelRef("done"))
}

// transpose8 leaves column i of the 8 × 8 block v in v[i].
func (s *isa) transpose8(v, t []reg.VecPhysical) {
	for i := 0; i < 8; i += 2 {
		VUNPCKLPS(v[i+1], v[i], t[i])
		VUNPCKHPS(v[i+1], v[i], t[i+1])
	}
	for h := 0; h < 8; h += 4 {
		VUNPCKLPD(t[h+2], t[h], v[h])
		VUNPCKHPD(t[h+2], t[h], v[h+1])
		VUNPCKLPD(t[h+3], t[h+1], v[h+2])
		VUNPCKHPD(t[h+3], t[h+1], v[h+3])
	}
	for i := range 4 {
		VPERM2F128(U8(0x20), v[i+4], v[i], t[i])
		VPERM2F128(U8(0x31), v[i+4], v[i], t[i+4])
	}
	for i := range 8 {
		VMOVAPS(t[i], v[i])
	}
}

// transpose16 leaves column i of the 16 × 16 block v in v[i].
func (s *isa) transpose16(v, t []reg.VecPhysical) {
	for i := 0; i < 16; i += 2 {
		VUNPCKLPS(v[i+1], v[i], t[i])
		VUNPCKHPS(v[i+1], v[i], t[i+1])
	}
	// v[4g+c]: of rows 4g to 4g+3, columns c, 4+c, 8+c and 12+c in the four parts of 128 bits.
	for h := 0; h < 16; h += 4 {
		VUNPCKLPD(t[h+2], t[h], v[h])
		VUNPCKHPD(t[h+2], t[h], v[h+1])
		VUNPCKLPD(t[h+3], t[h+1], v[h+2])
		VUNPCKHPD(t[h+3], t[h+1], v[h+3])
	}
	for c := range 4 {
		VSHUFF32X4(U8(0x88), v[4+c], v[c], t[c])
		VSHUFF32X4(U8(0xdd), v[4+c], v[c], t[4+c])
		VSHUFF32X4(U8(0x88), v[12+c], v[8+c], t[8+c])
		VSHUFF32X4(U8(0xdd), v[12+c], v[8+c], t[12+c])
	}
	for c := range 4 {
		VSHUFF32X4(U8(0x88), t[8+c], t[c], v[c])
		VSHUFF32X4(U8(0xdd), t[8+c], t[c], v[8+c])
		VSHUFF32X4(U8(0x88), t[12+c], t[4+c], v[4+c])
		VSHUFF32X4(U8(0xdd), t[12+c], t[4+c], v[12+c])
	}
}

// copyPanels cuts k rows of n elements, ld bytes apart, into panels of two vectors, ps bytes apart,
// with zeros after the last row's end.
func (s *isa) copyPanels() {
	TEXT("gemmPanels"+s.tag, NOSPLIT, "func(dst *float32, ps int, src *float32, ld, k, n int)")
	Pragma("noescape")
	dst, ps, src := Load(Param("dst"), GP64()), Load(Param("ps"), GP64()),
		Load(Param("src"), GP64())
	ld, k, n := Load(Param("ld"), GP64()), Load(Param("k"), GP64()), Load(Param("n"), GP64())
	v0, v1, none, mask := s.vec[0], s.vec[1], s.vec[2], s.vec[3]
	s.zero(none)
	left := GP64() // in the partial vector
	MOVQ(n, left)
	ANDQ(U8(uint8(s.lanes-1)), left)
	s.setMask(left, mask)
	d, c, m := GP64(), GP64(), GP64()
	Label("row")
	MOVQ(dst, d)
	MOVQ(src, c)
	MOVQ(n, m)
	SUBQ(U8(uint8(2*s.lanes)), m)
	JLT(LabelRef("tail"))
	Label("panel")
	VMOVUPS(Mem{Base: c}, v0)
	VMOVUPS(Mem{Base: c}.Offset(s.size()), v1)
	VMOVUPS(v0, Mem{Base: d})
	VMOVUPS(v1, Mem{Base: d}.Offset(s.size()))
	ADDQ(U8(2*s.size()-64), c) // 128 does not fit a signed byte
	ADDQ(U8(64), c)
	ADDQ(ps, d)
	SUBQ(U8(uint8(2*s.lanes)), m)
	JGE(LabelRef("panel"))
	Label("tail")
	ADDQ(U8(uint8(2*s.lanes)), m)
	JEQ(LabelRef("next"))
	CMPQ(m, U8(uint8(s.lanes)))
	JLT(LabelRef("first"))
	VMOVUPS(Mem{Base: c}, v0)
	VMOVUPS(v0, Mem{Base: d})
	VMOVUPS(none, Mem{Base: d}.Offset(s.size()))
	TESTQ(left, left)
	JEQ(LabelRef("next"))
	s.loadMasked(Mem{Base: c}.Offset(s.size()), v1, mask)
	VMOVUPS(v1, Mem{Base: d}.Offset(s.size()))
	JMP(LabelRef("next"))
	Label("first")
	s.loadMasked(Mem{Base: c}, v0, mask)
	VMOVUPS(v0, Mem{Base: d})
	VMOVUPS(none, Mem{Base: d}.Offset(s.size()))
	Label("next")
	ADDQ(U32(uint32(2*s.size())), dst)
	ADDQ(ld, src)
	DECQ(k)
	JNE(LabelRef("row"))
	VZEROUPPER()
	RET()
}

// copyColumns cuts k rows of n elements, ld bytes apart, into panels of the tile's rows, ps bytes
// apart. A vector is written for each, so that a later step overwrites what an earlier one spilled.
func (s *isa) copyColumns() {
	TEXT("gemmColumns"+s.tag, NOSPLIT, "func(dst *float32, ps int, src *float32, ld, k, n int)")
	Pragma("noescape")
	dst, ps, src := Load(Param("dst"), GP64()), Load(Param("ps"), GP64()),
		Load(Param("src"), GP64())
	ld, k, n := Load(Param("ld"), GP64()), Load(Param("k"), GP64()), Load(Param("n"), GP64())
	w := s.rows[len(s.rows)-1]
	v, mask := s.vec[0], s.vec[1]
	full := GP64()
	MOVQ(U32(uint32(w)), full)
	s.setMask(full, mask)
	whole := mask
	last, lastK := s.vec[2], reg.K2
	// The last panel's mask.
	left, q := GP64(), GP64()
	MOVQ(n, q)
	Label("mod")
	MOVQ(q, left)
	SUBQ(U8(uint8(w)), q)
	JG(LabelRef("mod"))
	if s.wide {
		t := GP64()
		MOVQ(I32(-1), t)
		BZHIQ(left, t, t)
		KMOVW(t.As32(), lastK)
	} else {
		s.setMask(left, last)
	}
	d, c, m := GP64(), GP64(), GP64()
	Label("row")
	MOVQ(dst, d)
	MOVQ(src, c)
	MOVQ(n, m)
	SUBQ(U8(uint8(w)), m)
	JLE(LabelRef("tail"))
	Label("panel")
	s.loadMasked(Mem{Base: c}, v, whole)
	VMOVUPS(v, Mem{Base: d})
	ADDQ(U8(uint8(4*w)), c)
	ADDQ(ps, d)
	SUBQ(U8(uint8(w)), m)
	JG(LabelRef("panel"))
	Label("tail")
	if s.wide {
		VMOVUPS_Z(Mem{Base: c}, lastK, v)
	} else {
		VMASKMOVPS(Mem{Base: c}, last, v)
	}
	VMOVUPS(v, Mem{Base: d})
	ADDQ(U8(uint8(4*w)), dst)
	ADDQ(ld, src)
	DECQ(k)
	JNE(LabelRef("row"))
	VZEROUPPER()
	RET()
}

// finish adds a bias, if there is one, and cuts at 0, if relu: n elements. NaN stays NaN.
func (s *isa) finish() {
	TEXT("gemmFinish"+s.tag, NOSPLIT, "func(c, bias *float32, n, relu int)")
	Pragma("noescape")
	c, bias, n, relu := Load(Param("c"), GP64()), Load(Param("bias"), GP64()),
		Load(Param("n"), GP64()), Load(Param("relu"), GP64())
	v, w, none, mask, cmp := s.vec[0], s.vec[1], s.vec[2], s.vec[3], s.vec[4]
	s.zero(none)
	pos := GP64()
	XORQ(pos, pos)
	cAt, bAt := Mem{Base: c, Index: pos, Scale: 4}, Mem{Base: bias, Index: pos, Scale: 4}
	body := func(tag string, load func(Mem, reg.VecPhysical), store func(reg.VecPhysical, Mem)) {
		load(cAt, v)
		TESTQ(bias, bias)
		JEQ(LabelRef("relu" + tag))
		load(bAt, w)
		VADDPS(w, v, v)
		Label("relu" + tag)
		TESTQ(relu, relu)
		JEQ(LabelRef("store" + tag))
		const notLessOrEqual = 0x16 // true for NaN
		if s.wide {
			VCMPPS(U8(notLessOrEqual), none, v, reg.K2)
			VMOVAPS_Z(v, reg.K2, v)
		} else {
			VCMPPS(U8(notLessOrEqual), none, v, cmp)
			VANDPS(cmp, v, v)
		}
		Label("store" + tag)
		store(v, cAt)
	}
	SUBQ(U8(uint8(s.lanes)), n)
	JLT(LabelRef("tail"))
	Label("loop")
	body("", func(m Mem, v reg.VecPhysical) { VMOVUPS(m, v) },
		func(v reg.VecPhysical, m Mem) { VMOVUPS(v, m) })
	ADDQ(U8(uint8(s.lanes)), pos)
	SUBQ(U8(uint8(s.lanes)), n)
	JGE(LabelRef("loop"))
	Label("tail")
	ADDQ(U8(uint8(s.lanes)), n)
	JEQ(LabelRef("done"))
	s.setMask(n.(reg.GPVirtual), mask)
	body("Tail", func(m Mem, v reg.VecPhysical) { s.loadMasked(m, v, mask) },
		func(v reg.VecPhysical, m Mem) { s.storeMasked(v, m, mask) })
	Label("done")
	VZEROUPPER()
	RET()
}

// dropout zeroes or scales n elements, a multiple of four vectors, by words of Philox4x32-10 with
// the key and counters at p (two words, then four). The counter's first word goes up by one for
// every four elements; an element is dropped where its word >> 8 is below limit.
func (s *isa) dropout() {
	TEXT("gemmDropout"+s.tag, NOSPLIT,
		"func(c *float32, n int, p *uint32, limit uint32, scale float32)")
	Pragma("noescape")
	c, n, p := Load(Param("c"), GP64()), Load(Param("n"), GP64()), Load(Param("p"), GP64())
	// Lane l makes the words of element group (l&3)·lanes/4 + l>>2: then two rounds of unpacking
	// put them in order.
	lane := GLOBL("gemmLanes"+s.tag, 8|16)
	for l := range s.lanes {
		DATA(4*l, U32((l&3)*s.lanes/4+l>>2))
	}
	x := s.vec[:4]
	e, o, e2, o2 := s.vec[4], s.vec[5], s.vec[6], s.vec[7]
	m0, m1, base, limit, scale, key := s.vec[8], s.vec[9], s.vec[10], s.vec[11], s.vec[12],
		s.vec[13]
	t, u := s.vec[14], s.vec[15]
	broadcast := func(v uint32, to reg.VecPhysical) {
		r, q := GP32(), xmm(to)
		MOVL(U32(v), r)
		VMOVD(r, q)
		VPBROADCASTD(q, to)
	}
	broadcast(0xD2511F53, m0)
	broadcast(0xCD9E8D57, m1)
	l := GP32()
	Load(Param("limit"), l)
	VMOVD(l, xmm(limit))
	VPBROADCASTD(xmm(limit), limit)
	sc, _ := Param("scale").Resolve()
	VBROADCASTSS(sc.Addr, scale)
	VPBROADCASTD(Mem{Base: p}.Offset(8), base)
	if s.wide {
		VPADDD(lane, base, base)
		r := GP32()
		MOVL(U32(0xaaaa), r)
		KMOVW(r, reg.K1) // odd
		MOVL(U32(0x5555), r)
		KMOVW(r, reg.K2)
	} else {
		VPADDD(lane, base, base)
	}
	xor := func(a, b, d reg.VecPhysical) {
		if s.wide {
			VPXORD(a, b, d)
		} else {
			VPXOR(a, b, d)
		}
	}
	k0, k1 := GP32(), GP32()
	Label("loop")
	MOVL(Mem{Base: p}, k0)
	MOVL(Mem{Base: p}.Offset(4), k1)
	if s.wide {
		VMOVDQA32(base, x[0])
	} else {
		VMOVDQA(base, x[0])
	}
	for i := 1; i < 4; i++ {
		VPBROADCASTD(Mem{Base: p}.Offset(8+4*i), x[i])
	}
	// mulHiLo leaves the products' high words in o and the low ones in e.
	mulHiLo := func(v, m, e, o reg.VecPhysical) {
		VPSRLQ(U8(32), v, t)
		VPMULUDQ(m, v, e)
		VPMULUDQ(m, t, o)
		if s.wide {
			VMOVAPS(e, u)
			VMOVSLDUP(o, reg.K1, e)
			VMOVSHDUP(u, reg.K2, o)
		} else {
			VMOVSHDUP(e, t)
			VMOVSLDUP(o, u)
			VPBLENDD(U8(0xaa), u, e, e)
			VPBLENDD(U8(0xaa), o, t, o)
		}
	}
	for range 10 {
		mulHiLo(x[0], m0, e, o)   // h0 in o, l0 in e
		mulHiLo(x[2], m1, e2, o2) // h1 in o2, l1 in e2
		VMOVD(k0, xmm(key))
		VPBROADCASTD(xmm(key), key)
		xor(x[1], o2, x[0])
		xor(key, x[0], x[0])
		VMOVD(k1, xmm(key))
		VPBROADCASTD(xmm(key), key)
		xor(x[3], o, x[2])
		xor(key, x[2], x[2])
		if s.wide {
			VMOVDQA32(e2, x[1])
			VMOVDQA32(e, x[3])
		} else {
			VMOVDQA(e2, x[1])
			VMOVDQA(e, x[3])
		}
		ADDL(U32(0x9E3779B9), k0)
		ADDL(U32(0xBB67AE85), k1)
	}
	VUNPCKLPS(x[1], x[0], e)
	VUNPCKHPS(x[1], x[0], o)
	VUNPCKLPS(x[3], x[2], e2)
	VUNPCKHPS(x[3], x[2], o2)
	VUNPCKLPD(e2, e, x[0])
	VUNPCKHPD(e2, e, x[1])
	VUNPCKLPD(o2, o, x[2])
	VUNPCKHPD(o2, o, x[3])
	for i := range 4 {
		VPSRLD(U8(8), x[i], x[i])
		VPSUBD(limit, x[i], x[i])
		VPSRAD(U8(31), x[i], x[i]) // ones where dropped
		VMULPS(Mem{Base: c}.Offset(i*s.size()), scale, t)
		if s.wide {
			VPANDND(t, x[i], t)
		} else {
			VPANDN(t, x[i], t)
		}
		VMOVUPS(t, Mem{Base: c}.Offset(i*s.size()))
	}
	broadcast(uint32(s.lanes), t)
	VPADDD(t, base, base)
	ADDQ(U32(uint32(4*s.size())), c)
	SUBQ(U8(uint8(4*s.lanes)), n)
	JNE(LabelRef("loop"))
	VZEROUPPER()
	RET()
}

// peak does n times one fused multiply-add (or step of a pair) on each register but the last two,
// none of which waits for another: what the processor can do at most.
func (s *isa) peak() {
	TEXT("gemmPeak"+s.tag, NOSPLIT, "func(n int)")
	n := Load(Param("n"), GP64())
	for _, v := range s.vec {
		s.zero(v)
	}
	Label("loop")
	last := len(s.vec) - 2
	for _, v := range s.vec[:last] {
		if s.pairs {
			vdpbf16ps(s.vec[last], s.vec[last+1], v)
		} else {
			VFMADD231PS(s.vec[last], s.vec[last+1], v)
		}
	}
	DECQ(n)
	JNE(LabelRef("loop"))
	VZEROUPPER()
	RET()
}

// xmm is the low part of v.
func xmm(v reg.VecPhysical) reg.Register { return v.AsX() }
